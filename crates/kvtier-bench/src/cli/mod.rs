//! What the commands of `kvtier` share: addresses and times among their arguments, output, and the signal to stop.

pub mod address;
pub mod out;
pub mod stop;
pub mod units;

/// Exit code for invalid arguments.
pub const USAGE: u8 = 2;
