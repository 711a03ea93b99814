//! Options with a list of values, which help, man pages and completions show, each with a line about it.

use std::error::Error;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use terrace_bench::plan::Mode;
use terrace_far_memory::{PAGE_BYTES, Scheme};
use terrace_faults::FaultPlan;
use terrace_nic::{NicModel, PathChoice};
use terrace_node::ServeMode;
use terrace_pages::size;

use crate::pager::Prefetch;

const PATHS: [(&str, &str); 3] = [
    ("auto", "Shared memory where possible; UDP if packets are captured or faults injected"),
    ("udp", "UDP"),
    ("local", "Shared memory where possible, whatever else is configured"),
];

const NICS: [(&str, &str); 2] = [
    ("terrace", "It knows which pages of regions are absent, and waits for them"),
    ("commodity", "It knows nothing of absence; NP-RDMA, at both ends, makes up for that"),
];

const PREFETCH: [(&str, &str); 2] = [
    ("on", "Pages that a trend of faults leads to are loaded ahead"),
    ("off", "Pages are loaded when they are touched"),
];

/// How a memory node allocates pages.
const SCHEMES: [(&str, &str); 5] = [
    ("odrp", "The NIC allocates and copies pages, by chains of work requests"),
    ("static", "Baseline: a client's whole space is reserved when it connects"),
    ("dynamic-1m", "Baseline: this process allocates slabs of 1 MiB, on request"),
    ("dynamic-4k", "Baseline: this process allocates pages, on request"),
    ("two-sided", "Baseline: this process allocates and copies pages, on request"),
];

/// The modes of servers, and of the figures that measure them.
const MODES: [(&str, &str); 9] = [
    ("pin", "The whole region is locked in memory"),
    ("odp", "A model of hardware with on-demand paging"),
    ("rpc", "RPC; the server copies from the mapping, with page faults"),
    ("rpc-buffer", "RPC; the server reads through the page cache"),
    ("rpc-direct", "RPC; the server bypasses the page cache"),
    ("rpc-tiering", "RPC; cached pages through the page cache, others bypassing it"),
    ("rpc-tiering-promote", "RPC to pages in memory"),
    ("term", "One-sided; clients detect absent pages, and READ them on queue pairs of their own"),
    ("wait", "One-sided; the NIC fetches absent pages"),
];

/// `--path`.
pub fn path() -> impl TypedValueParser<Value = PathChoice> {
    one_of(&PATHS)
}

/// `--prefetch`.
pub fn prefetch() -> impl TypedValueParser<Value = Prefetch> {
    one_of(&PREFETCH)
}

/// `--scheme`.
pub fn scheme() -> impl TypedValueParser<Value = Scheme> {
    one_of(&SCHEMES)
}

/// `--nic`.
pub fn nic() -> impl TypedValueParser<Value = NicModel> {
    one_of(&NICS)
}

/// `--mode` of `terrace serve`.
pub fn serve_mode() -> impl TypedValueParser<Value = ServeMode> {
    one_of(&MODES)
}

/// `--mode` of `terrace bench`.
pub fn bench_mode() -> impl TypedValueParser<Value = Mode> {
    one_of(&MODES)
}

/// `--fault-plan`: the path of a valid plan.
pub fn fault_plan(text: &str) -> Result<PathBuf, String> {
    FaultPlan::load(text.as_ref()).map_err(|error| error.to_string())?;
    Ok(text.into())
}

/// A time: 0 or more seconds, a year at most.
pub fn seconds(text: &str) -> Result<Duration, String> {
    const SECONDS_MAX: f64 = 365.0 * 24.0 * 3600.0;
    let seconds = text.parse().ok().filter(|seconds| (0.0..=SECONDS_MAX).contains(seconds));
    let seconds = seconds.ok_or("it is a number of seconds, 0 or more and a year at most, such as 0.5")?;
    Ok(Duration::from_secs_f64(seconds))
}

/// Memory of at least one page.
pub fn pages_size(text: &str) -> Result<u64, String> {
    let bytes = size::parse(text).map_err(|error| error.to_string())?;
    if bytes < PAGE_BYTES as u64 {
        Err(format!("it is at least a page of {PAGE_BYTES} bytes"))
    } else {
        Ok(bytes)
    }
}

fn one_of<T>(values: &'static [(&'static str, &'static str)]) -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err: Into<Box<dyn Error + Send + Sync>>> + Clone + Send + Sync + 'static,
{
    let values = values.iter().map(|(name, help)| PossibleValue::new(*name).help(*help));
    PossibleValuesParser::new(values).try_map(|name| name.parse::<T>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_finite_and_not_negative() {
        assert_eq!(seconds("0"), Ok(Duration::ZERO));
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["-1", "nan", "inf", "1e300", "", "1s"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_listed_value_is_one_and_none_is_missing() {
        assert!(
            PATHS
                .iter()
                .all(|(name, _)| name.parse::<PathChoice>().is_ok_and(|path| path.to_string() == *name))
        );
        assert!(
            NICS.iter().all(|(name, _)| name.parse::<NicModel>().is_ok_and(|nic| nic.to_string() == *name))
        );
        assert!(MODES.iter().all(|(name, _)| name.parse::<Mode>().is_ok()));
        let listed: Vec<&str> = MODES.iter().map(|(name, _)| *name).collect();
        assert_eq!(listed, ServeMode::ALL.map(|(_, name)| name));
    }
}
