//! The path of a call. One function, read from top to bottom; each step is a room.
//!
//! Everything cheap that can refuse stands before anything that costs or acts. A guard made in room
//! 1 writes the trace, whatever happens after. There is no other way to execute a tool.

use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::contain::{BoxFuture, Contained, drop_contained};
use crate::context::ToolExecutionContext;
use crate::error::{
    ActivationError, ActivationPhase, CallError, OutcomeCode, ToolCancelled, ToolRuntimeError,
};
use crate::keeper::Begin;
use crate::lease::Lease;
use crate::obligation::{Active, Held};
use crate::policy::{Approved, admit, approve};
use crate::registry::ToolEntry;
use crate::scope::{PlanScope, ended_error};
use crate::slot::{Key, Refused, SlotId, Why};
use crate::sync::lock;
use crate::tool::{FailureKind, ToolFailure, ToolOutput, ToolResult};
use crate::trace::{NO_TOOL, Record, RecordText};

/// The longest text of an error that a trace keeps, in bytes.
const MOST_ERROR_TEXT: usize = 4096;
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

    /// Whether a call above holds the permit of that tool.
    fn holds(&self, tool: u32) -> bool {
        self.tool == tool || self.parent.as_ref().is_some_and(|parent| parent.holds(tool))
    }
}

/// Why a call does not reach its end. One word, because every await hands it on; only a call that
/// stops pays for it.
struct Stop(Box<Stopped>);

enum Stopped {
    /// The tool or the model did wrong: a result to show the model.
    Failed(OutcomeCode, String),
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
}

/// What is asked for, and in which plan. It stays where the caller made it; the rooms borrow it.
pub(crate) struct Call<'a> {
    pub(crate) scope: &'a Arc<PlanScope>,
    pub(crate) name: &'a str,
    pub(crate) input: &'a Value,
    pub(crate) options: CallOptions,
    /// The calls above a nested one.
    pub(crate) above: Option<Arc<Frame>>,
}

/// Executes a tool: the one way.
pub(crate) async fn call(call: &Call<'_>) -> Result<ToolResult, CallError> {
    // 1 open
    let Some(mut lease) = enter(call.scope) else {
        return Err(call.scope.ended_error());
    };
    let mut record = CallRecord::begin(call, lease.call());
    let ended = {
        let rooms = pin!(rooms(call, &mut record));
        lease.run(rooms).await
    };
    record.close(ended)
}

/// Activates a tool by hand: the same rooms, up to the activation.
pub(crate) async fn activate(scope: &Arc<PlanScope>, name: &str) -> Result<(), CallError> {
    let mut lease = enter(scope).ok_or_else(|| scope.ended_error())?;
    let _over = NumberOver { scope, call: lease.call() };
    let rooms = pin!(async {
        let tool = scope.tools.resolve(name)?;
        let settings = scope.settings();
        let admitted = admit(settings.rights, &tool.descriptor, &settings.resources)?;
        let _approved: Approved = approve(&admitted, &tool.descriptor)?;
        if tool.immediate.is_none() {
            scope
                .tool_instance(tool, true)
                .await
                .map_err(|refused| refused_error(tool, refused))?;
        }
        Ok(())
    });
    lease.run(rooms).await.unwrap_or_else(|| Err(scope.ended_error()))
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

async fn rooms(call: &Call<'_>, record: &mut CallRecord<'_>) -> Result<(), Stop> {
    let (scope, options, above) = (call.scope, &call.options, call.above.as_ref());
    if options.token.as_ref().is_some_and(CancellationToken::is_cancelled) {
        record.cancelled = true;
        return Err(ToolCancelled.into());
    }

    // 2 resolve
    let tool = scope.tools.resolve(call.name)?;
    record.tool = Some(tool.id);

    // 3 gate
    let settings = scope.settings();
    let admitted = admit(settings.rights, &tool.descriptor, &settings.resources)?;
    if above.is_some_and(|frame| frame.depth > MOST_DEPTH) {
        return Err(
            over(tool, false, format!("calls are nested more than {MOST_DEPTH} deep")).into()
        );
    }

    // 4 check input
    if !call.input.is_object() {
        let kind = kind_of(call.input);
        let message = format!("the input must be a JSON object, it is {kind}");
        return Err(Stop::failed(OutcomeCode::InvalidInput, message));
    }

    // 5 approve
    let approved = approve(&admitted, &tool.descriptor)?;

    // 6 permit
    let limit = least(options.timeout, settings.call_timeout);
    let limit = least(limit, tool.descriptor.call_timeout);
    let mut interrupts =
        Interrupts { scope, token: options.token.as_ref(), limit, began: record.began };
    let _of_the_plan = match &settings.permits {
        Some(permits) if above.is_none() => {
            let asked = Instant::now();
            let permit = permit(permits, tool, "plan", &interrupts, None).await?;
            // That wait does not count as time of the call.
            interrupts.began += asked.elapsed();
            Some(permit)
        }
        _ => None,
    };
    let _of_the_tool = match &tool.permits {
        Some(permits) if !above.is_some_and(|frame| frame.holds(tool.id)) => {
            Some(permit(permits, tool, "tool", &interrupts, interrupts.left()).await?)
        }
        _ => None,
    };

    // 7 checkpoint: comes with the checkpointer; until then the gate refuses what would need one.

    // 8 activate
    let mut active = None;
    while tool.immediate.is_none() && active.is_none() {
        let found = scope.inner().slots.active(&Key::Tool(tool.id)).cloned();
        let found = match found {
            Some(found) => found,
            // Boxed: the cold path must not make the future of every call larger.
            None => Box::pin(activated(tool, &approved, &interrupts)).await?,
        };
        // An instance that is being retired lets nobody in, and is out of its slot: ask again.
        active = found.gate.admit().map(|number| (found, number));
    }
    let managed = active.as_ref().map(|(active, number)| {
        record.instance = Some((active.slot, active.generation));
        (active, Lease::admitted(&active.gate, *number))
    });

    // 9 execute
    record.reached = true;
    let instance = managed.as_ref().map(|(active, _)| *active);
    let ctx = ToolExecutionContext::new(call, record.call, tool.id, instance);
    let ended = execute(tool, &ctx, call.input, managed, &interrupts, &mut record.given).await;
    record.cancelled = interrupts.cancelled_error().is_some();
    if let Err(broken) = ended {
        return Err(without_output(*broken, tool, &interrupts));
    }
    let output = match &mut record.given {
        Some(Ok(output)) => output,
        failed => return Err(failure(failed.take(), &interrupts)),
    };

    // 10 check output, 11 limit: come with the schemas.
    record.size = size_of(&output.value);
    Ok(())

    // 12 record: the guard, in whose hands the result goes.
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
    whose: &str,
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
    whose: &str,
    interrupts: &Interrupts<'_>,
    left: Option<Duration>,
) -> Result<SemaphorePermit<'a>, Stop> {
    let most = interrupts.scope.settings().permit_wait;
    let wait = left.map_or(most, |left| left.min(most));
    let scope = interrupts.scope;
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

/// Runs the instance in the caller's task, under its own lease where it is managed. What it gives
/// goes to its place.
async fn execute(
    tool: &ToolEntry,
    ctx: &ToolExecutionContext,
    input: &Value,
    managed: Option<(&Arc<Active>, Lease<'_>)>,
    interrupts: &Interrupts<'_>,
    given: &mut Given,
) -> Result<(), Box<Broken>> {
    let Some((active, mut lease)) = managed else {
        let instance = tool.immediate.as_ref();
        let instance = instance.expect("BUG: a managed tool runs under a lease");
        let work = Contained::new(|| instance.execute(ctx, input));
        return raced(work, ctx, interrupts, given).await;
    };
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

// ===== what interrupts a call =====

struct Interrupts<'a> {
    scope: &'a Arc<PlanScope>,
    token: Option<&'a CancellationToken>,
    limit: Option<Duration>,
    /// When the call's time began to count.
    began: Instant,
}

impl Interrupts<'_> {
    fn is_none(&self) -> bool {
        self.token.is_none() && self.limit.is_none()
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

    async fn deadline(&self) {
        match self.left() {
            Some(left) => self.scope.core.sleep(left).await,
            None => std::future::pending().await,
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
struct CallRecord<'a> {
    scope: &'a Arc<PlanScope>,
    call: u64,
    parent: u64,
    name: &'a str,
    began: Instant,
    /// Since the first call of the plan.
    after: Duration,
    tool: Option<u32>,
    /// The slot and generation of a managed instance.
    instance: Option<(SlotId, u32)>,
    /// Room 9 was reached: what the call reserved is kept.
    reached: bool,
    cancelled: bool,
    size: usize,
    written: bool,
    given: Given,
}

impl<'a> CallRecord<'a> {
    fn begin(call: &Call<'a>, number: u64) -> Self {
        let began = Instant::now();
        Self {
            scope: call.scope,
            call: number,
            parent: call.above.as_ref().map_or(0, |frame| frame.call),
            name: call.name,
            began,
            after: call.scope.since_clock(began),
            tool: None,
            instance: None,
            reached: false,
            cancelled: false,
            size: 0,
            written: false,
            given: None,
        }
    }

    /// Turns how the rooms ended into what the caller gets; trace and result agree.
    fn close(mut self, ended: Option<Result<(), Stop>>) -> Result<ToolResult, CallError> {
        let took = self.began.elapsed();
        let mut result = match ended {
            Some(Ok(())) => {
                self.write(took, OutcomeCode::Ok, None);
                let output = self.given.take().and_then(Result::ok);
                ToolResult::succeeded(output.unwrap_or_default())
            }
            Some(Err(Stop(stopped))) => match *stopped {
                Stopped::Failed(code, message) => {
                    self.write(took, code, Some(message.clone()));
                    ToolResult::failed(code, message)
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
            cut(&mut error);
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
            after: nanoseconds(self.after),
            took: nanoseconds(took),
            tool: self.tool.unwrap_or(NO_TOOL),
            outcome,
            cancelled: self.cancelled,
            size: self.size,
            text,
        };
        let state = lock(&scope.log).record(record, scope.settings().trace_cap);
        if let Some(reason) = state.and_then(|state| state.taint()) {
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
fn cut(text: &mut String) {
    if text.len() > MOST_ERROR_TEXT {
        let at = (0..=MOST_ERROR_TEXT).rev().find(|at| text.is_char_boundary(*at));
        text.truncate(at.unwrap_or(0));
        text.push_str(" [cut]");
        text.shrink_to_fit();
    }
}

/// 584 years of them fit.
fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
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

/// The bytes of a value as JSON, counted without being kept.
fn size_of(value: &Value) -> usize {
    struct Count(usize);
    impl std::io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    // A `Value` in memory always serialises.
    serde_json::to_writer(&mut count, value).map_or(0, |()| count.0)
}
