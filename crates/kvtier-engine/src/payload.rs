//! The third frame of an answer. Chunks of L1 in it stay where they are, leased, until they are sent.

use std::ops::Range;
use std::sync::Arc;

use kvtier_core::cache::{Extent, ReadLease};
use kvtier_memory::Arena;
use kvtier_memory::socket::Slice;
use kvtier_store::l1::L1Allocator;

use super::transfers::Charge;

/// A frame: bytes of its own, and between them chunks of L1.
pub struct Payload {
    own: Vec<u8>,
    chunks: Option<Box<LeasedChunks>>,
}

/// Chunks of a frame. Their memory is neither freed nor changed before this is dropped.
pub struct LeasedChunks {
    /// The memory that they are in.
    pub arena: Arc<Arena>,
    /// Position in the frame's own bytes, and memory, of each chunk, in order.
    pub places: Vec<(usize, Extent)>,
    /// The leases that keep them.
    pub leases: Vec<ReadLease<L1Allocator>>,
    /// Bytes of the chunks in the staging budget.
    pub charge: Charge,
}

/// A contiguous part of a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PayloadPart {
    /// Range of the frame's own bytes.
    Own(Range<usize>),
    /// A chunk.
    Chunk(Extent),
}

impl PayloadPart {
    /// Bytes.
    pub fn byte_len(&self) -> usize {
        match self {
            Self::Own(range) => range.len(),
            Self::Chunk(extent) => extent.len as usize,
        }
    }
}

impl std::fmt::Debug for Payload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let chunks = self.chunks.as_ref().map_or(0, |chunks| chunks.places.len());
        write!(f, "Payload({:02x?}, {chunks} chunks)", self.own)
    }
}

/// Frames with chunks are never equal.
impl PartialEq for Payload {
    fn eq(&self, other: &Self) -> bool {
        self.chunks.is_none() && other.chunks.is_none() && self.own == other.own
    }
}

impl From<Vec<u8>> for Payload {
    fn from(own: Vec<u8>) -> Self {
        let chunks = None;
        Self { own, chunks }
    }
}

impl Payload {
    /// A frame with chunks.
    pub fn with_chunks(own: Vec<u8>, chunks: LeasedChunks) -> Self {
        let chunks = Some(Box::new(chunks));
        Self { own, chunks }
    }

    /// Bytes of the frame.
    pub fn byte_len(&self) -> usize {
        self.own.len()
            + self
                .places()
                .map(|(_, part)| part.byte_len())
                .sum::<usize>()
    }

    /// The frame's bytes; `None` if it has chunks.
    pub fn without_chunks(&self) -> Option<&[u8]> {
        self.chunks.is_none().then_some(&self.own)
    }

    /// Parts of the frame, in order.
    pub fn parts(&self) -> Vec<PayloadPart> {
        let mut parts = Vec::new();
        let mut from = 0;
        for (place, chunk) in self.places() {
            parts.push(PayloadPart::Own(from..place));
            parts.push(chunk);
            from = place;
        }
        parts.push(PayloadPart::Own(from..self.own.len()));
        parts
    }

    /// The bytes of one of its parts, from `from` on.
    pub fn slice(&self, part: &PayloadPart, from: usize) -> Slice<'_> {
        match (part, &self.chunks) {
            (PayloadPart::Own(range), _) => Slice::Bytes(&self.own[range.clone()][from..]),
            (PayloadPart::Chunk(extent), Some(chunks)) => {
                let from = from as u64;
                let rest = Extent::new(extent.offset + from, extent.len - from);
                Slice::Extent(&chunks.arena, rest)
            }
            (PayloadPart::Chunk(_), None) => Slice::Bytes(&[]),
        }
    }

    fn places(&self) -> impl Iterator<Item = (usize, PayloadPart)> {
        let places = self.chunks.iter().flat_map(|chunks| &chunks.places);
        places.map(|(place, extent)| (*place, PayloadPart::Chunk(*extent)))
    }
}
