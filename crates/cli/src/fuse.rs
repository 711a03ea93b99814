//! What mounting needs: the kernel's FUSE device, and for users without CAP_SYS_ADMIN the helper `fusermount3`.

use std::ffi::OsStr;
use std::fs::OpenOptions;
use std::io;

use rustix::thread::{CapabilitySet, capabilities};

use crate::program;

const DEVICE: &str = "/dev/fuse";

/// What keeps this user from mounting here.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{meaning}: {advice}")]
pub struct Obstacle {
    /// What was found.
    pub meaning: String,
    /// What to do.
    pub advice: &'static str,
}

/// The first obstacle; `None` if there is none.
pub fn obstacle() -> Option<Obstacle> {
    let device = OpenOptions::new().read(true).write(true).open(DEVICE);
    let is_admin = capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN));
    let has_helper = || program::find(OsStr::new("fusermount3")).is_ok();
    obstacle_of(device.map(drop), is_admin || has_helper())
}

fn obstacle_of(device: io::Result<()>, may_mount: bool) -> Option<Obstacle> {
    match device {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Some(Obstacle {
            meaning: format!("there is no {DEVICE}"),
            advice: "modprobe fuse; for a container --device /dev/fuse --cap-add SYS_ADMIN",
        }),
        Err(error) => Some(Obstacle {
            meaning: format!("{DEVICE} cannot be opened: {error}"),
            advice: "let this user read and write it; for a container --device /dev/fuse",
        }),
        Ok(()) if !may_mount => Some(Obstacle {
            meaning: "fusermount3 is not here, by which users other than root mount".into(),
            advice: "install it: apt-get install fuse3, or dnf install fuse3",
        }),
        Ok(()) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_obstacle_says_what_to_do() {
        let said = |device, may_mount| obstacle_of(device, may_mount).map(|found| found.to_string());
        assert_eq!(said(Ok(()), true), None);
        let absent = said(Err(io::ErrorKind::NotFound.into()), true).unwrap();
        assert!(absent.starts_with("there is no /dev/fuse: modprobe fuse"), "{absent}");
        let refused = said(Err(io::ErrorKind::PermissionDenied.into()), true).unwrap();
        assert!(refused.contains("permission denied"), "{refused}");
        assert!(said(Ok(()), false).unwrap().contains("apt-get install fuse3"));
    }
}
