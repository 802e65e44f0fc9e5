//! The tools of a runtime, and the snapshots of them that plans pin.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use serde::Serialize;
use tokio::sync::Semaphore;

use crate::approval::{Fingerprint, definition_digest};
use crate::contain::{Foreign, contain};
use crate::descriptor::{ToolDescriptor, ToolFilter};
use crate::error::{ToolError, ToolRuntimeError};
use crate::name::{DEFAULT_NAMESPACE, ToolName};
use crate::schema::{Schema, SchemaPool, distance};
use crate::sync::atomic::{AtomicBool, Ordering::SeqCst};
use crate::sync::{Mutex, lock};
use crate::throttle::ActivationLimit;
use crate::tool::{Tool, ToolInstance};

/// A registered tool, with what the path of a call needs at hand.
pub(crate) struct ToolEntry {
    /// The name's, for as long as the registry lives.
    pub(crate) id: u32,
    /// Counts definitions under that name.
    pub(crate) version: u32,
    pub(crate) descriptor: ToolDescriptor,
    pub(crate) tool: Foreign<Arc<dyn Tool>>,
    pub(crate) immediate: Option<Foreign<Arc<dyn ToolInstance>>>,
    pub(crate) input: Option<Schema>,
    pub(crate) output: Option<Schema>,
    pub(crate) permits: Option<Arc<Semaphore>>,
    pub(crate) off_thread: bool,
    pub(crate) source: Option<Arc<Source>>,
    digest: OnceLock<Fingerprint>,
}

impl ToolEntry {
    /// What the tool is, in 32 bytes.
    pub(crate) fn digest(&self) -> &Fingerprint {
        self.digest.get_or_init(|| definition_digest(&self.descriptor))
    }

    /// Whether it is defined as another of that name. A definition that came back has another
    /// version and the same digest.
    fn is_same(&self, other: &Self) -> bool {
        self.version == other.version || self.digest() == other.digest()
    }

    /// Where it comes from, for an error.
    fn origin(&self) -> String {
        origin(self.source.as_deref(), &self.descriptor)
    }
}

/// Where a set of tools comes from.
pub(crate) struct Source {
    name: Box<str>,
    activations: Mutex<Option<Arc<ActivationLimit>>>,
}

impl Source {
    /// The limit of activations at once.
    pub(crate) fn activations(&self) -> Option<Arc<ActivationLimit>> {
        lock(&self.activations).clone()
    }
}

fn origin(source: Option<&Source>, descriptor: &ToolDescriptor) -> String {
    let kind = descriptor.source;
    match source {
        Some(source) => format!("the source `{}` ({kind:?})", source.name),
        None => format!("a source of the kind {kind:?}"),
    }
}

/// The registered tools at one moment. A plan pins one when it begins, so its tools never change
/// under it.
#[derive(Clone, Default)]
pub struct Snapshot {
    /// Counts the changes of its registry.
    serial: u64,
    /// By id, which is the order in which their names were first registered.
    tools: Vec<Arc<ToolEntry>>,
    /// Every text that stands for a tool: its name, its name without `local/`, its provider-safe
    /// name.
    names: HashMap<Arc<str>, Arc<ToolEntry>, foldhash::fast::RandomState>,
}

impl Snapshot {
    /// What the registered tools say of themselves, in the order of registration.
    pub fn descriptors(&self) -> impl Iterator<Item = &ToolDescriptor> {
        self.tools.iter().map(|tool| &tool.descriptor)
    }

    /// The descriptor of a tool, by any text that
    /// [`PlanHandle::execute`](crate::PlanHandle::execute) takes.
    pub fn get(&self, name: &str) -> Option<&ToolDescriptor> {
        self.find(name).map(|tool| &tool.descriptor)
    }

    pub(crate) fn by_id(&self, id: u32) -> Option<&ToolEntry> {
        by_id(&self.tools, id)
    }

    /// The tool that a text stands for.
    #[inline]
    pub(crate) fn find(&self, name: &str) -> Option<&Arc<ToolEntry>> {
        self.names.get(name)
    }

    /// Whether the snapshot is older than another of the same registry.
    fn is_before(&self, other: &Self) -> bool {
        self.serial < other.serial
    }

    fn insert(&mut self, entry: &Arc<ToolEntry>) {
        for text in texts(&entry.descriptor.name) {
            self.names.insert(text, Arc::clone(entry));
        }
        let at = self.tools.partition_point(|tool| tool.id < entry.id);
        self.tools.insert(at, Arc::clone(entry));
    }

    fn remove(&mut self, entry: &ToolEntry) {
        for text in texts(&entry.descriptor.name) {
            self.names.remove(&text);
        }
        self.tools.retain(|tool| tool.id != entry.id);
    }

    /// Suggests what is nearest, of the tools that the asker may know of.
    pub(crate) fn not_found(
        &self,
        name: &str,
        may_know: impl Fn(&ToolDescriptor) -> bool,
    ) -> ToolRuntimeError {
        let name: String = name.chars().take(256).collect();
        // A model misspells what it was told: the provider-safe name.
        let readings = [ToolName::from_provider_safe(&name), ToolName::parse(&name).ok()];
        let mut readings: Vec<_> = readings.iter().flatten().map(ToolName::as_str).collect();
        if readings.is_empty() {
            readings.push(&name);
        }
        let far_from = |known: &str| {
            let far = |asked: &&str| {
                let most = known.len().max(asked.len()) / 3;
                // Most names are told apart by their length.
                let alike = known.len().abs_diff(asked.len()) <= most;
                alike.then(|| distance(asked, known)).filter(|far| *far <= most)
            };
            readings.iter().filter_map(far).min()
        };
        let known = self.tools.iter().map(|tool| &tool.descriptor);
        let names = known.filter(|tool| may_know(tool)).map(|tool| &tool.name);
        let mut near: Vec<_> =
            names.filter_map(|known| Some((far_from(known.as_str())?, known))).collect();
        near.sort();
        let nearest = near.into_iter().take(3).map(|(_, name)| name.clone()).collect();
        ToolRuntimeError::NotFound { name, nearest }
    }
}

/// Of tools in the order of their ids.
fn by_id(tools: &[Arc<ToolEntry>], id: u32) -> Option<&ToolEntry> {
    tools.binary_search_by_key(&id, |tool| tool.id).ok().map(|at| &*tools[at])
}

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.tools.iter().map(|tool| &tool.descriptor.name)).finish()
    }
}

/// What became different from one set of tools to another, each in the order of registration.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ToolChanges {
    /// Tools that were not there.
    pub added: Vec<ToolName>,
    /// Tools that are no longer there.
    pub removed: Vec<ToolName>,
    /// Tools whose definition is another.
    pub changed: Vec<ToolName>,
}

impl ToolChanges {
    /// Whether nothing is different.
    pub fn is_empty(&self) -> bool {
        self.added.is_empty() && self.removed.is_empty() && self.changed.is_empty()
    }

    /// From one set of tools to another, both in the order of their ids.
    fn between(before: &[Arc<ToolEntry>], after: &[Arc<ToolEntry>]) -> Self {
        let mut changes = Self::default();
        for tool in after {
            let name = || tool.descriptor.name.clone();
            match by_id(before, tool.id) {
                None => changes.added.push(name()),
                Some(before) if !before.is_same(tool) => changes.changed.push(name()),
                Some(_) => {}
            }
        }
        let gone = before.iter().filter(|tool| by_id(after, tool.id).is_none());
        changes.removed = gone.map(|tool| tool.descriptor.name.clone()).collect();
        changes
    }
}

// ===== Pinned =====

/// The snapshots that a plan has pinned, the first one first. It only ever grows, so that a call
/// can borrow a tool across an await without a count.
pub(crate) struct Pinned {
    snapshot: Arc<Snapshot>,
    later: OnceLock<Box<Pinned>>,
}

impl Pinned {
    pub(crate) fn new(snapshot: Arc<Snapshot>) -> Self {
        Self { snapshot, later: OnceLock::new() }
    }

    /// The snapshot that the plan goes by.
    pub(crate) fn latest(&self) -> &Arc<Snapshot> {
        let mut pinned = self;
        while let Some(later) = pinned.later.get() {
            pinned = later;
        }
        &pinned.snapshot
    }

    /// All that were pinned, the first one first. A loop and no recursion, here and in the drop:
    /// a plan may live long.
    fn all(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |pinned| pinned.later.get().map(|later| &**later))
    }

    /// A tool by its id, also one that the latest snapshot does not have any more.
    pub(crate) fn by_id(&self, id: u32) -> Option<&ToolEntry> {
        self.all().filter_map(|pinned| pinned.snapshot.by_id(id)).last()
    }

    /// Whether a tool is defined as that version of it, which was pinned too.
    pub(crate) fn is_version(&self, tool: &ToolEntry, version: u32) -> bool {
        let mut were = self.all().filter_map(|pinned| pinned.snapshot.by_id(tool.id));
        were.any(|was| was.version == version && was.is_same(tool))
    }

    /// What a text stood for before the latest snapshot, the newest first.
    pub(crate) fn former<'a>(&'a self, name: &str) -> Vec<&'a Arc<ToolEntry>> {
        let mut former = Vec::new();
        let mut pinned = self;
        while let Some(later) = pinned.later.get() {
            former.extend(pinned.snapshot.names.get(name));
            pinned = later;
        }
        former.reverse();
        former
    }

    /// Goes by a later snapshot from now on, and says what is different. An older one changes
    /// nothing.
    pub(crate) fn advance(&self, to: &Arc<Snapshot>) -> ToolChanges {
        let mut pinned = self;
        loop {
            while let Some(later) = pinned.later.get() {
                pinned = later;
            }
            if !pinned.snapshot.is_before(to) {
                return ToolChanges::default();
            }
            if pinned.later.set(Box::new(Self::new(Arc::clone(to)))).is_ok() {
                return ToolChanges::between(&pinned.snapshot.tools, &to.tools);
            }
        }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let mut later = self.later.take();
        while let Some(mut pinned) = later {
            later = pinned.later.take();
        }
    }
}

// ===== ToolRegistry =====

/// The tools of a runtime. Reading takes no lock; what is registered later is seen by plans that
/// begin later, or that [`sync_tools`](crate::PlanHandle::sync_tools).
///
/// # Examples
///
/// ```
/// use toolscope::{ToolFilter, ToolRuntime, ToolSpec};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), toolscope::ToolError> {
/// let runtime = ToolRuntime::builder().build().await?;
/// let registry = runtime.registry();
/// let tool = ToolSpec::new("local/version").read_only().function(|()| Ok("1.2.0"));
/// registry.register(tool)?;
/// assert!(registry.get("version").is_some());
/// assert_eq!(registry.list_tools(&ToolFilter::new().namespace("local")).len(), 1);
/// assert!(registry.remove("version"));
/// # Ok(()) }
/// ```
#[derive(Default)]
pub struct ToolRegistry {
    current: ArcSwap<Snapshot>,
    /// What is being made is ahead of `current`. Many registrations in a row make one snapshot.
    ahead: AtomicBool,
    making: Mutex<Making>,
    /// A lock of its own: to compile takes its time, and to begin a plan must not.
    schemas: Mutex<SchemaPool>,
}

#[derive(Default)]
struct Making {
    snapshot: Arc<Snapshot>,
    next_id: u32,
    /// The names that were registered once: what they were, should they come again.
    former: HashMap<ToolName, Former>,
    sources: HashMap<Box<str>, Arc<Source>>,
}

/// A tool that was registered once.
struct Former {
    id: u32,
    version: u32,
    digest: Fingerprint,
    /// Calls of it may still run.
    permits: Option<Arc<Semaphore>>,
}

impl ToolRegistry {
    /// Adds a tool.
    ///
    /// # Errors
    ///
    /// A `RegistrationError` when the name is no name or taken, when the provider-safe name
    /// clashes, when a schema is none, when the capability contradicts itself, or when the tool
    /// panics as it is asked. Nothing is registered then.
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

    /// Adds all or none.
    ///
    /// # Errors
    ///
    /// As [`register`](Self::register): of the first tool that cannot be taken.
    pub fn register_all(&self, tools: Vec<Arc<dyn Tool>>) -> Result<(), ToolError> {
        self.change(None, tools).map(|_| ())
    }

    /// Replaces all tools of a source, in one step: whoever reads sees the old set or the new one.
    /// A tool whose definition is the same keeps what is active of it in running plans.
    ///
    /// # Errors
    ///
    /// As [`register`](Self::register). The old set stays then.
    pub fn replace_source(
        &self,
        source: &str,
        tools: Vec<Arc<dyn Tool>>,
    ) -> Result<ToolChanges, ToolError> {
        self.change(Some(source), tools)
    }

    /// Limits how many activations of a source's tools run at once, over all plans; the others wait
    /// for at most the plan's [`permit_wait`](crate::PlanOptions::permit_wait). No limit by
    /// default; 0 is taken as 1.
    pub fn limit_activations(&self, source: &str, at_once: usize) {
        let source = lock(&self.making).source(source);
        let at_once = at_once.clamp(1, Semaphore::MAX_PERMITS);
        let known = {
            let mut limit = lock(&source.activations);
            let known = limit.clone();
            limit.get_or_insert_with(|| ActivationLimit::new(at_once));
            known
        };
        if let Some(limit) = known {
            limit.set(at_once);
        }
    }

    fn change(
        &self,
        source: Option<&str>,
        tools: Vec<Arc<dyn Tool>>,
    ) -> Result<ToolChanges, ToolError> {
        let asked = tools.into_iter().map(ask).collect::<Result<Vec<_>, _>>()?;
        let compiled = asked.iter().map(|asked| compile(asked, &self.schemas));
        let compiled = compiled.collect::<Result<Vec<_>, _>>()?;
        // Declared before the guard, so that what is not taken, or replaced, is dropped after it:
        // its destructor is the tool's.
        let entries: Vec<_>;
        let mut replaced = Vec::new();
        let mut making = lock(&self.making);
        let source = source.map(|name| making.source(name));
        if let Some(source) = &source {
            replaced = making.of_source(source);
        }
        entries = asked
            .into_iter()
            .zip(compiled)
            .zip(making.next_id..)
            .map(|((asked, schemas), id)| {
                Arc::new(making.entry(asked, schemas, source.as_ref(), id))
            })
            .collect();
        making.check_names(&entries, &replaced)?;
        let changes = making.replace(&replaced, &entries);
        self.ahead.store(true, SeqCst);
        drop(making);
        Ok(changes)
    }

    /// The descriptor of a tool.
    pub fn get(&self, name: &str) -> Option<ToolDescriptor> {
        self.snapshot().get(name).cloned()
    }

    /// The descriptors of the tools that the filter fits, in the order of registration.
    pub fn list_tools(&self, filter: &ToolFilter) -> Vec<ToolDescriptor> {
        let snapshot = self.snapshot();
        snapshot.descriptors().filter(|tool| filter.fits(tool)).cloned().collect()
    }

    /// Removes a tool; false if there is none. Plans that began before keep it.
    pub fn remove(&self, name: &str) -> bool {
        let removed;
        let mut making = lock(&self.making);
        removed = making.snapshot.find(name).cloned();
        let Some(entry) = &removed else { return false };
        making.replace(std::slice::from_ref(entry), &[]);
        self.ahead.store(true, SeqCst);
        drop(making);
        true
    }

    /// All tools as they are now.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        if self.ahead.load(SeqCst) {
            let old;
            let making = lock(&self.making);
            // The last snapshot that holds a removed tool drops it, with its destructor, below.
            old = self.current.swap(Arc::clone(&making.snapshot));
            self.ahead.store(false, SeqCst);
            drop(making);
            drop(old);
        }
        self.current.load_full()
    }
}

impl Making {
    fn source(&mut self, name: &str) -> Arc<Source> {
        let made = || Arc::new(Source { name: name.into(), activations: Mutex::new(None) });
        Arc::clone(self.sources.entry(name.into()).or_insert_with(made))
    }

    fn of_source(&self, source: &Arc<Source>) -> Vec<Arc<ToolEntry>> {
        let is_of = |tool: &&Arc<ToolEntry>| {
            tool.source.as_ref().is_some_and(|own| Arc::ptr_eq(own, source))
        };
        self.snapshot.tools.iter().filter(is_of).cloned().collect()
    }

    /// Makes an entry. A name that was registered before keeps its id, and its version while the
    /// definition is the same; another has the id that is given.
    fn entry(
        &self,
        asked: Asked,
        [input, output]: [Option<Schema>; 2],
        source: Option<&Arc<Source>>,
        id: u32,
    ) -> ToolEntry {
        let Asked { descriptor, tool, immediate, off_thread } = asked;
        let limit = descriptor.max_concurrent.map(|limit| limit.min(Semaphore::MAX_PERMITS));
        let mut entry = ToolEntry {
            id,
            version: 1,
            tool,
            immediate,
            input,
            output,
            permits: limit.map(|limit| Arc::new(Semaphore::new(limit))),
            off_thread,
            source: source.map(Arc::clone),
            digest: OnceLock::new(),
            descriptor,
        };
        let registered = self.snapshot.names.get(entry.descriptor.name.as_str());
        if let Some(before) = registered {
            entry.id = before.id;
            entry.version = before.version + u32::from(before.descriptor != entry.descriptor);
            if before.version == entry.version {
                entry.permits.clone_from(&before.permits);
            }
        } else if let Some(former) = self.former.get(&entry.descriptor.name) {
            entry.id = former.id;
            entry.version = former.version + u32::from(former.digest != *entry.digest());
            if former.version == entry.version {
                entry.permits.clone_from(&former.permits);
            }
        }
        entry
    }

    /// Whether each text would stand for one tool.
    fn check_names(
        &self,
        entries: &[Arc<ToolEntry>],
        replaced: &[Arc<ToolEntry>],
    ) -> Result<(), ToolError> {
        let replaced: HashSet<u32> = replaced.iter().map(|tool| tool.id).collect();
        let mut taken: HashMap<Arc<str>, &Arc<ToolEntry>> = HashMap::new();
        for entry in entries {
            for text in texts(&entry.descriptor.name) {
                let known = self.snapshot.names.get(&text);
                let other = known.filter(|known| !replaced.contains(&known.id));
                if let Some(other) = other.or_else(|| taken.get(&text).copied()) {
                    let name = entry.descriptor.name.as_str();
                    let details = format!(
                        "`{text}` already stands for `{}` of {}; this one is of {}",
                        other.descriptor.name,
                        other.origin(),
                        entry.origin()
                    );
                    return Err(ToolError::registration(name, details));
                }
                taken.insert(text, entry);
            }
        }
        Ok(())
    }

    fn replace(&mut self, old: &[Arc<ToolEntry>], new: &[Arc<ToolEntry>]) -> ToolChanges {
        let mut in_order = new.to_vec();
        in_order.sort_unstable_by_key(|tool| tool.id);
        let changes = ToolChanges::between(old, &in_order);
        // Copied only where somebody holds it: a snapshot that was given away.
        let snapshot = Arc::make_mut(&mut self.snapshot);
        snapshot.serial += 1;
        for entry in old {
            snapshot.remove(entry);
        }
        for entry in new {
            snapshot.insert(entry);
            self.former.remove(&entry.descriptor.name);
            self.next_id = self.next_id.max(entry.id + 1);
        }
        for entry in old.iter().filter(|entry| snapshot.by_id(entry.id).is_none()) {
            let was = Former {
                id: entry.id,
                version: entry.version,
                digest: *entry.digest(),
                permits: entry.permits.clone(),
            };
            self.former.insert(entry.descriptor.name.clone(), was);
        }
        changes
    }
}

impl fmt::Debug for ToolRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ToolRegistry").field(&*self.snapshot()).finish()
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

/// The schemas of the input and the output.
fn compile(asked: &Asked, pool: &Mutex<SchemaPool>) -> Result<[Option<Schema>; 2], ToolError> {
    let descriptor = &asked.descriptor;
    let compile = |schema: &Option<_>, which: &str| {
        let Some(schema) = schema else { return Ok(None) };
        let compiled = lock(pool).compile(schema, descriptor.check_formats);
        compiled.map(Some).map_err(|invalid| {
            let details = format!("its {which} schema: {invalid}");
            ToolError::registration(descriptor.name.as_str(), details)
        })
    };
    Ok([compile(&descriptor.input_schema, "input")?, compile(&descriptor.output_schema, "output")?])
}

/// Every text that stands for a name, each once.
pub(crate) fn texts(name: &ToolName) -> Vec<Arc<str>> {
    let mut texts: Vec<Arc<str>> = vec![name.as_str().into(), name.provider_safe().into()];
    if name.server().is_none() && name.namespace() == DEFAULT_NAMESPACE {
        texts.push(name.name().into());
    }
    texts
}
