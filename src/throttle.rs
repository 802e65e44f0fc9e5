//! How many activations of a source run at once: a limit that can be changed while it is in use.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::sync::{Mutex, lock};

/// How many activations of a source run at once. What is in the making when it changes counts.
pub(crate) struct ActivationLimit {
    room: Arc<Semaphore>,
    terms: Mutex<Terms>,
}

struct Terms {
    at_once: usize,
    /// So many of those that are out are more than the limit allows now, and do not come back.
    beyond: usize,
}

/// One activation's room under an [`ActivationLimit`].
pub(crate) struct ActivationPermit {
    limit: Arc<ActivationLimit>,
    permit: Option<OwnedSemaphorePermit>,
}

impl ActivationLimit {
    pub(crate) fn new(at_once: usize) -> Arc<Self> {
        let terms = Mutex::new(Terms { at_once, beyond: 0 });
        Arc::new(Self { room: Arc::new(Semaphore::new(at_once)), terms })
    }

    /// Sets another limit. Who waits is let in at once if it is larger.
    pub(crate) fn set(&self, at_once: usize) {
        let more = {
            let mut terms = lock(&self.terms);
            let less = terms.at_once.saturating_sub(at_once);
            let more = at_once.saturating_sub(terms.at_once);
            terms.at_once = at_once;
            let settled = more.min(terms.beyond);
            terms.beyond = terms.beyond - settled + less;
            while terms.beyond > 0 {
                let Ok(free) = self.room.try_acquire() else { break };
                free.forget();
                terms.beyond -= 1;
            }
            more - settled
        };
        self.room.add_permits(more);
    }

    pub(crate) fn try_enter(self: &Arc<Self>) -> Option<ActivationPermit> {
        let permit = Arc::clone(&self.room).try_acquire_owned().ok()?;
        Some(ActivationPermit { limit: Arc::clone(self), permit: Some(permit) })
    }

    /// Waits for room.
    pub(crate) async fn enter(self: &Arc<Self>) -> Option<ActivationPermit> {
        let permit = Arc::clone(&self.room).acquire_owned().await.ok()?;
        Some(ActivationPermit { limit: Arc::clone(self), permit: Some(permit) })
    }
}

impl Drop for ActivationPermit {
    fn drop(&mut self) {
        let is_beyond = {
            let mut terms = lock(&self.limit.terms);
            let is_beyond = terms.beyond > 0;
            terms.beyond -= usize::from(is_beyond);
            is_beyond
        };
        if let Some(permit) = self.permit.take().filter(|_| is_beyond) {
            permit.forget();
        }
    }
}
