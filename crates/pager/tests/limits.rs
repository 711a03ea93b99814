//! A pager whose limits are lower than what its programs need.

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Stdio;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use common::{MIB, TestPager, compile, run, sample};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Limits are the process's.
static ONE_TEST: Mutex<()> = Mutex::new(());

/// Sets the limit of descriptors, up to the maximum, which stays.
fn limit_descriptors(count: Option<u64>) {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: count.or(maximum), maximum }).unwrap();
}

/// The processor time of this process, in ticks of 10 ms.
fn ticks(stat: &File) -> u64 {
    let mut bytes = [0; 1024];
    let count = stat.read_at(&mut bytes, 0).unwrap();
    let line = String::from_utf8_lossy(&bytes[..count]).into_owned();
    let (_, fields) = line.rsplit_once(')').unwrap();
    // The state is the third field, see proc_pid_stat(5).
    fields.split_whitespace().skip(11).take(2).map(|field| field.parse::<u64>().unwrap()).sum()
}

#[test]
fn a_pager_has_as_many_descriptors_as_it_may_have() {
    let _one_test = ONE_TEST.lock().unwrap_or_else(PoisonError::into_inner);
    limit_descriptors(Some(64));
    let pager = TestPager::start(16 * MIB, 128 * MIB);
    run(pager.command(compile("forks")).arg("40"), "verified");
    pager.finish();
}

#[test]
fn forks_and_joining_wait_for_descriptors_while_the_pager_sleeps() {
    let _one_test = ONE_TEST.lock().unwrap_or_else(PoisonError::into_inner);
    let (program, stat) = (compile("forks"), File::open("/proc/self/stat").unwrap());
    limit_descriptors(Some(64));
    let pager = TestPager::start(16 * MIB, 128 * MIB);
    let begin = Instant::now();
    while getrlimit(Resource::Nofile).current == Some(64) {
        assert!(begin.elapsed() < Duration::from_secs(60), "the pager raises the limit");
        std::thread::sleep(Duration::from_millis(10));
    }
    // As if that were the most that it may have.
    limit_descriptors(Some(64));
    let mut command = pager.command(program);
    let child = command.arg("40").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let begin = Instant::now();
    while File::open("/dev/null").is_ok() {
        assert!(begin.elapsed() < Duration::from_secs(60), "the pager has all descriptors that it needs");
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(Duration::from_secs(1));
    let before = ticks(&stat);
    std::thread::sleep(Duration::from_secs(2));
    let after = ticks(&stat);
    limit_descriptors(None);
    let (output, _) = sample(child, Duration::from_secs(120));
    assert!(output.status.success() && output.stdout == b"verified\n", "{output:?}");
    assert!(after - before < 50, "{} ticks", after - before);
    pager.finish();
}
