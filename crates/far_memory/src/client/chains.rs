//! The chains of a node, one for each function.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use terrace_access::proto::Endpoint;
use terrace_nic::{Error, Path, Wc, WcOpcode};

use super::chain::ChainClient;
use super::transport::{Asked, Call, Finished, Transport};
use crate::messages::Outcome;
use crate::protocol::{Function, Grant, Rounds};

/// The client's ends of the chains.
pub(super) struct Chains {
    /// In the order of [`Function::ALL`].
    chains: Vec<ChainClient>,
    /// What an unmapped store returns if the pool is empty.
    empty: u64,
    finished: VecDeque<Finished>,
}

impl Chains {
    pub fn new(asked: &Asked<'_>) -> Result<Chains, Error> {
        let chain = |function| ChainClient::new(asked.pd, asked.cq, Rounds { function, depth: asked.depth });
        let chains = Function::ALL.into_iter().map(chain).collect::<Result<Vec<_>, Error>>()?;
        Ok(Chains { chains, empty: 0, finished: VecDeque::new() })
    }
}

impl Transport for Chains {
    fn endpoints(&self) -> Vec<Endpoint> {
        self.chains.iter().map(ChainClient::endpoint).collect()
    }

    fn connect(&mut self, peers: &[(Path, Endpoint)], grant: Grant) -> Result<(), Error> {
        let Grant::Chains { table, empty, pages: [mapped, unmapped] } = grant else {
            return Err(Error::Invalid("the node grants something else than chains"));
        };
        self.empty = empty;
        let mut ends = self.chains.iter_mut().zip(peers);
        ends.try_for_each(|(chain, (path, peer))| {
            let pages = if chain.function() == Function::MappedStore { mapped } else { unmapped };
            chain.connect(*path, *peer, table, pages)
        })
    }

    fn begin(&mut self, function: Function, call: Call, now: Instant) -> Result<(), Error> {
        self.chains[function.index()].begin(call, now)
    }

    fn post(&mut self) -> Result<(), Error> {
        self.chains.iter_mut().try_for_each(ChainClient::post)
    }

    fn has_qp(&self, qpn: u32) -> bool {
        self.chains.iter().any(|chain| chain.qpn() == qpn)
    }

    fn handle(&mut self, wc: &Wc, now: Instant) -> Result<(), &'static str> {
        let chain = self.chains.iter_mut().find(|chain| chain.qpn() == wc.qpn);
        let Some(chain) = chain.filter(|_| wc.opcode == WcOpcode::RecvRdmaWithImm) else { return Ok(()) };
        let function = chain.function();
        let (call, returned) = chain.finish(wc, now).ok_or("its reply is of another request")?;
        let is_empty = function == Function::UnmappedStore && returned == self.empty;
        let outcome = if is_empty { Outcome::PoolEmpty } else { Outcome::Done };
        self.finished.push_back(Finished { function, call, outcome });
        Ok(())
    }

    fn take_finished(&mut self) -> Option<Finished> {
        self.finished.pop_front()
    }

    fn delay(&mut self, time: Duration, now: Instant) {
        self.chains.iter_mut().for_each(|chain| chain.delay(time, now));
    }

    fn oldest(&self) -> Option<Instant> {
        self.chains.iter().filter_map(ChainClient::oldest).min()
    }

    fn abandon(&mut self) -> Vec<Call> {
        let finished = self.finished.drain(..).map(|finished| finished.call);
        finished.chain(self.chains.iter_mut().flat_map(ChainClient::abandon)).collect()
    }

    #[cfg(test)]
    fn chain(&mut self, function: Function) -> Option<&mut ChainClient> {
        self.chains.get_mut(function.index())
    }
}

#[cfg(test)]
mod tests {
    use terrace_nic::{CqInit, Device, PortConfig};

    use super::super::baseline::Baseline;
    use super::*;
    use crate::scheme::Scheme;

    /// As where the NIC has no memory for the next chain, or the node refuses the client.
    #[test]
    fn connections_that_are_not_used_leave_no_queue_pairs() {
        let port = PortConfig { address: Some([127, 0, 0, 1].into()), ..PortConfig::default() };
        let device = Device::open(port.device().expect("a port")).expect("a device");
        let pd = device.alloc_pd().expect("a protection domain");
        let cq = device.create_cq(CqInit { depth: 64, channel: None, cookie: 0 }).expect("a queue");
        let asked = Asked { device: &device, pd: &pd, cq: &cq, name: "", entries: 16, depth: 4 };
        let objects = device.snapshot().objects;
        drop(Chains::new(&asked).expect("chains"));
        for scheme in [Scheme::Static, Scheme::Dynamic1M, Scheme::TwoSided] {
            drop(Baseline::new(scheme, &asked).expect("a connection"));
        }
        assert_eq!(device.snapshot().objects, objects);
        device.close();
    }
}
