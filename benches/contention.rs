//! Whether plans are in each other's way: the same calls on one thread and on two, through one plan
//! and through a plan each.
//!
//! `cargo bench --bench contention`.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a bench prints and may fail")]
#![expect(clippy::cast_precision_loss, reason = "a bench has figures far below 2^52")]

#[path = "support/measure.rs"]
mod measure;
#[path = "support/tools.rs"]
mod tools;

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use measure::{Effort, Table, against_bar};
use serde_json::json;
use tokio::runtime::Builder;
use tools::AddTool;
use toolscope::{Plan, PlanHandle, PlanOptions, ToolRuntime};

fn main() {
    let effort = Effort::of_this_run();
    let tokio = Builder::new_current_thread().enable_all().build().unwrap();
    let mut permitted = AddTool::new("permitted");
    permitted.descriptor.max_concurrent = Some(64);
    let builder = ToolRuntime::builder()
        .tool(AddTool::new("immediate"))
        .tool(AddTool { managed: true, ..AddTool::new("managed") })
        .tool(permitted);
    let runtime = tokio.block_on(builder.build()).unwrap();
    let plan = || {
        // Its list of traces has its full length soon, and grows no more.
        let plan = runtime.begin(PlanOptions::new().trace_cap(1_000)).unwrap();
        run(&plan, "immediate", 1_000);
        run(&plan, "managed", 1_000);
        plan
    };
    let plans: [Plan; 4] = std::array::from_fn(|_| plan());
    let own = |threads: usize| (0..threads).map(|at| plans[at].handle()).collect::<Vec<_>>();
    let shared = |threads: usize| vec![plans[0].handle(); threads];

    let mut table = Table::default();
    for (row, tool) in [
        ("immediate, one thread", "immediate"),
        ("managed, one thread", "managed"),
        ("a tool with permits, one thread", "permitted"),
    ] {
        let plan = &plans[0];
        table.row(row, move |calls| run(plan, tool, calls));
    }
    for (row, tool, plans) in [
        ("immediate, two threads, a plan each", "immediate", own(2)),
        ("immediate, two threads, one plan", "immediate", shared(2)),
        ("immediate, four threads, a plan each", "immediate", own(4)),
        ("managed, two threads, a plan each", "managed", own(2)),
        ("managed, two threads, one plan", "managed", shared(2)),
        ("a tool with permits, two threads, a plan each", "permitted", own(2)),
    ] {
        table.timed(row, move |calls| threads(&plans, tool, calls));
    }
    table.measure(effort);
    table.print();
    println!();
    for tool in ["immediate", "managed"] {
        let (two, one) =
            (format!("{tool}, two threads, a plan each"), format!("{tool}, one thread"));
        let gain = 1.0 / table.ratio(&two, &one);
        against_bar(&format!("{tool}: calls on two cores / on one"), gain, ">=", 1.8, "x");
    }
}

fn run(plan: &PlanHandle, tool: &str, calls: u64) {
    let input = json!({"a": 40, "b": 2});
    Builder::new_current_thread().build().unwrap().block_on(async {
        for _ in 0..calls {
            black_box(plan.execute(tool, black_box(&input)).await).unwrap();
        }
    });
}

/// The time in which a thread for each plan makes its share of the calls.
fn threads(plans: &[PlanHandle], tool: &str, calls: u64) -> Duration {
    let share = calls.div_ceil(plans.len() as u64);
    let gate = Barrier::new(plans.len());
    let work = |plan: &PlanHandle| {
        gate.wait();
        let began = Instant::now();
        run(plan, tool, share);
        began.elapsed()
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = plans.iter().map(|plan| scope.spawn(|| work(plan))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).max().unwrap()
    })
}
