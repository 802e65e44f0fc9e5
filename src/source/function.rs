//! Tools of the service's own: plain functions and async closures with typed arguments.

use std::future::Future;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::context::{ActivationContext, ToolExecutionContext};
use crate::descriptor::{ResourceSlot, ToolCapability, ToolDescriptor};
use crate::name::ToolName;
use crate::schema::says_secret;
use crate::tool::{Tool, ToolFailure, ToolInstance, ToolOutput};

/// A description of a function tool; [`handler`](Self::handler),
/// [`handler_with`](Self::handler_with) or [`function`](Self::function) makes the tool of it. Input
/// and output schemas come from the types.
///
/// # Examples
///
/// ```
/// use toolscope::{ToolExecutionContext, ToolFailure, ToolSpec};
///
/// #[derive(serde::Deserialize, schemars::JsonSchema)]
/// struct Args {
///     text: String,
/// }
///
/// async fn shout(_: ToolExecutionContext, args: Args) -> Result<String, ToolFailure> {
///     Ok(args.text.to_uppercase())
/// }
/// let named = ToolSpec::new("shout").description("Writes in capitals").read_only().handler(shout);
/// let closure = ToolSpec::new("echo").read_only().handler(async |_ctx, args: Args| Ok(args.text));
/// let plain = ToolSpec::new("length").read_only().function(|args: Args| Ok(args.text.len()));
/// # let _ = (named, closure, plain);
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct ToolSpec {
    descriptor: ToolDescriptor,
}

impl ToolSpec {
    /// A tool of that name: `[[server:]namespace/]name`, `local/` where no namespace is given.
    ///
    /// # Panics
    ///
    /// When the text is no name; see [`ToolName::parse`]. For a name that is not written in the
    /// source use [`named`](Self::named).
    #[track_caller]
    pub fn new(name: &str) -> Self {
        match ToolName::parse(name) {
            Ok(name) => Self::named(name),
            Err(error) => panic!("{error}"),
        }
    }

    /// A tool of that name.
    pub fn named(name: ToolName) -> Self {
        Self { descriptor: ToolDescriptor::new(name) }
    }

    /// Says what the tool does, for a model to read. Without it the doc comment of the arguments'
    /// type says so.
    pub fn description(mut self, text: impl Into<String>) -> Self {
        self.descriptor = self.descriptor.description(text);
        self
    }

    /// Declares what the tool may do to the world.
    pub fn capability(mut self, capability: ToolCapability) -> Self {
        self.descriptor = self.descriptor.capability(capability);
        self
    }

    /// Declares that the tool only reads.
    pub fn read_only(self) -> Self {
        self.capability(ToolCapability::read_only())
    }

    /// Declares that the tool writes.
    pub fn writes(self) -> Self {
        self.capability(ToolCapability::writes())
    }

    /// Limits the time of one call.
    pub fn call_timeout(mut self, limit: Duration) -> Self {
        self.descriptor = self.descriptor.call_timeout(limit);
        self
    }

    /// Limits how many calls run at once, over all plans.
    pub fn max_concurrent(mut self, limit: usize) -> Self {
        self.descriptor = self.descriptor.max_concurrent(limit);
        self
    }

    /// Checks `format` in the schemas too; see [`ToolDescriptor::check_formats`].
    pub fn check_formats(mut self) -> Self {
        self.descriptor = self.descriptor.check_formats();
        self
    }

    /// Asks the plan to bind a resource.
    pub fn resource(mut self, slot: ResourceSlot) -> Self {
        self.descriptor = self.descriptor.resource(slot);
        self
    }

    /// Makes the tool of an async function or closure.
    pub fn handler<A, O, F, Fut>(self, handler: F) -> FunctionTool
    where
        A: DeserializeOwned + JsonSchema + Send + 'static,
        O: Serialize + JsonSchema + 'static,
        F: Fn(ToolExecutionContext, A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<O, ToolFailure>> + Send + 'static,
    {
        self.typed::<A, O, _>(|secret| Typed { handler, types: PhantomData::<fn(A) -> O>, secret })
    }

    /// Makes the tool of an async function or closure that shares state.
    pub fn handler_with<S, A, O, F, Fut>(self, state: S, handler: F) -> FunctionTool
    where
        S: Clone + Send + Sync + 'static,
        A: DeserializeOwned + JsonSchema + Send + 'static,
        O: Serialize + JsonSchema + 'static,
        F: Fn(S, ToolExecutionContext, A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<O, ToolFailure>> + Send + 'static,
    {
        self.handler(move |ctx, args: A| handler(state.clone(), ctx, args))
    }

    /// Makes the tool of a plain function. It runs in the caller's task, so it must not block.
    pub fn function<A, O, F>(self, function: F) -> FunctionTool
    where
        A: DeserializeOwned + JsonSchema + Send + 'static,
        O: Serialize + JsonSchema + Send + 'static,
        F: Fn(A) -> Result<O, ToolFailure> + Send + Sync + 'static,
    {
        self.handler(move |_, args: A| std::future::ready(function(args)))
    }

    /// Makes the tool of a function that blocks its thread: it runs on one of the runtime's threads
    /// for blocking work.
    ///
    /// A thread cannot be stopped from outside. When the call is cancelled, its time is over or its
    /// plan ends, the caller goes on and the function is told by
    /// [`is_cancelled`](ToolExecutionContext::is_cancelled): a long one looks there now and then.
    ///
    /// # Examples
    ///
    /// ```
    /// use toolscope::ToolSpec;
    ///
    /// #[derive(serde::Deserialize, schemars::JsonSchema)]
    /// struct Number {
    ///     number: u64,
    /// }
    ///
    /// let tool = ToolSpec::new("is-prime").read_only().blocking(|ctx, Number { number }| {
    ///     for divisor in 2..number {
    ///         ctx.check()?;
    ///         if number % divisor == 0 {
    ///             return Ok(false);
    ///         }
    ///     }
    ///     Ok(number > 1)
    /// });
    /// # drop(tool);
    /// ```
    pub fn blocking<A, O, F>(self, function: F) -> FunctionTool
    where
        A: DeserializeOwned + JsonSchema + Send + 'static,
        O: Serialize + JsonSchema + Send + 'static,
        F: Fn(ToolExecutionContext, A) -> Result<O, ToolFailure> + Send + Sync + 'static,
    {
        let function = Arc::new(function);
        self.handler(move |ctx, args: A| {
            let function = Arc::clone(&function);
            async move {
                let own = ctx.clone();
                ctx.run_blocking(move || function(own, args)).await?
            }
        })
    }

    fn typed<A: JsonSchema, O: JsonSchema, I: ToolInstance>(
        self,
        instance: impl FnOnce(bool) -> I,
    ) -> FunctionTool {
        let mut descriptor = self.descriptor;
        let input = schema_of_input(schemars::schema_for!(A).to_value());
        let instance = instance(names_secrets(&input));
        if descriptor.description.is_empty() {
            let said = input.get("description").and_then(Value::as_str);
            said.unwrap_or_default().clone_into(&mut descriptor.description);
        }
        descriptor.input_schema = Some(input);
        // One type may be read and written in two ways, and an output is written.
        let written = SchemaSettings::draft2020_12().for_serialize().into_generator();
        descriptor.output_schema = Some(written.into_root_schema_for::<O>().to_value());
        FunctionTool { descriptor, instance: Arc::new(instance) }
    }
}

/// A tool made of a function. It has nothing to release, so it is immediate.
pub struct FunctionTool {
    descriptor: ToolDescriptor,
    instance: Arc<dyn ToolInstance>,
}

impl std::fmt::Debug for FunctionTool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FunctionTool").field("name", &self.descriptor.name).finish_non_exhaustive()
    }
}

#[async_trait]
impl Tool for FunctionTool {
    fn descriptor(&self) -> &ToolDescriptor {
        &self.descriptor
    }

    fn immediate(&self) -> Option<Arc<dyn ToolInstance>> {
        Some(Arc::clone(&self.instance))
    }

    async fn activate(
        &self,
        _ctx: &ActivationContext,
    ) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        Ok(Arc::clone(&self.instance))
    }
}

/// What takes nothing takes an empty object: a call's input is always an object.
fn schema_of_input(schema: Value) -> Value {
    if schema["type"] == "null" { json!({"type": "object", "maxProperties": 0}) } else { schema }
}

fn arguments<A: DeserializeOwned>(input: &Value) -> Result<A, serde_json::Error> {
    A::deserialize(input).or_else(|error| match input {
        Value::Object(fields) if fields.is_empty() => {
            A::deserialize(&Value::Null).map_err(|_| error)
        }
        _ => Err(error),
    })
}

/// Whether a schema says of any part that it must not be shown.
fn names_secrets(schema: &Value) -> bool {
    match schema {
        Value::Array(items) => items.iter().any(names_secrets),
        Value::Object(members) => says_secret(schema) || members.values().any(names_secrets),
        _ => false,
    }
}

/// A handler with the types of its arguments and its output.
struct Typed<F, A, O> {
    handler: F,
    types: PhantomData<fn(A) -> O>,
    /// Whether some of the input must not be shown.
    secret: bool,
}

#[async_trait]
impl<F, A, O, Fut> ToolInstance for Typed<F, A, O>
where
    A: DeserializeOwned + Send + 'static,
    O: Serialize + 'static,
    F: Fn(ToolExecutionContext, A) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<O, ToolFailure>> + Send + 'static,
{
    async fn execute(
        &self,
        ctx: &ToolExecutionContext,
        input: &Value,
    ) -> Result<ToolOutput, ToolFailure> {
        let args = arguments(input).map_err(|error| {
            // The error shows the value that it is about.
            let told = if self.secret { "(hidden)".to_owned() } else { error.to_string() };
            ToolFailure::invalid(format!("the input does not fit: {told}"))
        })?;
        let output = (self.handler)(ctx.clone(), args).await?;
        ToolOutput::json(output)
    }
}
