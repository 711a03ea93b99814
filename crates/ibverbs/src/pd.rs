//! Protection domains, parent domains and thread domains.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::AcqRel, Ordering::Acquire};

use terrace_nic::Pd;

use crate::abi::{
    IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS, IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT, ibv_context,
    ibv_parent_domain_init_attr, ibv_pd, ibv_td, ibv_td_init_attr,
};
use crate::context::Context;
use crate::errno::{EBUSY, EINVAL, EOPNOTSUPP, Result, pointer, status};
use crate::object::{self, CPart, Object, borrow, retire};
use crate::room;

/// `ibv_pd`, or a parent domain, which refers to the protection domain inside it.
#[repr(C)]
pub struct PdObject {
    c: CPart<ibv_pd>,
    context: Arc<Context>,
    pd: Arc<Pd>,
    /// Objects created with this pointer, and its parent domains.
    users: Users,
    /// The objects that a parent domain keeps alive.
    parent: Option<Parent>,
}

// SAFETY: repr(C), the C structure first.
unsafe impl Object for PdObject {
    type C = ibv_pd;
}

struct Parent {
    _pd: Use,
    _td: Option<Use>,
}

/// Counts the references to an object.
#[derive(Clone, Default)]
pub struct Users(Arc<AtomicU32>);

/// One reference, released when dropped.
pub struct Use(Arc<AtomicU32>);

impl Users {
    /// Adds a reference.
    pub fn add(&self) -> Use {
        self.0.fetch_add(1, AcqRel);
        Use(self.0.clone())
    }

    /// EBUSY while references exist.
    pub fn none(&self) -> Result<()> {
        if self.0.load(Acquire) == 0 { Ok(()) } else { Err(EBUSY) }
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        self.0.fetch_sub(1, AcqRel);
    }
}

impl PdObject {
    fn publish_new(context: Arc<Context>, pd: Arc<Pd>, parent: Option<Parent>) -> *mut ibv_pd {
        let c = ibv_pd { context: context.as_c(), handle: pd.handle() };
        PdObject { c: CPart::new(c), context, pd, users: Users::default(), parent }.publish()
    }

    /// The NIC's protection domain.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// The device of the protection domain.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// A reference for an object that is created with this protection domain.
    pub fn in_use(&self) -> Use {
        self.users.add()
    }
}

/// `ibv_alloc_pd(3)`.
///
/// # Safety
/// `context` is null or open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    let alloc = || {
        // SAFETY: the caller's.
        let context = unsafe { Context::share(context)? };
        room::for_object()?;
        let pd = context.device().alloc_pd()?;
        Ok(PdObject::publish_new(context, pd, None))
    };
    pointer(alloc())
}

/// `ibv_dealloc_pd(3)`: EBUSY while an object of the protection domain exists.
///
/// # Safety
/// `pd` is null or a protection or parent domain.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    let dealloc = || {
        // SAFETY: the caller's.
        let object = unsafe { borrow::<PdObject>(pd)? };
        object.users.none()?;
        if object.parent.is_none() {
            object.pd.dealloc()?;
        }
        // SAFETY: nothing refers to it any more.
        unsafe { retire::<PdObject>(pd) };
        Ok(())
    };
    status(dealloc())
}

/// `ibv_td`: a promise to use objects from one thread only, which this device ignores.
#[repr(C)]
pub struct TdObject {
    c: CPart<ibv_td>,
    _context: Arc<Context>,
    users: Users,
}

// SAFETY: repr(C), the C structure first.
unsafe impl Object for TdObject {
    type C = ibv_td;
}

/// `ibv_alloc_td(3)`.
///
/// # Safety
/// `context` is open and `attr` points to attributes, or either is null.
pub unsafe extern "C" fn alloc_td(context: *mut ibv_context, attr: *mut ibv_td_init_attr) -> *mut ibv_td {
    let alloc = || {
        // SAFETY: the caller's.
        let (context, attr) = unsafe { (Context::share(context)?, object::read(attr)?) };
        if attr.comp_mask != 0 {
            return Err(EINVAL);
        }
        let c = CPart::new(ibv_td { context: context.as_c() });
        Ok(TdObject { c, _context: context, users: Users::default() }.publish())
    };
    pointer(alloc())
}

/// `ibv_dealloc_td(3)`: EBUSY while a parent domain uses the thread domain.
///
/// # Safety
/// `td` is null or a thread domain.
pub unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    let dealloc = || {
        // SAFETY: the caller's.
        unsafe { borrow::<TdObject>(td)? }.users.none()?;
        // SAFETY: nothing refers to it any more.
        unsafe { retire::<TdObject>(td) };
        Ok(())
    };
    status(dealloc())
}

/// `ibv_alloc_parent_domain(3)`. Allocators are accepted and never called: no hardware reads the queues, so their
/// addresses do not matter.
///
/// # Safety
/// `context` is open and `attr` points to attributes, or either is null.
pub unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    let alloc = || {
        // SAFETY: the caller's.
        let (context, attr) = unsafe { (Context::share(context)?, object::read(attr)?) };
        let known = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
        if attr.comp_mask & !known != 0 {
            return Err(EOPNOTSUPP);
        }
        // SAFETY: the caller's.
        let inner = unsafe { borrow::<PdObject>(attr.pd)? };
        // A parent domain of a parent domain is invalid.
        if inner.parent.is_some() || !Arc::ptr_eq(&inner.context, &context) {
            return Err(EINVAL);
        }
        // SAFETY: the caller's; null means none.
        let td = unsafe { borrow::<TdObject>(attr.td) }.ok().map(|td| td.users.add());
        let parent = Parent { _pd: inner.in_use(), _td: td };
        Ok(PdObject::publish_new(context, inner.pd.clone(), Some(parent)))
    };
    pointer(alloc())
}
