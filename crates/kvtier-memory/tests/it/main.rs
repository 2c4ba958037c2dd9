//! Arenas, segments and their allocator, from outside.

#![expect(clippy::unwrap_used, reason = "tests")]

mod arena;
mod copy;
mod file;
mod guard_table;
mod segment;
