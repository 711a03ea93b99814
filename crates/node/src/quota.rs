//! Quotas of a node's clients, by address. The address is the only property that distinguishes peers: a peer with one
//! client at an address could have any number there, and has few addresses.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use terrace_nic::Time;

use crate::credits::Credits;

/// The most control queue pairs of a node. Each has a mebibyte of receive buffers, which occupy memory once used.
pub(crate) const CONNECTIONS_MAX: usize = 1024;
/// The most of them for one address whose clients have sent a message.
pub(crate) const CONNECTIONS_PER_ADDRESS_MAX: usize = 128;
/// The number of connections of one address from which on its clients get keepalives.
pub(crate) const KEEPALIVE_CONNECTIONS: usize = 32;
/// The most half-open connections, over which no message has come yet: the requester may have forged its address.
pub(crate) const HALF_OPEN_MAX: usize = 768;
/// The most half-open connections of one address.
pub(crate) const HALF_OPEN_PER_ADDRESS_MAX: usize = 512;
/// The age in nanoseconds from which on a new client may replace a half-open connection.
pub(crate) const HALF_OPEN_NS_MIN: u64 = 250_000_000;
/// The age in nanoseconds at which a half-open connection is closed.
pub(crate) const HALF_OPEN_NS_MAX: u64 = 30_000_000_000;
/// The most queue pairs of one address for named regions.
const PAIRS_PER_ADDRESS_MAX: u32 = 4096;
/// The most requests of one address in execution. Each can have a page bitmap of up to 16 KiB.
const JOBS_PER_ADDRESS_MAX: u32 = 4096;
/// The most bytes of one address's writes that are queued, or being READ.
const WRITE_BYTES_MAX: u64 = 16 << 20;

/// The use of quotas by the clients of one address.
#[derive(Debug)]
pub(crate) struct Quotas {
    pairs: AtomicU32,
    jobs: AtomicU32,
    /// Credits for data of reads, from the request until the client has acknowledged it.
    pub reads: Arc<Credits>,
    /// Credits for data of writes.
    pub writes: Arc<Credits>,
}

/// One unit of a quota, which is returned when this is dropped.
#[derive(Debug)]
pub(crate) struct QuotaUnit(Arc<Quotas>, fn(&Quotas) -> &AtomicU32);

impl Quotas {
    /// Unused quotas. At most `read_bytes` may be in flight to readers.
    pub fn new(read_bytes: u64) -> Arc<Quotas> {
        Arc::new(Quotas {
            pairs: AtomicU32::new(0),
            jobs: AtomicU32::new(0),
            reads: Credits::new(read_bytes),
            writes: Credits::new(WRITE_BYTES_MAX),
        })
    }

    /// Counts another queue pair; `None` at the limit.
    pub fn count_pair(self: &Arc<Quotas>) -> Option<QuotaUnit> {
        self.count(|quotas| &quotas.pairs, PAIRS_PER_ADDRESS_MAX)
    }

    /// Counts another request in execution; `None` at the limit.
    pub fn count_job(self: &Arc<Quotas>) -> Option<QuotaUnit> {
        self.count(|quotas| &quotas.jobs, JOBS_PER_ADDRESS_MAX)
    }

    fn count(self: &Arc<Quotas>, counter: fn(&Quotas) -> &AtomicU32, max: u32) -> Option<QuotaUnit> {
        let more = |count| (count < max).then_some(count + 1);
        let counted = counter(self).fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        counted.is_ok().then(|| QuotaUnit(self.clone(), counter))
    }
}

impl Drop for QuotaUnit {
    fn drop(&mut self) {
        self.1(&self.0).fetch_sub(1, Ordering::Relaxed);
    }
}

/// The most bytes of a node's bounce buffers for the reads of one address: half of the large buffers
/// (`crates/baseline/src/pool.rs`), so that other clients proceed even if these never drain their responses.
pub(crate) fn read_bytes_max(buffer_bytes: u64) -> u64 {
    (buffer_bytes / 16 * 3).max(128 << 10)
}

/// An open connection, as input of [`admit`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenConnection {
    pub qpn: u32,
    pub address: IpAddr,
    /// The time of its creation, if it is half-open.
    pub half_open_since: Option<Time>,
}

/// The decision about a new connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    Accept,
    /// Accept, and close this half-open connection.
    Replace(u32),
    Refuse,
}

/// The oldest half-open connection, with the time of its creation.
type Oldest = Option<(Time, u32)>;

/// Decides whether a client at an address gets a connection. Only half-open connections are replaced.
pub(crate) fn admit(now: Time, address: IpAddr, all: impl Iterator<Item = OpenConnection>) -> Admission {
    let (mut count, mut active_here) = (0, 0);
    let (mut half_open, mut half_open_here) = (0, 0);
    let (mut oldest, mut oldest_here): (Oldest, Oldest) = (None, None);
    let older = |known: Oldest, one| Some(known.map_or(one, |known| known.min(one)));
    for connection in all {
        count += 1;
        let here = connection.address == address;
        let Some(since) = connection.half_open_since else {
            active_here += usize::from(here);
            continue;
        };
        half_open += 1;
        oldest = older(oldest, (since, connection.qpn));
        if here {
            half_open_here += 1;
            oldest_here = older(oldest_here, (since, connection.qpn));
        }
    }
    if active_here >= CONNECTIONS_PER_ADDRESS_MAX {
        return Admission::Refuse;
    }
    let candidate = match () {
        () if half_open_here >= HALF_OPEN_PER_ADDRESS_MAX => oldest_here,
        () if half_open >= HALF_OPEN_MAX || count >= CONNECTIONS_MAX => oldest,
        () => return Admission::Accept,
    };
    match candidate {
        Some((since, qpn)) if now >= since.after_ns(HALF_OPEN_NS_MIN) => Admission::Replace(qpn),
        _ => Admission::Refuse,
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const NOW: Time = Time(10 * HALF_OPEN_NS_MIN);

    fn address(number: usize) -> IpAddr {
        Ipv4Addr::new(10, 0, (number >> 8) as u8, number as u8).into()
    }

    fn half_open(qpn: usize, number: usize, since: u64) -> OpenConnection {
        OpenConnection { qpn: qpn as u32, address: address(number), half_open_since: Some(Time(since)) }
    }

    fn active(qpn: usize, number: usize) -> OpenConnection {
        OpenConnection { qpn: qpn as u32, address: address(number), half_open_since: None }
    }

    fn admitted(number: usize, all: &[OpenConnection]) -> Admission {
        admit(NOW, address(number), all.iter().copied())
    }

    #[test]
    fn half_open_connections_of_an_address_are_replaced() {
        let all: Vec<_> =
            (0..HALF_OPEN_PER_ADDRESS_MAX).map(|qpn| half_open(qpn, 1, 7 + qpn as u64)).collect();
        assert_eq!(admitted(1, &all), Admission::Replace(0));
        assert_eq!(admitted(2, &all), Admission::Accept);
        assert_eq!(admitted(1, &all[1..]), Admission::Accept);
    }

    #[test]
    fn young_half_open_connections_are_not_replaced() {
        let since = NOW.0 - HALF_OPEN_NS_MIN + 1;
        let all: Vec<_> = (0..HALF_OPEN_MAX).map(|qpn| half_open(qpn, qpn, since)).collect();
        assert_eq!(admitted(5000, &all), Admission::Refuse);
        let later = NOW.after_ns(1);
        assert_eq!(admit(later, address(5000), all.into_iter()), Admission::Replace(0));
    }

    #[test]
    fn connections_of_an_address_are_limited() {
        let all: Vec<_> = (0..CONNECTIONS_PER_ADDRESS_MAX).map(|qpn| active(qpn, 1)).collect();
        assert_eq!(admitted(1, &all), Admission::Refuse);
        assert_eq!(admitted(2, &all), Admission::Accept);
    }

    #[test]
    fn active_connections_are_not_replaced() {
        let mut all: Vec<_> = (0..CONNECTIONS_MAX).map(|qpn| active(qpn, qpn)).collect();
        assert_eq!(admitted(5000, &all), Admission::Refuse);
        all[77] = half_open(77, 77, 1);
        assert_eq!(admitted(5000, &all), Admission::Replace(77));
    }

    #[test]
    fn dropped_units_return_to_the_quota() {
        let quotas = Quotas::new(1 << 20);
        let all: Vec<_> = std::iter::from_fn(|| quotas.count_pair()).collect();
        assert_eq!(all.len(), PAIRS_PER_ADDRESS_MAX as usize);
        assert!(quotas.count_job().is_some());
        drop(all);
        assert!(quotas.count_pair().is_some());
    }
}
