//! The calls of one turn of a model.

use std::fmt;

use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::CallError;
use crate::options::CallOptions;
use crate::plan::PlanHandle;
use crate::tool::ToolResult;

/// One call that a model asked for.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ToolCall {
    /// The id that the model gave it, to be given back with the result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// The tool, by any text that [`PlanHandle::execute`] takes.
    pub name: String,
    /// The input.
    pub arguments: Value,
}

impl fmt::Debug for ToolCall {
    /// Without the input: a log must not have it by accident.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ToolCall")
            .field("id", &self.id)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl ToolCall {
    /// A call without an id.
    pub fn new(name: impl Into<String>, arguments: Value) -> Self {
        Self { id: None, name: name.into(), arguments }
    }

    /// The id that the model gave it.
    #[must_use]
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.id = Some(id.into());
        self
    }
}

/// Readers together, a writer alone, results in the order of the calls.
pub(crate) async fn execute(
    plan: &PlanHandle,
    calls: &[ToolCall],
) -> Vec<Result<ToolResult, CallError>> {
    let run = async |call: &ToolCall| {
        let options = CallOptions::new();
        let options = match &call.id {
            Some(id) => options.id(id.as_str()),
            None => options,
        };
        plan.execute_with(&call.name, &call.arguments, options).await
    };
    // What is refused for its name waits for nobody, and nobody waits for it.
    let reads = |call: &ToolCall| {
        plan.scope.resolve(&call.name).map_or(true, |tool| tool.descriptor.capability.read_only)
    };
    let mut results = Vec::with_capacity(calls.len());
    for group in calls.chunk_by(|one, next| reads(one) && reads(next)) {
        results.extend(join_all(group.iter().map(run)).await);
    }
    results
}
