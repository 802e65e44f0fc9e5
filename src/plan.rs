//! A plan as its owner and its users hold it.

use std::borrow::Borrow;
use std::fmt;
use std::ops::Deref;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::change::RecordedChange;
use crate::context::PlanId;
use crate::descriptor::BoundResource;
use crate::error::{CallError, EndReason, ToolRuntimeError};
use crate::execute::{self, Call, CallOptions};
use crate::keeper::Begin;
use crate::policy::Rights;
use crate::registry::Snapshot;
use crate::scope::PlanScope;
use crate::slot::{Key, Limits};
use crate::sync::lock;
use crate::tool::ToolResult;
use crate::trace::{DeactivationRecord, ToolExecutionTrace};

/// The runtime's bounds in time. A setting of the runtime, and of a plan where it differs.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use toolscope::Deadlines;
///
/// let patient = Deadlines::default().activate(Duration::from_secs(120));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct Deadlines {
    pub(crate) activate: Duration,
    pub(crate) grace: Duration,
    pub(crate) drain: Duration,
    pub(crate) deactivate: Duration,
    pub(crate) end: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            activate: Duration::from_secs(30),
            grace: Duration::from_secs(2),
            drain: Duration::from_secs(2),
            deactivate: Duration::from_secs(10),
            end: Duration::from_secs(30),
        }
    }
}

impl Deadlines {
    /// How long one attempt to activate may take. 30 s by default; once its plan has ended, what is
    /// left of [`end`](Self::end) if that is less.
    pub fn activate(mut self, limit: Duration) -> Self {
        self.activate = limit;
        self
    }

    /// How long running calls may go on after they see that they are cancelled. 2 s by default.
    pub fn grace(mut self, limit: Duration) -> Self {
        self.grace = limit;
        self
    }

    /// How long, after the grace, to wait for a call that is being polled at that very moment. 2 s
    /// by default; what still is blocks its thread and stands in the report as overrun.
    pub fn drain(mut self, limit: Duration) -> Self {
        self.drain = limit;
        self
    }

    /// How long one deactivation may take. 10 s by default.
    pub fn deactivate(mut self, limit: Duration) -> Self {
        self.deactivate = limit;
        self
    }

    /// The total budget for the end of a plan. 30 s by default. A deactivation gets the less of its
    /// own limit and what is left, but never under 250 ms.
    pub fn end(mut self, limit: Duration) -> Self {
        self.end = limit;
        self
    }
}

/// What a plan is and may do. Everything has a default.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use toolscope::PlanOptions;
///
/// let options = PlanOptions::new().read_only().call_timeout(Duration::from_secs(30));
/// ```
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct PlanOptions {
    rights: Rights,
    token: Option<CancellationToken>,
    deadline: Option<Duration>,
    call_timeout: Option<Duration>,
    permit_wait: Option<Duration>,
    max_concurrent: Option<usize>,
    deadlines: Option<Deadlines>,
    max_attempts: Option<u32>,
    max_generations: Option<u32>,
    trace_cap: Option<usize>,
    metadata: Map<String, Value>,
    resources: Vec<BoundResource>,
    sandbox: Option<PathBuf>,
}

impl PlanOptions {
    /// A plan that may write, needs no checkpoints, and allows no unsafe tool.
    pub fn new() -> Self {
        Self::default()
    }

    /// Refuses every tool that writes, and every tool that does not say that it only reads.
    pub fn read_only(mut self) -> Self {
        self.rights.read_only = true;
        self
    }

    /// Refuses every writer that cannot have a checkpoint.
    pub fn require_checkpoints(mut self) -> Self {
        self.rights.checkpoints = true;
        self
    }

    /// Allows tools that declare `unsafe` without an approval.
    pub fn allow_unsafe(mut self) -> Self {
        self.rights.allow_unsafe = true;
        self
    }

    /// Cancels the plan when the token is cancelled.
    pub fn token(mut self, token: CancellationToken) -> Self {
        self.token = Some(token);
        self
    }

    /// Ends the plan after that time, even if its owner leaked it. None by default.
    pub fn deadline(mut self, limit: Duration) -> Self {
        self.deadline = Some(limit);
        self
    }

    /// Limits the time of each call. None by default.
    pub fn call_timeout(mut self, limit: Duration) -> Self {
        self.call_timeout = Some(limit);
        self
    }

    /// How long a call waits for room under a limit of calls at once. 30 s by default.
    pub fn permit_wait(mut self, limit: Duration) -> Self {
        self.permit_wait = Some(limit);
        self
    }

    /// How many calls of the plan run at once; nested ones do not count. No limit by default; 0 is
    /// taken as 1.
    pub fn max_concurrent(mut self, limit: usize) -> Self {
        self.max_concurrent = Some(limit.clamp(1, Semaphore::MAX_PERMITS));
        self
    }

    /// The bounds in time that differ from the runtime's.
    pub fn deadlines(mut self, deadlines: Deadlines) -> Self {
        self.deadlines = Some(deadlines);
        self
    }

    /// How many attempts an activation has before its last error is final. 3 by default; 0 is taken
    /// as 1.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = Some(attempts.max(1));
        self
    }

    /// How many instances of a tool the plan makes when they are tainted, the first included. 3 by
    /// default.
    pub fn max_generations(mut self, generations: u32) -> Self {
        self.max_generations = Some(generations.max(1));
        self
    }

    /// How many traces the plan keeps; past that the oldest go, counted. 10,000 by default.
    pub fn trace_cap(mut self, traces: usize) -> Self {
        self.trace_cap = Some(traces.max(1));
        self
    }

    /// Says something about the plan that tools can read.
    pub fn metadata(mut self, key: impl Into<String>, value: impl Into<Value>) -> Self {
        self.metadata.insert(key.into(), value.into());
        self
    }

    /// Binds a resource.
    pub fn resource(mut self, resource: BoundResource) -> Self {
        self.resources.push(resource);
        self
    }

    /// The directory that file tools are confined to.
    pub fn sandbox(mut self, root: impl Into<PathBuf>) -> Self {
        self.sandbox = Some(root.into());
        self
    }

    /// The token and the deadline: what has to be watched.
    pub(crate) fn watched(&self) -> (Option<CancellationToken>, Option<Duration>) {
        (self.token.clone(), self.deadline)
    }

    /// The settings of the plan; `None` where they are the runtime's.
    pub(crate) fn settle(
        self,
        defaults: &PlanSettings,
        is_child: bool,
    ) -> Option<Box<PlanSettings>> {
        let Self {
            rights,
            token,
            deadline: _,
            call_timeout,
            permit_wait,
            max_concurrent,
            deadlines,
            max_attempts,
            max_generations,
            trace_cap,
            metadata,
            resources,
            sandbox,
        } = self;
        let plain = rights == Rights::default()
            && token.is_none()
            && call_timeout.is_none()
            && permit_wait.is_none()
            && max_concurrent.is_none()
            && deadlines.is_none()
            && max_attempts.is_none()
            && max_generations.is_none()
            && trace_cap.is_none()
            && metadata.is_empty()
            && resources.is_empty()
            && sandbox.is_none();
        if plain && !is_child {
            return None;
        }
        Some(Box::new(PlanSettings {
            rights,
            token,
            call_timeout: call_timeout.or(defaults.call_timeout),
            permit_wait: permit_wait.unwrap_or(defaults.permit_wait),
            permits: max_concurrent.map(Semaphore::new),
            deadlines: deadlines.unwrap_or(defaults.deadlines),
            limits: Limits {
                attempts: max_attempts.unwrap_or(defaults.limits.attempts),
                generations: max_generations.unwrap_or(defaults.limits.generations),
            },
            trace_cap: trace_cap.unwrap_or(defaults.trace_cap),
            metadata,
            resources,
            sandbox,
        }))
    }
}

/// [`PlanOptions`], settled against the runtime's defaults.
#[derive(Debug)]
pub(crate) struct PlanSettings {
    pub(crate) rights: Rights,
    pub(crate) token: Option<CancellationToken>,
    pub(crate) call_timeout: Option<Duration>,
    pub(crate) permit_wait: Duration,
    pub(crate) permits: Option<Semaphore>,
    pub(crate) deadlines: Deadlines,
    pub(crate) limits: Limits,
    pub(crate) trace_cap: usize,
    pub(crate) metadata: Map<String, Value>,
    pub(crate) resources: Vec<BoundResource>,
    pub(crate) sandbox: Option<PathBuf>,
}

impl PlanSettings {
    pub(crate) fn defaults(deadlines: Deadlines) -> Self {
        Self {
            rights: Rights::default(),
            token: None,
            call_timeout: None,
            permit_wait: Duration::from_secs(30),
            permits: None,
            deadlines,
            limits: Limits { attempts: 3, generations: 3 },
            trace_cap: 10_000,
            metadata: Map::new(),
            resources: Vec::new(),
            sandbox: None,
        }
    }

    /// Makes sure that a child of a plan with `parent` settings can do nothing that the parent
    /// could not.
    pub(crate) fn confine(&mut self, parent: &Self) -> Result<(), ToolRuntimeError> {
        let denied = |reason: String| ToolRuntimeError::AccessDenied {
            tool: "a child plan".to_owned(),
            reason,
        };
        self.rights = self.rights.meet(parent.rights);
        self.call_timeout = [self.call_timeout, parent.call_timeout].into_iter().flatten().min();
        if let Some(foreign) = self.resources.iter().find(|bound| !parent.resources.contains(bound))
        {
            return Err(denied(format!(
                "its parent does not bind the resource `{}`",
                foreign.name
            )));
        }
        if self.resources.is_empty() {
            self.resources.clone_from(&parent.resources);
        }
        for (key, value) in &parent.metadata {
            if !self.metadata.contains_key(key) {
                self.metadata.insert(key.clone(), value.clone());
            }
        }
        match (&self.sandbox, &parent.sandbox) {
            (Some(own), parent)
                if !parent.as_ref().is_some_and(|parent| is_inside(own, parent)) =>
            {
                let own = own.display();
                return Err(denied(format!("its parent has no sandbox that holds `{own}`")));
            }
            (None, parent) => self.sandbox.clone_from(parent),
            _ => {}
        }
        Ok(())
    }
}

fn is_inside(path: &Path, root: &Path) -> bool {
    path.starts_with(root) && !path.components().any(|part| part == Component::ParentDir)
}

// ===== Plan =====

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
    /// [`Deadlines`], unless a tool blocks its thread in a deactivation whose first poll happens
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
        let call = Call {
            scope: &self.scope,
            name: name.as_ref(),
            input: input.borrow(),
            options: CallOptions::new(),
            above: None,
        };
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
        let call = Call {
            scope: &self.scope,
            name: name.as_ref(),
            input: input.borrow(),
            options,
            above: None,
        };
        execute::call(&call).await
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
        match self.scope.tools.resolve(name.as_ref()) {
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
        self.scope.core.begin(options, Some(&self.scope))
    }

    /// The tools of the plan, as they were when it began.
    pub fn tools(&self) -> &Snapshot {
        &self.scope.tools
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
