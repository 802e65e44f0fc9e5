//! The path of a call. One function, read from top to bottom; each step is a room.
//!
//! Everything cheap that can refuse stands before anything that costs or acts. A guard made in room
//! 1 writes the trace, whatever happens after. There is no other way to execute a tool.

use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio_util::sync::CancellationToken;

use crate::contain::{BoxFuture, Contained, Panicked, drop_contained};
use crate::context::ToolExecutionContext;
use crate::error::{
    ActivationError, ActivationPhase, CallError, OutcomeCode, ToolCancelled, ToolRuntimeError,
};
use crate::keeper::Begin;
use crate::lease::{Gate, Lease};
use crate::obligation::{Active, Held, InstanceGate};
use crate::policy::{Approved, admit, approve};
use crate::registry::ToolEntry;
use crate::scope::{PlanScope, ended_error};
use crate::slot::{Key, Refused, SlotId, Why};
use crate::sync::lock;
use crate::tool::{FailureKind, ToolFailure, ToolInstance, ToolOutput, ToolResult};
use crate::trace::{Record, RecordText};

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
    token: Option<CancellationToken>,
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

/// Why a call does not reach its end.
enum Stop {
    /// The tool or the model did wrong: a result to show the model.
    Failed(OutcomeCode, String),
    /// The host must know.
    Err(CallError),
}

impl<E: Into<CallError>> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Err(error.into())
    }
}

/// Executes a tool: the one way.
pub(crate) async fn call(
    scope: &Arc<PlanScope>,
    name: &str,
    input: &Value,
    options: &CallOptions,
    above: Option<Arc<Frame>>,
) -> Result<ToolResult, CallError> {
    // 1 open
    let mut lease = enter(scope)?;
    let mut record = CallRecord::begin(scope, lease.call(), name, above.as_deref());
    let ended = {
        let rooms = pin!(rooms(scope, name, input, options, above.as_ref(), &mut record));
        lease.run(rooms).await
    };
    record.close(ended)
}

/// Activates a tool by hand: the same rooms, up to the activation.
pub(crate) async fn activate(scope: &Arc<PlanScope>, name: &str) -> Result<(), CallError> {
    let mut lease = enter(scope)?;
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

/// Room 1.
fn enter(scope: &Arc<PlanScope>) -> Result<Lease<&Gate>, CallError> {
    scope.notice_tokens();
    scope.gate.enter().ok_or_else(|| scope.ended_error())
}

async fn rooms(
    scope: &Arc<PlanScope>,
    name: &str,
    input: &Value,
    options: &CallOptions,
    above: Option<&Arc<Frame>>,
    record: &mut CallRecord<'_>,
) -> Result<ToolOutput, Stop> {
    if options.token.as_ref().is_some_and(CancellationToken::is_cancelled) {
        record.cancelled = true;
        return Err(ToolCancelled.into());
    }

    // 2 resolve
    let tool = scope.tools.resolve(name)?;
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
    if !input.is_object() {
        let message = format!("the input must be a JSON object, it is {}", kind_of(input));
        return Err(Stop::Failed(OutcomeCode::InvalidInput, message));
    }

    // 5 approve
    let approved = approve(&admitted, &tool.descriptor)?;

    // 6 permit
    let limit = [options.timeout, settings.call_timeout, tool.descriptor.call_timeout]
        .into_iter()
        .flatten()
        .min();
    let mut interrupts =
        Interrupts { scope, token: options.token.as_ref(), limit, began: record.began };
    let _permits = permits(tool, above, &mut interrupts).await?;

    // 7 checkpoint: comes with the checkpointer; until then the gate refuses what would need one.

    // 8 activate
    let mut instance = instance(tool, approved, &interrupts).await?;

    // 9 execute
    record.reached = true;
    record.instance = instance.place();
    let ctx = ToolExecutionContext::new(scope, record.call, tool.id, above, instance.active());
    let ended = execute(&mut instance, &ctx, input, &interrupts).await;
    record.cancelled = interrupts.cancelled_error().is_some();
    let output = match ended {
        Ended::Output(output) => output,
        ended => return Err(without_output(ended, tool, &interrupts)),
    };

    // 10 check output, 11 limit: come with the schemas.
    record.size = size_of(&output.value);
    Ok(output)

    // 12 record: the guard, in whose hands the result goes.
}

// ===== room 6: permit =====

/// The plan's permit and the tool's, where they have a limit.
type Permits<'a> = (Option<SemaphorePermit<'a>>, Option<SemaphorePermit<'a>>);

/// The plan's permit, whose wait does not count as call time, then the tool's.
async fn permits<'a>(
    tool: &'a ToolEntry,
    above: Option<&Arc<Frame>>,
    interrupts: &mut Interrupts<'a>,
) -> Result<Permits<'a>, Stop> {
    let mut permits: Permits<'a> = (None, None);
    if let (Some(semaphore), None) = (&interrupts.scope.settings().permits, above) {
        let asked = Instant::now();
        permits.0 = Some(permit(semaphore, tool, "plan", interrupts, None).await?);
        interrupts.began += asked.elapsed();
    }
    if let Some(semaphore) = &tool.permits {
        if !above.is_some_and(|frame| frame.holds(tool.id)) {
            permits.1 = Some(permit(semaphore, tool, "tool", interrupts, interrupts.left()).await?);
        }
    }
    Ok(permits)
}

async fn permit<'a>(
    semaphore: &'a Semaphore,
    tool: &ToolEntry,
    whose: &str,
    interrupts: &Interrupts<'_>,
    left: Option<Duration>,
) -> Result<SemaphorePermit<'a>, Stop> {
    if let Ok(permit) = semaphore.try_acquire() {
        return Ok(permit);
    }
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

/// What is going to be executed: the one instance of an immediate tool, or a managed one under its
/// own lease.
enum Instance<'a> {
    Immediate(&'a Arc<dyn ToolInstance>),
    Managed(Lease<InstanceGate>),
}

impl Instance<'_> {
    fn active(&self) -> Option<&Arc<Active>> {
        match self {
            Self::Immediate(_) => None,
            Self::Managed(lease) => Some(&lease.holder().0),
        }
    }

    fn place(&self) -> Option<(SlotId, u32)> {
        self.active().map(|active| (active.slot, active.generation))
    }
}

async fn instance<'a>(
    tool: &'a Arc<ToolEntry>,
    _approved: Approved,
    interrupts: &Interrupts<'_>,
) -> Result<Instance<'a>, Stop> {
    if let Some(instance) = &tool.immediate {
        return Ok(Instance::Immediate(instance));
    }
    let scope = interrupts.scope;
    loop {
        let active = scope.inner().slots.active(&Key::Tool(tool.id)).cloned();
        let active = match active {
            Some(active) => active,
            // Boxed: the cold path must not make the future of every call larger.
            None => Box::pin(activated(tool, interrupts)).await?,
        };
        // An instance that is being retired lets nobody in, and is out of its slot: ask again.
        if let Some(lease) = Lease::new(InstanceGate(active)) {
            return Ok(Instance::Managed(lease));
        }
    }
}

async fn activated(
    tool: &Arc<ToolEntry>,
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

enum Ended {
    Output(ToolOutput),
    Failed(ToolFailure),
    Panicked(String),
    /// The call's deadline passed.
    Deadline(Duration),
    /// The call's token was cancelled and its grace is over.
    Cancelled,
    /// The instance was retired while the call was not being polled, and its drain is over.
    Retired,
}

/// Runs the instance in the caller's task, under its own lease where it is managed.
async fn execute(
    instance: &mut Instance<'_>,
    ctx: &ToolExecutionContext,
    input: &Value,
    interrupts: &Interrupts<'_>,
) -> Ended {
    match instance {
        Instance::Immediate(instance) => {
            raced(Contained::new(|| instance.execute(ctx, input)), ctx, interrupts).await
        }
        Instance::Managed(lease) => {
            let active = Arc::clone(&lease.holder().0);
            let Held::Tool(instance) = active.held() else {
                unreachable!("BUG: a tool's slot holds a tool");
            };
            let work =
                pin!(raced(Contained::new(|| instance.execute(ctx, input)), ctx, interrupts));
            lease.run(work).await.unwrap_or(Ended::Retired)
        }
    }
}

/// Races the tool against the deadline and the token. Neither is looked at before the tool is
/// pending for the first time.
async fn raced<'a>(
    work: Contained<
        'a,
        Result<ToolOutput, ToolFailure>,
        impl FnOnce() -> BoxFuture<'a, Result<ToolOutput, ToolFailure>>,
    >,
    ctx: &ToolExecutionContext,
    interrupts: &Interrupts<'_>,
) -> Ended {
    let mut work = pin!(work);
    let mut interrupt = pin!(None);
    std::future::poll_fn(|cx| {
        if let Poll::Ready(ended) = work.as_mut().poll(cx) {
            return Poll::Ready(match ended {
                Ok(Ok(output)) => Ended::Output(output),
                Ok(Err(failure)) => Ended::Failed(failure),
                Err(Panicked { text, .. }) => Ended::Panicked(text),
            });
        }
        if interrupts.is_none() {
            return Poll::Pending;
        }
        if interrupt.is_none() {
            interrupt.set(Some(interrupts.interrupt(ctx)));
        }
        interrupt.as_mut().as_pin_mut().map_or(Poll::Pending, |interrupt| interrupt.poll(cx))
    })
    .await
}

/// The outcome of a call whose tool gave no output.
fn without_output(ended: Ended, tool: &ToolEntry, interrupts: &Interrupts<'_>) -> Stop {
    let cancelled = interrupts.cancelled_error();
    match ended {
        Ended::Failed(failure) => {
            let stop = match (failure.kind(), cancelled) {
                (FailureKind::Cancelled, Some(error)) => Stop::Err(error),
                // Nobody asked it to stop.
                (FailureKind::Cancelled, None) => {
                    Stop::Failed(OutcomeCode::Execution, failure.message().to_owned())
                }
                _ => Stop::Failed(failure.code(), failure.message().to_owned()),
            };
            // The error behind it is the tool's.
            drop_contained(failure);
            stop
        }
        Ended::Panicked(text) => {
            Stop::Failed(OutcomeCode::Panic, format!("the tool panicked: {text}"))
        }
        Ended::Deadline(limit) => {
            let message = format!("`{}` did not finish within {limit:?}", tool.descriptor.name);
            Stop::Failed(OutcomeCode::Timeout, message)
        }
        Ended::Cancelled => cancelled.unwrap_or(CallError::Cancelled(ToolCancelled)).into(),
        Ended::Retired => {
            cancelled.unwrap_or_else(|| refused_error(tool, Refused::Deactivated)).into()
        }
        Ended::Output(_) => unreachable!("BUG: there is an output"),
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
    async fn interrupt(&self, ctx: &ToolExecutionContext) -> Ended {
        let cancelled = async {
            self.cancelled().await;
            ctx.cancel();
            self.scope.core.sleep(self.scope.settings().deadlines.grace).await;
        };
        tokio::select! {
            () = self.deadline() => Ended::Deadline(self.limit.unwrap_or_default()),
            () = cancelled => Ended::Cancelled,
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
    tool: Option<u32>,
    /// The slot and generation of a managed instance.
    instance: Option<(SlotId, u32)>,
    /// Room 9 was reached: what the call reserved is kept.
    reached: bool,
    cancelled: bool,
    size: usize,
    written: bool,
}

impl<'a> CallRecord<'a> {
    fn begin(scope: &'a Arc<PlanScope>, call: u64, name: &'a str, above: Option<&Frame>) -> Self {
        Self {
            scope,
            call,
            parent: above.map_or(0, |frame| frame.call),
            name,
            began: Instant::now(),
            tool: None,
            instance: None,
            reached: false,
            cancelled: false,
            size: 0,
            written: false,
        }
    }

    /// Turns how the rooms ended into what the caller gets; trace and result agree.
    fn close(mut self, ended: Option<Result<ToolOutput, Stop>>) -> Result<ToolResult, CallError> {
        let took = self.began.elapsed();
        let mut result = match ended {
            Some(Ok(output)) => {
                self.write(took, OutcomeCode::Ok, None);
                ToolResult::succeeded(output)
            }
            Some(Err(Stop::Failed(code, message))) => {
                self.write(took, code, Some(message.clone()));
                ToolResult::failed(code, message)
            }
            Some(Err(Stop::Err(error))) => return Err(self.refuse(took, error)),
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
        let text = error.map(|error| {
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
            after: self.began.saturating_duration_since(scope.began),
            took,
            tool: self.tool,
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
            self.scope.retire(slot, Some(generation), Why::Tainted(reason), Begin::There);
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

impl fmt::Debug for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(code, message) => {
                f.debug_tuple("Failed").field(code).field(message).finish()
            }
            Self::Err(error) => f.debug_tuple("Err").field(error).finish(),
        }
    }
}
