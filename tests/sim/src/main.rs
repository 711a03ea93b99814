//! `terrace-sim`: runs a batch of seeds, or one seed with a trace.

#![forbid(unsafe_code)]

use std::io::{IsTerminal, Write};
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use terrace_sim::{Batch, Model, Progress};

/// Runs two simulated devices against a reference model, in virtual time, and stops at the first seed that fails.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Simulate the NP-RDMA protocol on devices that know nothing of absent memory
    #[arg(long)]
    np: bool,
    /// Number of seeds to run
    #[arg(long, value_name = "N", default_value_t = 2000)]
    seeds: u64,
    /// First seed
    #[arg(long, value_name = "K", default_value_t = 0)]
    start: u64,
    /// Run only this seed, with a trace of its events
    #[arg(long, value_name = "SEED", conflicts_with_all = ["seeds", "start"])]
    seed: Option<u64>,
    /// Number of threads (default: one per CPU)
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroUsize>,
    /// Print the counts of events at the end
    #[arg(long)]
    tally: bool,
}

/// The interval between progress lines on an output that cannot overwrite them.
const LOG_INTERVAL: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let model = if arguments.np { Model::NpRdma } else { Model::Verbs };
    if let Some(seed) = arguments.seed {
        return replay(model, seed, arguments.tally);
    }
    let started = Instant::now();
    let batch = Batch { model, first: arguments.start, count: arguments.seeds, threads: arguments.threads };
    let is_terminal = std::io::stderr().is_terminal();
    let mut printed = Instant::now();
    let outcome = batch.run(|progress| {
        if is_terminal {
            eprint!("\r{}\x1b[K", progress_line(progress, started.elapsed()));
            // A failure to print the progress line is ignored.
            let _ = std::io::stderr().flush();
        } else if printed.elapsed() > LOG_INTERVAL {
            printed = Instant::now();
            eprintln!("{}", progress_line(progress, started.elapsed()));
        }
    });
    if is_terminal {
        eprintln!();
    }
    match outcome {
        Ok(tally) => {
            println!("{} seeds in {:.1} s: no failure", arguments.seeds, started.elapsed().as_secs_f64());
            if arguments.tally {
                print!("{tally}");
            }
            ExitCode::SUCCESS
        }
        Err(failed) => {
            eprintln!("{failed}");
            ExitCode::FAILURE
        }
    }
}

fn progress_line(progress: &Progress, elapsed: Duration) -> String {
    let seconds = elapsed.as_secs_f64();
    let rate = progress.done as f64 / seconds.max(0.001);
    format!("{} of {} seeds, {rate:.0} a second, {seconds:.0} s", progress.done, progress.total)
}

fn replay(model: Model, seed: u64, with_tally: bool) -> ExitCode {
    match model.run(seed, true) {
        Ok(tally) => {
            println!("seed {seed}: no failure");
            if with_tally {
                print!("{tally}");
            }
            ExitCode::SUCCESS
        }
        Err(failure) => {
            println!("seed {seed}: {failure}");
            ExitCode::FAILURE
        }
    }
}
