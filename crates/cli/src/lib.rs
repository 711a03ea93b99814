//! The `terrace` command: runs RDMA programs on the software NIC and shows the NIC's counters.
//!
//! `main.rs` only calls [`run`]. The rest is a library, so that `examples/manual.rs` can read the definition of the
//! command line.
//!
//! This crate contains no code of the NIC. `run` prepares an environment and replaces itself with the program. The NIC
//! runs in that program, in the preloaded library. `stat` queries the counters of a running program's NIC.
#![forbid(unsafe_code)]

mod bench;
mod clients;
mod devices;
mod doctor;
mod exit;
mod export;
mod exports;
mod far_memory;
mod far_pages;
mod fuse;
mod json;
mod library;
mod log;
mod memory_node;
mod mount;
mod node_states;
mod output;
mod pager;
mod pool;
mod program;
mod recover;
mod regions;
mod run;
mod serve;
mod standard_error;
mod stat;
mod swap_device;
mod swap_front;
mod swap_pages;
mod swap_process;
mod table;
mod temporary;
mod termination;
mod top;
mod values;

use clap::builder::Resettable;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use exit::usage_or_1;
use std::process::ExitCode;

const AFTER_HELP: &str = "\
Examples:
  Two ends of a bandwidth test on this machine, in two terminals:
    terrace run -- ib_write_bw
    terrace run -- ib_write_bw 127.0.0.1

  The same between two hosts: give each end its own address.
    host a:  terrace run --addr 192.0.2.1 -- ib_write_bw
    host b:  terrace run --addr 192.0.2.2 -- ib_write_bw 192.0.2.1

  What works on this machine:         terrace doctor
  The device that a program gets:     terrace devices
  A live view of running programs:    terrace top
  Counters of a running program:      terrace stat --watch PID

Every option of `run` can also be given as an environment variable (see `terrace run --help`).
`terrace COMMAND --help` explains a command and shows examples; `-h` lists its options. All
environment variables: docs/environment.md in Terrace's sources.

Exit status: 0 if everything was done, 1 if it was not, 2 if the command line is wrong. `run` has the
program's own, and for itself 2, 125, 126 or 127 (see `terrace run --help`).";

/// RDMA without RDMA hardware: runs unmodified verbs programs over plain UDP (RoCEv2).
#[derive(Parser)]
#[command(name = "terrace", version, after_long_help = AFTER_HELP, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a program with a software RDMA NIC
    Run(run::Options),
    /// Serve files as regions larger than memory
    Serve(serve::Options),
    /// Lend memory to other hosts, page by page
    MemoryNode(memory_node::Options),
    /// Serve memory nodes as a block device that a kernel swaps to
    SwapDevice(swap_device::Options),
    /// Export a directory whose files peers read and write one-sidedly
    Export(export::Options),
    /// Mount an exported directory as a file system
    Mount(mount::Options),
    /// Write back what a killed server has left in memory
    Recover(recover::Options),
    /// Show the device that a program gets
    Devices(devices::Options),
    /// Check what works here, and say what to do about the rest
    Doctor(doctor::Options),
    /// Show the counters of a running program's NIC
    Stat(stat::Options),
    /// Show queue pairs, regions and rates of running programs, live
    Top(top::Options),
    /// Measure regions larger than memory
    Bench(bench::Options),
    /// Handle the faults of programs whose memory is on memory nodes
    #[command(hide = true)]
    Pager(pager::Options),
}

/// The definition of the command line, from which `examples/manual.rs` writes man pages and completions.
pub fn definition() -> clap::Command {
    Cli::command()
}

/// The command line of this process. An empty variable counts as unset, as in the library.
fn parse() -> Cli {
    let is_empty =
        |arg: &clap::Arg| arg.get_env().and_then(std::env::var_os).is_some_and(|value| value.is_empty());
    let without_empty = |arg: clap::Arg| if is_empty(&arg) { arg.env(Resettable::Reset) } else { arg };
    let command = Cli::command().mut_subcommands(|command| command.mut_args(without_empty));
    Cli::from_arg_matches(&command.get_matches()).unwrap_or_else(|error| error.exit())
}

/// Runs the command with the arguments of this process.
pub fn run() -> ExitCode {
    let outcome = match parse().command {
        Command::Run(options) => run::run(&options).map_err(|error| (error.exit_code(), error.to_string())),
        Command::Serve(options) => {
            serve::serve(&options).map_err(|error| (serve::exit_code(&error), error.to_string()))
        }
        Command::MemoryNode(options) => memory_node::memory_node(&options)
            .map_err(|error| (usage_or_1(error.is_usage()), error.to_string())),
        Command::SwapDevice(options) => swap_device::swap_device(&options)
            .map_err(|error| (usage_or_1(error.is_usage()), error.to_string())),
        Command::Export(options) => {
            export::export(&options).map_err(|error| (usage_or_1(error.is_usage()), error.to_string()))
        }
        Command::Mount(options) => {
            mount::mount(&options).map_err(|error| (usage_or_1(error.is_usage()), error.to_string()))
        }
        Command::Recover(options) => recover::recover(&options).map_err(|error| (1, error.to_string())),
        Command::Devices(options) => {
            devices::show(&options).map_err(|error| (usage_or_1(error.is_usage()), error.to_string()))
        }
        Command::Doctor(options) => {
            doctor::doctor(&options).map_err(|error| (usage_or_1(error.is_usage()), error.to_string()))
        }
        Command::Stat(options) => stat::show(&options).map_err(|error| (1, error.to_string())),
        Command::Top(options) => top::top(&options).map_err(|error| (1, error.to_string())),
        Command::Pager(options) => pager::serve(&options).map_err(|error| (1, error.to_string())),
        Command::Bench(options) => {
            bench::bench(&options).map_err(|error| (usage_or_1(error.is_usage()), error.to_string()))
        }
    };
    let (code, message) = match outcome {
        Ok(()) => (ExitCode::SUCCESS, None),
        Err((code, message)) => (ExitCode::from(code), Some(format!("terrace: {message}"))),
    };
    standard_error::finish(message.as_deref());
    code
}
