//! A tool's process tree: a shell, its child, and a daemon that left its session. It is shown,
//! held for a second, and ended; nothing of it is left.
//!
//! ```text
//! cargo run --example process
//! cargo run --example process -- --kill-me
//! ```
//!
//! With `--kill-me` the program that holds the tree is killed half-way, and a second one looks for
//! what it left.
#![expect(
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "an example prints, and waits like a program of its own"
)]

use std::error::Error;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use toolscope::process::ToolProcess;

/// A shell, a child, and a daemon that ignores what it is asked.
const TREE: &str = "setsid sh -c 'trap \"\" TERM HUP; sleep 1000; true' & sleep 1000 & wait";
const SECOND: Duration = Duration::from_secs(1);

fn main() -> Result<(), Box<dyn Error>> {
    toolscope::guardian::init();
    match std::env::args().nth(1).as_deref() {
        Some("--kill-me") => kill_me(),
        Some("--hold") => tokio::runtime::Runtime::new()?.block_on(hold(60 * SECOND)),
        _ => tokio::runtime::Runtime::new()?.block_on(hold(SECOND)),
    }
}

/// Starts the tree, shows it, and ends it after a time.
async fn hold(time: Duration) -> Result<(), Box<dyn Error>> {
    let process = ToolProcess::command("sh").args(["-c", TREE]).spawn().await?;
    tokio::time::sleep(SECOND / 4).await;
    println!("held together by: {:?}", process.isolation());
    println!("the tree of {}:", std::process::id());
    show(std::process::id(), 1);
    println!("shown");
    tokio::time::sleep(time).await;
    let pids = below(std::process::id());
    process.stop(SECOND / 4).await?;
    report(&pids)
}

/// Runs this program as a host, kills it, and looks for what it left.
fn kill_me() -> Result<(), Box<dyn Error>> {
    let mut host =
        Command::new(std::env::current_exe()?).arg("--hold").stdout(Stdio::piped()).spawn()?;
    let said = BufReader::new(host.stdout.take().ok_or("its output is a pipe")?).lines();
    for line in said {
        let line = line?;
        if line == "shown" {
            break;
        }
        println!("{line}");
    }
    let pids = below(host.id());
    host.kill()?;
    host.wait()?;
    println!("{} was killed", host.id());
    report(&pids)
}

/// Waits until none of them is left, for at most a second.
fn report(pids: &[u32]) -> Result<(), Box<dyn Error>> {
    let began = Instant::now();
    // One that is dead and only waits to be reaped, by whoever inherits from the dead, is not left.
    let is_left = |pid: &&u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        !stat.is_empty() && !stat.contains(") Z ")
    };
    while pids.iter().any(|pid| is_left(&pid)) && began.elapsed() < SECOND {
        std::thread::sleep(SECOND / 100);
    }
    let left = pids.iter().filter(is_left).count();
    println!("process tree: {} processes, {left} left", pids.len());
    if left == 0 { Ok(()) } else { Err("something is left".into()) }
}

fn show(pid: u32, depth: usize) {
    for child in children(pid) {
        let name = std::fs::read(format!("/proc/{child}/cmdline")).unwrap_or_default();
        let name: String = String::from_utf8_lossy(&name).replace('\0', " ");
        println!("{}{child} {}", "  ".repeat(depth), name.chars().take(60).collect::<String>());
        show(child, depth + 1);
    }
}

fn below(pid: u32) -> Vec<u32> {
    children(pid).into_iter().flat_map(|child| [vec![child], below(child)].concat()).collect()
}

fn children(pid: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = threads.filter_map(|it| std::fs::read_to_string(it.path().join("children")).ok());
    lists
        .flat_map(|list| list.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
        .filter_map(|pid| pid.parse().ok())
        .collect()
}
