//! The cost that a port adds to plain UDP, for each step, as medians. One thread sends and receives alternately, so
//! that the numbers need no second processor and are valid on a busy machine.

use std::hint::black_box;
use std::net::{SocketAddr, UdpSocket};
use std::time::Instant;

use nix::sys::socket::{ControlMessage, MsgFlags, SockaddrIn, recvmsg, sendmsg, setsockopt, sockopt};
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::AsRawFd;
use terrace_fabric::udp::{UdpConfig, UdpPort};
use terrace_fabric::{Port, RxBatch, TxBatch};
use terrace_wire::Path;
use terrace_wire::icrc::{self, Flow};

const SAMPLES: usize = 20_000;

fn median_ns(mut step: impl FnMut()) -> f64 {
    let mut samples: Vec<u64> = (0..SAMPLES)
        .map(|_| {
            let start = Instant::now();
            step();
            start.elapsed().as_nanos() as u64
        })
        .collect();
    samples.sort_unstable();
    samples[SAMPLES / 2] as f64
}

fn open(addr: &str) -> UdpPort {
    UdpPort::open(&UdpConfig { addr: addr.parse().ok(), ..UdpConfig::default() }).expect("a port")
}

fn bare_one(len: usize) -> f64 {
    let sockets = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").expect("a socket"));
    let to = sockets[1].local_addr().expect("bound");
    let (data, mut buffer) = (vec![1; len], vec![0; 65_536]);
    median_ns(|| {
        sockets[0].send_to(&data, to).expect("sent");
        black_box(sockets[1].recv_from(&mut buffer).expect("received"));
    })
}

fn port_run(len: usize, count: usize) -> f64 {
    let [sender, receiver] = ["127.85.0.1", "127.85.0.2"].map(open);
    let remote = SocketAddr::new(receiver.gids()[0].addr, receiver.udp_port());
    let path = Path { remote, source_gid_index: 0, traffic_class: 0, hop_limit: 0, flow_label: 0 };
    let (mut tx, mut rx) = (TxBatch::new(1 << 20), RxBatch::new());
    let data = vec![1; len];
    median_ns(|| {
        for _ in 0..count {
            tx.push(&path, len).expect("space").copy_from_slice(&data);
        }
        sender.transmit(&mut tx);
        let mut packets = 0;
        while packets < count {
            receiver.receive(&mut rx);
            while let Some(packet) = rx.next() {
                black_box(packet.bytes);
                packets += 1;
            }
        }
    })
}

fn bare_run(len: usize, count: usize) -> f64 {
    let sockets = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").expect("a socket"));
    setsockopt(&sockets[1], sockopt::UdpGroSegment, &true).expect("GRO");
    setsockopt(&sockets[1], sockopt::RcvBufForce, &(16 << 20)).expect("buffer");
    let SocketAddr::V4(to) = sockets[1].local_addr().expect("bound") else { return 0.0 };
    let (to, segment) = (SockaddrIn::from(to), len as u16);
    let (data, mut buffer) = (vec![1; len * count], vec![0; 65_536]);
    let mut control = nix::cmsg_space!(i32);
    median_ns(|| {
        let fd = sockets[0].as_raw_fd();
        let segments = [ControlMessage::UdpGsoSegments(&segment)];
        sendmsg(fd, &[IoSlice::new(&data)], &segments, MsgFlags::empty(), Some(&to)).expect("sent");
        let mut buffers = [IoSliceMut::new(&mut buffer)];
        let fd = sockets[1].as_raw_fd();
        recvmsg::<SockaddrIn>(fd, &mut buffers, Some(&mut control), MsgFlags::empty()).expect("received");
    })
}

fn empty_receive() -> f64 {
    let port = open("127.85.0.3");
    let mut rx = RxBatch::new();
    median_ns(|| {
        black_box(port.receive(&mut rx));
    })
}

fn bare_empty_receive() -> f64 {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    socket.set_nonblocking(true).expect("non-blocking");
    let mut buffer = vec![0; 65_536];
    median_ns(|| {
        let _ = black_box(socket.recv_from(&mut buffer));
    })
}

fn icrc_ns(len: usize) -> f64 {
    let flow = Flow {
        source: "127.0.0.1:4791".parse().expect("an address"),
        destination: "127.0.0.1:4792".parse().expect("an address"),
    };
    let mut data = vec![1; len + 4];
    median_ns(|| icrc::seal(black_box(&flow), &mut data, 0))
}

fn main() {
    println!("all in ns, median of {SAMPLES}");
    println!("empty receive: bare {:.0}, port {:.0}", bare_empty_receive(), empty_receive());
    for len in [28, 4112] {
        println!(
            "one datagram of {len} B there: bare {:.0}, port {:.0}, one ICRC {:.0}",
            bare_one(len),
            port_run(len, 1),
            icrc_ns(len)
        );
    }
    for (len, count) in [(28, 64), (4108, 15)] {
        let (bare, port) = (bare_run(len + 4, count), port_run(len, count));
        println!("a run of {count} of {len} B there: bare {bare:.0}, port {port:.0}");
    }
}
