//! The front of the tool card: discover, activate, execute, deactivate by hand, over one plan.

use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio_test::{assert_pending, task};
use toolscope::test_util::{Probe, Step};
use toolscope::{
    ActivationContext, ApprovalRequest, Approver, CallOptions, Decision, FunctionTool, OutcomeCode,
    Plan, PlanHandle, PlanOptions, Tool, ToolCapability, ToolDescriptor, ToolError, ToolFailure,
    ToolFilter, ToolInstance, ToolRegistry, ToolRunner, ToolSpec, async_trait,
};

use crate::name::name;
use crate::registry::{described, tool};
use crate::support::{Fixture, paused};
use crate::sync::edition;

const SECOND: Duration = Duration::from_secs(1);

fn runner(plan: &PlanHandle) -> ToolRunner {
    ToolRunner::new(plan.clone())
}

/// The code in the metadata of a result, after a check that the result is that of a refusal.
#[track_caller]
fn refusal(result: &toolscope::ToolResult) -> &str {
    assert!(!result.success);
    assert_eq!(result.output, Value::Null);
    assert!(result.error.as_ref().is_some_and(|text| !text.is_empty()));
    let code = result.metadata["code"].as_str().unwrap();
    assert_eq!(result.code(), code);
    code
}

// ===== calls that are refused =====

/// What a failing activation says that a model must not read.
pub(crate) const SECRET: &str = "/srv/private/key.pem";

struct Locked(ToolDescriptor);

#[async_trait]
impl Tool for Locked {
    fn descriptor(&self) -> &ToolDescriptor {
        &self.0
    }

    async fn activate(&self, _: &ActivationContext) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        Err(ToolFailure::failed(format!("{SECRET} cannot be read")))
    }
}

struct Refuses;

#[async_trait]
impl Approver for Refuses {
    async fn decide(&self, _: &ApprovalRequest) -> Result<Decision, ToolFailure> {
        Ok(Decision::deny("not on a Friday"))
    }
}

/// What keeps a call refused for as long as it lives.
type Holding = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A plan in which the call of `tool` is refused.
pub(crate) struct Refused {
    pub(crate) code: OutcomeCode,
    pub(crate) fixture: Fixture,
    pub(crate) probe: Probe,
    pub(crate) plan: PlanHandle,
    pub(crate) traced: bool,
    owner: Option<Plan>,
    holding: Option<Holding>,
}

impl Refused {
    /// Every refusal, by its code.
    pub(crate) const ALL: [OutcomeCode; 14] = [
        OutcomeCode::NotFound,
        OutcomeCode::AccessDenied,
        OutcomeCode::CheckpointRequired,
        OutcomeCode::ApprovalRequired,
        OutcomeCode::ApprovalDenied,
        OutcomeCode::LimitExceeded,
        OutcomeCode::Concurrency,
        OutcomeCode::Activation,
        OutcomeCode::ActivationTimeout,
        OutcomeCode::DefinitionChanged,
        OutcomeCode::NotActivated,
        OutcomeCode::Cancelled,
        OutcomeCode::PlanEnded,
        OutcomeCode::ShutDown,
    ];

    pub(crate) async fn by(code: OutcomeCode) -> Self {
        let called = if code == OutcomeCode::NotFound { "toll" } else { "tool" };
        let mut probe = Probe::new(called);
        let options = PlanOptions::new();
        let options = match code {
            OutcomeCode::AccessDenied => options.read_only(),
            OutcomeCode::CheckpointRequired => options.require_checkpoints(),
            OutcomeCode::ApprovalRequired => options.ask(ToolFilter::new()),
            OutcomeCode::ApprovalDenied => options.ask(ToolFilter::new()).approver(Refuses),
            OutcomeCode::LimitExceeded => options.max_calls(0),
            OutcomeCode::Concurrency => options.permit_wait(SECOND),
            OutcomeCode::ActivationTimeout => options.call_timeout(SECOND),
            _ => options,
        };
        match code {
            OutcomeCode::Concurrency => {
                probe = probe.max_concurrent(1).on_execute([Step::Never, Step::Ok]);
            }
            OutcomeCode::ActivationTimeout => probe = probe.on_activate(Step::Slow(2 * SECOND)),
            _ => {}
        }
        let fixture = Fixture::with(paused(), &[]).await.track(&probe);
        if code == OutcomeCode::Activation {
            let locked = Locked(ToolDescriptor::new(name("tool")));
            fixture.registry().register(locked).unwrap();
        } else {
            fixture.registry().replace_source("s", vec![edition(&probe, 1)]).unwrap();
        }
        let owner = fixture.begin(options).unwrap();
        let plan = owner.handle();
        let traced = !matches!(code, OutcomeCode::PlanEnded | OutcomeCode::ShutDown)
            && code != OutcomeCode::Cancelled;
        let mut refused =
            Self { code, fixture, probe, plan, traced, owner: Some(owner), holding: None };
        refused.set().await;
        refused
    }

    /// Brings it about.
    async fn set(&mut self) {
        let plan = self.plan.clone();
        match self.code {
            OutcomeCode::Concurrency => {
                let mut holding: Holding = Box::pin(async move {
                    drop(plan.execute("tool", json!({})).await);
                });
                assert_pending!(task::spawn(&mut holding).poll());
                self.holding = Some(holding);
            }
            OutcomeCode::DefinitionChanged => {
                plan.activate("tool").await.unwrap();
                let changed = vec![edition(&self.probe, 2)];
                self.fixture.registry().replace_source("s", changed).unwrap();
                plan.sync_tools();
            }
            OutcomeCode::NotActivated => {
                plan.activate("tool").await.unwrap();
                assert!(plan.deactivate("tool").await);
            }
            OutcomeCode::Cancelled => plan.cancel(),
            OutcomeCode::PlanEnded => {
                self.owner.take().unwrap().finish().await;
            }
            OutcomeCode::ShutDown => {
                self.fixture.shutdown(SECOND).await;
            }
            _ => {}
        }
    }

    pub(crate) async fn end(self) {
        let executions = self.probe.counts().executions;
        assert_eq!(executions, u64::from(self.holding.is_some()), "{}", self.code);
        drop((self.holding, self.owner));
        self.fixture.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn p14_every_refusal_is_a_result_with_its_code() {
    for code in Refused::ALL {
        let refused = Refused::by(code).await;
        let result = runner(&refused.plan).execute("tool", json!({})).await;
        assert_eq!(refusal(&result), code.as_str());
        let traces = refused.plan.traces();
        assert_eq!(traces.len(), usize::from(refused.traced), "{code}");
        if let Some(trace) = traces.last() {
            assert_eq!(trace.outcome, code);
        }
        refused.end().await;
    }
}

/// What a runner gives is for the model too: it says no more than the plan would have it told.
#[tokio::test(start_paused = true)]
async fn p14_a_refusal_tells_a_model_the_same_by_a_runner_and_by_the_plan() {
    for code in Refused::ALL {
        let refused = Refused::by(code).await;
        let result = runner(&refused.plan).execute("tool", json!({})).await;
        let error = refused.plan.execute("tool", json!({})).await.unwrap_err();
        assert_eq!(result.to_model_text(), error.to_model_text());
        assert!(!result.to_model_text().contains(SECRET));
        refused.end().await;
    }
}

/// The approver's own words.
#[tokio::test(start_paused = true)]
async fn p12_an_activation_that_is_not_approved_says_why() {
    let refused = Refused::by(OutcomeCode::ApprovalDenied).await;
    let error = runner(&refused.plan).activate("tool").await.unwrap_err();
    assert!(error.details.contains("not on a Friday"), "{error}");
    refused.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_what_refuses_a_call_refuses_an_activation() {
    for code in Refused::ALL {
        let of_calls = [
            OutcomeCode::LimitExceeded,
            OutcomeCode::Concurrency,
            OutcomeCode::ActivationTimeout,
            OutcomeCode::NotActivated,
        ];
        if of_calls.contains(&code) {
            continue;
        }
        let refused = Refused::by(code).await;
        let error = runner(&refused.plan).activate("tool").await.unwrap_err();
        assert_eq!(error.tool_name, "tool");
        assert_eq!(error.error_type, "ActivationError");
        let direct = refused.plan.activate("tool").await.unwrap_err();
        assert_eq!((direct.code(), direct.to_string()), (code, error.details));
        assert_eq!(refused.plan.traces(), [], "an activation is no call");
        refused.end().await;
    }
}

// ===== discover =====

#[tokio::test(start_paused = true)]
async fn without_a_registry_the_tools_of_the_plan_are_discovered() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    fixture.registry().register(tool("files/read")).unwrap();
    let plan = fixture.plan();
    fixture.registry().register(tool("later")).unwrap();
    assert!(fixture.registry().remove("files/read"));
    let runner = runner(&plan);
    let of_the_plan: Vec<_> = plan.tools().descriptors().cloned().collect();
    assert_eq!(runner.discover(None), of_the_plan);
    let found: Vec<_> = runner.discover(None).into_iter().map(|it| it.name).collect();
    assert_eq!(found, [name("probe"), name("files/read")]);
    plan.sync_tools();
    let found: Vec<_> = runner.discover(None).into_iter().map(|it| it.name).collect();
    assert_eq!(found, [name("probe"), name("later")]);
    assert_eq!(runner.plan().id(), plan.id());
    drop(plan);
    assert_eq!(fixture.end().await.started, 0);
}

#[tokio::test(start_paused = true)]
async fn another_registry_is_discovered_as_it_is_now() {
    let fixture = Fixture::paused(&[&Probe::new("probe")]).await;
    let plan = fixture.plan();
    let runner = runner(&plan);
    let other = ToolRegistry::default();
    assert_eq!(runner.discover(Some(&other)), []);
    other.register_arc(described("a/one", "One")).unwrap();
    let found = runner.discover(Some(&other));
    assert_eq!(found, [ToolDescriptor::new(name("a/one")).description("One")]);
    assert_eq!(runner.discover(Some(fixture.registry())).len(), 1);
    let error = runner.activate("a/one").await.unwrap_err();
    assert_eq!(error.error_type, "ActivationError", "what is discovered is not yet the plan's");
    drop(plan);
    assert_eq!(fixture.end().await.started, 0);
}

// ===== activate =====

#[tokio::test(start_paused = true)]
async fn an_unknown_tool_is_named_as_it_was_given() {
    let fixture = Fixture::paused(&[&Probe::new("index")]).await;
    let plan = fixture.plan();
    let runner = runner(&plan);
    for given in ["indx", "local/indx", "local__indx", "../../etc/passwd", ""] {
        let ToolError { tool_name, error_type, details, .. } =
            runner.activate(given).await.unwrap_err();
        assert_eq!((tool_name.as_str(), error_type.as_str()), (given, "ActivationError"));
        assert_eq!(details.contains("`local/index`"), given.contains("indx"), "{details}");
    }
    assert_eq!(plan.traces(), []);
    drop(plan);
    assert_eq!(fixture.end().await.started, 0);
}

#[tokio::test(start_paused = true)]
async fn p1_what_was_activated_is_not_activated_by_the_call() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let runner = runner(&plan);
    runner.activate("probe").await.unwrap();
    runner.activate("local__probe").await.unwrap();
    assert_eq!(probe.counts().activations, 1);
    assert!(runner.execute("local/probe", json!({})).await.success);
    assert_eq!(probe.counts().activations, 1);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p3_an_activation_that_fails_is_an_error_of_the_card() {
    for (step, word) in [(Step::Err, "fails"), (Step::Panic, "panics"), (Step::Never, "timed out")]
    {
        let probe = Probe::new("probe").on_activate(step);
        let fixture = Fixture::paused(&[&probe]).await;
        let plan = fixture.plan();
        let error = runner(&plan).activate("probe").await.unwrap_err();
        assert_eq!(error.error_type, "ActivationError");
        assert!(error.details.contains(word), "{error}");
        assert!(error.to_string().contains("`probe`"), "{error}");
        plan.finish().await;
        fixture.end().await;
    }
}

// ===== execute =====

#[tokio::test(start_paused = true)]
async fn p14_what_a_tool_does_wrong_is_the_result_of_the_plan() {
    for (step, code) in [(Step::Err, "execution"), (Step::Panic, "panic"), (Step::Never, "timeout")]
    {
        let probe = Probe::new("probe").call_timeout(SECOND).on_execute(step);
        let fixture = Fixture::paused(&[&probe]).await;
        let plan = fixture.plan();
        let result = runner(&plan).execute("probe", json!({})).await;
        assert_eq!(refusal(&result), code);
        let trace = &plan.traces()[0];
        assert_eq!((trace.outcome.as_str(), &trace.error), (code, &result.error));
        plan.finish().await;
        fixture.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn p12_an_input_that_does_not_fit_is_a_result_that_ran_nothing() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let result = runner(&plan).execute("probe", json!(["no object"])).await;
    assert_eq!(refusal(&result), "invalid_input");
    assert_eq!(probe.counts().activations, 0);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_success_is_the_result_of_the_plan() {
    let fixture = Fixture::paused(&[&Probe::new("probe")]).await;
    let plan = fixture.plan();
    let result = runner(&plan).execute("probe", json!({"n": 1})).await;
    assert!(result.success);
    assert_eq!((result.output, result.error), (json!({"echo": {"n": 1}}), None));
    assert!(!result.metadata.contains_key("code"));
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p14_a_refusal_says_how_long_it_took() {
    let refused = Refused::by(OutcomeCode::NotFound).await;
    let result = runner(&refused.plan).execute("tool", json!({})).await;
    assert!(result.duration_ms.is_finite() && result.duration_ms >= 0.0);
    refused.end().await;
}

/// cases/upstream.md A3: the front of the card has the gate of the plan.
#[tokio::test(start_paused = true)]
async fn p11_a_runner_has_no_more_rights_than_its_plan() {
    let writer = Probe::new("writer");
    let reader = Probe::new("reader").capability(ToolCapability::read_only());
    let fixture = Fixture::paused(&[&writer, &reader]).await;
    let plan = fixture.begin(PlanOptions::new().read_only()).unwrap();
    let runner = runner(&plan);
    let result = runner.execute("writer", json!({})).await;
    assert_eq!(refusal(&result), "access_denied");
    assert!(runner.activate("writer").await.unwrap_err().details.contains("read-only"));
    assert!(runner.execute("reader", json!({})).await.success);
    assert!(!runner.deactivate("writer").await);
    assert_eq!(writer.counts().activations, 0);
    let outcomes: Vec<_> = plan.traces().iter().map(|trace| trace.outcome).collect();
    assert_eq!(outcomes, [OutcomeCode::AccessDenied, OutcomeCode::Ok]);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_a_call_of_a_runner_that_is_dropped_is_abandoned() {
    let probe = Probe::new("probe").on_execute(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let runner = runner(&plan);
    let mut called = task::spawn(runner.execute("probe", json!({})));
    assert_pending!(called.poll());
    drop(called);
    let traces = plan.traces();
    assert_eq!((traces.len(), traces[0].outcome), (1, OutcomeCode::Abandoned));
    assert!(runner.deactivate("probe").await);
    plan.finish().await;
    fixture.end().await;
}

// ===== deactivate =====

#[tokio::test(start_paused = true)]
async fn p4_a_tool_that_was_active_is_deactivated_once() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let runner = runner(&plan);
    assert!(!runner.deactivate("probe").await);
    runner.activate("probe").await.unwrap();
    assert!(runner.deactivate("local__probe").await);
    assert!(!runner.deactivate("probe").await);
    assert_eq!(probe.counts().deactivations, 1);
    assert_eq!(refusal(&runner.execute("probe", json!({})).await), "not_activated");
    runner.activate("probe").await.unwrap();
    assert!(runner.execute("probe", json!({})).await.success);
    assert!(runner.deactivate("probe").await);
    assert!(!runner.deactivate("nobody").await);
    plan.finish().await;
    fixture.end().await;
}

/// A reader that gives `here`.
fn immediate() -> FunctionTool {
    ToolSpec::new("now").read_only().function(|()| Ok("here"))
}

#[tokio::test(start_paused = true)]
async fn an_immediate_tool_is_deactivated_once_after_each_use() {
    let fixture = Fixture::with(paused().tool(immediate()), &[]).await;
    let plan = fixture.plan();
    let runner = runner(&plan);
    assert!(!runner.deactivate("now").await, "it was not used");
    runner.activate("local/now").await.unwrap();
    assert!(runner.deactivate("now").await);
    assert!(!runner.deactivate("now").await);
    for text in ["now", "local/now", "local__now"] {
        assert!(runner.execute(text, json!({})).await.success);
        assert!(runner.execute("now", json!({})).await.success);
        assert!(runner.deactivate(text).await);
        assert!(!runner.deactivate("now").await);
    }
    assert!(!plan.deactivate("now").await, "the plan knows nothing of it");
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_immediate_tool_of_one_runner_is_not_that_of_another() {
    let fixture = Fixture::with(paused().tool(immediate()), &[]).await;
    let plan = fixture.plan();
    let (one, other) = (runner(&plan), runner(&plan));
    assert!(one.execute("now", json!({})).await.success);
    assert!(!other.deactivate("now").await);
    assert!(one.deactivate("now").await);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_immediate_tool_whose_call_was_dropped_is_deactivated_once() {
    let waits = ToolSpec::new("waits").read_only();
    let waits = waits.handler(async |_ctx, (): ()| pending::<Result<(), ToolFailure>>().await);
    let fixture = Fixture::with(paused().tool(waits), &[]).await;
    let plan = fixture.plan();
    let runner = runner(&plan);
    let mut called = task::spawn(runner.execute("waits", json!({})));
    assert_pending!(called.poll());
    drop(called);
    assert!(runner.deactivate("waits").await);
    assert!(!runner.deactivate("waits").await);
    plan.finish().await;
    fixture.end().await;
}

/// As a managed tool, which is not activated by a call that is refused.
#[tokio::test(start_paused = true)]
async fn p12_an_immediate_tool_whose_call_was_refused_was_not_active() {
    let writer = ToolSpec::new("writer").writes().function(|()| Ok("written"));
    let fixture = Fixture::with(paused().tool(writer), &[]).await;
    let plan = fixture.begin(PlanOptions::new().read_only()).unwrap();
    let runner = runner(&plan);
    assert_eq!(refusal(&runner.execute("writer", json!({})).await), "access_denied");
    assert!(runner.activate("writer").await.is_err());
    assert!(!runner.deactivate("writer").await);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_immediate_tool_that_is_gone_is_deactivated_once() {
    let fixture = Fixture::with(paused().tool(immediate()), &[]).await;
    let plan = fixture.plan();
    let runner = runner(&plan);
    assert!(runner.execute("now", json!({})).await.success);
    assert!(fixture.registry().remove("now"));
    plan.sync_tools();
    assert!(runner.deactivate("now").await);
    assert!(!runner.deactivate("now").await);
    plan.finish().await;
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p8_nothing_is_active_once_the_plan_has_ended() {
    let probe = Probe::new("probe");
    let fixture = Fixture::with(paused().tool(immediate()), &[&probe]).await;
    let plan = fixture.plan();
    let runner = runner(&plan);
    assert!(runner.execute("probe", json!({})).await.success);
    assert!(runner.execute("now", json!({})).await.success);
    plan.finish().await;
    assert!(!runner.deactivate("probe").await);
    assert!(!runner.deactivate("now").await);
    assert_eq!(refusal(&runner.execute("now", json!({})).await), "plan_ended");
    assert!(!runner.deactivate("now").await);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p4_what_a_runner_activated_is_deactivated_with_the_plan() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    runner(&plan).activate("probe").await.unwrap();
    let options = CallOptions::new().timeout(SECOND);
    assert!(plan.execute_with("probe", json!({}), options).await.unwrap().success);
    assert_eq!(probe.counts().activations, 1, "they are of one plan");
    assert_eq!(plan.finish().await.deactivations().len(), 1);
    fixture.end().await;
}
