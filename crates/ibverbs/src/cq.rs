//! Completion queues.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use terrace_nic::{Cq, CqInit, Wc};
use terrace_sync::Mutex;

use crate::abi::{ibv_comp_channel, ibv_context, ibv_cq, ibv_cq_ex, ibv_wc, ibv_wc__bindgen_ty_1};
use crate::channel::ChannelObject;
use crate::context::{COMP_VECTORS, Context};
use crate::errno::{EINVAL, Result, pointer, status};
use crate::extended_poll::ExtendedPoll;
use crate::object::{self, Allocation, CPart, Object, borrow, load_single, retire};
use crate::pd::Use;
use crate::qp::Base;
use crate::room;

/// `ibv_cq_ex`, of which `ibv_cq` is the beginning. Plain completion queues are the same object.
#[repr(C)]
pub struct CqObject {
    c: CPart<ibv_cq_ex>,
    context: Arc<Context>,
    cq: Arc<Cq>,
    /// State of the extended poll; `None` for a plain completion queue.
    pub(crate) extended: Option<Arc<ExtendedPoll>>,
    /// What WAITs count from.
    wait_base: Mutex<Base>,
    /// The parent domain of the queue, and its channel.
    _used: [Option<Use>; 2],
}

// SAFETY: repr(C), the C structure first.
unsafe impl Object for CqObject {
    type C = ibv_cq_ex;
}

/// The checked arguments of both create verbs.
pub struct CqRequest {
    /// The device.
    pub context: Arc<Context>,
    /// Minimum number of entries.
    pub entries: u32,
    /// The program's context pointer, returned with events.
    pub cq_context: *mut c_void,
    /// The channel for the queue's events, or null.
    pub channel: *mut ibv_comp_channel,
    /// Completion vector.
    pub vector: u32,
    /// A parent domain.
    pub parent: Option<Use>,
}

impl CqObject {
    /// Creates the queue; `extended` creates the parts that only an extended queue has.
    ///
    /// # Safety
    /// `request.channel` is null or a channel.
    pub unsafe fn create(
        request: CqRequest,
        extended: Option<(ibv_cq_ex, ExtendedPoll)>,
    ) -> Result<*mut ibv_cq_ex> {
        let CqRequest { context, entries, cq_context, channel, vector, parent } = request;
        if vector >= COMP_VECTORS as u32 {
            return Err(EINVAL);
        }
        let events = if channel.is_null() {
            None
        } else {
            // SAFETY: the caller's.
            Some(unsafe { borrow::<ChannelObject>(channel)? })
        };
        // From here on, another thread cannot destroy the channel.
        let used = [parent, events.map(ChannelObject::in_use)];
        let events = events.map(|object| object.channel().clone());
        room::for_object()?;
        // The NIC needs the cookie, C's pointer, before the object exists.
        let slot = Allocation::<CqObject>::new();
        let init = CqInit { depth: entries, channel: events, cookie: slot.as_c() as u64 };
        let cq = context.device().create_cq(init)?;
        let (mut c, extended) = match extended {
            Some((c, poll)) => (c, Some(Arc::new(poll))),
            // SAFETY: integers, pointers, optional functions, and the pthread objects set below.
            None => (unsafe { object::zeroed() }, None),
        };
        c.context = context.as_c();
        c.channel = channel;
        c.cq_context = cq_context;
        c.handle = context.new_handle();
        c.cqe = cq.depth() as c_int;
        c.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
        c.cond = libc::PTHREAD_COND_INITIALIZER;
        adjust_references(channel, 1);
        let wait_base = Mutex::default();
        Ok(slot.publish(CqObject { c: CPart::new(c), context, cq, extended, wait_base, _used: used }))
    }

    /// The NIC's completion queue.
    pub fn cq(&self) -> &Arc<Cq> {
        &self.cq
    }

    /// The device of the queue.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// What WAITs for its completions count from.
    pub fn wait_base(&self) -> &Mutex<Base> {
        &self.wait_base
    }

    /// C's structure.
    pub fn as_c(&self) -> *mut ibv_cq_ex {
        self.c.get()
    }
}

/// Counts a channel's users in the field that programs may read.
fn adjust_references(channel: *mut ibv_comp_channel, by: c_int) {
    if !channel.is_null() {
        // SAFETY: a channel, as the caller of the create verb promised; atomic, as queues come and go in any thread.
        let count = unsafe { std::sync::atomic::AtomicI32::from_ptr(&raw mut (*channel).refcnt) };
        count.fetch_add(by, std::sync::atomic::Ordering::Relaxed);
    }
}

/// `ibv_create_cq(3)`.
///
/// # Safety
/// `context` is null or open, `channel` null or a channel.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    entries: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    let create = || {
        // SAFETY: the caller's.
        let context = unsafe { Context::share(context)? };
        let entries = u32::try_from(entries).map_err(|_| EINVAL)?;
        let vector = u32::try_from(vector).map_err(|_| EINVAL)?;
        let request = CqRequest { context, entries, cq_context, channel, vector, parent: None };
        // SAFETY: the caller's.
        unsafe { CqObject::create(request, None) }
    };
    pointer(create()).cast()
}

/// `ibv_resize_cq(3)`: EINVAL if more completions are queued than fit.
///
/// # Safety
/// `cq` is null or a completion queue.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_resize_cq(cq: *mut ibv_cq, entries: c_int) -> c_int {
    let resize = || {
        // SAFETY: the caller's.
        let object = unsafe { borrow::<CqObject>(cq.cast())? };
        let granted = object.cq.resize(u32::try_from(entries).map_err(|_| EINVAL)?)?;
        // SAFETY: our own structure; the verb is the one that changes the field.
        unsafe { (*object.c.get()).cqe = granted as c_int };
        Ok(())
    };
    status(resize())
}

/// `ibv_destroy_cq(3)`: EBUSY while queue pairs use the queue. Waits until the queue's events are acknowledged.
///
/// # Safety
/// `cq` is null or a completion queue.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    let destroy = || {
        // SAFETY: the caller's.
        let object = unsafe { borrow::<CqObject>(cq.cast())? };
        // SAFETY: our own structure; a public field that only creation writes.
        let channel = unsafe { (*object.c.get()).channel };
        object.cq.destroy()?;
        // The channel exists as long as the object refers to it.
        adjust_references(channel, -1);
        // SAFETY: the NIC no longer refers to it.
        unsafe { retire::<CqObject>(cq.cast()) };
        Ok(())
    };
    status(destroy())
}

/// A completion as `ibv_poll_cq` returns it.
#[inline]
fn convert(wc: &Wc) -> ibv_wc {
    ibv_wc {
        wr_id: load_single(&wc.wr_id),
        status: load_single(&wc.status) as u32,
        opcode: load_single(&wc.opcode) as u32,
        vendor_err: load_single(&wc.vendor_err),
        byte_len: load_single(&wc.byte_len),
        __bindgen_anon_1: ibv_wc__bindgen_ty_1 { imm_data: load_single(&wc.imm) },
        qp_num: load_single(&wc.qpn),
        src_qp: load_single(&wc.src_qp),
        wc_flags: load_single(&wc.flags).bits(),
        pkey_index: 0,
        slid: 0,
        sl: load_single(&wc.sl),
        dlid_path_bits: 0,
    }
}

/// `ibv_poll_cq(3)`: the number of completions, or -1 once the queue has overrun.
///
/// # Safety
/// `cq` is null or a completion queue; `wc` has space for `entries`.
pub unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the caller's.
    let Ok(object) = (unsafe { borrow::<CqObject>(cq.cast()) }) else { return -1 };
    let Ok(wanted) = usize::try_from(entries) else { return -1 };
    if wc.is_null() && wanted > 0 {
        return -1;
    }
    if let Some(extended) = &object.extended {
        // SAFETY: the caller's; fewer than `wanted` are written.
        let got = extended.take_prefetched(wanted, |at, entry| unsafe { wc.add(at).write(convert(entry)) });
        if got > 0 {
            return got as c_int;
        }
    }
    // SAFETY: the caller's; the NIC gives `wanted` at most.
    let write = |at: &mut usize, entry: &Wc| unsafe {
        wc.add(*at).write(convert(entry));
        *at += 1;
    };
    // A second counter is used, because a variable that is passed to a function that is not inlined is stored in
    // memory.
    let mut got = 0;
    if object.cq.poll_waiting(wanted, &mut |entry| write(&mut got, entry)) > 0 {
        return got as c_int;
    }
    let mut got = 0;
    match object.cq.poll_empty(wanted, &mut |entry| write(&mut got, entry)) {
        Ok(count) => count as c_int,
        Err(_) => -1,
    }
}

/// `ibv_req_notify_cq(3)`.
///
/// # Safety
/// `cq` is null or a completion queue.
pub unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    let arm = || {
        // SAFETY: the caller's.
        let object = unsafe { borrow::<CqObject>(cq.cast())? };
        Ok(object.cq.request_notify(solicited_only != 0)?)
    };
    status(arm())
}

/// `ibv_ack_cq_events(3)`.
///
/// # Safety
/// `cq` is null or a completion queue.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, count: c_uint) {
    // SAFETY: the caller's.
    if let Ok(object) = unsafe { borrow::<CqObject>(cq.cast()) } {
        // The reference keeps the NIC's queue: a thread that destroys the queue may be woken, and free the object,
        // before this call returns.
        let cq = object.cq().clone();
        cq.ack_events(count);
    }
}

/// The completion queue of a create verb's arguments.
///
/// # Safety
/// `cq` is null or a completion queue.
pub unsafe fn from_arguments<'a>(cq: *mut ibv_cq) -> Result<&'a CqObject> {
    // SAFETY: the caller's.
    unsafe { borrow::<CqObject>(cq.cast()) }
}
