//! Tenants beside each other: whatever one does, another finds, reads and holds what it would alone; and where their
//! salts appear.

mod alone;
mod bed;
mod hashed;
mod hostile;
mod isolation;
mod logs;
mod named;
mod others;
