//! Every public async fn, cut at every await: polled k times and dropped right there, for k = 0, 1, 2, ... until it
//! completes; with a second caller that is cut at j.
//!
//! Callers and keeper share one current-thread runtime with a paused clock, so that every run has the same points. The
//! cut falls in the very poll that was pending: one poll later the wake-up would hide what happens in between.

use std::collections::HashSet;
use std::future::{pending, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::task::Poll;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use toolscope::test_util::{Probe, Step};
use toolscope::{
    ActivationContext, CallOptions, DeactivationContext, Keeper, Plan, PlanHandle, PlanOptions,
    SharedActivation, Tool, ToolDescriptor, ToolExecutionContext, ToolFailure, ToolInstance,
    ToolOutput, ToolRuntime, ToolSpec, async_trait,
};

use crate::support::Fixture;
use crate::tell;

// ===== the scenarios =====

/// What is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Caller {
    Execute,
    Timeout,
    Token,
    Activate,
    Deactivate,
    Renew,
    Ended,
    Finish,
    Fail,
    Run,
    Shutdown,
}

/// How the gated probe stands behind the tool that is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Shape {
    /// It is the tool.
    Plain,
    /// It is the tool, and its activation is never polled by the caller.
    OffThread,
    /// The tool calls it: `execute_nested`.
    Nested,
    /// The tool needs it when it is activated: `ActivationContext::shared`.
    Needed,
    /// The tool needs it in each call: `ToolExecutionContext::shared`.
    NeededInCall,
    /// The tool needs it, and so may other plans: `shared_between_plans`.
    NeededBetweenPlans,
}

/// What the gated probe does at one of its stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Gate {
    Ok,
    Err,
    Panic,
    Yield,
    YieldErr,
    YieldPanic,
    Slow,
    UntilCancelled,
    Never,
}

impl Gate {
    fn step(self) -> Step {
        match self {
            Self::Ok => Step::Ok,
            Self::Err => Step::Err,
            Self::Panic => Step::Panic,
            Self::Yield => Step::Yield(2),
            Self::YieldErr => Step::YieldErr(2),
            Self::YieldPanic => Step::YieldPanic(2),
            Self::Slow => Step::Slow(Duration::from_millis(2)),
            Self::UntilCancelled => Step::UntilCancelled,
            Self::Never => Step::Never,
        }
    }

    fn is_good(self) -> bool {
        matches!(self, Self::Ok | Self::Yield | Self::Slow)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Gates {
    activate: Gate,
    execute: Gate,
    deactivate: Gate,
}

impl Gates {
    fn all(activate: &[Gate], execute: &[Gate], deactivate: &[Gate]) -> Vec<Self> {
        let mut all = Vec::new();
        for &activate in activate {
            for &execute in execute {
                for &deactivate in deactivate {
                    all.push(Self { activate, execute, deactivate });
                }
            }
        }
        all
    }

    /// Every gate at every stage, but for an activation that never returns: that one is dropped half-way by its deadline.
    fn every() -> Vec<Self> {
        use Gate::*;
        let common = [Ok, Err, Panic, Yield, YieldErr, YieldPanic, Slow];
        Self::all(
            &[&common[..], &[UntilCancelled]].concat(),
            &[&common[..], &[UntilCancelled, Never]].concat(),
            &[&common[..], &[Never]].concat(),
        )
    }

    /// Those that wait.
    fn waiting() -> Vec<Self> {
        use Gate::*;
        Self::all(
            &[Yield, YieldErr, YieldPanic, UntilCancelled],
            &[Yield, YieldPanic, Never],
            &[Yield, YieldErr, YieldPanic],
        )
    }

    /// The probe; an activation that fails goes well the second time.
    fn probe(self, name: &str) -> Probe {
        Probe::new(name)
            .on_activate([self.activate.step(), self.later_activation()])
            .on_execute(self.execute.step())
            .on_deactivate(self.deactivate.step())
    }

    fn later_activation(self) -> Step {
        match self.activate {
            Gate::Err | Gate::Panic | Gate::YieldErr | Gate::YieldPanic => Step::Ok,
            gate => gate.step(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Scenario {
    shape: Shape,
    gates: Gates,
    first: Caller,
    second: Option<Caller>,
}

/// A caller that is left to complete.
const UNCUT: usize = usize::MAX;

/// The points at which a caller was cut.
#[derive(Default)]
struct Points(HashSet<(Scenario, usize, usize)>);

impl Points {
    /// Cuts the first caller at every await, beside a second one that completes.
    fn cut_one(&mut self, host: &Runtime, scenario: Scenario) {
        for k in 0.. {
            let (first, _) = point(host, scenario, k, UNCUT);
            if first {
                return;
            }
            self.0.insert((scenario, k, UNCUT));
        }
    }

    /// Cuts two callers, each at every await of the other.
    fn cut_two(&mut self, host: &Runtime, scenario: Scenario) {
        for k in 0.. {
            let mut completes = true;
            for j in 0.. {
                let (first, second) = point(host, scenario, k, j);
                completes &= first;
                if !(first && second) {
                    self.0.insert((scenario, k, j));
                }
                if second {
                    break;
                }
            }
            if completes {
                return;
            }
        }
    }
}

// ===== one point =====

/// The deadline of a plan, on the paused clock: the end of a caller that hangs.
const HANGS: Duration = Duration::from_secs(10);

/// Drops the future right after its `k`th pending poll, and unpolled where that is 0: `None` then.
pub(crate) async fn cut<F: Future + Send>(future: F, k: usize) -> Option<F::Output> {
    let (mut future, mut left) = (Some(Box::pin(future)), k);
    poll_fn(|cx| {
        if left > 0 {
            let future = future.as_mut().map(Pin::as_mut).expect("polled when done");
            if let Poll::Ready(output) = future.poll(cx) {
                return Poll::Ready(Some(output));
            }
            left -= 1;
        }
        if left > 0 {
            return Poll::Pending;
        }
        future = None;
        Poll::Ready(None)
    })
    .await
}

/// What the callers of one point share.
struct Stage {
    fixture: Fixture,
    probes: Vec<Probe>,
    plan: Mutex<Option<Plan>>,
    handle: PlanHandle,
    /// Of every plan.
    deadline: Duration,
    /// The gated probe as a tool, or the tool that stands for it.
    managed: &'static str,
}

impl Stage {
    async fn set(shape: Shape, gates: Gates, keeper: Option<Keeper>, deadline: Duration) -> Self {
        // Where the probe stands behind it, it takes as long to go.
        let tool = Probe::new("tool").on_deactivate(gates.deactivate.step());
        let mut builder = ToolRuntime::builder().keeper_threads(1);
        if let Some(keeper) = keeper {
            builder = builder.keeper(keeper);
        }
        let asker =
            |probe: &Probe, asks| Asker { own: Box::new(tool.tool()), line: probe.clone(), asks };
        let (fixture, probes) = match shape {
            Shape::Plain | Shape::OffThread => {
                let probe = gates.probe("tool");
                let probe = if shape == Shape::Plain { probe } else { probe.off_thread() };
                (Fixture::with(builder, &[&probe]).await, vec![probe])
            }
            Shape::Nested => {
                let probe = gates.probe("inner");
                let outer = ToolSpec::new("tool").writes().handler(nested);
                (Fixture::with(builder.tool(outer), &[&probe]).await, vec![probe])
            }
            Shape::Needed => {
                let probe = gates.probe("line");
                let tool = tool.needs(&probe);
                let fixture = Fixture::with(builder, &[&tool]).await.track(&probe);
                (fixture, vec![probe, tool])
            }
            Shape::NeededInCall | Shape::NeededBetweenPlans => {
                let probe = gates.probe("line");
                let asks =
                    if shape == Shape::NeededInCall { Asks::InCall } else { Asks::BetweenPlans };
                let fixture = Fixture::with(builder.tool(asker(&probe, asks)), &[]).await;
                (fixture.track(&probe).track(&tool), vec![probe, tool])
            }
        };
        let plan = fixture.begin(PlanOptions::new().deadline(deadline)).unwrap();
        Self {
            fixture,
            probes,
            handle: plan.handle(),
            deadline,
            plan: Mutex::new(Some(plan)),
            managed: if shape == Shape::Nested { "inner" } else { "tool" },
        }
    }

    fn take_plan(&self) -> Option<Plan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// What the caller does; how it goes is seen in the ledger.
    async fn act(self: Arc<Self>, caller: Caller) {
        let (plan, managed) = (&self.handle, self.managed);
        match caller {
            Caller::Execute => {
                for _ in 0..2 {
                    drop(plan.execute("tool", json!({})).await);
                }
            }
            Caller::Timeout => {
                call_twice(plan, CallOptions::new().timeout(Duration::from_secs(1))).await;
            }
            Caller::Token => {
                let token = CancellationToken::new();
                let cancelled = token.clone();
                tokio::spawn(async move {
                    for _ in 0..3 {
                        tokio::task::yield_now().await;
                    }
                    cancelled.cancel();
                });
                call_twice(plan, CallOptions::new().token(token)).await;
            }
            Caller::Activate => drop(plan.activate(managed).await),
            Caller::Deactivate => {
                plan.deactivate(managed).await;
            }
            Caller::Renew => {
                plan.deactivate(managed).await;
                drop(plan.activate(managed).await);
                call_twice(plan, CallOptions::new()).await;
            }
            Caller::Ended => plan.ended().await,
            Caller::Finish | Caller::Fail => {
                let Some(plan) = self.take_plan() else { return };
                let report =
                    if caller == Caller::Finish { plan.finish().await } else { plan.fail().await };
                assert!(report.unsettled().is_empty(), "{report:?}");
            }
            Caller::Run => {
                let options = PlanOptions::new().deadline(self.deadline);
                let body = |plan: PlanHandle| async move {
                    call_twice(&plan, CallOptions::new()).await;
                };
                drop(self.fixture.run(options, body).await);
            }
            Caller::Shutdown => {
                let report = self.fixture.shutdown(Duration::from_secs(20)).await;
                assert!(report.stragglers.is_empty(), "{report:?}");
            }
        }
    }
}

async fn call_twice(plan: &PlanHandle, options: CallOptions) {
    for _ in 0..2 {
        drop(plan.execute_with("tool", json!({}), options.clone()).await);
    }
}

/// Says where it happened when a check fails.
struct At(Scenario, usize, usize);

impl Drop for At {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Self(scenario, k, j) = self;
            println!("cut at k = {k}, j = {j} of {scenario:?}");
        }
    }
}

/// Runs the scenario with its callers cut at `k` and `j`; whether they completed.
fn point(host: &Runtime, scenario: Scenario, k: usize, j: usize) -> (bool, bool) {
    assert!(k == UNCUT || k < 100, "it never completes");
    let _at = At(scenario, k, j);
    let completed = host.block_on(async {
        let keeper = Keeper::on(host.handle().clone());
        let Scenario { shape, gates, .. } = scenario;
        let stage = Stage::set(shape, gates, Some(keeper), HANGS).await;
        let stage = Arc::new(stage);
        let act = |caller, k| tokio::spawn(cut(Arc::clone(&stage).act(caller), k));
        let second = scenario.second.map(|caller| act(caller, j));
        let first = act(scenario.first, k).await.unwrap().is_some();
        if let Some(plan) = stage.take_plan() {
            if leaves_it_working(scenario) && plan.end_reason().is_none() {
                goes_on(&plan, &stage.probes[0]).await;
            }
            let report = plan.finish().await;
            assert!(report.unsettled().is_empty(), "{report:?}");
        }
        let second = match second {
            Some(second) => second.await.unwrap().is_some(),
            None => true,
        };
        let stage = Arc::into_inner(stage).unwrap();
        stage.fixture.end().await;
        for probe in &stage.probes {
            assert_eq!(
                probe.counts().half_done,
                0,
                "an activation was dropped half-way: {probe:?}"
            );
        }
        for _ in 0..3 {
            tokio::task::yield_now().await;
        }
        (first, second)
    });
    let left = host.metrics().num_alive_tasks();
    assert_eq!(left, 0, "a job was left in the keeper");
    completed
}

/// Whether nothing that the callers do keeps the tool from working.
fn leaves_it_working(scenario: Scenario) -> bool {
    let harmless = |caller| {
        matches!(caller, Caller::Execute | Caller::Timeout | Caller::Token | Caller::Activate)
    };
    let Gates { activate, execute, .. } = scenario.gates;
    activate.is_good()
        && execute.is_good()
        && harmless(scenario.first)
        && scenario.second.is_none_or(harmless)
}

/// The caller that was cut took nothing away: the next call has the instance, and there was one activation.
async fn goes_on(plan: &Plan, probe: &Probe) {
    let result = plan.execute("tool", json!({})).await.unwrap();
    assert!(result.success, "{result:?}");
    assert_eq!(probe.counts().activations, 1, "a cut caller repeated the activation");
}

// ===== tools that reach the probe by another way =====

async fn nested(ctx: ToolExecutionContext, _input: Value) -> Result<Value, ToolFailure> {
    let result = ctx.execute_nested("inner", &json!({})).await?;
    Ok(result.into_result()?)
}

/// A probe that asks for another one.
struct Asker {
    own: Box<dyn Tool>,
    line: Probe,
    asks: Asks,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Asks {
    InCall,
    BetweenPlans,
}

#[async_trait]
impl Tool for Asker {
    fn descriptor(&self) -> &ToolDescriptor {
        self.own.descriptor()
    }

    async fn activate(
        &self,
        ctx: &ActivationContext,
    ) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        if self.asks == Asks::BetweenPlans {
            ctx.shared_between_plans("line", Line::make(&self.line)).await?;
        }
        Ok(Arc::new(AskerInstance {
            own: self.own.activate(ctx).await?,
            line: (self.asks == Asks::InCall).then(|| self.line.clone()),
        }))
    }
}

struct AskerInstance {
    own: Arc<dyn ToolInstance>,
    line: Option<Probe>,
}

#[async_trait]
impl ToolInstance for AskerInstance {
    async fn execute(
        &self,
        ctx: &ToolExecutionContext,
        input: &Value,
    ) -> Result<ToolOutput, ToolFailure> {
        if let Some(line) = &self.line {
            ctx.shared("line", Line::make(line)).await?;
        }
        self.own.execute(ctx, input).await
    }

    async fn deactivate(&self, ctx: &DeactivationContext) -> Result<(), ToolFailure> {
        self.own.deactivate(ctx).await
    }
}

/// A probe as a shared activation.
struct Line(Arc<dyn ToolInstance>);

type Making = Pin<Box<dyn Future<Output = Result<Line, ToolFailure>> + Send>>;

impl Line {
    fn make(probe: &Probe) -> impl FnOnce(ActivationContext) -> Making + Send + 'static {
        let tool = probe.tool();
        move |ctx| Box::pin(async move { Ok(Self(tool.activate(&ctx).await?)) })
    }
}

#[async_trait]
impl SharedActivation for Line {
    async fn deactivate(&self, ctx: &DeactivationContext) -> Result<(), ToolFailure> {
        self.0.deactivate(ctx).await
    }
}

/// Keeps the panics of probes, which are thousands, out of the output.
pub(crate) fn quiet_probes() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let loud = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let payload = panic.payload();
            let text = payload.downcast_ref::<&str>().copied();
            let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
            let of_a_probe = text.is_some_and(|text| {
                text.starts_with("the probe panics") || text == "a panic in the drop of an instance"
            });
            if !of_a_probe {
                loud(panic);
            }
        }));
    });
}

// ===== a caller's runtime that ends =====

/// A caller's Tokio runtime, of either flavour.
pub(crate) fn callers_runtime(current_thread: bool) -> Runtime {
    let mut builder =
        if current_thread { Builder::new_current_thread() } else { Builder::new_multi_thread() };
    builder.worker_threads(2).enable_all().build().unwrap()
}

/// How a caller's Tokio runtime ends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RuntimeEnd {
    Drop,
    ShutdownTimeout,
    ShutdownBackground,
}

impl RuntimeEnd {
    pub(crate) const ALL: [Self; 3] = [Self::Drop, Self::ShutdownTimeout, Self::ShutdownBackground];

    pub(crate) fn of(self, runtime: Runtime) {
        match self {
            Self::Drop => drop(runtime),
            Self::ShutdownTimeout => runtime.shutdown_timeout(Duration::from_millis(1)),
            Self::ShutdownBackground => runtime.shutdown_background(),
        }
    }
}

/// Polls the future until it was pending `k` times, tells whether it is done, and keeps what is left until it is
/// dropped itself.
async fn hold<F: Future + Send>(future: F, k: usize, told: oneshot::Sender<bool>) {
    let (mut future, mut left) = (Box::pin(future), k);
    let done = poll_fn(|cx| {
        if left > 0 {
            if future.as_mut().poll(cx).is_ready() {
                return Poll::Ready(true);
            }
            left -= 1;
        }
        if left > 0 { Poll::Pending } else { Poll::Ready(false) }
    })
    .await;
    told.send(done).unwrap_or_default();
    pending::<()>().await;
}

/// Ends the caller's runtime after `k` polls; whether the caller had completed.
fn runtime_ends(scenario: Scenario, k: usize, current_thread: bool, end: RuntimeEnd) -> bool {
    let _at = At(scenario, k, UNCUT);
    let caller = callers_runtime(current_thread);
    let Scenario { shape, gates, .. } = scenario;
    let stage = caller.block_on(Stage::set(shape, gates, None, Duration::from_millis(5)));
    let stage = Arc::new(stage);
    if let Some(second) = scenario.second {
        caller.spawn(Arc::clone(&stage).act(second));
    }
    let (told, is_told) = oneshot::channel();
    caller.spawn(hold(Arc::clone(&stage).act(scenario.first), k, told));
    let completed = caller.block_on(is_told).unwrap();
    end.of(caller);
    // In the background the tasks of the runtime go a little later than its owner.
    while Arc::strong_count(&stage) > 1 {
        std::thread::yield_now();
    }
    drop(stage.take_plan());
    let stage = Arc::into_inner(stage).unwrap();
    let stats = callers_runtime(true).block_on(stage.fixture.end());
    for probe in &stage.probes {
        assert_eq!(probe.counts().half_done, 0, "{probe:?}");
    }
    if gates.deactivate.is_good() {
        assert_eq!(stats.troubled, 0, "a deactivation was abandoned");
    }
    completed
}

// ===== the tests =====

const CALLERS: [Caller; 11] = [
    Caller::Execute,
    Caller::Timeout,
    Caller::Token,
    Caller::Activate,
    Caller::Deactivate,
    Caller::Renew,
    Caller::Ended,
    Caller::Finish,
    Caller::Fail,
    Caller::Run,
    Caller::Shutdown,
];

const SHAPES: [Shape; 6] = [
    Shape::Plain,
    Shape::OffThread,
    Shape::Nested,
    Shape::Needed,
    Shape::NeededInCall,
    Shape::NeededBetweenPlans,
];

const PAIRS: [(Caller, Caller); 12] = [
    (Caller::Execute, Caller::Execute),
    (Caller::Execute, Caller::Token),
    (Caller::Activate, Caller::Execute),
    (Caller::Deactivate, Caller::Execute),
    (Caller::Deactivate, Caller::Renew),
    (Caller::Execute, Caller::Renew),
    (Caller::Execute, Caller::Finish),
    (Caller::Finish, Caller::Execute),
    (Caller::Shutdown, Caller::Execute),
    (Caller::Shutdown, Caller::Finish),
    (Caller::Shutdown, Caller::Run),
    (Caller::Fail, Caller::Deactivate),
];

/// A Tokio runtime whose clock goes on only when nothing else can.
pub(crate) fn paused() -> Runtime {
    let mut builder = Builder::new_current_thread();
    builder.enable_all().start_paused(true).build().unwrap()
}

/// The caller, beside one that gives it something to end where it ends something.
fn alone(shape: Shape, first: Caller, gates: Gates) -> Scenario {
    let begins = matches!(
        first,
        Caller::Execute | Caller::Timeout | Caller::Token | Caller::Activate | Caller::Run
    );
    Scenario { shape, gates, first, second: (!begins).then_some(Caller::Execute) }
}

#[test]
fn p2_p4_p5_every_public_future_can_be_cut_at_every_await() {
    quiet_probes();
    let host = paused();
    let mut points = Points::default();
    for first in [Caller::Execute, Caller::Deactivate, Caller::Finish] {
        for gates in Gates::every() {
            points.cut_one(&host, alone(Shape::Plain, first, gates));
        }
    }
    for first in CALLERS {
        for shape in SHAPES {
            for gates in Gates::waiting() {
                points.cut_one(&host, alone(shape, first, gates));
            }
        }
    }
    let ones = points.0.len();
    for (first, second) in PAIRS {
        for gates in Gates::waiting() {
            let scenario = Scenario { second: Some(second), ..alone(Shape::Plain, first, gates) };
            points.cut_two(&host, scenario);
        }
    }
    let count = points.0.len();
    tell!("cut points: {count} distinct");
    tell!("of them {ones} with one caller cut, {} with two", count - ones);
    assert!(count >= 5000, "{count} points are too few");
}

#[test]
fn p2_p4_the_callers_runtime_can_end_at_every_await() {
    quiet_probes();
    let gates = {
        use Gate::*;
        Gates::all(
            &[Yield, YieldErr, UntilCancelled],
            &[Yield, UntilCancelled],
            &[Slow, YieldPanic],
        )
    };
    let mut points = 0;
    for first in [
        Caller::Execute,
        Caller::Activate,
        Caller::Deactivate,
        Caller::Finish,
        Caller::Run,
        Caller::Shutdown,
    ] {
        for &gates in &gates {
            for current_thread in [true, false] {
                for end in RuntimeEnd::ALL {
                    let scenario = alone(Shape::Plain, first, gates);
                    let mut k = 0;
                    while !runtime_ends(scenario, k, current_thread, end) {
                        k += 1;
                    }
                    points += k;
                }
            }
        }
    }
    tell!("runtime-end points: {points}");
    assert!(points >= 500, "{points} points are too few");
}

#[test]
fn p4_a_deactivation_outlives_the_runtime_of_who_waits_for_it() {
    let latch = CancellationToken::new();
    let probe = Probe::new("a").on_deactivate(Step::Until(latch.clone()));
    let caller = callers_runtime(true);
    let fixture = caller.block_on(async {
        let fixture = Fixture::new(&[&probe]).await;
        let plan = fixture.plan();
        plan.activate("a").await.unwrap();
        cut(plan.finish(), 1).await;
        while probe.counts().deactivations == 0 {
            tokio::task::yield_now().await;
        }
        fixture
    });
    drop(caller);
    latch.cancel();
    let stats = callers_runtime(true).block_on(fixture.end());
    assert_eq!(stats.troubled, 0, "it was abandoned");
}

/// Here the keeper is the caller's own runtime; in service it ends once the drop of the runtime has waited long enough.
#[test]
fn p4_the_keeper_can_end_at_every_await_and_its_deactivations_run_all_the_same() {
    quiet_probes();
    for gates in Gates::waiting() {
        for caller in [Caller::Execute, Caller::Activate, Caller::Renew] {
            for k in 0..8 {
                let _at = At(alone(Shape::Plain, caller, gates), k, UNCUT);
                let host = paused();
                let keeper = Some(Keeper::on(host.handle().clone()));
                let stage = host.block_on(async {
                    let stage = Stage::set(Shape::Plain, gates, keeper, HANGS);
                    let stage = Arc::new(stage.await);
                    cut(Arc::clone(&stage).act(caller), k).await;
                    drop(stage.take_plan());
                    stage
                });
                drop(host);
                let stage = Arc::into_inner(stage).unwrap();
                callers_runtime(true).block_on(stage.fixture.end());
            }
        }
    }
}
