//! The utilisation of remote memory by scheme, as in figure 7 of the ODRP paper, in one workload: a table, and a plot if a path
//! is given. `utilisation [PLOT.svg]`

#[path = "../tests/common/mod.rs"]
mod common;

use std::error::Error;

use terrace_far_memory::Scheme;

/// Of the plot, in pixels.
const ROW_HEIGHT: usize = 24;
const LEFT: usize = 110;
const BAR_WIDTH: f64 = 400.0;

fn main() -> Result<(), Box<dyn Error>> {
    let shares = Scheme::ALL.map(|scheme| (scheme, common::utilisation(scheme)));
    for (scheme, share) in shares {
        println!("{:<12} {:>5.1} %", scheme.name(), share * 100.0);
    }
    if let Some(path) = std::env::args().nth(1) {
        std::fs::write(path, plot(&shares))?;
    }
    Ok(())
}

fn plot(shares: &[(Scheme, f64)]) -> String {
    let (width, height) = (LEFT + BAR_WIDTH as usize + 80, 44 + ROW_HEIGHT * shares.len());
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n\
         <text x=\"12\" y=\"22\" font-size=\"14\">Stored pages over pages that clients have; more is better</text>\n"
    );
    for (row, (scheme, share)) in shares.iter().enumerate() {
        let (y, length) = (36 + ROW_HEIGHT * row, BAR_WIDTH * share);
        svg += &format!(
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{scheme}</text>\n\
             <rect x=\"{LEFT}\" y=\"{y}\" width=\"{length:.1}\" height=\"16\" fill=\"#0f4c81\"/>\n\
             <text x=\"{:.1}\" y=\"{}\">{:.1} %</text>\n",
            LEFT - 8,
            y + 13,
            LEFT as f64 + length + 6.0,
            y + 13,
            share * 100.0
        );
    }
    svg + "</svg>\n"
}
