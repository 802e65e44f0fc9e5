//! Compiled JSON Schemas, and what is wrong with a value, in words that a model can correct itself
//! by.
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

pub(crate) use outline::is_deeper_than;
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
/// How much a walk for faults may cost: about 30 ms.
const MOST_WALKED: usize = 150_000;
/// How often a pattern that looks around or back may try again on one text: about half a
/// millisecond. Without a limit such a pattern can take for ever; the others take linear time.
const MOST_BACKTRACKS: usize = 10_000;
/// How many times such patterns may meet a text before the limit becomes [`FEW_BACKTRACKS`].
const MOST_HARD_MATCHES: usize = 200;
/// The limit for values with many texts.
const FEW_BACKTRACKS: usize = 500;
/// How many schemas of a pool stay compiled although nobody used them yet.
const MOST_COMPILED: usize = 1_000;

/// A compiled JSON Schema. Clones share it.
///
/// A schema that names no draft in `$schema` is of draft 2020-12. Nothing is fetched: a reference
/// that leads out of the schema is refused. A pattern that looks around or back and comes to no end
/// on a text makes that text invalid.
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
///      at the top level: the property \"path\" is missing; was \"pth\" meant to be it?"
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
    /// How many patterns look around or back, and the validator that gives up on them early.
    hard_patterns: usize,
    careful: OnceLock<Validator>,
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
        let bounds = survey(schema)?;
        let validator = compile(schema, formats, MOST_BACKTRACKS)?;
        let shared =
            Shared::new(text_of(schema), formats, &bounds, OnceLock::from(validator), None);
        Ok(Self(Arc::new(shared)))
    }

    /// Whether a value fits. Allocates nothing, unless the schema has references or patterns that
    /// need it.
    pub fn is_valid(&self, value: &Value) -> bool {
        self.0.follows(value) && self.0.validator(value).is_valid(value)
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
    fn new(
        text: Box<str>,
        formats: bool,
        bounds: &Bounds,
        validator: OnceLock<Validator>,
        seat: Option<Arc<()>>,
    ) -> Self {
        let Bounds { deepest, hard_patterns } = *bounds;
        let careful = OnceLock::new();
        Self { text, formats, deepest, validator, hard_patterns, careful, _seat: seat }
    }

    fn validator(&self, value: &Value) -> &Validator {
        let again = |backtracks| {
            compile(&self.document(), self.formats, backtracks)
                .expect("BUG: a schema that was compiled once can be compiled again")
        };
        let most_texts = MOST_HARD_MATCHES.checked_div(self.hard_patterns);
        if most_texts.is_some_and(|most| outline::has_more_texts_than(value, most)) {
            return self.careful.get_or_init(|| again(FEW_BACKTRACKS));
        }
        self.validator.get_or_init(|| again(MOST_BACKTRACKS))
    }

    fn document(&self) -> Value {
        serde_json::from_str(&self.text).expect("BUG: the text of a schema was written as JSON")
    }

    /// Whether the references of the schema may be followed into a value.
    fn follows(&self, value: &Value) -> bool {
        self.deepest.is_none_or(|most| !is_deeper_than(value, most))
    }

    fn faults(&self, value: &Value) -> SchemaValidationError {
        if let (false, Some(most)) = (self.follows(value), self.deepest) {
            let expected = format!("a value nested at most {most} deep");
            return SchemaValidationError::of(plain(String::new(), expected, "one nested deeper"));
        }
        let document = self.document();
        let outline = Outline::new(&document);
        let secrets = outline.secrets();
        let teller = Teller { outline: &outline, document: &document, value, secrets };
        let validator = self.validator(value);
        let told = contain(|| {
            if !outline.costs_more_than(MOST_WALKED, value) {
                return teller.tell(validator.iter_errors(value));
            }
            // Where nothing branches the first fault is found at the price of `is_valid`.
            let first = if outline.branches() { None } else { validator.validate(value).err() };
            SchemaValidationError { cut: true, ..teller.tell(first.into_iter()) }
        });
        let mut told = told.unwrap_or_default();
        if told.faults.is_empty() {
            told.cut = true;
            told.push(|| {
                let (path, secret) = teller.secrets.cover("");
                plain(path, "a value that fits the schema", described(value, secret))
            });
        }
        told
    }
}

/// What is known of a document that may be compiled.
struct Bounds {
    deepest: Option<usize>,
    hard_patterns: usize,
}

fn survey(schema: &Value) -> Result<Bounds, InvalidSchema> {
    let invalid = |place: &str, problem: String| InvalidSchema { place: place.to_owned(), problem };
    if !matches!(schema, Value::Object(_) | Value::Bool(_)) {
        let problem = format!("a schema is an object, true or false, this is {}", shown(schema));
        return Err(invalid("", problem));
    }
    if is_deeper_than(schema, outline::MOST_NESTED) {
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
    let outline = Outline::new(schema);
    match outline.deepest() {
        Ok(deepest) => Ok(Bounds { deepest, hard_patterns: outline.hard_patterns() }),
        Err(refused) => Err(invalid(&refused.place, refused.problem)),
    }
}

/// Fetches nothing.
struct Offline;

impl Retrieve for Offline {
    fn retrieve(&self, _: &Uri<String>) -> Result<Value, Box<dyn std::error::Error + Send + Sync>> {
        Err("nothing is fetched".into())
    }
}

/// Compiles a document that was surveyed.
fn compile(document: &Value, formats: bool, backtracks: usize) -> Result<Validator, InvalidSchema> {
    let options = jsonschema::options()
        .should_validate_formats(formats)
        .with_retriever(Offline)
        .with_pattern_options(PatternOptions::fancy_regex().backtrack_limit(backtracks));
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
        let bounds = survey(schema)?;
        let text = text_of(schema);
        let key = FixedState::default().hash_one((&*text, formats));
        let same = |shared: &Arc<Shared>| shared.formats == formats && shared.text == text;
        let known = self.known.get(&key).into_iter().flatten();
        if let Some(shared) = known.filter_map(Weak::upgrade).find(same) {
            return Ok(Schema(shared));
        }
        let validator = compile(schema, formats, MOST_BACKTRACKS)?;
        let seat =
            (Arc::strong_count(&self.seats) <= MOST_COMPILED).then(|| Arc::clone(&self.seats));
        let validator = if seat.is_some() { OnceLock::from(validator) } else { OnceLock::new() };
        let shared = Arc::new(Shared::new(text, formats, &bounds, validator, seat));
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
#[error("the schema is invalid at {}: {problem}", place_in_words(place, "its root"))]
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
        // What is wrong with a schema is told in terms of the schema of schemas: not at hand here.
        let nothing = Value::Null;
        let outline = Outline::new(&nothing);
        let secrets = Secrets::none();
        let teller = Teller { outline: &outline, document: &nothing, value: document, secrets };
        let mut told = SchemaValidationError::default();
        teller.add(error, &mut told);
        match (error.kind(), told.faults.into_iter().next()) {
            (Kind::Format { format }, _) if format == "regex" => {
                let problem = format!("{} is no regular expression", shown(error.instance()));
                Self { place: error.instance_path().to_string(), problem }
            }
            (_, Some(fault)) => Self { place: fault.path, problem: fault.said },
            (_, None) => {
                Self { place: error.instance_path().to_string(), problem: error.to_string() }
            }
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
                    "\"{}\" is not in the schema, and nothing is fetched: put what it refers to \
                     under `$defs` and refer to it as \"#/$defs/name\"",
                    cut(uri, 2 * MOST_SHOWN)
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
    cut: bool,
}

impl SchemaValidationError {
    /// The faults as they stand in a result's metadata.
    pub(crate) fn to_json(&self) -> Value {
        serde_json::to_value(&self.faults).unwrap_or_default()
    }

    fn of(fault: SchemaFault) -> Self {
        Self { faults: vec![fault], ..Self::default() }
    }

    /// Adds a fault that is not there yet, or counts it.
    fn push(&mut self, fault: impl FnOnce() -> SchemaFault) {
        if self.faults.len() == MOST_FAULTS {
            self.more = MOST_COUNTED.min(self.more + 1);
            return;
        }
        let fault = fault();
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
        write!(f, "at {}: {}", place_in_words(&self.path, "the top level"), self.said)
    }
}

fn place_in_words(place: &str, root: &str) -> String {
    if place.is_empty() { root.to_owned() } else { cut(place, 2 * MOST_SHOWN) }
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
        let mut told = SchemaValidationError::default();
        for error in errors {
            if told.more == MOST_COUNTED {
                break;
            }
            self.add(&error, &mut told);
        }
        told
    }

    fn add(&self, error: &ValidationError<'_>, told: &mut SchemaValidationError) {
        let place = error.instance_path().as_str();
        let (path, secret) = self.secrets.cover(place);
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
        let (path, secret) = self.secrets.cover(place);
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

fn plain(path: String, expected: impl Into<String>, got: impl Into<String>) -> SchemaFault {
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn numbered(number: usize) -> Value {
        json!({ "const": number })
    }

    fn is_compiled(schema: &Schema) -> bool {
        schema.0.validator.get().is_some()
    }

    #[test]
    fn equal_schemas_share_a_validator() {
        let mut pool = SchemaPool::default();
        let text = r#"{"type": "object", "properties": {"a": {}, "b": {"enum": [1, 1.0]}}}"#;
        let turned = r#"{"properties": {"b": {"enum": [1, 1.0]}, "a": {}}, "type": "object"}"#;
        let [one, other] = [text, turned].map(|text| {
            let schema = serde_json::from_str(text).expect("JSON");
            pool.compile(&schema, false).expect("a schema")
        });
        assert!(Arc::ptr_eq(&one.0, &other.0));

        let checked = pool.compile(&json!({ "type": "object" }), true).expect("a schema");
        let unchecked = pool.compile(&json!({ "type": "object" }), false).expect("a schema");
        assert!(!Arc::ptr_eq(&checked.0, &unchecked.0));
        let [whole, real] = [json!({ "const": 1 }), json!({ "const": 1.0 })];
        let whole = pool.compile(&whole, false).expect("a schema");
        let real = pool.compile(&real, false).expect("a schema");
        assert!(!Arc::ptr_eq(&whole.0, &real.0));
        assert_eq!(pool.entries, 5);
    }

    #[test]
    fn a_pool_refuses_what_a_schema_refuses() {
        let mut pool = SchemaPool::default();
        let error = pool.compile(&json!({ "type": 5 }), false).expect_err("no schema");
        assert_eq!(error, Schema::new(&json!({ "type": 5 })).expect_err("no schema"));
        assert_eq!(pool.entries, 0);
    }

    #[test]
    fn past_a_number_of_schemas_one_is_compiled_when_it_is_used() {
        let mut pool = SchemaPool::default();
        let mut compile = |number| pool.compile(&numbered(number), false).expect("a schema");
        let mut kept: Vec<Schema> = (0..MOST_COMPILED).map(&mut compile).collect();
        assert!(kept.iter().all(is_compiled));
        let later = compile(MOST_COMPILED);
        assert!(!is_compiled(&later));
        assert!(is_compiled(&compile(0)), "an equal one shares what is there");

        assert!(later.is_valid(&json!(MOST_COMPILED)));
        assert!(!later.is_valid(&json!(0)));
        assert!(is_compiled(&later));

        // One that is gone makes room.
        kept.truncate(MOST_COMPILED - 1);
        let early = compile(MOST_COMPILED + 1);
        assert!(is_compiled(&early));
        assert!(!is_compiled(&compile(MOST_COMPILED + 2)));
    }

    #[test]
    fn a_pool_keeps_no_schema_alive() {
        let mut pool = SchemaPool::default();
        let kept = pool.compile(&numbered(0), false).expect("a schema");
        let gone = Arc::downgrade(&pool.compile(&numbered(1), false).expect("a schema").0);
        assert!(gone.upgrade().is_none());
        for number in 2..10_000 {
            pool.compile(&numbered(number), false).expect("a schema");
            assert!(pool.entries <= 65 && pool.known.len() <= pool.entries);
        }
        let again = pool.compile(&numbered(0), false).expect("a schema");
        assert!(Arc::ptr_eq(&kept.0, &again.0));
    }
}
