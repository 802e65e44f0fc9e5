//! The record of what a plan did: one trace for each call, and the changes that tools reported.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};
use tokio::sync::broadcast::Sender;
use tokio::time::Instant;

use crate::approval::Remembered;
use crate::change::{Change, RecordedChange};
use crate::context::{CallState, PlanId};
use crate::error::OutcomeCode;
use crate::event::ToolEvent;
use crate::name::ToolName;
use crate::registry::Pinned;
use crate::span::Kept;

/// What happened in one call. Exactly one for each call that was polled while its plan was open,
/// refused and abandoned ones too.
///
/// Serialised it has `started_at` and `ended_at` (ISO-8601, UTC), `duration_ms` and `success` in
/// the place of `started` and `duration`.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ToolExecutionTrace {
    /// The plan.
    pub plan_id: PlanId,
    /// The call within its plan, from 1.
    pub call_id: u64,
    /// The call that made this one, where it is a nested one.
    pub parent_call_id: Option<u64>,
    /// The tool; as the caller wrote it where there is none of that name.
    pub tool: String,
    /// When the call began.
    pub started: SystemTime,
    /// How long it took.
    pub duration: Duration,
    /// How it ended.
    pub outcome: OutcomeCode,
    /// The output as JSON, in bytes; 0 without an output.
    pub result_size_bytes: usize,
    /// The call was cancelled, whether or not the tool still gave a result.
    pub cancelled: bool,
    /// Whether the output fits its schema; `None` where that was not checked.
    pub output_valid: Option<bool>,
    /// The text of the error; of a call with success, what is wrong with its output.
    pub error: Option<String>,
}

impl ToolExecutionTrace {
    /// Whether the call had success.
    pub fn success(&self) -> bool {
        self.outcome == OutcomeCode::Ok
    }

    /// When the call began: ISO-8601, UTC.
    pub fn started_at(&self) -> String {
        iso_8601(self.started)
    }

    /// When the call ended: ISO-8601, UTC.
    pub fn ended_at(&self) -> String {
        iso_8601(self.started + self.duration)
    }

    /// How long it took, in milliseconds.
    pub fn duration_ms(&self) -> f64 {
        self.duration.as_secs_f64() * 1000.0
    }
}

impl Serialize for ToolExecutionTrace {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut trace = serializer.serialize_struct("ToolExecutionTrace", 13)?;
        trace.serialize_field("plan_id", &self.plan_id)?;
        trace.serialize_field("call_id", &self.call_id)?;
        trace.serialize_field("parent_call_id", &self.parent_call_id)?;
        trace.serialize_field("tool", &self.tool)?;
        trace.serialize_field("started_at", &self.started_at())?;
        trace.serialize_field("ended_at", &self.ended_at())?;
        trace.serialize_field("duration_ms", &self.duration_ms())?;
        trace.serialize_field("success", &self.success())?;
        trace.serialize_field("outcome", &self.outcome)?;
        trace.serialize_field("result_size_bytes", &self.result_size_bytes)?;
        trace.serialize_field("cancelled", &self.cancelled)?;
        trace.serialize_field("output_valid", &self.output_valid)?;
        trace.serialize_field("error", &self.error)?;
        trace.end()
    }
}

fn iso_8601(time: SystemTime) -> String {
    jiff::Timestamp::try_from(time)
        .map_or_else(|_| "out of range".to_owned(), |time| time.to_string())
}

/// The same moment on both clocks: a plan reads the one that has a date once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    began: Instant,
    date: SystemTime,
}

impl Clock {
    pub(crate) fn begun(now: Instant) -> Self {
        Self { began: now, date: SystemTime::now() }
    }

    fn time_of(self, moment: Instant) -> SystemTime {
        self.date + moment.saturating_duration_since(self.began)
    }
}

/// A trace as it is kept: small, without an allocation of its own where the call had success.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) call: u64,
    /// 0 for none.
    pub(crate) parent: u64,
    pub(crate) began: Instant,
    /// Nanoseconds.
    pub(crate) took: u64,
    /// Bytes; 4 GiB stand for all that is more.
    pub(crate) size: u32,
    pub(crate) text: Option<Box<RecordText>>,
    /// [`NO_TOOL`] where there is none of that name.
    pub(crate) tool: u32,
    pub(crate) outcome: OutcomeCode,
    pub(crate) cancelled: bool,
    pub(crate) output_valid: Option<bool>,
}

impl Record {
    /// The trace, to be read.
    pub(crate) fn read(&self, plan_id: PlanId, clock: Clock, tools: &Pinned) -> ToolExecutionTrace {
        let named = tools.by_id(self.tool).map(|tool| tool.descriptor.name.to_string());
        let text = self.text.as_deref();
        ToolExecutionTrace {
            plan_id,
            call_id: self.call,
            parent_call_id: (self.parent != 0).then_some(self.parent),
            tool: named.or_else(|| text.map(|text| text.name.clone())).unwrap_or_default(),
            started: clock.time_of(self.began),
            duration: Duration::from_nanos(self.took),
            outcome: self.outcome,
            result_size_bytes: self.size as usize,
            cancelled: self.cancelled,
            output_valid: self.output_valid,
            error: text.map(|text| text.error.clone()),
        }
    }
}

/// The id that no tool has.
pub(crate) const NO_TOOL: u32 = u32::MAX;

/// What only an unsuccessful call has to say.
#[derive(Debug, Default)]
pub(crate) struct RecordText {
    /// The name that was asked for, where no tool has it.
    pub(crate) name: String,
    pub(crate) error: String,
}

/// Behind one lock of the plan: its traces, and what few plans have.
#[derive(Debug, Default)]
pub(crate) struct PlanLog {
    records: VecDeque<Record>,
    /// All calls up to this number have ended.
    ended: u64,
    rare: Option<Box<RareLog>>,
}

#[derive(Debug, Default)]
struct RareLog {
    /// Traces that had to go because of the cap.
    dropped: u64,
    changes: Vec<RecordedChange>,
    /// The state of calls that asked for one.
    states: Vec<(u64, Arc<CallState>)>,
    /// The calls beyond [`PlanLog::ended`] that have ended too: first and last of each run, in order.
    ended: Vec<(u64, u64)>,
    approvals: Remembered,
    /// Whoever listens to this plan.
    events: Option<Sender<ToolEvent>>,
    /// In an `Arc`: to clone a span is to call the subscriber, which is foreign code.
    span: Option<Arc<Kept>>,
}

impl PlanLog {
    fn rare(&mut self) -> &mut RareLog {
        self.rare.get_or_insert_default()
    }

    /// The decisions that hold for the rest of the plan.
    pub(crate) fn approvals(&mut self) -> &mut Remembered {
        &mut self.rare().approvals
    }

    /// The place of the channel to whoever listens to the plan.
    pub(crate) fn events(&mut self) -> &mut Option<Sender<ToolEvent>> {
        &mut self.rare().events
    }

    /// The channel to whoever listens to the plan, if anybody does.
    pub(crate) fn known_events(&self) -> Option<Sender<ToolEvent>> {
        self.rare.as_ref()?.events.clone()
    }

    /// The plan's span, where somebody collects spans.
    pub(crate) fn span(&self) -> Option<Arc<Kept>> {
        self.rare.as_ref()?.span.clone()
    }

    pub(crate) fn set_span(&mut self, span: Kept) {
        self.rare().span = Some(Arc::new(span));
    }

    /// The channel, when the last event of the plan is told.
    pub(crate) fn take_events(&mut self) -> Option<Sender<ToolEvent>> {
        self.rare.as_mut()?.events.take()
    }

    /// The span, when the plan has settled.
    pub(crate) fn take_span(&mut self) -> Option<Arc<Kept>> {
        self.rare.as_mut()?.span.take()
    }

    /// Keeps a trace; the oldest goes when there are `cap` of them. Gives the call's state back,
    /// where it had one.
    #[inline]
    pub(crate) fn record(&mut self, record: Record, cap: usize) -> Option<Arc<CallState>> {
        let call = record.call;
        if self.records.len() >= cap {
            self.records.pop_front();
            self.rare().dropped += 1;
        }
        self.records.push_back(record);
        self.end(call);
        let states = &mut self.rare.as_mut()?.states;
        let at = states.iter().position(|(of, _)| *of == call)?;
        Some(states.swap_remove(at).1)
    }

    /// Notes that a call is over.
    pub(crate) fn end(&mut self, call: u64) {
        if call == self.ended + 1 {
            self.ended = call;
            let runs = self.rare.as_mut().map(|rare| &mut rare.ended);
            if let Some(runs) =
                runs.filter(|runs| runs.first().is_some_and(|run| run.0 == call + 1))
            {
                self.ended = runs.remove(0).1;
            }
            return;
        }
        let runs = &mut self.rare().ended;
        let at = runs.partition_point(|run| run.1 < call);
        match (at.checked_sub(1).is_some_and(|before| runs[before].1 + 1 == call), runs.get(at)) {
            (true, Some(after)) if after.0 == call + 1 => runs[at - 1].1 = runs.remove(at).1,
            (true, _) => runs[at - 1].1 = call,
            (false, Some(after)) if after.0 == call + 1 => runs[at].0 = call,
            (false, _) => runs.insert(at, (call, call)),
        }
    }

    /// Whether a call is over. Calls are numbered from 1; 0 is none, and never over.
    pub(crate) fn has_ended(&self, call: u64) -> bool {
        let in_run = |run: &(u64, u64)| (run.0..=run.1).contains(&call);
        let beyond = || self.rare.as_ref().is_some_and(|rare| rare.ended.iter().any(in_run));
        call != 0 && (call <= self.ended || beyond())
    }

    /// The state of a call, made when first asked for. That of a call that is over is not kept.
    pub(crate) fn state(&mut self, call: u64, make: impl FnOnce() -> CallState) -> Arc<CallState> {
        if let Some(state) = self.known_state(call) {
            return state;
        }
        let state = Arc::new(make());
        if self.has_ended(call) {
            return state;
        }
        self.rare().states.push((call, Arc::clone(&state)));
        state
    }

    /// The state of a call that asked for one.
    pub(crate) fn known_state(&self, call: u64) -> Option<Arc<CallState>> {
        let states = &self.rare.as_ref()?.states;
        states.iter().find(|(of, _)| *of == call).map(|(_, state)| Arc::clone(state))
    }

    pub(crate) fn change(&mut self, tool: ToolName, call_id: u64, change: Change) {
        self.rare().changes.push(RecordedChange { tool, call_id, change });
    }

    /// The changes, to be read.
    pub(crate) fn changes(&self) -> Vec<RecordedChange> {
        self.rare.as_ref().map(|rare| rare.changes.clone()).unwrap_or_default()
    }

    /// How many traces had to go because of the cap.
    pub(crate) fn dropped(&self) -> u64 {
        self.rare.as_ref().map_or(0, |rare| rare.dropped)
    }

    /// The traces, to be read.
    pub(crate) fn traces(
        &self,
        plan_id: PlanId,
        clock: Clock,
        tools: &Pinned,
    ) -> Vec<ToolExecutionTrace> {
        self.records.iter().map(|record| record.read(plan_id, clock, tools)).collect()
    }
}

/// How the deactivation of one instance went.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct DeactivationRecord {
    /// The tool or shared activation.
    pub name: String,
    /// Which instance of it in this plan, from 1.
    pub generation: u32,
    /// How it went.
    pub outcome: DeactivationOutcome,
    /// An execution was still being polled when `deactivate` was called: the tool blocked its
    /// thread.
    pub overrun: bool,
    /// How long `deactivate` took. Serialised in milliseconds.
    #[serde(rename = "took_ms", serialize_with = "milliseconds")]
    pub took: Duration,
}

fn milliseconds<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64() * 1000.0)
}

/// How a deactivation went. In every case but the last `deactivate` was called, once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DeactivationOutcome {
    /// It returned `Ok`.
    Ok,
    /// It returned an error.
    Failed(String),
    /// It panicked.
    Panicked(String),
    /// It did not return by its deadline.
    TimedOut,
    /// The keeper ended while it ran.
    Abandoned,
    /// It could not be called at all: the keeper had ended and no thread could be had.
    Lost,
}
