//! `terrace doctor`: what works here, each by a trial where one is possible.
//!
//! | module | checks |
//! |---|---|
//! | `check` | nothing: what a check reports |
//! | `libraries` | the libraries that programs load |
//! | `limits` | limits of the process, its control groups and the system |
//! | `kernel` | what the kernel permits |
//! | `network` | address, UDP, socket buffers |

mod check;
mod kernel;
mod libraries;
mod limits;
mod network;

use std::io;

use clap::{Args, Subcommand};
use serde::Serialize;

use check::Check;

use crate::json;
use crate::output::print;

const AFTER_HELP: &str = "\
Examples:
  terrace doctor
  terrace doctor --addr 192.0.2.1
  terrace doctor --json | jq -r '.checks[] | select(.state != \"ok\") | .name'

Each line names what was checked, and its state:
  ok       works
  limited  works with the consequence that the line gives
  missing  does not work here; the line says what does without it
A line below says what to do. Lines marked * are necessary for every program.

The checks apply to this user in this environment: run the command where the program is to run, in
its container and as its user. Firewalls between hosts are not checked.

The exit status is 0 if everything that is necessary works, and 1 otherwise.";

/// Options of `terrace doctor`.
#[derive(Args)]
#[command(after_long_help = AFTER_HELP, args_conflicts_with_subcommands = true)]
pub struct Options {
    #[command(subcommand)]
    probe: Option<Probe>,
    /// Address of this host, as for `terrace run`
    #[arg(long, value_name = "ADDRESS", env = "TERRACE_ADDR", hide_env_values = true)]
    addr: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Parts of checks that need a process of their own. The command starts itself with them.
#[derive(Subcommand)]
enum Probe {
    /// Print the paths that are mapped in this process and end with one of these names
    #[command(hide = true)]
    Mapped {
        /// File names
        names: Vec<String>,
    },
    /// Copy bytes from another process
    #[command(hide = true)]
    ReadMemory {
        /// The process
        pid: i32,
        /// The address of its bytes
        address: usize,
    },
}

/// An error of the command.
#[derive(Debug, thiserror::Error)]
pub enum DoctorError {
    /// The address cannot be parsed.
    #[error(transparent)]
    Address(#[from] crate::run::RunError),
    /// Something that is necessary does not work.
    #[error("necessary, and does not work here: {0}")]
    NotReady(String),
    /// A probe did not work, for the process that started it.
    #[error("{0}")]
    Probe(#[source] io::Error),
    /// Standard output is closed or full.
    #[error("cannot write: {0}")]
    Output(#[from] io::Error),
}

impl DoctorError {
    /// Whether the command line is wrong.
    pub fn is_usage(&self) -> bool {
        matches!(self, DoctorError::Address(_))
    }
}

/// The JSON document.
#[derive(Serialize)]
struct Report {
    /// Whether everything that is necessary works.
    is_ready: bool,
    checks: Vec<Check>,
}

/// Checks everything, and prints the result.
pub fn doctor(options: &Options) -> Result<(), DoctorError> {
    match &options.probe {
        Some(Probe::Mapped { names }) => return Ok(libraries::print_mapped(names)?),
        Some(Probe::ReadMemory { pid, address }) => {
            return kernel::read_memory(*pid, *address).map_err(DoctorError::Probe);
        }
        None => {}
    }
    let checks = all_checks(options)?;
    let missing: Vec<&str> =
        checks.iter().filter(|check| !check.permits_programs()).map(|check| check.name).collect();
    let refusal = (!missing.is_empty()).then(|| DoctorError::NotReady(missing.join(", ")));
    let text = match options.json {
        true => json::document(&Report { is_ready: refusal.is_none(), checks }),
        false => text(&checks),
    };
    print(&text)?;
    refusal.map_or(Ok(()), Err)
}

fn all_checks(options: &Options) -> Result<Vec<Check>, DoctorError> {
    let config = crate::run::parse_port(options.addr.as_deref(), None)?;
    let mut checks = libraries::checks();
    checks.extend(network::checks(&config));
    checks.extend(limits::checks());
    checks.extend(kernel::checks());
    Ok(checks)
}

/// A line for each check, and one for what to do.
fn text(checks: &[Check]) -> String {
    let width = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    let lines = checks.iter().map(|check| {
        let mark = if check.is_necessary { '*' } else { ' ' };
        let advice = check
            .advice
            .as_ref()
            .map_or(String::new(), |advice| format!("{:>width$}   do: {advice}\n", "", width = width + 10));
        format!("{:<7} {mark} {:<width$}  {}\n{advice}", check.state.name(), check.name, check.meaning)
    });
    lines.collect::<String>() + "\n* necessary for every program\n"
}

#[cfg(test)]
mod tests {
    use super::check::State;
    use super::*;

    #[test]
    fn each_check_has_a_line_and_what_to_do_is_below_it() {
        let checks = [
            Check::ok("library", "is loaded").necessary(),
            Check::missing("io_uring", "threads read files", "allow it"),
        ];
        let text = text(&checks);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "ok      * library   is loaded");
        assert_eq!(lines[1], "missing   io_uring  threads read files");
        assert_eq!(lines[2], "                     do: allow it");
    }

    #[test]
    fn only_necessary_checks_decide() {
        let missing = || Check::missing("name", "meaning", "advice");
        assert!(missing().permits_programs() && !missing().necessary().permits_programs());
        assert!(Check::limited("name", "meaning", "advice").necessary().permits_programs());
        assert_eq!(missing().state, State::Missing);
    }
}
