//! The root of an input schema, made a plain object schema.

use std::collections::VecDeque;

use serde_json::{Value, json};

use super::walk::{
    allows_object, any_in, any_node, each_node, is_no_assertion, reference, resolve,
};
use super::{MAX_DEPTH, Node};

/// The longest rule, in bytes of JSON, that is told in the description when the schema cannot have
/// it.
const MAX_NOTE: usize = 500;

/// A root that is about to change must not change for those that refer to it: they get a copy.
pub(super) fn keep_references_to_the_root(root: &mut Node) {
    let to_root = |node: &Node| reference(node) == Some("#");
    if !any_in(root, &to_root) {
        return;
    }
    let mut copy = root.clone();
    copy.remove("$defs");
    let defs = root.entry("$defs").or_insert_with(|| json!({}));
    let Value::Object(defs) = defs else { return };
    let mut name = String::from("input");
    while defs.contains_key(&name) {
        name.push('_');
    }
    defs.insert(name.clone(), copy.into());
    let mut schema = Value::Object(std::mem::take(root));
    let pointer = Value::String(format!("#/$defs/{name}"));
    each_node(&mut schema, &mut |node| {
        if to_root(node) {
            node.insert("$ref".into(), pointer.clone());
        }
    });
    if let Value::Object(changed) = schema {
        *root = changed;
    }
}

/// Makes the root a plain object schema, and hands back the rules that it could not take in.
pub(super) fn settle_root(root: &mut Node, refused: &[&str]) -> Node {
    let whole = Value::Object(root.clone());
    let mut hidden = Node::new();
    let mut parts = VecDeque::new();
    parts.extend(root.remove("$ref").map(|target| json!({ "$ref": target })));
    if let Some(Value::Array(all)) = root.remove("allOf") {
        parts.extend(all);
    }
    let left = merge_parts(root, parts, &whole);
    if !left.is_empty() {
        hidden.insert("allOf".into(), left.into());
    }
    for keyword in refused {
        let Some(value) = root.remove(*keyword) else { continue };
        if let ("oneOf" | "anyOf", Value::Array(branches)) = (*keyword, &value) {
            merge_branches(root, branches, &whole);
        }
        hidden.insert((*keyword).into(), value);
    }
    if !hidden.is_empty() {
        // What is hidden no longer says which properties it evaluates.
        root.remove("unevaluatedProperties");
    }
    root.insert("type".into(), "object".into());
    properties_of(root);
    hidden
}

pub(super) fn properties_of(root: &mut Node) -> &mut Node {
    let properties = root.entry("properties").or_insert_with(|| json!({}));
    if !properties.is_object() {
        *properties = json!({});
    }
    match properties {
        Value::Object(properties) => properties,
        _ => unreachable!("it was made an object just now"),
    }
}

/// Merges schemas that all hold into the root; hands back those that do not fit.
fn merge_parts(root: &mut Node, mut parts: VecDeque<Value>, whole: &Value) -> Vec<Value> {
    let mut left = Vec::new();
    let mut followed = 0;
    while let Some(part) = parts.pop_front() {
        let mut part = match part {
            Value::Object(part) => part,
            Value::Bool(true) => continue,
            part => {
                left.push(part);
                continue;
            }
        };
        if let Some(target) = reference(&part) {
            followed += 1;
            match resolve(whole, target).filter(|_| followed <= MAX_DEPTH) {
                Some(target) => parts.push_front(target.clone()),
                None => left.push(json!({ "$ref": target })),
            }
            part.remove("$ref");
        }
        if let Some(Value::Array(all)) = part.remove("allOf") {
            all.into_iter().rev().for_each(|part| parts.push_front(part));
        }
        let rest = merge_part(root, part, whole);
        if !rest.is_empty() {
            left.push(rest.into());
        }
    }
    left
}

fn merge_part(root: &mut Node, part: Node, whole: &Value) -> Node {
    if root.keys().all(|keyword| is_no_assertion(keyword)) {
        for (keyword, value) in part {
            root.entry(keyword).or_insert(value);
        }
        return Node::new();
    }
    let mut rest = Node::new();
    for (keyword, value) in part {
        match (keyword.as_str(), value) {
            ("type", kind) if allows_object(&kind) => {}
            ("required", Value::Array(names)) => require(root, names),
            ("properties", Value::Object(more)) => rest.extend(merge_properties(root, more, whole)),
            // These mean the same wherever they stand, as long as they stand alone.
            (
                "title" | "description" | "oneOf" | "anyOf" | "not" | "propertyNames"
                | "minProperties" | "maxProperties" | "dependentRequired" | "dependentSchemas",
                value,
            ) if !root.contains_key(&keyword) => {
                root.insert(keyword, value);
            }
            (key, _) if is_no_assertion(key) => {}
            (_, value) => {
                rest.insert(keyword, value);
            }
        }
    }
    rest
}

/// Properties of a part that the root has too are met twice, unless something refers to the root's
/// and would meet both.
fn merge_properties(root: &mut Node, more: Node, whole: &Value) -> Option<(String, Value)> {
    let mut left = Node::new();
    let referred = |node: &Node| reference(node).is_some_and(|it| it.starts_with("#/properties/"));
    let properties = properties_of(root);
    for (name, schema) in more {
        match properties.get(&name) {
            Some(known) if *known == schema => {}
            Some(_) if any_node(whole, &referred) => {
                left.insert(name, schema);
            }
            Some(known) => {
                let both = json!({ "allOf": [known, schema] });
                properties.insert(name, both);
            }
            None => {
                properties.insert(name, schema);
            }
        }
    }
    (!left.is_empty()).then(|| ("properties".into(), left.into()))
}

fn require(root: &mut Node, names: Vec<Value>) {
    let required = root.entry("required").or_insert_with(|| json!([]));
    if let Value::Array(required) = required {
        for name in names {
            if !required.contains(&name) {
                required.push(name);
            }
        }
    }
}

/// Takes from alternatives what holds whichever is taken.
fn merge_branches(root: &mut Node, branches: &[Value], whole: &Value) {
    let shapes: Vec<Node> = branches.iter().filter_map(|branch| shape(branch, whole)).collect();
    let [first, others @ ..] = &*shapes else { return };
    let requires = |shape: &Node, name: &Value| match shape.get("required") {
        Some(Value::Array(names)) => names.contains(name),
        _ => false,
    };
    if let Some(Value::Array(names)) = first.get("required") {
        let by_all = names.iter().filter(|name| others.iter().all(|it| requires(it, name)));
        require(root, by_all.cloned().collect());
    }
    if root.get("required").is_some_and(|names| *names == json!([])) {
        root.remove("required");
    }
    let properties = |shape: &'_ Node| shape.get("properties").and_then(Value::as_object).cloned();
    for (name, _) in shapes.iter().filter_map(properties).flatten() {
        if !properties_of(root).contains_key(&name) {
            let schema = one_of_the_branches(&shapes, &name);
            properties_of(root).insert(name, schema);
        }
    }
}

/// What an alternative says of an object: nothing where that is not plain to see, and `None` where
/// no object satisfies it.
fn shape(branch: &Value, whole: &Value) -> Option<Node> {
    let mut branch = branch;
    for _ in 0..MAX_DEPTH {
        let node = match branch {
            Value::Object(node) => node,
            Value::Bool(false) => return None,
            _ => return Some(Node::new()),
        };
        let alone = node.keys().all(|key| key == "$ref" || is_no_assertion(key));
        match reference(node).filter(|_| alone).and_then(|target| resolve(whole, target)) {
            Some(target) => branch = target,
            None if node.get("type").is_some_and(|kind| !allows_object(kind)) => return None,
            None => return Some(node.clone()),
        }
    }
    Some(Node::new())
}

/// A property of some alternatives: what it may be in any of them. Where one of them says nothing
/// of it, it may be anything there.
fn one_of_the_branches(shapes: &[Node], name: &str) -> Value {
    let mut known: Vec<&Value> = Vec::new();
    let mut anything = false;
    for shape in shapes {
        match shape.get("properties").and_then(|properties| properties.get(name)) {
            Some(schema) if known.contains(&schema) => {}
            Some(schema) => known.push(schema),
            None => {
                let is_closed = shape.get("additionalProperties") == Some(&Value::Bool(false));
                anything |= !is_closed || shape.contains_key("patternProperties");
            }
        }
    }
    let texts = |schema: &Value| -> Value {
        let texts = ["title", "description"].into_iter();
        texts.filter_map(|key| Some((key, schema.get(key)?.clone()))).collect()
    };
    match &*known {
        [] => json!({}),
        [schema, ..] if anything => texts(schema),
        [schema] => (*schema).clone(),
        schemas => union_of_constants(schemas).unwrap_or_else(|| json!({ "anyOf": schemas })),
    }
}

/// The tag of a tagged union: one `enum` of what each branch allows.
fn union_of_constants(schemas: &[&Value]) -> Option<Value> {
    let mut values: Vec<&Value> = Vec::new();
    let mut kinds: Vec<Option<&Value>> = Vec::new();
    for schema in schemas {
        let node = schema.as_object()?;
        let plain = |key: &str| matches!(key, "const" | "enum" | "type") || is_no_assertion(key);
        let allowed = match (node.get("const"), node.get("enum")) {
            (Some(value), None) => std::slice::from_ref(value),
            (None, Some(Value::Array(values))) => values,
            _ => return None,
        };
        if !node.keys().all(|key| plain(key)) {
            return None;
        }
        values.extend(allowed);
        kinds.push(node.get("type"));
    }
    let mut union = Node::new();
    if let [Some(kind), ..] = *kinds {
        if kinds.iter().all(|other| *other == Some(kind)) {
            union.insert("type".into(), kind.clone());
        }
    }
    let mut distinct: Vec<&Value> = Vec::new();
    for value in values {
        if !distinct.contains(&value) {
            distinct.push(value);
        }
    }
    union.insert("enum".into(), json!(distinct));
    Some(union.into())
}

/// Sentences on the rules that the root could not take in.
pub(super) fn notes_on(hidden: &Node) -> Vec<String> {
    let mut notes = Vec::new();
    let mut rest = Node::new();
    for (keyword, value) in hidden {
        match (keyword.as_str(), sets_of_names(value)) {
            ("oneOf", Some(sets)) => notes.push(format!("Give exactly one of: {sets}.")),
            ("anyOf", Some(sets)) => notes.push(format!("Give at least one of: {sets}.")),
            _ => {
                rest.insert(keyword.clone(), value.clone());
            }
        }
    }
    if !rest.is_empty() {
        let keywords: Vec<String> = rest.keys().map(|keyword| format!("`{keyword}`")).collect();
        let rules = Value::Object(rest).to_string();
        notes.push(if rules.len() <= MAX_NOTE {
            format!("The input must also match this JSON Schema: {rules}.")
        } else {
            let keywords = keywords.join(", ");
            format!("The input is checked against more rules than the schema shows ({keywords}).")
        });
    }
    notes
}

/// Alternatives that do no more than require properties, in words.
fn sets_of_names(alternatives: &Value) -> Option<String> {
    let mut sets = Vec::new();
    for alternative in alternatives.as_array()? {
        let node = alternative.as_object()?;
        let plain = |(key, value): (&String, &Value)| {
            key == "required" || is_no_assertion(key) || (key == "type" && allows_object(value))
        };
        if !node.iter().all(plain) {
            return None;
        }
        let names = node.get("required")?.as_array()?.iter();
        let names: Option<Vec<String>> =
            names.map(|it| Some(format!("`{}`", it.as_str()?))).collect();
        sets.push(names.filter(|names| !names.is_empty())?.join(" with "));
    }
    let sets = sets.join("; ");
    (!sets.is_empty() && sets.len() <= MAX_NOTE).then_some(sets)
}
