//! Probe tools, contexts and a keeper for tests (feature `test-util`).
//!
//! A [`Probe`] is a tool with a gate at every stage: it can succeed, fail, panic, be slow, hang or
//! block there. It keeps its own counts, so that a test can check the runtime's ledger against what
//! really happened.
//!
//! ```
//! use serde_json::json;
//! use toolscope::test_util::{Probe, Step};
//! use toolscope::{PlanOptions, ToolRuntime};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let probe = Probe::new("flaky").on_activate([Step::Err, Step::Ok]);
//! let runtime = ToolRuntime::builder().tool(probe.tool()).build().await?;
//! let plan = runtime.begin(PlanOptions::new())?;
//! assert!(plan.execute("flaky", json!({})).await.is_err());
//! assert!(plan.execute("flaky", json!({})).await?.success);
//! plan.finish().await;
//! probe.assert_balanced();
//! assert_eq!(probe.counts().activated, 1);
//! # Ok(()) }
//! ```

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::contain::BoxFuture;
use crate::context::{ActivationContext, DeactivationContext, ToolExecutionContext};
use crate::descriptor::{ToolCapability, ToolDescriptor};
use crate::error::EndReason;
use crate::execute::Call;
use crate::name::ToolName;
use crate::obligation::Attempt;
use crate::options::CallOptions;
use crate::plan::PlanHandle;
use crate::slot::{Key, Why};
use crate::tool::{SharedActivation, Tool, ToolFailure, ToolInstance, ToolOutput};

/// What a probe does at one of its stages.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Step {
    /// Goes on at once.
    Ok,
    /// Returns an error at once.
    Err,
    /// Panics at once.
    Panic,
    /// Sleeps on the Tokio clock, then goes on.
    Slow(Duration),
    /// Never goes on.
    Never,
    /// Blocks its thread, then goes on.
    Block(Duration),
    /// Yields that often, then goes on.
    Yield(u32),
    /// Yields that often, then returns an error.
    YieldErr(u32),
    /// Yields that often, then panics.
    YieldPanic(u32),
    /// Waits until the token is cancelled, then goes on.
    Until(CancellationToken),
    /// Waits until the context says that it is cancelled, then goes on. As [`Never`](Self::Never)
    /// in `deactivate`.
    UntilCancelled,
    /// As [`UntilCancelled`](Self::UntilCancelled), then panics.
    UntilCancelledPanic,
}

impl From<Step> for Vec<Step> {
    fn from(step: Step) -> Self {
        vec![step]
    }
}

/// What happened to a [`Probe`], by its own count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProbeCounts {
    /// `activate` was entered.
    pub activations: u64,
    /// `activate` was about to return `Ok`.
    pub activated: u64,
    /// `activate` was dropped before it returned.
    pub half_done: u64,
    /// Two instances, or two activations, were alive in one plan at once.
    pub overlapping: u64,
    /// `execute` was entered.
    pub executions: u64,
    /// `execute` was dropped before it returned.
    pub dropped: u64,
    /// `execute` was entered or polled after `deactivate` was called.
    pub late: u64,
    /// `deactivate` was called.
    pub deactivations: u64,
    /// `deactivate` was called on an instance a second time.
    pub doubled: u64,
    /// `deactivate` was called while something that was built on this was still active.
    pub out_of_order: u64,
}

/// A tool, or a shared activation, that keeps its own counts. A clone is the same probe.
#[derive(Clone)]
pub struct Probe(Arc<Inner>);

struct Inner {
    name: ToolName,
    config: Mutex<Config>,
    counts: Mutex<ProbeCounts>,
    /// By plan: activations and instances that are alive.
    alive: Mutex<Vec<u64>>,
}

#[derive(Clone)]
#[expect(clippy::struct_excessive_bools, reason = "independent switches of a probe")]
struct Config {
    capability: ToolCapability,
    immediate: bool,
    off_thread: bool,
    taints: bool,
    panics_in_drop: bool,
    max_concurrent: Option<usize>,
    call_timeout: Option<Duration>,
    activate: Vec<Step>,
    execute: Vec<Step>,
    deactivate: Vec<Step>,
    needs: Vec<Probe>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Probe {
    /// A managed tool that declares `writes` and goes through every stage at once.
    ///
    /// # Panics
    ///
    /// When the text is no name.
    #[track_caller]
    pub fn new(name: &str) -> Self {
        let name = name.parse().unwrap_or_else(|error| panic!("{error}"));
        let config = Config {
            capability: ToolCapability::writes(),
            immediate: false,
            off_thread: false,
            taints: false,
            panics_in_drop: false,
            max_concurrent: None,
            call_timeout: None,
            activate: Vec::new(),
            execute: Vec::new(),
            deactivate: Vec::new(),
            needs: Vec::new(),
        };
        Self(Arc::new(Inner {
            name,
            config: Mutex::new(config),
            counts: Mutex::default(),
            alive: Mutex::default(),
        }))
    }

    fn set(self, change: impl FnOnce(&mut Config)) -> Self {
        change(&mut lock(&self.0.config));
        self
    }

    /// What it does in `activate`: one step each time, the last one for ever. Can be changed at any
    /// time.
    #[must_use]
    pub fn on_activate(self, steps: impl Into<Vec<Step>>) -> Self {
        let steps = steps.into();
        self.set(|config| config.activate = steps)
    }

    /// What it does in `execute`.
    #[must_use]
    pub fn on_execute(self, steps: impl Into<Vec<Step>>) -> Self {
        let steps = steps.into();
        self.set(|config| config.execute = steps)
    }

    /// What it does in `deactivate`.
    #[must_use]
    pub fn on_deactivate(self, steps: impl Into<Vec<Step>>) -> Self {
        let steps = steps.into();
        self.set(|config| config.deactivate = steps)
    }

    /// Declares another capability.
    #[must_use]
    pub fn capability(self, capability: ToolCapability) -> Self {
        self.set(|config| config.capability = capability)
    }

    /// Makes it an immediate tool.
    #[must_use]
    pub fn immediate(self) -> Self {
        self.set(|config| config.immediate = true)
    }

    /// Never polled by the task that asked.
    #[must_use]
    pub fn off_thread(self) -> Self {
        self.set(|config| config.off_thread = true)
    }

    /// Taints its instance in each execution.
    #[must_use]
    pub fn taints(self, taints: bool) -> Self {
        self.set(|config| config.taints = taints)
    }

    /// The drop of an instance panics.
    #[must_use]
    pub fn panics_in_drop(self) -> Self {
        self.set(|config| config.panics_in_drop = true)
    }

    /// Limits how many calls run at once, over all plans.
    #[must_use]
    pub fn max_concurrent(self, limit: usize) -> Self {
        self.set(|config| config.max_concurrent = Some(limit))
    }

    /// Limits the time of one call.
    #[must_use]
    pub fn call_timeout(self, limit: Duration) -> Self {
        self.set(|config| config.call_timeout = Some(limit))
    }

    /// Asks for another probe as a shared activation when it is activated.
    #[must_use]
    pub fn needs(self, other: &Self) -> Self {
        let other = other.clone();
        self.set(|config| config.needs.push(other))
    }

    /// The tool to register.
    pub fn tool(&self) -> impl Tool + use<> {
        let config = lock(&self.0.config).clone();
        let mut descriptor = ToolDescriptor::new(self.0.name.clone()).capability(config.capability);
        descriptor.max_concurrent = config.max_concurrent;
        descriptor.call_timeout = config.call_timeout;
        ProbeTool {
            probe: self.clone(),
            descriptor,
            immediate: config.immediate,
            off_thread: config.off_thread,
        }
    }

    /// What happened so far.
    pub fn counts(&self) -> ProbeCounts {
        *lock(&self.0.counts)
    }

    /// Checks its own law: every activation that returned `Ok` was deactivated exactly once, never
    /// two at a time, nothing was executed afterwards, and nothing was deactivated before what was
    /// built on it.
    ///
    /// # Panics
    ///
    /// When it does not hold.
    #[track_caller]
    pub fn assert_balanced(&self) {
        let counts = self.counts();
        let name = &self.0.name;
        assert_eq!(
            counts.activated, counts.deactivations,
            "`{name}`: activated and deactivated differ: {counts:?}"
        );
        assert_eq!(counts.doubled, 0, "`{name}` was deactivated twice: {counts:?}");
        assert_eq!(counts.overlapping, 0, "`{name}` was active twice at once: {counts:?}");
        assert_eq!(counts.late, 0, "`{name}` was executed after its deactivation: {counts:?}");
        assert_eq!(
            counts.out_of_order, 0,
            "`{name}` was deactivated under its dependents: {counts:?}"
        );
    }

    fn count(&self, change: impl FnOnce(&mut ProbeCounts)) {
        change(&mut lock(&self.0.counts));
    }

    fn next(&self, stage: impl FnOnce(&mut Config) -> &mut Vec<Step>) -> Step {
        let mut config = lock(&self.0.config);
        let steps = stage(&mut config);
        match steps.len() {
            0 => Step::Ok,
            1 => steps[0].clone(),
            _ => steps.remove(0),
        }
    }

    /// Boxed: a probe may need a probe that needs a probe.
    fn make<'a>(
        &'a self,
        ctx: &'a ActivationContext,
    ) -> BoxFuture<'a, Result<Arc<ProbeInstance>, ToolFailure>> {
        Box::pin(self.make_one(ctx))
    }

    async fn make_one(&self, ctx: &ActivationContext) -> Result<Arc<ProbeInstance>, ToolFailure> {
        self.count(|counts| counts.activations += 1);
        let plan = ctx.plan_id().number();
        let mut alive = Alive::new(self, plan);
        let step = self.next(|config| &mut config.activate);
        let needs = lock(&self.0.config).needs.clone();
        let mut held = Vec::new();
        for other in needs {
            let name = other.0.name.to_string();
            let make = move |ctx: ActivationContext| {
                let other = other.clone();
                async move { other.make(&ctx).await.map(SharedProbe) }
            };
            let shared: Arc<SharedProbe> =
                ctx.shared(&name, make).await.inspect_err(|_| alive.failed = true)?;
            held.push(Dependent::new(&shared.0));
        }
        let passed = pass(step, "activate", ctx.cancellation_token()).await;
        alive.failed = passed.is_err();
        passed?;
        self.count(|counts| counts.activated += 1);
        alive.done = true;
        let panics = lock(&self.0.config).panics_in_drop;
        let bomb = Bomb(AtomicBool::new(panics));
        Ok(Arc::new(ProbeInstance {
            probe: self.clone(),
            plan,
            gone: AtomicBool::new(false),
            held: Mutex::new(held),
            dependents: AtomicU64::new(0),
            _bomb: bomb,
        }))
    }
}

impl fmt::Debug for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Probe")
            .field("name", &self.0.name)
            .field("counts", &self.counts())
            .finish_non_exhaustive()
    }
}

/// One activation that is under way, or the instance it made.
struct Alive<'a> {
    probe: &'a Probe,
    plan: u64,
    failed: bool,
    done: bool,
}

impl<'a> Alive<'a> {
    fn new(probe: &'a Probe, plan: u64) -> Self {
        let mut alive = lock(&probe.0.alive);
        if alive.contains(&plan) {
            probe.count(|counts| counts.overlapping += 1);
        }
        alive.push(plan);
        Self { probe, plan, failed: false, done: false }
    }
}

impl Drop for Alive<'_> {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        no_longer(&self.probe.0.alive, self.plan);
        if !self.failed && !std::thread::panicking() {
            self.probe.count(|counts| counts.half_done += 1);
        }
    }
}

fn no_longer(alive: &Mutex<Vec<u64>>, plan: u64) {
    let mut alive = lock(alive);
    if let Some(at) = alive.iter().position(|other| *other == plan) {
        alive.swap_remove(at);
    }
}

/// An instance's claim on a shared one, until its own deactivation is over.
struct Dependent(Arc<ProbeInstance>);

impl Dependent {
    fn new(on: &Arc<ProbeInstance>) -> Self {
        on.dependents.fetch_add(1, SeqCst);
        Self(Arc::clone(on))
    }
}

impl Drop for Dependent {
    fn drop(&mut self) {
        self.0.dependents.fetch_sub(1, SeqCst);
    }
}

/// Panics when dropped, if it is told to.
struct Bomb(AtomicBool);

impl Drop for Bomb {
    fn drop(&mut self) {
        assert!(
            !self.0.load(SeqCst) || std::thread::panicking(),
            "a panic in the drop of an instance"
        );
    }
}

struct ProbeTool {
    probe: Probe,
    descriptor: ToolDescriptor,
    immediate: bool,
    off_thread: bool,
}

#[async_trait]
impl Tool for ProbeTool {
    fn descriptor(&self) -> &ToolDescriptor {
        &self.descriptor
    }

    fn immediate(&self) -> Option<Arc<dyn ToolInstance>> {
        if !self.immediate {
            return None;
        }
        let (gone, held, bomb) =
            (AtomicBool::new(false), Mutex::default(), Bomb(AtomicBool::new(false)));
        Some(Arc::new(ProbeInstance {
            probe: self.probe.clone(),
            plan: 0,
            gone,
            held,
            dependents: AtomicU64::new(0),
            _bomb: bomb,
        }))
    }

    async fn activate(
        &self,
        ctx: &ActivationContext,
    ) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        Ok(self.probe.make(ctx).await?)
    }

    fn off_thread(&self) -> bool {
        self.off_thread
    }
}

struct ProbeInstance {
    probe: Probe,
    plan: u64,
    gone: AtomicBool,
    held: Mutex<Vec<Dependent>>,
    /// Instances of other probes that hold this one.
    dependents: AtomicU64,
    _bomb: Bomb,
}

impl ProbeInstance {
    async fn undo(&self, ctx: &DeactivationContext) -> Result<(), ToolFailure> {
        let probe = &self.probe;
        probe.count(|counts| counts.deactivations += 1);
        if self.gone.swap(true, SeqCst) {
            probe.count(|counts| counts.doubled += 1);
        }
        if self.dependents.load(SeqCst) != 0 {
            probe.count(|counts| counts.out_of_order += 1);
        }
        let _over = Over(self);
        pass(
            probe.next(|config| &mut config.deactivate),
            "deactivate",
            ctx.cancellation_token().clone(),
        )
        .await
    }
}

/// The deactivation is over, however it went.
struct Over<'a>(&'a ProbeInstance);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        no_longer(&self.0.probe.0.alive, self.0.plan);
        lock(&self.0.held).clear();
    }
}

/// One execution.
struct Execution<'a> {
    instance: &'a ProbeInstance,
    done: bool,
}

impl Execution<'_> {
    fn look(&self) {
        if self.instance.gone.load(SeqCst) {
            self.instance.probe.count(|counts| counts.late += 1);
        }
    }
}

impl Drop for Execution<'_> {
    fn drop(&mut self) {
        if !self.done && !std::thread::panicking() {
            self.instance.probe.count(|counts| counts.dropped += 1);
        }
    }
}

#[async_trait]
impl ToolInstance for ProbeInstance {
    async fn execute(
        &self,
        ctx: &ToolExecutionContext,
        input: &Value,
    ) -> Result<ToolOutput, ToolFailure> {
        self.probe.count(|counts| counts.executions += 1);
        let mut execution = Execution { instance: self, done: false };
        execution.look();
        if lock(&self.probe.0.config).taints {
            ctx.taint("the probe taints");
        }
        let step = self.probe.next(|config| &mut config.execute);
        let mut work = std::pin::pin!(pass(step, "execute", ctx.cancellation_token()));
        let passed = std::future::poll_fn(|cx| {
            execution.look();
            let polled = work.as_mut().poll(cx);
            execution.look();
            polled
        })
        .await;
        execution.done = true;
        passed.map(|()| ToolOutput::new(json!({"echo": input.clone()})))
    }

    async fn deactivate(&self, ctx: &DeactivationContext) -> Result<(), ToolFailure> {
        self.undo(ctx).await
    }
}

struct SharedProbe(Arc<ProbeInstance>);

#[async_trait]
impl SharedActivation for SharedProbe {
    async fn deactivate(&self, ctx: &DeactivationContext) -> Result<(), ToolFailure> {
        self.0.undo(ctx).await
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "a probe that blocks its thread is what some tests need"
)]
async fn pass(step: Step, stage: &str, token: CancellationToken) -> Result<(), ToolFailure> {
    let yields = async |times: u32| {
        for _ in 0..times {
            tokio::task::yield_now().await;
        }
    };
    match step {
        Step::Ok => Ok(()),
        Step::Err => Err(ToolFailure::failed(format!("the probe fails in {stage}"))),
        Step::Panic => panic!("the probe panics in {stage}"),
        Step::Slow(time) => {
            tokio::time::sleep(time).await;
            Ok(())
        }
        Step::Never => std::future::pending().await,
        Step::Block(time) => {
            std::thread::sleep(time);
            Ok(())
        }
        Step::Yield(times) => {
            yields(times).await;
            Ok(())
        }
        Step::YieldErr(times) => {
            yields(times).await;
            Err(ToolFailure::failed(format!("the probe fails in {stage}")))
        }
        Step::YieldPanic(times) => {
            yields(times).await;
            panic!("the probe panics in {stage}")
        }
        Step::Until(latch) => {
            latch.cancelled().await;
            Ok(())
        }
        Step::UntilCancelled => {
            token.cancelled().await;
            Ok(())
        }
        Step::UntilCancelledPanic => {
            token.cancelled().await;
            panic!("the probe panics in {stage}")
        }
    }
}

// ===== contexts =====

/// A context as an execution in that plan would have it, to test an instance by itself. Its call
/// number is 0.
pub fn execution_context(plan: &PlanHandle) -> ToolExecutionContext {
    let (name, input, options, above) = ("", Ok(&Value::Null), CallOptions::new(), None);
    ToolExecutionContext::new(
        &Call { scope: &plan.scope, name, input, options, above },
        0,
        u32::MAX,
        None,
    )
}

/// A context as an activation in that plan would have it, to test a tool by itself.
pub fn activation_context(plan: &PlanHandle) -> ActivationContext {
    let key = Key::Shared(std::any::TypeId::of::<ActivationContext>(), "test".into());
    let slot = plan.scope.inner().slots.push(key, "test".into());
    ActivationContext::new(&plan.scope, slot, &Attempt::new())
}

/// A context as a deactivation at the end of that plan would have it.
pub fn deactivation_context(plan: &PlanHandle) -> DeactivationContext {
    DeactivationContext::new(&plan.scope, &Why::End(EndReason::Finished))
}
