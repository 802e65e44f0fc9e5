//! P4 and P7: exactly one deactivation, bounded and contained, by every way a plan can end.
//!
//! The tear-down checks the "exactly one"; a test says by when.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};
use tokio::time::Instant;
use tokio_test::{assert_pending, task};
use tokio_util::sync::CancellationToken;
use toolscope::test_util::{Probe, Step};
use toolscope::{
    ActivationContext, CallError, DeactivationContext, DeactivationOutcome, Deadlines, EndReason,
    Plan, PlanOptions, PlanReport, Tool, ToolDescriptor, ToolExecutionContext, ToolFailure,
    ToolInstance, ToolOutput, ToolRuntime, ToolRuntimeError, async_trait,
};

use crate::hooks::{
    Blocker, Hooked, Log, Passed, activation_error, assert_about, block_on, call, gated, ready,
    until, within,
};
use crate::support::{Fixture, paused};

/// A plan with an active `tool`.
async fn active(probe: &Probe) -> (Fixture, Plan) {
    let fixture = Fixture::new(&[probe]).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    (fixture, plan)
}

fn outcomes(report: &PlanReport) -> Vec<(String, DeactivationOutcome)> {
    let records = report.deactivations().into_iter();
    records.map(|record| (record.name, record.outcome)).collect()
}

#[expect(clippy::mem_forget, reason = "a leak is what the test is about")]
fn leak<T>(value: T) {
    std::mem::forget(value);
}

// ===== P4: the ordinary ends =====

#[tokio::test]
async fn p4_finish_deactivates_before_it_returns() {
    let probe = Probe::new("tool").on_deactivate(Step::Yield(2));
    let (fixture, plan) = active(&probe).await;
    let report = plan.finish().await;
    assert_eq!(outcomes(&report), [("local/tool".to_owned(), DeactivationOutcome::Ok)]);
    assert_eq!(fixture.stats().plans, 0);
    fixture.end().await;
}

#[tokio::test]
async fn p4_fail_deactivates_before_it_returns() {
    let probe = Probe::new("tool").on_deactivate(Step::Yield(2));
    let (fixture, plan) = active(&probe).await;
    let report = plan.fail().await;
    assert_eq!((report.reason(), report.deactivations().len()), (EndReason::Failed, 1));
    fixture.end().await;
}

#[tokio::test]
async fn p4_cancel_deactivates() {
    let probe = Probe::new("tool");
    let (fixture, plan) = active(&probe).await;
    plan.cancel();
    until(|| probe.counts().deactivations == 1).await;
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p4_a_cancelled_token_deactivates() {
    let probe = Probe::new("tool");
    let fixture = Fixture::new(&[&probe]).await;
    let token = CancellationToken::new();
    let plan = fixture.begin(PlanOptions::new().token(token.clone())).unwrap();
    call(&plan, "tool").await.unwrap();
    token.cancel();
    until(|| probe.counts().deactivations == 1).await;
    drop(plan);
    fixture.end().await;
}

#[tokio::test]
async fn p4_dropping_the_plan_deactivates() {
    let probe = Probe::new("tool");
    let (fixture, plan) = active(&probe).await;
    drop(plan);
    until(|| probe.counts().deactivations == 1).await;
    fixture.end().await;
}

#[tokio::test]
async fn p4_dropping_finish_half_way_deactivates() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").on_deactivate(Step::Until(latch.clone()));
    let (fixture, plan) = active(&probe).await;
    let mut finish = task::spawn(plan.finish());
    assert_pending!(finish.poll());
    drop(finish);
    latch.cancel();
    until(|| fixture.stats().plans == 0).await;
    assert_eq!(fixture.stats().deactivated, 1);
    fixture.end().await;
}

#[tokio::test]
async fn p4_finish_never_polled_deactivates() {
    let probe = Probe::new("tool");
    let (fixture, plan) = active(&probe).await;
    drop(plan.finish());
    until(|| probe.counts().deactivations == 1).await;
    fixture.end().await;
}

#[tokio::test]
async fn p4_a_tool_activated_by_hand_and_never_called_is_deactivated() {
    let probe = Probe::new("tool");
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    plan.activate("tool").await.unwrap();
    plan.finish().await;
    assert_eq!(probe.counts().deactivations, 1);
    fixture.end().await;
}

#[tokio::test]
async fn p4_shutdown_deactivates() {
    let probe = Probe::new("tool");
    let (fixture, plan) = active(&probe).await;
    let report = fixture.shutdown(Duration::from_secs(20)).await;
    assert_eq!((report.stats.deactivated, report.stragglers.len()), (1, 0));
    assert_eq!(plan.end_reason(), Some(EndReason::ShutDown));
    fixture.end().await;
}

#[tokio::test]
async fn p4_a_thousand_plans_ended_at_once_are_all_deactivated() {
    let probe = Probe::new("tool").on_deactivate(Step::Yield(1));
    let fixture = Fixture::new(&[&probe]).await;
    let mut plans = Vec::new();
    for _ in 0..1000 {
        let plan = fixture.plan();
        call(&plan, "tool").await.unwrap();
        plans.push(plan);
    }
    drop(plans);
    assert_eq!(fixture.end().await.deactivated, 1000);
}

// ===== P4: the end of a plan under an activation =====

#[tokio::test]
async fn p4_an_activation_that_the_end_overtakes_is_deactivated_at_once() {
    let (probe, latch) = gated();
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let mut waiting = task::spawn(call(&plan, "tool"));
    assert_pending!(waiting.poll());
    plan.cancel();
    assert!(within(waiting).await.is_err());
    latch.cancel();
    until(|| probe.counts().deactivations == 1).await;
    assert_eq!(probe.counts().executions, 0);
    drop(plan);
    fixture.end().await;
}

#[tokio::test]
async fn p4_finish_waits_for_the_activation_under_way_and_its_deactivation() {
    let (probe, latch) = gated();
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let mut waiting = task::spawn(call(&plan, "tool"));
    assert_pending!(waiting.poll());
    drop(waiting);
    let mut finish = task::spawn(plan.finish());
    assert_pending!(finish.poll());
    latch.cancel();
    let report = within(finish).await;
    assert_eq!(report.deactivations().len(), 1);
    fixture.end().await;
}

#[tokio::test]
async fn p4_an_activation_sees_that_its_plan_ended() {
    let probe = Probe::new("tool").on_activate(Step::UntilCancelled);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let mut waiting = task::spawn(call(&plan, "tool"));
    assert_pending!(waiting.poll());
    drop(waiting);
    assert_eq!(within(plan.finish()).await.deactivations().len(), 1);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p4_an_activation_that_ignores_the_end_is_cut_to_the_budget() {
    let probe = Probe::new("tool").on_activate(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let deadlines = Deadlines::default().end(Duration::from_secs(3));
    let plan = fixture.begin(PlanOptions::new().deadlines(deadlines)).unwrap();
    let mut waiting = task::spawn(call(&plan, "tool"));
    assert_pending!(waiting.poll());
    drop(waiting);
    let began = Instant::now();
    assert!(plan.finish().await.unsettled().is_empty());
    assert_about(began.elapsed(), 3_000);
    assert_eq!(probe.counts().half_done, 1);
    fixture.end().await;
}

#[tokio::test]
async fn p4_an_activation_whose_future_panics_in_its_drop_is_deactivated() {
    let probe = Probe::new("tool");
    let tool = BombInFuture(Arc::new(probe.tool()));
    let fixture = Fixture::with(ToolRuntime::builder().tool(tool), &[]).await.track(&probe);
    let plan = fixture.plan();
    assert!(call(&plan, "tool").await.unwrap().success);
    plan.finish().await;
    assert_eq!(probe.counts().deactivations, 1);
    fixture.end().await;
}

// ===== P4: panics =====

#[tokio::test]
async fn p4_a_panic_in_one_activation_leaves_the_other_instance_to_be_deactivated() {
    let (broken, whole) = (Probe::new("broken").on_activate(Step::Panic), Probe::new("whole"));
    let fixture = Fixture::new(&[&broken, &whole]).await;
    let plan = fixture.plan();
    call(&plan, "whole").await.unwrap();
    activation_error(call(&plan, "broken").await);
    assert_eq!(plan.finish().await.deactivations().len(), 1);
    fixture.end().await;
}

#[tokio::test]
async fn p4_a_panic_in_execute_does_not_keep_the_tool_from_being_deactivated() {
    let probe = Probe::new("tool").on_execute(Step::Panic);
    let (fixture, plan) = active(&probe).await;
    assert_eq!(plan.finish().await.deactivations().len(), 1);
    fixture.end().await;
}

#[tokio::test]
async fn p4_a_panic_in_the_drop_of_an_instance_is_contained() {
    let probe = Probe::new("tool").panics_in_drop();
    let (fixture, plan) = active(&probe).await;
    let report = plan.finish().await;
    assert_eq!(outcomes(&report), [("local/tool".to_owned(), DeactivationOutcome::Ok)]);
    fixture.end().await;
}

#[tokio::test]
async fn p4_a_panic_of_the_task_that_owns_the_plan_deactivates() {
    let probe = Probe::new("tool");
    let (fixture, plan) = active(&probe).await;
    let handle = plan.handle();
    let owner = tokio::spawn(async move {
        let _plan = plan;
        tokio::task::yield_now().await;
        panic!("the owner panics");
    });
    assert!(owner.await.unwrap_err().is_panic());
    until(|| probe.counts().deactivations == 1).await;
    assert_eq!(handle.end_reason(), Some(EndReason::Panicked));
    fixture.end().await;
}

#[tokio::test]
async fn p4_a_panic_beside_a_call_deactivates() {
    let probe = Probe::new("tool").on_execute(Step::Never);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let owner = tokio::spawn(async move {
        let call = plan.execute("tool", json!({}));
        tokio::join!(call, async { panic!("the owner panics") })
    });
    assert!(owner.await.unwrap_err().is_panic());
    until(|| probe.counts().deactivations == 1).await;
    fixture.end().await;
}

// ===== P4: the owner's task and its runtime end =====

#[tokio::test]
async fn p4_aborting_the_task_that_owns_the_plan_deactivates() {
    let probe = Probe::new("tool").on_execute(Step::Never);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let owner = tokio::spawn(async move { plan.execute("tool", json!({})).await.is_ok() });
    until(|| probe.counts().executions == 1).await;
    owner.abort();
    until(|| probe.counts().deactivations == 1).await;
    fixture.end().await;
}

#[test]
fn p4_a_one_threaded_callers_runtime_dropped_in_a_call() {
    ended_in_a_call(one_thread(), drop);
}

#[test]
fn p4_a_one_threaded_callers_runtime_shut_down_by_timeout_in_a_call() {
    ended_in_a_call(one_thread(), |callers| {
        callers.shutdown_timeout(Duration::from_secs(1));
    });
}

#[test]
fn p4_a_one_threaded_callers_runtime_sent_to_the_background_in_a_call() {
    ended_in_a_call(one_thread(), Runtime::shutdown_background);
}

#[test]
fn p4_a_many_threaded_callers_runtime_dropped_in_a_call() {
    ended_in_a_call(many_threads(), drop);
}

#[test]
fn p4_a_many_threaded_callers_runtime_shut_down_by_timeout_in_a_call() {
    ended_in_a_call(many_threads(), |callers| {
        callers.shutdown_timeout(Duration::from_secs(1));
    });
}

#[test]
fn p4_a_many_threaded_callers_runtime_sent_to_the_background_in_a_call() {
    ended_in_a_call(many_threads(), Runtime::shutdown_background);
}

#[test]
fn p4_a_one_threaded_callers_runtime_dropped_in_an_activation() {
    ended_in_an_activation(one_thread());
}

#[test]
fn p4_a_many_threaded_callers_runtime_dropped_in_an_activation() {
    ended_in_an_activation(many_threads());
}

#[test]
fn p4_a_callers_runtime_dropped_in_finish() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").on_deactivate(Step::Until(latch.clone()));
    let (fixture, plan) = block_on(active(&probe));
    let callers = one_thread();
    let finish = callers.spawn(async move { plan.finish().await.reason() });
    callers.block_on(until(|| probe.counts().deactivations == 1));
    drop((callers, finish));
    latch.cancel();
    block_on(until(|| fixture.stats().plans == 0));
    block_on(fixture.end());
}

#[test]
fn p4_clean_up_has_timers_though_the_caller_has_none() {
    let probe = Probe::new("tool").on_deactivate(Step::Slow(Duration::ZERO));
    let (fixture, plan) = block_on(active(&probe));
    let report = block_on(plan.finish());
    assert_eq!(outcomes(&report), [("local/tool".to_owned(), DeactivationOutcome::Ok)]);
    block_on(fixture.end());
}

fn one_thread() -> Runtime {
    Builder::new_current_thread().build().unwrap()
}

fn many_threads() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).build().unwrap()
}

/// A task owns a plan and is in the middle of a call when its runtime ends.
fn ended_in_a_call(callers: Runtime, end: impl FnOnce(Runtime)) {
    let probe = Probe::new("tool").on_execute(Step::Never);
    let fixture = block_on(Fixture::new(&[&probe]));
    let plan = fixture.plan();
    let owner = callers.spawn(async move { plan.execute("tool", json!({})).await.is_ok() });
    callers.block_on(until(|| probe.counts().executions == 1));
    end(callers);
    block_on(until(|| probe.counts().deactivations == 1));
    drop(owner);
    block_on(fixture.end());
}

/// As there, in the middle of an activation, which then goes well.
fn ended_in_an_activation(callers: Runtime) {
    let (probe, latch) = gated();
    let fixture = block_on(Fixture::new(&[&probe]));
    let plan = fixture.plan();
    let owner = callers.spawn(async move { plan.execute("tool", json!({})).await.is_ok() });
    callers.block_on(until(|| probe.counts().activations == 1));
    drop((callers, owner));
    latch.cancel();
    block_on(until(|| probe.counts().deactivations == 1));
    assert_eq!(probe.counts().executions, 0);
    block_on(fixture.end());
}

// ===== P4: leaked plans =====

#[tokio::test]
async fn p4_a_leaked_plan_is_deactivated_by_shutdown() {
    let probe = Probe::new("tool");
    let (fixture, plan) = active(&probe).await;
    leak(plan);
    let report = fixture.shutdown(Duration::from_secs(20)).await;
    assert_eq!(report.stats.deactivated, 1);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p4_a_leaked_plan_is_deactivated_by_its_deadline() {
    let probe = Probe::new("tool");
    let fixture = Fixture::paused(&[&probe]).await;
    let options = PlanOptions::new().deadline(Duration::from_secs(60));
    let plan = fixture.begin(options).unwrap();
    let handle = plan.handle();
    call(&plan, "tool").await.unwrap();
    leak(plan);
    let began = Instant::now();
    handle.ended().await;
    assert_about(began.elapsed(), 60_000);
    until(|| probe.counts().deactivations == 1).await;
    assert_eq!(handle.end_reason(), Some(EndReason::DeadlinePassed));
    fixture.end().await;
}

#[test]
fn p4_a_leaked_plan_is_deactivated_by_the_drop_of_the_runtime() {
    let probe = Probe::new("tool");
    let (fixture, plan) = block_on(active(&probe));
    leak(plan);
    fixture.end_by_drop();
    assert_eq!(probe.counts().deactivations, 1);
}

#[tokio::test]
async fn p4_a_leaked_call_is_deactivated_under_after_its_grace() {
    let probe = Probe::new("tool").on_execute(Step::Never);
    let fixture = Fixture::new(&[&probe]).await;
    let deadlines = Deadlines::default().grace(Duration::ZERO);
    let plan = fixture.begin(PlanOptions::new().deadlines(deadlines)).unwrap();
    let mut stuck = Box::pin(call(&plan, "tool"));
    tokio::select! { biased; _ = &mut stuck => {}, () = until(|| probe.counts().executions == 1) => {} }
    leak(stuck);
    assert_eq!(plan.finish().await.deactivations().len(), 1);
    fixture.end().await;
}

// ===== P4: the tool runtime is dropped =====

#[test]
fn p4_the_runtime_dropped_without_a_tokio_runtime() {
    let probe = Probe::new("tool").on_deactivate(Step::Yield(3));
    let (fixture, plan) = block_on(active(&probe));
    fixture.end_by_drop();
    assert_eq!(probe.counts().deactivations, 1);
    assert_eq!(plan.end_reason(), Some(EndReason::ShutDown));
}

#[tokio::test]
async fn p4_the_runtime_dropped_in_async_code_on_one_thread() {
    let probe = Probe::new("tool").on_deactivate(Step::Yield(3));
    let (fixture, plan) = active(&probe).await;
    fixture.end_by_drop();
    assert_eq!(probe.counts().deactivations, 1);
    drop(plan);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p4_the_runtime_dropped_in_async_code_on_many_threads() {
    let probe = Probe::new("tool").on_deactivate(Step::Yield(3));
    let (fixture, plan) = active(&probe).await;
    tokio::spawn(async move { fixture.end_by_drop() }).await.unwrap();
    assert_eq!(probe.counts().deactivations, 1);
    drop(plan);
}

#[test]
fn p4_the_runtime_dropped_by_a_panic() {
    let probe = Probe::new("tool").on_deactivate(Step::Yield(3));
    let runtime = block_on(ToolRuntime::builder().tool(probe.tool()).build()).unwrap();
    let plan = runtime.begin(PlanOptions::new()).unwrap();
    block_on(call(&plan, "tool")).unwrap();
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let _runtime = runtime;
        panic!("main panics");
    }));
    assert!(panicked.is_err());
    assert_eq!(probe.counts().deactivations, 1);
    probe.assert_balanced();
}

#[test]
fn p4_the_runtime_dropped_under_a_call() {
    let probe = Probe::new("tool").on_execute(Step::Never);
    let fixture = block_on(Fixture::new(&[&probe]));
    let deadlines = Deadlines::default().grace(Duration::ZERO);
    let plan = fixture.begin(PlanOptions::new().deadlines(deadlines)).unwrap();
    let mut running = task::spawn(call(&plan, "tool"));
    assert_pending!(running.poll());
    fixture.end_by_drop();
    assert_eq!(probe.counts().deactivations, 1);
    assert!(matches!(block_on(running), Err(CallError::Runtime(ToolRuntimeError::ShutDown))));
}

#[tokio::test]
async fn p4_the_runtime_dropped_by_a_tools_activate() {
    let (other, probe) = (Probe::new("other"), Probe::new("tool"));
    let place = Place::default();
    let kept = Arc::clone(&place);
    let hooked = Hooked::new(&probe).before_activate(move |_| {
        let runtime = kept.lock().unwrap().take();
        async move {
            drop(runtime);
            Ok(())
        }
    });
    let plan = plan_whose_tool_owns_the_runtime(&place, &other, hooked).await;
    let called = within(call(&plan, "tool")).await;
    assert!(matches!(called, Err(CallError::Runtime(ToolRuntimeError::ShutDown))));
    until(|| (other.counts().deactivations, probe.counts().deactivations) == (1, 1)).await;
    other.assert_balanced();
    probe.assert_balanced();
}

#[tokio::test]
async fn p4_the_runtime_dropped_by_a_tools_activate_on_a_keeper_thread() {
    let (other, probe) = (Probe::new("other"), Probe::new("tool"));
    let place = Place::default();
    let kept = Arc::clone(&place);
    let hooked = Hooked::new(&probe).before_activate(move |_| {
        let runtime = kept.lock().unwrap().take();
        async move {
            tokio::task::yield_now().await;
            drop(runtime);
            tokio::task::yield_now().await;
            Ok(())
        }
    });
    let plan = plan_whose_tool_owns_the_runtime(&place, &other, hooked).await;
    assert!(within(call(&plan, "tool")).await.is_err());
    until(|| (other.counts().deactivations, probe.counts().deactivations) == (1, 1)).await;
    other.assert_balanced();
    probe.assert_balanced();
}

#[tokio::test]
async fn p4_the_runtime_dropped_by_a_tools_deactivate() {
    let (other, probe) = (Probe::new("other"), Probe::new("tool"));
    let place = Place::default();
    let kept = Arc::clone(&place);
    let hooked = Hooked::new(&probe).after_deactivate(move |_| {
        let runtime = kept.lock().unwrap().take();
        async move {
            drop(runtime);
            Ok(())
        }
    });
    let plan = plan_whose_tool_owns_the_runtime(&place, &other, hooked).await;
    call(&plan, "tool").await.unwrap();
    assert_eq!(within(plan.finish()).await.deactivations().len(), 2);
    other.assert_balanced();
    probe.assert_balanced();
}

#[tokio::test]
async fn p4_the_runtime_dropped_by_a_tools_deactivate_on_a_keeper_thread() {
    let (other, probe) = (Probe::new("other"), Probe::new("tool"));
    let place = Place::default();
    let kept = Arc::clone(&place);
    let hooked = Hooked::new(&probe).after_deactivate(move |_| {
        let runtime = kept.lock().unwrap().take();
        async move {
            tokio::task::yield_now().await;
            drop(runtime);
            tokio::task::yield_now().await;
            Ok(())
        }
    });
    let plan = plan_whose_tool_owns_the_runtime(&place, &other, hooked).await;
    call(&plan, "tool").await.unwrap();
    assert_eq!(within(plan.finish()).await.deactivations().len(), 2);
    other.assert_balanced();
    probe.assert_balanced();
}

#[test]
fn p4_a_deactivation_that_the_keeper_did_not_come_to_runs_all_the_same() {
    let blocker = Blocker::default();
    let block = blocker.clone();
    let (slow, queued) = (Probe::new("slow"), Probe::new("queued"));
    let hooked = Hooked::new(&slow).after_deactivate(move |_| {
        block.block();
        async { Ok(()) }
    });
    let builder =
        ToolRuntime::builder().keeper_threads(1).drop_wait(Duration::from_millis(1)).tool(hooked);
    let runtime = block_on(builder.tool(queued.tool()).build()).unwrap();
    let first = runtime.begin(PlanOptions::new()).unwrap();
    let second = runtime.begin(PlanOptions::new()).unwrap();
    block_on(call(&first, "slow")).unwrap();
    block_on(call(&second, "queued")).unwrap();
    drop(first);
    block_on(until(|| blocker.is_blocking()));
    drop(second);
    drop(runtime);
    assert_eq!(queued.counts().deactivations, 0);
    blocker.release();
    block_on(until(|| queued.counts().deactivations == 1));
    queued.assert_balanced();
    slow.assert_balanced();
}

#[test]
fn p4_a_drain_that_the_keeper_does_not_live_to_see_ends_in_a_deactivation() {
    let probe = Probe::new("tool").on_execute(Step::Never);
    let builder = ToolRuntime::builder().drop_wait(Duration::from_millis(1));
    let runtime = block_on(builder.tool(probe.tool()).build()).unwrap();
    let plan = runtime.begin(PlanOptions::new()).unwrap();
    let mut running = task::spawn(call(&plan, "tool"));
    assert_pending!(running.poll());
    plan.cancel();
    drop(runtime);
    drop(running);
    block_on(until(|| probe.counts().deactivations == 1));
    probe.assert_balanced();
}

#[test]
fn p4_deferred_work_that_the_keeper_does_not_live_to_do_runs_all_the_same() {
    let probe = Probe::new("tool").on_activate(Step::Never);
    let log = Log::default();
    let keep = log.clone();
    let hooked = Hooked::new(&probe).before_activate(move |ctx| {
        let log = keep.clone();
        ctx.defer(move || async move { log.add("undone") });
        async { Ok(()) }
    });
    let builder = ToolRuntime::builder().drop_wait(Duration::from_millis(1));
    let runtime = block_on(builder.tool(hooked).build()).unwrap();
    let plan = runtime.begin(PlanOptions::new()).unwrap();
    let mut waiting = task::spawn(call(&plan, "tool"));
    assert_pending!(waiting.poll());
    drop(runtime);
    block_on(until(|| log.read() == ["undone"]));
    assert!(block_on(waiting).is_err());
}

type Place = Arc<Mutex<Option<ToolRuntime>>>;

/// A plan with an active `other`; the runtime goes where the hooked tool finds it.
async fn plan_whose_tool_owns_the_runtime(place: &Place, other: &Probe, hooked: Hooked) -> Plan {
    let builder = ToolRuntime::builder().tool(other.tool()).tool(hooked);
    let runtime = builder.build().await.unwrap();
    let plan = runtime.begin(PlanOptions::new()).unwrap();
    call(&plan, "other").await.unwrap();
    *place.lock().unwrap() = Some(runtime);
    plan
}

// ===== P7: a deactivation that goes wrong =====

#[tokio::test]
async fn p7_a_deactivation_that_fails_stands_in_the_report() {
    let probe = Probe::new("tool").on_deactivate(Step::Err);
    let (fixture, plan) = active(&probe).await;
    let report = plan.finish().await;
    let failed = DeactivationOutcome::Failed("the probe fails in deactivate".into());
    assert_eq!(outcomes(&report), [("local/tool".to_owned(), failed)]);
    assert!(matches!(
        &report.errors()[..],
        [ToolRuntimeError::Deactivation { tool, .. }] if tool == "local/tool"
    ));
    assert_eq!(fixture.end().await.troubled, 1);
}

#[tokio::test]
async fn p7_a_deactivation_that_panics_stands_in_the_report() {
    let probe = Probe::new("tool").on_deactivate(Step::Panic);
    let (fixture, plan) = active(&probe).await;
    let report = plan.finish().await;
    let panicked = DeactivationOutcome::Panicked("the probe panics in deactivate".into());
    assert_eq!(outcomes(&report), [("local/tool".to_owned(), panicked)]);
    assert_eq!(fixture.end().await.troubled, 1);
}

#[tokio::test]
async fn p7_a_deactivation_that_panics_after_an_await_stands_in_the_report() {
    let probe = Probe::new("tool").on_deactivate(Step::YieldPanic(2));
    let (fixture, plan) = active(&probe).await;
    let report = plan.finish().await;
    assert!(matches!(&outcomes(&report)[..], [(_, DeactivationOutcome::Panicked(_))]));
    fixture.end().await;
}

#[tokio::test]
async fn p7_a_deactivation_that_panics_before_there_is_a_future_stands_in_the_report() {
    let probe = Probe::new("tool");
    let tool = FuturelessUndo(Arc::new(probe.tool()));
    let runtime = ToolRuntime::builder().tool(tool).build().await.unwrap();
    let plan = runtime.begin(PlanOptions::new()).unwrap();
    call(&plan, "tool").await.unwrap();
    let report = plan.finish().await;
    let panicked = DeactivationOutcome::Panicked("no future".into());
    assert_eq!(outcomes(&report), [("local/tool".to_owned(), panicked)]);
    // The probe behind it was never reached, so the ledger is checked here.
    let stats = runtime.stats();
    assert_eq!((stats.activated, stats.deactivated, stats.open), (1, 1, 0));
}

#[tokio::test(start_paused = true)]
async fn p7_a_deactivation_that_never_returns_is_dropped_at_its_deadline() {
    let probe = Probe::new("tool").on_deactivate(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    let began = Instant::now();
    let report = plan.finish().await;
    assert_about(began.elapsed(), 10_000);
    assert_eq!(outcomes(&report), [("local/tool".to_owned(), DeactivationOutcome::TimedOut)]);
    assert_about(report.deactivations()[0].took, 10_000);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p7_a_deactivation_that_hangs_and_panics_in_its_drop_is_contained() {
    let probe = Probe::new("tool");
    let hooked = Hooked::new(&probe).after_deactivate(|_| async {
        let _bomb = Bomb;
        std::future::pending().await
    });
    let fixture = hooked.fixture(paused()).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    let report = plan.finish().await;
    assert_eq!(outcomes(&report), [("local/tool".to_owned(), DeactivationOutcome::TimedOut)]);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p7_the_others_are_deactivated_whatever_one_does() {
    let fails = Probe::new("fails").on_deactivate(Step::Err);
    let panics = Probe::new("panics").on_deactivate(Step::Panic);
    let hangs = Probe::new("hangs").on_deactivate(Step::Never);
    let (bursts, whole) = (
        Probe::new("bursts").panics_in_drop(),
        Probe::new("whole").on_deactivate(Step::Slow(Duration::from_secs(1))),
    );
    let fixture = Fixture::paused(&[&fails, &panics, &hangs, &bursts, &whole]).await;
    let plan = fixture.plan();
    for tool in ["fails", "panics", "hangs", "bursts", "whole"] {
        call(&plan, tool).await.unwrap();
    }
    let report = plan.finish().await;
    let names: Vec<_> = outcomes(&report).into_iter().map(|(name, _)| name).collect();
    assert_eq!(
        names,
        ["local/fails", "local/panics", "local/bursts", "local/whole", "local/hangs"]
    );
    assert_eq!(report.errors().len(), 3);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p7_deactivations_hang_side_by_side_and_not_one_after_the_other() {
    let (one, other) = (
        Probe::new("one").on_deactivate(Step::Never),
        Probe::new("other").on_deactivate(Step::Never),
    );
    let fixture = Fixture::paused(&[&one, &other]).await;
    let plan = fixture.plan();
    call(&plan, "one").await.unwrap();
    call(&plan, "other").await.unwrap();
    let began = Instant::now();
    plan.finish().await;
    assert_about(began.elapsed(), 10_000);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p7_the_total_budget_cuts_a_deactivation() {
    let probe = Probe::new("tool").on_deactivate(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let deadlines = Deadlines::default().end(Duration::from_secs(1));
    let plan = fixture.begin(PlanOptions::new().deadlines(deadlines)).unwrap();
    call(&plan, "tool").await.unwrap();
    let began = Instant::now();
    let report = plan.finish().await;
    assert_about(began.elapsed(), 1_000);
    assert_eq!(outcomes(&report), [("local/tool".to_owned(), DeactivationOutcome::TimedOut)]);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p7_a_hanging_tool_does_not_starve_what_is_under_it() {
    let wire = Probe::new("wire").on_deactivate(Step::Slow(Duration::from_millis(200)));
    let probe = Probe::new("tool").needs(&wire).on_deactivate(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await.track(&wire);
    let deadlines = Deadlines::default().end(Duration::from_secs(1));
    let plan = fixture.begin(PlanOptions::new().deadlines(deadlines)).unwrap();
    call(&plan, "tool").await.unwrap();
    let began = Instant::now();
    let report = plan.finish().await;
    assert_about(began.elapsed(), 1_200);
    assert_eq!(
        outcomes(&report),
        [
            ("local/tool".to_owned(), DeactivationOutcome::TimedOut),
            ("local/wire".to_owned(), DeactivationOutcome::Ok)
        ]
    );
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p7_past_the_budget_a_deactivation_has_250_ms_and_no_more() {
    let wire = Probe::new("wire").on_deactivate(Step::Never);
    let probe = Probe::new("tool").needs(&wire).on_deactivate(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await.track(&wire);
    let deadlines = Deadlines::default().end(Duration::from_secs(1));
    let plan = fixture.begin(PlanOptions::new().deadlines(deadlines)).unwrap();
    call(&plan, "tool").await.unwrap();
    let began = Instant::now();
    let report = plan.finish().await;
    assert_about(began.elapsed(), 1_250);
    assert_eq!((report.errors().len(), report.unsettled().len()), (2, 0));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p7_a_plan_without_any_budget_still_gives_250_ms() {
    let probe = Probe::new("tool").on_deactivate(Step::Slow(Duration::from_millis(240)));
    let fixture = Fixture::paused(&[&probe]).await;
    let deadlines = Deadlines::default().end(Duration::ZERO);
    let plan = fixture.begin(PlanOptions::new().deadlines(deadlines)).unwrap();
    call(&plan, "tool").await.unwrap();
    let report = plan.finish().await;
    assert_eq!(outcomes(&report), [("local/tool".to_owned(), DeactivationOutcome::Ok)]);
    fixture.end().await;
}

#[tokio::test]
async fn p7_a_deactivation_that_hangs_does_not_hold_up_other_plans() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").on_deactivate([Step::Until(latch.clone()), Step::Ok]);
    let (fixture, stuck) = active(&probe).await;
    let free = fixture.plan();
    call(&free, "tool").await.unwrap();
    let mut finish = task::spawn(stuck.finish());
    assert_pending!(finish.poll());
    assert_eq!(within(free.finish()).await.errors().len(), 0);
    latch.cancel();
    within(finish).await;
    fixture.end().await;
}

#[tokio::test]
async fn p7_a_failed_deactivation_by_hand_is_a_deactivation() {
    let probe = Probe::new("tool").on_deactivate(Step::Panic);
    let (fixture, plan) = active(&probe).await;
    assert!(plan.deactivate("tool").await);
    assert_eq!(plan.finish().await.errors().len(), 1);
    fixture.end().await;
}

#[tokio::test]
async fn p7_clean_up_has_a_fresh_token_and_knows_why_the_plan_ended() {
    let probe = Probe::new("tool");
    let seen = Arc::new(Mutex::new(None));
    let keep = Arc::clone(&seen);
    let hooked = Hooked::new(&probe).after_deactivate(move |ctx| {
        let facts = (ctx.end_reason(), ctx.cancellation_token().is_cancelled());
        ready(&keep, |seen| *seen = Some(facts))
    });
    let fixture = hooked.fixture(ToolRuntime::builder()).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    plan.cancel();
    plan.finish().await;
    assert_eq!(*seen.lock().unwrap(), Some((Some(EndReason::Cancelled), false)));
    fixture.end().await;
}

// ===== tools that go wrong where a probe cannot =====

/// Panics when it is dropped.
#[derive(Debug)]
pub(crate) struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        assert!(std::thread::panicking(), "a panic in the drop of a future");
    }
}

/// Its activation gives an instance, and then the drop of the future panics.
struct BombInFuture(Arc<dyn Tool>);

/// A future that gives its output, and whose drop panics then.
pub(crate) struct Spent<F>(pub(crate) F, pub(crate) Bomb);

impl<F: Future + Unpin> Future for Spent<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        Pin::new(&mut self.0).poll(cx)
    }
}

impl Tool for BombInFuture {
    fn descriptor(&self) -> &ToolDescriptor {
        self.0.descriptor()
    }

    fn activate<'a, 'b, 'c>(
        &'a self,
        ctx: &'b ActivationContext,
    ) -> Pin<Box<dyn Future<Output = Result<Arc<dyn ToolInstance>, ToolFailure>> + Send + 'c>>
    where
        'a: 'c,
        'b: 'c,
    {
        Box::pin(Spent(self.0.activate(ctx), Bomb))
    }
}

/// The `deactivate` of its instance panics before there is a future to poll.
struct FuturelessUndo(Arc<dyn Tool>);

struct FuturelessInstance(Arc<dyn ToolInstance>);

#[async_trait]
impl Tool for FuturelessUndo {
    fn descriptor(&self) -> &ToolDescriptor {
        self.0.descriptor()
    }

    async fn activate(
        &self,
        ctx: &ActivationContext,
    ) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        Ok(Arc::new(FuturelessInstance(self.0.activate(ctx).await?)))
    }
}

impl ToolInstance for FuturelessInstance {
    fn execute<'a, 'b, 'c, 'd>(
        &'a self,
        ctx: &'b ToolExecutionContext,
        input: &'c Value,
    ) -> Pin<Box<dyn Future<Output = Result<ToolOutput, ToolFailure>> + Send + 'd>>
    where
        'a: 'd,
        'b: 'd,
        'c: 'd,
    {
        self.0.execute(ctx, input)
    }

    fn deactivate<'a, 'b, 'c>(
        &'a self,
        _: &'b DeactivationContext,
    ) -> Pin<Box<dyn Future<Output = Passed> + Send + 'c>>
    where
        'a: 'c,
        'b: 'c,
    {
        panic!("no future")
    }
}

// ===== what hangs or blocks holds up no other =====

#[test]
fn p7_a_deactivation_that_blocks_the_task_that_finishes_holds_up_no_other() {
    let (blocker, other) = (Blocker::default(), Probe::new("other"));
    let block = blocker.clone();
    let hooked = Hooked::new(&Probe::new("tool")).after_deactivate(move |_| {
        block.block();
        async { Ok(()) }
    });
    let builder = ToolRuntime::builder().tool(other.tool()).tool(hooked);
    let runtime = block_on(builder.build()).unwrap();
    let plan = runtime.begin(PlanOptions::new()).unwrap();
    block_on(call(&plan, "other")).unwrap();
    block_on(call(&plan, "tool")).unwrap();
    let finishing = std::thread::spawn(move || block_on(plan.finish()));
    block_on(until(|| blocker.is_blocking() && other.counts().deactivations == 1));
    blocker.release();
    assert_eq!(finishing.join().unwrap().deactivations().len(), 2);
    other.assert_balanced();
}

#[test]
fn p7_dropping_the_runtime_cuts_what_hangs_in_time_for_what_is_under_it() {
    let wire = Probe::new("wire");
    let tool = Probe::new("tool").needs(&wire).on_deactivate(Step::Never);
    let builder = ToolRuntime::builder().drop_wait(Duration::from_secs(3)).tool(tool.tool());
    let runtime = block_on(builder.build()).unwrap();
    let plan = runtime.begin(PlanOptions::new()).unwrap();
    block_on(call(&plan, "tool")).unwrap();
    drop(runtime);
    wire.assert_balanced();
    assert_eq!(wire.counts().deactivations, 1);
    drop(plan);
}

#[tokio::test]
async fn p7_a_plan_can_be_finished_after_its_runtime_was_dropped() {
    let probe = Probe::new("tool").on_deactivate(Step::Never);
    let builder = ToolRuntime::builder().drop_wait(Duration::ZERO).tool(probe.tool());
    let runtime = builder.build().await.unwrap();
    let plan = runtime.begin(PlanOptions::new()).unwrap();
    call(&plan, "tool").await.unwrap();
    drop(runtime);
    let report = within(plan.finish()).await;
    assert_eq!(report.reason(), EndReason::ShutDown);
    probe.assert_balanced();
}

/// An error whose destructor panics.
#[derive(Debug)]
struct LoudError(Bomb);

impl std::fmt::Display for LoudError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("tick")
    }
}

impl std::error::Error for LoudError {}

#[tokio::test]
async fn p7_an_error_whose_drop_panics_is_a_failed_deactivation() {
    let probe = Probe::new("tool");
    let hooked = Hooked::new(&probe).after_deactivate(|_| async { Err(LoudError(Bomb).into()) });
    let fixture = hooked.fixture(ToolRuntime::builder()).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    let [record] = plan.finish().await.deactivations().try_into().unwrap();
    assert_eq!(record.outcome, DeactivationOutcome::Failed("tick".into()));
    fixture.end().await;
}

/// A tool whose destructor panics.
struct LoudTool(Arc<dyn Tool>, Bomb);

#[async_trait]
impl Tool for LoudTool {
    fn descriptor(&self) -> &ToolDescriptor {
        self.0.descriptor()
    }

    async fn activate(
        &self,
        ctx: &ActivationContext,
    ) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        self.0.activate(ctx).await
    }
}

#[tokio::test]
async fn p9_a_tool_whose_drop_panics_does_not_unwind_out_of_the_runtime() {
    let probe = Probe::new("tool");
    let loud = LoudTool(Arc::new(probe.tool()), Bomb);
    let runtime = ToolRuntime::builder().tool(loud).build().await.unwrap();
    let plan = runtime.begin(PlanOptions::new()).unwrap();
    call(&plan, "tool").await.unwrap();
    drop(runtime);
    drop(plan);
    probe.assert_balanced();
}
