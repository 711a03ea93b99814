//! The schedule of a fault. The time is an argument.

/// The begin of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// After this time since the plan came into force.
    AfterNs(u64),
    /// After this many events in the fault's scope.
    AfterCount(u64),
}

/// The duration of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Length {
    Forever,
    Ns(u64),
    Count(u64),
}

/// The begin, duration and repetition of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Schedule {
    pub start: Start,
    pub length: Length,
    /// The fault begins again at this interval from its first begin.
    pub every_ns: Option<u64>,
}

impl Schedule {
    /// Always in force.
    #[cfg(test)]
    pub const ALWAYS: Schedule =
        Schedule { start: Start::AfterNs(0), length: Length::Forever, every_ns: None };
}

/// State of a schedule.
#[derive(Debug)]
pub(crate) struct Window {
    schedule: Schedule,
    /// Number of events.
    events: u64,
    /// Time of the first begin.
    begun_ns: Option<u64>,
    /// Number of the current period, and of events before it.
    period: u64,
    events_before: u64,
    is_open: bool,
}

/// State of the fault at an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Admission {
    /// Whether the fault is in force.
    pub open: bool,
    /// Whether that differs from the last event.
    pub changed: bool,
}

impl Window {
    pub fn new(schedule: Schedule) -> Window {
        Window { schedule, events: 0, begun_ns: None, period: 0, events_before: 0, is_open: false }
    }

    /// Called for each event, in the order of time. Returns whether the fault is in force for it.
    pub fn admit(&mut self, now_ns: u64) -> Admission {
        let index = self.events;
        self.events += 1;
        let open = self.has_begun(now_ns, index) && self.has_not_ended(now_ns, index);
        let changed = std::mem::replace(&mut self.is_open, open) != open;
        Admission { open, changed }
    }

    fn has_begun(&mut self, now_ns: u64, index: u64) -> bool {
        if self.begun_ns.is_none() {
            self.begun_ns = match self.schedule.start {
                // A window by time begins on time, with or without an event.
                Start::AfterNs(at_ns) => (now_ns >= at_ns).then_some(at_ns),
                Start::AfterCount(count) => (index >= count).then_some(now_ns),
            };
            self.events_before = index;
        }
        self.begun_ns.is_some()
    }

    fn has_not_ended(&mut self, now_ns: u64, index: u64) -> bool {
        let mut since_ns = now_ns.saturating_sub(self.begun_ns.unwrap_or(now_ns));
        if let Some(every_ns) = self.schedule.every_ns {
            let period = since_ns / every_ns;
            since_ns %= every_ns;
            if period != self.period {
                (self.period, self.events_before) = (period, index);
            }
        }
        match self.schedule.length {
            Length::Forever => true,
            Length::Ns(ns) => since_ns < ns,
            Length::Count(count) => index - self.events_before < count,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The event times at which the window is open.
    fn open_at(schedule: Schedule, times_ns: impl IntoIterator<Item = u64>) -> Vec<u64> {
        let mut window = Window::new(schedule);
        times_ns.into_iter().filter(|now_ns| window.admit(*now_ns).open).collect()
    }

    #[test]
    fn without_a_schedule_a_fault_is_always_in_force() {
        assert_eq!(open_at(Schedule::ALWAYS, [0, 7, u64::MAX]), [0, 7, u64::MAX]);
    }

    #[test]
    fn a_schedule_by_time_begins_and_ends_on_time() {
        let schedule = Schedule { start: Start::AfterNs(10), length: Length::Ns(5), every_ns: None };
        assert_eq!(open_at(schedule, 0..30), [10, 11, 12, 13, 14]);
        // The end does not depend on an event at the begin.
        assert_eq!(open_at(schedule, [3, 13, 14, 15, 16]), [13, 14]);
        assert_eq!(open_at(schedule, [3, 20]), [] as [u64; 0]);
    }

    #[test]
    fn a_schedule_by_count_skips_and_selects_by_count() {
        let schedule = Schedule { start: Start::AfterCount(3), length: Length::Count(2), every_ns: None };
        assert_eq!(open_at(schedule, 0..10), [3, 4]);
    }

    #[test]
    fn counts_and_times_combine() {
        let schedule = Schedule { start: Start::AfterCount(3), length: Length::Ns(20), every_ns: None };
        assert_eq!(open_at(schedule, [0, 10, 20, 30, 40, 49, 50]), [30, 40, 49]);
        let schedule = Schedule { start: Start::AfterNs(15), length: Length::Count(2), every_ns: None };
        assert_eq!(open_at(schedule, [0, 10, 20, 30, 40, 49, 50]), [20, 30]);
    }

    #[test]
    fn a_schedule_repeats() {
        let schedule = Schedule { start: Start::AfterNs(4), length: Length::Ns(2), every_ns: Some(10) };
        assert_eq!(open_at(schedule, 0..30), [4, 5, 14, 15, 24, 25]);
        let schedule = Schedule { start: Start::AfterCount(1), length: Length::Count(1), every_ns: Some(10) };
        assert_eq!(open_at(schedule, (0..50).step_by(3)), [3, 15, 24, 33, 45]);
    }

    #[test]
    fn changes_are_reported_once() {
        let schedule = Schedule { start: Start::AfterNs(1), length: Length::Ns(2), every_ns: None };
        let mut window = Window::new(schedule);
        let changes: Vec<bool> = (0..5).map(|now_ns| window.admit(now_ns).changed).collect();
        assert_eq!(changes, [false, true, false, true, false]);
    }
}
