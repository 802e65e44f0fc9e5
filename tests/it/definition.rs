//! What model providers are told of tools.

use std::fmt;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::sample::select;
use proptest::strategy::Union;
use serde_json::{Map, Value, json};
use toolscope::{
    ActivationContext, Provider, Schema, Tool, ToolCapability, ToolDescriptor, ToolFailure,
    ToolInstance, ToolName, ToolRegistry, async_trait,
};

/// A tool that is nothing but its descriptor.
struct Described(ToolDescriptor);

#[async_trait]
impl Tool for Described {
    fn descriptor(&self) -> &ToolDescriptor {
        &self.0
    }

    async fn activate(&self, _: &ActivationContext) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        Err(ToolFailure::failed("never asked for"))
    }
}

const ALL: [Provider; 5] = [
    Provider::OpenAi,
    Provider::OpenAiResponses,
    Provider::Anthropic,
    Provider::Gemini,
    Provider::Mcp,
];
/// Those that take a part of JSON Schema only.
const MODELS: [Provider; 4] =
    [Provider::OpenAi, Provider::OpenAiResponses, Provider::Anthropic, Provider::Gemini];
const OPENAI: [Provider; 2] = [Provider::OpenAi, Provider::OpenAiResponses];

fn named(name: &str) -> ToolDescriptor {
    ToolDescriptor::new(ToolName::parse(name).unwrap()).description("Reads a file")
}

fn with_input(schema: Value) -> ToolDescriptor {
    named("files/read_file").input_schema(schema)
}

fn registry(descriptors: impl IntoIterator<Item = ToolDescriptor>) -> ToolRegistry {
    let registry = ToolRegistry::default();
    for descriptor in descriptors {
        registry.register(Described(descriptor)).unwrap();
    }
    registry
}

fn definition(descriptor: ToolDescriptor, provider: Provider) -> Value {
    registry([descriptor]).snapshot().definitions(provider)[0].take()
}

/// The part of a definition that has name and description.
fn inner(definition: &Value, provider: Provider) -> &Value {
    if provider == Provider::OpenAi { &definition["function"] } else { definition }
}

/// The advertised schema and the description.
fn advertised(schema: &Value, provider: Provider) -> (Value, String) {
    let definition = definition(with_input(schema.clone()), provider);
    let inner = inner(&definition, provider);
    let key = match provider {
        Provider::OpenAi | Provider::OpenAiResponses => "parameters",
        Provider::Anthropic => "input_schema",
        Provider::Gemini => "parametersJsonSchema",
        _ => "inputSchema",
    };
    (inner[key].clone(), inner["description"].as_str().unwrap().to_owned())
}

/// Checks what each provider that takes a part only is told of a schema, beside the description.
#[track_caller]
fn assert_told(schema: &Value, told: &Value, note: &str) {
    for provider in MODELS {
        let (schema, description) = advertised(schema, provider);
        assert_eq!(schema, *told, "{provider:?}");
        let expected = if note.is_empty() { "" } else { "\n\n" };
        assert_eq!(description, format!("Reads a file{expected}{note}"), "{provider:?}");
    }
}

// ===== the forms =====

fn reader() -> ToolDescriptor {
    named("files/read_file")
        .input_schema(json!({ "type": "object", "properties": { "path": { "type": "string" } } }))
        .output_schema(json!({ "type": "object", "properties": { "text": { "type": "string" } } }))
        .capability(ToolCapability::read_only())
}

#[test]
fn chat_completions_nest_the_function() {
    let told = json!({
        "type": "function",
        "function": {
            "name": "files__read_file",
            "description": "Reads a file",
            "parameters": { "type": "object", "properties": { "path": { "type": "string" } } },
        },
    });
    assert_eq!(definition(reader(), Provider::OpenAi), told);
}

/// Left out, `strict` would make every property a required one.
#[test]
fn responses_are_flat_and_not_strict() {
    let told = json!({
        "type": "function",
        "name": "files__read_file",
        "description": "Reads a file",
        "parameters": { "type": "object", "properties": { "path": { "type": "string" } } },
        "strict": false,
    });
    assert_eq!(definition(reader(), Provider::OpenAiResponses), told);
}

#[test]
fn anthropic_has_an_input_schema() {
    let told = json!({
        "name": "files__read_file",
        "description": "Reads a file",
        "input_schema": { "type": "object", "properties": { "path": { "type": "string" } } },
    });
    assert_eq!(definition(reader(), Provider::Anthropic), told);
}

#[test]
fn gemini_is_given_json_schema() {
    let told = json!({
        "name": "files__read_file",
        "description": "Reads a file",
        "parametersJsonSchema": {
            "type": "object",
            "properties": { "path": { "type": "string" } },
        },
    });
    assert_eq!(definition(reader(), Provider::Gemini), told);
}

#[test]
fn mcp_has_both_schemas_and_hints() {
    let told = json!({
        "name": "files__read_file",
        "description": "Reads a file",
        "inputSchema": { "type": "object", "properties": { "path": { "type": "string" } } },
        "outputSchema": { "type": "object", "properties": { "text": { "type": "string" } } },
        "annotations": { "readOnlyHint": true, "destructiveHint": false },
    });
    assert_eq!(definition(reader(), Provider::Mcp), told);
}

// ===== all of them =====

fn catalogue() -> Vec<ToolDescriptor> {
    let long = format!("files/{}", "n".repeat(100));
    ["z/one", "a/two", "three", "dev:files/read.v2", &long].map(named).into()
}

#[test]
fn the_order_of_registration_does_not_show() {
    let (forth, mut back) = (catalogue(), catalogue());
    back.reverse();
    let (forth, back) = (registry(forth).snapshot(), registry(back).snapshot());
    for provider in ALL {
        let bytes = forth.definitions(provider).to_string();
        assert_eq!(bytes, forth.definitions(provider).to_string());
        assert_eq!(bytes, back.definitions(provider).to_string());
    }
}

#[test]
fn definitions_are_sorted_by_name() {
    let told = registry(catalogue()).snapshot().definitions(Provider::Anthropic);
    let names: Vec<_> = told.as_array().unwrap().iter().map(|it| &it["name"]).collect();
    assert_eq!(names[0], "a__two");
    assert_eq!(names[1], "dev__2files__read__1v2");
    assert_eq!(names[4], "z__one");
}

/// A provider's cache of the prompt holds up to the tool that is new.
#[test]
fn a_tool_that_is_added_leaves_the_others_as_they_were() {
    let registry = registry(catalogue());
    for provider in ALL {
        let before = registry.snapshot().definitions(provider);
        let name = format!("files/added_for_{provider:?}");
        registry.register(Described(named(&name))).unwrap();
        let after = registry.snapshot().definitions(provider);
        let after = after.as_array().unwrap();
        assert_eq!(after.len(), before.as_array().unwrap().len() + 1);
        assert!(before.as_array().unwrap().iter().all(|told| after.contains(told)));
    }
}

#[test]
fn the_name_that_is_told_leads_back_to_the_tool() {
    let snapshot = registry(catalogue()).snapshot();
    for provider in ALL {
        let told = snapshot.definitions(provider);
        let names = told.as_array().unwrap().iter().map(|it| &inner(it, provider)["name"]);
        let found: Vec<_> =
            names.map(|it| &snapshot.get(it.as_str().unwrap()).unwrap().name).collect();
        let mut registered: Vec<_> = snapshot.descriptors().map(|it| &it.name).collect();
        registered.sort();
        assert_eq!(found, registered);
    }
}

#[test]
fn no_tools_are_an_empty_array() {
    for provider in ALL {
        assert_eq!(ToolRegistry::default().snapshot().definitions(provider), json!([]));
    }
}

// ===== descriptions =====

#[test]
fn a_blank_description_is_left_out() {
    for provider in ALL.into_iter().filter(|it| *it != Provider::Gemini) {
        for blank in ["", " \n"] {
            let told = definition(named("files/read_file").description(blank), provider);
            assert!(inner(&told, provider).get("description").is_none(), "{told}");
        }
    }
}

#[test]
fn gemini_is_told_the_name_for_want_of_a_description() {
    let told = definition(named("files/read_file").description(""), Provider::Gemini);
    assert_eq!(told["description"], "The tool `files/read_file`.");
}

#[test]
fn a_long_description_is_told_whole() {
    let long = "Reads. ".repeat(1_000);
    for provider in ALL {
        let told = definition(named("files/read_file").description(&long), provider);
        assert_eq!(inner(&told, provider)["description"], *long);
    }
}

#[test]
fn a_rule_is_all_that_a_blank_description_says() {
    let descriptor = with_input(json!({ "anyOf": [{ "required": ["a"] }] })).description("");
    let told = definition(descriptor, Provider::Anthropic);
    assert_eq!(told["description"], "Give at least one of: `a`.");
}

// ===== the root =====

#[test]
fn no_schema_is_any_object() {
    let any = json!({ "type": "object", "properties": {} });
    for provider in ALL {
        let told = definition(named("files/read_file"), provider);
        assert!(told.to_string().contains(&any.to_string()), "{told}");
        for schema in [json!(true), json!({})] {
            assert_eq!(advertised(&schema, provider).0, any);
        }
    }
}

#[test]
fn a_schema_that_accepts_nothing_says_so() {
    for provider in ALL {
        let (schema, description) = advertised(&json!(false), provider);
        let closed = json!({ "type": "object", "properties": {}, "additionalProperties": false });
        assert_eq!(schema, closed);
        assert_eq!(description, "Reads a file\n\nNo input is valid, so no call succeeds.");
    }
}

#[test]
fn an_input_is_an_object_whatever_else_its_schema_allows() {
    for schema in
        [json!({ "required": ["a"] }), json!({ "type": ["object", "null"], "required": ["a"] })]
    {
        let told = json!({ "type": "object", "properties": {}, "required": ["a"] });
        assert_told(&schema, &told, "");
        let told = json!({ "type": "object", "required": ["a"] });
        assert_eq!(advertised(&schema, Provider::Mcp).0, told);
    }
}

#[test]
fn a_reference_at_the_root_is_resolved() {
    let file = json!({ "type": "object", "properties": { "path": { "type": "string" } } });
    let schema = json!({
        "$ref": "#/$defs/Alias",
        "title": "Input",
        "$defs": { "Alias": { "$ref": "#/$defs/File" }, "File": file },
    });
    let told = json!({
        "title": "Input",
        "type": "object",
        "properties": { "path": { "type": "string" } },
        "$defs": { "Alias": { "$ref": "#/$defs/File" }, "File": file },
    });
    assert_told(&schema, &told, "");
}

/// What `zod-to-json-schema` makes of a named schema.
#[test]
fn a_root_of_draft_7_that_is_a_reference_is_resolved() {
    let file = json!({
        "type": "object",
        "properties": { "path": { "type": "string" } },
        "required": ["path"],
        "additionalProperties": false,
    });
    let schema = json!({
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$ref": "#/definitions/File",
        "definitions": { "File": file },
    });
    let mut told = file.clone();
    told["$defs"] = json!({ "File": file });
    assert_told(&schema, &told, "");
}

#[test]
fn parts_that_all_hold_are_merged() {
    let schema = json!({
        "allOf": [
            { "$ref": "#/$defs/Base" },
            { "properties": { "b": { "type": "integer" } }, "required": ["b", "a"] },
        ],
        "$defs": {
            "Base": { "properties": { "a": { "type": "string" } }, "required": ["a"] },
        },
    });
    let mut told = json!({
        "type": "object",
        "properties": { "a": { "type": "string" }, "b": { "type": "integer" } },
        "required": ["a", "b"],
    });
    told["$defs"] = schema["$defs"].clone();
    assert_told(&schema, &told, "");
}

#[test]
fn a_property_of_two_parts_meets_both() {
    let schema = json!({
        "properties": { "a": { "type": "string" } },
        "allOf": [{ "properties": { "a": { "minLength": 1 } } }],
    });
    let told = json!({
        "type": "object",
        "properties": { "a": { "allOf": [{ "type": "string" }, { "minLength": 1 }] } },
    });
    assert_told(&schema, &told, "");
}

/// What refers to the property would meet both too.
#[test]
fn a_property_that_is_referred_to_stays_as_it_is() {
    let schema = json!({
        "type": "object",
        "properties": { "a": { "type": "string" }, "b": { "$ref": "#/properties/a" } },
        "allOf": [{ "properties": { "a": { "minLength": 1 } } }],
    });
    let told = json!({ "type": "object", "properties": schema["properties"] });
    let note = "The input must also match this JSON Schema: \
                {\"allOf\":[{\"properties\":{\"a\":{\"minLength\":1}}}]}.";
    assert_told(&schema, &told, note);
}

/// `additionalProperties` of a part knows the properties of that part only.
#[test]
fn a_part_that_cannot_be_merged_is_told_in_the_description() {
    let schema = json!({
        "type": "object",
        "properties": { "a": {} },
        "allOf": [{ "properties": { "b": {} }, "additionalProperties": { "type": "string" } }],
    });
    let told = json!({ "type": "object", "properties": { "a": {}, "b": {} } });
    let note = "The input must also match this JSON Schema: \
                {\"allOf\":[{\"additionalProperties\":{\"type\":\"string\"}}]}.";
    assert_told(&schema, &told, note);
}

#[test]
fn sets_of_required_properties_are_told_in_words() {
    let schema = json!({
        "type": "object",
        "properties": { "yaml": {}, "file": {}, "line": {} },
        "oneOf": [{ "required": ["yaml"] }, { "type": "object", "required": ["file", "line"] }],
        "anyOf": [{ "required": ["yaml"] }, { "required": ["line"] }],
    });
    let told = json!({ "type": "object", "properties": { "yaml": {}, "file": {}, "line": {} } });
    let note = "Give at least one of: `yaml`; `line`. \
                Give exactly one of: `yaml`; `file` with `line`.";
    assert_told(&schema, &told, note);
}

/// A union of variants, as `schemars` and zod write it.
#[test]
fn of_a_union_the_schema_keeps_what_holds_for_each_variant() {
    let schema = json!({
        "oneOf": [
            {
                "type": "object",
                "properties": {
                    "do": { "type": "string", "const": "add" },
                    "text": { "type": "string" },
                },
                "required": ["do", "text"],
                "additionalProperties": false,
            },
            { "$ref": "#/$defs/Remove" },
        ],
        "$defs": {
            "Remove": {
                "type": "object",
                "properties": {
                    "do": { "type": "string", "enum": ["remove"] },
                    "all": { "type": "boolean" },
                },
                "required": ["do"],
                "additionalProperties": false,
            },
        },
    });
    for provider in MODELS {
        let (told, description) = advertised(&schema, provider);
        let properties = json!({
            "do": { "type": "string", "enum": ["add", "remove"] },
            "text": { "type": "string" },
            "all": { "type": "boolean" },
        });
        assert_eq!(told["properties"], properties);
        assert_eq!(told["required"], json!(["do"]));
        assert_eq!(told["type"], "object");
        assert!(told.get("oneOf").is_none() && told.get("additionalProperties").is_none());
        assert!(
            description.contains("must also match this JSON Schema: {\"oneOf\":"),
            "{description}"
        );
    }
    assert_eq!(advertised(&schema, Provider::Mcp).0["oneOf"], schema["oneOf"]);
}

/// The other variant says nothing of it, so it may be anything there.
#[test]
fn a_property_of_one_open_variant_has_no_type() {
    let schema = json!({
        "type": "object",
        "anyOf": [
            { "properties": { "a": { "type": "string", "description": "The text" } } },
            { "properties": { "b": { "type": "integer" } } },
        ],
    });
    for provider in MODELS {
        let told = advertised(&schema, provider).0;
        assert_eq!(told["properties"], json!({ "a": { "description": "The text" }, "b": {} }));
    }
}

#[test]
fn a_rule_too_long_for_the_description_is_named() {
    let variant = |number: u32| json!({ "properties": { format!("property_{number}"): {} } });
    let schema = json!({ "anyOf": (0..30).map(variant).collect::<Vec<_>>() });
    for provider in MODELS {
        let note = "The input is checked against more rules than the schema shows (`anyOf`).";
        let (told, description) = advertised(&schema, provider);
        assert_eq!(description, format!("Reads a file\n\n{note}"));
        assert_eq!(told["properties"].as_object().unwrap().len(), 30);
    }
}

#[test]
fn openai_takes_no_enum_and_no_not_at_the_root() {
    let schema = json!({ "type": "object", "not": { "required": ["a"] } });
    for provider in OPENAI {
        let (told, description) = advertised(&schema, provider);
        assert_eq!(told, json!({ "type": "object", "properties": {} }));
        assert!(description.ends_with("{\"not\":{\"required\":[\"a\"]}}."), "{description}");
    }
    for provider in [Provider::Anthropic, Provider::Gemini, Provider::Mcp] {
        assert_eq!(advertised(&schema, provider).0["not"], schema["not"]);
    }
}

#[test]
fn what_evaluates_no_more_refuses_no_more() {
    let schema = json!({
        "anyOf": [{ "properties": { "a": true } }, { "patternProperties": { "^b": true } }],
        "unevaluatedProperties": false,
    });
    for provider in MODELS {
        assert!(advertised(&schema, provider).0.get("unevaluatedProperties").is_none());
    }
}

// ===== below the root =====

#[test]
fn below_the_root_a_schema_stays_as_it_is() {
    let schema = json!({
        "type": "object",
        "title": "Input",
        "properties": {
            "a": { "oneOf": [{ "pattern": "^[a-z]+$" }, { "type": "null" }], "default": null },
            "b": { "allOf": [{ "minimum": 1 }, { "not": { "multipleOf": 2 } }], "examples": [1] },
            "c": { "type": "array", "items": { "$ref": "#/$defs/C" }, "uniqueItems": true },
            "d": { "if": { "minimum": 1 }, "then": { "maximum": 9 }, "else": { "format": "date" } },
        },
        "additionalProperties": { "type": "string" },
        "required": ["a"],
        "if": { "required": ["b"] },
        "then": { "required": ["c"] },
        "$defs": { "C": { "type": "object", "unevaluatedProperties": false } },
    });
    assert_told(&schema, &schema, "");
    assert_eq!(advertised(&schema, Provider::Mcp).0, schema);
}

/// `#` stays what it was: not only an object, and with its alternatives.
#[test]
fn what_refers_to_the_root_refers_to_the_whole_of_it() {
    let schema = json!({
        "properties": { "left": { "$ref": "#" } },
        "oneOf": [{ "required": ["left"] }, { "required": ["leaf"] }],
    });
    let told = json!({
        "type": "object",
        "properties": { "left": { "$ref": "#/$defs/input" }, "leaf": {} },
        "$defs": {
            "input": {
                "properties": { "left": { "$ref": "#/$defs/input" } },
                "oneOf": schema["oneOf"],
            },
        },
    });
    let mut told_without_leaf = told;
    told_without_leaf["properties"].as_object_mut().unwrap().remove("leaf");
    assert_told(&schema, &told_without_leaf, "Give exactly one of: `left`; `leaf`.");
    let plain = json!({ "type": "object", "properties": { "left": { "$ref": "#" } } });
    assert_told(&plain, &plain, "");
}

#[test]
fn a_property_may_be_called_like_a_keyword() {
    let names =
        ["$ref", "type", "enum", "items", "pattern", "properties", "$defs", "const", "allOf"];
    let properties: Map<String, Value> =
        names.iter().map(|name| ((*name).into(), json!({ "type": "string" }))).collect();
    let schema = json!({
        "type": "object",
        "properties": { "nested": { "properties": properties, "required": names } },
        "required": ["nested"],
    });
    assert_told(&schema, &schema, "");
    let schema = json!({ "type": "object", "properties": properties, "required": names });
    for provider in ALL.into_iter().filter(|it| *it != Provider::Anthropic) {
        assert_eq!(advertised(&schema, provider).0, schema);
    }
}

#[test]
fn data_may_look_like_a_schema() {
    let data = json!({ "$ref": "#/nowhere", "pattern": "(?=x)", "type": "array", "const": 1 });
    let schema = json!({
        "type": "object",
        "properties": { "a": { "enum": [data], "default": data, "examples": [data] } },
    });
    assert_told(&schema, &schema, "");
}

#[test]
fn a_boolean_schema_is_written_as_an_object() {
    let schema = json!({
        "type": "object",
        "properties": { "any": true, "none": false },
        "additionalProperties": false,
    });
    let told = json!({
        "type": "object",
        "properties": { "any": {}, "none": { "not": {} } },
        "additionalProperties": false,
    });
    assert_told(&schema, &told, "");
    assert_eq!(advertised(&schema, Provider::Mcp).0, told);
}

// ===== older drafts =====

#[test]
fn an_older_draft_is_told_in_2020_12() {
    let schema = json!({
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "https://example.com/input.json",
        "type": "object",
        "properties": {
            "pair": { "type": "array", "items": [{ "type": "string" }], "additionalItems": false },
            "list": { "type": "array", "items": { "type": "string" }, "additionalItems": false },
            "shape": { "$ref": "#/definitions/Shape", "description": "Its shape", "minLength": 9 },
        },
        "dependencies": { "pair": ["list"], "list": { "required": ["shape"] } },
        "definitions": { "Shape": { "type": "string" } },
    });
    let told = json!({
        "type": "object",
        "properties": {
            "pair": { "type": "array", "prefixItems": [{ "type": "string" }], "items": false },
            "list": { "type": "array", "items": { "type": "string" } },
            "shape": { "$ref": "#/$defs/Shape", "description": "Its shape" },
        },
        "dependentRequired": { "pair": ["list"] },
        "dependentSchemas": { "list": { "required": ["shape"] } },
        "$defs": { "Shape": { "type": "string" } },
    });
    assert_told(&schema, &told, "");
    assert_eq!(advertised(&schema, Provider::Mcp).0, schema);
}

#[test]
fn draft_4_is_told_in_2020_12() {
    let schema = json!({
        "$schema": "http://json-schema.org/draft-04/schema#",
        "id": "https://example.com/input.json",
        "type": "object",
        "properties": {
            "ttl": { "minimum": 0, "exclusiveMinimum": true },
            "age": { "maximum": 9, "exclusiveMaximum": false },
            "odd": { "const": 1, "type": "integer" },
        },
    });
    let told = json!({
        "type": "object",
        "properties": {
            "ttl": { "exclusiveMinimum": 0 },
            "age": { "maximum": 9 },
            "odd": { "type": "integer" },
        },
    });
    assert_told(&schema, &told, "");
}

// ===== the rules of one provider =====

#[test]
fn anthropic_is_told_odd_names_by_pattern() {
    let long = "n".repeat(65);
    let schema = json!({
        "type": "object",
        "properties": {
            "plain_.-1": { "type": "string" },
            "$top": { "type": "integer" },
            "filter[id]": { "type": "string", "properties": { "$deep": {} } },
            long.clone(): {},
        },
        "required": ["$top"],
        "additionalProperties": false,
    });
    let told = json!({
        "type": "object",
        "properties": { "plain_.-1": { "type": "string" } },
        "patternProperties": {
            "^\\$top$": { "type": "integer" },
            "^filter\\[id\\]$": { "type": "string", "properties": { "$deep": {} } },
            format!("^{long}$"): {},
        },
        "required": ["$top"],
        "additionalProperties": false,
    });
    let (schema_told, description) = advertised(&schema, Provider::Anthropic);
    assert_eq!(schema_told, told);
    let note = format!("Properties under `patternProperties`: `$top`, `filter[id]`, `{long}`.");
    assert_eq!(description, format!("Reads a file\n\n{note}"));
    for provider in [Provider::OpenAi, Provider::Gemini, Provider::Mcp] {
        assert_eq!(advertised(&schema, provider).0, schema);
    }
}

#[test]
fn openai_is_told_the_items_of_each_array() {
    let schema = json!({
        "type": "object",
        "properties": {
            "bare": { "type": "array" },
            "mixed": { "type": ["array", "null"] },
            "pair": { "type": "array", "prefixItems": [{ "type": "string" }] },
        },
    });
    let mut told = schema.clone();
    for name in ["bare", "mixed", "pair"] {
        told["properties"][name]["items"] = json!({});
    }
    for provider in OPENAI {
        assert_eq!(advertised(&schema, provider).0, told);
    }
    for provider in [Provider::Anthropic, Provider::Gemini, Provider::Mcp] {
        assert_eq!(advertised(&schema, provider).0, schema);
    }
}

/// The property `a` that `OpenAI` is told of.
#[track_caller]
fn openai_property(property: &Value) -> Value {
    let schema = json!({ "type": "object", "properties": { "a": property } });
    assert_eq!(advertised(&schema, Provider::Anthropic).0, schema);
    let told = OPENAI.map(|provider| advertised(&schema, provider).0);
    assert_eq!(told[0], told[1]);
    told[0]["properties"]["a"].clone()
}

#[test]
fn openai_is_told_the_patterns_that_it_can_read() {
    let readable = [
        "^[a-z]+$",
        r"^\d{4}-\d{2}$",
        "(?:a|b)",
        r"[\w.-]",
        r"[-\w]",
        r"[\]\\]",
        r"\u00e9\x41",
        "[(?=]",
        r"\(?=",
        "^$",
        "a*?b+?c??d{2}?",
        r"(?:^a)*[$^]+\$*",
        r"\u00e9{2}",
    ];
    for pattern in readable {
        let property = json!({ "type": "string", "pattern": pattern });
        assert_eq!(openai_property(&property), property);
    }
    let unreadable = [
        "^(?!x)",
        "(?=x)",
        "(?<=x)y",
        "(?<!x)y",
        "(?<name>x)",
        r"\p{L}",
        r"[^\P{Cc}]",
        r"\u{1F600}",
        r"\cA",
        r"\z",
        "(?i)x",
        "a{2}{3}",
        "a{2,}{3,4}",
        "^*",
        "$*a",
        r"\b+",
        r"\B*",
        "^{2}",
        "(?:^+)",
        "a*?+",
        "a?+",
    ];
    for pattern in unreadable {
        let property = json!({ "type": "string", "pattern": pattern, "minLength": 1 });
        let words = format!("Must match `{pattern}`.");
        let told = json!({ "type": "string", "minLength": 1, "description": words });
        assert_eq!(openai_property(&property), told);
    }
}

#[test]
fn the_words_for_a_pattern_stand_after_the_description() {
    let property = json!({ "pattern": "^(?!x)", "description": "A word." });
    let told = json!({ "description": "A word. Must match `^(?!x)`." });
    assert_eq!(openai_property(&property), told);
    let property = json!({ "pattern": format!("(?=x){}", "x".repeat(200)) });
    assert_eq!(openai_property(&property), json!({}));
}

/// The definition accepts more without its pattern, and so does what refers to it.
#[test]
fn a_reference_may_lead_to_a_pattern_that_goes() {
    let schema = json!({
        "type": "object",
        "properties": {
            "a": { "not": { "$ref": "#/$defs/X" } },
            "b": { "oneOf": [{ "$ref": "#/$defs/X" }, { "type": "null" }] },
        },
        "$defs": { "X": { "type": "string", "pattern": "^(?!x)" } },
    });
    let told = json!({
        "type": "object",
        "properties": {
            "a": {},
            "b": { "anyOf": [{ "$ref": "#/$defs/X" }, { "type": "null" }] },
        },
        "$defs": { "X": { "type": "string", "description": "Must match `^(?!x)`." } },
    });
    assert_eq!(advertised(&schema, Provider::OpenAi).0, told);
}

/// Without its pattern, what is refused here would refuse more.
#[test]
fn a_pattern_that_goes_takes_with_it_what_depends_on_it() {
    let email = json!({ "pattern": "^(?!x)" });
    let untouched = json!({ "not": {}, "oneOf": [{}], "unevaluatedProperties": false });
    let property = json!({
        "not": email,
        "if": email,
        "then": { "minLength": 1 },
        "oneOf": [email, { "type": "null" }],
        "contains": email,
        "maxContains": 1,
        "patternProperties": { "^(?!x)": {}, "^y": {} },
        "additionalProperties": false,
        "unevaluatedProperties": false,
        "dependentSchemas": { "z": untouched },
    });
    let in_words = json!({ "description": "Must match `^(?!x)`." });
    let told = json!({
        "anyOf": [in_words, { "type": "null" }],
        "contains": in_words,
        "patternProperties": { "^y": {} },
        "dependentSchemas": { "z": untouched },
    });
    assert_eq!(openai_property(&property), told);
}

/// `items` would say that every item is evaluated.
#[test]
fn an_array_without_items_takes_unevaluated_items_with_it() {
    let array = json!({ "type": "array" });
    let closed = json!({ "prefixItems": [{}], "items": {}, "unevaluatedItems": false });
    let property = json!({
        "properties": { "a": array, "b": closed },
        "not": { "items": true, "unevaluatedItems": { "type": "null" } },
        "unevaluatedItems": false,
    });
    let open = json!({ "prefixItems": [{}], "items": {} });
    let filled = json!({ "type": "array", "items": {} });
    let told = json!({ "properties": { "a": filled, "b": open } });
    assert_eq!(openai_property(&property), told);
    // Where each array has its items, nothing goes.
    let whole = json!({ "items": { "type": "array", "items": {} }, "unevaluatedItems": false });
    assert_eq!(openai_property(&whole), whole);
}

/// It is the name `ab` in a URI, and a text of its own to whoever takes it as it is.
#[test]
fn a_reference_with_a_percent_sign_is_not_followed() {
    let schema = json!({
        "type": "object",
        "$ref": "#/$defs/a%62",
        "$defs": { "ab": {}, "a%62": { "required": ["x"] } },
    });
    assert!(Schema::new(&schema).unwrap().is_valid(&json!({})));
    for provider in MODELS {
        let (told, _) = advertised(&schema, provider);
        assert_eq!(told, json!({ "type": "object", "properties": {} }), "{provider:?}");
    }
}

#[test]
fn gemini_is_told_constants_as_an_enum() {
    let schema = json!({
        "type": "object",
        "properties": {
            "text": { "const": "a" },
            "number": { "const": 1, "type": "integer" },
            "truth": { "const": true },
        },
    });
    let told = json!({
        "type": "object",
        "properties": {
            "text": { "enum": ["a"], "type": "string" },
            "number": { "enum": [1], "type": "integer" },
            "truth": { "const": true },
        },
    });
    assert_eq!(advertised(&schema, Provider::Gemini).0, told);
}

#[test]
fn gemini_s_references_stand_alone() {
    let schema = json!({
        "type": "object",
        "properties": {
            "a": { "$ref": "#/$defs/A", "description": "An A", "default": "x", "title": "A" },
            "b": { "$ref": "#/$defs/A", "minLength": 1, "description": "Another" },
            "c": { "$ref": "#/$defs/A", "anyOf": [{ "minLength": 1 }] },
        },
        "$defs": { "A": { "type": "string" } },
    });
    let reference = json!([{ "$ref": "#/$defs/A" }]);
    let told = json!({
        "type": "object",
        "properties": {
            "a": { "$ref": "#/$defs/A", "description": "An A", "default": "x" },
            "b": { "anyOf": reference, "minLength": 1, "description": "Another" },
            "c": { "anyOf": [{ "minLength": 1 }], "allOf": [{ "anyOf": reference }] },
        },
        "$defs": { "A": { "type": "string" } },
    });
    assert_eq!(advertised(&schema, Provider::Gemini).0, told);
}

// ===== MCP =====

/// A client of an older revision discards the whole list for one entry that it cannot read.
#[test]
fn mcp_is_told_an_output_that_says_it_is_an_object_only() {
    let told = |schema: Value| {
        let told = definition(named("a").output_schema(schema), Provider::Mcp);
        told.get("outputSchema").cloned()
    };
    for schema in
        [json!(true), json!({}), json!({ "type": "array" }), json!({ "type": ["object"] })]
    {
        assert_eq!(told(schema), None);
    }
    let object = json!({ "type": "object", "properties": { "a": true }, "oneOf": [{}] });
    let spelled = json!({ "type": "object", "properties": { "a": {} }, "oneOf": [{}] });
    assert_eq!(told(object), Some(spelled));
}

#[test]
fn mcp_is_told_no_hint_that_the_tool_did_not_declare() {
    let hints = |capability: ToolCapability| {
        let told = definition(named("a").capability(capability), Provider::Mcp);
        told.get("annotations").cloned()
    };
    let none = ToolCapability::default();
    assert_eq!(hints(none), None);
    assert_eq!(hints(none.is_unsafe().human_approval_required()), None);
    assert_eq!(hints(none.idempotent()), Some(json!({ "idempotentHint": true })));
    assert_eq!(
        hints(ToolCapability::read_only()),
        Some(json!({ "readOnlyHint": true, "destructiveHint": false }))
    );
    assert_eq!(hints(ToolCapability::writes()), Some(json!({ "readOnlyHint": false })));
    assert_eq!(
        hints(ToolCapability::writes().is_unsafe().idempotent()),
        Some(json!({ "readOnlyHint": false, "destructiveHint": true, "idempotentHint": true }))
    );
}

// ===== bounds =====

const OUTLINE: &str = "The schema shows no details; the input is checked against all of them.";

/// A schema in which `levels` schemas stand in each other below the property `deep`.
fn nested(levels: usize) -> Value {
    let deep = (0..levels).fold(json!({ "type": "string" }), |inner, _| json!({ "items": inner }));
    json!({
        "description": "Input",
        "properties": {
            "deep": { "type": "array", "description": "Deep", "not": deep, "oneOf": [{}] },
            "flat": { "type": "string", "maxLength": 9 },
        },
        "required": ["deep"],
        "additionalProperties": false,
    })
}

#[test]
fn a_deep_schema_is_told_as_an_outline() {
    for provider in ALL {
        let (told, description) = advertised(&nested(70), provider);
        let mut outline = json!({
            "type": "object",
            "description": "Input",
            "properties": {
                "deep": { "type": "array", "description": "Deep" },
                "flat": { "type": "string" },
            },
            "required": ["deep"],
        });
        if OPENAI.contains(&provider) {
            outline["properties"]["deep"]["items"] = json!({});
        }
        assert_eq!((told, description), (outline, format!("Reads a file\n\n{OUTLINE}")));
    }
}

#[test]
fn a_schema_of_sixty_levels_is_told_whole() {
    for provider in ALL {
        let (told, description) = advertised(&nested(60), provider);
        assert!(told["properties"]["deep"]["not"].is_object(), "{told}");
        assert_eq!(description, "Reads a file");
    }
}

#[test]
fn a_schema_that_refers_by_name_is_told_as_an_outline() {
    let schema = json!({
        "type": "object",
        "properties": { "a": { "$ref": "#text", "type": "string", "description": "A" }, "b": true },
        "$defs": { "text": { "$anchor": "text", "type": "string" } },
    });
    let told = json!({ "type": "object", "properties": { "a": { "description": "A" }, "b": {} } });
    assert_told(&schema, &told, OUTLINE);
    assert_eq!(advertised(&schema, Provider::Mcp).0["$defs"], schema["$defs"]);
}

/// Nothing beside a `$ref` of draft 7 counts, but something refers to it.
#[test]
fn a_reference_into_what_does_not_count_makes_an_outline() {
    let schema = json!({
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$ref": "#/definitions/Input",
        "properties": { "a": { "type": "string" } },
        "definitions": {
            "Input": { "properties": { "a": true, "b": { "$ref": "#/properties/a" } } },
        },
    });
    assert_told(&schema, &json!({ "type": "object", "properties": {} }), OUTLINE);
}

/// The alternatives are told in words, so there is nothing left to refer to.
#[test]
fn a_reference_into_what_is_left_out_makes_an_outline() {
    let schema = json!({
        "type": "object",
        "properties": { "a": { "$ref": "#/oneOf/0" } },
        "oneOf": [{ "required": ["a"] }, { "required": ["b"] }],
    });
    let told = json!({ "type": "object", "properties": { "a": {} } });
    assert_told(&schema, &told, OUTLINE);
}

// ===== any schema =====

#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
enum Draft {
    Four,
    Six,
    Seven,
    Nineteen,
    Twenty,
    Unsaid,
}

impl Draft {
    fn uri(self) -> Option<&'static str> {
        match self {
            Self::Four => Some("http://json-schema.org/draft-04/schema#"),
            Self::Six => Some("http://json-schema.org/draft-06/schema#"),
            Self::Seven => Some("http://json-schema.org/draft-07/schema#"),
            Self::Nineteen => Some("https://json-schema.org/draft/2019-09/schema"),
            Self::Twenty => Some("https://json-schema.org/draft/2020-12/schema"),
            Self::Unsaid => None,
        }
    }

    fn definitions(self) -> &'static str {
        if self < Self::Nineteen { "definitions" } else { "$defs" }
    }
}

/// Names of properties: plain ones, keywords, and those that Anthropic refuses.
const NAMES: [&str; 6] = ["a", "b", "c", "type", "$ref", "a b"];

fn name() -> impl Strategy<Value = String> {
    select(&NAMES[..]).prop_map(String::from)
}

fn scalar() -> impl Strategy<Value = Value> {
    select(vec![
        json!(null),
        json!(true),
        json!(0),
        json!(1),
        json!(1.5),
        json!(""),
        json!("a"),
        json!("xb"),
    ])
}

fn value() -> impl Strategy<Value = Value> {
    scalar().prop_recursive(2, 12, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            prop::collection::btree_map(name(), inner, 0..3).prop_map(|it| json!(it)),
        ]
    })
}

fn pattern() -> impl Strategy<Value = &'static str> {
    select(&["^a", "b$", "^(?!x)", "(?=a)", r"\p{L}", ".", "a{1}{1}"][..])
}

/// A keyword, or two that belong together, with no schemas in it.
fn assertion(draft: Draft) -> BoxedStrategy<Value> {
    let kinds = &["null", "boolean", "integer", "number", "string", "array", "object"][..];
    let names = || prop::collection::btree_set(name(), 1..3);
    let by_name = |keyword: &'static str| {
        (name(), names()).prop_map(move |(name, names)| json!({ keyword: { name: names } })).boxed()
    };
    let patterns = pattern().prop_map(|pattern| json!({ "pattern": pattern })).boxed();
    let mut all = vec![
        Just(json!({})).boxed(),
        select(kinds).prop_map(|kind| json!({ "type": kind })).boxed(),
        select(kinds).prop_map(|kind| json!({ "type": [kind, "object"] })).boxed(),
        prop::collection::vec(value(), 1..3).prop_map(|it| json!({ "enum": it })).boxed(),
        scalar().prop_map(|value| json!({ "const": value })).boxed(),
        names().prop_map(|names| json!({ "required": names })).boxed(),
        (0..3).prop_map(|least| json!({ "minLength": least, "minProperties": least })).boxed(),
        (0..3).prop_map(|most| json!({ "maxItems": most, "maxContains": most })).boxed(),
        by_name("dependencies"),
        // Thrice, since what goes with a pattern is the hardest to get right.
        patterns.clone(),
        patterns.clone(),
        patterns,
    ];
    all.push(if draft == Draft::Four {
        any::<bool>().prop_map(|it| json!({ "minimum": 1, "exclusiveMinimum": it })).boxed()
    } else {
        (0..2).prop_map(|bound| json!({ "exclusiveMinimum": bound })).boxed()
    });
    if draft >= Draft::Nineteen {
        all.push(by_name("dependentRequired"));
    }
    Union::new(all).boxed()
}

/// A schema that is sure to come to an end: where it refers to more than assertions, it does so
/// from a step further into the input.
fn schema(draft: Draft) -> BoxedStrategy<Value> {
    let leaf = if draft == Draft::Four {
        assertion(draft)
    } else {
        prop_oneof![9 => assertion(draft), 1 => any::<bool>().prop_map(Value::from)].boxed()
    };
    let defs = draft.definitions();
    let targets = ["#".into(), "#/properties/a".into()].into_iter();
    let targets = targets.chain(["one", "two"].map(|name| format!("#/{defs}/{name}")));
    let targets: Vec<String> = targets.collect();
    let nested = leaf.prop_recursive(3, 24, 4, move |inner| {
        let referring = (select(targets.clone()), inner.clone()).prop_map(|(target, beside)| {
            let mut node = beside.as_object().cloned().unwrap_or_default();
            node.insert("$ref".into(), target.into());
            Value::from(node)
        });
        let below = prop_oneof![4 => inner.clone(), 2 => referring].boxed();
        let plain = Just(json!({ "$ref": format!("#/{defs}/plain") }));
        let part = part(draft, &prop_oneof![6 => inner, 1 => plain].boxed(), &below);
        let any_part = prop_oneof![1 => assertion(draft), 2 => part];
        prop::collection::vec(any_part, 1..4).prop_map(merged)
    });
    nested.boxed()
}

/// A keyword, or some that belong together, with schemas in it: for the value itself, or for what
/// is in it.
fn part(
    draft: Draft,
    here: &BoxedStrategy<Value>,
    below: &BoxedStrategy<Value>,
) -> BoxedStrategy<Value> {
    let one = |keyword: &'static str, schema: &BoxedStrategy<Value>| {
        schema.clone().prop_map(move |it| json!({ keyword: it })).boxed()
    };
    let list = |keyword: &'static str, schema: &BoxedStrategy<Value>| {
        let some = prop::collection::vec(schema.clone(), 1..3);
        some.prop_map(move |it| json!({ keyword: it })).boxed()
    };
    let map = |keyword: &'static str, schema: &BoxedStrategy<Value>| {
        let some = prop::collection::btree_map(name(), schema.clone(), 1..3);
        some.prop_map(move |it| json!({ keyword: it })).boxed()
    };
    let by_pattern = (pattern(), below.clone())
        .prop_map(|(pattern, it)| json!({ "patternProperties": { pattern: it } }));
    let conditional = (here.clone(), here.clone(), here.clone())
        .prop_map(|(test, then, other)| json!({ "if": test, "then": then, "else": other }));
    let (first, rest) =
        if draft < Draft::Twenty { ("items", "additionalItems") } else { ("prefixItems", "items") };
    let mut all = vec![
        map("properties", below),
        by_pattern.boxed(),
        one("additionalProperties", below),
        Just(json!({ "additionalProperties": false })).boxed(),
        one("items", below),
        list(first, below),
        one(rest, below),
        one("contains", below),
        list("allOf", here),
        list("anyOf", here),
        list("oneOf", here),
        one("not", here),
        conditional.boxed(),
        map("dependencies", here),
        one("propertyNames", here),
    ];
    if draft >= Draft::Nineteen {
        all.push(map("dependentSchemas", here));
        all.push(Just(json!({ "unevaluatedProperties": false })).boxed());
        all.push(Just(json!({ "unevaluatedItems": false })).boxed());
    }
    Union::new(all).boxed()
}

/// One schema with the keywords of some; the first to say one wins.
fn merged(parts: Vec<Value>) -> Value {
    let mut node = Map::new();
    for (keyword, value) in parts.into_iter().filter_map(|part| part.as_object().cloned()).flatten()
    {
        node.entry(keyword).or_insert(value);
    }
    node.into()
}

fn root(draft: Draft) -> impl Strategy<Value = Value> {
    let defs = draft.definitions();
    let [one, two] = ["one", "two"].map(|name| json!({ "$ref": format!("#/{defs}/{name}") }));
    let mut two_and_more = two;
    two_and_more["properties"] = json!({ "a": { "type": "string" } });
    let here = prop_oneof![2 => schema(draft), 1 => Just(one), 1 => Just(two_and_more)].boxed();
    let object = Just(json!({ "type": "object" }));
    let own = prop_oneof![part(draft, &here, &schema(draft)), here, object];
    let own = prop::collection::vec(own, 1..4).prop_map(merged);
    (own, schema(draft), schema(draft), assertion(draft)).prop_map(move |(own, one, two, plain)| {
        let mut root = own;
        root[defs] = json!({ "one": one, "two": two, "plain": plain });
        if let Some(uri) = draft.uri() {
            root["$schema"] = uri.into();
        }
        root
    })
}

/// Shown as JSON when a case fails.
struct Json(Value);

impl fmt::Debug for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

fn any_root() -> impl Strategy<Value = Json> {
    use Draft::{Four, Nineteen, Seven, Six, Twenty, Unsaid};
    let drafts = vec![Four, Six, Seven, Nineteen, Twenty, Unsaid, Unsaid];
    select(drafts).prop_flat_map(root).prop_map(Json)
}

fn inputs() -> impl Strategy<Value = Vec<Json>> {
    let input = prop::collection::btree_map(name(), value(), 0..4);
    prop::collection::vec(input.prop_map(|it| Json(json!(it))), 30)
}

/// The rules of a provider, on what it is told.
fn keeps_the_rules(told: &Value, provider: Provider) -> Result<(), TestCaseError> {
    prop_assert_eq!(&told["type"], "object");
    if provider == Provider::Mcp {
        let properties = told["properties"].as_object();
        prop_assert!(properties.is_none_or(|it| it.values().all(Value::is_object)));
        return Ok(());
    }
    prop_assert!(told["properties"].is_object());
    for keyword in ["$schema", "$id", "$ref", "oneOf", "anyOf", "allOf", "definitions"] {
        prop_assert!(told.get(keyword).is_none(), "{keyword}");
    }
    if OPENAI.contains(&provider) {
        prop_assert!(told.get("enum").is_none() && told.get("not").is_none());
        let text = told.to_string();
        for odd in ["^(?!x)", "(?=a)", r"\p{L}"].map(|odd| json!(odd).to_string()) {
            let stands = [format!("\"pattern\":{odd}"), format!("{odd}:")];
            prop_assert!(!stands.iter().any(|it| text.contains(it)), "{text}");
        }
    }
    if provider == Provider::Anthropic {
        let plain = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
        let mut names = told["properties"].as_object().unwrap().keys();
        prop_assert!(names.all(|name| name.len() <= 64 && name.chars().all(plain)));
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// What is told is a schema, keeps the rules, and accepts all that the tool's own accepts.
    #[test]
    fn what_is_told_is_never_stricter(schema in any_root(), inputs in inputs()) {
        let Ok(full) = Schema::new(&schema.0) else { return Ok(()) };
        let valid: Vec<_> = inputs.iter().filter(|input| full.is_valid(&input.0)).collect();
        for provider in ALL {
            let (told, _) = advertised(&schema.0, provider);
            keeps_the_rules(&told, provider)?;
            let advertised = Schema::new(&told);
            prop_assert!(advertised.is_ok(), "{provider:?}: {told}: {advertised:?}");
            let advertised = advertised.unwrap();
            for input in &valid {
                let accepted = advertised.is_valid(&input.0);
                prop_assert!(accepted, "{provider:?}: {told} refuses {input:?}");
            }
        }
    }
}
