//! Truncating, punching, and writing beyond the end. When a call returns, no access to the old layout runs: it has ended, or finds the new one.

use std::io;

use crate::region::FileRegion;
use crate::sys::Handle;

/// Why a file's layout was not changed.
#[derive(Debug, thiserror::Error)]
pub enum LayoutError {
    /// The region's descriptor was not open for writing.
    #[error("the file is not open for writing")]
    NotWritable,
    /// The system refused it.
    #[error("the file system refused it: {0}")]
    System(#[from] io::Error),
}

impl FileRegion {
    /// Makes the file this many bytes long. Accesses beyond a new end are refused from now on.
    ///
    /// # Errors
    /// See [`LayoutError`]; `ResourceBusy` if a same-host peer does not end an access.
    pub fn truncate(&self, len: u64) -> Result<(), LayoutError> {
        self.change_layout(len, |handle| handle.set_len(len))
    }

    /// Makes the file at least this many bytes long. A record that is appended meanwhile stays.
    ///
    /// # Errors
    /// See [`LayoutError`].
    pub fn grow(&self, len: u64) -> Result<(), LayoutError> {
        self.change_layout(u64::MAX, |handle| if handle.len()? < len { handle.set_len(len) } else { Ok(()) })
    }

    /// Gives the blocks of a range back. It reads as zeros then, and the file keeps its length.
    ///
    /// # Errors
    /// See [`LayoutError`].
    pub fn punch_hole(&self, offset: u64, len: u64) -> Result<(), LayoutError> {
        // No byte of the file moves: every mapping shows the hole once it is there.
        self.change_layout(u64::MAX, |handle| handle.punch_hole(offset, len))
    }

    /// Writes bytes, also beyond the file's end, while no record is appended: a record comes to lie before or behind them.
    ///
    /// # Errors
    /// See [`LayoutError`]. A part of the bytes may be written then.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), LayoutError> {
        self.change_layout(u64::MAX, |handle| handle.write_all(offset, data).map_err(|(_, error)| error))
    }

    fn change_layout(
        &self,
        end_after: u64,
        change: impl FnOnce(&Handle) -> io::Result<()>,
    ) -> Result<(), LayoutError> {
        if !self.is_writable() {
            return Err(LayoutError::NotWritable);
        }
        Ok(self.file().change_layout(end_after, change)?)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::mpsc::{Receiver, channel};
    use std::sync::{Arc, Once};
    use std::time::Duration;

    use terrace_hostmem::{AtomicOp, HostRange, fault};
    use terrace_memory::{AccessError, Pager, Transfer, Translation, Waker};

    use crate::{FileExtent, FileRegion, Files, FilesConfig};

    const LEN: u64 = 8192;
    /// A limit that only a hang reaches.
    const HANG: Duration = Duration::from_secs(20);

    /// A region of a file whose first page is in a window.
    fn mapped(files: &Files, directory: &str) -> Arc<FileRegion> {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| fault::install().unwrap());
        let file = tempfile::tempfile_in(directory).unwrap();
        file.set_len(LEN).unwrap();
        let region = files.open(file.as_fd(), true, FileExtent::WHOLE).unwrap();
        assert_eq!(Translation::write(&*region, 0, b"before"), Some(Ok(())));
        region
    }

    /// Deferred READs of the first page, and of what lies beyond the end; and whether the region accesses its file by itself, or
    /// appends to it.
    fn access(region: &FileRegion, waker: &Waker) -> (Vec<Arc<dyn Transfer>>, bool) {
        let (start, end) = (HostRange { addr: 0, len: 8 }, HostRange { addr: LEN - 4, len: 8 });
        let is_done = Translation::read(region, start, &mut [0; 8]).is_some()
            || Translation::write(region, 0, b"x").is_some()
            || Translation::atomic(region, 0, AtomicOp::FetchAdd { add: 1 }).is_some()
            || region.is_present(start)
            || [false, true].map(|commit| region.append(b"record", commit, waker).err())
                != [Some(AccessError::NotReady); 2];
        let transfers = [start, end].map(|part| Pager::read(region, part, waker).unwrap());
        (transfers.to_vec(), is_done)
    }

    fn wait(transfer: &dyn Transfer, woken: &Receiver<()>) -> bool {
        while transfer.outcome().is_none() {
            woken.recv_timeout(HANG).unwrap();
        }
        transfer.outcome().unwrap().is_ok()
    }

    /// The thread that serves packets makes them. Nobody appends meanwhile.
    #[test]
    fn accesses_are_deferred_while_the_layout_changes() {
        for directory in ["/var/tmp", "/dev/shm"] {
            let files = Files::new(&FilesConfig::default());
            let region = mapped(&files, directory);
            let (wake, woken) = channel();
            let waker: Waker = Arc::new(move || {
                // Nobody waits any more.
                let _ = wake.send(());
            });
            let (begin, begun) = channel();
            let (end, ended) = channel::<()>();
            let (answer, answered) = channel();
            let (change, accesses) = (region.clone(), region.clone());
            let changing = std::thread::spawn(move || {
                change.change_layout(u64::MAX, |_| {
                    begin.send(()).unwrap();
                    // Also if the test has failed.
                    let _ = ended.recv();
                    Ok(())
                })
            });
            begun.recv_timeout(HANG).unwrap();
            std::thread::spawn(move || answer.send(access(&accesses, &waker)));
            let (transfers, is_done) = answered.recv_timeout(HANG).expect("an access waits for the change");
            assert!(!is_done, "{directory}");
            assert!(transfers.iter().all(|transfer| transfer.outcome().is_none()), "{directory}");
            end.send(()).unwrap();
            changing.join().unwrap().unwrap();
            assert_eq!(
                [&transfers[0], &transfers[1]].map(|transfer| wait(&**transfer, &woken)),
                [true, false]
            );
            let appended = region.append(b"record", false, &(Arc::new(|| ()) as Waker)).unwrap();
            assert!(matches!(appended.outcome(), Some(Ok(()))), "{directory}");
        }
    }
}
