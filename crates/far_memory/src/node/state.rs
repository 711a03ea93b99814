//! What the NIC's engine does for a node besides executing chains: it admits and removes clients, and repairs the
//! free-page queue.
//!
//! Only the thread that makes progress for the device executes chains, and it calls [`State::advance`] between its passes. So
//! no chain runs meanwhile. Nobody else makes progress for this device.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};
use std::time::Instant;

use terrace_nic::{Device, Error, ProgressCallback};
use terrace_sync::{Backlog, Mutex};

use super::pool::{Marks, Pool};
use super::reclaim::Reclaimer;
use super::service::{Expelled, Service, check_places};
use super::tenant::{Executed, Tenant};
use crate::protocol::{Connect, Connected, Function};
use crate::scheme::Scheme;
use crate::status::{ClientPages, NodeStatus};

/// Pages of all clients' spaces together at most, for each page of the pool. A repair reads all tables, of 8 bytes for each. Of each
/// client's space, the first pages do not count, as many as the pool has: so no client takes the room of others.
const SPACES_FACTOR: u64 = 64;

/// What the control thread asks for.
enum Task {
    /// Admit a client under this number, and say what it is to know or why not.
    Admit(u64, Box<Connect>, Sender<Result<Connected, String>>),
    /// Remove a client.
    Remove(u64),
    /// Repair the free-page queue, and count pages.
    Repair,
}

struct Inner {
    tenants: Vec<Held>,
    /// Since when a repair is due that waits for chains to come to rest.
    repair_since: Option<Instant>,
    repairs: u64,
    /// Pages of clients that have gone, until the next repair frees them.
    expelled: Vec<Expelled>,
}

/// A client and what it has.
struct Held {
    tenant: Tenant,
    /// Pages at the last repair, and the rounds until then.
    counted_pages: u64,
    counted_at: Executed,
}

impl Held {
    /// Pages that the client has by the NIC's counters. A store into an empty pool counts until the next repair.
    fn pages(&self) -> u64 {
        let executed = self.tenant.executed();
        let stored = executed.since(&self.counted_at, Function::UnmappedStore);
        let freed = executed.since(&self.counted_at, Function::Invalidate);
        (self.counted_pages + stored).saturating_sub(freed)
    }
}

/// The state of a node.
pub(crate) struct State {
    device: Weak<Device>,
    pool: Pool,
    clients_max: usize,
    budget_pages: u64,
    tasks: Backlog<Task>,
    inner: Mutex<Inner>,
    reclaimer: Reclaimer<Tenant>,
}

impl State {
    pub fn new(
        device: &Arc<Device>,
        pool: Pool,
        clients_max: usize,
        budget_pages: u64,
    ) -> Result<State, Error> {
        Ok(State {
            device: Arc::downgrade(device),
            pool,
            clients_max,
            budget_pages,
            tasks: Backlog::default(),
            inner: Mutex::new(Inner {
                tenants: Vec::new(),
                repair_since: None,
                repairs: 0,
                expelled: Vec::new(),
            }),
            reclaimer: Reclaimer::start(
                |tenant: &Tenant| tenant.address,
                |mut tenant| tenant.close_pages().is_err().then_some(tenant),
            )?,
        })
    }

    /// Has the engine do something soon.
    fn request(&self, task: Task) {
        self.tasks.add(task);
        if let Some(device) = self.device.upgrade() {
            device.request_callbacks();
        }
    }

    fn make_tenant(&self, inner: &mut Inner, id: u64, connect: &Connect) -> Result<Connected, String> {
        let device = self.device.upgrade().ok_or("the memory node is ending")?;
        let addresses = inner.tenants.iter().map(|held| held.tenant.address);
        check_places(self.clients_max, addresses.chain(self.reclaimer.addresses()), connect.address)?;
        let pool_pages = self.pool.page_count();
        let spaces = inner.tenants.iter().map(|held| held.tenant.page_count).chain([connect.page_count]);
        let beyond: u64 = spaces.map(|pages| pages.saturating_sub(pool_pages)).sum();
        if beyond > pool_pages.saturating_mul(SPACES_FACTOR) {
            return Err(format!(
                "the spaces of its clients are too large together: one of up to {pool_pages} pages has room"
            ));
        }
        let made = Tenant::new(id, &device, &self.pool, self.budget_pages, connect);
        let (tenant, connected) = made.map_err(|error| format!("no chains for the client: {error}"))?;
        inner.tenants.push(Held { tenant, counted_pages: 0, counted_at: Executed::default() });
        Ok(connected)
    }

    fn handle(&self, inner: &mut Inner, task: Task) {
        match task {
            Task::Admit(id, connect, answer) => {
                let admitted = self.make_tenant(inner, id, &connect);
                // If nobody waits any more, the task that removes the client comes next.
                let _ = answer.send(admitted);
            }
            Task::Remove(id) => {
                // A client that was refused is none.
                let Some(place) = inner.tenants.iter().position(|held| held.tenant.id == id) else { return };
                let Held { tenant, .. } = inner.tenants.remove(place);
                // Its chains run no more: the repair frees its pages.
                tenant.stop();
                self.reclaimer.end(tenant);
                inner.repair_since.get_or_insert_with(Instant::now);
            }
            Task::Repair => {
                inner.repair_since.get_or_insert_with(Instant::now);
            }
        }
    }

    /// Frees what is in no table: the pages of clients that have gone, and those that clients have unmapped by storing
    /// over them. Waits for a pass in which all chains are at rest.
    fn repair(&self, inner: &mut Inner) -> Result<bool, Error> {
        // A failed chain never comes to rest.
        let is_moving = |held: &Held| !held.tenant.is_at_rest() && held.tenant.failure().is_none();
        if inner.tenants.iter().any(is_moving) {
            return Ok(false);
        }
        inner.repair_since = None;
        inner.repairs += 1;
        let mut marks = Marks::new(self.pool.page_count());
        for held in &mut inner.tenants {
            held.counted_pages = held.tenant.mark_pages(&self.pool, &mut marks)?;
            held.counted_at = held.tenant.executed();
            if held.counted_pages > self.budget_pages {
                let reason = format!("{} pages, with a budget of {}", held.counted_pages, self.budget_pages);
                inner.expelled.push(Expelled { id: held.tenant.id, reason });
            }
        }
        self.pool.rebuild(&marks)?;
        Ok(true)
    }
}

impl Service for State {
    fn admit(&self, id: u64, connect: Box<Connect>, answer: Sender<Result<Connected, String>>) {
        self.request(Task::Admit(id, connect, answer));
    }

    fn remove(&self, id: u64) {
        self.request(Task::Remove(id));
    }

    /// Compares counters with budgets and looks for failures, and has the engine act if there is something to do.
    fn monitor(&self) -> Vec<Expelled> {
        let mut inner = self.inner.lock();
        let mut expelled = std::mem::take(&mut inner.expelled);
        let failed = inner.tenants.iter().filter_map(|Held { tenant, .. }| {
            tenant.failure().map(|reason| Expelled { id: tenant.id, reason: reason.into() })
        });
        expelled.extend(failed);
        let is_over = inner.tenants.iter().any(|held| held.pages() > self.budget_pages);
        drop(inner);
        if is_over || self.pool.free().is_ok_and(|free| free.is_overrun) {
            self.request(Task::Repair);
        }
        expelled
    }

    fn status(&self) -> NodeStatus {
        let inner = self.inner.lock();
        let clients = inner.tenants.iter().map(|held| {
            let executed = held.tenant.executed();
            let rounds = |function: Function| executed.since(&Executed::default(), function);
            ClientPages {
                name: held.tenant.name.clone(),
                address: held.tenant.address,
                page_count: held.tenant.page_count,
                pages: held.pages(),
                loads: rounds(Function::Load),
                mapped_stores: rounds(Function::MappedStore),
                unmapped_stores: rounds(Function::UnmappedStore),
                invalidations: rounds(Function::Invalidate),
            }
        });
        NodeStatus {
            scheme: Scheme::Odrp,
            page_count: self.pool.page_count(),
            free_pages: self.pool.free().map_or(0, |free| free.count),
            budget_pages: self.budget_pages,
            repairs: inner.repairs,
            clients: clients.collect(),
        }
    }

    #[cfg(test)]
    fn pool_keys(&self) -> Vec<(u64, u32)> {
        self.inner.lock().tenants.last().map_or(Vec::new(), |held| held.tenant.pool_keys())
    }
}

impl ProgressCallback for State {
    fn advance(&self) -> bool {
        let Some(mut inner) = self.inner.try_lock() else {
            // The control thread reads counters.
            if !self.tasks.is_empty()
                && let Some(device) = self.device.upgrade()
            {
                device.request_callbacks();
            }
            return false;
        };
        let mut active = false;
        for task in self.tasks.take() {
            self.handle(&mut inner, task);
            active = true;
        }
        if inner.repair_since.is_some() {
            match self.repair(&mut inner) {
                Ok(done) => active |= done,
                Err(error) => {
                    tracing::error!(%error, "the free-page queue cannot be repaired");
                    inner.repair_since = None;
                }
            }
        }
        active
    }

    fn report(&self) -> Option<(String, serde_json::Value)> {
        Some(("memory_node".into(), serde_json::to_value(self.status()).ok()?))
    }
}
