//! Runs tests/python, whose tests use the module as Python does, against the `terrace` of the same build.
//!
//! `cargo test --workspace` builds that; with `cargo test --package terrace-python`, run
//! `cargo build --package terrace-cli` first.

use std::path::Path;
use std::process::Command;

#[test]
fn the_python_tests_pass() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let executable = std::env::current_exe().expect("the path of this test");
    let libraries = executable.parent().expect("the folder of this test");
    let terrace = libraries.with_file_name("terrace");
    assert!(terrace.exists(), "no {}: run `cargo build --package terrace-cli`", terrace.display());
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("python");
    let package = folder.join("terrace");
    std::fs::create_dir_all(&package).expect("a folder for the package");
    for entry in std::fs::read_dir(here.join("python/terrace")).expect("the package's files") {
        let path = entry.expect("the package's files").path();
        if path.is_file() {
            std::fs::copy(&path, package.join(path.file_name().unwrap())).expect("a copy");
        }
    }
    let module = libraries.join("libterrace_python.so");
    std::fs::copy(module, package.join("_native.abi3.so")).expect("the module, which cargo has built");
    let tests = here.join("../../tests/python");
    let python = std::env::var_os("PYTHON").unwrap_or("python3".into());
    let status = Command::new(python)
        .args(["-m", "unittest", "discover", "--pattern", "test_*.py", "--start-directory"])
        .arg(tests)
        .env("PYTHONPATH", folder)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("TERRACE", terrace)
        .status()
        .expect("Python");
    assert!(status.success(), "tests/python: {status}");
}
