//! What can go wrong, for the host to branch on, for an operator to read and for a model to correct
//! itself by.
//!
//! A `Display` text is one level, in lower case; `source()` carries the rest. Its wording is no
//! contract, [`OutcomeCode`] is.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::contain::Foreign;
use crate::limit::{MOST_ERROR_TEXT, cut_plain};
use crate::name::ToolName;

/// How a call ended, as stable text. The table of outcomes is in the crate's documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum OutcomeCode {
    /// The tool gave a result.
    Ok,
    /// The input is no object, or breaks the schema.
    InvalidInput,
    /// The tool returned an error.
    Execution,
    /// The tool panicked.
    Panic,
    /// The call's deadline passed while the tool ran.
    Timeout,
    /// The call was sent and the answer was lost: it may have been carried out.
    OutcomeUnknown,
    /// The output cannot be JSON, or breaks the schema where that is refused.
    InvalidOutput,
    /// The call, its plan or a parent of that was cancelled.
    Cancelled,
    /// The tool was deactivated by the host, or says that something of its own is not activated.
    NotActivated,
    /// The call's deadline passed while the tool was being activated.
    ActivationTimeout,
    /// No tool of that name.
    NotFound,
    /// The plan's rights do not allow the tool.
    AccessDenied,
    /// The plan asks for checkpoints and the tool cannot have one.
    CheckpointRequired,
    /// A person must approve, and nobody is there to ask.
    ApprovalRequired,
    /// A person refused.
    ApprovalDenied,
    /// A quota of the plan is used up.
    LimitExceeded,
    /// Too many calls at once, for too long.
    Concurrency,
    /// The tool could not be activated.
    Activation,
    /// The tool changed since the plan activated it.
    DefinitionChanged,
    /// The plan had ended.
    PlanEnded,
    /// The runtime was shutting down.
    ShutDown,
    /// The caller dropped the call.
    Abandoned,
}

impl OutcomeCode {
    /// The stable text, as in traces and metadata.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::InvalidInput => "invalid_input",
            Self::Execution => "execution",
            Self::Panic => "panic",
            Self::Timeout => "timeout",
            Self::OutcomeUnknown => "outcome_unknown",
            Self::InvalidOutput => "invalid_output",
            Self::Cancelled => "cancelled",
            Self::NotActivated => "not_activated",
            Self::ActivationTimeout => "activation_timeout",
            Self::NotFound => "not_found",
            Self::AccessDenied => "access_denied",
            Self::CheckpointRequired => "checkpoint_required",
            Self::ApprovalRequired => "approval_required",
            Self::ApprovalDenied => "approval_denied",
            Self::LimitExceeded => "limit_exceeded",
            Self::Concurrency => "concurrency",
            Self::Activation => "activation",
            Self::DefinitionChanged => "definition_changed",
            Self::PlanEnded => "plan_ended",
            Self::ShutDown => "shut_down",
            Self::Abandoned => "abandoned",
        }
    }
}

impl fmt::Display for OutcomeCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Why a plan ended. The first reason wins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum EndReason {
    /// [`Plan::finish`](crate::Plan::finish).
    Finished,
    /// [`Plan::fail`](crate::Plan::fail).
    Failed,
    /// [`PlanHandle::cancel`](crate::PlanHandle::cancel), the token given at `begin`, or the parent
    /// was cancelled.
    Cancelled,
    /// The plan's own deadline.
    DeadlinePassed,
    /// The [`Plan`](crate::Plan) was dropped.
    Dropped,
    /// The [`Plan`](crate::Plan) was dropped by a panic.
    Panicked,
    /// The plan that this one is a child of ended.
    ParentEnded,
    /// The runtime was shut down or dropped.
    ShutDown,
}

impl EndReason {
    /// The stable text, as when serialised.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
            Self::DeadlinePassed => "deadline_passed",
            Self::Dropped => "dropped",
            Self::Panicked => "panicked",
            Self::ParentEnded => "parent_ended",
            Self::ShutDown => "shut_down",
        }
    }
}

impl fmt::Display for EndReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Finished => "finished",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
            Self::DeadlinePassed => "its deadline passed",
            Self::Dropped => "dropped",
            Self::Panicked => "dropped by a panic",
            Self::ParentEnded => "its parent ended",
            Self::ShutDown => "the runtime shut down",
        })
    }
}

/// A call was cancelled: it, its plan or a parent of that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the call was cancelled")]
#[non_exhaustive]
pub struct ToolCancelled;

/// The `Err` of a call: what the host must know. What the tool or the model did wrong is a
/// [`ToolResult`](crate::ToolResult) with `success: false`.
///
/// # Examples
///
/// ```
/// use toolscope::{ActivationPhase, CallError, OutcomeCode, ToolRuntimeError};
///
/// fn may_try_again(error: &CallError) -> bool {
///     match error {
///         CallError::Cancelled(_) => false,
///         CallError::Runtime(ToolRuntimeError::Activation(error)) => {
///             error.phase() != ActivationPhase::Exhausted
///         }
///         CallError::Runtime(error) => error.code() == OutcomeCode::Concurrency,
///         _ => false,
///     }
/// }
/// # let _ = may_try_again;
/// ```
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The call was cancelled.
    #[error(transparent)]
    Cancelled(#[from] ToolCancelled),
    /// The runtime refused or could not carry out the call.
    #[error(transparent)]
    Runtime(#[from] ToolRuntimeError),
}

impl From<Box<ToolRuntimeError>> for CallError {
    fn from(error: Box<ToolRuntimeError>) -> Self {
        Self::Runtime(*error)
    }
}

impl CallError {
    /// The stable code.
    pub fn code(&self) -> OutcomeCode {
        match self {
            Self::Cancelled(_) => OutcomeCode::Cancelled,
            Self::Runtime(error) => error.code(),
        }
    }

    /// What to tell a model: see [`ToolRuntimeError::to_model_text`].
    pub fn to_model_text(&self) -> String {
        format!("error ({}): {}", self.code(), self.told())
    }

    /// That text without its code.
    pub(crate) fn told(&self) -> String {
        match self {
            Self::Cancelled(error) => error.to_string(),
            Self::Runtime(error) => error.told(),
        }
    }
}

/// What the runtime refuses or cannot do.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ToolRuntimeError {
    /// The plan had ended.
    #[error("the plan has ended: {reason}")]
    #[non_exhaustive]
    PlanEnded {
        /// Why.
        reason: EndReason,
    },
    /// The runtime is shutting down or gone.
    #[error("the runtime is shutting down")]
    ShutDown,
    /// No tool of that name in the plan's snapshot of the registry.
    #[error("there is no tool `{name}`{}", suggestion(nearest))]
    #[non_exhaustive]
    NotFound {
        /// What was asked for.
        name: String,
        /// The registered names that are nearest to it.
        nearest: Vec<ToolName>,
    },
    /// The plan's rights do not allow the tool.
    #[error("`{tool}` is not allowed in this plan: {reason}")]
    #[non_exhaustive]
    AccessDenied {
        /// The tool, or what stands for it.
        tool: String,
        /// Which rule refused it.
        reason: String,
        /// A layer panicked: the reason is none of the model's business.
        broken: bool,
    },
    /// The plan asks for a checkpoint before each write, and the tool cannot have one.
    #[error("`{tool}` needs a checkpoint: {reason}")]
    #[non_exhaustive]
    CheckpointRequired {
        /// The tool.
        tool: ToolName,
        /// Why there can be none.
        reason: String,
    },
    /// A person must approve, and the runtime has nobody to ask.
    #[error("`{tool}` needs an approval and there is no approver: {reason}")]
    #[non_exhaustive]
    ApprovalRequired {
        /// The tool.
        tool: ToolName,
        /// Why it needs one.
        reason: String,
    },
    /// A person refused.
    #[error("`{tool}` was not approved: {reason}")]
    #[non_exhaustive]
    ApprovalDenied {
        /// The tool.
        tool: ToolName,
        /// What the person said, or what is wrong with the approver.
        reason: String,
        /// The approver failed or panicked: the reason is none of the model's business.
        broken: bool,
    },
    /// A limit of the plan, the tool or the runtime.
    #[error("`{tool}` is over a limit: {reason}")]
    #[non_exhaustive]
    LimitExceeded {
        /// The tool.
        tool: ToolName,
        /// The limit is on calls at once, not on a quota.
        concurrency: bool,
        /// Which limit, and how long the call waited.
        reason: String,
    },
    /// The tool could not be activated.
    #[error(transparent)]
    Activation(#[from] ActivationError),
    /// The tool changed since the plan activated it; deactivate and activate it to use the new one.
    #[error("`{tool}` has changed since it was activated")]
    #[non_exhaustive]
    DefinitionChanged {
        /// The tool.
        tool: ToolName,
    },
    /// The host deactivated the tool, or its instance was given up under the call.
    #[error("`{tool}` is not activated: {reason}")]
    #[non_exhaustive]
    NotActivated {
        /// The tool.
        tool: String,
        /// Why, and what brings it back.
        reason: String,
    },
    /// A call that ended without success, as
    /// [`ToolResult::into_result`](crate::ToolResult::into_result) gives it.
    #[error("the tool failed ({code}): {message}")]
    #[non_exhaustive]
    Execution {
        /// The outcome of the call.
        code: OutcomeCode,
        /// What the tool said.
        message: String,
    },
    /// A deactivation that did not go well, as the [`PlanReport`](crate::PlanReport) gives it.
    #[error("`{tool}` was not deactivated in order: {problem}")]
    #[non_exhaustive]
    Deactivation {
        /// The tool or shared activation.
        tool: String,
        /// What happened.
        problem: String,
    },
}

impl ToolRuntimeError {
    pub(crate) fn denied(tool: impl Into<String>, reason: String) -> Self {
        Self::AccessDenied { tool: tool.into(), reason, broken: false }
    }

    /// The stable code.
    pub fn code(&self) -> OutcomeCode {
        match self {
            Self::PlanEnded { .. } => OutcomeCode::PlanEnded,
            Self::ShutDown => OutcomeCode::ShutDown,
            Self::NotFound { .. } => OutcomeCode::NotFound,
            Self::AccessDenied { .. } => OutcomeCode::AccessDenied,
            Self::CheckpointRequired { .. } => OutcomeCode::CheckpointRequired,
            Self::ApprovalRequired { .. } => OutcomeCode::ApprovalRequired,
            Self::ApprovalDenied { .. } => OutcomeCode::ApprovalDenied,
            Self::LimitExceeded { concurrency: true, .. } => OutcomeCode::Concurrency,
            Self::LimitExceeded { .. } => OutcomeCode::LimitExceeded,
            Self::Activation(error) if error.phase() == ActivationPhase::CallTimedOut => {
                OutcomeCode::ActivationTimeout
            }
            Self::Activation(_) | Self::Deactivation { .. } => OutcomeCode::Activation,
            Self::DefinitionChanged { .. } => OutcomeCode::DefinitionChanged,
            Self::NotActivated { .. } => OutcomeCode::NotActivated,
            Self::Execution { code, .. } => *code,
        }
    }
}

impl ToolRuntimeError {
    /// What to tell a model: what it can act on, and nothing of the host's insides. The text of
    /// [`Display`](fmt::Display) is for an operator.
    ///
    /// # Examples
    ///
    /// ```
    /// use toolscope::{EndReason, ToolRuntimeError};
    ///
    /// let error = ToolRuntimeError::ShutDown;
    /// assert_eq!(error.to_model_text(), "error (shut_down): no more tools can be called");
    /// ```
    pub fn to_model_text(&self) -> String {
        format!("error ({}): {}", self.code(), self.told())
    }

    /// That text without its code.
    pub(crate) fn told(&self) -> String {
        match self {
            Self::PlanEnded { .. } | Self::ShutDown => "no more tools can be called".to_owned(),
            Self::NotFound { nearest, .. } if !nearest.is_empty() => {
                let names: Vec<_> = nearest.iter().map(ToolName::provider_safe).collect();
                format!("there is no tool of that name; did you mean {}?", names.join(" or "))
            }
            Self::NotFound { .. } => "there is no tool of that name".to_owned(),
            Self::AccessDenied { broken: true, .. } => {
                "it could not be called; try again later".to_owned()
            }
            Self::AccessDenied { .. } | Self::CheckpointRequired { .. } => {
                format!("{self}; do not try again")
            }
            Self::ApprovalRequired { .. } => {
                "it needs an approval, and nobody is there to give one; do not try again".to_owned()
            }
            Self::ApprovalDenied { broken: true, .. } => {
                "it could not be approved; try again later".to_owned()
            }
            Self::ApprovalDenied { reason, .. } => format!("it was not approved: {reason}"),
            Self::LimitExceeded { concurrency: true, .. } => {
                "too many calls are running; try again later".to_owned()
            }
            Self::LimitExceeded { reason, .. } => format!("{reason}; do not try again"),
            Self::Activation(error) if error.phase() == ActivationPhase::Exhausted => {
                "the tool is not available; do not try again".to_owned()
            }
            Self::Activation(_) => "the tool is not available now; try again later".to_owned(),
            Self::DefinitionChanged { .. } | Self::NotActivated { .. } => {
                "the tool is not available in this plan any more".to_owned()
            }
            Self::Execution { message, .. } => message.clone(),
            Self::Deactivation { .. } => "the tool could not be released".to_owned(),
        }
    }
}

fn suggestion(nearest: &[ToolName]) -> String {
    match nearest {
        [] => String::new(),
        names => {
            let names: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
            format!("; did you mean {}?", names.join(" or "))
        }
    }
}

/// An activation that did not give an instance. All who waited on that attempt get the same one.
#[derive(Clone)]
pub struct ActivationError(Arc<ActivationFault>);

struct ActivationFault {
    what: String,
    phase: ActivationPhase,
    message: String,
    source: Option<Foreign<Arc<dyn Error + Send + Sync>>>,
}

/// How far an activation came before it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ActivationPhase {
    /// `activate` returned an error.
    Failed,
    /// `activate` panicked.
    Panicked,
    /// `activate` did not return by its deadline.
    TimedOut,
    /// The call's own deadline passed first; the activation goes on.
    CallTimedOut,
    /// What it asked for waits, in the end, for itself.
    Cycle,
    /// Too many attempts failed, or too many instances were retired; nothing was started.
    Exhausted,
    /// The runtime could not run it.
    NotRun,
}

impl ActivationError {
    pub(crate) fn new(
        what: impl Into<String>,
        phase: ActivationPhase,
        message: impl Into<String>,
    ) -> Self {
        Self::made(what.into(), phase, message.into(), None)
    }

    pub(crate) fn caused(
        what: impl Into<String>,
        message: impl Into<String>,
        source: Option<Arc<dyn Error + Send + Sync>>,
    ) -> Self {
        Self::made(what.into(), ActivationPhase::Failed, message.into(), source)
    }

    fn made(
        what: String,
        phase: ActivationPhase,
        mut message: String,
        source: Option<Arc<dyn Error + Send + Sync>>,
    ) -> Self {
        cut_plain(&mut message, MOST_ERROR_TEXT);
        let source = source.map(Foreign::new);
        Self(Arc::new(ActivationFault { what, phase, message, source }))
    }

    /// The last error of a slot that has no attempt left.
    pub(crate) fn exhausted(&self, attempts: u32) -> Self {
        let message = format!("{attempts} attempts failed, the last one: {}", self.message());
        Self::new(self.what(), ActivationPhase::Exhausted, message)
    }

    /// The tool or shared activation.
    pub fn what(&self) -> &str {
        &self.0.what
    }

    /// How far it came.
    pub fn phase(&self) -> ActivationPhase {
        self.0.phase
    }

    /// What went wrong, without the name.
    pub fn message(&self) -> &str {
        &self.0.message
    }
}

impl fmt::Display for ActivationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ActivationFault { what, message, .. } = &*self.0;
        match self.0.phase {
            ActivationPhase::Failed => write!(f, "activation of `{what}` failed: {message}"),
            ActivationPhase::Panicked => write!(f, "activation of `{what}` panicked: {message}"),
            ActivationPhase::TimedOut => write!(f, "activation of `{what}` timed out: {message}"),
            ActivationPhase::CallTimedOut => {
                write!(f, "activation of `{what}` took longer than the call: {message}")
            }
            ActivationPhase::Cycle => {
                write!(f, "activation of `{what}` waits for itself: {message}")
            }
            ActivationPhase::Exhausted => write!(f, "`{what}` is not activated again: {message}"),
            ActivationPhase::NotRun => {
                write!(f, "activation of `{what}` could not be run: {message}")
            }
        }
    }
}

impl fmt::Debug for ActivationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ActivationError")
            .field("what", &self.0.what)
            .field("phase", &self.0.phase)
            .field("message", &self.0.message)
            .finish_non_exhaustive()
    }
}

impl Error for ActivationError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source.as_ref().map(|source| &***source as &(dyn Error + 'static))
    }
}

/// A tool that the registry does not take, with the words of the tool card.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{error_type} of `{tool_name}`: {details}")]
#[non_exhaustive]
pub struct ToolError {
    /// The name as it was given.
    pub tool_name: String,
    /// The category, such as `RegistrationError`.
    pub error_type: String,
    /// What is wrong and what would be right.
    pub details: String,
}

impl ToolError {
    pub(crate) fn registration(tool_name: impl Into<String>, details: impl Into<String>) -> Self {
        Self {
            tool_name: tool_name.into(),
            error_type: "RegistrationError".into(),
            details: details.into(),
        }
    }

    pub(crate) fn activation(tool_name: impl Into<String>, details: impl Into<String>) -> Self {
        Self {
            tool_name: tool_name.into(),
            error_type: "ActivationError".into(),
            details: details.into(),
        }
    }
}
