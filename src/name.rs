//! Names of tools: one parser, and the encoding that model providers accept.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The namespace of a name that states none.
pub const DEFAULT_NAMESPACE: &str = "local";

/// The longest name, in bytes, as written with its server and namespace.
const MAX_NAME: usize = 255;
/// The longest name that model providers accept.
const MAX_PROVIDER_NAME: usize = 64;
/// What is left of a name before the digest that ends a cut one: `_` and 16 hexadecimal digits.
const CUT_PROVIDER_NAME: usize = MAX_PROVIDER_NAME - 17;

/// The name of a tool: `[[server:]namespace/]name`.
///
/// Each part starts with a letter, then come letters, digits, `_`, `-` and `.`; a name without a
/// namespace is in `local`. A clone is cheap. The text form is the canonical one, and two names are
/// equal when their texts are.
///
/// # Examples
///
/// ```
/// use toolscope::ToolName;
///
/// let name: ToolName = "word-count".parse()?;
/// assert_eq!(name.as_str(), "local/word-count");
/// let name: ToolName = "dev:files/read_file".parse()?;
/// assert_eq!((name.server(), name.namespace(), name.name()), (Some("dev"), "files", "read_file"));
/// # Ok::<(), toolscope::InvalidToolName>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ToolName(Arc<str>);

impl ToolName {
    /// Parses a name; a bare one lands in `local`.
    ///
    /// # Errors
    ///
    /// [`InvalidToolName`] says which part is wrong and what would be right.
    pub fn parse(text: &str) -> Result<Self, InvalidToolName> {
        let invalid =
            |problem: String| InvalidToolName { text: text.chars().take(80).collect(), problem };
        if text.len() > MAX_NAME {
            return Err(invalid(format!(
                "it has {} bytes, at most {MAX_NAME} are allowed",
                text.len()
            )));
        }
        let (path, name) = match text.split_once('/') {
            Some((path, name)) => (Some(path), name),
            None => (None, text),
        };
        let (server, namespace) = match path.and_then(|path| path.split_once(':')) {
            Some((server, namespace)) => (Some(server), Some(namespace)),
            None => (None, path),
        };
        for (part, which) in [(server, "server"), (namespace, "namespace"), (Some(name), "name")] {
            if let Some(problem) = part.and_then(problem_of) {
                return Err(invalid(format!("the {which} {problem}")));
            }
        }
        let canonical: Arc<str> =
            if path.is_some() { text.into() } else { format!("{DEFAULT_NAMESPACE}/{name}").into() };
        if canonical.len() > MAX_NAME {
            return Err(invalid(format!(
                "it has {} bytes with its namespace, at most {MAX_NAME} are allowed",
                canonical.len()
            )));
        }
        Ok(Self(canonical))
    }

    /// The canonical text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The server, where the name states one.
    pub fn server(&self) -> Option<&str> {
        self.path().split_once(':').map(|(server, _)| server)
    }

    /// The namespace.
    pub fn namespace(&self) -> &str {
        self.path().split_once(':').map_or(self.path(), |(_, namespace)| namespace)
    }

    /// The last part: what the tool is called within its namespace.
    pub fn name(&self) -> &str {
        self.0.split_once('/').map_or(&self.0, |(_, name)| name)
    }

    fn path(&self) -> &str {
        self.0.split_once('/').map_or("", |(path, _)| path)
    }

    /// The name as model providers accept it: `^[a-zA-Z0-9_-]{1,64}$`.
    ///
    /// Two names never share an encoding that was not cut. `/` becomes `__`, `.` becomes `__1`, `:`
    /// becomes `__2`; an `_` that would be read as one of these becomes `__0`. What is longer than
    /// 64 characters is cut and ends in a digest of the whole; only the registry can tell what such
    /// a name stood for.
    ///
    /// # Examples
    ///
    /// ```
    /// use toolscope::ToolName;
    ///
    /// let name: ToolName = "files/read_file".parse()?;
    /// assert_eq!(name.provider_safe(), "files__read_file");
    /// assert_eq!(ToolName::from_provider_safe("files__read_file"), Some(name));
    /// # Ok::<(), toolscope::InvalidToolName>(())
    /// ```
    pub fn provider_safe(&self) -> String {
        let mut encoded = String::with_capacity(self.0.len() + 8);
        let mut rest = self.0.chars().peekable();
        while let Some(c) = rest.next() {
            match c {
                '/' => encoded.push_str("__"),
                '.' => encoded.push_str("__1"),
                ':' => encoded.push_str("__2"),
                '_' if encoded.ends_with('_')
                    || matches!(rest.peek(), Some('_' | '.' | '/' | ':')) =>
                {
                    encoded.push_str("__0");
                }
                c => encoded.push(c),
            }
        }
        if encoded.len() > MAX_PROVIDER_NAME {
            encoded.truncate(CUT_PROVIDER_NAME);
            encoded = format!("{encoded}_{:016x}", digest(&self.0));
        }
        encoded
    }

    /// Reads an encoding that was not cut; `None` for anything that
    /// [`provider_safe`](Self::provider_safe) never makes.
    pub fn from_provider_safe(encoded: &str) -> Option<Self> {
        let mut text = String::with_capacity(encoded.len());
        let mut rest = encoded;
        while let Some(at) = rest.find("__") {
            text.push_str(&rest[..at]);
            rest = &rest[at + 2..];
            let (plain, taken) = match rest.bytes().next()? {
                b'0' => ('_', 1),
                b'1' => ('.', 1),
                b'2' => (':', 1),
                _ => ('/', 0),
            };
            text.push(plain);
            rest = &rest[taken..];
        }
        text.push_str(rest);
        let name = Self::parse(&text).ok()?;
        (name.as_str() == text && name.provider_safe() == encoded).then_some(name)
    }
}

/// What is wrong with one part of a name, as the end of a sentence.
fn problem_of(part: &str) -> Option<String> {
    let Some(first) = part.chars().next() else {
        return Some("is empty".into());
    };
    if !first.is_ascii_alphabetic() {
        return Some(format!("starts with {first:?}, a letter is needed"));
    }
    let odd =
        part.chars().find(|c| !(c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.')))?;
    Some(format!("has {odd:?}, only letters, digits, `_`, `-` and `.` are allowed"))
}

/// FNV-1a, 64 bits: the same on every machine and in every version, which a standard hasher does
/// not promise.
fn digest(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

impl fmt::Display for ToolName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for ToolName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ToolName({})", self.0)
    }
}

impl AsRef<str> for ToolName {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl FromStr for ToolName {
    type Err = InvalidToolName;

    fn from_str(text: &str) -> Result<Self, InvalidToolName> {
        Self::parse(text)
    }
}

impl Serialize for ToolName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for ToolName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Cow::<'de, str>::deserialize(deserializer)?;
        Self::parse(&text).map_err(serde::de::Error::custom)
    }
}

/// A text that is no name of a tool.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no tool name: {problem}; the form is `[[server:]namespace/]name`")]
pub struct InvalidToolName {
    text: String,
    problem: String,
}
