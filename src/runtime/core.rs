//! What the runtime and everything of it share: the registry, the live plans, the books, the keeper.

use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use tokio::sync::{Notify, Semaphore};

use super::report::{Stats, Straggler};
use crate::cache::ToolLifecycleCache;
use crate::contain::contain;
use crate::context::PlanId;
use crate::error::{ActivationError, ActivationPhase, EndReason, ToolRuntimeError};
use crate::event::{EventKind, Subscribers};
use crate::execute::Frame;
use crate::fault::fault;
use crate::keeper::{Begin, Job, Keeper, last_resort};
use crate::layer::Layers;
use crate::obligation::Owed;
use crate::options::{PlanOptions, PlanSettings};
use crate::plan::Plan;
use crate::registry::ToolRegistry;
use crate::scope::{Inner, PlanScope};
use crate::span;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use crate::sync::{Mutex, lock};

/// The deepest nesting of plans.
const MOST_DEPTH: u32 = 16;
/// How many blocking tools run at once: half of the threads that Tokio gives a runtime for that. The
/// others are for activations and deactivations off the keeper's threads, which must never wait for
/// a tool that does not come back.
const MOST_BLOCKING: usize = 256;

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
    pub(super) keeper: OnceLock<Option<Keeper>>,
    keeper_threads: usize,
    next_plan: AtomicU64,
    shut: AtomicBool,
    /// Made when first asked for, gone once the runtime is.
    root: Mutex<Option<Arc<PlanScope>>>,
    /// While shutting down: another plan has settled.
    changed: Notify,
    /// The guardian of tools' processes, where the host names one.
    #[cfg_attr(toolscope_shuttle, expect(dead_code, reason = "models start no processes"))]
    pub(crate) guardian: Option<PathBuf>,
    /// Room for blocking tools.
    pub(crate) blocking: Arc<Semaphore>,
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
    pub(super) fn new(
        registry: ToolRegistry,
        defaults: PlanSettings,
        layers: Layers,
        keeper: Option<Keeper>,
        keeper_threads: usize,
        guardian: Option<PathBuf>,
    ) -> Self {
        Self {
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
            guardian,
            blocking: Arc::new(Semaphore::new(MOST_BLOCKING)),
        }
    }

    pub(super) fn keeper(&self) -> Option<&Keeper> {
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
                let settings = parent.settings().child(options, begun_by)?;
                (Arc::clone(parent.tools.latest()), Some(settings))
            }
        };
        if parent.is_some_and(|parent| parent.depth >= MOST_DEPTH) {
            let reason = format!("plans are nested more than {MOST_DEPTH} deep");
            return Err(ToolRuntimeError::denied("a child plan", reason));
        }
        let is_watched = watched.0.is_some() || watched.1.is_some();
        if is_watched && self.keeper().is_none() {
            let message = "a plan with a token or a deadline needs a thread, and there is none";
            let phase = ActivationPhase::NotRun;
            return Err(ActivationError::new("the keeper", phase, message).into());
        }
        let id = PlanId::new(self.next_plan.fetch_add(1, Relaxed) + 1);
        let scope = PlanScope::new(self, id, tools, settings, parent.cloned());
        // Insert first, look second: whoever shuts down sets the flag first and collects second.
        self.cache.insert(&scope);
        let refused = if self.shut.load(SeqCst) && !fault("flag-before-insert") {
            Some(ToolRuntimeError::ShutDown)
        } else {
            parent.and_then(|parent| parent.adopt(&scope).err())
        };
        if let Some(refused) = refused {
            scope.give_up();
            return Err(refused);
        }
        if let Some(span) = span::of_plan(&scope) {
            lock(&scope.log).set_span(span);
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

    pub(super) fn close_all(&self) {
        self.shut.store(true, SeqCst);
        for scope in self.cache.all() {
            scope.close(EndReason::ShutDown, Begin::There);
        }
    }

    pub(super) fn close_root(&self) {
        if let Some(root) = self.known_root() {
            root.close(EndReason::ShutDown, Begin::There);
        }
    }

    /// Closes the root scope, and gives it up: it holds the runtime as the runtime holds it.
    pub(super) fn end_root(&self) {
        self.close_root();
        let root = lock(&self.root).take();
        drop(root);
    }

    /// Waits until every plan has settled, then closes the root scope and waits for that, whose end
    /// is cut to `hurry`.
    pub(super) async fn until_settled(&self, hurry: Option<tokio::time::Instant>) {
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
    pub(super) fn stragglers(&self) -> Vec<Straggler> {
        let scopes = self.cache.all().into_iter().chain(self.known_root());
        let straggler =
            |scope: Arc<PlanScope>| Straggler { plan_id: scope.id, unsettled: scope.unsettled() };
        scopes.map(straggler).filter(|straggler| !straggler.unsettled.is_empty()).collect()
    }

    pub(super) fn stats(&self) -> Stats {
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
