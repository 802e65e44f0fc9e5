//! Process trees, as processes: this binary is a host too, when its environment says so.
#![cfg(target_os = "linux")]
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::exit,
    reason = "a test may fail; the process's output and its end are what is tested"
)]

#[path = "it/dice.rs"]
#[expect(dead_code, reason = "other tests use the rest")]
mod dice;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, ErrorKind as Kind};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dice::{Dice, seed};
use libtest_mimic::{Arguments, Trial};
use tokio::io::AsyncReadExt;
use tokio::runtime::{Builder, Runtime};
use toolscope::process::{Isolation, ProcessCommand, ProcessError, ProcessStatus, ToolProcess};
use toolscope::{PlanOptions, ToolRuntime, ToolSpec};

const HOST: &str = "TOOLSCOPE_TEST_HOST";
const MARK: &str = "TOOLSCOPE_TEST_MARK";
const UNGUARDED: &str = "TOOLSCOPE_TEST_UNGUARDED";
const SECOND: Duration = Duration::from_secs(1);

fn main() {
    // Without it there is no guardian to be found.
    if std::env::var_os(UNGUARDED).is_none() {
        toolscope::guardian::init();
    }
    match std::env::var(HOST) {
        Ok(way) => host(&way),
        Err(_) => libtest_mimic::run(&Arguments::from_args(), trials()).exit(),
    }
}

// ===== shapes of trees =====

const SHAPES: [(&str, &str, usize); 7] = [
    ("direct", "echo up; exec sleep 1000", 1),
    ("wrapper", "echo up; sleep 1000; true", 2),
    ("ignores-term", "trap '' TERM HUP; echo up; while :; do sleep 1; done", 2),
    ("daemon", "setsid sh -c 'trap \"\" TERM; sleep 1000; true' & echo up; exec sleep 1000", 3),
    ("chain", CHAIN, 50),
    ("holds-stdout", "trap '' TERM; sleep 1000 & echo up; wait", 2),
    ("forks", "i=0; while [ $i -lt 300 ]; do sleep 1000 & i=$((i+1)); done; echo up; wait", 301),
];

/// Each starts the next one in a session of its own.
const CHAIN: &str = r#"
    if [ "${N:-0}" -lt 49 ]; then N=$((${N:-0} + 1)) setsid sh -c "$S" & fi
    if [ "${N:-0}" -eq 49 ]; then echo up; fi
    exec sleep 1000"#;

fn tree(shape: &str, mark: &str) -> ProcessCommand {
    let script = SHAPES.iter().find(|(name, ..)| *name == shape).unwrap().1;
    let grace = Duration::from_millis(50);
    ToolProcess::command("sh").args(["-c", script]).env("S", script).env(MARK, mark).grace(grace)
}

/// A mark that no other tree of the tests has.
fn mark() -> String {
    static MARKS: AtomicU64 = AtomicU64::new(0);
    format!("{}-{}", std::process::id(), MARKS.fetch_add(1, Relaxed))
}

/// The processes that carry a mark, and what they are.
fn alive(mark: &str) -> BTreeMap<u32, String> {
    let wanted = format!("{MARK}={mark}");
    let pids = fs::read_dir("/proc").unwrap().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter_map(|pid| {
        let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
        let is_marked = environment.split(|byte| *byte == 0).any(|it| it == wanted.as_bytes());
        let name = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        is_marked.then(|| (pid, String::from_utf8_lossy(&name).replace('\0', " ")))
    })
    .collect()
}

/// Waits until a tree has so many processes, its guardian not counted.
#[track_caller]
fn grown(mark: &str, processes: usize) {
    let until = Instant::now() + 10 * SECOND;
    loop {
        let alive = alive(mark);
        let of_tool = alive.values().filter(|name| !name.starts_with("toolscope-guardian"));
        if of_tool.count() >= processes {
            return;
        }
        assert!(Instant::now() < until, "of {processes} there are {alive:?}");
        std::thread::yield_now();
    }
}

/// Waits until nothing of a tree is left, for at most a second.
#[track_caller]
fn gone(mark: &str, what: &str) {
    let began = Instant::now();
    loop {
        let alive = alive(mark);
        if alive.is_empty() {
            return;
        }
        assert!(began.elapsed() < SECOND, "{what}: {} left: {alive:?}", alive.len());
        std::thread::yield_now();
    }
}

fn tokio() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

async fn up(process: &mut ToolProcess) {
    let mut stdout = process.take_stdout().unwrap();
    let mut said = [0; 3];
    let heard = tokio::time::timeout(10 * SECOND, stdout.read_exact(&mut said)).await;
    heard.expect("the tree comes up").unwrap();
    assert_eq!(&said, b"up\n");
    // It stays open: a program that writes to nobody would be ended by that.
    Box::leak(Box::new(stdout));
}

// ===== the tests =====

fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    let mut trial = |name: String, test: Box<dyn FnOnce() + Send>| {
        trials.push(Trial::test(name, || {
            test();
            Ok(())
        }));
    };
    for (shape, _, size) in SHAPES {
        trial(format!("p10_{shape}_dropped"), Box::new(move || dropped(shape, size)));
        trial(format!("p10_{shape}_stopped"), Box::new(move || stopped(shape, size)));
        trial(
            format!("p10_{shape}_guardian_killed"),
            Box::new(move || guardian_killed(shape, size)),
        );
        for way in ["return", "panic", "exit", "term", "kill", "runtime-first", "never-driven"] {
            trial(format!("p10_{shape}_host_{way}"), Box::new(move || host_ends(shape, size, way)));
        }
    }
    for (shape, ..) in SHAPES {
        for way in ["group-drop", "group-stop"] {
            trial(format!("{shape}_{way}"), Box::new(move || in_a_group(shape, way)));
        }
    }
    // One after the other: each sweeps what all of them left.
    let all_swept = || SHAPES.iter().for_each(|(shape, ..)| swept(shape));
    trial("what_a_killed_host_left_is_swept".to_owned(), Box::new(all_swept));
    trial("a_wrong_guardian_is_passed_over".to_owned(), Box::new(a_wrong_guardian_is_passed_over));
    trial("p8_the_plan_ends_its_processes".to_owned(), Box::new(the_plan_ends_its_processes));
    trial("errors_are_told_apart".to_owned(), Box::new(errors_are_told_apart));
    trial("a_program_has_what_is_declared".to_owned(), Box::new(has_what_is_declared));
    trial("an_output_is_not_waited_for".to_owned(), Box::new(an_output_is_not_waited_for));
    trial("codes_and_signals".to_owned(), Box::new(codes_and_signals));
    trial("a_timeout_ends_it".to_owned(), Box::new(a_timeout_ends_it));
    trial("p10_random_kills".to_owned(), Box::new(random_kills));
    trials
}

fn dropped(shape: &str, size: usize) {
    let mark = mark();
    let process = tokio().block_on(async {
        let mut process = tree(shape, &mark).pipe_stdout().spawn().await.unwrap();
        assert_eq!(process.isolation(), Isolation::Guardian);
        up(&mut process).await;
        process
    });
    grown(&mark, size);
    drop(process);
    gone(&mark, shape);
}

fn stopped(shape: &str, size: usize) {
    let mark = mark();
    tokio().block_on(async {
        let mut process = tree(shape, &mark).pipe_stdout().spawn().await.unwrap();
        up(&mut process).await;
        grown(&mark, size);
        process.stop(Duration::from_millis(50)).await.unwrap();
        let left = alive(&mark);
        assert!(left.is_empty(), "{left:?}");
    });
}

fn guardian_killed(shape: &str, size: usize) {
    let mark = mark();
    tokio().block_on(async {
        let mut process = tree(shape, &mark).pipe_stdout().spawn().await.unwrap();
        up(&mut process).await;
        grown(&mark, size);
        let guardian = alive(&mark).into_iter().find(|(_, name)| name.starts_with("toolscope-g"));
        kill("KILL", guardian.unwrap().0);
        assert_eq!(process.wait().await, ProcessStatus::Lost);
        gone(&mark, shape);
    });
}

fn kill(signal: &str, pid: u32) {
    let killed = Command::new("kill").arg(format!("-{signal}")).arg(pid.to_string()).status();
    assert!(killed.unwrap().success());
}

fn errors_are_told_apart() {
    let place = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str, mode: u32| {
        use std::os::unix::fs::PermissionsExt;
        let path = place.path().join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let kind = |command: ProcessCommand| {
        tokio().block_on(async {
            match command.spawn().await.unwrap_err() {
                ProcessError::Program { source, .. } => ("program", source.kind()),
                ProcessError::Directory { source, .. } => ("directory", source.kind()),
                ProcessError::Guardian { source, .. } => ("guardian", source.kind()),
                other => panic!("{other}"),
            }
        })
    };
    let run = |program: &str| kind(ToolProcess::command(program));
    assert_eq!(run("no-such-program"), ("program", Kind::NotFound));
    assert_eq!(run("/no/such/program"), ("program", Kind::NotFound));
    assert_eq!(run(&file("text", "x", 0o644)), ("program", Kind::PermissionDenied));
    assert_eq!(run(&file("bad", "#!/no/such\n", 0o755)), ("program", Kind::NotFound));
    assert_eq!(run(place.path().to_str().unwrap()), ("program", Kind::PermissionDenied));
    let inside = |directory: &str| kind(ToolProcess::command("true").current_dir(directory));
    assert_eq!(inside("/no/such/directory"), ("directory", Kind::NotFound));
    assert_eq!(inside(&file("file", "x", 0o644)), ("directory", Kind::NotADirectory));
    let long = "x".repeat(120_000);
    let long = kind(ToolProcess::command("true").args(vec![long; 40]));
    assert_eq!(long, ("program", Kind::ArgumentListTooLong));
    let nul = kind(ToolProcess::command("true").arg("a\0b"));
    assert_eq!(nul, ("program", Kind::InvalidInput));
    let name = kind(ToolProcess::command("true").env("A=B", "c"));
    assert_eq!(name, ("program", Kind::InvalidInput));
    let guarded = |path: &str| kind(ToolProcess::command("true").guardian(path)).0;
    assert_eq!((guarded("/no/guardian"), guarded("/bin/true")), ("guardian", "guardian"));
}

fn has_what_is_declared() {
    tokio().block_on(async {
        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        let script = "cat; echo oops >&2; pwd; env | sort; ls /proc/self/fd | wc -l";
        let command = ToolProcess::command("sh").args(["-c", script]).stdin("hello\n");
        let command = command.current_dir(&place).env("MY_OWN", "1").env("LANG", "other");
        let output = command.output().await.unwrap().check().unwrap();
        let text = output.stdout.text();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "hello");
        assert_eq!(lines[1], place.to_str().unwrap());
        assert_eq!(*lines.last().unwrap(), "4", "its three and the list's own: {text}");
        assert!(lines.contains(&"MY_OWN=1") && lines.contains(&"LANG=other"), "{text}");
        let start = fs::read_to_string("/proc/self/stat").unwrap();
        let start = start.rsplit(')').next().unwrap().split(' ').nth(20).unwrap().to_owned();
        let host = format!("{}-{start}", std::process::id());
        assert!(lines.contains(&format!("TOOLSCOPE_PLAN={host}-0").as_str()), "{text}");
        assert!(text.contains(&format!("TOOLSCOPE_TREE={host}-")), "{text}");
        assert!(!text.contains("CARGO"), "nothing of the host's own: {text}");
        assert_eq!(output.stderr.text(), "oops\n");
    });
}

fn an_output_is_not_waited_for() {
    let mark = mark();
    tokio().block_on(async {
        let script = "trap '' TERM; sleep 1000 & echo hi; exit 3";
        let command = ToolProcess::command("sh").args(["-c", script]).env(MARK, &mark);
        let began = Instant::now();
        let output = command.grace(SECOND / 2).output().await.unwrap();
        assert_eq!(
            (output.status, output.stdout.text()),
            (ProcessStatus::Exited(3), "hi\n".into())
        );
        assert!(began.elapsed() < SECOND / 2, "{:?}", began.elapsed());
        gone(&mark, "what holds the output");
    });
}

fn codes_and_signals() {
    tokio().block_on(async {
        for code in [0, 1, 7, 125, 255] {
            let script = format!("exit {code}");
            let output = ToolProcess::command("sh").args(["-c", &script]).output().await.unwrap();
            assert_eq!(output.status, ProcessStatus::Exited(code));
        }
        for signal in [1, 2, 9, 10, 11, 13, 15] {
            let script = format!("echo last words >&2; kill -{signal} $$");
            let output = ToolProcess::command("sh").args(["-c", &script]).output().await.unwrap();
            assert_eq!(output.status, ProcessStatus::Signalled(signal));
            let error = output.check().unwrap_err().to_string();
            assert!(error.ends_with("it said: last words"), "{error}");
        }
    });
}

fn a_timeout_ends_it() {
    let mark = mark();
    tokio().block_on(async {
        let command = tree("ignores-term", &mark).timeout(Duration::from_millis(200));
        let output = command.output().await.unwrap();
        assert!(output.timed_out, "{output:?}");
        assert_eq!(output.status, ProcessStatus::Signalled(9));
        gone(&mark, "what was timed out");
    });
}

// ===== plans =====

/// Also what its tool has lost.
fn the_plan_ends_its_processes() {
    let (mark, seen) = (mark(), Arc::new(Mutex::new(None)));
    tokio().block_on(async {
        let state = (mark.clone(), Arc::clone(&seen));
        let leaks = ToolSpec::new("leaks").read_only().handler_with(
            state,
            async |(mark, seen), ctx, _: serde_json::Value| {
                let mut process = tree("daemon", &mark).plan(&ctx).pipe_stdout().spawn().await?;
                up(&mut process).await;
                *seen.lock().unwrap() = Some(process.pid());
                // On purpose: nobody holds it any more, and nobody dropped it.
                Box::leak(Box::new(process));
                Ok(ctx.plan_id().number())
            },
        );
        let runtime = ToolRuntime::builder().tool(leaks).build().await.unwrap();
        assert_eq!(runtime.process_isolation(), Isolation::Guardian);
        let plan = runtime.begin(PlanOptions::new()).unwrap();
        let result = plan.execute("leaks", serde_json::json!({})).await.unwrap();
        assert!(result.success, "{:?}", result.error);
        let pid = seen.lock().unwrap().unwrap();
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap();
        let environment = String::from_utf8_lossy(&environment);
        let marks = environment.split('\0').find_map(|it| it.strip_prefix("TOOLSCOPE_PLAN="));
        assert!(marks.unwrap().ends_with(&format!("-{}", result.output)), "{marks:?}");
        grown(&mark, 3);
        plan.finish().await;
        gone(&mark, "what the tool lost");
    });
}

// ===== without a guardian =====

fn in_a_group(shape: &str, way: &str) {
    let mark = mark();
    let mut host = start_host(shape, way, &mark, true);
    assert!(host.wait().unwrap().success());
    gone(&mark, shape);
}

/// What has the guardian's name and is another program has started nothing: a group does it.
fn a_wrong_guardian_is_passed_over() {
    let (mark, place) = (mark(), tempfile::tempdir().unwrap());
    std::os::unix::fs::symlink("/bin/true", place.path().join("toolscope-guardian")).unwrap();
    let path = format!("{}:{}", place.path().display(), std::env::var("PATH").unwrap());
    let mut command = host_command("direct", "group-drop", &mark, true);
    assert!(command.env("PATH", path).status().unwrap().success());
    gone(&mark, "direct");
}

/// In the host: a tree that is a group ends with its owner.
fn group(shape: &str, way: &str, mark: &str) {
    let size = SHAPES.iter().find(|(name, ..)| *name == shape).unwrap().2;
    tokio().block_on(async {
        let mut process = tree(shape, mark).pipe_stdout().spawn().await.unwrap();
        assert_eq!(process.isolation(), Isolation::ProcessGroup);
        up(&mut process).await;
        grown(mark, size);
        if way == "group-stop" {
            process.stop(Duration::from_millis(50)).await.unwrap();
            assert!(alive(mark).len() <= 1, "{:?}", alive(mark));
        }
    });
    let marked = |(pid, _): &(u32, String)| *pid != std::process::id();
    let until = Instant::now() + SECOND;
    while alive(mark).into_iter().any(|process| marked(&process)) {
        assert!(Instant::now() < until, "{:?}", alive(mark));
    }
}

/// What a killed host left is found by the next one, and nothing of one that lives.
fn swept(shape: &str) {
    let [killed, lives] = [mark(), mark()];
    let hosts = [&killed, &lives].map(|mark| {
        let mut host = start_host(shape, "kill", mark, true);
        let mut line = String::new();
        BufReader::new(host.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "up\n");
        host
    });
    let [mut killed_host, mut living_host] = hosts;
    killed_host.kill().unwrap();
    killed_host.wait().unwrap();
    assert!(!alive(&killed).is_empty(), "without a guardian nobody ends them");
    let size = SHAPES.iter().find(|(name, ..)| *name == shape).unwrap().2;
    grown(&lives, 2 * size + 1);
    // All but what comes and goes by itself.
    let steady = || {
        let steady = alive(&lives).into_iter().filter(|(_, name)| name.trim() != "sleep 1");
        steady.map(|(pid, _)| pid).collect::<std::collections::BTreeSet<_>>()
    };
    let before = steady();
    let ended = toolscope::process::sweep();
    assert!(ended > 0);
    gone(&killed, shape);
    assert!(before.is_subset(&steady()), "its host lives");
    living_host.kill().unwrap();
    living_host.wait().unwrap();
    toolscope::process::sweep();
    gone(&lives, shape);
}

// ===== hosts =====

/// What nobody drops.
static HELD: Mutex<Vec<ToolProcess>> = Mutex::new(Vec::new());

/// A host of two trees that ends in some way.
fn host(way: &str) {
    let mark = std::env::var(MARK).unwrap();
    let shape = std::env::var("SHAPE").unwrap();
    if way.starts_with("group") {
        return group(&shape, way, &mark);
    }
    let tokio = if way == "never-driven" {
        Builder::new_current_thread().enable_all().build().unwrap()
    } else {
        tokio()
    };
    let processes = tokio.block_on(async {
        let mut processes = Vec::new();
        for _ in 0..2 {
            let mut process = tree(&shape, &mark).pipe_stdout().spawn().await.unwrap();
            up(&mut process).await;
            processes.push(process);
        }
        processes
    });
    println!("up");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    match way {
        "return" | "never-driven" => drop(processes),
        "runtime-first" => {
            drop(tokio);
            drop(processes);
        }
        "panic" => panic!("the host panics"),
        "exit" => {
            HELD.lock().unwrap().extend(processes);
            std::process::exit(3);
        }
        _ => loop {
            std::thread::park();
        },
    }
}

fn start_host(shape: &str, way: &str, mark: &str, unguarded: bool) -> Child {
    host_command(shape, way, mark, unguarded).spawn().unwrap()
}

fn host_command(shape: &str, way: &str, mark: &str, unguarded: bool) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    if unguarded {
        command.env(UNGUARDED, "1");
    }
    command.env(HOST, way).env(MARK, mark).env("SHAPE", shape);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    command
}

fn host_ends(shape: &str, size: usize, way: &str) {
    let mark = mark();
    let mut host = start_host(shape, way, &mark, false);
    let mut line = String::new();
    BufReader::new(host.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "up\n");
    grown(&mark, 2 * size);
    match way {
        "term" => kill("TERM", host.id()),
        "kill" => host.kill().unwrap(),
        _ => drop(host.stdin.take()),
    }
    host.wait().unwrap();
    gone(&mark, &format!("{shape}, {way}"));
}

/// Killed at any moment, its start included.
fn random_kills() {
    const HOSTS: u64 = 200;
    let seed = seed();
    println!("TOOLSCOPE_SEED={seed}");
    let (mut dice, mut ups) = (Dice::new(seed), 0);
    for round in 0..HOSTS {
        let mark = mark();
        let mut host =
            start_host(dice.pick(&["daemon", "wrapper", "ignores-term"]), "kill", &mark, false);
        // At a random moment, or once it is up.
        let (tell, up) = std::sync::mpsc::channel();
        let stdout = host.stdout.take().unwrap();
        std::thread::spawn(move || tell.send(BufReader::new(stdout).lines().next().is_some()));
        ups += u32::from(up.recv_timeout(dice.micros(30_000)) == Ok(true));
        host.kill().unwrap();
        host.wait().unwrap();
        gone(&mark, &format!("round {round}"));
    }
    println!("hosts killed: {HOSTS}, {ups} of them up, survivors: 0");
}
