//! Hand-over from a running server to the next one of its instance, over a socket in the state directory.
//!
//! | new server | old server |
//! | --- | --- |
//! | `Hello`: the formats it reads, its flags | refuses, or `Accepted` |
//! | `Opened`: tiers, and the GPUs of workers, are open beside those of the old one | pauses: what runs in tiers ends; then no request is read, those that were are answered |
//! | builds everything of it, changing nothing | `State`, connections' bytes, descriptors |
//! | `Commit`, if all of it makes sense | releases everything: `Done` |
//! | serves | the indexes of its tiers, and ends |
//!
//! The point of no return is the old server's: it reads `Commit`, or goes on after a `Refused`, which it sends before. So a
//! new server that has sent `Commit` serves at `Done`, and also if the old one ends without a word; at `Refused` it ends.

mod giving;
mod taking;
mod wire;

use std::time::Duration;

pub use giving::{Giver, GivingParts, Rounds};
pub use taking::{IndexReader, Taken, ask};

/// Name of the socket in the state directory, which no other user but root can reach.
const SOCKET: &str = "take-over";

/// Milliseconds with one decimal, for a line in the log.
pub fn millis(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e4).round() / 10.0
}
