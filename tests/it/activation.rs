//! P1 to P3: at most one activation, which belongs to the plan; failed attempts.

use std::error::Error;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_test::{assert_pending, task};
use tokio_util::sync::CancellationToken;
use toolscope::test_util::{Probe, Step};
use toolscope::{
    ActivationContext, ActivationError, ActivationPhase, CallError, CallOptions, Deadlines,
    OutcomeCode, PlanOptions, Tool, ToolDescriptor, ToolFailure, ToolInstance, ToolRuntime,
    ToolSpec,
};

use crate::hooks::{
    Called, Hooked, Log, activation_error, assert_about, block_on, call, descriptor, gated, ready,
    this_thread, until, within,
};
use crate::support::{Fixture, paused};

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
    let mut calls: Vec<_> = (0..1000).map(|_| task::spawn(call(&plan, "tool"))).collect();
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
    let probe =
        Probe::new("tool").on_execute([Step::Never, Step::Ok]).call_timeout(Duration::from_secs(1));
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
    assert!(matches!(within(first).await.unwrap_err(), CallError::Cancelled(_)));
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
        let callers = tokio::runtime::Builder::new_current_thread().build().unwrap();
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
    assert_eq!(*threads.lock().unwrap(), ["toolscope-keeper", "toolscope-keeper"]);
    fixture.end().await;
}

// ===== P3: failed attempts =====

#[tokio::test]
async fn p3_a_failed_activation_is_the_error_of_the_call() {
    let probe = Probe::new("tool").on_activate(Step::Err);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let error = activation_error(call(&plan, "tool").await);
    assert_eq!((error.what(), error.phase()), ("local/tool", ActivationPhase::Failed));
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
    assert_eq!((error.phase(), error.message()), (ActivationPhase::Panicked, "no future"));
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
    let plan = fixture.begin(PlanOptions::new().deadlines(deadlines)).unwrap();
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
    let cause = |error: &ActivationError| std::ptr::from_ref(error.source().unwrap()).cast::<()>();
    assert_eq!(cause(&errors[0]), cause(&errors[1]));
    assert_eq!(cause(&errors[0]), cause(&errors[2]));
    plan.finish().await;
    assert_eq!(fixture.end().await.started, 1);
}

#[tokio::test(start_paused = true)]
async fn p3_a_hundred_waiters_share_one_failed_attempt() {
    let probe = Probe::new("tool").on_activate([Step::YieldErr(2), Step::Ok]);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let mut calls: Vec<_> = (0..100).map(|_| task::spawn(call(&plan, "tool"))).collect();
    for call in &mut calls {
        assert_pending!(call.poll());
    }
    for call in calls {
        activation_error(call.await);
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
    assert_eq!(error.phase(), ActivationPhase::Exhausted);
    assert!(error.message().ends_with("the last one: the probe fails in activate"), "{error}");
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
    let (broken, whole) = (Probe::new("broken").on_activate(Step::Panic), Probe::new("whole"));
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
    let probe = Probe::new("tool").needs(&wire).on_activate([
        Step::Ok,
        Step::Ok,
        Step::Err,
        Step::Err,
        Step::Ok,
    ]);
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
    assert_eq!((wire.counts().activations, probe.counts().activations), (2, 3));
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

#[tokio::test(start_paused = true)]
async fn p3_deferred_work_that_hangs_at_the_end_of_the_plan_is_cut_to_the_budget() {
    let probe = Probe::new("tool").on_activate(Step::Never);
    let hooked = Hooked::new(&probe).before_activate(|ctx| {
        ctx.defer(std::future::pending);
        async { Ok(()) }
    });
    let fixture = hooked.fixture(paused()).await;
    let deadlines = Deadlines::default().end(Duration::from_secs(3));
    let plan = fixture.begin(PlanOptions::new().deadlines(deadlines)).unwrap();
    let mut waiting = task::spawn(call(&plan, "tool"));
    assert_pending!(waiting.poll());
    drop(waiting);
    let began = Instant::now();
    let report = plan.finish().await;
    assert_about(began.elapsed(), 3_250);
    assert!(report.unsettled().is_empty());
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

/// What blocks its thread waits for its turn without one: otherwise those that wait would take the
/// threads that the others need to go on.
#[tokio::test]
async fn p2_off_thread_activations_wait_for_their_source_without_a_thread() {
    let probe = Probe::new("tool").off_thread().on_activate(Step::Yield(1));
    let fixture = Fixture::with(ToolRuntime::builder(), &[]).await.track(&probe);
    fixture.registry().limit_activations("disk", 2);
    let latch = CancellationToken::new();
    let all_wait = latch.clone();
    let tool = Hooked::new(&probe).before_activate(move |_| {
        let all_wait = all_wait.clone();
        async move {
            all_wait.cancelled().await;
            drop(tokio::task::spawn_blocking(|| ()).await);
            Ok(())
        }
    });
    fixture.registry().replace_source("disk", vec![Arc::new(tool) as Arc<dyn Tool>]).unwrap();
    let plans: Vec<_> = (0..700).map(|_| fixture.plan()).collect();
    let mut calls = JoinSet::new();
    for plan in &plans {
        calls.spawn(call(plan, "tool"));
    }
    until(|| fixture.stats().started == 700).await;
    latch.cancel();
    while let Some(returned) = within(calls.join_next()).await {
        assert!(returned.unwrap().unwrap().success);
    }
    drop(plans);
    fixture.end().await;
}

/// Blocking tools that do not come back leave threads for what must be undone.
#[tokio::test]
async fn p7_blocking_tools_that_hang_take_no_thread_from_activations() {
    let hang = Arc::new((Mutex::new(true), std::sync::Condvar::new()));
    let waits = Arc::clone(&hang);
    let hangs = ToolSpec::new("hangs").read_only().call_timeout(Duration::from_millis(50));
    let hangs = hangs.blocking(move |_, _: Value| {
        let (hangs, told) = &*waits;
        drop(told.wait_while(hangs.lock().unwrap(), |hangs| *hangs).unwrap());
        Ok(())
    });
    let probe = Probe::new("tool").off_thread();
    let fixture = Fixture::with(ToolRuntime::builder().tool(hangs), &[&probe]).await;
    let plan = fixture.plan();
    let mut calls = JoinSet::new();
    for _ in 0..600 {
        calls.spawn(call(&plan, "hangs"));
    }
    while let Some(returned) = within(calls.join_next()).await {
        assert_eq!(returned.unwrap().unwrap().code(), "timeout");
    }
    assert!(within(call(&plan, "tool")).await.unwrap().success);
    assert!(within(plan.deactivate("tool")).await);
    *hang.0.lock().unwrap() = false;
    hang.1.notify_all();
    drop(plan);
    fixture.end().await;
}
