//! Attributes of the device, its port and its tables.

use std::ffi::{c_int, c_uint};
use std::ptr::copy_nonoverlapping;

use terrace_fabric::Gid;
use terrace_nic::Device;

use crate::abi::newer::{IBV_ODP_SUPPORT_ATOMIC_WRITE, IBV_ODP_SUPPORT_FLUSH};
use crate::abi::*;
use crate::context::Context;
use crate::errno::{EINVAL, EOPNOTSUPP, Errno, Result, minus_one, status};
use crate::object;
use crate::{ah, dm};

/// The one port.
pub const PORT: u32 = 1;

/// Entries of the GID table. Most are empty, in reserve for later addresses as on other devices.
pub const GID_ENTRIES: usize = 16;

/// The default partition, full member; the one entry of the P_Key table.
pub const PKEY: u16 = 0xffff;

/// Vendor: a locally administered OUI ("TR" behind the local bit), so that no program mistakes the device for other
/// hardware.
pub const VENDOR_ID: u32 = 0x02_5452;

/// Version of the device's firmware, which is this library's version.
pub const FIRMWARE: &str = env!("CARGO_PKG_VERSION");

/// 100 Gb/s over four lanes (EDR), a speed that programs may request. The real speed is that of the network, which is
/// unknown.
const WIDTH_4X: u8 = 2;
const SPEED_EDR: u8 = 32;
/// The speed in units of 100 Mb/s.
const SPEED_100_MBPS: u64 = 1000;

/// Physical state `LinkUp`.
pub const LINK_UP: u8 = 5;

/// `IBV_QPF_GRH_REQUIRED`: addresses of RoCE are global.
const GRH_REQUIRED: u8 = 1;

/// The operations that support on-demand paging: all, because all memory is paged on demand.
const ODP_RC: u32 = IBV_ODP_SUPPORT_SEND
    | IBV_ODP_SUPPORT_RECV
    | IBV_ODP_SUPPORT_WRITE
    | IBV_ODP_SUPPORT_READ
    | IBV_ODP_SUPPORT_ATOMIC
    | IBV_ODP_SUPPORT_SRQ_RECV
    | IBV_ODP_SUPPORT_FLUSH
    | IBV_ODP_SUPPORT_ATOMIC_WRITE;
/// The operations of XRC, which exclude those of annex A19.
const ODP_XRC: u32 = ODP_RC & !(IBV_ODP_SUPPORT_FLUSH | IBV_ODP_SUPPORT_ATOMIC_WRITE);
const ODP_UC: u32 = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_WRITE;
const ODP_UD: u32 = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_SRQ_RECV;

/// What the device can do.
pub const CAPABILITIES: c_uint = IBV_DEVICE_CURR_QP_STATE_MOD
    | IBV_DEVICE_SYS_IMAGE_GUID
    | IBV_DEVICE_RC_RNR_NAK_GEN
    | IBV_DEVICE_SRQ_RESIZE
    | IBV_DEVICE_N_NOTIFY_CQ
    | IBV_DEVICE_MEM_WINDOW
    | IBV_DEVICE_MEM_MGT_EXTENSIONS
    | IBV_DEVICE_MEM_WINDOW_TYPE_2B
    | IBV_DEVICE_XRC;

/// Code of the ACK delay: 16.8 ms, because the other process may have to be scheduled first.
const ACK_DELAY: u8 = 12;

/// The clock of completion times counts nanoseconds.
const CLOCK_KHZ: u64 = 1_000_000;

fn device_attributes(device: &Device) -> ibv_device_attr {
    let limits = device.limits();
    let guid = device.node_guid().to_be();
    let rd_atomic = c_int::from(limits.max_rd_atomic);
    // SAFETY: integers only.
    let mut attr: ibv_device_attr = unsafe { object::zeroed() };
    for (to, from) in attr.fw_ver.iter_mut().zip(FIRMWARE.bytes()) {
        *to = from as _;
    }
    (attr.node_guid, attr.sys_image_guid) = (guid, guid);
    attr.max_mr_size = limits.max_mr_size;
    // The page sizes are every power of two from 4 KiB.
    attr.page_size_cap = !0xfff;
    attr.vendor_id = VENDOR_ID;
    attr.hw_ver = 1;
    attr.device_cap_flags = CAPABILITIES;
    (attr.max_qp, attr.max_qp_wr) = (limits.max_qp as c_int, limits.max_qp_wr as c_int);
    (attr.max_sge, attr.max_sge_rd) = (limits.max_sge as c_int, limits.max_sge as c_int);
    (attr.max_cq, attr.max_cqe) = (limits.max_cq as c_int, limits.max_cqe as c_int);
    (attr.max_mr, attr.max_mw, attr.max_pd) =
        (limits.max_mr as c_int, limits.max_mw as c_int, limits.max_pd as c_int);
    (attr.max_qp_rd_atom, attr.max_qp_init_rd_atom) = (rd_atomic, rd_atomic);
    attr.max_res_rd_atom = rd_atomic.saturating_mul(attr.max_qp);
    // The processor's instructions execute the atomics, so they are atomic with the program's, which is GLOB. But
    // programs compare with HCA (UCX enables atomics for no other value).
    attr.atomic_cap = IBV_ATOMIC_HCA;
    attr.max_ah = limits.max_ah as c_int;
    (attr.max_mcast_grp, attr.max_mcast_qp_attach) =
        (limits.max_mcast_groups as c_int, limits.max_mcast_qp_attach as c_int);
    attr.max_total_mcast_qp_attach = attr.max_mcast_grp * attr.max_mcast_qp_attach;
    (attr.max_srq, attr.max_srq_wr, attr.max_srq_sge) =
        (limits.max_srq as c_int, limits.max_srq_wr as c_int, limits.max_srq_sge as c_int);
    attr.max_pkeys = 1;
    attr.local_ca_ack_delay = ACK_DELAY;
    attr.phys_port_cnt = PORT as u8;
    attr
}

/// `ibv_query_device(3)`.
///
/// # Safety
/// `context` is null or open, `attr` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    // SAFETY: the caller's.
    status(unsafe {
        Context::borrow(context).and_then(|context| object::write(attr, device_attributes(context.device())))
    })
}

/// Copies the part of an answer that the caller's header defines, and zeroes the fields that a newer header adds.
///
/// # Safety
/// `to` is null or has `size` writable bytes.
unsafe fn write_sized<T>(to: *mut T, size: usize, answer: &T) -> Result<()> {
    if to.is_null() {
        return Err(EINVAL);
    }
    let common = size.min(size_of::<T>());
    // SAFETY: the caller's; the rest of `size` lies within it too.
    unsafe {
        copy_nonoverlapping(std::ptr::from_ref(answer).cast::<u8>(), to.cast::<u8>(), common);
        to.cast::<u8>().add(common).write_bytes(0, size - common);
    }
    Ok(())
}

/// `ibv_query_device_ex(3)`.
///
/// # Safety
/// `context` is null or open, `input` null or attributes, `attr` null or `size` writable bytes.
pub unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    let query = || {
        // SAFETY: the caller's.
        let (context, input) = unsafe { (Context::borrow(context)?, input.as_ref()) };
        if input.is_some_and(|input| input.comp_mask != 0) || size < size_of::<ibv_device_attr>() {
            return Err(EINVAL);
        }
        // SAFETY: integers only.
        let mut answer: ibv_device_attr_ex = unsafe { object::zeroed() };
        answer.orig_attr = device_attributes(context.device());
        answer.odp_caps.general_caps = u64::from(IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT);
        answer.odp_caps.per_transport_caps.rc_odp_caps = ODP_RC;
        answer.odp_caps.per_transport_caps.uc_odp_caps = ODP_UC;
        answer.odp_caps.per_transport_caps.ud_odp_caps = ODP_UD;
        answer.completion_timestamp_mask = u64::MAX;
        answer.hca_core_clock = CLOCK_KHZ;
        answer.device_cap_flags_ex = u64::from(CAPABILITIES);
        answer.max_dm_size = dm::MAX_BYTES;
        answer.xrc_odp_caps = ODP_XRC;
        answer.phys_port_cnt_ex = PORT;
        // SAFETY: the caller's.
        unsafe { write_sized(attr, size, &answer) }
    };
    status(query())
}

/// `ibv_query_rt_values_ex(3)`: the clock of completion times, in the nanoseconds' field.
///
/// # Safety
/// `context` is null or open, `values` null or readable and writable.
pub unsafe extern "C" fn query_rt_values(context: *mut ibv_context, values: *mut ibv_values_ex) -> c_int {
    let query = || {
        // SAFETY: the caller's.
        let (context, wanted) = unsafe { (Context::borrow(context)?, object::read(values)?.comp_mask) };
        let comp_mask = wanted & IBV_VALUES_MASK_RAW_CLOCK;
        let tv_nsec = context.device().now().0 as libc::c_long;
        let raw_clock = libc::timespec { tv_sec: 0, tv_nsec };
        // SAFETY: the caller's.
        unsafe { object::write(values, ibv_values_ex { comp_mask, raw_clock }) }
    };
    status(query())
}

/// The `ibv_mtu` of a size in bytes.
pub fn mtu_code(bytes: u32) -> ibv_mtu {
    match bytes {
        0..512 => IBV_MTU_256,
        512..1024 => IBV_MTU_512,
        1024..2048 => IBV_MTU_1024,
        2048..4096 => IBV_MTU_2048,
        4096.. => IBV_MTU_4096,
    }
}

fn port_attributes(device: &Device) -> ibv_port_attr {
    let port = device.port_attributes();
    // SAFETY: integers only.
    let mut attr: ibv_port_attr = unsafe { object::zeroed() };
    attr.state = if port.active { IBV_PORT_ACTIVE } else { IBV_PORT_DOWN };
    (attr.max_mtu, attr.active_mtu) = (mtu_code(port.max_mtu), mtu_code(port.active_mtu));
    attr.gid_tbl_len = port.gid_count.max(GID_ENTRIES) as c_int;
    attr.port_cap_flags = IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS;
    attr.max_msg_sz = port.max_message_bytes;
    attr.pkey_tbl_len = port.pkey_count;
    attr.lid = ah::lid(device.gids());
    attr.max_vl_num = 1;
    (attr.active_width, attr.active_speed) = (WIDTH_4X, SPEED_EDR);
    attr.phys_state = LINK_UP;
    attr.link_layer = IBV_LINK_LAYER_ETHERNET as u8;
    attr.flags = GRH_REQUIRED;
    attr
}

/// The open device, for a verb that takes a port.
///
/// # Safety
/// `context` is null or open.
unsafe fn device_of_port<'a>(context: *mut ibv_context, port: u32) -> Result<&'a Device> {
    // SAFETY: the caller's.
    let context = unsafe { Context::borrow(context)? };
    if port == PORT { Ok(context.device()) } else { Err(EINVAL) }
}

/// `ibv_query_port(3)`, as the inline function of any header calls it.
///
/// # Safety
/// `context` is null or open, `attr` null or `size` writable bytes.
pub unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    size: usize,
) -> c_int {
    // SAFETY: the caller's.
    status(unsafe {
        device_of_port(context, port.into())
            .and_then(|device| write_sized(attr, size, &port_attributes(device)))
    })
}

/// The symbol for programs whose header is older: the structure then ended before `port_cap_flags2`.
///
/// # Safety
/// `context` is null or open, `attr` null or a writable structure of that size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut _compat_ibv_port_attr,
) -> c_int {
    // The old structure's size including padding.
    let size = std::mem::offset_of!(ibv_port_attr, port_cap_flags2);
    // SAFETY: the caller's.
    unsafe { query_port(context, port, attr.cast(), size) }
}

/// `ibv_query_port_speed(3)`: in units of 100 Mb/s.
///
/// # Safety
/// `context` is null or open, `speed` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_port_speed(
    context: *mut ibv_context,
    port: u32,
    speed: *mut u64,
) -> c_int {
    // SAFETY: the caller's.
    status(unsafe { device_of_port(context, port).and_then(|_| object::write(speed, SPEED_100_MBPS)) })
}

/// The entry of the GID table, or ENODATA for an empty one.
fn gid_entry(device: &Device, index: usize) -> Result<&Gid> {
    let gids = device.gids();
    gids.get(index).ok_or(if index < GID_ENTRIES { Errno(libc::ENODATA) } else { EINVAL })
}

fn entry(index: usize, gid: &Gid) -> ibv_gid_entry {
    ibv_gid_entry {
        gid: ibv_gid { raw: gid.raw },
        gid_index: index as u32,
        port_num: PORT,
        gid_type: IBV_GID_TYPE_ROCE_V2,
        ndev_ifindex: gid.ifindex,
    }
}

/// `ibv_query_gid(3)`: an empty entry is all zero.
///
/// # Safety
/// `context` is null or open, `gid` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_gid(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    let query = || {
        // SAFETY: the caller's.
        let device = unsafe { device_of_port(context, port.into())? };
        let raw = match gid_entry(device, usize::try_from(index).map_err(|_| EINVAL)?) {
            Ok(found) => found.raw,
            Err(Errno(libc::ENODATA)) => [0; 16],
            Err(errno) => return Err(errno),
        };
        // SAFETY: the caller's.
        unsafe { object::write(gid, ibv_gid { raw }) }
    };
    minus_one(query())
}

/// `ibv_query_gid_ex(3)`: ENODATA for an empty entry.
///
/// # Safety
/// `context` is null or open, `answer` null or `size` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _ibv_query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    answer: *mut ibv_gid_entry,
    flags: u32,
    size: usize,
) -> c_int {
    let query = || {
        if flags != 0 {
            return Err(EOPNOTSUPP);
        }
        // SAFETY: the caller's.
        let device = unsafe { device_of_port(context, port)? };
        let gid = gid_entry(device, index as usize)?;
        // SAFETY: the caller's.
        unsafe { write_sized(answer, size, &entry(index as usize, gid)) }
    };
    status(query())
}

/// `ibv_query_gid_table(3)`: the number of entries, or a negative errno.
///
/// # Safety
/// `context` is null or open, `entries` an array of `capacity` elements of `size` bytes, or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    capacity: usize,
    flags: u32,
    size: usize,
) -> isize {
    let query = || {
        if flags != 0 {
            return Err(EOPNOTSUPP);
        }
        // SAFETY: the caller's.
        let gids = unsafe { Context::borrow(context)? }.device().gids();
        if capacity < gids.len() || entries.is_null() {
            return Err(EINVAL);
        }
        for (index, gid) in gids.iter().enumerate() {
            let to = entries.wrapping_byte_add(index * size);
            // SAFETY: the caller's; `index` is below `capacity`.
            unsafe { write_sized(to, size, &entry(index, gid))? };
        }
        Ok(gids.len() as isize)
    };
    query().unwrap_or_else(|errno: Errno| -(errno.0 as isize))
}

/// The GID's kind as in sysfs: 0 for RoCE version 1 and for empty entries, 1 for version 2.
///
/// # Safety
/// `context` is null or open, `kind` null or writable.
pub(crate) unsafe fn gid_type(
    context: *mut ibv_context,
    port: u8,
    index: c_uint,
    kind: *mut c_uint,
) -> c_int {
    let query = || {
        // SAFETY: the caller's.
        let device = unsafe { device_of_port(context, port.into())? };
        let value = match gid_entry(device, index as usize) {
            Ok(_) => 1,
            Err(Errno(libc::ENODATA)) => 0,
            Err(errno) => return Err(errno),
        };
        // SAFETY: the caller's.
        unsafe { object::write(kind, value) }
    };
    minus_one(query())
}

/// `ibv_query_pkey(3)`: in network byte order.
///
/// # Safety
/// `context` is null or open, `pkey` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_pkey(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    pkey: *mut u16,
) -> c_int {
    let query = || {
        // SAFETY: the caller's.
        unsafe { device_of_port(context, port.into())? };
        if index != 0 {
            return Err(EINVAL);
        }
        // SAFETY: the caller's.
        unsafe { object::write(pkey, PKEY.to_be()) }
    };
    minus_one(query())
}

/// `ibv_get_pkey_index(3)`: -1 for a P_Key that is not in the table.
///
/// # Safety
/// `context` is null or open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_pkey_index(context: *mut ibv_context, port: u8, pkey: u16) -> c_int {
    // SAFETY: the caller's.
    let found = unsafe { device_of_port(context, port.into()) };
    minus_one(found.and_then(|_| if u16::from_be(pkey) == PKEY { Ok(()) } else { Err(EINVAL) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtu_codes_are_those_of_the_header() {
        let codes = [256, 512, 1024, 2048, 4096].map(mtu_code);
        assert_eq!(codes, [1, 2, 3, 4, 5]);
    }
}
