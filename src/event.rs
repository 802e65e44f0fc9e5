//! What happens, told while it happens.
//!
//! Nothing is made and nothing is copied while nobody listens: one relaxed load tells.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::broadcast::{Receiver, Sender, channel};

use crate::contain::contain;
use crate::context::PlanId;
use crate::error::EndReason;
use crate::sync::{Mutex, lock};
use crate::trace::{DeactivationRecord, ToolExecutionTrace};

/// How many events a subscriber of one plan may be behind.
const OF_A_PLAN: usize = 256;
/// How many events a subscriber of the runtime may be behind.
const OF_ALL: usize = 4096;

/// Something that happened in a plan.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ToolEvent {
    /// The plan; 0 is the runtime's root scope, and the runtime itself.
    pub plan_id: PlanId,
    /// The call within its plan, where it is about one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub call_id: Option<u64>,
    /// The tool or shared activation, where it is about one; of a call of an unknown tool, the name
    /// as the caller wrote it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What happened.
    #[serde(flatten)]
    pub kind: EventKind,
}

/// What happened.
///
/// Of one call: `Waiting` where it waits (also of a tool that is activated by hand, which is no
/// call and has only that), `Executing`, `Progress`, then `Finished`, once, refused
/// and abandoned calls too. Of one instance: `Activating`, then `Active` or `ActivationFailed`, and
/// after `Active` one `Deactivated`. Of a plan, last of all: `Ended`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum EventKind {
    /// An attempt to activate has begun.
    #[non_exhaustive]
    Activating {
        /// Which instance of it in this plan, from 1.
        generation: u32,
        /// Which attempt, from 1.
        attempt: u32,
    },
    /// The instance is there.
    #[non_exhaustive]
    Active {
        /// Which instance of it in this plan, from 1.
        generation: u32,
    },
    /// The attempt gave no instance.
    #[non_exhaustive]
    ActivationFailed {
        /// Why.
        error: String,
    },
    /// A call, or an activation, has to wait.
    #[non_exhaustive]
    Waiting {
        /// For what.
        on: Wait,
    },
    /// The tool runs.
    Executing,
    /// The tool says how far it is.
    Progress(Progress),
    /// The call is over: its trace. Serialised it stands under `trace`.
    Finished(#[serde(serialize_with = "under_trace")] Box<ToolExecutionTrace>),
    /// The instance was deactivated. Serialised the record stands under `deactivation`.
    Deactivated(#[serde(serialize_with = "under_deactivation")] DeactivationRecord),
    /// The plan has ended and everything of it is at rest. Nothing comes after this, save the end of
    /// a call that the hard end cut and whose task did not poll it in the 250 ms after that.
    #[non_exhaustive]
    Ended {
        /// Why.
        reason: EndReason,
    },
    /// All threads of the keeper are blocked: a tool blocks in `activate` or `deactivate`.
    KeeperBlocked,
    /// The subscriber was too slow: that many events are missing here.
    #[non_exhaustive]
    Lost {
        /// How many.
        count: u64,
    },
}

/// An event has a plan and a name of its own: each key stands once.
fn under_trace<S: Serializer>(
    trace: &ToolExecutionTrace,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let mut finished = serializer.serialize_struct("Finished", 1)?;
    finished.serialize_field("trace", trace)?;
    finished.end()
}

fn under_deactivation<S: Serializer>(
    record: &DeactivationRecord,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let mut deactivated = serializer.serialize_struct("Deactivated", 1)?;
    deactivated.serialize_field("deactivation", record)?;
    deactivated.end()
}

/// What a call, or an activation, waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Wait {
    /// A person's decision.
    Approval,
    /// Room under the plan's limit of calls at once.
    PlanPermit,
    /// Room under the tool's limit of calls at once.
    ToolPermit,
    /// Room under the source's limit of activations at once.
    SourcePermit,
}

/// How far a call is, as its tool says with
/// [`progress`](crate::ToolExecutionContext::progress).
///
/// # Examples
///
/// ```
/// use toolscope::Progress;
///
/// let third = Progress::new(3.0).of(10.0).message("page 3 of 10");
/// assert_eq!(third.total, Some(10.0));
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Progress {
    /// How much is done, in a unit of the tool's own.
    pub done: f64,
    /// How much there is to do, where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total: Option<f64>,
    /// In a few words, for a person.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

impl Progress {
    /// So much is done.
    pub fn new(done: f64) -> Self {
        Self { done, total: None, message: None }
    }

    /// Of so much.
    #[must_use]
    pub fn of(mut self, total: f64) -> Self {
        self.total = Some(total);
        self
    }

    /// Says in a few words what is being done.
    #[must_use]
    pub fn message(mut self, text: impl Into<String>) -> Self {
        self.message = Some(text.into());
        self
    }
}

// ===== EventStream =====

/// The events of a plan, or of all plans, from the moment of the subscription on.
///
/// A subscriber that is slow never holds up a call: it loses the oldest events (of a plan 256 are
/// kept for it, of a runtime 4,096), and [`EventKind::Lost`] tells how many.
///
/// # Examples
///
/// ```
/// use serde_json::json;
/// use toolscope::test_util::Probe;
/// use toolscope::{EventKind, PlanOptions, ToolRuntime};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let runtime = ToolRuntime::builder().tool(Probe::new("search").tool()).build().await?;
/// let plan = runtime.begin(PlanOptions::new())?;
/// let mut events = plan.subscribe();
/// plan.execute("search", json!({})).await?;
/// plan.finish().await;
///
/// let mut finished = 0;
/// while let Some(event) = events.next().await {
///     match event.kind {
///         EventKind::Finished(trace) => finished += u32::from(trace.success()),
///         EventKind::Lost { count, .. } => eprintln!("{count} events are missing"),
///         _ => {}
///     }
/// }
/// assert_eq!(finished, 1);
/// # Ok(()) }
/// ```
pub struct EventStream {
    /// Whose: 0 for all.
    of: PlanId,
    receiver: Receiver<ToolEvent>,
    heard: Arc<AtomicUsize>,
}

impl EventStream {
    /// The next event; `None` after the plan's last, or once the runtime is gone.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: no event is lost.
    pub async fn next(&mut self) -> Option<ToolEvent> {
        match self.receiver.recv().await {
            Ok(event) => Some(event),
            Err(RecvError::Lagged(count)) => Some(lost(self.of, count)),
            Err(RecvError::Closed) => None,
        }
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        self.heard.fetch_sub(1, Relaxed);
    }
}

impl fmt::Debug for EventStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventStream").field("waiting", &self.receiver.len()).finish_non_exhaustive()
    }
}

fn lost(plan_id: PlanId, count: u64) -> ToolEvent {
    let kind = EventKind::Lost { count };
    ToolEvent { plan_id, call_id: None, name: None, kind }
}

// ===== who is told =====

/// The subscribers of a runtime, and the count of all there are.
#[derive(Default)]
pub(crate) struct Subscribers {
    /// Subscribers of the runtime and of its plans.
    heard: Arc<AtomicUsize>,
    all: Mutex<Option<Sender<ToolEvent>>>,
}

impl Subscribers {
    /// Whether anybody listens, to anything.
    pub(crate) fn is_heard(&self) -> bool {
        self.heard.load(Relaxed) != 0
    }

    pub(crate) fn subscribe(&self) -> EventStream {
        let receiver = {
            let mut all = lock(&self.all);
            all.get_or_insert_with(|| channel(OF_ALL).0).subscribe()
        };
        self.counted(PlanId::new(0), receiver)
    }

    /// To one plan, whose channel is made here if there is none.
    pub(crate) fn subscribe_to(
        &self,
        plan: PlanId,
        events: &mut Option<Sender<ToolEvent>>,
    ) -> EventStream {
        self.counted(plan, events.get_or_insert_with(|| channel(OF_A_PLAN).0).subscribe())
    }

    fn counted(&self, of: PlanId, receiver: Receiver<ToolEvent>) -> EventStream {
        self.heard.fetch_add(1, Relaxed);
        EventStream { of, receiver, heard: Arc::clone(&self.heard) }
    }

    pub(crate) fn tell(&self, plan: Option<Sender<ToolEvent>>, event: &ToolEvent) {
        let all = lock(&self.all).clone();
        for sender in plan.into_iter().chain(all) {
            // An error says that nobody listens any more, a panic that a waker has one.
            drop(contain(|| sender.send(event.clone()).is_ok()));
        }
    }

    /// Tells of the runtime itself.
    pub(crate) fn tell_all(&self, kind: EventKind) {
        if self.is_heard() {
            let plan_id = PlanId::new(0);
            self.tell(None, &ToolEvent { plan_id, call_id: None, name: None, kind });
        }
    }

    /// The runtime is gone: its streams are over.
    pub(crate) fn end(&self) {
        let all = lock(&self.all).take();
        drop(all);
    }
}
