//! The loop of an agent: a model is told of the tools, asks for calls, reads their results, and goes
//! on until it has an answer. The model is a script, so nothing leaves this machine.
//!
//! You will see a call with a misspelled argument come back with what is wrong with it, the model
//! correct itself by that text, and four calls of one turn: the two readers before the writer run
//! together, the one after it sees what was written. The bars on a terminal come from the plan's
//! events.

#![expect(clippy::print_stdout, reason = "an example prints")]

use std::collections::HashMap;
use std::error::Error;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use toolscope::{
    EventKind, EventStream, FunctionTool, PlanHandle, PlanOptions, Progress, Provider, ToolCall,
    ToolExecutionContext, ToolFailure, ToolRuntime, ToolSpec,
};

type Failure = Box<dyn Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    toolscope::guardian::init();
    tokio::runtime::Runtime::new()?.block_on(run())
}

async fn run() -> Result<(), Failure> {
    let notes = Notes::default();
    let runtime = ToolRuntime::builder()
        .tool(forecast())
        .tool(save(&notes))
        .tool(list(&notes))
        .build()
        .await?;
    let options = PlanOptions::new().call_timeout(Duration::from_secs(10)).max_calls(20);
    let (counts, _report) = runtime
        .try_run(options, async |plan| {
            tokio::select! {
                biased;
                counts = talk(&plan) => counts,
                () = show(plan.subscribe()) => Err("the plan ended before the talk".into()),
            }
        })
        .await?;
    let Counts { calls, invalid, corrected } = counts?;
    println!("agent loop: {calls} calls, {invalid} invalid, {corrected} corrected");
    Ok(())
}

#[derive(Default)]
struct Counts {
    calls: usize,
    invalid: usize,
    corrected: usize,
}

/// The loop: what the model asks for is called, and what came of it is shown to the model.
async fn talk(plan: &PlanHandle) -> Result<Counts, Failure> {
    let mut model = ScriptedModel::new(&plan.definitions(Provider::Anthropic))?;
    let mut counts = Counts::default();
    let mut broken: Vec<String> = Vec::new();
    let mut shown = Vec::new();
    loop {
        let calls = match model.turn(&shown)? {
            Turn::Calls(calls) => calls,
            Turn::Answer(text) => {
                println!("model: {text}");
                return Ok(counts);
            }
        };
        shown.clear();
        for (call, result) in calls.iter().zip(plan.execute_batch(&calls).await) {
            println!("model: {} {}", call.name, call.arguments);
            counts.calls += 1;
            let text = match result {
                Ok(result) if result.code() == "invalid_input" => {
                    counts.invalid += 1;
                    broken.push(call.name.clone());
                    result.to_model_text()
                }
                Ok(result) => {
                    if let Some(at) = broken.iter().position(|name| *name == call.name) {
                        counts.corrected += usize::from(result.success);
                        broken.swap_remove(at);
                    }
                    result.to_model_text()
                }
                Err(error) => error.to_model_text(),
            };
            println!("tool:  {}", text.replace('\n', "\n       "));
            shown.push(text);
        }
    }
}

// ===== the model =====

enum Turn {
    Calls(Vec<ToolCall>),
    Answer(String),
}

/// What a model does, without one: it finds its tools by their descriptions, and mends its arguments
/// by the text of a fault.
struct ScriptedModel {
    turn: usize,
    forecast: String,
    save: String,
    list: String,
}

impl ScriptedModel {
    fn new(definitions: &Value) -> Result<Self, Failure> {
        let find = |word: &str| -> Result<String, String> {
            let tools = definitions.as_array().into_iter().flatten();
            let says = |tool: &&Value| {
                tool["description"].as_str().is_some_and(|said| said.contains(word))
            };
            let tool = tools.into_iter().find(says).ok_or(format!("no tool says `{word}`"))?;
            Ok(tool["name"].as_str().unwrap_or_default().to_owned())
        };
        Ok(Self { turn: 0, forecast: find("weather")?, save: find("Keeps")?, list: find("kept")? })
    }

    fn turn(&mut self, results: &[String]) -> Result<Turn, Failure> {
        self.turn += 1;
        let forecast =
            |key: &str, city: &str| ToolCall::new(self.forecast.as_str(), json!({ key: city }));
        Ok(match self.turn {
            1 => Turn::Calls(vec![forecast("town", "Oslo")]),
            2 => {
                // The fault names the property that is missing.
                let fault = results.first().map_or("", String::as_str);
                let before = fault.split("\" is missing").next().unwrap_or_default();
                let key = before.rsplit('"').next().unwrap_or_default();
                Turn::Calls(vec![forecast(key, "Oslo")])
            }
            3 => Turn::Calls(vec![
                forecast("city", "Bergen"),
                forecast("city", "Lima"),
                ToolCall::new(self.save.as_str(), json!({"text": "take an umbrella to Bergen"})),
                ToolCall::new(self.list.as_str(), json!({})),
            ]),
            _ => {
                let last = results.last().ok_or("the model was shown no result")?;
                let kept: Vec<String> = serde_json::from_str(last)?;
                Turn::Answer(format!("{}.", kept.join(", ")))
            }
        })
    }
}

// ===== the tools =====

/// Tells the weather of tomorrow in a city.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct City {
    /// The city, in English.
    city: String,
}

#[derive(Serialize, JsonSchema)]
struct Weather {
    degrees: i32,
    rain: bool,
}

fn forecast() -> FunctionTool {
    ToolSpec::new("weather/forecast").read_only().handler(
        async |ctx: ToolExecutionContext, City { city }| {
            for step in 1..=3 {
                ctx.check()?;
                ctx.progress(Progress::new(step.into()).of(3.0).message(city.as_str()));
                tokio::task::yield_now().await;
            }
            match city.as_str() {
                "Oslo" => Ok(Weather { degrees: -3, rain: false }),
                "Bergen" => Ok(Weather { degrees: 6, rain: true }),
                "Lima" => Ok(Weather { degrees: 24, rain: false }),
                _ => Err(ToolFailure::failed(format!("nobody measures in `{city}`"))),
            }
        },
    )
}

type Notes = Arc<Mutex<Vec<String>>>;

/// Keeps a note.
#[derive(Deserialize, JsonSchema)]
struct Note {
    text: String,
}

fn save(notes: &Notes) -> FunctionTool {
    let notes = Arc::clone(notes);
    ToolSpec::new("notes/save").writes().function(move |Note { text }| {
        notes.lock().map_err(|_| ToolFailure::failed("the notes are lost"))?.push(text);
        Ok(())
    })
}

fn list(notes: &Notes) -> FunctionTool {
    let notes = Arc::clone(notes);
    ToolSpec::new("notes/list").description("Lists what was kept").read_only().function(move |()| {
        Ok(notes.lock().map_err(|_| ToolFailure::failed("the notes are lost"))?.clone())
    })
}

// ===== the bars =====

/// A bar for each call that says how far it is.
async fn show(mut events: EventStream) {
    let screen = MultiProgress::new();
    let mut bars: HashMap<u64, ProgressBar> = HashMap::new();
    while let Some(event) = events.next().await {
        let Some(call) = event.call_id else { continue };
        match event.kind {
            EventKind::Progress(progress) => {
                let bar = bars.entry(call).or_insert_with(|| screen.add(ProgressBar::new(100)));
                let share = progress.done / progress.total.unwrap_or(progress.done);
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "from 0 to 100"
                )]
                bar.set_position((share.clamp(0.0, 1.0) * 100.0) as u64);
                bar.set_message(progress.message.unwrap_or_default());
            }
            EventKind::Finished(_) => {
                if let Some(bar) = bars.remove(&call) {
                    bar.finish_and_clear();
                }
            }
            _ => {}
        }
    }
}
