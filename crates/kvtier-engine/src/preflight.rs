//! Preflight check: the memory and the GPUs that a start would ask for, without a start.

use std::path::PathBuf;
use std::sync::Arc;

use kvtier_common::error::{ErrorKind, Result};
use kvtier_common::state::existing_id;
use kvtier_config::{L1Restore, ServerConfig};
pub use kvtier_store::l1::EarlierL1;
use kvtier_store::l1::{ServerInstance, divide, find_earlier, kept_path, preflight_arena};
use kvtier_store::tenants::Salts;

use super::devices::Devices;

/// What was found.
#[derive(Debug)]
pub struct Preflight {
    /// Names of the GPUs, or why there are none.
    pub gpus: Result<Vec<String>>,
    /// A warning that the start would log.
    pub warning: Option<String>,
    /// The folder of the instance in the state directory, or why there is none.
    pub state: Result<PathBuf>,
    /// File that keeps L1 for the next server, or why there is none.
    pub kept: Result<PathBuf>,
    /// What becomes of L1 that an earlier server has left.
    pub earlier: EarlierL1,
}

/// Reserves what [`super::Engine::new`] would, and releases it.
///
/// # Errors
/// The line with which the start would end.
pub fn preflight(config: &ServerConfig) -> Result<Preflight> {
    let state = &config.state;
    let found = find_state(config)?;
    let base = state.base.as_ref().ok();
    let folder = base.and_then(|base| existing_id(base, &state.instance));
    let (gpus, warning) = {
        let arena = Arc::new(preflight_arena(config, folder.is_some())?);
        let devices = Devices::find(config, &arena)?;
        divide(&arena, config, &devices.numa_nodes())?;
        (devices.names(), devices.warning(config))
    };
    // Once the hugepages of that are free again: they may be those by which the earlier L1 grows.
    let instance = ServerInstance {
        // Without one, L1 that is there is of another folder.
        folder: folder.as_deref().unwrap_or_default(),
        tenants: Salts::of(config.tenants.salt_key()?).number(),
        record: None,
    };
    let (kept, earlier) = match find_earlier(config, instance) {
        Ok(earlier) => {
            let kept = found.clone().and_then(|_| kept_path(config));
            (kept, earlier)
        }
        Err(error) if error.kind() == ErrorKind::InUse && config.l1_restore == L1Restore::Auto => {
            (Err(error), EarlierL1::Absent)
        }
        Err(error) => return Err(error),
    };
    Ok(Preflight {
        gpus,
        warning,
        state: found,
        kept,
        earlier,
    })
}

/// The folder of the instance, or why a start would go on without one.
///
/// # Errors
/// Another server has it.
fn find_state(config: &ServerConfig) -> Result<Result<PathBuf>> {
    let base = match &config.state.base {
        Ok(base) => base,
        Err(reason) => return Ok(Err(reason.clone())),
    };
    match kvtier_common::state::preflight(base, &config.state.instance) {
        Err(error) if error.kind() == ErrorKind::InUse => Err(error.context("--state-dir")),
        found => Ok(found.map_err(|error| error.context("--state-dir cannot be used"))),
    }
}
