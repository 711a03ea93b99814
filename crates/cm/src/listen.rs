//! Listeners.

use std::net::IpAddr;

use terrace_wire::Path;
use terrace_wire::Time;

use crate::connection::{Connection, State};
use crate::ids::{ConnId, ListenerId};
use crate::manager::{Cm, Error, FindInstance};

/// After a listener was closed, requests for its service are dropped instead of rejected for this long. Some programs
/// (perftest) accept one connection, close their listener and open another one, at the same port but not always in the
/// same port space. Their peers do not wait for the new listener.
const BETWEEN_LISTENERS_NS: u64 = 5_000_000_000;
/// The most recently closed listeners that are recorded.
const CLOSED_LISTENERS_MAX: usize = 64;

/// The port in a service ID of annex A11.
pub(crate) fn port_of(service_id: u64) -> u16 {
    service_id as u16
}

/// Destination addresses: those of the requests that a listener accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Addresses {
    /// Every address.
    All,
    /// Every address of IPv4.
    V4,
    /// Every address of IPv6.
    V6,
    /// One address.
    One(IpAddr),
}

impl Addresses {
    /// Whether an address is among them. One of IPv4 may be mapped into IPv6.
    pub fn contains(self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        match self {
            Addresses::All => true,
            Addresses::V4 => address.is_ipv4(),
            Addresses::V6 => address.is_ipv6(),
            Addresses::One(one) => address == one.to_canonical(),
        }
    }

    fn overlaps(self, other: Addresses) -> bool {
        match (self, other) {
            (Addresses::One(one), others) | (others, Addresses::One(one)) => others.contains(one),
            (Addresses::All, _) | (_, Addresses::All) => true,
            (one, other) => one == other,
        }
    }
}

pub(crate) struct Listener {
    pub id: ListenerId,
    pub service_id: u64,
    /// The accepted destination addresses.
    pub addresses: Addresses,
    /// Upper bound of `waiting`.
    pub backlog: u32,
    /// Requests that the program has not taken yet.
    pub waiting: u32,
}

/// The reason why no listener of this process takes a request.
pub(crate) enum NoListener {
    /// The process with this instance index listens.
    OtherInstance(u8),
    /// No process of this host listens.
    Nowhere,
    /// The request is dropped silently. The peer repeats it, and then there may be a listener with a free backlog
    /// entry.
    Drop,
}

impl Cm {
    /// Listens for a service at addresses. The caller chooses the ID.
    ///
    /// # Errors
    /// `InUse` when a listener overlaps.
    pub fn listen(
        &mut self,
        id: ListenerId,
        service_id: u64,
        addresses: Addresses,
        backlog: u32,
    ) -> Result<(), Error> {
        let overlaps = |one: &Listener| one.service_id == service_id && one.addresses.overlaps(addresses);
        if self.listeners.iter().any(|one| one.id == id || overlaps(one)) {
            return Err(Error::InUse);
        }
        self.listeners.push(Listener { id, service_id, addresses, backlog, waiting: 0 });
        Ok(())
    }

    /// Closes a listener. Requests in its backlog are dropped: the peers repeat them, and another listener may exist by
    /// then.
    pub fn stop_listening(&mut self, id: ListenerId, now: Time) {
        let Some(index) = self.listeners.iter().position(|listener| listener.id == id) else { return };
        let listener = self.listeners.swap_remove(index);
        self.closed_listeners.retain(|(_, closed_at)| closed_at.after_ns(BETWEEN_LISTENERS_NS) > now);
        let port = port_of(listener.service_id);
        self.closed_listeners.retain(|(closed, _)| *closed != port);
        if self.closed_listeners.len() == CLOSED_LISTENERS_MAX {
            self.closed_listeners.remove(0);
        }
        self.closed_listeners.push((port, now));
        let waiting: Vec<_> =
            self.connections.iter().filter(|(_, one)| one.in_backlog_of == Some(id)).collect();
        let waiting: Vec<_> = waiting.into_iter().map(|(conn, _)| *conn).collect();
        waiting.into_iter().for_each(|conn| self.drop_request(conn, now));
    }

    /// Drops a request in a backlog, as if the network had lost it. A peer that was sent an MRA is rejected instead:
    /// the peer would not repeat its request for long.
    pub fn drop_request(&mut self, conn: ConnId, now: Time) {
        match self.connections.get(&conn) {
            Some(connection) if connection.was_mra_sent => self.destroy(conn, now),
            Some(_) => self.remove(conn),
            None => {}
        }
    }

    /// Assigns a request to the program and frees its entry in the listener's backlog.
    pub fn assign_request(&mut self, conn: ConnId, owner: u64) {
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        connection.owner = Some(owner);
        let listener = connection.in_backlog_of.take();
        if let Some(listener) = self.listeners.iter_mut().find(|one| Some(one.id) == listener) {
            listener.waiting = listener.waiting.saturating_sub(1);
        }
    }

    /// Whether a listener of this service was closed recently, so that the program probably opens another one.
    fn was_closed_recently(&self, service_id: u64, now: Time) -> bool {
        let is_recent = |closed_at: Time| closed_at.after_ns(BETWEEN_LISTENERS_NS) > now;
        self.closed_listeners
            .iter()
            .any(|(port, closed_at)| *port == port_of(service_id) && is_recent(*closed_at))
    }

    pub(crate) fn listener_for(&mut self, service_id: u64, address: IpAddr) -> Option<&mut Listener> {
        self.listeners.iter_mut().find(|one| one.service_id == service_id && one.addresses.contains(address))
    }

    /// Reserves a backlog entry of the listener for a service at an address.
    pub(crate) fn reserve_backlog_entry(
        &mut self,
        now: Time,
        from: &Path,
        service_id: u64,
        address: IpAddr,
        find_instance: FindInstance<'_>,
    ) -> Result<ListenerId, NoListener> {
        let within_limits = self.is_within_limits(&from.remote);
        let Some(listener) = self.listener_for(service_id, address) else {
            return Err(match find_instance(service_id, address) {
                Some(instance) => NoListener::OtherInstance(instance),
                None if self.was_closed_recently(service_id, now) => NoListener::Drop,
                None => NoListener::Nowhere,
            });
        };
        if !within_limits || listener.waiting >= listener.backlog {
            self.counters.beyond_limits += 1;
            return Err(NoListener::Drop);
        }
        listener.waiting += 1;
        Ok(listener.id)
    }

    /// Adds a request for which a backlog entry is reserved. The peer's communication ID identifies duplicates.
    pub(crate) fn add_request(
        &mut self,
        listener: ListenerId,
        mut connection: Connection,
        remote_id: u32,
        state: State,
    ) -> ConnId {
        let peer = connection.path.remote;
        (connection.remote_id, connection.in_backlog_of) = (remote_id, Some(listener));
        let conn = self.insert(connection);
        self.enter(conn, state);
        self.requests.insert((peer, remote_id), conn);
        conn
    }
}
