//! The trend of a process's faults, and which pages it will touch next.
//!
//! After H. Al Maruf and M. Chowdhury, "Effectively Prefetching Remote Memory with Leap", USENIX ATC 2020: the trend is the
//! delta that most of the last faults have (section 4.1), and the number of pages ahead follows from the use of those before
//! (section 4.2). A program that walks through several arrays in turn has no trend by that rule. So faults that are near to
//! one another are a stream, with a trend of its own; the trend of all faults finds strides that are longer.

/// Deltas that are kept.
const DELTAS: usize = 32;
/// The search for a majority begins with so many of them.
const WINDOW_MIN: usize = 4;
/// Streams of a process.
const STREAMS: usize = 16;
/// A fault is one of a stream whose last fault is so many pages away.
const NEAR_PAGES: u64 = 64;
/// Pages ahead: the first time, and at most.
const AHEAD_FIRST: u64 = 4;
const AHEAD_MAX: u64 = 32;

/// How much a store to a page that was loaded for a read counts against markers without one, the most that is counted, and from
/// where on pages ahead are expected to be stored to.
const STORE_WEIGHT: u32 = 2;
const STORES_MAX: u32 = 4;
const STORES_EXPECTED: u32 = 2;

/// The last deltas between faults, in pages.
#[derive(Debug, Default)]
struct History {
    deltas: [i64; DELTAS],
    /// Deltas that were ever added.
    count: usize,
    last: i64,
}

impl History {
    fn record(&mut self, page: i64, delta: i64) {
        self.deltas[self.count % DELTAS] = delta;
        self.count += 1;
        self.last = page;
    }

    /// The delta of most faults: of the last few, or of a longer time if those have none.
    fn trend(&self) -> Option<i64> {
        let known = self.count.min(DELTAS);
        let mut window = WINDOW_MIN;
        while window <= known {
            if let Some(delta) = self.majority(window) {
                return Some(delta).filter(|&delta| delta != 0);
            }
            window *= 2;
        }
        None
    }

    /// The value of more than half of the last deltas (Boyer and Moore's vote).
    fn majority(&self, window: usize) -> Option<i64> {
        let last = || (1..=window).map(|back| self.deltas[(self.count - back) % DELTAS]);
        let (mut candidate, mut votes) = (0, 0usize);
        for delta in last() {
            match votes {
                0 => (candidate, votes) = (delta, 1),
                _ if delta == candidate => votes += 1,
                _ => votes -= 1,
            }
        }
        (last().filter(|&delta| delta == candidate).count() > window / 2).then_some(candidate)
    }
}

/// Pages that were loaded ahead at a time.
#[derive(Clone, Copy, Debug)]
struct Batch {
    stride: i64,
    /// The first page, which stays in its buffer: its fault says that the batch is used, and begins the next one.
    marker: Option<i64>,
    last: i64,
    /// Pages behind the marker.
    rest: u64,
}

/// Faults that are near to one another.
#[derive(Debug)]
struct Stream {
    history: History,
    /// Pages ahead.
    ahead: u64,
    batch: Option<Batch>,
    /// Pages of earlier batches that are in memory: the next batch's first fault says that they were used.
    unproven: u64,
    /// Rises with stores to pages that were loaded for a read, and falls with markers.
    stores: u32,
    used_at: u64,
}

impl Stream {
    fn new(page: i64) -> Stream {
        let history = History { last: page, ..History::default() };
        Stream { history, ahead: AHEAD_FIRST, batch: None, unproven: 0, stores: 0, used_at: 0 }
    }

    /// Whether the fault is the one that follows from the last batch.
    fn is_continued_by(&self, page: i64) -> bool {
        self.batch.is_some_and(|batch| match batch.marker {
            Some(marker) => marker == page,
            None => batch.last + batch.stride == page,
        })
    }

    /// Whether the batch has the page, or has passed it over. What is between the pages of a long stride are other faults.
    fn covers(&self, page: i64) -> bool {
        self.batch.filter(|batch| batch.stride.unsigned_abs() <= NEAR_PAGES).is_some_and(|batch| {
            let (from, to) = (self.history.last.min(batch.last), self.history.last.max(batch.last));
            (from..=to).contains(&page)
        })
    }

    fn distance(&self, page: i64) -> u64 {
        self.history.last.abs_diff(page)
    }
}

/// What follows from a fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Forecast {
    /// Pages to load: the first one, the stride and the number.
    pub(crate) pages: Option<(i64, i64, u64)>,
    stream: usize,
    /// Whether the pages are expected to be stored to soon after they are read.
    pub(crate) expects_stores: bool,
    /// A marker that nobody has touched, and that nobody will.
    pub(crate) dropped: Option<i64>,
    /// Pages ahead that turned out to be used, and that did not.
    pub(crate) used: u64,
    pub(crate) wasted: u64,
}

/// The streams of a process. Pages are numbers.
#[derive(Debug, Default)]
pub(crate) struct Trends {
    all: History,
    streams: Vec<Stream>,
    clock: u64,
}

impl Trends {
    /// Records a fault of an absent page, or of a marker.
    pub(crate) fn record(&mut self, page: i64) -> Forecast {
        self.clock += 1;
        let mut forecast = Forecast::default();
        let Some(index) = self.find_stream(page) else {
            forecast.stream = self.add_stream(page, &mut forecast);
            // The first fault of all has no delta.
            match self.clock {
                1 => self.all.last = page,
                _ => self.all.record(page, page - self.all.last),
            }
            forecast.pages = self.all.trend().map(|stride| (page + stride, stride, AHEAD_FIRST));
            return forecast;
        };
        forecast.stream = index;
        let stream = &mut self.streams[index];
        stream.used_at = self.clock;
        let (delta, from) = match stream.batch {
            Some(batch) if stream.is_continued_by(page) => {
                forecast.used = stream.unproven + u64::from(batch.marker.is_some());
                stream.unproven = if batch.marker.is_some() { batch.rest } else { 0 };
                stream.ahead = (2 * stream.ahead).min(AHEAD_MAX);
                stream.stores = stream.stores.saturating_sub(1);
                stream.batch = None;
                (batch.stride, if batch.marker.is_some() { batch.last } else { page })
            }
            // The same fault again, or one of a page that was not absent when the batch began.
            _ if stream.history.last == page || stream.covers(page) => return forecast,
            _ => {
                give_up(stream, &mut forecast);
                (page - stream.history.last, page)
            }
        };
        stream.history.record(page, delta);
        self.all.record(page, delta);
        forecast.expects_stores = stream.stores >= STORES_EXPECTED;
        let trend = stream.history.trend().or_else(|| self.all.trend());
        if let Some(stride) = trend {
            // A stream whose pages were not used begins anew with one page.
            let ahead = stream.ahead.max(u64::from(stride == delta));
            forecast.pages = (ahead > 0).then_some((from + stride, stride, ahead));
        }
        forecast
    }

    /// Notes the first store to a page that was loaded for a read.
    pub(crate) fn note_store(&mut self, page: i64) {
        let index = self.find_stream(page);
        if let Some(stream) = index.and_then(|index| self.streams.get_mut(index)) {
            stream.stores = (stream.stores + STORE_WEIGHT).min(STORES_MAX);
        }
    }

    /// Notes which of the pages of a forecast are on their way: how many, the first of them if that is a marker, and the last
    /// that is on its way or was in memory.
    pub(crate) fn begin_batch(&mut self, forecast: &Forecast, count: u64, marker: Option<i64>, last: i64) {
        let (Some(stream), Some((_, stride, _))) = (self.streams.get_mut(forecast.stream), forecast.pages)
        else {
            return;
        };
        let rest = count - u64::from(marker.is_some());
        // Without a marker, the fault behind the batch says whether it was used.
        stream.unproven += if marker.is_some() { 0 } else { rest };
        stream.batch = Some(Batch { stride, marker, last, rest });
    }

    fn find_stream(&self, page: i64) -> Option<usize> {
        let continued = self.streams.iter().position(|stream| stream.is_continued_by(page));
        let near = || {
            let streams = self.streams.iter().enumerate();
            let near =
                streams.filter(|(_, stream)| stream.distance(page) <= NEAR_PAGES || stream.covers(page));
            near.min_by_key(|(_, stream)| stream.distance(page)).map(|(index, _)| index)
        };
        continued.or_else(near)
    }

    /// Begins a stream, in the place of the one that had no fault for the longest time if there are many.
    fn add_stream(&mut self, page: i64, forecast: &mut Forecast) -> usize {
        let mut stream = Stream::new(page);
        stream.used_at = self.clock;
        if self.streams.len() < STREAMS {
            self.streams.push(stream);
            return self.streams.len() - 1;
        }
        let streams = self.streams.iter().enumerate();
        let oldest = streams.min_by_key(|(_, stream)| stream.used_at).map_or(0, |(index, _)| index);
        give_up(&mut self.streams[oldest], forecast);
        self.streams[oldest] = stream;
        oldest
    }
}

/// The pages ahead of a stream were not those that followed.
fn give_up(stream: &mut Stream, forecast: &mut Forecast) {
    let batch = stream.batch.take();
    forecast.dropped = batch.and_then(|batch| batch.marker);
    let marked = batch.filter(|batch| batch.marker.is_some()).map_or(0, |batch| batch.rest + 1);
    forecast.wasted = std::mem::take(&mut stream.unproven) + marked;
    if forecast.wasted > 0 {
        stream.ahead /= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Carries out what is forecast: all pages come, the first one as a marker.
    fn fault(trends: &mut Trends, page: i64) -> Forecast {
        let forecast = trends.record(page);
        if let Some((first, stride, count)) = forecast.pages {
            trends.begin_batch(&forecast, count, Some(first), first + (count as i64 - 1) * stride);
        }
        forecast
    }

    #[test]
    fn a_stride_is_found_and_more_pages_come_while_they_are_used() {
        for stride in [1, -1, 3] {
            let mut trends = Trends::default();
            let first = 10_000;
            assert!((0..4).all(|index| fault(&mut trends, first + index * stride).pages.is_none()));
            let begun = fault(&mut trends, first + 4 * stride);
            assert_eq!(begun.pages, Some((first + 5 * stride, stride, 4)));
            // Its marker: the next ones follow behind the batch.
            let next = fault(&mut trends, first + 5 * stride);
            assert_eq!((next.pages, next.used), (Some((first + 9 * stride, stride, 8)), 1));
            let next = fault(&mut trends, first + 9 * stride);
            assert_eq!((next.pages, next.used), (Some((first + 17 * stride, stride, 16)), 4));
        }
    }

    #[test]
    fn a_trend_goes_on_though_no_page_could_come_ahead() {
        let mut trends = Trends::default();
        (0..5).for_each(|page| _ = fault(&mut trends, page));
        let next = trends.record(5);
        let (first, stride, _) = next.pages.unwrap();
        trends.begin_batch(&next, 0, None, first - stride);
        // The last page of the first batch is behind us; nothing was wasted.
        let next = trends.record(9);
        assert_eq!((next.used, next.wasted, next.pages.map(|(first, ..)| first)), (3, 0, Some(10)));
    }

    #[test]
    fn stores_are_expected_while_markers_are_stored_to() {
        let mut trends = Trends::default();
        (0..5).for_each(|page| _ = fault(&mut trends, page));
        (2..5).for_each(|page| trends.note_store(page));
        let mut marker = 5;
        let mut next = |is_stored: bool| {
            let forecast = fault(&mut trends, marker);
            if is_stored {
                trends.note_store(marker);
            }
            marker = forecast.pages.unwrap().0;
            forecast.expects_stores
        };
        assert!((0..8).all(|_| next(true)));
        assert!(!(0..4).map(|_| next(false)).last().unwrap());
    }

    #[test]
    fn walks_through_several_arrays_have_a_trend_each() {
        let mut trends = Trends::default();
        let mut batches = 0;
        for step in 0..16 {
            for array in 0..4i64 {
                let direction = if array % 2 == 0 { 1 } else { -1 };
                let forecast = fault(&mut trends, array * 1_000_000 + 500_000 + direction * step);
                let is_right = |(_, stride, _): &(i64, i64, u64)| *stride == direction;
                // Before a stream has a trend, that from one array to the next counts.
                assert!(step < 4 || forecast.pages.iter().all(is_right), "{forecast:?}");
                batches += u64::from(forecast.pages.is_some());
            }
        }
        assert!(batches >= 4, "{batches}");
    }

    #[test]
    fn long_strides_are_found_over_all_faults_and_a_minority_does_not_matter() {
        let mut trends = Trends::default();
        let mut found = 0;
        for step in 0..12i64 {
            found += u64::from(trends.record(step * 1000).pages.is_some_and(|(_, stride, _)| stride == 1000));
        }
        assert!(found >= 6, "{found}");
        let mut history = History::default();
        [1, 1, 7, 1, 9, 1, 1, 3].iter().for_each(|&delta| history.record(0, delta));
        assert_eq!(history.trend(), Some(1));
        [5, -5, 2, 8, 4, -9, 3, 6].iter().for_each(|&delta| history.record(0, delta));
        assert_eq!(history.trend(), None);
    }

    #[test]
    fn a_long_stride_that_has_ended_stops_no_walk_in_its_range() {
        let mut trends = Trends::default();
        let mut marker = 0;
        for step in 0..12 {
            let forecast = fault(&mut trends, if step < 5 { step * 1000 } else { marker });
            marker = forecast.pages.map_or(marker, |(first, ..)| first);
        }
        let last = trends.streams.iter().filter_map(|stream| stream.batch).map(|batch| batch.last).max();
        let first = (marker + last.unwrap()) / 2 + 300;
        let walked = (0..32).filter_map(|step| fault(&mut trends, first + step).pages);
        assert!(walked.filter(|&(_, stride, _)| stride == 1).count() > 0);
    }

    #[test]
    fn faults_at_random_load_little_and_what_was_not_used_counts() {
        let mut trends = Trends::default();
        let (mut state, mut ahead) = (7u64, 0);
        for _ in 0..10_000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let page = (state >> 40) as i64 % 100_000;
            ahead += fault(&mut trends, page).pages.map_or(0, |(_, _, count)| count);
        }
        assert!(ahead < 100, "{ahead}");
        let mut trends = Trends::default();
        (0..5).for_each(|page| _ = fault(&mut trends, page));
        let elsewhere = fault(&mut trends, 40);
        assert_eq!((elsewhere.wasted, elsewhere.dropped), (4, Some(5)));
    }
}
