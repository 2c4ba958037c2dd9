//! The text of `/metrics`.

use kvtier_tenants::TenantSource;

use super::Engine;

impl Engine {
    /// All metrics in Prometheus' text format.
    pub fn scrape(&self) -> String {
        let tiers = self.quotas.tiers();
        let tiers: Vec<_> = tiers.map(|tier| tier as &dyn TenantSource).collect();
        let most = usize::from(self.config.tenants.tenant_metrics);
        let _read = self.metrics.tenants.read(most, &tiers);
        self.metrics.encode(&self.readings())
    }
}
