//! The thread that moves pages away when the pager asks for it.
//!
//! It touches its own stack, the eviction area and the staging pages alone, none of which is paged: while pages move, the
//! pager answers no faults of this process. Its system calls are made directly: the C library's functions may touch variables
//! of the library, whose pages can be in one mapping with memory that is paged. Its table of descriptors is its own, so programs that close all descriptors
//! do not close its connection; and its connection ends with the process, or with `execve(2)`.

use std::ffi::c_void;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicI32, Ordering};

use terrace_hostmem::{HostRange, PAGE_BYTES};
use terrace_vm::userfault::{Userfaultfd, modes};
use terrace_vm::{EvictionArea, Task};

use crate::{end, join};

/// What the thread works with.
pub(crate) struct Evictor {
    pub(crate) socket: UnixStream,
    pub(crate) area: EvictionArea,
    pub(crate) userfaultfd: Userfaultfd,
    /// Pages move here first. Registered, and empty between requests.
    pub(crate) staging: HostRange,
}

/// `madvise(2)`: faults a range in for stores (Linux 5.14).
const MADV_POPULATE_WRITE: libc::c_int = 23;

/// Whether the thread has a table of descriptors of its own: one of the numbers below, or the system's error.
static STATE: AtomicI32 = AtomicI32::new(STARTING);
const STARTING: i32 = 0;
const RUNNING: i32 = -1;

/// Starts the thread. Its descriptors are closed in the process's table.
///
/// # Errors
/// The system's, with what the thread would have worked with.
pub(crate) fn start(evictor: Evictor) -> Result<(), (Evictor, io::Error)> {
    STATE.store(STARTING, Ordering::Relaxed);
    let evictor = Box::into_raw(Box::new(evictor));
    // SAFETY: the attributes and the set are initialized before use; the thread owns what it gets.
    let result = unsafe {
        let mut attributes = MaybeUninit::uninit();
        libc::pthread_attr_init(attributes.as_mut_ptr());
        let stack = join::stack();
        libc::pthread_attr_setstack(attributes.as_mut_ptr(), stack.addr as *mut c_void, stack.len as usize);
        libc::pthread_attr_setdetachstate(attributes.as_mut_ptr(), libc::PTHREAD_CREATE_DETACHED);
        // The thread inherits that no signal comes to it.
        let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        let mut thread = MaybeUninit::uninit();
        let result = libc::pthread_create(thread.as_mut_ptr(), attributes.as_ptr(), run, evictor.cast());
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut());
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
        result
    };
    if result != 0 {
        // SAFETY: no thread has it.
        let evictor = unsafe { Box::from_raw(evictor) };
        return Err((*evictor, io::Error::from_raw_os_error(result)));
    }
    loop {
        match STATE.load(Ordering::Acquire) {
            STARTING => std::thread::yield_now(),
            RUNNING => break,
            number => {
                let error = io::Error::from_raw_os_error(number);
                let error = io::Error::new(error.kind(), format!("unshare(CLONE_FILES): {error}"));
                // SAFETY: the thread has not used it, and ends.
                let evictor = unsafe { Box::from_raw(evictor) };
                return Err((*evictor, error));
            }
        }
    }
    // SAFETY: the thread uses its own table of descriptors, and this process's copies are closed once.
    unsafe {
        libc::close((*evictor).socket.as_raw_fd());
        libc::close((*evictor).userfaultfd.as_fd().as_raw_fd());
    }
    Ok(())
}

extern "C" fn run(evictor: *mut c_void) -> *mut c_void {
    // SAFETY: no preconditions.
    if unsafe { libc::unshare(libc::CLONE_FILES) } != 0 {
        // A seccomp filter, as containers have. The table is still that of the program: it keeps its descriptors.
        let number = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EPERM);
        STATE.store(number, Ordering::Release);
        return std::ptr::null_mut();
    }
    // The object moves to this thread's stack: the heap may be paged.
    // SAFETY: given by `start`, which only reads descriptors of it afterwards. The box stays allocated.
    let mut evictor = unsafe { std::ptr::read(evictor.cast::<Evictor>()) };
    // SAFETY: no preconditions.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"terrace-evictor".as_ptr()) };
    close_others(&evictor);
    STATE.store(RUNNING, Ordering::Release);
    evictor.area.set_ready();
    loop {
        if !evictor.wait() {
            end::end_process();
        }
        while let Some((task, count)) = evictor.area.take() {
            match task {
                Some(Task::Evict) => evictor.evict(count),
                Some(Task::Unshare) => evictor.unshare(count),
                None => {}
            }
            evictor.area.respond();
            evictor.ring();
            evictor.empty_staging();
        }
    }
}

/// Closes all descriptors of this thread's table but its own and the standard ones' last: other threads' files are theirs.
fn close_others(evictor: &Evictor) {
    let mut kept = [evictor.socket.as_raw_fd() as u32, evictor.userfaultfd.as_fd().as_raw_fd() as u32];
    kept.sort_unstable();
    let close = |first: u32, last: u32| {
        if first <= last {
            // SAFETY: nobody uses these descriptors of this thread's own table.
            unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
        }
    };
    if kept[0] > 0 {
        close(0, kept[0] - 1);
    }
    close(kept[0] + 1, kept[1].saturating_sub(1));
    close(kept[1] + 1, u32::MAX);
}

impl Evictor {
    /// Waits for a byte. Returns false at the end of the connection.
    fn wait(&mut self) -> bool {
        let mut bytes = [0u8; 64];
        loop {
            let socket = self.socket.as_raw_fd();
            // SAFETY: reads at most as many bytes as there are.
            let len = unsafe { libc::syscall(libc::SYS_read, socket, bytes.as_mut_ptr(), bytes.len()) };
            if len > 0 {
                return true;
            }
            if len == 0 || io::Error::last_os_error().raw_os_error() == Some(libc::ECONNRESET) {
                return false;
            }
            // Nothing else is the pager's end: an interruption, or a lack of memory.
            // SAFETY: no preconditions.
            unsafe { libc::syscall(libc::SYS_sched_yield) };
        }
    }

    fn ring(&self) {
        let (byte, length, address) = (c"d".as_ptr(), 1usize, std::ptr::null::<c_void>());
        // SAFETY: one readable byte, and no address. If the pager has ended, the next wait says so.
        unsafe {
            libc::syscall(
                libc::SYS_sendto,
                self.socket.as_raw_fd(),
                byte,
                length,
                libc::MSG_NOSIGNAL,
                address,
                0usize,
            )
        };
    }

    /// Moves pages away, and copies those that are wanted to the area.
    fn evict(&self, count: usize) {
        let mut index = 0;
        while index < count {
            let run = self.count_run(index, count);
            let moved = self.move_run(index, run);
            for moved in index..index + moved {
                self.area.set_error(moved, 0);
                if self.area.wanted(moved).1 {
                    // SAFETY: a page of the staging range, where nobody else stores.
                    unsafe { self.area.set_page(moved, self.staging_page(moved)) };
                }
            }
            index += moved;
            if moved < run {
                index += self.skip(index);
            }
        }
    }

    /// Pages that are adjacent in the request and in memory.
    fn count_run(&self, index: usize, count: usize) -> usize {
        let first = self.area.wanted(index).0;
        let is_next = |&next: &usize| self.area.wanted(next).0 == first + (next - index) as u64 * PAGE_BYTES;
        (index..count).take_while(is_next).count().max(1)
    }

    /// Moves adjacent pages; returns how many.
    fn move_run(&self, index: usize, run: usize) -> usize {
        let from = HostRange { addr: self.area.wanted(index).0, len: run as u64 * PAGE_BYTES };
        // The kernel moves pages of memory that is not registered, too, and threads would find zeros in their place. It protects
        // registered memory alone, and has no entry for other memory.
        let is_registered = self.userfaultfd.protect(from, true);
        // SAFETY: threads that touch a page there wait, because it is registered; and the kernel moves nothing while it has
        // changes to report.
        let moved = is_registered
            .and_then(|()| unsafe { self.userfaultfd.move_pages(from, self.staging_page(index)) });
        match moved {
            Ok(bytes) => (bytes / PAGE_BYTES) as usize,
            Err(error) => {
                self.area.set_error(index, error.raw_os_error().unwrap_or(libc::EINVAL));
                0
            }
        }
    }

    /// Tries the page alone at which a run has stopped, for its error. Returns the pages that are done.
    fn skip(&self, index: usize) -> usize {
        match self.move_run(index, 1) {
            0 => {
                // It stays. What was stored to since it came is not to be protected.
                let page = HostRange { addr: self.area.wanted(index).0, len: PAGE_BYTES };
                if self.area.wanted(index).1 {
                    // An error means that a fault follows, or that the page is gone.
                    let _ = self.userfaultfd.protect(page, false);
                }
                1
            }
            // It could be moved now: the loop goes on with the page, which is moved already, as with one that was.
            _ => {
                self.area.set_error(index, 0);
                if self.area.wanted(index).1 {
                    // SAFETY: as in `evict`.
                    unsafe { self.area.set_page(index, self.staging_page(index)) };
                }
                1
            }
        }
    }

    fn staging_page(&self, index: usize) -> u64 {
        self.staging.addr + index as u64 * PAGE_BYTES
    }

    /// Frees the pages that have moved. A registered range would report that, and this thread would wait for the pager.
    fn empty_staging(&self) {
        let emptied = self.userfaultfd.unregister(self.staging).and_then(|()| {
            // SAFETY: pages of this thread alone.
            unsafe {
                libc::syscall(libc::SYS_madvise, self.staging.addr, self.staging.len, libc::MADV_DONTNEED)
            };
            self.userfaultfd.register(self.staging, modes::MISSING)
        });
        // The kernel has no memory: the next request moves nothing, and the pager asks again.
        let _ = emptied;
    }

    /// Breaks the sharing of pages with other processes.
    fn unshare(&self, count: usize) {
        for index in 0..count {
            let page = self.area.wanted(index).0;
            // SAFETY: changes no byte. Where nothing is mapped, it fails.
            unsafe { libc::syscall(libc::SYS_madvise, page, PAGE_BYTES, MADV_POPULATE_WRITE) };
        }
    }
}
