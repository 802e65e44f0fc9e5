//! The four stages by hand, over one plan: the front of the tool card.

use std::collections::BTreeSet;
use std::time::Instant;

use serde_json::Value;

use crate::descriptor::ToolDescriptor;
use crate::error::ToolError;
use crate::name::ToolName;
use crate::plan::PlanHandle;
use crate::registry::{ToolRegistry, texts};
use crate::sync::{Mutex, lock};
use crate::tool::ToolResult;

/// Discover, activate, execute, deactivate, over one plan. A facade: everything goes by the plan,
/// with its gate, its activations and its end.
///
/// # Examples
///
/// ```
/// use serde_json::json;
/// use toolscope::test_util::Probe;
/// use toolscope::{PlanOptions, ToolRunner, ToolRuntime};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let runtime = ToolRuntime::builder().tool(Probe::new("index").tool()).build().await?;
/// let plan = runtime.begin(PlanOptions::new())?;
/// let runner = ToolRunner::new(plan.handle());
/// assert_eq!(runner.discover(None).len(), 1);
/// runner.activate("index").await?;
/// assert!(runner.execute("index", json!({})).await.success);
/// assert!(runner.deactivate("index").await);
/// assert_eq!(runner.activate("indx").await.unwrap_err().error_type, "ActivationError");
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct ToolRunner {
    plan: PlanHandle,
    /// Immediate tools that were activated or called: a plan knows nothing of them.
    immediate: Mutex<BTreeSet<ToolName>>,
}

impl ToolRunner {
    /// A runner over a plan.
    pub fn new(plan: PlanHandle) -> Self {
        Self { plan, immediate: Mutex::default() }
    }

    /// The plan.
    pub fn plan(&self) -> &PlanHandle {
        &self.plan
    }

    /// What is known of the plan's tools, or of another registry's, without activating any.
    pub fn discover(&self, registry: Option<&ToolRegistry>) -> Vec<ToolDescriptor> {
        match registry {
            Some(registry) => registry.snapshot().descriptors().cloned().collect(),
            None => self.plan.tools().descriptors().cloned().collect(),
        }
    }

    /// Activates a tool.
    ///
    /// # Errors
    ///
    /// An `ActivationError` with the name as it was given, also when there is no such tool.
    ///
    /// # Cancel safety
    ///
    /// As [`PlanHandle::activate`].
    pub async fn activate(&self, name: &str) -> Result<(), ToolError> {
        let activated = self.plan.activate(name).await;
        activated.map_err(|error| ToolError::activation(name, error.to_string()))?;
        self.note(name);
        Ok(())
    }

    /// Executes a tool. Always a result: what [`PlanHandle::execute`] gives as an error has its
    /// text for a model in `error` and its code in the metadata. The text for an operator is in the
    /// trace.
    ///
    /// # Cancel safety
    ///
    /// As there.
    pub async fn execute(&self, name: &str, input: Value) -> ToolResult {
        let began = Instant::now();
        let mut called = Called { runner: self, name, refused: false };
        let executed = self.plan.execute(name, input).await;
        called.refused = executed.is_err();
        executed.unwrap_or_else(|error| {
            let took = began.elapsed();
            let mut result = ToolResult::failed(error.code(), error.told());
            result.duration_ms = took.as_secs_f64() * 1000.0;
            result
        })
    }

    /// Deactivates a tool; true if it was active, or is an immediate one that was activated or
    /// called.
    ///
    /// # Cancel safety
    ///
    /// As [`PlanHandle::deactivate`].
    pub async fn deactivate(&self, name: &str) -> bool {
        let was_noted = self.forget(name) && self.plan.end_reason().is_none();
        self.plan.deactivate(name).await || was_noted
    }

    fn forget(&self, name: &str) -> bool {
        let mut immediate = lock(&self.immediate);
        let known = self.plan.scope.resolve(name).ok().map(|tool| tool.descriptor.name.clone());
        let stands_for = |noted: &&ToolName| texts(noted).iter().any(|text| **text == *name);
        // It may be gone by now.
        let known = known.or_else(|| immediate.iter().find(stands_for).cloned());
        known.is_some_and(|name| immediate.remove(&name))
    }

    fn note(&self, name: &str) {
        if let Ok(tool) = self.plan.scope.resolve(name) {
            if tool.immediate.is_some() {
                lock(&self.immediate).insert(tool.descriptor.name.clone());
            }
        }
    }
}

/// A call under way. An immediate tool was used unless the call was refused; one that is dropped
/// half-way may have come that far.
struct Called<'a> {
    runner: &'a ToolRunner,
    name: &'a str,
    refused: bool,
}

impl Drop for Called<'_> {
    fn drop(&mut self) {
        if !self.refused {
            self.runner.note(self.name);
        }
    }
}
