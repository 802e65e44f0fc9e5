//! Approvals by a person at a terminal.

use std::fmt;
use std::io::{self, BufRead, BufReader, Write};

use async_trait::async_trait;
use tokio::sync::mpsc;

use crate::approval::{ApprovalRequest, Approver, Decision};
use crate::tool::ToolFailure;
use crate::visible::is_visible;

/// An approver that asks at a terminal, one question at a time: `y` once, `p` for this plan, `t`
/// for the tool, anything else is a no, with a text after `n` as the reason.
///
/// Lines that were typed before a question was put are no answer to it, but for the first one, with
/// which the reading begins. The end of the input denies everything, and so does what is not UTF-8.
///
/// # Examples
///
/// ```
/// use toolscope::{TerminalApprover, ToolRuntime};
///
/// let builder = ToolRuntime::builder().approver(TerminalApprover::stdio());
/// # drop(builder);
/// ```
pub struct TerminalApprover {
    /// Held by the question that stands on the screen.
    turn: tokio::sync::Mutex<Terminal>,
}

struct Terminal {
    /// Where questions go.
    screen: Box<dyn Write + Send>,
    /// What a thread of its own reads: a read cannot be cancelled.
    lines: Lines,
}

enum Lines {
    Unread(Box<dyn BufRead + Send>),
    Read(mpsc::UnboundedReceiver<String>),
    Over,
}

impl TerminalApprover {
    /// Asks on standard error and reads from standard input.
    pub fn stdio() -> Self {
        Self::new(BufReader::new(io::stdin()), io::stderr())
    }

    /// Asks and reads elsewhere. Reading begins with the first question, on a thread of its own.
    pub fn new(input: impl BufRead + Send + 'static, screen: impl Write + Send + 'static) -> Self {
        let lines = Lines::Unread(Box::new(input));
        Self { turn: tokio::sync::Mutex::new(Terminal { screen: Box::new(screen), lines }) }
    }
}

impl fmt::Debug for TerminalApprover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TerminalApprover").finish_non_exhaustive()
    }
}

#[async_trait]
impl Approver for TerminalApprover {
    async fn decide(&self, request: &ApprovalRequest) -> Result<Decision, ToolFailure> {
        let mut terminal = self.turn.lock().await;
        let Terminal { screen, lines } = &mut *terminal;
        let lines = lines.after_stale()?;
        screen.write_all(question(request).as_bytes())?;
        screen.flush()?;
        let Some(line) = lines.recv().await else {
            return Ok(Decision::deny("the terminal is closed"));
        };
        Ok(answer(line.trim()))
    }
}

impl Lines {
    /// The lines from now on. The first question starts the reading, so nothing is stale for it.
    fn after_stale(&mut self) -> io::Result<&mut mpsc::UnboundedReceiver<String>> {
        if let Self::Read(lines) = self {
            while lines.try_recv().is_ok() {}
        } else if let Self::Unread(input) = std::mem::replace(self, Self::Over) {
            let (send, receive) = mpsc::unbounded_channel();
            let read = move || {
                for line in input.lines() {
                    if !line.is_ok_and(|line| send.send(line).is_ok()) {
                        return;
                    }
                }
            };
            std::thread::Builder::new().name("toolscope-terminal".into()).spawn(read)?;
            *self = Self::Read(receive);
        }
        match self {
            Self::Read(lines) => Ok(lines),
            _ => Err(io::Error::other("the terminal could not be read")),
        }
    }
}

fn question(request: &ApprovalRequest) -> String {
    let ApprovalRequest { plan_id, tool, description, reason, input, fingerprint, .. } = request;
    let (description, input) = (plain(description), plain(&format!("{input:#}")));
    let (reason, mark) = (plain(reason), fingerprint.get(..12).unwrap_or_default());
    format!(
        "\n{tool} (plan {plan_id}) asks to run, because {reason}.\n  it says: {description}\n  \
         input: {input}\n  fingerprint: {mark}\n\
         run it? [y]es, [p]: equal calls of this plan too, [t]: this tool in this plan, [n]o <reason>: "
    )
}

/// A text that cannot move the cursor, hide itself or turn its direction.
fn plain(text: &str) -> String {
    let plain = |c: char| {
        if c == '\n' || is_visible(c) { c.to_string() } else { c.escape_unicode().to_string() }
    };
    text.chars().map(plain).collect::<String>().replace('\n', "\n    ")
}

fn answer(line: &str) -> Decision {
    let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    let rest = rest.trim();
    match (word.to_ascii_lowercase().as_str(), rest.is_empty()) {
        ("y" | "yes", true) => Decision::Once,
        ("p" | "plan", true) => Decision::ForPlan,
        ("t" | "tool", true) => Decision::ToolForPlan,
        ("n" | "no", false) => Decision::deny(rest),
        _ => Decision::deny("the user said no"),
    }
}
