//! A page whose arrival the test decides.

use std::sync::atomic::{AtomicBool, Ordering};

use super::{Mapping, PAGE};

/// A userfaultfd page: an access to it blocks until `serve`.
pub struct SlowPage {
    pub memory: Mapping,
    fd: i32,
    pub served: AtomicBool,
}

/// The kernel's structures for userfaultfd, which the libc crate lacks.
mod userfault {
    #[repr(C)]
    pub struct Api {
        pub api: u64,
        pub features: u64,
        pub ioctls: u64,
    }
    #[repr(C)]
    pub struct Register {
        pub start: u64,
        pub len: u64,
        pub mode: u64,
        pub ioctls: u64,
    }
    #[repr(C)]
    pub struct ZeroPage {
        pub start: u64,
        pub len: u64,
        pub mode: u64,
        pub done: i64,
    }
    pub const API: u64 = 0xc018_aa3f;
    pub const REGISTER: u64 = 0xc020_aa00;
    pub const ZEROPAGE: u64 = 0xc020_aa04;
}

impl SlowPage {
    /// `None` where userfaultfd is not permitted.
    pub fn new() -> Option<SlowPage> {
        let memory = Mapping::anonymous(PAGE);
        let mut api = userfault::Api { api: 0xaa, features: 0, ioctls: 0 };
        let mut range = userfault::Register { start: memory.addr, len: PAGE as u64, mode: 1, ioctls: 0 };
        // SAFETY: the structures are the kernel's, and live across the calls.
        unsafe {
            let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) as i32;
            if fd < 0
                || libc::ioctl(fd, userfault::API as _, &mut api) != 0
                || libc::ioctl(fd, userfault::REGISTER as _, &mut range) != 0
            {
                return None;
            }
            Some(SlowPage { memory, fd, served: AtomicBool::new(false) })
        }
    }

    /// Blocks until a thread faults on the page.
    pub fn wait_for_fault(&self) {
        let mut event = [0u8; 32];
        // SAFETY: an event has 32 bytes.
        assert_eq!(unsafe { libc::read(self.fd, event.as_mut_ptr().cast(), event.len()) }, 32);
    }

    /// Resolves the fault with zeros.
    pub fn serve(&self) {
        self.served.store(true, Ordering::SeqCst);
        let mut zero = userfault::ZeroPage { start: self.memory.addr, len: PAGE as u64, mode: 0, done: 0 };
        // SAFETY: the structure is the kernel's, and lives across the call.
        assert_eq!(unsafe { libc::ioctl(self.fd, userfault::ZEROPAGE as _, &mut zero) }, 0);
    }
}

impl Drop for SlowPage {
    fn drop(&mut self) {
        // SAFETY: the descriptor is ours.
        unsafe { libc::close(self.fd) };
    }
}
