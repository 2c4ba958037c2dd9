//! Label sets, named and ordered as LMCache 0.5.6 has them where it has the metric.

use std::sync::Arc;

use prometheus_client::encoding::EncodeLabelSet;

macro_rules! label_sets {
    ($( $(#[$doc:meta])* $name:ident { $($label:ident: $type:ty),* } )*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
            pub(super) struct $name {
                $(pub $label: $type,)*
            }
        )*
    };
}

label_sets! {
    /// Labels of LMCache's L1 counters.
    L1Labels { cache_salt: Arc<str>, l1_tag: &'static str }
    /// Labels of LMCache's lookup counters.
    LookupLabels { cache_salt: Arc<str>, model_name: Arc<str> }
    /// Labels of LMCache's counter of lookups that ended before any key was asked for.
    EarlyExitLabels { cache_salt: Arc<str>, model_name: Arc<str>, reason: &'static str }
    /// Labels of why lookups missed.
    MissLabels { cause: &'static str, reason: &'static str, tier: Arc<str> }
    /// Labels of LMCache's failure counters.
    FailureLabels { during: &'static str, model_name: Arc<str> }
    /// Labels of what a tenant's limit refused.
    OverQuotaLabels { cache_salt: Arc<str>, during: &'static str }
    /// Labels of LMCache's read failures.
    ReadFailureLabels { during: &'static str, model_name: Arc<str>, reason: &'static str }
    /// Labels of LMCache's transfer counters.
    DeviceLabels { device: &'static str }
    /// Labels of LMCache's loaded chunks.
    LoadedLabels { cache_salt: Arc<str>, model_name: Arc<str>, worker_id: u32 }
    /// Labels of the request counters.
    OperationLabels { operation: &'static str }
    /// Labels of requests that got their operation's failure answer.
    RefusedLabels { operation: &'static str, reason: &'static str }
    /// The kind of a span.
    SpanLabels { span: &'static str }
    /// Labels of an exemplar, under the name that dashboards look for.
    TraceLabels { trace_id: String }
    /// Labels of lost spans.
    SpanLossLabels { reason: &'static str }
    /// What was asked for a session of an agent.
    SessionLabels { action: &'static str }
    /// Labels of the version.
    BuildLabels { version: &'static str }
    /// Labels of LMCache's L1 gauges.
    L1GaugeLabels { backend: &'static str, l1_tag: &'static str }
    /// The tenant alone.
    SaltLabels { cache_salt: Arc<str> }
    /// A tier by its name.
    TierLabels { l2_name: Arc<str> }
    /// A tier by its name and number.
    AdapterLabels { adapter_index: u64, l2_name: Arc<str> }
    /// A kind of call of a tier.
    CallLabels { call: &'static str, l2_name: Arc<str> }
    /// A transformation of a tier.
    SerdeLabels { l2_name: Arc<str>, serde: Arc<str> }
    /// Failures of a tier.
    TierFailureLabels { l2_name: Arc<str>, reason: &'static str }
    /// Labels of LMCache's failed prefetches.
    PrefetchFailureLabels { model_name: Arc<str>, reason: &'static str }
    /// How far a prefetch is.
    PhaseLabels { phase: &'static str }
    /// Labels of LMCache's number of adapters that are stored to.
    StoreAdaptersLabels { l1_tag: &'static str, state: &'static str }
    /// Labels of LMCache's number of adapters that are asked.
    AdaptersLabels { state: &'static str }
}

/// Why spans of traces are lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpanLoss {
    /// Work ended faster than spans were made of it.
    QueueFull,
    /// Too many spans waited for the collector.
    BufferFull,
    /// The collector would not take them.
    Rejected,
    /// The collector has not taken the spans for minutes.
    TimedOut,
    /// The server stopped first.
    Stopped,
}

impl SpanLoss {
    /// Metric label of the loss.
    pub fn name(self) -> &'static str {
        match self {
            Self::QueueFull => "queue_full",
            Self::BufferFull => "buffer_full",
            Self::Rejected => "rejected",
            Self::TimedOut => "timed_out",
            Self::Stopped => "stopped",
        }
    }
}
