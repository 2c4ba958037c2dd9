//! How much memory clients may make the front end hold, whatever they send and however little they read.
//!
//! | what | bound |
//! | --- | --- |
//! | requests that wait for a thread, or for what they ask for | [`request_budget`], a connection half of it; a lane's number of jobs |
//! | large replies until the system has taken their bytes | [`reply_budget`], a connection [`REPLY_SHARE`]; beyond it by one reply for each thread that makes them; a time |
//! | small replies until then | [`MAX_SMALL_OUTPUT`] per connection, which is closed then |
//! | frames of a message | as many as an operation has; the rest is discarded as it arrives |
//! | a message that is arriving | the message limit and a prompt |
//! | incomplete messages and small replies of all connections, but for the oldest large message | [`HELD_BYTES`]; from half of it on, large messages wait for the oldest ones; beyond it the connection with the most bytes times their age is closed |
//! | requests that wait for the generation of their client | [`MAX_UNDECIDED`] per connection, a part of all requests' bytes, and a time |

use std::sync::Arc;

use kvtier_proto::operation::Operation;

use super::lanes::LANE_LIMIT;
use kvtier_common::sync::budget::Budget;

/// Most bytes of uid and op together. A client's uid is a number, its op a number or a name.
pub const MAX_HEAD: usize = 1024;

/// Most payload bytes of a request that carries no KV data: a prompt of 13 million token ids.
pub const PLAIN_REQUEST: u64 = 64 << 20;

/// Longest frame of any request: the longest value that MessagePack has, with its head.
const LONGEST_FRAME: u64 = u32::MAX as u64 + 5;

/// What a request that waits holds besides its payloads: uid and op, and what describes it.
pub const JOB_BYTES: u64 = 2048;

/// Most bytes of a command of the wire protocol. A READY has about 50, with an identity 300.
pub const MAX_COMMAND: u64 = 4096;

/// Requests of a connection that may wait for its client's generation. A worker that reconnected waits for the answer to
/// one, and the next ping decides.
pub const MAX_UNDECIDED: usize = 16;

/// Bytes of the largest request that may wait so: a prompt of 800,000 token ids. What is larger is answered without a payload.
pub const MAX_UNDECIDED_BYTES: u64 = 4 << 20;

/// Part of all requests' bytes that such requests may have together.
pub const UNDECIDED_PART: u64 = 8;

/// Largest reply that is not counted by its bytes.
pub const SMALL_REPLY: usize = 1024;

/// Bytes of small replies that may wait for a client which does not read: as many replies as its two lanes hold requests.
pub const MAX_SMALL_OUTPUT: usize = 2 * LANE_LIMIT * (MAX_HEAD + SMALL_REPLY);

/// Bytes of replies to one connection after which it gets no more large ones until it reads. A client of LMCache has one
/// retrieve in flight, which is never refused: the replies before it have been sent when it asks.
pub const REPLY_SHARE: u64 = 256 << 20;

/// Bytes of replies of all connections together: 16 workers that do not read.
const REPLIES: u64 = 16 * REPLY_SHARE;

/// Bytes of incomplete messages and small replies of all connections. The oldest large message is not among them, so that the
/// largest one there is gets through.
pub const HELD_BYTES: usize = 256 << 20;

/// Largest frame that is received.
pub fn max_frame(max_message_bytes: u64) -> u64 {
    max_message_bytes.min(LONGEST_FRAME)
}

/// Bytes of requests that may wait. Half of it, which one connection may have, holds the largest message there is, and
/// leaves as much for the others.
pub fn request_bytes(max_message_bytes: u64) -> u64 {
    2 * (max_frame(max_message_bytes) + PLAIN_REQUEST).max(256 << 20)
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
