//! The ways a process can end, as processes: this binary runs itself with a way to end in its environment.
//!
//! Twenty plans are in flight, each with an activation that wrote a line to a file; where the process leaves in order,
//! each has a second line when it is gone.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::exit,
    reason = "a test may fail and spawn; the process's output and its end are what is tested"
)]

use std::fs::OpenOptions;
use std::future::{pending, poll_fn};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::pin::{Pin, pin};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Once, mpsc};
use std::task::Poll;
use std::time::Duration;

use libtest_mimic::{Arguments, Trial};
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use toolscope::test_util::{Probe, Step};
use toolscope::{
    ActivationContext, DeactivationContext, Deadlines, OutcomeCode, PlanOptions, Tool,
    ToolDescriptor, ToolExecutionContext, ToolFailure, ToolInstance, ToolOutput, ToolRuntime,
    async_trait,
};

const WAY: &str = "TOOLSCOPE_EXIT_WAY";
const LOG: &str = "TOOLSCOPE_EXIT_LOG";
const PLANS: usize = 20;
/// The way in which the process can have no thread but its first.
const WITHOUT_THREADS: &str = "without-threads";

fn main() {
    match (std::env::var(WAY), std::env::var_os(LOG)) {
        (Ok(way), Some(log)) => child(&way, log.into()),
        _ => libtest_mimic::run(&Arguments::from_args(), trials()).exit(),
    }
}

// ===== the tests =====

fn trial(name: &str, test: impl FnOnce() + Send + 'static) -> Trial {
    Trial::test(name, || {
        test();
        Ok(())
    })
}

fn trials() -> Vec<Trial> {
    let mut trials = vec![
        trial("p4_return_from_main_callers_runtime_first", || {
            leaves_in_order("return-callers-runtime-first", 0);
        }),
        trial("p4_return_from_main_tool_runtime_first", || {
            leaves_in_order("return-tool-runtime-first", 0);
        }),
        trial("p4_return_from_main_tool_runtime_held_by_a_task", || {
            leaves_in_order("return-held-by-a-task", 0);
        }),
        trial("p4_panic_in_main_callers_runtime_first", || {
            leaves_in_order("panic-callers-runtime-first", 101);
        }),
        trial("p4_panic_in_main_tool_runtime_first", || {
            leaves_in_order("panic-tool-runtime-first", 101);
        }),
        trial("p4_process_exit_after_shutdown", || {
            leaves_in_order("exit-after-shutdown", 3);
        }),
        trial("p9_without_a_thread_to_be_had_managed_tools_and_limits_are_refused", || {
            let (status, _) = Process::start(WITHOUT_THREADS).end();
            assert_eq!(status.code(), Some(3), "{status}");
        }),
    ];
    if cfg!(unix) {
        trials.extend([
            trial("p4_sigterm_shuts_down", || shuts_down_on("TERM", "shutdown-on-signals")),
            trial("p4_sigint_shuts_down", || shuts_down_on("INT", "shutdown-on-signals")),
            trial("a_second_sigterm_has_its_default_effect", || {
                second_signal_ends("TERM", "TERM");
            }),
            trial("a_sigint_after_a_sigterm_has_its_default_effect", || {
                second_signal_ends("TERM", "INT");
            }),
            trial("a_sigterm_after_a_sigint_has_its_default_effect", || {
                second_signal_ends("INT", "TERM");
            }),
            trial("sigterm_has_its_default_effect_once_the_future_is_dropped", || {
                dropped_future_lets_end("TERM");
            }),
            trial("sigterm_ends_all_plans_though_an_earlier_future_was_dropped", || {
                shuts_down_on("TERM", "dropped-and-asked-again");
            }),
            trial("sigint_has_its_default_effect_once_the_future_is_dropped", || {
                dropped_future_lets_end("INT");
            }),
        ]);
    }
    trials
}

fn leaves_in_order(way: &str, code: i32) {
    let process = Process::start(way);
    let (status, log) = process.end();
    all_deactivated(&log);
    assert_eq!(status.code(), Some(code), "{status}");
}

fn shuts_down_on(signal: &str, way: &str) {
    let mut process = Process::start(way);
    process.says("ready");
    process.send(signal);
    let (status, log) = process.end();
    all_deactivated(&log);
    // The future never exits the process; the code is the child's own.
    assert_eq!(status.code(), Some(3), "{status}");
}

fn second_signal_ends(first: &str, second: &str) {
    let mut process = Process::start("shutdown-that-hangs");
    process.says("ready");
    process.send(first);
    process.says("deactivating");
    process.send(second);
    ended_by(second, process.end().0);
}

fn dropped_future_lets_end(signal: &str) {
    let mut process = Process::start("dropped-future");
    process.says("ready");
    process.send(signal);
    ended_by(signal, process.end().0);
}

fn all_deactivated(log: &str) {
    let count = |what: &str| log.lines().filter(|line| *line == what).count();
    assert_eq!((count("activated"), count("deactivated")), (PLANS, PLANS), "{log}");
}

#[cfg(unix)]
fn ended_by(signal: &str, status: ExitStatus) {
    use std::os::unix::process::ExitStatusExt;
    let number = if signal == "TERM" { 15 } else { 2 };
    assert_eq!(status.signal(), Some(number), "{status}");
}

#[cfg(not(unix))]
fn ended_by(_signal: &str, status: ExitStatus) {
    unreachable!("no signals here: {status}");
}

/// This binary as a process of its own. Everything is waited for under an upper bound.
struct Process {
    child: Child,
    lines: mpsc::Receiver<String>,
    log: tempfile::NamedTempFile,
}

impl Process {
    const MOST: Duration = Duration::from_secs(60);

    fn start(way: &str) -> Self {
        let log = tempfile::NamedTempFile::new().unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap());
        if way == WITHOUT_THREADS {
            // No machine has room for a stack of that size.
            child.env("RUST_MIN_STACK", (1_u64 << 46).to_string());
        }
        let mut child = child
            .env(WAY, way)
            .env(LOG, log.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (tell, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if tell.send(line).is_err() {
                    return;
                }
            }
        });
        Self { child, lines, log }
    }

    fn says(&mut self, word: &str) {
        assert_eq!(self.lines.recv_timeout(Self::MOST).as_deref(), Ok(word));
    }

    fn send(&self, signal: &str) {
        let kill = format!("kill -s {signal} {}", self.child.id());
        let sent = Command::new("sh").args(["-c", &kill]).status();
        assert!(sent.unwrap().success(), "the signal was not sent");
    }

    /// How it ended, and what stands in the file then.
    fn end(mut self) -> (ExitStatus, String) {
        // The end of its output is the end of the process: nobody else holds it.
        match self.lines.recv_timeout(Self::MOST) {
            Err(mpsc::RecvTimeoutError::Disconnected) => {}
            other => panic!("it does not end: {other:?}"),
        }
        let status = self.child.wait().unwrap();
        let mut log = String::new();
        self.log.read_to_string(&mut log).unwrap();
        (status, log)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        self.child.kill().unwrap_or_default();
    }
}

// ===== the process that ends =====

/// No thread can be had: what needs the keeper is refused, and nothing is passed over or panics.
fn without_threads() {
    let callers = Builder::new_current_thread().enable_all().build().unwrap();
    let managed = Probe::new("managed");
    let hangs = Probe::new("hangs").immediate().on_execute(Step::Never);
    let runtime = ToolRuntime::builder().tool(managed.tool()).tool(hangs.tool());
    let runtime = callers.block_on(runtime.build()).unwrap();
    let refused = runtime.begin(PlanOptions::new().deadline(Process::MOST)).unwrap_err();
    assert_eq!(refused.code(), OutcomeCode::Activation);
    let plan = runtime.begin(PlanOptions::new().call_timeout(Duration::from_millis(1))).unwrap();
    let refused = callers.block_on(plan.execute("managed", json!({}))).unwrap_err();
    assert_eq!(refused.code(), OutcomeCode::Activation);
    let late = callers.block_on(plan.execute("hangs", json!({}))).unwrap();
    assert_eq!(late.code(), "timeout");
    drop(plan);
    drop(runtime);
    managed.assert_balanced();
    std::process::exit(3)
}

fn child(way: &str, log: PathBuf) {
    if way == WITHOUT_THREADS {
        return without_threads();
    }
    let callers = Runtime::new().unwrap();
    let hangs = way == "shutdown-that-hangs";
    let runtime = callers.block_on(in_flight(log, hangs));
    match way {
        "return-callers-runtime-first" => {
            drop(callers);
            drop(runtime);
        }
        "return-tool-runtime-first" => {
            drop(runtime);
            drop(callers);
        }
        "return-held-by-a-task" => {
            callers.spawn(async move {
                let _held = runtime;
                pending::<()>().await;
            });
            drop(callers);
        }
        // Locals go in the reverse of their order.
        "panic-callers-runtime-first" => {
            let _second = runtime;
            let _first = callers;
            panic!("in main");
        }
        "panic-tool-runtime-first" => {
            let _second = callers;
            let _first = runtime;
            panic!("in main");
        }
        "exit-after-shutdown" => callers.block_on(async {
            runtime.shutdown(Process::MOST).await;
            std::process::exit(3)
        }),
        "shutdown-on-signals" | "shutdown-that-hangs" | "dropped-and-asked-again" => callers
            .block_on(async {
                if way == "dropped-and-asked-again" {
                    polled_once(pin!(runtime.shutdown_on_signals(Process::MOST))).await;
                }
                let mut stopped = Box::pin(runtime.shutdown_on_signals(Process::MOST));
                polled_once(stopped.as_mut()).await;
                println!("ready");
                stopped.await.unwrap();
                std::process::exit(3)
            }),
        "dropped-future" => callers.block_on(async {
            let mut stopped = Box::pin(runtime.shutdown_on_signals(Process::MOST));
            polled_once(stopped.as_mut()).await;
            drop(stopped);
            println!("ready");
            pending::<()>().await;
        }),
        _ => unreachable!("no such way to end: {way}"),
    }
}

/// The handlers stand from the first poll on.
async fn polled_once(mut future: Pin<&mut (impl Future + Send)>) {
    poll_fn(|cx| {
        assert!(future.as_mut().poll(cx).is_pending());
        Poll::Ready(())
    })
    .await;
}

/// A runtime with all its plans in the middle of a call.
async fn in_flight(log: PathBuf, hangs: bool) -> ToolRuntime {
    let (tell, mut executing) = unbounded_channel();
    let tool = Logged {
        descriptor: ToolDescriptor::new("logged".parse().unwrap()),
        log: Log(log),
        executing: tell,
        hangs,
    };
    let deadlines = Deadlines::default().deactivate(Process::MOST);
    let builder = ToolRuntime::builder().deadlines(deadlines.end(Process::MOST));
    let runtime = builder.tool(tool).build().await.unwrap();
    for _ in 0..PLANS {
        let plan = runtime.begin(PlanOptions::new()).unwrap();
        tokio::spawn(async move {
            drop(plan.execute("logged", json!({})).await);
            pending::<()>().await;
        });
    }
    for _ in 0..PLANS {
        executing.recv().await.unwrap();
    }
    runtime
}

#[derive(Clone)]
struct Log(PathBuf);

impl Log {
    fn line(&self, line: &str) {
        let mut file = OpenOptions::new().append(true).open(&self.0).unwrap();
        file.write_all(format!("{line}\n").as_bytes()).unwrap();
    }
}

struct Logged {
    descriptor: ToolDescriptor,
    log: Log,
    executing: UnboundedSender<()>,
    /// In its deactivation.
    hangs: bool,
}

struct LoggedInstance {
    log: Log,
    executing: UnboundedSender<()>,
    hangs: bool,
}

#[async_trait]
impl Tool for Logged {
    fn descriptor(&self) -> &ToolDescriptor {
        &self.descriptor
    }

    async fn activate(
        &self,
        _ctx: &ActivationContext,
    ) -> Result<Arc<dyn ToolInstance>, ToolFailure> {
        self.log.line("activated");
        Ok(Arc::new(LoggedInstance {
            log: self.log.clone(),
            executing: self.executing.clone(),
            hangs: self.hangs,
        }))
    }
}

#[async_trait]
impl ToolInstance for LoggedInstance {
    async fn execute(
        &self,
        ctx: &ToolExecutionContext,
        _input: &Value,
    ) -> Result<ToolOutput, ToolFailure> {
        self.executing.send(())?;
        ctx.cancelled().await;
        Ok(ctx.check().map(|()| ToolOutput::default())?)
    }

    async fn deactivate(&self, _ctx: &DeactivationContext) -> Result<(), ToolFailure> {
        static FIRST: Once = Once::new();
        if self.hangs {
            FIRST.call_once(|| println!("deactivating"));
            pending::<()>().await;
        }
        // Long enough for a process that does not wait to be gone.
        tokio::time::sleep(Duration::from_millis(30)).await;
        self.log.line("deactivated");
        Ok(())
    }
}
