//! The slot machine of one plan: which activation is at what stage, and what may happen next.
//!
//! Pure and synchronous: no lock, no clock, no future. The lock around it is in `scope.rs`; what
//! waits on it, and the jobs that its answers start, are there and in `obligation.rs`.
//!
//! ```text
//! Vacant -> Activating -> Active -> Deactivating -> Done | Retired -> Activating (next generation)
//!              |  `- Failed -> Activating (next attempt)
//!              `- doomed, or the plan is closing -> Deactivating
//! ```
//!
//! # Invariants
//!
//! 1. A slot holds at most one activation or one instance.
//! 2. An instance leaves `Active` by being taken out: there is one taker, and it owes the
//!    deactivation.
//! 3. `commit` looks at `closing` and `doomed` in the same step that would make the slot `Active`.
//! 4. An instance with dependents stays parked in `Deactivating` until the last of them is
//!    released.

use std::any::TypeId;

use crate::error::{ActivationError, ActivationPhase, EndReason};
use crate::fault::fault;

/// The place of a slot in its table. Slots are never removed.
pub(crate) type SlotId = usize;

/// What a slot is for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Key {
    /// A tool, by its id in the registry.
    Tool(u32),
    /// A shared activation, by its type and name.
    Shared(TypeId, Box<str>),
}

/// Why an instance is deactivated before, or at, the end of its plan.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Why {
    End(EndReason),
    /// The host asked; only an explicit activation brings the tool back.
    Host,
    /// The instance is no good any more; the next call makes another.
    Tainted(Box<str>),
}

/// How often a slot tries again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) attempts: u32,
    pub(crate) generations: u32,
}

/// Answer to an asker.
#[derive(Debug)]
pub(crate) enum Ask<I, W> {
    /// Here it is.
    Ready(SlotId, I),
    /// An attempt is under way: wait for what it says, then ask again.
    Wait(SlotId, W),
    /// The asker owes the activation. The error of the attempt before, if any, comes along to be
    /// dropped outside the lock.
    Start(SlotId, W, Option<ActivationError>),
    /// An instance is on its way out: wait until it has settled, then ask again.
    Later(SlotId),
    /// No.
    Refused(Refused),
}

/// Why an asker gets nothing.
#[derive(Clone, Debug)]
pub(crate) enum Refused {
    Ended(EndReason),
    Deactivated,
    Activation(ActivationError),
}

/// Answer to the wish to retire an instance.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Retired<I> {
    /// The asker owes the deactivation.
    Start(I),
    /// Whoever settles next goes on: the activation under way, or the last dependent.
    Under,
    /// There is nothing to retire.
    Nothing,
}

/// One cell of the table.
#[derive(Debug)]
struct Slot<I, W> {
    key: Key,
    label: Box<str>,
    state: State<I, W>,
    /// Counts instances and attempts to make one, from 1 on.
    generation: u32,
    /// Instances that were replaced because they were tainted.
    replaced: u32,
    dependents: u32,
    /// The slots whose activation this one's activation waits for.
    waits: Vec<SlotId>,
}

#[derive(Debug)]
enum State<I, W> {
    Vacant,
    Activating { attempt: u32, wait: W, doomed: Option<Why> },
    Active(I),
    Deactivating { parked: Option<I>, why: Why },
    Failed { attempts: u32, error: ActivationError },
    Retired(Why),
    Done,
}

/// All slots of one plan.
#[derive(Debug)]
pub(crate) struct SlotTable<I, W> {
    closing: Option<EndReason>,
    slots: Vec<Slot<I, W>>,
}

impl<I: Clone, W: Clone> SlotTable<I, W> {
    pub(crate) fn new() -> Self {
        Self { closing: None, slots: Vec::new() }
    }

    /// Why the plan ended, once it has.
    pub(crate) fn closing(&self) -> Option<EndReason> {
        self.closing
    }

    pub(crate) fn label(&self, slot: SlotId) -> &str {
        &self.slots[slot].label
    }

    pub(crate) fn generation(&self, slot: SlotId) -> u32 {
        self.slots[slot].generation
    }

    /// Why the instance of the slot is on its way out.
    pub(crate) fn why(&self, slot: SlotId) -> Option<&Why> {
        match &self.slots[slot].state {
            State::Deactivating { why, .. } => Some(why),
            _ => None,
        }
    }

    /// Instances that are not yet deactivated.
    pub(crate) fn open(&self) -> u64 {
        let open = |slot: &&Slot<I, W>| {
            matches!(slot.state, State::Active(_) | State::Deactivating { .. })
        };
        self.slots.iter().filter(open).count() as u64
    }

    /// The slots that a job is working on, or will.
    pub(crate) fn busy(&self) -> impl Iterator<Item = SlotId> + '_ {
        let busy = |slot: &Slot<I, W>| {
            matches!(slot.state, State::Activating { .. } | State::Deactivating { .. })
        };
        self.slots.iter().enumerate().filter(move |(_, slot)| busy(slot)).map(|(at, _)| at)
    }

    pub(crate) fn is_busy(&self, slot: SlotId) -> bool {
        matches!(self.slots[slot].state, State::Activating { .. } | State::Deactivating { .. })
    }

    pub(crate) fn find(&self, key: &Key) -> Option<SlotId> {
        self.slots.iter().position(|slot| slot.key == *key)
    }

    /// The active instance of a key: the warm path.
    pub(crate) fn active(&self, key: &Key) -> Option<&I> {
        match &self.slots.iter().find(|slot| slot.key == *key)?.state {
            State::Active(instance) => Some(instance),
            _ => None,
        }
    }

    /// Whether an activation of a key is under way that nobody has doomed.
    pub(crate) fn is_activating(&self, key: &Key) -> bool {
        let slot = self.slots.iter().find(|slot| slot.key == *key);
        slot.is_some_and(|slot| matches!(slot.state, State::Activating { doomed: None, .. }))
    }

    /// Asks for the instance of a key. `by_hand` is the host's explicit activation.
    pub(crate) fn ask(
        &mut self,
        key: &Key,
        label: &str,
        by_hand: bool,
        limits: Limits,
        wait: impl FnOnce() -> W,
    ) -> Ask<I, W> {
        if let Some(reason) = self.closing {
            return Ask::Refused(Refused::Ended(reason));
        }
        let at = self.find(key).unwrap_or_else(|| self.push(key.clone(), label.into()));
        let slot = &mut self.slots[at];
        let (attempt, next_generation) = match &slot.state {
            State::Active(instance) => return Ask::Ready(at, instance.clone()),
            State::Activating { doomed: Some(Why::Host), .. }
            | State::Deactivating { why: Why::Host, .. }
                if !by_hand =>
            {
                return Ask::Refused(Refused::Deactivated);
            }
            State::Activating { doomed: Some(_), .. } | State::Deactivating { .. } => {
                return Ask::Later(at);
            }
            State::Activating { wait, .. } => return Ask::Wait(at, wait.clone()),
            State::Failed { attempts, error } if *attempts >= limits.attempts => {
                return Ask::Refused(Refused::Activation(error.exhausted(*attempts)));
            }
            State::Failed { attempts, .. } => (attempts.saturating_add(1), false),
            State::Retired(Why::Host) if !by_hand => return Ask::Refused(Refused::Deactivated),
            State::Retired(Why::Tainted(reason))
                if !by_hand && slot.replaced + 1 >= limits.generations =>
            {
                let message = format!(
                    "{} instances were retired, the last one because {reason}",
                    slot.replaced + 1
                );
                let error = ActivationError::new(&*slot.label, ActivationPhase::Exhausted, message);
                return Ask::Refused(Refused::Activation(error));
            }
            State::Retired(why) => {
                slot.replaced =
                    if matches!(why, Why::Tainted(_)) && !by_hand { slot.replaced + 1 } else { 0 };
                (1, true)
            }
            State::Vacant | State::Done => (1, true),
        };
        slot.generation += u32::from(next_generation);
        let wait = wait();
        let activating = State::Activating { attempt, wait: wait.clone(), doomed: None };
        let spent = match std::mem::replace(&mut slot.state, activating) {
            State::Failed { error, .. } => Some(error),
            _ => None,
        };
        Ask::Start(at, wait, spent)
    }

    pub(crate) fn push(&mut self, key: Key, label: Box<str>) -> SlotId {
        let state = State::Vacant;
        self.slots.push(Slot {
            key,
            label,
            state,
            generation: 0,
            replaced: 0,
            dependents: 0,
            waits: Vec::new(),
        });
        self.slots.len() - 1
    }

    /// The commit point of an activation that returned an instance: `Some` if the job must
    /// deactivate it itself.
    pub(crate) fn commit(&mut self, slot: SlotId, instance: I) -> Option<Why> {
        let closing = if fault("commit-ignores-closing") { None } else { self.closing };
        let slot = &mut self.slots[slot];
        let State::Activating { doomed, .. } = &mut slot.state else {
            unreachable!("BUG: an activation was committed twice");
        };
        let doom = closing.map(Why::End).or(doomed.take());
        slot.state = match &doom {
            None => State::Active(instance),
            Some(why) => State::Deactivating { parked: None, why: why.clone() },
        };
        doom
    }

    /// An activation that gave no instance. An attempt that does not count may be made again.
    pub(crate) fn fail(&mut self, slot: SlotId, error: ActivationError, counts: bool) {
        let closing = self.closing.is_some();
        let slot = &mut self.slots[slot];
        slot.state = match &mut slot.state {
            State::Activating { .. } if closing => State::Done,
            State::Activating { doomed: Some(_), .. } => State::Retired(Why::Host),
            State::Activating { attempt, .. } => {
                State::Failed { attempts: *attempt - u32::from(!counts), error }
            }
            _ => unreachable!("BUG: an activation failed that was not under way"),
        };
    }

    /// Whether the host has given up the activation that is under way.
    pub(crate) fn is_doomed(&self, slot: SlotId) -> bool {
        matches!(self.slots[slot].state, State::Activating { doomed: Some(_), .. })
    }

    /// Which attempt is under way.
    pub(crate) fn attempt(&self, slot: SlotId) -> u32 {
        match &self.slots[slot].state {
            State::Activating { attempt, .. } => *attempt,
            _ => 0,
        }
    }

    /// Takes the instance of that generation out; an activation under way is doomed when the host
    /// asks.
    pub(crate) fn retire(&mut self, slot: SlotId, generation: u32, why: Why) -> Retired<I> {
        let slot = &mut self.slots[slot];
        if slot.generation != generation {
            return Retired::Nothing;
        }
        match &mut slot.state {
            State::Active(_) => match take_out(slot, why) {
                Some(instance) => Retired::Start(instance),
                None => Retired::Under,
            },
            State::Activating { doomed: doomed @ None, .. } if why == Why::Host => {
                *doomed = Some(why);
                Retired::Under
            }
            _ => Retired::Nothing,
        }
    }

    /// Closes the plan: the first reason wins. Gives every instance that may be deactivated at
    /// once.
    pub(crate) fn close(&mut self, reason: EndReason) -> Option<Vec<(SlotId, I)>> {
        if self.closing.is_some() && !fault("close-copies") {
            return None;
        }
        self.closing = Some(reason);
        let mut taken = Vec::new();
        for (at, slot) in self.slots.iter_mut().enumerate() {
            match &slot.state {
                State::Active(instance) if fault("close-copies") => {
                    taken.push((at, instance.clone()));
                }
                State::Active(_) => {
                    taken.extend(take_out(slot, Why::End(reason)).map(|instance| (at, instance)));
                }
                _ => {}
            }
        }
        Some(taken)
    }

    /// A deactivation is over, however it went.
    pub(crate) fn settle(&mut self, slot: SlotId) {
        let closing = self.closing.is_some();
        let slot = &mut self.slots[slot];
        slot.state = match std::mem::replace(&mut slot.state, State::Done) {
            State::Deactivating { why, .. } if !closing => State::Retired(why),
            _ => State::Done,
        };
    }

    /// Counts a dependent of an active slot.
    pub(crate) fn depend(&mut self, slot: SlotId) {
        if !fault("dependent-not-counted") {
            self.slots[slot].dependents += 1;
        }
    }

    /// A dependent has settled: gives the instance if it waited for that.
    pub(crate) fn release(&mut self, slot: SlotId) -> Option<I> {
        let slot = &mut self.slots[slot];
        slot.dependents = slot.dependents.saturating_sub(1);
        match &mut slot.state {
            State::Deactivating { parked, .. } if slot.dependents == 0 => parked.take(),
            _ => None,
        }
    }

    /// Notes that the activation of one slot waits for that of another; the labels of the cycle if
    /// it closes one.
    pub(crate) fn wait_on(&mut self, from: SlotId, to: SlotId) -> Result<(), Vec<String>> {
        let mut path = vec![from];
        if self.reaches(to, from, &mut path, &mut vec![false; self.slots.len()]) {
            return Err(path.iter().map(|slot| self.slots[*slot].label.to_string()).collect());
        }
        self.slots[from].waits.push(to);
        Ok(())
    }

    pub(crate) fn wait_over(&mut self, from: SlotId, to: SlotId) {
        let waits = &mut self.slots[from].waits;
        if let Some(at) = waits.iter().position(|slot| *slot == to) {
            waits.swap_remove(at);
        }
    }

    fn reaches(&self, from: SlotId, to: SlotId, path: &mut Vec<SlotId>, seen: &mut [bool]) -> bool {
        if std::mem::replace(&mut seen[from], true) {
            return false;
        }
        path.push(from);
        if from == to
            || self.slots[from].waits.iter().any(|next| self.reaches(*next, to, path, seen))
        {
            return true;
        }
        path.pop();
        false
    }
}

/// `Active` to `Deactivating`: the instance, or nothing while dependents are left.
fn take_out<I, W>(slot: &mut Slot<I, W>, why: Why) -> Option<I> {
    let deactivating = State::Deactivating { parked: None, why };
    let State::Active(instance) = std::mem::replace(&mut slot.state, deactivating) else {
        unreachable!("BUG: an instance was taken out of a slot that is not active");
    };
    if slot.dependents == 0 {
        return Some(instance);
    }
    if let State::Deactivating { parked, .. } = &mut slot.state {
        *parked = Some(instance);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { attempts: 2, generations: 2 };

    type Table = SlotTable<&'static str, ()>;

    fn ask(table: &mut Table, tool: u32) -> Ask<&'static str, ()> {
        table.ask(&Key::Tool(tool), "tool", false, LIMITS, || ())
    }

    fn by_hand(table: &mut Table, tool: u32) -> Ask<&'static str, ()> {
        table.ask(&Key::Tool(tool), "tool", true, LIMITS, || ())
    }

    /// A table in which tools 0 to n are active, each in the slot of its number.
    fn active(tools: u32) -> Table {
        let mut table = Table::new();
        for tool in 0..tools {
            let Ask::Start(slot, (), _) = ask(&mut table, tool) else {
                panic!("a new slot starts")
            };
            assert_eq!(table.commit(slot, "instance"), None);
        }
        table
    }

    fn error() -> ActivationError {
        ActivationError::new("tool", ActivationPhase::Failed, "no")
    }

    fn tainted() -> Why {
        Why::Tainted("bad".into())
    }

    #[test]
    fn the_first_asker_starts_and_the_others_wait() {
        let mut table = Table::new();
        assert!(matches!(ask(&mut table, 0), Ask::Start(0, (), _)));
        assert!(matches!(ask(&mut table, 0), Ask::Wait(0, ())));
        table.commit(0, "instance");
        assert!(matches!(ask(&mut table, 0), Ask::Ready(0, "instance")));
    }

    #[test]
    fn a_commit_under_a_closing_plan_goes_straight_to_deactivation() {
        let mut table = Table::new();
        ask(&mut table, 0);
        assert_eq!(table.close(EndReason::Dropped).map(|taken| taken.len()), Some(0));
        assert_eq!(table.commit(0, "instance"), Some(Why::End(EndReason::Dropped)));
        assert_eq!((table.open(), table.is_busy(0)), (1, true));
        table.settle(0);
        assert_eq!((table.open(), table.is_busy(0)), (0, false));
    }

    #[test]
    fn an_activation_that_the_host_dooms_is_deactivated_when_it_is_done() {
        let mut table = Table::new();
        ask(&mut table, 0);
        assert_eq!(table.retire(0, 1, Why::Host), Retired::Under);
        assert_eq!(table.retire(0, 1, Why::Host), Retired::Nothing);
        assert!(matches!(ask(&mut table, 0), Ask::Refused(Refused::Deactivated)));
        assert_eq!(table.commit(0, "instance"), Some(Why::Host));
        table.settle(0);
        assert!(matches!(ask(&mut table, 0), Ask::Refused(Refused::Deactivated)));
        assert!(matches!(by_hand(&mut table, 0), Ask::Start(0, (), _)));
        assert_eq!(table.generation(0), 2);
    }

    #[test]
    fn a_doomed_activation_that_fails_stays_deactivated() {
        let mut table = Table::new();
        ask(&mut table, 0);
        table.retire(0, 1, Why::Host);
        table.fail(0, error(), true);
        assert!(matches!(ask(&mut table, 0), Ask::Refused(Refused::Deactivated)));
    }

    #[test]
    fn attempts_that_count_run_out_and_others_do_not() {
        let mut table = Table::new();
        for counts in [false, false, true] {
            assert!(matches!(ask(&mut table, 0), Ask::Start(0, (), _)));
            table.fail(0, error(), counts);
        }
        assert!(matches!(ask(&mut table, 0), Ask::Start(0, (), _)));
        table.fail(0, error(), true);
        assert!(matches!(ask(&mut table, 0), Ask::Refused(Refused::Activation(_))));
    }

    #[test]
    fn the_first_reason_to_close_wins_and_the_instances_are_taken_once() {
        let mut table = active(2);
        assert_eq!(table.close(EndReason::Cancelled).map(|taken| taken.len()), Some(2));
        assert!(table.close(EndReason::Finished).is_none());
        assert_eq!(table.closing(), Some(EndReason::Cancelled));
        assert!(matches!(ask(&mut table, 0), Ask::Refused(Refused::Ended(EndReason::Cancelled))));
        assert_eq!(table.retire(0, 1, Why::Host), Retired::Nothing);
    }

    #[test]
    fn an_instance_with_dependents_waits_for_the_last_of_them() {
        let mut table = active(1);
        table.depend(0);
        table.depend(0);
        assert_eq!(table.close(EndReason::Finished).map(|taken| taken.len()), Some(0));
        assert_eq!(table.release(0), None);
        assert_eq!((table.open(), table.is_busy(0)), (1, true));
        assert_eq!(table.release(0), Some("instance"));
    }

    #[test]
    fn without_dependents_a_shared_one_stays_until_the_end() {
        let mut table = active(1);
        table.depend(0);
        assert_eq!(table.release(0), None);
        assert_eq!(table.close(EndReason::Finished).map(|taken| taken.len()), Some(1));
    }

    #[test]
    fn a_tainted_instance_is_replaced_as_often_as_the_limit_says() {
        let mut table = active(1);
        assert_eq!(table.retire(0, 1, tainted()), Retired::Start("instance"));
        assert!(matches!(ask(&mut table, 0), Ask::Later(0)));
        table.settle(0);
        assert!(matches!(ask(&mut table, 0), Ask::Start(0, (), _)));
        table.commit(0, "second");
        assert_eq!(table.retire(0, 1, tainted()), Retired::Nothing, "a call of the first instance");
        assert_eq!(table.retire(0, 2, tainted()), Retired::Start("second"));
        table.settle(0);
        let Ask::Refused(Refused::Activation(error)) = ask(&mut table, 0) else {
            panic!("the limit is 2")
        };
        assert_eq!(error.phase(), ActivationPhase::Exhausted);
        assert!(matches!(by_hand(&mut table, 0), Ask::Start(0, (), _)));
    }

    #[test]
    fn a_wait_that_closes_a_cycle_is_refused_and_names_it() {
        let mut table = Table::new();
        for (tool, name) in ["a", "b", "c"].into_iter().enumerate() {
            let key = Key::Tool(u32::try_from(tool).expect("few tools"));
            assert!(matches!(table.ask(&key, name, false, LIMITS, || ()), Ask::Start(..)));
        }
        table.wait_on(0, 1).expect("no cycle yet");
        table.wait_on(1, 2).expect("no cycle yet");
        assert_eq!(table.wait_on(2, 0).unwrap_err(), ["c", "a", "b", "c"]);
        table.wait_over(1, 2);
        table.wait_on(2, 0).expect("the cycle is gone");
        assert_eq!(table.wait_on(1, 1).unwrap_err(), ["b", "b"]);
    }
}
