//! Tools written by hand: two of them keep a session each, on a store that they share.
//!
//! You will see the store opened once, for whichever tool needs it first; a session that is
//! tainted, closed and replaced; and at the end of the plan the sessions closed first, and then the
//! store.

#![expect(clippy::print_stdout, reason = "an example prints")]

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::Mutex;
use toolscope::{
    ActivationContext, DeactivationContext, PlanOptions, SharedActivation, Tool, ToolCapability,
    ToolDescriptor, ToolExecutionContext, ToolFailure, ToolInstance, ToolOutput, ToolRuntime,
    async_trait,
};

fn main() -> Result<(), Box<dyn Error>> {
    toolscope::guardian::init();
    tokio::runtime::Runtime::new()?.block_on(run())
}

async fn run() -> Result<(), Box<dyn Error>> {
    let put = ToolDescriptor::new("store/put".parse()?).capability(ToolCapability::writes());
    let get = ToolDescriptor::new("store/get".parse()?).capability(ToolCapability::read_only());
    let runtime = ToolRuntime::builder()
        .tool(StoreTool { descriptor: put })
        .tool(StoreTool { descriptor: get })
        .build()
        .await?;

    let plan = runtime.begin(PlanOptions::new())?;
    let apples = json!({"key": "apples"});
    plan.execute("store/put", json!({"key": "apples", "value": 3})).await?;
    plan.execute("store/get", &apples).await?;
    plan.execute("store/get", json!({"key": "pears"})).await?;
    plan.execute("store/get", &apples).await?;
    // No longer needed; the store stays open for `get`.
    plan.deactivate("store/put").await;
    println!("the plan ends");
    let report = plan.finish().await;

    let outcomes: Vec<_> = report.traces().iter().map(|call| call.outcome.as_str()).collect();
    println!("calls: {}", outcomes.join(", "));
    let ledger = runtime.shutdown(Duration::from_secs(10)).await.stats;
    let (activated, deactivated) = (ledger.activated, ledger.deactivated);
    let (open, lost) = (ledger.open, ledger.lost);
    println!("ledger: activated {activated}, deactivated {deactivated}, open {open}, lost {lost}");
    Ok(())
}

// ===== what the two tools share =====

/// An open store: one for the plan.
struct Store(Mutex<BTreeMap<String, Value>>);

impl Store {
    fn open() -> Self {
        println!("store: opened");
        Self(Mutex::default())
    }
}

#[async_trait]
impl SharedActivation for Store {
    async fn deactivate(&self, _: &DeactivationContext) -> Result<(), ToolFailure> {
        println!("store: closed");
        Ok(())
    }
}

// ===== the tools =====

/// What is registered: light, and the same for all plans.
struct StoreTool {
    descriptor: ToolDescriptor,
}

#[async_trait]
impl Tool for StoreTool {
    fn descriptor(&self) -> &ToolDescriptor {
        &self.descriptor
    }

    async fn activate(
        &self,
        ctx: &ActivationContext,
    ) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        let store = ctx.shared("the store", async |_| Ok(Store::open())).await?;
        let name = self.descriptor.name.name().to_owned();
        println!("{name}: session opened");
        Ok(Arc::new(Session { name, store, calls: AtomicU64::new(0) }))
    }
}

/// What an activation makes: the state of one tool in one plan.
struct Session {
    name: String,
    store: Arc<Store>,
    calls: AtomicU64,
}

#[async_trait]
impl ToolInstance for Session {
    async fn execute(
        &self,
        ctx: &ToolExecutionContext,
        input: &Value,
    ) -> Result<ToolOutput, ToolFailure> {
        let call = self.calls.fetch_add(1, Relaxed) + 1;
        let key = input["key"].as_str().ok_or_else(|| ToolFailure::invalid("`key` is missing"))?;
        let mut store = self.store.0.lock().await;
        if let Some(value) = input.get("value") {
            println!("{}: call {call}, {key} is now {value}", self.name);
            store.insert(key.to_owned(), value.clone());
            return Ok(Value::Null.into());
        }
        if let Some(value) = store.get(key) {
            println!("{}: call {call}, {key} is {value}", self.name);
            return Ok(value.clone().into());
        }
        // As if the other side had hung up: this call fails, and the next one gets another session.
        println!("{}: call {call}, no {key}, tainted", self.name);
        ctx.taint("the other side hung up");
        Err(ToolFailure::failed(format!("there are no {key}")))
    }

    async fn deactivate(&self, _: &DeactivationContext) -> Result<(), ToolFailure> {
        println!("{}: session closed after {} calls", self.name, self.calls.load(Relaxed));
        Ok(())
    }
}
