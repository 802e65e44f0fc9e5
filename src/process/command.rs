//! What is to be run, and with what.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::tree::Failing;
use super::{PlanOf, ProcessError, ProcessOutput, ToolProcess, marker};
use crate::scope::PlanScope;

/// What a process has of the host's environment; of `LC_` all.
const PASSED: [&str; 8] = ["HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER"];

/// A program to run, as [`ToolProcess::command`] begins it.
///
/// It has no input, its output is kept with its first and last 64 KiB, and its environment is what
/// is declared here, on top of these of the host's: `HOME`, `LANG`, `LC_*`, `LOGNAME`, `PATH`,
/// `SHELL`, `TERM`, `TMPDIR`, `USER`.
#[derive(Clone)]
#[must_use]
pub struct ProcessCommand {
    pub(super) program: OsString,
    pub(super) arguments: Vec<OsString>,
    variables: Vec<(OsString, OsString)>,
    passed: Vec<OsString>,
    pub(super) directory: Option<PathBuf>,
    pub(super) stdin: Input,
    pub(super) pipe_stdout: bool,
    pub(super) pipe_stderr: bool,
    pub(super) capture: (usize, usize),
    pub(super) timeout: Option<Duration>,
    pub(super) grace: Duration,
    pub(super) plan: Option<Arc<PlanScope>>,
    pub(super) guardian: Option<PathBuf>,
}

/// What a process reads.
#[derive(Clone)]
pub(super) enum Input {
    Nothing,
    Bytes(Vec<u8>),
    Pipe,
}

impl ProcessCommand {
    pub(super) fn new(program: OsString) -> Self {
        Self {
            program,
            arguments: Vec::new(),
            variables: Vec::new(),
            passed: Vec::new(),
            directory: None,
            stdin: Input::Nothing,
            pipe_stdout: false,
            pipe_stderr: false,
            capture: (64 * 1024, 64 * 1024),
            timeout: None,
            grace: Duration::from_secs(2),
            plan: None,
            guardian: None,
        }
    }

    /// Adds an argument.
    pub fn arg(mut self, argument: impl Into<OsString>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// Adds arguments.
    pub fn args(mut self, arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Sets a variable of its environment.
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.variables.push((name.into(), value.into()));
        self
    }

    /// Passes a variable of the host's environment on, where the host has it.
    pub fn pass_env(mut self, name: impl Into<OsString>) -> Self {
        self.passed.push(name.into());
        self
    }

    /// Where it runs; by default where the host does.
    pub fn current_dir(mut self, directory: impl Into<PathBuf>) -> Self {
        self.directory = Some(directory.into());
        self
    }

    /// What it reads, and then the end.
    pub fn stdin(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.stdin = Input::Bytes(bytes.into());
        self
    }

    /// It reads what is written to [`ToolProcess::take_stdin`].
    pub fn pipe_stdin(mut self) -> Self {
        self.stdin = Input::Pipe;
        self
    }

    /// What it writes is read from [`ToolProcess::take_stdout`], and not kept.
    pub fn pipe_stdout(mut self) -> Self {
        self.pipe_stdout = true;
        self
    }

    /// What it writes to its standard error is read from [`ToolProcess::take_stderr`], and not
    /// kept: errors then have nothing of it.
    pub fn pipe_stderr(mut self) -> Self {
        self.pipe_stderr = true;
        self
    }

    /// How many bytes of the beginning and of the end of what it writes are kept; 64 KiB each by
    /// default.
    pub fn capture(mut self, head: usize, tail: usize) -> Self {
        self.capture = (head, tail);
        self
    }

    /// Ends it when it has run for so long.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.timeout = Some(limit);
        self
    }

    /// How long its processes have after they were asked to end (`SIGTERM`), before they are
    /// killed. 2 seconds by default.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Whose it is: it carries the plan's mark, and ends at the latest when the plan has settled.
    pub fn plan(mut self, ctx: impl Into<PlanOf>) -> Self {
        self.plan = Some(ctx.into().0);
        self
    }

    /// The guardian to use, instead of the one that is found; see [`guardian`](super::guardian).
    pub fn guardian(mut self, path: impl Into<PathBuf>) -> Self {
        self.guardian = Some(path.into());
        self
    }

    /// Starts it.
    ///
    /// # Errors
    ///
    /// When the program cannot be executed, its directory cannot be entered, or the guardian that
    /// was asked for is none.
    ///
    /// # Cancel safety
    ///
    /// When this is dropped the process is ended, if it was started.
    pub async fn spawn(self) -> Result<ToolProcess, ProcessError> {
        ToolProcess::spawn(self).await
    }

    /// Runs it to its end. A process that it leaves behind is ended too, and one that still holds
    /// its output is not waited for.
    ///
    /// # Errors
    ///
    /// As [`spawn`](Self::spawn). An end without success is none; see
    /// [`ProcessOutput::check`](super::ProcessOutput::check).
    ///
    /// # Cancel safety
    ///
    /// When this is dropped the process is ended.
    pub async fn output(self) -> Result<ProcessOutput, ProcessError> {
        ToolProcess::spawn(self).await?.into_output().await
    }

    /// The guardian that was asked for, here or by the plan's runtime.
    #[cfg(target_os = "linux")]
    pub(super) fn asked_guardian(&self) -> Option<&Path> {
        let of_runtime = || self.plan.as_ref()?.core.guardian.as_deref();
        self.guardian.as_deref().or_else(of_runtime)
    }

    pub(super) fn failed(&self, failing: Failing, source: io::Error) -> ProcessError {
        let program = self.label();
        match failing {
            Failing::Program => ProcessError::Program { program, source },
            Failing::Directory => {
                ProcessError::Directory { directory: self.directory().to_owned(), source }
            }
            Failing::Guardian | Failing::NoGuardian => ProcessError::Guardian { program, source },
        }
    }

    pub(super) fn has_input(&self) -> bool {
        !matches!(self.stdin, Input::Nothing)
    }

    /// The program, for errors and logs.
    pub(super) fn label(&self) -> String {
        self.program.to_string_lossy().into_owned()
    }

    /// The whole environment, with the marks of plan and tree.
    pub(super) fn environment(
        &self,
        tree: &str,
    ) -> Result<Vec<(OsString, OsString)>, ProcessError> {
        let is_passed = |name: &OsStr| {
            self.passed.iter().any(|passed| passed == name)
                || name
                    .to_str()
                    .is_some_and(|name| PASSED.contains(&name) || name.starts_with("LC_"))
        };
        let mut all: std::collections::BTreeMap<_, _> =
            std::env::vars_os().filter(|(name, _)| is_passed(name)).collect();
        all.extend(self.variables.iter().cloned());
        let plan = self.plan.as_ref().map_or(0, |scope| scope.id.number());
        all.insert(marker::PLAN.into(), marker::of_plan(plan).into());
        all.insert(marker::TREE.into(), tree.into());
        let is_no_name = |name: &OsStr| name.is_empty() || name.as_encoded_bytes().contains(&b'=');
        if let Some(name) = all.keys().find(|name| is_no_name(name)) {
            let problem = format!("{name:?} is no name of a variable");
            let source = io::Error::new(io::ErrorKind::InvalidInput, problem);
            return Err(ProcessError::Program { program: self.label(), source });
        }
        Ok(all.into_iter().collect())
    }

    pub(super) fn directory(&self) -> &Path {
        self.directory.as_deref().unwrap_or(Path::new(""))
    }
}

impl fmt::Debug for ProcessCommand {
    /// Without arguments and environment: a log must not have them by accident.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessCommand")
            .field("program", &self.program)
            .field("directory", &self.directory)
            .finish_non_exhaustive()
    }
}
