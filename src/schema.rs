//! Compiled JSON Schemas, and what is wrong with a value in words that a model can correct itself by.
//!
//! Schemas come from MCP servers and skills, values from models: neither is trusted. Nothing is
//! fetched, and what a validator may be asked to do is bounded before it is built or run.

use std::collections::HashMap;
use std::fmt;
use std::hash::BuildHasher;
use std::sync::{Arc, OnceLock, Weak};

use foldhash::fast::FixedState;
use jsonschema::error::{TypeKind, ValidationErrorKind as Kind};
use jsonschema::paths::Location;
use jsonschema::{
    Draft, JsonType, PatternOptions, ReferencingError, Retrieve, Uri, ValidationError, Validator,
};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::contain::contain;

pub(crate) use words::distance;

use outline::{Outline, Secrets};
use words::{
    MOST_SHOWN, count, cut, described, listed, listed_up_to, nearest, option, properties, quoted,
    shown,
};

mod outline;
mod words;

/// How many faults of one value are told.
const MOST_FAULTS: usize = 10;
/// How far the others are counted.
const MOST_COUNTED: usize = 1_000;
/// How much a walk for faults may cost: about 20 ms.
const MOST_WALKED: usize = 100_000;
/// How often a pattern that looks around or back may try again on one text: about 1 ms. Without a
/// limit such a pattern can take for ever; the others take linear time and know no limit.
const MOST_BACKTRACKS: usize = 20_000;
/// How many schemas of a pool stay compiled although nobody used them yet.
const MOST_COMPILED: usize = 1_000;

/// A compiled JSON Schema. Clones share it.
///
/// A schema that names no draft in `$schema` is of draft 2020-12. Nothing is fetched: a reference
/// that leads out of the schema is refused. A pattern that looks around or back and does not come to
/// an end on a text makes that text invalid.
///
/// # Examples
///
/// ```
/// use serde_json::json;
/// use toolscope::Schema;
///
/// let schema = Schema::new(&json!({
///     "type": "object",
///     "properties": { "path": { "type": "string" }, "limit": { "type": "integer" } },
///     "required": ["path"],
///     "additionalProperties": false
/// }))?;
/// assert!(schema.is_valid(&json!({ "path": "README.md" })));
///
/// let error = schema.check(&json!({ "pth": "README.md", "limit": "10" })).unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "at /limit: expected an integer, got the string \"10\"\n\
///      at the top level: there is no property \"pth\"; did you mean \"path\"? \
///      allowed: \"limit\", \"path\"\n\
///      at the top level: the property \"path\" is missing; \"pth\" is like it"
/// );
/// # Ok::<(), toolscope::InvalidSchema>(())
/// ```
#[derive(Clone)]
pub struct Schema(Arc<Shared>);

struct Shared {
    /// The document with its keys in order: equal schemas have equal texts, and a text takes a
    /// tenth of the memory of a document.
    text: Box<str>,
    formats: bool,
    /// How deep a value may be nested, where that matters.
    deepest: Option<usize>,
    validator: OnceLock<Validator>,
    /// Counts among the schemas of a pool that stay compiled.
    _seat: Option<Arc<()>>,
}

impl Schema {
    /// Compiles a schema. `format` is an annotation and checks nothing.
    ///
    /// # Errors
    ///
    /// When it is no schema, names a draft that is not known, refers to what is not in it, or would
    /// take a validator out of bounds: nested or chained too deep.
    pub fn new(schema: &Value) -> Result<Self, InvalidSchema> {
        Self::compiled(schema, false)
    }

    /// Compiles a schema in which `format` is checked too.
    ///
    /// # Errors
    ///
    /// As [`Schema::new`].
    pub fn with_formats(schema: &Value) -> Result<Self, InvalidSchema> {
        Self::compiled(schema, true)
    }

    fn compiled(schema: &Value, formats: bool) -> Result<Self, InvalidSchema> {
        let deepest = survey(schema)?;
        let validator = OnceLock::from(compile(schema, formats)?);
        let text = text_of(schema);
        Ok(Self(Arc::new(Shared { text, formats, deepest, validator, _seat: None })))
    }

    /// Whether a value fits. Allocates nothing, unless the schema has references or patterns that
    /// need it.
    pub fn is_valid(&self, value: &Value) -> bool {
        self.0.follows(value) && self.0.validator().is_valid(value)
    }

    /// Checks a value and tells what is wrong with it.
    ///
    /// # Errors
    ///
    /// With the first ten faults. A value under `"writeOnly": true` or `"format": "password"` is
    /// not in them, nor in their `Debug`.
    pub fn check(&self, value: &Value) -> Result<(), SchemaValidationError> {
        if self.is_valid(value) {
            return Ok(());
        }
        Err(self.0.faults(value))
    }
}

impl fmt::Debug for Schema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Schema").field(&self.0.text).finish()
    }
}

impl Shared {
    fn validator(&self) -> &Validator {
        self.validator.get_or_init(|| {
            compile(&self.document(), self.formats)
                .expect("BUG: a schema that was compiled once can be compiled again")
        })
    }

    fn document(&self) -> Value {
        serde_json::from_str(&self.text).expect("BUG: the text of a schema was written as JSON")
    }

    /// Whether the references of the schema may be followed into a value.
    fn follows(&self, value: &Value) -> bool {
        self.deepest.is_none_or(|most| !outline::is_deeper_than(value, most))
    }

    fn faults(&self, value: &Value) -> SchemaValidationError {
        if let (false, Some(most)) = (self.follows(value), self.deepest) {
            let expected = format!("a value nested at most {most} deep");
            let said = format!("expected {expected}, it is nested deeper");
            let got = "a value nested deeper".to_owned();
            let fault = SchemaFault { path: String::new(), expected, got, nearest: vec![], said };
            return SchemaValidationError { faults: vec![fault], more: 0 };
        }
        let document = self.document();
        let outline = Outline::new(&document);
        let teller =
            Teller { outline: &outline, document: &document, value, secrets: outline.secrets() };
        let found = contain(|| {
            if !outline.costs_more_than(MOST_WALKED, value) {
                return teller.tell(self.validator().iter_errors(value));
            }
            if !outline.branches() {
                return teller.tell(self.validator().validate(value).err().into_iter());
            }
            teller.tell(std::iter::empty())
        });
        found.unwrap_or_else(|_| teller.tell(std::iter::empty()))
    }
}

/// The bounds of a document that may be compiled.
fn survey(schema: &Value) -> Result<Option<usize>, InvalidSchema> {
    let invalid = |place: &str, problem: String| InvalidSchema { place: place.to_owned(), problem };
    if !matches!(schema, Value::Object(_) | Value::Bool(_)) {
        let problem = format!("a schema is an object, true or false, this is {}", shown(schema));
        return Err(invalid("", problem));
    }
    if outline::is_deeper_than(schema, outline::MOST_NESTED) {
        let problem = format!("it is nested more than {} deep", outline::MOST_NESTED);
        return Err(invalid("", problem));
    }
    if let Some(draft) = schema.get("$schema").and_then(Value::as_str) {
        if Draft::from_schema_uri(draft) == Draft::Unknown {
            let problem = format!(
                "{} is not a known draft: known are draft-04, draft-06, draft-07, 2019-09 and \
                 2020-12 (\"https://json-schema.org/draft/2020-12/schema\"), which is also what a \
                 schema without `$schema` is taken for",
                quoted(draft)
            );
            return Err(invalid("/$schema", problem));
        }
    }
    Outline::new(schema)
        .deepest()
        .map_err(|refused| InvalidSchema { place: refused.place, problem: refused.problem })
}

/// Fetches nothing.
struct Offline;

impl Retrieve for Offline {
    fn retrieve(&self, _: &Uri<String>) -> Result<Value, Box<dyn std::error::Error + Send + Sync>> {
        Err("nothing is fetched".into())
    }
}

/// Compiles a document that was surveyed.
fn compile(document: &Value, formats: bool) -> Result<Validator, InvalidSchema> {
    let options = jsonschema::options()
        .should_validate_formats(formats)
        .with_retriever(Offline)
        .with_pattern_options(PatternOptions::fancy_regex().backtrack_limit(MOST_BACKTRACKS));
    match contain(|| options.build(document).map_err(|error| InvalidSchema::new(document, &error)))
    {
        Ok(built) => built,
        Err(panic) => {
            let problem = format!("it cannot be compiled: {panic}");
            Err(InvalidSchema { place: String::new(), problem })
        }
    }
}

/// A document as text, its keys in order.
fn text_of(document: &Value) -> Box<str> {
    fn write(value: &Value, text: &mut String) {
        match value {
            Value::Array(items) => {
                text.push('[');
                for (index, item) in items.iter().enumerate() {
                    text.push_str(if index == 0 { "" } else { "," });
                    write(item, text);
                }
                text.push(']');
            }
            Value::Object(members) => {
                let mut members: Vec<_> = members.iter().collect();
                members.sort_by_key(|(key, _)| *key);
                text.push('{');
                for (index, (key, member)) in members.into_iter().enumerate() {
                    text.push_str(if index == 0 { "" } else { "," });
                    text.push_str(&Value::String(key.clone()).to_string());
                    text.push(':');
                    write(member, text);
                }
                text.push('}');
            }
            scalar => text.push_str(&scalar.to_string()),
        }
    }
    let mut text = String::new();
    write(document, &mut text);
    text.into()
}

/// The schemas of a registry: equal ones share a validator. The first [`MOST_COMPILED`] of those in
/// use stay compiled; one beyond that is compiled to be checked, given up, and compiled again when
/// it is first used. A schema that nobody uses any more is gone.
#[derive(Default)]
pub(crate) struct SchemaPool {
    known: HashMap<u64, Vec<Weak<Shared>>, FixedState>,
    /// How many are in `known`, and how many there were when the unused ones were last removed.
    entries: usize,
    swept: usize,
    /// Held by each schema that stays compiled.
    seats: Arc<()>,
}

impl SchemaPool {
    pub(crate) fn compile(
        &mut self,
        schema: &Value,
        formats: bool,
    ) -> Result<Schema, InvalidSchema> {
        let deepest = survey(schema)?;
        let text = text_of(schema);
        let key = FixedState::default().hash_one((&*text, formats));
        let same = |shared: &Arc<Shared>| shared.formats == formats && shared.text == text;
        let known = self.known.get(&key).into_iter().flatten();
        if let Some(shared) = known.filter_map(Weak::upgrade).find(same) {
            return Ok(Schema(shared));
        }
        let validator = compile(schema, formats)?;
        let seat =
            (Arc::strong_count(&self.seats) <= MOST_COMPILED).then(|| Arc::clone(&self.seats));
        let validator = if seat.is_some() { OnceLock::from(validator) } else { OnceLock::new() };
        let shared = Arc::new(Shared { text, formats, deepest, validator, _seat: seat });
        self.sweep();
        self.known.entry(key).or_default().push(Arc::downgrade(&shared));
        self.entries += 1;
        Ok(Schema(shared))
    }

    /// Removes what nobody uses, once as many were added as were left.
    fn sweep(&mut self) {
        if self.entries < 2 * self.swept.max(32) {
            return;
        }
        self.known.retain(|_, schemas| {
            schemas.retain(|schema| schema.strong_count() > 0);
            !schemas.is_empty()
        });
        self.entries = self.known.values().map(Vec::len).sum();
        self.swept = self.entries;
    }
}

/// A schema that cannot be compiled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the schema is invalid{}: {problem}", at(place, " at its root"))]
pub struct InvalidSchema {
    place: String,
    problem: String,
}

impl InvalidSchema {
    /// Where, as a JSON pointer into the schema: empty for its root.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// What is wrong there, and what would be right.
    pub fn problem(&self) -> &str {
        &self.problem
    }

    fn new(document: &Value, error: &ValidationError<'_>) -> Self {
        let outline = Outline::new(document);
        if let Kind::Referencing(error) = error.kind() {
            return Self::of_reference(&outline, error);
        }
        // What is wrong with a schema is told in terms of the schema of schemas, which is not at hand.
        let nothing = Value::Null;
        let outline = Outline::new(&nothing);
        let secrets = Secrets::none();
        let teller = Teller { outline: &outline, document: &nothing, value: document, secrets };
        let mut told = Vec::new();
        teller.add(error, &mut told);
        match told.into_iter().next() {
            Some(fault) => Self { place: fault.path, problem: fault.said },
            None => Self { place: error.instance_path().to_string(), problem: error.to_string() },
        }
    }

    fn of_reference(outline: &Outline<'_>, error: &ReferencingError) -> Self {
        let has_fragment = |wanted: &str| {
            let wanted = wanted.trim_start_matches('#').to_owned();
            outline.place_of_reference(|text| {
                text.split_once('#').is_some_and(|(_, fragment)| fragment == wanted)
            })
        };
        let leads_out = |uri: &str| {
            let document = |text: &str| {
                let document = text.split('#').next().unwrap_or_default();
                document.trim_start_matches(['.', '/']).to_owned()
            };
            let uri = document(uri);
            let place = outline.place_of_reference(|text| {
                !text.starts_with('#') && uri.ends_with(&document(text))
            });
            place.or_else(|| outline.place_of_reference(|text| !text.starts_with('#')))
        };
        let (place, problem) = match error {
            ReferencingError::Unretrievable { uri, .. } => {
                let problem = format!(
                    "{} is not in the schema, and nothing is fetched: put what it refers to under \
                     `$defs` and refer to it as \"#/$defs/name\"",
                    quoted(uri)
                );
                (leads_out(uri), problem)
            }
            ReferencingError::PointerToNowhere { pointer } => {
                let problem = format!("nothing stands at {} in the schema", quoted(pointer));
                (has_fragment(pointer), problem)
            }
            ReferencingError::NoSuchAnchor { anchor }
            | ReferencingError::InvalidAnchor { anchor } => {
                let problem = format!("there is no anchor {} in the schema", quoted(anchor));
                (has_fragment(anchor), problem)
            }
            other => (None, format!("a reference cannot be followed: {other}")),
        };
        Self { place: place.unwrap_or_default(), problem }
    }
}

/// What is wrong with a value: at most ten faults, for a model to correct itself by.
///
/// `Display` gives a line for each. Its wording is no contract.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, thiserror::Error)]
#[error("{}", lines(faults, *more))]
#[non_exhaustive]
pub struct SchemaValidationError {
    /// The first faults.
    pub faults: Vec<SchemaFault>,
    /// How many more there are, counted up to 1,000.
    pub more: usize,
}

impl SchemaValidationError {
    /// The faults as they stand in a result's metadata.
    pub(crate) fn to_json(&self) -> Value {
        serde_json::to_value(&self.faults).unwrap_or_default()
    }
}

/// One thing that is wrong with a value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct SchemaFault {
    /// Where, as a JSON pointer into the value: empty for the value itself.
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
    said: String,
}

impl fmt::Display for SchemaFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", at(&self.path, "at the top level").trim_start(), self.said)
    }
}

fn at(path: &str, root: &str) -> String {
    if path.is_empty() { root.to_owned() } else { format!(" at {}", cut(path, 2 * MOST_SHOWN)) }
}

fn lines(faults: &[SchemaFault], more: usize) -> String {
    let mut lines: Vec<String> = faults.iter().map(SchemaFault::to_string).collect();
    match more {
        0 => {}
        MOST_COUNTED.. => lines.push(format!("and at least {more} more")),
        more => lines.push(format!("and {more} more")),
    }
    lines.join("\n")
}

/// Puts what the validator found into words.
struct Teller<'a> {
    outline: &'a Outline<'a>,
    document: &'a Value,
    value: &'a Value,
    secrets: Secrets<'a>,
}

impl<'a> Teller<'a> {
    fn tell<'e>(&self, errors: impl Iterator<Item = ValidationError<'e>>) -> SchemaValidationError {
        let mut faults: Vec<SchemaFault> = Vec::new();
        let mut more = 0;
        for error in errors {
            if faults.len() < MOST_FAULTS {
                self.add(&error, &mut faults);
            } else {
                more += match error.kind() {
                    Kind::AdditionalProperties { unexpected }
                    | Kind::UnevaluatedProperties { unexpected } => unexpected.len(),
                    _ => 1,
                };
            }
            more += faults.len().saturating_sub(MOST_FAULTS);
            faults.truncate(MOST_FAULTS);
            if more >= MOST_COUNTED {
                more = MOST_COUNTED;
                break;
            }
        }
        if faults.is_empty() {
            let (path, secret) = self.secrets.cover("");
            let got =
                format!("{}, too large to say where it does not", described(self.value, secret));
            faults.push(plain(path, "a value that fits the schema", got));
        }
        SchemaValidationError { faults, more }
    }

    /// Adds the faults of one error, leaving out those that are there.
    fn add(&self, error: &ValidationError<'_>, faults: &mut Vec<SchemaFault>) {
        let mut push = |fault: SchemaFault| {
            if !faults.contains(&fault) {
                faults.push(fault);
            }
        };
        let place = error.instance_path().as_str();
        let (path, secret) = self.secrets.cover(place);
        let value = self.value.pointer(place).unwrap_or(self.value);
        match error.kind() {
            Kind::Required { property } => {
                push(self.missing(
                    error,
                    path,
                    secret,
                    value,
                    property.as_str().unwrap_or_default(),
                ));
            }
            Kind::AdditionalProperties { unexpected }
            | Kind::UnevaluatedProperties { unexpected } => {
                let allowed = self.allowed(error);
                for name in unexpected {
                    push(unknown(path.clone(), secret, value, name, &allowed));
                }
            }
            Kind::AnyOf { context } | Kind::OneOfNotValid { context } => {
                if let Some(branch) = nearest_branch(error, context) {
                    for error in branch {
                        self.add(error, faults);
                    }
                } else {
                    let expected = self.alternatives(error, context);
                    push(plain(path, expected, described(value, secret)));
                }
            }
            kind => {
                let expected = self.expected(kind, error, secret);
                push(plain(path, expected, got(kind, value, secret)));
            }
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
            said += &format!(
                "; {} is like it",
                listed(nearest.iter().map(|name| quoted(name)), " and ")
            );
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
        let subschema = || self.subschema(error);
        match kind {
            Kind::Type { kind: TypeKind::Single(kind) } => type_name(*kind).to_owned(),
            Kind::Type { kind: TypeKind::Multiple(kinds) } => {
                listed(kinds.iter().map(|kind| type_name(kind).to_owned()), " or ")
            }
            Kind::Enum { .. } | Kind::Constant { .. } if secret => "another value".to_owned(),
            Kind::Enum { options } => match options.as_array().map(Vec::as_slice) {
                Some([only]) => option(only),
                Some(options) => {
                    format!("one of {}", listed(options.iter().map(option), ", "))
                }
                None => "one of the allowed values".to_owned(),
            },
            Kind::Constant { expected_value } => option(expected_value),
            Kind::Not { .. } if secret => "another value".to_owned(),
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
                let most = bound("maxContains")
                    .map_or_else(String::new, |most| format!(" and at most {most}"));
                format!("at least {least}{most} of the items to fit the schema's `contains`")
            }
            Kind::MinProperties { limit } => format!("at least {}", properties(*limit)),
            Kind::MaxProperties { limit } => format!("at most {}", properties(*limit)),
            Kind::PropertyNames { error } => {
                let inner = match error.kind() {
                    Kind::AnyOf { .. } | Kind::OneOfNotValid { .. } => "others".to_owned(),
                    kind => self.expected(kind, error, secret),
                };
                format!("property names that are each {inner}")
            }
            Kind::Minimum { limit } => format!("a number of at least {}", shown(limit)),
            Kind::Maximum { limit } => format!("a number of at most {}", shown(limit)),
            Kind::ExclusiveMinimum { limit } => format!("a number greater than {}", shown(limit)),
            Kind::ExclusiveMaximum { limit } => format!("a number less than {}", shown(limit)),
            Kind::MultipleOf { multiple_of } => format!("a multiple of {multiple_of}"),
            Kind::FalseSchema => "nothing: no value is allowed here".to_owned(),
            Kind::OneOfMultipleValid { context } => {
                format!("a value that fits only one of {} alternatives", context.len())
            }
            Kind::ContentEncoding { content_encoding } => {
                format!("a string encoded as {}", cut(content_encoding, MOST_SHOWN))
            }
            Kind::ContentMediaType { content_media_type } => {
                format!("a string that holds {}", cut(content_media_type, MOST_SHOWN))
            }
            Kind::FromUtf8 { .. } => "a string whose content is text in UTF-8".to_owned(),
            Kind::Referencing(_) | Kind::Custom { .. } if secret => "another value".to_owned(),
            _ => cut(&error.masked().to_string(), 4 * MOST_SHOWN),
        }
    }

    /// What the branches of an `anyOf` or `oneOf` expect, none of them nearer than the others.
    fn alternatives(
        &self,
        error: &ValidationError<'_>,
        context: &[Vec<ValidationError<'_>>],
    ) -> String {
        let branch = |faults: &Vec<ValidationError<'_>>| {
            let told =
                faults.iter().take(2).map(|fault| self.alternative(error.instance_path(), fault));
            listed(told, " and ")
        };
        let mut branches: Vec<String> = Vec::new();
        for told in context.iter().take(50).map(branch) {
            if !branches.contains(&told) {
                branches.push(told);
            }
        }
        listed_up_to(4, branches.into_iter(), ", or ")
    }

    fn alternative(&self, above: &Location, error: &ValidationError<'_>) -> String {
        let mut told = Vec::new();
        let place = error.instance_path().as_str();
        let (path, secret) = self.secrets.cover(place);
        let expected = match error.kind() {
            Kind::Required { property } => format!("the property {}", shown(property)),
            Kind::AdditionalProperties { unexpected }
            | Kind::UnevaluatedProperties { unexpected } => {
                if secret {
                    "fewer properties".to_owned()
                } else {
                    format!(
                        "no property {}",
                        listed_up_to(3, unexpected.iter().map(|name| quoted(name)), ", ")
                    )
                }
            }
            Kind::AnyOf { .. } | Kind::OneOfNotValid { .. } => {
                self.add(error, &mut told);
                told.first().map_or_else(String::new, |fault| fault.expected.clone())
            }
            kind => self.expected(kind, error, secret),
        };
        if place == above.as_str() { expected } else { format!("{expected} at {path}") }
    }
}

/// The branch that was most likely meant: the only one that the value is of the right type for, or
/// else the only one of those whose constants it has.
fn nearest_branch<'e, 'v>(
    error: &ValidationError<'_>,
    context: &'e [Vec<ValidationError<'v>>],
) -> Option<&'e [ValidationError<'v>]> {
    let above = error.instance_path().as_str();
    let of_type = |faults: &&Vec<ValidationError<'_>>| {
        !faults.iter().any(|fault| {
            fault.instance_path().as_str() == above
                && matches!(
                    fault.kind(),
                    Kind::Type { .. }
                        | Kind::Constant { .. }
                        | Kind::Enum { .. }
                        | Kind::FalseSchema
                )
        })
    };
    let of_constants = |faults: &&Vec<ValidationError<'_>>| {
        !faults
            .iter()
            .any(|fault| matches!(fault.kind(), Kind::Constant { .. } | Kind::Enum { .. }))
    };
    let candidates: Vec<_> = context.iter().filter(of_type).collect();
    let branch = match candidates.as_slice() {
        [only] => *only,
        several => {
            let mut same = several.iter().copied().filter(of_constants);
            match (same.next(), same.next()) {
                (Some(only), None) => only,
                _ => return None,
            }
        }
    };
    (!branch.is_empty()).then_some(branch)
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
        list += if list.is_empty() { "" } else { ", " };
        list += &format!("names that match {patterns}");
    }
    let expected = if list.is_empty() { "no property".to_owned() } else { format!("only {list}") };
    let mut said = format!("there is no property {name}");
    if !nearest.is_empty() {
        said +=
            &format!("; did you mean {}?", listed(nearest.iter().map(|name| quoted(name)), " or "));
    }
    if list.is_empty() {
        said += "; none is allowed";
    } else {
        said += if nearest.is_empty() { "; allowed: " } else { " allowed: " };
        said += &list;
    }
    SchemaFault { path, expected, got: format!("the property {name}"), nearest, said }
}

fn plain(path: String, expected: impl Into<String>, got: String) -> SchemaFault {
    let expected = expected.into();
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
            format!("{described}, which fits {fits}")
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
