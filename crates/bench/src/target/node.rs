//! A region of a memory node, through the client library.

use std::collections::VecDeque;
use std::net::IpAddr;

use terrace_nic::{Buffer, PathChoice, PortConfig, WcStatus};
use terrace_node::{Client, ClientConfig, ClientError, Region, RegionAddress};

use super::{Body, Completion, Connect, Target, TargetError};

/// READs in flight of a scan of a region, and the bytes of each.
const SCAN_DEPTH: usize = 8;
const SCAN_BYTES: usize = 1 << 20;

/// A region of a server. Each client thread has its own connection and port, as separate processes have.
#[derive(Clone, Debug)]
pub struct NodeRegion {
    /// The server's address.
    pub server: IpAddr,
    /// The instance index of the server's device.
    pub instance: u8,
    /// The region's name.
    pub name: String,
    /// The transport to the server.
    pub path: PathChoice,
    /// Whether accesses look the region up by its name.
    pub finds_files: bool,
}

impl NodeRegion {
    /// Opens the region, and returns its length.
    pub fn open_length(&self) -> Result<u64, ClientError> {
        let client = Client::connect(&self.config(1))?;
        let region = client.open(&self.name)?;
        Ok(region.len())
    }

    /// Reads the whole region, so that a server that has memory for it has it in memory.
    pub fn read_all(&self) -> Result<(), TargetError> {
        let client = Client::connect(&self.config(SCAN_DEPTH)).map_err(failed)?;
        let region = client.open(&self.name).map_err(failed)?;
        let buffer = client.buffer(SCAN_DEPTH * SCAN_BYTES).map_err(failed)?;
        let mut idle: Vec<usize> = (0..SCAN_DEPTH).collect();
        let (mut next, mut done) = (0, Vec::new());
        while next < region.len() || idle.len() < SCAN_DEPTH {
            while next < region.len()
                && let Some(slot) = idle.pop()
            {
                let len = (region.len() - next).min(SCAN_BYTES as u64);
                region.read(next, &buffer, slot * SCAN_BYTES, len as u32, slot as u64).map_err(failed)?;
                next += len;
            }
            client.poll(&mut done).map_err(failed)?;
            for completion in done.drain(..) {
                if completion.status != WcStatus::Success {
                    return Err(TargetError(format!("completion status {:?}", completion.status)));
                }
                idle.push(completion.tag as usize);
            }
        }
        Ok(())
    }

    fn config(&self, depth: usize) -> ClientConfig {
        let config = ClientConfig::new(self.server);
        let port = PortConfig { path: self.path, ..config.port };
        let address_requests = if self.finds_files { depth as u16 } else { 0 };
        ClientConfig { instance: self.instance, depth: depth as u32, port, address_requests, ..config }
    }
}

impl Connect for NodeRegion {
    fn with_target(
        &self,
        _: usize,
        slots: usize,
        slot_bytes: usize,
        body: Body<'_>,
    ) -> Result<(), TargetError> {
        let client = Client::connect(&self.config(slots)).map_err(failed)?;
        let region = client.open(&self.name).map_err(failed)?;
        let buffer = client.buffer(slots * slot_bytes).map_err(failed)?;
        let (name, requests, done) = (&self.name, VecDeque::new(), Vec::new());
        body(&mut NodeTarget { client: &client, name, region, buffer, slot_bytes, requests, done });
        Ok(())
    }
}

struct NodeTarget<'a> {
    client: &'a Client,
    name: &'a str,
    region: Region<'a>,
    buffer: Buffer,
    slot_bytes: usize,
    /// The slots and tags of the requests for the file's address in flight, in order.
    requests: VecDeque<(usize, u64)>,
    /// The library's completions before conversion, in reused memory.
    done: Vec<terrace_node::Completion>,
}

impl NodeTarget<'_> {
    /// Handles the answers to requests for the file's address.
    fn take_addresses(&mut self, done: &mut Vec<Completion>) -> Result<(), TargetError> {
        while let Some(&(slot, tag)) = self.requests.front()
            && let Some(answer) = self.client.take_address()
        {
            self.requests.pop_front();
            let start = answer.map_err(failed).and_then(|address| self.offset_of(address));
            if let Ok(start) = start {
                self.store(slot, &start.to_le_bytes())?;
            }
            done.push(Completion { tag, outcome: start.map(|_| ()) });
        }
        Ok(())
    }

    /// The offset of an address in the region.
    fn offset_of(&self, file: RegionAddress) -> Result<u64, TargetError> {
        let region = self.region.address();
        let offset = file.va.checked_sub(region.va);
        let offset = offset.filter(|&offset| file.rkey == region.rkey && offset < region.length);
        offset.ok_or_else(|| TargetError(format!("the file is at {file:?}, the region is {region:?}")))
    }
}

impl Target for NodeTarget<'_> {
    fn read(&mut self, offset: u64, slot: usize, len: usize, tag: u64) -> Result<(), TargetError> {
        self.region.read(offset, &self.buffer, slot * self.slot_bytes, len as u32, tag).map_err(failed)
    }

    fn write(&mut self, offset: u64, slot: usize, len: usize, tag: u64) -> Result<(), TargetError> {
        self.region.write(offset, &self.buffer, slot * self.slot_bytes, len as u32, tag).map_err(failed)
    }

    fn find_file(&mut self, slot: usize, tag: u64) -> Result<(), TargetError> {
        self.client.request_address(self.name).map_err(failed)?;
        self.requests.push_back((slot, tag));
        Ok(())
    }

    fn commit(&mut self, offset: u64, len: usize, tag: u64) -> Result<(), TargetError> {
        self.region.commit(offset, len as u32, tag).map_err(failed)
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> Result<(), TargetError> {
        self.client.poll(&mut self.done).map_err(failed)?;
        let before_count = done.len();
        self.take_addresses(done)?;
        if self.done.is_empty() && done.len() == before_count {
            // Clients and server share few cores, so that an idle client yields its core.
            std::thread::yield_now();
        }
        done.extend(self.done.drain(..).map(|completion| Completion {
            tag: completion.tag,
            outcome: match completion.status {
                WcStatus::Success => Ok(()),
                status => Err(TargetError(format!("completion status {status:?}"))),
            },
        }));
        Ok(())
    }

    fn store(&mut self, slot: usize, bytes: &[u8]) -> Result<(), TargetError> {
        let stored = self.buffer.write(slot * self.slot_bytes, bytes);
        stored.map_err(|error| TargetError(error.to_string()))
    }

    fn load(&mut self, slot: usize, bytes: &mut [u8]) -> Result<(), TargetError> {
        let loaded = self.buffer.read(slot * self.slot_bytes, bytes);
        loaded.map_err(|error| TargetError(error.to_string()))
    }
}

fn failed(error: ClientError) -> TargetError {
    TargetError(error.to_string())
}
