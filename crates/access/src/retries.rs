//! Calls that the peer answered with `Busy`, until they are sent again.

use terrace_transport::Time;

/// How long a call waits after `Busy`: twice as long after each further one, up to a limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backoff {
    /// The delay after the first `Busy`, in nanoseconds.
    pub(crate) first_ns: u64,
    /// The most doublings of the delay.
    pub(crate) doublings_max: u32,
}

/// Tasks with the end of their delay.
#[derive(Debug)]
pub(crate) struct Retries<T>(Vec<(Time, T)>);

impl<T> Default for Retries<T> {
    fn default() -> Retries<T> {
        Retries(Vec::new())
    }
}

impl<T> Retries<T> {
    /// Delays a task. `refusals` is the number of its `Busy` answers, which is incremented.
    pub(crate) fn delay(
        &mut self,
        now: Time,
        backoff: Backoff,
        mut task: T,
        refusals: impl Fn(&mut T) -> &mut u32,
    ) {
        let refusals = refusals(&mut task);
        let delay_ns = backoff.first_ns << (*refusals).min(backoff.doublings_max);
        *refusals += 1;
        self.0.push((now.after_ns(delay_ns), task));
    }

    /// Takes out the tasks whose delay is over.
    pub(crate) fn take_due(&mut self, now: Time) -> impl Iterator<Item = T> + '_ {
        self.0.extract_if(.., move |(until, _)| *until <= now).map(|(_, task)| task)
    }

    /// The end of the earliest delay.
    pub(crate) fn deadline(&self) -> Option<Time> {
        self.0.iter().map(|(until, _)| *until).min()
    }

    /// The tasks.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|(_, task)| task)
    }

    /// Takes out the tasks that `is_wanted` selects.
    pub(crate) fn take_if(&mut self, mut is_wanted: impl FnMut(&T) -> bool) -> impl Iterator<Item = T> {
        self.0.extract_if(.., move |(_, task)| is_wanted(task)).map(|(_, task)| task)
    }

    /// Takes out all tasks.
    pub(crate) fn take_all(&mut self) -> impl Iterator<Item = T> + use<T> {
        std::mem::take(&mut self.0).into_iter().map(|(_, task)| task)
    }
}
