//! The two variables that every process of a tool carries: whose it is, for whoever has to find
//! what is left of a tree.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// `<host pid>-<host start time>-<plan number>`; number 0 is no plan.
pub(super) const PLAN: &str = "TOOLSCOPE_PLAN";
/// `<host pid>-<host start time>-<tree number>`.
pub(super) const TREE: &str = "TOOLSCOPE_TREE";

/// The plan's mark.
pub(super) fn of_plan(number: u64) -> String {
    format!("{}-{number}", host())
}

/// A mark that no other tree has.
pub(super) fn of_tree() -> String {
    static TREES: AtomicU64 = AtomicU64::new(0);
    format!("{}-{}", host(), TREES.fetch_add(1, Relaxed) + 1)
}

/// This process, by a name that none before it had.
fn host() -> &'static str {
    static HOST: OnceLock<String> = OnceLock::new();
    HOST.get_or_init(|| format!("{}-{}", std::process::id(), start()))
}

#[cfg(target_os = "linux")]
fn start() -> u64 {
    super::scan::start(rustix::process::getpid()).unwrap_or_default()
}

#[cfg(not(target_os = "linux"))]
fn start() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}
