//! The guardian: a small process between the host and a tool's process tree. When the host closes
//! their socket, or is gone however it went, the guardian ends the tree and leaves.
//!
//! It is a subreaper: whatever leaves its parent, by `setsid` too, becomes the guardian's child, so
//! it is done when it has no child left. It has one thread and no Tokio runtime.
//!
//! A service gets one in either of two ways: it calls [`init`] first in `main`, and is then run
//! again as its own guardian; or the program `toolscope-guardian` of this crate stands beside its
//! executable or in `PATH`, or where
//! [`ToolRuntimeBuilder::guardian`](crate::ToolRuntimeBuilder::guardian) says. With neither, trees
//! are process groups: see [`Isolation`](super::Isolation).

use std::collections::{BTreeSet, HashSet};
use std::env::ArgsOs;
use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::SigSet;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, Signal, WaitId, WaitIdOptions, WaitOptions, WaitStatus,
    chdir, getpid, getppid, kill_process, kill_process_group, pidfd_open, pidfd_send_signal,
    set_child_subreaper, set_parent_process_death_signal, setpriority_process, setrlimit, setsid,
    wait, waitid, waitpid,
};
use signal_hook::consts::{SIGALRM, SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};

use super::scan;
use super::wire::{GUARD, LAUNCH, NAME, Record, Stage, grace_of, host_of, pair, receive, send};

/// What a tree gets when its host is gone and could not say more.
const GRACE_OF_A_DEAD_HOST: Duration = Duration::from_millis(300);
/// The code of a guardian that did not come to guard anything.
const NOT_STARTED: i32 = 125;

static INIT: AtomicBool = AtomicBool::new(false);

/// Makes this program able to be its own guardian. Call it first in a plain `fn main`, before a
/// Tokio runtime and before any thread.
///
/// It returns at once, unless the program was started by this crate to be a guardian: then it does
/// not return, and nothing that comes after it in `main` runs.
///
/// # Examples
///
/// ```
/// // The first line of `main`.
/// toolscope::guardian::init();
/// let tokio = tokio::runtime::Runtime::new()?;
/// tokio.block_on(async { /* the service */ });
/// # Ok::<(), std::io::Error>(())
/// ```
#[expect(clippy::exit, reason = "in a guardian there is nothing to go on with")]
pub fn init() {
    let mut arguments = std::env::args_os();
    if arguments.next().as_deref() != Some(OsStr::new(NAME)) {
        INIT.store(true, Relaxed);
        return;
    }
    let code = match arguments.next().as_deref().and_then(OsStr::to_str) {
        Some(GUARD) => guard(arguments),
        Some(LAUNCH) => launch(arguments),
        _ => {
            complain();
            NOT_STARTED
        }
    };
    std::process::exit(code)
}

/// Whether [`init`] was called: only then does a host that runs itself again become a guardian and
/// not a second copy of the service.
pub(super) fn is_init() -> bool {
    INIT.load(Relaxed)
}

#[expect(clippy::print_stderr, reason = "a person started it by hand")]
fn complain() {
    eprintln!("{NAME}: it is started by toolscope, not by hand");
}

/// What goes wrong before there is a tool, and at which stage.
type Failed = (Stage, io::Error);

fn of_guardian(error: impl Into<io::Error>) -> Failed {
    (Stage::Guardian, error.into())
}

fn errno(error: &io::Error) -> i32 {
    let other = if error.kind() == io::ErrorKind::InvalidInput { Errno::INVAL } else { Errno::IO };
    error.raw_os_error().unwrap_or(other.raw_os_error())
}

// ===== what becomes the tool =====

/// The second stage, in the process that becomes the tool: its own session, which dies with the
/// guardian. It may use the parent's death signal because the guardian has one thread.
fn launch(arguments: ArgsOs) -> i32 {
    let Ok(socket) = io::stdin().as_fd().try_clone_to_owned() else {
        return NOT_STARTED;
    };
    let Err(error) = become_the_tool(&socket, arguments);
    // Nobody listens if the guardian is gone.
    UnixStream::from(socket).write_all(&errno(&error).to_le_bytes()).unwrap_or_default();
    NOT_STARTED
}

fn become_the_tool(
    socket: &OwnedFd,
    mut arguments: ArgsOs,
) -> Result<std::convert::Infallible, io::Error> {
    let mut guardian = [0; 4];
    let stdin = receive(socket, &mut guardian)?.pop().ok_or(io::ErrorKind::UnexpectedEof)?;
    setsid()?;
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // It may have died before the signal was asked for.
    if getppid().map(Pid::as_raw_pid) != Some(i32::from_le_bytes(guardian)) {
        return Err(Errno::SRCH.into());
    }
    let program = arguments.next().ok_or(io::ErrorKind::InvalidInput)?;
    Err(Command::new(program).args(arguments).stdin(stdin).exec())
}

// ===== the guardian =====

fn guard(arguments: ArgsOs) -> i32 {
    // A mask that was inherited would hide SIGCHLD from the guardian and SIGTERM from the tool.
    if SigSet::all().thread_unblock().is_err() {
        return NOT_STARTED;
    }
    let Ok(socket) = io::stdin().as_fd().try_clone_to_owned() else {
        return NOT_STARTED;
    };
    close_strays(&socket);
    let mut hello = [0; 8];
    let fds = receive(&socket, &mut hello).ok().and_then(|fds| <[OwnedFd; 3]>::try_from(fds).ok());
    let (Some(fds), Some(host)) = (fds, host_of(hello)) else {
        return NOT_STARTED;
    };
    let mut socket = UnixStream::from(socket);
    tell(&mut socket, Record::Ready);
    match Guardian::start(arguments, &mut socket, fds, host) {
        Ok((tool, wake)) => {
            tell(&mut socket, Record::Started(tool.as_raw_pid()));
            Guardian { socket, tool: Some(tool), status: None, wake }.watch()
        }
        Err((stage, error)) => {
            tell(&mut socket, Record::Failed(stage, errno(&error)));
            NOT_STARTED
        }
    }
}

/// A host that is gone hears nothing, and is noticed by the stream's end.
fn tell(socket: &mut UnixStream, record: Record) {
    socket.write_all(&record.to_bytes()).unwrap_or_default();
}

/// What the host left open for its children would otherwise live as long as the tool.
fn close_strays(keep: &OwnedFd) {
    let Ok(open) = std::fs::read_dir("/proc/self/fd") else {
        return;
    };
    let number = |entry: std::fs::DirEntry| entry.file_name().to_str()?.parse().ok();
    // The directory itself is closed when the list is whole.
    let open: Vec<i32> = open.flatten().filter_map(number).collect();
    for fd in open.into_iter().filter(|fd| *fd > 2 && *fd != keep.as_raw_fd()) {
        nix::unistd::close(fd).unwrap_or_default();
    }
}

/// What wakes the guardian.
struct Wake {
    child: UnixStream,
    term: UnixStream,
    /// A copy of the host may hold our socket open: the host itself is watched too.
    host: Option<OwnedFd>,
}

struct Guardian {
    socket: UnixStream,
    /// Until it is reaped.
    tool: Option<Pid>,
    status: Option<WaitStatus>,
    wake: Wake,
}

impl Guardian {
    fn start(
        mut arguments: ArgsOs,
        socket: &mut UnixStream,
        fds: [OwnedFd; 3],
        host: i32,
    ) -> Result<(Pid, Wake), Failed> {
        let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        rustix::stdio::dup2_stdin(null.map_err(of_guardian)?).map_err(of_guardian)?;
        let (child, term) = signals().map_err(of_guardian)?;
        // The leader of a session already is as good.
        setsid().map(drop).unwrap_or_default();
        set_child_subreaper(Some(getpid())).map_err(of_guardian)?;
        let host = watch_host(host)?;
        socket.set_nonblocking(true).map_err(of_guardian)?;
        if matches!(socket.read(&mut [0]), Ok(0)) {
            return Err(of_guardian(Errno::PIPE));
        }
        socket.set_nonblocking(false).map_err(of_guardian)?;

        let missing = || of_guardian(io::ErrorKind::InvalidInput);
        let directory = arguments.next().ok_or_else(missing)?;
        if !directory.is_empty() {
            chdir(&directory).map_err(|error| (Stage::Directory, error.into()))?;
        }
        Ok((spawn(arguments, fds)?, Wake { child, term, host }))
    }

    /// Until the tool has ended, the host is gone, or either asks for the end.
    fn watch(mut self) -> i32 {
        let mut grace = GRACE_OF_A_DEAD_HOST;
        let mut ending = false;
        while !ending {
            let (told, asked, alone) = self.wait_for_something();
            drain(&self.wake.child);
            if told {
                let mut message = [0; 4];
                match self.socket.read_exact(&mut message) {
                    Ok(()) => grace = grace_of(message),
                    Err(_) => ending = true,
                }
            }
            let nothing_left = self.reap();
            ending |= asked || alone || nothing_left || self.status.is_some();
        }
        self.end(grace);
        self.leave()
    }

    /// Whether the host said something or closed, whether a signal asks for the end, and whether
    /// the host is gone.
    fn wait_for_something(&self) -> (bool, bool, bool) {
        let (socket, wake) = (&self.socket, &self.wake);
        let mut fds = vec![
            PollFd::new(&wake.child, PollFlags::IN),
            PollFd::new(socket, PollFlags::IN),
            PollFd::new(&wake.term, PollFlags::IN),
        ];
        fds.extend(wake.host.as_ref().map(|host| PollFd::new(host, PollFlags::IN)));
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            // It cannot watch any more: what it guards must not go on unguarded.
            Err(_) => return (false, true, false),
        }
        let is_ready = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
        (is_ready(1), is_ready(2), is_ready(3))
    }

    /// Reaps what is dead; true when there is no child left.
    fn reap(&mut self) -> bool {
        if let Some(tool) = self.tool {
            // Its group is signalled before it is reaped, while its number cannot be another's.
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
            if matches!(waitid(WaitId::Pid(tool), options), Ok(Some(_))) {
                ignore(kill_process_group(tool, Signal::TERM));
                if let Ok(Some((_, status))) = waitpid(Some(tool), WaitOptions::NOHANG) {
                    self.ended(status);
                }
            }
        }
        loop {
            // Not `waitpid(None)`: that asks for the own group only.
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) if self.tool == Some(pid) => self.ended(status),
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => return false,
                Err(_) => return true,
            }
        }
    }

    fn ended(&mut self, status: WaitStatus) {
        self.tool = None;
        self.status = Some(status);
        let record = match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Record::Exited(code),
            (None, signal) => Record::Signalled(signal.unwrap_or_default()),
        };
        tell(&mut self.socket, record);
    }

    /// TERM once, the grace, then KILL until there is no child left. The last has no bound: whoever
    /// waits for it has.
    fn end(&mut self, grace: Duration) {
        // For root only, and only now: a tool would inherit it.
        ignore(setpriority_process(None, -20));
        if let Some(tool) = self.tool {
            ignore(kill_process_group(tool, Signal::TERM));
        }
        signal_tree(Signal::TERM);
        let until = Instant::now() + grace;
        while !self.reap() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            self.wait_for_a_child(left);
        }
        for round in 0_u32.. {
            if let Some(tool) = self.tool {
                ignore(kill_process_group(tool, Signal::KILL));
            }
            if round % 8 == 0 {
                signal_tree(Signal::KILL);
            }
            for _ in 0..16 {
                kill_children();
                if self.reap() {
                    return;
                }
            }
            let pause = match round {
                0..200 => 2,
                200..400 => 50,
                _ => 1000,
            };
            self.wait_for_a_child(Duration::from_millis(pause));
        }
    }

    fn wait_for_a_child(&self, time: Duration) {
        let time = Timespec::try_from(time).ok();
        // A signal that interrupts it is as good as a child.
        poll(&mut [PollFd::new(&self.wake.child, PollFlags::IN)], time.as_ref())
            .unwrap_or_default();
        drain(&self.wake.child);
    }

    /// Ends as the tool did, so that whoever waits for the guardian sees the tool's status.
    fn leave(self) -> i32 {
        let Some(status) = self.status else {
            return NOT_STARTED;
        };
        if let Some(code) = status.exit_status() {
            return code;
        }
        let signal = status.terminating_signal().unwrap_or(9);
        ignore(setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) }));
        signal_hook::low_level::emulate_default_handler(signal).unwrap_or_default();
        128 + signal
    }
}

/// To signal what is gone already is no failure.
fn ignore(result: rustix::io::Result<()>) {
    result.unwrap_or_default();
}

fn signals() -> io::Result<(UnixStream, UnixStream)> {
    use signal_hook::low_level::pipe;
    let (child, tells_of_child) = UnixStream::pair()?;
    let (term, tells_to_end) = UnixStream::pair()?;
    pipe::register(SIGCHLD, tells_of_child)?;
    for signal in [SIGTERM, SIGINT, SIGHUP, SIGQUIT] {
        pipe::register(signal, tells_to_end.try_clone()?)?;
    }
    // What is caught has its default effect again in the tool: so nothing that the host ignores,
    // as under `nohup`, is ignored there.
    let unused = Arc::new(AtomicBool::new(false));
    for signal in [SIGUSR1, SIGUSR2, SIGALRM] {
        signal_hook::flag::register(signal, Arc::clone(&unused))?;
    }
    child.set_nonblocking(true)?;
    Ok((child, term))
}

fn drain(mut stream: &UnixStream) {
    let mut bytes = [0; 64];
    while matches!(stream.read(&mut bytes), Ok(read) if read > 0) {}
}

fn watch_host(host: i32) -> Result<Option<OwnedFd>, Failed> {
    let parent = getppid();
    // Where pids are told otherwise (another namespace) the socket alone must do.
    let Some(pid) = parent.filter(|parent| parent.as_raw_pid() == host) else {
        return Ok(None);
    };
    let watched = pidfd_open(pid, PidfdFlags::empty()).ok();
    if getppid() != parent {
        return Err(of_guardian(Errno::SRCH));
    }
    Ok(watched)
}

/// Starts what becomes the tool, and waits until it is it.
fn spawn(arguments: ArgsOs, fds: [OwnedFd; 3]) -> Result<Pid, Failed> {
    let [stdin, stdout, stderr] = fds;
    let (ours, theirs) = pair().map_err(of_guardian)?;
    send(&ours, &getpid().as_raw_pid().to_le_bytes(), &[stdin.as_fd()]).map_err(of_guardian)?;
    drop(stdin);
    let child = Command::new("/proc/self/exe")
        .arg0(NAME)
        .arg(LAUNCH)
        .args(arguments)
        .stdin(theirs)
        .stdout(stdout)
        .stderr(stderr)
        // The command, and our copies in it, end here.
        .spawn()
        .map_err(|error| match error.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::TOOBIG) => (Stage::Program, error),
            _ => of_guardian(error),
        })?;
    let tool = Pid::from_child(&child);
    let mut code = [0; 4];
    match UnixStream::from(ours).read_exact(&mut code) {
        Ok(()) => {
            ignore(waitpid(Some(tool), WaitOptions::empty()).map(drop));
            Err((Stage::Program, io::Error::from_raw_os_error(i32::from_le_bytes(code))))
        }
        // `exec` closed it.
        Err(_) => Ok(tool),
    }
}

// ===== the tree =====

fn kill_children() {
    match scan::children_of_this_thread() {
        // Only this process reaps them, so their numbers cannot be another's.
        Some(children) => {
            for child in children {
                ignore(kill_process(child, Signal::KILL));
            }
        }
        None => signal_tree(Signal::KILL),
    }
}

/// Walks the tree, parents first, and signals each process as it is met: a tree that grows gets
/// smaller meanwhile.
fn signal_tree(signal: Signal) {
    let me = getpid();
    let mut known = HashSet::new();
    let mut to_do = vec![me];
    while let Some(parent) = to_do.pop() {
        // Its children are listed before it is killed: afterwards they have another parent.
        let children = scan::children(parent);
        if parent != me {
            signal_one(parent, signal, me, &known);
        }
        to_do.extend(children.into_iter().filter(|child| known.insert(*child)));
    }
}

/// By a descriptor, and only when what it stands for is still in the tree.
fn signal_one(pid: Pid, signal: Signal, me: Pid, known: &HashSet<Pid>) {
    let Ok(fd) = pidfd_open(pid, PidfdFlags::empty()) else {
        return;
    };
    if scan::parent(pid).is_some_and(|parent| parent == me || known.contains(&parent)) {
        ignore(pidfd_send_signal(&fd, signal));
        if signal == Signal::TERM {
            // One that is stopped hears nothing.
            ignore(pidfd_send_signal(&fd, Signal::CONT));
        }
    }
}

// ===== where it is found =====

/// A program to run as a guardian.
pub(super) struct Found {
    pub(super) path: PathBuf,
    /// It was asked for by its path: nothing else will do.
    pub(super) is_asked: bool,
}

/// What was run as a guardian and was none.
static NONE: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// By the path that was asked for; else this program itself, if it called [`init`]; else beside
/// its executable, or in `PATH`.
pub(super) fn find(asked: Option<&Path>) -> Option<Found> {
    if let Some(path) = asked {
        return Some(Found { path: path.to_owned(), is_asked: true });
    }
    let itself = is_init().then(|| PathBuf::from("/proc/self/exe"));
    let beside = std::env::current_exe().ok().and_then(|this| Some(this.parent()?.join(NAME)));
    let in_path = std::env::var_os("PATH").unwrap_or_default();
    let in_path = std::env::split_paths(&in_path).map(|directory| directory.join(NAME));
    let places = beside.into_iter().chain(in_path).filter(|path| is_program(path));
    let none = NONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut found = itself.into_iter().chain(places).filter(|path| !none.contains(path));
    found.next().map(|path| Found { path, is_asked: false })
}

fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

impl Found {
    /// It is no guardian, and will not be asked again.
    pub(super) fn give_up(self, error: &io::Error) {
        tracing::warn!(
            target: "toolscope::process",
            guardian = %self.path.display(),
            %error,
            "this is no guardian of this version"
        );
        NONE.lock().unwrap_or_else(PoisonError::into_inner).insert(self.path);
    }
}

/// For the program `toolscope-guardian`, which is nothing else.
#[doc(hidden)]
#[expect(clippy::exit, reason = "it has nothing else to do")]
pub fn refuse() -> ! {
    complain();
    std::process::exit(NOT_STARTED)
}
