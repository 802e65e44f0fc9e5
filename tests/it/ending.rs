//! P8 and P9: the end of a plan and of the runtime; drops.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use tokio::time::Instant;
use tokio_test::{assert_pending, assert_ready, task};
use tokio_util::sync::CancellationToken;
use toolscope::test_util::{Probe, Step};
use toolscope::{
    CallError, EndReason, Keeper, OutcomeCode, Plan, PlanOptions, RuntimeHandle, ToolRuntime,
    ToolRuntimeError,
};

use crate::cut::quiet_probes;
use crate::hooks::{Blocker, Called, Hooked, assert_about, block_on, call, gated, until, within};
use crate::support::Fixture;

/// The reason that a call of an ended plan gives.
#[track_caller]
fn ended_because(called: Called) -> EndReason {
    match called {
        Err(CallError::Runtime(ToolRuntimeError::PlanEnded { reason, .. })) => reason,
        other => panic!("the plan did not end: {other:?}"),
    }
}

/// One runtime, with one probe called `tool`.
async fn one_tool() -> (Probe, Fixture) {
    let probe = Probe::new("tool");
    let fixture = Fixture::new(&[&probe]).await;
    (probe, fixture)
}

// ===== P8: the first reason wins =====

#[tokio::test]
async fn p8_an_open_plan_has_no_reason() {
    let (_, fixture) = one_tool().await;
    let plan = fixture.plan();
    assert_eq!(plan.end_reason(), None);
    assert_eq!(plan.finish().await.reason(), EndReason::Finished);
    fixture.end().await;
}

#[tokio::test]
async fn p8_cancelling_twice_is_cancelling_once() {
    let (probe, fixture) = one_tool().await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    plan.cancel();
    plan.cancel();
    assert_eq!(plan.finish().await.reason(), EndReason::Cancelled);
    assert_eq!(probe.counts().deactivations, 1);
    fixture.end().await;
}

#[tokio::test]
async fn p8_finish_after_a_cancel_reports_the_cancel() {
    let (_, fixture) = one_tool().await;
    let plan = fixture.plan();
    plan.cancel();
    assert_eq!(plan.finish().await.reason(), EndReason::Cancelled);
    fixture.end().await;
}

#[tokio::test]
async fn p8_a_cancel_after_finish_changes_nothing() {
    let (_, fixture) = one_tool().await;
    let plan = fixture.plan();
    let handle = plan.handle();
    plan.finish().await;
    handle.cancel();
    assert_eq!(handle.end_reason(), Some(EndReason::Finished));
    assert_eq!(ended_because(call(&handle, "tool").await), EndReason::Finished);
    fixture.end().await;
}

#[tokio::test]
async fn p8_a_shutdown_after_fail_changes_nothing() {
    let (_, fixture) = one_tool().await;
    let plan = fixture.plan();
    let handle = plan.handle();
    plan.fail().await;
    fixture.end().await;
    assert_eq!(handle.end_reason(), Some(EndReason::Failed));
}

#[tokio::test]
async fn p8_a_drop_after_a_shutdown_changes_nothing() {
    let (_, fixture) = one_tool().await;
    let plan = fixture.plan();
    let handle = plan.handle();
    fixture.shutdown(Duration::from_secs(20)).await;
    drop(plan);
    assert_eq!(handle.end_reason(), Some(EndReason::ShutDown));
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn p8_racing_ends_agree_on_one_reason_and_one_deactivation() {
    let (probe, fixture) = one_tool().await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    let handle = plan.handle();
    let racers: tokio::task::JoinSet<()> = (0..16)
        .map(|_| {
            let handle = plan.handle();
            async move { handle.cancel() }
        })
        .collect();
    let report = plan.finish().await;
    within(racers.join_all()).await;
    assert_eq!(handle.end_reason(), Some(report.reason()));
    assert_eq!(probe.counts().deactivations, 1);
    fixture.end().await;
}

// ===== P8: after the end =====

#[tokio::test]
async fn p8_a_call_after_finish_is_refused_and_activates_nothing() {
    let (probe, fixture) = one_tool().await;
    let plan = fixture.plan();
    let handle = plan.handle();
    plan.finish().await;
    assert_eq!(ended_because(call(&handle, "tool").await), EndReason::Finished);
    assert_eq!(probe.counts().activations, 0);
    fixture.end().await;
}

#[tokio::test]
async fn p8_a_call_after_fail_is_refused_with_that_reason() {
    let (_, fixture) = one_tool().await;
    let plan = fixture.plan();
    let handle = plan.handle();
    plan.fail().await;
    assert_eq!(ended_because(call(&handle, "tool").await), EndReason::Failed);
    fixture.end().await;
}

#[tokio::test]
async fn p8_a_call_after_the_drop_is_refused_with_that_reason() {
    let (_, fixture) = one_tool().await;
    let plan = fixture.plan();
    let handle = plan.handle();
    drop(plan);
    assert_eq!(ended_because(call(&handle, "tool").await), EndReason::Dropped);
    fixture.end().await;
}

#[tokio::test]
async fn p8_a_call_after_a_cancel_is_cancelled_and_activates_nothing() {
    let (probe, fixture) = one_tool().await;
    let plan = fixture.plan();
    plan.cancel();
    assert!(matches!(call(&plan, "tool").await, Err(CallError::Cancelled(_))));
    plan.finish().await;
    assert_eq!(probe.counts().activations, 0);
    fixture.end().await;
}

#[tokio::test]
async fn p8_a_call_after_a_shutdown_is_refused_as_shut_down() {
    let (probe, fixture) = one_tool().await;
    let plan = fixture.plan();
    fixture.shutdown(Duration::from_secs(20)).await;
    assert!(matches!(
        call(&plan, "tool").await,
        Err(CallError::Runtime(ToolRuntimeError::ShutDown))
    ));
    assert_eq!(probe.counts().activations, 0);
    drop(plan);
    fixture.end().await;
}

#[tokio::test]
async fn p8_an_activation_by_hand_after_the_end_is_refused() {
    let (probe, fixture) = one_tool().await;
    let plan = fixture.plan();
    let handle = plan.handle();
    plan.finish().await;
    let error = handle.activate("tool").await.unwrap_err();
    assert_eq!(error.code(), OutcomeCode::PlanEnded);
    assert_eq!(probe.counts().activations, 0);
    fixture.end().await;
}

#[tokio::test]
async fn p8_a_deactivation_by_hand_after_the_end_is_false() {
    let (_, fixture) = one_tool().await;
    let plan = fixture.plan();
    let handle = plan.handle();
    call(&plan, "tool").await.unwrap();
    plan.finish().await;
    assert!(!handle.deactivate("tool").await);
    fixture.end().await;
}

#[tokio::test]
async fn p8_no_child_begins_after_the_end() {
    let (_, fixture) = one_tool().await;
    let plan = fixture.plan();
    let handle = plan.handle();
    plan.finish().await;
    assert!(matches!(
        handle.begin_child(PlanOptions::new()),
        Err(ToolRuntimeError::PlanEnded { .. })
    ));
    fixture.end().await;
}

#[tokio::test]
async fn p8_a_call_that_waits_for_an_activation_ends_at_once_with_the_plan() {
    let (probe, latch) = gated();
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let mut waiting = task::spawn(call(&plan, "tool"));
    assert_pending!(waiting.poll());
    plan.cancel();
    assert!(waiting.is_woken());
    assert!(matches!(assert_ready!(waiting.poll()), Err(CallError::Cancelled(_))));
    latch.cancel();
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p8_an_activation_by_hand_that_waits_for_a_deactivation_ends_at_once_with_the_plan() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").on_deactivate(Step::Until(latch.clone()));
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    let mut deactivation = task::spawn(plan.deactivate("tool"));
    assert_pending!(deactivation.poll());
    let mut activation = task::spawn(plan.activate("tool"));
    assert_pending!(activation.poll());
    plan.cancel();
    let activated = assert_ready!(activation.poll());
    assert!(matches!(activated, Err(CallError::Cancelled(_))));
    latch.cancel();
    assert!(within(deactivation).await);
    drop(activation);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p8_ended_tells_of_the_end_before_and_after_it() {
    let (_, fixture) = one_tool().await;
    let plan = fixture.plan();
    let handle = plan.handle();
    let mut before = task::spawn(handle.ended());
    assert_pending!(before.poll());
    drop(plan);
    assert!(before.is_woken());
    assert_ready!(before.poll());
    assert_ready!(task::spawn(handle.ended()).poll());
    fixture.end().await;
}

#[tokio::test]
async fn p8_a_handle_does_not_keep_its_plan_open() {
    let (probe, fixture) = one_tool().await;
    let plan = fixture.plan();
    let handle = plan.handle();
    call(&handle, "tool").await.unwrap();
    drop(plan);
    until(|| probe.counts().deactivations == 1).await;
    assert_eq!(handle.end_reason(), Some(EndReason::Dropped));
    fixture.end().await;
}

#[tokio::test]
async fn p8_dropping_a_handle_does_not_end_its_plan() {
    let (_, fixture) = one_tool().await;
    let plan = fixture.plan();
    drop(plan.handle());
    assert!(call(&plan, "tool").await.unwrap().success);
    plan.finish().await;
    fixture.end().await;
}

// ===== P8: token and deadline =====

#[tokio::test]
async fn p8_the_token_given_at_begin_cancels_the_plan() {
    let (_, fixture) = one_tool().await;
    let token = CancellationToken::new();
    let options = PlanOptions::new().token(token.clone());
    let plan = fixture.begin(options).unwrap();
    token.cancel();
    within(plan.ended()).await;
    assert_eq!(plan.finish().await.reason(), EndReason::Cancelled);
    fixture.end().await;
}

#[tokio::test]
async fn p8_a_call_right_after_the_token_was_cancelled_is_cancelled() {
    let (probe, fixture) = one_tool().await;
    let token = CancellationToken::new();
    let options = PlanOptions::new().token(token.clone());
    let plan = fixture.begin(options).unwrap();
    token.cancel();
    let mut late = task::spawn(call(&plan, "tool"));
    assert!(matches!(assert_ready!(late.poll()), Err(CallError::Cancelled(_))));
    drop(plan);
    assert_eq!(probe.counts().activations, 0);
    fixture.end().await;
}

#[tokio::test]
async fn p8_a_plan_begun_with_a_cancelled_token_runs_nothing() {
    let (probe, fixture) = one_tool().await;
    let token = CancellationToken::new();
    token.cancel();
    let plan = fixture.begin(PlanOptions::new().token(token)).unwrap();
    assert!(matches!(call(&plan, "tool").await, Err(CallError::Cancelled(_))));
    assert_eq!(plan.finish().await.reason(), EndReason::Cancelled);
    assert_eq!(probe.counts().activations, 0);
    fixture.end().await;
}

#[tokio::test]
async fn p8_the_end_of_a_plan_does_not_cancel_the_token_it_was_given() {
    let (_, fixture) = one_tool().await;
    let token = CancellationToken::new();
    let options = PlanOptions::new().token(token.clone());
    let plan = fixture.begin(options).unwrap();
    plan.cancel();
    plan.finish().await;
    assert!(!token.is_cancelled());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p8_the_deadline_ends_the_plan_and_its_calls() {
    let probe = Probe::new("tool").on_execute(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let options = PlanOptions::new().deadline(Duration::from_secs(60));
    let plan = fixture.begin(options).unwrap();
    let began = Instant::now();
    let called = call(&plan, "tool").await;
    assert_about(began.elapsed(), 62_000);
    assert_eq!(ended_because(called), EndReason::DeadlinePassed);
    assert_eq!(plan.finish().await.reason(), EndReason::DeadlinePassed);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p8_a_deadline_that_comes_after_the_end_changes_nothing() {
    let probe = Probe::new("tool");
    let fixture = Fixture::paused(&[&probe]).await;
    let options = PlanOptions::new().deadline(Duration::from_secs(1));
    let plan = fixture.begin(options).unwrap();
    let handle = plan.handle();
    plan.finish().await;
    tokio::time::advance(Duration::from_secs(2)).await;
    assert_eq!(handle.end_reason(), Some(EndReason::Finished));
    fixture.end().await;
}

// ===== P8: the end of the runtime =====

#[tokio::test]
async fn p8_shutdown_may_be_called_again() {
    let (probe, fixture) = one_tool().await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    let first = fixture.shutdown(Duration::from_secs(20)).await;
    let second = fixture.shutdown(Duration::from_secs(20)).await;
    assert_eq!(first.stats, second.stats);
    assert_eq!(probe.counts().deactivations, 1);
    drop(plan);
    fixture.end().await;
}

#[tokio::test]
async fn p8_two_shutdowns_at_once_both_wait() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").on_deactivate(Step::Until(latch.clone()));
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    let mut first = task::spawn(fixture.shutdown(Duration::from_secs(20)));
    assert_pending!(first.poll());
    let mut second = task::spawn(fixture.shutdown(Duration::from_secs(20)));
    assert_pending!(second.poll());
    latch.cancel();
    assert!(within(first).await.stragglers.is_empty());
    assert!(within(second).await.stragglers.is_empty());
    drop(plan);
    fixture.end().await;
}

#[tokio::test]
async fn p8_begin_after_a_shutdown_is_refused() {
    let (_, fixture) = one_tool().await;
    fixture.shutdown(Duration::from_secs(20)).await;
    assert!(matches!(fixture.begin(PlanOptions::new()), Err(ToolRuntimeError::ShutDown)));
    assert_eq!(fixture.stats().plans, 0);
    fixture.end().await;
}

#[test]
fn p8_no_plan_that_began_beside_a_shutdown_stays_open() {
    for _ in 0..1000 {
        let runtime = block_on(ToolRuntime::builder().build()).unwrap();
        let plans = begun_beside(&runtime.handle(), || {
            block_on(runtime.shutdown(Duration::from_secs(20)));
        });
        assert!(plans.iter().all(|plan| plan.end_reason().is_some()));
        assert_eq!(runtime.stats().plans, 0);
    }
}

#[test]
fn p9_no_plan_that_began_beside_the_drop_of_the_runtime_stays_open() {
    for _ in 0..1000 {
        let runtime = block_on(ToolRuntime::builder().build()).unwrap();
        let plans = begun_beside(&runtime.handle(), || drop(runtime));
        assert!(plans.iter().all(|plan| plan.end_reason().is_some()));
    }
}

/// The plans that another thread could begin while this one ends the runtime.
fn begun_beside(runtime: &RuntimeHandle, end: impl FnOnce()) -> Vec<Plan> {
    let start = Barrier::new(2);
    std::thread::scope(|scope| {
        let begins = scope.spawn(|| {
            let begin = |_| runtime.begin(PlanOptions::new()).ok();
            start.wait();
            (0..100).map_while(begin).collect()
        });
        start.wait();
        end();
        begins.join().unwrap()
    })
}

#[tokio::test]
async fn p8_a_shutdown_dropped_half_way_has_ended_all_plans() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").on_deactivate(Step::Until(latch.clone()));
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    let mut shutdown = task::spawn(fixture.shutdown(Duration::from_secs(20)));
    assert_pending!(shutdown.poll());
    drop(shutdown);
    assert_eq!(plan.end_reason(), Some(EndReason::ShutDown));
    latch.cancel();
    until(|| fixture.stats().plans == 0).await;
    drop(plan);
    fixture.end().await;
}

#[tokio::test]
async fn p8_a_shutdown_names_its_stragglers_and_they_settle_later() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").on_deactivate(Step::Until(latch.clone()));
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    let report = within(fixture.shutdown(Duration::from_millis(1))).await;
    assert_eq!(report.stragglers.len(), 1);
    assert_eq!(report.stragglers[0].plan_id, plan.id());
    assert_eq!(report.stragglers[0].unsettled, ["local/tool"]);
    assert_eq!(report.stats.open, 1);
    latch.cancel();
    drop(plan);
    fixture.end().await;
}

#[tokio::test]
async fn p8_a_blocked_keeper_does_not_stop_the_clock_of_a_shutdown() {
    let (probe, blocker) = (Probe::new("tool"), Blocker::default());
    let builder = ToolRuntime::builder().keeper_threads(1);
    let fixture = blocking(&probe, &blocker).fixture(builder).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    drop(plan);
    until(|| blocker.is_blocking()).await;
    let report = within(fixture.shutdown(Duration::from_millis(1))).await;
    assert_eq!(report.stragglers[0].unsettled, ["local/tool"]);
    blocker.release();
    fixture.end().await;
}

#[tokio::test]
async fn p8_a_keeper_whose_threads_are_all_blocked_is_told_once() {
    let (probe, blocker) = (Probe::new("tool"), Blocker::default());
    let builder = ToolRuntime::builder().keeper_threads(1);
    let fixture = blocking(&probe, &blocker).fixture(builder).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    drop(plan);
    until(|| fixture.stats().keeper_blocked == 1).await;
    blocker.release();
    assert_eq!(fixture.end().await.keeper_blocked, 1);
}

// ===== P8: handles of the runtime =====

#[tokio::test]
async fn p8_a_live_plan_is_found_by_its_number_and_a_settled_one_is_not() {
    let (_, fixture) = one_tool().await;
    let runtime = fixture.handle();
    let plan = runtime.begin(PlanOptions::new()).unwrap();
    let id = plan.id();
    assert_eq!(runtime.plan(id).unwrap().id(), id);
    plan.finish().await;
    assert!(runtime.plan(id).is_none());
    fixture.end().await;
}

#[tokio::test]
async fn p8_a_plan_is_cancelled_by_its_number() {
    let (_, fixture) = one_tool().await;
    let plan = fixture.plan();
    let runtime = fixture.handle();
    assert!(runtime.cancel(plan.id()));
    let id = plan.id();
    assert_eq!(plan.finish().await.reason(), EndReason::Cancelled);
    assert!(!runtime.cancel(id));
    fixture.end().await;
}

#[tokio::test]
async fn p8_a_runtime_handle_outlives_its_runtime_and_gives_nothing() {
    let (_, fixture) = one_tool().await;
    let (runtime, plan) = (fixture.handle(), fixture.plan());
    let id = plan.id();
    drop(plan);
    fixture.end().await;
    assert!(matches!(runtime.begin(PlanOptions::new()), Err(ToolRuntimeError::ShutDown)));
    assert!(runtime.plan(id).is_none());
    assert!(!runtime.cancel(id));
}

#[tokio::test]
async fn p8_a_plan_outlives_its_runtime_and_its_calls_are_refused() {
    let (_, fixture) = one_tool().await;
    let plan = fixture.plan();
    fixture.end().await;
    assert!(matches!(
        call(&plan, "tool").await,
        Err(CallError::Runtime(ToolRuntimeError::ShutDown))
    ));
    assert_eq!(plan.finish().await.reason(), EndReason::ShutDown);
}

// ===== P8: run =====

#[tokio::test]
async fn p8_run_finishes_the_plan_and_gives_the_value() {
    let (probe, fixture) = one_tool().await;
    let ran =
        fixture.run(PlanOptions::new(), async |plan| call(&plan, "tool").await.unwrap().success);
    let (value, report) = ran.await.unwrap();
    assert!(value);
    assert_eq!(report.reason(), EndReason::Finished);
    assert_eq!(probe.counts().deactivations, 1);
    fixture.end().await;
}

#[test]
fn p8_a_panic_in_run_goes_on_after_the_clean_up() {
    let probe = Probe::new("tool").on_deactivate(Step::Yield(3));
    let fixture = block_on(Fixture::new(&[&probe]));
    let ran = fixture.run(PlanOptions::new(), async |plan| -> () {
        call(&plan, "tool").await.unwrap();
        panic!("the body panics");
    });
    let panicked = catch_unwind(AssertUnwindSafe(|| block_on(ran).is_ok()));
    assert_eq!(panicked.unwrap_err().downcast_ref(), Some(&"the body panics"));
    let stats = fixture.stats();
    assert_eq!((stats.deactivated, stats.plans), (1, 0));
    block_on(fixture.end());
}

#[tokio::test]
async fn p8_run_dropped_half_way_ends_the_plan() {
    let (probe, fixture) = one_tool().await;
    let mut ran = task::spawn(fixture.run(PlanOptions::new(), async |plan| {
        call(&plan, "tool").await.unwrap();
        std::future::pending::<()>().await;
    }));
    assert_pending!(ran.poll());
    drop(ran);
    until(|| probe.counts().deactivations == 1).await;
    fixture.end().await;
}

#[tokio::test]
async fn p8_the_body_of_run_may_cancel_its_plan() {
    let (_, fixture) = one_tool().await;
    let ran = fixture.run(PlanOptions::new(), async |plan| plan.cancel());
    assert_eq!(ran.await.unwrap().1.reason(), EndReason::Cancelled);
    fixture.end().await;
}

#[tokio::test]
async fn p8_run_after_a_shutdown_does_not_enter_its_body() {
    let (_, fixture) = one_tool().await;
    fixture.shutdown(Duration::from_secs(20)).await;
    let ran = fixture.run(PlanOptions::new(), async |_| panic!("the body was entered"));
    assert!(matches!(ran.await, Err(ToolRuntimeError::ShutDown)));
    fixture.end().await;
}

// ===== P9: drops =====

#[test]
fn p9_a_plan_dropped_without_a_tokio_runtime_is_deactivated() {
    let (probe, fixture) = block_on(one_tool());
    let plan = fixture.plan();
    block_on(call(&plan, "tool")).unwrap();
    drop(plan);
    block_on(until(|| probe.counts().deactivations == 1));
    block_on(fixture.end());
}

#[test]
fn p9_a_plan_dropped_by_a_panic_adds_no_panic() {
    let (_, fixture) = block_on(one_tool());
    let plan = fixture.plan();
    let handle = plan.handle();
    block_on(call(&plan, "tool")).unwrap();
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let _plan = plan;
        panic!("the owner panics");
    }));
    assert_eq!(panicked.unwrap_err().downcast_ref(), Some(&"the owner panics"));
    assert_eq!(handle.end_reason(), Some(EndReason::Panicked));
    block_on(fixture.end());
}

#[test]
fn p9_dropping_a_plan_does_not_wait_for_a_blocked_keeper() {
    let (probe, blocker) = (Probe::new("tool"), Blocker::default());
    let builder = ToolRuntime::builder().keeper_threads(1);
    let fixture = block_on(blocking(&probe, &blocker).fixture(builder));
    let (first, second) = (fixture.plan(), fixture.plan());
    block_on(call(&first, "tool")).unwrap();
    block_on(call(&second, "tool")).unwrap();
    drop(first);
    block_on(until(|| blocker.is_blocking()));
    drop(second);
    // Only now may the keeper go on: a drop that waited for it would never have come here.
    assert_eq!(fixture.stats().open, 2);
    blocker.release();
    block_on(fixture.end());
}

#[test]
fn p9_dropping_a_plan_does_not_poll_its_deactivations() {
    let blocker = Blocker::default();
    let probe = Probe::new("tool");
    let fixture = block_on(blocking(&probe, &blocker).fixture(ToolRuntime::builder()));
    let plan = fixture.plan();
    block_on(call(&plan, "tool")).unwrap();
    // The deactivation blocks whoever polls it.
    drop(plan);
    block_on(until(|| blocker.is_blocking()));
    blocker.release();
    block_on(fixture.end());
}

#[tokio::test]
async fn p9_a_plan_dropped_on_another_thread_is_deactivated() {
    let (probe, fixture) = one_tool().await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    std::thread::spawn(move || drop(plan)).join().unwrap();
    until(|| probe.counts().deactivations == 1).await;
    fixture.end().await;
}

#[test]
fn p9_a_plan_dropped_after_its_keeper_has_gone_is_deactivated() {
    let probe = Probe::new("tool");
    let keeper = tokio::runtime::Runtime::new().unwrap();
    let builder = ToolRuntime::builder().keeper(Keeper::on(keeper.handle().clone()));
    let fixture = block_on(Fixture::with(builder, &[&probe]));
    let plan = fixture.plan();
    block_on(call(&plan, "tool")).unwrap();
    drop(keeper);
    drop(plan);
    block_on(until(|| fixture.stats().deactivated == 1));
    assert_eq!(fixture.stats().lost, 0);
    fixture.end_by_drop();
}

#[test]
fn p9_the_drop_of_the_runtime_is_bounded() {
    let probe = Probe::new("tool").on_deactivate(Step::Never);
    let builder = ToolRuntime::builder().drop_wait(Duration::from_millis(1));
    let fixture = block_on(Fixture::with(builder, &[&probe]));
    let plan = fixture.plan();
    block_on(call(&plan, "tool")).unwrap();
    drop(plan);
    block_on(until(|| probe.counts().deactivations == 1));
    fixture.end_by_drop();
}

#[test]
fn p9_the_drop_of_the_runtime_is_bounded_by_a_blocked_keeper_too() {
    let (probe, blocker) = (Probe::new("tool"), Blocker::default());
    let builder = ToolRuntime::builder().keeper_threads(1).drop_wait(Duration::from_millis(1));
    let fixture = block_on(blocking(&probe, &blocker).fixture(builder));
    let plan = fixture.plan();
    block_on(call(&plan, "tool")).unwrap();
    drop(plan);
    block_on(until(|| blocker.is_blocking()));
    fixture.end_by_drop();
    // Only now may the keeper go on.
    blocker.release();
}

#[test]
fn p9_the_runtime_waits_for_slow_deactivations_when_it_is_dropped() {
    let probe = Probe::new("tool").on_deactivate(Step::Yield(100));
    let fixture = block_on(Fixture::new(&[&probe]));
    let plan = fixture.plan();
    let runtime = fixture.handle();
    let id = plan.id();
    block_on(call(&plan, "tool")).unwrap();
    drop(plan);
    fixture.end_by_drop();
    assert!(runtime.plan(id).is_none());
}

#[test]
fn p9_a_runtime_that_never_activated_anything_is_dropped_at_once() {
    let (_, fixture) = block_on(one_tool());
    let plan = fixture.plan();
    fixture.end_by_drop();
    assert_eq!(plan.end_reason(), Some(EndReason::ShutDown));
}

#[tokio::test(start_paused = true)]
async fn p9_a_runtime_on_a_tests_keeper_does_not_wait_when_it_is_dropped() {
    let probe = Probe::new("tool").on_deactivate(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    drop(plan);
    until(|| probe.counts().deactivations == 1).await;
    fixture.end_by_drop();
}

/// Each deactivation blocks whatever thread polls it.
fn blocking(probe: &Probe, blocker: &Blocker) -> Hooked {
    let blocker = blocker.clone();
    Hooked::new(probe).after_deactivate(move |_| {
        let blocker = blocker.clone();
        async move {
            blocker.block();
            Ok(())
        }
    })
}

/// A waker is its executor's code.
#[tokio::test]
async fn p9_a_waker_that_panics_stops_no_end() {
    struct Panics;
    impl std::task::Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("a panic in a waker");
        }
    }
    quiet_probes();
    let probe = Probe::new("tool");
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let child = plan.begin_child(PlanOptions::new()).unwrap();
    call(&child, "tool").await.unwrap();
    let handle = plan.handle();
    let mut waits = Box::pin(async move { handle.ended().await });
    let waker = std::task::Waker::from(Arc::new(Panics));
    assert!(waits.as_mut().poll(&mut std::task::Context::from_waker(&waker)).is_pending());
    drop(plan);
    let error = call(&child, "tool").await.unwrap_err();
    assert_eq!(error.code(), OutcomeCode::PlanEnded);
    drop((waits, child));
    fixture.end().await;
}
