//! Quotas of a node's clients, by address. Addresses are what an attacker has least of, and the only property that
//! distinguishes peers: a peer that may have one client of a node at an address could have any number.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use terrace_nic::Time;

use crate::room::Room;

/// Control queue pairs of a node. Each has a mebibyte of receive buffers, which take memory as they are used.
pub(crate) const CONNECTIONS_MAX: usize = 1024;
/// Of these, those of one address whose clients have sent a message.
pub(crate) const CONNECTIONS_PER_ADDRESS_MAX: usize = 128;
/// With this many of them at one address, that address's clients get keepalives.
pub(crate) const MANY_PER_ADDRESS: usize = 32;
/// Control queue pairs over which no message has come yet: the requester may have forged its address.
pub(crate) const HALF_OPEN_MAX: usize = 768;
/// The same, of one address.
pub(crate) const HALF_OPEN_PER_ADDRESS_MAX: usize = 512;
/// How long a client has to send its first message before a new client may replace it, in nanoseconds.
pub(crate) const GRACE_NS: u64 = 250_000_000;
/// How long a client may send no message at all, in nanoseconds.
pub(crate) const SILENCE_NS_MAX: u64 = 30_000_000_000;
/// Queue pairs that clients of one address get for the regions that have names.
const PAIRS_PER_ADDRESS_MAX: u32 = 4096;
/// Requests of one address that are carried out at a time. Each can name pages in up to 16 KiB.
const JOBS_PER_ADDRESS_MAX: u32 = 4096;
/// Data of one address's writes that is queued, or requested.
const WRITE_BYTES_MAX: u64 = 16 << 20;

/// The quotas that the clients of one address have used.
#[derive(Debug)]
pub(crate) struct Account {
    pairs: AtomicU32,
    jobs: AtomicU32,
    /// For data that is fetched for readers, from the request until the client has it.
    pub answers: Arc<Room>,
    /// For data of writers.
    pub writes: Arc<Room>,
}

/// One unit of a quota; returned when this is dropped.
#[derive(Debug)]
pub(crate) struct Counted(Arc<Account>, fn(&Account) -> &AtomicU32);

impl Account {
    /// Unused quotas. At most `answer_bytes` may be in flight to readers.
    pub fn new(answer_bytes: u64) -> Arc<Account> {
        Arc::new(Account {
            pairs: AtomicU32::new(0),
            jobs: AtomicU32::new(0),
            answers: Room::new(answer_bytes),
            writes: Room::new(WRITE_BYTES_MAX),
        })
    }

    /// Another queue pair; `None` at the limit.
    pub fn pair(self: &Arc<Account>) -> Option<Counted> {
        self.count(|account| &account.pairs, PAIRS_PER_ADDRESS_MAX)
    }

    /// Another request; `None` at the limit.
    pub fn job(self: &Arc<Account>) -> Option<Counted> {
        self.count(|account| &account.jobs, JOBS_PER_ADDRESS_MAX)
    }

    fn count(self: &Arc<Account>, counter: fn(&Account) -> &AtomicU32, max: u32) -> Option<Counted> {
        let more = |count| (count < max).then_some(count + 1);
        let counted = counter(self).fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        counted.is_ok().then(|| Counted(self.clone(), counter))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.1(&self.0).fetch_sub(1, Ordering::Relaxed);
    }
}

/// How much of a node's buffers for absent memory the answers to one address's requests may hold: half of the large
/// ones (`crates/tier/src/pool.rs`), so that other clients proceed even if these never drain their answers.
pub(crate) fn answer_bytes(buffer_bytes: u64) -> u64 {
    (buffer_bytes / 16 * 3).max(128 << 10)
}

/// A connection, as [`admit`] sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Standing {
    pub qpn: u32,
    pub address: IpAddr,
    /// The time of its creation, if its client has sent no message yet.
    pub silent_since: Option<Time>,
}

/// Whether a client at an address gets a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    Yes,
    /// If this connection, which has been silent for long enough, is closed.
    InPlaceOf(u32),
    No,
}

/// The connection that has been silent for longest, and since when.
type Oldest = Option<(Time, u32)>;

/// Decides which client gets a connection. Clients that have sent a message keep theirs.
pub(crate) fn admit(now: Time, address: IpAddr, all: impl Iterator<Item = Standing>) -> Admission {
    let (mut count, mut spoken_here) = (0, 0);
    let (mut silent, mut silent_here) = (0, 0);
    let (mut oldest, mut oldest_here): (Oldest, Oldest) = (None, None);
    let older = |known: Oldest, one| Some(known.map_or(one, |known| known.min(one)));
    for standing in all {
        count += 1;
        let here = standing.address == address;
        let Some(since) = standing.silent_since else {
            spoken_here += usize::from(here);
            continue;
        };
        silent += 1;
        oldest = older(oldest, (since, standing.qpn));
        if here {
            silent_here += 1;
            oldest_here = older(oldest_here, (since, standing.qpn));
        }
    }
    if spoken_here >= CONNECTIONS_PER_ADDRESS_MAX {
        return Admission::No;
    }
    let candidate = match () {
        () if silent_here >= HALF_OPEN_PER_ADDRESS_MAX => oldest_here,
        () if silent >= HALF_OPEN_MAX || count >= CONNECTIONS_MAX => oldest,
        () => return Admission::Yes,
    };
    match candidate {
        Some((since, qpn)) if now >= since.after_ns(GRACE_NS) => Admission::InPlaceOf(qpn),
        _ => Admission::No,
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const NOW: Time = Time(10 * GRACE_NS);

    fn address(number: usize) -> IpAddr {
        Ipv4Addr::new(10, 0, (number >> 8) as u8, number as u8).into()
    }

    fn silent(qpn: usize, number: usize, since: u64) -> Standing {
        Standing { qpn: qpn as u32, address: address(number), silent_since: Some(Time(since)) }
    }

    fn spoken(qpn: usize, number: usize) -> Standing {
        Standing { qpn: qpn as u32, address: address(number), silent_since: None }
    }

    fn admitted(number: usize, all: &[Standing]) -> Admission {
        admit(NOW, address(number), all.iter().copied())
    }

    #[test]
    fn silent_ones_of_an_address_make_way_for_others_of_it() {
        let all: Vec<_> = (0..HALF_OPEN_PER_ADDRESS_MAX).map(|qpn| silent(qpn, 1, 7 + qpn as u64)).collect();
        assert_eq!(admitted(1, &all), Admission::InPlaceOf(0));
        assert_eq!(admitted(2, &all), Admission::Yes);
        assert_eq!(admitted(1, &all[1..]), Admission::Yes);
    }

    #[test]
    fn silent_ones_have_time_to_speak() {
        let since = NOW.0 - GRACE_NS + 1;
        let all: Vec<_> = (0..HALF_OPEN_MAX).map(|qpn| silent(qpn, qpn, since)).collect();
        assert_eq!(admitted(5000, &all), Admission::No);
        let later = NOW.after_ns(1);
        assert_eq!(admit(later, address(5000), all.into_iter()), Admission::InPlaceOf(0));
    }

    #[test]
    fn an_address_has_so_many_connections_and_no_more() {
        let all: Vec<_> = (0..CONNECTIONS_PER_ADDRESS_MAX).map(|qpn| spoken(qpn, 1)).collect();
        assert_eq!(admitted(1, &all), Admission::No);
        assert_eq!(admitted(2, &all), Admission::Yes);
    }

    #[test]
    fn who_has_spoken_keeps_his_connection() {
        let mut all: Vec<_> = (0..CONNECTIONS_MAX).map(|qpn| spoken(qpn, qpn)).collect();
        assert_eq!(admitted(5000, &all), Admission::No);
        all[77] = silent(77, 77, 1);
        assert_eq!(admitted(5000, &all), Admission::InPlaceOf(77));
    }

    #[test]
    fn what_is_counted_comes_back() {
        let account = Account::new(1 << 20);
        let all: Vec<_> = std::iter::from_fn(|| account.pair()).collect();
        assert_eq!(all.len(), PAIRS_PER_ADDRESS_MAX as usize);
        assert!(account.job().is_some());
        drop(all);
        assert!(account.pair().is_some());
    }
}
