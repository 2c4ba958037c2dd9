//! NIXL's library, loaded at run time through its C interface: it moves bytes between files and an arena.
//!
//! Nothing of NIXL is needed to build this, and without its library only [`Library::load`] fails. This module must never
//! know what a file or an object is called, how a file becomes visible, or what is stored in it.
//!
//! Why not the crate `nixl-sys`: it needs a C++ compiler and libclang to be built, and ends the process if the library is
//! missing.

mod agent;
mod error;
mod handles;
mod library;
mod table;
#[cfg(test)]
pub mod testing;
#[cfg(test)]
mod tests;

pub use agent::{Agent, NixlOutcome};
pub use error::NixlError;
pub use library::Library;
