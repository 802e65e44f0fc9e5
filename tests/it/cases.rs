//! Public failure reports, as tests of what is right. Each names the report that it comes from.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};
use tokio::time::Instant;
use tokio_test::{assert_pending, task};
use tokio_util::sync::CancellationToken;
use toolscope::test_util::{Probe, ProbeCounts, Step};
use toolscope::{
    ActivationContext, CallOptions, Change, ChangeKind, DeactivationContext, DeactivationOutcome,
    Deadlines, EndReason, OutcomeCode, PlanOptions, RuntimeHandle, Tool, ToolCapability,
    ToolDescriptor, ToolExecutionContext, ToolFailure, ToolInstance, ToolOutput, ToolSpec,
    async_trait,
};

use crate::call::{relay, relayed};
use crate::support::{Fixture, paused};

const SECOND: Duration = Duration::from_secs(1);

/// A tool whose instances stand in front of those of a probe, which counts them.
struct Front<M>(Arc<dyn Tool>, M);

fn front<M, I>(probe: &Probe, make: M) -> Front<M>
where
    M: Fn(&ActivationContext, Arc<dyn ToolInstance>) -> I,
{
    Front(Arc::new(probe.tool()), make)
}

#[async_trait]
impl<M, I> Tool for Front<M>
where
    M: Fn(&ActivationContext, Arc<dyn ToolInstance>) -> I + Send + Sync + 'static,
    I: ToolInstance,
{
    fn descriptor(&self) -> &ToolDescriptor {
        self.0.descriptor()
    }

    async fn activate(
        &self,
        ctx: &ActivationContext,
    ) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        let behind = self.0.activate(ctx).await?;
        Ok(Arc::new((self.1)(ctx, behind)))
    }
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

// ===== who owns what, when a caller goes away =====

/// djc/bb8#59.
#[tokio::test(start_paused = true)]
async fn a_call_that_goes_away_in_the_activation_leaves_its_permit() {
    let latch = CancellationToken::new();
    let probe = Probe::new("probe").on_activate(Step::Until(latch.clone()));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_concurrent(1)).unwrap();
    let mut call = task::spawn(plan.execute("probe", json!({})));
    assert_pending!(call.poll());
    drop(call);
    latch.cancel();
    assert!(plan.execute("probe", json!({})).await.unwrap().success);
    fixture.end().await;
}

/// encode/httpcore#1093.
#[tokio::test(start_paused = true)]
async fn an_activation_whose_caller_went_away_has_an_owner() {
    let latch = CancellationToken::new();
    let probe = Probe::new("probe").on_activate(Step::Until(latch.clone()));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let mut call = task::spawn(plan.execute("probe", json!({})));
    assert_pending!(call.poll());
    drop(call);
    latch.cancel();
    let report = plan.finish().await;
    assert_eq!(report.unsettled(), [""; 0]);
    let counts = probe.counts();
    assert_eq!((counts.activated, counts.deactivations), (1, 1));
    fixture.end().await;
}

/// openai/codex#46402.
#[tokio::test(start_paused = true)]
async fn the_second_caller_gets_the_tool_that_the_first_one_cancelled() {
    let latch = CancellationToken::new();
    let probe = Probe::new("probe").on_activate(Step::Until(latch.clone()));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let token = CancellationToken::new();
    let options = CallOptions::new().token(token.clone());
    let mut first = task::spawn(plan.execute_with("probe", json!({}), options));
    assert_pending!(first.poll());
    let mut second = task::spawn(plan.execute("probe", json!({})));
    assert_pending!(second.poll());
    token.cancel();
    assert_eq!(first.await.unwrap_err().code(), OutcomeCode::Cancelled);
    latch.cancel();
    assert!(second.await.unwrap().success);
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

/// meshtastic/Meshtastic-Android PR#6658.
#[tokio::test(start_paused = true)]
async fn an_activation_that_ends_as_its_caller_times_out_is_not_lost() {
    let probe = Probe::new("probe").on_activate(Step::Slow(SECOND));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let call = plan.execute("probe", json!({}));
    // Either may win; the instance is there both ways.
    drop(tokio::time::timeout(SECOND, call).await);
    assert!(plan.execute("probe", json!({})).await.unwrap().success);
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

/// tokio-rs/tokio#4496.
#[tokio::test(start_paused = true)]
async fn callers_that_time_out_do_not_repeat_the_activation() {
    let probe = Probe::new("probe").on_activate(Step::Slow(20 * SECOND));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    for _ in 0..10 {
        let options = CallOptions::new().timeout(SECOND);
        let error = plan.execute_with("probe", json!({}), options).await;
        assert_eq!(error.unwrap_err().code(), OutcomeCode::ActivationTimeout);
    }
    assert!(plan.execute("probe", json!({})).await.unwrap().success);
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

/// containerd/containerd#7496.
#[tokio::test(start_paused = true)]
async fn a_retry_after_a_timeout_finds_what_went_on_meanwhile() {
    let latch = CancellationToken::new();
    let probe = Probe::new("probe").on_activate(Step::Until(latch.clone()));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().call_timeout(SECOND)).unwrap();
    assert!(plan.execute("probe", json!({})).await.is_err());
    latch.cancel();
    assert!(plan.execute("probe", json!({})).await.unwrap().success);
    let counts = probe.counts();
    assert_eq!((counts.activations, counts.half_done), (1, 0));
    fixture.end().await;
}

/// moka-rs/moka#59.
#[tokio::test(start_paused = true)]
async fn an_aborted_caller_leaves_the_tool_usable() {
    let latch = CancellationToken::new();
    let probe = Probe::new("probe").on_activate(Step::Until(latch.clone()));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let handle = plan.handle();
    let first = tokio::spawn(async move { handle.execute("probe", json!({})).await });
    tokio::task::yield_now().await;
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    latch.cancel();
    assert!(plan.execute("probe", json!({})).await.unwrap().success);
    assert_eq!(probe.counts().activations, 1);
    fixture.end().await;
}

/// moka-rs/moka#240.
#[tokio::test(start_paused = true)]
async fn a_caller_that_is_never_polled_again_stalls_nobody() {
    let latch = CancellationToken::new();
    let probe = Probe::new("probe").on_activate(Step::Until(latch.clone()));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let mut sleeper = task::spawn(plan.execute("probe", json!({})));
    assert_pending!(sleeper.poll());
    latch.cancel();
    assert!(plan.execute("probe", json!({})).await.unwrap().success);
    drop(sleeper);
    fixture.end().await;
}

/// pydantic/pydantic-ai#8548.
#[tokio::test(start_paused = true)]
async fn an_outer_cancel_does_not_cut_the_deactivation() {
    let latch = CancellationToken::new();
    let probe =
        Probe::new("probe").on_execute(Step::Never).on_deactivate(Step::Until(latch.clone()));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let agent = tokio::spawn(async move { plan.execute("probe", json!({})).await });
    tokio::task::yield_now().await;
    assert_eq!(probe.counts().executions, 1);
    agent.abort();
    assert!(agent.await.unwrap_err().is_cancelled());
    latch.cancel();
    let stats = fixture.end().await;
    assert_eq!((stats.deactivated, stats.troubled), (1, 0));
}

// ===== an instance in an unknown state =====

/// transact-rs/sqlx#4393, zeroclaw's connection guard.
#[tokio::test(start_paused = true)]
async fn an_instance_left_in_the_middle_of_its_work_is_replaced() {
    let probe = Probe::new("probe").taints(true).on_execute([Step::Never, Step::Ok]);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let mut call = task::spawn(plan.execute("probe", json!({})));
    assert_pending!(call.poll());
    drop(call);
    assert_eq!(plan.traces()[0].outcome, OutcomeCode::Abandoned);
    assert!(plan.execute("probe", json!({})).await.unwrap().success);
    assert_eq!(probe.counts().activated, 2);
    fixture.end().await;
}

/// A connection on which answers come in the order of the questions.
struct Pipe {
    behind: Arc<dyn ToolInstance>,
    answers: Mutex<VecDeque<Value>>,
}

/// Between question and answer; to go away here spoils the connection.
struct Unread<'a>(Option<&'a ToolExecutionContext>);

impl Drop for Unread<'_> {
    fn drop(&mut self) {
        if let Some(ctx) = self.0 {
            ctx.taint("an answer was not read");
        }
    }
}

#[async_trait]
impl ToolInstance for Pipe {
    async fn execute(
        &self,
        ctx: &ToolExecutionContext,
        input: &Value,
    ) -> Result<ToolOutput, ToolFailure> {
        self.answers.lock().unwrap().push_back(input.clone());
        let mut unread = Unread(Some(ctx));
        self.behind.execute(ctx, input).await?;
        unread.0 = None;
        let answer = self.answers.lock().unwrap().pop_front();
        Ok(ToolOutput::new(answer.unwrap_or_default()))
    }

    async fn deactivate(&self, ctx: &DeactivationContext) -> Result<(), ToolFailure> {
        self.behind.deactivate(ctx).await
    }
}

/// redis/redis-py#2624 and #2665.
#[tokio::test(start_paused = true)]
async fn nobody_reads_the_answer_to_a_cancelled_question() {
    let probe = Probe::new("pipe").on_execute([Step::Never, Step::Ok]);
    let pipe = front(&probe, |_, behind| Pipe { behind, answers: Mutex::default() });
    let fixture = Fixture::with(paused().tool(pipe), &[]).await.track(&probe);
    let plan = fixture.plan();
    let mut call = task::spawn(plan.execute("pipe", json!({"secret": "of another"})));
    assert_pending!(call.poll());
    drop(call);
    let input = json!({"question": 2});
    let result = plan.execute("pipe", &input).await.unwrap();
    assert_eq!(result.output, input);
    assert_eq!(probe.counts().activated, 2);
    fixture.end().await;
}

/// QwenLM/qwen-code#3817, NorthlandPositronics/Cogtrix#427.
#[tokio::test(start_paused = true)]
async fn two_calls_that_find_a_broken_instance_make_one_new_one() {
    let probe = Probe::new("probe").taints(true);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    assert!(plan.execute("probe", json!({})).await.unwrap().success);
    let probe = probe.taints(false).on_activate(Step::Yield(3));
    let (one, other) =
        tokio::join!(plan.execute("probe", json!({})), plan.execute("probe", json!({})));
    assert!(one.unwrap().success && other.unwrap().success);
    assert_eq!(probe.counts().activations, 2);
    fixture.end().await;
}

/// mastra-ai/mastra PR#24502.
#[tokio::test(start_paused = true)]
async fn a_failed_activation_undoes_all_that_it_did() {
    struct HalfWay(ToolDescriptor, Arc<Mutex<Vec<&'static str>>>);

    #[async_trait]
    impl Tool for HalfWay {
        fn descriptor(&self) -> &ToolDescriptor {
            &self.0
        }

        async fn activate(
            &self,
            ctx: &ActivationContext,
        ) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
            for step in ["process started", "exit hook added"] {
                let undone = Arc::clone(&self.1);
                ctx.defer(async move || undone.lock().unwrap().push(step));
            }
            Err(ToolFailure::failed("no connection"))
        }
    }

    let undone = Arc::default();
    let descriptor = ToolDescriptor::new("half-way".parse().unwrap());
    let tool = HalfWay(descriptor, Arc::clone(&undone));
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let plan = fixture.plan();
    assert!(plan.execute("half-way", json!({})).await.is_err());
    assert_eq!(*undone.lock().unwrap(), ["exit hook added", "process started"]);
    fixture.end().await;
}

// ===== released once =====

/// sidorares/node-mysql2#1280.
#[tokio::test(start_paused = true)]
async fn what_is_released_twice_is_released_once() {
    let probe = Probe::new("probe").on_deactivate(Step::Yield(3));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    plan.activate("probe").await.unwrap();
    let released = tokio::join!(plan.deactivate("probe"), plan.deactivate("probe"));
    assert_eq!(released, (true, false));
    plan.cancel();
    plan.cancel();
    let report = plan.finish().await;
    assert_eq!(report.reason(), EndReason::Cancelled);
    assert_eq!(report.deactivations().len(), 1);
    fixture.end().await;
}

/// CherryHQ/cherry-studio#18144.
#[tokio::test(start_paused = true)]
async fn what_leaves_its_slot_is_closed() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    for generation in 1..=3 {
        plan.activate("probe").await.unwrap();
        assert!(plan.deactivate("probe").await);
        let counts = probe.counts();
        assert_eq!((counts.activated, counts.deactivations), (generation, generation));
    }
    fixture.end().await;
}

/// temporalio/sdk-rust#1537.
#[tokio::test(start_paused = true)]
async fn a_plan_is_on_the_books_until_it_has_settled() {
    let latch = CancellationToken::new();
    let probe = Probe::new("probe").on_deactivate(Step::Until(latch.clone()));
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    plan.activate("probe").await.unwrap();
    drop(plan);
    let mut shutdown = task::spawn(fixture.shutdown(60 * SECOND));
    assert_pending!(shutdown.poll());
    assert_eq!((fixture.stats().plans, fixture.stats().open), (1, 1));
    latch.cancel();
    assert!(shutdown.await.stragglers.is_empty());
    fixture.end().await;
}

// ===== an end that is bounded =====

/// kubernetes/kubernetes#115817.
#[tokio::test(start_paused = true)]
async fn all_that_hangs_at_the_end_shares_one_budget() {
    let hanging = |name| Probe::new(name).on_deactivate(Step::Never);
    let (one, other) = (hanging("one"), hanging("other"));
    let stubborn = hanging("stubborn").on_execute(Step::Never);
    let fixture = Fixture::paused(&[&one, &other, &stubborn]).await;
    let deadlines = Deadlines::default().end(5 * SECOND);
    let options = PlanOptions::new().deadlines(deadlines);
    let plan = fixture.begin(options).unwrap();
    plan.activate("one").await.unwrap();
    plan.activate("other").await.unwrap();
    let handle = plan.handle();
    let mut call = task::spawn(handle.execute("stubborn", json!({})));
    assert_pending!(call.poll());
    let began = Instant::now();
    let (report, returned) = tokio::join!(plan.finish(), call);
    assert_eq!(began.elapsed().as_secs(), 5);
    assert_eq!(returned.unwrap_err().code(), OutcomeCode::PlanEnded);
    assert_eq!(report.errors().len(), 3);
    fixture.end().await;
}

/// kubernetes/kubernetes#127339.
#[tokio::test(start_paused = true)]
async fn a_deactivation_that_never_returns_is_given_up() {
    let probe = Probe::new("probe").on_deactivate(Step::Never);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    plan.activate("probe").await.unwrap();
    let report = plan.finish().await;
    let [record] = report.deactivations().try_into().unwrap();
    assert_eq!(record.outcome, DeactivationOutcome::TimedOut);
    assert_eq!(report.unsettled(), [""; 0]);
    fixture.end().await;
}

/// google/adk-js#377.
#[tokio::test(start_paused = true)]
async fn a_deactivation_that_goes_wrong_does_not_stop_the_others() {
    let fails = Probe::new("fails").on_deactivate(Step::Err);
    let panics = Probe::new("panics").on_deactivate(Step::Panic);
    let hangs = Probe::new("hangs").on_deactivate(Step::Never);
    let works = Probe::new("works");
    let probes = [&fails, &panics, &hangs, &works];
    let fixture = Fixture::paused(&probes).await;
    let plan = fixture.plan();
    for name in ["fails", "panics", "hangs", "works"] {
        plan.activate(name).await.unwrap();
    }
    let report = plan.finish().await;
    assert!(probes.iter().all(|probe| probe.counts().deactivations == 1));
    let outcome = |name: &str| {
        let records = report.deactivations();
        let record = records.into_iter().find(|record| record.name == name);
        record.unwrap().outcome
    };
    assert!(matches!(outcome("local/fails"), DeactivationOutcome::Failed(_)));
    assert!(matches!(outcome("local/panics"), DeactivationOutcome::Panicked(_)));
    assert_eq!(outcome("local/hangs"), DeactivationOutcome::TimedOut);
    assert_eq!(outcome("local/works"), DeactivationOutcome::Ok);
    fixture.end().await;
}

/// An instance whose clean-up is of a test's own.
struct CleansUp<F> {
    behind: Arc<dyn ToolInstance>,
    clean_up: F,
}

#[async_trait]
impl<F, Fut> ToolInstance for CleansUp<F>
where
    F: Fn() -> Fut + Send + Sync + 'static,
    Fut: Future<Output = ()> + Send,
{
    async fn execute(
        &self,
        ctx: &ToolExecutionContext,
        input: &Value,
    ) -> Result<ToolOutput, ToolFailure> {
        self.behind.execute(ctx, input).await
    }

    async fn deactivate(&self, ctx: &DeactivationContext) -> Result<(), ToolFailure> {
        (self.clean_up)().await;
        self.behind.deactivate(ctx).await
    }
}

/// tokio-rs/tokio#5338.
#[tokio::test]
async fn a_blocked_thread_does_not_hold_the_shutdown_beyond_its_deadline() {
    let (unblock, blocked) = mpsc::channel::<()>();
    let blocked = Arc::new(Mutex::new(blocked));
    let probe = Probe::new("probe");
    let tool = front(&probe, move |_, behind| {
        let blocked = Arc::clone(&blocked);
        let clean_up = move || {
            // An error means that the test is over.
            blocked.lock().unwrap().recv().unwrap_or_default();
            std::future::ready(())
        };
        CleansUp { behind, clean_up }
    });
    let builder = toolscope::ToolRuntime::builder().tool(tool);
    let fixture = Fixture::with(builder, &[]).await.track(&probe);
    let plan = fixture.plan();
    plan.activate("probe").await.unwrap();
    drop(plan);
    let report = fixture.shutdown(Duration::from_millis(50)).await;
    assert_eq!(report.stragglers.len(), 1);
    drop(unblock);
    fixture.end().await;
}

/// tokio-rs/tokio#7499.
#[test]
fn clean_up_may_use_blocking_threads_while_the_runtime_is_dropped() {
    let done = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&done);
    let probe = Probe::new("probe");
    let tool = front(&probe, move |_, behind| {
        let told = Arc::clone(&told);
        let clean_up = move || {
            let told = Arc::clone(&told);
            let flush = move || told.store(true, SeqCst);
            async { tokio::task::spawn_blocking(flush).await.unwrap() }
        };
        CleansUp { behind, clean_up }
    });
    let caller = runtime();
    let (fixture, plan) = caller.block_on(async {
        let builder = toolscope::ToolRuntime::builder().tool(tool);
        let fixture = Fixture::with(builder, &[]).await.track(&probe);
        let plan = fixture.plan();
        plan.activate("probe").await.unwrap();
        (fixture, plan)
    });
    fixture.end_by_drop();
    assert!(done.load(SeqCst));
    drop(plan);
}

/// bug-ops/zeph#2693.
#[test]
fn clean_up_is_no_task_of_the_runtime_that_ends() {
    let probe = Probe::new("probe").on_deactivate(Step::Yield(10));
    let caller = runtime();
    let fixture = caller.block_on(Fixture::new(&[&probe]));
    let plan = fixture.plan();
    caller.block_on(plan.activate("probe")).unwrap();
    // The last thing that happens on the caller's runtime is the drop of the plan.
    caller.block_on(async move { drop(plan) });
    drop(caller);
    fixture.end_by_drop();
    assert_eq!(probe.counts().deactivations, 1);
}

/// modelcontextprotocol/python-sdk#79 and #577.
#[test]
fn plans_end_on_any_thread_and_in_any_order() {
    let probe = Probe::new("probe");
    let fixture = runtime().block_on(Fixture::new(&[&probe]));
    let (first, second) = (fixture.plan(), fixture.plan());
    let both = async {
        first.activate("probe").await.unwrap();
        second.activate("probe").await.unwrap();
    };
    runtime().block_on(both);
    let finished = std::thread::spawn(move || runtime().block_on(first.finish()));
    assert_eq!(finished.join().unwrap().errors().len(), 0);
    let finished = std::thread::spawn(move || runtime().block_on(second.finish()));
    assert_eq!(finished.join().unwrap().errors().len(), 0);
    assert_eq!(probe.counts().deactivations, 2);
    fixture.end_by_drop();
}

/// succinctlabs/sp1 PR#2921 and PR#2796.
#[test]
fn a_plan_can_be_dropped_where_there_is_no_tokio() {
    let probe = Probe::new("probe");
    let caller = runtime();
    let fixture = caller.block_on(Fixture::new(&[&probe]));
    let plan = fixture.plan();
    caller.block_on(plan.activate("probe")).unwrap();
    drop(caller);
    std::thread::spawn(move || drop(plan)).join().unwrap();
    fixture.end_by_drop();
    assert_eq!(probe.counts().deactivations, 1);
}

// ===== locks =====

/// An instance that asks its runtime about plans at every stage.
struct Curious {
    behind: Arc<dyn ToolInstance>,
    runtime: RuntimeHandle,
}

fn look_round(runtime: &RuntimeHandle) {
    let plan = runtime.begin(PlanOptions::new());
    let found = plan.as_ref().ok().and_then(|plan| runtime.plan(plan.id()));
    assert_eq!(found.is_some(), plan.is_ok());
}

#[async_trait]
impl ToolInstance for Curious {
    async fn execute(
        &self,
        ctx: &ToolExecutionContext,
        input: &Value,
    ) -> Result<ToolOutput, ToolFailure> {
        look_round(&self.runtime);
        self.behind.execute(ctx, input).await
    }

    async fn deactivate(&self, ctx: &DeactivationContext) -> Result<(), ToolFailure> {
        look_round(&self.runtime);
        self.behind.deactivate(ctx).await
    }
}

/// xacrimon/dashmap#79, worldcoin/iris-mpc#959, pubky/pkdns PR#51.
#[tokio::test(start_paused = true)]
async fn tools_may_look_up_and_begin_plans_at_every_stage() {
    let probe = Probe::new("probe");
    let given = Arc::new(OnceLock::<RuntimeHandle>::new());
    let curious = front(&probe, {
        let given = Arc::clone(&given);
        move |_ctx, behind| {
            let runtime = given.get().unwrap().clone();
            look_round(&runtime);
            Curious { behind, runtime }
        }
    });
    let builder = paused().tool(curious);
    let fixture = Fixture::with(builder, &[]).await.track(&probe);
    given.set(fixture.handle()).unwrap();
    let plan = fixture.plan();
    assert!(plan.execute("probe", json!({})).await.unwrap().success);
    assert_eq!(fixture.stats().plans, 1);
    assert_eq!(plan.finish().await.errors().len(), 0);
    let stats = fixture.end().await;
    assert_eq!(stats.troubled, 0);
}

// ===== nesting and limits =====

/// homeassistant-ai/ha-mcp PR#2369.
#[tokio::test(start_paused = true)]
async fn a_parent_that_holds_the_only_permit_can_call_another_tool() {
    let probe = Probe::new("probe").max_concurrent(1);
    let fixture = Fixture::with(paused().tool(relay("relay")), &[&probe]).await;
    let plan = fixture.begin(PlanOptions::new().max_concurrent(1)).unwrap();
    let call = plan.execute("relay", relayed("probe"));
    let result = tokio::time::timeout(SECOND, call).await.unwrap().unwrap();
    assert!(result.success, "{result:?}");
    fixture.end().await;
}

/// vercel/ai: a tool that ignores its abort signal.
#[tokio::test(start_paused = true)]
async fn a_tool_that_ignores_the_cancel_gives_its_permit_back_after_the_grace() {
    let probe = Probe::new("probe").on_execute([Step::Never, Step::Ok]).max_concurrent(1);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    let token = CancellationToken::new();
    let options = CallOptions::new().token(token.clone());
    let mut call = task::spawn(plan.execute_with("probe", json!({}), options));
    assert_pending!(call.poll());
    token.cancel();
    assert!(call.await.is_err());
    assert!(plan.execute("probe", json!({})).await.unwrap().success);
    fixture.end().await;
}

/// opencode#26514.
#[tokio::test(start_paused = true)]
async fn an_agent_that_is_a_tool_writes_nothing_in_a_read_only_plan() {
    let writer = Probe::new("writer");
    let agent = ToolSpec::new("agent").read_only().handler(async |ctx, _: Value| {
        let child = ctx.begin_child(PlanOptions::new())?;
        let result = child.execute("relay", relayed("writer")).await?;
        child.finish().await;
        Ok(result.code().to_owned())
    });
    let builder = paused().tool(agent).tool(relay("relay"));
    let fixture = Fixture::with(builder, &[&writer]).await;
    let plan = fixture.begin(PlanOptions::new().read_only()).unwrap();
    let result = plan.execute("agent", json!({})).await.unwrap();
    assert_eq!(result.output, json!("access_denied"));
    assert_eq!(writer.counts(), ProbeCounts::default());
    fixture.end().await;
}

// ===== plans beside each other =====

/// openai/openai-agents PR#5123.
#[tokio::test(start_paused = true)]
async fn calls_of_two_plans_with_one_number_do_not_mix() {
    let tool = ToolSpec::new("patient").handler(async |ctx, _: Value| {
        ctx.record_change(Change::new(ChangeKind::Other, ctx.plan_id().to_string()));
        ctx.cancelled().await;
        Ok(ctx.call_id())
    });
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let (one, other) = (fixture.plan(), fixture.plan());
    let token = CancellationToken::new();
    let options = CallOptions::new().token(token.clone());
    let mut first = task::spawn(one.execute_with("patient", json!({}), options));
    assert_pending!(first.poll());
    let mut second = task::spawn(other.execute("patient", json!({})));
    assert_pending!(second.poll());
    token.cancel();
    assert_eq!(first.await.unwrap().output, json!(1));
    assert_pending!(second.poll());
    for plan in [&one, &other] {
        let [recorded] = plan.changes().try_into().unwrap();
        assert_eq!(recorded.call_id, 1);
        assert_eq!(recorded.change.target, plan.id().to_string());
    }
    drop(second);
    fixture.end().await;
}

/// google/adk-python#6732.
#[tokio::test(start_paused = true)]
async fn one_refused_call_of_three_leaves_the_results_of_the_others() {
    let probe = Probe::new("probe").on_execute(Step::Yield(3));
    let capability = ToolCapability::writes().human_approval_required();
    let asking = Probe::new("asking").capability(capability);
    let fixture = Fixture::paused(&[&probe, &asking]).await;
    let plan = fixture.plan();
    let (one, asked, other) = tokio::join!(
        plan.execute("probe", json!({"n": 1})),
        plan.execute("asking", json!({})),
        plan.execute("probe", json!({"n": 2})),
    );
    assert_eq!(one.unwrap().output, json!({"echo": {"n": 1}}));
    assert_eq!(asked.unwrap_err().code(), OutcomeCode::ApprovalRequired);
    assert_eq!(other.unwrap().output, json!({"echo": {"n": 2}}));
    fixture.end().await;
}

/// pydantic/pydantic-ai#6411.
#[tokio::test(start_paused = true)]
async fn each_call_carries_the_identity_of_its_own_plan() {
    let tool = ToolSpec::new("whoami").handler(async |ctx, _: Value| {
        tokio::task::yield_now().await;
        Ok(ctx.metadata()["tenant"].clone())
    });
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let tenant = |name: &str| {
        let options = PlanOptions::new().metadata("tenant", name);
        fixture.begin(options).unwrap()
    };
    let (a, b) = (tenant("a"), tenant("b"));
    let (of_a, of_b) = tokio::join!(a.execute("whoami", json!({})), b.execute("whoami", json!({})));
    assert_eq!(of_a.unwrap().output, json!("a"));
    assert_eq!(of_b.unwrap().output, json!("b"));
    drop((a, b));
    fixture.end().await;
}
