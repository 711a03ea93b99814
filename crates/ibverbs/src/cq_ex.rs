//! Extended completion queues: entries are read field by field, between `start_poll` and `end_poll`.

use std::ffi::{c_int, c_uint};

use terrace_nic::Wc;

use crate::abi::{
    IBV_CQ_INIT_ATTR_MASK_FLAGS, IBV_CQ_INIT_ATTR_MASK_PD, IBV_CREATE_CQ_ATTR_SINGLE_THREADED,
    IBV_WC_EX_WITH_COMPLETION_TIMESTAMP, IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK, IBV_WC_EX_WITH_CVLAN,
    IBV_WC_STANDARD_FLAGS, ibv_context, ibv_cq_ex, ibv_cq_init_attr_ex, ibv_poll_cq_attr, ibv_wc_opcode,
};
use crate::context::Context;
use crate::cq::{CqObject, CqRequest};
use crate::errno::{EINVAL, EOPNOTSUPP, Result, pointer};
use crate::extended_poll::{Entry, ExtendedPoll};
use crate::object::{self, borrow};
use crate::pd::PdObject;

/// Fields that need the time of each completion.
const TIME_FLAGS: u64 =
    (IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK) as u64;

/// All fields of `ibv_wc`, the VLAN tag, which is always absent, and times.
const SUPPORTED_WC_FLAGS: u64 = (IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_CVLAN) as u64 | TIME_FLAGS;

/// Advances to the next entry: ENOENT if there is none.
///
/// # Safety
/// The calling thread holds the session.
unsafe fn advance(object: &CqObject, poll: &ExtendedPoll) -> Result<()> {
    // SAFETY: the caller's.
    let (wc, _) = unsafe { poll.advance(object.cq())? };
    // SAFETY: our own structure; only the poll functions write these two fields.
    unsafe {
        (*object.as_c()).wr_id = wc.wr_id;
        (*object.as_c()).status = wc.status as u32;
    }
    Ok(())
}

/// The queue and its extended poll.
///
/// # Safety
/// `cq` is null or an extended completion queue.
unsafe fn queue_and_poll<'a>(cq: *mut ibv_cq_ex) -> Result<(&'a CqObject, &'a ExtendedPoll)> {
    // SAFETY: the caller's.
    let object = unsafe { borrow::<CqObject>(cq)? };
    Ok((object, object.extended.as_ref().ok_or(EINVAL)?))
}

fn code(result: Result<()>) -> c_int {
    crate::errno::status(result)
}

unsafe extern "C" fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    let start = || {
        // SAFETY: only extended completion queues carry this function.
        let (object, poll) = unsafe { queue_and_poll(cq)? };
        // SAFETY: null, or the program's attributes.
        if unsafe { attr.as_ref() }.is_some_and(|attr| attr.comp_mask != 0) {
            return Err(EINVAL);
        }
        poll.begin();
        // SAFETY: this thread began the session above; a poll without entries ends it.
        unsafe { advance(object, poll).inspect_err(|_| poll.end()) }
    };
    code(start())
}

unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: as above; the program is in a session.
    code(unsafe { queue_and_poll(cq).and_then(|(object, poll)| advance(object, poll)) })
}

unsafe extern "C" fn end_poll(cq: *mut ibv_cq_ex) {
    // SAFETY: as above.
    let Ok((_, poll)) = (unsafe { queue_and_poll(cq) }) else { return };
    // SAFETY: the program ends the session that its successful `start_poll` began.
    unsafe { poll.end() };
}

/// The current entry.
fn current(cq: *mut ibv_cq_ex) -> Wc {
    entry(cq).0
}

fn entry(cq: *mut ibv_cq_ex) -> Entry {
    // SAFETY: only extended completion queues carry the read functions, and they are for use within a session.
    match unsafe { queue_and_poll(cq) } {
        // SAFETY: the calling thread holds the session.
        Ok((_, poll)) => unsafe { poll.current() },
        Err(_) => Entry::default(),
    }
}

unsafe extern "C" fn read_opcode(cq: *mut ibv_cq_ex) -> ibv_wc_opcode {
    current(cq).opcode as u32
}

unsafe extern "C" fn read_vendor_err(cq: *mut ibv_cq_ex) -> u32 {
    current(cq).vendor_err
}

unsafe extern "C" fn read_byte_len(cq: *mut ibv_cq_ex) -> u32 {
    current(cq).byte_len
}

unsafe extern "C" fn read_imm_data(cq: *mut ibv_cq_ex) -> u32 {
    current(cq).imm
}

unsafe extern "C" fn read_qp_num(cq: *mut ibv_cq_ex) -> u32 {
    current(cq).qpn
}

unsafe extern "C" fn read_src_qp(cq: *mut ibv_cq_ex) -> u32 {
    current(cq).src_qp
}

unsafe extern "C" fn read_wc_flags(cq: *mut ibv_cq_ex) -> c_uint {
    current(cq).flags.bits()
}

/// Ethernet has no local identifiers.
unsafe extern "C" fn read_slid(_cq: *mut ibv_cq_ex) -> u32 {
    0
}

unsafe extern "C" fn read_sl(cq: *mut ibv_cq_ex) -> u8 {
    current(cq).sl
}

unsafe extern "C" fn read_dlid_path_bits(_cq: *mut ibv_cq_ex) -> u8 {
    0
}

/// The kernel's network stack removes VLAN tags.
unsafe extern "C" fn read_cvlan(_cq: *mut ibv_cq_ex) -> u16 {
    0
}

/// The completion time by the device's clock, in nanoseconds.
unsafe extern "C" fn read_completion_ts(cq: *mut ibv_cq_ex) -> u64 {
    entry(cq).1.0
}

/// The completion time in nanoseconds since 1970.
unsafe extern "C" fn read_completion_wallclock_ns(cq: *mut ibv_cq_ex) -> u64 {
    // SAFETY: as above.
    let Ok((object, poll)) = (unsafe { queue_and_poll(cq) }) else { return 0 };
    entry(cq).1.0 + poll.wall_clock_lead_ns(|| object.context().device().now())
}

fn functions() -> ibv_cq_ex {
    // SAFETY: integers, pointers and optional functions; creation sets the pthread objects.
    let mut c: ibv_cq_ex = unsafe { object::zeroed() };
    c.start_poll = Some(start_poll);
    c.next_poll = Some(next_poll);
    c.end_poll = Some(end_poll);
    c.read_opcode = Some(read_opcode);
    c.read_vendor_err = Some(read_vendor_err);
    c.read_byte_len = Some(read_byte_len);
    c.read_imm_data = Some(read_imm_data);
    c.read_qp_num = Some(read_qp_num);
    c.read_src_qp = Some(read_src_qp);
    c.read_wc_flags = Some(read_wc_flags);
    c.read_slid = Some(read_slid);
    c.read_sl = Some(read_sl);
    c.read_dlid_path_bits = Some(read_dlid_path_bits);
    c.read_cvlan = Some(read_cvlan);
    c.read_completion_ts = Some(read_completion_ts);
    c.read_completion_wallclock_ns = Some(read_completion_wallclock_ns);
    c
}

/// `ibv_create_cq_ex(3)`.
///
/// # Safety
/// `context` is null or open, `attr` null or attributes.
pub unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    let create = || {
        // SAFETY: the caller's.
        let (context, attr) = unsafe { (Context::share(context)?, object::read(attr)?) };
        check(attr)?;
        let parent = if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_PD != 0 {
            // SAFETY: the caller's.
            Some(unsafe { borrow::<PdObject>(attr.parent_domain)? }.in_use())
        } else {
            None
        };
        let poll = ExtendedPoll::new(!attr.channel.is_null());
        let request = CqRequest {
            context,
            entries: attr.cqe,
            cq_context: attr.cq_context,
            channel: attr.channel,
            vector: attr.comp_vector,
            parent,
        };
        // SAFETY: the caller's.
        let cq = unsafe { CqObject::create(request, Some((functions(), poll)))? };
        if attr.wc_flags & TIME_FLAGS != 0 {
            // SAFETY: just created.
            unsafe { borrow::<CqObject>(cq)? }.cq().keep_times();
        }
        Ok(cq)
    };
    pointer(create())
}

/// EOPNOTSUPP for attributes that this device does not support (flow tags, tag matching, ignoring overruns).
fn check(attr: &ibv_cq_init_attr_ex) -> Result<()> {
    if attr.comp_mask & !(IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD) != 0 {
        return Err(EINVAL);
    }
    let flags = if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0 { attr.flags } else { 0 };
    if attr.wc_flags & !SUPPORTED_WC_FLAGS != 0 || flags & !IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0 {
        return Err(EOPNOTSUPP);
    }
    Ok(())
}
