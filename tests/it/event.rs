//! What a plan and a runtime tell of themselves while it happens: each step in its order, to
//! whoever listens, at nobody's cost.

use std::collections::{HashMap, HashSet};
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, TryLockError, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use futures_util::FutureExt;
use serde_json::json;
use tokio::task::{JoinSet, unconstrained};
use tokio_test::{assert_pending, assert_ready, task};
use tokio_util::sync::CancellationToken;
use toolscope::test_util::{Probe, Step};
use toolscope::{
    ApprovalRequest, Approver, Before, CallOptions, Deadlines, Decision, EndReason, EventKind,
    EventStream, Layer, LayerCall, Plan, PlanHandle, PlanOptions, Progress, SharedActivation, Tool,
    ToolCall, ToolCapability, ToolEvent, ToolExecutionContext, ToolFailure, ToolOutput,
    ToolRuntime, ToolSpec, async_trait,
};

use crate::call::{relay, relayed};
use crate::dice::{Dice, seed};
use crate::hooks::{Blocker, Hooked, block_on, call, until, within};
use crate::support::{Fixture, paused};

const SECOND: Duration = Duration::from_secs(1);

// ===== to listen =====

/// A subscriber, and what it has not heard yet.
struct Ear(EventStream);

impl Ear {
    fn of(plan: &PlanHandle) -> Self {
        Self(plan.subscribe())
    }

    fn of_all(runtime: &ToolRuntime) -> Self {
        Self(runtime.subscribe())
    }

    fn poll(&mut self) -> Poll<Option<ToolEvent>> {
        // Outside Tokio's budget, which lets a task have 128 of them at a time.
        task::spawn(unconstrained(self.0.next())).poll()
    }

    /// What has come by now.
    fn hear(&mut self) -> Vec<ToolEvent> {
        std::iter::from_fn(|| match self.poll() {
            Poll::Ready(event) => event,
            Poll::Pending => None,
        })
        .collect()
    }

    fn told(&mut self) -> Vec<String> {
        texts(&self.hear())
    }

    fn is_over(&mut self) -> bool {
        self.poll() == Poll::Ready(None)
    }

    /// What comes until the stream is over.
    async fn rest(mut self) -> Vec<ToolEvent> {
        let mut rest = Vec::new();
        while let Some(event) = within(self.0.next()).await {
            rest.push(event);
        }
        rest
    }
}

/// An event in a few words: its call, its name, what happened.
fn text(event: &ToolEvent) -> String {
    let call = event.call_id.map(|call| format!("{call} ")).unwrap_or_default();
    let name = event.name.as_ref().map(|name| format!("{name} ")).unwrap_or_default();
    let what = match &event.kind {
        EventKind::Activating { generation, attempt, .. } => {
            format!("activating {generation}.{attempt}")
        }
        EventKind::Active { generation, .. } => format!("active {generation}"),
        EventKind::ActivationFailed { .. } => "activation failed".to_owned(),
        EventKind::Waiting { on, .. } => format!("waits for {on:?}"),
        EventKind::Executing => "executing".to_owned(),
        EventKind::Progress(progress) => format!("progress {}", progress.done),
        EventKind::Finished(trace) => format!("finished {}", trace.outcome),
        EventKind::Deactivated(record) => {
            format!("deactivated {} {:?}", record.generation, record.outcome)
        }
        EventKind::Ended { reason, .. } => format!("ended {reason:?}"),
        EventKind::KeeperBlocked => "keeper blocked".to_owned(),
        EventKind::Lost { count, .. } => format!("lost {count}"),
        other => panic!("an event that no test knows: {other:?}"),
    };
    format!("{call}{name}{what}")
}

fn texts(events: &[ToolEvent]) -> Vec<String> {
    events.iter().map(text).collect()
}

/// Does something with each event at the very place where it is told: its waker polls the stream.
struct Listener {
    task: Mutex<Pin<Box<dyn Future<Output = ()> + Send>>>,
    again: AtomicBool,
}

impl Listener {
    fn new(mut stream: EventStream, heard: impl Fn(ToolEvent) + Send + 'static) -> Arc<Self> {
        let task = Mutex::new(Box::pin(async move {
            while let Some(event) = stream.next().await {
                heard(event);
            }
        }) as Pin<Box<_>>);
        let listener = Arc::new(Self { task, again: AtomicBool::new(true) });
        Arc::clone(&listener).wake();
        listener
    }
}

impl Wake for Listener {
    fn wake(self: Arc<Self>) {
        self.again.store(true, SeqCst);
        let waker = Waker::from(Arc::clone(&self));
        while self.again.load(SeqCst) {
            let mut task = match self.task.try_lock() {
                Ok(task) => task,
                // Whoever polls now looks again.
                Err(TryLockError::WouldBlock) => return,
                Err(TryLockError::Poisoned(error)) => panic!("{error}"),
            };
            while self.again.swap(false, SeqCst) {
                if task.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                    *task = Box::pin(std::future::pending());
                }
            }
        }
    }
}

/// Approves after the latch, or never.
struct Waits(Option<CancellationToken>);

#[async_trait]
impl Approver for Waits {
    async fn decide(&self, _: &ApprovalRequest) -> Result<Decision, ToolFailure> {
        match &self.0 {
            Some(latch) => latch.cancelled().await,
            None => return Ok(Decision::deny("not today")),
        }
        Ok(Decision::Once)
    }
}

/// A probe that tells its progress.
fn telling(probe: &Probe) -> Hooked {
    Hooked::new(probe).before_execute(|ctx| {
        ctx.progress(Progress::new(1.0).of(2.0).message("half"));
        std::future::ready(Ok(()))
    })
}

fn asking() -> ToolCapability {
    ToolCapability::writes().human_approval_required()
}

// ===== the steps of a call =====

#[tokio::test(start_paused = true)]
async fn a_managed_call_tells_each_of_its_steps_in_their_order() {
    let fixture = telling(&Probe::new("tool")).fixture(paused()).await;
    let plan = fixture.plan();
    let (mut of_the_plan, mut of_all) = (Ear::of(&plan), Ear::of_all(&fixture));
    plan.execute("tool", json!({})).await.unwrap();
    plan.finish().await;
    let steps = [
        "local/tool activating 1.1",
        "local/tool active 1",
        "1 local/tool executing",
        "1 local/tool progress 1",
        "1 local/tool finished ok",
        "local/tool deactivated 1 Ok",
        "ended Finished",
    ];
    assert_eq!(of_the_plan.told(), steps);
    assert_eq!(of_all.told(), steps);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_immediate_call_tells_of_no_activation() {
    let probe = Probe::new("tool").immediate();
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let mut ear = Ear::of(&plan);
    plan.execute("tool", json!({})).await.unwrap();
    plan.finish().await;
    assert_eq!(
        ear.told(),
        ["1 local/tool executing", "1 local/tool finished ok", "ended Finished"]
    );
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_warm_call_tells_of_no_activation() {
    let probe = Probe::new("tool");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    plan.execute("tool", json!({})).await.unwrap();
    let mut ear = Ear::of(&plan);
    plan.execute("tool", json!({})).await.unwrap();
    assert_eq!(ear.told(), ["2 local/tool executing", "2 local/tool finished ok"]);
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_activation_by_hand_is_told_without_a_call() {
    let probe = Probe::new("tool");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let mut ear = Ear::of(&plan);
    plan.activate("tool").await.unwrap();
    assert_eq!(ear.told(), ["local/tool activating 1.1", "local/tool active 1"]);
    assert!(plan.deactivate("tool").await);
    assert_eq!(ear.told(), ["local/tool deactivated 1 Ok"]);
    assert!(plan.activate("tool").await.is_ok());
    assert_eq!(ear.told(), ["local/tool activating 2.1", "local/tool active 2"]);
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn every_event_names_the_plan_and_progress_comes_whole() {
    let fixture = telling(&Probe::new("tool")).fixture(paused()).await;
    let plan = fixture.plan();
    let mut ear = Ear::of(&plan);
    plan.execute("tool", json!({})).await.unwrap();
    let id = plan.id();
    plan.finish().await;
    let heard = ear.hear();
    assert!(heard.iter().all(|event| event.plan_id == id), "{heard:?}");
    let progress = Progress::new(1.0).of(2.0).message("half");
    assert!(heard.iter().any(|event| event.kind == EventKind::Progress(progress.clone())));
    fixture.end().await;
}

// ===== refusals =====

/// What one call that is not carried out tells, after a check of its trace.
async fn refused(plan: &PlanHandle, tool: &str, options: CallOptions) -> Vec<String> {
    let mut ear = Ear::of(plan);
    let input = if tool == "picky" { json!([]) } else { json!({}) };
    let returned = plan.execute_with(tool, input, options).await;
    assert!(!returned.is_ok_and(|result| result.success));
    let heard = ear.hear();
    let finished: Vec<_> = heard
        .iter()
        .filter_map(|event| match &event.kind {
            EventKind::Finished(trace) => Some((**trace).clone()),
            _ => None,
        })
        .collect();
    assert_eq!(finished.as_slice(), &plan.traces()[plan.traces().len() - 1..]);
    let last = heard.last().unwrap();
    assert_eq!(
        (last.call_id, &last.name),
        (Some(finished[0].call_id), &Some(finished[0].tool.clone()))
    );
    texts(&heard)
}

#[tokio::test(start_paused = true)]
async fn p13_a_refusal_before_the_tool_tells_of_its_end_and_nothing_else() {
    let cases = [
        ("nobody", PlanOptions::new(), "1 nobody finished not_found"),
        ("writer", PlanOptions::new().read_only(), "1 local/writer finished access_denied"),
        (
            "writer",
            PlanOptions::new().require_checkpoints(),
            "1 local/writer finished checkpoint_required",
        ),
        ("picky", PlanOptions::new(), "1 local/picky finished invalid_input"),
        ("asking", PlanOptions::new(), "1 local/asking finished approval_required"),
        ("writer", PlanOptions::new().max_calls(0), "1 local/writer finished limit_exceeded"),
    ];
    let (writer, picky) = (Probe::new("writer"), Probe::new("picky"));
    let asks = Probe::new("asking").capability(asking());
    let fixture = Fixture::paused(&[&writer, &picky, &asks]).await;
    for (tool, options, told) in cases {
        let plan = fixture.begin(options).unwrap();
        assert_eq!(refused(&plan, tool, CallOptions::new()).await, [told]);
        drop(plan);
    }
    let plan = fixture.plan();
    let token = CancellationToken::new();
    token.cancel();
    let options = CallOptions::new().token(token);
    // Before room 2 there is no tool, only what the caller wrote.
    assert_eq!(refused(&plan, "writer", options).await, ["1 writer finished cancelled"]);
    drop(plan);
    assert_eq!(fixture.end().await.started, 0);
}

#[tokio::test(start_paused = true)]
async fn p13_a_denied_approval_tells_of_the_wait_and_of_its_end() {
    let asks = Probe::new("asking").capability(asking());
    let fixture = Fixture::paused(&[&asks]).await;
    let plan = fixture.begin(PlanOptions::new().approver(Waits(None))).unwrap();
    let told = refused(&plan, "asking", CallOptions::new()).await;
    assert_eq!(
        told,
        ["1 local/asking waits for Approval", "1 local/asking finished approval_denied"]
    );
    drop(plan);
    assert_eq!(fixture.end().await.started, 0);
}

#[tokio::test(start_paused = true)]
async fn p13_a_call_without_room_tells_of_the_wait_and_of_its_end() {
    let holder = Probe::new("holder").on_execute(Step::Never);
    let fixture = Fixture::paused(&[&holder]).await;
    let options = PlanOptions::new().max_concurrent(1).permit_wait(SECOND);
    let plan = fixture.begin(options).unwrap();
    let mut holds = task::spawn(call(&plan, "holder"));
    assert_pending!(holds.poll());
    let told = refused(&plan, "holder", CallOptions::new()).await;
    assert_eq!(
        told,
        ["2 local/holder waits for PlanPermit", "2 local/holder finished concurrency"]
    );
    drop(holds);
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_a_call_of_a_deactivated_tool_tells_of_its_end_only() {
    let probe = Probe::new("tool");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    plan.activate("tool").await.unwrap();
    assert!(plan.deactivate("tool").await);
    let told = refused(&plan, "tool", CallOptions::new()).await;
    assert_eq!(told, ["2 local/tool finished not_activated"]);
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_a_call_of_a_changed_tool_tells_of_its_end_only() {
    let probe = Probe::new("tool");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    plan.activate("tool").await.unwrap();
    assert!(fixture.registry().remove("tool"));
    fixture.registry().register(probe.clone().max_concurrent(7).tool()).unwrap();
    assert!(!plan.sync_tools().is_empty());
    let told = refused(&plan, "tool", CallOptions::new()).await;
    assert_eq!(told, ["2 local/tool finished definition_changed"]);
    drop(plan);
    fixture.end().await;
}

/// Refuses every call.
struct Refuses;

#[async_trait]
impl Layer for Refuses {
    async fn before(&self, _: &LayerCall<'_>) -> Before {
        Before::Refuse("the layer says no".to_owned())
    }
}

/// Answers every call.
struct Answers;

#[async_trait]
impl Layer for Answers {
    async fn before(&self, _: &LayerCall<'_>) -> Before {
        Before::Answer(ToolOutput::new(json!("by the layer")))
    }
}

#[tokio::test(start_paused = true)]
async fn p13_a_refusal_of_a_layer_tells_of_its_end_only() {
    let probe = Probe::new("tool");
    let fixture = Fixture::with(paused().layer(Refuses), &[&probe]).await;
    let plan = fixture.plan();
    let told = refused(&plan, "tool", CallOptions::new()).await;
    assert_eq!(told, ["1 local/tool finished access_denied"]);
    drop(plan);
    assert_eq!(fixture.end().await.started, 0);
}

#[tokio::test(start_paused = true)]
async fn a_call_that_a_layer_answers_does_not_tell_that_the_tool_runs() {
    let probe = Probe::new("tool");
    let fixture = Fixture::with(paused().layer(Answers), &[&probe]).await;
    let plan = fixture.plan();
    let mut ear = Ear::of(&plan);
    assert!(call(&plan, "tool").await.unwrap().success);
    assert_eq!(ear.told(), ["1 local/tool finished ok"]);
    drop(plan);
    assert_eq!(fixture.end().await.started, 0);
}

#[tokio::test(start_paused = true)]
async fn p13_a_call_of_an_ended_plan_tells_nothing() {
    let probe = Probe::new("tool");
    let fixture = Fixture::paused(&[&probe]).await;
    let (plan, mut of_all) = (fixture.plan(), Ear::of_all(&fixture));
    let handle = plan.handle();
    plan.finish().await;
    assert_eq!(of_all.told(), ["ended Finished"]);
    assert!(call(&handle, "tool").await.is_err());
    assert_eq!(of_all.told(), Vec::<String>::new());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_each_call_of_a_batch_tells_of_its_own_end() {
    let probe = Probe::new("tool");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let mut ear = Ear::of(&plan);
    let calls = ["nobody", "tool", "nobody"].map(|name| ToolCall::new(name, json!({})));
    plan.execute_batch(&calls).await;
    let told = [
        "1 nobody finished not_found",
        "local/tool activating 1.1",
        "local/tool active 1",
        "2 local/tool executing",
        "2 local/tool finished ok",
        "3 nobody finished not_found",
    ];
    assert_eq!(ear.told(), told);
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_an_abandoned_call_tells_of_its_end() {
    let probe = Probe::new("tool").on_execute(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let mut running = task::spawn(call(&plan, "tool"));
    assert_pending!(running.poll());
    let mut ear = Ear::of(&plan);
    drop(running);
    assert_eq!(ear.told(), ["1 local/tool finished abandoned"]);
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p13_a_call_whose_tool_fails_tells_so() {
    let steps = [Step::Err, Step::Panic, Step::Never, Step::Ok];
    let probe = Probe::new("tool").on_execute(steps).call_timeout(SECOND);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    plan.activate("tool").await.unwrap();
    for (call, code) in [(2, "execution"), (3, "panic"), (4, "timeout")] {
        let told = refused(&plan, "tool", CallOptions::new()).await;
        let [executing, finished] = told.as_slice() else { panic!("{told:?}") };
        assert_eq!(*executing, format!("{call} local/tool executing"));
        assert_eq!(*finished, format!("{call} local/tool finished {code}"));
    }
    drop(plan);
    fixture.end().await;
}

// ===== activations that fail =====

#[tokio::test(start_paused = true)]
async fn an_activation_that_fails_is_told_before_the_call_that_asked_for_it() {
    let probe = Probe::new("tool").on_activate([Step::Err, Step::Panic, Step::Never, Step::Ok]);
    let fixture = Fixture::paused(&[&probe]).await;
    let options = PlanOptions::new().max_attempts(4);
    let plan = fixture.begin(options).unwrap();
    let mut ear = Ear::of(&plan);
    for _ in 0..3 {
        assert!(call(&plan, "tool").await.is_err());
    }
    assert!(call(&plan, "tool").await.is_ok());
    let told = [
        "local/tool activating 1.1",
        "local/tool activation failed",
        "1 local/tool finished activation",
        "local/tool activating 1.2",
        "local/tool activation failed",
        "2 local/tool finished activation",
        "local/tool activating 1.3",
        "local/tool activation failed",
        "3 local/tool finished activation",
        "local/tool activating 1.4",
        "local/tool active 1",
        "4 local/tool executing",
        "4 local/tool finished ok",
    ];
    let heard = ear.hear();
    assert_eq!(texts(&heard), told);
    let errors: Vec<_> = heard
        .iter()
        .filter_map(|event| match &event.kind {
            EventKind::ActivationFailed { error, .. } => Some(error.as_str()),
            _ => None,
        })
        .collect();
    for (error, how) in errors.iter().zip(["failed", "panicked", "timed out"]) {
        assert!(error.starts_with(&format!("activation of `local/tool` {how}")), "{error}");
    }
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_tool_without_an_attempt_left_tells_of_no_activation() {
    let probe = Probe::new("tool").on_activate(Step::Err);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_attempts(1)).unwrap();
    assert!(call(&plan, "tool").await.is_err());
    let told = refused(&plan, "tool", CallOptions::new()).await;
    assert_eq!(told, ["2 local/tool finished activation"]);
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_activation_that_outlives_its_call_is_told_after_it() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").on_activate(Step::Until(latch.clone())).call_timeout(SECOND);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let mut ear = Ear::of(&plan);
    assert!(call(&plan, "tool").await.is_err());
    let told = ["local/tool activating 1.1", "1 local/tool finished activation_timeout"];
    assert_eq!(ear.told(), told);
    latch.cancel();
    plan.activate("tool").await.unwrap();
    assert_eq!(ear.told(), ["local/tool active 1"]);
    drop(plan);
    fixture.end().await;
}

/// The law of the events of an instance: after `Active` one `Deactivated`, and none without.
#[tokio::test(start_paused = true)]
async fn an_instance_that_the_end_overtakes_is_told_as_active_and_as_deactivated() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").on_activate(Step::Until(latch.clone()));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let mut ear = Ear::of(&plan);
    let mut asking = task::spawn(call(&plan, "tool"));
    assert_pending!(asking.poll());
    drop(asking);
    let mut finish = task::spawn(plan.finish());
    assert_pending!(finish.poll());
    latch.cancel();
    finish.await;
    let told = [
        "local/tool activating 1.1",
        "1 local/tool finished abandoned",
        "local/tool active 1",
        "local/tool deactivated 1 Ok",
        "ended Finished",
    ];
    assert_eq!(ear.told(), told);
    assert_eq!(fixture.end().await.activated, 1);
}

#[tokio::test(start_paused = true)]
async fn a_failure_that_the_end_overtakes_is_told_before_it() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").on_activate(Step::UntilCancelledPanic);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let mut ear = Ear::of(&plan);
    let mut asking = task::spawn(call(&plan, "tool"));
    assert_pending!(asking.poll());
    drop(asking);
    plan.finish().await;
    let told = [
        "local/tool activating 1.1",
        "1 local/tool finished abandoned",
        "local/tool activation failed",
        "ended Finished",
    ];
    assert_eq!(ear.told(), told);
    latch.cancel();
    fixture.end().await;
}

// ===== waits =====

#[tokio::test(start_paused = true)]
async fn a_call_that_waits_for_an_approval_says_so_once() {
    let latch = CancellationToken::new();
    let asks = Probe::new("asking").capability(asking()).immediate();
    let fixture = Fixture::paused(&[&asks]).await;
    let options = PlanOptions::new().approver(Waits(Some(latch.clone())));
    let plan = fixture.begin(options).unwrap();
    let mut ear = Ear::of(&plan);
    let mut waiting = task::spawn(call(&plan, "asking"));
    assert_pending!(waiting.poll());
    assert_pending!(waiting.poll());
    assert_eq!(ear.told(), ["1 local/asking waits for Approval"]);
    latch.cancel();
    assert!(waiting.await.unwrap().success);
    assert_eq!(ear.told(), ["1 local/asking executing", "1 local/asking finished ok"]);
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_that_has_room_at_once_tells_of_no_wait() {
    let probe = Probe::new("tool").max_concurrent(1).immediate();
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_concurrent(1)).unwrap();
    let mut ear = Ear::of(&plan);
    call(&plan, "tool").await.unwrap();
    assert_eq!(ear.told(), ["1 local/tool executing", "1 local/tool finished ok"]);
    drop(plan);
    fixture.end().await;
}

/// What a call tells that finds another one of the same tool running, which then ends.
async fn waits_for(probe: Probe, options: PlanOptions) -> Vec<String> {
    let latch = CancellationToken::new();
    let probe = probe.immediate().on_execute([Step::Until(latch.clone()), Step::Ok]);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.begin(options).unwrap();
    let mut holds = task::spawn(call(&plan, "tool"));
    assert_pending!(holds.poll());
    let mut ear = Ear::of(&plan);
    let mut waits = task::spawn(call(&plan, "tool"));
    assert_pending!(waits.poll());
    latch.cancel();
    assert!(holds.await.is_ok());
    assert!(waits.await.is_ok());
    let told = ear.told();
    drop(plan);
    fixture.end().await;
    told
}

#[tokio::test(start_paused = true)]
async fn a_call_that_waits_for_the_plan_s_permit_says_so() {
    let told = waits_for(Probe::new("tool"), PlanOptions::new().max_concurrent(1)).await;
    let expected = [
        "2 local/tool waits for PlanPermit",
        "1 local/tool finished ok",
        "2 local/tool executing",
        "2 local/tool finished ok",
    ];
    assert_eq!(told, expected);
}

#[tokio::test(start_paused = true)]
async fn a_call_that_waits_for_the_tool_s_permit_says_so() {
    let told = waits_for(Probe::new("tool").max_concurrent(1), PlanOptions::new()).await;
    let expected = [
        "2 local/tool waits for ToolPermit",
        "1 local/tool finished ok",
        "2 local/tool executing",
        "2 local/tool finished ok",
    ];
    assert_eq!(told, expected);
}

#[tokio::test(start_paused = true)]
async fn an_activation_that_waits_for_its_source_says_so_without_a_call() {
    let latch = CancellationToken::new();
    let first = Probe::new("first").on_activate(Step::Until(latch.clone()));
    let second = Probe::new("second");
    let fixture = Fixture::paused(&[]).await.track(&first).track(&second);
    let tools = vec![Arc::new(first.tool()) as Arc<dyn Tool>, Arc::new(second.tool())];
    fixture.registry().replace_source("server", tools).unwrap();
    fixture.registry().limit_activations("server", 1);
    let plan = fixture.plan();
    let mut ear = Ear::of(&plan);
    let mut one = task::spawn(call(&plan, "first"));
    assert_pending!(one.poll());
    let mut two = task::spawn(call(&plan, "second"));
    assert_pending!(two.poll());
    assert_eq!(ear.told(), ["local/first activating 1.1", "local/second waits for SourcePermit"]);
    latch.cancel();
    assert!(one.await.is_ok());
    assert!(two.await.is_ok());
    let told: Vec<_> = ear.told().into_iter().filter(|text| text.contains("second")).collect();
    let expected = [
        "local/second activating 1.1",
        "local/second active 1",
        "2 local/second executing",
        "2 local/second finished ok",
    ];
    assert_eq!(told, expected);
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_activation_that_its_source_has_no_room_for_is_told_as_failed() {
    let first = Probe::new("first").on_activate(Step::UntilCancelled);
    let second = Probe::new("second");
    let fixture = Fixture::paused(&[]).await.track(&first).track(&second);
    let tools = vec![Arc::new(first.tool()) as Arc<dyn Tool>, Arc::new(second.tool())];
    fixture.registry().replace_source("server", tools).unwrap();
    fixture.registry().limit_activations("server", 1);
    let plan = fixture.begin(PlanOptions::new().permit_wait(SECOND)).unwrap();
    let mut one = task::spawn(call(&plan, "first"));
    assert_pending!(one.poll());
    let told = refused(&plan, "second", CallOptions::new()).await;
    let expected = [
        "local/second waits for SourcePermit",
        "local/second activation failed",
        "2 local/second finished activation",
    ];
    assert_eq!(told, expected);
    drop(one);
    drop(plan);
    assert_eq!(second.counts().activations, 0);
    fixture.end().await;
}

// ===== taint, the host, shared activations =====

#[tokio::test(start_paused = true)]
async fn a_tainted_instance_is_told_as_deactivated_and_the_next_as_another_generation() {
    let probe = Probe::new("tool").taints(true);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let mut ear = Ear::of(&plan);
    call(&plan, "tool").await.unwrap();
    call(&plan, "tool").await.unwrap();
    plan.finish().await;
    let told = [
        "local/tool activating 1.1",
        "local/tool active 1",
        "1 local/tool executing",
        "1 local/tool finished ok",
        "local/tool deactivated 1 Ok",
        "local/tool activating 2.1",
        "local/tool active 2",
        "2 local/tool executing",
        "2 local/tool finished ok",
        "local/tool deactivated 2 Ok",
        "ended Finished",
    ];
    assert_eq!(ear.told(), told);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_deactivation_that_goes_wrong_is_told_with_its_outcome() {
    let fails = Probe::new("fails").on_deactivate(Step::Err);
    let panics = Probe::new("panics").on_deactivate(Step::Panic);
    let hangs = Probe::new("hangs").on_deactivate(Step::Never);
    let fixture = Fixture::paused(&[&fails, &panics, &hangs]).await;
    let plan = fixture.plan();
    for tool in ["fails", "panics", "hangs"] {
        plan.activate(tool).await.unwrap();
    }
    let ear = Ear::of(&plan);
    let report = plan.finish().await;
    let heard = ear.rest().await;
    let records: Vec<_> = heard
        .iter()
        .filter_map(|event| match &event.kind {
            EventKind::Deactivated(record) => Some(record.clone()),
            _ => None,
        })
        .collect();
    assert_eq!(records, report.deactivations());
    assert_eq!(heard.last().map(text).unwrap(), "ended Finished");
    assert_eq!(fixture.end().await.troubled, 3);
}

#[tokio::test(start_paused = true)]
async fn a_shared_activation_is_told_under_its_own_name_and_goes_last() {
    let line = Probe::new("line");
    let probe = Probe::new("tool").needs(&line);
    let fixture = Fixture::paused(&[&probe]).await.track(&line);
    let plan = fixture.plan();
    let mut ear = Ear::of(&plan);
    call(&plan, "tool").await.unwrap();
    plan.finish().await;
    let told = [
        "local/tool activating 1.1",
        "local/line activating 1.1",
        "local/line active 1",
        "local/tool active 1",
        "1 local/tool executing",
        "1 local/tool finished ok",
        "local/tool deactivated 1 Ok",
        "local/line deactivated 1 Ok",
        "ended Finished",
    ];
    assert_eq!(ear.told(), told);
    fixture.end().await;
}

struct Line;

#[async_trait]
impl SharedActivation for Line {
    async fn deactivate(&self, _: &toolscope::DeactivationContext) -> Result<(), ToolFailure> {
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_shared_between_plans_is_told_of_the_root_scope() {
    let probe = Probe::new("tool");
    let hooked = Hooked::new(&probe).before_activate(async |ctx| {
        ctx.shared_between_plans("line", async |_| Ok(Line)).await.map(drop)
    });
    let runtime = paused().tool(hooked).build().await.unwrap();
    let (plan, mut of_all) = (runtime.begin(PlanOptions::new()).unwrap(), Ear::of_all(&runtime));
    let mut of_the_plan = Ear::of(&plan);
    call(&plan, "tool").await.unwrap();
    plan.finish().await;
    let report = runtime.shutdown(20 * SECOND).await;
    let of_root: Vec<_> =
        of_all.hear().into_iter().filter(|event| event.plan_id.number() == 0).collect();
    assert_eq!(
        texts(&of_root),
        ["line activating 1.1", "line active 1", "line deactivated 1 Ok", "ended ShutDown"]
    );
    let heard = of_the_plan.told();
    assert!(!heard.iter().any(|text| text.contains("line")), "{heard:?}");
    assert_eq!((report.stats.activated, report.stats.deactivated), (2, 2));
    drop(runtime);
    probe.assert_balanced();
}

// ===== nested calls and child plans =====

#[tokio::test(start_paused = true)]
async fn a_nested_call_is_told_inside_the_one_that_makes_it() {
    let probe = Probe::new("probe").immediate();
    let fixture = Fixture::with(paused().tool(relay("relay")), &[&probe]).await;
    let plan = fixture.plan();
    let mut ear = Ear::of(&plan);
    plan.execute("relay", relayed("probe")).await.unwrap();
    let heard = ear.hear();
    let told = [
        "1 local/relay executing",
        "2 local/probe executing",
        "2 local/probe finished ok",
        "1 local/relay finished ok",
    ];
    assert_eq!(texts(&heard), told);
    let EventKind::Finished(nested) = &heard[2].kind else { panic!("{heard:?}") };
    assert_eq!(nested.parent_call_id, Some(1));
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_child_plan_is_told_on_its_own_stream_and_on_that_of_the_runtime() {
    let probe = Probe::new("tool").immediate();
    let fixture = Fixture::paused(&[&probe]).await;
    let parent = fixture.plan();
    let child = parent.begin_child(PlanOptions::new()).unwrap();
    let (mut of_parent, mut of_child) = (Ear::of(&parent), Ear::of(&child));
    let mut of_all = Ear::of_all(&fixture);
    call(&child, "tool").await.unwrap();
    let ids = (parent.id(), child.id());
    parent.finish().await;
    let told = ["1 local/tool executing", "1 local/tool finished ok", "ended ParentEnded"];
    assert_eq!(of_child.told(), told);
    assert_eq!(of_parent.told(), ["ended Finished"]);
    let plans: Vec<_> = of_all.hear().iter().map(|event| event.plan_id).collect();
    assert_eq!(plans, [ids.1, ids.1, ids.1, ids.0], "the child's end comes before its parent's");
    drop(child);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_child_that_is_refused_tells_nothing() {
    let fixture = Fixture::paused(&[]).await;
    let parent = fixture.plan();
    let handle = parent.handle();
    let mut of_all = Ear::of_all(&fixture);
    parent.finish().await;
    let refused = handle.begin_child(PlanOptions::new()).unwrap_err();
    assert_eq!(refused.to_string(), "the plan has ended: finished");
    assert_eq!(of_all.told(), ["ended Finished"], "only the parent had begun");
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn events_of_a_plan_never_reach_the_stream_of_another() {
    let probe = Probe::new("tool");
    let fixture = Fixture::paused(&[&probe]).await;
    let (one, other) = (fixture.plan(), fixture.plan());
    let (mut of_one, mut of_other) = (Ear::of(&one), Ear::of(&other));
    call(&one, "tool").await.unwrap();
    one.finish().await;
    assert_eq!(of_one.hear().len(), 6);
    assert_eq!(of_other.told(), Vec::<String>::new());
    assert!(!of_other.is_over());
    other.finish().await;
    assert_eq!(of_other.told(), ["ended Finished"]);
    fixture.end().await;
}

// ===== the end =====

#[tokio::test(start_paused = true)]
async fn a_stream_is_over_after_the_end_although_a_handle_and_a_report_are_held() {
    let probe = Probe::new("tool");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let (handle, mut ear) = (plan.handle(), Ear::of(&plan));
    call(&plan, "tool").await.unwrap();
    assert!(!ear.hear().is_empty());
    assert!(!ear.is_over());
    let report = plan.finish().await;
    assert_eq!(ear.told(), ["local/tool deactivated 1 Ok", "ended Finished"]);
    assert!(ear.is_over());
    assert!(ear.is_over(), "and stays over");
    assert_eq!((handle.id(), handle.end_reason()), (report.plan_id(), Some(report.reason())));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_subscription_after_the_end_is_over_at_once() {
    let probe = Probe::new("tool");
    let fixture = Fixture::paused(&[&probe]).await;
    for heard_before in [false, true] {
        let plan = fixture.plan();
        let ear = heard_before.then(|| Ear::of(&plan));
        let handle = plan.handle();
        call(&plan, "tool").await.unwrap();
        plan.finish().await;
        assert!(Ear::of(&handle).is_over());
        assert!(Ear::of(&handle).is_over());
        drop(ear);
    }
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_subscription_while_the_plan_ends_hears_of_the_end() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").on_deactivate(Step::Until(latch.clone()));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let handle = plan.handle();
    plan.activate("tool").await.unwrap();
    let mut finish = task::spawn(plan.finish());
    assert_pending!(finish.poll());
    let ear = Ear::of(&handle);
    latch.cancel();
    finish.await;
    assert_eq!(texts(&ear.rest().await), ["local/tool deactivated 1 Ok", "ended Finished"]);
    fixture.end().await;
}

#[tokio::test]
async fn a_subscription_beside_the_end_takes_the_end_from_nobody() {
    let fixture = Fixture::new(&[]).await;
    let rounds = 400;
    let mut without = 0;
    for _ in 0..rounds {
        let plan = fixture.plan();
        let (handle, mut ear) = (plan.handle(), Ear::of(&plan));
        let settled = Arc::new(AtomicBool::new(false));
        let others: Vec<_> = (0..2)
            .map(|_| {
                let (handle, settled) = (handle.clone(), Arc::clone(&settled));
                std::thread::spawn(move || {
                    while !settled.load(SeqCst) {
                        drop(handle.subscribe());
                    }
                })
            })
            .collect();
        plan.finish().await;
        settled.store(true, SeqCst);
        for other in others {
            other.join().unwrap();
        }
        without += u32::from(ear.told() != ["ended Finished"]);
    }
    assert_eq!(without, 0, "of {rounds} plans");
    fixture.end().await;
}

#[tokio::test]
async fn the_stream_of_a_runtime_is_over_when_the_runtime_is_gone() {
    let probe = Probe::new("tool");
    let fixture = Fixture::new(&[&probe]).await;
    let (plan, mut ear) = (fixture.plan(), Ear::of_all(&fixture));
    let handle = plan.handle();
    call(&plan, "tool").await.unwrap();
    assert!(!ear.hear().is_empty());
    drop(plan);
    tokio::task::spawn_blocking(move || fixture.end_by_drop()).await.unwrap();
    assert_eq!(texts(&ear.rest().await), ["local/tool deactivated 1 Ok", "ended Dropped"]);
    assert!(Ear::of(&handle).is_over());
}

/// A tool that holds its runtime, and is the last to do so.
#[tokio::test]
async fn the_stream_of_a_runtime_that_is_dropped_on_its_keeper_has_all_its_ends() {
    let probe = Probe::new("tool");
    let held: Arc<Mutex<Option<ToolRuntime>>> = Arc::default();
    let last = Arc::clone(&held);
    let hooked = Hooked::new(&probe).after_deactivate(move |_| {
        let runtime = last.lock().unwrap().take();
        drop(runtime);
        std::future::ready(Ok(()))
    });
    let runtime = ToolRuntime::builder().tool(hooked).build().await.unwrap();
    let (plan, ear) = (runtime.begin(PlanOptions::new()).unwrap(), Ear::of_all(&runtime));
    let other = runtime.begin(PlanOptions::new()).unwrap();
    plan.activate("tool").await.unwrap();
    *held.lock().unwrap() = Some(runtime);
    drop(plan);
    let mut ended: Vec<_> =
        ear.rest().await.iter().map(text).filter(|text| text.starts_with("ended")).collect();
    ended.sort();
    assert_eq!(ended, ["ended Dropped", "ended ShutDown"]);
    drop(other);
    probe.assert_balanced();
}

#[tokio::test(start_paused = true)]
async fn the_end_comes_after_a_call_that_it_cuts() {
    let probe = Probe::new("tool").on_execute(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let (ear, mut of_all) = (Ear::of(&plan), Ear::of_all(&fixture));
    let mut calls = JoinSet::new();
    calls.spawn(call(&plan, "tool"));
    until(|| probe.counts().executions == 1).await;
    plan.finish().await;
    assert!(calls.join_next().await.unwrap().unwrap().is_err());
    let told = [
        "local/tool activating 1.1",
        "local/tool active 1",
        "1 local/tool executing",
        "1 local/tool finished plan_ended",
        "local/tool deactivated 1 Ok",
        "ended Finished",
    ];
    let mut heard = texts(&ear.rest().await);
    heard.sort_by_key(|text| told.iter().position(|known| known == text));
    assert_eq!(heard, told, "in whatever order the middle of it came");
    assert_eq!(of_all.told().last().unwrap(), "ended Finished");
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_that_nobody_polls_does_not_keep_the_end_from_being_told() {
    let probe = Probe::new("tool").on_execute(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let (ear, mut of_all) = (Ear::of(&plan), Ear::of_all(&fixture));
    let mut parked = task::spawn(call(&plan, "tool"));
    assert_pending!(parked.poll());
    plan.finish().await;
    assert_eq!(texts(&ear.rest().await).last().unwrap(), "ended Finished");
    assert_eq!(of_all.told().last().unwrap(), "ended Finished");
    assert!(assert_ready!(parked.poll()).is_err());
    assert_eq!(of_all.told(), ["1 local/tool finished plan_ended"]);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn progress_of_a_call_that_is_over_is_not_told() {
    let kept: Arc<Mutex<Option<ToolExecutionContext>>> = Arc::default();
    let keeps = Arc::clone(&kept);
    let tool = ToolSpec::new("keeps").read_only().handler(move |ctx, (): ()| {
        *keeps.lock().unwrap() = Some(ctx);
        std::future::ready(Ok(()))
    });
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let (plan, mut of_all) = (fixture.plan(), Ear::of_all(&fixture));
    call(&plan, "keeps").await.unwrap();
    let ctx = kept.lock().unwrap().take().unwrap();
    ctx.progress(Progress::new(1.0));
    plan.finish().await;
    ctx.progress(Progress::new(2.0));
    let told = ["1 local/keeps executing", "1 local/keeps finished ok", "ended Finished"];
    assert_eq!(of_all.told(), told);
    drop(ctx);
    fixture.end().await;
}

/// Active is told before anybody can retire the instance: a subscriber that is slow at that very
/// moment holds up whoever told it, and meanwhile the plan is to end.
#[tokio::test]
async fn an_instance_is_told_as_active_before_it_is_told_as_deactivated() {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").on_activate(Step::Until(latch.clone()));
    let fixture = Fixture::new(&[&probe]).await;
    let plan = fixture.plan();
    let (blocker, mut of_all) = (Blocker::default(), Ear::of_all(&fixture));
    let blocks = blocker.clone();
    let _listener = Listener::new(plan.subscribe(), move |event| {
        if matches!(event.kind, EventKind::Active { .. }) {
            blocks.block();
        }
    });
    let mut asking = task::spawn(call(&plan, "tool"));
    assert_pending!(asking.poll());
    drop(asking);
    latch.cancel();
    until(|| blocker.is_blocking()).await;
    let mut finish = task::spawn(plan.finish());
    let finished = finish.poll();
    blocker.release();
    if finished.is_pending() {
        within(finish).await;
    }
    until(|| probe.counts().deactivations == 1).await;
    let mut heard = Vec::new();
    until_heard(&mut of_all, &mut heard, 5).await;
    let told = [
        "local/tool activating 1.1",
        "1 local/tool finished abandoned",
        "local/tool active 1",
        "local/tool deactivated 1 Ok",
        "ended Finished",
    ];
    assert_eq!(heard, told);
    fixture.end().await;
}

/// The end is told after every deactivation: a subscriber that is slow at the first of two holds up
/// whoever told it, and meanwhile the second one is over.
#[tokio::test]
async fn the_end_is_told_after_every_deactivation() {
    let (one, two) = (Probe::new("one"), Probe::new("two"));
    let fixture = Fixture::new(&[&one, &two]).await;
    let plan = fixture.plan();
    plan.activate("one").await.unwrap();
    plan.activate("two").await.unwrap();
    let (blocker, mut of_all) = (Blocker::default(), Ear::of_all(&fixture));
    let blocks = blocker.clone();
    let _listener = Listener::new(plan.subscribe(), move |event| {
        if event.name.as_deref() == Some("local/one") {
            blocks.block();
        }
    });
    let handle = plan.handle();
    let by_hand = std::thread::spawn(move || block_on(handle.deactivate("one")));
    until(|| blocker.is_blocking()).await;
    let mut finish = task::spawn(plan.finish());
    let finished = finish.poll();
    blocker.release();
    if finished.is_pending() {
        within(finish).await;
    }
    assert!(by_hand.join().unwrap());
    let mut heard = Vec::new();
    until_heard(&mut of_all, &mut heard, 3).await;
    assert_eq!(heard.last().unwrap(), "ended Finished", "{heard:?}");
    fixture.end().await;
}

/// Waits until so many events were heard.
async fn until_heard(ear: &mut Ear, heard: &mut Vec<String>, count: usize) {
    while heard.len() < count {
        heard.push(text(&within(ear.0.next()).await.unwrap()));
    }
}

// ===== every way to end =====

#[derive(Clone, Copy, Debug)]
enum Way {
    Finish,
    Fail,
    Cancel,
    CancelById,
    Token,
    Deadline,
    Drop,
    Panic,
    FinishNeverPolled,
    FinishDropped,
    RunReturns,
    TryRunFails,
    RunPanics,
    RunDropped,
    ParentFinishes,
    ParentIsCancelled,
    Shutdown,
    LeakedThenShutdown,
    TaskAborted,
}

impl Way {
    const ALL: [(Self, EndReason); 19] = [
        (Self::Finish, EndReason::Finished),
        (Self::Fail, EndReason::Failed),
        (Self::Cancel, EndReason::Cancelled),
        (Self::CancelById, EndReason::Cancelled),
        (Self::Token, EndReason::Cancelled),
        (Self::Deadline, EndReason::DeadlinePassed),
        (Self::Drop, EndReason::Dropped),
        (Self::Panic, EndReason::Panicked),
        (Self::FinishNeverPolled, EndReason::Dropped),
        (Self::FinishDropped, EndReason::Finished),
        (Self::RunReturns, EndReason::Finished),
        (Self::TryRunFails, EndReason::Failed),
        (Self::RunPanics, EndReason::Panicked),
        (Self::RunDropped, EndReason::Dropped),
        (Self::ParentFinishes, EndReason::ParentEnded),
        (Self::ParentIsCancelled, EndReason::Cancelled),
        (Self::Shutdown, EndReason::ShutDown),
        (Self::LeakedThenShutdown, EndReason::ShutDown),
        (Self::TaskAborted, EndReason::Dropped),
    ];

    /// Begins a plan, calls the tool, listens, and ends it that way.
    async fn end(self, fixture: &Fixture) -> Ear {
        match self {
            Self::RunReturns | Self::TryRunFails | Self::RunPanics | Self::RunDropped => {
                self.end_run(fixture).await
            }
            _ => self.end_plan(fixture).await,
        }
    }

    async fn end_run(self, fixture: &Fixture) -> Ear {
        let ear = Mutex::new(None);
        let body = async |plan: PlanHandle| {
            call(&plan, "tool").await.unwrap();
            *ear.lock().unwrap() = Some(Ear::of(&plan));
            match self {
                Self::RunPanics => panic!("the body panics"),
                Self::RunDropped => std::future::pending().await,
                _ => Err::<(), _>("it failed"),
            }
        };
        match self {
            Self::TryRunFails => drop(fixture.try_run(PlanOptions::new(), body).await.unwrap()),
            Self::RunDropped => {
                let mut run = task::spawn(fixture.run(PlanOptions::new(), body));
                assert_pending!(run.poll());
            }
            _ => {
                let run = AssertUnwindSafe(fixture.run(PlanOptions::new(), body));
                let panicked = FutureExt::catch_unwind(run).await.is_err();
                assert_eq!(panicked, matches!(self, Self::RunPanics));
            }
        }
        ear.into_inner().unwrap().unwrap()
    }

    async fn end_plan(self, fixture: &Fixture) -> Ear {
        let (token, mut options) = (CancellationToken::new(), PlanOptions::new());
        options = match self {
            Self::Token => options.token(token.clone()),
            Self::Deadline => options.deadline(SECOND),
            _ => options,
        };
        let mut above = None;
        let plan = match self {
            Self::ParentFinishes | Self::ParentIsCancelled => {
                above.insert(fixture.plan()).begin_child(options).unwrap()
            }
            _ => fixture.begin(options).unwrap(),
        };
        call(&plan, "tool").await.unwrap();
        let ear = Ear::of(&plan);
        match self {
            Self::Finish => drop(plan.finish().await),
            Self::Fail => drop(plan.fail().await),
            Self::Cancel => plan.cancel(),
            Self::CancelById => assert!(fixture.handle().cancel(plan.id())),
            Self::Token => {
                token.cancel();
                within(plan.ended()).await;
            }
            Self::Deadline => plan.ended().await,
            Self::Panic => {
                let panics = tokio::spawn(async move {
                    let _plan = plan;
                    panic!("the caller panics");
                });
                assert!(panics.await.is_err());
            }
            Self::FinishNeverPolled => drop(plan.finish()),
            // Whether it is ready by then is all the same.
            Self::FinishDropped => drop(task::spawn(plan.finish()).poll()),
            Self::ParentFinishes => drop(above.take().unwrap().finish().await),
            Self::ParentIsCancelled => above.take().unwrap().cancel(),
            Self::Shutdown => drop(fixture.shutdown(20 * SECOND).await),
            Self::LeakedThenShutdown => {
                leak(plan);
                fixture.shutdown(20 * SECOND).await;
            }
            Self::TaskAborted => {
                let holds = tokio::spawn(async move {
                    let _plan = plan;
                    std::future::pending::<()>().await;
                });
                tokio::task::yield_now().await;
                holds.abort();
                assert!(holds.await.is_err());
            }
            _ => drop(plan),
        }
        ear
    }
}

#[expect(clippy::mem_forget, reason = "to leak a plan is what is tested")]
fn leak(plan: Plan) {
    std::mem::forget(plan);
}

#[tokio::test(start_paused = true)]
async fn every_way_to_end_is_told_once_with_its_reason_and_as_the_last() {
    for (way, reason) in Way::ALL {
        let probe = Probe::new("tool");
        let fixture = Fixture::paused(&[&probe]).await;
        let ear = way.end(&fixture).await;
        let heard = texts(&ear.rest().await);
        let expected = ["local/tool deactivated 1 Ok".to_owned(), format!("ended {reason:?}")];
        assert_eq!(heard, expected, "{way:?}");
        fixture.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_second_end_is_not_told() {
    let probe = Probe::new("tool");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let (handle, mut of_all) = (plan.handle(), Ear::of_all(&fixture));
    plan.cancel();
    handle.cancel();
    plan.finish().await;
    handle.cancel();
    assert_eq!(of_all.told(), ["ended Cancelled"]);
    fixture.end().await;
}

// ===== subscribers =====

/// An immediate tool that tells its progress so often.
fn chatty(times: u32) -> toolscope::FunctionTool {
    ToolSpec::new("chatty").read_only().handler(move |ctx, (): ()| {
        for step in 0..times {
            ctx.progress(Progress::new(f64::from(step)));
        }
        std::future::ready(Ok(()))
    })
}

#[tokio::test(start_paused = true)]
async fn a_subscriber_that_never_reads_loses_the_oldest_and_is_told_how_many() {
    let fixture = Fixture::with(paused().tool(chatty(100_000)), &[]).await;
    let plan = fixture.plan();
    let (mut of_the_plan, mut of_all) = (Ear::of(&plan), Ear::of_all(&fixture));
    // Ready at once: nothing waited for them.
    assert_ready!(task::spawn(call(&plan, "chatty")).poll()).unwrap();
    for (ear, kept) in [(&mut of_the_plan, 256), (&mut of_all, 4096)] {
        let told = ear.told();
        assert_eq!(told.len(), kept + 1);
        assert_eq!(told[0], format!("lost {}", 100_002 - kept));
        assert_eq!(told[1], format!("1 local/chatty progress {}", 100_002 - kept - 1));
        assert_eq!(told[kept], "1 local/chatty finished ok");
    }
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_subscriber_that_is_one_too_slow_loses_one() {
    let fixture = Fixture::with(paused().tool(chatty(255)), &[]).await;
    let plan = fixture.plan();
    let mut ear = Ear::of(&plan);
    call(&plan, "chatty").await.unwrap();
    let told = ear.told();
    assert_eq!((told.len(), told[0].as_str()), (257, "lost 1"));
    // It has caught up, and loses nothing more.
    call(&plan, "nobody").await.unwrap_err();
    assert_eq!(ear.told(), ["2 nobody finished not_found"]);
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_a_subscriber_of_a_plan_lost_is_told_under_that_plan() {
    let fixture = Fixture::with(paused().tool(chatty(300)), &[]).await;
    let (other, plan) = (fixture.plan(), fixture.plan());
    let mut ear = Ear::of(&plan);
    call(&plan, "chatty").await.unwrap();
    let heard = ear.hear();
    assert!(heard.iter().all(|event| event.plan_id == plan.id()), "{:?}", heard[0]);
    drop((plan, other));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_last_events_of_a_plan_reach_a_subscriber_that_reads_them_late() {
    let fixture = Fixture::with(paused().tool(chatty(1000)), &[]).await;
    let plan = fixture.plan();
    let ear = Ear::of(&plan);
    call(&plan, "chatty").await.unwrap();
    plan.finish().await;
    let stats = fixture.end().await;
    let heard = texts(&ear.rest().await);
    assert_eq!(heard.len(), 257);
    assert_eq!(heard[255..], ["1 local/chatty finished ok", "ended Finished"]);
    assert_eq!(stats.plans, 0);
}

#[tokio::test(start_paused = true)]
async fn every_subscriber_hears_all() {
    let probe = Probe::new("tool");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let mut ears: Vec<_> = (0..3).map(|_| Ear::of(&plan)).collect();
    ears.extend((0..3).map(|_| Ear::of_all(&fixture)));
    // One that is dropped half-way takes nothing from the others.
    let dropped = (Ear::of(&plan), Ear::of_all(&fixture));
    call(&plan, "tool").await.unwrap();
    drop(dropped);
    plan.finish().await;
    let told: Vec<_> = ears.iter_mut().map(Ear::told).collect();
    assert_eq!(told[0].len(), 6);
    assert!(told.iter().all(|other| *other == told[0]), "{told:?}");
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_subscriber_hears_nothing_of_what_was_before() {
    let probe = Probe::new("tool");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let first = Ear::of(&plan);
    call(&plan, "tool").await.unwrap();
    let mut late = Ear::of(&plan);
    assert_eq!(late.told(), Vec::<String>::new());
    drop(first);
    call(&plan, "nobody").await.unwrap_err();
    assert_eq!(late.told(), ["2 nobody finished not_found"]);
    drop(plan);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn next_dropped_half_way_loses_no_event() {
    let probe = Probe::new("tool").immediate();
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let mut stream = plan.subscribe();
    let expected = ["1 local/tool executing", "1 local/tool finished ok", "ended Finished"];
    // Dropped before anything came, and dropped after it was woken: nothing is lost by either.
    let mut waiting = task::spawn(stream.next());
    assert_pending!(waiting.poll());
    drop(waiting);
    let mut waiting = task::spawn(stream.next());
    assert_pending!(waiting.poll());
    call(&plan, "tool").await.unwrap();
    assert!(waiting.is_woken());
    drop(waiting);
    plan.finish().await;
    let mut heard = Vec::new();
    while let Some(event) = stream.next().await {
        heard.push(text(&event));
        drop(task::spawn(stream.next()));
    }
    assert_eq!(heard, expected);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_subscriber_that_waits_is_woken_by_the_end_of_the_stream() {
    let fixture = Fixture::paused(&[]).await;
    let plan = fixture.plan();
    let mut stream = plan.subscribe();
    let mut waiting = task::spawn(async move {
        let first = stream.next().await.map(|event| text(&event));
        (first, stream.next().await)
    });
    assert_pending!(waiting.poll());
    plan.cancel();
    assert!(waiting.is_woken());
    let (first, second) = assert_ready!(waiting.poll());
    assert_eq!((first.as_deref(), second), (Some("ended Cancelled"), None));
    drop(plan);
    fixture.end().await;
}

/// A subscriber that is called at the very place where an event is told finds no lock held there.
#[test]
fn no_event_is_told_under_a_lock() {
    let (over, is_over) = mpsc::channel();
    let work = async move {
        let line = Probe::new("line");
        let probe = Probe::new("tool").needs(&line).taints(true);
        let broken = Probe::new("broken").on_activate(Step::Err);
        let asks = Probe::new("asking").capability(asking());
        let fixture = Fixture::paused(&[&probe, &broken, &asks]).await.track(&line);
        let fixture = Arc::new(fixture);
        let options = PlanOptions::new().max_concurrent(1).permit_wait(SECOND);
        let plan = fixture.begin(options.approver(Waits(None))).unwrap();
        let child = plan.begin_child(PlanOptions::new()).unwrap();
        let heard = Arc::new(Mutex::new(HashSet::new()));
        let mut listeners = Vec::new();
        for (stream, cancels) in
            [(plan.subscribe(), true), (child.subscribe(), false), (fixture.subscribe(), false)]
        {
            let (handles, runtime) = ([plan.handle(), child.handle()], Arc::downgrade(&fixture));
            let heard = Arc::clone(&heard);
            listeners.push(Listener::new(stream, move |event| {
                for handle in &handles {
                    drop((handle.traces(), handle.changes(), handle.subscribe()));
                    assert!(handle.end_reason() != Some(EndReason::Failed));
                }
                if let Some(runtime) = runtime.upgrade() {
                    drop((
                        runtime.stats(),
                        runtime.handle().plan(event.plan_id),
                        runtime.subscribe(),
                    ));
                }
                if cancels && text(&event).ends_with("finished approval_denied") {
                    handles[0].cancel();
                }
                heard.lock().unwrap().insert(std::mem::discriminant(&event.kind));
            }));
        }
        call(&plan, "tool").await.unwrap();
        call(&child, "tool").await.unwrap();
        call(&plan, "broken").await.unwrap_err();
        call(&plan, "nobody").await.unwrap_err();
        call(&plan, "asking").await.unwrap_err();
        assert_eq!(plan.end_reason(), Some(EndReason::Cancelled));
        plan.finish().await;
        drop(child);
        Arc::into_inner(fixture).unwrap().end().await;
        drop(listeners);
        let kinds = heard.lock().unwrap().len();
        over.send(kinds).unwrap();
    };
    std::thread::spawn(move || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().start_paused(true).build().unwrap();
        runtime.block_on(work);
    });
    let kinds = is_over.recv_timeout(30 * SECOND).expect("a lock was held, or a test failed");
    assert_eq!(kinds, 8, "every kind but progress, a loss and a blocked keeper");
}

#[tokio::test(start_paused = true)]
async fn progress_that_nobody_hears_is_free_of_consequence() {
    let fixture = Fixture::with(paused().tool(chatty(1000)), &[]).await;
    let plan = fixture.plan();
    assert!(call(&plan, "chatty").await.unwrap().success);
    drop(plan.subscribe());
    assert!(call(&plan, "chatty").await.unwrap().success);
    let mut ear = Ear::of(&plan);
    assert_eq!(ear.told(), Vec::<String>::new());
    drop(plan);
    fixture.end().await;
}

// ===== as JSON =====

/// The keys of an object, as often as they stand in it.
fn keys(json: &str) -> Vec<String> {
    struct Keys(Vec<String>);
    impl<'de> serde::Deserialize<'de> for Keys {
        fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            struct Visitor;
            impl<'de> serde::de::Visitor<'de> for Visitor {
                type Value = Keys;
                fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    f.write_str("an object")
                }
                fn visit_map<A: serde::de::MapAccess<'de>>(
                    self,
                    mut map: A,
                ) -> Result<Keys, A::Error> {
                    let mut keys = Vec::new();
                    while let Some((key, serde::de::IgnoredAny)) = map.next_entry()? {
                        keys.push(key);
                    }
                    Ok(Keys(keys))
                }
            }
            deserializer.deserialize_map(Visitor)
        }
    }
    let Keys(mut keys) = serde_json::from_str(json).unwrap();
    keys.sort();
    keys
}

#[tokio::test(start_paused = true)]
async fn an_event_as_json_has_each_key_once() {
    let fixture = telling(&Probe::new("tool")).fixture(paused()).await;
    let plan = fixture.plan();
    let mut ear = Ear::of(&plan);
    plan.execute("tool", json!({})).await.unwrap();
    call(&plan, "nobody").await.unwrap_err();
    plan.finish().await;
    for event in ear.hear() {
        let json = serde_json::to_string(&event).unwrap();
        let keys = keys(&json);
        let once: HashSet<_> = keys.iter().collect();
        assert_eq!(once.len(), keys.len(), "{json}");
        assert!(json.contains(r#""event":""#) && json.contains(r#""plan_id":1"#), "{json}");
    }
    fixture.end().await;
}

// ===== events and the ledger =====

/// What a probe does at one stage, call after call.
fn steps(dice: &mut Dice, stage: u64) -> Vec<Step> {
    let step = |dice: &mut Dice| match dice.roll(20) {
        0 => Step::Err,
        1 => Step::Panic,
        2..5 => Step::Yield(2),
        5 => Step::YieldErr(1),
        6 => Step::YieldPanic(1),
        7 if stage != 2 => Step::UntilCancelled,
        _ => Step::Ok,
    };
    (0..200).map(|_| step(dice)).chain([Step::Ok]).collect()
}

/// One plan with a few calls and a way to end.
async fn some_plan(plan: Plan, mut dice: Dice) -> Vec<ToolEvent> {
    let ear = Ear::of(&plan);
    let tools = ["steady", "tainting", "needy", "moody", "nobody"];
    let mut calls = JoinSet::new();
    for _ in 0..=dice.roll(6) {
        let tool = tools[usize::try_from(dice.roll(5)).unwrap()];
        match dice.roll(6) {
            0 => drop(task::spawn(call(&plan, tool)).poll()),
            1 => drop(plan.activate(tool).await),
            2 => drop(plan.deactivate(tool).await),
            3 => drop(calls.spawn(call(&plan, tool))),
            _ => drop(call(&plan, tool).await),
        }
    }
    match dice.roll(4) {
        0 => plan.cancel(),
        1 => drop(plan),
        2 => drop(plan.fail().await),
        _ => drop(plan.finish().await),
    }
    while let Some(called) = calls.join_next().await {
        drop(called.unwrap());
    }
    ear.rest().await
}

/// Checks the law of one plan's events and gives how many are `Active` and `Deactivated`.
#[track_caller]
fn lawful(events: &[ToolEvent]) -> (u64, u64) {
    let told = texts(events);
    let ends = events.iter().filter(|event| matches!(event.kind, EventKind::Ended { .. })).count();
    assert!(ends == 1 && told.last().unwrap().starts_with("ended"), "{told:#?}");
    // By name: the generation that is active, if one is.
    let mut active: HashMap<&str, u32> = HashMap::new();
    let (mut calls, mut counts) = (HashSet::new(), (0, 0));
    for event in events {
        let name = event.name.as_deref().unwrap_or_default();
        match &event.kind {
            EventKind::Activating { .. } | EventKind::ActivationFailed { .. } => {
                assert!(!active.contains_key(name), "{name} is active twice: {told:#?}");
            }
            EventKind::Active { generation, .. } => {
                assert_eq!(active.insert(name, *generation), None, "{told:#?}");
                counts.0 += 1;
            }
            EventKind::Deactivated(record) => {
                assert_eq!(active.remove(name), Some(record.generation), "{told:#?}");
                counts.1 += 1;
            }
            EventKind::Finished(trace) => {
                assert!(calls.insert(trace.call_id), "finished twice: {told:#?}");
            }
            EventKind::Executing | EventKind::Progress(_) => {
                let call = event.call_id.unwrap();
                assert!(!calls.contains(&call), "{call} goes on after its end: {told:#?}");
            }
            EventKind::Lost { .. } => panic!("{told:#?}"),
            _ => {}
        }
    }
    assert!(active.is_empty(), "{told:#?}");
    counts
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn p16_events_agree_with_the_ledger() {
    let seed = seed();
    let mut dice = Dice::new(seed);
    let line = Probe::new("line");
    let steady = Probe::new("steady");
    let tainting = Probe::new("tainting").taints(true);
    let needy = Probe::new("needy").needs(&line);
    let moody = Probe::new("moody");
    for probe in [&moody, &needy, &line] {
        let moody = probe.clone().on_activate(steps(&mut dice, 0)).on_execute(steps(&mut dice, 1));
        drop(moody.on_deactivate(steps(&mut dice, 2)));
    }
    let deadlines = Deadlines::default().grace(SECOND / 100).activate(SECOND / 50);
    let fixture = Fixture::with(
        ToolRuntime::builder().deadlines(deadlines),
        &[&steady, &tainting, &needy, &moody],
    )
    .await
    .track(&line);
    let mut plans = JoinSet::new();
    let mut counts = (0, 0);
    for _ in 0..500 {
        let options = PlanOptions::new().call_timeout(SECOND / 100);
        let plan = fixture.begin(options).unwrap();
        plans.spawn(some_plan(plan, Dice::new(dice.roll(u64::MAX))));
        while plans.len() >= 32 {
            let (active, deactivated) = lawful(&plans.join_next().await.unwrap().unwrap());
            counts = (counts.0 + active, counts.1 + deactivated);
        }
    }
    while let Some(events) = plans.join_next().await {
        let (active, deactivated) = lawful(&events.unwrap());
        counts = (counts.0 + active, counts.1 + deactivated);
    }
    let stats = fixture.end().await;
    assert_eq!(counts, (stats.activated, stats.deactivated), "TOOLSCOPE_SEED={seed}");
}
