//! Listeners.

use std::net::IpAddr;

use terrace_wire::Path;
use terrace_wire::Time;

use crate::connection::{Connection, State};
use crate::ids::{ConnId, ListenerId};
use crate::manager::{Cm, Elsewhere, Error};

/// After a listener was closed, requests for its service are dropped instead of rejected for this long. Programs that
/// accept one connection close their listener and open another one for the next, at the same port but not always in the
/// same port space (perftest does). Their peers do not wait for that.
const BETWEEN_LISTENERS_NS: u64 = 5_000_000_000;
/// Most remembered closed listeners.
const BETWEEN_LISTENERS_MAX: usize = 64;

/// The port in a service ID of annex A11.
pub(crate) fn port_of(service_id: u64) -> u16 {
    service_id as u16
}

pub(crate) struct Listener {
    pub id: ListenerId,
    pub service_id: u64,
    /// The required destination address; `None` accepts any.
    pub address: Option<IpAddr>,
    /// Most requests that the program has not taken yet.
    pub backlog: u32,
    pub waiting: u32,
}

/// Why no listener here takes a request.
pub(crate) enum Turned {
    /// The process with this instance index listens.
    Elsewhere(u8),
    /// No listener.
    Nobody,
    /// Drop silently: the peer repeats the request, and then there may be a listener, or a place in its backlog.
    Unheard,
}

impl Cm {
    /// Listens for a service, at one address or at all. The caller chooses the ID.
    ///
    /// # Errors
    /// `InUse` when a listener overlaps.
    pub fn listen(
        &mut self,
        id: ListenerId,
        service_id: u64,
        address: Option<IpAddr>,
        backlog: u32,
    ) -> Result<(), Error> {
        let overlaps = |one: &Listener| {
            one.service_id == service_id
                && (one.address.is_none() || address.is_none() || one.address == address)
        };
        if self.listeners.iter().any(|one| one.id == id || overlaps(one)) {
            return Err(Error::InUse);
        }
        self.listeners.push(Listener { id, service_id, address, backlog, waiting: 0 });
        Ok(())
    }

    /// Closes a listener. Requests that the program has not taken are dropped: their peers repeat them, and by then
    /// another listener may exist.
    pub fn stop_listening(&mut self, id: ListenerId, now: Time) {
        let Some(index) = self.listeners.iter().position(|listener| listener.id == id) else { return };
        let listener = self.listeners.swap_remove(index);
        self.left.retain(|(_, left_at)| left_at.after_ns(BETWEEN_LISTENERS_NS) > now);
        if self.left.len() < BETWEEN_LISTENERS_MAX {
            self.left.push((port_of(listener.service_id), now));
        }
        let waiting: Vec<_> = self.connections.iter().filter(|(_, one)| one.waits_at == Some(id)).collect();
        let waiting: Vec<_> = waiting.into_iter().map(|(conn, _)| *conn).collect();
        waiting.into_iter().for_each(|conn| self.forget_request(conn, now));
    }

    /// Drops a request that the program has not taken, as if the network had lost it. A peer that was sent an MRA
    /// is rejected instead: it would not repeat its request for long.
    pub fn forget_request(&mut self, conn: ConnId, now: Time) {
        match self.connections.get(&conn) {
            Some(connection) if connection.is_told_to_wait => self.destroy(conn, now),
            Some(_) => self.forget(conn),
            None => {}
        }
    }

    /// Assigns a request to the program; it no longer counts against its listener's backlog.
    pub fn take_request(&mut self, conn: ConnId, owner: u64) {
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        connection.owner = Some(owner);
        let listener = connection.waits_at.take();
        if let Some(listener) = self.listeners.iter_mut().find(|one| Some(one.id) == listener) {
            listener.waiting = listener.waiting.saturating_sub(1);
        }
    }

    /// Whether a listener of this service was closed recently, so that another one is likely.
    fn was_just_left(&self, service_id: u64, now: Time) -> bool {
        let is_recent = |left_at: Time| left_at.after_ns(BETWEEN_LISTENERS_NS) > now;
        self.left.iter().any(|(port, left_at)| *port == port_of(service_id) && is_recent(*left_at))
    }

    pub(crate) fn listener_for(&mut self, service_id: u64, address: IpAddr) -> Option<&mut Listener> {
        self.listeners.iter_mut().find(|one| {
            one.service_id == service_id && one.address.is_none_or(|taken| taken == address.to_canonical())
        })
    }

    /// Takes a place in the backlog of the listener for a service at an address.
    pub(crate) fn find_room(
        &mut self,
        now: Time,
        from: &Path,
        service_id: u64,
        address: IpAddr,
        elsewhere: Elsewhere<'_>,
    ) -> Result<ListenerId, Turned> {
        let within_limits = self.is_within_limits(&from.remote);
        let Some(listener) = self.listener_for(service_id, address) else {
            return Err(match elsewhere(service_id, address) {
                Some(slot) => Turned::Elsewhere(slot),
                None if self.was_just_left(service_id, now) => Turned::Unheard,
                None => Turned::Nobody,
            });
        };
        if !within_limits || listener.waiting >= listener.backlog {
            self.counters.beyond_limits += 1;
            return Err(Turned::Unheard);
        }
        listener.waiting += 1;
        Ok(listener.id)
    }

    /// Adds a request to a listener whose place it has taken. The peer's ID of it identifies repetitions.
    pub(crate) fn put_to(
        &mut self,
        listener: ListenerId,
        mut connection: Connection,
        remote_id: u32,
        state: State,
    ) -> ConnId {
        let peer = connection.path.remote;
        (connection.remote_id, connection.waits_at) = (remote_id, Some(listener));
        let conn = self.insert(connection);
        self.enter(conn, state);
        self.requests.insert((peer, remote_id), conn);
        conn
    }
}
