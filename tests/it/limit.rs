//! What a plan may use: rules, quotas, calls and activations at once, the size of an output.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use proptest::prelude::*;
use serde_json::{Map, Number, Value, json};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tokio_test::{assert_pending, assert_ready, task};
use tokio_util::sync::CancellationToken;
use toolscope::test_util::{Probe, ProbeCounts, Step};
use toolscope::{
    ActivationContext, ActivationPhase, Before, CallError, CallOptions, Deadlines, Decision,
    EventKind, FunctionTool, Layer, LayerCall, OutcomeCode, OutputCheck, Plan, PlanHandle,
    PlanOptions, Provider, SourceKind, Tool, ToolCapability, ToolDescriptor, ToolExecutionContext,
    ToolFailure, ToolFilter, ToolInstance, ToolName, ToolOutput, ToolResult, ToolRuntime,
    ToolRuntimeError, ToolSpec, ToolType, Wait, async_trait,
};

use crate::approval::Answers;
use crate::call::{relay, relayed, traced};
use crate::cut::cut;
use crate::hooks::{Hooked, activation_error, call};
use crate::support::{Fixture, paused};

const SECOND: Duration = Duration::from_secs(1);

fn name(name: &str) -> ToolName {
    name.parse().unwrap()
}

// ===== rules =====

/// An immediate tool with any descriptor, which counts its executions.
struct Counted(ToolDescriptor, Arc<AtomicUsize>);

struct Counting(Arc<AtomicUsize>);

#[async_trait]
impl Tool for Counted {
    fn descriptor(&self) -> &ToolDescriptor {
        &self.0
    }

    fn immediate(&self) -> Option<Arc<dyn ToolInstance>> {
        Some(Arc::new(Counting(Arc::clone(&self.1))))
    }

    async fn activate(&self, _: &ActivationContext) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        Ok(Arc::new(Counting(Arc::clone(&self.1))))
    }
}

#[async_trait]
impl ToolInstance for Counting {
    async fn execute(
        &self,
        _: &ToolExecutionContext,
        _: &Value,
    ) -> Result<ToolOutput, ToolFailure> {
        self.0.fetch_add(1, SeqCst);
        Ok(ToolOutput::default())
    }
}

/// One of each kind that a filter can tell from another.
const TOOLS: [&str; 5] =
    ["local/plain", "files/read", "srv:files/read", "srv:web/search", "check/lint"];

/// A runtime with all of them, and the count of their executions.
async fn shelf(defaults: PlanOptions) -> (Fixture, Arc<AtomicUsize>) {
    let ran = Arc::new(AtomicUsize::new(0));
    let mut builder = paused().plan_defaults(defaults);
    let kinds = [
        (SourceKind::Custom, ToolType::Tool),
        (SourceKind::Builtin, ToolType::Tool),
        (SourceKind::Mcp, ToolType::Tool),
        (SourceKind::Mcp, ToolType::Tool),
        (SourceKind::Skill, ToolType::Validation),
    ];
    for (tool, (source, tool_type)) in TOOLS.into_iter().zip(kinds) {
        let mut descriptor = ToolDescriptor::new(name(tool)).source(source);
        descriptor.tool_type = tool_type;
        builder = builder.tool(Counted(descriptor, Arc::clone(&ran)));
    }
    (Fixture::with(builder, &[]).await, ran)
}

/// Calls every tool; the places in [`TOOLS`] of those that ran. All others got that code, and did
/// not run.
async fn allowed(plan: &PlanHandle, ran: &AtomicUsize, otherwise: OutcomeCode) -> Vec<usize> {
    let (mut allowed, before) = (Vec::new(), ran.load(SeqCst));
    for (at, tool) in TOOLS.into_iter().enumerate() {
        match plan.execute(tool, json!({})).await {
            Ok(result) => {
                assert!(result.success);
                allowed.push(at);
            }
            Err(error) => assert_eq!(error.code(), otherwise),
        }
    }
    assert_eq!(ran.load(SeqCst) - before, allowed.len(), "one ran that was refused");
    allowed
}

/// The tools that a model is told of, by their places.
fn defined(plan: &PlanHandle) -> Vec<usize> {
    let definitions = plan.definitions(Provider::Anthropic);
    let told: BTreeSet<_> = definitions
        .as_array()
        .unwrap()
        .iter()
        .map(|tool| tool["name"].as_str().unwrap().to_owned())
        .collect();
    (0..TOOLS.len()).filter(|at| told.contains(&name(TOOLS[*at]).provider_safe())).collect()
}

/// Filters, and the tools that they fit.
fn filters() -> Vec<(ToolFilter, Vec<usize>)> {
    let filter = ToolFilter::new;
    vec![
        (filter(), vec![0, 1, 2, 3, 4]),
        (name("plain").into(), vec![0]),
        (name("files/read").into(), vec![1]),
        (filter().server("srv"), vec![2, 3]),
        (filter().namespace("files"), vec![1, 2]),
        (filter().namespace("files").server("srv"), vec![2]),
        (filter().tool_type(ToolType::Validation), vec![4]),
        (filter().tool_type(ToolType::Tool), vec![0, 1, 2, 3]),
        (filter().source(SourceKind::Mcp), vec![2, 3]),
        (filter().source(SourceKind::Builtin), vec![1]),
        (filter().namespace("files").source(SourceKind::Skill), vec![]),
    ]
}

fn others(places: &[usize]) -> Vec<usize> {
    (0..TOOLS.len()).filter(|at| !places.contains(at)).collect()
}

#[tokio::test(start_paused = true)]
async fn p12_only_what_a_filter_fits_runs() {
    let (fixture, ran) = shelf(PlanOptions::new()).await;
    for (filter, fits) in filters() {
        let plan = fixture.begin(PlanOptions::new().only(filter.clone())).unwrap();
        assert_eq!(allowed(&plan, &ran, OutcomeCode::AccessDenied).await, fits, "{filter:?}");
        assert_eq!(defined(&plan), fits, "{filter:?}");
        assert_eq!(plan.traces().len(), TOOLS.len());
    }
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_what_a_filter_denies_does_not_run() {
    let (fixture, ran) = shelf(PlanOptions::new()).await;
    for (filter, fits) in filters() {
        let plan = fixture.begin(PlanOptions::new().deny(filter.clone())).unwrap();
        let rest = others(&fits);
        assert_eq!(allowed(&plan, &ran, OutcomeCode::AccessDenied).await, rest, "{filter:?}");
        assert_eq!(defined(&plan), rest, "{filter:?}");
    }
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_what_a_filter_asks_for_is_not_run_unasked() {
    let (fixture, ran) = shelf(PlanOptions::new()).await;
    for (filter, fits) in filters() {
        let plan = fixture.begin(PlanOptions::new().ask(filter.clone())).unwrap();
        let rest = others(&fits);
        assert_eq!(allowed(&plan, &ran, OutcomeCode::ApprovalRequired).await, rest, "{filter:?}");
        assert_eq!(defined(&plan), [0, 1, 2, 3, 4], "a model may ask for them");
    }
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn of_the_filters_of_one_plan_any_is_enough() {
    let (fixture, ran) = shelf(PlanOptions::new()).await;
    let options = PlanOptions::new().only(name("plain")).only(ToolFilter::new().server("srv"));
    let plan = fixture.begin(options).unwrap();
    assert_eq!(allowed(&plan, &ran, OutcomeCode::AccessDenied).await, [0, 2, 3]);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_a_denial_goes_before_all_that_allows() {
    let (fixture, ran) = shelf(PlanOptions::new()).await;
    let files = || ToolFilter::new().namespace("files");
    let options =
        PlanOptions::new().only(files()).ask(files()).deny(ToolFilter::new().server("srv"));
    let approver = Answers::new([Decision::Once]);
    let plan = fixture.begin(options.approver(approver.clone())).unwrap();
    assert_eq!(allowed(&plan, &ran, OutcomeCode::AccessDenied).await, [1]);
    assert_eq!(approver.asked(), 1);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_has_the_rules_of_its_parents_too() {
    let (fixture, ran) = shelf(PlanOptions::new()).await;
    let files = ToolFilter::new().namespace("files");
    let parent = fixture.begin(PlanOptions::new().deny(name("plain"))).unwrap();
    let child = parent.begin_child(PlanOptions::new().only(files)).unwrap();
    let all = PlanOptions::new().only(ToolFilter::new());
    let grandchild = child.begin_child(all.deny(name("srv:files/read"))).unwrap();
    for (plan, expected) in
        [(&parent, vec![1, 2, 3, 4]), (&child, vec![1, 2]), (&grandchild, vec![1])]
    {
        assert_eq!(allowed(plan, &ran, OutcomeCode::AccessDenied).await, expected);
        assert_eq!(defined(plan), expected);
    }
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_asks_where_its_parent_asks() {
    let (fixture, ran) = shelf(PlanOptions::new()).await;
    let approver = Answers::new([Decision::deny("no")]);
    let options = PlanOptions::new().ask(name("plain")).approver(approver.clone());
    let parent = fixture.begin(options).unwrap();
    let child = parent.begin_child(PlanOptions::new().ask(name("check/lint"))).unwrap();
    assert_eq!(allowed(&child, &ran, OutcomeCode::ApprovalDenied).await, [1, 2, 3]);
    assert_eq!(allowed(&parent, &ran, OutcomeCode::ApprovalDenied).await, [1, 2, 3, 4]);
    assert_eq!(approver.asked(), 3);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_the_rules_of_the_runtime_hold_with_those_of_a_plan() {
    let defaults = PlanOptions::new().only(ToolFilter::new().tool_type(ToolType::Tool));
    let defaults = defaults.deny(name("files/read")).ask(name("srv:web/search"));
    let (fixture, ran) = shelf(defaults).await;
    // In a plan that says nothing, in one that tries to allow more, and in one that allows less.
    let expected = [0, 2];
    let wide = PlanOptions::new().only(ToolFilter::new());
    for options in [PlanOptions::new(), PlanOptions::new().metadata("a", 1), wide] {
        let plan = fixture.begin(options).unwrap();
        let mut ran_here = Vec::new();
        for (at, tool) in TOOLS.into_iter().enumerate() {
            if plan.execute(tool, json!({})).await.is_ok() {
                ran_here.push(at);
            }
        }
        assert_eq!(ran_here, expected);
        assert_eq!(defined(&plan), [0, 2, 3]);
    }
    let narrow = fixture.begin(PlanOptions::new().only(ToolFilter::new().server("srv"))).unwrap();
    assert!(narrow.execute("plain", json!({})).await.is_err());
    assert!(narrow.execute("srv:files/read", json!({})).await.unwrap().success);
    assert_eq!(ran.load(SeqCst), 7);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_a_rule_refuses_an_activation_by_hand_too() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().deny(name("probe"))).unwrap();
    assert_eq!(plan.activate("probe").await.unwrap_err().code(), OutcomeCode::AccessDenied);
    assert_eq!(probe.counts(), ProbeCounts::default());
    assert_eq!(fixture.end().await.started, 0);
}

#[tokio::test(start_paused = true)]
async fn p15_a_rule_refuses_a_nested_call_too() {
    let probe = Probe::new("probe");
    let fixture = Fixture::with(paused().tool(relay("relay")), &[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().only(name("relay"))).unwrap();
    let result = plan.execute("relay", relayed("probe")).await.unwrap();
    assert_eq!(result.code(), "access_denied");
    assert_eq!(probe.counts(), ProbeCounts::default());
    assert_eq!(fixture.end().await.started, 0);
}

// ===== quotas =====

#[track_caller]
fn over(error: CallError) -> String {
    match error {
        CallError::Runtime(ToolRuntimeError::LimitExceeded {
            concurrency: false, reason, ..
        }) => reason,
        other => panic!("it is over no quota: {other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn p12_a_plan_makes_no_more_calls_than_it_may() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_calls(2)).unwrap();
    for _ in 0..2 {
        assert!(plan.execute("probe", json!({})).await.unwrap().success);
    }
    let error = plan.execute("probe", json!({})).await.unwrap_err();
    assert_eq!(error.code(), OutcomeCode::LimitExceeded);
    let text = error.to_string();
    assert!(text.contains("the 2 calls that the plan may have"), "{text}");
    let CallError::Runtime(runtime_error) = &error else { panic!("{error:?}") };
    let text = runtime_error.to_model_text();
    assert!(text.starts_with("error (limit_exceeded): the 2 calls"), "{text}");
    assert!(text.ends_with("do not try again"), "{text}");
    let outcomes: Vec<_> = plan.traces().iter().map(|trace| trace.outcome).collect();
    assert_eq!(outcomes, [OutcomeCode::Ok, OutcomeCode::Ok, OutcomeCode::LimitExceeded]);
    assert_eq!(probe.counts().executions, 2);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_a_plan_that_may_make_no_calls_activates_nothing() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_calls(0)).unwrap();
    let returned = plan.execute("probe", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::LimitExceeded);
    assert_eq!(probe.counts(), ProbeCounts::default());
    assert_eq!(fixture.end().await.started, 0);
}

#[tokio::test(start_paused = true)]
async fn p12_a_plan_makes_no_more_calls_of_a_tool_than_it_may() {
    let (probe, other) = (Probe::new("probe"), Probe::new("other"));
    let fixture = Fixture::paused(&[&probe, &other]).await;
    let plan = fixture.begin(PlanOptions::new().max_calls_of(name("probe"), 2)).unwrap();
    // By whatever name it is called.
    assert!(plan.execute("probe", json!({})).await.unwrap().success);
    assert!(plan.execute("local__probe", json!({})).await.unwrap().success);
    let reason = over(plan.execute("local/probe", json!({})).await.unwrap_err());
    assert!(reason.contains("the 2 calls that the tool in this plan may have"), "{reason}");
    for _ in 0..3 {
        assert!(plan.execute("other", json!({})).await.unwrap().success);
    }
    assert_eq!((probe.counts().executions, other.counts().executions), (2, 3));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_over_one_quota_takes_no_place_of_another() {
    let (probe, other) = (Probe::new("probe"), Probe::new("other"));
    let fixture = Fixture::paused(&[&probe, &other]).await;
    let none = (name("probe"), 0);
    let orders = [
        PlanOptions::new().max_calls(1).max_calls_of(none.0.clone(), none.1),
        PlanOptions::new().max_calls_of(none.0.clone(), none.1).max_calls(1),
    ];
    for options in orders {
        let plan = fixture.begin(options).unwrap();
        over(plan.execute("probe", json!({})).await.unwrap_err());
        assert!(plan.execute("other", json!({})).await.unwrap().success);
        over(plan.execute("other", json!({})).await.unwrap_err());
    }
    assert_eq!(probe.counts(), ProbeCounts::default());
    fixture.end().await;
}

/// A runtime with that probe and a tool called `free`; a plan that may make one call.
async fn single(probe: &Probe, options: PlanOptions) -> (Fixture, Plan) {
    let free = ToolSpec::new("free").read_only().function(|(): ()| Ok(1));
    let fixture = Fixture::with(paused().tool(free), &[probe]).await;
    let plan = fixture.begin(options.max_calls(1)).unwrap();
    (fixture, plan)
}

/// Whether the one call of the plan is used up.
async fn is_used_up(plan: &PlanHandle) -> bool {
    match plan.execute("free", json!({})).await {
        Ok(result) => {
            assert!(result.success);
            over(plan.execute("free", json!({})).await.unwrap_err());
            false
        }
        Err(error) => {
            over(error);
            true
        }
    }
}

/// A call that ends with that code gives its place back, and has not run.
async fn gives_back(probe: &Probe, options: PlanOptions, code: &str) {
    let (fixture, plan) = single(probe, options).await;
    let returned = plan.execute("probe", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome.as_str(), code);
    assert!(!is_used_up(&plan).await, "it took a place");
    assert_eq!(probe.counts().executions, 0);
    fixture.end().await;
}

/// A call that ends with that code keeps its place: it has reached its tool.
async fn keeps(probe: &Probe, options: PlanOptions, code: &str) {
    let (fixture, plan) = single(probe, options).await;
    let returned = plan.execute("probe", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome.as_str(), code);
    assert!(is_used_up(&plan).await, "it gave its place back");
    assert_eq!(probe.counts().executions, 1);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_invalid_input_gives_its_place_back() {
    let (fixture, plan) = single(&Probe::new("probe"), PlanOptions::new()).await;
    let returned = plan.execute("probe", json!([])).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::InvalidInput);
    assert!(!is_used_up(&plan).await);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_text_that_is_no_json_gives_its_place_back() {
    let (fixture, plan) = single(&Probe::new("probe"), PlanOptions::new()).await;
    let returned = plan.execute_json("probe", "{", CallOptions::new()).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::InvalidInput);
    assert!(!is_used_up(&plan).await);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_refused_call_takes_no_place() {
    let probe = Probe::new("probe");
    gives_back(&probe, PlanOptions::new().read_only(), "access_denied").await;
    gives_back(&probe, PlanOptions::new().deny(name("probe")), "access_denied").await;
    gives_back(&probe, PlanOptions::new().require_checkpoints(), "checkpoint_required").await;
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_not_approved_gives_its_place_back() {
    struct Deaf;
    #[async_trait]
    impl toolscope::Approver for Deaf {
        async fn decide(&self, _: &toolscope::ApprovalRequest) -> Result<Decision, ToolFailure> {
            std::future::pending().await
        }
    }
    let probe = Probe::new("probe");
    let asks = || PlanOptions::new().ask(name("probe"));
    gives_back(&probe, asks(), "approval_required").await;
    let no = Answers::new([Decision::deny("no")]);
    gives_back(&probe, asks().approver(no), "approval_denied").await;
    gives_back(&probe, asks().approver(Deaf), "approval_denied").await;
    let broken = Answers::new([Decision::change(json!(7))]);
    gives_back(&probe, asks().approver(broken), "invalid_input").await;
}

#[tokio::test(start_paused = true)]
async fn a_call_without_a_permit_gives_its_place_back() {
    let latch = CancellationToken::new();
    let probe = Probe::new("probe").max_concurrent(1).on_execute(Step::Until(latch.clone()));
    let (fixture, plan) = single(&probe, PlanOptions::new().permit_wait(SECOND)).await;
    let other = fixture.plan();
    let mut holds = task::spawn(call(&other, "probe"));
    assert_pending!(holds.poll());
    let returned = plan.execute("probe", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::Concurrency);
    assert!(!is_used_up(&plan).await);
    latch.cancel();
    assert!(holds.await.unwrap().success);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_whose_activation_fails_gives_its_place_back() {
    for step in [Step::Err, Step::Panic, Step::YieldErr(2), Step::YieldPanic(2), Step::Never] {
        let probe = Probe::new("probe").on_activate(step);
        gives_back(&probe, PlanOptions::new(), "activation").await;
    }
    let slow = Probe::new("probe").on_activate(Step::Slow(2 * SECOND));
    let options = PlanOptions::new().call_timeout(SECOND);
    gives_back(&slow, options, "activation_timeout").await;
}

#[tokio::test(start_paused = true)]
async fn a_call_of_what_the_host_deactivated_gives_its_place_back() {
    let probe = Probe::new("probe");
    let (fixture, plan) = single(&probe, PlanOptions::new()).await;
    plan.activate("probe").await.unwrap();
    assert!(plan.deactivate("probe").await);
    let returned = plan.execute("probe", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::NotActivated);
    assert!(!is_used_up(&plan).await);
    fixture.end().await;
}

/// A call whose token is cancelled while it waits for something of its own.
async fn cancelled_while_waiting(probe: &Probe, options: PlanOptions) {
    let (fixture, plan) = single(probe, options).await;
    let other = fixture.plan();
    let mut holds = task::spawn(call(&other, "probe"));
    assert_pending!(holds.poll());
    let token = CancellationToken::new();
    let own = CallOptions::new().token(token.clone());
    let mut waits = task::spawn(plan.execute_with("probe", json!({}), own));
    assert_pending!(waits.poll());
    token.cancel();
    let returned = waits.await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::Cancelled);
    assert!(!is_used_up(&plan).await);
    drop(holds);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_cancelled_before_its_tool_runs_gives_its_place_back() {
    let in_a_permit = Probe::new("probe").max_concurrent(1).on_execute(Step::Never);
    cancelled_while_waiting(&in_a_permit, PlanOptions::new()).await;
    let in_the_activation = Probe::new("probe").on_activate(Step::Slow(SECOND));
    cancelled_while_waiting(&in_the_activation, PlanOptions::new()).await;
}

#[tokio::test(start_paused = true)]
async fn a_call_keeps_its_place_from_its_tool_s_first_poll_on() {
    let probe = || Probe::new("probe");
    keeps(&probe(), PlanOptions::new(), "ok").await;
    keeps(&probe().on_execute(Step::Err), PlanOptions::new(), "execution").await;
    keeps(&probe().on_execute(Step::Panic), PlanOptions::new(), "panic").await;
    keeps(&probe().on_execute(Step::YieldPanic(2)), PlanOptions::new(), "panic").await;
    let hangs = probe().on_execute(Step::Never);
    keeps(&hangs, PlanOptions::new().call_timeout(SECOND), "timeout").await;
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_cancelled_while_its_tool_runs_keeps_its_place() {
    let probe = Probe::new("probe").on_execute(Step::Never);
    let (fixture, plan) = single(&probe, PlanOptions::new()).await;
    let token = CancellationToken::new();
    let own = CallOptions::new().token(token.clone());
    let mut runs = task::spawn(plan.execute_with("probe", json!({}), own));
    assert_pending!(runs.poll());
    token.cancel();
    let returned = runs.await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::Cancelled);
    assert!(is_used_up(&plan).await);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_of_two_permits_can_be_dropped_at_every_await() {
    // Waits for the plan's permit, the tool's, the source's, the activation, and in the execution.
    for k in 0.. {
        let steps = [Step::Yield(1), Step::Yield(2)];
        let probe = Probe::new("probe").max_concurrent(1).on_activate(Step::Yield(2));
        let probe = probe.on_execute(steps);
        let holder = Probe::new("holder").on_execute(Step::Yield(3));
        let fixture = Fixture::with(paused(), &[&holder]).await.track(&probe);
        fixture.registry().limit_activations("source", 1);
        fixture.registry().replace_source("source", vec![Arc::new(probe.tool())]).unwrap();
        let plan = fixture.begin(PlanOptions::new().max_concurrent(1).max_calls(2)).unwrap();
        let other = fixture.plan();
        let mut holds = task::spawn(call(&plan, "holder"));
        assert_pending!(holds.poll());
        let mut holds_the_tool = task::spawn(call(&other, "probe"));
        assert_pending!(holds_the_tool.poll());
        let (held, ended, _) = tokio::join!(holds, cut(call(&plan, "probe"), k), holds_the_tool);
        assert!(held.unwrap().success);
        let codes: Vec<_> = plan.traces().iter().map(|trace| trace.outcome).collect();
        assert_eq!(codes.len(), 1 + usize::from(k > 0), "cut at {k}: {codes:?}");
        let reached = probe.counts().executions == 2;
        // Permits and, where it had not reached its tool, its place are there again.
        let mut again = task::spawn(call(&plan, "probe"));
        let again = loop {
            if let std::task::Poll::Ready(again) = again.poll() {
                break again;
            }
            tokio::task::yield_now().await;
        };
        assert_eq!(again.is_ok(), !reached, "cut at {k}: {again:?}");
        drop((plan, other));
        fixture.end().await;
        if ended.is_some() {
            assert!(k > 4, "there was nothing to cut");
            return;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_abandoned_call_gives_its_place_back_until_its_tool_runs() {
    let latch = CancellationToken::new();
    let probe = Probe::new("probe").on_activate(Step::Until(latch.clone()));
    let (fixture, plan) = single(&probe, PlanOptions::new()).await;
    assert!(cut(call(&plan, "probe"), 1).await.is_none());
    assert!(!is_used_up(&plan).await);
    latch.cancel();
    fixture.end().await;

    let probe = Probe::new("probe").on_execute(Step::Never);
    let (fixture, plan) = single(&probe, PlanOptions::new()).await;
    assert!(cut(call(&plan, "probe"), 1).await.is_none());
    assert_eq!(probe.counts().executions, 1);
    assert!(is_used_up(&plan).await);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_that_a_layer_answers_keeps_its_place() {
    struct Knows;
    #[async_trait]
    impl Layer for Knows {
        async fn before(&self, call: &LayerCall<'_>) -> Before {
            if call.tool.name == name("probe") {
                return Before::Answer(ToolOutput::new(json!(1)));
            }
            Before::Continue
        }
    }
    let probe = Probe::new("probe");
    let free = ToolSpec::new("free").read_only().function(|(): ()| Ok(1));
    let fixture = Fixture::with(paused().layer(Knows).tool(free), &[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_calls(1)).unwrap();
    assert!(plan.execute("probe", json!({})).await.unwrap().success);
    assert!(is_used_up(&plan).await);
    assert_eq!(probe.counts(), ProbeCounts::default());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_the_calls_of_a_child_count_in_its_parents_quotas() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let parent = fixture.begin(PlanOptions::new().max_calls(3)).unwrap();
    let child = parent.begin_child(PlanOptions::new().max_calls(100)).unwrap();
    let grandchild = child.begin_child(PlanOptions::new().max_calls(1)).unwrap();
    assert!(grandchild.execute("probe", json!({})).await.unwrap().success);
    let reason = over(grandchild.execute("probe", json!({})).await.unwrap_err());
    assert!(reason.contains("the 1 calls"), "{reason}");
    assert!(child.execute("probe", json!({})).await.unwrap().success);
    assert!(parent.execute("probe", json!({})).await.unwrap().success);
    for plan in [&parent, &child] {
        let reason = over(plan.execute("probe", json!({})).await.unwrap_err());
        assert!(reason.contains("the 3 calls"), "{reason}");
    }
    // A sibling begins with what its parent has left.
    let sibling = parent.begin_child(PlanOptions::new()).unwrap();
    over(sibling.execute("probe", json!({})).await.unwrap_err());
    assert_eq!(probe.counts().executions, 3);
    fixture.end().await;
}

/// What the parent refuses takes no place of the child, and what ends early gives both back.
#[tokio::test(start_paused = true)]
async fn p15_a_call_of_a_child_takes_its_place_in_all_quotas_or_in_none() {
    let probe = Probe::new("probe").on_activate([Step::Err, Step::Ok]);
    let fixture = Fixture::paused(&[&probe]).await;
    let parent = fixture.begin(PlanOptions::new().max_calls(1)).unwrap();
    let child = parent.begin_child(PlanOptions::new().max_calls(1)).unwrap();
    let error = child.execute("probe", json!({})).await.unwrap_err();
    assert_eq!(error.code(), OutcomeCode::Activation);
    assert!(parent.execute("probe", json!({})).await.unwrap().success);
    let reason = over(child.execute("probe", json!({})).await.unwrap_err());
    assert!(reason.contains("the 1 calls"), "{reason}");
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_nested_calls_count() {
    let probe = Probe::new("probe");
    let fixture = Fixture::with(paused().tool(relay("relay")), &[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_calls(3)).unwrap();
    assert!(plan.execute("relay", relayed("probe")).await.unwrap().success);
    let result = plan.execute("relay", relayed("probe")).await.unwrap();
    assert_eq!(result.code(), "limit_exceeded", "{result:?}");
    assert_eq!(probe.counts().executions, 1);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_quotas_of_the_runtime_count_each_plan_by_itself() {
    let (probe, other) = (Probe::new("probe"), Probe::new("other"));
    let defaults = PlanOptions::new().max_calls(3).max_calls_of(name("probe"), 2);
    let fixture = Fixture::with(paused().plan_defaults(defaults), &[&probe, &other]).await;
    for options in [PlanOptions::new(), PlanOptions::new().max_calls(100), PlanOptions::new()] {
        let plan = fixture.begin(options).unwrap();
        for _ in 0..2 {
            assert!(plan.execute("probe", json!({})).await.unwrap().success);
        }
        over(plan.execute("probe", json!({})).await.unwrap_err());
        assert!(plan.execute("other", json!({})).await.unwrap().success);
        over(plan.execute("other", json!({})).await.unwrap_err());
    }
    // A child has its parent's, not those of the runtime once more.
    let parent = fixture.begin(PlanOptions::new().max_calls(1)).unwrap();
    let child = parent.begin_child(PlanOptions::new()).unwrap();
    assert!(child.execute("probe", json!({})).await.unwrap().success);
    over(parent.execute("other", json!({})).await.unwrap_err());
    fixture.end().await;
}

/// How many of a thousand calls, each a task of its own, had success. The others are over a quota.
async fn race(plans: Vec<PlanHandle>, tool: &'static str) -> usize {
    let mut tasks = JoinSet::new();
    for at in 0..1000 {
        tasks.spawn(call(&plans[at % plans.len()], tool));
    }
    let mut succeeded = 0;
    while let Some(returned) = tasks.join_next().await {
        match returned.unwrap() {
            Ok(result) => succeeded += usize::from(result.success),
            Err(error) => drop(over(error)),
        }
    }
    succeeded
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p12_a_thousand_calls_at_once_go_over_no_quota() {
    let probe = Probe::new("probe").immediate().on_execute(Step::Yield(1));
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_calls(137)).unwrap();
    assert_eq!(race(vec![plan.handle()], "probe").await, 137);
    assert_eq!(probe.counts().executions, 137);
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p15_a_thousand_calls_of_children_go_over_no_quota_of_their_parent() {
    let probe = Probe::new("probe").immediate().on_execute(Step::Yield(1));
    let builder = ToolRuntime::builder().tool(relay("relay"));
    let fixture = Fixture::with(builder, &[&probe]).await;
    let options = PlanOptions::new().max_calls(500).max_calls_of(name("probe"), 137);
    let parent = fixture.begin(options).unwrap();
    let children: Vec<_> =
        (0..4).map(|_| parent.begin_child(PlanOptions::new().max_calls(50)).unwrap()).collect();
    let mut plans: Vec<_> = children.iter().map(Plan::handle).collect();
    plans.push(parent.handle());
    let succeeded = race(plans, "probe").await;
    assert_eq!(succeeded as u64, probe.counts().executions);
    assert_eq!(succeeded, 137);
    for child in &children {
        let ran = child.traces().iter().filter(|trace| trace.success()).count();
        assert!(ran <= 50, "a child made {ran} calls");
    }
    fixture.end().await;
}

/// Calls that give their place back beside calls that keep it: none is lost and none too many.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p12_places_that_are_given_back_are_neither_lost_nor_doubled() {
    const MOST: u64 = 200;
    let probe = Probe::new("probe").immediate().on_execute(Step::Yield(1));
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_calls(MOST)).unwrap();
    let mut tasks = JoinSet::new();
    for at in 0..1000 {
        let plan = plan.handle();
        tasks.spawn(async move {
            match at % 4 {
                // Invalid: gives back.
                0 | 1 => drop(plan.execute("probe", json!([])).await),
                // Dropped at its first await, in the tool: keeps.
                2 => drop(cut(call(&plan, "probe"), 1).await),
                _ => drop(call(&plan, "probe").await),
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    let ran = probe.counts().executions;
    assert!(ran <= MOST, "{ran} calls ran");
    for _ in ran..MOST {
        assert!(plan.execute("probe", json!({})).await.unwrap().success);
    }
    over(plan.execute("probe", json!({})).await.unwrap_err());
    assert_eq!(probe.counts().executions, MOST);
    fixture.end().await;
}

// ===== calls at once =====

/// How many are in there, and how many were at most.
#[derive(Clone, Default)]
struct Gauge(Arc<(AtomicUsize, AtomicUsize)>);

struct Inside(Gauge);

impl Gauge {
    fn enter(&self) -> Inside {
        let now = self.0.0.fetch_add(1, SeqCst) + 1;
        self.0.1.fetch_max(now, SeqCst);
        Inside(self.clone())
    }

    fn most(&self) -> usize {
        self.0.1.load(SeqCst)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.0.0.fetch_sub(1, SeqCst);
    }
}

/// An immediate tool that counts how many calls of it run at once.
fn gauged(spec: ToolSpec, gauge: &Gauge) -> FunctionTool {
    spec.read_only().handler_with(gauge.clone(), async |gauge: Gauge, _, (): ()| {
        let _inside = gauge.enter();
        for _ in 0..3 {
            tokio::task::yield_now().await;
        }
        Ok(())
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plan_and_a_tool_never_run_more_at_once_than_they_may() {
    let (wide, narrow) = (Gauge::default(), Gauge::default());
    let builder = ToolRuntime::builder()
        .tool(gauged(ToolSpec::new("wide"), &wide))
        .tool(gauged(ToolSpec::new("narrow").max_concurrent(2), &narrow));
    let fixture = Fixture::with(builder, &[]).await;
    let plans = [(); 2].map(|()| fixture.begin(PlanOptions::new().max_concurrent(3)).unwrap());
    let mut tasks = JoinSet::new();
    for at in 0..600 {
        let plan = plans[at % 2].handle();
        tasks.spawn(async move {
            let tool = if at % 3 == 0 { "narrow" } else { "wide" };
            // Each seventh is dropped somewhere on its way.
            let k = if at % 7 == 0 { at % 5 } else { usize::MAX };
            cut(async { plan.execute(tool, json!({})).await }, k).await
        });
    }
    while let Some(returned) = tasks.join_next().await {
        assert!(returned.unwrap().is_none_or(|returned| returned.unwrap().success));
    }
    assert!(wide.most() <= 6 && narrow.most() <= 2, "{} and {}", wide.most(), narrow.most());
    assert_eq!((wide.0.0.load(SeqCst), narrow.0.0.load(SeqCst)), (0, 0));
    // All permits are there again.
    for plan in &plans {
        let calls: Vec<_> = (0..3).map(|_| call(plan, "wide")).collect();
        for returned in futures_util::future::join_all(calls).await {
            assert!(returned.unwrap().success);
        }
    }
    fixture.end().await;
}

/// A source that was gone for a moment comes back with the same tools: what still runs of them
/// counts.
#[tokio::test(start_paused = true)]
async fn a_tool_that_is_registered_again_runs_no_more_calls_at_once_than_it_may() {
    let probe = Probe::new("probe").max_concurrent(1).on_execute([Step::Never, Step::Ok]);
    let fixture = with_source(1, &[&probe]).await;
    let (before, wait) = (fixture.plan(), PlanOptions::new().permit_wait(SECOND));
    let mut holds = task::spawn(call(&before, "probe"));
    assert_pending!(holds.poll());
    let registry = fixture.registry();
    registry.replace_source("source", tools(&[&probe])).unwrap();
    let same = fixture.begin(wait.clone()).unwrap();
    let error = same.execute("probe", json!({})).await.unwrap_err();
    assert_eq!(error.code(), OutcomeCode::Concurrency);
    registry.replace_source("source", vec![]).unwrap();
    registry.replace_source("source", tools(&[&probe])).unwrap();
    let after = fixture.begin(wait).unwrap();
    let error = after.execute("probe", json!({})).await.expect_err("two ran at once");
    assert_eq!(error.code(), OutcomeCode::Concurrency);
    drop(holds);
    fixture.end().await;
}

/// A call that waits in a queue when its plan is cancelled has not reached its tool: that the queue
/// moves on at that moment starts nothing.
#[tokio::test(start_paused = true)]
async fn p8_what_waits_for_a_permit_of_its_plan_does_not_run_after_the_cancel() {
    let holder = Probe::new("holder").immediate().on_execute(Step::UntilCancelled);
    let probe = Probe::new("probe").immediate();
    let fixture = Fixture::paused(&[&holder, &probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_concurrent(1)).unwrap();
    let mut holds = task::spawn(call(&plan, "holder"));
    let mut waits = task::spawn(call(&plan, "probe"));
    assert_pending!(holds.poll());
    assert_pending!(waits.poll());
    plan.cancel();
    assert!(assert_ready!(holds.poll()).unwrap().success);
    let returned = assert_ready!(waits.poll());
    assert_eq!(probe.counts().executions, 0, "it ran in a cancelled plan: {returned:?}");
    assert_eq!(returned.unwrap_err().code(), OutcomeCode::Cancelled);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p8_what_waits_for_a_permit_of_its_tool_does_not_run_after_the_end() {
    let steps = [Step::UntilCancelled, Step::Ok];
    let probe = Probe::new("probe").immediate().max_concurrent(1).on_execute(steps);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let handle = plan.handle();
    let mut holds = task::spawn(call(&handle, "probe"));
    let mut waits = task::spawn(call(&handle, "probe"));
    assert_pending!(holds.poll());
    assert_pending!(waits.poll());
    let mut finishes = task::spawn(plan.finish());
    assert_pending!(finishes.poll());
    assert!(assert_ready!(holds.poll()).unwrap().success);
    let returned = assert_ready!(waits.poll());
    assert_eq!(probe.counts().executions, 1, "it ran in a finished plan: {returned:?}");
    assert_eq!(returned.unwrap_err().code(), OutcomeCode::PlanEnded);
    finishes.await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_what_waits_for_a_permit_does_not_run_after_the_cancel_of_the_call() {
    let latch = CancellationToken::new();
    let probe = Probe::new("probe").max_concurrent(1).on_execute(Step::Until(latch.clone()));
    let fixture = Fixture::paused(&[&probe]).await;
    let (plan, token) = (fixture.plan(), CancellationToken::new());
    let mut holds = task::spawn(call(&plan, "probe"));
    let own = CallOptions::new().token(token.clone());
    let mut waits = task::spawn(plan.execute_with("probe", json!({}), own));
    assert_pending!(holds.poll());
    assert_pending!(waits.poll());
    token.cancel();
    latch.cancel();
    assert!(assert_ready!(holds.poll()).unwrap().success);
    let returned = assert_ready!(waits.poll());
    assert_eq!(probe.counts().executions, 1, "it ran though cancelled: {returned:?}");
    assert_eq!(returned.unwrap_err().code(), OutcomeCode::Cancelled);
    fixture.end().await;
}

// ===== activations of a source at once =====

/// A tool whose activation takes a second and counts how many do so at once.
fn slow(probe: &Probe, gauge: &Gauge) -> Arc<dyn Tool> {
    let gauge = gauge.clone();
    let hooked = Hooked::new(probe).before_activate(move |_| {
        let gauge = gauge.clone();
        async move {
            let _inside = gauge.enter();
            sleep(SECOND).await;
            Ok(())
        }
    });
    Arc::new(hooked)
}

fn tools(probes: &[&Probe]) -> Vec<Arc<dyn Tool>> {
    probes.iter().map(|probe| Arc::new(probe.tool()) as Arc<dyn Tool>).collect()
}

/// A runtime with a source of these tools that activates so many at once.
async fn with_source(at_once: usize, probes: &[&Probe]) -> Fixture {
    let fixture = Fixture::paused(&[]).await;
    fixture.registry().limit_activations("source", at_once);
    fixture.registry().replace_source("source", tools(probes)).unwrap();
    probes.iter().fold(fixture, |fixture, probe| fixture.track(probe))
}

#[tokio::test(start_paused = true)]
async fn no_more_activations_of_a_source_are_in_the_making_than_it_allows() {
    let probes = ["a", "b", "c"].map(Probe::new);
    let gauge = Gauge::default();
    let mut fixture = Fixture::paused(&[]).await;
    let registry = fixture.registry();
    registry
        .replace_source("source", probes.iter().map(|probe| slow(probe, &gauge)).collect())
        .unwrap();
    // Also when the limit comes later than the tools.
    registry.limit_activations("source", 2);
    for probe in &probes {
        fixture = fixture.track(probe);
    }
    let plans: Vec<_> = (0..3).map(|_| fixture.plan()).collect();
    let began = Instant::now();
    let calls = plans.iter().flat_map(|plan| ["a", "b", "c"].map(|tool| call(plan, tool)));
    for returned in futures_util::future::join_all(calls).await {
        assert!(returned.unwrap().success);
    }
    assert_eq!((gauge.most(), began.elapsed().as_secs()), (2, 5));
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limit_of_activations_holds_on_many_threads() {
    let gauge = Gauge::default();
    let probe = Probe::new("probe").on_activate([Step::Ok, Step::YieldErr(1), Step::Yield(2)]);
    let counted = gauge.clone();
    let hooked = Hooked::new(&probe).before_activate(move |_| {
        let gauge = counted.clone();
        async move {
            let _inside = gauge.enter();
            tokio::task::yield_now().await;
            Ok(())
        }
    });
    let fixture = Fixture::new(&[]).await.track(&probe);
    fixture.registry().limit_activations("source", 3);
    fixture.registry().replace_source("source", vec![Arc::new(hooked)]).unwrap();
    let mut tasks = JoinSet::new();
    for at in 0..200 {
        let plan = fixture.plan();
        tasks.spawn(async move {
            let k = if at % 5 == 0 { at % 4 } else { usize::MAX };
            let returned = cut(call(&plan, "probe"), k).await;
            plan.finish().await;
            returned
        });
    }
    let mut failed = 0;
    while let Some(returned) = tasks.join_next().await {
        failed += usize::from(returned.unwrap().is_some_and(|returned| returned.is_err()));
    }
    assert!(failed <= 1, "{failed} calls failed, and one activation");
    assert!((1..=3).contains(&gauge.most()), "{} at once", gauge.most());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_limit_of_activations_is_the_source_s_alone() {
    let latch = CancellationToken::new();
    let held = Probe::new("held").on_activate(Step::Until(latch.clone()));
    let (of_another, of_none) = (Probe::new("of-another"), Probe::new("of-none"));
    let fixture = with_source(1, &[&held]).await.track(&of_another).track(&of_none);
    fixture.registry().replace_source("another", tools(&[&of_another])).unwrap();
    fixture.registry().register(of_none.tool()).unwrap();
    let plan = fixture.plan();
    let mut holds = task::spawn(call(&plan, "held"));
    assert_pending!(holds.poll());
    for tool in ["of-another", "of-none"] {
        let mut goes = task::spawn(call(&plan, tool));
        assert!(assert_ready!(goes.poll()).unwrap().success, "{tool}");
    }
    latch.cancel();
    assert!(holds.await.unwrap().success);
    fixture.end().await;
}

/// What is active already needs no permit, and a call of it none either.
#[tokio::test(start_paused = true)]
async fn a_limit_of_activations_is_none_of_calls() {
    let latch = CancellationToken::new();
    let (active, held) = (Probe::new("active"), Probe::new("held"));
    let held = held.on_activate(Step::Until(latch.clone()));
    let fixture = with_source(1, &[&active, &held]).await;
    let plan = fixture.plan();
    assert!(plan.execute("active", json!({})).await.unwrap().success);
    let mut holds = task::spawn(call(&plan, "held"));
    assert_pending!(holds.poll());
    let mut goes = task::spawn(call(&plan, "active"));
    assert!(assert_ready!(goes.poll()).unwrap().success);
    latch.cancel();
    assert!(holds.await.unwrap().success);
    fixture.end().await;
}

/// A source with room for one activation, which one plan has for as long as the latch holds.
async fn full(probe: &Probe) -> (Fixture, Plan, CancellationToken) {
    let latch = CancellationToken::new();
    let holder = Probe::new("holder").on_activate(Step::Until(latch.clone()));
    let fixture = with_source(1, &[&holder, probe]).await;
    let plan = fixture.plan();
    assert!(cut(call(&plan, "holder"), 1).await.is_none());
    assert_eq!(holder.counts().activations, 1);
    (fixture, plan, latch)
}

#[tokio::test(start_paused = true)]
async fn the_wait_for_a_source_has_a_limit_and_is_no_attempt() {
    let probe = Probe::new("probe");
    let (fixture, _holder, latch) = full(&probe).await;
    let options = PlanOptions::new().permit_wait(5 * SECOND).max_attempts(1);
    let plan = fixture.begin(options).unwrap();
    for _ in 0..3 {
        let began = Instant::now();
        let error = activation_error(plan.execute("probe", json!({})).await);
        assert_eq!((error.phase(), began.elapsed().as_secs()), (ActivationPhase::NotRun, 5));
        assert!(error.to_string().contains("5s"), "{error}");
        let text = ToolRuntimeError::from(error).to_model_text();
        assert!(text.contains("try again later"), "{text}");
    }
    assert_eq!(probe.counts(), ProbeCounts::default());
    latch.cancel();
    assert!(plan.execute("probe", json!({})).await.unwrap().success);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_an_activation_that_had_no_room_gives_the_place_of_its_call_back() {
    let (probe, free) = (Probe::new("probe"), Probe::new("free"));
    let (fixture, _holder, latch) = full(&probe).await;
    let fixture = fixture.track(&free);
    fixture.registry().register(free.tool()).unwrap();
    let options = PlanOptions::new().permit_wait(SECOND).max_calls(1);
    let plan = fixture.begin(options).unwrap();
    let returned = plan.execute("probe", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::Activation);
    assert!(plan.execute("free", json!({})).await.unwrap().success);
    latch.cancel();
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p8_the_wait_for_a_source_ends_with_the_plan() {
    let probe = Probe::new("probe");
    let (fixture, _holder, latch) = full(&probe).await;
    let plan = fixture.plan();
    let handle = plan.handle();
    let mut waits = task::spawn(call(&handle, "probe"));
    assert_pending!(waits.poll());
    let began = Instant::now();
    let (returned, report) = tokio::join!(waits, plan.finish());
    assert_eq!(began.elapsed().as_secs(), 0);
    assert_eq!(returned.unwrap_err().code(), OutcomeCode::PlanEnded);
    assert!(report.unsettled().is_empty() && report.deactivations().is_empty());
    assert_eq!(probe.counts(), ProbeCounts::default());
    latch.cancel();
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_wait_for_a_source_does_not_count_as_time_of_the_activation() {
    for (works, code) in [(4, "ok"), (6, "activation")] {
        let probe = Probe::new("probe").on_activate(Step::Slow(works * SECOND));
        let (fixture, _holder, latch) = full(&probe).await;
        let deadlines = Deadlines::default().activate(5 * SECOND);
        let plan = fixture.begin(PlanOptions::new().deadlines(deadlines)).unwrap();
        let mut waits = task::spawn(call(&plan, "probe"));
        assert_pending!(waits.poll());
        sleep(20 * SECOND).await;
        latch.cancel();
        let began = Instant::now();
        let returned = waits.await;
        assert_eq!(began.elapsed().as_secs(), u64::from(works.min(5)));
        assert_eq!(traced(&plan, &returned).outcome.as_str(), code);
        fixture.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_wait_for_a_source_is_an_event() {
    let probe = Probe::new("probe");
    let (fixture, holder, latch) = full(&probe).await;
    let plan = fixture.begin(PlanOptions::new().permit_wait(SECOND)).unwrap();
    let mut events = plan.subscribe();
    drop(activation_error(plan.execute("probe", json!({})).await));
    latch.cancel();
    assert!(holder.execute("holder", json!({})).await.unwrap().success);
    assert!(plan.execute("probe", json!({})).await.unwrap().success);
    let mut told = Vec::new();
    for _ in 0..7 {
        let event = events.next().await.unwrap();
        assert_eq!(event.name.as_deref(), Some("local/probe"));
        told.push(match event.kind {
            EventKind::Waiting { on: Wait::SourcePermit, .. } => "waiting",
            EventKind::ActivationFailed { .. } => "failed",
            EventKind::Activating { attempt: 1, .. } => "activating",
            EventKind::Active { .. } => "active",
            EventKind::Executing => "executing",
            EventKind::Finished(_) => "finished",
            other => panic!("{other:?}"),
        });
    }
    let second = ["activating", "active", "executing", "finished"];
    assert_eq!(told, [&["waiting", "failed", "finished"], &second[..]].concat());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p2_an_activation_that_waits_for_its_source_goes_on_without_its_caller() {
    let probe = Probe::new("probe");
    let (fixture, _holder, latch) = full(&probe).await;
    let plan = fixture.begin(PlanOptions::new().call_timeout(SECOND)).unwrap();
    let error = plan.execute("probe", json!({})).await.unwrap_err();
    assert_eq!(error.code(), OutcomeCode::ActivationTimeout);
    assert!(cut(call(&plan, "probe"), 1).await.is_none());
    latch.cancel();
    assert!(plan.execute("probe", json!({})).await.unwrap().success);
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_activation_by_hand_waits_for_its_source_too() {
    let probe = Probe::new("probe");
    let (fixture, _holder, latch) = full(&probe).await;
    let plan = fixture.plan();
    let mut activates = task::spawn(plan.activate("probe"));
    assert_pending!(activates.poll());
    sleep(SECOND).await;
    assert_eq!(probe.counts(), ProbeCounts::default());
    latch.cancel();
    activates.await.unwrap();
    assert_eq!(probe.counts().activated, 1);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn however_an_activation_ends_its_source_has_room_again() {
    for step in [Step::Ok, Step::Err, Step::Panic, Step::YieldErr(2), Step::YieldPanic(2)] {
        let (probe, next) = (Probe::new("probe").on_activate(step), Probe::new("next"));
        let fixture = with_source(1, &[&probe, &next]).await;
        let plan = fixture.begin(PlanOptions::new().permit_wait(Duration::ZERO)).unwrap();
        drop(plan.execute("probe", json!({})).await);
        assert!(plan.execute("next", json!({})).await.unwrap().success);
        fixture.end().await;
    }
    // One that hangs: until its deadline, or the end of its plan's budget.
    let (probe, next) = (Probe::new("probe").on_activate(Step::Never), Probe::new("next"));
    let fixture = with_source(1, &[&probe, &next]).await;
    let (hangs, plan) = (fixture.plan(), fixture.plan());
    assert!(cut(call(&hangs, "probe"), 1).await.is_none());
    hangs.finish().await;
    let began = Instant::now();
    assert!(plan.execute("next", json!({})).await.unwrap().success);
    assert_eq!(began.elapsed().as_secs(), 0);
    assert_eq!(probe.counts().half_done, 1);
    fixture.end().await;
}

/// What is in the making when a limit is set counts: to set the same one again makes no room.
#[tokio::test(start_paused = true)]
async fn a_limit_of_activations_that_is_set_again_counts_what_is_in_the_making() {
    let probe = Probe::new("probe");
    let (fixture, _holder, latch) = full(&probe).await;
    fixture.registry().limit_activations("source", 1);
    let plan = fixture.begin(PlanOptions::new().permit_wait(SECOND)).unwrap();
    let returned = plan.execute("probe", json!({})).await;
    assert_eq!(probe.counts().activations, 0, "two were in the making: {returned:?}");
    latch.cancel();
    fixture.end().await;
}

/// Whoever waits has the room that a larger limit makes.
#[tokio::test(start_paused = true)]
async fn a_larger_limit_of_activations_is_for_those_that_wait_too() {
    let probe = Probe::new("probe");
    let (fixture, _holder, latch) = full(&probe).await;
    let plan = fixture.begin(PlanOptions::new().permit_wait(5 * SECOND)).unwrap();
    let mut waits = task::spawn(call(&plan, "probe"));
    assert_pending!(waits.poll());
    fixture.registry().limit_activations("source", 2);
    let returned = waits.await;
    assert!(returned.is_ok_and(|result| result.success), "it had no room");
    latch.cancel();
    fixture.end().await;
}

/// Those in the making go on; nobody begins beside them until there is room under the new limit.
#[tokio::test(start_paused = true)]
async fn a_smaller_limit_of_activations_waits_for_what_is_in_the_making() {
    let (probe, gauge) = (Probe::new("probe"), Gauge::default());
    let fixture = Fixture::paused(&[]).await.track(&probe);
    let registry = fixture.registry();
    registry.limit_activations("source", 3);
    registry.replace_source("source", vec![slow(&probe, &gauge)]).unwrap();
    let plans: Vec<_> = (0..7).map(|_| fixture.plan()).collect();
    let mut calls: Vec<_> = plans.iter().map(|plan| task::spawn(call(plan, "probe"))).collect();
    for early in &mut calls[..3] {
        assert_pending!(early.poll());
    }
    registry.limit_activations("source", 1);
    let began = Instant::now();
    for returned in futures_util::future::join_all(calls).await {
        assert!(returned.unwrap().success);
    }
    assert_eq!((gauge.most(), began.elapsed().as_secs()), (3, 5));
    fixture.end().await;
}

/// What the host gives up before it was begun is not begun.
#[tokio::test(start_paused = true)]
async fn p12_an_activation_that_is_given_up_in_the_queue_of_its_source_never_begins() {
    let probe = Probe::new("probe");
    let (fixture, _holder, latch) = full(&probe).await;
    let plan = fixture.plan();
    let mut waits = task::spawn(call(&plan, "probe"));
    assert_pending!(waits.poll());
    let mut gives_up = task::spawn(plan.deactivate("probe"));
    assert_pending!(gives_up.poll());
    latch.cancel();
    let (returned, deactivated) = tokio::join!(waits, gives_up);
    assert!(deactivated);
    assert_eq!(returned.unwrap_err().code(), OutcomeCode::NotActivated);
    assert_eq!(probe.counts(), ProbeCounts::default(), "it was begun to be undone");
    fixture.end().await;
}

/// What undoes a half-done activation is a part of it: a source that takes one at a time is not
/// asked for the next while the last one is being undone.
#[tokio::test(start_paused = true)]
async fn the_roll_back_of_an_activation_is_in_the_making_too() {
    let (probe, next) = (Probe::new("probe").on_activate(Step::Err), Probe::new("next"));
    let undone = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&undone);
    let hooked = Hooked::new(&probe).before_activate(move |ctx| {
        let undone = Arc::clone(&counted);
        ctx.defer(move || async move {
            sleep(SECOND).await;
            undone.fetch_add(1, SeqCst);
        });
        std::future::ready(Ok(()))
    });
    let seen = Arc::clone(&undone);
    let after = Hooked::new(&next).before_activate(move |_| {
        assert_eq!(seen.load(SeqCst), 1, "the one before is not undone yet");
        std::future::ready(Ok(()))
    });
    let fixture = Fixture::paused(&[]).await.track(&probe).track(&next);
    fixture.registry().limit_activations("source", 1);
    let tools: Vec<Arc<dyn Tool>> = vec![Arc::new(hooked), Arc::new(after)];
    fixture.registry().replace_source("source", tools).unwrap();
    let plan = fixture.plan();
    let (failed, returned) = tokio::join!(call(&plan, "probe"), call(&plan, "next"));
    assert_eq!(failed.unwrap_err().code(), OutcomeCode::Activation);
    assert!(returned.unwrap().success);
    fixture.end().await;
}

// ===== the size of an output =====

/// A tool that gives back what it is given.
fn echo() -> FunctionTool {
    #[derive(serde::Deserialize, schemars::JsonSchema)]
    struct Echoed {
        value: Value,
    }
    ToolSpec::new("echo").read_only().function(|args: Echoed| Ok(args.value))
}

fn bytes(value: &Value) -> usize {
    serde_json::to_string(value).unwrap().len()
}

/// What becomes of an output under a limit; the result and the trace agree about it.
async fn limited(value: &Value, most: usize) -> ToolResult {
    let fixture = Fixture::with(paused().tool(echo()), &[]).await;
    let plan = fixture.begin(PlanOptions::new().max_output_bytes(most)).unwrap();
    let returned = plan.execute("echo", json!({"value": value})).await;
    let trace = traced(&plan, &returned);
    fixture.end().await;
    let result = returned.unwrap();
    assert_eq!(trace.result_size_bytes, bytes(&result.output));
    result
}

#[tokio::test(start_paused = true)]
async fn a_long_output_is_cut_and_says_so() {
    let result = limited(&json!("x".repeat(1000)), 100).await;
    assert!(result.success);
    assert_eq!(result.output, json!(format!("{} [cut]", "x".repeat(92))));
    assert_eq!(result.metadata["truncated"], json!({"from_bytes": 1002, "to_bytes": 100}));
    let text = result.to_model_text();
    assert!(text.ends_with("\n[the output was cut from 1002 to 100 bytes]"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn an_output_that_fits_exactly_is_left_alone() {
    for value in [json!("x".repeat(98)), json!([1, 2, 3]), json!({"a": "é\n\u{1}"}), json!(1e300)]
    {
        let most = bytes(&value);
        let result = limited(&value, most).await;
        assert_eq!(result.output, value);
        assert_eq!(result.metadata, Map::new());
        assert!(!result.to_model_text().contains("was cut"));
        assert_ne!(limited(&value, most - 1).await.output, value);
    }
}

#[tokio::test(start_paused = true)]
async fn a_cut_output_keeps_its_kind_and_its_beginning() {
    let rows = json!((0..100).collect::<Vec<_>>());
    assert_eq!(limited(&rows, 20).await.output, json!([0, 1, 2, 3, 4, 5, 6, 7, 8]));
    let fields = json!({"a": 1, "b": "y".repeat(100), "c": 3});
    let expected = json!({"a": 1, "b": format!("{} [cut]", "y".repeat(16))});
    assert_eq!(limited(&fields, 36).await.output, expected);
    let deep = json!([[["z".repeat(100)]], 1, 2]);
    let expected = json!([[[format!("{} [cut]", "z".repeat(10))]]]);
    assert_eq!(limited(&deep, 24).await.output, expected);
}

#[tokio::test(start_paused = true)]
async fn a_text_is_cut_between_two_characters() {
    for text in ["é", "日", "🦀", "\"", "\\", "\n", "\u{1}", "\u{7f}", "é日🦀\"\n\u{2}"] {
        let value = json!(text.repeat(100));
        for most in 40..60 {
            let result = limited(&value, most).await;
            let size = bytes(&result.output);
            assert!(size <= most && size + 6 > most, "{text:?}: {size} of {most}");
            let kept = result.output.as_str().unwrap().strip_suffix(" [cut]").unwrap();
            assert!(value.as_str().unwrap().starts_with(kept), "{text:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_limit_too_small_leaves_the_least_of_its_kind() {
    for (value, least) in [
        (json!("a long text"), json!("")),
        (json!([1, 2, 3]), json!([])),
        (json!({"key": "value"}), json!({})),
        (json!(123_456_789), json!(null)),
        (json!(true), json!(null)),
        (json!(null), json!(null)),
    ] {
        assert_eq!(limited(&value, 0).await.output, least);
    }
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_gives_back_no_more_than_its_parent() {
    let fixture = Fixture::with(paused().tool(echo()), &[]).await;
    for (parent, child) in [(50, 1000), (1000, 50)] {
        let parent = fixture.begin(PlanOptions::new().max_output_bytes(parent)).unwrap();
        let child = parent.begin_child(PlanOptions::new().max_output_bytes(child)).unwrap();
        let result = child.execute("echo", json!({"value": "x".repeat(100)})).await.unwrap();
        assert_eq!(bytes(&result.output), 50);
    }
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_output_is_checked_whole_before_it_is_cut() {
    struct Long(ToolDescriptor);
    #[async_trait]
    impl ToolInstance for Long {
        async fn execute(
            &self,
            _: &ToolExecutionContext,
            _: &Value,
        ) -> Result<ToolOutput, ToolFailure> {
            Ok(ToolOutput::new(json!("x".repeat(300))).with_metadata("rows", 1))
        }
    }
    #[async_trait]
    impl Tool for Long {
        fn descriptor(&self) -> &ToolDescriptor {
            &self.0
        }
        fn immediate(&self) -> Option<Arc<dyn ToolInstance>> {
            Some(Arc::new(Long(self.0.clone())))
        }
        async fn activate(
            &self,
            _: &ActivationContext,
        ) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
            Ok(Arc::new(Long(self.0.clone())))
        }
    }
    let mut descriptor = ToolDescriptor::new(name("long")).capability(ToolCapability::read_only());
    descriptor = descriptor.output_schema(json!({"type": "string", "minLength": 200}));
    let fixture = Fixture::with(paused().tool(Long(descriptor)), &[]).await;
    let options = PlanOptions::new().max_output_bytes(100).output_check(OutputCheck::Reject);
    let plan = fixture.begin(options).unwrap();
    let returned = plan.execute("long", json!({})).await;
    let trace = traced(&plan, &returned);
    assert_eq!((trace.outcome, trace.output_valid), (OutcomeCode::Ok, Some(true)));
    let metadata = returned.unwrap().metadata;
    assert_eq!((&metadata["rows"], &metadata["truncated"]["to_bytes"]), (&json!(1), &json!(100)));
    fixture.end().await;
}

/// Of an error a model is shown 4 KiB in any case.
#[tokio::test(start_paused = true)]
async fn the_text_of_a_failure_is_cut_too() {
    let fails = ToolSpec::new("fails").read_only().function(|args: Value| {
        let bytes = args["bytes"].as_u64().unwrap();
        Err::<(), _>(ToolFailure::failed("x".repeat(usize::try_from(bytes).unwrap())))
    });
    let fixture = Fixture::with(paused().tool(fails), &[]).await;
    for (most, bytes, kept) in [(100, 4096, 4096), (100, 5000, 4096), (9000, 20_000, 9000)] {
        let plan = fixture.begin(PlanOptions::new().max_output_bytes(most)).unwrap();
        let result = plan.execute("fails", json!({"bytes": bytes})).await.unwrap();
        let mark = if bytes > kept { " [cut]" } else { "" };
        assert_eq!(result.error, Some(format!("{}{mark}", "x".repeat(kept))));
        let trace = plan.traces().remove(0);
        assert!(trace.error.unwrap().starts_with(&"x".repeat(4096)));
    }
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_nested_result_is_cut_as_the_plan_says() {
    let fixture = Fixture::with(paused().tool(echo()).tool(relay("relay")), &[]).await;
    let plan = fixture.begin(PlanOptions::new().max_output_bytes(60)).unwrap();
    let input = json!({"tool": "echo", "input": {"value": "x".repeat(1000)}});
    let result = plan.execute("relay", input).await.unwrap();
    assert_eq!(bytes(&result.output), 60);
    let sizes: Vec<_> = plan.traces().iter().map(|trace| trace.result_size_bytes).collect();
    assert_eq!(sizes, [60, 60]);
    fixture.end().await;
}

/// Any JSON, with texts that are long in bytes and longer when written.
fn json_value() -> impl Strategy<Value = Value> {
    let text = || {
        let c = prop_oneof![
            4 => any::<char>(),
            2 => prop::char::range('a', 'z'),
            1 => prop::char::range('\0', '\u{1f}'),
            1 => prop::sample::select(vec!['"', '\\', '\n', '\u{7f}', '\u{2028}', '🦀']),
        ];
        prop::collection::vec(c, 0..60).prop_map(String::from_iter)
    };
    let float = any::<f64>().prop_filter_map("finite", Number::from_f64);
    let leaf = prop_oneof![
        1 => Just(Value::Null),
        1 => any::<bool>().prop_map(Value::from),
        2 => any::<i64>().prop_map(Value::from),
        1 => any::<u64>().prop_map(Value::from),
        2 => float.prop_map(Value::from),
        6 => text().prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 120, 12, move |inner| {
        let fields = prop::collection::vec((text(), inner.clone()), 0..12);
        prop_oneof![
            prop::collection::vec(inner, 0..12).prop_map(Value::from),
            fields.prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

/// Whether one value is the beginning of another of its kind.
fn is_cut_of(cut: &Value, whole: &Value) -> bool {
    match (cut, whole) {
        (Value::String(cut), Value::String(whole)) => {
            let kept = cut.strip_suffix(" [cut]");
            cut == whole || cut.is_empty() || kept.is_some_and(|kept| whole.starts_with(kept))
        }
        (Value::Array(cut), Value::Array(whole)) => match cut.split_last() {
            None => true,
            Some((last, first)) => {
                whole.starts_with(first)
                    && whole.get(first.len()).is_some_and(|whole| is_cut_of(last, whole))
            }
        },
        (Value::Object(cut), Value::Object(whole)) => {
            let last = cut.len().wrapping_sub(1);
            cut.iter().zip(whole).enumerate().all(|(at, ((key, cut), (of, whole)))| {
                key == of && if at == last { is_cut_of(cut, whole) } else { cut == whole }
            })
        }
        _ => cut == whole,
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 400,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn p14_a_cut_output_is_valid_json_and_no_longer_than_the_limit(
        value in json_value(),
        most in 40_usize..400,
    ) {
        let mut host = tokio::runtime::Builder::new_current_thread();
        let host = host.enable_time().start_paused(true).build().unwrap();
        let result = host.block_on(limited(&value, most));
        let written = serde_json::to_string(&result.output).unwrap();
        prop_assert!(written.len() <= most, "{} bytes of {most}", written.len());
        prop_assert_eq!(&serde_json::from_str::<Value>(&written).unwrap(), &result.output);
        let (from, to) = (bytes(&value), written.len());
        if from <= most {
            prop_assert_eq!(&result.output, &value);
            prop_assert_eq!(&result.metadata, &Map::new());
        } else {
            prop_assert!(is_cut_of(&result.output, &value), "{} of {value}", result.output);
            let said = json!({"from_bytes": from, "to_bytes": to});
            prop_assert_eq!(&result.metadata["truncated"], &said);
            let said = format!("[the output was cut from {from} to {to} bytes]");
            prop_assert!(result.to_model_text().ends_with(&said));
        }
    }
}
