//! The path of a call. One function, read from top to bottom; each step is a room.
//!
//! Everything cheap that can refuse stands before anything that costs or acts. A guard made in room
//! 1 writes the trace, whatever happens after. There is no other way to execute a tool.

use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use crate::approval::{
    ApprovalRequest, Approved, Asked, Decision, Fingerprint, decided, fingerprint, hexadecimal,
    unasked,
};
use crate::contain::{BoxFuture, Contained, drop_contained};
use crate::context::{CallState, ToolExecutionContext};
use crate::error::{
    ActivationError, ActivationPhase, CallError, OutcomeCode, ToolCancelled, ToolRuntimeError,
};
use crate::event::{EventKind, Wait};
use crate::keeper::Begin;
use crate::layer::{Entered, LayerCall};
use crate::lease::Lease;
use crate::limit::{cut, give_back, reserve, size_of, take_apart};
use crate::obligation::{Active, Held};
use crate::options::{OutputCheck, PlanSettings};
use crate::policy::{Admitted, admit};
use crate::registry::ToolEntry;
use crate::schema::{Schema, SchemaValidationError, is_deeper_than};
use crate::scope::{PlanScope, ended_error};
use crate::slot::{Key, Refused, SlotId, Why};
use crate::span::{self, Kept};
use crate::sync::lock;
use crate::tool::{FailureKind, ToolFailure, ToolOutput, ToolResult};
use crate::trace::{NO_TOOL, Record, RecordText, ToolExecutionTrace};

/// The longest text of an error that a trace keeps, in bytes.
const MOST_ERROR_TEXT: usize = 4096;
/// The deepest nesting of an output: what JSON parsers read. Everything that looks at a value, its
/// drop too, recurses through it, and a stack that overflows is the end of the process.
const MOST_NESTED: usize = 127;
/// What the runtime says in the metadata of a result.
const OWN_WORDS: [&str; 6] =
    ["code", "faults", "input_changed", "output_faults", "output_valid", "truncated"];
/// The deepest nesting of calls.
const MOST_DEPTH: u32 = 16;

/// How one call differs from the plan's other calls.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use toolscope::CallOptions;
///
/// let options = CallOptions::new().timeout(Duration::from_secs(5));
/// ```
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct CallOptions {
    timeout: Option<Duration>,
    pub(crate) token: Option<CancellationToken>,
    id: Option<Box<str>>,
}

impl CallOptions {
    /// No limit and no token of its own.
    pub fn new() -> Self {
        Self::default()
    }

    /// Limits the time of the call. The shortest of the call's, the plan's and the tool's own limit
    /// wins.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.timeout = Some(limit);
        self
    }

    /// Cancels the call when the token is cancelled: the tool sees it, has the plan's grace, and is
    /// dropped then.
    pub fn token(mut self, token: CancellationToken) -> Self {
        self.token = Some(token);
        self
    }

    /// The id that a model gave the call. It stands in the call's span.
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.id = Some(id.into().into());
        self
    }

    pub(crate) fn model_id(&self) -> Option<&str> {
        self.id.as_deref()
    }
}

/// The calls above a nested one.
#[derive(Debug)]
pub(crate) struct Frame {
    call: u64,
    tool: u32,
    depth: u32,
    parent: Option<Arc<Frame>>,
}

impl Frame {
    pub(crate) fn new(call: u64, tool: u32, parent: Option<Arc<Self>>) -> Self {
        Self { call, tool, depth: parent.as_ref().map_or(1, |parent| parent.depth + 1), parent }
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
            Stopped::Failed(..) | Stopped::Broken(..) => {
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
    let tool = match scope.tools.latest().find(call.name) {
        Some(tool) => tool,
        None => scope.resolve(call.name)?,
    };
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
        if above.is_some_and(|frame| frame.depth > MOST_DEPTH) {
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
            Some(permits) if !above.is_some_and(|frame| frame.holds(tool.id)) => {
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

    // The layers, on the way out.
    if let Some(layered) = &layered {
        Box::pin(layered.leave(call, tool, input, &interrupts, &mut record.given)).await?;
    }
    let output = match &mut record.given {
        Some(Ok(output)) => output,
        failed => return Err(failure(failed.take(), &interrupts)),
    };
    forget_own_words(output);

    // 10 check output
    if is_deeper_than(&output.value, MOST_NESTED) {
        return Err(output_too_deep(output));
    }
    if let (Some(schema), false) = (&tool.output, settings.output_check == OutputCheck::Off) {
        let valid = schema.is_valid(&output.value);
        record.output_valid = Some(valid);
        if !valid {
            record.warning = Some(broken_output(tool, schema, output, settings.output_check)?);
        }
    }

    // 11 limit
    record.size = size_of(&output.value);
    if record.size > settings.max_output {
        record.size = cut_output(output, record.size, settings.max_output);
    }
    Ok(())

    // 12 record: the guard, in whose hands the result goes.
}

// ===== the layers =====

/// What the layers, or an approver, made of a call.
#[derive(Default)]
struct Layered {
    /// The input in the place of the caller's.
    input: Option<Value>,
    answer: Option<ToolOutput>,
    passed: usize,
}

impl Layered {
    /// The input in the place of the caller's, where there is one.
    fn input(layered: Option<&Self>) -> Option<&Value> {
        layered?.input.as_ref()
    }

    async fn enter(
        call: &Call<'_>,
        tool: &ToolEntry,
        input: &Value,
        interrupts: &Interrupts<'_>,
    ) -> Result<Box<Self>, Stop> {
        let facts = facts(call, tool, input, interrupts.call);
        let entered = tokio::select! {
            biased;
            entered = call.scope.core.layers.enter(&facts) => entered,
            stop = interrupts.before(tool) => return Err(stop),
        };
        let entered = entered.map_err(|reason| {
            let tool = named(tool);
            ToolRuntimeError::AccessDenied { tool, reason }
        })?;
        let Entered { passed, input, answer } = entered;
        Ok(Box::new(Self { input, answer, passed }))
    }

    async fn leave(
        &self,
        call: &Call<'_>,
        tool: &ToolEntry,
        input: &Value,
        interrupts: &Interrupts<'_>,
        given: &mut Given,
    ) -> Result<(), Stop> {
        if self.passed == 0 {
            return Ok(());
        }
        let Some(taken) = given.take() else {
            return Ok(());
        };
        let facts = facts(call, tool, input, interrupts.call);
        let left = tokio::select! {
            biased;
            left = call.scope.core.layers.leave(&facts, self.passed, taken) => left,
            stop = interrupts.before(tool) => return Err(stop),
        };
        *given = Some(left.map_err(|text| Stop::failed(OutcomeCode::Panic, text))?);
        Ok(())
    }
}

fn facts<'a>(call: &Call<'a>, tool: &'a ToolEntry, input: &'a Value, number: u64) -> LayerCall<'a> {
    LayerCall {
        plan_id: call.scope.id,
        call_id: number,
        parent_call_id: call.above.as_ref().map(|frame| frame.call),
        tool: &tool.descriptor,
        input,
        metadata: &call.scope.settings().metadata,
    }
}

// ===== room 3: gate =====

fn gate(scope: &PlanScope, tool: &ToolEntry) -> Result<Admitted, Stop> {
    let settings = scope.settings();
    let admitted = admit(settings.rights, &settings.rules, &tool.descriptor, &settings.resources);
    admitted.map_err(|denied| (*denied).into())
}

#[cold]
fn too_deep(tool: &ToolEntry) -> Stop {
    over(tool, false, format!("calls are nested more than {MOST_DEPTH} deep")).into()
}

/// Takes a place in the plan's quotas.
#[cold]
fn reserved(settings: &PlanSettings, tool: &ToolEntry) -> Result<(), Stop> {
    let reserved = reserve(&settings.quotas, &tool.descriptor.name);
    reserved.map_err(|reason| over(tool, false, reason).into())
}

// ===== room 4: check input =====

/// Gives the input that fits.
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

// ===== room 5: approve =====

/// For which call an approval is asked.
struct Asker<'a> {
    scope: &'a Arc<PlanScope>,
    tool: &'a ToolEntry,
    call: u64,
    above: Option<&'a Arc<Frame>>,
}

/// Asks the plan's approver, and waits: bounded, and at nobody's cost.
async fn ask(
    asker: &Asker<'_>,
    reason: &str,
    input: &Value,
    granted: Option<Fingerprint>,
    interrupts: &mut Interrupts<'_>,
) -> Result<Asked, Stop> {
    let Asker { scope, tool, call, above } = *asker;
    let (descriptor, settings) = (&tool.descriptor, scope.settings());
    let definition = *tool.digest();
    let wanted = fingerprint(&definition, input);
    let known = lock(&scope.log).approvals().covers(&wanted, &definition, granted);
    if let Some(approved) = known {
        return Ok(Asked::Approved(approved));
    }
    let Some(approver) = &settings.approver else {
        let (tool, reason) = (descriptor.name.clone(), reason.to_owned());
        return Err(ToolRuntimeError::ApprovalRequired { tool, reason }.into());
    };
    let request = ApprovalRequest {
        plan_id: scope.id,
        call_id: call,
        tool: descriptor.name.clone(),
        description: descriptor.description.clone(),
        capability: descriptor.capability,
        reason: reason.to_owned(),
        input: input.clone(),
        fingerprint: hexadecimal(&wanted),
        metadata: settings.metadata.clone(),
    };
    scope.tell(Some(call), || (Some(named(tool)), EventKind::Waiting { on: Wait::Approval }));
    let decision = {
        let _paused = Paused::begin(scope, above);
        let since = Instant::now();
        let decision = tokio::select! {
            biased;
            decision = approver.ask(&request) => decision,
            () = interrupts.stop() => return Err(stopped(interrupts)),
            () = scope.core.sleep(settings.approval_wait) => {
                let wait = settings.approval_wait;
                Ok(Decision::deny(format!("nobody answered within {wait:?}")))
            }
        };
        interrupts.began += since.elapsed();
        decision.map_err(|problem| denied(tool, problem, true))?
    };
    let (answer, remembered) = decided(decision, wanted, definition);
    if let Some(fingerprint) = remembered {
        lock(&scope.log).approvals().add(fingerprint);
    }
    Ok(answer)
}

/// While it lives the time of the calls above does not count, nor of those that began the plan.
struct Paused(Vec<Arc<CallState>>);

impl Paused {
    fn begin(scope: &PlanScope, above: Option<&Arc<Frame>>) -> Self {
        let mut states = Vec::new();
        let (mut plan, mut above) = (Some(scope), above);
        while let Some(scope) = plan {
            for frame in above.into_iter().flat_map(|frame| frame.all()) {
                states.push(lock(&scope.log).state(frame.call, CallState::new));
            }
            (plan, above) = (scope.parent.as_deref(), scope.settings().begun_by.as_ref());
        }
        for state in &states {
            state.pause.begin();
        }
        Self(states)
    }
}

impl Drop for Paused {
    fn drop(&mut self) {
        for state in &self.0 {
            state.pause.end();
        }
    }
}

fn denied(tool: &ToolEntry, reason: String, broken: bool) -> ToolRuntimeError {
    ToolRuntimeError::ApprovalDenied { tool: tool.descriptor.name.clone(), reason, broken }
}

// ===== room 6: permit =====

fn least(one: Option<Duration>, other: Option<Duration>) -> Option<Duration> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
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
            let (tool, reason) =
                (tool.descriptor.name.to_string(), "the host deactivated it".to_owned());
            ToolRuntimeError::NotActivated { tool, reason }.into()
        }
    }
}

// ===== room 9: execute =====

/// What a tool gave.
type Given = Option<Result<ToolOutput, ToolFailure>>;

/// Why a tool gave nothing.
enum Broken {
    Panicked(String),
    /// The call's deadline passed.
    Deadline(Duration),
    /// The call's token was cancelled and its grace is over.
    Cancelled,
    /// The instance was retired while the call was not being polled, and its drain is over.
    Retired,
}

/// Runs a managed instance in the caller's task, under its own lease. What it gives goes to its
/// place.
async fn leased(
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
    ended.unwrap_or_else(|| Err(Box::new(Broken::Retired)))
}

/// Races the tool against the deadline and the token. Neither is looked at before the tool is
/// pending for the first time.
async fn raced<'a>(
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
fn failure(given: Given, interrupts: &Interrupts<'_>) -> Stop {
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
fn without_output(broken: Broken, tool: &ToolEntry, interrupts: &Interrupts<'_>) -> Stop {
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
        Broken::Retired => {
            cancelled.unwrap_or_else(|| refused_error(tool, Refused::Deactivated)).into()
        }
    }
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

#[cold]
fn output_too_deep(output: &mut ToolOutput) -> Stop {
    take_apart(output.value.take());
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

// ===== what interrupts a call =====

struct Interrupts<'a> {
    scope: &'a Arc<PlanScope>,
    call: u64,
    token: Option<&'a CancellationToken>,
    limit: Option<Duration>,
    /// When the call's time began to count.
    began: Instant,
}

impl<'a> Interrupts<'a> {
    /// The shortest limit wins: the call's own, the plan's, the tool's.
    fn of(call: &'a Call<'_>, tool: &ToolEntry, record: &CallRecord<'_>) -> Self {
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
    fn none(scope: &'a Arc<PlanScope>, number: u64) -> Self {
        Self { scope, call: number, token: None, limit: None, began: Instant::now() }
    }

    fn is_none(&self) -> bool {
        self.token.is_none() && self.limit.is_none()
    }

    fn is_cancelled(&self) -> bool {
        self.scope.gate.is_closed() || self.token.is_some_and(CancellationToken::is_cancelled)
    }

    /// What a call returns that stops because it was asked to: the plan's end goes before the
    /// call's own token, which for a nested call is cancelled by that very end.
    fn cancelled_error(&self) -> Option<CallError> {
        if self.scope.gate.is_closed() {
            return Some(self.scope.ended_error());
        }
        let cancelled = self.token.is_some_and(CancellationToken::is_cancelled);
        cancelled.then_some(CallError::Cancelled(ToolCancelled))
    }

    /// What is left of the call's time.
    fn left(&self) -> Option<Duration> {
        self.limit.map(|limit| limit.saturating_sub(self.began.elapsed()))
    }

    /// The deadline. It stands still while a call that this one made waits for an approval.
    async fn deadline(&self) {
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
    async fn before(&self, tool: &ToolEntry) -> Stop {
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
    async fn stop(&self) {
        tokio::select! { () = self.cancelled() => {}, () = self.scope.ended() => {} }
    }

    /// While the tool runs: the deadline at once, the token after the tool had its grace. The
    /// plan's own end comes by the lease.
    async fn interrupt(&self, ctx: &ToolExecutionContext) -> Broken {
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
fn stopped(interrupts: &Interrupts<'_>) -> Stop {
    interrupts.cancelled_error().unwrap_or_else(|| interrupts.scope.ended_error()).into()
}

// ===== room 12: record =====

/// Writes the trace of a call, whatever happens to it.
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own about the call")]
struct CallRecord<'a> {
    scope: &'a Arc<PlanScope>,
    call: u64,
    parent: u64,
    name: &'a str,
    began: Instant,
    tool: Option<u32>,
    /// The slot and generation of a managed instance.
    instance: Option<(SlotId, u32)>,
    /// Room 9 was reached: what the call reserved is kept.
    reached: bool,
    /// The quotas hold a place for it.
    reserved: bool,
    input_changed: bool,
    cancelled: bool,
    output_valid: Option<bool>,
    /// What is wrong with an output that is kept.
    warning: Option<String>,
    size: usize,
    written: bool,
    given: Given,
    span: Option<Box<Kept>>,
}

impl<'a> CallRecord<'a> {
    fn begin(call: &Call<'a>, number: u64) -> Self {
        let began = Instant::now();
        call.scope.clock(began);
        Self {
            scope: call.scope,
            call: number,
            parent: call.above.as_ref().map_or(0, |frame| frame.call),
            name: call.name,
            began,
            tool: None,
            instance: None,
            reached: false,
            reserved: false,
            input_changed: false,
            cancelled: false,
            output_valid: None,
            warning: None,
            size: 0,
            written: false,
            given: None,
            span: span::of_call(call.scope, number, call.name, &call.options, call.above.is_some()),
        }
    }

    /// Turns how the rooms ended into what the caller gets; trace and result agree.
    fn close(mut self, ended: Option<Result<(), Stop>>) -> Result<ToolResult, CallError> {
        let took = self.began.elapsed();
        let mut result = match ended {
            Some(Ok(())) => {
                let warning = self.warning.take();
                self.write(took, OutcomeCode::Ok, warning);
                let output = self.given.take().and_then(Result::ok);
                ToolResult::succeeded(output.unwrap_or_default())
            }
            Some(Err(Stop(stopped))) => match *stopped {
                Stopped::Failed(code, message) => {
                    self.write(took, code, Some(message.clone()));
                    ToolResult::failed(code, message)
                }
                Stopped::Broken(code, faults) => {
                    let message = faults.to_string();
                    self.write(took, code, Some(message.clone()));
                    let mut result = ToolResult::failed(code, message);
                    result.metadata.insert("faults".to_owned(), faults.to_json());
                    result
                }
                Stopped::Err(error) => return Err(self.refuse(took, error)),
            },
            // The hard end: the lease was revoked.
            None => {
                self.cancelled = true;
                let error = self.scope.ended_error();
                return Err(self.refuse(took, error));
            }
        };
        if self.input_changed {
            result.metadata.insert("input_changed".to_owned(), Value::Bool(true));
        }
        result.duration_ms = took.as_secs_f64() * 1000.0;
        Ok(result)
    }

    fn refuse(&mut self, took: Duration, error: CallError) -> CallError {
        self.cancelled |= matches!(error, CallError::Cancelled(_));
        self.write(took, error.code(), Some(error.to_string()));
        error
    }

    fn write(&mut self, took: Duration, outcome: OutcomeCode, error: Option<String>) {
        self.written = true;
        let scope = self.scope;
        let text = error.map(|mut error| {
            cut_error(&mut error);
            let name = if self.tool.is_none() {
                self.name.chars().take(256).collect()
            } else {
                String::new()
            };
            Box::new(RecordText { name, error })
        });
        let record = Record {
            call: self.call,
            parent: self.parent,
            began: self.began,
            took: nanoseconds(took),
            tool: self.tool.unwrap_or(NO_TOOL),
            outcome,
            cancelled: self.cancelled,
            output_valid: self.output_valid,
            size: u32::try_from(self.size).unwrap_or(u32::MAX),
            text,
        };
        let settings = scope.settings();
        if self.reserved && !self.reached {
            self.give_back();
        }
        let told = scope.core.subscribers.is_heard().then(|| self.trace(&record));
        if self.span.is_some() {
            self.end_span(&record);
        }
        let state = lock(&scope.log).record(record, settings.trace_cap);
        if let Some(state) = state {
            self.close_state(&state, outcome);
        }
        if let Some(trace) = told {
            let (name, kind) = (trace.tool.clone(), EventKind::Finished(Box::new(trace)));
            scope.tell(Some(self.call), || (Some(name), kind));
        }
    }

    #[cold]
    fn trace(&self, record: &Record) -> ToolExecutionTrace {
        record.read(self.scope.id, self.scope.clock(self.began), &self.scope.tools)
    }

    #[cold]
    fn end_span(&self, record: &Record) {
        if let Some(span) = &self.span {
            span::end(span, record);
        }
    }

    /// Nothing of it reached the tool: the quotas get their place back.
    #[cold]
    fn give_back(&self) {
        let tool = self.tool.and_then(|tool| self.scope.tools.by_id(tool));
        if let Some(tool) = tool {
            give_back(&self.scope.settings().quotas, &tool.descriptor.name);
        }
    }

    fn close_state(&self, state: &CallState, outcome: OutcomeCode) {
        if outcome != OutcomeCode::Ok {
            state.cancel();
        }
        if let Some(reason) = state.taint() {
            self.retire(reason);
        }
    }

    /// The tool said that its instance is no good any more.
    #[cold]
    fn retire(&self, reason: Box<str>) {
        if let Some((slot, generation)) = self.instance {
            self.scope.retire(slot, generation, Why::Tainted(reason), Begin::There);
        }
    }
}

impl Drop for CallRecord<'_> {
    fn drop(&mut self) {
        if !self.written {
            let reached = if self.reached { "while the tool ran" } else { "before the tool ran" };
            self.write(
                self.began.elapsed(),
                OutcomeCode::Abandoned,
                Some(format!("the caller dropped the call {reached}")),
            );
        }
    }
}

// ===== small things =====

/// Cuts a text to what a trace keeps.
fn cut_error(text: &mut String) {
    if text.len() > MOST_ERROR_TEXT {
        let at = (0..=MOST_ERROR_TEXT).rev().find(|at| text.is_char_boundary(*at));
        text.truncate(at.unwrap_or(0));
        text.push_str(" [cut]");
        text.shrink_to_fit();
    }
}

/// 584 years of them fit.
fn nanoseconds(time: Duration) -> u64 {
    time.as_secs().saturating_mul(1_000_000_000).saturating_add(time.subsec_nanos().into())
}

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
