//! The gate of a plan, and of each managed instance: who may begin, who is in there, and the end of
//! it.
//!
//! One call is `in flight` from its first poll to its end, and `parked` between two polls. What is
//! in flight and not parked is being polled right now.
//!
//! # Invariants
//!
//! 1. Once a gate is closed no call enters; once it is revoked no parked call is polled again.
//! 2. `parked` counts down *before* `in flight` does when a parked call goes, so a reader that
//!    takes `in flight` first and `parked` second sees them equal only if nothing was being polled.
//! 3. A call un-parks first and looks at `revoked` second; [`Gate::revoke`] sets the flag first and
//!    its caller counts second. One of the two sees the other.
//! 4. Whoever makes a closed gate emptier says so on `emptied`, after the count.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;

use tokio::sync::Notify;

use crate::contain::contain;
use crate::fault::fault;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};

const CLOSED: u64 = 1 << 63;
const REVOKED: u64 = 1 << 62;
/// Calls begun, in bits 22 to 61: more than 10^12.
const CALL: u64 = 1 << 22;
/// Calls in flight, in bits 0 to 21: 4 million.
const IN_FLIGHT: u64 = CALL - 1;

/// The entrance of a plan or an instance; see the module.
pub(crate) struct Gate {
    word: AtomicU64,
    parked: AtomicU32,
    /// Told at the hard end, after the flag.
    hard: Notify,
    emptied: Notify,
}

impl Gate {
    pub(crate) fn new() -> Self {
        Self {
            word: AtomicU64::new(0),
            parked: AtomicU32::new(0),
            hard: Notify::new(),
            emptied: Notify::new(),
        }
    }

    /// Lets a call in, unless the gate is closed.
    #[inline]
    pub(crate) fn enter(&self) -> Option<Lease<'_>> {
        self.admit().map(|call| Lease::admitted(self, call))
    }

    /// Counts a call in, unless the gate is closed: one read-modify-write gives admission and call
    /// number. Who is admitted makes the [`Lease`] at once, which counts it out again.
    #[inline]
    pub(crate) fn admit(&self) -> Option<u64> {
        let before = self.word.fetch_add(CALL | 1, SeqCst);
        let call = (before & !(CLOSED | REVOKED)) / CALL + 1;
        if before & CLOSED == 0 {
            return Some(call);
        }
        drop(Lease::admitted(self, call));
        None
    }

    /// Lets nobody in any more; true if calls are in flight.
    pub(crate) fn close(&self) -> bool {
        self.word.fetch_or(CLOSED, SeqCst) & IN_FLIGHT != 0
    }

    /// The hard end: parked calls are not polled again, and their tasks are woken to drop them.
    pub(crate) fn revoke(&self) {
        self.word.fetch_or(CLOSED | REVOKED, SeqCst);
        // A waker is its executor's code.
        contain(|| self.hard.notify_waiters()).unwrap_or_default();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.word.load(SeqCst) & CLOSED != 0
    }

    fn is_revoked(&self) -> bool {
        self.word.load(SeqCst) & REVOKED != 0
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.word.load(SeqCst) & IN_FLIGHT == 0
    }

    /// The calls that are being polled; exact once the gate is revoked.
    pub(crate) fn polling(&self) -> u64 {
        let in_flight = self.word.load(SeqCst) & IN_FLIGHT;
        in_flight.saturating_sub(u64::from(self.parked.load(SeqCst)))
    }

    /// Waits until no call is in flight. Close first.
    pub(crate) async fn until_empty(&self) {
        self.until(Self::is_empty).await;
    }

    /// Waits until no call is being polled. Revoke first.
    pub(crate) async fn until_unpolled(&self) {
        self.until(|gate| gate.polling() == 0).await;
    }

    async fn until(&self, done: impl Fn(&Self) -> bool) {
        while !done(self) {
            let mut emptied = pin!(self.emptied.notified());
            emptied.as_mut().enable();
            if done(self) {
                return;
            }
            emptied.await;
        }
    }

    fn tell_emptied(&self) {
        if self.is_closed() {
            self.emptied.notify_waiters();
        }
    }
}

/// One call's presence behind a [`Gate`].
pub(crate) struct Lease<'a> {
    gate: &'a Gate,
    call: u64,
    parked: bool,
}

impl<'a> Lease<'a> {
    /// For a call that [`Gate::admit`] has counted in.
    pub(crate) fn admitted(gate: &'a Gate, call: u64) -> Self {
        Self { gate, call, parked: false }
    }

    /// The number of the call, from 1.
    pub(crate) fn call(&self) -> u64 {
        self.call
    }

    /// Polls `work` under the lease; `None` once the gate is revoked.
    pub(crate) async fn run<F: Future>(&mut self, mut work: Pin<&mut F>) -> Option<F::Output> {
        let mut hard_end = pin!(None);
        poll_fn(|cx| {
            if !self.unpark() {
                return Poll::Ready(None);
            }
            if let Poll::Ready(output) = work.as_mut().poll(cx) {
                return Poll::Ready(Some(output));
            }
            if hard_end.is_none() {
                hard_end.set(Some(self.gate.hard.notified()));
            }
            let told =
                hard_end.as_mut().as_pin_mut().is_some_and(|hard_end| hard_end.poll(cx).is_ready());
            // Registered first, looked second: whoever revokes sets the flag first and tells
            // second.
            let ended = told || self.gate.is_revoked();
            self.park();
            if ended { Poll::Ready(None) } else { Poll::Pending }
        })
        .await
    }

    /// Before a poll: false if there must be none.
    fn unpark(&mut self) -> bool {
        if !self.parked {
            return true;
        }
        self.gate.parked.fetch_sub(1, SeqCst);
        self.parked = false;
        if self.gate.is_revoked() && !fault("poll-after-revocation") {
            self.park();
            return false;
        }
        true
    }

    /// After a poll that was pending.
    fn park(&mut self) {
        self.gate.parked.fetch_add(1, SeqCst);
        self.parked = true;
        self.gate.tell_emptied();
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        if self.parked {
            self.gate.parked.fetch_sub(1, SeqCst);
        }
        let before = self.gate.word.fetch_sub(1, SeqCst);
        if before & CLOSED != 0 {
            self.gate.emptied.notify_waiters();
        }
    }
}
