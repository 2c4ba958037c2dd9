//! Arenas, segments and their allocator, from outside.

#![expect(clippy::unwrap_used, reason = "tests")]

mod arena;
mod copy;
mod file;
mod guard_table;
#[path = "../../../kvtier/tests/it/huge_mount.rs"]
#[expect(dead_code, reason = "the rest is for the tests of the program")]
mod huge_mount;
mod segment;
