//! L1 or a tier, as far as explanations read it.

use std::sync::Arc;
use std::time::Duration;

use kvtier_config::EvictionPolicyName;
use kvtier_core::cache::{Cache, Loss, Page};
use kvtier_core::{ChunkHash, Namespace};
use kvtier_l2::tier::Tier;
use kvtier_store::l1::L1Allocator;

use super::super::SLICE;

/// A place of objects.
pub(super) enum ExplainedPlace<'a> {
    /// L1 and its eviction policy.
    L1(&'a Cache<L1Allocator>, EvictionPolicyName),
    /// A tier below it.
    Tier(&'a Arc<Tier>),
}

impl ExplainedPlace<'_> {
    /// `l1`, or the tier's name.
    pub(super) fn name(&self) -> &str {
        match self {
            Self::L1(..) => "l1",
            Self::Tier(tier) => tier.name(),
        }
    }

    /// Name of the eviction policy.
    pub(super) fn policy(&self) -> &'static str {
        match self {
            Self::L1(_, policy) => policy.kind().name(),
            Self::Tier(tier) => {
                let eviction = tier.eviction().unwrap_or_default();
                eviction.policy.name()
            }
        }
    }

    /// Whether it has each of these objects, a tier as far as its index knows. The lock is held for a slice at a time.
    pub(super) fn contains(&self, namespace: &Namespace, hashes: &[ChunkHash]) -> Vec<bool> {
        let contains = |hashes| match self {
            Self::L1(cache, _) => cache.contains(namespace, hashes),
            Self::Tier(tier) => tier.indexes(namespace, hashes),
        };
        hashes.chunks(SLICE).flat_map(contains).collect()
    }

    /// What it remembers of these objects. Reads all that it remembers, so it is asked once.
    pub(super) fn losses(
        &self,
        asked: &[(&Arc<Namespace>, &[ChunkHash])],
    ) -> Vec<Vec<Option<Loss>>> {
        match self {
            Self::L1(cache, _) => cache.losses(asked),
            Self::Tier(tier) => {
                let namespaces = asked.iter().map(|(it, _)| it.without_layout());
                let namespaces: Vec<_> = namespaces.collect();
                let asked = namespaces.iter().zip(asked);
                let asked: Vec<_> = asked.map(|(it, (_, hashes))| (it, *hashes)).collect();
                tier.losses(&asked)
            }
        }
    }

    /// How far back that is; `None` if nothing was forgotten yet.
    pub(super) fn losses_since(&self) -> Option<Duration> {
        match self {
            Self::L1(cache, _) => cache.losses_since(),
            Self::Tier(tier) => tier.losses_since(),
        }
    }

    /// Namespaces of the place that `which` accepts.
    pub(super) fn namespaces(&self, which: impl Fn(&Namespace) -> bool) -> Vec<Arc<Namespace>> {
        let (mut all, mut next) = (Vec::new(), Some(0));
        while let Some(from) = next {
            let page: Page<_> = match self {
                Self::L1(cache, _) => cache.namespaces(from, SLICE),
                Self::Tier(tier) => tier.namespaces(from, SLICE),
            };
            all.extend(page.entries.into_iter().filter(|it| which(it)));
            next = page.next;
        }
        all
    }
}
