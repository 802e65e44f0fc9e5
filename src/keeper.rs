//! Where every activation and deactivation runs: a Tokio runtime that no caller can end.
//!
//! I/O objects die with the Tokio runtime that made them, and clean-up that is handed to a caller's
//! runtime is lost when that one ends. So the jobs of the crate run here, and its timers are made
//! here.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
#[cfg(not(toolscope_shuttle))]
use std::sync::mpsc::RecvTimeoutError;
use std::sync::mpsc::Sender;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::runtime::Handle;
use tracing::Instrument;
use tracing::instrument::WithSubscriber;

use crate::contain::contain;
use crate::sync::{Mutex, lock};

/// How often the keeper is looked at.
#[cfg(not(toolscope_shuttle))]
const LOOK: Duration = Duration::from_secs(1);

/// A piece of work for the keeper. It contains what it calls, and settles what it owes even when
/// dropped.
pub(crate) type Job = Pin<Box<dyn Future<Output = ()> + Send>>;

/// How a job begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Begin {
    /// Polled first by the task that asked, inside the keeper's context; what is not ready then
    /// goes on in the keeper.
    Here,
    /// Wholly in the keeper. The only way from a `Drop`.
    There,
    /// On a thread of the keeper's that may block.
    Apart,
}

/// The threads, and what the watch looks at to see that they are wanted.
#[cfg(not(toolscope_shuttle))]
type Own = (tokio::runtime::Runtime, Sender<()>);

#[cfg(toolscope_shuttle)]
type Own = Sender<()>;

/// The runtime's own Tokio runtime, or a given one in tests.
#[derive(Debug)]
#[cfg_attr(
    not(any(feature = "test-util", toolscope_shuttle)),
    expect(unreachable_pub, reason = "public for tests only")
)]
pub struct Keeper {
    handle: Handle,
    own: Mutex<Option<Own>>,
    foreign: bool,
    stopped: AtomicBool,
    blocked: Arc<AtomicU64>,
}

impl Keeper {
    /// Runs the jobs on a Tokio runtime of the test's own, so that its paused clock is the keeper's
    /// too.
    ///
    /// The guarantees then hold only while that runtime lives, and the last drop of the
    /// [`ToolRuntime`](crate::ToolRuntime) does not wait.
    #[cfg(any(feature = "test-util", toolscope_shuttle))]
    pub fn on(handle: Handle) -> Self {
        Self {
            handle,
            own: Mutex::new(None),
            foreign: true,
            stopped: AtomicBool::new(false),
            blocked: Arc::default(),
        }
    }

    #[cfg(not(toolscope_shuttle))]
    pub(crate) fn start(workers: usize, told: impl Fn() + Send + 'static) -> io::Result<Self> {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(workers.max(1)).thread_name("toolscope-keeper").enable_all();
        // Tokio panics when it cannot have a thread.
        let runtime = contain(|| builder.build()).map_err(io::Error::other)??;
        let (handle, blocked) = (runtime.handle().clone(), Arc::default());
        match watch(handle.clone(), Arc::clone(&blocked), told) {
            Ok(wanted) => Ok(Self {
                handle,
                own: Mutex::new(Some((runtime, wanted))),
                foreign: false,
                stopped: AtomicBool::new(false),
                blocked,
            }),
            Err(error) => {
                runtime.shutdown_background();
                Err(error)
            }
        }
    }

    #[cfg(toolscope_shuttle)]
    pub(crate) fn start(_workers: usize, _told: impl Fn() + Send + 'static) -> io::Result<Self> {
        Err(io::Error::other("a model has no keeper of its own"))
    }

    /// Begins a job; the caller's span and subscriber go along.
    pub(crate) fn begin(&self, mut job: Job, begin: Begin) {
        if begin == Begin::Here {
            let _context = self.enter();
            let polled =
                contain(|| job.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
            if polled.unwrap_or(true) {
                return;
            }
        }
        let job = job.in_current_span();
        // Over while the subscriber is current: that is who closes the spans above the job's.
        #[expect(clippy::redundant_async_block, reason = "it drops the job inside its own poll")]
        let job = async move { job.await }.with_current_subscriber();
        #[cfg(not(toolscope_shuttle))]
        if begin == Begin::Apart && !self.foreign {
            // Not on a test's runtime: its paused clock would stand still meanwhile.
            let handle = self.handle.clone();
            drop(self.handle.spawn_blocking(move || handle.block_on(job)));
            return;
        }
        // The noop waker of the first poll is replaced here: a spawned task is always polled.
        drop(self.handle.spawn(job));
    }

    /// Runs work on a thread that may block.
    pub(crate) fn run_blocking(&self, work: Box<dyn FnOnce() + Send>) {
        drop(self.handle.spawn_blocking(work));
    }

    /// A timer of the keeper's, for callers whose runtime has none. It never passes once the keeper
    /// is stopped, when everything that waits for it has been settled in another way.
    pub(crate) async fn sleep(&self, time: Duration) {
        let timer = {
            let _context = self.enter();
            tokio::time::sleep(time)
        };
        let mut timer = pin!(timer);
        poll_fn(|cx| {
            if self.stopped.load(SeqCst) {
                return Poll::Pending;
            }
            // A timer whose runtime ends at this very moment panics.
            contain(|| timer.as_mut().poll(cx)).unwrap_or(Poll::Pending)
        })
        .await;
    }

    #[cfg(not(toolscope_shuttle))]
    pub(crate) fn enter(&self) -> tokio::runtime::EnterGuard<'_> {
        self.handle.enter()
    }

    #[cfg(toolscope_shuttle)]
    #[expect(clippy::unused_self, reason = "a model has one runtime")]
    pub(crate) fn enter(&self) -> impl Sized {}

    /// Whether this thread is one of the keeper's, or inside its context.
    #[cfg(not(toolscope_shuttle))]
    pub(crate) fn is_here(&self) -> bool {
        Handle::try_current().is_ok_and(|here| here.id() == self.handle.id())
    }

    #[cfg(toolscope_shuttle)]
    pub(crate) fn is_here(&self) -> bool {
        self.foreign
    }

    /// Whether it is a test's, so that nobody may wait for it while dropping.
    pub(crate) fn is_foreign(&self) -> bool {
        self.foreign
    }

    /// How often all of its threads were found blocked.
    pub(crate) fn blocked(&self) -> u64 {
        self.blocked.load(Relaxed)
    }

    /// Ends the keeper's threads without waiting for them; jobs that are left settle as they are
    /// dropped.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, SeqCst);
        let own = lock(&self.own).take();
        #[cfg(not(toolscope_shuttle))]
        if let Some((runtime, _wanted)) = own {
            // Dropping a Tokio runtime in async code panics; this does not.
            runtime.shutdown_background();
        }
        #[cfg(toolscope_shuttle)]
        drop(own);
    }
}

/// Looks from a thread outside whether the keeper still takes up work, until the sender is dropped.
#[cfg(not(toolscope_shuttle))]
fn watch(
    keeper: Handle,
    blocked: Arc<AtomicU64>,
    tell: impl Fn() + Send + 'static,
) -> io::Result<Sender<()>> {
    let (wanted, unwanted) = std::sync::mpsc::channel();
    let look = move || {
        let answered = Arc::new(AtomicBool::new(true));
        let mut told = false;
        while unwanted.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
            if answered.swap(false, Relaxed) {
                told = false;
                let answered = Arc::clone(&answered);
                drop(keeper.spawn(async move { answered.store(true, Relaxed) }));
            } else if !told {
                told = true;
                blocked.fetch_add(1, Relaxed);
                tell();
                tracing::warn!(
                    target: "toolscope::keeper",
                    "all threads of the keeper are blocked: a tool blocks in activate or deactivate"
                );
            }
        }
    };
    std::thread::Builder::new().name("toolscope-watch".into()).spawn(look)?;
    Ok(wanted)
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Runs a job on a thread of its own, when the keeper is gone. Without a thread it is dropped, and
/// settles as it is.
#[cfg(not(toolscope_shuttle))]
pub(crate) fn last_resort(job: Job) {
    let spawned =
        std::thread::Builder::new().name("toolscope-last-resort".into()).spawn(move || {
            if let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build()
            {
                runtime.block_on(job);
            }
        });
    drop(spawned);
}

#[cfg(toolscope_shuttle)]
pub(crate) fn last_resort(job: Job) {
    drop(tokio::spawn(job));
}
