//! Compiled JSON Schemas, and what is wrong with a value, in words that a model can correct itself
//! by.
//!
//! Schemas come from MCP servers and skills, values from models: neither is trusted. Nothing is
//! fetched, and what a validator may be asked to do is bounded before it is built or run.

use std::fmt;
use std::sync::{Arc, OnceLock};

use jsonschema::error::ValidationErrorKind as Kind;
use jsonschema::{
    Draft, PatternOptions, ReferencingError, Registry, Retrieve, Uri, ValidationError, Validator,
};
use serde_json::Value;

use crate::canonical::canonical;
use crate::contain::contain;

pub use faults::{SchemaFault, SchemaValidationError};
pub(crate) use outline::{is_deeper_than, says_secret};
pub(crate) use pool::SchemaPool;
pub(crate) use words::distance;

use faults::{Teller, place_in_words, plain};
use outline::{Outline, Secrets, place_of_reference};
use words::{MOST_SHOWN, cut, described, quoted, shown};

mod faults;
mod outline;
mod pool;
mod words;

/// How much a walk for faults may cost: about 30 ms.
const MOST_WALKED: usize = 150_000;
/// How often a pattern that looks around or back may try again on one text: about half a
/// millisecond. Without a limit such a pattern can take for ever; the others take linear time.
const MOST_BACKTRACKS: usize = 10_000;
/// How many times such patterns may meet a text before the limit becomes [`FEW_BACKTRACKS`].
const MOST_HARD_MATCHES: usize = 200;
/// The limit for values with many texts.
const FEW_BACKTRACKS: usize = 500;

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
        let text = in_order(schema)?;
        let (bounds, validator) = build(&text, formats)?;
        let shared = Shared::new(text, formats, &bounds, OnceLock::from(validator), None);
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
        document(&self.text)
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
        let references = References::of(&document)
            .expect("BUG: the references of a schema that was compiled lead nowhere");
        let outline = Outline::new(&document, &references)
            .expect("BUG: a schema that was surveyed once cannot be surveyed again");
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
                let (path, secret) = teller.secrets.cover(value, "");
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

/// The text of a schema, unless it is none or nested too deep to be written.
fn in_order(schema: &Value) -> Result<Box<str>, InvalidSchema> {
    let invalid = |problem| InvalidSchema { place: String::new(), problem };
    if !matches!(schema, Value::Object(_) | Value::Bool(_)) {
        let problem = format!("a schema is an object, true or false, this is {}", shown(schema));
        return Err(invalid(problem));
    }
    if is_deeper_than(schema, outline::MOST_NESTED) {
        return Err(invalid(format!("it is nested more than {} deep", outline::MOST_NESTED)));
    }
    Ok(canonical(schema).into())
}

fn document(text: &str) -> Value {
    serde_json::from_str(text).expect("BUG: the text of a schema was written as JSON")
}

/// Surveys and compiles what the text says. Of two parts with one id the order decides, so it is
/// the text that counts and not the document that it was written from.
fn build(text: &str, formats: bool) -> Result<(Bounds, Validator), InvalidSchema> {
    let document = document(text);
    let bounds = survey(&document)?;
    Ok((bounds, compile(&document, formats, MOST_BACKTRACKS)?))
}

fn survey(schema: &Value) -> Result<Bounds, InvalidSchema> {
    let invalid = |place: &str, problem: String| InvalidSchema { place: place.to_owned(), problem };
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
    let references = match contain(|| References::of(schema)) {
        Ok(Ok(references)) => references,
        // It cannot be compiled either; what else is wrong with it is told first.
        failed => {
            compile(schema, false, MOST_BACKTRACKS)?;
            return Err(match failed {
                Ok(Err(error)) => InvalidSchema::of_reference(schema, &error),
                _ => invalid("", "its references cannot be followed".to_owned()),
            });
        }
    };
    let surveyed = Outline::new(schema, &references).and_then(|outline| {
        Ok(Bounds { deepest: outline.deepest()?, hard_patterns: outline.hard_patterns() })
    });
    surveyed.map_err(|refused| invalid(&refused.place, refused.problem))
}

/// Where the references of a document lead: its validator's own answers, so that a survey and a
/// validator never differ on an id, a relative name or an escape.
struct References<'a> {
    registry: Registry<'a>,
    start: Home,
}

/// What the references and ids in a subschema are resolved by.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Home {
    base: Arc<Uri<String>>,
    draft: Draft,
}

impl<'a> References<'a> {
    /// As a validator is built: on the same base, with the same ids.
    fn of(document: &'a Value) -> Result<Self, ReferencingError> {
        let draft = Draft::default().detect(document);
        let resource = draft.create_resource_ref(document);
        let base = jsonschema::uri::from_str(resource.id().unwrap_or("json-schema:///"))?;
        let registry = Registry::new().retriever(Offline).draft(draft);
        let registry = registry.add(base.as_str(), resource)?.prepare()?;
        Ok(Self { registry, start: Home { base: Arc::new(base), draft } })
    }

    fn start(&self) -> &Home {
        &self.start
    }

    /// The home of a subschema that stands in one of that home; `None` where its id is none.
    fn home_of(&self, subschema: &Value, home: &Home) -> Option<Home> {
        let draft = home.draft.detect(subschema);
        let resource = draft.create_resource_ref(subschema);
        if resource.id().is_none() {
            return Some(Home { base: Arc::clone(&home.base), draft });
        }
        let resolver = self.registry.resolver(Uri::clone(&home.base));
        let base = resolver.in_subresource(resource).ok()?.base_uri();
        Some(Home { base, draft })
    }

    /// What a reference in a subschema of that home leads to.
    fn follow(&self, reference: &str, home: &Home) -> Option<(&Value, Home)> {
        let resolver = self.registry.resolver(Uri::clone(&home.base));
        let (target, resolver, draft) = resolver.lookup(reference).ok()?.into_inner();
        Some((target, Home { base: resolver.base_uri(), draft }))
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

/// A schema that cannot be compiled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the schema is invalid at {}: {problem}", place_in_words(place, "its root"))]
pub struct InvalidSchema {
    place: String,
    problem: String,
}

impl InvalidSchema {
    /// Where, as a JSON pointer into the schema: empty for its root, and cut short as that of a
    /// [`SchemaFault`] is.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// What is wrong there, and what would be right.
    pub fn problem(&self) -> &str {
        &self.problem
    }

    fn new(document: &Value, error: &ValidationError<'_>) -> Self {
        if let Kind::Referencing(error) = error.kind() {
            return Self::of_reference(document, error);
        }
        // What is wrong with a schema is told in terms of the schema of schemas: not at hand here.
        let nothing = Value::Null;
        let outline = Outline::none(&nothing);
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

    fn of_reference(document: &Value, error: &ReferencingError) -> Self {
        let has_fragment = |wanted: &str| {
            let wanted = wanted.trim_start_matches('#').to_owned();
            place_of_reference(document, |text| {
                text.split_once('#').is_some_and(|(_, fragment)| fragment == wanted)
            })
        };
        let leads_out = |uri: &str| {
            let before_fragment = |text: &str| {
                let uri = text.split('#').next().unwrap_or_default();
                uri.trim_start_matches(['.', '/']).to_owned()
            };
            let uri = before_fragment(uri);
            let place = place_of_reference(document, |text| {
                !text.starts_with('#') && uri.ends_with(&before_fragment(text))
            });
            place.or_else(|| place_of_reference(document, |text| !text.starts_with('#')))
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
