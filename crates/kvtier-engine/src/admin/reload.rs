//! Reload of the configuration: what may change while the server runs.

use std::sync::Arc;

use kvtier_common::error::Result;
use kvtier_config::Change;

use super::Admin;

impl Admin {
    /// Reads the file of `--config` again and applies it; returns what has changed. Reloads run one at a time.
    ///
    /// # Errors
    /// As [`ServerConfig::read_again`](kvtier_config::ServerConfig::read_again), or a tier cannot have another capacity; then
    /// nothing has changed.
    pub(crate) fn reload(&self) -> Result<Vec<Change>> {
        let before = self.context.config();
        let (after, changes) = before.read_again()?;
        if changes.is_empty() {
            return Ok(changes);
        }
        let l2 = self.context.l2.as_ref().zip(after.l2.as_ref());
        if let Some((l2, config)) = l2 {
            l2.check_config(config)?;
            let reserved = self.quotas.set_capacities(after.places());
            reserved.map_err(|what| what.context("l2-adapter").hint("no flag was changed"))?;
            l2.set_config(config.clone());
        }
        let (watermark, ratio) = (after.eviction_trigger_watermark, after.eviction_ratio);
        let default_limit = after.quotas.default_limit;
        // Before limits are enforced, and before the next background pass.
        self.context.l1.cache.configure_quotas(|quotas| {
            quotas.watermark = watermark;
            quotas.ratio = ratio;
        });
        *self.context.config.write() = Arc::new(after);
        if default_limit != before.quotas.default_limit {
            self.quotas.set_default_limit(default_limit);
        }
        Ok(changes)
    }
}
