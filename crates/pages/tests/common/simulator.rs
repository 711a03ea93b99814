//! A cache without content: how many accesses find their page, by the replacement policy that the crate uses.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution, Zipf};
use terrace_pages::replacement::S3Fifo;
use terrace_shm::AccessCounters;

#[derive(Clone, Copy)]
enum Place {
    Absent,
    Ghost(u32),
    Frame(u32),
}

pub struct Simulator {
    policy: S3Fifo,
    counters: AccessCounters,
    places: Vec<Place>,
    /// The page of each frame in use.
    pages: Vec<u32>,
    frame_count: usize,
}

impl Simulator {
    pub fn new(page_count: usize, frame_count: usize) -> Simulator {
        Simulator {
            policy: S3Fifo::new(frame_count),
            counters: AccessCounters::new(frame_count).expect("memory"),
            places: vec![Place::Absent; page_count],
            pages: Vec::new(),
            frame_count,
        }
    }

    /// Returns whether the page was there.
    pub fn access(&mut self, page: usize) -> bool {
        let stamp = match self.places[page] {
            Place::Frame(frame) => {
                self.counters.count(frame as usize);
                return true;
            }
            Place::Ghost(stamp) => Some(stamp),
            Place::Absent => None,
        };
        let frame = self.take_frame();
        self.pages[frame as usize] = page as u32;
        self.places[page] = Place::Frame(frame);
        self.counters.set(frame as usize, 0);
        self.policy.insert(frame, stamp);
        false
    }

    fn take_frame(&mut self) -> u32 {
        if self.pages.len() < self.frame_count {
            self.pages.push(0);
            return self.pages.len() as u32 - 1;
        }
        let victim = self.policy.evict(&self.counters, 0).expect("all frames are in use");
        self.places[self.pages[victim.slot as usize] as usize] =
            victim.stamp.map_or(Place::Absent, Place::Ghost);
        victim.slot
    }

    /// The share of hits, in percent.
    pub fn hit_ratio(&mut self, pages: impl Iterator<Item = usize>) -> f64 {
        let (mut hits, mut count) = (0, 0);
        for page in pages {
            hits += u64::from(self.access(page));
            count += 1;
        }
        hits as f64 / count as f64 * 100.0
    }

    /// The share of hits of a load, in percent, with one access to a page of a scan before each of its accesses.
    pub fn hit_ratio_during_scan(
        &mut self,
        load: &mut impl Iterator<Item = usize>,
        scan: std::ops::Range<usize>,
    ) -> f64 {
        let (mut hits, count) = (0, scan.len());
        for page in scan {
            self.access(page);
            hits += u64::from(self.access(load.next().expect("endless")));
        }
        hits as f64 / count as f64 * 100.0
    }
}

/// Page numbers with a Zipf distribution; page 0 is the most frequent one.
pub fn zipf(page_count: usize, theta: f64, seed: u64) -> impl Iterator<Item = usize> {
    let distribution = Zipf::new(page_count as f64, theta).expect("a distribution");
    let mut random = SmallRng::seed_from_u64(seed);
    std::iter::repeat_with(move || distribution.sample(&mut random) as usize - 1)
}

/// Page numbers that are all as frequent.
pub fn uniform(page_count: usize, seed: u64) -> impl Iterator<Item = usize> {
    let mut random = SmallRng::seed_from_u64(seed);
    std::iter::repeat_with(move || random.random_range(0..page_count))
}

/// The best possible share of hits for a Zipf distribution, in percent: the most frequent pages stay in memory.
pub fn optimum(page_count: usize, frame_count: usize, theta: f64) -> f64 {
    let weight = |count: usize| (1..=count).map(|rank| (rank as f64).powf(-theta)).sum::<f64>();
    weight(frame_count) / weight(page_count) * 100.0
}
