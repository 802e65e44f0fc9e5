//! The spans of a plan and of its calls: their names, their fields, who stands under whom, when
//! they close, and what is never in them.
//!
//! Each test has a subscriber of its own, on its own thread, and nearly each a runtime whose
//! keeper is that thread too.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, mpsc};
use std::thread::{self, ThreadId};
use std::time::Duration;

use serde_json::{Value, json};
use tokio_test::{assert_pending, task};
use tokio_util::sync::CancellationToken;
use toolscope::test_util::{Probe, Step};
use toolscope::{
    ApprovalRequest, Approver, CallOptions, Change, ChangeKind, Decision, OutputCheck, PlanHandle,
    PlanOptions, Progress, SourceKind, ToolCall, ToolCapability, ToolFailure, ToolOutput,
    ToolResult, ToolRuntime, ToolSpec, async_trait,
};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{DefaultGuard, Interest, set_default};
use tracing::{Dispatch, Event, Level, Metadata, Span, Subscriber, info_span};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::{LookupSpan, Registry};

use crate::call::{relay, relayed};
use crate::hooks::{Hooked, call, until};
use crate::rooms::Dressed;
use crate::support::{Fixture, paused};

const SECOND: Duration = Duration::from_secs(1);

// ===== to collect =====

type Fields = BTreeMap<&'static str, String>;

/// A span as it was recorded.
#[derive(Clone, Debug, Default)]
struct Kept {
    name: &'static str,
    target: String,
    /// Whether they have a value or not.
    declared: Vec<&'static str>,
    fields: Fields,
    /// The place of the span it stands under.
    parent: Option<usize>,
    closed: u32,
}

/// An event as it was recorded.
#[derive(Clone, Debug)]
struct Said {
    target: String,
    level: Level,
    fields: Fields,
    /// The place of the span it stands in.
    within: Option<usize>,
}

#[derive(Default)]
struct Collected {
    spans: Vec<Kept>,
    said: Vec<Said>,
    places: HashMap<Id, usize>,
}

/// Collects whatever is recorded on this thread, for as long as it lives.
struct Collector {
    collected: Arc<Mutex<Collected>>,
    _guard: DefaultGuard,
}

struct Collecting(Arc<Mutex<Collected>>);

struct Values<'a>(&'a mut Fields);

impl Visit for Values<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Collecting {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, ctx: Context<'_, S>) {
        let mut fields = Fields::new();
        attributes.record(&mut Values(&mut fields));
        let parent = ctx.span(id).and_then(|span| span.parent()).map(|parent| parent.id());
        let metadata = attributes.metadata();
        let mut collected = self.0.lock().unwrap();
        let parent = parent.map(|parent| collected.places[&parent]);
        let place = collected.spans.len();
        collected.places.insert(id.clone(), place);
        collected.spans.push(Kept {
            name: metadata.name(),
            target: metadata.target().to_owned(),
            declared: metadata.fields().iter().map(|field| field.name()).collect(),
            fields,
            parent,
            closed: 0,
        });
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, _: Context<'_, S>) {
        let mut collected = self.0.lock().unwrap();
        let place = collected.places[id];
        values.record(&mut Values(&mut collected.spans[place].fields));
    }

    fn on_event(&self, event: &Event<'_>, ctx: Context<'_, S>) {
        let mut fields = Fields::new();
        event.record(&mut Values(&mut fields));
        let within = ctx.event_span(event).map(|span| span.id());
        let mut collected = self.0.lock().unwrap();
        let within = within.map(|within| collected.places[&within]);
        let (target, level) = (event.metadata().target().to_owned(), *event.metadata().level());
        collected.said.push(Said { target, level, fields, within });
    }

    fn on_close(&self, id: Id, _: Context<'_, S>) {
        let mut collected = self.0.lock().unwrap();
        let place = collected.places[&id];
        collected.spans[place].closed += 1;
    }
}

/// While one subscriber is there and no other, a place in the code that another thread comes to
/// first is never collected. This one is always there, and collects nothing.
static OTHER: LazyLock<Dispatch> =
    LazyLock::new(|| Dispatch::new(Registry::default().with(LevelFilter::OFF)));

/// Makes a subscriber that of this thread.
fn subscribe(subscriber: impl Subscriber + Send + Sync) -> DefaultGuard {
    LazyLock::force(&OTHER);
    set_default(subscriber)
}

impl Collector {
    fn new() -> Self {
        let collected = Arc::default();
        let subscriber = Registry::default().with(Collecting(Arc::clone(&collected)));
        Self { collected, _guard: subscribe(subscriber) }
    }

    fn spans(&self) -> Vec<Kept> {
        self.collected.lock().unwrap().spans.clone()
    }

    fn said(&self) -> Vec<Said> {
        self.collected.lock().unwrap().said.clone()
    }

    /// The spans of that name, in the order in which they were made.
    fn named(&self, name: &str) -> Vec<Kept> {
        self.spans().into_iter().filter(|span| span.name == name).collect()
    }

    /// The one span of a call.
    #[track_caller]
    fn call(&self) -> Kept {
        let calls = self.named("execute_tool");
        let [call] = calls.as_slice() else { panic!("not one call: {calls:?}") };
        call.clone()
    }

    /// The full names of a span and of those above it.
    fn line(&self, mut span: Kept) -> Vec<String> {
        let spans = self.spans();
        let name = |span: &Kept| span.fields.get("otel.name").cloned().unwrap_or(span.name.into());
        let mut line = vec![name(&span)];
        while let Some(parent) = span.parent {
            span = spans[parent].clone();
            line.push(name(&span));
        }
        line
    }
}

impl Kept {
    fn get(&self, field: &str) -> Option<&str> {
        self.fields.get(field).map(String::as_str)
    }
}

// ===== the span of a call =====

#[tokio::test(start_paused = true)]
async fn a_call_has_a_span_with_exactly_the_fields_that_are_promised() {
    let collector = Collector::new();
    let probe = Probe::new("files/read").immediate();
    let tool = Dressed::new(&probe, |descriptor| descriptor.description("Reads a file"));
    let fixture = Fixture::with(paused().tool(tool), &[]).await.track(&probe);
    let options = PlanOptions::new()
        .metadata("gen_ai.agent.name", "Scout")
        .metadata("gen_ai.conversation.id", "c-17");
    let plan = fixture.begin(options).unwrap();
    let result = plan.execute("files/read", json!({})).await.unwrap();
    let span = collector.call();
    assert_eq!((span.name, span.target.as_str()), ("execute_tool", "toolscope"));
    let declared = [
        "otel.name",
        "otel.kind",
        "otel.status_code",
        "gen_ai.operation.name",
        "gen_ai.tool.name",
        "gen_ai.tool.call.id",
        "gen_ai.tool.type",
        "gen_ai.tool.description",
        "gen_ai.agent.name",
        "gen_ai.conversation.id",
        "error.type",
        "toolscope.plan.id",
        "toolscope.call.id",
        "toolscope.call.duration_ms",
        "toolscope.call.result_size_bytes",
    ];
    assert_eq!(span.declared, declared);
    let plan_id = plan.id().to_string();
    let (call_id, size) = (format!("{plan_id}-1"), result.output.to_string().len().to_string());
    let values = [
        ("otel.name", "execute_tool files/read"),
        ("otel.kind", "internal"),
        ("gen_ai.operation.name", "execute_tool"),
        ("gen_ai.tool.name", "files/read"),
        ("gen_ai.tool.call.id", &call_id),
        ("gen_ai.tool.type", "function"),
        ("gen_ai.tool.description", "Reads a file"),
        ("gen_ai.agent.name", "Scout"),
        ("gen_ai.conversation.id", "c-17"),
        ("toolscope.plan.id", &plan_id),
        ("toolscope.call.id", "1"),
        ("toolscope.call.result_size_bytes", &size),
    ];
    let mut fields = span.fields.clone();
    let duration: f64 = fields.remove("toolscope.call.duration_ms").unwrap().parse().unwrap();
    assert!((duration - result.duration_ms).abs() < f64::EPSILON);
    assert_eq!(fields, values.map(|(field, value)| (field, value.to_owned())).into());
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_by_any_name_has_the_canonical_one_in_its_span() {
    let collector = Collector::new();
    let probe = Probe::new("read_file").immediate();
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    for name in ["read_file", "local/read_file", "local__read_file"] {
        plan.execute(name, json!({})).await.unwrap();
    }
    for span in collector.named("execute_tool") {
        assert_eq!(span.get("gen_ai.tool.name"), Some("local/read_file"));
        assert_eq!(span.get("otel.name"), Some("execute_tool local/read_file"));
    }
    assert_eq!(collector.spans().len(), 4);
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_unknown_name_stands_in_the_span_as_it_was_written_and_cut_short() {
    let collector = Collector::new();
    let fixture = Fixture::paused(&[]).await;
    let plan = fixture.plan();
    plan.execute("no such tool", json!({})).await.unwrap_err();
    assert_eq!(collector.call().get("gen_ai.tool.name"), Some("no such tool"));
    plan.execute("é".repeat(1_000_000), json!({})).await.unwrap_err();
    let span = collector.named("execute_tool").pop().unwrap();
    for (field, value) in &span.fields {
        assert!(value.chars().count() < 300, "`{field}` has {} bytes", value.len());
    }
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_id_that_a_model_gave_stands_in_the_span() {
    let collector = Collector::new();
    let probe = Probe::new("tool").immediate();
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let options = CallOptions::new().id("call_9Xq");
    plan.execute_with("tool", json!({}), options.clone()).await.unwrap();
    plan.execute_json("tool", "{}", options).await.unwrap();
    let calls = [ToolCall::new("tool", json!({})).id("toolu_01"), ToolCall::new("tool", json!({}))];
    plan.execute_batch(&calls).await;
    let spans = collector.named("execute_tool");
    let ids: Vec<_> = spans.iter().map(|span| span.get("gen_ai.tool.call.id").unwrap()).collect();
    let last = format!("{}-4", plan.id());
    assert_eq!(ids, ["call_9Xq", "call_9Xq", "toolu_01", &last]);
    let numbers: Vec<_> = spans.iter().map(|span| span.get("toolscope.call.id").unwrap()).collect();
    assert_eq!(numbers, ["1", "2", "3", "4"], "the runtime's own number stands beside it");
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_tool_of_an_mcp_server_is_an_extension_and_any_other_a_function() {
    let kinds = [
        (SourceKind::Custom, "function"),
        (SourceKind::Builtin, "function"),
        (SourceKind::Mcp, "extension"),
        (SourceKind::Skill, "function"),
        (SourceKind::Wrapped, "function"),
    ];
    for (kind, expected) in kinds {
        let collector = Collector::new();
        let probe = Probe::new("tool").immediate();
        let tool = Dressed::new(&probe, |descriptor| descriptor.source(kind));
        let fixture = Fixture::with(paused().tool(tool), &[]).await.track(&probe);
        let plan = fixture.plan();
        call(&plan, "tool").await.unwrap();
        assert_eq!(collector.call().get("gen_ai.tool.type"), Some(expected), "{kind:?}");
        drop(plan);
        fixture.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn metadata_that_is_no_text_is_left_out() {
    let collector = Collector::new();
    let probe = Probe::new("tool").immediate();
    let fixture = Fixture::paused(&[&probe]).await;
    let options = PlanOptions::new()
        .metadata("gen_ai.agent.name", 7)
        .metadata("gen_ai.agent.id", json!(["a"]))
        .metadata("gen_ai.conversation.id", Value::Null);
    let plan = fixture.begin(options).unwrap();
    call(&plan, "tool").await.unwrap();
    for span in collector.spans() {
        for field in ["gen_ai.agent.name", "gen_ai.agent.id", "gen_ai.conversation.id"] {
            assert_eq!(span.get(field), None);
        }
    }
    assert_eq!(collector.spans()[0].get("otel.name"), Some("invoke_agent"));
    drop(plan);
    fixture.end().await;
}

// ===== what a call came to =====

/// The outcome in the span of one call, after a check that it agrees with the trace.
#[track_caller]
fn outcome(collector: &Collector, plan: &PlanHandle) -> String {
    let spans = collector.named("execute_tool");
    let span = spans.last().unwrap();
    let trace = plan.traces().pop().unwrap();
    let error = span.get("error.type").unwrap_or("ok").to_owned();
    assert_eq!(error, trace.outcome.as_str());
    let status = if trace.success() { None } else { Some("ERROR") };
    assert_eq!(span.get("otel.status_code"), status);
    assert_eq!(span.get("toolscope.call.id"), Some(trace.call_id.to_string().as_str()));
    let size = trace.result_size_bytes.to_string();
    assert_eq!(span.get("toolscope.call.result_size_bytes"), Some(size.as_str()));
    let took: f64 = span.get("toolscope.call.duration_ms").unwrap().parse().unwrap();
    assert!((took - trace.duration_ms()).abs() < f64::EPSILON);
    // An activation that the call began, and that goes on without it, stands in its span.
    assert_eq!(span.closed, u32::from(error != "activation_timeout"), "{span:?}");
    error
}

struct Denies(&'static str);

#[async_trait]
impl Approver for Denies {
    async fn decide(&self, _: &ApprovalRequest) -> Result<Decision, ToolFailure> {
        Ok(Decision::deny(self.0))
    }
}

#[tokio::test(start_paused = true)]
async fn every_outcome_stands_in_the_span_as_in_the_trace() {
    let steps = [Step::Ok, Step::Err, Step::Panic, Step::Never];
    let probe = Probe::new("tool").on_execute(steps).call_timeout(SECOND);
    let broken = Probe::new("broken").on_activate([Step::Err, Step::Never]).call_timeout(SECOND);
    let writes = ToolCapability::writes().human_approval_required();
    let asks = Probe::new("asking").capability(writes);
    let nan = ToolSpec::new("nan").read_only().function(|(): ()| Ok(f64::NAN));
    let lost = ToolSpec::new("lost").read_only().function(|(): ()| {
        let kind = toolscope::FailureKind::OutcomeUnknown;
        Err::<(), _>(ToolFailure::new(kind, "no answer"))
    });
    let collector = Collector::new();
    let builder = paused().tool(nan).tool(lost);
    let fixture = Fixture::with(builder, &[&probe, &broken, &asks]).await;
    let plan = fixture.plan();
    let calls = [
        ("tool", "ok"),
        ("tool", "execution"),
        ("tool", "panic"),
        ("tool", "timeout"),
        ("broken", "activation"),
        ("broken", "activation_timeout"),
        ("asking", "approval_required"),
        ("nan", "invalid_output"),
        ("lost", "outcome_unknown"),
        ("nobody", "not_found"),
    ];
    for (tool, code) in calls {
        drop(call(&plan, tool).await);
        assert_eq!(outcome(&collector, &plan), code, "{tool}");
    }
    drop(plan.execute("tool", json!([])).await);
    assert_eq!(outcome(&collector, &plan), "invalid_input");
    assert!(plan.deactivate("tool").await);
    drop(call(&plan, "tool").await);
    assert_eq!(outcome(&collector, &plan), "not_activated");
    let token = CancellationToken::new();
    token.cancel();
    let options = CallOptions::new().token(token);
    drop(plan.execute_with("tool", json!({}), options).await);
    assert_eq!(outcome(&collector, &plan), "cancelled");

    let options = [
        (PlanOptions::new().read_only(), "tool", "access_denied"),
        (PlanOptions::new().require_checkpoints(), "tool", "checkpoint_required"),
        (PlanOptions::new().max_calls(0), "tool", "limit_exceeded"),
        (PlanOptions::new().approver(Denies("no")), "asking", "approval_denied"),
    ];
    for (options, tool, code) in options {
        let plan = fixture.begin(options).unwrap();
        drop(call(&plan, tool).await);
        assert_eq!(outcome(&collector, &plan), code);
        drop(plan);
    }
    drop(plan);
    fixture.end().await;
    assert!(collector.spans().iter().all(|span| span.closed == 1));
}

#[tokio::test(start_paused = true)]
async fn a_call_that_its_plan_s_end_cuts_says_so_in_its_span() {
    let collector = Collector::new();
    let probe = Probe::new("tool").on_execute(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let handle = plan.handle();
    let mut running = task::spawn(call(&plan, "tool"));
    assert_pending!(running.poll());
    plan.cancel();
    plan.finish().await;
    assert!(running.await.is_err());
    assert_eq!(outcome(&collector, &handle), "cancelled");
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_abandoned_call_says_so_in_its_span() {
    let probe = Probe::new("tool").on_activate(Step::Yield(1)).on_execute(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    for polls in 1..4 {
        let collector = Collector::new();
        let plan = fixture.plan();
        let mut running = task::spawn(call(&plan, "tool"));
        for _ in 0..polls {
            assert_pending!(running.poll());
            tokio::task::yield_now().await;
        }
        assert_eq!(collector.call().closed, 0, "it is under way");
        drop(running);
        plan.activate("tool").await.unwrap();
        let handle = plan.handle();
        // An activation that the call began has its span for as long as it takes.
        plan.finish().await;
        tokio::task::yield_now().await;
        assert_eq!(outcome(&collector, &handle), "abandoned");
    }
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_of_an_ended_plan_has_no_span() {
    let probe = Probe::new("tool");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let handle = plan.handle();
    plan.finish().await;
    let collector = Collector::new();
    assert!(call(&handle, "tool").await.is_err());
    assert!(collector.spans().is_empty());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_output_that_is_let_pass_is_no_error_in_the_span() {
    let collector = Collector::new();
    let probe = Probe::new("tool").immediate();
    let schema = json!({"required": ["n"]});
    let tool = Dressed::new(&probe, |descriptor| descriptor.output_schema(schema));
    let fixture = Fixture::with(paused().tool(tool), &[]).await.track(&probe);
    let plan = fixture.plan();
    assert!(call(&plan, "tool").await.unwrap().success);
    assert_eq!(outcome(&collector, &plan), "ok");
    let [said] = collector.said().try_into().unwrap();
    assert_eq!((said.target.as_str(), said.level), ("toolscope::call", Level::WARN));
    assert_eq!(said.fields["tool"], "local/tool");
    assert_eq!(said.fields["faults"], "1");
    let within = collector.spans()[said.within.unwrap()].clone();
    assert_eq!(within.name, "execute_tool", "the warning stands in the call's span");
    drop(plan);
    fixture.end().await;
}

// ===== the span of a plan =====

#[tokio::test(start_paused = true)]
async fn a_plan_has_a_span_with_exactly_the_fields_that_are_promised() {
    let collector = Collector::new();
    let fixture = Fixture::paused(&[]).await;
    let options = PlanOptions::new()
        .metadata("gen_ai.agent.name", "Scout")
        .metadata("gen_ai.agent.id", "a-1")
        .metadata("gen_ai.conversation.id", "c-17")
        .metadata("user", "not for the span");
    let plan = fixture.begin(options).unwrap();
    let id = plan.id().to_string();
    let [span] = collector.spans().try_into().unwrap();
    assert_eq!((span.name, span.target.as_str()), ("invoke_agent", "toolscope"));
    let declared = [
        "otel.name",
        "otel.kind",
        "gen_ai.operation.name",
        "gen_ai.agent.name",
        "gen_ai.agent.id",
        "gen_ai.conversation.id",
        "toolscope.plan.id",
        "toolscope.plan.end_reason",
    ];
    assert_eq!(span.declared, declared);
    let values = [
        ("otel.name", "invoke_agent Scout"),
        ("otel.kind", "internal"),
        ("gen_ai.operation.name", "invoke_agent"),
        ("gen_ai.agent.name", "Scout"),
        ("gen_ai.agent.id", "a-1"),
        ("gen_ai.conversation.id", "c-17"),
        ("toolscope.plan.id", &id),
    ];
    assert_eq!(span.fields, values.map(|(field, value)| (field, value.to_owned())).into());
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_span_of_a_plan_says_why_it_ended() {
    let collector = Collector::new();
    let fixture = Fixture::paused(&[]).await;
    let reasons = ["finished", "failed", "cancelled", "dropped", "deadline_passed", "shut_down"];
    for reason in reasons {
        let plan = fixture.begin(PlanOptions::new().deadline(SECOND)).unwrap();
        match reason {
            "finished" => drop(plan.finish().await),
            "failed" => drop(plan.fail().await),
            "cancelled" => plan.cancel(),
            "dropped" => drop(plan),
            "deadline_passed" => plan.ended().await,
            _ => drop(fixture.shutdown(SECOND).await),
        }
    }
    let spans = collector.named("invoke_agent");
    let said: Vec<_> = spans.iter().map(|span| span.get("toolscope.plan.end_reason")).collect();
    assert_eq!(said, reasons.map(Some));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_span_of_a_plan_closes_once_when_the_plan_is_at_rest() {
    let collector = Collector::new();
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").on_deactivate(Step::Until(latch.clone()));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    let handle = plan.handle();
    let closed = || collector.named("invoke_agent")[0].closed;
    let mut finish = task::spawn(plan.finish());
    assert_pending!(finish.poll());
    assert_eq!(closed(), 0, "a tool is being deactivated");
    latch.cancel();
    let report = finish.await;
    assert_eq!(closed(), 1, "although a handle and a report are held");
    drop((report, handle));
    assert_eq!(closed(), 1);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_plan_that_is_refused_leaves_no_span_open() {
    let collector = Collector::new();
    let fixture = Fixture::paused(&[]).await;
    let plan = fixture.plan();
    let handle = plan.handle();
    plan.finish().await;
    assert!(handle.begin_child(PlanOptions::new()).is_err());
    fixture.shutdown(SECOND).await;
    assert!(fixture.begin(PlanOptions::new()).is_err());
    assert!(collector.spans().iter().all(|span| span.closed == 1), "{:?}", collector.spans());
    fixture.end().await;
}

// ===== who stands under whom =====

#[tokio::test(start_paused = true)]
async fn a_plan_stands_under_the_caller_s_span_and_a_call_under_its_plan() {
    let collector = Collector::new();
    let probe = Probe::new("tool").immediate();
    let fixture = Fixture::paused(&[&probe]).await;
    let request = info_span!("request");
    let plan = request.in_scope(|| fixture.plan());
    drop(request);
    // Wherever the call comes from.
    let other = info_span!("other");
    let calling = other.in_scope(|| task::spawn(call(&plan, "tool")));
    calling.await.unwrap();
    let line = collector.line(collector.call());
    assert_eq!(line, ["execute_tool local/tool", "invoke_agent", "request"]);
    drop((plan, other));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_of_a_plan_without_a_span_stands_under_the_caller_s() {
    let probe = Probe::new("tool").immediate();
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let collector = Collector::new();
    let request = info_span!("request");
    let entered = request.enter();
    let called = task::spawn(call(&plan, "tool")).poll();
    drop(entered);
    assert!(called.is_ready());
    assert_eq!(collector.line(collector.call()), ["execute_tool local/tool", "request"]);
    drop((plan, request));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_nested_call_stands_under_the_one_that_makes_it() {
    let collector = Collector::new();
    let probe = Probe::new("probe").immediate();
    let fixture = Fixture::with(paused().tool(relay("relay")), &[&probe]).await;
    let plan = fixture.plan();
    plan.execute("relay", relayed("probe")).await.unwrap();
    let nested = collector.named("execute_tool").pop().unwrap();
    let line = ["execute_tool local/probe", "execute_tool local/relay", "invoke_agent"];
    assert_eq!(collector.line(nested), line);
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_child_plan_stands_under_its_parent_and_its_calls_under_it() {
    let collector = Collector::new();
    let probe = Probe::new("tool").immediate();
    let fixture = Fixture::paused(&[&probe]).await;
    let agent = |name: &str| PlanOptions::new().metadata("gen_ai.agent.name", name);
    let parent = fixture.begin(agent("Lead")).unwrap();
    let child = parent.begin_child(agent("Scout")).unwrap();
    call(&child, "tool").await.unwrap();
    let line = ["execute_tool local/tool", "invoke_agent Scout", "invoke_agent Lead"];
    assert_eq!(collector.line(collector.call()), line);
    drop((child, parent));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_a_tool_says_itself_stands_in_its_call_s_span() {
    let collector = Collector::new();
    let probe = Probe::new("tool");
    let hooked = Hooked::new(&probe)
        .before_activate(async |_| {
            tracing::info!("activating");
            Ok(())
        })
        .before_execute(async |_| {
            info_span!("own").in_scope(|| tracing::info!("in its own span"));
            tokio::task::yield_now().await;
            tracing::info!("after an await");
            Ok(())
        });
    let fixture = hooked.fixture(paused()).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    assert!(Span::current().is_none(), "no span is left entered");
    let lines: Vec<_> = collector
        .said()
        .into_iter()
        .map(|said| {
            (said.fields["message"].clone(), collector.spans()[said.within.unwrap()].clone())
        })
        .map(|(message, within)| (message, collector.line(within)))
        .collect();
    let of_call = vec!["execute_tool local/tool".to_owned(), "invoke_agent".to_owned()];
    let of_own = [vec!["own".to_owned()], of_call.clone()].concat();
    let expected =
        [("activating", of_call.clone()), ("in its own span", of_own), ("after an await", of_call)];
    assert_eq!(lines, expected.map(|(message, line)| (message.to_owned(), line)));
    drop(plan);
    fixture.end().await;
}

/// With a keeper of its own: the subscriber of the caller goes along.
#[tokio::test]
async fn what_a_tool_says_on_the_keeper_stands_in_the_span_of_the_call_that_asked() {
    let collector = Collector::new();
    let probe = Probe::new("tool").off_thread();
    let hooked = Hooked::new(&probe).before_activate(async |_| {
        tokio::task::yield_now().await;
        tracing::info!("activating");
        Ok(())
    });
    let fixture = hooked.fixture(ToolRuntime::builder()).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    plan.finish().await;
    let [said] = collector.said().try_into().unwrap();
    let within = collector.spans()[said.within.unwrap()].clone();
    assert_eq!(collector.line(within), ["execute_tool local/tool", "invoke_agent"]);
    fixture.end().await;
    until(|| collector.spans().iter().all(|span| span.closed == 1)).await;
}

// ===== what is never in them =====

/// Stands in arguments, outputs, errors, panics, reasons: and in nothing that is recorded.
const SECRET: &str = "7f3a-c0ffee";

fn speaks(step: &str) -> Result<ToolOutput, ToolFailure> {
    match step {
        "fails" => Err(ToolFailure::failed(SECRET)),
        "invalid" => Err(ToolFailure::invalid(SECRET)),
        "panics" => panic!("{SECRET}"),
        "broken" => Ok(ToolOutput::new(json!({"n": SECRET, SECRET: 1}))),
        _ => Ok(ToolOutput::new(json!({"n": 1, "of": SECRET})).with_metadata(SECRET, SECRET)),
    }
}

#[tokio::test(start_paused = true)]
async fn arguments_outputs_and_the_texts_of_tools_are_in_no_span_and_no_event() {
    let collector = Collector::new();
    let probe = Probe::new("tool");
    let tool = Dressed::new(&probe, |descriptor| {
        descriptor
            .input_schema(json!({"properties": {"step": {"type": "string"}}}))
            .output_schema(json!({"properties": {"n": {"type": "integer"}}}))
    })
    .gives(|_, input| speaks(input["step"].as_str().unwrap()));
    let hooked = Hooked::new(&Probe::new("unused"))
        .before_activate(|_| std::future::ready(Err(ToolFailure::failed(SECRET))));
    let says = ToolSpec::new("says").read_only().handler(async |ctx, args: Value| {
        ctx.progress(Progress::new(1.0).message(SECRET));
        ctx.record_change(Change::new(ChangeKind::Created, SECRET));
        ctx.taint(SECRET);
        Ok(args)
    });
    let asks = Probe::new("asking").capability(ToolCapability::writes().human_approval_required());
    let builder = paused().tool(tool).tool(hooked).tool(says);
    let fixture = Fixture::with(builder, &[&asks]).await.track(&probe);
    let heard = fixture.subscribe();
    for check in [OutputCheck::Warn, OutputCheck::Reject, OutputCheck::Off] {
        let options = PlanOptions::new().output_check(check).max_output_bytes(40);
        let options = options.approver(Denies(SECRET)).metadata("note", SECRET);
        let plan = fixture.begin(options.max_attempts(1)).unwrap();
        for step in ["works", "fails", "invalid", "panics", "broken"] {
            drop(plan.execute("tool", json!({"step": step, "with": SECRET})).await);
        }
        drop(plan.execute("tool", json!({"step": {SECRET: SECRET}})).await);
        drop(plan.execute("tool", json!(SECRET)).await);
        drop(plan.execute_json("tool", format!("{{\"{SECRET}"), CallOptions::new()).await);
        drop(plan.execute("unused", json!({SECRET: SECRET})).await);
        drop(plan.execute("says", json!({SECRET: SECRET})).await);
        drop(plan.execute("asking", json!({SECRET: SECRET})).await);
        let codes: Vec<_> = plan.traces().iter().map(|trace| trace.outcome.as_str()).collect();
        let broken = if check == OutputCheck::Reject { "invalid_output" } else { "ok" };
        let expected = [
            "ok",
            "execution",
            "invalid_input",
            "panic",
            broken,
            "invalid_input",
            "invalid_input",
            "invalid_input",
            "activation",
            "ok",
            "approval_denied",
        ];
        assert_eq!(codes, expected);
        plan.finish().await;
    }
    drop(heard);
    let (spans, said) = (collector.spans(), collector.said());
    assert_eq!((spans.len(), said.len()), (36, 2), "a plan and eleven calls; two warnings");
    for fields in spans.iter().map(|span| &span.fields).chain(said.iter().map(|said| &said.fields))
    {
        for (field, value) in fields {
            assert!(!value.contains(SECRET), "`{field}` is {value}");
            assert!(!field.contains(SECRET));
        }
    }
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_a_deactivation_says_is_in_no_span_and_no_event() {
    let collector = Collector::new();
    let probe = Probe::new("tool");
    let hooked = Hooked::new(&probe)
        .after_deactivate(|_| std::future::ready(Err(ToolFailure::failed(SECRET))));
    let fixture = hooked.fixture(paused()).await;
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    let report = plan.finish().await;
    assert_eq!(report.errors().len(), 1);
    let all = format!("{:?} {:?}", collector.spans(), collector.said());
    assert!(!all.contains(SECRET), "{all}");
    fixture.end().await;
}

// ===== subscribers =====

#[tokio::test(start_paused = true)]
async fn without_a_subscriber_no_span_is_made() {
    let probe = Probe::new("tool").immediate();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let inside = Arc::clone(&seen);
    let tool = Dressed::new(&probe, |descriptor| descriptor).gives(move |_, input| {
        let current = Span::current();
        inside.lock().unwrap().push((current.is_none(), current.id()));
        Ok(ToolOutput::new(input.clone()))
    });
    let fixture = Fixture::with(paused().tool(tool), &[]).await.track(&probe);
    let plan = fixture.plan();
    call(&plan, "tool").await.unwrap();
    // One that came and went leaves nothing behind.
    drop(Collector::new());
    call(&plan, "tool").await.unwrap();
    drop(plan);
    let seen = seen.lock().unwrap().clone();
    assert!(seen.iter().all(|(_, id)| id.is_none()), "{seen:?}");
    fixture.end().await;
}

/// Takes warnings and nothing below.
struct WarningsOnly;

impl<S: Subscriber> Layer<S> for WarningsOnly {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        let wanted = *metadata.level() <= Level::WARN;
        if wanted { Interest::always() } else { Interest::never() }
    }

    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        *metadata.level() <= Level::WARN
    }
}

#[tokio::test(start_paused = true)]
async fn a_subscriber_that_wants_no_spans_gets_none_and_calls_go_on() {
    let collected: Arc<Mutex<Collected>> = Arc::default();
    let collecting = Collecting(Arc::clone(&collected));
    let guard = subscribe(Registry::default().with(collecting).with(WarningsOnly));
    let probe = Probe::new("tool");
    let fixture = Fixture::with(paused().tool(relay("relay")), &[&probe]).await;
    let plan = fixture.plan();
    assert!(plan.execute("relay", relayed("tool")).await.unwrap().success);
    plan.finish().await;
    assert!(collected.lock().unwrap().spans.is_empty());
    fixture.end().await;
    drop(guard);
}

/// A plan may be begun under one subscriber and called under another: an id of one means nothing to
/// the other.
#[tokio::test(start_paused = true)]
async fn a_plan_begun_under_one_subscriber_can_be_called_under_another() {
    let probe = Probe::new("tool");
    let fixture = Fixture::with(paused().tool(relay("relay")), &[&probe]).await;
    let first = Collector::new();
    let plan = fixture.plan();
    let collected = Arc::clone(&first.collected);
    drop(first);
    let second = Collector::new();
    assert!(plan.execute("relay", relayed("tool")).await.unwrap().success);
    let child = plan.begin_child(PlanOptions::new()).unwrap();
    assert!(call(&child, "tool").await.unwrap().success);
    drop(child);
    drop(second);
    assert!(call(&plan, "tool").await.unwrap().success);
    let of_first: Vec<_> = collected.lock().unwrap().spans.clone();
    let under_plan = of_first.iter().filter(|span| span.parent == Some(0)).count();
    assert_eq!((of_first[0].name, under_plan), ("invoke_agent", 3), "two calls and a child");
    let third = Collector::new();
    plan.finish().await;
    drop(third);
    fixture.end().await;
}

/// Calls back at every place where a subscriber is called.
struct Curious {
    registry: Registry,
    asks: Arc<OnceLock<Box<dyn Fn() + Send + Sync>>>,
    asked: Arc<AtomicU64>,
    thread: ThreadId,
}

impl Curious {
    fn ask(&self) {
        // Not where other tests make their subscribers: `tracing` asks all there are then.
        if let Some(asks) = self.asks.get().filter(|_| thread::current().id() == self.thread) {
            asks();
            self.asked.fetch_add(1, SeqCst);
        }
    }
}

impl Subscriber for Curious {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        self.ask();
        true
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        self.ask();
        self.registry.new_span(span)
    }

    fn record(&self, span: &Id, values: &Record<'_>) {
        self.ask();
        self.registry.record(span, values);
    }

    fn record_follows_from(&self, span: &Id, follows: &Id) {
        self.registry.record_follows_from(span, follows);
    }

    fn event(&self, event: &Event<'_>) {
        self.ask();
        self.registry.event(event);
    }

    fn enter(&self, span: &Id) {
        self.ask();
        self.registry.enter(span);
    }

    fn exit(&self, span: &Id) {
        self.ask();
        self.registry.exit(span);
    }

    fn clone_span(&self, id: &Id) -> Id {
        self.ask();
        self.registry.clone_span(id)
    }

    fn try_close(&self, id: Id) -> bool {
        self.ask();
        self.registry.try_close(id)
    }
}

#[test]
fn no_subscriber_is_called_under_a_lock() {
    let (over, is_over) = mpsc::channel();
    let work = async move {
        let asks: Arc<OnceLock<Box<dyn Fn() + Send + Sync>>> = Arc::default();
        let asked = Arc::default();
        let curious = Curious {
            registry: Registry::default(),
            asks: Arc::clone(&asks),
            asked: Arc::clone(&asked),
            thread: thread::current().id(),
        };
        let guard = subscribe(curious);
        let line = Probe::new("line");
        let probe = Probe::new("tool").needs(&line).taints(true);
        let other = Probe::new("broken");
        let broken = Dressed::new(&other, |descriptor| descriptor.output_schema(json!(false)));
        let builder = paused().tool(relay("relay")).tool(broken);
        let fixture = Fixture::with(builder, &[&probe]).await.track(&line).track(&other);
        let plan = fixture.plan();
        let (handle, runtime) = (plan.handle(), fixture.handle());
        let ask = move || {
            drop((handle.traces(), handle.changes(), handle.end_reason(), handle.subscribe()));
            drop(runtime.plan(handle.id()));
        };
        assert!(asks.set(Box::new(ask)).is_ok());
        plan.execute("relay", relayed("tool")).await.unwrap();
        assert!(call(&plan, "broken").await.unwrap().success);
        let results = [call(&plan, "nobody").await, plan.execute("tool", json!([])).await];
        assert!(
            results.iter().all(|result| !matches!(result, Ok(ToolResult { success: true, .. })))
        );
        let child = plan.begin_child(PlanOptions::new()).unwrap();
        call(&child, "tool").await.unwrap();
        child.finish().await;
        plan.cancel();
        plan.finish().await;
        fixture.end().await;
        drop(guard);
        over.send(asked.load(SeqCst)).unwrap();
    };
    thread::spawn(move || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().start_paused(true).build().unwrap();
        runtime.block_on(work);
    });
    let asked = is_over.recv_timeout(30 * SECOND).expect("a lock was held, or a test failed");
    assert!(asked > 50, "it was called {asked} times");
}
