//! P11 to P14: the rooms of a call, their order, their outcomes, their traces.

use std::future::{Ready, pending, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use tokio::runtime::Handle;
use tokio::time::Instant;
use tokio_test::{assert_pending, assert_ready, task};
use tokio_util::sync::CancellationToken;
use toolscope::test_util::{Probe, ProbeCounts, Step, execution_context};
use toolscope::{
    ActivationContext, ActivationPhase, CallError, CallOptions, Deadlines, FailureKind,
    FunctionTool, OutcomeCode, PlanHandle, PlanOptions, Tool, ToolCapability, ToolDescriptor,
    ToolExecutionContext, ToolExecutionTrace, ToolFailure, ToolInstance, ToolOutput, ToolResult,
    ToolRuntime, ToolRuntimeError, ToolSpec, async_trait,
};

use crate::support::{Fixture, paused};

const SECOND: Duration = Duration::from_secs(1);

type Returned = Result<ToolResult, CallError>;

/// The one trace of a plan, after a check that it agrees with what the call returned.
#[track_caller]
pub(crate) fn traced(plan: &PlanHandle, returned: &Returned) -> ToolExecutionTrace {
    let traces = plan.traces();
    let [trace] = traces.as_slice() else {
        panic!("not one trace: {traces:?}");
    };
    assert_eq!(trace.plan_id, plan.id());
    match returned {
        Ok(result) => {
            let code = (!result.success).then(|| Value::from(trace.outcome.as_str()));
            assert_eq!(result.metadata.get("code"), code.as_ref());
            assert_eq!(result.code(), trace.outcome.as_str());
            assert_eq!(result.success, trace.success());
            assert_eq!(result.error, trace.error);
            assert!((result.duration_ms - trace.duration_ms()).abs() < f64::EPSILON);
            let size = result.output.to_string().len();
            assert_eq!(trace.result_size_bytes, if result.success { size } else { 0 });
        }
        Err(error) => {
            assert_eq!(error.code(), trace.outcome);
            assert_eq!(trace.error, Some(error.to_string()));
            assert_eq!(trace.result_size_bytes, 0);
        }
    }
    trace.clone()
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Relayed {
    tool: String,
    input: Value,
}

/// A reader that calls the tool that its input names, and gives back what that one gave.
pub(crate) fn relay(name: &str) -> FunctionTool {
    relay_of(ToolSpec::new(name).read_only())
}

fn relay_of(spec: ToolSpec) -> FunctionTool {
    spec.handler(async |ctx, args: Relayed| {
        let result = ctx.execute_nested(&args.tool, &args.input).await?;
        Ok(result.into_result()?)
    })
}

/// The input of a [`relay`].
pub(crate) fn relayed(tool: &str) -> Value {
    json!({"tool": tool, "input": {}})
}

/// A tool that returns a failure of that kind.
fn failing(kind: FailureKind) -> FunctionTool {
    ToolSpec::new("failing")
        .function(move |_: Value| Err::<(), _>(ToolFailure::new(kind, "it did not work")))
}

/// An immediate tool whose execution is the future that a function makes.
struct Raw<F>(ToolDescriptor, Arc<RawInstance<F>>);

struct RawInstance<F>(F);

fn raw<F, Fut>(make: F) -> impl Tool
where
    F: Fn() -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<ToolOutput, ToolFailure>> + Send + 'static,
{
    Raw(ToolDescriptor::new("raw".parse().unwrap()), Arc::new(RawInstance(make)))
}

#[async_trait]
impl<F, Fut> Tool for Raw<F>
where
    F: Fn() -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<ToolOutput, ToolFailure>> + Send + 'static,
{
    fn descriptor(&self) -> &ToolDescriptor {
        &self.0
    }

    fn immediate(&self) -> Option<Arc<dyn ToolInstance>> {
        Some(Arc::clone(&self.1) as Arc<dyn ToolInstance>)
    }

    async fn activate(&self, _: &ActivationContext) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        Ok(Arc::clone(&self.1) as Arc<dyn ToolInstance>)
    }
}

/// Written out, so that the function runs before there is a future.
impl<F, Fut> ToolInstance for RawInstance<F>
where
    F: Fn() -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<ToolOutput, ToolFailure>> + Send + 'static,
{
    fn execute<'life0, 'life1, 'life2, 'async_trait>(
        &'life0 self,
        _: &'life1 ToolExecutionContext,
        _: &'life2 Value,
    ) -> Pin<Box<dyn Future<Output = Result<ToolOutput, ToolFailure>> + Send + 'async_trait>>
    where
        'life0: 'async_trait,
        'life1: 'async_trait,
        'life2: 'async_trait,
        Self: 'async_trait,
    {
        Box::pin((self.0)())
    }
}

/// Panics when it is dropped; also as a future.
struct Bomb<F>(F);

impl<F> Drop for Bomb<F> {
    fn drop(&mut self) {
        assert!(std::thread::panicking(), "a panic in a drop");
    }
}

impl<F: Future + Unpin> Future for Bomb<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        Pin::new(&mut self.0).poll(cx)
    }
}

// ===== the order of the rooms =====

#[tokio::test(start_paused = true)]
async fn p12_an_ended_plan_refuses_before_the_name_is_looked_up() {
    let fixture = Fixture::paused(&[]).await;
    let plan = fixture.plan();
    let handle = plan.handle();
    plan.finish().await;
    let error = handle.execute("nobody", json!({})).await.unwrap_err();
    assert_eq!(error.code(), OutcomeCode::PlanEnded);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_a_cancelled_token_refuses_before_the_name_is_looked_up() {
    let fixture = Fixture::paused(&[]).await;
    let plan = fixture.plan();
    let token = CancellationToken::new();
    token.cancel();
    let options = CallOptions::new().token(token);
    let returned = plan.execute_with("nobody", json!({}), options).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::Cancelled);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_the_name_is_looked_up_before_the_input_is_checked() {
    let fixture = Fixture::paused(&[]).await;
    let plan = fixture.plan();
    let returned = plan.execute("nobody", json!([])).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::NotFound);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_the_gate_refuses_before_the_input_is_checked() {
    let writer = Probe::new("writer");
    let fixture = Fixture::paused(&[&writer]).await;
    let plan = fixture.begin(PlanOptions::new().read_only()).unwrap();
    let returned = plan.execute("writer", json!([])).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::AccessDenied);
    assert_eq!(writer.counts(), ProbeCounts::default());
    assert_eq!(fixture.end().await.started, 0);
}

#[tokio::test(start_paused = true)]
async fn p12_the_input_is_checked_before_an_approval_is_asked_for() {
    let asking =
        Probe::new("asking").capability(ToolCapability::writes().human_approval_required());
    let fixture = Fixture::paused(&[&asking]).await;
    let plan = fixture.plan();
    let returned = plan.execute("asking", json!([])).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::InvalidInput);
    assert_eq!(asking.counts(), ProbeCounts::default());
    assert_eq!(fixture.end().await.started, 0);
}

#[tokio::test(start_paused = true)]
async fn p12_an_approval_is_asked_for_before_a_permit_is_waited_for() {
    let holder = Probe::new("holder").on_execute(Step::Never);
    let asking =
        Probe::new("asking").capability(ToolCapability::writes().human_approval_required());
    let fixture = Fixture::paused(&[&holder, &asking]).await;
    let plan = fixture.begin(PlanOptions::new().max_concurrent(1)).unwrap();
    let mut holds = task::spawn(plan.execute("holder", json!({})));
    assert_pending!(holds.poll());
    let mut asks = task::spawn(plan.execute("asking", json!({})));
    let error = assert_ready!(asks.poll()).unwrap_err();
    assert_eq!(error.code(), OutcomeCode::ApprovalRequired);
    assert_eq!(asking.counts(), ProbeCounts::default());
    drop(holds);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_a_permit_is_waited_for_before_the_activation() {
    let holder = Probe::new("holder").on_execute(Step::Never);
    let waiter = Probe::new("waiter");
    let fixture = Fixture::paused(&[&holder, &waiter]).await;
    let options = PlanOptions::new().max_concurrent(1).permit_wait(SECOND);
    let plan = fixture.begin(options).unwrap();
    let mut holds = task::spawn(plan.execute("holder", json!({})));
    assert_pending!(holds.poll());
    let error = plan.execute("waiter", json!({})).await.unwrap_err();
    assert_eq!(error.code(), OutcomeCode::Concurrency);
    assert_eq!(waiter.counts(), ProbeCounts::default());
    drop(holds);
    assert_eq!(fixture.end().await.started, 1);
}

#[tokio::test(start_paused = true)]
async fn p12_what_could_not_be_activated_is_not_executed() {
    let probe = Probe::new("broken").on_activate(Step::Err);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let returned = plan.execute("broken", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::Activation);
    assert_eq!(probe.counts().executions, 0);
    fixture.end().await;
}

// ===== one way =====

#[tokio::test(start_paused = true)]
async fn p11_a_handle_is_refused_as_its_plan_is() {
    let writer = Probe::new("writer");
    let fixture = Fixture::paused(&[&writer]).await;
    let plan = fixture.begin(PlanOptions::new().read_only()).unwrap();
    let returned = plan.handle().execute("writer", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::AccessDenied);
    assert_eq!(writer.counts(), ProbeCounts::default());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p11_a_plan_found_by_its_number_is_refused_alike() {
    let writer = Probe::new("writer");
    let fixture = Fixture::paused(&[&writer]).await;
    let plan = fixture.begin(PlanOptions::new().read_only()).unwrap();
    let found = fixture.handle().plan(plan.id()).unwrap();
    let returned = found.execute("writer", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::AccessDenied);
    assert_eq!(writer.counts(), ProbeCounts::default());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p11_a_nested_call_has_its_input_checked_and_its_own_trace() {
    let probe = Probe::new("probe");
    let fixture = Fixture::with(paused().tool(relay("relay")), &[&probe]).await;
    let plan = fixture.plan();
    let input = json!({"tool": "probe", "input": 7});
    let result = plan.execute("relay", &input).await.unwrap();
    assert_eq!(result.code(), "invalid_input");
    let tools: Vec<_> = plan.traces().into_iter().map(|trace| trace.tool).collect();
    assert_eq!(tools, ["local/probe", "local/relay"]);
    assert_eq!(probe.counts(), ProbeCounts::default());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p11_a_tool_answers_to_its_full_its_bare_and_its_provider_safe_name() {
    let probe = Probe::new("read_file");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    for name in ["local/read_file", "read_file", "local__read_file"] {
        assert!(plan.execute(name, json!({})).await.unwrap().success);
    }
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

// ===== the outcomes =====

#[tokio::test(start_paused = true)]
async fn p14_a_success_is_ok_and_has_the_output() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let returned = plan.execute("probe", json!({"n": 1})).await;
    let trace = traced(&plan, &returned);
    assert_eq!((trace.outcome, trace.cancelled), (OutcomeCode::Ok, false));
    let result = returned.unwrap();
    assert_eq!(result.output, json!({"echo": {"n": 1}}));
    assert_eq!(result.error, None);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_metadata_of_the_tool_reaches_the_host() {
    let tool = raw(|| ready(Ok(ToolOutput::new(json!(1)).with_metadata("rows", 3))));
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.plan();
    let result = plan.execute("raw", json!({})).await.unwrap();
    assert_eq!(result.metadata["rows"], json!(3));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_an_array_is_no_input() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let returned = plan.execute("probe", json!([1])).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::InvalidInput);
    let error = returned.unwrap().error.unwrap();
    assert!(error.contains("an array"), "{error}");
    assert_eq!(probe.counts(), ProbeCounts::default());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_null_is_no_input() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let returned = plan.execute("probe", Value::Null).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::InvalidInput);
    assert_eq!(probe.counts(), ProbeCounts::default());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_json_in_a_string_is_no_input() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let returned = plan.execute("probe", json!("{}")).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::InvalidInput);
    assert_eq!(probe.counts(), ProbeCounts::default());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_an_error_of_the_tool_is_a_result() {
    let probe = Probe::new("probe").on_execute(Step::Err);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let returned = plan.execute("probe", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::Execution);
    assert!(!returned.unwrap().success);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_panic_of_the_tool_is_a_result() {
    let probe = Probe::new("probe").on_execute([Step::Panic, Step::Ok]);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let returned = plan.execute("probe", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::Panic);
    let error = returned.unwrap().error.unwrap();
    assert!(error.contains("panics in execute"), "{error}");
    assert!(plan.execute("probe", json!({})).await.unwrap().success);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_panic_after_an_await_is_a_result() {
    let probe = Probe::new("probe").on_execute(Step::YieldPanic(2));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let returned = plan.execute("probe", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::Panic);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_panic_before_there_is_a_future_is_a_result() {
    let tool = raw(|| -> Ready<_> { panic!("no future for you") });
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.plan();
    let returned = plan.execute("raw", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::Panic);
    let error = returned.unwrap().error.unwrap();
    assert!(error.contains("no future for you"), "{error}");
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_panic_in_the_drop_of_a_finished_execution_is_a_result() {
    let tool = raw(|| Bomb(ready(Ok(ToolOutput::default()))));
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.plan();
    let returned = plan.execute("raw", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::Panic);
    assert!(returned.is_ok());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_panic_in_the_drop_of_a_timed_out_execution_is_contained() {
    let tool = raw(|| Bomb(pending()));
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.plan();
    let options = CallOptions::new().timeout(SECOND);
    let returned = plan.execute_with("raw", json!({}), options).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::Timeout);
    assert!(returned.is_ok());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_panic_in_the_drop_of_an_abandoned_execution_is_contained() {
    let tool = raw(|| Bomb(pending()));
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.plan();
    let mut call = task::spawn(plan.execute("raw", json!({})));
    assert_pending!(call.poll());
    drop(call);
    assert_eq!(plan.traces()[0].outcome, OutcomeCode::Abandoned);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_panic_in_the_drop_of_what_was_panicked_with_is_contained() {
    let tool = raw(|| -> Ready<_> { std::panic::panic_any(Bomb(())) });
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.plan();
    let returned = plan.execute("raw", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::Panic);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_transient_failure_is_an_execution_failure() {
    let fixture = Fixture::with(paused().tool(failing(FailureKind::Transient)), &[]).await;
    let plan = fixture.plan();
    let returned = plan.execute("failing", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::Execution);
    assert_eq!(returned.unwrap().error.as_deref(), Some("it did not work"));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_tool_can_say_that_the_input_makes_no_sense() {
    let fixture = Fixture::with(paused().tool(failing(FailureKind::Invalid)), &[]).await;
    let plan = fixture.plan();
    let returned = plan.execute("failing", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::InvalidInput);
    assert!(returned.is_ok());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_tool_can_say_that_the_outcome_is_unknown() {
    let fixture = Fixture::with(paused().tool(failing(FailureKind::OutcomeUnknown)), &[]).await;
    let plan = fixture.plan();
    let returned = plan.execute("failing", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::OutcomeUnknown);
    assert!(returned.is_ok());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_tool_can_say_that_something_of_its_own_is_not_activated() {
    let fixture = Fixture::with(paused().tool(failing(FailureKind::NotActivated)), &[]).await;
    let plan = fixture.plan();
    let returned = plan.execute("failing", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::NotActivated);
    assert!(returned.is_ok());
    fixture.end().await;
}

/// Only a call that was cancelled is cancelled, whatever its tool says.
#[tokio::test(start_paused = true)]
async fn p14_a_cancellation_that_nobody_asked_for_is_an_execution_failure() {
    let fixture = Fixture::with(paused().tool(failing(FailureKind::Cancelled)), &[]).await;
    let plan = fixture.plan();
    let returned = plan.execute("failing", json!({})).await;
    let trace = traced(&plan, &returned);
    assert_eq!((trace.outcome, trace.cancelled), (OutcomeCode::Execution, false));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_an_unknown_name_is_an_err_that_names_the_nearest() {
    let probe = Probe::new("files/read_file");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let returned = plan.execute("files/readfile", json!({})).await;
    let trace = traced(&plan, &returned);
    assert_eq!((trace.outcome, trace.tool.as_str()), (OutcomeCode::NotFound, "files/readfile"));
    let CallError::Runtime(ToolRuntimeError::NotFound { nearest, .. }) = returned.unwrap_err()
    else {
        panic!("another error");
    };
    assert_eq!(nearest, ["files/read_file".parse().unwrap()]);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_failed_activation_is_an_err() {
    let probe = Probe::new("probe").on_activate(Step::Err);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let returned = plan.execute("probe", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::Activation);
    let CallError::Runtime(ToolRuntimeError::Activation(error)) = returned.unwrap_err() else {
        panic!("another error");
    };
    assert_eq!((error.what(), error.phase()), ("local/probe", ActivationPhase::Failed));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_tool_that_the_host_deactivated_is_an_err() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    plan.activate("probe").await.unwrap();
    assert!(plan.deactivate("probe").await);
    let returned = plan.execute("probe", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::NotActivated);
    assert!(returned.is_err());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_call_of_a_cancelled_plan_is_cancelled() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    plan.cancel();
    let error = plan.execute("probe", json!({})).await.unwrap_err();
    assert!(matches!(error, CallError::Cancelled(_)));
    assert_eq!(probe.counts(), ProbeCounts::default());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_call_after_the_shutdown_says_so() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    fixture.shutdown(SECOND).await;
    let error = plan.execute("probe", json!({})).await.unwrap_err();
    assert_eq!(error.code(), OutcomeCode::ShutDown);
    assert_eq!(probe.counts(), ProbeCounts::default());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_result_becomes_an_error_with_its_code() {
    let probe = Probe::new("probe").on_execute(Step::Panic);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let result = plan.execute("probe", json!({})).await.unwrap();
    let error = result.into_result().unwrap_err();
    assert_eq!(error.code(), OutcomeCode::Panic);
    fixture.end().await;
}

// ===== `?` in a tool =====

#[tokio::test(start_paused = true)]
async fn p14_a_cancellation_stays_one_in_a_failure() {
    let fixture = Fixture::paused(&[]).await;
    let plan = fixture.plan();
    plan.cancel();
    let cancelled = execution_context(&plan).check().unwrap_err();
    assert_eq!(ToolFailure::from(cancelled).kind(), FailureKind::Cancelled);
    let failure = ToolFailure::from(CallError::from(cancelled));
    assert_eq!(failure.kind(), FailureKind::Cancelled);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_tool_that_checks_for_its_cancellation_is_cancelled() {
    let tool = ToolSpec::new("patient").handler(async |ctx, _: Value| {
        ctx.cancelled().await;
        ctx.check()?;
        Ok(1)
    });
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.plan();
    let token = CancellationToken::new();
    let options = CallOptions::new().token(token.clone());
    let returned = {
        let mut call = task::spawn(plan.execute_with("patient", json!({}), options));
        assert_pending!(call.poll());
        token.cancel();
        call.await
    };
    let trace = traced(&plan, &returned);
    assert_eq!((trace.outcome, trace.cancelled), (OutcomeCode::Cancelled, true));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_the_refusal_of_a_nested_call_keeps_its_code() {
    let fixture = Fixture::with(paused().tool(relay("relay")), &[]).await;
    let plan = fixture.plan();
    let result = plan.execute("relay", relayed("nobody")).await.unwrap();
    assert_eq!(result.code(), "not_found");
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_the_failure_of_a_nested_call_keeps_its_code() {
    let probe = Probe::new("probe").on_execute(Step::Panic);
    let fixture = Fixture::with(paused().tool(relay("relay")), &[&probe]).await;
    let plan = fixture.plan();
    let result = plan.execute("relay", relayed("probe")).await.unwrap();
    assert_eq!(result.code(), "panic");
    fixture.end().await;
}

// ===== traces =====

#[tokio::test(start_paused = true)]
async fn p13_each_call_leaves_one_trace_in_the_order_of_their_ends() {
    let latch = CancellationToken::new();
    let slow = Probe::new("slow").on_execute(Step::Until(latch.clone()));
    let fixture = Fixture::paused(&[&slow]).await;
    let plan = fixture.plan();
    let mut first = task::spawn(plan.execute("slow", json!({})));
    assert_pending!(first.poll());
    assert!(plan.execute("nobody", json!({})).await.is_err());
    latch.cancel();
    assert!(first.await.unwrap().success);
    let ids: Vec<_> = plan.traces().iter().map(|trace| trace.call_id).collect();
    assert_eq!(ids, [2, 1]);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_calls_at_once_have_numbers_of_their_own() {
    let probe = Probe::new("probe").on_execute(Step::Yield(3));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..50 {
        let plan = plan.handle();
        calls.spawn(async move { plan.execute("probe", json!({})).await.unwrap().success });
    }
    assert!(calls.join_all().await.into_iter().all(|success| success));
    let mut ids: Vec<_> = plan.traces().iter().map(|trace| trace.call_id).collect();
    ids.sort_unstable();
    assert!(ids.into_iter().eq(1..=50));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_a_call_that_was_never_polled_leaves_no_trace() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    drop(plan.execute("probe", json!({})));
    assert_eq!(plan.traces(), []);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_a_call_of_an_ended_plan_leaves_no_trace() {
    let fixture = Fixture::paused(&[]).await;
    let plan = fixture.plan();
    plan.cancel();
    assert!(plan.execute("nobody", json!({})).await.is_err());
    assert_eq!(plan.traces(), []);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_a_call_dropped_while_the_tool_ran_is_abandoned() {
    let probe = Probe::new("probe").on_execute(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let mut call = task::spawn(plan.execute("probe", json!({})));
    assert_pending!(call.poll());
    drop(call);
    let traces = plan.traces();
    assert_eq!((traces.len(), traces[0].outcome), (1, OutcomeCode::Abandoned));
    let error = traces[0].error.as_deref().unwrap();
    assert!(error.contains("while the tool ran"), "{error}");
    assert_eq!(probe.counts().dropped, 1);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_a_call_dropped_in_the_activation_is_abandoned() {
    let latch = CancellationToken::new();
    let probe = Probe::new("probe").on_activate(Step::Until(latch.clone()));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let mut call = task::spawn(plan.execute("probe", json!({})));
    assert_pending!(call.poll());
    drop(call);
    let traces = plan.traces();
    assert_eq!((traces.len(), traces[0].outcome), (1, OutcomeCode::Abandoned));
    let error = traces[0].error.as_deref().unwrap();
    assert!(error.contains("before the tool ran"), "{error}");
    latch.cancel();
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_a_nested_call_names_its_parent() {
    let probe = Probe::new("probe");
    let fixture = Fixture::with(paused().tool(relay("relay")), &[&probe]).await;
    let plan = fixture.plan();
    assert!(plan.execute("relay", relayed("probe")).await.unwrap().success);
    let traces = plan.traces();
    let [nested, outer] = traces.as_slice() else {
        panic!("not two traces: {traces:?}");
    };
    assert_eq!(nested.parent_call_id, Some(outer.call_id));
    assert_eq!(outer.parent_call_id, None);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_a_nested_call_is_abandoned_with_its_parent() {
    let probe = Probe::new("probe").on_execute(Step::Never);
    let fixture = Fixture::with(paused().tool(relay("relay")), &[&probe]).await;
    let plan = fixture.plan();
    let mut call = task::spawn(plan.execute("relay", relayed("probe")));
    assert_pending!(call.poll());
    drop(call);
    let traces = plan.traces();
    assert_eq!(traces.len(), 2);
    assert!(traces.iter().all(|trace| trace.outcome == OutcomeCode::Abandoned));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_the_trace_of_an_unknown_name_is_short() {
    let fixture = Fixture::paused(&[]).await;
    let plan = fixture.plan();
    let long = "ü".repeat(100_000);
    let returned = plan.execute(&long, json!({})).await;
    let trace = traced(&plan, &returned);
    assert_eq!(trace.tool.chars().count(), 256);
    assert!(trace.error.unwrap().len() < 1000);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_the_size_of_an_output_is_counted_in_bytes() {
    let tool = raw(|| ready(Ok(ToolOutput::new(json!("ü\n")))));
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.plan();
    let returned = plan.execute("raw", json!({})).await;
    assert_eq!(traced(&plan, &returned).result_size_bytes, 6);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_past_the_cap_the_oldest_traces_go_and_are_counted() {
    let fixture = Fixture::paused(&[]).await;
    let plan = fixture.begin(PlanOptions::new().trace_cap(2)).unwrap();
    for _ in 0..5 {
        assert!(plan.execute("nobody", json!({})).await.is_err());
    }
    let report = plan.finish().await;
    let ids: Vec<_> = report.traces().iter().map(|trace| trace.call_id).collect();
    assert_eq!(ids, [4, 5]);
    assert_eq!(report.dropped_traces(), 3);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_the_times_of_a_trace_are_iso_8601() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let before = SystemTime::now();
    let plan = fixture.plan();
    let returned = plan.execute("probe", json!({})).await;
    let trace = traced(&plan, &returned);
    let read = |text: String| {
        assert!(text.ends_with('Z') && text.as_bytes()[10] == b'T', "{text}");
        text.parse::<jiff::Timestamp>().unwrap()
    };
    let at = |time| jiff::Timestamp::try_from(time).unwrap();
    assert_eq!(read(trace.started_at()), at(trace.started));
    assert_eq!(read(trace.ended_at()), at(trace.started + trace.duration));
    assert!(trace.started >= before);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_the_report_has_the_traces_of_the_plan() {
    let probe = Probe::new("probe").on_execute([Step::Ok, Step::Err]);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    assert!(plan.execute("probe", json!({})).await.unwrap().success);
    assert!(!plan.execute("probe", json!({})).await.unwrap().success);
    let traces = plan.traces();
    let report = plan.finish().await;
    assert_eq!(report.traces(), traces);
    assert_eq!(report.dropped_traces(), 0);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_a_call_at_its_hard_end_leaves_a_trace() {
    let probe = Probe::new("probe").on_execute(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let returned = {
        let mut call = task::spawn(plan.execute("probe", json!({})));
        assert_pending!(call.poll());
        plan.cancel();
        call.await
    };
    let trace = traced(&plan, &returned);
    assert_eq!((trace.outcome, trace.cancelled), (OutcomeCode::Cancelled, true));
    fixture.end().await;
}

// ===== the deadline of a call =====

/// Calls a tool that never returns; gives the time that passed on the paused clock.
async fn time_out(fixture: &Fixture, plan: PlanOptions, call: CallOptions) -> Duration {
    let plan = fixture.begin(plan).unwrap();
    let began = Instant::now();
    let returned = plan.execute_with("probe", json!({}), call).await;
    let took = began.elapsed();
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::Timeout);
    assert!(returned.is_ok());
    // The paused clock moves in steps of a millisecond.
    Duration::from_secs(took.as_secs())
}

#[tokio::test(start_paused = true)]
async fn p14_the_tool_s_limit_wins_where_it_is_the_shortest() {
    let probe = Probe::new("probe").on_execute(Step::Never).call_timeout(SECOND);
    let fixture = Fixture::paused(&[&probe]).await;
    let (plan, call) = (PlanOptions::new(), CallOptions::new());
    let took = time_out(&fixture, plan.call_timeout(2 * SECOND), call.timeout(3 * SECOND));
    assert_eq!(took.await, SECOND);
    assert_eq!(probe.counts().dropped, 1);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_the_plan_s_limit_wins_where_it_is_the_shortest() {
    let probe = Probe::new("probe").on_execute(Step::Never).call_timeout(2 * SECOND);
    let fixture = Fixture::paused(&[&probe]).await;
    let (plan, call) = (PlanOptions::new(), CallOptions::new());
    let took = time_out(&fixture, plan.call_timeout(SECOND), call.timeout(3 * SECOND));
    assert_eq!(took.await, SECOND);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_the_call_s_limit_wins_where_it_is_the_shortest() {
    let probe = Probe::new("probe").on_execute(Step::Never).call_timeout(3 * SECOND);
    let fixture = Fixture::paused(&[&probe]).await;
    let (plan, call) = (PlanOptions::new(), CallOptions::new());
    let took = time_out(&fixture, plan.call_timeout(2 * SECOND), call.timeout(SECOND));
    assert_eq!(took.await, SECOND);
    fixture.end().await;
}

/// cases/upstream.md A13.
#[tokio::test]
async fn p14_a_call_that_timed_out_took_about_its_limit() {
    let limit = Duration::from_millis(40);
    let probe = Probe::new("probe").on_execute(Step::Never).call_timeout(limit);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let returned = plan.execute("probe", json!({})).await;
    let trace = traced(&plan, &returned);
    assert_eq!(trace.outcome, OutcomeCode::Timeout);
    assert!(trace.duration >= limit && trace.duration < 100 * limit, "{trace:?}");
    fixture.end().await;
}

/// cases/upstream.md A20.
#[tokio::test(start_paused = true)]
async fn p14_calls_that_timed_out_leave_nothing_running() {
    let probe = Probe::new("probe").on_execute(Step::Never).call_timeout(SECOND);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let tasks = Handle::current().metrics().num_alive_tasks();
    for _ in 0..100 {
        let result = plan.execute("probe", json!({})).await.unwrap();
        assert_eq!(result.code(), "timeout");
    }
    assert_eq!(probe.counts().dropped, 100);
    assert_eq!(Handle::current().metrics().num_alive_tasks(), tasks);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_result_that_is_there_at_once_beats_a_deadline_of_nothing() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let options = CallOptions::new().timeout(Duration::ZERO);
    let result = plan.execute_with("probe", json!({}), options).await;
    assert!(result.unwrap().success);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_an_activation_goes_on_when_the_call_s_deadline_passes() {
    let latch = CancellationToken::new();
    let probe = Probe::new("probe").on_activate(Step::Until(latch.clone()));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let options = CallOptions::new().timeout(SECOND);
    let returned = plan.execute_with("probe", json!({}), options).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::ActivationTimeout);
    assert!(returned.is_err());
    latch.cancel();
    assert!(plan.execute("probe", json!({})).await.unwrap().success);
    let counts = probe.counts();
    assert_eq!((counts.activations, counts.half_done), (1, 0));
    fixture.end().await;
}

// ===== a call's own token =====

#[tokio::test(start_paused = true)]
async fn p14_a_call_whose_token_was_cancelled_before_runs_nothing() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let token = CancellationToken::new();
    token.cancel();
    let options = CallOptions::new().token(token);
    let returned = plan.execute_with("probe", json!({}), options).await;
    let trace = traced(&plan, &returned);
    assert_eq!((trace.outcome, trace.cancelled), (OutcomeCode::Cancelled, true));
    assert_eq!(probe.counts(), ProbeCounts::default());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_tool_that_ignores_the_cancel_is_dropped_after_the_grace() {
    let probe = Probe::new("probe").on_execute(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let deadlines = Deadlines::default().grace(7 * SECOND);
    let plan = fixture.begin(PlanOptions::new().deadlines(deadlines)).unwrap();
    let token = CancellationToken::new();
    let options = CallOptions::new().token(token.clone());
    let began = Instant::now();
    let returned = {
        let mut call = task::spawn(plan.execute_with("probe", json!({}), options));
        assert_pending!(call.poll());
        token.cancel();
        call.await
    };
    assert_eq!(began.elapsed().as_secs(), 7);
    assert!(matches!(returned, Err(CallError::Cancelled(_))));
    assert!(traced(&plan, &returned).cancelled);
    assert_eq!(probe.counts().dropped, 1);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_a_result_within_the_grace_is_returned_and_marked_cancelled() {
    let probe = Probe::new("probe").on_execute(Step::UntilCancelled);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let token = CancellationToken::new();
    let options = CallOptions::new().token(token.clone());
    let returned = {
        let mut call = task::spawn(plan.execute_with("probe", json!({}), options));
        assert_pending!(call.poll());
        token.cancel();
        call.await
    };
    let trace = traced(&plan, &returned);
    assert_eq!((trace.outcome, trace.cancelled), (OutcomeCode::Ok, true));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_a_result_within_the_grace_of_a_cancelled_plan_is_returned_and_marked() {
    let probe = Probe::new("probe").on_execute(Step::UntilCancelled);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let returned = {
        let mut call = task::spawn(plan.execute("probe", json!({})));
        assert_pending!(call.poll());
        plan.cancel();
        call.await
    };
    let trace = traced(&plan, &returned);
    assert_eq!((trace.outcome, trace.cancelled), (OutcomeCode::Ok, true));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_a_failure_within_the_grace_is_returned_and_marked_cancelled() {
    let tool = ToolSpec::new("sulking").handler(async |ctx, _: Value| {
        ctx.cancelled().await;
        Err::<(), _>(ToolFailure::failed("half of it is done"))
    });
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.plan();
    let token = CancellationToken::new();
    let options = CallOptions::new().token(token.clone());
    let returned = {
        let mut call = task::spawn(plan.execute_with("sulking", json!({}), options));
        assert_pending!(call.poll());
        token.cancel();
        call.await
    };
    let trace = traced(&plan, &returned);
    assert_eq!((trace.outcome, trace.cancelled), (OutcomeCode::Execution, true));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_a_panic_within_the_grace_is_returned_and_marked_cancelled() {
    let probe = Probe::new("probe").on_execute(Step::UntilCancelledPanic);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let token = CancellationToken::new();
    let options = CallOptions::new().token(token.clone());
    let returned = {
        let mut call = task::spawn(plan.execute_with("probe", json!({}), options));
        assert_pending!(call.poll());
        token.cancel();
        call.await
    };
    let trace = traced(&plan, &returned);
    assert_eq!((trace.outcome, trace.cancelled), (OutcomeCode::Panic, true));
    fixture.end().await;
}

/// An error whose destructor panics.
#[derive(Debug)]
struct LoudError;

impl std::fmt::Display for LoudError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("tick")
    }
}

impl std::error::Error for LoudError {}

impl Drop for LoudError {
    fn drop(&mut self) {
        assert!(std::thread::panicking(), "a panic in the drop of an error");
    }
}

#[tokio::test(start_paused = true)]
async fn p14_an_error_whose_drop_panics_is_contained() {
    let tool = ToolSpec::new("tool").handler(async |_, _: Value| Err::<(), _>(LoudError.into()));
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.plan();
    let returned = plan.execute("tool", json!({})).await;
    assert_eq!(traced(&plan, &returned).error.as_deref(), Some("tick"));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_call_can_be_cancelled_while_it_waits_for_a_permit() {
    let probe = Probe::new("probe").on_execute(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_concurrent(1)).unwrap();
    let mut holds = task::spawn(plan.execute("probe", json!({})));
    assert_pending!(holds.poll());
    let token = CancellationToken::new();
    let options = CallOptions::new().token(token.clone());
    let mut waits = task::spawn(plan.execute_with("probe", json!({}), options));
    assert_pending!(waits.poll());
    token.cancel();
    let error = assert_ready!(waits.poll()).unwrap_err();
    assert_eq!(error.code(), OutcomeCode::Cancelled);
    assert_eq!(probe.counts().executions, 1);
    drop(holds);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_call_can_be_cancelled_in_an_activation_that_goes_on() {
    let latch = CancellationToken::new();
    let probe = Probe::new("probe").on_activate(Step::Until(latch.clone()));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let token = CancellationToken::new();
    let options = CallOptions::new().token(token.clone());
    let mut call = task::spawn(plan.execute_with("probe", json!({}), options));
    assert_pending!(call.poll());
    token.cancel();
    let error = assert_ready!(call.poll()).unwrap_err();
    assert_eq!(error.code(), OutcomeCode::Cancelled);
    latch.cancel();
    assert!(plan.execute("probe", json!({})).await.unwrap().success);
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_the_token_of_one_call_is_not_seen_by_another() {
    let latch = CancellationToken::new();
    let probe = Probe::new("probe").on_execute([Step::Never, Step::Until(latch.clone())]);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let token = CancellationToken::new();
    let options = CallOptions::new().token(token.clone());
    let mut one = task::spawn(plan.execute_with("probe", json!({}), options));
    assert_pending!(one.poll());
    let mut other = task::spawn(plan.execute("probe", json!({})));
    assert_pending!(other.poll());
    token.cancel();
    assert!(one.await.is_err());
    latch.cancel();
    assert!(other.await.unwrap().success);
    assert!(!plan.traces()[1].cancelled);
    fixture.end().await;
}

// ===== permits =====

#[tokio::test(start_paused = true)]
async fn p14_a_plan_runs_no_more_calls_at_once_than_it_may() {
    let latch = CancellationToken::new();
    let probe = Probe::new("probe").on_execute(Step::Until(latch.clone()));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_concurrent(2)).unwrap();
    let mut calls: Vec<_> = (0..3).map(|_| task::spawn(plan.execute("probe", json!({})))).collect();
    for call in &mut calls {
        assert_pending!(call.poll());
    }
    assert_eq!(probe.counts().executions, 2);
    latch.cancel();
    for call in calls {
        assert!(call.await.unwrap().success);
    }
    assert_eq!(probe.counts().executions, 3);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_tool_runs_no_more_calls_at_once_than_it_may_over_all_plans() {
    let latch = CancellationToken::new();
    let probe = Probe::new("probe").on_execute(Step::Until(latch.clone())).max_concurrent(1);
    let fixture = Fixture::paused(&[&probe]).await;
    let (one, other) = (fixture.plan(), fixture.plan());
    let mut first = task::spawn(one.execute("probe", json!({})));
    assert_pending!(first.poll());
    let mut second = task::spawn(other.execute("probe", json!({})));
    assert_pending!(second.poll());
    assert_eq!(probe.counts().executions, 1);
    latch.cancel();
    assert!(first.await.unwrap().success);
    assert!(second.await.unwrap().success);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_the_wait_for_a_permit_has_a_limit_of_its_own() {
    let probe = Probe::new("probe").on_execute(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let options = PlanOptions::new().max_concurrent(1).permit_wait(5 * SECOND);
    let plan = fixture.begin(options).unwrap();
    let mut holds = task::spawn(plan.execute("probe", json!({})));
    assert_pending!(holds.poll());
    let began = Instant::now();
    let returned = plan.execute("probe", json!({})).await;
    assert_eq!(began.elapsed().as_secs(), 5);
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::Concurrency);
    assert!(matches!(
        returned,
        Err(CallError::Runtime(ToolRuntimeError::LimitExceeded { concurrency: true, .. }))
    ));
    drop(holds);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_the_wait_for_a_tool_s_permit_ends_at_the_call_s_deadline() {
    let probe = Probe::new("probe").on_execute(Step::Never).max_concurrent(1);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let mut holds = task::spawn(plan.execute("probe", json!({})));
    assert_pending!(holds.poll());
    let began = Instant::now();
    let options = CallOptions::new().timeout(SECOND);
    let returned = plan.execute_with("probe", json!({}), options).await;
    assert_eq!(began.elapsed().as_secs(), 1);
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::Concurrency);
    drop(holds);
    fixture.end().await;
}

/// On the real clock: how long a call waited is read from it.
#[tokio::test]
async fn p14_the_wait_for_the_plan_s_permit_does_not_count_in_the_deadline() {
    let latch = CancellationToken::new();
    let steps = [Step::Until(latch.clone()), Step::Yield(1)];
    let probe = Probe::new("probe").on_execute(steps);
    let other =
        Probe::new("other").on_execute(Step::Never).call_timeout(Duration::from_millis(400));
    let fixture = Fixture::new(&[&probe, &other]).await;
    let plan = fixture.begin(PlanOptions::new().max_concurrent(1)).unwrap();
    let mut holds = task::spawn(plan.execute("probe", json!({})));
    assert_pending!(holds.poll());
    let options = CallOptions::new().timeout(Duration::from_millis(200));
    let mut waits = task::spawn(plan.execute_with("probe", json!({}), options));
    assert_pending!(waits.poll());
    let timed_out = fixture.plan().execute("other", json!({})).await.unwrap();
    assert_eq!(timed_out.code(), "timeout");
    latch.cancel();
    assert!(holds.await.unwrap().success);
    assert!(waits.await.unwrap().success);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_nested_call_has_its_plan_s_permit() {
    let probe = Probe::new("probe");
    let fixture = Fixture::with(paused().tool(relay("relay")), &[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_concurrent(1)).unwrap();
    let result = plan.execute("relay", relayed("probe")).await.unwrap();
    assert!(result.success, "{result:?}");
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_nested_call_has_the_permit_that_a_call_above_it_holds() {
    let probe = Probe::new("probe");
    let narrow = relay_of(ToolSpec::new("narrow").max_concurrent(1));
    let builder = paused().tool(narrow).tool(relay("between"));
    let fixture = Fixture::with(builder, &[&probe]).await;
    let plan = fixture.plan();
    let innermost = json!({"tool": "narrow", "input": relayed("probe")});
    let input = json!({"tool": "between", "input": innermost});
    let result = plan.execute("narrow", input).await.unwrap();
    assert!(result.success, "{result:?}");
    assert_eq!(plan.traces().len(), 4);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_nested_call_waits_for_the_permit_of_another_tool() {
    let latch = CancellationToken::new();
    let probe = Probe::new("probe").on_execute(Step::Until(latch.clone())).max_concurrent(1);
    let fixture = Fixture::with(paused().tool(relay("relay")), &[&probe]).await;
    let plan = fixture.plan();
    let mut holds = task::spawn(plan.execute("probe", json!({})));
    assert_pending!(holds.poll());
    let mut nested = task::spawn(plan.execute("relay", relayed("probe")));
    assert_pending!(nested.poll());
    assert_eq!(probe.counts().executions, 1);
    latch.cancel();
    assert!(holds.await.unwrap().success);
    assert!(nested.await.unwrap().success);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_nested_call_that_waits_is_told_that_the_plan_finished() {
    let probe = Probe::new("probe").on_execute(Step::Never).max_concurrent(1);
    let fixture = Fixture::with(paused().tool(relay("relay")), &[&probe]).await;
    let (other, plan) = (fixture.plan(), fixture.plan());
    let mut holds = task::spawn(other.execute("probe", json!({})));
    assert_pending!(holds.poll());
    let handle = plan.handle();
    let mut nested = task::spawn(handle.execute("relay", relayed("probe")));
    assert_pending!(nested.poll());
    let (report, _) = tokio::join!(plan.finish(), nested);
    let codes: Vec<_> = report.traces().iter().map(|trace| trace.outcome).collect();
    assert_eq!(codes, [OutcomeCode::PlanEnded, OutcomeCode::PlanEnded]);
    drop(holds);
    fixture.end().await;
}

/// Calls itself as often as its input says.
fn recursive() -> FunctionTool {
    ToolSpec::new("recursive").handler(async |ctx, args: Recursive| {
        if args.times > 0 {
            let input = json!({"times": args.times - 1});
            ctx.execute_nested("recursive", &input).await?.into_result()?;
        }
        Ok(args.times)
    })
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Recursive {
    times: u32,
}

#[tokio::test(start_paused = true)]
async fn p14_calls_nest_sixteen_deep() {
    let fixture = Fixture::with(paused().tool(recursive()), &[]).await;
    let plan = fixture.plan();
    let input = json!({"times": 16});
    let result = plan.execute("recursive", input).await.unwrap();
    assert!(result.success, "{result:?}");
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_calls_nest_no_deeper_than_sixteen() {
    let fixture = Fixture::with(paused().tool(recursive()), &[]).await;
    let plan = fixture.plan();
    let input = json!({"times": 17});
    let result = plan.execute("recursive", input).await.unwrap();
    assert_eq!(result.code(), "limit_exceeded");
    assert_eq!(plan.traces().len(), 18);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_dropped_call_gives_its_permits_back() {
    let probe = Probe::new("probe").on_execute([Step::Never, Step::Ok]).max_concurrent(1);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_concurrent(1)).unwrap();
    let mut call = task::spawn(plan.execute("probe", json!({})));
    assert_pending!(call.poll());
    drop(call);
    let mut next = task::spawn(plan.execute("probe", json!({})));
    assert!(assert_ready!(next.poll()).unwrap().success);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_panicked_call_gives_its_permits_back() {
    let probe = Probe::new("probe").on_execute([Step::Panic, Step::Ok]).max_concurrent(1);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_concurrent(1)).unwrap();
    let result = plan.execute("probe", json!({})).await.unwrap();
    assert_eq!(result.code(), "panic");
    let mut next = task::spawn(plan.execute("probe", json!({})));
    assert!(assert_ready!(next.poll()).unwrap().success);
    fixture.end().await;
}

// ===== what a tool is lent =====

#[tokio::test(start_paused = true)]
async fn p13_a_change_names_the_tool_and_the_call() {
    use toolscope::{Change, ChangeKind};
    let tool = ToolSpec::new("writer").handler(async |ctx, _: Value| {
        ctx.record_change(Change::new(ChangeKind::Created, "notes.txt"));
        Ok(ctx.call_id())
    });
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.plan();
    let result = plan.execute("writer", json!({})).await.unwrap();
    let report = plan.finish().await;
    let [recorded] = report.changes().try_into().unwrap();
    assert_eq!(recorded.tool.as_str(), "local/writer");
    assert_eq!(json!(recorded.call_id), result.output);
    assert_eq!(recorded.change.target, "notes.txt");
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p11_a_tool_cannot_cancel_its_plan() {
    let tool = ToolSpec::new("rebel").handler(async |ctx, _: Value| {
        ctx.cancellation_token().cancel();
        Ok(ctx.is_cancelled())
    });
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.plan();
    let result = plan.execute("rebel", json!({})).await.unwrap();
    assert_eq!(result.output, json!(true));
    assert_eq!(plan.end_reason(), None);
    let again = plan.execute("rebel", json!({})).await.unwrap();
    assert!(again.success);
    fixture.end().await;
}

// ===== what a call sees and leaves =====

#[tokio::test(start_paused = true)]
async fn p14_a_tool_sees_the_token_of_its_call_within_one_poll() {
    let token = CancellationToken::new();
    let cancel = token.clone();
    let tool = ToolSpec::new("tool").handler(move |ctx, ()| {
        cancel.cancel();
        ready(ctx.check().map_err(ToolFailure::from))
    });
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.plan();
    let options = CallOptions::new().token(token);
    let returned = plan.execute_with("tool", json!({}), options).await;
    assert!(matches!(returned, Err(CallError::Cancelled(_))));
    assert!(traced(&plan, &returned).cancelled);
    fixture.end().await;
}

#[tokio::test]
async fn p13_a_call_lies_between_its_two_moments_on_the_wall() {
    let probe = Probe::new("probe").on_execute(Step::Yield(50));
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let before = SystemTime::now();
    let returned = plan.execute("probe", json!({})).await;
    let after = SystemTime::now();
    let trace = traced(&plan, &returned);
    let slack = Duration::from_millis(5);
    assert!(before <= trace.started + slack && trace.started + trace.duration <= after + slack);
    fixture.end().await;
}

/// Looks at its plan when it is dropped.
#[derive(Debug)]
struct Nosy(PlanHandle);

impl std::fmt::Display for Nosy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("nosy")
    }
}

impl std::error::Error for Nosy {}

impl Drop for Nosy {
    fn drop(&mut self) {
        self.0.end_reason();
    }
}

#[tokio::test]
async fn p14_an_error_may_look_at_its_plan_when_it_is_dropped() {
    let given = Arc::new(std::sync::OnceLock::<PlanHandle>::new());
    let probe = Probe::new("probe");
    let plan = Arc::clone(&given);
    let hooked = crate::hooks::Hooked::new(&probe)
        .before_activate(move |_| ready(Err(Nosy(plan.get().unwrap().clone()).into())));
    let fixture = hooked.fixture(ToolRuntime::builder()).await;
    let plan = fixture.plan();
    given.set(plan.handle()).unwrap();
    for _ in 0..4 {
        crate::hooks::within(plan.execute("probe", json!({}))).await.unwrap_err();
    }
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_a_trace_keeps_the_first_4096_bytes_of_an_error() {
    let tool =
        ToolSpec::new("tool").function(|()| Err::<(), _>(ToolFailure::failed("ä".repeat(100_000))));
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.plan();
    let result = plan.execute("tool", json!({})).await.unwrap();
    assert_eq!(result.error.unwrap().len(), 200_000);
    assert_eq!(plan.traces()[0].error.as_ref().unwrap().len(), 4096 + " [cut]".len());
    fixture.end().await;
}
