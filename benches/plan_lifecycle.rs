//! What a plan costs from begin to end, alone and in a crowd.
//!
//! `cargo bench --bench plan_lifecycle`. The crowds run in processes of their own (`--crowd KIND
//! PLANS`), so that the memory of one is not the other's.

#![expect(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    reason = "a bench prints, may fail, and has figures far below 2^52"
)]

#[path = "support/measure.rs"]
mod measure;
#[path = "support/tools.rs"]
mod tools;

use std::hint::black_box;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Instant;

use measure::{Effort, Table, against_bar, median};
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;
use tools::AddTool;
use toolscope::test_util::execution_context;
use toolscope::{PlanHandle, PlanOptions, ToolExecutionContext, ToolInstance, ToolRuntime};

const DIRECT: &str = "one direct boxed call";
const DIRECT_3: &str = "three direct boxed calls";
const EXECUTE: &str = "one execute in a plan that is there";
const IDLE: &str = "begin, finish";
const DROPPED: &str = "begin, drop";
const CALLS_3: &str = "begin, three immediate calls, finish";
const MANAGED: &str = "begin, activate a managed no-op, execute, finish";
const MANAGED_64: &str = "the same, 64 tasks at once, for one plan";
const WAITS: &str = "the same alone, its activation waits once";
const HOP: &str = "a bare hop to another Tokio runtime and back";

/// Plans that are alive at once in a crowd.
const CROWD: usize = 100_000;
/// Tasks that each run one plan after the other.
const TASKS: u64 = 64;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, crowd, kind, plans, ..] = &arguments[..]
        && crowd == "--crowd"
    {
        return run_crowd(kind, plans.parse().unwrap());
    }
    let effort = Effort::of_this_run();
    one_plan(effort);
    println!();
    crowds(effort);
}

// ===== one plan after the other =====

fn managed(name: &str) -> AddTool {
    AddTool { managed: true, ..AddTool::new(name) }
}

fn build(tokio: &Runtime) -> ToolRuntime {
    let runtime = ToolRuntime::builder()
        .tool(AddTool::new("add"))
        .tool(managed("managed"))
        .tool(AddTool { yields_when_activated: true, ..managed("waits") })
        .tool(AddTool { yields_when_executed: true, ..managed("one") })
        .tool(AddTool { yields_when_executed: true, ..managed("two") })
        .tool(AddTool { yields_when_executed: true, ..managed("three") });
    tokio.block_on(runtime.build()).unwrap()
}

/// Plans from begin to finish, with so many calls of a tool in each.
async fn plans(runtime: &ToolRuntime, tool: &str, calls: usize, input: &Value, plans: u64) {
    for _ in 0..plans {
        let plan = runtime.begin(PlanOptions::new()).unwrap();
        for _ in 0..calls {
            black_box(plan.execute(tool, black_box(input)).await).unwrap();
        }
        black_box(plan.finish().await);
    }
}

fn one_plan(effort: Effort) {
    let tokio = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let runtime = Arc::new(build(&tokio));
    let input = json!({"a": 40, "b": 2});
    let standing = runtime.begin(PlanOptions::new()).unwrap();
    let (instance, ctx) = (AddTool::new("direct").instance(), execution_context(&standing));
    let direct = |calls: u64| {
        tokio.block_on(async {
            for _ in 0..calls {
                black_box(instance.execute(&ctx, black_box(&input)).await).ok().unwrap();
            }
        });
    };
    let run = |tool: &'static str, calls: usize| {
        let (tokio, runtime, input) = (&tokio, &runtime, &input);
        move |count| tokio.block_on(plans(runtime, tool, calls, input, count))
    };

    let other = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let mut table = Table::default();
    table.row(DIRECT, direct);
    table.row(DIRECT_3, |count| direct(3 * count));
    table.row(EXECUTE, |count| {
        tokio.block_on(async {
            for _ in 0..count {
                black_box(standing.execute("add", black_box(&input)).await).unwrap();
            }
        });
    });
    table.row(IDLE, run("add", 0));
    table.row(DROPPED, |count| {
        (0..count).for_each(|_| drop(black_box(runtime.begin(PlanOptions::new()).unwrap())));
    });
    table.row(CALLS_3, run("add", 3));
    table.row(MANAGED, run("managed", 1));
    table.timed(MANAGED_64, |count| {
        let began = Instant::now();
        let mut tasks = JoinSet::new();
        for _ in 0..TASKS {
            let (runtime, input) = (Arc::clone(&runtime), input.clone());
            let work =
                async move { plans(&runtime, "managed", 1, &input, count.div_ceil(TASKS)).await };
            tasks.spawn_on(work, tokio.handle());
        }
        tokio.block_on(tasks.join_all());
        // Of whole plans for each task: more than were asked for.
        began.elapsed().mul_f64(count as f64 / (TASKS * count.div_ceil(TASKS)) as f64)
    });
    table.row(WAITS, run("waits", 1));
    table.row(HOP, |count| {
        tokio.block_on(async {
            for _ in 0..count {
                other.spawn(tokio::task::yield_now()).await.unwrap();
            }
        });
    });
    table.measure(effort);
    table.print();

    println!();
    // The bars are for a machine where the direct call takes 70 ns.
    let idle = 250.0 / 70.0 * table.median(DIRECT);
    against_bar(IDLE, table.median(IDLE), "<=", idle, "ns");
    against_bar(CALLS_3, table.median(CALLS_3), "<=", idle + 3.0 * table.median(EXECUTE), "ns");
    against_bar(MANAGED, table.median(MANAGED) / 1000.0, "<=", 5.0, "us");
    against_bar(MANAGED_64, table.median(MANAGED_64) / 1000.0, "<=", 5.0, "us");
    against_bar(WAITS, table.median(WAITS) / 1000.0, "<=", 50.0, "us");
    let stats = runtime.stats();
    assert_eq!((stats.activated, stats.open, stats.lost), (stats.deactivated, 0, 0));
}

// ===== a crowd: many plans alive at once =====

/// Bare tasks and plans in turn: each makes three calls, one of each tool, waits until all are
/// there, and makes six more.
fn crowds(effort: Effort) {
    let (count, times) = if effort.rounds > 1 { (CROWD, 5) } else { (1000, 1) };
    let (mut walls, mut memories, mut bare_memories) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..times {
        let (bare, plans) = (crowd("bare", count), crowd("plans", count));
        walls.push(plans.0 / bare.0);
        bare_memories.push(bare.1);
        memories.push(plans.1);
        println!("{count} at once: bare tasks {:.3} s, with plans {:.3} s", bare.0, plans.0);
    }
    println!("memory of a bare task: {:.0} B", median(bare_memories));
    against_bar(
        "100,000 plans alive, 3 tools, 3 calls each / bare tasks",
        median(walls),
        "<=",
        2.5,
        "x",
    );
    against_bar(
        "resident memory of such a plan, its task included",
        median(memories),
        "<=",
        2048.0,
        "B",
    );
}

/// Seconds, and resident bytes for one at the moment when all are there.
fn crowd(kind: &str, plans: usize) -> (f64, f64) {
    let program = std::env::current_exe().unwrap();
    let output =
        Command::new(program).args(["--crowd", kind, &plans.to_string()]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let figures: Vec<f64> = text.split_whitespace().map(|figure| figure.parse().unwrap()).collect();
    (figures[0], figures[1])
}

/// Where all wait for the last.
struct Meeting {
    missing: AtomicUsize,
    all_here: Notify,
    open: Semaphore,
}

impl Meeting {
    async fn wait(&self) {
        if self.missing.fetch_sub(1, SeqCst) == 1 {
            self.all_here.notify_one();
        }
        // Closed when the meeting is over.
        assert!(self.open.acquire().await.is_err());
    }
}

const TOOLS: [&str; 3] = ["one", "two", "three"];

fn run_crowd(kind: &str, count: usize) {
    let tokio = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let runtime = Arc::new(build(&tokio));
    let standing = runtime.begin(PlanOptions::new()).unwrap();
    let ctx = Arc::new(execution_context(&standing));
    let tool = AddTool { yields_when_executed: true, ..AddTool::new("direct") };
    let instances: Arc<[_; 3]> = Arc::new(TOOLS.map(|_| tool.instance()));
    let input: Arc<Value> = Arc::new(json!({"a": 40, "b": 2}));
    let (missing, all_here, open) = (AtomicUsize::new(count), Notify::new(), Semaphore::new(0));
    let meeting = Arc::new(Meeting { missing, all_here, open });

    let (before, began) = (resident(), Instant::now());
    let mut tasks = JoinSet::new();
    for _ in 0..count {
        let (meeting, input) = (Arc::clone(&meeting), Arc::clone(&input));
        if kind == "bare" {
            let (instances, ctx) = (Arc::clone(&instances), Arc::clone(&ctx));
            let work = async move {
                call_direct(&instances, &ctx, &input).await;
                meeting.wait().await;
                call_direct(&instances, &ctx, &input).await;
                call_direct(&instances, &ctx, &input).await;
            };
            tasks.spawn_on(work, tokio.handle());
        } else {
            let runtime = Arc::clone(&runtime);
            let work = async move {
                let plan = runtime.begin(PlanOptions::new()).unwrap();
                call(&plan, &input).await;
                meeting.wait().await;
                call(&plan, &input).await;
                call(&plan, &input).await;
                plan.finish().await;
            };
            tasks.spawn_on(work, tokio.handle());
        }
    }
    tokio.block_on(meeting.all_here.notified());
    let there = resident() - before;
    meeting.open.close();
    tokio.block_on(tasks.join_all());
    println!("{} {}", began.elapsed().as_secs_f64(), there / count as f64);
}

async fn call_direct(
    instances: &[Arc<dyn ToolInstance>; 3],
    ctx: &ToolExecutionContext,
    input: &Value,
) {
    for instance in instances {
        black_box(instance.execute(ctx, input).await).ok().unwrap();
    }
}

async fn call(plan: &PlanHandle, input: &Value) {
    for tool in TOOLS {
        black_box(plan.execute(tool, input).await).unwrap();
    }
}

/// The resident bytes of this process.
fn resident() -> f64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: f64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096.0
}
