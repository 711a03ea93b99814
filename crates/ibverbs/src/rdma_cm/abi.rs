//! The layout of commands and answers (`rdma/rdma_user_cm.h`, version 4). Numbers are in the machine's byte order
//! except where the names say otherwise; offsets count from the end of the command's header.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use crate::errno::{EINVAL, Errno, Result};

/// Length of the header: command, length of the rest, size of the answer buffer.
pub const HEADER_BYTES: usize = 8;

/// Upper bound of a command's length (RESOLVE_ADDR and CONNECT are close to it).
pub const COMMAND_BYTES_MAX: usize = 512;

/// Size of the private data field in commands and events.
pub const PRIVATE_BYTES: usize = 256;

/// `RDMA_USER_CM_CMD_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Command {
    CreateId = 0,
    DestroyId = 1,
    BindIp = 2,
    ResolveIp = 3,
    ResolveRoute = 4,
    QueryRoute = 5,
    Connect = 6,
    Listen = 7,
    Accept = 8,
    Reject = 9,
    Disconnect = 10,
    InitQpAttr = 11,
    GetEvent = 12,
    SetOption = 14,
    Notify = 15,
    JoinIpMulticast = 16,
    LeaveMulticast = 17,
    MigrateId = 18,
    Query = 19,
    Bind = 20,
    ResolveAddr = 21,
    JoinMulticast = 22,
    WriteEvent = 24,
}

impl Command {
    /// The command with this number: EINVAL for a number that was never assigned, ENOSYS for an unsupported command.
    /// Those are GET_OPTION, as in the kernel, and RESOLVE_IB_SERVICE, because there is no InfiniBand.
    pub fn from_number(number: u32) -> Result<Command> {
        use Command::*;
        const ALL: [Command; 23] = [
            CreateId,
            DestroyId,
            BindIp,
            ResolveIp,
            ResolveRoute,
            QueryRoute,
            Connect,
            Listen,
            Accept,
            Reject,
            Disconnect,
            InitQpAttr,
            GetEvent,
            SetOption,
            Notify,
            JoinIpMulticast,
            LeaveMulticast,
            MigrateId,
            Query,
            Bind,
            ResolveAddr,
            JoinMulticast,
            WriteEvent,
        ];
        let found = ALL.into_iter().find(|command| *command as u32 == number);
        found.ok_or(if matches!(number, 13 | 23) { Errno(libc::ENOSYS) } else { EINVAL })
    }
}

/// `RDMA_CM_EVENT_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum EventCode {
    AddrResolved = 0,
    AddrError = 1,
    RouteResolved = 2,
    ConnectRequest = 4,
    ConnectResponse = 5,
    Unreachable = 7,
    Rejected = 8,
    Established = 9,
    Disconnected = 10,
    MulticastJoin = 12,
    TimeWaitExit = 15,
    User = 18,
    Internal = 19,
}

/// A command's bytes, without its header.
pub struct Fields<'a>(pub &'a [u8]);

impl Fields<'_> {
    /// The bytes at an offset; EINVAL when the command is too short.
    pub fn bytes<const N: usize>(&self, at: usize) -> Result<[u8; N]> {
        self.0.get(at..).and_then(|rest| rest.first_chunk::<N>()).copied().ok_or(EINVAL)
    }

    pub fn u8(&self, at: usize) -> Result<u8> {
        Ok(self.bytes::<1>(at)?[0])
    }

    pub fn u16(&self, at: usize) -> Result<u16> {
        self.bytes(at).map(u16::from_ne_bytes)
    }

    pub fn u32(&self, at: usize) -> Result<u32> {
        self.bytes(at).map(u32::from_ne_bytes)
    }

    pub fn u64(&self, at: usize) -> Result<u64> {
        self.bytes(at).map(u64::from_ne_bytes)
    }

    /// A `sockaddr` in a field of `len` bytes: `None` if the field is empty.
    pub fn address(&self, at: usize, len: usize) -> Result<Option<SocketAddr>> {
        let raw = self.0.get(at..at + len).ok_or(EINVAL)?;
        let family = u16::from_ne_bytes([raw[0], raw[1]]);
        let port = u16::from_be_bytes([raw[2], raw[3]]);
        match i32::from(family) {
            libc::AF_UNSPEC => Ok(None),
            libc::AF_INET => {
                let octets: [u8; 4] = *raw[4..].first_chunk().ok_or(EINVAL)?;
                Ok(Some((Ipv4Addr::from(octets), port).into()))
            }
            libc::AF_INET6 => {
                let octets: [u8; 16] = *raw[8..].first_chunk().ok_or(EINVAL)?;
                let scope = u32::from_ne_bytes(*raw[24..].first_chunk().ok_or(EINVAL)?);
                Ok(Some(SocketAddrV6::new(Ipv6Addr::from(octets), port, 0, scope).into()))
            }
            // AF_IB fails, too: librdmacm tries it once, and then uses the commands for IP addresses.
            _ => Err(EINVAL),
        }
    }
}

/// `struct rdma_ucm_conn_param`.
pub struct ConnParam {
    pub qp_num: u32,
    pub qkey: u32,
    pub private_data: Vec<u8>,
    pub srq: bool,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: bool,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub valid: bool,
}

/// Length of `struct rdma_ucm_conn_param`.
pub const CONN_PARAM_BYTES: usize = 272;

impl ConnParam {
    pub fn read(from: &Fields<'_>, at: usize) -> Result<ConnParam> {
        let private: [u8; PRIVATE_BYTES] = from.bytes(at + 8)?;
        let [
            len,
            srq,
            responder_resources,
            initiator_depth,
            flow_control,
            retry_count,
            rnr_retry_count,
            valid,
        ] = from.bytes(at + 264)?;
        Ok(ConnParam {
            qp_num: from.u32(at)?,
            qkey: from.u32(at + 4)?,
            private_data: private[..usize::from(len)].to_vec(),
            srq: srq != 0,
            responder_resources,
            initiator_depth,
            flow_control: flow_control != 0,
            retry_count,
            rnr_retry_count,
            valid: valid != 0,
        })
    }
}

/// An answer that is written field by field.
pub struct Answer<const N: usize>(pub [u8; N]);

impl<const N: usize> Answer<N> {
    pub fn new() -> Answer<N> {
        Answer([0; N])
    }

    pub fn put(&mut self, at: usize, bytes: &[u8]) -> &mut Self {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
        self
    }

    pub fn put_u16(&mut self, at: usize, value: u16) -> &mut Self {
        self.put(at, &value.to_ne_bytes())
    }

    pub fn put_u32(&mut self, at: usize, value: u32) -> &mut Self {
        self.put(at, &value.to_ne_bytes())
    }

    pub fn put_u64(&mut self, at: usize, value: u64) -> &mut Self {
        self.put(at, &value.to_ne_bytes())
    }

    /// A `sockaddr`; `None` leaves it empty. Returns its length.
    pub fn put_address(&mut self, at: usize, address: Option<SocketAddr>) -> u16 {
        match address {
            None => 0,
            Some(SocketAddr::V4(v4)) => {
                self.put_u16(at, libc::AF_INET as u16);
                self.put(at + 2, &v4.port().to_be_bytes()).put(at + 4, &v4.ip().octets());
                size_of::<libc::sockaddr_in>() as u16
            }
            Some(SocketAddr::V6(v6)) => {
                self.put_u16(at, libc::AF_INET6 as u16);
                self.put(at + 2, &v6.port().to_be_bytes()).put(at + 8, &v6.ip().octets());
                self.put_u32(at + 24, v6.scope_id());
                size_of::<libc::sockaddr_in6>() as u16
            }
        }
    }
}

/// `struct rdma_ucm_event_resp`.
pub const EVENT_BYTES: usize = 336;
/// The size of the answer buffer in older versions of librdmacm.
pub const EVENT_BYTES_MIN: usize = 324;

/// An event's parameters about a peer's UD queue pair.
pub struct UdParam<'a> {
    pub qp_num: u32,
    pub qkey: u32,
    pub private_data: &'a [u8],
    /// The peer's GID and the index of the local GID.
    pub peer: Option<([u8; 16], u8)>,
}

impl Answer<EVENT_BYTES> {
    /// An event without parameters.
    pub fn event(code: EventCode, status: i32) -> Answer<EVENT_BYTES> {
        let mut answer = Answer::new();
        answer.put_u32(12, code as u32).put(16, &status.to_ne_bytes());
        answer
    }

    /// Sets the identifier that gets the event.
    pub fn set_id(&mut self, uid: u64, id: u32) -> &mut Self {
        self.put_u64(0, uid).put_u32(8, id)
    }

    /// Sets the parameters to a `struct rdma_ucm_conn_param`.
    pub fn with_connection(mut self, param: &ConnParam) -> Self {
        let len = param.private_data.len().min(PRIVATE_BYTES - 1);
        self.put_u32(20, param.qp_num).put_u32(24, param.qkey).put(28, &param.private_data[..len]);
        let flags = [
            len as u8,
            param.srq.into(),
            param.responder_resources,
            param.initiator_depth,
            param.flow_control.into(),
            param.retry_count,
            param.rnr_retry_count,
            param.valid.into(),
        ];
        self.put(284, &flags);
        self
    }

    /// Sets the parameters to a number.
    pub fn with_argument(mut self, argument: u64) -> Self {
        self.put_u64(20, argument);
        self
    }

    /// Sets the parameters to private data only.
    pub fn with_private_data(self, private_data: Vec<u8>) -> Self {
        self.with_connection(&ConnParam {
            qp_num: 0,
            qkey: 0,
            private_data,
            srq: false,
            responder_resources: 0,
            initiator_depth: 0,
            flow_control: false,
            retry_count: 0,
            rnr_retry_count: 0,
            valid: false,
        })
    }

    /// Sets the parameters to a `struct rdma_ucm_ud_param`.
    pub fn with_datagrams(mut self, param: &UdParam<'_>) -> Self {
        let len = param.private_data.len().min(PRIVATE_BYTES - 1);
        self.put_u32(20, param.qp_num).put_u32(24, param.qkey);
        if let Some((gid, index)) = param.peer {
            const IS_GLOBAL: u8 = 1;
            const PORT_NUM: u8 = 1;
            self.put(28, &gid).put(48, &[index, super::resolve::HOP_LIMIT]).put(57, &[IS_GLOBAL, PORT_NUM]);
        }
        self.put(60, &param.private_data[..len]).put(316, &[len as u8]);
        self
    }
}

/// The GID of an address.
pub fn gid_of(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}
