//! Room 5: asking the plan's approver, while nobody's time goes by.

use std::sync::Arc;

use serde_json::Value;
use tokio::time::Instant;

use super::interrupt::{Interrupts, stopped};
use super::{Frame, Stop, named};
use crate::approval::{
    ApprovalRequest, Asked, Decision, Fingerprint, decided, fingerprint, hexadecimal,
};
use crate::context::CallState;
use crate::error::ToolRuntimeError;
use crate::event::{EventKind, Wait};
use crate::registry::ToolEntry;
use crate::scope::PlanScope;
use crate::sync::lock;

/// For which call an approval is asked.
pub(super) struct Asker<'a> {
    pub(super) scope: &'a Arc<PlanScope>,
    pub(super) tool: &'a ToolEntry,
    pub(super) call: u64,
    pub(super) above: Option<&'a Arc<Frame>>,
}

/// Asks the plan's approver, and waits: bounded, and at nobody's cost.
pub(super) async fn ask(
    asker: &Asker<'_>,
    reason: &str,
    input: &Value,
    granted: Option<Fingerprint>,
    interrupts: &mut Interrupts<'_>,
) -> Result<Asked, Stop> {
    let Asker { scope, tool, call, above } = *asker;
    let (descriptor, settings) = (&tool.descriptor, scope.settings());
    let definition = *tool.digest();
    let wanted = fingerprint(&definition, input);
    let known = lock(&scope.log).approvals().covers(&wanted, &definition, granted);
    if let Some(approved) = known {
        return Ok(Asked::Approved(approved));
    }
    let Some(approver) = &settings.approver else {
        let (tool, reason) = (descriptor.name.clone(), reason.to_owned());
        return Err(ToolRuntimeError::ApprovalRequired { tool, reason }.into());
    };
    let request = ApprovalRequest {
        plan_id: scope.id,
        call_id: call,
        tool: descriptor.name.clone(),
        description: descriptor.description.clone(),
        capability: descriptor.capability,
        reason: reason.to_owned(),
        input: input.clone(),
        fingerprint: hexadecimal(&wanted),
        metadata: settings.metadata.clone(),
    };
    scope.tell(Some(call), || (Some(named(tool)), EventKind::Waiting { on: Wait::Approval }));
    let decision = {
        let _paused = Paused::begin(scope, above);
        let since = Instant::now();
        let decision = tokio::select! {
            biased;
            decision = approver.ask(&request) => decision,
            () = interrupts.stop() => return Err(stopped(interrupts)),
            () = scope.core.sleep(settings.approval_wait) => {
                let wait = settings.approval_wait;
                Ok(Decision::deny(format!("nobody answered within {wait:?}")))
            }
        };
        interrupts.began += since.elapsed();
        decision.map_err(|problem| denied(tool, problem, true))?
    };
    let (answer, remembered) = decided(decision, wanted, definition);
    if let Some(fingerprint) = remembered {
        lock(&scope.log).approvals().add(fingerprint);
    }
    Ok(answer)
}

/// While it lives the time of the calls above does not count, nor of those that began the plan.
struct Paused(Vec<Arc<CallState>>);

impl Paused {
    fn begin(scope: &PlanScope, above: Option<&Arc<Frame>>) -> Self {
        let mut states = Vec::new();
        let (mut plan, mut above) = (Some(scope), above);
        while let Some(scope) = plan {
            for frame in above.into_iter().flat_map(|frame| frame.all()) {
                states.push(lock(&scope.log).state(frame.call, CallState::new));
            }
            (plan, above) = (scope.parent.as_deref(), scope.settings().begun_by.as_ref());
        }
        for state in &states {
            state.pause.begin();
        }
        Self(states)
    }
}

impl Drop for Paused {
    fn drop(&mut self) {
        for state in &self.0 {
            state.pause.end();
        }
    }
}

pub(super) fn denied(tool: &ToolEntry, reason: String, broken: bool) -> ToolRuntimeError {
    ToolRuntimeError::ApprovalDenied { tool: tool.descriptor.name.clone(), reason, broken }
}
