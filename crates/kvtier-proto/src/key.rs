//! The key of a request: its tokens, model, worker and tenant.

use crate::chunk::{self, CHUNK_TOKENS};
use crate::wire::{self, DecodeError, InField, PACKED_TOKEN_BYTES, PackedToken, Reader};

/// Most code points a cache salt may have (LMCache 0.5.6).
pub const MAX_SALT_CHARS: usize = 128;

/// Most bytes that a cache salt can therefore have. Names made of keys must have space for them.
pub const MAX_SALT_BYTES: usize = 4 * MAX_SALT_CHARS;

/// The field of a key that names objects directly, in place of token ids: keys of [`OBJECT_KEY_BYTES`] each, one behind the other.
/// Only kvtier's own clients send it. Each stands for a chunk of `kvtier.chunk_tokens` tokens, a field that comes before it, and
/// is the hash of its object.
pub const OBJECT_KEYS: &str = "kvtier.keys";

/// Bytes of one of the [`OBJECT_KEYS`].
pub const OBJECT_KEY_BYTES: usize = 32;

/// Name of the optional feature by which a client recognizes a server that serves [`OBJECT_KEYS`] and `kvtier.find`.
pub const OBJECTS_FEATURE: &str = "kvtier.objects.1";

/// Fields of a key in its full and its packed form.
pub(crate) const FULL_KEY_FIELDS: usize = 10;

/// Fields of a key that has the chunk size, which only kvtier's own clients ask for.
pub(crate) const OWN_KEY_FIELDS: usize = FULL_KEY_FIELDS + 1;

/// The key of every lookup, store and retrieve (`IPCCacheServerKey` of LMCache 0.5.6).
///
/// `T` is what the caller's [`TokenReader`] made of the token ids.
#[derive(Debug, Clone, PartialEq)]
pub struct CacheKey<'a, T> {
    /// Model name, as the client decorated it. May contain `@`, which no object key may.
    pub model_name: &'a str,
    /// Workers that share the model's KV.
    pub world_size: u32,
    /// The worker; absent in keys of a scheduler, which mean all workers.
    pub worker_id: Option<u32>,
    /// Tokens per chunk, if the client asks for another size than the server's default; see [`chunk`].
    pub chunk_tokens: Option<u32>,
    /// The whole prompt known so far, not only the range.
    pub tokens: T,
    /// First token of the range, counted from the prompt's start.
    pub start: u64,
    /// End of the range (exclusive), counted from the prompt's start; may exceed the prompt.
    pub end: u64,
    /// The engine's request.
    pub request_id: &'a str,
    /// The tenant; empty for none. Checked by [`check_salt`].
    pub cache_salt: &'a str,
    /// Free-form settings of the request: the undecoded MessagePack map, if there is one.
    pub request_configs: Option<&'a [u8]>,
    /// How many workers will read each object; absent before 0.5.5. See [`CacheKey::readers`].
    pub num_kv_readers: Option<i64>,
}

/// The part of a key in front of its token ids, and their number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyHead<'a> {
    /// Model, as in [`CacheKey`].
    pub model_name: &'a str,
    /// Number of workers, as in [`CacheKey`].
    pub world_size: u32,
    /// Rank of the worker, as in [`CacheKey`].
    pub worker_id: Option<u32>,
    /// Tokens of one chunk, as in [`CacheKey`].
    pub chunk_tokens: Option<u32>,
    /// Token ids that are announced, at most the bytes that follow; for the keys of objects, the tokens that they stand for.
    pub token_count: usize,
}

impl<'a> KeyHead<'a> {
    /// Reads the head of a key that is a whole payload, without its token ids. `None` if it is malformed, or its fields are in
    /// another order than clients send them.
    #[must_use]
    pub fn peek(payload: &'a [u8]) -> Option<Self> {
        let mut reader = Reader::new(payload);
        let fields = reader.map_len().ok()?;
        let (mut model_name, mut world_size, mut worker_id) = (None, None, None);
        let mut chunk_tokens = None;
        for _ in 0..fields {
            match reader.str().ok()? {
                "model_name" => model_name = Some(reader.str().ok()?),
                "world_size" => world_size = Some(reader.int().ok()?),
                "worker_id" => worker_id = Some(reader.optional_int().ok()?),
                CHUNK_TOKENS => chunk_tokens = Some(chunk::read(&mut reader).ok()?),
                tokens @ ("token_ids" | "token_bytes" | OBJECT_KEYS) => {
                    return Some(Self {
                        model_name: model_name?,
                        world_size: world_size?,
                        worker_id: worker_id?,
                        chunk_tokens,
                        token_count: match tokens {
                            "token_ids" => reader.array_len().ok()?,
                            "token_bytes" => reader.bin().ok()?.len() / PACKED_TOKEN_BYTES,
                            _ => {
                                let keys = reader.bin().ok()?.len() / OBJECT_KEY_BYTES;
                                keys.saturating_mul(chunk_tokens? as usize)
                            }
                        },
                    });
                }
                _ => return None,
            }
        }
        None
    }
}

/// The fields of a key that a release sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KeyForm {
    /// Seven fields, without a salt: 0.4.2 and 0.4.3.
    Unsalted,
    /// Eight fields, with the salt: 0.4.4 to 0.5.4.
    Salted,
    /// Ten fields, with `request_configs` and `num_kv_readers`: 0.5.5 and 0.5.6.
    Full,
    /// Ten fields, with `token_bytes` in place of the token ids: four bytes per id, big-endian. From 0.5.7.
    Packed,
}

impl KeyForm {
    /// Whether a key with `fields` fields may be of this form. Full keys of 0.5.3 and 0.5.4 have no more
    /// fields than salted ones; a count that no release sends proves nothing.
    pub(crate) fn may_be(self, fields: usize, key: &[u8]) -> bool {
        match fields {
            7 => self == Self::Unsalted,
            8 => matches!(self, Self::Salted | Self::Full),
            // Eleven fields: only kvtier's own clients ask for a chunk size.
            FULL_KEY_FIELDS | OWN_KEY_FIELDS => match self {
                Self::Unsalted | Self::Salted => false,
                Self::Full => !is_packed(key),
                Self::Packed => is_packed(key),
            },
            _ => true,
        }
    }
}

/// Whether a key has its token ids packed, which [`KeyForm::Packed`] alone has.
pub(crate) fn is_packed(key: &[u8]) -> bool {
    let mut reader = Reader::new(key);
    let mut find = || {
        for _ in 0..reader.map_len()? {
            match reader.str()? {
                "token_bytes" => return Ok(true),
                "token_ids" => break,
                _ => reader.skip()?,
            }
        }
        Ok::<_, DecodeError>(false)
    };
    find().unwrap_or(false)
}

/// Turns the token ids of a key into what a caller needs of them.
pub trait TokenReader {
    /// What becomes of the token ids.
    type Output;

    /// Notes the chunk size that the key asks for, before its token ids are read.
    fn set_chunk_tokens(&mut self, _tokens: u32) {}

    /// Reads the `count` token ids of a `token_ids` array from the start of `data`, which is all that is left of the
    /// payload, and returns the result with the number of bytes the ids took.
    ///
    /// `count` never exceeds `data.len()`. Ids are ints of any width with 0 <= id < 2^32; implementations
    /// refuse everything else, most simply with [`wire::decode_tokens`].
    fn read(&mut self, count: usize, data: &[u8]) -> Result<(Self::Output, usize), DecodeError>;

    /// Reads the token ids of `token_bytes`. The result is that of [`TokenReader::read`] of the same ids.
    fn read_packed(&mut self, tokens: &[PackedToken]) -> Result<Self::Output, DecodeError>;

    /// Reads [`OBJECT_KEYS`].
    fn read_object_keys(
        &mut self,
        keys: &[[u8; OBJECT_KEY_BYTES]],
    ) -> Result<Self::Output, DecodeError>;
}

/// Decodes all token ids into a vector.
#[derive(Debug, Clone, Copy, Default)]
pub struct VecTokens;

impl TokenReader for VecTokens {
    type Output = Vec<u32>;

    fn read(&mut self, count: usize, data: &[u8]) -> Result<(Vec<u32>, usize), DecodeError> {
        let mut tokens = Vec::new();
        let consumed = wire::decode_tokens(count, data, &mut tokens)?;
        Ok((tokens, consumed))
    }

    fn read_packed(&mut self, tokens: &[PackedToken]) -> Result<Vec<u32>, DecodeError> {
        Ok(wire::unpack_tokens(tokens).collect())
    }

    fn read_object_keys(&mut self, _: &[[u8; OBJECT_KEY_BYTES]]) -> Result<Vec<u32>, DecodeError> {
        Err(DecodeError::new(
            "keys of objects have no tokens; allowed: token ids",
        ))
    }
}

/// Checks the token ids and keeps only their number.
#[derive(Debug, Clone, Copy, Default)]
pub struct SkipTokens;

impl TokenReader for SkipTokens {
    type Output = usize;

    fn read(&mut self, count: usize, data: &[u8]) -> Result<(usize, usize), DecodeError> {
        Ok((count, wire::skip_tokens(count, data)?))
    }

    fn read_packed(&mut self, tokens: &[PackedToken]) -> Result<usize, DecodeError> {
        Ok(tokens.len())
    }

    fn read_object_keys(&mut self, keys: &[[u8; OBJECT_KEY_BYTES]]) -> Result<usize, DecodeError> {
        Ok(keys.len())
    }
}

/// Token ids that can be written into a key.
pub trait TokenWriter {
    /// Name of the field that [`TokenWriter::write`] writes.
    fn field(&self) -> &'static str {
        "token_ids"
    }

    /// Appends the array of token ids, header included.
    fn write(&self, out: &mut Vec<u8>);

    /// Appends `token_bytes`, header included.
    fn write_packed(&self, out: &mut Vec<u8>) {
        let mut array = Vec::new();
        self.write(&mut array);
        let mut ids = Vec::new();
        let mut reader = Reader::new(&array);
        let count = reader.array_len().unwrap_or_default();
        // Written by `write`, it decodes.
        let _ = wire::decode_tokens(count, reader.rest(), &mut ids);
        let packed: Vec<u8> = ids.into_iter().flat_map(u32::to_be_bytes).collect();
        wire::write_bin(out, &packed);
    }
}

impl TokenWriter for [u32] {
    fn write(&self, out: &mut Vec<u8>) {
        wire::write_tokens(out, self);
    }
}

impl TokenWriter for Vec<u32> {
    fn write(&self, out: &mut Vec<u8>) {
        self.as_slice().write(out);
    }
}

impl<T: TokenWriter + ?Sized> TokenWriter for &T {
    fn field(&self) -> &'static str {
        (**self).field()
    }

    fn write(&self, out: &mut Vec<u8>) {
        (**self).write(out);
    }
}

impl<T: TokenWriter + ?Sized> TokenWriter for std::sync::Arc<T> {
    fn field(&self) -> &'static str {
        (**self).field()
    }

    fn write(&self, out: &mut Vec<u8>) {
        (**self).write(out);
    }
}

/// Token ids, or [`OBJECT_KEYS`], that are encoded already, header included, as [`wire::write_tokens`] or [`wire::write_bin`] made
/// them.
///
/// Spares a client that sends the same prompt again and again the encoding.
#[derive(Debug, Clone, Copy)]
pub struct EncodedTokens<'a>(pub &'a [u8]);

impl TokenWriter for EncodedTokens<'_> {
    fn field(&self) -> &'static str {
        match self.0.first() {
            Some(0xc4..=0xc6) => OBJECT_KEYS,
            _ => "token_ids",
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.0);
    }
}

impl<'a, T> CacheKey<'a, T> {
    /// How many workers will read each object of this key, as a lookup must pin it.
    ///
    /// Releases without `num_kv_readers` say it with the tensor-parallel size: more ranks than the world
    /// has pieces share each piece (MLA), otherwise each piece has one reader.
    #[must_use]
    pub fn readers(&self, tp_size: i64) -> i64 {
        match self.num_kv_readers {
            Some(readers) => readers,
            None if tp_size > i64::from(self.world_size) => tp_size,
            None => 1,
        }
    }

    /// Decodes a key that is a whole payload.
    pub fn decode<R: TokenReader<Output = T>>(
        payload: &'a [u8],
        tokens: &mut R,
    ) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(payload);
        let key = Self::read(&mut reader, tokens)?;
        reader.finish()?;
        Ok(key)
    }

    /// Reads a key: a map by name, unknown fields skipped, the first seven fields required.
    pub fn read<R: TokenReader<Output = T>>(
        reader: &mut Reader<'a>,
        tokens: &mut R,
    ) -> Result<Self, DecodeError> {
        let mut model_name = None;
        let mut world_size = None;
        let mut worker_id = None;
        let mut chunk_tokens = None;
        let mut token_ids = None;
        let mut start = None;
        let mut end = None;
        let mut request_id = None;
        let mut cache_salt = "";
        let mut request_configs = None;
        let mut num_kv_readers = None;
        reader.map(|name, value| {
            match name {
                "model_name" => model_name = Some(value.str()?),
                "world_size" => world_size = Some(value.int()?),
                "worker_id" => worker_id = Some(value.optional_int()?),
                CHUNK_TOKENS if token_ids.is_some() => {
                    return Err(DecodeError::new(
                        "the field stands behind the token ids; allowed: in front of them",
                    ));
                }
                CHUNK_TOKENS => {
                    let asked = chunk::read(value)?;
                    tokens.set_chunk_tokens(asked);
                    chunk_tokens = Some(asked);
                }
                "token_ids" => token_ids = Some(read_tokens(value, tokens)?),
                "token_bytes" => token_ids = Some(tokens.read_packed(read_pieces(value)?)?),
                OBJECT_KEYS if chunk_tokens.is_none() => {
                    return Err(DecodeError::new(format!(
                        "the field stands without {CHUNK_TOKENS}; allowed: behind it"
                    )));
                }
                OBJECT_KEYS => token_ids = Some(tokens.read_object_keys(read_pieces(value)?)?),
                "start" => start = Some(value.int()?),
                "end" => end = Some(value.int()?),
                "request_id" => request_id = Some(value.str()?),
                "cache_salt" => {
                    cache_salt = value.str()?;
                    check_salt(cache_salt)?;
                }
                "request_configs" => request_configs = read_configs(value)?,
                "num_kv_readers" => num_kv_readers = Some(value.int()?),
                _ => value.skip_unknown(name)?,
            }
            Ok(())
        })?;
        Ok(Self {
            model_name: required(model_name, "model_name")?,
            world_size: required(world_size, "world_size")?,
            worker_id: required(worker_id, "worker_id")?,
            chunk_tokens,
            tokens: required(token_ids, "token_ids")?,
            start: required(start, "start")?,
            end: required(end, "end")?,
            request_id: required(request_id, "request_id")?,
            cache_salt,
            request_configs,
            num_kv_readers,
        })
    }
}

impl<T: TokenWriter> CacheKey<'_, T> {
    /// Appends the key with the fields that `form` has, in the order the client sends them.
    ///
    /// A form without a salt or a reader count drops them; a full form writes 0 for an absent count.
    pub fn write(&self, form: KeyForm, out: &mut Vec<u8>) {
        let fields = match form {
            KeyForm::Unsalted => 7,
            KeyForm::Salted => 8,
            KeyForm::Full | KeyForm::Packed => FULL_KEY_FIELDS,
        };
        wire::write_map_len(out, fields + usize::from(self.chunk_tokens.is_some()));
        wire::write_str(out, "model_name");
        wire::write_str(out, self.model_name);
        wire::write_str(out, "world_size");
        wire::write_uint(out, u64::from(self.world_size));
        wire::write_str(out, "worker_id");
        match self.worker_id {
            Some(worker) => wire::write_uint(out, u64::from(worker)),
            None => wire::write_nil(out),
        }
        chunk::write(out, self.chunk_tokens);
        if form == KeyForm::Packed {
            wire::write_str(out, "token_bytes");
            self.tokens.write_packed(out);
        } else {
            wire::write_str(out, self.tokens.field());
            self.tokens.write(out);
        }
        wire::write_str(out, "start");
        wire::write_uint(out, self.start);
        wire::write_str(out, "end");
        wire::write_uint(out, self.end);
        wire::write_str(out, "request_id");
        wire::write_str(out, self.request_id);
        if form == KeyForm::Unsalted {
            return;
        }
        wire::write_str(out, "cache_salt");
        wire::write_str(out, self.cache_salt);
        if form == KeyForm::Salted {
            return;
        }
        wire::write_str(out, "request_configs");
        match self.request_configs {
            Some(raw) => out.extend_from_slice(raw),
            None => wire::write_nil(out),
        }
        wire::write_str(out, "num_kv_readers");
        wire::write_int(out, self.num_kv_readers.unwrap_or(0));
    }
}

/// Checks a cache salt: at most 128 code points, none of `@`, `/`, `\` and NUL (LMCache 0.5.6).
pub fn check_salt(salt: &str) -> Result<(), DecodeError> {
    if let Some(bad) = salt.chars().find(|c| matches!(c, '@' | '/' | '\\' | '\0')) {
        return Err(DecodeError::new(format!(
            "a cache salt must not contain {bad:?}; '@', '/', '\\' and NUL are refused"
        )));
    }
    // A code point takes at most four bytes, so most salts need no counting.
    if salt.len() > MAX_SALT_CHARS && salt.chars().count() > MAX_SALT_CHARS {
        return Err(DecodeError::new(format!(
            "a cache salt has at most {MAX_SALT_CHARS} characters, this one has {}",
            salt.chars().count()
        )));
    }
    Ok(())
}

fn read_tokens<R: TokenReader>(
    value: &mut Reader<'_>,
    tokens: &mut R,
) -> Result<R::Output, DecodeError> {
    let count = value.array_len()?;
    let (output, consumed) = tokens.read(count, value.rest())?;
    value.advance(consumed)?;
    Ok(output)
}

/// Bytes that are pieces of `N` bytes each.
fn read_pieces<'a, const N: usize>(value: &mut Reader<'a>) -> Result<&'a [[u8; N]], DecodeError> {
    let bytes = value.bin()?;
    match bytes.as_chunks() {
        (pieces, []) => Ok(pieces),
        _ => Err(DecodeError::new(format!(
            "{} bytes; allowed: a multiple of {N}",
            bytes.len()
        ))),
    }
}

/// The undecoded map of settings, or nothing for nil.
fn read_configs<'a>(value: &mut Reader<'a>) -> Result<Option<&'a [u8]>, DecodeError> {
    if value.nil()? {
        return Ok(None);
    }
    let before = value.rest();
    value.map(|_, setting| setting.skip())?;
    Ok(Some(&before[..before.len() - value.rest().len()]))
}

/// The value of a field that must be there.
pub(crate) fn required<T>(value: Option<T>, name: &str) -> Result<T, DecodeError> {
    value
        .ok_or_else(|| DecodeError::new("the field is missing and has no default"))
        .in_field(name)
}
