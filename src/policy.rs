//! The gate: the rights of a plan against the capability of a tool. Pure, so that it can be read
//! and tested whole.

use crate::descriptor::{BoundResource, ToolDescriptor};
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
    /// Never more than either.
    pub(crate) fn meet(self, other: Self) -> Self {
        Self {
            read_only: self.read_only || other.read_only,
            checkpoints: self.checkpoints || other.checkpoints,
            allow_unsafe: self.allow_unsafe && other.allow_unsafe,
        }
    }
}

/// Proof that the gate let a tool pass. The next room needs it.
#[derive(Debug)]
#[must_use]
pub(crate) struct Admitted {
    /// Why a person must approve, where one must.
    needs_approval: Option<&'static str>,
}

/// Proof that a tool may be activated and run: nobody has to be asked, or somebody was.
#[derive(Debug)]
#[must_use]
pub(crate) struct Approved(());

/// The gate. A tool that declares neither `read_only` nor `writes` is taken for a writer.
pub(crate) fn admit(
    rights: Rights,
    tool: &ToolDescriptor,
    resources: &[BoundResource],
) -> Result<Admitted, ToolRuntimeError> {
    let capability = tool.capability;
    let denied =
        |reason: String| ToolRuntimeError::AccessDenied { tool: tool.name.to_string(), reason };
    let writer = capability.writes || !capability.read_only;
    if writer && rights.read_only {
        let declared =
            if capability.writes { "declares `writes`" } else { "does not declare `read_only`" };
        return Err(denied(format!("the plan is read-only and the tool {declared}")));
    }
    if writer && rights.checkpoints {
        let reason = if capability.checkpointable {
            "the plan requires checkpoints and this runtime has no checkpointer"
        } else {
            "the plan requires checkpoints and the tool is not `checkpointable`"
        };
        return Err(ToolRuntimeError::CheckpointRequired {
            tool: tool.name.clone(),
            reason: reason.into(),
        });
    }
    for slot in tool.resources.iter().filter(|slot| slot.required) {
        if !resources
            .iter()
            .any(|bound| bound.name == slot.name && bound.resource_type == slot.resource_type)
        {
            let (name, kind) = (&slot.name, &slot.resource_type);
            return Err(denied(format!(
                "it needs the resource `{name}` of type `{kind}`, which the plan does not bind"
            )));
        }
    }
    let needs_approval = if capability.human_approval_required {
        Some("it declares `human_approval_required`")
    } else if capability.is_unsafe && !rights.allow_unsafe {
        Some("it declares `unsafe` and the plan does not allow unsafe tools")
    } else {
        None
    };
    Ok(Admitted { needs_approval })
}

/// Asks for the approval that the gate found to be needed. Without an approver that is a refusal,
/// never a pass.
pub(crate) fn approve(
    admitted: &Admitted,
    tool: &ToolDescriptor,
) -> Result<Approved, ToolRuntimeError> {
    match admitted.needs_approval {
        None => Ok(Approved(())),
        Some(reason) => Err(ToolRuntimeError::ApprovalRequired {
            tool: tool.name.clone(),
            reason: reason.into(),
        }),
    }
}
