//! P6: shared activations, dependents, cycles, the root scope.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;
use tokio_test::{assert_pending, task};
use tokio_util::sync::CancellationToken;
use toolscope::test_util::{Probe, Step};
use toolscope::{
    ActivationContext, ActivationPhase, DeactivationContext, Deadlines, PlanOptions, PlanReport,
    SharedActivation, Tool, ToolFailure, ToolInstance, ToolRuntime, async_trait,
};

use crate::deactivation::{Bomb, Spent};
use crate::hooks::{Hooked, Passed, activation_error, assert_about, call, ready, until, within};
use crate::support::{Fixture, paused};

/// A shared activation behind which stands a tool that counts. `KIND` makes it as many types as a test needs.
struct Wire<const KIND: u8>(Arc<dyn ToolInstance>);

#[async_trait]
impl<const KIND: u8> SharedActivation for Wire<KIND> {
    async fn deactivate(&self, ctx: &DeactivationContext) -> Passed {
        self.0.deactivate(ctx).await
    }
}

type Making<const KIND: u8> = Pin<Box<dyn Future<Output = Result<Wire<KIND>, ToolFailure>> + Send>>;

/// What makes a [`Wire`]. Give the probe to the fixture to track.
fn wire<const KIND: u8>(
    probe: &Probe,
) -> impl FnOnce(ActivationContext) -> Making<KIND> + Send + use<KIND> {
    let probe = probe.clone();
    move |ctx| Box::pin(async move { probe.tool().activate(&ctx).await.map(Wire) })
}

/// The names of what was deactivated, in the order in which that was over.
fn order(report: &PlanReport) -> Vec<String> {
    let records = report.deactivations().into_iter();
    records.map(|record| record.name).collect()
}

// ===== made once, for all who ask =====

#[tokio::test]
async fn p6_two_tools_share_one_activation() {
    let wire = Probe::new("wire");
    let (one, other) = (Probe::new("one").needs(&wire), Probe::new("other").needs(&wire));
    let fixture = Fixture::new(&[&one, &other]).await.track(&wire);
    let plan = fixture.plan();
    call(&plan, "one").await.unwrap();
    call(&plan, "other").await.unwrap();
    plan.finish().await;
    assert_eq!(wire.counts().activations, 1);
    fixture.end().await;
}

#[tokio::test]
async fn p6_two_tools_that_ask_at_the_same_time_share_one_activation() {
    let latch = CancellationToken::new();
    let wire = Probe::new("wire").on_activate(Step::Until(latch.clone()));
    let (one, other) = (Probe::new("one").needs(&wire), Probe::new("other").needs(&wire));
    let fixture = Fixture::new(&[&one, &other]).await.track(&wire);
    let plan = fixture.plan();
    let mut first = task::spawn(call(&plan, "one"));
    assert_pending!(first.poll());
    let mut second = task::spawn(call(&plan, "other"));
    assert_pending!(second.poll());
    latch.cancel();
    assert!(within(first).await.unwrap().success);
    assert!(within(second).await.unwrap().success);
    plan.finish().await;
    assert_eq!(wire.counts().activations, 1);
    fixture.end().await;
}

#[tokio::test]
async fn p6_each_plan_has_a_shared_activation_of_its_own() {
    let wire = Probe::new("wire");
    let probe = Probe::new("tool").needs(&wire);
    let fixture = Fixture::new(&[&probe]).await.track(&wire);
    let (one, other) = (fixture.plan(), fixture.plan());
    call(&one, "tool").await.unwrap();
    call(&other, "tool").await.unwrap();
    one.finish().await;
    assert_eq!((wire.counts().activations, wire.counts().deactivations), (2, 1));
    other.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p6_two_names_are_two_shared_activations() {
    let (left, right) = (Probe::new("left"), Probe::new("right"));
    let (for_left, for_right) = (left.clone(), right.clone());
    let probe = Probe::new("tool");
    let hooked = Hooked::new(&probe).before_activate(move |ctx| {
        let (left, right) = (wire::<0>(&for_left), wire::<0>(&for_right));
        async move {
            let left = ctx.shared("left", left).await?;
            let right = ctx.shared("right", right).await?;
            assert!(!Arc::ptr_eq(&left, &right));
            Ok(())
        }
    });
    let fixture = hooked.fixture(ToolRuntime::builder()).await;
    let fixture = fixture.track(&left).track(&right);
    let plan = fixture.plan();
    assert!(call(&plan, "tool").await.unwrap().success);
    assert_eq!(plan.finish().await.deactivations().len(), 3);
    fixture.end().await;
}

#[tokio::test]
async fn p6_two_types_under_one_name_are_two_shared_activations() {
    let (left, right) = (Probe::new("left"), Probe::new("right"));
    let (for_left, for_right) = (left.clone(), right.clone());
    let probe = Probe::new("tool");
    let hooked = Hooked::new(&probe).before_activate(move |ctx| {
        let (left, right) = (wire::<0>(&for_left), wire::<1>(&for_right));
        async move {
            ctx.shared("wire", left).await?;
            ctx.shared("wire", right).await?;
            Ok(())
        }
    });
    let fixture = hooked.fixture(ToolRuntime::builder()).await;
    let fixture = fixture.track(&left).track(&right);
    let plan = fixture.plan();
    assert!(call(&plan, "tool").await.unwrap().success);
    assert_eq!(plan.finish().await.deactivations().len(), 3);
    fixture.end().await;
}

#[tokio::test]
async fn p6_asking_twice_gives_the_same_and_makes_one_dependent() {
    let shared = Probe::new("wire");
    let (for_first, for_second) = (shared.clone(), shared.clone());
    let probe = Probe::new("tool");
    let hooked = Hooked::new(&probe).before_activate(move |ctx| {
        let (first, second) = (wire::<0>(&for_first), wire::<0>(&for_second));
        async move {
            let first = ctx.shared("wire", first).await?;
            let second = ctx.shared("wire", second).await?;
            assert!(Arc::ptr_eq(&first, &second));
            Ok(())
        }
    });
    let fixture = hooked.fixture(ToolRuntime::builder()).await.track(&shared);
    let plan = fixture.plan();
    assert!(call(&plan, "tool").await.unwrap().success);
    assert_eq!(order(&plan.finish().await), ["local/tool", "wire"]);
    fixture.end().await;
}

#[tokio::test]
async fn p6_a_shared_activation_goes_on_without_the_tool_that_asked_first() {
    let latch = CancellationToken::new();
    let wire = Probe::new("wire").on_activate(Step::Until(latch.clone()));
    let (one, other) =
        (Probe::new("one").needs(&wire).on_activate(Step::Err), Probe::new("other").needs(&wire));
    let fixture = Fixture::new(&[&one, &other]).await.track(&wire);
    let plan = fixture.plan();
    let mut first = task::spawn(call(&plan, "one"));
    assert_pending!(first.poll());
    let mut second = task::spawn(call(&plan, "other"));
    assert_pending!(second.poll());
    drop(first);
    latch.cancel();
    assert!(within(second).await.unwrap().success);
    plan.finish().await;
    assert_eq!(wire.counts().activations, 1);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p6_a_shared_activation_goes_on_when_the_tool_that_asked_times_out() {
    let wire = Probe::new("wire").on_activate(Step::Slow(Duration::from_millis(2500)));
    let impatient = Probe::new("impatient");
    let for_tool = wire.clone();
    let hooked = Hooked::new(&impatient).before_activate(move |ctx| {
        let making = crate::shared::wire::<0>(&for_tool);
        async move {
            let asked = ctx.shared("wire", making);
            match tokio::time::timeout(Duration::from_secs(1), asked).await {
                Ok(shared) => shared.map(drop),
                Err(_) => Err(ToolFailure::failed("it took too long")),
            }
        }
    });
    let fixture = hooked.fixture(paused()).await.track(&wire);
    let plan = fixture.plan();
    activation_error(call(&plan, "impatient").await);
    activation_error(call(&plan, "impatient").await);
    assert!(call(&plan, "impatient").await.unwrap().success);
    plan.finish().await;
    assert_eq!(wire.counts().activations, 1);
    fixture.end().await;
}

// ===== the order of the end =====

#[tokio::test]
async fn p6_a_shared_activation_is_deactivated_after_its_tools() {
    let wire = Probe::new("wire");
    let (one, other) = (
        Probe::new("one").needs(&wire).on_deactivate(Step::Yield(3)),
        Probe::new("other").needs(&wire),
    );
    let fixture = Fixture::new(&[&one, &other]).await.track(&wire);
    let plan = fixture.plan();
    call(&plan, "one").await.unwrap();
    call(&plan, "other").await.unwrap();
    let order = order(&plan.finish().await);
    assert_eq!(order.len(), 3);
    assert_eq!(order[2], "local/wire");
    fixture.end().await;
}

#[tokio::test]
async fn p6_a_shared_activation_waits_for_its_last_dependent() {
    let latch = CancellationToken::new();
    let wire = Probe::new("wire");
    let (quick, slow) = (
        Probe::new("quick").needs(&wire),
        Probe::new("slow").needs(&wire).on_deactivate(Step::Until(latch.clone())),
    );
    let fixture = Fixture::new(&[&quick, &slow]).await.track(&wire);
    let plan = fixture.plan();
    call(&plan, "quick").await.unwrap();
    call(&plan, "slow").await.unwrap();
    let mut finish = task::spawn(plan.finish());
    assert_pending!(finish.poll());
    until(|| quick.counts().deactivations == 1).await;
    assert_eq!(wire.counts().deactivations, 0);
    latch.cancel();
    assert_eq!(order(&within(finish).await)[2], "local/wire");
    fixture.end().await;
}

#[tokio::test]
async fn p6_a_chain_is_deactivated_from_the_top_down() {
    let cable = Probe::new("cable");
    let wire = Probe::new("wire").needs(&cable);
    let probe = Probe::new("tool").needs(&wire);
    let fixture = Fixture::new(&[&probe]).await.track(&wire).track(&cable);
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    assert_eq!(order(&plan.finish().await), ["local/tool", "local/wire", "local/cable"]);
    fixture.end().await;
}

#[tokio::test]
async fn p6_what_is_independent_goes_at_once() {
    let latch = CancellationToken::new();
    let (wire, pipe) = (Probe::new("wire"), Probe::new("pipe"));
    let stuck = Probe::new("stuck").needs(&wire).on_deactivate(Step::Until(latch.clone()));
    let free = Probe::new("free").needs(&pipe);
    let fixture = Fixture::new(&[&stuck, &free]).await;
    let fixture = fixture.track(&wire).track(&pipe);
    let plan = fixture.plan();
    call(&plan, "stuck").await.unwrap();
    call(&plan, "free").await.unwrap();
    let mut finish = task::spawn(plan.finish());
    assert_pending!(finish.poll());
    until(|| pipe.counts().deactivations == 1).await;
    assert_eq!(wire.counts().deactivations, 0);
    latch.cancel();
    within(finish).await;
    fixture.end().await;
}

#[tokio::test]
async fn p6_a_failed_activation_gives_its_claim_back() {
    let wire = Probe::new("wire");
    let probe = Probe::new("tool").needs(&wire).on_activate(Step::Err);
    let fixture = Fixture::new(&[&probe]).await.track(&wire);
    let plan = fixture.plan();
    activation_error(call(&plan, "tool").await);
    assert_eq!(order(&plan.finish().await), ["local/wire"]);
    fixture.end().await;
}

#[tokio::test]
async fn p6_a_shared_activation_without_dependents_lives_to_the_end_of_the_plan() {
    let wire = Probe::new("wire");
    let probe = Probe::new("tool").needs(&wire);
    let fixture = Fixture::new(&[&probe]).await.track(&wire);
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    assert!(plan.deactivate("tool").await);
    assert_eq!((wire.counts().deactivations, fixture.stats().open), (0, 1));
    plan.activate("tool").await.unwrap();
    assert_eq!(wire.counts().activations, 1);
    assert_eq!(order(&plan.finish().await).last().unwrap(), "local/wire");
    fixture.end().await;
}

#[tokio::test]
async fn p6_a_shared_activation_that_the_end_overtakes_is_deactivated() {
    let latch = CancellationToken::new();
    let wire = Probe::new("wire").on_activate(Step::Until(latch.clone()));
    let probe = Probe::new("tool").needs(&wire);
    let fixture = Fixture::new(&[&probe]).await.track(&wire);
    let plan = fixture.plan();
    let mut waiting = task::spawn(call(&plan, "tool"));
    assert_pending!(waiting.poll());
    plan.cancel();
    assert!(within(waiting).await.is_err());
    latch.cancel();
    assert_eq!(order(&within(plan.finish()).await), ["local/wire"]);
    assert_eq!(probe.counts().activated, 0);
    fixture.end().await;
}

// ===== asked for by a call =====

#[tokio::test]
async fn p6_a_call_may_ask_and_its_tool_becomes_the_dependent() {
    let shared = Probe::new("wire");
    let probe = Probe::new("tool").on_deactivate(Step::Yield(3));
    let fixture = asking_in_execute(&probe, &shared).await;
    let plan = fixture.plan();
    assert!(call(&plan, "tool").await.unwrap().success);
    assert_eq!(order(&plan.finish().await), ["local/tool", "wire"]);
    fixture.end().await;
}

#[tokio::test]
async fn p6_later_calls_get_what_the_first_one_made() {
    let shared = Probe::new("wire");
    let probe = Probe::new("tool");
    let fixture = asking_in_execute(&probe, &shared).await;
    let plan = fixture.plan();
    assert!(call(&plan, "tool").await.unwrap().success);
    assert!(call(&plan, "tool").await.unwrap().success);
    plan.finish().await;
    assert_eq!(shared.counts().activations, 1);
    fixture.end().await;
}

#[tokio::test]
async fn p6_what_a_call_failed_to_get_is_the_failure_of_that_call() {
    let shared = Probe::new("wire").on_activate([Step::Err, Step::Ok]);
    let probe = Probe::new("tool");
    let fixture = asking_in_execute(&probe, &shared).await;
    let plan = fixture.plan();
    assert!(!call(&plan, "tool").await.unwrap().success);
    assert!(call(&plan, "tool").await.unwrap().success);
    plan.finish().await;
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

#[tokio::test]
async fn p6_the_call_that_asked_may_go_and_the_activation_goes_on() {
    let latch = CancellationToken::new();
    let shared = Probe::new("wire").on_activate(Step::Until(latch.clone()));
    let probe = Probe::new("tool");
    let fixture = asking_in_execute(&probe, &shared).await;
    let plan = fixture.plan();
    let mut first = task::spawn(call(&plan, "tool"));
    assert_pending!(first.poll());
    drop(first);
    latch.cancel();
    assert!(within(call(&plan, "tool")).await.unwrap().success);
    plan.finish().await;
    assert_eq!(shared.counts().activations, 1);
    fixture.end().await;
}

async fn asking_in_execute(probe: &Probe, shared: &Probe) -> Fixture {
    let for_tool = shared.clone();
    let hooked = Hooked::new(probe).before_execute(move |ctx| {
        let making = wire::<0>(&for_tool);
        async move { ctx.shared("wire", making).await.map(drop) }
    });
    hooked.fixture(ToolRuntime::builder()).await.track(shared)
}

// ===== failures and cycles =====

#[tokio::test]
async fn p6_a_shared_activation_that_panics_fails_its_dependents_only() {
    let wire = Probe::new("wire").on_activate(Step::Panic);
    let (probe, free) = (Probe::new("tool").needs(&wire), Probe::new("free"));
    let fixture = Fixture::new(&[&probe, &free]).await.track(&wire);
    let plan = fixture.plan();
    let error = activation_error(call(&plan, "tool").await);
    assert!(error.message().contains("the probe panics"), "{error}");
    assert!(call(&plan, "free").await.unwrap().success);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p6_what_was_made_is_deactivated_though_the_drop_of_its_future_panics() {
    let (probe, shared) = (Probe::new("tool"), Probe::new("wire"));
    let for_tool = shared.clone();
    let hooked = Hooked::new(&probe).before_activate(move |ctx| {
        let making = wire::<0>(&for_tool);
        let making = |ctx| Spent(making(ctx), Bomb);
        async move { ctx.shared("wire", making).await.map(drop) }
    });
    let fixture = hooked.fixture(ToolRuntime::builder()).await.track(&shared);
    let plan = fixture.plan();
    assert!(call(&plan, "tool").await.unwrap().success);
    assert_eq!(order(&plan.finish().await), ["local/tool", "wire"]);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p6_all_dependents_get_the_same_failure() {
    let wire = Probe::new("wire").on_activate([Step::YieldErr(3), Step::Ok]);
    let (one, other) = (Probe::new("one").needs(&wire), Probe::new("other").needs(&wire));
    let fixture = Fixture::paused(&[&one, &other]).await.track(&wire);
    let plan = fixture.plan();
    let (first, second) = tokio::join!(call(&plan, "one"), call(&plan, "other"));
    let (first, second) = (activation_error(first), activation_error(second));
    assert_eq!(first.message(), second.message());
    assert_eq!(wire.counts().activations, 1);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p6_a_cycle_fails_at_once_and_is_named() {
    let cable = Probe::new("cable");
    let wire = Probe::new("wire").needs(&cable);
    let cable = cable.needs(&wire);
    let probe = Probe::new("tool").needs(&wire);
    let fixture = Fixture::paused(&[&probe]).await.track(&wire).track(&cable);
    let plan = fixture.plan();
    let began = Instant::now();
    let error = activation_error(call(&plan, "tool").await);
    assert_about(began.elapsed(), 0);
    let path = "local/cable -> local/wire -> local/cable";
    assert!(error.message().contains(path), "{error}");
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p6_a_shared_activation_that_needs_itself_is_a_cycle() {
    let wire = Probe::new("wire");
    let wire = wire.clone().needs(&wire);
    let probe = Probe::new("tool").needs(&wire);
    let fixture = Fixture::paused(&[&probe]).await.track(&wire);
    let plan = fixture.plan();
    let error = activation_error(call(&plan, "tool").await);
    let path = "local/wire -> local/wire";
    assert!(error.message().contains(path), "{error}");
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p6_a_cycle_is_an_error_to_look_into() {
    let wire = Probe::new("wire");
    let wire = wire.clone().needs(&wire);
    let probe = Probe::new("tool").needs(&wire);
    let fixture = Fixture::new(&[&probe]).await.track(&wire);
    let plan = fixture.plan();
    let error = activation_error(call(&plan, "tool").await);
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    let mut phases = Vec::new();
    while let Some(error) = cause {
        let activation = error.downcast_ref::<toolscope::ActivationError>().unwrap();
        phases.push(activation.phase());
        cause = error.source();
    }
    let failed = ActivationPhase::Failed;
    assert_eq!(phases, [failed, failed, ActivationPhase::Cycle]);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p6_two_that_need_the_same_third_are_no_cycle() {
    let cable = Probe::new("cable");
    let (left, right) = (Probe::new("left").needs(&cable), Probe::new("right").needs(&cable));
    let probe = Probe::new("tool").needs(&left).needs(&right);
    let fixture = Fixture::new(&[&probe]).await;
    let fixture = fixture.track(&left).track(&right).track(&cable);
    let plan = fixture.plan();
    assert!(call(&plan, "tool").await.unwrap().success);
    assert_eq!(order(&plan.finish().await).last().unwrap(), "local/cable");
    fixture.end().await;
}

// ===== what outlives a plan =====

#[tokio::test]
async fn p6_what_is_shared_between_plans_outlives_them() {
    let (probe, pool) = (Probe::new("tool"), Probe::new("pool"));
    let fixture = pooling(&probe, pool.tool(), ToolRuntime::builder()).await;
    let fixture = fixture.track(&pool);
    for _ in 0..2 {
        let plan = fixture.plan();
        call(&plan, "tool").await.unwrap();
        assert_eq!(order(&plan.finish().await), ["local/tool"]);
    }
    let counts = pool.counts();
    assert_eq!((counts.activations, counts.deactivations), (1, 0));
    assert_eq!(fixture.stats().open, 1);
    fixture.end().await;
    assert_eq!(pool.counts().deactivations, 1);
}

#[tokio::test]
async fn p6_racing_plans_make_it_once() {
    let latch = CancellationToken::new();
    let (probe, pool) =
        (Probe::new("tool"), Probe::new("pool").on_activate(Step::Until(latch.clone())));
    let fixture = pooling(&probe, pool.tool(), ToolRuntime::builder()).await;
    let fixture = fixture.track(&pool);
    let (one, other) = (fixture.plan(), fixture.plan());
    let mut first = task::spawn(call(&one, "tool"));
    assert_pending!(first.poll());
    let mut second = task::spawn(call(&other, "tool"));
    assert_pending!(second.poll());
    latch.cancel();
    assert!(within(first).await.unwrap().success);
    assert!(within(second).await.unwrap().success);
    assert_eq!(pool.counts().activations, 1);
    fixture.end().await;
}

#[tokio::test]
async fn p6_the_plan_that_asked_may_end_and_the_making_goes_on() {
    let latch = CancellationToken::new();
    let (probe, pool) =
        (Probe::new("tool"), Probe::new("pool").on_activate(Step::Until(latch.clone())));
    let fixture = pooling(&probe, pool.tool(), ToolRuntime::builder()).await;
    let fixture = fixture.track(&pool);
    let (one, other) = (fixture.plan(), fixture.plan());
    let mut first = task::spawn(call(&one, "tool"));
    assert_pending!(first.poll());
    drop(first);
    within(one.finish()).await;
    let mut second = task::spawn(call(&other, "tool"));
    assert_pending!(second.poll());
    latch.cancel();
    assert!(within(second).await.unwrap().success);
    assert_eq!(pool.counts().activations, 1);
    fixture.end().await;
}

#[tokio::test]
async fn p6_what_is_shared_between_plans_is_closed_last() {
    let latch = CancellationToken::new();
    let (probe, pool) =
        (Probe::new("tool").on_deactivate(Step::Until(latch.clone())), Probe::new("pool"));
    let before = Arc::new(Mutex::new(0));
    let (seen, tool) = (Arc::clone(&before), probe.clone());
    let watched = Hooked::new(&pool)
        .after_deactivate(move |_| ready(&seen, |before| *before = tool.counts().deactivations));
    let fixture = pooling(&probe, watched, ToolRuntime::builder()).await;
    let fixture = fixture.track(&pool);
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    let mut shutdown = task::spawn(fixture.shutdown(Duration::from_secs(20)));
    assert_pending!(shutdown.poll());
    until(|| probe.counts().deactivations == 1).await;
    assert_eq!(pool.counts().deactivations, 0);
    latch.cancel();
    assert!(within(shutdown).await.stragglers.is_empty());
    assert_eq!(*before.lock().unwrap(), 1);
    fixture.end().await;
}

#[test]
fn p6_what_is_shared_between_plans_is_closed_by_the_drop_of_the_runtime() {
    let (probe, pool) = (Probe::new("tool"), Probe::new("pool"));
    let making = pooling(&probe, pool.tool(), ToolRuntime::builder());
    let fixture = crate::hooks::block_on(making).track(&pool);
    let plan = fixture.plan();
    crate::hooks::block_on(call(&plan, "tool")).unwrap();
    fixture.end_by_drop();
    assert_eq!(pool.counts().deactivations, 1);
}

#[tokio::test(start_paused = true)]
async fn p6_what_is_shared_between_plans_has_the_deadlines_of_the_runtime() {
    let (probe, pool) = (Probe::new("tool"), Probe::new("pool").on_deactivate(Step::Never));
    let deadlines = Deadlines::default().deactivate(Duration::from_secs(1));
    let fixture = pooling(&probe, pool.tool(), paused().deadlines(deadlines)).await;
    let fixture = fixture.track(&pool);
    let plan = fixture.begin(PlanOptions::new()).unwrap();
    call(&plan, "tool").await.unwrap();
    plan.finish().await;
    let began = Instant::now();
    let report = fixture.shutdown(Duration::from_secs(20)).await;
    assert_about(began.elapsed(), 1_000);
    assert_eq!((report.stragglers.len(), report.stats.troubled), (0, 1));
    fixture.end().await;
}

/// A runtime whose tool asks for something that outlives its plan.
async fn pooling(
    probe: &Probe,
    pool: impl Tool,
    builder: toolscope::ToolRuntimeBuilder,
) -> Fixture {
    let pool: Arc<dyn Tool> = Arc::new(pool);
    let hooked = Hooked::new(probe).before_activate(move |ctx| {
        let pool = Arc::clone(&pool);
        let making =
            |ctx: ActivationContext| async move { pool.activate(&ctx).await.map(Wire::<0>) };
        async move { ctx.shared_between_plans("pool", making).await.map(drop) }
    });
    hooked.fixture(builder).await
}

#[tokio::test]
async fn p3_what_is_shared_between_plans_is_tried_again_for_as_long_as_plans_ask() {
    let failing = [Step::Err, Step::Err, Step::Err, Step::Err, Step::Ok];
    let pool = Probe::new("pool").on_activate(failing);
    let tool = Hooked::new(&Probe::new("tool")).before_activate({
        let pool = pool.clone();
        move |ctx| {
            let making = wire::<0>(&pool);
            async move { ctx.shared_between_plans("pool", making).await.map(drop) }
        }
    });
    let fixture = tool.fixture(ToolRuntime::builder()).await.track(&pool);
    let mut outcomes = Vec::new();
    for _ in 0..5 {
        let plan = fixture.plan();
        outcomes.push(call(&plan, "tool").await.is_ok());
        plan.finish().await;
    }
    assert_eq!(outcomes, [false, false, false, false, true]);
    fixture.end().await;
}
