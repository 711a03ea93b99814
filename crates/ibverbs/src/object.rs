//! Conversion of verbs objects at the C boundary: C gets a pointer to its structure, which is the first field of this
//! library's object.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;

use crate::errno::{EINVAL, Result};

/// Reads a field of a structure whose fields were just stored one by one. The processor can forward only loads of
/// single fields. If another structure has the same fields in the same order, compilers combine several loads, and the
/// combined load waits until all of the stores are in the cache ( [decision
/// 41](../../../docs/decisions/0041-operations-wait-for-earlier-stores.md)).
#[inline(always)]
pub fn load_single<T: Copy>(field: &T) -> T {
    // SAFETY: a valid reference.
    unsafe { std::ptr::from_ref(field).read_volatile() }
}

/// C's structure at the beginning of an object. The program may write to its public fields at any time, so this library
/// never borrows it as a whole.
#[repr(transparent)]
pub struct CPart<T>(UnsafeCell<T>);

// SAFETY: the structure itself has no rules about threads; code accesses it through raw pointers and is responsible for
// the accessed field.
unsafe impl<T> Sync for CPart<T> {}
// SAFETY: plain data and pointers that this library never follows because of the structure alone.
unsafe impl<T> Send for CPart<T> {}

impl<T> CPart<T> {
    /// Wraps the structure.
    pub fn new(value: T) -> CPart<T> {
        CPart(UnsafeCell::new(value))
    }

    /// The address for C.
    pub fn get(&self) -> *mut T {
        self.0.get()
    }
}

/// An object that programs hold by a pointer to its first field.
///
/// # Safety
/// The type is `repr(C)` and its first field is a `CPart<Self::C>`.
pub unsafe trait Object: Sized {
    /// C's structure.
    type C;

    /// Passes the object to the program, until [`retire`].
    fn publish(self) -> *mut Self::C {
        Box::into_raw(Box::new(self)).cast()
    }
}

/// Memory for an object whose address is needed before its value.
pub struct Allocation<T: Object>(*mut MaybeUninit<T>);

impl<T: Object> Allocation<T> {
    /// Allocates the memory.
    pub fn new() -> Allocation<T> {
        Allocation(Box::into_raw(Box::new_uninit()))
    }

    /// The pointer for the program.
    pub fn as_c(&self) -> *mut T::C {
        self.0.cast()
    }

    /// Stores the object and passes it to the program.
    pub fn publish(self, object: T) -> *mut T::C {
        let pointer = self.0.cast::<T>();
        std::mem::forget(self);
        // SAFETY: allocated for a `T` and still empty.
        unsafe { pointer.write(object) };
        pointer.cast()
    }
}

impl<T: Object> Drop for Allocation<T> {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` and not published.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

/// The object behind a pointer that the program passes.
///
/// # Errors
/// EINVAL for a null pointer.
///
/// The pointer is null, or [`Object::publish`] of the same type made it and [`retire`] was not called on it.
/// libibverbs requires this of its callers: they pass the pointer that the matching create verb returned.
pub unsafe fn borrow<'a, T: Object>(pointer: *mut T::C) -> Result<&'a T> {
    // SAFETY: the caller's; C's structure is the first field.
    unsafe { pointer.cast::<T>().as_ref() }.ok_or(EINVAL)
}

/// Takes back an object from the program and drops it.
///
/// # Safety
/// As for [`borrow`], not null, and nothing borrowed from it is used afterwards.
pub unsafe fn retire<T: Object>(pointer: *mut T::C) {
    // SAFETY: `publish` made it with a `Box` of this type.
    drop(unsafe { Box::from_raw(pointer.cast::<T>()) });
}

/// Reads an attribute structure that the program passes.
///
/// # Errors
/// EINVAL for a null pointer.
///
/// # Safety
/// The pointer is null or points to a `T` for the duration of the call.
pub unsafe fn read<'a, T>(pointer: *const T) -> Result<&'a T> {
    // SAFETY: the caller's.
    unsafe { pointer.as_ref() }.ok_or(EINVAL)
}

/// Writes an answer to the program's address.
///
/// # Errors
/// EINVAL for a null pointer.
///
/// # Safety
/// The pointer is null or may be written.
pub unsafe fn write<T>(pointer: *mut T, value: T) -> Result<()> {
    if pointer.is_null() {
        return Err(EINVAL);
    }
    // SAFETY: the caller's.
    unsafe { pointer.write(value) };
    Ok(())
}

/// A C structure with every byte zero.
///
/// # Safety
/// All zero bytes are a value of `T`: integers, raw pointers, optional functions, and structures of these.
pub const unsafe fn zeroed<T>() -> T {
    // SAFETY: the caller's.
    unsafe { std::mem::zeroed() }
}
