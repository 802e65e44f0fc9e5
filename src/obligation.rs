//! What the runtime owes for an activation, as a value; and the two jobs that hold one.
//!
//! # Invariants
//!
//! 1. An [`Owed`] exists before the first side effect, and the books (the slot machine) are lowered
//!    only when it settles.
//! 2. It settles itself, even in `Drop`: with an instance in hand whose `deactivate` was not
//!    called, the job goes to a last-resort thread; if that fails too, the instance counts as lost.
//! 3. `deactivate` is called by the one holder of the [`Owed`] that took the instance out of its
//!    slot.
//! 4. What an activation was handed is released after it has settled, never before.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::contain::{BoxFuture, Contained, Foreign, Panicked};
use crate::context::{ActivationContext, DeactivationContext};
use crate::error::{ActivationError, ActivationPhase};
use crate::event::{EventKind, Wait};
use crate::fault::fault;
use crate::keeper::{Begin, Job, last_resort};
use crate::lease::Gate;
use crate::limit::{MOST_ERROR_TEXT, cut_plain};
use crate::registry::{Source, ToolEntry};
use crate::scope::PlanScope;
use crate::slot::{Refused, SlotId, Why};
use crate::sync::atomic::{AtomicBool, Ordering::Relaxed};
use crate::sync::{Mutex, lock};
use crate::throttle::{ActivationLimit, ActivationPermit};
use crate::tool::{SharedActivation, ToolFailure, ToolInstance};
use crate::trace::DeactivationOutcome;

/// What an attempt tells all who wait for it.
pub(crate) type Verdict = Option<Result<(), Refused>>;

/// An activated tool or shared activation.
pub(crate) enum Held {
    Tool(Arc<dyn ToolInstance>),
    Shared { any: Arc<dyn Any + Send + Sync>, shared: Arc<dyn SharedActivation> },
}

/// What an activation made, and whether its deactivation must never be polled by the task that asks
/// for it.
pub(crate) struct Made {
    held: Held,
    /// Of the tool's definition.
    version: u32,
    off_thread: bool,
}

/// How an instance comes to be.
pub(crate) enum Make {
    Tool(Arc<ToolEntry>),
    Shared(Box<dyn FnOnce(ActivationContext) -> BoxFuture<'static, Result<Held, NotMade>> + Send>),
}

/// Why an activation gave nothing.
pub(crate) enum NotMade {
    Failed(ToolFailure),
    Panicked(String),
}

impl Make {
    /// The source that limits how many of its tools are activated at once.
    fn is_off_thread(&self) -> bool {
        matches!(self, Self::Tool(entry) if entry.off_thread)
    }

    fn source(&self) -> Option<&Source> {
        match self {
            Self::Tool(entry) => entry.source.as_deref(),
            Self::Shared(_) => None,
        }
    }

    async fn run(self, ctx: ActivationContext) -> Result<Made, NotMade> {
        match self {
            Self::Tool(entry) => {
                let instance = given(Contained::new(|| entry.tool.activate(&ctx))).await?;
                let (version, off_thread) = (entry.version, entry.off_thread);
                Ok(Made { held: Held::Tool(instance), version, off_thread })
            }
            Self::Shared(make) => {
                Ok(Made { held: make(ctx).await?, version: 0, off_thread: false })
            }
        }
    }
}

/// What a contained activation gave. If only the drop of its future panicked there is an instance,
/// and it must not be lost.
pub(crate) async fn given<'a, T>(
    work: Contained<
        'a,
        Result<T, ToolFailure>,
        impl FnOnce() -> BoxFuture<'a, Result<T, ToolFailure>>,
    >,
) -> Result<T, NotMade> {
    match work.await {
        Ok(made) | Err(Panicked { value: Some(made), .. }) => made.map_err(NotMade::Failed),
        Err(Panicked { text, value: None }) => Err(NotMade::Panicked(text)),
    }
}

/// One attempt to activate, and later the instance: what it was handed, and what undoes it
/// half-way.
pub(crate) struct Attempt {
    /// `None` once settled: nothing is handed out then.
    holds: Mutex<Option<Vec<Hold>>>,
    rollback: Mutex<Vec<Foreign<Deferred>>>,
}

/// Work that undoes a part of an activation.
pub(crate) type Deferred = Box<dyn FnOnce() -> BoxFuture<'static, ()> + Send>;

impl Attempt {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { holds: Mutex::new(Some(Vec::new())), rollback: Mutex::new(Vec::new()) })
    }

    /// Keeps a shared activation alive until this attempt, or its instance, has settled.
    pub(crate) fn hold(&self, hold: Hold) -> bool {
        let mut spare = None;
        let kept = match &mut *lock(&self.holds) {
            Some(holds) if holds.iter().any(|held| held.is_same(&hold)) => {
                spare = Some(hold);
                true
            }
            Some(holds) => {
                holds.push(hold);
                true
            }
            None => {
                spare = Some(hold);
                false
            }
        };
        drop(spare);
        kept
    }

    pub(crate) fn defer(&self, work: Deferred) {
        lock(&self.rollback).push(Foreign::new(work));
    }

    fn release(&self) {
        let holds = lock(&self.holds).take();
        drop(holds);
    }

    /// Runs what was deferred, the last first, each contained and under the limit of a
    /// deactivation.
    async fn roll_back(&self, scope: &PlanScope) {
        loop {
            let next = lock(&self.rollback).pop();
            let Some(work) = next else { return };
            tokio::select! {
                biased;
                undone = Contained::new(work.into_inner()) => drop(undone),
                () = scope.deactivation_limit() => {}
            }
        }
    }

    /// Forgets what was deferred: the activation went well.
    fn keep(&self) {
        let deferred = std::mem::take(&mut *lock(&self.rollback));
        drop(deferred);
    }
}

/// A dependent's claim on a shared activation. Its drop may be what lets that one be deactivated.
pub(crate) struct Hold {
    scope: Arc<PlanScope>,
    slot: SlotId,
}

impl Hold {
    /// The slot machine has counted the dependent.
    pub(crate) fn new(scope: &Arc<PlanScope>, slot: SlotId) -> Self {
        Self { scope: Arc::clone(scope), slot }
    }

    fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.scope, &other.scope) && self.slot == other.slot
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.scope.release(self.slot);
    }
}

/// An instance behind the gate of its executions.
pub(crate) struct Active {
    pub(crate) held: Foreign<Held>,
    pub(crate) gate: Gate,
    pub(crate) slot: SlotId,
    pub(crate) generation: u32,
    /// Of the tool's definition.
    pub(crate) version: u32,
    pub(crate) attempt: Arc<Attempt>,
    off_thread: bool,
    tainted: AtomicBool,
}

impl Active {
    pub(crate) fn new(made: Made, slot: SlotId, generation: u32, attempt: &Arc<Attempt>) -> Self {
        let Made { held, version, off_thread } = made;
        let (held, gate, attempt) = (Foreign::new(held), Gate::new(), Arc::clone(attempt));
        let tainted = AtomicBool::new(false);
        Self { held, gate, slot, generation, version, attempt, off_thread, tainted }
    }

    /// Whether a call found it broken.
    pub(crate) fn is_tainted(&self) -> bool {
        self.tainted.load(Relaxed)
    }
}

/// One obligation of a plan. See the module.
pub(crate) struct Owed {
    scope: Arc<PlanScope>,
    slot: SlotId,
    stage: Stage,
    /// This is the last-resort thread's.
    last_chance: bool,
}

enum Stage {
    /// `activate` has not returned.
    Activating {
        publish: watch::Sender<Verdict>,
        attempt: Arc<Attempt>,
    },
    /// `deactivate` has not been called.
    Holding {
        active: Arc<Active>,
        why: Why,
    },
    /// `deactivate` has been called and has not returned.
    Calling {
        active: Arc<Active>,
        since: Instant,
        overrun: bool,
    },
    Settled,
}

impl Owed {
    /// For a slot that has just become `Activating`.
    pub(crate) fn activation(
        scope: &Arc<PlanScope>,
        slot: SlotId,
        publish: watch::Sender<Verdict>,
    ) -> Self {
        let stage = Stage::Activating { publish, attempt: Attempt::new() };
        Self { scope: Arc::clone(scope), slot, stage, last_chance: false }
    }

    /// For an instance that has just been taken out of its slot.
    pub(crate) fn deactivation(scope: &Arc<PlanScope>, active: Arc<Active>, why: Why) -> Self {
        let slot = active.slot;
        active.tainted.store(matches!(why, Why::Tainted(_)), Relaxed);
        Self {
            scope: Arc::clone(scope),
            slot,
            stage: Stage::Holding { active, why },
            last_chance: false,
        }
    }

    /// The job that pays a deactivation, and how it may begin.
    pub(crate) fn into_job(self, begin: Begin) -> (Job, Begin) {
        let off_thread = matches!(&self.stage, Stage::Holding { active, .. } if active.off_thread);
        // The one that asks for it must not poll what may block.
        (Box::pin(deactivate(self)), if off_thread { Begin::There } else { begin })
    }

    /// Puts the instance in place; true if the plan closed or the host asked meanwhile, so that it
    /// must go at once.
    fn commit(&mut self, made: Made) -> bool {
        let Stage::Activating { publish, attempt } =
            std::mem::replace(&mut self.stage, Stage::Settled)
        else {
            unreachable!("BUG: an activation is committed once");
        };
        // Told before anybody can have the instance, or take it out again.
        self.scope.tell_of(self.slot, |generation, _| EventKind::Active { generation });
        let doom = self.scope.commit(self.slot, made, &attempt);
        attempt.keep();
        match doom {
            Ok(()) => {
                publish.send_replace(Some(Ok(())));
                self.scope.tell_changed();
                false
            }
            Err((active, why)) => {
                let refused = match &why {
                    Why::End(reason) => Refused::Ended(*reason),
                    Why::Host | Why::Tainted(_) => Refused::Deactivated,
                };
                self.stage = Stage::Holding { active, why };
                publish.send_replace(Some(Err(refused)));
                true
            }
        }
    }

    /// An attempt whose failure is not its own fault does not count.
    fn fail(&mut self, error: ActivationError, counts: bool) {
        self.refuse(Refused::Activation(error.clone()), error, counts);
    }

    /// As [`fail`](Self::fail), with what to tell who waits.
    fn refuse(&mut self, refused: Refused, error: ActivationError, counts: bool) {
        let Stage::Activating { publish, attempt } =
            std::mem::replace(&mut self.stage, Stage::Settled)
        else {
            return;
        };
        self.scope
            .tell_of(self.slot, |_, _| EventKind::ActivationFailed { error: error.to_string() });
        // Once the plan has ended its callers are told that, not what became of the activation.
        let refused = match self.scope.fail(self.slot, error, counts) {
            Some(reason) => Refused::Ended(reason),
            None => refused,
        };
        attempt.release();
        publish.send_replace(Some(Err(refused)));
        self.scope.conclude();
    }

    fn call(&mut self, overrun: bool) {
        if let Stage::Holding { active, .. } = &self.stage {
            self.stage =
                Stage::Calling { active: Arc::clone(active), since: Instant::now(), overrun };
        }
    }

    fn settle(&mut self, how: DeactivationOutcome) {
        let (active, took, overrun) = match std::mem::replace(&mut self.stage, Stage::Settled) {
            Stage::Calling { active, since, overrun } => (active, since.elapsed(), overrun),
            Stage::Holding { active, .. } => (active, Duration::ZERO, false),
            Stage::Activating { .. } | Stage::Settled => return,
        };
        self.scope.settle(&active, how, took, overrun);
        active.attempt.release();
        drop(active);
        self.scope.conclude();
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        let again = |stage| Self {
            scope: Arc::clone(&self.scope),
            slot: self.slot,
            stage,
            last_chance: true,
        };
        match std::mem::replace(&mut self.stage, Stage::Settled) {
            Stage::Settled => {}
            Stage::Activating { publish, attempt } => {
                let owed = again(Stage::Activating { publish, attempt: Arc::clone(&attempt) });
                if self.last_chance || lock(&attempt.rollback).is_empty() {
                    fail_unrun(owed);
                } else {
                    last_resort(Box::pin(roll_back_unrun(owed, attempt)));
                }
            }
            Stage::Holding { active, why } => {
                let mut owed = again(Stage::Holding { active, why });
                if fault("owed-lowers-the-books") {
                    owed.settle(DeactivationOutcome::Ok);
                } else if self.last_chance {
                    owed.settle(DeactivationOutcome::Lost);
                } else {
                    last_resort(Box::pin(deactivate(owed)));
                }
            }
            calling @ Stage::Calling { .. } => {
                again(calling).settle(DeactivationOutcome::Abandoned);
            }
        }
    }
}

fn fail_unrun(mut owed: Owed) {
    let label = owed.scope.label(owed.slot);
    let message = "the keeper ended while it was under way, or could not be had";
    owed.fail(ActivationError::new(label, ActivationPhase::NotRun, message), true);
}

async fn roll_back_unrun(owed: Owed, attempt: Arc<Attempt>) {
    attempt.roll_back(&owed.scope).await;
    fail_unrun(owed);
}

/// Room under the limit of a source. That wait does not count as time of the activation.
async fn source_permit(
    scope: &PlanScope,
    slot: SlotId,
    limit: &Arc<ActivationLimit>,
) -> Result<ActivationPermit, ActivationError> {
    if let Some(permit) = limit.try_enter() {
        return Ok(permit);
    }
    scope.tell_of(slot, |_, _| EventKind::Waiting { on: Wait::SourcePermit });
    let wait = scope.settings().permit_wait;
    let refused =
        |message: String| ActivationError::new(scope.label(slot), ActivationPhase::NotRun, message);
    tokio::select! {
        biased;
        () = scope.ended() => Err(refused("its plan ended before its source had room".to_owned())),
        () = scope.until(|inner| inner.slots.is_doomed(slot)) => {
            Err(refused("it was deactivated before its source had room".to_owned()))
        }
        permit = limit.enter() => permit.ok_or_else(|| refused("its source is gone".to_owned())),
        () = scope.core.sleep(wait) => {
            Err(refused(format!("its source's limit of activations at once left no room within {wait:?}")))
        }
    }
}

/// The activation job.
///
/// What blocks its thread has one only for the tool's own work: it waits for its turn like the
/// others.
pub(crate) async fn activate(mut owed: Owed, make: Make) {
    let scope = Arc::clone(&owed.scope);
    let permit = match make.source().and_then(Source::activations) {
        None => None,
        Some(limit) => match source_permit(&scope, owed.slot, &limit).await {
            Ok(permit) => Some(permit),
            Err(error) if scope.inner().slots.is_doomed(owed.slot) => {
                return owed.refuse(Refused::Deactivated, error, false);
            }
            Err(error) => return owed.fail(error, false),
        },
    };
    if make.is_off_thread() {
        scope.core.submit(Box::pin(activate_now(owed, make, permit)), Begin::Apart);
    } else {
        activate_now(owed, make, permit).await;
    }
}

async fn activate_now(mut owed: Owed, make: Make, permit: Option<ActivationPermit>) {
    let Stage::Activating { attempt, .. } = &owed.stage else {
        return;
    };
    let attempt = Arc::clone(attempt);
    let scope = Arc::clone(&owed.scope);
    let deadlines = scope.settings().deadlines;
    let ended = {
        scope.tell_of(owed.slot, |generation, attempt| EventKind::Activating {
            generation,
            attempt,
        });
        let ctx = ActivationContext::new(&scope, owed.slot, &attempt);
        tokio::select! {
            biased;
            ended = make.run(ctx) => Some(ended),
            () = scope.activation_limit() => None,
        }
    };
    let label = scope.label(owed.slot);
    let mut counts = true;
    let error = match ended {
        Some(Ok(instance)) => {
            drop(permit);
            if owed.commit(instance) {
                // Nobody could call it.
                deactivate_now(owed, false).await;
            }
            return;
        }
        Some(Err(NotMade::Failed(mut failure))) => {
            counts = !failure.is_of_shared();
            let message = failure.message().to_owned();
            ActivationError::caused(label, message, failure.take_source())
        }
        Some(Err(NotMade::Panicked(text))) => {
            ActivationError::new(label, ActivationPhase::Panicked, text)
        }
        None => {
            let message = format!(
                "it did not return within {:?}, or by the end of its plan",
                deadlines.activate
            );
            ActivationError::new(label, ActivationPhase::TimedOut, message)
        }
    };
    // Undone before anyone is told: the next attempt must not overlap with what is left of this
    // one.
    attempt.roll_back(&scope).await;
    drop(permit);
    owed.fail(error, counts);
}

/// A text that a record keeps.
fn short(mut text: String) -> String {
    cut_plain(&mut text, MOST_ERROR_TEXT);
    text
}

/// The deactivation job: drain, call, settle.
async fn deactivate(owed: Owed) {
    let Stage::Holding { active, .. } = &owed.stage else {
        return;
    };
    let (scope, active) = (Arc::clone(&owed.scope), Arc::clone(active));
    let overrun = scope.drain(&active.gate).await > 0;
    let apart = active.off_thread && !owed.last_chance;
    drop(active);
    if apart {
        scope.core.submit(Box::pin(deactivate_now(owed, overrun)), Begin::Apart);
    } else {
        deactivate_now(owed, overrun).await;
    }
}

/// `overrun`: a call is still being polled.
async fn deactivate_now(mut owed: Owed, overrun: bool) {
    let Stage::Holding { active, why } = &owed.stage else {
        return;
    };
    let (active, why) = (Arc::clone(active), why.clone());
    let scope = Arc::clone(&owed.scope);
    owed.call(overrun);
    let how = {
        let ctx = DeactivationContext::new(&scope, &why);
        let work = Contained::new(|| match &*active.held {
            Held::Tool(instance) => instance.deactivate(&ctx),
            Held::Shared { shared, .. } => shared.deactivate(&ctx),
        });
        let ended = tokio::select! {
            biased;
            ended = work => Some(ended),
            () = scope.deactivation_limit() => None,
        };
        match ended {
            Some(Ok(Ok(()))) => DeactivationOutcome::Ok,
            Some(Ok(Err(failure))) => {
                DeactivationOutcome::Failed(short(failure.message().to_owned()))
            }
            Some(Err(Panicked { text, .. })) => DeactivationOutcome::Panicked(short(text)),
            None => DeactivationOutcome::TimedOut,
        }
    };
    drop(active);
    owed.settle(how);
}
