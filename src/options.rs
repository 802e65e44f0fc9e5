//! What a plan is and may do: what a host asks for, and what that comes to.

use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::approval::{Approver, SharedApprover};
use crate::descriptor::{BoundResource, ToolFilter};
use crate::error::ToolRuntimeError;
use crate::execute::Frame;
use crate::limit::Quota;
use crate::name::ToolName;
use crate::policy::{Rights, Rule};
use crate::slot::Limits;

/// The runtime's bounds in time. A setting of the runtime, and of a plan where it differs.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use toolscope::Deadlines;
///
/// let patient = Deadlines::default().activate(Duration::from_secs(120));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct Deadlines {
    pub(crate) activate: Duration,
    pub(crate) grace: Duration,
    pub(crate) drain: Duration,
    pub(crate) deactivate: Duration,
    pub(crate) end: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            activate: Duration::from_secs(30),
            grace: Duration::from_secs(2),
            drain: Duration::from_secs(2),
            deactivate: Duration::from_secs(10),
            end: Duration::from_secs(30),
        }
    }
}

impl Deadlines {
    /// How long one attempt to activate may take. 30 s by default; once its plan has ended, what is
    /// left of [`end`](Self::end) if that is less.
    pub fn activate(mut self, limit: Duration) -> Self {
        self.activate = limit;
        self
    }

    /// How long running calls may go on after they see that they are cancelled. 2 s by default.
    pub fn grace(mut self, limit: Duration) -> Self {
        self.grace = limit;
        self
    }

    /// How long, after the grace, to wait for a call that is being polled at that very moment. 2 s
    /// by default; what still is blocks its thread and stands in the report as overrun.
    pub fn drain(mut self, limit: Duration) -> Self {
        self.drain = limit;
        self
    }

    /// How long one deactivation may take. 10 s by default.
    pub fn deactivate(mut self, limit: Duration) -> Self {
        self.deactivate = limit;
        self
    }

    /// The total budget for the end of a plan. 30 s by default. A deactivation gets the less of its
    /// own limit and what is left, but never under 250 ms.
    pub fn end(mut self, limit: Duration) -> Self {
        self.end = limit;
        self
    }
}

/// What a plan is and may do. Everything has a default.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use toolscope::PlanOptions;
///
/// let options = PlanOptions::new().read_only().call_timeout(Duration::from_secs(30));
/// ```
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct PlanOptions {
    deadline: Option<Duration>,
    /// What differs from the runtime's defaults; few plans have any of it.
    wanted: Option<Box<Wanted>>,
}

/// See [`PlanOptions`].
#[derive(Debug, Clone, Default)]
struct Wanted {
    rights: Rights,
    token: Option<CancellationToken>,
    call_timeout: Option<Duration>,
    permit_wait: Option<Duration>,
    max_concurrent: Option<usize>,
    deadlines: Option<Deadlines>,
    max_attempts: Option<u32>,
    max_generations: Option<u32>,
    trace_cap: Option<usize>,
    only: Vec<ToolFilter>,
    rules: Vec<Rule>,
    quotas: Vec<(Option<ToolName>, u64)>,
    approver: Option<SharedApprover>,
    approval_wait: Option<Duration>,
    output_check: Option<OutputCheck>,
    max_output: Option<usize>,
    metadata: Map<String, Value>,
    resources: Vec<BoundResource>,
    sandbox: Option<PathBuf>,
}

impl PlanOptions {
    /// A plan that may write, needs no checkpoints, and allows no unsafe tool.
    pub fn new() -> Self {
        Self::default()
    }

    /// Refuses every tool that writes, and every tool that does not say that it only reads.
    pub fn read_only(self) -> Self {
        self.with(|wanted| wanted.rights.read_only = true)
    }

    /// Refuses every writer that cannot have a checkpoint.
    pub fn require_checkpoints(self) -> Self {
        self.with(|wanted| wanted.rights.checkpoints = true)
    }

    /// Allows tools that declare `unsafe` without an approval.
    pub fn allow_unsafe(self) -> Self {
        self.with(|wanted| wanted.rights.allow_unsafe = true)
    }

    /// Allows only the tools that this, or another such filter of the same options, fits.
    pub fn only(self, tools: impl Into<ToolFilter>) -> Self {
        self.with(|wanted| wanted.only.push(tools.into()))
    }

    /// Refuses the tools that the filter fits.
    pub fn deny(self, tools: impl Into<ToolFilter>) -> Self {
        self.with(|wanted| wanted.rules.push(Rule::Deny(tools.into())))
    }

    /// Has each call of the tools that the filter fits approved first.
    pub fn ask(self, tools: impl Into<ToolFilter>) -> Self {
        self.with(|wanted| wanted.rules.push(Rule::Ask(tools.into())))
    }

    /// Who is asked for approvals. The builder's by default; without any, a call that needs one is
    /// refused. A child plan asks its parent's approver, and may not name another.
    pub fn approver(self, approver: impl Approver) -> Self {
        self.with(|wanted| wanted.approver = Some(SharedApprover::new(approver)))
    }

    /// How long an approval is waited for; then the call is denied. 5 minutes by default.
    pub fn approval_wait(self, limit: Duration) -> Self {
        self.with(|wanted| wanted.approval_wait = Some(limit))
    }

    /// How many calls the plan may make that reach their tool, those of plans under it included. No
    /// limit by default.
    pub fn max_calls(self, calls: u64) -> Self {
        self.with(|wanted| wanted.quotas.push((None, calls)))
    }

    /// As [`max_calls`](Self::max_calls), of one tool.
    pub fn max_calls_of(self, tool: ToolName, calls: u64) -> Self {
        self.with(|wanted| wanted.quotas.push((Some(tool), calls)))
    }

    /// What becomes of an output that breaks its schema. [`OutputCheck::Warn`] by default.
    pub fn output_check(self, check: OutputCheck) -> Self {
        self.with(|wanted| wanted.output_check = Some(check))
    }

    /// The longest output, in bytes of JSON; a longer one is cut and says so. 4 MiB by default.
    ///
    /// The text of a failure is cut there too, though never below 4 KiB. What a tool adds as
    /// metadata is not counted.
    pub fn max_output_bytes(self, bytes: usize) -> Self {
        self.with(|wanted| wanted.max_output = Some(bytes))
    }

    /// Cancels the plan when the token is cancelled.
    pub fn token(self, token: CancellationToken) -> Self {
        self.with(|wanted| wanted.token = Some(token))
    }

    /// Ends the plan after that time, even if its owner leaked it. None by default.
    pub fn deadline(mut self, limit: Duration) -> Self {
        self.deadline = Some(limit);
        self
    }

    /// Limits the time of each call. None by default.
    pub fn call_timeout(self, limit: Duration) -> Self {
        self.with(|wanted| wanted.call_timeout = Some(limit))
    }

    /// How long a call waits for room under a limit of calls at once. 30 s by default.
    pub fn permit_wait(self, limit: Duration) -> Self {
        self.with(|wanted| wanted.permit_wait = Some(limit))
    }

    /// How many calls of the plan run at once; nested ones do not count. No limit by default; 0 is
    /// taken as 1.
    pub fn max_concurrent(self, limit: usize) -> Self {
        self.with(|wanted| wanted.max_concurrent = Some(limit.clamp(1, Semaphore::MAX_PERMITS)))
    }

    /// The bounds in time that differ from the runtime's.
    pub fn deadlines(self, deadlines: Deadlines) -> Self {
        self.with(|wanted| wanted.deadlines = Some(deadlines))
    }

    /// How many attempts an activation has before its last error is final. 3 by default; 0 is taken
    /// as 1.
    pub fn max_attempts(self, attempts: u32) -> Self {
        self.with(|wanted| wanted.max_attempts = Some(attempts.max(1)))
    }

    /// How many instances of a tool the plan makes when they are tainted, the first included. 3 by
    /// default.
    pub fn max_generations(self, generations: u32) -> Self {
        self.with(|wanted| wanted.max_generations = Some(generations.max(1)))
    }

    /// How many traces the plan keeps; past that the oldest go, counted. 10,000 by default.
    pub fn trace_cap(self, traces: usize) -> Self {
        self.with(|wanted| wanted.trace_cap = Some(traces.max(1)))
    }

    /// Says something about the plan that tools can read. A child plan inherits it; one that a tool
    /// begins may add to it and change nothing but the names of its agent (`gen_ai.*`).
    pub fn metadata(self, key: impl Into<String>, value: impl Into<Value>) -> Self {
        self.with(|wanted| wanted.metadata.insert(key.into(), value.into()))
    }

    /// Binds a resource.
    pub fn resource(self, resource: BoundResource) -> Self {
        self.with(|wanted| wanted.resources.push(resource))
    }

    /// The directory that file tools are confined to.
    pub fn sandbox(self, root: impl Into<PathBuf>) -> Self {
        self.with(|wanted| wanted.sandbox = Some(root.into()))
    }

    fn with<T>(mut self, set: impl FnOnce(&mut Wanted) -> T) -> Self {
        set(self.wanted.get_or_insert_default());
        self
    }

    /// The token and the deadline: what has to be watched.
    pub(crate) fn watched(&self) -> (Option<CancellationToken>, Option<Duration>) {
        (self.wanted.as_ref().and_then(|wanted| wanted.token.clone()), self.deadline)
    }

    /// The settings of the plan; `None` where they are the runtime's.
    pub(crate) fn settle(self, defaults: &PlanSettings) -> Option<Box<PlanSettings>> {
        if self.wanted.is_none() && !defaults.counts() {
            return None;
        }
        Some(Box::new(self.settled(defaults)))
    }

    /// These options where they say something, `defaults` where they do not. Of rights, rules and
    /// quotas both hold.
    pub(crate) fn settled(self, defaults: &PlanSettings) -> PlanSettings {
        let wanted = *self.wanted.unwrap_or_default();
        let mut rules = wanted.rules;
        if !wanted.only.is_empty() {
            rules.push(Rule::Only(wanted.only));
        }
        rules.extend_from_slice(&defaults.rules);
        let mut quota_terms = wanted.quotas;
        quota_terms.extend_from_slice(&defaults.quota_terms);
        let mut metadata = wanted.metadata;
        for (key, value) in &defaults.metadata {
            if !metadata.contains_key(key) {
                metadata.insert(key.clone(), value.clone());
            }
        }
        let mut resources = wanted.resources;
        if resources.is_empty() {
            resources.clone_from(&defaults.resources);
        }
        let max_concurrent = wanted.max_concurrent.or(defaults.max_concurrent);
        let quota = |(tool, limit): &(Option<ToolName>, u64)| Quota::new(tool.clone(), *limit);
        PlanSettings {
            rights: wanted.rights.or_default(defaults.rights),
            token: wanted.token,
            call_timeout: wanted.call_timeout.or(defaults.call_timeout),
            permit_wait: wanted.permit_wait.unwrap_or(defaults.permit_wait),
            permits: max_concurrent.map(Semaphore::new),
            max_concurrent,
            deadlines: wanted.deadlines.unwrap_or(defaults.deadlines),
            limits: Limits {
                attempts: wanted.max_attempts.unwrap_or(defaults.limits.attempts),
                generations: wanted.max_generations.unwrap_or(defaults.limits.generations),
            },
            trace_cap: wanted.trace_cap.unwrap_or(defaults.trace_cap),
            rules,
            quotas: quota_terms.iter().map(quota).collect(),
            quota_terms,
            approver: wanted.approver.or_else(|| defaults.approver.clone()),
            approval_wait: wanted.approval_wait.unwrap_or(defaults.approval_wait),
            output_check: wanted.output_check.unwrap_or(defaults.output_check),
            max_output: wanted.max_output.unwrap_or(defaults.max_output),
            metadata,
            resources,
            sandbox: wanted.sandbox.or_else(|| defaults.sandbox.clone()),
            begun_by: None,
        }
    }
}

/// What becomes of an output that breaks the schema which its tool declares.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum OutputCheck {
    /// It is not looked at.
    Off,
    /// The result has success; `output_valid: false` and the faults stand in its metadata.
    #[default]
    Warn,
    /// The result has no success, with the code `invalid_output`.
    Reject,
}

/// [`PlanOptions`], settled against the runtime's defaults.
#[derive(Debug)]
pub(crate) struct PlanSettings {
    pub(crate) rights: Rights,
    pub(crate) token: Option<CancellationToken>,
    pub(crate) call_timeout: Option<Duration>,
    pub(crate) permit_wait: Duration,
    pub(crate) permits: Option<Semaphore>,
    max_concurrent: Option<usize>,
    pub(crate) deadlines: Deadlines,
    pub(crate) limits: Limits,
    pub(crate) trace_cap: usize,
    pub(crate) rules: Vec<Rule>,
    /// The plan's own and those of all plans above it.
    pub(crate) quotas: Vec<Arc<Quota>>,
    /// The terms of the plan's own.
    quota_terms: Vec<(Option<ToolName>, u64)>,
    pub(crate) approver: Option<SharedApprover>,
    pub(crate) approval_wait: Duration,
    pub(crate) output_check: OutputCheck,
    pub(crate) max_output: usize,
    pub(crate) metadata: Map<String, Value>,
    pub(crate) resources: Vec<BoundResource>,
    pub(crate) sandbox: Option<PathBuf>,
    /// The call of the parent that began this plan, where a tool did.
    pub(crate) begun_by: Option<Arc<Frame>>,
}

impl PlanSettings {
    pub(crate) fn defaults(deadlines: Deadlines) -> Self {
        Self {
            rights: Rights::default(),
            token: None,
            call_timeout: None,
            permit_wait: Duration::from_secs(30),
            permits: None,
            max_concurrent: None,
            deadlines,
            limits: Limits { attempts: 3, generations: 3 },
            trace_cap: 10_000,
            rules: Vec::new(),
            quotas: Vec::new(),
            quota_terms: Vec::new(),
            approver: None,
            approval_wait: Duration::from_secs(5 * 60),
            output_check: OutputCheck::Warn,
            max_output: 4 * 1024 * 1024,
            metadata: Map::new(),
            resources: Vec::new(),
            sandbox: None,
            begun_by: None,
        }
    }

    /// Whether each plan must have counts of its own.
    fn counts(&self) -> bool {
        self.permits.is_some() || !self.quotas.is_empty()
    }

    /// What a child of a plan with these settings starts from: of limits of calls at once each plan
    /// has its own, and the parent's rules and quotas come with [`child`](Self::child).
    fn for_child(&self) -> Self {
        Self {
            rights: Rights::default(),
            token: None,
            permits: None,
            max_concurrent: None,
            rules: Vec::new(),
            quotas: Vec::new(),
            quota_terms: Vec::new(),
            approver: self.approver.clone(),
            metadata: self.metadata.clone(),
            resources: self.resources.clone(),
            sandbox: self.sandbox.clone(),
            begun_by: None,
            ..*self
        }
    }

    /// The settings of a child of a plan with these settings, which can do nothing that the parent
    /// could not.
    pub(crate) fn child(
        &self,
        options: PlanOptions,
        begun_by: Option<Arc<Frame>>,
    ) -> Result<Box<Self>, ToolRuntimeError> {
        let denied = |reason: String| ToolRuntimeError::denied("a child plan", reason);
        if options.wanted.as_ref().is_some_and(|wanted| wanted.approver.is_some()) {
            let reason = "it asks its parent's approver, and may not name another";
            return Err(denied(reason.to_owned()));
        }
        let mut own = options.settled(&self.for_child());
        own.rights = own.rights.meet(self.rights);
        own.permit_wait = own.permit_wait.min(self.permit_wait);
        own.approval_wait = own.approval_wait.min(self.approval_wait);
        own.limits.attempts = own.limits.attempts.min(self.limits.attempts);
        own.limits.generations = own.limits.generations.min(self.limits.generations);
        if begun_by.is_some() {
            // A tool must not speak for the host; the name of an agent stands in spans only.
            let said = self.metadata.iter().filter(|(key, _)| !key.starts_with("gen_ai."));
            own.metadata.extend(said.map(|(key, value)| (key.clone(), value.clone())));
        }
        own.begun_by = begun_by;
        own.call_timeout = [own.call_timeout, self.call_timeout].into_iter().flatten().min();
        own.max_output = own.max_output.min(self.max_output);
        own.output_check = own.output_check.max(self.output_check);
        own.rules.extend_from_slice(&self.rules);
        own.quotas.extend_from_slice(&self.quotas);
        if let Some(foreign) = own.resources.iter().find(|bound| !self.resources.contains(bound)) {
            let name = &foreign.name;
            return Err(denied(format!("its parent does not bind the resource `{name}`")));
        }
        if let Some(inner) = &own.sandbox {
            if !self.sandbox.as_ref().is_some_and(|outer| is_inside(inner, outer)) {
                // Without the path: a model may read this, through a tool that is an agent.
                return Err(denied("its parent has no sandbox that holds its own".to_owned()));
            }
        }
        Ok(Box::new(own))
    }
}

fn is_inside(path: &Path, root: &Path) -> bool {
    path.starts_with(root) && !path.components().any(|part| part == Component::ParentDir)
}

// ===== CallOptions =====

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
    pub(crate) timeout: Option<Duration>,
    pub(crate) token: Option<CancellationToken>,
    id: Option<Box<str>>,
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

    /// The id that a model gave the call. It stands in the call's span.
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.id = Some(id.into().into());
        self
    }

    pub(crate) fn model_id(&self) -> Option<&str> {
        self.id.as_deref()
    }
}
