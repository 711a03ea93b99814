//! A server's handling of one client's requests.
//!
//! A client first shows that it may use a region: it names a queue pair of its own and the server's at the other end
//! ([`Body::Magic`]). The server finds that queue pair, and checks that it is connected to this client's host, to the
//! queue pair that the client names, and in the region's protection domain. From then on the client's requests have
//! the rights of that queue pair, while the queue pair exists.

mod fetch;
mod read;
mod usage;
mod write;

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};

use terrace_access::proto::{Body, Connect, Endpoint, Found, Magic, Message, Open, Opened, Status};
use terrace_memory::Waker;
use terrace_nic::{Absence, Cq, Device, Error, Path, Pd, QpState, QueuePair, Time, port_of};

use crate::account::{Account, Counted};
use crate::control::{self, Control, RECEIVE_COUNT};
use crate::exports::{Export, Exports};
use read::ReadJob;
use usage::{Asked, Usage};
pub use usage::{ClientRegionStats, ClientStats};
use write::WriteJob;

/// Requests of one client that are carried out at a time. A client that obeys its limit stays far below.
const JOBS_MAX: usize = 2 * RECEIVE_COUNT as usize;

/// Queue pairs that one client gets for the regions that have names.
const PAIRS_MAX: usize = 256;
/// `ibv_access_flags` of such a queue pair: all that regions may grant.
const PAIR_ACCESS: u32 = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 8 | 1 << 9;

/// Identifies a request that is carried out: `wr_id` of its work requests.
pub(crate) type JobId = u64;

/// The state of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// It waits for the disk, or the network.
    Waiting,
    Done(Status),
    /// It succeeded, and the client has its answer.
    Told,
}

enum Job {
    Read(ReadJob),
    Write(WriteJob),
}

struct Running {
    /// The id that the client chose.
    id: u64,
    job: Job,
    waker: Waker,
    asked: Asked,
    _counted: Counted,
}

/// The right to use a region.
struct Grant {
    qp: Weak<QueuePair>,
    region_id: u64,
}

/// The parts of the node that requests need.
pub(crate) struct Surroundings<'a> {
    pub device: &'a Arc<Device>,
    pub pd: &'a Arc<Pd>,
    pub cq: &'a Arc<Cq>,
    pub exports: &'a Exports,
    /// Makes the waker of a job.
    pub waker: &'a dyn Fn(JobId) -> Waker,
    pub next_job: &'a mut JobId,
}

/// The server's half of a control queue pair.
pub(crate) struct Serving {
    path: Path,
    /// The client's parameters when it asked for the connection.
    connect: Connect,
    /// Shared by all clients of this one's address.
    account: Arc<Account>,
    /// The time since which no message has come; `None` after the first one.
    silent_since: Option<Time>,
    /// Whether a message has come since [`Serving::was_heard`].
    heard: bool,
    pairs: Vec<(Arc<QueuePair>, Counted)>,
    grants: HashMap<u32, Grant>,
    jobs: HashMap<JobId, Running>,
    usage: Usage,
}

impl Serving {
    pub fn new(path: Path, connect: Connect, account: Arc<Account>, now: Time) -> Serving {
        Serving {
            path,
            connect,
            account,
            silent_since: Some(now),
            heard: false,
            pairs: Vec::new(),
            grants: HashMap::new(),
            jobs: HashMap::new(),
            usage: Usage::default(),
        }
    }

    /// Whether the client has asked for this connection with these parameters.
    pub fn asked(&self, remote: SocketAddr, connect: &Connect) -> bool {
        self.path.remote == remote && self.connect == *connect
    }

    /// The quotas of all clients of this one's address.
    pub fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// The time since which no message has come from the client; `None` after the first one.
    pub fn silent_since(&self) -> Option<Time> {
        self.silent_since
    }

    /// A message has come from the client. Returns whether it is the first one.
    pub fn note_heard(&mut self) -> bool {
        self.heard = true;
        self.silent_since.take().is_some()
    }

    /// Whether a message has come from the client since the last call.
    pub fn was_heard(&mut self) -> bool {
        std::mem::take(&mut self.heard)
    }

    /// The client's address.
    pub fn client(&self) -> IpAddr {
        self.path.remote.ip().to_canonical()
    }

    /// The client's counters, for display.
    pub fn stats(&self, exports: &Exports) -> ClientStats {
        let mut pairs: Vec<_> = self.pairs.iter().map(|(qp, _)| qp.clone()).collect();
        for qp in self.grants.values().filter_map(|grant| grant.qp.upgrade()) {
            if !pairs.iter().any(|known| Arc::ptr_eq(known, &qp)) {
                pairs.push(qp);
            }
        }
        let counters: Vec<_> = pairs.iter().map(|qp| qp.counters()).collect();
        let name = |rkey| exports.get(rkey)?.exported.name.clone();
        ClientStats {
            client: format!("{}/{:#x}", self.client(), self.connect.qpn),
            one_sided: counters.iter().map(|counters| counters.requests).sum(),
            fetched: counters.iter().map(|counters| counters.fetches + counters.puts).sum(),
            regions: self.usage.read(name),
        }
    }

    /// Destroys the client's queue pairs and jobs.
    pub fn close(self) {
        for (qp, _counted) in self.pairs {
            // Made here, destroyed only here.
            let _ = qp.destroy();
        }
        for running in self.jobs.values() {
            leave(&self.account, &running.waker);
        }
    }

    /// Handles a request, and answers at once or when it has been carried out.
    pub fn handle(&mut self, control: &mut Control, message: &Message<'_>, around: &mut Surroundings<'_>) {
        let id = message.id;
        let answered = match &message.body {
            Body::Open(open) => self.open(open, around),
            Body::Magic(magic) => self.magic(magic, around).map(|()| Some(Body::Done(Status::Ok))),
            Body::Read(read) => self.export(read.rkey, around).and_then(|export| {
                let asked = Asked::new(read.rkey, false, read.length);
                let job = ReadJob::new(export, read, self.account.answers.clone());
                self.begin(control, id, job.map(Job::Read), asked, around)
            }),
            Body::Write(write) => self.export(write.rkey, around).and_then(|export| {
                let asked = Asked::new(write.rkey, true, write.length);
                let job = WriteJob::new(export, write, self.account.writes.clone());
                self.begin(control, id, job.map(Job::Write), asked, around)
            }),
            // The NIC counts one-sided accesses, and jobs count requests; clients' counters would count both twice.
            Body::Counts(_) => Ok(Some(Body::Done(Status::Ok))),
            Body::Find(name) => find(name, around).map(Some),
            Body::Pair(endpoint) => self.pair(*endpoint, around).map(|end| Some(Body::Paired(end))),
            Body::Opened(_) | Body::Found(_) | Body::Paired(_) | Body::Done(_) => Err(Status::Invalid),
        };
        match answered {
            Ok(Some(body)) => control.send(&Message { id, body }),
            Ok(None) => {}
            Err(status) => {
                tracing::debug!(?status, client = %self.client(), "request refused");
                control.send(&Message { id, body: Body::Done(status) });
            }
        }
    }

    fn open(&self, open: &Open, around: &Surroundings<'_>) -> Result<Option<Body<'static>>, Status> {
        let export = self.export(open.rkey, around)?;
        if export.region_id != open.region_id {
            return Err(Status::NoSuchRegion);
        }
        let (bitmap, versions) = export.tables();
        Ok(Some(Body::Opened(Opened { bitmap, versions })))
    }

    /// Makes a queue pair in the protection domain of the regions that have names.
    fn pair(&mut self, peer: Endpoint, around: &Surroundings<'_>) -> Result<Endpoint, Status> {
        let pd = around.exports.named_pd().ok_or(Status::NoSuchRegion)?;
        if self.pairs.len() >= PAIRS_MAX {
            return Err(Status::Busy);
        }
        let counted = self.account.pair().ok_or(Status::Busy)?;
        let path = Path { remote: SocketAddr::new(self.path.remote.ip(), port_of(peer.qpn)), ..self.path };
        let made = control::passive_pair(&pd, around.cq, path, peer, PAIR_ACCESS);
        let (qp, endpoint) = made.map_err(|error| match error {
            Error::NoMemory(_) | Error::System(_) => Status::Busy,
            _ => Status::Invalid,
        })?;
        self.pairs.push((qp, counted));
        Ok(endpoint)
    }

    fn magic(&mut self, magic: &Magic, around: &Surroundings<'_>) -> Result<(), Status> {
        let export = around.exports.get(magic.rkey).ok_or(Status::NoSuchRegion)?;
        if export.region_id != magic.region_id {
            return Err(Status::NoSuchRegion);
        }
        let qp = around.device.query_qp_by_number(magic.server_qpn).ok_or(Status::AccessDenied)?;
        let attr = qp.query();
        let connected = matches!(attr.state, QpState::Rtr | QpState::Rts | QpState::Sqd);
        let from_client = attr.path.is_some_and(|path| path.remote.ip().to_canonical() == self.client());
        let same_pd = qp.pd().handle() == export.exported.mr.pd().handle();
        if !connected || !from_client || !same_pd || attr.dest_qpn != magic.client_qpn {
            return Err(Status::AccessDenied);
        }
        qp.set_absence(magic.rkey, if magic.on { Absence::Magic } else { Absence::Wait });
        self.grants.insert(magic.rkey, Grant { qp: Arc::downgrade(&qp), region_id: magic.region_id });
        Ok(())
    }

    /// The region that the client may use under this rkey.
    fn export(&self, rkey: u32, around: &Surroundings<'_>) -> Result<Arc<Export>, Status> {
        let grant = self.grants.get(&rkey).ok_or(Status::AccessDenied)?;
        let export = around.exports.get(rkey).ok_or(Status::NoSuchRegion)?;
        if export.region_id != grant.region_id {
            return Err(Status::NoSuchRegion);
        }
        let alive = |qp: Arc<QueuePair>| matches!(qp.state(), QpState::Rtr | QpState::Rts | QpState::Sqd);
        if !grant.qp.upgrade().is_some_and(alive) {
            return Err(Status::AccessDenied);
        }
        Ok(export)
    }

    /// Begins a job of a region that the client may use; counts it, when it is refused.
    fn begin(
        &mut self,
        control: &mut Control,
        id: u64,
        job: Result<Job, Status>,
        asked: Asked,
        around: &mut Surroundings<'_>,
    ) -> Result<Option<Body<'static>>, Status> {
        let counted = self.account.job().filter(|_| self.jobs.len() < JOBS_MAX).ok_or(Status::Busy);
        let begun = counted.and_then(|counted| Ok((job?, counted)));
        let (job, counted) = begun.inspect_err(|&status| self.usage.note(asked, status))?;
        *around.next_job += 1;
        let number = *around.next_job;
        let waker = (around.waker)(number);
        self.jobs.insert(number, Running { id, job, waker, asked, _counted: counted });
        self.advance(control, number, around.pd);
        Ok(None)
    }

    /// Continues a job: its pager has called the waker, or one of its work requests has completed.
    pub fn advance(&mut self, control: &mut Control, number: JobId, pd: &Arc<Pd>) {
        let Some(running) = self.jobs.get_mut(&number) else { return };
        let progress = match &mut running.job {
            Job::Read(job) => job.advance(control, running.id, &running.waker),
            Job::Write(job) => job.advance(control, &running.waker, number, pd),
        };
        let status = match progress {
            Progress::Waiting => return,
            Progress::Told => Status::Ok,
            Progress::Done(status) => {
                control.send(&Message { id: running.id, body: Body::Done(status) });
                status
            }
        };
        self.usage.note(running.asked, status);
        if let Some(running) = self.jobs.remove(&number) {
            leave(&self.account, &running.waker);
        }
    }

    /// A work request of a job has completed.
    pub fn note_completion(&mut self, control: &mut Control, number: JobId, pd: &Arc<Pd>) {
        if let Some(Running { job: Job::Write(job), .. }) = self.jobs.get_mut(&number) {
            job.note_fetched();
        }
        self.advance(control, number, pd);
    }
}

/// A job no longer waits for credits.
fn leave(account: &Account, waker: &Waker) {
    account.answers.leave(waker);
    account.writes.leave(waker);
}

fn find(name: &str, around: &Surroundings<'_>) -> Result<Body<'static>, Status> {
    let export = around.exports.find(name).ok_or(Status::NoSuchRegion)?;
    Ok(Body::Found(Found { rkey: export.exported.mr.rkey(), region: export.description() }))
}
