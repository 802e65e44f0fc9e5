//! The gate: the rights of a plan against the capability of a tool. Pure, so that it can be read
//! and tested whole.

use crate::descriptor::{BoundResource, ToolDescriptor, ToolFilter};
use crate::error::ToolRuntimeError;

/// What a plan may do. A child has the meet of its own and its parent's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rights {
    /// Writers are refused.
    pub(crate) read_only: bool,
    /// Writers need a checkpoint.
    pub(crate) checkpoints: bool,
    /// Unsafe tools need no approval.
    pub(crate) allow_unsafe: bool,
}

impl Rights {
    /// What is asked for, on top of what holds by default.
    pub(crate) fn or_default(self, defaults: Self) -> Self {
        Self {
            read_only: self.read_only || defaults.read_only,
            checkpoints: self.checkpoints || defaults.checkpoints,
            allow_unsafe: self.allow_unsafe || defaults.allow_unsafe,
        }
    }

    /// Never more than either.
    pub(crate) fn meet(self, other: Self) -> Self {
        Self {
            read_only: self.read_only || other.read_only,
            checkpoints: self.checkpoints || other.checkpoints,
            allow_unsafe: self.allow_unsafe && other.allow_unsafe,
        }
    }
}

/// What a host says about tools beyond their capability. A child plan has its parent's too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// Only tools that one of these fits.
    Only(Vec<ToolFilter>),
    /// None of these.
    Deny(ToolFilter),
    /// Somebody must approve these.
    Ask(ToolFilter),
}

/// Proof that the gate let a tool pass. The next room needs it.
#[derive(Debug)]
#[must_use]
pub(crate) struct Admitted {
    /// Why somebody must approve, where somebody must.
    pub(crate) needs_approval: Option<&'static str>,
}

/// The gate. A tool that declares neither `read_only` nor `writes` is taken for a writer.
#[inline]
pub(crate) fn admit(
    rights: Rights,
    rules: &[Rule],
    tool: &ToolDescriptor,
    resources: &[BoundResource],
) -> Result<Admitted, Box<ToolRuntimeError>> {
    let capability = tool.capability;
    let writer = capability.writes || !capability.read_only;
    // Most plans have nothing to refuse by.
    if !rules.is_empty()
        || !tool.resources.is_empty()
        || (writer && (rights.read_only || rights.checkpoints))
    {
        refused(rights, rules, tool, resources)?;
    }
    let needs_approval = if capability.human_approval_required {
        Some("it declares `human_approval_required`")
    } else if capability.is_unsafe && !rights.allow_unsafe {
        Some("it declares `unsafe` and the plan does not allow unsafe tools")
    } else if asks(rules, tool) {
        Some("a rule of the plan asks for it")
    } else {
        None
    };
    Ok(Admitted { needs_approval })
}

fn asks(rules: &[Rule], tool: &ToolDescriptor) -> bool {
    rules.iter().any(|rule| matches!(rule, Rule::Ask(filter) if filter.fits(tool)))
}

/// Whether anything refuses the tool.
#[cold]
fn refused(
    rights: Rights,
    rules: &[Rule],
    tool: &ToolDescriptor,
    resources: &[BoundResource],
) -> Result<(), Box<ToolRuntimeError>> {
    let capability = tool.capability;
    let denied =
        |reason: String| Err(Box::new(ToolRuntimeError::denied(tool.name.as_str(), reason)));
    for rule in rules {
        match rule {
            Rule::Only(filters) if !filters.iter().any(|filter| filter.fits(tool)) => {
                return denied("the plan allows only certain tools, and not this one".into());
            }
            Rule::Deny(filter) if filter.fits(tool) => {
                return denied("a rule of the plan denies it".into());
            }
            _ => {}
        }
    }
    let writer = capability.writes || !capability.read_only;
    if writer && rights.read_only {
        let declared =
            if capability.writes { "declares `writes`" } else { "does not declare `read_only`" };
        return denied(format!("the plan is read-only and the tool {declared}"));
    }
    if writer && rights.checkpoints {
        let reason = if capability.checkpointable {
            "the plan requires checkpoints and this runtime has no checkpointer"
        } else {
            "the plan requires checkpoints and the tool is not `checkpointable`"
        };
        let (tool, reason) = (tool.name.clone(), reason.into());
        return Err(Box::new(ToolRuntimeError::CheckpointRequired { tool, reason }));
    }
    for slot in tool.resources.iter().filter(|slot| slot.required) {
        let is_bound = |bound: &BoundResource| {
            bound.name == slot.name && bound.resource_type == slot.resource_type
        };
        if !resources.iter().any(is_bound) {
            let (name, kind) = (&slot.name, &slot.resource_type);
            return denied(format!(
                "it needs the resource `{name}` of type `{kind}`, which the plan does not bind"
            ));
        }
    }
    Ok(())
}
