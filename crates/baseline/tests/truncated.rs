//! A file that is truncated while it is served: accesses beyond its end fail, and do not extend it.

mod common;

use common::{Served, tiering};
use terrace_baseline::device::OnlyThreads;
use terrace_baseline::{BaselineConfig, IoMethod};
use terrace_hostmem::AtomicOp;
use terrace_memory::AccessError;

const MIB: u64 = 1 << 20;
const LEN: u64 = MIB + 10_000;

fn check(dir: &str, config: BaselineConfig) {
    let is_direct = config.io != IoMethod::Buffered;
    let served = Served::new(dir, "truncated", 2 * MIB, true, config);
    served.write(0, &[7; 9000]).unwrap();
    let file = std::fs::File::options().write(true).open(&served.scratch.0).unwrap();
    file.set_len(LEN).unwrap();
    for offset in [LEN - 100, LEN - 1, LEN, LEN + 4096, 2 * MIB - 4096] {
        for len in [101, 4096] {
            assert_eq!(served.read(offset, len), Err(AccessError::Fault), "read at {offset}");
            assert_eq!(served.write(offset, &vec![1; len]), Err(AccessError::Fault), "write at {offset}");
        }
    }
    assert_eq!(served.atomic(2 * MIB - 8, AtomicOp::FetchAdd { add: 1 }), Err(AccessError::Fault));
    assert_eq!(file.metadata().unwrap().len(), LEN);
    // Direct access cannot write the last page, which the file does not fill.
    let end = if is_direct { LEN - LEN % 4096 } else { LEN };
    served.write(end - 100, &[3; 100]).unwrap();
    assert_eq!(served.read(end - 100, 100).unwrap(), [3; 100]);
    assert_eq!(served.read(0, 9000).unwrap(), [7; 9000]);
    assert_eq!(file.metadata().unwrap().len(), LEN);
    file.set_len(2 * MIB).unwrap();
    served.write(2 * MIB - 5000, &[4; 5000]).unwrap();
    assert_eq!(served.read(2 * MIB - 5000, 5000).unwrap(), [4; 5000]);
}

#[test]
fn accesses_beyond_the_end_fail_and_the_file_stays_as_short_as_it_is() {
    for dir in ["/tmp", "/dev/shm"] {
        for io in [IoMethod::Tiering, IoMethod::Direct, IoMethod::Buffered] {
            check(dir, BaselineConfig { io, ..tiering(8 * MIB) });
        }
        check(dir, BaselineConfig { device: std::sync::Arc::new(OnlyThreads), ..tiering(8 * MIB) });
    }
}
