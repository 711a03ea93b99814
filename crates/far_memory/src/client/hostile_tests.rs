//! Hostile clients (section 4.5.2 of the ODRP paper): what they ask for is refused, and others do not notice. Each test runs
//! with chains that use the node's memory without packets, and with packets.

use std::time::{Duration, Instant};

use terrace_nic::{PathChoice, Payload, PortConfig, SendFlags, SendOp, SendWr};

use super::chain::ChainClient;
use super::transport::Call;
use super::*;
use crate::protocol::{Args, Function, Rounds};
use crate::{MemoryNode, NodeConfig, Scheme};

const POOL_PAGES: u64 = 64;
/// Pages of the client that is not to notice.
const VICTIM_PAGES: u64 = 8;
const PATIENCE: Duration = Duration::from_secs(20);

struct Scene {
    node: MemoryNode,
    victim: Client,
    attacker: Client,
    page: Arc<PageBuffer>,
    path: PathChoice,
}

fn content(page: u64) -> Page {
    std::array::from_fn(|at| (page as usize * 31 + at * 7) as u8 | 1)
}

fn client_of(node: &MemoryNode, path: PathChoice) -> Client {
    let config = ClientConfig::new(vec![node.listens_at()], 128);
    let port = PortConfig { path, ..config.port.clone() };
    Client::connect(&ClientConfig { port, depth: 8, ..config }).expect("a client")
}

impl Scene {
    fn new(path: PathChoice) -> Scene {
        let mut config =
            NodeConfig::new(POOL_PAGES * PAGE_BYTES as u64, "127.0.0.1:0".parse().expect("an address"));
        config.port.path = path;
        config.budget_pages = Some(16);
        let node = MemoryNode::open(&config).expect("a memory node");
        let (victim, attacker) = (client_of(&node, path), client_of(&node, path));
        for number in 0..VICTIM_PAGES {
            victim.store(number, &content(number)).expect("stored");
        }
        attacker.store(0, &[0xaa; PAGE_BYTES]).expect("stored");
        attacker.store(1, &[0xab; PAGE_BYTES]).expect("stored");
        let page = attacker.buffer(1).expect("a buffer");
        Scene { node, victim, attacker, page, path }
    }

    /// Sends a message with arguments that `forge` changes.
    fn forge(&self, function: Function, index: u64, forge: impl FnOnce(&mut Args, Rounds)) {
        self.forge_bytes(function, index, |args| {
            let mut args = args;
            forge(&mut args, Rounds { function, depth: 8 });
            args.emit()[..function.args_bytes()].to_vec()
        });
    }

    fn forge_bytes(&self, function: Function, index: u64, forge: impl FnOnce(Args) -> Vec<u8>) {
        let mut operations = self.attacker.operations.lock();
        let chain = operations.links[0].transport.chain(function).expect("a chain");
        let call = Call { operation: 0, index, page: self.page.sge(0) };
        let bytes = forge(chain.args(&call));
        chain.send(call, &bytes, Instant::now()).expect("within the buffer");
        // It sends as much as its send queue takes.
        let _ = chain.post();
    }

    /// READs or WRITEs a page one-sidedly, at the address and with the key that `target` chooses.
    fn access(&self, function: Function, is_read: bool, target: impl FnOnce(&ChainClient) -> (u64, u32)) {
        let mut operations = self.attacker.operations.lock();
        let chain = operations.links[0].transport.chain(function).expect("a chain");
        let (va, rkey) = target(chain);
        let op = if is_read { SendOp::Read { va, rkey } } else { SendOp::Write { va, rkey } };
        let payload = Payload::Sge(self.page.sge(0).expect("a page"));
        let wr = SendWr { wr_id: 1, op, payload, flags: SendFlags::SIGNALED, target: None };
        chain.qp().post_send([Ok(wr)]).expect("posted");
        drop(operations);
        // Something in flight, so that the client looks for an answer.
        self.forge(Function::Load, 0, |_, _| ());
    }

    /// Waits until the node has disconnected the attacker.
    fn is_expelled(&self) {
        wait_until("the attacker is disconnected", || {
            let mut operations = self.attacker.operations.lock();
            let now = Instant::now();
            operations.failure(0, now + Duration::from_millis(10)).is_some()
        });
    }

    /// The victim has its pages, the node serves, and no page is lost.
    fn others_do_not_notice(self) {
        let mut page = [0; PAGE_BYTES];
        for number in 0..VICTIM_PAGES {
            self.victim.load(number, &mut page).expect("loaded");
            assert!(page == content(number), "{number}");
        }
        let free = POOL_PAGES - VICTIM_PAGES;
        drop(self.attacker);
        wait_until("its pages are free", || self.node.status().free_pages == free);
        let next = client_of(&self.node, self.path);
        for number in 0..16 {
            next.store(number, &content(number + 100)).expect("stored");
            next.load(number, &mut page).expect("loaded");
            assert!(page == content(number + 100), "{number}");
        }
        for number in 0..VICTIM_PAGES {
            self.victim.load(number, &mut page).expect("loaded");
            assert!(page == content(number), "{number}");
        }
    }
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < PATIENCE, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Runs an attack that the node answers by disconnecting the attacker.
fn expelled_after(attack: impl Fn(&Scene)) {
    for path in [PathChoice::Local, PathChoice::Udp] {
        let scene = Scene::new(path);
        attack(&scene);
        scene.is_expelled();
        scene.others_do_not_notice();
    }
}

#[test]
fn misaligned_entries_are_refused() {
    for function in Function::ALL {
        for offset in [1, 4, 7] {
            expelled_after(|scene| scene.forge(function, 0, |args, _| args.entry += offset));
        }
    }
}

#[test]
fn entries_out_of_range_are_refused() {
    for function in Function::ALL {
        for index in [128, u64::MAX / 16, u64::MAX >> 3] {
            expelled_after(|scene| scene.forge(function, index, |_, _| ()));
        }
    }
}

#[test]
fn unmapped_entries_are_refused_where_mapped_ones_are_expected() {
    for function in [Function::Load, Function::MappedStore, Function::Invalidate] {
        expelled_after(|scene| scene.forge(function, 77, |_, _| ()));
    }
}

#[test]
fn a_page_is_returned_once_only() {
    expelled_after(|scene| {
        scene.forge(Function::Invalidate, 0, |_, _| ());
        scene.forge(Function::Invalidate, 0, |_, _| ());
    });
}

#[test]
fn one_sided_requests_are_refused() {
    for function in Function::ALL {
        for is_read in [true, false] {
            expelled_after(|scene| {
                scene.access(function, is_read, |_| (1 << 58, 1));
            });
        }
    }
}

/// A client may WRITE the pages of its rounds, and nothing else.
#[test]
fn pages_of_rounds_are_written_only() {
    for function in [Function::MappedStore, Function::UnmappedStore] {
        for (is_read, offset) in [(true, 0), (false, 8 * PAGE_BYTES as u64 - 1), (false, u64::MAX)] {
            expelled_after(|scene| {
                scene.access(function, is_read, |chain| {
                    (chain.pages().addr.wrapping_add(offset), chain.pages().rkey)
                });
            });
        }
    }
}

/// Keys are secret, and a client could guess them: it has keys of its own, and connects as often as it likes.
#[test]
fn a_client_that_knows_the_keys_of_the_pool_writes_nothing_there() {
    for function in [Function::MappedStore, Function::UnmappedStore] {
        for key in 0..3 {
            expelled_after(|scene| {
                let keys = scene.node.service().pool_keys();
                scene.access(function, false, |_| keys[key]);
            });
        }
    }
}

#[test]
fn pages_beyond_the_budget_are_taken_back() {
    expelled_after(|scene| {
        for index in 2..40 {
            scene.forge(Function::UnmappedStore, index, |_, _| ());
            std::thread::sleep(Duration::from_micros(300));
        }
    });
}

#[test]
fn pages_that_a_client_stores_over_are_not_lost() {
    for path in [PathChoice::Local, PathChoice::Udp] {
        let scene = Scene::new(path);
        for _ in 0..40 {
            // Entry 0 has a page, which this leaves behind.
            scene.forge(Function::UnmappedStore, 0, |_, _| ());
            std::thread::sleep(Duration::from_micros(300));
        }
        let in_use = VICTIM_PAGES + 2;
        wait_until("lost pages are found", || scene.node.status().free_pages >= POOL_PAGES - in_use - 16);
        scene.others_do_not_notice();
    }
}

#[test]
fn forged_indexes_concern_the_forger_alone() {
    type Forge = fn(&mut Args);
    let forges: [Forge; 6] = [
        |args| args.wait = args.wait.wrapping_sub(5),
        |args| args.enable = args.enable.wrapping_add(0x7000),
        |args| args.reply = args.reply.wrapping_add(0x7fff),
        |args| args.doorbell = args.doorbell.wrapping_add(0x7fff),
        |args| (args.wait, args.enable, args.reply) = (0, 0x7fff, 0x7fff),
        |args| (args.reply_addr, args.reply_rkey) = (0x1000, 7),
    ];
    for path in [PathChoice::Local, PathChoice::Udp] {
        for function in Function::ALL {
            for forge in forges {
                let scene = Scene::new(path);
                for index in 0..4 {
                    scene.forge(function, index, |args, _| forge(args));
                }
                std::thread::sleep(Duration::from_millis(20));
                scene.others_do_not_notice();
            }
        }
    }
}

/// Such a chain would never come to rest, and the node frees no page of clients that have gone while one moves.
#[test]
fn a_client_that_enables_a_part_of_a_round_is_disconnected() {
    for function in [Function::Load, Function::MappedStore, Function::UnmappedStore] {
        expelled_after(|scene| {
            let mut end = None;
            // The last message starts the round of which the first one has enabled all but the last block.
            for message in 0..9 {
                let index = if function == Function::UnmappedStore { 2 + message } else { message % 2 };
                scene.forge(function, index, |args, _| args.enable = *end.get_or_insert(args.enable - 1));
            }
        });
    }
}

#[test]
fn a_freed_page_is_not_read_by_forged_replies() {
    // The attacker loads pages, frees them, and has old replies sent again while the victim has got its pages.
    for path in [PathChoice::Local, PathChoice::Udp] {
        let scene = Scene::new(path);
        let mut page = [0; PAGE_BYTES];
        scene.attacker.load(0, &mut page).expect("loaded");
        scene.attacker.invalidate(0).expect("invalidated");
        for number in VICTIM_PAGES..16 {
            scene.victim.store(number, &content(number)).expect("stored");
        }
        for _ in 0..4 {
            scene.forge(Function::Load, 1, |args, _| args.reply = args.reply.wrapping_add(0x7fff));
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(20));
        scene.page.read(0, &mut page).expect("within the buffer");
        let owners = [0, 0xaa, 0xab];
        assert!(page.iter().all(|byte| owners.contains(byte)), "somebody else's bytes");
        for number in VICTIM_PAGES..16 {
            scene.victim.invalidate(number).expect("invalidated");
        }
        scene.others_do_not_notice();
    }
}

#[test]
fn a_short_store_leaves_no_bytes_of_others_in_the_page() {
    for path in [PathChoice::Local, PathChoice::Udp] {
        let scene = Scene::new(path);
        // Fills all pages of the pool with bytes of others, and frees them.
        for number in VICTIM_PAGES..16 {
            scene.victim.store(number, &content(number)).expect("stored");
        }
        for number in VICTIM_PAGES..16 {
            scene.victim.invalidate(number).expect("invalidated");
        }
        let rounds = POOL_PAGES;
        for index in 0..rounds {
            // Arguments without a page, to an entry that is not stored.
            let mut operations = scene.attacker.operations.lock();
            let link = &mut operations.links[0];
            let chain = link.transport.chain(Function::UnmappedStore).expect("a chain");
            let call = Call { operation: 0, index: 2 + index % 4, page: None };
            let args = chain.args(&call).emit();
            chain.send(call, &args, Instant::now()).expect("within the buffer");
            // It sends as much as its send queue takes.
            let _ = chain.post();
            drop(operations);
            std::thread::sleep(Duration::from_micros(300));
            scene.forge(Function::Load, 2 + index % 4, |_, _| ());
            std::thread::sleep(Duration::from_micros(300));
            let mut page = [0; PAGE_BYTES];
            scene.page.read(0, &mut page).expect("within the buffer");
            assert!(page.iter().all(|byte| [0, 0xaa, 0xab].contains(byte)), "somebody else's bytes");
        }
        scene.others_do_not_notice();
    }
}

#[test]
fn messages_without_arguments_disturb_nobody() {
    for path in [PathChoice::Local, PathChoice::Udp] {
        for function in Function::ALL {
            let scene = Scene::new(path);
            scene.forge_bytes(function, 0, |_| vec![1]);
            scene.forge_bytes(function, 0, |args| args.emit()[..20].to_vec());
            std::thread::sleep(Duration::from_millis(5));
            scene.others_do_not_notice();
        }
    }
}

/// What the nodes of baselines refuse: the attacker's calls are none that its client would make.
#[test]
fn a_client_of_a_baseline_that_breaks_the_rules_is_disconnected() {
    let attacks = [
        (Scheme::TwoSided, Function::Load, 1),
        (Scheme::TwoSided, Function::Invalidate, 1),
        (Scheme::TwoSided, Function::UnmappedStore, 128),
        (Scheme::Dynamic1M, Function::UnmappedStore, 256),
        (Scheme::Dynamic4K, Function::UnmappedStore, 128),
        // Beyond the memory that was reserved for it.
        (Scheme::Static, Function::Load, 128),
        (Scheme::Static, Function::MappedStore, u64::MAX / PAGE_BYTES as u64),
    ];
    for (scheme, function, index) in attacks {
        let mut config = NodeConfig::new(4 << 20, "127.0.0.1:0".parse().expect("an address"));
        (config.scheme, config.port.path) = (scheme, PathChoice::Udp);
        let node = MemoryNode::open(&config).expect("a memory node");
        let (victim, attacker) = (client_of(&node, PathChoice::Udp), client_of(&node, PathChoice::Udp));
        victim.store(0, &content(1)).expect("stored");
        let buffer = attacker.buffer(1).expect("a buffer");
        {
            let mut operations = attacker.operations.lock();
            let call = Call { operation: 0, index, page: buffer.sge(0) };
            let transport = &mut operations.links[0].transport;
            transport.begin(function, call, Instant::now()).expect("begun");
            transport.post().expect("posted");
        }
        wait_until("the attacker is disconnected", || node.status().clients.len() == 1);
        let mut page = [0; PAGE_BYTES];
        victim.load(0, &mut page).expect("loaded");
        assert!(page == content(1), "{scheme}");
    }
}

#[test]
fn a_client_reads_zeros_where_another_one_has_stored() {
    for scheme in [Scheme::Static, Scheme::Dynamic1M] {
        let mut config = NodeConfig::new(1 << 20, "127.0.0.1:0".parse().expect("an address"));
        (config.scheme, config.port.path) = (scheme, PathChoice::Local);
        let node = MemoryNode::open(&config).expect("a memory node");
        let first = client_of(&node, PathChoice::Local);
        (0..128).for_each(|page| first.store(page, &content(page)).expect("stored"));
        drop(first);
        wait_until("its memory is free", || node.status().free_pages == 256);
        let second = client_of(&node, PathChoice::Local);
        second.store(0, &content(0)).expect("stored");
        let buffer = second.buffer(1).expect("a buffer");
        buffer.write(0, &content(1)).expect("within the buffer");
        let mut operations = second.operations.lock();
        let transport = &mut operations.links[0].transport;
        let call = Call { operation: 0, index: 5, page: buffer.sge(0) };
        transport.begin(Function::Load, call, Instant::now()).expect("begun");
        transport.post().expect("posted");
        wait_until("the page is here", || second.cq.poll(1, &mut |_| ()).expect("polled") == 1);
        let mut page = [1; PAGE_BYTES];
        buffer.read(0, &mut page).expect("within the buffer");
        assert!(page == [0; PAGE_BYTES], "{scheme}");
    }
}
