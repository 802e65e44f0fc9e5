//! What a model provider is told of a tool: its name, what it does, and the schema of its input.
//!
//! `walk` goes through schemas, `draft` translates them, `root` settles what stands at the root,
//! `rules` has what one provider alone asks for.
//!
//! 1. An advertised schema accepts every object that the tool's own schema accepts. Each step keeps
//!    the meaning or loosens it, and what loosens never stands under a `not`, an `if` or a `oneOf`,
//!    where it would tighten.
//! 2. A text that looks like a keyword is one only where a schema stands: `walk::place` says where.
//!    A property may be called `$ref`.
//! 3. Nothing walks deeper than [`MAX_DEPTH`], and no `$ref` is followed more than that many times.

// In the order they are applied.
mod walk;

mod draft;
mod root;
mod rules;

use serde_json::{Map, Value, json};

use crate::descriptor::{ToolCapability, ToolDescriptor};
use crate::registry::Snapshot;
use crate::schema::is_deeper_than;

use draft::modernize;
use root::{keep_references_to_the_root, notes_on, settle_root};
use rules::{Refused, is_plain_name, meet_gemini, meet_openai, move_odd_properties};
use walk::{dangles, each_node, reference, says_object, spell_out};

/// The deepest schema that is rewritten; a deeper one is told as an outline.
const MAX_DEPTH: usize = 64;
/// A JSON object: a schema that is no boolean, or a part of a definition.
type Node = Map<String, Value>;

/// A model provider, or a protocol, with a form of its own for the definition of a tool.
///
/// | | has the schema of the input under | and besides name and description |
/// |---|---|---|
/// | [`OpenAi`](Self::OpenAi) | `function.parameters` | `type` |
/// | [`OpenAiResponses`](Self::OpenAiResponses) | `parameters` | `type`, `strict` |
/// | [`Anthropic`](Self::Anthropic) | `input_schema` | |
/// | [`Gemini`](Self::Gemini) | `parametersJsonSchema` | |
/// | [`Mcp`](Self::Mcp) | `inputSchema` | `outputSchema`, `annotations` |
///
/// With `OpenAi`, name and description are under `function` too. `Gemini`'s are entries of
/// `functionDeclarations`, `Mcp`'s of the result of `tools/list`.
///
/// # Names and descriptions
///
/// The name is [`ToolName::provider_safe`](crate::ToolName::provider_safe) everywhere. MCP's names
/// could be freer; one encoding, which [`PlanHandle::execute`](crate::PlanHandle::execute) takes
/// back, is simpler than two.
///
/// A blank description is left out: Amazon Bedrock, which serves Anthropic's models, refuses an
/// empty one. Gemini's reference asks for one, so there the name stands in. No description is cut:
/// `OpenAI` took 1,024 characters until 2025 and takes more now, though some endpoints that speak
/// its protocol still do not.
///
/// # Schemas
///
/// Each provider takes a part of JSON Schema, and one tool that it refuses costs the whole request.
/// Its rules are met by loosening: an advertised schema accepts every input that the tool's own
/// schema accepts, and the tool's own is the one that a call is checked against. What the root of
/// a schema may not say is told in the description, in a sentence.
///
/// For all:
///
/// - The root says `"type": "object"`, as the reference of each provider and the MCP specification
///   ask. No schema, `true` and `{}` become `{"type": "object", "properties": {}}`. After `false`
///   no further property is allowed, and the description says that no call succeeds.
/// - A schema of more than 64 levels is told as an outline: the names, types and descriptions of
///   the root's properties, and which of them are required.
///
/// For all but `Mcp`:
///
/// - The root has `properties` (`OpenAI`: "object schema missing properties").
/// - The root has no `oneOf`, `anyOf` and `allOf`, which `OpenAI` and Anthropic refuse there by
///   their errors, and Gemini's reference wants an object described; for `OpenAI` also no `enum`
///   and `not`. A `$ref` and an `allOf` are merged into the root as far as they can be. Of a
///   `oneOf` or `anyOf` the schema keeps what holds whichever branch is taken: the properties of
///   the branches, and what all of them require. The rest goes into the description.
/// - The schema is of JSON Schema 2020-12, which Anthropic's error asks for, with its definitions
///   under `$defs`, which is what Gemini's list of keywords has. Tuples, `definitions`,
///   `dependencies` and boolean `exclusiveMinimum` of older drafts are translated; what a draft
///   passes over, as what stands beside a `$ref` up to draft 7, is left out, and so are `$schema`
///   and `$id`. A schema that refers by `$id`, `$anchor` or `$dynamicRef` is told as an outline.
///
/// For `OpenAi` and `OpenAiResponses`:
///
/// - An array says `items` ("array schema missing items"). Where one does not, `unevaluatedItems`
///   goes from the whole schema: to it, an item under `items` is one that was evaluated.
/// - A `pattern` that does not compile in Python ("is not a 'regex'") or looks around ("regex
///   lookaround is not supported") goes into the description of its schema.
/// - `strict` is false in `OpenAiResponses`: by the guide to function calling, to leave it out
///   would make every optional property a required one. In `OpenAi` that is the default.
///
/// For `Anthropic`:
///
/// - The names of the root's properties match `^[a-zA-Z0-9_.-]{1,64}$`, by its error, which looks
///   at no other names. Others are told under `patternProperties`.
///
/// For `Gemini`:
///
/// - Of its two forms it is given `parametersJsonSchema`, which takes JSON Schema with `$ref`;
///   `parameters` takes a part of `OpenAPI`'s.
/// - A text or number under `const` stands under `enum`, as its list of keywords has it.
/// - Beside a `$ref` stand `description` and `default` only, by its error.
///
/// For `Mcp`:
///
/// - The schema stays as it is, `$schema` included, but for the root's type and for booleans among
///   its `properties`, which clients of the revisions before 2026-07-28 cannot read.
/// - An output schema is told only where its root says `"type": "object"`: those revisions take no
///   other, and an entry that is refused costs a client the whole list.
///
/// # MCP's hints
///
/// A hint stands only for what the tool declared: `readOnlyHint` is true for a reader and false for
/// a writer, `destructiveHint` false for a reader and true for an unsafe writer, `idempotentHint`
/// true for an idempotent tool. A tool that declares nothing has no annotations.
///
/// # Examples
///
/// ```
/// use serde_json::json;
/// use toolscope::{Provider, ToolRuntime, ToolSpec};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), toolscope::ToolError> {
/// let version = ToolSpec::new("build/version").description("Tells the version").read_only();
/// let runtime = ToolRuntime::builder().tool(version.function(|()| Ok("1.2.0"))).build().await?;
///
/// let tools = runtime.registry().snapshot().definitions(Provider::Anthropic);
/// assert_eq!(tools[0]["name"], "build__version");
/// assert_eq!(tools[0]["description"], "Tells the version");
/// assert_eq!(tools[0]["input_schema"]["type"], "object");
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Provider {
    /// `OpenAI`, chat completions, and whatever speaks that protocol.
    OpenAi,
    /// `OpenAI`, responses.
    OpenAiResponses,
    /// Anthropic, messages.
    Anthropic,
    /// Google Gemini, `generateContent`, also on Vertex AI.
    Gemini,
    /// The Model Context Protocol, `tools/list`.
    Mcp,
}

impl Provider {
    fn is_openai(self) -> bool {
        matches!(self, Self::OpenAi | Self::OpenAiResponses)
    }

    /// What may not stand at the root of an input schema.
    fn refused_at_root(self) -> &'static [&'static str] {
        match self {
            Self::OpenAi | Self::OpenAiResponses => &["allOf", "oneOf", "anyOf", "not", "enum"],
            Self::Anthropic | Self::Gemini => &["allOf", "oneOf", "anyOf"],
            Self::Mcp => &[],
        }
    }
}

impl Snapshot {
    /// The definitions of the registered tools, as an array in a provider's form.
    ///
    /// They are sorted by name: the same tools give the same bytes, whatever the order of their
    /// registration, so that a provider's cache of the prompt holds.
    ///
    /// # Examples
    ///
    /// See [`Provider`].
    pub fn definitions(&self, provider: Provider) -> Value {
        definitions(self.descriptors(), provider)
    }
}

/// The definitions of some tools, sorted by name.
pub(crate) fn definitions<'a>(
    descriptors: impl Iterator<Item = &'a ToolDescriptor>,
    provider: Provider,
) -> Value {
    let mut descriptors: Vec<_> = descriptors.collect();
    descriptors.sort_by_key(|descriptor| &descriptor.name);
    descriptors.into_iter().map(|descriptor| definition(descriptor, provider)).collect()
}

/// The definition of one tool.
pub(crate) fn definition(descriptor: &ToolDescriptor, provider: Provider) -> Value {
    let Advertised { schema, notes } = advertise(descriptor.input_schema.as_ref(), provider);
    let mut told = Node::new();
    told.insert("name".into(), descriptor.name.provider_safe().into());
    if let Some(description) = describe(descriptor, &notes, provider) {
        told.insert("description".into(), description.into());
    }
    let place_of_schema = match provider {
        Provider::OpenAi | Provider::OpenAiResponses => "parameters",
        Provider::Anthropic => "input_schema",
        Provider::Gemini => "parametersJsonSchema",
        Provider::Mcp => "inputSchema",
    };
    told.insert(place_of_schema.into(), schema);
    match provider {
        Provider::OpenAi => return json!({ "type": "function", "function": told }),
        Provider::OpenAiResponses => {
            told.insert("type".into(), "function".into());
            told.insert("strict".into(), false.into());
        }
        Provider::Anthropic | Provider::Gemini => {}
        Provider::Mcp => {
            if let Some(schema) = mcp_output(descriptor.output_schema.as_ref()) {
                told.insert("outputSchema".into(), schema);
            }
            let hints = mcp_hints(descriptor.capability);
            if !hints.is_empty() {
                told.insert("annotations".into(), hints.into());
            }
        }
    }
    told.into()
}

fn describe(descriptor: &ToolDescriptor, notes: &[String], provider: Provider) -> Option<String> {
    let own = Some(&descriptor.description).filter(|text| !text.trim().is_empty());
    match (own, notes) {
        (None, []) if provider == Provider::Gemini => {
            Some(format!("The tool `{}`.", descriptor.name))
        }
        (None, []) => None,
        (Some(own), []) => Some(own.clone()),
        (None, notes) => Some(notes.join(" ")),
        (Some(own), notes) => Some(format!("{own}\n\n{}", notes.join(" "))),
    }
}

/// What is known of a tool, and nothing else: an absent hint has a default that a client knows.
fn mcp_hints(capability: ToolCapability) -> Node {
    let ToolCapability { read_only, writes, idempotent, is_unsafe, .. } = capability;
    let mut hints = Node::new();
    if read_only || writes {
        hints.insert("readOnlyHint".into(), read_only.into());
    }
    if read_only || (writes && is_unsafe) {
        hints.insert("destructiveHint".into(), writes.into());
    }
    if idempotent {
        hints.insert("idempotentHint".into(), true.into());
    }
    hints
}

fn mcp_output(schema: Option<&Value>) -> Option<Value> {
    let schema = schema.filter(|schema| !is_deeper_than(schema, MAX_DEPTH))?;
    let root = schema.as_object().filter(|root| says_object(root))?;
    Some(mcp_root(root.clone()).into())
}

/// MCP takes a schema as it is, but for the root's type.
fn mcp_root(mut root: Node) -> Node {
    if !says_object(&root) {
        keep_references_to_the_root(&mut root);
        root.insert("type".into(), "object".into());
    }
    if let Some(Value::Object(properties)) = root.get_mut("properties") {
        properties.values_mut().for_each(spell_out);
    }
    root
}

/// A schema as a provider takes it, and what it could not be made to say.
struct Advertised {
    schema: Value,
    notes: Vec<String>,
}

fn advertise(schema: Option<&Value>, provider: Provider) -> Advertised {
    let root = match schema {
        Some(Value::Object(root)) => root,
        Some(Value::Bool(false)) => {
            let schema =
                json!({ "type": "object", "properties": {}, "additionalProperties": false });
            return Advertised {
                schema,
                notes: vec!["No input is valid, so no call succeeds.".into()],
            };
        }
        _ => &Node::new(),
    };
    let too_deep = root.values().any(|value| is_deeper_than(value, MAX_DEPTH - 1));
    if too_deep {
        return outline(root, provider);
    }
    if provider == Provider::Mcp {
        let mut told = mcp_root(root.clone());
        if root.is_empty() {
            told.insert("properties".into(), json!({}));
        }
        return Advertised { schema: told.into(), notes: Vec::new() };
    }
    let Some(mut told) = modernize(root) else {
        return outline(root, provider);
    };
    let refused = provider.refused_at_root();
    if !says_object(&told) || refused.iter().chain(["$ref"].iter()).any(|it| told.contains_key(*it))
    {
        keep_references_to_the_root(&mut told);
    }
    let hidden = settle_root(&mut told, refused);
    let mut notes = notes_on(&hidden);
    if provider == Provider::Anthropic {
        notes.extend(move_odd_properties(&mut told));
    }
    let mut schema = Value::Object(told);
    if provider.is_openai() {
        let refused = Refused::of(&schema);
        each_node(&mut schema, &mut |node| meet_openai(node, refused));
    } else if provider == Provider::Gemini {
        each_node(&mut schema, &mut meet_gemini);
    }
    if dangles(&schema) {
        return outline(root, provider);
    }
    Advertised { schema, notes }
}

/// What stands at the surface of a schema: sound for any schema, and cheap.
fn outline(root: &Node, provider: Provider) -> Advertised {
    // Up to draft 7 nothing beside a `$ref` counts.
    let counts = |node: &Node| reference(node).is_none();
    let surface = |node: &Node| -> Node {
        let plain = node.iter().filter(|(keyword, value)| match (keyword.as_str(), value) {
            ("title" | "description", value) => value.is_string(),
            ("type", Value::String(_)) => counts(node),
            ("type" | "required", Value::Array(names)) => {
                counts(node) && names.iter().all(Value::is_string)
            }
            _ => false,
        });
        plain.map(|(keyword, value)| (keyword.clone(), value.clone())).collect()
    };
    let mut told = surface(root);
    let named = root.get("properties").filter(|_| counts(root)).and_then(Value::as_object);
    let named = named.into_iter().flatten();
    let told_of = named.filter(|(name, _)| provider != Provider::Anthropic || is_plain_name(name));
    let properties: Node = told_of
        .map(|(name, schema)| (name.clone(), schema.as_object().map(surface)))
        .map(|(name, schema)| (name, schema.unwrap_or_default().into()))
        .collect();
    told.insert("type".into(), "object".into());
    told.insert("properties".into(), properties.into());
    let mut schema = Value::Object(told);
    if provider.is_openai() {
        let refused = Refused::of(&schema);
        each_node(&mut schema, &mut |node| meet_openai(node, refused));
    }
    let note = "The schema shows no details; the input is checked against all of them.";
    Advertised { schema, notes: vec![note.into()] }
}

// The registry refuses schemas like these before they get here.
#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{Node, Provider, definition};
    use crate::descriptor::ToolDescriptor;
    use crate::name::ToolName;

    const MODELS: [Provider; 3] = [Provider::OpenAi, Provider::Anthropic, Provider::Gemini];

    fn descriptor(schema: Value) -> ToolDescriptor {
        let name = ToolName::parse("files/read_file").expect("BUG: it is a name");
        ToolDescriptor::new(name).output_schema(schema.clone()).input_schema(schema)
    }

    /// What models are told of a schema.
    fn told(schema: Value) -> [String; 3] {
        let descriptor = descriptor(schema);
        MODELS.map(|provider| definition(&descriptor, provider).to_string())
    }

    /// A thread of Tokio has 2 MiB.
    #[test]
    fn a_thousand_levels_do_not_overflow_the_stack() {
        let tell = || {
            let nest = |schema, _| Value::from(Node::from_iter([("items".to_owned(), schema)]));
            let descriptor = descriptor((0..1_000).fold(json!({}), nest));
            for provider in MODELS.into_iter().chain([Provider::Mcp]) {
                let told = definition(&descriptor, provider).to_string();
                assert!(told.contains("The schema shows no details"), "{told}");
            }
        };
        let thread = std::thread::Builder::new().stack_size(2 * 1024 * 1024).spawn(tell);
        thread.expect("BUG: no thread").join().expect("BUG: it panicked");
    }

    #[test]
    fn a_reference_that_never_ends_is_given_up() {
        let schema = json!({ "$ref": "#/$defs/A", "$defs": { "A": { "$ref": "#/$defs/A" } } });
        for told in told(schema) {
            assert!(told.contains("must also match this JSON Schema"), "{told}");
        }
    }

    /// Each definition takes the next one in twice.
    #[test]
    fn a_schema_that_grows_as_it_is_resolved_is_bounded() {
        let twice = |number: u32| {
            let next = json!({ "$ref": format!("#/$defs/d{}", number + 1) });
            (format!("d{number}"), json!({ "allOf": [next, next] }))
        };
        let defs: Node = (0..1_000).map(twice).collect();
        for told in told(json!({ "$ref": "#/$defs/d0", "$defs": defs })) {
            assert!(told.len() < 100_000, "{} bytes", told.len());
        }
    }
}
