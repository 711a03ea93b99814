//! A client as the node sees it: its translation table and its chains.

use std::net::IpAddr;
use std::sync::Arc;

use terrace_nic::{Buffer, Cq, CqInit, Device, Error, Mr, MrRequest, Pd, rc};

use super::access;
use super::chain::{Chain, Shared};
use super::pool::{Marks, Pool, PoolKeys};
use crate::messages::SlabKey;
use crate::owned::Owned;
use crate::protocol::{ChainEnd, Connect, Connected, ENTRY_BYTES, Function, Grant, Rounds};

/// Address of a table's first entry, for work requests.
const TABLE_BASE: u64 = 1 << 58;
/// Bytes of a table's memory at least: so many are a mapping of their own, at an address that atomics can be aligned to.
const TABLE_BYTES_MIN: u64 = 256 << 10;
/// Entries of the completion queue of failures, of which only the first matters.
const CQ_DEPTH: u32 = 64;

/// A connected client.
pub(crate) struct Tenant {
    pub id: u64,
    pub name: String,
    pub address: IpAddr,
    pub page_count: u64,
    chains: Vec<Chain>,
    table: Arc<Mr>,
    keys: PoolKeys,
    table_memory: Buffer,
    /// Of the chains.
    cq: Owned<Cq>,
    /// Of the queue pairs to the client.
    pd: Owned<Pd>,
    /// Of the table and the keys. A client's requests reach nothing of it, whatever key they name.
    pool_pd: Owned<Pd>,
}

/// How often a client's chains have run, as the NIC counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Executed {
    /// Rounds of each function since the client has connected, modulo 2^32 divided by the blocks of a round.
    pub rounds: [u32; 4],
}

impl Executed {
    /// Rounds of a function since `before`.
    pub fn since(&self, before: &Executed, function: Function) -> u64 {
        let place = function.index();
        let range = u32::MAX / function.blocks();
        u64::from(self.rounds[place].wrapping_sub(before.rounds[place]) & range)
    }
}

impl Tenant {
    /// Makes a client's table and chains, and says what the client has to know.
    pub fn new(
        id: u64,
        device: &Arc<Device>,
        pool: &Pool,
        budget_pages: u64,
        connect: &Connect,
    ) -> Result<(Tenant, Connected), Error> {
        let (pd, pool_pd) = (Owned(device.alloc_pd()?), Owned(device.alloc_pd()?));
        let cq = Owned(device.create_cq(CqInit { depth: CQ_DEPTH, channel: None, cookie: 0 })?);
        cq.ignore_overrun();
        let table_bytes = connect.page_count * ENTRY_BYTES;
        let table_memory =
            Buffer::new(&pool_pd, table_bytes.max(TABLE_BYTES_MIN) as usize, access::LOCAL_WRITE)?;
        let table = pool_pd.reg_mr(MrRequest {
            addr: table_memory.addr(),
            length: table_bytes,
            iova: TABLE_BASE,
            access: access::TABLE,
            paging: None,
        })?;
        let keys = pool.register(&pool_pd).inspect_err(|_| _ = table.dereg())?;
        let mut tenant = Tenant {
            id,
            name: connect.name.clone(),
            address: connect.address,
            page_count: connect.page_count,
            chains: Vec::with_capacity(Function::ALL.len()),
            table,
            keys,
            table_memory,
            cq,
            pd,
            pool_pd,
        };
        // Dropping the tenant takes everything back if a chain cannot be made.
        tenant.make_chains(device, pool, connect)?;
        let mtu_bytes = device.port_attributes().active_mtu as u16;
        let connected = Connected {
            address: device.gids().first().ok_or(Error::Invalid("the device has no address"))?.addr,
            mtu_bytes,
            ends: tenant.chains.iter().map(|chain| ChainEnd::of(chain.endpoint())).collect(),
            budget_pages,
            grant: Grant::Chains { table: TABLE_BASE, empty: pool.empty(), pages: tenant.pages() },
        };
        Ok((tenant, connected))
    }

    /// Where the client may WRITE the pages of stores.
    fn pages(&self) -> [SlabKey; 2] {
        [Function::MappedStore, Function::UnmappedStore]
            .map(|function| self.chains[function.index()].pages().unwrap_or_default())
    }

    fn make_chains(&mut self, device: &Arc<Device>, pool: &Pool, connect: &Connect) -> Result<(), Error> {
        for (function, end) in Function::ALL.into_iter().zip(&connect.ends) {
            let path = rc::path_to(device, connect.address, end.qpn)?
                .ok_or(Error::Invalid("the client's address is of another family"))?;
            let shared = Shared {
                device,
                pd: &self.pd,
                pool_pd: &self.pool_pd,
                cq: &self.cq,
                pool,
                keys: &self.keys,
                table_rkey: self.table.rkey(),
            };
            let rounds = Rounds { function, depth: connect.depth };
            self.chains.push(Chain::new(&shared, rounds, path, end.endpoint(connect.mtu_bytes))?);
        }
        Ok(())
    }

    /// Ends the queue pairs: its chains take and return no page any more. [`Tenant::close_pages`] follows.
    pub fn stop(&self) {
        self.chains.iter().for_each(Chain::stop);
    }

    /// Ends the client's access to memory of the node. Then dropping this does not wait for the client.
    ///
    /// # Errors
    /// EBUSY if the client is stopped in the middle of a WRITE.
    pub fn close_pages(&mut self) -> Result<(), Error> {
        self.chains.iter_mut().try_for_each(Chain::close_pages)
    }

    /// Rounds that the chains have executed.
    pub fn executed(&self) -> Executed {
        let rounds = |place: usize| {
            let chain: &Chain = &self.chains[place];
            chain.executed() / chain.rounds.function.blocks()
        };
        Executed { rounds: std::array::from_fn(rounds) }
    }

    /// Whether no chain is in the middle of taking or returning a page.
    pub fn is_at_rest(&self) -> bool {
        self.chains.iter().all(Chain::is_at_rest)
    }

    /// Why the client is to be disconnected, if one of its chains has failed.
    pub fn failure(&self) -> Option<&'static str> {
        self.chains.iter().find_map(Chain::failure)
    }

    #[cfg(test)]
    pub fn pool_keys(&self) -> Vec<(u64, u32)> {
        let PoolKeys { write, ring, counters, .. } = &self.keys;
        [write, ring, counters].iter().map(|region| (region.iova(), region.rkey())).collect()
    }

    /// Marks the pages of its table, and counts them.
    pub fn mark_pages(&self, pool: &Pool, marks: &mut Marks) -> Result<u64, Error> {
        let mut count = 0;
        pool.for_each_page(&self.table_memory, |page| {
            count += 1;
            if marks.set(page) {
                tracing::error!(page, client = self.name, "a page is in two tables");
            }
        })?;
        Ok(count)
    }
}

impl Drop for Tenant {
    fn drop(&mut self) {
        // Queue pairs first: no chain is to run while its keys go.
        self.chains.clear();
        self.keys.withdraw();
        // It fails only if the device has closed.
        let _ = self.table.dereg();
    }
}
