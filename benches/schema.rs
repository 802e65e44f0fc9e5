//! What checking costs: a schema by itself, and a call with and without schemas.
//!
//! `cargo bench --bench schema`.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a bench prints and may fail")]
#![expect(clippy::cast_precision_loss, reason = "a bench has figures far below 2^52")]

#[path = "support/measure.rs"]
mod measure;
#[path = "support/tools.rs"]
mod tools;

use std::hint::black_box;

use measure::{Effort, Table, against_bar};
use serde_json::{Value, json};
use tokio::runtime::Builder;
use tools::AddTool;
use toolscope::{PlanOptions, Schema, ToolRuntime};

fn main() {
    let effort = Effort::of_this_run();
    schemas(effort);
    println!();
    calls(effort);
}

/// Two numbers; what a typical tool takes; 5,000 objects in an array.
fn schemas(effort: Effort) {
    let two = json!({
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    });
    let typical = json!({
        "type": "object",
        "properties": {
            "path": {"type": "string", "minLength": 1, "maxLength": 4096},
            "limit": {"type": "integer", "minimum": 1, "maximum": 1000},
            "mode": {"enum": ["text", "lines", "bytes"]},
            "ranges": {
                "type": "array",
                "maxItems": 20,
                "items": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
            },
            "encoding": {"type": "string", "pattern": "^[a-z0-9-]+$"},
        },
        "required": ["path"],
        "additionalProperties": false,
    });
    let many = json!({"type": "array", "items": typical});
    let call = json!({
        "path": "src/lib.rs",
        "limit": 100,
        "mode": "lines",
        "ranges": [[1, 20], [40, 60]],
        "encoding": "utf-8",
    });
    let broken = json!({"pth": "src/lib.rs", "limit": 0, "mode": "words"});
    let calls = Value::from(vec![call.clone(); 5_000]);

    let compiled = |schema: &Value| Schema::new(schema).unwrap();
    let (add, tool, array) = (compiled(&two), compiled(&typical), compiled(&many));
    let numbers = json!({"a": 40, "b": 2});
    let is_valid = |schema: &Schema, value: &Value, times: u64| {
        for _ in 0..times {
            black_box(schema.is_valid(black_box(value)));
        }
    };
    let mut table = Table::default();
    table.row("two numbers, valid", |times| is_valid(&add, &numbers, times));
    table.row("a typical input, valid", |times| is_valid(&tool, &call, times));
    table.row("5,000 of them in an array, valid", |times| is_valid(&array, &calls, times));
    table.row("a typical input, five faults, told in words", |times| {
        for _ in 0..times {
            black_box(tool.check(black_box(&broken)).unwrap_err().to_string());
        }
    });
    table.row("the schema of two numbers, compiled", |times| {
        for _ in 0..times {
            black_box(Schema::new(black_box(&two)).unwrap());
        }
    });
    table.row("the schema of a typical input, compiled", |times| {
        for _ in 0..times {
            black_box(Schema::new(black_box(&typical)).unwrap());
        }
    });
    table.measure(effort);
    table.print();
}

fn calls(effort: Effort) {
    let tokio = Builder::new_current_thread().enable_all().build().unwrap();
    let mut without = AddTool::new("without");
    (without.descriptor.input_schema, without.descriptor.output_schema) = (None, None);
    let builder = ToolRuntime::builder().tool(AddTool::new("with")).tool(without);
    let runtime = tokio.block_on(builder.build()).unwrap();
    let plan = runtime.begin(PlanOptions::new().trace_cap(100)).unwrap();
    let (numbers, broken) = (json!({"a": 40, "b": 2}), json!({"a": 40, "c": 2}));
    let execute = |tool: &str, input: &Value, times: u64| {
        tokio.block_on(async {
            for _ in 0..times {
                black_box(plan.execute(tool, black_box(input)).await).unwrap();
            }
        });
    };
    let mut table = Table::default();
    table.row("execute, no schema", |times| execute("without", &numbers, times));
    table.row("execute, both schemas", |times| execute("with", &numbers, times));
    table.row("execute, an input with three faults", |times| execute("with", &broken, times));
    table.measure(effort);
    table.print();
    let ratio = table.ratio("execute, both schemas", "execute, no schema");
    against_bar("execute: both schemas / none", ratio, "<=", 1.5, "x");
}
