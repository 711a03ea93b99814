//! `terrace run`: checks the options, then executes the program with the NIC preloaded.

use crate::exit::{self, USAGE};
use crate::far_memory::{FarMemory, FarMemoryError};
use crate::log::LogLevel;
use crate::output::complain;
use crate::pager::{Prefetch, RemoteMemory};
use crate::program::Unloadable;
use crate::temporary::temporary_directory;
use crate::{library, pager, program, values};
use clap::{Args, ValueEnum};
use std::ffi::{OsStr, OsString};
use std::fs::OpenOptions;
use std::net::IpAddr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use terrace_baseline::{BaselineConfig, BaselineError, IoMethod, check_budget};
use terrace_fabric::udp::{OpenError, UdpConfig, UdpPort};
use terrace_faults::{FaultPlan, FaultPlanError};
use terrace_nic::{DeviceName, NicModel, PathChoice};
use terrace_pages::cached::CachedConfig;
use terrace_vm::SwapSpace;
use terrace_vm::handshake::{FEATURES, SOCKET_VARIABLE};
use terrace_vm::userfault::Userfaultfd;

/// The least `--local`: the pager's buffers and its smallest limit are 448 pages.
const LOCAL_BYTES_MIN: u64 = 2 << 20;

const AFTER_HELP: &str = "\
Examples:
  terrace run -- ibv_devinfo -v
  terrace run -- ib_read_lat                     # the server end
  terrace run -- ib_read_lat 127.0.0.1           # the client end
  terrace run --addr 192.0.2.1 -- ./my_server    # packets leave from this address
  terrace run --device-name mlx5_0 -- ./my_server
  terrace run --pcap run.pcap -- ib_send_bw -n 5 127.0.0.1
  tshark -r run.pcap -d udp.port==4791-5046,infiniband
  terrace run --fault-plan lossy.toml -- ./my_client
  terrace run --dram 512M -- ./my_server         # regions larger than memory; see below
  terrace run --remote-memory 192.0.2.1:7471 --local 1G -- ./program     # memory on another host; see below

Regions larger than memory: with --dram, memory that the program registers is paged. Terrace keeps the
hottest pages of all regions in the kernel's page cache, within that budget, and has the others leave. An
access to a page that is not there reads it, while the NIC goes on. The program's own loads and stores
work as before; the pages that they bring into memory count, too. `terrace stat PID` shows hits, misses,
and pages that came and left.
  Over a shared mapping of a file (or of a block device), a region that is registered with
  IBV_ACCESS_ON_DEMAND is paged to the file.
  Private memory, such as malloc's, moves into a nameless file in the directory of --swap when 1 MiB or
  more of it is registered, and is private again when it is deregistered. Meanwhile forked children do
  not have it, as after ibv_fork_init(3) with other devices. --swap none leaves such memory alone.
Other regions use no memory of the budget. For comparison, --mode odp behaves as hardware with on-demand
paging, and --mode pin locks the whole regions in memory; both concern files only, and need --nic terrace.

Memory on other hosts: with --remote-memory, the anonymous memory of the program and of all that it starts
stays within --local, and the rest is on memory nodes (`terrace memory-node`). The program need not use
RDMA. It needs root or CAP_SYS_PTRACE, and Linux 6.8. If a node is lost, its pages are, too, and touching one
is SIGBUS, unless --mirror 2 keeps each page on two nodes. `terrace stat` lists the pager, whose counters
`terrace stat PID` shows.

With --nic commodity, at both ends, the NIC knows nothing of absent pages, as hardware does: READs of them
return a signature page, and WRITEs to them vanish. The NP-RDMA protocol finds that out, and repeats such
requests by messages. `terrace stat PID` shows how often, and why.

A fault plan is a TOML file that tests a program's behaviour under faults; every key is optional:
  seed = 7             # the same seed draws the same faults for the same packets
  loss = 0.01          # probabilities, for each packet that this process sends
  duplicate = 0.01
  corrupt = 0.001      # a bit flipped
  reorder = 0.01       # delayed by up to reorder_us_max, so that later packets overtake it
  reorder_us_max = 100
  ecn_mark = 0.01      # marked \"congestion experienced\"
  delay_us_min = 0     # every packet is delayed by at least this ...
  delay_us_max = 50    # ... and at most this, in order
  [[fault]]            # any number of faults, each with a schedule
  kind = \"blackhole\"   # or rnr, slow-storage, failing-storage, loss, delay, duplicate, corrupt, reorder,
  after_ms = 2000      # ecn-mark; begins then, or after_packets / after_operations,
  for_ms = 500         # its duration, or for_packets / for_operations; every_ms repeats it
  peer = \"192.0.2.1\"   # for packets of this peer only
`terrace stat` counts injected faults, and the program logs the counts when it exits. All keys, and a
program that is tested with a plan: docs/fault-plan.md, examples/resilient_send.c in Terrace's sources.

A program that loads libibverbs by itself finds Terrace's by the names libibverbs.so.1 and libibverbs.so.
A program that loads the system's by an absolute path needs Terrace's at that path, for example by a
mount that only the program sees, without root:
  unshare -rm sh -c 'mount --bind DIR/lib/terrace/libibverbs.so.1 PATH && exec terrace run -- PROGRAM'

The first process on an address uses UDP port 4791, the next one 4792 and so on; a firewall between
hosts must pass them. Exit status: the program's own; 2 if the command line is wrong,
125 if Terrace itself fails, 126 if the program cannot be executed, 127 if there is no such program.";

/// Options of `terrace run`.
#[derive(Args)]
#[command(override_usage = "terrace run [OPTIONS] -- PROGRAM [ARGUMENTS]...", after_long_help = AFTER_HELP)]
pub struct Options {
    /// Address of this host that peers send to [default: the first interface's]
    #[arg(long, value_name = "ADDRESS", env = "TERRACE_ADDR", hide_env_values = true)]
    addr: Option<String>,
    /// Path MTU: 256, 512, 1024, 2048 or 4096 [default: the largest for the interface's MTU]
    #[arg(long, value_name = "BYTES", env = "TERRACE_MTU", hide_env_values = true)]
    mtu: Option<String>,
    /// Name of the device, for programs that look for one, as mlx5_0
    #[arg(long, value_name = "NAME", env = "TERRACE_DEVICE_NAME", hide_env_values = true, default_value_t)]
    device_name: DeviceName,
    /// Fault plan: a file of faults to inject in packets, receives and storage
    #[arg(long, value_name = "FILE", env = "TERRACE_FAULT_PLAN", hide_env_values = true)]
    fault_plan: Option<PathBuf>,
    /// Write every packet to this file, for Wireshark; if another process uses it, a number is added to the name
    #[arg(long, value_name = "FILE", env = "TERRACE_PCAP", hide_env_values = true)]
    pcap: Option<PathBuf>,
    /// Transport to peers on the same host
    #[arg(long, value_name = "PATH", env = "TERRACE_PATH", hide_env_values = true, default_value = "auto", value_parser = values::path())]
    path: PathChoice,
    /// Memory budget of regions larger than memory: 512M, 2G, or a number of bytes [default: no such regions]
    #[arg(long, value_name = "SIZE", env = "TERRACE_DRAM", hide_env_values = true)]
    dram: Option<String>,
    /// Directory on a disk for the private memory that is paged, or none [default: TMPDIR, or /var/tmp]
    #[arg(long, value_name = "DIRECTORY", env = "TERRACE_SWAP", hide_env_values = true)]
    swap: Option<PathBuf>,
    /// Access mode of on-demand regions over file mappings [default: wait]
    #[arg(long, value_name = "MODE", env = "TERRACE_MODE", hide_env_values = true)]
    mode: Option<PagingMode>,
    /// Memory nodes for memory of the program beyond --local: HOST:PORT, or a list of them [default: all is local]
    #[arg(long, value_name = "NODES", env = "TERRACE_REMOTE_MEMORY", hide_env_values = true)]
    remote_memory: Option<String>,
    /// Memory that the program and all that it starts keep here: 1G, 512M, or a number of bytes
    #[arg(long, value_name = "SIZE", env = "TERRACE_LOCAL", hide_env_values = true)]
    local: Option<String>,
    /// Memory nodes that have a copy of each page, 1 or 2 [default: 1]
    #[arg(long, value_name = "COUNT", env = "TERRACE_MIRROR", hide_env_values = true, value_parser = clap::value_parser!(u8).range(1..=2))]
    mirror: Option<u8>,
    /// Whether pages are loaded from memory nodes before the program touches them [default: on]
    #[arg(long, value_name = "SWITCH", env = "TERRACE_PREFETCH", hide_env_values = true, value_parser = values::prefetch())]
    prefetch: Option<Prefetch>,
    /// What the NIC knows of absent memory
    #[arg(long, value_name = "MODEL", env = "TERRACE_NIC", hide_env_values = true, default_value = "terrace", value_parser = values::nic())]
    nic: NicModel,
    /// Order of the requests of a queue pair, with --nic commodity [default: default]
    #[arg(long, value_name = "ORDER", env = "TERRACE_NP_ORDER", hide_env_values = true)]
    order: Option<NpOrder>,
    /// Whether peers move the bytes of long repetitions, with --nic commodity [default: on]
    #[arg(long, value_name = "SWITCH", env = "TERRACE_NP_REVERSE", hide_env_values = true)]
    np_reverse: Option<NpReverse>,
    /// Log level of the NIC and of the pager, which log to standard error
    #[arg(long, value_name = "LEVEL", ignore_case = true, env = "TERRACE_LOG", hide_env_values = true)]
    log: Option<LogLevel>,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// The access mode of on-demand regions over file mappings.
#[derive(Clone, Copy, ValueEnum)]
enum PagingMode {
    /// Hot pages in memory, others in the file; only accesses to absent pages wait for the file
    Wait,
    /// As hardware with on-demand paging: the queue pair is stalled while absent pages are faulted in
    Odp,
    /// The whole region is locked in memory
    Pin,
}

/// The order of the requests of a queue pair, with NP-RDMA.
#[derive(Clone, Copy, ValueEnum)]
enum NpOrder {
    /// Requests to other bytes may pass a request that waits for a page
    Default,
    /// As the verbs promise it
    Strict,
}

/// What NP-RDMA does with more bytes than a message has room for.
#[derive(Clone, Copy, ValueEnum)]
enum NpReverse {
    /// The peer READs them from memory that it is lent, or WRITEs them there
    On,
    /// The peer holds its pages, and the request is repeated
    Off,
}

/// An error of starting the program.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The library cannot be preloaded.
    #[error(transparent)]
    Library(#[from] library::LibraryError),
    /// The program cannot be run.
    #[error(transparent)]
    Program(#[from] program::ProgramError),
    /// Not an IPv4 or IPv6 address.
    #[error("--addr {0}: not an IP address (for example 192.0.2.1 or fe80::1)")]
    AddressSyntax(String),
    /// Not a number.
    #[error("--mtu {0}: not a path MTU; choose 256, 512, 1024, 2048 or 4096")]
    MtuSyntax(String),
    /// The NIC cannot use this address or path MTU.
    #[error(transparent)]
    Port(#[from] OpenError),
    /// The fault plan cannot be read, or is invalid.
    #[error("--fault-plan {}: {reason}", path.display())]
    FaultPlan { path: PathBuf, reason: String },
    /// The capture file cannot be written.
    #[error("--pcap {}: {error}", path.display())]
    Pcap { path: PathBuf, error: std::io::Error },
    /// Not a size.
    #[error("--dram {0}")]
    DramSyntax(#[from] terrace_pages::size::NotASize),
    /// The budget exceeds the memory of the machine, or the limit of the process.
    #[error("--dram: {0}")]
    Dram(#[from] BaselineError),
    /// A mode without a budget.
    #[error("--mode needs the memory budget of --dram: add, for example, --dram 512M")]
    ModeWithoutDram,
    /// NP-RDMA has nothing to hold such regions with.
    #[error("--nic commodity goes with --mode wait only")]
    ModeWithCommodity,
    /// The directory cannot have swap files.
    #[error("--swap {0}")]
    Swap(#[from] terrace_vm::SwapError),
    /// A directory for swap files without a budget, or with a mode that pages files only.
    #[error("--swap needs --dram, and no other --mode than wait")]
    SwapWithoutDram,
    /// The nodes are no list of addresses.
    #[error("--remote-memory {0}")]
    RemoteMemorySyntax(#[from] FarMemoryError),
    /// An option that has no effect without another one.
    #[error("{0} needs {1}")]
    Without(&'static str, &'static str),
    /// Not a size.
    #[error("--local {0}")]
    LocalSyntax(terrace_pages::size::NotASize),
    /// The pager's own buffers do not fit.
    #[error("--local {0}: the least is {least} MiB, for the buffers of the pager and what a page fault needs", least = LOCAL_BYTES_MIN >> 20)]
    LocalTooSmall(String),
    /// Both page the program's memory.
    #[error("--remote-memory and --dram exclude one another")]
    RemoteWithDram,
    /// No library can be preloaded into it.
    #[error("{0} {reason}, and its memory cannot be paged (--remote-memory)", reason = .1.meaning())]
    Unpageable(String, Unloadable),
    /// The kernel grants the process no handling of its faults.
    #[error(
        "--remote-memory needs userfaultfd(2) with fork events and page moves: run as root or grant CAP_SYS_PTRACE, on Linux 6.8 or later; in a container, let the seccomp profile pass userfaultfd ({0})"
    )]
    RemotePrivilege(std::io::Error),
    /// The pager cannot run.
    #[error("--remote-memory: {0}")]
    Pager(#[from] pager::PagerError),
    /// The program exists, but its interpreter does not.
    #[error("{0}: its interpreter does not exist (the `#!` line of a script, the loader of an executable)")]
    Interpreter(String),
    /// The loader would end the program.
    #[error("{0} {meaning}", meaning = .1.meaning())]
    Unloadable(String, Unloadable),
    /// Standard output is closed or full.
    #[error("cannot write: {0}")]
    Output(#[source] std::io::Error),
    /// The kernel refused to execute the program.
    #[error("{program}: {error}")]
    Exec { program: String, error: std::io::Error },
}

impl RunError {
    /// Whether an option has a value that is wrong on every machine.
    pub fn is_usage(&self) -> bool {
        match self {
            RunError::AddressSyntax(_) | RunError::MtuSyntax(_) | RunError::FaultPlan { .. } => true,
            RunError::DramSyntax(_) | RunError::ModeWithoutDram | RunError::SwapWithoutDram => true,
            RunError::ModeWithCommodity => true,
            RunError::RemoteMemorySyntax(_) | RunError::Without(..) => true,
            RunError::LocalSyntax(_) | RunError::LocalTooSmall(_) | RunError::RemoteWithDram => true,
            RunError::Port(error) => exit::is_usage_of_udp(error),
            _ => false,
        }
    }

    /// The exit status: 2 for a wrong command line. Else as of `env` and `timeout`: 125 for an error of this command, 126
    /// and 127 for the program.
    pub fn exit_code(&self) -> u8 {
        match self {
            RunError::Program(program::ProgramError::NotFound(..)) => 127,
            RunError::Program(_)
            | RunError::Interpreter(_)
            | RunError::Unloadable(..)
            | RunError::Unpageable(..)
            | RunError::Exec { .. } => 126,
            _ if self.is_usage() => USAGE,
            _ => 125,
        }
    }
}

/// Replaces this process with the program. Returns only on failure.
pub fn run(options: &Options) -> Result<(), RunError> {
    let library = library::find()?;
    let name = &options.program[0];
    let path = program::find(name)?;
    let variables = environment(options)?;
    let remote = remote_memory(options)?;
    match program::unloadable(&path) {
        None => {}
        Some(reason) if reason == Unloadable::Musl || remote.is_some() => {
            let name = name.to_string_lossy().into_owned();
            return Err(match remote {
                Some(_) => RunError::Unpageable(name, reason),
                None => RunError::Unloadable(name, reason),
            });
        }
        Some(reason) => complain(&format!("terrace: {} {}", name.to_string_lossy(), reason.meaning())),
    }
    let mut command = Command::new(&path);
    command.arg0(name).args(&options.program[1..]).envs(variables);
    let mut preloaded = prepend(&library.entry, std::env::var_os("LD_PRELOAD"), b": ");
    if let Some(remote) = remote {
        preloaded = prepend(&library::find_pager(&library)?, Some(preloaded), b": ");
        command.env(SOCKET_VARIABLE, pager::start(&remote, options.path)?);
    }
    command.env("LD_PRELOAD", preloaded);
    command.env(
        "LD_LIBRARY_PATH",
        prepend(library.folder.as_os_str(), std::env::var_os("LD_LIBRARY_PATH"), b":;"),
    );
    command.env("ASAN_OPTIONS", sanitizer_options(std::env::var_os("ASAN_OPTIONS")));
    let error = command.exec();
    let program = name.to_string_lossy().into_owned();
    // The program exists, so a missing file is its interpreter.
    Err(match error.kind() {
        std::io::ErrorKind::NotFound => RunError::Interpreter(program),
        _ => RunError::Exec { program, error },
    })
}

/// `--remote-memory` and the options for it, after a check that this process may have its faults handled.
fn remote_memory(options: &Options) -> Result<Option<RemoteMemory>, RunError> {
    let Some(nodes) = &options.remote_memory else {
        let others = [
            ("--local", options.local.is_some()),
            ("--mirror", options.mirror.is_some()),
            ("--prefetch", options.prefetch.is_some()),
        ];
        let given = others.into_iter().find(|(_, is_given)| *is_given);
        return given.map_or(Ok(None), |(name, _)| {
            Err(RunError::Without(name, "--remote-memory: add, for example, --remote-memory 192.0.2.1:7471"))
        });
    };
    let Some(local) = &options.local else {
        return Err(RunError::Without("--remote-memory", "--local: add, for example, --local 1G"));
    };
    if options.dram.is_some() {
        return Err(RunError::RemoteWithDram);
    }
    let nodes: FarMemory = nodes.parse()?;
    if options.mirror.is_some() && matches!(nodes, FarMemory::Directory(_)) {
        return Err(RunError::Without("--mirror", "memory nodes: a directory has one copy of each page"));
    }
    let local_bytes = terrace_pages::size::parse(local).map_err(RunError::LocalSyntax)?;
    if local_bytes < LOCAL_BYTES_MIN {
        return Err(RunError::LocalTooSmall(local.clone()));
    }
    Userfaultfd::open(FEATURES).map_err(RunError::RemotePrivilege)?;
    let (copies, prefetch) = (options.mirror.unwrap_or(1), options.prefetch.unwrap_or(Prefetch::On));
    Ok(Some(RemoteMemory { nodes, local_bytes, copies: copies.into(), prefetch, log: options.log }))
}

/// The environment variables that pass the options to the NIC in the program, after a check of each option.
fn environment(options: &Options) -> Result<Vec<(&'static str, OsString)>, RunError> {
    let port = parse_port(options.addr.as_deref(), options.mtu.as_deref())?;
    // The NIC will open the same port. Opening it here gives its error before the program starts.
    UdpPort::open(&port)?;
    let mut variables: Vec<(&'static str, OsString)> = Vec::new();
    variables.extend(port.addr.map(|addr| ("TERRACE_ADDR", addr.to_string().into())));
    variables.extend(port.mtu.map(|mtu| ("TERRACE_MTU", mtu.to_string().into())));
    if options.device_name != DeviceName::default() || std::env::var_os("TERRACE_DEVICE_NAME").is_some() {
        variables.push(("TERRACE_DEVICE_NAME", options.device_name.to_string().into()));
    }
    if let Some(path) = &options.fault_plan {
        let (plan, path) = check_fault_plan(path)?;
        if plan.has_storage_faults() && !has_extended_regions(options) {
            complain("terrace: the fault plan has faults of storage, which need --dram and --mode wait");
        }
        variables.push(("TERRACE_FAULT_PLAN", path.into()));
    }
    if options.path != PathChoice::default() || std::env::var_os("TERRACE_PATH").is_some() {
        variables.push(("TERRACE_PATH", options.path.to_string().into()));
    }
    if let Some(path) = &options.pcap {
        variables.push(("TERRACE_PCAP", check_pcap(path)?.into()));
    }
    if options.nic != NicModel::default() || std::env::var_os("TERRACE_NIC").is_some() {
        variables.push(("TERRACE_NIC", options.nic.to_string().into()));
    }
    if options.nic != NicModel::Commodity {
        let others = [("--order", options.order.is_some()), ("--np-reverse", options.np_reverse.is_some())];
        if let Some((name, _)) = others.into_iter().find(|(_, is_given)| *is_given) {
            return Err(RunError::Without(name, "--nic commodity"));
        }
    }
    if let Some(order) = options.order.and_then(|order| order.to_possible_value()) {
        variables.push(("TERRACE_NP_ORDER", order.get_name().to_owned().into()));
    }
    if let Some(reverse) = options.np_reverse.and_then(|reverse| reverse.to_possible_value()) {
        variables.push(("TERRACE_NP_REVERSE", reverse.get_name().to_owned().into()));
    }
    variables.extend(paging_variables(options)?);
    if let Some(level) = options.log {
        variables.push(("TERRACE_LOG", level.name().into()));
    }
    Ok(variables)
}

/// Whether the program may have regions to whose storage fault plans apply.
fn has_extended_regions(options: &Options) -> bool {
    options.dram.is_some() && options.mode.is_none_or(|mode| matches!(mode, PagingMode::Wait))
}

/// The environment variables for `--dram`, `--swap` and `--mode`.
fn paging_variables(options: &Options) -> Result<Vec<(&'static str, OsString)>, RunError> {
    let swap = options.swap.as_deref();
    let Some(dram) = &options.dram else {
        return match (options.mode, swap) {
            (Some(_), _) => Err(RunError::ModeWithoutDram),
            (None, Some(_)) => Err(RunError::SwapWithoutDram),
            (None, None) => Ok(Vec::new()),
        };
    };
    let dram_bytes = terrace_pages::size::parse(dram)?;
    let mode = options.mode.unwrap_or(PagingMode::Wait);
    let mut variables: Vec<(&str, OsString)> = vec![("TERRACE_DRAM", dram_bytes.to_string().into())];
    match mode {
        PagingMode::Wait => {
            CachedConfig::new(dram_bytes).check().map_err(BaselineError::from)?;
            // Set also when it is none: the variable may be there.
            let directory = swap_directory(swap)?.unwrap_or_default();
            variables.push(("TERRACE_SWAP", directory.into()));
        }
        PagingMode::Odp | PagingMode::Pin if swap.is_some() => return Err(RunError::SwapWithoutDram),
        PagingMode::Odp | PagingMode::Pin if options.nic == NicModel::Commodity => {
            return Err(RunError::ModeWithCommodity);
        }
        PagingMode::Odp => check_budget(&BaselineConfig::new(IoMethod::Mapping, dram_bytes))?,
        PagingMode::Pin => check_budget(&BaselineConfig::new(IoMethod::Pinned, dram_bytes))?,
    }
    let name = mode.to_possible_value().expect("no mode is hidden").get_name().to_owned();
    variables.push(("TERRACE_MODE", name.into()));
    Ok(variables)
}

/// The directory for swap files, as an absolute path: the program may have another working directory. `None` if private
/// memory is not paged.
fn swap_directory(chosen: Option<&Path>) -> Result<Option<PathBuf>, RunError> {
    if chosen == Some(Path::new("none")) {
        return Ok(None);
    }
    let directory = chosen.map_or_else(|| temporary_directory("/var/tmp"), Path::to_owned);
    match (SwapSpace::open(&directory), chosen) {
        (Ok(_), _) => Ok(Some(std::path::absolute(&directory).unwrap_or(directory))),
        (Err(error), Some(_)) => Err(error.into()),
        (Err(error), None) => {
            complain(&format!("terrace: private memory is not paged; choose a directory by --swap: {error}"));
            Ok(None)
        }
    }
}

/// Parses `--addr` and `--mtu`. The port checks whether this host supports them.
pub fn parse_port(addr: Option<&str>, mtu: Option<&str>) -> Result<UdpConfig, RunError> {
    let addr: Option<IpAddr> =
        addr.map(|text| text.parse().map_err(|_| RunError::AddressSyntax(text.to_owned()))).transpose()?;
    let mtu: Option<u32> =
        mtu.map(|text| text.parse().map_err(|_| RunError::MtuSyntax(text.to_owned()))).transpose()?;
    Ok(UdpConfig { addr, mtu, ..UdpConfig::default() })
}

/// Loads the plan as the NIC does, and makes its path independent of the program's working directory.
pub fn check_fault_plan(path: &Path) -> Result<(FaultPlan, PathBuf), RunError> {
    let refuse =
        |reason: &dyn ToString| RunError::FaultPlan { path: path.to_owned(), reason: reason.to_string() };
    let plan = FaultPlan::load(path).map_err(|error| match &error {
        FaultPlanError::Read { source, .. } => refuse(source),
        other => refuse(other),
    })?;
    Ok((plan, std::path::absolute(path).map_err(|error| refuse(&error))?))
}

/// Checks that the capture file can be written, without creating it.
fn check_pcap(path: &Path) -> Result<PathBuf, RunError> {
    let unwritable = |error| RunError::Pcap { path: path.to_owned(), error };
    match OpenOptions::new().write(true).create_new(true).open(path) {
        Ok(_) => std::fs::remove_file(path).map_err(unwritable)?,
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            // Opening a pipe would wait for its reader, and closing it would end the reader's input.
            if !std::fs::metadata(path).map_err(unwritable)?.file_type().is_fifo() {
                OpenOptions::new().append(true).open(path).map(drop).map_err(unwritable)?;
            }
        }
        Err(error) => return Err(unwritable(error)),
    }
    std::path::absolute(path).map_err(unwritable)
}

/// Prepends an entry to a path list of the loader, and removes its other occurrences.
fn prepend(entry: &OsStr, existing: Option<OsString>, separators: &[u8]) -> OsString {
    let mut value = entry.to_owned();
    let existing = existing.unwrap_or_default();
    let others = existing.as_bytes().split(|byte| separators.contains(byte)).map(OsStr::from_bytes);
    for other in others.filter(|other| !other.is_empty() && *other != entry) {
        value.push(":");
        value.push(other);
    }
    value
}

/// gcc's AddressSanitizer refuses to start behind a preloaded library. It works there: the NIC's interposed functions call
/// its own. The runtime is not preloaded first, because programs without the sanitizer would get its leak reports. The
/// last of two equal options counts, so the user's come last.
fn sanitizer_options(existing: Option<OsString>) -> OsString {
    const BEHIND_OTHERS: &str = "verify_asan_link_order=0";
    match existing {
        Some(options) if !options.is_empty() => {
            let mut value = OsString::from(BEHIND_OTHERS);
            value.push(":");
            value.push(options);
            value
        }
        _ => BEHIND_OTHERS.into(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    #[test]
    fn the_users_options_of_the_sanitizer_come_last() {
        let options = |existing: &str| sanitizer_options(Some(existing.into()));
        assert_eq!(options("verify_asan_link_order=1"), "verify_asan_link_order=0:verify_asan_link_order=1");
        assert_eq!(options(""), "verify_asan_link_order=0");
        assert_eq!(sanitizer_options(None), "verify_asan_link_order=0");
    }

    #[test]
    fn the_library_comes_first_and_once() {
        let library = "/t/libibverbs.so.1";
        let preload = |existing: Option<&str>| prepend(library.as_ref(), existing.map(OsString::from), b": ");
        assert_eq!(preload(None), library);
        assert_eq!(preload(Some("a.so b.so")), "/t/libibverbs.so.1:a.so:b.so");
        assert_eq!(preload(Some("/t/libibverbs.so.1:a.so")), "/t/libibverbs.so.1:a.so");
        let latin1 = OsString::from_vec(b"/caf\xe9".to_vec());
        assert_eq!(prepend("/t".as_ref(), Some(latin1), b":;").as_bytes(), b"/t:/caf\xe9");
    }

    #[test]
    fn exit_statuses_distinguish_errors_of_terrace_and_of_the_program() {
        assert_eq!(RunError::MtuSyntax("x".into()).exit_code(), 2);
        assert_eq!(RunError::Port(OpenError::NoInterface).exit_code(), 125);
        assert_eq!(RunError::Program(program::ProgramError::NotExecutable("x".into())).exit_code(), 126);
        assert_eq!(RunError::Program(program::ProgramError::NotFound("x".into(), "")).exit_code(), 127);
    }
}
