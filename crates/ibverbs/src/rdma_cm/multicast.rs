//! Multicast groups of identifiers. RoCE has no subnet administrator to ask: a join is complete at once, and the
//! queue pair's network interface joins the group when librdmacm attaches the queue pair to it, on the event.

use std::net::SocketAddr;

use super::abi::{Answer, EventCode, UdParam, gid_of};
use super::attributes::DEFAULT_QKEY;
use super::descriptor::FileId;
use super::id::{Join, Stage};
use super::service::Service;
use crate::errno::{EINVAL, Errno, Result};

/// The queue pair number to which datagrams to a group are sent.
const MULTICAST_QPN: u32 = 0xff_ffff;

/// Joins a group, and queues the event for that. `uid` is the program's name for the membership. Returns its number.
///
/// # Errors
/// EINVAL for an address that is no group's or of another family than the identifier's, for a queue pair type other
/// than UD, and unless the identifier has an address of the device and no route yet.
pub fn join(service: &mut Service, file: FileId, number: u32, group: SocketAddr, uid: u64) -> Result<u32> {
    let id = service.ids.get(file, number)?;
    let group = group.ip().to_canonical();
    let has_stage = matches!(id.stage, Stage::Bound | Stage::AddressResolved);
    let source = id.source.filter(|source| source.address.is_ipv4() == group.is_ipv4()).ok_or(EINVAL)?;
    if !has_stage || !id.is_ud() || !group.is_multicast() {
        return Err(EINVAL);
    }
    let qkey = if id.qkey == 0 { DEFAULT_QKEY } else { id.qkey };
    let joined = service.ids.insert_join(Join { id: number, uid, events_reported: 0 });
    let answer = Answer::event(EventCode::MulticastJoin, 0).with_datagrams(&UdParam {
        qp_num: MULTICAST_QPN,
        qkey,
        private_data: &[],
        peer: Some((gid_of(group), source.gid_index)),
    });
    service.ids.queue_for_join(joined, answer);
    Ok(joined)
}

/// Ends a membership. Returns the number of its events that the program has received.
///
/// # Errors
/// ENOENT for a number without a membership, EINVAL if its identifier belongs to another file.
pub fn leave(service: &mut Service, file: FileId, number: u32) -> Result<u32> {
    let owner = service.ids.joins.get(&number).ok_or(Errno(libc::ENOENT))?.id;
    service.ids.get(file, owner)?;
    service.ids.drop_events_of_join(file, number);
    service.clear_readable_if_empty(file);
    Ok(service.ids.joins.remove(&number).map_or(0, |join| join.events_reported))
}
