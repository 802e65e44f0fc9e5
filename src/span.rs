//! Spans for whoever collects traces of a service, by the names of OpenTelemetry's conventions for
//! generative AI.
//!
//! Target and field names are API. While nobody collects, nothing is made: one load tells. Arguments
//! and outputs are never in a span.

use tracing::field::{Empty, display};
use tracing::{Level, Span, info_span, level_enabled};

use crate::descriptor::SourceKind;
use crate::error::{EndReason, OutcomeCode};
use crate::execute::CallOptions;
use crate::scope::PlanScope;
use crate::sync::lock;
use crate::trace::Record;

/// The span of a plan.
pub(crate) fn of_plan(scope: &PlanScope) -> Option<Span> {
    if !level_enabled!(Level::INFO) {
        return None;
    }
    let said = |key: &str| scope.settings().metadata.get(key).and_then(|value| value.as_str());
    let agent = said("gen_ai.agent.name");
    let parent = scope.parent.as_ref().and_then(|parent| lock(&parent.log).span().cloned());
    let parent = parent.unwrap_or_else(Span::current);
    let span = info_span!(
        target: "toolscope",
        parent: &parent,
        "invoke_agent",
        otel.name = %Name("invoke_agent", agent),
        otel.kind = "internal",
        gen_ai.operation.name = "invoke_agent",
        gen_ai.agent.name = agent,
        gen_ai.agent.id = said("gen_ai.agent.id"),
        gen_ai.conversation.id = said("gen_ai.conversation.id"),
        toolscope.plan.id = scope.id.number(),
        toolscope.plan.end_reason = Empty,
    );
    (!span.is_disabled()).then_some(span)
}

/// The span of a call.
#[inline]
pub(crate) fn of_call(
    scope: &PlanScope,
    call: u64,
    name: &str,
    options: &CallOptions,
    is_nested: bool,
) -> Option<Box<Span>> {
    if level_enabled!(Level::INFO) { begin(scope, call, name, options, is_nested) } else { None }
}

#[cold]
fn begin(
    scope: &PlanScope,
    call: u64,
    name: &str,
    options: &CallOptions,
    is_nested: bool,
) -> Option<Box<Span>> {
    let tool = scope.resolve(name).ok();
    let name = tool.map_or(name, |tool| tool.descriptor.name.as_str());
    let kind = match tool.map(|tool| tool.descriptor.source) {
        Some(SourceKind::Mcp) => "extension",
        _ => "function",
    };
    let id = options.model_id().map_or_else(|| format!("{}-{call}", scope.id), str::to_owned);
    let said = |key: &str| scope.settings().metadata.get(key).and_then(|value| value.as_str());
    // A nested call stands under the one that makes it, which is entered now.
    let parent = if is_nested { None } else { lock(&scope.log).span().cloned() };
    let parent = parent.unwrap_or_else(Span::current);
    let span = info_span!(
        target: "toolscope",
        parent: &parent,
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
    );
    (!span.is_disabled()).then(|| Box::new(span))
}

/// What is known of a plan once it is over.
pub(crate) fn end_plan(span: &Span, reason: EndReason) {
    span.record("toolscope.plan.end_reason", display(reason));
}

/// What is known of a call once it is over.
pub(crate) fn end(span: &Span, record: &Record) {
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
