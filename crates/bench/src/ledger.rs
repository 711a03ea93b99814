//! The versions of all keys: for each key the last issued and the last acknowledged version.
//!
//! All client threads of a run share one table. Each key has one writer and is read by all threads. A READ that is posted
//! after the acknowledgement of version `n` must return version `n` or a later one that was issued.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::content::{GRANULE_BYTES, Stamp, is_mixture, stamp_of};
use crate::keys;

/// An error in the data of a READ.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Corruption {
    /// The bytes are of no write to this granule.
    #[error("the 64 bytes at offset {offset} are of no write to this offset: {bytes}")]
    Damaged {
        /// The granule's offset in the region.
        offset: u64,
        /// Its first bytes, in hexadecimal.
        bytes: String,
    },
    /// The version is older than the acknowledged one at the time of posting, or was not issued.
    #[error(
        "the 64 bytes at offset {offset} are version {found:?}, but it must be one of {low} to {high} of epoch {epoch}"
    )]
    WrongVersion {
        /// The granule's offset in the region.
        offset: u64,
        /// The stamp found.
        found: Stamp,
        /// The acknowledged version when the READ was posted.
        low: u32,
        /// The last issued version when the READ completed.
        high: u32,
        /// The epoch of the measurement.
        epoch: u16,
    },
}

/// The result of checking a READ's data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// The number of granules.
    pub granules: u64,
    /// Granules that are mixtures because of a concurrent WRITE. Their words are checked if the old version is known.
    pub mixed: u64,
}

/// The versions of all keys.
#[derive(Debug)]
pub struct Ledger {
    /// The acknowledged version in the upper half, the issued one in the lower.
    entries: Box<[AtomicU64]>,
    key_bytes: u64,
    threads: u64,
    epoch: u16,
}

impl Ledger {
    /// A ledger without writes. Key `k` belongs to thread `k % threads`.
    pub fn new(key_count: u64, key_bytes: u64, threads: u64, epoch: u16) -> Ledger {
        let entries = (0..key_count).map(|_| AtomicU64::new(0)).collect();
        Ledger { entries, key_bytes, threads, epoch }
    }

    /// The number of keys.
    pub fn key_count(&self) -> u64 {
        self.entries.len() as u64
    }

    /// The key that `thread` writes instead of `key`.
    pub fn owned(&self, key: u64, thread: u64) -> u64 {
        keys::owned(key, thread, self.threads, self.key_count())
    }

    /// The stamp of the next write to `key`. Only the key's owner calls this.
    pub fn issue(&self, key: u64) -> Stamp {
        let entry = &self.entries[key as usize];
        let before = entry.load(Ordering::Relaxed);
        let version = before as u32 + 1;
        entry.store(before & !0xffff_ffff | u64::from(version), Ordering::Release);
        self.stamp(key, version)
    }

    /// Records an acknowledged write. Only the key's owner calls this. Writes of one thread take effect in the order of
    /// posting, so all later READs must return the highest acknowledged version or a later one.
    pub fn acknowledge(&self, key: u64, version: u32) {
        let entry = &self.entries[key as usize];
        let before = entry.load(Ordering::Relaxed);
        let acknowledged = (before >> 32).max(u64::from(version));
        entry.store(acknowledged << 32 | before & 0xffff_ffff, Ordering::Release);
    }

    /// The oldest version that a READ may return if it is posted now.
    pub fn acknowledged(&self, key: u64) -> u32 {
        (self.entries[key as usize].load(Ordering::Acquire) >> 32) as u32
    }

    fn issued(&self, key: u64) -> u32 {
        self.entries[key as usize].load(Ordering::Acquire) as u32
    }

    fn stamp(&self, key: u64, version: u32) -> Stamp {
        Stamp { epoch: self.epoch, writer: (key % self.threads) as u16, version }
    }

    /// Checks the data of a READ of `key` that was posted when version `low` was acknowledged.
    pub fn verify(&self, key: u64, low: u32, bytes: &[u8]) -> Result<Verified, Corruption> {
        let high = self.issued(key);
        let mut verified = Verified::default();
        for (index, granule) in bytes.chunks_exact(GRANULE_BYTES).enumerate() {
            let offset = key * self.key_bytes + (index * GRANULE_BYTES) as u64;
            verified.granules += 1;
            match stamp_of(granule, offset) {
                Some(found) if self.is_legal(key, found, low, high) => {}
                Some(found) => {
                    return Err(Corruption::WrongVersion { offset, found, low, high, epoch: self.epoch });
                }
                None if self.is_legal_mixture(key, granule, offset, low, high) => verified.mixed += 1,
                None => {
                    let bytes = granule[..16].iter().map(|byte| format!("{byte:02x}")).collect();
                    return Err(Corruption::Damaged { offset, bytes });
                }
            }
        }
        Ok(verified)
    }

    fn is_legal(&self, key: u64, found: Stamp, low: u32, high: u32) -> bool {
        if found.epoch < self.epoch {
            // Content of an earlier measurement, whose versions are not recorded any more.
            return low == 0;
        }
        found == self.stamp(key, found.version) && (low.max(1)..=high).contains(&found.version)
    }

    /// A mixture is legal only during a write. If the old content is of an earlier measurement, its words are not known.
    fn is_legal_mixture(&self, key: u64, granule: &[u8], offset: u64, low: u32, high: u32) -> bool {
        high > low
            && (low == 0 || is_mixture(granule, offset, (low..=high).map(|version| self.stamp(key, version))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::content::fill;

    fn page(key: u64, stamp: Stamp) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        fill(&mut bytes, key * 4096, stamp);
        bytes
    }

    #[test]
    fn initial_content_is_legal_until_a_write_is_acknowledged() {
        let ledger = Ledger::new(8, 4096, 2, 1);
        assert_eq!(ledger.verify(3, ledger.acknowledged(3), &page(3, Stamp::INITIAL)).unwrap().granules, 64);
        let stamp = ledger.issue(3);
        assert!(ledger.verify(3, ledger.acknowledged(3), &page(3, Stamp::INITIAL)).is_ok());
        assert!(ledger.verify(3, ledger.acknowledged(3), &page(3, stamp)).is_ok());
        ledger.acknowledge(3, stamp.version);
        let low = ledger.acknowledged(3);
        assert!(matches!(
            ledger.verify(3, low, &page(3, Stamp::INITIAL)),
            Err(Corruption::WrongVersion { low: 1, high: 1, .. })
        ));
        assert!(ledger.verify(3, low, &page(3, stamp)).is_ok());
    }

    #[test]
    fn injected_corruption_is_detected() {
        let ledger = Ledger::new(8, 4096, 2, 1);
        let right = page(2, Stamp::INITIAL);
        for byte in [0, 7, 8, 63, 64, 2000, 4095] {
            let mut wrong = right.clone();
            wrong[byte] ^= 0x10;
            let corruption = ledger.verify(2, 0, &wrong).unwrap_err();
            // A corrupt stamp of a later epoch does not match the words either.
            assert!(matches!(corruption, Corruption::Damaged { .. }), "byte {byte}: {corruption}");
        }
        assert!(ledger.verify(3, 0, &right).is_err(), "the bytes of another page");
        assert!(ledger.verify(2, 0, &[0; 4096]).is_err(), "zeros");
    }

    #[test]
    fn unissued_versions_and_other_writers_are_detected() {
        let ledger = Ledger::new(8, 4096, 2, 1);
        let stamp = ledger.issue(2);
        for wrong in
            [Stamp { version: 2, ..stamp }, Stamp { writer: 1, ..stamp }, Stamp { epoch: 2, ..stamp }]
        {
            assert!(ledger.verify(2, 0, &page(2, wrong)).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_mixture_is_legal_only_during_a_write() {
        let ledger = Ledger::new(8, 4096, 2, 1);
        let one = ledger.issue(2);
        ledger.acknowledge(2, one.version);
        let two = ledger.issue(2);
        let mut bytes = page(2, one);
        bytes[..1000].copy_from_slice(&page(2, two)[..1000]);
        assert_eq!(ledger.verify(2, 1, &bytes).unwrap(), Verified { granules: 64, mixed: 1 });
        ledger.acknowledge(2, two.version);
        assert!(ledger.verify(2, ledger.acknowledged(2), &bytes).is_err());
        // Words of neither version are illegal even then.
        let mut wrong = page(2, one);
        wrong[8] ^= 1;
        assert!(ledger.verify(2, 1, &wrong).is_err());
    }
}
