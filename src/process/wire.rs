//! What host and guardian say to each other, over the socket that is the guardian's stdin.
//!
//! Down go the tool's three descriptors, with who the host is, and later how much grace an end
//! gives. Up come [`Record`]s. The end of the stream means, to either side, that the other is gone.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

/// The name under which the guardian runs: how a host that runs itself again knows what it is to
/// be.
pub(super) const NAME: &str = "toolscope-guardian";
/// The first argument of the guardian, and of what becomes the tool.
pub(super) const GUARD: &str = "--guard";
pub(super) const LAUNCH: &str = "--launch";

/// Another version of the protocol has another one.
const MAGIC: [u8; 4] = *b"tsg1";

/// Two ends that no program inherits.
pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?)
}

/// The first message down: who the host is.
pub(super) fn hello(host: i32) -> [u8; 8] {
    let mut hello = [0; 8];
    hello[..4].copy_from_slice(&MAGIC);
    hello[4..].copy_from_slice(&host.to_le_bytes());
    hello
}

pub(super) fn host_of(hello: [u8; 8]) -> Option<i32> {
    let [a, b, c, d, host @ ..] = hello;
    ([a, b, c, d] == MAGIC).then(|| i32::from_le_bytes(host))
}

/// A later message down: the grace that the end gives.
pub(super) fn grace(grace: Duration) -> [u8; 4] {
    u32::try_from(grace.as_millis()).unwrap_or(u32::MAX).to_le_bytes()
}

pub(super) fn grace_of(message: [u8; 4]) -> Duration {
    Duration::from_millis(u32::from_le_bytes(message).into())
}

/// Sends a text and at most three descriptors.
pub(super) fn send(socket: impl AsFd, text: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let sent = sendmsg(socket, &[IoSlice::new(text)], &mut control, flags)?;
    if sent == text.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Takes what [`send`] sent; it was queued before, so nothing is waited for.
pub(super) fn receive(socket: impl AsFd, text: &mut [u8]) -> io::Result<Vec<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let wanted = text.len();
    let received = recvmsg(socket, &mut [IoSliceMut::new(text)], &mut control, flags)?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(those) = message {
            fds.extend(those);
        }
    }
    if received.bytes == wanted { Ok(fds) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// What the guardian tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Record {
    /// It is a guardian, and has not started anything yet.
    Ready,
    /// The tool was executed; its pid.
    Started(i32),
    /// It was not, at that stage, with that `errno`.
    Failed(Stage, i32),
    /// The tool ended with that code.
    Exited(i32),
    /// The tool was ended by that signal.
    Signalled(i32),
}

/// Where a start can fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Guardian,
    Directory,
    Program,
}

impl Record {
    pub(super) const LEN: usize = 9;

    pub(super) fn to_bytes(self) -> [u8; Self::LEN] {
        let (kind, one, other) = match self {
            Self::Ready => (b'R', 0, 0),
            Self::Started(pid) => (b'S', pid, 0),
            Self::Failed(stage, errno) => (b'F', stage as i32, errno),
            Self::Exited(code) => (b'X', code, 0),
            Self::Signalled(signal) => (b'K', signal, 0),
        };
        let mut bytes = [kind; Self::LEN];
        bytes[1..5].copy_from_slice(&one.to_le_bytes());
        bytes[5..].copy_from_slice(&other.to_le_bytes());
        bytes
    }

    pub(super) fn from_bytes(bytes: [u8; Self::LEN]) -> Option<Self> {
        let (kind, numbers) = bytes.split_first()?;
        let (one, other) = numbers.split_at(4);
        let one = i32::from_le_bytes(one.try_into().ok()?);
        let other = i32::from_le_bytes(other.try_into().ok()?);
        Some(match kind {
            b'R' => Self::Ready,
            b'S' => Self::Started(one),
            b'F' => {
                let stages = [Stage::Guardian, Stage::Directory, Stage::Program];
                Self::Failed(*stages.iter().find(|stage| **stage as i32 == one)?, other)
            }
            b'X' => Self::Exited(one),
            b'K' => Self::Signalled(one),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_back() {
        let stages = [Stage::Guardian, Stage::Directory, Stage::Program];
        let failed = stages.map(|stage| Record::Failed(stage, 2));
        let others =
            [Record::Ready, Record::Started(7), Record::Exited(-1), Record::Signalled(i32::MAX)];
        for record in failed.into_iter().chain(others) {
            assert_eq!(Record::from_bytes(record.to_bytes()), Some(record));
        }
        assert_eq!(Record::from_bytes([0; Record::LEN]), None);
        assert_eq!(Record::from_bytes(*b"F\xff\0\0\0\0\0\0\0"), None);
    }

    #[test]
    fn another_version_is_no_host() {
        assert_eq!(host_of(hello(4711)), Some(4711));
        assert_eq!(host_of(*b"tsg0\0\0\0\0"), None);
    }

    #[test]
    fn a_grace_is_milliseconds_that_fit() {
        assert_eq!(grace_of(grace(Duration::from_millis(1500))), Duration::from_millis(1500));
        assert_eq!(grace_of(grace(Duration::MAX)), Duration::from_millis(u32::MAX.into()));
    }
}
