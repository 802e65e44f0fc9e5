//! What the path of a call, and a plan, take from the heap. A binary of its own: the counting
//! allocator counts for all.
//!
//! Counts are the measuring thread's, so the calls are polled by hand and what the keeper does is
//! not in them.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test may fail, and shows what it measured"
)]

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use allocation_counter::{AllocationInfo, measure};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use toolscope::test_util::execution_context;
use toolscope::{
    ActivationContext, CallOptions, Plan, PlanOptions, Tool, ToolCapability, ToolDescriptor,
    ToolExecutionContext, ToolFailure, ToolInstance, ToolOutput, ToolRuntime, ToolSpec,
    async_trait,
};

/// Calls per measurement.
const CALLS: u64 = 100;
/// Plans alive at once in a measurement.
const PLANS: usize = 10_000;

// ===== the tool =====

struct Add;

#[async_trait]
impl ToolInstance for Add {
    async fn execute(
        &self,
        _: &ToolExecutionContext,
        input: &Value,
    ) -> Result<ToolOutput, ToolFailure> {
        let sum = input["a"].as_i64().unwrap_or(0) + input["b"].as_i64().unwrap_or(0);
        Ok(json!({"sum": sum}).into())
    }
}

struct AddTool {
    descriptor: ToolDescriptor,
    managed: bool,
}

impl AddTool {
    fn new(name: &str, managed: bool) -> Self {
        let descriptor = ToolDescriptor::new(name.parse().unwrap());
        Self { descriptor: descriptor.capability(ToolCapability::read_only()), managed }
    }

    fn max_concurrent(mut self, limit: usize) -> Self {
        self.descriptor.max_concurrent = Some(limit);
        self
    }
}

#[async_trait]
impl Tool for AddTool {
    fn descriptor(&self) -> &ToolDescriptor {
        &self.descriptor
    }

    fn immediate(&self) -> Option<Arc<dyn ToolInstance>> {
        (!self.managed).then(|| Arc::new(Add) as Arc<dyn ToolInstance>)
    }

    async fn activate(&self, _: &ActivationContext) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        Ok(Arc::new(Add))
    }
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Numbers {
    a: i64,
    b: i64,
}

fn runtime() -> ToolRuntime {
    let typed = async |_ctx, args: Numbers| Ok(args.a + args.b);
    let builder = ToolRuntime::builder()
        .tool(AddTool::new("add", false))
        .tool(AddTool::new("managed", true))
        .tool(AddTool::new("permitted", false).max_concurrent(4))
        .tool(ToolSpec::new("typed").read_only().handler(typed));
    ready(builder.build()).unwrap()
}

// ===== measuring =====

/// Drives what is ready at once.
fn ready<T>(work: impl Future<Output = T>) -> T {
    match pin!(work).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("the work is not ready at once"),
    }
}

/// What the direct boxed call of the instance allocates.
fn direct(plan: &Plan, input: &Value) -> AllocationInfo {
    let (instance, ctx): (Arc<dyn ToolInstance>, _) = (Arc::new(Add), execution_context(plan));
    measure(|| {
        for _ in 0..CALLS {
            assert!(ready(instance.execute(&ctx, input)).is_ok());
        }
    })
}

/// Checks that warm calls of a plan allocate what the direct calls do, and not one more.
#[track_caller]
fn assert_warm_calls_allocate_nothing(options: PlanOptions, tool: &str, call: &CallOptions) {
    let runtime = runtime();
    // The trace list grows to its cap in the warm-up, and no more.
    let plan = runtime.begin(options.trace_cap(16)).unwrap();
    let input = json!({"a": 1, "b": 2});
    let execute = || {
        let result = ready(plan.execute_with(tool, &input, call.clone())).unwrap();
        assert!(result.success);
    };
    for _ in 0..20 {
        execute();
    }
    let through_the_plan = measure(|| (0..CALLS).for_each(|_| execute()));
    let direct = direct(&plan, &input);
    assert_eq!(direct.count_total % CALLS, 0);
    assert_eq!(
        (through_the_plan.count_total, through_the_plan.bytes_total),
        (direct.count_total, direct.bytes_total),
        "{CALLS} calls through the plan, against {CALLS} direct ones"
    );
    ready(plan.finish());
    assert_eq!(runtime.stats().open, 0);
}

// ===== the warm path =====

#[test]
fn a_warm_call_of_an_immediate_tool_allocates_nothing() {
    assert_warm_calls_allocate_nothing(PlanOptions::new(), "add", &CallOptions::new());
}

#[test]
fn a_warm_call_of_a_managed_tool_allocates_nothing() {
    assert_warm_calls_allocate_nothing(PlanOptions::new(), "managed", &CallOptions::new());
}

#[test]
fn a_warm_call_by_the_full_name_allocates_nothing() {
    assert_warm_calls_allocate_nothing(PlanOptions::new(), "local/add", &CallOptions::new());
}

#[test]
fn a_warm_call_under_a_permit_of_the_tool_allocates_nothing() {
    assert_warm_calls_allocate_nothing(PlanOptions::new(), "permitted", &CallOptions::new());
}

#[test]
fn a_warm_call_under_a_permit_of_the_plan_allocates_nothing() {
    let options = PlanOptions::new().max_concurrent(4);
    assert_warm_calls_allocate_nothing(options, "managed", &CallOptions::new());
}

#[test]
fn a_warm_call_of_a_read_only_plan_allocates_nothing() {
    let options = PlanOptions::new().read_only();
    assert_warm_calls_allocate_nothing(options, "add", &CallOptions::new());
}

#[test]
fn a_warm_call_with_a_timeout_allocates_nothing_while_the_tool_is_ready() {
    let call = CallOptions::new().timeout(Duration::from_secs(60));
    assert_warm_calls_allocate_nothing(PlanOptions::new(), "add", &call);
}

#[test]
fn a_warm_call_with_a_token_allocates_nothing_while_the_tool_is_ready() {
    let call = CallOptions::new().token(CancellationToken::new());
    assert_warm_calls_allocate_nothing(PlanOptions::new(), "add", &call);
}

#[test]
fn a_warm_call_allocates_nothing_once_the_last_subscriber_is_dropped() {
    let runtime = runtime();
    let plan = runtime.begin(PlanOptions::new().trace_cap(16)).unwrap();
    let input = json!({"a": 1, "b": 2});
    let execute = || assert!(ready(plan.execute("add", &input)).unwrap().success);
    let count = || measure(|| (0..CALLS).for_each(|_| execute())).count_total;
    (0..20).for_each(|_| execute());
    let unheard = count();
    let (of_the_plan, of_all) = (plan.subscribe(), runtime.subscribe());
    assert!(count() > unheard, "each event is made for whoever listens");
    drop((of_the_plan, of_all));
    assert_eq!(count(), unheard);
    ready(plan.finish());
}

#[test]
fn a_typed_handler_allocates_no_more_than_its_boxed_future() {
    let runtime = runtime();
    let plan = runtime.begin(PlanOptions::new().trace_cap(16)).unwrap();
    let input = json!({"a": 1, "b": 2});
    let execute = || assert!(ready(plan.execute("typed", &input)).unwrap().success);
    (0..20).for_each(|_| execute());
    let measured = measure(|| (0..CALLS).for_each(|_| execute()));
    assert_eq!(measured.count_total, CALLS, "the boxed future is the one allocation");
    ready(plan.finish());
}

// ===== the weight of a plan =====

/// The heap bytes of a plan, its entry in the runtime's map included, with so many calls behind it.
fn plan_bytes(calls: usize) -> i64 {
    let runtime = runtime();
    let input = json!({"a": 1, "b": 2});
    let mut plans = Vec::with_capacity(PLANS);
    let measured = measure(|| {
        for _ in 0..PLANS {
            let plan = runtime.begin(PlanOptions::new()).unwrap();
            for _ in 0..calls {
                assert!(ready(plan.execute("add", &input)).unwrap().success);
            }
            plans.push(plan);
        }
    });
    let count = i64::try_from(PLANS).unwrap();
    let bytes = measured.bytes_current.div_euclid(count) + 1;
    println!("a plan with {calls} calls: {bytes} bytes of heap");
    bytes
}

#[test]
fn an_idle_plan_takes_at_most_400_bytes() {
    let bytes = plan_bytes(0);
    assert!(bytes <= 400, "{bytes} bytes");
}

#[test]
fn a_plan_with_three_traces_takes_at_most_1000_bytes() {
    let bytes = plan_bytes(3);
    assert!(bytes <= 1000, "{bytes} bytes");
}

#[test]
fn an_ended_plan_leaves_nothing_on_the_heap() {
    let runtime = runtime();
    let input = json!({"a": 1, "b": 2});
    let run = || {
        let plan = runtime.begin(PlanOptions::new()).unwrap();
        assert!(ready(plan.execute("managed", &input)).unwrap().success);
        drop(ready(plan.finish()));
    };
    (0..PLANS).for_each(|_| run());
    let measured = measure(|| (0..PLANS).for_each(|_| run()));
    assert!(measured.bytes_current <= 1024, "{} bytes are left", measured.bytes_current);
}
