#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| terrace_corpus::nbd_device::check(bytes));
