//! The list of devices. It has one device, whose C structure lives as long as the process.

use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int};
use std::ptr::null_mut;
use std::sync::OnceLock;

use terrace_nic::DeviceName;

use crate::abi::{IBV_NODE_CA, IBV_TRANSPORT_IB, ibv_device};
use crate::errno::{ENOMEM, Result, pointer};
use crate::identity;
use crate::object;

/// Name of its character device under `/dev/infiniband`.
pub const UVERBS_NAME: &str = "uverbs0";

/// The device's C structure. mlx5dv and efadv treat any device as the beginning of a provider's structure and read a
/// pointer to the provider behind it. A null pointer means that the device belongs to another provider.
#[repr(C)]
struct Listed {
    device: UnsafeCell<ibv_device>,
    provider_private: [u64; 32],
    name: DeviceName,
}

// SAFETY: the structure is never written after its initialization; programs get a pointer and own no part of it.
unsafe impl Sync for Listed {}

// SAFETY: as above; null pointers and plain data.
unsafe impl Send for Listed {}

/// Set when the library is loaded, so that a later reader takes no lock.
static DEVICE: OnceLock<Listed> = OnceLock::new();

fn listed() -> &'static Listed {
    DEVICE.get_or_init(|| {
        // `ibv_open_device` reports an invalid name (`identity`).
        let name = DeviceName::from_env().unwrap_or_default();
        Listed { device: UnsafeCell::new(describe(&name)), provider_private: [0; 32], name }
    })
}

/// Describes the device. The library's constructor calls this before the program starts.
pub fn initialize() {
    listed();
}

/// Name of the device, as `ibv_devices` prints it.
pub fn device_name() -> &'static str {
    listed().name.as_str()
}

/// Copies ASCII texts into a C array and fills the rest with zeros.
fn text<const N: usize>(parts: [&str; 2]) -> [c_char; N] {
    let mut array = [0; N];
    for (to, from) in array.iter_mut().zip(parts.into_iter().flat_map(str::bytes)) {
        *to = from as c_char;
    }
    array
}

fn describe(name: &DeviceName) -> ibv_device {
    // SAFETY: integers, arrays of them and optional functions.
    let mut device: ibv_device = unsafe { object::zeroed() };
    device.node_type = IBV_NODE_CA;
    device.transport_type = IBV_TRANSPORT_IB;
    device.name = text([name.as_str(), ""]);
    device.dev_name = text([UVERBS_NAME, ""]);
    device.dev_path = text(["/sys/class/infiniband_verbs/", UVERBS_NAME]);
    device.ibdev_path = text(["/sys/class/infiniband/", name.as_str()]);
    device
}

/// The device's C structure.
pub fn device() -> *mut ibv_device {
    listed().device.get()
}

/// Whether a pointer is the address of this library's device.
pub fn is_ours(candidate: *const ibv_device) -> bool {
    std::ptr::eq(candidate, device())
}

/// `ibv_get_device_list(3)`.
///
/// # Safety
/// `count` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let list = allocate_list();
    if !count.is_null() {
        // SAFETY: the caller's.
        unsafe { *count = c_int::from(list.is_ok()) };
    }
    pointer(list)
}

/// The list comes from `calloc`: some programs pass it to `free`.
fn allocate_list() -> Result<*mut *mut ibv_device> {
    // SAFETY: no preconditions.
    let list = unsafe { libc::calloc(2, size_of::<*mut ibv_device>()) }.cast::<*mut ibv_device>();
    if list.is_null() {
        return Err(ENOMEM);
    }
    // SAFETY: space for two pointers; the second is null and ends the list.
    unsafe { *list = device() };
    Ok(list)
}

/// `ibv_free_device_list(3)`. The device remains valid.
///
/// # Safety
/// `list` is null or came from `ibv_get_device_list`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    // SAFETY: from `calloc`; null is allowed.
    unsafe { libc::free(list.cast()) };
}

/// `ibv_get_device_name(3)`: null for a null device.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    if !is_ours(device) {
        return null_mut();
    }
    // SAFETY: the structure above.
    unsafe { (&raw const (*device).name).cast() }
}

/// `ibv_get_device_index(3)`: -1, because the kernel has no such device, and index 0 is valid.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_get_device_index(device: *mut ibv_device) -> c_int {
    if is_ours(device) { 0 } else { -1 }
}

/// `ibv_get_device_guid(3)`: in network byte order; 0 if the device could not be opened.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_get_device_guid(device: *mut ibv_device) -> u64 {
    if !is_ours(device) {
        return 0;
    }
    identity::get().map_or(0, |identity| identity.node_guid.to_be())
}
