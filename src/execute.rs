//! The path of a call. One function, read from top to bottom; each step is a room.
//!
//! Everything cheap that can refuse stands before anything that costs or acts. A guard made in room
//! 1 writes the trace, whatever happens after. There is no other way to execute a tool.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use crate::approval::{Approved, Asked, unasked};
use crate::contain::Contained;
use crate::context::ToolExecutionContext;
use crate::error::{
    ActivationError, ActivationPhase, CallError, OutcomeCode, ToolCancelled, ToolRuntimeError,
};
use crate::event::{EventKind, Wait};
use crate::lease::Lease;
use crate::limit::{cut, measure, reserve, size_of, take_apart};
use crate::obligation::Active;
use crate::options::{CallOptions, OutputCheck, PlanSettings};
use crate::policy::{Admitted, admit};
use crate::registry::ToolEntry;
use crate::schema::{Schema, SchemaValidationError};
use crate::scope::{PlanScope, ended_error};
use crate::slot::{Key, Refused};
use crate::sync::lock;
use crate::tool::{ToolOutput, ToolResult};

use ask::{Asker, ask, denied};
use interrupt::{Interrupts, stopped};
use layered::Layered;
use record::CallRecord;
use run::{failure, leased, raced, without_output};

// In the order of the rooms.
mod layered;

mod ask;
mod run;

mod record;

mod interrupt;

/// The deepest nesting of an output: what JSON parsers read. Everything that looks at a value, its
/// drop too, recurses through it, and a stack that overflows is the end of the process.
const MOST_NESTED: usize = 127;
/// What the runtime says in the metadata of a result.
const OWN_WORDS: [&str; 6] =
    ["code", "faults", "input_changed", "output_faults", "output_valid", "truncated"];
/// The deepest nesting of calls.
const MOST_DEPTH: u32 = 16;

/// The calls above a nested one.
#[derive(Debug)]
pub(crate) struct Frame {
    call: u64,
    tool: u32,
    depth: u32,
    parent: Option<Arc<Frame>>,
}

impl Frame {
    /// `begun_by` is the call that began the plan: all of them are on one stack.
    pub(crate) fn new(
        call: u64,
        tool: u32,
        parent: Option<Arc<Self>>,
        begun_by: Option<&Arc<Self>>,
    ) -> Self {
        let depth = parent.as_ref().or(begun_by).map_or(1, |above| above.depth + 1);
        Self { call, tool, depth, parent }
    }

    /// This call and those above it.
    fn all(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |frame| frame.parent.as_deref())
    }

    /// Whether a call above holds the permit of that tool.
    fn holds(&self, tool: u32) -> bool {
        self.all().any(|frame| frame.tool == tool)
    }
}

/// Why a call does not reach its end. One word, because every await hands it on; only a call that
/// stops pays for it.
struct Stop(Box<Stopped>);

enum Stopped {
    /// The tool or the model did wrong: a result to show the model.
    Failed(OutcomeCode, String),
    /// The same, with what is for the trace only.
    Unsaid(OutcomeCode, &'static str, String),
    /// The input, or the output, breaks its schema.
    Broken(OutcomeCode, SchemaValidationError),
    /// The host must know.
    Err(CallError),
}

impl<E: Into<CallError>> From<E> for Stop {
    fn from(error: E) -> Self {
        Self(Box::new(Stopped::Err(error.into())))
    }
}

impl Stop {
    fn failed(code: OutcomeCode, message: String) -> Self {
        Self(Box::new(Stopped::Failed(code, message)))
    }

    fn unsaid(code: OutcomeCode, message: &'static str, trace: String) -> Self {
        Self(Box::new(Stopped::Unsaid(code, message, trace)))
    }

    fn broken(code: OutcomeCode, faults: SchemaValidationError) -> Self {
        Self(Box::new(Stopped::Broken(code, faults)))
    }
}

/// What is asked for, and in which plan. It stays where the caller made it; the rooms borrow it.
pub(crate) struct Call<'a> {
    pub(crate) scope: &'a Arc<PlanScope>,
    pub(crate) name: &'a str,
    /// Or what is wrong with it, where it was to be JSON and is not.
    pub(crate) input: Result<&'a Value, &'a str>,
    pub(crate) options: CallOptions,
    /// The calls above a nested one.
    pub(crate) above: Option<Arc<Frame>>,
}

impl<'a> Call<'a> {
    /// A call that no other call makes.
    pub(crate) fn new(
        scope: &'a Arc<PlanScope>,
        name: &'a str,
        input: Result<&'a Value, &'a str>,
        options: CallOptions,
    ) -> Self {
        Self { scope, name, input, options, above: None }
    }
}

/// Executes a tool: the one way.
pub(crate) async fn call(call: &Call<'_>) -> Result<ToolResult, CallError> {
    // 1 open
    let Some(mut lease) = enter(call.scope) else {
        return Err(call.scope.ended_error());
    };
    let mut record = CallRecord::begin(call, lease.call());
    let span = record.span.as_ref().map(|kept| kept.span().clone());
    let ended = {
        let rooms = pin!(rooms(call, &mut record));
        match span {
            None => lease.run(rooms).await,
            Some(span) => lease.run(rooms).instrument(span).await,
        }
    };
    record.close(ended)
}

/// Activates a tool by hand: the same rooms, up to the activation.
pub(crate) async fn activate(scope: &Arc<PlanScope>, name: &str) -> Result<(), CallError> {
    let mut lease = enter(scope).ok_or_else(|| scope.ended_error())?;
    let number = lease.call();
    let _over = NumberOver { scope, call: number };
    let rooms = pin!(async {
        let tool = scope.resolve(name)?;
        let admitted = gate(scope, tool)?;
        if tool.immediate.is_some() {
            // There is nothing to activate, and nobody to be asked about it.
            return Ok(());
        }
        let active = scope.inner().slots.active(&Key::Tool(tool.id)).cloned();
        if let Some(active) = active {
            return unchanged(scope, tool, &active);
        }
        let mut interrupts = Interrupts::none(scope, number);
        let asker = Asker { scope, tool, call: number, above: None };
        let answer = match admitted.needs_approval {
            None => Asked::Approved(unasked()),
            Some(reason) => ask(&asker, reason, &Value::Null, None, &mut interrupts).await?,
        };
        match answer {
            Asked::Approved(approved) => by_hand(scope, tool, approved).await,
            Asked::Denied(reason) => Err(denied(tool, reason, false).into()),
            Asked::Changed(..) => {
                let reason = "to activate a tool by hand there is no input to change".to_owned();
                Err(denied(tool, reason, false).into())
            }
        }
    });
    match lease.run(rooms).await {
        Some(Ok(())) => Ok(()),
        Some(Err(Stop(stopped))) => match *stopped {
            Stopped::Err(error) => Err(error),
            Stopped::Failed(..) | Stopped::Unsaid(..) | Stopped::Broken(..) => {
                unreachable!("BUG: without a call no tool and no model does wrong")
            }
        },
        None => Err(scope.ended_error()),
    }
}

async fn by_hand(
    scope: &Arc<PlanScope>,
    tool: &Arc<ToolEntry>,
    _approved: Approved,
) -> Result<(), Stop> {
    let active = scope.tool_instance(tool, true).await;
    let active = active.map_err(|refused| refused_error(tool, refused))?;
    unchanged(scope, tool, &active)
}

/// Gives the number of what is no call, and leaves no trace, back when it is over.
struct NumberOver<'a> {
    scope: &'a PlanScope,
    call: u64,
}

impl Drop for NumberOver<'_> {
    fn drop(&mut self) {
        lock(&self.scope.log).end(self.call);
    }
}

/// Room 1.
#[inline]
fn enter(scope: &Arc<PlanScope>) -> Option<Lease<'_>> {
    scope.notice_tokens();
    scope.gate.enter()
}

#[expect(clippy::too_many_lines, reason = "the path of a call is one function, a page long")]
async fn rooms(call: &Call<'_>, record: &mut CallRecord<'_>) -> Result<(), Stop> {
    let (scope, above) = (call.scope, call.above.as_ref());
    if call.options.token.as_ref().is_some_and(CancellationToken::is_cancelled) {
        record.cancelled = true;
        return Err(ToolCancelled.into());
    }

    // 2 resolve
    let tool = scope.resolve(call.name)?;
    record.tool = Some(tool.id);
    let settings = scope.settings();
    let mut interrupts = Interrupts::of(call, tool, record);

    // The layers, on the way in: what they change, and what they answer, goes by all that follows.
    let mut layered = match call.input {
        Ok(input) if !scope.core.layers.is_empty() => {
            Some(Box::pin(Layered::enter(call, tool, input, &interrupts)).await?)
        }
        _ => None,
    };
    let mut granted = None;
    let approved = loop {
        let input = call.input.map(|input| Layered::input(layered.as_deref()).unwrap_or(input));

        // 3 gate
        let admitted = gate(scope, tool)?;
        if above.or(settings.begun_by.as_ref()).is_some_and(|frame| frame.depth > MOST_DEPTH) {
            return Err(too_deep(tool));
        }
        if !record.reserved && !settings.quotas.is_empty() {
            reserved(settings, tool)?;
            record.reserved = true;
        }

        // 4 check input
        let checked = check_input(tool, input)?;
        if layered.as_ref().is_some_and(|layered| layered.answer.is_some()) {
            break None;
        }

        // 5 approve
        let Some(reason) = admitted.needs_approval else {
            break Some(unasked());
        };
        let asker = Asker { scope, tool, call: record.call, above };
        match Box::pin(ask(&asker, reason, checked, granted, &mut interrupts)).await? {
            Asked::Approved(approved) => break Some(approved),
            Asked::Changed(input, fingerprint) => {
                layered.get_or_insert_default().input = Some(input);
                granted = Some(fingerprint);
                record.input_changed = true;
            }
            Asked::Denied(reason) => return Err(denied(tool, reason, false).into()),
        }
    };
    if approved.is_none() {
        record.reached = true;
        record.given = layered.as_mut().and_then(|layered| layered.answer.take()).map(Ok);
    }
    let input = call.input.map(|input| Layered::input(layered.as_deref()).unwrap_or(input));
    let input = input.unwrap_or(&Value::Null);

    // What a layer answered replaces rooms 5 to 9.
    if let Some(approved) = &approved {
        // 6 permit
        let _of_the_plan = match &settings.permits {
            Some(permits) if above.is_none() => {
                let asked = Instant::now();
                let permit = permit(permits, tool, Wait::PlanPermit, &interrupts, None).await?;
                // That wait does not count as time of the call.
                interrupts.began += asked.elapsed();
                Some(permit)
            }
            _ => None,
        };
        let _of_the_tool = match &tool.permits {
            Some(permits) if !is_held_above(scope, above, tool.id) => {
                let left = interrupts.left();
                Some(permit(permits, tool, Wait::ToolPermit, &interrupts, left).await?)
            }
            _ => None,
        };

        // 7 checkpoint: comes with the checkpointer; until then the gate refuses what would need
        // one.

        // 8 activate
        let mut active = None;
        while tool.immediate.is_none() && active.is_none() {
            let found = scope.inner().slots.active(&Key::Tool(tool.id)).cloned();
            let found = match found {
                Some(found) => found,
                // Boxed: the cold path must not make the future of every call larger.
                None => Box::pin(activated(tool, approved, &interrupts)).await?,
            };
            unchanged(scope, tool, &found)?;
            // An instance that is being retired lets nobody in, and is out of its slot: ask again.
            active = found.gate.admit().map(|number| (found, number));
        }
        let managed = active.as_ref().map(|(active, number)| {
            record.instance = Some((active.slot, active.generation));
            (active, Lease::admitted(&active.gate, *number))
        });

        // 9 execute
        // What was waited for may have come together with the end: nothing starts after that.
        if interrupts.is_cancelled() {
            return Err(stopped(&interrupts));
        }
        record.reached = true;
        scope.tell(Some(record.call), || (Some(named(tool)), EventKind::Executing));
        let instance = managed.as_ref().map(|(active, _)| *active);
        let ctx = ToolExecutionContext::new(call, record.call, tool.id, instance);
        let given = &mut record.given;
        let ended = match (&tool.immediate, managed) {
            (Some(instance), _) => {
                let work = Contained::new(|| instance.execute(&ctx, input));
                raced(work, &ctx, &interrupts, given).await
            }
            (None, Some((active, lease))) => {
                leased(active, lease, &ctx, input, &interrupts, given).await
            }
            (None, None) => unreachable!("BUG: a managed tool runs under a lease"),
        };
        record.cancelled = interrupts.is_cancelled();
        if let Err(broken) = ended {
            return Err(without_output(*broken, tool, &interrupts));
        }
    }

    // The layers, on the way out. They may copy what they see, which no stack could bear.
    if let Some(layered) = &layered {
        if let Some(Ok(output)) = &mut record.given {
            bounded(output)?;
        }
        Box::pin(layered.leave(call, tool, input, &interrupts, &mut record.given)).await?;
    }
    let output = match &mut record.given {
        Some(Ok(output)) => output,
        failed => return Err(failure(failed.take(), &interrupts)),
    };
    forget_own_words(output);

    // 10 check output
    let size = bounded(output)?;
    if let (Some(schema), false) = (&tool.output, settings.output_check == OutputCheck::Off) {
        let valid = schema.is_valid(&output.value);
        record.output_valid = Some(valid);
        if !valid {
            record.warning = Some(broken_output(tool, schema, output, settings.output_check)?);
        }
    }

    // 11 limit
    let most = settings.max_output;
    record.size = if size > most { cut_output(output, size, most) } else { size };
    Ok(())

    // 12 record: the guard, in whose hands the result goes.
}

// ===== room 3: gate =====

#[inline]
fn gate(scope: &PlanScope, tool: &ToolEntry) -> Result<Admitted, Stop> {
    let settings = scope.settings();
    let admitted = admit(settings.rights, &settings.rules, &tool.descriptor, &settings.resources);
    admitted.map_err(Into::into)
}

#[cold]
fn too_deep(tool: &ToolEntry) -> Stop {
    over(tool, false, format!("calls are nested more than {MOST_DEPTH} deep")).into()
}

/// Takes a place in the plan's quotas.
fn reserved(settings: &PlanSettings, tool: &ToolEntry) -> Result<(), Stop> {
    let reserved = reserve(&settings.quotas, &tool.descriptor.name);
    reserved.map_err(|reason| over(tool, false, reason).into())
}

// ===== room 4: check input =====

/// Gives the input that fits.
#[inline]
fn check_input<'a>(tool: &ToolEntry, input: Result<&'a Value, &'a str>) -> Result<&'a Value, Stop> {
    let invalid = |message: String| Stop::failed(OutcomeCode::InvalidInput, message);
    let input = input.map_err(|problem| invalid(problem.to_owned()))?;
    if !input.is_object() {
        let kind = kind_of(input);
        return Err(invalid(format!("the input must be a JSON object, it is {kind}")));
    }
    match &tool.input {
        Some(schema) if !schema.is_valid(input) => Err(broken_input(schema, input)),
        _ => Ok(input),
    }
}

#[cold]
fn broken_input(schema: &Schema, input: &Value) -> Stop {
    match schema.check(input) {
        Err(faults) => Stop::broken(OutcomeCode::InvalidInput, faults),
        Ok(()) => unreachable!("BUG: the schema says both"),
    }
}

// ===== room 6: permit =====

/// Whether a call above holds the permit of that tool, in this plan or in one that a tool began it
/// from.
fn is_held_above(scope: &PlanScope, above: Option<&Arc<Frame>>, tool: u32) -> bool {
    let (mut plan, mut above) = (scope, above);
    loop {
        if above.is_some_and(|frame| frame.holds(tool)) {
            return true;
        }
        let (Some(parent), Some(by)) = (&plan.parent, &plan.settings().begun_by) else {
            return false;
        };
        // A call that is over has given its permits back: there is nothing to inherit.
        if lock(&parent.log).has_ended(by.call) {
            return false;
        }
        (plan, above) = (parent, Some(by));
    }
}

async fn permit<'a>(
    semaphore: &'a Semaphore,
    tool: &ToolEntry,
    whose: Wait,
    interrupts: &Interrupts<'_>,
    left: Option<Duration>,
) -> Result<SemaphorePermit<'a>, Stop> {
    match semaphore.try_acquire() {
        Ok(permit) => Ok(permit),
        Err(_) => Box::pin(late_permit(semaphore, tool, whose, interrupts, left)).await,
    }
}

async fn late_permit<'a>(
    semaphore: &'a Semaphore,
    tool: &ToolEntry,
    whose: Wait,
    interrupts: &Interrupts<'_>,
    left: Option<Duration>,
) -> Result<SemaphorePermit<'a>, Stop> {
    let most = interrupts.scope.settings().permit_wait;
    let wait = left.map_or(most, |left| left.min(most));
    let scope = interrupts.scope;
    scope.tell(Some(interrupts.call), || (Some(named(tool)), EventKind::Waiting { on: whose }));
    let whose = if whose == Wait::PlanPermit { "plan" } else { "tool" };
    tokio::select! {
        biased;
        permit = semaphore.acquire() => permit.map_err(|_| scope.ended_error().into()),
        () = interrupts.stop() => Err(stopped(interrupts)),
        () = scope.core.sleep(wait) => {
            Err(over(tool, true, format!("the {whose}'s limit of calls at once left no room within {wait:?}")).into())
        }
    }
}

fn over(tool: &ToolEntry, concurrency: bool, reason: String) -> ToolRuntimeError {
    ToolRuntimeError::LimitExceeded { tool: tool.descriptor.name.clone(), concurrency, reason }
}

// ===== room 8: activate =====

async fn activated(
    tool: &Arc<ToolEntry>,
    _approved: &Approved,
    interrupts: &Interrupts<'_>,
) -> Result<Arc<Active>, Stop> {
    tokio::select! {
        biased;
        activated = interrupts.scope.tool_instance(tool, false) => {
            activated.map_err(|refused| refused_error(tool, refused).into())
        }
        () = interrupts.stop() => Err(stopped(interrupts)),
        () = interrupts.deadline() => {
            let message = "the call's deadline passed first; the activation goes on".to_owned();
            Err(ActivationError::new(tool.descriptor.name.as_str(), ActivationPhase::CallTimedOut, message).into())
        }
    }
}

/// Whether an instance is of the tool as the plan knows it now.
fn unchanged(scope: &PlanScope, tool: &ToolEntry, active: &Active) -> Result<(), Stop> {
    if active.version == tool.version || scope.tools.is_version(tool, active.version) {
        return Ok(());
    }
    let tool = tool.descriptor.name.clone();
    Err(ToolRuntimeError::DefinitionChanged { tool }.into())
}

impl From<ActivationError> for CallError {
    fn from(error: ActivationError) -> Self {
        Self::Runtime(error.into())
    }
}

fn refused_error(tool: &ToolEntry, refused: Refused) -> CallError {
    match refused {
        Refused::Ended(reason) => ended_error(reason),
        Refused::Activation(error) => error.into(),
        Refused::Deactivated => {
            let reason = "the host deactivated it; `activate` brings it back".to_owned();
            not_activated(tool, reason)
        }
    }
}

fn not_activated(tool: &ToolEntry, reason: String) -> CallError {
    ToolRuntimeError::NotActivated { tool: named(tool), reason }.into()
}

// ===== rooms 10 and 11: check output, limit =====

/// The runtime's own words in the metadata are the runtime's alone.
fn forget_own_words(output: &mut ToolOutput) {
    if !output.metadata.is_empty() {
        for word in OWN_WORDS {
            output.metadata.remove(word);
        }
    }
}

/// The bytes of an output that is nested no deeper than JSON may be, its metadata too.
fn bounded(output: &mut ToolOutput) -> Result<usize, Stop> {
    let is_flat = |field: &Value| measure(field, MOST_NESTED - 1).is_some();
    match measure(&output.value, MOST_NESTED) {
        Some(size) if output.metadata.values().all(is_flat) => Ok(size),
        _ => Err(too_deep_output(output)),
    }
}

#[cold]
fn too_deep_output(output: &mut ToolOutput) -> Stop {
    take_apart(output.value.take());
    take_apart(Value::Object(std::mem::take(&mut output.metadata)));
    let message = format!("the output cannot be JSON: it is nested more than {MOST_NESTED} deep");
    Stop::failed(OutcomeCode::InvalidOutput, message)
}

/// What an output is worth that breaks its schema: no success, or a warning for the trace.
#[cold]
fn broken_output(
    tool: &ToolEntry,
    schema: &Schema,
    output: &mut ToolOutput,
    check: OutputCheck,
) -> Result<String, Stop> {
    let Err(faults) = schema.check(&output.value) else {
        unreachable!("BUG: the schema says both");
    };
    tracing::warn!(
        target: "toolscope::call",
        tool = %tool.descriptor.name,
        faults = faults.faults.len() + faults.more,
        "an output breaks its schema"
    );
    if check == OutputCheck::Reject {
        return Err(Stop::broken(OutcomeCode::InvalidOutput, faults));
    }
    let warning = format!("the output breaks its schema: {faults}");
    output.metadata.insert("output_valid".to_owned(), Value::Bool(false));
    output.metadata.insert("output_faults".to_owned(), faults.to_json());
    Ok(warning)
}

/// Cuts an output, says so, and gives the bytes that it has now.
#[cold]
fn cut_output(output: &mut ToolOutput, size: usize, most: usize) -> usize {
    output.value = cut(output.value.take(), most);
    let kept = size_of(&output.value);
    let said = json!({"from_bytes": size, "to_bytes": kept});
    output.metadata.insert("truncated".to_owned(), said);
    kept
}

// ===== small things =====

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

fn named(tool: &ToolEntry) -> String {
    tool.descriptor.name.to_string()
}
