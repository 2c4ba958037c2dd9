//! Commands of RESP2, as bytes and memory of L1 that are sent one after the other, and the replies that they have.

use std::io::Write as _;

use kvtier_memory::Extent;
use kvtier_memory::socket::Slice;

use super::reply::Value;
use kvtier_l2::{Buffer, L2Error};

/// Bytes to be sent.
pub(super) enum Segment {
    Bytes(Vec<u8>),
    /// All of a buffer.
    Object(Buffer),
}

impl Segment {
    pub(super) fn len(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Object(buffer) => buffer.len(),
        }
    }

    /// What is left behind the first `sent` bytes.
    pub(super) fn rest(&self, sent: u64) -> Slice<'_> {
        match self {
            Self::Bytes(bytes) => Slice::Bytes(&bytes[sent as usize..]),
            Self::Object(buffer) => {
                let all = buffer.extent();
                let rest = Extent::new(all.offset + sent, all.len - sent);
                Slice::Extent(buffer.arena(), rest)
            }
        }
    }
}

/// A reply that is expected.
pub(super) enum Expected {
    /// Kept whole.
    Value,
    /// Reply to ASKING, which is left out.
    Asking,
    /// The body of an object, of the buffer's length and read into it.
    Object(Buffer),
}

/// A reply that has arrived.
#[derive(Debug)]
pub(super) enum RespReply {
    /// A value, or the error of a command.
    Value(Value),
    /// The object is in its buffer, or the reason why it is not.
    Object(Result<(), L2Error>),
}

/// Commands that are sent one after the other.
#[derive(Default)]
pub(super) struct Commands {
    pub(super) segments: Vec<Segment>,
    pub(super) expected: Vec<Expected>,
    /// Number of the replies that are not left out.
    pub(super) replies: usize,
    /// Each has ASKING before it: its slot is on its way to the node that is asked.
    pub(super) asking: bool,
}

impl Commands {
    /// Appends a command.
    pub(super) fn push(&mut self, arguments: &[&[u8]]) {
        self.begin(arguments, arguments.len());
        self.expect(Expected::Value);
    }

    /// Appends other commands.
    pub(super) fn append(&mut self, other: Self) {
        self.segments.extend(other.segments);
        self.expected.extend(other.expected);
        self.replies += other.replies;
    }

    /// Appends GET of an object into its buffer.
    pub(super) fn get(&mut self, key: &[u8], to: Buffer) {
        self.begin(&[b"GET", key], 2);
        self.expect(Expected::Object(to));
    }

    /// Appends SET of an object, with a time to live in seconds.
    pub(super) fn set(&mut self, key: &[u8], from: Buffer, ttl: Option<u64>) {
        let options: &[&[u8]] = match ttl {
            Some(_) => &[b"EX"],
            None => &[],
        };
        self.begin(&[b"SET", key], 3 + 2 * options.len());
        line(self.bytes(), b'$', from.len());
        self.segments.push(Segment::Object(from));
        self.bytes().extend_from_slice(b"\r\n");
        if let Some(ttl) = ttl {
            self.argument(b"EX");
            self.argument(ttl.to_string().as_bytes());
        }
        self.expect(Expected::Value);
    }

    /// All bytes.
    pub(super) fn len(&self) -> u64 {
        self.segments.iter().map(Segment::len).sum()
    }

    /// Bytes of the objects that are expected.
    pub(super) fn expected_bytes(&self) -> u64 {
        let bytes = |expected: &Expected| match expected {
            Expected::Value | Expected::Asking => 0,
            Expected::Object(to) => to.len(),
        };
        self.expected.iter().map(bytes).sum()
    }

    fn expect(&mut self, expected: Expected) {
        self.expected.push(expected);
        self.replies += 1;
    }

    fn begin(&mut self, arguments: &[&[u8]], count: usize) {
        if self.asking {
            self.bytes().extend_from_slice(b"*1\r\n$6\r\nASKING\r\n");
            self.expected.push(Expected::Asking);
        }
        line(self.bytes(), b'*', count as u64);
        arguments
            .iter()
            .for_each(|argument| self.argument(argument));
    }

    fn argument(&mut self, argument: &[u8]) {
        let bytes = self.bytes();
        line(bytes, b'$', argument.len() as u64);
        bytes.extend_from_slice(argument);
        bytes.extend_from_slice(b"\r\n");
    }

    /// The last segment, if it is of bytes, or a new one.
    fn bytes(&mut self) -> &mut Vec<u8> {
        if !matches!(self.segments.last(), Some(Segment::Bytes(_))) {
            self.segments.push(Segment::Bytes(Vec::new()));
        }
        match self.segments.last_mut() {
            Some(Segment::Bytes(bytes)) => bytes,
            _ => unreachable!("one was pushed"),
        }
    }
}

/// Appends the first line of an argument or of a command.
fn line(bytes: &mut Vec<u8>, kind: u8, number: u64) {
    // Memory takes all of it.
    let _ = write!(bytes, "{}{number}\r\n", char::from(kind));
}
