//! P15: child plans and nested calls never have more rights than what started them.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_test::{assert_pending, assert_ready, task};
use tokio_util::sync::CancellationToken;
use toolscope::test_util::{Probe, ProbeCounts, Step, execution_context};
use toolscope::{
    ApprovalRequest, Approver, BoundResource, CallError, Deadlines, Decision, EndReason,
    OutcomeCode, PlanHandle, PlanOptions, ToolCapability, ToolFailure, ToolFilter,
    ToolRuntimeError, ToolSpec, async_trait,
};

use crate::call::{relay, relayed};
use crate::hooks::call;
use crate::support::{Fixture, paused};

const SECOND: Duration = Duration::from_secs(1);

// ===== a life of its own =====

#[tokio::test(start_paused = true)]
async fn p15_a_child_has_activations_of_its_own() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let parent = fixture.plan();
    let child = parent.begin_child(PlanOptions::new()).unwrap();
    assert!(parent.execute("probe", json!({})).await.unwrap().success);
    assert!(child.execute("probe", json!({})).await.unwrap().success);
    assert_eq!(probe.counts().activated, 2);
    let report = child.finish().await;
    assert_eq!(report.deactivations().len(), 1);
    assert_eq!(probe.counts().deactivations, 1);
    assert!(parent.execute("probe", json!({})).await.unwrap().success);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_has_traces_of_its_own() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let parent = fixture.plan();
    let child = parent.begin_child(PlanOptions::new()).unwrap();
    assert!(child.execute("probe", json!({})).await.unwrap().success);
    assert_eq!((parent.traces().len(), child.traces().len()), (0, 1));
    assert_eq!(child.traces()[0].plan_id, child.id());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_sees_the_tools_of_its_parent() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let parent = fixture.plan();
    fixture.registry().register(relay("later")).unwrap();
    let child = parent.begin_child(PlanOptions::new()).unwrap();
    assert!(child.tools().get("probe").is_some());
    assert!(child.tools().get("later").is_none());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_that_ends_leaves_its_parent_open() {
    let fixture = Fixture::paused(&[]).await;
    let parent = fixture.plan();
    parent.begin_child(PlanOptions::new()).unwrap().finish().await;
    drop(parent.begin_child(PlanOptions::new()).unwrap());
    assert_eq!(parent.end_reason(), None);
    assert_eq!(fixture.stats().plans, 1);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_dropped_child_is_deactivated() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let parent = fixture.plan();
    let child = parent.begin_child(PlanOptions::new()).unwrap();
    assert!(child.execute("probe", json!({})).await.unwrap().success);
    drop(child);
    let report = parent.finish().await;
    assert_eq!(report.unsettled(), [""; 0]);
    assert_eq!(probe.counts().deactivations, 1);
    fixture.end().await;
}

// ===== the end flows down =====

#[tokio::test(start_paused = true)]
async fn p15_a_child_ends_with_its_parent() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let parent = fixture.plan();
    let child = parent.begin_child(PlanOptions::new()).unwrap();
    assert!(child.execute("probe", json!({})).await.unwrap().success);
    parent.finish().await;
    assert_eq!(child.end_reason(), Some(EndReason::ParentEnded));
    assert_eq!(probe.counts().deactivations, 1);
    let error = child.execute("probe", json!({})).await.unwrap_err();
    assert_eq!(error.code(), OutcomeCode::PlanEnded);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_is_cancelled_with_its_parent() {
    let probe = Probe::new("probe").on_execute(Step::UntilCancelled);
    let fixture = Fixture::paused(&[&probe]).await;
    let parent = fixture.plan();
    let child = parent.begin_child(PlanOptions::new()).unwrap();
    let mut call = task::spawn(child.execute("probe", json!({})));
    assert_pending!(call.poll());
    parent.cancel();
    assert!(call.await.unwrap().success);
    assert!(child.traces()[0].cancelled);
    assert_eq!(child.end_reason(), Some(EndReason::Cancelled));
    let error = child.execute("probe", json!({})).await.unwrap_err();
    assert!(matches!(error, CallError::Cancelled(_)));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_is_cancelled_with_the_token_of_its_parent() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let token = CancellationToken::new();
    let options = PlanOptions::new().token(token.clone());
    let parent = fixture.begin(options).unwrap();
    let child = parent.begin_child(PlanOptions::new()).unwrap();
    token.cancel();
    child.ended().await;
    assert_eq!(child.end_reason(), Some(EndReason::Cancelled));
    fixture.end().await;
}

/// The parent's own calls see its token at once; a child's do as well.
#[tokio::test(start_paused = true)]
async fn p15_a_child_starts_nothing_once_the_token_of_its_parent_is_cancelled() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let token = CancellationToken::new();
    let options = PlanOptions::new().token(token.clone());
    let parent = fixture.begin(options).unwrap();
    let child = parent.begin_child(PlanOptions::new()).unwrap();
    token.cancel();
    let error = child.execute("probe", json!({})).await.unwrap_err();
    assert!(matches!(error, CallError::Cancelled(_)));
    assert_eq!(probe.counts(), ProbeCounts::default());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_no_child_begins_once_the_token_of_its_parent_is_cancelled() {
    let fixture = Fixture::paused(&[]).await;
    let token = CancellationToken::new();
    let parent = fixture.begin(PlanOptions::new().token(token.clone())).unwrap();
    token.cancel();
    assert!(parent.begin_child(PlanOptions::new()).is_err());
    assert_eq!(parent.end_reason(), Some(EndReason::Cancelled));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_tool_begins_a_child_of_its_own_plan() {
    let writer = Probe::new("writer");
    let agent = ToolSpec::new("agent").read_only().handler(async |ctx, _: Value| {
        let child = ctx.begin_child(PlanOptions::new())?;
        let refused = child.execute("writer", json!({})).await.is_err();
        child.finish().await;
        Ok(refused)
    });
    let builder = paused().tool(agent);
    let fixture = Fixture::with(builder, &[&writer]).await;
    let plan = fixture.begin(PlanOptions::new().read_only()).unwrap();
    assert_eq!(plan.execute("agent", json!({})).await.unwrap().output, json!(true));
    assert_eq!(writer.counts(), ProbeCounts::default());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_ends_at_the_deadline_of_its_parent() {
    let fixture = Fixture::paused(&[]).await;
    let options = PlanOptions::new().deadline(SECOND);
    let parent = fixture.begin(options).unwrap();
    let child = parent.begin_child(PlanOptions::new()).unwrap();
    child.ended().await;
    assert_eq!(parent.end_reason(), Some(EndReason::DeadlinePassed));
    assert_eq!(child.end_reason(), Some(EndReason::ParentEnded));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_grandchild_ends_with_the_first_of_the_line() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let parent = fixture.plan();
    let child = parent.begin_child(PlanOptions::new()).unwrap();
    let grandchild = child.begin_child(PlanOptions::new()).unwrap();
    assert!(grandchild.execute("probe", json!({})).await.unwrap().success);
    parent.finish().await;
    assert_eq!(grandchild.end_reason(), Some(EndReason::ParentEnded));
    assert_eq!(probe.counts().deactivations, 1);
    assert_eq!(fixture.stats().plans, 0);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_the_end_of_a_parent_waits_for_its_child() {
    let latch = CancellationToken::new();
    let probe = Probe::new("probe").on_deactivate(Step::Until(latch.clone()));
    let fixture = Fixture::paused(&[&probe]).await;
    let parent = fixture.plan();
    let child = parent.begin_child(PlanOptions::new()).unwrap();
    assert!(child.execute("probe", json!({})).await.unwrap().success);
    let mut finish = task::spawn(parent.finish());
    assert_pending!(finish.poll());
    latch.cancel();
    let report = finish.await;
    assert_eq!(report.unsettled(), [""; 0]);
    assert_eq!(probe.counts().deactivations, 1);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_the_end_of_a_parent_waits_for_a_child_that_was_dropped_before() {
    let latch = CancellationToken::new();
    let probe = Probe::new("probe").on_deactivate(Step::Until(latch.clone()));
    let fixture = Fixture::paused(&[&probe]).await;
    let parent = fixture.plan();
    let child = parent.begin_child(PlanOptions::new()).unwrap();
    assert!(child.execute("probe", json!({})).await.unwrap().success);
    drop(child);
    let mut finish = task::spawn(parent.finish());
    assert_pending!(finish.poll());
    latch.cancel();
    assert_eq!(finish.await.unsettled(), [""; 0]);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_ends_within_what_is_left_to_its_parent() {
    let probe = Probe::new("probe").on_deactivate(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let hasty = Deadlines::default().end(3 * SECOND);
    let options = PlanOptions::new().deadlines(hasty);
    let parent = fixture.begin(options).unwrap();
    let patient = Deadlines::default().end(60 * SECOND).deactivate(60 * SECOND);
    let options = PlanOptions::new().deadlines(patient);
    let child = parent.begin_child(options).unwrap();
    assert!(child.execute("probe", json!({})).await.unwrap().success);
    let began = Instant::now();
    let report = parent.finish().await;
    assert_eq!(began.elapsed().as_secs(), 3);
    assert_eq!(report.unsettled(), [""; 0]);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_that_is_deactivated_leaves_the_parent_s_instances_alone() {
    let probe = Probe::new("probe").on_deactivate(Step::Panic);
    let fixture = Fixture::paused(&[&probe]).await;
    let parent = fixture.plan();
    let child = parent.begin_child(PlanOptions::new()).unwrap();
    parent.activate("probe").await.unwrap();
    child.activate("probe").await.unwrap();
    child.fail().await;
    let result = parent.execute("probe", json!({})).await.unwrap();
    assert!(result.success);
    assert_eq!(probe.counts().activated, 2);
    fixture.end().await;
}

// ===== refused children =====

#[tokio::test(start_paused = true)]
async fn p15_an_ended_plan_has_no_children() {
    let fixture = Fixture::paused(&[]).await;
    let parent = fixture.plan();
    let handle = parent.handle();
    parent.finish().await;
    let error = handle.begin_child(PlanOptions::new()).unwrap_err();
    assert_eq!(error.code(), OutcomeCode::PlanEnded);
    assert_eq!(fixture.stats().plans, 0);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_no_child_begins_after_the_shutdown() {
    let fixture = Fixture::paused(&[]).await;
    let parent = fixture.plan();
    fixture.shutdown(SECOND).await;
    let error = parent.begin_child(PlanOptions::new()).unwrap_err();
    assert_eq!(error.code(), OutcomeCode::ShutDown);
    fixture.end().await;
}

// ===== rights by meet =====

/// Calls a probe of that capability in a child.
async fn call_in_child(
    capability: ToolCapability,
    parent: PlanOptions,
    child: PlanOptions,
) -> OutcomeCode {
    let probe = Probe::new("probe").capability(capability);
    let fixture = Fixture::paused(&[&probe]).await;
    let parent = fixture.begin(parent).unwrap();
    let child = parent.begin_child(child).unwrap();
    let returned = child.execute("probe", json!({})).await;
    fixture.end().await;
    returned.map_or_else(|error| error.code(), |_| OutcomeCode::Ok)
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_of_a_read_only_plan_writes_nothing() {
    let parent = PlanOptions::new().read_only();
    let code = call_in_child(ToolCapability::writes(), parent, PlanOptions::new()).await;
    assert_eq!(code, OutcomeCode::AccessDenied);
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_may_be_read_only_where_its_parent_is_not() {
    let child = PlanOptions::new().read_only();
    let code = call_in_child(ToolCapability::writes(), PlanOptions::new(), child).await;
    assert_eq!(code, OutcomeCode::AccessDenied);
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_needs_the_checkpoints_of_its_parent() {
    let parent = PlanOptions::new().require_checkpoints();
    let code = call_in_child(ToolCapability::writes(), parent, PlanOptions::new()).await;
    assert_eq!(code, OutcomeCode::CheckpointRequired);
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_cannot_allow_unsafe_tools_by_itself() {
    let child = PlanOptions::new().allow_unsafe();
    let capability = ToolCapability::writes().is_unsafe();
    let code = call_in_child(capability, PlanOptions::new(), child).await;
    assert_eq!(code, OutcomeCode::ApprovalRequired);
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_does_not_allow_unsafe_tools_unless_it_says_so() {
    let parent = PlanOptions::new().allow_unsafe();
    let capability = ToolCapability::writes().is_unsafe();
    let code = call_in_child(capability, parent, PlanOptions::new()).await;
    assert_eq!(code, OutcomeCode::ApprovalRequired);
}

#[tokio::test(start_paused = true)]
async fn p15_unsafe_tools_are_allowed_where_both_say_so() {
    let allow = PlanOptions::new().allow_unsafe();
    let capability = ToolCapability::writes().is_unsafe();
    let code = call_in_child(capability, allow.clone(), allow).await;
    assert_eq!(code, OutcomeCode::Ok);
}

#[tokio::test(start_paused = true)]
async fn p15_a_grandchild_has_the_rights_of_the_whole_line() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let parent = fixture.begin(PlanOptions::new().read_only()).unwrap();
    let child = parent.begin_child(PlanOptions::new()).unwrap();
    let grandchild = child.begin_child(PlanOptions::new()).unwrap();
    let error = grandchild.execute("probe", json!({})).await.unwrap_err();
    assert_eq!(error.code(), OutcomeCode::AccessDenied);
    assert_eq!(probe.counts(), ProbeCounts::default());
    fixture.end().await;
}

/// How long a call that never returns takes in a child.
async fn time_out_in_child(parent: PlanOptions, child: PlanOptions) -> u64 {
    let probe = Probe::new("probe").on_execute(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let parent = fixture.begin(parent).unwrap();
    let child = parent.begin_child(child).unwrap();
    let began = Instant::now();
    let result = child.execute("probe", json!({})).await.unwrap();
    assert_eq!(result.code(), "timeout");
    let took = began.elapsed().as_secs();
    fixture.end().await;
    took
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_s_calls_have_no_more_time_than_its_parent_s() {
    let (parent, child) = (PlanOptions::new(), PlanOptions::new());
    let took = time_out_in_child(parent.call_timeout(SECOND), child.call_timeout(9 * SECOND));
    assert_eq!(took.await, 1);
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_s_calls_may_have_less_time_than_its_parent_s() {
    let (parent, child) = (PlanOptions::new(), PlanOptions::new());
    let took = time_out_in_child(parent.call_timeout(9 * SECOND), child.call_timeout(SECOND));
    assert_eq!(took.await, 1);
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_inherits_the_time_of_its_parent_s_calls() {
    let parent = PlanOptions::new().call_timeout(SECOND);
    assert_eq!(time_out_in_child(parent, PlanOptions::new()).await, 1);
}

// ===== sandbox, resources, metadata =====

/// Begins a child of a plan that is confined to `/srv/plan`.
async fn sandboxed(child: PlanOptions) -> Result<String, ToolRuntimeError> {
    let fixture = Fixture::paused(&[]).await;
    let options = PlanOptions::new().sandbox("/srv/plan");
    let parent = fixture.begin(options).unwrap();
    let begun = parent.begin_child(child).map(|child| {
        let ctx = execution_context(&child);
        ctx.sandbox().unwrap().display().to_string()
    });
    fixture.end().await;
    begun
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_inherits_the_sandbox() {
    assert_eq!(sandboxed(PlanOptions::new()).await.unwrap(), "/srv/plan");
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_may_narrow_the_sandbox() {
    let child = PlanOptions::new().sandbox("/srv/plan/one");
    assert_eq!(sandboxed(child).await.unwrap(), "/srv/plan/one");
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_may_not_leave_the_sandbox() {
    let error = sandboxed(PlanOptions::new().sandbox("/srv")).await;
    assert_eq!(error.unwrap_err().code(), OutcomeCode::AccessDenied);
}

/// cases/upstream.md E1: components are compared, not letters.
#[tokio::test(start_paused = true)]
async fn p15_a_sandbox_beside_it_is_not_inside() {
    let error = sandboxed(PlanOptions::new().sandbox("/srv/plan-escape")).await;
    assert_eq!(error.unwrap_err().code(), OutcomeCode::AccessDenied);
}

#[tokio::test(start_paused = true)]
async fn p15_a_sandbox_that_climbs_out_is_not_inside() {
    let child = PlanOptions::new().sandbox("/srv/plan/../secret");
    let error = sandboxed(child).await;
    assert_eq!(error.unwrap_err().code(), OutcomeCode::AccessDenied);
}

#[tokio::test(start_paused = true)]
async fn p15_a_plan_without_a_sandbox_gives_none_to_its_child() {
    let fixture = Fixture::paused(&[]).await;
    let parent = fixture.plan();
    let options = PlanOptions::new().sandbox(Path::new("/"));
    let error = parent.begin_child(options).unwrap_err();
    assert_eq!(error.code(), OutcomeCode::AccessDenied);
    assert_eq!(fixture.stats().plans, 1);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_inherits_the_resources() {
    let fixture = Fixture::paused(&[]).await;
    let bound = BoundResource::new("db", "postgres", "db.example:5432");
    let options = PlanOptions::new().resource(bound.clone());
    let parent = fixture.begin(options).unwrap();
    let child = parent.begin_child(PlanOptions::new()).unwrap();
    assert_eq!(execution_context(&child).resource("db"), Some(&bound));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_may_choose_among_the_resources() {
    let fixture = Fixture::paused(&[]).await;
    let one = BoundResource::new("one", "postgres", "one.example");
    let other = BoundResource::new("other", "postgres", "other.example");
    let options = PlanOptions::new().resource(one.clone()).resource(other);
    let parent = fixture.begin(options).unwrap();
    let options = PlanOptions::new().resource(one.clone());
    let child = parent.begin_child(options).unwrap();
    assert_eq!(execution_context(&child).resources(), [one]);
    fixture.end().await;
}

/// The same name is not enough: the place counts.
#[tokio::test(start_paused = true)]
async fn p15_a_child_may_not_bind_what_its_parent_does_not() {
    let fixture = Fixture::paused(&[]).await;
    let bound = BoundResource::new("db", "postgres", "db.example:5432");
    let parent = fixture.begin(PlanOptions::new().resource(bound)).unwrap();
    let forged = BoundResource::new("db", "postgres", "production.example:5432");
    let error = parent.begin_child(PlanOptions::new().resource(forged)).unwrap_err();
    assert_eq!(error.code(), OutcomeCode::AccessDenied);
    assert!(error.to_string().contains("`db`"), "{error}");
    assert_eq!(fixture.stats().plans, 1);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_inherits_the_metadata_and_may_add_to_it() {
    let fixture = Fixture::paused(&[]).await;
    let parent = fixture.begin(PlanOptions::new().metadata("tenant", "a")).unwrap();
    let options = || PlanOptions::new().metadata("step", 1).metadata("tenant", "b");
    let said = |plan: &PlanHandle| Value::from(execution_context(plan).metadata().clone());
    let child = parent.begin_child(options()).unwrap();
    assert_eq!(said(&child), json!({"tenant": "b", "step": 1}), "the host may say otherwise");
    let child = execution_context(&parent).begin_child(options()).unwrap();
    assert_eq!(said(&child), json!({"tenant": "a", "step": 1}), "a tool may not");
    fixture.end().await;
}

/// An approval that is waited for does not count as time of the calls above: a longer wait of the
/// child's would give them more.
#[tokio::test(start_paused = true)]
async fn p15_a_child_waits_no_longer_than_its_parent() {
    let asks = ToolSpec::new("asks").writes().function(|_: Value| Ok(1));
    let fixture = Fixture::with(paused().tool(asks).approver(Silent), &[]).await;
    let options = PlanOptions::new().ask(ToolFilter::new()).approval_wait(SECOND);
    let parent = fixture.begin(options).unwrap();
    let child = parent.begin_child(PlanOptions::new().approval_wait(100 * SECOND)).unwrap();
    let began = Instant::now();
    let error = child.execute("asks", json!({})).await.unwrap_err();
    assert_eq!((error.code(), began.elapsed()), (OutcomeCode::ApprovalDenied, SECOND));
    drop((child, parent));
    fixture.end().await;
}

struct Silent;

#[async_trait]
impl Approver for Silent {
    async fn decide(&self, _: &ApprovalRequest) -> Result<Decision, ToolFailure> {
        std::future::pending().await
    }
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Depth {
    depth: u32,
}

/// An agent that goes deeper in every way there is, and says how deep it came.
fn agent() -> ToolSpec {
    ToolSpec::new("agent").read_only()
}

/// All of them are on one stack, whichever plan they belong to.
#[tokio::test(start_paused = true)]
async fn p15_calls_are_nested_16_deep_over_all_plans_that_tools_began() {
    let deeper = agent().handler(async |ctx, Depth { depth }: Depth| {
        let input = json!({"depth": depth + 1});
        let nested = ctx.execute_nested("agent", &input).await;
        let result = match nested {
            Ok(result) => Ok(result),
            Err(_) => ctx.begin_child(PlanOptions::new())?.execute("agent", input).await,
        };
        Ok(result.map_or(json!(depth), |result| result.output))
    });
    let fixture = Fixture::with(paused().tool(deeper), &[]).await;
    let plan = fixture.plan();
    let result = plan.execute("agent", json!({"depth": 1})).await.unwrap();
    assert_eq!(result.output, json!(17), "16 below the first");
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_that_a_tool_began_does_not_wait_for_the_tool_s_own_permit() {
    let again = agent().max_concurrent(1).handler(async |ctx, Depth { depth }: Depth| {
        if depth == 3 {
            return Ok(depth);
        }
        let child = ctx.begin_child(PlanOptions::new())?;
        let result = child.execute("agent", json!({"depth": depth + 1})).await?;
        Ok(result.output.as_u64().and_then(|depth| depth.try_into().ok()).unwrap_or_default())
    });
    let fixture = Fixture::with(paused().tool(again), &[]).await;
    let plan = fixture.plan();
    let result = plan.execute("agent", json!({"depth": 1})).await.unwrap();
    assert_eq!((result.output, result.duration_ms), (json!(3), 0.0), "nothing was waited for");
    drop(plan);
    fixture.end().await;
}

/// What a call holds it gives back when it is over, however long its plan lives.
#[tokio::test(start_paused = true)]
async fn p15_a_child_that_outlives_its_call_takes_the_permit() {
    let latch = CancellationToken::new();
    let holds = Probe::new("holds").max_concurrent(1).on_execute(Step::Until(latch.clone()));
    let (send, mut children) = tokio::sync::mpsc::unbounded_channel();
    let begins = ToolSpec::new("holds/begins").read_only().handler_with(
        std::sync::Arc::new(send),
        async |send, ctx, _: Value| {
            send.send(ctx.begin_child(PlanOptions::new().permit_wait(SECOND))?).unwrap();
            Ok(())
        },
    );
    let fixture = Fixture::with(paused().tool(begins), &[&holds]).await;
    let plan = fixture.plan();
    plan.execute("holds/begins", json!({})).await.unwrap();
    let child = children.recv().await.unwrap();
    let mut first = task::spawn(call(&plan, "holds"));
    assert_pending!(first.poll());
    let error = child.execute("holds", json!({})).await.unwrap_err();
    assert_eq!(error.code(), OutcomeCode::Concurrency);
    latch.cancel();
    first.await.unwrap();
    drop((child, plan));
    fixture.end().await;
}

// ===== nested calls =====

#[tokio::test(start_paused = true)]
async fn p15_a_nested_call_writes_nothing_in_a_read_only_plan() {
    let probe = Probe::new("probe");
    let fixture = Fixture::with(paused().tool(relay("relay")), &[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().read_only()).unwrap();
    let result = plan.execute("relay", relayed("probe")).await.unwrap();
    assert_eq!(result.code(), "access_denied");
    assert_eq!(probe.counts(), ProbeCounts::default());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_nested_call_needs_the_approval_that_a_direct_one_needs() {
    let probe = Probe::new("probe").capability(ToolCapability::read_only().is_unsafe());
    let fixture = Fixture::with(paused().tool(relay("relay")), &[&probe]).await;
    let plan = fixture.plan();
    let result = plan.execute("relay", relayed("probe")).await.unwrap();
    assert_eq!(result.code(), "approval_required");
    assert_eq!(probe.counts(), ProbeCounts::default());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_nested_call_has_no_more_time_than_its_parent() {
    let probe = Probe::new("probe").on_execute(Step::Never);
    let fixture = Fixture::with(paused().tool(relay("relay")), &[&probe]).await;
    let options = PlanOptions::new().call_timeout(SECOND);
    let plan = fixture.begin(options).unwrap();
    let began = Instant::now();
    let result = plan.execute("relay", relayed("probe")).await.unwrap();
    assert_eq!(result.code(), "timeout");
    assert_eq!(began.elapsed().as_secs(), 1);
    assert_eq!(probe.counts().dropped, 1);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_nested_call_uses_the_instance_of_its_plan() {
    let probe = Probe::new("probe");
    let fixture = Fixture::with(paused().tool(relay("relay")), &[&probe]).await;
    let plan = fixture.plan();
    plan.activate("probe").await.unwrap();
    let result = plan.execute("relay", relayed("probe")).await.unwrap();
    assert!(result.success, "{result:?}");
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

/// A context may outlive its call, but not the rights of its plan.
#[tokio::test(start_paused = true)]
async fn p15_a_context_that_was_kept_starts_nothing_after_the_plan() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let ctx = execution_context(&plan);
    plan.finish().await;
    let error = ctx.execute_nested("probe", &json!({})).await.unwrap_err();
    assert_eq!(error.code(), OutcomeCode::PlanEnded);
    assert_eq!(probe.counts(), ProbeCounts::default());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_each_plan_has_its_own_limit_of_calls_at_once() {
    let probe = Probe::new("probe").on_execute([Step::Never, Step::Ok]);
    let fixture = Fixture::paused(&[&probe]).await;
    let options = PlanOptions::new().max_concurrent(1);
    let parent = fixture.begin(options).unwrap();
    let child = parent.begin_child(PlanOptions::new()).unwrap();
    let mut holds = task::spawn(parent.execute("probe", json!({})));
    assert_pending!(holds.poll());
    let mut call = task::spawn(child.execute("probe", json!({})));
    assert!(assert_ready!(call.poll()).unwrap().success);
    drop(holds);
    fixture.end().await;
}

// ===== the end of what is nested =====

#[tokio::test(start_paused = true)]
async fn p15_a_child_that_is_ending_is_cut_to_what_is_left_of_its_parent() {
    let probe = Probe::new("probe").on_deactivate(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let parent = PlanOptions::new().deadlines(Deadlines::default().end(SECOND));
    let parent = fixture.begin(parent).unwrap();
    let patient = Deadlines::default().end(90 * SECOND).deactivate(90 * SECOND);
    let child = parent.begin_child(PlanOptions::new().deadlines(patient)).unwrap();
    child.execute("probe", json!({})).await.unwrap();
    drop(child);
    let began = Instant::now();
    let report = parent.finish().await;
    assert_eq!(report.unsettled(), [""; 0]);
    assert_eq!(began.elapsed().as_secs(), 1);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_plans_are_nested_sixteen_deep_and_no_deeper() {
    let fixture = Fixture::paused(&[]).await;
    let mut plans = vec![fixture.plan()];
    for _ in 0..16 {
        let child = plans.last().unwrap().begin_child(PlanOptions::new()).unwrap();
        plans.push(child);
    }
    let refused = plans.last().unwrap().begin_child(PlanOptions::new()).unwrap_err();
    assert_eq!(refused.code(), OutcomeCode::AccessDenied);
    drop(plans);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_context_that_was_kept_inherits_no_permit() {
    let (kept, keep) = tokio::sync::oneshot::channel();
    let kept = std::sync::Mutex::new(Some(kept));
    let keeper = ToolSpec::new("keeper").read_only().handler(move |ctx, ()| {
        let kept = kept.lock().unwrap().take().unwrap();
        std::future::ready(kept.send(ctx).map_err(|_| ToolFailure::failed("nobody keeps it")))
    });
    let probe = Probe::new("probe").on_execute(Step::Never);
    let fixture = Fixture::with(paused().tool(keeper), &[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_concurrent(1).permit_wait(SECOND)).unwrap();
    plan.execute("keeper", json!({})).await.unwrap();
    let ctx = keep.await.unwrap();
    let mut holds = task::spawn(plan.execute("probe", json!({})));
    assert_pending!(holds.poll());
    let error = ctx.execute_nested("probe", &json!({})).await.unwrap_err();
    assert_eq!(error.code(), OutcomeCode::Concurrency);
    drop(holds);
    fixture.end().await;
}
