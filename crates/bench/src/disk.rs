//! The disk's own limit, as fio measures it.

use std::path::Path;
use std::process::Command;

use serde::Serialize;

use crate::processors::Processors;

/// Random reads of 4 KiB, without the page cache.
const READ_BYTES: u64 = 4096;
/// The measured time, after a ramp-up of the second number.
const SECONDS: [&str; 2] = ["--runtime=1600ms", "--ramp_time=300ms"];

/// What the disk allows, measured beside a point.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum DiskLimit {
    /// Random reads of 4 KiB per second.
    Iops(f64),
    /// The reason why they were not measured.
    NotMeasured(String),
}

/// Measures random reads of a file with as many of them in flight as clients have accesses, on all processors.
pub fn measure(path: &Path, in_flight: usize, processors: &Processors) -> DiskLimit {
    let jobs = processors.count();
    let output = Command::new("fio")
        .args(["--name=limit", "--rw=randread", "--direct=1", "--ioengine=io_uring", "--readonly"])
        .args(["--time_based", "--group_reporting", "--output-format=json", "--thread"])
        .args(SECONDS)
        .arg(format!("--bs={READ_BYTES}"))
        .arg(format!("--numjobs={jobs}"))
        .arg(format!("--iodepth={}", in_flight.div_ceil(jobs)))
        .arg(format!("--cpus_allowed={}", processors.all()))
        .arg("--filename")
        .arg(path)
        .output();
    match output {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            DiskLimit::NotMeasured("fio is not installed".into())
        }
        Err(error) => DiskLimit::NotMeasured(format!("fio cannot be started: {error}")),
        Ok(output) => iops(&output.stdout).map_or_else(
            || {
                let said = String::from_utf8_lossy(&output.stderr);
                let line = said.lines().next().unwrap_or("no result");
                DiskLimit::NotMeasured(format!("fio: {}: {line}", output.status))
            },
            DiskLimit::Iops,
        ),
    }
}

/// Reads per second in fio's report.
fn iops(report: &[u8]) -> Option<f64> {
    // fio may print warnings before its report.
    let start = report.iter().position(|byte| *byte == b'{')?;
    let report: serde_json::Value = serde_json::from_slice(&report[start..]).ok()?;
    report.get("jobs")?.get(0)?.get("read")?.get("iops")?.as_f64().filter(|iops| *iops > 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_in_the_report() {
        let report = br#"fio: a warning
            {"fio version": "fio-3.33", "jobs": [{"jobname": "limit", "read": {"iops": 61234.5, "bw": 1}}]}"#;
        assert_eq!(iops(report), Some(61234.5));
        assert_eq!(iops(br#"{"jobs": [{"read": {"iops": 0.0}}]}"#), None);
        assert_eq!(iops(b"no report"), None);
    }

    #[test]
    fn a_missing_file_has_a_reason() {
        let limit = measure(Path::new("/nowhere/file"), 4, &Processors::divide());
        assert!(matches!(limit, DiskLimit::NotMeasured(reason) if reason.starts_with("fio")));
    }
}
