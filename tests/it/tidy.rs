//! Rules that the compiler does not keep: DESIGN section 7 and the house style.

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    let path = root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A file of Rust, by its path from the root of the crate.
struct Source {
    path: String,
    text: String,
}

impl Source {
    /// Its lines of code with their place: no comments, no in-file tests.
    fn code(&self) -> impl Iterator<Item = (String, &str)> {
        let tests = self.text.find("#[cfg(test)]\nmod ");
        let code = &self.text[..tests.unwrap_or(self.text.len())];
        let numbered = code.lines().zip(1..);
        numbered
            .map(|(line, number)| (line.split(" //").next().unwrap_or(line), number))
            .filter(|(line, _)| !line.trim_start().starts_with("//"))
            .map(|(line, number)| (format!("{}:{number}", self.path), line))
    }

    fn is_in(&self, places: &[&str]) -> bool {
        places.iter().any(|place| self.path.starts_with(place))
    }
}

/// The files of Rust in a folder and below.
fn sources(folder: &str) -> Vec<Source> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).unwrap();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        for path in paths {
            if path.is_dir() && !path.ends_with("target") {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(root()).unwrap().to_str().unwrap();
                found.push(Source {
                    path: name.replace('\\', "/"),
                    text: fs::read_to_string(&path).unwrap(),
                });
            }
        }
    }
    assert!(!found.is_empty(), "nothing in `{folder}`");
    found
}

/// Checks that no line of code outside some places has a text in it.
#[track_caller]
fn only_in(places: &[&str], text: &str) {
    let mut found = Vec::new();
    for source in sources("src") {
        if !source.is_in(places) {
            let lines = source.code().filter(|(_, line)| line.contains(text));
            found.extend(lines.map(|(at, line)| format!("{at}: {}", line.trim())));
        }
    }
    assert!(found.is_empty(), "`{text}` outside {places:?}:\n{}", found.join("\n"));
}

// ===== who may name whom =====

#[test]
fn dashmap_is_named_in_the_cache_only() {
    only_in(&["src/cache.rs"], "dashmap");
}

#[test]
fn jiff_is_named_in_the_traces_only() {
    only_in(&["src/trace.rs"], "jiff");
}

#[test]
fn arc_swap_is_named_in_the_registry_only() {
    only_in(&["src/registry.rs"], "arc_swap");
}

#[test]
fn jsonschema_is_named_in_the_schemas_only() {
    only_in(&["src/schema.rs", "src/schema/faults.rs"], "jsonschema");
}

#[test]
fn sha2_is_named_in_the_approvals_only() {
    only_in(&["src/approval.rs"], "sha2");
}

#[test]
fn futures_util_is_named_in_the_batch_only() {
    only_in(&["src/batch.rs"], "futures_util");
}

#[test]
fn rmcp_is_named_in_the_mcp_source_only() {
    only_in(&["src/source/mcp"], "rmcp");
}

#[test]
fn cap_std_is_named_where_files_are_touched_only() {
    let places = ["src/source/builtin", "src/source/skills", "src/checkpoint.rs"];
    only_in(&places, "cap_std");
}

#[test]
fn rustix_is_named_where_processes_are_only() {
    only_in(&["src/process", "src/bin/toolscope-guardian.rs"], "rustix");
}

#[test]
fn the_pure_rooms_know_no_async_and_no_clock() {
    let pure = [
        "src/policy.rs",
        "src/slot.rs",
        "src/schema",
        "src/limit.rs",
        "src/definition",
        "src/finite.rs",
    ];
    for source in sources("src").iter().filter(|source| source.is_in(&pure)) {
        for (at, line) in source.code() {
            for word in ["async", "await", "Instant", "SystemTime", "tokio"] {
                assert!(!line.contains(word), "{at}: `{word}` in a pure room");
            }
        }
    }
}

#[test]
fn sources_know_nothing_above_them() {
    let above = [
        "{",
        "registry",
        "plan",
        "runtime",
        "scope",
        "cache",
        "slot",
        "execute",
        "keeper",
        "lease",
        "obligation",
        "policy",
    ];
    for source in sources("src").iter().filter(|it| it.is_in(&["src/source"])) {
        for (at, line) in source.code() {
            for module in above {
                let named = line.contains(&format!("crate::{module}"));
                assert!(!named, "{at}: a source knows `crate::{module}`");
            }
        }
    }
}

/// A job that is spawned on the caller's runtime ends with it. In a model there is one runtime only.
#[test]
fn nothing_is_spawned_on_the_caller_s_runtime() {
    for source in sources("src") {
        let items = source.text.split("\n}\n");
        for item in items.filter(|item| !item.contains("#[cfg(toolscope_shuttle)]")) {
            for spawn in ["tokio::spawn(", "task::spawn(", "spawn_local("] {
                assert!(!item.contains(spawn), "`{spawn}` in {}", source.path);
            }
        }
    }
    only_in(&["src/keeper.rs"], "tokio::spawn(");
}

// ===== what is not written =====

#[test]
fn nothing_is_unwrapped() {
    only_in(&[], ".unwrap()");
}

#[test]
fn what_is_expected_is_a_broken_invariant() {
    for source in sources("src") {
        for (at, line) in source.code().filter(|(_, line)| line.contains(".expect(")) {
            assert!(line.contains(".expect(\"BUG: "), "{at}: {}", line.trim());
        }
    }
}

/// The lint holds for tests, benches and examples too.
#[test]
fn unsafe_code_is_forbidden() {
    assert!(read("Cargo.toml").contains("\nunsafe_code = \"forbid\"\n"));
}

#[test]
fn nothing_is_left_to_do() {
    for folder in ["src", "tests", "examples", "benches"] {
        for source in sources(folder) {
            for mark in [concat!("TO", "DO"), concat!("FIX", "ME")] {
                assert!(!source.text.contains(mark), "{mark} in {}", source.path);
            }
        }
    }
}

#[test]
fn no_file_is_named_after_nothing() {
    let names = ["mod.rs", "util.rs", "utils.rs", "common.rs", "types.rs", "misc.rs", "helpers.rs"];
    for source in sources("src") {
        let name = source.path.rsplit('/').next().unwrap();
        assert!(!names.contains(&name), "{}", source.path);
    }
}

#[test]
fn getters_are_named_after_what_they_get() {
    only_in(&[], "pub fn get_");
}

#[test]
fn no_test_sleeps_on_its_thread() {
    for source in sources("tests/it") {
        let sleeps = source.text.contains(concat!("thread::", "sleep"));
        assert!(!sleeps, "{} blocks its thread", source.path);
    }
}

#[test]
fn every_file_of_tests_is_in_the_binary() {
    let main = read("tests/it/main.rs");
    for source in sources("tests/it") {
        let name = source.path.rsplit('/').next().unwrap();
        let module = format!("\nmod {};\n", name.trim_end_matches(".rs"));
        assert!(name == "main.rs" || main.contains(&module), "{name}");
    }
}

/// P10 is about processes, and comes with them.
#[test]
fn every_promise_has_its_tests() {
    let tests: String = sources("tests").into_iter().map(|it| it.text).collect();
    for promise in (1..=16).filter(|promise| *promise != 10) {
        let name = format!(" p{promise}_");
        assert!(tests.contains(&name), "no test is named `p{promise}_...`");
    }
}

// ===== what the docs say =====

/// A public function: where it is, what its docs say, and its signature on one line.
struct Function {
    at: String,
    docs: String,
    signature: String,
}

impl Function {
    fn is_async(&self) -> bool {
        self.signature.starts_with("pub async fn ")
    }

    /// Whether what follows the parameters is a `Result` of whatever module.
    fn returns_a_result(&self) -> bool {
        let mut depth = 0;
        let end = self.signature.char_indices().find(|(_, c)| {
            depth += i32::from(*c == '(') - i32::from(*c == ')');
            *c == ')' && depth == 0
        });
        let after = end.map_or("", |(at, _)| &self.signature[at + 1..]);
        let returned = after.trim_start().strip_prefix("->").unwrap_or("");
        let outermost = returned.split('<').next().unwrap_or("");
        outermost.trim().rsplit("::").next() == Some("Result")
    }
}

fn public_functions() -> Vec<Function> {
    let mut found = Vec::new();
    for source in sources("src") {
        let lines: Vec<&str> = source.text.lines().map(str::trim).collect();
        for (number, line) in lines.iter().enumerate() {
            if !line.starts_with("pub fn ") && !line.starts_with("pub async fn ") {
                continue;
            }
            let end = lines[number..].iter().position(|line| line.ends_with(['{', ';']));
            let above = lines[..number].iter().rev();
            let docs = above.take_while(|line| {
                line.starts_with("///") || !line.is_empty() && !line.ends_with(['{', '}'])
            });
            found.push(Function {
                at: format!("{}:{}", source.path, number + 1),
                docs: docs.copied().collect::<Vec<_>>().join("\n"),
                signature: lines[number..=number + end.unwrap_or(0)].join(" "),
            });
        }
    }
    found
}

#[track_caller]
fn all_have(heading: &str, concerned: impl Fn(&Function) -> bool) {
    let functions = public_functions();
    let concerned: Vec<_> = functions.iter().filter(|it| concerned(it)).collect();
    assert!(!concerned.is_empty(), "no function is concerned");
    let missing: Vec<_> = concerned
        .iter()
        .filter(|function| !function.docs.contains(heading))
        .map(|function| format!("{}: {}", function.at, function.signature))
        .collect();
    assert!(missing.is_empty(), "no `{heading}` in the docs of\n{}", missing.join("\n"));
}

#[test]
fn every_public_async_fn_says_how_it_is_cancelled() {
    all_have("# Cancel safety", Function::is_async);
}

#[test]
fn every_public_fn_that_returns_a_result_says_its_errors() {
    all_have("# Errors", Function::returns_a_result);
}

// ===== the manifest =====

#[test]
fn every_dependency_comes_from_the_registry() {
    let lock = read("Cargo.lock");
    let sources = lock.lines().filter(|line| line.starts_with("source = "));
    for source in sources {
        assert_eq!(source, "source = \"registry+https://github.com/rust-lang/crates.io-index\"");
    }
}

/// Where the README tells users which version to depend on, it is this one.
#[test]
fn the_readme_names_this_version() {
    let (major, minor) = (env!("CARGO_PKG_VERSION_MAJOR"), env!("CARGO_PKG_VERSION_MINOR"));
    let short = format!("\"{major}.{minor}\"");
    let long = format!("\"{}\"", env!("CARGO_PKG_VERSION"));
    for line in read("README.md").lines() {
        if line.starts_with("toolscope = ") {
            assert!(line.contains(&short) || line.contains(&long), "{line}");
        }
    }
}
