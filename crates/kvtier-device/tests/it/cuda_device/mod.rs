//! Pages of another process on GPUs, to and from the arena, over the fake driver.

mod bytes;
mod costs;
mod events;
mod failures;
mod leaving;
mod log;
mod pinning;
mod placing;
mod reading;
mod setup;
mod steps;
mod trial;
mod turns;
