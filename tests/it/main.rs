//! The integration tests: one binary, a concern in each file. Every test ends with its ledger balanced.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::explicit_write,
    reason = "a test may fail, spawn, block and print"
)]

// The fixture: a runtime whose ledger is checked against the probes' own counts.
mod support;
// What the lifecycle tests share: hooks round a probe's stages, calls to poll by hand, a blocker.
mod hooks;

// Random numbers from a seed that is printed.
mod dice;

// P1 to P3: at most one activation, which belongs to the plan; failed attempts.
mod activation;
// P4, P7: exactly one deactivation, bounded and contained, by every way a plan can end.
mod deactivation;
// P5: leases, grace, the hard end, overrun.
mod drain;
// P6: shared activations, dependents, cycles, the root scope.
mod shared;
// P8, P9: the end of a plan and of the runtime; drops.
mod ending;
// Explicit activate and deactivate, taint, generations.
mod generations;
// P15: child plans and nested calls.
mod children;
// P11 to P14: the rooms of a call, their order, their outcomes, their traces.
mod call;
// Every outcome of a call, through every front; the order of the rooms.
mod rooms;
// What a plan and a runtime tell while it happens.
mod event;
// The spans of a plan and of its calls.
mod span;
// What tools, models and schemas do at their worst.
mod hostile;
// The gate: capability against rights.
mod policy;
// Schemas, and the JSON Schema test suite.
mod schema;
// Room 5: who is asked, and what the answer covers.
mod approval;
// The hook round every call.
mod layer;
// Quotas, calls and activations at once, the size of outputs.
mod limit;
// Names: one parser, one encoding.
mod name;
// The registry and its snapshots.
mod registry;
// What a plan sees of a registry that changes under way.
mod sync;
// The front of the tool card: the four stages by hand.
mod runner;
// The front of a model: arguments as text, several calls in a turn, what it is told.
mod batch;
// What model providers are told of a tool.
mod definition;
// Function tools and typed handlers.
mod function;
// What is serialised: the outputs of typed tools, and all that the crate tells.
mod serial;
// P16 and the runtime's statistics.
mod ledger;
// Public failure reports, as tests of what is right.
mod cases;
// Every public async fn, cut at every await.
mod cut;
// Many plans, many ways to end, callers' runtimes that end mid-flight.
mod stress;
// Random operations on one plan against a plain reference.
mod model;
// Send, Sync and Unpin of the public types.
mod auto_traits;
// Rules that the compiler does not keep.
mod tidy;
