//! A TX sink that may be full.

use terrace_transport::Sink;
use terrace_wire::{Path, Psn};

/// Collects packets, and runs of up to so many bytes, until it is full. Its buffers are not zeroed, as real ones are not.
#[derive(Debug, Default)]
pub struct RunCollector<const RUN_BYTES_MAX: u64> {
    pub packets: Vec<(Path, Vec<u8>)>,
    /// How many more packets it takes; `None` for any number.
    pub room: Option<usize>,
    /// Acknowledgements, with the index of the packet that carries each; `None` if packets carry none.
    pub acks: Option<Vec<(usize, Psn)>>,
    /// Whether the last packet was taken back: then none carries anything.
    pub is_cancelled: bool,
}

/// Collects packets, but no runs.
pub type Collector = RunCollector<0>;

impl<const RUN_BYTES_MAX: u64> Sink for RunCollector<RUN_BYTES_MAX> {
    const RUN_BYTES_MAX: u64 = RUN_BYTES_MAX;

    fn push(&mut self, path: &Path, len: usize) -> Option<&mut [u8]> {
        if let Some(room) = &mut self.room {
            *room = room.checked_sub(1)?;
        }
        self.is_cancelled = false;
        self.packets.push((*path, vec![0xee; len]));
        self.packets.last_mut().map(|(_, bytes)| bytes.as_mut_slice())
    }

    fn cancel(&mut self) {
        self.is_cancelled = true;
        self.packets.pop().expect("only a pushed packet is taken back");
        if let Some(room) = &mut self.room {
            *room += 1;
        }
    }

    fn carry_ack(&mut self, psn: Psn) -> bool {
        let (Some(acks), Some(last)) = (&mut self.acks, self.packets.len().checked_sub(1)) else {
            return false;
        };
        if self.is_cancelled || acks.last().is_some_and(|(carrier, _)| *carrier == last) {
            return false;
        }
        acks.push((last, psn));
        true
    }
}
