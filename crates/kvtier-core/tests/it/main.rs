//! The cache, its keys and its eviction policies, from outside.

#![expect(clippy::unwrap_used, reason = "tests")]

mod cache_model;
mod cache_rules;
mod cache_stress;
mod cache_support;
mod events;
mod eviction_arc;
mod fragmentation;
mod hash_vectors;
mod key_parsing;
mod key_vectors;
mod ledger;
mod long_prompts;
mod losses;
mod retention;
mod tenant_rules;
mod window;
