//! A plan as its owner and its users hold it.

use std::borrow::Borrow;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::batch::{self, ToolCall};
use crate::change::RecordedChange;
use crate::context::PlanId;
use crate::definition::{Provider, definitions};
use crate::error::{CallError, EndReason, ToolRuntimeError};
use crate::event::EventStream;
use crate::execute::{self, Call};
use crate::keeper::Begin;
use crate::options::{CallOptions, PlanOptions};
use crate::registry::{Snapshot, ToolChanges};
use crate::scope::PlanScope;
use crate::slot::Key;
use crate::sync::lock;
use crate::tool::ToolResult;
use crate::trace::{DeactivationRecord, ToolExecutionTrace};

/// One agent run: the scope of activations. It owns the plan and is not `Clone`; [`PlanHandle`] is.
///
/// # Examples
///
/// Calls from several tasks, and a plan under this one:
///
/// ```
/// use serde_json::json;
/// use toolscope::test_util::Probe;
/// use toolscope::{EndReason, PlanOptions, ToolRuntime};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let runtime = ToolRuntime::builder().tool(Probe::new("search").tool()).build().await?;
/// let plan = runtime.begin(PlanOptions::new())?;
/// let (one, two) = (plan.handle(), plan.handle());
/// let both = tokio::join!(one.execute("search", json!({})), two.execute("search", json!({})));
/// assert!(both.0?.success && both.1?.success);
///
/// let child = plan.begin_child(PlanOptions::new().read_only())?;
/// let refused = child.execute("search", json!({})).await;
/// assert!(refused.is_err(), "it does not say that it only reads");
///
/// plan.cancel();
/// assert_eq!(child.end_reason(), Some(EndReason::Cancelled));
/// let report = plan.finish().await;
/// assert_eq!((report.reason(), report.deactivations().len()), (EndReason::Cancelled, 1));
/// # Ok(()) }
/// ```
///
/// # Drop behaviour
///
/// Dropping it ends the plan: synchronously and without a Tokio runtime it refuses further calls
/// and hands every deactivation to the runtime's keeper. It never blocks and never panics. To know
/// when they are over, and how they went, use [`finish`](Self::finish).
#[must_use = "dropping a plan ends it"]
pub struct Plan {
    handle: PlanHandle,
}

impl Plan {
    pub(crate) fn new(scope: Arc<PlanScope>) -> Self {
        Self { handle: PlanHandle { scope } }
    }

    /// A handle to call through, from other tasks.
    pub fn handle(&self) -> PlanHandle {
        self.handle.clone()
    }

    /// Ends the plan and waits until everything of it is deactivated.
    ///
    /// Calls in flight see that they are cancelled, have the grace period, and are dropped. If the
    /// plan had ended before, the first reason stands. The wait is bounded by the plan's
    /// [`Deadlines`](crate::Deadlines), unless a tool blocks its thread in a deactivation whose first poll happens
    /// here; see [`Tool::off_thread`](crate::Tool::off_thread).
    ///
    /// # Cancel safety
    ///
    /// Once polled the plan has ended; dropping the future gives up the report and nothing else.
    pub async fn finish(self) -> PlanReport {
        self.end(EndReason::Finished).await
    }

    /// As [`finish`](Self::finish), for a plan whose work failed.
    ///
    /// # Cancel safety
    ///
    /// As there.
    pub async fn fail(self) -> PlanReport {
        self.end(EndReason::Failed).await
    }

    pub(crate) async fn end(self, reason: EndReason) -> PlanReport {
        let scope = &self.handle.scope;
        scope.close(reason, Begin::Here);
        let settled = scope.until_settled().await;
        let unsettled = if settled { Vec::new() } else { scope.unsettled() };
        PlanReport { scope: Arc::clone(scope), unsettled }
    }
}

impl Deref for Plan {
    type Target = PlanHandle;

    fn deref(&self) -> &PlanHandle {
        &self.handle
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        let scope = &self.handle.scope;
        if !scope.gate.is_closed() {
            let panicked = std::thread::panicking();
            let reason = if panicked { EndReason::Panicked } else { EndReason::Dropped };
            scope.close(reason, Begin::There);
        }
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plan")
            .field("id", &self.handle.scope.id)
            .field("ended", &self.handle.end_reason())
            .finish()
    }
}

/// A way to call through a plan, from any task. It does not keep the plan open.
#[derive(Clone)]
pub struct PlanHandle {
    pub(crate) scope: Arc<PlanScope>,
}

impl PlanHandle {
    /// The plan's number.
    pub fn id(&self) -> PlanId {
        self.scope.id
    }

    /// Executes a tool. The name may be the full one, one without `local/`, or the provider-safe
    /// form.
    ///
    /// What the tool or the model did wrong is `Ok` with `success: false`, to show the model. The
    /// tool is activated if it is not yet, at most once for the plan, and that activation belongs
    /// to the plan, not to this call.
    ///
    /// # Errors
    ///
    /// What the host must know: [`CallError::Cancelled`], or a [`ToolRuntimeError`] whose code
    /// tells what was refused.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the tool's future where it stands; an activation that it started
    /// goes on, and a trace says `abandoned`.
    ///
    /// # Examples
    ///
    /// ```
    /// use serde_json::json;
    /// use toolscope::{PlanOptions, ToolRuntime, ToolSpec};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # #[derive(serde::Deserialize, schemars::JsonSchema)] struct Text { text: String }
    /// let count = ToolSpec::new("word-count").read_only().function(|args: Text| Ok(args.text.split_whitespace().count()));
    /// let runtime = ToolRuntime::builder().tool(count).build().await?;
    /// let plan = runtime.begin(PlanOptions::new().read_only())?;
    /// let result = plan.execute("word-count", json!({"text": "one two"})).await?;
    /// assert_eq!(result.output, json!(2));
    /// plan.finish().await;
    /// # Ok(()) }
    /// ```
    pub async fn execute(
        &self,
        name: impl AsRef<str>,
        input: impl Borrow<Value>,
    ) -> Result<ToolResult, CallError> {
        let call = Call::new(&self.scope, name.as_ref(), Ok(input.borrow()), CallOptions::new());
        execute::call(&call).await
    }

    /// As [`execute`](Self::execute), with a timeout or a token of the call's own.
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Cancel safety
    ///
    /// As there.
    pub async fn execute_with(
        &self,
        name: impl AsRef<str>,
        input: impl Borrow<Value>,
        options: CallOptions,
    ) -> Result<ToolResult, CallError> {
        let call = Call::new(&self.scope, name.as_ref(), Ok(input.borrow()), options);
        execute::call(&call).await
    }

    /// As [`execute`](Self::execute), with the arguments as a model wrote them: a text that is to
    /// be a JSON object. An empty text is taken for `{}`; what is no JSON is an `invalid_input`
    /// that says where it breaks.
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Cancel safety
    ///
    /// As there.
    pub async fn execute_json(
        &self,
        name: impl AsRef<str>,
        arguments: impl AsRef<str>,
        options: CallOptions,
    ) -> Result<ToolResult, CallError> {
        let arguments = arguments.as_ref();
        let arguments = if arguments.trim().is_empty() { "{}" } else { arguments };
        let parsed: Result<Value, String> = serde_json::from_str(arguments)
            .map_err(|error| format!("the arguments are no JSON: {error}"));
        let input = parsed.as_ref().map_err(String::as_str);
        let call = Call::new(&self.scope, name.as_ref(), input, options);
        execute::call(&call).await
    }

    /// Executes what a model asked for in one turn. Calls of tools that only read run together; any
    /// other waits for all before it, and all after it wait for it. One that fails or is refused
    /// stops no other. The results are in the order of the calls.
    ///
    /// # Cancel safety
    ///
    /// As [`execute`](Self::execute), for each call that has begun; the others leave no trace.
    ///
    /// # Examples
    ///
    /// ```
    /// use serde_json::json;
    /// use toolscope::test_util::Probe;
    /// use toolscope::{PlanOptions, ToolCall, ToolRuntime};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let runtime = ToolRuntime::builder().tool(Probe::new("search").tool()).build().await?;
    /// let plan = runtime.begin(PlanOptions::new())?;
    /// let calls = [ToolCall::new("search", json!({})), ToolCall::new("serach", json!({}))];
    /// let results = plan.execute_batch(&calls).await;
    /// assert!(results[0].is_ok() && results[1].is_err());
    /// # Ok(()) }
    /// ```
    pub async fn execute_batch(&self, calls: &[ToolCall]) -> Vec<Result<ToolResult, CallError>> {
        batch::execute(self, calls).await
    }

    /// Activates a tool ahead of its first call, through the same gate. The only way back after
    /// [`deactivate`](Self::deactivate). Does nothing for an immediate tool, and for one that is
    /// active.
    ///
    /// # Errors
    ///
    /// As [`execute`](Self::execute).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future neither stops nor repeats the activation.
    pub async fn activate(&self, name: impl AsRef<str>) -> Result<(), CallError> {
        execute::activate(&self.scope, name.as_ref()).await
    }

    /// Deactivates a tool before the end of the plan and waits until that has settled. True if
    /// there was an instance, or an activation under way; false for an immediate tool, for one that
    /// is not active, and while another deactivation of it is under way.
    ///
    /// Running calls are not cancelled; they have until the end budget. Once it gave true, calls give
    /// `NotActivated` until [`activate`](Self::activate).
    ///
    /// # Cancel safety
    ///
    /// Once polled the deactivation goes on without the future.
    pub async fn deactivate(&self, name: impl AsRef<str>) -> bool {
        match self.scope.resolve(name.as_ref()) {
            Ok(tool) => self.scope.deactivate(&Key::Tool(tool.id)).await,
            Err(_) => false,
        }
    }

    /// Cancels the plan: it ends, calls in flight see it and have the grace period. Synchronous and
    /// idempotent.
    pub fn cancel(&self) {
        self.scope.close(EndReason::Cancelled, Begin::There);
    }

    /// Why the plan ended; `None` while it is open.
    pub fn end_reason(&self) -> Option<EndReason> {
        self.scope.end_reason()
    }

    /// Waits until the plan has ended, by whatever way.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn ended(&self) {
        self.scope.ended().await;
    }

    /// Begins a plan under this one, with its own activations and never more rights: read-only,
    /// checkpoints and call timeout add up, unsafe tools need both, resources and sandbox can only
    /// be narrowed. Limits of calls at once are each plan's own. When this plan ends the child
    /// ends, and this one waits for it.
    ///
    /// # Errors
    ///
    /// `PlanEnded` or `ShutDown`; `AccessDenied` if the options ask for more than this plan has.
    pub fn begin_child(&self, options: PlanOptions) -> Result<Plan, ToolRuntimeError> {
        self.scope.core.begin(options, Some(&self.scope), None)
    }

    /// All tools of the plan, as they were when it began or last
    /// [`sync_tools`](Self::sync_tools)ed: those too that its rights do not allow.
    pub fn tools(&self) -> &Snapshot {
        self.scope.tools.latest()
    }

    /// The tools that the plan's rights and rules allow, as a provider wants a model told of them:
    /// an array, sorted by name, the same bytes each time. The names in it are what
    /// [`execute`](Self::execute) takes.
    ///
    /// # Examples
    ///
    /// ```
    /// use toolscope::test_util::Probe;
    /// use toolscope::{PlanOptions, Provider, ToolRuntime};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let runtime = ToolRuntime::builder().tool(Probe::new("web/search").tool()).build().await?;
    /// let plan = runtime.begin(PlanOptions::new())?;
    /// assert_eq!(plan.definitions(Provider::Anthropic)[0]["name"], "web__search");
    /// let careful = runtime.begin(PlanOptions::new().read_only())?;
    /// assert_eq!(careful.definitions(Provider::Anthropic), serde_json::json!([]));
    /// # Ok(()) }
    /// ```
    pub fn definitions(&self, provider: Provider) -> Value {
        let allowed = self.tools();
        definitions(allowed.descriptors().filter(|tool| self.scope.may_use(tool)), provider)
    }

    /// Goes by the registry's tools as they are now, from the next call on, and says what is
    /// different; a child plan by those of its parent. Between two turns of a model, so that its
    /// tools do not change under it.
    ///
    /// What is active and the same stays. What is active and gone can still be called. What is
    /// active and defined otherwise gives `DefinitionChanged` until it is
    /// [`deactivate`](Self::deactivate)d and [`activate`](Self::activate)d.
    pub fn sync_tools(&self) -> ToolChanges {
        self.scope.sync_tools()
    }

    /// The events of the plan from now on.
    pub fn subscribe(&self) -> EventStream {
        self.scope.subscribe()
    }

    /// What its calls did so far, in the order in which they ended.
    pub fn traces(&self) -> Vec<ToolExecutionTrace> {
        self.scope.traces()
    }

    /// The changes that its tools recorded so far.
    pub fn changes(&self) -> Vec<RecordedChange> {
        lock(&self.scope.log).changes()
    }
}

impl fmt::Debug for PlanHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlanHandle")
            .field("id", &self.scope.id)
            .field("ended", &self.end_reason())
            .finish()
    }
}

// ===== PlanReport =====

/// How a plan ended: why, what it did, and how each deactivation went. It keeps the plan's record
/// in memory.
#[derive(Clone)]
pub struct PlanReport {
    scope: Arc<PlanScope>,
    unsettled: Vec<String>,
}

impl PlanReport {
    /// The plan.
    pub fn plan_id(&self) -> PlanId {
        self.scope.id
    }

    /// Why it ended: the first reason.
    pub fn reason(&self) -> EndReason {
        self.scope.end_reason().unwrap_or(EndReason::Finished)
    }

    /// The deactivations of its instances, in the order in which they were over.
    pub fn deactivations(&self) -> Vec<DeactivationRecord> {
        self.scope.deactivations()
    }

    /// What had not come to rest when the wait was over, by name. Empty in all but the worst case.
    pub fn unsettled(&self) -> &[String] {
        &self.unsettled
    }

    /// Calls that were still being polled at the drain deadline, because their tool blocks its
    /// thread.
    pub fn overrun(&self) -> u64 {
        self.scope.overrun()
    }

    /// What its calls did, in the order in which they ended.
    pub fn traces(&self) -> Vec<ToolExecutionTrace> {
        self.scope.traces()
    }

    /// Traces that had to go because of the cap.
    pub fn dropped_traces(&self) -> u64 {
        lock(&self.scope.log).dropped()
    }

    /// The changes that its tools recorded.
    pub fn changes(&self) -> Vec<RecordedChange> {
        lock(&self.scope.log).changes()
    }

    /// The deactivations that did not go well, as errors.
    pub fn errors(&self) -> Vec<ToolRuntimeError> {
        use crate::trace::DeactivationOutcome as Outcome;
        let problem = |record: DeactivationRecord| {
            let problem = match record.outcome {
                Outcome::Ok => return None,
                Outcome::Failed(text) => text,
                Outcome::Panicked(text) => format!("it panicked: {text}"),
                Outcome::TimedOut => "it did not return by its deadline".to_owned(),
                Outcome::Abandoned => "the keeper ended while it ran".to_owned(),
                Outcome::Lost => "it could not be called".to_owned(),
            };
            Some(ToolRuntimeError::Deactivation { tool: record.name, problem })
        };
        self.deactivations().into_iter().filter_map(problem).collect()
    }
}

impl Serialize for PlanReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut report = serializer.serialize_struct("PlanReport", 8)?;
        report.serialize_field("plan_id", &self.plan_id())?;
        report.serialize_field("reason", &self.reason())?;
        report.serialize_field("deactivations", &self.deactivations())?;
        report.serialize_field("unsettled", &self.unsettled)?;
        report.serialize_field("overrun", &self.overrun())?;
        report.serialize_field("traces", &self.traces())?;
        report.serialize_field("dropped_traces", &self.dropped_traces())?;
        report.serialize_field("changes", &self.changes())?;
        report.end()
    }
}

impl fmt::Debug for PlanReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlanReport")
            .field("plan", &self.scope.id)
            .field("reason", &self.reason())
            .field("deactivations", &self.deactivations())
            .field("unsettled", &self.unsettled)
            .field("overrun", &self.overrun())
            .finish_non_exhaustive()
    }
}
