//! Completion event channels.

use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use terrace_nic::{CompChannel, Error};

use crate::abi::{ibv_comp_channel, ibv_context, ibv_cq};
use crate::context::Context;
use crate::errno::{Result, minus_one, pointer, status};
use crate::object::{self, CPart, Object, borrow, retire};
use crate::pd::{Use, Users};
use crate::room;

/// `ibv_comp_channel`.
#[repr(C)]
pub struct ChannelObject {
    c: CPart<ibv_comp_channel>,
    _context: Arc<Context>,
    channel: Arc<CompChannel>,
    /// The completion queues' objects.
    users: Users,
}

// SAFETY: repr(C), the C structure first.
unsafe impl Object for ChannelObject {
    type C = ibv_comp_channel;
}

impl ChannelObject {
    /// The NIC's channel.
    pub fn channel(&self) -> &Arc<CompChannel> {
        &self.channel
    }

    /// A reference for a completion queue.
    pub fn in_use(&self) -> Use {
        self.users.add()
    }
}

/// `ibv_create_comp_channel(3)`.
///
/// # Safety
/// `context` is null or open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    let create = || {
        // SAFETY: the caller's.
        let context = unsafe { Context::share(context)? };
        room::for_object()?;
        let channel = context.device().create_channel()?;
        let c = ibv_comp_channel { context: context.as_c(), fd: channel.fd().as_raw_fd(), refcnt: 0 };
        Ok(ChannelObject { c: CPart::new(c), _context: context, channel, users: Users::default() }.publish())
    };
    pointer(create())
}

/// `ibv_destroy_comp_channel(3)`: EBUSY while completion queues use the channel.
///
/// # Safety
/// `channel` is null or a channel.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    let destroy = || {
        // SAFETY: the caller's.
        let object = unsafe { borrow::<ChannelObject>(channel)? };
        object.users.none()?;
        object.channel.destroy()?;
        // SAFETY: the NIC no longer refers to it.
        unsafe { retire::<ChannelObject>(channel) };
        Ok(())
    };
    status(destroy())
}

/// `ibv_get_cq_event(3)`: blocks unless the program made the descriptor non-blocking.
///
/// # Safety
/// `channel` is null or a channel; the other two are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    let get = || -> Result<()> {
        // SAFETY: the caller's.
        let object = unsafe { borrow::<ChannelObject>(channel)? };
        if cq.is_null() || cq_context.is_null() {
            // The check comes before the event is removed from the queue: without these pointers the program could not
            // acknowledge it.
            return Err(Error::Invalid("null pointer for the event").into());
        }
        let event = object.channel.get_event()?;
        let source = event.cookie() as *mut ibv_cq;
        // SAFETY: the cookie is the C structure, and destroying it waits for this event's acknowledgement.
        unsafe {
            object::write(cq, source)?;
            object::write(cq_context, (*source).cq_context)
        }
    };
    minus_one(get())
}
