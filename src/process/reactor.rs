//! The thread that watches all trees of this process, on a Tokio runtime of its own: no caller can
//! end it, so pipes stay open, ends are noticed and children are reaped whatever becomes of the
//! caller's runtime.

use std::io;
use std::sync::{Mutex, PoisonError};

use tokio::runtime::{Builder, Handle};

/// The runtime; it is begun when it is first asked for and ends with the process.
pub(super) fn reactor() -> io::Result<Handle> {
    static REACTOR: Mutex<Option<Handle>> = Mutex::new(None);
    let mut reactor = REACTOR.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(handle) = &*reactor {
        return Ok(handle.clone());
    }
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    std::thread::Builder::new()
        .name("toolscope-process".to_owned())
        .spawn(move || runtime.block_on(std::future::pending::<()>()))?;
    Ok(reactor.insert(handle).clone())
}
