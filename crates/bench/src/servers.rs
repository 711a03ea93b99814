//! Servers for measurements: `terrace serve` in a control group, over a file that is not in the page cache.

use std::ffi::OsString;
use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use terrace_nic::{PathChoice, stat};
use terrace_node::kernel_bytes;

use crate::application::Application;
use crate::cgroup::Group;
use crate::disk::{self, DiskLimit};
use crate::leftovers;
use crate::plan::{Mode, Storage};
use crate::process::Process;
use crate::processors::{Processors, processor_time};
use crate::progress::ByteProgress;
use crate::storage::RegionFile;
use crate::target::{Connect, NodeRegion};
use crate::test_harness::{ServerCounts, ServerSpec, TestHarness, TestHarnessError, TestServer};

const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const REGION: &str = "bench";
/// The server's memory outside its budget: program and stacks, packet buffers, page tables of the mapping (1/500 of the
/// region), bounce buffers (at most 32 MiB).
const HEADROOM_BYTES: u64 = 64 << 20;
/// The time limit for a server's start. In mode `pin` the server reads the whole region first.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// What a region's file depends on: whether it is on tmpfs, its length, and the application of its content.
type FileKey = (bool, u64, Application);

fn file_key(spec: &ServerSpec) -> FileKey {
    (spec.storage == Storage::Tmpfs, spec.region, spec.application)
}

/// Starts servers. The regions' files exist until this is dropped.
pub struct Servers {
    program: PathBuf,
    data: PathBuf,
    path: PathChoice,
    logs: tempfile::TempDir,
    processors: Processors,
    files: Vec<(FileKey, RegionFile)>,
    started: u32,
    is_limited: bool,
}

impl Servers {
    /// Servers of the program at `program`, with files in the directory `data`. Clients use the transport `path`, and
    /// run on the processors that this moves the calling thread to.
    pub fn new(program: &Path, data: &Path, path: PathChoice) -> Result<Servers, TestHarnessError> {
        if !data.is_dir() {
            return Err(TestHarnessError(format!("--data {}: no such directory", data.display())));
        }
        let logs = tempfile::Builder::new()
            .prefix(&leftovers::name("logs"))
            .tempdir()
            .map_err(|error| TestHarnessError(format!("no directory for logs: {error}")))?;
        let processors = Processors::divide();
        processors.move_to_clients();
        Ok(Servers {
            processors,
            program: program.to_owned(),
            data: data.to_owned(),
            path,
            logs,
            files: Vec::new(),
            started: 0,
            is_limited: true,
        })
    }

    /// The same servers without limits on their memory, where this user may not limit it.
    pub fn unlimited(self) -> Servers {
        Servers { is_limited: false, ..self }
    }

    /// The region's file, which is created if necessary and dropped from the page cache.
    fn region_file(&mut self, spec: &ServerSpec) -> Result<&RegionFile, TestHarnessError> {
        let (key, len) = (file_key(spec), spec.region);
        if !self.files.iter().any(|(of, _)| *of == key) {
            let progress = ByteProgress::new("writing the region's file", len);
            let mut report = |bytes| progress.set_bytes(bytes);
            let file = RegionFile::create(spec.storage, &self.data, len, spec.application, &mut report);
            progress.end();
            self.files.push((key, file.map_err(to_harness_error)?));
        }
        let (_, file) = self.files.iter().find(|(of, _)| *of == key).expect("the file was created above");
        file.drop_from_page_cache().map_err(to_harness_error)?;
        Ok(file)
    }
}

fn to_harness_error(error: impl std::fmt::Display) -> TestHarnessError {
    TestHarnessError(error.to_string())
}

fn arguments(spec: &ServerSpec, path: &Path) -> Vec<OsString> {
    let mut region = OsString::from(format!("{REGION}="));
    region.push(path);
    let mut arguments: Vec<OsString> = vec!["serve".into(), "--region".into(), region];
    // With `pin` the budget is the size of the region.
    let dram = if spec.mode == Mode::Pin { spec.region } else { spec.dram };
    let mib = format!("{}M", dram >> 20);
    arguments.extend(["--dram".into(), mib.into(), "--mode".into(), spec.mode.to_string().into()]);
    arguments.extend(["--listen".into(), ADDRESS.to_string().into()]);
    if spec.threads != 1 {
        arguments.extend(["--threads".into(), spec.threads.to_string().into()]);
    }
    arguments
}

impl TestHarness for Servers {
    fn start(&mut self, spec: &ServerSpec) -> Result<Box<dyn TestServer>, TestHarnessError> {
        self.started += 1;
        let name = leftovers::name(&self.started.to_string());
        let log = self.logs.path().join(format!("{}.log", self.started));
        let (program, path, processors) = (self.program.clone(), self.path, self.processors.clone());
        let is_limited = self.is_limited;
        let file = self.region_file(spec)?;
        let budget = if spec.mode == Mode::Pin { spec.region } else { spec.dram };
        let throttle = match spec.storage {
            Storage::Throttled => Some(file.throttle().map_err(to_harness_error)?),
            _ => None,
        };
        let limit = budget + kernel_bytes(budget) + HEADROOM_BYTES;
        let group = match is_limited {
            true => Group::new(&name, limit, throttle).map_err(to_harness_error)?,
            false => Group::unlimited(),
        };
        let process = Process::start(&program, &arguments(spec, file.path()), group, &processors, &log)
            .map_err(|error| TestHarnessError(format!("cannot start {}: {error}", program.display())))?;
        let finds_files = spec.application == Application::FileSystem;
        let mut server = RunningServer { process, region: None, mode: spec.mode, path, finds_files };
        server.wait_until_ready(spec.region)?;
        if spec.dram >= spec.region && spec.mode.has_frames() {
            let read = server.region.as_ref().map_or(Ok(()), NodeRegion::read_all);
            read.map_err(|error| TestHarnessError(format!("cannot read all of the region: {error}")))?;
        }
        if let Some(preload) = spec.preload {
            let mut arguments: Vec<OsString> = vec!["bench".into(), "preload".into(), file.path().into()];
            arguments.push(spec.application.to_string().into());
            arguments.extend([preload.access_bytes, budget].map(|number| number.to_string().into()));
            let done = server.process.run_beside(&program, &arguments);
            done.map_err(|error| TestHarnessError(format!("cannot preload the server's memory: {error}")))?;
        }
        Ok(Box::new(server))
    }

    fn measure_disk(&mut self, spec: &ServerSpec, in_flight: usize) -> DiskLimit {
        let key = file_key(spec);
        match self.files.iter().find(|(of, _)| *of == key) {
            Some((_, file)) => disk::measure(file.path(), in_flight, &self.processors),
            None => DiskLimit::NotMeasured("there is no file yet".into()),
        }
    }

    fn processors(&self) -> String {
        self.processors.to_string()
    }
}

struct RunningServer {
    process: Process,
    region: Option<NodeRegion>,
    mode: Mode,
    path: PathChoice,
    finds_files: bool,
}

impl RunningServer {
    /// Waits until the region can be opened.
    fn wait_until_ready(&mut self, len: u64) -> Result<(), TestHarnessError> {
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            if let Some(exit) = self.process.exit_status_text() {
                return Err(TestHarnessError(exit));
            }
            let error = match self.instance() {
                None => "it has no port".to_owned(),
                Some(instance) => {
                    let region = NodeRegion {
                        server: ADDRESS,
                        instance,
                        name: REGION.to_owned(),
                        path: self.path,
                        finds_files: self.finds_files,
                    };
                    match region.open_length() {
                        Ok(found) if found == len => {
                            self.region = Some(region);
                            return Ok(());
                        }
                        Ok(found) => {
                            return Err(TestHarnessError(format!("the region has {found} bytes, not {len}")));
                        }
                        Err(error) => error.to_string(),
                    }
                }
            };
            if Instant::now() > deadline {
                return Err(TestHarnessError(format!(
                    "the server is not ready after {} s: {error}",
                    START_TIMEOUT.as_secs()
                )));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn snapshot(&self) -> Option<stat::DeviceSnapshot> {
        stat::fetch(self.process.id()).ok()?.into_iter().next()
    }

    /// The instance index of the server's device. Other processes on this machine may use the first ones.
    fn instance(&self) -> Option<u8> {
        self.snapshot().map(|device| device.slot)
    }
}

impl TestServer for RunningServer {
    fn connect(&self) -> &dyn Connect {
        self.region.as_ref().expect("the harness returns a server after its region was opened")
    }

    fn counts(&self) -> Option<ServerCounts> {
        match self.mode {
            // Only the kernel counts the page faults and buffered reads that access the disk.
            Mode::Rpc => major_faults(&fs::read_to_string(format!("/proc/{}/stat", self.process.id())).ok()?),
            Mode::RpcBuffer => None,
            _ => counts(self.snapshot()?.reports.get("memory")?),
        }
    }

    fn processor_time(&self) -> Option<Duration> {
        processor_time(self.process.id())
    }

    fn peak_bytes(&self) -> Option<u64> {
        self.process.group().peak_bytes()
    }

    fn exit_status_text(&mut self) -> Option<String> {
        self.process.exit_status_text()
    }
}

/// The process's major page faults as misses, from its `/proc/PID/stat`.
fn major_faults(stat: &str) -> Option<ServerCounts> {
    // The program's name, in parentheses, may contain spaces; the count is the tenth field after it.
    let (_, fields) = stat.rsplit_once(')')?;
    let misses = fields.split_whitespace().nth(9)?.parse().ok()?;
    // The kernel reads more than one page at a time, in a number of reads that it does not tell.
    Some(ServerCounts { misses, ios: None, dirty_bytes: None })
}

/// The misses in the server's report of its memory, and the reads and writes of the file.
fn counts(report: &serde_json::Value) -> Option<ServerCounts> {
    let region = report.get("regions")?.get(0)?;
    let number = |name: &str| region.get(name)?.as_u64();
    Some(ServerCounts {
        misses: number("misses")?,
        ios: Some(number("pages_read")? + number("pages_written")?),
        dirty_bytes: report.get("dirty_bytes")?.as_u64(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrace_pages::{MemoryStats, RegionStats};

    const SPEC: ServerSpec = ServerSpec {
        mode: Mode::Term,
        region: 2 << 30,
        dram: 512 << 20,
        storage: Storage::Disk,
        application: Application::Blocks,
        threads: 1,
        preload: None,
    };

    fn line(spec: &ServerSpec) -> String {
        arguments(spec, Path::new("/d/file")).join(&OsString::from(" ")).into_string().unwrap()
    }

    #[test]
    fn the_command_line_is_that_of_serve() {
        assert_eq!(line(&SPEC), "serve --region bench=/d/file --dram 512M --mode term --listen 127.0.0.1");
        // In this mode the budget is the size of the region.
        assert!(line(&ServerSpec { mode: Mode::Pin, ..SPEC }).contains("--dram 2048M --mode pin"));
        assert!(line(&ServerSpec { threads: 4, ..SPEC }).ends_with("--threads 4"));
    }

    #[test]
    fn major_faults_are_the_tenth_field_after_the_name() {
        let stat = "42 (a ) b) S 1 42 42 0 -1 4194560 100 0 77 0 5 6 0 0 20 0 9 0";
        assert_eq!(major_faults(stat), Some(ServerCounts { misses: 77, ios: None, dirty_bytes: None }));
        assert_eq!(major_faults("42"), None);
        let own = fs::read_to_string("/proc/self/stat").unwrap();
        assert!(major_faults(&own).is_some());
    }

    #[test]
    fn misses_are_in_the_report() {
        let region =
            RegionStats { misses: 114, pages_read: 100, pages_written: 11, ..RegionStats::default() };
        let report = MemoryStats { regions: vec![region], dirty_bytes: 8192, ..MemoryStats::default() };
        let report = serde_json::to_value(report).unwrap();
        assert_eq!(
            counts(&report),
            Some(ServerCounts { misses: 114, ios: Some(111), dirty_bytes: Some(8192) })
        );
        assert_eq!(counts(&serde_json::json!({ "regions": [] })), None);
    }
}
