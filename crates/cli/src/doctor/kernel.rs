//! What the kernel permits: io_uring, page faults in user space, copies between processes, `membarrier`, FUSE.

use std::fs;
use std::io::{self, IoSliceMut};
use std::path::Path;
use std::process::Command;

use io_uring::IoUring;
use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use rustix::thread::{MembarrierCommand, membarrier_query};
use terrace_vm::Refusal;
use terrace_vm::handshake::FEATURES;
use terrace_vm::userfault::Userfaultfd;

use super::check::Check;
use super::limits::read_number;
use crate::fuse::{self, Obstacle};

const PROC: &str = "/proc/self";
/// What to do where processes do not find out about themselves.
pub const MOUNT_PROC: &str = "mount -t proc proc /proc";
const URING_SYSCTL: &str = "/proc/sys/kernel/io_uring_disabled";
const FAULTS_SYSCTL: &str = "/proc/sys/vm/unprivileged_userfaultfd";
const PTRACE_SYSCTL: &str = "/proc/sys/kernel/yama/ptrace_scope";

pub fn checks() -> Vec<Check> {
    let has_filter = has_seccomp_filter(&fs::read_to_string("/proc/self/status").unwrap_or_default());
    vec![
        io_uring(IoUring::new(4).map(drop), read_number(URING_SYSCTL), has_filter),
        userfaultfd(terrace_vm::check_guard(), read_number(FAULTS_SYSCTL)),
        remote_memory(Userfaultfd::open(FEATURES).map(drop)),
        copies(copy_by_child().err(), read_number(PTRACE_SYSCTL), has_filter),
        membarrier(membarrier_query().contains_command(MembarrierCommand::RegisterPrivateExpedited)),
        fuse(fuse::obstacle()),
    ]
}

/// Whether `/proc/self/status` shows a seccomp filter, as most containers have.
fn has_seccomp_filter(status: &str) -> bool {
    status.lines().any(|line| line.strip_prefix("Seccomp:").is_some_and(|mode| mode.trim() == "2"))
}

fn io_uring(trial: io::Result<()>, sysctl: Option<u64>, has_filter: bool) -> Check {
    const NAME: &str = "io_uring";
    let Err(error) = trial else {
        return Check::ok(NAME, "works: files of regions larger than memory are read asynchronously");
    };
    let meaning =
        format!("{error}: threads read the files of regions larger than memory, at more processor time");
    let advice = match sysctl {
        Some(value @ 1..) => format!("kernel.io_uring_disabled is {value}: sysctl -w kernel.io_uring_disabled=0"),
        _ if has_filter => "a seccomp filter forbids it: let the container's profile pass io_uring_setup, io_uring_enter and \
                            io_uring_register"
            .to_owned(),
        // Old kernels count a ring as locked memory.
        _ if error.raw_os_error() == Some(Errno::ENOMEM as i32) => "raise the limit on locked memory (ulimit -l)".to_owned(),
        _ => "use a kernel that has it (5.6 or newer)".to_owned(),
    };
    Check::missing(NAME, meaning, advice)
}

/// `terrace run --dram` moves private memory into files, while other threads of the program wait.
fn userfaultfd(trial: Result<(), Refusal>, sysctl: Option<u64>) -> Check {
    const NAME: &str = "userfaultfd";
    let sysctl = sysctl.map_or("no vm.unprivileged_userfaultfd".to_owned(), |value| {
        format!("vm.unprivileged_userfaultfd is {value}")
    });
    match trial {
        Ok(()) => Check::ok(NAME, format!("works, for faults of system calls, too: private memory is paged ({sysctl})")),
        Err(refusal) => Check::limited(
            NAME,
            format!("`terrace run --dram` pages no private memory, only mappings of files ({sysctl})"),
            match refusal {
                Refusal::System { attempt, source } => format!("find out why the kernel cannot {attempt}: {source}"),
                _ => "sysctl -w vm.unprivileged_userfaultfd=1, or let this user open /dev/userfaultfd, or grant \
                      CAP_SYS_PTRACE; in a container, let the seccomp profile pass userfaultfd"
                    .to_owned(),
            },
        ),
    }
}

/// `terrace run --remote-memory` follows the forks of a program, and moves its pages.
fn remote_memory(trial: io::Result<()>) -> Check {
    const NAME: &str = "remote memory";
    match trial {
        Ok(()) => Check::ok(NAME, "`terrace run --remote-memory` can page the memory of programs"),
        Err(error) => Check::missing(
            NAME,
            format!(
                "`terrace run --remote-memory` does not work: fork events and page moves of userfaultfd: {error}"
            ),
            "run as root or grant CAP_SYS_PTRACE, on Linux 6.8 or newer; in a container, let the seccomp profile pass \
             userfaultfd",
        ),
    }
}

fn copies(failure: Option<String>, sysctl: Option<u64>, has_filter: bool) -> Check {
    const NAME: &str = "process_vm_readv";
    let scope = sysctl.map_or("there is no kernel.yama.ptrace_scope".to_owned(), |value| {
        format!("kernel.yama.ptrace_scope is {value}")
    });
    let Some(failure) = failure else {
        return Check::ok(
            NAME,
            format!(
                "works between processes of this user: private memory of same-host peers is copied by the kernel ({scope})"
            ),
        );
    };
    let advice = match sysctl {
        _ if !Path::new(PROC).exists() => MOUNT_PROC.to_owned(),
        Some(value @ 1..) => {
            format!("kernel.yama.ptrace_scope is {value}: sysctl -w kernel.yama.ptrace_scope=0")
        }
        _ if has_filter => {
            "let the container's seccomp profile pass process_vm_readv and process_vm_writev".to_owned()
        }
        _ => "use a kernel with CONFIG_CROSS_MEMORY_ATTACH".to_owned(),
    };
    let meaning = format!(
        "{failure}: accesses to private memory of same-host peers go through rings in shared memory, slower"
    );
    Check::limited(NAME, meaning, advice)
}

/// A child copies from this process. Processes that are not each other's ancestors have the same permission: Yama lets only
/// ancestors copy from their descendants.
fn copy_by_child() -> Result<(), String> {
    let bytes = Box::new(PATTERN);
    let address = std::ptr::from_ref(bytes.as_ref()).addr();
    let output = std::env::current_exe()
        .and_then(|program| {
            let pid = std::process::id().to_string();
            Command::new(program)
                .args(["doctor", "read-memory", &pid, &address.to_string()])
                .env_remove("TERRACE_ADDR")
                .output()
        })
        .map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    let complaint = String::from_utf8_lossy(&output.stderr);
    Err(complaint.trim_start_matches("terrace: ").trim().to_owned())
}

/// What [`copy_by_child`] has in memory.
const PATTERN: [u8; 16] = *b"terrace doctor\r\n";

/// Copies the pattern from another process.
pub fn read_memory(pid: i32, address: usize) -> io::Result<()> {
    let mut bytes = [0; PATTERN.len()];
    let remote = [RemoteIoVec { base: address, len: bytes.len() }];
    process_vm_readv(Pid::from_raw(pid), &mut [IoSliceMut::new(&mut bytes)], &remote)?;
    match bytes == PATTERN {
        true => Ok(()),
        false => Err(io::Error::other("the bytes are not those of the other process")),
    }
}

fn membarrier(has_expedited: bool) -> Check {
    const NAME: &str = "membarrier";
    if has_expedited {
        return Check::ok(
            NAME,
            "works: a thread that has an object to itself takes its lock without an atomic instruction",
        );
    }
    Check::missing(
        NAME,
        "not here: locks cost an atomic instruction each, and small operations some 20 ns more",
        "let the container's seccomp profile pass membarrier; the kernel needs 4.14 or newer",
    )
}

fn fuse(obstacle: Option<Obstacle>) -> Check {
    const NAME: &str = "fuse";
    match obstacle {
        None => Check::ok(NAME, "works: `terrace mount` can mount exported directories"),
        Some(Obstacle { meaning, advice }) => {
            Check::missing(NAME, format!("{meaning}: `terrace mount` does not work"), advice)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::check::State;

    fn denied() -> io::Error {
        io::Error::from_raw_os_error(Errno::EPERM as i32)
    }

    #[test]
    fn the_reason_without_io_uring_is_named() {
        assert_eq!(io_uring(Ok(()), Some(0), true).state, State::Ok);
        let advice = |sysctl, has_filter| io_uring(Err(denied()), sysctl, has_filter).advice.unwrap();
        assert!(advice(Some(2), true).contains("kernel.io_uring_disabled is 2"));
        assert!(advice(Some(0), true).contains("seccomp"));
        assert!(advice(None, false).contains("a kernel that has it"));
    }

    #[test]
    fn faults_of_system_calls_make_the_difference() {
        assert_eq!(userfaultfd(Ok(()), Some(1)).state, State::Ok);
        let limited = userfaultfd(Err(Refusal::Privilege), Some(0));
        assert!(limited.state == State::Limited && limited.meaning.contains("unprivileged_userfaultfd is 0"));
        let failure = Refusal::System { attempt: "open a userfaultfd", source: denied() };
        assert!(userfaultfd(Err(failure), None).advice.unwrap().contains("cannot open a userfaultfd"));
    }

    #[test]
    fn the_scope_of_ptrace_is_named() {
        assert_eq!(copies(None, Some(0), false).state, State::Ok);
        let limited = copies(Some("EPERM".into()), Some(1), true);
        assert!(limited.state == State::Limited && limited.advice.unwrap().contains("ptrace_scope is 1"));
        assert!(copies(Some("EPERM".into()), None, true).advice.unwrap().contains("seccomp"));
    }

    #[test]
    fn a_filter_is_found_in_the_status() {
        assert!(has_seccomp_filter("Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t1\n"));
        assert!(!has_seccomp_filter("Name:\tx\nSeccomp:\t0\n"));
    }

    #[test]
    fn memory_of_this_process_can_be_copied() {
        let bytes = Box::new(PATTERN);
        let address = std::ptr::from_ref(bytes.as_ref()).addr();
        let pid = i32::try_from(std::process::id()).unwrap();
        assert!(read_memory(pid, address).is_ok());
        assert!(read_memory(pid, 0).is_err());
    }
}
