//! Values, names and counts in words: short, on one line, and without what is secret.

use serde_json::Value;

use crate::visible::is_visible;

/// How many characters of a text are shown.
pub(super) const MOST_SHOWN: usize = 60;
/// How many names or options are listed.
const MOST_LISTED: usize = 10;

/// What a value is; no more than that where it is secret.
pub(super) fn described(value: &Value, secret: bool) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(_) if secret => "a boolean (hidden)".to_owned(),
        Value::Number(_) if secret => "a number (hidden)".to_owned(),
        Value::String(_) if secret => "a string (hidden)".to_owned(),
        Value::Array(_) if secret => "an array (hidden)".to_owned(),
        Value::Object(_) if secret => "an object (hidden)".to_owned(),
        Value::Bool(_) => value.to_string(),
        Value::Number(_) => format!("the number {}", shown(value)),
        Value::String(_) => format!("the string {}", shown(value)),
        Value::Array(items) if items.is_empty() => "an empty array".to_owned(),
        Value::Array(items) => format!("an array of {}", count(items.len() as u64, "item")),
        Value::Object(members) if members.is_empty() => "an empty object".to_owned(),
        Value::Object(members) => format!("an object with {}", properties(members.len() as u64)),
    }
}

/// A value without what makes it long.
pub(super) fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => quoted(text),
        Value::Array(_) | Value::Object(_) => described(value, false),
        scalar => cut(&scalar.to_string(), MOST_SHOWN),
    }
}

/// A value of the schema's own.
pub(super) fn option(value: &Value) -> String {
    match value {
        Value::Array(_) | Value::Object(_) => cut(&value.to_string(), MOST_SHOWN),
        scalar => shown(scalar),
    }
}

pub(super) fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    let mut characters = text.chars();
    for character in characters.by_ref().take(MOST_SHOWN) {
        match character {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            character => push_visible(character, &mut quoted),
        }
    }
    quoted.push_str(if characters.next().is_some() { "...\"" } else { "\"" });
    quoted
}

pub(super) fn cut(text: &str, most: usize) -> String {
    let mut cut = String::new();
    let mut characters = text.chars();
    characters.by_ref().take(most).for_each(|character| push_visible(character, &mut cut));
    cut.push_str(if characters.next().is_some() { "..." } else { "" });
    cut
}

/// Control characters, and those that nobody sees or that turn the direction of others, are written
/// out.
fn push_visible(character: char, text: &mut String) {
    match character {
        '\n' => text.push_str("\\n"),
        '\r' => text.push_str("\\r"),
        '\t' => text.push_str("\\t"),
        character if !is_visible(character) => {
            let written_out = format!("\\u{:04x}", u32::from(character));
            text.push_str(&written_out);
        }
        character => text.push(character),
    }
}

pub(super) fn listed(texts: impl Iterator<Item = String>, between: &str) -> String {
    listed_up_to(MOST_LISTED, texts, between)
}

pub(super) fn listed_up_to(
    most: usize,
    mut texts: impl Iterator<Item = String>,
    between: &str,
) -> String {
    let shown: Vec<String> = texts.by_ref().take(most).collect();
    let more = texts.count();
    let shown = shown.join(between);
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}

pub(super) fn count(number: u64, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}

pub(super) fn properties(number: u64) -> String {
    if number == 1 { "1 property".to_owned() } else { format!("{number} properties") }
}

/// The names that another may have been meant for, nearest first.
pub(super) fn nearest<'n>(name: &str, known: impl Iterator<Item = &'n str>) -> Vec<String> {
    let short = |name: &str| name.chars().take(64).collect::<String>();
    let name = short(name);
    let mut near: Vec<_> = known
        .filter(|known| known.len() <= 256)
        .map(|known| (distance(&name, &short(known)), known))
        .filter(|(distance, known)| *distance <= known.len().max(name.len()) / 3)
        .collect();
    near.sort_unstable();
    near.into_iter().take(3).map(|(_, known)| cut(known, MOST_SHOWN)).collect()
}

pub(super) fn is_near(a: &str, b: &str) -> bool {
    a.len().abs_diff(b.len()) <= 2 && distance(a, b) <= 2
}

/// The edit distance of two texts.
pub(crate) fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.iter().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, to) in b.iter().enumerate() {
            let changed = diagonal + usize::from(from != to);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
