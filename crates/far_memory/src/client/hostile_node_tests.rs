//! Hostile nodes: whatever one answers, operations end. The node here has scheme two-sided, and makes its replies up.

use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread::JoinHandle;
use std::time::Instant;

use terrace_nic::{
    Buffer, CqInit, Device, PathChoice, Payload, PortConfig, QpCap, RecvWr, SendFlags, SendOp, SendWr,
    SgeList, WcOpcode, rc,
};

use super::*;
use crate::messages::{MESSAGE_BYTES, Message, Operation, Outcome, REPLY_BYTES, Reply, SlabKey};
use crate::protocol::{Answer, ChainEnd, Connect, Connected, Grant, REQUEST_BYTES_MAX};
use crate::tcp;
use crate::{PageError, Scheme};

const DEPTH: u32 = 8;
/// Bytes for each message or reply: its header, and a page.
const SLOT_BYTES: usize = 2 * PAGE_BYTES;
const PATIENCE: Duration = Duration::from_secs(20);

/// A reply, and how many bytes of it are sent.
type Forge = fn(&Message, Reply) -> (Reply, usize);

fn request_of(stream: &mut TcpStream) -> crate::protocol::Request {
    tcp::configure(stream).expect("a socket");
    let (started, mut bytes) = (Instant::now(), Vec::new());
    loop {
        if let Some(line) = tcp::read_line(stream, &mut bytes, REQUEST_BYTES_MAX).expect("a request") {
            return serde_json::from_slice(&line).expect("a request");
        }
        assert!(started.elapsed() < PATIENCE, "no request");
        std::thread::yield_now();
    }
}

fn answer(stream: &mut TcpStream, answer: &Answer) {
    let mut bytes = serde_json::to_vec(answer).expect("an answer");
    bytes.push(b'\n');
    stream.write_all(&bytes).expect("sent");
}

/// Starts a node that serves one client until the client closes the connection.
fn node(forge: Forge) -> (SocketAddr, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = listener.local_addr().expect("an address");
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a connection");
        request_of(&mut stream);
        answer(&mut stream, &Answer::Scheme(Scheme::TwoSided));
        let (mut stream, _) = listener.accept().expect("a connection");
        let crate::protocol::Request::Connect(connect) = request_of(&mut stream) else {
            panic!("a client connects")
        };
        let port = PortConfig { address: Some(address.ip()), path: PathChoice::Udp, ..PortConfig::default() };
        let device = Device::open(port.device().expect("a port")).expect("a device");
        serve(&device, &connect, &mut stream, forge);
        device.close();
    });
    (address, thread)
}

fn serve(device: &Arc<Device>, connect: &Connect, stream: &mut TcpStream, forge: Forge) {
    let pd = device.alloc_pd().expect("a protection domain");
    let cq = device.create_cq(CqInit { depth: 64, channel: None, cookie: 0 }).expect("a completion queue");
    let slots = Buffer::new(&pd, 2 * DEPTH as usize * SLOT_BYTES, 1).expect("a buffer");
    let cap =
        QpCap { max_send_wr: 32, max_recv_wr: DEPTH, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
    let (qp, own) = rc::new_pair(&pd, &cq, cap).expect("a queue pair");
    rc::initialize(&qp, 0).expect("a queue pair");
    for slot in 0..DEPTH as usize {
        let sges = SgeList::from_slice(&[slots.sge(slot * SLOT_BYTES, SLOT_BYTES as u32)]);
        qp.post_recv([Ok(RecvWr { wr_id: slot as u64, sges })]).map_err(|(_, error)| error).expect("posted");
    }
    let end = connect.ends[0];
    let path = rc::path_to(device, connect.address, end.qpn).expect("a path").expect("of the family");
    rc::connect(&qp, own, path, end.endpoint(connect.mtu_bytes), rc::TIMEOUT, rc::RNR_RETRIES)
        .expect("connected");
    let connected = Connected {
        address: device.gids()[0].addr,
        mtu_bytes: own.mtu_bytes,
        ends: vec![ChainEnd::of(own)],
        budget_pages: 64,
        grant: Grant::Messages,
    };
    answer(stream, &Answer::Connected(Box::new(connected)));
    let mut line = Vec::new();
    // The client closes the connection when it gives the node up.
    while matches!(tcp::read_line(stream, &mut line, REQUEST_BYTES_MAX), Ok(None)) {
        let mut received = Vec::new();
        cq.poll(64, &mut |wc| received.push(*wc)).expect("polled");
        for wc in received.iter().filter(|wc| wc.opcode == WcOpcode::Recv) {
            let (slot, mut header) = (wc.wr_id as usize, [0; MESSAGE_BYTES]);
            slots.read(slot * SLOT_BYTES, &mut header).expect("within the buffer");
            let message = Message::parse(&header).expect("a message");
            let reply = Reply { number: message.number, outcome: Outcome::Done, key: SlabKey::default() };
            let (reply, length) = forge(&message, reply);
            let at = (DEPTH as usize + slot) * SLOT_BYTES;
            slots.write(at, &reply.emit()).expect("within the buffer");
            let payload = Payload::Sge(slots.sge(at, length as u32));
            let flags = SendFlags::SIGNALED;
            let _ = qp.post_send([Ok(SendWr { wr_id: 0, op: SendOp::Send, payload, flags, target: None })]);
        }
        std::thread::yield_now();
    }
}

/// The end of a store, and of a load of the same page, with a node that forges replies.
fn store_and_load(forge: Forge) -> [Result<(), PageError>; 2] {
    let (address, thread) = node(forge);
    let config = ClientConfig::new(vec![address], 64);
    let port = PortConfig { path: PathChoice::Udp, ..config.port.clone() };
    let client = Client::connect(&ClientConfig { port, depth: DEPTH, ..config }).expect("a client");
    let (sender, ends) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let stored = client.store(3, &[7; PAGE_BYTES]);
        let loaded = client.load(3, &mut [0; PAGE_BYTES]);
        drop(client);
        sender.send([stored, loaded])
    });
    let ends = ends.recv_timeout(PATIENCE).expect("the operations end");
    thread.join().expect("no panic");
    ends
}

fn full_bytes(message: &Message) -> usize {
    REPLY_BYTES + if message.operation == Operation::Load { PAGE_BYTES } else { 0 }
}

#[test]
fn operations_end_when_a_node_answers_something_else() {
    // The scene as such is none of a failure.
    let honest: Forge = |message, reply| (reply, full_bytes(message));
    assert_eq!(store_and_load(honest), [Ok(()), Ok(())]);
    let wrong_stores: [Forge; 3] = [
        |message, reply| (Reply { number: reply.number.wrapping_add(1), ..reply }, full_bytes(message)),
        |message, reply| (reply, full_bytes(message) - 1),
        |_, reply| (reply, 0),
    ];
    for forge in wrong_stores {
        assert_eq!(store_and_load(forge)[0], Err(PageError::NodeLost(3)));
    }
    let wrong_loads: [Forge; 2] = [
        // A page that is none: the header alone.
        |_, reply| (reply, REPLY_BYTES),
        |message, reply| {
            let is_load = message.operation == Operation::Load;
            let outcome = if is_load { Outcome::PoolEmpty } else { Outcome::Done };
            (Reply { outcome, ..reply }, full_bytes(message))
        },
    ];
    for forge in wrong_loads {
        assert_eq!(store_and_load(forge), [Ok(()), Err(PageError::NodeLost(3))]);
    }
}
