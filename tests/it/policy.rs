//! P12: the gate, a row of capability against rights at a time.

use serde_json::json;
use toolscope::test_util::{Probe, ProbeCounts};
use toolscope::{
    BoundResource, CallError, OutcomeCode, PlanOptions, ResourceSlot, ToolCapability, ToolError,
    ToolRuntime, ToolRuntimeError, ToolSpec,
};

use crate::support::{Fixture, paused};

/// Calls a probe of that capability in a plan of those rights: `Ok`, or the code of the refusal, which started nothing.
async fn gate(capability: ToolCapability, rights: PlanOptions) -> OutcomeCode {
    let probe = Probe::new("probe").capability(capability);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.begin(rights).unwrap();
    let code = match plan.execute("probe", json!({})).await {
        Ok(result) => {
            assert!(result.success, "{result:?}");
            OutcomeCode::Ok
        }
        Err(error) => {
            assert_eq!(probe.counts(), ProbeCounts::default());
            error.code()
        }
    };
    let trace = &plan.traces()[0];
    assert_eq!(trace.outcome, code);
    fixture.end().await;
    code
}

fn undeclared() -> ToolCapability {
    ToolCapability::default()
}

fn read_only() -> PlanOptions {
    PlanOptions::new().read_only()
}

fn checkpoints() -> PlanOptions {
    PlanOptions::new().require_checkpoints()
}

// ===== read-only =====

/// cases/upstream.md A5.
#[tokio::test(start_paused = true)]
async fn p12_a_read_only_plan_runs_a_reader() {
    let code = gate(ToolCapability::read_only(), read_only()).await;
    assert_eq!(code, OutcomeCode::Ok);
}

/// cases/upstream.md A3.
#[tokio::test(start_paused = true)]
async fn p12_a_read_only_plan_refuses_a_writer() {
    let code = gate(ToolCapability::writes(), read_only()).await;
    assert_eq!(code, OutcomeCode::AccessDenied);
}

#[tokio::test(start_paused = true)]
async fn p12_a_read_only_plan_refuses_a_tool_that_declares_nothing() {
    let code = gate(undeclared(), read_only()).await;
    assert_eq!(code, OutcomeCode::AccessDenied);
}

#[tokio::test(start_paused = true)]
async fn p12_a_read_only_plan_refuses_a_writer_that_could_be_rolled_back() {
    let code = gate(ToolCapability::writes().checkpointable(), read_only()).await;
    assert_eq!(code, OutcomeCode::AccessDenied);
}

#[tokio::test(start_paused = true)]
async fn p12_a_read_only_plan_refuses_a_writer_whatever_else_it_is_allowed() {
    let capability = ToolCapability::writes().idempotent().is_unsafe();
    let code = gate(capability, read_only().allow_unsafe()).await;
    assert_eq!(code, OutcomeCode::AccessDenied);
}

#[tokio::test(start_paused = true)]
async fn p12_an_ordinary_plan_runs_a_tool_that_declares_nothing() {
    let code = gate(undeclared(), PlanOptions::new()).await;
    assert_eq!(code, OutcomeCode::Ok);
}

// ===== checkpoints =====

#[tokio::test(start_paused = true)]
async fn p12_a_plan_with_checkpoints_runs_a_reader() {
    let code = gate(ToolCapability::read_only(), checkpoints()).await;
    assert_eq!(code, OutcomeCode::Ok);
}

#[tokio::test(start_paused = true)]
async fn p12_a_plan_with_checkpoints_refuses_a_writer_that_cannot_have_one() {
    let code = gate(ToolCapability::writes(), checkpoints()).await;
    assert_eq!(code, OutcomeCode::CheckpointRequired);
}

#[tokio::test(start_paused = true)]
async fn p12_a_plan_with_checkpoints_refuses_a_tool_that_declares_nothing() {
    let code = gate(undeclared(), checkpoints()).await;
    assert_eq!(code, OutcomeCode::CheckpointRequired);
}

/// cases/upstream.md A6: without a checkpointer the writer does not run.
#[tokio::test(start_paused = true)]
async fn p12_a_plan_with_checkpoints_refuses_a_writer_while_there_is_no_checkpointer() {
    let code = gate(ToolCapability::writes().checkpointable(), checkpoints()).await;
    assert_eq!(code, OutcomeCode::CheckpointRequired);
}

// ===== approval =====

#[tokio::test(start_paused = true)]
async fn p12_an_unsafe_tool_is_refused_without_an_approver() {
    let code = gate(ToolCapability::writes().is_unsafe(), PlanOptions::new()).await;
    assert_eq!(code, OutcomeCode::ApprovalRequired);
}

#[tokio::test(start_paused = true)]
async fn p12_an_unsafe_reader_is_refused_without_an_approver() {
    let code = gate(ToolCapability::read_only().is_unsafe(), read_only()).await;
    assert_eq!(code, OutcomeCode::ApprovalRequired);
}

#[tokio::test(start_paused = true)]
async fn p12_a_plan_can_allow_unsafe_tools() {
    let rights = PlanOptions::new().allow_unsafe();
    let code = gate(ToolCapability::writes().is_unsafe(), rights).await;
    assert_eq!(code, OutcomeCode::Ok);
}

#[tokio::test(start_paused = true)]
async fn p12_a_tool_that_a_person_must_approve_is_refused_without_an_approver() {
    let capability = ToolCapability::read_only().human_approval_required();
    let code = gate(capability, PlanOptions::new()).await;
    assert_eq!(code, OutcomeCode::ApprovalRequired);
}

#[tokio::test(start_paused = true)]
async fn p12_to_allow_unsafe_tools_is_no_approval() {
    let capability = ToolCapability::writes().is_unsafe().human_approval_required();
    let code = gate(capability, PlanOptions::new().allow_unsafe()).await;
    assert_eq!(code, OutcomeCode::ApprovalRequired);
}

// ===== resources =====

/// Calls a tool that gives back where its database is, in a plan that binds what is given.
async fn locate(slot: ResourceSlot, bound: Option<BoundResource>) -> Result<String, CallError> {
    let tool = ToolSpec::new("locate").read_only().resource(slot).handler(
        async |ctx, _: serde_json::Value| {
            let database = ctx.resource("db");
            Ok(database.map_or("nowhere".to_owned(), |bound| bound.location.clone()))
        },
    );
    let fixture = Fixture::with(paused().tool(tool), &[]).await;
    let rights = bound.into_iter().fold(read_only(), PlanOptions::resource);
    let plan = fixture.begin(rights).unwrap();
    let result = plan.execute("locate", json!({})).await;
    fixture.end().await;
    result.map(|result| result.output.as_str().unwrap().to_owned())
}

#[tokio::test(start_paused = true)]
async fn p12_a_tool_gets_the_resource_that_the_plan_binds() {
    let bound = BoundResource::new("db", "postgres", "db.example:5432");
    let located = locate(ResourceSlot::required("db", "postgres"), Some(bound)).await;
    assert_eq!(located.unwrap(), "db.example:5432");
}

#[tokio::test(start_paused = true)]
async fn p12_a_tool_whose_resource_is_not_bound_is_refused() {
    let error = locate(ResourceSlot::required("db", "postgres"), None).await;
    let error = error.unwrap_err();
    assert_eq!(error.code(), OutcomeCode::AccessDenied);
    assert!(error.to_string().contains("`db`"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn p12_a_resource_of_another_type_is_not_the_one() {
    let bound = BoundResource::new("db", "sqlite", "here.db");
    let error = locate(ResourceSlot::required("db", "postgres"), Some(bound)).await;
    assert_eq!(error.unwrap_err().code(), OutcomeCode::AccessDenied);
}

#[tokio::test(start_paused = true)]
async fn p12_an_optional_resource_may_be_missing() {
    let located = locate(ResourceSlot::optional("db", "postgres"), None).await;
    assert_eq!(located.unwrap(), "nowhere");
}

// ===== activation by hand =====

/// Activates a probe of that capability by hand: the code of the refusal, which started nothing.
async fn refused_by_hand(capability: ToolCapability, rights: PlanOptions) -> OutcomeCode {
    let probe = Probe::new("probe").capability(capability);
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.begin(rights).unwrap();
    let error = plan.activate("probe").await.unwrap_err();
    assert_eq!(probe.counts(), ProbeCounts::default());
    fixture.end().await;
    error.code()
}

#[tokio::test(start_paused = true)]
async fn p12_a_read_only_plan_does_not_activate_a_writer_by_hand() {
    let code = refused_by_hand(ToolCapability::writes(), read_only()).await;
    assert_eq!(code, OutcomeCode::AccessDenied);
}

#[tokio::test(start_paused = true)]
async fn p12_a_plan_with_checkpoints_does_not_activate_a_writer_by_hand() {
    let code = refused_by_hand(ToolCapability::writes(), checkpoints()).await;
    assert_eq!(code, OutcomeCode::CheckpointRequired);
}

#[tokio::test(start_paused = true)]
async fn p12_an_unsafe_tool_is_not_activated_by_hand_without_an_approver() {
    let code = refused_by_hand(ToolCapability::writes().is_unsafe(), PlanOptions::new()).await;
    assert_eq!(code, OutcomeCode::ApprovalRequired);
}

#[tokio::test(start_paused = true)]
async fn p12_an_unknown_tool_is_not_activated_by_hand() {
    let fixture = Fixture::paused(&[]).await;
    let plan = fixture.plan();
    let error = plan.activate("nobody").await.unwrap_err();
    assert_eq!(error.code(), OutcomeCode::NotFound);
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_an_ended_plan_activates_nothing_by_hand() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    plan.cancel();
    assert!(matches!(plan.activate("probe").await, Err(CallError::Cancelled(_))));
    assert_eq!(probe.counts(), ProbeCounts::default());
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn p12_what_was_activated_by_hand_is_gated_at_each_call_too() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.plan();
    plan.activate("probe").await.unwrap();
    let child = plan.begin_child(read_only()).unwrap();
    let error = child.execute("probe", json!({})).await.unwrap_err();
    assert_eq!(error.code(), OutcomeCode::AccessDenied);
    assert_eq!(probe.counts().executions, 0);
    fixture.end().await;
}

// ===== what a refusal says =====

/// cases/upstream.md A11: the error names the tool and the rule.
#[tokio::test(start_paused = true)]
async fn p12_a_refusal_names_the_tool_and_the_rule() {
    let probe = Probe::new("files/write");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.begin(read_only()).unwrap();
    let error = plan.execute("files/write", json!({})).await.unwrap_err();
    let CallError::Runtime(ToolRuntimeError::AccessDenied { tool, reason, .. }) = error else {
        panic!("another error: {error}");
    };
    assert_eq!(tool, "files/write");
    assert!(reason.contains("read-only"), "{reason}");
    fixture.end().await;
}

// ===== contradictions =====

async fn registration(capability: ToolCapability) -> Result<ToolRuntime, ToolError> {
    let probe = Probe::new("probe").capability(capability);
    ToolRuntime::builder().tool(probe.tool()).build().await
}

#[tokio::test]
async fn p12_a_reader_that_writes_is_not_registered() {
    let mut capability = ToolCapability::read_only();
    capability.writes = true;
    let error = registration(capability).await.unwrap_err();
    assert_eq!(error.tool_name, "local/probe");
    assert_eq!(error.error_type, "RegistrationError");
    assert!(error.details.contains("`writes`"), "{error}");
}

#[tokio::test]
async fn p12_a_reader_with_checkpoints_is_not_registered() {
    let capability = ToolCapability::read_only().checkpointable();
    let error = registration(capability).await.unwrap_err();
    assert!(error.details.contains("`checkpointable`"), "{error}");
}

/// cases/upstream.md A1: what the result says and what the trace says is one thing.
#[tokio::test(start_paused = true)]
async fn p13_a_refused_writer_is_refused_in_the_trace_too() {
    let probe = Probe::new("probe");
    let fixture = Fixture::paused(&[&probe]).await;
    let plan = fixture.begin(read_only()).unwrap();
    let returned = plan.execute("probe", json!({})).await;
    let trace = crate::call::traced(&plan, &returned);
    assert!(!trace.success());
    assert!(trace.error.unwrap().contains("read-only"));
    fixture.end().await;
}
