//! Preflight check: what a start asks of memory and GPUs, without a start.

use std::sync::Arc;

use super::devices::Devices;
use kvtier_config::ServerConfig;
use kvtier_l1::{divide, rehearse_arena};

/// What was found.
#[derive(Debug)]
pub struct Rehearsal {
    /// Names of the GPUs, or why there are none.
    pub gpus: Result<Vec<String>, String>,
    /// What a start would warn of.
    pub warning: Option<String>,
}

/// Reserves what [`super::Engine::new`] would, and releases it.
///
/// # Errors
/// The line with which the start would end.
pub fn rehearse(config: &ServerConfig) -> Result<Rehearsal, String> {
    let arena = Arc::new(rehearse_arena(config)?);
    let devices = Devices::find(config, &arena)?;
    divide(&arena, config, &devices.numa_nodes())?;
    Ok(Rehearsal {
        gpus: devices.names(),
        warning: devices.warning(config),
    })
}
