#![doc = include_str!("docs/crate.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

// In reading order.
mod change;
mod context;
mod descriptor;
mod error;
mod name;
mod tool;

mod approval;
mod batch;
mod definition;
mod event;
mod execute;
mod finite;
mod layer;
mod limit;
mod options;
mod plan;
mod policy;
mod registry;
mod runner;
mod runtime;
mod schema;
mod span;
mod trace;

#[cfg(not(toolscope_shuttle))]
pub mod process;

mod cache;
mod canonical;
mod contain;
mod keeper;
mod lease;
mod obligation;
mod scope;
mod slot;
mod sync;
mod throttle;
mod visible;

mod fault;
mod source;

#[cfg(any(feature = "test-util", toolscope_shuttle))]
pub mod test_util;

pub use async_trait::async_trait;
#[cfg(not(toolscope_shuttle))]
pub use process::guardian;

pub use approval::channel::{ChannelApprover, PendingApproval};
pub use approval::terminal::TerminalApprover;
pub use approval::{ApprovalRequest, Approver, Decision};
pub use batch::ToolCall;
pub use change::{Change, ChangeKind, RecordedChange};
pub use context::{ActivationContext, DeactivationContext, PlanId, ToolExecutionContext};
pub use definition::Provider;
pub use descriptor::{
    BoundResource, ResourceSlot, SourceKind, ToolCapability, ToolDescriptor, ToolFilter, ToolType,
};
pub use error::{
    ActivationError, ActivationPhase, CallError, EndReason, OutcomeCode, ToolCancelled, ToolError,
    ToolRuntimeError,
};
pub use event::{EventKind, EventStream, Progress, ToolEvent, Wait};
#[cfg(any(feature = "test-util", toolscope_shuttle))]
pub use keeper::Keeper;
pub use layer::{Before, Layer, LayerCall};
pub use name::{DEFAULT_NAMESPACE, InvalidToolName, ToolName};
pub use options::{CallOptions, Deadlines, OutputCheck, PlanOptions};
pub use plan::{Plan, PlanHandle, PlanReport};
pub use registry::{Snapshot, ToolChanges, ToolRegistry};
pub use runner::ToolRunner;
pub use runtime::{
    RuntimeHandle, ShutdownReport, Stats, Straggler, ToolRuntime, ToolRuntimeBuilder,
};
pub use schema::{InvalidSchema, Schema, SchemaFault, SchemaValidationError};
pub use source::function::{FunctionTool, ToolSpec};
pub use tool::{
    FailureKind, SharedActivation, Tool, ToolFailure, ToolInstance, ToolOutput, ToolResult,
};
pub use trace::{DeactivationOutcome, DeactivationRecord, ToolExecutionTrace};

/// The program in the README compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
