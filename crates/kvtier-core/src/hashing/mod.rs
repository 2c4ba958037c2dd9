//! Chunk hashes: the identity of one chunk of tokens together with everything before it.
//!
//! Every hash takes the hash before it as input, so equal hashes mean equal tokens from the first one on. The values
//! are bit for bit those of LMCache 0.5.6, which makes a second tier written by it readable.

mod range;

use sha2::{Digest, Sha256};
use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

pub use range::{RangeError, lookup_chunks, store_chunks};

/// The seed of `sha256_cbor` where the environment variable `PYTHONHASHSEED` is not set (vLLM 0.32 and later).
pub const DEFAULT_SEED: &str = "vllm-none-hash";

/// The hash of one chunk and of all tokens before it; 32 bytes for every algorithm kvtier knows.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkHash(pub [u8; 32]);

impl ChunkHash {
    /// Bytes of a chunk hash.
    pub const LEN: usize = 32;

    /// The raw bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for ChunkHash {
    /// Lower-case hex, 64 digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.0 {
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

/// A text that is no chunk hash.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no chunk hash: 64 hex digits")]
pub struct BadChunkHash(String);

impl FromStr for ChunkHash {
    type Err = BadChunkHash;

    fn from_str(text: &str) -> Result<Self, BadChunkHash> {
        let mut hash = [0; Self::LEN];
        match hex::decode_to_slice(text, &mut hash) {
            Ok(()) => Ok(Self(hash)),
            Err(_) => Err(BadChunkHash(text.to_owned())),
        }
    }
}

impl fmt::Debug for ChunkHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChunkHash({self})")
    }
}

/// How tokens become chunk hashes. Servers that share a second tier must agree on it; clients never see it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum HashAlgorithm {
    /// BLAKE3 over the previous hash and the tokens as big-endian u32; LMCache's default.
    #[default]
    Blake3,
    /// SHA-256 over the canonical CBOR of `[previous hash, [tokens..], null]`, as vLLM's `sha256_cbor`.
    Sha256Cbor,
}

impl HashAlgorithm {
    /// The name used in configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Blake3 => "blake3",
            Self::Sha256Cbor => "sha256_cbor",
        }
    }

    /// Whether hashes depend on a seed.
    pub fn is_seeded(self) -> bool {
        self == Self::Sha256Cbor
    }
}

impl fmt::Display for HashAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for HashAlgorithm {
    type Err = AlgorithmError;

    /// `blake3`, `sha256_cbor`, or its alias `sha256_cbor_64bit` (the same 32-byte hash, despite the name).
    fn from_str(name: &str) -> Result<Self, AlgorithmError> {
        match name {
            "blake3" => Ok(Self::Blake3),
            "sha256_cbor" | "sha256_cbor_64bit" => Ok(Self::Sha256Cbor),
            "builtin" => Err(AlgorithmError::Builtin),
            "sha256" => Err(AlgorithmError::Pickled),
            _ => Err(AlgorithmError::Unknown(name.to_owned())),
        }
    }
}

/// A hash algorithm that kvtier does not offer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AlgorithmError {
    /// Python's own `hash()`.
    #[error(
        "hash algorithm \"builtin\" is Python's hash(): its values differ from one interpreter process to the next, \
         so nothing stored under them could be found again; use \"blake3\" or \"sha256_cbor\""
    )]
    Builtin,
    /// vLLM's SHA-256 over Python pickles.
    #[error(
        "hash algorithm \"sha256\" hashes Python pickles, whose bytes depend on the Python version; \
         use \"sha256_cbor\" (the same hash over CBOR) or \"blake3\""
    )]
    Pickled,
    /// Any other name.
    #[error(
        "unknown hash algorithm {0:?}; allowed are \"blake3\", \"sha256_cbor\" and \"sha256_cbor_64bit\""
    )]
    Unknown(String),
}

/// Hashes prompts chunk by chunk.
#[derive(Clone, Debug)]
pub struct ChunkHasher {
    algorithm: HashAlgorithm,
    chunk_size: NonZeroUsize,
    none_hash: ChunkHash,
}

impl ChunkHasher {
    /// `chunk_size` is in tokens. `seed` only matters to [`HashAlgorithm::Sha256Cbor`]: the value of `PYTHONHASHSEED`
    /// in the engine's environment, or [`DEFAULT_SEED`].
    pub fn new(algorithm: HashAlgorithm, chunk_size: NonZeroUsize, seed: &str) -> Self {
        let none_hash = match algorithm {
            // The integer 0 as eight big-endian bytes, then the chunk [0].
            HashAlgorithm::Blake3 => blake3_chunk(&[0; 8], &[0]),
            HashAlgorithm::Sha256Cbor => sha256_of(|cbor| cbor.str(seed).map(drop)),
        };
        Self {
            algorithm,
            chunk_size,
            none_hash,
        }
    }

    /// The algorithm.
    pub fn algorithm(&self) -> HashAlgorithm {
        self.algorithm
    }

    /// Tokens in a chunk.
    pub fn chunk_size(&self) -> NonZeroUsize {
        self.chunk_size
    }

    /// What stands in for the previous hash in front of the first chunk.
    pub fn none_hash(&self) -> ChunkHash {
        self.none_hash
    }

    /// The hash of one chunk that follows `previous`.
    pub fn hash_chunk(&self, previous: &ChunkHash, tokens: &[u32]) -> ChunkHash {
        match self.algorithm {
            HashAlgorithm::Blake3 => blake3_chunk(&previous.0, tokens),
            HashAlgorithm::Sha256Cbor => sha256_cbor_chunk(previous, tokens),
        }
    }

    /// The hashes of all full chunks of a prompt; a shorter rest at its end has none.
    pub fn hash_prompt(&self, tokens: &[u32]) -> Vec<ChunkHash> {
        self.hash_chunks(self.chunk_size, tokens)
    }

    /// Hashes of a prompt's full chunks of `chunk_size` tokens. Equal hashes mean equal chunk sizes: the number of tokens is
    /// part of what is hashed, and so is the hash before.
    pub fn hash_chunks(&self, chunk_size: NonZeroUsize, tokens: &[u32]) -> Vec<ChunkHash> {
        let mut previous = self.none_hash;
        let chunks = tokens.chunks_exact(chunk_size.get());
        chunks
            .map(|chunk| {
                previous = self.hash_chunk(&previous, chunk);
                previous
            })
            .collect()
    }
}

fn blake3_chunk(previous: &[u8], tokens: &[u32]) -> ChunkHash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(previous);
    // Pieces on the stack: many small updates would cost more than the hash.
    let mut bytes = [0; 1024];
    for piece in tokens.chunks(bytes.len() / 4) {
        for (to, token) in bytes.chunks_exact_mut(4).zip(piece) {
            to.copy_from_slice(&token.to_be_bytes());
        }
        hasher.update(&bytes[..piece.len() * 4]);
    }
    ChunkHash(hasher.finalize().into())
}

fn sha256_cbor_chunk(previous: &ChunkHash, tokens: &[u32]) -> ChunkHash {
    sha256_of(|cbor| {
        cbor.array(3)?
            .bytes(&previous.0)?
            .array(tokens.len() as u64)?;
        for &token in tokens {
            cbor.u32(token)?;
        }
        cbor.null().map(drop)
    })
}

type Cbor = minicbor::Encoder<Vec<u8>>;
type CborResult = Result<(), minicbor::encode::Error<std::convert::Infallible>>;

fn sha256_of(encode: impl FnOnce(&mut Cbor) -> CborResult) -> ChunkHash {
    let mut cbor = Cbor::new(Vec::new());
    encode(&mut cbor).expect("a Vec takes any number of bytes");
    ChunkHash(Sha256::digest(cbor.writer()).into())
}
