//! The traits that authors implement, and what a call gives back.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::contain::drop_contained;
use crate::context::{ActivationContext, DeactivationContext, ToolExecutionContext};
use crate::descriptor::ToolDescriptor;
use crate::error::{CallError, OutcomeCode, ToolCancelled, ToolRuntimeError};
use crate::finite::check_finite;

/// Something registered under a name: light, and able to become an instance.
///
/// A *managed* tool has something to release, so the runtime activates it at most once per plan and
/// deactivates it when the plan ends, by whatever way. An *immediate* tool returns its one instance
/// from [`immediate`](Self::immediate) and costs nothing per plan; its `activate` and `deactivate`
/// are never called.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use async_trait::async_trait;
/// use toolscope::{ActivationContext, DeactivationContext, Tool, ToolDescriptor, ToolExecutionContext};
/// use toolscope::{ToolFailure, ToolInstance, ToolOutput};
///
/// struct Database(ToolDescriptor);
/// struct Connection;
///
/// #[async_trait]
/// impl Tool for Database {
///     fn descriptor(&self) -> &ToolDescriptor {
///         &self.0
///     }
///     async fn activate(&self, _: &ActivationContext) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
///         Ok(Arc::new(Connection)) // connect here
///     }
/// }
///
/// #[async_trait]
/// impl ToolInstance for Connection {
///     async fn execute(&self, _: &ToolExecutionContext, input: &serde_json::Value) -> Result<ToolOutput, ToolFailure> {
///         Ok(ToolOutput::new(input["query"].clone()))
///     }
///     async fn deactivate(&self, _: &DeactivationContext) -> Result<(), ToolFailure> {
///         Ok(()) // say goodbye here
///     }
/// }
/// ```
#[async_trait]
pub trait Tool: Send + Sync + 'static {
    /// What is known without activating. Read once, at registration.
    fn descriptor(&self) -> &ToolDescriptor;

    /// The one instance of a tool that has nothing to release. Asked once, at registration.
    fn immediate(&self) -> Option<Arc<dyn ToolInstance>> {
        None
    }

    /// Makes the tool ready for one plan. Runs on the runtime's keeper, so what it opens lives
    /// until `deactivate`.
    ///
    /// The first poll may happen in the task that asked for the tool, inside the keeper's context
    /// (`spawn_local` there would land on that task's `LocalSet`); see
    /// [`off_thread`](Self::off_thread).
    /// What must be undone if this does not return `Ok` goes to [`ActivationContext::defer`];
    /// `deactivate` is not called then.
    async fn activate(&self, ctx: &ActivationContext)
    -> Result<Arc<dyn ToolInstance>, ToolFailure>;

    /// Whether activation and deactivation run on a thread where they may block or call
    /// `block_in_place`, and are never polled by the task that asked for them.
    fn off_thread(&self) -> bool {
        false
    }
}

#[async_trait]
impl<T: Tool + ?Sized> Tool for Arc<T> {
    fn descriptor(&self) -> &ToolDescriptor {
        (**self).descriptor()
    }

    fn immediate(&self) -> Option<Arc<dyn ToolInstance>> {
        (**self).immediate()
    }

    async fn activate(
        &self,
        ctx: &ActivationContext,
    ) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        (**self).activate(ctx).await
    }

    fn off_thread(&self) -> bool {
        (**self).off_thread()
    }
}

/// A tool that is active in one plan. To hold one *is* to have activated it.
#[async_trait]
pub trait ToolInstance: Send + Sync + 'static {
    /// Carries out one call, in the caller's task. Calls of one plan may overlap.
    ///
    /// The future is dropped when the call's deadline passes or the plan's grace period is over.
    async fn execute(
        &self,
        ctx: &ToolExecutionContext,
        input: &Value,
    ) -> Result<ToolOutput, ToolFailure>;

    /// Releases what `activate` made. Called exactly once, on the keeper, after the last execution.
    ///
    /// It runs under its own deadline and never under the plan's cancelled token. An error, a panic
    /// or a hang is reported and stops nothing else.
    async fn deactivate(&self, ctx: &DeactivationContext) -> Result<(), ToolFailure> {
        let _ = ctx;
        Ok(())
    }
}

/// Something that several tools of one plan need, such as one connection. Made by
/// [`ActivationContext::shared`]; deactivated after the last tool that was handed it.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use toolscope::{ActivationContext, DeactivationContext, SharedActivation, ToolFailure, async_trait};
///
/// struct Connection;
///
/// #[async_trait]
/// impl SharedActivation for Connection {
///     async fn deactivate(&self, _: &DeactivationContext) -> Result<(), ToolFailure> {
///         Ok(()) // close it here
///     }
/// }
///
/// /// What the `activate` of each tool that needs the connection begins with.
/// async fn connection(ctx: &ActivationContext) -> Result<Arc<Connection>, ToolFailure> {
///     ctx.shared("main", |_ctx| async { Ok(Connection) }).await
/// }
/// # let _ = connection;
/// ```
#[async_trait]
pub trait SharedActivation: Send + Sync + 'static {
    /// Releases it. Called exactly once, as [`ToolInstance::deactivate`].
    async fn deactivate(&self, ctx: &DeactivationContext) -> Result<(), ToolFailure>;
}

// ===== ToolFailure =====

/// What an author returns when a tool could not do its work.
///
/// Any error converts with `?`; a cancellation and a refused nested call keep what they were. It is
/// not an [`Error`] itself, which is what makes that conversion possible.
///
/// # Examples
///
/// ```
/// use toolscope::{FailureKind, ToolFailure};
///
/// fn parse(text: &str) -> Result<i64, ToolFailure> {
///     Ok(text.parse::<i64>()?)
/// }
/// assert_eq!(parse("x").unwrap_err().kind(), FailureKind::Failed);
/// assert_eq!(ToolFailure::invalid("`path` must be relative").kind(), FailureKind::Invalid);
/// ```
#[derive(Clone)]
pub struct ToolFailure {
    kind: FailureKind,
    message: String,
    code: Option<OutcomeCode>,
    source: Option<Arc<dyn Error + Send + Sync>>,
    /// It is that of a shared activation, and not the fault of who hands it on.
    shared: bool,
}

impl Drop for ToolFailure {
    fn drop(&mut self) {
        // The error behind it is the tool's.
        drop_contained(self.source.take());
    }
}

/// What kind of failure a [`ToolFailure`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FailureKind {
    /// The work failed.
    Failed,
    /// The input makes no sense.
    Invalid,
    /// It may go well another time.
    Transient,
    /// The tool stopped because it was asked to.
    Cancelled,
    /// Something of the tool's own is not activated.
    NotActivated,
    /// It was sent and the answer was lost.
    OutcomeUnknown,
    /// The output cannot be JSON.
    InvalidOutput,
}

impl ToolFailure {
    /// A failure of that kind, with a text for the model.
    pub fn new(kind: FailureKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), code: None, source: None, shared: false }
    }

    /// The work failed.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(FailureKind::Failed, message)
    }

    /// The input makes no sense.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(FailureKind::Invalid, message)
    }

    /// It may go well another time.
    pub fn transient(message: impl Into<String>) -> Self {
        Self::new(FailureKind::Transient, message)
    }

    /// What kind of failure it is.
    pub fn kind(&self) -> FailureKind {
        self.kind
    }

    /// The text for the model.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The error behind it, where there is one.
    pub fn source(&self) -> Option<&(dyn Error + Send + Sync + 'static)> {
        self.source.as_deref()
    }

    /// Adds the error behind it.
    #[must_use]
    pub fn with_source(mut self, source: impl Error + Send + Sync + 'static) -> Self {
        self.source = Some(Arc::new(source));
        self
    }

    pub(crate) fn take_source(&mut self) -> Option<Arc<dyn Error + Send + Sync>> {
        self.source.take()
    }

    pub(crate) fn of_shared(mut self) -> Self {
        self.shared = true;
        self
    }

    pub(crate) fn is_of_shared(&self) -> bool {
        self.shared
    }

    /// The outcome of the call that ends with this.
    pub(crate) fn code(&self) -> OutcomeCode {
        self.code.unwrap_or(match self.kind {
            FailureKind::Failed | FailureKind::Transient => OutcomeCode::Execution,
            FailureKind::Invalid => OutcomeCode::InvalidInput,
            FailureKind::Cancelled => OutcomeCode::Cancelled,
            FailureKind::NotActivated => OutcomeCode::NotActivated,
            FailureKind::OutcomeUnknown => OutcomeCode::OutcomeUnknown,
            FailureKind::InvalidOutput => OutcomeCode::InvalidOutput,
        })
    }
}

impl fmt::Debug for ToolFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ToolFailure")
            .field("kind", &self.kind)
            .field("message", &self.message)
            .finish_non_exhaustive()
    }
}

impl fmt::Display for ToolFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl<E: Error + Send + Sync + 'static> From<E> for ToolFailure {
    fn from(error: E) -> Self {
        let any: &(dyn Error + 'static) = &error;
        let runtime = match any.downcast_ref::<CallError>() {
            Some(CallError::Runtime(error)) => Some(error),
            _ => any.downcast_ref::<ToolRuntimeError>(),
        };
        let is_cancelled = any.is::<ToolCancelled>()
            || matches!(any.downcast_ref::<CallError>(), Some(CallError::Cancelled(_)));
        Self {
            kind: if is_cancelled { FailureKind::Cancelled } else { FailureKind::Failed },
            // What an operator is told of a call is in the source: this is for a model.
            message: runtime.map_or_else(|| error.to_string(), ToolRuntimeError::told),
            code: runtime.map(ToolRuntimeError::code),
            source: Some(Arc::new(error)),
            shared: false,
        }
    }
}

// ===== ToolOutput and ToolResult =====

/// What a tool gives back: any JSON, and metadata for the host.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct ToolOutput {
    /// The output.
    pub value: Value,
    /// For the host; a model does not see it.
    pub metadata: Map<String, Value>,
}

impl ToolOutput {
    /// An output without metadata.
    pub fn new(value: Value) -> Self {
        Self { value, metadata: Map::new() }
    }

    /// Any value that is JSON when serialised.
    ///
    /// # Errors
    ///
    /// A failure of the kind [`InvalidOutput`](FailureKind::InvalidOutput) when it is not: keys
    /// that are no strings, numbers that JSON does not have (NaN, an infinity).
    pub fn json<T: Serialize>(value: T) -> Result<Self, ToolFailure> {
        let invalid = |error: &dyn fmt::Display| {
            let message = format!("the output cannot be JSON: {error}");
            ToolFailure::new(FailureKind::InvalidOutput, message)
        };
        let json = serde_json::to_value(&value).map_err(|error| invalid(&error))?;
        // What is not finite becomes null on its way, without an error.
        if has_null(&json) {
            check_finite(&value).map_err(|error| invalid(&error))?;
        }
        Ok(Self::new(json))
    }

    /// Adds an entry to the metadata. The words that the runtime uses there itself are dropped; see
    /// [`ToolResult::metadata`].
    #[must_use]
    pub fn with_metadata(mut self, key: impl Into<String>, value: impl Into<Value>) -> Self {
        self.metadata.insert(key.into(), value.into());
        self
    }
}

fn has_null(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.iter().any(has_null),
        Value::Object(fields) => fields.values().any(has_null),
        Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

impl From<Value> for ToolOutput {
    fn from(value: Value) -> Self {
        Self::new(value)
    }
}

/// How a call went, to show the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ToolResult {
    /// Whether the tool did its work.
    pub success: bool,
    /// What it gave back; null without success.
    pub output: Value,
    /// What went wrong, in words that a model can act on.
    #[serde(default)]
    pub error: Option<String>,
    /// Time from the first poll of the call to its result, in milliseconds.
    pub duration_ms: f64,
    /// From the tool, and from the runtime: `code` where there is no success, `faults` where a
    /// schema is broken, `output_valid: false` and `output_faults` where that is let pass,
    /// `truncated: {from_bytes, to_bytes}` where the output was cut, `input_changed: true` where an
    /// approver changed the input.
    #[serde(default)]
    pub metadata: Map<String, Value>,
}

impl ToolResult {
    pub(crate) fn succeeded(output: ToolOutput) -> Self {
        let ToolOutput { value, metadata } = output;
        Self { success: true, output: value, error: None, duration_ms: 0.0, metadata }
    }

    pub(crate) fn failed(code: OutcomeCode, error: impl Into<String>) -> Self {
        let metadata = Map::from_iter([("code".to_owned(), Value::from(code.as_str()))]);
        Self {
            success: false,
            output: Value::Null,
            error: Some(error.into()),
            duration_ms: 0.0,
            metadata,
        }
    }

    /// The stable code of the outcome: `ok`, or what stands in the metadata.
    pub fn code(&self) -> &str {
        if self.success {
            "ok"
        } else {
            self.metadata.get("code").and_then(Value::as_str).unwrap_or("execution")
        }
    }

    /// What to show the model: a text as it is, any other output as JSON, a failure with its code.
    /// An output that was cut says so at its end.
    ///
    /// # Examples
    ///
    /// ```
    /// # use serde_json::json;
    /// # let from = serde_json::from_value::<toolscope::ToolResult>;
    /// let result = from(json!({"success": true, "output": {"sum": 3}, "duration_ms": 0.1}))?;
    /// assert_eq!(result.to_model_text(), r#"{"sum":3}"#);
    /// # Ok::<(), serde_json::Error>(())
    /// ```
    pub fn to_model_text(&self) -> String {
        if !self.success {
            return format!(
                "error ({}): {}",
                self.code(),
                self.error.as_deref().unwrap_or("failed")
            );
        }
        let text = match &self.output {
            Value::String(text) => text.clone(),
            output => output.to_string(),
        };
        match self.metadata.get("truncated").map(|cut| (&cut["from_bytes"], &cut["to_bytes"])) {
            Some((Value::Number(from), Value::Number(to))) => {
                format!("{text}\n[the output was cut from {from} to {to} bytes]")
            }
            _ => text,
        }
    }

    /// The output, or the failure as an error.
    ///
    /// # Errors
    ///
    /// [`ToolRuntimeError::Execution`] when the call had no success.
    pub fn into_result(self) -> Result<Value, ToolRuntimeError> {
        if self.success {
            return Ok(self.output);
        }
        // It may come from another process, and say what it likes.
        let code = OutcomeCode::deserialize(Value::from(self.code())).ok();
        let code = code.filter(|code| *code != OutcomeCode::Ok).unwrap_or(OutcomeCode::Execution);
        Err(ToolRuntimeError::Execution { code, message: self.error.unwrap_or_default() })
    }
}
