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

/// `fcntl(2)`: the signal for events of a descriptor with O_ASYNC.
const F_SETSIG: libc::c_int = 10;

/// The descriptor by which this process registers memory, if it does.
static USERFAULTFD: Kept = Kept::none();
/// The process that has it. A child has its parent's until it has joined, and must not use it.
static OWNER: AtomicI32 = AtomicI32::new(0);
/// The connection of a child without an evictor. The child ends with it.
static CONNECTION: Kept = Kept::none();
/// Whether a pager has registered memory of this process or of one that it is a child of.
static HAS_REGISTERED: AtomicBool = AtomicBool::new(false);
/// The identity page, behind it the pages that the evictor moves pages to, and its stack.
static RESERVED: AtomicU64 = AtomicU64::new(0);

/// Whether a child may lack memory that this process has.
static MAY_LACK_MEMORY: AtomicBool = AtomicBool::new(false);

/// The heap that has been registered: from where it ended when the library was loaded, to where it ended the last time.
static HEAP_START: AtomicU64 = AtomicU64::new(0);
static HEAP_END: AtomicU64 = AtomicU64::new(0);

/// A descriptor of this library among the program's. The program may close it, and open another file by its number.
struct Kept {
    /// Negative if there is none.
    number: AtomicI32,
    /// The device and the inode. Each descriptor of `userfaultfd(2)`, and each socket, has an inode of its own.
    file: [AtomicU64; 2],
}

impl Kept {
    const fn none() -> Kept {
        Kept { number: AtomicI32::new(-1), file: [const { AtomicU64::new(0) }; 2] }
    }

    fn set(&self, descriptor: OwnedFd) {
        // Descriptors of this kind are asked for nothing else. An error would leave one open.
        for (kept, number) in self.file.iter().zip(file_of(descriptor.as_fd()).unwrap_or_default()) {
            kept.store(number, Ordering::Relaxed);
        }
        self.number.store(descriptor.into_raw_fd(), Ordering::Release);
    }

    fn number(&self) -> Option<libc::c_int> {
        Some(self.number.load(Ordering::Acquire)).filter(|&number| number >= 0)
    }

    /// Closes it, unless the program has.
    fn close(&self) {
        let number = self.number.swap(-1, Ordering::AcqRel);
        if number < 0 {
            return;
        }
        let kept = self.file.each_ref().map(|number| number.load(Ordering::Relaxed));
        // SAFETY: only asked for its file. If the program has closed it, there is an error, or another file.
        let file = file_of(unsafe { BorrowedFd::borrow_raw(number) });
        if file.is_ok_and(|file| file == kept) {
            // SAFETY: this process's copy of a descriptor that nobody uses any more.
            drop(unsafe { OwnedFd::from_raw_fd(number) });
        }
    }
}

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
    HAS_REGISTERED.store(true, Ordering::Relaxed);
    // SAFETY: a function without preconditions, in a library that is never unloaded.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
}

/// Whether this process registers its new memory.
pub(crate) fn is_paged() -> bool {
    USERFAULTFD.number().is_some()
}

/// Whether a pager may handle memory of this process. A child that does not register its own has its parent's.
pub(crate) fn has_registered() -> bool {
    HAS_REGISTERED.load(Ordering::Relaxed)
}

/// Has faults in new memory go to the pager. After a failure the memory stays as it is: the pager looks for it later.
pub(crate) fn register(range: HostRange) {
    let Some(descriptor) = USERFAULTFD.number() else { return };
    // SAFETY: no preconditions.
    if range.len == 0 || OWNER.load(Ordering::Relaxed) != unsafe { libc::getpid() } {
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
    handshake::send_hello(&socket, hello, &[file.as_fd(), userfaultfd.as_fd()])?;
    drop(handshake::receive_welcome(&socket)?);
    socket.set_read_timeout(None)?;
    begin(Evictor { socket, area, userfaultfd, staging: staging() }).map_err(|(_, error)| error)
}

/// Starts the evictor, and registers memory from now on.
fn begin(evictor: Evictor) -> Result<(), (Evictor, io::Error)> {
    let userfaultfd = evictor.userfaultfd.as_fd();
    let descriptor = rustix::io::fcntl_dupfd_cloexec(userfaultfd, DESCRIPTOR_MIN);
    let kept = match descriptor.or_else(|_| rustix::io::fcntl_dupfd_cloexec(userfaultfd, 0)) {
        Ok(kept) => kept,
        Err(error) => return Err((evictor, error.into())),
    };
    evictor::start(evictor)?;
    // SAFETY: no preconditions.
    OWNER.store(unsafe { libc::getpid() }, Ordering::Relaxed);
    USERFAULTFD.set(kept);
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
    USERFAULTFD.close();
    CONNECTION.close();
    let (socket, area) = match greet_as_child() {
        Ok(greeted) => greeted,
        Err(error) if is_end_of_pager(&error) => abort(&error),
        Err(error) => return report(format_args!("memory of a child stays local: {error}")),
    };
    // It waits as long as for its faults, which the same pager handles.
    let welcome = loop {
        match handshake::receive_welcome(&socket) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if is_end_of_pager(&error) => abort(&error),
            welcome => break welcome,
        }
    };
    let (socket, error) = match (area, welcome) {
        (Err(error), _) => (socket, error),
        (Ok(area), Err(error)) => {
            area.set_refused();
            (socket, error)
        }
        (Ok(area), Ok(userfaultfd)) => {
            let evictor = Evictor { socket, area, userfaultfd: userfaultfd.into(), staging: staging() };
            let Err((evictor, error)) = begin(evictor) else { return };
            evictor.area.set_refused();
            (evictor.socket, error)
        }
    };
    end_with_pager(socket);
    report(format_args!("memory of a child stays local: {error}"));
}

/// Whether the pager may have ended. A child would find zeros.
fn is_end_of_pager(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionRefused | ConnectionReset | UnexpectedEof)
}

fn abort(error: &io::Error) -> ! {
    report(format_args!("a child cannot be paged: {error}"));
    std::process::abort()
}

/// Has the kernel kill this process at the end of its connection, which its pager keeps, and on which it sends no more: there is
/// no thread that would see the pager's end.
fn end_with_pager(socket: UnixStream) {
    let socket = OwnedFd::from(socket);
    let socket = rustix::io::fcntl_dupfd_cloexec(&socket, DESCRIPTOR_MIN).unwrap_or(socket);
    let number = socket.as_raw_fd();
    // SAFETY: this process's descriptor, and no memory.
    let is_set = unsafe {
        libc::fcntl(number, libc::F_SETOWN, libc::getpid()) == 0
            && libc::fcntl(number, F_SETSIG, libc::SIGKILL) == 0
            && libc::fcntl(number, libc::F_SETFL, libc::fcntl(number, libc::F_GETFL) | libc::O_ASYNC) == 0
    };
    if !is_set {
        let error = io::Error::last_os_error();
        report(format_args!("a child would find zeros after the end of its pager: {error}"));
    }
    // The pager may have ended before.
    let (mut byte, flags) = ([0_u8], rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT);
    if let Ok((_, 0)) = rustix::net::recv(&socket, &mut byte, flags) {
        abort(&io::ErrorKind::UnexpectedEof.into());
    }
    CONNECTION.set(socket);
}

/// Tells the pager which child this is. Returns the connection, and the eviction area if the child can have one.
fn greet_as_child() -> io::Result<(UnixStream, io::Result<EvictionArea>)> {
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
    if identity == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let socket = connect()?;
    let hello = Hello { identity_page, identity, may_lack_memory: MAY_LACK_MEMORY.load(Ordering::Relaxed) };
    let area = match EvictionArea::create() {
        Ok((area, file)) => {
            handshake::send_hello(&socket, hello, &[file.as_fd()])?;
            Ok(area)
        }
        Err(error) => {
            handshake::send_hello(&socket, hello, &[])?;
            Err(error)
        }
    };
    Ok((socket, area))
}
