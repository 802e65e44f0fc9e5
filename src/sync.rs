//! The locks and atomics of the crate: the standard library's, or shuttle's in its model-checking
//! build.

#[cfg(not(toolscope_shuttle))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic};

#[cfg(toolscope_shuttle)]
pub(crate) use shuttle::sync::{Mutex, MutexGuard, atomic};

/// Locks, whoever panicked while holding it: no section of this crate leaves a half-made state
/// behind.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
