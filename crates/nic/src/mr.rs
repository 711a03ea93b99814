//! Memory regions and memory windows.

use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_memory::{
    Access, NewPaging, NewRange, Pager, Pattern, RegionChange, RegionPolicy, RegionSpec, RegisterError,
    Registry, WindowKind,
};
use terrace_sync::Mutex;
use terrace_transport::{BindWindow, Payload, SendFlags, SendOp, SendWr, SgeList};

use crate::device::Pd;
use crate::error::{Error, reader_timeout};
use crate::model::NicModel;
use crate::qp::QueuePair;
use crate::use_count::UseCount;

/// Parameters of a registration.
///
/// Registration fails with EINVAL for an overflowing range, unknown access flags, remote write access without local
/// write access, or a pager whose range does not cover the region; with ENOMEM when the device has as many regions as
/// it can.
#[derive(Clone, Debug)]
pub struct MrRequest {
    /// First byte in the program's memory.
    pub addr: u64,
    /// Length in bytes. `u64::MAX` together with address 0 and on-demand access means all of the memory that the
    /// program has or will have.
    pub length: u64,
    /// The address by which work requests and peers name the first byte.
    pub iova: u64,
    /// `ibv_access_flags`.
    pub access: u32,
    /// For a region whose bytes need not be in memory.
    pub paging: Option<Paging>,
}

/// The pager of a region whose bytes need not be in memory, and what peers see of absent bytes. `rereg` with a new
/// translation makes it an ordinary region.
#[derive(Clone)]
pub struct Paging {
    /// Finds the bytes.
    pub pager: Arc<dyn Pager>,
    /// The signature page for peers of queue pairs with [`Absence::Magic`](terrace_memory::Absence::Magic).
    pub pattern: Pattern,
    /// The region's fault policy.
    pub policy: RegionPolicy,
}

impl std::fmt::Debug for Paging {
    /// Without the signature page, which is noise.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Paging")
            .field("pager", &self.pager)
            .field("policy", &self.policy)
            .finish_non_exhaustive()
    }
}

/// As the registry has it, on a device of this model.
fn new_paging(model: NicModel, paging: Option<Paging>) -> NewPaging {
    paging.map_or_else(NewPaging::default, |Paging { pager, pattern, policy }| NewPaging {
        pager: Some(pager),
        pattern: Some(pattern),
        policy: model.policy(policy),
    })
}

/// A registered memory region.
pub struct Mr {
    key: u32,
    place: Mutex<Place>,
    users: UseCount,
}

/// See [`Mr::begin_change`].
struct Changing<'a>(&'a Mr);

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        let device = {
            let mut place = self.0.place.lock();
            place.is_changing = false;
            place.pd.device().clone()
        };
        device.region_changed.notify_all();
    }
}

/// The attributes that `rereg` may change.
struct Place {
    pd: Arc<Pd>,
    /// Whether the protection domain counts it, see [`Mr::release_pd`].
    is_counted: bool,
    /// Whether a thread re-registers or ends the region, for which it may wait for same-host peers.
    is_changing: bool,
    addr: u64,
    length: u64,
    /// The address by which work requests and peers name the first byte.
    start: u64,
}

impl Pd {
    /// Registers memory. See [`MrRequest`] for the errors.
    pub fn reg_mr(self: &Arc<Self>, request: MrRequest) -> Result<Arc<Mr>, Error> {
        self.users.check()?;
        Mr::register(self, request)
    }

    /// Makes a memory window; ENOMEM when the device has as many as it can.
    pub fn alloc_mw(self: &Arc<Self>, kind: MwKind) -> Result<Arc<Mw>, Error> {
        self.users.check()?;
        Mw::new(self, kind)
    }
}

impl Mr {
    fn register(pd: &Arc<Pd>, request: MrRequest) -> Result<Arc<Mr>, Error> {
        let device = pd.device();
        let access = Access::from_verbs(request.access).map_err(register_error)?;
        if request.length > device.limits().max_mr_size {
            return Err(Error::Invalid("region longer than max_mr_size"));
        }
        device.quotas.mr.take()?;
        let NewPaging { pager, pattern, policy } = new_paging(device.model, request.paging);
        let spec = RegionSpec {
            iova: request.iova,
            pager,
            pattern,
            policy,
            ..RegionSpec::new(pd.handle(), request.addr, request.length, access)
        };
        pd.users.add().inspect_err(|_| device.quotas.mr.give_back())?;
        let region = device.memory.register(&spec).map_err(|error| {
            pd.users.remove();
            device.quotas.mr.give_back();
            register_error(error)
        })?;
        let (addr, length, start) = (request.addr, request.length, region.start);
        let place = Place { pd: pd.clone(), is_counted: true, is_changing: false, addr, length, start };
        Ok(Arc::new(Mr { key: region.key, place: Mutex::new(place), users: UseCount::default() }))
    }

    /// The protection domain, which `rereg` may have changed.
    pub fn pd(&self) -> Arc<Pd> {
        self.place.lock().pd.clone()
    }

    /// The key for local work requests.
    pub fn lkey(&self) -> u32 {
        self.key
    }

    /// The key for peers; the same number.
    pub fn rkey(&self) -> u32 {
        self.key
    }

    /// First byte.
    pub fn addr(&self) -> u64 {
        self.place.lock().addr
    }

    /// Length in bytes.
    pub fn length(&self) -> u64 {
        self.place.lock().length
    }

    /// The address by which work requests and peers name the first byte.
    pub fn iova(&self) -> u64 {
        self.place.lock().start
    }

    /// `ibv_rereg_mr`: changes protection domain, translation (address, length, iova), access and pager (`Some(None)`:
    /// an ordinary region from now on), as far as given. EINVAL when the region does not lie within the pager's range.
    /// The keys stay, and no access that passed the old checks is still running when it returns. On error nothing has
    /// changed. EBUSY while windows are bound, when a same-host peer does not finish an access, while another thread
    /// changes the region, and where a peer with NP-RDMA knows the key and the new memory may be absent.
    pub fn rereg(
        &self,
        pd: Option<&Arc<Pd>>,
        translation: Option<(u64, u64, u64)>,
        access: Option<u32>,
        paging: Option<Option<Paging>>,
    ) -> Result<(), Error> {
        let _change = self.begin_change(Duration::ZERO)?;
        self.users.check()?;
        let own_pd = self.pd();
        let access = access.map(Access::from_verbs).transpose().map_err(register_error)?;
        let range = translation.map(|(addr, len, iova)| NewRange { addr, len, iova });
        let device = own_pd.device();
        let paging = paging.map(|paging| new_paging(device.model, paging));
        let change = RegionChange { range, pd: pd.map(|pd| pd.handle()), access, paging };
        pd.map_or(Ok(()), |pd| pd.users.add())?;
        let region = device.memory.reregister(self.key, &change).map_err(|error| {
            pd.inspect(|pd| pd.users.remove());
            register_error(error)
        })?;
        device.local.recall(self.key);
        let mut place = self.place.lock();
        place.start = region.start;
        if let Some(pd) = pd {
            place.release_pd();
            place.pd = pd.clone();
            place.is_counted = true;
        }
        if let Some((addr, length, _)) = translation {
            place.addr = addr;
            place.length = length;
        }
        Ok(())
    }

    /// Ends the region; EBUSY as for `rereg`, and the region stays as it was. No access is running once it returns.
    pub fn dereg(&self) -> Result<(), Error> {
        let change = self.begin_change(Duration::ZERO)?;
        self.end(&change, |memory| memory.deregister(self.key).map_err(register_error))
    }

    /// The same, but EBUSY unless the accesses of same-host peers, and a change by another thread, end within this time. The
    /// log does not name the peer: the caller expects that it may be in the middle of an access.
    pub fn dereg_within(&self, limit: Duration) -> Result<(), Error> {
        let deadline = Instant::now() + limit;
        let change = self.begin_change(limit)?;
        let left = deadline.saturating_duration_since(Instant::now());
        self.end(&change, |memory| match memory.deregister_within(self.key, left) {
            Err(RegisterError::ReaderTimeout(_)) => {
                Err(Error::Busy("a same-host peer is in the middle of an access"))
            }
            ended => ended.map_err(register_error),
        })
    }

    /// Excludes other changes until the guard is dropped: EBUSY unless the change of another thread ends within this time.
    /// Not a lock: a change may wait for a same-host peer.
    fn begin_change(&self, limit: Duration) -> Result<Changing<'_>, Error> {
        let mut place = self.place.lock();
        if place.is_changing && !limit.is_zero() {
            let (device, deadline) = (place.pd.device().clone(), Instant::now() + limit);
            while place.is_changing && Instant::now() < deadline {
                device.region_changed.wait_until(&mut place, deadline);
            }
        }
        match std::mem::replace(&mut place.is_changing, true) {
            false => Ok(Changing(self)),
            true => Err(Error::Busy("another thread is changing the region")),
        }
    }

    fn end(
        &self,
        _change: &Changing<'_>,
        deregister: impl FnOnce(&Registry) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.users.check()?;
        let pd = self.pd();
        deregister(&pd.device().memory)?;
        pd.device().local.recall(self.key);
        pd.device().note_key_ended(self.key);
        self.users.end()?;
        pd.device().quotas.mr.give_back();
        self.release_pd();
        Ok(())
    }

    /// From now on the region keeps its protection domain from being ended no more. For regions that the program does not
    /// know, and whose end waits for a same-host peer.
    pub fn release_pd(&self) {
        self.place.lock().release_pd();
    }
}

impl Place {
    fn release_pd(&mut self) {
        if std::mem::take(&mut self.is_counted) {
            self.pd.users.remove();
        }
    }
}

/// `ibv_mw_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MwKind {
    /// Bound by `ibv_bind_mw`.
    Type1 = 1,
    /// Bound and invalidated by work requests.
    Type2 = 2,
}

/// Parameters of `ibv_bind_mw`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MwBind {
    /// Returned in the completion.
    pub wr_id: u64,
    /// Only `SIGNALED` and `FENCE` have a meaning.
    pub flags: SendFlags,
    /// The region underneath.
    pub region_lkey: u32,
    /// First byte.
    pub addr: u64,
    /// Length in bytes; 0 unbinds.
    pub length: u64,
    /// `ibv_access_flags` for peers.
    pub access: u32,
}

/// A memory window.
pub struct Mw {
    pd: Arc<Pd>,
    kind: MwKind,
    rkey: Mutex<u32>,
    users: UseCount,
}

impl Mw {
    fn new(pd: &Arc<Pd>, kind: MwKind) -> Result<Arc<Mw>, Error> {
        let device = pd.device();
        device.quotas.mw.take()?;
        let window_kind = match kind {
            MwKind::Type1 => WindowKind::Type1,
            MwKind::Type2 => WindowKind::Type2,
        };
        pd.users.add().inspect_err(|_| device.quotas.mw.give_back())?;
        let rkey = device.memory.alloc_window(pd.handle(), window_kind).map_err(|error| {
            pd.users.remove();
            device.quotas.mw.give_back();
            register_error(error)
        })?;
        Ok(Arc::new(Mw { pd: pd.clone(), kind, rkey: Mutex::new(rkey), users: UseCount::default() }))
    }

    /// The protection domain.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// Its type.
    pub fn kind(&self) -> MwKind {
        self.kind
    }

    /// The key that the last bind of a type 1 window gave it, or the initial key of a type 2 window: work requests bind
    /// that key, and choose its low 8 bits.
    pub fn rkey(&self) -> u32 {
        *self.rkey.lock()
    }

    /// Ends the window, bound or not.
    pub fn dealloc(&self) -> Result<(), Error> {
        self.users.end()?;
        let device = self.pd.device();
        let rkey = self.rkey();
        device.memory.free_window(rkey).map_err(register_error)?;
        device.note_key_ended(rkey);
        device.quotas.mw.give_back();
        self.pd.users.remove();
        Ok(())
    }

    /// Passes the current key and the next one to `post`; keeps the next one if that succeeds. Binds of one window are
    /// posted one after the other, so that the keys stay in step with the work queue.
    fn advance(&self, post: impl FnOnce(u32, u32) -> Result<(), Error>) -> Result<u32, Error> {
        self.users.check()?;
        let mut rkey = self.rkey.lock();
        let next = next_rkey(*rkey);
        post(*rkey, next)?;
        *rkey = next;
        Ok(next)
    }
}

impl QueuePair {
    /// `ibv_bind_mw`: posts the bind of a type 1 window and returns the key that the window will have. EINVAL for a
    /// type 2 window. The bind of a window of another protection domain completes in error, as with other devices.
    pub fn bind_mw(self: &Arc<Self>, mw: &Mw, bind: &MwBind) -> Result<u32, Error> {
        if mw.kind() != MwKind::Type1 {
            return Err(Error::Invalid("type 2 windows are bound by work requests"));
        }
        mw.advance(|window_rkey, new_rkey| {
            let bind_window = BindWindow {
                window_rkey,
                new_rkey,
                region_lkey: bind.region_lkey,
                addr: bind.addr,
                length: bind.length,
                access: bind.access,
            };
            let wr = SendWr {
                wr_id: bind.wr_id,
                op: SendOp::BindWindow(bind_window),
                payload: Payload::Sges(SgeList::new()),
                flags: bind.flags,
                target: None,
            };
            self.post_send([Ok(wr)]).map_err(|(_, error)| error)
        })
    }
}

/// Increments the low 8 bits, as `ibv_inc_rkey` does.
fn next_rkey(rkey: u32) -> u32 {
    rkey & !0xff | (rkey + 1) & 0xff
}

fn register_error(error: RegisterError) -> Error {
    match error {
        RegisterError::Invalid(why) => Error::Invalid(why),
        RegisterError::NotMapped => Error::Fault,
        RegisterError::NoRoom => Error::NoMemory("keys"),
        RegisterError::Busy => Error::Busy("memory windows are bound to the region"),
        RegisterError::ReaderTimeout(timeout) => reader_timeout(timeout),
        RegisterError::UnknownKey => Error::Invalid("no such region or window"),
    }
}
