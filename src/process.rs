//! Programs that tools start, each with all that it starts in its turn: a *tree*, which ends when
//! its tool, its plan, or the host itself ends, however it does.
//!
//! ```
//! use toolscope::process::ToolProcess;
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let output = ToolProcess::command("sh").args(["-c", "echo hello; exit 3"]).output().await?;
//! assert_eq!(output.stdout.text(), "hello\n");
//! assert!(!output.status.is_success());
//! # Ok(()) }
//! ```
//!
//! # How a tree is held together
//!
//! | | with a guardian (Linux) | in a process group (other Unix, or no guardian) |
//! |---|---|---|
//! | the [`ToolProcess`] is dropped or stopped | all of it ends | the group ends; what left the group is found by its mark (Linux only) |
//! | the plan ends | the same | the same |
//! | the host returns, panics, calls `exit` | all of it ends | what a destructor reached ends |
//! | the host is killed | all of it ends within a second | nothing ends; [`sweep()`] at the next start finds it (Linux only) |
//! | the guardian is killed | the program dies with it, and the rest is found by its mark | |
//!
//! [`Isolation`] says which it is; [`guardian`] says where a guardian comes from. On Windows a tree
//! is a job object. macOS and Windows were never run: the code compiles there.
//!
//! Two limits, in either case: a tree that forks thousands of processes a second is not won against
//! (give the service a limit on processes), and when host and guardian are killed together only the
//! program itself is sure to die.

mod command;
mod marker;
mod output;
mod pipes;
mod reactor;
mod tree;

#[cfg(unix)]
mod group;
#[cfg(target_os = "linux")]
mod guarded;
#[cfg(target_os = "linux")]
pub mod guardian;
#[cfg(not(target_os = "linux"))]
#[path = "process/no_guardian.rs"]
pub mod guardian;
#[cfg(windows)]
mod job;
#[cfg(target_os = "linux")]
mod scan;
#[cfg(target_os = "linux")]
mod sweep;
#[cfg(target_os = "linux")]
mod wire;

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::context::{ActivationContext, ToolExecutionContext};
use crate::scope::PlanScope;

use command::Input;
use reactor::reactor;
use tree::{Begun, Capture, Ends, Failed, Failing, Life, Prepared, Rope, Stage, supervise};

pub use command::ProcessCommand;
pub use output::{Captured, ProcessOutput, ProcessStatus};
pub use pipes::{ProcessStderr, ProcessStdin, ProcessStdout};
#[cfg(target_os = "linux")]
pub use sweep::sweep;

/// Ends what hosts that are gone left behind. On this system it finds nothing.
#[cfg(not(target_os = "linux"))]
pub fn sweep() -> usize {
    0
}

/// How the trees of this process are held together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isolation {
    /// By a guardian: also when this process is killed.
    Guardian,
    /// As process groups: not when this process is killed.
    ProcessGroup,
    /// As job objects, which the system ends with this process. Windows only.
    JobObject,
}

/// What can go wrong with a process.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProcessError {
    /// The program could not be executed: it is not there, may not be executed, has too many
    /// arguments, or an argument with a NUL.
    #[error("`{program}` could not be executed: {source}")]
    #[non_exhaustive]
    Program {
        /// The program.
        program: String,
        /// Why.
        source: io::Error,
    },
    /// Its working directory could not be entered.
    #[error("the directory `{}` could not be entered: {source}", directory.display())]
    #[non_exhaustive]
    Directory {
        /// The directory.
        directory: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It could not be guarded, and so it was not started, or it was ended.
    #[error("`{program}` could not be guarded: {source}")]
    #[non_exhaustive]
    Guardian {
        /// The program.
        program: String,
        /// Why.
        source: io::Error,
    },
    /// It ended without success: see [`ProcessOutput::check`].
    #[error("`{program}` failed: {status}{}", said(stderr))]
    #[non_exhaustive]
    Unsuccessful {
        /// The program.
        program: String,
        /// How it ended.
        status: ProcessStatus,
        /// The end of what it wrote to its standard error.
        stderr: String,
    },
    /// Some of its processes are still there, long after they were killed.
    #[error("`{program}` is still there")]
    #[non_exhaustive]
    StillThere {
        /// The program.
        program: String,
    },
}

fn said(stderr: &str) -> String {
    if stderr.is_empty() { String::new() } else { format!("; it said: {stderr}") }
}

// ===== ToolProcess =====

/// How long what is killed has to be gone.
const GONE: Duration = Duration::from_secs(5);
/// An output is at its end when the program is, and nothing came for so long, twice.
const QUIET: Duration = Duration::from_millis(50);

/// A program that a tool runs, with all that it started. Dropping it ends them; without a guardian
/// the drop blocks its thread for the few milliseconds in which it looks for them.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tokio::io::{AsyncReadExt, AsyncWriteExt};
/// use toolscope::process::ToolProcess;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut cat = ToolProcess::command("cat").pipe_stdin().pipe_stdout().spawn().await?;
/// let mut stdin = cat.take_stdin().ok_or("it has a pipe")?;
/// let mut stdout = cat.take_stdout().ok_or("it has a pipe")?;
/// stdin.write_all(b"hello").await?;
/// drop(stdin);
/// let mut heard = String::new();
/// stdout.read_to_string(&mut heard).await?;
/// assert_eq!(heard, "hello");
/// assert!(cat.wait().await.is_success());
/// # Ok(()) }
/// ```
pub struct ToolProcess {
    program: String,
    pid: u32,
    isolation: Isolation,
    grace: Duration,
    stdin: Option<ProcessStdin>,
    stdout: Option<ProcessStdout>,
    stderr: Option<ProcessStderr>,
    kept: [Arc<Capture>; 2],
    rope: Arc<dyn Rope>,
    life: watch::Receiver<Life>,
    reactor: Handle,
}

impl ToolProcess {
    /// A program to run: a path, or a name to be looked for in its `PATH`. It is no shell.
    pub fn command(program: impl Into<OsString>) -> ProcessCommand {
        ProcessCommand::new(program.into())
    }

    async fn spawn(command: ProcessCommand) -> Result<Self, ProcessError> {
        let program = command.label();
        let unguarded = |source| ProcessError::Guardian { program: program.clone(), source };
        let reactor = reactor().map_err(unguarded)?;
        let mark = marker::of_tree();
        let prepared = Prepared {
            environment: command.environment(&mark)?,
            program: command.program.clone(),
            arguments: command.arguments.clone(),
            directory: command.directory().to_owned(),
            mark,
        };
        #[cfg(target_os = "linux")]
        if let Some(guardian) = guardian::find(command.asked_guardian()) {
            match Self::guarded(&command, &prepared, &guardian.path, &reactor).await {
                // It has done nothing yet, and never will.
                Err((Failing::NoGuardian, error)) if !guardian.is_asked => guardian.give_up(&error),
                begun => {
                    return begun.map_err(|(failing, error)| command.failed(failing, error));
                }
            }
        }
        warn_unguarded();
        let begun = Self::unguarded(&command, &prepared, &reactor).await;
        begun.map_err(|(failing, error)| command.failed(failing, error))
    }

    #[cfg(target_os = "linux")]
    async fn guarded(
        command: &ProcessCommand,
        prepared: &Prepared,
        guardian: &std::path::Path,
        reactor: &Handle,
    ) -> Result<Self, Failed> {
        use io::ErrorKind::{ArgumentListTooLong, InvalidInput, NotFound, PermissionDenied};
        let failing = |error: io::Error| match error.kind() {
            // Of what is passed on to the program.
            ArgumentListTooLong | InvalidInput => (Failing::Program, error),
            NotFound | PermissionDenied => (Failing::NoGuardian, error),
            // Too many files or processes, say: another time it goes well.
            _ => (Failing::Guardian, error),
        };
        let begin = |life| {
            let pipes = tree::pipes(command.has_input());
            let (ends, theirs) = pipes.map_err(|error| (Failing::Guardian, error))?;
            let begun = guarded::start(guardian, prepared, &theirs, life).map_err(failing);
            begun.map(|(rope, work)| Begun { rope, work, ends })
        };
        Self::begin(command, Isolation::Guardian, reactor, begin).await
    }

    #[cfg(unix)]
    async fn unguarded(
        command: &ProcessCommand,
        prepared: &Prepared,
        reactor: &Handle,
    ) -> Result<Self, Failed> {
        let begin = |life| {
            let pipes = tree::pipes(command.has_input());
            let (ends, theirs) = pipes.map_err(|error| (Failing::Guardian, error))?;
            let (rope, work) = group::start(prepared, theirs, life)?;
            Ok(Begun { rope, work, ends })
        };
        Self::begin(command, UNGUARDED, reactor, begin).await
    }

    #[cfg(windows)]
    async fn unguarded(
        command: &ProcessCommand,
        prepared: &Prepared,
        reactor: &Handle,
    ) -> Result<Self, Failed> {
        let begin = |life| job::start(prepared, command.has_input(), life);
        Self::begin(command, UNGUARDED, reactor, begin).await
    }

    async fn begin(
        command: &ProcessCommand,
        isolation: Isolation,
        reactor: &Handle,
        start: impl FnOnce(watch::Sender<Life>) -> Result<Begun, Failed>,
    ) -> Result<Self, Failed> {
        let (told, life) = watch::channel(Life::default());
        let mut process = {
            let _context = reactor.enter();
            let Begun { rope, work, ends } = start(told.clone())?;
            let (timeout, grace, plan) = (command.timeout, command.grace, command.plan.clone());
            drop(reactor.spawn(supervise(work, Arc::clone(&rope), told, timeout, grace, plan)));
            let mut process = Self {
                program: command.label(),
                pid: 0,
                isolation,
                grace,
                stdin: None,
                stdout: None,
                stderr: None,
                kept: [Capture::new(command.capture), Capture::new(command.capture)],
                rope,
                life,
                reactor: reactor.clone(),
            };
            process.connect(command, ends);
            process
        };
        process.started().await?;
        Ok(process)
    }

    /// Gives the pipes to whoever uses them.
    fn connect(&mut self, command: &ProcessCommand, ends: Ends) {
        let Ends { stdin, stdout, stderr } = ends;
        match (stdin, &command.stdin) {
            (Some(mut stdin), Input::Bytes(bytes)) => {
                let bytes = bytes.clone();
                // What it does not read it does not want.
                drop(self.reactor.spawn(async move {
                    stdin.write_all(&bytes).await.unwrap_or_default();
                }));
            }
            (stdin, _) => self.stdin = stdin.map(ProcessStdin),
        }
        if command.pipe_stdout {
            self.stdout = Some(ProcessStdout(stdout));
        } else {
            drop(self.reactor.spawn(Arc::clone(&self.kept[0]).fill(stdout)));
        }
        if command.pipe_stderr {
            let (reader, reactor) = (Some(stderr), self.reactor.clone());
            self.stderr = Some(ProcessStderr { reader, reactor });
        } else {
            drop(self.reactor.spawn(Arc::clone(&self.kept[1]).fill(stderr)));
        }
    }

    /// Waits until the program runs, or says why it does not.
    async fn started(&mut self) -> Result<(), Failed> {
        let begun = self.life.wait_for(|life| !matches!(life.stage, Stage::Starting)).await;
        match begun.map(|life| life.stage) {
            Ok(Stage::Running(pid)) => {
                self.pid = pid;
                Ok(())
            }
            Ok(Stage::Failed(failing, errno)) => {
                Err((failing, io::Error::from_raw_os_error(errno)))
            }
            Ok(Stage::Starting) | Err(_) => {
                Err((Failing::Guardian, io::ErrorKind::BrokenPipe.into()))
            }
        }
    }

    /// The pid of the program.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// How its tree is held together.
    pub fn isolation(&self) -> Isolation {
        self.isolation
    }

    /// Its standard input, once, where [`pipe_stdin`](ProcessCommand::pipe_stdin) was asked for.
    pub fn take_stdin(&mut self) -> Option<ProcessStdin> {
        self.stdin.take()
    }

    /// Its standard output, once, where [`pipe_stdout`](ProcessCommand::pipe_stdout) was asked for.
    pub fn take_stdout(&mut self) -> Option<ProcessStdout> {
        self.stdout.take()
    }

    /// Its standard error, once, where [`pipe_stderr`](ProcessCommand::pipe_stderr) was asked for.
    pub fn take_stderr(&mut self) -> Option<ProcessStderr> {
        self.stderr.take()
    }

    /// What it has written to its standard output by now, where that is kept.
    pub fn stdout_so_far(&self) -> Captured {
        self.kept[0].so_far()
    }

    /// What it has written to its standard error by now, where that is kept.
    pub fn stderr_so_far(&self) -> Captured {
        self.kept[1].so_far()
    }

    /// Waits until the program has ended. What it left behind is being ended then.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn wait(&self) -> ProcessStatus {
        let mut life = self.life.clone();
        let over = life.wait_for(|life| life.status.is_some() || life.gone).await;
        over.ok().and_then(|life| life.status).unwrap_or(ProcessStatus::Lost)
    }

    /// Ends the program and all that it started, and waits until nothing of it is left. They are
    /// asked to end (`SIGTERM`), and killed after the grace.
    ///
    /// # Errors
    ///
    /// When something is left 5 seconds after it was killed.
    ///
    /// # Cancel safety
    ///
    /// When this is dropped the tree is ended as when the process is dropped.
    pub async fn stop(self, grace: Duration) -> Result<ProcessStatus, ProcessError> {
        self.rope.end(grace);
        let mut life = self.life.clone();
        // By a clock that goes whatever the caller's does.
        let gone = self.reactor.spawn(async move {
            let gone = life.wait_for(|life| life.gone);
            let gone = tokio::time::timeout(grace.saturating_add(GONE), gone).await;
            gone.ok().map(|gone| gone.ok().and_then(|life| life.status))
        });
        match gone.await.ok().flatten() {
            Some(status) => Ok(status.unwrap_or(ProcessStatus::Lost)),
            None => Err(ProcessError::StillThere { program: self.program.clone() }),
        }
    }

    /// Waits until the program has ended, and gives what it wrote.
    pub(crate) async fn into_output(self) -> Result<ProcessOutput, ProcessError> {
        let status = self.wait().await;
        let (kept, pipes) = (self.kept.clone(), [&self.stdout.is_some(), &self.stderr.is_some()]);
        let wanted: Vec<_> = kept
            .into_iter()
            .zip(pipes)
            .filter(|(_, piped)| !**piped)
            .map(|(kept, _)| kept)
            .collect();
        let quiet = self.reactor.spawn(async move {
            let mut before = None;
            let mut quiet = 0;
            // One that still holds the output is not waited for.
            while quiet < 2 {
                let now: Vec<_> = wanted.iter().map(|kept| kept.state()).collect();
                if now.iter().all(|(_, is_all)| *is_all) {
                    break;
                }
                quiet = if before.as_ref() == Some(&now) { quiet + 1 } else { 0 };
                before = Some(now);
                tokio::time::sleep(QUIET).await;
            }
        });
        quiet.await.unwrap_or_default();
        let timed_out = self.life.borrow().timed_out;
        let (stdout, stderr) = (self.stdout_so_far(), self.stderr_so_far());
        Ok(ProcessOutput { program: self.program.clone(), status, stdout, stderr, timed_out })
    }
}

impl Drop for ToolProcess {
    fn drop(&mut self) {
        self.rope.cut(self.grace);
    }
}

impl fmt::Debug for ToolProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ToolProcess")
            .field("program", &self.program)
            .field("pid", &self.pid)
            .field("isolation", &self.isolation)
            .finish_non_exhaustive()
    }
}

/// The plan that a process belongs to, by a context that its tool was lent.
#[derive(Clone)]
pub struct PlanOf(Arc<PlanScope>);

impl From<&ActivationContext> for PlanOf {
    fn from(ctx: &ActivationContext) -> Self {
        Self(Arc::clone(ctx.scope()))
    }
}

impl From<&ToolExecutionContext> for PlanOf {
    fn from(ctx: &ToolExecutionContext) -> Self {
        Self(Arc::clone(ctx.scope()))
    }
}

impl fmt::Debug for PlanOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PlanOf").field(&self.0.id).finish()
    }
}

/// How trees are held together where a guardian was asked for, or not.
pub(crate) fn isolation(asked: Option<&std::path::Path>) -> Isolation {
    #[cfg(target_os = "linux")]
    if guardian::find(asked).is_some() {
        return Isolation::Guardian;
    }
    #[cfg(not(target_os = "linux"))]
    let _ = asked;
    UNGUARDED
}

/// What is left without a guardian.
const UNGUARDED: Isolation =
    if cfg!(windows) { Isolation::JobObject } else { Isolation::ProcessGroup };

fn warn_unguarded() {
    static TOLD: std::sync::Once = std::sync::Once::new();
    TOLD.call_once(|| {
        tracing::warn!(
            target: "toolscope::process",
            "there is no guardian: what tools start would outlive this process if it is killed; \
             call `toolscope::guardian::init()` first in `main`"
        );
    });
}
