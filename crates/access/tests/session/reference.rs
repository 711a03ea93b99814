//! In-order execution of the posted requests, on local and remote memory.

use terrace_transport::{Payload, SendOp, SendWr, Sge};

use crate::server::{Key, LOCAL_BASE, Local, RKEY_BASE, Server};

/// The writer of a byte that no request has written.
const NO_WRITER: u32 = u32::MAX;

pub struct Reference {
    local: Vec<u8>,
    local_writers: Vec<u32>,
    memories: Vec<Vec<u8>>,
    memory_writers: Vec<Vec<u32>>,
    keys: Vec<Key>,
    /// Messages that the peer's program receives, with the number of the request.
    pub received: Vec<(u32, Vec<u8>)>,
}

impl Reference {
    pub fn new(server: &Server, local: &Local) -> Reference {
        Reference {
            local: local.bytes.clone(),
            local_writers: vec![NO_WRITER; local.bytes.len()],
            memories: server.memories.iter().map(|memory| memory.bytes.clone()).collect(),
            memory_writers: server
                .memories
                .iter()
                .map(|memory| vec![NO_WRITER; memory.bytes.len()])
                .collect(),
            keys: server.keys.clone(),
            received: Vec::new(),
        }
    }

    /// Stores the data that a request will send.
    pub fn fill(&mut self, addr: u64, data: &[u8]) {
        let start = (addr - LOCAL_BASE) as usize;
        self.local[start..start + data.len()].copy_from_slice(data);
    }

    /// Executes a request.
    pub fn post(&mut self, number: u32, wr: &SendWr) {
        match wr.op {
            SendOp::Read { va, rkey } => {
                let (memory, offset) = self.locate(rkey, va);
                let length = wr.payload.len() as usize;
                let data = self.memories[memory][offset..offset + length].to_vec();
                self.scatter(number, wr, &data);
            }
            SendOp::Send => {
                let data = self.gather(wr);
                self.received.push((number, data));
            }
            SendOp::Write { va, rkey } => {
                let data = self.gather(wr);
                self.store(number, rkey, va, &data);
            }
            SendOp::WriteImm { va, rkey, .. } => {
                let data = self.gather(wr);
                self.store(number, rkey, va, &data);
                self.received.push((number, data));
            }
            SendOp::FetchAdd { va, rkey, add } => {
                let old = self.load(rkey, va);
                self.store(number, rkey, va, &old.wrapping_add(add).to_le_bytes());
                self.scatter(number, wr, &old.to_le_bytes());
            }
            SendOp::CompareSwap { va, rkey, compare, swap } => {
                let old = self.load(rkey, va);
                if old == compare {
                    self.store(number, rkey, va, &swap.to_le_bytes());
                }
                self.scatter(number, wr, &old.to_le_bytes());
            }
            SendOp::Flush { .. } => {}
            op => panic!("the test does not post {op:?}"),
        }
    }

    fn locate(&self, rkey: u32, va: u64) -> (usize, usize) {
        let key = &self.keys[(rkey - RKEY_BASE) as usize];
        (key.memory, key.offset(va))
    }

    pub fn load(&self, rkey: u32, va: u64) -> u64 {
        let (memory, offset) = self.locate(rkey, va);
        u64::from_le_bytes(self.memories[memory][offset..offset + 8].try_into().expect("eight bytes"))
    }

    fn store(&mut self, number: u32, rkey: u32, va: u64, data: &[u8]) {
        let (memory, offset) = self.locate(rkey, va);
        self.memories[memory][offset..offset + data.len()].copy_from_slice(data);
        self.memory_writers[memory][offset..offset + data.len()].fill(number);
    }

    fn scatter(&mut self, number: u32, wr: &SendWr, data: &[u8]) {
        let mut rest = data;
        for sge in sges(wr) {
            let start = (sge.addr - LOCAL_BASE) as usize;
            let (segment, tail) = rest.split_at(rest.len().min(sge.length as usize));
            self.local[start..start + segment.len()].copy_from_slice(segment);
            self.local_writers[start..start + segment.len()].fill(number);
            rest = tail;
        }
    }

    fn gather(&self, wr: &SendWr) -> Vec<u8> {
        match &wr.payload {
            Payload::Inline(bytes) => bytes.to_vec(),
            _ => {
                let segments = sges(wr).iter().map(|sge| {
                    let start = (sge.addr - LOCAL_BASE) as usize;
                    &self.local[start..start + sge.length as usize]
                });
                segments.collect::<Vec<_>>().concat()
            }
        }
    }

    /// Checks the data of a completed request, except the bytes that later requests overwrite.
    pub fn check_delivered(&self, number: u32, wr: &SendWr, local: &Local) {
        for sge in sges(wr) {
            let start = (sge.addr - LOCAL_BASE) as usize;
            let range = start..start + sge.length as usize;
            for at in differences(&local.bytes[range.clone()], &self.local[range]) {
                let at = start + at;
                assert!(
                    self.local_writers[at] != number,
                    "byte {at:#x} of the client's memory, of request {number}: {wr:?}"
                );
            }
        }
    }

    /// Checks that a message's receiver sees all earlier writes.
    pub fn check_visible(&self, number: u32, server: &Server) {
        for (index, memory) in server.memories.iter().enumerate() {
            let (bytes, writers) = (&self.memories[index], &self.memory_writers[index]);
            for at in differences(&memory.bytes, bytes) {
                let is_earlier = writers[at] != NO_WRITER && writers[at] < number;
                assert!(
                    !is_earlier,
                    "byte {at:#x} of memory {index}, of request {}, is not visible with message {number}",
                    writers[at]
                );
            }
        }
    }

    /// Checks all memory, when no request is in flight.
    pub fn check_all(&self, local: &Local, server: &Server) {
        for (index, memory) in server.memories.iter().enumerate() {
            let expected = &self.memories[index];
            let wrong = differences(&memory.bytes, expected).next();
            assert_eq!(wrong, None, "first wrong byte of memory {index}");
        }
        let wrong = differences(&local.bytes, &self.local).next();
        let writer = wrong.map(|at| self.local_writers[at]);
        assert_eq!((wrong, writer), (None, None), "first wrong byte of the client's memory, and its request");
    }
}

/// The offsets at which two memories differ; usually few.
fn differences<'a>(got: &'a [u8], expected: &'a [u8]) -> impl Iterator<Item = usize> + 'a {
    let chunks = got.chunks(256).zip(expected.chunks(256)).enumerate();
    chunks.filter(|(_, (got, expected))| got != expected).flat_map(|(index, (got, expected))| {
        let bytes = got.iter().zip(expected).enumerate();
        bytes.filter(|(_, (got, expected))| got != expected).map(move |(at, _)| index * 256 + at)
    })
}

fn sges(wr: &SendWr) -> &[Sge] {
    match &wr.payload {
        Payload::Sges(sges) => sges,
        _ => &[],
    }
}
