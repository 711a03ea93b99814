//! READs of extended regions: the division into READs of present pages and calls for absent ones, and the inspection of the data.

use std::ops::Range;

use smallvec::SmallVec;
use terrace_transport::{LocalError, SendOp};

use super::calls::{self, Request, Task};
use super::entry::{Entry, Seq};
use crate::pages::PageBitmap;
use crate::proto::{Pages, READ_PAGES_MAX, Read};
use crate::region::Region;
use crate::request::Local;
use crate::sge_list::{LocalMemory, gather, sub_elements};
use crate::signature::{CHUNK_BYTES, PAGE_BYTES};

const PAGE: u64 = PAGE_BYTES as u64;

/// A byte range of a work request, relative to its first byte.
pub(super) type ByteRange = Range<u64>;

/// The division of a READ.
pub(super) struct Plan {
    /// The ranges that are considered present, in runs as long as possible.
    pub(super) runs: SmallVec<[ByteRange; 2]>,
    /// The pages that are considered absent.
    pub(super) absent: PageBitmap,
}

/// Divides a READ of a region by the residency of its units in the client's view. Without `may_call`, all units count
/// as present.
pub(super) fn plan(region: &Region, va: u64, length: u64, may_call: bool) -> Plan {
    let layout = region.layout();
    let unit_bytes = u64::from(layout.unit_bytes());
    let start = layout.grid(va);
    let mut plan = Plan { runs: SmallVec::new(), absent: PageBitmap::default() };
    for unit in layout.units(va, length) {
        let from = (unit as u64 * unit_bytes).saturating_sub(start);
        let to = ((unit as u64 + 1) * unit_bytes - start).min(length);
        if may_call && !region.residency().is_present(unit) {
            if plan.absent.page_count() == 0 {
                plan.absent = PageBitmap::new(layout.page_count(va, length));
            }
            plan.absent.insert_range(pages_of(layout.page_offset(va), &(from..to)));
        } else if let Some(run) = plan.runs.last_mut().filter(|run| run.end == from) {
            run.end = to;
        } else {
            plan.runs.push(from..to);
        }
    }
    plan
}

/// The pages of a byte range, in an access that begins `page_offset` bytes into its page 0.
fn pages_of(page_offset: usize, range: &ByteRange) -> Range<usize> {
    let offset = page_offset as u64;
    ((offset + range.start) / PAGE) as usize..(offset + range.end).div_ceil(PAGE) as usize
}

/// The byte range of a page, in an access of `length` bytes.
fn range_of(page_offset: usize, page: usize, length: u64) -> ByteRange {
    let (start, offset) = (page as u64 * PAGE, page_offset as u64);
    start.saturating_sub(offset)..(start + PAGE - offset).min(length)
}

/// Divides a run so that each READ's packets begin at chunk boundaries of the grid. Only then does an absent packet
/// contain a whole chunk, or consist of an incomplete one, which is compared by itself. A READ of one packet needs no
/// division: it is present or absent as a whole.
pub(super) fn align(region: &Region, va: u64, run: ByteRange, mtu_bytes: u64) -> SmallVec<[ByteRange; 2]> {
    let start = region.layout().grid(va + run.start);
    let head_end = run.start + (start.next_multiple_of(mtu_bytes) - start);
    let is_aligned = start.is_multiple_of(CHUNK_BYTES as u64);
    if is_aligned || run.end - run.start <= mtu_bytes || head_end >= run.end {
        SmallVec::from_iter([run])
    } else {
        SmallVec::from_iter([run.start..head_end, head_end..run.end])
    }
}

/// The calls for wanted pages of a READ: one for each element with wanted pages.
pub(super) fn read_calls(seq: Seq, entry: &Entry, region: &Region, wanted: &PageBitmap) -> Vec<Task> {
    let mut tasks = Vec::new();
    let SendOp::Read { va, .. } = entry.wr.op else { return tasks };
    if wanted.is_empty() {
        return tasks;
    }
    let page_offset = region.layout().page_offset(va);
    for (at, sge) in sub_elements(entry.sges(), 0, entry.length) {
        let element = at..at + u64::from(sge.length);
        let mut pages = pages_of(page_offset, &element).filter(|&page| wanted.contains(page)).peekable();
        while let Some(first) = pages.next() {
            let mut bits: SmallVec<[usize; 16]> = SmallVec::from_iter([0]);
            while let Some(page) = pages.next_if(|page| page - first < READ_PAGES_MAX) {
                bits.push(page - first);
            }
            let last = first + bits.last().copied().unwrap_or(0);
            let from = range_of(page_offset, first, entry.length).start.max(element.start);
            let to = range_of(page_offset, last, entry.length).end.min(element.end);
            let mut set = PageBitmap::new(last - first + 1);
            bits.iter().for_each(|&bit| set.insert(bit));
            let offset = ((page_offset as u64 + from) % PAGE) as u16;
            tasks.push(read_call(seq, entry, from..to, Some(Pages { offset, wanted: set })));
        }
    }
    tasks
}

/// The calls for all of a READ, without knowledge of the region's grid: one for each element.
pub(super) fn whole_read_calls(seq: Seq, entry: &Entry) -> Vec<Task> {
    sub_elements(entry.sges(), 0, entry.length)
        .map(|(at, sge)| read_call(seq, entry, at..at + u64::from(sge.length), None))
        .collect()
}

/// A call for a byte range of a READ within one element.
fn read_call(seq: Seq, entry: &Entry, range: ByteRange, pages: Option<Pages>) -> Task {
    let (va, rkey) = match entry.wr.op {
        SendOp::Read { va, rkey } => (va, rkey),
        _ => (0, 0),
    };
    let length = range.end - range.start;
    let dest = sub_elements(entry.sges(), range.start, length)
        .next()
        .map_or((0, 0), |(_, sge)| (sge.addr, sge.lkey));
    let request: Request = calls::read_request(rkey, va + range.start, length as u32, pages, dest);
    Task {
        seq: Some(seq),
        offset: range.start,
        local: Some(Local { addr: dest.0, length }),
        request,
        refusals: 0,
    }
}

/// Inspects the data of a posted range of a READ, and adds the pages that may have been absent to the suspects. The NIC
/// looks up residency once for each packet and page, so one chunk of each is compared.
///
/// # Errors
/// If the program's memory cannot be read.
pub(super) fn inspect(
    entry: &Entry,
    region: &Region,
    range: ByteRange,
    mtu_bytes: u64,
    memory: &impl LocalMemory,
    suspects: &mut PageBitmap,
) -> Result<(), LocalError> {
    let SendOp::Read { va, .. } = entry.wr.op else { return Ok(()) };
    let page_offset = region.layout().page_offset(va);
    let mut at = range.start;
    while at < range.end {
        let page = ((page_offset as u64 + at) / PAGE) as usize;
        let packet_end = at + mtu_bytes - (at - range.start) % mtu_bytes;
        let end = packet_end.min(range_of(page_offset, page, entry.length).end).min(range.end);
        let mut chunk = [0; CHUNK_BYTES];
        let chunk = &mut chunk[..CHUNK_BYTES.min((end - at) as usize)];
        gather(memory, entry.sges(), at, chunk)?;
        let offset = ((page_offset as u64 + at) % PAGE) as usize;
        if region.signature_page().matches(offset, chunk) || is_overwritten(entry, &(at..end)) {
            if suspects.page_count() == 0 {
                *suspects = PageBitmap::new(region.layout().page_count(va, entry.length));
            }
            suspects.insert(page);
        }
        at = end;
    }
    Ok(())
}

/// Whether data of an earlier READ may have overwritten this byte range.
fn is_overwritten(entry: &Entry, range: &ByteRange) -> bool {
    !entry.overwritten.is_empty()
        && sub_elements(entry.sges(), range.start, range.end - range.start)
            .any(|(_, sge)| entry.overwritten.iter().any(|local| local.overlaps(&Local::from(&sge))))
}

/// Marks the units of the suspect pages absent.
pub(super) fn mark_absent(region: &Region, va: u64, suspects: &PageBitmap) {
    let first_page = region.layout().grid(va) / PAGE;
    let unit_pages = u64::from(region.layout().unit_bytes()) / PAGE;
    for run in suspects.runs() {
        let first = (first_page + run.start as u64) / unit_pages;
        let last = (first_page + run.end as u64 - 1) / unit_pages;
        (first..=last).for_each(|unit| region.residency().mark_absent(unit as usize));
    }
}

/// Marks pages present that the server has brought into memory for a call. A unit of several pages stays absent: the server
/// may have fetched these pages only, and not for long.
pub(super) fn mark_present(region: &Region, request: &Request) {
    let layout = region.layout();
    if u64::from(layout.unit_bytes()) != PAGE {
        return;
    }
    let mark = |units: Range<usize>| units.for_each(|unit| region.residency().mark_present(unit));
    match request {
        Request::Read(Read { va, pages: Some(pages), .. }) => {
            let first = layout.units(*va, 1).start;
            pages.wanted.runs().for_each(|run| mark(first + run.start..first + run.end));
        }
        Request::Read(Read { va, length, pages: None, .. }) | Request::Write { va, length, .. } => {
            mark(layout.units(*va, (*length).into()));
        }
        Request::Magic(_) => {}
    }
}
