//! Rows of a table, measured side by side: every round runs each row once, so that all of them see
//! the same noise, and what is told is the median.

use std::time::{Duration, Instant};

/// What a row runs: so many operations, in the time that it gives back.
type Run<'a> = Box<dyn FnMut(u64) -> Duration + 'a>;

/// One row and, after [`Table::measure`], what each round took.
pub(crate) struct Row<'a> {
    name: &'a str,
    run: Run<'a>,
    operations: u64,
    /// Nanoseconds for one operation, a round each.
    rounds: Vec<f64>,
}

/// The rows of one run.
#[derive(Default)]
pub(crate) struct Table<'a> {
    rows: Vec<Row<'a>>,
}

/// How much to measure. A run that is not `cargo bench` only shows that the benches work.
#[derive(Clone, Copy)]
pub(crate) struct Effort {
    pub(crate) rounds: usize,
    /// The time of one row in one round.
    slice: Duration,
}

impl Effort {
    pub(crate) fn of_this_run() -> Self {
        if std::env::args().any(|argument| argument == "--bench") {
            Self { rounds: 101, slice: Duration::from_millis(3) }
        } else {
            Self { rounds: 1, slice: Duration::ZERO }
        }
    }
}

impl<'a> Table<'a> {
    /// Adds a row whose work is synchronous, or drives itself.
    pub(crate) fn row(&mut self, name: &'a str, mut run: impl FnMut(u64) + 'a) {
        self.timed(name, move |operations| {
            let began = Instant::now();
            run(operations);
            began.elapsed()
        });
    }

    /// Adds a row that takes its own time.
    pub(crate) fn timed(&mut self, name: &'a str, run: impl FnMut(u64) -> Duration + 'a) {
        self.rows.push(Row { name, run: Box::new(run), operations: 1, rounds: Vec::new() });
    }

    /// Calibrates each row to the slice, then goes round.
    pub(crate) fn measure(&mut self, effort: Effort) {
        for row in &mut self.rows {
            while (row.run)(row.operations) < effort.slice {
                row.operations *= 2;
            }
        }
        for _ in 0..effort.rounds {
            for row in &mut self.rows {
                let took = (row.run)(row.operations);
                row.rounds.push(took.as_nanos() as f64 / row.operations as f64);
            }
        }
    }

    fn rounds(&self, name: &str) -> &[f64] {
        let row = self.rows.iter().find(|row| row.name == name);
        &row.expect("a row of that name was measured").rounds
    }

    /// The median of a row, in nanoseconds.
    pub(crate) fn median(&self, name: &str) -> f64 {
        median(self.rounds(name).to_vec())
    }

    /// The median of the ratios that two rows had, round by round.
    pub(crate) fn ratio(&self, name: &str, to: &str) -> f64 {
        let pairs = self.rounds(name).iter().zip(self.rounds(to));
        median(pairs.map(|(one, other)| one / other).collect())
    }

    /// One line for each row: median, best round, and how often the first row fits in it.
    pub(crate) fn print(&self) {
        let Some(first) = self.rows.first() else {
            return;
        };
        println!("{:<56} {:>10} {:>10} {:>8}", "ns for one", "median", "best", "x first");
        for row in &self.rows {
            let best = row.rounds.iter().copied().fold(f64::INFINITY, f64::min);
            let (median, ratio) = (self.median(row.name), self.ratio(row.name, first.name));
            println!("{:<56} {median:>10.1} {best:>10.1} {ratio:>8.2}", row.name);
        }
    }
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A figure beside its bar, which is `<=` or `>=`.
pub(crate) fn against_bar(what: &str, figure: f64, sign: &str, bar: f64, unit: &str) {
    let met = if sign == "<=" { figure <= bar } else { figure >= bar };
    let verdict = if met {
        "met".to_owned()
    } else {
        format!("missed by {:.2} {unit}", (figure - bar).abs())
    };
    println!("{what:<56} {figure:>10.2} {unit:<2} bar {sign} {bar:.2} {unit}: {verdict}");
}
