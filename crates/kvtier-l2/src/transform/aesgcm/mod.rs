//! `aesgcm`: objects encrypted by AES-GCM.
//!
//! | frame | bytes | key |
//! | --- | --- | --- |
//! | `lmcache` | `01`, IV 12, ciphertext, tag 16 | HKDF-SHA256 of the master key and the tenant's salt; nothing else is authenticated |
//! | `bound` | `02`, id of the master key 8, IV 12, ciphertext, tag 16 | HKDF-SHA256 of the master key and the object's name; authenticates the head, the length, the layout and the name |
//!
//! IVs are 96 random bits. With a key per tenant (`lmcache`) two of 2^32 objects have the same IV with a probability of
//! 2^-33, which is the bound to respect: change the master key before a tenant has stored that many. With a key per object
//! (`bound`) it holds for the stores of one object, so there is none in practice.

mod keys;

use ring::aead::{Aad, LessSafeKey, NONCE_LEN, Nonce, Tag};
use ring::rand::{SecureRandom, SystemRandom};
use serde_json::{Map, Value};

use kvtier_core::object_key::KeyShape;

use super::Transform;
use crate::error::{ErrorKind, L2Error};
use crate::object::{Buffer, ObjectSpec};
use keys::{ID_LEN, MasterKey};

pub(super) use keys::Bits;

const TAG_LEN: usize = 16;

/// Form of the stored bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Frame {
    /// LMCache's.
    Lmcache,
    /// kvtier's own, bound to its object.
    Bound,
}

impl Frame {
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

    /// Bytes before the IV.
    fn prefix_len(self) -> usize {
        match self {
            Self::Lmcache => 1,
            Self::Bound => 1 + ID_LEN,
        }
    }

    /// Bytes before the ciphertext.
    fn head_len(self) -> usize {
        self.prefix_len() + NONCE_LEN
    }

    /// Bytes beyond those of the object.
    fn overhead(self) -> usize {
        self.head_len() + TAG_LEN
    }
}

/// Encrypts with one master key; decrypts with any of several.
pub(super) struct AesGcm {
    frame: Frame,
    bits: Bits,
    /// The current one first.
    keys: Vec<MasterKey>,
    random: SystemRandom,
}

impl AesGcm {
    /// Reads the key files, of which the first is the current one.
    ///
    /// # Errors
    /// If one of them cannot be used.
    pub(super) fn open(frame: Frame, bits: Bits, paths: &[&str]) -> Result<Self, L2Error> {
        let keys = paths.iter().map(|path| MasterKey::read(path));
        Ok(Self {
            frame,
            bits,
            keys: keys.collect::<Result<_, _>>()?,
            random: SystemRandom::new(),
        })
    }

    fn random_iv(&self) -> Result<[u8; NONCE_LEN], L2Error> {
        let mut iv = [0; NONCE_LEN];
        let filled = self.random.fill(&mut iv);
        let none = |_| L2Error::new(ErrorKind::Unavailable, "the system gives no random bytes");
        filled.map_err(none)?;
        Ok(iv)
    }

    /// Key of an object, and what is authenticated with it.
    fn key(&self, master: &MasterKey, object: &ObjectSpec) -> (LessSafeKey, Vec<u8>) {
        match self.frame {
            Frame::Lmcache => {
                let key = master.of_salt(object.key.cache_salt(), self.bits);
                (key, Vec::new())
            }
            Frame::Bound => {
                let mut aad = vec![self.frame.version()];
                aad.extend_from_slice(&master.id());
                aad.extend_from_slice(&object.len.to_le_bytes());
                aad.extend_from_slice(&object.layout.to_le_bytes());
                aad.extend_from_slice(object.key.text().name(KeyShape::Grouped).as_bytes());
                (master.of_object(&object.key, self.bits), aad)
            }
        }
    }

    fn seal(
        &self,
        object: &ObjectSpec,
        from: &Buffer,
        to: &mut [u8],
        iv: [u8; NONCE_LEN],
    ) -> Result<(), L2Error> {
        let impossible = || L2Error::new(ErrorKind::Refused, "the object cannot be encrypted");
        let master = self.keys.first().ok_or_else(impossible)?;
        let (head, body) = to
            .split_at_mut_checked(self.frame.head_len())
            .ok_or_else(impossible)?;
        let (body, tag_at) = body
            .split_last_chunk_mut::<TAG_LEN>()
            .ok_or_else(impossible)?;
        let (prefix, iv_at) = head.split_at_mut(self.frame.prefix_len());
        prefix[0] = self.frame.version();
        if self.frame == Frame::Bound {
            prefix[1..].copy_from_slice(&master.id());
        }
        iv_at.copy_from_slice(&iv);
        from.read(0, body).map_err(|error| memory(&error))?;
        let (key, aad) = self.key(master, object);
        let nonce = Nonce::assume_unique_for_key(iv);
        let tag = key.seal_in_place_separate_tag(nonce, Aad::from(aad), body);
        tag_at.copy_from_slice(tag.map_err(|_| impossible())?.as_ref());
        Ok(())
    }
}

fn memory(error: &kvtier_memory::AccessError) -> L2Error {
    L2Error::new(ErrorKind::Memory, error.to_string())
}

impl Transform for AesGcm {
    fn kind(&self) -> &'static str {
        "aesgcm"
    }

    fn fingerprint(&self) -> String {
        format!("aesgcm {} {}", self.frame.name(), self.bits.number())
    }

    fn verifies(&self) -> bool {
        self.frame == Frame::Bound
    }

    fn stored_len(&self, len: u64) -> Option<u64> {
        let stored = len.checked_add(self.frame.overhead() as u64)?;
        isize::try_from(stored).is_ok().then_some(stored)
    }

    fn encode(&self, object: &ObjectSpec, from: &Buffer, to: &mut [u8]) -> Result<(), L2Error> {
        self.seal(object, from, to, self.random_iv()?)
    }

    fn decode(&self, object: &ObjectSpec, from: &mut [u8], to: &Buffer) -> Result<(), L2Error> {
        let corrupt = |what: &str| L2Error::new(ErrorKind::Corrupt, what);
        let short = || corrupt("is too short for its frame");
        let (head, body) = from
            .split_at_mut_checked(self.frame.head_len())
            .ok_or_else(short)?;
        let (prefix, iv) = head.split_at(self.frame.prefix_len());
        let (body, tag) = body.split_last_chunk_mut::<TAG_LEN>().ok_or_else(short)?;
        if prefix[0] != self.frame.version() {
            return Err(corrupt("is not encrypted in this frame"));
        }
        let master = match self.frame {
            Frame::Lmcache => self.keys.first(),
            Frame::Bound => self.keys.iter().find(|key| key.id() == prefix[1..]),
        };
        let Some(master) = master else {
            let id = hex::encode(&prefix[1..]);
            let line = format!("was encrypted with the key {id}, which is not configured");
            return Err(L2Error::new(ErrorKind::Refused, line));
        };
        let (key, aad) = self.key(master, object);
        let nonce = Nonce::try_assume_unique_for_key(iv).map_err(|_| short())?;
        let opened =
            key.open_in_place_separate_tag(nonce, Aad::from(aad), Tag::from(*tag), body, 0..);
        let what = match self.frame {
            Frame::Lmcache => "is damaged, or was encrypted with another key",
            Frame::Bound => "is damaged, or another object's",
        };
        let plain = opened.map_err(|_| corrupt(what))?;
        if plain.len() as u64 != object.len {
            return Err(corrupt("has another length"));
        }
        to.write(0, plain).map_err(|error| memory(&error))
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
