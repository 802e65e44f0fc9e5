//! Approvals: who is asked and when, what an answer is good for, what ends a wait, and whose time
//! it costs.

use std::collections::VecDeque;
use std::future::{Future, pending, ready};
use std::io::{self, BufRead, Cursor, Read, Write};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, sleep, timeout};
use tokio_test::{assert_pending, assert_ready, task};
use tokio_util::sync::CancellationToken;
use toolscope::test_util::{Probe, ProbeCounts, Step};
use toolscope::{
    ActivationContext, ApprovalRequest, Approver, CallError, CallOptions, ChannelApprover,
    Deadlines, Decision, EventKind, FunctionTool, OutcomeCode, PendingApproval, Plan, PlanHandle,
    PlanOptions, TerminalApprover, Tool, ToolCall, ToolCapability, ToolDescriptor,
    ToolExecutionContext, ToolFailure, ToolFilter, ToolInstance, ToolName, ToolOutput, ToolRunner,
    ToolRuntimeBuilder, ToolRuntimeError, ToolSpec, Wait, async_trait,
};

use crate::call::{relay, relayed, traced};
use crate::cut::cut;
use crate::hooks::{call, within};
use crate::support::{Fixture, paused};

const SECOND: Duration = Duration::from_secs(1);

// ===== tools of these tests =====

/// A capability that a person must approve.
fn by_a_person() -> ToolCapability {
    ToolCapability::writes().human_approval_required()
}

/// A managed writer that a person must approve.
fn asking() -> Probe {
    Probe::new("asking").capability(by_a_person())
}

/// An approver that keeps what it was asked. Its answers come from a list, the last one for ever.
#[derive(Clone)]
pub(crate) struct Answers(Arc<Mutex<(Vec<ApprovalRequest>, VecDeque<Decision>)>>);

impl Answers {
    pub(crate) fn new(answers: impl Into<VecDeque<Decision>>) -> Self {
        Self(Arc::new(Mutex::new((Vec::new(), answers.into()))))
    }

    pub(crate) fn asked(&self) -> usize {
        self.0.lock().unwrap().0.len()
    }

    fn last(&self) -> ApprovalRequest {
        self.0.lock().unwrap().0.last().cloned().expect("nobody was asked")
    }
}

#[async_trait]
impl Approver for Answers {
    async fn decide(&self, request: &ApprovalRequest) -> Result<Decision, ToolFailure> {
        let mut kept = self.0.lock().unwrap();
        kept.0.push(request.clone());
        Ok(if kept.1.len() > 1 { kept.1.pop_front() } else { kept.1.front().cloned() }.unwrap())
    }
}

async fn with_answers(approver: &Answers, probes: &[&Probe]) -> Fixture {
    Fixture::with(paused().approver(approver.clone()), probes).await
}

/// Says yes after a while: the seconds that stand in the input, or its own.
struct Late(u64);

#[async_trait]
impl Approver for Late {
    async fn decide(&self, request: &ApprovalRequest) -> Result<Decision, ToolFailure> {
        let seconds = request.input["wait"].as_u64().unwrap_or(self.0);
        sleep(Duration::from_secs(seconds)).await;
        Ok(Decision::Once)
    }
}

type Requests = UnboundedReceiver<PendingApproval>;

/// A runtime whose approver is the test.
async fn with_person(tools: Vec<FunctionTool>, probes: &[&Probe]) -> (Fixture, Requests) {
    let (approver, requests) = ChannelApprover::new();
    let builder = tools.into_iter().fold(paused().approver(approver), ToolRuntimeBuilder::tool);
    (Fixture::with(builder, probes).await, requests)
}

/// A tool whose schemas want a number and promise one. It looks at nothing itself: what it is given
/// has been checked, or has not. What it runs says that it ran.
pub(crate) struct Numbered(ToolDescriptor, Arc<Ran>);

struct Ran(Box<dyn Fn() + Send + Sync>);

impl Numbered {
    pub(crate) fn new(capability: ToolCapability, ran: impl Fn() + Send + Sync + 'static) -> Self {
        let input = json!({
            "type": "object",
            "properties": {"number": {"type": "integer"}},
            "required": ["number"],
        });
        let descriptor = ToolDescriptor::new(name("numbered")).capability(capability);
        let descriptor = descriptor.input_schema(input).output_schema(json!({"type": "integer"}));
        Self(descriptor, Arc::new(Ran(Box::new(ran))))
    }
}

#[async_trait]
impl Tool for Numbered {
    fn descriptor(&self) -> &ToolDescriptor {
        &self.0
    }

    fn immediate(&self) -> Option<Arc<dyn ToolInstance>> {
        Some(Arc::clone(&self.1) as Arc<dyn ToolInstance>)
    }

    async fn activate(&self, _: &ActivationContext) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        Ok(Arc::clone(&self.1) as Arc<dyn ToolInstance>)
    }
}

#[async_trait]
impl ToolInstance for Ran {
    async fn execute(
        &self,
        _: &ToolExecutionContext,
        input: &Value,
    ) -> Result<ToolOutput, ToolFailure> {
        (self.0)();
        Ok(ToolOutput::new(input["number"].clone()))
    }
}

/// One that a person must approve, and how often it ran.
fn numbered() -> (Numbered, Arc<AtomicUsize>) {
    let ran = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&ran);
    let count = move || {
        counted.fetch_add(1, SeqCst);
    };
    (Numbered::new(by_a_person(), count), ran)
}

fn name(name: &str) -> ToolName {
    name.parse().unwrap()
}

#[track_caller]
fn denied(error: CallError) -> String {
    match error {
        CallError::Runtime(ToolRuntimeError::ApprovalDenied { reason, .. }) => reason,
        other => panic!("it was not denied: {other:?}"),
    }
}

// ===== nobody to ask =====

/// Refused for want of an approver; nothing ran. Gives why it needs one.
async fn unapproved(probe: &Probe, options: PlanOptions) -> String {
    let fixture = Fixture::paused(&[probe]).await;
    let plan = fixture.begin(options).unwrap();
    let returned = plan.execute("asking", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::ApprovalRequired);
    assert_eq!(probe.counts(), ProbeCounts::default());
    assert_eq!(fixture.end().await.started, 0);
    match returned {
        Err(CallError::Runtime(ToolRuntimeError::ApprovalRequired { tool, reason, .. })) => {
            assert_eq!(tool, name("asking"));
            reason
        }
        other => panic!("another outcome: {other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn p12_a_tool_that_wants_a_person_is_refused_without_one() {
    let reason = unapproved(&asking(), PlanOptions::new()).await;
    assert!(reason.contains("human_approval_required"), "{reason}");
}

#[tokio::test(start_paused = true)]
async fn p12_a_tool_that_wants_a_person_is_refused_where_unsafe_ones_are_allowed() {
    let reason = unapproved(&asking(), PlanOptions::new().allow_unsafe()).await;
    assert!(reason.contains("human_approval_required"), "{reason}");
}

#[tokio::test(start_paused = true)]
async fn p12_an_unsafe_tool_is_refused_without_a_person() {
    let probe = Probe::new("asking").capability(ToolCapability::writes().is_unsafe());
    let reason = unapproved(&probe, PlanOptions::new()).await;
    assert!(reason.contains("unsafe"), "{reason}");
}

#[tokio::test(start_paused = true)]
async fn p12_a_tool_that_a_rule_asks_for_is_refused_without_a_person() {
    let probe = Probe::new("asking").capability(ToolCapability::read_only());
    let reason = unapproved(&probe, PlanOptions::new().ask(name("asking"))).await;
    assert!(reason.contains("rule"), "{reason}");
}

#[tokio::test(start_paused = true)]
async fn an_unsafe_tool_that_the_plan_allows_is_not_asked_about() {
    let probe = Probe::new("asking").capability(ToolCapability::writes().is_unsafe());
    let approver = Answers::new([Decision::deny("no")]);
    let fixture = with_answers(&approver, &[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().allow_unsafe()).unwrap();
    assert!(plan.execute("asking", json!({})).await.unwrap().success);
    assert_eq!(approver.asked(), 0);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_plan_s_approver_goes_before_the_runtime_s() {
    let (runtime_s, plan_s) = (Answers::new([Decision::Once]), Answers::new([Decision::Once]));
    let probe = asking();
    let fixture = with_answers(&runtime_s, &[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().approver(plan_s.clone())).unwrap();
    assert!(plan.execute("asking", json!({})).await.unwrap().success);
    assert_eq!((runtime_s.asked(), plan_s.asked()), (0, 1));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_approver_of_the_plan_defaults_goes_before_the_builder_s() {
    let (builder_s, defaults) = (Answers::new([Decision::Once]), Answers::new([Decision::Once]));
    let probe = asking();
    let options = PlanOptions::new().approver(defaults.clone());
    let builder = paused().approver(builder_s.clone()).plan_defaults(options);
    let fixture = Fixture::with(builder, &[&probe]).await;
    assert!(fixture.plan().execute("asking", json!({})).await.unwrap().success);
    assert_eq!((builder_s.asked(), defaults.asked()), (0, 1));
    fixture.end().await;
}

// ===== when somebody is asked =====

#[tokio::test(start_paused = true)]
async fn p12_nobody_is_asked_about_a_call_that_the_gate_refuses() {
    let (probe, approver) = (asking(), Answers::new([Decision::Once]));
    let fixture = with_answers(&approver, &[&probe]).await;
    for options in [PlanOptions::new().read_only(), PlanOptions::new().deny(name("asking"))] {
        let plan = fixture.begin(options).unwrap();
        let returned = plan.execute("asking", json!({})).await;
        assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::AccessDenied);
    }
    assert_eq!((approver.asked(), probe.counts()), (0, ProbeCounts::default()));
    assert_eq!(fixture.end().await.started, 0);
}

#[tokio::test(start_paused = true)]
async fn p12_nobody_is_asked_about_an_input_that_does_not_fit() {
    let approver = Answers::new([Decision::Once]);
    let (tool, ran) = numbered();
    let fixture = Fixture::with(paused().approver(approver.clone()).tool(tool), &[]).await;
    let plan = fixture.plan();
    let returned = plan.execute("numbered", json!({"number": "one"})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::InvalidInput);
    assert_eq!((approver.asked(), ran.load(SeqCst)), (0, 0));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_nobody_is_asked_about_a_call_whose_quota_is_used_up() {
    let (probe, approver) = (asking(), Answers::new([Decision::Once]));
    let fixture = with_answers(&approver, &[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_calls(0)).unwrap();
    let returned = plan.execute("asking", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::LimitExceeded);
    assert_eq!((approver.asked(), probe.counts()), (0, ProbeCounts::default()));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_tool_that_needs_no_approval_is_not_asked_about() {
    let (probe, approver) = (Probe::new("probe"), Answers::new([Decision::deny("no")]));
    let fixture = with_answers(&approver, &[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().ask(name("another"))).unwrap();
    assert!(plan.execute("probe", json!({})).await.unwrap().success);
    assert_eq!(approver.asked(), 0);
    fixture.end().await;
}

// ===== what is asked =====

#[tokio::test(start_paused = true)]
async fn a_request_has_the_facts_of_the_call() {
    let approver = Answers::new([Decision::Once]);
    let spec = ToolSpec::new("files/numbered").description("Gives a number back");
    let tool = spec.capability(by_a_person()).function(|_: Value| Ok(1));
    let fixture = Fixture::with(paused().approver(approver.clone()).tool(tool), &[]).await;
    let plan = fixture.begin(PlanOptions::new().metadata("user", "ada")).unwrap();
    assert!(plan.execute("files/nobody", json!({})).await.is_err());
    assert!(plan.execute("files__numbered", json!({"number": 7})).await.unwrap().success);
    let request = approver.last();
    assert_eq!((request.plan_id, request.call_id), (plan.id(), plan.traces()[1].call_id));
    assert_eq!(
        (&request.tool, &*request.description),
        (&name("files/numbered"), "Gives a number back")
    );
    assert_eq!(request.capability, by_a_person());
    assert_eq!(request.input, json!({"number": 7}));
    assert_eq!(request.metadata["user"], json!("ada"));
    assert!(request.reason.contains("human_approval_required"), "{}", request.reason);
    assert_eq!(request.fingerprint.len(), 64);
    assert!(request.fingerprint.bytes().all(|digit| b"0123456789abcdef".contains(&digit)));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_says_which_rule_it_is_for() {
    let approver = Answers::new([Decision::Once]);
    let reader = Probe::new("asking").capability(ToolCapability::read_only());
    let fixture = with_answers(&approver, &[&reader]).await;
    let plan = fixture.begin(PlanOptions::new().read_only().ask(ToolFilter::new())).unwrap();
    assert!(plan.execute("asking", json!({})).await.unwrap().success);
    assert!(approver.last().reason.contains("a rule of the plan"));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_keeps_its_input_out_of_a_log() {
    let approver = Answers::new([Decision::Once]);
    let fixture = with_answers(&approver, &[&asking()]).await;
    fixture.plan().execute("asking", json!({"password": "swordfish"})).await.unwrap();
    let request = approver.last();
    let text = format!("{request:?}");
    assert!(text.contains("asking") && !text.contains("swordfish"), "{text}");
    assert_eq!(serde_json::to_value(&request).unwrap()["input"]["password"], json!("swordfish"));
    fixture.end().await;
}

/// Of one call of a tool with that description, by that input.
async fn fingerprint(description: &str, input: Value) -> String {
    let approver = Answers::new([Decision::Once]);
    let tool = ToolSpec::new("print").description(description).capability(by_a_person());
    let tool = tool.function(|_: Value| Ok(1));
    let fixture = Fixture::with(paused().approver(approver.clone()).tool(tool), &[]).await;
    assert!(fixture.plan().execute("print", input).await.unwrap().success);
    fixture.end().await;
    approver.last().fingerprint
}

#[tokio::test(start_paused = true)]
async fn a_fingerprint_is_that_of_the_definition_and_the_input() {
    let one = fingerprint("Prints", json!({"a": 1, "b": [1, {"c": null, "d": "x"}]})).await;
    let mut reordered = json!({"b": [1, {"d": "x", "c": null}]});
    reordered["a"] = json!(1);
    assert_eq!(one, fingerprint("Prints", reordered).await);
    assert_ne!(
        one,
        fingerprint("Prints it", json!({"a": 1, "b": [1, {"c": null, "d": "x"}]})).await
    );
}

/// Worked out by hand: it is to be the same in every process, and in the next version.
#[tokio::test(start_paused = true)]
async fn a_fingerprint_is_the_same_in_every_process() {
    let input = json!({"a": [1, -2.5, "é", true, false, null], "b": {"c": ""}});
    let known = "50787b5fbb7a31e7b18f9bc29dac92068e7b2383a941f9a3253ef02a686207d1";
    assert_eq!(request(input).await.fingerprint, known);
}

#[tokio::test(start_paused = true)]
async fn inputs_that_look_alike_have_different_fingerprints() {
    let alike = [
        json!({}),
        json!({"a": 1}),
        json!({"a": 1.0}),
        json!({"a": "1"}),
        json!({"a": true}),
        json!({"a": null}),
        json!({"a": ""}),
        json!({"a": []}),
        json!({"a": {}}),
        json!({"a": [1]}),
        json!({"a": [[1]]}),
        json!({"a": {"1": null}}),
        json!({"a1": null}),
        json!({"a": "k", "b": "c"}),
        json!({"a": "kb", "c": ""}),
        json!({"a": ["b", "c"]}),
        json!({"a": ["bc"]}),
        json!({"a": {"b": {}}, "c": 1}),
        json!({"a": {"b": {}, "c": 1}}),
    ];
    let mut seen = std::collections::HashMap::new();
    for input in alike {
        if let Some(other) = seen.insert(fingerprint("Prints", input.clone()).await, input.clone())
        {
            panic!("{input} and {other} have the same fingerprint");
        }
    }
}

// ===== what an answer is good for =====

#[tokio::test(start_paused = true)]
async fn once_is_good_for_one_call() {
    let (probe, approver) = (asking(), Answers::new([Decision::Once]));
    let fixture = with_answers(&approver, &[&probe]).await;
    let plan = fixture.plan();
    for asked in 1..=3 {
        assert!(plan.execute("asking", json!({})).await.unwrap().success);
        assert_eq!(approver.asked(), asked);
    }
    assert_eq!(probe.counts().executions, 3);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_approval_for_the_plan_is_good_for_equal_calls() {
    let (probe, approver) = (asking(), Answers::new([Decision::ForPlan]));
    let fixture = with_answers(&approver, &[&probe]).await;
    let plan = fixture.plan();
    let input = json!({"path": "a", "options": {"deep": true, "links": false}});
    let mut reordered = json!({"options": {"links": false, "deep": true}});
    reordered["path"] = json!("a");
    for input in [&input, &input, &reordered] {
        assert!(plan.execute("asking", input).await.unwrap().success);
    }
    assert_eq!(approver.asked(), 1);
    assert!(plan.execute("asking", json!({"path": "b"})).await.unwrap().success);
    assert_eq!(approver.asked(), 2);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_approval_for_the_plan_is_not_good_for_the_same_input_of_another_tool() {
    let other = Probe::new("other").capability(by_a_person());
    let (probe, approver) = (asking(), Answers::new([Decision::ForPlan, Decision::deny("no")]));
    let fixture = with_answers(&approver, &[&probe, &other]).await;
    let plan = fixture.plan();
    assert!(plan.execute("asking", json!({})).await.unwrap().success);
    assert_eq!(denied(plan.execute("other", json!({})).await.unwrap_err()), "no");
    assert_eq!(other.counts(), ProbeCounts::default());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_approval_of_a_tool_is_good_for_any_input_of_it() {
    let other = Probe::new("other").capability(by_a_person());
    let answers = [Decision::ToolForPlan, Decision::deny("no")];
    let (probe, approver) = (asking(), Answers::new(answers));
    let fixture = with_answers(&approver, &[&probe, &other]).await;
    let plan = fixture.plan();
    for number in 0..3 {
        assert!(plan.execute("asking", json!({"number": number})).await.unwrap().success);
    }
    assert_eq!(approver.asked(), 1);
    assert_eq!(denied(plan.execute("other", json!({})).await.unwrap_err()), "no");
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_an_approved_tool_still_goes_by_its_schema() {
    let approver = Answers::new([Decision::ToolForPlan]);
    let (tool, ran) = numbered();
    let fixture = Fixture::with(paused().approver(approver.clone()).tool(tool), &[]).await;
    let plan = fixture.plan();
    assert!(plan.execute("numbered", json!({"number": 1})).await.unwrap().success);
    let result = plan.execute("numbered", json!({"number": "two"})).await.unwrap();
    assert_eq!(result.code(), "invalid_input");
    assert_eq!((approver.asked(), ran.load(SeqCst)), (1, 1));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_a_denied_call_runs_nothing_and_says_why() {
    let (probe, approver) = (asking(), Answers::new([Decision::deny("ask me after lunch")]));
    let fixture = with_answers(&approver, &[&probe]).await;
    let plan = fixture.plan();
    let returned = plan.execute("asking", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::ApprovalDenied);
    let Err(CallError::Runtime(error)) = returned else { panic!("it ran: {returned:?}") };
    let text = error.to_model_text();
    assert_eq!(text, "error (approval_denied): it was not approved: ask me after lunch");
    assert_eq!(probe.counts(), ProbeCounts::default());
    assert_eq!(fixture.end().await.started, 0);
}

#[tokio::test(start_paused = true)]
async fn a_runner_gives_a_denial_as_a_result() {
    let approver = Answers::new([Decision::deny("ask me after lunch")]);
    let fixture = with_answers(&approver, &[&asking()]).await;
    let plan = fixture.plan();
    let result = ToolRunner::new(plan.handle()).execute("asking", json!({})).await;
    assert_eq!((result.success, result.code()), (false, "approval_denied"));
    assert!(result.to_model_text().contains("ask me after lunch"));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_denial_is_not_remembered() {
    let (probe, approver) = (asking(), Answers::new([Decision::deny("no"), Decision::Once]));
    let fixture = with_answers(&approver, &[&probe]).await;
    let plan = fixture.plan();
    assert!(plan.execute("asking", json!({})).await.is_err());
    assert!(plan.execute("asking", json!({})).await.unwrap().success);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_changed_call_is_given_the_new_input() {
    let changed = Decision::change(json!({"path": "b"}));
    let (probe, approver) = (asking(), Answers::new([changed, Decision::Once]));
    let fixture = with_answers(&approver, &[&probe]).await;
    let plan = fixture.plan();
    let returned = plan.execute("asking", json!({"path": "a"})).await;
    assert!(traced(&plan, &returned).success());
    let result = returned.unwrap();
    assert_eq!(result.output, json!({"echo": {"path": "b"}}));
    assert_eq!(result.metadata["input_changed"], json!(true));
    assert_eq!((approver.asked(), probe.counts().executions), (1, 1));

    let unchanged = plan.execute("asking", json!({"path": "a"})).await.unwrap();
    assert!(!unchanged.metadata.contains_key("input_changed"));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_a_changed_input_that_breaks_the_schema_runs_nothing() {
    let (tool, ran) = numbered();
    let broken = [json!({"number": "two"}), json!({}), json!([]), json!("two"), Value::Null];
    let answers: Vec<_> = broken.iter().cloned().map(Decision::change).collect();
    let approver = Answers::new(answers);
    let fixture = Fixture::with(paused().approver(approver.clone()).tool(tool), &[]).await;
    for asked in 1..=broken.len() {
        let plan = fixture.plan();
        let returned = plan.execute("numbered", json!({"number": 1})).await;
        assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::InvalidInput);
        assert_eq!(returned.unwrap().metadata["input_changed"], json!(true));
        assert_eq!((approver.asked(), ran.load(SeqCst)), (asked, 0));
    }
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_failure_of_a_changed_call_says_that_its_input_was_changed() {
    let probe = asking().on_execute(Step::Err);
    let fixture = with_answers(&Answers::new([Decision::change(json!({}))]), &[&probe]).await;
    let result = fixture.plan().execute("asking", json!({"path": "a"})).await.unwrap();
    assert_eq!((result.code(), &result.metadata["input_changed"]), ("execution", &json!(true)));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_change_is_good_for_neither_input_a_second_time() {
    let changed = Decision::change(json!({"path": "b"}));
    let approver = Answers::new([changed, Decision::Once]);
    let fixture = with_answers(&approver, &[&asking()]).await;
    let plan = fixture.plan();
    assert!(plan.execute("asking", json!({"path": "a"})).await.unwrap().success);
    let first = approver.last().fingerprint;
    assert!(plan.execute("asking", json!({"path": "b"})).await.unwrap().success);
    assert_eq!(approver.asked(), 2);
    assert_ne!(approver.last().fingerprint, first);
    assert!(plan.execute("asking", json!({"path": "a"})).await.unwrap().success);
    assert_eq!((approver.asked(), approver.last().fingerprint), (3, first));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_changed_call_takes_one_place_of_a_quota() {
    let (probe, approver) = (asking(), Answers::new([Decision::change(json!({"n": 1}))]));
    let fixture = with_answers(&approver, &[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_calls(2)).unwrap();
    assert!(plan.execute("asking", json!({})).await.unwrap().success);
    assert!(plan.execute("asking", json!({})).await.unwrap().success);
    let error = plan.execute("asking", json!({})).await.unwrap_err();
    assert_eq!((error.code(), approver.asked()), (OutcomeCode::LimitExceeded, 2));
    fixture.end().await;
}

// ===== an approver that does wrong =====

type Deciding<'a> = Pin<Box<dyn Future<Output = Result<Decision, ToolFailure>> + Send + 'a>>;

/// An approver whose future a function makes.
struct Raw<F>(F);

/// Written out, so that the function runs before there is a future.
impl<F> Approver for Raw<F>
where
    F: Fn() -> Deciding<'static> + Send + Sync + 'static,
{
    fn decide<'life0, 'life1, 'async_trait>(
        &'life0 self,
        _: &'life1 ApprovalRequest,
    ) -> Deciding<'async_trait>
    where
        'life0: 'async_trait,
        'life1: 'async_trait,
        Self: 'async_trait,
    {
        (self.0)()
    }
}

/// A future that panics when it is dropped.
pub(crate) struct Bomb<F>(pub(crate) F);

impl<F: Future + Unpin> Future for Bomb<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        Pin::new(&mut self.0).poll(cx)
    }
}

impl<F> Drop for Bomb<F> {
    fn drop(&mut self) {
        assert!(std::thread::panicking(), "a panic in a drop");
    }
}

/// Why a call is denied by an approver that does wrong; nothing ran.
async fn denied_by(make: impl Fn() -> Deciding<'static> + Send + Sync + 'static) -> String {
    let probe = asking();
    let fixture = Fixture::with(paused().approver(Raw(make)), &[&probe]).await;
    let plan = fixture.plan();
    let returned = plan.execute("asking", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::ApprovalDenied);
    assert_eq!(probe.counts(), ProbeCounts::default());
    assert_eq!(fixture.end().await.started, 0);
    denied(returned.unwrap_err())
}

#[tokio::test(start_paused = true)]
async fn p14_an_approver_that_fails_denies() {
    let reason = denied_by(|| Box::pin(ready(Err(ToolFailure::failed("no connection"))))).await;
    assert!(reason.contains("no connection"), "{reason}");
}

#[tokio::test(start_paused = true)]
async fn p14_an_approver_that_panics_denies() {
    let reason = denied_by(|| panic!("before there is a future")).await;
    assert!(reason.contains("before there is a future"), "{reason}");
    let at_once = || -> Deciding<'static> { Box::pin(async { panic!("at once") }) };
    assert!(denied_by(at_once).await.contains("at once"));
    let later = || -> Deciding<'static> {
        Box::pin(async {
            tokio::task::yield_now().await;
            panic!("after an await")
        })
    };
    assert!(denied_by(later).await.contains("after an await"));
}

#[tokio::test(start_paused = true)]
async fn p14_an_approver_whose_future_panics_in_its_drop_denies() {
    let reason = denied_by(|| Box::pin(Bomb(ready(Ok(Decision::Once))))).await;
    assert!(reason.contains("a panic in a drop"), "{reason}");
}

#[tokio::test(start_paused = true)]
async fn p14_an_approver_whose_future_panics_when_the_wait_ends_is_contained() {
    let probe = asking();
    let hangs = || -> Deciding<'static> { Box::pin(Bomb(pending())) };
    let fixture = Fixture::with(paused().approver(Raw(hangs)), &[&probe]).await;
    let plan = fixture.plan();
    let expired = plan.execute("asking", json!({})).await.unwrap_err();
    assert_eq!(expired.code(), OutcomeCode::ApprovalDenied);

    let mut dropped = task::spawn(call(&plan, "asking"));
    assert_pending!(dropped.poll());
    drop(dropped);

    let mut cancelled = task::spawn(call(&plan, "asking"));
    assert_pending!(cancelled.poll());
    plan.cancel();
    assert_eq!(cancelled.await.unwrap_err().code(), OutcomeCode::Cancelled);
    let codes: Vec<_> = plan.traces().iter().map(|trace| trace.outcome).collect();
    let expected = [OutcomeCode::ApprovalDenied, OutcomeCode::Abandoned, OutcomeCode::Cancelled];
    assert_eq!(codes, expected);
    assert_eq!(probe.counts(), ProbeCounts::default());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_an_approver_that_panics_when_it_is_dropped_is_contained() {
    struct Brittle;
    impl Drop for Brittle {
        fn drop(&mut self) {
            assert!(std::thread::panicking(), "a panic in a drop");
        }
    }
    #[async_trait]
    impl Approver for Brittle {
        async fn decide(&self, _: &ApprovalRequest) -> Result<Decision, ToolFailure> {
            Ok(Decision::Once)
        }
    }
    let probe = asking();
    let fixture = Fixture::with(paused().approver(Brittle), &[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().approver(Brittle)).unwrap();
    assert!(plan.execute("asking", json!({})).await.unwrap().success);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_an_approval_that_nobody_gives_in_time_is_denied() {
    let probe = asking();
    let (fixture, mut requests) = with_person(vec![], &[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().approval_wait(90 * SECOND)).unwrap();
    let began = Instant::now();
    let returned = plan.execute("asking", json!({})).await;
    assert_eq!(began.elapsed().as_secs(), 90);
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::ApprovalDenied);
    let reason = denied(returned.unwrap_err());
    assert!(reason.contains("90s"), "{reason}");
    let late = requests.try_recv().unwrap();
    assert!(late.is_stale() && !late.answer(Decision::ToolForPlan));
    assert_eq!(probe.counts(), ProbeCounts::default());
    assert_eq!(fixture.end().await.started, 0);
}

#[tokio::test(start_paused = true)]
async fn an_approval_is_waited_for_for_five_minutes() {
    let (fixture, _requests) = with_person(vec![], &[&asking()]).await;
    let began = Instant::now();
    denied(fixture.plan().execute("asking", json!({})).await.unwrap_err());
    assert_eq!(began.elapsed().as_secs(), 300);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_approval_may_be_waited_for_without_an_end() {
    let builder = paused().approver(Late(100_000_000));
    let fixture = Fixture::with(builder, &[&asking()]).await;
    let options = PlanOptions::new().approval_wait(Duration::MAX).call_timeout(Duration::MAX);
    let plan = fixture.begin(options).unwrap();
    let began = Instant::now();
    assert!(plan.execute("asking", json!({})).await.unwrap().success);
    assert_eq!(began.elapsed().as_secs(), 100_000_000);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_approver_may_call_the_plan_that_asks_it() {
    #[derive(Clone, Default)]
    struct LooksFirst(Arc<OnceLock<PlanHandle>>);
    #[async_trait]
    impl Approver for LooksFirst {
        async fn decide(&self, request: &ApprovalRequest) -> Result<Decision, ToolFailure> {
            let plan = self.0.get().ok_or_else(|| ToolFailure::failed("there is no plan"))?;
            let seen = plan.execute("reader", &request.input).await?;
            Ok(if seen.success { Decision::ForPlan } else { Decision::deny("it is not there") })
        }
    }
    let reader = Probe::new("reader").capability(ToolCapability::read_only());
    let (probe, approver) = (asking(), LooksFirst::default());
    let fixture = Fixture::with(paused().approver(approver.clone()), &[&probe, &reader]).await;
    let plan = fixture.begin(PlanOptions::new().max_concurrent(1)).unwrap();
    approver.0.set(plan.handle()).unwrap();
    assert!(plan.execute("asking", json!({})).await.unwrap().success);
    assert_eq!((probe.counts().executions, reader.counts().executions), (1, 1));
    fixture.end().await;
}

// ===== what ends a wait =====

/// Has a call wait for its approval and ends that wait. The call is stopped at once, with that
/// code; nothing ran, and the question is stale.
async fn stopped<E>(code: OutcomeCode, options: PlanOptions, end: E)
where
    E: AsyncFnOnce(&Fixture, &mut Option<Plan>, CancellationToken),
{
    let probe = asking();
    let (fixture, mut requests) = with_person(vec![], &[&probe]).await;
    let mut plan = Some(fixture.begin(options).unwrap());
    let (handle, token) = (plan.as_ref().unwrap().handle(), CancellationToken::new());
    let own = CallOptions::new().token(token.clone());
    let mut waits = task::spawn(handle.execute_with("asking", json!({}), own));
    assert_pending!(waits.poll());
    let mut question = requests.try_recv().unwrap();
    assert!(!question.is_stale());

    let began = Instant::now();
    let (returned, ()) = tokio::join!(waits, end(&fixture, &mut plan, token));
    assert!(began.elapsed() < SECOND, "it was not stopped at once");
    assert_eq!(traced(&handle, &returned).outcome, code);
    question.stale().await;
    assert!(question.is_stale() && !question.answer(Decision::Once));
    assert_eq!(probe.counts(), ProbeCounts::default());
    drop(plan);
    assert_eq!(fixture.end().await.started, 0);
}

#[tokio::test(start_paused = true)]
async fn p12_the_token_of_the_call_ends_the_wait_for_its_approval() {
    stopped(OutcomeCode::Cancelled, PlanOptions::new(), async |_, plan, token| {
        token.cancel();
        assert_eq!(plan.as_ref().unwrap().end_reason(), None);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn p8_a_cancel_ends_the_wait_for_an_approval() {
    stopped(OutcomeCode::Cancelled, PlanOptions::new(), async |_, plan, _| {
        plan.as_ref().unwrap().cancel();
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn p8_the_token_of_the_plan_ends_the_wait_for_an_approval() {
    let token = CancellationToken::new();
    let options = PlanOptions::new().token(token.clone());
    stopped(OutcomeCode::Cancelled, options, async |_, _, _| token.cancel()).await;
}

#[tokio::test(start_paused = true)]
async fn p8_finish_ends_the_wait_for_an_approval() {
    stopped(OutcomeCode::PlanEnded, PlanOptions::new(), async |_, plan, _| {
        let report = plan.take().unwrap().finish().await;
        assert!(report.unsettled().is_empty());
        assert_eq!(report.overrun(), 0);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn p8_the_drop_of_the_plan_ends_the_wait_for_an_approval() {
    stopped(OutcomeCode::PlanEnded, PlanOptions::new(), async |_, plan, _| drop(plan.take())).await;
}

#[tokio::test(start_paused = true)]
async fn p8_the_deadline_of_the_plan_ends_the_wait_for_an_approval() {
    let options = PlanOptions::new().deadline(Duration::from_millis(900));
    stopped(OutcomeCode::PlanEnded, options, async |_, _, _| {}).await;
}

#[tokio::test(start_paused = true)]
async fn p8_a_shutdown_ends_the_wait_for_an_approval() {
    stopped(OutcomeCode::ShutDown, PlanOptions::new(), async |fixture, _, _| {
        let report = fixture.shutdown(10 * SECOND).await;
        assert!(report.stragglers.is_empty());
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn p8_the_end_of_a_parent_ends_the_wait_of_its_child() {
    let probe = asking();
    let (fixture, mut requests) = with_person(vec![], &[&probe]).await;
    let parent = fixture.plan();
    let child = parent.begin_child(PlanOptions::new()).unwrap();
    let mut waits = task::spawn(call(&child, "asking"));
    assert_pending!(waits.poll());
    let question = requests.try_recv().unwrap();
    assert_eq!(question.request().plan_id, child.id());
    let (returned, _) = tokio::join!(waits, parent.finish());
    assert_eq!(traced(&child, &returned).outcome, OutcomeCode::PlanEnded);
    assert!(question.is_stale());
    assert_eq!(probe.counts(), ProbeCounts::default());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_the_drop_of_the_call_ends_the_wait_for_its_approval() {
    let probe = asking();
    let (fixture, mut requests) = with_person(vec![], &[&probe]).await;
    let plan = fixture.plan();
    let mut waits = task::spawn(call(&plan, "asking"));
    assert_pending!(waits.poll());
    let mut question = requests.try_recv().unwrap();
    let mut stale = task::spawn(question.stale());
    assert_pending!(stale.poll());
    drop(waits);
    assert!(stale.is_woken());
    assert_ready!(stale.poll());
    drop(stale);
    assert!(question.is_stale() && !question.answer(Decision::ToolForPlan));
    let traces = plan.traces();
    assert_eq!((traces.len(), traces[0].outcome), (1, OutcomeCode::Abandoned));
    assert_eq!(probe.counts(), ProbeCounts::default());

    let mut again = task::spawn(call(&plan, "asking"));
    assert_pending!(again.poll(), "a stale answer must not hold");
    drop(again);
    fixture.end().await;
}

/// An approver that lets others go first, and counts the waits that began and those that are over.
#[derive(Clone, Default)]
struct Polite(Arc<(AtomicUsize, AtomicUsize)>);

#[async_trait]
impl Approver for Polite {
    async fn decide(&self, _: &ApprovalRequest) -> Result<Decision, ToolFailure> {
        struct Over<'a>(&'a AtomicUsize);
        impl Drop for Over<'_> {
            fn drop(&mut self) {
                self.0.fetch_add(1, SeqCst);
            }
        }
        self.0.0.fetch_add(1, SeqCst);
        let _over = Over(&self.0.1);
        for _ in 0..3 {
            tokio::task::yield_now().await;
        }
        Ok(Decision::Once)
    }
}

#[tokio::test(start_paused = true)]
async fn p12_a_call_that_asks_can_be_dropped_at_every_await() {
    for k in 0.. {
        let probe = asking().on_activate(Step::Yield(2)).on_execute(Step::Yield(2));
        let approver = Polite::default();
        let fixture = Fixture::with(paused().approver(approver.clone()), &[&probe]).await;
        let plan = fixture.begin(PlanOptions::new().max_calls(1)).unwrap();
        let ended = cut(call(&plan, "asking"), k).await;
        let reached = probe.counts().executions == 1;
        let codes: Vec<_> = plan.traces().iter().map(|trace| trace.outcome).collect();
        let code = if ended.is_some() { OutcomeCode::Ok } else { OutcomeCode::Abandoned };
        assert_eq!(codes, if k == 0 { vec![] } else { vec![code] }, "cut at {k}");
        let (begun, over) = (approver.0.0.load(SeqCst), approver.0.1.load(SeqCst));
        assert_eq!((begun, over), (usize::from(k > 0), begun), "cut at {k}");
        // What had not reached the tool gives its place in the quota back.
        let again = plan.execute("asking", json!({})).await;
        assert_eq!(again.is_ok(), !reached, "cut at {k}: {again:?}");
        fixture.end().await;
        if ended.is_some() {
            assert!(k > 6, "there was nothing to cut");
            return;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn p12_an_activation_by_hand_that_asks_can_be_dropped_at_every_await() {
    for k in 0.. {
        let (probe, approver) = (asking().on_activate(Step::Yield(2)), Polite::default());
        let fixture = Fixture::with(paused().approver(approver.clone()), &[&probe]).await;
        let plan = fixture.plan();
        let ended = cut(plan.activate("asking"), k).await;
        let (begun, over) = (approver.0.0.load(SeqCst), approver.0.1.load(SeqCst));
        assert_eq!((begun, over), (usize::from(k > 0), begun), "cut at {k}");
        assert_eq!(plan.traces(), []);
        fixture.end().await;
        if ended.is_some() {
            assert!(k > 3, "there was nothing to cut");
            return;
        }
    }
}

/// A call that still waits for its answer when its plan ends has not reached its tool: nothing of
/// an ended plan starts, whatever is answered afterwards.
#[tokio::test(start_paused = true)]
async fn p8_an_answer_that_comes_after_the_cancel_runs_nothing() {
    let probe = asking().immediate();
    let (fixture, mut requests) = with_person(vec![], &[&probe]).await;
    let plan = fixture.plan();
    let mut waits = task::spawn(call(&plan, "asking"));
    assert_pending!(waits.poll());
    plan.cancel();
    requests.try_recv().unwrap().answer(Decision::Once);
    let returned = waits.await;
    assert_eq!(probe.counts().executions, 0, "it ran in a cancelled plan: {returned:?}");
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::Cancelled);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_an_answer_that_comes_after_the_cancel_of_the_call_runs_nothing() {
    for probe in [asking(), asking().immediate()] {
        let (fixture, mut requests) = with_person(vec![], &[&probe]).await;
        let (plan, token) = (fixture.plan(), CancellationToken::new());
        let options = CallOptions::new().token(token.clone());
        let mut waits = task::spawn(plan.execute_with("asking", json!({}), options));
        assert_pending!(waits.poll());
        token.cancel();
        requests.try_recv().unwrap().answer(Decision::Once);
        let returned = waits.await;
        assert_eq!(probe.counts().executions, 0, "it ran though cancelled: {returned:?}");
        assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::Cancelled);
        fixture.end().await;
    }
}

/// Whoever is asked may end the plan instead of saying no.
#[tokio::test(start_paused = true)]
async fn p8_an_approver_that_cancels_the_plan_lets_nothing_run() {
    #[derive(Clone, Default)]
    struct Brake(Arc<OnceLock<PlanHandle>>);
    #[async_trait]
    impl Approver for Brake {
        async fn decide(&self, _: &ApprovalRequest) -> Result<Decision, ToolFailure> {
            self.0.get().unwrap().cancel();
            Ok(Decision::Once)
        }
    }
    let (probe, brake) = (asking().immediate(), Brake::default());
    let fixture = Fixture::with(paused().approver(brake.clone()), &[&probe]).await;
    let plan = fixture.plan();
    brake.0.set(plan.handle()).unwrap();
    let returned = plan.execute("asking", json!({})).await;
    assert_eq!(probe.counts().executions, 0, "it ran in a cancelled plan: {returned:?}");
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::Cancelled);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_tool_that_is_deactivated_while_its_call_waits_stays_so() {
    let probe = asking();
    let (fixture, mut requests) = with_person(vec![], &[&probe]).await;
    let plan = fixture.plan();
    let mut activates = task::spawn(plan.activate("asking"));
    assert_pending!(activates.poll());
    requests.try_recv().unwrap().answer(Decision::Once);
    assert_ready!(activates.poll()).unwrap();
    let mut waits = task::spawn(call(&plan, "asking"));
    assert_pending!(waits.poll());
    assert!(plan.deactivate("asking").await);
    requests.try_recv().unwrap().answer(Decision::Once);
    assert_eq!(waits.await.unwrap_err().code(), OutcomeCode::NotActivated);
    assert_eq!((probe.counts().activated, probe.counts().executions), (1, 0));
    fixture.end().await;
}

// ===== the others go on =====

#[tokio::test(start_paused = true)]
async fn the_others_of_a_turn_go_on_while_one_waits() {
    let reader = Probe::new("reader").capability(ToolCapability::read_only());
    let guarded = Probe::new("guarded").capability(ToolCapability::read_only());
    let (fixture, mut requests) = with_person(vec![], &[&reader, &guarded]).await;
    let plan = fixture.begin(PlanOptions::new().ask(name("guarded"))).unwrap();
    let calls = [
        ToolCall::new("reader", json!({"n": 1})),
        ToolCall::new("guarded", json!({"n": 2})),
        ToolCall::new("reader", json!({"n": 3})),
    ];
    let mut turn = task::spawn(plan.execute_batch(&calls));
    assert_pending!(turn.poll());
    assert_eq!((reader.counts().executions, plan.traces().len()), (2, 2));

    requests.try_recv().unwrap().answer(Decision::deny("not that one"));
    let results = turn.await;
    assert_eq!(results[0].as_ref().unwrap().output, json!({"echo": {"n": 1}}));
    assert_eq!(denied(results[1].clone().unwrap_err()), "not that one");
    assert_eq!(results[2].as_ref().unwrap().output, json!({"echo": {"n": 3}}));
    assert_eq!((guarded.counts(), plan.traces().len()), (ProbeCounts::default(), 3));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn three_calls_that_wait_are_answered_each_by_itself() {
    let probe = Probe::new("asking").capability(ToolCapability::read_only());
    let (fixture, mut requests) = with_person(vec![], &[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().ask(ToolFilter::new())).unwrap();
    let calls = [0, 1, 2].map(|n| ToolCall::new("asking", json!({"n": n})));
    let mut turn = task::spawn(plan.execute_batch(&calls));
    assert_pending!(turn.poll());
    let mut questions: Vec<_> = (0..3).map(|_| requests.try_recv().unwrap()).collect();
    assert!(questions.pop().unwrap().answer(Decision::Once));
    assert!(questions.pop().unwrap().answer(Decision::deny("no")));
    assert_pending!(turn.poll());
    assert_eq!(probe.counts().executions, 1);
    assert!(questions.pop().unwrap().answer(Decision::change(json!({"n": 7}))));
    let results = turn.await;
    assert_eq!(results[0].as_ref().unwrap().output, json!({"echo": {"n": 7}}));
    assert_eq!(denied(results[1].clone().unwrap_err()), "no");
    assert_eq!(results[2].as_ref().unwrap().output, json!({"echo": {"n": 2}}));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_that_waits_for_its_approval_holds_no_permit() {
    let asks = asking().max_concurrent(1);
    let probe = Probe::new("probe");
    let (fixture, mut requests) = with_person(vec![], &[&asks, &probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_concurrent(1)).unwrap();
    let mut waits = task::spawn(call(&plan, "asking"));
    assert_pending!(waits.poll());
    assert!(plan.execute("probe", json!({})).await.unwrap().success);

    // Nor one of the tool's own.
    let other = fixture.plan();
    let mut second = task::spawn(call(&other, "asking"));
    assert_pending!(second.poll());
    let first = requests.try_recv().unwrap();
    requests.try_recv().unwrap().answer(Decision::Once);
    assert!(second.await.unwrap().success);
    first.answer(Decision::Once);
    assert!(waits.await.unwrap().success);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn who_waits_for_an_approval_is_an_event() {
    let fixture = with_answers(&Answers::new([Decision::Once]), &[&asking()]).await;
    let plan = fixture.plan();
    let mut events = plan.subscribe();
    assert!(plan.execute("asking", json!({})).await.unwrap().success);
    let event = events.next().await.unwrap();
    assert!(matches!(event.kind, EventKind::Waiting { on: Wait::Approval, .. }), "{event:?}");
    assert_eq!(event.name.as_deref(), Some("local/asking"));
    assert_eq!(event.call_id, Some(plan.traces()[0].call_id));
    fixture.end().await;
}

// ===== whose time it costs =====

/// What an errand does: some seconds of its own, then a call, that often; then seconds again.
#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Errand {
    before: u64,
    tool: String,
    input: Value,
    after: u64,
    times: u64,
}

/// An immediate tool that runs errands.
fn runner(name: &str) -> FunctionTool {
    ToolSpec::new(name).read_only().handler(async |ctx, args: Errand| {
        for _ in 0..args.times {
            sleep(Duration::from_secs(args.before)).await;
            ctx.execute_nested(&args.tool, &args.input).await?.into_result()?;
        }
        sleep(Duration::from_secs(args.after)).await;
        Ok(())
    })
}

fn errand(before: u64, tool: &str, input: &Value, after: u64) -> Value {
    json!({"before": before, "tool": tool, "input": input, "after": after, "times": 1})
}

/// The code of a call of `outer` that has ten seconds, and how many it took. Approvals take as long
/// as their input says.
async fn timed(input: Value) -> (String, u64) {
    let probe = asking();
    let tools = [runner("outer"), runner("middle"), both()];
    let builder = tools.into_iter().fold(paused().approver(Late(60)), ToolRuntimeBuilder::tool);
    let fixture = Fixture::with(builder, &[&probe]).await;
    let plan = fixture.plan();
    let began = Instant::now();
    let options = CallOptions::new().timeout(10 * SECOND);
    let name = if input.get("both").is_some() { "both" } else { "outer" };
    let result = plan.execute_with(name, input, options).await.unwrap();
    let took = began.elapsed().as_secs();
    fixture.end().await;
    (result.code().to_owned(), took)
}

/// Two calls side by side that wait for approvals from 0 to 30 s and from 10 to 40 s, then some
/// seconds.
fn both() -> FunctionTool {
    #[derive(serde::Deserialize, schemars::JsonSchema)]
    struct After {
        both: u64,
    }
    ToolSpec::new("both").read_only().handler(async |ctx, args: After| {
        let input = json!({"wait": 30});
        let later = async {
            sleep(10 * SECOND).await;
            ctx.execute_nested("asking", &input).await
        };
        let (one, other) = tokio::join!(ctx.execute_nested("asking", &input), later);
        one?.into_result()?;
        other?.into_result()?;
        sleep(Duration::from_secs(args.both)).await;
        Ok(())
    })
}

#[tokio::test(start_paused = true)]
async fn the_wait_for_an_approval_does_not_count_as_time_of_the_call() {
    for (works, code, took) in [(9, "ok", 69), (11, "timeout", 70)] {
        let probe = asking().on_execute(Step::Slow(works * SECOND));
        let fixture = Fixture::with(paused().approver(Late(60)), &[&probe]).await;
        let plan = fixture.begin(PlanOptions::new().call_timeout(10 * SECOND)).unwrap();
        let began = Instant::now();
        let result = plan.execute("asking", json!({})).await.unwrap();
        assert_eq!((result.code(), began.elapsed().as_secs()), (code, took));
        fixture.end().await;
    }
}

/// The limits of a call that asks are as long after an approval as before it: of an activation too.
#[tokio::test(start_paused = true)]
async fn the_wait_for_an_approval_does_not_count_in_an_activation() {
    for (works, expected) in [(9, Ok(69)), (11, Err(OutcomeCode::ActivationTimeout))] {
        let probe = asking().on_activate(Step::Slow(works * SECOND));
        let fixture = Fixture::with(paused().approver(Late(60)), &[&probe]).await;
        let plan = fixture.begin(PlanOptions::new().call_timeout(10 * SECOND)).unwrap();
        let began = Instant::now();
        let returned = plan.execute("asking", json!({})).await;
        let took = began.elapsed().as_secs();
        assert_eq!(returned.map(|_| took).map_err(|error| error.code()), expected);
        fixture.end().await;
    }
}

/// Of ten seconds, however the wait lies to the moment at which they would have been over.
#[tokio::test(start_paused = true)]
async fn a_nested_wait_leaves_the_outer_call_what_it_had_left() {
    for (before, wait, after, code, took) in [
        (3, 4, 6, "ok", 13),
        (3, 4, 8, "timeout", 14),
        (3, 60, 6, "ok", 69),
        (3, 60, 8, "timeout", 70),
        (0, 60, 9, "ok", 69),
        (0, 60, 11, "timeout", 70),
        (9, 60, 0, "ok", 69),
        (9, 60, 2, "timeout", 70),
        (3, 7, 6, "ok", 16),
        (11, 60, 0, "timeout", 10),
    ] {
        let input = errand(before, "asking", &json!({"wait": wait}), after);
        assert_eq!(timed(input).await, (code.to_owned(), took), "{before} {wait} {after}");
    }
}

#[tokio::test(start_paused = true)]
async fn several_nested_waits_leave_the_outer_call_what_it_had_left() {
    for (times, after, code, took) in
        [(3, 0, "ok", 69), (3, 2, "timeout", 70), (4, 0, "timeout", 70)]
    {
        let mut input = errand(3, "asking", &json!({"wait": 20}), after);
        input["times"] = json!(times);
        assert_eq!(timed(input).await, (code.to_owned(), took), "{times} {after}");
    }
}

#[tokio::test(start_paused = true)]
async fn nested_waits_side_by_side_stop_the_clock_once() {
    assert_eq!(timed(json!({"both": 9})).await, ("ok".to_owned(), 49));
    assert_eq!(timed(json!({"both": 11})).await, ("timeout".to_owned(), 50));
}

#[tokio::test(start_paused = true)]
async fn the_wait_of_a_call_two_levels_down_stops_the_clock_of_both() {
    for (middle, after, code, took) in [(3, 3, "ok", 68), (3, 6, "timeout", 70), (4, 3, "ok", 69)] {
        let inner = errand(middle, "asking", &json!({"wait": 60}), 0);
        let input = errand(2, "middle", &inner, after);
        assert_eq!(timed(input).await, (code.to_owned(), took), "{middle} {after}");
    }
}

/// The call in the middle has a limit of its own, and is told alike.
#[tokio::test(start_paused = true)]
async fn a_call_between_the_outer_one_and_the_wait_keeps_its_own_limit() {
    for (after, code, took) in [(2, "ok", 67), (4, "timeout", 68)] {
        let probe = asking();
        let builder = paused().approver(Late(60)).tool(runner("outer")).tool(runner("middle"));
        let fixture = Fixture::with(builder, &[&probe]).await;
        // The limit of the plan is each call's; the outer one has a shorter one than it needs.
        let plan = fixture.begin(PlanOptions::new().call_timeout(6 * SECOND)).unwrap();
        let inner = errand(3, "asking", &json!({}), after);
        let began = Instant::now();
        let result = plan.execute("middle", inner).await.unwrap();
        assert_eq!((result.code(), began.elapsed().as_secs() + 2), (code, took));
        fixture.end().await;
    }
}

/// A tool that is an agent itself: the waits of the plan that it begins are those of its call.
#[tokio::test(start_paused = true)]
async fn a_wait_in_a_plan_that_a_tool_began_does_not_count_in_its_call() {
    let agent = |after: u64| {
        ToolSpec::new("agent").read_only().handler_with(after, async |after, ctx, ()| {
            let child = ctx.begin_child(PlanOptions::new())?;
            child.execute("asking", json!({"wait": 60})).await?.into_result()?;
            child.finish().await;
            sleep(Duration::from_secs(after)).await;
            Ok(())
        })
    };
    for (after, code, took) in [(9, "ok", 69), (11, "timeout", 70)] {
        let probe = asking();
        let builder = paused().approver(Late(60)).tool(agent(after));
        let fixture = Fixture::with(builder, &[&probe]).await;
        let plan = fixture.plan();
        let began = Instant::now();
        let options = CallOptions::new().timeout(10 * SECOND);
        let result = plan.execute_with("agent", json!({}), options).await.unwrap();
        assert_eq!((result.code(), began.elapsed().as_secs()), (code, took));
        fixture.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_nested_wait_that_is_given_up_starts_the_clock_again() {
    let impatient = ToolSpec::new("impatient").read_only().handler(async |ctx, (): ()| {
        let given_up = timeout(20 * SECOND, ctx.execute_nested("asking", &json!({}))).await;
        assert!(given_up.is_err());
        pending::<()>().await;
        Ok(())
    });
    let probe = asking();
    let (fixture, mut requests) = with_person(vec![impatient], &[&probe]).await;
    let plan = fixture.plan();
    let began = Instant::now();
    let options = CallOptions::new().timeout(10 * SECOND);
    let result = plan.execute_with("impatient", json!({}), options).await.unwrap();
    assert_eq!((result.code(), began.elapsed().as_secs()), ("timeout", 30));
    assert!(requests.try_recv().unwrap().is_stale());
    assert_eq!(probe.counts(), ProbeCounts::default());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_nested_wait_that_expires_starts_the_clock_again() {
    let stubborn = ToolSpec::new("stubborn").read_only().handler(async |ctx, (): ()| {
        let refused = ctx.execute_nested("asking", &json!({})).await.unwrap_err();
        assert_eq!(refused.code(), OutcomeCode::ApprovalDenied);
        pending::<()>().await;
        Ok(())
    });
    let (fixture, _requests) = with_person(vec![stubborn], &[&asking()]).await;
    let plan = fixture.begin(PlanOptions::new().approval_wait(20 * SECOND)).unwrap();
    let began = Instant::now();
    let options = CallOptions::new().timeout(10 * SECOND);
    let result = plan.execute_with("stubborn", json!({}), options).await.unwrap();
    assert_eq!((result.code(), began.elapsed().as_secs()), ("timeout", 30));
    fixture.end().await;
}

/// A cancel needs no clock: it reaches the outer call while the clock of that one stands still.
#[tokio::test(start_paused = true)]
async fn a_call_can_be_cancelled_while_a_nested_one_waits() {
    let probe = asking();
    let (fixture, mut requests) = with_person(vec![relay("relay")], &[&probe]).await;
    let (plan, token) = (fixture.plan(), CancellationToken::new());
    let options = CallOptions::new().token(token.clone()).timeout(10 * SECOND);
    let mut outer = task::spawn(plan.execute_with("relay", relayed("asking"), options));
    assert_pending!(outer.poll());
    let question = requests.try_recv().unwrap();
    token.cancel();
    let began = Instant::now();
    assert_eq!(outer.await.unwrap_err().code(), OutcomeCode::Cancelled);
    assert_eq!(began.elapsed().as_secs(), 0);
    assert!(question.is_stale());
    let codes: Vec<_> = plan.traces().iter().map(|trace| trace.outcome).collect();
    assert_eq!(codes, [OutcomeCode::Cancelled, OutcomeCode::Cancelled]);
    assert_eq!(probe.counts(), ProbeCounts::default());
    fixture.end().await;
}

// ===== whose answer it is =====

#[tokio::test(start_paused = true)]
async fn p15_the_answers_of_two_plans_do_not_mix() {
    let probe = asking();
    let (fixture, mut requests) = with_person(vec![], &[&probe]).await;
    let (one, other) = (fixture.plan(), fixture.plan());
    let mut first = task::spawn(call(&one, "asking"));
    let mut second = task::spawn(call(&other, "asking"));
    assert_pending!(first.poll());
    assert_pending!(second.poll());
    let (of_one, of_other) = (requests.try_recv().unwrap(), requests.try_recv().unwrap());
    assert_eq!((of_one.request().plan_id, of_other.request().plan_id), (one.id(), other.id()));
    assert_eq!((of_one.request().call_id, of_other.request().call_id), (1, 1));
    assert_eq!(of_one.request().fingerprint, of_other.request().fingerprint);
    of_other.answer(Decision::deny("not in this plan"));
    assert_eq!(denied(second.await.unwrap_err()), "not in this plan");
    assert_pending!(first.poll());
    of_one.answer(Decision::Once);
    assert!(first.await.unwrap().success);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_an_approval_for_one_plan_does_not_hold_in_another() {
    for decision in [Decision::ForPlan, Decision::ToolForPlan] {
        let approver = Answers::new([decision.clone(), Decision::deny("no")]);
        let fixture = with_answers(&approver, &[&asking()]).await;
        let plan = fixture.plan();
        assert!(plan.execute("asking", json!({})).await.unwrap().success);
        let error = fixture.plan().execute("asking", json!({})).await.unwrap_err();
        assert_eq!(denied(error), "no", "{decision:?}");
        assert!(plan.execute("asking", json!({})).await.unwrap().success);
        fixture.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn p15_an_approval_holds_neither_in_a_child_nor_in_a_parent() {
    let answers = [Decision::ToolForPlan, Decision::ToolForPlan, Decision::deny("no")];
    let approver = Answers::new(answers);
    let fixture = with_answers(&approver, &[&asking()]).await;
    let parent = fixture.plan();
    assert!(parent.execute("asking", json!({})).await.unwrap().success);
    let child = parent.begin_child(PlanOptions::new()).unwrap();
    assert!(child.execute("asking", json!({})).await.unwrap().success);
    assert_eq!(approver.asked(), 2);
    let sibling = parent.begin_child(PlanOptions::new()).unwrap();
    assert_eq!(denied(sibling.execute("asking", json!({})).await.unwrap_err()), "no");

    let (asked, answers) = (approver.asked(), [Decision::ToolForPlan, Decision::deny("no")]);
    assert_eq!(asked, 3);
    let approver = Answers::new(answers);
    let plan = fixture.begin(PlanOptions::new().approver(approver.clone())).unwrap();
    let child = plan.begin_child(PlanOptions::new()).unwrap();
    assert!(child.execute("asking", json!({})).await.unwrap().success);
    assert_eq!(denied(plan.execute("asking", json!({})).await.unwrap_err()), "no");
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_nested_call_asks_in_the_name_of_its_plan() {
    let approver = Answers::new([Decision::ForPlan]);
    let builder = paused().approver(approver.clone()).tool(relay("relay"));
    let fixture = Fixture::with(builder, &[&asking()]).await;
    let plan = fixture.plan();
    assert!(plan.execute("relay", relayed("asking")).await.unwrap().success);
    assert!(plan.execute("asking", json!({})).await.unwrap().success);
    assert_eq!((approver.asked(), approver.last().call_id), (1, 2));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_asks_the_approver_of_its_parent() {
    let (runtime_s, parent_s) = (Answers::new([Decision::Once]), Answers::new([Decision::Once]));
    let fixture = with_answers(&runtime_s, &[&asking()]).await;
    let parent = fixture.begin(PlanOptions::new().approver(parent_s.clone())).unwrap();
    let child = parent.begin_child(PlanOptions::new()).unwrap();
    let grandchild = child.begin_child(PlanOptions::new()).unwrap();
    assert!(grandchild.execute("asking", json!({})).await.unwrap().success);
    assert_eq!((runtime_s.asked(), parent_s.asked()), (0, 1));
    assert_eq!(parent_s.last().plan_id, grandchild.id());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_may_not_name_an_approver() {
    let yes = Answers::new([Decision::Once]);
    let (probe, approver) = (asking(), Answers::new([Decision::deny("no")]));
    let fixture = with_answers(&approver, &[&probe]).await;
    let parent = fixture.plan();
    let error = parent.begin_child(PlanOptions::new().approver(yes.clone())).unwrap_err();
    assert_eq!(error.code(), OutcomeCode::AccessDenied);
    assert_eq!((parent.end_reason(), fixture.stats().plans), (None, 1));
    assert_eq!(yes.asked(), 0);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_child_needs_both_to_allow_what_is_unsafe() {
    let probe = Probe::new("asking").capability(ToolCapability::writes().is_unsafe());
    let approver = Answers::new([Decision::deny("no")]);
    let fixture = with_answers(&approver, &[&probe]).await;
    let allow = || PlanOptions::new().allow_unsafe();
    for (parent, child, asked) in
        [(PlanOptions::new(), allow(), 1), (allow(), PlanOptions::new(), 2), (allow(), allow(), 2)]
    {
        let parent = fixture.begin(parent).unwrap();
        let child = parent.begin_child(child).unwrap();
        let returned = child.execute("asking", json!({})).await;
        assert_eq!(
            (returned.is_ok(), approver.asked()),
            (asked == 2 && probe.counts().executions == 1, asked)
        );
    }
    assert_eq!(probe.counts().executions, 1);
    fixture.end().await;
}

// ===== a definition that changes =====

fn versioned(description: &str) -> Vec<Arc<dyn Tool>> {
    let spec = ToolSpec::new("versioned").description(description).capability(by_a_person());
    vec![Arc::new(spec.function(|_: Value| Ok(1)))]
}

#[tokio::test(start_paused = true)]
async fn an_approval_does_not_hold_for_another_definition() {
    for decision in [Decision::ForPlan, Decision::ToolForPlan] {
        let approver = Answers::new([decision]);
        let fixture = with_answers(&approver, &[]).await;
        fixture.registry().replace_source("source", versioned("Reads")).unwrap();
        let plan = fixture.plan();
        let runs = async || assert!(plan.execute("versioned", json!({})).await.unwrap().success);
        runs().await;
        runs().await;
        let first = approver.last().fingerprint;
        assert_eq!(approver.asked(), 1);

        // The plan goes by the old one still.
        fixture.registry().replace_source("source", versioned("Deletes")).unwrap();
        runs().await;
        assert_eq!(approver.asked(), 1);

        assert_eq!(plan.sync_tools().changed, [name("versioned")]);
        runs().await;
        assert_eq!((approver.asked(), &*approver.last().description), (2, "Deletes"));
        assert_ne!(approver.last().fingerprint, first);

        // The one that was approved before still is.
        fixture.registry().replace_source("source", versioned("Reads")).unwrap();
        plan.sync_tools();
        runs().await;
        assert_eq!(approver.asked(), 2);
        fixture.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_approval_holds_for_the_same_definition_registered_again() {
    let approver = Answers::new([Decision::ToolForPlan]);
    let fixture = with_answers(&approver, &[]).await;
    fixture.registry().replace_source("source", versioned("Reads")).unwrap();
    let plan = fixture.plan();
    for _ in 0..2 {
        assert!(plan.execute("versioned", json!({})).await.unwrap().success);
        fixture.registry().replace_source("source", vec![]).unwrap();
        fixture.registry().replace_source("source", versioned("Reads")).unwrap();
        plan.sync_tools();
    }
    assert_eq!(approver.asked(), 1);
    fixture.end().await;
}

/// What was asked about is what runs, also when the plan has moved on meanwhile.
#[tokio::test(start_paused = true)]
async fn p12_an_approval_of_an_old_definition_does_not_run_the_new_one() {
    let old = asking();
    let new = Probe::new("asking").capability(by_a_person().idempotent());
    let (fixture, mut requests) = with_person(vec![], &[]).await;
    let fixture = fixture.track(&old).track(&new);
    let replace = |probe: &Probe| {
        fixture.registry().replace_source("source", vec![Arc::new(probe.tool())]).unwrap();
    };
    replace(&old);
    let plan = fixture.plan();
    let mut waits = task::spawn(call(&plan, "asking"));
    assert_pending!(waits.poll());
    let question = requests.try_recv().unwrap();
    replace(&new);
    plan.sync_tools();
    let mut activates = task::spawn(plan.activate("asking"));
    assert_pending!(activates.poll());
    requests.try_recv().unwrap().answer(Decision::Once);
    assert_ready!(activates.poll()).unwrap();
    question.answer(Decision::Once);
    assert_eq!(waits.await.unwrap_err().code(), OutcomeCode::DefinitionChanged);
    assert_eq!((old.counts(), new.counts().executions), (ProbeCounts::default(), 0));
    fixture.end().await;
}

// ===== activation by hand =====

#[tokio::test(start_paused = true)]
async fn p12_an_activation_by_hand_is_asked_about_without_an_input() {
    let probe = asking();
    let (fixture, mut requests) = with_person(vec![], &[&probe]).await;
    let plan = fixture.plan();
    let mut activates = task::spawn(plan.activate("asking"));
    assert_pending!(activates.poll());
    assert_eq!(probe.counts(), ProbeCounts::default());
    let question = requests.try_recv().unwrap();
    assert_eq!(
        (&question.request().tool, &question.request().input),
        (&name("asking"), &Value::Null)
    );
    question.answer(Decision::Once);
    assert_ready!(activates.poll()).unwrap();
    assert_eq!(probe.counts().activated, 1);

    // That was no approval of a call.
    let mut executes = task::spawn(call(&plan, "asking"));
    assert_pending!(executes.poll());
    requests.try_recv().unwrap().answer(Decision::Once);
    assert!(executes.await.unwrap().success);
    assert_eq!(plan.traces().len(), 1);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_approval_by_hand_for_the_tool_is_good_for_its_calls() {
    let approver = Answers::new([Decision::ToolForPlan]);
    let fixture = with_answers(&approver, &[&asking()]).await;
    let plan = fixture.plan();
    plan.activate("asking").await.unwrap();
    assert!(plan.execute("asking", json!({"n": 1})).await.unwrap().success);
    assert!(plan.deactivate("asking").await);
    plan.activate("asking").await.unwrap();
    assert_eq!(approver.asked(), 1);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_a_denied_activation_by_hand_says_why() {
    let (probe, approver) = (asking(), Answers::new([Decision::deny("ask me after lunch")]));
    let fixture = with_answers(&approver, &[&probe]).await;
    let plan = fixture.plan();
    let error = plan.activate("asking").await.unwrap_err();
    assert_eq!(
        (error.code(), probe.counts()),
        (OutcomeCode::ApprovalDenied, ProbeCounts::default())
    );
    assert_eq!(denied(error), "ask me after lunch");
    let error = ToolRunner::new(plan.handle()).activate("asking").await.unwrap_err();
    assert!(error.details.contains("ask me after lunch"), "{error}");
    assert_eq!(fixture.end().await.started, 0);
}

#[tokio::test(start_paused = true)]
async fn p12_an_activation_by_hand_that_expires_says_so() {
    let probe = asking();
    let (fixture, _requests) = with_person(vec![], &[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().approval_wait(90 * SECOND)).unwrap();
    let reason = denied(plan.activate("asking").await.unwrap_err());
    assert!(reason.contains("90s"), "{reason}");
    assert_eq!(fixture.end().await.started, 0);
}

#[tokio::test(start_paused = true)]
async fn p12_an_activation_by_hand_has_no_input_to_change() {
    let (probe, approver) = (asking(), Answers::new([Decision::change(json!({}))]));
    let fixture = with_answers(&approver, &[&probe]).await;
    let plan = fixture.plan();
    let reason = denied(plan.activate("asking").await.unwrap_err());
    assert!(reason.contains("no input to change"), "{reason}");
    assert_eq!((approver.asked(), probe.counts()), (1, ProbeCounts::default()));
    assert_eq!((plan.traces().len(), fixture.end().await.started), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn p12_an_activation_by_hand_is_refused_without_a_person() {
    let probe = asking();
    let fixture = Fixture::paused(&[&probe]).await;
    let error = fixture.plan().activate("asking").await.unwrap_err();
    assert_eq!(error.code(), OutcomeCode::ApprovalRequired);
    assert_eq!(fixture.end().await.started, 0);
}

#[tokio::test(start_paused = true)]
async fn p8_the_end_of_the_plan_ends_the_wait_of_an_activation_by_hand() {
    let probe = asking();
    let (fixture, mut requests) = with_person(vec![], &[&probe]).await;
    let plan = fixture.plan();
    let handle = plan.handle();
    let mut activates = task::spawn(handle.activate("asking"));
    assert_pending!(activates.poll());
    let question = requests.try_recv().unwrap();
    let (returned, _) = tokio::join!(activates, plan.finish());
    assert_eq!(returned.unwrap_err().code(), OutcomeCode::PlanEnded);
    assert!(question.is_stale());
    assert_eq!((probe.counts(), fixture.end().await.started), (ProbeCounts::default(), 0));
}

// ===== the channel =====

#[tokio::test(start_paused = true)]
async fn an_answer_says_whether_it_arrived() {
    let (fixture, mut requests) = with_person(vec![], &[&asking()]).await;
    let plan = fixture.plan();
    let mut waits = task::spawn(call(&plan, "asking"));
    assert_pending!(waits.poll());
    let question = requests.try_recv().unwrap();
    assert!(!question.is_stale());
    assert!(question.answer(Decision::Once));
    assert!(waits.is_woken());
    assert!(waits.await.unwrap().success);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_a_question_that_is_dropped_is_denied() {
    let probe = asking();
    let (fixture, mut requests) = with_person(vec![], &[&probe]).await;
    let plan = fixture.plan();
    let mut waits = task::spawn(call(&plan, "asking"));
    assert_pending!(waits.poll());
    drop(requests.try_recv().unwrap());
    assert!(waits.is_woken());
    let reason = denied(waits.await.unwrap_err());
    assert!(reason.contains("unanswered"), "{reason}");
    assert_eq!(probe.counts(), ProbeCounts::default());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_without_the_other_end_of_the_channel_every_question_is_denied() {
    let probe = asking();
    let (fixture, requests) = with_person(vec![], &[&probe]).await;
    let plan = fixture.plan();
    // One that is on its way.
    let mut waits = task::spawn(call(&plan, "asking"));
    assert_pending!(waits.poll());
    drop(requests);
    denied(assert_ready!(waits.poll()).unwrap_err());
    // And those that come later, at once.
    let mut later = task::spawn(call(&plan, "asking"));
    let reason = denied(assert_ready!(later.poll()).unwrap_err());
    assert!(reason.contains("nobody"), "{reason}");
    assert_eq!(probe.counts(), ProbeCounts::default());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_question_keeps_its_input_out_of_a_log() {
    let (fixture, mut requests) = with_person(vec![], &[&asking()]).await;
    let plan = fixture.plan();
    let mut waits = task::spawn(plan.execute("asking", json!({"password": "swordfish"})));
    assert_pending!(waits.poll());
    let question = requests.try_recv().unwrap();
    let text = format!("{question:?}");
    assert!(text.contains("asking") && !text.contains("swordfish"), "{text}");
    drop(waits);
    fixture.end().await;
}

// ===== the terminal =====

/// The other side of a terminal: what stands on the screen, and the keys.
struct Desk {
    keys: std::sync::mpsc::Sender<String>,
    /// The terminal waits for another line: those before it have been taken in.
    reads: UnboundedReceiver<()>,
    /// A question was put.
    puts: UnboundedReceiver<()>,
    screen: Arc<Mutex<Vec<u8>>>,
}

struct Keyboard {
    keys: std::sync::mpsc::Receiver<String>,
    line: Cursor<Vec<u8>>,
    reads: UnboundedSender<()>,
}

struct Screen {
    screen: Arc<Mutex<Vec<u8>>>,
    puts: UnboundedSender<()>,
}

impl Read for Keyboard {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.fill_buf()?.read(into)?;
        self.consume(read);
        Ok(read)
    }
}

impl BufRead for Keyboard {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.line.fill_buf()?.is_empty() {
            self.reads.send(()).unwrap_or_default();
            if let Ok(line) = self.keys.recv() {
                self.line = Cursor::new(format!("{line}\n").into_bytes());
            }
        }
        self.line.fill_buf()
    }

    fn consume(&mut self, bytes: usize) {
        self.line.consume(bytes);
    }
}

impl Write for Screen {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.screen.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.puts.send(()).unwrap_or_default();
        Ok(())
    }
}

fn terminal() -> (TerminalApprover, Desk) {
    let (keys, typed) = std::sync::mpsc::channel();
    let (send_read, reads) = unbounded_channel();
    let (send_put, puts) = unbounded_channel();
    let screen = Arc::new(Mutex::new(Vec::new()));
    let keyboard = Keyboard { keys: typed, line: Cursor::default(), reads: send_read };
    let shown = Screen { screen: Arc::clone(&screen), puts: send_put };
    (TerminalApprover::new(keyboard, shown), Desk { keys, reads, puts, screen })
}

impl Desk {
    /// Waits for the next question.
    async fn question(&mut self) {
        within(self.puts.recv()).await.expect("the terminal is gone");
    }

    /// Waits until the terminal has taken in all lines typed so far.
    async fn taken_in(&mut self) {
        within(self.reads.recv()).await.expect("nobody reads");
    }

    fn types(&self, line: &str) {
        self.keys.send(line.to_owned()).unwrap();
    }

    fn screen(&self) -> String {
        String::from_utf8(self.screen.lock().unwrap().clone()).unwrap()
    }
}

/// A request as an approver gets it.
async fn request(input: Value) -> ApprovalRequest {
    let approver = Answers::new([Decision::deny("no")]);
    let fixture = Fixture::with(paused().approver(approver.clone()), &[&asking()]).await;
    denied(fixture.plan().execute("asking", input).await.unwrap_err());
    fixture.end().await;
    approver.last()
}

/// What a line means.
async fn typed(line: &str) -> Decision {
    let (approver, mut desk) = terminal();
    let request = request(json!({})).await;
    let types = async {
        desk.question().await;
        desk.types(line);
    };
    let (decision, ()) = tokio::join!(within(approver.decide(&request)), types);
    decision.unwrap()
}

#[tokio::test]
async fn a_terminal_takes_four_letters() {
    for (line, decision) in [
        ("y", Decision::Once),
        ("yes", Decision::Once),
        (" Y ", Decision::Once),
        ("p", Decision::ForPlan),
        ("P", Decision::ForPlan),
        ("t", Decision::ToolForPlan),
        ("n not on a friday", Decision::deny("not on a friday")),
        ("No  not on a friday ", Decision::deny("not on a friday")),
    ] {
        assert_eq!(typed(line).await, decision, "{line:?}");
    }
}

#[tokio::test]
async fn p12_anything_else_that_is_typed_is_a_no() {
    for line in ["", " ", "n", "no", "q", "yy", "ja", "sure", "1", "y?", "\u{1b}[A", "ｙ"] {
        let decision = typed(line).await;
        assert!(matches!(decision, Decision::Deny { .. }), "{line:?}: {decision:?}");
    }
}

/// Only a no has words after it. What begins like a yes and goes on is none.
#[tokio::test]
async fn p12_a_letter_with_words_after_it_is_a_no() {
    for line in ["y but not that file", "yes no", "p lease don't", "t oo fast", "y n"] {
        let decision = typed(line).await;
        assert!(matches!(decision, Decision::Deny { .. }), "{line:?}: {decision:?}");
    }
}

#[tokio::test]
async fn p12_the_end_of_the_input_denies_everything() {
    let (approver, desk) = terminal();
    let request = request(json!({})).await;
    drop(desk.keys);
    for _ in 0..2 {
        let decision = within(approver.decide(&request)).await.unwrap();
        assert_eq!(decision, Decision::deny("the terminal is closed"));
    }
}

#[tokio::test]
async fn p12_the_end_of_the_input_denies_what_stands_on_the_screen() {
    let (approver, mut desk) = terminal();
    let request = request(json!({})).await;
    let mut decides = task::spawn(approver.decide(&request));
    assert_pending!(decides.poll());
    desk.question().await;
    drop(desk.keys);
    let decision = within(decides).await.unwrap();
    assert_eq!(decision, Decision::deny("the terminal is closed"));
}

#[tokio::test]
async fn p12_lines_from_before_a_question_are_no_answer_to_it() {
    let (approver, mut desk) = terminal();
    let request = request(json!({})).await;
    let mut decides = task::spawn(approver.decide(&request));
    assert_pending!(decides.poll());
    desk.question().await;
    desk.taken_in().await;
    desk.types("n");
    assert!(matches!(within(decides).await.unwrap(), Decision::Deny { .. }));
    desk.taken_in().await;

    for line in ["y", "t"] {
        desk.types(line);
        desk.taken_in().await;
    }
    let mut decides = task::spawn(approver.decide(&request));
    assert_pending!(decides.poll(), "a stale line answered");
    desk.question().await;
    desk.types("p");
    assert_eq!(within(decides).await.unwrap(), Decision::ForPlan);
}

#[tokio::test]
async fn p12_an_answer_after_the_wait_is_none_to_the_next_question() {
    let (approver, mut desk) = terminal();
    let probe = asking();
    let fixture =
        Fixture::with(toolscope::ToolRuntime::builder().approver(approver), &[&probe]).await;
    let wait = Duration::from_millis(1);
    let hasty = fixture.begin(PlanOptions::new().approval_wait(wait)).unwrap();
    denied(hasty.execute("asking", json!({})).await.unwrap_err());
    desk.question().await;
    desk.taken_in().await;
    desk.types("t");
    desk.taken_in().await;

    let plan = fixture.plan();
    let mut waits = task::spawn(call(&plan, "asking"));
    assert_pending!(waits.poll(), "a stale line answered");
    desk.question().await;
    desk.types("n not now");
    assert_eq!(denied(within(waits).await.unwrap_err()), "not now");
    assert_eq!(probe.counts(), ProbeCounts::default());
    fixture.end().await;
}

#[tokio::test]
async fn two_questions_at_once_come_one_after_another() {
    let (approver, mut desk) = terminal();
    let (one, other) =
        (request(json!({"n": "first"})).await, request(json!({"n": "second"})).await);
    let mut first = task::spawn(approver.decide(&one));
    let mut second = task::spawn(approver.decide(&other));
    assert_pending!(first.poll());
    assert_pending!(second.poll());
    desk.question().await;
    assert!(desk.screen().contains("first") && !desk.screen().contains("second"));
    desk.types("y");
    assert_eq!(within(first).await.unwrap(), Decision::Once);
    assert!(!desk.screen().contains("second"));
    assert!(second.is_woken());
    assert_pending!(second.poll(), "the answer to the first is none to the second");
    assert!(desk.screen().contains("second"));
    desk.question().await;
    desk.types("n");
    assert!(matches!(within(second).await.unwrap(), Decision::Deny { .. }));
}

#[tokio::test]
async fn a_question_that_is_taken_back_does_not_eat_the_next_answer() {
    let (approver, mut desk) = terminal();
    let request = request(json!({})).await;
    let mut stands = task::spawn(approver.decide(&request));
    let mut queues = task::spawn(approver.decide(&request));
    let mut last = task::spawn(approver.decide(&request));
    assert_pending!(stands.poll());
    assert_pending!(queues.poll());
    assert_pending!(last.poll());
    desk.question().await;
    drop(queues);
    drop(stands);
    assert!(last.is_woken());
    assert_pending!(last.poll());
    desk.question().await;
    desk.types("t");
    assert_eq!(within(last).await.unwrap(), Decision::ToolForPlan);
}

#[tokio::test]
async fn a_question_says_what_is_asked() {
    let (approver, mut desk) = terminal();
    let request = request(json!({"path": "/tmp/a"})).await;
    let mut decides = task::spawn(approver.decide(&request));
    assert_pending!(decides.poll());
    desk.question().await;
    drop(decides);
    let screen = desk.screen();
    let plan = format!("plan {}", request.plan_id);
    for part in
        ["local/asking", &plan, "human_approval_required", "/tmp/a", &request.fingerprint[..12]]
    {
        assert!(screen.contains(part), "`{part}` is not in {screen}");
    }
}

/// The screen after a question with that text in its description, its reason and its input.
async fn shown(text: &str) -> String {
    let (approver, mut desk) = terminal();
    let mut request = request(json!({"path": text})).await;
    request.description = text.to_owned();
    request.reason = text.to_owned();
    let mut decides = task::spawn(approver.decide(&request));
    assert_pending!(decides.poll());
    desk.question().await;
    drop(decides);
    desk.screen()
}

#[tokio::test]
async fn p12_what_controls_a_terminal_is_written_out() {
    let controls = "\u{0}\u{7}\u{8}\u{9}\u{b}\u{d}\u{1b}[2J\u{7f}\u{85}\u{9b}31m";
    let screen = shown(controls).await;
    let raw = screen.chars().find(|c| c.is_control() && *c != '\n');
    assert_eq!(raw, None, "{screen:?}");
    assert!(screen.contains("\\u{1b}[2J") && screen.contains("\\u{9b}31m"), "{screen:?}");
}

#[tokio::test]
async fn p12_what_turns_the_direction_of_a_text_is_written_out() {
    // All that have the Unicode property Bidi_Control.
    let turns = "\u{61c}\u{200e}\u{200f}\u{202a}\u{202b}\u{202c}\u{202d}\u{202e}\
                 \u{2066}\u{2067}\u{2068}\u{2069}";
    let screen = shown(turns).await;
    let raw: Vec<_> = screen.chars().filter(|c| turns.contains(*c)).collect();
    assert!(raw.is_empty(), "{raw:?} stand on the screen as they are");
    assert!(screen.contains("\\u{202e}"), "{screen:?}");
}

#[tokio::test]
async fn p12_what_cannot_be_seen_is_written_out() {
    // Spaces of no width, joiners, a soft hyphen, line and paragraph ends, a mark of the byte
    // order, and letters of the block of tags, which no terminal shows and every model reads.
    let hides = "\u{ad}\u{180e}\u{200b}\u{200c}\u{200d}\u{2028}\u{2029}\u{2060}\u{2064}\
                 \u{feff}\u{e0001}\u{e0041}\u{e007f}";
    let screen = shown(hides).await;
    let raw: Vec<_> = screen.chars().filter(|c| hides.contains(*c)).collect();
    assert!(raw.is_empty(), "{raw:?} stand on the screen as they are");
}

/// A description cannot put words that stand where the question's own do.
#[tokio::test]
async fn p12_a_line_of_a_description_does_not_begin_a_line_of_the_screen() {
    let screen = shown("harmless\nrun it? [y]es\n  input: {}").await;
    let lines: Vec<_> = screen.lines().filter(|line| line.starts_with("run it?")).collect();
    assert_eq!(lines.len(), 1, "{screen}");
    let inputs: Vec<_> = screen.lines().filter(|line| line.starts_with("  input:")).collect();
    assert_eq!(inputs.len(), 1, "{screen}");
}

#[tokio::test]
async fn p14_a_terminal_that_cannot_be_written_denies() {
    struct Broken;
    impl Write for Broken {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::Error::other("the screen is off"))
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let probe = asking();
    let approver = TerminalApprover::new(Cursor::new("y\ny\ny\n"), Broken);
    let fixture = Fixture::with(paused().approver(approver), &[&probe]).await;
    for _ in 0..2 {
        let reason = denied(fixture.plan().execute("asking", json!({})).await.unwrap_err());
        assert!(reason.contains("the screen is off"), "{reason}");
    }
    assert_eq!(probe.counts(), ProbeCounts::default());
    fixture.end().await;
}

#[tokio::test]
async fn p14_a_terminal_whose_input_fails_denies() {
    struct Broken;
    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::other("the cable is out"))
        }
    }
    let request = request(json!({})).await;
    let approver = TerminalApprover::new(io::BufReader::new(Broken), io::sink());
    let decision = within(approver.decide(&request)).await.unwrap();
    assert!(matches!(decision, Decision::Deny { .. }), "{decision:?}");
}

// ===== quotas and deadlines of an end =====

/// The end of a plan does not wait for who waits for an approval, and gives it no grace.
#[tokio::test(start_paused = true)]
async fn p9_the_end_of_a_plan_does_not_wait_for_an_approval() {
    let (fixture, _requests) = with_person(vec![relay("relay")], &[&asking()]).await;
    let long = Deadlines::default().grace(3600 * SECOND).end(7200 * SECOND);
    let plan = fixture.begin(PlanOptions::new().deadlines(long)).unwrap();
    let handle = plan.handle();
    let mut direct = task::spawn(call(&handle, "asking"));
    let mut nested = task::spawn(handle.execute("relay", relayed("asking")));
    assert_pending!(direct.poll());
    assert_pending!(nested.poll());
    let began = Instant::now();
    let (_, _, report) = tokio::join!(direct, nested, plan.finish());
    assert_eq!(began.elapsed().as_secs(), 0);
    assert_eq!((report.traces().len(), report.overrun()), (3, 0));
    fixture.end().await;
}

/// There is nothing to be asked about: nothing would be activated.
#[tokio::test(start_paused = true)]
async fn to_activate_what_is_active_asks_nobody() {
    let approver = Answers::new([Decision::Once, Decision::deny("no")]);
    let probe = asking();
    let fixture = Fixture::with(paused().approver(approver.clone()), &[&probe]).await;
    let plan = fixture.plan();
    assert!(plan.execute("asking", json!({})).await.unwrap().success);
    plan.activate("asking").await.unwrap();
    assert_eq!(probe.counts().activations, 1);
    plan.finish().await;
    fixture.end().await;
}
