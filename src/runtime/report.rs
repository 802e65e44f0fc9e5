//! What a runtime tells of itself: its books, and how a shutdown went.

use serde::Serialize;

use crate::context::PlanId;

/// The ledger of a runtime. At any quiet moment `activated == deactivated + open + lost`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[non_exhaustive]
pub struct Stats {
    /// Plans that have not settled.
    pub plans: usize,
    /// Attempts to activate.
    pub started: u64,
    /// Activations that returned `Ok`.
    pub activated: u64,
    /// Attempts that gave no instance.
    pub failed: u64,
    /// Instances whose `deactivate` was called and is over, however it went.
    pub deactivated: u64,
    /// Those of them that did not go well, and the lost ones.
    pub troubled: u64,
    /// Instances that are active, or on their way out: counted by walking the slots of all plans.
    pub open: u64,
    /// Instances whose `deactivate` could not be called.
    pub lost: u64,
    /// How often all threads of the keeper were found blocked, by a look each second.
    pub keeper_blocked: u64,
}

/// How a shutdown went.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct ShutdownReport {
    /// The plans that had not settled at the deadline. Their deactivations go on while the runtime
    /// lives.
    pub stragglers: Vec<Straggler>,
    /// The ledger at the end.
    pub stats: Stats,
}

/// A plan that had not settled when a shutdown's deadline passed.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Straggler {
    /// The plan; 0 is the root scope.
    pub plan_id: PlanId,
    /// What it waits for, by name.
    pub unsettled: Vec<String>,
}
