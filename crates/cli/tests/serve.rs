//! `terrace serve`: its options, and what it says about those that make no sense.

use std::process::Command;

fn refused(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_terrace")).arg("serve").args(arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_number_of_threads_is_1_to_256() {
    for (threads, reason) in [("0", "0 is not in 1..=256"), ("257", "257 is not"), ("two", "invalid digit")] {
        let said = refused(&["--region", "a=/nowhere/a:1M", "--dram", "1M", "--threads", threads]);
        assert!(said.contains("--threads") && said.contains(reason), "{said}");
    }
}
