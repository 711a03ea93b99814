//! The listening socket.

use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen as start_listening,
};

/// Clients that wait to be accepted.
const BACKLOG: i32 = 16;

/// Listens at a path to which only this user may connect.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    remove_abandoned(path)?;
    if let Ok(metadata) = path.symlink_metadata() {
        let is_socket = metadata.file_type().is_socket();
        let what = if is_socket {
            "in use: another process listens there"
        } else {
            "a file or directory is there, which is no socket"
        };
        return Err(io::Error::new(io::ErrorKind::AddrInUse, what));
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    // Nobody can connect before the socket listens.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    start_listening(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// Removes a socket that nobody listens at.
fn remove_abandoned(path: &Path) -> io::Result<()> {
    let is_socket = path.symlink_metadata().is_ok_and(|metadata| metadata.file_type().is_socket());
    if is_socket && is_refused(path)? {
        std::fs::remove_file(path)?;
    }
    Ok(())
}

/// Whether a socket refuses connections. A process that is stopped may have its backlog full: it is not waited for.
fn is_refused(path: &Path) -> io::Result<bool> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    Ok(connect(&socket, &SocketAddrUnix::new(path)?) == Err(Errno::CONNREFUSED))
}
