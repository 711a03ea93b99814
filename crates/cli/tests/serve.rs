//! `terrace serve`: its options, and its errors for invalid ones.

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

#[test]
fn a_fault_plan_is_checked() {
    let region = ["--region", "a=/nowhere/a:1M", "--dram", "1M", "--fault-plan"];
    let said = refused(&[&region[..], &["/nonexistent/plan.toml"]].concat());
    assert!(said.contains("cannot read the fault plan /nonexistent/plan.toml"), "{said}");
    let path = std::env::temp_dir().join(format!("terrace-serve-{}.toml", std::process::id()));
    std::fs::write(&path, "[[fault]]\nkind = \"slow-storage\"\n").unwrap();
    let said = refused(&[&region[..], &[path.to_str().unwrap()]].concat());
    assert!(said.contains("it needs `delay_us_min`"), "{said}");
    std::fs::remove_file(&path).unwrap();
}
