//! Spans for whoever collects traces of a service, by the names of OpenTelemetry's conventions for
//! generative AI.
//!
//! Target and field names are API. While nobody collects, nothing is made: one load tells. Arguments
//! and outputs are never in a span.

use std::borrow::Cow;

use tracing::dispatcher::with_default;
use tracing::field::Empty;
use tracing::{Level, Span, info_span, level_enabled};

use crate::descriptor::SourceKind;
use crate::error::{EndReason, OutcomeCode};
use crate::options::CallOptions;
use crate::scope::PlanScope;
use crate::sync::lock;
use crate::trace::Record;

/// The longest name in a span that is the caller's and no tool's, in characters.
const MOST_NAME: usize = 256;

/// A span of a plan or a call. It is made and closed with the subscriber of the span above it:
/// numbers of spans mean nothing to another one, which may be current by then, and a registry
/// panics at a number that it does not know.
#[derive(Debug)]
pub(crate) struct Kept(Option<Span>);

impl Kept {
    /// Makes a span under another, or, without one, under the caller's.
    fn under(above: Option<&Self>, make: impl Fn(&Span) -> Span) -> Option<Self> {
        let span = above.and_then(|above| {
            let above = above.span();
            above.with_subscriber(|(_, subscriber)| with_default(subscriber, || make(above)))
        });
        let span = span.unwrap_or_else(|| make(&Span::current()));
        (!span.is_disabled()).then_some(Self(Some(span)))
    }

    pub(crate) fn span(&self) -> &Span {
        self.0.as_ref().expect("BUG: a span is there until it is dropped")
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Some(span) = self.0.take() {
            let subscriber = span.with_subscriber(|(_, subscriber)| subscriber.clone());
            with_default(&subscriber.unwrap_or_default(), || drop(span));
        }
    }
}

/// The span of a plan.
pub(crate) fn of_plan(scope: &PlanScope) -> Option<Kept> {
    if !level_enabled!(Level::INFO) {
        return None;
    }
    let said = |key: &str| scope.settings().metadata.get(key).and_then(|value| value.as_str());
    let agent = said("gen_ai.agent.name");
    let above = scope.parent.as_ref().and_then(|parent| lock(&parent.log).span());
    Kept::under(above.as_deref(), |above| {
        info_span!(
            target: "toolscope",
            parent: above,
            "invoke_agent",
            otel.name = %Name("invoke_agent", agent),
            otel.kind = "internal",
            gen_ai.operation.name = "invoke_agent",
            gen_ai.agent.name = agent,
            gen_ai.agent.id = said("gen_ai.agent.id"),
            gen_ai.conversation.id = said("gen_ai.conversation.id"),
            toolscope.plan.id = scope.id.number(),
            toolscope.plan.end_reason = Empty,
        )
    })
}

/// The plan has settled.
pub(crate) fn end_plan(kept: &Kept, reason: EndReason) {
    kept.span().record("toolscope.plan.end_reason", reason.as_str());
}

/// The span of a call.
#[inline]
pub(crate) fn of_call(
    scope: &PlanScope,
    call: u64,
    name: &str,
    options: &CallOptions,
    is_nested: bool,
) -> Option<Box<Kept>> {
    if level_enabled!(Level::INFO) { begin(scope, call, name, options, is_nested) } else { None }
}

#[cold]
fn begin(
    scope: &PlanScope,
    call: u64,
    name: &str,
    options: &CallOptions,
    is_nested: bool,
) -> Option<Box<Kept>> {
    let tool = scope.resolve(name).ok();
    let name = match tool {
        Some(tool) => Cow::Borrowed(tool.descriptor.name.as_str()),
        None => Cow::Owned(name.chars().take(MOST_NAME).collect::<String>()),
    };
    let name = &*name;
    let kind = match tool.map(|tool| tool.descriptor.source) {
        Some(SourceKind::Mcp) => "extension",
        _ => "function",
    };
    let id = options.model_id().map_or_else(|| format!("{}-{call}", scope.id), str::to_owned);
    let said = |key: &str| scope.settings().metadata.get(key).and_then(|value| value.as_str());
    // A nested call stands under the one that makes it, which is entered now.
    let above = if is_nested { None } else { lock(&scope.log).span() };
    let kept = Kept::under(above.as_deref(), |above| {
        info_span!(
            target: "toolscope",
            parent: above,
            "execute_tool",
            otel.name = %Name("execute_tool", Some(name)),
            otel.kind = "internal",
            otel.status_code = Empty,
            gen_ai.operation.name = "execute_tool",
            gen_ai.tool.name = name,
            gen_ai.tool.call.id = id,
            gen_ai.tool.type = kind,
            gen_ai.tool.description = tool.map(|tool| tool.descriptor.description.as_str()),
            gen_ai.agent.name = said("gen_ai.agent.name"),
            gen_ai.conversation.id = said("gen_ai.conversation.id"),
            error.type = Empty,
            toolscope.plan.id = scope.id.number(),
            toolscope.call.id = call,
            toolscope.call.duration_ms = Empty,
            toolscope.call.result_size_bytes = Empty,
        )
    });
    kept.map(Box::new)
}

/// What is known of a call once it is over.
pub(crate) fn end(kept: &Kept, record: &Record) {
    let span = kept.span();
    let took = std::time::Duration::from_nanos(record.took);
    span.record("toolscope.call.duration_ms", took.as_secs_f64() * 1000.0);
    span.record("toolscope.call.result_size_bytes", record.size);
    if record.outcome != OutcomeCode::Ok {
        span.record("error.type", record.outcome.as_str());
        span.record("otel.status_code", "ERROR");
    }
}

/// The full name of a span, where that of `tracing` is its first word.
struct Name<'a>(&'a str, Option<&'a str>);

impl std::fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self(operation, of) = self;
        match of {
            Some(of) => write!(f, "{operation} {of}"),
            None => f.write_str(operation),
        }
    }
}
