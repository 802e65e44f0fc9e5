//! What tools, models and schemas do at their worst: outputs that are no JSON, values too large,
//! too deep or too wrong, secrets, names and texts out of bounds, panics in every corner.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};
use tokio::task::JoinSet;
use toolscope::test_util::{Probe, Step};
use toolscope::{
    ActivationContext, ApprovalRequest, Approver, Before, CallOptions, Decision, EndReason,
    EventKind, FailureKind, Layer, LayerCall, OutcomeCode, OutputCheck, PlanOptions, Provider,
    Schema, Tool, ToolCall, ToolCapability, ToolDescriptor, ToolFailure, ToolInstance, ToolOutput,
    ToolResult, ToolRuntime, ToolSpec, async_trait,
};

use crate::call::{relay, relayed};
use crate::hooks::{block_on, call};
use crate::rooms::Dressed;
use crate::support::{Fixture, paused};

const SECOND: Duration = Duration::from_secs(1);

/// One immediate tool called `tool` with these schemas, and what it gives.
async fn one_tool(
    input: Option<Value>,
    output: Option<Value>,
    gives: impl Fn(&Value) -> Result<ToolOutput, ToolFailure> + Send + Sync + 'static,
) -> (Fixture, Probe) {
    // The probe's own output is not looked at.
    let probe = Probe::new("tool").immediate();
    let mut tool = Dressed::new(&probe, |descriptor| descriptor);
    tool = tool.gives(move |_, input| gives(input));
    let tool = tool.dressed(|descriptor| {
        descriptor.input_schema = input;
        descriptor.output_schema = output;
    });
    (Fixture::with(paused().tool(tool), &[]).await.track(&probe), probe)
}

#[expect(clippy::unnecessary_wraps, reason = "it is what a tool gives")]
fn nothing(_: &Value) -> Result<ToolOutput, ToolFailure> {
    Ok(ToolOutput::new(Value::Null))
}

/// So many arrays in one another.
fn arrays(levels: usize) -> Value {
    (0..levels).fold(json!(1), |inner, _| Value::Array(vec![inner]))
}

/// So many objects in one another.
fn objects(levels: usize) -> Value {
    (0..levels).fold(json!(1), |inner, _| Value::Object(Map::from_iter([("a".to_owned(), inner)])))
}

/// Checks that the one call of a plan ended so, in the result and in the trace.
#[track_caller]
fn ended(plan: &toolscope::PlanHandle, result: &ToolResult, code: OutcomeCode) {
    let [trace] = plan.traces().try_into().unwrap();
    assert_eq!((result.code(), trace.outcome), (code.as_str(), code), "{result:?}");
    assert_eq!((result.success, result.error.is_none()), (trace.success(), trace.success()));
}

// ===== outputs that are no JSON =====

/// Panics when it is serialised.
struct Bomb;

impl Serialize for Bomb {
    fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        panic!("a panic in serialize")
    }
}

impl schemars::JsonSchema for Bomb {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Bomb".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!(true)
    }
}

/// Cannot be serialised.
struct Refuses;

impl Serialize for Refuses {
    fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom("not today"))
    }
}

#[tokio::test(start_paused = true)]
async fn p14_an_output_that_cannot_be_json_is_an_invalid_output() {
    type Gives = fn() -> Result<ToolOutput, ToolFailure>;
    let cases: [(Gives, &str); 7] = [
        (|| ToolOutput::json(f64::NAN), "NaN is no number in JSON"),
        (|| ToolOutput::json(f32::INFINITY), "inf is no number in JSON"),
        (|| ToolOutput::json([Some(1.0), Some(f64::NEG_INFINITY), None]), "-inf is no number"),
        (
            || ToolOutput::json(std::collections::BTreeMap::from([(vec![1], 2)])),
            "key must be a string",
        ),
        (|| ToolOutput::json(Refuses), "not today"),
        (|| ToolOutput::json(u128::MAX), "number out of range"),
        (|| ToolOutput::json(std::collections::BTreeMap::from([("a", Some(f64::NAN))])), "NaN"),
    ];
    for (gives, word) in cases {
        let (fixture, _) = one_tool(None, None, move |_| gives()).await;
        let plan = fixture.plan();
        let result = call(&plan, "tool").await.unwrap();
        ended(&plan, &result, OutcomeCode::InvalidOutput);
        let error = result.error.unwrap();
        assert!(
            error.starts_with("the output cannot be JSON: ") && error.contains(word),
            "{error}"
        );
        drop(plan);
        fixture.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn p14_null_is_an_output_and_no_nan() {
    let (fixture, _) = one_tool(None, None, |_| ToolOutput::json([None, Some(1.5)])).await;
    let plan = fixture.plan();
    let result = call(&plan, "tool").await.unwrap();
    assert_eq!((result.success, result.output), (true, json!([null, 1.5])));
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_panic_in_serialize_is_a_result() {
    let by_hand = one_tool(None, None, |_| ToolOutput::json(Bomb)).await;
    let typed = ToolSpec::new("tool").read_only().function(|(): ()| Ok(Bomb));
    let typed = Fixture::with(paused().tool(typed), &[]).await;
    for fixture in [by_hand.0, typed] {
        let plan = fixture.plan();
        let result = call(&plan, "tool").await.unwrap();
        ended(&plan, &result, OutcomeCode::Panic);
        assert_eq!(result.error.as_deref(), Some("the tool panicked: a panic in serialize"));
        drop(plan);
        fixture.end().await;
    }
}

/// An error whose drop panics.
#[derive(Debug)]
struct DropBomb;

impl std::fmt::Display for DropBomb {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("tick")
    }
}

impl std::error::Error for DropBomb {}

impl Drop for DropBomb {
    fn drop(&mut self) {
        assert!(std::thread::panicking(), "a panic in the drop of an error");
    }
}

#[tokio::test(start_paused = true)]
async fn p14_a_source_whose_drop_panics_is_contained_wherever_it_ends() {
    let (fixture, _) =
        one_tool(None, None, |_| Err(ToolFailure::failed("boom").with_source(DropBomb))).await;
    let plan = fixture.plan();
    let result = call(&plan, "tool").await.unwrap();
    ended(&plan, &result, OutcomeCode::Execution);
    drop(plan);
    fixture.end().await;

    // Of an activation: held by the slot, and by all who were told.
    let probe = Probe::new("tool");
    let hooked = crate::hooks::Hooked::new(&probe).before_activate(|_| {
        std::future::ready(Err(ToolFailure::failed("boom").with_source(DropBomb)))
    });
    let fixture = hooked.fixture(paused()).await;
    let plan = fixture.plan();
    let errors = [call(&plan, "tool").await, call(&plan, "tool").await].map(Result::unwrap_err);
    assert!(errors.iter().all(|error| error.code() == OutcomeCode::Activation));
    plan.finish().await;
    drop(errors);
    fixture.end().await;
}

// ===== arguments =====

#[tokio::test(start_paused = true)]
async fn p14_every_kind_of_json_but_an_object_is_no_input() {
    let kinds = [
        (Value::Null, "null"),
        (json!(true), "a boolean"),
        (json!(7), "a number"),
        (json!(-0.5), "a number"),
        (json!("{}"), "a string"),
        (json!([{}]), "an array"),
    ];
    for schema in [None, Some(json!(true))] {
        let (fixture, probe) = one_tool(schema, None, nothing).await;
        for (input, kind) in &kinds {
            let plan = fixture.plan();
            let result = plan.execute("tool", input).await.unwrap();
            ended(&plan, &result, OutcomeCode::InvalidInput);
            let said = format!("the input must be a JSON object, it is {kind}");
            assert_eq!(result.error, Some(said));
            let text = plan.execute_json("tool", input.to_string(), CallOptions::new()).await;
            assert_eq!(text.unwrap().error, result.error);
            drop(plan);
        }
        assert_eq!(probe.counts().executions, 0);
        fixture.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn p14_arguments_of_ten_megabytes_are_taken_and_not_shown() {
    let schema = json!({"properties": {"text": {"type": "string"}, "n": {"type": "integer"}}});
    let (fixture, _) = one_tool(Some(schema), None, nothing).await;
    let plan = fixture.plan();
    let text = "x".repeat(10_000_000);
    assert!(plan.execute("tool", json!({"text": text})).await.unwrap().success);
    let result = plan.execute("tool", json!({"n": text, "text": 1})).await.unwrap();
    assert_eq!(result.code(), "invalid_input");
    assert!(result.to_model_text().len() < 1000, "{} bytes", result.to_model_text().len());
    let trace = plan.traces().pop().unwrap();
    assert_eq!(trace.error, result.error);
    drop(plan);
    fixture.end().await;
}

/// An object of so many keys.
fn wide(keys: u32) -> Value {
    (0..keys).map(|key| (format!("key-{key}"), json!(key))).collect::<Map<_, _>>().into()
}

#[tokio::test(start_paused = true)]
async fn p14_an_object_of_100_000_keys_is_taken() {
    let schema = json!({"additionalProperties": {"type": "integer"}});
    let (fixture, _) = one_tool(Some(schema), None, nothing).await;
    let plan = fixture.plan();
    assert!(plan.execute("tool", wide(100_000)).await.unwrap().success);
    drop(plan);
    fixture.end().await;
}

/// What is told of one is little, and what it takes is no more than in proportion to it.
#[tokio::test(start_paused = true)]
async fn p14_an_object_of_100_000_keys_that_are_not_allowed_is_refused_in_a_few_words() {
    let schema = json!({"properties": {"path": {}}, "additionalProperties": false});
    let (fixture, probe) = one_tool(Some(schema), None, nothing).await;
    let plan = fixture.plan();
    let result = plan.execute("tool", wide(100_000)).await.unwrap();
    ended(&plan, &result, OutcomeCode::InvalidInput);
    assert!(result.error.unwrap().len() < 4000);
    assert_eq!(result.metadata["faults"].as_array().unwrap().len(), 10);
    assert_eq!(probe.counts().executions, 0);
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_an_input_with_10_000_faults_tells_ten_and_counts_the_others_to_1_000() {
    let schema = json!({"properties": {"items": {"items": {"type": "integer"}}}});
    let (fixture, _) = one_tool(Some(schema), None, nothing).await;
    let plan = fixture.plan();
    let result = plan.execute("tool", json!({"items": vec!["x"; 10_000]})).await.unwrap();
    ended(&plan, &result, OutcomeCode::InvalidInput);
    let error = result.error.unwrap();
    assert_eq!(error.lines().count(), 11, "{error}");
    assert!(error.ends_with("and at least 1000 more"), "{error}");
    let faults = result.metadata["faults"].as_array().unwrap();
    assert_eq!((faults.len(), &faults[9]["path"]), (10, &json!("/items/9")));
    drop(plan);
    fixture.end().await;
}

// ===== depth =====

#[tokio::test(start_paused = true)]
async fn p14_an_input_nested_1_000_deep_is_taken_with_and_without_a_schema() {
    let schemas = [
        None,
        Some(json!({"type": "object"})),
        Some(json!({"properties": {"deep": {"type": ["array", "object"]}}})),
        Some(json!({"additionalProperties": {"anyOf": [{"type": "array"}, {"type": "object"}]}})),
    ];
    for schema in schemas {
        let (fixture, probe) = one_tool(schema, None, nothing).await;
        let plan = fixture.plan();
        for deep in [arrays(1000), objects(1000)] {
            assert!(plan.execute("tool", json!({"deep": deep})).await.unwrap().success);
        }
        assert_eq!(probe.counts().executions, 2);
        drop(plan);
        fixture.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn p14_a_schema_that_refers_to_itself_bounds_how_deep_a_value_may_be() {
    let schema = json!({"$ref": "#/$defs/node", "$defs": {"node": {
        "type": ["object", "array", "integer"],
        "additionalProperties": {"$ref": "#/$defs/node"},
        "items": {"$ref": "#/$defs/node"}
    }}});
    let (fixture, probe) = one_tool(Some(schema), None, nothing).await;
    let plan = fixture.plan();
    assert!(plan.execute("tool", objects(50)).await.unwrap().success);
    for deep in [objects(1000), json!({"deep": arrays(1000)})] {
        let result = plan.execute("tool", deep).await.unwrap();
        assert_eq!(result.code(), "invalid_input");
        assert!(result.error.unwrap().contains("nested at most"));
    }
    assert_eq!(probe.counts().executions, 1);
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_text_nested_deeper_than_the_parser_goes_is_no_json() {
    let (fixture, probe) = one_tool(None, None, nothing).await;
    let plan = fixture.plan();
    let text = format!("{{\"deep\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    let result = plan.execute_json("tool", text, CallOptions::new()).await.unwrap();
    ended(&plan, &result, OutcomeCode::InvalidInput);
    assert!(result.error.unwrap().contains("recursion limit"));
    assert_eq!(probe.counts().executions, 0);
    drop(plan);
    fixture.end().await;
}

/// Approves whatever it is asked.
struct Nods;

#[async_trait]
impl Approver for Nods {
    async fn decide(&self, request: &ApprovalRequest) -> Result<Decision, ToolFailure> {
        assert_eq!(request.fingerprint.len(), 64);
        Ok(Decision::Once)
    }
}

#[tokio::test(start_paused = true)]
async fn p14_an_input_nested_1_000_deep_can_be_approved() {
    let probe = Probe::new("tool").immediate();
    let tool = Dressed::new(&probe, |descriptor| {
        descriptor.capability(ToolCapability::writes().human_approval_required())
    });
    let tool = tool.gives(|_, input| nothing(input));
    let fixture = Fixture::with(paused().approver(Nods).tool(tool), &[]).await.track(&probe);
    let plan = fixture.plan();
    assert!(plan.execute("tool", json!({"deep": arrays(1000)})).await.unwrap().success);
    drop(plan);
    fixture.end().await;
}

/// Whether this is the process that is to run the test; else runs the test in one, and checks it.
/// An overflow of the stack cannot be caught, and would end every other test too.
#[track_caller]
fn in_a_process_of_its_own(test: &str) -> bool {
    const MARK: &str = "TOOLSCOPE_TEST_OF_ITS_OWN";
    if std::env::var_os(MARK).is_some() {
        return true;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    let command = command.args(["--exact", &format!("hostile::{test}"), "--nocapture"]);
    let output = command.env(MARK, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let cried = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{said}\n{cried}", output.status);
    assert!(said.contains("1 passed"), "{said}");
    false
}

/// Has a tool give that output, on a thread with the stack that Tokio's have, and shows the result.
fn deep_output(
    make: impl Fn() -> Value + Send + Sync + 'static,
    options: PlanOptions,
) -> ToolResult {
    let work = async move {
        let (fixture, _) = one_tool(None, Some(json!({"type": ["array", "object"]})), move |_| {
            Ok(ToolOutput::new(make()))
        })
        .await;
        let plan = fixture.begin(options).unwrap();
        let result = call(&plan, "tool").await.unwrap();
        let [trace] = plan.traces().try_into().unwrap();
        assert_eq!(result.code(), trace.outcome.as_str());
        drop(plan);
        fixture.end().await;
        result
    };
    let thread = std::thread::Builder::new().stack_size(2 * 1024 * 1024);
    let runs = move || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_all().start_paused(true).build().unwrap().block_on(work)
    };
    thread.spawn(runs).unwrap().join().unwrap()
}

#[test]
fn p14_an_output_nested_100_deep_is_whole() {
    for make in [|| arrays(100), || objects(100)] {
        let result = deep_output(make, PlanOptions::new());
        assert!(result.success && result.metadata.is_empty(), "{:?}", result.metadata);
        assert_eq!(result.output, make());
    }
}

#[test]
fn p14_an_output_nested_1_000_deep_overflows_no_stack() {
    if in_a_process_of_its_own("p14_an_output_nested_1_000_deep_overflows_no_stack") {
        nested_outputs_are_invalid(1000);
    }
}

/// No parser would read it. It is taken apart piece by piece: to drop it whole recurses.
#[test]
fn p14_an_output_nested_10_000_deep_overflows_no_stack() {
    if in_a_process_of_its_own("p14_an_output_nested_10_000_deep_overflows_no_stack") {
        nested_outputs_are_invalid(10_000);
    }
}

#[track_caller]
fn nested_outputs_are_invalid(levels: usize) {
    for make in [arrays, objects] {
        for options in [PlanOptions::new(), PlanOptions::new().max_output_bytes(100)] {
            let result = deep_output(move || make(levels), options);
            assert_eq!(result.code(), "invalid_output");
        }
    }
}

/// A layer that copies what it sees.
struct Copies;

#[async_trait]
impl Layer for Copies {
    async fn after(
        &self,
        _: &LayerCall<'_>,
        given: Result<ToolOutput, ToolFailure>,
    ) -> Result<ToolOutput, ToolFailure> {
        if let Ok(output) = &given {
            drop(output.clone());
        }
        given
    }
}

#[test]
fn p14_an_output_nested_100_000_deep_meets_no_layer() {
    if !in_a_process_of_its_own("p14_an_output_nested_100_000_deep_meets_no_layer") {
        return;
    }
    let mut tokio = tokio::runtime::Builder::new_current_thread();
    tokio.enable_all().start_paused(true).build().unwrap().block_on(async {
        let probe = Probe::new("tool").immediate();
        let tool = Dressed::new(&probe, |descriptor| descriptor);
        let tool = tool.gives(|_, input| {
            let deep = arrays(100_000);
            Ok(if input["metadata"] == true {
                ToolOutput::new(json!(1)).with_metadata("deep", deep)
            } else {
                ToolOutput::new(deep)
            })
        });
        let fixture = Fixture::with(paused().layer(Copies).tool(tool), &[]).await.track(&probe);
        let plan = fixture.plan();
        for metadata in [false, true] {
            let result = plan.execute("tool", json!({"metadata": metadata})).await.unwrap();
            assert_eq!(result.code(), "invalid_output");
        }
        drop(plan);
        fixture.end().await;
    });
}

// ===== schemas that hide what they ask for =====

/// Has a tool take such inputs, and calls it with a value that no schema here lets overflow.
fn hides(schema: &Value, value: &Value) {
    on_a_small_stack(|| match Schema::new(schema) {
        Ok(taken) => assert_eq!(taken.is_valid(value), taken.check(value).is_ok()),
        Err(refused) => assert!(schema.pointer(refused.place()).is_some(), "{refused}"),
    });
}

/// Runs on a stack of the size that Tokio's workers have.
fn on_a_small_stack<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(2 * 1024 * 1024);
        thread.spawn_scoped(scope, work).unwrap().join().unwrap()
    })
}

/// What leads back to itself, at the same value.
fn circle(reference: &str) -> Value {
    json!([{"$ref": reference}, {"type": "string"}])
}

/// Definitions that each refer to the next one, and the last one to the first for each item.
fn chain(length: usize, at: &str) -> Map<String, Value> {
    let link = |index| (format!("d{index}"), json!({"$ref": format!("{at}/d{}", index + 1)}));
    let last = (format!("d{length}"), json!({"items": {"$ref": format!("{at}/d0")}}));
    (0..length).map(link).chain([last]).collect()
}

#[test]
fn p14_a_circle_below_a_name_that_looks_like_data_overflows_no_stack() {
    if !in_a_process_of_its_own("p14_a_circle_below_a_name_that_looks_like_data_overflows_no_stack")
    {
        return;
    }
    for name in ["default", "const", "enum", "examples"] {
        for map in ["properties", "$defs", "patternProperties", "dependentSchemas", "definitions"] {
            let at = format!("#/{map}/{name}");
            let schema = json!({
                map: {name: {"allOf": circle(&at)}},
                "properties": {name: {"$ref": at}},
            });
            hides(&schema, &json!({name: 1}));
            let below = format!("{at}/properties/b");
            let schema = json!({
                map: {name: {"properties": {"b": {"allOf": circle(&below)}}}},
                "$ref": at,
            });
            hides(&schema, &json!({"b": 1, name: {"b": 1}}));
            let at = format!("#/{name}/properties/b");
            let schema = json!({
                "properties": {"a": {"$ref": format!("#/{name}")}},
                name: {"properties": {"b": {"allOf": circle(&at)}}},
            });
            hides(&schema, &json!({"a": {"b": 1}}));
        }
    }
    let schema = json!({
        "properties": {"a": {"$ref": "#/x-own/0/b"}},
        "x-own": [{"b": {"allOf": circle("#/x-own/0/b")}}],
    });
    hides(&schema, &json!({"a": 1}));
}

#[test]
fn p14_a_long_chain_below_a_name_that_looks_like_data_overflows_no_stack() {
    if in_a_process_of_its_own(
        "p14_a_long_chain_below_a_name_that_looks_like_data_overflows_no_stack",
    ) {
        for length in [60, 2_000] {
            let at = "#/properties/default/properties";
            let schema = json!({"properties": {"default": {"properties": chain(length, at)}}});
            hides(&schema, &json!({"default": {"d0": arrays(120)}}));
        }
    }
}

#[test]
fn p14_a_circle_by_an_odd_name_overflows_no_stack() {
    if !in_a_process_of_its_own("p14_a_circle_by_an_odd_name_overflows_no_stack") {
        return;
    }
    let [draft_4, draft_7] =
        ["04", "07"].map(|it| format!("http://json-schema.org/draft-{it}/schema#"));
    let refers = json!({"p": {"$ref": "#/$defs/a"}});
    let refers_4 = json!({"p": {"$ref": "#/definitions/a"}});
    let by_id = json!({"id": "http://e/x", "allOf": circle("#/$defs/a")});
    let by_dollar_id = json!({"$id": "http://e/x", "allOf": circle("#/definitions/a")});
    let beside = json!({"$id": "http://e/x", "$ref": "#/definitions/b"});
    let back = json!({"allOf": circle("#/definitions/a")});
    let of_draft_4 = json!({"$schema": draft_4, "id": "http://e/x#f", "allOf": circle("#f")});
    let named = "http://e/x#f";
    let absolute = json!({"id": named, "allOf": circle(named)});
    for schema in [
        json!({"$defs": {"a": by_id}, "properties": refers}),
        json!({"$schema": draft_4, "definitions": {"a": by_dollar_id}, "properties": refers_4}),
        json!({
            "$schema": draft_7,
            "definitions": {"a": beside, "b": back},
            "properties": refers_4,
        }),
        json!({
            "$schema": draft_4,
            "id": "http://x/r#",
            "definitions": {"a": absolute},
            "properties": {"p": {"$ref": named}},
        }),
        json!({"$defs": {"a": of_draft_4}, "properties": refers}),
        json!({"$id": "http://x/a?q", "allOf": circle("?q")}),
        json!({"$id": "http://x/", "allOf": circle("c/..")}),
        json!({"$id": "http://x/ab", "allOf": circle("a%62")}),
        json!({"$id": "http://x/ab", "allOf": circle("../ab#")}),
        json!({"$id": "http://example.com", "allOf": circle("http://example.com/")}),
        json!({"$id": "http://example.com/", "allOf": circle("HTTP://EXAMPLE.com")}),
        json!({"$id": "a/", "allOf": circle("json-schema:///a/")}),
        json!({"$anchor": "ab", "allOf": circle("#a%62")}),
        json!({"$dynamicAnchor": "ab", "allOf": circle("#ab")}),
        json!({"$defs": {"a%b": {"allOf": circle("#/$defs/a%25b")}}, "$ref": "#/$defs/a%25b"}),
        json!({"$ref": "b", "$defs": {"b": {"$id": "b", "allOf": circle("./b#")}}}),
    ] {
        hides(&schema, &json!({"p": 1}));
    }
    for (id, at) in [("http://x/a?q", "?q"), ("http://x/ab", "a%62"), ("http://x/", "c/..")] {
        let mut schema = json!({"$id": id, "$ref": "#/$defs/d0"});
        schema["$defs"] = chain(50, &format!("{at}#/$defs")).into();
        hides(&schema, &arrays(120));
    }
}

// ===== long arrays =====

fn items(count: u32, last: Value) -> Value {
    let item = |n: u32| json!({"id": n, "name": format!("item {n}"), "tags": ["a", "b"]});
    let items: Vec<_> = (1..count).map(item).chain([last]).collect();
    json!({"items": items})
}

/// By hand, and as a schema that is derived from a type has it.
fn items_schemas() -> [Value; 2] {
    let item = json!({
        "type": "object",
        "properties": {
            "id": {"type": "integer"},
            "name": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string"}}
        },
        "required": ["id", "name", "tags"]
    });
    let of = |item: Value| json!({"properties": {"items": {"type": "array", "items": item}}});
    let mut derived = of(json!({"$ref": "#/$defs/Item"}));
    derived["$defs"] = json!({"Item": item.clone()});
    [of(item), derived]
}

#[tokio::test(start_paused = true)]
async fn p14_an_array_of_5_000_items_is_checked_on_its_way_in_and_out() {
    for schema in items_schemas() {
        let echo = |input: &Value| Ok(ToolOutput::new(input.clone()));
        let (fixture, _) = one_tool(Some(schema.clone()), Some(schema), echo).await;
        let plan = fixture.plan();
        let good = json!({"id": 5000, "name": "last", "tags": []});
        let result = plan.execute("tool", items(5000, good)).await.unwrap();
        ended(&plan, &result, OutcomeCode::Ok);
        assert_eq!(plan.traces()[0].output_valid, Some(true));
        assert_eq!(result.output["items"].as_array().unwrap().len(), 5000);
        drop(plan);
        fixture.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn p14_the_last_of_5_000_items_is_named_when_it_is_wrong() {
    for (schema, how) in items_schemas().into_iter().zip(["in place", "by reference"]) {
        let bad = || json!({"id": "5000", "name": "last", "tags": []});
        let (fixture, _) = one_tool(Some(schema.clone()), None, nothing).await;
        let plan = fixture.plan();
        let result = plan.execute("tool", items(5000, bad())).await.unwrap();
        ended(&plan, &result, OutcomeCode::InvalidInput);
        let error = result.error.unwrap();
        assert!(error.starts_with("at /items/4999/id: expected an integer"), "{how}: {error}");
        drop(plan);
        fixture.end().await;

        let gives = move |_: &Value| Ok(ToolOutput::new(items(5000, bad())));
        let (fixture, _) = one_tool(None, Some(schema), gives).await;
        let plan = fixture.begin(PlanOptions::new().output_check(OutputCheck::Reject)).unwrap();
        let result = call(&plan, "tool").await.unwrap();
        ended(&plan, &result, OutcomeCode::InvalidOutput);
        assert_eq!(result.metadata["faults"][0]["path"], "/items/4999/id", "{how}");
        drop(plan);
        fixture.end().await;
    }
}

// ===== secrets =====

const SECRET: &str = "hunter2-S3cr3t";

/// Where that text stands in what a host can see of a plan.
fn shows_secret(all: &[String]) -> bool {
    all.iter().any(|text| text.contains(SECRET))
}

#[tokio::test(start_paused = true)]
async fn p14_a_secret_is_in_no_result_no_trace_and_no_event() {
    let secret = |schema: Value| json!({"properties": {"login": schema}});
    let cases = [
        // Of the wrong type, too long, of another shape; a name that is none.
        (secret(json!({"type": "integer", "writeOnly": true})), json!({"login": SECRET})),
        (
            secret(json!({"type": "string", "format": "password", "maxLength": 3})),
            json!({"login": SECRET}),
        ),
        (
            secret(json!({"type": "object", "writeOnly": true, "additionalProperties": false})),
            json!({"login": {SECRET: SECRET}}),
        ),
        (
            secret(json!({"writeOnly": true, "items": {"type": "integer"}})),
            json!({"login": [SECRET, SECRET]}),
        ),
        (secret(json!({"writeOnly": true, "enum": ["a", "b"]})), json!({"login": SECRET})),
        (secret(json!({"writeOnly": true, "pattern": "^[0-9]+$"})), json!({"login": SECRET})),
        (
            secret(json!({"anyOf": [
                {"type": "integer"},
                {"type": "object", "properties": {"pin": {"format": "password", "type": "integer"}}}
            ]})),
            json!({"login": {"pin": SECRET}}),
        ),
        (
            json!({
                "properties": {"login": {"$ref": "#/$defs/pin"}},
                "$defs": {"pin": {"type": "integer", "writeOnly": true}}
            }),
            json!({"login": SECRET}),
        ),
        (
            json!({"patternProperties": {"^pin": {"type": "integer", "writeOnly": true}}}),
            json!({"pin-1": SECRET}),
        ),
        (
            json!({"additionalProperties": {"type": "integer", "format": "password"}}),
            json!({"anything": SECRET}),
        ),
        // Misspelt.
        (
            json!({
                "properties": {"password": {"type": "string", "writeOnly": true}},
                "additionalProperties": {"type": "integer"}
            }),
            json!({"pasword": SECRET}),
        ),
    ];
    for (schema, input) in cases {
        let echo = {
            let input = input.clone();
            move |_: &Value| Ok(ToolOutput::new(input.clone()))
        };
        let (fixture, _) = one_tool(Some(schema.clone()), None, nothing).await;
        let plan = fixture.plan();
        let mut events = plan.subscribe();
        let result = plan.execute("tool", &input).await.unwrap();
        ended(&plan, &result, OutcomeCode::InvalidInput);
        let mut all = vec![
            format!("{result:?}"),
            serde_json::to_string(&result).unwrap(),
            result.to_model_text(),
            format!("{:?}", result.clone().into_result()),
            serde_json::to_string(&plan.traces()).unwrap(),
        ];
        let report = plan.finish().await;
        all.push(serde_json::to_string(&report).unwrap());
        while let Some(event) = events.next().await {
            all.push(format!("{event:?}"));
        }
        assert!(!shows_secret(&all), "{schema}: {all:#?}");
        fixture.end().await;

        // In an output it is shown where it stands, and in what is said about it nowhere.
        let (fixture, _) = one_tool(None, Some(schema.clone()), echo).await;
        for check in [OutputCheck::Warn, OutputCheck::Reject] {
            let plan = fixture.begin(PlanOptions::new().output_check(check)).unwrap();
            let mut result = call(&plan, "tool").await.unwrap();
            result.output = Value::Null;
            let all = [format!("{result:?}"), serde_json::to_string(&plan.traces()).unwrap()];
            assert!(!shows_secret(&all), "{check:?} {schema}: {all:#?}");
            drop(plan);
        }
        fixture.end().await;
    }
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Login {
    /// A whole number, as JSON Schema has it, is also `1234.0`; as Rust has it, it is not.
    #[schemars(extend("writeOnly" = true))]
    pin: u32,
}

#[tokio::test(start_paused = true)]
async fn p14_a_secret_that_does_not_fit_the_type_of_a_handler_is_not_told() {
    let tool = ToolSpec::new("tool").read_only().function(|login: Login| Ok(login.pin > 0));
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.plan();
    let result = plan.execute("tool", json!({"pin": 98765.0})).await.unwrap();
    let all = format!("{result:?} {:?}", plan.traces());
    assert!(!all.contains("98765"), "{all}");
    drop(plan);
    fixture.end().await;
}

// ===== patterns =====

#[tokio::test(start_paused = true)]
async fn p14_a_pattern_that_could_take_for_ever_comes_to_an_end_in_a_call() {
    let patterns = [r"^(a+)+$", r"^(a|a)*$", r"^(?=(a+))\1b$", r"(?<!b)^(a*)*$", r"^(.*a){25}$"];
    for pattern in patterns {
        let schema = json!({"properties": {"text": {"pattern": pattern}}});
        let (fixture, _) = one_tool(Some(schema.clone()), Some(schema), |input| {
            Ok(ToolOutput::new(input.clone()))
        })
        .await;
        let plan = fixture.plan();
        let text = "a".repeat(50_000) + "!";
        let result = plan.execute("tool", json!({"text": text})).await.unwrap();
        if result.code() == "invalid_input" {
            assert!(result.error.unwrap().len() < 1000);
        }
        assert_eq!(plan.traces().len(), 1);
        drop(plan);
        fixture.end().await;
    }
}

// ===== names, descriptions, metadata =====

#[tokio::test(start_paused = true)]
async fn p14_a_tool_name_of_255_bytes_is_called_by_each_of_its_texts() {
    let name = format!("server:space/{}", "n".repeat(242));
    assert_eq!(name.len(), 255);
    let probe = Probe::new(&name).immediate();
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let definitions = plan.definitions(Provider::Anthropic);
    let safe = definitions[0]["name"].as_str().unwrap().to_owned();
    assert_eq!(safe.len(), 64);
    for text in [&name, &safe] {
        assert!(plan.execute(text, json!({})).await.unwrap().success);
    }
    assert!(plan.traces().iter().all(|trace| trace.tool == name));
    let error = plan.execute(format!("{name}n"), json!({})).await.unwrap_err();
    assert_eq!(error.code(), OutcomeCode::NotFound);
    assert!(error.to_string().contains(&name), "it is the nearest: {error}");
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_description_of_a_megabyte_is_kept_and_costs_a_call_nothing() {
    let probe = Probe::new("tool").immediate();
    let text = "d".repeat(1 << 20);
    let tool = Dressed::new(&probe, |descriptor| descriptor.description(&text));
    let fixture = Fixture::with(paused().tool(tool), &[]).await.track(&probe);
    let plan = fixture.plan();
    let mut events = plan.subscribe();
    assert!(call(&plan, "tool").await.unwrap().success);
    let error = plan.execute("tol", json!({})).await.unwrap_err();
    assert!(error.to_string().len() < 200);
    assert_eq!(plan.tools().get("tool").unwrap().description.len(), 1 << 20);
    plan.finish().await;
    while let Some(event) = events.next().await {
        assert!(serde_json::to_string(&event).unwrap().len() < 1000);
    }
    fixture.end().await;
}

/// What stands in the metadata under the runtime's own words comes from the runtime.
#[tokio::test(start_paused = true)]
async fn p14_a_tool_cannot_speak_with_the_runtime_s_words_in_the_metadata() {
    let lies = |_: &Value| {
        let output = ToolOutput::new(json!({"n": "x"}));
        Ok(output
            .with_metadata("code", "timeout")
            .with_metadata("faults", json!(["none"]))
            .with_metadata("output_valid", true)
            .with_metadata("output_faults", json!([]))
            .with_metadata("truncated", json!({"from_bytes": 9, "to_bytes": 8}))
            .with_metadata("input_changed", true)
            .with_metadata("mine", 1))
    };
    let (fixture, _) = one_tool(None, None, lies).await;
    let plan = fixture.plan();
    let result = call(&plan, "tool").await.unwrap();
    ended(&plan, &result, OutcomeCode::Ok);
    assert_eq!(Value::from(result.metadata.clone()), json!({"mine": 1}));
    assert_eq!(result.to_model_text(), r#"{"n":"x"}"#, "nothing was cut");
    drop(plan);
    fixture.end().await;

    // Where the runtime has something to say, it says it.
    let schema = json!({"properties": {"n": {"type": "integer"}}});
    let (fixture, _) = one_tool(None, Some(schema), lies).await;
    let plan = fixture.begin(PlanOptions::new().max_output_bytes(4)).unwrap();
    let result = call(&plan, "tool").await.unwrap();
    assert_eq!(result.metadata["output_valid"], false);
    assert_eq!(result.metadata["output_faults"].as_array().unwrap().len(), 1);
    assert_eq!(result.metadata["truncated"], json!({"from_bytes": 9, "to_bytes": 2}));
    assert_eq!(plan.traces()[0].output_valid, Some(false));
    drop(plan);
    fixture.end().await;
}

// ===== nested calls =====

/// Continues and leaves everything as it is.
struct Idle;

#[async_trait]
impl Layer for Idle {}

/// With layers, an approver, permits and a subscriber on the way, on a thread of 2 MiB.
#[tokio::test(start_paused = true)]
async fn p14_a_tool_that_calls_itself_without_end_is_stopped_at_the_seventeenth_in_another() {
    let capability = ToolCapability::writes().human_approval_required();
    let tool = ToolSpec::new("again").capability(capability).max_concurrent(1).handler(
        async |ctx, args: Value| {
            let nested = ctx.execute_nested("again", &args).await?;
            Ok(nested.into_result()?)
        },
    );
    let builder = paused().layer(Idle).layer(Idle).approver(Nods).tool(tool);
    let fixture = Fixture::with(builder, &[]).await;
    let plan = fixture.begin(PlanOptions::new().max_concurrent(1).max_calls(100)).unwrap();
    let mut events = plan.subscribe();
    let result = call(&plan, "again").await.unwrap();
    assert_eq!((result.success, result.code()), (false, "limit_exceeded"));
    let traces = plan.traces();
    assert_eq!(traces.len(), 18, "one, sixteen in it, and one that is refused");
    assert!(traces.iter().all(|trace| trace.outcome == OutcomeCode::LimitExceeded));
    let parents: Vec<_> = traces.iter().map(|trace| trace.parent_call_id).collect();
    let expected: Vec<_> = (1..18).rev().map(Some).chain([None]).collect();
    assert_eq!(parents, expected, "the innermost ends first");
    plan.finish().await;
    let (mut executing, mut finished) = (0, 0);
    while let Some(event) = events.next().await {
        executing += u32::from(event.kind == EventKind::Executing);
        finished += u32::from(matches!(event.kind, EventKind::Finished(_)));
    }
    assert_eq!((executing, finished), (17, 18));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_two_tools_that_call_each_other_without_end_are_stopped() {
    let to = |other: &'static str| {
        async move |ctx: toolscope::ToolExecutionContext, args: Value| {
            let nested = ctx.execute_nested(other, &args).await?;
            Ok::<_, ToolFailure>(nested.into_result()?)
        }
    };
    let there = ToolSpec::new("ping").read_only().handler(to("pong"));
    let back = ToolSpec::new("pong").read_only().handler(to("ping"));
    let fixture = Fixture::with(paused().tool(there).tool(back), &[]).await;
    let plan = fixture.plan();
    let result = call(&plan, "ping").await.unwrap();
    assert_eq!(result.code(), "limit_exceeded");
    assert_eq!(plan.traces().len(), 18);
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_panic_in_a_nested_call_is_its_own_result() {
    let probe = Probe::new("probe").on_execute(Step::Panic);
    let fixture = Fixture::with(paused().tool(relay("relay")), &[&probe]).await;
    let plan = fixture.plan();
    let result = plan.execute("relay", relayed("probe")).await.unwrap();
    assert_eq!(result.code(), "panic", "the caller hands it on, with its code");
    let codes: Vec<_> = plan.traces().iter().map(|trace| trace.outcome).collect();
    assert_eq!(codes, [OutcomeCode::Panic, OutcomeCode::Panic]);
    drop(plan);
    fixture.end().await;
}

// ===== many threads and the end =====

/// From threads without any Tokio runtime: each call is either carried out and traced, or told that
/// the plan has ended.
#[test]
fn p8_calls_from_many_threads_beside_the_end_are_traced_or_refused() {
    for round in 0..30_u32 {
        let probe = Probe::new("tool");
        let immediate = Probe::new("plain").immediate();
        let fixture = block_on(Fixture::new(&[&probe, &immediate]));
        let plan = fixture.plan();
        let (handle, barrier) = (plan.handle(), Arc::new(Barrier::new(9)));
        let over = Arc::new(AtomicBool::new(false));
        let callers: Vec<_> = (0..8)
            .map(|caller| {
                let (handle, barrier) = (handle.clone(), Arc::clone(&barrier));
                let over = Arc::clone(&over);
                std::thread::spawn(move || {
                    barrier.wait();
                    let (mut made, mut refused) = (0, 0);
                    // Until it is over, and once more.
                    loop {
                        let last = over.load(SeqCst);
                        let tool = if caller % 2 == 0 { "tool" } else { "plain" };
                        match block_on(call(&handle, tool)) {
                            Ok(result) => {
                                assert!(result.success);
                                made += 1;
                            }
                            Err(error) => {
                                assert_eq!(error.code(), OutcomeCode::PlanEnded);
                                refused += 1;
                            }
                        }
                        if last {
                            return (made, refused);
                        }
                    }
                })
            })
            .collect();
        barrier.wait();
        for _ in 0..round * 20 {
            std::hint::spin_loop();
        }
        block_on(plan.finish());
        over.store(true, SeqCst);
        let counts: Vec<_> = callers.into_iter().map(|caller| caller.join().unwrap()).collect();
        let made: usize = counts.iter().map(|(made, _)| made).sum();
        let traces = handle.traces();
        let ok = traces.iter().filter(|trace| trace.success()).count();
        assert_eq!(ok, made);
        assert!(counts.iter().all(|(_, refused)| *refused > 0), "{counts:?}");
        // Only what was inside when the plan ended has a trace of its refusal.
        let cut = traces.iter().filter(|trace| !trace.success());
        assert!(cut.clone().all(|trace| trace.outcome == OutcomeCode::PlanEnded));
        let mut numbers: Vec<_> = traces.iter().map(|trace| trace.call_id).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), traces.len());
        assert_eq!(handle.end_reason(), Some(EndReason::Finished));
        block_on(fixture.end());
    }
}

/// A batch of everything at once: no call takes another with it.
#[tokio::test(start_paused = true)]
async fn p14_a_batch_of_the_worst_calls_gives_each_its_own_result() {
    let panics = Probe::new("panics").on_execute(Step::Panic);
    let broken = Probe::new("broken").on_activate(Step::Panic);
    let hangs = Probe::new("hangs").on_execute(Step::Never).call_timeout(SECOND);
    let good = Probe::new("good").capability(ToolCapability::read_only());
    let lost = ToolSpec::new("lost").read_only().function(|(): ()| {
        Err::<(), _>(ToolFailure::new(FailureKind::OutcomeUnknown, "no answer"))
    });
    let fixture = Fixture::with(paused().tool(lost), &[&panics, &broken, &hangs, &good]).await;
    let plan = fixture.plan();
    let names = ["good", "panics", "nobody", "broken", "good", "hangs", "lost", "good"];
    let calls = names.map(|name| ToolCall::new(name, json!({})));
    let results = plan.execute_batch(&calls).await;
    let codes: Vec<_> = results
        .iter()
        .map(|result| match result {
            Ok(result) => result.code().to_owned(),
            Err(error) => error.code().to_string(),
        })
        .collect();
    let expected =
        ["ok", "panic", "not_found", "activation", "ok", "timeout", "outcome_unknown", "ok"];
    assert_eq!(codes, expected);
    assert_eq!(plan.traces().len(), 8);
    drop(plan);
    fixture.end().await;
}

/// Of many plans at once, with tools that do their worst at every stage: nothing is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn p16_the_worst_tools_leave_the_ledger_balanced() {
    let steps = [Step::Panic, Step::YieldPanic(1), Step::Err, Step::YieldErr(1), Step::Ok];
    let stages: Vec<Step> = steps.iter().cycle().take(1000).cloned().collect();
    let probe = Probe::new("tool")
        .on_activate(stages.clone())
        .on_execute(stages.clone())
        .on_deactivate(stages)
        .panics_in_drop();
    let runtime = ToolRuntime::builder();
    let fixture = Arc::new(Fixture::with(runtime, &[&probe]).await);
    let mut plans = JoinSet::new();
    for _ in 0..200 {
        let fixture = Arc::clone(&fixture);
        plans.spawn(async move {
            let plan = fixture.plan();
            for _ in 0..5 {
                drop(call(&plan, "tool").await);
            }
            assert_eq!(plan.traces().len(), 5);
            plan.finish().await;
        });
    }
    while let Some(plan) = plans.join_next().await {
        plan.unwrap();
    }
    let fixture = Arc::into_inner(fixture).unwrap();
    assert!(fixture.end().await.activated > 0);
}

// ===== what is the host's stays with the host =====

/// A tool with a secret in the error of its activation, and one that calls it with `?`.
#[tokio::test(start_paused = true)]
async fn what_an_operator_is_told_of_a_nested_call_reaches_no_model() {
    let secret = "postgres://admin:hunter2@db refused";
    let outer = ToolSpec::new("outer").read_only().handler(async |ctx, _: Value| {
        Ok(ctx.execute_nested("db", &json!({})).await?.into_result()?)
    });
    let outer_task = ToolSpec::new("runner").read_only().handler(async |ctx, _: Value| {
        let child = ctx.begin_child(PlanOptions::new())?;
        child.activate("db").await?;
        Ok(())
    });
    let runtime = paused().tool(Broken(ToolDescriptor::new("db".parse().unwrap()), secret));
    let fixture = Fixture::with(runtime.tool(outer).tool(outer_task), &[]).await;
    let plan = fixture.plan();
    for tool in ["outer", "runner"] {
        let result = call(&plan, tool).await.unwrap();
        let told = "error (activation): the tool is not available now; try again later";
        assert_eq!(result.to_model_text(), told);
        let trace = plan.traces().pop().unwrap();
        assert!(!trace.error.unwrap().contains("hunter2"));
    }
    // The host itself is told.
    let error = call(&plan, "db").await.unwrap_err();
    assert!(error.to_string().contains(secret), "{error}");
    drop(plan);
    fixture.end().await;
}

/// Its activation fails with that text.
struct Broken(ToolDescriptor, &'static str);

#[async_trait]
impl Tool for Broken {
    fn descriptor(&self) -> &ToolDescriptor {
        &self.0
    }

    async fn activate(&self, _: &ActivationContext) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        Err(ToolFailure::failed(self.1))
    }
}

#[tokio::test(start_paused = true)]
async fn the_text_of_an_activation_that_failed_is_cut() {
    let text: &'static str = "x".repeat(1_000_000).leak();
    let tool = Broken(ToolDescriptor::new("tool".parse().unwrap()), text);
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.plan();
    let error = call(&plan, "tool").await.unwrap_err();
    assert!(error.to_string().len() < 5_000, "{} bytes", error.to_string().len());
    drop(plan);
    fixture.end().await;
}

/// A result may come from another process, and say of itself what it likes.
#[tokio::test(start_paused = true)]
async fn p13_no_failure_has_the_code_of_a_success() {
    let forged = ToolSpec::new("forged").read_only().function(|_: Value| {
        let failed = json!({"success": false, "output": null, "duration_ms": 0.0,
            "metadata": {"code": "ok"}});
        let result: ToolResult = serde_json::from_value(failed)?;
        Ok(result.into_result()?)
    });
    let fixture = Fixture::with(paused().tool(forged), &[]).await;
    let plan = fixture.plan();
    let result = call(&plan, "forged").await.unwrap();
    ended(&plan, &result, OutcomeCode::Execution);
    drop(plan);
    fixture.end().await;
}

#[test]
fn what_is_printed_for_debugging_has_no_input_in_it() {
    let secret = || json!({"password": "hunter2"});
    let printed = [
        format!("{:?}", Decision::change(secret())),
        format!("{:?}", ToolCall::new("tool", secret())),
        format!("{:?}", Before::Change(secret())),
        format!("{:?}", Before::Answer(ToolOutput::new(secret()))),
    ];
    for printed in printed {
        assert!(!printed.contains("hunter2"), "{printed}");
    }
}

/// Ten names of a megabyte each.
#[tokio::test(start_paused = true)]
async fn p14_what_is_wrong_with_an_output_is_bounded() {
    let names = |_: &Value| {
        let name = |index| (format!("{index}{}", "\u{e4}".repeat(500_000)), json!("x"));
        let output: Map<String, Value> = (0..10).map(name).collect();
        Ok(ToolOutput::new(output.into()))
    };
    let schema = json!({"type": "object", "additionalProperties": {"type": "integer"}});
    for check in [OutputCheck::Warn, OutputCheck::Reject] {
        let (fixture, _) = one_tool(None, Some(schema.clone()), names).await;
        let options = PlanOptions::new().max_output_bytes(100).output_check(check);
        let plan = fixture.begin(options).unwrap();
        let result = call(&plan, "tool").await.unwrap();
        let metadata = Value::Object(result.metadata).to_string();
        assert!(metadata.len() < 20_000, "{} bytes", metadata.len());
        drop(plan);
        fixture.end().await;
    }
}
