//! A directory tree with the contents of sysfs and `/dev` on a machine with the device.
//!
//! The tree consists of real files, so that the kernel implements all operations on its paths and descriptors. It is
//! created at the first lookup, belongs to the process and is removed at exit. The next process removes the trees of
//! killed processes.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::atomic::{
    AtomicPtr, AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::signals::without_signals;
use crate::ah;
use crate::device_list::{UVERBS_NAME, device_name};
use crate::identity::{self, Identity};
use crate::query::{FIRMWARE, GID_ENTRIES, PKEY};

/// Parent directories of trees, in order of preference: one in memory, the one for temporary files.
const PARENTS: [&str; 2] = ["/dev/shm", "/tmp"];

/// Prefix of a tree's name; the inode of the PID namespace, the process id and a number follow.
const PREFIX: &str = "terrace-sysfs.";

struct Tree {
    root: PathBuf,
    /// The process that created the tree and removes it. In a forked child it is the parent.
    owner: u32,
}

/// The tree, or null. The structures are never freed: a process creates one tree, and another one only if the first has
/// been removed. So a lookup takes no lock, which could stay locked in a forked child, or be held by the thread that a
/// signal handler interrupts.
static TREE: AtomicPtr<Tree> = AtomicPtr::new(null_mut());

/// Held while a tree is created.
static CREATION: Mutex<()> = Mutex::new(());

/// The thread that creates the tree. It opens files itself and must not wait for itself.
static CREATOR: AtomicU32 = AtomicU32::new(0);

fn thread_id() -> u32 {
    // SAFETY: no preconditions.
    (unsafe { libc::gettid() }) as u32
}

fn tree() -> Option<&'static Tree> {
    // SAFETY: null, or a tree that is never freed and does not change.
    unsafe { TREE.load(Acquire).as_ref() }
}

/// The root, if the tree exists.
pub fn existing_root() -> Option<&'static Path> {
    Some(&tree()?.root)
}

/// The tree's root. Creates the tree if necessary. `None` if that fails: then paths are not redirected.
pub fn root() -> Option<&'static Path> {
    let usable = || existing_root().filter(|root| root.exists());
    if let Some(root) = usable() {
        return Some(root);
    }
    if CREATOR.load(Relaxed) == thread_id() {
        return None;
    }
    // A signal handler that looks up the tree would wait for its own thread.
    without_signals(|| {
        let _making = lock_creation();
        // Another thread may have created it meanwhile.
        usable().or_else(|| {
            CREATOR.store(thread_id(), Relaxed);
            let made = create();
            CREATOR.store(0, Relaxed);
            match made {
                Ok(root) => {
                    let tree = Box::new(Tree { root, owner: std::process::id() });
                    TREE.store(Box::into_raw(tree), Release);
                    existing_root()
                }
                Err(error) => {
                    tracing::warn!("no directory tree for /sys/class/infiniband: {error}");
                    None
                }
            }
        })
    })
}

fn lock_creation() -> MutexGuard<'static, ()> {
    CREATION.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Prevents a fork during the creation of a tree. A child uses its parent's tree.
pub struct Hold {
    _making: MutexGuard<'static, ()>,
}

/// See [`Hold`].
pub fn hold_for_fork() -> Hold {
    Hold { _making: lock_creation() }
}

fn create() -> io::Result<PathBuf> {
    let identity = identity::get().map_err(|errno| io::Error::from_raw_os_error(errno.0))?;
    remove_at_exit();
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for place in PARENTS.map(Path::new) {
        remove_stale(place);
        match create_in(place, identity) {
            Ok(root) => return Ok(root),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn create_in(place: &Path, identity: &Identity) -> io::Result<PathBuf> {
    let (namespace, pid) = (pid_namespace().unwrap_or(0), std::process::id());
    // Creation of the directory fails if the name exists, also as a link.
    let mut roots = (0..64).map(|attempt| place.join(format!("{PREFIX}{namespace}.{pid}.{attempt}")));
    let root = roots.find_map(|root| match fs::DirBuilder::new().mode(0o700).create(&root) {
        Ok(()) => Some(Ok(root)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => None,
        Err(error) => Some(Err(error)),
    });
    let root = root.unwrap_or_else(|| Err(io::ErrorKind::AlreadyExists.into()))?;
    fill(&root, identity).inspect_err(|_| drop(fs::remove_dir_all(&root)))?;
    Ok(root)
}

/// Writes a file in sysfs's format: one line.
fn line(directory: &Path, name: &str, text: impl std::fmt::Display) -> io::Result<()> {
    fs::write(directory.join(name), format!("{text}\n"))
}

fn directory(parent: &Path, name: &str) -> io::Result<PathBuf> {
    let path = parent.join(name);
    fs::create_dir_all(&path)?;
    Ok(path)
}

fn fill(root: &Path, identity: &Identity) -> io::Result<()> {
    let virtual_devices = directory(root, "sys/devices/virtual")?;
    let class = directory(root, "sys/class")?;
    let name = device_name();

    let device = directory(&virtual_devices, &format!("infiniband/{name}"))?;
    fill_device(&device, identity)?;
    fill_port(&directory(&device, "ports/1")?, identity)?;
    // Programs look up the network interface with the device's addresses here.
    if let Some(first) = identity.gids.first() {
        directory(&device, &format!("device/net/{}", first.interface))?;
    }
    let devices = directory(&class, "infiniband")?;
    symlink(format!("../../devices/virtual/infiniband/{name}"), devices.join(name))?;

    let uverbs = directory(&virtual_devices, &format!("infiniband_verbs/{UVERBS_NAME}"))?;
    line(&uverbs, "ibdev", name)?;
    line(&uverbs, "abi_version", 1)?;
    // The device file's numbers.
    line(&uverbs, "dev", "1:3")?;
    let verbs = directory(&class, "infiniband_verbs")?;
    line(&verbs, "abi_version", 6)?;
    symlink(format!("../../devices/virtual/infiniband_verbs/{UVERBS_NAME}"), verbs.join(UVERBS_NAME))?;

    line(&directory(&class, "misc/rdma_cm")?, "abi_version", 4)?;

    let files = directory(root, "dev/infiniband")?;
    symlink("/dev/null", files.join("rdma_cm"))?;
    symlink("/dev/null", files.join(UVERBS_NAME))
}

/// A GUID as four groups of four digits.
fn guid(value: u64) -> String {
    let group = |shift: u32| (value >> shift) & 0xffff;
    format!("{:04x}:{:04x}:{:04x}:{:04x}", group(48), group(32), group(16), group(0))
}

/// A GID as eight groups of four digits.
fn gid(raw: &[u8; 16]) -> String {
    let groups: Vec<String> = raw.chunks(2).map(|pair| format!("{:02x}{:02x}", pair[0], pair[1])).collect();
    groups.join(":")
}

fn fill_device(device: &Path, identity: &Identity) -> io::Result<()> {
    line(device, "node_type", "1: CA")?;
    line(device, "node_guid", guid(identity.node_guid))?;
    line(device, "sys_image_guid", guid(identity.node_guid))?;
    line(device, "node_desc", "Terrace software RDMA NIC")?;
    line(device, "fw_ver", FIRMWARE)
}

fn fill_port(port: &Path, identity: &Identity) -> io::Result<()> {
    line(port, "state", "4: ACTIVE")?;
    line(port, "phys_state", "5: LinkUp")?;
    line(port, "link_layer", "Ethernet")?;
    line(port, "rate", "100 Gb/sec (4X EDR)")?;
    line(port, "cap_mask", "0x04010000")?;
    line(port, "lid", format_args!("{:#x}", ah::lid(&identity.gids)))?;
    line(port, "sm_lid", "0x0")?;
    line(port, "lid_mask_count", 0)?;
    line(port, "sm_sl", 0)?;
    line(&directory(port, "pkeys")?, "0", format_args!("{PKEY:#06x}"))?;
    let (gids, types, interfaces) =
        (directory(port, "gids")?, directory(port, "gid_attrs/types")?, directory(port, "gid_attrs/ndevs")?);
    for index in 0..identity.gids.len().max(GID_ENTRIES) {
        let name = index.to_string();
        let entry = identity.gids.get(index);
        line(&gids, &name, gid(&entry.map_or([0; 16], |entry| entry.raw)))?;
        // In sysfs, reading the attributes of an empty entry fails; in this tree the files do not exist.
        if let Some(entry) = entry {
            line(&types, &name, "RoCE v2")?;
            line(&interfaces, &name, &entry.interface)?;
        }
    }
    Ok(())
}

/// The inode of this process's PID namespace; `None` without `/proc`.
fn pid_namespace() -> Option<u64> {
    Some(fs::metadata("/proc/self/ns/pid").ok()?.ino())
}

/// Removes the trees of processes that no longer exist. Removes only the user's own trees, because all users share the
/// directory, and only those of this PID namespace, because containers may share it, too.
fn remove_stale(place: &Path) {
    let Some(namespace) = pid_namespace() else { return };
    let prefix = format!("{PREFIX}{namespace}.");
    let Ok(entries) = fs::read_dir(place) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let owner =
            name.to_str().and_then(|name| name.strip_prefix(&prefix)?.split('.').next()?.parse().ok());
        let Some(owner): Option<i32> = owner else { continue };
        // SAFETY: signal 0 only checks whether the process exists.
        let gone = unsafe { libc::kill(owner, 0) } != 0
            && io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH);
        // SAFETY: no preconditions.
        let own = entry.metadata().is_ok_and(|metadata| metadata.uid() == unsafe { libc::geteuid() });
        if owner > 0 && gone && own {
            drop(fs::remove_dir_all(entry.path()));
        }
    }
}

fn remove_at_exit() {
    static REGISTERED: std::sync::Once = std::sync::Once::new();
    REGISTERED.call_once(|| {
        // SAFETY: a function without preconditions, in a library that stays loaded.
        let failed = unsafe { libc::atexit(remove_own) } != 0;
        if failed {
            tracing::debug!("cannot register an exit handler; the next process will remove the tree");
        }
    });
}

extern "C" fn remove_own() {
    // Another thread may be creating a tree while the process exits. The next process removes it.
    if let Some(tree) = tree().filter(|tree| tree.owner == std::process::id()) {
        TREE.store(null_mut(), Release);
        drop(fs::remove_dir_all(&tree.root));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_format_of_sysfs() {
        assert_eq!(guid(0x0200_5eff_fe00_0001), "0200:5eff:fe00:0001");
        let raw = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1];
        assert_eq!(gid(&raw), "0000:0000:0000:0000:0000:ffff:7f00:0001");
    }

    #[test]
    fn a_tree_has_the_files_that_programs_read() {
        let identity =
            Identity { node_guid: 1, gids: vec![terrace_nic::Gid::new([127, 0, 0, 1].into(), "lo", 1)] };
        let root = create_in(&std::env::temp_dir(), &identity).expect("a tree");
        let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
        assert_eq!(read("sys/class/infiniband/terrace0/ports/1/gid_attrs/types/0"), "RoCE v2\n");
        assert_eq!(read("sys/class/infiniband/terrace0/ports/1/gid_attrs/types/1"), "");
        assert_eq!(read("sys/class/infiniband_verbs/uverbs0/ibdev"), "terrace0\n");
        assert_eq!(read("sys/class/misc/rdma_cm/abi_version"), "4\n");
        fs::remove_dir_all(root).expect("removed");
    }
}
