//! A server's handling of one client's requests.
//!
//! A client first requests a grant for a region ([`Body::Magic`]), which states a queue pair of the client and the
//! server's queue pair at the other end. The server checks that its queue pair is connected to this client's host and
//! to the stated queue pair, and is in the region's protection domain. From then on the client's requests have the
//! rights of that queue pair, while the queue pair exists.

mod answers;
mod fetch;
mod read;
mod usage;
mod write;

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};

use terrace_access::proto::{
    Body, Connect, Done, Endpoint, Found, Magic, Message, Open, Opened, Read, Status, Write,
};
use terrace_memory::Waker;
use terrace_nic::{Absence, Cq, Device, Error, Path, Pd, QpCap, QpState, QueuePair, Time, port_of, rc};

use crate::control::{BatchPlace, Control, RECEIVE_COUNT};
use crate::exports::{Export, Exports};
use crate::quota::{QuotaUnit, Quotas};
use answers::{Answers, Report};
use read::ReadJob;
pub use usage::{ClientRegionStats, ClientStats};
use usage::{Request, Usage};
use write::WriteJob;

/// The most requests of one client in execution. A client that obeys its limit stays far below.
const JOBS_MAX: usize = 2 * RECEIVE_COUNT as usize;

/// The most queue pairs of one client for named regions.
const PAIRS_MAX: usize = 256;
/// `ibv_access_flags` of such a queue pair: all that regions may permit.
const PAIR_ACCESS: u32 = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 8 | 1 << 9;

/// Identifies a request in execution: the `wr_id` of its work requests.
pub(crate) type JobId = u64;

/// The state of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// The job waits for the disk, or the network.
    Waiting,
    /// The job is finished; the client gets this status.
    Done(Status),
    /// The job succeeded. Its last data is in the WRITE at this place in the batch.
    Written(BatchPlace),
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
    request: Request,
    _counted: QuotaUnit,
}

/// The right of a client to use a region.
struct Grant {
    qp: Weak<QueuePair>,
    region_id: u64,
}

/// The objects of the node that the handling of requests needs.
pub(crate) struct RequestContext<'a> {
    pub device: &'a Arc<Device>,
    pub pd: &'a Arc<Pd>,
    pub cq: &'a Arc<Cq>,
    pub exports: &'a Exports,
    /// Creates the waker of a job.
    pub waker: &'a dyn Fn(JobId) -> Waker,
    pub next_job: &'a mut JobId,
}

/// The server's half of a control queue pair.
pub(crate) struct Serving {
    path: Path,
    /// The client's parameters in its request for the connection.
    connect: Connect,
    /// The quotas, which all clients of the address share.
    quotas: Arc<Quotas>,
    /// The time of creation while the connection is half-open; `None` after the first message.
    half_open_since: Option<Time>,
    /// Whether a message has come since the last [`Serving::take_active`].
    is_active: bool,
    pairs: Vec<(Arc<QueuePair>, QuotaUnit)>,
    grants: HashMap<u32, Grant>,
    jobs: HashMap<JobId, Running>,
    answers: Answers,
    usage: Usage,
}

impl Serving {
    pub fn new(path: Path, connect: Connect, quotas: Arc<Quotas>, now: Time) -> Serving {
        Serving {
            path,
            connect,
            quotas,
            half_open_since: Some(now),
            is_active: false,
            pairs: Vec::new(),
            grants: HashMap::new(),
            jobs: HashMap::new(),
            answers: Answers::default(),
            usage: Usage::default(),
        }
    }

    /// Whether the client requested this connection with these parameters.
    pub fn is_requested_by(&self, remote: SocketAddr, connect: &Connect) -> bool {
        self.path.remote == remote && self.connect == *connect
    }

    /// The quotas of the client's address.
    pub fn quotas(&self) -> &Arc<Quotas> {
        &self.quotas
    }

    /// The time of creation while the connection is half-open; `None` after the first message.
    pub fn half_open_since(&self) -> Option<Time> {
        self.half_open_since
    }

    /// Marks the connection active, because a message has come. Returns whether it was half-open.
    pub fn mark_active(&mut self) -> bool {
        self.is_active = true;
        self.half_open_since.take().is_some()
    }

    /// Whether a message has come since the last call.
    pub fn take_active(&mut self) -> bool {
        std::mem::take(&mut self.is_active)
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
            // Only this destroys the queue pair, so it does not fail.
            let _ = qp.destroy();
        }
        for running in self.jobs.values() {
            cancel_reservations(&self.quotas, &running.waker);
        }
    }

    /// Handles the requests of a message. Each is answered when it is finished, by [`Serving::send_answers`] at the latest.
    pub fn handle(&mut self, control: &mut Control, message: &Message<'_>, context: &mut RequestContext<'_>) {
        let id = message.id;
        let answer = match &message.body {
            Body::Open(open) => self.open_tables(open, context),
            Body::Magic(magic) => self.grant(magic, context).map(|()| Body::Done(Done::one(Status::Ok))),
            Body::Read(reads) => {
                for (id, read) in (0..).map(|index| id.wrapping_add(index)).zip(reads) {
                    let begun = self.begin_read(control, id, read, context);
                    self.refuse_unless_ok(id, begun);
                }
                return;
            }
            Body::Write(write) => {
                let begun = self.begin_write(control, id, write, context);
                return self.refuse_unless_ok(id, begun);
            }
            Body::Find(name) => find_region(name, context),
            Body::Pair(endpoint) => self.connect_pair(*endpoint, context).map(Body::Paired),
            // The NIC of a memory node waits for absent pages: no client of it needs the two-sided fallback.
            Body::Fetch(_)
            | Body::Atomic(_)
            | Body::Hold(_)
            | Body::Release
            | Body::Describe(_)
            | Body::Forget(_)
            | Body::Probe => Err(Status::Unsupported),
            Body::Opened(_)
            | Body::Found(_)
            | Body::Paired(_)
            | Body::Done(_)
            | Body::Data(_)
            | Body::Value(_) => Err(Status::Invalid),
        };
        match answer {
            Ok(body) => control.send(&Message { id, body }),
            Err(status) => self.refuse_unless_ok(id, Err(status)),
        }
    }

    /// Answers a request that could not begin.
    fn refuse_unless_ok(&mut self, id: u64, begun: Result<(), Status>) {
        if let Err(status) = begun {
            tracing::debug!(?status, client = %self.client(), "request refused");
            self.answers.add(id, status, None);
        }
    }

    /// Appends the answers to finished requests to the batch.
    pub fn send_answers(&mut self, control: &mut Control) {
        for report in self.answers.take() {
            match report {
                Report::Immediate { write, immediate } => control.add_immediate(write, immediate),
                Report::Message { id, done } => control.send(&Message { id, body: Body::Done(done) }),
            }
        }
    }

    fn open_tables(&self, open: &Open, context: &RequestContext<'_>) -> Result<Body<'static>, Status> {
        let export = self.export(open.rkey, context)?;
        if export.region_id != open.region_id {
            return Err(Status::NoSuchRegion);
        }
        let (bitmap, versions) = export.tables();
        Ok(Body::Opened(Opened { bitmap, versions }))
    }

    /// Creates a queue pair in the protection domain of the named regions.
    fn connect_pair(&mut self, peer: Endpoint, context: &RequestContext<'_>) -> Result<Endpoint, Status> {
        let pd = context.exports.named_pd().ok_or(Status::NoSuchRegion)?;
        if self.pairs.len() >= PAIRS_MAX {
            return Err(Status::Busy);
        }
        let counted = self.quotas.count_pair().ok_or(Status::Busy)?;
        let path = Path { remote: SocketAddr::new(self.path.remote.ip(), port_of(peer.qpn)), ..self.path };
        let created = passive_pair(&pd, context.cq, path, peer, PAIR_ACCESS);
        let (qp, endpoint) = created.map_err(|error| match error {
            Error::NoMemory(_) | Error::System(_) => Status::Busy,
            _ => Status::Invalid,
        })?;
        self.pairs.push((qp, counted));
        Ok(endpoint)
    }

    /// Grants a region to the queue pair that the client states.
    fn grant(&mut self, magic: &Magic, context: &RequestContext<'_>) -> Result<(), Status> {
        let export = context.exports.get(magic.rkey).ok_or(Status::NoSuchRegion)?;
        if export.region_id != magic.region_id {
            return Err(Status::NoSuchRegion);
        }
        let qp = context.device.query_qp_by_number(magic.server_qpn).ok_or(Status::AccessDenied)?;
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
    fn export(&self, rkey: u32, context: &RequestContext<'_>) -> Result<Arc<Export>, Status> {
        let grant = self.grants.get(&rkey).ok_or(Status::AccessDenied)?;
        let export = context.exports.get(rkey).ok_or(Status::NoSuchRegion)?;
        if export.region_id != grant.region_id {
            return Err(Status::NoSuchRegion);
        }
        let alive = |qp: Arc<QueuePair>| matches!(qp.state(), QpState::Rtr | QpState::Rts | QpState::Sqd);
        if !grant.qp.upgrade().is_some_and(alive) {
            return Err(Status::AccessDenied);
        }
        Ok(export)
    }

    fn begin_read(
        &mut self,
        control: &mut Control,
        id: u64,
        read: &Read,
        context: &mut RequestContext<'_>,
    ) -> Result<(), Status> {
        let export = self.export(read.rkey, context)?;
        let request = Request::new(read.rkey, false, read.length);
        let job = ReadJob::new(export, read, self.quotas.reads.clone());
        self.begin(control, id, job.map(Job::Read), request, context)
    }

    fn begin_write(
        &mut self,
        control: &mut Control,
        id: u64,
        write: &Write<'_>,
        context: &mut RequestContext<'_>,
    ) -> Result<(), Status> {
        let export = self.export(write.rkey, context)?;
        let request = Request::new(write.rkey, true, write.length);
        let job = WriteJob::new(export, write, self.quotas.writes.clone());
        self.begin(control, id, job.map(Job::Write), request, context)
    }

    /// Begins a job. A refused job is counted, too.
    fn begin(
        &mut self,
        control: &mut Control,
        id: u64,
        job: Result<Job, Status>,
        request: Request,
        context: &mut RequestContext<'_>,
    ) -> Result<(), Status> {
        let counted = self.quotas.count_job().filter(|_| self.jobs.len() < JOBS_MAX).ok_or(Status::Busy);
        let begun = counted.and_then(|counted| Ok((job?, counted)));
        let (job, counted) = begun.inspect_err(|&status| self.usage.count(request, status))?;
        *context.next_job += 1;
        let number = *context.next_job;
        let waker = (context.waker)(number);
        self.jobs.insert(number, Running { id, job, waker, request, _counted: counted });
        self.advance(control, number, context.pd);
        Ok(())
    }

    /// Continues a job after its pager has called the waker, or one of its work requests has completed.
    pub fn advance(&mut self, control: &mut Control, number: JobId, pd: &Arc<Pd>) {
        let Some(running) = self.jobs.get_mut(&number) else { return };
        let progress = match &mut running.job {
            Job::Read(job) => job.advance(control, &running.waker),
            Job::Write(job) => job.advance(control, &running.waker, number, pd),
        };
        let (status, write) = match progress {
            Progress::Waiting => return,
            Progress::Written(write) => (Status::Ok, Some(write)),
            Progress::Done(status) => (status, None),
        };
        self.answers.add(running.id, status, write);
        self.usage.count(running.request, status);
        if let Some(running) = self.jobs.remove(&number) {
            cancel_reservations(&self.quotas, &running.waker);
        }
    }

    /// Handles the completion of a job's work request.
    pub fn handle_completion(&mut self, control: &mut Control, number: JobId, pd: &Arc<Pd>) {
        if let Some(Running { job: Job::Write(job), .. }) = self.jobs.get_mut(&number) {
            job.mark_arrived();
        }
        self.advance(control, number, pd);
    }
}

/// Removes a job from the queues for credits.
fn cancel_reservations(quotas: &Quotas, waker: &Waker) {
    quotas.reads.cancel(waker);
    quotas.writes.cancel(waker);
}

fn find_region(name: &str, context: &RequestContext<'_>) -> Result<Body<'static>, Status> {
    let export = context.exports.find(name).ok_or(Status::NoSuchRegion)?;
    Ok(Body::Found(Found { rkey: export.exported.mr.rkey(), region: export.description() }))
}

/// Creates the passive end of a reliable connection to a known peer. This end posts no work requests.
fn passive_pair(
    pd: &Arc<Pd>,
    cq: &Arc<Cq>,
    remote: Path,
    peer: Endpoint,
    access: u32,
) -> Result<(Arc<QueuePair>, Endpoint), Error> {
    let (qp, own) = rc::new_pair(pd, cq, QpCap::default())?;
    let connected = rc::initialize(&qp, access)
        .and_then(|()| rc::connect(&qp, own, remote, peer, rc::TIMEOUT, rc::RNR_RETRIES));
    if let Err(error) = connected {
        // No other thread has a reference yet.
        let _ = qp.destroy();
        return Err(error);
    }
    Ok((qp, own))
}
