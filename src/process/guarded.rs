//! A tree with a guardian, seen from the host.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown, send, shutdown};
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::sync::watch;

use super::output::ProcessStatus;
use super::sweep;
use super::tree::{Failing, Life, Prepared, Rope, Stage, Theirs, Work};
use super::wire::{self, GUARD, NAME, Record, hello, pair};

/// How long what was run as a guardian has to say that it is one.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// How long what a killed guardian left behind is looked for.
const SWEEP: Duration = Duration::from_secs(1);

/// Our end of the guardian's socket. It is closed for both when it is let go of, whoever else holds
/// a copy of the descriptor, and by the kernel when this process is gone.
struct Lifeline(OwnedFd);

impl Rope for Lifeline {
    fn end(&self, grace: Duration) {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        // A guardian that is gone needs neither.
        send(&self.0, &wire::grace(grace), flags).map(drop).unwrap_or_default();
        shutdown(&self.0, Shutdown::Write).unwrap_or_default();
    }
}

impl Drop for Lifeline {
    fn drop(&mut self) {
        shutdown(&self.0, Shutdown::Write).unwrap_or_default();
    }
}

/// Starts a guardian that starts the program. In the context of the reactor.
pub(super) fn start(
    guardian: &Path,
    prepared: &Prepared,
    theirs: &Theirs,
    life: watch::Sender<Life>,
) -> io::Result<(Arc<dyn Rope>, Work)> {
    let (ours, socket) = pair()?;
    let fds = [theirs[0].as_fd(), theirs[1].as_fd(), theirs[2].as_fd()];
    // Queued before there is a guardian, so that it never has them as its own 0, 1 and 2.
    let host = rustix::process::getpid().as_raw_pid();
    wire::send(&ours, &hello(host), &fds)?;
    // All that can fail stands before there is something to end.
    let records = std::os::unix::net::UnixStream::from(ours.try_clone()?);
    records.set_nonblocking(true)?;
    let records = UnixStream::from_std(records)?;
    let rope: Arc<dyn Rope> = Arc::new(Lifeline(ours));
    let child = Command::new(guardian)
        .arg0(NAME)
        .arg(GUARD)
        .arg(&prepared.directory)
        .arg(&prepared.program)
        .args(&prepared.arguments)
        .env_clear()
        .envs(prepared.environment.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::from(socket))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // The command, and with it our copy of the socket, end here.
        .spawn()?;
    let work = drive(records, child, life, prepared.mark.clone());
    Ok((rope, Box::pin(work)))
}

/// Follows what the guardian tells until it is gone.
async fn drive(
    mut records: UnixStream,
    mut guardian: Child,
    life: watch::Sender<Life>,
    mark: String,
) {
    let first = tokio::time::timeout(HANDSHAKE, record(&mut records)).await;
    let is_guardian = matches!(first, Ok(Some(Record::Ready)));
    // A guardian under load, perhaps: it is killed, but another may be quicker.
    let is_late = first.is_err();
    if is_guardian {
        while let Some(record) = record(&mut records).await {
            life.send_modify(|life| match record {
                Record::Ready => {}
                Record::Started(pid) => life.stage = Stage::Running(pid.unsigned_abs()),
                Record::Failed(stage, errno) => life.stage = Stage::Failed(failing(stage), errno),
                Record::Exited(code) => life.status = Some(ProcessStatus::Exited(code)),
                Record::Signalled(signal) => life.status = Some(ProcessStatus::Signalled(signal)),
            });
        }
    } else {
        // Whatever it is, it has done nothing for us yet.
        guardian.start_kill().unwrap_or_default();
    }
    guardian.wait().await.map(drop).unwrap_or_default();
    let (stage, status) = {
        let life = life.borrow();
        (life.stage, life.status)
    };
    let is_lost = is_guardian && status.is_none() && !matches!(stage, Stage::Failed(..));
    if is_lost {
        // It was killed. The program died with it, what it had started did not.
        let swept = tokio::task::spawn_blocking(move || sweep::end_tree(&mark, SWEEP));
        let ended = swept.await.unwrap_or_default();
        tracing::warn!(target: "toolscope::process", ended, "a guardian was killed");
    }
    life.send_modify(|life| {
        life.gone = true;
        if matches!(life.stage, Stage::Starting) {
            let (failing, errno) = match (is_guardian, is_late) {
                (false, false) => (Failing::NoGuardian, Errno::PIPE),
                (false, true) => (Failing::Guardian, Errno::TIMEDOUT),
                (true, _) => (Failing::Guardian, Errno::PIPE),
            };
            life.stage = Stage::Failed(failing, errno.raw_os_error());
        }
        if is_lost {
            life.status = Some(ProcessStatus::Lost);
        }
    });
}

async fn record(records: &mut UnixStream) -> Option<Record> {
    let mut bytes = [0; Record::LEN];
    records.read_exact(&mut bytes).await.ok()?;
    Record::from_bytes(bytes)
}

fn failing(stage: wire::Stage) -> Failing {
    match stage {
        wire::Stage::Guardian => Failing::Guardian,
        wire::Stage::Directory => Failing::Directory,
        wire::Stage::Program => Failing::Program,
    }
}
