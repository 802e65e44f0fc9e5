//! The last way to find a tree: by the mark that its processes carry.

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, getpid, pidfd_open, pidfd_send_signal, waitid,
};

use super::{marker, scan};

/// How long [`sweep`] goes on while processes that it ends do not go.
const SWEEP: Duration = Duration::from_secs(1);

/// Ends what hosts that are gone left behind, and says how many processes that were.
///
/// For a service that starts again after it was killed in a place without a guardian (see
/// [`Isolation`](super::Isolation)): call it before the first plan. It takes only processes that
/// carry the mark of a host which is not there any more, by pid and start time, that count pids as
/// this process does, and whose environment this process may read. On systems other than Linux it
/// does nothing.
///
/// It blocks its thread for about as long as it takes to read the environments of all processes, a
/// few milliseconds for some hundred, and at most a second.
pub fn sweep() -> usize {
    end_all(SWEEP, |environment| {
        let host = mark_in(environment, marker::TREE).and_then(host_of);
        host.is_some_and(|(pid, start)| scan::start(pid) != Some(start))
    })
}

/// Ends what carries the mark of a tree.
pub(super) fn end_tree(mark: &str, limit: Duration) -> usize {
    end_all(limit, |environment| mark_in(environment, marker::TREE) == Some(mark))
}

/// Kills what is meant until nothing of it is left, by descriptors: a pid may be another's by then.
fn end_all(limit: Duration, is_meant: impl Fn(&[u8]) -> bool) -> usize {
    let until = Instant::now() + limit;
    let spared = ourselves();
    let is_meant = |pid: Pid| {
        !spared.contains(&pid)
            && scan::environment(pid).is_some_and(|environment| is_meant(&environment))
            && scan::is_in_our_namespace(pid)
    };
    let mut ended = HashSet::new();
    let mut dying: Vec<OwnedFd> = Vec::new();
    loop {
        let mut left = false;
        for pid in scan::all().filter(|pid| is_meant(*pid)) {
            let Ok(fd) = pidfd_open(pid, PidfdFlags::empty()) else {
                continue;
            };
            if !is_meant(pid) {
                continue;
            }
            left = true;
            if pidfd_send_signal(&fd, Signal::KILL).is_ok() && ended.insert((pid, scan::start(pid)))
            {
                dying.push(fd);
            }
        }
        // A host that adopts orphans (pid 1, a subreaper) must reap them. To any other they are
        // not children, which is an error.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        dying.retain(|fd| matches!(waitid(WaitId::PidFd(fd.as_fd()), options), Ok(None)));
        if !left && dying.is_empty() || Instant::now() >= until {
            return ended.len();
        }
        pause();
    }
}

#[expect(clippy::disallowed_methods, reason = "it runs where it may block, and says so")]
fn pause() {
    std::thread::sleep(Duration::from_millis(2));
}

/// This process and those that it descends from: a host may be the tool of another one.
fn ourselves() -> HashSet<Pid> {
    std::iter::successors(Some(getpid()), |pid| scan::parent(*pid)).collect()
}

fn mark_in<'a>(environment: &'a [u8], name: &str) -> Option<&'a str> {
    environment.split(|byte| *byte == 0).find_map(|variable| {
        let value = variable.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
        std::str::from_utf8(value).ok()
    })
}

/// The pid and the start time of the host that a mark names.
fn host_of(mark: &str) -> Option<(Pid, u64)> {
    let mut parts = mark.split('-');
    let pid = Pid::from_raw(parts.next()?.parse().ok()?)?;
    let start = parts.next()?.parse().ok()?;
    parts.next()?.parse::<u64>().ok()?;
    parts.next().is_none().then_some((pid, start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_marks_name_a_host() {
        assert_eq!(host_of("12-345-6"), Some((Pid::from_raw(12).unwrap(), 345)));
        for mark in ["", "12", "12-345", "12-345-", "0-345-6", "-1-345-6", "12-345-6-7", "a-b-c"] {
            assert_eq!(host_of(mark), None, "{mark}");
        }
    }

    #[test]
    fn a_mark_is_a_whole_variable() {
        let environment = b"A=1\0TOOLSCOPE_TREEX=no\0XTOOLSCOPE_TREE=no\0TOOLSCOPE_TREE=7-8-9\0";
        assert_eq!(mark_in(environment, marker::TREE), Some("7-8-9"));
        assert_eq!(mark_in(b"A=TOOLSCOPE_TREE=7-8-9", marker::TREE), None);
    }
}
