//! Names and the registry.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use proptest::prelude::{Strategy, prop_assert, prop_assert_eq, prop_assert_ne, proptest};
use serde_json::{Value, json};
use toolscope::test_util::Probe;
use toolscope::{
    ActivationContext, CallError, FunctionTool, Tool, ToolCapability, ToolDescriptor, ToolError,
    ToolFailure, ToolInstance, ToolName, ToolRegistry, ToolRuntime, ToolRuntimeError, ToolSpec,
    async_trait,
};

use crate::support::{Fixture, paused};

fn name(text: &str) -> ToolName {
    ToolName::parse(text).unwrap()
}

/// What the parser says about a text that is no name.
#[track_caller]
fn problem(text: &str) -> String {
    let problem = ToolName::parse(text).unwrap_err().to_string();
    assert!(problem.ends_with("the form is `[[server:]namespace/]name`"), "{problem}");
    problem
}

fn tool(name: &str) -> FunctionTool {
    ToolSpec::new(name).function(|args: Value| Ok(args))
}

fn registry(names: &[&str]) -> ToolRegistry {
    let registry = ToolRegistry::default();
    for name in names {
        registry.register(tool(name)).unwrap();
    }
    registry
}

// ===== names =====

/// cases/upstream.md B6.
#[test]
fn a_bare_name_is_a_local_one() {
    assert_eq!(name("word-count"), name("local/word-count"));
    assert_eq!(name("word-count").as_str(), "local/word-count");
    assert_eq!(name("word-count").name(), "word-count");
}

/// cases/upstream.md B6.
#[test]
fn a_name_may_have_a_server() {
    let name = name("dev:freemo/custom-analysis");
    assert_eq!(
        (name.server(), name.namespace(), name.name()),
        (Some("dev"), "freemo", "custom-analysis")
    );
}

#[test]
fn a_name_without_a_server_has_none() {
    let name = name("files/read");
    assert_eq!((name.server(), name.namespace()), (None, "files"));
}

/// cases/upstream.md B8.
#[test]
fn a_namespace_may_have_an_underscore() {
    assert_eq!(name("my_org/x").namespace(), "my_org");
}

#[test]
fn a_part_has_letters_digits_underscores_dashes_and_dots() {
    assert_eq!(name("A.b-c_1/D.e-f_2").as_str(), "A.b-c_1/D.e-f_2");
}

#[test]
fn a_name_has_at_most_255_bytes() {
    assert_eq!(name(&"n".repeat(255)).name().len(), 255);
    assert!(problem(&"n".repeat(256)).contains("256 bytes"));
}

#[test]
fn an_empty_text_is_no_name() {
    assert!(problem("").contains("the name is empty"));
}

#[test]
fn a_name_does_not_end_in_a_slash() {
    assert!(problem("files/").contains("the name is empty"));
}

#[test]
fn a_name_does_not_begin_with_a_slash() {
    assert!(problem("/read").contains("the namespace is empty"));
}

#[test]
fn a_server_is_not_empty() {
    assert!(problem(":files/read").contains("the server is empty"));
}

#[test]
fn a_name_does_not_begin_with_a_digit() {
    assert!(problem("files/2read").contains("the name starts with '2'"));
}

#[test]
fn a_name_has_one_slash() {
    assert!(problem("a/b/c").contains("the name has '/'"));
}

#[test]
fn a_server_needs_a_namespace() {
    assert!(problem("dev:read").contains("the name has ':'"));
}

#[test]
fn a_name_has_no_space_around_it() {
    assert!(problem(" read").contains("the name starts with ' '"));
    assert!(problem("read ").contains("the name has ' '"));
}

#[test]
fn a_name_has_no_letters_but_those_of_ascii() {
    assert!(problem("größe").contains("the name has 'ö'"));
}

#[test]
fn the_text_of_a_bad_name_is_cut_in_its_error() {
    assert!(problem(&"?".repeat(10_000)).len() < 300);
}

#[test]
fn a_name_is_its_text_in_json() {
    let read: ToolName = serde_json::from_value(json!("word-count")).unwrap();
    assert_eq!(serde_json::to_value(read).unwrap(), json!("local/word-count"));
    assert!(serde_json::from_value::<ToolName>(json!("a/b/c")).is_err());
}

// ===== the encoding for model providers =====

/// Names that try to be read as each other: few letters, and all that is escaped.
fn awkward() -> impl Strategy<Value = ToolName> {
    "([ab][ab_.0-2-]{0,3}:)?[ab][ab_.0-2-]{0,4}/[ab][ab_.0-2-]{0,6}".prop_map(|text| name(&text))
}

/// Every name that the parser takes, but for the longest.
fn any_name() -> impl Strategy<Value = ToolName> {
    let part = || "[a-zA-Z][a-zA-Z0-9_.-]{0,70}";
    (proptest::option::of(part()), part(), part()).prop_map(|(server, namespace, last)| {
        let server = server.map_or_else(String::new, |server| server + ":");
        name(&format!("{server}{namespace}/{last}"))
    })
}

fn is_provider_safe(text: &str) -> bool {
    let safe = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    (1..=64).contains(&text.len()) && text.chars().all(safe)
}

proptest! {
    #[test]
    fn every_encoding_is_one_that_providers_accept(name in any_name()) {
        let encoded = name.provider_safe();
        prop_assert!(is_provider_safe(&encoded), "{encoded}");
    }

    #[test]
    fn an_encoding_that_fits_decodes_to_its_name(name in any_name()) {
        let encoded = name.provider_safe();
        let was_cut = encoded.len() == 64;
        prop_assert!(was_cut || ToolName::from_provider_safe(&encoded) == Some(name));
    }

    #[test]
    fn an_awkward_name_decodes_to_itself(name in awkward()) {
        prop_assert_eq!(ToolName::from_provider_safe(&name.provider_safe()), Some(name));
    }

    #[test]
    fn two_awkward_names_have_two_encodings(one in awkward(), other in awkward()) {
        if one != other {
            prop_assert_ne!(one.provider_safe(), other.provider_safe());
        }
    }

    #[test]
    fn what_is_decoded_is_encoded_the_same(text in "[ab][ab_0-2-]{0,20}") {
        if let Some(name) = ToolName::from_provider_safe(&text) {
            prop_assert_eq!(name.provider_safe(), text);
        }
    }

    #[test]
    fn two_long_names_have_two_encodings(one in "[ab]{80}", other in "[ab]{80}") {
        if one != other {
            prop_assert_ne!(name(&one).provider_safe(), name(&other).provider_safe());
        }
    }
}

/// A model may have been told the name by another process, or another version.
#[test]
fn the_encoding_of_a_name_never_changes() {
    let long = format!("files/{}", "n".repeat(100));
    assert_eq!(name("dev:files/read_file.v2").provider_safe(), "dev__2files__read_file__1v2");
    assert_eq!(
        name(&long).provider_safe(),
        "files__nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn_609c0be4f259f5bd"
    );
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
}

impl Asked {
    fn new() -> Self {
        Self {
            descriptor: ToolDescriptor::new(name("asked")),
            times: Arc::default(),
            panics_in_descriptor: false,
            panics_in_immediate: false,
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
