//! How much a plan and a call may use: quotas of calls, and the size of an output. Pure.

use std::fmt::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde_json::{Map, Number, Value};

use crate::name::ToolName;

/// How many calls a plan, and all plans under it, may make: of all tools, or of one.
#[derive(Debug)]
pub(crate) struct Quota {
    tool: Option<ToolName>,
    limit: u64,
    used: AtomicU64,
}

impl Quota {
    pub(crate) fn new(tool: Option<ToolName>, limit: u64) -> Arc<Self> {
        Arc::new(Self { tool, limit, used: AtomicU64::new(0) })
    }

    fn is_about(&self, tool: &ToolName) -> bool {
        self.tool.as_ref().is_none_or(|own| own == tool)
    }
}

/// Reserves a call in every quota that is about the tool, or in none: then an error says which one
/// is used up.
pub(crate) fn reserve(quotas: &[Arc<Quota>], tool: &ToolName) -> Result<(), String> {
    let reserve = |quota: &Quota| {
        let more = |used: u64| (used < quota.limit).then_some(used + 1);
        quota.used.fetch_update(Relaxed, Relaxed, more).is_ok()
    };
    for (at, quota) in quotas.iter().enumerate() {
        if quota.is_about(tool) && !reserve(quota) {
            give_back(&quotas[..at], tool);
            let whose = quota.tool.as_ref().map_or("the plan", |_| "the tool in this plan");
            return Err(format!("the {} calls that {whose} may have are used up", quota.limit));
        }
    }
    Ok(())
}

/// Gives back what [`reserve`] reserved.
pub(crate) fn give_back(quotas: &[Arc<Quota>], tool: &ToolName) {
    for quota in quotas.iter().filter(|quota| quota.is_about(tool)) {
        quota.used.fetch_sub(1, Relaxed);
    }
}

// ===== the size of an output =====

/// The bytes of a value as JSON, counted without being written; `None` where arrays and objects are
/// nested deeper than that. Every call pays for this.
pub(crate) fn measure(value: &Value, deepest: usize) -> Option<usize> {
    let around = |members: usize| 2 + members.saturating_sub(1);
    // What has nothing in it needs no call of its own.
    let part = |value: &Value, deepest| match value {
        Value::Array(_) | Value::Object(_) => measure(value, deepest),
        plain => Some(size_of_plain(plain)),
    };
    match value {
        Value::Array(items) => {
            let below = deepest.checked_sub(1)?;
            let mut size = around(items.len());
            for item in items {
                size += part(item, below)?;
            }
            Some(size)
        }
        Value::Object(fields) => {
            let below = deepest.checked_sub(1)?;
            let mut size = around(fields.len());
            for (key, field) in fields {
                size += size_of_text(key) + 1 + part(field, below)?;
            }
            Some(size)
        }
        plain => Some(size_of_plain(plain)),
    }
}

#[inline]
fn size_of_plain(value: &Value) -> usize {
    match value {
        Value::Bool(false) => 5,
        Value::Number(number) => match number.as_u64() {
            Some(number) => number.checked_ilog10().unwrap_or(0) as usize + 1,
            None => size_of_number(number),
        },
        Value::String(text) => size_of_text(text),
        _ => 4,
    }
}

/// The bytes of a value as JSON, however deep.
pub(crate) fn size_of(value: &Value) -> usize {
    measure(value, usize::MAX).unwrap_or(usize::MAX)
}

fn size_of_number(number: &Number) -> usize {
    struct Count(usize);
    impl Write for Count {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            self.0 += text.len();
            Ok(())
        }
    }
    let mut count = Count(0);
    // Counting does not fail.
    count.write_fmt(format_args!("{number}")).unwrap_or_default();
    count.0
}

#[inline]
fn size_of_text(text: &str) -> usize {
    let as_it_is = |byte: u8| byte >= 32 && byte != b'"' && byte != b'\\';
    if text.bytes().all(as_it_is) { 2 + text.len() } else { size_of_escaped(text) }
}

#[cold]
fn size_of_escaped(text: &str) -> usize {
    2 + text.bytes().map(size_of_byte).sum::<usize>()
}

fn size_of_byte(byte: u8) -> usize {
    match byte {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' | 8 | 12 => 2,
        0..=31 => 6,
        _ => 1,
    }
}

/// Drops a value of any depth: its own drop recurses.
pub(crate) fn take_apart(value: Value) {
    let mut parts = vec![value];
    while let Some(part) = parts.pop() {
        match part {
            Value::Array(items) => parts.extend(items),
            Value::Object(fields) => parts.extend(fields.into_iter().map(|(_, field)| field)),
            _ => {}
        }
    }
}

/// The longest text of an error that is kept, in bytes; a result may have as much in any case.
pub(crate) const MOST_ERROR_TEXT: usize = 4096;
/// What ends a text that was cut.
const MARK: &str = " [cut]";

/// Cuts a value to at most so many bytes of JSON, or to the least that its kind has (`0`, `""`,
/// `[]`, `{}`, `null`).
///
/// It keeps its kind and its beginning: the first items, the first fields, the start of a text; the
/// first of them that does not fit is cut in its turn, and what comes after it goes.
pub(crate) fn cut(value: Value, most: usize) -> Value {
    if size_of(&value) <= most {
        return value;
    }
    match value {
        Value::String(text) => Value::String(cut_text(&text, most.saturating_sub(2))),
        Value::Array(items) => {
            let mut kept = Vec::new();
            let mut left = most.saturating_sub(2);
            for item in items {
                let comma = usize::from(!kept.is_empty());
                let size = size_of(&item) + comma;
                if size <= left {
                    left -= size;
                    kept.push(item);
                    continue;
                }
                let part = cut(item, left.saturating_sub(comma));
                if !part.is_null() && size_of(&part) + comma <= left {
                    kept.push(part);
                }
                break;
            }
            Value::Array(kept)
        }
        Value::Object(fields) => {
            let mut kept = Map::new();
            let mut left = most.saturating_sub(2);
            for (key, field) in fields {
                let around =
                    size_of(&Value::from(key.as_str())) + 1 + usize::from(!kept.is_empty());
                let size = size_of(&field) + around;
                if size <= left {
                    left -= size;
                    kept.insert(key, field);
                    continue;
                }
                let part = cut(field, left.saturating_sub(around));
                if !part.is_null() && size_of(&part) + around <= left {
                    kept.insert(key, part);
                }
                break;
            }
            Value::Object(kept)
        }
        // A number or a word is whole or not there.
        Value::Null | Value::Bool(_) | Value::Number(_) => Value::Null,
    }
}

/// Cuts a text to at most so many bytes, and a mark.
pub(crate) fn cut_plain(text: &mut String, most: usize) {
    if text.len() > most {
        let at = (0..=most).rev().find(|at| text.is_char_boundary(*at));
        text.truncate(at.unwrap_or(0));
        text.push_str(MARK);
        text.shrink_to_fit();
    }
}

/// The start of a text that, written as JSON without its quotes, has at most so many bytes.
fn cut_text(text: &str, most: usize) -> String {
    let Some(room) = most.checked_sub(MARK.len()) else {
        return String::new();
    };
    let mut used = 0;
    let fits = |(at, c): (usize, char)| {
        used += text[at..at + c.len_utf8()].bytes().map(size_of_byte).sum::<usize>();
        (used <= room).then_some(at + c.len_utf8())
    };
    let end = text.char_indices().map_while(fits).last().unwrap_or(0);
    format!("{}{MARK}", &text[..end])
}
