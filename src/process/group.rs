//! A tree without a guardian: a process group. What leaves the group is found by its mark, where
//! the system lets us read it.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, Command};
use tokio::sync::watch;

use super::output::ProcessStatus;
use super::tree::{Failed, Failing, Life, Prepared, Rope, Stage, Theirs, Work};

/// How long what a program left behind has to end after it.
const LEFT_BEHIND: Duration = Duration::from_millis(100);
/// How long a destructor looks for what left the group.
#[cfg(target_os = "linux")]
const QUICK: Duration = Duration::from_millis(20);
/// How long it is looked for afterwards.
#[cfg(target_os = "linux")]
const SWEEP: Duration = Duration::from_secs(1);

struct Group {
    /// The pid of the program, which is the group's; `None` once it is reaped and the number may be
    /// another's.
    leader: Mutex<Option<Pid>>,
    /// The grace, once the end is asked for.
    asked: watch::Sender<Option<Duration>>,
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "nothing reads it there"))]
    mark: String,
}

impl Group {
    fn signal(&self, signal: Signal) {
        let leader = self.leader.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(leader) = *leader {
            // One without any process left is as good as signalled.
            kill_process_group(leader, signal).unwrap_or_default();
        }
    }

    fn forget_leader(&self) {
        *self.leader.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl Rope for Group {
    fn end(&self, grace: Duration) {
        self.asked.send_replace(Some(grace));
    }

    /// At once, without a grace: nobody may be there to kill later.
    fn cut(&self, _: Duration) {
        self.signal(Signal::KILL);
        #[cfg(target_os = "linux")]
        super::sweep::end_tree(&self.mark, QUICK);
        self.end(Duration::ZERO);
    }
}

/// Starts the program as the leader of a group. In the context of the reactor.
pub(super) fn start(
    prepared: &Prepared,
    theirs: Theirs,
    life: watch::Sender<Life>,
) -> Result<(Arc<dyn Rope>, Work), Failed> {
    let [stdin, stdout, stderr] = theirs;
    let mut command = Command::new(&prepared.program);
    command.args(&prepared.arguments);
    if !prepared.directory.as_os_str().is_empty() {
        enter(prepared).map_err(|error| (Failing::Directory, error))?;
        command.current_dir(&prepared.directory);
    }
    let variables = prepared.environment.iter().map(|(name, value)| (name, value));
    let child = command
        .env_clear()
        .envs(variables)
        .process_group(0)
        .stdin(Stdio::from(stdin))
        .stdout(Stdio::from(stdout))
        .stderr(Stdio::from(stderr))
        .spawn()
        .map_err(|error| (Failing::Program, error))?;
    drop(command);
    let pid = child.id().unwrap_or_default();
    let leader = i32::try_from(pid).ok().and_then(Pid::from_raw);
    life.send_modify(|life| life.stage = Stage::Running(pid));
    let group = Arc::new(Group {
        leader: Mutex::new(leader),
        asked: watch::Sender::new(None),
        mark: prepared.mark.clone(),
    });
    let work = drive(Arc::clone(&group), child, life);
    Ok((group, Box::pin(work)))
}

/// The system's own error for a directory does not tell it from the program's.
fn enter(prepared: &Prepared) -> io::Result<()> {
    if std::fs::metadata(&prepared.directory)?.is_dir() {
        return Ok(());
    }
    Err(Errno::NOTDIR.into())
}

async fn drive(group: Arc<Group>, mut child: Child, life: watch::Sender<Life>) {
    let mut asked = group.asked.subscribe();
    let status = tokio::select! {
        biased;
        status = ended(&mut child) => status,
        grace = asked_to_end(&mut asked) => {
            group.signal(Signal::TERM);
            if let Ok(status) = tokio::time::timeout(grace, ended(&mut child)).await {
                status
            } else {
                group.signal(Signal::KILL);
                ended(&mut child).await
            }
        }
    };
    life.send_modify(|life| life.status = Some(status));
    group.signal(Signal::TERM);
    tokio::time::sleep(LEFT_BEHIND).await;
    group.signal(Signal::KILL);
    #[cfg(target_os = "linux")]
    {
        let mark = group.mark.clone();
        let swept = tokio::task::spawn_blocking(move || super::sweep::end_tree(&mark, SWEEP));
        swept.await.map(drop).unwrap_or_default();
    }
    group.forget_leader();
    child.wait().await.map(drop).unwrap_or_default();
    life.send_modify(|life| life.gone = true);
}

async fn asked_to_end(asked: &mut watch::Receiver<Option<Duration>>) -> Duration {
    match asked.wait_for(Option::is_some).await.map(|grace| *grace) {
        Ok(Some(grace)) => grace,
        // Its sender lives in the group, which we hold.
        Ok(None) | Err(_) => std::future::pending().await,
    }
}

/// Waits until the program has ended, without reaping it: until then its number, and its group's,
/// cannot be another's.
#[cfg(target_os = "linux")]
async fn ended(child: &mut Child) -> ProcessStatus {
    use rustix::process::{WaitId, WaitIdOptions, waitid};
    use tokio::signal::unix::{SignalKind, signal};

    let pid = child.id().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
    // Registered first, looked second.
    let (Some(pid), Ok(mut told)) = (pid, signal(SignalKind::child())) else {
        return reaped(child).await;
    };
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    loop {
        match waitid(WaitId::Pid(pid), options) {
            Ok(Some(status)) => {
                return match (status.exit_status(), status.terminating_signal()) {
                    (Some(code), _) => ProcessStatus::Exited(code),
                    (None, Some(signal)) => ProcessStatus::Signalled(signal),
                    (None, None) => ProcessStatus::Lost,
                };
            }
            Ok(None) | Err(Errno::INTR) => drop(told.recv().await),
            Err(_) => return reaped(child).await,
        }
    }
}

#[cfg(not(target_os = "linux"))]
async fn ended(child: &mut Child) -> ProcessStatus {
    reaped(child).await
}

async fn reaped(child: &mut Child) -> ProcessStatus {
    match child.wait().await {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => ProcessStatus::Exited(code),
            (None, Some(signal)) => ProcessStatus::Signalled(signal),
            (None, None) => ProcessStatus::Lost,
        },
        Err(_) => ProcessStatus::Lost,
    }
}
