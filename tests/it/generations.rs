//! Explicit activate and deactivate, taint, generations.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio_test::{assert_pending, assert_ready, task};
use tokio_util::sync::CancellationToken;
use toolscope::test_util::{Probe, Step};
use toolscope::{
    ActivationPhase, DeactivationOutcome, Deadlines, OutcomeCode, PlanOptions, PlanReport,
    ToolCapability, ToolRuntime,
};

use crate::hooks::{
    Called, Hooked, activation_error, call, gated, ready, this_thread, until, within,
};
use crate::support::Fixture;

fn code(called: Called) -> OutcomeCode {
    called.unwrap_err().code()
}

/// The generations that were deactivated, in the order in which that was over.
fn generations(report: &PlanReport) -> Vec<u32> {
    let records = report.deactivations().into_iter();
    records.map(|record| record.generation).collect()
}

// ===== by hand =====

#[tokio::test]
async fn p1_activation_by_hand_comes_before_the_first_call() {
    let probe = Probe::new("tool");
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    plan.activate("tool").await.unwrap();
    assert_eq!(fixture.stats().open, 1);
    call(&plan, "tool").await.unwrap();
    plan.finish().await;
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

#[tokio::test]
async fn p1_activation_by_hand_of_what_is_active_does_nothing() {
    let probe = Probe::new("tool");
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    plan.activate("tool").await.unwrap();
    plan.activate("tool").await.unwrap();
    plan.finish().await;
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

#[tokio::test]
async fn p1_activation_by_hand_of_an_unknown_tool_is_an_error() {
    let fixture = Fixture::new(&[]).await;
    let plan = fixture.plan();
    let error = plan.activate("nothing").await.unwrap_err();
    assert_eq!(error.code(), OutcomeCode::NotFound);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p1_activation_by_hand_passes_the_gate() {
    let probe = Probe::new("tool").capability(ToolCapability::writes());
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().read_only()).unwrap();
    let error = plan.activate("tool").await.unwrap_err();
    assert_eq!(error.code(), OutcomeCode::AccessDenied);
    plan.finish().await;
    assert_eq!(fixture.end().await.started, 0);
}

#[tokio::test]
async fn p1_deactivation_by_hand_is_true_once() {
    let probe = Probe::new("tool");
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    assert!(plan.deactivate("tool").await);
    assert_eq!(probe.counts().deactivations, 1);
    assert!(!plan.deactivate("tool").await);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p1_there_is_nothing_to_deactivate_before_the_first_call() {
    let probe = Probe::new("tool");
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    assert!(!plan.deactivate("tool").await);
    assert!(call(&plan, "tool").await.unwrap().success);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p1_deactivation_of_an_unknown_tool_is_false() {
    let fixture = Fixture::new(&[]).await;
    let plan = fixture.plan();
    assert!(!plan.deactivate("nothing").await);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p1_deactivation_of_an_immediate_tool_is_false_and_changes_nothing() {
    let probe = Probe::new("tool").immediate();
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    assert!(!plan.deactivate("tool").await);
    assert!(call(&plan, "tool").await.unwrap().success);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p1_deactivation_after_a_failed_activation_is_false() {
    let probe = Probe::new("tool").on_activate([Step::Err, Step::Ok]);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    activation_error(call(&plan, "tool").await);
    assert!(!plan.deactivate("tool").await);
    assert!(call(&plan, "tool").await.unwrap().success);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p1_a_call_does_not_bring_back_what_the_host_deactivated() {
    let probe = Probe::new("tool");
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    plan.deactivate("tool").await;
    assert_eq!(code(call(&plan, "tool").await), OutcomeCode::NotActivated);
    plan.finish().await;
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

#[tokio::test]
async fn p1_activation_by_hand_makes_the_next_generation() {
    let probe = Probe::new("tool");
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    plan.deactivate("tool").await;
    plan.activate("tool").await.unwrap();
    assert!(call(&plan, "tool").await.unwrap().success);
    assert_eq!(generations(&plan.finish().await), [1, 2]);
    fixture.end().await;
}

#[tokio::test]
async fn p1_the_host_may_make_as_many_generations_as_it_likes() {
    let probe = Probe::new("tool");
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_generations(1)).unwrap();
    for _ in 0..5 {
        plan.activate("tool").await.unwrap();
        assert!(plan.deactivate("tool").await);
    }
    assert_eq!(generations(&plan.finish().await), [1, 2, 3, 4, 5]);
    fixture.end().await;
}

#[tokio::test]
async fn p1_deactivation_dooms_the_activation_under_way() {
    let (probe, latch) = gated();
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let mut waiting = task::spawn(call(&plan, "tool"));
    assert_pending!(waiting.poll());
    let mut deactivation = task::spawn(plan.deactivate("tool"));
    assert_pending!(deactivation.poll());
    latch.cancel();
    assert!(within(deactivation).await);
    assert_eq!(code(within(waiting).await), OutcomeCode::NotActivated);
    let counts = probe.counts();
    assert_eq!((counts.deactivations, counts.executions), (1, 0));
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p1_a_call_that_comes_to_a_doomed_activation_is_refused_at_once() {
    let (probe, latch) = gated();
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let mut waiting = task::spawn(call(&plan, "tool"));
    assert_pending!(waiting.poll());
    let mut deactivation = task::spawn(plan.deactivate("tool"));
    assert_pending!(deactivation.poll());
    assert_eq!(code(call(&plan, "tool").await), OutcomeCode::NotActivated);
    latch.cancel();
    within(deactivation).await;
    drop(waiting);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p1_a_doomed_activation_that_fails_stays_deactivated() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool");
    let gate = latch.clone();
    let hooked = Hooked::new(&probe).before_activate(move |_| {
        let gate = gate.clone();
        async move {
            gate.cancelled().await;
            Err(toolscope::ToolFailure::failed("refused"))
        }
    });
    let fixture = hooked.fixture(ToolRuntime::builder()).await;
    let plan = fixture.plan();
    let mut waiting = task::spawn(call(&plan, "tool"));
    assert_pending!(waiting.poll());
    let mut deactivation = task::spawn(plan.deactivate("tool"));
    assert_pending!(deactivation.poll());
    latch.cancel();
    assert!(within(deactivation).await);
    assert!(within(waiting).await.is_err());
    assert_eq!(code(call(&plan, "tool").await), OutcomeCode::NotActivated);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p1_a_second_deactivation_while_the_first_is_under_way_is_false() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").on_deactivate(Step::Until(latch.clone()));
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    let mut first = task::spawn(plan.deactivate("tool"));
    assert_pending!(first.poll());
    assert!(!within(plan.deactivate("tool")).await);
    latch.cancel();
    assert!(within(first).await);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p1_the_next_generation_waits_until_the_last_has_settled() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").on_deactivate([Step::Until(latch.clone()), Step::Ok]);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    let mut deactivation = task::spawn(plan.deactivate("tool"));
    assert_pending!(deactivation.poll());
    let mut activation = task::spawn(plan.activate("tool"));
    assert_pending!(activation.poll());
    assert_eq!(probe.counts().activations, 1);
    latch.cancel();
    within(activation).await.unwrap();
    assert!(within(deactivation).await);
    assert_eq!(generations(&plan.finish().await), [1, 2]);
    fixture.end().await;
}

#[tokio::test]
async fn p5_the_next_generation_waits_for_the_calls_of_the_last() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").on_execute(Step::Until(latch.clone()));
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let mut running = task::spawn(call(&plan, "tool"));
    assert_pending!(running.poll());
    let mut deactivation = task::spawn(plan.deactivate("tool"));
    assert_pending!(deactivation.poll());
    let mut activation = task::spawn(plan.activate("tool"));
    assert_pending!(activation.poll());
    latch.cancel();
    assert!(assert_ready!(running.poll()).unwrap().success);
    within(activation).await.unwrap();
    drop(deactivation);
    assert_eq!(generations(&plan.finish().await), [1, 2]);
    fixture.end().await;
}

#[tokio::test]
async fn p1_a_deactivation_dropped_half_way_goes_on() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").on_deactivate(Step::Until(latch.clone()));
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    let mut deactivation = task::spawn(plan.deactivate("tool"));
    assert_pending!(deactivation.poll());
    drop(deactivation);
    latch.cancel();
    until(|| fixture.stats().deactivated == 1).await;
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p1_the_end_of_the_plan_waits_for_a_deactivation_by_hand() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").on_deactivate(Step::Until(latch.clone()));
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    let handle = plan.handle();
    let mut deactivation = task::spawn(handle.deactivate("tool"));
    assert_pending!(deactivation.poll());
    let mut finish = task::spawn(plan.finish());
    assert_pending!(finish.poll());
    latch.cancel();
    assert_eq!(within(finish).await.deactivations().len(), 1);
    assert!(within(deactivation).await);
    fixture.end().await;
}

#[tokio::test]
async fn p1_a_deactivation_that_failed_does_not_bar_the_next_generation() {
    let probe = Probe::new("tool").on_deactivate([Step::Panic, Step::Ok]);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    assert!(plan.deactivate("tool").await);
    plan.activate("tool").await.unwrap();
    let report = plan.finish().await;
    assert_eq!(report.deactivations()[1].outcome, DeactivationOutcome::Ok);
    fixture.end().await;
}

#[tokio::test]
async fn p1_an_off_thread_tool_is_deactivated_by_hand_on_the_keeper() {
    let probe = Probe::new("tool").off_thread();
    let thread = Arc::new(Mutex::new(String::new()));
    let seen = Arc::clone(&thread);
    let hooked = Hooked::new(&probe)
        .after_deactivate(move |_| ready(&seen, |thread| *thread = this_thread()));
    let fixture = hooked.fixture(ToolRuntime::builder()).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    assert!(plan.deactivate("tool").await);
    assert_eq!(*thread.lock().unwrap(), "toolscope-keeper");
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p3_each_generation_has_its_own_attempts() {
    let probe = Probe::new("tool").on_activate([Step::Err, Step::Ok, Step::Err, Step::Ok]);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_attempts(2)).unwrap();
    activation_error(call(&plan, "tool").await);
    call(&plan, "tool").await.unwrap();
    plan.deactivate("tool").await;
    assert!(plan.activate("tool").await.is_err());
    plan.activate("tool").await.unwrap();
    plan.finish().await;
    fixture.end().await;
}

// ===== taint =====

#[tokio::test]
async fn p1_a_tainted_instance_is_retired_after_its_call() {
    let probe = Probe::new("tool").taints(true);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    assert!(call(&plan, "tool").await.unwrap().success);
    until(|| fixture.stats().deactivated == 1).await;
    assert_eq!(fixture.stats().open, 0);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p1_the_call_after_a_taint_makes_the_next_generation() {
    let probe = Probe::new("tool").taints(true);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    assert!(within(call(&plan, "tool")).await.unwrap().success);
    assert_eq!(generations(&plan.finish().await), [1, 2]);
    fixture.end().await;
}

#[tokio::test]
async fn p1_the_call_after_a_taint_waits_for_the_deactivation() {
    let latch = CancellationToken::new();
    let probe =
        Probe::new("tool").taints(true).on_deactivate([Step::Until(latch.clone()), Step::Ok]);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    until(|| probe.counts().deactivations == 1).await;
    let mut next = task::spawn(call(&plan, "tool"));
    assert_pending!(next.poll());
    assert_eq!(probe.counts().activations, 1);
    latch.cancel();
    assert!(within(next).await.unwrap().success);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p1_a_call_that_waits_for_a_tainted_instance_to_go_ends_with_the_plan() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").taints(true).on_deactivate(Step::Until(latch.clone()));
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    until(|| probe.counts().deactivations == 1).await;
    let mut next = task::spawn(call(&plan, "tool"));
    assert_pending!(next.poll());
    plan.cancel();
    assert_eq!(code(assert_ready!(next.poll())), OutcomeCode::Cancelled);
    latch.cancel();
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p1_three_tainted_instances_are_the_most_by_default() {
    let probe = Probe::new("tool").taints(true);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    within(call(&plan, "tool")).await.unwrap();
    within(call(&plan, "tool")).await.unwrap();
    let error = activation_error(within(call(&plan, "tool")).await);
    assert_eq!(error.phase(), ActivationPhase::Exhausted);
    assert!(error.message().contains("the probe taints"), "{error}");
    plan.finish().await;
    assert_eq!(probe.counts().activations, 3);
    fixture.end().await;
}

#[tokio::test]
async fn p1_a_plan_may_allow_no_second_instance() {
    let probe = Probe::new("tool").taints(true);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_generations(1)).unwrap();
    call(&plan, "tool").await.unwrap();
    let error = activation_error(within(call(&plan, "tool")).await);
    assert_eq!(error.phase(), ActivationPhase::Exhausted);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p1_activation_by_hand_brings_back_what_was_tainted_too_often() {
    let probe = Probe::new("tool").taints(true);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_generations(1)).unwrap();
    call(&plan, "tool").await.unwrap();
    activation_error(within(call(&plan, "tool")).await);
    plan.activate("tool").await.unwrap();
    assert!(call(&plan, "tool").await.unwrap().success);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p1_two_calls_that_taint_one_instance_retire_it_once() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").taints(true).on_execute([
        Step::Until(latch.clone()),
        Step::Until(latch.clone()),
        Step::Ok,
    ]);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let mut first = task::spawn(call(&plan, "tool"));
    assert_pending!(first.poll());
    let mut second = task::spawn(call(&plan, "tool"));
    assert_pending!(second.poll());
    latch.cancel();
    assert!(assert_ready!(first.poll()).unwrap().success);
    assert!(assert_ready!(second.poll()).unwrap().success);
    let _next = within(call(&plan, "tool")).await.unwrap();
    assert_eq!(generations(&plan.finish().await), [1, 2]);
    fixture.end().await;
}

#[tokio::test]
async fn p5_a_taint_does_not_cancel_the_other_calls_of_the_instance() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").taints(true).on_execute([Step::Until(latch.clone()), Step::Ok]);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let mut running = task::spawn(call(&plan, "tool"));
    assert_pending!(running.poll());
    assert!(call(&plan, "tool").await.unwrap().success);
    assert_pending!(running.poll());
    assert_eq!(probe.counts().deactivations, 0);
    latch.cancel();
    assert!(assert_ready!(running.poll()).unwrap().success);
    until(|| probe.counts().deactivations == 1).await;
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p1_a_call_that_taints_and_panics_retires_its_instance() {
    let probe = Probe::new("tool").taints(true).on_execute(Step::Panic);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    assert_eq!(call(&plan, "tool").await.unwrap().code(), "panic");
    until(|| fixture.stats().deactivated == 1).await;
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p1_a_call_that_taints_and_is_dropped_retires_its_instance() {
    let probe = Probe::new("tool").taints(true).on_execute(Step::Never);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let mut running = task::spawn(call(&plan, "tool"));
    assert_pending!(running.poll());
    drop(running);
    until(|| fixture.stats().deactivated == 1).await;
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p1_a_call_that_taints_and_times_out_retires_its_instance() {
    let probe = Probe::new("tool")
        .taints(true)
        .on_execute(Step::Never)
        .call_timeout(Duration::from_secs(1));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    assert_eq!(call(&plan, "tool").await.unwrap().code(), "timeout");
    until(|| fixture.stats().deactivated == 1).await;
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p1_a_taint_of_an_immediate_tool_has_no_effect() {
    let probe = Probe::new("tool").immediate().taints(true);
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    assert!(call(&plan, "tool").await.unwrap().success);
    assert!(call(&plan, "tool").await.unwrap().success);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p1_a_taint_in_one_plan_does_not_touch_another() {
    let probe = Probe::new("tool");
    let fixture = Fixture::new(&[&probe]).await;
    let (one, other) = (fixture.plan(), fixture.plan());
    call(&other, "tool").await.unwrap();
    let probe = probe.taints(true);
    call(&one, "tool").await.unwrap();
    until(|| fixture.stats().deactivated == 1).await;
    let probe = probe.taints(false);
    assert!(call(&other, "tool").await.unwrap().success);
    one.finish().await;
    assert_eq!(generations(&other.finish().await), [1]);
    drop(probe);
    fixture.end().await;
}

/// It is not the host that did it, and the next call has a new instance by itself.
#[tokio::test(start_paused = true)]
async fn a_call_that_is_cut_by_another_s_taint_is_told_so() {
    let probe = Probe::new("tool").on_execute([Step::Never, Step::Ok, Step::Ok]).taints(true);
    let fixture = Fixture::paused(&[&probe]).await;
    let options = PlanOptions::new().deadlines(Deadlines::default().end(Duration::from_secs(1)));
    let plan = fixture.begin(options).unwrap();
    let cut = tokio::spawn(call(&plan, "tool"));
    until(|| probe.counts().executions == 1).await;
    assert!(call(&plan, "tool").await.unwrap().success);
    let error = cut.await.unwrap().unwrap_err();
    assert_eq!(error.code(), OutcomeCode::NotActivated);
    assert!(error.to_string().ends_with("the next call has a new one"), "{error}");
    assert!(call(&plan, "tool").await.unwrap().success);
    plan.finish().await;
    fixture.end().await;
}
