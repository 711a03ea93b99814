#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| terrace_corpus::export_proto::check(bytes));
