//! `terrace top`: a live view of the processes that run with Terrace, from the source of `terrace stat`.
//!
//! | module | does |
//! |---|---|
//! | `sample` | asks the processes, and computes rates from two samples |
//! | `view` | draws a screen |

mod sample;
mod view;

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use clap::Args;
use nix::sys::signalfd::SignalFd;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use sample::Sample;

use crate::termination;

/// How often the view asks for signals while it waits.
const SIGNALS_INTERVAL: Duration = Duration::from_millis(100);

const AFTER_HELP: &str = "\
Examples:
  terrace top                # all processes of this user; root sees those of all users
  terrace top 4242
  terrace top --interval 5

Keys: q, Escape and Ctrl-C quit; the arrow keys, or j and k, choose a process.

Of the chosen process the screen shows rates of its port; its regions larger than memory with the
share that is resident, and the accesses a second for each MiB of the region (heat); and its queue
pairs, those with the most traffic first. `terrace stat PID` shows all counters.";

/// Options of `terrace top`.
#[derive(Args)]
#[command(after_long_help = AFTER_HELP)]
pub struct Options {
    /// Process to show; without it, all processes are listed
    pid: Option<u32>,
    /// Time between two samples, a day at most
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    interval: u64,
}

/// An error of the view.
#[derive(Debug, thiserror::Error)]
pub enum TopError {
    /// Keys are read from the terminal, and the screen is drawn on it.
    #[error("not a terminal: use `terrace stat --watch` to write to a file or a pipe")]
    NoTerminal,
    /// The kernel's list of sockets cannot be read.
    #[error("cannot list the processes that run with Terrace: {0}")]
    List(#[source] io::Error),
    /// The process has no NIC.
    #[error(
        "process {0} does not run with Terrace, or has not opened its device (`terrace stat` lists those that have)"
    )]
    NoDevice(u32),
    /// The terminal fails.
    #[error("the terminal fails: {0}")]
    Terminal(#[from] io::Error),
}

/// Shows the view until the user quits, SIGINT, SIGTERM or SIGHUP: each restores the terminal.
pub fn top(options: &Options) -> Result<(), TopError> {
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        return Err(TopError::NoTerminal);
    }
    let first = Sample::take(options.pid).map_err(TopError::List)?;
    if let (Some(pid), true) = (options.pid, first.processes.is_empty()) {
        return Err(TopError::NoDevice(pid));
    }
    let mut screen = Screen::new(first, options.interval);
    let signals = termination::descriptor(&termination::block(&[]))?;
    let mut terminal = ratatui::try_init()?;
    let outcome = show(&mut terminal, &mut screen, options, &signals);
    ratatui::restore();
    outcome
}

/// Draws, and waits for a key, a signal or the next sample.
fn show(
    terminal: &mut DefaultTerminal,
    screen: &mut Screen,
    options: &Options,
    signals: &SignalFd,
) -> Result<(), TopError> {
    let interval = Duration::from_secs(options.interval);
    let mut next = Instant::now() + interval;
    loop {
        terminal.draw(|frame| view::draw(frame, screen))?;
        match wait(next, signals)? {
            Woken::Signal => return Ok(()),
            Woken::Time => {
                screen.add(Sample::take(options.pid).map_err(TopError::List)?);
                next = Instant::now() + interval;
            }
            Woken::Event(Event::Key(key)) if key.kind == KeyEventKind::Press && screen.handle_key(key) => {
                return Ok(());
            }
            Woken::Event(_) => {}
        }
    }
}

/// Why a wait has ended.
enum Woken {
    Event(Event),
    Signal,
    Time,
}

/// Waits for an event of the terminal, a signal or a time.
fn wait(until: Instant, signals: &SignalFd) -> Result<Woken, TopError> {
    loop {
        if let Ok(Some(_)) = signals.read_signal() {
            return Ok(Woken::Signal);
        }
        let left = until.saturating_duration_since(Instant::now());
        if event::poll(left.min(SIGNALS_INTERVAL))? {
            return Ok(Woken::Event(event::read()?));
        }
        if left <= SIGNALS_INTERVAL {
            return Ok(Woken::Time);
        }
    }
}

/// What is shown.
struct Screen {
    now: Sample,
    before: Option<Sample>,
    interval_s: u64,
    /// The process whose details are shown.
    chosen: Option<u32>,
}

impl Screen {
    fn new(now: Sample, interval_s: u64) -> Screen {
        let chosen = now.processes.first().map(|process| process.pid);
        Screen { now, before: None, interval_s, chosen }
    }

    /// Replaces the sample. If the chosen process has ended, the first one is chosen.
    fn add(&mut self, sample: Sample) {
        self.before = Some(std::mem::replace(&mut self.now, sample));
        if self.chosen_index().is_none() {
            self.chosen = self.now.processes.first().map(|process| process.pid);
        }
    }

    fn chosen_index(&self) -> Option<usize> {
        self.now.processes.iter().position(|process| Some(process.pid) == self.chosen)
    }

    /// Handles a key. Returns whether the user quits.
    fn handle_key(&mut self, key: KeyEvent) -> bool {
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return true,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return true,
            KeyCode::Up | KeyCode::Char('k') => self.choose(|index| index.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.choose(|index| index + 1),
            _ => {}
        }
        false
    }

    fn choose(&mut self, other: impl FnOnce(usize) -> usize) {
        let last = self.now.processes.len().saturating_sub(1);
        let index = other(self.chosen_index().unwrap_or(0)).min(last);
        self.chosen = self.now.processes.get(index).map(|process| process.pid);
    }
}

#[cfg(test)]
mod tests {
    use super::sample::Process;
    use super::*;

    fn screen(pids: &[u32]) -> Screen {
        Screen::new(sample(pids), 1)
    }

    fn sample(pids: &[u32]) -> Sample {
        let process = |pid: &u32| Process { pid: *pid, program: "p".into(), answer: Ok(Vec::new()) };
        Sample { at: Instant::now(), processes: pids.iter().map(process).collect() }
    }

    #[test]
    fn keys_choose_a_process_and_quit() {
        let mut screen = screen(&[3, 5, 8]);
        let mut press = |code: KeyCode| (screen.handle_key(code.into()), screen.chosen);
        assert_eq!(press(KeyCode::Down), (false, Some(5)));
        assert_eq!(press(KeyCode::Char('j')), (false, Some(8)));
        assert_eq!(press(KeyCode::Down), (false, Some(8)));
        assert_eq!(press(KeyCode::Up), (false, Some(5)));
        assert!(press(KeyCode::Char('q')).0 && press(KeyCode::Esc).0 && !press(KeyCode::Char('c')).0);
        assert!(screen.handle_key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)));
    }

    #[test]
    fn the_first_process_is_chosen_when_the_chosen_one_has_ended() {
        let mut screen = screen(&[3, 5]);
        screen.handle_key(KeyCode::Down.into());
        screen.add(sample(&[2, 3, 5]));
        assert_eq!(screen.chosen, Some(5));
        screen.add(sample(&[2, 3]));
        assert_eq!(screen.chosen, Some(2));
        screen.add(sample(&[]));
        assert_eq!(screen.chosen, None);
        screen.handle_key(KeyCode::Down.into());
        assert_eq!(screen.chosen, None);
    }
}
