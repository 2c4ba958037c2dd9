//! Preflight check: the memory and the GPUs that a start would ask for, without a start.

use std::path::PathBuf;
use std::sync::Arc;

use kvtier_config::ServerConfig;
use kvtier_error::Result;
use kvtier_l1::{divide, kept_path, preflight_arena};
use kvtier_state::existing_id;

use super::devices::Devices;

/// What was found.
#[derive(Debug)]
pub struct Preflight {
    /// Names of the GPUs, or why there are none.
    pub gpus: Result<Vec<String>>,
    /// A warning that the start would log.
    pub warning: Option<String>,
    /// Where L1 is kept for the next server, or why it is not.
    pub kept: Result<PathBuf>,
}

/// Reserves what [`super::Engine::new`] would, and releases it.
///
/// # Errors
/// The line with which the start would end.
pub fn preflight(config: &ServerConfig) -> Result<Preflight> {
    let state = &config.state;
    let base = state.base.as_ref().ok();
    let has_folder = base.is_some_and(|base| existing_id(base, &state.instance).is_some());
    let arena = Arc::new(preflight_arena(config, has_folder)?);
    let devices = Devices::find(config, &arena)?;
    divide(&arena, config, &devices.numa_nodes())?;
    Ok(Preflight {
        gpus: devices.names(),
        warning: devices.warning(config),
        kept: kept_path(config),
    })
}
