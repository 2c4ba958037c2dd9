//! L1, the traffic between it and second tiers, and the tenants of both.
//!
//! It must never know requests, workers or connections.

#![forbid(unsafe_code)]

pub mod l1;
pub mod tenants;
pub mod tiers;
