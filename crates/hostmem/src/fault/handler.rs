//! Our SIGSEGV and SIGBUS handlers, in front of the program's.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

use libc::{c_int, c_void, siginfo_t};

use super::mask::SIGNALS;
use crate::interned::{Interned, Node};

/// `si_code` of a memory error found in the background, which no instruction of this thread ran into.
const BUS_MCEERR_AO: c_int = 5;

/// The program's actions for SIGSEGV and SIGBUS, as it would set them in the kernel. Null until we are installed.
static PROGRAM: [AtomicPtr<Action>; 2] = [const { AtomicPtr::new(std::ptr::null_mut()) }; 2];

/// All actions that a program has asked for so far; see [`intern`].
static KNOWN: Interned<libc::sigaction> = Interned::of(AtomicPtr::new(std::ptr::null_mut()));

/// The process that the actions in [`PROGRAM`] belong to. A child of `vfork` has its parent's memory, and signals of
/// its own.
static OWNER: AtomicI32 = AtomicI32::new(0);

/// What [`explain_bus_errors`] has set, as a pointer; null until then.
static EXPLAIN: AtomicPtr<()> = AtomicPtr::new(std::ptr::null_mut());

/// An action as the list keeps it.
type Action = Node<libc::sigaction>;

type SigactionFn = unsafe extern "C" fn(c_int, *const libc::sigaction, *mut libc::sigaction) -> c_int;

/// Installs our handlers in front of the ones that are there. Later calls do nothing.
///
/// # Errors
/// Those of `sigaction`.
pub fn install() -> io::Result<()> {
    static DONE: OnceLock<Result<(), i32>> = OnceLock::new();
    let result = DONE.get_or_init(|| {
        note_process();
        SIGNALS.into_iter().enumerate().try_for_each(|(place, signal)| {
            // Known before we are installed, so that our handler always finds it.
            let there = exchange(signal, None)?;
            PROGRAM[place].store(intern(&there), Ordering::Release);
            exchange(signal, Some(&front_of(&there))).map(drop)
        })
    });
    result.map_err(io::Error::from_raw_os_error)
}

/// Sets what is to be written to standard error when an access to an address, which is no copy of ours, raises SIGBUS:
/// before the program's action, which may end it. The function is called by a signal handler.
pub fn explain_bus_errors(explain: fn(u64) -> Option<&'static str>) {
    EXPLAIN.store(explain as *mut (), Ordering::Release);
}

fn write_explanation(addr: u64) {
    let explain = EXPLAIN.load(Ordering::Acquire);
    if explain.is_null() {
        return;
    }
    // SAFETY: `explain_bus_errors` has stored a function of this type.
    let explain = unsafe { std::mem::transmute::<*mut (), fn(u64) -> Option<&'static str>>(explain) };
    if let Some(line) = explain(addr) {
        // SAFETY: as many readable bytes. There is no place to report an error.
        let _ = unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
    }
}

/// To be called in a child of `fork`: the noted actions are the child's from then on.
pub fn note_process() {
    // SAFETY: no preconditions.
    OWNER.store(unsafe { libc::getpid() }, Ordering::Relaxed);
}

/// For a library that interposes `sigaction` and `signal`: stands in for `sigaction(signal, action, old)`, with `None`
/// for a query. Returns the program's previous action, or `None` when the signal is not ours, [`install`] has not run,
/// or this process only shares the memory of the one that ran it; then the real function must be called. Safe to call
/// from a signal handler.
pub fn note_program_handler(signal: c_int, action: Option<&libc::sigaction>) -> Option<libc::sigaction> {
    let place = SIGNALS.iter().position(|&ours| ours == signal)?;
    let current = PROGRAM[place].load(Ordering::Acquire);
    // SAFETY: no preconditions.
    if current.is_null() || OWNER.load(Ordering::Relaxed) != unsafe { libc::getpid() } {
        return None;
    }
    let previous = match action {
        None => current,
        Some(action) => {
            let previous = PROGRAM[place].swap(intern(action), Ordering::AcqRel);
            // Cannot fail: the signal and our handler have been accepted before.
            let _ = exchange(signal, Some(&front_of(action)));
            previous
        }
    };
    // SAFETY: not null, and interned actions live for ever.
    Some(unsafe { (*previous).value })
}

/// Our action in front of the program's: on the stack that the program's handler would get, and interrupting system
/// calls as it would.
fn front_of(program: &libc::sigaction) -> libc::sigaction {
    // SAFETY: all-zero is a valid sigaction: an empty mask and no restorer.
    let mut ours: libc::sigaction = unsafe { std::mem::zeroed() };
    ours.sa_sigaction = on_fault as *const () as usize;
    ours.sa_flags = libc::SA_SIGINFO;
    ours.sa_flags |= match program.sa_sigaction {
        // Works even when the stack is the thing that overflowed.
        libc::SIG_DFL | libc::SIG_IGN => libc::SA_ONSTACK | libc::SA_RESTART,
        _ => program.sa_flags & (libc::SA_ONSTACK | libc::SA_RESTART),
    };
    ours
}

/// The C library's `sigaction`, even when the library that we are part of exports one that calls us.
fn exchange(signal: c_int, new: Option<&libc::sigaction>) -> Result<libc::sigaction, i32> {
    // Looked up by `install`, which comes first.
    static REAL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    let mut found = REAL.load(Ordering::Relaxed);
    if found.is_null() {
        // SAFETY: the name is a C string.
        found = unsafe { libc::dlsym(libc::RTLD_NEXT, c"sigaction".as_ptr()) };
        REAL.store(found, Ordering::Relaxed);
    }
    let real: SigactionFn = if found.is_null() {
        libc::sigaction
    } else {
        // SAFETY: a symbol of that name is the C library's function with that signature.
        unsafe { std::mem::transmute::<*mut c_void, SigactionFn>(found) }
    };
    // SAFETY: all-zero is a valid value to be overwritten.
    let mut old: libc::sigaction = unsafe { std::mem::zeroed() };
    let new = new.map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: both structures are valid, and a handler in `new` is either ours or was given to us as a handler.
    if unsafe { real(signal, new, &mut old) } == 0 {
        Ok(old)
    } else {
        Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL))
    }
}

/// The permanent copy of an action. Even programs that keep switching between handlers have only a few.
fn intern(raw: &libc::sigaction) -> *mut Action {
    if raw.sa_flags & libc::SA_RESETHAND != 0 {
        // The signal handler will need it, and must not allocate.
        intern(&after_reset(raw));
    }
    // SAFETY: a page of its own for each.
    unsafe { KNOWN.intern(*raw, same, allocate) }
}

/// Memory for an action: a page of its own, because the caller may be a signal handler, which has no allocator.
fn allocate() -> *mut Action {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: new memory, wherever the kernel has room.
    let page = unsafe { libc::mmap(std::ptr::null_mut(), size_of::<Action>(), protection, flags, -1, 0) };
    if page == libc::MAP_FAILED {
        // As an allocation that fails.
        std::process::abort();
    }
    page.cast()
}

/// What an action with `SA_RESETHAND` becomes once its handler has been called.
fn after_reset(raw: &libc::sigaction) -> libc::sigaction {
    libc::sigaction {
        sa_sigaction: libc::SIG_DFL,
        sa_flags: raw.sa_flags & !(libc::SA_RESETHAND | libc::SA_SIGINFO),
        ..*raw
    }
}

fn same(a: &libc::sigaction, b: &libc::sigaction) -> bool {
    let has = |action: &libc::sigaction, signal| {
        // SAFETY: the set is initialised, and the number is checked by the function.
        unsafe { libc::sigismember(&action.sa_mask, signal) }
    };
    a.sa_sigaction == b.sa_sigaction && a.sa_flags == b.sa_flags && (1..=64).all(|s| has(a, s) == has(b, s))
}

/// Whether an instruction of this thread caused the signal, and no process or thread sent it.
fn is_synchronous(signal: c_int, code: c_int) -> bool {
    code > 0 && !(signal == libc::SIGBUS && code == BUS_MCEERR_AO)
}

/// The handler. Recovers our own faults, and passes everything else on as the kernel would have.
extern "C" fn on_fault(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel gives both pointers to a handler that was installed with SA_SIGINFO, and so does a program's
    // handler that was installed over ours and calls it.
    unsafe {
        let synchronous = is_synchronous(signal, (*info).si_code);
        if !(synchronous && super::machine::recover(context)) {
            if synchronous && signal == libc::SIGBUS {
                write_explanation((*info).si_addr() as u64);
            }
            pass_on(signal, synchronous, info, context);
        }
    }
}

/// Performs the program's action.
///
/// # Safety
/// The pointers are the kernel's, as given to a handler.
unsafe fn pass_on(signal: c_int, synchronous: bool, info: *mut siginfo_t, context: *mut c_void) {
    let place = usize::from(signal != SIGNALS[0]);
    let program = PROGRAM[place].load(Ordering::Acquire);
    if program.is_null() {
        return default_action(signal, synchronous);
    }
    // SAFETY: interned actions live for ever.
    let program = unsafe { (*program).value };
    match program.sa_sigaction {
        // The kernel does not let a thread ignore its own fault.
        libc::SIG_IGN if !synchronous => {}
        libc::SIG_DFL | libc::SIG_IGN => default_action(signal, synchronous),
        handler => {
            // SAFETY: the program installed this handler for this signal; the pointers are as the caller promises.
            unsafe { call_program(&program, handler, place, signal, info, context) }
        }
    }
}

/// Performs the kernel's default action: ends the process, with a core at the instruction in question.
fn default_action(signal: c_int, synchronous: bool) {
    // SAFETY: all-zero is SIG_DFL with an empty mask.
    let default: libc::sigaction = unsafe { std::mem::zeroed() };
    let _ = exchange(signal, Some(&default));
    if !synchronous {
        // The signal is not raised again when we return, so we raise it; it stays pending until then.
        // SAFETY: plain system calls without pointers.
        unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), libc::gettid(), signal) };
    }
}

/// Calls the program's handler with the signals blocked that it asked for. Returning from ours restores the mask.
///
/// # Safety
/// `handler` is what the program installed for `signal`, and the pointers are the kernel's.
unsafe fn call_program(
    program: &libc::sigaction,
    handler: usize,
    place: usize,
    signal: c_int,
    info: *mut siginfo_t,
    context: *mut c_void,
) {
    // SAFETY: sets are initialised before use and outlive the calls; the handler's type is the one that its flags say.
    unsafe {
        libc::pthread_sigmask(libc::SIG_BLOCK, &program.sa_mask, std::ptr::null_mut());
        if program.sa_flags & libc::SA_RESETHAND != 0 {
            PROGRAM[place].store(intern(&after_reset(program)), Ordering::Release);
        }
        if program.sa_flags & libc::SA_NODEFER != 0 {
            let mut own: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut own);
            libc::sigaddset(&mut own, signal);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &own, std::ptr::null_mut());
        }
        if program.sa_flags & libc::SA_SIGINFO != 0 {
            let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = std::mem::transmute(handler);
            handler(signal, info, context);
        } else {
            let handler: extern "C" fn(c_int) = std::mem::transmute(handler);
            handler(signal);
        }
    }
}
