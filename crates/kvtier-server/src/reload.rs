//! Reload: the file of `--config`, tokens and certificates are read again.
//!
//! The mutex guards the turn to reload, held while files are read; the locks of what is changed are acquired inside. Requests do
//! not wait for it.

use std::sync::{Arc, OnceLock};

use kvtier_common::error::{Error, ErrorKind, Result};
use kvtier_common::sync::Mutex;
use kvtier_config::Change;
use kvtier_engine::Engine;
use kvtier_http::Access;
use kvtier_l2_resp::ReadPort;
use kvtier_observe::api::{ChangedFlag, Reloaded};

use crate::{logging, peers};

/// What a reload reaches.
pub struct Reloader {
    engine: Arc<Engine>,
    access: Arc<Access>,
    /// The port for peers, once it is served.
    pub(crate) peers: OnceLock<Arc<ReadPort>>,
    turn: Mutex<()>,
}

impl Reloader {
    pub(crate) fn new(engine: &Arc<Engine>, access: &Arc<Access>) -> Self {
        Self {
            engine: Arc::clone(engine),
            access: Arc::clone(access),
            peers: OnceLock::new(),
            turn: Mutex::new(()),
        }
    }

    /// Reads everything again. What has changed is used from here on; returns what that is, and logs it.
    ///
    /// # Errors
    /// Tokens or certificate cannot be used, the file of `--config` is invalid, or it changes flags that need a restart; then
    /// no flag changes. Or another reload is running.
    pub fn reload(&self) -> Result<Reloaded> {
        let Some(_turn) = self.turn.try_lock() else {
            return Err(Error::new(ErrorKind::InUse, "another reload is running"));
        };
        let mut checked = self.access.reload()?;
        if let Some(port) = self.peers.get() {
            checked.extend(peers::reload(port)?);
        }
        let reloaded = self.engine.admin().reload();
        let changes = reloaded.inspect_err(|error| {
            let checked = checked.join(", ");
            tracing::error!(%error, checked, "reload of the configuration failed; no flag was changed");
        })?;
        logging::set_level(&self.engine.config().log_level);
        for Change { flag, from, to } in &changes {
            tracing::info!(flag, %from, %to, "changed by a reload");
        }
        let changed = changes.into_iter().map(|change| ChangedFlag {
            flag: change.flag,
            from: change.from,
            to: change.to,
        });
        Ok(Reloaded {
            changed: changed.collect(),
            checked: checked.into_iter().map(str::to_owned).collect(),
        })
    }
}
