//! What one call costs: the runtime's whole path against the direct boxed call of the same
//! instance.
//!
//! `cargo bench --bench call_overhead`; the last line is the ratio, for scripts. With `--count ROW
//! N` it only makes `N` calls of one row, for callgrind; see BENCHMARKS.md.

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
use std::sync::Arc;
use std::time::{Duration, Instant};

use measure::{Effort, Table, against_bar};
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::CancellationToken;
use tools::{Add, AddTool};
use toolscope::test_util::execution_context;
use toolscope::{CallOptions, Plan, PlanOptions, ToolInstance, ToolRuntime, ToolSpec};

const DIRECT: &str = "direct boxed call";
const EXECUTE: &str = "execute, immediate tool";
const MANAGED: &str = "execute, managed tool, warm";
const TYPED: &str = "execute, typed handler";
const PERMIT: &str = "execute, with permits of tool and plan";
const TIMEOUT: &str = "execute, with a timeout";
const TOKEN: &str = "execute, with a token";
const PENDING: &str = "execute, tool yields once, with a timeout";
const JSON: &str = "execute, JSON text in and out";
const JSON_DIRECT: &str = "direct boxed call, JSON text in and out";

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Numbers {
    a: i64,
    b: i64,
}

#[derive(serde::Serialize, schemars::JsonSchema)]
struct Sum {
    sum: i64,
}

/// What the rows work on.
struct Setup {
    tokio: Runtime,
    runtime: ToolRuntime,
    plan: Plan,
    narrow: Plan,
    direct: Arc<dyn ToolInstance>,
    input: Value,
}

impl Setup {
    fn new() -> Self {
        let tokio = Builder::new_current_thread().enable_all().build().unwrap();
        let typed = async |_, args: Numbers| Ok(Sum { sum: args.a + args.b });
        let mut permitted = AddTool::new("permitted");
        permitted.descriptor.max_concurrent = Some(4);
        let runtime = ToolRuntime::builder()
            .tool(AddTool::new("add"))
            .tool(AddTool { managed: true, ..AddTool::new("managed") })
            .tool(permitted)
            .tool(AddTool { yields_when_executed: true, ..AddTool::new("yielding") })
            .tool(ToolSpec::new("typed").read_only().handler(typed));
        let runtime = tokio.block_on(runtime.build()).unwrap();
        let plan = runtime.begin(PlanOptions::new()).unwrap();
        let narrow = runtime.begin(PlanOptions::new().max_concurrent(4)).unwrap();
        let (direct, input) = (Arc::new(Add { yields: false }), json!({"a": 40, "b": 2}));
        Self { tokio, runtime, plan, narrow, direct, input }
    }

    /// Calls of a tool through a plan, one after the other.
    fn execute(&self, plan: &Plan, tool: &str, calls: u64) {
        self.tokio.block_on(async {
            for _ in 0..calls {
                let result = plan.execute(tool, black_box(&self.input)).await;
                assert!(black_box(result).is_ok_and(|result| result.success));
            }
        });
    }

    fn execute_with(&self, tool: &str, options: &CallOptions, calls: u64) {
        self.tokio.block_on(async {
            for _ in 0..calls {
                let input = black_box(&self.input);
                let result = self.plan.execute_with(tool, input, options.clone()).await;
                assert!(black_box(result).is_ok_and(|result| result.success));
            }
        });
    }

    fn direct(&self, calls: u64) {
        let (instance, ctx) = (black_box(&self.direct), execution_context(&self.plan));
        self.tokio.block_on(async {
            for _ in 0..calls {
                let output = instance.execute(&ctx, black_box(&self.input)).await;
                assert!(black_box(output).is_ok());
            }
        });
    }

    fn json(&self, calls: u64) {
        self.tokio.block_on(async {
            for _ in 0..calls {
                let input: Value = serde_json::from_str(black_box(TEXT)).unwrap();
                let result = self.plan.execute("add", &input).await.unwrap();
                black_box(serde_json::to_string(&result.output).unwrap());
            }
        });
    }

    fn json_direct(&self, calls: u64) {
        let (instance, ctx) = (black_box(&self.direct), execution_context(&self.plan));
        self.tokio.block_on(async {
            for _ in 0..calls {
                let input: Value = serde_json::from_str(black_box(TEXT)).unwrap();
                let output = instance.execute(&ctx, &input).await.ok().unwrap();
                black_box(serde_json::to_string(&output.value).unwrap());
            }
        });
    }

    /// The time in which so many threads make so many calls each, every one through a plan of its
    /// own.
    fn threads(&self, threads: usize, calls: u64) -> Duration {
        let gate = std::sync::Barrier::new(threads);
        let work = || {
            let tokio = Builder::new_current_thread().build().unwrap();
            let plan = self.runtime.begin(PlanOptions::new()).unwrap();
            let input = json!({"a": 40, "b": 2});
            let run = |calls| {
                tokio.block_on(async {
                    for _ in 0..calls {
                        black_box(plan.execute("add", black_box(&input)).await).unwrap();
                    }
                });
            };
            // Until the list of traces has its full length and grows no more.
            run(12_000);
            gate.wait();
            let began = Instant::now();
            run(calls);
            began.elapsed()
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).max().unwrap()
        })
    }
}

const TEXT: &str = r#"{"a":40,"b":2}"#;

fn main() {
    let setup = Setup::new();
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, count, row, calls, ..] = &arguments[..]
        && count == "--count"
    {
        let calls = calls.parse().unwrap();
        return match row.as_str() {
            "direct" => setup.direct(calls),
            "json" => setup.json(calls),
            tool => setup.execute(&setup.plan, tool, calls),
        };
    }

    let effort = Effort::of_this_run();
    let timeout = CallOptions::new().timeout(Duration::from_secs(30));
    let token = CallOptions::new().token(CancellationToken::new());
    let mut table = Table::default();
    table.row(DIRECT, |calls| setup.direct(calls));
    table.row(EXECUTE, |calls| setup.execute(&setup.plan, "add", calls));
    table.row(MANAGED, |calls| {
        setup.execute(&setup.plan, "managed", calls);
    });
    table.row(TYPED, |calls| setup.execute(&setup.plan, "typed", calls));
    table.row(PERMIT, |calls| {
        setup.execute(&setup.narrow, "permitted", calls);
    });
    table.row(TIMEOUT, |calls| setup.execute_with("add", &timeout, calls));
    table.row(TOKEN, |calls| setup.execute_with("add", &token, calls));
    table.row(PENDING, |calls| {
        setup.execute_with("yielding", &timeout, calls);
    });
    table.row(JSON_DIRECT, |calls| setup.json_direct(calls));
    table.row(JSON, |calls| setup.json(calls));
    table.measure(effort);
    table.print();

    let mut cores = Table::default();
    cores.timed("one", |calls| setup.threads(1, calls));
    cores.timed("two", |calls| setup.threads(2, calls));
    cores.measure(effort);

    println!();
    against_bar("execute / direct, immediate tool", table.ratio(EXECUTE, DIRECT), "<=", 3.7, "x");
    against_bar("execute / direct, managed tool", table.ratio(MANAGED, DIRECT), "<=", 3.7, "x");
    against_bar(
        "calls on two cores / on one, a plan each",
        2.0 / cores.ratio("two", "one"),
        ">=",
        1.8,
        "x",
    );
    println!("execute/direct ratio: {:.2}", table.ratio(EXECUTE, DIRECT));
}
