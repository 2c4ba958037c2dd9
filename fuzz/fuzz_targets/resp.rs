//! What a Redis server sends: replies, slots of a cluster, redirects.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| kvtier_l2_resp::read_replies(data));
