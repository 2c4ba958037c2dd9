//! Prompts, encoded once.

use std::num::NonZeroUsize;

use kvtier_client::Prompt as Encoded;
use kvtier_proto::key::OBJECT_KEY_BYTES;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

/// Minimum of tokens in a chunk with a block hash: 8 for 256 bits, and the mark.
const MIN_TOKENS: usize = 9;

/// Marks a chunk with a block hash. It is no token of a model: vocabularies are much smaller.
const MARK: u32 = u32::MAX;

/// A chunk's hash, of its tokens and the hash of the chunk before it, as LMCache's servers hash by default.
pub fn hash_chunk(previous: &[u8], tokens: &[u32]) -> [u8; 32] {
    let mut bytes = previous.to_vec();
    bytes.extend(tokens.iter().flat_map(|token| token.to_be_bytes()));
    blake3::hash(&bytes).into()
}

/// Stands for the hash before a prompt's first chunk.
pub fn first_previous() -> [u8; 32] {
    hash_chunk(&[0; 8], &[0])
}

#[pyclass(frozen, module = "kvtier")]
pub struct Prompt {
    /// None for objects by their keys.
    tokens: Option<Vec<u32>>,
    /// Tokens that each object stands for; none for tokens.
    object_tokens: Option<u32>,
    encoded: Encoded,
}

impl Prompt {
    fn from_tokens(tokens: Vec<u32>) -> Self {
        let encoded = Encoded::new(&tokens);
        Self {
            tokens: Some(tokens),
            object_tokens: None,
            encoded,
        }
    }

    pub fn object_tokens(&self) -> Option<u32> {
        self.object_tokens
    }

    fn tokens(&self) -> PyResult<&[u32]> {
        let tokens = self.tokens.as_deref();
        tokens.ok_or_else(|| PyValueError::new_err("this prompt has keys of objects, no tokens"))
    }

    pub fn encoded(&self) -> &Encoded {
        &self.encoded
    }
}

#[pymethods]
impl Prompt {
    #[new]
    fn new(token_ids: Vec<u32>) -> Self {
        Self::from_tokens(token_ids)
    }

    /// A prompt that represents an engine's block hashes: one chunk per `blocks_per_chunk` of them, identified by the last
    /// one, which covers all earlier ones.
    ///
    /// The protocol has no field for hashes, and needs none: the server's hash of such a chunk depends on the same data as
    /// the engine's hash. Each chunk has 256 bits of it, after a mark that is no token of a model, so it equals no real
    /// prompt.
    #[staticmethod]
    fn from_block_hashes(
        block_hashes: Vec<Vec<u8>>,
        blocks_per_chunk: usize,
        chunk_tokens: usize,
    ) -> PyResult<Self> {
        if blocks_per_chunk == 0 {
            return Err(PyValueError::new_err(
                "blocks_per_chunk: 0; a positive number is needed",
            ));
        }
        if chunk_tokens < MIN_TOKENS {
            return Err(PyValueError::new_err(format!(
                "chunk_tokens: {chunk_tokens}; block hashes need chunks of at least {MIN_TOKENS} tokens"
            )));
        }
        let mut tokens = Vec::with_capacity(block_hashes.len() / blocks_per_chunk * chunk_tokens);
        for blocks in block_hashes.chunks_exact(blocks_per_chunk) {
            let last = &blocks[blocks_per_chunk - 1];
            let hash = blake3::hash(last);
            let end = tokens.len() + chunk_tokens;
            tokens.push(MARK);
            tokens.extend(
                hash.as_bytes()
                    .chunks_exact(4)
                    .map(|word| u32::from_be_bytes([word[0], word[1], word[2], word[3]])),
            );
            tokens.resize(end, 0);
        }
        Ok(Self::from_tokens(tokens))
    }

    #[staticmethod]
    fn from_keys(keys: Vec<Vec<u8>>, chunk_tokens: u32) -> PyResult<Self> {
        if chunk_tokens == 0 {
            return Err(PyValueError::new_err(
                "chunk_tokens: 0; a positive number is needed",
            ));
        }
        let object_key = |(position, key): (usize, Vec<u8>)| {
            <[u8; OBJECT_KEY_BYTES]>::try_from(key).map_err(|key| {
                PyValueError::new_err(format!(
                    "keys[{position}]: {} bytes; each key has {OBJECT_KEY_BYTES}",
                    key.len()
                ))
            })
        };
        let keys = keys.into_iter().enumerate().map(object_key);
        let keys = keys.collect::<PyResult<Vec<_>>>()?;
        Ok(Self {
            tokens: None,
            object_tokens: Some(chunk_tokens),
            encoded: Encoded::of_object_keys(&keys, chunk_tokens as usize),
        })
    }

    /// The prompt with `token_ids[start..start + length]` replaced by words derived from `identity`: for content that the
    /// tokens do not identify, such as the image of placeholders.
    fn with_identity(&self, start: usize, length: usize, identity: &[u8]) -> PyResult<Self> {
        let mut tokens = self.tokens()?.to_vec();
        let end = start
            .checked_add(length)
            .filter(|end| *end <= tokens.len())
            .ok_or_else(|| {
                PyValueError::new_err(format!(
                    "start, length: {start}, {length}; the prompt has {} tokens",
                    tokens.len()
                ))
            })?;
        // The replaced tokens are part of the identity.
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(identity.len() as u64).to_be_bytes());
        hasher.update(identity);
        for token in &tokens[start..end] {
            hasher.update(&token.to_be_bytes());
        }
        let mut words = hasher.finalize_xof();
        for token in &mut tokens[start..end] {
            let mut word = [0; 4];
            words.fill(&mut word);
            *token = u32::from_be_bytes(word);
        }
        Ok(Self::from_tokens(tokens))
    }

    #[pyo3(signature = (chunk_tokens, known = Vec::new()))]
    fn chunk_hashes<'py>(
        &self,
        py: Python<'py>,
        chunk_tokens: NonZeroUsize,
        mut known: Vec<Bound<'py, PyBytes>>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let chunks = self.tokens()?.chunks_exact(chunk_tokens.get());
        let behind = chunks.skip(known.len());
        let mut last = known
            .pop()
            .unwrap_or_else(|| PyBytes::new(py, &first_previous()));
        let hashes = behind.map(|tokens| {
            last = PyBytes::new(py, &hash_chunk(last.as_bytes(), tokens));
            last.clone()
        });
        Ok(hashes.collect())
    }

    /// The prompt followed by another one.
    fn extended(&self, more: &Self) -> PyResult<Self> {
        Ok(Self {
            tokens: Some([self.tokens()?, more.tokens()?].concat()),
            object_tokens: None,
            encoded: self.encoded.extended(&more.encoded),
        })
    }

    /// The first `length` tokens.
    fn prefix(&self, length: usize) -> PyResult<Self> {
        let tokens = self.tokens()?;
        Ok(Self::from_tokens(
            tokens[..length.min(tokens.len())].to_vec(),
        ))
    }

    fn __len__(&self) -> usize {
        self.encoded.len()
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.encoded.encoded().0 == other.encoded.encoded().0
    }

    fn __hash__(&self) -> u64 {
        let hash = blake3::hash(self.encoded.encoded().0);
        hash.as_bytes()
            .first_chunk::<8>()
            .map_or(0, |raw| u64::from_be_bytes(*raw))
    }

    fn __repr__(&self) -> String {
        format!("Prompt of {} tokens", self.encoded.len())
    }

    /// From four bytes per token, little-endian.
    #[staticmethod]
    fn _from_bytes(raw: &[u8]) -> PyResult<Self> {
        if !raw.len().is_multiple_of(4) {
            return Err(PyValueError::new_err(format!(
                "raw: {} bytes; a multiple of 4 is needed",
                raw.len()
            )));
        }
        Ok(Self::from_tokens(
            raw.chunks_exact(4)
                .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
                .collect(),
        ))
    }

    /// Pickling, to send prompts between an engine's processes.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyTuple>> {
        let py = slf.py();
        let raw: Vec<u8> = slf
            .get()
            .tokens()?
            .iter()
            .flat_map(|token| token.to_le_bytes())
            .collect();
        let make = slf.get_type().getattr("_from_bytes")?;
        PyTuple::new(
            py,
            [
                make.into_any(),
                PyTuple::new(py, [PyBytes::new(py, &raw)])?.into_any(),
            ],
        )
    }
}
