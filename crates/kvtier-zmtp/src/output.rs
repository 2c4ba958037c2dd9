//! Bytes on their way to a peer.
//!
//! Small frames are gathered in one buffer; a large one is written from where it is.

use std::collections::VecDeque;
use std::io::IoSlice;

use crate::frame::write_frame_header;

/// Buffers handed to the system at once.
const MAX_SLICES: usize = 16;

/// Bytes of a buffer of small frames after which the next one begins: a buffer is freed when all of it is written.
const MAX_BUFFER_BYTES: usize = 64 << 10;

/// Largest buffer that is kept for the next frames.
const KEPT_BUFFER_BYTES: usize = 4 << 10;

#[derive(Debug)]
struct Segment<C> {
    bytes: Vec<u8>,
    /// Of a large frame.
    charge: Option<C>,
}

/// A queue of bytes. The charge `C` of a large frame is dropped when the last of its bytes is written.
#[derive(Debug)]
pub struct Output<C = ()> {
    segments: VecDeque<Segment<C>>,
    /// Bytes of the first segment that are written.
    written: usize,
    /// Bytes of the segments without a charge.
    small_bytes: usize,
    /// Bytes of those with one.
    large_bytes: usize,
    spare: Vec<u8>,
}

impl<C> Default for Output<C> {
    fn default() -> Self {
        Self {
            segments: VecDeque::new(),
            written: 0,
            small_bytes: 0,
            large_bytes: 0,
            spare: Vec::new(),
        }
    }
}

impl<C> Output<C> {
    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Bytes that wait and have no charge; those of the first buffer count until all of it is written.
    pub fn small_bytes(&self) -> usize {
        self.small_bytes
    }

    /// All bytes that wait, counted in the same way.
    pub fn bytes(&self) -> usize {
        self.small_bytes + self.large_bytes
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

    /// Appends a frame that is written from where it is.
    pub fn push_large_frame(&mut self, bytes: Vec<u8>, more: bool, charge: C) {
        self.small(|buffer| write_frame_header(buffer, bytes.len(), more));
        self.large_bytes += bytes.len();
        let charge = Some(charge);
        self.segments.push_back(Segment { bytes, charge });
    }

    /// Writes with `write`, which returns the number of bytes that the system took, up to some `limit` bytes or until it
    /// fails. Returns the number of bytes.
    ///
    /// # Errors
    /// That of `write`, unless bytes were written before it.
    pub fn write_with<E>(
        &mut self,
        limit: usize,
        mut write: impl FnMut(&[IoSlice<'_>]) -> Result<usize, E>,
    ) -> Result<usize, E> {
        let mut total = 0;
        while !self.is_empty() && total < limit {
            let mut slices = [IoSlice::new(&[]); MAX_SLICES];
            let mut from = self.written;
            let mut used = 0;
            for (slice, segment) in slices.iter_mut().zip(&self.segments) {
                *slice = IoSlice::new(&segment.bytes[std::mem::take(&mut from)..]);
                used += 1;
            }
            match write(&slices[..used]) {
                Ok(written) => {
                    total += written;
                    self.advance(written);
                }
                Err(_) if total > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(total)
    }

    fn small(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        let fits = |segment: &Segment<C>| {
            segment.charge.is_none() && segment.bytes.len() < MAX_BUFFER_BYTES
        };
        if !self.segments.back().is_some_and(fits) {
            self.segments.push_back(Segment {
                bytes: std::mem::take(&mut self.spare),
                charge: None,
            });
        }
        if let Some(Segment { bytes, .. }) = self.segments.back_mut() {
            let before = bytes.len();
            write(bytes);
            self.small_bytes += bytes.len() - before;
        }
    }

    /// Notes that `written` more bytes are written, and frees what is.
    fn advance(&mut self, written: usize) {
        self.written += written;
        while let Some(first) = self.segments.front()
            && self.written >= first.bytes.len()
        {
            self.written -= first.bytes.len();
            let Some(Segment { mut bytes, charge }) = self.segments.pop_front() else {
                return;
            };
            if charge.is_some() {
                self.large_bytes -= bytes.len();
                continue;
            }
            self.small_bytes -= bytes.len();
            if bytes.capacity() <= KEPT_BUFFER_BYTES {
                bytes.clear();
                self.spare = bytes;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;

    #[test]
    fn frames_are_written_in_order_and_charges_end_with_their_last_byte() {
        let charge = Rc::new(());
        let mut output = Output::default();
        let mut expected = Vec::new();
        for byte in 0..40_u8 {
            let frame = vec![byte; if byte % 3 == 0 { 100_000 } else { 100 }];
            write_frame_header(&mut expected, frame.len(), byte % 2 == 0);
            expected.extend_from_slice(&frame);
            match frame.len() {
                100 => output.push_frame(&frame, byte % 2 == 0),
                _ => output.push_large_frame(frame, byte % 2 == 0, Rc::clone(&charge)),
            }
        }
        assert_eq!(output.bytes(), expected.len());
        let mut got = Vec::new();
        while !output.is_empty() {
            let left = Rc::strong_count(&charge);
            let taken = output.write_with(1, |slices| {
                let bytes: Vec<u8> = slices
                    .iter()
                    .flat_map(|slice| slice.iter().copied())
                    .collect();
                let taken = bytes.len().min(7777);
                got.extend_from_slice(&bytes[..taken]);
                Ok::<_, ()>(taken)
            });
            assert!(taken.unwrap() > 0 && Rc::strong_count(&charge) <= left);
        }
        assert!(got == expected);
        assert_eq!((output.bytes(), Rc::strong_count(&charge)), (0, 1));
    }

    #[test]
    fn error_is_returned_unless_bytes_were_written_before() {
        let mut output = Output::<()>::default();
        output.push_frame(b"abc", false);
        let mut answers = [Ok(2), Err("full"), Err("full")].into_iter();
        let mut write = |_: &[IoSlice<'_>]| answers.next().unwrap();
        assert_eq!(output.write_with(100, &mut write), Ok(2));
        assert_eq!(output.write_with(100, &mut write), Err("full"));
        assert_eq!(output.bytes(), 5);
    }
}
