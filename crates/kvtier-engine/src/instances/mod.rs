//! A registered worker: its pages or objects, its pings, and the copies that its end waits for.
//!
//! The mutex guards how its keys are rotated; no other lock is acquired inside.

mod fingerprint;
mod gate;
mod layout;
mod table;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvtier_common::error::{Error, ErrorKind, Result};
use kvtier_common::sync::Mutex;
use kvtier_core::GroupRow;
use kvtier_core::object_key::KeyScope;
use kvtier_device::{EngineMemory, Rope};
use kvtier_proto::descriptor::TensorDescriptor;
use kvtier_proto::generation::Release;
use kvtier_proto::inline::InlineForm;
use kvtier_proto::request::{EngineGroupInfo, InstanceId, LayoutHints};

pub use gate::CopyGuard;
use gate::Gate;
pub use layout::{EngineDrivenGroup, EngineDrivenLayout, GroupLayout, ModelLayout};
pub use table::Instances;

/// How long an unregistration waits for the last copies of its worker's pages. The longest copies take seconds.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(60);

/// Greatest common divisor; that of 0 and another number is the other.
pub fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// The rows of a lookup: rank after rank, object groups within.
pub fn rows(scope: &KeyScope, instances: &[Vec<Arc<Instance>>]) -> Arc<[GroupRow]> {
    let mut rows = Vec::new();
    for (kv_rank, layouts) in scope.kv_ranks().zip(instances) {
        for layout in layouts.iter().map(|instance| &instance.layout) {
            rows.extend(layout.groups.iter().map(|group| GroupRow {
                namespace: scope.namespace(kv_rank, group.id, layout.fingerprint),
                window: group.window,
                object_bytes: group.object_bytes,
            }));
        }
    }
    rows.into()
}

/// How a worker's bytes travel.
pub enum Mode {
    /// We copy between its pages and the arena.
    LmcacheDriven {
        /// Pages of the worker.
        memory: Arc<dyn EngineMemory>,
        /// Description of the pages, to recognise the same registration.
        registered: RegisteredPages,
    },
    /// The worker copies by itself.
    EngineDriven {
        /// Objects of the worker.
        layout: EngineDrivenLayout,
        /// Whether the worker sent its data although it was offered the pool, so it cannot map the pool.
        pickles: AtomicBool,
        /// How it sends and expects its data then.
        form: InlineForm,
    },
}

/// Pages as their worker has described them.
#[derive(Default, PartialEq)]
pub struct RegisteredPages {
    pub tensors: Vec<TensorDescriptor>,
    pub hints: LayoutHints,
    pub groups: Vec<EngineGroupInfo>,
}

/// Why a registered worker has no cache. Nothing of it is stored or served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unserved {
    /// The worker keeps only windows or states of some layers, and does not hold the blocks that it has stores read.
    Windowed,
}

impl Unserved {
    /// Name for metric labels and `/status`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Windowed => "windowed_client",
        }
    }
}

/// A worker that registered with an earlier process of the server, and whose client does not notice that the answers to some of
/// its requests went with that one. It is served until its next ping, which is answered "no": the client then drops what it
/// waits for, and registers again.
#[derive(Debug, Clone, Copy)]
pub struct Provisional {
    /// When the client may have dropped transfers that are still on their way, so that their pages are another request's.
    pub until: Duration,
}

/// Pings of a worker.
struct Pings {
    /// Milliseconds.
    last: AtomicU64,
    /// The shortest time between two, milliseconds; `u64::MAX` before the second.
    gap: AtomicU64,
}

/// A registered worker.
pub struct Instance {
    /// Id chosen by the worker.
    pub id: InstanceId,
    /// Name of the worker's model.
    pub model_name: Arc<str>,
    /// Workers that share the model's KV.
    pub world_size: u32,
    /// How its bytes travel.
    pub mode: Mode,
    /// Objects of the worker's model.
    pub layout: ModelLayout,
    /// Why it has no cache; `None` for a worker that is served.
    pub unserved: Option<Unserved>,
    /// Releases of LMCache that its client may be of.
    pub releases: &'static str,
    /// Whether it registered on a connection that began at an earlier server.
    pub is_again: bool,
    /// Set if the worker has not registered with this process, and its client has to.
    pub provisional: Option<Provisional>,
    /// When the connection by which alone it is known has ended.
    lost: OnceLock<Instant>,
    /// When it left the table.
    left: OnceLock<Instant>,
    /// Counts the times at which the client dropped its stores in flight: their pages may belong to other requests.
    dropped_stores: AtomicU64,
    /// Number of the worker in the world, known from its first transfer: a registration does not tell.
    worker: OnceLock<u32>,
    last_seen: AtomicU64,
    pinged: AtomicBool,
    pings: Pings,
    /// One reference for each retrieve in flight into its pages, and one of its own.
    retrieves: Arc<()>,
    gate: Arc<Gate>,
    rope: Mutex<Option<Arc<Rope>>>,
}

impl Instance {
    /// A worker that has just registered.
    pub fn new(
        id: InstanceId,
        model_name: &str,
        world_size: u32,
        mode: Mode,
        layout: ModelLayout,
        now: Duration,
    ) -> Self {
        Self {
            id,
            model_name: model_name.into(),
            world_size,
            mode,
            layout: layout.for_tiers(),
            unserved: None,
            releases: "",
            is_again: false,
            provisional: None,
            lost: OnceLock::new(),
            left: OnceLock::new(),
            dropped_stores: AtomicU64::new(0),
            worker: OnceLock::new(),
            last_seen: AtomicU64::new(millis(now)),
            pinged: AtomicBool::new(false),
            pings: Pings {
                last: AtomicU64::new(0),
                gap: AtomicU64::new(u64::MAX),
            },
            retrieves: Arc::default(),
            gate: Arc::default(),
            rope: Mutex::default(),
        }
    }

    /// How the keys in its pages are rotated, if its client has registered that.
    pub fn rope(&self) -> Option<Arc<Rope>> {
        self.rope.lock().clone()
    }

    /// Sets it.
    pub fn set_rope(&self, rope: Option<Rope>) {
        let before = std::mem::replace(&mut *self.rope.lock(), rope.map(Arc::new));
        drop(before);
    }

    /// Guard for a transfer: held while the instance's pages are copied.
    ///
    /// # Errors
    /// If the instance copies by itself, if it has left and its pages may belong to another request, or if it has too
    /// many transfers in flight.
    pub fn copying(self: &Arc<Self>) -> Result<CopyGuard> {
        let pages = self.pages().ok_or_else(|| {
            Error::refused(
                "the instance is registered for engine-driven transfers; allowed: prepare and commit",
            )
        })?;
        // Read before the loss is looked for, which comes before its count.
        let dropped_stores = self.dropped_stores.load(Ordering::Acquire);
        if self.lost.get().is_some() {
            return Err(Error::refused("the instance has lost its connection"));
        }
        Ok(CopyGuard {
            dropped_stores,
            memory: Arc::clone(pages),
            instance: Arc::clone(self),
            _guard: self.gate.enter()?,
        })
    }

    /// Starts no more copies of its pages, for any connection; those that run end soon.
    pub fn stop(&self) {
        self.gate.close();
        if let Some(pages) = self.pages() {
            pages.stop();
        }
    }

    /// [`Instance::stop`], and waits until nothing is copied.
    ///
    /// # Errors
    /// One line, if copies still run at `until`: their device does not respond.
    fn drain(&self, until: Instant) -> Result<()> {
        self.stop();
        match self.gate.wait(until) {
            0 => Ok(()),
            copying => Err(Error::new(
                ErrorKind::Unavailable,
                format!(
                    "{copying} transfers of instance {} have not ended since it left; its pages are not free",
                    self.id
                ),
            )),
        }
    }

    /// Time within which its client has abandoned no transfer; `None` if that is not bounded.
    ///
    /// # Errors
    /// It has passed.
    pub fn patience(&self, now: Duration) -> Result<Option<Duration>> {
        match self.provisional.map(|provisional| provisional.until) {
            Some(until) if until <= now => Err(Error::refused(
                "the worker registered with an earlier process of the server, and its client may have abandoned the request",
            )),
            until => Ok(until.map(|until| until - now)),
        }
    }

    /// Whether it copies by itself and cannot map the pool.
    pub fn pickles(&self) -> bool {
        match &self.mode {
            Mode::EngineDriven { pickles, .. } => pickles.load(Ordering::Relaxed),
            Mode::LmcacheDriven { .. } => false,
        }
    }

    /// Counts as one that pings, from now on.
    pub fn expect_pings(&self) {
        self.pinged.store(true, Ordering::Relaxed);
    }

    /// When it last pinged, and the shortest time between two pings; `None` before the first.
    pub fn pings(&self) -> Option<(Duration, Option<Duration>)> {
        let last = self.pings.last.load(Ordering::Relaxed);
        let gap = self.pings.gap.load(Ordering::Relaxed);
        let gap = (gap < u64::MAX).then(|| Duration::from_millis(gap));
        (last > 0).then(|| (Duration::from_millis(last), gap))
    }

    fn ping(&self, now: Duration) {
        self.expect_pings();
        self.seen(now);
        let last = self.pings.last.swap(millis(now), Ordering::Relaxed);
        if last > 0 {
            let gap = millis(now).saturating_sub(last);
            self.pings.gap.fetch_min(gap, Ordering::Relaxed);
        }
    }

    /// Whether it has left and nothing is copied.
    pub fn is_drained(&self) -> bool {
        self.gate.is_drained()
    }

    /// Whether it has left and its pages may still be copied, for at most [`DRAIN_TIMEOUT`]: a device that does not respond must not
    /// keep its client from registering again.
    fn is_draining(&self) -> bool {
        let left = self.left.get();
        left.is_some_and(|left| left.elapsed() < DRAIN_TIMEOUT) && !self.is_drained()
    }

    /// Greatest common divisor of the tokens of its blocks; 0 if that is not known.
    pub fn block_tokens(&self) -> u64 {
        match &self.mode {
            Mode::LmcacheDriven { memory, .. } => {
                let groups = memory.layout().kernel_groups().iter();
                groups.map(|group| group.tokens_per_block).fold(0, gcd)
            }
            Mode::EngineDriven { layout, .. } => u64::try_from(layout.block_size).unwrap_or(0),
        }
    }

    /// Whether the driver of a GPU is needed to release its pages.
    pub fn is_on_gpu(&self) -> bool {
        self.device() != "cpu"
    }

    /// Pages of the worker, unless it copies by itself.
    pub fn pages(&self) -> Option<&Arc<dyn EngineMemory>> {
        match &self.mode {
            Mode::LmcacheDriven { memory, .. } => Some(memory),
            Mode::EngineDriven { .. } => None,
        }
    }

    /// Name of the device that its pages are on, for the metrics.
    pub fn device(&self) -> &'static str {
        self.pages().map_or("cpu", |pages| pages.device())
    }

    /// The event of the answer to a transfer, given the one of the request.
    pub fn answer_event<'a>(&'a self, asked: &'a [u8], release: Release) -> &'a [u8] {
        let Some(pages) = self.pages() else {
            return asked;
        };
        match pages.answer_event(asked) {
            [] if !release.takes_empty_event() => pages.complete_event(),
            event => event,
        }
    }

    /// Reference to hold while a retrieve is in flight.
    pub fn retrieving(&self) -> Arc<()> {
        Arc::clone(&self.retrieves)
    }

    /// Notes that no client can name it any more.
    pub fn lose(&self) {
        let _ = self.lost.set(Instant::now());
        self.drop_stores();
    }

    /// Notes that the client drops its stores in flight: none of them may be committed.
    pub fn drop_stores(&self) {
        self.dropped_stores.fetch_add(1, Ordering::AcqRel);
    }

    /// Whether retrieves are in flight after the connection was lost, for at most [`DRAIN_TIMEOUT`]: a device that does not
    /// respond must not keep other workers from registering.
    fn is_lost_and_retrieving(&self) -> bool {
        let lost = self.lost.get();
        lost.is_some_and(|lost| lost.elapsed() < DRAIN_TIMEOUT) && self.is_retrieving()
    }

    /// Whether its objects are of one latent vector per token, which several ranks read.
    pub fn is_mla(&self) -> bool {
        match &self.mode {
            Mode::LmcacheDriven { memory, .. } => {
                let mut groups = memory.layout().kernel_groups().iter();
                groups.any(|group| group.format.is_mla())
            }
            Mode::EngineDriven { layout, .. } => layout.use_mla,
        }
    }

    /// Whether retrieves into its pages are in flight.
    pub fn is_retrieving(&self) -> bool {
        Arc::strong_count(&self.retrieves) > 1
    }

    /// Notes a sign of life.
    pub fn seen(&self, now: Duration) {
        self.last_seen.fetch_max(millis(now), Ordering::Relaxed);
    }

    fn may_be(&self, worker: u32) -> bool {
        self.worker.get().is_none_or(|known| *known == worker)
    }

    fn silent_for(&self, now: Duration) -> Duration {
        now.saturating_sub(Duration::from_millis(
            self.last_seen.load(Ordering::Relaxed),
        ))
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
