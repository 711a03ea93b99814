//! The control queue pairs of an agent, by the number of our end.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use terrace_access::proto::{Connect, Endpoint};
use terrace_nic::Time;

use crate::account::{
    self, Account, Admission, CONNECTIONS_MAX, CONNECTIONS_PER_ADDRESS_MAX, MANY_PER_ADDRESS, SILENCE_NS_MAX,
    Standing,
};
use crate::control::Control;
use crate::link::Link;
use crate::serving::Serving;

/// Our role towards the peer.
pub(crate) enum Role {
    Server(Serving),
    Client(Link),
}

/// A control queue pair and its role.
pub(crate) struct Party {
    pub control: Control,
    pub role: Role,
}

/// All control queue pairs of an agent.
#[derive(Default)]
pub(crate) struct Parties {
    by_qpn: HashMap<u32, Party>,
    /// Control queue pairs whose batch is to be posted.
    touched: HashSet<u32>,
}

impl Parties {
    /// Whether there are so many that some may belong to clients that were killed.
    pub fn is_crowded(&self) -> bool {
        self.by_qpn.len() >= CONNECTIONS_MAX / 2
    }

    /// Sends keepalives to clients from which no message came since the last call, where there are many: at an
    /// address, or altogether. A connection whose client sends no ACK ends when its retries do. Clients that have
    /// never sent a message, and may be at forged addresses, get no keepalive: their connections end after a time
    /// limit.
    pub fn probe(&mut self, now: Time) {
        let (mut gone, mut spoken) = (Vec::new(), HashMap::new());
        for serving in self.clients().filter(|serving| serving.silent_since().is_none()) {
            *spoken.entry(serving.client()).or_insert(0) += 1;
        }
        let is_crowded = self.is_crowded();
        let among_many = |address| spoken.get(&address).is_some_and(|count| *count >= MANY_PER_ADDRESS);
        for (qpn, party) in &mut self.by_qpn {
            let Role::Server(serving) = &mut party.role else { continue };
            match serving.silent_since() {
                Some(since) if now >= since.after_ns(SILENCE_NS_MAX) => gone.push(*qpn),
                Some(_) => {}
                None if serving.was_heard() => {}
                None if !is_crowded && !among_many(serving.client()) => {}
                None => {
                    party.control.probe();
                    self.touched.insert(*qpn);
                }
            }
        }
        gone.into_iter().for_each(|qpn| self.remove(qpn, "it has never said anything"));
    }

    /// Decides whether a client at an address gets a connection; ends the one that it replaces, if any.
    pub fn admit(&mut self, now: Time, address: IpAddr) -> bool {
        let standing = |(&qpn, party): (&u32, &Party)| match &party.role {
            Role::Server(serving) => {
                let (address, silent_since) = (serving.client(), serving.silent_since());
                Some(Standing { qpn, address, silent_since })
            }
            Role::Client(_) => None,
        };
        match account::admit(now, address, self.by_qpn.iter().filter_map(standing)) {
            Admission::Yes => true,
            Admission::No => false,
            Admission::InPlaceOf(qpn) => {
                self.remove(qpn, "it has said nothing, and others want to");
                true
            }
        }
    }

    /// The quotas of an address's clients, if there are any.
    pub fn account(&self, address: IpAddr) -> Option<Arc<Account>> {
        self.clients().find(|serving| serving.client() == address).map(|serving| serving.account().clone())
    }

    /// A message has come over this connection. False if it was a client's first message, and its address has its
    /// maximum of clients that have sent one.
    pub fn note_heard(&mut self, qpn: u32) -> bool {
        let Some(Party { role: Role::Server(serving), .. }) = self.by_qpn.get_mut(&qpn) else { return true };
        if !serving.note_heard() {
            return true;
        }
        let address = serving.client();
        let spoken = |serving: &&Serving| serving.client() == address && serving.silent_since().is_none();
        self.clients().filter(spoken).count() <= CONNECTIONS_PER_ADDRESS_MAX
    }

    pub fn insert(&mut self, party: Party) {
        self.by_qpn.insert(party.control.qpn(), party);
    }

    /// The control queue pair of that number; its batch will be posted.
    pub fn touch(&mut self, qpn: u32) -> Option<&mut Party> {
        let party = self.by_qpn.get_mut(&qpn)?;
        self.touched.insert(qpn);
        Some(party)
    }

    /// The connections of clients to us.
    pub fn clients(&self) -> impl Iterator<Item = &Serving> {
        self.by_qpn.values().filter_map(|party| match &party.role {
            Role::Server(serving) => Some(serving),
            Role::Client(_) => None,
        })
    }

    /// Our connections to servers.
    pub fn links(&mut self) -> impl Iterator<Item = (&mut Control, &mut Link)> {
        self.by_qpn.values_mut().filter_map(|party| match &mut party.role {
            Role::Client(link) => Some((&mut party.control, link)),
            Role::Server(_) => None,
        })
    }

    /// Our end of the control queue pair that a client has requested with these parameters.
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

    /// Posts the batches, and the backlogs as far as they fit.
    pub fn post(&mut self) {
        let by_qpn = &mut self.by_qpn;
        self.touched.retain(|qpn| {
            let Some(party) = by_qpn.get_mut(qpn) else { return false };
            // A queue pair in error reports it with its completions.
            party.control.post().is_ok() && party.control.has_backlog()
        });
    }
}
