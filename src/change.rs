//! What tools changed in the world, as they report it.

use serde::{Deserialize, Serialize};

use crate::name::ToolName;

/// One mutation, recorded by the tool that made it with
/// [`record_change`](crate::ToolExecutionContext::record_change).
///
/// # Examples
///
/// ```
/// use toolscope::{Change, ChangeKind};
///
/// let change = Change::new(ChangeKind::Modified, "src/main.rs").summary("3 lines replaced");
/// assert_eq!(change.target, "src/main.rs");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Change {
    /// What was done.
    pub kind: ChangeKind,
    /// To what: a path, an address, an identifier.
    pub target: String,
    /// In a few words, for a person.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<String>,
}

impl Change {
    /// A change of that kind to that target.
    pub fn new(kind: ChangeKind, target: impl Into<String>) -> Self {
        Self { kind, target: target.into(), summary: None }
    }

    /// Says in a few words what was done.
    #[must_use]
    pub fn summary(mut self, text: impl Into<String>) -> Self {
        self.summary = Some(text.into());
        self
    }
}

/// What was done to the target of a [`Change`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ChangeKind {
    /// It was made.
    Created,
    /// It was changed.
    Modified,
    /// It was removed.
    Deleted,
    /// Anything else, such as a message sent.
    Other,
}

/// A [`Change`] with the call that made it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RecordedChange {
    /// The tool that made it.
    pub tool: ToolName,
    /// The call, as in its trace.
    pub call_id: u64,
    /// What it did.
    #[serde(flatten)]
    pub change: Change,
}
