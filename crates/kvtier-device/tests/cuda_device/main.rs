//! Pages of another process on GPUs, to and from the arena, over the fake driver.

#![expect(clippy::unwrap_used, reason = "tests")]

mod bytes;
mod costs;
mod events;
mod failures;
mod leaving;
#[path = "../common/lender.rs"]
#[expect(dead_code, reason = "the rest is for the tests of the mapping")]
mod lender;
mod log;
#[path = "../it/model.rs"]
#[expect(dead_code, reason = "the rest is for the tests of plans")]
mod model;
mod pinning;
mod reading;
mod setup;
mod steps;
mod trial;
mod turns;
