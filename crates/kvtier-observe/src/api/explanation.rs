//! Bodies of `POST /cache/explain`.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// A prompt, and the engine that would ask for it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExplainRequest {
    /// Model: the full name of the workers, or what is before its `#`.
    pub model_name: String,
    /// Workers of the engine; may be left out if all engines of the model have the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub world_size: Option<u32>,
    /// The prompt; at most 1,000,000 token ids.
    pub token_ids: Vec<u32>,
    /// The tenant; none by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_salt: Option<String>,
    /// Tokens per chunk of the engine; may be left out if all workers of the model have the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunk_size: Option<u64>,
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
