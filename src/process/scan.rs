//! What the kernel says of the processes that there are.

use std::fs;

use rustix::process::Pid;

/// The children of a process, from the kernel's own lists where it has them.
pub(super) fn children(parent: Pid) -> Vec<Pid> {
    let Ok(threads) = fs::read_dir(format!("/proc/{}/task", parent.as_raw_pid())) else {
        return Vec::new();
    };
    let lists: Option<Vec<_>> = threads
        .flatten()
        .map(|thread| fs::read_to_string(thread.path().join("children")).ok())
        .collect();
    match lists {
        Some(lists) => lists.iter().flat_map(|list| pids(list)).collect(),
        // A kernel without such lists, or a process that is just going.
        None => all().filter(|pid| self::parent(*pid) == Some(parent)).collect(),
    }
}

/// As [`children`] of this process, when it has one thread; `None` where the kernel has no list.
pub(super) fn children_of_this_thread() -> Option<Vec<Pid>> {
    fs::read_to_string("/proc/thread-self/children").ok().map(|list| pids(&list).collect())
}

/// All processes that this one can see.
pub(super) fn all() -> impl Iterator<Item = Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?))
}

pub(super) fn parent(pid: Pid) -> Option<Pid> {
    field(pid, 4).and_then(Pid::from_raw)
}

/// When a process began, in ticks since the machine did: with its pid it names the process for
/// certain.
pub(super) fn start(pid: Pid) -> Option<u64> {
    field(pid, 22)
}

/// The environment that a process was started with; `None` where it may not be read.
pub(super) fn environment(pid: Pid) -> Option<Vec<u8>> {
    fs::read(format!("/proc/{}/environ", pid.as_raw_pid())).ok()
}

/// Whether a process counts pids as this one does: in another namespace they mean others.
pub(super) fn is_in_our_namespace(pid: Pid) -> bool {
    let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
    let ours = namespace("self");
    ours.is_some() && ours == namespace(&pid.as_raw_pid().to_string())
}

fn pids(list: &str) -> impl Iterator<Item = Pid> + '_ {
    list.split_ascii_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?))
}

/// A field of `/proc/<pid>/stat`, counted from 1. The second is the name, which may hold anything.
fn field<T: std::str::FromStr>(pid: Pid, number: usize) -> Option<T> {
    let stat = fs::read(format!("/proc/{}/stat", pid.as_raw_pid())).ok()?;
    let after_name = stat.iter().rposition(|byte| *byte == b')')? + 2;
    let fields = std::str::from_utf8(stat.get(after_name..)?).ok()?;
    fields.split(' ').nth(number - 3)?.parse().ok()
}
