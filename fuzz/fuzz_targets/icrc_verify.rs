#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| terrace_corpus::icrc_verify::check(bytes));
