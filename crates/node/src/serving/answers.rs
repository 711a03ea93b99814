//! The answers to finished requests, until the batch is posted. Successive ids with one status are answered together.

use terrace_access::proto::{Done, IMMEDIATE_REQUESTS_MAX, Status, immediate_of};

/// The answer to a finished request.
#[derive(Clone, Copy, Debug)]
struct Answer {
    id: u64,
    status: Status,
    /// The WRITE of its last data in the batch, if any.
    write: Option<usize>,
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

impl Answers {
    /// Adds the answer to a request, whose last data is in the WRITE with this index in the batch.
    pub fn add(&mut self, id: u64, status: Status, write: Option<usize>) {
        self.0.push(Answer { id, status, write });
    }

    /// Takes all answers, as few reports. An immediate is that of the last of the requests' WRITEs, so their data has all
    /// arrived before it.
    pub fn take(&mut self) -> Vec<Report> {
        self.0.sort_by_key(|answer| answer.id);
        // The upper half of an id is that of its session at the client.
        let follows = |one: &Answer, next: &Answer| {
            let is_next = one.id.checked_add(1) == Some(next.id) && one.id >> 32 == next.id >> 32;
            is_next && one.status == next.status
        };
        let runs = self.0.chunk_by(follows);
        let reports = runs.flat_map(|run| run.chunks(IMMEDIATE_REQUESTS_MAX as usize)).map(report).collect();
        self.0.clear();
        reports
    }
}

/// The report of successive requests with one status.
fn report(run: &[Answer]) -> Report {
    let (id, status, count) = (run[0].id, run[0].status, run.len() as u32);
    let last_write = run.iter().filter_map(|answer| answer.write).max();
    let immediate = immediate_of(id..id.saturating_add(count.into())).filter(|_| status == Status::Ok);
    match (last_write, immediate) {
        (Some(write), Some(immediate)) => Report::Immediate { write, immediate },
        _ => Report::Message { id, done: Done { status, count } },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reports(answers: &[(u64, Status, Option<usize>)]) -> Vec<Report> {
        let mut all = Answers::default();
        answers.iter().for_each(|&(id, status, write)| all.add(id, status, write));
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
    fn long_runs_have_several_reports() {
        let finished: Vec<_> = (0..100).map(|index| (index, Status::Ok, Some(index as usize))).collect();
        assert_eq!(reports(&finished), [immediate(63, 0, 64), immediate(99, 64, 36)]);
    }
}
