//! Accessing files as a client's user.
//!
//! The kernel checks permissions, so that they hold as for local programs: mode, ACLs, groups, capabilities. A worker sets
//! the user, group and supplementary groups of its thread for file systems (`setfsuid(2)`), which also drops the
//! capabilities that override permissions. Own checks would have to repeat all of these rules, and would race with
//! changes between check and access.

use std::io;

use nix::unistd::{Gid as NixGid, Uid as NixUid, setfsgid, setfsuid};
use rustix::process::{Gid, getegid, geteuid};
use rustix::thread::set_thread_groups;

use crate::rules::Identity;

/// Whether this process can be other users.
pub fn can_switch() -> bool {
    geteuid().is_root()
}

/// Whether this process can access files as that user.
pub fn can_be(identity: &Identity) -> bool {
    can_switch() || identity.uid == geteuid().as_raw()
}

/// A thread that is another user, until this is dropped.
struct Switched;

impl Switched {
    fn to(identity: &Identity) -> io::Result<Switched> {
        let groups: Vec<_> = identity.groups.iter().map(|group| Gid::from_raw(*group)).collect();
        set_thread_groups(&groups)?;
        let switched = Switched;
        set_ids(identity.uid, identity.gid)?;
        Ok(switched)
    }
}

impl Drop for Switched {
    fn drop(&mut self) {
        let restored =
            set_ids(geteuid().as_raw(), getegid().as_raw()).and_then(|()| Ok(set_thread_groups(&[])?));
        if let Err(error) = restored {
            // Any later access of this thread could be as the wrong user.
            tracing::error!(%error, "a thread cannot become the server's user again");
            std::process::abort();
        }
    }
}

/// Sets the thread's user and group for file systems, and checks that they are set: the calls do not report errors.
fn set_ids(uid: u32, gid: u32) -> io::Result<()> {
    let (uid, gid) = (NixUid::from_raw(uid), NixGid::from_raw(gid));
    setfsgid(gid);
    setfsuid(uid);
    // Setting what is invalid changes nothing, and returns the value in force.
    let (invalid_uid, invalid_gid) = (NixUid::from_raw(u32::MAX), NixGid::from_raw(u32::MAX));
    match setfsuid(invalid_uid) == uid && setfsgid(invalid_gid) == gid {
        true => Ok(()),
        false => Err(io::ErrorKind::PermissionDenied.into()),
    }
}

/// Calls `act` as a user. Only `act` runs as that user, and it must not start threads.
pub fn act_as<T>(identity: &Identity, act: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    if !can_switch() {
        return match can_be(identity) {
            true => act(),
            false => Err(io::ErrorKind::PermissionDenied.into()),
        };
    }
    let _switched = Switched::to(identity)?;
    act()
}
