//! What interrupts a call: its token, its deadline, the end of its plan.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::record::CallRecord;
use super::run::{Broken, without_output};
use super::{Call, Stop};
use crate::context::ToolExecutionContext;
use crate::error::{CallError, ToolCancelled};
use crate::registry::ToolEntry;
use crate::scope::PlanScope;
use crate::sync::lock;

pub(super) struct Interrupts<'a> {
    pub(super) scope: &'a Arc<PlanScope>,
    pub(super) call: u64,
    token: Option<&'a CancellationToken>,
    limit: Option<Duration>,
    /// When the call's time began to count.
    pub(super) began: Instant,
}

impl<'a> Interrupts<'a> {
    /// The shortest limit wins: the call's own, the plan's, the tool's.
    #[inline]
    pub(super) fn of(call: &'a Call<'_>, tool: &ToolEntry, record: &CallRecord<'_>) -> Self {
        let limit = least(call.options.timeout, call.scope.settings().call_timeout);
        Self {
            scope: call.scope,
            call: record.call,
            token: call.options.token.as_ref(),
            limit: least(limit, tool.descriptor.call_timeout),
            began: record.began,
        }
    }

    /// For what is no call.
    pub(super) fn none(scope: &'a Arc<PlanScope>, number: u64) -> Self {
        Self { scope, call: number, token: None, limit: None, began: Instant::now() }
    }

    pub(super) fn is_none(&self) -> bool {
        self.token.is_none() && self.limit.is_none()
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.scope.gate.is_closed() || self.token.is_some_and(CancellationToken::is_cancelled)
    }

    /// What a call returns that stops because it was asked to: the plan's end goes before the
    /// call's own token, which for a nested call is cancelled by that very end.
    pub(super) fn cancelled_error(&self) -> Option<CallError> {
        if self.scope.gate.is_closed() {
            return Some(self.scope.ended_error());
        }
        let cancelled = self.token.is_some_and(CancellationToken::is_cancelled);
        cancelled.then_some(CallError::Cancelled(ToolCancelled))
    }

    /// What is left of the call's time.
    pub(super) fn left(&self) -> Option<Duration> {
        self.limit.map(|limit| limit.saturating_sub(self.began.elapsed()))
    }

    /// The deadline. It stands still while a call that this one made waits for an approval.
    pub(super) async fn deadline(&self) {
        let Some(limit) = self.limit else {
            return std::future::pending().await;
        };
        let mut paused = Duration::ZERO;
        loop {
            let left = limit.saturating_add(paused).saturating_sub(self.began.elapsed());
            if left.is_zero() {
                return;
            }
            self.scope.core.sleep(left).await;
            // Whoever pauses a call makes its state.
            let state = lock(&self.scope.log).known_state(self.call);
            if let Some(state) = state {
                paused = state.pause.over().await;
            }
        }
    }

    /// Waits for what stops a call whose tool does not run.
    pub(super) async fn before(&self, tool: &ToolEntry) -> Stop {
        tokio::select! {
            () = self.stop() => stopped(self),
            () = self.deadline() => {
                without_output(Broken::Deadline(self.limit.unwrap_or_default()), tool, self)
            }
        }
    }

    async fn cancelled(&self) {
        match self.token {
            Some(token) => token.cancelled().await,
            None => std::future::pending().await,
        }
    }

    /// Before the tool runs: the call's token, or the end of the plan. There is nothing to be given
    /// a grace.
    pub(super) async fn stop(&self) {
        tokio::select! { () = self.cancelled() => {}, () = self.scope.ended() => {} }
    }

    /// While the tool runs: the deadline at once, the token after the tool had its grace. The
    /// plan's own end comes by the lease.
    pub(super) async fn interrupt(&self, ctx: &ToolExecutionContext) -> Broken {
        let cancelled = async {
            self.cancelled().await;
            ctx.cancel();
            self.scope.core.sleep(self.scope.settings().deadlines.grace).await;
        };
        tokio::select! {
            () = self.deadline() => Broken::Deadline(self.limit.unwrap_or_default()),
            () = cancelled => Broken::Cancelled,
        }
    }
}

/// The outcome of a call that [`Interrupts::stop`] stopped.
pub(super) fn stopped(interrupts: &Interrupts<'_>) -> Stop {
    interrupts.cancelled_error().unwrap_or_else(|| interrupts.scope.ended_error()).into()
}

fn least(one: Option<Duration>, other: Option<Duration>) -> Option<Duration> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}
