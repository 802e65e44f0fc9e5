//! Whether a call costs the same however many tools there are, and however many calls are in
//! flight.
//!
//! `cargo bench --bench scale`.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a bench prints and may fail")]
#![expect(clippy::cast_precision_loss, reason = "a bench has figures far below 2^52")]

#[path = "support/measure.rs"]
mod measure;
#[path = "support/tools.rs"]
mod tools;

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use futures_util::future::join_all;
use measure::{Effort, Table, against_bar};
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};
use tools::AddTool;
use toolscope::{PlanOptions, Provider, Tool, ToolRegistry, ToolRuntime};

const TOOLS: [usize; 4] = [10, 100, 1_000, 10_000];
const IN_FLIGHT: [usize; 5] = [1, 10, 100, 1_000, 10_000];

fn main() {
    let effort = Effort::of_this_run();
    let tokio = Builder::new_current_thread().enable_all().build().unwrap();
    tools(&tokio, effort);
    println!();
    in_flight(&tokio, effort);
}

fn catalogue(tools: usize) -> Vec<Arc<dyn Tool>> {
    let tool =
        |number: usize| Arc::new(AddTool::new(&format!("tools/add-{number}"))) as Arc<dyn Tool>;
    (0..tools).map(tool).collect()
}

fn tools(tokio: &Runtime, effort: Effort) {
    let runtimes = TOOLS.map(|tools| {
        let runtime = tokio.block_on(ToolRuntime::builder().build()).unwrap();
        runtime.registry().register_all(catalogue(tools)).unwrap();
        runtime
    });
    let plans = runtimes.each_ref().map(|runtime| runtime.begin(PlanOptions::new()).unwrap());
    let input = json!({"a": 40, "b": 2});
    let names = TOOLS.map(|tools| {
        let calls = (0..100).map(|call| format!("tools/add-{}", (call * 7919) % tools));
        calls.collect::<Vec<_>>()
    });
    let rows = TOOLS.map(|tools| format!("execute, of {tools} tools"));
    let mut table = Table::default();
    for ((row, plan), names) in rows.iter().zip(&plans).zip(&names) {
        table.row(row, |times| {
            tokio.block_on(async {
                for name in names.iter().cycle().take(usize::try_from(times).unwrap()) {
                    black_box(plan.execute(name, black_box(&input)).await).unwrap();
                }
            });
        });
    }
    table.measure(effort);
    table.print();
    against_bar("10,000 tools / 10", table.ratio(&rows[3], &rows[0]), "<=", 1.5, "x");

    println!();
    let mut table = Table::default();
    table.row("begin and drop a plan, of 10,000 tools", |times| {
        for _ in 0..times {
            drop(runtimes[3].begin(PlanOptions::new()).unwrap());
        }
    });
    table.row("register 10,000 tools of equal schemas, for one", |times| {
        for _ in 0..times.div_ceil(10_000) {
            ToolRegistry::default().register_all(catalogue(10_000)).unwrap();
        }
    });
    table.row("definitions for a model, of 1,000 tools", |times| {
        for _ in 0..times {
            black_box(plans[2].definitions(Provider::Anthropic));
        }
    });
    table.measure(effort);
    table.print();
}

/// Calls of one plan that all wait at once: the time of one, from its beginning to its end.
fn in_flight(tokio: &Runtime, effort: Effort) {
    let yielding = AddTool { yields_when_executed: true, ..AddTool::new("yielding") };
    let runtime = tokio.block_on(ToolRuntime::builder().tool(yielding).build()).unwrap();
    let plan = runtime.begin(PlanOptions::new().trace_cap(10_000)).unwrap();
    let input: Value = json!({"a": 40, "b": 2});
    let rows = IN_FLIGHT.map(|calls| format!("execute that yields, {calls} in flight"));
    let mut table = Table::default();
    for (row, calls) in rows.iter().zip(IN_FLIGHT) {
        let (plan, input) = (&plan, &input);
        table.timed(row, move |times| {
            let rounds = usize::try_from(times).unwrap().div_ceil(calls);
            let began = Instant::now();
            tokio.block_on(async {
                for _ in 0..rounds {
                    let all = (0..calls).map(|_| plan.execute("yielding", input));
                    black_box(join_all(all).await);
                }
            });
            // Of whole rounds: more calls than were asked for.
            began.elapsed().mul_f64(times as f64 / (rounds * calls) as f64)
        });
    }
    table.measure(effort);
    table.print();
}
