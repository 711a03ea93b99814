//! The engine's priority where there are fewer processors than threads that want one.

use rustix::process::{getpriority_process, setpriority_process};

/// Change of the engine's nice value while packets pile up: the engine then gets about nine times the processor time of
/// a thread with the usual priority.
const STEP: i32 = -10;

/// The priority of the calling thread, which it may raise for a while. That needs CAP_SYS_NICE; without it nothing
/// happens. `docs/decisions/0035-the-engine-raises-its-priority.md` has the reason.
#[derive(Debug, Default)]
pub(super) struct Rank {
    /// The nice values before and after, while the priority is raised.
    raised: Option<(i32, i32)>,
    refused: bool,
}

impl Rank {
    /// Whether the priority is raised.
    #[inline]
    pub fn is_first(&self) -> bool {
        self.raised.is_some()
    }

    /// Raises the priority, or restores it. Costs nothing when nothing changes.
    #[inline]
    pub fn set_first(&mut self, first: bool) {
        if first != self.is_first() && !(first && self.refused) {
            self.change(first);
        }
    }

    #[cold]
    fn change(&mut self, first: bool) {
        let now = nice();
        match self.raised.take() {
            // Unless the value was changed from outside meanwhile.
            Some((before, raised)) if now == Some(raised) => _ = setpriority_process(None, before),
            Some(_) => {}
            None if first => match now.map(|now| (now, setpriority_process(None, now + STEP))) {
                // The system has limits of its own.
                Some((before, Ok(()))) => self.raised = nice().map(|raised| (before, raised)),
                _ => self.refused = true,
            },
            None => {}
        }
    }
}

/// The nice value of the calling thread: on Linux each has its own.
fn nice() -> Option<i32> {
    getpriority_process(None).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_goes_first_where_it_may_and_back_to_its_place() {
        let before = nice().expect("a nice value");
        let mut rank = Rank::default();
        rank.set_first(true);
        let first = nice().expect("a nice value");
        assert_eq!(first == before, rank.refused || before == -20, "{before}, then {first}");
        assert!(first <= before && first >= before + STEP);
        rank.set_first(true);
        assert_eq!(nice(), Some(first));
        rank.set_first(false);
        assert_eq!(nice(), Some(before));
    }

    #[test]
    fn what_others_have_set_meanwhile_stays() {
        let before = nice().expect("a nice value");
        let mut rank = Rank::default();
        rank.set_first(true);
        setpriority_process(None, before.max(0) + 1).expect("anybody may step back");
        let set = nice();
        rank.set_first(false);
        assert_eq!(nice(), set);
    }
}
