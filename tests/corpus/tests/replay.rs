//! Checks every committed input of every fuzz target once.

use std::fs;
use std::path::{Path, PathBuf};

use terrace_access::proto::{Datagram, Message};
use terrace_export::proto::setup;

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus")
}

fn replay(target: &str, check: fn(&[u8])) {
    let inputs: Vec<PathBuf> = fs::read_dir(corpus().join(target))
        .expect("a corpus")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    assert!(!inputs.is_empty(), "the corpus of {target} is empty");
    for input in inputs {
        // The output of a test is shown only if the check panics.
        println!("{}", input.display());
        check(&fs::read(&input).expect("an input"));
    }
}

/// Defines a test for each target, and the list of their names.
macro_rules! targets {
    ($($target:ident),*) => {
        $(#[test]
        fn $target() {
            replay(stringify!($target), terrace_corpus::$target::check);
        })*

        const TARGETS: &[&str] = &[$(stringify!($target)),*];
    };
}

targets!(
    access_proto,
    cm_manager,
    export_proto,
    icrc_verify,
    nbd_device,
    transport_qp,
    wire_cm,
    wire_parse,
    wqe_format
);

/// A new version of the protocol must not leave its seeds behind, which decoders refuse at their first byte.
#[test]
fn seeds_of_the_control_protocol_are_valid() {
    for entry in fs::read_dir(corpus().join("access_proto")).expect("a corpus") {
        let path = entry.expect("an entry").path();
        let (bytes, name) = (fs::read(&path).expect("an input"), path.display().to_string());
        let outcome = if name.contains("datagram") {
            Datagram::decode(&bytes).map(|_| ())
        } else {
            Message::decode(&bytes).map(|_| ())
        };
        assert_eq!(outcome, Ok(()), "{name}");
    }
}

#[test]
fn seeds_of_the_metadata_protocol_are_valid() {
    for entry in fs::read_dir(corpus().join("export_proto")).expect("a corpus") {
        let path = entry.expect("an entry").path();
        let (bytes, name) = (fs::read(&path).expect("an input"), path.display().to_string());
        let outcome = match path.file_stem().and_then(|name| name.to_str()) {
            Some("setup-request") => setup::decode::<setup::SetupRequest>(&bytes).map(|_| ()),
            Some("setup-answer") => setup::decode::<setup::SetupAnswer>(&bytes).map(|_| ()),
            _ => terrace_export::proto::Message::decode(&bytes).map(|_| ()),
        };
        assert_eq!(outcome, Ok(()), "{name}");
    }
}

#[test]
fn no_target_is_left_out() {
    let names = |folder: &str| {
        let entries = fs::read_dir(corpus().join(folder)).expect("a folder");
        let mut names: Vec<String> = entries
            .map(|entry| entry.expect("an entry").path())
            .map(|path| path.file_stem().expect("a name").to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    };
    assert_eq!(names("."), TARGETS);
    assert_eq!(names("../fuzz_targets"), TARGETS);
}
