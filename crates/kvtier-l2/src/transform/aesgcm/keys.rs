//! Master keys, and the keys of objects that are derived from them.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

use ring::aead::{AES_128_GCM, AES_256_GCM, Algorithm, LessSafeKey, UnboundKey};
use ring::hkdf::{HKDF_SHA256, KeyType, Prk, Salt};
use zeroize::Zeroizing;

use crate::error::{ErrorKind, L2Error};

/// Longest key file in bytes.
const MAX_FILE: u64 = 1 << 20;

/// Bytes of a key file below which there is a warning.
const SHORT: usize = 16;

/// Bytes of an id.
pub(super) const ID_LEN: usize = 8;

/// A master key. Its bytes are never shown; the file's copy is overwritten after reading.
pub(super) struct MasterKey {
    prk: Prk,
    id: [u8; ID_LEN],
}

impl fmt::Debug for MasterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MasterKey({})", hex::encode(self.id))
    }
}

/// Length of derived bytes.
struct Bytes(usize);

impl KeyType for Bytes {
    fn len(&self) -> usize {
        self.0
    }
}

impl MasterKey {
    /// Reads the whole file, as LMCache does, line ends included.
    ///
    /// # Errors
    /// [`ErrorKind::Refused`] if it is not a file, cannot be read, is empty or too large.
    pub(super) fn read(path: &str) -> Result<Self, L2Error> {
        let refused = |why: String| {
            let line = format!("serde aesgcm: the key file {path:?} {why}");
            L2Error::new(ErrorKind::Refused, line)
        };
        // A pipe would block.
        let mut options = File::options();
        let options = options
            .read(true)
            .custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32);
        let unread = |error: std::io::Error| refused(format!("cannot be read: {error}"));
        let file = options.open(path).map_err(unread)?;
        let seen = file.metadata().map_err(unread)?;
        if !seen.is_file() {
            return Err(refused("is not a file; give a file with the key".into()));
        }
        if seen.len() > MAX_FILE {
            return Err(refused(format!(
                "has {} bytes; give one of at most {MAX_FILE}",
                seen.len()
            )));
        }
        // Its capacity never grows, which would leave copies.
        let mut bytes = Zeroizing::new(Vec::with_capacity(MAX_FILE as usize + 1));
        file.take(MAX_FILE + 1)
            .read_to_end(&mut bytes)
            .map_err(unread)?;
        if bytes.is_empty() {
            return Err(refused("is empty; give one with random bytes".into()));
        }
        if seen.mode() & 0o077 != 0 {
            let mode = format!("{:03o}", seen.mode() & 0o777);
            tracing::warn!(
                path,
                mode,
                "a key file can be used by others than its owner; use mode 400"
            );
        }
        if bytes.len() < SHORT {
            tracing::warn!(
                path,
                bytes = bytes.len(),
                "a key file is short; use 32 random bytes"
            );
        }
        Ok(Self::new(&bytes))
    }

    pub(super) fn new(master: &[u8]) -> Self {
        let prk = Salt::new(HKDF_SHA256, &[]).extract(master);
        let mut id = [0; ID_LEN];
        fill(&prk, &[b"kvtier-l2-aesgcm-key-id"], &mut id);
        Self { prk, id }
    }

    /// Digest of the key that tells keys apart. It is no secret.
    pub(super) fn id(&self) -> [u8; ID_LEN] {
        self.id
    }

    /// Key of all objects of a tenant, as LMCache derives it.
    pub(super) fn of_salt(&self, salt: &str, bits: AesBits) -> LessSafeKey {
        self.derive(&[b"lmcache-l2-aesgcm-v1", salt.as_bytes()], bits)
    }

    /// Key of one store of the object of this name, which has the tenant, by `random` bytes.
    pub(super) fn of_object(&self, name: &str, random: &[u8], bits: AesBits) -> LessSafeKey {
        self.derive(&[b"kvtier-l2-aesgcm-v2", random, name.as_bytes()], bits)
    }

    fn derive(&self, info: &[&[u8]], bits: AesBits) -> LessSafeKey {
        let algorithm = bits.algorithm();
        let mut bytes = Zeroizing::new([0; 32]);
        let bytes = &mut bytes[..algorithm.key_len()];
        fill(&self.prk, info, bytes);
        match UnboundKey::new(algorithm, bytes) {
            Ok(key) => LessSafeKey::new(key),
            Err(_) => unreachable!("the key has the length of its algorithm"),
        }
    }
}

/// Fills `out`, which has at most 32 bytes.
pub(super) fn fill(prk: &Prk, info: &[&[u8]], out: &mut [u8]) {
    let expanded = prk.expand(info, Bytes(out.len()));
    let filled = expanded.and_then(|expanded| expanded.fill(out));
    assert!(filled.is_ok(), "a few bytes are within the limits of HKDF");
}

/// Size of the derived keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AesBits {
    Aes128,
    Aes256,
}

impl AesBits {
    pub(crate) fn number(self) -> u32 {
        match self {
            Self::Aes128 => 128,
            Self::Aes256 => 256,
        }
    }

    fn algorithm(self) -> &'static Algorithm {
        match self {
            Self::Aes128 => &AES_128_GCM,
            Self::Aes256 => &AES_256_GCM,
        }
    }
}
