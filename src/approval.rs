//! Asking somebody before a tool runs, and binding the answer to exactly what was asked.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use serde::Serialize;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::canonical::canonical;
use crate::contain::{Contained, Foreign};
use crate::context::PlanId;
use crate::descriptor::{ToolCapability, ToolDescriptor};
use crate::name::ToolName;
use crate::tool::ToolFailure;

pub(crate) mod channel;
pub(crate) mod terminal;

/// Whoever decides about calls that need an approval: a person at a terminal, a queue, a rule.
///
/// It is asked only for calls that passed the gate and whose input fits the schema, in the task of
/// the call; other calls of the plan go on. The wait does not count as time of the call. It ends
/// with the call, the plan, and the plan's
/// [`approval_wait`](crate::PlanOptions::approval_wait): the future is dropped then.
///
/// # Examples
///
/// ```
/// use toolscope::{ApprovalRequest, Approver, Decision, ToolFailure, async_trait};
///
/// struct OfficeHours;
///
/// #[async_trait]
/// impl Approver for OfficeHours {
///     async fn decide(&self, request: &ApprovalRequest) -> Result<Decision, ToolFailure> {
///         if request.input["amount"].as_i64() <= Some(100) {
///             return Ok(Decision::Once);
///         }
///         Ok(Decision::deny("amounts over 100 are decided by telephone"))
///     }
/// }
/// ```
#[async_trait]
pub trait Approver: Send + Sync + 'static {
    /// Decides about one call. An error or a panic refuses it.
    async fn decide(&self, request: &ApprovalRequest) -> Result<Decision, ToolFailure>;
}

#[async_trait]
impl<T: Approver + ?Sized> Approver for Arc<T> {
    async fn decide(&self, request: &ApprovalRequest) -> Result<Decision, ToolFailure> {
        (**self).decide(request).await
    }
}

/// What somebody is asked to approve: this tool, as it is defined now, with this input.
#[derive(Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ApprovalRequest {
    /// The plan.
    pub plan_id: PlanId,
    /// The call within its plan.
    pub call_id: u64,
    /// The tool.
    pub tool: ToolName,
    /// What the tool says it does. It comes from the tool's source, and proves nothing.
    pub description: String,
    /// What the tool declares it may do.
    pub capability: ToolCapability,
    /// Why somebody has to approve.
    pub reason: String,
    /// The input; null where the host activates the tool by hand.
    pub input: Value,
    /// SHA-256 over the tool's definition and the input with its keys in order, as 64 hexadecimal
    /// digits: the same for the same call, in every process.
    pub fingerprint: String,
    /// What the host said about the plan: who it is for.
    pub metadata: Map<String, Value>,
}

impl fmt::Debug for ApprovalRequest {
    /// Without the input: a log must not have it by accident.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApprovalRequest")
            .field("plan_id", &self.plan_id)
            .field("call_id", &self.call_id)
            .field("tool", &self.tool)
            .field("reason", &self.reason)
            .field("fingerprint", &self.fingerprint)
            .finish_non_exhaustive()
    }
}

/// What was decided about a call.
#[derive(Clone, PartialEq)]
#[non_exhaustive]
pub enum Decision {
    /// This call.
    Once,
    /// This call, and in the same plan every further one of the same tool with an equal input.
    ForPlan,
    /// This call, and in the same plan every further one of the same tool, whatever its input. The
    /// schema and the plan's rights are still checked; a tool whose definition changes is asked
    /// about again.
    ToolForPlan,
    /// No. The reason is for the model to read.
    #[non_exhaustive]
    Deny {
        /// Why.
        reason: String,
    },
    /// This call with another input. The new input goes by the gate and the schema again.
    #[non_exhaustive]
    Change {
        /// The input to use.
        input: Value,
    },
}

impl fmt::Debug for Decision {
    /// Without an input: a log must not have it by accident.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Once => f.write_str("Once"),
            Self::ForPlan => f.write_str("ForPlan"),
            Self::ToolForPlan => f.write_str("ToolForPlan"),
            Self::Deny { reason } => f.debug_struct("Deny").field("reason", reason).finish(),
            Self::Change { .. } => f.debug_struct("Change").finish_non_exhaustive(),
        }
    }
}

impl Decision {
    /// No, and why.
    pub fn deny(reason: impl Into<String>) -> Self {
        Self::Deny { reason: reason.into() }
    }

    /// Yes, with this input instead.
    pub fn change(input: Value) -> Self {
        Self::Change { input }
    }
}

// ===== what the path of a call uses =====

/// Proof that nobody has to be asked, or that somebody was.
#[derive(Debug)]
#[must_use]
pub(crate) struct Approved(());

/// What came of asking.
pub(crate) enum Asked {
    Approved(Approved),
    /// Back to the gate with this input, which is approved.
    Changed(Value, Fingerprint),
    /// Why not, for the model.
    Denied(String),
}

/// An approver, shared by plans; its destructor is contained.
#[derive(Clone)]
pub(crate) struct SharedApprover(Arc<Foreign<Box<dyn Approver>>>);

impl SharedApprover {
    pub(crate) fn new(approver: impl Approver) -> Self {
        Self(Arc::new(Foreign::new(Box::new(approver))))
    }

    /// Asks. Whatever goes wrong refuses; the error says what, for an operator.
    pub(crate) async fn ask(&self, request: &ApprovalRequest) -> Result<Decision, String> {
        match Contained::new(|| self.0.decide(request)).await {
            Ok(Ok(decision)) => Ok(decision),
            Ok(Err(failure)) => Err(format!("the approver failed: {failure}")),
            Err(panicked) => Err(format!("the approver panicked: {}", panicked.text)),
        }
    }
}

impl fmt::Debug for SharedApprover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedApprover")
    }
}

/// A digest of a tool's definition, or of that and an input.
pub(crate) type Fingerprint = [u8; 32];

/// The decisions that hold for the rest of a plan.
#[derive(Debug, Default)]
pub(crate) struct Remembered(HashSet<Fingerprint>);

impl Remembered {
    /// Whether a call needs no asking: it is the one that was `granted`, or it, or its tool, was
    /// approved for the plan.
    pub(crate) fn covers(
        &self,
        call: &Fingerprint,
        definition: &Fingerprint,
        granted: Option<Fingerprint>,
    ) -> Option<Approved> {
        let covered =
            granted.as_ref() == Some(call) || self.0.contains(call) || self.0.contains(definition);
        covered.then_some(Approved(()))
    }

    pub(crate) fn add(&mut self, fingerprint: Fingerprint) {
        self.0.insert(fingerprint);
    }
}

/// Nobody has to be asked.
pub(crate) fn unasked() -> Approved {
    Approved(())
}

/// What a decision means, and what of it is to be remembered.
pub(crate) fn decided(
    decision: Decision,
    call: Fingerprint,
    definition: Fingerprint,
) -> (Asked, Option<Fingerprint>) {
    match decision {
        Decision::Once => (Asked::Approved(Approved(())), None),
        Decision::ForPlan => (Asked::Approved(Approved(())), Some(call)),
        Decision::ToolForPlan => (Asked::Approved(Approved(())), Some(definition)),
        Decision::Deny { reason } => (Asked::Denied(reason), None),
        Decision::Change { input } => {
            let changed = fingerprint(&definition, &input);
            (Asked::Changed(input, changed), None)
        }
    }
}

/// What a tool is: all that its source says of it.
pub(crate) fn definition_digest(descriptor: &ToolDescriptor) -> Fingerprint {
    // A descriptor always serialises.
    let definition = serde_json::to_value(descriptor).unwrap_or_default();
    let digest = Sha256::new_with_prefix(b"toolscope definition 1\n");
    digest.chain_update(canonical(&definition)).finalize().into()
}

/// One call: a definition and an input.
pub(crate) fn fingerprint(definition: &Fingerprint, input: &Value) -> Fingerprint {
    let digest = Sha256::new_with_prefix(b"toolscope call 1\n");
    digest.chain_update(definition).chain_update(canonical(input)).finalize().into()
}

pub(crate) fn hexadecimal(fingerprint: &Fingerprint) -> String {
    let digit = |half: u8| char::from_digit(half.into(), 16).unwrap_or_default();
    fingerprint.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}
