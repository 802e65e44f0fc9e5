//! What one provider alone asks of a schema.

use serde_json::{Value, json};

use super::Node;
use super::root::properties_of;
use super::walk::{ANNOTATIONS, any_in, any_node};

/// The longest pattern, in bytes, that is told in words.
const MAX_PATTERN: usize = 200;

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
            if r"^$\.*+?()[]{}|".contains(c) {
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

/// What `OpenAI` does not take, in a schema as a whole.
#[derive(Clone, Copy)]
pub(super) struct Refused {
    pattern: bool,
    unevaluated_items: bool,
}

impl Refused {
    pub(super) fn of(schema: &Value) -> Self {
        // `items` would say that every item is evaluated.
        let asks = |node: &Node| node.contains_key("unevaluatedItems");
        Self {
            pattern: any_node(schema, &has_odd_pattern),
            unevaluated_items: any_node(schema, &lacks_items) && any_node(schema, &asks),
        }
    }

    /// Whether a schema accepts more without that, or refers to what may.
    fn loosens(self, node: &Node) -> bool {
        (self.pattern && has_odd_pattern(node))
            || (self.unevaluated_items && node.contains_key("unevaluatedItems"))
            || node.contains_key("$ref")
    }
}

fn lacks_items(node: &Node) -> bool {
    let is_array = match node.get("type") {
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "array"),
        kind => kind.is_some_and(|kind| kind == "array"),
    };
    is_array && !node.contains_key("items")
}

/// What is refused has to go somewhere, and whatever refers to its place accepts more.
pub(super) fn meet_openai(node: &mut Node, refused: Refused) {
    if refused.pattern || refused.unevaluated_items {
        let loosens = |node: &Node| refused.loosens(node);
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
        if is_loosened(node.get("contains")) {
            node.remove("maxContains");
        }
        if is_loosened(node.get("oneOf")) {
            if let Some(branches) = node.remove("oneOf") {
                also(node, branches);
            }
        }
        say_odd_pattern(node);
        if let Some(Value::Object(patterns)) = node.get_mut("patternProperties") {
            let before = patterns.len();
            patterns.retain(|pattern, _| is_portable(pattern));
            if patterns.len() < before {
                // Or else it would refuse what the pattern allowed.
                node.remove("additionalProperties");
            }
        }
    }
    if lacks_items(node) {
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

/// A pattern that may not be one is told in words.
fn say_odd_pattern(node: &mut Node) {
    let pattern = node.get("pattern").and_then(Value::as_str).filter(|it| !is_portable(it));
    let Some(pattern) = pattern else { return };
    let own = node.get("description").and_then(Value::as_str).unwrap_or_default();
    let words = format!("{own} Must match `{pattern}`.");
    if pattern.len() <= MAX_PATTERN {
        node.insert("description".into(), words.trim_start().into());
    }
    node.remove("pattern");
}

/// What stands before a place in a regular expression.
#[derive(PartialEq)]
enum Before {
    /// Nothing that could be repeated: the start, or what asserts something of its place.
    Nothing,
    Atom,
    Repeated,
    /// Repeated as seldom as will do.
    Lazy,
}

/// Whether a regular expression is one in Python too, and looks neither ahead nor behind.
fn is_portable(pattern: &str) -> bool {
    let mut rest = pattern;
    let mut in_class = false;
    let mut before = Before::Nothing;
    while let Some(c) = rest.chars().next() {
        rest = &rest[c.len_utf8()..];
        let hex = |digits: usize| {
            rest.len() > digits && rest.bytes().skip(1).take(digits).all(|c| c.is_ascii_hexdigit())
        };
        before = match c {
            '\\' => {
                let escaped = rest.chars().next();
                let portable = match escaped {
                    Some('u') => hex(4),
                    Some('x') => hex(2),
                    Some(c) if c.is_ascii_alphabetic() => "bBdDsSwWnrtfv".contains(c),
                    escaped => escaped.is_some(),
                };
                if !portable {
                    return false;
                }
                rest = rest.get(1..).unwrap_or(rest);
                if matches!(escaped, Some('b' | 'B')) { Before::Nothing } else { Before::Atom }
            }
            ']' => {
                in_class = false;
                Before::Atom
            }
            _ if in_class => Before::Atom,
            '[' => {
                in_class = true;
                Before::Atom
            }
            '(' if rest.starts_with('?') => match rest.strip_prefix("?:") {
                Some(group) => {
                    rest = group;
                    Before::Nothing
                }
                None => return false,
            },
            '(' | '|' | '^' | '$' => Before::Nothing,
            '?' if before == Before::Repeated => Before::Lazy,
            '*' | '+' | '?' | '{' if before != Before::Atom => return false,
            '*' | '+' | '?' => Before::Repeated,
            '{' => match rest.split_once('}') {
                Some((bounds, after)) if is_bounds(bounds) => {
                    rest = after;
                    Before::Repeated
                }
                _ => return false,
            },
            _ => Before::Atom,
        };
    }
    true
}

/// `2`, `2,` or `2,3`.
fn is_bounds(text: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|c| c.is_ascii_digit());
    match text.split_once(',') {
        Some((least, most)) => is_number(least) && (most.is_empty() || is_number(most)),
        None => is_number(text),
    }
}
