//! The client's view of which units of a region are present: what the client's accesses and its pulls of the server's
//! residency bitmap have found.
//!
//! The view is a hint. A READ of a unit that is wrongly considered present costs a round trip, since it returns the
//! signature page. A READ of a unit that is wrongly considered absent waits behind fetches. So the view may be old,
//! and the client transfers little of the server's bitmap:
//!
//! - The client's accesses update the view. A unit that a READ found absent is marked absent. A page that the server has
//!   fetched for the client is in the server's memory, so its unit is marked present if it is not larger than the page.
//! - The bitmap is pulled by windows of [`WINDOW_BYTES`]. A window is pulled only if the client has accessed its units
//!   since the last pull, and at most [`PULL_BYTES_MAX`] are pulled each [`PULL_INTERVAL_NS`]. If more windows are in use,
//!   they take turns. A window whose pull changes nothing is pulled less often.
//!
//! A window takes no memory until one of its units is absent.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};

use smallvec::SmallVec;
use terrace_transport::Time;

/// The interval between pulls in nanoseconds.
pub const PULL_INTERVAL_NS: u64 = 20_000_000;
/// Bytes of a window of the bitmap: 128 MiB of a region, by pages.
pub const WINDOW_BYTES: usize = 4096;
/// The most bytes of a pull.
pub const PULL_BYTES_MAX: usize = PULL_WINDOWS_MAX * WINDOW_BYTES;

const PULL_WINDOWS_MAX: usize = 16;
/// The timeout of a pull in nanoseconds.
const PULL_TIMEOUT_NS: u64 = 500_000_000;
/// The most pulls in succession that leave a window out because it has not changed.
const SKIPS_MAX: u8 = 7;

const WORD_BITS: usize = 64;
const WINDOW_WORDS: usize = WINDOW_BYTES / 8;
const WINDOW_UNITS: usize = WINDOW_WORDS * WORD_BITS;

/// The byte ranges of the server's bitmap that one pull reads: ascending, and together at most [`PULL_BYTES_MAX`].
pub type PullRanges = SmallVec<[Range<usize>; PULL_WINDOWS_MAX]>;

/// The units of one window.
#[derive(Debug, Default)]
struct Window {
    /// Unit `n` of the window is bit `n % 64` of word `n / 64`; not allocated while all units count as present.
    words: OnceLock<Box<[AtomicU64; WINDOW_WORDS]>>,
    /// The number of pulls that leave the window out, and the number after its last pull.
    skips: AtomicU8,
    last_skips: AtomicU8,
}

impl Window {
    fn words(&self) -> &[AtomicU64; WINDOW_WORDS] {
        self.words.get_or_init(|| Box::new([const { AtomicU64::new(u64::MAX) }; WINDOW_WORDS]))
    }

    #[inline]
    fn is_present(&self, unit: usize) -> bool {
        self.words.get().is_none_or(|words| {
            words[unit / WORD_BITS].load(Ordering::Relaxed) & (1 << (unit % WORD_BITS)) != 0
        })
    }

    /// Stores pulled bytes. Bits that are missing stay unchanged.
    fn store(&self, bytes: &[u8]) {
        let mut has_changed = false;
        for (word, bytes) in self.words().iter().zip(bytes.as_chunks::<8>().0) {
            let pulled = u64::from_le_bytes(*bytes);
            has_changed |= word.swap(pulled, Ordering::Relaxed) != pulled;
        }
        let last = self.last_skips.load(Ordering::Relaxed);
        let skips = if has_changed { 0 } else { (2 * last + 1).min(SKIPS_MAX) };
        self.last_skips.store(skips, Ordering::Relaxed);
        self.skips.store(skips, Ordering::Relaxed);
    }

    /// Whether the next pull leaves the window out; counts that.
    fn skip(&self) -> bool {
        let skips = self.skips.load(Ordering::Relaxed);
        self.skips.store(skips.saturating_sub(1), Ordering::Relaxed);
        skips > 0
    }
}

/// The view of a region. Queue pairs may share it.
#[derive(Debug)]
pub struct ResidencyView {
    unit_count: usize,
    windows: Box<[Window]>,
    /// A bit for each window whose units were accessed since its last pull.
    used: Box<[AtomicU64]>,
    /// The window with which the next pull begins.
    next_window: AtomicUsize,
    /// The earliest time of the next pull. The caller that begins a pull advances it.
    next_pull_ns: AtomicU64,
}

impl ResidencyView {
    /// A view in which all `unit_count` units are present.
    pub fn new(unit_count: usize) -> ResidencyView {
        let window_count = unit_count.div_ceil(WINDOW_UNITS);
        ResidencyView {
            unit_count,
            windows: (0..window_count).map(|_| Window::default()).collect(),
            used: (0..window_count.div_ceil(WORD_BITS)).map(|_| AtomicU64::new(0)).collect(),
            next_window: AtomicUsize::new(0),
            next_pull_ns: AtomicU64::new(0),
        }
    }

    /// The length of the server's bitmap in bytes.
    pub fn length_bytes(&self) -> usize {
        self.unit_count.div_ceil(WORD_BITS) * 8
    }

    /// Whether a unit is considered present; true beyond the region's end.
    #[inline]
    pub fn is_present(&self, unit: usize) -> bool {
        self.windows.get(unit / WINDOW_UNITS).is_none_or(|window| window.is_present(unit % WINDOW_UNITS))
    }

    /// Marks a unit absent, because a READ has found a page of it absent.
    pub fn mark_absent(&self, unit: usize) {
        if let Some(window) = self.windows.get(unit / WINDOW_UNITS) {
            let bit = 1 << (unit % WORD_BITS);
            window.words()[unit % WINDOW_UNITS / WORD_BITS].fetch_and(!bit, Ordering::Relaxed);
        }
    }

    /// Marks a unit present, because the server has brought all of it into memory.
    pub fn mark_present(&self, unit: usize) {
        let window = self.windows.get(unit / WINDOW_UNITS);
        if let Some(words) = window.and_then(|window| window.words.get()) {
            words[unit % WINDOW_UNITS / WORD_BITS].fetch_or(1 << (unit % WORD_BITS), Ordering::Relaxed);
        }
    }

    /// Has the next pulls include the windows of these units, which are being accessed.
    #[inline]
    pub fn mark_used(&self, units: Range<usize>) {
        for window in units.start / WINDOW_UNITS..units.end.div_ceil(WINDOW_UNITS) {
            let (Some(word), bit) = (self.used.get(window / WORD_BITS), 1 << (window % WORD_BITS)) else {
                return;
            };
            // Nearly always set already: a load leaves the cache line shared.
            if word.load(Ordering::Relaxed) & bit == 0 {
                word.fetch_or(bit, Ordering::Relaxed);
            }
        }
    }

    /// Whether the interval since the last pull is over.
    #[inline]
    pub fn is_pull_due(&self, now: Time) -> bool {
        now.0 >= self.next_pull_ns.load(Ordering::Relaxed)
    }

    /// The ranges of the server's bitmap to pull now; none if no pull is due, or no window needs one. After some, the
    /// caller calls [`ResidencyView::store`] for each range, and [`ResidencyView::end_pull`]. Without the latter the
    /// next pull is due half a second later.
    pub fn begin_pull(&self, now: Time) -> PullRanges {
        let timeout = now.after_ns(PULL_TIMEOUT_NS).0;
        let claim = |due| (now.0 >= due).then_some(timeout);
        if self.next_pull_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, claim).is_err() {
            return PullRanges::new();
        }
        let ranges = self.choose_windows();
        if ranges.is_empty() {
            self.end_pull(now);
        }
        ranges
    }

    /// Takes windows in use, in turn, and joins adjacent ones.
    fn choose_windows(&self) -> PullRanges {
        let (mut chosen, first) =
            (SmallVec::<[usize; PULL_WINDOWS_MAX]>::new(), self.next_window.load(Ordering::Relaxed));
        for window in self.used_windows(first..self.windows.len()).chain(self.used_windows(0..first)) {
            if self.windows[window].skip() {
                continue;
            }
            self.used[window / WORD_BITS].fetch_and(!(1 << (window % WORD_BITS)), Ordering::Relaxed);
            self.next_window.store((window + 1) % self.windows.len(), Ordering::Relaxed);
            chosen.push(window);
            if chosen.len() == PULL_WINDOWS_MAX {
                break;
            }
        }
        chosen.sort_unstable();
        let mut ranges = PullRanges::new();
        for window in chosen {
            let start = window * WINDOW_BYTES;
            let end = (start + WINDOW_BYTES).min(self.length_bytes());
            match ranges.last_mut().filter(|range| range.end == start) {
                Some(range) => range.end = end,
                None => ranges.push(start..end),
            }
        }
        ranges
    }

    /// The windows of a range that are in use, ascending.
    fn used_windows(&self, windows: Range<usize>) -> impl Iterator<Item = usize> + '_ {
        let words = windows.start / WORD_BITS..windows.end.div_ceil(WORD_BITS);
        let of_word = |index: usize| {
            let mut bits = self.used[index].load(Ordering::Relaxed);
            std::iter::from_fn(move || {
                let bit = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
                bits &= bits - 1;
                Some(index * WORD_BITS + bit)
            })
        };
        words.flat_map(of_word).filter(move |window| windows.contains(window))
    }

    /// Stores pulled bytes of the server's bitmap, which begin with a window. Bits that are missing stay unchanged.
    pub fn store(&self, first_byte: usize, bytes: &[u8]) {
        let windows = self.windows.iter().skip(first_byte / WINDOW_BYTES);
        windows.zip(bytes.chunks(WINDOW_BYTES)).for_each(|(window, bytes)| window.store(bytes));
    }

    /// Schedules the next pull.
    pub fn end_pull(&self, now: Time) {
        self.next_pull_ns.store(now.after_ns(PULL_INTERVAL_NS).0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_units_count_as_present_until_a_pull_or_a_mark() {
        let view = ResidencyView::new(70);
        assert_eq!(view.length_bytes(), 16);
        assert!((0..100).all(|unit| view.is_present(unit)));
        view.mark_present(3);
        assert!(view.windows[0].words.get().is_none(), "present units take no memory");
        view.mark_absent(69);
        view.mark_absent(1 << 40);
        assert!(!view.is_present(69) && view.is_present(68) && view.is_present(5));
        view.mark_present(69);
        assert!(view.is_present(69));

        let mut pulled = [0; 16];
        pulled[0] = 0b10;
        pulled[8] = 0b10_0000;
        view.store(0, &pulled);
        let present: Vec<usize> = (0..70).filter(|&unit| view.is_present(unit)).collect();
        assert_eq!(present, [1, 69]);
        view.store(0, &[]);
        assert!(view.is_present(1), "an empty pull changes no bit");
    }

    #[test]
    fn one_caller_pulls_at_each_interval() {
        let view = ResidencyView::new(1);
        let begin = |ns| {
            view.mark_used(0..1);
            !view.begin_pull(Time(ns)).is_empty()
        };
        assert!(begin(1));
        assert!(!begin(1));
        view.end_pull(Time(100));
        assert!(!begin(99 + PULL_INTERVAL_NS));
        assert!(begin(100 + PULL_INTERVAL_NS));
        let timeout_ns = 100 + PULL_INTERVAL_NS + PULL_TIMEOUT_NS;
        assert!(!begin(timeout_ns - 1));
        assert!(begin(timeout_ns));
    }

    /// Pulls at each interval, with the content that `pulled` returns for a byte. Returns the ranges of each pull.
    fn pull(view: &ResidencyView, now: &mut Time, pulled: impl Fn(usize) -> u8) -> PullRanges {
        *now = now.after_ns(PULL_INTERVAL_NS);
        let ranges = view.begin_pull(*now);
        for range in &ranges {
            view.store(range.start, &range.clone().map(&pulled).collect::<Vec<u8>>());
        }
        view.end_pull(*now);
        ranges
    }

    #[test]
    fn pulls_of_a_large_region_are_bounded_and_take_turns() {
        // 64 GiB by pages: a bitmap of 2 MiB.
        let (view, mut now) = (ResidencyView::new(1 << 24), Time(0));
        let mut seen = vec![0; view.length_bytes() / WINDOW_BYTES];
        for period in 0..32_u8 {
            view.mark_used(0..1 << 24);
            let ranges = pull(&view, &mut now, |_| period);
            assert_eq!(ranges.iter().map(Range::len).sum::<usize>(), PULL_BYTES_MAX);
            for range in ranges {
                range.step_by(WINDOW_BYTES).for_each(|byte| seen[byte / WINDOW_BYTES] += 1);
            }
        }
        assert!(seen.iter().all(|&pulls| pulls == 1), "each window has had its turn: {seen:?}");
    }

    #[test]
    fn windows_that_are_not_accessed_are_not_pulled() {
        let (view, mut now) = (ResidencyView::new(1 << 26), Time(0));
        assert_eq!(pull(&view, &mut now, |_| 0).len(), 0);
        view.mark_used(5 * WINDOW_UNITS - 1..5 * WINDOW_UNITS + 1);
        view.mark_used(9 * WINDOW_UNITS..9 * WINDOW_UNITS + 1);
        let windows = |range: Range<usize>| range.start * WINDOW_BYTES..range.end * WINDOW_BYTES;
        assert_eq!(pull(&view, &mut now, |_| 0)[..], [windows(4..6), windows(9..10)]);
        assert_eq!(pull(&view, &mut now, |_| 0).len(), 0);
        let allocated = view.windows.iter().filter(|window| window.words.get().is_some()).count();
        assert_eq!(allocated, 3, "256 GiB take the memory of the windows in use");
    }

    #[test]
    fn a_window_that_does_not_change_is_pulled_less_often() {
        let (view, mut now) = (ResidencyView::new(WINDOW_UNITS), Time(0));
        let mut pulls = |count: usize, change: bool| {
            (0..count)
                .filter(|&period| {
                    view.mark_used(0..1);
                    !pull(&view, &mut now, |_| if change { period as u8 } else { 0xaa }).is_empty()
                })
                .count()
        };
        assert_eq!(pulls(10, true), 10);
        assert!((100..=105).contains(&pulls(800, false)), "one in eight");
        assert!(pulls(16, true) >= 8, "a change ends that");
    }
}
