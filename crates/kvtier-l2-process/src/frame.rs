//! Frames: a header of 16 bytes and a body. No I/O.

/// First bytes of each frame, in all versions of the protocol.
pub(super) const MAGIC: [u8; 4] = *b"KVT1";

/// Bytes of a header.
pub(super) const HEADER: usize = 16;

/// Longest body in either direction.
pub(super) const MAX_BODY: usize = 4 << 20;

/// Something that the tier sent and the protocol does not allow. Its connection is closed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct Violation(String);

impl Violation {
    pub(super) fn new(what: impl Into<String>) -> Self {
        Self(what.into())
    }
}

/// Header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    /// Bytes of the body.
    pub(super) len: usize,
    /// Id of the request.
    pub(super) id: u64,
}

impl Head {
    pub(super) fn decode(bytes: &[u8; HEADER]) -> Result<Self, Violation> {
        let [m0, m1, m2, m3, l0, l1, l2, l3, id @ ..] = *bytes;
        if [m0, m1, m2, m3] != MAGIC {
            return Err(Violation::new("a frame does not begin with KVT1"));
        }
        let len = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        if len > MAX_BODY {
            let what = format!("a frame of {len} bytes; the limit is {MAX_BODY}");
            return Err(Violation::new(what));
        }
        let id = u64::from_le_bytes(id);
        Ok(Self { len, id })
    }
}

/// Returns a frame with this body, which is at most [`MAX_BODY`] bytes long.
pub(super) fn encode(id: u64, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(body.len()).unwrap_or(u32::MAX);
    let mut frame = Vec::with_capacity(HEADER + body.len());
    frame.extend_from_slice(&MAGIC);
    frame.extend_from_slice(&len.to_le_bytes());
    frame.extend_from_slice(&id.to_le_bytes());
    frame.extend_from_slice(body);
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_read_back_and_others_are_refused() {
        let frame = encode(0x0102_0304_0506_0708, b"{}");
        assert_eq!(
            frame,
            b"KVT1\x02\0\0\0\x08\x07\x06\x05\x04\x03\x02\x01{}".to_vec()
        );
        let head: [u8; HEADER] = *frame.first_chunk().unwrap();
        let expected = Head {
            len: 2,
            id: 0x0102_0304_0506_0708,
        };
        assert_eq!(Head::decode(&head), Ok(expected));
        for at in 0..4 {
            let mut other = head;
            other[at] ^= 1;
            assert!(Head::decode(&other).is_err());
        }
        let with_len = |len: u32| {
            let mut other = head;
            other[4..8].copy_from_slice(&len.to_le_bytes());
            Head::decode(&other)
        };
        assert!(with_len(MAX_BODY as u32).is_ok());
        assert!(with_len(MAX_BODY as u32 + 1).is_err());
        assert!(with_len(u32::MAX).is_err());
    }
}
