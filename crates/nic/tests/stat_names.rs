//! What any user can do to `terrace stat`: the names of abstract sockets belong to nobody.

use std::io::{ErrorKind, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use terrace_nic::stat;

fn listen(name: &[u8]) -> UnixListener {
    let address = SocketAddr::from_abstract_name(name).expect("a name");
    UnixListener::bind_addr(&address).expect("nobody has it")
}

#[test]
fn names_of_any_bytes_and_answers_without_end() {
    // No process has such a number.
    let pid = 3_000_000_000 + std::process::id();
    let other = listen(&[b"\xff\n\xfe ".as_slice(), &pid.to_le_bytes()].concat());
    let endless = listen(format!("terrace/{pid}").as_bytes());
    assert!(stat::processes().expect("a list").contains(&pid));
    let sender = std::thread::spawn(move || {
        let (mut stream, _) = endless.accept().expect("a connection");
        let bytes = vec![b'['; 1 << 20];
        while stream.write_all(&bytes).is_ok() {}
        endless
    });
    let refused = stat::fetch(pid).expect_err("no device");
    assert_eq!(
        (refused.kind(), refused.to_string().as_str()),
        (ErrorKind::InvalidData, "its answer does not end")
    );
    drop((sender.join().expect("the client has gone"), other));
}

#[test]
fn processes_are_asked_at_a_time() {
    let pids = [1, 2].map(|number| 3_500_000_000 + 2 * std::process::id() + number);
    let sockets = pids.map(|pid| listen(format!("terrace/{pid}").as_bytes()));
    // Neither answers before the other one is asked.
    let answers = std::thread::spawn(move || {
        let connections = sockets.each_ref().map(|socket| socket.accept().expect("a connection").0);
        for (mut connection, pid) in connections.into_iter().zip(pids) {
            let snapshot = stat::DeviceSnapshot { pid, ..stat::DeviceSnapshot::default() };
            connection.write_all(&serde_json::to_vec(&snapshot).expect("JSON")).expect("written");
        }
    });
    let [(first, one), (second, other)] = stat::fetch_all(&pids).try_into().expect("two answers");
    assert_eq!([first, second], pids);
    assert_eq!([one, other].map(|answer| answer.expect("in time")[0].pid), pids);
    answers.join().expect("both were asked");
}
