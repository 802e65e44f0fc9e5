//! A tree from the inside: who ends it, and what is known of it.

use std::ffi::OsString;
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::sync::watch;

use super::output::{Captured, ProcessStatus};
use super::pipes::{Reader, Writer};
use crate::scope::PlanScope;

/// What holds a tree: whoever lets go of it ends the tree.
pub(super) trait Rope: Send + Sync {
    /// Asks the processes to end, and has what is left killed after the grace.
    fn end(&self, grace: Duration);

    /// As [`end`](Self::end), from a destructor: the host may be gone right after.
    fn cut(&self, grace: Duration) {
        self.end(grace);
    }
}

/// What is to be run, ready to be handed on.
pub(super) struct Prepared {
    pub(super) program: OsString,
    pub(super) arguments: Vec<OsString>,
    pub(super) environment: Vec<(OsString, OsString)>,
    pub(super) directory: PathBuf,
    #[cfg_attr(windows, expect(dead_code, reason = "nothing reads it there"))]
    pub(super) mark: String,
}

/// How far a tree is.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Life {
    pub(super) stage: Stage,
    /// Of the program itself.
    pub(super) status: Option<ProcessStatus>,
    pub(super) timed_out: bool,
    /// Nothing of it is left.
    pub(super) gone: bool,
}

#[derive(Debug, Clone, Copy, Default)]
#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "a guardian's"))]
pub(super) enum Stage {
    #[default]
    Starting,
    /// The pid of the program.
    Running(u32),
    Failed(Failing, i32),
}

/// What could not be done, with its `errno`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "a guardian's"))]
pub(super) enum Failing {
    /// What was run as a guardian is none. The program was not started.
    NoGuardian,
    Guardian,
    Directory,
    Program,
}

/// Why a tree was not begun.
pub(super) type Failed = (Failing, io::Error);

/// What drives a [`Life`], until it is over.
pub(super) type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Lets a tree live until it is over by itself, its time is, or its plan's.
pub(super) async fn supervise(
    work: Work,
    rope: Arc<dyn Rope>,
    life: watch::Sender<Life>,
    timeout: Option<Duration>,
    grace: Duration,
    plan: Option<Arc<PlanScope>>,
) {
    let mut work = work;
    let over = async {
        let timed_out = async {
            match timeout {
                Some(timeout) => tokio::time::sleep(timeout).await,
                None => std::future::pending().await,
            }
        };
        let plan_over = async {
            match plan {
                Some(scope) => drop(scope.until_settled().await),
                None => std::future::pending().await,
            }
        };
        tokio::select! { () = timed_out => true, () = plan_over => false }
    };
    let timed_out = {
        let over = pin!(over);
        tokio::select! {
            biased;
            () = &mut work => return,
            timed_out = over => timed_out,
        }
    };
    life.send_modify(|life| life.timed_out = timed_out && life.status.is_none());
    rope.end(grace);
    work.await;
}

// ===== what is kept of an output =====

/// What a process wrote so far.
#[derive(Default)]
pub(super) struct Capture(Mutex<(Captured, bool)>);

impl Capture {
    pub(super) fn new((head, tail): (usize, usize)) -> Arc<Self> {
        Arc::new(Self(Mutex::new((Captured::new(head, tail), false))))
    }

    fn inner(&self) -> MutexGuard<'_, (Captured, bool)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn so_far(&self) -> Captured {
        self.inner().0.clone()
    }

    /// How much there is, and whether that is all.
    pub(super) fn state(&self) -> (u64, bool) {
        let inner = self.inner();
        (inner.0.total(), inner.1)
    }

    /// Reads to the end.
    pub(super) async fn fill(self: Arc<Self>, mut reader: Reader) {
        let mut buffer = vec![0; 16 * 1024];
        loop {
            match reader.read(&mut buffer).await {
                Ok(read) if read > 0 => self.inner().0.push(&buffer[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // What cannot be read is at its end.
                Ok(_) | Err(_) => break,
            }
        }
        self.inner().1 = true;
    }
}

// ===== pipes =====

/// Our ends of a program's pipes.
pub(super) struct Ends {
    pub(super) stdin: Option<Writer>,
    pub(super) stdout: Reader,
    pub(super) stderr: Reader,
}

/// A tree that was begun.
pub(super) struct Begun {
    pub(super) rope: Arc<dyn Rope>,
    pub(super) work: Work,
    pub(super) ends: Ends,
}

/// The program's ends: its input, its output and its error.
#[cfg(unix)]
pub(super) type Theirs = [std::os::fd::OwnedFd; 3];

/// Makes the pipes of a program. In the context of the reactor.
#[cfg(unix)]
pub(super) fn pipes(input: bool) -> io::Result<(Ends, Theirs)> {
    use tokio::net::unix::pipe::pipe;

    let (their_out, out) = pipe()?;
    let (their_err, err) = pipe()?;
    let (stdin, their_in) = if input {
        let (stdin, their_in) = pipe()?;
        (Some(stdin), their_in.into_blocking_fd()?)
    } else {
        (None, std::fs::File::open("/dev/null")?.into())
    };
    let ends = Ends {
        stdin: stdin.map(|stdin| Box::pin(stdin) as Writer),
        stdout: Box::pin(out),
        stderr: Box::pin(err),
    };
    Ok((ends, [their_in, their_out.into_blocking_fd()?, their_err.into_blocking_fd()?]))
}
