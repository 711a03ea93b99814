//! The library's interposed C functions. The test binary is linked with them, so calls of the `libc` crate reach them
//! as in a preloaded program.

mod common;

use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr::{null, null_mut};
use std::sync::Mutex;

use common::*;

/// Signal handlers belong to the process, and masks to the thread, so tests run one at a time.
static TURN: Mutex<()> = Mutex::new(());

/// The beginning of a file.
fn read(path: &CStr) -> Option<String> {
    // SAFETY: C strings, and a buffer of the passed size.
    unsafe {
        let fd = libc::open(path.as_ptr(), libc::O_RDONLY);
        if fd < 0 {
            return None;
        }
        let mut room = [0_u8; 64];
        let length = libc::read(fd, room.as_mut_ptr().cast(), room.len());
        libc::close(fd);
        Some(String::from_utf8_lossy(&room[..usize::try_from(length).ok()?]).into_owned())
    }
}

fn names(path: &CStr) -> Vec<String> {
    let mut names = Vec::new();
    // SAFETY: a C string; each entry is read before the next call.
    unsafe {
        let directory = libc::opendir(path.as_ptr());
        if directory.is_null() {
            return names;
        }
        while let Some(entry) = libc::readdir(directory).as_ref() {
            names.push(CStr::from_ptr(entry.d_name.as_ptr()).to_string_lossy().into_owned());
        }
        libc::closedir(directory);
    }
    names.retain(|name| !name.starts_with('.'));
    names.sort();
    names
}

#[test]
fn sysfs_lists_the_device() {
    open();
    assert_eq!(names(c"/sys/class/infiniband"), ["terrace0"]);
    assert_eq!(names(c"/sys/class/infiniband/"), ["terrace0"]);
    assert_eq!(names(c"/sys/class/infiniband_verbs"), ["abi_version", "uverbs0"]);
    assert_eq!(names(c"/dev/infiniband"), ["rdma_cm", "uverbs0"]);
    assert_eq!(read(c"/sys/class/misc/rdma_cm/abi_version").as_deref(), Some("4\n"));
    // Programs look up the interface with the device's addresses here.
    assert_eq!(names(c"/sys/class/infiniband/terrace0/device/net"), ["lo"]);
    assert_eq!(
        read(c"/sys/class/infiniband/terrace0/ports/1/gid_attrs/types/0").as_deref(),
        Some("RoCE v2\n")
    );
    assert_eq!(
        read(c"/sys/class/infiniband/terrace0/ports/1/gids/0").as_deref(),
        Some("0000:0000:0000:0000:0000:ffff:7f00:0001\n")
    );
    assert_eq!(read(c"/sys/class/infiniband/mlx5_0/node_type"), None);
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::ENOENT));
    // Other paths are unchanged.
    assert!(read(c"/proc/self/stat").is_some());
    assert_eq!(read(c"/sys/class/infiniband_no"), None);
}

#[test]
fn the_device_file_is_a_character_device() {
    let mut stat: libc::stat = zero();
    // SAFETY: C strings and space for the answer.
    unsafe {
        for path in [c"/dev/infiniband/uverbs0", c"/dev/infiniband/terrace0", c"/dev/infiniband/rdma_cm"] {
            assert_eq!(libc::stat(path.as_ptr(), &raw mut stat), 0);
            assert_eq!(stat.st_mode & libc::S_IFMT, libc::S_IFCHR);
            assert_eq!(libc::access(path.as_ptr(), libc::R_OK | libc::W_OK), 0);
            let fd = libc::open(path.as_ptr(), libc::O_RDWR);
            assert!(fd >= 0);
            libc::close(fd);
        }
        assert_eq!(libc::stat(c"/dev/infiniband/issm0".as_ptr(), &raw mut stat), -1);
        assert_eq!(errno(), libc::ENOENT);
    }
}

#[test]
fn real_paths_are_those_of_sysfs() {
    open();
    // SAFETY: a C string; the answer comes from malloc.
    unsafe {
        let found = libc::realpath(c"/sys/class/infiniband/terrace0".as_ptr(), null_mut());
        assert!(!found.is_null());
        assert_eq!(CStr::from_ptr(found), c"/sys/devices/virtual/infiniband/terrace0");
        // The resolved path can also be opened.
        let file = [CStr::from_ptr(found).to_bytes(), b"/node_type"].concat();
        libc::free(found.cast());
        assert_eq!(read(&CString::new(file).unwrap()).as_deref(), Some("1: CA\n"));
        assert!(libc::realpath(c"/no/such/file".as_ptr(), null_mut()).is_null());
    }
}

extern "C" fn handler(_: c_int) {}

#[test]
fn sigaction_returns_only_the_programs_handlers() {
    let _turn = TURN.lock().unwrap();
    open();
    let address = handler as *const () as usize;
    // SAFETY: a handler that does nothing; the previous one is restored.
    unsafe {
        let mut before: libc::sigaction = zero();
        assert_eq!(libc::sigaction(libc::SIGSEGV, null(), &raw mut before), 0);
        let first = libc::signal(libc::SIGSEGV, address);
        assert_eq!(first, before.sa_sigaction);
        let mut now: libc::sigaction = zero();
        assert_eq!(libc::sigaction(libc::SIGSEGV, &raw const before, &raw mut now), 0);
        assert_eq!(now.sa_sigaction, address);
        assert_eq!((libc::signal(libc::SIGBUS, libc::SIG_ERR), errno()), (libc::SIG_ERR, libc::EINVAL));
        // Actions for other signals are the kernel's.
        let other = libc::signal(libc::SIGUSR1, address);
        assert_eq!(libc::signal(libc::SIGUSR1, other), address);
    }
}

#[test]
fn faults_cannot_be_blocked() {
    let _turn = TURN.lock().unwrap();
    let mut all: libc::sigset_t = zero();
    let (mut before, mut now) = (all, all);
    // SAFETY: signal sets of ours; the mask is restored.
    unsafe {
        libc::sigfillset(&raw mut all);
        assert_eq!(libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, &raw mut before), 0);
        assert_eq!(libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, &raw mut now), 0);
        assert_eq!(libc::sigismember(&raw const now, libc::SIGUSR2), 1);
        assert_eq!(libc::sigismember(&raw const now, libc::SIGSEGV), 0);
        assert_eq!(libc::sigismember(&raw const now, libc::SIGBUS), 0);
    }
}

unsafe extern "C" {
    fn ibv_read_sysfs_file(dir: *const c_char, file: *const c_char, buf: *mut c_char, size: usize) -> c_int;
}

#[test]
fn libraries_read_sysfs_by_this_library() {
    open();
    let mut room = [0_u8; 16];
    // SAFETY: C strings, and a buffer of the passed size.
    let length = unsafe {
        let directory = c"/sys/class/infiniband_verbs/uverbs0";
        ibv_read_sysfs_file(directory.as_ptr(), c"ibdev".as_ptr(), room.as_mut_ptr().cast(), room.len())
    };
    assert_eq!((length, &room[..9]), (8, b"terrace0\0".as_slice()));
}
