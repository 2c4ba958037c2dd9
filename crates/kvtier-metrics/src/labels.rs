//! Label sets, named and ordered as LMCache 0.5.6 has them where it has the metric.

use std::sync::Arc;

use prometheus_client::encoding::EncodeLabelSet;

/// Labels of LMCache's L1 counters.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(super) struct L1Labels {
    pub cache_salt: Arc<str>,
    pub l1_tag: &'static str,
}

/// Labels of LMCache's lookup counters.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(super) struct LookupLabels {
    pub cache_salt: Arc<str>,
    pub model_name: Arc<str>,
}

/// Labels of LMCache's counter of lookups that ended before any key was asked for.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(super) struct EarlyExitLabels {
    pub cache_salt: Arc<str>,
    pub model_name: Arc<str>,
    pub reason: &'static str,
}

/// Labels of LMCache's failure counters.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(super) struct FailureLabels {
    pub during: &'static str,
    pub model_name: Arc<str>,
}

/// Labels of what a tenant's limit refused.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(super) struct OverQuotaLabels {
    pub cache_salt: Arc<str>,
    pub during: &'static str,
}

/// Labels of LMCache's read failures.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(super) struct ReadFailureLabels {
    pub during: &'static str,
    pub model_name: Arc<str>,
    pub reason: &'static str,
}

/// Labels of LMCache's transfer counters.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(super) struct DeviceLabels {
    pub device: &'static str,
}

/// Labels of LMCache's loaded chunks.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(super) struct LoadedLabels {
    pub cache_salt: Arc<str>,
    pub model_name: Arc<str>,
    pub worker_id: u32,
}

/// Labels of the request counters.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(super) struct OperationLabels {
    pub operation: &'static str,
}

/// Labels of requests that got their operation's failure answer.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(super) struct RefusedLabels {
    pub operation: &'static str,
    pub reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(super) struct BuildLabels {
    pub version: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(super) struct L1GaugeLabels {
    pub backend: &'static str,
    pub l1_tag: &'static str,
}

/// The tenant alone.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(super) struct SaltLabels {
    pub cache_salt: Arc<str>,
}

/// A tier by its name.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(super) struct TierLabels {
    pub l2_name: Arc<str>,
}

/// A tier by its name and number.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(super) struct AdapterLabels {
    pub adapter_index: u64,
    pub l2_name: Arc<str>,
}

/// A kind of call of a tier.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(super) struct CallLabels {
    pub call: &'static str,
    pub l2_name: Arc<str>,
}

/// Failures of a tier.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(super) struct TierFailureLabels {
    pub l2_name: Arc<str>,
    pub reason: &'static str,
}

/// Labels of LMCache's failed prefetches.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(super) struct PrefetchFailureLabels {
    pub model_name: Arc<str>,
    pub reason: &'static str,
}

/// How far a prefetch is.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(super) struct PhaseLabels {
    pub phase: &'static str,
}

/// Labels of LMCache's number of adapters that are stored to.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(super) struct StoreAdaptersLabels {
    pub l1_tag: &'static str,
    pub state: &'static str,
}

/// Labels of LMCache's number of adapters that are asked.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(super) struct AdaptersLabels {
    pub state: &'static str,
}
