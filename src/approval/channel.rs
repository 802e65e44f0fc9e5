//! Approvals by a channel, for whoever holds its other end.

use async_trait::async_trait;
use tokio::sync::{mpsc, oneshot};

use crate::approval::{ApprovalRequest, Approver, Decision};
use crate::tool::ToolFailure;

/// An approver that hands each request to whoever holds the other end: a user interface, a chat, a
/// queue.
///
/// # Examples
///
/// ```
/// use toolscope::{ChannelApprover, Decision, ToolRuntime};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), toolscope::ToolError> {
/// let (approver, mut requests) = ChannelApprover::new();
/// let runtime = ToolRuntime::builder().approver(approver).build().await?;
/// std::thread::spawn(move || {
///     while let Some(pending) = requests.blocking_recv() {
///         println!("may {} run?", pending.request().tool);
///         pending.answer(Decision::Once);
///     }
/// });
/// # drop(runtime); Ok(()) }
/// ```
#[derive(Debug)]
pub struct ChannelApprover {
    requests: mpsc::UnboundedSender<PendingApproval>,
}

impl ChannelApprover {
    /// The approver, and the end at which the requests arrive. Once that end is dropped every
    /// request is denied.
    pub fn new() -> (Self, mpsc::UnboundedReceiver<PendingApproval>) {
        let (requests, arrive) = mpsc::unbounded_channel();
        (Self { requests }, arrive)
    }
}

#[async_trait]
impl Approver for ChannelApprover {
    async fn decide(&self, request: &ApprovalRequest) -> Result<Decision, ToolFailure> {
        let (answer, answered) = oneshot::channel();
        let pending = PendingApproval { request: request.clone(), answer };
        if self.requests.send(pending).is_err() {
            return Ok(Decision::deny("nobody is there to ask"));
        }
        Ok(answered.await.unwrap_or_else(|_| Decision::deny("it was left unanswered")))
    }
}

/// A request that waits for its answer. Dropping it denies.
#[derive(Debug)]
pub struct PendingApproval {
    request: ApprovalRequest,
    answer: oneshot::Sender<Decision>,
}

impl PendingApproval {
    /// What is to be approved.
    pub fn request(&self) -> &ApprovalRequest {
        &self.request
    }

    /// Whether nobody waits any more: the call was cancelled, or the wait is over.
    pub fn is_stale(&self) -> bool {
        self.answer.is_closed()
    }

    /// Waits until nobody waits any more, so that a question can be taken off a screen.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn stale(&mut self) {
        self.answer.closed().await;
    }

    /// Answers; false if nobody waits any more.
    pub fn answer(self, decision: Decision) -> bool {
        self.answer.send(decision).is_ok()
    }
}
