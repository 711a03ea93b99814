//! The `rdma_cm_id`s of programs, the files that they open, and the events queued for them.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use terrace_cm::{ConnId, ListenerId};
use terrace_wire::cm::PortSpace;

use super::abi::{Answer, EVENT_BYTES};
use super::descriptor::FileId;
use super::rendezvous::Claim;
use super::resolve::Source;
use crate::abi::{IBV_QPT_UD, ibv_qp_type};
use crate::errno::{EINVAL, Errno, Result};

/// The progress of an identifier towards a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    Idle,
    Bound,
    AddressResolved,
    RouteResolved,
    /// A connection was requested, or the identifier comes from a request.
    Connecting,
    Listening,
}

/// An `rdma_cm_id`.
pub struct Id {
    pub file: FileId,
    /// The program's name for the identifier; 0 before the program has set one.
    pub uid: u64,
    pub space: PortSpace,
    pub qp_type: ibv_qp_type,
    pub stage: Stage,
    pub local: Option<SocketAddr>,
    pub peer: Option<SocketAddr>,
    /// The device's address, once selected.
    pub source: Option<Source>,
    pub conn: Option<ConnId>,
    pub listener: Option<ListenerId>,
    /// Addresses and ports that the identifier has reserved among the processes of this host.
    pub claims: Vec<Claim>,
    /// Events that the program has received. The program reads their number when it destroys the identifier.
    pub events_reported: u32,
    pub reuse: bool,
    /// Whether its wildcard address stands for addresses of its family only, if the program has said so.
    pub is_family_only: Option<bool>,
    pub traffic_class: u8,
    pub ack_timeout: Option<u8>,
    pub qkey: u32,
}

impl Id {
    pub fn new(file: FileId, uid: u64, space: PortSpace, qp_type: ibv_qp_type) -> Id {
        Id {
            file,
            uid,
            space,
            qp_type,
            stage: Stage::Idle,
            local: None,
            peer: None,
            source: None,
            conn: None,
            listener: None,
            claims: Vec::new(),
            events_reported: 0,
            reuse: false,
            is_family_only: None,
            traffic_class: 0,
            ack_timeout: None,
            qkey: 0,
        }
    }

    /// Whether its queue pair is of type UD.
    pub fn is_ud(&self) -> bool {
        self.qp_type == IBV_QPT_UD
    }
}

/// A queued event.
pub struct QueuedEvent {
    /// The identifier that gets the event.
    pub id: u32,
    pub answer: Answer<EVENT_BYTES>,
    /// The membership that the event is about.
    pub join: Option<u32>,
    /// A connection request, for which an identifier is created when the program takes the event.
    pub request: Option<Request>,
}

/// A membership of an identifier in a multicast group.
pub struct Join {
    /// The identifier.
    pub id: u32,
    /// The program's name for the membership.
    pub uid: u64,
    /// Events about it that the program has received.
    pub events_reported: u32,
}

/// See [`QueuedEvent::request`].
pub struct Request {
    pub conn: ConnId,
    pub local: SocketAddr,
    pub peer: SocketAddr,
    pub source: Source,
}

/// The file of one `open`.
pub struct File {
    pub events: VecDeque<QueuedEvent>,
    /// The descriptor that `open` returned to the program.
    pub fd: RawFd,
    /// The library's end of the pair: a byte sent into it makes the program's end readable.
    pub end: OwnedFd,
}

impl File {
    /// Adds an event.
    pub fn push(&mut self, event: QueuedEvent) {
        if self.events.is_empty() {
            // SAFETY: an open descriptor and one readable byte. The socket cannot be full: at most one byte is in it.
            unsafe {
                libc::send(
                    self.end.as_raw_fd(),
                    [1u8].as_ptr().cast(),
                    1,
                    libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
                )
            };
        }
        self.events.push_back(event);
    }
}

/// All files and identifiers of a process.
#[derive(Default)]
pub struct Ids {
    pub files: HashMap<FileId, File>,
    /// Ordered by number, to find the lowest free one.
    ids: BTreeMap<u32, Id>,
    /// Memberships in multicast groups, by number.
    pub joins: BTreeMap<u32, Join>,
}

/// The lowest number that is not a key.
fn lowest_free<T>(numbered: &BTreeMap<u32, T>) -> u32 {
    (0..)
        .zip(numbered.keys())
        .find(|(free, taken)| free != *taken)
        .map_or(numbered.len() as u32, |(free, _)| free)
}

impl Ids {
    /// Adds an identifier with the lowest free number. librdmacm keeps a table by number, so numbers stay small.
    pub fn insert(&mut self, id: Id) -> u32 {
        let free = lowest_free(&self.ids);
        self.ids.insert(free, id);
        free
    }

    /// Adds a membership. Returns its number.
    pub fn insert_join(&mut self, join: Join) -> u32 {
        let free = lowest_free(&self.joins);
        self.joins.insert(free, join);
        free
    }

    /// An identifier of a file: ENOENT if it does not exist, EINVAL if it belongs to another file, as in the kernel.
    pub fn get(&mut self, file: FileId, number: u32) -> Result<&mut Id> {
        let id = self.ids.get_mut(&number).ok_or(Errno(libc::ENOENT))?;
        if id.file == file { Ok(id) } else { Err(EINVAL) }
    }

    /// An identifier of any file.
    pub fn find(&mut self, number: u32) -> Option<&mut Id> {
        self.ids.get_mut(&number)
    }

    /// Removes an identifier and its memberships.
    pub fn remove(&mut self, number: u32) -> Option<Id> {
        self.joins.retain(|_, join| join.id != number);
        self.ids.remove(&number)
    }

    /// Closes this process's descriptors of the bound ports. In a forked child, the parent's keep the ports bound.
    pub fn close_claims(&mut self) {
        self.ids.values_mut().for_each(|id| id.claims.clear());
    }

    pub fn numbers_of_file(&self, file: FileId) -> Vec<u32> {
        self.ids.iter().filter(|(_, id)| id.file == file).map(|(number, _)| *number).collect()
    }

    /// The identifier of a listener.
    pub fn number_of_listener(&self, listener: ListenerId) -> Option<u32> {
        self.ids.iter().find(|(_, id)| id.listener == Some(listener)).map(|(number, _)| *number)
    }

    /// Queues an event, unless the identifier has no `uid` yet: the program could not match the event to its
    /// identifier.
    pub fn queue(&mut self, number: u32, mut answer: Answer<EVENT_BYTES>, request: Option<Request>) -> bool {
        let Some(id) = self.ids.get(&number) else { return false };
        let (Some(file), true) = (self.files.get_mut(&id.file), id.uid != 0) else { return false };
        answer.set_id(id.uid, number);
        file.push(QueuedEvent { id: number, answer, join: None, request });
        true
    }

    /// Queues an event about a membership.
    pub fn queue_for_join(&mut self, number: u32, mut answer: Answer<EVENT_BYTES>) {
        let Some(join) = self.joins.get(&number) else { return };
        let file = self.ids.get(&join.id).and_then(|id| self.files.get_mut(&id.file));
        if let Some(file) = file {
            answer.set_id(join.uid, number);
            file.push(QueuedEvent { id: join.id, answer, join: Some(number), request: None });
        }
    }

    /// Removes the events about a membership from its file's queue.
    pub fn drop_events_of_join(&mut self, file: FileId, number: u32) {
        if let Some(file) = self.files.get_mut(&file) {
            file.events.retain(|event| event.join != Some(number));
        }
    }

    /// Removes the events of an identifier from its file's queue.
    pub fn take_events(&mut self, file: FileId, number: u32) -> Vec<QueuedEvent> {
        let Some(file) = self.files.get_mut(&file) else { return Vec::new() };
        let (taken, rest): (Vec<_>, Vec<_>) = file.events.drain(..).partition(|event| event.id == number);
        file.events = rest.into();
        taken
    }
}
