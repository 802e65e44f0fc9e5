//! There is a guardian on Linux only.

/// Does nothing on this system, so that a service can call it everywhere.
pub fn init() {}

/// For the program `toolscope-guardian`, which is nothing on this system.
#[doc(hidden)]
pub fn refuse() {}
