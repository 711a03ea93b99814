//! Parts of accesses that wait for a frame.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::access::{Access, Part, Task};
use crate::key::PageKey;

/// Parts for which there was no frame, in the order of the requests.
#[derive(Debug, Default)]
pub(crate) struct Starved(VecDeque<(PageKey, Part)>);

impl Starved {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn push(&mut self, key: PageKey, part: Part) {
        self.0.push_back((key, part));
    }

    /// The page of the part that has waited for longest.
    pub(crate) fn first(&self) -> Option<PageKey> {
        self.0.front().map(|(key, _)| *key)
    }

    /// Whether the access that has waited for longest has lasted for longer than this.
    pub(crate) fn have_waited(&self, patience: Duration) -> bool {
        self.0.front().is_some_and(|(_, part)| part.access.has_lasted(patience))
    }

    /// Takes the part that has waited for longest, if it is a barrier: nothing before it waits.
    pub(crate) fn pop_barrier(&mut self) -> Option<Part> {
        let is_barrier = self.0.front().is_some_and(|(_, part)| matches!(part.task, Task::Barrier));
        if is_barrier { self.0.pop_front().map(|(_, part)| part) } else { None }
    }

    /// Takes the parts of a page.
    pub(crate) fn take(&mut self, key: PageKey) -> Vec<Part> {
        let all = std::mem::take(&mut self.0);
        let (same, others): (VecDeque<_>, _) = all.into_iter().partition(|(other, _)| *other == key);
        self.0 = others;
        same.into_iter().map(|(_, part)| part).collect()
    }

    /// The pages for which `is_one` is true, each once.
    pub(crate) fn keys(&self, is_one: impl Fn(&PageKey) -> bool) -> Vec<PageKey> {
        let mut keys: Vec<PageKey> = self.0.iter().map(|(key, _)| *key).filter(is_one).collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }
}

/// Has an access, such as a flush, wait for the parts under way of the pages for which `is_one` is true: those that wait for
/// fills, which are given with their pages, and those that wait for frames.
pub(crate) fn add_barriers<'a>(
    access: &Arc<Access>,
    fills: impl Iterator<Item = (&'a PageKey, &'a mut Vec<Part>)>,
    starved: &mut Starved,
    is_one: impl Fn(&PageKey) -> bool,
) {
    let barrier = || {
        access.add_part();
        Part { access: access.clone(), offset: 0, task: Task::Barrier }
    };
    fills.filter(|(key, _)| is_one(key)).for_each(|(_, waiting)| waiting.push(barrier()));
    for key in starved.keys(is_one) {
        starved.push(key, barrier());
    }
}
