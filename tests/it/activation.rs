//! P1 to P3: at most one activation, which belongs to the plan; failed attempts.
//!
//! At the end stands what the lifecycle tests share: hooks round a probe's stages, calls to poll by hand, a blocker.

use std::error::Error;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_test::{assert_pending, task};
use tokio_util::sync::CancellationToken;
use toolscope::test_util::{Probe, Step};
use toolscope::{
    ActivationContext, ActivationError, ActivationPhase, CallError, CallOptions,
    DeactivationContext, Deadlines, Keeper, OutcomeCode, PlanHandle, PlanOptions, Tool,
    ToolDescriptor, ToolExecutionContext, ToolFailure, ToolInstance, ToolOutput, ToolResult,
    ToolRuntime, ToolRuntimeError, async_trait,
};

use crate::support::Fixture;

// ===== P1: at most one activation =====

#[tokio::test]
async fn p1_beginning_a_plan_activates_nothing() {
    let probe = Probe::new("tool");
    let fixture = Fixture::new(&[&probe]).await;
    fixture.plan().finish().await;
    assert_eq!(probe.counts().activations, 0);
    fixture.end().await;
}

#[tokio::test]
async fn p1_the_second_call_uses_the_instance_of_the_first() {
    let probe = Probe::new("tool");
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    assert!(call(&plan, "tool").await.unwrap().success);
    assert!(call(&plan, "tool").await.unwrap().success);
    plan.finish().await;
    let counts = probe.counts();
    assert_eq!((counts.activations, counts.executions), (1, 2));
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn p1_a_thousand_racing_tasks_activate_once() {
    let probe = Probe::new("tool").on_activate(Step::Yield(3));
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let calls: JoinSet<Called> = (0..1000).map(|_| call(&plan, "tool")).collect();
    let called = within(calls.join_all()).await;
    assert!(called.iter().all(|called| called.as_ref().unwrap().success));
    plan.finish().await;
    let counts = probe.counts();
    assert_eq!((counts.activations, counts.executions), (1, 1000));
    fixture.end().await;
}

#[tokio::test]
async fn p1_a_thousand_tasks_wait_for_one_activation() {
    let (probe, latch) = gated();
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let mut calls: Vec<_> = (0..1000)
        .map(|_| task::spawn(call(&plan, "tool")))
        .collect();
    for call in &mut calls {
        assert_pending!(call.poll());
    }
    latch.cancel();
    for call in calls {
        assert!(within(call).await.unwrap().success);
    }
    plan.finish().await;
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

#[test]
fn p1_racing_threads_without_a_tokio_runtime_activate_once() {
    let probe = Probe::new("tool").on_activate(Step::Yield(3));
    let fixture = block_on(Fixture::new(&[&probe]));
    let plan = fixture.plan();
    let start = std::sync::Barrier::new(8);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                start.wait();
                assert!(block_on(call(&plan, "tool")).unwrap().success);
            });
        }
    });
    block_on(plan.finish());
    assert_eq!(probe.counts().activations, 1);
    block_on(fixture.end());
}

#[tokio::test]
async fn p1_activation_by_hand_and_a_call_share_one_activation() {
    let (probe, latch) = gated();
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let mut by_hand = task::spawn(plan.activate("tool"));
    assert_pending!(by_hand.poll());
    let mut by_call = task::spawn(call(&plan, "tool"));
    assert_pending!(by_call.poll());
    latch.cancel();
    within(by_hand).await.unwrap();
    assert!(within(by_call).await.unwrap().success);
    plan.finish().await;
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

#[tokio::test]
async fn p1_each_plan_has_an_instance_of_its_own() {
    let probe = Probe::new("tool");
    let fixture = Fixture::new(&[&probe]).await;
    let (one, other) = (fixture.plan(), fixture.plan());
    call(&one, "tool").await.unwrap();
    call(&other, "tool").await.unwrap();
    assert_eq!(fixture.stats().open, 2);
    one.finish().await;
    assert_eq!(fixture.stats().open, 1);
    assert!(call(&other, "tool").await.unwrap().success);
    other.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p1_two_tools_of_one_plan_are_activated_at_the_same_time() {
    let (slow, latch) = gated();
    let other = Probe::new("other");
    let fixture = Fixture::new(&[&slow, &other]).await;
    let plan = fixture.plan();
    let mut waiting = task::spawn(call(&plan, "tool"));
    assert_pending!(waiting.poll());
    assert!(call(&plan, "other").await.unwrap().success);
    latch.cancel();
    assert!(within(waiting).await.unwrap().success);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p1_an_immediate_tool_is_never_activated() {
    let probe = Probe::new("tool").immediate();
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    plan.activate("tool").await.unwrap();
    assert!(call(&plan, "tool").await.unwrap().success);
    let report = plan.finish().await;
    assert!(report.deactivations().is_empty());
    assert_eq!(fixture.end().await.started, 0);
}

#[tokio::test]
async fn p1_a_call_that_fails_leaves_the_instance_active() {
    let probe = Probe::new("tool").on_execute([Step::Err, Step::Ok]);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    assert!(!call(&plan, "tool").await.unwrap().success);
    assert!(call(&plan, "tool").await.unwrap().success);
    plan.finish().await;
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

#[tokio::test]
async fn p1_a_call_that_panics_leaves_the_instance_active() {
    let probe = Probe::new("tool").on_execute([Step::Panic, Step::Ok]);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    assert_eq!(call(&plan, "tool").await.unwrap().code(), "panic");
    assert!(call(&plan, "tool").await.unwrap().success);
    plan.finish().await;
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p1_a_call_that_times_out_leaves_the_instance_active() {
    let probe = Probe::new("tool")
        .on_execute([Step::Never, Step::Ok])
        .call_timeout(Duration::from_secs(1));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    assert_eq!(call(&plan, "tool").await.unwrap().code(), "timeout");
    assert!(call(&plan, "tool").await.unwrap().success);
    plan.finish().await;
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

// ===== P2: an activation belongs to the plan =====

#[tokio::test]
async fn p2_the_first_caller_dropped_leaves_the_activation_to_the_second() {
    let (probe, latch) = gated();
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let mut first = task::spawn(call(&plan, "tool"));
    assert_pending!(first.poll());
    let mut second = task::spawn(call(&plan, "tool"));
    assert_pending!(second.poll());
    drop(first);
    latch.cancel();
    assert!(within(second).await.unwrap().success);
    plan.finish().await;
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

#[tokio::test]
async fn p2_the_first_caller_aborted_leaves_the_activation_to_the_second() {
    let (probe, latch) = gated();
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let first = tokio::spawn(call(&plan, "tool"));
    until(|| probe.counts().activations == 1).await;
    let second = tokio::spawn(call(&plan, "tool"));
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    latch.cancel();
    assert!(within(second).await.unwrap().unwrap().success);
    plan.finish().await;
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p2_the_first_caller_timed_out_leaves_the_activation_to_the_second() {
    let (probe, latch) = gated();
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let first = tokio::time::timeout(Duration::from_secs(1), call(&plan, "tool")).await;
    assert!(first.is_err());
    let second = tokio::spawn(call(&plan, "tool"));
    latch.cancel();
    assert!(second.await.unwrap().unwrap().success);
    plan.finish().await;
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p2_a_calls_own_deadline_does_not_stop_the_activation() {
    let (probe, latch) = gated();
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let options = CallOptions::new().timeout(Duration::from_secs(1));
    let first = plan.execute_with("tool", json!({}), options).await;
    assert_eq!(first.unwrap_err().code(), OutcomeCode::ActivationTimeout);
    latch.cancel();
    assert!(call(&plan, "tool").await.unwrap().success);
    plan.finish().await;
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

#[tokio::test]
async fn p2_a_calls_own_token_does_not_stop_the_activation() {
    let (probe, latch) = gated();
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let token = CancellationToken::new();
    let options = CallOptions::new().token(token.clone());
    let mut first = task::spawn(plan.execute_with("tool", json!({}), options));
    assert_pending!(first.poll());
    token.cancel();
    assert!(matches!(
        within(first).await.unwrap_err(),
        CallError::Cancelled(_)
    ));
    latch.cancel();
    assert!(call(&plan, "tool").await.unwrap().success);
    plan.finish().await;
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

#[tokio::test]
async fn p2_an_activation_without_any_caller_left_goes_on() {
    let (probe, latch) = gated();
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let mut only = task::spawn(call(&plan, "tool"));
    assert_pending!(only.poll());
    drop(only);
    latch.cancel();
    until(|| fixture.stats().activated == 1).await;
    plan.finish().await;
    assert_eq!(probe.counts().executions, 0);
    fixture.end().await;
}

#[tokio::test]
async fn p2_a_waiter_dropped_does_not_disturb_the_others() {
    let (probe, latch) = gated();
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let mut first = task::spawn(call(&plan, "tool"));
    assert_pending!(first.poll());
    let mut second = task::spawn(call(&plan, "tool"));
    assert_pending!(second.poll());
    drop(second);
    latch.cancel();
    assert!(within(first).await.unwrap().success);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p2_an_activation_by_hand_dropped_goes_on() {
    let (probe, latch) = gated();
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let mut by_hand = task::spawn(plan.activate("tool"));
    assert_pending!(by_hand.poll());
    drop(by_hand);
    latch.cancel();
    assert!(call(&plan, "tool").await.unwrap().success);
    plan.finish().await;
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

#[tokio::test]
async fn p2_a_panic_of_the_first_caller_leaves_the_activation_to_the_second() {
    let (probe, latch) = gated();
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let first = tokio::spawn({
        let call = call(&plan, "tool");
        async move { tokio::join!(call, async { panic!("the caller panics") }) }
    });
    assert!(first.await.unwrap_err().is_panic());
    latch.cancel();
    assert!(call(&plan, "tool").await.unwrap().success);
    plan.finish().await;
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

#[tokio::test]
async fn p2_the_end_of_the_first_callers_runtime_leaves_the_activation_to_the_second() {
    let (probe, latch) = gated();
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let first = call(&plan, "tool");
    let seen = probe.clone();
    std::thread::spawn(move || {
        let callers = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        drop(callers.spawn(first));
        callers.block_on(until(|| seen.counts().activations == 1));
    })
    .join()
    .unwrap();
    latch.cancel();
    assert!(call(&plan, "tool").await.unwrap().success);
    plan.finish().await;
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

#[tokio::test]
async fn p2_an_activation_is_in_the_keepers_context_from_its_first_poll_on() {
    let probe = Probe::new("tool");
    let seen = Arc::new(Mutex::new(Vec::new()));
    let keep = Arc::clone(&seen);
    let hooked = Hooked::new(&probe).before_activate(move |_| {
        let seen = Arc::clone(&keep);
        async move {
            seen.lock().unwrap().push(Handle::current().id());
            tokio::task::yield_now().await;
            seen.lock().unwrap().push(Handle::current().id());
            Ok(())
        }
    });
    let fixture = hooked.fixture(ToolRuntime::builder()).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    plan.finish().await;
    let seen = seen.lock().unwrap().clone();
    assert_eq!(seen[0], seen[1]);
    assert_ne!(seen[0], Handle::current().id());
    fixture.end().await;
}

#[tokio::test]
async fn p2_an_off_thread_tool_is_never_polled_by_the_caller() {
    let probe = Probe::new("tool").off_thread();
    let threads = Arc::new(Mutex::new(Vec::new()));
    let (first, last) = (Arc::clone(&threads), Arc::clone(&threads));
    let hooked = Hooked::new(&probe)
        .before_activate(move |_| ready(&first, |threads| threads.push(this_thread())))
        .after_deactivate(move |_| ready(&last, |threads| threads.push(this_thread())));
    let fixture = hooked.fixture(ToolRuntime::builder()).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    plan.finish().await;
    assert_eq!(
        *threads.lock().unwrap(),
        ["toolscope-keeper", "toolscope-keeper"]
    );
    fixture.end().await;
}

fn this_thread() -> String {
    std::thread::current().name().unwrap_or_default().to_owned()
}

// ===== P3: failed attempts =====

#[tokio::test]
async fn p3_a_failed_activation_is_the_error_of_the_call() {
    let probe = Probe::new("tool").on_activate(Step::Err);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let error = activation_error(call(&plan, "tool").await);
    assert_eq!(
        (error.what(), error.phase()),
        ("local/tool", ActivationPhase::Failed)
    );
    assert_eq!(error.message(), "the probe fails in activate");
    plan.finish().await;
    assert_eq!(fixture.end().await.failed, 1);
}

#[tokio::test]
async fn p3_an_activation_that_panics_is_the_error_of_the_call() {
    let probe = Probe::new("tool").on_activate(Step::Panic);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let error = activation_error(call(&plan, "tool").await);
    assert_eq!(error.phase(), ActivationPhase::Panicked);
    assert_eq!(error.message(), "the probe panics in activate");
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p3_an_activation_that_panics_after_an_await_is_the_error_of_the_call() {
    let probe = Probe::new("tool").on_activate(Step::YieldPanic(2));
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let error = activation_error(call(&plan, "tool").await);
    assert_eq!(error.phase(), ActivationPhase::Panicked);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p3_an_activation_that_panics_before_there_is_a_future_is_the_error_of_the_call() {
    let builder = ToolRuntime::builder().tool(Futureless(descriptor("tool")));
    let fixture = Fixture::with(builder, &[]).await;
    let plan = fixture.plan();
    let error = activation_error(call(&plan, "tool").await);
    assert_eq!(
        (error.phase(), error.message()),
        (ActivationPhase::Panicked, "no future")
    );
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p3_an_activation_that_never_returns_times_out() {
    let probe = Probe::new("tool").on_activate(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let began = Instant::now();
    let error = activation_error(call(&plan, "tool").await);
    assert_eq!(error.phase(), ActivationPhase::TimedOut);
    assert_about(began.elapsed(), 30_000);
    assert_eq!(probe.counts().half_done, 1);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p3_an_activation_that_timed_out_is_tried_again() {
    let probe = Probe::new("tool").on_activate([Step::Never, Step::Ok]);
    let fixture = Fixture::paused(&[&probe]).await;
    let deadlines = Deadlines::default().activate(Duration::from_secs(1));
    let plan = fixture
        .begin(PlanOptions::new().deadlines(deadlines))
        .unwrap();
    activation_error(call(&plan, "tool").await);
    assert!(call(&plan, "tool").await.unwrap().success);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p3_a_failure_is_not_cached() {
    let probe = Probe::new("tool").on_activate([Step::Err, Step::Ok]);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    activation_error(call(&plan, "tool").await);
    assert!(call(&plan, "tool").await.unwrap().success);
    plan.finish().await;
    assert_eq!(probe.counts().activations, 2);
    fixture.end().await;
}

#[tokio::test]
async fn p3_a_panic_is_not_cached() {
    let probe = Probe::new("tool").on_activate([Step::Panic, Step::Ok]);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    activation_error(call(&plan, "tool").await);
    assert!(call(&plan, "tool").await.unwrap().success);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p3_all_who_waited_get_the_very_same_error() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool");
    let gate = latch.clone();
    let hooked = Hooked::new(&probe).before_activate(move |_| {
        let gate = gate.clone();
        async move {
            gate.cancelled().await;
            Err(io::Error::other("refused").into())
        }
    });
    let fixture = hooked.fixture(ToolRuntime::builder()).await;
    let plan = fixture.plan();
    let mut calls: Vec<_> = (0..3).map(|_| task::spawn(call(&plan, "tool"))).collect();
    for call in &mut calls {
        assert_pending!(call.poll());
    }
    latch.cancel();
    let mut errors = Vec::new();
    for call in calls {
        errors.push(activation_error(within(call).await));
    }
    let cause = |error: &ActivationError| error.source().unwrap() as *const dyn Error;
    assert!(std::ptr::addr_eq(cause(&errors[0]), cause(&errors[1])));
    assert!(std::ptr::addr_eq(cause(&errors[0]), cause(&errors[2])));
    plan.finish().await;
    assert_eq!(fixture.end().await.started, 1);
}

#[tokio::test]
async fn p3_a_hundred_waiters_share_one_failed_attempt() {
    let probe = Probe::new("tool").on_activate([Step::YieldErr(2), Step::Ok]);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let mut calls: Vec<_> = (0..100).map(|_| task::spawn(call(&plan, "tool"))).collect();
    for call in &mut calls {
        drop(call.poll());
    }
    until(|| fixture.stats().failed == 1).await;
    for call in calls {
        activation_error(within(call).await);
    }
    plan.finish().await;
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

#[tokio::test]
async fn p3_after_three_failed_attempts_the_last_error_is_final() {
    let probe = Probe::new("tool").on_activate(Step::Err);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    activation_error(call(&plan, "tool").await);
    activation_error(call(&plan, "tool").await);
    activation_error(call(&plan, "tool").await);
    let error = activation_error(call(&plan, "tool").await);
    assert_eq!(error.message(), "the probe fails in activate");
    plan.finish().await;
    assert_eq!(probe.counts().activations, 3);
    fixture.end().await;
}

#[tokio::test]
async fn p3_the_third_attempt_may_succeed() {
    let probe = Probe::new("tool").on_activate([Step::Err, Step::Panic, Step::Ok]);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    activation_error(call(&plan, "tool").await);
    activation_error(call(&plan, "tool").await);
    assert!(call(&plan, "tool").await.unwrap().success);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p3_a_plan_may_allow_one_attempt_only() {
    let probe = Probe::new("tool").on_activate([Step::Err, Step::Ok]);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_attempts(1)).unwrap();
    activation_error(call(&plan, "tool").await);
    activation_error(call(&plan, "tool").await);
    plan.finish().await;
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

#[tokio::test]
async fn p3_no_attempts_at_all_are_taken_as_one() {
    let probe = Probe::new("tool");
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_attempts(0)).unwrap();
    assert!(call(&plan, "tool").await.unwrap().success);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p3_activation_by_hand_uses_up_the_same_attempts() {
    let probe = Probe::new("tool").on_activate(Step::Err);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_attempts(2)).unwrap();
    assert!(plan.activate("tool").await.is_err());
    activation_error(call(&plan, "tool").await);
    assert!(plan.activate("tool").await.is_err());
    plan.finish().await;
    assert_eq!(probe.counts().activations, 2);
    fixture.end().await;
}

#[tokio::test]
async fn p3_an_activation_knows_which_attempt_it_is() {
    let probe = Probe::new("tool").on_activate([Step::Err, Step::Err, Step::Ok]);
    let attempts = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&attempts);
    let hooked = Hooked::new(&probe)
        .before_activate(move |ctx| ready(&seen, |attempts| attempts.push(ctx.attempt())));
    let fixture = hooked.fixture(ToolRuntime::builder()).await;
    let plan = fixture.plan();
    activation_error(call(&plan, "tool").await);
    activation_error(call(&plan, "tool").await);
    call(&plan, "tool").await.unwrap();
    plan.finish().await;
    assert_eq!(*attempts.lock().unwrap(), [1, 2, 3]);
    fixture.end().await;
}

#[tokio::test]
async fn p3_each_plan_counts_its_own_attempts() {
    let probe = Probe::new("tool").on_activate([Step::Err, Step::Ok]);
    let fixture = Fixture::new(&[&probe]).await;
    let one = fixture.begin(PlanOptions::new().max_attempts(1)).unwrap();
    let other = fixture.begin(PlanOptions::new().max_attempts(1)).unwrap();
    activation_error(call(&one, "tool").await);
    assert!(call(&other, "tool").await.unwrap().success);
    one.finish().await;
    other.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p3_a_tool_that_cannot_be_activated_does_not_touch_the_others() {
    let (broken, whole) = (
        Probe::new("broken").on_activate(Step::Panic),
        Probe::new("whole"),
    );
    let fixture = Fixture::new(&[&broken, &whole]).await;
    let plan = fixture.plan();
    activation_error(call(&plan, "broken").await);
    assert!(call(&plan, "whole").await.unwrap().success);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p3_the_failure_of_a_shared_activation_is_no_attempt_of_the_tool() {
    let wire = Probe::new("wire").on_activate([Step::Err, Step::Err, Step::Ok]);
    let probe = Probe::new("tool")
        .needs(&wire)
        .on_activate([Step::Ok, Step::Ok, Step::Err, Step::Err, Step::Ok]);
    let fixture = Fixture::new(&[&probe]).await.track(&wire);
    let plan = fixture.plan();
    // Twice for the wire, twice on its own account, and there is an attempt left.
    activation_error(call(&plan, "tool").await);
    activation_error(call(&plan, "tool").await);
    activation_error(call(&plan, "tool").await);
    activation_error(call(&plan, "tool").await);
    assert!(call(&plan, "tool").await.unwrap().success);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p3_a_shared_activation_counts_attempts_of_its_own() {
    let wire = Probe::new("wire").on_activate(Step::Err);
    let probe = Probe::new("tool").needs(&wire);
    let fixture = Fixture::new(&[&probe]).await.track(&wire);
    let plan = fixture.begin(PlanOptions::new().max_attempts(2)).unwrap();
    activation_error(call(&plan, "tool").await);
    activation_error(call(&plan, "tool").await);
    let error = activation_error(call(&plan, "tool").await);
    assert!(error.message().contains("local/wire"), "{error}");
    plan.finish().await;
    assert_eq!(
        (wire.counts().activations, probe.counts().activations),
        (2, 3)
    );
    fixture.end().await;
}

// ===== P3: what undoes an activation half-way =====

#[tokio::test]
async fn p3_deferred_work_runs_last_first_before_the_error_is_told() {
    let probe = Probe::new("tool").on_activate(Step::YieldErr(1));
    let log = Log::default();
    let fixture = deferring(&probe, &log).fixture(ToolRuntime::builder()).await;
    let plan = fixture.plan();
    activation_error(call(&plan, "tool").await);
    assert_eq!(log.read(), ["second", "first"]);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p3_deferred_work_runs_after_a_panic() {
    let probe = Probe::new("tool").on_activate(Step::Panic);
    let log = Log::default();
    let fixture = deferring(&probe, &log).fixture(ToolRuntime::builder()).await;
    let plan = fixture.plan();
    activation_error(call(&plan, "tool").await);
    assert_eq!(log.read(), ["second", "first"]);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p3_deferred_work_runs_after_a_timeout() {
    let probe = Probe::new("tool").on_activate(Step::Never);
    let log = Log::default();
    let fixture = deferring(&probe, &log).fixture(paused()).await;
    let plan = fixture.plan();
    activation_error(call(&plan, "tool").await);
    assert_eq!(log.read(), ["second", "first"]);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p3_deferred_work_does_not_run_after_a_success() {
    let probe = Probe::new("tool");
    let log = Log::default();
    let fixture = deferring(&probe, &log).fixture(ToolRuntime::builder()).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    plan.finish().await;
    fixture.end().await;
    assert!(log.read().is_empty());
}

#[tokio::test(start_paused = true)]
async fn p3_deferred_work_runs_when_the_plan_ends_under_an_activation() {
    let probe = Probe::new("tool").on_activate(Step::Never);
    let log = Log::default();
    let fixture = deferring(&probe, &log).fixture(paused()).await;
    let plan = fixture.plan();
    let mut waiting = task::spawn(call(&plan, "tool"));
    assert_pending!(waiting.poll());
    let report = plan.finish().await;
    assert!(report.unsettled().is_empty());
    assert_eq!(log.read(), ["second", "first"]);
    drop(waiting);
    fixture.end().await;
}

#[tokio::test]
async fn p3_deferred_work_that_panics_does_not_stop_the_rest() {
    let probe = Probe::new("tool").on_activate(Step::Err);
    let log = Log::default();
    let keep = log.clone();
    let hooked = Hooked::new(&probe).before_activate(move |ctx| {
        let log = keep.clone();
        ctx.defer(move || async move { log.add("the rest") });
        ctx.defer(|| async { panic!("deferred work panics") });
        async { Ok(()) }
    });
    let fixture = hooked.fixture(ToolRuntime::builder()).await;
    let plan = fixture.plan();
    activation_error(call(&plan, "tool").await);
    assert_eq!(log.read(), ["the rest"]);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p3_deferred_work_that_hangs_is_bounded() {
    let probe = Probe::new("tool").on_activate(Step::Err);
    let log = Log::default();
    let keep = log.clone();
    let hooked = Hooked::new(&probe).before_activate(move |ctx| {
        let log = keep.clone();
        ctx.defer(move || async move { log.add("the rest") });
        ctx.defer(std::future::pending);
        async { Ok(()) }
    });
    let fixture = hooked.fixture(paused()).await;
    let plan = fixture.plan();
    let began = Instant::now();
    activation_error(call(&plan, "tool").await);
    assert_about(began.elapsed(), 10_000);
    assert_eq!(log.read(), ["the rest"]);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p3_the_next_attempt_waits_for_deferred_work() {
    let probe = Probe::new("tool").on_activate([Step::Err, Step::Ok]);
    let latch = CancellationToken::new();
    let gate = latch.clone();
    let hooked = Hooked::new(&probe).before_activate(move |ctx| {
        let gate = gate.clone();
        ctx.defer(move || async move { gate.cancelled().await });
        async { Ok(()) }
    });
    let fixture = hooked.fixture(ToolRuntime::builder()).await;
    let plan = fixture.plan();
    let mut first = task::spawn(call(&plan, "tool"));
    assert_pending!(first.poll());
    let mut second = task::spawn(call(&plan, "tool"));
    assert_pending!(second.poll());
    assert_eq!(probe.counts().activations, 1);
    latch.cancel();
    activation_error(within(first).await);
    activation_error(within(second).await);
    assert!(call(&plan, "tool").await.unwrap().success);
    plan.finish().await;
    fixture.end().await;
}

/// Defers two pieces of work, then does what the probe does.
fn deferring(probe: &Probe, log: &Log) -> Hooked {
    let log = log.clone();
    Hooked::new(probe).before_activate(move |ctx| {
        let (first, second) = (log.clone(), log.clone());
        ctx.defer(move || async move { first.add("first") });
        ctx.defer(move || async move {
            tokio::task::yield_now().await;
            second.add("second");
        });
        async { Ok(()) }
    })
}

/// A tool whose `activate` panics before there is a future to poll.
struct Futureless(ToolDescriptor);

impl Tool for Futureless {
    fn descriptor(&self) -> &ToolDescriptor {
        &self.0
    }

    fn activate<'a, 'b, 'c>(
        &'a self,
        _: &'b ActivationContext,
    ) -> Pin<Box<dyn Future<Output = Result<Arc<dyn ToolInstance>, ToolFailure>> + Send + 'c>>
    where
        'a: 'c,
        'b: 'c,
    {
        panic!("no future")
    }
}

// ===== shared by the lifecycle tests =====

/// The bound of every wait for an event. It is never reached unless something is wrong.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) type Called = Result<ToolResult, CallError>;

/// A call as a future of its own: to spawn, to drop, to poll by hand.
pub(crate) fn call(
    plan: &PlanHandle,
    tool: &'static str,
) -> impl Future<Output = Called> + Send + use<> {
    let plan = plan.clone();
    async move { plan.execute(tool, json!({})).await }
}

/// A probe called `tool` whose activation waits for the latch.
pub(crate) fn gated() -> (Probe, CancellationToken) {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").on_activate(Step::Until(latch.clone()));
    (probe, latch)
}

/// A builder whose keeper is the test's own, paused runtime.
pub(crate) fn paused() -> toolscope::ToolRuntimeBuilder {
    ToolRuntime::builder().keeper(Keeper::on(Handle::current()))
}

pub(crate) fn descriptor(name: &str) -> ToolDescriptor {
    ToolDescriptor::new(name.parse().unwrap())
}

#[track_caller]
pub(crate) fn activation_error(called: Called) -> ActivationError {
    match called {
        Err(CallError::Runtime(ToolRuntimeError::Activation(error))) => error,
        other => panic!("no activation error: {other:?}"),
    }
}

/// Checks a time on the paused clock, whose grain is a millisecond.
#[track_caller]
pub(crate) fn assert_about(time: Duration, millis: u64) {
    let most = Duration::from_millis(millis + 10);
    assert!(
        (Duration::from_millis(millis)..most).contains(&time),
        "{time:?} and not {millis} ms"
    );
}

/// Awaits what must come.
pub(crate) async fn within<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work)
        .await
        .expect("it did not come in time")
}

/// Waits for an event that has no signal of its own.
pub(crate) async fn until(happened: impl Fn() -> bool) {
    let began = std::time::Instant::now();
    while !happened() {
        assert!(began.elapsed() < PATIENCE, "it did not happen in time");
        tokio::task::yield_now().await;
    }
}

/// Drives a future on this thread, without any Tokio runtime.
pub(crate) fn block_on<T>(work: impl Future<Output = T>) -> T {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut work = std::pin::pin!(work);
    loop {
        if let Poll::Ready(output) = work.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        std::thread::park_timeout(PATIENCE);
    }
}

/// Does something to what is behind the lock, as a hook that is ready at once.
pub(crate) fn ready<T>(behind: &Mutex<T>, work: impl FnOnce(&mut T)) -> std::future::Ready<Passed> {
    work(&mut behind.lock().unwrap());
    std::future::ready(Ok(()))
}

/// What happened, in its order.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<&'static str>>>);

impl Log {
    pub(crate) fn add(&self, what: &'static str) {
        self.0.lock().unwrap().push(what);
    }

    pub(crate) fn read(&self) -> Vec<&'static str> {
        self.0.lock().unwrap().clone()
    }
}

/// Blocks a thread until the test lets it go on.
#[derive(Clone, Default)]
pub(crate) struct Blocker(Arc<(Mutex<(bool, bool)>, Condvar)>);

impl Blocker {
    /// Blocks this thread; panics if nobody releases it.
    pub(crate) fn block(&self) {
        let (state, changed) = &*self.0;
        let mut state = state.lock().unwrap();
        state.0 = true;
        let (state, waited) = changed
            .wait_timeout_while(state, PATIENCE, |(_, released)| !*released)
            .unwrap();
        drop(state);
        assert!(!waited.timed_out(), "nobody released the thread");
    }

    pub(crate) fn is_blocking(&self) -> bool {
        let state = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.0
    }

    pub(crate) fn release(&self) {
        let (state, changed) = &*self.0;
        state.lock().unwrap_or_else(PoisonError::into_inner).1 = true;
        changed.notify_all();
    }
}

pub(crate) type Passed = Result<(), ToolFailure>;
type Work = Pin<Box<dyn Future<Output = Passed> + Send>>;

/// A probe with code of the test's own round its stages. What fails before a stage keeps the probe out of it.
pub(crate) struct Hooked {
    probe: Probe,
    tool: Arc<dyn Tool>,
    hooks: Hooks,
}

#[derive(Clone, Default)]
struct Hooks {
    activate: Option<Arc<dyn Fn(ActivationContext) -> Work + Send + Sync>>,
    execute: Option<Arc<dyn Fn(ToolExecutionContext) -> Work + Send + Sync>>,
    deactivate: Option<Arc<dyn Fn(&DeactivationContext) -> Work + Send + Sync>>,
}

impl Hooked {
    pub(crate) fn new(probe: &Probe) -> Self {
        let (probe, tool) = (probe.clone(), Arc::new(probe.tool()));
        Self {
            probe,
            tool,
            hooks: Hooks::default(),
        }
    }

    pub(crate) fn before_activate<F, Fut>(mut self, hook: F) -> Self
    where
        F: Fn(ActivationContext) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Passed> + Send + 'static,
    {
        self.hooks.activate = Some(Arc::new(move |ctx| Box::pin(hook(ctx))));
        self
    }

    pub(crate) fn before_execute<F, Fut>(mut self, hook: F) -> Self
    where
        F: Fn(ToolExecutionContext) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Passed> + Send + 'static,
    {
        self.hooks.execute = Some(Arc::new(move |ctx| Box::pin(hook(ctx))));
        self
    }

    /// After the probe's own `deactivate`, however that went.
    pub(crate) fn after_deactivate<F, Fut>(mut self, hook: F) -> Self
    where
        F: Fn(&DeactivationContext) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Passed> + Send + 'static,
    {
        self.hooks.deactivate = Some(Arc::new(move |ctx| Box::pin(hook(ctx))));
        self
    }

    /// A runtime with this tool and no other.
    pub(crate) async fn fixture(self, builder: toolscope::ToolRuntimeBuilder) -> Fixture {
        let probe = self.probe.clone();
        Fixture::with(builder.tool(self), &[]).await.track(&probe)
    }
}

#[async_trait]
impl Tool for Hooked {
    fn descriptor(&self) -> &ToolDescriptor {
        self.tool.descriptor()
    }

    fn off_thread(&self) -> bool {
        self.tool.off_thread()
    }

    async fn activate(
        &self,
        ctx: &ActivationContext,
    ) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        if let Some(hook) = &self.hooks.activate {
            hook(ctx.clone()).await?;
        }
        let instance = self.tool.activate(ctx).await?;
        let hooks = self.hooks.clone();
        Ok(Arc::new(HookedInstance { instance, hooks }))
    }
}

struct HookedInstance {
    instance: Arc<dyn ToolInstance>,
    hooks: Hooks,
}

#[async_trait]
impl ToolInstance for HookedInstance {
    async fn execute(
        &self,
        ctx: &ToolExecutionContext,
        input: &Value,
    ) -> Result<ToolOutput, ToolFailure> {
        if let Some(hook) = &self.hooks.execute {
            hook(ctx.clone()).await?;
        }
        self.instance.execute(ctx, input).await
    }

    async fn deactivate(&self, ctx: &DeactivationContext) -> Passed {
        let undone = self.instance.deactivate(ctx).await;
        if let Some(hook) = &self.hooks.deactivate {
            hook(ctx).await?;
        }
        undone
    }
}
