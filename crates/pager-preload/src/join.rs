//! Joining the pager: when the program starts, and in a child after a fork.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use terrace_hostmem::{HostRange, PAGE_BYTES};
use terrace_vm::handshake::{self, FEATURES, Hello, RESERVED_BYTES, SOCKET_VARIABLE};
use terrace_vm::userfault::{Userfaultfd, modes};
use terrace_vm::{BATCH_PAGES, EvictionArea};

use crate::evictor::{self, Evictor};
use crate::output::report;

/// A program that starts waits for the pager for this time.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Programs that close descriptors by number close low ones.
const DESCRIPTOR_MIN: libc::c_int = 500;

/// The descriptor by which this process registers memory; negative if it is not paged.
static DESCRIPTOR: AtomicI32 = AtomicI32::new(-1);
/// The device and the inode of its file: the program may close it, and open another file by its number. Each descriptor of
/// `userfaultfd(2)` has an inode of its own.
static FILE: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
/// The process that has it. A child has its parent's until it has joined, and must not use it.
static OWNER: AtomicI32 = AtomicI32::new(0);
/// The identity page, behind it the pages that the evictor moves pages to, and its stack.
static RESERVED: AtomicU64 = AtomicU64::new(0);

/// Whether a child may lack memory that this process has.
static MAY_LACK_MEMORY: AtomicBool = AtomicBool::new(false);

/// The heap that has been registered: from where it ended when the library was loaded, to where it ended the last time.
static HEAP_START: AtomicU64 = AtomicU64::new(0);
static HEAP_END: AtomicU64 = AtomicU64::new(0);

/// The dynamic linker calls this when it has loaded the library.
#[used]
#[unsafe(link_section = ".init_array")]
static ON_LOAD: extern "C" fn() = on_load;

extern "C" fn on_load() {
    if std::env::var_os(SOCKET_VARIABLE).is_none_or(|path| path.is_empty()) {
        return;
    }
    // SAFETY: reads the end of the heap.
    let heap = (unsafe { libc::sbrk(0) } as u64).next_multiple_of(PAGE_BYTES);
    HEAP_START.store(heap, Ordering::Relaxed);
    HEAP_END.store(heap, Ordering::Relaxed);
    if let Err(error) = join() {
        report(format_args!("memory is not paged: {error}"));
        return;
    }
    // SAFETY: a function without preconditions, in a library that is never unloaded.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
}

/// Whether memory of this process is registered.
pub(crate) fn is_paged() -> bool {
    DESCRIPTOR.load(Ordering::Acquire) >= 0
}

/// Has faults in new memory go to the pager. After a failure the memory stays as it is: the pager looks for it later.
pub(crate) fn register(range: HostRange) {
    let descriptor = DESCRIPTOR.load(Ordering::Acquire);
    // SAFETY: no preconditions.
    if descriptor < 0 || range.len == 0 || OWNER.load(Ordering::Relaxed) != unsafe { libc::getpid() } {
        return;
    }
    // SAFETY: the descriptor stays open. If the program has closed it, the request fails, or is not one of the file that has
    // its number now.
    let _ = with_descriptor(unsafe { BorrowedFd::borrow_raw(descriptor) }, |userfaultfd| {
        userfaultfd.register(range, modes::MISSING | modes::WRITE_PROTECTED)
    });
}

/// Registers what the heap has grown by since the last call.
pub(crate) fn register_heap() {
    if !is_paged() {
        return;
    }
    // SAFETY: reads the end of the heap, by no system call.
    let end = unsafe { libc::sbrk(0) } as u64 / PAGE_BYTES * PAGE_BYTES;
    if HEAP_END.swap(end, Ordering::Relaxed) != end {
        let start = HEAP_START.load(Ordering::Relaxed);
        register(HostRange { addr: start, len: end.saturating_sub(start) });
    }
}

/// Notes that children from now on, and theirs, may lack memory that this process has.
pub(crate) fn note_uninherited_memory() {
    MAY_LACK_MEMORY.store(true, Ordering::Relaxed);
}

/// Uses a descriptor that somebody else closes.
fn with_descriptor<T>(descriptor: BorrowedFd<'_>, action: impl FnOnce(&Userfaultfd) -> T) -> T {
    // SAFETY: not dropped below.
    let userfaultfd = unsafe { OwnedFd::from_raw_fd(descriptor.as_raw_fd()) };
    let userfaultfd = std::mem::ManuallyDrop::new(Userfaultfd::from(userfaultfd));
    action(&userfaultfd)
}

fn connect() -> io::Result<UnixStream> {
    UnixStream::connect(std::env::var_os(SOCKET_VARIABLE).unwrap_or_default())
}

/// The evictor's stack, which is never paged.
pub(crate) fn stack() -> HostRange {
    let staging = staging();
    HostRange { addr: staging.addr + staging.len, len: RESERVED_BYTES - PAGE_BYTES - staging.len }
}

fn staging() -> HostRange {
    let addr = RESERVED.load(Ordering::Relaxed) + PAGE_BYTES;
    HostRange { addr, len: BATCH_PAGES as u64 * PAGE_BYTES }
}

/// Joins the pager with a new descriptor.
fn join() -> io::Result<()> {
    let userfaultfd = Userfaultfd::open(FEATURES)?;
    let reserved = reserve(RESERVED_BYTES)?;
    RESERVED.store(reserved.addr, Ordering::Relaxed);
    let faulting = HostRange { addr: reserved.addr, len: PAGE_BYTES + staging().len };
    userfaultfd.register(faulting, modes::MISSING)?;
    let socket = connect()?;
    socket.set_read_timeout(Some(TIMEOUT))?;
    let (area, file) = EvictionArea::create()?;
    let hello = Hello { identity_page: reserved.addr, identity: 0, may_lack_memory: false };
    handshake::send_hello(&socket, hello, file.as_fd(), Some(userfaultfd.as_fd()))?;
    drop(handshake::receive_welcome(&socket)?);
    begin(socket, area, userfaultfd)
}

/// Starts the evictor, and registers memory from now on.
fn begin(socket: UnixStream, area: EvictionArea, userfaultfd: Userfaultfd) -> io::Result<()> {
    socket.set_read_timeout(None)?;
    let descriptor = rustix::io::fcntl_dupfd_cloexec(userfaultfd.as_fd(), DESCRIPTOR_MIN);
    let kept = descriptor.or_else(|_| rustix::io::fcntl_dupfd_cloexec(userfaultfd.as_fd(), 0))?;
    evictor::start(Evictor { socket, area, userfaultfd, staging: staging() })?;
    for (kept, number) in FILE.iter().zip(file_of(kept.as_fd())?) {
        kept.store(number, Ordering::Relaxed);
    }
    // SAFETY: no preconditions.
    OWNER.store(unsafe { libc::getpid() }, Ordering::Relaxed);
    DESCRIPTOR.store(kept.into_raw_fd(), Ordering::Release);
    Ok(())
}

/// The device and the inode of a descriptor's file.
fn file_of(descriptor: BorrowedFd<'_>) -> io::Result<[u64; 2]> {
    let status = rustix::fs::fstat(descriptor)?;
    Ok([status.st_dev, status.st_ino])
}

fn reserve(len: u64) -> io::Result<HostRange> {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, wherever the kernel has room.
    let addr = unsafe { mmap_anonymous(std::ptr::null_mut(), len as usize, rights, MapFlags::PRIVATE) }?;
    Ok(HostRange { addr: addr as u64, len })
}

/// A child has copies of its parent's pages, and the pager has a descriptor for them from the kernel. It also has a copy of
/// its parent's descriptor, which handles the parent's memory.
extern "C" fn in_child() {
    let inherited = DESCRIPTOR.swap(-1, Ordering::AcqRel);
    if inherited < 0 {
        return;
    }
    let kept = FILE.each_ref().map(|number| number.load(Ordering::Relaxed));
    // SAFETY: only asked for its file. If the program has closed it, there is an error, or another file.
    let file = file_of(unsafe { BorrowedFd::borrow_raw(inherited) });
    if file.is_ok_and(|file| file == kept) {
        // SAFETY: this process's copy of a descriptor that nobody uses any more.
        drop(unsafe { OwnedFd::from_raw_fd(inherited) });
    }
    let (socket, area) = match greet_as_child() {
        Ok(greeted) => greeted,
        Err(error) => return report(format_args!("memory of a child stays local: {error}")),
    };
    // It waits as long as for its faults, which the same pager handles.
    let userfaultfd = loop {
        match handshake::receive_welcome(&socket) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            welcome => break welcome,
        }
    };
    if let Err(error) = &userfaultfd
        && matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset)
    {
        // The pager may have ended, and the child would find zeros.
        report(format_args!("a child cannot be paged: {error}"));
        std::process::abort();
    }
    // The pager keeps the pages of a child whose connection ends before its thread has begun.
    if let Err(error) = userfaultfd.and_then(|userfaultfd| begin(socket, area, userfaultfd.into())) {
        report(format_args!("memory of a child stays local: {error}"));
    }
}

/// Tells the pager which child this is.
fn greet_as_child() -> io::Result<(UnixStream, EvictionArea)> {
    let identity_page = RESERVED.load(Ordering::Relaxed);
    let reserved = HostRange { addr: identity_page, len: PAGE_BYTES + staging().len };
    // The pages are the parent's. Touched again, the first one is filled by the pager.
    // SAFETY: memory of this library alone.
    let identity = unsafe {
        rustix::mm::madvise(
            identity_page as *mut _,
            reserved.len as usize,
            rustix::mm::Advice::LinuxDontNeed,
        )?;
        std::ptr::read_volatile(identity_page as *const u64)
    };
    let socket = connect()?;
    let (area, file) = EvictionArea::create()?;
    let hello = Hello { identity_page, identity, may_lack_memory: MAY_LACK_MEMORY.load(Ordering::Relaxed) };
    handshake::send_hello(&socket, hello, file.as_fd(), None)?;
    Ok((socket, area))
}
