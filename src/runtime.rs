//! The runtime: what a service builds once, begins plans on, and shuts down.

use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use crate::context::PlanId;
use crate::error::{EndReason, ToolRuntimeError};
use crate::event::EventStream;
use crate::options::PlanOptions;
use crate::plan::{Plan, PlanHandle, PlanReport};
#[cfg(not(toolscope_shuttle))]
use crate::process::{self, Isolation};
use crate::registry::ToolRegistry;

pub(crate) use self::core::Core;
pub use builder::ToolRuntimeBuilder;
#[cfg(not(toolscope_shuttle))]
use ending::signalled;
use ending::{clock_of_its_own, end};
pub use report::{ShutdownReport, Stats, Straggler};

mod builder;
mod report;

mod core;
mod ending;

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
        ToolRuntimeBuilder::new()
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

    /// How the processes that tools start are held together.
    #[cfg(not(toolscope_shuttle))]
    pub fn process_isolation(&self) -> Isolation {
        process::isolation(self.core.guardian.as_deref())
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
        end(&self.core, self.drop_wait);
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
