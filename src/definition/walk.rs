//! Going through a JSON Schema: where schemas stand in it, and what a `$ref` leads to.

use serde_json::{Value, json};

use super::Node;

/// What says something of a value and asserts nothing.
pub(super) const ANNOTATIONS: [&str; 8] = [
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
];

/// Where the value of a keyword has schemas in it.
pub(super) enum Place {
    Nowhere,
    Itself,
    Elements,
    Values,
}

pub(super) fn place(keyword: &str, value: &Value) -> Place {
    match (keyword, value) {
        (
            "properties" | "patternProperties" | "$defs" | "definitions" | "dependentSchemas"
            | "dependencies",
            Value::Object(_),
        ) => Place::Values,
        ("allOf" | "anyOf" | "oneOf" | "prefixItems" | "items", Value::Array(_)) => Place::Elements,
        (
            "items"
            | "additionalItems"
            | "unevaluatedItems"
            | "contains"
            | "additionalProperties"
            | "unevaluatedProperties"
            | "propertyNames"
            | "not"
            | "if"
            | "then"
            | "else"
            | "contentSchema",
            Value::Object(_) | Value::Bool(_),
        ) => Place::Itself,
        _ => Place::Nowhere,
    }
}

/// Changes each schema that is no boolean, from the root down: what a change puts in is seen too.
pub(super) fn each_node(schema: &mut Value, change: &mut impl FnMut(&mut Node)) {
    let Value::Object(node) = schema else { return };
    change(node);
    for (keyword, value) in node.iter_mut() {
        match (place(keyword, value), value) {
            (Place::Itself, value) => each_node(value, change),
            (Place::Elements, Value::Array(schemas)) => {
                for schema in schemas {
                    each_node(schema, change);
                }
            }
            (Place::Values, Value::Object(schemas)) => {
                for schema in schemas.values_mut() {
                    each_node(schema, change);
                }
            }
            _ => {}
        }
    }
}

/// Whether any schema that is no boolean passes the test.
pub(super) fn any_node(schema: &Value, test: &impl Fn(&Node) -> bool) -> bool {
    schema.as_object().is_some_and(|node| any_in(node, test))
}

pub(super) fn any_in(node: &Node, test: &impl Fn(&Node) -> bool) -> bool {
    test(node)
        || node.iter().any(|(keyword, value)| match (place(keyword, value), value) {
            (Place::Itself, value) => any_node(value, test),
            (Place::Elements, Value::Array(schemas)) => {
                schemas.iter().any(|schema| any_node(schema, test))
            }
            (Place::Values, Value::Object(schemas)) => {
                schemas.values().any(|schema| any_node(schema, test))
            }
            _ => false,
        })
}

pub(super) fn reference(node: &Node) -> Option<&str> {
    node.get("$ref").and_then(Value::as_str)
}

/// The schema that a `$ref` stands for. Only a pointer from the root that leads from schema to
/// schema is followed. One with a percent sign is not: what it names depends on who reads it.
pub(super) fn resolve<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    if reference == "#" {
        return Some(root);
    }
    if reference.contains('%') {
        return None;
    }
    let unescape = |token: &str| token.replace("~1", "/").replace("~0", "~");
    let mut tokens = reference.strip_prefix("#/")?.split('/').map(unescape);
    let mut schema = root;
    while let Some(keyword) = tokens.next() {
        let value = schema.get(&keyword)?;
        schema = match place(&keyword, value) {
            Place::Nowhere => return None,
            Place::Itself => value,
            Place::Elements => value.get(tokens.next()?.parse::<usize>().ok()?)?,
            Place::Values => value.get(tokens.next()?)?,
        };
    }
    Some(schema)
}

/// Whether any `$ref` leads to no schema.
pub(super) fn dangles(root: &Value) -> bool {
    let dangling = |node: &Node| reference(node).is_some_and(|it| resolve(root, it).is_none());
    any_node(root, &dangling)
}

/// Writes a boolean schema as an object.
pub(super) fn spell_out(schema: &mut Value) {
    match schema {
        Value::Bool(true) => *schema = json!({}),
        Value::Bool(false) => *schema = json!({ "not": {} }),
        _ => {}
    }
}

pub(super) fn says_object(root: &Node) -> bool {
    root.get("type").is_some_and(|kind| kind == "object")
}

pub(super) fn is_no_assertion(keyword: &str) -> bool {
    ANNOTATIONS.contains(&keyword) || keyword == "$defs" || keyword == "definitions"
}

pub(super) fn allows_object(kind: &Value) -> bool {
    match kind {
        Value::Array(kinds) => kinds.iter().any(|kind| kind == "object"),
        kind => kind == "object",
    }
}
