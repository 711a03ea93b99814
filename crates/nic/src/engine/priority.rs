//! The engine's priority where there are fewer processors than threads that want one.

use rustix::process::{getpriority_process, setpriority_process};

/// Change of the engine's nice value while packets pile up: the engine then gets about nine times the processor time of
/// a thread with the usual priority.
const STEP: i32 = -10;

/// The priority of the calling thread, which it may raise for a while. That needs CAP_SYS_NICE; without it nothing
/// happens. `docs/decisions/0035-the-engine-raises-its-priority.md` has the reason.
#[derive(Debug, Default)]
pub(super) struct Priority {
    /// The nice values before and after, while the priority is raised.
    raised: Option<(i32, i32)>,
    refused: bool,
}

impl Priority {
    /// Whether the priority is raised.
    #[inline]
    pub fn is_raised(&self) -> bool {
        self.raised.is_some()
    }

    /// Raises the priority, or restores it. Costs nothing when nothing changes.
    #[inline]
    pub fn set_raised(&mut self, raise: bool) {
        if raise != self.is_raised() && !(raise && self.refused) {
            self.change(raise);
        }
    }

    #[cold]
    fn change(&mut self, raise: bool) {
        let now = nice();
        match self.raised.take() {
            // Unless the value was changed from outside meanwhile.
            Some((before, raised)) if now == Some(raised) => _ = setpriority_process(None, before),
            Some(_) => {}
            None if raise => match now.map(|now| (now, setpriority_process(None, now + STEP))) {
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
    fn a_thread_raises_its_priority_where_permitted_and_restores_it() {
        let before = nice().expect("a nice value");
        let mut priority = Priority::default();
        priority.set_raised(true);
        let first = nice().expect("a nice value");
        assert_eq!(first == before, priority.refused || before == -20, "{before}, then {first}");
        assert!(first <= before && first >= before + STEP);
        priority.set_raised(true);
        assert_eq!(nice(), Some(first));
        priority.set_raised(false);
        assert_eq!(nice(), Some(before));
    }

    #[test]
    fn a_nice_value_set_from_outside_stays() {
        let before = nice().expect("a nice value");
        let mut priority = Priority::default();
        priority.set_raised(true);
        setpriority_process(None, before.max(0) + 1).expect("anybody may step back");
        let set = nice();
        priority.set_raised(false);
        assert_eq!(nice(), set);
    }
}
