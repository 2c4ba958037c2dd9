//! What a tier in a process of its own sends: headers and bodies of answers.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| kvtier_l2_process::read_answers(data));
