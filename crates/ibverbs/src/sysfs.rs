//! Access to sysfs on behalf of librdmacm.

use std::ffi::{CStr, CString, OsStr, c_char, c_int};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::errno::{EINVAL, Errno, Result};
use crate::shim::redirect::redirected;

/// The path of sysfs.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_get_sysfs_path() -> *const c_char {
    c"/sys".as_ptr()
}

/// Reads a file's first line into a buffer: its length without the newline, or -1 and `errno`.
///
/// # Safety
/// `directory` and `name` are null or C strings, `answer` null or `size` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_read_sysfs_file(
    directory: *const c_char,
    name: *const c_char,
    answer: *mut c_char,
    size: usize,
) -> c_int {
    if directory.is_null() || name.is_null() || answer.is_null() || size == 0 {
        EINVAL.set();
        return -1;
    }
    // SAFETY: the caller's.
    let (directory, name) = unsafe { (CStr::from_ptr(directory), CStr::from_ptr(name)) };
    // SAFETY: the caller's.
    let answer = unsafe { std::slice::from_raw_parts_mut(answer.cast::<u8>(), size) };
    match read_line(directory, name, answer) {
        Ok(length) => length as c_int,
        Err(errno) => {
            errno.set();
            -1
        }
    }
}

fn read_line(directory: &CStr, name: &CStr, answer: &mut [u8]) -> Result<usize> {
    let path = [directory.to_bytes(), b"/", name.to_bytes()].concat();
    let path = CString::new(path).map_err(|_| EINVAL)?;
    // SAFETY: a C string of ours, which lives until the end of the function.
    let actual = unsafe { redirected(path.as_ptr()) };
    // SAFETY: either that string or another one, which `actual` keeps.
    let actual = unsafe { CStr::from_ptr(actual.as_ptr()) };
    let failed = |error: std::io::Error| Errno(error.raw_os_error().unwrap_or(libc::EIO));
    let mut file = File::open(Path::new(OsStr::from_bytes(actual.to_bytes()))).map_err(failed)?;
    let length = file.read(answer).map_err(failed)?;
    if length == 0 {
        return Ok(0);
    }
    let line = if answer[length - 1] == b'\n' { length - 1 } else { length };
    // Without space for the terminator the result is EINVAL instead of a truncated line.
    *answer.get_mut(line).ok_or(EINVAL)? = 0;
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_returned_without_newline_and_must_fit() {
        let directory = std::env::temp_dir();
        let name = format!("terrace-sysfs-line-{}", std::process::id());
        std::fs::write(directory.join(&name), "4\n").expect("written");
        let (directory_c, name_c) = (
            CString::new(directory.as_os_str().as_bytes()).expect("path"),
            CString::new(name.as_str()).expect("name"),
        );
        let mut room = [0xff; 8];
        assert_eq!(read_line(&directory_c, &name_c, &mut room), Ok(1));
        assert_eq!(room[..2], *b"4\0");
        std::fs::write(directory.join(&name), "12345678").expect("written");
        assert_eq!(read_line(&directory_c, &name_c, &mut room), Err(EINVAL));
        std::fs::remove_file(directory.join(name)).expect("removed");
        assert!(read_line(&directory_c, &name_c, &mut room).is_err());
    }
}
