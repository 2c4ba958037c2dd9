//! Bytes on their way to a peer.
//!
//! Small frames are gathered in one buffer; large ones are written from where they are, in one piece or in several.

use std::collections::VecDeque;

use crate::zmtp::frame::write_frame_header;

/// Bytes of a buffer of small frames after which the next one begins: a buffer is freed when all of it is written.
const MAX_BUFFER_BYTES: usize = 64 << 10;

/// Largest buffer that is kept for the next frames.
const KEPT_BUFFER_BYTES: usize = 4 << 10;

/// Bytes that are written from where they are, and are dropped then.
pub trait OutputPiece {
    /// Number of bytes of the piece; it never changes.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl OutputPiece for Vec<u8> {
    fn len(&self) -> usize {
        self.len()
    }
}

/// What is written next.
#[derive(Debug)]
pub enum Slice<'a, P> {
    /// Bytes of small frames and of headers.
    Small(&'a [u8]),
    /// A piece, from this byte on.
    Piece(&'a P, usize),
}

#[derive(Debug)]
enum Segment<P> {
    Small(Vec<u8>),
    Piece(P),
}

impl<P: OutputPiece> Segment<P> {
    fn len(&self) -> usize {
        match self {
            Self::Small(bytes) => bytes.len(),
            Self::Piece(piece) => piece.len(),
        }
    }

    fn slice(&self, from: usize) -> Slice<'_, P> {
        match self {
            Self::Small(bytes) => Slice::Small(&bytes[from..]),
            Self::Piece(piece) => Slice::Piece(piece, from),
        }
    }
}

/// A queue of bytes, with pieces of type `P`.
#[derive(Debug)]
pub struct Output<P = Vec<u8>> {
    segments: VecDeque<Segment<P>>,
    /// Bytes of the first segment that are written.
    written: usize,
    small_bytes: usize,
    piece_bytes: usize,
    spare: Vec<u8>,
}

impl<P> Default for Output<P> {
    fn default() -> Self {
        Self {
            segments: VecDeque::new(),
            written: 0,
            small_bytes: 0,
            piece_bytes: 0,
            spare: Vec::new(),
        }
    }
}

impl<P: OutputPiece> Output<P> {
    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Bytes that wait outside of pieces; those of the first buffer count until all of it is written.
    pub fn small_bytes(&self) -> usize {
        self.small_bytes
    }

    /// All bytes that wait, counted in the same way.
    pub fn bytes(&self) -> usize {
        self.small_bytes + self.piece_bytes
    }

    /// Appends a session's own output, and empties it.
    pub fn push_bytes(&mut self, bytes: &mut Vec<u8>) {
        self.small(|buffer| buffer.append(bytes));
    }

    /// Appends a frame, copied.
    pub fn push_frame(&mut self, frame: &[u8], more: bool) {
        self.small(|buffer| {
            write_frame_header(buffer, frame.len(), more);
            buffer.extend_from_slice(frame);
        });
    }

    /// Appends a frame that consists of pieces, of `len` bytes together.
    pub fn push_pieces(&mut self, len: usize, pieces: impl IntoIterator<Item = P>, more: bool) {
        self.small(|buffer| write_frame_header(buffer, len, more));
        let before = self.piece_bytes;
        for piece in pieces {
            self.piece_bytes += piece.len();
            self.segments.push_back(Segment::Piece(piece));
        }
        debug_assert_eq!(self.piece_bytes - before, len, "the frame's length");
    }

    /// The oldest piece that waits.
    pub fn first_piece(&self) -> Option<&P> {
        self.segments.iter().find_map(|segment| match segment {
            Segment::Piece(piece) => Some(piece),
            Segment::Small(_) => None,
        })
    }

    /// Writes with `write`, which returns the number of bytes that the system took of the slices in order, or `None` if it
    /// takes no more now. Ends after some `limit` bytes. Returns the number of bytes.
    ///
    /// # Errors
    /// That of `write`; some of what waits may have been written then, so nothing more can follow it.
    pub fn write_with<E>(
        &mut self,
        limit: usize,
        mut write: impl FnMut(&mut dyn Iterator<Item = Slice<'_, P>>) -> Result<Option<usize>, E>,
    ) -> Result<usize, E> {
        let mut total = 0;
        while !self.is_empty() && total < limit {
            let mut from = self.written;
            let slice = |segment| Segment::slice(segment, std::mem::take(&mut from));
            let Some(written) = write(&mut self.segments.iter().map(slice))? else {
                break;
            };
            total += written;
            self.advance(written);
        }
        Ok(total)
    }

    fn small(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        let has_space = matches!(self.segments.back(), Some(Segment::Small(bytes)) if bytes.len() < MAX_BUFFER_BYTES);
        if !has_space {
            let spare = std::mem::take(&mut self.spare);
            self.segments.push_back(Segment::Small(spare));
        }
        if let Some(Segment::Small(bytes)) = self.segments.back_mut() {
            let before = bytes.len();
            write(bytes);
            self.small_bytes += bytes.len() - before;
        }
    }

    /// Notes that `written` more bytes are written, and frees what is.
    fn advance(&mut self, written: usize) {
        self.written += written;
        while let Some(first) = self.segments.front()
            && self.written >= first.len()
        {
            self.written -= first.len();
            match self.segments.pop_front() {
                Some(Segment::Small(mut bytes)) => {
                    self.small_bytes -= bytes.len();
                    if bytes.capacity() <= KEPT_BUFFER_BYTES {
                        bytes.clear();
                        self.spare = bytes;
                    }
                }
                Some(Segment::Piece(piece)) => self.piece_bytes -= piece.len(),
                None => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;

    struct Counted(Vec<u8>, #[expect(dead_code, reason = "counts")] Rc<()>);

    impl OutputPiece for Counted {
        fn len(&self) -> usize {
            self.0.len()
        }
    }

    #[test]
    fn frames_are_written_in_order_and_pieces_end_with_their_last_byte() {
        let counter = Rc::new(());
        let mut output = Output::default();
        let mut expected = Vec::new();
        for byte in 0..40_u8 {
            let frame = vec![byte; if byte % 3 == 0 { 100_000 } else { 100 }];
            let more = byte % 2 == 0;
            write_frame_header(&mut expected, frame.len(), more);
            expected.extend_from_slice(&frame);
            match frame.len() {
                100 => output.push_frame(&frame, more),
                len => {
                    let pieces = frame.chunks(30_000 + usize::from(byte) * 2000);
                    let piece = |bytes: &[u8]| Counted(bytes.to_vec(), Rc::clone(&counter));
                    output.push_pieces(len, pieces.map(piece), more);
                }
            }
        }
        assert_eq!(output.bytes(), expected.len());
        let mut got = Vec::new();
        while !output.is_empty() {
            let left = Rc::strong_count(&counter);
            let taken = output.write_with(1, |slices| {
                let mut bytes = Vec::new();
                for slice in slices {
                    match slice {
                        Slice::Small(small) => bytes.extend_from_slice(small),
                        Slice::Piece(piece, from) => bytes.extend_from_slice(&piece.0[from..]),
                    }
                }
                let taken = bytes.len().min(7777);
                got.extend_from_slice(&bytes[..taken]);
                Ok::<_, ()>(Some(taken))
            });
            assert!(taken.unwrap() > 0 && Rc::strong_count(&counter) <= left);
        }
        assert!(got == expected);
        assert_eq!((output.bytes(), Rc::strong_count(&counter)), (0, 1));
    }

    #[test]
    fn full_system_ends_a_write_and_an_error_is_returned_at_once() {
        let mut output = Output::<Vec<u8>>::default();
        output.push_frame(b"abc", false);
        let mut answers = [Ok(Some(2)), Ok(None), Ok(Some(1)), Err("lost")].into_iter();
        let mut write = |_: &mut dyn Iterator<Item = Slice<'_, _>>| answers.next().unwrap();
        assert_eq!(output.write_with(100, &mut write), Ok(2));
        assert_eq!(output.write_with(100, &mut write), Err("lost"));
    }
}
