//! Requests for the addresses of regions that do not block: the metadata requests of an application.

use std::collections::VecDeque;

use terrace_access::proto::{Body, Found, NAME_BYTES_MAX};

use super::{Client, ClientError};
use crate::control::RECEIVE_COUNT;
use crate::link::Answer;

/// The most requests of [`Client::request_address`] in flight: half of the requests that a server accepts. The other half
/// is for accesses.
pub const ADDRESS_REQUESTS_MAX: u16 = RECEIVE_COUNT / 2;

/// Where a region is in the memory of its server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionAddress {
    /// The rkey.
    pub rkey: u32,
    /// The virtual address of the first byte.
    pub va: u64,
    /// Length in bytes.
    pub length: u64,
}

impl RegionAddress {
    pub(super) fn new(found: &Found) -> RegionAddress {
        let Found { rkey, region } = found;
        RegionAddress { rkey: *rkey, va: region.layout.base_va(), length: region.layout.length() }
    }
}

/// The requests in flight.
pub(super) struct AddressRequests {
    count_max: usize,
    /// Their ids, in the order of the requests, which is that of the answers.
    ids: VecDeque<u64>,
}

impl AddressRequests {
    pub fn new(count_max: u16) -> AddressRequests {
        AddressRequests { count_max: count_max.into(), ids: VecDeque::new() }
    }
}

impl Client {
    /// Begins to request the address of a region by its name. [`Client::take_address`] has the answer.
    ///
    /// # Errors
    /// `Full` if [`ClientConfig::address_requests`](super::ClientConfig::address_requests) are in flight; `NoRegion` for a
    /// name that no region can have; `Lost` if the connection has ended.
    pub fn request_address(&self, name: &str) -> Result<(), ClientError> {
        if !(1..=NAME_BYTES_MAX).contains(&name.len()) {
            return Err(ClientError::NoRegion(name.into()));
        }
        let mut requests = self.address_requests.lock();
        if requests.ids.len() == requests.count_max {
            return Err(ClientError::Full);
        }
        let id = self.link().request(Body::Find(name))?;
        requests.ids.push_back(id);
        Ok(())
    }

    /// Takes the answer to the oldest request for an address, if [`Client::poll`] has received it: `Refused` if the server
    /// has no such region.
    pub fn take_address(&self) -> Option<Result<RegionAddress, ClientError>> {
        let mut requests = self.address_requests.lock();
        let answer = self.link().take_answer(*requests.ids.front()?)?;
        requests.ids.pop_front();
        Some(match answer {
            Ok(Answer::Found(found)) => Ok(RegionAddress::new(&found)),
            Ok(_) => Err(ClientError::Protocol),
            Err(error) => Err(error),
        })
    }
}
