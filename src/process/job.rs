//! A tree on Windows: a job object, which the system ends with this process.

use std::io;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use process_wrap::tokio::{ChildWrapper, CommandWrap, JobObject, KillOnDrop};
use tokio::sync::watch;

use super::output::ProcessStatus;
use super::tree::{Begun, Ends, Failed, Failing, Life, Prepared, Rope, Stage};

/// The job is ended when this asks for it: the system has no signal that asks a program to end.
struct Job(watch::Sender<bool>);

impl Rope for Job {
    fn end(&self, _: Duration) {
        self.0.send_replace(true);
    }
}

/// Starts the program in a job of its own. In the context of the reactor.
pub(super) fn start(
    prepared: &Prepared,
    input: bool,
    life: watch::Sender<Life>,
) -> Result<Begun, Failed> {
    let mut command = CommandWrap::with_new(&prepared.program, |command| {
        command.args(&prepared.arguments).env_clear();
        command.envs(prepared.environment.iter().map(|(name, value)| (name, value)));
        if !prepared.directory.as_os_str().is_empty() {
            command.current_dir(&prepared.directory);
        }
        command.stdin(if input { Stdio::piped() } else { Stdio::null() });
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
    });
    command.wrap(JobObject).wrap(KillOnDrop);
    let mut child = command.spawn().map_err(|error| (Failing::Program, error))?;
    let missing = || (Failing::Guardian, io::ErrorKind::BrokenPipe.into());
    let ends = Ends {
        stdin: child.stdin().take().map(|stdin| Box::pin(stdin) as super::pipes::Writer),
        stdout: Box::pin(child.stdout().take().ok_or_else(missing)?),
        stderr: Box::pin(child.stderr().take().ok_or_else(missing)?),
    };
    let pid = child.id().unwrap_or_default();
    life.send_modify(|life| life.stage = Stage::Running(pid));
    let asked = watch::Sender::new(false);
    let work = drive(child, asked.subscribe(), life);
    Ok(Begun { rope: Arc::new(Job(asked)), work: Box::pin(work), ends })
}

async fn drive(
    mut child: Box<dyn ChildWrapper>,
    mut asked: watch::Receiver<bool>,
    life: watch::Sender<Life>,
) {
    let ended = tokio::select! {
        biased;
        ended = child.wait() => Some(ended),
        // Whoever could ask is gone: then it is to end too.
        _ = asked.wait_for(|asked| *asked) => None,
    };
    let ended = match ended {
        Some(ended) => ended,
        None => {
            child.start_kill().unwrap_or_default();
            child.wait().await
        }
    };
    let code = ended.ok().and_then(|status| status.code());
    life.send_modify(|life| {
        life.status = Some(code.map_or(ProcessStatus::Lost, ProcessStatus::Exited));
        life.gone = true;
    });
}
