//! Three ways to stop a call: a timeout, a token of the call's own, and the end of the plan.
//!
//! You will see what each call gave, then the same in the plan's traces. A timeout drops the tool's
//! future at once. A cancelled tool first has a grace, in which it may still give a result. A plan
//! that was cancelled is undone like any other: the ledger is balanced.

#![expect(clippy::print_stdout, reason = "an example prints")]

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use toolscope::{
    ActivationContext, CallError, CallOptions, Deadlines, PlanOptions, Tool, ToolCapability,
    ToolDescriptor, ToolExecutionContext, ToolFailure, ToolInstance, ToolOutput, ToolResult,
    ToolRuntime, async_trait,
};

fn main() -> Result<(), Box<dyn Error>> {
    toolscope::guardian::init();
    tokio::runtime::Runtime::new()?.block_on(run())
}

async fn run() -> Result<(), Box<dyn Error>> {
    let capability = ToolCapability::read_only();
    let crawl = Crawl(ToolDescriptor::new("crawl".parse()?).capability(capability));
    let short = Duration::from_millis(50);
    let deadlines = Deadlines::default().grace(short);
    let runtime = ToolRuntime::builder().tool(crawl).deadlines(deadlines).build().await?;
    let plan = runtime.begin(PlanOptions::new())?;
    let (polite, stubborn) = (json!({"polite": true}), json!({"polite": false}));

    let timeout = CallOptions::new().timeout(short);
    tell("timeout", plan.execute_with("crawl", &polite, timeout).await);

    for (what, input) in [("token, polite tool", &polite), ("token, stubborn tool", &stubborn)] {
        let token = CancellationToken::new();
        let call = plan.execute_with("crawl", input, CallOptions::new().token(token.clone()));
        // The call is polled first, so it is in the middle of its work when it is cancelled.
        let (ended, ()) = tokio::join!(biased; call, async { token.cancel() });
        tell(what, ended);
    }

    let call = plan.execute("crawl", &polite);
    let (ended, ()) = tokio::join!(biased; call, async { plan.cancel() });
    tell("plan, polite tool", ended);
    tell("a call after that", plan.execute("crawl", &polite).await);

    let report = plan.finish().await;
    println!("the plan was {}", report.reason());
    for call in report.traces() {
        println!("call {}: {}, cancelled: {}", call.call_id, call.outcome, call.cancelled);
    }
    let ledger = runtime.shutdown(Duration::from_secs(10)).await.stats;
    let (activated, deactivated) = (ledger.activated, ledger.deactivated);
    let (open, lost) = (ledger.open, ledger.lost);
    println!("ledger: activated {activated}, deactivated {deactivated}, open {open}, lost {lost}");
    Ok(())
}

fn tell(what: &str, ended: Result<ToolResult, CallError>) {
    let ended = match ended {
        Ok(ToolResult { error: Some(error), .. }) => format!("for the model: {error}"),
        Ok(result) => format!("a result: {}", result.output),
        Err(error) => format!("for the host: {error}"),
    };
    println!("{what}: {ended}");
}

/// A tool whose work never ends. It is activated once, and its crawler keeps the default
/// `deactivate`.
struct Crawl(ToolDescriptor);

/// The crawl of one plan.
struct Crawler;

#[async_trait]
impl Tool for Crawl {
    fn descriptor(&self) -> &ToolDescriptor {
        &self.0
    }

    async fn activate(&self, _: &ActivationContext) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        Ok(Arc::new(Crawler))
    }
}

#[async_trait]
impl ToolInstance for Crawler {
    async fn execute(
        &self,
        ctx: &ToolExecutionContext,
        input: &Value,
    ) -> Result<ToolOutput, ToolFailure> {
        if input["polite"] == false {
            std::future::pending::<()>().await;
        }
        ctx.cancelled().await;
        Ok(json!("what was found so far").into())
    }
}
