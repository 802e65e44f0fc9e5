//! Many plans, many ways to end, callers' runtimes that end with plans in flight.
//!
//! `TOOLSCOPE_STRESS_PLANS` sets how many plans, `TOOLSCOPE_SEED` the seed of all that is random; both are printed.

use std::future::pending;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use toolscope::test_util::{Probe, ProbeCounts, Step};
use toolscope::{
    Deadlines, Plan, PlanHandle, PlanOptions, RuntimeHandle, Stats, ToolRuntime, ToolRuntimeBuilder,
};

use crate::cut::{RuntimeEnd, callers_runtime, quiet_probes};
use crate::dice::{Dice, seed, setting};
use crate::support::Fixture;
use crate::tell;

// ===== the tools =====

/// What the plans call. `stuck` stands apart: its activation never returns, so its deadline drops it half-way.
const TOOLS: [&str; 8] =
    ["steady", "mixed", "moody", "off-thread", "tainting", "needy", "bomb", "immediate"];

struct Tools {
    /// `line` is a shared activation and comes last.
    probes: Vec<Probe>,
    stuck: Probe,
}

impl Tools {
    fn new() -> Self {
        let line = Probe::new("line");
        let probes = TOOLS.iter().map(|name| {
            let probe = Probe::new(name);
            match *name {
                "off-thread" => probe.off_thread(),
                "tainting" => probe.taints(true),
                "needy" => probe.needs(&line),
                "bomb" => probe.panics_in_drop(),
                "immediate" => probe.immediate(),
                _ => probe,
            }
        });
        Self {
            probes: probes.chain([line.clone()]).collect(),
            stuck: Probe::new("stuck").on_activate(Step::Never),
        }
    }

    async fn fixture(&self, builder: ToolRuntimeBuilder) -> Fixture {
        let (line, tools) = self.probes.split_last().unwrap();
        let tools: Vec<_> = tools.iter().chain([&self.stuck]).collect();
        Fixture::with(builder, &tools).await.track(line)
    }

    /// Gives all but `steady` another mood.
    fn roll(&self, dice: &mut Dice) {
        for probe in &self.probes[1..] {
            let mut steps = |stage: Stage| {
                let steps = (0..24).map(|_| stage.step(dice)).chain([Step::Ok]);
                steps.collect::<Vec<_>>()
            };
            let moody = probe.clone().on_activate(steps(Stage::Activate));
            let moody = moody.on_execute(steps(Stage::Execute));
            drop(moody.on_deactivate(steps(Stage::Deactivate)));
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Activate,
    Execute,
    Deactivate,
}

impl Stage {
    fn step(self, dice: &mut Dice) -> Step {
        let times = u32::try_from(dice.roll(4)).unwrap();
        match dice.roll(100) {
            0..12 => Step::Yield(times),
            12..22 => Step::Slow(dice.micros(400)),
            22..26 => Step::Slow(Duration::from_millis(1) + dice.micros(2000)),
            26..31 => Step::Err,
            31..35 => Step::YieldErr(times),
            35..38 => Step::Panic,
            38..41 => Step::YieldPanic(times),
            41..43 => Step::Block(dice.micros(300)),
            43..46 if self != Self::Deactivate => Step::UntilCancelled,
            46..49 if self == Self::Execute => Step::Never,
            49 if self == Self::Deactivate => Step::Never,
            _ => Step::Ok,
        }
    }
}

// ===== the ways to end =====

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Finish,
    Fail,
    CancelTwice,
    PanicInCaller,
    Abort,
    AbortBeforeFirstPoll,
    Timeout,
    Select,
    Forget,
    FirstCallerAborted,
    Children,
    DeactivateRacing,
    Token,
    Deadline,
    ActivationTimedOut,
    RunDropped,
    ShutdownRacing,
}

impl Mode {
    const ALL: [Self; 17] = [
        Self::Finish,
        Self::Fail,
        Self::CancelTwice,
        Self::PanicInCaller,
        Self::Abort,
        Self::AbortBeforeFirstPoll,
        Self::Timeout,
        Self::Select,
        Self::Forget,
        Self::FirstCallerAborted,
        Self::Children,
        Self::DeactivateRacing,
        Self::Token,
        Self::Deadline,
        Self::ActivationTimedOut,
        Self::RunDropped,
        Self::ShutdownRacing,
    ];

    /// What its plans need to come to an end whatever the tools do.
    fn options(self, dice: &mut Dice) -> PlanOptions {
        let options = PlanOptions::new();
        match self {
            Self::Finish
            | Self::Fail
            | Self::FirstCallerAborted
            | Self::Children
            | Self::DeactivateRacing => {
                options.call_timeout(Duration::from_millis(3) + dice.micros(5000))
            }
            Self::Deadline => options.deadline(dice.micros(6000)),
            Self::ActivationTimedOut => {
                options.deadlines(deadlines().activate(Duration::from_millis(5)))
            }
            _ => options,
        }
    }
}

/// No activation, and no poll that is under way, comes near its deadline: what is dropped half-way is a fault.
fn deadlines() -> Deadlines {
    Deadlines::default()
        .grace(Duration::from_millis(5))
        .drain(Duration::from_secs(20))
        .deactivate(Duration::from_millis(250))
}

/// The calls of one plan, beside those of some racers. They go on after it where the dice say so.
async fn calls(plan: PlanHandle, mut dice: Dice, racers: u64) {
    let mut racing = JoinSet::new();
    for _ in 0..racers {
        let (plan, mut dice) = (plan.clone(), dice.split());
        racing.spawn(async move { call(&plan, dice.pick(&TOOLS)).await });
    }
    for _ in 0..dice.roll(4) {
        call(&plan, dice.pick(&TOOLS)).await;
    }
    if dice.roll(2) == 0 {
        while racing.join_next().await.is_some() {}
    }
}

/// One call; how it goes is the tools' affair, what it leaves is the ledger's.
async fn call(plan: &PlanHandle, tool: &str) {
    drop(plan.execute(tool, json!({})).await);
}

/// One plan from its first call to its end.
#[expect(clippy::mem_forget, reason = "to leak a plan is one of the ways to end")]
async fn live(mode: Mode, plan: Plan, mut dice: Dice, racers: u64) {
    let (handle, soon) = (plan.handle(), dice.micros(6000));
    let work = calls(plan.handle(), dice.split(), racers);
    match mode {
        Mode::Finish | Mode::RunDropped | Mode::ShutdownRacing => {
            work.await;
            drop(plan.finish().await);
        }
        Mode::Fail => {
            work.await;
            drop(plan.fail().await);
        }
        Mode::CancelTwice => {
            tokio::spawn(async move {
                sleep(soon).await;
                handle.cancel();
                handle.cancel();
            });
            work.await;
            plan.ended().await;
        }
        Mode::PanicInCaller => {
            drop(timeout(soon, work).await);
            panic!("the probe panics in its caller");
        }
        Mode::Abort | Mode::AbortBeforeFirstPoll => {
            work.await;
            pending::<()>().await;
        }
        Mode::Timeout => {
            let whole = async move {
                work.await;
                drop(plan.finish().await);
            };
            drop(timeout(soon, whole).await);
        }
        Mode::Select => tokio::select! {
            () = work => drop(plan.finish().await),
            () = sleep(soon) => {}
        },
        Mode::Forget => {
            drop(timeout(soon, work).await);
            std::mem::forget(plan);
        }
        Mode::FirstCallerAborted => {
            let tool = dice.pick(&TOOLS);
            let first = tokio::spawn(async move { call(&handle, tool).await });
            sleep(soon / 8).await;
            first.abort();
            call(&plan, tool).await;
            drop(plan.finish().await);
        }
        Mode::Children => {
            let child = plan.begin_child(PlanOptions::new()).unwrap();
            let grandchild = child.begin_child(PlanOptions::new()).unwrap();
            let below = calls(grandchild.handle(), dice.split(), 1);
            tokio::spawn(async move {
                below.await;
                std::mem::forget(grandchild);
                drop(child.finish().await);
            });
            work.await;
            drop(plan.finish().await);
        }
        Mode::DeactivateRacing => {
            let by_hand = async {
                for _ in 0..3 {
                    let tool = dice.pick(&TOOLS);
                    plan.deactivate(tool).await;
                    drop(plan.activate(tool).await);
                }
            };
            // What hangs is not cancelled by a deactivation: its caller's timeout ends it.
            tokio::join!(work, by_hand);
            drop(plan.finish().await);
        }
        Mode::Token | Mode::Deadline => {
            work.await;
            plan.ended().await;
        }
        Mode::ActivationTimedOut => {
            call(&plan, "stuck").await;
            drop(plan.finish().await);
        }
    }
}

// ===== the run =====

/// Plans that share a runtime; it shuts down with the last of them in flight.
const EPOCH: u64 = 1000;
/// Plans that share a caller's runtime; it ends with some of them in flight.
const BATCH: u64 = 100;
/// One plan of so many has a thousand racers.
const CROWD: u64 = 500;

struct Stress {
    dice: Dice,
    begun: [u64; Mode::ALL.len()],
    /// By `run`, or while the runtime shuts down.
    begun_elsewhere: Arc<AtomicU64>,
    counts: ProbeCounts,
    stats: Stats,
}

impl Stress {
    fn epoch(&mut self, plans: u64) {
        let tools = Tools::new();
        let own = callers_runtime(false);
        let builder = ToolRuntime::builder().deadlines(deadlines());
        let fixture = Arc::new(own.block_on(tools.fixture(builder)));
        let ending = CancellationToken::new();
        for first in (0..plans).step_by(usize::try_from(BATCH).unwrap()) {
            tools.roll(&mut self.dice);
            self.batch(&fixture, &own, &ending, first..plans.min(first + BATCH));
        }
        ending.cancel();
        let report = own.block_on(fixture.shutdown(Duration::from_secs(20)));
        assert!(report.stragglers.is_empty(), "{report:?}");
        drop(own);
        let fixture = Arc::into_inner(fixture).unwrap();
        let stats = callers_runtime(true).block_on(fixture.end());
        self.add(&tools, stats);
    }

    fn batch(
        &mut self,
        fixture: &Arc<Fixture>,
        own: &tokio::runtime::Runtime,
        ending: &CancellationToken,
        plans: std::ops::Range<u64>,
    ) {
        let caller = callers_runtime(self.dice.roll(2) == 0);
        let mut lives = JoinSet::new();
        for number in plans {
            let at = usize::try_from(number).unwrap() % Mode::ALL.len();
            let (mode, mut dice) = (Mode::ALL[at], self.dice.split());
            self.begun[at] += 1;
            let racers = if number % CROWD == 0 { 1000 } else { dice.roll(4) };
            let (options, soon) = (mode.options(&mut dice), dice.micros(6000));
            match mode {
                Mode::RunDropped => {
                    let (fixture, begun) = (Arc::clone(fixture), Arc::clone(&self.begun_elsewhere));
                    own.spawn(async move {
                        let body = async |plan: PlanHandle| {
                            begun.fetch_add(1, Relaxed);
                            calls(plan, dice, racers).await;
                        };
                        drop(timeout(soon, fixture.run(options, body)).await);
                    });
                }
                Mode::ShutdownRacing => {
                    let (runtime, ending) = (fixture.handle(), ending.clone());
                    let begun = Arc::clone(&self.begun_elsewhere);
                    own.spawn(async move {
                        ending.cancelled().await;
                        let Ok(plan) = runtime.begin(options) else {
                            return;
                        };
                        begun.fetch_add(1, Relaxed);
                        live(mode, plan, dice, racers).await;
                    });
                }
                _ => {
                    let token = CancellationToken::new();
                    let options =
                        if mode == Mode::Token { options.token(token.clone()) } else { options };
                    let plan = fixture.begin(options).unwrap();
                    let task = lives.spawn_on(live(mode, plan, dice, racers), caller.handle());
                    match mode {
                        Mode::Abort => drop(caller.spawn(async move {
                            sleep(soon).await;
                            task.abort();
                        })),
                        Mode::AbortBeforeFirstPoll => task.abort(),
                        Mode::Token => drop(caller.spawn(async move {
                            sleep(soon).await;
                            token.cancel();
                        })),
                        _ => {}
                    }
                }
            }
        }
        let enough = lives.len() as u64 / 2 + self.dice.roll(40);
        caller.block_on(async {
            for _ in 0..enough {
                let next = timeout(Duration::from_secs(20), lives.join_next()).await;
                assert!(next.is_ok(), "no plan came to its end within 20 s");
            }
        });
        lives.detach_all();
        self.dice.pick(&RuntimeEnd::ALL).of(caller);
    }

    fn add(&mut self, tools: &Tools, stats: Stats) {
        for probe in &tools.probes {
            let counts = probe.counts();
            assert_eq!(counts.half_done, 0, "dropped half-way: {probe:?}");
            self.counts.activations += counts.activations;
            self.counts.activated += counts.activated;
            self.counts.executions += counts.executions;
            self.counts.dropped += counts.dropped;
            self.counts.deactivations += counts.deactivations;
            self.counts.doubled += counts.doubled;
            self.counts.overlapping += counts.overlapping;
            self.counts.late += counts.late;
            self.counts.out_of_order += counts.out_of_order;
        }
        let stuck = tools.stuck.counts();
        assert_eq!((stuck.half_done, stuck.activated), (stuck.activations, 0));
        self.counts.half_done += stuck.half_done;
        self.stats.activated += stats.activated;
        self.stats.deactivated += stats.deactivated;
        self.stats.troubled += stats.troubled;
        self.stats.failed += stats.failed;
        self.stats.lost += stats.lost;
    }
}

#[test]
fn p4_every_way_to_end_balances_the_ledger() {
    quiet_probes();
    let (plans, seed) = (setting("TOOLSCOPE_STRESS_PLANS").unwrap_or(20_000), seed());
    tell!("stress: {plans} plans, TOOLSCOPE_SEED={seed}");
    let mut stress = Stress {
        dice: Dice::new(seed),
        begun: [0; Mode::ALL.len()],
        begun_elsewhere: Arc::default(),
        counts: ProbeCounts::default(),
        stats: Stats::default(),
    };
    for first in (0..plans).step_by(usize::try_from(EPOCH).unwrap()) {
        stress.epoch(EPOCH.min(plans - first));
    }
    for (mode, begun) in Mode::ALL.iter().zip(stress.begun) {
        tell!("{begun:6} {mode:?}");
    }
    let elsewhere = stress.begun_elsewhere.load(Relaxed);
    tell!("of the last but one and the last {elsewhere} were let begin");
    let Stress { counts, stats, .. } = stress;
    tell!("{counts:?}");
    tell!(
        "ledger: activated {}, deactivated {} ({} with trouble), failed {}, lost {}",
        stats.activated,
        stats.deactivated,
        stats.troubled,
        stats.failed,
        stats.lost
    );
    tell!(
        "missed {}, doubled {}, overlapping {}, late {}, half-done {} by their deadline and 0 else",
        counts.activated.abs_diff(counts.deactivations),
        counts.doubled,
        counts.overlapping,
        counts.late,
        counts.half_done
    );
    assert_eq!(counts.activated, counts.deactivations);
    assert!(counts.activated > plans, "too little was activated");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p1_a_thousand_tasks_race_for_one_activation_two_hundred_times() {
    let probe = Probe::new("a").on_activate(Step::Yield(3));
    let fixture = Fixture::new(&[&probe]).await;
    for round in 1..=200 {
        let plan = fixture.plan();
        let mut tasks = JoinSet::new();
        for _ in 0..1000 {
            let plan = plan.handle();
            tasks.spawn(async move { plan.execute("a", json!({})).await.unwrap().success });
        }
        assert!(tasks.join_all().await.into_iter().all(|success| success));
        assert_eq!(probe.counts().activations, round, "one start in each round");
        plan.finish().await;
    }
    let stats = fixture.end().await;
    tell!("race: 200 rounds of 1000 tasks, {} starts", stats.started);
    assert_eq!(stats.started, 200);
}

/// The keeper ends with deactivations that nobody has polled yet: they run all the same.
#[test]
fn p4_a_runtime_dropped_without_a_wait_deactivates_everything() {
    let caller = callers_runtime(true);
    for _ in 0..20 {
        let probe = Probe::new("a").on_deactivate(Step::Yield(1));
        let builder = ToolRuntime::builder().drop_wait(Duration::ZERO);
        let runtime = builder.tool(probe.tool()).build();
        let runtime = caller.block_on(runtime).unwrap();
        let plans: Vec<_> = (0..50).map(|_| runtime.begin(PlanOptions::new()).unwrap()).collect();
        for plan in &plans {
            caller.block_on(plan.activate("a")).unwrap();
        }
        drop(runtime);
        let began = Instant::now();
        while probe.counts().deactivations < 50 && began.elapsed() < Duration::from_secs(20) {
            std::thread::yield_now();
        }
        probe.assert_balanced();
    }
}

/// Begins and leaks plans until it is refused: only the end of the runtime ends them.
#[expect(clippy::mem_forget, reason = "a leaked plan is not ended by its drop")]
fn begin_and_leak(runtime: &RuntimeHandle) -> Vec<PlanHandle> {
    let mut leaked = Vec::new();
    while let Ok(plan) = runtime.begin(PlanOptions::new()) {
        leaked.push(plan.handle());
        std::mem::forget(plan);
    }
    leaked
}

/// Ends a runtime while another thread begins plans, so often that every order comes up.
fn race_with_the_end(end: impl Fn(ToolRuntime)) {
    let (caller, mut begun) = (callers_runtime(true), 0);
    for _ in 0..500 {
        let runtime = caller.block_on(ToolRuntime::builder().build()).unwrap();
        let (handle, start) = (runtime.handle(), Barrier::new(2));
        let leaked = std::thread::scope(|scope| {
            let beginner = scope.spawn(|| {
                start.wait();
                begin_and_leak(&handle)
            });
            start.wait();
            end(runtime);
            beginner.join().unwrap()
        });
        begun += leaked.len();
        let open = leaked.iter().find(|plan| plan.end_reason().is_none());
        assert!(open.is_none(), "{open:?} slipped past the end");
    }
    tell!("race: 500 ends of a runtime, {begun} plans begun meanwhile");
}

#[test]
fn p8_no_plan_slips_past_a_shutdown() {
    race_with_the_end(|runtime| {
        let shutdown = runtime.shutdown(Duration::from_secs(5));
        let report = callers_runtime(true).block_on(shutdown);
        assert!(report.stragglers.is_empty(), "{report:?}");
    });
}

#[test]
fn p8_no_plan_slips_past_the_drop_of_the_runtime() {
    race_with_the_end(drop);
}
