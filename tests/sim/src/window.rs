//! Memory windows. Repeatedly, the owner binds a window on its queue pair, the peer uses it, and the owner or the peer
//! invalidates it.

use std::sync::Arc;

use terrace_nic::{BindWindow, Mw, MwBind, MwKind, SendFlags, SendOp};

use crate::draw::plain_wr;
use crate::end::{Draft, Intent};
use crate::memory::{Purpose, REMOTE_ATOMIC, REMOTE_READ, REMOTE_WRITE, Span};
use crate::world::{Checked, Failure, World, ensure, trace};

/// `IBV_ACCESS_ZERO_BASED`.
const ZERO_BASED: u32 = 1 << 5;

/// Bytes of memory that a window can be bound to.
const WINDOW_BYTES: usize = 4096;

/// Limit of binds of one window.
const BINDS_MAX: u32 = 8;

/// Probability at each tick that an unbound window is bound, or an open one closed.
const CHANGES_WINDOW: f64 = 0.15;

/// A window's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Unbound,
    /// The bind is posted.
    Binding,
    /// The peer may use the window.
    Open,
    /// The peer posts no more requests to the window, and the owner waits for the posted ones.
    Closing,
    /// The request that invalidates or unbinds the window is posted.
    Invalidating,
    /// The connection has ended, so it is unknown whether the window is bound.
    Unknown,
}

pub(crate) struct Window {
    pub owner: usize,
    pub mw: Arc<Mw>,
    /// The memory that the window can be bound to, of which `bound` is the bound part.
    pub range: Span,
    pub bound: Span,
    pub rkey: u32,
    /// The address by which the peer names the first byte.
    pub base: u64,
    pub stage: Stage,
    /// The number of binds left.
    pub binds_left: u32,
}

impl World {
    /// Creates a window of each type for each end.
    pub fn make_windows(&mut self) -> Checked {
        for owner in [self.ends.len() - 2, self.ends.len() - 1] {
            if self.ends[owner ^ 1].plan.mix.window == 0 {
                continue;
            }
            for kind in [MwKind::Type1, MwKind::Type2] {
                let node = &mut self.nodes[owner & 1];
                let mw = node.pd.alloc_mw(kind)?;
                let range = node.memory.take(Purpose::Windowed, WINDOW_BYTES, true)?;
                let rkey = mw.rkey();
                self.windows.push(Window {
                    owner,
                    mw,
                    range,
                    bound: range,
                    rkey,
                    base: 0,
                    stage: Stage::Unbound,
                    binds_left: BINDS_MAX,
                });
            }
        }
        Ok(())
    }

    /// Returns the windows on its peer's memory that this end may use.
    pub fn open_windows(&self, user: usize) -> Vec<usize> {
        let open = |window: &Window| window.owner == user ^ 1 && window.stage == Stage::Open;
        (0..self.windows.len()).filter(|index| open(&self.windows[*index])).collect()
    }

    /// Binds, closes or unbinds the owner's windows at random.
    pub fn change_windows(&mut self, owner: usize) -> Checked {
        for index in 0..self.windows.len() {
            if self.windows[index].owner != owner || !self.ends[owner].is_open() {
                continue;
            }
            if !self.ends[owner ^ 1].is_open() {
                continue;
            }
            match self.windows[index].stage {
                Stage::Unbound
                    if self.windows[index].binds_left > 0
                        && self.ends[owner ^ 1].budget > 0
                        && self.rng.chance(CHANGES_WINDOW) =>
                {
                    self.bind(index)?;
                }
                Stage::Open if self.rng.chance(CHANGES_WINDOW) => self.begin_closing(index),
                Stage::Closing if !self.is_in_use(index) => self.unbind(index)?,
                _ => {}
            }
        }
        Ok(())
    }

    fn bind(&mut self, index: usize) -> Checked {
        let window = &self.windows[index];
        let owner = window.owner;
        let start = self.rng.index(WINDOW_BYTES / 16) * 8;
        let len = (1 + self.rng.index((WINDOW_BYTES - start) / 8)) * 8;
        let bound = window.range.part(start, len);
        let zero_based = window.mw.kind() == MwKind::Type2 && self.rng.chance(0.5);
        let memory = &self.nodes[owner & 1].memory;
        let (address, key) = (memory.address(bound), memory.key(bound));
        let mut access = REMOTE_READ | REMOTE_WRITE | REMOTE_ATOMIC;
        if zero_based {
            access |= ZERO_BASED;
        }
        let new_rkey = next_key(window.rkey);
        if window.mw.kind() == MwKind::Type1 {
            if !self.post_type_1(index, key, address, len as u64, access, Intent::Bind { window: index })? {
                return Ok(());
            }
        } else {
            let op = SendOp::BindWindow(BindWindow {
                window_rkey: window.rkey,
                new_rkey,
                region_lkey: key,
                addr: address,
                length: len as u64,
                access,
            });
            let draft =
                Draft { wr: plain_wr(op, true), intent: Intent::Bind { window: index }, window: None };
            self.ends[owner].drafts.push_back(draft);
        }
        let window = &mut self.windows[index];
        window.rkey = new_rkey;
        window.bound = bound;
        window.base = if zero_based { 0 } else { address };
        window.stage = Stage::Binding;
        window.binds_left -= 1;
        Ok(())
    }

    /// Calls `ibv_bind_mw`. Returns false if the send queue may be full.
    fn post_type_1(
        &mut self,
        index: usize,
        region_lkey: u32,
        addr: u64,
        length: u64,
        access: u32,
        intent: Intent,
    ) -> Checked<bool> {
        let window = &self.windows[index];
        let owner = window.owner;
        if self.ends[owner].posted.len() >= self.ends[owner].plan.max_send_wr as usize {
            return Ok(false);
        }
        let wr_id = self.new_wr_id();
        let window = &self.windows[index];
        let bind = MwBind { wr_id, flags: SendFlags::SIGNALED, region_lkey, addr, length, access };
        let expected = next_key(window.rkey);
        let mw = window.mw.clone();
        let mut wr = plain_wr(SendOp::LocalInvalidate(0), true);
        wr.wr_id = wr_id;
        self.note_posted(owner, Draft { wr, intent, window: None })?;
        if let Some(request) = self.ends[owner].posted.back_mut() {
            request.opcode = terrace_nic::WcOpcode::BindMw;
        }
        let rkey = self.ends[owner].qp.bind_mw(&mw, &bind)?;
        ensure!(rkey == expected, "bind_mw returned the key {rkey:#x} instead of {expected:#x}");
        Ok(true)
    }

    /// Starts to close a window: the peer's next SEND invalidates it, or the owner does once the peer's requests are
    /// done.
    fn begin_closing(&mut self, index: usize) {
        let window = &mut self.windows[index];
        let user = window.owner ^ 1;
        let by_peer = window.mw.kind() == MwKind::Type2 && self.rng.chance(0.5);
        window.stage = if by_peer { Stage::Invalidating } else { Stage::Closing };
        if by_peer {
            let rkey = window.rkey;
            self.draft_send_invalidate(user, rkey);
        }
    }

    fn is_in_use(&self, index: usize) -> bool {
        let user = &self.ends[self.windows[index].owner ^ 1];
        user.posted.iter().any(|request| request.window == Some(index))
            || user.drafts.iter().any(|draft| draft.window == Some(index))
    }

    fn unbind(&mut self, index: usize) -> Checked {
        let window = &self.windows[index];
        let (owner, rkey) = (window.owner, window.rkey);
        if window.mw.kind() == MwKind::Type1 {
            let (key, address) = {
                let memory = &self.nodes[owner & 1].memory;
                (memory.key(window.range), memory.address(window.range))
            };
            if !self.post_type_1(index, key, address, 0, 0, Intent::Unbind { window: index })? {
                return Ok(());
            }
            self.windows[index].rkey = next_key(rkey);
        } else {
            let wr = plain_wr(SendOp::LocalInvalidate(rkey), true);
            let draft = Draft { wr, intent: Intent::Unbind { window: index }, window: None };
            self.ends[owner].drafts.push_back(draft);
        }
        self.windows[index].stage = Stage::Invalidating;
        Ok(())
    }

    /// Records that the owner has received a SEND that invalidated this key.
    pub fn note_invalidated(&mut self, owner: usize, rkey: u32) -> Checked {
        let ended = self.windows.iter_mut().find(|window| window.owner == owner && window.rkey == rkey);
        let Some(window) = ended else {
            return Err(Failure(format!("no window has the invalidated key {rkey:#x}")));
        };
        match window.stage {
            Stage::Invalidating => window.stage = Stage::Unbound,
            // The connection failed after the SEND, and its end was recorded before.
            Stage::Unknown => {}
            stage => return Err(Failure(format!("the invalidated window was {stage:?}"))),
        }
        trace!(self, "window {rkey:#x} was invalidated by the peer");
        Ok(())
    }

    /// Records that the connection has ended, so that requests posted to a window may or may not have been executed.
    pub fn mark_windows_unknown(&mut self, end: usize) {
        let either = |window: &&mut Window| window.owner == end || window.owner == end ^ 1;
        for window in self.windows.iter_mut().filter(either) {
            window.stage = Stage::Unknown;
        }
    }
}

/// Returns the result of `ibv_inc_rkey`.
fn next_key(rkey: u32) -> u32 {
    rkey & !0xff | (rkey + 1) & 0xff
}
