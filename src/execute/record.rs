//! Room 12: the guard that writes the trace of a call, whatever happens to it.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

use super::run::Given;
use super::{Call, Stop, Stopped};
use crate::context::CallState;
use crate::error::{CallError, OutcomeCode};
use crate::event::EventKind;
use crate::keeper::Begin;
use crate::limit::{MOST_ERROR_TEXT, cut_plain, give_back};
use crate::scope::PlanScope;
use crate::slot::{SlotId, Why};
use crate::span::{self, Kept};
use crate::sync::lock;
use crate::tool::ToolResult;
use crate::trace::{NO_TOOL, Record, RecordText, ToolExecutionTrace};

/// Writes the trace of a call, whatever happens to it.
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own about the call")]
pub(super) struct CallRecord<'a> {
    scope: &'a Arc<PlanScope>,
    pub(super) call: u64,
    parent: u64,
    name: &'a str,
    pub(super) began: Instant,
    pub(super) tool: Option<u32>,
    /// The slot and generation of a managed instance.
    pub(super) instance: Option<(SlotId, u32)>,
    /// Room 9 was reached: what the call reserved is kept.
    pub(super) reached: bool,
    /// The quotas hold a place for it.
    pub(super) reserved: bool,
    pub(super) input_changed: bool,
    pub(super) cancelled: bool,
    pub(super) output_valid: Option<bool>,
    /// What is wrong with an output that is kept.
    pub(super) warning: Option<String>,
    pub(super) size: usize,
    written: bool,
    pub(super) given: Given,
    pub(super) span: Option<Box<Kept>>,
}

impl<'a> CallRecord<'a> {
    #[inline]
    pub(super) fn begin(call: &Call<'a>, number: u64) -> Self {
        let began = Instant::now();
        call.scope.clock(began);
        Self {
            scope: call.scope,
            call: number,
            parent: call.above.as_ref().map_or(0, |frame| frame.call),
            name: call.name,
            began,
            tool: None,
            instance: None,
            reached: false,
            reserved: false,
            input_changed: false,
            cancelled: false,
            output_valid: None,
            warning: None,
            size: 0,
            written: false,
            given: None,
            span: span::of_call(call.scope, number, call.name, &call.options, call.above.is_some()),
        }
    }

    /// Turns how the rooms ended into what the caller gets; trace and result agree.
    pub(super) fn close(
        mut self,
        ended: Option<Result<(), Stop>>,
    ) -> Result<ToolResult, CallError> {
        let took = self.began.elapsed();
        let mut result = match ended {
            Some(Ok(())) => {
                let warning = self.warning.take();
                self.write(took, OutcomeCode::Ok, warning);
                let output = self.given.take().and_then(Result::ok);
                ToolResult::succeeded(output.unwrap_or_default())
            }
            Some(Err(Stop(stopped))) => match *stopped {
                Stopped::Failed(code, mut message) => {
                    cut_plain(&mut message, self.scope.settings().max_output.max(MOST_ERROR_TEXT));
                    self.write(took, code, Some(message.clone()));
                    ToolResult::failed(code, message)
                }
                Stopped::Unsaid(code, message, trace) => {
                    self.write(took, code, Some(trace));
                    ToolResult::failed(code, message.to_owned())
                }
                Stopped::Broken(code, faults) => {
                    let message = faults.to_string();
                    self.write(took, code, Some(message.clone()));
                    let mut result = ToolResult::failed(code, message);
                    result.metadata.insert("faults".to_owned(), faults.to_json());
                    result
                }
                Stopped::Err(error) => return Err(self.refuse(took, error)),
            },
            // The hard end: the lease was revoked.
            None => {
                self.cancelled = true;
                let error = self.scope.ended_error();
                return Err(self.refuse(took, error));
            }
        };
        if self.input_changed {
            result.metadata.insert("input_changed".to_owned(), Value::Bool(true));
        }
        result.duration_ms = took.as_secs_f64() * 1000.0;
        Ok(result)
    }

    fn refuse(&mut self, took: Duration, error: CallError) -> CallError {
        self.cancelled |= matches!(error, CallError::Cancelled(_));
        self.write(took, error.code(), Some(error.to_string()));
        error
    }

    fn write(&mut self, took: Duration, outcome: OutcomeCode, error: Option<String>) {
        self.written = true;
        let scope = self.scope;
        let text = error.map(|mut error| {
            cut_plain(&mut error, MOST_ERROR_TEXT);
            let name = if self.tool.is_none() {
                self.name.chars().take(256).collect()
            } else {
                String::new()
            };
            Box::new(RecordText { name, error })
        });
        let record = Record {
            call: self.call,
            parent: self.parent,
            began: self.began,
            took: nanoseconds(took),
            tool: self.tool.unwrap_or(NO_TOOL),
            outcome,
            cancelled: self.cancelled,
            output_valid: self.output_valid,
            size: u32::try_from(self.size).unwrap_or(u32::MAX),
            text,
        };
        let settings = scope.settings();
        if self.reserved && !self.reached {
            self.give_back();
        }
        let told = scope.core.subscribers.is_heard().then(|| self.trace(&record));
        if self.span.is_some() {
            self.end_span(&record);
        }
        let state = lock(&scope.log).record(record, settings.trace_cap);
        if let Some(state) = state {
            self.close_state(&state, outcome);
        }
        if let Some(trace) = told {
            let (name, kind) = (trace.tool.clone(), EventKind::Finished(Box::new(trace)));
            scope.tell(Some(self.call), || (Some(name), kind));
        }
    }

    #[cold]
    fn trace(&self, record: &Record) -> ToolExecutionTrace {
        record.read(self.scope.id, self.scope.clock(self.began), &self.scope.tools)
    }

    #[cold]
    fn end_span(&self, record: &Record) {
        if let Some(span) = &self.span {
            span::end(span, record);
        }
    }

    /// Nothing of it reached the tool: the quotas get their place back.
    #[cold]
    fn give_back(&self) {
        let tool = self.tool.and_then(|tool| self.scope.tools.by_id(tool));
        if let Some(tool) = tool {
            give_back(&self.scope.settings().quotas, &tool.descriptor.name);
        }
    }

    fn close_state(&self, state: &CallState, outcome: OutcomeCode) {
        if outcome != OutcomeCode::Ok {
            state.cancel();
        }
        if let Some(reason) = state.taint() {
            self.retire(reason);
        }
    }

    /// The tool said that its instance is no good any more.
    #[cold]
    fn retire(&self, reason: Box<str>) {
        if let Some((slot, generation)) = self.instance {
            self.scope.retire(slot, generation, Why::Tainted(reason), Begin::There);
        }
    }
}

impl Drop for CallRecord<'_> {
    fn drop(&mut self) {
        if !self.written {
            let reached = if self.reached { "while the tool ran" } else { "before the tool ran" };
            self.write(
                self.began.elapsed(),
                OutcomeCode::Abandoned,
                Some(format!("the caller dropped the call {reached}")),
            );
        }
    }
}

/// 584 years of them fit.
fn nanoseconds(time: Duration) -> u64 {
    time.as_secs().saturating_mul(1_000_000_000).saturating_add(time.subsec_nanos().into())
}
