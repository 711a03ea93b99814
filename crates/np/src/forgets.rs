//! The keys that the peer has to forget. It is asked about some at a time, however many regions end at once.

use std::collections::{HashSet, VecDeque};

use terrace_nic::Time;

/// The most questions that the peer has not answered.
const ASKED_MAX: usize = 256;
/// Within so many nanoseconds the peer answers [`ASKED_MAX`] questions, if more keys wait.
const ROUND_NS: u64 = 10_000_000_000;

/// Keys that wait, because the peer has not answered earlier questions.
struct Wait {
    since: Time,
    /// The answers that have come meanwhile.
    answer_count: usize,
}

/// Keys whose regions have ended, and that the peer knows.
#[derive(Default)]
pub(crate) struct Forgets {
    not_sent: VecDeque<u32>,
    asked: HashSet<u32>,
    wait: Option<Wait>,
}

impl Forgets {
    /// Adds a key.
    pub fn add(&mut self, rkey: u32) {
        self.not_sent.push_back(rkey);
    }

    /// The next key that the peer is asked to forget.
    pub fn ask(&mut self, now: Time) -> Option<u32> {
        if self.not_sent.is_empty() {
            self.wait = None;
        } else if self.asked.len() == ASKED_MAX {
            self.wait.get_or_insert(Wait { since: now, answer_count: 0 });
            return None;
        }
        let rkey = self.not_sent.pop_front()?;
        self.asked.insert(rkey);
        Some(rkey)
    }

    /// Takes that the peer has forgotten a key. False if it has not been asked to.
    pub fn note_answer(&mut self, rkey: u32) -> bool {
        if let Some(wait) = &mut self.wait {
            wait.answer_count += 1;
        }
        // The next round begins when a key has to wait again.
        self.wait.take_if(|wait| wait.answer_count == ASKED_MAX);
        self.asked.remove(&rkey)
    }

    /// By when the peer has to answer.
    pub fn deadline(&self) -> Option<Time> {
        Some(self.wait.as_ref()?.since.after_ns(ROUND_NS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asks as much as is possible.
    fn ask_all(forgets: &mut Forgets, now: Time) -> Vec<u32> {
        std::iter::from_fn(|| forgets.ask(now)).collect()
    }

    #[test]
    fn however_many_regions_end_at_once_the_peer_has_time_to_answer() {
        let mut forgets = Forgets::default();
        (0..5000).for_each(|key| forgets.add(key));
        let mut asked = ask_all(&mut forgets, Time(1));
        assert_eq!((asked.len(), forgets.deadline()), (ASKED_MAX, Some(Time(1).after_ns(ROUND_NS))));
        let mut index = 0;
        while index < asked.len() {
            assert!(forgets.note_answer(asked[index]));
            index += 1;
            let now = Time(index as u64 * 1000);
            asked.extend(ask_all(&mut forgets, now));
            assert!(forgets.deadline().is_none_or(|at| at > now.after_ns(ROUND_NS / 2)));
        }
        assert_eq!((asked, forgets.deadline()), ((0..5000).collect(), None));
    }

    #[test]
    fn a_peer_that_answers_too_little_is_overdue() {
        let mut forgets = Forgets::default();
        (0..1000).for_each(|key| forgets.add(key));
        ask_all(&mut forgets, Time(1));
        let deadline = forgets.deadline();
        assert!(forgets.note_answer(5));
        ask_all(&mut forgets, Time(500));
        assert_eq!(forgets.deadline(), deadline);
    }

    #[test]
    fn only_answers_to_questions_count() {
        let mut forgets = Forgets::default();
        forgets.add(7);
        assert!(!forgets.note_answer(7));
        assert_eq!((forgets.ask(Time(1)), forgets.deadline()), (Some(7), None));
        assert!(forgets.note_answer(7) && !forgets.note_answer(7));
    }
}
