//! What the layers, or an approver, made of a call.

use serde_json::Value;

use super::interrupt::Interrupts;
use super::run::Given;
use super::{Call, Stop, named};
use crate::error::{OutcomeCode, ToolRuntimeError};
use crate::layer::{Entered, LayerCall};
use crate::registry::ToolEntry;
use crate::tool::ToolOutput;

/// See the module. Few calls have one.
#[derive(Default)]
pub(super) struct Layered {
    /// The input in the place of the caller's.
    pub(super) input: Option<Value>,
    pub(super) answer: Option<ToolOutput>,
    passed: usize,
}

impl Layered {
    /// The input in the place of the caller's, where there is one.
    pub(super) fn input(layered: Option<&Self>) -> Option<&Value> {
        layered?.input.as_ref()
    }

    pub(super) async fn enter(
        call: &Call<'_>,
        tool: &ToolEntry,
        input: &Value,
        interrupts: &Interrupts<'_>,
    ) -> Result<Box<Self>, Stop> {
        let facts = facts(call, tool, input, interrupts.call);
        let entered = tokio::select! {
            biased;
            entered = call.scope.core.layers.enter(&facts) => entered,
            stop = interrupts.before(tool) => return Err(stop),
        };
        let entered = entered.map_err(|(reason, broken)| {
            let tool = named(tool);
            ToolRuntimeError::AccessDenied { tool, reason, broken }
        })?;
        let Entered { passed, input, answer } = entered;
        Ok(Box::new(Self { input, answer, passed }))
    }

    pub(super) async fn leave(
        &self,
        call: &Call<'_>,
        tool: &ToolEntry,
        input: &Value,
        interrupts: &Interrupts<'_>,
        given: &mut Given,
    ) -> Result<(), Stop> {
        if self.passed == 0 {
            return Ok(());
        }
        let Some(taken) = given.take() else {
            return Ok(());
        };
        let facts = facts(call, tool, input, interrupts.call);
        let left = tokio::select! {
            biased;
            left = call.scope.core.layers.leave(&facts, self.passed, taken) => left,
            stop = interrupts.before(tool) => return Err(stop),
        };
        *given =
            Some(left.map_err(|text| Stop::unsaid(OutcomeCode::Panic, "a layer panicked", text))?);
        Ok(())
    }
}

fn facts<'a>(call: &Call<'a>, tool: &'a ToolEntry, input: &'a Value, number: u64) -> LayerCall<'a> {
    LayerCall {
        plan_id: call.scope.id,
        call_id: number,
        parent_call_id: call.above.as_ref().map(|frame| frame.call),
        tool: &tool.descriptor,
        input,
        metadata: &call.scope.settings().metadata,
    }
}
