//! The tools of a runtime, and the snapshots of them that plans pin.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio::sync::Semaphore;

use crate::contain::{Foreign, contain};
use crate::descriptor::ToolDescriptor;
use crate::error::{ToolError, ToolRuntimeError};
use crate::name::{DEFAULT_NAMESPACE, ToolName};
use crate::sync::{Mutex, lock};
use crate::tool::{Tool, ToolInstance};

/// A registered tool, with what the path of a call needs at hand.
pub(crate) struct ToolEntry {
    pub(crate) id: u32,
    pub(crate) descriptor: ToolDescriptor,
    pub(crate) tool: Foreign<Arc<dyn Tool>>,
    pub(crate) immediate: Option<Foreign<Arc<dyn ToolInstance>>>,
    pub(crate) permits: Option<Semaphore>,
    pub(crate) off_thread: bool,
}

/// The registered tools at one moment. A plan pins one when it begins, so its tools never change
/// under it.
#[derive(Clone, Default)]
pub struct Snapshot {
    /// In the order of registration; ids ascend.
    tools: Vec<Arc<ToolEntry>>,
    /// Every text that stands for a tool: its name, its name without `local/`, its provider-safe
    /// name.
    names: HashMap<Box<str>, Arc<ToolEntry>, foldhash::fast::RandomState>,
}

impl Snapshot {
    /// What the registered tools say of themselves, in the order of registration.
    pub fn descriptors(&self) -> impl Iterator<Item = &ToolDescriptor> {
        self.tools.iter().map(|tool| &tool.descriptor)
    }

    /// The descriptor of a tool, by any text that
    /// [`PlanHandle::execute`](crate::PlanHandle::execute) takes.
    pub fn get(&self, name: &str) -> Option<&ToolDescriptor> {
        self.resolve(name).ok().map(|tool| &tool.descriptor)
    }

    pub(crate) fn by_id(&self, id: u32) -> Option<&ToolEntry> {
        self.tools.binary_search_by_key(&id, |tool| tool.id).ok().map(|at| &*self.tools[at])
    }

    /// The tool that a text stands for.
    pub(crate) fn resolve(&self, name: &str) -> Result<&Arc<ToolEntry>, ToolRuntimeError> {
        self.names.get(name).ok_or_else(|| self.not_found(name))
    }

    fn add(&mut self, entry: &Arc<ToolEntry>) -> Result<(), ToolError> {
        let name = &entry.descriptor.name;
        for text in texts(name) {
            if let Some(taken) = self.names.get(&*text) {
                let (other, kind, own) =
                    (&taken.descriptor.name, taken.descriptor.source, entry.descriptor.source);
                let details = format!(
                    "`{text}` already stands for `{other}`, of the source {kind:?}; this one is of {own:?}"
                );
                return Err(ToolError::registration(name.as_str(), details));
            }
            self.names.insert(text, Arc::clone(entry));
        }
        self.tools.push(Arc::clone(entry));
        Ok(())
    }

    fn not_found(&self, name: &str) -> ToolRuntimeError {
        let name: String = name.chars().take(256).collect();
        let asked = ToolName::parse(&name).map_or_else(|_| name.clone(), |name| name.to_string());
        let mut near: Vec<_> = self
            .tools
            .iter()
            .map(|tool| &tool.descriptor.name)
            .map(|known| (distance(&asked, known.as_str()), known))
            .filter(|(distance, known)| *distance <= known.as_str().len().max(asked.len()) / 3)
            .collect();
        near.sort();
        let nearest = near.into_iter().take(3).map(|(_, name)| name.clone()).collect();
        ToolRuntimeError::NotFound { name, nearest }
    }
}

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.tools.iter().map(|tool| &tool.descriptor.name)).finish()
    }
}

/// The edit distance of two texts.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.iter().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, to) in b.iter().enumerate() {
            let changed = diagonal + usize::from(from != to);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// The tools of a runtime. Reading takes no lock; what is registered later is seen by plans that
/// begin later.
///
/// # Examples
///
/// ```
/// use toolscope::{ToolRuntime, ToolSpec};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), toolscope::ToolError> {
/// let runtime = ToolRuntime::builder().build().await?;
/// let tool = ToolSpec::new("local/version").read_only().function(|()| Ok("1.2.0"));
/// runtime.registry().register(tool)?;
/// assert!(runtime.registry().get("version").is_some());
/// # Ok(()) }
/// ```
#[derive(Default)]
pub struct ToolRegistry {
    current: ArcSwap<Snapshot>,
    /// Held by whoever makes the next snapshot: the id that comes next.
    next: Mutex<u32>,
}

impl ToolRegistry {
    /// Adds a tool.
    ///
    /// # Errors
    ///
    /// A `RegistrationError` when the name is no name or taken, when the provider-safe name
    /// clashes, when the capability contradicts itself, or when the tool panics as it is asked.
    /// Nothing is registered then.
    pub fn register(&self, tool: impl Tool) -> Result<(), ToolError> {
        self.register_arc(Arc::new(tool))
    }

    /// As [`register`](Self::register), for a tool that is shared already.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn register_arc(&self, tool: Arc<dyn Tool>) -> Result<(), ToolError> {
        self.register_all(vec![tool])
    }

    /// Adds all or none: one new snapshot.
    pub(crate) fn register_all(&self, tools: Vec<Arc<dyn Tool>>) -> Result<(), ToolError> {
        let asked = tools.into_iter().map(ask).collect::<Result<Vec<_>, _>>()?;
        // Declared before the guard, so that a tool that is not taken is dropped after it.
        let entries: Vec<_>;
        let mut snapshot;
        let mut next = lock(&self.next);
        entries = asked
            .into_iter()
            .zip(*next..)
            .map(|(asked, id)| Arc::new(asked.into_entry(id)))
            .collect();
        snapshot = Snapshot::clone(&self.current.load());
        for entry in &entries {
            snapshot.add(entry)?;
            *next = entry.id + 1;
        }
        self.current.store(Arc::new(snapshot));
        drop(next);
        Ok(())
    }

    /// The descriptor of a tool.
    pub fn get(&self, name: &str) -> Option<ToolDescriptor> {
        self.current.load().get(name).cloned()
    }

    /// All tools as they are now.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.current.load_full()
    }
}

impl fmt::Debug for ToolRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ToolRegistry").field(&*self.current.load()).finish()
    }
}

/// What a tool said of itself.
struct Asked {
    descriptor: ToolDescriptor,
    tool: Foreign<Arc<dyn Tool>>,
    immediate: Option<Foreign<Arc<dyn ToolInstance>>>,
    off_thread: bool,
}

/// Asks a tool what it is, once, and checks the answer.
fn ask(tool: Arc<dyn Tool>) -> Result<Asked, ToolError> {
    let tool = Foreign::new(tool);
    let asked = contain(|| (tool.descriptor().clone(), tool.immediate(), tool.off_thread()));
    let (descriptor, immediate, off_thread) = asked.map_err(|text| {
        ToolError::registration("?", format!("the tool panicked when it was asked: {text}"))
    })?;
    let immediate = immediate.map(Foreign::new);
    let name = descriptor.name.as_str();
    if let Some(problem) = descriptor.capability.contradiction() {
        return Err(ToolError::registration(name, problem));
    }
    if descriptor.max_concurrent == Some(0) {
        let details = "`max_concurrent` is 0, so no call could ever run; leave it out or set 1";
        return Err(ToolError::registration(name, details));
    }
    Ok(Asked { descriptor, tool, immediate, off_thread })
}

impl Asked {
    fn into_entry(self, id: u32) -> ToolEntry {
        let Self { descriptor, tool, immediate, off_thread } = self;
        let limit = descriptor.max_concurrent.map(|limit| limit.min(Semaphore::MAX_PERMITS));
        ToolEntry {
            id,
            descriptor,
            tool,
            immediate,
            permits: limit.map(Semaphore::new),
            off_thread,
        }
    }
}

/// Every text that stands for a name, each once.
fn texts(name: &ToolName) -> Vec<Box<str>> {
    let mut texts: Vec<Box<str>> = vec![name.as_str().into(), name.provider_safe().into()];
    if name.server().is_none() && name.namespace() == DEFAULT_NAMESPACE {
        texts.push(name.name().into());
    }
    texts
}
