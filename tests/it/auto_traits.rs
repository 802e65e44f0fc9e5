//! `Send`, `Sync` and `Unpin` of the public types, and `Send` of the futures.

use std::time::Duration;

use serde_json::json;
use toolscope::test_util::{Probe, ProbeCounts, Step};
use toolscope::{
    ActivationContext, ActivationError, ActivationPhase, ApprovalRequest, Approver, Before,
    BoundResource, CallError, CallOptions, Change, ChangeKind, ChannelApprover,
    DeactivationContext, DeactivationOutcome, DeactivationRecord, Deadlines, Decision, EndReason,
    EventKind, EventStream, FailureKind, FunctionTool, InvalidSchema, InvalidToolName, Keeper,
    Layer, LayerCall, OutcomeCode, OutputCheck, PendingApproval, Plan, PlanHandle, PlanId,
    PlanOptions, PlanReport, Progress, Provider, RecordedChange, ResourceSlot, RuntimeHandle,
    Schema, SchemaFault, SchemaValidationError, SharedActivation, ShutdownReport, Snapshot,
    SourceKind, Stats, Straggler, TerminalApprover, Tool, ToolCall, ToolCancelled, ToolCapability,
    ToolChanges, ToolDescriptor, ToolError, ToolEvent, ToolExecutionContext, ToolExecutionTrace,
    ToolFailure, ToolFilter, ToolInstance, ToolName, ToolOutput, ToolRegistry, ToolResult,
    ToolRunner, ToolRuntime, ToolRuntimeBuilder, ToolRuntimeError, ToolSpec, ToolType, Wait,
    async_trait,
};

use crate::support::Fixture;

fn send_sync_unpin<T: Send + Sync + Unpin + 'static>() {}

fn send_sync<T: Send + Sync + ?Sized>() {}

fn is_clone<T: Clone>() {}

/// Passes a future through, if it is `Send`.
fn sent<F: Future + Send>(future: F) -> F {
    future
}

macro_rules! all {
    ($check:ident: $($type:ty),+ $(,)?) => {
        $($check::<$type>();)+
    };
}

#[test]
fn what_a_host_holds_goes_between_threads() {
    all!(send_sync_unpin: ToolRuntime, ToolRuntimeBuilder, RuntimeHandle, ToolRegistry, Snapshot);
    all!(send_sync_unpin: ToolRunner, EventStream, ToolEvent, EventKind, Progress, Wait, ToolCall);
    all!(send_sync_unpin: Schema, InvalidSchema, SchemaFault, SchemaValidationError, Provider);
    all!(send_sync_unpin: ApprovalRequest, Decision, ChannelApprover, PendingApproval);
    all!(send_sync_unpin: TerminalApprover, Before, ToolFilter, ToolChanges, OutputCheck);
    all!(send_sync: dyn Approver, dyn Layer, LayerCall<'static>);
    all!(send_sync_unpin: Plan, PlanHandle, PlanOptions, PlanId, Deadlines, CallOptions, Keeper);
    all!(send_sync_unpin: PlanReport, ToolExecutionTrace, DeactivationRecord, DeactivationOutcome);
    all!(send_sync_unpin: ShutdownReport, Straggler, Stats, RecordedChange, Change, ChangeKind);
}

#[test]
fn what_an_author_holds_goes_between_threads() {
    all!(send_sync_unpin: ActivationContext, ToolExecutionContext, DeactivationContext);
    all!(send_sync_unpin: ToolOutput, ToolResult, ToolFailure, FailureKind, FunctionTool, ToolSpec);
    all!(send_sync_unpin: ToolDescriptor, ToolCapability, ToolType, SourceKind, ToolName);
    all!(send_sync_unpin: BoundResource, ResourceSlot, Probe, ProbeCounts, Step);
    all!(send_sync: dyn Tool, dyn ToolInstance, dyn SharedActivation);
}

#[test]
fn errors_go_between_threads() {
    all!(send_sync_unpin: CallError, ToolRuntimeError, ActivationError, ActivationPhase);
    all!(send_sync_unpin: ToolCancelled, ToolError, InvalidToolName, OutcomeCode, EndReason);
}

#[test]
fn errors_and_handles_can_be_cloned() {
    all!(is_clone: CallError, ToolRuntimeError, ActivationError, ToolCancelled, ToolError);
    all!(is_clone: InvalidToolName, ToolFailure, PlanHandle, RuntimeHandle, PlanReport);
    all!(is_clone: ActivationContext, ToolExecutionContext, ToolName, ToolDescriptor, ToolSpec);
}

struct Shared;

#[async_trait]
impl SharedActivation for Shared {
    async fn deactivate(&self, _: &DeactivationContext) -> Result<(), ToolFailure> {
        Ok(())
    }
}

#[tokio::test]
async fn the_futures_of_a_plan_are_send() {
    let probe = Probe::new("probe");
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let input = json!({});
    sent(plan.activate("probe")).await.unwrap();
    sent(plan.execute("probe", &input)).await.unwrap();
    sent(plan.execute_with("probe", input, CallOptions::new())).await.unwrap();
    assert!(sent(plan.deactivate("probe")).await);
    sent(plan.finish()).await;
    let plan = fixture.plan();
    plan.cancel();
    sent(plan.ended()).await;
    sent(plan.fail()).await;
    fixture.end().await;
}

#[tokio::test]
async fn the_futures_of_a_runtime_are_send() {
    let runtime = sent(ToolRuntime::builder().build()).await.unwrap();
    let body = async |plan: PlanHandle| plan.id().number();
    let (number, _) = sent(runtime.run(PlanOptions::new(), body)).await.unwrap();
    assert_eq!(number, 1);
    drop(sent(runtime.shutdown_on_signals(Duration::from_secs(1))));
    sent(runtime.shutdown(Duration::from_secs(1))).await;
}

#[tokio::test]
async fn the_futures_of_the_contexts_are_send() {
    use toolscope::test_util::{activation_context, execution_context};
    let fixture = Fixture::new(&[]).await;
    let plan = fixture.plan();
    let ctx = execution_context(&plan);
    drop(sent(ctx.cancelled()));
    drop(sent(ctx.execute_nested("nobody", &json!({}))));
    drop(sent(ctx.shared("shared", async |_| Ok(Shared))));
    let ctx = activation_context(&plan);
    drop(sent(ctx.shared("shared", async |_| Ok(Shared))));
    drop(sent(ctx.shared_between_plans("shared", async |_| Ok(Shared))));
    fixture.end().await;
}
