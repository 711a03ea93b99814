//! The control queue pairs of an agent, by the number of our end.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;

use terrace_access::proto::{Connect, Endpoint};

use crate::control::Control;
use crate::link::Link;
use crate::serving::Serving;

/// Control queue pairs at a time. Each has a mebibyte of receive buffers, which take memory as they are used.
const PARTIES_MAX: usize = 1024;

/// What we are to the peer.
pub(crate) enum Role {
    Server(Serving),
    Client(Link),
}

/// A control queue pair and what it is for.
pub(crate) struct Party {
    pub control: Control,
    pub role: Role,
}

/// All of them.
#[derive(Default)]
pub(crate) struct Parties {
    by_qpn: HashMap<u32, Party>,
    /// Those whose batch is to be posted.
    touched: HashSet<u32>,
}

impl Parties {
    pub fn is_full(&self) -> bool {
        self.by_qpn.len() >= PARTIES_MAX
    }

    /// Whether there are so many that some of them may be left over from clients that were killed.
    pub fn is_crowded(&self) -> bool {
        self.by_qpn.len() >= PARTIES_MAX / 2
    }

    /// Asks all clients for a sign of life. The connections of those that give none end when its retries do.
    pub fn probe(&mut self) {
        for (qpn, party) in &mut self.by_qpn {
            if matches!(party.role, Role::Server(_)) {
                party.control.probe();
                self.touched.insert(*qpn);
            }
        }
    }

    pub fn insert(&mut self, party: Party) {
        self.by_qpn.insert(party.control.qpn(), party);
    }

    /// The one of that number; what it puts into its batch is posted soon.
    pub fn touch(&mut self, qpn: u32) -> Option<&mut Party> {
        let party = self.by_qpn.get_mut(&qpn)?;
        self.touched.insert(qpn);
        Some(party)
    }

    /// Those that clients have connected to us.
    pub fn clients(&self) -> impl Iterator<Item = &Serving> {
        self.by_qpn.values().filter_map(|party| match &party.role {
            Role::Server(serving) => Some(serving),
            Role::Client(_) => None,
        })
    }

    /// Those that connect us to servers.
    pub fn links(&mut self) -> impl Iterator<Item = (&mut Control, &mut Link)> {
        self.by_qpn.values_mut().filter_map(|party| match &mut party.role {
            Role::Client(link) => Some((&mut party.control, link)),
            Role::Server(_) => None,
        })
    }

    /// Our end of the control queue pair that a client has asked for with these words.
    pub fn asked(&self, remote: SocketAddr, connect: &Connect) -> Option<Endpoint> {
        self.by_qpn.values().find_map(|party| match &party.role {
            Role::Server(serving) if serving.asked(remote, connect) => Some(party.control.endpoint()),
            _ => None,
        })
    }

    /// Ends a connection.
    pub fn remove(&mut self, qpn: u32, why: &str) {
        let Some(party) = self.by_qpn.remove(&qpn) else { return };
        match party.role {
            Role::Server(serving) => {
                tracing::debug!(client = %serving.client(), why, "a client's connection has ended");
                serving.close();
            }
            Role::Client(link) => {
                tracing::warn!(server = %link.remote.remote, why, "a connection to a server has ended");
                link.close();
            }
        }
        party.control.close();
    }

    /// Posts the batches, and goes on with what did not fit before.
    pub fn post(&mut self) {
        let by_qpn = &mut self.by_qpn;
        self.touched.retain(|qpn| {
            let Some(party) = by_qpn.get_mut(qpn) else { return false };
            // A queue pair in error reports it with its completions.
            party.control.post().is_ok() && party.control.has_backlog()
        });
    }
}
