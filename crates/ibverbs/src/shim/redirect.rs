//! Paths that are redirected to the tree.

use std::ffi::{CStr, CString, c_char};
use std::os::unix::ffi::OsStrExt;

use super::tree;
use crate::device_list::{UVERBS_NAME, device_name};
use crate::rdma_cm;

/// The target of `/dev/infiniband/uverbs0`: a character device that programs can open. They check nothing else.
const CHARACTER_DEVICE: &CStr = c"/dev/null";

/// Directories that are redirected as a whole. A path is inside if it ends there or continues with a slash.
const DIRECTORIES: [&[u8]; 6] = [
    b"/sys/class/infiniband",
    b"/sys/class/infiniband_verbs",
    b"/sys/class/misc/rdma_cm",
    b"/sys/devices/virtual/infiniband",
    b"/sys/devices/virtual/infiniband_verbs",
    b"/dev/infiniband",
];

/// A path for the C library.
pub enum Redirected {
    /// The program's path.
    Same(*const c_char),
    /// A path in the tree.
    Moved(CString),
}

impl Redirected {
    /// The path for the C library.
    pub fn as_ptr(&self) -> *const c_char {
        match self {
            Redirected::Same(path) => *path,
            Redirected::Moved(path) => path.as_ptr(),
        }
    }
}

/// The path for the C library in place of a program's.
///
/// # Safety
/// `path` is null or a C string, and remains one while the result is used.
pub unsafe fn redirected(path: *const c_char) -> Redirected {
    if path.is_null() {
        return Redirected::Same(path);
    }
    // SAFETY: the caller's.
    match ours(unsafe { CStr::from_ptr(path) }) {
        Some(moved) => Redirected::Moved(moved),
        None => Redirected::Same(path),
    }
}

fn ours(path: &CStr) -> Option<CString> {
    let bytes = path.to_bytes();
    // Almost every path returns here.
    if !bytes.starts_with(b"/sys/") && !bytes.starts_with(b"/dev/i") {
        return None;
    }
    let inside = |directory: &&[u8]| {
        bytes.strip_prefix(*directory).is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
    };
    if !DIRECTORIES.iter().any(inside) {
        return None;
    }
    if is_device(bytes) {
        return Some(CHARACTER_DEVICE.to_owned());
    }
    let mut moved = tree::root()?.as_os_str().as_bytes().to_vec();
    moved.extend_from_slice(bytes);
    CString::new(moved).ok()
}

/// The device file, by its own name or the device's.
fn is_device(path: &[u8]) -> bool {
    path.strip_prefix(b"/dev/infiniband/")
        .is_some_and(|name| name == UVERBS_NAME.as_bytes() || name == device_name().as_bytes())
        || rdma_cm::is_device(path)
}

/// The program's view of a path that the C library returned: without the tree's root.
pub fn without_root(path: &CStr) -> Option<&CStr> {
    let root = tree::existing_root()?;
    let rest = path.to_bytes_with_nul().strip_prefix(root.as_os_str().as_bytes())?;
    if rest[0] == b'/' { CStr::from_bytes_with_nul(rest).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_paths_are_not_redirected() {
        for path in
            [c"/etc/passwd", c"/sys/class/net", c"/sys/class/infiniband_mad", c"/dev/infinibandit", c""]
        {
            assert!(ours(path).is_none(), "{path:?}");
        }
    }

    #[test]
    fn the_device_file_is_a_character_device() {
        assert_eq!(ours(c"/dev/infiniband/uverbs0").as_deref(), Some(CHARACTER_DEVICE));
        assert_eq!(ours(c"/dev/infiniband/rdma_cm").as_deref(), Some(CHARACTER_DEVICE));
        assert_eq!(ours(c"/dev/infiniband/terrace0").as_deref(), Some(CHARACTER_DEVICE));
    }
}
