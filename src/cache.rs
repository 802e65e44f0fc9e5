//! The lifecycle cache: the live plans, and who waits for an instance in one of them.

use std::any::Any;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use dashmap::DashMap;
use tokio::sync::watch;

use crate::contain::{BoxFuture, Contained};
use crate::context::{ActivationContext, PlanId};
use crate::error::{ActivationError, ActivationPhase};
use crate::fault::fault;
use crate::keeper::{Begin, Job};
use crate::obligation::{Active, Attempt, Held, Hold, Make, Owed, activate, given};
use crate::registry::ToolEntry;
use crate::scope::PlanScope;
use crate::slot::{Ask, Key, Limits, Refused, SlotId};
use crate::tool::{SharedActivation, ToolFailure};

/// The live plans by their id. A plan's slots are inside its entry; the path of a call does not
/// come here.
///
/// No guard of the map leaves this file.
pub(crate) struct ToolLifecycleCache {
    plans: DashMap<PlanId, Arc<PlanScope>, foldhash::fast::RandomState>,
}

impl ToolLifecycleCache {
    /// How many plans end between two looks at the memory that a burst may have left.
    const SHRINK_EVERY: u64 = 4096;

    pub(crate) fn new() -> Self {
        Self { plans: DashMap::default() }
    }

    pub(crate) fn insert(&self, scope: &Arc<PlanScope>) {
        self.plans.insert(scope.id, Arc::clone(scope));
    }

    pub(crate) fn remove(&self, id: PlanId) {
        // The entry is dropped outside the shard's lock.
        let removed = self.plans.remove(&id);
        if id.number() % Self::SHRINK_EVERY == 0 && self.plans.capacity() > 1024 {
            self.plans.shrink_to_fit();
        }
        drop(removed);
    }

    pub(crate) fn get(&self, id: PlanId) -> Option<Arc<PlanScope>> {
        self.plans.get(&id).map(|entry| Arc::clone(entry.value()))
    }

    pub(crate) fn all(&self) -> Vec<Arc<PlanScope>> {
        self.plans.iter().map(|entry| Arc::clone(entry.value())).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.plans.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.plans.len()
    }
}

/// What is asked for, and by whom.
struct Want<'a> {
    key: Key,
    label: &'a str,
    /// The host's explicit activation.
    by_hand: bool,
    begin: Begin,
    /// Whose attempt, or instance, is to hold what it is handed.
    holder: Option<&'a Arc<Attempt>>,
    /// The slot, of the same plan, whose activation waits for the answer.
    waiter: Option<SlotId>,
}

impl PlanScope {
    /// How often a slot tries again. What outlives plans is tried for as long as they ask.
    fn limits(&self) -> Limits {
        let limits = self.settings().limits;
        if self.is_root() { Limits { attempts: u32::MAX, ..limits } } else { limits }
    }

    /// The active instance of a managed tool; activates it if nobody has.
    pub(crate) async fn tool_instance(
        self: &Arc<Self>,
        tool: &Arc<ToolEntry>,
        by_hand: bool,
    ) -> Result<Arc<Active>, Refused> {
        let key = Key::Tool(tool.id);
        let begin = if tool.off_thread { Begin::There } else { Begin::Here };
        let label = tool.descriptor.name.as_str();
        let want = Want { key, label, by_hand, begin, holder: None, waiter: None };
        self.obtain(want, || Some(Make::Tool(Arc::clone(tool)))).await
    }

    /// The shared activation of that type and name; makes it if nobody has. The holder becomes its
    /// dependent.
    pub(crate) async fn shared_instance<T, F, Fut>(
        self: &Arc<Self>,
        name: &str,
        holder: &Arc<Attempt>,
        waiter: Option<SlotId>,
        make: F,
    ) -> Result<Arc<T>, Refused>
    where
        T: SharedActivation,
        F: FnOnce(ActivationContext) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, ToolFailure>> + Send + 'static,
    {
        let key = Key::Shared(std::any::TypeId::of::<T>(), name.into());
        let want = Want {
            key,
            label: name,
            by_hand: false,
            begin: Begin::Here,
            holder: Some(holder),
            waiter,
        };
        let mut make = Some(make);
        let active = self
            .obtain(want, || {
                let make = make.take()?;
                Some(Make::Shared(Box::new(move |ctx| -> BoxFuture<'static, _> {
                    Box::pin(async move {
                        let make = move || -> BoxFuture<'static, _> { Box::pin(make(ctx)) };
                        let shared = Arc::new(given(Contained::new(make)).await?);
                        let any = Arc::clone(&shared) as Arc<dyn Any + Send + Sync>;
                        Ok(Held::Shared { any, shared })
                    })
                })))
            })
            .await?;
        match &*active.held {
            Held::Shared { any, .. } => Ok(Arc::clone(any)
                .downcast()
                .unwrap_or_else(|_| unreachable!("BUG: the type is part of the key"))),
            Held::Tool(_) => unreachable!("BUG: a shared activation's key never names a tool"),
        }
    }

    /// Asks, and waits for as long as the answer is "wait". What it starts goes on without it.
    async fn obtain(
        self: &Arc<Self>,
        want: Want<'_>,
        mut make: impl FnMut() -> Option<Make>,
    ) -> Result<Arc<Active>, Refused> {
        let limits = self.limits();
        loop {
            let mut publish = None;
            let (answer, hold) = {
                let mut inner = self.inner();
                let answer = inner.slots.ask(&want.key, want.label, want.by_hand, limits, || {
                    let (sender, receiver) = watch::channel(None);
                    publish = Some(sender);
                    receiver
                });
                let hold = match (&answer, want.holder) {
                    (Ask::Ready(slot, _), Some(holder)) => {
                        inner.slots.depend(*slot);
                        Some((holder, Hold::new(self, *slot)))
                    }
                    _ => None,
                };
                (answer, hold)
            };
            let started = match (&answer, publish) {
                (Ask::Start(slot, ..), Some(publish)) => {
                    Some(Owed::activation(self, *slot, publish))
                }
                _ => None,
            };
            let (slot, mut verdict) = match answer {
                Ask::Ready(_, active) => {
                    let kept = hold.is_none_or(|(holder, hold)| holder.hold(hold));
                    return if kept { Ok(active) } else { Err(Refused::Deactivated) };
                }
                Ask::Refused(refused) => return Err(refused),
                Ask::Later(slot) => {
                    tokio::select! {
                        () = self.until(|inner| !inner.slots.is_busy(slot)) => {}
                        () = self.ended() => {}
                    }
                    continue;
                }
                Ask::Wait(slot, verdict) => (slot, verdict),
                Ask::Start(slot, verdict, spent) => {
                    drop(spent);
                    (slot, verdict)
                }
            };
            let _edge =
                want.waiter.map(|waiter| Edge::new(self, waiter, slot, want.label)).transpose()?;
            if let Some(owed) = started {
                self.core.ledger.started.fetch_add(1, Relaxed);
                let Some(make) = make() else {
                    drop(owed);
                    return Err(Refused::Activation(not_run(
                        want.label,
                        "it was replaced before it was handed out",
                    )));
                };
                let job: Job = Box::pin(activate(owed, make));
                if fault("activation-in-the-caller") {
                    job.await;
                } else {
                    self.core.submit(job, want.begin);
                }
            }
            tokio::select! {
                biased;
                told = verdict.wait_for(Option::is_some) => match told.as_deref() {
                    Ok(Some(verdict)) => verdict.clone()?,
                    _ => return Err(Refused::Activation(not_run(want.label, "its keeper ended"))),
                },
                () = self.ended() => return Err(self.ended_refusal()),
            }
        }
    }
}

fn not_run(label: &str, why: &str) -> ActivationError {
    ActivationError::new(label, ActivationPhase::NotRun, why)
}

/// The fact that the activation of one slot waits for another's, for as long as it does.
struct Edge<'a> {
    scope: &'a PlanScope,
    from: SlotId,
    to: SlotId,
}

impl<'a> Edge<'a> {
    fn new(scope: &'a PlanScope, from: SlotId, to: SlotId, label: &str) -> Result<Self, Refused> {
        let cycle = scope.inner().slots.wait_on(from, to);
        match cycle {
            Ok(()) => Ok(Self { scope, from, to }),
            Err(path) => {
                let path = path.join(" -> ");
                Err(Refused::Activation(ActivationError::new(label, ActivationPhase::Cycle, path)))
            }
        }
    }
}

impl Drop for Edge<'_> {
    fn drop(&mut self) {
        self.scope.inner().slots.wait_over(self.from, self.to);
    }
}
