//! Names: one parser, and the encoding that model providers take.

use proptest::prelude::*;
use serde_json::json;
use toolscope::{ToolName, ToolRegistry};

use crate::registry::described;

pub(crate) fn name(text: &str) -> ToolName {
    ToolName::parse(text).unwrap()
}

/// What the parser says about a text that is no name.
#[track_caller]
fn problem(text: &str) -> String {
    let problem = ToolName::parse(text).unwrap_err().to_string();
    assert!(problem.ends_with("the form is `[[server:]namespace/]name`"), "{problem}");
    problem
}

// ===== the parser =====

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
    let longest = format!("files/{}", "n".repeat(249));
    assert_eq!(name(&longest).as_str().len(), 255);
    assert!(problem(&format!("{longest}n")).contains("256 bytes"));
}

/// The namespace that is left out counts: a name is read again from its own text.
#[test]
fn the_longest_bare_name_is_read_again_from_its_text() {
    let longest = (1..=255).rev().find_map(|bytes| ToolName::parse(&"n".repeat(bytes)).ok());
    let longest = longest.unwrap();
    assert!(longest.as_str().len() >= 200);
    assert_eq!(ToolName::parse(longest.as_str()), Ok(longest));
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

/// A part of a name: any letters, or few that try to be read as something else.
fn part() -> impl Strategy<Value = String> {
    prop_oneof!["[a-zA-Z][a-zA-Z0-9_.-]{0,84}", "[a-zA-Z][a-zA-Z0-9_.-]{0,12}", "[ab][_.0-2]{0,30}"]
}

/// Every name that the parser takes, up to the longest.
fn any_name() -> impl Strategy<Value = ToolName> {
    let whole = (proptest::option::of(part()), proptest::option::of(part()), part());
    whole.prop_map(|(server, namespace, last)| {
        let mut text = match (server, namespace) {
            (Some(server), Some(namespace)) => format!("{server}:{namespace}/{last}"),
            (None, Some(namespace)) => format!("{namespace}/{last}"),
            (_, None) => last,
        };
        text.truncate(255);
        name(&text)
    })
}

/// Names that differ from each other in one place, by what is escaped or stands for it.
fn two_alike() -> impl Strategy<Value = (ToolName, ToolName)> {
    let other = prop_oneof!["[_.0-2-]", "__", "__[0-2]", "_[0-2]", "/a", ":a"];
    (any_name(), any::<prop::sample::Index>(), other).prop_filter_map(
        "a name with something put in is one",
        |(one, at, put)| {
            let at = 1 + at.index(one.as_str().len() - 1);
            let (before, after) = one.as_str().split_at(at);
            let longer = ToolName::parse(&format!("{before}{put}{after}")).ok();
            let instead = after.get(1..).map(|after| format!("{before}{put}{after}"));
            let other = longer.or_else(|| ToolName::parse(&instead?).ok())?;
            Some((one, other))
        },
    )
}

/// Every text that a tool is found by.
fn texts(name: &ToolName) -> Vec<String> {
    let bare = name.as_str().strip_prefix("local/").map(ToOwned::to_owned);
    bare.into_iter().chain([name.to_string(), name.provider_safe()]).collect()
}

/// Whether an encoding was cut, by how it looks and what it decodes to.
fn is_cut(name: &ToolName, encoded: &str) -> bool {
    let digest = |text: &str| {
        text.len() == 17
            && text.starts_with('_')
            && text[1..].bytes().all(|it| matches!(it, b'0'..=b'9' | b'a'..=b'f'))
    };
    encoded.len() == 64
        && digest(&encoded[47..])
        && ToolName::from_provider_safe(encoded).as_ref() != Some(name)
}

fn is_provider_safe(text: &str) -> bool {
    let safe = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    (1..=64).contains(&text.len()) && text.chars().all(safe)
}

proptest! {
    // A failure prints its smallest case, which becomes a test of its own.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_encoding_is_one_that_providers_accept(name in any_name()) {
        let encoded = name.provider_safe();
        prop_assert!(is_provider_safe(&encoded), "{encoded}");
    }

    #[test]
    fn a_name_is_read_again_from_its_text(name in any_name()) {
        prop_assert_eq!(ToolName::parse(name.as_str()), Ok(name.clone()));
        let json = serde_json::to_value(&name).unwrap();
        prop_assert_eq!(serde_json::from_value::<ToolName>(json).unwrap(), name);
    }

    #[test]
    fn the_parts_of_a_name_make_its_text(name in any_name()) {
        let server = name.server().map_or_else(String::new, |server| format!("{server}:"));
        let text = format!("{server}{}/{}", name.namespace(), name.name());
        prop_assert_eq!(name.as_str(), text);
    }

    #[test]
    fn an_encoding_decodes_to_its_name_or_was_cut(name in any_name()) {
        let encoded = name.provider_safe();
        let decoded = ToolName::from_provider_safe(&encoded);
        prop_assert!(decoded.as_ref() == Some(&name) || is_cut(&name, &encoded), "{encoded}");
    }

    /// No character takes more than three.
    #[test]
    fn a_short_name_is_not_cut(name in any_name()) {
        if 3 * name.as_str().len() <= 64 {
            prop_assert_eq!(ToolName::from_provider_safe(&name.provider_safe()), Some(name));
        }
    }

    #[test]
    fn the_encoding_of_a_name_is_the_same_each_time(name in any_name()) {
        let again = ToolName::parse(name.as_str()).map(|name| name.provider_safe());
        prop_assert_eq!(again, Ok(name.provider_safe()));
    }

    #[test]
    fn two_names_that_are_alike_have_two_encodings((one, other) in two_alike()) {
        if one != other {
            prop_assert_ne!(one.provider_safe(), other.provider_safe());
        }
    }

    #[test]
    fn a_snapshot_finds_a_name_by_its_encoding_cut_or_not(
        names in prop::collection::hash_set(any_name(), 1..12),
    ) {
        let registry = ToolRegistry::default();
        let mut taken: Vec<ToolName> = Vec::new();
        for name in names {
            let of = |known: &&ToolName| texts(known).iter().any(|it| texts(&name).contains(it));
            let clash = taken.iter().find(of);
            match (registry.register_arc(described(name.as_str(), "")), clash) {
                (Ok(()), None) => taken.push(name),
                (Err(error), Some(other)) => {
                    prop_assert_eq!(&error.tool_name, name.as_str());
                    let named = format!("`{other}`");
                    prop_assert!(error.details.contains(&named), "{}", error);
                }
                (registered, clash) => prop_assert!(false, "{registered:?} and {clash:?}"),
            }
        }
        let snapshot = registry.snapshot();
        for name in &taken {
            for text in texts(name) {
                prop_assert_eq!(snapshot.get(&text).map(|tool| &tool.name), Some(name));
            }
        }
    }

    /// A cut name reads as another that is not cut: only one of them can be registered.
    #[test]
    fn a_clash_is_refused_in_either_order_and_names_both(name in any_name()) {
        let encoded = name.provider_safe();
        let other = ToolName::from_provider_safe(&encoded).filter(|other| *other != name);
        if let Some(other) = other {
            for (first, second) in [(&name, &other), (&other, &name)] {
                let registry = ToolRegistry::default();
                registry.register_arc(described(first.as_str(), "")).unwrap();
                let error = registry.register_arc(described(second.as_str(), "")).unwrap_err();
                prop_assert_eq!(&error.tool_name, second.as_str());
                prop_assert!(error.details.contains(&format!("`{first}`")), "{}", error);
                prop_assert_eq!(&registry.get(&encoded).unwrap().name, first);
                prop_assert!(registry.get(second.as_str()).is_none());
            }
        }
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
