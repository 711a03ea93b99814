//! The simulated peer: memories whose units are mapped and unmapped, keys on them, and a server of concurrent RPCs.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use smallvec::smallvec;
use terrace_access::layout::Layout;
use terrace_access::proto::{Body, Message, Mode, Read, RegionDescription, Source, Status, Write};
use terrace_access::region::{Knowledge, Region};
use terrace_access::signature::SignaturePage;

use crate::rng::Rng;

/// Memory of the peer. Its index is the offset on the grid.
pub struct Memory {
    pub bytes: Vec<u8>,
    pub unit_bytes: usize,
    /// Of an extended memory: the signature page, and the presence of each unit.
    pub paging: Option<(SignaturePage, Vec<bool>)>,
}

impl Memory {
    /// One copy of a READ by the NIC.
    pub fn copy(&self, offset: usize, out: &mut [u8], magic: bool) {
        out.copy_from_slice(&self.bytes[offset..offset + out.len()]);
        let Some((signature, present)) = self.paging.as_ref().filter(|_| magic) else { return };
        for (at, byte) in (offset..).zip(out) {
            if !present[at / self.unit_bytes] {
                *byte = signature.bytes()[at % 4096];
            }
        }
    }
}

/// The region of an rkey.
#[derive(Clone, Debug)]
pub struct Key {
    pub memory: usize,
    pub base_va: u64,
    pub length: usize,
    /// The region's offset on the grid.
    pub lead: usize,
    pub knowledge: Knowledge,
    /// The client's knowledge once the server has answered.
    pub truth: Knowledge,
}

impl Key {
    pub fn offset(&self, va: u64) -> usize {
        (va - self.base_va) as usize + self.lead
    }
}

/// An RPC that is being served.
pub struct Job {
    pub id: u64,
    steps: VecDeque<Step>,
    status: Status,
}

enum Step {
    /// Reads bytes of a memory, for a later write to `to` in the client's memory.
    ReadMemory {
        memory: usize,
        offset: usize,
        length: usize,
        to: u64,
    },
    WriteClient {
        to: u64,
        data: Vec<u8>,
    },
    /// Reads bytes of the client's memory, for a later write to a memory.
    ReadClient {
        from: u64,
        memory: usize,
        offset: usize,
        length: usize,
    },
    WriteMemory {
        memory: usize,
        offset: usize,
        data: Vec<u8>,
    },
    Grant {
        rkey: u32,
        on: bool,
    },
}

pub struct Server {
    pub memories: Vec<Memory>,
    pub keys: Vec<Key>,
    /// The keys for which the NIC answers with signature pages on this queue pair.
    pub magic: HashSet<u32>,
    /// The keys that the client may name in calls.
    pub granted: HashSet<u32>,
    pub mode: Option<Mode>,
    /// One in this many calls is answered with `Busy`; none if 0.
    pub busy_one_in: usize,
    /// The number of calls before one is answered with this status.
    pub fail_after: Option<(usize, Status)>,
    pub fetched_pages: usize,
    pub calls: usize,
}

pub const RKEY_BASE: u32 = 0x4400;

impl Server {
    pub fn key(&self, rkey: u32) -> &Key {
        &self.keys[(rkey - RKEY_BASE) as usize]
    }

    /// Begins to serve the requests of a message.
    pub fn accept(&mut self, bytes: &[u8], rng: &mut Rng) -> Vec<Job> {
        let Message { id, body } = Message::decode(bytes).expect("the client sends valid messages");
        match body {
            Body::Read(reads) => {
                let reads = (id..).zip(reads);
                reads.map(|(id, read)| self.accept_one(id, &Body::Read(smallvec![read]), rng)).collect()
            }
            body => vec![self.accept_one(id, &body, rng)],
        }
    }

    fn accept_one(&mut self, id: u64, body: &Body<'_>, rng: &mut Rng) -> Job {
        self.calls += 1;
        let job = |steps, status| Job { id, steps, status };
        if self.busy_one_in > 0 && rng.one_in(self.busy_one_in) {
            return job(VecDeque::new(), Status::Busy);
        }
        match &mut self.fail_after {
            Some((0, status)) => return job(VecDeque::new(), *status),
            Some((calls, _)) => *calls -= 1,
            None => {}
        }
        match body {
            Body::Magic(magic) => {
                assert_eq!((magic.client_qpn, magic.server_qpn), (0x77, 0x88));
                assert_eq!(magic.on, self.mode == Some(Mode::OneSided));
                assert!(!self.granted.contains(&magic.rkey), "the grant is requested once");
                match rng.below(8) {
                    0 => job(VecDeque::new(), Status::AccessDenied),
                    1 => job(VecDeque::new(), Status::NoSuchRegion),
                    _ => job(VecDeque::from([Step::Grant { rkey: magic.rkey, on: magic.on }]), Status::Ok),
                }
            }
            Body::Read(reads) => match self.read_steps(&reads[0]) {
                Ok(steps) => job(steps, Status::Ok),
                Err(status) => job(VecDeque::new(), status),
            },
            Body::Write(write) => job(self.write_steps(write), Status::Ok),
            body => panic!("a session does not send {body:?}"),
        }
    }

    fn read_steps(&mut self, read: &Read) -> Result<VecDeque<Step>, Status> {
        assert!(self.granted.contains(&read.rkey), "without a grant there is no call");
        let key = self.key(read.rkey).clone();
        let Knowledge::Extended(region) = &key.truth else { return Err(Status::Plain) };
        if !region.layout().covers(read.va, read.length.into()) {
            return Err(Status::OutOfRange);
        }
        let in_page = region.layout().page_offset(read.va);
        let wanted = match &read.pages {
            Some(pages) => {
                assert_eq!(usize::from(pages.offset), in_page);
                pages.wanted.runs().flatten().collect::<Vec<_>>()
            }
            None => (0..region.layout().page_count(read.va, read.length.into())).collect(),
        };
        self.fetched_pages += wanted.len();
        let steps = wanted.into_iter().map(|page| {
            let start = (page * 4096).max(in_page);
            let end = ((page + 1) * 4096).min(in_page + read.length as usize);
            let to = read.dest_va + (start - in_page) as u64;
            Step::ReadMemory {
                memory: key.memory,
                offset: key.offset(read.va) - in_page + start,
                length: end - start,
                to,
            }
        });
        Ok(steps.collect())
    }

    fn write_steps(&mut self, write: &Write<'_>) -> VecDeque<Step> {
        assert!(self.granted.contains(&write.rkey), "without a grant there is no call");
        let key = self.key(write.rkey);
        let (memory, offset) = (key.memory, key.offset(write.va));
        match write.source {
            Source::Inline(data) => {
                let (left, right) = data.split_at(data.len() / 2);
                VecDeque::from([
                    Step::WriteMemory { memory, offset, data: left.to_vec() },
                    Step::WriteMemory { memory, offset: offset + left.len(), data: right.to_vec() },
                ])
            }
            Source::Remote { va, .. } => {
                let length = write.length as usize;
                let half = length / 2;
                VecDeque::from([
                    Step::ReadClient { from: va, memory, offset, length: half },
                    Step::ReadClient {
                        from: va + half as u64,
                        memory,
                        offset: offset + half,
                        length: length - half,
                    },
                ])
            }
        }
    }

    /// Executes one step of a call; its outcome when it is done.
    pub fn serve(&mut self, job: &mut Job, local: &mut Local) -> Option<Status> {
        let Some(step) = job.steps.pop_front() else { return Some(job.status) };
        match step {
            Step::ReadMemory { memory, offset, length, to } => {
                let data = self.memories[memory].bytes[offset..offset + length].to_vec();
                job.steps.push_back(Step::WriteClient { to, data });
            }
            Step::WriteClient { to, data } => local.slice(to, data.len()).copy_from_slice(&data),
            Step::ReadClient { from, memory, offset, length } => {
                let data = local.slice(from, length).to_vec();
                job.steps.push_back(Step::WriteMemory { memory, offset, data });
            }
            Step::WriteMemory { memory, offset, data } => {
                self.memories[memory].bytes[offset..offset + data.len()].copy_from_slice(&data);
            }
            Step::Grant { rkey, on } => {
                self.granted.insert(rkey);
                if on {
                    self.magic.insert(rkey);
                }
            }
        }
        None
    }
}

/// The client's memory.
#[derive(Clone)]
pub struct Local {
    pub bytes: Vec<u8>,
    /// Accesses fail with a protection error.
    pub is_gone: bool,
}

pub const LOCAL_BASE: u64 = 0x5000_0000;
pub const LKEY: u32 = 0x11;

impl Local {
    pub fn slice(&mut self, addr: u64, length: usize) -> &mut [u8] {
        let start = (addr - LOCAL_BASE) as usize;
        &mut self.bytes[start..start + length]
    }
}

impl terrace_access::session::LocalMemory for Local {
    fn read(
        &self,
        sge: &terrace_transport::Sge,
        offset: u64,
        out: &mut [u8],
    ) -> Result<(), terrace_transport::LocalError> {
        assert!(sge.lkey == LKEY && offset + out.len() as u64 <= u64::from(sge.length));
        if self.is_gone {
            return Err(terrace_transport::LocalError::Protection);
        }
        let start = (sge.addr + offset - LOCAL_BASE) as usize;
        out.copy_from_slice(&self.bytes[start..start + out.len()]);
        Ok(())
    }
}

/// A key on an extended memory, from an offset of its grid on.
pub fn extended_key(
    index: usize,
    memory: usize,
    seed: u8,
    base_va: u64,
    lead: usize,
    length: usize,
    unit: u32,
) -> Key {
    let layout =
        Layout::new(base_va, length as u64, lead as u64, unit).expect("the test's layouts are valid");
    let signature_key = [seed; 32];
    let description =
        RegionDescription { layout, signature_key, region_id: 900 + memory as u64, mode: Mode::OneSided };
    let region = Region::new(RKEY_BASE + index as u32, description);
    let truth = Knowledge::Extended(Arc::new(region));
    Key { memory, base_va, length, lead, knowledge: truth.clone(), truth }
}
