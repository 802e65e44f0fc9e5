//! What a process gives back.

use std::collections::VecDeque;
use std::fmt;

use super::ProcessError;

/// How much of a standard error stands in an error, in bytes.
const LAST_WORDS: usize = 2048;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ProcessStatus {
    /// With this code.
    Exited(i32),
    /// By this signal.
    Signalled(i32),
    /// Nobody knows: its guardian was killed, and it was ended.
    Lost,
}

impl ProcessStatus {
    /// Whether it ended with the code 0.
    pub fn is_success(self) -> bool {
        self == Self::Exited(0)
    }
}

impl fmt::Display for ProcessStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "it ended with the code {code}"),
            Self::Signalled(signal) => write!(f, "it was ended by the signal {signal}"),
            Self::Lost => f.write_str("its guardian was killed, and nobody knows how it ended"),
        }
    }
}

/// What a process wrote: all of it, or its beginning and its end.
#[derive(Clone, Default)]
pub struct Captured {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    total: u64,
    most_head: usize,
    most_tail: usize,
}

impl Captured {
    pub(super) fn new(most_head: usize, most_tail: usize) -> Self {
        Self { most_head, most_tail, ..Self::default() }
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.total = self.total.saturating_add(bytes.len() as u64);
        let room = self.most_head - self.head.len();
        let (head, rest) = bytes.split_at(room.min(bytes.len()));
        self.head.extend_from_slice(head);
        // Only the last of it can stay.
        let rest = &rest[rest.len().saturating_sub(self.most_tail)..];
        let over = (self.tail.len() + rest.len()).saturating_sub(self.most_tail);
        self.tail.drain(..over);
        self.tail.extend(rest);
    }

    /// How many bytes were written in all.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// How many bytes in the middle were not kept.
    pub fn cut(&self) -> u64 {
        self.total - (self.head.len() + self.tail.len()) as u64
    }

    /// What was kept, without a mark where something was cut.
    pub fn bytes(&self) -> Vec<u8> {
        let (one, other) = self.tail.as_slices();
        [&self.head, one, other].concat()
    }

    /// The end of it, short enough for an error.
    pub(super) fn last_words(&self) -> String {
        let bytes = self.bytes();
        let end = &bytes[bytes.len().saturating_sub(LAST_WORDS)..];
        String::from_utf8_lossy(end).trim().to_owned()
    }

    /// What was kept as text, with a mark where something was cut. What is not UTF-8 is replaced.
    pub fn text(&self) -> String {
        if self.cut() == 0 {
            return String::from_utf8_lossy(&self.bytes()).into_owned();
        }
        let (one, other) = self.tail.as_slices();
        let (head, tail) = (String::from_utf8_lossy(&self.head), [one, other].concat());
        format!("{head}\n[{} bytes cut]\n{}", self.cut(), String::from_utf8_lossy(&tail))
    }
}

impl fmt::Debug for Captured {
    /// Without what was written: a log must not have it by accident.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("Captured");
        text.field("total", &self.total).field("cut", &self.cut()).finish_non_exhaustive()
    }
}

/// What a process that was waited for gave back.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ProcessOutput {
    pub(super) program: String,
    /// How it ended.
    pub status: ProcessStatus,
    /// What it wrote to its standard output.
    pub stdout: Captured,
    /// What it wrote to its standard error.
    pub stderr: Captured,
    /// It was ended because its time was over.
    pub timed_out: bool,
}

impl ProcessOutput {
    /// The output, unless the program ended without success.
    ///
    /// # Errors
    ///
    /// [`ProcessError::Unsuccessful`], with the end of what it wrote to its standard error.
    pub fn check(self) -> Result<Self, ProcessError> {
        if self.status.is_success() && !self.timed_out {
            return Ok(self);
        }
        let (program, status) = (self.program, self.status);
        Err(ProcessError::Unsuccessful { program, status, stderr: self.stderr.last_words() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_head_and_the_tail_are_kept() {
        for step in 1..12 {
            let mut captured = Captured::new(3, 4);
            for bytes in b"abcdefghijkl".chunks(step) {
                captured.push(bytes);
            }
            assert_eq!((captured.total(), captured.cut()), (12, 5), "in steps of {step}");
            assert_eq!(captured.bytes(), b"abcijkl");
            assert_eq!(captured.text(), "abc\n[5 bytes cut]\nijkl");
        }
    }

    #[test]
    fn what_fits_is_whole() {
        let mut captured = Captured::new(3, 4);
        captured.push(b"abcdefg");
        assert_eq!((captured.cut(), captured.text()), (0, "abcdefg".to_owned()));
        let mut nothing = Captured::new(0, 0);
        nothing.push(b"abc");
        assert_eq!((nothing.cut(), nothing.bytes()), (3, vec![]));
    }
}
