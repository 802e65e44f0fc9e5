//! Random operations on one plan and its children, against a plain reference model of the promises.
//!
//! Keeper and caller share a paused current-thread runtime, and the model is asked after each operation has come to
//! rest: what is checked is the order of operations, not the interleaving inside one.

use proptest::prelude::*;
use serde_json::json;
use toolscope::test_util::{Probe, Step};
use toolscope::{CallError, EndReason, Keeper, Plan, PlanHandle, PlanOptions, ToolRuntime};

use crate::cut::{cut, paused, quiet_probes};
use crate::support::{Fixture, at_rest};

// ===== operations =====

/// A tool, one whose activation is never polled by the caller, one that needs a shared line, and the line.
const NAMES: [&str; 4] = ["a", "off-thread", "needy", "line"];
const OFF_THREAD: usize = 1;
const NEEDY: usize = 2;
const LINE: usize = 3;
/// The runtime's defaults.
const MOST: u32 = 3;

#[derive(Clone, Copy, Debug)]
enum How {
    Err,
    Panic,
}

impl How {
    fn step(self) -> Step {
        match self {
            Self::Err => Step::Err,
            Self::Panic => Step::Panic,
        }
    }
}

/// The number of the plan comes first: 0 is the parent, the others are its children as far as there are any.
#[derive(Clone, Copy, Debug)]
enum Op {
    Execute(usize, usize),
    /// The call says that its instance is no good any more.
    Taint(usize, usize),
    /// The execution itself fails.
    ExecuteBadly(usize, usize, How),
    /// The caller goes at its first await.
    Abandon(usize, usize),
    Activate(usize, usize),
    Deactivate(usize, usize),
    /// The next activations of a tool or the line fail, in whatever plan.
    FailNext(usize, usize, How),
    BeginChild,
    Cancel(usize),
    Finish(usize),
    Fail(usize),
    Drop(usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let (plan, tool) = (0..3_usize, 0..LINE);
    let how = prop_oneof![Just(How::Err), Just(How::Panic)];
    let in_plan = (plan.clone(), tool);
    let op = prop_oneof![
        8 => in_plan.clone().prop_map(|(plan, tool)| Op::Execute(plan, tool)),
        4 => in_plan.clone().prop_map(|(plan, tool)| Op::Taint(plan, tool)),
        2 => (in_plan.clone(), how.clone()).prop_map(|((plan, tool), how)| Op::ExecuteBadly(plan, tool, how)),
        3 => in_plan.clone().prop_map(|(plan, tool)| Op::Abandon(plan, tool)),
        3 => in_plan.clone().prop_map(|(plan, tool)| Op::Activate(plan, tool)),
        4 => in_plan.prop_map(|(plan, tool)| Op::Deactivate(plan, tool)),
        4 => (0..NAMES.len(), 1..5_usize, how).prop_map(|(tool, times, how)| Op::FailNext(tool, times, how)),
        2 => Just(Op::BeginChild),
        1 => plan.clone().prop_map(Op::Cancel),
        1 => plan.clone().prop_map(Op::Finish),
        1 => plan.clone().prop_map(Op::Fail),
        1 => plan.prop_map(Op::Drop),
    ];
    proptest::collection::vec(op, 1..60)
}

// ===== the reference =====

/// What a tool, or the line, is to one plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Not alive, after so many attempts in vain; `next` is what `made` will be.
    None {
        failed: u32,
        next: u32,
    },
    /// Alive; `made` counts the instances that followed one another by taint.
    Alive {
        made: u32,
    },
    Tainted {
        made: u32,
    },
    Deactivated,
}

#[derive(Debug)]
struct PlanModel {
    states: [State; 4],
    ended: Option<EndReason>,
    calls: usize,
}

impl PlanModel {
    fn new() -> Self {
        Self { states: [State::None { failed: 0, next: 1 }; 4], ended: None, calls: 0 }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    activated: u64,
    executions: u64,
    deactivations: u64,
}

#[derive(Debug)]
struct Model {
    /// The parent, then its children.
    plans: Vec<PlanModel>,
    /// The activations that are going to fail.
    failures: [usize; 4],
    counts: [Counts; 4],
}

/// The stable code of a result.
type Code = &'static str;

impl Model {
    fn new() -> Self {
        Self { plans: vec![PlanModel::new()], failures: [0; 4], counts: [Counts::default(); 4] }
    }

    fn ended_code(reason: EndReason) -> Code {
        if reason == EndReason::Cancelled { "cancelled" } else { "plan_ended" }
    }

    /// A call is let in while its plan is open, and then leaves a trace.
    fn enter(&mut self, plan: usize) -> Result<(), Code> {
        let plan = &mut self.plans[plan];
        if let Some(reason) = plan.ended {
            return Err(Self::ended_code(reason));
        }
        plan.calls += 1;
        Ok(())
    }

    /// P1, P3: alive already, or made now, or refused.
    fn obtain(&mut self, plan: usize, tool: usize, by_hand: bool) -> Result<(), Code> {
        let (failed, next) = match self.plans[plan].states[tool] {
            State::Alive { .. } => return Ok(()),
            State::None { failed, .. } if failed >= MOST => return Err("activation"),
            State::None { failed, next } => (failed, next),
            State::Deactivated if !by_hand => return Err("not_activated"),
            State::Tainted { made } if !by_hand && made >= MOST => return Err("activation"),
            State::Tainted { made } if !by_hand => (0, made + 1),
            State::Tainted { .. } | State::Deactivated => (0, 1),
        };
        // A probe takes its step before it asks for what it needs.
        let fails = self.failures[tool] > 0;
        self.failures[tool] -= usize::from(fails);
        let lacks = tool == NEEDY && self.obtain(plan, LINE, false).is_err();
        // What failed for want of another is no attempt of its own.
        let failed = failed + u32::from(fails && !lacks);
        let state = &mut self.plans[plan].states[tool];
        if fails || lacks {
            *state = State::None { failed, next };
            return Err("activation");
        }
        *state = State::Alive { made: next };
        self.counts[tool].activated += 1;
        Ok(())
    }

    fn execute(&mut self, plan: usize, tool: usize) -> Result<(), Code> {
        self.enter(plan)?;
        self.obtain(plan, tool, false)?;
        self.counts[tool].executions += 1;
        Ok(())
    }

    /// The caller goes at its first await: before the execution where the activation is not its own to poll.
    fn abandon(&mut self, plan: usize, tool: usize) -> Result<(), Code> {
        self.enter(plan)?;
        let was_alive = matches!(self.plans[plan].states[tool], State::Alive { .. });
        self.obtain(plan, tool, false)?;
        self.counts[tool].executions += u64::from(was_alive || tool != OFF_THREAD);
        Ok(())
    }

    fn taint(&mut self, plan: usize, tool: usize) {
        if let State::Alive { made } = self.plans[plan].states[tool] {
            self.counts[tool].deactivations += 1;
            self.plans[plan].states[tool] = State::Tainted { made };
        }
    }

    fn deactivate(&mut self, plan: usize, tool: usize) -> bool {
        let alive = matches!(self.plans[plan].states[tool], State::Alive { .. });
        if alive {
            self.counts[tool].deactivations += 1;
            self.plans[plan].states[tool] = State::Deactivated;
        }
        alive
    }

    /// P4, P8: everything goes once, the first reason wins, and it flows down.
    fn end(&mut self, plan: usize, reason: EndReason) {
        if self.plans[plan].ended.is_some() {
            return;
        }
        self.plans[plan].ended = Some(reason);
        for tool in 0..NAMES.len() {
            self.deactivate(plan, tool);
        }
        if plan == 0 {
            let below =
                if reason == EndReason::Cancelled { reason } else { EndReason::ParentEnded };
            (1..self.plans.len()).for_each(|child| self.end(child, below));
        }
    }

    fn alive(&self) -> u64 {
        let states = self.plans.iter().flat_map(|plan| &plan.states);
        states.filter(|state| matches!(state, State::Alive { .. })).count() as u64
    }
}

// ===== the real thing =====

struct Real {
    fixture: Fixture,
    probes: Vec<Probe>,
    plans: Vec<(PlanHandle, Option<Plan>)>,
}

impl Real {
    async fn new(keeper: Keeper) -> Self {
        let line = Probe::new(NAMES[LINE]);
        let mut probes = vec![
            Probe::new(NAMES[0]),
            Probe::new(NAMES[OFF_THREAD]).off_thread(),
            Probe::new(NAMES[NEEDY]).needs(&line),
        ];
        let tools: Vec<_> = probes.iter().collect();
        let builder = ToolRuntime::builder().keeper(keeper);
        let fixture = Fixture::with(builder, &tools).await.track(&line);
        probes.push(line);
        let plan = fixture.plan();
        Self { plans: vec![(plan.handle(), Some(plan))], fixture, probes }
    }

    async fn execute(&self, plan: usize, tool: usize) -> String {
        match self.plans[plan].0.execute(NAMES[tool], json!({})).await {
            Ok(result) => result.code().to_owned(),
            Err(error) => code(&error),
        }
    }
}

fn code(error: &CallError) -> String {
    error.code().to_string()
}

/// Carries the operation out on both, and compares what they say.
async fn step(model: &mut Model, real: &mut Real, op: Op) {
    let exists = |plan: usize, real: &Real| plan < real.plans.len();
    match op {
        Op::Execute(plan, tool) if exists(plan, real) => {
            let expected = model.execute(plan, tool).err().unwrap_or("ok");
            assert_eq!(real.execute(plan, tool).await, expected);
        }
        Op::Taint(plan, tool) if exists(plan, real) => {
            let expected = model.execute(plan, tool);
            if expected.is_ok() {
                model.taint(plan, tool);
            }
            drop(real.probes[tool].clone().taints(true));
            assert_eq!(real.execute(plan, tool).await, expected.err().unwrap_or("ok"));
            drop(real.probes[tool].clone().taints(false));
        }
        Op::ExecuteBadly(plan, tool, how) if exists(plan, real) => {
            let failure = match how {
                How::Err => "execution",
                How::Panic => "panic",
            };
            let expected = model.execute(plan, tool).err().unwrap_or(failure);
            drop(real.probes[tool].clone().on_execute(how.step()));
            assert_eq!(real.execute(plan, tool).await, expected);
            drop(real.probes[tool].clone().on_execute(Step::Ok));
        }
        Op::Abandon(plan, tool) if exists(plan, real) => {
            // P2: what it asked for goes on without it, once.
            let probe = &real.probes[tool];
            let call = real.plans[plan].0.execute(NAMES[tool], json!({}));
            drop(probe.clone().on_execute(Step::Yield(1)));
            drop(cut(call, 1).await);
            drop(probe.clone().on_execute(Step::Ok));
            model.abandon(plan, tool).unwrap_or_default();
        }
        Op::Activate(plan, tool) if exists(plan, real) => {
            let ended = model.plans[plan].ended.map(Model::ended_code);
            let expected = ended.map_or_else(|| model.obtain(plan, tool, true), Err);
            let activated = real.plans[plan].0.activate(NAMES[tool]).await;
            let expected = expected.err().map(ToOwned::to_owned);
            assert_eq!(activated.err().as_ref().map(code), expected);
        }
        Op::Deactivate(plan, tool) if exists(plan, real) => {
            let expected = model.deactivate(plan, tool);
            assert_eq!(real.plans[plan].0.deactivate(NAMES[tool]).await, expected);
        }
        Op::FailNext(tool, times, how) => {
            let steps = std::iter::repeat_n(how.step(), times).chain([Step::Ok]);
            let probe = real.probes[tool].clone();
            drop(probe.on_activate(steps.collect::<Vec<_>>()));
            model.failures[tool] = times;
        }
        Op::BeginChild if real.plans.len() < 3 => {
            let child = real.plans[0].0.begin_child(PlanOptions::new());
            assert_eq!(child.is_err(), model.plans[0].ended.is_some());
            if let Ok(child) = child {
                model.plans.push(PlanModel::new());
                real.plans.push((child.handle(), Some(child)));
            }
        }
        Op::Cancel(plan) if exists(plan, real) => {
            model.end(plan, EndReason::Cancelled);
            real.plans[plan].0.cancel();
        }
        Op::Finish(plan) if exists(plan, real) => {
            if let Some(owner) = real.plans[plan].1.take() {
                model.end(plan, EndReason::Finished);
                let report = owner.finish().await;
                assert!(report.unsettled().is_empty(), "{report:?}");
            }
        }
        Op::Fail(plan) if exists(plan, real) => {
            if let Some(owner) = real.plans[plan].1.take() {
                model.end(plan, EndReason::Failed);
                let report = owner.fail().await;
                assert!(report.errors().is_empty(), "{report:?}");
            }
        }
        Op::Drop(plan) if exists(plan, real) && real.plans[plan].1.take().is_some() => {
            model.end(plan, EndReason::Dropped);
        }
        _ => {}
    }
}

fn agree(model: &Model, real: &Real) {
    for (plan, (handle, _)) in model.plans.iter().zip(&real.plans) {
        assert_eq!(handle.end_reason(), plan.ended);
        assert_eq!(handle.traces().len(), plan.calls);
    }
    for (expected, probe) in model.counts.iter().zip(&real.probes) {
        let counts = probe.counts();
        let counts = Counts {
            activated: counts.activated,
            executions: counts.executions,
            deactivations: counts.deactivations,
        };
        assert_eq!(counts, *expected, "{probe:?}");
    }
    assert_eq!(real.fixture.stats().open, model.alive());
}

proptest! {
    // A failure prints its smallest case, which becomes a test of its own.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn p1_p3_p4_p8_random_operations_agree_with_the_model(ops in ops()) {
        quiet_probes();
        let host = paused();
        host.block_on(async {
            let mut model = Model::new();
            let mut real = Real::new(Keeper::on(host.handle().clone())).await;
            for op in ops {
                step(&mut model, &mut real, op).await;
                at_rest().await;
                agree(&model, &real);
            }
            drop(real.plans);
            real.fixture.end().await;
        });
    }
}
