//! Tenants beside each other: whatever one does, another finds, reads and holds what it would alone; and where their
//! salts appear.
//!
//! A test program of its own, because it listens to the log of its process.
#![expect(clippy::unwrap_used, reason = "test")]

#[path = "tenants/alone.rs"]
mod alone;
#[path = "tenants/bed.rs"]
mod bed;
#[path = "tenants/hashed.rs"]
mod hashed;
#[path = "tenants/hostile.rs"]
mod hostile;
#[path = "tenants/isolation.rs"]
mod isolation;
#[path = "tenants/logs.rs"]
mod logs;
#[path = "tenants/others.rs"]
mod others;
#[path = "it/support.rs"]
#[expect(dead_code, reason = "what only the other test programs need")]
mod support;
