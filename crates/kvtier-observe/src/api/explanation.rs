//! Bodies of `POST /cache/explain` and `POST /prefix/match`.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::de::{Error, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use utoipa::ToSchema;

/// A prompt, and the engine that would ask for it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExplainRequest {
    /// Model: the full name of the workers, or what is before its `#`.
    pub model_name: String,
    /// Workers of the engine; may be left out if all engines of the model have the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub world_size: Option<u32>,
    /// The prompt; at most 1,000,000 token ids. A text instead of a list is base64 of four bytes per id, big-endian, like
    /// `token_bytes` in keys of LMCache 0.5.7.
    #[serde(deserialize_with = "token_ids")]
    #[schema(value_type = TokenIds)]
    pub token_ids: Vec<u32>,
    /// The tenant; none by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_salt: Option<String>,
    /// Tokens per chunk of the engine; may be left out if all workers of the model have the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunk_size: Option<u64>,
}

/// Both forms of token ids, for the description of the API.
#[expect(
    dead_code,
    reason = "never made: an untagged value would be read twice"
)]
#[derive(ToSchema)]
#[serde(untagged)]
enum TokenIds {
    /// The ids.
    List(Vec<u32>),
    /// Base64 of four bytes per id, big-endian.
    Packed(String),
}

fn token_ids<'de, D: Deserializer<'de>>(reader: D) -> Result<Vec<u32>, D::Error> {
    struct EitherForm;
    impl<'de> Visitor<'de> for EitherForm {
        type Value = Vec<u32>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of token ids, or base64 of four bytes per id")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<u32>, A::Error> {
            let mut ids = Vec::new();
            while let Some(id) = list.next_element()? {
                ids.push(id);
            }
            Ok(ids)
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<Vec<u32>, E> {
            let bytes = BASE64.decode(text);
            let bytes = bytes.map_err(|_| E::invalid_value(Unexpected::Str(text), &self))?;
            let (packed, []) = bytes.as_chunks() else {
                let len = format!("{} bytes", bytes.len());
                return Err(E::invalid_value(Unexpected::Other(&len), &self));
            };
            Ok(packed.iter().map(|id| u32::from_be_bytes(*id)).collect())
        }
    }
    reader.deserialize_any(EitherForm)
}

/// How much of a prompt a server has, for a router.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct PrefixMatch {
    /// Tokens per chunk.
    pub chunk_size: u64,
    /// Whole chunks of the prompt.
    pub chunks: u64,
    /// Tokens that a lookup would find, in L1 and the indexes of the tiers.
    pub hit_tokens: u64,
    /// Tokens that it would find without the tiers.
    pub hit_tokens_l1: u64,
    /// Why a lookup would look for nothing, such as `no_gpu_context`; `null` if it would.
    pub refused: Option<String>,
    /// Load of the server.
    pub load: Load,
}

/// Load of a server. The fields are those of `/status`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Load {
    /// Requests of engines that hold or held something and have not ended.
    pub active_sessions: u64,
    /// Transfers in flight of workers that copy by themselves.
    pub pending_transfers: u64,
    /// Used share of L1.
    pub memory_usage_ratio: f64,
}

/// Chunks of a prompt, the tiers that have them, and why a lookup would miss.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Explanation {
    /// What a lookup would find, and why not more, in words.
    pub summary: String,
    /// Full name of the model that was looked for.
    pub model_name: String,
    /// Full names that begin with the name asked for, of workers and of the tenant's objects.
    pub model_names: Vec<String>,
    /// Workers of the engine.
    pub world_size: u32,
    /// Tokens per chunk.
    pub chunk_size: u64,
    /// Tokens of the prompt.
    pub tokens: u64,
    /// Whole chunks of the prompt.
    pub chunks: u64,
    /// Tokens that a lookup would find, in L1 and the tiers.
    pub hit_tokens: u64,
    /// Tokens that it would find without the tiers.
    pub hit_tokens_l1: u64,
    /// Why a lookup would look for nothing, such as `no_gpu_context`; `null` if it would.
    pub refused: Option<String>,
    /// The chunks, by object group and layout.
    pub rows: Vec<ExplainedRow>,
    /// Tiers that could not be asked, and why.
    pub failed_tiers: BTreeMap<String, String>,
    /// How far back losses are remembered, by `l1` or the tier's name, seconds; `null` is to the start of the server.
    pub remembered_seconds: BTreeMap<String, Option<u64>>,
    /// The latest lookups of this tenant and model, the latest first.
    pub recent_lookups: Vec<ExplainedLookup>,
}

/// Chunks of one object group in one layout.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct ExplainedRow {
    /// The object group.
    pub object_group_id: u32,
    /// Fingerprint of the layout, in hexadecimal digits; zeros where it is unknown.
    pub layout_fingerprint: String,
    /// Workers for which it is the same.
    pub workers: Vec<u32>,
    /// Chunks that it needs at the end of a prefix; `null` is all of them.
    pub window: Option<u32>,
    /// Chunks from the prompt's start: consecutive ones with the same state are one run.
    pub runs: Vec<ChunkRun>,
}

/// Consecutive chunks with the same state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct ChunkRun {
    /// The first one, counted from 0.
    pub first_chunk: u64,
    /// Number of chunks of the run.
    pub chunks: u64,
    /// The first token, counted from 0.
    pub first_token: u64,
    /// Number of tokens.
    pub tokens: u64,
    /// `l1`, `tier` or `missing`.
    pub state: String,
    /// Name of the tier that has them, or of the one that lost or refused them; `l1` is L1. Absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tier: Option<String>,
    /// Why they are missing: `evicted`, `removed`, `store_refused`, `other_layout`, `other_chunk_size`, `other_model`,
    /// `other_world_size`, `other_salt`, `not_asked` or `never_seen`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Why they were evicted or refused: `space`, `watermark`, `quota` or `staging`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// When the first of them was lost, seconds ago.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds_ago: Option<u64>,
    /// The layout, chunk size, model, world size or salt under which they are stored instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stored_as: Option<String>,
    /// State of the run in words.
    pub text: String,
}

/// A lookup of an engine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct ExplainedLookup {
    /// When it was asked, seconds ago.
    pub seconds_ago: u64,
    /// Full name of its model.
    pub model_name: String,
    /// Tokens asked for, in whole chunks.
    pub tokens: u64,
    /// Tokens found.
    pub hit_tokens: u64,
    /// Whether its first chunk is that of this prompt.
    pub same_start: bool,
    /// Why nothing was looked for; `null` if it was.
    pub refused: Option<String>,
}
