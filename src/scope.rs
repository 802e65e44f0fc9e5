//! One plan from the inside: its gate, its slots, its clock, and its end.
//!
//! # Locks
//!
//! `inner` and `log` are leaves: neither is held across an await, a wake, a drop of a foreign value
//! or a call of foreign code, and neither while taking the other, the lock of another plan, or a
//! shard of the cache.
//!
//! # Invariants
//!
//! 1. The slots are closed before the gate, both under `inner`, so that whoever finds the gate
//!    closed finds the reason.
//! 2. A plan is `settled` once: it is closed, no slot is busy, no call is draining and no child is
//!    left. Only then does it leave the cache and its parent.
//! 3. Clean-up never runs under the plan's cancelled token.

use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::contain::contain;
use crate::context::PlanId;
use crate::descriptor::ToolDescriptor;
use crate::error::{ActivationError, CallError, EndReason, ToolCancelled, ToolRuntimeError};
use crate::event::{EventKind, EventStream, ToolEvent};
use crate::keeper::Begin;
use crate::lease::Gate;
use crate::obligation::{Active, Attempt, Made, Owed, Verdict};
use crate::options::PlanSettings;
use crate::policy::admit;
use crate::registry::{Pinned, Snapshot, ToolChanges, ToolEntry};
use crate::runtime::Core;
use crate::slot::{Key, Refused, Retired, SlotId, SlotTable, Why};
use crate::span;
use crate::sync::atomic::{AtomicBool, Ordering::Relaxed};
use crate::sync::{Mutex, MutexGuard, lock};
use crate::trace::{Clock, DeactivationOutcome, DeactivationRecord, PlanLog, ToolExecutionTrace};

/// The least time that each step of a plan's end gets, whatever is left of the budget.
pub(crate) const LEAST_STEP: Duration = Duration::from_millis(250);
/// The most deactivations that went well of which one plan keeps a record.
const MOST_DEACTIVATIONS: usize = 1000;

/// A plan, as its owner, its handles, its calls and its jobs share it.
pub(crate) struct PlanScope {
    pub(crate) id: PlanId,
    pub(crate) core: Arc<Core>,
    pub(crate) tools: Pinned,
    pub(crate) gate: Gate,
    pub(crate) log: Mutex<PlanLog>,
    /// The same moment on both clocks, read at the first call.
    clock: OnceLock<Clock>,
    pub(crate) parent: Option<Arc<PlanScope>>,
    /// Plans above this one.
    pub(crate) depth: u32,
    /// Its end was told: set under the lock of the log.
    over: AtomicBool,
    /// `None` where the runtime's defaults hold.
    settings: Option<Box<PlanSettings>>,
    inner: Mutex<Inner>,
    /// What tools see of the end, made when first asked for.
    soft: OnceLock<CancellationToken>,
    /// A slot, or the whole, came to rest.
    changed: Notify,
}

pub(crate) struct Inner {
    pub(crate) slots: SlotTable<Arc<Active>, watch::Receiver<Verdict>>,
    /// Made when the plan closes and something is left to be done.
    end: Option<Box<End>>,
    settled: bool,
    rare: Option<Box<Rare>>,
}

/// What only some plans have.
#[derive(Default)]
struct Rare {
    children: Vec<Arc<PlanScope>>,
    deactivations: Vec<DeactivationRecord>,
}

/// The clock of a plan's end, and what is left to drain.
#[derive(Clone, Copy)]
struct End {
    closed: Instant,
    /// The total budget is used up.
    until: Instant,
    draining: bool,
    overrun: u64,
}

impl Inner {
    pub(crate) fn is_settled(&self) -> bool {
        self.settled
    }

    fn end(&self) -> Option<End> {
        self.end.as_deref().copied()
    }

    /// Settles, once, if the plan is closed and nothing of it is left to be done; true then.
    fn settle(&mut self) -> bool {
        let at_rest = self.slots.closing().is_some()
            && self.end.as_ref().is_none_or(|end| !end.draining)
            && self.children().is_empty()
            && self.slots.busy().next().is_none();
        at_rest && !std::mem::replace(&mut self.settled, true)
    }

    fn rare(&mut self) -> &mut Rare {
        self.rare.get_or_insert_default()
    }

    fn children(&self) -> &[Arc<PlanScope>] {
        self.rare.as_ref().map_or(&[], |rare| &rare.children)
    }
}

impl PlanScope {
    pub(crate) fn new(
        core: &Arc<Core>,
        id: PlanId,
        tools: Arc<Snapshot>,
        settings: Option<Box<PlanSettings>>,
        parent: Option<Arc<PlanScope>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            id,
            core: Arc::clone(core),
            tools: Pinned::new(tools),
            gate: Gate::new(),
            log: Mutex::default(),
            clock: OnceLock::new(),
            depth: parent.as_ref().map_or(0, |parent| parent.depth + 1),
            parent,
            over: AtomicBool::new(false),
            settings,
            inner: Mutex::new(Inner {
                slots: SlotTable::new(),
                end: None,
                settled: false,
                rare: None,
            }),
            soft: OnceLock::new(),
            changed: Notify::new(),
        })
    }

    pub(crate) fn settings(&self) -> &PlanSettings {
        self.settings.as_deref().unwrap_or(&self.core.defaults)
    }

    pub(crate) fn inner(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    pub(crate) fn label(&self, slot: SlotId) -> String {
        self.inner().slots.label(slot).to_owned()
    }

    // ===== the tools =====

    /// The tool that a text stands for: by the snapshot that the plan goes by, or, where that does
    /// not have it any more, one that is still active, or about to be.
    #[inline]
    pub(crate) fn resolve(&self, name: &str) -> Result<&Arc<ToolEntry>, Box<ToolRuntimeError>> {
        match self.tools.latest().find(name) {
            Some(tool) => Ok(tool),
            None => self.former(name),
        }
    }

    #[cold]
    fn former(&self, name: &str) -> Result<&Arc<ToolEntry>, Box<ToolRuntimeError>> {
        // What is active stays usable as what it is, also when it changed before it was removed.
        let is_alive = |tool: &&Arc<ToolEntry>| {
            let (inner, key) = (self.inner(), Key::Tool(tool.id));
            match inner.slots.active(&key) {
                Some(active) => active.version == tool.version,
                None => inner.slots.is_activating(&key),
            }
        };
        let former = self.tools.former(name).into_iter().find(is_alive);
        former
            .ok_or_else(|| Box::new(self.tools.latest().not_found(name, |tool| self.may_use(tool))))
    }

    /// Whether the plan's gate lets the tool pass.
    pub(crate) fn may_use(&self, tool: &ToolDescriptor) -> bool {
        let settings = self.settings();
        admit(settings.rights, &settings.rules, tool, &settings.resources).is_ok()
    }

    /// Goes by the tools of the registry as they are now; a child by those of its parent.
    pub(crate) fn sync_tools(&self) -> ToolChanges {
        match &self.parent {
            Some(parent) => self.tools.advance(parent.tools.latest()),
            None => self.tools.advance(&self.core.registry.snapshot()),
        }
    }

    // ===== who is told =====

    /// Tells whoever listens to this plan or to all; the event is made only then. Never under a
    /// lock.
    #[inline]
    pub(crate) fn tell(
        &self,
        call: Option<u64>,
        event: impl FnOnce() -> (Option<String>, EventKind),
    ) {
        if self.core.subscribers.is_heard() {
            let (name, kind) = event();
            self.tell_heard(call, name, kind);
        }
    }

    /// As [`tell`](Self::tell), of a slot: its generation and attempt are at hand.
    pub(crate) fn tell_of(&self, slot: SlotId, kind: impl FnOnce(u32, u32) -> EventKind) {
        self.tell(None, || {
            let inner = self.inner();
            let slots = &inner.slots;
            let kind = kind(slots.generation(slot), slots.attempt(slot));
            (Some(slots.label(slot).to_owned()), kind)
        });
    }

    #[cold]
    fn tell_heard(&self, call_id: Option<u64>, name: Option<String>, kind: EventKind) {
        let of_the_plan = lock(&self.log).known_events();
        let event = ToolEvent { plan_id: self.id, call_id, name, kind };
        self.core.subscribers.tell(of_the_plan, &event);
    }

    pub(crate) fn subscribe(&self) -> EventStream {
        let subscribers = &self.core.subscribers;
        let mut log = lock(&self.log);
        // Looked at under the lock: what is told last goes to all who came before it, and whoever
        // comes after it has a stream that is over.
        let events = if self.over.load(Relaxed) { &mut None } else { log.events() };
        subscribers.subscribe_to(self.id, events)
    }

    // ===== the signals =====

    /// The token that tools see: cancelled when the plan ends, by whatever way.
    pub(crate) fn soft(&self) -> &CancellationToken {
        let soft = self.soft.get_or_init(CancellationToken::new);
        // Whoever closes sets the flag first and looks for the token second; here it is the other
        // way round.
        if self.gate.is_closed() {
            soft.cancel();
        }
        soft
    }

    /// Waits until the plan has ended.
    pub(crate) async fn ended(&self) {
        self.soft().cancelled().await;
    }

    pub(crate) fn end_reason(&self) -> Option<EndReason> {
        self.inner().slots.closing()
    }

    /// What a call of an ended plan returns.
    pub(crate) fn ended_error(&self) -> CallError {
        ended_error(self.end_reason().unwrap_or(EndReason::Finished))
    }

    /// What an asker gets of a plan that has ended.
    pub(crate) fn ended_refusal(&self) -> Refused {
        Refused::Ended(self.end_reason().unwrap_or(EndReason::Finished))
    }

    /// Whether whoever waits for the end was told: everything is at rest.
    pub(crate) fn is_settled(&self) -> bool {
        self.inner().settled
    }

    pub(crate) fn tell_changed(&self) {
        contain(|| self.changed.notify_waiters()).unwrap_or_default();
    }

    /// Waits until `done` holds, looking again at each change.
    pub(crate) async fn until(&self, done: impl Fn(&Inner) -> bool) {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if done(&self.inner()) {
                return;
            }
            changed.await;
        }
    }

    /// Waits until the plan has settled; false if its end is over its budget by all that its last
    /// steps may take.
    pub(crate) async fn until_settled(&self) -> bool {
        if self.is_settled() {
            return true;
        }
        let end = self.inner().end();
        let late = async {
            let Some(end) = end else {
                return std::future::pending().await;
            };
            let limit = later(end.until, LEAST_STEP * self.steps_left());
            self.core.sleep(limit.saturating_duration_since(Instant::now())).await;
        };
        tokio::select! {
            biased;
            () = self.until(Inner::is_settled) => true,
            () = late => false,
        }
    }

    /// How many steps are left of the end, one after another at worst: a drain and a deactivation
    /// for each slot.
    pub(crate) fn steps_left(&self) -> u32 {
        let (busy, children) = {
            let inner = self.inner();
            (inner.slots.busy().count(), inner.children().to_vec())
        };
        let own = u32::try_from(2 * busy + 2).unwrap_or(u32::MAX);
        children.iter().fold(own, |steps, child| steps.saturating_add(child.steps_left()))
    }

    // ===== the end =====

    /// Ends this plan, or those above, if the token given at `begin` is cancelled and its watch has
    /// not seen that yet.
    pub(crate) fn notice_tokens(self: &Arc<Self>) {
        let mut plan = Some(self);
        while let Some(scope) = plan {
            if scope.settings().token.as_ref().is_some_and(CancellationToken::is_cancelled) {
                scope.close(EndReason::Cancelled, Begin::There);
            }
            plan = scope.parent.as_ref();
        }
    }

    /// Ends the plan. Synchronous and idempotent; the first reason wins. What is to be undone
    /// begins as `begin` says.
    pub(crate) fn close(self: &Arc<Self>, reason: EndReason, begin: Begin) {
        // Taken before the own lock: no two plans are ever locked at once.
        let parent = self.parent.as_ref().and_then(|parent| parent.inner().end());
        let (mut owed, children, until, draining, settled) = {
            let mut inner = self.inner();
            let Some(taken) = inner.slots.close(reason) else {
                return;
            };
            let owed: Vec<_> = taken
                .into_iter()
                .map(|(_, active)| {
                    active.gate.close();
                    Owed::deactivation(self, active, Why::End(reason))
                })
                .collect();
            let draining = self.gate.close();
            let settled = !draining && inner.settle();
            let until = (!settled).then(|| {
                let closed = Instant::now();
                let own = later(closed, self.settings().deadlines.end);
                let until = parent.map_or(own, |parent| own.min(parent.until));
                inner.end = Some(Box::new(End { closed, until, draining, overrun: 0 }));
                until
            });
            (owed, inner.children().to_vec(), until, draining, settled)
        };
        // Only one deactivation is polled here, the last: one that blocks holds up no other.
        let here = if begin == Begin::Here { owed.pop() } else { None };
        for child in children {
            child.close(reason_of_child(reason), Begin::There);
            if let Some(until) = until {
                child.hurry(until);
            }
        }
        if draining {
            // Always in the keeper: it begins with a wait.
            let draining = Draining { scope: Arc::clone(self), overrun: None };
            self.core.submit(Box::pin(draining.run()), Begin::There);
        }
        for owed in owed {
            self.core.submit_clean_up(owed, Begin::There);
        }
        if let Some(owed) = here {
            self.core.submit_clean_up(owed, Begin::Here);
        }
        if let Some(soft) = self.soft.get() {
            // Last, and contained: a waker is its executor's code.
            contain(|| soft.cancel()).unwrap_or_default();
        }
        if settled {
            self.leave();
        }
    }

    /// Cuts the budget of an end that is under way.
    pub(crate) fn hurry(&self, until: Instant) {
        let children = {
            let mut inner = self.inner();
            inner.end.iter_mut().for_each(|end| end.until = end.until.min(until));
            inner.children().to_vec()
        };
        self.tell_changed();
        for child in children {
            child.hurry(until);
        }
    }

    /// Waits for the calls behind a gate: until they have ended, then, past the grace, until none
    /// is being polled. The number that still are is what blocks its thread.
    pub(crate) async fn drain(&self, gate: &Gate) -> u64 {
        let deadlines = self.settings().deadlines;
        tokio::select! {
            biased;
            () = gate.until_empty() => {}
            () = self.limit(deadlines.end, |end| later(end.closed, deadlines.grace).min(end.until)) => {}
        }
        gate.revoke();
        let least = later(Instant::now(), LEAST_STEP);
        tokio::select! {
            biased;
            () = gate.until_unpolled() => 0,
            () = self.limit(deadlines.drain, |end| end.until.max(least)) => gate.polling(),
        }
    }

    /// Waits until an activation must stop: its deadline, or the end of the budget once the plan
    /// has ended.
    pub(crate) async fn activation_limit(&self) {
        self.limit(self.settings().deadlines.activate, |end| end.until).await;
    }

    /// Waits until a deactivation must stop: as an activation, but it always has a little time.
    pub(crate) async fn deactivation_limit(&self) {
        let least = later(Instant::now(), LEAST_STEP);
        self.limit(self.settings().deadlines.deactivate, |end| end.until.max(least)).await;
    }

    /// Waits for a limit: `own` from now, or, if that is sooner, what `cut` says once the plan has
    /// ended.
    async fn limit(&self, own: Duration, cut: impl Fn(End) -> Instant + Send + Sync) {
        let own = later(Instant::now(), own);
        let cut = async {
            self.ended().await;
            loop {
                let mut changed = pin!(self.changed.notified());
                changed.as_mut().enable();
                // Set before the plan's token is cancelled; it may be cut later.
                let end = self.inner().end();
                let Some(end) = end else { return std::future::pending().await };
                tokio::select! {
                    () = tokio::time::sleep_until(cut(end)) => return,
                    () = changed => {}
                }
            }
        };
        tokio::select! { () = tokio::time::sleep_until(own) => {}, () = cut => {} }
    }

    /// Settles the plan if all of it is at rest, and tells who waits.
    pub(crate) fn conclude(self: &Arc<Self>) {
        let settled = self.inner().settle();
        if settled {
            self.leave();
        } else {
            self.tell_changed();
        }
    }

    /// Leaves the books, last of all: the plan has settled.
    fn leave(self: &Arc<Self>) {
        let span = lock(&self.log).take_span();
        if let Some(span) = span {
            span::end_plan(&span, self.end_reason().unwrap_or(EndReason::Finished));
        }
        if self.core.subscribers.is_heard() && !self.gate.is_empty() {
            let farewell = Farewell(Arc::clone(self));
            self.core.submit(Box::pin(farewell.after_the_calls()), Begin::There);
        } else {
            self.tell_end();
        }
        self.core.settled(self.id);
        if let Some(parent) = &self.parent {
            parent.child_settled(self);
        }
        self.tell_changed();
    }

    /// Nobody has the plan, and nothing is told of it: it was refused while it was begun.
    pub(crate) fn give_up(self: &Arc<Self>) {
        self.over.store(true, Relaxed);
        self.close(EndReason::ShutDown, Begin::There);
    }

    /// Tells of the end, as the last that is told of the plan.
    fn tell_end(&self) {
        let events = {
            let mut log = lock(&self.log);
            if self.over.swap(true, Relaxed) {
                return;
            }
            log.take_events()
        };
        if self.core.subscribers.is_heard() {
            let reason = self.end_reason().unwrap_or(EndReason::Finished);
            let kind = EventKind::Ended { reason };
            let event = ToolEvent { plan_id: self.id, call_id: None, name: None, kind };
            self.core.subscribers.tell(events, &event);
        }
    }

    // ===== children =====

    /// Lets a child live under this plan, unless it has ended.
    pub(crate) fn adopt(&self, child: &Arc<PlanScope>) -> Result<(), ToolRuntimeError> {
        let mut inner = self.inner();
        if let Some(reason) = inner.slots.closing() {
            return Err(ended(reason));
        }
        inner.rare().children.push(Arc::clone(child));
        Ok(())
    }

    pub(crate) fn child_settled(self: &Arc<Self>, child: &Arc<PlanScope>) {
        let gone = {
            let mut inner = self.inner();
            let at = inner.children().iter().position(|other| Arc::ptr_eq(other, child));
            at.map(|at| inner.rare().children.swap_remove(at))
        };
        drop(gone);
        self.conclude();
    }

    // ===== what the jobs of the slots report =====

    /// The commit point: the instance is in place, or comes back to be deactivated at once.
    pub(crate) fn commit(
        &self,
        slot: SlotId,
        made: Made,
        attempt: &Arc<Attempt>,
    ) -> Result<(), (Arc<Active>, Why)> {
        let mut inner = self.inner();
        let generation = inner.slots.generation(slot);
        let active = Arc::new(Active::new(made, slot, generation, attempt));
        self.core.ledger.activated.fetch_add(1, Relaxed);
        match inner.slots.commit(slot, Arc::clone(&active)) {
            None => Ok(()),
            Some(why) => {
                active.gate.close();
                Err((active, why))
            }
        }
    }

    /// Gives why the plan has ended, if it has.
    pub(crate) fn fail(
        &self,
        slot: SlotId,
        error: ActivationError,
        counts: bool,
    ) -> Option<EndReason> {
        self.core.ledger.failed.fetch_add(1, Relaxed);
        let mut inner = self.inner();
        inner.slots.fail(slot, error, counts);
        inner.slots.closing()
    }

    pub(crate) fn settle(
        &self,
        active: &Active,
        outcome: DeactivationOutcome,
        took: Duration,
        overrun: bool,
    ) {
        let ledger = &self.core.ledger;
        let counted =
            if outcome == DeactivationOutcome::Lost { &ledger.lost } else { &ledger.deactivated };
        ledger.troubled.fetch_add(u64::from(outcome != DeactivationOutcome::Ok), Relaxed);
        let (name, generation) = (self.label(active.slot), active.generation);
        let record = DeactivationRecord { name, generation, outcome, overrun, took };
        // Told before the slot is at rest: then the plan may be too, and its end is told last.
        self.tell(None, || (Some(record.name.clone()), EventKind::Deactivated(record.clone())));
        let mut inner = self.inner();
        counted.fetch_add(1, Relaxed);
        inner.slots.settle(active.slot);
        let kept = &mut inner.rare().deactivations;
        if kept.len() < MOST_DEACTIVATIONS || record.outcome != DeactivationOutcome::Ok {
            kept.push(record);
        }
    }

    /// A dependent of a shared activation has settled.
    pub(crate) fn release(self: &Arc<Self>, slot: SlotId) {
        let owed = {
            let mut inner = self.inner();
            let active = inner.slots.release(slot);
            active.map(|active| {
                let why = inner.slots.why(slot).cloned().unwrap_or(Why::Host);
                Owed::deactivation(self, active, why)
            })
        };
        if let Some(owed) = owed {
            self.core.submit_clean_up(owed, Begin::There);
        }
    }

    /// Retires the instance of that generation, or dooms the activation under way; false if there
    /// is none.
    pub(crate) fn retire(
        self: &Arc<Self>,
        slot: SlotId,
        generation: u32,
        why: Why,
        begin: Begin,
    ) -> bool {
        let (retired, owed) = {
            let mut inner = self.inner();
            match inner.slots.retire(slot, generation, why.clone()) {
                Retired::Nothing => (false, None),
                Retired::Under => (true, None),
                Retired::Start(active) => {
                    active.gate.close();
                    (true, Some(Owed::deactivation(self, active, why)))
                }
            }
        };
        match owed {
            Some(owed) => self.core.submit_clean_up(owed, begin),
            // An activation that has not begun yet is given up.
            None if retired => self.tell_changed(),
            None => {}
        }
        retired
    }

    /// Deactivates by hand: waits until what was active, or in the making, has settled.
    pub(crate) async fn deactivate(self: &Arc<Self>, key: &Key) -> bool {
        let slot = self.inner().slots.find(key);
        let Some(slot) = slot else { return false };
        let generation = self.inner().slots.generation(slot);
        if !self.retire(slot, generation, Why::Host, Begin::Here) {
            return false;
        }
        self.until(|inner| {
            !inner.slots.is_busy(slot) || inner.slots.generation(slot) != generation
        })
        .await;
        true
    }

    // ===== what is told =====

    /// The plan's clock. The first call begins it.
    pub(crate) fn clock(&self, now: Instant) -> Clock {
        *self.clock.get_or_init(|| Clock::begun(now))
    }

    /// Whether this is the runtime's scope of what outlives one plan.
    pub(crate) fn is_root(&self) -> bool {
        self.id.number() == 0
    }

    pub(crate) fn traces(&self) -> Vec<ToolExecutionTrace> {
        let clock = self.clock(Instant::now());
        lock(&self.log).traces(self.id, clock, &self.tools)
    }

    pub(crate) fn open_instances(&self) -> u64 {
        self.inner().slots.open()
    }

    pub(crate) fn deactivations(&self) -> Vec<DeactivationRecord> {
        let inner = self.inner();
        inner.rare.as_ref().map(|rare| rare.deactivations.clone()).unwrap_or_default()
    }

    /// The calls that were still being polled at the drain deadline.
    pub(crate) fn overrun(&self) -> u64 {
        self.inner().end().map_or(0, |end| end.overrun)
    }

    /// What has not come to rest, by name.
    pub(crate) fn unsettled(&self) -> Vec<String> {
        let inner = self.inner();
        let mut names: Vec<String> =
            inner.slots.busy().map(|slot| inner.slots.label(slot).to_owned()).collect();
        names.extend(inner.children().iter().map(|child| format!("child plan {}", child.id)));
        if inner.end().is_some_and(|end| end.draining) {
            names.push("calls in flight".to_owned());
        }
        names
    }
}

/// The drain of the calls that were in flight when the plan closed. Over when dropped, even by a
/// keeper that ends.
struct Draining {
    scope: Arc<PlanScope>,
    /// What the drain gave, once it is over.
    overrun: Option<u64>,
}

impl Draining {
    async fn run(mut self) {
        self.overrun = Some(self.scope.drain(&self.scope.gate).await);
    }
}

impl Drop for Draining {
    fn drop(&mut self) {
        let scope = &self.scope;
        scope.gate.revoke();
        let overrun = self.overrun.unwrap_or_else(|| scope.gate.polling());
        scope.inner().end.iter_mut().for_each(|end| (end.draining, end.overrun) = (false, overrun));
        scope.conclude();
    }
}

/// Tells of the end of a plan when dropped, even by a keeper that ends.
struct Farewell(Arc<PlanScope>);

impl Farewell {
    /// A call that the hard end cut tells of its own end when its task next polls it: a moment for
    /// that. The plan itself waits for nobody.
    async fn after_the_calls(self) {
        tokio::select! {
            () = self.0.gate.until_empty() => {}
            () = tokio::time::sleep(LEAST_STEP) => {}
        }
    }
}

impl Drop for Farewell {
    fn drop(&mut self) {
        self.0.tell_end();
    }
}

/// The error of a call, or a child, that comes after the end.
pub(crate) fn ended(reason: EndReason) -> ToolRuntimeError {
    match reason {
        EndReason::ShutDown => ToolRuntimeError::ShutDown,
        reason => ToolRuntimeError::PlanEnded { reason },
    }
}

pub(crate) fn ended_error(reason: EndReason) -> CallError {
    match reason {
        EndReason::Cancelled => CallError::Cancelled(ToolCancelled),
        reason => CallError::Runtime(ended(reason)),
    }
}

fn reason_of_child(reason: EndReason) -> EndReason {
    match reason {
        EndReason::Cancelled | EndReason::ShutDown => reason,
        _ => EndReason::ParentEnded,
    }
}

/// A deadline; one too far to say is a very far one.
fn later(from: Instant, time: Duration) -> Instant {
    const FAR: Duration = Duration::from_secs(60 * 60 * 24 * 365 * 30);
    from.checked_add(time).unwrap_or_else(|| from + FAR)
}
