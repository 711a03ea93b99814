//! Sets of pages of one access, as bitmaps of any length.

use std::ops::Range;

use smallvec::SmallVec;

const WORD_BITS: usize = 64;

/// A set of the pages of an access. Page 0 contains the access's first byte.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageBitmap {
    page_count: usize,
    /// Bits beyond the last page are zero.
    words: SmallVec<[u64; 2]>,
}

impl PageBitmap {
    /// An empty set for an access of `page_count` pages.
    pub fn new(page_count: usize) -> PageBitmap {
        PageBitmap { page_count, words: SmallVec::from_elem(0, page_count.div_ceil(WORD_BITS)) }
    }

    /// A full set for an access of `page_count` pages.
    pub fn full(page_count: usize) -> PageBitmap {
        let mut pages = PageBitmap::new(page_count);
        pages.insert_range(0..page_count);
        pages
    }

    /// A bitmap from its words; page `n` is bit `n % 64` of word `n / 64`. `None` if the number of words does not fit
    /// the number of pages, or a bit beyond the last page is set.
    pub fn from_words(page_count: usize, words: impl Iterator<Item = u64>) -> Option<PageBitmap> {
        let words: SmallVec<[u64; 2]> = words.take(page_count.div_ceil(WORD_BITS) + 1).collect();
        let spare_bits = words.len().checked_mul(WORD_BITS)?.checked_sub(page_count)?;
        let fits = spare_bits < WORD_BITS
            && words.last().is_none_or(|&last| spare_bits == 0 || last >> (WORD_BITS - spare_bits) == 0);
        fits.then_some(PageBitmap { page_count, words })
    }

    /// The words.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// The number of pages of the access, in the set or not.
    pub fn page_count(&self) -> usize {
        self.page_count
    }

    /// The number of pages in the set.
    pub fn count(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether no page is in the set.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }

    /// Whether a page is in the set.
    pub fn contains(&self, page: usize) -> bool {
        page < self.page_count && self.words[page / WORD_BITS] & (1 << (page % WORD_BITS)) != 0
    }

    /// Adds a page.
    ///
    /// # Panics
    /// If the access has no such page.
    pub fn insert(&mut self, page: usize) {
        assert!(page < self.page_count, "page {page} of {}", self.page_count);
        self.words[page / WORD_BITS] |= 1 << (page % WORD_BITS);
    }

    /// Adds several pages.
    ///
    /// # Panics
    /// If the access has fewer pages.
    pub fn insert_range(&mut self, pages: Range<usize>) {
        pages.for_each(|page| self.insert(page));
    }

    /// The runs of adjacent pages in the set, ascending.
    pub fn runs(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let mut from = 0;
        std::iter::from_fn(move || {
            let run = self.next_run(from)?;
            from = run.end;
            Some(run)
        })
    }

    /// The first run of adjacent pages in the set, at or after `from`.
    pub fn next_run(&self, from: usize) -> Option<Range<usize>> {
        let start = self.find_next(from, true)?;
        Some(start..self.find_next(start, false).unwrap_or(self.page_count))
    }

    /// The first page at or after `from` that is in the set (`member`), or is not in the set (`!member`).
    fn find_next(&self, from: usize, member: bool) -> Option<usize> {
        let mut page = from;
        while page < self.page_count {
            let word = self.words[page / WORD_BITS];
            let wanted = if member { word } else { !word } >> (page % WORD_BITS);
            if wanted != 0 {
                let found = page + wanted.trailing_zeros() as usize;
                return (found < self.page_count).then_some(found);
            }
            page = (page / WORD_BITS + 1) * WORD_BITS;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn runs_cover_exactly_the_members(members in prop::collection::vec(any::<bool>(), 0..300)) {
            let mut pages = PageBitmap::new(members.len());
            for (page, _) in members.iter().enumerate().filter(|(_, member)| **member) {
                pages.insert(page);
            }
            let mut covered = vec![false; members.len()];
            let mut last_end = None;
            for run in pages.runs() {
                prop_assert!(!run.is_empty() && last_end.is_none_or(|end| end < run.start));
                last_end = Some(run.end);
                covered[run].fill(true);
            }
            prop_assert_eq!(&covered, &members);
            prop_assert_eq!(pages.count(), members.iter().filter(|member| **member).count());
            prop_assert_eq!(pages.is_empty(), !members.contains(&true));
            prop_assert!(members.iter().enumerate().all(|(page, &member)| pages.contains(page) == member));
            let again = PageBitmap::from_words(members.len(), pages.words().iter().copied());
            prop_assert_eq!(again, Some(pages));
        }
    }

    #[test]
    fn words_that_do_not_fit_are_refused() {
        assert!(PageBitmap::from_words(65, [0, 1].into_iter()).is_some());
        assert!(PageBitmap::from_words(65, [0, 2].into_iter()).is_none());
        assert!(PageBitmap::from_words(65, [0].into_iter()).is_none());
        assert!(PageBitmap::from_words(64, [0, 0].into_iter()).is_none());
        assert!(PageBitmap::from_words(64, [u64::MAX].into_iter()).is_some());
        assert!(PageBitmap::from_words(0, [].into_iter()).is_some());
    }
}
