//! How much memory clients may make the front end hold, whatever they send and however little they read.
//!
//! | what | bound |
//! | --- | --- |
//! | requests that wait for a thread, or for what they ask for | [`request_budget`], a connection half of it; a lane's number of jobs |
//! | large replies until the system has taken their bytes | [`reply_budget`], a connection [`REPLY_SHARE`]; beyond it by one reply for each thread that makes them |
//! | small replies until then | [`SEND_HWM`] times about [`SMALL_REPLY`] a connection |
//! | frames of a message | as many as an operation has; the rest is dropped as it is read |
//!
//! What is out of reach is inside libzmq: a frame that is just arriving, up to the message limit for each connection,
//! and the frames of a message whose last frame has not come, of which libzmq has no bound.

use std::sync::Arc;

use kvtier_proto::frames::MAX_PAYLOADS;
use kvtier_proto::operation::Operation;

use super::lanes::LANE_LIMIT;
use crate::budget::Budget;

/// Frames of a message that are looked at: the routing id, uid and op, the payloads, and one that shows that there are too many.
pub const MAX_FRAMES: usize = 3 + MAX_PAYLOADS + 1;

/// Most bytes of uid and op together. A client's uid is a number, its op a number or a name.
pub const MAX_HEAD: usize = 1024;

/// Most payload bytes of a request that carries no KV data: a prompt of 13 million token ids.
pub const PLAIN_REQUEST: u64 = 64 << 20;

/// Longest frame of any request: the longest value that MessagePack has, with its head.
const LONGEST_FRAME: u64 = u32::MAX as u64 + 5;

/// What a request that waits holds besides its frames: at worst all of the buffer libzmq received it into, 8 KiB.
pub const JOB_BYTES: u64 = 8192;

/// Largest reply that is not counted by its bytes.
pub const SMALL_REPLY: usize = 1024;

/// Small replies that may wait for a client which does not read: as many as its two lanes hold requests.
pub const SEND_HWM: i32 = 2 * LANE_LIMIT as i32;

/// Bytes of replies to one connection after which it gets no more large ones until it reads. A client of LMCache has one
/// retrieve under way, which is never refused: what came before has left when it asks.
pub const REPLY_SHARE: u64 = 256 << 20;

/// The same for all connections together: 16 workers that do not read.
const REPLIES: u64 = 16 * REPLY_SHARE;

/// Largest frame that is received.
pub fn max_frame(max_message_bytes: u64) -> u64 {
    max_message_bytes.min(LONGEST_FRAME)
}

/// Bytes of requests that may wait. Half of it, which one connection may have, holds the largest message there is, and
/// leaves as much for the others.
pub fn request_budget(max_message_bytes: u64) -> Arc<Budget> {
    Budget::new(2 * (max_frame(max_message_bytes) + PLAIN_REQUEST).max(256 << 20))
}

/// Bytes of large replies that may wait.
pub fn reply_budget() -> Arc<Budget> {
    Budget::new(REPLIES)
}

/// Most payload bytes of a request of this operation.
pub fn max_payload(operation: Operation) -> u64 {
    match operation {
        // It may carry pickled chunks.
        Operation::CommitStore => u64::MAX,
        _ => PLAIN_REQUEST,
    }
}

/// Whether the reply to an operation can be large: chunks, or a slot for each chunk.
pub fn answers_much(operation: Operation) -> bool {
    matches!(
        operation,
        Operation::PrepareRetrieve | Operation::PrepareStore
    )
}
