//! A runtime described, and built.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::ToolRuntime;
use super::core::Core;
use crate::approval::{Approver, SharedApprover};
use crate::error::ToolError;
use crate::keeper::Keeper;
use crate::layer::{Layer, Layers};
use crate::options::{Deadlines, PlanOptions, PlanSettings};
use crate::registry::ToolRegistry;
use crate::tool::Tool;

/// A description of a [`ToolRuntime`].
#[must_use]
pub struct ToolRuntimeBuilder {
    tools: Vec<Arc<dyn Tool>>,
    keeper: Option<Keeper>,
    keeper_threads: usize,
    deadlines: Deadlines,
    plan_defaults: PlanOptions,
    approver: Option<SharedApprover>,
    layers: Layers,
    drop_wait: Duration,
    guardian: Option<PathBuf>,
}

impl ToolRuntimeBuilder {
    pub(super) fn new() -> Self {
        Self {
            tools: Vec::new(),
            keeper: None,
            keeper_threads: 2,
            deadlines: Deadlines::default(),
            plan_defaults: PlanOptions::new(),
            approver: None,
            layers: Layers::default(),
            guardian: None,
            drop_wait: Duration::from_secs(5),
        }
    }

    /// Registers a tool.
    pub fn tool(mut self, tool: impl Tool) -> Self {
        self.tools.push(Arc::new(tool));
        self
    }

    /// The threads of the keeper. 2 by default; 0 is taken as 1.
    pub fn keeper_threads(mut self, threads: usize) -> Self {
        self.keeper_threads = threads;
        self
    }

    /// The bounds in time of all plans that set none of their own.
    pub fn deadlines(mut self, deadlines: Deadlines) -> Self {
        self.deadlines = deadlines;
        self
    }

    /// What every plan starts from that says nothing else. Of rights, rules and quotas both hold:
    /// those here and the plan's own. A token or a deadline is no default; it is left out.
    pub fn plan_defaults(mut self, options: PlanOptions) -> Self {
        self.plan_defaults = options;
        self
    }

    /// Who is asked for approvals in every plan that names nobody else. Without any, a call that
    /// needs one is refused.
    pub fn approver(mut self, approver: impl Approver) -> Self {
        self.approver = Some(SharedApprover::new(approver));
        self
    }

    /// Puts a hook round every call, inside those that were given before.
    pub fn layer(mut self, layer: impl Layer) -> Self {
        self.layers.add(layer);
        self
    }

    /// How long the drop of the runtime may wait for deactivations. 5 s by default.
    pub fn drop_wait(mut self, limit: Duration) -> Self {
        self.drop_wait = limit;
        self
    }

    /// The guardian of what tools start, instead of the one that is found: see
    /// [`guardian`](crate::guardian).
    pub fn guardian(mut self, path: impl Into<PathBuf>) -> Self {
        self.guardian = Some(path.into());
        self
    }

    /// Runs the keeper's jobs on a given Tokio runtime.
    #[cfg(any(feature = "test-util", toolscope_shuttle))]
    pub fn keeper(mut self, keeper: Keeper) -> Self {
        self.keeper = Some(keeper);
        self
    }

    /// Builds the runtime. No thread is started before the first managed activation, the first
    /// timer, or the first plan with a token or a deadline.
    ///
    /// # Errors
    ///
    /// The first tool that the registry does not take.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: nothing is started before it is done.
    #[expect(clippy::unused_async, reason = "sources are discovered here")]
    pub async fn build(self) -> Result<ToolRuntime, ToolError> {
        let Self {
            tools,
            keeper,
            keeper_threads,
            deadlines,
            plan_defaults,
            approver,
            layers,
            drop_wait,
            guardian,
        } = self;
        let registry = ToolRegistry::default();
        registry.register_all(tools)?;
        let mut defaults = plan_defaults.settled(&PlanSettings::defaults(deadlines));
        defaults.token = None;
        defaults.approver = defaults.approver.or(approver);
        let core = Core::new(registry, defaults, layers, keeper, keeper_threads, guardian);
        Ok(ToolRuntime { core: Arc::new(core), drop_wait })
    }
}

impl fmt::Debug for ToolRuntimeBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ToolRuntimeBuilder")
            .field("tools", &self.tools.len())
            .finish_non_exhaustive()
    }
}
