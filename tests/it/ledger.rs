//! P16: whatever ends a plan, the ledger balances and agrees with the probes; and the runtime's other statistics.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};
use tokio_test::{assert_pending, task};
use tokio_util::sync::CancellationToken;
use toolscope::test_util::{Probe, Step};
use toolscope::{Plan, PlanOptions, Stats, ToolSpec};

use crate::support::{Fixture, paused};

const SECOND: Duration = Duration::from_secs(1);

/// A plan in which the tool `probe` is active.
async fn active(fixture: &Fixture, options: PlanOptions) -> Plan {
    let plan = fixture.begin(options).unwrap();
    assert!(plan.execute("probe", json!({})).await.unwrap().success);
    plan
}

/// Checks the counts of a runtime in which that many instances came and went, and nothing failed.
#[track_caller]
fn assert_instances(stats: Stats, instances: u64) {
    assert_eq!(
        (stats.started, stats.activated, stats.deactivated),
        (instances, instances, instances)
    );
    assert_eq!((stats.failed, stats.troubled), (0, 0));
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

// ===== the ways to end =====

#[tokio::test(start_paused = true)]
async fn p16_balances_when_a_plan_finishes() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    active(&fixture, PlanOptions::new()).await.finish().await;
    assert_instances(fixture.end().await, 1);
}

#[tokio::test(start_paused = true)]
async fn p16_balances_when_a_plan_fails() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    active(&fixture, PlanOptions::new()).await.fail().await;
    assert_instances(fixture.end().await, 1);
}

#[tokio::test(start_paused = true)]
async fn p16_balances_when_a_plan_is_cancelled() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    active(&fixture, PlanOptions::new()).await.cancel();
    assert_instances(fixture.end().await, 1);
}

#[tokio::test(start_paused = true)]
async fn p16_balances_when_a_plan_is_dropped() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    drop(active(&fixture, PlanOptions::new()).await);
    assert_instances(fixture.end().await, 1);
}

#[tokio::test(start_paused = true)]
async fn p16_balances_when_the_owner_of_a_plan_panics() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = active(&fixture, PlanOptions::new()).await;
    let owner = tokio::spawn(async move {
        let _plan = plan;
        panic!("the owner panics");
    });
    assert!(owner.await.unwrap_err().is_panic());
    assert_instances(fixture.end().await, 1);
}

#[tokio::test(start_paused = true)]
async fn p16_balances_when_the_token_of_a_plan_is_cancelled() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let token = CancellationToken::new();
    let plan = active(&fixture, PlanOptions::new().token(token.clone())).await;
    token.cancel();
    plan.ended().await;
    assert_instances(fixture.end().await, 1);
}

#[tokio::test(start_paused = true)]
async fn p16_balances_when_the_deadline_of_a_leaked_plan_passes() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = active(&fixture, PlanOptions::new().deadline(SECOND)).await;
    let plan = Box::leak(Box::new(plan));
    plan.ended().await;
    assert_instances(fixture.end().await, 1);
}

#[tokio::test(start_paused = true)]
async fn p16_balances_when_a_parent_ends() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let parent = active(&fixture, PlanOptions::new()).await;
    let child = parent.begin_child(PlanOptions::new()).unwrap();
    assert!(child.execute("probe", json!({})).await.unwrap().success);
    parent.finish().await;
    assert_instances(fixture.end().await, 2);
}

#[tokio::test(start_paused = true)]
async fn p16_balances_when_the_runtime_shuts_down_under_a_leaked_plan() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = active(&fixture, PlanOptions::new()).await;
    Box::leak(Box::new(plan));
    assert_instances(fixture.end().await, 1);
}

#[test]
fn p16_balances_when_the_runtime_is_dropped() {
    let probe = Probe::new("probe").on_deactivate(Step::Yield(5));
    let runtime = runtime();
    let (fixture, plan) = runtime.block_on(async {
        let fixture = Fixture::new(&[&probe]).await;
        let plan = active(&fixture, PlanOptions::new()).await;
        (fixture, plan)
    });
    fixture.end_by_drop();
    drop(plan);
    assert_eq!(probe.counts().deactivations, 1);
}

#[tokio::test(start_paused = true)]
async fn p16_balances_when_the_caller_s_task_is_aborted() {
    let probe = Probe::new("probe").on_execute(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let caller = tokio::spawn(async move { plan.execute("probe", json!({})).await });
    tokio::task::yield_now().await;
    caller.abort();
    assert!(caller.await.unwrap_err().is_cancelled());
    assert_eq!(probe.counts().executions, 1);
    assert_instances(fixture.end().await, 1);
}

#[test]
fn p16_balances_when_the_caller_s_runtime_ends_in_a_call() {
    let probe = Probe::new("probe").on_execute(Step::Never);
    let runtime = runtime();
    let fixture = runtime.block_on(Fixture::new(&[&probe]));
    let callers = self::runtime();
    let plan = fixture.plan();
    callers.block_on(async {
        tokio::spawn(async move { plan.execute("probe", json!({})).await });
        tokio::task::yield_now().await;
    });
    assert_eq!(probe.counts().executions, 1);
    drop(callers);
    assert_instances(runtime.block_on(fixture.end()), 1);
}

#[test]
fn p16_balances_when_the_caller_s_runtime_ends_in_an_activation() {
    let latch = CancellationToken::new();
    let probe = Probe::new("probe").on_activate(Step::Until(latch.clone()));
    let runtime = runtime();
    let fixture = runtime.block_on(Fixture::new(&[&probe]));
    let callers = self::runtime();
    let plan = fixture.plan();
    callers.block_on(async {
        tokio::spawn(async move { plan.execute("probe", json!({})).await });
        tokio::task::yield_now().await;
    });
    assert_eq!(probe.counts().activations, 1);
    drop(callers);
    latch.cancel();
    assert_instances(runtime.block_on(fixture.end()), 1);
}

// ===== what goes wrong =====

#[tokio::test(start_paused = true)]
async fn p16_a_failed_activation_is_no_instance() {
    let probe = Probe::new("probe").on_activate([Step::Err, Step::Panic, Step::Ok]);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    assert!(plan.execute("probe", json!({})).await.is_err());
    assert!(plan.execute("probe", json!({})).await.is_err());
    assert!(plan.execute("probe", json!({})).await.unwrap().success);
    let stats = fixture.end().await;
    assert_eq!((stats.started, stats.failed, stats.activated), (3, 2, 1));
}

#[tokio::test(start_paused = true)]
async fn p16_an_activation_that_timed_out_is_no_instance() {
    let probe = Probe::new("probe").on_activate(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    assert!(plan.execute("probe", json!({})).await.is_err());
    let stats = fixture.end().await;
    assert_eq!((stats.started, stats.failed, stats.activated), (1, 1, 0));
    assert_eq!(probe.counts().half_done, 1);
}

#[tokio::test(start_paused = true)]
async fn p16_an_activation_that_outlived_its_plan_is_deactivated() {
    let latch = CancellationToken::new();
    let probe = Probe::new("probe").on_activate(Step::Until(latch.clone()));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let mut call = task::spawn(plan.execute("probe", json!({})));
    assert_pending!(call.poll());
    drop(call);
    drop(plan);
    latch.cancel();
    assert_instances(fixture.end().await, 1);
}

#[tokio::test(start_paused = true)]
async fn p16_a_deactivation_that_fails_counts_as_trouble() {
    let probe = Probe::new("probe").on_deactivate(Step::Err);
    let fixture = Fixture::paused(&[&probe]).await;
    let report = active(&fixture, PlanOptions::new()).await.finish().await;
    assert_eq!(report.errors().len(), 1);
    let stats = fixture.end().await;
    assert_eq!((stats.deactivated, stats.troubled), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn p16_a_deactivation_that_panics_counts_as_trouble() {
    let probe = Probe::new("probe").on_deactivate(Step::Panic);
    let fixture = Fixture::paused(&[&probe]).await;
    active(&fixture, PlanOptions::new()).await.finish().await;
    let stats = fixture.end().await;
    assert_eq!((stats.deactivated, stats.troubled), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn p16_a_deactivation_that_hangs_counts_as_trouble() {
    let probe = Probe::new("probe").on_deactivate(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    active(&fixture, PlanOptions::new()).await.finish().await;
    let stats = fixture.end().await;
    assert_eq!((stats.deactivated, stats.troubled), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn p16_an_instance_that_panics_in_its_drop_is_deactivated() {
    let probe = Probe::new("probe").panics_in_drop();
    let fixture = Fixture::paused(&[&probe]).await;
    active(&fixture, PlanOptions::new()).await.finish().await;
    assert_instances(fixture.end().await, 1);
}

// ===== more than one instance =====

#[tokio::test(start_paused = true)]
async fn p16_counts_each_generation() {
    let probe = Probe::new("probe").taints(true);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = active(&fixture, PlanOptions::new()).await;
    assert!(plan.execute("probe", json!({})).await.unwrap().success);
    assert_instances(fixture.end().await, 2);
}

#[tokio::test(start_paused = true)]
async fn p16_counts_what_was_deactivated_by_hand() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = active(&fixture, PlanOptions::new()).await;
    assert!(plan.deactivate("probe").await);
    assert_eq!((fixture.stats().deactivated, fixture.stats().open), (1, 0));
    plan.activate("probe").await.unwrap();
    assert_instances(fixture.end().await, 2);
}

#[tokio::test(start_paused = true)]
async fn p16_counts_a_shared_activation_once() {
    let server = Probe::new("server");
    let one = Probe::new("one").needs(&server);
    let other = Probe::new("other").needs(&server);
    let fixture = Fixture::paused(&[&one, &other]).await.track(&server);
    let plan = fixture.plan();
    assert!(plan.execute("one", json!({})).await.unwrap().success);
    assert!(plan.execute("other", json!({})).await.unwrap().success);
    assert_eq!(fixture.stats().open, 3);
    assert_instances(fixture.end().await, 3);
}

#[tokio::test(start_paused = true)]
async fn p16_an_immediate_tool_has_no_place_in_the_ledger() {
    let tool = ToolSpec::new("echo").function(|args: Value| Ok(args));
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.plan();
    assert!(plan.execute("echo", json!({})).await.unwrap().success);
    plan.activate("echo").await.unwrap();
    assert_instances(fixture.end().await, 0);
}

// ===== what is open =====

#[tokio::test(start_paused = true)]
async fn p16_an_active_instance_is_open() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = active(&fixture, PlanOptions::new()).await;
    let stats = fixture.stats();
    assert_eq!((stats.plans, stats.open, stats.deactivated), (1, 1, 0));
    plan.finish().await;
    let stats = fixture.stats();
    assert_eq!((stats.plans, stats.open, stats.deactivated), (0, 0, 1));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p16_an_instance_on_its_way_out_is_open_and_so_is_its_plan() {
    let latch = CancellationToken::new();
    let probe = Probe::new("probe").on_deactivate(Step::Until(latch.clone()));
    let fixture = Fixture::paused(&[&probe]).await;
    let mut finish = task::spawn(active(&fixture, PlanOptions::new()).await.finish());
    assert_pending!(finish.poll());
    let stats = fixture.stats();
    assert_eq!((stats.plans, stats.open, stats.deactivated), (1, 1, 0));
    latch.cancel();
    finish.await;
    assert_eq!((fixture.stats().plans, fixture.stats().open), (0, 0));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p16_an_activation_under_way_is_started_and_not_open() {
    let probe = Probe::new("probe").on_activate(Step::UntilCancelled);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let mut call = task::spawn(plan.execute("probe", json!({})));
    assert_pending!(call.poll());
    let stats = fixture.stats();
    assert_eq!((stats.started, stats.activated, stats.open), (1, 0, 0));
    drop(call);
    fixture.end().await;
}

// ===== the plans =====

#[tokio::test(start_paused = true)]
async fn p16_no_plan_is_left_after_a_burst() {
    let fixture = Fixture::paused(&[]).await;
    let plans: Vec<_> = (0..10_000).map(|_| fixture.plan()).collect();
    assert_eq!(fixture.stats().plans, 10_000);
    let first = plans[0].id();
    drop(plans);
    assert_eq!(fixture.stats().plans, 0);
    assert!(fixture.handle().plan(first).is_none());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p16_an_idle_plan_costs_the_ledger_nothing() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    fixture.plan().finish().await;
    assert_instances(fixture.end().await, 0);
}

/// With a keeper of its own: the clock of a shutdown is never a paused one.
#[tokio::test]
async fn p16_a_shutdown_reports_the_ledger_and_who_is_late() {
    let latch = CancellationToken::new();
    let probe = Probe::new("probe").on_deactivate(Step::Until(latch.clone()));
    let fixture = Fixture::new(&[&probe]).await;
    let plan = active(&fixture, PlanOptions::new()).await;
    let report = fixture.shutdown(Duration::ZERO).await;
    let [late] = report.stragglers.as_slice() else {
        panic!("not one straggler: {report:?}");
    };
    assert_eq!(late.plan_id, plan.id());
    assert_eq!(late.unsettled, ["local/probe"]);
    assert_eq!((report.stats.open, report.stats.deactivated), (1, 0));
    latch.cancel();
    fixture.end().await;
}
