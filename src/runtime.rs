//! The runtime: what a service builds once, begins plans on, and shuts down.

use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::pin;
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use tokio::sync::Notify;

use crate::approval::{Approver, SharedApprover};
use crate::cache::ToolLifecycleCache;
use crate::contain::contain;
use crate::context::PlanId;
use crate::error::{ActivationError, ActivationPhase, EndReason, ToolError, ToolRuntimeError};
use crate::event::{EventKind, EventStream, Subscribers};
use crate::execute::Frame;
use crate::fault::fault;
use crate::keeper::{Begin, Job, Keeper, last_resort};
use crate::layer::{Layer, Layers};
use crate::obligation::Owed;
use crate::options::{Deadlines, PlanOptions, PlanSettings};
use crate::plan::{Plan, PlanHandle, PlanReport};
use crate::registry::ToolRegistry;
use crate::scope::{Inner, LEAST_STEP, PlanScope};
use crate::span;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use crate::sync::{Mutex, lock};
use crate::tool::Tool;

/// How long a drop waits after its own time, for clean-up that had to change its thread.
const LAST_WAIT: Duration = Duration::from_secs(1);
/// The deepest nesting of plans.
const MOST_DEPTH: u32 = 16;

/// What the runtime and everything of it share.
pub(crate) struct Core {
    pub(crate) registry: ToolRegistry,
    pub(crate) cache: ToolLifecycleCache,
    pub(crate) defaults: PlanSettings,
    pub(crate) ledger: Ledger,
    pub(crate) layers: Layers,
    pub(crate) subscribers: Arc<Subscribers>,
    /// A number of its own, for what must differ between two processes.
    instance: OnceLock<u64>,
    /// `None` inside if no thread could be had for it.
    keeper: OnceLock<Option<Keeper>>,
    keeper_threads: usize,
    next_plan: AtomicU64,
    shut: AtomicBool,
    /// Made when first asked for, gone once the runtime is.
    root: Mutex<Option<Arc<PlanScope>>>,
    /// While shutting down: another plan has settled.
    changed: Notify,
}

/// Counts of what was activated and what became of it.
#[derive(Default)]
pub(crate) struct Ledger {
    pub(crate) started: AtomicU64,
    pub(crate) activated: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) deactivated: AtomicU64,
    pub(crate) troubled: AtomicU64,
    pub(crate) lost: AtomicU64,
}

impl Core {
    fn keeper(&self) -> Option<&Keeper> {
        let start = || {
            let subscribers = Arc::clone(&self.subscribers);
            let told = move || subscribers.tell_all(EventKind::KeeperBlocked);
            Keeper::start(self.keeper_threads, told).ok()
        };
        self.keeper.get_or_init(start).as_ref()
    }

    /// Runs work on a thread that may block; false if there can be none.
    pub(crate) fn run_blocking(&self, work: Box<dyn FnOnce() + Send>) -> bool {
        self.keeper().map(|keeper| keeper.run_blocking(work)).is_some()
    }

    /// A number that no other runtime has, in this process or another.
    pub(crate) fn instance(&self) -> u64 {
        use std::hash::BuildHasher;
        *self.instance.get_or_init(|| {
            std::hash::RandomState::new().hash_one((std::process::id(), SystemTime::now()))
        })
    }

    /// Runs a job on the keeper. Where there can be none the job is dropped, and settles what it
    /// owes: an activation that nothing could keep alive is refused.
    pub(crate) fn submit(&self, job: Job, begin: Begin) {
        match self.keeper() {
            Some(keeper) => keeper.begin(job, begin),
            None => drop(job),
        }
    }

    /// Submits the deactivation that is owed. Without a keeper it has a thread of its own.
    pub(crate) fn submit_clean_up(&self, owed: Owed, begin: Begin) {
        let (job, begin) = owed.into_job(begin);
        #[cfg(toolscope_faults)]
        if fault("clean-up-on-the-callers-runtime") {
            if let Ok(caller) = tokio::runtime::Handle::try_current() {
                drop(caller.spawn(job));
            }
            return;
        }
        match self.keeper() {
            Some(keeper) => keeper.begin(job, begin),
            None => last_resort(job),
        }
    }

    /// A timer that needs nothing of the caller's runtime.
    pub(crate) async fn sleep(&self, time: Duration) {
        match self.keeper() {
            Some(keeper) => keeper.sleep(time).await,
            // A limit without any timer is over at once: never would be to pass it over.
            None if tokio::runtime::Handle::try_current().is_ok() => {
                if let Ok(timer) = contain(|| tokio::time::sleep(time)) {
                    timer.await;
                }
            }
            None => {}
        }
    }

    /// The scope of what outlives one plan.
    pub(crate) fn root(self: &Arc<Self>) -> Arc<PlanScope> {
        let mut root = lock(&self.root);
        if let Some(root) = &*root {
            return Arc::clone(root);
        }
        let scope = PlanScope::new(self, PlanId::new(0), self.registry.snapshot(), None, None);
        if self.shut.load(SeqCst) {
            drop(root);
            scope.close(EndReason::ShutDown, Begin::There);
        } else {
            *root = Some(Arc::clone(&scope));
        }
        scope
    }

    fn known_root(&self) -> Option<Arc<PlanScope>> {
        lock(&self.root).clone()
    }

    pub(crate) fn begin(
        self: &Arc<Self>,
        options: PlanOptions,
        parent: Option<&Arc<PlanScope>>,
        begun_by: Option<Arc<Frame>>,
    ) -> Result<Plan, ToolRuntimeError> {
        if fault("flag-before-insert") && self.shut.load(SeqCst) {
            return Err(ToolRuntimeError::ShutDown);
        }
        let watched = options.watched();
        let (tools, settings) = match parent {
            None => (self.registry.snapshot(), options.settle(&self.defaults)),
            Some(parent) => {
                parent.notice_tokens();
                let mut settings = parent.settings().child(options)?;
                settings.begun_by = begun_by;
                (Arc::clone(parent.tools.latest()), Some(settings))
            }
        };
        if parent.is_some_and(|parent| parent.depth >= MOST_DEPTH) {
            let reason = format!("plans are nested more than {MOST_DEPTH} deep");
            return Err(ToolRuntimeError::AccessDenied { tool: "a child plan".to_owned(), reason });
        }
        let is_watched = watched.0.is_some() || watched.1.is_some();
        if is_watched && self.keeper().is_none() {
            let message = "a plan with a token or a deadline needs a thread, and there is none";
            let phase = ActivationPhase::NotRun;
            return Err(ActivationError::new("the keeper", phase, message).into());
        }
        let id = PlanId::new(self.next_plan.fetch_add(1, Relaxed) + 1);
        let scope = PlanScope::new(self, id, tools, settings, parent.cloned());
        if let Some(span) = span::of_plan(&scope) {
            lock(&scope.log).set_span(span);
        }
        // Insert first, look second: whoever shuts down sets the flag first and collects second.
        self.cache.insert(&scope);
        let refused = if self.shut.load(SeqCst) && !fault("flag-before-insert") {
            Some(ToolRuntimeError::ShutDown)
        } else {
            parent.and_then(|parent| parent.adopt(&scope).err())
        };
        if let Some(refused) = refused {
            scope.close(EndReason::ShutDown, Begin::There);
            return Err(refused);
        }
        // A shutdown that came between the cache and the parent found no parent to tell.
        if let Some(parent) = parent.filter(|_| scope.is_settled()) {
            parent.child_settled(&scope);
        }
        if is_watched {
            self.submit(Box::pin(watch(Arc::clone(&scope), watched)), Begin::There);
        }
        Ok(Plan::new(scope))
    }

    /// A plan has come to rest: it leaves the books, last of all.
    pub(crate) fn settled(&self, id: PlanId) {
        self.cache.remove(id);
        if self.shut.load(SeqCst) {
            self.changed.notify_waiters();
        }
    }

    fn close_all(&self) {
        self.shut.store(true, SeqCst);
        for scope in self.cache.all() {
            scope.close(EndReason::ShutDown, Begin::There);
        }
    }

    fn close_root(&self) {
        if let Some(root) = self.known_root() {
            root.close(EndReason::ShutDown, Begin::There);
        }
    }

    /// Closes the root scope, and gives it up: it holds the runtime as the runtime holds it.
    fn end_root(&self) {
        self.close_root();
        let root = lock(&self.root).take();
        drop(root);
    }

    /// Waits until every plan has settled, then closes the root scope and waits for that, whose end
    /// is cut to `hurry`.
    async fn until_settled(&self, hurry: Option<tokio::time::Instant>) {
        while !self.cache.is_empty() {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if self.cache.is_empty() {
                break;
            }
            changed.await;
        }
        self.close_root();
        let root = self.known_root();
        if let Some(root) = root {
            if let Some(until) = hurry {
                root.hurry(until);
            }
            root.until(Inner::is_settled).await;
        }
    }

    /// The plans that wait for something. One that is just being refused stands in the cache for a
    /// moment and waits for nothing.
    fn stragglers(&self) -> Vec<Straggler> {
        let scopes = self.cache.all().into_iter().chain(self.known_root());
        let straggler =
            |scope: Arc<PlanScope>| Straggler { plan_id: scope.id, unsettled: scope.unsettled() };
        scopes.map(straggler).filter(|straggler| !straggler.unsettled.is_empty()).collect()
    }

    fn stats(&self) -> Stats {
        let ledger = &self.ledger;
        let count = |counter: &AtomicU64| counter.load(SeqCst);
        let open = self
            .cache
            .all()
            .iter()
            .chain(&self.known_root())
            .map(|scope| scope.open_instances())
            .sum();
        Stats {
            plans: self.cache.len(),
            started: count(&ledger.started),
            activated: count(&ledger.activated),
            failed: count(&ledger.failed),
            deactivated: count(&ledger.deactivated),
            troubled: count(&ledger.troubled),
            open,
            lost: count(&ledger.lost),
            keeper_blocked: self.keeper.get().and_then(Option::as_ref).map_or(0, Keeper::blocked),
        }
    }
}

/// Ends a plan by its token or its deadline.
async fn watch(
    scope: Arc<PlanScope>,
    watched: (Option<tokio_util::sync::CancellationToken>, Option<Duration>),
) {
    let (token, deadline) = watched;
    let cancelled = async {
        match &token {
            Some(token) => token.cancelled().await,
            None => std::future::pending().await,
        }
    };
    let passed = async {
        match deadline {
            Some(deadline) => tokio::time::sleep(deadline).await,
            None => std::future::pending().await,
        }
    };
    let reason = tokio::select! {
        biased;
        () = scope.ended() => return,
        () = cancelled => EndReason::Cancelled,
        () = passed => EndReason::DeadlinePassed,
    };
    scope.close(reason, Begin::There);
}

// ===== ToolRuntime =====

/// The runtime of a service's tools: the registry, the live plans, and the keeper that activates
/// and deactivates.
///
/// It is the one owner and not `Clone`: hand out [`handle`](Self::handle)s, or share it in an
/// `Arc`.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use toolscope::test_util::Probe;
/// use toolscope::{PlanOptions, ToolRuntime};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let runtime = ToolRuntime::builder().tool(Probe::new("index").tool()).build().await?;
/// let plan = runtime.begin(PlanOptions::new())?;
/// plan.activate("index").await?;
/// std::mem::forget(plan); // even a leaked plan is ended by its deadline or by the shutdown
///
/// let report = runtime.shutdown(Duration::from_secs(10)).await;
/// assert!(report.stragglers.is_empty());
/// assert_eq!((report.stats.activated, report.stats.deactivated), (1, 1));
/// # Ok(()) }
/// ```
///
/// # Drop behaviour
///
/// Dropping it ends every plan and waits for their deactivations, at most for the builder's
/// [`drop_wait`](ToolRuntimeBuilder::drop_wait) and a second more; what hangs is cut in time for what is under it. The wait blocks the thread; the deactivations do
/// not need that thread, unless a tool's clean-up does: then use [`shutdown`](Self::shutdown). On a
/// thread of the keeper it never waits.
pub struct ToolRuntime {
    core: Arc<Core>,
    drop_wait: Duration,
}

impl ToolRuntime {
    /// Starts a description of a runtime.
    pub fn builder() -> ToolRuntimeBuilder {
        ToolRuntimeBuilder {
            tools: Vec::new(),
            keeper: None,
            keeper_threads: 2,
            deadlines: Deadlines::default(),
            plan_defaults: PlanOptions::new(),
            approver: None,
            layers: Layers::default(),
            drop_wait: Duration::from_secs(5),
        }
    }

    /// The tools. What is registered from now on is seen by plans that begin from now on.
    pub fn registry(&self) -> &ToolRegistry {
        &self.core.registry
    }

    /// Begins a plan.
    ///
    /// # Errors
    ///
    /// `ShutDown` once [`shutdown`](Self::shutdown) has begun.
    pub fn begin(&self, options: PlanOptions) -> Result<Plan, ToolRuntimeError> {
        self.core.begin(options, None, None)
    }

    /// Runs a plan from begin to finish: whatever becomes of `body`, the plan ends, and if it
    /// panics the panic goes on after the clean-up.
    ///
    /// # Errors
    ///
    /// `ShutDown` once [`shutdown`](Self::shutdown) has begun.
    ///
    /// # Panics
    ///
    /// With the panic of `body`.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops `body` and ends the plan, as dropping a [`Plan`] does.
    ///
    /// # Examples
    ///
    /// ```
    /// use toolscope::{EndReason, PlanOptions, ToolRuntime};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let runtime = ToolRuntime::builder().build().await?;
    /// let (tools, report) = runtime.run(PlanOptions::new(), async |plan| plan.tools().descriptors().count()).await?;
    /// assert_eq!((tools, report.reason()), (0, EndReason::Finished));
    /// # Ok(()) }
    /// ```
    pub async fn run<T, F, Fut>(
        &self,
        options: PlanOptions,
        body: F,
    ) -> Result<(T, PlanReport), ToolRuntimeError>
    where
        F: FnOnce(PlanHandle) -> Fut,
        Fut: Future<Output = T>,
    {
        self.run_to(options, body, |_| EndReason::Finished).await
    }

    async fn run_to<T, F, Fut>(
        &self,
        options: PlanOptions,
        body: F,
        reason: impl FnOnce(&T) -> EndReason,
    ) -> Result<(T, PlanReport), ToolRuntimeError>
    where
        F: FnOnce(PlanHandle) -> Fut,
        Fut: Future<Output = T>,
    {
        let plan = self.begin(options)?;
        let handle = plan.handle();
        let ended = {
            let mut body = pin!(async move { body(handle).await });
            std::future::poll_fn(|cx| {
                match catch_unwind(AssertUnwindSafe(|| body.as_mut().poll(cx))) {
                    Ok(Poll::Pending) => Poll::Pending,
                    Ok(Poll::Ready(value)) => Poll::Ready(Ok(value)),
                    Err(panic) => Poll::Ready(Err(panic)),
                }
            })
            .await
        };
        let reason = ended.as_ref().map_or(EndReason::Panicked, reason);
        let report = plan.end(reason).await;
        match ended {
            Ok(value) => Ok((value, report)),
            Err(panic) => resume_unwind(panic),
        }
    }

    /// As [`run`](Self::run), for a body that can fail: the plan then ends as
    /// [`Plan::fail`] ends one.
    ///
    /// # Errors
    ///
    /// As there; what the body gives is inside the `Ok`.
    ///
    /// # Panics
    ///
    /// As there.
    ///
    /// # Cancel safety
    ///
    /// As there.
    pub async fn try_run<T, E, F, Fut>(
        &self,
        options: PlanOptions,
        body: F,
    ) -> Result<(Result<T, E>, PlanReport), ToolRuntimeError>
    where
        F: FnOnce(PlanHandle) -> Fut,
        Fut: Future<Output = Result<T, E>>,
    {
        self.run_to(options, body, |ended| match ended {
            Ok(_) => EndReason::Finished,
            Err(_) => EndReason::Failed,
        })
        .await
    }

    /// A live plan, by its number.
    pub fn plan(&self, id: PlanId) -> Option<PlanHandle> {
        self.core.cache.get(id).map(|scope| PlanHandle { scope })
    }

    /// A weak handle for tools and tasks.
    pub fn handle(&self) -> RuntimeHandle {
        RuntimeHandle::new(&self.core)
    }

    /// The ledger and the number of live plans, at this moment. Exact when nothing is under way.
    pub fn stats(&self) -> Stats {
        self.core.stats()
    }

    /// The events of all plans from now on, and of the runtime itself.
    pub fn subscribe(&self) -> EventStream {
        self.core.subscribers.subscribe()
    }

    /// Refuses new plans, ends all there are, and waits until everything is deactivated, at most
    /// until the deadline. Its clock does not depend on the keeper. May be called again.
    ///
    /// # Cancel safety
    ///
    /// Once polled all plans have ended; dropping the future gives up the waiting and nothing else.
    pub async fn shutdown(&self, deadline: Duration) -> ShutdownReport {
        self.core.close_all();
        let stragglers = tokio::select! {
            biased;
            () = self.core.until_settled(None) => Vec::new(),
            () = clock_of_its_own(&self.core, deadline) => {
                self.core.close_root();
                self.core.stragglers()
            }
        };
        ShutdownReport { stragglers, stats: self.stats() }
    }

    /// Waits for SIGTERM or SIGINT (Ctrl-C), then shuts down as [`shutdown`](Self::shutdown) does.
    /// It never exits the process. A second signal has its default effect, and so has the first
    /// after this future was dropped.
    ///
    /// # Errors
    ///
    /// When no signal handler can be installed.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe before a signal came; then as [`shutdown`](Self::shutdown).
    #[cfg(not(toolscope_shuttle))]
    pub async fn shutdown_on_signals(&self, deadline: Duration) -> std::io::Result<ShutdownReport> {
        signalled(&self.core).await?;
        Ok(self.shutdown(deadline).await)
    }
}

impl fmt::Debug for ToolRuntime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ToolRuntime").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl Drop for ToolRuntime {
    fn drop(&mut self) {
        self.core.close_all();
        let over = StreamsOver(Arc::clone(&self.core.subscribers));
        match self.core.keeper.get() {
            Some(Some(keeper)) if keeper.is_foreign() => self.core.end_root(),
            Some(Some(keeper)) if keeper.is_here() => {
                // To wait on a thread that must do the work would be a deadlock: another one waits.
                let (core, wait) = (Arc::clone(&self.core), self.drop_wait);
                let thread = std::thread::Builder::new().name("toolscope-drop".into());
                let close_down = move || {
                    close_down(&core, wait);
                    drop(over);
                };
                if thread.spawn(close_down).is_err() {
                    self.core.end_root();
                }
                return;
            }
            _ => close_down(&self.core, self.drop_wait),
        }
        drop(over);
    }
}

/// Ends the streams of events when the last event has been told.
struct StreamsOver(Arc<Subscribers>);

impl Drop for StreamsOver {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// The last part of a drop: waits, bounded, for what is left, and ends the keeper.
fn close_down(core: &Core, wait: Duration) {
    // What hangs is cut in time for what is under it.
    let now = tokio::time::Instant::now();
    for scope in core.cache.all() {
        scope.hurry(now + wait.saturating_sub(LEAST_STEP * (scope.steps_left() + 4)));
    }
    let root = now + wait.saturating_sub(LEAST_STEP * 4);
    let settled = block_within(core.until_settled(Some(root)), wait);
    if let Some(Some(keeper)) = core.keeper.get() {
        keeper.stop();
    }
    if !settled {
        // The jobs that the keeper dropped are on threads of their own now.
        block_within(core.until_settled(Some(root)), LAST_WAIT);
    }
    core.end_root();
}

/// Drives a future on this thread for at most that long; true if it was done. Needs no runtime.
fn block_within(work: impl Future<Output = ()>, wait: Duration) -> bool {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut cx = Context::from_waker(&waker);
    let mut work = pin!(work);
    let began = Instant::now();
    loop {
        if work.as_mut().poll(&mut cx).is_ready() {
            return true;
        }
        let left = wait.saturating_sub(began.elapsed());
        if left.is_zero() {
            return false;
        }
        std::thread::park_timeout(left);
    }
}

/// Waits by a thread of its own: a keeper whose threads are all blocked cannot stop this clock.
#[cfg(not(toolscope_shuttle))]
async fn clock_of_its_own(core: &Core, wait: Duration) {
    let (passed, wait_for) = tokio::sync::oneshot::channel::<()>();
    let (_guard, stop) = std::sync::mpsc::channel::<()>();
    let spawned = std::thread::Builder::new().name("toolscope-clock".into()).spawn(move || {
        if stop.recv_timeout(wait) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            // Nobody listens once the shutdown is over.
            passed.send(()).unwrap_or_default();
        }
    });
    match spawned {
        Ok(_) => wait_for.await.unwrap_or_default(),
        Err(_) => core.sleep(wait).await,
    }
}

#[cfg(toolscope_shuttle)]
async fn clock_of_its_own(_core: &Core, _wait: Duration) {
    std::future::pending().await
}

/// Waits for a signal. While nobody waits, signals have their default effect: Tokio's handlers stay
/// installed for ever and would swallow them.
#[cfg(all(unix, not(toolscope_shuttle)))]
async fn signalled(core: &Core) -> std::io::Result<()> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    use tokio::signal::unix::{SignalKind, signal};

    /// How many wait, and whether nobody does: what the handlers look at.
    static WAITING: Mutex<usize> = Mutex::new(0);
    static NOBODY: OnceLock<std::io::Result<Arc<AtomicBool>>> = OnceLock::new();

    struct Waiting(Arc<AtomicBool>);
    impl Waiting {
        fn change(&self, by: impl FnOnce(usize) -> usize) {
            let mut waiting = lock(&WAITING);
            *waiting = by(*waiting);
            self.0.store(*waiting == 0, SeqCst);
        }
    }
    impl Drop for Waiting {
        fn drop(&mut self) {
            self.change(|waiting| waiting.saturating_sub(1));
        }
    }

    let nobody = NOBODY.get_or_init(|| {
        let nobody = Arc::new(AtomicBool::new(false));
        for number in [SIGTERM, SIGINT] {
            signal_hook::flag::register_conditional_default(number, Arc::clone(&nobody))?;
        }
        Ok(nobody)
    });
    let nobody =
        nobody.as_ref().map_err(|error| std::io::Error::new(error.kind(), error.to_string()))?;
    let Some(keeper) = core.keeper() else {
        return Err(std::io::Error::other("the keeper could not be started"));
    };
    let (mut terminate, mut interrupt) = {
        let _context = keeper.enter();
        (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?)
    };
    let waiting = Waiting(Arc::clone(nobody));
    waiting.change(|waiting| waiting + 1);
    tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
    drop(waiting);
    Ok(())
}

#[cfg(all(not(unix), not(toolscope_shuttle)))]
async fn signalled(_core: &Core) -> std::io::Result<()> {
    tokio::signal::ctrl_c().await
}

// ===== ToolRuntimeBuilder =====

/// A description of a [`ToolRuntime`].
#[must_use]
pub struct ToolRuntimeBuilder {
    tools: Vec<Arc<dyn Tool>>,
    keeper: Option<Keeper>,
    keeper_threads: usize,
    deadlines: Deadlines,
    plan_defaults: PlanOptions,
    approver: Option<SharedApprover>,
    layers: Layers,
    drop_wait: Duration,
}

impl ToolRuntimeBuilder {
    /// Registers a tool.
    pub fn tool(mut self, tool: impl Tool) -> Self {
        self.tools.push(Arc::new(tool));
        self
    }

    /// The threads of the keeper. 2 by default; 0 is taken as 1.
    pub fn keeper_threads(mut self, threads: usize) -> Self {
        self.keeper_threads = threads;
        self
    }

    /// The bounds in time of all plans that set none of their own.
    pub fn deadlines(mut self, deadlines: Deadlines) -> Self {
        self.deadlines = deadlines;
        self
    }

    /// What every plan starts from that says nothing else. Of rights, rules and quotas both hold:
    /// those here and the plan's own. A token or a deadline is no default; it is left out.
    pub fn plan_defaults(mut self, options: PlanOptions) -> Self {
        self.plan_defaults = options;
        self
    }

    /// Who is asked for approvals in every plan that names nobody else. Without any, a call that
    /// needs one is refused.
    pub fn approver(mut self, approver: impl Approver) -> Self {
        self.approver = Some(SharedApprover::new(approver));
        self
    }

    /// Puts a hook round every call, inside those that were given before.
    pub fn layer(mut self, layer: impl Layer) -> Self {
        self.layers.add(layer);
        self
    }

    /// How long the drop of the runtime may wait for deactivations. 5 s by default.
    pub fn drop_wait(mut self, limit: Duration) -> Self {
        self.drop_wait = limit;
        self
    }

    /// Runs the keeper's jobs on a given Tokio runtime.
    #[cfg(any(feature = "test-util", toolscope_shuttle))]
    pub fn keeper(mut self, keeper: Keeper) -> Self {
        self.keeper = Some(keeper);
        self
    }

    /// Builds the runtime. No thread is started before the first managed activation, the first
    /// timer, or the first plan with a token or a deadline.
    ///
    /// # Errors
    ///
    /// The first tool that the registry does not take.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: nothing is started before it is done.
    #[expect(clippy::unused_async, reason = "sources are discovered here")]
    pub async fn build(self) -> Result<ToolRuntime, ToolError> {
        let Self {
            tools,
            keeper,
            keeper_threads,
            deadlines,
            plan_defaults,
            approver,
            layers,
            drop_wait,
        } = self;
        let registry = ToolRegistry::default();
        registry.register_all(tools)?;
        let mut defaults = plan_defaults.settled(&PlanSettings::defaults(deadlines));
        defaults.token = None;
        defaults.approver = defaults.approver.or(approver);
        let core = Core {
            registry,
            cache: ToolLifecycleCache::new(),
            defaults,
            ledger: Ledger::default(),
            layers,
            subscribers: Arc::default(),
            instance: OnceLock::new(),
            keeper: keeper.map_or_else(OnceLock::new, |keeper| OnceLock::from(Some(keeper))),
            keeper_threads,
            next_plan: AtomicU64::new(0),
            shut: AtomicBool::new(false),
            root: Mutex::new(None),
            changed: Notify::new(),
        };
        Ok(ToolRuntime { core: Arc::new(core), drop_wait })
    }
}

impl fmt::Debug for ToolRuntimeBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ToolRuntimeBuilder")
            .field("tools", &self.tools.len())
            .finish_non_exhaustive()
    }
}

// ===== RuntimeHandle =====

/// A weak handle to a runtime, for tools and tasks. It keeps nothing alive.
#[derive(Clone)]
pub struct RuntimeHandle {
    core: Weak<Core>,
}

impl RuntimeHandle {
    pub(crate) fn new(core: &Arc<Core>) -> Self {
        Self { core: Arc::downgrade(core) }
    }

    /// Begins a plan.
    ///
    /// # Errors
    ///
    /// `ShutDown` once the runtime is shutting down or gone.
    pub fn begin(&self, options: PlanOptions) -> Result<Plan, ToolRuntimeError> {
        self.core.upgrade().ok_or(ToolRuntimeError::ShutDown)?.begin(options, None, None)
    }

    /// A live plan, by its number.
    pub fn plan(&self, id: PlanId) -> Option<PlanHandle> {
        self.core.upgrade()?.cache.get(id).map(|scope| PlanHandle { scope })
    }

    /// Cancels a plan by its number; false if there is none.
    pub fn cancel(&self, id: PlanId) -> bool {
        self.plan(id).inspect(PlanHandle::cancel).is_some()
    }
}

impl fmt::Debug for RuntimeHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RuntimeHandle").field("alive", &(self.core.strong_count() > 0)).finish()
    }
}

// ===== Stats and ShutdownReport =====

/// The ledger of a runtime. At any quiet moment `activated == deactivated + open + lost`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[non_exhaustive]
pub struct Stats {
    /// Plans that have not settled.
    pub plans: usize,
    /// Attempts to activate.
    pub started: u64,
    /// Activations that returned `Ok`.
    pub activated: u64,
    /// Attempts that gave no instance.
    pub failed: u64,
    /// Instances whose `deactivate` was called and is over, however it went.
    pub deactivated: u64,
    /// Those of them that did not go well, and the lost ones.
    pub troubled: u64,
    /// Instances that are active, or on their way out: counted by walking the slots of all plans.
    pub open: u64,
    /// Instances whose `deactivate` could not be called.
    pub lost: u64,
    /// How often all threads of the keeper were found blocked, by a look each second.
    pub keeper_blocked: u64,
}

/// How a shutdown went.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct ShutdownReport {
    /// The plans that had not settled at the deadline. Their deactivations go on while the runtime
    /// lives.
    pub stragglers: Vec<Straggler>,
    /// The ledger at the end.
    pub stats: Stats,
}

/// A plan that had not settled when a shutdown's deadline passed.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Straggler {
    /// The plan; 0 is the root scope.
    pub plan_id: PlanId,
    /// What it waits for, by name.
    pub unsettled: Vec<String>,
}
