#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| peerway::fuzz::attach(data));
