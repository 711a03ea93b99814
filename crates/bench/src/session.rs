//! A run of plans. Results are written after each plan.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::machine::Machine;
use crate::plan::{Kind, Length, Mode, Plan, PlanError, Point, Timing};
use crate::plot::{Figure, FontError, PlotError, load_font};
use crate::progress::Progress;
use crate::ratios::{RatioPlan, Rounds, Verdict, judge};
use crate::report;
use crate::results::{Document, FigureResults, ResultsError, Row, Timeline, write_verdicts};
use crate::runner::{Runner, estimates};
use crate::test_harness::{REHEARSAL_REGION_BYTES, TestHarness};

/// An error that ends a run.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// A plan is invalid.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// No plan has points of the chosen modes.
    #[error("no plan has a point of the chosen modes")]
    Nothing,
    /// Results cannot be written.
    #[error(transparent)]
    Results(#[from] ResultsError),
    /// A plot cannot be drawn.
    #[error(transparent)]
    Plot(#[from] PlotError),
    /// There is no font for plots.
    #[error(transparent)]
    Font(#[from] FontError),
}

/// A plan to run.
#[derive(Clone, Debug)]
pub enum Input {
    /// A figure or table.
    Figure(Box<Plan>),
    /// Promised ratios.
    Ratios(Box<RatioPlan>),
}

impl Input {
    /// Reads a file of either kind.
    pub fn load(path: &Path) -> Result<Input, PlanError> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| PlanError::Read { path: path.to_owned(), error })?;
        match RatioPlan::is_ratio_plan(&text) {
            true => Ok(Input::Ratios(Box::new(RatioPlan::parse(&text, path)?))),
            false => Ok(Input::Figure(Box::new(Plan::parse(&text, path)?))),
        }
    }

    /// Removes the points of other modes; empty means all modes. Ratios retain all points.
    fn retain_modes(&mut self, modes: &[Mode]) {
        if let (Input::Figure(plan), false) = (self, modes.is_empty()) {
            plan.modes.retain(|mode| modes.contains(mode));
        }
    }

    /// Reduces the size of the region for a rehearsal.
    fn shrink_region(&mut self) {
        match self {
            Input::Figure(plan) => plan.settings.region = plan.settings.region.min(REHEARSAL_REGION_BYTES),
            Input::Ratios(plan) => {
                let size = crate::bytes::format(REHEARSAL_REGION_BYTES);
                plan.settings.insert("region".to_owned(), size.into());
            }
        }
    }

    /// The points in the order of measurement.
    ///
    /// # Errors
    /// If a point is invalid.
    pub fn points(&self, length: Length) -> Result<Vec<(Point, Timing)>, String> {
        match self {
            Input::Figure(plan) => {
                let timing = plan.timing(length);
                Ok(plan.points(length)?.into_iter().map(|point| (point, timing)).collect())
            }
            Input::Ratios(plan) => {
                let schedule = plan.schedule(length)?;
                Ok(schedule.into_iter().map(|(_, point, timing)| (point, timing)).collect())
            }
        }
    }
}

/// The options of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The short or the full setting.
    pub length: Length,
    /// The modes to measure; empty means all.
    pub modes: Vec<Mode>,
    /// The directory in which the run's directory is created.
    pub out: PathBuf,
    /// The directory of the region's file, for the machine's description.
    pub data: PathBuf,
    /// Whether this is a rehearsal, without meaningful numbers.
    pub is_rehearsal: bool,
}

/// The results of a run.
#[derive(Debug)]
pub struct Summary {
    /// All results, as in `results.json`.
    pub document: Document,
    /// The directory of the files.
    pub dir: PathBuf,
    /// The number of failed points.
    pub failed: usize,
    /// The number of ratios that missed their thresholds.
    pub missed: usize,
}

/// Runs plans.
pub fn run(
    mut inputs: Vec<Input>,
    harness: &mut dyn TestHarness,
    options: &Options,
) -> Result<Summary, SessionError> {
    // A missing font is reported before the measurements, not after a quarter of an hour.
    load_font()?;
    for input in &mut inputs {
        input.retain_modes(&options.modes);
        if options.is_rehearsal {
            input.shrink_region();
        }
    }
    inputs.retain(|input| !matches!(input, Input::Figure(plan) if plan.modes.is_empty()));
    let points: Vec<(Point, Timing)> =
        inputs.iter().flat_map(|input| input.points(options.length).unwrap_or_default()).collect();
    if points.is_empty() {
        return Err(SessionError::Nothing);
    }
    let dir = create_dir(options)?;
    let machine = Machine::describe(&options.data);
    let length = if options.length == Length::Full { "full" } else { "short" };
    let document = Document {
        machine,
        processors: harness.processors(),
        length,
        is_rehearsal: options.is_rehearsal,
        figures: Vec::new(),
        ratios: Vec::new(),
    };
    let progress = Progress::new(estimates(&points));
    let (machine, processors) = (document.machine.line(), &document.processors);
    progress.print_line(&format!("{} points on {machine}; {processors}", points.len()));
    let summary = Summary { document, dir, failed: 0, missed: 0 };
    let mut session = Session { runner: Runner::new(harness), progress, summary };
    for input in inputs {
        match input {
            Input::Figure(plan) => session.run_figure(*plan, options.length)?,
            Input::Ratios(plan) => session.run_ratios(&plan, options.length)?,
        }
        // Results are written after each plan, so that an interrupted run has the results so far.
        session.summary.document.write(&session.summary.dir)?;
        report::write(&session.summary.document, &session.summary.dir)?;
    }
    Ok(session.summary)
}

struct Session<'a> {
    runner: Runner<'a>,
    progress: Progress,
    summary: Summary,
}

impl Session<'_> {
    fn run_figure(&mut self, plan: Plan, length: Length) -> Result<(), SessionError> {
        let timing = plan.timing(length);
        let mut results =
            FigureResults { plan: plan.clone(), timing, rows: Vec::new(), timelines: Vec::new() };
        for point in plan.points(length).unwrap_or_default() {
            let outcome = self.run_point(&plan.figure, &point, &timing);
            results.push(Row::new(&plan, &point, &outcome));
            if let (Kind::Time, Ok(outcome)) = (plan.kind, &outcome) {
                results.timelines.push(Timeline::new(&point, outcome));
            }
        }
        results.write_csv(&self.summary.dir)?;
        let mut figure = Figure::new(&results);
        if self.summary.document.is_rehearsal {
            figure.title += " (rehearsal, without meaningful numbers)";
        }
        figure.write(&self.summary.dir, &plan.figure)?;
        self.summary.document.figures.push(results);
        Ok(())
    }

    fn run_ratios(&mut self, plan: &RatioPlan, length: Length) -> Result<(), SessionError> {
        let mut outcomes: Vec<Rounds> = vec![Vec::new(); plan.points.len()];
        for (index, point, timing) in plan.schedule(length).unwrap_or_default() {
            outcomes[index].push(self.run_point("ratios", &point, &timing));
        }
        let verdicts: Vec<Verdict> = judge(plan, &outcomes);
        write_verdicts(&self.summary.dir, &verdicts)?;
        self.summary.missed += verdicts.iter().filter(|verdict| !verdict.is_threshold_met()).count();
        self.summary.document.ratios.extend(verdicts);
        Ok(())
    }

    fn run_point(
        &mut self,
        figure: &str,
        point: &Point,
        timing: &Timing,
    ) -> Result<crate::runner::Outcome, String> {
        let name = format!("{figure} {} {}", point.mode, point.x);
        self.progress.begin(name.trim_end());
        let outcome = self.runner.run(point, timing);
        let result = match &outcome {
            Ok(outcome) => format!("{:.0} ops/s", outcome.measured.ops_per_s()),
            Err(error) => format!("FAILED: {error}"),
        };
        self.progress.end(name.trim_end(), &result);
        if outcome.is_err() {
            self.summary.failed += 1;
            self.progress.print_line(&format!("{}: {result}", name.trim_end()));
        }
        outcome
    }
}

/// Creates the directory of the results.
fn create_dir(options: &Options) -> Result<PathBuf, SessionError> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let kind = match (options.is_rehearsal, options.length) {
        (true, _) => "rehearsal",
        (false, Length::Short) => "short",
        (false, Length::Full) => "full",
    };
    let path = options.out.join(format!("{}-{kind}", stamp(since.as_secs())));
    std::fs::create_dir_all(&path).map_err(|error| ResultsError { path: path.clone(), error })?;
    Ok(path)
}

/// Seconds since 1970 as `20261121-150102`, in UTC.
fn stamp(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // If years begin in March, the leap day is the last day, and months have a formula (Hinnant's civil_from_days).
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}{month:02}{day:02}-{:02}{:02}{:02}", rest / 3600, rest / 60 % 60, rest % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_are_dates() {
        assert_eq!(stamp(0), "19700101-000000");
        assert_eq!(stamp(951_782_399), "20000228-235959");
        assert_eq!(stamp(951_782_400), "20000229-000000");
        assert_eq!(stamp(1_795_273_262), "20261121-150102");
    }
}
