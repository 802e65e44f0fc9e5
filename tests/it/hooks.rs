//! What the lifecycle tests share: hooks round a probe's stages, calls to poll by hand, a blocker.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use toolscope::test_util::{Probe, Step};
use toolscope::{
    ActivationContext, ActivationError, CallError, DeactivationContext, PlanHandle, Tool,
    ToolDescriptor, ToolExecutionContext, ToolFailure, ToolInstance, ToolOutput, ToolResult,
    ToolRuntimeBuilder, ToolRuntimeError, async_trait,
};

use crate::support::Fixture;

/// The bound of every wait for an event. It is never reached unless something is wrong.
const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) type Called = Result<ToolResult, CallError>;

/// A call as a future of its own: to spawn, to drop, to poll by hand.
pub(crate) fn call(
    plan: &PlanHandle,
    tool: &'static str,
) -> impl Future<Output = Called> + Send + use<> {
    let plan = plan.clone();
    async move { plan.execute(tool, json!({})).await }
}

/// A probe called `tool` whose activation waits for the latch.
pub(crate) fn gated() -> (Probe, CancellationToken) {
    let latch = CancellationToken::new();
    let probe = Probe::new("tool").on_activate(Step::Until(latch.clone()));
    (probe, latch)
}

pub(crate) fn descriptor(name: &str) -> ToolDescriptor {
    ToolDescriptor::new(name.parse().unwrap())
}

#[track_caller]
pub(crate) fn activation_error(called: Called) -> ActivationError {
    match called {
        Err(CallError::Runtime(ToolRuntimeError::Activation(error))) => error,
        other => panic!("no activation error: {other:?}"),
    }
}

pub(crate) fn this_thread() -> String {
    std::thread::current().name().unwrap_or_default().to_owned()
}

/// Checks a time on the paused clock, whose grain is a millisecond.
#[track_caller]
pub(crate) fn assert_about(time: Duration, millis: u64) {
    let most = Duration::from_millis(millis + 10);
    assert!((Duration::from_millis(millis)..most).contains(&time), "{time:?} and not {millis} ms");
}

/// Awaits what must come.
pub(crate) async fn within<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.expect("it did not come in time")
}

/// Waits for an event that has no signal of its own.
pub(crate) async fn until(happened: impl Fn() -> bool) {
    let began = std::time::Instant::now();
    while !happened() {
        assert!(began.elapsed() < PATIENCE, "it did not happen in time");
        tokio::task::yield_now().await;
    }
}

/// Drives a future on this thread, without any Tokio runtime.
pub(crate) fn block_on<T>(work: impl Future<Output = T>) -> T {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut work = std::pin::pin!(work);
    loop {
        if let Poll::Ready(output) = work.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        std::thread::park_timeout(PATIENCE);
    }
}

/// Does something to what is behind the lock, as a hook that is ready at once.
pub(crate) fn ready<T>(behind: &Mutex<T>, work: impl FnOnce(&mut T)) -> std::future::Ready<Passed> {
    work(&mut behind.lock().unwrap());
    std::future::ready(Ok(()))
}

/// What happened, in its order.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<&'static str>>>);

impl Log {
    pub(crate) fn add(&self, what: &'static str) {
        self.0.lock().unwrap().push(what);
    }

    pub(crate) fn read(&self) -> Vec<&'static str> {
        self.0.lock().unwrap().clone()
    }
}

/// Blocks a thread until the test lets it go on.
#[derive(Clone, Default)]
pub(crate) struct Blocker(Arc<(Mutex<(bool, bool)>, Condvar)>);

impl Blocker {
    /// Blocks this thread; panics if nobody releases it.
    pub(crate) fn block(&self) {
        let (state, changed) = &*self.0;
        let mut state = state.lock().unwrap();
        state.0 = true;
        let (state, waited) =
            changed.wait_timeout_while(state, PATIENCE, |(_, released)| !*released).unwrap();
        drop(state);
        assert!(!waited.timed_out(), "nobody released the thread");
    }

    pub(crate) fn is_blocking(&self) -> bool {
        let state = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.0
    }

    pub(crate) fn release(&self) {
        let (state, changed) = &*self.0;
        state.lock().unwrap_or_else(PoisonError::into_inner).1 = true;
        changed.notify_all();
    }
}

pub(crate) type Passed = Result<(), ToolFailure>;
type Work = Pin<Box<dyn Future<Output = Passed> + Send>>;

/// A probe with code of the test's own round its stages. What fails before a stage keeps the probe out of it.
pub(crate) struct Hooked {
    probe: Probe,
    tool: Arc<dyn Tool>,
    hooks: Hooks,
}

type Hook<C> = dyn Fn(C) -> Work + Send + Sync;
type LastHook = dyn Fn(&DeactivationContext) -> Work + Send + Sync;

#[derive(Clone, Default)]
struct Hooks {
    activate: Option<Arc<Hook<ActivationContext>>>,
    execute: Option<Arc<Hook<ToolExecutionContext>>>,
    deactivate: Option<Arc<LastHook>>,
}

impl Hooked {
    pub(crate) fn new(probe: &Probe) -> Self {
        let (probe, tool) = (probe.clone(), Arc::new(probe.tool()));
        Self { probe, tool, hooks: Hooks::default() }
    }

    pub(crate) fn before_activate<F, Fut>(mut self, hook: F) -> Self
    where
        F: Fn(ActivationContext) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Passed> + Send + 'static,
    {
        self.hooks.activate = Some(Arc::new(move |ctx| Box::pin(hook(ctx))));
        self
    }

    pub(crate) fn before_execute<F, Fut>(mut self, hook: F) -> Self
    where
        F: Fn(ToolExecutionContext) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Passed> + Send + 'static,
    {
        self.hooks.execute = Some(Arc::new(move |ctx| Box::pin(hook(ctx))));
        self
    }

    /// After the probe's own `deactivate`, however that went.
    pub(crate) fn after_deactivate<F, Fut>(mut self, hook: F) -> Self
    where
        F: Fn(&DeactivationContext) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Passed> + Send + 'static,
    {
        self.hooks.deactivate = Some(Arc::new(move |ctx| Box::pin(hook(ctx))));
        self
    }

    /// A runtime with this tool and no other.
    pub(crate) async fn fixture(self, builder: ToolRuntimeBuilder) -> Fixture {
        let probe = self.probe.clone();
        Fixture::with(builder.tool(self), &[]).await.track(&probe)
    }
}

#[async_trait]
impl Tool for Hooked {
    fn descriptor(&self) -> &ToolDescriptor {
        self.tool.descriptor()
    }

    fn off_thread(&self) -> bool {
        self.tool.off_thread()
    }

    async fn activate(
        &self,
        ctx: &ActivationContext,
    ) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        if let Some(hook) = &self.hooks.activate {
            hook(ctx.clone()).await?;
        }
        let instance = self.tool.activate(ctx).await?;
        let hooks = self.hooks.clone();
        Ok(Arc::new(HookedInstance { instance, hooks }))
    }
}

struct HookedInstance {
    instance: Arc<dyn ToolInstance>,
    hooks: Hooks,
}

#[async_trait]
impl ToolInstance for HookedInstance {
    async fn execute(
        &self,
        ctx: &ToolExecutionContext,
        input: &Value,
    ) -> Result<ToolOutput, ToolFailure> {
        if let Some(hook) = &self.hooks.execute {
            hook(ctx.clone()).await?;
        }
        self.instance.execute(ctx, input).await
    }

    async fn deactivate(&self, ctx: &DeactivationContext) -> Passed {
        let undone = self.instance.deactivate(ctx).await;
        if let Some(hook) = &self.hooks.deactivate {
            hook(ctx).await?;
        }
        undone
    }
}
