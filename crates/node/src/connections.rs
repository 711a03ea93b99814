//! The connections of an agent: its control queue pairs, by the QPN of our end.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use terrace_access::proto::{Connect, Endpoint};
use terrace_nic::Time;

use crate::control::Control;
use crate::link::Link;
use crate::quota::{
    Admission, CONNECTIONS_MAX, CONNECTIONS_PER_ADDRESS_MAX, HALF_OPEN_NS_MAX, KEEPALIVE_CONNECTIONS,
    OpenConnection, Quotas, admit,
};
use crate::serving::Serving;

/// Our role towards the peer.
pub(crate) enum Role {
    Server(Serving),
    Client(Link),
}

/// A control queue pair and its role.
pub(crate) struct Connection {
    pub control: Control,
    pub role: Role,
}

/// All connections of an agent.
#[derive(Default)]
pub(crate) struct Connections {
    by_qpn: HashMap<u32, Connection>,
    /// Connections whose batch is to be posted.
    unposted: HashSet<u32>,
}

impl Connections {
    /// Whether the connections are so many that some may belong to dead clients.
    pub fn is_crowded(&self) -> bool {
        self.by_qpn.len() >= CONNECTIONS_MAX / 2
    }

    /// Sends keepalives to clients without a message since the last call, if there are many clients at their address, or
    /// in total. A connection whose client sends no ACK ends after its retries. Half-open connections, which may be from
    /// forged addresses, get no keepalive and end after a time limit.
    pub fn probe(&mut self, now: Time) {
        let (mut expired, mut active) = (Vec::new(), HashMap::new());
        for serving in self.clients().filter(|serving| serving.half_open_since().is_none()) {
            *active.entry(serving.client()).or_insert(0) += 1;
        }
        let is_crowded = self.is_crowded();
        let is_among_many =
            |address| active.get(&address).is_some_and(|count| *count >= KEEPALIVE_CONNECTIONS);
        for (qpn, connection) in &mut self.by_qpn {
            let Role::Server(serving) = &mut connection.role else { continue };
            match serving.half_open_since() {
                Some(since) if now >= since.after_ns(HALF_OPEN_NS_MAX) => expired.push(*qpn),
                Some(_) => {}
                None if serving.take_active() => {}
                None if !is_crowded && !is_among_many(serving.client()) => {}
                None => {
                    connection.control.probe();
                    self.unposted.insert(*qpn);
                }
            }
        }
        expired.into_iter().for_each(|qpn| self.remove(qpn, "it has sent no message"));
    }

    /// Decides whether a client at an address gets a connection. Ends the connection that it replaces, if any.
    pub fn admit(&mut self, now: Time, address: IpAddr) -> bool {
        let connection = |(&qpn, connection): (&u32, &Connection)| match &connection.role {
            Role::Server(serving) => {
                let (address, half_open_since) = (serving.client(), serving.half_open_since());
                Some(OpenConnection { qpn, address, half_open_since })
            }
            Role::Client(_) => None,
        };
        match admit(now, address, self.by_qpn.iter().filter_map(connection)) {
            Admission::Accept => true,
            Admission::Refuse => false,
            Admission::Replace(qpn) => {
                self.remove(qpn, "it has sent no message, and a new client needs a connection");
                true
            }
        }
    }

    /// The quotas of an address, if it has clients.
    pub fn quotas(&self, address: IpAddr) -> Option<Arc<Quotas>> {
        self.clients().find(|serving| serving.client() == address).map(|serving| serving.quotas().clone())
    }

    /// Marks a connection active, because a message has come over it. False if it was half-open, and its address already
    /// has the maximum of active ones.
    pub fn mark_active(&mut self, qpn: u32) -> bool {
        let Some(Connection { role: Role::Server(serving), .. }) = self.by_qpn.get_mut(&qpn) else {
            return true;
        };
        if !serving.mark_active() {
            return true;
        }
        let address = serving.client();
        let is_active =
            |serving: &&Serving| serving.client() == address && serving.half_open_since().is_none();
        self.clients().filter(is_active).count() <= CONNECTIONS_PER_ADDRESS_MAX
    }

    /// Adds a connection.
    pub fn insert(&mut self, connection: Connection) {
        self.by_qpn.insert(connection.control.qpn(), connection);
    }

    /// The connection with this QPN. [`Connections::post`] will post its batch.
    pub fn get_to_post(&mut self, qpn: u32) -> Option<&mut Connection> {
        let connection = self.by_qpn.get_mut(&qpn)?;
        self.unposted.insert(qpn);
        Some(connection)
    }

    /// The server's half of each client's connection.
    pub fn clients(&self) -> impl Iterator<Item = &Serving> {
        self.by_qpn.values().filter_map(|connection| match &connection.role {
            Role::Server(serving) => Some(serving),
            Role::Client(_) => None,
        })
    }

    /// The connections to servers.
    pub fn links(&mut self) -> impl Iterator<Item = (&mut Control, &mut Link)> {
        self.by_qpn.values_mut().filter_map(|connection| match &mut connection.role {
            Role::Client(link) => Some((&mut connection.control, link)),
            Role::Server(_) => None,
        })
    }

    /// Our end of the control queue pair that a client has requested before with these parameters.
    pub fn find_requested(&self, remote: SocketAddr, connect: &Connect) -> Option<Endpoint> {
        self.by_qpn.values().find_map(|connection| match &connection.role {
            Role::Server(serving) if serving.is_requested_by(remote, connect) => {
                Some(connection.control.endpoint())
            }
            _ => None,
        })
    }

    /// Ends a connection.
    pub fn remove(&mut self, qpn: u32, why: &str) {
        let Some(connection) = self.by_qpn.remove(&qpn) else { return };
        match connection.role {
            Role::Server(serving) => {
                tracing::debug!(client = %serving.client(), why, "a client's connection has ended");
                serving.close();
            }
            Role::Client(link) => {
                tracing::warn!(server = %link.remote.remote, why, "a connection to a server has ended");
                link.close();
            }
        }
        connection.control.close();
    }

    /// Posts the batches, with the answers to finished requests, and the backlogs as far as they fit.
    pub fn post(&mut self) {
        let by_qpn = &mut self.by_qpn;
        self.unposted.retain(|qpn| {
            let Some(connection) = by_qpn.get_mut(qpn) else { return false };
            if let Role::Server(serving) = &mut connection.role {
                serving.send_answers(&mut connection.control);
            }
            // A queue pair in the error state reports that by its completions.
            connection.control.post().is_ok() && connection.control.has_backlog()
        });
    }
}
