//! The fixture of every test: a runtime with probes, and a tear-down that checks the ledger.

use std::ops::Deref;
use std::time::Duration;

use tokio::runtime::Handle;
use toolscope::test_util::Probe;
use toolscope::{Keeper, Plan, PlanOptions, Stats, ToolRuntime, ToolRuntimeBuilder};

/// A runtime on the test's own clock, to be given tools that are no probes.
pub(crate) fn paused() -> ToolRuntimeBuilder {
    ToolRuntime::builder().keeper(Keeper::on(Handle::current()))
}

/// Waits until every task is at rest: only then does a paused clock go on.
pub(crate) async fn at_rest() {
    tokio::time::sleep(Duration::from_millis(10)).await;
}

/// A runtime whose tools are probes. [`end`](Self::end) it in every test.
pub(crate) struct Fixture {
    runtime: Option<ToolRuntime>,
    probes: Vec<Probe>,
}

impl Fixture {
    /// A runtime with a keeper of its own.
    pub(crate) async fn new(tools: &[&Probe]) -> Self {
        Self::with(ToolRuntime::builder(), tools).await
    }

    /// A runtime whose keeper is the test's own Tokio runtime, for a paused clock.
    pub(crate) async fn paused(tools: &[&Probe]) -> Self {
        Self::with(paused(), tools).await
    }

    pub(crate) async fn with(builder: ToolRuntimeBuilder, tools: &[&Probe]) -> Self {
        let builder = tools.iter().fold(builder, |builder, probe| builder.tool(probe.tool()));
        let probes = tools.iter().map(|probe| (*probe).clone()).collect();
        Self { runtime: Some(builder.build().await.unwrap()), probes }
    }

    /// Counts a probe that is a shared activation and no tool.
    pub(crate) fn track(mut self, probe: &Probe) -> Self {
        self.probes.push(probe.clone());
        self
    }

    /// Begins a plan with the default options.
    pub(crate) fn plan(&self) -> Plan {
        self.begin(PlanOptions::new()).unwrap()
    }

    /// Shuts down, and checks that nothing is left and that the ledger agrees with the probes.
    pub(crate) async fn end(self) -> Stats {
        let report = self.shutdown(Duration::from_secs(20)).await;
        assert!(report.stragglers.is_empty(), "stragglers: {:?}", report.stragglers);
        self.check()
    }

    /// As [`end`](Self::end), by dropping the runtime: for tests without a Tokio runtime.
    pub(crate) fn end_by_drop(mut self) {
        drop(self.runtime.take());
        self.probes.iter().for_each(Probe::assert_balanced);
    }

    fn check(mut self) -> Stats {
        let stats = self.stats();
        drop(self.runtime.take());
        self.probes.iter().for_each(Probe::assert_balanced);
        let sum = |count: fn(&Probe) -> u64| self.probes.iter().map(count).sum::<u64>();
        assert_eq!(
            stats.activated,
            sum(|probe| probe.counts().activated),
            "the ledger lies: {stats:?}"
        );
        assert_eq!(
            stats.deactivated,
            sum(|probe| probe.counts().deactivations),
            "the ledger lies: {stats:?}"
        );
        assert_eq!((stats.open, stats.lost, stats.plans), (0, 0, 0), "{stats:?}");
        assert_eq!(stats.activated, stats.deactivated, "{stats:?}");
        stats
    }
}

impl Deref for Fixture {
    type Target = ToolRuntime;

    fn deref(&self) -> &ToolRuntime {
        self.runtime.as_ref().unwrap()
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        assert!(
            self.runtime.is_none() || std::thread::panicking(),
            "the test did not end its fixture"
        );
    }
}

/// Prints a figure that every run is to show: the test harness does not capture it.
#[macro_export]
macro_rules! tell {
    ($($text:tt)*) => {{
        use std::io::Write;
        writeln!(std::io::stdout(), $($text)*).unwrap();
    }};
}
