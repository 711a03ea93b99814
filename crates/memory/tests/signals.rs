//! The program's SIGSEGV and SIGBUS handlers keep working, and masks cannot make a fault in a copy deadly.
//!
//! Signal dispositions belong to a process, and some of these tests end it: each test runs in a child of its own.

mod common;

use std::os::unix::process::ExitStatusExt;
use std::process::Output;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};

use common::*;
use libc::{SIGBUS, SIGSEGV, SIGUSR1, c_int, c_void};
use terrace_hostmem::fault;
use terrace_memory::{Access, AccessError, RegionSpec, Registry};

/// Runs the rest of the test in a child. In the parent, passes the child's output to `$check`.
macro_rules! in_child {
    ($name:literal, $check:expr) => {
        if let Some(output) = in_child($name) {
            let check: fn(&Output) = $check;
            return check(&output);
        }
    };
}

fn succeeded(output: &Output) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}\n{stderr}", output.status);
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(stdout.contains("1 passed"), "the child did not run the test:\n{stdout}");
}

fn died_of(output: &Output, signal: c_int) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(signal), "{:?}\n{stderr}", output.status);
}

static CALLS: AtomicUsize = AtomicUsize::new(0);
static LAST_ADDR: AtomicU64 = AtomicU64::new(0);
static LAST_CODE: AtomicI32 = AtomicI32::new(0);
static STACK: AtomicU64 = AtomicU64::new(0);
/// Bit n: signal n was blocked during the call.
static BLOCKED: AtomicU64 = AtomicU64::new(0);

/// Records its arguments and context, and makes the page accessible, as a garbage collector or a checkpointer does.
extern "C" fn mend(_signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
    // SAFETY: the kernel's siginfo; the mask query writes to a local.
    unsafe {
        CALLS.fetch_add(1, Ordering::SeqCst);
        LAST_ADDR.store((*info).si_addr() as u64, Ordering::SeqCst);
        LAST_CODE.store((*info).si_code, Ordering::SeqCst);
        let mut mask: libc::sigset_t = std::mem::zeroed();
        STACK.store(&raw const mask as u64, Ordering::SeqCst);
        libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &mut mask);
        let blocked = (1..64).filter(|&n| libc::sigismember(&mask, n) == 1).map(|n| 1 << n).sum();
        BLOCKED.store(blocked, Ordering::SeqCst);
        if (*info).si_code > 0 {
            let page = (*info).si_addr() as usize & !(PAGE - 1);
            libc::mprotect(page as *mut _, PAGE, libc::PROT_READ | libc::PROT_WRITE);
        }
    }
}

/// A handler without SA_SIGINFO.
extern "C" fn mend_known(_signal: c_int) {
    CALLS.fetch_add(1, Ordering::SeqCst);
    // SAFETY: the test has stored the address of a page of its own.
    unsafe {
        libc::mprotect(LAST_ADDR.load(Ordering::SeqCst) as *mut _, PAGE, libc::PROT_READ | libc::PROT_WRITE)
    };
}

fn action(handler: usize, flags: c_int) -> libc::sigaction {
    // SAFETY: all-zero is a valid sigaction.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler;
    action.sa_flags = flags;
    action
}

fn mending(flags: c_int) -> libc::sigaction {
    action(mend as *const () as usize, flags | libc::SA_SIGINFO)
}

/// The system's `sigaction`, called as by a program that installed its handler before Terrace.
fn set(signal: c_int, action: &libc::sigaction) -> libc::sigaction {
    // SAFETY: both structures are valid; the handlers are those of this file.
    unsafe {
        let mut old = std::mem::zeroed();
        assert_eq!(libc::sigaction(signal, action, &mut old), 0);
        old
    }
}

/// Stands in for an interposed `sigaction`.
fn note(signal: c_int, action: &libc::sigaction) -> libc::sigaction {
    fault::note_program_handler(signal, Some(action)).expect("ours is installed")
}

/// A page on which the program's own stores fault.
struct Trap(Mapping);

impl Trap {
    fn new() -> Trap {
        let memory = Mapping::anonymous(PAGE);
        memory.protect(0, PAGE, libc::PROT_NONE);
        Trap(memory)
    }

    /// A store by the program itself, not by a copy of Terrace.
    fn step_on(&self) {
        self.0.protect(0, PAGE, libc::PROT_NONE);
        // SAFETY: a volatile store to a mapping of our own; a handler or the kernel handles the fault.
        unsafe { std::ptr::write_volatile((self.0.addr + 8) as *mut u64, 1) };
    }
}

/// A copy that faults, which the handler must tell from the program's faults.
fn assert_copies_recover(registry: &Registry) {
    let region = RegionSpec::new(PD, 0, u64::MAX, ALL | Access::ON_DEMAND);
    let key = registry.register(&region).unwrap().key;
    let calls = CALLS.load(Ordering::SeqCst);
    assert_eq!(registry.write(peer(), key, 64, &[1; 100]), Err(AccessError::Fault));
    assert_eq!(registry.read(peer(), key, 64, &mut [1; 100]), Err(AccessError::Fault));
    let file = memfd(0, 0).unwrap();
    let empty = Mapping::file(&file, PAGE, libc::MAP_SHARED);
    assert_eq!(registry.read(peer(), key, empty.addr, &mut [1; 100]), Err(AccessError::Fault), "SIGBUS");
    assert_eq!(CALLS.load(Ordering::SeqCst), calls, "the program's handler saw our fault");
    registry.deregister(key).unwrap();
}

#[test]
fn a_handler_from_before_gets_the_programs_faults() {
    in_child!("a_handler_from_before_gets_the_programs_faults", succeeded);
    set(SIGSEGV, &mending(0));
    let registry = registry();
    let trap = Trap::new();
    for n in 1..=3 {
        trap.step_on();
        assert_eq!(CALLS.load(Ordering::SeqCst), n);
        assert_eq!(LAST_ADDR.load(Ordering::SeqCst), trap.0.addr + 8);
        assert_eq!(LAST_CODE.load(Ordering::SeqCst), 2, "SEGV_ACCERR");
        assert_copies_recover(&registry);
    }
}

#[test]
fn a_handler_from_later_gets_them_as_well_and_sees_no_trace_of_ours() {
    in_child!("a_handler_from_later_gets_them_as_well_and_sees_no_trace_of_ours", succeeded);
    let before = mending(libc::SA_RESTART);
    set(SIGSEGV, &before);
    let registry = registry();
    LAST_ADDR.store(0, Ordering::SeqCst);
    let old = note(SIGSEGV, &action(mend_known as *const () as usize, 0));
    assert_eq!(old.sa_sigaction, before.sa_sigaction);
    assert_eq!(old.sa_flags & libc::SA_RESTART, libc::SA_RESTART);
    let queried = fault::note_program_handler(SIGSEGV, None).unwrap();
    assert_eq!(queried.sa_sigaction, mend_known as *const () as usize);
    let trap = Trap::new();
    LAST_ADDR.store(trap.0.addr, Ordering::SeqCst);
    trap.step_on();
    assert_eq!(CALLS.load(Ordering::SeqCst), 1);
    assert_copies_recover(&registry);
    note(SIGSEGV, &old);
    trap.step_on();
    assert_eq!(CALLS.load(Ordering::SeqCst), 2);
    assert_eq!(LAST_ADDR.load(Ordering::SeqCst), trap.0.addr + 8, "the first handler is back");
}

#[test]
fn other_signals_and_uninstalled_handlers_are_the_real_functions_business() {
    in_child!("other_signals_and_uninstalled_handlers_are_the_real_functions_business", succeeded);
    assert!(fault::note_program_handler(SIGSEGV, None).is_none());
    fault::install().unwrap();
    assert!(fault::note_program_handler(SIGSEGV, None).is_some());
    assert!(fault::note_program_handler(SIGUSR1, None).is_none());
}

/// Where a child of process `parent` writes its core.
fn core_directory(parent: u32) -> std::path::PathBuf {
    std::env::temp_dir().join(format!("terrace-core-of-{parent}"))
}

#[test]
fn without_a_handler_the_program_dies_of_its_fault_with_a_core() {
    in_child!("without_a_handler_the_program_dies_of_its_fault_with_a_core", |output| {
        died_of(output, SIGSEGV);
        // A process without Terrace shows whether this machine writes cores at all.
        let directory = core_directory(std::process::id());
        let mut shell = std::process::Command::new("sh");
        let other = shell
            .args(["-c", "ulimit -S -c $(ulimit -H -c); kill -SEGV $$"])
            .current_dir(&directory)
            .status()
            .unwrap();
        std::fs::remove_dir_all(&directory).unwrap();
        assert_eq!(output.status.core_dumped(), other.core_dumped());
    });
    let directory = core_directory(std::os::unix::process::parent_id());
    std::fs::create_dir(&directory).unwrap();
    std::env::set_current_dir(&directory).unwrap();
    allow_cores(true);
    set(SIGSEGV, &action(libc::SIG_DFL, 0));
    assert_copies_recover(&registry());
    Trap::new().step_on();
}

#[test]
fn a_bus_error_of_the_program_ends_it() {
    in_child!("a_bus_error_of_the_program_ends_it", |output| died_of(output, SIGBUS));
    let _registry = registry();
    note(SIGBUS, &action(libc::SIG_DFL, 0));
    let file = memfd(0, 0).unwrap();
    let empty = Mapping::file(&file, PAGE, libc::MAP_SHARED);
    // SAFETY: a volatile load from a mapping of our own, which has no page behind it.
    unsafe { std::ptr::read_volatile(empty.addr as *const u8) };
}

#[test]
fn an_ignored_fault_is_deadly_and_an_ignored_signal_is_ignored() {
    in_child!("an_ignored_fault_is_deadly_and_an_ignored_signal_is_ignored", |output| {
        assert!(String::from_utf8_lossy(&output.stdout).contains("still here"));
        died_of(output, SIGSEGV);
    });
    let registry = registry();
    note(SIGSEGV, &action(libc::SIG_IGN, 0));
    // SAFETY: sends a signal to this thread.
    unsafe { libc::raise(SIGSEGV) };
    assert_copies_recover(&registry);
    println!("still here");
    Trap::new().step_on();
}

#[test]
fn a_sent_signal_has_the_default_effect() {
    in_child!("a_sent_signal_has_the_default_effect", |output| died_of(output, SIGSEGV));
    set(SIGSEGV, &action(libc::SIG_DFL, 0));
    let _registry = registry();
    // SAFETY: sends a signal to this thread.
    unsafe { libc::raise(SIGSEGV) };
    println!("not reached");
}

#[test]
fn a_sent_signal_reaches_the_handler() {
    in_child!("a_sent_signal_reaches_the_handler", succeeded);
    let _registry = registry();
    note(SIGSEGV, &mending(0));
    // SAFETY: sends a signal to this thread.
    unsafe { libc::raise(SIGSEGV) };
    assert_eq!(CALLS.load(Ordering::SeqCst), 1);
    assert_eq!(LAST_CODE.load(Ordering::SeqCst), libc::SI_TKILL);
}

#[test]
fn signals_sent_into_a_copy_are_no_faults_of_the_copy() {
    in_child!("signals_sent_into_a_copy_are_no_faults_of_the_copy", succeeded);
    let registry = registry();
    note(SIGSEGV, &mending(0));
    let memory = Mapping::anonymous(16 * PAGE);
    let key = memory.register(&registry, ALL).key;
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let copier = scope.spawn(|| {
            // SAFETY: asks for this thread's handle.
            sender.send(unsafe { libc::pthread_self() }).unwrap();
            let data = vec![1; 16 * PAGE];
            while CALLS.load(Ordering::SeqCst) < 500 {
                registry.write(peer(), key, memory.addr, &data).expect("a signal was taken for a fault");
            }
        });
        let thread = receiver.recv().unwrap();
        while !copier.is_finished() && CALLS.load(Ordering::SeqCst) < 500 {
            // SAFETY: the scope keeps the thread's handle valid.
            unsafe { libc::pthread_kill(thread, SIGSEGV) };
            std::thread::yield_now();
        }
    });
}

#[test]
fn flags_and_mask_of_the_programs_action_are_honoured() {
    in_child!("flags_and_mask_of_the_programs_action_are_honoured", succeeded);
    let _registry = registry();
    let trap = Trap::new();
    let blocked = |signal: c_int| BLOCKED.load(Ordering::SeqCst) & (1 << signal) != 0;

    let mut masking = mending(0);
    // SAFETY: a valid set and signal.
    unsafe { libc::sigaddset(&mut masking.sa_mask, SIGUSR1) };
    note(SIGSEGV, &masking);
    trap.step_on();
    assert!(blocked(SIGSEGV) && blocked(SIGUSR1));
    // SAFETY: fills a local set.
    let blocked_after = unsafe {
        let mut mask: libc::sigset_t = std::mem::zeroed();
        libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &mut mask);
        libc::sigismember(&mask, SIGUSR1)
    };
    assert_eq!(blocked_after, 0, "the mask came back");

    note(SIGSEGV, &mending(libc::SA_NODEFER));
    trap.step_on();
    assert!(!blocked(SIGSEGV) && !blocked(SIGUSR1));
}

#[test]
fn the_handler_runs_on_the_stack_that_it_asked_for() {
    in_child!("the_handler_runs_on_the_stack_that_it_asked_for", succeeded);
    let registry = registry();
    let stack = Mapping::anonymous(16 * PAGE);
    let alternative = libc::stack_t { ss_sp: stack.addr as *mut _, ss_flags: 0, ss_size: stack.len };
    // SAFETY: the stack is mapped for the rest of the process's life.
    assert_eq!(unsafe { libc::sigaltstack(&alternative, std::ptr::null_mut()) }, 0);
    let on_it = || (stack.addr..stack.addr + stack.len as u64).contains(&STACK.load(Ordering::SeqCst));
    let trap = Trap::new();
    note(SIGSEGV, &mending(libc::SA_ONSTACK));
    trap.step_on();
    assert!(on_it());
    assert_copies_recover(&registry);
    note(SIGSEGV, &mending(0));
    trap.step_on();
    assert!(!on_it());
    assert_copies_recover(&registry);
    std::mem::forget(stack);
}

#[test]
fn a_handler_for_once_is_called_once() {
    in_child!("a_handler_for_once_is_called_once", |output| {
        assert!(String::from_utf8_lossy(&output.stdout).contains("first survived"));
        died_of(output, SIGSEGV);
    });
    let registry = registry();
    note(SIGSEGV, &mending(libc::SA_RESETHAND));
    let trap = Trap::new();
    trap.step_on();
    assert_copies_recover(&registry);
    assert_eq!(fault::note_program_handler(SIGSEGV, None).unwrap().sa_sigaction, libc::SIG_DFL);
    println!("first survived");
    trap.step_on();
}

/// The handler before [`chain`].
static PREVIOUS: AtomicUsize = AtomicUsize::new(0);

/// A handler that Terrace was not told of, and that calls the previous handler for other faults.
extern "C" fn chain(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    CALLS.fetch_add(1, Ordering::SeqCst);
    // SAFETY: the test stored our own handler there, which has this signature.
    let previous: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
        unsafe { std::mem::transmute(PREVIOUS.load(Ordering::SeqCst)) };
    previous(signal, info, context);
}

#[test]
fn a_handler_over_ours_that_chains_does_no_harm() {
    in_child!("a_handler_over_ours_that_chains_does_no_harm", succeeded);
    set(SIGSEGV, &mending(0));
    let registry = registry();
    let old = set(SIGSEGV, &action(chain as *const () as usize, libc::SA_SIGINFO));
    PREVIOUS.store(old.sa_sigaction, Ordering::SeqCst);
    let key = registry.register(&RegionSpec::new(PD, 0, u64::MAX, ALL | Access::ON_DEMAND)).unwrap().key;
    assert_eq!(registry.write(peer(), key, 64, &[1; 100]), Err(AccessError::Fault));
    assert_eq!(CALLS.load(Ordering::SeqCst), 1);
    Trap::new().step_on();
    assert_eq!(CALLS.load(Ordering::SeqCst), 3, "through the chain to the handler from before us");
}

#[test]
fn an_overflowing_stack_is_still_reported() {
    in_child!("an_overflowing_stack_is_still_reported", |output| {
        died_of(output, libc::SIGABRT);
        assert!(String::from_utf8_lossy(&output.stderr).contains("overflowed its stack"));
    });
    /// Recurses past the end of the stack; the array keeps the compiler from turning the recursion into a loop.
    fn deeper(n: u64) -> u64 {
        let room = std::hint::black_box([n; 64]);
        if n == u64::MAX { 0 } else { deeper(room[7] + 1) + room[8] }
    }
    let _registry = registry();
    std::hint::black_box(deeper(0));
}

/// Blocks every signal in the calling thread.
fn block_all() {
    // SAFETY: fills a local set and blocks it.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        assert_eq!(libc::pthread_sigmask(libc::SIG_SETMASK, &all, std::ptr::null_mut()), 0);
    }
}

#[test]
fn a_thread_that_was_born_with_all_signals_blocked_copies_safely() {
    in_child!("a_thread_that_was_born_with_all_signals_blocked_copies_safely", succeeded);
    let registry = registry();
    block_all();
    std::thread::scope(|scope| {
        scope.spawn(|| assert_copies_recover(&registry));
    });
}

#[test]
fn a_thread_that_blocks_them_through_an_interposer_copies_safely() {
    in_child!("a_thread_that_blocks_them_through_an_interposer_copies_safely", succeeded);
    let registry = registry();
    assert_copies_recover(&registry);
    // SAFETY: fills a local set and blocks it, as an interposed pthread_sigmask would.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        fault::sanitize_mask(&mut all);
        assert_eq!(libc::sigismember(&all, SIGSEGV) + libc::sigismember(&all, SIGBUS), 0);
        assert_eq!(libc::sigismember(&all, SIGUSR1), 1);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, std::ptr::null_mut());
    }
    assert_copies_recover(&registry);
}

#[test]
fn a_thread_that_blocks_them_behind_our_back_can_be_helped() {
    in_child!("a_thread_that_blocks_them_behind_our_back_can_be_helped", succeeded);
    let registry = registry();
    assert_copies_recover(&registry);
    block_all();
    fault::unblock_in_this_thread();
    assert_copies_recover(&registry);
}
