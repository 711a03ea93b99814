//! A session, its queue pair, its peer and the program, advanced one small step at a time.

use std::collections::VecDeque;

use terrace_access::proto::{MESSAGE_BYTES_MAX, Status};
use terrace_access::session::{Action, Session};
use terrace_transport::{Payload, SendFlags, SendOp, SendWr, Sge, Time, Wc, WcStatus};

use crate::rng::Rng;
use crate::server::{Job, Local, Server};

/// A message that the peer's program receives, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    pub data: Vec<u8>,
}

/// A READ whose responses are not complete yet.
struct Reading {
    wr: SendWr,
    done: usize,
}

/// The queue pair's pending responses, in order.
enum Response {
    /// Data for the client's memory, from `offset` in the list on.
    Data {
        sges: Vec<Sge>,
        offset: usize,
        data: Vec<u8>,
    },
    Complete(Wc),
}

pub struct World {
    pub session: Session,
    pub server: Server,
    pub local: Local,
    pub rng: Rng,
    pub now: Time,
    pub mtu: usize,
    posted: VecDeque<SendWr>,
    reading: Option<Reading>,
    responses: VecDeque<Response>,
    sent_calls: VecDeque<Vec<u8>>,
    jobs: Vec<Job>,
    answers: VecDeque<(u64, Status)>,
    pub completions: Vec<Wc>,
    pub received: Vec<Received>,
    /// The queue pair's state.
    pub in_error: bool,
    /// After this many posted work requests, the next one fails with this status.
    pub fail_post: Option<(usize, WcStatus)>,
    pub is_peer_gone: bool,
    pub breaks: usize,
    pub outdated: Vec<u32>,
    pub granted: Vec<u32>,
    pub posts: usize,
}

impl World {
    pub fn new(session: Session, server: Server, local: Local, rng: Rng, mtu: usize) -> World {
        World {
            session,
            server,
            local,
            rng,
            now: Time(0),
            mtu,
            posted: VecDeque::new(),
            reading: None,
            responses: VecDeque::new(),
            sent_calls: VecDeque::new(),
            jobs: Vec::new(),
            answers: VecDeque::new(),
            completions: Vec::new(),
            received: Vec::new(),
            in_error: false,
            fail_post: None,
            is_peer_gone: false,
            breaks: 0,
            outdated: Vec::new(),
            granted: Vec::new(),
            posts: 0,
        }
    }

    /// One step of a random component. Returns the completion, if the program got one.
    pub fn step(&mut self) -> Option<Wc> {
        self.now = self.now.after_ns(self.rng.next() % 20_000);
        match self.rng.below(10) {
            0..=3 => return self.act(),
            4..=5 => self.transmit(),
            6 => self.receive(),
            7 => {
                if let Some(bytes) = self.sent_calls.pop_front() {
                    self.jobs.extend(self.server.accept(&bytes, &mut self.rng));
                }
            }
            8 => self.serve(),
            _ => {
                if let Some((id, status)) = self.answers.pop_front() {
                    assert!(self.session.handle_done(self.now, id, status));
                }
            }
        }
        None
    }

    /// Executes the session's next action.
    pub fn act(&mut self) -> Option<Wc> {
        match self.session.poll_action(self.now, &self.local)? {
            Action::Post(wr) => {
                self.posts += 1;
                assert!(wr.flags.contains(SendFlags::SIGNALED));
                self.posted.push_back(wr);
            }
            Action::Call(call) => {
                let mut buffer = vec![0; MESSAGE_BYTES_MAX];
                let length = call.encode(&mut buffer).expect("a call fits");
                buffer.truncate(length);
                if !self.is_peer_gone {
                    self.sent_calls.push_back(buffer);
                }
            }
            Action::Complete(wc) => {
                self.completions.push(wc);
                return Some(wc);
            }
            Action::Outdated(rkey) => self.outdated.push(rkey),
            Action::Granted(region) => self.granted.push(region.rkey()),
            Action::Break => {
                self.breaks += 1;
                self.in_error = true;
            }
        }
        None
    }

    /// The queue pair executes the next request, or a packet of it. Data to send is gathered as late as possible.
    pub fn transmit(&mut self) {
        if self.in_error {
            return self.flush_posted();
        }
        if let Some(reading) = self.reading.take() {
            return self.answer_packet(reading);
        }
        let is_fenced = self.posted.front().is_some_and(|wr| wr.flags.contains(SendFlags::FENCE));
        if is_fenced && self.responses.iter().any(|response| matches!(response, Response::Data { .. })) {
            return;
        }
        let Some(wr) = self.posted.pop_front() else { return };
        if let Some((count, status)) = &mut self.fail_post {
            if *count == 0 {
                let status = *status;
                self.in_error = true;
                self.complete(&wr, status);
                return;
            }
            *count -= 1;
        }
        match wr.op {
            SendOp::Read { .. } if !wr.payload.is_empty() => self.reading = Some(Reading { wr, done: 0 }),
            _ => {
                self.execute(&wr);
                self.complete(&wr, WcStatus::Success);
            }
        }
    }

    fn flush_posted(&mut self) {
        let reading = self.reading.take().map(|reading| reading.wr);
        for wr in reading.into_iter().chain(std::mem::take(&mut self.posted)) {
            self.complete(&wr, WcStatus::Flushed);
        }
    }

    fn complete(&mut self, wr: &SendWr, status: WcStatus) {
        let wc =
            Wc { wr_id: wr.wr_id, status, byte_len: wr.payload.len() as u32, qpn: 0x77, ..Wc::default() };
        self.responses.push_back(Response::Complete(wc));
    }

    /// Copies one response packet of a READ.
    fn answer_packet(&mut self, mut reading: Reading) {
        let (total, SendOp::Read { va, rkey }) = (reading.wr.payload.len() as usize, reading.wr.op) else {
            panic!("only READs are answered in packets");
        };
        let mut data = vec![0; self.mtu.min(total - reading.done)];
        let key = self.server.key(rkey);
        let offset = key.offset(va) + reading.done;
        self.server.memories[key.memory].copy(offset, &mut data, self.server.magic.contains(&rkey));
        let (offset, length) = (reading.done, data.len());
        self.responses.push_back(Response::Data { sges: sges_of(&reading.wr), offset, data });
        reading.done += length;
        if reading.done == total {
            self.complete(&reading.wr, WcStatus::Success);
        } else {
            self.reading = Some(reading);
        }
    }

    fn execute(&mut self, wr: &SendWr) {
        let data = self.gather(wr);
        match wr.op {
            SendOp::Send => self.received.push(Received { data }),
            SendOp::Write { va, rkey } => self.store(rkey, va, &data),
            SendOp::WriteImm { va, rkey, .. } => {
                self.store(rkey, va, &data);
                self.received.push(Received { data });
            }
            SendOp::FetchAdd { va, rkey, add } => {
                let old = self.load(rkey, va);
                self.store(rkey, va, &old.wrapping_add(add).to_le_bytes());
                self.deliver(wr, old);
            }
            SendOp::CompareSwap { va, rkey, compare, swap } => {
                let old = self.load(rkey, va);
                if old == compare {
                    self.store(rkey, va, &swap.to_le_bytes());
                }
                self.deliver(wr, old);
            }
            SendOp::Flush { .. } | SendOp::Read { .. } => {}
            op => panic!("the test does not post {op:?}"),
        }
    }

    fn gather(&mut self, wr: &SendWr) -> Vec<u8> {
        match &wr.payload {
            Payload::Inline(bytes) => bytes.to_vec(),
            _ => {
                let sges = sges_of(wr);
                sges.iter().flat_map(|sge| self.local.slice(sge.addr, sge.length as usize).to_vec()).collect()
            }
        }
    }

    fn store(&mut self, rkey: u32, va: u64, data: &[u8]) {
        let key = self.server.key(rkey);
        let (memory, offset) = (key.memory, key.offset(va));
        self.server.memories[memory].bytes[offset..offset + data.len()].copy_from_slice(data);
    }

    fn load(&mut self, rkey: u32, va: u64) -> u64 {
        let key = self.server.key(rkey);
        let offset = key.offset(va);
        let bytes = &self.server.memories[key.memory].bytes[offset..offset + 8];
        u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
    }

    fn deliver(&mut self, wr: &SendWr, old: u64) {
        let data = old.to_le_bytes().to_vec();
        self.responses.push_back(Response::Data { sges: sges_of(wr), offset: 0, data });
    }

    /// The queue pair receives the next response.
    pub fn receive(&mut self) {
        match self.responses.pop_front() {
            Some(Response::Data { sges, offset, data }) => {
                let mut position = 0;
                for sge in sges {
                    let length = sge.length as usize;
                    let (from, to) = (position.max(offset), (position + length).min(offset + data.len()));
                    if from < to {
                        let dest = self.local.slice(sge.addr + (from - position) as u64, to - from);
                        dest.copy_from_slice(&data[from - offset..to - offset]);
                    }
                    position += length;
                }
            }
            Some(Response::Complete(wc)) => assert!(self.session.handle_completion(&wc, &self.local)),
            None => {}
        }
    }

    /// The server advances one of its calls by a few steps.
    pub fn serve(&mut self) {
        if self.jobs.is_empty() {
            return;
        }
        let index = self.rng.below(self.jobs.len());
        for _ in 0..self.rng.within(1, 40) {
            if let Some(status) = self.server.serve(&mut self.jobs[index], &mut self.local) {
                let job = self.jobs.swap_remove(index);
                self.answers.push_back((job.id, status));
                return;
            }
        }
    }

    /// The control queue pair breaks: calls make no more progress.
    pub fn lose_peer(&mut self) {
        self.is_peer_gone = true;
        self.sent_calls.clear();
        self.jobs.clear();
        self.answers.clear();
        self.session.handle_peer_gone();
    }

    /// Maps or unmaps units.
    pub fn toggle_residency(&mut self) {
        let memory = self.rng.below(self.server.memories.len());
        let whole = self.rng.one_in(8).then(|| self.rng.one_in(2));
        if let Some((_, present)) = &mut self.server.memories[memory].paging {
            let unit = self.rng.below(present.len());
            match whole {
                Some(all) => present.fill(all),
                None => present[unit] = !present[unit],
            }
        }
    }

    /// Updates a client's view, or fills it with random bits.
    pub fn pull(&mut self) {
        let index = self.rng.below(self.server.keys.len());
        let key = &self.server.keys[index];
        let (Some((_, present)), terrace_access::region::Knowledge::Extended(region)) =
            (&self.server.memories[key.memory].paging, &key.truth)
        else {
            return;
        };
        let mut bytes = vec![0; region.residency().length_bytes()];
        let is_correct = self.rng.one_in(2);
        for unit in 0..present.len().min(bytes.len() * 8) {
            let bit = if is_correct { present[unit] } else { self.rng.one_in(2) };
            bytes[unit / 8] |= u8::from(bit) << (unit % 8);
        }
        region.residency().store(0, &bytes);
    }
}

fn sges_of(wr: &SendWr) -> Vec<Sge> {
    match &wr.payload {
        Payload::Sges(sges) => sges.to_vec(),
        _ => Vec::new(),
    }
}
