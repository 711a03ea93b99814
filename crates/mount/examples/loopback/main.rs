//! Mounts a local directory by the code of `terrace mount`, without an export: what the mount itself does and costs.
//!
//! `loopback DIRECTORY MOUNT_POINT [others]`; it ends when it is unmounted.
#![forbid(unsafe_code)]

mod local;

use std::env;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use terrace_mount::{MountConfig, mount};

fn main() -> io::Result<()> {
    let mut arguments = env::args_os().skip(1);
    let (Some(directory), Some(mount_point)) = (arguments.next(), arguments.next()) else {
        return Err(io::Error::other("usage: loopback DIRECTORY MOUNT_POINT [others]"));
    };
    let local = local::Local::new(PathBuf::from(directory))?;
    let config = MountConfig {
        root: local.root(),
        mount_point: mount_point.into(),
        source: "loopback".into(),
        ttl: Duration::from_secs(1),
        serves_others: arguments.next().is_some(),
        is_read_only: false,
    };
    let mounted = mount(local, &config)?;
    poll(&mut [PollFd::new(&mounted.ended(), PollFlags::empty())], None)?;
    mounted.unmount()
}
