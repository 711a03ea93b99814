//! `terrace bench`: runs plans of measurements of regions larger than memory, and the demo.

use crate::log::LogOption;
use crate::output::{complain, print};
use crate::temporary::temporary_directory;
use crate::{json, table, termination, values};
use clap::{Args, Subcommand};
use std::path::PathBuf;

use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};
use terrace_bench::application::Application;
use terrace_bench::cgroup::Group;
use terrace_bench::demo;
use terrace_bench::flush;
use terrace_bench::leftovers;
use terrace_bench::plan::{Length, Mode, PlanError};
use terrace_bench::preload::preload;
use terrace_bench::ratios;
use terrace_bench::results::FigureResults;
use terrace_bench::servers::Servers;
use terrace_bench::session::{self, Input, SessionError, Summary};
use terrace_bench::storage::TMPFS;
use terrace_bench::test_harness::{Rehearsal, TestHarness, TestHarnessError};
use terrace_nic::PathChoice;

const AFTER_HELP: &str = "\
Examples:
  terrace bench bench/term/figure-8.toml              # one figure, short
  terrace bench bench/term/*.toml                     # all figures: a quarter of an hour
  terrace bench --full bench/term/*.toml              # all points, longer
  terrace bench --mode pin,term bench/term/figure-12a.toml
  terrace bench demo-term                             # five modes in one table: a minute and a half
  terrace bench flush                                 # FLUSH while 1 GiB elsewhere is dirty: half a minute
  terrace bench --rehearse bench/term/*.toml          # no server: checks the plans, writes sample files

This command starts each server, in a control group that limits its memory, which requires root.
Without that right, the demo's servers are not limited, and the demo says so.
Results are CSV, SVG and PNG files and results.json in a new directory below results/term. The exit
status is 0 if every point was measured and, with --full, every promised ratio meets its threshold.
A short run shows the ratios, but is too short to judge them.";

/// Options of `terrace bench`.
#[derive(Args)]
#[command(after_long_help = AFTER_HELP, args_conflicts_with_subcommands = true)]
pub struct Options {
    #[command(subcommand)]
    command: Option<Command>,
    /// Plans: TOML files of figures or of promised ratios
    #[arg(value_name = "PLAN")]
    plans: Vec<PathBuf>,
    /// Few points, short measurements (the default)
    #[arg(long)]
    short: bool,
    /// All points, longer measurements
    #[arg(long, conflicts_with = "short")]
    full: bool,
    /// Only these modes (figures only)
    #[arg(long, value_name = "MODE,...", value_delimiter = ',', value_parser = values::bench_mode())]
    mode: Vec<Mode>,
    /// Parent of the directory for the results
    #[arg(long, value_name = "DIR", default_value = "results/term")]
    out: PathBuf,
    #[command(flatten)]
    common: Common,
}

#[derive(Args)]
struct Common {
    /// Directory of the region's file, on the disk to measure
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    data: PathBuf,
    /// Transport between clients and server, which are on one host
    #[arg(long, value_name = "PATH", default_value = "udp", value_parser = values::path())]
    path: PathChoice,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Run plans against memory of this process, without meaningful numbers
    #[arg(long)]
    rehearse: bool,
    #[command(flatten)]
    log: LogOption,
}

#[derive(Subcommand)]
enum Command {
    /// Five modes in one table, on a region four times as large as the server's memory
    DemoTerm(Common),
    /// The time of a FLUSH of 8 bytes while nothing else is dirty, and while 1 GiB elsewhere is
    Flush(Common),
    /// Read the hottest pages of a region's file into the page cache; `bench` runs this beside a server
    #[command(hide = true)]
    Preload {
        /// The region's file
        path: PathBuf,
        /// The application whose accesses they are
        application: Application,
        /// Length of each access in bytes
        #[arg(value_parser = clap::value_parser!(u64).range(1..))]
        access_bytes: u64,
        /// Bytes to have in memory
        memory_bytes: u64,
    },
}

/// An error of a run.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// No plan is given.
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
    /// The path of this executable, which is also the servers', is unknown.
    #[error("the path of this executable is unknown: {0}")]
    Program(#[source] std::io::Error),
    /// A region's file cannot be read.
    #[error("cannot read {path}: {error}")]
    Preload {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: std::io::Error,
    },
    /// Some points failed, or some ratios missed their thresholds; all others were measured.
    #[error("{failed} points failed, {missed} promised ratios MISSED their thresholds")]
    NotAll {
        /// Points without numbers.
        failed: usize,
        /// Ratios that missed their thresholds.
        missed: usize,
    },
    /// FLUSH cannot be measured.
    #[error("cannot measure FLUSH: {0}")]
    Flush(String),
    /// FLUSH takes too long beside other dirty pages.
    #[error("FLUSH takes {0:.2} times as long beside other dirty pages, and may take {max:.2}", max = flush::RATIO_MAX)]
    SlowFlush(f64),
    /// Standard output is closed or full.
    #[error("cannot write: {0}")]
    Output(#[from] std::io::Error),
}

impl BenchError {
    /// Whether the command line is wrong, or a plan that it names.
    pub fn is_usage(&self) -> bool {
        matches!(self, BenchError::NoPlan | BenchError::Plan(_))
    }
}

/// Runs plans, or the demo.
pub fn bench(options: &Options) -> Result<(), BenchError> {
    match &options.command {
        Some(Command::DemoTerm(common)) => show_demo(common),
        Some(Command::Flush(common)) => show_flush(common),
        Some(Command::Preload { path, application, access_bytes, memory_bytes }) => {
            let done = preload(path, *application, *access_bytes, *memory_bytes);
            done.map_err(|error| BenchError::Preload { path: path.clone(), error })
        }
        None => run_plans(options),
    }
}

/// The servers, or the rehearsal's substitute.
fn test_harness(common: &Common) -> Result<Box<dyn TestHarness>, BenchError> {
    common.log.install();
    if common.rehearse {
        return Ok(Box::new(Rehearsal::default()));
    }
    Ok(Box::new(servers(common)?))
}

/// The servers. SIGINT, SIGTERM and SIGHUP end this process without the files that the run has made; its servers end then.
fn servers(common: &Common) -> Result<Servers, BenchError> {
    let program = std::env::current_exe().map_err(BenchError::Program)?;
    let signals = termination::block(&[]);
    let directories = [common.data.clone(), PathBuf::from(TMPFS), temporary_directory("/tmp")];
    std::thread::spawn(move || {
        let Ok(signal) = signals.wait() else { return };
        directories.iter().for_each(|directory| leftovers::remove_own(directory));
        // As if it had not been waited for.
        let _ = signals.thread_unblock();
        let _ = nix::sys::signal::raise(signal);
    });
    Ok(Servers::new(&program, &common.data, common.path)?)
}

/// The demo's servers and modes. Where this user may not limit memory, the servers are not limited; where it may not lock memory, there is no
/// `pin`. A line on standard error says so.
fn demo_test_harness(common: &Common) -> Result<(Box<dyn TestHarness>, Vec<Mode>), BenchError> {
    if common.rehearse {
        return Ok((test_harness(common)?, demo::modes(true)));
    }
    common.log.install();
    let mut servers = servers(common)?;
    if let Err(error) = Group::check() {
        servers = servers.unlimited();
        complain(&format!(
            "not limited: {error}. The page cache then has the whole region, so that odp and rpc miss nothing"
        ));
    }
    let may_pin = may_lock(demo::pinned_bytes());
    if !may_pin {
        complain("pin not measured: it locks 2 GiB, and this user may not (ulimit -l, or CAP_IPC_LOCK)");
    }
    Ok((Box::new(servers), demo::modes(may_pin)))
}

/// Whether this process may lock so much memory.
fn may_lock(bytes: u64) -> bool {
    let is_privileged = capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    is_privileged || getrlimit(Resource::Memlock).current.is_none_or(|limit| limit >= bytes)
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
    let summary = session::run(inputs?, &mut *test_harness(&options.common)?, &choices)?;
    let shown = if options.common.json { json::document(&summary.document) } else { text(&summary) };
    print(&shown)?;
    match (summary.failed, summary.missed) {
        (0, 0) => Ok(()),
        (0, _) if !options.full => Ok(()),
        (failed, missed) => Err(BenchError::NotAll { failed, missed }),
    }
}

fn show_demo(common: &Common) -> Result<(), BenchError> {
    let (mut harness, modes) = demo_test_harness(common)?;
    let rows = demo::run(&mut *harness, &modes, common.rehearse);
    let cells: Vec<Vec<String>> = rows.iter().map(demo::DemoRow::cells).collect();
    print(&match common.json {
        true => json::list("rows", &rows),
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

fn show_flush(common: &Common) -> Result<(), BenchError> {
    let result = flush::run(&mut *test_harness(common)?, common.rehearse).map_err(BenchError::Flush)?;
    print(&match common.json {
        true => json::document(&result),
        false => {
            let table = table::render(&flush::HEADER, &[result.alone.cells(), result.beside.cells()]);
            format!("{}\n\n{table}{}", flush::TITLE, result.verdict())
        }
    })?;
    if result.is_met() || common.rehearse { Ok(()) } else { Err(BenchError::SlowFlush(result.ratio)) }
}

/// A table for each figure, a table of the ratios, and the path of the results.
fn text(summary: &Summary) -> String {
    let mut text = format!("{}\n\n", summary.document.processors);
    for figure in &summary.document.figures {
        text += &figure_text(figure);
        text.push('\n');
    }
    if !summary.document.ratios.is_empty() {
        let cells: Vec<Vec<String>> = summary.document.ratios.iter().map(ratios::Verdict::cells).collect();
        let brief = if summary.document.length == "full" { "" } else { " (a short run: only --full judges)" };
        text += &format!("promised ratios{brief}\n{}\n", table::render(&ratios::HEADER, &cells));
    }
    text + &format!("results are in {}\n", summary.dir.display())
}

fn figure_text(figure: &FigureResults) -> String {
    let number = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.1}"));
    let hundredths = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2}"));
    let rows: Vec<Vec<String>> = figure
        .rows
        .iter()
        .map(|row| {
            vec![
                row.mode.clone(),
                row.x.clone(),
                row.ops_per_s.map_or("-".to_owned(), |value| format!("{value:.0}")),
                number(row.paper_ops_per_s),
                hundredths(row.of_pin),
                hundredths(row.paper_of_pin),
                number(row.p50_us),
                number(row.paper_p50_us),
                number(row.p99_us),
                number(row.paper_p99_us),
                row.hit_ratio.map_or("-".to_owned(), |ratio| format!("{:.1} %", ratio * 100.0)),
                number(row.server_core_us),
                number(row.client_core_us),
                hundredths(row.ios_per_access),
                hundredths(row.lookups_per_access),
                row.share_of_disk_text(),
                row.error.clone(),
            ]
        })
        .collect();
    let axis = figure.plan.x.as_ref().map_or("", |x| x.label.as_str());
    let mut header =
        vec!["mode", axis, "ops/s", "paper", "of pin", "paper", "p50 us", "paper", "p99 us", "paper"];
    header.extend([
        "hit ratio",
        "core-us server",
        "clients",
        "IOs",
        "lookups",
        "of what the disk allows",
        "",
    ]);
    format!("{}: {}\n{}", figure.plan.figure, figure.plan.title, table::render(&header, &rows))
}
