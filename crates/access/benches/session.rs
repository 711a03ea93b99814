//! The cost that the session adds to a work request: `cargo bench -p terrace-access --bench session`.

use std::sync::Arc;

use criterion::{Criterion, criterion_group, criterion_main};
use terrace_access::layout::Layout;
use terrace_access::proto::{Mode, RegionDescription, Status};
use terrace_access::region::{Knowledge, Region};
use terrace_access::session::{Action, Config, LocalMemory, Session};
use terrace_transport::{LocalError, Payload, SendFlags, SendOp, SendWr, Sge, Time, Wc};

const RKEY: u32 = 1;
const DEPTH: u64 = 32;

/// Memory of equal bytes, for the fastest copies.
struct Zeros(Vec<u8>);

impl LocalMemory for Zeros {
    fn read(&self, _: &Sge, offset: u64, out: &mut [u8]) -> Result<(), LocalError> {
        out.copy_from_slice(&self.0[offset as usize..offset as usize + out.len()]);
        Ok(())
    }
}

fn read(index: u64, length: u32) -> SendWr {
    let op = SendOp::Read { va: (index * 4096) % (1 << 29), rkey: RKEY };
    let sge = Sge { addr: (index % DEPTH) * u64::from(length), length, lkey: 7 };
    let payload = Payload::Sges([sge].into_iter().collect());
    SendWr { wr_id: index, op, payload, flags: SendFlags::SIGNALED, target: None }
}

/// Executes the session's actions in batches; every operation succeeds.
fn execute_actions(session: &mut Session, memory: &Zeros, actions: &mut Vec<Action>) {
    loop {
        actions.extend(std::iter::from_fn(|| session.poll_action(Time(0), memory)));
        if actions.is_empty() {
            return;
        }
        for action in actions.drain(..) {
            match action {
                Action::Post(wr) => {
                    session.handle_completion(&Wc { wr_id: wr.wr_id, ..Wc::default() }, memory);
                }
                Action::Call(call) => {
                    session.handle_done(Time(0), call.id, Status::Ok);
                }
                _ => {}
            }
        }
    }
}

fn bench(c: &mut Criterion) {
    let memory = Zeros(vec![0; 1 << 20]);
    let layout = Layout::new(0, 1 << 30, 0, 1 << 20).expect("a valid layout");
    let description =
        RegionDescription { layout, signature_key: [3; 32], region_id: 6, mode: Mode::OneSided };
    let region = Arc::new(Region::new(RKEY, description));
    let known = Knowledge::Extended(region);
    let config = Config {
        qpn: 1,
        tag: 1,
        request_count_max: 256,
        post_count_max: 256,
        call_count_max: 32,
        mtu_bytes: 4096,
        signal_all: false,
        in_order: true,
    };
    let mut run = |name: &str, mode: Option<Mode>, length: u32| {
        let mut session = Session::new(config);
        mode.into_iter().for_each(|mode| session.start(mode, 2));
        let (mut index, mut actions) = (0, Vec::new());
        c.bench_function(name, |bencher| {
            bencher.iter(|| {
                for _ in 0..DEPTH {
                    session.post(read(index, length), &known).expect("the queue is not full");
                    index += 1;
                }
                execute_actions(&mut session, &memory, &mut actions);
            });
        });
    };
    run("32 READs of 4 KiB, posted unchanged", None, 4096);
    run("32 READs of 4 KiB, inspected", Some(Mode::OneSided), 4096);
    run("32 READs of 4 KiB, by RPC", Some(Mode::RpcOnly), 4096);
    run("32 READs of 1 MiB, inspected", Some(Mode::OneSided), 1 << 20);
}

criterion_group!(benches, bench);
criterion_main!(benches);
