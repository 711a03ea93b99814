//! Parts of accesses that wait for a frame.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use crate::access::{Access, Part, Task};
use crate::key::PageKey;

/// Parts for which there was no frame: the pages in the order of their first requests, each with its parts in the order of
/// the requests. Each method takes a time that does not depend on how many parts of other pages wait, except for `keys`: a peer
/// determines that number.
#[derive(Debug, Default)]
pub(crate) struct Starved {
    /// By the number that the page got when its first part came.
    pages: BTreeMap<u64, PageKey>,
    parts: HashMap<PageKey, (u64, Vec<Part>)>,
    next_number: u64,
}

impl Starved {
    pub(crate) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    pub(crate) fn push(&mut self, key: PageKey, part: Part) {
        let (_, parts) = self.parts.entry(key).or_insert_with(|| {
            let number = self.next_number;
            self.next_number += 1;
            self.pages.insert(number, key);
            (number, Vec::new())
        });
        parts.push(part);
    }

    /// The page that has waited for longest.
    pub(crate) fn first(&self) -> Option<PageKey> {
        self.pages.first_key_value().map(|(_, key)| *key)
    }

    /// Whether the access that has waited for longest has lasted for longer than this.
    pub(crate) fn have_waited(&self, patience: Duration) -> bool {
        self.first().is_some_and(|key| self.parts[&key].1[0].access.has_lasted(patience))
    }

    /// Takes the first part of the page that has waited for longest, if it is a barrier: nothing before it waits.
    pub(crate) fn pop_barrier(&mut self) -> Option<Part> {
        let key = self.first()?;
        let (_, parts) = self.parts.get_mut(&key)?;
        if !matches!(parts[0].task, Task::Barrier) {
            return None;
        }
        if parts.len() == 1 {
            return self.take(key).pop();
        }
        Some(parts.remove(0))
    }

    /// Takes the parts of a page.
    pub(crate) fn take(&mut self, key: PageKey) -> Vec<Part> {
        let Some((number, parts)) = self.parts.remove(&key) else { return Vec::new() };
        self.pages.remove(&number);
        parts
    }

    /// The pages for which `is_one` is true, each once, in the order of their first requests.
    pub(crate) fn keys(&self, is_one: impl Fn(&PageKey) -> bool) -> Vec<PageKey> {
        self.pages.values().copied().filter(is_one).collect()
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
