//! Layers: their order, what they may change, answer and refuse, and what they can never add to a
//! call.

use std::future::{Future, pending, ready};
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use serde_json::{Map, Value, json};
use tokio::time::{Instant, sleep};
use tokio_test::{assert_pending, task};
use tokio_util::sync::CancellationToken;
use toolscope::test_util::{Probe, ProbeCounts, Step};
use toolscope::{
    Before, CallError, CallOptions, Decision, FailureKind, FunctionTool, Layer, LayerCall,
    OutcomeCode, OutputCheck, PlanHandle, PlanId, PlanOptions, ToolCall, ToolCapability,
    ToolFailure, ToolOutput, ToolRunner, ToolRuntimeBuilder, ToolRuntimeError, ToolSpec,
    async_trait,
};

use crate::approval::{Answers, Bomb, Numbered};
use crate::call::{relay, relayed, traced};
use crate::cut::cut;
use crate::hooks::{call, until, within};
use crate::support::{Fixture, paused};

const SECOND: Duration = Duration::from_secs(1);

// ===== layers of these tests =====

type Given = Result<ToolOutput, ToolFailure>;
type Work<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// What happened, in its order: `+name` on the way in, `-name` on the way out.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<String>>>);

impl Seen {
    fn add(&self, what: impl Into<String>) {
        self.0.lock().unwrap().push(what.into());
    }

    /// What happened since the last look.
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

/// The facts of a call, as a layer saw them.
#[derive(Clone, Debug, PartialEq)]
struct Facts {
    plan: PlanId,
    call: u64,
    parent: Option<u64>,
    tool: String,
    input: Value,
    metadata: Map<String, Value>,
}

impl From<&LayerCall<'_>> for Facts {
    fn from(call: &LayerCall<'_>) -> Self {
        Self {
            plan: call.plan_id,
            call: call.call_id,
            parent: call.parent_call_id,
            tool: call.tool.name.to_string(),
            input: call.input.clone(),
            metadata: call.metadata.clone(),
        }
    }
}

type BeforeHook = dyn Fn(Facts) -> Work<Before> + Send + Sync;
type AfterHook = dyn Fn(Facts, Given) -> Work<Given> + Send + Sync;

/// A layer that says when it is passed, with code of the test's own. Its futures are made before
/// there is one, where the test says so.
#[derive(Clone)]
struct Hook {
    name: &'static str,
    seen: Seen,
    before: Arc<BeforeHook>,
    after: Arc<AfterHook>,
}

impl Hook {
    fn new(name: &'static str, seen: &Seen) -> Self {
        Self {
            name,
            seen: seen.clone(),
            before: Arc::new(|_| Box::pin(ready(Before::Continue))),
            after: Arc::new(|_, given| Box::pin(ready(given))),
        }
    }

    fn before(mut self, decide: impl Fn(Facts) -> Before + Send + Sync + 'static) -> Self {
        self.before = Arc::new(move |facts| Box::pin(ready(decide(facts))));
        self
    }

    fn before_async(
        mut self,
        decide: impl Fn(Facts) -> Work<Before> + Send + Sync + 'static,
    ) -> Self {
        self.before = Arc::new(decide);
        self
    }

    fn after(mut self, give: impl Fn(Facts, Given) -> Given + Send + Sync + 'static) -> Self {
        self.after = Arc::new(move |facts, given| Box::pin(ready(give(facts, given))));
        self
    }

    fn after_async(
        mut self,
        give: impl Fn(Facts, Given) -> Work<Given> + Send + Sync + 'static,
    ) -> Self {
        self.after = Arc::new(give);
        self
    }
}

/// Written out, so that the code of the test runs before there is a future.
impl Layer for Hook {
    fn before<'life0, 'life1, 'life2, 'async_trait>(
        &'life0 self,
        call: &'life1 LayerCall<'life2>,
    ) -> Pin<Box<dyn Future<Output = Before> + Send + 'async_trait>>
    where
        'life0: 'async_trait,
        'life1: 'async_trait,
        'life2: 'async_trait,
        Self: 'async_trait,
    {
        self.seen.add(format!("+{}", self.name));
        (self.before)(call.into())
    }

    fn after<'life0, 'life1, 'life2, 'async_trait>(
        &'life0 self,
        call: &'life1 LayerCall<'life2>,
        given: Given,
    ) -> Pin<Box<dyn Future<Output = Given> + Send + 'async_trait>>
    where
        'life0: 'async_trait,
        'life1: 'async_trait,
        'life2: 'async_trait,
        Self: 'async_trait,
    {
        self.seen.add(format!("-{}", self.name));
        (self.after)(call.into(), given)
    }
}

/// A runtime with those layers round that probe.
async fn layered(layers: impl IntoIterator<Item = Hook>, probes: &[&Probe]) -> Fixture {
    Fixture::with(with_layers(layers), probes).await
}

fn with_layers(layers: impl IntoIterator<Item = Hook>) -> ToolRuntimeBuilder {
    layers.into_iter().fold(paused(), ToolRuntimeBuilder::layer)
}

/// A reader that wants a number, gives it back, and says when it runs.
fn numbered(seen: &Seen) -> Numbered {
    let seen = seen.clone();
    Numbered::new(ToolCapability::read_only(), move || seen.add("tool"))
}

/// A managed writer.
fn probe() -> Probe {
    Probe::new("probe")
}

// ===== order =====

#[tokio::test(start_paused = true)]
async fn the_first_layer_is_the_outermost() {
    let seen = Seen::default();
    let builder = with_layers(["a", "b", "c"].map(|name| Hook::new(name, &seen)));
    let fixture = Fixture::with(builder.tool(numbered(&seen)), &[]).await;
    let plan = fixture.plan();
    let returned = plan.execute("numbered", json!({"number": 7})).await;
    assert!(traced(&plan, &returned).success());
    assert_eq!(returned.unwrap().output, json!(7));
    assert_eq!(seen.take(), ["+a", "+b", "+c", "tool", "-c", "-b", "-a"]);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_layer_has_the_facts_of_the_call() {
    let seen = Seen::default();
    let (before, after) = (Arc::new(OnceLock::new()), Arc::new(OnceLock::new()));
    let (of_before, of_after) = (Arc::clone(&before), Arc::clone(&after));
    let layer = Hook::new("a", &seen)
        .before(move |facts| {
            of_before.set(facts).unwrap();
            Before::Continue
        })
        .after(move |facts, given| {
            of_after.set(facts).unwrap();
            given
        });
    let fixture = layered([layer], &[&probe()]).await;
    let plan = fixture.begin(PlanOptions::new().metadata("user", "ada")).unwrap();
    assert!(plan.execute("local__probe", json!({"n": 1})).await.unwrap().success);
    let expected = Facts {
        plan: plan.id(),
        call: plan.traces()[0].call_id,
        parent: None,
        tool: "local/probe".to_owned(),
        input: json!({"n": 1}),
        metadata: Map::from_iter([("user".to_owned(), json!("ada"))]),
    };
    assert_eq!((before.get(), after.get()), (Some(&expected), Some(&expected)));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_layer_keeps_the_input_out_of_a_log() {
    struct Logs(Seen);
    #[async_trait]
    impl Layer for Logs {
        async fn before(&self, call: &LayerCall<'_>) -> Before {
            self.0.add(format!("{call:?}"));
            Before::Continue
        }
    }
    let seen = Seen::default();
    let fixture = Fixture::with(paused().layer(Logs(seen.clone())), &[&probe()]).await;
    let plan = fixture.plan();
    assert!(plan.execute("probe", json!({"password": "swordfish"})).await.unwrap().success);
    let text = seen.take().concat();
    assert!(text.contains("local/probe") && !text.contains("swordfish"), "{text}");
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_layer_that_says_nothing_changes_nothing() {
    struct Silent;
    #[async_trait]
    impl Layer for Silent {}
    let probe = probe().on_execute([Step::Ok, Step::Err]);
    let fixture = Fixture::with(paused().layer(Silent), &[&probe]).await;
    let plan = fixture.plan();
    let result = plan.execute("probe", json!({"n": 1})).await.unwrap();
    assert_eq!((result.output, result.metadata), (json!({"echo": {"n": 1}}), Map::new()));
    assert_eq!(plan.execute("probe", json!({})).await.unwrap().code(), "execution");
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_is_no_call_of_a_known_tool_comes_to_no_layer() {
    let (seen, probe) = (Seen::default(), probe());
    let fixture = layered([Hook::new("a", &seen)], &[&probe]).await;
    let plan = fixture.plan();
    let error = plan.execute("nobody", json!({})).await.unwrap_err();
    assert_eq!(error.code(), OutcomeCode::NotFound);
    plan.activate("probe").await.unwrap();
    let token = CancellationToken::new();
    token.cancel();
    let cancelled = CallOptions::new().token(token);
    assert!(plan.execute_with("probe", json!({}), cancelled).await.is_err());
    let handle = plan.handle();
    plan.finish().await;
    assert!(handle.execute("probe", json!({})).await.is_err());
    assert_eq!(seen.take(), [""; 0]);
    fixture.end().await;
}

// ===== refusing =====

#[tokio::test(start_paused = true)]
async fn p12_a_layer_that_refuses_lets_nothing_run() {
    let (seen, probe) = (Seen::default(), probe());
    let refuses = Hook::new("b", &seen).before(|_| Before::Refuse("not on a friday".to_owned()));
    let layers = [Hook::new("a", &seen), refuses, Hook::new("c", &seen)];
    let fixture = layered(layers, &[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_calls(0)).unwrap();
    let returned = plan.execute("probe", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::AccessDenied);
    match returned.unwrap_err() {
        CallError::Runtime(ToolRuntimeError::AccessDenied { tool, reason, .. }) => {
            assert_eq!((&*tool, &*reason), ("local/probe", "not on a friday"));
        }
        other => panic!("another outcome: {other:?}"),
    }
    assert_eq!(seen.take(), ["+a", "+b"]);
    assert_eq!(probe.counts(), ProbeCounts::default());
    assert_eq!(fixture.end().await.started, 0);
}

// ===== changing =====

#[tokio::test(start_paused = true)]
async fn a_layer_changes_the_input_of_all_that_is_inside_it() {
    let seen = Seen::default();
    let adds = |name: &'static str, seen: &Seen| {
        let (of_before, of_after) = (seen.clone(), seen.clone());
        Hook::new(name, seen)
            .before(move |facts| {
                of_before.add(facts.input["number"].to_string());
                let number = facts.input["number"].as_i64().unwrap();
                Before::Change(json!({"number": number + 1}))
            })
            .after(move |facts, given| {
                of_after.add(facts.input["number"].to_string());
                given
            })
    };
    let builder = with_layers([adds("a", &seen), adds("b", &seen)]);
    let fixture = Fixture::with(builder.tool(numbered(&seen)), &[]).await;
    let plan = fixture.plan();
    let result = plan.execute("numbered", json!({"number": 1})).await.unwrap();
    assert_eq!((result.output, result.metadata), (json!(3), Map::new()));
    assert_eq!(seen.take(), ["+a", "1", "+b", "2", "tool", "-b", "3", "-a", "3"]);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_an_input_that_a_layer_breaks_runs_nothing() {
    for broken in [json!({"number": "two"}), json!({}), json!([]), json!("two"), Value::Null] {
        let seen = Seen::default();
        let breaks = Hook::new("a", &seen).before(move |_| Before::Change(broken.clone()));
        let builder = with_layers([breaks]).tool(numbered(&seen));
        let fixture = Fixture::with(builder, &[]).await;
        let plan = fixture.plan();
        let returned = plan.execute("numbered", json!({"number": 1})).await;
        assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::InvalidInput);
        assert_eq!(seen.take(), ["+a"]);
        fixture.end().await;
    }
}

/// What is checked is what the tool is given.
#[tokio::test(start_paused = true)]
async fn an_input_that_a_layer_repairs_is_the_one_that_is_checked() {
    let seen = Seen::default();
    let repairs = Hook::new("a", &seen).before(|facts| {
        let number: i64 = facts.input["number"].as_str().unwrap().parse().unwrap();
        Before::Change(json!({"number": number}))
    });
    let fixture = Fixture::with(with_layers([repairs]).tool(numbered(&seen)), &[]).await;
    let result = fixture.plan().execute("numbered", json!({"number": "7"})).await.unwrap();
    assert_eq!((result.success, result.output), (true, json!(7)));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_layer_cannot_make_a_refused_call_run() {
    for decision in [
        Before::Continue,
        Before::Change(json!({"harmless": true})),
        Before::Answer(ToolOutput::new(json!(1))),
    ] {
        let (seen, probe) = (Seen::default(), probe());
        let layer = Hook::new("a", &seen).before(move |_| decision.clone());
        let fixture = layered([layer], &[&probe]).await;
        for options in [
            PlanOptions::new().read_only(),
            PlanOptions::new().deny("probe".parse::<toolscope::ToolName>().unwrap()),
            PlanOptions::new().require_checkpoints(),
            PlanOptions::new().max_calls(0),
        ] {
            let plan = fixture.begin(options).unwrap();
            let returned = plan.execute("probe", json!({})).await;
            assert!(returned.is_err(), "{returned:?}");
            traced(&plan, &returned);
            assert_eq!(seen.take(), ["+a"], "it is not called for a call that was refused");
        }
        assert_eq!(probe.counts(), ProbeCounts::default());
        assert_eq!(fixture.end().await.started, 0);
    }
}

/// Whoever approves, approves what the tool is given.
#[tokio::test(start_paused = true)]
async fn p12_what_is_approved_is_the_input_that_a_layer_made() {
    let seen = Seen::default();
    let changes = Hook::new("a", &seen).before(|_| Before::Change(json!({"path": "b"})));
    let approver = Answers::new([Decision::ForPlan]);
    let builder = with_layers([changes]).approver(approver.clone());
    let probe = probe().capability(ToolCapability::writes().human_approval_required());
    let fixture = Fixture::with(builder, &[&probe]).await;
    let plan = fixture.plan();
    for path in ["a", "b", "c"] {
        let result = plan.execute("probe", json!({"path": path})).await.unwrap();
        assert_eq!(result.output, json!({"echo": {"path": "b"}}));
    }
    assert_eq!(approver.asked(), 1);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn after_an_approver_s_change_a_layer_sees_the_changed_input() {
    let seen = Seen::default();
    let of_after = seen.clone();
    let looks = Hook::new("a", &seen).after(move |facts, given| {
        of_after.add(facts.input.to_string());
        given
    });
    let approver = Answers::new([Decision::change(json!({"path": "b"}))]);
    let builder = with_layers([looks]).approver(approver);
    let probe = probe().capability(ToolCapability::writes().human_approval_required());
    let fixture = Fixture::with(builder, &[&probe]).await;
    assert!(fixture.plan().execute("probe", json!({"path": "a"})).await.unwrap().success);
    assert_eq!(seen.take(), ["+a", "-a", r#"{"path":"b"}"#]);
    fixture.end().await;
}

// ===== answering =====

fn answers(name: &'static str, seen: &Seen, output: Value) -> Hook {
    Hook::new(name, seen).before(move |_| Before::Answer(ToolOutput::new(output.clone())))
}

#[tokio::test(start_paused = true)]
async fn p12_a_tool_that_a_layer_answers_for_is_neither_activated_nor_run() {
    let (seen, probe) = (Seen::default(), probe());
    let layers =
        [Hook::new("a", &seen), answers("b", &seen, json!({"sum": 3})), Hook::new("c", &seen)];
    let fixture = layered(layers, &[&probe]).await;
    let plan = fixture.plan();
    let returned = plan.execute("probe", json!({})).await;
    let trace = traced(&plan, &returned);
    assert_eq!((trace.outcome, trace.result_size_bytes), (OutcomeCode::Ok, 9));
    assert_eq!(returned.unwrap().output, json!({"sum": 3}));
    assert_eq!(seen.take(), ["+a", "+b", "-a"], "only those outside it are passed on the way out");
    assert_eq!(probe.counts(), ProbeCounts::default());
    assert_eq!(fixture.end().await.started, 0);
}

#[tokio::test(start_paused = true)]
async fn an_answer_needs_no_permit() {
    let seen = Seen::default();
    let probe = probe().max_concurrent(1).on_execute(Step::Never);
    let knows = Hook::new("a", &seen).before(|facts| {
        if facts.input.get("known").is_some() {
            Before::Answer(ToolOutput::new(json!(1)))
        } else {
            Before::Continue
        }
    });
    let fixture = layered([knows], &[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_concurrent(1)).unwrap();
    let mut holds = task::spawn(call(&plan, "probe"));
    assert_pending!(holds.poll());
    let began = Instant::now();
    assert_eq!(plan.execute("probe", json!({"known": 1})).await.unwrap().output, json!(1));
    assert_eq!(began.elapsed().as_secs(), 0);
    drop(holds);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_answer_is_asked_about_by_nobody() {
    let (seen, approver) = (Seen::default(), Answers::new([Decision::deny("no")]));
    let builder = with_layers([answers("a", &seen, json!(1))]).approver(approver.clone());
    let probe = probe().capability(ToolCapability::writes().human_approval_required());
    let fixture = Fixture::with(builder, &[&probe]).await;
    assert_eq!(fixture.plan().execute("probe", json!({})).await.unwrap().output, json!(1));
    assert_eq!((approver.asked(), probe.counts()), (0, ProbeCounts::default()));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p15_a_writer_that_a_layer_answers_for_is_refused_in_a_read_only_plan() {
    let (seen, probe) = (Seen::default(), probe());
    let fixture = layered([answers("a", &seen, json!(1))], &[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().read_only()).unwrap();
    let returned = plan.execute("probe", json!({})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::AccessDenied);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_an_answer_to_an_input_that_does_not_fit_is_none() {
    let seen = Seen::default();
    let builder = with_layers([Hook::new("a", &seen), answers("b", &seen, json!(1))]);
    let fixture = Fixture::with(builder.tool(numbered(&seen)), &[]).await;
    let plan = fixture.plan();
    let returned = plan.execute("numbered", json!({"number": "two"})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::InvalidInput);
    assert_eq!(seen.take(), ["+a", "+b"]);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_answer_goes_by_the_schema_of_the_output() {
    let seen = Seen::default();
    let builder = with_layers([answers("a", &seen, json!("no number"))]);
    let fixture = Fixture::with(builder.tool(numbered(&seen)), &[]).await;
    for (check, code, valid) in [
        (OutputCheck::Warn, OutcomeCode::Ok, Some(false)),
        (OutputCheck::Reject, OutcomeCode::InvalidOutput, Some(false)),
        (OutputCheck::Off, OutcomeCode::Ok, None),
    ] {
        let plan = fixture.begin(PlanOptions::new().output_check(check)).unwrap();
        let returned = plan.execute("numbered", json!({"number": 1})).await;
        let trace = traced_but_for_text(&plan, &returned);
        assert_eq!((trace.outcome, trace.output_valid), (code, valid), "{check:?}");
        let said = returned.unwrap().metadata.get("output_valid").cloned();
        assert_eq!(said, (check == OutputCheck::Warn).then_some(json!(false)));
    }
    assert_eq!(seen.take(), ["+a", "+a", "+a"]);
    fixture.end().await;
}

/// As [`traced`]; the trace of a success may have a text about its output.
#[track_caller]
fn traced_but_for_text(
    plan: &PlanHandle,
    returned: &Result<toolscope::ToolResult, CallError>,
) -> toolscope::ToolExecutionTrace {
    let traces = plan.traces();
    let [trace] = traces.as_slice() else { panic!("not one trace: {traces:?}") };
    let result = returned.as_ref().unwrap();
    assert_eq!(result.code(), trace.outcome.as_str());
    let size = serde_json::to_string(&result.output).unwrap().len();
    assert_eq!(trace.result_size_bytes, if result.success { size } else { 0 });
    trace.clone()
}

#[tokio::test(start_paused = true)]
async fn an_answer_is_cut_to_the_limit() {
    let seen = Seen::default();
    let fixture = layered([answers("a", &seen, json!("x".repeat(1000)))], &[&probe()]).await;
    let plan = fixture.begin(PlanOptions::new().max_output_bytes(50)).unwrap();
    let returned = plan.execute("probe", json!({})).await;
    assert_eq!(traced(&plan, &returned).result_size_bytes, 50);
    let result = returned.unwrap();
    assert_eq!(result.metadata["truncated"], json!({"from_bytes": 1002, "to_bytes": 50}));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_metadata_of_an_answer_reaches_the_host() {
    let seen = Seen::default();
    let output = ToolOutput::new(json!(1)).with_metadata("cached", true);
    let layer = Hook::new("a", &seen).before(move |_| Before::Answer(output.clone()));
    let fixture = layered([layer], &[&probe()]).await;
    let result = fixture.plan().execute("probe", json!({})).await.unwrap();
    assert_eq!(result.metadata["cached"], json!(true));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_layer_outside_an_answer_sees_and_may_replace_it() {
    let seen = Seen::default();
    let doubles = Hook::new("a", &seen).after(|_, given| {
        let number = given?.value.as_i64().unwrap();
        Ok(ToolOutput::new(json!(number * 2)))
    });
    let fixture = layered([doubles, answers("b", &seen, json!(21))], &[&probe()]).await;
    assert_eq!(fixture.plan().execute("probe", json!({})).await.unwrap().output, json!(42));
    fixture.end().await;
}

// ===== on the way out =====

#[tokio::test(start_paused = true)]
async fn a_layer_makes_a_success_of_a_failure() {
    let seen = Seen::default();
    let of_after = seen.clone();
    let forgives = Hook::new("a", &seen).after(move |_, given| {
        let failure = given.unwrap_err();
        assert_eq!(failure.kind(), FailureKind::Failed);
        of_after.add(failure.message());
        Ok(ToolOutput::new(json!("never mind")))
    });
    let probe = probe().on_execute(Step::Err);
    let fixture = layered([forgives], &[&probe]).await;
    let plan = fixture.plan();
    let returned = plan.execute("probe", json!({})).await;
    assert!(traced(&plan, &returned).success());
    assert_eq!(returned.unwrap().output, json!("never mind"));
    assert_eq!(seen.take(), ["+a", "-a", "the probe fails in execute"]);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_layer_makes_a_failure_of_a_success() {
    for (kind, code) in [
        (FailureKind::Failed, OutcomeCode::Execution),
        (FailureKind::Invalid, OutcomeCode::InvalidInput),
        (FailureKind::OutcomeUnknown, OutcomeCode::OutcomeUnknown),
        (FailureKind::NotActivated, OutcomeCode::NotActivated),
        // Nobody asked it to stop.
        (FailureKind::Cancelled, OutcomeCode::Execution),
    ] {
        let (seen, probe) = (Seen::default(), probe());
        let judges = Hook::new("a", &seen).after(move |_, given| {
            assert!(given.is_ok());
            Err(ToolFailure::new(kind, "that will not do"))
        });
        let fixture = layered([judges], &[&probe]).await;
        let plan = fixture.plan();
        let returned = plan.execute("probe", json!({})).await;
        assert_eq!(traced(&plan, &returned).outcome, code);
        assert_eq!(returned.unwrap().error.as_deref(), Some("that will not do"));
        assert_eq!(probe.counts().executions, 1);
        fixture.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn what_one_layer_gives_the_next_one_outside_sees() {
    let seen = Seen::default();
    let fails = Hook::new("b", &seen).after(|_, _| Err(ToolFailure::failed("from b")));
    let adds = Hook::new("a", &seen).after(|_, given| {
        let failure = given.unwrap_err();
        Ok(ToolOutput::new(json!(format!("{} to a", failure.message()))))
    });
    let fixture = layered([adds, fails], &[&probe()]).await;
    let result = fixture.plan().execute("probe", json!({})).await.unwrap();
    assert_eq!(result.output, json!("from b to a"));
    assert_eq!(seen.take(), ["+a", "+b", "-b", "-a"]);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_a_layer_gives_goes_by_the_schema_and_the_limit() {
    let seen = Seen::default();
    let replaces = Hook::new("a", &seen).after(|_, _| Ok(ToolOutput::new(json!("x".repeat(100)))));
    let builder = with_layers([replaces]).tool(numbered(&seen));
    let fixture = Fixture::with(builder, &[]).await;
    let options = PlanOptions::new().max_output_bytes(50);
    let plan = fixture.begin(options.clone()).unwrap();
    let returned = plan.execute("numbered", json!({"number": 1})).await;
    assert_eq!(traced_but_for_text(&plan, &returned).output_valid, Some(false));
    let metadata = returned.unwrap().metadata;
    assert_eq!(metadata["truncated"]["to_bytes"], json!(50));
    assert_eq!(metadata["output_valid"], json!(false));
    let plan = fixture.begin(options.output_check(OutputCheck::Reject)).unwrap();
    let returned = plan.execute("numbered", json!({"number": 1})).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::InvalidOutput);
    fixture.end().await;
}

/// The way out is for what a tool gave; what gave nothing has no way out.
#[tokio::test(start_paused = true)]
async fn a_call_that_gave_nothing_passes_no_layer_on_its_way_out() {
    let options = || PlanOptions::new().call_timeout(SECOND);
    for (probe, code) in [
        (probe().on_execute(Step::Panic), OutcomeCode::Panic),
        (probe().on_execute(Step::Never), OutcomeCode::Timeout),
        (probe().on_activate(Step::Err), OutcomeCode::Activation),
        (probe().on_activate(Step::Never), OutcomeCode::ActivationTimeout),
        (probe().capability(ToolCapability::writes().is_unsafe()), OutcomeCode::ApprovalRequired),
    ] {
        let seen = Seen::default();
        let fixture = layered([Hook::new("a", &seen)], &[&probe]).await;
        let plan = fixture.begin(options()).unwrap();
        let returned = plan.execute("probe", json!({})).await;
        assert_eq!(traced(&plan, &returned).outcome, code);
        assert_eq!(seen.take(), ["+a"], "{code}");
        fixture.end().await;
    }
}

/// A result that the tool still gave within the grace goes out through the layers too.
#[tokio::test(start_paused = true)]
async fn p13_a_result_within_the_grace_passes_the_layers() {
    let seen = Seen::default();
    let probe = probe().on_execute(Step::UntilCancelled);
    let fixture = layered([Hook::new("a", &seen)], &[&probe]).await;
    let plan = fixture.plan();
    let mut runs = task::spawn(call(&plan, "probe"));
    assert_pending!(runs.poll());
    plan.cancel();
    let returned = runs.await;
    let trace = traced(&plan, &returned);
    assert_eq!((trace.outcome, trace.cancelled), (OutcomeCode::Ok, true));
    assert_eq!(seen.take(), ["+a", "-a"]);
    fixture.end().await;
}

// ===== layers that do wrong =====

fn panics(text: &'static str) -> Before {
    panic!("{text}")
}

#[tokio::test(start_paused = true)]
async fn p14_a_layer_that_panics_on_the_way_in_refuses() {
    let kinds: [fn(Facts) -> Work<Before>; 4] = [
        |_| panic!("before there is a future"),
        |_| Box::pin(async { panics("at once") }),
        |_| {
            Box::pin(async {
                tokio::task::yield_now().await;
                panics("after an await")
            })
        },
        |_| Box::pin(Bomb(ready(Before::Continue))),
    ];
    for (kind, text) in
        kinds.into_iter().zip(["before there is", "at once", "after an await", "a panic in a drop"])
    {
        let (seen, probe) = (Seen::default(), probe());
        let panics = Hook::new("b", &seen).before_async(kind);
        let layers = [Hook::new("a", &seen), panics, Hook::new("c", &seen)];
        let fixture = layered(layers, &[&probe]).await;
        let plan = fixture.plan();
        let returned = plan.execute("probe", json!({})).await;
        assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::AccessDenied);
        let error = returned.unwrap_err();
        let told = error.to_model_text();
        assert_eq!(told, "error (access_denied): it could not be called; try again later");
        let error = error.to_string();
        assert!(error.contains("a layer panicked") && error.contains(text), "{error}");
        assert_eq!(seen.take(), ["+a", "+b"]);
        assert_eq!(probe.counts(), ProbeCounts::default());
        assert_eq!(fixture.end().await.started, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn p14_a_layer_that_panics_on_the_way_out_is_a_panic() {
    let kinds: [fn(Facts, Given) -> Work<Given>; 4] = [
        |_, _| panic!("before there is a future"),
        |_, _| Box::pin(async { panic!("at once") }),
        |_, given| {
            Box::pin(async move {
                tokio::task::yield_now().await;
                drop(given);
                panic!("after an await")
            })
        },
        |_, given| Box::pin(Bomb(ready(given))),
    ];
    for (kind, text) in
        kinds.into_iter().zip(["before there is", "at once", "after an await", "a panic in a drop"])
    {
        let (seen, probe) = (Seen::default(), probe());
        let panics = Hook::new("b", &seen).after_async(kind);
        let layers = [Hook::new("a", &seen), panics, Hook::new("c", &seen)];
        let fixture = layered(layers, &[&probe]).await;
        let plan = fixture.begin(PlanOptions::new().max_calls(1)).unwrap();
        let returned = plan.execute("probe", json!({})).await;
        let [trace] = plan.traces().try_into().unwrap();
        let error = trace.error.unwrap();
        assert_eq!(trace.outcome, OutcomeCode::Panic);
        assert!(error.contains("a layer panicked") && error.contains(text), "{error}");
        // What a layer says in its panic is for the host.
        assert_eq!(returned.unwrap().error.unwrap(), "a layer panicked");
        assert_eq!(seen.take(), ["+a", "+b", "+c", "-c", "-b"]);
        // The tool has run: its call keeps its place, and its instance is none the worse.
        assert_eq!(probe.counts().executions, 1);
        let error = plan.execute("probe", json!({})).await.unwrap_err();
        assert_eq!(error.code(), OutcomeCode::LimitExceeded);
        fixture.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn p14_a_layer_that_panics_when_it_is_dropped_is_contained() {
    struct Brittle;
    impl Drop for Brittle {
        fn drop(&mut self) {
            assert!(std::thread::panicking(), "a panic in a drop");
        }
    }
    #[async_trait]
    impl Layer for Brittle {}
    let probe = probe();
    let fixture = Fixture::with(paused().layer(Brittle).layer(Brittle), &[&probe]).await;
    assert!(fixture.plan().execute("probe", json!({})).await.unwrap().success);
    fixture.end().await;
}

/// A layer that hangs, in a future that panics when it is dropped.
fn hangs(way: Way, seen: &Seen) -> Hook {
    let hook = Hook::new("a", seen);
    match way {
        Way::In => hook.before_async(|_| Box::pin(Bomb(pending()))),
        Way::Out => hook.after_async(|_, _| Box::pin(Bomb(pending()))),
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    In,
    Out,
}

impl Way {
    const BOTH: [Self; 2] = [Self::In, Self::Out];

    /// How often the tool ran of a call that hung there.
    fn executions(self) -> u64 {
        u64::from(self == Self::Out)
    }
}

#[tokio::test(start_paused = true)]
async fn p14_a_layer_that_hangs_is_stopped_at_the_deadline() {
    for way in Way::BOTH {
        let (seen, probe) = (Seen::default(), probe());
        let fixture = layered([hangs(way, &seen)], &[&probe]).await;
        let plan = fixture.begin(PlanOptions::new().call_timeout(5 * SECOND)).unwrap();
        let began = Instant::now();
        let returned = plan.execute("probe", json!({})).await;
        assert_eq!(began.elapsed().as_secs(), 5);
        assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::Timeout, "{way:?}");
        assert_eq!(probe.counts().executions, way.executions());
        fixture.end().await;
    }
}

/// A call hangs in a layer and is stopped at once, with that code.
async fn stopped<E>(code: OutcomeCode, end: E)
where
    E: AsyncFn(&mut Option<toolscope::Plan>, &CancellationToken),
{
    for way in Way::BOTH {
        let (seen, probe) = (Seen::default(), probe());
        let fixture = layered([hangs(way, &seen)], &[&probe]).await;
        let mut plan = Some(fixture.plan());
        let (handle, token) = (plan.as_ref().unwrap().handle(), CancellationToken::new());
        let own = CallOptions::new().token(token.clone());
        let mut waits = task::spawn(handle.execute_with("probe", json!({}), own));
        assert_pending!(waits.poll());
        let began = Instant::now();
        let (returned, ()) = tokio::join!(waits, end(&mut plan, &token));
        assert_eq!(began.elapsed().as_secs(), 0, "{way:?}");
        assert_eq!(traced(&handle, &returned).outcome, code, "{way:?}");
        assert_eq!(probe.counts().executions, way.executions());
        fixture.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn p14_a_layer_that_hangs_is_stopped_by_the_token_of_the_call() {
    stopped(OutcomeCode::Cancelled, async |_, token| token.cancel()).await;
}

#[tokio::test(start_paused = true)]
async fn p8_a_layer_that_hangs_is_stopped_by_a_cancel() {
    stopped(OutcomeCode::Cancelled, async |plan, _| plan.as_ref().unwrap().cancel()).await;
}

#[tokio::test(start_paused = true)]
async fn p8_a_layer_that_hangs_is_stopped_by_the_end_of_the_plan() {
    stopped(OutcomeCode::PlanEnded, async |plan, _| {
        let report = plan.take().unwrap().finish().await;
        assert!(report.unsettled().is_empty());
    })
    .await;
    stopped(OutcomeCode::PlanEnded, async |plan, _| drop(plan.take())).await;
}

#[tokio::test(start_paused = true)]
async fn the_time_of_a_layer_counts_as_time_of_the_call() {
    for (way, works, code, took) in [
        (Way::In, 6, "ok", 9),
        (Way::In, 8, "timeout", 10),
        (Way::Out, 6, "ok", 9),
        (Way::Out, 8, "timeout", 10),
    ] {
        let seen = Seen::default();
        let hook = Hook::new("a", &seen);
        let layer = match way {
            Way::In => hook.before_async(|_| {
                Box::pin(async {
                    sleep(3 * SECOND).await;
                    Before::Continue
                })
            }),
            Way::Out => hook.after_async(|_, given| {
                Box::pin(async {
                    sleep(3 * SECOND).await;
                    given
                })
            }),
        };
        let probe = probe().on_execute(Step::Slow(works * SECOND));
        let fixture = layered([layer], &[&probe]).await;
        let plan = fixture.begin(PlanOptions::new().call_timeout(10 * SECOND)).unwrap();
        let began = Instant::now();
        let result = plan.execute("probe", json!({})).await.unwrap();
        assert_eq!((result.code(), began.elapsed().as_secs()), (code, took), "{way:?} {works}");
        fixture.end().await;
    }
}

/// A layer may end the plan instead of refusing: nothing of an ended plan starts.
#[tokio::test(start_paused = true)]
async fn p8_a_layer_that_cancels_the_plan_lets_nothing_run() {
    let (seen, probe) = (Seen::default(), probe().immediate());
    let plan: Arc<OnceLock<PlanHandle>> = Arc::default();
    let cancels = Arc::clone(&plan);
    let brake = Hook::new("a", &seen).before(move |_| {
        cancels.get().unwrap().cancel();
        Before::Continue
    });
    let fixture = layered([brake], &[&probe]).await;
    let owner = fixture.plan();
    plan.set(owner.handle()).unwrap();
    let returned = owner.execute("probe", json!({})).await;
    assert_eq!(probe.counts().executions, 0, "it ran in a cancelled plan: {returned:?}");
    assert_eq!(traced(&owner, &returned).outcome, OutcomeCode::Cancelled);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_layered_call_can_be_dropped_at_every_await() {
    for k in 0.. {
        let seen = Seen::default();
        let probe = probe().on_activate(Step::Yield(2)).on_execute(Step::Yield(2));
        let polite = |name| {
            Hook::new(name, &seen)
                .before_async(|_| {
                    Box::pin(async {
                        tokio::task::yield_now().await;
                        Before::Change(json!({"changed": true}))
                    })
                })
                .after_async(|_, given| {
                    Box::pin(async {
                        tokio::task::yield_now().await;
                        given
                    })
                })
        };
        let fixture = layered([polite("a"), polite("b")], &[&probe]).await;
        let plan = fixture.begin(PlanOptions::new().max_calls(1).max_concurrent(1)).unwrap();
        let ended = cut(call(&plan, "probe"), k).await;
        let reached = probe.counts().executions == 1;
        let codes: Vec<_> = plan.traces().iter().map(|trace| trace.outcome).collect();
        let code = if ended.is_some() { OutcomeCode::Ok } else { OutcomeCode::Abandoned };
        assert_eq!(codes, if k == 0 { vec![] } else { vec![code] }, "cut at {k}");
        let whole = ["+a", "+b", "-b", "-a"];
        let passed = seen.take();
        assert_eq!(passed, whole[..passed.len()], "cut at {k}");
        let again = plan.execute("probe", json!({})).await;
        assert_eq!(again.is_ok(), !reached, "cut at {k}: {again:?}");
        fixture.end().await;
        if let Some(ended) = ended {
            assert_eq!(ended.unwrap().output, json!({"echo": {"changed": true}}));
            assert!(k > 7, "there was nothing to cut");
            return;
        }
    }
}

// ===== one way: every front passes the same layer =====

#[tokio::test(start_paused = true)]
async fn p11_a_nested_call_passes_the_layers_by_itself() {
    let seen = Seen::default();
    let facts: Arc<Mutex<Vec<Facts>>> = Arc::default();
    let of_before = Arc::clone(&facts);
    let looks = Hook::new("a", &seen).before(move |facts| {
        of_before.lock().unwrap().push(facts);
        Before::Continue
    });
    let fixture = Fixture::with(with_layers([looks]).tool(relay("relay")), &[&probe()]).await;
    let plan = fixture.plan();
    assert!(plan.execute("relay", relayed("probe")).await.unwrap().success);
    assert_eq!(seen.take(), ["+a", "+a", "-a", "-a"]);
    let facts = facts.lock().unwrap().clone();
    let tools: Vec<_> = facts.iter().map(|facts| &*facts.tool).collect();
    assert_eq!(tools, ["local/relay", "local/probe"]);
    assert_eq!((facts[0].parent, facts[1].parent), (None, Some(facts[0].call)));
    fixture.end().await;
}

/// Calls the probe by every front there is; how often, and how many of them had success.
async fn by_every_front(fixture: &Fixture) -> (usize, usize) {
    let input = || json!({"n": 1});
    let (mut calls, mut succeeded) = (0, 0);
    let mut count = |success: bool| {
        calls += 1;
        succeeded += usize::from(success);
    };
    let ok = |returned: Result<toolscope::ToolResult, CallError>| {
        returned.is_ok_and(|result| result.success)
    };
    let plan = fixture.plan();
    count(ok(plan.execute("probe", input()).await));
    count(ok(plan.handle().execute("probe", input()).await));
    count(ok(plan.execute_with("probe", input(), CallOptions::new()).await));
    count(ok(plan.execute_json("probe", r#"{"n": 1}"#, CallOptions::new()).await));
    count(ok(plan.execute_json("probe", "", CallOptions::new()).await));
    let turn = [ToolCall::new("probe", input()), ToolCall::new("probe", input()).id("2")];
    for returned in plan.execute_batch(&turn).await {
        count(ok(returned));
    }
    count(ToolRunner::new(plan.handle()).execute("probe", input()).await.success);
    count(ok(fixture.handle().plan(plan.id()).unwrap().execute("probe", input()).await));
    let child = plan.begin_child(PlanOptions::new()).unwrap();
    count(ok(child.execute("probe", input()).await));
    let other = fixture.handle().begin(PlanOptions::new()).unwrap();
    count(ok(other.execute("probe", input()).await));
    let body = async |plan: PlanHandle| ok(plan.execute("probe", json!({"n": 1})).await);
    let (success, _) = fixture.run(PlanOptions::new(), body).await.unwrap();
    count(success);
    // Of these only the inner call is the probe's.
    count(ok(plan.execute("relay", relayed("probe")).await));
    count(ok(plan.execute("parent", json!({})).await));
    (calls, succeeded)
}

/// A tool that begins a child plan and calls the probe in it.
fn parent() -> FunctionTool {
    ToolSpec::new("parent").read_only().handler(async |ctx, (): ()| {
        let child = ctx.begin_child(PlanOptions::new())?;
        let result = child.execute("probe", &json!({"n": 1})).await;
        child.finish().await;
        Ok(result?.into_result()?)
    })
}

#[tokio::test(start_paused = true)]
async fn p11_every_front_passes_the_same_layer() {
    let (seen, probe) = (Seen::default(), probe());
    let of_before = seen.clone();
    let counts = Hook::new("layer", &seen).before(move |facts| {
        of_before.add(facts.tool);
        Before::Continue
    });
    let builder = with_layers([counts]).tool(relay("relay")).tool(parent());
    let fixture = Fixture::with(builder, &[&probe]).await;
    let (calls, succeeded) = by_every_front(&fixture).await;
    assert_eq!(succeeded, calls);
    assert_eq!(probe.counts().executions, calls as u64);
    let seen = seen.take();
    let of_the_probe = seen.iter().filter(|what| *what == "local/probe").count();
    assert_eq!(of_the_probe, calls);
    // Two more calls are those of the tools that call it.
    let count = |what: &str| seen.iter().filter(|seen| *seen == what).count();
    assert_eq!((count("+layer"), count("-layer")), (calls + 2, calls + 2));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p11_no_front_gets_past_a_layer_that_refuses() {
    let (seen, probe) = (Seen::default(), probe());
    let refuses = Hook::new("layer", &seen).before(|facts| match &*facts.tool {
        "local/probe" => Before::Refuse("no".to_owned()),
        _ => Before::Continue,
    });
    let builder = with_layers([refuses]).tool(relay("relay")).tool(parent());
    let fixture = Fixture::with(builder, &[&probe]).await;
    let (calls, succeeded) = by_every_front(&fixture).await;
    assert_eq!((calls > 10, succeeded), (true, 0));
    assert_eq!(probe.counts(), ProbeCounts::default());
    assert_eq!(fixture.end().await.started, 0);
}

/// On the runtime's own keeper, from several threads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p11_calls_of_many_tasks_each_pass_the_layer_once() {
    let (seen, probe) = (Seen::default(), probe().on_execute(Step::Yield(1)));
    let builder = toolscope::ToolRuntime::builder().layer(Hook::new("a", &seen));
    let fixture = Fixture::with(builder, &[&probe]).await;
    let plan = fixture.plan();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..200 {
        tasks.spawn(call(&plan, "probe"));
    }
    while let Some(returned) = within(tasks.join_next()).await {
        assert!(returned.unwrap().unwrap().success);
    }
    until(|| probe.counts().executions == 200).await;
    let seen = seen.take();
    let count = |what: &str| seen.iter().filter(|seen| *seen == what).count();
    assert_eq!((count("+a"), count("-a")), (200, 200));
    fixture.end().await;
}
