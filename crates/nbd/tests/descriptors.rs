//! A server whose process has no descriptor left. The limit is the process's, so this is a process of its own.

mod common;
#[path = "common/served.rs"]
mod served;

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use served::{Served, greet, reply, request};

/// Before, each turn of the server's thread took 10 ms while a client could not be accepted: these took longer than the limit.
const REQUESTS: u64 = 10_000;
const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn a_client_that_cannot_be_accepted_delays_no_other_and_is_accepted_later() {
    let served = Served::new(1 << 20);
    let mut first = served.negotiate();
    // One descriptor is left, which the second client takes.
    let left = File::open("/dev/null").expect("a file").as_raw_fd() as u64;
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(left + 1), ..before }).expect("lower");
    let mut second = served.connect();
    let begin = Instant::now();
    for cookie in 0..REQUESTS {
        first.write_all(&request(3, cookie, 0, 0)).expect("a request");
        assert_eq!(reply(&mut first), (0, cookie));
        assert!(begin.elapsed() < LIMIT, "{cookie} requests in {:?}", begin.elapsed());
    }
    setrlimit(Resource::Nofile, before).expect("as before");
    greet(&mut second);
    second.write_all(&request(3, 1, 0, 0)).expect("a request");
    assert_eq!(reply(&mut second), (0, 1));
}
