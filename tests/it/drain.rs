//! P5: leases, grace, the hard end, overrun.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::json;
use tokio::time::Instant;
use tokio_test::{assert_pending, assert_ready, task};
use tokio_util::sync::CancellationToken;
use toolscope::test_util::{Probe, Step};
use toolscope::{
    CallError, CallOptions, Deadlines, EndReason, OutcomeCode, PlanOptions, ToolExecutionContext,
    ToolFailure, ToolRuntime, ToolRuntimeError,
};

use crate::hooks::{Blocker, Called, Hooked, assert_about, block_on, call, ready, until, within};
use crate::support::{Fixture, paused};

/// Default deadlines, but for the grace.
fn grace(millis: u64) -> PlanOptions {
    let deadlines = Deadlines::default().grace(Duration::from_millis(millis));
    PlanOptions::new().deadlines(deadlines)
}

fn code(called: Called) -> OutcomeCode {
    called.unwrap_err().code()
}

// ===== the soft end =====

#[tokio::test]
async fn p5_a_running_call_sees_the_end_and_its_result_is_returned() {
    let probe = Probe::new("tool").on_execute(Step::UntilCancelled);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let running = tokio::spawn(call(&plan, "tool"));
    until(|| probe.counts().executions == 1).await;
    let report = plan.finish().await;
    assert!(within(running).await.unwrap().unwrap().success);
    let traces = report.traces();
    assert_eq!((traces[0].success(), traces[0].cancelled), (true, true));
    fixture.end().await;
}

#[tokio::test]
async fn p5_the_context_of_a_running_call_says_that_it_is_cancelled() {
    let probe = Probe::new("tool").on_execute(Step::Never);
    let place = Arc::new(Mutex::new(None));
    let (hooked, kept) = (keeping_its_context(&probe, &place), Arc::clone(&place));
    let fixture = hooked.fixture(ToolRuntime::builder()).await;
    let plan = fixture.begin(grace(0)).unwrap();
    let mut running = task::spawn(call(&plan, "tool"));
    assert_pending!(running.poll());
    let ctx: ToolExecutionContext = kept.lock().unwrap().take().unwrap();
    assert!(!ctx.is_cancelled());
    plan.cancel();
    assert!(ctx.is_cancelled() && ctx.check().is_err());
    within(ctx.cancelled()).await;
    drop(running);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p5_the_grace_ends_as_soon_as_no_call_is_left() {
    let probe = Probe::new("tool").on_execute(Step::UntilCancelled);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let running = tokio::spawn(call(&plan, "tool"));
    until(|| probe.counts().executions == 1).await;
    let began = Instant::now();
    plan.finish().await;
    assert_about(began.elapsed(), 0);
    running.await.unwrap().unwrap();
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p5_a_call_may_finish_within_the_grace() {
    let probe = Probe::new("tool").on_execute(Step::Slow(Duration::from_millis(1500)));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let running = tokio::spawn(call(&plan, "tool"));
    until(|| probe.counts().executions == 1).await;
    plan.cancel();
    assert!(running.await.unwrap().unwrap().success);
    plan.finish().await;
    fixture.end().await;
}

// ===== the hard end =====

#[tokio::test(start_paused = true)]
async fn p5_a_call_that_outlasts_the_grace_is_dropped() {
    let probe = Probe::new("tool").on_execute(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let running = tokio::spawn(call(&plan, "tool"));
    until(|| probe.counts().executions == 1).await;
    let began = Instant::now();
    let report = plan.finish().await;
    assert_about(began.elapsed(), 2_000);
    assert_eq!(report.overrun(), 0);
    assert_eq!(code(running.await.unwrap()), OutcomeCode::PlanEnded);
    assert_eq!(probe.counts().dropped, 1);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p5_a_cancelled_call_that_outlasts_the_grace_is_cancelled() {
    let probe = Probe::new("tool").on_execute(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let running = tokio::spawn(call(&plan, "tool"));
    until(|| probe.counts().executions == 1).await;
    plan.cancel();
    assert!(matches!(running.await.unwrap(), Err(CallError::Cancelled(_))));
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p5_without_a_grace_a_call_is_dropped_at_once() {
    let probe = Probe::new("tool").on_execute(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.begin(grace(0)).unwrap();
    let running = tokio::spawn(call(&plan, "tool"));
    until(|| probe.counts().executions == 1).await;
    let began = Instant::now();
    plan.finish().await;
    assert_about(began.elapsed(), 0);
    assert_eq!(code(running.await.unwrap()), OutcomeCode::PlanEnded);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p5_the_grace_is_never_longer_than_the_budget() {
    let probe = Probe::new("tool").on_execute(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let deadlines = Deadlines::default().grace(Duration::from_secs(60)).end(Duration::from_secs(1));
    let plan = fixture.begin(PlanOptions::new().deadlines(deadlines)).unwrap();
    let running = tokio::spawn(call(&plan, "tool"));
    until(|| probe.counts().executions == 1).await;
    let began = Instant::now();
    plan.finish().await;
    assert_about(began.elapsed(), 1_000);
    assert!(running.await.unwrap().is_err());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p5_a_call_of_an_immediate_tool_has_the_same_grace() {
    let probe = Probe::new("tool").immediate().on_execute(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let running = tokio::spawn(call(&plan, "tool"));
    until(|| probe.counts().executions == 1).await;
    let began = Instant::now();
    plan.finish().await;
    assert_about(began.elapsed(), 2_000);
    assert_eq!(code(running.await.unwrap()), OutcomeCode::PlanEnded);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p5_a_call_that_nobody_polls_does_not_hold_up_the_end() {
    let probe = Probe::new("tool").on_execute(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let mut parked = task::spawn(call(&plan, "tool"));
    assert_pending!(parked.poll());
    let began = Instant::now();
    let report = plan.finish().await;
    assert_about(began.elapsed(), 2_000);
    assert_eq!((report.overrun(), probe.counts().deactivations), (0, 1));
    assert!(parked.is_woken());
    assert_eq!(code(assert_ready!(parked.poll())), OutcomeCode::PlanEnded);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p5_a_call_that_could_go_on_is_not_polled_after_the_hard_end() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").on_execute(Step::Until(latch.clone()));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let mut parked = task::spawn(call(&plan, "tool"));
    assert_pending!(parked.poll());
    plan.finish().await;
    latch.cancel();
    assert_eq!(code(assert_ready!(parked.poll())), OutcomeCode::PlanEnded);
    let counts = probe.counts();
    assert_eq!((counts.dropped, counts.late), (1, 0));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p5_a_call_between_two_rooms_does_not_begin_to_execute_after_the_hard_end() {
    let probe = Probe::new("tool").max_concurrent(1).on_execute(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let mut first = task::spawn(call(&plan, "tool"));
    assert_pending!(first.poll());
    let mut second = task::spawn(call(&plan, "tool"));
    assert_pending!(second.poll());
    plan.finish().await;
    drop(first);
    assert_eq!(code(assert_ready!(second.poll())), OutcomeCode::PlanEnded);
    assert_eq!(probe.counts().executions, 1);
    fixture.end().await;
}

#[tokio::test]
async fn p5_a_call_that_waits_for_room_ends_at_once_with_the_plan() {
    let probe = Probe::new("tool").max_concurrent(1).on_execute(Step::Never);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.begin(grace(0)).unwrap();
    let mut first = task::spawn(call(&plan, "tool"));
    assert_pending!(first.poll());
    let mut second = task::spawn(call(&plan, "tool"));
    assert_pending!(second.poll());
    plan.cancel();
    assert_eq!(code(assert_ready!(second.poll())), OutcomeCode::Cancelled);
    drop(first);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn p5_no_poll_is_late_when_busy_calls_meet_the_end() {
    let probe = Probe::new("tool").on_execute(Step::Yield(u32::MAX));
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.begin(grace(5)).unwrap();
    let calls: tokio::task::JoinSet<Called> = (0..16).map(|_| call(&plan, "tool")).collect();
    until(|| probe.counts().executions == 16).await;
    let report = plan.finish().await;
    assert_eq!(report.overrun(), 0);
    let called = within(calls.join_all()).await;
    assert!(called.iter().all(Result::is_err));
    assert_eq!(probe.counts().dropped, 16);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p5_a_panic_in_the_drop_of_a_call_at_the_hard_end_is_contained() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            assert!(std::thread::panicking(), "a panic in the drop of a call");
        }
    }
    let probe = Probe::new("tool");
    let hooked = Hooked::new(&probe).before_execute(|_| async {
        let _bomb = Bomb;
        std::future::pending().await
    });
    let fixture = hooked.fixture(paused()).await;
    let plan = fixture.plan();
    let mut parked = task::spawn(call(&plan, "tool"));
    assert_pending!(parked.poll());
    plan.finish().await;
    assert_eq!(code(assert_ready!(parked.poll())), OutcomeCode::PlanEnded);
    fixture.end().await;
}

// ===== overrun =====

#[tokio::test(start_paused = true)]
async fn p5_a_tool_that_blocks_its_thread_is_reported_as_overrun() {
    let (probe, blocker) = (Probe::new("tool"), Blocker::default());
    let fixture = blocking(&probe, &blocker).fixture(paused()).await;
    let plan = fixture.plan();
    let running = call(&plan, "tool");
    let caller = std::thread::spawn(move || block_on(running));
    until(|| blocker.is_blocking()).await;
    let began = Instant::now();
    let report = plan.finish().await;
    assert_about(began.elapsed(), 4_000);
    assert_eq!(report.overrun(), 1);
    assert!(report.deactivations()[0].overrun);
    blocker.release();
    assert!(!caller.join().unwrap().unwrap().success);
    fixture.end().await;
}

#[tokio::test]
async fn p5_a_blocked_poll_that_returns_before_the_drain_deadline_is_no_overrun() {
    let (probe, blocker) = (Probe::new("tool"), Blocker::default());
    let fixture = blocking(&probe, &blocker).fixture(ToolRuntime::builder()).await;
    let deadlines = Deadlines::default().grace(Duration::ZERO).drain(Duration::from_secs(20));
    let plan = fixture.begin(PlanOptions::new().deadlines(deadlines)).unwrap();
    let running = call(&plan, "tool");
    let caller = std::thread::spawn(move || block_on(running));
    until(|| blocker.is_blocking()).await;
    let mut finish = task::spawn(plan.finish());
    assert_pending!(finish.poll());
    assert_eq!(probe.counts().deactivations, 0);
    blocker.release();
    let report = within(finish).await;
    assert_eq!(report.overrun(), 0);
    assert!(!report.deactivations()[0].overrun);
    assert!(!caller.join().unwrap().unwrap().success);
    fixture.end().await;
}

// ===== draining by hand =====

#[tokio::test]
async fn p5_a_deactivation_by_hand_waits_for_the_running_call_and_does_not_cancel_it() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").on_execute(Step::Until(latch.clone()));
    let place = Arc::new(Mutex::new(None));
    let fixture = keeping_its_context(&probe, &place).fixture(ToolRuntime::builder()).await;
    let plan = fixture.plan();
    let mut running = task::spawn(call(&plan, "tool"));
    assert_pending!(running.poll());
    let mut deactivation = task::spawn(plan.deactivate("tool"));
    assert_pending!(deactivation.poll());
    let ctx = place.lock().unwrap().take().unwrap();
    assert!(!ctx.is_cancelled());
    assert_eq!(probe.counts().deactivations, 0);
    latch.cancel();
    assert!(assert_ready!(running.poll()).unwrap().success);
    assert!(within(deactivation).await);
    assert_eq!(probe.counts().deactivations, 1);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p5_a_call_that_comes_while_the_tool_drains_is_refused() {
    let probe = Probe::new("tool").on_execute(Step::Never);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let mut running = task::spawn(call(&plan, "tool"));
    assert_pending!(running.poll());
    let mut deactivation = task::spawn(plan.deactivate("tool"));
    assert_pending!(deactivation.poll());
    assert_eq!(code(call(&plan, "tool").await), OutcomeCode::NotActivated);
    drop(running);
    assert!(within(deactivation).await);
    assert_eq!(probe.counts().executions, 1);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p5_a_deactivation_by_hand_waits_no_longer_than_the_end_budget() {
    let probe = Probe::new("tool").on_execute(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let running = tokio::spawn(call(&plan, "tool"));
    until(|| probe.counts().executions == 1).await;
    let began = Instant::now();
    assert!(plan.deactivate("tool").await);
    assert_about(began.elapsed(), 30_000);
    assert_eq!(code(running.await.unwrap()), OutcomeCode::NotActivated);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p5_the_end_of_the_plan_cuts_a_drain_by_hand_to_the_grace() {
    let probe = Probe::new("tool").on_execute(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let running = tokio::spawn(call(&plan, "tool"));
    until(|| probe.counts().executions == 1).await;
    let handle = plan.handle();
    let deactivation = tokio::spawn(async move { handle.deactivate("tool").await });
    tokio::task::yield_now().await;
    let began = Instant::now();
    assert_eq!(plan.finish().await.reason(), EndReason::Finished);
    assert_about(began.elapsed(), 2_000);
    assert!(deactivation.await.unwrap());
    assert!(running.await.unwrap().is_err());
    fixture.end().await;
}

// ===== a call's own token =====

#[tokio::test(start_paused = true)]
async fn p5_a_call_cancelled_by_its_own_token_has_the_grace_and_the_instance_stays() {
    let probe = Probe::new("tool").on_execute([Step::Never, Step::Ok]);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let token = CancellationToken::new();
    let options = CallOptions::new().token(token.clone());
    let mut running = task::spawn(plan.execute_with("tool", json!({}), options));
    assert_pending!(running.poll());
    token.cancel();
    let began = Instant::now();
    assert!(matches!(running.await, Err(CallError::Cancelled(_))));
    assert_about(began.elapsed(), 2_000);
    assert!(call(&plan, "tool").await.unwrap().success);
    assert_eq!(plan.finish().await.deactivations().len(), 1);
    fixture.end().await;
}

#[tokio::test]
async fn p5_a_result_within_the_grace_of_the_calls_own_token_is_returned() {
    let probe = Probe::new("tool").on_execute(Step::UntilCancelled);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let token = CancellationToken::new();
    let options = CallOptions::new().token(token.clone());
    let mut running = task::spawn(plan.execute_with("tool", json!({}), options));
    assert_pending!(running.poll());
    token.cancel();
    assert!(within(running).await.unwrap().success);
    assert!(plan.traces()[0].cancelled);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p5_a_context_that_outlives_its_plan_can_start_nothing() {
    let probe = Probe::new("tool");
    let place = Arc::new(Mutex::new(None));
    let fixture = keeping_its_context(&probe, &place).fixture(ToolRuntime::builder()).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    plan.finish().await;
    let ctx = place.lock().unwrap().take().unwrap();
    let nested = ctx.execute_nested("tool", &json!({})).await;
    assert!(matches!(nested, Err(CallError::Runtime(ToolRuntimeError::PlanEnded { .. }))));
    fixture.end().await;
}

/// Each execution leaves its context where the test finds it.
fn keeping_its_context(probe: &Probe, place: &Arc<Mutex<Option<ToolExecutionContext>>>) -> Hooked {
    let place = Arc::clone(place);
    Hooked::new(probe).before_execute(move |ctx| ready(&place, |place| *place = Some(ctx)))
}

/// Each execution blocks its thread, and then fails before the probe's own.
fn blocking(probe: &Probe, blocker: &Blocker) -> Hooked {
    let blocker = blocker.clone();
    Hooked::new(probe).before_execute(move |_| {
        let blocker = blocker.clone();
        async move {
            blocker.block();
            Err(ToolFailure::failed("it was blocked"))
        }
    })
}
