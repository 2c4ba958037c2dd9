//! Text forms of keys: names in second tiers and file names.

use std::fmt::Write;

use super::shown::ShownSalt;

/// The field layout of a key's text forms, which changed between releases of LMCache.
///
/// Each release finds only what was written in its own shape.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KeyShape {
    /// `model@rank@group@hash[@salt]`, as LMCache 0.5.6.
    #[default]
    Grouped,
    /// `model@rank@hash[@salt]`, as LMCache 0.4.4. Keys of another group than 0 are written grouped.
    Ungrouped,
}

/// A key about to be written; see [`ObjectKey::text`](super::ObjectKey::text).
#[derive(Clone, Copy, Debug)]
pub struct KeyText<'a> {
    pub(super) chunk_hash: &'a [u8],
    pub(super) model_name: &'a str,
    pub(super) kv_rank: u64,
    pub(super) object_group_id: u32,
    pub(super) cache_salt: &'a str,
}

impl KeyText<'_> {
    /// The name in Redis, Valkey, S3 and other stores of whole objects: `model@02010201@0@hash[@salt]`.
    pub fn name(&self, shape: KeyShape) -> String {
        self.fields(self.model_name, "", shape)
    }

    /// The file name of the `fs` adapter: `model@0x02010201@0@hash[@salt].data`, each `/` of the model as `-SEP-`.
    ///
    /// A model name that holds `-SEP-` itself does not read back.
    pub fn file_name(&self, shape: KeyShape) -> String {
        let mut name = self.fields(&self.model_name.replace('/', "-SEP-"), "0x", shape);
        name.push_str(".data");
        name
    }

    /// [`Self::name`] for people and logs: the salt as [`ShownSalt`] prints it.
    pub fn shown(&self) -> String {
        let cache_salt = match self.cache_salt {
            "" => String::new(),
            salt => ShownSalt(salt).to_string(),
        };
        let cache_salt = &cache_salt;
        KeyText {
            cache_salt,
            ..*self
        }
        .name(Default::default())
    }

    fn fields(&self, model_name: &str, rank_prefix: &str, shape: KeyShape) -> String {
        let length = model_name.len() + self.chunk_hash.len() * 2 + self.cache_salt.len() + 32;
        let mut text = String::with_capacity(length);
        push(
            &mut text,
            format_args!("{model_name}@{rank_prefix}{:08x}@", self.kv_rank),
        );
        if shape == KeyShape::Grouped || self.object_group_id != 0 {
            push(&mut text, format_args!("{:x}@", self.object_group_id));
        }
        for byte in self.chunk_hash {
            text.push(char::from(HEX[usize::from(byte >> 4)]));
            text.push(char::from(HEX[usize::from(byte & 0xf)]));
        }
        if !self.cache_salt.is_empty() {
            push(&mut text, format_args!("@{}", self.cache_salt));
        }
        text
    }
}

const HEX: &[u8; 16] = b"0123456789abcdef";

fn push(text: &mut String, part: std::fmt::Arguments<'_>) {
    text.write_fmt(part).expect("a String takes any text");
}

/// Python's `bytes.fromhex`: pairs of digits, white space between pairs.
pub(super) fn hash_bytes(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let mut bytes = Vec::with_capacity(text.len() / 2);
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        rest = after;
        // ASCII white space as Python counts it, vertical tab included.
        if first.is_ascii_whitespace() || first == 0x0b {
            continue;
        }
        let (&second, after) = rest.split_first()?;
        rest = after;
        // Two hex digits make at most 255.
        bytes.push((digit(first)? << 4 | digit(second)?) as u8);
    }
    Some(bytes)
}
