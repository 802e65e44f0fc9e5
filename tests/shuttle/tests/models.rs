//! Small models of the runtime, each run under 50,000 random and 20,000 PCT schedules.
//!
//! Shuttle owns every lock, atomic, wake and spawn, so a schedule is a choice of who goes on at
//! each of them, and a model fails when one schedule breaks an assertion or leaves somebody waiting
//! for ever (shuttle calls that a deadlock). It prints the schedule then; `shuttle::replay` runs it
//! again.
//!
//! `TOOLSCOPE_SHUTTLE_SCALE=10` runs that percentage of the schedules, `SHUTTLE_RANDOM_SEED=7`
//! others.
//!
//! Time does not pass here: a timer is ready at once if it is due within a year, and never
//! otherwise. So all [`Deadlines`] are far away but those of which a model says that they may pass
//! at any moment.

use std::future::{Future, poll_fn};
use std::ops::Deref;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::task::Poll;
use std::time::Duration;

use serde_json::{Value, json};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, Runner};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use toolscope::test_util::{Probe, Step};
use toolscope::{
    ActivationContext, CallError, DeactivationContext, Deadlines, EndReason, Keeper, Plan,
    PlanHandle, PlanOptions, PlanReport, SharedActivation, Tool, ToolDescriptor,
    ToolExecutionContext, ToolFailure, ToolInstance, ToolOutput, ToolResult, ToolRuntime,
    ToolRuntimeError, async_trait,
};

const RANDOM: usize = 50_000;
const PCT: usize = 20_000;
const PCT_DEPTH: usize = 3;
/// The default, so that a run can be repeated.
const SEED: u64 = 0x7001_5C09_E000_0001;

/// Never, for shuttle.
const FAR: Duration = Duration::from_secs(60 * 60 * 24 * 365 * 3);
/// At any moment, for shuttle.
const ANY_MOMENT: Duration = Duration::ZERO;

/// Runs a model under all its schedules.
fn check(model: impl AsyncFn() + Copy + Send + Sync + 'static) {
    let scale =
        std::env::var("TOOLSCOPE_SHUTTLE_SCALE").map_or(100, |scale| scale.parse().unwrap());
    let times = |full: usize| (full * scale).div_ceil(100);
    let ran = run(RandomScheduler::new_from_seed(SEED, times(RANDOM)), model)
        + run(PctScheduler::new_from_seed(SEED, PCT_DEPTH, times(PCT)), model);
    println!("{ran} schedules");
}

fn run(
    scheduler: impl Scheduler + 'static,
    model: impl AsyncFn() + Send + Sync + 'static,
) -> usize {
    let mut config = Config::new();
    config.stack_size = 512 * 1024;
    config.silence_warnings = true;
    Runner::new(scheduler, config).run(move || shuttle::future::block_on(model()))
}

/// A runtime whose tools are probes, on shuttle's executor.
struct Model {
    runtime: ToolRuntime,
    probes: Vec<Probe>,
}

impl Model {
    async fn new(tools: &[&Probe], more: &[&Probe]) -> Arc<Self> {
        Self::with(far(), tools, more).await
    }

    async fn with(deadlines: Deadlines, tools: &[&Probe], more: &[&Probe]) -> Arc<Self> {
        let builder =
            ToolRuntime::builder().keeper(Keeper::on(Handle::current())).deadlines(deadlines);
        let builder = tools.iter().fold(builder, |builder, probe| builder.tool(probe.tool()));
        let runtime = builder.build().await.unwrap();
        let probes = tools.iter().chain(more).map(|probe| (*probe).clone());
        Arc::new(Self { runtime, probes: probes.collect() })
    }

    fn plan(&self) -> Plan {
        self.begin(options()).unwrap()
    }

    /// Shuts down, and checks that nothing is left and that the ledger agrees with the probes.
    async fn end(&self) {
        let report = self.shutdown(FAR).await;
        assert!(report.stragglers.is_empty(), "{report:?}");
        self.probes.iter().for_each(Probe::assert_balanced);
        let (stats, counts) = (self.stats(), self.probes.iter().map(Probe::counts));
        let activated: u64 = counts.map(|counts| counts.activated).sum();
        assert_eq!((stats.activated, stats.deactivated), (activated, activated), "{stats:?}");
        assert_eq!((stats.open, stats.lost, stats.plans), (0, 0, 0), "{stats:?}");
    }
}

impl Deref for Model {
    type Target = ToolRuntime;

    fn deref(&self) -> &ToolRuntime {
        &self.runtime
    }
}

fn far() -> Deadlines {
    Deadlines::default().activate(FAR).grace(FAR).drain(FAR).deactivate(FAR).end(FAR)
}

fn options() -> PlanOptions {
    PlanOptions::new().permit_wait(FAR)
}

type Called = Result<ToolResult, CallError>;

/// A caller in a task of its own.
fn call(plan: &PlanHandle, tool: &'static str) -> JoinHandle<Called> {
    let plan = plan.clone();
    tokio::spawn(async move { plan.execute(tool, json!({})).await })
}

fn is_ok(called: &Called) -> bool {
    called.as_ref().is_ok_and(|result| result.success)
}

fn is_ended(error: &CallError) -> bool {
    use ToolRuntimeError::{PlanEnded, ShutDown};
    matches!(error, CallError::Cancelled(_) | CallError::Runtime(PlanEnded { .. } | ShutDown))
}

fn is_not_activated(error: &CallError) -> bool {
    use ToolRuntimeError::NotActivated;
    matches!(error, CallError::Runtime(NotActivated { .. }))
}

/// The call went well, or its plan ended.
#[track_caller]
fn assert_ok_or_ended(called: &Called) {
    assert!(is_ok(called) || called.as_ref().is_err_and(is_ended), "{called:?}");
}

/// Nothing of the plan is left, and everything that was activated is deactivated.
#[track_caller]
fn assert_over(report: &PlanReport, probes: &[&Probe]) {
    assert!(report.unsettled().is_empty(), "{report:?}");
    assert_eq!(report.overrun(), 0, "{report:?}");
    for probe in probes {
        probe.assert_balanced();
    }
}

/// P1, P2, P4, P8: two ways to end race two callers, and the first of these is aborted.
#[test]
fn two_callers_race_a_cancel_and_the_drop_of_the_plan() {
    check(async || {
        let tool = Probe::new("tool").on_activate(Step::Yield(1));
        let model = Model::new(&[&tool], &[]).await;
        let plan = model.plan();
        let (first, second) = (call(&plan, "tool"), call(&plan, "tool"));
        let handle = plan.handle();
        let cancel = tokio::spawn(async move { handle.cancel() });
        first.abort();
        drop(plan);
        cancel.await.unwrap();
        assert_ok_or_ended(&second.await.unwrap());
        model.end().await;
        assert!(tool.counts().activations <= 1);
    });
}

/// P2: the first caller goes away, and its activation goes on.
#[test]
fn a_caller_is_aborted_while_another_waits_for_its_activation() {
    check(async || {
        let tool = Probe::new("tool").on_activate(Step::Yield(2));
        let model = Model::new(&[&tool], &[]).await;
        let plan = model.plan();
        let (first, second) = (call(&plan, "tool"), call(&plan, "tool"));
        first.abort();
        let called = second.await.unwrap();
        assert!(is_ok(&called), "{called:?}");
        assert_over(&plan.finish().await, &[&tool]);
        assert_eq!((tool.counts().activations, tool.counts().activated), (1, 1));
        model.end().await;
    });
}

/// P4: the commit of an activation sees that its plan has closed, or the close sees the instance.
#[test]
fn an_activation_commits_while_its_plan_closes() {
    check(async || {
        let tool = Probe::new("tool").on_activate(Step::Yield(2));
        let model = Model::new(&[&tool], &[]).await;
        let plan = model.plan();
        let caller = call(&plan, "tool");
        let report = plan.finish().await;
        assert_over(&report, &[&tool]);
        let deactivated = report.deactivations().len();
        assert_eq!(deactivated as u64, tool.counts().activated);
        assert_ok_or_ended(&caller.await.unwrap());
        model.end().await;
    });
}

/// P5, P8: a deactivation by hand, the end of the plan and a call want the same instance.
#[test]
fn a_deactivation_by_hand_races_a_call_and_the_end() {
    check(async || {
        let tool = Probe::new("tool").on_execute(Step::Yield(1));
        let model = Model::new(&[&tool], &[]).await;
        let plan = model.plan();
        plan.activate("tool").await.unwrap();
        let caller = call(&plan, "tool");
        let (handle, probe) = (plan.handle(), tool.clone());
        let by_hand = tokio::spawn(async move {
            if handle.deactivate("tool").await {
                assert_eq!(probe.counts().deactivations, 1);
            }
        });
        let report = plan.finish().await;
        assert_over(&report, &[&tool]);
        assert_eq!(report.deactivations().len(), 1);
        by_hand.await.unwrap();
        let result = caller.await.unwrap();
        if !result.as_ref().is_err_and(is_not_activated) {
            assert_ok_or_ended(&result);
        }
        model.end().await;
    });
}

/// P1: by hand an activation is asked for, doomed and asked for again; never two at a time.
#[test]
fn activations_and_deactivations_by_hand_race() {
    check(async || {
        let tool = Probe::new("tool").on_activate(Step::Yield(1));
        let model = Model::new(&[&tool], &[]).await;
        let plan = model.plan();
        let activate = || {
            let handle = plan.handle();
            tokio::spawn(async move { handle.activate("tool").await })
        };
        let handle = plan.handle();
        let deactivate = tokio::spawn(async move { handle.deactivate("tool").await });
        for activated in [activate(), activate()] {
            let activated = activated.await.unwrap();
            assert!(activated.as_ref().err().is_none_or(is_not_activated), "{activated:?}");
        }
        deactivate.await.unwrap();
        assert_over(&plan.finish().await, &[&tool]);
        model.end().await;
    });
}

/// P6: what two tools share is made once, and goes after both of them.
#[test]
fn a_shared_activation_with_two_dependents_races_the_end() {
    check(async || {
        let shared = Probe::new("shared").on_activate(Step::Yield(1));
        let (first, second) =
            (Probe::new("first").needs(&shared), Probe::new("second").needs(&shared));
        let model = Model::new(&[&first, &second], &[&shared]).await;
        let plan = model.plan();
        let callers = [call(&plan, "first"), call(&plan, "second")];
        assert_over(&plan.finish().await, &[&first, &second, &shared]);
        for caller in callers {
            assert_ok_or_ended(&caller.await.unwrap());
        }
        model.end().await;
        assert!(shared.counts().activations <= 1);
    });
}

/// P6: the same, when both hold it at the end.
#[test]
fn a_shared_activation_goes_after_its_dependents() {
    check(async || {
        let shared = Probe::new("shared");
        let (first, second) =
            (Probe::new("first").needs(&shared), Probe::new("second").needs(&shared));
        let model = Model::new(&[&first, &second], &[&shared]).await;
        let plan = model.plan();
        plan.activate("first").await.unwrap();
        plan.activate("second").await.unwrap();
        let handle = plan.handle();
        let by_hand = tokio::spawn(async move { handle.deactivate("first").await });
        drop(plan);
        by_hand.await.unwrap();
        model.end().await;
    });
}

/// P8: a plan that is let in while the runtime shuts down is ended by it.
#[test]
fn a_begin_races_the_shutdown() {
    check(async || {
        let tool = Probe::new("tool");
        let model = Model::new(&[&tool], &[]).await;
        let beginner = Arc::clone(&model);
        let beginner = tokio::spawn(async move {
            let Ok(plan) = beginner.begin(options()) else {
                return;
            };
            assert_ok_or_ended(&plan.execute("tool", json!({})).await);
            plan.ended().await;
            assert_eq!(plan.end_reason(), Some(EndReason::ShutDown));
        });
        let report = model.shutdown(FAR).await;
        assert!(report.stragglers.is_empty(), "{report:?}");
        beginner.await.unwrap();
        model.end().await;
    });
}

/// P8: a child that is let in while its parent ends is ended by it, and waited for.
#[test]
fn the_begin_of_a_child_races_the_end_of_its_parent() {
    check(async || {
        let tool = Probe::new("tool");
        let model = Model::new(&[&tool], &[]).await;
        let plan = model.plan();
        let parent = plan.handle();
        let beginner = tokio::spawn(async move {
            let Ok(child) = parent.begin_child(options()) else {
                return;
            };
            assert_ok_or_ended(&child.execute("tool", json!({})).await);
            child.ended().await;
        });
        assert_over(&plan.finish().await, &[&tool]);
        assert_eq!(model.stats().open, 0);
        beginner.await.unwrap();
        model.end().await;
    });
}

/// P8: a child that the shutdown closes before its parent knows it does not keep the parent waiting.
#[test]
fn the_begin_of_a_child_races_the_shutdown() {
    check(async || {
        let tool = Probe::new("tool");
        let model = Model::new(&[&tool], &[]).await;
        let plan = model.plan();
        let parent = plan.handle();
        let beginner = tokio::spawn(async move {
            if let Ok(child) = parent.begin_child(options()) {
                child.ended().await;
            }
        });
        let report = model.shutdown(FAR).await;
        assert!(report.stragglers.is_empty(), "{report:?}");
        beginner.await.unwrap();
        model.end().await;
    });
}

/// P1: each call spoils its instance, and the next one waits for the next generation.
#[test]
fn a_tainted_instance_is_replaced_while_callers_race() {
    check(async || {
        let tool =
            Probe::new("tool").on_activate(Step::Yield(1)).on_execute(Step::Yield(1)).taints(true);
        let model = Model::new(&[&tool], &[]).await;
        let plan = model.plan();
        for caller in [call(&plan, "tool"), call(&plan, "tool")] {
            let called = caller.await.unwrap();
            assert!(is_ok(&called), "{called:?}");
        }
        let called = plan.execute("tool", json!({})).await;
        assert!(is_ok(&called), "{called:?}");
        drop(plan);
        model.end().await;
        assert!((2..=3).contains(&tool.counts().activated));
    });
}

/// P3: who waited for a failed attempt gets its error, and a later call makes another attempt.
#[test]
fn a_failed_attempt_races_its_callers() {
    check(async || {
        let tool = Probe::new("tool").on_activate([Step::YieldErr(1), Step::Yield(1)]);
        let model = Model::new(&[&tool], &[]).await;
        let plan = model.plan();
        let (first, second) = (call(&plan, "tool"), call(&plan, "tool"));
        let (first, second) = (first.await.unwrap(), second.await.unwrap());
        assert!(!is_ok(&first) || !is_ok(&second));
        let third = plan.execute("tool", json!({})).await;
        assert!(is_ok(&third), "{third:?}");
        assert_over(&plan.finish().await, &[&tool]);
        assert_eq!((tool.counts().activations, tool.counts().activated), (2, 1));
        model.end().await;
    });
}

/// P5: the hard end of a plan comes while one call is between two polls and another never goes on.
#[test]
fn parked_calls_race_the_hard_end_of_their_plan() {
    check(async || {
        let tool = Probe::new("tool").on_execute([Step::Yield(2), Step::Never]);
        let model = Model::with(far().grace(ANY_MOMENT), &[&tool], &[]).await;
        let plan = model.plan();
        let callers = [call(&plan, "tool"), call(&plan, "tool")];
        assert_over(&plan.finish().await, &[&tool]);
        for caller in callers {
            assert_ok_or_ended(&caller.await.unwrap());
        }
        model.end().await;
    });
}

/// P5: the same for one instance, deactivated by hand with no time for its calls.
#[test]
fn parked_calls_race_the_hard_end_of_their_instance() {
    check(async || {
        let tool = Probe::new("tool").on_execute([Step::Yield(2), Step::Never]);
        let model = Model::with(far().end(ANY_MOMENT), &[&tool], &[]).await;
        let plan = model.plan();
        plan.activate("tool").await.unwrap();
        let callers = [call(&plan, "tool"), call(&plan, "tool")];
        assert!(plan.deactivate("tool").await);
        tool.assert_balanced();
        for caller in callers {
            let called = caller.await.unwrap();
            assert!(is_ok(&called) || called.as_ref().is_err_and(is_not_activated), "{called:?}");
        }
        drop(plan);
        model.end().await;
    });
}

/// P5: a call is polled once and then kept, so that the end has nobody to wake but itself.
#[test]
fn a_call_that_nobody_polls_again_races_the_hard_end() {
    check(async || {
        let tool = Probe::new("tool").on_execute(Step::Never);
        let model = Model::with(far().grace(ANY_MOMENT), &[&tool], &[]).await;
        let plan = model.plan();
        plan.activate("tool").await.unwrap();
        let (handle, over) = (plan.handle(), CancellationToken::new());
        let finished = over.clone();
        let caller = tokio::spawn(async move {
            let mut call = pin!(handle.execute("tool", json!({})));
            poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx).is_ready())).await;
            finished.cancelled().await;
        });
        assert_over(&plan.finish().await, &[&tool]);
        over.cancel();
        caller.await.unwrap();
        model.end().await;
    });
}

/// A tool that needs a connection which outlives its plan.
struct Client {
    descriptor: ToolDescriptor,
    connection: Arc<Counts>,
}

#[derive(Default)]
struct Counts {
    clients: AtomicU64,
    opened: AtomicU64,
    closed: AtomicU64,
}

struct Connected(Arc<Connection>);

struct Connection(Arc<Counts>);

#[async_trait]
impl Tool for Client {
    fn descriptor(&self) -> &ToolDescriptor {
        &self.descriptor
    }

    async fn activate(
        &self,
        ctx: &ActivationContext,
    ) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        let counts = Arc::clone(&self.connection);
        let connect = |_| async {
            tokio::task::yield_now().await;
            counts.opened.fetch_add(1, SeqCst);
            Ok(Connection(counts))
        };
        let connection = ctx.shared_between_plans("connection", connect).await?;
        self.connection.clients.fetch_add(1, SeqCst);
        Ok(Arc::new(Connected(connection)))
    }
}

#[async_trait]
impl ToolInstance for Connected {
    async fn execute(
        &self,
        _: &ToolExecutionContext,
        _: &Value,
    ) -> Result<ToolOutput, ToolFailure> {
        Ok(ToolOutput::new(json!(null)))
    }

    async fn deactivate(&self, _: &DeactivationContext) -> Result<(), ToolFailure> {
        self.0.0.clients.fetch_sub(1, SeqCst);
        Ok(())
    }
}

#[async_trait]
impl SharedActivation for Connection {
    async fn deactivate(&self, _: &DeactivationContext) -> Result<(), ToolFailure> {
        assert_eq!(self.0.clients.load(SeqCst), 0, "closed under a client");
        self.0.closed.fetch_add(1, SeqCst);
        Ok(())
    }
}

/// P6: a connection that two plans share is opened once, and closed after both of them.
#[test]
fn a_connection_shared_between_plans_races_the_shutdown() {
    check(async || {
        let connection = Arc::new(Counts::default());
        let descriptor = ToolDescriptor::new("client".parse().unwrap());
        let client = Client { descriptor, connection: Arc::clone(&connection) };
        let builder = ToolRuntime::builder().keeper(Keeper::on(Handle::current())).deadlines(far());
        let runtime = builder.tool(client).build().await.unwrap();
        let plans = [(); 2].map(|()| runtime.begin(options()).unwrap());
        let callers = [call(&plans[0], "client"), call(&plans[1], "client")];
        let report = runtime.shutdown(FAR).await;
        assert!(report.stragglers.is_empty(), "{report:?}");
        for caller in callers {
            assert_ok_or_ended(&caller.await.unwrap());
        }
        let stats = runtime.stats();
        assert_eq!(
            (stats.activated, stats.open, stats.lost),
            (stats.deactivated, 0, 0),
            "{stats:?}"
        );
        assert_eq!(stats.troubled, 0, "{stats:?}");
        let opened = connection.opened.load(SeqCst);
        assert!(opened <= 1);
        assert_eq!(connection.closed.load(SeqCst), opened);
    });
}
