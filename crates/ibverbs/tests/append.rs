//! APPEND to a region that is a file, by the C ABI: the program's peers add records at its end.

mod common;

use std::ffi::c_int;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::ptr::null_mut;

use common::*;
use terrace_ibverbs::abi::terrace::{TERRACE_COMMIT, terrace_append_wr};
use terrace_ibverbs::abi::*;

/// `TERRACE_WC_APPEND`.
const WC_APPEND: u32 = 135;

/// Where the offsets of records go, in words from the beginning of the memory.
const OFFSETS: usize = 1 << 18;

#[test]
fn records_and_local_writes_follow_each_other_in_a_file() {
    let context = open();
    let mut words: Vec<u64> = (0..OFFSETS as u64 + 512).collect();
    let path = std::env::temp_dir().join(format!("terrace-append-{}", std::process::id()));
    let options = std::fs::File::options().read(true).write(true).create_new(true).open(&path);
    let file = options.expect("a file");
    std::fs::remove_file(&path).expect("removed");
    file.write_all_at(b"head", 0).expect("written");
    // SAFETY: objects of this device, and memory that outlives them.
    unsafe {
        let pd = ibv_alloc_pd(context);
        let cq = ibv_create_cq(context, 16, null_mut(), null_mut(), 0);
        let local = IBV_ACCESS_LOCAL_WRITE as c_int;
        let mr = ibv_reg_mr(pd, words.as_mut_ptr().cast(), words.len() * 8, local);
        let remote = (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE) as c_int;
        let log = terrace_bind_file(pd, file.as_raw_fd(), remote);
        assert!(!log.is_null(), "errno {}", errno());
        let qps = [0, 1].map(|_| {
            let mut init = qp_init(cq, IBV_QPT_RC);
            ibv_create_qp(pd, &raw mut init)
        });
        connect(qps[0], (*qps[1]).qp_num);
        connect(qps[1], (*qps[0]).qp_num);

        let mut expected = b"head".to_vec();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let lens = [8, 1, 0, 1024, 1025, 100_000, 1 << 20, 7];
        for (index, len) in lens.into_iter().enumerate() {
            let base = words.as_ptr() as u64;
            let mut sge = ibv_sge { addr: base, length: len as u32, lkey: (*mr).lkey };
            let mut wr: terrace_append_wr = zero();
            (wr.wr_id, wr.sg_list, wr.num_sge) = (index as u64, &raw mut sge, 1);
            (wr.rkey, wr.flags) = ((*log).rkey, if index % 2 == 0 { TERRACE_COMMIT } else { 0 });
            let result = OFFSETS + index;
            wr.result = ibv_sge { addr: base + 8 * result as u64, length: 8, lkey: (*mr).lkey };
            let mut bad = null_mut();
            assert_eq!(terrace_post_append(qps[0], &raw mut wr, &raw mut bad), 0);
            let wc = completion(context, cq);
            let done = (wc.wr_id, wc.status, wc.opcode, wc.byte_len);
            assert_eq!(done, (index as u64, IBV_WC_SUCCESS, WC_APPEND, len as u32));
            assert_eq!((&raw const words[result]).read_volatile(), expected.len() as u64, "{len} bytes");
            expected.extend_from_slice(&bytes[..len]);
            // Another writer makes the file longer.
            if index == 3 {
                file.write_all_at(b"local", expected.len() as u64).expect("written");
                expected.extend_from_slice(b"local");
            }
        }
        let mut content = vec![0; expected.len()];
        file.read_exact_at(&mut content, 0).expect("read");
        assert!(content == expected);
        assert_eq!(file.metadata().expect("a file").len(), expected.len() as u64);

        for qp in qps {
            assert_eq!(ibv_destroy_qp(qp), 0);
        }
        assert_eq!(ibv_dereg_mr(log), 0);
        assert_eq!(ibv_dereg_mr(mr), 0);
        assert_eq!(ibv_destroy_cq(cq), 0);
        assert_eq!(ibv_dealloc_pd(pd), 0);
        assert_eq!(ibv_close_device(context), 0);
    }
}
