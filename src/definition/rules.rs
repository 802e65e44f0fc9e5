//! What one provider alone asks of a schema.

use serde_json::{Value, json};

use super::Node;
use super::root::properties_of;
use super::walk::{ANNOTATIONS, any_in, any_node};

/// A name that Anthropic takes for a property of the root.
pub(super) fn is_plain_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    (1..=64).contains(&name.len()) && name.chars().all(plain)
}

/// A property may have any name where it is told by a pattern.
pub(super) fn move_odd_properties(root: &mut Node) -> Option<String> {
    let all = std::mem::take(properties_of(root));
    let (plain, odd): (Node, Node) = all.into_iter().partition(|(name, _)| is_plain_name(name));
    *properties_of(root) = plain;
    if odd.is_empty() {
        return None;
    }
    let patterns = root.entry("patternProperties").or_insert_with(|| json!({}));
    let Value::Object(patterns) = patterns else { return None };
    let mut names = Vec::new();
    for (name, schema) in odd {
        let mut pattern = String::from("^");
        for c in name.chars() {
            if c.is_ascii_punctuation() && !matches!(c, '_' | '-') {
                pattern.push('\\');
            }
            pattern.push(c);
        }
        pattern.push('$');
        patterns.entry(pattern).or_insert(schema);
        names.push(format!("`{name}`"));
    }
    Some(format!("Properties under `patternProperties`: {}.", names.join(", ")))
}

/// `lossy`: a pattern has to go somewhere, and whatever refers to its place accepts more. `fills`:
/// `items` may be added, because nothing asks which items were evaluated.
pub(super) fn meet_openai(node: &mut Node, lossy: bool, fills: bool) {
    if lossy {
        let loosens = |node: &Node| has_odd_pattern(node) || node.contains_key("$ref");
        let is_loosened = |value: Option<&Value>| match value {
            Some(Value::Array(schemas)) => schemas.iter().any(|it| any_node(it, &loosens)),
            Some(schema) => any_node(schema, &loosens),
            None => false,
        };
        if any_in(node, &loosens) {
            node.remove("unevaluatedProperties");
            node.remove("unevaluatedItems");
        }
        if is_loosened(node.get("not")) {
            node.remove("not");
        }
        if is_loosened(node.get("if")) {
            for keyword in ["if", "then", "else"] {
                node.remove(keyword);
            }
        }
        if false {
            node.remove("maxContains");
        }
        if is_loosened(node.get("oneOf")) {
            if let Some(branches) = node.remove("oneOf") {
                also(node, branches);
            }
        }
        if node.get("pattern").and_then(Value::as_str).is_some_and(|it| !is_portable(it)) {
            node.remove("pattern");
        }
        if let Some(Value::Object(patterns)) = node.get_mut("patternProperties") {
            let before = patterns.len();
            patterns.retain(|pattern, _| is_portable(pattern));
            if patterns.len() < before {
                // Or else it would refuse what the pattern allowed.
                node.remove("additionalProperties");
            }
        }
    }
    let is_array = match node.get("type") {
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "array"),
        kind => kind.is_some_and(|kind| kind == "array"),
    };
    if is_array && fills && !node.contains_key("items") {
        node.insert("items".into(), json!({}));
    }
}

pub(super) fn meet_gemini(node: &mut Node) {
    if let Some(value @ (Value::String(_) | Value::Number(_))) = node.get("const").cloned() {
        if !node.contains_key("enum") {
            let kind = if value.is_string() { "string" } else { "number" };
            node.remove("const");
            node.insert("enum".into(), json!([value]));
            node.entry("type").or_insert_with(|| kind.into());
        }
    }
    if node.contains_key("$ref") {
        let stays = |key: &str| matches!(key, "description" | "default") || key.starts_with('$');
        node.retain(|key, _| stays(key) || !ANNOTATIONS.contains(&key.as_str()));
        if !node.keys().all(|key| stays(key)) {
            if let Some(target) = node.remove("$ref") {
                also(node, json!([{ "$ref": target }]));
            }
        }
    }
}

/// Adds alternatives to a schema.
fn also(node: &mut Node, alternatives: Value) {
    if !node.contains_key("anyOf") {
        node.insert("anyOf".into(), alternatives);
        return;
    }
    let alternatives = json!({ "anyOf": alternatives });
    match node.get_mut("allOf") {
        Some(Value::Array(all)) => all.push(alternatives),
        _ => drop(node.insert("allOf".into(), json!([alternatives]))),
    }
}

pub(super) fn has_odd_pattern(node: &Node) -> bool {
    let keys = node.get("patternProperties").and_then(Value::as_object);
    let mut patterns = keys.into_iter().flat_map(Node::keys).map(String::as_str);
    let own = node.get("pattern").and_then(Value::as_str);
    patterns.any(|pattern| !is_portable(pattern)) || own.is_some_and(|it| !is_portable(it))
}

/// Whether a regular expression is one in Python too, and looks neither ahead nor behind.
fn is_portable(pattern: &str) -> bool {
    let text: Vec<char> = pattern.chars().collect();
    let is_set = |at: usize| {
        let escaped = text.get(at) == Some(&'\\');
        escaped && matches!(text.get(at + 1), Some('d' | 'D' | 's' | 'S' | 'w' | 'W'))
    };
    let is_hex = |from: usize, length: usize| {
        (from..from + length).all(|at| text.get(at).is_some_and(char::is_ascii_hexdigit))
    };
    // Where the class of characters that is open begins, and where the last set in it ends.
    let mut class: Option<usize> = None;
    let mut after_set = None;
    let mut at = 0;
    while let Some(&c) = text.get(at) {
        match (c, class) {
            ('\\', _) => {
                let portable = match text.get(at + 1) {
                    Some('u') => is_hex(at + 2, 4),
                    Some('x') => is_hex(at + 2, 2),
                    Some(c) if c.is_ascii_alphabetic() => "bBdDsSwWnrtfv".contains(*c),
                    other => other.is_some(),
                };
                if !portable {
                    return false;
                }
                after_set = is_set(at).then_some(at + 2);
                at += 1;
            }
            ('[', None) => {
                let start = at + 1 + usize::from(text.get(at + 1) == Some(&'^'));
                if text.get(start) == Some(&']') {
                    return false;
                }
                (class, at) = (Some(start), start - 1);
            }
            (']', Some(_)) => class = None,
            // A set is no end of a range.
            ('-', Some(start)) => {
                let is_range = at > start && text.get(at + 1) != Some(&']');
                if is_range && (after_set == Some(at) || is_set(at + 1)) {
                    return false;
                }
            }
            ('(', None) if text.get(at + 1) == Some(&'?') && text.get(at + 2) != Some(&':') => {
                return false;
            }
            _ => {}
        }
        at += 1;
    }
    class.is_none()
}
