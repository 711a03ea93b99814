//! The private symbols that hardware providers bind when they are loaded. perftest loads two providers at start, for
//! any device. Most of these functions are never called, because the providers find no matching device.
//! `private_nodes.txt` lists the symbols of each node.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;

use crate::abi::ibv_context;
use crate::errno::{EINVAL, EOPNOTSUPP};
use crate::query::gid_type;
use crate::strings::wr_opcode_text;

/// Defines functions that return EOPNOTSUPP, for one private node.
macro_rules! unsupported {
    ($($name:ident)*) => {
        $(
            /// EOPNOTSUPP. The calling convention permits any arguments.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> c_int {
                EOPNOTSUPP.0
            }
        )*
    };
}

/// Defines functions that do nothing.
macro_rules! nothing {
    ($($name:ident)*) => {
        $(
            /// Does nothing.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() {}
        )*
    };
}

/// Defines functions that return null and set EOPNOTSUPP.
macro_rules! null {
    ($($name:ident)*) => {
        $(
            /// Null, and EOPNOTSUPP in `errno`.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> *mut c_void {
                EOPNOTSUPP.set();
                null_mut()
            }
        )*
    };
}

/// Defines functions that return -1 and EINVAL, as for a device without a directory in sysfs.
macro_rules! no_file {
    ($($name:ident)*) => {
        $(
            /// -1, and EINVAL in `errno`.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> c_int {
                EINVAL.set();
                -1
            }
        )*
    };
}

/// Defines the count of attributes of a chain of command buffers: only that of the first one, as there are no chains.
macro_rules! final_num_attrs {
    ($($name:ident)*) => {
        $(
            /// The argument `num_attrs`.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name(num_attrs: c_uint, _link: *mut c_void) -> c_uint {
                num_attrs
            }
        )*
    };
}

/// Defines flags of the library that providers read: whether destroying an object of a removed device succeeds.
macro_rules! flag {
    ($($name:ident)*) => {
        $(
            /// Whether destroying an object of a removed device succeeds.
            #[unsafe(no_mangle)]
            pub static $name: bool = false;
        )*
    };
}

/// Defines `ibv_query_gid_type`, which librdmacm and pyverbs use.
macro_rules! gid_type {
    ($($name:ident)*) => {
        $(
            /// The GID's kind as in sysfs.
            ///
            /// # Safety
            /// `context` is null or open, `kind` null or writable.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name(
                context: *mut ibv_context,
                port: u8,
                index: c_uint,
                kind: *mut c_uint,
            ) -> c_int {
                // SAFETY: the caller's.
                unsafe { gid_type(context, port, index, kind) }
            }
        )*
    };
}

/// Defines `ibv_wr_opcode_str`.
macro_rules! opcode_str {
    ($($name:ident)*) => {
        $(
            /// The text of a work request's opcode.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name(opcode: c_uint) -> *const c_char {
                wr_opcode_text(opcode)
            }
        )*
    };
}

include!(concat!(env!("OUT_DIR"), "/private_nodes.rs"));
