//! `aesgcm`: objects encrypted by AES-GCM.
//!
//! | frame | bytes | key |
//! | --- | --- | --- |
//! | `lmcache` | `01`, IV 12, ciphertext, tag 16 | HKDF-SHA256 of the master key and the tenant's salt; nothing else is authenticated |
//! | `bound` | `02`, id of the master key 8, random 16, then segments: ciphertext of 64 KiB (the last one shorter), tag 16 | HKDF-SHA256 of the master key, the object's name and the random bytes; authenticates version, id, length, layout and name |
//!
//! *Nonces.* `lmcache` has random IVs of 96 bits and a key per tenant: of 2^32 objects two have the same IV with a probability
//! of 2^-33, which is the bound to respect; change the master key before a tenant has stored that many. `bound` has a key per
//! store, and the nonce of a segment is its number: no nonce repeats unless 128 random bits do for the same object.
//!
//! *Segments* stay in the processor's cache between the copy from L1 and the encryption.

mod keys;

use ring::aead::{Aad, LessSafeKey, NONCE_LEN, Nonce, Tag};
use ring::rand::{SecureRandom, SystemRandom};
use serde_json::{Map, Value};

use kvtier_core::object_key::KeyShape;

use super::Transform;
use crate::error::{ErrorKind, L2Error};
use crate::object::{Buffer, ObjectSpec};
pub(crate) use keys::AesBits;
use keys::{ID_LEN, MasterKey};

const TAG_LEN: usize = 16;

/// Random bytes of a frame `bound`.
const RANDOM_LEN: usize = 16;

/// Plain bytes of a segment of a frame `bound`.
const SEGMENT: usize = 64 << 10;

/// Form of the stored bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AesFrame {
    /// LMCache's.
    Lmcache,
    /// kvtier's own, bound to its object.
    Bound,
}

impl AesFrame {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Lmcache => "lmcache",
            Self::Bound => "bound",
        }
    }

    fn version(self) -> u8 {
        match self {
            Self::Lmcache => 1,
            Self::Bound => 2,
        }
    }

    /// Bytes before the random ones.
    fn prefix_len(self) -> usize {
        match self {
            Self::Lmcache => 1,
            Self::Bound => 1 + ID_LEN,
        }
    }

    /// Bytes before the ciphertext.
    fn head_len(self) -> usize {
        match self {
            Self::Lmcache => self.prefix_len() + NONCE_LEN,
            Self::Bound => self.prefix_len() + RANDOM_LEN,
        }
    }

    /// Plain bytes per tag.
    fn segment(self) -> usize {
        match self {
            Self::Lmcache => usize::MAX,
            Self::Bound => SEGMENT,
        }
    }

    /// Length of the frame of an object of `len` bytes.
    fn stored_len(self, len: u64) -> Option<u64> {
        let tags = len.div_ceil(self.segment() as u64).max(1);
        let overhead = tags.checked_mul(TAG_LEN as u64)?;
        let overhead = overhead.checked_add(self.head_len() as u64)?;
        let stored = len.checked_add(overhead)?;
        isize::try_from(stored).is_ok().then_some(stored)
    }
}

/// Encrypts with one master key; decrypts with any of several.
pub(super) struct AesGcm {
    frame: AesFrame,
    bits: AesBits,
    /// The current one first.
    keys: Vec<MasterKey>,
    random: SystemRandom,
}

impl AesGcm {
    /// Reads the key files; the first is the current one.
    ///
    /// # Errors
    /// If one of them cannot be used.
    pub(super) fn open(frame: AesFrame, bits: AesBits, paths: &[&str]) -> Result<Self, L2Error> {
        let keys = paths.iter().map(|path| MasterKey::read(path));
        Ok(Self {
            frame,
            bits,
            keys: keys.collect::<Result<_, _>>()?,
            random: SystemRandom::new(),
        })
    }

    /// Key of an object, and what is authenticated with each segment of it. `random` are the random bytes of its head.
    fn key(
        &self,
        master: &MasterKey,
        object: &ObjectSpec,
        random: &[u8],
    ) -> (LessSafeKey, Vec<u8>) {
        if self.frame == AesFrame::Lmcache {
            let key = master.of_salt(object.key.cache_salt(), self.bits);
            return (key, Vec::new());
        }
        let name = object.key.text().name(KeyShape::Grouped);
        let mut aad = vec![self.frame.version()];
        aad.extend_from_slice(&master.id());
        aad.extend_from_slice(&object.len.to_le_bytes());
        aad.extend_from_slice(&object.layout.to_le_bytes());
        aad.extend_from_slice(name.as_bytes());
        (master.of_object(&name, random, self.bits), aad)
    }

    /// Nonce of a segment.
    fn nonce(&self, random: &[u8], number: u64) -> Nonce {
        let mut nonce = [0; NONCE_LEN];
        match self.frame {
            AesFrame::Lmcache => nonce.copy_from_slice(&random[..NONCE_LEN]),
            AesFrame::Bound => nonce[..8].copy_from_slice(&number.to_le_bytes()),
        }
        Nonce::assume_unique_for_key(nonce)
    }

    /// Encrypts with these random bytes, as many as the frame has.
    fn seal(
        &self,
        object: &ObjectSpec,
        from: &Buffer,
        to: &mut [u8],
        random: &[u8],
    ) -> Result<(), L2Error> {
        let impossible = || L2Error::new(ErrorKind::Refused, "the object cannot be encrypted");
        let master = self.keys.first().ok_or_else(impossible)?;
        let (head, mut rest) = to
            .split_at_mut_checked(self.frame.head_len())
            .ok_or_else(impossible)?;
        let (prefix, random_at) = head.split_at_mut(self.frame.prefix_len());
        prefix[0] = self.frame.version();
        if self.frame == AesFrame::Bound {
            prefix[1..].copy_from_slice(&master.id());
        }
        random_at.copy_from_slice(random);
        let (key, aad) = self.key(master, object, random);
        let mut at = 0;
        for number in 0.. {
            let len = self.frame.segment().min(rest.len().saturating_sub(TAG_LEN));
            let (segment, behind) = rest.split_at_mut(len);
            let (tag_at, behind) = behind
                .split_first_chunk_mut::<TAG_LEN>()
                .ok_or_else(impossible)?;
            from.read(at, segment)?;
            let nonce = self.nonce(random, number);
            let tag = key.seal_in_place_separate_tag(nonce, Aad::from(&aad), segment);
            tag_at.copy_from_slice(tag.map_err(|_| impossible())?.as_ref());
            at += len as u64;
            rest = behind;
            if rest.is_empty() {
                break;
            }
        }
        Ok(())
    }
}

impl Transform for AesGcm {
    fn kind(&self) -> &'static str {
        "aesgcm"
    }

    fn fingerprint(&self) -> String {
        format!("aesgcm {} {}", self.frame.name(), self.bits.number())
    }

    fn verifies(&self) -> bool {
        self.frame == AesFrame::Bound
    }

    fn stored_len(&self, len: u64) -> Option<u64> {
        self.frame.stored_len(len)
    }

    fn encode(&self, object: &ObjectSpec, from: &Buffer, to: &mut [u8]) -> Result<(), L2Error> {
        let mut random = [0; RANDOM_LEN];
        let random = &mut random[..self.frame.head_len() - self.frame.prefix_len()];
        let none = |_| L2Error::new(ErrorKind::Unavailable, "the system gives no random bytes");
        self.random.fill(random).map_err(none)?;
        self.seal(object, from, to, random)
    }

    fn decode(&self, object: &ObjectSpec, from: &mut [u8], to: &Buffer) -> Result<(), L2Error> {
        let corrupt = |what: &str| L2Error::new(ErrorKind::Corrupt, what);
        if self.stored_len(object.len) != Some(from.len() as u64) {
            return Err(corrupt("has another length"));
        }
        let (head, mut rest) = from.split_at_mut(self.frame.head_len());
        let (prefix, random) = head.split_at(self.frame.prefix_len());
        if prefix[0] != self.frame.version() {
            return Err(corrupt("is not encrypted in this frame"));
        }
        let master = match self.frame {
            AesFrame::Lmcache => self.keys.first(),
            AesFrame::Bound => self.keys.iter().find(|key| key.id() == prefix[1..]),
        };
        let Some(master) = master else {
            let id = hex::encode(&prefix[1..]);
            let line = format!("was encrypted with the key {id}, which is not configured");
            return Err(L2Error::new(ErrorKind::Refused, line));
        };
        let what = match self.frame {
            AesFrame::Lmcache => "is damaged, or was encrypted with another key",
            AesFrame::Bound => "is damaged, or another object's",
        };
        let (key, aad) = self.key(master, object, random);
        let mut at = 0;
        for number in 0.. {
            let len = self.frame.segment().min(rest.len().saturating_sub(TAG_LEN));
            let (segment, behind) = rest.split_at_mut(len);
            let (tag, behind) = behind
                .split_first_chunk_mut::<TAG_LEN>()
                .ok_or_else(|| corrupt(what))?;
            let nonce = self.nonce(random, number);
            let tag = Tag::from(*tag);
            let opened = key.open_in_place_separate_tag(nonce, Aad::from(&aad), tag, segment, 0..);
            let plain = opened.map_err(|_| corrupt(what))?;
            to.write(at, plain)?;
            at += len as u64;
            rest = behind;
            if rest.is_empty() {
                break;
            }
        }
        Ok(())
    }

    fn report(&self, status: &mut Map<String, Value>) {
        status.insert("frame".into(), self.frame.name().into());
        status.insert("aes_bits".into(), self.bits.number().into());
        let ids = self
            .keys
            .iter()
            .map(|key| Value::from(hex::encode(key.id())));
        status.insert("key_ids".into(), ids.collect());
    }
}

#[cfg(test)]
mod tests;
