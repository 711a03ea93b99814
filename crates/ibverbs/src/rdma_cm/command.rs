//! The execution of commands, as in the kernel's `ucma` and `cma`.

use std::ffi::c_int;
use std::net::{IpAddr, SocketAddr};

use terrace_cm::{Accept, ConnId};
use terrace_hostmem::fault;
use terrace_wire::cm::{PortSpace, RejReason};

use super::abi::{
    Answer, COMMAND_BYTES_MAX, CONN_PARAM_BYTES, Command, ConnParam, EVENT_BYTES, EVENT_BYTES_MIN, EventCode,
    Fields, HEADER_BYTES, PRIVATE_BYTES,
};
use super::attributes::{self, DEFAULT_QKEY};
use super::clock::now;
use super::connecting::{bind, connect, listen, resolve_address};
use super::descriptor::{self, FileId};
use super::id::{Id, QueuedEvent, Stage};
use super::multicast;
use super::service::{self, Service, with};
use crate::abi::{IBV_EVENT_COMM_EST, IBV_QPT_RC, IBV_QPT_UD, ib_uverbs_qp_attr};
use crate::errno::{EINVAL, Errno, Result};
use crate::identity;

const ENOSPC: Errno = Errno(libc::ENOSPC);
const EFAULT: Errno = Errno(libc::EFAULT);

/// The largest backlog of a listener, and its default.
const BACKLOG_MAX: u32 = 1024;

/// A command that is being executed.
struct Call<'a> {
    fd: c_int,
    file: FileId,
    fields: Fields<'a>,
    /// The size of the program's answer buffer.
    answer_bytes_max: usize,
}

/// Executes a command that a program has written.
///
/// # Safety
/// `data` is the address of `len` bytes of the program's memory, or an unmapped address.
pub unsafe fn execute(fd: c_int, file: FileId, data: u64, len: usize) -> Result<()> {
    let mut bytes = [0; COMMAND_BYTES_MAX];
    let command = bytes.get_mut(..len).filter(|command| command.len() >= HEADER_BYTES).ok_or(EINVAL)?;
    // SAFETY: the caller's.
    unsafe { fault::copy_from(data, command) }.map_err(|_| EFAULT)?;
    let (header, rest) = command.split_at(HEADER_BYTES);
    let header = Fields(header);
    let (number, input, answer_bytes_max) = (header.u32(0)?, header.u16(4)?, header.u16(6)?);
    let input = rest.get(..usize::from(input)).ok_or(EINVAL)?;
    let call = Call { fd, file, fields: Fields(input), answer_bytes_max: answer_bytes_max.into() };
    let command = Command::from_number(number)?;
    match service::check(file) {
        // The file was closed meanwhile: the call sleeps, see `wait_for_event`.
        Err(_) if command == Command::GetEvent && descriptor::lookup(fd) != Some(file) => {}
        checked => checked?,
    }
    let result = call.run(command);
    tracing::trace!(?command, ?result, "rdma_cm");
    result
}

impl Call<'_> {
    fn run(&self, command: Command) -> Result<()> {
        match command {
            Command::CreateId => self.create_id(),
            Command::DestroyId => self.destroy_id(),
            Command::BindIp => self.bind(self.fields.u32(36)?, self.fields.address(8, 28)?),
            Command::Bind => {
                self.check_size(self.fields.u16(4)?, 8)?;
                self.bind(self.fields.u32(0)?, self.fields.address(8, 128)?)
            }
            Command::ResolveIp => {
                let (from, to) = (self.fields.address(0, 28)?, self.fields.address(28, 28)?);
                self.resolve_address(self.fields.u32(56)?, from, to)
            }
            Command::ResolveAddr => {
                let (from, to) = (self.fields.address(16, 128)?, self.fields.address(144, 128)?);
                self.resolve_address(self.fields.u32(0)?, from, to)
            }
            Command::ResolveRoute => self.resolve_route(),
            Command::QueryRoute => self.query_route(),
            Command::Query => self.query(),
            Command::Connect => self.connect(),
            Command::Listen => self.listen(),
            Command::Accept => self.accept(),
            Command::Reject => self.reject(),
            Command::Disconnect => self.disconnect(),
            Command::InitQpAttr => self.init_qp_attr(),
            Command::GetEvent => self.get_event(),
            Command::SetOption => self.set_option(),
            Command::Notify => self.notify(),
            Command::MigrateId => self.migrate_id(),
            Command::WriteEvent => self.write_event(),
            Command::JoinIpMulticast => {
                self.join_multicast(self.fields.u32(44)?, self.fields.address(16, 28)?)
            }
            Command::JoinMulticast => {
                const SEND_ONLY: u16 = 1;
                self.check_size(self.fields.u16(20)?, 24)?;
                if self.fields.u16(22)? > SEND_ONLY {
                    return Err(EINVAL);
                }
                self.join_multicast(self.fields.u32(16)?, self.fields.address(24, 128)?)
            }
            Command::LeaveMulticast => self.leave_multicast(),
        }
    }

    /// Checks that a `sockaddr`'s length is that of its family.
    fn check_size(&self, size: u16, at: usize) -> Result<()> {
        let expected = match i32::from(self.fields.u16(at)?) {
            libc::AF_INET => size_of::<libc::sockaddr_in>(),
            libc::AF_INET6 => size_of::<libc::sockaddr_in6>(),
            _ => return Err(EINVAL),
        };
        if usize::from(size) == expected { Ok(()) } else { Err(EINVAL) }
    }

    /// Writes the answer to the address in the command, up to the buffer's size.
    fn answer<const N: usize>(&self, at: usize, answer: &Answer<N>, bytes_min: usize) -> Result<()> {
        if self.answer_bytes_max < bytes_min {
            return Err(ENOSPC);
        }
        let target = self.fields.u64(at)?;
        // SAFETY: the program's address for the answer. `copy_to` checks the mapping.
        unsafe { fault::copy_to(target, &answer.0[..N.min(self.answer_bytes_max)]) }.map_err(|_| EFAULT)
    }

    fn answer_u32(&self, at: usize, number: u32) -> Result<()> {
        let mut answer = Answer::<4>::new();
        answer.put_u32(0, number);
        self.answer(at, &answer, 4)
    }

    fn create_id(&self) -> Result<()> {
        let space = PortSpace::from_number(self.fields.u16(16)?).ok_or(EINVAL)?;
        let qp_type = match space {
            PortSpace::Tcp => IBV_QPT_RC,
            PortSpace::Udp | PortSpace::Ipoib => IBV_QPT_UD,
            PortSpace::Ib => self.fields.u8(18)?.into(),
        };
        let id = Id::new(self.file, self.fields.u64(0)?, space, qp_type);
        let number = with(|service| Ok(service.ids.insert(id)))?;
        self.answer_u32(8, number).inspect_err(|_| {
            let _ = with(|service| Ok(service.destroy(number)));
        })
    }

    fn destroy_id(&self) -> Result<()> {
        let number = self.fields.u32(8)?;
        if self.answer_bytes_max < 4 {
            return Err(ENOSPC);
        }
        let reported = with(|service| {
            service.ids.get(self.file, number)?;
            Ok(service.destroy(number))
        })?;
        // The kernel's command waits for its workers, and so lets the program's other threads run. A thread that was
        // woken for the last event then polls its channel again before the channel is closed.
        std::thread::yield_now();
        self.answer_u32(0, reported)
    }

    fn bind(&self, number: u32, address: Option<SocketAddr>) -> Result<()> {
        let address = address.ok_or(EINVAL)?;
        service::ensure_device()?;
        with(|service| bind(service, self.file, number, address))
    }

    fn resolve_address(&self, number: u32, from: Option<SocketAddr>, to: Option<SocketAddr>) -> Result<()> {
        let to = to.ok_or(EINVAL)?;
        service::ensure_device()?;
        with(|service| {
            let id = service.ids.get(self.file, number)?;
            if id.stage == Stage::Idle
                && let Some(from) = from.filter(|from| !from.ip().is_unspecified() || from.port() != 0)
            {
                bind(service, self.file, number, from)?;
            }
            let outcome = resolve_address(service, self.file, number, to)?;
            let answer = match outcome {
                Ok(()) => Answer::event(EventCode::AddrResolved, 0),
                Err(errno) => Answer::event(EventCode::AddrError, -errno.0),
            };
            service.ids.queue(number, answer, None);
            Ok(())
        })
    }

    fn resolve_route(&self) -> Result<()> {
        let number = self.fields.u32(0)?;
        with(|service| {
            let id = service.ids.get(self.file, number)?;
            if id.stage != Stage::AddressResolved {
                return Err(EINVAL);
            }
            id.stage = Stage::RouteResolved;
            service.ids.queue(number, Answer::event(EventCode::RouteResolved, 0), None);
            Ok(())
        })
    }

    fn join_multicast(&self, number: u32, group: Option<SocketAddr>) -> Result<()> {
        let (group, uid) = (group.ok_or(EINVAL)?, self.fields.u64(8)?);
        if self.answer_bytes_max < 4 {
            return Err(ENOSPC);
        }
        let joined = with(|service| multicast::join(service, self.file, number, group, uid))?;
        self.answer_u32(0, joined).inspect_err(|_| {
            let _ = with(|service| multicast::leave(service, self.file, joined));
        })
    }

    fn leave_multicast(&self) -> Result<()> {
        if self.answer_bytes_max < 4 {
            return Err(ENOSPC);
        }
        let reported = with(|service| multicast::leave(service, self.file, self.fields.u32(8)?))?;
        self.answer_u32(0, reported)
    }

    /// Calls `with_id` with an identifier, and the device if there is one.
    fn with_id_and_device<T>(
        &self,
        number: u32,
        with_id: impl FnOnce(&Id, Option<(&terrace_nic::Device, u64)>) -> T,
    ) -> Result<T> {
        let guid = identity::get()?.node_guid;
        with(|service| {
            let device = service.device.clone();
            let id = service.ids.get(self.file, number)?;
            Ok(with_id(id, device.as_deref().map(|device| (device, guid))))
        })
    }

    fn query_route(&self) -> Result<()> {
        let answer = self.with_id_and_device(self.fields.u32(8)?, attributes::route)?;
        self.answer(0, &answer, 200)
    }

    fn query(&self) -> Result<()> {
        const ADDR: u32 = 0;
        const PATH: u32 = 1;
        const GID: u32 = 2;
        let (number, option) = (self.fields.u32(8)?, self.fields.u32(12)?);
        match option {
            ADDR | GID => {
                let answer = self.with_id_and_device(number, |id, device| {
                    attributes::addresses(id, device, option == GID)
                })?;
                self.answer(0, &answer, 272)
            }
            PATH => {
                let answer = self.with_id_and_device(number, |id, device| match device {
                    Some((device, _)) => attributes::path(id, device),
                    None => Answer::new(),
                })?;
                self.answer(0, &answer, 8)
            }
            _ => Err(Errno(libc::ENOSYS)),
        }
    }

    fn connect(&self) -> Result<()> {
        let param = ConnParam::read(&self.fields, 0)?;
        let number = self.fields.u32(CONN_PARAM_BYTES)?;
        if !param.valid {
            return Err(EINVAL);
        }
        with(|service| connect(service, self.file, number, param))
    }

    fn listen(&self) -> Result<()> {
        let (number, backlog) = (self.fields.u32(0)?, self.fields.u32(4)? as i32);
        let backlog = u32::try_from(backlog).ok().filter(|&backlog| backlog > 0).unwrap_or(BACKLOG_MAX);
        service::ensure_device()?;
        with(|service| {
            if service.ids.get(self.file, number)?.stage == Stage::Idle {
                bind(service, self.file, number, (IpAddr::from([0; 4]), 0).into())?;
            }
            listen(service, self.file, number, backlog.min(BACKLOG_MAX))
        })
    }

    fn accept(&self) -> Result<()> {
        let param = ConnParam::read(&self.fields, 8)?;
        let (uid, number) = (self.fields.u64(0)?, self.fields.u32(8 + CONN_PARAM_BYTES)?);
        with(|service| {
            let id = service.ids.get(self.file, number)?;
            let conn = connection_of(id)?;
            if !param.valid {
                return service.cm.establish(now(), conn).map_err(Errno::from);
            }
            id.uid = uid;
            if id.is_ud() {
                let qkey = if param.qkey == 0 { DEFAULT_QKEY } else { param.qkey };
                let reply =
                    terrace_cm::SidrReply { qpn: param.qp_num, qkey, private_data: param.private_data };
                return service.cm.send_sidr_rep(now(), conn, &reply).map_err(Errno::from);
            }
            let accept = Accept {
                qpn: param.qp_num,
                responder_resources: param.responder_resources,
                initiator_depth: param.initiator_depth,
                flow_control: param.flow_control,
                rnr_retry_count: param.rnr_retry_count,
                srq: param.srq,
                private_data: param.private_data,
            };
            service.cm.accept(now(), conn, &accept).map_err(Errno::from)
        })
    }

    fn reject(&self) -> Result<()> {
        const VENDOR_OPTION_NOT_SUPPORTED: RejReason = RejReason(35);
        let private: [u8; PRIVATE_BYTES] = self.fields.bytes(8)?;
        let private = &private[..usize::from(self.fields.u8(4)?)];
        let reason = match RejReason(self.fields.u8(5)?.into()) {
            RejReason(0) | RejReason::CONSUMER_DEFINED => RejReason::CONSUMER_DEFINED,
            VENDOR_OPTION_NOT_SUPPORTED => VENDOR_OPTION_NOT_SUPPORTED,
            _ => return Err(EINVAL),
        };
        with(|service| {
            let conn = connection_of(service.ids.get(self.file, self.fields.u32(0)?)?)?;
            service.cm.reject(now(), conn, reason, private).map_err(Errno::from)
        })
    }

    fn disconnect(&self) -> Result<()> {
        with(|service| {
            let conn = connection_of(service.ids.get(self.file, self.fields.u32(0)?)?)?;
            // The command succeeds without a connection: the peer may have ended it meanwhile.
            let _ = service.cm.disconnect(now(), conn);
            Ok(())
        })
    }

    fn init_qp_attr(&self) -> Result<()> {
        let (number, state) = (self.fields.u32(8)?, self.fields.u32(12)?);
        let attr = with(|service| {
            let Service { ids, cm, .. } = service;
            let id = ids.get(self.file, number)?;
            let agreed = id.conn.and_then(|conn| cm.agreed(conn));
            attributes::queue_pair(id, agreed, state)
        })?;
        let mut answer = Answer::<QP_ATTR_BYTES>::new();
        // SAFETY: integers without padding: their sizes add up to that of the whole.
        let bytes = unsafe { std::mem::transmute::<ib_uverbs_qp_attr, [u8; QP_ATTR_BYTES]>(attr) };
        answer.put(0, &bytes);
        self.answer(0, &answer, QP_ATTR_BYTES)
    }

    fn get_event(&self) -> Result<()> {
        if self.answer_bytes_max < EVENT_BYTES_MIN {
            return Err(ENOSPC);
        }
        loop {
            if let Some(answer) = with(|service| Ok(take_event(service, self.file)))? {
                return self.answer(0, &answer, EVENT_BYTES_MIN);
            }
            wait_for_event(self.fd, self.file)?;
        }
    }

    fn set_option(&self) -> Result<()> {
        const LEVEL_ID: u32 = 0;
        let [number, level, name] = [self.fields.u32(8)?, self.fields.u32(12)?, self.fields.u32(16)?];
        let length = self.fields.u32(20)? as usize;
        let mut value = [0; 4];
        let expected = match (level, name) {
            (LEVEL_ID, 0 | 3) => 1,
            (LEVEL_ID, 1 | 2) => 4,
            _ => return Err(Errno(libc::ENOSYS)),
        };
        if length != expected {
            return Err(EINVAL);
        }
        // SAFETY: the program's address of the value. `copy_from` checks the mapping.
        unsafe { fault::copy_from(self.fields.u64(0)?, &mut value[..length]) }.map_err(|_| EFAULT)?;
        with(|service| {
            let id = service.ids.get(self.file, number)?;
            match name {
                0 => id.traffic_class = value[0],
                1 => id.reuse = u32::from_ne_bytes(value) != 0,
                2 if id.stage > Stage::Bound => return Err(EINVAL),
                2 => id.is_family_only = Some(u32::from_ne_bytes(value) != 0),
                _ if value[0] > 31 => return Err(EINVAL),
                _ => id.ack_timeout = Some(value[0]),
            }
            Ok(())
        })
    }

    /// Queues an event that the program writes to itself: librdmacm's threads wake the program by it.
    fn write_event(&self) -> Result<()> {
        let code = match self.fields.u32(8)? {
            code if code == EventCode::User as u32 => EventCode::User,
            code if code == EventCode::Internal as u32 => EventCode::Internal,
            _ => return Err(EINVAL),
        };
        let answer = Answer::event(code, self.fields.u32(12)? as i32).with_argument(self.fields.u64(16)?);
        with(|service| {
            let number = self.fields.u32(0)?;
            service.ids.get(self.file, number)?;
            service.ids.queue(number, answer, None);
            Ok(())
        })
    }

    fn notify(&self) -> Result<()> {
        let event = self.fields.u32(4)?;
        with(|service| {
            let conn = connection_of(service.ids.get(self.file, self.fields.u32(0)?)?)?;
            if event != IBV_EVENT_COMM_EST {
                return Err(EINVAL);
            }
            service.cm.notify_comm_est(now(), conn).map_err(Errno::from)
        })
    }

    fn migrate_id(&self) -> Result<()> {
        let (number, from) = (self.fields.u32(8)?, self.fields.u32(12)? as c_int);
        let from = descriptor::lookup_copy(from).ok_or(Errno(libc::ENOENT))?;
        let reported = with(|service| {
            service.ids.get(from, number)?.file = self.file;
            let moved = service.ids.take_events(from, number);
            service.clear_readable_if_empty(from);
            if let Some(file) = service.ids.files.get_mut(&self.file) {
                moved.into_iter().for_each(|event| file.push(event));
            }
            Ok(service.ids.get(self.file, number)?.events_reported)
        })?;
        self.answer_u32(0, reported)
    }
}

/// Size of `struct ib_uverbs_qp_attr`.
const QP_ATTR_BYTES: usize = 144;
const _: () = assert!(size_of::<ib_uverbs_qp_attr>() == QP_ATTR_BYTES);

fn connection_of(id: &Id) -> Result<ConnId> {
    id.conn.ok_or(EINVAL)
}

/// Removes the oldest event of a file from its queue, and creates the identifier of a connection request.
fn take_event(service: &mut Service, file: FileId) -> Option<Answer<EVENT_BYTES>> {
    let event = service.ids.files.get_mut(&file)?.events.pop_front();
    service.clear_readable_if_empty(file);
    let QueuedEvent { id: number, mut answer, join, request } = event?;
    // librdmacm counts the acknowledgement of such an event for the membership and for its identifier.
    if let Some(join) = join.and_then(|join| service.ids.joins.get_mut(&join)) {
        join.events_reported += 1;
    }
    let owner = service.ids.find(number)?;
    owner.events_reported += 1;
    if let Some(request) = request {
        let mut id = Id::new(file, 0, owner.space, owner.qp_type);
        id.stage = Stage::Connecting;
        (id.local, id.peer) = (Some(request.local), Some(request.peer));
        (id.source, id.conn) = (Some(request.source), Some(request.conn));
        let uid = owner.uid;
        let number = service.ids.insert(id);
        service.cm.assign_request(request.conn, number.into());
        answer.set_id(uid, number);
    }
    Some(answer)
}

/// Waits until a file has an event; EAGAIN for a non-blocking descriptor.
///
/// A file whose descriptor is closed meanwhile gets no event. The kernel keeps a call's file until the call returns, so
/// the call continues to sleep. Programs that close a channel while one of their threads waits for its events (rping
/// until 2025) rely on that.
fn wait_for_event(fd: c_int, file: FileId) -> Result<()> {
    // SAFETY: flags of a descriptor.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    // The lookup follows the read of the flags: if the number is still the file's now, the flags were the file's.
    if flags >= 0 && flags & libc::O_NONBLOCK != 0 && descriptor::lookup(fd) == Some(file) {
        return Err(Errno(libc::EAGAIN));
    }
    while descriptor::lookup(fd) == Some(file) {
        if descriptor::wait_readable(fd)? {
            return Ok(());
        }
    }
    // SAFETY: no structure. Only a signal ends the sleep.
    unsafe { libc::poll(std::ptr::null_mut(), 0, -1) };
    Err(Errno::last())
}
