//! What a start asks of memory and GPUs, for those who only want to know the answers.

use std::sync::Arc;

use super::devices::Devices;
use super::memory::{divide, rehearse_arena};
use crate::config::ServerConfig;

/// Finds what [`super::Engine::new`] would, and lets go of it; gives what should be known of it.
///
/// # Errors
/// The line with which the start would end.
pub fn rehearse(config: &ServerConfig) -> Result<Option<String>, String> {
    let arena = Arc::new(rehearse_arena(config)?);
    let devices = Devices::find(config, &arena)?;
    divide(&arena, config, &devices.numa_nodes())?;
    Ok(devices.warning(config))
}
