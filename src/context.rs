//! What the runtime hands to tools: one context for each stage.
//!
//! A context has no public constructor outside the `test-util` feature: to have one is to have come
//! by the path of a call.

use std::fmt;
use std::future::Future;
use std::path::Path;
use std::pin::pin;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::change::Change;
use crate::contain::{BoxFuture, contain};
use crate::descriptor::BoundResource;
use crate::error::{CallError, EndReason, ToolCancelled, ToolRuntimeError};
use crate::event::{EventKind, Progress};
use crate::execute::{self, Call, Frame};
use crate::obligation::{Active, Attempt};
use crate::options::{CallOptions, PlanOptions};
use crate::plan::Plan;
use crate::scope::PlanScope;
use crate::slot::{Refused, SlotId, Why};
use crate::sync::{Mutex, lock};
use crate::tool::{FailureKind, SharedActivation, ToolFailure, ToolResult};

/// The number of a plan within its runtime, from 1. 0 is the runtime's root scope.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PlanId(u64);

impl PlanId {
    pub(crate) fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number.
    pub fn number(self) -> u64 {
        self.0
    }
}

impl fmt::Display for PlanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

// ===== ActivationContext =====

/// What a tool is lent while it is activated.
///
/// # Examples
///
/// What an `activate` does that makes a file before it can fail:
///
/// ```
/// use std::path::PathBuf;
/// use toolscope::{ActivationContext, ToolFailure};
///
/// async fn prepare(ctx: &ActivationContext, lock_file: PathBuf) -> Result<(), ToolFailure> {
///     std::fs::File::create_new(&lock_file)?;
///     ctx.defer(move || async move { drop(std::fs::remove_file(lock_file)) });
///     connect().await // if this fails, panics or takes too long the file is removed
/// }
/// # async fn connect() -> Result<(), ToolFailure> { Ok(()) }
/// # let _ = prepare;
/// ```
#[derive(Clone)]
pub struct ActivationContext {
    scope: Arc<PlanScope>,
    slot: SlotId,
    attempt: Arc<Attempt>,
}

impl ActivationContext {
    #[cfg(not(toolscope_shuttle))]
    pub(crate) fn scope(&self) -> &Arc<PlanScope> {
        &self.scope
    }

    pub(crate) fn new(scope: &Arc<PlanScope>, slot: SlotId, attempt: &Arc<Attempt>) -> Self {
        Self { scope: Arc::clone(scope), slot, attempt: Arc::clone(attempt) }
    }

    /// The plan the tool is activated for.
    pub fn plan_id(&self) -> PlanId {
        self.scope.id
    }

    /// What the host said about the plan.
    pub fn metadata(&self) -> &Map<String, Value> {
        &self.scope.settings().metadata
    }

    /// The resources that the plan binds.
    pub fn resources(&self) -> &[BoundResource] {
        &self.scope.settings().resources
    }

    /// The directory that file tools are confined to, where the plan has one.
    pub fn sandbox(&self) -> Option<&Path> {
        self.scope.settings().sandbox.as_deref()
    }

    /// Which attempt this is, from 1.
    pub fn attempt(&self) -> u32 {
        self.scope.inner().slots.attempt(self.slot)
    }

    /// A token that is cancelled when the plan ends. The activation then has what is left of the
    /// end's budget.
    pub fn cancellation_token(&self) -> CancellationToken {
        self.scope.soft().child_token()
    }

    /// Registers work that undoes a part of this activation. It runs, the last registered first, if
    /// `activate` does not return `Ok`: error, panic, deadline, or the end of the keeper. After an
    /// `Ok` it is dropped unrun.
    ///
    /// Each piece runs on the keeper under the deactivation deadline, contained.
    pub fn defer<F, Fut>(&self, work: F)
    where
        F: FnOnce() -> Fut + Send + 'static,
        Fut: Future<Output = ()> + Send + 'static,
    {
        self.attempt.defer(Box::new(move || -> BoxFuture<'static, ()> { Box::pin(work()) }));
    }

    /// Something that several tools of the plan need, made at most once: the type and the name are
    /// its key.
    ///
    /// `make` runs as a job of its own on the keeper, with a context of its own. What it made is
    /// deactivated after the last tool that was handed it; it lives to the end of the plan even
    /// with no such tool left.
    ///
    /// # Errors
    ///
    /// The failure of `make`, the same for all who waited on that attempt; a cycle, at once and by
    /// name; the plan's end. It does not count as an attempt of the tool.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future neither stops nor repeats `make`.
    pub async fn shared<T, F, Fut>(&self, name: &str, make: F) -> Result<Arc<T>, ToolFailure>
    where
        T: SharedActivation,
        F: FnOnce(ActivationContext) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, ToolFailure>> + Send + 'static,
    {
        let shared = self.scope.shared_instance(name, &self.attempt, Some(self.slot), make).await;
        shared.map_err(|refused| failure_of(name, refused).of_shared())
    }

    /// As [`shared`](Self::shared), for something that outlives the plan: it lives in the runtime's
    /// root scope, until the runtime shuts down, and is deactivated after all plans.
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Cancel safety
    ///
    /// As there.
    pub async fn shared_between_plans<T, F, Fut>(
        &self,
        name: &str,
        make: F,
    ) -> Result<Arc<T>, ToolFailure>
    where
        T: SharedActivation,
        F: FnOnce(ActivationContext) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, ToolFailure>> + Send + 'static,
    {
        let root = self.scope.core.root();
        let waiter = Arc::ptr_eq(&root, &self.scope).then_some(self.slot);
        let shared = root.shared_instance(name, &self.attempt, waiter, make);
        let shared = tokio::select! {
            biased;
            shared = shared => shared,
            () = self.scope.ended() => Err(self.scope.ended_refusal()),
        };
        if matches!(shared, Err(Refused::Ended(_))) {
            // The root ends only with the runtime, which is ending this plan too.
            self.scope.ended().await;
        }
        shared.map_err(|refused| failure_of(name, refused).of_shared())
    }
}

impl fmt::Debug for ActivationContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ActivationContext").field("plan", &self.scope.id).finish_non_exhaustive()
    }
}

fn failure_of(name: &str, refused: Refused) -> ToolFailure {
    match refused {
        Refused::Ended(_) => ToolCancelled.into(),
        Refused::Deactivated => {
            ToolFailure::new(FailureKind::NotActivated, format!("`{name}` is not activated"))
        }
        Refused::Activation(error) => error.into(),
    }
}

// ===== DeactivationContext =====

/// What an instance is lent while it is deactivated.
pub struct DeactivationContext {
    plan: PlanId,
    reason: Option<EndReason>,
    token: CancellationToken,
}

impl DeactivationContext {
    pub(crate) fn new(scope: &PlanScope, why: &Why) -> Self {
        let reason = match why {
            Why::End(reason) => Some(*reason),
            Why::Host | Why::Tainted(_) => None,
        };
        Self { plan: scope.id, reason, token: CancellationToken::new() }
    }

    /// The plan the instance was active in.
    pub fn plan_id(&self) -> PlanId {
        self.plan
    }

    /// Why the plan ended; `None` while it goes on without this instance.
    pub fn end_reason(&self) -> Option<EndReason> {
        self.reason
    }

    /// A fresh token, for clean-up code that wants one. It is not the plan's, which is cancelled by
    /// now.
    pub fn cancellation_token(&self) -> &CancellationToken {
        &self.token
    }
}

impl fmt::Debug for DeactivationContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeactivationContext")
            .field("plan", &self.plan)
            .field("reason", &self.reason)
            .finish_non_exhaustive()
    }
}

// ===== ToolExecutionContext =====

/// What a tool is lent for one call. Cheap to clone; a clone may outlive the call, but not its
/// rights: once the plan has ended it can start nothing.
///
/// # Examples
///
/// ```
/// use serde_json::json;
/// use toolscope::{Change, ChangeKind, ToolExecutionContext, ToolFailure};
///
/// async fn copy_all(ctx: &ToolExecutionContext, files: &[&str]) -> Result<usize, ToolFailure> {
///     for file in files {
///         ctx.check()?; // stops between two files once the call is cancelled
///         ctx.execute_nested("files/copy", &json!({"path": file})).await?.into_result()?;
///         ctx.record_change(Change::new(ChangeKind::Created, *file));
///     }
///     Ok(files.len())
/// }
/// # let _ = copy_all;
/// ```
#[derive(Clone)]
pub struct ToolExecutionContext {
    scope: Arc<PlanScope>,
    call: u64,
    tool: u32,
    parent: Option<Arc<Frame>>,
    /// The call's own.
    token: Option<CancellationToken>,
    /// Weak: an instance may keep a context.
    active: Option<Weak<Active>>,
}

/// The state of one call, made when something first asks for it.
#[derive(Debug)]
pub(crate) struct CallState {
    token: OnceLock<CancellationToken>,
    taint: Mutex<Option<Box<str>>>,
    pub(crate) pause: Pause,
}

impl CallState {
    pub(crate) fn new() -> Self {
        Self { token: OnceLock::new(), taint: Mutex::new(None), pause: Pause::default() }
    }

    /// What a clone of the context sees once the call ended without success.
    pub(crate) fn cancel(&self) {
        if let Some(token) = self.token.get() {
            token.cancel();
        }
    }

    fn is_cancelled(&self) -> bool {
        self.token.get().is_some_and(CancellationToken::is_cancelled)
    }

    /// The taint, taken.
    pub(crate) fn taint(&self) -> Option<Box<str>> {
        lock(&self.taint).take()
    }
}

/// The time of a call that does not count, because a call that it made waits for an approval.
#[derive(Debug, Default)]
pub(crate) struct Pause {
    /// How many wait, since when, and how long others have waited.
    waiting: Mutex<(u32, Option<Instant>, Duration)>,
    over: Notify,
}

impl Pause {
    pub(crate) fn begin(&self) {
        let mut waiting = lock(&self.waiting);
        waiting.0 += 1;
        waiting.1.get_or_insert_with(Instant::now);
    }

    pub(crate) fn end(&self) {
        let mut waiting = lock(&self.waiting);
        waiting.0 = waiting.0.saturating_sub(1);
        if waiting.0 == 0 {
            let since = waiting.1.take().map(|since| since.elapsed());
            waiting.2 += since.unwrap_or_default();
        }
        drop(waiting);
        self.over.notify_waiters();
    }

    /// The time that did not count; `None` while it stands still.
    fn paused(&self) -> Option<Duration> {
        let waiting = lock(&self.waiting);
        (waiting.0 == 0).then_some(waiting.2)
    }

    /// Waits until nobody waits, and gives the time that did not count.
    pub(crate) async fn over(&self) -> Duration {
        loop {
            let mut over = pin!(self.over.notified());
            over.as_mut().enable();
            if let Some(paused) = self.paused() {
                return paused;
            }
            over.await;
        }
    }
}

impl ToolExecutionContext {
    #[cfg(not(toolscope_shuttle))]
    pub(crate) fn scope(&self) -> &Arc<PlanScope> {
        &self.scope
    }

    #[inline]
    pub(crate) fn new(
        call: &Call<'_>,
        number: u64,
        tool: u32,
        active: Option<&Arc<Active>>,
    ) -> Self {
        Self {
            scope: Arc::clone(call.scope),
            call: number,
            tool,
            parent: call.above.clone(),
            token: call.options.token.clone(),
            active: active.map(Arc::downgrade),
        }
    }

    /// This call, as one above others.
    fn frame(&self) -> Arc<Frame> {
        Arc::new(Frame::new(
            self.call,
            self.tool,
            self.parent.clone(),
            self.scope.settings().begun_by.as_ref(),
        ))
    }

    fn state(&self) -> Arc<CallState> {
        lock(&self.scope.log).state(self.call, CallState::new)
    }

    /// The plan the call belongs to.
    pub fn plan_id(&self) -> PlanId {
        self.scope.id
    }

    /// The call within its plan, as in its trace.
    pub fn call_id(&self) -> u64 {
        self.call
    }

    /// What the host said about the plan.
    pub fn metadata(&self) -> &Map<String, Value> {
        &self.scope.settings().metadata
    }

    /// The resources that the plan binds.
    pub fn resources(&self) -> &[BoundResource] {
        &self.scope.settings().resources
    }

    /// The resource bound under that name.
    pub fn resource(&self, name: &str) -> Option<&BoundResource> {
        self.resources().iter().find(|bound| bound.name == name)
    }

    /// The directory that file tools are confined to, where the plan has one. It never comes from
    /// the arguments.
    pub fn sandbox(&self) -> Option<&Path> {
        self.scope.settings().sandbox.as_deref()
    }

    /// Whether the call, its plan or a parent of that was cancelled, or the plan is ending. True
    /// too once the call is over, for a clone that outlives it.
    pub fn is_cancelled(&self) -> bool {
        let cancelled = || {
            let log = lock(&self.scope.log);
            // Looks without making: whoever cancels a call makes its state.
            log.has_ended(self.call)
                || log.known_state(self.call).is_some_and(|state| state.is_cancelled())
        };
        self.scope.gate.is_closed()
            || self.token.as_ref().is_some_and(CancellationToken::is_cancelled)
            || cancelled()
    }

    /// Waits until the call, its plan or a parent of that is cancelled; not at all where
    /// [`is_cancelled`](Self::is_cancelled) already.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn cancelled(&self) {
        if !self.is_cancelled() {
            self.cancellation_token().cancelled().await;
        }
    }

    /// An error once cancelled, for `?` between two steps.
    ///
    /// # Errors
    ///
    /// [`ToolCancelled`].
    pub fn check(&self) -> Result<(), ToolCancelled> {
        if self.is_cancelled() { Err(ToolCancelled) } else { Ok(()) }
    }

    /// The call's token. It is a child of the plan's: to cancel it cancels this call's view and
    /// nothing else. It is cancelled too when the call ends without success; after a success it
    /// lives on with the plan, for what the tool left running.
    pub fn cancellation_token(&self) -> CancellationToken {
        self.state().token.get_or_init(|| self.scope.soft().child_token()).clone()
    }

    /// Tells whoever listens how far the call is. Costs nothing while nobody does, and does nothing
    /// once the call is over.
    pub fn progress(&self, progress: Progress) {
        let is_heard = self.scope.core.subscribers.is_heard();
        if !is_heard || lock(&self.scope.log).has_ended(self.call) {
            return;
        }
        self.scope.tell(Some(self.call), || {
            let tool = self.scope.tools.by_id(self.tool);
            (tool.map(|tool| tool.descriptor.name.to_string()), EventKind::Progress(progress))
        });
    }

    /// A text that is this call's alone, over all plans and processes: for a server that drops what
    /// it is sent twice.
    pub fn idempotency_key(&self) -> String {
        format!("{:016x}-{}-{}", self.scope.core.instance(), self.scope.id, self.call)
    }

    /// Records a change that the call made. All are kept, for the report of the plan.
    pub fn record_change(&self, change: Change) {
        let Some(tool) = self.scope.tools.by_id(self.tool) else {
            return;
        };
        let name = tool.descriptor.name.clone();
        lock(&self.scope.log).change(name, self.call, change);
    }

    /// Says that the instance is no good any more, such as a connection left in the middle of an
    /// answer. After the call it is retired and deactivated, and the next call makes another.
    /// Without effect for an immediate tool.
    pub fn taint(&self, reason: impl Into<String>) {
        let reason: String = reason.into();
        *lock(&self.state().taint) = Some(reason.into());
    }

    /// Runs work that blocks its thread, on a thread for that.
    pub(crate) async fn run_blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ToolFailure> {
        // Those of an `off_thread` tool's own clean-up must always have a thread left.
        let room = Arc::clone(&self.scope.core.blocking).acquire_owned().await;
        let (send, done) = oneshot::channel();
        let started = self.scope.core.run_blocking(Box::new(move || {
            // Nobody waits any more once the call is over.
            drop(send.send(contain(work)));
            drop(room);
        }));
        if !started {
            return Err(ToolFailure::transient("there is no thread for blocking work"));
        }
        match done.await {
            Ok(Ok(value)) => Ok(value),
            // The panic is the tool's: it goes on where the runtime contains it.
            Ok(Err(text)) => std::panic::panic_any(text),
            Err(_) => Err(ToolFailure::transient("the runtime ended before the work was done")),
        }
    }

    /// Calls another tool of the same plan, by the same path: never with more rights than the plan
    /// has.
    ///
    /// The plan's permit is inherited; the other tool's is taken unless a call above this one holds
    /// it. At most 16 deep.
    ///
    /// # Errors
    ///
    /// As [`PlanHandle::execute`](crate::PlanHandle::execute).
    ///
    /// # Cancel safety
    ///
    /// As there.
    pub async fn execute_nested(&self, name: &str, input: &Value) -> Result<ToolResult, CallError> {
        // A call that is over has given its permits back: there is nothing to inherit.
        let over = lock(&self.scope.log).has_ended(self.call);
        let call = Call {
            scope: &self.scope,
            name,
            input: Ok(input),
            options: CallOptions::new().token(self.cancellation_token()),
            above: (!over).then(|| self.frame()),
        };
        Box::pin(execute::call(&call)).await
    }

    /// Begins a plan under the call's plan, for a tool that is an agent itself: never with more
    /// rights; see [`PlanHandle::begin_child`](crate::PlanHandle::begin_child).
    ///
    /// # Errors
    ///
    /// As there.
    pub fn begin_child(&self, options: PlanOptions) -> Result<Plan, ToolRuntimeError> {
        self.scope.core.begin(options, Some(&self.scope), Some(self.frame()))
    }

    /// As [`ActivationContext::shared`], asked for by a call; the instance of the tool becomes its
    /// dependent.
    ///
    /// # Errors
    ///
    /// As there; and `NotActivated` for an immediate tool, which has no place in the plan that
    /// could hold it.
    ///
    /// # Cancel safety
    ///
    /// As there.
    pub async fn shared<T, F, Fut>(&self, name: &str, make: F) -> Result<Arc<T>, ToolFailure>
    where
        T: SharedActivation,
        F: FnOnce(ActivationContext) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, ToolFailure>> + Send + 'static,
    {
        let Some(active) = self.active.as_ref().and_then(Weak::upgrade) else {
            let message = format!(
                "an immediate tool cannot hold `{name}`: only a managed tool has an activation"
            );
            return Err(ToolFailure::new(FailureKind::NotActivated, message));
        };
        let shared = self.scope.shared_instance(name, &active.attempt, None, make).await;
        shared.map_err(|refused| failure_of(name, refused))
    }

    /// Cancels what the tool sees of the call.
    pub(crate) fn cancel(&self) {
        self.cancellation_token().cancel();
    }
}

impl fmt::Debug for ToolExecutionContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ToolExecutionContext")
            .field("plan", &self.scope.id)
            .field("call", &self.call)
            .finish_non_exhaustive()
    }
}
