//! The same tool, which adds two numbers, called through toolscope and through its peers, side by
//! side.
//!
//! `cargo run --release --manifest-path benches/peers/Cargo.toml --target-dir target/peers -- --bench`
//!
//! rig deserialises typed arguments, checks no schema, activates nothing and keeps no trace; rmcp
//! encodes JSON-RPC both ways through a pipe in memory. toolscope checks both schemas, gates, and
//! keeps a trace.

#[path = "../../support/measure.rs"]
mod measure;
#[path = "../../support/tools.rs"]
mod tools;

use std::convert::Infallible;
use std::hint::black_box;

use measure::{Effort, Table, against_bar};
use rig_agent::tool::{Tool, ToolContext, ToolSet};
use rmcp::handler::server::router::tool::ToolRouter;
use rmcp::handler::server::wrapper::Parameters;
use rmcp::model::CallToolRequestParams;
use rmcp::service::RunningService;
use rmcp::{Json, RoleClient, ServerHandler, ServiceExt, tool, tool_handler, tool_router};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tools::AddTool;
use toolscope::{CallOptions, Plan, PlanOptions, ToolRuntime, ToolSpec};

/// Tools beside those that are called.
const OTHERS: usize = 62;

#[derive(Deserialize, JsonSchema)]
struct Numbers {
    a: i64,
    b: i64,
}

#[derive(Serialize, JsonSchema)]
struct Sum {
    sum: i64,
}

// ===== rig =====

struct RigAdd;

impl Tool for RigAdd {
    const NAME: &'static str = "add";
    type Args = Numbers;
    type Output = Sum;
    type Error = Infallible;

    fn description(&self) -> String {
        "Adds".to_owned()
    }

    fn parameters(&self) -> Value {
        schemars::schema_for!(Numbers).to_value()
    }

    async fn call(&self, _: &mut ToolContext, args: Numbers) -> Result<Sum, Infallible> {
        Ok(Sum { sum: args.a + args.b })
    }
}

// ===== rmcp =====

#[derive(Clone)]
struct McpAdd {
    tool_router: ToolRouter<Self>,
}

#[tool_handler(router = self.tool_router)]
impl ServerHandler for McpAdd {}

#[tool_router(router = tool_router)]
impl McpAdd {
    fn new() -> Self {
        Self { tool_router: Self::tool_router() }
    }

    #[tool(name = "add")]
    async fn add(&self, Parameters(args): Parameters<Numbers>) -> Json<Sum> {
        Json(Sum { sum: args.a + args.b })
    }
}

async fn mcp_client() -> RunningService<RoleClient, ()> {
    let (here, there) = tokio::io::duplex(64 * 1024);
    tokio::spawn(async move {
        let server = McpAdd::new().serve(there).await.expect("the server starts");
        server.waiting().await.expect("the server ends in order");
    });
    ().serve(here).await.expect("the client connects")
}

// ===== toolscope =====

async fn plan() -> (ToolRuntime, Plan) {
    let typed = async |_, args: Numbers| Ok(Sum { sum: args.a + args.b });
    let mut builder = ToolRuntime::builder()
        .tool(AddTool::new("add"))
        .tool(ToolSpec::new("typed").read_only().handler(typed));
    for other in 0..OTHERS {
        builder = builder.tool(AddTool::new(&format!("add-{other}")));
    }
    let runtime = builder.build().await.unwrap();
    let plan = runtime.begin(PlanOptions::new()).unwrap();
    (runtime, plan)
}

// ===== the measuring =====

const TEXT: &str = r#"{"a":40,"b":2}"#;

const OURS: &str = "toolscope, values in and out";
const OURS_TEXT: &str = "toolscope, JSON text in and out";
const TYPED_TEXT: &str = "toolscope, typed handler, JSON text in and out";
const RIG: &str = "rig ToolSet::execute, JSON text in and out";
const RMCP: &str = "rmcp call_tool, in process";

fn main() {
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (_runtime, plan) = tokio.block_on(plan());
    let client = tokio.block_on(mcp_client());
    let mut set = ToolSet::default();
    set.add_tool(RigAdd);
    let input = json!({"a": 40, "b": 2});
    let arguments = input.as_object().unwrap();

    let mut table = Table::default();
    table.row(OURS, |calls| {
        tokio.block_on(async {
            for _ in 0..calls {
                let result = plan.execute("add", black_box(&input)).await.unwrap();
                assert!(black_box(result).success);
            }
        });
    });
    for (row, tool) in [(OURS_TEXT, "add"), (TYPED_TEXT, "typed")] {
        let (plan, tokio) = (&plan, &tokio);
        table.row(row, move |calls| {
            tokio.block_on(async {
                for _ in 0..calls {
                    let options = CallOptions::new();
                    let result = plan.execute_json(tool, black_box(TEXT), options).await.unwrap();
                    assert!(result.success);
                    black_box(serde_json::to_string(&result.output).unwrap());
                }
            });
        });
    }
    table.row(RIG, |calls| {
        tokio.block_on(async {
            let mut context = ToolContext::new();
            for _ in 0..calls {
                let result = set.execute("add", black_box(TEXT), &mut context).await;
                assert!(black_box(result).is_success());
            }
        });
    });
    table.row(RMCP, |calls| {
        tokio.block_on(async {
            for _ in 0..calls {
                let call = CallToolRequestParams::new("add").with_arguments(arguments.clone());
                let result = client.call_tool(black_box(call)).await.unwrap();
                assert_ne!(black_box(result).is_error, Some(true));
            }
        });
    });
    table.measure(Effort::of_this_run());
    table.print();
    println!();
    against_bar("rig / toolscope, text in and out", table.ratio(RIG, OURS_TEXT), ">=", 2.5, "x");
    against_bar("the same, typed handler", table.ratio(RIG, TYPED_TEXT), ">=", 2.5, "x");
    against_bar("rmcp / toolscope", table.ratio(RMCP, OURS), ">=", 50.0, "x");
}
