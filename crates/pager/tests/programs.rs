//! Unmodified programs with four times the memory of their budget.

mod common;

use std::io::{BufRead, BufReader, IoSliceMut, Read, Write};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use common::{MIB, TestPager, compile, full_pipe, run, sample};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use rustix::process::{Pid, Signal, kill_process};
use terrace_pager::{PagerStatus, ProcessPages, Statistics};
use terrace_vm::FileStore;

#[test]
fn a_program_that_fills_and_reads_memory_stays_within_its_budget() {
    let pager = TestPager::start(12 * MIB, 64 * MIB);
    let most = run(pager.command(compile("touch")).arg("48"), "verified");
    let statistics = pager.finish();
    assert!(most <= 12 * MIB, "{most} bytes: {statistics:?}");
    assert!(statistics.loads > 15_000 && statistics.stores > 9_000, "{statistics:?}");
    // The second reading finds pages that were not stored to since they were loaded.
    assert!(statistics.drops > 5_000, "{statistics:?}");
}

#[test]
fn pages_come_before_they_are_touched_if_that_is_asked_for() {
    for prefetches in [true, false] {
        let store = FileStore::new(tempfile::tempfile().unwrap(), 64 * MIB / 4096, 256).unwrap();
        let pager = TestPager::with(12 * MIB, prefetches, Box::new(store));
        let most = run(pager.command(compile("touch")).arg("48"), "verified");
        let statistics = pager.finish();
        assert!(most <= 12 * MIB, "{most} bytes: {statistics:?}");
        let Statistics { faults, loads, prefetches: ahead, prefetches_used, prefetches_wasted, .. } =
            statistics;
        match prefetches {
            true => assert!(ahead > loads / 2 && faults < loads, "{statistics:?}"),
            false => assert!(ahead == 0 && faults > loads, "{statistics:?}"),
        }
        assert!(prefetches_used >= ahead / 10 * 8, "{statistics:?}");
        assert!(prefetches_used + prefetches_wasted <= ahead, "{statistics:?}");
    }
}

#[test]
fn the_state_shows_which_process_has_how_many_pages() {
    let pager = TestPager::start(12 * MIB, 64 * MIB);
    let child = pager.command(compile("touch")).arg("48").stdout(Stdio::piped()).spawn().unwrap();
    let is_shown = |status: PagerStatus| {
        let is_it = |process: &&ProcessPages| process.pid == Some(child.id());
        status
            .processes
            .iter()
            .find(is_it)
            .is_some_and(|process| process.far_pages > 1000 && process.local_pages > 100)
    };
    let is_shown = (0..500).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        is_shown(pager.status())
    });
    let output = child.wait_with_output().unwrap();
    assert!(is_shown && output.status.success(), "{:?}", pager.status());
    pager.finish();
}

#[test]
fn an_array_is_sorted() {
    let pager = TestPager::start(8 * MIB, 64 * MIB);
    let most = run(pager.command(compile("sort")).arg("32"), "sorted");
    let statistics = pager.finish();
    assert!(most <= 8 * MIB, "{most} bytes: {statistics:?}");
}

#[test]
fn threads_children_and_moved_memory_find_their_bytes() {
    let pager = TestPager::start(8 * MIB, 128 * MIB);
    run(pager.command(compile("threads")).args(["24", "5"]), "verified");
    pager.finish();
}

#[test]
fn a_child_finds_zeros_in_memory_that_it_does_not_inherit() {
    let pager = TestPager::start(8 * MIB, 128 * MIB);
    run(pager.command(compile("wiped")).arg("8"), "verified");
    pager.finish();
}

#[test]
fn memory_that_moves_while_its_pages_come_keeps_its_bytes() {
    let pager = TestPager::start(8 * MIB, 64 * MIB);
    run(pager.command(compile("move")).args(["32", "8000"]), "verified");
    let statistics = pager.finish();
    assert!(statistics.prefetches > 1_000, "{statistics:?}");
}

#[test]
fn a_child_keeps_a_file_whose_number_the_pagers_descriptor_had() {
    let pager = TestPager::start(8 * MIB, 64 * MIB);
    run(&mut pager.command(compile("descriptors")), "verified");
    pager.finish();
}

#[test]
fn a_program_that_must_not_unshare_its_descriptors_keeps_them_and_is_not_paged() {
    let (confine, touch) = (compile("confine"), compile("touch"));
    let pager = TestPager::start(8 * MIB, 64 * MIB);
    let output = pager.command(&confine).arg(&touch).arg("24").output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && output.stdout == b"verified\n", "{output:?}");
    assert!(errors.starts_with("terrace: memory is not paged: unshare(CLONE_FILES)"), "{errors}");
    assert_eq!(errors.lines().count(), 1, "{errors}");
    pager.finish();
}

#[test]
fn a_child_goes_on_where_the_system_refuses_what_its_thread_needs() {
    let program = compile("crowded");
    for left in ["2", "1", "0"] {
        let pager = TestPager::start(8 * MIB, 128 * MIB);
        let output = pager.command(&program).args(["16", left]).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && output.stdout == b"verified\n", "{output:?}");
        let line = "terrace: memory of a child stays local: Too many open files (os error 24)";
        assert_eq!(errors.lines().collect::<Vec<_>>(), [line; 2]);
        pager.finish();
    }
}

#[test]
fn a_child_goes_on_where_nobody_reads_what_its_library_says() {
    let program = compile("crowded");
    let pager = TestPager::start(8 * MIB, 128 * MIB);
    for is_full in [true, false] {
        let (reader, writer) = if is_full { full_pipe() } else { std::io::pipe().unwrap() };
        let reader = is_full.then_some(reader);
        let child = pager.command(&program).arg("16").stdout(Stdio::piped()).stderr(writer).spawn().unwrap();
        let (output, _) = sample(child, Duration::from_secs(60));
        assert!(output.status.success() && output.stdout == b"verified\n", "{is_full} {output:?}");
        drop(reader);
    }
    pager.finish();
}

#[test]
fn several_programs_have_pages_leave_at_a_time() {
    let program = compile("touch");
    let pager = TestPager::start(16 * MIB, 256 * MIB);
    let start = |_| pager.command(&program).arg("16").stdout(Stdio::piped()).spawn().unwrap();
    let children: Vec<_> = (0..8).map(start).collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "verified\n", "{output:?}");
    }
    pager.finish();
}

/// A program that is stopped, and ends with the test.
struct Stopped(Child);

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn programs_that_are_stopped_stop_no_others() {
    let program = compile("touch");
    let pager = TestPager::start(16 * MIB, 512 * MIB);
    let signal = |child: &Child, signal| kill_process(Pid::from_child(child), signal).unwrap();
    let start = |_| Stopped(pager.command(&program).arg("48").stdout(Stdio::piped()).spawn().unwrap());
    let mut stopped: Vec<_> = (0..3).map(start).collect();
    for Stopped(child) in &stopped {
        // It fills its memory.
        let is_paged = |process: &ProcessPages| process.pid == Some(child.id()) && process.far_pages > 1_000;
        let begin = Instant::now();
        while !pager.status().processes.iter().any(is_paged) {
            assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", pager.status());
            std::thread::sleep(Duration::from_millis(1));
        }
        signal(child, Signal::STOP);
    }
    let begin = Instant::now();
    run(pager.command(&program).arg("24"), "verified");
    // One batch of pages each two seconds would take three minutes.
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
    for Stopped(child) in &mut stopped {
        signal(child, Signal::CONT);
        let mut output = String::new();
        child.stdout.take().unwrap().read_to_string(&mut output).unwrap();
        assert_eq!(output, "verified\n");
    }
    drop(stopped);
    pager.finish();
}

/// Reads the largest private mapping of a process.
fn read_memory(pid: u32) -> Vec<u64> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let ranges = maps.lines().filter(|line| line.contains(" rw-p 00000000 00:00 0")).map(|line| {
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        [start, end].map(|addr| u64::from_str_radix(addr, 16).unwrap())
    });
    let [start, end] = ranges.max_by_key(|[start, end]| end - start).unwrap();
    let mut bytes = vec![0; (end - start) as usize];
    let remote = RemoteIoVec { base: start as usize, len: bytes.len() };
    let pid = nix::unistd::Pid::from_raw(pid as i32);
    assert_eq!(process_vm_readv(pid, &mut [IoSliceMut::new(&mut bytes)], &[remote]).unwrap(), remote.len);
    bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect()
}

#[test]
fn the_memory_of_a_program_that_is_stopped_can_be_read() {
    let pager = TestPager::start(8 * MIB, 64 * MIB);
    let mut command = pager.command(compile("grow"));
    let mut child = Stopped(command.arg("32").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "filled");
    // Its pages have left until then.
    std::thread::sleep(Duration::from_millis(300));
    let pid = child.0.id();
    kill_process(Pid::from_child(&child.0), Signal::STOP).unwrap();
    let reader = std::thread::spawn(move || read_memory(pid));
    let begin = Instant::now();
    while !reader.is_finished() {
        assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", pager.status());
        std::thread::sleep(Duration::from_millis(10));
    }
    let words = reader.join().unwrap();
    let first = words.iter().position(|&word| word == 0x9e3779b97f4a7c15).unwrap() - 1;
    let wrong = words[first..]
        .iter()
        .take(4 << 20)
        .zip(0u64..)
        .find(|(word, index)| **word != index.wrapping_mul(0x9e3779b97f4a7c15));
    assert_eq!(wrong, None);
    kill_process(Pid::from_child(&child.0), Signal::CONT).unwrap();
    child.0.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert_eq!(lines.next().unwrap().unwrap(), "verified");
    drop(child);
    pager.finish();
}

#[test]
fn connections_that_say_nothing_stop_no_program() {
    let pager = TestPager::start(8 * MIB, 64 * MIB);
    let silent: Vec<_> = (0..10).map(|_| pager.connect()).collect();
    run(pager.command(compile("touch")).arg("1"), "verified");
    drop(silent);
    pager.finish();
}

#[test]
fn the_heap_of_small_allocations_is_paged() {
    let pager = TestPager::start(16 * MIB, 128 * MIB);
    let most = run(pager.command(compile("heap")).arg("48"), "verified");
    let statistics = pager.finish();
    assert!(statistics.stores > 5_000 && statistics.loads > 5_000, "{statistics:?}");
    assert!(most <= 16 * MIB, "{most} bytes: {statistics:?}");
}

#[test]
fn heaps_of_threads_and_memory_of_system_calls_are_paged() {
    let pager = TestPager::start(24 * MIB, 512 * MIB);
    let most = run(pager.command(compile("heap")).args(["24", "4"]), "verified");
    let statistics = pager.finish();
    assert!(statistics.stores > 20_000 && statistics.loads > 10_000, "{statistics:?}");
    // Without paging it is 156 MiB. What comes by system calls of the program's own is found only when it is there.
    assert!(most <= 112 * MIB, "{most} bytes: {statistics:?}");
}

#[test]
fn threads_end_and_are_joined_while_memory_is_scarce() {
    let pager = TestPager::start(12 * MIB, 64 * MIB);
    // At the end of a system call, the kernel would store to the control blocks by its restartable sequences, too.
    run(pager.command(compile("exits")).arg("32").env("GLIBC_TUNABLES", "glibc.pthread.rseq=0"), "joined");
    pager.finish();
}

#[test]
fn memory_that_the_kernel_may_free_is_the_programs_until_then() {
    let pager = TestPager::start(8 * MIB, 64 * MIB);
    let most = run(pager.command(compile("free")).arg("16"), "verified");
    let statistics = pager.finish();
    assert!(most <= 8 * MIB, "{most} bytes: {statistics:?}");
}

#[test]
fn an_interpreter_builds_a_dictionary() {
    let script = "d = {i: str(i) * 3 for i in range(200000)}\n\
                  assert all(v == str(k) * 3 for k, v in d.items())\n\
                  import subprocess; assert subprocess.run(['true']).returncode == 0\n\
                  print('verified')";
    let pager = TestPager::start(24 * MIB, 128 * MIB);
    run(pager.command("/usr/bin/python3").args(["-c", script]), "verified");
    let statistics = pager.finish();
    assert!(statistics.stores > 1_000, "{statistics:?}");
}
