//! Five plans at once over the files of a folder. Each ends in another way, and every activation is
//! undone.
//!
//! ```text
//! cargo run --example quickstart             over the crate's own `src`
//! cargo run --example quickstart FOLDER      over any other folder
//! cargo run --example quickstart -- --json   the same as one JSON document
//! ```
//!
//! You will see a row for each call, then what the folder holds (the numbers of `find FOLDER -type
//! f` and of `wc`), then the ledger: as many deactivations as activations. The panic on stderr is a
//! tool's; it stays inside its call.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "an example prints")]

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use toolscope::{CallError, Plan, PlanOptions};

mod tools;

fn main() -> Result<(), Box<dyn Error>> {
    toolscope::guardian::init();
    // One line for the tool that panics, whatever RUST_BACKTRACE says.
    std::panic::set_hook(Box::new(|panic| eprintln!("{panic}")));
    let mut folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut as_json = false;
    for argument in std::env::args_os().skip(1) {
        if argument == "--json" {
            as_json = true;
        } else {
            folder = argument.into();
        }
    }
    let document = tokio::runtime::Runtime::new()?.block_on(run(folder.into()))?;
    if as_json {
        println!("{document:#}");
    } else {
        print_table(&document);
    }
    Ok(())
}

async fn run(folder: Arc<Path>) -> Result<Value, Box<dyn Error>> {
    let runtime = tools::runtime(&folder).await?;
    let plan = |options| runtime.begin(options);
    let plans = [
        ("finished", plan(PlanOptions::new())?),
        ("cancelled", plan(PlanOptions::new())?),
        ("dropped", plan(PlanOptions::new())?),
        ("panicked", plan(PlanOptions::new())?),
        ("read-only", plan(PlanOptions::new().read_only())?),
    ];
    let handles = plans.each_ref().map(|(name, plan)| (*name, plan.handle()));
    let [one, two, three, four, five] = plans.map(|(_, plan)| plan);
    let (counts, ..) = tokio::try_join!(
        finished(one),
        cancelled(two),
        dropped(three),
        panicked(four),
        read_only(five),
    )?;
    // Also waits for the plan that was dropped.
    let ledger = runtime.shutdown(Duration::from_secs(10)).await.stats;

    let mut calls = Vec::new();
    for (name, plan) in handles {
        for call in plan.traces() {
            calls.push(json!({
                "plan": name,
                "tool": call.tool,
                "outcome": call.outcome,
                "ms": call.duration_ms(),
                "bytes": call.result_size_bytes,
            }));
        }
    }
    let (activated, deactivated) = (ledger.activated, ledger.deactivated);
    let (open, lost) = (ledger.open, ledger.lost);
    Ok(json!({
        "calls": calls,
        "folder": counts,
        "ledger": {"activated": activated, "deactivated": deactivated, "open": open, "lost": lost},
    }))
}

fn print_table(document: &Value) {
    println!("plan       tool              outcome              ms    bytes");
    for call in document["calls"].as_array().into_iter().flatten() {
        let [plan, tool, outcome] =
            ["plan", "tool", "outcome"].map(|key| call[key].as_str().unwrap_or_default());
        let (ms, bytes) = (call["ms"].as_f64(), call["bytes"].as_u64());
        let (ms, bytes) = (ms.unwrap_or_default(), bytes.unwrap_or_default());
        println!("{plan:<10} {tool:<17} {outcome:<13} {ms:>9.3} {bytes:>8}");
    }
    let [files, lines, words, bytes] =
        ["files", "lines", "words", "bytes"].map(|key| &document["folder"][key]);
    println!("folder: {files} files, {lines} lines, {words} words, {bytes} bytes");
    let [activated, deactivated, open, lost] =
        ["activated", "deactivated", "open", "lost"].map(|key| &document["ledger"][key]);
    println!("ledger: activated {activated}, deactivated {deactivated}, open {open}, lost {lost}");
}

// ===== the five plans =====

/// Does its work, and says when it is over.
async fn finished(plan: Plan) -> Result<Value, CallError> {
    plan.execute("word-index", json!({"word": "plan"})).await?;
    plan.execute("search", json!({"text": "plan"})).await?;
    plan.execute("note", json!({"text": "it is about plans"})).await?;
    let counts = plan.execute("count", json!({})).await?.into_result()?;
    plan.finish().await;
    Ok(counts)
}

/// Is cancelled in the middle of a call.
async fn cancelled(plan: Plan) -> Result<(), CallError> {
    plan.execute("word-index", json!({"word": "cancel"})).await?;
    let call = plan.execute("wait", json!({}));
    let (call, ()) = tokio::join!(biased; call, async { plan.cancel() });
    assert!(matches!(call, Err(CallError::Cancelled(_))));
    plan.finish().await;
    Ok(())
}

/// Is dropped without a word.
async fn dropped(plan: Plan) -> Result<(), CallError> {
    plan.execute("word-index", json!({"word": "drop"})).await?;
    drop(plan);
    Ok(())
}

/// Calls a tool that panics: to the model that is one more failed call.
async fn panicked(plan: Plan) -> Result<(), CallError> {
    plan.execute("word-index", json!({"word": "panic"})).await?;
    assert!(!plan.execute("explode", json!({})).await?.success);
    plan.fail().await;
    Ok(())
}

/// May only read, and is refused a writer.
async fn read_only(plan: Plan) -> Result<(), CallError> {
    plan.execute("word-index", json!({"word": "read"})).await?;
    let note = plan.execute("note", json!({"text": "never taken"})).await;
    assert!(matches!(note, Err(CallError::Runtime(_))));
    plan.finish().await;
    Ok(())
}
