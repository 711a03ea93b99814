//! The connection manager's device: use as by librdmacm, and invalid use. The test binary is linked with the library's
//! interposed C functions.

mod common;

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

use common::*;

const CREATE_ID: u32 = 0;
const DESTROY_ID: u32 = 1;
const BIND_IP: u32 = 2;
const RESOLVE_IP: u32 = 3;
const RESOLVE_ROUTE: u32 = 4;
const QUERY_ROUTE: u32 = 5;
const CONNECT: u32 = 6;
const LISTEN: u32 = 7;
const ACCEPT: u32 = 8;
const DISCONNECT: u32 = 10;
const INIT_QP_ATTR: u32 = 11;
const GET_EVENT: u32 = 12;
const SET_OPTION: u32 = 14;
const JOIN_IP_MULTICAST: u32 = 16;
const LEAVE_MULTICAST: u32 = 17;
const MIGRATE_ID: u32 = 18;
const JOIN_MULTICAST: u32 = 22;
const WRITE_EVENT: u32 = 24;
const IPOIB: u16 = 0x0002;
const TCP: u16 = 0x0106;
const UDP: u16 = 0x0111;

const ADDR_RESOLVED: u32 = 0;
const ROUTE_RESOLVED: u32 = 2;
const CONNECT_REQUEST: u32 = 4;
const CONNECT_RESPONSE: u32 = 5;
const UNREACHABLE: u32 = 7;
const REJECTED: u32 = 8;
const ESTABLISHED: u32 = 9;
const DISCONNECTED: u32 = 10;
const MULTICAST_JOIN: u32 = 12;
const USER: u32 = 18;
const INTERNAL: u32 = 19;

/// An open channel.
struct Channel(c_int);

/// An event: user id, identifier, type, status.
type Event = (u64, u32, u32, i32);

impl Channel {
    fn open(flags: c_int) -> Channel {
        // `open` sets the device's address to the loopback address.
        open();
        Channel::open_another(flags)
    }

    /// Opens another channel.
    fn open_another(flags: c_int) -> Channel {
        // SAFETY: a C string.
        let fd = unsafe {
            libc::open(c"/dev/infiniband/rdma_cm".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC | flags)
        };
        assert!(fd >= 0);
        Channel(fd)
    }

    /// Writes bytes. Returns 0 or the errno.
    fn write(&self, bytes: &[u8]) -> i32 {
        // SAFETY: bytes of that length.
        let written = unsafe { libc::write(self.0, bytes.as_ptr().cast(), bytes.len()) };
        if written == bytes.len() as isize { 0 } else { errno() }
    }

    /// Writes a command with its fields and an answer buffer size.
    fn command(&self, command: u32, fields: &[u8], answer_bytes_max: usize) -> i32 {
        let mut bytes = command.to_ne_bytes().to_vec();
        bytes.extend((fields.len() as u16).to_ne_bytes());
        bytes.extend((answer_bytes_max as u16).to_ne_bytes());
        bytes.extend(fields);
        self.write(&bytes)
    }

    fn create(&self, uid: u64) -> u32 {
        self.create_in(TCP, uid)
    }

    fn create_in(&self, port_space: u16, uid: u64) -> u32 {
        let mut id = 0u32;
        let mut fields = uid.to_ne_bytes().to_vec();
        fields.extend((&raw mut id as u64).to_ne_bytes());
        fields.extend(port_space.to_ne_bytes());
        fields.extend([2, 0, 0, 0, 0, 0]);
        assert_eq!(self.command(CREATE_ID, &fields, 4), 0);
        id
    }

    fn destroy(&self, id: u32) -> (i32, u32) {
        let mut reported = 0u32;
        let mut fields = (&raw mut reported as u64).to_ne_bytes().to_vec();
        fields.extend(id.to_ne_bytes());
        fields.extend([0; 4]);
        (self.command(DESTROY_ID, &fields, 4), reported)
    }

    fn bind(&self, id: u32, port: u16) -> i32 {
        self.bind_address(id, &address(port))
    }

    fn bind_address(&self, id: u32, address: &[u8]) -> i32 {
        let mut fields = vec![0; 8];
        fields.extend(address);
        fields.extend(id.to_ne_bytes());
        self.command(BIND_IP, &fields, 0)
    }

    /// Whether the identifier is bound to addresses of its family only (`RDMA_OPTION_ID_AFONLY`).
    fn set_family_only(&self, id: u32, is_set: bool) -> i32 {
        let (value, level, name) = (u32::from(is_set), 0u32, 2u32);
        let mut fields = (&raw const value as u64).to_ne_bytes().to_vec();
        [id, level, name, 4].into_iter().for_each(|field| fields.extend(field.to_ne_bytes()));
        self.command(SET_OPTION, &fields, 0)
    }

    fn listen(&self, id: u32) -> i32 {
        self.command(LISTEN, &[id.to_ne_bytes(), 8u32.to_ne_bytes()].concat(), 0)
    }

    fn resolve(&self, id: u32, uid: u64, port: u16) {
        self.resolve_address(id, uid, &address(port));
    }

    fn resolve_address(&self, id: u32, uid: u64, to: &[u8]) {
        let mut fields = vec![0; 28];
        fields.extend(to);
        fields.extend(id.to_ne_bytes());
        fields.extend(2000u32.to_ne_bytes());
        assert_eq!(self.command(RESOLVE_IP, &fields, 0), 0);
        assert_eq!(self.event(), (uid, id, ADDR_RESOLVED, 0));
        assert_eq!(self.command(RESOLVE_ROUTE, &[id.to_ne_bytes(), 0u32.to_ne_bytes()].concat(), 0), 0);
        assert_eq!(self.event(), (uid, id, ROUTE_RESOLVED, 0));
    }

    /// Joins a group by either command. Returns the membership's number, or the errno.
    fn join(&self, command: u32, id: u32, uid: u64, group: [u8; 4], flags: u16) -> Result<u32, i32> {
        let mut joined = 0u32;
        let mut to = address(0);
        to[4..8].copy_from_slice(&group);
        let mut fields = (&raw mut joined as u64).to_ne_bytes().to_vec();
        fields.extend(uid.to_ne_bytes());
        if command == JOIN_MULTICAST {
            fields.extend(id.to_ne_bytes());
            fields.extend(16u16.to_ne_bytes());
            fields.extend(flags.to_ne_bytes());
            to.resize(128, 0);
            fields.extend(to);
        } else {
            fields.extend(to);
            fields.extend(id.to_ne_bytes());
        }
        match self.command(command, &fields, 4) {
            0 => Ok(joined),
            errno => Err(errno),
        }
    }

    /// The errno, and the number of the membership's events that were taken.
    fn leave(&self, joined: u32) -> (i32, u32) {
        let mut reported = 0u32;
        let mut fields = (&raw mut reported as u64).to_ne_bytes().to_vec();
        fields.extend(joined.to_ne_bytes());
        fields.extend([0; 4]);
        (self.command(LEAVE_MULTICAST, &fields, 4), reported)
    }

    /// Moves an identifier of another channel to this one. Returns the number of its events that were taken.
    fn migrate(&self, id: u32, from: &Channel) -> u32 {
        let mut reported = 0u32;
        let mut fields = (&raw mut reported as u64).to_ne_bytes().to_vec();
        fields.extend(id.to_ne_bytes());
        fields.extend(from.0.to_ne_bytes());
        assert_eq!(self.command(MIGRATE_ID, &fields, 4), 0);
        reported
    }

    fn get_event(&self) -> Result<Event, i32> {
        self.get_event_and_argument().map(|(event, _)| event)
    }

    /// The event, and the number of one that the program has written.
    fn get_event_and_argument(&self) -> Result<(Event, u64), i32> {
        let mut answer = [0u8; 336];
        let status = self.command(GET_EVENT, &(&raw mut answer as u64).to_ne_bytes(), answer.len());
        let word = |at: usize| u32::from_ne_bytes(*answer[at..].first_chunk().expect("in range"));
        let long = |at: usize| u64::from_ne_bytes(*answer[at..].first_chunk().expect("in range"));
        let event = (long(0), word(8), word(12), word(16) as i32);
        if status == 0 { Ok((event, long(20))) } else { Err(status) }
    }

    fn write_event(&self, id: u32, event: u32, status: i32, argument: u64) -> i32 {
        let words = [id, 0, event, status as u32].map(u32::to_ne_bytes).concat();
        // The rest of the union.
        self.command(WRITE_EVENT, &[&words[..], &argument.to_ne_bytes(), &[0; 312]].concat(), 0)
    }

    fn event(&self) -> Event {
        self.get_event().expect("an event")
    }

    fn readable(&self) -> bool {
        let mut poll = libc::pollfd { fd: self.0, events: libc::POLLIN, revents: 0 };
        // SAFETY: one structure.
        unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: ours.
        unsafe { libc::close(self.0) };
    }
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// The loopback address, padded to the size of a `sockaddr_in6`.
fn address(port: u16) -> Vec<u8> {
    let mut raw = vec![0; 28];
    raw[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
    raw[2..4].copy_from_slice(&port.to_be_bytes());
    raw[4..8].copy_from_slice(&[127, 0, 0, 1]);
    raw
}

/// The IPv6 loopback address.
fn address_v6(port: u16) -> Vec<u8> {
    let mut raw = vec![0; 28];
    raw[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
    raw[2..4].copy_from_slice(&port.to_be_bytes());
    raw[23] = 1;
    raw
}

/// The wildcard of a family.
fn any(address: Vec<u8>) -> Vec<u8> {
    let ip = if address[..2] == (libc::AF_INET as u16).to_ne_bytes() { 4..8 } else { 8..24 };
    let mut any = address;
    any[ip].fill(0);
    any
}

/// `struct rdma_ucm_conn_param` for a queue pair with this number.
fn conn_param(qpn: u32) -> Vec<u8> {
    let mut raw = vec![0; 272];
    raw[..4].copy_from_slice(&qpn.to_ne_bytes());
    raw[8..13].copy_from_slice(b"hello");
    raw[264..].copy_from_slice(&[5, 0, 1, 1, 0, 7, 7, 1]);
    raw
}

fn accept(channel: &Channel, uid: u64, param: &[u8], id: u32) -> i32 {
    let fields = [&uid.to_ne_bytes()[..], param, &id.to_ne_bytes(), &[0; 12]].concat();
    channel.command(ACCEPT, &fields, 0)
}

fn connect(channel: &Channel, id: u32, qpn: u32) -> i32 {
    channel.command(CONNECT, &[&conn_param(qpn)[..], &id.to_ne_bytes(), &[0; 12]].concat(), 0)
}

#[test]
fn a_channel_has_the_status_of_a_device() {
    let channel = Channel::open(0);
    // SAFETY: space for the result.
    let status = unsafe {
        let mut status: libc::stat = std::mem::zeroed();
        assert_eq!(libc::fstat(channel.0, &raw mut status), 0);
        status
    };
    assert_eq!(status.st_mode & libc::S_IFMT, libc::S_IFCHR);
    assert!(!channel.readable());
}

#[test]
fn invalid_commands_fail() {
    let channel = Channel::open(libc::O_NONBLOCK);
    let id = channel.create(1);
    assert_eq!(channel.write(&[0; 7]), libc::EINVAL);
    assert_eq!(channel.write(&[0; 4096]), libc::EINVAL);
    assert_eq!(channel.command(99, &[], 0), libc::EINVAL);
    assert_eq!(channel.command(13, &[], 0), libc::ENOSYS);
    // The command is shorter than its header says.
    assert_eq!(channel.write(&[0, 0, 0, 0, 40, 0, 4, 0]), libc::EINVAL);
    // The command's fields are too short, the answer buffer is too small, or its address is invalid.
    assert_eq!(channel.command(CREATE_ID, &[0; 8], 4), libc::EINVAL);
    assert_eq!(channel.command(GET_EVENT, &[0; 8], 8), libc::ENOSPC);
    assert_eq!(
        channel.command(QUERY_ROUTE, &[&[0; 8][..], &id.to_ne_bytes(), &[0; 4]].concat(), 208),
        libc::EFAULT
    );
    // SAFETY: the tested address is not mapped.
    assert_eq!(unsafe { libc::write(channel.0, 8 as *const _, 16) }, -1);
    assert_eq!(errno(), libc::EFAULT);
    assert_eq!(channel.get_event(), Err(libc::EAGAIN));
    assert_eq!(channel.destroy(77).0, libc::ENOENT);
    assert_eq!(channel.listen(77), libc::ENOENT);
    assert_eq!(connect(&channel, id, 1), libc::EINVAL, "there is no route");
    assert_eq!(accept(&channel, 1, &conn_param(1), id), libc::EINVAL, "there is no request");
    // A channel cannot use another channel's identifiers.
    let other = Channel::open(0);
    assert_eq!(other.destroy(id).0, libc::EINVAL);
    assert_eq!(channel.destroy(id), (0, 0));
}

#[test]
fn a_program_gets_the_events_that_it_writes() {
    let channel = Channel::open(libc::O_NONBLOCK);
    let (id, other) = (channel.create(11), channel.create(12));
    assert_eq!(channel.write_event(id, USER, -5, u64::MAX - 1), 0);
    assert_eq!(channel.write_event(other, INTERNAL, 0, 16), 0);
    assert_eq!(channel.get_event_and_argument(), Ok(((11, id, USER, -5), u64::MAX - 1)));
    assert_eq!(channel.get_event_and_argument(), Ok(((12, other, INTERNAL, 0), 16)));
    assert_eq!(
        channel.write_event(id, ESTABLISHED, 0, 0),
        libc::EINVAL,
        "an event of the connection manager"
    );
    assert_eq!(channel.write_event(77, USER, 0, 0), libc::ENOENT);
    assert_eq!(channel.command(WRITE_EVENT, &[0; 20], 0), libc::EINVAL);
    assert_eq!(channel.get_event(), Err(libc::EAGAIN));
    // An event that was not taken ends with its identifier; the number of those taken is reported.
    assert_eq!(channel.write_event(id, USER, 0, 0), 0);
    assert_eq!(channel.destroy(id), (0, 1));
    assert_eq!(channel.get_event(), Err(libc::EAGAIN));
    assert_eq!(channel.destroy(other), (0, 1));
}

#[test]
fn the_events_of_an_identifier_move_with_it() {
    let (first, second) = (Channel::open(libc::O_NONBLOCK), Channel::open(libc::O_NONBLOCK));
    let (moved, stays) = (first.create(11), first.create(12));
    assert_eq!((first.write_event(moved, USER, 0, 1), first.write_event(moved, USER, 0, 2)), (0, 0));
    assert_eq!(first.get_event_and_argument(), Ok(((11, moved, USER, 0), 1)));
    assert_eq!(second.migrate(moved, &first), 1);
    // A program that polls would wait for an event that is not there.
    assert_eq!((first.readable(), second.readable()), (false, true));
    assert_eq!(first.get_event(), Err(libc::EAGAIN));
    assert_eq!(second.get_event_and_argument(), Ok(((11, moved, USER, 0), 2)));
    assert_eq!((first.destroy(moved).0, second.destroy(moved)), (libc::EINVAL, (0, 2)));
    // Moved to its own channel, an identifier keeps its events.
    assert_eq!(first.write_event(stays, USER, 0, 3), 0);
    assert_eq!(first.migrate(stays, &first), 0);
    assert!(first.readable());
    assert_eq!(first.get_event_and_argument(), Ok(((12, stays, USER, 0), 3)));
    assert!(!first.readable());
}

#[test]
fn an_identifier_joins_groups_and_leaves_them() {
    const GROUP: [u8; 4] = [239, 1, 2, 3];
    let channel = Channel::open(libc::O_NONBLOCK);
    for space in [UDP, IPOIB] {
        let id = channel.create_in(space, 1);
        assert_eq!(channel.join(JOIN_MULTICAST, id, 7, GROUP, 0), Err(libc::EINVAL), "there is no address");
        assert_eq!(channel.bind(id, 0), 0);
        assert_eq!(channel.join(JOIN_MULTICAST, id, 7, GROUP, 2), Err(libc::EINVAL), "an unknown flag");
        assert_eq!(channel.join(JOIN_MULTICAST, id, 7, [127, 0, 0, 1], 0), Err(libc::EINVAL), "no group");
        let first = channel.join(JOIN_MULTICAST, id, 7, GROUP, 1).expect("joined");
        let second = channel.join(JOIN_IP_MULTICAST, id, 8, GROUP, 0).expect("joined");
        assert_ne!(first, second);
        // The event names the membership; its parameters begin with the number of the group's queue pair.
        let (event, parameters) = channel.get_event_and_argument().expect("an event");
        assert_eq!((event, parameters as u32), ((7, first, MULTICAST_JOIN, 0), 0xff_ffff));
        assert_eq!(channel.leave(first), (0, 1));
        assert_eq!(channel.leave(first).0, libc::ENOENT);
        // The second event was not taken, and ends with its membership.
        assert_eq!(channel.leave(second), (0, 0));
        assert_eq!(channel.get_event(), Err(libc::EAGAIN));
        let third = channel.join(JOIN_MULTICAST, id, 9, GROUP, 0).expect("joined");
        assert_eq!(Channel::open_another(0).leave(third).0, libc::EINVAL, "another channel's");
        // librdmacm counts acknowledged events of a membership for the identifier as well, and waits for that count.
        assert_eq!(channel.destroy(id), (0, 1));
        assert_eq!(channel.get_event(), Err(libc::EAGAIN));
        assert_eq!(channel.leave(third).0, libc::ENOENT);
    }
    let reliable = channel.create(1);
    assert_eq!(channel.bind(reliable, 0), 0);
    assert_eq!(channel.join(JOIN_MULTICAST, reliable, 7, GROUP, 0), Err(libc::EINVAL), "only UD");
}

#[test]
fn a_port_is_taken_until_its_channel_is_closed() {
    const PORT: u16 = 7201;
    let first = Channel::open(0);
    let id = first.create(1);
    assert_eq!((first.bind(id, PORT), first.listen(id)), (0, 0));
    let second = Channel::open(0);
    let late = second.create(2);
    assert_eq!(second.bind(late, PORT), libc::EADDRINUSE);
    // A copy keeps the channel open.
    // SAFETY: an open descriptor.
    let copy = unsafe { libc::dup(first.0) };
    drop(first);
    assert_eq!(second.bind(late, PORT), libc::EADDRINUSE);
    // SAFETY: ours.
    unsafe { libc::close(copy) };
    while second.bind(late, PORT) == libc::EADDRINUSE {
        std::thread::yield_now();
    }
}

#[test]
fn both_families_listen_at_a_port_and_accept_their_own_requests() {
    const PORT: u16 = 7204;
    let channel = Channel::open(0);
    let [v4, v6, both, client] = [1, 2, 3, 4].map(|uid| channel.create(uid));
    assert_eq!(channel.set_family_only(v6, true), 0);
    assert_eq!((channel.bind_address(v6, &any(address_v6(PORT))), channel.listen(v6)), (0, 0));
    channel.resolve(client, 4, PORT);
    assert_eq!(connect(&channel, client, 1), 0);
    assert_eq!(channel.event(), (4, client, REJECTED, 8), "the listener has the other family");
    // An identifier of IPv4 is bound to that family in any case.
    assert_eq!((channel.bind_address(v4, &any(address(PORT))), channel.listen(v4)), (0, 0));
    assert_eq!(channel.bind_address(both, &any(address_v6(PORT))), libc::EADDRINUSE);
    let client = channel.create(5);
    channel.resolve(client, 5, PORT);
    assert_eq!(connect(&channel, client, 1), 0);
    let (uid, _, code, _) = channel.event();
    assert_eq!((uid, code), (1, CONNECT_REQUEST));
    assert_eq!(channel.set_family_only(v6, false), libc::EINVAL, "it listens");
}

#[test]
fn a_reused_descriptor_number_is_not_a_channel() {
    let channel = Channel::open(0);
    let mut ends = [0; 2];
    // SAFETY: space for two descriptors; the second gets the channel's number.
    unsafe {
        assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
        assert_eq!(libc::dup2(ends[1], channel.0), channel.0);
    }
    assert_eq!(channel.command(99, &[], 0), 0, "a pipe accepts any bytes");
    let mut got = [0u8; 16];
    // SAFETY: space for that many bytes.
    assert_eq!(unsafe { libc::read(ends[0], got.as_mut_ptr().cast(), 16) }, 8);
    assert_eq!(got[0], 99);
}

/// The kernel keeps the file for a call in progress; a later call finds another file.
#[test]
fn a_call_to_a_channel_that_is_closed_meanwhile_sleeps() {
    let (sender, results) = std::sync::mpsc::channel();
    let _first = Channel::open(0);
    for _ in 0..400 {
        let fd = std::mem::ManuallyDrop::new(Channel::open_another(0)).0;
        let sender = sender.clone();
        // Calls that sleep do so until the process ends.
        std::thread::spawn(move || sender.send(std::mem::ManuallyDrop::new(Channel(fd)).get_event()));
        // Closes the channel without freeing its number: `dup2` replaces it by /dev/null, which is open for reading
        // only.
        // SAFETY: a C string, and descriptors of ours.
        unsafe {
            let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
            assert_eq!(libc::dup2(null, fd), fd);
            libc::close(null);
        }
    }
    std::thread::sleep(std::time::Duration::from_millis(200));
    let others: Vec<_> = results.try_iter().filter(|result| *result != Err(libc::EBADF)).collect();
    assert_eq!(others, []);
}

/// The kernel restarts its calls that wait.
#[test]
fn a_call_goes_on_after_a_signal_whose_handler_has_sa_restart() {
    extern "C" fn ignore(_: c_int) {}
    // SAFETY: a handler that does nothing; `signal` installs it with SA_RESTART.
    unsafe { libc::signal(libc::SIGUSR1, ignore as *const () as libc::sighandler_t) };
    let channel = Channel::open(0);
    let id = channel.create(5);
    std::thread::scope(|scope| {
        let (sender, thread) = std::sync::mpsc::channel();
        let channel = &channel;
        let waiting = scope.spawn(move || {
            // SAFETY: of this thread.
            sender.send(unsafe { libc::pthread_self() }).expect("a receiver");
            channel.get_event()
        });
        let thread = thread.recv().expect("a thread");
        for _ in 0..20 {
            std::thread::sleep(std::time::Duration::from_millis(5));
            // SAFETY: the thread is joined later.
            unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
        }
        assert_eq!(channel.write_event(id, USER, 0, 0), 0);
        let (uid, ..) = waiting.join().expect("no panic").expect("no EINTR");
        assert_eq!(uid, 5);
    });
}

#[test]
fn a_forked_child_has_a_connection_manager_of_its_own() {
    const PORT: u16 = 7204;
    let channel = Channel::open(0);
    let id = channel.create(1);
    assert_eq!((channel.bind(id, PORT), channel.listen(id)), (0, 0));
    // SAFETY: the child calls nothing whose locks the parent's threads may hold, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let right = channel.destroy(id).0 == libc::ENODEV && {
            let own = Channel::open(0);
            let id = own.create(2);
            // The parent holds the port.
            own.bind(id, PORT) == libc::EADDRINUSE && channel.destroy(id).0 == libc::ENODEV
        };
        // SAFETY: ends at once.
        unsafe { libc::_exit(i32::from(!right)) };
    }
    let mut status = -1;
    // SAFETY: a child of this process.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!(channel.destroy(id).0, 0);
}

/// A child's copies of descriptors keep nothing of what its parent has destroyed.
#[test]
fn a_port_is_free_once_its_listener_is_destroyed_although_a_child_lives() {
    const PORT: u16 = 7205;
    let channel = Channel::open(0);
    let id = channel.create(1);
    assert_eq!((channel.bind(id, PORT), channel.listen(id)), (0, 0));
    let mut ends = [0; 2];
    // SAFETY: space for two descriptors.
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    // SAFETY: the child calls async-signal-safe functions only.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: a descriptor of ours and a readable byte. It ends with the test.
        unsafe {
            libc::write(ends[1], [0u8].as_ptr().cast(), 1);
            loop {
                libc::pause();
            }
        }
    }
    // The child has come back from its fork.
    // SAFETY: a descriptor of ours and a writable byte.
    assert_eq!(unsafe { libc::read(ends[0], [0u8].as_mut_ptr().cast(), 1) }, 1);
    assert_eq!(channel.destroy(id).0, 0);
    let again = channel.create(2);
    let bound = (channel.bind(again, PORT), channel.listen(again));
    // SAFETY: a child of this process.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
    assert_eq!(bound, (0, 0));
}

/// The thread that requests connections has the connection manager's lock and takes the device's; so does the fork.
#[test]
fn a_process_forks_while_its_threads_request_connections() {
    const PORT: u16 = 7206;
    const FORKS: usize = 500;
    let channel = Channel::open(0);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let id = channel.create_in(UDP, 5);
                channel.resolve_address(id, 5, &address_v6(PORT));
                assert_eq!(connect(&channel, id, 0x11), 0);
                let (uid, asked, code, _) = channel.event();
                assert_eq!((uid, asked, code), (5, id, UNREACHABLE), "nothing listens there");
                assert_eq!(channel.destroy(id), (0, 3));
            }
        });
        for _ in 0..FORKS {
            // SAFETY: the child ends at once.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: no preconditions.
                unsafe { libc::_exit(0) };
            }
            let mut status = -1;
            // SAFETY: a child of this process.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0);
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

/// Each round gives the NIC up, and opens the connection manager again meanwhile.
#[test]
fn a_connection_manager_that_is_opened_while_its_nic_is_given_up_gets_its_datagrams() {
    const PORT: u16 = 7207;
    const UNSUPPORTED: i32 = 1;
    // The context shares the NIC, which stays open.
    open();
    for _ in 0..200 {
        let channel = Channel::open_another(0);
        let id = channel.create_in(UDP, 6);
        channel.resolve(id, 6, PORT);
        assert_eq!(connect(&channel, id, 0x11), 0);
        let (_, _, code, status) = channel.event();
        assert_eq!((code, status), (UNREACHABLE, UNSUPPORTED), "an answer, and no timeout");
        // Without a connection the thread gives the NIC up.
        assert_eq!(channel.destroy(id), (0, 3));
    }
}

#[test]
fn a_connection_within_one_process_reports_all_events() {
    const PORT: u16 = 7202;
    let (server, client) = (Channel::open(0), Channel::open(0));
    let listener = server.create(7);
    assert_eq!((server.bind(listener, PORT), server.listen(listener)), (0, 0));
    let active = client.create(9);
    client.resolve(active, 9, PORT);
    assert_eq!(connect(&client, active, 0x11), 0);
    let (uid, passive, code, status) = server.event();
    assert_eq!((uid, code, status), (7, CONNECT_REQUEST, 0));
    assert_eq!(accept(&server, 8, &conn_param(0x22), passive), 0);
    assert_eq!(client.event(), (9, active, CONNECT_RESPONSE, 0));
    let mut attr = [0u8; 144];
    let rtr =
        [&(&raw mut attr as u64).to_ne_bytes()[..], &active.to_ne_bytes(), &2u32.to_ne_bytes()].concat();
    assert_eq!(client.command(INIT_QP_ATTR, &rtr, attr.len()), 0);
    assert_eq!(
        u32::from_ne_bytes(*attr[32..].first_chunk().expect("in range")),
        0x22,
        "the peer's queue pair"
    );
    assert_eq!(accept(&client, 0, &[0; 272], active), 0);
    assert_eq!(server.event(), (8, passive, ESTABLISHED, 0));
    assert_eq!(client.command(DISCONNECT, &active.to_ne_bytes(), 0), 0);
    assert_eq!(server.event(), (8, passive, DISCONNECTED, 0));
    assert_eq!(server.destroy(passive), (0, 2));
    assert_eq!(client.event(), (9, active, DISCONNECTED, 0));
    // DESTROY_ID returns the counts of reported events, so that the program can wait until it has acknowledged all of
    // them.
    assert_eq!(client.destroy(active), (0, 4));
    assert_eq!(server.destroy(listener), (0, 1));
    assert!(!server.readable() && !client.readable());
}

#[test]
fn a_request_without_a_listener_is_rejected() {
    let client = Channel::open(0);
    let id = client.create(100);
    client.resolve(id, 100, 7203);
    assert_eq!(connect(&client, id, 1), 0);
    assert_eq!(client.event(), (100, id, REJECTED, 8));
}
