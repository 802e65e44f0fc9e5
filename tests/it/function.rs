//! Function tools: what infers, what the types check, what the descriptor says.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use toolscope::{
    FunctionTool, PlanOptions, ResourceSlot, SourceKind, Tool, ToolCapability,
    ToolExecutionContext, ToolFailure, ToolResult, ToolSpec,
};

use crate::support::{Fixture, paused};

#[derive(Deserialize, JsonSchema)]
struct Text {
    /// What is to be counted.
    text: String,
}

#[derive(Serialize, JsonSchema)]
struct Counted {
    text: String,
    words: usize,
}

fn spec() -> ToolSpec {
    ToolSpec::new("tool").read_only()
}

/// Calls a tool once, in a read-only plan.
async fn call(tool: FunctionTool, input: Value) -> ToolResult {
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.begin(PlanOptions::new().read_only()).unwrap();
    let result = plan.execute("tool", input).await.unwrap();
    fixture.end().await;
    result
}

// ===== what infers =====

async fn count(_: ToolExecutionContext, args: Text) -> Result<usize, ToolFailure> {
    Ok(args.text.split_whitespace().count())
}

fn count_plainly(args: Text) -> Result<Counted, ToolFailure> {
    let text = args.text;
    match text.split_whitespace().count() {
        0 => Err(ToolFailure::invalid("`text` has no words")),
        words => Ok(Counted { text, words }),
    }
}

#[tokio::test(start_paused = true)]
async fn an_async_closure_is_a_handler() {
    let tool = spec().handler(async |_ctx, args: Text| Ok(args.text.len()));
    let result = call(tool, json!({"text": "four"})).await;
    assert_eq!(result.output, json!(4));
}

#[tokio::test(start_paused = true)]
async fn a_closure_that_returns_a_future_is_a_handler() {
    let tool = spec().handler(|_ctx, args: Text| async move { Ok(args.text.len()) });
    let result = call(tool, json!({"text": "four"})).await;
    assert_eq!(result.output, json!(4));
}

#[tokio::test(start_paused = true)]
async fn a_named_async_fn_is_a_handler() {
    let result = call(spec().handler(count), json!({"text": "one two"})).await;
    assert_eq!(result.output, json!(2));
}

#[tokio::test(start_paused = true)]
async fn a_plain_closure_is_a_function() {
    let tool = spec().function(|args: Text| Ok(args.text.to_uppercase()));
    let result = call(tool, json!({"text": "up"})).await;
    assert_eq!(result.output, json!("UP"));
}

#[tokio::test(start_paused = true)]
async fn a_plain_fn_is_a_function() {
    let tool = spec().function(count_plainly);
    let result = call(tool, json!({"text": "one two"})).await;
    assert_eq!(result.output, json!({"text": "one two", "words": 2}));
}

#[tokio::test(start_paused = true)]
async fn a_handler_may_share_state() {
    #[derive(Deserialize, JsonSchema)]
    struct Args {
        number: u64,
    }
    let sum = Arc::new(AtomicU64::new(40));
    let tool = spec().handler_with(Arc::clone(&sum), async |sum, _ctx, args: Args| {
        Ok(sum.fetch_add(args.number, SeqCst) + args.number)
    });
    let result = call(tool, json!({"number": 2})).await;
    assert_eq!(result.output, json!(42));
    assert_eq!(sum.load(SeqCst), 42);
}

#[tokio::test(start_paused = true)]
async fn a_named_async_fn_may_share_state() {
    async fn measure(
        unit: Arc<str>,
        _: ToolExecutionContext,
        args: Text,
    ) -> Result<String, ToolFailure> {
        Ok(format!("{} {unit}", args.text.len()))
    }
    let tool = spec().handler_with(Arc::from("bytes"), measure);
    let result = call(tool, json!({"text": "four"})).await;
    assert_eq!(result.output, json!("4 bytes"));
}

#[tokio::test(start_paused = true)]
async fn a_handler_may_wait() {
    let tool = spec().handler(async |ctx, _: Value| {
        tokio::task::yield_now().await;
        Ok(ctx.plan_id().number())
    });
    assert_eq!(call(tool, json!({})).await.output, json!(1));
}

#[tokio::test(start_paused = true)]
async fn an_error_of_the_standard_library_is_an_execution_failure() {
    let tool = spec().function(|args: Text| Ok(args.text.parse::<i64>()?));
    let result = call(tool, json!({"text": "seven"})).await;
    assert_eq!(result.code(), "execution");
    let error = result.error.unwrap();
    assert!(error.contains("invalid digit"), "{error}");
}

// ===== what the types check =====

/// cases/upstream.md C3: the arguments arrive as the fields of the handler's type.
#[tokio::test(start_paused = true)]
async fn the_arguments_are_the_fields_of_the_type() {
    #[derive(Deserialize, JsonSchema)]
    struct Range {
        from: u32,
        to: Option<u32>,
    }
    let tool = spec().function(|range: Range| Ok(range.to.unwrap_or(10) - range.from));
    assert_eq!(call(tool, json!({"from": 3})).await.output, json!(7));
}

#[tokio::test(start_paused = true)]
async fn p12_a_missing_argument_is_invalid_and_runs_nothing() {
    let runs = Arc::new(AtomicU64::new(0));
    let tool = spec().handler_with(Arc::clone(&runs), async |runs, _ctx, args: Text| {
        runs.fetch_add(1, SeqCst);
        Ok(args.text)
    });
    let result = call(tool, json!({})).await;
    assert_eq!(result.code(), "invalid_input");
    let error = result.error.unwrap();
    assert!(error.contains("\"text\" is missing"), "{error}");
    assert_eq!(runs.load(SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn an_argument_of_another_type_is_invalid() {
    let result = call(spec().handler(count), json!({"text": 5})).await;
    assert_eq!(result.code(), "invalid_input");
    let error = result.error.unwrap();
    assert!(error.contains("expected a string"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn an_output_whose_keys_are_no_strings_is_invalid() {
    let tool = spec().function(|_: Value| Ok(BTreeMap::from([((1, 2), "pair")])));
    let result = call(tool, json!({})).await;
    assert_eq!(result.code(), "invalid_output");
    assert_eq!(result.output, Value::Null);
}

#[tokio::test(start_paused = true)]
async fn an_output_of_numbers_as_keys_is_json() {
    let tool = spec().function(|_: Value| Ok(BTreeMap::from([(7, "seven")])));
    let result = call(tool, json!({})).await;
    assert_eq!(result.output, json!({"7": "seven"}));
}

#[tokio::test(start_paused = true)]
async fn p14_an_output_that_panics_as_it_is_serialised_is_contained() {
    #[derive(JsonSchema)]
    struct Explosive;
    impl Serialize for Explosive {
        fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
            panic!("not today")
        }
    }
    let tool = spec().function(|_: Value| Ok(Explosive));
    assert_eq!(call(tool, json!({})).await.code(), "panic");
}

// ===== what the descriptor says =====

#[test]
fn the_input_schema_is_that_of_the_arguments() {
    let tool = spec().handler(count);
    let schema = tool.descriptor().input_schema.as_ref().unwrap();
    assert_eq!(schema["type"], json!("object"));
    assert_eq!(schema["required"], json!(["text"]));
    let text = &schema["properties"]["text"];
    assert_eq!(text["type"], json!("string"));
    assert_eq!(text["description"], json!("What is to be counted."));
}

#[test]
fn the_output_schema_is_that_of_the_output() {
    let tool = spec().function(count_plainly);
    let schema = tool.descriptor().output_schema.as_ref().unwrap();
    assert_eq!(schema["properties"]["words"]["type"], json!("integer"));
}

#[derive(Serialize, Deserialize, JsonSchema)]
struct Summed {
    #[serde(rename(serialize = "sum", deserialize = "total"))]
    sum: u32,
    #[serde(skip_serializing, default)]
    seen: u32,
    #[serde(skip_deserializing)]
    given: u32,
}

/// One type is read and written in two ways: a schema is of the one that is used.
#[tokio::test(start_paused = true)]
async fn a_schema_is_of_what_is_read_or_of_what_is_given() {
    let add = |given: Summed| Ok(Summed { sum: given.sum + given.seen, ..given });
    let tool = spec().function(add);
    let descriptor = Tool::descriptor(&tool);
    let names = |schema: &Option<Value>| {
        let properties = schema.as_ref().unwrap()["properties"].as_object().unwrap();
        properties.keys().cloned().collect::<Vec<_>>()
    };
    assert_eq!(names(&descriptor.input_schema), ["seen", "total"]);
    assert_eq!(names(&descriptor.output_schema), ["given", "sum"]);
    let result = call(tool, json!({"total": 3, "seen": 4})).await;
    assert_eq!(result.output, json!({"sum": 7, "given": 0}));
    assert!(result.metadata.is_empty(), "{:?}", result.metadata);
}

struct Login;

impl<'de> Deserialize<'de> for Login {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let all = BTreeMap::<String, String>::deserialize(deserializer)?;
        Err(serde::de::Error::custom(format!("{all:?} is no login")))
    }
}

impl JsonSchema for Login {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Login".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({"type": "object", "properties": {"word": {"format": "Password"}}})
    }
}

#[tokio::test(start_paused = true)]
async fn a_password_in_any_case_is_not_told_by_its_type() {
    let result = call(spec().function(|_: Login| Ok(())), json!({"word": "hunter2"})).await;
    let error = result.error.unwrap();
    assert!(error.contains("(hidden)") && !error.contains("hunter2"), "{error}");
}

#[test]
fn the_descriptor_has_all_that_the_spec_says() {
    let tool = ToolSpec::new("text/count")
        .description("Counts words")
        .writes()
        .call_timeout(Duration::from_secs(3))
        .max_concurrent(2)
        .resource(ResourceSlot::required("db", "postgres"))
        .handler(count);
    let descriptor = tool.descriptor();
    assert_eq!(descriptor.name.as_str(), "text/count");
    assert_eq!(descriptor.description, "Counts words");
    assert_eq!(descriptor.capability, ToolCapability::writes());
    assert_eq!(descriptor.call_timeout, Some(Duration::from_secs(3)));
    assert_eq!(descriptor.max_concurrent, Some(2));
    assert_eq!(descriptor.resources[0].name, "db");
    assert_eq!(descriptor.source, SourceKind::Custom);
}

#[test]
fn a_spec_that_declares_nothing_declares_nothing() {
    let tool = ToolSpec::new("tool").handler(count);
    assert_eq!(tool.descriptor().capability, ToolCapability::default());
}

#[test]
#[should_panic(expected = "the name starts with '2'")]
fn a_spec_with_a_bad_name_panics() {
    drop(ToolSpec::new("2fast"));
}

// ===== life =====

#[tokio::test(start_paused = true)]
async fn a_function_tool_has_nothing_to_deactivate() {
    let fixture = Fixture::with(paused().tool(spec().handler(count)), &[]).await;
    let plan = fixture.plan();
    plan.activate("tool").await.unwrap();
    assert!(!plan.deactivate("tool").await);
    let input = json!({"text": "one two"});
    let result = plan.execute("tool", &input).await.unwrap();
    assert_eq!(result.output, json!(2));
    assert_eq!(plan.finish().await.deactivations(), []);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_function_without_arguments_takes_an_empty_object() {
    let tool = spec().function(|()| Ok("here"));
    assert_eq!(Tool::descriptor(&tool).input_schema.as_ref().unwrap()["type"], "object");
    assert_eq!(call(tool, json!({})).await.output, json!("here"));
}

#[tokio::test(start_paused = true)]
async fn a_function_without_arguments_takes_nothing_else() {
    let tool = spec().function(|()| Ok("here"));
    assert_eq!(call(tool, json!({"a": 1})).await.code(), "invalid_input");
}

#[tokio::test(start_paused = true)]
async fn a_tool_behind_an_arc_is_a_tool() {
    let tool: Arc<dyn Tool> = Arc::new(spec().function(|()| Ok("here")));
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.plan();
    assert_eq!(plan.execute("tool", json!({})).await.unwrap().output, json!("here"));
    fixture.end().await;
}
