//! Plots of figures as SVG and PNG.

mod draw;
mod font;

use std::path::{Path, PathBuf};

use plotters::prelude::*;

use crate::plan::{Kind, Metric};
use crate::results::FigureResults;

pub use font::{FontError, load_font};

/// Width and height in pixels.
const SIZE: (u32, u32) = (900, 540);

/// An error of drawing a plot.
#[derive(Debug, thiserror::Error)]
pub enum PlotError {
    /// There is no font.
    #[error(transparent)]
    Font(#[from] FontError),
    /// The file cannot be written, or an element cannot be drawn.
    #[error("cannot draw {path}: {reason}")]
    Draw {
        /// The file.
        path: PathBuf,
        /// The error.
        reason: String,
    },
}

/// A figure to draw.
#[derive(Clone, Debug)]
pub struct Figure {
    /// The title above the chart.
    pub title: String,
    /// The label below the axis.
    pub x_label: String,
    /// The label beside the axis.
    pub y_label: String,
    /// The shape of the series.
    pub shape: Shape,
    /// The series: one for each mode, or for each percentile.
    pub series: Vec<Series>,
}

/// The shape of the series.
#[derive(Clone, Debug)]
pub enum Shape {
    /// A line with a point for each category.
    Lines(Vec<String>),
    /// A bar for each category and series.
    Bars {
        /// The labels below the groups.
        categories: Vec<String>,
        /// Whether the scale is logarithmic.
        is_logarithmic: bool,
    },
    /// A line over time.
    Time {
        /// The interval of the values in seconds.
        step: f64,
    },
}

/// A series of numbers; `None` for points that failed.
#[derive(Clone, Debug)]
pub struct Series {
    /// The name in the legend.
    pub name: String,
    /// The values, one for each category.
    pub values: Vec<Option<f64>>,
}

impl Figure {
    /// The figure of a plan's results.
    pub fn new(results: &FigureResults) -> Figure {
        let plan = &results.plan;
        let x_label = plan.x.as_ref().map_or(String::new(), |x| x.label.clone());
        let mut categories: Vec<String> = Vec::new();
        for row in &results.rows {
            if !categories.contains(&row.x) {
                categories.push(row.x.clone());
            }
        }
        let (shape, y_label, series) = match plan.kind {
            Kind::Lines => (Shape::Lines(categories.clone()), THROUGHPUT, throughput(results, &categories)),
            Kind::Bars => (
                Shape::Bars { categories: categories.clone(), is_logarithmic: false },
                THROUGHPUT,
                throughput(results, &categories),
            ),
            Kind::Time => {
                (Shape::Time { step: crate::workload::STEP.as_secs_f64() }, THROUGHPUT, over_time(results))
            }
            Kind::Latency => latency(results),
        };
        let x_label = if plan.kind == Kind::Time { "Time (s)".to_owned() } else { x_label };
        Figure { title: plan.title.clone(), x_label, y_label: y_label.to_owned(), shape, series }
    }

    /// Writes `NAME.svg` and `NAME.png`.
    pub fn write(&self, dir: &Path, name: &str) -> Result<(), PlotError> {
        load_font()?;
        self.write_svg(&dir.join(format!("{name}.svg")))?;
        self.write_png(&dir.join(format!("{name}.png")))
    }

    fn write_svg(&self, path: &Path) -> Result<(), PlotError> {
        let mut text = String::new();
        let root = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        draw::draw(&root, self).map_err(|reason| failed(path, reason))?;
        root.present().map_err(|error| failed(path, error.to_string()))?;
        drop(root);
        std::fs::write(path, text).map_err(|error| failed(path, error.to_string()))
    }

    fn write_png(&self, path: &Path) -> Result<(), PlotError> {
        let mut pixels = vec![0; SIZE.0 as usize * SIZE.1 as usize * 3];
        {
            let root = BitMapBackend::with_buffer(&mut pixels, SIZE).into_drawing_area();
            draw::draw(&root, self).map_err(|reason| failed(path, reason))?;
            root.present().map_err(|error| failed(path, error.to_string()))?;
        }
        let file = std::fs::File::create(path).map_err(|error| failed(path, error.to_string()))?;
        let mut encoder = png::Encoder::new(std::io::BufWriter::new(file), SIZE.0, SIZE.1);
        encoder.set_color(png::ColorType::Rgb);
        let written = encoder.write_header().and_then(|mut writer| writer.write_image_data(&pixels));
        written.map_err(|error| failed(path, error.to_string()))
    }
}

fn failed(path: &Path, reason: String) -> PlotError {
    PlotError::Draw { path: path.to_owned(), reason }
}

const THROUGHPUT: &str = "Throughput (ops/s)";

fn throughput(results: &FigureResults, categories: &[String]) -> Vec<Series> {
    let modes = results.plan.modes.iter().map(ToString::to_string);
    modes
        .map(|mode| {
            let value = |x: &String| {
                let row = results.rows.iter().find(|row| row.mode == mode && row.x == *x)?;
                row.value(Metric::OpsPerS)
            };
            Series { values: categories.iter().map(value).collect(), name: mode }
        })
        .collect()
}

fn over_time(results: &FigureResults) -> Vec<Series> {
    let series = |timeline: &crate::results::Timeline| Series {
        name: timeline.mode.clone(),
        values: timeline.ops_per_s.iter().map(|&value| Some(value)).collect(),
    };
    results.timelines.iter().map(series).collect()
}

/// Groups of percentiles, one group for each point.
fn latency(results: &FigureResults) -> (Shape, &'static str, Vec<Series>) {
    let categories =
        results.rows.iter().map(|row| format!("{} {}", row.mode, row.x).trim().to_owned()).collect();
    let series = [("p50", Metric::P50Us), ("p99", Metric::P99Us), ("p99.9", Metric::P999Us)]
        .map(|(name, metric)| Series {
            name: name.to_owned(),
            values: results.rows.iter().map(|row| row.value(metric)).collect(),
        })
        .into();
    (Shape::Bars { categories, is_logarithmic: true }, "Latency (us)", series)
}
