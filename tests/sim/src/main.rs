//! `terrace-sim`: runs any number of seeds, or one alone with a trace.

#![forbid(unsafe_code)]

use std::io::{IsTerminal, Write};
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use terrace_sim::{Batch, Progress};

/// Runs two simulated devices against a reference model, in virtual time, and stops at the first seed that fails.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// How many seeds to run
    #[arg(long, value_name = "N", default_value_t = 2000)]
    seeds: u64,
    /// The first one
    #[arg(long, value_name = "K", default_value_t = 0)]
    start: u64,
    /// Run this one alone, and print everything that happens
    #[arg(long, value_name = "SEED", conflicts_with_all = ["seeds", "start"])]
    seed: Option<u64>,
    /// Threads; one for each processor unless given
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroUsize>,
    /// Print what the runs have gone through, at the end
    #[arg(long)]
    tally: bool,
}

/// How often the progress line is printed where it cannot be overwritten.
const LOG_INTERVAL: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Some(seed) = arguments.seed {
        return replay(seed, arguments.tally);
    }
    let started = Instant::now();
    let batch = Batch { first: arguments.start, count: arguments.seeds, threads: arguments.threads };
    let is_terminal = std::io::stderr().is_terminal();
    let mut printed = Instant::now();
    let outcome = batch.run(|progress| {
        if is_terminal {
            eprint!("\r{}\x1b[K", line(progress, started.elapsed()));
            // A progress line that cannot be shown is no error.
            let _ = std::io::stderr().flush();
        } else if printed.elapsed() > LOG_INTERVAL {
            printed = Instant::now();
            eprintln!("{}", line(progress, started.elapsed()));
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

fn line(progress: &Progress, elapsed: Duration) -> String {
    let seconds = elapsed.as_secs_f64();
    let rate = progress.done as f64 / seconds.max(0.001);
    format!("{} of {} seeds, {rate:.0} a second, {seconds:.0} s", progress.done, progress.total)
}

fn replay(seed: u64, with_tally: bool) -> ExitCode {
    match terrace_sim::run(seed, true) {
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
