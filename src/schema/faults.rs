//! What is wrong with a value, in words that a model can correct itself by.

use std::fmt;

use jsonschema::error::{TypeKind, ValidationErrorKind as Kind};
use jsonschema::paths::Location;
use jsonschema::{JsonType, ValidationError};
use serde::Serialize;
use serde_json::{Map, Value};

use super::outline::{Outline, Secrets};
use super::words::{
    MOST_SHOWN, count, cut, described, listed, listed_up_to, nearest, option, properties, quoted,
    shown,
};

/// How many faults of one value are told.
const MOST_FAULTS: usize = 10;
/// How many bytes of a path are told, and of each text on it.
const MOST_OF_A_PATH: usize = 1_024;
const MOST_OF_A_TEXT: usize = 4_096;
/// How far the others are counted.
const MOST_COUNTED: usize = 1_000;

/// What is wrong with a value: at most ten faults, for a model to correct itself by.
///
/// `Display` gives a line for each. Its wording is no contract.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct SchemaValidationError {
    /// The first faults.
    pub faults: Vec<SchemaFault>,
    /// How many more there are, counted up to 1,000. They are not counted in a value that is too
    /// large for it.
    pub more: usize,
    /// The value was too large to look for all faults.
    #[serde(skip)]
    pub(super) cut: bool,
}

impl SchemaValidationError {
    /// The faults as they stand in a result's metadata.
    pub(crate) fn to_json(&self) -> Value {
        serde_json::to_value(&self.faults).unwrap_or_default()
    }

    pub(super) fn of(fault: SchemaFault) -> Self {
        let mut told = Self::default();
        told.push(|| fault);
        told
    }

    /// Adds a fault that is not there yet, or counts it.
    pub(super) fn push(&mut self, fault: impl FnOnce() -> SchemaFault) {
        if self.faults.len() == MOST_FAULTS {
            self.more = MOST_COUNTED.min(self.more + 1);
            return;
        }
        let fault = fault().cut();
        if !self.faults.contains(&fault) {
            self.faults.push(fault);
        }
    }
}

impl std::error::Error for SchemaValidationError {}

impl fmt::Display for SchemaValidationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, fault) in self.faults.iter().enumerate() {
            write!(f, "{}{fault}", if index == 0 { "" } else { "\n" })?;
        }
        match self.more {
            0 if self.cut => f.write_str("\nthe value is too large to look for more"),
            0 => Ok(()),
            MOST_COUNTED.. => write!(f, "\nand at least {} more", self.more),
            more => write!(f, "\nand {more} more"),
        }
    }
}

/// One thing that is wrong with a value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct SchemaFault {
    /// Where, as a JSON pointer into the value: empty for the value itself. One of more than 1,024
    /// bytes is cut short and ends in `...`.
    pub path: String,
    /// What would be right.
    pub expected: String,
    /// What is there: cut short, and hidden where it is secret.
    pub got: String,
    /// Names of properties that may have been meant.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nearest: Vec<String>,
    /// The sentence.
    #[serde(skip)]
    pub(super) said: String,
}

impl SchemaFault {
    /// The names in a value are as long as whoever made it likes.
    fn cut(mut self) -> Self {
        shorten(&mut self.path, MOST_OF_A_PATH);
        for text in [&mut self.expected, &mut self.got, &mut self.said] {
            shorten(text, MOST_OF_A_TEXT);
        }
        self
    }
}

fn shorten(text: &mut String, most: usize) {
    if text.len() > most {
        let fits = |end: &usize| text.is_char_boundary(*end);
        let end = (0..=most - "...".len()).rev().find(fits).unwrap_or_default();
        text.truncate(end);
        text.push_str("...");
    }
}

impl fmt::Display for SchemaFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at {}: {}", place_in_words(&self.path, "the top level"), self.said)
    }
}

pub(super) fn place_in_words(place: &str, root: &str) -> String {
    if place.is_empty() { root.to_owned() } else { cut(place, 2 * MOST_SHOWN) }
}

/// Puts what the validator found into words.
pub(super) struct Teller<'a> {
    pub(super) outline: &'a Outline<'a>,
    pub(super) document: &'a Value,
    pub(super) value: &'a Value,
    pub(super) secrets: Secrets<'a>,
}

impl<'a> Teller<'a> {
    pub(super) fn tell<'e>(
        &self,
        errors: impl Iterator<Item = ValidationError<'e>>,
    ) -> SchemaValidationError {
        let mut told = SchemaValidationError::default();
        for error in errors {
            if told.more == MOST_COUNTED {
                break;
            }
            self.add(&error, &mut told);
        }
        told
    }

    pub(super) fn add(&self, error: &ValidationError<'_>, told: &mut SchemaValidationError) {
        let place = error.instance_path().as_str();
        let (path, secret) = self.secrets.cover(self.value, place);
        let value = self.value.pointer(place).unwrap_or(self.value);
        match error.kind() {
            Kind::Required { property } => {
                let name = property.as_str().unwrap_or_default();
                told.push(|| self.missing(error, path, secret, value, name));
            }
            Kind::AdditionalProperties { unexpected }
            | Kind::UnevaluatedProperties { unexpected } => {
                let allowed = self.allowed(error);
                for name in unexpected {
                    told.push(|| unknown(path.clone(), secret, value, name, &allowed));
                }
            }
            Kind::AnyOf { context } | Kind::OneOfNotValid { context } => {
                match nearest_branch(error, value, context) {
                    Some(branch) => branch.iter().for_each(|error| self.add(error, told)),
                    None => told.push(|| {
                        let expected = either(self.alternatives(error, context));
                        plain(path, expected, described(value, secret))
                    }),
                }
            }
            // This is how it tells of `additionalProperties: false` where no property is named.
            Kind::FalseSchema if error.schema_path().as_str().ends_with("Properties") => {
                let allowed = self.allowed(error);
                for name in value.as_object().into_iter().flat_map(Map::keys) {
                    told.push(|| unknown(path.clone(), secret, value, name, &allowed));
                }
            }
            Kind::FalseSchema => told.push(|| no_value(path, described(value, secret))),
            kind => told.push(|| {
                let expected = self.expected(kind, error, secret);
                plain(path, expected, got(kind, value, secret))
            }),
        }
    }

    /// The subschema that an error is of.
    fn subschema(&self, error: &ValidationError<'_>) -> &'a Value {
        let keyword = error.schema_path().as_str();
        let place = keyword.rfind('/').map_or("", |end| &keyword[..end]);
        self.document.pointer(place).unwrap_or(&Value::Null)
    }

    fn missing(
        &self,
        error: &ValidationError<'_>,
        path: String,
        secret: bool,
        value: &Value,
        name: &str,
    ) -> SchemaFault {
        let known = self.outline.properties(self.subschema(error));
        let given = value.as_object().into_iter().flat_map(Map::keys).map(String::as_str);
        let given = given.take(200).filter(|given| !known.contains(given));
        let nearest = if secret { Vec::new() } else { nearest(name, given) };
        let expected = format!("the property {}", quoted(name));
        let mut said = format!("{expected} is missing");
        if !nearest.is_empty() {
            let given = listed(nearest.iter().map(|name| quoted(name)), " or ");
            said = format!("{said}; was {given} meant to be it?");
        }
        SchemaFault { path, expected, got: "nothing".to_owned(), nearest, said }
    }

    fn allowed(&self, error: &ValidationError<'_>) -> Allowed<'a> {
        let subschema = self.subschema(error);
        Allowed {
            names: self.outline.properties(subschema),
            patterns: self.outline.patterns(subschema),
        }
    }

    /// What an error of most kinds expects.
    fn expected(&self, kind: &Kind, error: &ValidationError<'_>, secret: bool) -> String {
        // What a secret may be and what it must not be can say what it is.
        let hidden = match kind {
            Kind::Not { .. } => self.secrets.any(),
            Kind::Enum { .. }
            | Kind::Constant { .. }
            | Kind::Referencing(_)
            | Kind::Custom { .. } => secret,
            _ => false,
        };
        if hidden {
            return "another value".to_owned();
        }
        let subschema = || self.subschema(error);
        match kind {
            Kind::Type { kind: TypeKind::Single(kind) } => type_name(*kind).to_owned(),
            Kind::Type { kind: TypeKind::Multiple(kinds) } => {
                listed(kinds.iter().map(|kind| type_name(kind).to_owned()), " or ")
            }
            Kind::Enum { options } => match options.as_array().map(Vec::as_slice) {
                Some([only]) => option(only),
                Some(options) => {
                    format!("one of {}", listed(options.iter().map(option), ", "))
                }
                None => "one of the allowed values".to_owned(),
            },
            Kind::Constant { expected_value } => option(expected_value),
            Kind::Not { schema } => {
                format!("a value that does not fit {}", cut(&schema.to_string(), MOST_SHOWN))
            }
            Kind::Pattern { pattern } => {
                format!("a string that matches the pattern {}", quoted(pattern))
            }
            Kind::BacktrackLimitExceeded { .. } | Kind::RegexEngineFailure { .. } => {
                match subschema().get("pattern").and_then(Value::as_str) {
                    Some(pattern) => {
                        format!("a string that matches the pattern {}", quoted(pattern))
                    }
                    None => "a string that matches a pattern".to_owned(),
                }
            }
            Kind::Format { format } => match example(format) {
                Some(example) => format!("a string in the format {format}, as {example}"),
                None => format!("a string in the format {}", cut(format, MOST_SHOWN)),
            },
            Kind::MinLength { limit } => {
                format!("a string of at least {}", count(*limit, "character"))
            }
            Kind::MaxLength { limit } => {
                format!("a string of at most {}", count(*limit, "character"))
            }
            Kind::MinItems { limit } => format!("at least {}", count(*limit, "item")),
            Kind::MaxItems { limit } => format!("at most {}", count(*limit, "item")),
            Kind::AdditionalItems { limit } => format!("at most {}", count(*limit as u64, "item")),
            Kind::UnevaluatedItems { .. } => "no items but those of the schema".to_owned(),
            Kind::UniqueItems => "items that all differ".to_owned(),
            Kind::Contains => {
                let bound = |key: &str| subschema().get(key).and_then(Value::as_u64);
                let least = bound("minContains").unwrap_or(1);
                let items = match bound("maxContains") {
                    Some(most) => format!("{least} to {}", count(most, "item")),
                    None => format!("at least {}", count(least, "item")),
                };
                format!("{items} to fit the schema's `contains`")
            }
            Kind::MinProperties { limit } => format!("at least {}", properties(*limit)),
            Kind::MaxProperties { limit } => format!("at most {}", properties(*limit)),
            Kind::PropertyNames { error } => {
                let inner = match error.kind() {
                    Kind::AnyOf { .. } | Kind::OneOfNotValid { .. } => "another".to_owned(),
                    kind => self.expected(kind, error, secret),
                };
                format!("each property name to be {inner}")
            }
            Kind::Minimum { limit } => format!("a number of at least {}", shown(limit)),
            Kind::Maximum { limit } => format!("a number of at most {}", shown(limit)),
            Kind::ExclusiveMinimum { limit } => format!("a number greater than {}", shown(limit)),
            Kind::ExclusiveMaximum { limit } => format!("a number less than {}", shown(limit)),
            Kind::MultipleOf { multiple_of } => format!("a multiple of {multiple_of}"),
            Kind::FalseSchema => "no value".to_owned(),
            Kind::OneOfMultipleValid { context } => {
                format!("only one of {} alternatives to fit", context.len())
            }
            Kind::ContentEncoding { content_encoding } => {
                format!("a string encoded as {}", cut(content_encoding, MOST_SHOWN))
            }
            Kind::ContentMediaType { content_media_type } => {
                format!("a string that holds {}", cut(content_media_type, MOST_SHOWN))
            }
            Kind::FromUtf8 { .. } => "a string whose content is text in UTF-8".to_owned(),
            _ => cut(&error.masked().to_string(), 4 * MOST_SHOWN),
        }
    }

    /// What the branches of an `anyOf` or `oneOf` expect, none of them nearer than the others.
    fn alternatives(
        &self,
        error: &ValidationError<'_>,
        context: &[Vec<ValidationError<'_>>],
    ) -> Vec<String> {
        let mut alternatives: Vec<String> = Vec::new();
        for faults in context.iter().take(50) {
            let told = match faults.as_slice() {
                [only] => self.alternative(error.instance_path(), only),
                faults => {
                    let told = faults.iter().take(2);
                    let told = told.flat_map(|it| self.alternative(error.instance_path(), it));
                    vec![listed(told, " and ")]
                }
            };
            for alternative in told {
                if !alternatives.contains(&alternative) {
                    alternatives.push(alternative);
                }
            }
        }
        alternatives
    }

    fn alternative(&self, above: &Location, error: &ValidationError<'_>) -> Vec<String> {
        let place = error.instance_path().as_str();
        let (path, secret) = self.secrets.cover(self.value, place);
        let expected = match error.kind() {
            Kind::Required { property } => format!("the property {}", shown(property)),
            Kind::AdditionalProperties { .. } | Kind::UnevaluatedProperties { .. } if secret => {
                "fewer properties".to_owned()
            }
            Kind::AdditionalProperties { unexpected }
            | Kind::UnevaluatedProperties { unexpected } => {
                let names = unexpected.iter().map(|name| quoted(name));
                format!("no property {}", listed_up_to(3, names, ", "))
            }
            Kind::AnyOf { context } | Kind::OneOfNotValid { context } => {
                return self.alternatives(error, context);
            }
            kind => self.expected(kind, error, secret),
        };
        vec![if place == above.as_str() {
            expected
        } else {
            format!("{expected} at {}", place_in_words(&path, ""))
        }]
    }
}

/// Alternatives as one text.
fn either(alternatives: Vec<String>) -> String {
    let simple = !alternatives.iter().any(|alternative| alternative.contains(", "));
    listed_up_to(4, alternatives.into_iter(), if simple { " or " } else { ", or " })
}

/// The branch that was most likely meant: of those that an object or array is of the right type
/// for, that have its constants and know its properties, the only one.
fn nearest_branch<'e, 'v>(
    error: &ValidationError<'_>,
    value: &Value,
    context: &'e [Vec<ValidationError<'v>>],
) -> Option<&'e [ValidationError<'v>]> {
    if !matches!(value, Value::Array(_) | Value::Object(_)) {
        return None;
    }
    let is_constant = |kind: &Kind| matches!(kind, Kind::Constant { .. } | Kind::Enum { .. });
    let of_wrong_type = |fault: &ValidationError<'_>| {
        fault.instance_path() == error.instance_path()
            && (matches!(fault.kind(), Kind::Type { .. } | Kind::FalseSchema)
                || is_constant(fault.kind()))
    };
    let of_other_constants = |fault: &ValidationError<'_>| is_constant(fault.kind());
    let of_other_names = |fault: &ValidationError<'_>| {
        fault.instance_path() == error.instance_path()
            && matches!(
                fault.kind(),
                Kind::Required { .. }
                    | Kind::AdditionalProperties { .. }
                    | Kind::UnevaluatedProperties { .. }
            )
    };
    let mut branches: Vec<&[ValidationError<'_>]> = context.iter().map(Vec::as_slice).collect();
    let rules: [&dyn Fn(&ValidationError<'_>) -> bool; 3] =
        [&of_wrong_type, &of_other_constants, &of_other_names];
    for rule in rules {
        branches.retain(|faults| !faults.iter().any(rule));
        if branches.len() < 2 {
            break;
        }
    }
    match branches.as_slice() {
        [only] if !only.is_empty() => Some(only),
        _ => None,
    }
}

struct Allowed<'a> {
    names: Vec<&'a str>,
    patterns: Vec<&'a str>,
}

fn unknown(
    path: String,
    secret: bool,
    value: &Value,
    name: &str,
    allowed: &Allowed<'_>,
) -> SchemaFault {
    let not_given = |known: &&str| value.get(*known).is_none();
    let nearest = if secret {
        Vec::new()
    } else {
        nearest(name, allowed.names.iter().copied().filter(not_given))
    };
    let name = if secret { "(hidden)".to_owned() } else { quoted(name) };
    let mut list = listed(allowed.names.iter().map(|name| quoted(name)), ", ");
    if !allowed.patterns.is_empty() {
        let patterns = listed_up_to(3, allowed.patterns.iter().map(|name| quoted(name)), ", ");
        let between = if list.is_empty() { "" } else { ", " };
        list = format!("{list}{between}names that match {patterns}");
    }
    let mut said = format!("there is no property {name}");
    if !nearest.is_empty() {
        let meant = listed(nearest.iter().map(|name| quoted(name)), " or ");
        said = format!("{said}; did you mean {meant}?");
    }
    let between = if nearest.is_empty() { ";" } else { "" };
    let (expected, said) = if list.is_empty() {
        ("no property".to_owned(), format!("{said}{between} none is allowed"))
    } else {
        (format!("only {list}"), format!("{said}{between} allowed: {list}"))
    };
    SchemaFault { path, expected, got: format!("the property {name}"), nearest, said }
}

fn no_value(path: String, got: String) -> SchemaFault {
    let said = format!("no value is allowed, got {got}");
    SchemaFault { path, expected: "no value".to_owned(), got, nearest: Vec::new(), said }
}

pub(super) fn plain(
    path: String,
    expected: impl Into<String>,
    got: impl Into<String>,
) -> SchemaFault {
    let (expected, got) = (expected.into(), got.into());
    let said = format!("expected {expected}, got {got}");
    SchemaFault { path, expected, got, nearest: Vec::new(), said }
}

/// What stands where an error is.
fn got(kind: &Kind, value: &Value, secret: bool) -> String {
    let described = described(value, secret);
    match (kind, value) {
        (Kind::MinLength { .. } | Kind::MaxLength { .. }, Value::String(text)) if !secret => {
            format!("{described} of {}", count(text.chars().count() as u64, "character"))
        }
        (Kind::BacktrackLimitExceeded { .. } | Kind::RegexEngineFailure { .. }, _) => {
            format!("{described}, on which the pattern could not be evaluated")
        }
        (Kind::OneOfMultipleValid { context }, _) => {
            let fits = context.iter().zip(1..).filter(|(faults, _)| faults.is_empty());
            let fits = listed(fits.map(|(_, number)| i64::to_string(&number)), " and ");
            format!("{described}, which fits alternatives {fits}")
        }
        (Kind::PropertyNames { error }, _) if !secret => match error.instance().as_str() {
            Some(name) => format!("the property {}", quoted(name)),
            None => described,
        },
        (Kind::UniqueItems, _) => format!("{described}, some of them equal"),
        _ => described,
    }
}

fn type_name(kind: JsonType) -> &'static str {
    match kind {
        JsonType::Array => "an array",
        JsonType::Boolean => "true or false",
        JsonType::Integer => "an integer",
        JsonType::Null => "null",
        JsonType::Number => "a number",
        JsonType::Object => "an object",
        JsonType::String => "a string",
    }
}

fn example(format: &str) -> Option<&'static str> {
    Some(match format {
        "date-time" => "2026-01-31T12:00:00Z",
        "date" => "2026-01-31",
        "time" => "12:00:00Z",
        "duration" => "P1DT12H",
        "email" => "name@example.com",
        "hostname" => "www.example.com",
        "ipv4" => "192.0.2.1",
        "ipv6" => "2001:db8::1",
        "uri" => "https://example.com/page",
        "uuid" => "123e4567-e89b-12d3-a456-426614174000",
        "json-pointer" => "/items/0",
        _ => return None,
    })
}
