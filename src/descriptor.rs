//! What is known of a tool without activating it.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::name::ToolName;

/// The light description of a tool: all that discovery, the gate and a model need.
///
/// # Examples
///
/// ```
/// use toolscope::{ToolCapability, ToolDescriptor};
///
/// let descriptor = ToolDescriptor::new("files/read_file".parse()?)
///     .description("Reads a file")
///     .capability(ToolCapability::read_only());
/// assert!(descriptor.capability.read_only);
/// # Ok::<(), toolscope::InvalidToolName>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ToolDescriptor {
    /// The name it is registered and called under.
    pub name: ToolName,
    /// What it does, for a model to read.
    pub description: String,
    /// JSON Schema of the input; none means any object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_schema: Option<Value>,
    /// JSON Schema of the output; none means any JSON.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_schema: Option<Value>,
    /// What it may do to the world.
    #[serde(default)]
    pub capability: ToolCapability,
    /// An ordinary tool or a validation.
    #[serde(default)]
    pub tool_type: ToolType,
    /// Where it comes from.
    #[serde(default)]
    pub source: SourceKind,
    /// What a plan must bind for it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub resources: Vec<ResourceSlot>,
    /// Whether `format` in the schemas is checked; by default it says something and refuses nothing,
    /// as draft 2020-12 has it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub check_formats: bool,
    /// The longest one call may take. The shortest of the tool's, the plan's and the call's own
    /// limit wins. Serialised in milliseconds.
    #[serde(
        default,
        rename = "call_timeout_ms",
        skip_serializing_if = "Option::is_none",
        with = "milliseconds"
    )]
    pub call_timeout: Option<Duration>,
    /// How many calls of it may run at once, over all plans. No limit by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_concurrent: Option<usize>,
}

impl ToolDescriptor {
    /// A descriptor with nothing but a name. It declares no capability, so the gate takes the tool
    /// for a writer.
    pub fn new(name: ToolName) -> Self {
        Self {
            name,
            description: String::new(),
            input_schema: None,
            output_schema: None,
            capability: ToolCapability::default(),
            tool_type: ToolType::default(),
            source: SourceKind::default(),
            resources: Vec::new(),
            check_formats: false,
            call_timeout: None,
            max_concurrent: None,
        }
    }

    /// Says what the tool does.
    #[must_use]
    pub fn description(mut self, text: impl Into<String>) -> Self {
        self.description = text.into();
        self
    }

    /// Declares what the tool may do to the world.
    #[must_use]
    pub fn capability(mut self, capability: ToolCapability) -> Self {
        self.capability = capability;
        self
    }

    /// Sets the JSON Schema of the input.
    #[must_use]
    pub fn input_schema(mut self, schema: Value) -> Self {
        self.input_schema = Some(schema);
        self
    }

    /// Sets the JSON Schema of the output.
    #[must_use]
    pub fn output_schema(mut self, schema: Value) -> Self {
        self.output_schema = Some(schema);
        self
    }

    /// Checks `format` in the schemas too.
    #[must_use]
    pub fn check_formats(mut self) -> Self {
        self.check_formats = true;
        self
    }

    /// Says what kind of source the tool comes from.
    #[must_use]
    pub fn source(mut self, source: SourceKind) -> Self {
        self.source = source;
        self
    }

    /// Asks the plan to bind a resource.
    #[must_use]
    pub fn resource(mut self, slot: ResourceSlot) -> Self {
        self.resources.push(slot);
        self
    }

    /// Limits the time of one call.
    #[must_use]
    pub fn call_timeout(mut self, limit: Duration) -> Self {
        self.call_timeout = Some(limit);
        self
    }

    /// Limits how many calls run at once, over all plans.
    #[must_use]
    pub fn max_concurrent(mut self, limit: usize) -> Self {
        self.max_concurrent = Some(limit);
        self
    }
}

mod milliseconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[expect(clippy::ref_option, reason = "serde asks for it")]
    pub(super) fn serialize<S: Serializer>(
        time: &Option<Duration>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        time.map(milliseconds).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Duration>, D::Error> {
        Ok(Option::deserialize(deserializer)?.map(Duration::from_millis))
    }
}

/// Which tools are meant: all that fit everything that is said.
///
/// # Examples
///
/// ```
/// use toolscope::{SourceKind, ToolDescriptor, ToolFilter};
///
/// let files = ToolFilter::new().namespace("files").source(SourceKind::Mcp);
/// let tool = ToolDescriptor::new("files/read_file".parse()?);
/// assert!(!files.fits(&tool), "it comes from no MCP server");
/// # Ok::<(), toolscope::InvalidToolName>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[must_use]
pub struct ToolFilter {
    name: Option<ToolName>,
    server: Option<String>,
    namespace: Option<String>,
    tool_type: Option<ToolType>,
    source: Option<SourceKind>,
}

impl ToolFilter {
    /// All tools.
    pub fn new() -> Self {
        Self::default()
    }

    /// The tool of that name.
    pub fn name(mut self, name: ToolName) -> Self {
        self.name = Some(name);
        self
    }

    /// Those whose name states that server.
    pub fn server(mut self, server: impl Into<String>) -> Self {
        self.server = Some(server.into());
        self
    }

    /// Those of a namespace, whatever the server.
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = Some(namespace.into());
        self
    }

    /// Ordinary tools, or validations.
    pub fn tool_type(mut self, tool_type: ToolType) -> Self {
        self.tool_type = Some(tool_type);
        self
    }

    /// Those that come from that kind of source.
    pub fn source(mut self, source: SourceKind) -> Self {
        self.source = Some(source);
        self
    }

    /// Whether a tool is meant.
    pub fn fits(&self, tool: &ToolDescriptor) -> bool {
        self.name.as_ref().is_none_or(|name| *name == tool.name)
            && self.server.as_deref().is_none_or(|server| tool.name.server() == Some(server))
            && self.namespace.as_deref().is_none_or(|space| tool.name.namespace() == space)
            && self.tool_type.is_none_or(|tool_type| tool_type == tool.tool_type)
            && self.source.is_none_or(|source| source == tool.source)
    }
}

impl From<ToolName> for ToolFilter {
    fn from(name: ToolName) -> Self {
        Self::new().name(name)
    }
}

/// What a tool may do. All flags are false by default, and a tool that declares neither `read_only`
/// nor `writes` is treated as a writer.
///
/// `read_only` excludes `writes` and `checkpointable`; registration refuses the combination.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
#[expect(clippy::struct_excessive_bools, reason = "six independent flags, named by the tool card")]
pub struct ToolCapability {
    /// It only reads.
    pub read_only: bool,
    /// It can write.
    pub writes: bool,
    /// What it writes can be rolled back.
    pub checkpointable: bool,
    /// Running it twice does no more than running it once.
    pub idempotent: bool,
    /// It needs extra checks: refused unless the plan allows unsafe tools or a person approves.
    #[serde(rename = "unsafe")]
    pub is_unsafe: bool,
    /// A person must approve each call.
    pub human_approval_required: bool,
}

impl ToolCapability {
    /// A tool that only reads.
    pub fn read_only() -> Self {
        Self { read_only: true, ..Self::default() }
    }

    /// A tool that writes.
    pub fn writes() -> Self {
        Self { writes: true, ..Self::default() }
    }

    /// What it writes can be rolled back.
    #[must_use]
    pub fn checkpointable(mut self) -> Self {
        self.checkpointable = true;
        self
    }

    /// Running it twice does no more than running it once.
    #[must_use]
    pub fn idempotent(mut self) -> Self {
        self.idempotent = true;
        self
    }

    /// It needs extra checks.
    #[must_use]
    pub fn is_unsafe(mut self) -> Self {
        self.is_unsafe = true;
        self
    }

    /// A person must approve each call.
    #[must_use]
    pub fn human_approval_required(mut self) -> Self {
        self.human_approval_required = true;
        self
    }

    /// The flags that exclude each other, if any do.
    pub(crate) fn contradiction(self) -> Option<&'static str> {
        match self {
            Self { read_only: true, writes: true, .. } => {
                Some("it declares both `read_only` and `writes`")
            }
            Self { read_only: true, checkpointable: true, .. } => Some(
                "it declares both `read_only` and `checkpointable`: there is nothing to roll back",
            ),
            _ => None,
        }
    }
}

/// An ordinary tool, or one that judges the work of others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ToolType {
    /// An ordinary tool.
    #[default]
    Tool,
    /// A tool that returns `{passed, message?, data?}`.
    Validation,
}

/// The kind of source a tool comes from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SourceKind {
    /// The service's own Rust.
    #[default]
    Custom,
    /// A tool that ships with the crate.
    Builtin,
    /// An MCP server.
    Mcp,
    /// An Agent Skill.
    Skill,
    /// A tool round another tool.
    Wrapped,
}

/// Something a tool needs the plan to bind: a repository, a database, a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ResourceSlot {
    /// The name it is bound under.
    pub name: String,
    /// What kind of thing it is.
    pub resource_type: String,
    /// Whether a call is refused when the plan does not bind it.
    pub required: bool,
}

impl ResourceSlot {
    /// A resource without which the tool is refused.
    pub fn required(name: impl Into<String>, resource_type: impl Into<String>) -> Self {
        Self { name: name.into(), resource_type: resource_type.into(), required: true }
    }

    /// A resource that the tool uses where it is bound.
    pub fn optional(name: impl Into<String>, resource_type: impl Into<String>) -> Self {
        Self { required: false, ..Self::required(name, resource_type) }
    }
}

/// A resource that a plan binds, as tools see it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BoundResource {
    /// The name tools ask for it by.
    pub name: String,
    /// What kind of thing it is.
    pub resource_type: String,
    /// Where it is: a path, an address, whatever its kind means by it.
    pub location: String,
}

impl BoundResource {
    /// A resource of a kind, at a place.
    pub fn new(
        name: impl Into<String>,
        resource_type: impl Into<String>,
        location: impl Into<String>,
    ) -> Self {
        Self { name: name.into(), resource_type: resource_type.into(), location: location.into() }
    }
}
