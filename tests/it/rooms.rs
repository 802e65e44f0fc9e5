//! Every outcome of a call, through every front: what is returned, what is traced, what was run;
//! and the order of the rooms.

use std::collections::BTreeMap;
use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio_test::{assert_pending, task};
use tokio_util::sync::CancellationToken;
use toolscope::test_util::{Probe, Step};
use toolscope::{
    ActivationContext, ApprovalRequest, Approver, Before, BoundResource, CallError, CallOptions,
    DeactivationContext, Deadlines, Decision, FailureKind, FunctionTool, Layer, LayerCall,
    OutcomeCode, OutputCheck, Plan, PlanHandle, PlanOptions, ResourceSlot, Tool, ToolCall,
    ToolCapability, ToolDescriptor, ToolExecutionContext, ToolExecutionTrace, ToolFailure,
    ToolFilter, ToolInstance, ToolOutput, ToolResult, ToolRunner, ToolSpec, async_trait,
};

use crate::hooks::{Called, call};
use crate::support::{Fixture, paused};

const SECOND: Duration = Duration::from_secs(1);

// ===== a probe in other clothes =====

type Gives = dyn Fn(&ToolExecutionContext, &Value) -> Result<ToolOutput, ToolFailure> + Send + Sync;

/// A probe with a descriptor of the test's own, and an end of its execution that the test chooses.
pub(crate) struct Dressed {
    descriptor: ToolDescriptor,
    tool: Arc<dyn Tool>,
    gives: Option<Arc<Gives>>,
}

struct DressedInstance {
    instance: Arc<dyn ToolInstance>,
    gives: Option<Arc<Gives>>,
}

impl Dressed {
    pub(crate) fn new(
        probe: &Probe,
        change: impl FnOnce(ToolDescriptor) -> ToolDescriptor,
    ) -> Self {
        let tool = Arc::new(probe.tool());
        let descriptor = change(tool.descriptor().clone());
        Self { descriptor, tool, gives: None }
    }

    /// Changes the descriptor once more.
    pub(crate) fn dressed(mut self, change: impl FnOnce(&mut ToolDescriptor)) -> Self {
        change(&mut self.descriptor);
        self
    }

    /// What it gives once the probe's own execution went well.
    pub(crate) fn gives(
        mut self,
        gives: impl Fn(&ToolExecutionContext, &Value) -> Result<ToolOutput, ToolFailure>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        self.gives = Some(Arc::new(gives));
        self
    }

    fn dress(&self, instance: Arc<dyn ToolInstance>) -> Arc<dyn ToolInstance> {
        Arc::new(DressedInstance { instance, gives: self.gives.clone() })
    }
}

#[async_trait]
impl Tool for Dressed {
    fn descriptor(&self) -> &ToolDescriptor {
        &self.descriptor
    }

    fn immediate(&self) -> Option<Arc<dyn ToolInstance>> {
        self.tool.immediate().map(|instance| self.dress(instance))
    }

    async fn activate(
        &self,
        ctx: &ActivationContext,
    ) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        Ok(self.dress(self.tool.activate(ctx).await?))
    }

    fn off_thread(&self) -> bool {
        self.tool.off_thread()
    }
}

#[async_trait]
impl ToolInstance for DressedInstance {
    async fn execute(
        &self,
        ctx: &ToolExecutionContext,
        input: &Value,
    ) -> Result<ToolOutput, ToolFailure> {
        let output = self.instance.execute(ctx, input).await?;
        match &self.gives {
            Some(gives) => gives(ctx, input),
            None => Ok(output),
        }
    }

    async fn deactivate(&self, ctx: &DeactivationContext) -> Result<(), ToolFailure> {
        self.instance.deactivate(ctx).await
    }
}

// ===== the fronts =====

/// A way to call a tool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Front {
    Plan,
    Handle,
    Found,
    With,
    Json,
    Batch,
    Nested,
    Runner,
    Child,
}

impl Front {
    const ALL: [Self; 9] = [
        Self::Plan,
        Self::Handle,
        Self::Found,
        Self::With,
        Self::Json,
        Self::Batch,
        Self::Nested,
        Self::Runner,
        Self::Child,
    ];

    /// Those that take options of the call's own.
    const WITH_OPTIONS: [Self; 2] = [Self::With, Self::Json];
}

/// What came back.
#[derive(Clone, Debug)]
enum Shown {
    Called(Called),
    /// By a runner, which always gives a result.
    Result(ToolResult),
    /// The call was dropped.
    Nothing,
}

type Calling<'a> = Pin<Box<dyn Future<Output = Shown> + Send + 'a>>;

/// A reader that makes one nested call and keeps what that one returned.
fn nests(returned: &Arc<Mutex<Option<Called>>>) -> FunctionTool {
    let returned = Arc::clone(returned);
    ToolSpec::new("nests").read_only().handler(move |ctx, args: Value| {
        let returned = Arc::clone(&returned);
        async move {
            let called = ctx.execute_nested(args["tool"].as_str().unwrap(), &args["input"]).await;
            *returned.lock().unwrap() = Some(called);
            Ok(())
        }
    })
}

// ===== the rows =====

/// What is set up before the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Setup {
    Nothing,
    /// Another call of the plan runs, and goes on.
    PlanIsBusy,
    /// Another call of the tool runs in another plan, and goes on.
    ToolIsBusy,
    /// The tool was called once.
    Called,
    /// The tool was activated and deactivated by hand.
    Deactivated,
    /// The tool is active and has changed since.
    Changed,
    /// The plan was cancelled.
    Cancelled,
    /// The runtime was shut down.
    ShutDown,
}

/// What happens to the call while it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meanwhile {
    Nothing,
    CancelPlan,
    CancelToken,
    Drop,
}

/// What the approver of the runtime does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Person {
    IsNotThere,
    Approves,
    Denies,
    Panics,
    NeverAnswers,
    Changes,
    Spoils,
}

/// What the layer of the runtime does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Does {
    Nothing,
    Refuses,
    Panics,
    PanicsAfter,
    Answers,
    AnswersBadly,
    Hangs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Returned {
    Success,
    Failed,
    Err,
    Nothing,
}

/// How often each room was entered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Rooms {
    before: u64,
    asked: u64,
    activated: u64,
    executed: u64,
    after: u64,
}

/// One outcome of the table in the crate's documentation, and all that belongs to it.
#[derive(Clone)]
struct Row {
    what: &'static str,
    // The call.
    dress: fn(ToolDescriptor) -> ToolDescriptor,
    activate: Step,
    execute: Step,
    gives: fn() -> Result<ToolOutput, ToolFailure>,
    options: fn(PlanOptions) -> PlanOptions,
    child: fn(PlanOptions) -> PlanOptions,
    name: &'static str,
    input: Value,
    setup: Setup,
    meanwhile: Meanwhile,
    person: Person,
    layer: Does,
    // What comes of it.
    returned: Returned,
    code: OutcomeCode,
    cancelled: bool,
    output_valid: Option<bool>,
    /// The quota is kept.
    kept: bool,
    traced: bool,
    rooms: Rooms,
    fronts: Vec<Front>,
}

impl fmt::Debug for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.what)
    }
}

const GOOD: &str = "README.md";

fn good() -> Value {
    json!({"path": GOOD})
}

/// All rooms but that of an approval.
const ALL: Rooms = Rooms { before: 1, asked: 0, activated: 1, executed: 1, after: 1 };

impl Row {
    /// A call that goes well.
    fn new(what: &'static str) -> Self {
        Self {
            what,
            dress: |descriptor| descriptor,
            activate: Step::Ok,
            execute: Step::Ok,
            gives: || Ok(ToolOutput::new(json!({"n": 1}))),
            options: |options| options,
            child: |options| options,
            name: "subject",
            input: good(),
            setup: Setup::Nothing,
            meanwhile: Meanwhile::Nothing,
            person: Person::Approves,
            layer: Does::Nothing,
            returned: Returned::Success,
            code: OutcomeCode::Ok,
            cancelled: false,
            output_valid: Some(true),
            kept: true,
            traced: true,
            rooms: ALL,
            fronts: Front::ALL.to_vec(),
        }
    }

    fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// The tool is reached and gives no success.
    fn fails(self, code: OutcomeCode) -> Self {
        self.with(|row| {
            (row.returned, row.code, row.output_valid) = (Returned::Failed, code, None);
        })
    }

    /// The call is refused before the tool is reached, after so many rooms.
    fn refused(self, code: OutcomeCode, rooms: Rooms) -> Self {
        self.with(|row| {
            (row.returned, row.code, row.output_valid) = (Returned::Err, code, None);
            (row.kept, row.rooms) = (false, rooms);
        })
    }

    fn not(self, front: Front) -> Self {
        self.with(|row| row.fronts.retain(|other| *other != front))
    }
}

const NONE: Rooms = Rooms { before: 0, asked: 0, activated: 0, executed: 0, after: 0 };
const BEFORE: Rooms = Rooms { before: 1, ..NONE };
const ASKED: Rooms = Rooms { asked: 1, ..BEFORE };
const ACTIVATED: Rooms = Rooms { activated: 1, ..BEFORE };
const EXECUTED: Rooms = Rooms { executed: 1, ..ACTIVATED };

fn asks(descriptor: ToolDescriptor) -> ToolDescriptor {
    descriptor.capability(ToolCapability::writes().human_approval_required())
}

fn name(text: &str) -> toolscope::ToolName {
    text.parse().unwrap()
}

fn failure(kind: FailureKind) -> ToolFailure {
    ToolFailure::new(kind, "it did not work")
}

/// The tool is reached.
fn reached() -> Vec<Row> {
    use OutcomeCode as Code;
    let row = Row::new;
    vec![
        row("ok"),
        row("ok, and nobody says what an output is").with(|row| {
            row.dress = |descriptor| ToolDescriptor::new(descriptor.name);
            row.output_valid = None;
        }),
        row("the tool fails").fails(Code::Execution).with(|row| {
            row.gives = || Err(failure(FailureKind::Failed));
        }),
        row("it may go well another time").fails(Code::Execution).with(|row| {
            row.gives = || Err(failure(FailureKind::Transient));
        }),
        row("the tool says that the input makes no sense").fails(Code::InvalidInput).with(|row| {
            row.gives = || Err(failure(FailureKind::Invalid));
        }),
        row("the answer was lost").fails(Code::OutcomeUnknown).with(|row| {
            row.gives = || Err(failure(FailureKind::OutcomeUnknown));
        }),
        row("something of the tool is not activated").fails(Code::NotActivated).with(|row| {
            row.gives = || Err(failure(FailureKind::NotActivated));
        }),
        row("a cancellation that nobody asked for").fails(Code::Execution).with(|row| {
            row.gives = || Err(failure(FailureKind::Cancelled));
        }),
        row("the tool panics").fails(Code::Panic).with(|row| {
            (row.execute, row.rooms) = (Step::Panic, EXECUTED);
        }),
        row("the tool panics after an await").fails(Code::Panic).with(|row| {
            (row.execute, row.rooms) = (Step::YieldPanic(2), EXECUTED);
        }),
        row("the call's time is over").fails(Code::Timeout).with(|row| {
            row.dress = |descriptor| descriptor.call_timeout(SECOND);
            (row.execute, row.rooms) = (Step::Never, EXECUTED);
        }),
        row("the output cannot be JSON").fails(Code::InvalidOutput).with(|row| {
            row.gives = || ToolOutput::json(f64::NAN);
        }),
        row("the output breaks its schema, which is told").with(|row| {
            row.gives = || Ok(ToolOutput::new(json!({"n": "x"})));
            row.output_valid = Some(false);
        }),
        row("the output breaks its schema, which is refused").fails(Code::InvalidOutput).with(
            |row| {
                row.gives = || Ok(ToolOutput::new(json!({"n": "x"})));
                row.options = |options| options.output_check(OutputCheck::Reject);
                row.output_valid = Some(false);
            },
        ),
        row("the output breaks its schema, which nobody looks at").with(|row| {
            row.gives = || Ok(ToolOutput::new(json!({"n": "x"})));
            row.options = |options| options.output_check(OutputCheck::Off);
            row.output_valid = None;
        }),
        row("the output is too long").with(|row| {
            row.gives = || Ok(ToolOutput::new(json!({"n": 1, "text": "x".repeat(1000)})));
            row.options = |options| options.max_output_bytes(100);
        }),
        row("a person approves").with(|row| {
            row.dress = asks;
            row.rooms.asked = 1;
        }),
        row("a person changes the input").with(|row| {
            (row.dress, row.person) = (asks, Person::Changes);
            row.rooms.asked = 1;
        }),
        row("a layer answers").with(|row| {
            // Nobody is asked about what the tool does not do.
            (row.dress, row.layer, row.rooms) = (asks, Does::Answers, BEFORE);
        }),
        row("a layer answers what breaks the schema").fails(Code::InvalidOutput).with(|row| {
            (row.layer, row.rooms) = (Does::AnswersBadly, BEFORE);
            row.options = |options| options.output_check(OutputCheck::Reject);
            row.output_valid = Some(false);
        }),
        row("a layer panics on the way out").fails(Code::Panic).with(|row| {
            row.layer = Does::PanicsAfter;
        }),
    ]
}

/// The call is refused, or stopped, before the tool is reached.
fn refusals() -> Vec<Row> {
    [refused_at_once(), refused_by_a_person(), refused_late()].concat()
}

fn invalid(what: &'static str, rooms: Rooms) -> Row {
    let row = Row::new(what).fails(OutcomeCode::InvalidInput);
    row.with(|row| (row.kept, row.rooms) = (false, rooms))
}

/// By rooms that ask nobody and start nothing.
fn refused_at_once() -> Vec<Row> {
    use OutcomeCode as Code;
    let row = Row::new;
    vec![
        invalid("the input is no object", BEFORE).with(|row| row.input = json!([1])),
        invalid("the input breaks its schema", BEFORE).with(|row| row.input = json!({})),
        row("no such tool").refused(Code::NotFound, NONE).with(|row| row.name = "subjekt"),
        row("a layer refuses").refused(Code::AccessDenied, BEFORE).with(|row| {
            row.layer = Does::Refuses;
        }),
        row("a layer panics").refused(Code::AccessDenied, BEFORE).with(|row| {
            row.layer = Does::Panics;
        }),
        row("the time is over in a layer").fails(Code::Timeout).with(|row| {
            row.dress = |descriptor| descriptor.call_timeout(SECOND);
            (row.layer, row.kept, row.rooms) = (Does::Hangs, false, BEFORE);
        }),
        row("the plan only reads").refused(Code::AccessDenied, BEFORE).with(|row| {
            row.options = PlanOptions::read_only;
        }),
        row("a rule denies it").refused(Code::AccessDenied, BEFORE).with(|row| {
            row.options = |options| options.deny(name("subject"));
        }),
        row("a rule allows only others").refused(Code::AccessDenied, BEFORE).with(|row| {
            row.options = |options| options.only(name("nests")).only(name("other"));
        }),
        row("a rule denies its kind").refused(Code::AccessDenied, BEFORE).with(|row| {
            row.dress = |descriptor| descriptor.source(toolscope::SourceKind::Mcp);
            row.options =
                |options| options.deny(ToolFilter::new().source(toolscope::SourceKind::Mcp));
        }),
        row("a resource is not bound").refused(Code::AccessDenied, BEFORE).with(|row| {
            row.dress = |descriptor| descriptor.resource(ResourceSlot::required("db", "database"));
        }),
        row("there can be no checkpoint").refused(Code::CheckpointRequired, BEFORE).with(|row| {
            row.options = PlanOptions::require_checkpoints;
        }),
        row("the quota is used up").refused(Code::LimitExceeded, BEFORE).with(|row| {
            row.options = |options| options.max_calls_of(name("subject"), 0);
        }),
    ]
}

/// By the room in which a person is asked.
fn refused_by_a_person() -> Vec<Row> {
    use OutcomeCode as Code;
    let row = Row::new;
    vec![
        row("nobody is there to approve").refused(Code::ApprovalRequired, BEFORE).with(|row| {
            (row.dress, row.person) = (asks, Person::IsNotThere);
        }),
        row("a rule asks and nobody is there").refused(Code::ApprovalRequired, BEFORE).with(
            |row| {
                row.options = |options| options.ask(name("subject"));
                row.person = Person::IsNotThere;
            },
        ),
        row("unsafe and nobody is there").refused(Code::ApprovalRequired, BEFORE).with(|row| {
            row.dress = |descriptor| descriptor.capability(ToolCapability::writes().is_unsafe());
            row.person = Person::IsNotThere;
        }),
        row("a person denies it").refused(Code::ApprovalDenied, ASKED).with(|row| {
            (row.dress, row.person) = (asks, Person::Denies);
        }),
        row("the approver panics").refused(Code::ApprovalDenied, ASKED).with(|row| {
            (row.dress, row.person) = (asks, Person::Panics);
        }),
        row("the person never answers").refused(Code::ApprovalDenied, ASKED).with(|row| {
            (row.dress, row.person) = (asks, Person::NeverAnswers);
            row.options = |options| options.approval_wait(SECOND);
        }),
        invalid("a person spoils the input", ASKED).with(|row| {
            (row.dress, row.person) = (asks, Person::Spoils);
        }),
    ]
}

/// By the rooms of permits and activations.
fn refused_late() -> Vec<Row> {
    use OutcomeCode as Code;
    let row = Row::new;
    vec![
        row("the plan has no room")
            .refused(Code::Concurrency, BEFORE)
            .with(|row| {
                row.setup = Setup::PlanIsBusy;
                row.options = |options| options.max_concurrent(1).permit_wait(SECOND);
                // Each plan has its own limit of calls at once.
                row.child = |options| options.max_concurrent(1);
            })
            // Its caller's permit is its own.
            .not(Front::Nested),
        row("the tool has no room").refused(Code::Concurrency, BEFORE).with(|row| {
            row.setup = Setup::ToolIsBusy;
            row.options = |options| options.permit_wait(SECOND);
        }),
        row("the time is over while the tool has no room").refused(Code::Concurrency, BEFORE).with(
            |row| {
                row.setup = Setup::ToolIsBusy;
                row.dress = |descriptor| descriptor.call_timeout(SECOND);
            },
        ),
        row("the activation fails").refused(Code::Activation, ACTIVATED).with(|row| {
            row.activate = Step::Err;
        }),
        row("the activation panics").refused(Code::Activation, ACTIVATED).with(|row| {
            row.activate = Step::YieldPanic(1);
        }),
        row("the activation takes too long").refused(Code::Activation, ACTIVATED).with(|row| {
            row.activate = Step::Never;
            row.options = |options| options.deadlines(Deadlines::default().activate(SECOND));
        }),
        row("the activation takes longer than the call")
            .refused(Code::ActivationTimeout, ACTIVATED)
            .with(|row| {
                row.activate = Step::UntilCancelled;
                row.dress = |descriptor| descriptor.call_timeout(SECOND);
            }),
        row("no attempt is left").refused(Code::Activation, BEFORE).with(|row| {
            (row.setup, row.activate) = (Setup::Called, Step::Err);
            row.options = |options| options.max_attempts(1);
        }),
        row("the definition has changed").refused(Code::DefinitionChanged, BEFORE).with(|row| {
            row.setup = Setup::Changed;
        }),
        row("the host deactivated it").refused(Code::NotActivated, BEFORE).with(|row| {
            row.setup = Setup::Deactivated;
        }),
    ]
}

/// Somebody ends the call, or its plan.
fn ends() -> Vec<Row> {
    use OutcomeCode as Code;
    let row = Row::new;
    let cancelled = |row: Row, rooms: Rooms| {
        row.refused(Code::Cancelled, rooms).with(|row| row.cancelled = true)
    };
    let plan = |row: &mut Row| row.meanwhile = Meanwhile::CancelPlan;
    let token = |row: &mut Row| {
        row.meanwhile = Meanwhile::CancelToken;
        row.fronts = Front::WITH_OPTIONS.to_vec();
    };
    let dropped = |row: Row, rooms: Rooms| {
        row.refused(Code::Abandoned, rooms).with(|row| {
            (row.returned, row.meanwhile) = (Returned::Nothing, Meanwhile::Drop);
        })
    };
    vec![
        row("the plan was cancelled before")
            .refused(Code::Cancelled, NONE)
            .with(|row| {
                (row.setup, row.traced) = (Setup::Cancelled, false);
            })
            // A tool of an ended plan calls nothing: see `children.rs`.
            .not(Front::Nested),
        row("the runtime was shut down before")
            .refused(Code::ShutDown, NONE)
            .with(|row| {
                (row.setup, row.traced) = (Setup::ShutDown, false);
            })
            .not(Front::Nested)
            .not(Front::Found),
        cancelled(row("the plan is cancelled while a person is asked"), ASKED)
            .with(plan)
            .with(|row| (row.dress, row.person) = (asks, Person::NeverAnswers)),
        cancelled(row("the plan is cancelled while the tool has no room"), BEFORE)
            .with(plan)
            .with(|row| row.setup = Setup::ToolIsBusy),
        cancelled(row("the plan is cancelled in the activation"), ACTIVATED)
            .with(plan)
            .with(|row| row.activate = Step::UntilCancelled),
        cancelled(row("the plan is cancelled while the tool runs"), EXECUTED)
            .with(plan)
            .with(|row| (row.execute, row.kept) = (Step::Never, true))
            // It is dropped with the call above it.
            .not(Front::Nested),
        row("the plan is cancelled and the tool still gives").with(plan).with(|row| {
            // The layer is not waited for any more.
            (row.execute, row.cancelled) = (Step::UntilCancelled, true);
        }),
        cancelled(row("the call is cancelled while a person is asked"), ASKED)
            .with(token)
            .with(|row| (row.dress, row.person) = (asks, Person::NeverAnswers)),
        cancelled(row("the call is cancelled in the activation"), ACTIVATED)
            .with(token)
            .with(|row| row.activate = Step::UntilCancelled),
        cancelled(row("the call is cancelled while the tool runs"), EXECUTED)
            .with(token)
            .with(|row| (row.execute, row.kept) = (Step::Never, true)),
        row("the call is cancelled and the tool still gives").with(token).with(|row| {
            (row.execute, row.cancelled) = (Step::UntilCancelled, true);
        }),
        dropped(row("dropped in a layer"), BEFORE).with(|row| row.layer = Does::Hangs),
        dropped(row("dropped while a person is asked"), ASKED)
            .with(|row| (row.dress, row.person) = (asks, Person::NeverAnswers)),
        dropped(row("dropped while the tool has no room"), BEFORE)
            .with(|row| row.setup = Setup::ToolIsBusy),
        dropped(row("dropped in the activation"), ACTIVATED)
            .with(|row| row.activate = Step::UntilCancelled),
        dropped(row("dropped while the tool runs"), EXECUTED)
            .with(|row| (row.execute, row.kept) = (Step::Never, true)),
    ]
}

// ===== the world of a row =====

/// Once true, everything goes well.
#[derive(Clone, Default)]
struct Peace(Arc<AtomicBool>);

impl Peace {
    fn is_made(&self) -> bool {
        self.0.load(SeqCst)
    }
}

struct Office {
    person: Person,
    peace: Peace,
    asked: Arc<AtomicU64>,
}

#[async_trait]
impl Approver for Office {
    async fn decide(&self, request: &ApprovalRequest) -> Result<Decision, ToolFailure> {
        assert_eq!(request.tool.as_str(), "local/subject");
        if self.peace.is_made() {
            return Ok(Decision::Once);
        }
        self.asked.fetch_add(1, SeqCst);
        match self.person {
            Person::IsNotThere | Person::Approves => Ok(Decision::Once),
            Person::Denies => Ok(Decision::deny("no")),
            Person::Panics => panic!("the approver panics"),
            Person::NeverAnswers => std::future::pending().await,
            Person::Changes => Ok(Decision::change(json!({"path": "LICENSE"}))),
            Person::Spoils => Ok(Decision::change(json!({"path": 7}))),
        }
    }
}

struct Round {
    does: Does,
    peace: Peace,
    before: Arc<AtomicU64>,
    after: Arc<AtomicU64>,
}

#[async_trait]
impl Layer for Round {
    async fn before(&self, call: &LayerCall<'_>) -> Before {
        if call.tool.name.as_str() != "local/subject" || self.peace.is_made() {
            return Before::Continue;
        }
        self.before.fetch_add(1, SeqCst);
        match self.does {
            Does::Nothing | Does::PanicsAfter => Before::Continue,
            Does::Refuses => Before::Refuse("the layer says no".to_owned()),
            Does::Panics => panic!("the layer panics"),
            Does::Answers => Before::Answer(ToolOutput::new(json!({"n": 2}))),
            Does::AnswersBadly => Before::Answer(ToolOutput::new(json!({"n": "x"}))),
            Does::Hangs => std::future::pending().await,
        }
    }

    async fn after(
        &self,
        call: &LayerCall<'_>,
        given: Result<ToolOutput, ToolFailure>,
    ) -> Result<ToolOutput, ToolFailure> {
        if call.tool.name.as_str() == "local/subject" && !self.peace.is_made() {
            self.after.fetch_add(1, SeqCst);
            assert_ne!(self.does, Does::PanicsAfter, "the layer panics on the way out");
        }
        given
    }
}

/// What a subject is before a row dresses it.
fn subject(descriptor: ToolDescriptor) -> ToolDescriptor {
    let path = json!({"properties": {"path": {"type": "string"}}, "required": ["path"]});
    let number = json!({"properties": {"n": {"type": "integer"}}, "required": ["n"]});
    descriptor.input_schema(path).output_schema(number).max_concurrent(1)
}

struct World {
    row: Row,
    front: Front,
    fixture: Fixture,
    probe: Probe,
    peace: Peace,
    nested: Arc<Mutex<Option<Called>>>,
    asked: Arc<AtomicU64>,
    before: Arc<AtomicU64>,
    after: Arc<AtomicU64>,
}

impl World {
    async fn new(row: &Row, front: Front) -> Self {
        let (peace, nested) = (Peace::default(), Arc::default());
        let (asked, before, after) = <(Arc<AtomicU64>, Arc<_>, Arc<_>)>::default();
        let probe =
            Probe::new("subject").on_activate(row.activate.clone()).on_execute(row.execute.clone());
        let (gives, at_peace) = (row.gives, peace.clone());
        let tool = Dressed::new(&probe, |descriptor| (row.dress)(subject(descriptor))).gives(
            move |_, _| {
                if at_peace.is_made() { Ok(ToolOutput::new(json!({"n": 1}))) } else { gives() }
            },
        );
        let layer = Round {
            does: row.layer,
            peace: peace.clone(),
            before: Arc::clone(&before),
            after: Arc::clone(&after),
        };
        let mut builder = paused().layer(layer).tool(tool).tool(nests(&nested));
        if row.person != Person::IsNotThere {
            let (person, peace, asked) = (row.person, peace.clone(), Arc::clone(&asked));
            builder = builder.approver(Office { person, peace, asked });
        }
        let other = Probe::new("other").capability(ToolCapability::read_only());
        let busy = Probe::new("busy").on_execute(Step::Never);
        let fixture = Fixture::with(builder, &[&other, &busy]).await.track(&probe);
        let (row, front) = (row.clone(), front);
        Self { row, front, fixture, probe, peace, nested, asked, before, after }
    }

    /// The plan that is called in, and the one above it, if there is one.
    fn begin(&self) -> (Plan, Option<Plan>) {
        // One call, and what it takes to make it.
        let around =
            u64::from(self.front == Front::Nested) + u64::from(self.row.setup == Setup::PlanIsBusy);
        let options = (self.row.options)(PlanOptions::new().max_calls(1 + around));
        let plan = self.fixture.begin(options).unwrap();
        if self.front != Front::Child {
            return (plan, None);
        }
        let child = plan.begin_child((self.row.child)(PlanOptions::new())).unwrap();
        (child, Some(plan))
    }

    /// A plan beside it in which nothing stands in the way of the subject.
    fn elsewhere(&self) -> Plan {
        let (person, peace, asked) = (Person::Approves, self.peace.clone(), Arc::default());
        let options = PlanOptions::new().approver(Office { person, peace, asked });
        let resource = BoundResource::new("db", "database", "memory");
        self.fixture.begin(options.resource(resource).permit_wait(SECOND)).unwrap()
    }

    /// The call through the front.
    fn call<'a>(&'a self, plan: &'a Plan, token: &CancellationToken) -> Calling<'a> {
        let Row { name, ref input, .. } = self.row;
        let options = match self.row.meanwhile {
            Meanwhile::CancelToken => CallOptions::new().token(token.clone()),
            _ => CallOptions::new(),
        };
        match self.front {
            Front::Plan | Front::Child => {
                Box::pin(async move { Shown::Called(plan.execute(name, input).await) })
            }
            Front::Handle => {
                Box::pin(async move { Shown::Called(plan.handle().execute(name, input).await) })
            }
            Front::Found => {
                let found = self.fixture.handle().plan(plan.id());
                let found = found.unwrap_or_else(|| plan.handle());
                Box::pin(async move { Shown::Called(found.execute(name, input).await) })
            }
            Front::With => {
                Box::pin(
                    async move { Shown::Called(plan.execute_with(name, input, options).await) },
                )
            }
            Front::Json => {
                let text = input.to_string();
                Box::pin(async move { Shown::Called(plan.execute_json(name, text, options).await) })
            }
            Front::Batch => Box::pin(async move {
                let calls = [ToolCall::new(name, input.clone())];
                Shown::Called(plan.execute_batch(&calls).await.remove(0))
            }),
            Front::Nested => Box::pin(async move {
                let outer = plan.execute("nests", json!({"tool": name, "input": input})).await;
                // An ended plan gives the outer call's result too, within its grace.
                assert!(outer.is_ok_and(|result| result.success));
                Shown::Called(self.nested.lock().unwrap().take().unwrap())
            }),
            Front::Runner => Box::pin(async move {
                let runner = ToolRunner::new(plan.handle());
                Shown::Result(runner.execute(name, input.clone()).await)
            }),
        }
    }

    /// Sets up, calls, and does what is done meanwhile. What holds a permit comes along.
    async fn run<'a>(&'a self, plan: &'a Plan, above: Option<&Plan>, elsewhere: &'a Plan) -> Shown {
        let mut busy = task::spawn(match self.row.setup {
            Setup::PlanIsBusy => call(plan, "busy"),
            _ => call(elsewhere, "busy"),
        });
        let occupied = elsewhere.execute("subject", good());
        let mut occupied = task::spawn(Box::pin(occupied));
        match self.row.setup {
            Setup::Nothing => {}
            Setup::PlanIsBusy => assert_pending!(busy.poll()),
            Setup::ToolIsBusy => {
                let hold = self.probe.clone().on_activate(Step::Ok).on_execute(Step::Never);
                self.peace.0.store(true, SeqCst);
                assert_pending!(occupied.poll());
                self.peace.0.store(false, SeqCst);
                drop(hold.on_activate(self.row.activate.clone()));
            }
            Setup::Called => drop(plan.execute("subject", good()).await),
            Setup::Deactivated => {
                plan.activate("subject").await.unwrap();
                assert!(plan.deactivate("subject").await);
            }
            Setup::Changed => {
                plan.activate("subject").await.unwrap();
                self.change();
                // A child goes by the tools of its parent.
                for plan in above.into_iter().chain([plan]) {
                    plan.sync_tools();
                }
            }
            Setup::Cancelled => plan.cancel(),
            Setup::ShutDown => drop(self.fixture.shutdown(SECOND).await),
        }
        self.forget();
        let token = CancellationToken::new();
        let mut calling = task::spawn(self.call(plan, &token));
        match self.row.meanwhile {
            Meanwhile::Nothing => {}
            Meanwhile::CancelPlan => {
                assert_pending!(calling.poll());
                plan.cancel();
            }
            Meanwhile::CancelToken => {
                assert_pending!(calling.poll());
                token.cancel();
            }
            Meanwhile::Drop => {
                assert_pending!(calling.poll());
                drop(calling);
                return Shown::Nothing;
            }
        }
        calling.await
    }

    /// Registers the subject with another description.
    fn change(&self) {
        let dress = self.row.dress;
        let changed = Dressed::new(&self.probe, |descriptor| {
            dress(subject(descriptor)).description("another one")
        });
        let changed = changed.gives(|_, _| Ok(ToolOutput::new(json!({"n": 1}))));
        let registry = self.fixture.registry();
        assert!(registry.remove("subject"));
        registry.register(changed).unwrap();
    }

    /// What was done so far is not the call's.
    fn forget(&self) {
        for count in [&self.asked, &self.before, &self.after] {
            count.store(0, SeqCst);
        }
        *self.nested.lock().unwrap() = None;
    }
}

/// The traces of the subject, or of what was called in its place.
fn traces(plan: &PlanHandle, row: &Row) -> Vec<ToolExecutionTrace> {
    let is_of =
        |trace: &ToolExecutionTrace| trace.tool == "local/subject" || trace.tool == row.name;
    plan.traces().into_iter().filter(is_of).collect()
}

/// Checks that what was returned is what the row says.
fn check_returned(row: &Row, shown: &Shown) {
    let code = Value::from(row.code.as_str());
    match (row.returned, shown) {
        (Returned::Success, Shown::Called(Ok(result)) | Shown::Result(result)) => {
            assert!(result.success && result.error.is_none(), "{result:?}");
            assert_eq!((result.code(), result.metadata.get("code")), ("ok", None));
        }
        (Returned::Failed, Shown::Called(Ok(result)) | Shown::Result(result)) => {
            assert!(!result.success && result.output.is_null(), "{result:?}");
            assert_eq!((result.code(), &result.metadata["code"]), (row.code.as_str(), &code));
            assert!(!result.error.as_ref().unwrap().is_empty());
        }
        (Returned::Err, Shown::Called(Err(error))) => {
            assert_eq!(error.code(), row.code, "{error}");
            let is_cancelled = matches!(error, CallError::Cancelled(_));
            assert_eq!(is_cancelled, row.code == OutcomeCode::Cancelled);
        }
        // A runner shows the error: its text, its code, and no more.
        (Returned::Err, Shown::Result(result)) => {
            assert!(!result.success && result.output.is_null(), "{result:?}");
            assert_eq!(result.metadata, serde_json::Map::from_iter([("code".to_owned(), code)]));
        }
        (Returned::Nothing, Shown::Nothing) => {}
        other => panic!("{other:?}"),
    }
}

/// Checks that a trace says what the row says and what was returned.
fn check_trace(row: &Row, front: Front, trace: &ToolExecutionTrace, shown: &Shown) {
    assert_eq!((trace.outcome, trace.success()), (row.code, row.code == OutcomeCode::Ok));
    assert_eq!(trace.cancelled, row.cancelled);
    assert_eq!(trace.output_valid, row.output_valid);
    assert_eq!(trace.parent_call_id.is_some(), front == Front::Nested);
    let (size, error) = match shown {
        Shown::Called(Ok(result)) | Shown::Result(result) => {
            // By a runner a refusal takes a little longer than it is traced.
            if row.returned != Returned::Err {
                assert!((result.duration_ms - trace.duration_ms()).abs() < f64::EPSILON);
            }
            let size = if result.success { result.output.to_string().len() } else { 0 };
            let valid = result.metadata.get("output_valid").map(|valid| valid == &json!(true));
            let told = if result.success { row.output_valid.filter(|valid| !valid) } else { None };
            assert_eq!(valid, told, "{:?}", result.metadata);
            assert_eq!(valid.is_some(), result.metadata.contains_key("output_faults"));
            // The runner has the text for a model, the trace that for an operator.
            let refused = matches!(shown, Shown::Result(_)) && row.returned == Returned::Err;
            (size, if refused { trace.error.clone() } else { result.error.clone() })
        }
        Shown::Called(Err(error)) => (0, Some(error.to_string())),
        Shown::Nothing => (0, trace.error.clone()),
    };
    assert_eq!(trace.result_size_bytes, size);
    if row.returned == Returned::Success && row.output_valid == Some(false) {
        assert!(trace.error.as_ref().unwrap().starts_with("the output breaks its schema: "));
    } else {
        // What a layer says in its panic is for the trace only.
        let traced =
            trace.error.as_ref().map(|error| match error.strip_prefix("a layer panicked") {
                Some(_) if row.returned != Returned::Err => "a layer panicked".to_owned(),
                _ => error.clone(),
            });
        assert_eq!(traced, error);
        assert_eq!(trace.error.is_none(), trace.success());
    }
}

/// Runs a row through a front and checks all of it. Gives the text of the error.
async fn check(row: &Row, front: Front) -> Option<String> {
    let world = World::new(row, front).await;
    let elsewhere = world.elsewhere();
    let (plan, above) = world.begin();
    let before = world.probe.counts();
    let shown = {
        let counted = async {
            let shown = world.run(&plan, above.as_ref(), &elsewhere).await;
            (shown, traces(&plan, row))
        };
        let (shown, traced) = counted.await;
        check_returned(row, &shown);
        let earlier = usize::from(row.setup == Setup::Called);
        assert_eq!(traced.len(), earlier + usize::from(row.traced), "{traced:?}");
        if row.traced {
            check_trace(row, front, &traced[earlier], &shown);
        }
        shown
    };

    // What ran. What the setup did is not the call's.
    let counts = world.probe.counts();
    let setup = match row.setup {
        Setup::ToolIsBusy => (1, 1),
        Setup::Called | Setup::Deactivated | Setup::Changed => (1, 0),
        _ => (0, 0),
    };
    let rooms = Rooms {
        before: world.before.load(SeqCst),
        asked: world.asked.load(SeqCst),
        activated: counts.activations - before.activations - setup.0,
        executed: counts.executions - before.executions - setup.1,
        after: world.after.load(SeqCst),
    };
    assert_eq!(rooms, row.rooms);

    // Whether the call counts among those that the plan may make.
    let open = if plan.end_reason().is_none() { Some(&plan) } else { above.as_ref() };
    if let Some(open) = open.filter(|open| open.end_reason().is_none()) {
        let other = call(open, "other").await;
        let is_over = other.as_ref().is_err_and(|error| error.code() == OutcomeCode::LimitExceeded);
        assert_eq!((is_over, other.is_ok()), (row.kept, !row.kept), "{other:?}");
    }
    drop((plan, above));

    // The tool's only permit was given back.
    if row.setup != Setup::ShutDown {
        world.peace.0.store(true, SeqCst);
        let calm = world.probe.clone().on_activate(Step::Ok).on_execute(Step::Ok);
        let plan = world.elsewhere();
        let again = plan.execute("subject", good()).await;
        assert!(again.as_ref().is_ok_and(|again| again.success), "{again:?}");
        drop((plan, calm));
    }
    drop(elsewhere);
    world.fixture.end().await;
    match shown {
        Shown::Called(Ok(result)) | Shown::Result(result) => result.error,
        Shown::Called(Err(error)) => Some(error.to_string()),
        Shown::Nothing => None,
    }
}

async fn check_all(rows: Vec<Row>) {
    for row in rows {
        let mut texts: BTreeMap<Option<String>, Vec<Front>> = BTreeMap::new();
        for front in row.fronts.clone() {
            println!("{row:?}, by {front:?}");
            let text = check(&row, front).await;
            // The runner has the text for a model.
            if front != Front::Runner {
                texts.entry(text).or_default().push(front);
            }
        }
        assert_eq!(texts.len(), 1, "{row:?}: the fronts say different things: {texts:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn p11_every_outcome_of_a_tool_is_the_same_through_every_front() {
    check_all(reached()).await;
}

#[tokio::test(start_paused = true)]
async fn p11_every_refusal_is_the_same_through_every_front() {
    check_all(refusals()).await;
}

#[tokio::test(start_paused = true)]
async fn p11_every_end_of_a_call_is_the_same_through_every_front() {
    check_all(ends()).await;
}

/// Only a front that takes a text can be given one that is no JSON.
#[tokio::test(start_paused = true)]
async fn p14_arguments_that_are_no_json_are_an_invalid_input_that_says_where() {
    let row = Row::new("no JSON");
    let world = World::new(&row, Front::Json).await;
    let plan = world.fixture.begin(PlanOptions::new().max_calls(1)).unwrap();
    for (text, place) in
        [("{\"path\": ", "line 1 column 9"), ("{} {}", "column 4"), ("[", "column 1")]
    {
        let result = plan.execute_json("subject", text, CallOptions::new()).await.unwrap();
        assert_eq!((result.success, result.code()), (false, "invalid_input"));
        let error = result.error.unwrap();
        assert!(
            error.starts_with("the arguments are no JSON: ") && error.contains(place),
            "{error}"
        );
        assert_eq!(plan.traces().pop().unwrap().error, Some(error));
    }
    // An empty text is an empty object, for which this tool has no use.
    let result = plan.execute_json("subject", " \n", CallOptions::new()).await.unwrap();
    assert!(result.error.unwrap().contains("\"path\" is missing"));
    assert_eq!(world.probe.counts().activations, 0);
    assert_eq!(world.before.load(SeqCst), 1, "no layer sees what is no JSON");
    let good = plan.execute_json("subject", good().to_string(), CallOptions::new()).await;
    assert!(good.unwrap().success, "nothing of it was counted");
    assert_eq!(plan.traces().len(), 5);
    drop(plan);
    world.fixture.end().await;
}

// ===== the order of the rooms =====

/// The things that may be wrong with a call, in the order in which the rooms find them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrong {
    Ended,
    Token,
    Name,
    Layer,
    Rule,
    Rights,
    Checkpoint,
    Resource,
    Quota,
    Input,
    Approval,
    Permit,
    Activation,
    Execution,
    Output,
}

impl Wrong {
    const ALL: [Self; 15] = [
        Self::Ended,
        Self::Token,
        Self::Name,
        Self::Layer,
        Self::Rule,
        Self::Rights,
        Self::Checkpoint,
        Self::Resource,
        Self::Quota,
        Self::Input,
        Self::Approval,
        Self::Permit,
        Self::Activation,
        Self::Execution,
        Self::Output,
    ];

    /// The code, and a word of the text, of a call with which this is wrong.
    fn told(self) -> (OutcomeCode, &'static str) {
        match self {
            Self::Ended => (OutcomeCode::PlanEnded, "finished"),
            Self::Token => (OutcomeCode::Cancelled, "cancelled"),
            Self::Name => (OutcomeCode::NotFound, "nobody"),
            Self::Layer => (OutcomeCode::AccessDenied, "the layer says no"),
            Self::Rule => (OutcomeCode::AccessDenied, "a rule of the plan denies it"),
            Self::Rights => (OutcomeCode::AccessDenied, "read-only"),
            Self::Checkpoint => (OutcomeCode::CheckpointRequired, "checkpoints"),
            Self::Resource => (OutcomeCode::AccessDenied, "the resource `db`"),
            Self::Quota => (OutcomeCode::LimitExceeded, "used up"),
            Self::Input => (OutcomeCode::InvalidInput, "\"path\" is missing"),
            Self::Approval => (OutcomeCode::ApprovalDenied, "not approved: no"),
            Self::Permit => (OutcomeCode::Concurrency, "left no room"),
            Self::Activation => (OutcomeCode::Activation, "fails in activate"),
            Self::Execution => (OutcomeCode::Execution, "it did not work"),
            Self::Output => (OutcomeCode::InvalidOutput, "an integer"),
        }
    }
}

/// Makes a call with which all of that is wrong, and checks that the first is what is told and that
/// nothing behind its room was done.
async fn is_refused_by_the_first(wrongs: &[Wrong]) {
    let is = |wrong: Wrong| wrongs.contains(&wrong);
    let mut row = Row::new("wrong in several ways").with(|row| {
        row.gives = || Ok(ToolOutput::new(json!({"n": 1})));
        row.activate = if is(Wrong::Activation) { Step::Err } else { Step::Ok };
        row.layer = if is(Wrong::Layer) { Does::Refuses } else { Does::Nothing };
        row.person = if is(Wrong::Approval) { Person::Denies } else { Person::Approves };
        row.setup = if is(Wrong::Permit) { Setup::ToolIsBusy } else { Setup::Nothing };
        row.name = if is(Wrong::Name) { "nobody" } else { "subject" };
        row.input = if is(Wrong::Input) { json!({}) } else { good() };
        row.meanwhile = if is(Wrong::Token) { Meanwhile::CancelToken } else { Meanwhile::Nothing };
    });
    if is(Wrong::Resource) {
        row.dress = |descriptor| {
            let needs = ResourceSlot::required("db", "database");
            descriptor
                .resource(needs)
                .capability(ToolCapability::writes().human_approval_required())
        };
    } else {
        row.dress = asks;
    }
    if is(Wrong::Execution) {
        row.gives = || Err(failure(FailureKind::Failed));
    } else if is(Wrong::Output) {
        row.gives = || Ok(ToolOutput::new(json!({"n": "x"})));
    }
    let mut options = PlanOptions::new().permit_wait(SECOND).output_check(OutputCheck::Reject);
    if is(Wrong::Rule) {
        options = options.deny(name("subject"));
    }
    if is(Wrong::Rights) {
        options = options.read_only();
    }
    if is(Wrong::Checkpoint) {
        options = options.require_checkpoints();
    }
    if is(Wrong::Quota) {
        options = options.max_calls(0);
    }
    let world = World::new(&row, Front::With).await;
    let elsewhere = world.elsewhere();
    let plan = world.fixture.begin(options).unwrap();
    let handle = plan.handle();
    let mut occupied = task::spawn(elsewhere.execute("subject", good()));
    if is(Wrong::Permit) {
        world.peace.0.store(true, SeqCst);
        let hold = world.probe.clone().on_activate(Step::Ok).on_execute(Step::Never);
        assert_pending!(occupied.poll());
        drop(hold.on_activate(row.activate.clone()).on_execute(Step::Ok));
        world.peace.0.store(false, SeqCst);
    }
    let before = world.probe.counts();
    let token = CancellationToken::new();
    token.cancel();
    let call_options = CallOptions::new();
    let call_options = if is(Wrong::Token) { call_options.token(token) } else { call_options };
    let plan = if is(Wrong::Ended) {
        plan.finish().await;
        None
    } else {
        Some(plan)
    };
    let called = handle.execute_with(row.name, &row.input, call_options).await;

    let (code, phrase) = wrongs[0].told();
    let (told, text) = match &called {
        Ok(result) => (result.code().to_owned(), result.error.clone().unwrap()),
        Err(error) => (error.code().as_str().to_owned(), error.to_string()),
    };
    assert_eq!(told, code.as_str(), "{text}");
    assert!(text.contains(phrase), "{text}");
    let traces = handle.traces();
    assert_eq!(traces.len(), usize::from(wrongs[0] != Wrong::Ended));
    assert!(traces.iter().all(|trace| trace.outcome == code && trace.error == Some(text.clone())));
    let passed = |wrong: Wrong| {
        let place = |wrong: Wrong| Wrong::ALL.iter().position(|other| *other == wrong);
        u64::from(place(wrongs[0]) >= place(wrong))
    };
    let counts = world.probe.counts();
    let rooms = Rooms {
        before: world.before.load(SeqCst),
        asked: world.asked.load(SeqCst),
        activated: counts.activations - before.activations,
        executed: counts.executions - before.executions,
        after: world.after.load(SeqCst),
    };
    let expected = Rooms {
        before: passed(Wrong::Layer),
        asked: passed(Wrong::Approval),
        activated: passed(Wrong::Activation),
        executed: passed(Wrong::Execution),
        after: passed(Wrong::Execution),
    };
    assert_eq!(rooms, expected);
    drop(occupied);
    drop((plan, elsewhere));
    world.fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_a_call_that_is_wrong_in_several_ways_is_refused_by_the_first_room() {
    for (at, first) in Wrong::ALL.iter().enumerate() {
        println!("{first:?} and all behind it");
        is_refused_by_the_first(&Wrong::ALL[at..]).await;
        for second in &Wrong::ALL[at + 1..] {
            println!("{first:?} and {second:?}");
            is_refused_by_the_first(&[*first, *second]).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn p12_a_refusal_does_not_wait_for_a_permit() {
    let rows = refusals().into_iter().filter(|row| {
        row.setup == Setup::Nothing
            && row.rooms.activated == 0
            && row.person != Person::NeverAnswers
    });
    for mut row in rows.filter(|row| row.layer != Does::Hangs) {
        println!("{row:?}");
        row.setup = Setup::ToolIsBusy;
        let world = World::new(&row, Front::Plan).await;
        let elsewhere = world.elsewhere();
        let (plan, _) = world.begin();
        let shown = task::spawn(world.run(&plan, None, &elsewhere)).poll();
        assert!(shown.is_ready());
        drop((plan, elsewhere));
        world.fixture.end().await;
    }
}

// ===== the output =====

/// A1: what the trace says is what the result says.
#[tokio::test(start_paused = true)]
async fn p13_an_output_that_breaks_its_schema_is_said_to_in_the_result_and_in_the_one_trace() {
    for (check, success, valid) in [
        (OutputCheck::Warn, true, Some(false)),
        (OutputCheck::Reject, false, Some(false)),
        (OutputCheck::Off, true, None),
    ] {
        let probe = Probe::new("subject");
        let tool = Dressed::new(&probe, subject).gives(|_, _| Ok(json!({"n": "x"}).into()));
        let fixture = Fixture::with(paused().tool(tool), &[]).await.track(&probe);
        let plan = fixture.begin(PlanOptions::new().output_check(check)).unwrap();
        let result = plan.execute("subject", good()).await.unwrap();
        let [trace] = plan.traces().try_into().unwrap();
        assert_eq!((result.success, trace.success()), (success, success), "{check:?}");
        assert_eq!(trace.output_valid, valid);
        let faults = json!([{
            "path": "/n",
            "expected": "an integer",
            "got": "the string \"x\"",
        }]);
        let text = "at /n: expected an integer, got the string \"x\"";
        match check {
            OutputCheck::Warn => {
                assert_eq!(result.output, json!({"n": "x"}));
                let said = json!({"output_valid": false, "output_faults": faults});
                assert_eq!(Value::from(result.metadata), said);
                assert_eq!(trace.error, Some(format!("the output breaks its schema: {text}")));
            }
            OutputCheck::Reject => {
                assert_eq!(result.output, Value::Null);
                let said = json!({"code": "invalid_output", "faults": faults});
                assert_eq!(Value::from(result.metadata), said);
                assert_eq!(
                    (result.error.as_deref(), trace.error.as_deref()),
                    (Some(text), Some(text))
                );
            }
            _ => {
                assert_eq!(result.output, json!({"n": "x"}));
                assert_eq!((result.metadata.len(), trace.error), (0, None));
            }
        }
        assert_eq!(trace.result_size_bytes, if success { 9 } else { 0 });
        drop(plan);
        fixture.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn p13_an_output_that_fits_says_so_in_the_trace_only() {
    let probe = Probe::new("subject");
    let tool = Dressed::new(&probe, subject).gives(|_, _| Ok(json!({"n": 1}).into()));
    let fixture = Fixture::with(paused().tool(tool), &[]).await.track(&probe);
    let plan = fixture.plan();
    let result = plan.execute("subject", good()).await.unwrap();
    assert!(result.metadata.is_empty(), "{:?}", result.metadata);
    assert_eq!(plan.traces()[0].output_valid, Some(true));
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_an_output_is_checked_whole_before_it_is_cut() {
    let probe = Probe::new("subject");
    let tool = Dressed::new(&probe, subject)
        .gives(|_, _| Ok(json!({"a": "x".repeat(1000), "n": 1}).into()));
    let fixture = Fixture::with(paused().tool(tool), &[]).await.track(&probe);
    let options = PlanOptions::new().max_output_bytes(64).output_check(OutputCheck::Reject);
    let plan = fixture.begin(options).unwrap();
    let result = plan.execute("subject", good()).await.unwrap();
    assert!(result.success && result.output.get("n").is_none(), "{result:?}");
    let [trace] = plan.traces().try_into().unwrap();
    assert_eq!(trace.output_valid, Some(true));
    assert_eq!(trace.result_size_bytes, result.output.to_string().len());
    drop(plan);
    fixture.end().await;
}
