#![doc = include_str!("docs/crate.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

// In reading order.
mod change;
mod context;
mod descriptor;
mod error;
mod name;
mod tool;

mod execute;
mod plan;
mod policy;
mod registry;
mod runtime;
mod trace;

mod cache;
mod contain;
mod keeper;
mod lease;
mod obligation;
mod scope;
mod slot;
mod sync;

mod fault;
mod source;

#[cfg(any(feature = "test-util", toolscope_shuttle))]
pub mod test_util;

pub use async_trait::async_trait;

pub use change::{Change, ChangeKind, RecordedChange};
pub use context::{ActivationContext, DeactivationContext, PlanId, ToolExecutionContext};
pub use descriptor::{
    BoundResource, ResourceSlot, SourceKind, ToolCapability, ToolDescriptor, ToolType,
};
pub use error::{
    ActivationError, ActivationPhase, CallError, EndReason, OutcomeCode, ToolCancelled, ToolError,
    ToolRuntimeError,
};
pub use execute::CallOptions;
#[cfg(any(feature = "test-util", toolscope_shuttle))]
pub use keeper::Keeper;
pub use name::{DEFAULT_NAMESPACE, InvalidToolName, ToolName};
pub use plan::{Deadlines, Plan, PlanHandle, PlanOptions, PlanReport};
pub use registry::{Snapshot, ToolRegistry};
pub use runtime::{
    RuntimeHandle, ShutdownReport, Stats, Straggler, ToolRuntime, ToolRuntimeBuilder,
};
pub use source::function::{FunctionTool, ToolSpec};
pub use tool::{
    FailureKind, SharedActivation, Tool, ToolFailure, ToolInstance, ToolOutput, ToolResult,
};
pub use trace::{DeactivationOutcome, DeactivationRecord, ToolExecutionTrace};

/// The program in the README compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
