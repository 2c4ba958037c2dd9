//! Quotas: grants and limits of tenants. A tenant is a cache salt; the empty one is the tenant of requests without.
//!
//! Limits and shares apply to one cache, which is one tier: [`crate::cache::Cache::set_grant`].

/// Meaning of a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QuotaMode {
    /// Stores are accepted, and eviction brings the tenant back under its watermark, as LMCache's quotas do.
    #[default]
    Soft,
    /// A store that would take the tenant over its limit evicts the tenant's own objects, and is refused if that is not
    /// enough. Bytes being written count.
    Strict,
}

/// How a cache enforces limits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuotaConfig {
    /// Meaning of a limit.
    pub mode: QuotaMode,
    /// Bytes for tenants without a grant: `None` = unlimited, `Some(0)` = nothing, an allow-list.
    pub default_limit: Option<u64>,
    /// Soft mode: the part of its limit, 0 to 1, from which on a tenant loses objects.
    pub watermark: f64,
    /// Soft mode: the part of the bytes at the watermark, 0 to 1, that the tenant then loses.
    pub ratio: f64,
}

impl Default for QuotaConfig {
    /// Soft and unlimited; watermark and ratio are those of LMCache 0.5.6's eviction.
    fn default() -> Self {
        Self {
            mode: QuotaMode::Soft,
            default_limit: None,
            watermark: 0.8,
            ratio: 0.2,
        }
    }
}

/// Limit and reserved share of one tenant, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grant {
    /// Limit in bytes; `None` = unlimited.
    pub limit: Option<u64>,
    /// Other tenants cannot evict its objects if less than this could remain. At most the limit.
    pub reserved: u64,
}

/// Marks between which a tenant stays over quota: it starts above `high` and ends at `low`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Marks {
    pub(crate) high: u64,
    pub(crate) low: u64,
}

impl QuotaConfig {
    /// The marks of a tenant. Its reserved share is never over quota.
    pub(crate) fn marks(&self, Grant { limit, reserved }: Grant) -> Marks {
        let Some(limit) = limit else {
            return Marks {
                high: u64::MAX,
                low: u64::MAX,
            };
        };
        match self.mode {
            QuotaMode::Strict => Marks {
                high: limit,
                low: limit,
            },
            QuotaMode::Soft => {
                let watermark = limit as f64 * self.watermark;
                // At the watermark is over quota already, but zero bytes never are.
                let high = (watermark.ceil() as u64).saturating_sub(1);
                let low = (watermark * (1.0 - self.ratio)) as u64;
                Marks {
                    high: high.max(reserved),
                    low: low.min(high).max(reserved),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(limit: u64, reserved: u64) -> Grant {
        Grant {
            limit: Some(limit),
            reserved,
        }
    }

    #[test]
    fn soft_marks_follow_watermark_and_ratio() {
        let config = QuotaConfig::default();
        for (limit, high, low) in [(1000, 799, 640), (0, 0, 0), (1, 0, 0), (10, 7, 6)] {
            assert_eq!(
                config.marks(grant(limit, 0)),
                Marks { high, low },
                "{limit}"
            );
        }
        let unlimited = Grant::default();
        assert_eq!(config.marks(unlimited).high, u64::MAX);
        for (reserved, high, low) in [(700, 799, 700), (900, 900, 900), (1000, 1000, 1000)] {
            assert_eq!(config.marks(grant(1000, reserved)), Marks { high, low });
        }
    }

    #[test]
    fn strict_marks_are_the_limit() {
        let config = QuotaConfig {
            mode: QuotaMode::Strict,
            ..QuotaConfig::default()
        };
        for limit in [0, 1, 1000] {
            let marks = Marks {
                high: limit,
                low: limit,
            };
            assert_eq!(config.marks(grant(limit, limit)), marks);
        }
    }
}
