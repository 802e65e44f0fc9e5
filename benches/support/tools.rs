//! The tool of the baseline: it adds two numbers and gives `{"sum": n}`. Both have a schema.

use std::sync::Arc;

use serde_json::{Value, json};
use toolscope::{
    ActivationContext, Tool, ToolCapability, ToolDescriptor, ToolExecutionContext, ToolFailure,
    ToolInstance, ToolOutput, async_trait,
};

/// The instance; it yields first if it is told to.
pub(crate) struct Add {
    pub(crate) yields: bool,
}

#[async_trait]
impl ToolInstance for Add {
    async fn execute(
        &self,
        _: &ToolExecutionContext,
        input: &Value,
    ) -> Result<ToolOutput, ToolFailure> {
        if self.yields {
            tokio::task::yield_now().await;
        }
        let number = |key: &str| input.get(key).and_then(Value::as_i64).unwrap_or_default();
        Ok(ToolOutput::new(json!({"sum": number("a") + number("b")})))
    }
}

/// The tool: immediate, and ready at once, where its fields do not say otherwise.
pub(crate) struct AddTool {
    pub(crate) descriptor: ToolDescriptor,
    pub(crate) managed: bool,
    pub(crate) yields_when_activated: bool,
    pub(crate) yields_when_executed: bool,
}

impl AddTool {
    pub(crate) fn new(name: &str) -> Self {
        let name = name.parse().expect("a bench names its tools well");
        Self {
            descriptor: ToolDescriptor::new(name)
                .capability(ToolCapability::read_only())
                .input_schema(json!({
                    "type": "object",
                    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                    "required": ["a", "b"],
                    "additionalProperties": false,
                }))
                .output_schema(json!({
                    "type": "object",
                    "properties": {"sum": {"type": "integer"}},
                    "required": ["sum"],
                })),
            managed: false,
            yields_when_activated: false,
            yields_when_executed: false,
        }
    }

    pub(crate) fn instance(&self) -> Arc<dyn ToolInstance> {
        Arc::new(Add { yields: self.yields_when_executed })
    }
}

#[async_trait]
impl Tool for AddTool {
    fn descriptor(&self) -> &ToolDescriptor {
        &self.descriptor
    }

    fn immediate(&self) -> Option<Arc<dyn ToolInstance>> {
        (!self.managed).then(|| self.instance())
    }

    async fn activate(&self, _: &ActivationContext) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        if self.yields_when_activated {
            tokio::task::yield_now().await;
        }
        Ok(self.instance())
    }
}
