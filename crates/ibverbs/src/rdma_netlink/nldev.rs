//! The answers about devices (`RDMA_NL_NLDEV` of `rdma/rdma_netlink.h`).

use libc::{EINVAL, EOPNOTSUPP};
use terrace_nic::stat::{self, DeviceSnapshot, QpSnapshot};

use super::message::{Answer, Attributes, Request};
use crate::abi::{IBV_NODE_CA, IBV_PORT_ACTIVE};
use crate::device_list::{UVERBS_NAME, device_name};
use crate::errno::{Errno, Result};
use crate::identity;
use crate::query::{CAPABILITIES, FIRMWARE, LINK_UP, PORT};
use crate::rdma_cm;

/// The client number of these requests, above the command in a message's type.
const CLIENT: u16 = 5;
const CLIENT_SHIFT: u32 = 10;
const COMMAND_MASK: u16 = (1 << CLIENT_SHIFT) - 1;

/// The commands.
mod command {
    pub const GET: u16 = 1;
    pub const PORT_GET: u16 = 5;
    pub const SYS_GET: u16 = 6;
    pub const RES_GET: u16 = 9;
    pub const RES_QP_GET: u16 = 10;
    pub const GET_CHARDEV: u16 = 15;
}

/// The attributes.
mod attribute {
    pub const DEV_INDEX: u16 = 1;
    pub const DEV_NAME: u16 = 2;
    pub const PORT_INDEX: u16 = 3;
    pub const CAP_FLAGS: u16 = 4;
    pub const FW_VERSION: u16 = 5;
    pub const NODE_GUID: u16 = 6;
    pub const SYS_IMAGE_GUID: u16 = 7;
    pub const PORT_STATE: u16 = 12;
    pub const PORT_PHYS_STATE: u16 = 13;
    pub const DEV_NODE_TYPE: u16 = 14;
    pub const RES_SUMMARY: u16 = 15;
    pub const RES_SUMMARY_ENTRY: u16 = 16;
    pub const RES_SUMMARY_ENTRY_NAME: u16 = 17;
    pub const RES_SUMMARY_ENTRY_CURR: u16 = 18;
    pub const RES_QP: u16 = 19;
    pub const RES_QP_ENTRY: u16 = 20;
    pub const RES_LQPN: u16 = 21;
    pub const RES_RQPN: u16 = 22;
    pub const RES_SQ_PSN: u16 = 24;
    pub const RES_TYPE: u16 = 26;
    pub const RES_STATE: u16 = 27;
    pub const RES_PID: u16 = 28;
    pub const NDEV_INDEX: u16 = 50;
    pub const NDEV_NAME: u16 = 51;
    pub const NETNS_MODE: u16 = 66;
    pub const DEV_PROTOCOL: u16 = 67;
    pub const CHARDEV_TYPE: u16 = 69;
    pub const CHARDEV_NAME: u16 = 70;
    pub const CHARDEV_ABI: u16 = 71;
    pub const CHARDEV: u16 = 72;
    pub const COPY_ON_FORK: u16 = 93;
}

/// The index of the only device.
const DEVICE_INDEX: u32 = 0;

/// Queue pairs in one message. Programs receive with a buffer of a page.
const QUEUE_PAIRS_MAX: usize = 32;

/// The kinds of objects of `RES_GET`, and their names in snapshots. Objects that snapshots do not count are 0.
const OBJECTS: [(&str, &str); 7] = [
    ("pd", "protection_domains"),
    ("cq", "completion_queues"),
    ("qp", "queue_pairs"),
    ("cm_id", ""),
    ("mr", "memory_regions"),
    ("ctx", ""),
    ("srq", "shared_receive_queues"),
];

/// Answers a request.
pub fn answer(request: &Request, answer: &mut Answer) {
    let outcome = if request.is_request() { objects(request) } else { Ok(Vec::new()) };
    match outcome {
        Ok(objects) => {
            objects.iter().for_each(|object| answer.add_object(request, object));
            if request.is_request() && request.is_dump() {
                answer.add_done(request);
            } else if request.wants_ack() {
                answer.add_status(request, 0);
            }
        }
        Err(Errno(errno)) => answer.add_status(request, errno),
    }
}

/// The objects that a request asks for.
fn objects(request: &Request) -> Result<Vec<Attributes>> {
    if request.kind() >> CLIENT_SHIFT != CLIENT {
        return Err(Errno(EOPNOTSUPP));
    }
    match request.kind() & COMMAND_MASK {
        command::GET => device(request).map(|device| vec![device]),
        command::PORT_GET => port(request).map(|port| vec![port]),
        command::SYS_GET => Ok(vec![system()]),
        command::RES_GET => objects_in_use(request).map(|objects| vec![objects]),
        command::RES_QP_GET if request.is_dump() => queue_pairs(request),
        command::GET_CHARDEV => character_device(request).map(|device| vec![device]),
        _ => Err(Errno(EOPNOTSUPP)),
    }
}

/// Index and name of the device, the beginning of most answers. A request for one object names the device by its index.
fn device_of(request: &Request) -> Result<Attributes> {
    match request.number(attribute::DEV_INDEX) {
        None if !request.is_dump() => Err(Errno(EINVAL)),
        None | Some(DEVICE_INDEX) => Ok(Attributes::default()
            .u32(attribute::DEV_INDEX, DEVICE_INDEX)
            .text(attribute::DEV_NAME, device_name())),
        Some(_) => Err(Errno(EINVAL)),
    }
}

fn device(request: &Request) -> Result<Attributes> {
    let guid = identity::get()?.node_guid;
    Ok(device_of(request)?
        .u32(attribute::PORT_INDEX, PORT)
        .u64(attribute::CAP_FLAGS, u64::from(CAPABILITIES))
        .text(attribute::FW_VERSION, FIRMWARE)
        .u64(attribute::NODE_GUID, guid)
        .u64(attribute::SYS_IMAGE_GUID, guid)
        .u8(attribute::DEV_NODE_TYPE, IBV_NODE_CA as u8)
        .text(attribute::DEV_PROTOCOL, "roce"))
}

/// The port, as of every RoCE device: LIDs and the subnet prefix are of InfiniBand only.
fn port(request: &Request) -> Result<Attributes> {
    let device = device_of(request)?;
    if !request.is_dump() && request.number(attribute::PORT_INDEX) != Some(PORT) {
        return Err(Errno(EINVAL));
    }
    let port = device
        .u32(attribute::PORT_INDEX, PORT)
        .u8(attribute::PORT_STATE, IBV_PORT_ACTIVE as u8)
        .u8(attribute::PORT_PHYS_STATE, LINK_UP);
    Ok(match identity::get()?.gids.first() {
        Some(gid) => port.u32(attribute::NDEV_INDEX, gid.ifindex).text(attribute::NDEV_NAME, &gid.interface),
        None => port,
    })
}

fn system() -> Attributes {
    // Devices are visible in all network name spaces, as by default in the kernel.
    const SHARED: u8 = 1;
    Attributes::default().u8(attribute::NETNS_MODE, SHARED).u8(attribute::COPY_ON_FORK, 1)
}

/// The devices of this host's processes, as far as they answer this user.
fn snapshots() -> Vec<DeviceSnapshot> {
    let processes = stat::processes().unwrap_or_default();
    stat::fetch_all(&processes).into_iter().filter_map(|(_, answer)| answer.ok()).flatten().collect()
}

fn objects_in_use(request: &Request) -> Result<Attributes> {
    let device = device_of(request)?;
    let snapshots = snapshots();
    let count = |name: &str| snapshots.iter().filter_map(|snapshot| snapshot.objects.get(name)).sum();
    let table = OBJECTS.iter().fold(Attributes::default(), |table, (shown, name)| {
        let entry = Attributes::default()
            .text(attribute::RES_SUMMARY_ENTRY_NAME, shown)
            .u64(attribute::RES_SUMMARY_ENTRY_CURR, count(name));
        table.nested(attribute::RES_SUMMARY_ENTRY, &entry)
    });
    Ok(device.nested(attribute::RES_SUMMARY, &table))
}

fn queue_pairs(request: &Request) -> Result<Vec<Attributes>> {
    let device = device_of(request)?;
    let entries: Vec<Attributes> = snapshots()
        .iter()
        .flat_map(|snapshot| snapshot.queue_pairs.iter().map(|qp| queue_pair(snapshot.pid, qp)))
        .collect();
    let message = |entries: &[Attributes]| {
        let table = entries
            .iter()
            .fold(Attributes::default(), |table, entry| table.nested(attribute::RES_QP_ENTRY, entry));
        device.clone().nested(attribute::RES_QP, &table)
    };
    Ok(entries.chunks(QUEUE_PAIRS_MAX).map(message).collect())
}

fn queue_pair(pid: u32, qp: &QpSnapshot) -> Attributes {
    let entry = Attributes::default()
        .u32(attribute::PORT_INDEX, PORT)
        .u32(attribute::RES_LQPN, qp.qpn)
        .u8(attribute::RES_TYPE, type_code(&qp.kind))
        .u8(attribute::RES_STATE, state_code(&qp.state))
        .u32(attribute::RES_SQ_PSN, qp.sq_psn)
        .u32(attribute::RES_PID, pid);
    match qp.remote {
        Some(_) => entry.u32(attribute::RES_RQPN, qp.remote_qpn),
        None => entry,
    }
}

/// The kernel's number of a queue pair's type.
fn type_code(kind: &str) -> u8 {
    const UNKNOWN: u8 = 7;
    match kind {
        "RC" => 2,
        "UC" => 3,
        "UD" => 4,
        "XRCSEND" => 9,
        "XRCRECV" => 10,
        _ => UNKNOWN,
    }
}

/// The kernel's number of a queue pair's state.
fn state_code(state: &str) -> u8 {
    const STATES: [&str; 7] = ["RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"];
    const ERR: u8 = 6;
    STATES.iter().position(|name| *name == state).map_or(ERR, |position| position as u8)
}

/// The character devices of the connection manager, by which librdmacm recognizes it, and of verbs.
fn character_device(request: &Request) -> Result<Attributes> {
    const RDMA_CM_ABI: u64 = 4;
    const VERBS_ABI: u64 = 1;
    const NULL_DEVICE: libc::dev_t = libc::makedev(1, 3);
    let (name, abi, number) = match request.text(attribute::CHARDEV_TYPE) {
        Some(b"rdma_cm") => ("rdma_cm", RDMA_CM_ABI, rdma_cm::device_number()),
        Some(b"uverbs") if request.number(attribute::DEV_INDEX) == Some(DEVICE_INDEX) => {
            (UVERBS_NAME, VERBS_ABI, NULL_DEVICE)
        }
        _ => return Err(Errno(EINVAL)),
    };
    Ok(Attributes::default()
        .text(attribute::CHARDEV_NAME, name)
        .u64(attribute::CHARDEV_ABI, abi)
        .u64(attribute::CHARDEV, kernel_encoding(number)))
}

/// A device number as the kernel encodes it in 64 bits.
fn kernel_encoding(number: libc::dev_t) -> u64 {
    let (major, minor) = (u64::from(libc::major(number)), u64::from(libc::minor(number)));
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}
