//! The drawing code, common to both formats.

use std::ops::Range;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, KeyPointHint, NoDefaultFormatting, ValueFormatter};
use plotters::prelude::*;

use super::{Figure, Series, Shape};

type Area<'a, Back> = DrawingArea<Back, Shift>;

/// A colour for each series, in order; distinct for colour-blind readers, too (Okabe and Ito's set).
const COLOURS: [RGBColor; 9] = [
    RGBColor(0, 0, 0),
    RGBColor(230, 159, 0),
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(86, 180, 233),
    RGBColor(204, 121, 167),
    RGBColor(148, 128, 20),
    RGBColor(110, 110, 110),
];

/// The modes with a fixed colour in all figures, in the order of [`COLOURS`].
const COLOURED_MODES: [&str; 9] =
    ["pin", "odp", "rpc", "term", "wait", "rpc-buffer", "rpc-direct", "rpc-tiering", "rpc-tiering-promote"];

/// The colour of a series: of its mode, or of its index.
fn colour(figure: &Figure, index: usize) -> RGBColor {
    let fixed = COLOURED_MODES.iter().position(|mode| *mode == figure.series[index].name);
    COLOURS[fixed.unwrap_or(index) % COLOURS.len()]
}

/// The width of the legend.
const LEGEND_PIXELS: i32 = 160;

/// Draws a figure. The error is the backend's.
pub fn draw<Back: DrawingBackend>(root: &Area<'_, Back>, figure: &Figure) -> Result<(), String> {
    root.fill(&WHITE).map_err(|error| error.to_string())?;
    let width = root.dim_in_pixel().0 as i32;
    let (chart, legend) = root.split_horizontally(width - LEGEND_PIXELS);
    let drawn = match &figure.shape {
        Shape::Lines(categories) => draw_lines(&chart, figure, categories),
        Shape::Time { step } => draw_time(&chart, figure, *step),
        Shape::Bars { categories, is_logarithmic: false } => {
            draw_bars(&chart, figure, categories, 0.0..top(figure))
        }
        Shape::Bars { categories, is_logarithmic: true } => {
            let bottom = 10_f64.powf(smallest_positive(figure).log10().floor());
            draw_bars(&chart, figure, categories, (bottom..top(figure).max(bottom * 10.0)).log_scale())
        }
    };
    drawn.and_then(|()| draw_legend(&legend, figure)).map_err(|error| error.to_string())
}

fn values(figure: &Figure) -> impl Iterator<Item = f64> {
    figure.series.iter().flat_map(|series| series.values.iter().flatten().copied())
}

/// The upper end of the axis, above the highest value.
fn top(figure: &Figure) -> f64 {
    values(figure).fold(0.0, f64::max).max(1.0) * 1.1
}

fn smallest_positive(figure: &Figure) -> f64 {
    values(figure).filter(|&value| value > 0.0).fold(f64::INFINITY, f64::min).clamp(1e-3, 1e9)
}

fn number(value: &f64) -> String {
    match *value {
        value if value >= 1e6 => format!("{:.1} M", value / 1e6),
        value if value >= 1e3 => format!("{:.0} k", value / 1e3),
        value => format!("{value:.0}"),
    }
}

/// An axis of categories. Category `n` is at coordinate `n`.
struct CategoryAxis<'a> {
    names: &'a [String],
    /// The space before the first category and after the last.
    margin: f64,
}

impl Ranged for CategoryAxis<'_> {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (low, high): (i32, i32)) -> i32 {
        let range = self.range();
        let share = (value - range.start) / (range.end - range.start);
        low + (share * f64::from(high - low)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        (0..self.names.len()).map(|index| index as f64).collect()
    }

    fn range(&self) -> Range<f64> {
        -self.margin..self.names.len() as f64 - 1.0 + self.margin
    }
}

impl ValueFormatter<f64> for CategoryAxis<'_> {
    fn format_ext(&self, value: &f64) -> String {
        self.names.get(value.round() as usize).cloned().unwrap_or_default()
    }
}

type Drawn<Back> = Result<(), DrawingAreaErrorKind<<Back as DrawingBackend>::ErrorType>>;

fn draw_lines<Back: DrawingBackend>(
    root: &Area<'_, Back>,
    figure: &Figure,
    categories: &[String],
) -> Drawn<Back> {
    let mut chart = ChartBuilder::on(root)
        .caption(&figure.title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(46)
        .y_label_area_size(76)
        .build_cartesian_2d(CategoryAxis { names: categories, margin: 0.3 }, 0.0..top(figure))?;
    chart
        .configure_mesh()
        .x_desc(&figure.x_label)
        .y_desc(&figure.y_label)
        .label_style(("sans-serif", 14))
        .y_label_formatter(&number)
        .light_line_style(TRANSPARENT)
        .draw()?;
    for (index, series) in figure.series.iter().enumerate() {
        let points = present(series).map(|(index, value)| (index as f64, value)).collect::<Vec<_>>();
        let style = colour(figure, index).stroke_width(2);
        chart.draw_series(LineSeries::new(points.iter().copied(), style))?;
        chart
            .draw_series(points.iter().map(|&point| Circle::new(point, 4, colour(figure, index).filled())))?;
    }
    Ok(())
}

fn present(series: &Series) -> impl Iterator<Item = (usize, f64)> {
    series.values.iter().enumerate().filter_map(|(index, value)| Some((index, (*value)?)))
}

fn draw_time<Back: DrawingBackend>(root: &Area<'_, Back>, figure: &Figure, step: f64) -> Drawn<Back> {
    let longest = figure.series.iter().map(|series| series.values.len()).max().unwrap_or(1);
    let mut chart = ChartBuilder::on(root)
        .caption(&figure.title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(46)
        .y_label_area_size(76)
        .build_cartesian_2d(0.0..(longest as f64 * step).max(step), 0.0..top(figure))?;
    chart
        .configure_mesh()
        .x_desc(&figure.x_label)
        .y_desc(&figure.y_label)
        .label_style(("sans-serif", 14))
        .y_label_formatter(&number)
        .light_line_style(TRANSPARENT)
        .draw()?;
    for (index, series) in figure.series.iter().enumerate() {
        let style = colour(figure, index).stroke_width(2);
        let points = present(series).map(|(index, value)| ((index as f64 + 0.5) * step, value));
        chart.draw_series(LineSeries::new(points, style))?;
    }
    Ok(())
}

/// The share of a category's width for its bars.
const GROUP_WIDTH: f64 = 0.8;

fn draw_bars<Back, Y>(root: &Area<'_, Back>, figure: &Figure, categories: &[String], y: Y) -> Drawn<Back>
where
    Back: DrawingBackend,
    Y: AsRangedCoord<Value = f64>,
    Y::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    let mut chart = ChartBuilder::on(root)
        .caption(&figure.title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(46)
        .y_label_area_size(76)
        .build_cartesian_2d(CategoryAxis { names: categories, margin: 0.5 }, y)?;
    chart
        .configure_mesh()
        .x_desc(&figure.x_label)
        .y_desc(&figure.y_label)
        .label_style(("sans-serif", 14))
        .disable_x_mesh()
        .y_label_formatter(&number)
        .light_line_style(TRANSPARENT)
        .draw()?;
    let width = GROUP_WIDTH / figure.series.len().max(1) as f64;
    let bottom = chart.y_range().start;
    for (index, series) in figure.series.iter().enumerate() {
        let style = colour(figure, index).filled();
        let bars = present(series).map(|(category, value)| {
            let left = category as f64 - GROUP_WIDTH / 2.0 + index as f64 * width;
            Rectangle::new([(left, bottom), (left + width * 0.92, value)], style)
        });
        chart.draw_series(bars)?;
    }
    Ok(())
}

/// Draws the legend beside the chart.
fn draw_legend<Back: DrawingBackend>(area: &Area<'_, Back>, figure: &Figure) -> Drawn<Back> {
    for (index, series) in figure.series.iter().enumerate() {
        let y = 50 + index as i32 * 22;
        area.draw(&Rectangle::new([(4, y), (18, y + 10)], colour(figure, index).filled()))?;
        area.draw(&Text::new(series.name.clone(), (24, y - 1), ("sans-serif", 13)))?;
    }
    Ok(())
}
