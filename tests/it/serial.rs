//! What is serialised: the outputs of typed tools, and all that the crate tells of its plans.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;
use std::time::{Duration, SystemTime};

use insta::assert_json_snapshot;
use schemars::JsonSchema;
use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Value, json};
use tokio_test::{assert_pending, task};
use tokio_util::sync::CancellationToken;
use toolscope::test_util::{Probe, Step};
use toolscope::{
    ActivationContext, ApprovalRequest, Approver, CallError, CallOptions, Change, ChangeKind,
    Decision, EndReason, EventKind, FailureKind, FunctionTool, OutcomeCode, OutputCheck,
    PlanOptions, Progress, ResourceSlot, SourceKind, Tool, ToolCapability, ToolDescriptor,
    ToolEvent, ToolExecutionContext, ToolFailure, ToolFilter, ToolInstance, ToolOutput, ToolResult,
    ToolRuntime, ToolSpec, ToolType, async_trait,
};

use crate::cut::quiet_probes;
use crate::hooks::{Blocker, block_on, until};
use crate::name::name;
use crate::registry::described;
use crate::support::{Fixture, paused};
use crate::sync::edition;

const SECOND: Duration = Duration::from_secs(1);

fn spec() -> ToolSpec {
    ToolSpec::new("tool").read_only()
}

/// Calls a tool once, with an empty object.
async fn call(tool: FunctionTool) -> ToolResult {
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.plan();
    let result = plan.execute("tool", json!({})).await.unwrap();
    plan.finish().await;
    fixture.end().await;
    result
}

// ===== what a doc comment says =====

/// Counts the words of a text.
///
/// A word is what stands between spaces.
#[derive(Deserialize, JsonSchema)]
struct Documented {
    /// The text itself.
    text: String,
}

#[derive(Deserialize, JsonSchema)]
struct Undocumented {
    text: String,
}

#[test]
fn the_doc_comment_of_the_arguments_describes_the_tool() {
    let tool = spec().function(|args: Documented| Ok(args.text));
    let said = "Counts the words of a text.\n\nA word is what stands between spaces.";
    assert_eq!(tool.descriptor().description, said);
    let schema = tool.descriptor().input_schema.as_ref().unwrap();
    assert_eq!(schema["properties"]["text"]["description"], "The text itself.");
}

#[test]
fn a_description_goes_before_the_doc_comment() {
    let tool = spec().description("Counts").function(|args: Documented| Ok(args.text));
    assert_eq!(tool.descriptor().description, "Counts");
}

#[test]
fn a_tool_that_nobody_describes_has_no_description() {
    let tool = spec().function(|args: Undocumented| Ok(args.text));
    assert_eq!(tool.descriptor().description, "");
    assert_eq!(spec().function(|()| Ok(1)).descriptor().description, "");
}

// ===== functions that block =====

/// Blocks until the call is cancelled, and notes that it saw that.
fn until_cancelled(saw: &Arc<AtomicBool>) -> FunctionTool {
    let saw = Arc::clone(saw);
    spec().blocking(move |ctx: ToolExecutionContext, (): ()| {
        while !ctx.is_cancelled() {
            std::thread::yield_now();
        }
        saw.store(true, SeqCst);
        ctx.check()?;
        Ok(())
    })
}

fn threads(seen: &Arc<Mutex<Vec<ThreadId>>>) -> FunctionTool {
    let seen = Arc::clone(seen);
    spec().blocking(move |_, (): ()| {
        seen.lock().unwrap().push(std::thread::current().id());
        Ok("here")
    })
}

#[tokio::test(start_paused = true)]
async fn a_blocking_function_runs_on_another_thread() {
    let seen = Arc::default();
    assert_eq!(call(threads(&seen)).await.output, json!("here"));
    let seen = seen.lock().unwrap().clone();
    assert_eq!(seen.len(), 1);
    assert_ne!(seen[0], std::thread::current().id());
}

/// With the runtime's own keeper, under a runtime of one thread and under none.
#[test]
fn a_blocking_function_runs_under_any_runtime_and_under_none() {
    let one_thread = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let seen = Arc::default();
    let work = async {
        let fixture = Fixture::with(ToolRuntime::builder().tool(threads(&seen)), &[]);
        let fixture = fixture.await;
        let plan = fixture.plan();
        for _ in 0..3 {
            assert_eq!(plan.execute("tool", json!({})).await.unwrap().output, json!("here"));
        }
        plan.finish().await;
        fixture.end().await;
    };
    one_thread.block_on(work);
    let work = async {
        let builder = ToolRuntime::builder().tool(threads(&seen));
        let fixture = Fixture::with(builder, &[]).await;
        let plan = fixture.plan();
        assert!(plan.execute("tool", json!({})).await.unwrap().success);
        drop(plan);
        fixture
    };
    block_on(work).end_by_drop();
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 4);
    assert!(!seen.contains(&std::thread::current().id()));
}

#[tokio::test]
async fn a_blocking_function_holds_up_nobody_else() {
    let blocker = Blocker::default();
    let (holds, quick) = (blocker.clone(), ToolSpec::new("quick").read_only());
    let blocks = spec().blocking(move |_, (): ()| {
        holds.block();
        Ok(())
    });
    let builder = ToolRuntime::builder().tool(blocks);
    let fixture = Fixture::with(builder.tool(quick.function(|()| Ok(1))), &[]).await;
    let plan = fixture.plan();
    let mut called = task::spawn(plan.execute("tool", json!({})));
    assert_pending!(called.poll());
    until(|| blocker.is_blocking()).await;
    assert!(plan.execute("quick", json!({})).await.unwrap().success);
    assert_pending!(called.poll());
    blocker.release();
    assert!(called.await.unwrap().success);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn many_blocking_functions_run_at_once() {
    let count = Arc::new(Mutex::new(0));
    let counts = Arc::clone(&count);
    // Each waits for all: they would never end one after another.
    let tool = spec().blocking(move |ctx, (): ()| {
        *counts.lock().unwrap() += 1;
        while *counts.lock().unwrap() < 20 {
            ctx.check()?;
            std::thread::yield_now();
        }
        Ok(())
    });
    let fixture = Fixture::with(ToolRuntime::builder().tool(tool), &[]).await;
    let plan = fixture.plan();
    let calls = (0..20).map(|_| plan.execute("tool", json!({})));
    let called = futures_util::future::join_all(calls).await;
    assert!(called.into_iter().all(|called| called.unwrap().success));
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_blocking_function_that_panics_is_contained() {
    quiet_probes();
    let tool =
        spec().blocking(|_, (): ()| -> Result<(), ToolFailure> { panic!("the probe panics") });
    let result = call(tool).await;
    assert_eq!(result.code(), "panic");
    assert_eq!(result.error.as_deref(), Some("the tool panicked: the probe panics"));
}

#[tokio::test(start_paused = true)]
async fn p14_what_a_blocking_function_returns_is_the_outcome() {
    for (kind, code) in [
        (FailureKind::Failed, "execution"),
        (FailureKind::Invalid, "invalid_input"),
        (FailureKind::OutcomeUnknown, "outcome_unknown"),
    ] {
        let tool = spec().blocking(move |_, (): ()| Err::<(), _>(ToolFailure::new(kind, "no")));
        assert_eq!(call(tool).await.code(), code);
    }
    let tool = spec().blocking(|_, (): ()| Ok(f64::NAN));
    assert_eq!(call(tool).await.code(), "invalid_output");
}

#[tokio::test]
async fn a_blocking_function_sees_that_its_call_is_cancelled() {
    let saw = Arc::default();
    let fixture = Fixture::with(ToolRuntime::builder().tool(until_cancelled(&saw)), &[]).await;
    let plan = fixture.plan();
    let token = CancellationToken::new();
    let options = CallOptions::new().token(token.clone());
    let mut called = task::spawn(plan.execute_with("tool", json!({}), options));
    assert_pending!(called.poll());
    token.cancel();
    assert!(matches!(called.await, Err(CallError::Cancelled(_))));
    assert!(saw.load(SeqCst));
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn a_blocking_function_sees_that_its_time_is_over() {
    let saw = Arc::default();
    let fixture = Fixture::with(ToolRuntime::builder().tool(until_cancelled(&saw)), &[]).await;
    let plan = fixture.plan();
    let options = CallOptions::new().timeout(Duration::from_millis(1));
    let result = plan.execute_with("tool", json!({}), options).await.unwrap();
    assert_eq!(result.code(), "timeout");
    until(|| saw.load(SeqCst)).await;
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn a_blocking_function_sees_that_its_plan_ends() {
    let saw = Arc::default();
    let fixture = Fixture::with(ToolRuntime::builder().tool(until_cancelled(&saw)), &[]).await;
    let plan = fixture.plan();
    let handle = plan.handle();
    let mut called = task::spawn(handle.execute("tool", json!({})));
    assert_pending!(called.poll());
    plan.cancel();
    assert!(matches!(called.await, Err(CallError::Cancelled(_))));
    assert!(saw.load(SeqCst));
    assert_eq!(plan.finish().await.overrun(), 0);
    fixture.end().await;
}

#[tokio::test]
async fn p13_a_blocking_function_sees_that_its_caller_is_gone() {
    let saw = Arc::default();
    let fixture = Fixture::with(ToolRuntime::builder().tool(until_cancelled(&saw)), &[]).await;
    let plan = fixture.plan();
    let mut called = task::spawn(plan.execute("tool", json!({})));
    assert_pending!(called.poll());
    assert!(!saw.load(SeqCst));
    drop(called);
    until(|| saw.load(SeqCst)).await;
    let traces = plan.traces();
    assert_eq!((traces.len(), traces[0].outcome), (1, OutcomeCode::Abandoned));
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test]
async fn p9_a_function_that_blocks_for_ever_does_not_hold_the_end() {
    let blocker = Blocker::default();
    let holds = blocker.clone();
    let blocks = spec().blocking(move |_, (): ()| {
        holds.block();
        Ok(())
    });
    let fixture = Fixture::with(ToolRuntime::builder().tool(blocks), &[]).await;
    let short = toolscope::Deadlines::default().grace(Duration::from_millis(1));
    let plan = fixture.begin(PlanOptions::new().deadlines(short)).unwrap();
    let handle = plan.handle();
    let mut called = task::spawn(handle.execute("tool", json!({})));
    assert_pending!(called.poll());
    until(|| blocker.is_blocking()).await;
    let (report, called) = tokio::join!(plan.finish(), called);
    assert_eq!((report.overrun(), report.unsettled().len()), (0, 0), "no call is being polled");
    assert_eq!(called.unwrap_err().code(), OutcomeCode::PlanEnded);
    fixture.end().await;
    assert!(blocker.is_blocking());
    blocker.release();
}

// ===== numbers that JSON does not have =====

/// What becomes of that output.
async fn given<T>(output: T) -> ToolResult
where
    T: Serialize + JsonSchema + Clone + Send + Sync + 'static,
{
    call(spec().function(move |_: Value| Ok(output.clone()))).await
}

#[derive(Clone, Serialize, JsonSchema)]
struct Pair(f64, Option<i32>);

#[derive(Clone, Serialize, JsonSchema)]
struct Wrapped(f64);

#[derive(Clone, Serialize, JsonSchema)]
struct Reading {
    note: Option<String>,
    value: f64,
}

#[derive(Clone, Serialize, JsonSchema)]
struct Flat {
    name: Option<&'static str>,
    #[serde(flatten)]
    reading: Reading,
}

#[derive(Clone, Serialize, JsonSchema)]
enum Tagged {
    One(f64),
    Two(i32, f32),
    Named { value: f64 },
}

#[derive(Clone, Serialize, JsonSchema)]
#[serde(tag = "kind")]
enum Inside {
    Named { value: f64 },
    Holds(Reading),
}

#[derive(Clone, Serialize, JsonSchema)]
#[serde(tag = "kind", content = "it")]
enum Beside {
    One(f64),
}

#[derive(Clone, Serialize, JsonSchema)]
#[serde(untagged)]
enum Untagged {
    Two(Option<i32>, f64),
}

#[track_caller]
fn assert_no_json(result: &ToolResult) {
    assert_eq!(result.code(), "invalid_output", "{result:?}");
    assert_eq!((result.success, &result.output), (false, &Value::Null));
    let error = result.error.as_ref().unwrap();
    assert!(error.contains("NaN") || error.contains("inf"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_number_that_is_none_is_no_output() {
    for number in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        assert_no_json(&given(number).await);
    }
    for number in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        assert_no_json(&given(number).await);
    }
}

#[tokio::test(start_paused = true)]
async fn a_number_that_is_none_is_no_output_wherever_it_stands() {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let reading = |value| Reading { note: None, value };
    for result in [
        given(vec![1.0, nan]).await,
        given([[0.0], [inf]]).await,
        given(Some(nan)).await,
        given(Some(Some(-inf))).await,
        given((1, "two", nan)).await,
        given((None::<i32>, vec![None, Some(inf)])).await,
        given(BTreeMap::from([("a", 1.0), ("b", nan)])).await,
        given(HashMap::from([(7, f32::NAN)])).await,
        given(BTreeMap::from([("a", vec![BTreeMap::from([("b", Some(inf))])])])).await,
        given(Box::new(nan)).await,
        given(Wrapped(nan)).await,
        given(Pair(inf, None)).await,
        given(reading(nan)).await,
        given(vec![reading(1.0), reading(-inf)]).await,
        given(Flat { name: None, reading: reading(nan) }).await,
        given(Tagged::One(nan)).await,
        given(Tagged::Two(1, f32::INFINITY)).await,
        given(Tagged::Named { value: nan }).await,
        given(Inside::Named { value: inf }).await,
        given(Inside::Holds(reading(nan))).await,
        given(Beside::One(nan)).await,
        given(Untagged::Two(None, inf)).await,
        given(Ok::<f64, String>(nan)).await,
        given(json!({"a": null}).as_object().cloned().map(|fields| (fields, nan))).await,
    ] {
        assert_no_json(&result);
    }
}

#[derive(Clone, Serialize, JsonSchema)]
struct Nothing;

#[derive(Clone, Serialize, JsonSchema)]
enum Plain {
    Here,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
fn is_nan(number: &f64) -> bool {
    number.is_nan()
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
fn as_text<S: Serializer>(number: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(number)
}

#[derive(Clone, Serialize, JsonSchema)]
struct Careful {
    #[serde(serialize_with = "as_text")]
    #[schemars(with = "String")]
    told: f64,
    #[serde(skip_serializing_if = "is_nan")]
    kept: f64,
    nothing: Option<f64>,
}

#[tokio::test(start_paused = true)]
async fn what_is_null_or_a_number_stays_what_it_is() {
    let careful = Careful { told: f64::NAN, kept: f64::NAN, nothing: None };
    for (result, output) in [
        (given(()).await, json!(null)),
        (given(None::<f64>).await, json!(null)),
        (given(Some(None::<f64>)).await, json!(null)),
        (given(Nothing).await, json!(null)),
        (given(json!(null)).await, json!(null)),
        (given(json!({"a": [null]})).await, json!({"a": [null]})),
        (given(vec![None, Some(1.5)]).await, json!([null, 1.5])),
        (given(BTreeMap::from([("a", None::<f32>)])).await, json!({"a": null})),
        (given(Pair(-0.0, None)).await, json!([-0.0, null])),
        (given(Plain::Here).await, json!("Here")),
        (
            given((f64::MAX, f64::MIN_POSITIVE, ())).await,
            json!([f64::MAX, f64::MIN_POSITIVE, null]),
        ),
        (given((u64::MAX, i64::MIN, ())).await, json!([u64::MAX, i64::MIN, null])),
        (given(careful).await, json!({"told": "NaN", "nothing": null})),
    ] {
        assert!(result.success, "{result:?}");
        assert_eq!(result.output, output);
    }
}

// ===== outputs that are no JSON, or too much of it =====

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
enum Key {
    Unit,
    Holds(u8),
}

#[tokio::test(start_paused = true)]
async fn a_key_is_a_text_or_what_is_written_as_one() {
    for (result, output) in [
        (given(BTreeMap::from([(Key::Unit, 1)])).await, json!({"Unit": 1})),
        (given(BTreeMap::from([('c', None::<u8>)])).await, json!({"c": null})),
        (given(BTreeMap::from([(-7_i64, None::<u8>)])).await, json!({"-7": null})),
    ] {
        assert_eq!((result.success, result.output), (true, output));
    }
    for result in [
        given(BTreeMap::from([(Key::Holds(1), 1)])).await,
        given(BTreeMap::from([(vec![1], 1)])).await,
        given(BTreeMap::from([((), 1)])).await,
        given(vec![BTreeMap::from([((1, 2), None::<u8>)])]).await,
    ] {
        assert_eq!(result.code(), "invalid_output");
        assert_eq!(result.output, Value::Null);
    }
}

#[derive(Clone, JsonSchema)]
struct Unserialisable;

impl Serialize for Unserialisable {
    fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom("the handle is closed"))
    }
}

#[tokio::test(start_paused = true)]
async fn p14_an_output_that_cannot_be_serialised_is_invalid() {
    for result in [given(Unserialisable).await, given((None::<u8>, Unserialisable)).await] {
        assert_eq!(result.code(), "invalid_output");
        let error = result.error.unwrap();
        assert_eq!(error, "the output cannot be JSON: the handle is closed");
    }
    let result = call(spec().function(|_: Value| Ok(i128::MAX.to_string()))).await;
    assert!(result.success, "as a text every number is JSON");
}

#[tokio::test(start_paused = true)]
async fn ten_megabytes_of_output_are_cut_and_say_so() {
    const TEN: usize = 10 * 1024 * 1024;
    const MOST: usize = 4 * 1024 * 1024;
    let fixture =
        Fixture::with(paused().tool(spec().function(|()| Ok("x".repeat(TEN)))), &[]).await;
    let plan = fixture.plan();
    let result = plan.execute("tool", json!({})).await.unwrap();
    let cut = result.output.as_str().unwrap();
    assert!(result.success && cut.ends_with("x [cut]"));
    assert_eq!(cut.len() + 2, MOST);
    let truncated = json!({"from_bytes": TEN + 2, "to_bytes": MOST});
    assert_eq!(result.metadata["truncated"], truncated);
    assert_eq!(plan.traces()[0].result_size_bytes, MOST);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_long_list_is_cut_between_its_items() {
    let tool = spec().function(|()| Ok(vec!["item"; 1_000]));
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.begin(PlanOptions::new().max_output_bytes(100)).unwrap();
    let result = plan.execute("tool", json!({})).await.unwrap();
    let kept = result.output.as_array().unwrap();
    assert!(result.success && kept.len() > 10);
    assert!(kept.iter().all(|item| item == "item"), "{kept:?}");
    let size = result.output.to_string().len();
    assert_eq!(result.metadata["truncated"], json!({"from_bytes": 7_001, "to_bytes": size}));
    assert!(size <= 100 && plan.traces()[0].result_size_bytes == size);
    let patient = fixture.begin(PlanOptions::new().max_output_bytes(7_001)).unwrap();
    let result = patient.execute("tool", json!({})).await.unwrap();
    assert_eq!(result.output.as_array().unwrap().len(), 1_000);
    assert!(!result.metadata.contains_key("truncated"));
    drop((plan, patient));
    fixture.end().await;
}

// ===== results =====

/// A result that took 1.5 ms.
fn timed(mut result: ToolResult) -> ToolResult {
    assert!(result.duration_ms.is_finite() && result.duration_ms >= 0.0);
    result.duration_ms = 1.5;
    result
}

#[tokio::test(start_paused = true)]
async fn the_json_of_a_success() {
    let result = call(spec().function(|_: Value| Ok(BTreeMap::from([("sum", 3)])))).await;
    assert_json_snapshot!(timed(result), @r#"
    {
      "success": true,
      "output": {
        "sum": 3
      },
      "error": null,
      "duration_ms": 1.5,
      "metadata": {}
    }
    "#);
}

#[tokio::test(start_paused = true)]
async fn the_json_of_each_failure() {
    quiet_probes();
    let mut told = Vec::new();
    for kind in [
        FailureKind::Failed,
        FailureKind::Invalid,
        FailureKind::Transient,
        FailureKind::Cancelled,
        FailureKind::NotActivated,
        FailureKind::OutcomeUnknown,
        FailureKind::InvalidOutput,
    ] {
        let failed = move |_: Value| Err::<(), _>(ToolFailure::new(kind, "it did not work"));
        let result = call(spec().function(failed)).await;
        assert_eq!(
            (result.error.as_deref(), &result.output),
            (Some("it did not work"), &json!(null))
        );
        told.push(Value::from(result.metadata));
    }
    for step in [Step::Panic, Step::Never] {
        let probe = Probe::new("tool").call_timeout(SECOND).on_execute(step);
        let fixture = Fixture::paused(&[&probe]).await;
        let plan = fixture.plan();
        let result = plan.execute("tool", json!({})).await.unwrap();
        told.push(json!(timed(result)));
        plan.finish().await;
        fixture.end().await;
    }
    assert_json_snapshot!(told, @r#"
    [
      {
        "code": "execution"
      },
      {
        "code": "invalid_input"
      },
      {
        "code": "execution"
      },
      {
        "code": "execution"
      },
      {
        "code": "not_activated"
      },
      {
        "code": "outcome_unknown"
      },
      {
        "code": "invalid_output"
      },
      {
        "duration_ms": 1.5,
        "error": "the tool panicked: the probe panics in execute",
        "metadata": {
          "code": "panic"
        },
        "output": null,
        "success": false
      },
      {
        "duration_ms": 1.5,
        "error": "`local/tool` did not finish within 1s",
        "metadata": {
          "code": "timeout"
        },
        "output": null,
        "success": false
      }
    ]
    "#);
}

/// A tool that gives an empty object, whatever its schemas say.
struct Schemas(ToolDescriptor, FunctionTool);

impl Schemas {
    fn new(text: &str) -> Self {
        let descriptor = ToolDescriptor::new(name(text)).capability(ToolCapability::read_only());
        Self(descriptor, spec().function(|_: Value| Ok(json!({}))))
    }
}

#[async_trait]
impl Tool for Schemas {
    fn descriptor(&self) -> &ToolDescriptor {
        &self.0
    }

    fn immediate(&self) -> Option<Arc<dyn ToolInstance>> {
        self.1.immediate()
    }

    async fn activate(
        &self,
        ctx: &ActivationContext,
    ) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        self.1.activate(ctx).await
    }
}

#[tokio::test(start_paused = true)]
async fn the_json_of_the_faults_of_an_input_and_of_an_output() {
    let (mut takes, mut gives) = (Schemas::new("takes"), Schemas::new("gives"));
    takes.0.input_schema = Some(json!({
        "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}},
        "required": ["path"],
        "additionalProperties": false,
    }));
    gives.0.output_schema = Some(json!({"required": ["sum"]}));
    let fixture = Fixture::with(paused().tool(takes).tool(gives), &[]).await;
    let plan = fixture.plan();
    let strict = fixture.begin(PlanOptions::new().output_check(OutputCheck::Reject)).unwrap();
    let broken = plan.execute("takes", json!({"pth": "a", "limit": "ten"})).await.unwrap();
    let mut told = vec![Value::from(broken.metadata)];
    told.push(json!(timed(plan.execute("gives", json!({})).await.unwrap())));
    told.push(json!(timed(strict.execute("gives", json!({})).await.unwrap())));
    assert_json_snapshot!(told, @r#"
    [
      {
        "code": "invalid_input",
        "faults": [
          {
            "expected": "an integer",
            "got": "the string \"ten\"",
            "path": "/limit"
          },
          {
            "expected": "only \"limit\", \"path\"",
            "got": "the property \"pth\"",
            "nearest": [
              "path"
            ],
            "path": ""
          },
          {
            "expected": "the property \"path\"",
            "got": "nothing",
            "nearest": [
              "pth"
            ],
            "path": ""
          }
        ]
      },
      {
        "duration_ms": 1.5,
        "error": null,
        "metadata": {
          "output_faults": [
            {
              "expected": "the property \"sum\"",
              "got": "nothing",
              "path": ""
            }
          ],
          "output_valid": false
        },
        "output": {},
        "success": true
      },
      {
        "duration_ms": 1.5,
        "error": "at the top level: the property \"sum\" is missing",
        "metadata": {
          "code": "invalid_output",
          "faults": [
            {
              "expected": "the property \"sum\"",
              "got": "nothing",
              "path": ""
            }
          ]
        },
        "output": null,
        "success": false
      }
    ]
    "#);
    drop((plan, strict));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_json_of_a_result_that_was_cut() {
    let tool = spec().function(|_: Value| Ok("a long text, longer than it may be"));
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.begin(PlanOptions::new().max_output_bytes(20)).unwrap();
    let result = plan.execute("tool", json!({})).await.unwrap();
    assert_json_snapshot!(timed(result), @r#"
    {
      "success": true,
      "output": "a long text, [cut]",
      "error": null,
      "duration_ms": 1.5,
      "metadata": {
        "truncated": {
          "from_bytes": 36,
          "to_bytes": 20
        }
      }
    }
    "#);
    drop(plan);
    fixture.end().await;
}

#[test]
fn a_result_is_read_back_and_an_older_one_too() {
    let read = |value: Value| serde_json::from_value::<ToolResult>(value);
    let whole = json!({
        "success": false,
        "output": null,
        "error": "no",
        "duration_ms": 1.5,
        "metadata": {"code": "timeout", "more": [1]},
    });
    let result = read(whole.clone()).unwrap();
    assert_eq!((result.code(), result.duration_ms), ("timeout", 1.5));
    assert_eq!(serde_json::to_value(result).unwrap(), whole);

    let least = read(json!({"success": true, "output": [1], "duration_ms": 0})).unwrap();
    assert_eq!((least.code(), least.error.as_ref(), least.metadata.len()), ("ok", None, 0));
    assert_eq!(least.into_result().unwrap(), json!([1]));

    let newer = json!({"success": true, "output": 1, "duration_ms": 0, "cost": {"tokens": 7}});
    assert!(read(newer).unwrap().success, "what is not known is passed over");

    let unknown = json!({"code": "a_code_of_tomorrow"});
    let failed = json!({"success": false, "output": null, "duration_ms": 0, "metadata": unknown});
    let result = read(failed).unwrap();
    assert_eq!(result.code(), "a_code_of_tomorrow");
    assert_eq!(result.into_result().unwrap_err().code(), OutcomeCode::Execution);
    assert!(read(json!({"output": 1, "duration_ms": 0})).is_err(), "it must say how it went");
}

// ===== codes =====

#[test]
fn a_code_is_the_same_text_everywhere() {
    let codes = [
        (OutcomeCode::Ok, "ok"),
        (OutcomeCode::InvalidInput, "invalid_input"),
        (OutcomeCode::Execution, "execution"),
        (OutcomeCode::Panic, "panic"),
        (OutcomeCode::Timeout, "timeout"),
        (OutcomeCode::OutcomeUnknown, "outcome_unknown"),
        (OutcomeCode::InvalidOutput, "invalid_output"),
        (OutcomeCode::Cancelled, "cancelled"),
        (OutcomeCode::NotActivated, "not_activated"),
        (OutcomeCode::ActivationTimeout, "activation_timeout"),
        (OutcomeCode::NotFound, "not_found"),
        (OutcomeCode::AccessDenied, "access_denied"),
        (OutcomeCode::CheckpointRequired, "checkpoint_required"),
        (OutcomeCode::ApprovalRequired, "approval_required"),
        (OutcomeCode::ApprovalDenied, "approval_denied"),
        (OutcomeCode::LimitExceeded, "limit_exceeded"),
        (OutcomeCode::Concurrency, "concurrency"),
        (OutcomeCode::Activation, "activation"),
        (OutcomeCode::DefinitionChanged, "definition_changed"),
        (OutcomeCode::PlanEnded, "plan_ended"),
        (OutcomeCode::ShutDown, "shut_down"),
        (OutcomeCode::Abandoned, "abandoned"),
    ];
    for (code, text) in codes {
        assert_eq!((code.as_str(), code.to_string().as_str()), (text, text));
        assert_eq!(serde_json::to_value(code).unwrap(), json!(text));
        assert_eq!(serde_json::from_value::<OutcomeCode>(json!(text)).unwrap(), code);
    }
    for (reason, text) in [
        (EndReason::Finished, "finished"),
        (EndReason::Failed, "failed"),
        (EndReason::Cancelled, "cancelled"),
        (EndReason::DeadlinePassed, "deadline_passed"),
        (EndReason::Dropped, "dropped"),
        (EndReason::Panicked, "panicked"),
        (EndReason::ParentEnded, "parent_ended"),
        (EndReason::ShutDown, "shut_down"),
    ] {
        assert_eq!(serde_json::to_value(reason).unwrap(), json!(text));
        assert_eq!(serde_json::from_value::<EndReason>(json!(text)).unwrap(), reason);
    }
}

// ===== descriptors =====

fn whole_descriptor() -> ToolDescriptor {
    let mut descriptor = ToolDescriptor::new(name("dev:files/read_file"))
        .description("Reads a file")
        .input_schema(json!({"type": "object", "required": ["path"]}))
        .output_schema(json!({"type": "string"}))
        .capability(ToolCapability::read_only().idempotent())
        .source(SourceKind::Mcp)
        .resource(ResourceSlot::required("repository", "git"))
        .check_formats()
        .call_timeout(Duration::from_millis(2_500))
        .max_concurrent(4);
    descriptor.tool_type = ToolType::Validation;
    descriptor
}

#[test]
fn the_json_of_a_descriptor() {
    assert_json_snapshot!(whole_descriptor(), @r#"
    {
      "name": "dev:files/read_file",
      "description": "Reads a file",
      "input_schema": {
        "required": [
          "path"
        ],
        "type": "object"
      },
      "output_schema": {
        "type": "string"
      },
      "capability": {
        "read_only": true,
        "writes": false,
        "checkpointable": false,
        "idempotent": true,
        "unsafe": false,
        "human_approval_required": false
      },
      "tool_type": "validation",
      "source": "mcp",
      "resources": [
        {
          "name": "repository",
          "resource_type": "git",
          "required": true
        }
      ],
      "check_formats": true,
      "call_timeout_ms": 2500,
      "max_concurrent": 4
    }
    "#);
    assert_json_snapshot!(ToolDescriptor::new(name("now")), @r#"
    {
      "name": "local/now",
      "description": "",
      "capability": {
        "read_only": false,
        "writes": false,
        "checkpointable": false,
        "idempotent": false,
        "unsafe": false,
        "human_approval_required": false
      },
      "tool_type": "tool",
      "source": "custom"
    }
    "#);
}

#[test]
fn a_descriptor_is_read_back_and_an_older_one_too() {
    for descriptor in [whole_descriptor(), ToolDescriptor::new(name("now"))] {
        let json = serde_json::to_string(&descriptor).unwrap();
        assert_eq!(serde_json::from_str::<ToolDescriptor>(&json).unwrap(), descriptor);
    }
    let read = |value: Value| serde_json::from_value::<ToolDescriptor>(value);
    let least = read(json!({"name": "now", "description": "Tells the time"})).unwrap();
    assert_eq!(least, ToolDescriptor::new(name("now")).description("Tells the time"));
    assert_eq!(least.capability, ToolCapability::default());
    let some = json!({
        "name": "a/b",
        "description": "",
        "capability": {"writes": true},
        "call_timeout_ms": 1500,
        "something_of_tomorrow": true,
    });
    let some = read(some).unwrap();
    assert_eq!(some.call_timeout, Some(Duration::from_millis(1500)));
    assert_eq!(some.capability, ToolCapability::writes());
    assert!(read(json!({"name": "a/b/c", "description": ""})).is_err());
    assert!(read(json!({"name": "a/b", "description": "", "call_timeout_ms": -1})).is_err());
}

#[test]
fn the_json_of_a_capability() {
    let all = ToolCapability::writes()
        .checkpointable()
        .idempotent()
        .is_unsafe()
        .human_approval_required();
    assert_json_snapshot!([all, ToolCapability::read_only()], @r#"
    [
      {
        "read_only": false,
        "writes": true,
        "checkpointable": true,
        "idempotent": true,
        "unsafe": true,
        "human_approval_required": true
      },
      {
        "read_only": true,
        "writes": false,
        "checkpointable": false,
        "idempotent": false,
        "unsafe": false,
        "human_approval_required": false
      }
    ]
    "#);
    for capability in [all, ToolCapability::read_only(), ToolCapability::default()] {
        let json = serde_json::to_value(capability).unwrap();
        assert_eq!(serde_json::from_value::<ToolCapability>(json).unwrap(), capability);
    }
    let least = serde_json::from_value::<ToolCapability>(json!({})).unwrap();
    assert_eq!(least, ToolCapability::default());
}

#[test]
fn the_json_of_the_changes_of_a_registry() {
    let registry = toolscope::ToolRegistry::default();
    let old = vec![described("a/gone", ""), described("a/other", "old")];
    registry.replace_source("s", old).unwrap();
    let new = vec![described("a/other", "new"), described("a/new", "")];
    let changes = registry.replace_source("s", new).unwrap();
    assert_json_snapshot!([changes, toolscope::ToolChanges::default()], @r#"
    [
      {
        "added": [
          "a/new"
        ],
        "removed": [
          "a/gone"
        ],
        "changed": [
          "a/other"
        ]
      },
      {
        "added": [],
        "removed": [],
        "changed": []
      }
    ]
    "#);
}

// ===== traces and reports =====

fn moment() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000, 250_000_000)
}

#[tokio::test(start_paused = true)]
async fn the_json_of_traces() {
    let bad = Probe::new("bad").on_execute(Step::Err);
    let fixture = Fixture::paused(&[&bad]).await;
    let nests = ToolSpec::new("nests").handler(async |ctx, _: Value| {
        let result = ctx.execute_nested("bad", &json!({})).await?;
        Ok(result.success)
    });
    fixture.registry().register(nests).unwrap();
    let plan = fixture.plan();
    assert!(plan.execute("nests", json!({})).await.unwrap().success);
    assert!(plan.execute("nobody", json!({})).await.is_err());
    let mut traces = plan.traces();
    for trace in &mut traces {
        let (started, ended) = (trace.started_at(), trace.ended_at());
        assert!(started.ends_with('Z') && ended.ends_with('Z'), "{started} {ended}");
        (trace.started, trace.duration) = (moment(), Duration::from_micros(1_500));
    }
    assert_json_snapshot!(traces, @r#"
    [
      {
        "plan_id": 1,
        "call_id": 2,
        "parent_call_id": 1,
        "tool": "local/bad",
        "started_at": "2001-09-09T01:46:40.25Z",
        "ended_at": "2001-09-09T01:46:40.2515Z",
        "duration_ms": 1.5,
        "success": false,
        "outcome": "execution",
        "result_size_bytes": 0,
        "cancelled": false,
        "output_valid": null,
        "error": "the probe fails in execute"
      },
      {
        "plan_id": 1,
        "call_id": 1,
        "parent_call_id": null,
        "tool": "local/nests",
        "started_at": "2001-09-09T01:46:40.25Z",
        "ended_at": "2001-09-09T01:46:40.2515Z",
        "duration_ms": 1.5,
        "success": true,
        "outcome": "ok",
        "result_size_bytes": 5,
        "cancelled": false,
        "output_valid": true,
        "error": null
      },
      {
        "plan_id": 1,
        "call_id": 3,
        "parent_call_id": null,
        "tool": "nobody",
        "started_at": "2001-09-09T01:46:40.25Z",
        "ended_at": "2001-09-09T01:46:40.2515Z",
        "duration_ms": 1.5,
        "success": false,
        "outcome": "not_found",
        "result_size_bytes": 0,
        "cancelled": false,
        "output_valid": null,
        "error": "there is no tool `nobody`; did you mean `local/bad`?"
      }
    ]
    "#);
    plan.finish().await;
    fixture.end().await;
}

/// Hides what is different each time, after a look at its form.
fn timeless(value: impl Serialize) -> Value {
    fn hide(value: &mut Value) {
        match value {
            Value::Array(items) => items.iter_mut().for_each(hide),
            Value::Object(fields) => {
                for (key, field) in fields {
                    match key.as_str() {
                        "started_at" | "ended_at" => {
                            let text = field.as_str().unwrap();
                            assert_eq!((&text[4..5], &text[10..11]), ("-", "T"), "{text}");
                            assert!(text.ends_with('Z'), "{text}");
                            *field = json!("[time]");
                        }
                        "duration_ms" | "took_ms" => {
                            assert!(field.as_f64().is_some_and(|it| it >= 0.0), "{field}");
                            *field = json!("[ms]");
                        }
                        _ => hide(field),
                    }
                }
            }
            _ => {}
        }
    }
    let mut value = serde_json::to_value(value).unwrap();
    hide(&mut value);
    value
}

#[tokio::test(start_paused = true)]
async fn the_json_of_a_report() {
    let (good, bad) = (Probe::new("good"), Probe::new("bad").on_deactivate(Step::Err));
    let fixture = Fixture::paused(&[&good, &bad]).await;
    let writes = ToolSpec::new("writes").writes().handler(async |ctx, _: Value| {
        ctx.record_change(Change::new(ChangeKind::Modified, "src/main.rs").summary("3 lines"));
        ctx.record_change(Change::new(ChangeKind::Deleted, "old.rs"));
        Ok(())
    });
    fixture.registry().register(writes).unwrap();
    let plan = fixture.begin(PlanOptions::new().trace_cap(2)).unwrap();
    for tool in ["good", "bad", "writes"] {
        assert!(plan.execute(tool, json!({})).await.unwrap().success);
    }
    let report = plan.fail().await;
    let mut json = timeless(&report);
    let deactivations = json["deactivations"].as_array_mut().unwrap();
    deactivations.sort_by_key(|record| record["name"].as_str().unwrap().to_owned());
    assert_json_snapshot!(json, @r#"
    {
      "changes": [
        {
          "call_id": 3,
          "kind": "modified",
          "summary": "3 lines",
          "target": "src/main.rs",
          "tool": "local/writes"
        },
        {
          "call_id": 3,
          "kind": "deleted",
          "target": "old.rs",
          "tool": "local/writes"
        }
      ],
      "deactivations": [
        {
          "generation": 1,
          "name": "local/bad",
          "outcome": {
            "failed": "the probe fails in deactivate"
          },
          "overrun": false,
          "took_ms": "[ms]"
        },
        {
          "generation": 1,
          "name": "local/good",
          "outcome": "ok",
          "overrun": false,
          "took_ms": "[ms]"
        }
      ],
      "dropped_traces": 1,
      "overrun": 0,
      "plan_id": 1,
      "reason": "failed",
      "traces": [
        {
          "call_id": 2,
          "cancelled": false,
          "duration_ms": "[ms]",
          "ended_at": "[time]",
          "error": null,
          "outcome": "ok",
          "output_valid": null,
          "parent_call_id": null,
          "plan_id": 1,
          "result_size_bytes": 11,
          "started_at": "[time]",
          "success": true,
          "tool": "local/bad"
        },
        {
          "call_id": 3,
          "cancelled": false,
          "duration_ms": "[ms]",
          "ended_at": "[time]",
          "error": null,
          "outcome": "ok",
          "output_valid": true,
          "parent_call_id": null,
          "plan_id": 1,
          "result_size_bytes": 4,
          "started_at": "[time]",
          "success": true,
          "tool": "local/writes"
        }
      ],
      "unsettled": []
    }
    "#);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_json_of_each_outcome_of_a_deactivation() {
    quiet_probes();
    let mut told = Vec::new();
    for step in [Step::Ok, Step::Err, Step::Panic, Step::Never] {
        let probe = Probe::new("tool").on_deactivate(step);
        let fixture = Fixture::paused(&[&probe]).await;
        let plan = fixture.plan();
        plan.activate("tool").await.unwrap();
        let mut record = plan.finish().await.deactivations().remove(0);
        record.took = Duration::from_micros(1_500);
        told.push(record);
        fixture.end().await;
    }
    assert_json_snapshot!(told, @r#"
    [
      {
        "name": "local/tool",
        "generation": 1,
        "outcome": "ok",
        "overrun": false,
        "took_ms": 1.5
      },
      {
        "name": "local/tool",
        "generation": 1,
        "outcome": {
          "failed": "the probe fails in deactivate"
        },
        "overrun": false,
        "took_ms": 1.5
      },
      {
        "name": "local/tool",
        "generation": 1,
        "outcome": {
          "panicked": "the probe panics in deactivate"
        },
        "overrun": false,
        "took_ms": 1.5
      },
      {
        "name": "local/tool",
        "generation": 1,
        "outcome": "timed_out",
        "overrun": false,
        "took_ms": 1.5
      }
    ]
    "#);
}

#[test]
fn the_json_of_a_change() {
    let changes = [
        Change::new(ChangeKind::Created, "a"),
        Change::new(ChangeKind::Modified, "b").summary("3 lines"),
        Change::new(ChangeKind::Deleted, "c"),
        Change::new(ChangeKind::Other, "mail to d"),
    ];
    assert_json_snapshot!(changes, @r#"
    [
      {
        "kind": "created",
        "target": "a"
      },
      {
        "kind": "modified",
        "target": "b",
        "summary": "3 lines"
      },
      {
        "kind": "deleted",
        "target": "c"
      },
      {
        "kind": "other",
        "target": "mail to d"
      }
    ]
    "#);
    for change in changes {
        let json = serde_json::to_value(&change).unwrap();
        assert_eq!(serde_json::from_value::<Change>(json).unwrap(), change);
    }
}

// ===== approvals =====

#[derive(Clone, Default)]
struct Notes(Arc<Mutex<Vec<ApprovalRequest>>>);

#[async_trait]
impl Approver for Notes {
    async fn decide(&self, request: &ApprovalRequest) -> Result<Decision, ToolFailure> {
        self.0.lock().unwrap().push(request.clone());
        Ok(Decision::Once)
    }
}

/// The fingerprint too: it is the same in every process, and in every version.
#[tokio::test(start_paused = true)]
async fn the_json_of_a_request_for_an_approval() {
    let capability = ToolCapability::writes().human_approval_required();
    let pay = Probe::new("bank/pay").capability(capability);
    let fixture = Fixture::with(paused(), &[]).await.track(&pay);
    fixture.registry().register_arc(edition(&pay, 1)).unwrap();
    let notes = Notes::default();
    let options = PlanOptions::new().metadata("user", "ada").approver(notes.clone());
    let plan = fixture.begin(options).unwrap();
    let input = json!({"to": "bob", "amount": 7});
    assert!(plan.execute("bank/pay", input).await.unwrap().success);
    let asked = notes.0.lock().unwrap().remove(0);
    assert_json_snapshot!(asked, @r#"
    {
      "plan_id": 1,
      "call_id": 1,
      "tool": "bank/pay",
      "description": "edition 1",
      "capability": {
        "read_only": false,
        "writes": true,
        "checkpointable": false,
        "idempotent": false,
        "unsafe": false,
        "human_approval_required": true
      },
      "reason": "it declares `human_approval_required`",
      "input": {
        "amount": 7,
        "to": "bob"
      },
      "fingerprint": "a33fd067083b4ae8e24a06118013ff4ade24ada419eda1c65f6b75c9fbe47b19",
      "metadata": {
        "user": "ada"
      }
    }
    "#);
    plan.finish().await;
    fixture.end().await;
}

// ===== events =====

/// All events of a plan in which everything happens that can be told.
async fn everything() -> Vec<ToolEvent> {
    quiet_probes();
    let tool = Probe::new("tool").on_activate([Step::Err, Step::Ok]).max_concurrent(1);
    let tool = tool.on_execute(Step::Yield(1));
    let fixture = Fixture::paused(&[&tool]).await;
    let progress = ToolSpec::new("far").handler(async |ctx, _: Value| {
        ctx.progress(Progress::new(3.0).of(10.0).message("page 3 of 10"));
        Ok(())
    });
    fixture.registry().register(progress).unwrap();
    let options = PlanOptions::new().ask(ToolFilter::from(name("far"))).max_concurrent(2);
    let plan = fixture.begin(options.approver(Notes::default())).unwrap();
    let mut stream = plan.subscribe();
    assert!(plan.execute("tool", json!({})).await.is_err());
    let calls = (0..3).map(|_| plan.execute("tool", json!({})));
    let called = futures_util::future::join_all(calls).await;
    assert!(called.into_iter().all(|called| called.is_ok()));
    assert!(plan.execute("far", json!({})).await.unwrap().success);
    assert!(plan.execute("nobody", json!({})).await.is_err());
    plan.finish().await;
    let mut events = Vec::new();
    while let Some(event) = stream.next().await {
        events.push(event);
    }
    fixture.end().await;
    let lost = lost().await;
    // Told by a keeper of threads that are blocked for a second: here by hand.
    let mut blocked = lost.clone();
    blocked.kind = EventKind::KeeperBlocked;
    events.extend([lost, blocked]);
    events
}

/// What a subscriber is told that is too slow.
async fn lost() -> ToolEvent {
    let busy = ToolSpec::new("busy").handler(async |ctx, _: Value| {
        for done in 0..300 {
            ctx.progress(Progress::new(f64::from(done)));
        }
        Ok(())
    });
    let fixture = Fixture::with(paused().tool(busy), &[]).await;
    let plan = fixture.plan();
    let mut stream = plan.subscribe();
    assert!(plan.execute("busy", json!({})).await.unwrap().success);
    let event = stream.next().await.unwrap();
    plan.finish().await;
    fixture.end().await;
    event
}

/// One event of each kind, those that are about a call or the others.
async fn told_of(calls: bool) -> Vec<Value> {
    let mut seen = HashSet::new();
    let events = everything().await.into_iter().filter(|event| event.call_id.is_some() == calls);
    let events = events.map(timeless);
    events.filter(|it| seen.insert((it["event"].to_string(), it["on"].to_string()))).collect()
}

#[tokio::test(start_paused = true)]
async fn the_json_of_each_event_of_a_call() {
    assert_json_snapshot!(told_of(true).await, @r#"
    [
      {
        "call_id": 1,
        "event": "finished",
        "name": "local/tool",
        "plan_id": 1,
        "trace": {
          "call_id": 1,
          "cancelled": false,
          "duration_ms": "[ms]",
          "ended_at": "[time]",
          "error": "activation of `local/tool` failed: the probe fails in activate",
          "outcome": "activation",
          "output_valid": null,
          "parent_call_id": null,
          "plan_id": 1,
          "result_size_bytes": 0,
          "started_at": "[time]",
          "success": false,
          "tool": "local/tool"
        }
      },
      {
        "call_id": 2,
        "event": "executing",
        "name": "local/tool",
        "plan_id": 1
      },
      {
        "call_id": 3,
        "event": "waiting",
        "name": "local/tool",
        "on": "tool_permit",
        "plan_id": 1
      },
      {
        "call_id": 4,
        "event": "waiting",
        "name": "local/tool",
        "on": "plan_permit",
        "plan_id": 1
      },
      {
        "call_id": 5,
        "event": "waiting",
        "name": "local/far",
        "on": "approval",
        "plan_id": 1
      },
      {
        "call_id": 5,
        "done": 3.0,
        "event": "progress",
        "message": "page 3 of 10",
        "name": "local/far",
        "plan_id": 1,
        "total": 10.0
      }
    ]
    "#);
}

#[tokio::test(start_paused = true)]
async fn the_json_of_each_event_of_an_instance_and_of_a_plan() {
    assert_json_snapshot!(told_of(false).await, @r#"
    [
      {
        "attempt": 1,
        "event": "activating",
        "generation": 1,
        "name": "local/tool",
        "plan_id": 1
      },
      {
        "error": "activation of `local/tool` failed: the probe fails in activate",
        "event": "activation_failed",
        "name": "local/tool",
        "plan_id": 1
      },
      {
        "event": "active",
        "generation": 1,
        "name": "local/tool",
        "plan_id": 1
      },
      {
        "deactivation": {
          "generation": 1,
          "name": "local/tool",
          "outcome": "ok",
          "overrun": false,
          "took_ms": "[ms]"
        },
        "event": "deactivated",
        "name": "local/tool",
        "plan_id": 1
      },
      {
        "event": "ended",
        "plan_id": 1,
        "reason": "finished"
      },
      {
        "count": 46,
        "event": "lost",
        "plan_id": 1
      },
      {
        "event": "keeper_blocked",
        "plan_id": 1
      }
    ]
    "#);
}

/// JSON in which no key of an object stands twice.
struct Unique;

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for Unique {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self, A::Error> {
        while items.next_element::<Self>()?.is_some() {}
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Self, A::Error> {
        let mut keys = HashSet::new();
        while let Some((key, Self)) = fields.next_entry::<String, Self>()? {
            if !keys.insert(key.clone()) {
                return Err(serde::de::Error::custom(format!("`{key}` stands twice")));
            }
        }
        Ok(self)
    }
}

#[track_caller]
fn assert_unique(value: &impl Serialize) {
    let json = serde_json::to_string(value).unwrap();
    if let Err(error) = serde_json::from_str::<Unique>(&json) {
        panic!("{error}: {json}");
    }
}

/// A strict reader refuses such an object, a lax one takes either.
#[tokio::test(start_paused = true)]
async fn no_key_of_an_event_stands_twice() {
    for event in everything().await {
        assert_unique(&event);
    }
}

#[tokio::test(start_paused = true)]
async fn no_key_of_a_report_stands_twice() {
    let probe = Probe::new("tool");
    let fixture = Fixture::paused(&[&probe]).await;
    let changes = ToolSpec::new("changes").handler(async |ctx, _: Value| {
        ctx.record_change(Change::new(ChangeKind::Created, "a"));
        Ok(())
    });
    fixture.registry().register(changes).unwrap();
    let plan = fixture.plan();
    for tool in ["tool", "changes"] {
        assert!(plan.execute(tool, json!({})).await.unwrap().success);
    }
    plan.changes().iter().for_each(assert_unique);
    plan.traces().iter().for_each(assert_unique);
    assert_unique(&plan.finish().await);
    fixture.end().await;
}

#[test]
fn metadata_of_a_tool_is_kept_beside_what_the_runtime_says() {
    let output = ToolOutput::new(json!(1)).with_metadata("cost", 7);
    assert_eq!(output.metadata["cost"], json!(7));
    assert_eq!(ToolOutput::from(json!(1)), ToolOutput::new(json!(1)));
}
