//! Address handles, and conversion of C's addresses.

use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use terrace_nic::{AddressVector, Ah, Device, Gid};

use crate::abi::{ibv_ah, ibv_ah_attr, ibv_context, ibv_gid, ibv_global_route, ibv_grh, ibv_pd, ibv_wc};
use crate::context::Context;
use crate::errno::{EINVAL, Errno, Result, minus_one, pointer, status};
use crate::object::{self, CPart, Object, borrow, retire};
use crate::pd::{PdObject, Use};
use crate::room;

/// `ibv_ah`.
#[repr(C)]
pub struct AhObject {
    c: CPart<ibv_ah>,
    _context: Arc<Context>,
    ah: Arc<Ah>,
    _pd: Use,
}

// SAFETY: repr(C), the C structure first.
unsafe impl Object for AhObject {
    type C = ibv_ah;
}

impl AhObject {
    /// The NIC's address handle.
    pub fn ah(&self) -> &Arc<Ah> {
        &self.ah
    }
}

/// The port's local identifier: the low half of its IPv4 address, or 0. RoCE has no local identifiers, but some
/// programs (qperf) support no other address. This one identifies the peer within an IPv4 network of 16 bits. See
/// `docs/decisions`.
pub fn lid(gids: &[Gid]) -> u16 {
    match gids.first().map(|gid| gid.addr) {
        Some(IpAddr::V4(own)) => u32::from(own) as u16,
        _ => 0,
    }
}

/// The GID for a local identifier.
fn by_lid(device: &Device, lid: u16) -> Option<[u8; 16]> {
    match device.gids().first()?.addr {
        IpAddr::V4(own) if lid != 0 => {
            let peer = Ipv4Addr::from(u32::from(own) & 0xffff_0000 | u32::from(lid));
            Some(peer.to_ipv6_mapped().octets())
        }
        _ => None,
    }
}

/// The NIC's address vector for C's address.
pub fn vector(device: &Device, attr: &ibv_ah_attr) -> AddressVector {
    if attr.is_global == 0
        && let Some(dgid) = by_lid(device, attr.dlid)
    {
        return AddressVector { is_global: true, dgid, port_num: attr.port_num, ..AddressVector::default() };
    }
    AddressVector {
        is_global: attr.is_global != 0,
        // SAFETY: every view of the union is 16 plain bytes.
        dgid: unsafe { attr.grh.dgid.raw },
        sgid_index: attr.grh.sgid_index,
        traffic_class: attr.grh.traffic_class,
        hop_limit: attr.grh.hop_limit,
        flow_label: attr.grh.flow_label,
        port_num: attr.port_num,
    }
}

/// # Safety
/// `pd` is null or a protection domain.
unsafe fn create(pd: *mut ibv_pd, attr: &ibv_ah_attr) -> Result<*mut ibv_ah> {
    // SAFETY: the caller's.
    let domain = unsafe { borrow::<PdObject>(pd)? };
    room::for_object()?;
    let ah = domain.pd().create_ah(&vector(domain.context().device(), attr))?;
    let context = domain.context().clone();
    let c = ibv_ah { context: context.as_c(), pd, handle: context.new_handle() };
    Ok(AhObject { c: CPart::new(c), _context: context, ah, _pd: domain.in_use() }.publish())
}

/// `ibv_create_ah(3)`.
///
/// # Safety
/// `pd` is null or a protection domain, `attr` null or an address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: the caller's.
    pointer(unsafe { object::read(attr).and_then(|attr| create(pd, attr)) })
}

/// `ibv_destroy_ah(3)`. Sends that were posted with the address handle are still executed.
///
/// # Safety
/// `ah` is null or an address handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int {
    let destroy = || {
        // SAFETY: the caller's.
        unsafe { borrow::<AhObject>(ah)? }.ah.destroy()?;
        // SAFETY: the NIC no longer refers to it.
        unsafe { retire::<AhObject>(ah) };
        Ok(())
    };
    status(destroy())
}

/// Offset of the IPv4 header in the 40-byte GRH area, which it ends (IBTA annex A17).
const IPV4_AT: usize = 20;

/// Protocol number of UDP.
const UDP: u8 = 17;

/// The path back to the sender of a datagram, from the IP header that was received with it.
#[derive(Debug)]
struct Sender {
    dgid: [u8; 16],
    /// The local address in the GID table.
    own: [u8; 16],
    hop_limit: u8,
    traffic_class: u8,
    flow_label: u32,
}

/// One's complement sum of a header; 0xffff if its checksum is correct (RFC 791).
fn header_sum(header: &[u8]) -> u16 {
    let word = |pair: &[u8]| u32::from(u16::from_be_bytes([pair[0], pair[1]]));
    let sum: u32 = header.chunks_exact(2).map(word).sum();
    (sum + (sum >> 16)) as u16
}

fn mapped(ipv4: &[u8]) -> [u8; 16] {
    let mut gid = [0; 16];
    (gid[10], gid[11]) = (0xff, 0xff);
    gid[12..].copy_from_slice(ipv4);
    gid
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    std::array::from_fn(|index| bytes[index])
}

/// Parses an IPv4 header in the second half or an IPv6 header. EINVAL without a valid header, and for multicast.
fn sender(area: &[u8; 40]) -> Result<Sender> {
    let ipv4 = &area[IPV4_AT..];
    if ipv4[0] == 0x45 && (area[0] >> 4 != 6 || header_sum(ipv4) == 0xffff) {
        if ipv4[16] >> 4 == 0xe {
            return Err(EINVAL);
        }
        let (dgid, own) = (mapped(&ipv4[12..16]), mapped(&ipv4[16..20]));
        return Ok(Sender { dgid, own, hop_limit: ipv4[8], traffic_class: ipv4[1], flow_label: 0 });
    }
    if area[0] >> 4 != 6 || area[6] != UDP {
        return Err(Errno(libc::EPROTONOSUPPORT));
    }
    if area[24] == 0xff {
        return Err(EINVAL);
    }
    let first = u32::from_be_bytes(array(area));
    Ok(Sender {
        dgid: array(&area[8..24]),
        own: array(&area[24..40]),
        hop_limit: area[7],
        traffic_class: (first >> 20) as u8,
        flow_label: first & 0xf_ffff,
    })
}

/// # Safety
/// `wc` is null or a completion, `grh` null or the first 40 bytes of the receive buffer, `context` null or open.
unsafe fn answer(
    context: *mut ibv_context,
    port_num: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
) -> Result<ibv_ah_attr> {
    // SAFETY: the caller's.
    let (context, wc) = unsafe { (Context::borrow(context)?, object::read(wc)?) };
    // SAFETY: integers only.
    let mut attr: ibv_ah_attr = unsafe { object::zeroed() };
    (attr.port_num, attr.sl, attr.dlid, attr.src_path_bits) = (port_num, wc.sl, wc.slid, wc.dlid_path_bits);
    if wc.wc_flags & crate::abi::IBV_WC_GRH == 0 {
        return Ok(attr);
    }
    // SAFETY: the caller's: the GRH area has 40 bytes of any alignment.
    let area = unsafe { object::read(grh.cast::<[u8; 40]>())? };
    let sender = sender(area)?;
    let gids = context.device().gids();
    let index = gids.iter().position(|gid| gid.raw == sender.own).ok_or(EINVAL)?;
    attr.is_global = 1;
    attr.grh = ibv_global_route {
        dgid: ibv_gid { raw: sender.dgid },
        flow_label: sender.flow_label,
        sgid_index: index as u8,
        hop_limit: sender.hop_limit,
        traffic_class: sender.traffic_class,
    };
    Ok(attr)
}

/// `ibv_init_ah_from_wc(3)`.
///
/// # Safety
/// `wc` is null or a completion, `grh` null or the first 40 bytes of the receive buffer, `context` null or open,
/// `ah_attr` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_init_ah_from_wc(
    context: *mut ibv_context,
    port_num: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    ah_attr: *mut ibv_ah_attr,
) -> c_int {
    // SAFETY: the caller's.
    minus_one(unsafe { answer(context, port_num, wc, grh).and_then(|attr| object::write(ah_attr, attr)) })
}

/// `ibv_create_ah_from_wc(3)`.
///
/// # Safety
/// As for `ibv_init_ah_from_wc`; `pd` is null or a protection domain.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_ah_from_wc(
    pd: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    port_num: u8,
) -> *mut ibv_ah {
    let create = || {
        // SAFETY: the caller's.
        let domain = unsafe { borrow::<PdObject>(pd)? };
        // SAFETY: the caller's.
        let attr = unsafe { answer(domain.context().as_c(), port_num, wc, grh)? };
        // SAFETY: the caller's.
        unsafe { create(pd, &attr) }
    };
    pointer(create())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ipv4_header_in_the_second_half_is_found() {
        let mut area = [0; 40];
        area[20..]
            .copy_from_slice(&[0x45, 0x10, 0, 60, 0, 0, 0x40, 0, 64, 17, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2]);
        let sender = sender(&area).expect("an address");
        assert_eq!(sender.dgid, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 1]);
        assert_eq!(sender.own[12..], [192, 0, 2, 2]);
        assert_eq!((sender.hop_limit, sender.traffic_class), (64, 0x10));
    }

    #[test]
    fn an_ipv6_header_is_found_and_others_are_not() {
        let mut area = [0; 40];
        (area[0], area[1], area[2], area[3]) = (0x61, 0x23, 0x45, 0x67);
        (area[6], area[7], area[8], area[24]) = (17, 3, 0xfe, 0x20);
        let found = sender(&area).expect("an address");
        assert_eq!((found.traffic_class, found.flow_label, found.hop_limit), (0x12, 0x3_4567, 3));
        area[24] = 0xff;
        assert!(sender(&area).is_err());
        assert!(sender(&[0; 40]).is_err());
    }
}
