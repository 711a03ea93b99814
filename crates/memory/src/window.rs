//! Memory windows: access for peers to a part of a region, granted and revoked without a registration.
//!
//! Rules are those of IBTA volume 1, 10.6.7. A window answers only to peers, never to local work requests.

use std::sync::atomic::Ordering;

use crate::access::{Access, AccessError, Accessor, RegisterError, Side};
use crate::entry::{Entry, Kind};
use crate::pin::Closed;
use crate::registry::Registry;
use crate::table::{tag_of, vacate};

/// `ibv_mw_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WindowKind {
    /// Bound and unbound by `ibv_bind_mw`; any queue pair of its protection domain serves peers through it.
    Type1,
    /// Bound by a work request, unbound by an invalidation; only the queue pair that bound it serves peers through it.
    Type2,
}

/// What a bind asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowBind {
    /// A key of the window; its low 8 bits are ignored.
    pub window_key: u32,
    /// Its key from now on: the same but for the low 8 bits.
    pub new_key: u32,
    /// The region underneath.
    pub region_key: u32,
    /// First byte, as users of the region's key name it.
    pub addr: u64,
    /// Length in bytes; 0 unbinds a type 1 window and is an error for type 2.
    pub len: u64,
    /// What peers may do: `REMOTE_*`, `FLUSH_*`, and `ZERO_BASED`. `LOCAL_WRITE` is tolerated and means nothing.
    pub access: Access,
    /// Protection domain of the queue pair that binds.
    pub pd: u32,
    /// The queue pair that binds.
    pub qpn: u32,
}

/// Why a bind was refused; a completion with a memory window bind error, or EINVAL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum BindError {
    /// The window's key names no window.
    #[error("no such window")]
    UnknownWindow,
    /// The region's key names no region.
    #[error("no such region")]
    UnknownRegion,
    /// Window, region and queue pair are not all in one protection domain.
    #[error("window, region and queue pair belong to different protection domains")]
    WrongPd,
    /// The new key differs from the old one in more than its low 8 bits.
    #[error("the new key is not one of this window")]
    BadKey,
    /// A type 2 window must be invalidated before it is bound again.
    #[error("the window is bound already")]
    AlreadyBound,
    /// No bytes for a type 2 window.
    #[error("a type 2 window of no bytes")]
    Empty,
    /// Not wholly within the region.
    #[error("the range is not within the region")]
    OutOfRange,
    /// Flags that a window cannot have.
    #[error("a window cannot have these access flags")]
    BadAccess,
    /// The region lacks `MW_BIND`, or `LOCAL_WRITE` for a window that peers may write.
    #[error("the region does not permit such a window")]
    RegionForbids,
}

/// Flags that a bind may carry.
const WINDOW_ACCESS: Access = Access::REMOTE_READ
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::FLUSH_GLOBAL)
    .union(Access::FLUSH_PERSISTENT)
    .union(Access::ZERO_BASED)
    .union(Access::RELAXED_ORDERING);

impl Registry {
    /// Makes an unbound window and returns its key, which permits nothing yet.
    ///
    /// # Errors
    /// `NoRoom`.
    pub fn alloc_window(&self, pd: u32, kind: WindowKind) -> Result<u32, RegisterError> {
        let _changing = self.changes.pin();
        let (key, slot) = self.table.allocate(true).ok_or(RegisterError::NoRoom)?;
        let mut entry = slot.close();
        entry.kind = match kind {
            WindowKind::Type1 => Kind::WindowType1,
            WindowKind::Type2 => Kind::WindowType2,
        };
        entry.pd = pd;
        entry.changes = Some(Box::default());
        Ok(key)
    }

    /// Ends a window, bound or not. When this returns, no access through it is still running, and pagers change nothing any more
    /// that was requested through it.
    ///
    /// # Errors
    /// `UnknownKey` when the key (low 8 bits aside, which binds change) names no window.
    pub fn free_window(&self, key: u32) -> Result<(), RegisterError> {
        let _changing = self.changes.pin();
        let slot = self.table.slot_of(key).ok_or(RegisterError::UnknownKey)?;
        let mut entry = slot.close();
        if !entry.is_window() {
            return Err(RegisterError::UnknownKey);
        }
        cancel_changes(&entry);
        self.unbind(&mut entry);
        vacate(&mut entry);
        drop(entry);
        self.table.release(key, true);
        Ok(())
    }

    /// Binds a window, or unbinds a type 1 window when the length is 0. A refused bind leaves the window as it was.
    ///
    /// # Errors
    /// See [`BindError`].
    pub fn bind_window(&self, bind: &WindowBind) -> Result<(), BindError> {
        if bind.window_key >> 8 != bind.new_key >> 8 {
            return Err(BindError::BadKey);
        }
        let _changing = self.changes.pin();
        let slot = self.table.slot_of(bind.window_key).ok_or(BindError::UnknownWindow)?;
        loop {
            let mut window = slot.close();
            check_window(&window, bind)?;
            if bind.len == 0 {
                cancel_changes(&window);
                self.unbind(&mut window);
                window.tag = tag_of(bind.new_key);
                return Ok(());
            }
            // Its own slot would stay closed for ever.
            let other = bind.region_key >> 8 != bind.window_key >> 8;
            let region = self.table.slot_of(bind.region_key).filter(|_| other);
            let region = region.ok_or(BindError::UnknownRegion)?;
            if let Some(pinned) = region.try_pin() {
                self.bind_to_region(&mut window, &pinned, bind)?;
                window.tag = tag_of(bind.new_key);
                return Ok(());
            }
            // Waiting with the window closed could deadlock: the key of the region may be forged, and name a window
            // that is being bound to this one.
            drop(window);
            region.sleep_while_closed();
        }
    }

    /// Checks the region and moves the window to it. The window is closed, the region pinned: a region that is being
    /// deregistered waits for this pin before it counts its windows.
    fn bind_to_region(
        &self,
        window: &mut Closed<'_, Entry>,
        region: &Entry,
        bind: &WindowBind,
    ) -> Result<(), BindError> {
        let host = check_region(region, bind)?;
        region.windows.fetch_add(1, Ordering::Relaxed);
        cancel_changes(window);
        self.unbind(window);
        window.bound = true;
        window.is_by_offset = region.is_by_offset;
        window.access = bind.access & WINDOW_ACCESS;
        window.qpn = bind.qpn;
        window.start = if bind.access.contains(Access::ZERO_BASED) { 0 } else { bind.addr };
        window.len = bind.len;
        window.to_host = host.wrapping_sub(window.start);
        window.region = bind.region_key;
        window.flush.clone_from(&region.flush);
        window.pager.clone_from(&region.pager);
        window.pattern.clone_from(&region.pattern);
        window.policy = region.policy;
        Ok(())
    }

    /// Takes a closed window off its region, if it is bound.
    fn unbind(&self, window: &mut Closed<'_, Entry>) {
        if !window.bound {
            return;
        }
        // The region exists: it cannot be deregistered while a window is bound to it.
        if let Some(slot) = self.table.slot_of(window.region) {
            slot.pin().windows.fetch_sub(1, Ordering::Relaxed);
        }
        window.unbind();
    }

    /// Invalidates a key: a work request of the queue pair, or its peer's SEND with invalidate. Only
    /// type 2 windows can be invalidated. When this returns, no access through the window is still running. A window
    /// that is not bound stays so, which is no error. A work request cancels the window's pending changes. A SEND with invalidate does
    /// not: the receive completes when they have ended.
    ///
    /// # Errors
    /// `UnknownKey` when the key is not the current one of a window; `Permission` for a region or a type 1 window;
    /// `WrongPd`; `WrongQp` when it is bound through another queue pair.
    pub fn invalidate(&self, who: Accessor, key: u32) -> Result<(), AccessError> {
        let _changing = self.changes.pin();
        let slot = self.table.slot_of(key).ok_or(AccessError::UnknownKey)?;
        let mut entry = slot.close();
        check_invalidate(&entry, who, key)?;
        if who.side == Side::Local {
            cancel_changes(&entry);
        }
        self.unbind(&mut entry);
        Ok(())
    }

    /// Invalidates all type 2 windows bound through a queue pair; for when it is destroyed. Returns how many.
    pub fn invalidate_windows_of(&self, qpn: u32) -> usize {
        let _changing = self.changes.pin();
        if self.table.counts().1 == 0 {
            return 0;
        }
        let tied = |entry: &Entry| entry.kind == Kind::WindowType2 && entry.bound && entry.qpn == qpn;
        let mut count = 0;
        for (_, slot) in self.table.slots() {
            // Checked before closing, so that other queue pairs' slots are not disturbed.
            if !tied(&slot.pin()) {
                continue;
            }
            let mut entry = slot.close();
            if tied(&entry) {
                self.unbind(&mut entry);
                count += 1;
            }
        }
        count
    }
}

/// Cancels what pagers have not changed yet of what was requested through a window, bound or not.
fn cancel_changes(window: &Entry) {
    window.changes.iter().for_each(|changes| changes.cancel());
}

/// The checks that need no region.
fn check_window(window: &Entry, bind: &WindowBind) -> Result<(), BindError> {
    // A window is named by its handle, and its owner's key is that of the last bind that was posted: after a bind that
    // failed, that key is not the one in effect. So the tag is not checked.
    if !window.is_window() {
        return Err(BindError::UnknownWindow);
    }
    if window.pd != bind.pd {
        return Err(BindError::WrongPd);
    }
    if !(WINDOW_ACCESS | Access::LOCAL_WRITE).contains(bind.access) {
        return Err(BindError::BadAccess);
    }
    match window.kind {
        // o10-37.2.30: a type 2 window must be free. Zero-based addressing came with type 2.
        Kind::WindowType2 if window.bound => Err(BindError::AlreadyBound),
        Kind::WindowType2 if bind.len == 0 => Err(BindError::Empty),
        Kind::WindowType1 if bind.access.contains(Access::ZERO_BASED) => Err(BindError::BadAccess),
        _ => Ok(()),
    }
}

/// Checks the region (C10-73 to C10-75) and returns the program's address of the window's first byte.
fn check_region(region: &Entry, bind: &WindowBind) -> Result<u64, BindError> {
    if region.kind != Kind::Region || region.tag != tag_of(bind.region_key) {
        return Err(BindError::UnknownRegion);
    }
    if region.pd != bind.pd {
        return Err(BindError::WrongPd);
    }
    let writable = !bind.access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC)
        || region.access.contains(Access::LOCAL_WRITE);
    if !region.access.contains(Access::MW_BIND) || !writable {
        return Err(BindError::RegionForbids);
    }
    region.translate(bind.addr, bind.len).map_err(|_| BindError::OutOfRange)
}

fn check_invalidate(entry: &Entry, who: Accessor, key: u32) -> Result<(), AccessError> {
    if entry.kind == Kind::Free || entry.tag != tag_of(key) {
        return Err(AccessError::UnknownKey);
    }
    if entry.kind != Kind::WindowType2 {
        return Err(AccessError::Permission);
    }
    if entry.pd != who.pd {
        return Err(AccessError::WrongPd);
    }
    if entry.bound && entry.qpn != who.qpn {
        return Err(AccessError::WrongQp);
    }
    Ok(())
}
