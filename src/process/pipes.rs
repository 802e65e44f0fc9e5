//! The ends of a process's pipes that its tool holds.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::runtime::Handle;

pub(super) type Reader = Pin<Box<dyn AsyncRead + Send + Sync>>;
pub(super) type Writer = Pin<Box<dyn AsyncWrite + Send + Sync>>;

/// The standard input of a process; dropped, it is at its end.
pub struct ProcessStdin(pub(super) Writer);

impl AsyncWrite for ProcessStdin {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.0.as_mut().poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.as_mut().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.as_mut().poll_shutdown(cx)
    }
}

impl fmt::Debug for ProcessStdin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ProcessStdin")
    }
}

/// The standard output of a process.
pub struct ProcessStdout(pub(super) Reader);

impl AsyncRead for ProcessStdout {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.0.as_mut().poll_read(cx, buffer)
    }
}

impl fmt::Debug for ProcessStdout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ProcessStdout")
    }
}

/// The standard error of a process. When it is dropped the rest is read and thrown away: a process
/// must not stop, or end, because nobody reads its log.
pub struct ProcessStderr {
    pub(super) reader: Option<Reader>,
    pub(super) reactor: Handle,
}

impl AsyncRead for ProcessStderr {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut self.reader {
            Some(reader) => reader.as_mut().poll_read(cx, buffer),
            None => Poll::Ready(Ok(())),
        }
    }
}

impl Drop for ProcessStderr {
    fn drop(&mut self) {
        if let Some(mut reader) = self.reader.take() {
            drop(self.reactor.spawn(async move {
                let mut buffer = vec![0; 8 * 1024];
                while matches!(reader.read(&mut buffer).await, Ok(read) if read > 0) {}
            }));
        }
    }
}

impl fmt::Debug for ProcessStderr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ProcessStderr")
    }
}
