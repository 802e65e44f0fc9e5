//! What a plan sees of a registry that changes under way: nothing until it syncs.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Barrier, Mutex};

use proptest::prelude::*;
use serde_json::{Value, json};
use tokio_test::{assert_pending, assert_ready, task};
use tokio_util::sync::CancellationToken;
use toolscope::test_util::{Probe, Step};
use toolscope::{
    ActivationContext, ApprovalRequest, Approver, CallError, DeactivationContext, Decision,
    EventKind, Keeper, OutcomeCode, Plan, PlanHandle, PlanOptions, Provider, Tool, ToolCapability,
    ToolDescriptor, ToolExecutionContext, ToolFailure, ToolInstance, ToolOutput, ToolRuntime,
    ToolRuntimeError, async_trait,
};

use crate::cut;
use crate::hooks::{Called, block_on, until};
use crate::name::name;
use crate::registry::{described, names, told, tool};
use crate::support::{Fixture, at_rest, paused};

const NOTHING: [Vec<&str>; 3] = [vec![], vec![], vec![]];

// ===== editions of a tool =====

/// One of several definitions of a tool. All share a probe, which sees when two are alive at once;
/// an execution gives the number of its edition.
pub(crate) struct Edition {
    tool: Arc<dyn Tool>,
    descriptor: ToolDescriptor,
    number: u64,
}

impl Edition {
    fn of(probe: &Probe, number: u64) -> Self {
        let tool = Arc::new(probe.tool());
        let descriptor = tool.descriptor().clone().description(format!("edition {number}"));
        Self { tool, descriptor, number }
    }
}

pub(crate) fn edition(probe: &Probe, number: u64) -> Arc<dyn Tool> {
    Arc::new(Edition::of(probe, number))
}

#[async_trait]
impl Tool for Edition {
    fn descriptor(&self) -> &ToolDescriptor {
        &self.descriptor
    }

    fn immediate(&self) -> Option<Arc<dyn ToolInstance>> {
        let instance = self.tool.immediate()?;
        Some(Arc::new(EditionInstance { instance, number: self.number }))
    }

    async fn activate(
        &self,
        ctx: &ActivationContext,
    ) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        let instance = self.tool.activate(ctx).await?;
        Ok(Arc::new(EditionInstance { instance, number: self.number }))
    }
}

struct EditionInstance {
    instance: Arc<dyn ToolInstance>,
    number: u64,
}

#[async_trait]
impl ToolInstance for EditionInstance {
    async fn execute(
        &self,
        ctx: &ToolExecutionContext,
        input: &Value,
    ) -> Result<ToolOutput, ToolFailure> {
        self.instance.execute(ctx, input).await?;
        Ok(ToolOutput::new(json!(self.number)))
    }

    async fn deactivate(&self, ctx: &DeactivationContext) -> Result<(), ToolFailure> {
        self.instance.deactivate(ctx).await
    }
}

/// A runtime with the first edition of a probe's tool, from the source `s`.
async fn first_edition(probe: &Probe) -> Fixture {
    let fixture = Fixture::with(paused(), &[]).await.track(probe);
    publish(&fixture, probe, 1);
    fixture
}

/// The source `s` has that edition and nothing else.
fn publish(fixture: &Fixture, probe: &Probe, number: u64) {
    fixture.registry().replace_source("s", vec![edition(probe, number)]).unwrap();
}

fn withdraw(fixture: &Fixture) {
    fixture.registry().replace_source("s", Vec::new()).unwrap();
}

async fn run(plan: &PlanHandle) -> Called {
    plan.execute("tool", json!({})).await
}

/// The number of the edition that ran.
#[track_caller]
fn ran(called: Called) -> u64 {
    let result = called.unwrap();
    assert!(result.success, "{result:?}");
    result.output.as_u64().unwrap()
}

#[track_caller]
fn code<T: std::fmt::Debug>(called: Result<T, CallError>) -> OutcomeCode {
    called.unwrap_err().code()
}

// ===== until it syncs =====

#[tokio::test(start_paused = true)]
async fn a_plan_s_tools_do_not_change_before_it_syncs() {
    let probe = Probe::new("tool");
    let fixture = first_edition(&probe).await;
    fixture.registry().register(tool("gone")).unwrap();
    let plan = fixture.plan();
    publish(&fixture, &probe, 2);
    fixture.registry().register(tool("new")).unwrap();
    assert!(fixture.registry().remove("gone"));
    assert_eq!(names(plan.tools()), ["local/tool", "local/gone"]);
    assert_eq!(plan.tools().get("tool").unwrap().description, "edition 1");
    assert_eq!(ran(run(&plan).await), 1);
    assert!(plan.execute("gone", json!({})).await.unwrap().success);
    assert_eq!(code(plan.execute("new", json!({})).await), OutcomeCode::NotFound);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_sync_says_what_is_different() {
    let probe = Probe::new("tool");
    let fixture = first_edition(&probe).await;
    let registry = fixture.registry();
    for name in ["gone", "same", "gone2"] {
        registry.register(tool(name)).unwrap();
    }
    let plan = fixture.plan();
    publish(&fixture, &probe, 2);
    for gone in ["gone2", "gone"] {
        assert!(registry.remove(gone));
    }
    for name in ["new2", "new1"] {
        registry.register(tool(name)).unwrap();
    }
    let changes = plan.sync_tools();
    let added = vec!["local/new2", "local/new1"];
    let removed = vec!["local/gone", "local/gone2"];
    assert_eq!(told(&changes), [added, removed, vec!["local/tool"]]);
    assert_eq!(names(plan.tools()), ["local/tool", "local/same", "local/new2", "local/new1"]);
    assert_eq!(plan.tools().get("tool").unwrap().description, "edition 2");
    assert_eq!(told(&plan.sync_tools()), NOTHING);
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_sync_with_what_is_the_same_changes_nothing() {
    let probe = Probe::new("tool");
    let fixture = first_edition(&probe).await;
    let plan = fixture.plan();
    let before: *const _ = plan.tools();
    assert!(plan.sync_tools().is_empty());
    assert!(std::ptr::eq(before, plan.tools()));
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_came_and_went_between_two_syncs_is_not_told() {
    let probe = Probe::new("tool");
    let fixture = first_edition(&probe).await;
    let plan = fixture.plan();
    fixture.registry().register(tool("short")).unwrap();
    assert!(fixture.registry().remove("short"));
    assert_eq!(told(&plan.sync_tools()), NOTHING);
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_plan_that_has_ended_can_be_synced_and_runs_nothing() {
    let probe = Probe::new("tool");
    let fixture = first_edition(&probe).await;
    let plan = fixture.plan();
    let handle = plan.handle();
    plan.finish().await;
    publish(&fixture, &probe, 2);
    handle.sync_tools();
    assert_eq!(code(run(&handle).await), OutcomeCode::PlanEnded);
    assert_eq!(fixture.end().await.started, 0);
}

/// A plan that lives long has a long memory of tools, and little stack to end on.
#[test]
fn p9_a_plan_that_synced_often_ends_as_any_other() {
    let thread = std::thread::Builder::new().stack_size(256 * 1024);
    let ended = thread.spawn(|| {
        block_on(async {
            let fixture = Fixture::new(&[]).await;
            let plan = fixture.plan();
            for round in 0..3_000_u32 {
                let text = round.to_string();
                let changes =
                    fixture.registry().replace_source("s", vec![described("tool", &text)]);
                assert_eq!(told(&plan.sync_tools()), told(&changes.unwrap()));
            }
            assert_eq!(code(plan.execute("gone", json!({})).await), OutcomeCode::NotFound);
            assert_eq!(code(plan.execute("tool", json!({})).await), OutcomeCode::Activation);
            assert_eq!(plan.traces()[1].tool, "local/tool");
            plan.finish().await;
            fixture
        })
        .end_by_drop();
    });
    ended.unwrap().join().unwrap();
}

// ===== active and the same =====

#[tokio::test(start_paused = true)]
async fn p1_what_is_active_and_the_same_stays() {
    let probe = Probe::new("tool");
    let fixture = first_edition(&probe).await;
    let plan = fixture.plan();
    assert_eq!(ran(run(&plan).await), 1);
    publish(&fixture, &probe, 1);
    assert_eq!(told(&plan.sync_tools()), NOTHING);
    assert_eq!(ran(run(&plan).await), 1);
    assert_eq!(probe.counts().activations, 1);
    let report = plan.finish().await;
    assert_eq!(report.deactivations().len(), 1);
    fixture.end().await;
}

/// The same definition of another tool: what is active is not touched, and what comes later is the
/// new one.
#[tokio::test(start_paused = true)]
async fn p1_a_plan_keeps_its_instance_when_the_tool_behind_it_is_another() {
    let (old, new) = (Probe::new("tool"), Probe::new("tool"));
    let fixture = first_edition(&old).await.track(&new);
    let plan = fixture.plan();
    assert_eq!(ran(run(&plan).await), 1);
    publish(&fixture, &new, 1);
    assert_eq!(told(&plan.sync_tools()), NOTHING);
    assert_eq!(ran(run(&plan).await), 1);
    assert_eq!((old.counts().executions, new.counts().executions), (2, 0));
    assert!(plan.deactivate("tool").await);
    plan.activate("tool").await.unwrap();
    assert_eq!(ran(run(&plan).await), 1);
    assert_eq!((old.counts().executions, new.counts().executions), (2, 1));
    assert_eq!((old.counts().activations, new.counts().activations), (1, 1));
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_tool_that_is_the_same_keeps_its_limit_of_calls_at_once() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").max_concurrent(1).on_execute(Step::Until(latch.clone()));
    let fixture = first_edition(&probe).await;
    let (one, other) = (fixture.plan(), fixture.plan());
    let mut first = task::spawn(run(&one));
    assert_pending!(first.poll());
    publish(&fixture, &probe, 1);
    other.sync_tools();
    let mut second = task::spawn(run(&other));
    assert_pending!(second.poll());
    assert_eq!(probe.counts().executions, 1, "the permits are those of the old one");
    latch.cancel();
    assert_eq!(ran(assert_ready!(first.poll())), 1);
    assert_eq!(ran(second.await), 1);
    drop(first);
    drop((one, other));
    fixture.end().await;
}

/// A change and a change back are no change.
#[tokio::test(start_paused = true)]
async fn p1_what_is_the_same_again_stays() {
    let probe = Probe::new("tool");
    let fixture = first_edition(&probe).await;
    let plan = fixture.plan();
    assert_eq!(ran(run(&plan).await), 1);
    publish(&fixture, &probe, 2);
    publish(&fixture, &probe, 1);
    assert_eq!(told(&plan.sync_tools()), NOTHING);
    assert_eq!(ran(run(&plan).await), 1);
    assert_eq!(probe.counts().activations, 1);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p1_what_is_the_same_again_after_a_sync_between_stays() {
    let probe = Probe::new("tool");
    let fixture = first_edition(&probe).await;
    let plan = fixture.plan();
    assert_eq!(ran(run(&plan).await), 1);
    publish(&fixture, &probe, 2);
    plan.sync_tools();
    assert_eq!(code(run(&plan).await), OutcomeCode::DefinitionChanged);
    publish(&fixture, &probe, 1);
    assert_eq!(told(&plan.sync_tools())[2], ["local/tool"]);
    assert_eq!(ran(run(&plan).await), 1);
    assert_eq!(probe.counts().activations, 1);
    plan.finish().await;
    fixture.end().await;
}

// ===== removed =====

#[tokio::test(start_paused = true)]
async fn what_is_active_and_removed_can_be_called_and_deactivated() {
    let probe = Probe::new("tool");
    let fixture = first_edition(&probe).await;
    let plan = fixture.plan();
    assert_eq!(ran(run(&plan).await), 1);
    withdraw(&fixture);
    assert_eq!(told(&plan.sync_tools()), [vec![], vec!["local/tool"], vec![]]);
    assert_eq!(names(plan.tools()), [""; 0]);
    for text in ["tool", "local/tool", "local__tool"] {
        assert_eq!(ran(plan.execute(text, json!({})).await), 1);
    }
    plan.activate("tool").await.unwrap();
    assert_eq!(probe.counts().activations, 1);
    assert!(plan.deactivate("tool").await);
    assert_eq!(code(run(&plan).await), OutcomeCode::NotFound);
    assert_eq!(code(plan.activate("tool").await), OutcomeCode::NotFound);
    assert!(!plan.deactivate("tool").await);
    assert_eq!((probe.counts().activations, probe.counts().executions), (1, 4));
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_what_is_not_active_and_removed_is_not_found() {
    let probe = Probe::new("tool");
    let fixture = first_edition(&probe).await;
    fixture.registry().register(tool("tools")).unwrap();
    let plan = fixture.plan();
    withdraw(&fixture);
    plan.sync_tools();
    let error = run(&plan).await.unwrap_err();
    let CallError::Runtime(ToolRuntimeError::NotFound { name: asked, nearest, .. }) = error else {
        panic!("another error: {error}");
    };
    assert_eq!((asked.as_str(), nearest.as_slice()), ("tool", &[name("tools")][..]));
    assert_eq!(code(plan.activate("tool").await), OutcomeCode::NotFound);
    assert!(!plan.deactivate("tool").await);
    plan.finish().await;
    assert_eq!(fixture.end().await.started, 0);
}

#[tokio::test(start_paused = true)]
async fn what_is_tainted_and_removed_is_not_found() {
    let probe = Probe::new("tool").taints(true);
    let fixture = first_edition(&probe).await;
    let plan = fixture.plan();
    assert_eq!(ran(run(&plan).await), 1);
    withdraw(&fixture);
    plan.sync_tools();
    assert_eq!(code(run(&plan).await), OutcomeCode::NotFound);
    assert_eq!(probe.counts().activations, 1);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p1_what_is_active_and_comes_again_as_it_was_stays() {
    for synced_between in [false, true] {
        let probe = Probe::new("tool");
        let fixture = first_edition(&probe).await;
        let plan = fixture.plan();
        assert_eq!(ran(run(&plan).await), 1);
        withdraw(&fixture);
        if synced_between {
            plan.sync_tools();
        }
        publish(&fixture, &probe, 1);
        let added = if synced_between { vec!["local/tool"] } else { vec![] };
        assert_eq!(told(&plan.sync_tools()), [added, vec![], vec![]]);
        assert_eq!(ran(run(&plan).await), 1);
        assert_eq!(probe.counts().activations, 1);
        plan.finish().await;
        fixture.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_active_and_comes_again_as_another_has_changed() {
    for synced_between in [false, true] {
        let probe = Probe::new("tool");
        let fixture = first_edition(&probe).await;
        let plan = fixture.plan();
        assert_eq!(ran(run(&plan).await), 1);
        withdraw(&fixture);
        if synced_between {
            plan.sync_tools();
        }
        publish(&fixture, &probe, 2);
        let changes = plan.sync_tools();
        // It was gone for the plan, or it never was.
        let at = if synced_between { 0 } else { 2 };
        let mut expected = NOTHING;
        expected[at] = vec!["local/tool"];
        assert_eq!(told(&changes), expected);
        assert_eq!(code(run(&plan).await), OutcomeCode::DefinitionChanged);
        assert!(plan.deactivate("tool").await);
        plan.activate("tool").await.unwrap();
        assert_eq!(ran(run(&plan).await), 2);
        assert_eq!(probe.counts().activations, 2);
        plan.finish().await;
        fixture.end().await;
    }
}

/// The text of a removed name may come to stand for another tool.
#[tokio::test(start_paused = true)]
async fn a_text_stands_for_the_latest_tool_that_has_it() {
    let (old, new) = (Probe::new("a/b"), Probe::new("local/a__b"));
    let fixture = Fixture::with(paused(), &[]).await.track(&old).track(&new);
    fixture.registry().register_arc(edition(&old, 1)).unwrap();
    let plan = fixture.plan();
    assert_eq!(ran(plan.execute("a__b", json!({})).await), 1);
    assert!(fixture.registry().remove("a/b"));
    fixture.registry().register_arc(edition(&new, 2)).unwrap();
    plan.sync_tools();
    assert_eq!(ran(plan.execute("a__b", json!({})).await), 2);
    assert_eq!(ran(plan.execute("a/b", json!({})).await), 1, "it is active");
    assert!(plan.deactivate("a__b").await);
    assert_eq!(code(plan.execute("a__b", json!({})).await), OutcomeCode::NotActivated);
    assert_eq!(ran(plan.execute("a/b", json!({})).await), 1);
    let tools: Vec<_> = plan.traces().into_iter().map(|trace| trace.tool).collect();
    assert_eq!(tools, ["a/b", "local/a__b", "a/b", "local/a__b", "a/b"]);
    plan.finish().await;
    fixture.end().await;
}

// ===== active and changed =====

#[tokio::test(start_paused = true)]
async fn p12_what_is_active_and_changed_is_refused_until_it_is_renewed() {
    let probe = Probe::new("tool");
    let fixture = first_edition(&probe).await;
    let plan = fixture.plan();
    assert_eq!(ran(run(&plan).await), 1);
    publish(&fixture, &probe, 2);
    assert_eq!(ran(run(&plan).await), 1, "the plan has not synced");
    assert_eq!(told(&plan.sync_tools()), [vec![], vec![], vec!["local/tool"]]);

    let error = run(&plan).await.unwrap_err();
    assert_eq!(error.code().as_str(), "definition_changed");
    assert!(error.to_string().contains("`local/tool`"), "{error}");
    assert_eq!(code(plan.activate("tool").await), OutcomeCode::DefinitionChanged);
    assert_eq!(probe.counts().executions, 2);

    assert!(plan.deactivate("tool").await);
    assert_eq!(code(run(&plan).await), OutcomeCode::NotActivated);
    assert_eq!(probe.counts().activations, 1);

    plan.activate("tool").await.unwrap();
    assert_eq!(ran(run(&plan).await), 2);
    assert_eq!((probe.counts().activations, probe.counts().executions), (2, 3));
    let report = plan.finish().await;
    let generations: Vec<_> = report.deactivations().iter().map(|it| it.generation).collect();
    assert_eq!(generations, [1, 2]);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_changed_before_it_was_active_is_the_new_one() {
    let probe = Probe::new("tool");
    let fixture = first_edition(&probe).await;
    let plan = fixture.plan();
    publish(&fixture, &probe, 2);
    plan.sync_tools();
    assert_eq!(ran(run(&plan).await), 2);
    assert_eq!(probe.counts().activations, 1);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_was_tainted_before_it_changed_is_replaced_by_the_new_one() {
    let probe = Probe::new("tool").taints(true);
    let fixture = first_edition(&probe).await;
    let plan = fixture.plan();
    assert_eq!(ran(run(&plan).await), 1);
    drop(probe.clone().taints(false));
    publish(&fixture, &probe, 2);
    plan.sync_tools();
    assert_eq!(ran(run(&plan).await), 2);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_change_in_one_plan_is_none_in_another() {
    let probe = Probe::new("tool");
    let fixture = first_edition(&probe).await;
    let (synced, other) = (fixture.plan(), fixture.plan());
    assert_eq!(ran(run(&synced).await), 1);
    assert_eq!(ran(run(&other).await), 1);
    publish(&fixture, &probe, 2);
    synced.sync_tools();
    let later = fixture.plan();
    assert_eq!(code(run(&synced).await), OutcomeCode::DefinitionChanged);
    assert_eq!(ran(run(&other).await), 1);
    assert_eq!(ran(run(&later).await), 2);
    drop((synced, other, later));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_reader_that_became_a_writer_is_refused_in_a_read_only_plan() {
    let probe = Probe::new("tool").capability(ToolCapability::read_only());
    let fixture = first_edition(&probe).await;
    let plan = fixture.begin(PlanOptions::new().read_only()).unwrap();
    assert_eq!(ran(run(&plan).await), 1);
    publish(&fixture, &probe.clone().capability(ToolCapability::writes()), 1);
    assert_eq!(ran(run(&plan).await), 1, "the plan goes by the old one, which is active");
    assert_eq!(told(&plan.sync_tools())[2], ["local/tool"]);
    assert_eq!(code(run(&plan).await), OutcomeCode::AccessDenied);
    assert_eq!(code(plan.activate("tool").await), OutcomeCode::AccessDenied);
    assert_eq!(probe.counts().executions, 2);
    plan.finish().await;
    fixture.end().await;
}

/// Counts how often it is asked, and allows the tool for the rest of the plan.
#[derive(Clone, Default)]
struct Allows(Arc<Mutex<Vec<String>>>);

#[async_trait]
impl Approver for Allows {
    async fn decide(&self, request: &ApprovalRequest) -> Result<Decision, ToolFailure> {
        self.0.lock().unwrap().push(request.description.clone());
        Ok(Decision::ToolForPlan)
    }
}

/// cases/peers.md: the definition changes after the approval.
#[tokio::test(start_paused = true)]
async fn a_tool_that_changed_is_asked_about_again() {
    let asks = ToolCapability::writes().human_approval_required();
    let probe = Probe::new("tool").capability(asks).immediate();
    let fixture = first_edition(&probe).await;
    let allows = Allows::default();
    let plan = fixture.begin(PlanOptions::new().approver(allows.clone())).unwrap();
    for _ in 0..2 {
        assert_eq!(ran(run(&plan).await), 1);
    }
    publish(&fixture, &probe, 2);
    assert_eq!(ran(run(&plan).await), 1);
    plan.sync_tools();
    for _ in 0..2 {
        assert_eq!(ran(run(&plan).await), 2);
    }
    assert_eq!(*allows.0.lock().unwrap(), ["edition 1", "edition 2"]);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_quota_of_a_tool_is_that_of_its_name() {
    let probe = Probe::new("tool").immediate();
    let fixture = first_edition(&probe).await;
    let plan = fixture.begin(PlanOptions::new().max_calls_of(name("tool"), 2)).unwrap();
    assert_eq!(ran(run(&plan).await), 1);
    publish(&fixture, &probe, 2);
    plan.sync_tools();
    assert_eq!(ran(run(&plan).await), 2);
    assert_eq!(code(run(&plan).await), OutcomeCode::LimitExceeded);
    plan.finish().await;
    fixture.end().await;
}

// ===== under way =====

#[tokio::test(start_paused = true)]
async fn a_call_in_flight_ends_with_the_tool_that_it_began_with() {
    for removed in [false, true] {
        let latch = CancellationToken::new();
        let probe = Probe::new("tool").on_execute(Step::Until(latch.clone()));
        let fixture = first_edition(&probe).await;
        let plan = fixture.plan();
        let mut called = task::spawn(run(&plan));
        assert_pending!(called.poll());
        if removed {
            withdraw(&fixture);
        } else {
            publish(&fixture, &probe, 2);
        }
        plan.sync_tools();
        assert_pending!(called.poll());
        latch.cancel();
        assert_eq!(ran(assert_ready!(called.poll())), 1);
        drop(called);
        assert_eq!(plan.traces()[0].tool, "local/tool");
        plan.finish().await;
        fixture.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn p1_a_tool_that_changed_is_renewed_once_its_calls_have_ended() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").on_execute(Step::Until(latch.clone()));
    let fixture = first_edition(&probe).await;
    let plan = fixture.plan();
    let mut called = task::spawn(run(&plan));
    assert_pending!(called.poll());
    publish(&fixture, &probe, 2);
    plan.sync_tools();
    let mut renewed = task::spawn(async {
        assert!(plan.deactivate("tool").await);
        plan.activate("tool").await
    });
    assert_pending!(renewed.poll());
    assert_eq!(probe.counts().deactivations, 0, "a call is running");
    latch.cancel();
    assert_eq!(ran(assert_ready!(called.poll())), 1);
    renewed.await.unwrap();
    assert_eq!(ran(run(&plan).await), 2);
    assert_eq!(probe.counts().activations, 2);
    drop(called);
    plan.finish().await;
    fixture.end().await;
}

/// A probe whose activation waits, a plan, and a call that waits for it.
async fn activating() -> (Probe, CancellationToken, Fixture, Plan) {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").on_activate([Step::Until(latch.clone()), Step::Ok]);
    let fixture = first_edition(&probe).await;
    let plan = fixture.plan();
    (probe, latch, fixture, plan)
}

#[tokio::test(start_paused = true)]
async fn p1_what_changes_during_its_activation_serves_those_who_came_before() {
    let (probe, latch, fixture, plan) = activating().await;
    let handle = plan.handle();
    let mut before = task::spawn(run(&handle));
    assert_pending!(before.poll());
    publish(&fixture, &probe, 2);
    plan.sync_tools();
    let mut after = task::spawn(run(&handle));
    assert_pending!(after.poll());
    assert_eq!(probe.counts().activations, 1);
    latch.cancel();
    assert_eq!(ran(before.await), 1);
    assert_eq!(code(after.await), OutcomeCode::DefinitionChanged);
    assert_eq!((probe.counts().activations, probe.counts().executions), (1, 1));
    assert!(plan.deactivate("tool").await);
    plan.activate("tool").await.unwrap();
    assert_eq!(ran(run(&plan).await), 2);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p1_what_changes_during_its_activation_can_be_renewed_at_once() {
    let (probe, latch, fixture, plan) = activating().await;
    let handle = plan.handle();
    let mut before = task::spawn(run(&handle));
    assert_pending!(before.poll());
    publish(&fixture, &probe, 2);
    plan.sync_tools();
    let mut deactivated = task::spawn(handle.deactivate("tool"));
    assert_pending!(deactivated.poll());
    let mut activated = task::spawn(handle.activate("tool"));
    assert_pending!(activated.poll());
    latch.cancel();
    assert!(deactivated.await);
    assert_eq!(code(before.await), OutcomeCode::NotActivated);
    activated.await.unwrap();
    assert_eq!(ran(run(&plan).await), 2);
    assert_eq!(probe.counts().activations, 2);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p1_what_is_removed_during_its_activation_stays_usable() {
    let (probe, latch, fixture, plan) = activating().await;
    let handle = plan.handle();
    let mut before = task::spawn(run(&handle));
    assert_pending!(before.poll());
    withdraw(&fixture);
    plan.sync_tools();
    latch.cancel();
    assert_eq!(ran(before.await), 1);
    assert_eq!(ran(run(&plan).await), 1);
    assert_eq!(probe.counts().activations, 1);
    assert!(plan.deactivate("tool").await);
    assert_eq!(code(run(&plan).await), OutcomeCode::NotFound);
    plan.finish().await;
    fixture.end().await;
}

/// An activation under way can be deactivated, also when its tool is gone.
#[tokio::test(start_paused = true)]
async fn p1_what_is_removed_during_its_activation_can_be_deactivated() {
    let (probe, latch, fixture, plan) = activating().await;
    let handle = plan.handle();
    let mut before = task::spawn(run(&handle));
    assert_pending!(before.poll());
    withdraw(&fixture);
    plan.sync_tools();
    let mut deactivated = task::spawn(handle.deactivate("tool"));
    assert_pending!(deactivated.poll(), "there is an activation to wait for");
    latch.cancel();
    assert!(deactivated.await);
    assert_eq!(code(before.await), OutcomeCode::NotActivated);
    assert_eq!((probe.counts().activations, probe.counts().executions), (1, 0));
    assert_eq!(code(run(&plan).await), OutcomeCode::NotFound);
    plan.finish().await;
    fixture.end().await;
}

/// The activation is there in a moment, and what is active and removed can be called.
#[tokio::test(start_paused = true)]
async fn p1_a_call_of_what_was_removed_during_its_activation_waits_for_it() {
    let (probe, latch, fixture, plan) = activating().await;
    let handle = plan.handle();
    let mut before = task::spawn(run(&handle));
    assert_pending!(before.poll());
    withdraw(&fixture);
    plan.sync_tools();
    let mut after = task::spawn(run(&handle));
    assert_pending!(after.poll(), "there is an activation to wait for");
    latch.cancel();
    assert_eq!(ran(before.await), 1);
    assert_eq!(ran(after.await), 1);
    assert_eq!(probe.counts().activations, 1);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p1_a_call_that_resolved_its_tool_before_the_change_gets_that_one_or_none() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").on_execute([Step::Until(latch.clone()), Step::Ok]);
    let fixture = first_edition(&probe).await;
    let plan = fixture.begin(PlanOptions::new().max_concurrent(1)).unwrap();
    let handle = plan.handle();
    let mut holds = task::spawn(run(&handle));
    assert_pending!(holds.poll());
    let mut waits = task::spawn(run(&handle));
    assert_pending!(waits.poll(), "it waits for a permit of the plan");
    publish(&fixture, &probe, 2);
    plan.sync_tools();
    let mut renewed = task::spawn(async {
        assert!(plan.deactivate("tool").await);
        plan.activate("tool").await.unwrap();
    });
    assert_pending!(renewed.poll());
    latch.cancel();
    assert_eq!(ran(assert_ready!(holds.poll())), 1);
    renewed.await;
    assert_eq!(code(waits.await), OutcomeCode::DefinitionChanged);
    assert_eq!((probe.counts().activations, probe.counts().executions), (2, 1));
    drop(holds);
    plan.finish().await;
    fixture.end().await;
}

// ===== immediate tools =====

#[tokio::test(start_paused = true)]
async fn an_immediate_tool_switches_at_once() {
    let probe = Probe::new("tool").immediate();
    let fixture = first_edition(&probe).await;
    let plan = fixture.plan();
    assert_eq!(ran(run(&plan).await), 1);
    publish(&fixture, &probe, 2);
    assert_eq!(ran(run(&plan).await), 1);
    assert_eq!(told(&plan.sync_tools())[2], ["local/tool"]);
    assert_eq!(ran(run(&plan).await), 2);
    withdraw(&fixture);
    assert_eq!(ran(run(&plan).await), 2);
    plan.sync_tools();
    assert_eq!(code(run(&plan).await), OutcomeCode::NotFound);
    publish(&fixture, &probe, 3);
    plan.sync_tools();
    assert_eq!(ran(run(&plan).await), 3);
    plan.finish().await;
    assert_eq!(fixture.end().await.started, 0);
}

#[tokio::test(start_paused = true)]
async fn p4_a_managed_tool_may_become_an_immediate_one() {
    let (managed, immediate) = (Probe::new("tool"), Probe::new("tool").immediate());
    let fixture = first_edition(&managed).await;
    let plan = fixture.plan();
    assert_eq!(ran(run(&plan).await), 1);
    publish(&fixture, &immediate, 2);
    plan.sync_tools();
    assert_eq!(ran(run(&plan).await), 2);
    assert_eq!(managed.counts().deactivations, 0, "it may have calls of others");
    assert!(plan.deactivate("tool").await);
    assert_eq!(managed.counts().deactivations, 1);
    assert_eq!(ran(run(&plan).await), 2);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p4_an_immediate_tool_may_become_a_managed_one() {
    let (immediate, managed) = (Probe::new("tool").immediate(), Probe::new("tool"));
    let fixture = first_edition(&immediate).await.track(&managed);
    let plan = fixture.plan();
    assert_eq!(ran(run(&plan).await), 1);
    publish(&fixture, &managed, 2);
    plan.sync_tools();
    assert_eq!(ran(run(&plan).await), 2);
    assert!(plan.deactivate("tool").await);
    plan.finish().await;
    fixture.end().await;
}

// ===== children =====

#[tokio::test(start_paused = true)]
async fn p15_a_child_goes_by_the_tools_of_its_parent() {
    let probe = Probe::new("tool");
    let fixture = first_edition(&probe).await;
    let plan = fixture.plan();
    let child = plan.begin_child(PlanOptions::new()).unwrap();
    let grandchild = child.begin_child(PlanOptions::new()).unwrap();
    fixture.registry().register(tool("new")).unwrap();
    publish(&fixture, &probe, 2);
    for plan in [&grandchild, &child] {
        assert_eq!(told(&plan.sync_tools()), NOTHING, "the parent has not synced");
        assert_eq!(names(plan.tools()), ["local/tool"]);
        assert_eq!(code(plan.execute("new", json!({})).await), OutcomeCode::NotFound);
    }
    let begun_later = plan.begin_child(PlanOptions::new()).unwrap();
    assert_eq!(names(begun_later.tools()), ["local/tool"]);

    let changes = [vec!["local/new"], vec![], vec!["local/tool"]];
    assert_eq!(told(&plan.sync_tools()), changes);
    assert_eq!(told(&grandchild.sync_tools()), NOTHING, "its own parent has not synced");
    assert_eq!(told(&child.sync_tools()), changes);
    assert_eq!(told(&grandchild.sync_tools()), changes);
    for plan in [&plan, &child, &grandchild] {
        assert_eq!(ran(run(plan).await), 2);
        assert!(plan.execute("new", json!({})).await.unwrap().success);
    }
    drop((begun_later, grandchild, child, plan));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_that_syncs_loses_what_its_parent_lost() {
    let probe = Probe::new("tool");
    let fixture = first_edition(&probe).await;
    let plan = fixture.plan();
    let child = plan.begin_child(PlanOptions::new()).unwrap();
    assert_eq!(ran(run(&plan).await), 1);
    withdraw(&fixture);
    plan.sync_tools();
    child.sync_tools();
    assert_eq!(code(run(&child).await), OutcomeCode::NotFound, "active is it in the parent alone");
    assert_eq!(ran(run(&plan).await), 1);
    let later = plan.begin_child(PlanOptions::new()).unwrap();
    assert_eq!(names(later.tools()), [""; 0]);
    assert_eq!(code(run(&later).await), OutcomeCode::NotFound);
    drop((child, later, plan));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_s_instance_and_its_parent_s_are_renewed_each_for_itself() {
    let probe = Probe::new("tool");
    let fixture = first_edition(&probe).await;
    let plan = fixture.plan();
    let child = plan.begin_child(PlanOptions::new()).unwrap();
    assert_eq!(ran(run(&plan).await), 1);
    assert_eq!(ran(run(&child).await), 1);
    publish(&fixture, &probe, 2);
    plan.sync_tools();
    assert_eq!(code(run(&plan).await), OutcomeCode::DefinitionChanged);
    assert_eq!(ran(run(&child).await), 1);
    child.sync_tools();
    assert_eq!(code(run(&child).await), OutcomeCode::DefinitionChanged);
    assert!(child.deactivate("tool").await);
    child.activate("tool").await.unwrap();
    assert_eq!(ran(run(&child).await), 2);
    assert_eq!(code(run(&plan).await), OutcomeCode::DefinitionChanged);
    drop((child, plan));
    fixture.end().await;
}

// ===== what is told =====

#[tokio::test(start_paused = true)]
async fn p13_the_traces_of_a_tool_that_is_gone_keep_its_name() {
    let probe = Probe::new("tool");
    let fixture = first_edition(&probe).await;
    fixture.registry().register(tool("short")).unwrap();
    let plan = fixture.plan();
    let mut events = plan.subscribe();
    assert_eq!(ran(run(&plan).await), 1);
    assert!(plan.execute("short", json!({})).await.unwrap().success);
    withdraw(&fixture);
    assert!(fixture.registry().remove("short"));
    plan.sync_tools();
    assert_eq!(ran(plan.execute("local__tool", json!({})).await), 1);
    assert_eq!(code(plan.execute("short", json!({})).await), OutcomeCode::NotFound);
    fixture.registry().register(tool("other")).unwrap();
    plan.sync_tools();
    let expected = ["local/tool", "local/short", "local/tool", "short"];
    let tools: Vec<_> = plan.traces().into_iter().map(|trace| trace.tool).collect();
    assert_eq!(tools, expected);
    let report = plan.finish().await;
    let tools: Vec<_> = report.traces().into_iter().map(|trace| trace.tool).collect();
    assert_eq!(tools, expected);
    assert_eq!(report.deactivations()[0].name, "local/tool");
    let mut finished = Vec::new();
    while let Some(event) = events.next().await {
        if let EventKind::Finished(trace) = event.kind {
            assert_eq!(event.name.as_ref(), Some(&trace.tool));
            finished.push(trace.tool);
        }
    }
    assert_eq!(finished, expected);
    fixture.end().await;
}

/// cases/peers.md: what a model is told of one tool does not change because of another.
#[tokio::test(start_paused = true)]
async fn a_model_is_told_of_other_tools_after_a_sync_only() {
    let probe = Probe::new("tool");
    let fixture = first_edition(&probe).await;
    let plan = fixture.plan();
    let definitions = || plan.definitions(Provider::Anthropic);
    let before = definitions().to_string();
    fixture.registry().register(tool("a/new")).unwrap();
    assert_eq!(definitions().to_string(), before);
    plan.sync_tools();
    let after = definitions();
    assert_eq!(
        (after[0]["name"].as_str(), after[1]["name"].as_str()),
        (Some("a__new"), Some("local__tool"))
    );
    assert_eq!(json!([after[1]]).to_string(), before);
    drop(plan);
    fixture.end().await;
}

// ===== at once =====

/// Of many that sync at the same time each change is told to one, and none goes back.
#[tokio::test(start_paused = true)]
async fn syncs_at_once_tell_each_change_once_and_never_go_back() {
    const EDITIONS: u64 = 4_000;
    let fixture = Fixture::paused(&[]).await;
    let publish = |number: u64| {
        let new = vec![described("tool", &number.to_string())];
        fixture.registry().replace_source("s", new).unwrap();
    };
    publish(0);
    let plan = fixture.plan();
    let (told, over) = (AtomicU64::new(0), AtomicBool::new(false));
    let sync = |plan: &PlanHandle| -> u64 {
        told.fetch_add(plan.sync_tools().changed.len() as u64, SeqCst);
        plan.tools().get("tool").unwrap().description.parse().unwrap()
    };
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                let mut newest = 0;
                while !over.load(SeqCst) {
                    let number = sync(&plan);
                    assert!(number >= newest, "{number} after {newest}");
                    newest = number;
                }
            });
        }
        for number in 1..=EDITIONS {
            publish(number);
            if number % 16 == 0 {
                std::thread::yield_now();
            }
        }
        over.store(true, SeqCst);
    });
    assert_eq!(sync(&plan), EDITIONS);
    assert!((1..=EDITIONS).contains(&told.load(SeqCst)));
    drop(plan);
    fixture.end().await;
}

/// What several that sync at the same time are told is, together, what one would be told.
#[tokio::test(start_paused = true)]
async fn of_syncs_at_once_one_is_told() {
    let fixture = Fixture::paused(&[]).await;
    let plan = fixture.plan();
    for round in 0..200 {
        fixture.registry().register(tool(&format!("tool{round}"))).unwrap();
        let (start, told) = (Barrier::new(3), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    start.wait();
                    told.fetch_add(plan.sync_tools().added.len() as u64, SeqCst);
                });
            }
        });
        assert_eq!(told.load(SeqCst), 1);
    }
    drop(plan);
    fixture.end().await;
}

/// Calls, renewals, syncs and replacements from many threads: nothing is activated twice, and every
/// result is of an edition that the plan had.
#[test]
fn p1_a_tool_that_is_replaced_while_it_is_called_balances() {
    const EDITIONS: u64 = 60;
    let host = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let host = host.unwrap();
    host.block_on(async {
        let probe = Probe::new("tool").on_execute(Step::Yield(1));
        let fixture = Fixture::new(&[]).await.track(&probe);
        publish(&fixture, &probe, 0);
        let plan = fixture.plan();
        let over = Arc::new(AtomicBool::new(false));
        let callers: Vec<_> = (0..4_u64)
            .map(|caller| {
                let (plan, over) = (plan.handle(), Arc::clone(&over));
                host.spawn(async move {
                    let mut ran = 0;
                    while !over.load(SeqCst) {
                        match run(&plan).await {
                            Ok(result) => {
                                assert!(result.output.as_u64().unwrap() < EDITIONS, "{result:?}");
                                ran += 1;
                            }
                            Err(error) => assert!(
                                matches!(
                                    error.code(),
                                    OutcomeCode::DefinitionChanged | OutcomeCode::NotActivated
                                ),
                                "{error}"
                            ),
                        }
                        if caller == 0 {
                            plan.sync_tools();
                            plan.deactivate("tool").await;
                            plan.activate("tool").await.unwrap_or_default();
                        }
                        tokio::task::yield_now().await;
                    }
                    ran
                })
            })
            .collect();
        for number in 1..EDITIONS {
            let executions = probe.counts().executions;
            publish(&fixture, &probe, number);
            until(|| probe.counts().executions > executions).await;
        }
        over.store(true, SeqCst);
        let mut ran = 0;
        for caller in callers {
            ran += caller.await.unwrap();
        }
        plan.finish().await;
        let executions = probe.counts().executions;
        assert_eq!(executions, ran, "every execution has a result");
        fixture.end().await;
    });
}

// ===== against a model =====

/// Two managed tools and an immediate one, with two definitions each.
const NAMES: [&str; 3] = ["a", "b", "now"];
const NOW: usize = 2;
/// The last is a child of the first.
const PLANS: usize = 3;

#[derive(Clone, Debug)]
enum Op {
    Register(usize, u64),
    Remove(usize),
    /// The source has these editions and nothing else.
    Replace(Vec<(usize, u64)>),
    Sync(usize),
    Execute(usize, usize),
    Activate(usize, usize),
    Deactivate(usize, usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let (plan, tool, edition) = (0..PLANS, 0..NAMES.len(), 1..3_u64);
    let in_plan = (plan.clone(), tool.clone());
    let one = (tool.clone(), edition);
    let op = prop_oneof![
        3 => one.clone().prop_map(|(tool, edition)| Op::Register(tool, edition)),
        2 => tool.prop_map(Op::Remove),
        4 => proptest::collection::vec(one, 0..4).prop_map(Op::Replace),
        5 => plan.prop_map(Op::Sync),
        6 => in_plan.clone().prop_map(|(plan, tool)| Op::Execute(plan, tool)),
        3 => in_plan.clone().prop_map(|(plan, tool)| Op::Activate(plan, tool)),
        3 => in_plan.prop_map(|(plan, tool)| Op::Deactivate(plan, tool)),
    ];
    proptest::collection::vec(op, 1..60)
}

/// The edition of each tool, where there is one.
type Editions = [Option<u64>; 3];

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Never,
    Active(u64),
    Deactivated,
}

#[derive(Clone, Debug)]
struct PlanModel {
    tools: Editions,
    states: [State; 3],
    calls: Vec<String>,
}

#[derive(Debug, Default)]
struct Model {
    registered: Editions,
    /// Whether it came from the source.
    of_source: [bool; 3],
    /// The tools in the order in which they were first registered.
    order: Vec<usize>,
    plans: Vec<PlanModel>,
    activations: [u64; 3],
    executions: [u64; 3],
}

/// What is added, removed and changed, by name.
type Told = [Vec<String>; 3];

impl Model {
    fn new() -> Self {
        let plan = PlanModel { tools: [None; 3], states: [State::Never; 3], calls: Vec::new() };
        Self { plans: vec![plan; PLANS], ..Self::default() }
    }

    fn know(&mut self, tool: usize) {
        if !self.order.contains(&tool) {
            self.order.push(tool);
        }
    }

    fn changes(&self, before: &Editions, after: &Editions) -> Told {
        let of = |fits: &dyn Fn(usize) -> bool| {
            let tools = self.order.iter().filter(|tool| fits(**tool));
            tools.map(|tool| format!("local/{}", NAMES[*tool])).collect()
        };
        [
            of(&|tool| before[tool].is_none() && after[tool].is_some()),
            of(&|tool| before[tool].is_some() && after[tool].is_none()),
            of(&|tool| {
                before[tool].is_some() && after[tool].is_some() && before[tool] != after[tool]
            }),
        ]
    }

    fn register(&mut self, tool: usize, edition: u64) -> bool {
        if self.registered[tool].is_some() {
            return false;
        }
        self.know(tool);
        (self.registered[tool], self.of_source[tool]) = (Some(edition), false);
        true
    }

    fn replace(&mut self, set: &[(usize, u64)]) -> Option<Told> {
        let doubled = |at: usize| set[..at].iter().any(|(tool, _)| *tool == set[at].0);
        let taken = |tool: usize| self.registered[tool].is_some() && !self.of_source[tool];
        if (0..set.len()).any(|at| doubled(at) || taken(set[at].0)) {
            return None;
        }
        let before = self.registered;
        for tool in 0..NAMES.len() {
            if self.of_source[tool] {
                (self.registered[tool], self.of_source[tool]) = (None, false);
            }
        }
        for (tool, edition) in set {
            self.know(*tool);
            (self.registered[*tool], self.of_source[*tool]) = (Some(*edition), true);
        }
        Some(self.changes(&before, &self.registered))
    }

    fn sync(&mut self, plan: usize) -> Told {
        let to = if plan == PLANS - 1 { self.plans[0].tools } else { self.registered };
        let before = std::mem::replace(&mut self.plans[plan].tools, to);
        self.changes(&before, &to)
    }

    /// The edition that is there to be called.
    fn obtain(&mut self, plan: usize, tool: usize, by_hand: bool) -> Result<u64, &'static str> {
        let PlanModel { tools, states, .. } = &mut self.plans[plan];
        match (tools[tool], states[tool]) {
            (None, State::Active(edition)) => Ok(edition),
            (None, _) => Err("not_found"),
            (Some(edition), _) if tool == NOW => Ok(edition),
            (Some(edition), State::Active(active)) if active == edition => Ok(edition),
            (Some(_), State::Active(_)) => Err("definition_changed"),
            (Some(_), State::Deactivated) if !by_hand => Err("not_activated"),
            (Some(edition), _) => {
                states[tool] = State::Active(edition);
                self.activations[tool] += 1;
                Ok(edition)
            }
        }
    }

    fn execute(&mut self, plan: usize, tool: usize) -> Result<u64, &'static str> {
        let obtained = self.obtain(plan, tool, false);
        let named = if obtained == Err("not_found") { "" } else { "local/" };
        self.plans[plan].calls.push(format!("{named}{}", NAMES[tool]));
        self.executions[tool] += u64::from(obtained.is_ok());
        obtained
    }

    fn deactivate(&mut self, plan: usize, tool: usize) -> bool {
        let active = matches!(self.plans[plan].states[tool], State::Active(_));
        if active {
            self.plans[plan].states[tool] = State::Deactivated;
        }
        active
    }

    fn active(&self) -> u64 {
        let states = self.plans.iter().flat_map(|plan| plan.states);
        states.filter(|state| matches!(state, State::Active(_))).count() as u64
    }
}

fn owned(changes: &toolscope::ToolChanges) -> Told {
    told(changes).map(|names| names.into_iter().map(ToOwned::to_owned).collect())
}

/// Carries the operation out on both, and compares what they say.
async fn step(model: &mut Model, fixture: &Fixture, probes: &[Probe], plans: &[Plan], op: Op) {
    match op {
        Op::Register(tool, number) => {
            let registered = fixture.registry().register_arc(edition(&probes[tool], number));
            assert_eq!(registered.is_ok(), model.register(tool, number));
        }
        Op::Remove(tool) => {
            assert_eq!(fixture.registry().remove(NAMES[tool]), model.registered[tool].is_some());
            (model.registered[tool], model.of_source[tool]) = (None, false);
        }
        Op::Replace(set) => {
            let tools = set.iter().map(|(tool, number)| edition(&probes[*tool], *number));
            let replaced = fixture.registry().replace_source("s", tools.collect());
            assert_eq!(replaced.ok().as_ref().map(owned), model.replace(&set));
        }
        Op::Sync(plan) => assert_eq!(owned(&plans[plan].sync_tools()), model.sync(plan)),
        Op::Execute(plan, tool) => {
            let called = plans[plan].execute(NAMES[tool], json!({})).await;
            let called = called.map(|result| result.output.as_u64().unwrap());
            let called = called.map_err(|error| error.code().as_str());
            assert_eq!(called, model.execute(plan, tool));
        }
        Op::Activate(plan, tool) => {
            let activated = plans[plan].activate(NAMES[tool]).await;
            let activated = activated.map_err(|error| error.code().as_str());
            assert_eq!(activated, model.obtain(plan, tool, true).map(|_| ()));
        }
        Op::Deactivate(plan, tool) => {
            let deactivated = plans[plan].deactivate(NAMES[tool]).await;
            assert_eq!(deactivated, model.deactivate(plan, tool));
        }
    }
}

fn agree(model: &Model, fixture: &Fixture, probes: &[Probe], plans: &[Plan]) {
    for (plan, expected) in plans.iter().zip(&model.plans) {
        let known = plan.tools().descriptors();
        let known: Vec<_> = known.map(|it| (it.name.name(), it.description.as_str())).collect();
        let wanted = model.order.iter().filter_map(|tool| {
            expected.tools[*tool].map(|number| (NAMES[*tool], format!("edition {number}")))
        });
        let wanted: Vec<_> = wanted.collect();
        let wanted: Vec<_> = wanted.iter().map(|(name, text)| (*name, text.as_str())).collect();
        assert_eq!(known, wanted);
        let calls: Vec<_> = plan.traces().into_iter().map(|trace| trace.tool).collect();
        assert_eq!(calls, expected.calls);
    }
    for (tool, probe) in probes.iter().enumerate() {
        let counts = probe.counts();
        assert_eq!(counts.activations, model.activations[tool], "{probe:?}");
        assert_eq!(counts.executions, model.executions[tool], "{probe:?}");
    }
    assert_eq!(fixture.stats().open, model.active());
}

proptest! {
    // A failure prints its smallest case, which becomes a test of its own.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn p1_p4_a_registry_and_its_plans_agree_with_the_model(ops in ops()) {
        let host = cut::paused();
        host.block_on(async {
            let probes = [
                Probe::new(NAMES[0]),
                Probe::new(NAMES[1]),
                Probe::new(NAMES[NOW]).immediate(),
            ];
            let builder = ToolRuntime::builder().keeper(Keeper::on(host.handle().clone()));
            let mut fixture = Fixture::with(builder, &[]).await;
            for probe in &probes[..NOW] {
                fixture = fixture.track(probe);
            }
            let mut plans = vec![fixture.plan(), fixture.plan()];
            plans.push(plans[0].begin_child(PlanOptions::new()).unwrap());
            let mut model = Model::new();
            for op in ops {
                step(&mut model, &fixture, &probes, &plans, op).await;
                at_rest().await;
                agree(&model, &fixture, &probes, &plans);
            }
            drop(plans);
            fixture.end().await;
        });
    }
}
