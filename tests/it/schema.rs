//! Schemas: what compiles, what is refused and where, what a fault says, and what nobody can make
//! hang, overflow or leak.

use std::thread;

use proptest::prelude::*;
use serde_json::{Map, Value, json};
use toolscope::{InvalidSchema, Schema, SchemaValidationError};

#[track_caller]
fn compiled(schema: &Value) -> Schema {
    Schema::new(schema).unwrap_or_else(|error| panic!("{error}: {schema}"))
}

#[track_caller]
fn refused(schema: &Value) -> InvalidSchema {
    match Schema::new(schema) {
        Ok(_) => panic!("was compiled: {schema}"),
        Err(error) => error,
    }
}

/// Checks that a schema is refused, where, and with what in the text.
#[track_caller]
fn assert_refused(schema: &Value, place: &str, problem: &str) {
    let error = refused(schema);
    assert_eq!(error.place(), place, "{error}: {schema}");
    assert!(error.problem().contains(problem), "no `{problem}` in `{error}`");
}

#[track_caller]
fn faults(schema: &Value, value: &Value) -> SchemaValidationError {
    let schema = compiled(schema);
    assert!(!schema.is_valid(value), "it fits");
    schema.check(value).unwrap_err()
}

/// Checks the text for one schema and value.
#[track_caller]
fn assert_told(schema: &Value, value: &Value, text: &str) {
    assert_eq!(faults(schema, value).to_string(), text);
}

#[track_caller]
fn assert_fits(schema: &Value, fits: &[Value], others: &[Value]) {
    let compiled = compiled(schema);
    for value in fits {
        assert!(compiled.is_valid(value), "{value} does not fit {schema}");
        assert_eq!(compiled.check(value), Ok(()));
    }
    for value in others {
        assert!(!compiled.is_valid(value), "{value} fits {schema}");
        assert!(compiled.check(value).is_err());
    }
}

/// Runs on a stack of the size that Tokio's workers have.
fn on_a_small_stack<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let thread = thread::Builder::new().stack_size(2 * 1024 * 1024);
        thread.spawn_scoped(scope, work).unwrap().join().unwrap()
    })
}

fn nested(depth: usize, innermost: Value, wrap: impl Fn(Value) -> Value) -> Value {
    (0..depth).fold(innermost, |value, _| wrap(value))
}

fn arrays(depth: usize) -> Value {
    nested(depth, json!(1), |value| Value::Array(vec![value]))
}

fn objects(depth: usize) -> Value {
    nested(depth, json!(1), |value| under("a", value))
}

fn under(key: &str, value: Value) -> Value {
    Value::Object(Map::from_iter([(key.to_owned(), value)]))
}

/// `$defs` named `d0`, `d1` and so on, each made with a reference to the next, and the last one.
fn chained(length: usize, link: impl Fn(Value) -> Value, last: Value) -> Value {
    let mut defs = Map::new();
    for index in 0..length {
        let next = json!({ "$ref": format!("#/$defs/d{}", index + 1) });
        defs.insert(format!("d{index}"), link(next));
    }
    defs.insert(format!("d{length}"), last);
    json!({ "$defs": defs, "$ref": "#/$defs/d0" })
}

/// How deep a value may be nested under a schema, as it says itself.
#[track_caller]
fn most_nested(schema: &Schema) -> usize {
    let error = schema.check(&arrays(1_000)).unwrap_err();
    let expected = error.faults[0].expected.strip_prefix("a value nested at most ").unwrap();
    expected.strip_suffix(" deep").unwrap().parse().unwrap()
}

// ===== what compiles =====

#[test]
fn a_schema_without_a_type_or_of_one_boolean_is_a_schema() {
    assert_fits(&json!({}), &[json!(1), json!({})], &[]);
    assert_fits(&json!(true), &[json!(null), json!("x")], &[]);
    assert_fits(&json!(false), &[], &[json!(null), json!({})]);
    assert_fits(&json!({ "minimum": 3 }), &[json!(3), json!("x")], &[json!(2)]);
}

#[test]
fn references_and_definitions_inside_the_schema_are_followed() {
    let schema = json!({
        "allOf": [{ "$ref": "#/$defs/named" }, { "$ref": "#aged" }],
        "$defs": {
            "named": { "required": ["name"], "properties": { "name": { "type": "string" } } },
            "aged": { "$anchor": "aged", "properties": { "age": { "$ref": "#/$defs/a~1b%25" } } },
            "a/b%": { "type": "integer" },
        }
    });
    let fits = [json!({ "name": "x", "age": 3 })];
    assert_fits(&schema, &fits, &[json!({ "age": 3 }), json!({ "name": "x", "age": "3" })]);
}

#[test]
fn a_schema_that_names_no_draft_is_of_2020_12() {
    let schema = json!({ "prefixItems": [{ "type": "string" }], "items": false });
    assert_fits(&schema, &[json!(["a"])], &[json!(["a", 1]), json!([1])]);
    let unknown_here = json!({ "dependencies": { "a": ["b"] }, "definitions": {} });
    assert_fits(&unknown_here, &[json!({ "a": 1, "b": 1 })], &[json!({ "a": 1 })]);
}

#[test]
fn a_named_draft_is_honoured() {
    let draft_7 = "http://json-schema.org/draft-07/schema#";
    for draft in [draft_7, "https://json-schema.org/draft-07/schema"] {
        // A tuple was written like this then, and what stood beside a `$ref` did not count.
        let schema = json!({
            "$schema": draft,
            "items": [{ "$ref": "#/definitions/text", "maxLength": 1 }],
            "additionalItems": false,
            "definitions": { "text": { "type": "string" } },
        });
        assert_fits(&schema, &[json!(["long"])], &[json!([1]), json!(["a", "b"])]);
    }
    let schema = json!({
        "$schema": "http://json-schema.org/draft-04/schema#",
        "minimum": 1,
        "exclusiveMinimum": true,
    });
    assert_fits(&schema, &[json!(2)], &[json!(1)]);
    let schema = json!({ "$schema": "http://json-schema.org/draft-06/schema#", "contains": {} });
    assert_fits(&schema, &[json!([1])], &[json!([])]);
    let schema = json!({
        "$schema": "https://json-schema.org/draft/2019-09/schema",
        "items": [{ "type": "string" }],
        "unevaluatedItems": false,
    });
    assert_fits(&schema, &[json!(["a"])], &[json!(["a", 1])]);
    let schema = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "prefixItems": [{ "type": "string" }],
    });
    assert_fits(&schema, &[json!(["a", 1])], &[json!([1])]);
}

#[test]
fn an_unknown_draft_is_refused() {
    for draft in [
        "http://json-schema.org/draft-03/schema#",
        "https://json-schema.org/draft/next/schema",
        "https://example.com/own",
        "2020-12",
        "",
    ] {
        assert_refused(&json!({ "$schema": draft }), "/$schema", "is not a known draft");
    }
    let error = refused(&json!({ "$schema": "https://example.com/own" }));
    assert!(error.problem().contains("https://json-schema.org/draft/2020-12/schema"), "{error}");
    assert_refused(&json!({ "$schema": 5 }), "/$schema", "a string");
}

#[test]
fn format_checks_only_when_asked_to() {
    let schema = json!({ "format": "email" });
    assert_fits(&schema, &[json!("no email"), json!("a@example.com")], &[]);
    let draft_7 = json!({ "$schema": "http://json-schema.org/draft-07/schema#", "format": "date" });
    assert_fits(&draft_7, &[json!("no date")], &[]);

    let checked = Schema::with_formats(&schema).unwrap();
    assert!(checked.is_valid(&json!("a@example.com")));
    let error = checked.check(&json!("no email")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "at the top level: expected a string in the format email, as name@example.com, \
         got the string \"no email\""
    );
    let host = Schema::with_formats(&json!({ "format": "idn-hostname" })).unwrap();
    assert!(host.is_valid(&json!("b\u{fc}cher.example")));
    assert!(!host.is_valid(&json!("-")));
    assert!(Schema::with_formats(&json!({ "format": "own" })).unwrap().is_valid(&json!("any")));
}

#[test]
fn equal_schemas_of_other_numbers_stay_apart() {
    assert_fits(&json!({ "const": 1 }), &[json!(1), json!(1.0)], &[json!(2)]);
    assert_fits(&json!({ "const": 0.1 }), &[json!(0.1)], &[json!(0.2)]);
}

// ===== what is refused =====

#[test]
fn what_is_no_schema_is_refused_with_its_place() {
    assert_refused(&json!({ "type": "invalid_type" }), "/type", "one of \"array\", \"boolean\"");
    let deeper = json!({ "properties": { "a": { "type": 5 } } });
    assert_refused(&deeper, "/properties/a/type", "got the number 5");
    assert_refused(&json!({ "required": "x" }), "/required", "expected an array, got the string");
    assert_refused(&json!({ "minLength": -1 }), "/minLength", "at least 0");
    assert_refused(&json!({ "allOf": [] }), "/allOf", "at least 1 item");
    assert_refused(
        &json!({ "allOf": [{}, { "properties": [] }] }),
        "/allOf/1/properties",
        "object",
    );
    let odd_name = json!({ "properties": { "a/b~c": { "type": 5 } } });
    assert_refused(&odd_name, "/properties/a~1b~0c/type", "");
    for (schema, what) in [
        (json!(5), "this is 5"),
        (json!("x"), "this is \"x\""),
        (json!([]), "this is an empty array"),
        (json!(null), "this is null"),
    ] {
        assert_refused(&schema, "", what);
        assert_refused(&schema, "", "a schema is an object, true or false");
    }
}

#[test]
fn a_pattern_that_is_none_is_refused_with_its_place() {
    let schema = json!({ "properties": { "a": { "pattern": "(" } } });
    assert_refused(&schema, "/properties/a/pattern", "\"(\" is no regular expression");
    let schema = json!({ "patternProperties": { "[": {} } });
    assert_refused(&schema, "/patternProperties/[", "\"[\" is no regular expression");
    // One that would take too much memory is none either.
    assert_refused(&json!({ "pattern": "(\\w{1000}){1000}" }), "/pattern", "no regular expression");
}

#[test]
fn a_reference_to_nothing_is_refused_with_its_place() {
    let schema = json!({ "properties": { "a": { "$ref": "#/$defs/b" } }, "$defs": {} });
    assert_refused(&schema, "/properties/a/$ref", "nothing stands at \"/$defs/b\"");
    assert_refused(&json!({ "items": { "$ref": "#b" } }), "/items/$ref", "no anchor \"b\"");
    let text = json!({ "const": { "$ref": "#b" }, "items": { "$ref": "#b" } });
    assert_refused(&text, "/items/$ref", "no anchor");
    assert_refused(&json!({ "$ref": 5 }), "/$ref", "a string");
}

#[test]
fn a_remote_reference_is_refused() {
    for reference in [
        "http://127.0.0.1:9/schema.json",
        "https://example.com/schema.json",
        "https://example.com/schema.json#/a",
        "file:///etc/hostname",
        "file:///nowhere/schema.json",
        "schema.json",
        "./schema.json#/a",
        "../schema.json",
        "/schema.json",
        "urn:example:schema",
        "Cargo.toml",
    ] {
        let schema = json!({ "properties": { "a": { "items": { "$ref": reference } } } });
        assert_refused(&schema, "/properties/a/items/$ref", "nothing is fetched");
        let unused = json!({ "$defs": { "a": { "$ref": reference } } });
        assert_refused(&unused, "/$defs/a/$ref", "nothing is fetched");
    }
    let schema = json!({ "$id": "https://example.com/a.json", "items": { "$ref": "b.json" } });
    assert_refused(&schema, "/items/$ref", "\"https://example.com/b.json\" is not in the schema");
    let schema = json!({ "not": { "$dynamicRef": "https://example.com/a#b" } });
    assert_refused(&schema, "/not/$dynamicRef", "nothing is fetched");
}

#[test]
fn what_looks_like_a_reference_in_data_is_none() {
    let remote = json!({ "$ref": "https://example.com/schema.json" });
    let schema = json!({ "const": remote, "default": remote, "examples": [remote] });
    assert_fits(&schema, &[remote], &[json!({})]);
    let schema = json!({ "properties": { "$ref": { "type": "string" } } });
    assert_fits(&schema, &[json!({ "$ref": "https://example.com" })], &[json!({ "$ref": 1 })]);
}

#[test]
fn a_schema_nested_too_deep_is_refused() {
    on_a_small_stack(|| {
        let wraps: [fn(Value) -> Value; 6] = [
            |schema| under("allOf", Value::Array(vec![schema])),
            |schema| under("properties", under("a", schema)),
            |schema| under("unevaluatedProperties", schema),
            |schema| under("not", schema),
            |schema| under("x-own", schema),
            |schema| under("const", schema),
        ];
        for wrap in wraps {
            for depth in [100, 1_000] {
                let schema = nested(depth, json!({}), wrap);
                assert_refused(&schema, "", "nested more than 80 deep");
            }
            // What is not refused does not overflow, neither compiled nor checked.
            let longest = (1..=80).rev().map(|depth| nested(depth, json!(true), wrap));
            let mut longest = longest.filter_map(|schema| Schema::new(&schema).ok());
            let schema = longest.next().unwrap();
            for value in [json!({}), objects(1_000)] {
                assert_eq!(schema.is_valid(&value), schema.check(&value).is_ok());
            }
        }
    });
}

#[test]
fn references_that_lead_nowhere_but_on_are_refused() {
    on_a_small_stack(|| {
        let circle = "lead back to itself";
        assert_refused(&json!({ "$ref": "#" }), "", circle);
        assert_refused(&json!({ "allOf": [{ "$ref": "#" }] }), "", circle);
        let schema = json!({
            "$defs": { "a": { "$ref": "#/$defs/b" }, "b": { "anyOf": [{ "$ref": "#/$defs/a" }] } },
        });
        assert_refused(&schema, "/$defs/a", circle);

        for length in [100, 1_000, 10_000] {
            let schema = chained(length, |next| next, json!({}));
            assert_eq!(refused(&schema).problem().split(" lead on ").count(), 2, "{length}");
        }
        assert_fits(
            &chained(50, |next| next, json!({ "type": "null" })),
            &[json!(null)],
            &[json!(1)],
        );
    });
}

#[test]
fn a_schema_that_asks_for_endless_work_is_refused() {
    let too_many = "in too many ways";
    // Each definition looks twice at what the next one looks at.
    let twice = |next: Value| json!({ "allOf": [next, next] });
    let schema = chained(25, twice, json!({ "type": "object" }));
    assert!(refused(&schema).problem().contains(too_many));
    let mut unevaluated = chained(20, twice, json!({ "type": "object" }));
    unevaluated["unevaluatedProperties"] = json!(false);
    assert!(refused(&unevaluated).problem().contains(too_many));
    let schema = nested(
        30,
        json!({}),
        |schema| json!({ "unevaluatedProperties": false, "anyOf": [schema] }),
    );
    assert!(refused(&schema).problem().contains(too_many));
    let schema =
        nested(30, json!({}), |schema| json!({ "unevaluatedItems": false, "contains": schema }));
    assert!(refused(&schema).problem().contains("in one another"));
    // A few are what schemas do.
    compiled(&chained(8, twice, json!({ "type": "object" })));
    compiled(&nested(
        5,
        json!({}),
        |schema| json!({ "unevaluatedProperties": false, "anyOf": [schema] }),
    ));
}

#[test]
fn a_name_that_looks_like_data_hides_no_endless_work() {
    let twice = |at: &str, id: &Value| -> Map<String, Value> {
        let doubling = |index| {
            let next = json!({ "$ref": format!("{at}/d{}", index + 1) });
            let mut link = json!({ "allOf": [next, next] });
            link.as_object_mut().unwrap().extend(id.as_object().unwrap().clone());
            (format!("d{index}"), link)
        };
        (0..26).map(doubling).chain([("d26".to_owned(), json!({ "type": "integer" }))]).collect()
    };
    let plain = |at: &str| twice(at, &json!({}));
    let id = json!({ "id": "http://e/x" });
    let dollar_id = json!({ "$id": "http://e/x" });
    let draft_4 = "http://json-schema.org/draft-04/schema#";
    let first = json!({ "p": { "$ref": "#/$defs/d0" } });
    let first_4 = json!({ "p": { "$ref": "#/definitions/d0" } });
    let hidden = plain("#/properties/default/properties");
    let [query, percent, dots] = ["?q", "a%62", "c/.."].map(|at| plain(&format!("{at}#/$defs")));
    for schema in [
        json!({ "properties": { "default": { "properties": hidden } } }),
        json!({ "$defs": twice("#/$defs", &id), "properties": first }),
        json!({
            "$schema": draft_4,
            "definitions": twice("#/definitions", &dollar_id),
            "properties": first_4,
        }),
        json!({ "$id": "http://x/a?q", "$defs": query, "properties": first }),
        json!({ "$id": "http://x/ab", "$defs": percent, "properties": first }),
        json!({ "$id": "http://x/", "$defs": dots, "properties": first }),
    ] {
        let error = refused(&schema);
        assert!(error.problem().contains("in too many ways"), "{error}");
    }
    let texts: Vec<_> = (0..500).map(|index| "a".repeat(15) + &index.to_string() + "!").collect();
    let schema = json!({ "properties": { "const": { "items": { "pattern": "^(a|aa)+\\1$" } } } });
    let error = faults(&schema, &json!({ "const": texts }));
    assert!(error.to_string().contains("could not be evaluated"), "{error}");
}

#[test]
fn ids_and_references_are_read_as_each_draft_has_them() {
    let [text, number] = [[json!({ "p": "x" })], [json!({ "p": 1 })]];
    let [draft_4, draft_7] =
        ["04", "07"].map(|it| format!("http://json-schema.org/draft-{it}/schema#"));
    for schema in [
        json!({ "$id": "http://x/a?q", "properties": { "p": { "$ref": "?q#/$defs/s" } } }),
        json!({ "$id": "http://x/a?q", "properties": { "p": { "$ref": "#/$defs/s" } } }),
        json!({ "$id": "http://x/ab", "properties": { "p": { "$ref": "a%62#/$defs/s" } } }),
        json!({ "$id": "http://x/", "properties": { "p": { "$ref": "c/..#/$defs/s" } } }),
        json!({ "properties": { "p": { "$ref": "#/$defs/%73" } } }),
        json!({ "properties": { "p": { "$ref": "#s" } } }),
        json!({ "properties": { "p": { "$dynamicRef": "#s" } } }),
        json!({ "properties": { "p": { "id": "http://e/x", "$ref": "#/$defs/s" } } }),
        json!({ "properties": { "p": { "$ref": "named#/x-own/s" } } }),
        json!({ "$schema": draft_4, "properties": { "p": {
            "$id": "http://e/x", "allOf": [{ "$ref": "#/$defs/s" }],
        } } }),
        json!({ "$schema": draft_7, "properties": { "p": {
            "$id": "http://e/x", "$ref": "#/$defs/s",
        } } }),
        json!({ "$schema": draft_7, "definitions": { "t": {
            "$id": "http://e/x", "items": { "$ref": "#t" },
            "definitions": { "t": { "$id": "#t", "type": "string" } },
        } }, "properties": { "p": { "$ref": "#/$defs/s" } } }),
    ] {
        let mut schema = schema;
        let secret = json!({ "$anchor": "s", "type": "string", "writeOnly": true });
        let named = json!({ "$id": "named", "x-own": { "s": secret } });
        schema["$defs"] = json!({ "s": secret, "named": named });
        assert_fits(&schema, &text, &number);
        assert_hidden(&schema, &json!({ "p": 4711 }));
    }
}

// ===== what a fault says =====

fn reader() -> Value {
    json!({
        "type": "object",
        "properties": {
            "path": { "type": "string" },
            "limit": { "type": "integer", "minimum": 1 },
            "items": { "items": { "properties": { "price": { "type": "number" } } } },
        },
        "required": ["path"],
        "additionalProperties": false,
    })
}

#[test]
fn all_faults_are_told_at_once_with_their_places() {
    let value = json!({ "pth": 1, "limit": 0, "items": [{}, {}, {}, { "price": "12" }] });
    let error = faults(&reader(), &value);
    let paths: Vec<_> = error.faults.iter().map(|fault| fault.path.as_str()).collect();
    assert_eq!(paths, ["/items/3/price", "/limit", "", ""]);
    assert_eq!(error.more, 0);
    assert_eq!(
        error.to_string(),
        "at /items/3/price: expected a number, got the string \"12\"\n\
         at /limit: expected a number of at least 1, got the number 0\n\
         at the top level: there is no property \"pth\"; did you mean \"path\"? \
         allowed: \"items\", \"limit\", \"path\"\n\
         at the top level: the property \"path\" is missing; was \"pth\" meant to be it?"
    );
}

#[test]
fn a_fault_is_data_too() {
    let value = json!({ "path": "a", "limt": 1, "items": [{ "price": null }] });
    let error = faults(&reader(), &value);
    assert_eq!(
        serde_json::to_value(&error).unwrap(),
        json!({
            "faults": [
                { "path": "/items/0/price", "expected": "a number", "got": "null" },
                {
                    "path": "",
                    "expected": "only \"items\", \"limit\", \"path\"",
                    "got": "the property \"limt\"",
                    "nearest": ["limit"],
                },
            ],
            "more": 0,
        })
    );
    assert_eq!(error.clone(), error);
    let error: &dyn std::error::Error = &error;
    assert!(error.source().is_none());
}

/// A schema, a value that does not fit it, and what is said of that.
const WORDS: &str = r#"
{ "type": "object" }
[]
expected an object, got an empty array
{ "type": ["string", "null"] }
true
expected null or a string, got true
{ "type": "boolean" }
1.5
expected true or false, got the number 1.5
{ "enum": ["a", 1, null, [1], { "b": 2 }] }
"c"
expected one of "a", 1, null, [1], {"b":2}, got the string "c"
{ "enum": ["a"] }
"b"
expected "a", got the string "b"
{ "const": "a" }
{ "b": 1 }
expected "a", got an object with 1 property
{ "minLength": 5 }
"abc"
expected a string of at least 5 characters, got the string "abc" of 3 characters
{ "maxLength": 1 }
"äö"
expected a string of at most 1 character, got the string "äö" of 2 characters
{ "pattern": "^[a-z]+$" }
"A"
expected a string that matches the pattern "^[a-z]+$", got the string "A"
{ "minimum": 2 }
1
expected a number of at least 2, got the number 1
{ "maximum": 2.5 }
3
expected a number of at most 2.5, got the number 3
{ "exclusiveMinimum": 2 }
2
expected a number greater than 2, got the number 2
{ "exclusiveMaximum": 2 }
2
expected a number less than 2, got the number 2
{ "multipleOf": 2 }
5
expected a multiple of 2, got the number 5
{ "minItems": 1 }
[]
expected at least 1 item, got an empty array
{ "maxItems": 1 }
[1, 2]
expected at most 1 item, got an array of 2 items
{ "uniqueItems": true }
[1, 2, 1]
expected items that all differ, got an array of 3 items, some of them equal
{ "contains": { "const": 3 } }
[1, 2]
expected at least 1 item to fit the schema's `contains`, got an array of 2 items
{ "contains": true, "minContains": 2, "maxContains": 3 }
[1]
expected 2 to 3 items to fit the schema's `contains`, got an array of 1 item
{ "prefixItems": [true], "unevaluatedItems": false }
[1, 2]
expected no items but those of the schema, got an array of 2 items
{ "$schema": "http://json-schema.org/draft-07/schema#", "items": [true], "additionalItems": false }
[1, 2]
expected at most 1 item, got an array of 2 items
{ "minProperties": 1 }
{}
expected at least 1 property, got an empty object
{ "maxProperties": 1 }
{ "a": 1, "b": 2 }
expected at most 1 property, got an object with 2 properties
{ "required": ["a"] }
{}
the property "a" is missing
{ "dependentRequired": { "a": ["b"] } }
{ "a": 1 }
the property "b" is missing
{ "dependencies": { "a": ["b"] } }
{ "a": 1 }
the property "b" is missing
{ "dependentSchemas": { "a": { "minProperties": 2 } } }
{ "a": 1 }
expected at least 2 properties, got an object with 1 property
{ "propertyNames": { "pattern": "^a" } }
{ "b": 1 }
expected each property name to be a string that matches the pattern "^a", got the property "b"
{ "additionalProperties": false }
{ "a": 1 }
there is no property "a"; none is allowed
{ "unevaluatedProperties": false }
{ "a": 1 }
there is no property "a"; none is allowed
{ "patternProperties": { "^a": {} }, "additionalProperties": false }
{ "b": 1 }
there is no property "b"; allowed: names that match "^a"
{ "properties": { "a": true }, "unevaluatedProperties": false }
{ "b": 1 }
there is no property "b"; allowed: "a"
false
1
no value is allowed, got the number 1
{ "not": { "type": "null" } }
null
expected a value that does not fit {"type":"null"}, got null
{ "if": true, "then": { "type": "null" } }
1
expected null, got the number 1
{ "if": false, "else": { "type": "null" } }
1
expected null, got the number 1
{ "anyOf": [{ "type": "string" }, { "type": "null" }] }
1
expected a string or null, got the number 1
{ "oneOf": [{ "type": "string" }, { "minimum": 5 }] }
1
expected a string or a number of at least 5, got the number 1
{ "oneOf": [{ "type": "number" }, true, { "type": "null" }] }
1
expected only one of 3 alternatives to fit, got the number 1, which fits alternatives 1 and 2
{ "anyOf": [{ "required": ["a"] }, { "required": ["b"] }] }
{ "c": 1 }
expected the property "a" or the property "b", got an object with 1 property
{ "anyOf": [{ "anyOf": [{ "type": "string" }, { "const": 2 }] }, { "type": "string" }] }
1
expected a string or 2, got the number 1
{ "$schema": "http://json-schema.org/draft-07/schema#", "contentEncoding": "base64" }
"?"
expected a string encoded as base64, got the string "?"
{ "$schema": "http://json-schema.org/draft-07/schema#", "contentMediaType": "application/json" }
"{"
expected a string that holds application/json, got the string "{"
"#;

#[test]
fn every_keyword_has_its_words() {
    let lines: Vec<&str> = WORDS.trim().lines().collect();
    for case in lines.chunks_exact(3) {
        let [schema, value] = [case[0], case[1]].map(|text| serde_json::from_str(text).unwrap());
        assert_told(&schema, &value, &format!("at the top level: {}", case[2]));
    }
}

#[test]
fn of_several_alternatives_the_one_that_was_meant_is_told() {
    let shape = |kind: &str, key: &str| {
        json!({
            "properties": { "kind": { "const": kind }, key: { "type": "number" } },
            "required": ["kind", key],
        })
    };
    let schema = json!({ "oneOf": [shape("circle", "radius"), shape("square", "side")] });
    let wrong = json!({ "kind": "square", "side": "2" });
    assert_told(&schema, &wrong, "at /side: expected a number, got the string \"2\"");
    let unknown = json!({ "kind": "cube", "side": 2 });
    assert_told(
        &schema,
        &unknown,
        "at the top level: expected the property \"radius\" and \"circle\" at /kind \
         or \"square\" at /kind, got an object with 2 properties",
    );

    let optional = json!({ "anyOf": [{ "$ref": "#/$defs/a" }, { "type": "null" }], "$defs": {
        "a": { "type": "object", "properties": { "b": { "type": "integer" } } }
    } });
    assert_told(
        &optional,
        &json!({ "b": "1" }),
        "at /b: expected an integer, got the string \"1\"",
    );
    let either = "at the top level: expected an object or null, got the string \"x\"";
    assert_told(&optional, &json!("x"), either);

    let tagged = |name: &str| {
        json!({
            "type": "object",
            "properties": { name: { "type": "integer" } },
            "required": [name],
            "additionalProperties": false,
        })
    };
    let schema = json!({ "oneOf": [{ "enum": ["None"] }, tagged("Some"), tagged("More")] });
    let wrong = json!({ "More": "x" });
    assert_told(&schema, &wrong, "at /More: expected an integer, got the string \"x\"");
}

#[test]
fn a_name_that_is_near_is_offered() {
    let schema = json!({
        "properties": { "file_name": {}, "file_size": {}, "mode": {} },
        "required": ["file_name"],
        "additionalProperties": false,
    });
    let error = faults(&schema, &json!({ "filename": 1, "colour": 2, "mode": 3 }));
    let nearest: Vec<_> = error.faults.iter().map(|fault| fault.nearest.clone()).collect();
    assert_eq!(nearest, [vec![], vec!["file_name".to_owned()], vec!["filename".to_owned()]]);

    // What is given already is not meant, and what is known is not a misspelling.
    let error = faults(&schema, &json!({ "file_name": 1, "file_nam": 2 }));
    assert_eq!(error.faults[0].nearest, Vec::<String>::new());
    let open = json!({ "properties": { "path": {}, "paths": {} }, "required": ["path"] });
    assert_told(
        &open,
        &json!({ "paths": 1 }),
        "at the top level: the property \"path\" is missing",
    );

    // The names come from everything that holds for the object.
    let schema = json!({
        "allOf": [{ "$ref": "#/$defs/base" }],
        "properties": { "own": {} },
        "unevaluatedProperties": false,
        "$defs": { "base": { "properties": { "shared": {} } } },
    });
    assert_told(
        &schema,
        &json!({ "sharde": 1 }),
        "at the top level: there is no property \"sharde\"; did you mean \"shared\"? \
         allowed: \"own\", \"shared\"",
    );
}

#[test]
fn what_is_shown_is_short_and_on_one_line() {
    let long = "\u{e4}".repeat(100_000);
    let error = faults(&json!({ "type": "null" }), &json!(long));
    assert_eq!(error.faults[0].got, format!("the string \"{}...\"", "\u{e4}".repeat(60)));
    let odd = json!("a\"b\\c\n\r\t\u{0}\u{1b}[31m\u{202e}\u{feff}");
    assert_told(
        &json!({ "type": "null" }),
        &odd,
        "at the top level: expected null, got the string \
         \"a\\\"b\\\\c\\n\\r\\t\\u0000\\u001b[31m\\u202e\\ufeff\"",
    );
    let items: Vec<u32> = (0..5_000).collect();
    let big = json!({ "a": items });
    let error = faults(&json!({ "properties": { "a": { "type": "null" } } }), &big);
    assert_eq!(error.faults[0].got, "an array of 5000 items");

    let options: Vec<String> = (0..500).map(|index| format!("option {index}")).collect();
    let error = faults(&json!({ "enum": options }), &json!("x"));
    assert!(error.faults[0].expected.ends_with("\"option 9\" and 490 more"), "{error}");
    let properties: Map<String, Value> =
        (0..500).map(|index| (format!("name {index:03}"), json!({}))).collect();
    let schema = json!({ "properties": properties, "additionalProperties": false });
    let error = faults(&schema, &json!({ ("x".repeat(10_000)): 1 }));
    assert!(error.to_string().len() < 400, "{error}");
    assert!(error.to_string().ends_with("\"name 009\" and 190 more"), "{error}");

    let branches: Vec<Value> = (0..500).map(|index| json!({ "const": index })).collect();
    let error = faults(&json!({ "anyOf": branches }), &json!("x"));
    assert!(error.to_string().len() < 200, "{error}");
}

#[test]
fn a_whole_error_is_short() {
    // Names of a megabyte, and alternatives in one another.
    let name = |index| (format!("{index}/~\u{e4}{}", "k".repeat(1_000_000)), json!("x"));
    let names: Map<String, Value> = (0..10).map(name).collect();
    let nest = |schema: Value| {
        let texts = (0..20).map(|index| json!({ "const": format!("{index}{}", "c".repeat(100)) }));
        let both = json!({ "allOf": [schema, { "anyOf": texts.collect::<Vec<_>>() }] });
        json!({ "anyOf": [both.clone(), both, { "type": "null" }] })
    };
    let branches = nested(4, json!({ "type": "integer" }), nest);
    let [long, short] = [Value::Object(names), json!({ "a": "x", "b": 1.5 })];
    let required = "r".repeat(1_000_000);
    for (schema, value) in [
        (json!({ "additionalProperties": { "type": "integer" } }), &long),
        (json!({ "additionalProperties": false, "required": [required] }), &long),
        // Each alternative has its own copy of the place.
        (json!({ "additionalProperties": branches }), &long),
        (json!({ "additionalProperties": branches }), &short),
    ] {
        let error = faults(&schema, value);
        let told = serde_json::to_string(&error).unwrap();
        assert!(told.len() < 100_000 && error.to_string().len() < 100_000, "{}", told.len());
        for fault in &error.faults {
            assert!(fault.path.len() <= 1_024 && fault.expected.len() <= 4_096, "{fault}");
            assert!(fault.path.len() < 3 || fault.path.ends_with("..."), "{fault}");
        }
    }
    let long = json!({ ("k".repeat(1_023)): 1 });
    let error = faults(&json!({ "additionalProperties": { "type": "null" } }), &long);
    assert_eq!(error.faults[0].path, format!("/{}", "k".repeat(1_023)));
}

#[test]
fn ten_faults_are_told_and_the_others_counted() {
    let schema = json!({ "items": { "type": "string" } });
    let numbers = |count: usize| Value::from((0..count).collect::<Vec<_>>());
    assert_eq!(faults(&schema, &numbers(10)).more, 0);
    let error = faults(&schema, &numbers(12));
    assert_eq!((error.faults.len(), error.more), (10, 2));
    assert!(error.to_string().ends_with("at /9: expected a string, got the number 9\nand 2 more"));
    let error = faults(&schema, &numbers(5_000));
    assert_eq!((error.faults.len(), error.more), (10, 1_000));
    assert!(error.to_string().ends_with("\nand at least 1000 more"));

    let closed = json!({ "additionalProperties": false });
    let many: Map<String, Value> = (0..5_000).map(|index| (index.to_string(), json!(1))).collect();
    let error = faults(&closed, &Value::Object(many));
    assert_eq!((error.faults.len(), error.more), (10, 1_000));
}

#[test]
fn the_same_fault_is_told_once() {
    let schema = json!({ "allOf": [{ "required": ["a"] }, { "required": ["a"] }] });
    assert_eq!(faults(&schema, &json!({})).faults.len(), 1);
}

// ===== what must not be shown =====

const SECRET: &str = "hunter2-correct-horse";

/// Checks that a value that breaks a schema leaves no trace of its secret.
#[track_caller]
fn assert_hidden(schema: &Value, value: &Value) -> SchemaValidationError {
    let error = faults(schema, value);
    let everything = format!("{error} {error:?} {}", serde_json::to_value(&error).unwrap());
    assert!(!everything.contains("hunter2"), "{everything}");
    assert!(!everything.contains("4711"), "{everything}");
    assert!(everything.contains("(hidden)"), "{everything}");
    error
}

#[test]
fn a_secret_value_is_not_shown() {
    let secrets = [
        json!({ "type": "integer", "writeOnly": true }),
        json!({ "type": "integer", "format": "password" }),
        json!({ "writeOnly": true, "enum": ["a", "b"] }),
        json!({ "writeOnly": true, "const": "a" }),
        json!({ "writeOnly": true, "maxLength": 3 }),
        json!({ "writeOnly": true, "pattern": "^a$" }),
        json!({ "writeOnly": true, "not": { "const": SECRET } }),
        json!({ "writeOnly": true, "anyOf": [{ "const": "a" }, { "type": "null" }] }),
        json!({ "writeOnly": true, "oneOf": [true, true] }),
        json!({ "allOf": [{ "writeOnly": true }, { "type": "integer" }] }),
        json!({ "anyOf": [{ "type": "integer", "format": "password" }, { "type": "null" }] }),
        json!({ "$ref": "#/$defs/secret" }),
        json!({ "anyOf": [{ "$ref": "#/$defs/secret" }, { "type": "null" }] }),
    ];
    for secret in secrets {
        let schema = json!({
            "properties": { "password": secret },
            "$defs": { "secret": { "type": "integer", "writeOnly": true } },
        });
        let error = assert_hidden(&schema, &json!({ "password": SECRET }));
        assert_eq!(error.faults[0].path, "/password");
        assert_eq!(error.faults[0].got.split(", ").next(), Some("a string (hidden)"), "{error}");
    }
    let schema = json!({ "properties": { "pin": { "type": "string", "writeOnly": true } } });
    let error = assert_hidden(&schema, &json!({ "pin": 4711 }));
    assert_eq!(error.faults[0].got, "a number (hidden)");
}

#[test]
fn a_secret_in_a_list_or_below_is_not_shown() {
    let secret = json!({ "type": "integer", "writeOnly": true });
    let schema = json!({ "properties": { "tokens": { "items": secret } } });
    let error = assert_hidden(&schema, &json!({ "tokens": [1, SECRET] }));
    assert_eq!(error.faults[0].path, "/tokens/1");
    for below in [
        json!({ "additionalProperties": secret }),
        json!({ "patternProperties": { "": secret } }),
        json!({ "writeOnly": true, "additionalProperties": { "type": "integer" } }),
        json!({ "writeOnly": true, "additionalProperties": false }),
        json!({ "writeOnly": true, "propertyNames": { "maxLength": 2 } }),
        json!({ "writeOnly": true, "required": ["hunter3-correct-horse"] }),
    ] {
        let schema = json!({ "properties": { "headers": below } });
        assert_hidden_or_no_value(&schema, &json!({ "headers": { SECRET: SECRET } }));
    }
}

/// As [`assert_hidden`], where nothing of the value need be told.
#[track_caller]
fn assert_hidden_or_no_value(schema: &Value, value: &Value) {
    let error = faults(schema, value);
    let everything = format!("{error} {error:?} {}", serde_json::to_value(&error).unwrap());
    assert!(!everything.contains("hunter2"), "{everything}");
}

#[test]
fn a_secret_below_a_name_that_looks_like_data_is_not_shown() {
    for name in ["default", "const", "enum", "examples"] {
        let secret = json!({ "type": "integer", "writeOnly": true });
        let schema = json!({ "properties": { name: secret } });
        assert_hidden(&schema, &json!({ name: SECRET }));
        let below = json!({ "type": "object", "properties": { "password": secret } });
        let value = json!({ name: { "password": SECRET } });
        assert_hidden(&json!({ "properties": { name: below } }), &value);
        let schema = json!({ name: { "password": secret }, "properties": {
            name: { "properties": { "password": { "$ref": format!("#/{name}/password") } } },
        } });
        // What stands under these is a list of values.
        if !["enum", "examples"].contains(&name) {
            assert_hidden_or_no_value(&schema, &value);
        }
    }
}

#[test]
fn below_a_secret_a_number_is_shown_as_an_index_only() {
    let numbers = json!({ "type": "integer" });
    let pins = json!({ "writeOnly": true, "items": numbers, "additionalProperties": numbers });
    let schema = json!({ "properties": { "pins": pins } });
    let error = assert_hidden(&schema, &json!({ "pins": { "4711": "x" } }));
    assert_eq!(error.faults[0].path, "/pins/(hidden)");
    let error = faults(&schema, &json!({ "pins": [1, "x"] }));
    assert_eq!(error.faults[0].path, "/pins/1");
    let error = assert_hidden(&schema, &json!({ "pins": { "a": { "4711": "x" } } }));
    assert_eq!(error.faults[0].path, "/pins/(hidden)");
    let deeper = json!({ "writeOnly": true, "additionalProperties": pins });
    let schema = json!({ "properties": { "all": deeper } });
    let error = assert_hidden(&schema, &json!({ "all": { "4711": [["x"], 1, "hunter2"] } }));
    assert_eq!(error.faults[0].path, "/all/(hidden)/0");
}

#[test]
fn a_whole_secret_value_is_not_shown() {
    let schema = json!({ "writeOnly": true, "properties": { "a": { "type": "integer" } } });
    let error = assert_hidden(&schema, &json!({ "a": SECRET }));
    assert_eq!(error.faults[0].path, "/a");
    assert_hidden(&json!({ "format": "password", "type": "integer" }), &json!(SECRET));
}

#[test]
fn a_secret_is_hidden_wherever_its_name_stands_and_however_it_is_misspelt() {
    let schema = json!({
        "properties": {
            "login": { "properties": { "api_key": { "type": "string", "writeOnly": true } } },
            "other": { "properties": { "api_key": { "type": "integer" } } },
        },
        "additionalProperties": { "type": "integer" },
    });
    for value in [
        json!({ "other": { "api_key": SECRET } }),
        json!({ "api_key": SECRET }),
        json!({ "API_KEY": SECRET }),
        json!({ "apikey": SECRET }),
        json!({ "api_kye": SECRET }),
    ] {
        assert_hidden(&schema, &value);
    }
    // What is no secret is shown beside one.
    let error = faults(&schema, &json!({ "other": { "api_key": 1 }, "name": "x" }));
    assert_eq!(error.faults[0].got, "the string \"x\"");
}

#[test]
fn what_a_secret_is_not_does_not_say_what_it_is() {
    let schema = json!({
        "properties": { "pass": { "writeOnly": true } },
        "not": { "properties": { "pass": { "const": SECRET } } },
    });
    assert_hidden_or_no_value(&schema, &json!({ "pass": SECRET }));
}

// ===== what nobody can make hang or overflow =====

#[test]
fn a_pattern_that_would_take_for_ever_makes_the_value_invalid() {
    // The first two are matched in linear time, the others give up.
    for pattern in
        ["^(a+)+$", "(x+x+)+y", "^(?=a)(a+)+$", "^(a|aa)+\\1$", "(a*)*\\1b", "^(a|a)*\\1b"]
    {
        let schema = json!({ "pattern": pattern });
        for length in 30..=50 {
            for text in ["a".repeat(length) + "!", "x".repeat(length)] {
                let error = faults(&schema, &json!(text));
                assert!(error.faults[0].expected.contains("pattern"), "{error}");
            }
        }
    }
    let evil = json!({ "pattern": "^(a|aa)+\\1$" });
    let fits = json!("a".repeat(40));
    assert!(compiled(&evil).is_valid(&fits));
    assert_told(
        &evil,
        &json!("a".repeat(40) + "!"),
        &format!(
            "at the top level: expected a string that matches the pattern \"^(a|aa)+\\\\1$\", \
             got the string \"{}!\", on which the pattern could not be evaluated",
            "a".repeat(40)
        ),
    );
    let names = json!({ "patternProperties": { "^(a|aa)+\\1$": { "type": "null" } } });
    let name = "a".repeat(40) + "!";
    let error = faults(&names, &json!({ name: 1 }));
    assert!(error.to_string().contains("could not be evaluated"), "{error}");
    // A pattern that looks at each character of a text of some length does not give up.
    let looks = json!({ "pattern": "^(?:(?!secret).)*$" });
    assert!(compiled(&looks).is_valid(&json!("a".repeat(5_000))));
}

#[test]
fn many_texts_that_a_pattern_gives_up_on_are_given_up_early() {
    let evil = "^(a|aa)+\\1$";
    let texts = |count| {
        let texts = (0..count).map(|index| "a".repeat(15) + &index.to_string() + "!");
        Value::from(texts.collect::<Vec<_>>())
    };
    let schema = json!({ "items": { "pattern": evil } });
    // Texts of this length are decided within the limit for few texts, not within that for many.
    let few = faults(&schema, &texts(20));
    assert!(!few.to_string().contains("could not be evaluated"), "{few}");
    assert_eq!((few.faults.len(), few.more), (10, 10));
    let many = faults(&schema, &texts(500));
    assert!(many.to_string().contains("could not be evaluated"), "{many}");
    faults(&json!({ "contains": { "pattern": evil } }), &texts(500));
    let names = (0..500).map(|index| (format!("aaaaaaaaaaaaaaa{index}!"), json!(1)));
    let names = Value::Object(names.collect());
    let schema = json!({ "patternProperties": { evil: { "type": "null" } } });
    let error = faults(&schema, &names);
    assert!(error.to_string().contains("could not be evaluated"), "{error}");
    // Patterns that come to an end at once are decided for as many texts as there are.
    let schema = json!({ "items": { "pattern": "^(?!b)a+\\d+!$" } });
    assert_fits(&schema, &[texts(5_000)], &[]);
}

#[test]
fn a_value_nested_deep_does_not_overflow() {
    on_a_small_stack(|| {
        let arrays = arrays(1_000);
        let objects = objects(1_000);
        // Nothing in these schemas follows a value down.
        let [only_arrays, only_objects] = [[arrays.clone()], [objects.clone()]];
        assert_fits(&json!({ "type": "array" }), &only_arrays, &only_objects);
        let schema = json!({ "properties": { "a": { "type": "object" } }, "items": false });
        assert_fits(&schema, &only_objects, &only_arrays);
        assert_fits(&json!({ "const": 1 }), &[], &[arrays.clone(), objects.clone()]);

        // These do.
        let recursive = json!({ "items": { "$ref": "#" }, "properties": { "a": { "$ref": "#" } } });
        let branching = json!({
            "$defs": { "any": { "oneOf": [
                { "type": "string" },
                { "type": "array", "items": { "$ref": "#/$defs/any" } },
                { "type": "object", "additionalProperties": { "$ref": "#/$defs/any" } },
            ] } },
            "$ref": "#/$defs/any",
        });
        let dynamic = json!({
            "$dynamicAnchor": "node",
            "allOf": [{
                "properties": { "a": { "$dynamicRef": "#node" } },
                "items": { "$dynamicRef": "#node" },
            }],
            "unevaluatedProperties": false,
        });
        let unique = json!({ "uniqueItems": true });
        let twice = json!([arrays, arrays]);
        for schema in [recursive, branching, dynamic, unique] {
            for value in [&arrays, &objects, &twice] {
                let error = faults(&schema, value);
                assert_eq!(error.faults.len(), 1);
                assert!(error.to_string().contains("expected a value nested at most "), "{error}");
                assert!(error.to_string().ends_with(" deep, got one nested deeper"), "{error}");
            }
        }
    });
}

#[test]
fn what_is_not_too_deep_is_checked_on_a_small_stack() {
    on_a_small_stack(|| {
        let link: [fn(Value) -> Value; 5] = [
            |next| next,
            |next| json!({ "allOf": [next] }),
            |next| json!({ "oneOf": [{ "type": "string" }, next] }),
            |next| json!({ "if": next, "then": true, "else": false }),
            |next| json!({ "unevaluatedProperties": false, "allOf": [next] }),
        ];
        for link in link {
            for length in [0, 1, 3, 5, 10, 25] {
                let last = json!({
                    "type": ["array", "object"],
                    "items": { "$ref": "#" },
                    "additionalProperties": { "$ref": "#" },
                });
                let Ok(schema) = Schema::new(&chained(length, link, last)) else {
                    assert!(length >= 5, "{length}");
                    continue;
                };
                // The deepest one that is not refused, broken at its innermost.
                let most = most_nested(&schema);
                assert!(most >= 8, "{length}");
                let value = arrays(most);
                let error = schema.check(&value).unwrap_err();
                assert!(!error.to_string().contains("nested deeper"), "{error}");
            }
        }
    });
}

#[test]
fn a_value_with_too_many_ways_to_be_wrong_is_told_to_be_wrong() {
    // Two alternatives at each level, both wrong at the innermost: 4^60 ways to say so.
    let schema = json!({
        "$defs": { "tree": { "oneOf": [
            { "type": "array", "items": { "$ref": "#/$defs/tree" }, "maxItems": 3 },
            { "type": "array", "items": { "$ref": "#/$defs/tree" }, "minItems": 5 },
            { "type": "string" },
        ] } },
        "$ref": "#/$defs/tree",
    });
    let shallow = arrays(3);
    assert!(!faults(&schema, &shallow).to_string().contains("too large"));
    let deep = arrays(60);
    assert_told(
        &schema,
        &deep,
        "at the top level: expected a value that fits the schema, got an array of 1 item\n\
         the value is too large to look for more",
    );
}

#[test]
fn a_large_value_is_checked() {
    let text = "x".repeat(10_000_000);
    let schema = json!({ "properties": { "text": { "type": "string", "maxLength": 10_000_000 } } });
    assert_fits(&schema, &[json!({ "text": text })], &[json!({ "text": text.clone() + "x" })]);
    let error = faults(&json!({ "type": "null" }), &json!(text));
    assert!(error.to_string().len() < 200);
    // A text is copied for each alternative that it does not fit: not one of this size.
    let branches: Vec<Value> = (0..200).map(|index| json!({ "const": index })).collect();
    let error = faults(&json!({ "anyOf": branches }), &json!(text));
    assert!(error.to_string().ends_with("too large to look for more"), "{error}");

    let item = |index: u32| json!({ "id": index, "tags": ["a", "b"], "at": { "x": 1, "y": 2 } });
    let items: Vec<Value> = (0..5_000).map(item).collect();
    let schema = json!({
        "items": {
            "type": "object",
            "properties": {
                "id": { "type": "integer" },
                "tags": { "items": { "type": "string" } },
                "at": { "properties": { "x": { "type": "number" }, "y": { "type": "number" } } },
            },
            "required": ["id"],
        }
    });
    let mut broken = items.clone();
    broken[4_999]["at"]["y"] = json!("2");
    assert_told(&schema, &json!(broken), "at /4999/at/y: expected a number, got the string \"2\"");
    assert_fits(&schema, &[json!(items)], &[]);

    // Past some size the first fault is all, and where there are alternatives not even that.
    let many: Vec<u32> = (0..1_000_000).collect();
    let error = faults(&json!({ "items": { "type": "string" } }), &json!(many));
    assert_eq!(
        error.to_string(),
        "at /0: expected a string, got the number 0\nthe value is too large to look for more"
    );
}

// ===== odd schemas and values =====

fn any_value() -> impl Strategy<Value = Value> {
    let scalar = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-3..9_i64).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[ab]{0,3}".prop_map(Value::from),
        any::<String>().prop_map(Value::from),
    ];
    scalar.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec(("[abc]", inner), 0..4)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

const KEYWORDS: &str = "type enum const minimum maximum multipleOf minLength maxLength pattern
    items prefixItems contains minContains maxContains minItems uniqueItems properties
    patternProperties additionalProperties required propertyNames minProperties dependentRequired
    dependentSchemas dependencies allOf anyOf oneOf not if then else $ref $dynamicRef $recursiveRef
    $defs $anchor $dynamicAnchor $recursiveAnchor $id id $schema format writeOnly
    unevaluatedProperties unevaluatedItems additionalItems contentEncoding a default definitions";
const TEXTS: &str = "string number integer object array null boolean a b ^a (a|b)+\\1 # #/$defs/a
    #/$defs/b #a other.json ?q a%62#/$defs/a c/.. http://x/ab #/default #/properties/default https://json-schema.org/draft/2020-12/schema date-time password
    http://json-schema.org/draft-07/schema#";

/// A schema of the keywords there are, with what fits them and what does not.
fn any_schema() -> impl Strategy<Value = Value> {
    let text = prop::sample::select(TEXTS.split_whitespace().collect::<Vec<_>>());
    let leaf = prop_oneof![
        4 => text.prop_map(Value::from),
        2 => (-1..4_i64).prop_map(Value::from),
        2 => any::<bool>().prop_map(Value::from),
        1 => any_value(),
    ];
    leaf.prop_recursive(5, 40, 5, |inner| {
        let keyword = prop::sample::select(KEYWORDS.split_whitespace().collect::<Vec<_>>());
        prop_oneof![
            4 => prop::collection::vec((keyword, inner.clone()), 0..5).prop_map(|members| {
                let members = members.into_iter().map(|(key, value)| (key.to_owned(), value));
                Value::Object(members.collect())
            }),
            1 => prop::collection::vec(("[ab]", inner.clone()), 0..3)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
            2 => prop::collection::vec(inner, 0..3).prop_map(Value::from),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn no_schema_and_no_value_panics(
        schema in any_schema(),
        values in prop::collection::vec(any_value(), 4),
    ) {
        for compiled in [Schema::new(&schema), Schema::with_formats(&schema)] {
            match compiled {
                Ok(compiled) => for value in &values {
                    let checked = compiled.check(value);
                    prop_assert_eq!(compiled.is_valid(value), checked.is_ok());
                    if let Err(error) = checked {
                        prop_assert!(!error.faults.is_empty());
                        prop_assert!(!error.to_string().is_empty());
                    }
                },
                Err(error) => {
                    prop_assert!(schema.pointer(error.place()).is_some(), "{}", error);
                    prop_assert!(!error.problem().contains("cannot be compiled"), "{}", error);
                }
            }
        }
    }
}

// ===== the JSON Schema test suite =====

#[test]
fn the_required_cases_of_the_test_suite_agree() {
    // The required cases of draft 2020-12; the licence stands beside them. A line is a group: a
    // schema, and values that fit it or not.
    let lines = include_str!("../data/json-schema-test-suite/draft2020-12.jsonl").lines();
    let groups: Vec<Value> = lines.map(|line| serde_json::from_str(line).unwrap()).collect();
    let (mut agreed, mut remote) = (0, 0);
    for group in &groups {
        let about = format!("{}: {}", group["file"], group["description"]);
        let cases = group["tests"].as_array().unwrap();
        match Schema::new(&group["schema"]) {
            Ok(schema) => {
                for case in cases {
                    let (value, fits) = (&case["data"], case["valid"] == true);
                    let about = format!("{about}: {}", case["description"]);
                    assert_eq!(schema.is_valid(value), fits, "{about}");
                    assert_eq!(schema.check(value).is_ok(), fits, "{about}");
                }
                agreed += cases.len();
            }
            Err(error) => {
                // They need documents from a server, or a schema of schemas of their own.
                assert!(error.problem().contains("http://localhost:1234/"), "{about}: {error}");
                remote += cases.len();
            }
        }
    }
    assert_eq!((groups.len(), agreed, remote), (368, 1_208, 49));
}
