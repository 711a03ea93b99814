//! The answers to finished requests, until the batch is posted. Successive ids with one status are answered together.

use terrace_access::proto::{Done, IMMEDIATE_REQUESTS_MAX, Status, immediate_of};

use crate::control::BatchPlace;

/// The most data behind the last WRITE of a request that an answer waits for: more would delay the client.
const DELAY_BYTES_MAX: u64 = 64 << 10;

/// The answer to a finished request.
#[derive(Clone, Copy, Debug)]
struct Answer {
    id: u64,
    status: Status,
    /// The WRITE of its last data in the batch, if any.
    write: Option<BatchPlace>,
}

/// How the client learns of answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Report {
    /// By an immediate of a WRITE of the batch.
    Immediate { write: usize, immediate: u32 },
    /// By a message.
    Message { id: u64, done: Done },
}

/// The answers that are not in the batch yet.
#[derive(Debug, Default)]
pub(super) struct Answers(Vec<Answer>);

/// Successive requests with one status.
#[derive(Debug)]
struct Run {
    first_id: u64,
    status: Status,
    count: u32,
    /// The first and the last WRITE that end the data of a request.
    writes: Option<(BatchPlace, BatchPlace)>,
}

impl Answers {
    /// Adds the answer to a request, whose last data is in this WRITE of the batch.
    pub fn add(&mut self, id: u64, status: Status, write: Option<BatchPlace>) {
        self.0.push(Answer { id, status, write });
    }

    /// Takes all answers, as few reports. An immediate is that of the last of the requests' WRITEs, so their data has all
    /// arrived before it.
    pub fn take(&mut self) -> Vec<Report> {
        self.0.sort_by_key(|answer| answer.id);
        let mut reports = Vec::new();
        let mut run: Option<Run> = None;
        for answer in self.0.drain(..) {
            if !run.as_mut().is_some_and(|run| run.add(&answer)) {
                reports.extend(run.replace(Run::new(&answer)).as_ref().map(Run::report));
            }
        }
        reports.extend(run.as_ref().map(Run::report));
        reports
    }
}

impl Run {
    fn new(answer: &Answer) -> Run {
        let writes = answer.write.map(|write| (write, write));
        Run { first_id: answer.id, status: answer.status, count: 1, writes }
    }

    /// Adds an answer. False if it does not fit.
    fn add(&mut self, answer: &Answer) -> bool {
        let next_id = self.first_id.checked_add(self.count.into());
        let writes = match (self.writes, answer.write) {
            (Some((first, last)), Some(write)) => Some((
                if write.index < first.index { write } else { first },
                if write.index > last.index { write } else { last },
            )),
            (writes, write) => writes.or(write.map(|write| (write, write))),
        };
        let delay_bytes = writes.map_or(0, |(first, last)| last.end_bytes - first.end_bytes);
        // The upper half of an id is that of its session at the client.
        let fits = next_id == Some(answer.id)
            && answer.id >> 32 == self.first_id >> 32
            && answer.status == self.status
            && self.count < IMMEDIATE_REQUESTS_MAX
            && delay_bytes <= DELAY_BYTES_MAX;
        if fits {
            (self.count, self.writes) = (self.count + 1, writes);
        }
        fits
    }

    fn report(&self) -> Report {
        let (id, status, count) = (self.first_id, self.status, self.count);
        let immediate = immediate_of(id..id.saturating_add(count.into())).filter(|_| status == Status::Ok);
        match (self.writes, immediate) {
            (Some((_, last)), Some(immediate)) => Report::Immediate { write: last.index, immediate },
            _ => Report::Message { id, done: Done { status, count } },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    /// The reports of answers whose last data is in these WRITEs of a page each.
    fn reports(answers: &[(u64, Status, Option<usize>)]) -> Vec<Report> {
        let place = |index: usize| BatchPlace { index, end_bytes: (index as u64 + 1) * PAGE };
        let mut all = Answers::default();
        answers.iter().for_each(|&(id, status, write)| all.add(id, status, write.map(place)));
        let reports = all.take();
        assert_eq!(all.take(), []);
        reports
    }

    fn immediate(write: usize, id: u64, count: u64) -> Report {
        Report::Immediate { write, immediate: immediate_of(id..id + count).expect("small ids") }
    }

    fn message(id: u64, status: Status, count: u32) -> Report {
        Report::Message { id, done: Done { status, count } }
    }

    #[test]
    fn successive_successes_share_the_immediate_of_the_last_write() {
        let ok = Status::Ok;
        assert_eq!(reports(&[(5, ok, Some(3))]), [immediate(3, 5, 1)]);
        let finished = [(7, ok, Some(0)), (5, ok, Some(4)), (6, ok, Some(1)), (9, ok, Some(5))];
        assert_eq!(reports(&finished), [immediate(4, 5, 3), immediate(5, 9, 1)]);
        assert_eq!(reports(&[(7, ok, None), (8, ok, Some(2))]), [immediate(2, 7, 2)]);
    }

    #[test]
    fn failures_and_answers_without_data_are_messages() {
        let (ok, busy) = (Status::Ok, Status::Busy);
        let finished = [(1, ok, None), (2, ok, None), (3, busy, None), (4, busy, None), (5, ok, Some(0))];
        let expected = [message(1, ok, 2), message(3, busy, 2), immediate(0, 5, 1)];
        assert_eq!(reports(&finished), expected);
        // A client may have chosen the same id twice, or one that does not fit.
        let expected = [message(u64::MAX, busy, 1), message(u64::MAX, busy, 1)];
        assert_eq!(reports(&[(u64::MAX, busy, None), (u64::MAX, busy, None)]), expected);
        assert_eq!(reports(&[(1 << 18, ok, Some(7))]), [message(1 << 18, ok, 1)]);
    }

    #[test]
    fn no_answer_waits_for_much_data_of_others() {
        let finished: Vec<_> = (0..40).map(|index| (index, Status::Ok, Some(index as usize))).collect();
        assert_eq!(reports(&finished), [immediate(16, 0, 17), immediate(33, 17, 17), immediate(39, 34, 6)]);
        let apart = [(1, Status::Ok, Some(30)), (2, Status::Ok, Some(0)), (3, Status::Ok, Some(1))];
        assert_eq!(reports(&apart), [immediate(30, 1, 1), immediate(1, 2, 2)]);
    }

    #[test]
    fn long_runs_have_several_reports() {
        let finished: Vec<_> = (0..100).map(|index| (index, Status::Busy, None)).collect();
        assert_eq!(reports(&finished), [message(0, Status::Busy, 64), message(64, Status::Busy, 36)]);
    }
}
