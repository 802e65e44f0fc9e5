//! The end of a runtime: the wait of a drop, the clock of a shutdown, the signals that ask for one.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
#[cfg(all(unix, not(toolscope_shuttle)))]
use std::sync::OnceLock;
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use super::core::Core;
use crate::event::Subscribers;
use crate::scope::LEAST_STEP;
#[cfg(all(unix, not(toolscope_shuttle)))]
use crate::sync::atomic::{AtomicBool, Ordering::SeqCst};
#[cfg(all(unix, not(toolscope_shuttle)))]
use crate::sync::{Mutex, lock};

/// How long a drop waits after its own time, for clean-up that had to change its thread.
const LAST_WAIT: Duration = Duration::from_secs(1);

/// Ends a runtime that is dropped: all plans end, and what is left of them is waited for, off the
/// keeper and bounded.
pub(super) fn end(core: &Arc<Core>, wait: Duration) {
    core.close_all();
    let over = StreamsOver(Arc::clone(&core.subscribers));
    match core.keeper.get() {
        Some(Some(keeper)) if keeper.is_foreign() => core.end_root(),
        Some(Some(keeper)) if keeper.is_here() => {
            // To wait on a thread that must do the work would be a deadlock: another one waits.
            let owned = Arc::clone(core);
            let thread = std::thread::Builder::new().name("toolscope-drop".into());
            let close_down = move || {
                close_down(&owned, wait);
                drop(over);
            };
            if thread.spawn(close_down).is_err() {
                core.end_root();
            }
            return;
        }
        _ => close_down(core, wait),
    }
    drop(over);
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
pub(super) async fn clock_of_its_own(core: &Core, wait: Duration) {
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
pub(super) async fn clock_of_its_own(_core: &Core, _wait: Duration) {
    std::future::pending().await
}

/// Waits for a signal. While nobody waits, signals have their default effect: Tokio's handlers stay
/// installed for ever and would swallow them.
#[cfg(all(unix, not(toolscope_shuttle)))]
pub(super) async fn signalled(core: &Core) -> std::io::Result<()> {
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
pub(super) async fn signalled(_core: &Core) -> std::io::Result<()> {
    tokio::signal::ctrl_c().await
}
