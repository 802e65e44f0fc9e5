//! The registry, and the snapshots of it that plans pin.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Barrier, Weak};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use serde_json::{Value, json};
use toolscope::test_util::Probe;
use toolscope::{
    ActivationContext, CallError, FunctionTool, PlanOptions, Snapshot, SourceKind, Tool,
    ToolCapability, ToolChanges, ToolDescriptor, ToolError, ToolFailure, ToolFilter, ToolInstance,
    ToolName, ToolRegistry, ToolRuntime, ToolRuntimeError, ToolSpec, ToolType, async_trait,
};

use crate::name::name;
use crate::support::{Fixture, paused};

pub(crate) fn tool(name: &str) -> FunctionTool {
    ToolSpec::new(name).function(|args: Value| Ok(args))
}

pub(crate) fn registry(names: &[&str]) -> ToolRegistry {
    let registry = ToolRegistry::default();
    for name in names {
        registry.register(tool(name)).unwrap();
    }
    registry
}

/// A tool that is what its descriptor says, and cannot be activated.
pub(crate) struct Described(pub(crate) ToolDescriptor);

#[async_trait]
impl Tool for Described {
    fn descriptor(&self) -> &ToolDescriptor {
        &self.0
    }

    async fn activate(&self, _: &ActivationContext) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        Err(ToolFailure::failed("it is a description and nothing else"))
    }
}

pub(crate) fn described(name_of_it: &str, description: &str) -> Arc<dyn Tool> {
    Arc::new(Described(ToolDescriptor::new(name(name_of_it)).description(description)))
}

fn tools(names: &[&str]) -> Vec<Arc<dyn Tool>> {
    names.iter().map(|name| described(name, "")).collect()
}

pub(crate) fn names(snapshot: &Snapshot) -> Vec<&str> {
    snapshot.descriptors().map(|tool| tool.name.as_str()).collect()
}

/// What is added, removed and changed.
pub(crate) fn told(changes: &ToolChanges) -> [Vec<&str>; 3] {
    [&changes.added, &changes.removed, &changes.changed]
        .map(|names| names.iter().map(ToolName::as_str).collect())
}

// ===== the registry =====

#[test]
fn a_tool_is_found_by_three_texts() {
    let registry = registry(&["read_file"]);
    for text in ["local/read_file", "read_file", "local__read_file"] {
        assert_eq!(registry.get(text).unwrap().name, name("read_file"));
    }
    assert!(registry.get("files/read_file").is_none());
}

#[test]
fn a_tool_of_another_namespace_has_no_bare_name() {
    let registry = registry(&["files/read"]);
    assert!(registry.get("files/read").is_some());
    assert!(registry.get("files__read").is_some());
    assert!(registry.get("read").is_none());
}

#[test]
fn a_snapshot_has_the_tools_in_the_order_of_their_registration() {
    let registry = registry(&["z/one", "a/two", "three"]);
    let snapshot = registry.snapshot();
    let names: Vec<_> = snapshot.descriptors().map(|tool| tool.name.as_str()).collect();
    assert_eq!(names, ["z/one", "a/two", "local/three"]);
}

#[test]
fn a_snapshot_stays_as_it_is() {
    let registry = registry(&["one"]);
    let snapshot = registry.snapshot();
    registry.register(tool("two")).unwrap();
    assert_eq!(snapshot.descriptors().count(), 1);
    assert_eq!(registry.snapshot().descriptors().count(), 2);
}

#[test]
fn a_name_is_registered_once() {
    let registry = registry(&["files/read"]);
    let error = registry.register(tool("files/read")).unwrap_err();
    assert_eq!(
        (error.error_type.as_str(), error.tool_name.as_str()),
        ("RegistrationError", "files/read")
    );
    assert_eq!(registry.snapshot().descriptors().count(), 1);
}

/// `a__b` would be the bare name of the one and the provider-safe name of the other.
#[test]
fn two_names_that_read_alike_are_not_both_registered() {
    let registry = registry(&["a/b"]);
    let error = registry.register(tool("local/a__b")).unwrap_err();
    assert_eq!(error.tool_name, "local/a__b");
    assert!(error.details.contains("`a/b`"), "{error}");
    assert!(registry.get("local/a__b").is_none());
    assert_eq!(registry.get("a__b").unwrap().name, name("a/b"));
}

/// A name that is cut may look like a shorter one that is not.
#[test]
fn a_cut_name_that_looks_like_another_is_not_registered_beside_it() {
    let long = "n".repeat(100);
    let cut = name(&long).provider_safe();
    let other = ToolName::from_provider_safe(&cut).unwrap();
    let registry = registry(&[&long]);
    let error = registry.register(tool(other.as_str())).unwrap_err();
    assert!(error.details.contains(&format!("`local/{long}`")), "{error}");
}

#[test]
fn a_cut_name_is_found_by_its_encoding() {
    let long = "n".repeat(100);
    let registry = registry(&[&long]);
    let found = registry.get(&name(&long).provider_safe()).unwrap();
    assert_eq!(found.name, name(&long));
}

#[tokio::test]
async fn a_runtime_with_one_bad_tool_is_not_built() {
    let builder = ToolRuntime::builder().tool(tool("one")).tool(tool("one"));
    let error = builder.build().await.unwrap_err();
    assert_eq!(error.tool_name, "local/one");
}

#[test]
fn a_tool_that_could_never_run_is_not_registered() {
    let spec = ToolSpec::new("never").max_concurrent(0);
    let never = spec.function(|args: Value| Ok(args));
    let error = ToolRegistry::default().register(never).unwrap_err();
    assert!(error.details.contains("`max_concurrent`"), "{error}");
}

// ===== listing =====

/// cases/upstream.md B1: every filter, and all of them together, says what it says.
#[test]
fn a_list_has_the_tools_that_all_filters_fit() {
    let registry = ToolRegistry::default();
    let mut all = Vec::new();
    for at in ["files/a", "files/b", "s:files/a", "s:web/a", "t:web/b", "c"] {
        for tool_type in [ToolType::Tool, ToolType::Validation] {
            for source in [SourceKind::Custom, SourceKind::Mcp] {
                let number = all.len();
                let mut descriptor = ToolDescriptor::new(name(&format!("{at}{number}")));
                (descriptor.tool_type, descriptor.source) = (tool_type, source);
                all.push(descriptor.clone());
                registry.register(Described(descriptor)).unwrap();
            }
        }
    }
    let one = || [None, Some("s"), Some("t"), Some("u")];
    for server in one() {
        for namespace in [None, Some("files"), Some("web"), Some("local"), Some("fil")] {
            for tool_type in [None, Some(ToolType::Tool), Some(ToolType::Validation)] {
                for source in [None, Some(SourceKind::Mcp), Some(SourceKind::Skill)] {
                    for only in [None, Some(&all[0].name), Some(&all[9].name)] {
                        let filter = ToolFilter::new();
                        let filter = server.map_or(filter.clone(), |it| filter.server(it));
                        let filter = namespace.map_or(filter.clone(), |it| filter.namespace(it));
                        let filter = tool_type.map_or(filter.clone(), |it| filter.tool_type(it));
                        let filter = source.map_or(filter.clone(), |it| filter.source(it));
                        let filter = only.map_or(filter.clone(), |it| filter.name(it.clone()));
                        let mut expected = all.clone();
                        expected.retain(|tool| {
                            server.is_none_or(|it| tool.name.server() == Some(it))
                                && namespace.is_none_or(|it| tool.name.namespace() == it)
                                && tool_type.is_none_or(|it| tool.tool_type == it)
                                && source.is_none_or(|it| tool.source == it)
                                && only.is_none_or(|it| tool.name == *it)
                        });
                        assert_eq!(registry.list_tools(&filter), expected, "{filter:?}");
                    }
                }
            }
        }
    }
}

/// cases/upstream.md B1.
#[test]
fn one_tool_and_one_validation_are_told_apart() {
    let registry = registry(&["check_style"]);
    let mut validation = ToolDescriptor::new(name("run_tests"));
    validation.tool_type = ToolType::Validation;
    registry.register(Described(validation)).unwrap();
    for (tool_type, only) in
        [(ToolType::Tool, "local/check_style"), (ToolType::Validation, "local/run_tests")]
    {
        let listed = registry.list_tools(&ToolFilter::new().tool_type(tool_type));
        let listed: Vec<_> = listed.iter().map(|tool| tool.name.as_str()).collect();
        assert_eq!(listed, [only]);
    }
}

#[test]
fn a_name_is_a_filter() {
    let registry = registry(&["a/b", "a/c"]);
    let listed = registry.list_tools(&ToolFilter::from(name("a/c")));
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].name, name("a/c"));
}

#[test]
fn a_list_is_in_the_order_of_registration() {
    let registry = registry(&["z/one", "a/two", "m/three"]);
    let listed = registry.list_tools(&ToolFilter::new());
    let listed: Vec<_> = listed.iter().map(|tool| tool.name.as_str()).collect();
    assert_eq!(listed, ["z/one", "a/two", "m/three"]);
}

// ===== all or none =====

/// What no registry takes, and a word of the error.
fn refused() -> Vec<(Arc<dyn Tool>, &'static str)> {
    let descriptor = || ToolDescriptor::new(name("bad/tool"));
    let bad = |descriptor: ToolDescriptor| Arc::new(Described(descriptor)) as Arc<dyn Tool>;
    let mut reader_that_writes = ToolCapability::read_only();
    reader_that_writes.writes = true;
    vec![
        (bad(descriptor().input_schema(json!({"type": "no_type"}))), "input schema"),
        (bad(descriptor().output_schema(json!({"type": "no_type"}))), "output schema"),
        (bad(descriptor().capability(reader_that_writes)), "`writes`"),
        (
            bad(descriptor().capability(ToolCapability::read_only().checkpointable())),
            "`checkpointable`",
        ),
        (bad(descriptor().max_concurrent(0)), "`max_concurrent`"),
        (Arc::new(Asked { panics_in_descriptor: true, ..Asked::new() }), "no descriptor today"),
        (Arc::new(Asked { panics_in_immediate: true, ..Asked::new() }), "no instance today"),
        (Arc::new(Asked { panics_in_off_thread: true, ..Asked::new() }), "no thread today"),
        (bad(ToolDescriptor::new(name("hand/one"))), "already stands for `hand/one`"),
        (bad(ToolDescriptor::new(name("local/hand__one"))), "already stands for `hand/one`"),
        (bad(ToolDescriptor::new(name("set/first"))), "already stands for `set/first`"),
        (bad(ToolDescriptor::new(name("set__first"))), "already stands for `set/first`"),
    ]
}

#[test]
fn of_many_tools_all_are_registered() {
    let registry = ToolRegistry::default();
    registry.register_all(tools(&["b/one", "a/two", "three"])).unwrap();
    assert_eq!(names(&registry.snapshot()), ["b/one", "a/two", "local/three"]);
    registry.register_all(Vec::new()).unwrap();
    assert_eq!(names(&registry.snapshot()), ["b/one", "a/two", "local/three"]);
}

#[test]
fn of_many_tools_with_a_bad_one_none_is_registered() {
    let registry = registry(&["hand/one"]);
    for (bad, word) in refused() {
        let mut many = tools(&["set/first", "set/second"]);
        many.insert(1, bad);
        let error = registry.register_all(many).unwrap_err();
        assert_eq!(error.error_type, "RegistrationError");
        assert!(error.details.contains(word), "{error}");
        assert_eq!(names(&registry.snapshot()), ["hand/one"], "{error}");
    }
    registry.register_all(tools(&["set/first", "set/second"])).unwrap();
    assert_eq!(names(&registry.snapshot()), ["hand/one", "set/first", "set/second"]);
}

// ===== removing =====

#[test]
fn a_tool_is_removed_once_by_any_text_that_stands_for_it() {
    for text in ["local/read_file", "read_file", "local__read_file"] {
        let registry = registry(&["read_file", "other"]);
        let before = registry.snapshot();
        assert!(registry.remove(text));
        assert!(!registry.remove(text));
        for text in ["local/read_file", "read_file", "local__read_file"] {
            assert!(registry.get(text).is_none());
        }
        assert_eq!(names(&registry.snapshot()), ["local/other"]);
        assert_eq!(names(&before), ["local/read_file", "local/other"]);
        assert!(before.get(text).is_some());
    }
}

#[test]
fn what_is_not_there_is_not_removed() {
    let registry = registry(&["a/b"]);
    let before = registry.snapshot();
    for text in ["b", "a/c", "", "a/b/c", "a__c"] {
        assert!(!registry.remove(text), "{text}");
    }
    assert!(Arc::ptr_eq(&before, &registry.snapshot()));
}

#[test]
fn a_removed_name_and_what_it_clashed_with_can_be_registered() {
    let registry = registry(&["a/b"]);
    assert!(registry.remove("a/b"));
    registry.register(tool("local/a__b")).unwrap();
    assert_eq!(registry.get("a__b").unwrap().name, name("local/a__b"));
    assert!(registry.remove("a__b"));
    registry.register(tool("a/b")).unwrap();
    assert_eq!(registry.get("a__b").unwrap().name, name("a/b"));
}

/// A name keeps its place, so that what a model is told changes as little as it can.
#[test]
fn a_name_that_comes_again_has_its_place_again() {
    let registry = registry(&["one", "two", "three"]);
    assert!(registry.remove("two"));
    registry.register(tool("four")).unwrap();
    registry.register(tool("two")).unwrap();
    let all = ["local/one", "local/two", "local/three", "local/four"];
    assert_eq!(names(&registry.snapshot()), all);
}

// ===== replacing a source =====

#[test]
fn the_first_tools_of_a_source_are_added() {
    let registry = ToolRegistry::default();
    let changes = registry.replace_source("s", tools(&["b/one", "a/two"])).unwrap();
    assert_eq!(told(&changes), [vec!["b/one", "a/two"], vec![], vec![]]);
    assert_eq!(names(&registry.snapshot()), ["b/one", "a/two"]);
}

#[test]
fn a_replaced_source_says_what_is_different() {
    let registry = ToolRegistry::default();
    let old = ["a/gone", "a/same", "a/other", "a/gone2"].map(|name| described(name, "old"));
    registry.replace_source("s", old.to_vec()).unwrap();
    let new = vec![
        described("a/new2", "new"),
        described("a/other", "new"),
        described("a/same", "old"),
        described("a/new1", "new"),
    ];
    let changes = registry.replace_source("s", new).unwrap();
    let expected = [vec!["a/new2", "a/new1"], vec!["a/gone", "a/gone2"], vec!["a/other"]];
    assert_eq!(told(&changes), expected);
    assert_eq!(names(&registry.snapshot()), ["a/same", "a/other", "a/new2", "a/new1"]);
    assert_eq!(registry.get("a/other").unwrap().description, "new");
}

#[test]
fn a_source_that_is_replaced_by_itself_has_no_changes() {
    let registry = ToolRegistry::default();
    registry.replace_source("s", tools(&["a/one", "a/two"])).unwrap();
    let changes = registry.replace_source("s", tools(&["a/two", "a/one"])).unwrap();
    assert!(changes.is_empty());
    assert_eq!(names(&registry.snapshot()), ["a/one", "a/two"]);
}

#[test]
fn a_source_that_has_nothing_any_more_is_empty() {
    let registry = registry(&["hand/one"]);
    registry.replace_source("s", tools(&["a/one", "a/two"])).unwrap();
    let changes = registry.replace_source("s", Vec::new()).unwrap();
    assert_eq!(told(&changes), [vec![], vec!["a/one", "a/two"], vec![]]);
    assert_eq!(names(&registry.snapshot()), ["hand/one"]);
    assert!(registry.replace_source("s", Vec::new()).unwrap().is_empty());
}

#[test]
fn a_replaced_source_leaves_the_tools_of_others_alone() {
    let registry = registry(&["hand/one"]);
    registry.replace_source("s", tools(&["a/one"])).unwrap();
    registry.replace_source("t", tools(&["a/two"])).unwrap();
    let changes = registry.replace_source("s", tools(&["a/three"])).unwrap();
    assert_eq!(told(&changes), [vec!["a/three"], vec!["a/one"], vec![]]);
    assert_eq!(names(&registry.snapshot()), ["hand/one", "a/two", "a/three"]);
}

/// cases/upstream.md B13.
#[test]
fn a_source_that_cannot_be_replaced_keeps_its_old_tools() {
    for (bad, word) in refused() {
        let registry = registry(&["hand/one"]);
        registry.replace_source("s", tools(&["old/one", "old/two"])).unwrap();
        let before = registry.snapshot();
        let mut new = tools(&["set/first", "old/two"]);
        new.insert(1, bad);
        let error = registry.replace_source("s", new).unwrap_err();
        assert!(error.details.contains(word), "{error}");
        let after = registry.snapshot();
        assert!(Arc::ptr_eq(&before, &after), "{error}");
        assert_eq!(names(&after), ["hand/one", "old/one", "old/two"]);
        assert!(registry.get("set/first").is_none());
        let changes = registry.replace_source("s", tools(&["old/two"])).unwrap();
        assert_eq!(told(&changes), [vec![], vec!["old/one"], vec![]]);
    }
}

#[test]
fn a_clash_of_two_sources_names_both_and_their_kinds() {
    let registry = ToolRegistry::default();
    let of = |text: &str, source| {
        Arc::new(Described(ToolDescriptor::new(name(text)).source(source))) as Arc<dyn Tool>
    };
    registry.replace_source("files", vec![of("a/b", SourceKind::Mcp)]).unwrap();
    for text in ["a/b", "local/a__b"] {
        let error =
            registry.replace_source("notes", vec![of(text, SourceKind::Skill)]).unwrap_err();
        assert_eq!(error.tool_name, text);
        for word in ["`a/b`", "`files`", "Mcp", "`notes`", "Skill"] {
            assert!(error.details.contains(word), "no {word}: {error}");
        }
    }
    let error = registry.register(tool("a/b")).unwrap_err();
    for word in ["`a/b`", "`files`", "Mcp", "Custom"] {
        assert!(error.details.contains(word), "no {word}: {error}");
    }
    assert_eq!(names(&registry.snapshot()), ["a/b"]);
}

#[test]
fn a_source_does_not_take_over_what_was_registered_by_hand() {
    let registry = registry(&["a/one"]);
    assert!(registry.replace_source("s", tools(&["a/one"])).is_err());
    assert!(registry.replace_source("s", Vec::new()).unwrap().is_empty());
    assert_eq!(names(&registry.snapshot()), ["a/one"]);
}

/// The name moves from one source to the other once the first gives it up.
#[test]
fn a_name_may_move_from_one_source_to_another() {
    let registry = ToolRegistry::default();
    registry.replace_source("s", tools(&["a/one"])).unwrap();
    assert!(registry.replace_source("t", tools(&["a/one"])).is_err());
    registry.replace_source("s", Vec::new()).unwrap();
    let changes = registry.replace_source("t", tools(&["a/one"])).unwrap();
    assert_eq!(told(&changes), [vec!["a/one"], vec![], vec![]]);
    assert!(registry.replace_source("s", Vec::new()).unwrap().is_empty());
    assert_eq!(names(&registry.snapshot()), ["a/one"]);
}

#[test]
fn a_tool_of_a_source_can_be_removed_by_hand_and_comes_back() {
    let registry = ToolRegistry::default();
    registry.replace_source("s", tools(&["a/one", "a/two"])).unwrap();
    assert!(registry.remove("a/one"));
    let changes = registry.replace_source("s", tools(&["a/one", "a/two"])).unwrap();
    assert_eq!(told(&changes), [vec!["a/one"], vec![], vec![]]);
    assert_eq!(names(&registry.snapshot()), ["a/one", "a/two"]);
}

// ===== schemas =====

/// cases/upstream.md B4.
#[test]
fn a_schema_that_is_none_is_refused_and_the_error_says_where() {
    for (schema, place) in [
        (json!({"type": "invalid_type"}), "/type"),
        (json!({"properties": {"a": {"type": "text"}}}), "/properties/a/type"),
        (json!({"properties": {"a": {"items": {"minLength": -1}}}}), "/properties/a/items"),
        (json!({"required": "a"}), "/required"),
        (json!({"properties": {"a": {"$ref": "#/$defs/b"}}}), "/properties/a/$ref"),
        (json!({"properties": {"a": {"pattern": "("}}}), "/properties/a/pattern"),
        (json!({"$schema": "http://example.com/draft-99"}), "/$schema"),
        (json!("object"), "its root"),
        (json!(["object"]), "its root"),
        (json!(null), "its root"),
        (json!(7), "its root"),
    ] {
        let descriptor = || ToolDescriptor::new(name("a/tool"));
        let registry = ToolRegistry::default();
        for (which, descriptor) in [
            ("input", descriptor().input_schema(schema.clone())),
            ("output", descriptor().output_schema(schema.clone())),
        ] {
            let error = registry.register(Described(descriptor)).unwrap_err();
            assert_eq!(error.tool_name, "a/tool");
            assert!(error.details.contains(which), "{error}");
            assert!(error.details.contains(place), "{schema}: {error}");
        }
        assert_eq!(names(&registry.snapshot()), [""; 0]);
    }
}

/// cases/upstream.md B14.
#[test]
fn a_schema_without_a_type_is_accepted() {
    let registry = ToolRegistry::default();
    for (number, schema) in [
        json!({}),
        json!(true),
        json!(false),
        json!({"allOf": [{"required": ["a"]}]}),
        json!({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}),
        json!({"enum": [{"a": 1}]}),
        json!({"properties": {"a": {"enum": [1, 2]}}}),
    ]
    .into_iter()
    .enumerate()
    {
        let descriptor = ToolDescriptor::new(name(&format!("a/tool{number}")));
        let descriptor = descriptor.input_schema(schema.clone()).output_schema(schema.clone());
        registry.register(Described(descriptor)).unwrap_or_else(|error| panic!("{error}"));
        let known = registry.get(&format!("a/tool{number}")).unwrap();
        assert_eq!(known.input_schema, Some(schema));
    }
}

// ===== tools that look back =====

/// Does the work on a thread of its own: a deadlock fails the test and does not hold it.
fn without_a_deadlock(work: impl FnOnce() + Send + 'static) {
    let (done, is_done) = channel();
    let thread = std::thread::spawn(move || {
        work();
        done.send(()).unwrap();
    });
    let told = is_done.recv_timeout(Duration::from_secs(20));
    assert_ne!(told, Err(RecvTimeoutError::Timeout), "it waits for itself");
    thread.join().unwrap();
}

/// A tool that uses its registry when it is asked, and when it is dropped.
struct Curious {
    descriptor: ToolDescriptor,
    registry: Weak<ToolRegistry>,
    dropped: Arc<AtomicU64>,
}

impl Curious {
    fn new(registry: &Arc<ToolRegistry>, text: &str, dropped: &Arc<AtomicU64>) -> Self {
        let descriptor = ToolDescriptor::new(name(text));
        let registry = Arc::downgrade(registry);
        Self { descriptor, registry, dropped: Arc::clone(dropped) }
    }

    /// Everything that a registry can be asked for.
    fn look_back(&self, when: &str) {
        let Some(registry) = self.registry.upgrade() else { return };
        let own = format!("{}-{when}", self.descriptor.name);
        registry.register(tool(&own)).unwrap();
        assert!(registry.get(&own).is_some());
        assert!(registry.remove(&own));
        registry.replace_source(&own, tools(&[&own])).unwrap();
        registry.replace_source(&own, Vec::new()).unwrap();
        registry.limit_activations(&own, 2);
        assert!(registry.snapshot().get(&own).is_none());
        assert!(registry.list_tools(&ToolFilter::from(name(&own))).is_empty());
        assert!(!format!("{registry:?}").is_empty());
    }
}

#[async_trait]
impl Tool for Curious {
    fn descriptor(&self) -> &ToolDescriptor {
        self.look_back("asked");
        &self.descriptor
    }

    fn immediate(&self) -> Option<Arc<dyn ToolInstance>> {
        self.look_back("asked-for-an-instance");
        None
    }

    fn off_thread(&self) -> bool {
        self.look_back("asked-for-a-thread");
        false
    }

    async fn activate(&self, _: &ActivationContext) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        Err(ToolFailure::failed("never asked for"))
    }
}

impl Drop for Curious {
    fn drop(&mut self) {
        self.look_back("dropped");
        self.dropped.fetch_add(1, SeqCst);
    }
}

#[test]
fn a_tool_may_use_the_registry_when_it_is_asked_and_when_it_is_removed() {
    without_a_deadlock(|| {
        let (registry, dropped) = (Arc::new(ToolRegistry::default()), Arc::default());
        for looked_at_before in [false, true] {
            registry.register(Curious::new(&registry, "a/one", &dropped)).unwrap();
            if looked_at_before {
                assert_eq!(names(&registry.snapshot()), ["a/one"]);
            }
            assert!(registry.remove("a/one"));
            assert_eq!(names(&registry.snapshot()), [""; 0]);
        }
        assert_eq!(dropped.load(SeqCst), 2);
    });
}

#[test]
fn a_tool_may_use_the_registry_when_it_is_refused() {
    without_a_deadlock(|| {
        let (registry, dropped) = (Arc::new(registry(&["a/one"])), Arc::default());
        let curious = |text| Curious::new(&registry, text, &dropped);
        assert!(registry.register(curious("a/one")).is_err());
        assert_eq!(dropped.load(SeqCst), 1);
        let many: Vec<Arc<dyn Tool>> = vec![
            Arc::new(curious("a/two")),
            Arc::new(curious("a/two")),
            Arc::new(curious("a/three")),
        ];
        assert!(registry.register_all(many).is_err());
        assert_eq!(dropped.load(SeqCst), 4);
        let mut bad = curious("a/four");
        bad.descriptor.input_schema = Some(json!({"type": "no_type"}));
        assert!(registry.replace_source("s", vec![Arc::new(bad)]).is_err());
        assert_eq!(dropped.load(SeqCst), 5);
        assert_eq!(names(&registry.snapshot()), ["a/one"]);
    });
}

#[test]
fn a_tool_may_use_the_registry_when_its_source_is_replaced() {
    without_a_deadlock(|| {
        let (registry, dropped) = (Arc::new(ToolRegistry::default()), Arc::default());
        let curious = |text| Arc::new(Curious::new(&registry, text, &dropped)) as Arc<dyn Tool>;
        registry.replace_source("s", vec![curious("a/one"), curious("a/two")]).unwrap();
        registry.replace_source("s", vec![curious("a/two"), curious("a/three")]).unwrap();
        assert_eq!(names(&registry.snapshot()), ["a/two", "a/three"]);
        assert_eq!(dropped.load(SeqCst), 2);
        registry.replace_source("s", Vec::new()).unwrap();
        assert_eq!(names(&registry.snapshot()), [""; 0]);
        assert_eq!(dropped.load(SeqCst), 4);
    });
}

#[test]
fn a_tool_may_use_the_registry_when_the_last_snapshot_of_it_goes() {
    without_a_deadlock(|| {
        let (registry, dropped) = (Arc::new(ToolRegistry::default()), Arc::default());
        registry.register(Curious::new(&registry, "a/one", &dropped)).unwrap();
        let snapshot = registry.snapshot();
        assert!(registry.remove("a/one"));
        assert_eq!(names(&registry.snapshot()), [""; 0]);
        assert_eq!(dropped.load(SeqCst), 0, "a snapshot holds it");
        drop(snapshot);
        assert_eq!(dropped.load(SeqCst), 1);
    });
}

/// A tool whose drop panics.
struct Bomb(ToolDescriptor, Arc<AtomicU64>);

#[async_trait]
impl Tool for Bomb {
    fn descriptor(&self) -> &ToolDescriptor {
        &self.0
    }

    async fn activate(&self, _: &ActivationContext) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        Err(ToolFailure::failed("never asked for"))
    }
}

impl Drop for Bomb {
    fn drop(&mut self) {
        self.1.fetch_add(1, SeqCst);
        panic!("the drop of a tool panics");
    }
}

#[test]
fn p14_the_drop_of_a_tool_that_panics_is_contained() {
    let dropped = Arc::default();
    let bomb = |text| {
        let descriptor = ToolDescriptor::new(name(text));
        Arc::new(Bomb(descriptor, Arc::clone(&dropped))) as Arc<dyn Tool>
    };
    let registry = registry(&["a/one"]);
    assert!(registry.register_arc(bomb("a/one")).is_err());
    registry.register_arc(bomb("a/two")).unwrap();
    assert!(registry.remove("a/two"));
    registry.replace_source("s", vec![bomb("a/three"), bomb("a/four")]).unwrap();
    registry.replace_source("s", vec![bomb("a/four")]).unwrap();
    assert_eq!(names(&registry.snapshot()), ["a/one", "a/four"]);
    assert_eq!(dropped.load(SeqCst), 4);
    drop(registry);
    assert_eq!(dropped.load(SeqCst), 5);
}

#[test]
fn p14_a_registry_goes_on_after_a_tool_that_panicked() {
    let registry = registry(&["one"]);
    for _ in 0..3 {
        let asked = Asked { panics_in_off_thread: true, ..Asked::new() };
        let error = registry.register(asked).unwrap_err();
        assert_eq!(error.tool_name, "?");
    }
    registry.register(tool("two")).unwrap();
    assert_eq!(names(&registry.snapshot()), ["local/one", "local/two"]);
}

// ===== snapshots are shared =====

#[test]
fn a_snapshot_is_the_same_until_something_changes() {
    let registry = registry(&["one"]);
    let snapshot = registry.snapshot();
    assert!(Arc::ptr_eq(&snapshot, &registry.snapshot()));
    assert!(registry.register(tool("one")).is_err());
    assert!(!registry.remove("two"));
    assert!(registry.get("one").is_some());
    assert_eq!(registry.list_tools(&ToolFilter::new()).len(), 1);
    assert!(Arc::ptr_eq(&snapshot, &registry.snapshot()), "nothing has changed");
    registry.register(tool("two")).unwrap();
    assert!(!Arc::ptr_eq(&snapshot, &registry.snapshot()));
}

#[tokio::test(start_paused = true)]
async fn plans_that_begin_in_a_row_share_one_snapshot() {
    let fixture = Fixture::paused(&[&Probe::new("one")]).await;
    let (one, two) = (fixture.plan(), fixture.plan());
    assert!(std::ptr::eq(one.tools(), two.tools()));
    let child = two.begin_child(PlanOptions::new()).unwrap();
    assert!(std::ptr::eq(one.tools(), child.tools()));
    fixture.registry().register(tool("two")).unwrap();
    let three = fixture.plan();
    assert!(!std::ptr::eq(one.tools(), three.tools()));
    assert!(std::ptr::eq(Arc::as_ptr(&fixture.registry().snapshot()), three.tools()));
    drop((one, two, child, three));
    fixture.end().await;
}

const MANY: usize = 10_000;

/// A tool that counts how often it is asked what it is.
fn counted(number: usize, asked: &Arc<AtomicU64>) -> Asked {
    let descriptor = ToolDescriptor::new(name(&format!("a/tool{number}")));
    Asked { descriptor, times: Arc::clone(asked), ..Asked::new() }
}

fn assert_many(registry: &ToolRegistry, asked: &AtomicU64) {
    let snapshot = registry.snapshot();
    assert_eq!(snapshot.descriptors().count(), MANY);
    for (number, tool) in snapshot.descriptors().enumerate() {
        assert_eq!(tool.name.name(), format!("tool{number}"));
    }
    for number in [0, MANY / 2, MANY - 1] {
        assert!(snapshot.get(&format!("a__tool{number}")).is_some());
    }
    assert!(Arc::ptr_eq(&snapshot, &registry.snapshot()));
    assert_eq!(asked.load(SeqCst), MANY as u64, "each is asked once");
}

#[test]
fn ten_thousand_tools_are_registered_at_once() {
    let (registry, asked) = (ToolRegistry::default(), Arc::default());
    let many = (0..MANY).map(|number| Arc::new(counted(number, &asked)) as Arc<dyn Tool>);
    registry.register_all(many.collect()).unwrap();
    assert_many(&registry, &asked);
}

#[test]
fn ten_thousand_tools_are_registered_one_by_one() {
    let (registry, asked) = (ToolRegistry::default(), Arc::default());
    for number in 0..MANY {
        registry.register(counted(number, &asked)).unwrap();
    }
    assert_many(&registry, &asked);
}

#[test]
fn ten_thousand_tools_of_a_source_are_replaced_at_once() {
    let (registry, asked) = (ToolRegistry::default(), Arc::default());
    registry.replace_source("s", tools(&["a/first"])).unwrap();
    let many = (0..MANY).map(|number| Arc::new(counted(number, &asked)) as Arc<dyn Tool>);
    let changes = registry.replace_source("s", many.collect()).unwrap();
    assert_eq!((changes.added.len(), changes.removed.len()), (MANY, 1));
    assert_many(&registry, &asked);
}

// ===== at once =====

/// Whoever looks sees the old tools of a source or the new ones, and each by all its texts.
#[test]
fn a_snapshot_is_whole_while_others_change_the_registry() {
    const TOOLS: usize = 7;
    let (registry, over) = (ToolRegistry::default(), AtomicBool::new(false));
    let edition = |source: &str, number: u64| -> Vec<_> {
        let names = (0..TOOLS).map(|tool| format!("{source}/tool{tool}"));
        names.map(|name| described(&name, &number.to_string())).collect()
    };
    let start = Barrier::new(6);
    std::thread::scope(|scope| {
        let writers: Vec<_> = ["a", "b"]
            .into_iter()
            .map(|source| {
                let (registry, start, edition) = (&registry, &start, &edition);
                scope.spawn(move || {
                    start.wait();
                    for number in 0..150 {
                        let changes = registry.replace_source(source, edition(source, number));
                        let changes = changes.unwrap();
                        let new = changes.added.len() + changes.changed.len();
                        assert_eq!((new, changes.removed.len()), (TOOLS, 0));
                    }
                })
            })
            .chain((0..2).map(|number| {
                let (registry, start) = (&registry, &start);
                scope.spawn(move || {
                    start.wait();
                    for round in 0..300 {
                        let own = format!("hand/tool{number}");
                        registry.register_arc(described(&own, &round.to_string())).unwrap();
                        assert_eq!(registry.get(&own).unwrap().description, round.to_string());
                        assert!(registry.remove(&own));
                        assert!(registry.get(&own).is_none());
                    }
                })
            }))
            .collect();
        for _ in 0..2 {
            scope.spawn(|| {
                start.wait();
                let mut newest = BTreeMap::new();
                while !over.load(SeqCst) {
                    let snapshot = registry.snapshot();
                    for source in ["a", "b"] {
                        let of_it =
                            snapshot.descriptors().filter(|it| it.name.namespace() == source);
                        let editions: Vec<u64> =
                            of_it.map(|tool| tool.description.parse().unwrap()).collect();
                        assert!(editions.len() == TOOLS || editions.is_empty());
                        assert!(editions.windows(2).all(|two| two[0] == two[1]), "{editions:?}");
                        let before = newest.insert(source, editions.first().copied());
                        assert!(before.flatten() <= newest[source], "it went back");
                    }
                    for tool in snapshot.descriptors() {
                        assert_eq!(snapshot.get(tool.name.as_str()), Some(tool));
                        assert_eq!(snapshot.get(&tool.name.provider_safe()), Some(tool));
                    }
                }
            });
        }
        let ended: Vec<_> = writers.into_iter().map(ScopedJoinHandle::join).collect();
        over.store(true, SeqCst);
        assert!(ended.iter().all(Result::is_ok), "a writer panicked");
    });
    assert_eq!(registry.snapshot().descriptors().count(), 2 * TOOLS);
}

/// Of many that register one name, one succeeds.
#[test]
fn a_name_is_registered_once_by_whoever_comes_first() {
    let registry = ToolRegistry::default();
    let start = Barrier::new(4);
    let taken = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                start.wait();
                for number in 0..100 {
                    let registered = registry.register(tool(&format!("a/tool{number}")));
                    taken.fetch_add(u64::from(registered.is_ok()), SeqCst);
                }
            });
        }
    });
    assert_eq!(taken.load(SeqCst), 100);
    assert_eq!(registry.snapshot().descriptors().count(), 100);
}

// ===== unknown names =====

/// The names that are suggested for one that is not registered.
async fn nearest(known: &[&str], asked: &str) -> Vec<String> {
    let builder = known.iter().fold(paused(), |builder, name| builder.tool(tool(name)));
    let fixture = Fixture::with(builder, &[]).await;
    let plan = fixture.plan();
    let error = plan.execute(asked, json!({})).await.unwrap_err();
    fixture.end().await;
    let CallError::Runtime(ToolRuntimeError::NotFound { name, nearest, .. }) = error else {
        panic!("another error: {error}");
    };
    assert_eq!(name, asked);
    nearest.iter().map(ToString::to_string).collect()
}

#[tokio::test(start_paused = true)]
async fn the_nearest_name_comes_first() {
    let known = ["files/write_file", "files/read_files", "files/read_file"];
    let nearest = nearest(&known, "files/reed_file").await;
    assert_eq!(nearest[..2], ["files/read_file", "files/read_files"]);
}

#[tokio::test(start_paused = true)]
async fn a_bare_name_is_compared_as_a_local_one() {
    assert_eq!(nearest(&["count"], "cuont").await, ["local/count"]);
}

#[tokio::test(start_paused = true)]
async fn a_provider_safe_name_is_compared_as_what_it_stands_for() {
    let known = ["files/read_file", "local/my__tool"];
    assert_eq!(nearest(&known, "files__raed_file").await, ["files/read_file"]);
    assert_eq!(nearest(&known, "my__tol").await, ["local/my__tool"]);
    assert_eq!(nearest(&known, "local__my__0_tol").await, ["local/my__tool"]);
}

#[tokio::test(start_paused = true)]
async fn no_more_than_three_names_are_suggested() {
    let known = ["tool1", "tool2", "tool3", "tool4", "tool5"];
    assert_eq!(nearest(&known, "tool").await.len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_name_that_is_like_no_other_has_no_suggestion() {
    let nearest = nearest(&["count"], "deploy_the_whole_cluster").await;
    assert_eq!(nearest, [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn what_is_no_name_at_all_is_not_found() {
    assert_eq!(nearest(&["count"], "../../etc/passwd").await, [""; 0]);
}

// ===== registering under way =====

#[tokio::test(start_paused = true)]
async fn a_plan_does_not_see_what_is_registered_after_it_began() {
    let fixture = Fixture::paused(&[]).await;
    let plan = fixture.plan();
    fixture.registry().register(tool("later")).unwrap();
    assert!(plan.execute("later", json!({})).await.is_err());
    assert_eq!(plan.tools().descriptors().count(), 0);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_plan_sees_what_was_registered_before_it_began() {
    let fixture = Fixture::paused(&[]).await;
    fixture.registry().register(tool("sooner")).unwrap();
    let plan = fixture.plan();
    assert!(plan.execute("sooner", json!({})).await.unwrap().success);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn registering_leaves_the_instances_of_a_plan_alone() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    assert!(plan.execute("probe", json!({})).await.unwrap().success);
    fixture.registry().register(tool("later")).unwrap();
    assert!(plan.execute("probe", json!({})).await.unwrap().success);
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

/// Registered from many threads at once: none is lost.
#[test]
fn tools_can_be_registered_from_many_threads() {
    let registry = Arc::new(ToolRegistry::default());
    let threads: Vec<_> = ["a", "b", "c", "d"]
        .into_iter()
        .map(|namespace| {
            let registry = Arc::clone(&registry);
            std::thread::spawn(move || {
                for number in 0..25 {
                    let name = format!("{namespace}/tool{number}");
                    registry.register(tool(&name)).unwrap();
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(registry.snapshot().descriptors().count(), 100);
}

// ===== tools that misbehave when asked =====

/// A tool that counts how often it is asked, and panics where it is told to.
struct Asked {
    descriptor: ToolDescriptor,
    times: Arc<AtomicU64>,
    panics_in_descriptor: bool,
    panics_in_immediate: bool,
    panics_in_off_thread: bool,
}

impl Asked {
    fn new() -> Self {
        Self {
            descriptor: ToolDescriptor::new(name("asked")),
            times: Arc::default(),
            panics_in_descriptor: false,
            panics_in_immediate: false,
            panics_in_off_thread: false,
        }
    }
}

#[async_trait]
impl Tool for Asked {
    fn descriptor(&self) -> &ToolDescriptor {
        assert!(!self.panics_in_descriptor, "no descriptor today");
        self.times.fetch_add(1, SeqCst);
        &self.descriptor
    }

    fn immediate(&self) -> Option<Arc<dyn ToolInstance>> {
        assert!(!self.panics_in_immediate, "no instance today");
        None
    }

    fn off_thread(&self) -> bool {
        assert!(!self.panics_in_off_thread, "no thread today");
        false
    }

    async fn activate(&self, _: &ActivationContext) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        Err(ToolFailure::failed("never asked for"))
    }
}

#[test]
fn a_tool_is_asked_for_its_descriptor_once() {
    let asked = Asked::new();
    let times = Arc::clone(&asked.times);
    let registry = ToolRegistry::default();
    registry.register(asked).unwrap();
    for _ in 0..3 {
        assert!(registry.get("asked").is_some());
    }
    assert_eq!(times.load(SeqCst), 1);
}

#[test]
fn p14_a_tool_that_panics_in_its_descriptor_is_not_registered() {
    let asked = Asked { panics_in_descriptor: true, ..Asked::new() };
    let registry = registry(&["one"]);
    let error = registry.register(asked).unwrap_err();
    assert!(error.details.contains("no descriptor today"), "{error}");
    assert_eq!(registry.snapshot().descriptors().count(), 1);
}

#[test]
fn p14_a_tool_that_panics_in_immediate_is_not_registered() {
    let asked = Asked { panics_in_immediate: true, ..Asked::new() };
    let error: ToolError = ToolRegistry::default().register(asked).unwrap_err();
    assert!(error.details.contains("no instance today"), "{error}");
}

#[test]
fn p14_a_builder_can_be_printed_with_a_tool_that_panics_in_its_descriptor() {
    let asked = Asked { panics_in_descriptor: true, ..Asked::new() };
    let builder = ToolRuntime::builder().tool(asked);
    assert!(format!("{builder:?}").starts_with("ToolRuntimeBuilder"));
}

// ===== capabilities as text =====

/// cases/upstream.md B11: a flag in the wrong place, or misspelt, must not be passed over.
#[test]
fn a_capability_with_an_unknown_flag_is_refused() {
    let read = serde_json::from_value::<ToolCapability>;
    assert_eq!(read(json!({"writes": true})).unwrap(), ToolCapability::writes());
    assert!(read(json!({"write": true})).is_err());
}

#[test]
fn an_unsafe_capability_is_called_unsafe_in_json() {
    let capability = ToolCapability::writes().is_unsafe();
    let json = serde_json::to_value(capability).unwrap();
    assert_eq!(json["unsafe"], json!(true));
}

/// What a plan refuses it does not name either.
#[tokio::test(start_paused = true)]
async fn a_suggestion_names_only_what_the_plan_may_use() {
    let drop_database = || ToolSpec::new("admin/drop-database").writes().function(|_: Value| Ok(1));
    let fixture = Fixture::with(paused().tool(drop_database()), &[]).await;
    let asked = "admin__drop-databas";
    for (options, suggests) in [
        (PlanOptions::new(), true),
        (PlanOptions::new().read_only(), false),
        (PlanOptions::new().deny(ToolFilter::new().namespace("admin")), false),
    ] {
        let plan = fixture.begin(options).unwrap();
        let error = plan.execute(asked, json!({})).await.unwrap_err();
        assert_eq!(error.to_string().contains("drop-database`"), suggests, "{error}");
    }
    fixture.end().await;
}
