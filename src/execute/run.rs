//! Room 9: the tool runs in the caller's task, raced with what may interrupt it.

use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use serde_json::Value;

use super::interrupt::Interrupts;
use super::{Stop, not_activated, refused_error};
use crate::contain::{BoxFuture, Contained, drop_contained};
use crate::context::ToolExecutionContext;
use crate::error::{CallError, OutcomeCode, ToolCancelled};
use crate::lease::Lease;
use crate::obligation::{Active, Held};
use crate::registry::ToolEntry;
use crate::slot::Refused;
use crate::tool::{FailureKind, ToolFailure, ToolOutput};

/// What a tool gave.
pub(super) type Given = Option<Result<ToolOutput, ToolFailure>>;

/// Why a tool gave nothing.
pub(super) enum Broken {
    Panicked(String),
    /// The call's deadline passed.
    Deadline(Duration),
    /// The call's token was cancelled and its grace is over.
    Cancelled,
    /// The instance was retired while the call was not being polled, and its drain is over.
    Retired {
        /// Because another call found it broken.
        tainted: bool,
    },
}

/// Runs a managed instance in the caller's task, under its own lease. What it gives goes to its
/// place.
pub(super) async fn leased(
    active: &Active,
    mut lease: Lease<'_>,
    ctx: &ToolExecutionContext,
    input: &Value,
    interrupts: &Interrupts<'_>,
    given: &mut Given,
) -> Result<(), Box<Broken>> {
    let Held::Tool(instance) = &*active.held else {
        unreachable!("BUG: a tool's slot holds a tool");
    };
    let work = Contained::new(|| instance.execute(ctx, input));
    let work = pin!(raced(work, ctx, interrupts, given));
    let ended = lease.run(work).await;
    ended.unwrap_or_else(|| Err(Box::new(Broken::Retired { tainted: active.is_tainted() })))
}

/// Races the tool against the deadline and the token. Neither is looked at before the tool is
/// pending for the first time.
pub(super) async fn raced<'a>(
    mut work: Contained<
        'a,
        Result<ToolOutput, ToolFailure>,
        impl FnOnce() -> BoxFuture<'a, Result<ToolOutput, ToolFailure>>,
    >,
    ctx: &ToolExecutionContext,
    interrupts: &Interrupts<'_>,
    given: &mut Given,
) -> Result<(), Box<Broken>> {
    let mut interrupt: Option<BoxFuture<'_, Broken>> = None;
    std::future::poll_fn(|cx| {
        match work.poll_into(given, cx) {
            Ok(true) => return Poll::Ready(Ok(())),
            Ok(false) => {}
            Err(text) => {
                drop_contained(given.take());
                return Poll::Ready(Err(Box::new(Broken::Panicked(text))));
            }
        }
        if interrupts.is_none() {
            return Poll::Pending;
        }
        // Boxed: few calls have one, and it is larger than all the rest.
        let interrupt = interrupt.get_or_insert_with(|| Box::pin(interrupts.interrupt(ctx)));
        interrupt.as_mut().poll(cx).map(|broken| Err(Box::new(broken)))
    })
    .await
}

/// The outcome of a call whose tool gave a failure.
pub(super) fn failure(given: Given, interrupts: &Interrupts<'_>) -> Stop {
    let Some(Err(failure)) = given else {
        unreachable!("BUG: there is a failure");
    };
    match (failure.kind(), interrupts.cancelled_error()) {
        (FailureKind::Cancelled, Some(error)) => error.into(),
        // Nobody asked it to stop.
        (FailureKind::Cancelled, None) => {
            Stop::failed(OutcomeCode::Execution, failure.message().to_owned())
        }
        _ => Stop::failed(failure.code(), failure.message().to_owned()),
    }
}

/// The outcome of a call whose tool gave nothing.
pub(super) fn without_output(
    broken: Broken,
    tool: &ToolEntry,
    interrupts: &Interrupts<'_>,
) -> Stop {
    let cancelled = interrupts.cancelled_error();
    match broken {
        Broken::Panicked(text) => {
            Stop::failed(OutcomeCode::Panic, format!("the tool panicked: {text}"))
        }
        Broken::Deadline(limit) => {
            let message = format!("`{}` did not finish within {limit:?}", tool.descriptor.name);
            Stop::failed(OutcomeCode::Timeout, message)
        }
        Broken::Cancelled => cancelled.unwrap_or(CallError::Cancelled(ToolCancelled)).into(),
        Broken::Retired { tainted } => {
            let error = || {
                if tainted {
                    let reason =
                        "another call found its instance broken; the next call has a new one";
                    return not_activated(tool, reason.to_owned());
                }
                refused_error(tool, Refused::Deactivated)
            };
            cancelled.unwrap_or_else(error).into()
        }
    }
}
