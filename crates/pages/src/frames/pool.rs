//! The pool of frames.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use rustix::fs::{FallocateFlags, OFlags};
use terrace_hostmem::PAGE_BYTES;
use terrace_shm::AccessCounters;

use crate::error::PagesError;
use crate::sys::{self, Mapping, PATIENCE};

use super::layout::{self, CHUNK_BYTES, Header, LAYOUT, Layout, SLOTS};
use super::place::{self, PoolFile};
use super::record::Record;
use super::region_slot::{QUADS, RegionSlot};

/// Frames in a part of the file that is allocated at a time.
const CHUNK_FRAMES: usize = (CHUNK_BYTES / PAGE_BYTES) as usize;

/// The frames of a node, and what is kept about each.
#[derive(Debug)]
pub(crate) struct Pool {
    file: File,
    path: Option<PathBuf>,
    mapping: Mapping,
    layout: Layout,
    /// Writes to a frame that are under way, by threads of this process.
    pins: Box<[AtomicU16]>,
    counters: AccessCounters,
    /// A bit for each chunk whose memory is allocated: an access to other frames could be a SIGBUS.
    allocated: Box<[AtomicU64]>,
    dirty_count: AtomicUsize,
    /// The last allocation has failed.
    is_out_of_memory: AtomicBool,
    /// Descriptions of the file that same-host peers get, to write and to read. They do not hold the pool's lock, but
    /// one that says that peers may have the frames mapped.
    shared: [OwnedFd; 2],
}

/// A pool that is open.
#[derive(Debug)]
pub(crate) enum Opened {
    /// It has the wanted number of frames. They may hold pages of an earlier process.
    Ready(Pool),
    /// It has another number of frames, and they hold pages of an earlier process.
    Other(Pool),
    /// Peers of an earlier process still have the frames mapped, and may write to them.
    Mapped(Pool),
}

impl Pool {
    /// Opens the pool of that name, or makes one.
    ///
    /// # Errors
    /// `InUse`, `Open`, `Layout`; `System`.
    pub(crate) fn open(directory: Option<&Path>, name: &str, frame_count: u32) -> Result<Opened, PagesError> {
        let wanted = Layout { frame_count };
        let PoolFile { file, path } = place::open(directory, name, wanted.bytes())?;
        match read_layout(&file, path.as_deref())? {
            Some(found) if !sys::wait_until_unshared(&file, Instant::now() + PATIENCE) => {
                Ok(Opened::Mapped(Pool::map(file, path, found)?))
            }
            Some(found) if found == wanted => Ok(Opened::Ready(Pool::map(file, path, found)?)),
            Some(found) => Ok(Opened::Other(Pool::map(file, path, found)?)),
            None => Pool::format(file, path, wanted).map(Opened::Ready),
        }
    }

    /// Opens an existing pool, whatever its number of frames. Until the deadline it waits for a process that has the pool
    /// locked, and for peers that have it mapped.
    ///
    /// # Errors
    /// As for [`Pool::open`], but not `Owner`; `None` if the file is no pool.
    pub(crate) fn open_existing(path: &Path, deadline: Instant) -> Result<Option<Opened>, PagesError> {
        let file = place::open_locked(path, false, deadline)?;
        let Some(layout) = read_layout(&file, Some(path))? else { return Ok(None) };
        let is_unshared = sys::wait_until_unshared(&file, deadline);
        let pool = Pool::map(file, Some(path.to_owned()), layout)?;
        Ok(Some(if is_unshared { Opened::Ready(pool) } else { Opened::Mapped(pool) }))
    }

    /// Whether a file is a pool, by its name and its first bytes. Anybody can make a pipe of such a name, and opening one
    /// must not wait.
    pub(crate) fn is_at(path: &Path) -> bool {
        let mut options = File::options();
        options.read(true).custom_flags(libc::O_NONBLOCK);
        place::has_pool_name(path) && options.open(path).is_ok_and(|file| layout::has_magic(&file))
    }

    /// Refuses to use the pages of a pool of another user for a file of `uid`.
    ///
    /// # Errors
    /// `Owner`, `System`.
    pub(crate) fn check_owner(&self, uid: u32) -> Result<(), PagesError> {
        let path = self.path().unwrap_or(Path::new("the pool"));
        place::check_owner(&self.file, path, Some(uid))
    }

    /// Makes an empty pool of another number of frames in the same file. The pages of the old one are discarded.
    ///
    /// # Errors
    /// `System`.
    pub(crate) fn reformat(self, frame_count: u32) -> Result<Pool, PagesError> {
        let Pool { file, path, .. } = self;
        Pool::format(file, path, Layout { frame_count })
    }

    /// Makes an empty pool in a new file of the same name. A process that has the old one mapped keeps it.
    ///
    /// # Errors
    /// `Open`, `InUse`; `System`.
    pub(crate) fn replace(self, frame_count: u32) -> Result<Pool, PagesError> {
        let Some(path) = self.path.clone() else { return self.reformat(frame_count) };
        std::fs::remove_file(&path).map_err(PagesError::system("remove a pool"))?;
        let file = place::open_locked(&path, true, Instant::now() + PATIENCE)?;
        Pool::format(file, Some(path), Layout { frame_count })
    }

    fn format(file: File, path: Option<PathBuf>, layout: Layout) -> Result<Pool, PagesError> {
        let system = PagesError::system("set the length of a pool");
        // Empty first: all records of the new pool are 0, and no memory is allocated.
        rustix::fs::ftruncate(&file, 0)
            .and_then(|()| rustix::fs::ftruncate(&file, layout.bytes()))
            .map_err(system)?;
        let kind = place::kind_of(&file).map_err(PagesError::system("ask for a file system"))?;
        let pool = Pool::map(file, path, layout)?;
        layout::write_header(&pool.mapping, layout);
        tracing::info!(frames = layout.frame_count, path = ?pool.path, "a new pool of pages, on {kind}");
        Ok(pool)
    }

    fn map(file: File, path: Option<PathBuf>, layout: Layout) -> Result<Pool, PagesError> {
        let before = layout.before_frames();
        rustix::fs::fallocate(&file, FallocateFlags::empty(), before.start, before.end)
            .map_err(PagesError::system("allocate memory for the directory of a pool"))?;
        let mapping =
            Mapping::of_file(file.as_fd(), layout.bytes()).map_err(PagesError::system("map a pool"))?;
        let count = layout.frame_count as usize;
        let counters = AccessCounters::new(count).map_err(PagesError::system("make counters of accesses"))?;
        let share =
            |flags| sys::open_again(&file, flags).and_then(|file| sys::lock_shared(&file).map(|()| file));
        let shared = [share(OFlags::RDWR), share(OFlags::RDONLY)];
        let [Ok(to_write), Ok(to_read)] = shared else {
            return Err(PagesError::system("open a pool for peers")(std::io::Error::last_os_error()));
        };
        let shared = [to_write, to_read];
        let zeros = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect();
        let pool = Pool {
            file,
            path,
            mapping,
            layout,
            pins: (0..count).map(|_| AtomicU16::new(0)).collect(),
            counters,
            allocated: zeros(count.div_ceil(CHUNK_FRAMES).div_ceil(64)),
            dirty_count: AtomicUsize::new(0),
            is_out_of_memory: AtomicBool::new(false),
            shared,
        };
        let dirty_count =
            (0..layout.frame_count).filter_map(|frame| pool.record(frame)).filter(|record| record.dirty);
        pool.dirty_count.store(dirty_count.count(), Ordering::Relaxed);
        Ok(pool)
    }

    /// The number of frames.
    pub(crate) fn frame_count(&self) -> u32 {
        self.layout.frame_count
    }

    /// The file, which holds the lock.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The file for same-host peers: to write, and to read.
    pub(crate) fn shared(&self) -> [BorrowedFd<'_>; 2] {
        self.shared.each_ref().map(AsFd::as_fd)
    }

    /// Where the first frame is in the file.
    pub(crate) fn frames_offset(&self) -> u64 {
        self.layout.frames()
    }

    /// The file's path. `None` if it ends with the process.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The counters of accesses to frames.
    pub(crate) fn counters(&self) -> &AccessCounters {
        &self.counters
    }

    /// The address of a frame in this process.
    #[inline]
    pub(crate) fn addr(&self, frame: u32) -> u64 {
        debug_assert!(frame < self.frame_count());
        self.mapping.range().addr + self.layout.frames() + u64::from(frame) * PAGE_BYTES
    }

    /// The pins on a frame.
    #[inline]
    pub(crate) fn pins(&self, frame: u32) -> &AtomicU16 {
        &self.pins[frame as usize]
    }

    /// Allocates the memory of a frame. False if the system has none.
    pub(crate) fn allocate(&self, frame: u32) -> bool {
        let chunk = frame as usize / CHUNK_FRAMES;
        let (word, bit) = (&self.allocated[chunk / 64], 1 << (chunk % 64));
        if word.load(Ordering::Relaxed) & bit != 0 {
            return true;
        }
        let offset = self.layout.frames() + chunk as u64 * CHUNK_BYTES;
        let end = self.layout.frames() + u64::from(self.layout.frame_count) * PAGE_BYTES;
        let len = CHUNK_BYTES.min(end - offset);
        let allocated = rustix::fs::fallocate(&self.file, FallocateFlags::empty(), offset, len);
        if let Err(error) = allocated {
            if !self.is_out_of_memory.swap(true, Ordering::Relaxed) {
                tracing::warn!(%error, "the system has less memory than the budget: the pool of pages stays smaller");
            }
            return false;
        }
        word.fetch_or(bit, Ordering::Relaxed);
        self.is_out_of_memory.store(false, Ordering::Relaxed);
        true
    }

    /// Whether the system had no memory for a frame when it was last asked.
    pub(crate) fn is_out_of_memory(&self) -> bool {
        self.is_out_of_memory.load(Ordering::Relaxed)
    }

    fn word(&self, frame: u32) -> &AtomicU64 {
        &self.mapping.quads(Layout::directory(), self.layout.frame_count as usize)[frame as usize]
    }

    /// Which page a frame holds.
    pub(crate) fn record(&self, frame: u32) -> Option<Record> {
        Record::from_word(frame, self.word(frame).load(Ordering::Acquire))
    }

    /// Records which page a frame holds. What was stored to the frame before survives the process from then on.
    pub(crate) fn set_record(&self, frame: u32, record: Record) {
        self.replace_record(frame, Some(record));
    }

    /// Records that a frame holds no page.
    pub(crate) fn clear_record(&self, frame: u32) {
        self.replace_record(frame, None);
    }

    /// The caller has locked the shard of the frame.
    fn replace_record(&self, frame: u32, record: Option<Record>) {
        let was_dirty = self.record(frame).is_some_and(|record| record.dirty);
        let is_dirty = record.is_some_and(|record| record.dirty);
        // Release: the bytes of the page come first.
        self.word(frame).store(record.map_or(0, |record| record.to_word(frame)), Ordering::Release);
        match (was_dirty, is_dirty) {
            (false, true) => _ = self.dirty_count.fetch_add(1, Ordering::Relaxed),
            (true, false) => _ = self.dirty_count.fetch_sub(1, Ordering::Relaxed),
            _ => {}
        }
    }

    /// How many frames hold bytes that their file lacks.
    pub(crate) fn dirty_count(&self) -> usize {
        self.dirty_count.load(Ordering::Relaxed)
    }

    /// The slot of a region.
    pub(crate) fn slot(&self, slot: u8) -> RegionSlot<'_> {
        RegionSlot(self.mapping.quads(Layout::slot(usize::from(slot)), QUADS))
    }

    /// The numbers of all slots.
    pub(crate) fn slots() -> impl Iterator<Item = u8> {
        (0..SLOTS).map(|slot| slot as u8)
    }

    /// Removes the file's name, if all bytes in the frames are in their files, too. The memory is freed when nobody maps
    /// it.
    pub(crate) fn remove_if_clean(&self) {
        if let (0, Some(path)) = (self.dirty_count(), &self.path) {
            // The pool is locked: no other process uses the name meanwhile.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// The layout of the pool in a file; `None` if there is no pool in it.
fn read_layout(file: &File, path: Option<&Path>) -> Result<Option<Layout>, PagesError> {
    let len = file.metadata().map_err(PagesError::system("ask for the length of a pool"))?.len();
    if len < CHUNK_BYTES {
        return Ok(None);
    }
    let header = Mapping::of_file(file.as_fd(), CHUNK_BYTES).map_err(PagesError::system("map a pool"))?;
    match layout::read_header(&header) {
        Header::Known(layout) if layout.bytes() == len => Ok(Some(layout)),
        Header::Known(_) | Header::None => Ok(None),
        Header::Other(found) => {
            let path = path.unwrap_or(Path::new("the pool")).to_owned();
            Err(PagesError::Layout { path, found, known: LAYOUT })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(name: &str, frame_count: u32) -> Pool {
        match Pool::open(Some(Path::new("/dev/shm")), name, frame_count).expect("opened") {
            Opened::Ready(pool) => pool,
            Opened::Other(pool) | Opened::Mapped(pool) => panic!("{} frames", pool.frame_count()),
        }
    }

    #[test]
    fn frames_and_records_outlive_the_pool() {
        let name = format!("test-{}-outlive", std::process::id());
        let record = Record { slot: 3, page: 77, dirty: true };
        {
            let pool = open(&name, 700);
            assert!(pool.allocate(600));
            crate::sys::copy_in(pool.addr(600), &[9; 4096]).expect("memory");
            pool.set_record(600, record);
            assert_eq!(pool.dirty_count(), 1);
            let again = Pool::open(Some(Path::new("/dev/shm")), &name, 700);
            assert!(matches!(again, Err(PagesError::InUse { .. })), "one process at a time");
        }
        let pool = open(&name, 700);
        assert_eq!((pool.record(600), pool.record(599), pool.dirty_count()), (Some(record), None, 1));
        let mut found = [0; 4096];
        crate::sys::copy_out(pool.addr(600), &mut found).expect("memory");
        assert_eq!(found, [9; 4096]);
        pool.remove_if_clean();
        assert!(pool.path().is_some_and(Path::exists));
        pool.clear_record(600);
        pool.remove_if_clean();
        assert!(!pool.path().is_some_and(Path::exists));
    }

    #[test]
    fn a_pool_of_another_size_is_found_and_can_be_made_anew() {
        let name = format!("test-{}-size", std::process::id());
        open(&name, 64).set_record(5, Record { slot: 0, page: 1, dirty: false });
        let Ok(Opened::Other(pool)) = Pool::open(Some(Path::new("/dev/shm")), &name, 128) else { panic!() };
        assert_eq!(pool.frame_count(), 64);
        let pool = pool.reformat(128).expect("made");
        assert_eq!((pool.frame_count(), pool.record(5)), (128, None));
        pool.remove_if_clean();
    }

    #[test]
    fn frames_that_a_peer_of_an_ended_process_has_mapped_are_not_used_again() {
        let name = format!("test-{}-mapped", std::process::id());
        let pool = open(&name, 64);
        pool.set_record(5, Record { slot: 0, page: 1, dirty: false });
        let peer = pool.shared()[0].try_clone_to_owned().expect("a descriptor");
        drop(pool);
        let Ok(Opened::Mapped(pool)) = Pool::open(Some(Path::new("/dev/shm")), &name, 64) else { panic!() };
        let pool = pool.replace(64).expect("made");
        assert_eq!(pool.record(5), None);
        let number = |file: BorrowedFd<'_>| rustix::fs::fstat(file).expect("told").st_ino;
        assert_ne!(number(peer.as_fd()), number(pool.file()), "another file");
        drop(peer);
        pool.remove_if_clean();
    }
}
