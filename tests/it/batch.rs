//! The front of a model: arguments as it wrote them, the calls of a turn, and what it is told.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio_test::{assert_pending, assert_ready, task};
use tokio_util::sync::CancellationToken;
use toolscope::test_util::{Probe, ProbeCounts, Step};
use toolscope::{
    ApprovalRequest, Approver, Before, CallError, CallOptions, Decision, FunctionTool, Keeper,
    Layer, LayerCall, OutcomeCode, Plan, PlanHandle, PlanOptions, ToolCall, ToolCapability,
    ToolFailure, ToolFilter, ToolOutput, ToolResult, ToolRuntime, ToolRuntimeError, ToolSpec,
    async_trait,
};

use crate::call::traced;
use crate::cut::{self, cut, quiet_probes};
use crate::hooks::{Called, until};
use crate::name::name;
use crate::runner::{Refused, SECRET};
use crate::support::{Fixture, at_rest, paused};

const SECOND: Duration = Duration::from_secs(1);

/// A probe that only reads.
fn reader(name: &str) -> Probe {
    Probe::new(name).capability(ToolCapability::read_only())
}

async fn execute_json(plan: &PlanHandle, arguments: &str) -> Called {
    plan.execute_json("tool", arguments, CallOptions::new()).await
}

fn outcomes(called: &[Called]) -> Vec<String> {
    let outcome = |called: &Called| match called {
        Ok(result) => result.code().to_owned(),
        Err(error) => error.code().to_string(),
    };
    called.iter().map(outcome).collect()
}

/// Checks that each call has one trace, which says what it returned.
#[track_caller]
fn assert_traced(plan: &PlanHandle, called: &[Called]) {
    let mut traced: Vec<_> = plan.traces().iter().map(|trace| trace.outcome.to_string()).collect();
    let mut returned = outcomes(called);
    traced.sort_unstable();
    returned.sort_unstable();
    assert_eq!(traced, returned);
}

// ===== arguments as text =====

#[tokio::test(start_paused = true)]
async fn the_arguments_of_a_model_are_the_input() {
    let fixture = Fixture::paused(&[&Probe::new("tool")]).await;
    let plan = fixture.plan();
    for (text, input) in [
        (r#"{"a": 1}"#, json!({"a": 1})),
        (" \n{\"a\": [1, {\"b\": null}]}\t", json!({"a": [1, {"b": null}]})),
        (r#"{"ä": "\u00fc\ud83d\ude00"}"#, json!({"ä": "ü😀"})),
        ("{}", json!({})),
        ("", json!({})),
        ("  \r\n\t ", json!({})),
    ] {
        let result = execute_json(&plan, text).await.unwrap();
        assert_eq!(result.output, json!({"echo": input}), "{text:?}");
    }
    assert_eq!(plan.traces().len(), 6);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_what_is_no_json_is_invalid_and_the_error_says_where() {
    for (text, place) in [
        ("{", "line 1 column 1"),
        (r#"{"a": 1"#, "line 1 column 7"),
        (r#"{"a": 1,}"#, "line 1 column 9"),
        ("{\n  \"a\": tru\n}", "line 3 column 0"),
        ("{'a': 1}", "line 1 column 2"),
        (r#"{"a": NaN}"#, "line 1 column 7"),
        (r#"{"a": 1e999}"#, "line 1 column"),
        (r#"{"a": 01}"#, "line 1 column"),
        (r#"{"a": "x} "#, "line 1 column"),
        ("{\"a\": \"\n\"}", "line 2 column 0"),
        (r#"{"a": "\ud800"}"#, "line 1 column"),
        (r#"{"a": 1} // why"#, "line 1 column 10"),
        (r#"{"a": 1}{"b": 2}"#, "line 1 column 9"),
        ("\u{feff}{}", "line 1 column 1"),
        ("```json\n{}\n```", "line 1 column 1"),
        ("path=README.md", "line 1 column"),
    ] {
        let probe = Probe::new("tool");
        let fixture = Fixture::paused(&[&probe]).await;
        let plan = fixture.plan();
        let returned = execute_json(&plan, text).await;
        assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::InvalidInput, "{text}");
        let error = returned.unwrap().error.unwrap();
        assert!(error.contains("no JSON") && error.contains(place), "{text}: {error}");
        assert_eq!(probe.counts(), ProbeCounts::default());
        plan.finish().await;
        assert_eq!(fixture.end().await.started, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn p12_what_is_json_but_no_object_is_invalid() {
    for (text, kind) in [
        ("[]", "an array"),
        (r#"[{"a": 1}]"#, "an array"),
        (r#""{\"a\": 1}""#, "a string"),
        ("null", "null"),
        ("7", "a number"),
        ("true", "a boolean"),
    ] {
        let probe = Probe::new("tool");
        let fixture = Fixture::paused(&[&probe]).await;
        let plan = fixture.plan();
        let returned = execute_json(&plan, text).await;
        assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::InvalidInput);
        let error = returned.unwrap().error.unwrap();
        assert!(error.ends_with(&format!("it is {kind}")), "{error}");
        assert_eq!(probe.counts(), ProbeCounts::default());
        plan.finish().await;
        fixture.end().await;
    }
}

/// An object with arrays in it, so deep.
fn nested(depth: usize) -> String {
    format!("{{\"a\": {}{}}}", "[".repeat(depth - 1), "]".repeat(depth - 1))
}

#[tokio::test(start_paused = true)]
async fn p12_arguments_that_are_nested_too_deep_are_invalid() {
    let probe = Probe::new("tool");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    assert!(execute_json(&plan, &nested(100)).await.unwrap().success);
    for depth in [200, 200_000] {
        let result = execute_json(&plan, &nested(depth)).await.unwrap();
        assert_eq!(result.code(), "invalid_input");
        assert!(result.error.as_ref().unwrap().contains("line 1 column"), "{result:?}");
    }
    assert_eq!((plan.traces().len(), probe.counts().executions), (3, 1));
    plan.finish().await;
    fixture.end().await;
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Path {
    path: String,
}

/// Whoever checks and whoever runs see the same one.
#[tokio::test(start_paused = true)]
async fn of_a_key_that_stands_twice_the_last_one_counts_for_all() {
    let tool = ToolSpec::new("tool").read_only().function(|args: Path| Ok(args.path));
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.plan();
    let result = execute_json(&plan, r#"{"path": 7, "path": "last"}"#).await.unwrap();
    assert_eq!(result.output, json!("last"));
    let result = execute_json(&plan, r#"{"path": "first", "path": 7}"#).await.unwrap();
    assert_eq!(result.code(), "invalid_input");
    plan.finish().await;
    fixture.end().await;
}

/// cases/upstream.md E11.
#[tokio::test(start_paused = true)]
async fn a_megabyte_of_arguments_is_taken() {
    let tool = ToolSpec::new("tool").read_only().function(|args: Path| Ok(args.path.len()));
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.plan();
    let arguments = json!({"path": "x".repeat(1024 * 1024)}).to_string();
    assert_eq!(execute_json(&plan, &arguments).await.unwrap().output, json!(1024 * 1024));
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_the_name_is_looked_up_before_the_arguments_are_read() {
    let refused = Refused::by(OutcomeCode::NotFound).await;
    let returned = execute_json(&refused.plan, "{").await;
    assert_eq!(traced(&refused.plan, &returned).outcome, OutcomeCode::NotFound);
    refused.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_the_gate_refuses_before_the_arguments_are_read() {
    let refused = Refused::by(OutcomeCode::AccessDenied).await;
    let returned = execute_json(&refused.plan, "{").await;
    assert_eq!(traced(&refused.plan, &returned).outcome, OutcomeCode::AccessDenied);
    refused.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_arguments_that_cannot_be_read_leave_no_trace_in_an_ended_plan() {
    for code in [OutcomeCode::PlanEnded, OutcomeCode::Cancelled, OutcomeCode::ShutDown] {
        let refused = Refused::by(code).await;
        assert_eq!(execute_json(&refused.plan, "{").await.unwrap_err().code(), code);
        assert_eq!(refused.plan.traces(), []);
        refused.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn p12_a_cancelled_call_is_cancelled_whatever_its_arguments() {
    let fixture = Fixture::paused(&[&Probe::new("tool")]).await;
    let plan = fixture.plan();
    let token = CancellationToken::new();
    token.cancel();
    let returned = plan.execute_json("tool", "{", CallOptions::new().token(token)).await;
    assert_eq!(traced(&plan, &returned).outcome, OutcomeCode::Cancelled);
    plan.finish().await;
    fixture.end().await;
}

/// An approver and a layer that count how often they are asked.
#[derive(Clone, Default)]
struct Asked(Arc<AtomicU64>);

#[async_trait]
impl Approver for Asked {
    async fn decide(&self, _: &ApprovalRequest) -> Result<Decision, ToolFailure> {
        self.0.fetch_add(1, SeqCst);
        Ok(Decision::Once)
    }
}

#[async_trait]
impl Layer for Asked {
    async fn before(&self, _: &LayerCall<'_>) -> Before {
        self.0.fetch_add(1, SeqCst);
        Before::Continue
    }

    async fn after(
        &self,
        _: &LayerCall<'_>,
        given: Result<ToolOutput, ToolFailure>,
    ) -> Result<ToolOutput, ToolFailure> {
        self.0.fetch_add(1, SeqCst);
        given
    }
}

#[tokio::test(start_paused = true)]
async fn p12_arguments_that_cannot_be_read_ask_nobody_and_cost_nothing() {
    let (probe, approver, layer) = (Probe::new("tool"), Asked::default(), Asked::default());
    let fixture = Fixture::with(paused().layer(layer.clone()), &[&probe]).await;
    let options = PlanOptions::new().max_calls(1).ask(ToolFilter::new());
    let plan = fixture.begin(options.approver(approver.clone())).unwrap();
    for text in ["{", "nothing", "]"] {
        assert_eq!(execute_json(&plan, text).await.unwrap().code(), "invalid_input");
    }
    assert_eq!((approver.0.load(SeqCst), layer.0.load(SeqCst)), (0, 0));
    assert_eq!(probe.counts(), ProbeCounts::default());
    assert!(execute_json(&plan, "{}").await.unwrap().success, "the quota was given back");
    assert_eq!((approver.0.load(SeqCst), layer.0.load(SeqCst)), (1, 2));
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_with_its_arguments_as_text_has_the_options_of_any_call() {
    let probe = Probe::new("tool").on_execute(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let options = CallOptions::new().timeout(SECOND).id("call-1");
    let result = plan.execute_json("local__tool", "{}", options).await.unwrap();
    assert_eq!(result.code(), "timeout");
    plan.finish().await;
    fixture.end().await;
}

// ===== the calls of one turn =====

fn calls(names: &[&str]) -> Vec<ToolCall> {
    let numbered = names.iter().enumerate();
    numbered.map(|(at, name)| ToolCall::new(*name, json!({"at": at}))).collect()
}

#[test]
fn a_call_of_a_model_is_read_with_and_without_an_id() {
    let call = ToolCall::new("files/read", json!({"path": "a"}));
    let json = json!({"name": "files/read", "arguments": {"path": "a"}});
    assert_eq!(serde_json::to_value(&call).unwrap(), json);
    assert_eq!(serde_json::from_value::<ToolCall>(json).unwrap(), call);
    let call = call.id("toolu_1");
    let json = json!({"id": "toolu_1", "name": "files/read", "arguments": {"path": "a"}});
    assert_eq!(serde_json::to_value(&call).unwrap(), json);
    assert_eq!(serde_json::from_value::<ToolCall>(json).unwrap(), call);
}

#[tokio::test(start_paused = true)]
async fn no_calls_have_no_results() {
    let fixture = Fixture::paused(&[&Probe::new("tool")]).await;
    let plan = fixture.plan();
    assert!(plan.execute_batch(&[]).await.is_empty());
    assert_eq!(plan.traces(), []);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn readers_run_together() {
    let latch = CancellationToken::new();
    let probe = reader("read").on_execute(Step::Until(latch.clone()));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    plan.activate("read").await.unwrap();
    let calls = calls(&["read"; 20]);
    let mut batch = task::spawn(plan.execute_batch(&calls));
    assert_pending!(batch.poll());
    assert_eq!(probe.counts().executions, 20, "all are in flight");
    latch.cancel();
    let called = assert_ready!(batch.poll());
    drop(batch);
    for (at, called) in called.iter().enumerate() {
        let result = called.as_ref().unwrap();
        assert_eq!(result.output, json!({"echo": {"at": at}}));
    }
    assert_traced(&plan, &called);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn readers_that_have_to_be_activated_run_together() {
    let latch = CancellationToken::new();
    let one = reader("one").on_activate(Step::Yield(2)).on_execute(Step::Until(latch.clone()));
    let two = reader("two").on_execute(Step::Until(latch.clone()));
    let fixture = Fixture::paused(&[&one, &two]).await;
    let plan = fixture.plan();
    let calls = calls(&["one", "two", "one", "two", "one"]);
    let in_flight = || one.counts().executions + two.counts().executions == 5;
    let (called, ()) = tokio::join!(plan.execute_batch(&calls), async {
        until(in_flight).await;
        latch.cancel();
    });
    assert_eq!(outcomes(&called), ["ok"; 5]);
    assert_eq!((one.counts().activations, two.counts().activations), (1, 1));
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_results_are_in_the_order_of_the_calls() {
    let fixture = Fixture::with(
        paused().tool(ToolSpec::new("wait").read_only().handler(async |_ctx, input: Value| {
            let at = input["at"].as_u64().unwrap();
            for _ in at..10 {
                tokio::task::yield_now().await;
            }
            Ok(at)
        })),
        &[],
    )
    .await;
    let plan = fixture.plan();
    let called = plan.execute_batch(&calls(&["wait"; 10])).await;
    let outputs: Vec<_> = called.iter().map(|it| it.as_ref().unwrap().output.clone()).collect();
    assert_eq!(json!(outputs), json!([0, 1, 2, 3, 4, 5, 6, 7, 8, 9]));
    let ended: Vec<_> = plan.traces().iter().map(|trace| trace.call_id).collect();
    assert_eq!(ended, [10, 9, 8, 7, 6, 5, 4, 3, 2, 1], "the last was the first to end");
    plan.finish().await;
    fixture.end().await;
}

/// What runs at this moment, and a log of what began and ended.
#[derive(Clone, Default)]
struct Running(Arc<Mutex<(u64, Vec<String>)>>);

impl Running {
    fn tool(&self, spec: ToolSpec, alone: bool) -> FunctionTool {
        let state = (self.clone(), alone);
        spec.handler_with(state, async |(running, alone), ctx, input: Value| {
            let at = input["at"].as_u64().unwrap();
            let enter = |running: &Self| {
                let mut running = running.0.lock().unwrap();
                running.0 += 1;
                running.1.push(format!("+{at}"));
                assert!(!alone || running.0 == 1, "a writer is not alone");
            };
            enter(&running);
            for _ in 0..3 {
                tokio::task::yield_now().await;
                let running = running.0.lock().unwrap();
                assert!(!alone || running.0 == 1, "a writer is not alone");
            }
            let mut running = running.0.lock().unwrap();
            running.0 -= 1;
            running.1.push(format!("-{at}"));
            Ok(ctx.call_id())
        })
    }

    async fn fixture(&self) -> Fixture {
        let tools = paused()
            .tool(self.tool(ToolSpec::new("read").read_only(), false))
            .tool(self.tool(ToolSpec::new("write").writes(), true))
            .tool(self.tool(ToolSpec::new("undeclared"), true));
        Fixture::with(tools, &[]).await
    }

    fn log(&self) -> Vec<String> {
        self.0.lock().unwrap().1.clone()
    }
}

#[tokio::test(start_paused = true)]
async fn a_writer_waits_for_all_before_it_and_all_after_it_wait() {
    let running = Running::default();
    let fixture = running.fixture().await;
    let plan = fixture.plan();
    let calls = calls(&["read", "read", "write", "read", "read", "write", "write", "read"]);
    let called = plan.execute_batch(&calls).await;
    assert_eq!(outcomes(&called), ["ok"; 8]);
    let expected = [
        "+0", "+1", "-0", "-1", "+2", "-2", "+3", "+4", "-3", "-4", "+5", "-5", "+6", "-6", "+7",
        "-7",
    ];
    assert_eq!(running.log(), expected);
    plan.finish().await;
    fixture.end().await;
}

/// As the gate has it.
#[tokio::test(start_paused = true)]
async fn what_declares_nothing_is_alone_as_a_writer() {
    let running = Running::default();
    let fixture = running.fixture().await;
    let plan = fixture.plan();
    let calls = calls(&["undeclared", "undeclared", "read", "undeclared"]);
    assert_eq!(outcomes(&plan.execute_batch(&calls).await), ["ok"; 4]);
    assert_eq!(running.log(), ["+0", "-0", "+1", "-1", "+2", "-2", "+3", "-3"]);
    plan.finish().await;
    fixture.end().await;
}

/// cases/peers.md: write(x); read(x).
#[tokio::test(start_paused = true)]
async fn what_is_written_is_read_by_the_next_call() {
    let stored = Arc::new(AtomicU64::new(0));
    let write = ToolSpec::new("write").writes().handler_with(
        Arc::clone(&stored),
        async |stored, _ctx, input: Value| {
            tokio::task::yield_now().await;
            stored.store(input["at"].as_u64().unwrap(), SeqCst);
            Ok(())
        },
    );
    let read = ToolSpec::new("read")
        .read_only()
        .handler_with(stored, async |stored, _ctx, _: Value| Ok(stored.load(SeqCst)));
    let fixture = Fixture::with(paused().tool(write).tool(read), &[]).await;
    let plan = fixture.plan();
    let calls = calls(&["read", "write", "read", "read", "write", "read"]);
    let called = plan.execute_batch(&calls).await;
    let outputs: Vec<_> = called.iter().map(|it| it.as_ref().unwrap().output.clone()).collect();
    assert_eq!(json!(outputs), json!([0, null, 1, 1, null, 4]));
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_what_goes_wrong_in_one_call_stops_no_other() {
    quiet_probes();
    let good = reader("good").on_execute(Step::Yield(3));
    let bad = reader("bad").on_execute(Step::Err);
    let panics = reader("panics").on_execute(Step::Panic);
    let slow = reader("slow").call_timeout(SECOND).on_execute(Step::Never);
    let broken = reader("broken").on_activate(Step::Err);
    let fixture = Fixture::paused(&[&good, &bad, &panics, &slow, &broken]).await;
    let plan = fixture.begin(PlanOptions::new().deny(name("good2"))).unwrap();
    let mut all =
        calls(&["good", "bad", "good", "panics", "nobody", "slow", "broken", "good", "good"]);
    all[8].arguments = json!("no object");
    let called = plan.execute_batch(&all).await;
    let expected = [
        "ok",
        "execution",
        "ok",
        "panic",
        "not_found",
        "timeout",
        "activation",
        "ok",
        "invalid_input",
    ];
    assert_eq!(outcomes(&called), expected);
    assert_traced(&plan, &called);
    assert_eq!(good.counts().executions, 3);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_a_refused_writer_stops_no_other() {
    let running = Running::default();
    let fixture = running.fixture().await;
    let plan = fixture.begin(PlanOptions::new().read_only()).unwrap();
    let calls = calls(&["read", "write", "read", "undeclared", "read"]);
    let called = plan.execute_batch(&calls).await;
    assert_eq!(outcomes(&called), ["ok", "access_denied", "ok", "access_denied", "ok"]);
    assert_traced(&plan, &called);
    plan.finish().await;
    fixture.end().await;
}

/// What is refused for its name waits for nobody, and nobody waits for it.
#[tokio::test(start_paused = true)]
async fn an_unknown_tool_keeps_nobody_apart() {
    let latch = CancellationToken::new();
    let probe = reader("read").on_execute(Step::Until(latch.clone()));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    plan.activate("read").await.unwrap();
    let calls = calls(&["read", "nobody", "read"]);
    let mut batch = task::spawn(plan.execute_batch(&calls));
    assert_pending!(batch.poll());
    assert_eq!(probe.counts().executions, 2);
    latch.cancel();
    assert_eq!(outcomes(&assert_ready!(batch.poll())), ["ok", "not_found", "ok"]);
    drop(batch);
    plan.finish().await;
    fixture.end().await;
}

/// Refuses the second call that it is asked about, and lets others go on before it nods.
#[derive(Default)]
struct RefusesTheSecond(AtomicU64);

#[async_trait]
impl Approver for RefusesTheSecond {
    async fn decide(&self, _: &ApprovalRequest) -> Result<Decision, ToolFailure> {
        if self.0.fetch_add(1, SeqCst) == 1 {
            return Ok(Decision::deny("this one not"));
        }
        tokio::task::yield_now().await;
        Ok(Decision::Once)
    }
}

/// cases/peers.md: approval of one of three calls at once.
#[tokio::test(start_paused = true)]
async fn one_call_that_is_not_approved_leaves_the_results_of_the_others() {
    let probe = reader("read");
    let fixture = Fixture::paused(&[&probe]).await;
    let options = PlanOptions::new().ask(ToolFilter::new());
    let plan = fixture.begin(options.approver(RefusesTheSecond::default())).unwrap();
    let called = plan.execute_batch(&calls(&["read", "read", "read"])).await;
    assert_eq!(outcomes(&called), ["ok", "approval_denied", "ok"]);
    assert_eq!(probe.counts().executions, 2);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_quota_of_a_plan_holds_in_a_batch() {
    let probe = reader("read");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_calls(2)).unwrap();
    let called = plan.execute_batch(&calls(&["read", "read", "read", "nobody"])).await;
    assert_eq!(outcomes(&called), ["ok", "ok", "limit_exceeded", "not_found"]);
    assert_eq!(probe.counts().executions, 2);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_limit_of_calls_at_once_holds_in_a_batch() {
    let most = Arc::new(Mutex::new((0_u64, 0_u64)));
    let tool = ToolSpec::new("read").read_only().handler_with(
        Arc::clone(&most),
        async |most, _ctx, _: Value| {
            let running = {
                let mut most = most.lock().unwrap();
                most.0 += 1;
                most.1 = most.1.max(most.0);
                most.0
            };
            tokio::task::yield_now().await;
            most.lock().unwrap().0 -= 1;
            Ok(running)
        },
    );
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.begin(PlanOptions::new().max_concurrent(3)).unwrap();
    let called = plan.execute_batch(&calls(&["read"; 10])).await;
    assert_eq!(outcomes(&called), ["ok"; 10]);
    assert_eq!(most.lock().unwrap().1, 3);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p8_the_end_of_the_plan_ends_a_batch() {
    let (one, two, after) = (
        reader("one").on_execute(Step::UntilCancelled),
        reader("two").on_execute(Step::Never),
        Probe::new("after"),
    );
    let fixture = Fixture::paused(&[&one, &two, &after]).await;
    let plan = fixture.plan();
    for name in ["one", "two"] {
        plan.activate(name).await.unwrap();
    }
    let calls = calls(&["one", "two", "after"]);
    let handle = plan.handle();
    let mut batch = task::spawn(handle.execute_batch(&calls));
    assert_pending!(batch.poll());
    plan.cancel();
    let called = batch.await;
    assert_eq!(outcomes(&called), ["ok", "cancelled", "cancelled"]);
    assert_eq!(after.counts(), ProbeCounts::default());
    assert_eq!(handle.traces().len(), 2, "a call of an ended plan leaves no trace");
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_a_dropped_batch_abandons_what_has_begun_and_begins_nothing_more() {
    let read = reader("read").on_execute([Step::Ok, Step::Never]);
    let write = Probe::new("write");
    let fixture = Fixture::paused(&[&read, &write]).await;
    let plan = fixture.plan();
    plan.activate("read").await.unwrap();
    let calls = calls(&["read", "read", "read", "write", "read"]);
    let mut batch = task::spawn(plan.execute_batch(&calls));
    assert_pending!(batch.poll());
    drop(batch);
    let traces = plan.traces();
    let told: Vec<_> = traces.iter().map(|trace| trace.outcome.as_str()).collect();
    assert_eq!(told, ["ok", "abandoned", "abandoned"]);
    assert_eq!(write.counts(), ProbeCounts::default());
    assert_eq!((read.counts().executions, read.counts().dropped), (3, 2));
    drop(read.clone().on_execute(Step::Ok));
    assert!(plan.execute("read", json!({})).await.unwrap().success);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_a_batch_that_is_never_polled_leaves_no_trace() {
    let probe = Probe::new("tool");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    drop(plan.execute_batch(&calls(&["tool"])));
    assert_eq!((plan.traces(), probe.counts()), (Vec::new(), ProbeCounts::default()));
    plan.finish().await;
    fixture.end().await;
}

/// A batch, polled k times and dropped right there, for all k.
#[test]
fn p13_a_batch_can_be_cut_at_every_await() {
    quiet_probes();
    let host = cut::paused();
    let mut completed = false;
    let mut k = 0;
    while !completed {
        completed = host.block_on(async {
            let read = reader("read").on_activate(Step::Yield(2)).on_execute(Step::Yield(3));
            let slow = reader("slow").on_execute(Step::Slow(Duration::from_millis(2)));
            let write = Probe::new("write").on_activate(Step::Yield(1)).on_execute(Step::Yield(2));
            let keeper = Keeper::on(host.handle().clone());
            let tools = [&read, &slow, &write];
            let fixture = Fixture::with(ToolRuntime::builder().keeper(keeper), &tools).await;
            let plan = fixture.plan();
            let calls = calls(&["read", "slow", "nobody", "read", "write", "read", "write"]);
            let called = cut(plan.execute_batch(&calls), k).await;
            let traces = plan.traces();
            let begun = traces.len();
            let numbers: std::collections::HashSet<_> =
                traces.iter().map(|trace| trace.call_id).collect();
            assert_eq!(numbers.len(), begun, "a call has one trace: {traces:?}");
            if called.is_none() {
                assert!(matches!(begun, 0 | 4 | 5 | 6 | 7), "{begun} after {k} polls");
            }
            at_rest().await;
            assert_eq!(plan.traces().len(), begun, "nothing begins later");
            if let Some(called) = &called {
                assert_traced(&plan, called);
            }
            plan.finish().await;
            fixture.end().await;
            called.is_some()
        });
        k += 1;
    }
    assert!(k > 10, "{k} polls are too few");
}

#[tokio::test(start_paused = true)]
async fn a_thousand_readers_run_together() {
    const MANY: usize = 1_000;
    let latch = CancellationToken::new();
    let probe = reader("read").on_execute(Step::Until(latch.clone()));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let calls = calls(&["read"; MANY]);
    let (called, ()) = tokio::join!(plan.execute_batch(&calls), async {
        until(|| probe.counts().executions == MANY as u64).await;
        latch.cancel();
    });
    for (at, called) in called.iter().enumerate() {
        assert_eq!(called.as_ref().unwrap().output, json!({"echo": {"at": at}}));
    }
    assert_eq!(plan.traces().len(), MANY);
    assert_eq!(probe.counts().activations, 1);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_thousand_writers_run_in_their_order() {
    let log = Arc::new(Mutex::new(Vec::new()));
    let write = ToolSpec::new("write").writes().handler_with(
        Arc::clone(&log),
        async |log, _ctx, input: Value| {
            log.lock().unwrap().push(input["at"].as_u64().unwrap());
            Ok(())
        },
    );
    let fixture = Fixture::with(paused().tool(write), &[]).await;
    let plan = fixture.plan();
    let called = plan.execute_batch(&calls(&["write"; 1_000])).await;
    assert_eq!(outcomes(&called), ["ok"; 1_000]);
    assert_eq!(*log.lock().unwrap(), (0..1_000).collect::<Vec<_>>());
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn calls_of_one_turn_may_have_the_same_id() {
    let fixture = Fixture::paused(&[&reader("read")]).await;
    let plan = fixture.plan();
    let calls: Vec<_> = calls(&["read"; 3]).into_iter().map(|call| call.id("same")).collect();
    let called = plan.execute_batch(&calls).await;
    assert_eq!(outcomes(&called), ["ok"; 3]);
    let mut numbers: Vec<_> = plan.traces().iter().map(|trace| trace.call_id).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, [1, 2, 3]);
    plan.finish().await;
    fixture.end().await;
}

// ===== what a model is told =====

fn result(value: Value) -> ToolResult {
    serde_json::from_value(value).unwrap()
}

#[test]
fn a_text_is_told_as_it_is_and_all_else_as_json() {
    for (output, text) in [
        (json!("one\n\"two\""), "one\n\"two\""),
        (json!(""), ""),
        (json!({"b": 1, "a": ["x"]}), r#"{"a":["x"],"b":1}"#),
        (json!([1, "two"]), r#"[1,"two"]"#),
        (json!(null), "null"),
        (json!(7.5), "7.5"),
        (json!(true), "true"),
    ] {
        let result = result(json!({"success": true, "output": output, "duration_ms": 1}));
        assert_eq!(result.to_model_text(), text);
    }
}

#[test]
fn a_failure_is_told_with_its_code() {
    let failed = |more: Value| {
        let mut value = json!({"success": false, "output": null, "duration_ms": 1});
        value.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        result(value).to_model_text()
    };
    let metadata = json!({"code": "timeout"});
    let told = failed(json!({"error": "no answer in 30s", "metadata": metadata}));
    assert_eq!(told, "error (timeout): no answer in 30s");
    assert_eq!(failed(json!({"error": "no"})), "error (execution): no");
    assert_eq!(failed(json!({})), "error (execution): failed");
    let odd = json!({"error": "no", "metadata": {"code": 7}});
    assert_eq!(failed(odd), "error (execution): no");
}

#[tokio::test(start_paused = true)]
async fn an_output_that_was_cut_says_so_to_the_model() {
    let text = ToolSpec::new("text").read_only().function(|()| Ok("word ".repeat(100)));
    let list = ToolSpec::new("list").read_only().function(|()| Ok(vec!["item"; 100]));
    let fixture = Fixture::with(paused().tool(text).tool(list), &[]).await;
    let plan = fixture.begin(PlanOptions::new().max_output_bytes(40)).unwrap();
    for (tool, from, start) in [("text", 502, "word word"), ("list", 701, r#"["item","#)] {
        let result = plan.execute(tool, json!({})).await.unwrap();
        let to = result.output.to_string().len();
        assert!(to <= 40);
        let told = result.to_model_text();
        assert!(told.starts_with(start), "{told}");
        let end = format!("\n[the output was cut from {from} to {to} bytes]");
        assert!(told.ends_with(&end), "{told}");
    }
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn every_refusal_has_a_text_for_the_model_without_the_host_s_insides() {
    for code in Refused::ALL {
        let refused = Refused::by(code).await;
        let error = refused.plan.execute("tool", json!({})).await.unwrap_err();
        let text = match code {
            OutcomeCode::NotFound => "there is no tool of that name; did you mean local__toll?",
            OutcomeCode::AccessDenied => {
                "`local/tool` is not allowed in this plan: the plan is read-only and the tool \
                 declares `writes`; do not try again"
            }
            OutcomeCode::CheckpointRequired => {
                "`local/tool` needs a checkpoint: the plan requires checkpoints and the tool is \
                 not `checkpointable`; do not try again"
            }
            OutcomeCode::ApprovalRequired => {
                "it needs an approval, and nobody is there to give one; do not try again"
            }
            OutcomeCode::ApprovalDenied => "it was not approved: not on a Friday",
            OutcomeCode::LimitExceeded => {
                "the 0 calls that the plan may have are used up; do not try again"
            }
            OutcomeCode::Concurrency => "too many calls are running; try again later",
            OutcomeCode::Activation | OutcomeCode::ActivationTimeout => {
                "the tool is not available now; try again later"
            }
            OutcomeCode::DefinitionChanged | OutcomeCode::NotActivated => {
                "the tool is not available in this plan any more"
            }
            OutcomeCode::Cancelled => "the call was cancelled",
            OutcomeCode::PlanEnded | OutcomeCode::ShutDown => "no more tools can be called",
            code => panic!("{code} is no refusal"),
        };
        assert_eq!(error.to_model_text(), format!("error ({code}): {text}"));
        if code == OutcomeCode::Activation {
            assert!(error.to_string().contains(SECRET), "an operator is told: {error}");
        }
        refused.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_tool_that_is_not_tried_again_says_so_to_the_model() {
    let refused = Refused::by(OutcomeCode::Activation).await;
    for _ in 0..3 {
        let error = refused.plan.execute("tool", json!({})).await.unwrap_err();
        assert!(error.to_model_text().ends_with("try again later"));
    }
    let error = refused.plan.execute("tool", json!({})).await.unwrap_err();
    let told = "error (activation): the tool is not available; do not try again";
    assert_eq!(error.to_model_text(), told);
    assert!(error.to_string().contains(SECRET), "{error}");
    refused.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_activation_that_panics_or_hangs_tells_the_model_nothing_of_it() {
    for step in [Step::Err, Step::Panic, Step::Never] {
        let probe = Probe::new("tool").on_activate(step);
        let fixture = Fixture::paused(&[&probe]).await;
        let plan = fixture.plan();
        let error = plan.execute("tool", json!({})).await.unwrap_err();
        let told = "error (activation): the tool is not available now; try again later";
        assert_eq!(error.to_model_text(), told);
        plan.finish().await;
        fixture.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_deactivation_that_failed_tells_the_model_nothing_of_it() {
    let probe = Probe::new("tool").on_deactivate(Step::Err);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    plan.activate("tool").await.unwrap();
    let errors = plan.finish().await.errors();
    assert_eq!(errors.len(), 1);
    assert_eq!(errors[0].to_model_text(), "error (activation): the tool could not be released");
    assert!(errors[0].to_string().contains("the probe fails in deactivate"));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_failure_that_became_an_error_is_told_as_the_result_was() {
    let probe = Probe::new("tool").on_execute(Step::Err);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let result = plan.execute("tool", json!({})).await.unwrap();
    let told = result.to_model_text();
    assert_eq!(told, "error (execution): the probe fails in execute");
    let error = result.into_result().unwrap_err();
    assert_eq!(error.to_model_text(), told);
    assert_eq!(CallError::from(error).to_model_text(), told);
    plan.finish().await;
    fixture.end().await;
}

/// A model reads the safe names, so they are what it misspells and what it is told.
#[tokio::test(start_paused = true)]
async fn a_model_that_misspells_a_name_is_told_the_nearest() {
    let tool = ToolSpec::new("files/read_file").read_only().function(|()| Ok("here"));
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.plan();
    for asked in ["files/raed_file", "files__raed_file", "file__read_file", "files_read_file"] {
        let error = plan.execute(asked, json!({})).await.unwrap_err();
        let told = "error (not_found): there is no tool of that name; did you mean \
                    files__read_file?";
        assert_eq!(error.to_model_text(), told, "{asked}");
    }
    let error = plan.execute("deploy", json!({})).await.unwrap_err();
    assert_eq!(error.to_model_text(), "error (not_found): there is no tool of that name");
    plan.finish().await;
    fixture.end().await;
}

/// The refusal of a child plan may reach a model through a tool that is an agent.
#[tokio::test(start_paused = true)]
async fn a_refused_child_plan_tells_the_model_no_path() {
    let fixture = Fixture::paused(&[]).await;
    let plan = fixture.begin(PlanOptions::new().sandbox("/srv/public")).unwrap();
    let error = plan.begin_child(PlanOptions::new().sandbox("/srv/private")).unwrap_err();
    assert!(matches!(error, ToolRuntimeError::AccessDenied { .. }));
    let told = error.to_model_text();
    assert!(!told.contains("/srv"), "{told}");
    drop(plan);
    fixture.end().await;
}

/// An approver that cannot do its work.
struct Broken(bool);

#[async_trait]
impl Approver for Broken {
    async fn decide(&self, _: &ApprovalRequest) -> Result<Decision, ToolFailure> {
        assert!(!self.0, "{SECRET} cannot be read");
        Err(ToolFailure::failed(format!("{SECRET} cannot be read")))
    }
}

#[tokio::test(start_paused = true)]
async fn an_approver_that_is_broken_tells_the_model_nothing_of_it() {
    for panics in [false, true] {
        let probe = Probe::new("tool");
        let fixture = Fixture::paused(&[&probe]).await;
        let options = PlanOptions::new().ask(ToolFilter::new()).approver(Broken(panics));
        let plan: Plan = fixture.begin(options).unwrap();
        let error = plan.execute("tool", json!({})).await.unwrap_err();
        assert_eq!(error.code(), OutcomeCode::ApprovalDenied);
        assert!(error.to_string().contains(SECRET), "an operator is told: {error}");
        let told = error.to_model_text();
        assert!(!told.contains(SECRET), "{told}");
        assert_eq!(probe.counts(), ProbeCounts::default());
        plan.finish().await;
        fixture.end().await;
    }
}
