//! `terrace bench`: measures regions larger than memory, by plans; and the demo.

use crate::log::{self, LogLevel};
use crate::table;
use clap::{Args, Subcommand};
use std::io::Write;
use std::path::PathBuf;
use terrace_bench::demo;
use terrace_bench::plan::{Length, Mode, PlanError};
use terrace_bench::preload::preload;
use terrace_bench::ratios;
use terrace_bench::results::FigureResults;
use terrace_bench::servers::Servers;
use terrace_bench::session::{self, Input, SessionError, Summary};
use terrace_bench::test_harness::{Rehearsal, TestHarness, TestHarnessError};
use terrace_nic::PathChoice;

const AFTER_HELP: &str = "\
Examples:
  terrace bench bench/term/figure-8.toml              # one figure, briefly
  terrace bench bench/term/*.toml                     # all of them: a quarter of an hour
  terrace bench --full bench/term/*.toml              # all points, for longer
  terrace bench --mode pin,term bench/term/figure-12a.toml
  terrace bench demo-term                             # five modes side by side: a minute and a half
  terrace bench --rehearse bench/term/*.toml          # no server: is the plan right, what will the files be?

Each server is started by this command, in a control group that limits its memory: that needs root.
Results are CSV, SVG and PNG files in a new directory below results/term, with results.json beside
them. The exit status is 0 when every point was measured; with --full also every promised ratio must
have reached its bar. A short run measures too briefly to judge: it shows them, and no more.";

/// Options of `terrace bench`.
#[derive(Args)]
#[command(after_help = AFTER_HELP, args_conflicts_with_subcommands = true)]
pub struct Options {
    #[command(subcommand)]
    what: Option<What>,
    /// Plans: TOML files of figures, or of promised ratios
    #[arg(value_name = "PLAN")]
    plans: Vec<PathBuf>,
    /// Few points, briefly (the default)
    #[arg(long)]
    short: bool,
    /// All points, for longer
    #[arg(long, conflicts_with = "short")]
    full: bool,
    /// Only these modes (figures only)
    #[arg(long, value_name = "MODE,...", value_delimiter = ',', value_parser = str::parse::<Mode>)]
    mode: Vec<Mode>,
    /// A directory for the results is made in this one
    #[arg(long, value_name = "DIR", default_value = "results/term")]
    out: PathBuf,
    #[command(flatten)]
    common: Common,
}

#[derive(Args)]
struct Common {
    /// The region's file is made in this directory: the disk that is measured
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    data: PathBuf,
    /// How clients reach the server, which is on the same host: udp, local (without packets), or auto
    #[arg(long, value_name = "PATH", default_value = "udp")]
    path: PathChoice,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Run against memory of this process: tries plans out, the numbers mean nothing
    #[arg(long)]
    rehearse: bool,
    /// What the clients log to standard error
    #[arg(long, value_name = "LEVEL", env = "TERRACE_LOG", hide_env_values = true, default_value = "warn")]
    log: LogLevel,
}

#[derive(Subcommand)]
enum What {
    /// Five modes side by side, on a region four times as large as the server's memory
    DemoTerm(Common),
    /// Has the hottest pages of a region's file read into memory: what `bench` runs beside a server
    #[command(hide = true)]
    Preload {
        /// The region's file
        path: PathBuf,
        /// Bytes of each access
        #[arg(value_parser = clap::value_parser!(u64).range(1..))]
        access_bytes: u64,
        /// Bytes that shall be in memory
        memory_bytes: u64,
    },
}

/// Why there are no results, or not all.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// Nothing to do.
    #[error("no plan (example: terrace bench bench/term/figure-8.toml)")]
    NoPlan,
    /// A plan is invalid.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The run ended early.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The servers cannot be set up.
    #[error(transparent)]
    TestHarness(#[from] TestHarnessError),
    /// The path of this program, which is also the servers', is unknown.
    #[error("cannot find this program's own file: {0}")]
    Program(#[source] std::io::Error),
    /// A region's file cannot be read.
    #[error("cannot read {path}: {error}")]
    Preload {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// Some points or promises failed; all others were measured.
    #[error("{failed} points failed, {missed} promises were MISSED")]
    NotAll {
        /// Points without numbers.
        failed: usize,
        /// Ratios that missed their thresholds.
        missed: usize,
    },
    /// Standard output is closed or full.
    #[error("cannot write: {0}")]
    Output(#[from] std::io::Error),
}

/// Runs plans, or the demo.
pub fn bench(options: &Options) -> Result<(), BenchError> {
    match &options.what {
        Some(What::DemoTerm(common)) => show_demo(common),
        Some(What::Preload { path, access_bytes, memory_bytes }) => {
            let done = preload(path, *access_bytes, *memory_bytes);
            done.map_err(|error| BenchError::Preload { path: path.clone(), error })
        }
        None => run_plans(options),
    }
}

fn bed(common: &Common) -> Result<Box<dyn TestHarness>, BenchError> {
    log::install(common.log);
    if common.rehearse {
        return Ok(Box::new(Rehearsal::default()));
    }
    let program = std::env::current_exe().map_err(BenchError::Program)?;
    Ok(Box::new(Servers::new(&program, &common.data, common.path)?))
}

fn run_plans(options: &Options) -> Result<(), BenchError> {
    if options.plans.is_empty() {
        return Err(BenchError::NoPlan);
    }
    let inputs: Result<Vec<Input>, PlanError> = options.plans.iter().map(|path| Input::load(path)).collect();
    let choices = session::Options {
        length: if options.full { Length::Full } else { Length::Short },
        modes: options.mode.clone(),
        out: options.out.clone(),
        data: options.common.data.clone(),
        is_rehearsal: options.common.rehearse,
    };
    let summary = session::run(inputs?, &mut *bed(&options.common)?, &choices)?;
    match options.common.json {
        true => put(&summary.document.to_json())?,
        false => put(&text(&summary))?,
    }
    match (summary.failed, summary.missed) {
        (0, 0) => Ok(()),
        (0, _) if !options.full => Ok(()),
        (failed, missed) => Err(BenchError::NotAll { failed, missed }),
    }
}

fn show_demo(common: &Common) -> Result<(), BenchError> {
    let rows = demo::run(&mut *bed(common)?, common.rehearse);
    let cells: Vec<Vec<String>> = rows.iter().map(demo::DemoRow::cells).collect();
    put(&match common.json {
        true => serde_json::to_string_pretty(&rows).expect("strings and numbers always serialize") + "\n",
        false => {
            let table = table::render(&demo::HEADER, &cells);
            format!("{}\n\n{table}{}", demo::TITLE, demo::failures(&rows))
        }
    })?;
    match rows.iter().filter(|row| row.error.is_some()).count() {
        0 => Ok(()),
        failed => Err(BenchError::NotAll { failed, missed: 0 }),
    }
}

/// A table for each figure, one for the ratios, and the directory of the files.
fn text(summary: &Summary) -> String {
    let mut text = String::new();
    for figure in &summary.document.figures {
        text += &figure_text(figure);
        text.push('\n');
    }
    if !summary.document.ratios.is_empty() {
        let cells: Vec<Vec<String>> = summary.document.ratios.iter().map(ratios::Verdict::cells).collect();
        let brief = if summary.document.length == "full" { "" } else { " (seen briefly: --full judges)" };
        text += &format!("promised ratios{brief}\n{}\n", table::render(&ratios::HEADER, &cells));
    }
    text + &format!("results are in {}\n", summary.dir.display())
}

fn figure_text(figure: &FigureResults) -> String {
    let number = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.1}"));
    let rows: Vec<Vec<String>> = figure
        .rows
        .iter()
        .map(|row| {
            vec![
                row.mode.clone(),
                row.x.clone(),
                row.ops_per_s.map_or("-".to_owned(), |value| format!("{value:.0}")),
                number(row.paper_ops_per_s),
                number(row.p50_us),
                number(row.paper_p50_us),
                number(row.p99_us),
                number(row.paper_p99_us),
                row.hit_ratio.map_or("-".to_owned(), |ratio| format!("{:.1} %", ratio * 100.0)),
                row.error.clone(),
            ]
        })
        .collect();
    let axis = figure.plan.x.as_ref().map_or("", |x| x.label.as_str());
    let header = ["mode", axis, "ops/s", "paper", "p50 us", "paper", "p99 us", "paper", "hit ratio", ""];
    format!("{}: {}\n{}", figure.plan.figure, figure.plan.title, table::render(&header, &rows))
}

/// Writes to standard output. A closed pipe (`| head`) is no error.
fn put(text: &str) -> std::io::Result<()> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}
