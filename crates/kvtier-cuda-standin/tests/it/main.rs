//! The stand-in, loaded as its users load it.

mod driver;
mod memory;
