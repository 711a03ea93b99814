//! Programs of work requests: what ODRP, RedN and Hyperloop have their NICs compute, by UDP and within the host.

#[path = "common/chains.rs"]
mod chains;
mod common;

use std::sync::Arc;

use chains::*;
use common::*;
use terrace_nic::wqe_format::opcode;
use terrace_nic::*;

/// Memory for data, behind that of four chains.
const DATA: u64 = 5 * CHAIN_BYTES;
/// Where clients build messages, and get answers.
const MESSAGE: u64 = 0;
const ANSWER: u64 = 4096;

type Pair = (Node, Node);

fn on_each(test: impl Fn(&Node, &Node)) {
    let pairs: [Pair; 2] = [(Node::udp(), Node::udp()), (Node::local(), Node::local())];
    pairs.iter().for_each(|(client, server)| test(client, server));
}

/// A queue pair of the client, and the chain of the server that it is connected to.
fn served(client: &Node, server: &Node) -> (Arc<QueuePair>, Chain) {
    let (qp, chain) = (client.qp(QpType::Rc), Chain::new(server, 0, MANAGED));
    connect(&qp, server, chain.qp.qpn(), &Tuning::default());
    connect(&chain.qp, client, qp.qpn(), &Tuning::default());
    (qp, chain)
}

fn call(client: &Node, qp: &Arc<QueuePair>, message: &[u8]) {
    client.memory.fill(MESSAGE as usize, message);
    qp.post_recv([client.recv(1, ANSWER + 1024, 64)]).expect("posted");
    qp.post_send([Ok(client.wr(2, SendOp::Send, MESSAGE, message.len() as u32))]).expect("posted");
    assert!(client.completions(2).iter().all(|wc| wc.status == WcStatus::Success));
}

/// An answer to the client: a WRITE of 8 bytes, from an address that other entries fill in.
fn answer(client: &Node, server: &Node) -> wqe_format::SendEntry {
    let op = SendOp::Write { va: client.memory.addr() + ANSWER, rkey: client.mr.rkey() };
    request(op, Payload::Sge(server.sge(DATA, 8)))
}

fn done(server: &Node) -> wqe_format::SendEntry {
    request(SendOp::Send, Payload::Sge(server.sge(DATA, 8)))
}

#[test]
fn a_page_is_loaded_by_a_table_of_addresses() {
    // ODRP's load: the message is the address of the table's entry; the entry is the page's address, big-endian.
    on_each(|client, server| {
        let (qp, reply) = served(client, server);
        let (lookup, _other) = Chain::loopback(server, CHAIN_BYTES, MANAGED);
        let (control, _end) = Chain::loopback(server, 2 * CHAIN_BYTES, CONTROL);
        let table = DATA + 1024;
        for page in 0..8u64 {
            let at = DATA + 2048 + (7 - page) * 64;
            server.memory.fill((table + page * 8) as usize, &(server.memory.addr() + at).to_be_bytes());
            server.memory.fill(at as usize, &(page * 1111).to_ne_bytes());
        }
        for (round, page) in (1u32..).zip([3u64, 0, 7, 5, 5]) {
            let (at, index) = (reply.posted(), lookup.posted());
            let end = reply.post([(answer(client, server), SIGNALED), (done(server), SIGNALED)]);
            lookup.post([(read(server, table, reply.place(at, 2) + 8, 8), SIGNALED)]);
            let sges = SgeList::from_slice(&[server.sge(lookup.place(index, 1), 8)]);
            let receives = reply.post_recv([RecvWr { wr_id: 0, sges }]);
            reply.qp.enable_recv(receives).expect("enabled");
            control.post([
                (wait(&reply.recv_cq, round), NONE),
                (enable(&lookup.qp, index + 1), NONE),
                (wait(&lookup.send_cq, round), NONE),
                (enable(&reply.qp, end), NONE),
            ]);
            call(client, &qp, &(server.memory.addr() + table + page * 8).to_be_bytes());
            assert_eq!(client.memory.u64_at(ANSWER as usize), page * 1111, "{page}");
        }
    });
}

/// Has entry `at` of a queue look like a NOP whose index is a key, and returns what a CAS has to know: its first 8 bytes
/// with key 0, and those of the entry before.
fn disguise(server: &Node, chain: &Chain, at: u32) -> (u64, u64) {
    let place = chain.place(at, 0) as usize;
    let mut head: [u8; 8] = server.memory.bytes(place, 8).try_into().expect("8 bytes");
    let real = u64::from_ne_bytes(head);
    (head[1], head[2], head[3]) = (0, 0, opcode::NOP);
    server.memory.fill(place, &head);
    (u64::from_ne_bytes(head), real)
}

/// Elements that put a key of 2 bytes into the value that the CAS at `at` compares with: numbers in entries are
/// big-endian, and what a CAS compares with is the host's.
fn key_of_condition(server: &Node, chain: &Chain, at: u32) -> [Sge; 2] {
    let compare = chain.place(at, 2) + 8;
    [server.sge(compare + 6, 1), server.sge(compare + 5, 1)]
}

/// A record: key, address of its value, address of the next.
fn record(server: &Node, at: u64, key: u16, value: u64, next: u64) {
    let mut bytes = key.to_be_bytes().to_vec();
    bytes.extend((server.memory.addr() + value).to_be_bytes());
    bytes.extend((server.memory.addr() + next).to_be_bytes());
    server.memory.fill(at as usize, &bytes);
}

/// Posts one step of a search: a READ of a record, whose key, value and next go into the answer's index, the answer's data
/// and `next`; then the CAS that makes the answer real if the keys are equal.
fn search_step(server: &Node, search: &Chain, reply: &Chain, answer_at: u32, next: u64) {
    let (nop, real) = disguise(server, reply, answer_at);
    let sges = [
        server.sge(reply.place(answer_at, 0) + 1, 2),
        server.sge(reply.place(answer_at, 2) + 8, 8),
        server.sge(next, 8),
    ];
    let op = SendOp::Read { va: server.memory.addr() + DATA, rkey: server.mr.rkey() };
    search.post([(request(op, Payload::Sges(SgeList::from_slice(&sges))), SIGNALED)]);
    let place = reply.place(answer_at, 0);
    search.post([(compare_swap(server, place, nop, real, DATA + 64), SIGNALED)]);
}

#[test]
fn a_hash_table_is_looked_up_by_one_message() {
    on_each(|client, server| {
        let (qp, reply) = served(client, server);
        let (search, _other) = Chain::loopback(server, CHAIN_BYTES, MANAGED);
        let (control, _end) = Chain::loopback(server, 2 * CHAIN_BYTES, CONTROL);
        let buckets = DATA + 1024;
        let bucket_of = |key: u16| buckets + u64::from(key % 16) * 32;
        for key in [0x0101u16, 0x0102, 0x0203] {
            record(server, bucket_of(key), key, DATA + 2048 + u64::from(key % 16) * 8, DATA);
            server
                .memory
                .fill((DATA + 2048 + u64::from(key % 16) * 8) as usize, &u64::from(key).to_ne_bytes());
        }
        // The third key is in nobody's bucket, the last one's bucket has another key.
        let cases = [(0x0102u16, true), (0x0203, true), (0x0404, false), (0x0301, false), (0x0101, true)];
        for (round, (key, is_there)) in (0u32..).zip(cases) {
            client.memory.fill(ANSWER as usize, &[0; 8]);
            let (at, index) = (reply.posted(), search.posted());
            let end = reply.post([(answer(client, server), SIGNALED), (done(server), SIGNALED)]);
            search_step(server, &search, &reply, at, DATA + 128);
            let cas = search.posted() - 1;
            let [first, second] = key_of_condition(server, &search, cas);
            let sges = SgeList::from_slice(&[server.sge(search.place(index, 1), 8), first, second]);
            let receives = reply.post_recv([RecvWr { wr_id: 0, sges }]);
            reply.qp.enable_recv(receives).expect("enabled");
            control.post([
                (wait(&reply.recv_cq, round + 1), NONE),
                (enable(&search.qp, cas), NONE),
                (wait(&search.send_cq, 2 * round + 1), NONE),
                (enable(&search.qp, cas + 1), NONE),
                (wait(&search.send_cq, 2 * round + 2), NONE),
                (enable(&reply.qp, end), NONE),
            ]);
            let mut message = (server.memory.addr() + bucket_of(key)).to_be_bytes().to_vec();
            message.extend(key.to_be_bytes());
            call(client, &qp, &message);
            let expected = if is_there { u64::from(key) } else { 0 };
            assert_eq!(client.memory.u64_at(ANSWER as usize), expected, "{key:#x}");
        }
    });
}

#[test]
fn a_list_is_traversed_by_one_message() {
    const HOPS: u32 = 6;
    on_each(|client, server| {
        let (qp, reply) = served(client, server);
        let (search, _other) = Chain::loopback(server, CHAIN_BYTES, MANAGED);
        let (control, _end) = Chain::loopback(server, 2 * CHAIN_BYTES, CONTROL);
        let node = |hop: u64| DATA + 1024 + hop * 32;
        for hop in 0..u64::from(HOPS) {
            record(server, node(hop), 0x0100 + hop as u16, DATA + 2048 + hop * 8, node(hop + 1));
            server.memory.fill((DATA + 2048 + hop * 8) as usize, &(hop + 77).to_ne_bytes());
        }
        for (round, wanted) in (0u32..).zip([4u16, 0, 5, 9]) {
            client.memory.fill(ANSWER as usize, &[0; 8]);
            let (at, first) = (reply.posted(), search.posted());
            let answers = (0..HOPS).map(|_| (answer(client, server), SIGNALED));
            let end = reply.post(answers.chain([(done(server), SIGNALED)]));
            let mut sges = SgeList::new();
            let mut steps = Vec::new();
            for hop in 0..HOPS {
                // The READ of each record gets its address from the one before: three SGEs make it two blocks.
                let next = search.place(first + 3 * (hop + 1), 1);
                let next = if hop + 1 < HOPS { next } else { DATA + 128 };
                search_step(server, &search, &reply, at + hop, next);
                let cas = search.posted() - 1;
                assert_eq!(cas, first + 3 * hop + 2);
                steps.push(cas);
            }
            // The key goes to all conditions: 12 elements, and the address of the list's head is the first.
            sges.push(server.sge(search.place(first, 1), 8));
            steps.iter().for_each(|cas| sges.extend(key_of_condition(server, &search, *cas)));
            let receives = reply.post_recv([RecvWr { wr_id: 0, sges }]);
            reply.qp.enable_recv(receives).expect("enabled");
            control.post([(wait(&reply.recv_cq, round + 1), NONE)]);
            for (hop, cas) in (0u32..).zip(&steps) {
                let done = 2 * (round * HOPS + hop);
                control.post([
                    (enable(&search.qp, *cas), NONE),
                    (wait(&search.send_cq, done + 1), NONE),
                    (enable(&search.qp, cas + 1), NONE),
                    (wait(&search.send_cq, done + 2), NONE),
                ]);
            }
            control.post([(enable(&reply.qp, end), NONE)]);
            let mut message = (server.memory.addr() + node(0)).to_be_bytes().to_vec();
            (0..HOPS).for_each(|_| message.extend((0x0100 + wanted).to_be_bytes()));
            call(client, &qp, &message);
            let expected = if u32::from(wanted) < HOPS { u64::from(wanted) + 77 } else { 0 };
            assert_eq!(client.memory.u64_at(ANSWER as usize), expected, "{wanted}");
        }
    });
}

#[test]
fn a_log_is_replicated_along_a_chain_of_nodes() {
    // Hyperloop: the client writes to the first replica; each replica's NIC writes to the next, and the last answers.
    for nodes in [[0; 4].map(|_| Node::udp()), [0; 4].map(|_| Node::local())] {
        let [client, replicas @ ..] = &nodes;
        let log = DATA + 8192;
        let staging = DATA;
        let to_first = client.qp(QpType::Rc);
        let from_last = client.qp(QpType::Rc);
        // Every replica has a receive queue towards the node before it and a send queue towards the next.
        let receive: Vec<Chain> = replicas.iter().map(|replica| Chain::new(replica, 0, MANAGED)).collect();
        let forward: Vec<Chain> =
            replicas.iter().map(|replica| Chain::new(replica, CHAIN_BYTES, MANAGED)).collect();
        let control: Vec<(Chain, Arc<QueuePair>)> =
            replicas.iter().map(|replica| Chain::loopback(replica, 2 * CHAIN_BYTES, CONTROL)).collect();
        let link = |a: &Node, qa: &Arc<QueuePair>, b: &Node, qb: &Arc<QueuePair>| {
            connect(qa, b, qb.qpn(), &Tuning::default());
            connect(qb, a, qa.qpn(), &Tuning::default());
        };
        link(client, &to_first, &replicas[0], &receive[0].qp);
        for hop in 1..replicas.len() {
            link(&replicas[hop - 1], &forward[hop - 1].qp, &replicas[hop], &receive[hop].qp);
        }
        link(&replicas[replicas.len() - 1], &forward[replicas.len() - 1].qp, client, &from_last);
        for append in 0..5u32 {
            let offset = u64::from(append) * 512;
            let data = pattern(512, append as u8);
            // A message has for each replica where the record is there, and where it goes: big-endian addresses.
            let mut message = Vec::new();
            for (hop, replica) in replicas.iter().enumerate() {
                let (at, is_last) = (forward[hop].posted(), hop + 1 == replicas.len());
                let left = 16 * (replicas.len() - 1 - hop) as u32;
                message.extend((replica.memory.addr() + log + offset).to_be_bytes());
                let next = if is_last { client } else { &replicas[hop + 1] };
                message.extend((next.memory.addr() + log + offset).to_be_bytes());
                let entries = if is_last {
                    [(nop(), NONE), (request(SendOp::Send, Payload::Sge(replica.sge(staging, 8))), SIGNALED)]
                } else {
                    let op = SendOp::Write { va: next.memory.addr(), rkey: next.mr.rkey() };
                    let write = request(op, Payload::Sge(replica.sge(log, 512)));
                    let send = request(SendOp::Send, Payload::Sge(replica.sge(staging, left)));
                    [(write, NONE), (send, SIGNALED)]
                };
                let end = forward[hop].post(entries);
                let fields = [
                    replica.sge(forward[hop].place(at, 2) + 8, 8),
                    replica.sge(forward[hop].place(at, 1), 8),
                    replica.sge(staging, left),
                ];
                let receives =
                    receive[hop].post_recv([RecvWr { wr_id: 0, sges: SgeList::from_slice(&fields) }]);
                receive[hop].qp.enable_recv(receives).expect("enabled");
                let (control, _) = &control[hop];
                control.post([
                    (wait(&receive[hop].recv_cq, append + 1), NONE),
                    (enable(&forward[hop].qp, end), NONE),
                ]);
            }
            client.memory.fill(log as usize, &data);
            client.memory.fill(MESSAGE as usize, &message);
            from_last.post_recv([client.recv(9, ANSWER, 64)]).expect("posted");
            let first = &replicas[0];
            let op = SendOp::Write { va: first.memory.addr() + log + offset, rkey: first.mr.rkey() };
            to_first
                .post_send([
                    Ok(client.wr(1, op, log, 512)),
                    Ok(client.wr(2, SendOp::Send, MESSAGE, message.len() as u32)),
                ])
                .expect("posted");
            assert!(client.completions(3).iter().all(|wc| wc.status == WcStatus::Success));
            for replica in replicas {
                assert_eq!(replica.memory.bytes((log + offset) as usize, 512), data, "{append}");
            }
        }
    }
}
