//! An adapter with its breakers, deadlines, retries and limit.
//!
//! A mutex guards the breaker of a class of calls; no other lock is acquired inside.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvtier_common::sync::Mutex;
use kvtier_core::object_key::ObjectKey;
use kvtier_core::random::SplitMix64;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::Guards;
use super::breaker::{Admitted, Breaker};
use crate::adapter::{
    Adapter, BoxFuture, Capabilities, ListPage, Listed, Loaded, Recovered, Stored, forward,
};
use crate::error::{ErrorKind, L2Error};
use crate::object::{LoadItem, ObjectSpec, StoreItem};

/// Longest pause before a retry, unless the first one is longer.
const MAX_PAUSE: Duration = Duration::from_secs(1);

const WRONG_COUNT: &str = "it answered for another number of them";

/// Class of calls that are bounded and counted together. Calls of one class never wait for those of another.
#[derive(Debug, Clone, Copy)]
enum CallClass {
    /// Lookups, listings, and the free bytes.
    Lookup,
    /// Loads.
    Load,
    /// Stores and deletes.
    Store,
}

/// Limits and counters of the calls of a [`CallClass`].
struct ClassState {
    /// Name in the status.
    name: &'static str,
    /// Deadline of a call, and of its waits for permits.
    time: Duration,
    permits: Arc<Semaphore>,
    /// Cloned by each call that waits for a permit.
    waiting: Arc<()>,
    /// Number of calls that the adapter answered. Each of them released a permit.
    answered: Arc<AtomicU64>,
    late: AtomicU64,
    crowded: AtomicU64,
    retried: AtomicU64,
    breaker: Mutex<Breaker>,
}

/// Operation and size of a call.
#[derive(Clone, Copy)]
struct GuardedCall {
    class: CallClass,
    /// Name in messages.
    name: &'static str,
    objects: usize,
}

impl GuardedCall {
    fn new(class: CallClass, name: &'static str, objects: usize) -> Self {
        Self {
            class,
            name,
            objects,
        }
    }
}

/// Time left to a call.
struct CallClock {
    /// Deadline, which each wait for a permit moves: a busy backend is not a late one.
    expires_at: Instant,
    /// Time left to waits for permits.
    queue: Duration,
}

/// Item of a call.
trait CallItem: Clone + Send + Sync + 'static {}

impl<I: Clone + Send + Sync + 'static> CallItem for I {}

/// Results of a call, one per item.
type Results<T> = Vec<Result<T, L2Error>>;

/// Function that sends items to an adapter.
type SendItems<I, T> = fn(&dyn Adapter, Vec<I>) -> BoxFuture<'_, Results<T>>;

/// An adapter with its guards around its calls. A recovery is not guarded: it runs in the background without a deadline.
pub(super) struct Guarded {
    inner: Arc<dyn Adapter>,
    guards: Guards,
    /// Number of pauses before retries.
    pauses: AtomicU64,
    classes: [ClassState; 3],
}

impl Guarded {
    pub(super) fn new(inner: Arc<dyn Adapter>, guards: &Guards) -> Self {
        let class = |(name, time)| ClassState {
            name,
            time,
            permits: Arc::new(Semaphore::new(guards.max_in_flight as usize)),
            waiting: Arc::default(),
            answered: Arc::default(),
            late: AtomicU64::new(0),
            crowded: AtomicU64::new(0),
            retried: AtomicU64::new(0),
            breaker: Mutex::new(Breaker::new(*guards)),
        };
        let classes = [
            ("lookup", guards.lookup_timeout),
            ("load", guards.load_timeout),
            ("store", guards.store_timeout),
        ];
        Self {
            inner,
            guards: *guards,
            pauses: AtomicU64::new(0),
            classes: classes.map(class),
        }
    }

    fn state(&self, call: GuardedCall) -> &ClassState {
        &self.classes[call.class as usize]
    }

    /// Runs a call that is answered as a whole.
    async fn run_whole<I: CallItem, T: Send + 'static>(
        &self,
        call: GuardedCall,
        request: I,
        send: SendItems<I, T>,
    ) -> Result<T, L2Error> {
        let result = self.run(call, vec![request], send).await.pop();
        result.unwrap_or_else(|| Err(self.error(call, ErrorKind::Refused, WRONG_COUNT)))
    }

    /// Runs a call with one result per item.
    async fn run<I: CallItem, T: Send + 'static>(
        &self,
        call: GuardedCall,
        items: Vec<I>,
        send: SendItems<I, T>,
    ) -> Results<T> {
        let count = items.len();
        // A call for nothing says nothing about the backend, so it needs no admission and is no probe.
        let has_breaker = self.guards.breaker_failures > 0 && call.objects > 0;
        let admitted = has_breaker.then(|| Admitted::new(&self.state(call).breaker));
        let admitted = match admitted.transpose() {
            Ok(admitted) => admitted,
            Err(reason) => return self.failed(call, count, ErrorKind::Unavailable, &reason),
        };
        let results = match self.send_in_time(call, items, send).await {
            Ok(results) => results,
            Err(kind) => self.expired(call, count, kind),
        };
        if let Some(admitted) = admitted {
            admitted.finish(&results, self.inner.kind(), call.class);
        }
        results
    }

    /// Sends items, and again those with a transient error. Items of a batch for which the backend was busy are for the caller to
    /// send again, since others are answered; a call that is answered as a whole is sent again.
    ///
    /// # Errors
    /// [`ErrorKind::Deadline`] or [`ErrorKind::Busy`] at the deadline. The work may continue: its result is dropped, and it
    /// holds its buffers until it ends.
    async fn send_in_time<I: CallItem, T: Send + 'static>(
        &self,
        call: GuardedCall,
        items: Vec<I>,
        send: SendItems<I, T>,
    ) -> Result<Results<T>, ErrorKind> {
        let (state, count) = (self.state(call), items.len());
        let is_whole = matches!(call.class, CallClass::Lookup);
        let mut clock = CallClock {
            expires_at: Instant::now() + state.time,
            queue: state.time,
        };
        let mut results = self.send(call, items.clone(), send, &mut clock).await?;
        for retry in 0..self.guards.retries {
            let is_again = |at: &usize| {
                let kind = results[*at].as_ref().err().map(L2Error::kind);
                kind.is_some_and(|kind| {
                    kind.is_transient() && (is_whole || kind != ErrorKind::Busy)
                })
            };
            let again: Vec<_> = (0..count).filter(is_again).collect();
            if again.is_empty() {
                break;
            }
            let drawn = self.pauses.fetch_add(1, Ordering::Relaxed);
            let random = SplitMix64::nth(self.guards.jitter_seed, drawn);
            let pause = back_off(self.guards.retry_pause, retry, random);
            let paused = timeout_at(clock.expires_at, sleep(pause)).await;
            paused.map_err(|_| ErrorKind::Deadline)?;
            let retried = again.len() as u64;
            state.retried.fetch_add(retried, Ordering::Relaxed);
            let call = GuardedCall {
                objects: call.objects + again.len() - count,
                ..call
            };
            let items = again.iter().map(|&at| items[at].clone()).collect();
            let sent = self.send(call, items, send, &mut clock).await?;
            for (at, result) in again.into_iter().zip(sent) {
                results[at] = result;
            }
        }
        Ok(results)
    }

    /// Sends items once there is a permit, in the order of arrival.
    ///
    /// They are sent by a task of their own, which holds the permit until the adapter has answered, also after the caller
    /// stopped waiting. So a stalled adapter holds the buffers of at most this many calls, and one that panics or answers for
    /// the wrong number of items affects only its own call.
    async fn send<I: CallItem, T: Send + 'static>(
        &self,
        call: GuardedCall,
        items: Vec<I>,
        send: SendItems<I, T>,
        clock: &mut CallClock,
    ) -> Result<Results<T>, ErrorKind> {
        let count = items.len();
        let failed = |kind, what| Ok(self.failed(call, count, kind, what));
        let state = self.state(call);
        let (began, before) = (Instant::now(), state.answered.load(Ordering::Relaxed));
        let waiting = Arc::clone(&state.waiting);
        let permit = timeout(clock.queue, Arc::clone(&state.permits).acquire_owned()).await;
        drop(waiting);
        let waited = began.elapsed();
        clock.expires_at += waited;
        clock.queue = clock.queue.saturating_sub(waited);
        let permit = match permit {
            Ok(Ok(permit)) => permit,
            Ok(Err(_)) => return failed(ErrorKind::Unavailable, "it is closed"),
            // If no permit was released, no call was answered.
            Err(_) if state.answered.load(Ordering::Relaxed) == before => {
                return Err(ErrorKind::Deadline);
            }
            Err(_) => return Err(ErrorKind::Busy),
        };
        let (adapter, answered) = (Arc::clone(&self.inner), Arc::clone(&state.answered));
        let work = tokio::spawn(async move {
            let results = send(&*adapter, items).await;
            answered.fetch_add(1, Ordering::Relaxed);
            drop(permit);
            results
        });
        match timeout_at(clock.expires_at, work).await {
            Err(_) => Err(ErrorKind::Deadline),
            Ok(Ok(results)) if results.len() == count => Ok(results),
            Ok(Ok(_)) => failed(ErrorKind::Refused, WRONG_COUNT),
            Ok(Err(error)) if error.is_panic() => failed(ErrorKind::Refused, "it panicked"),
            Ok(Err(_)) => failed(ErrorKind::Unavailable, "the runtime ends"),
        }
    }

    /// Counts a call that reached its deadline.
    fn expired<T>(&self, call: GuardedCall, items: usize, kind: ErrorKind) -> Results<T> {
        let state = self.state(call);
        let (counter, what) = match kind {
            ErrorKind::Busy => (&state.crowded, "no permit among the calls in flight"),
            _ => (&state.late, "no answer"),
        };
        counter.fetch_add(1, Ordering::Relaxed);
        let what = format!("{what} within {} ms", state.time.as_millis());
        self.failed(call, items, kind, &what)
    }

    /// Returns the results of a call that failed as a whole.
    fn failed<T>(
        &self,
        call: GuardedCall,
        items: usize,
        kind: ErrorKind,
        what: &str,
    ) -> Results<T> {
        let error = self.error(call, kind, what);
        (0..items).map(|_| Err(error.clone())).collect()
    }

    fn error(&self, call: GuardedCall, kind: ErrorKind, what: &str) -> L2Error {
        let (adapter, name, objects) = (self.inner.kind(), call.name, call.objects);
        let plural = if objects == 1 { "" } else { "s" };
        let line = format!("{adapter}: {name} of {objects} object{plural}: {what}");
        L2Error::new(kind, line)
    }
}

/// Sends requests one by one.
async fn each<'a, I: CallItem, T: Send>(
    requests: Vec<I>,
    send: impl Fn(I) -> BoxFuture<'a, Result<T, L2Error>>,
) -> Results<T> {
    let mut results = Vec::with_capacity(requests.len());
    for request in requests {
        results.push(send(request).await);
    }
    results
}

/// Returns the pause before retry number `retry` (from 0): `first`, doubled per earlier retry, up to [`MAX_PAUSE`]. `random`
/// takes away up to half of it, so that calls that failed together are not retried together.
pub(super) fn back_off(first: Duration, retry: u32, random: u64) -> Duration {
    let whole = first
        .saturating_mul(1 << retry.min(16))
        .min(first.max(MAX_PAUSE));
    let half = whole / 2;
    half + half.mul_f64(random as f64 / u64::MAX as f64)
}

impl Adapter for Guarded {
    forward!(kind, capabilities, recover, size_of, check, prefer);

    fn store(&self, batch: Vec<StoreItem>) -> BoxFuture<'_, Results<Stored>> {
        let call = GuardedCall::new(CallClass::Store, "store", batch.len());
        Box::pin(self.run(call, batch, |to, batch| to.store(batch)))
    }

    fn lookup(&self, batch: Vec<ObjectSpec>) -> BoxFuture<'_, Result<Vec<Option<u64>>, L2Error>> {
        let call = GuardedCall::new(CallClass::Lookup, "lookup", batch.len());
        let send: SendItems<_, _> = |to, all| Box::pin(each(all, |batch| to.lookup(batch)));
        Box::pin(async move {
            let found: Vec<_> = self.run_whole(call, batch, send).await?;
            if found.len() == call.objects {
                Ok(found)
            } else {
                Err(self.error(call, ErrorKind::Refused, WRONG_COUNT))
            }
        })
    }

    fn load(&self, batch: Vec<LoadItem>) -> BoxFuture<'_, Results<Loaded>> {
        let call = GuardedCall::new(CallClass::Load, "load", batch.len());
        Box::pin(self.run(call, batch, |to, batch| to.load(batch)))
    }

    fn delete(&self, keys: Vec<ObjectKey>) -> BoxFuture<'_, Results<bool>> {
        let call = GuardedCall::new(CallClass::Store, "delete", keys.len());
        Box::pin(self.run(call, keys, |to, keys| to.delete(keys)))
    }

    fn list(&self, from: Option<String>, limit: usize) -> BoxFuture<'_, Result<ListPage, L2Error>> {
        let call = GuardedCall::new(CallClass::Lookup, "list", limit);
        Box::pin(self.run_whole(call, (from, limit), |to, all| {
            Box::pin(each(all, |(from, limit)| to.list(from, limit)))
        }))
    }

    fn free_bytes(&self) -> BoxFuture<'_, Result<Option<u64>, L2Error>> {
        let call = GuardedCall::new(CallClass::Lookup, "free bytes", 1);
        Box::pin(self.run_whole(call, (), |to, all| {
            Box::pin(each(all, |()| to.free_bytes()))
        }))
    }

    fn status(&self) -> Value {
        let mut status = self.inner.status();
        let Some(map) = status.as_object_mut() else {
            return status;
        };
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed).into();
        let mut put = |name: &str, value: &dyn Fn(&ClassState) -> Value| {
            let one = |class: &ClassState| (class.name.to_owned(), value(class));
            map.insert(name.to_owned(), self.classes.iter().map(one).collect());
        };
        put("calls", &|class| {
            let free = class.permits.available_permits() as u64;
            json!({
                "in_flight": u64::from(self.guards.max_in_flight).saturating_sub(free),
                "waiting": Arc::strong_count(&class.waiting) - 1,
            })
        });
        if self.guards.retries > 0 {
            put("retried_items", &|class| read(&class.retried));
        }
        put("late_calls", &|class| read(&class.late));
        put("crowded_calls", &|class| read(&class.crowded));
        if self.guards.breaker_failures > 0 {
            let now = Instant::now().into_std();
            put("breaker", &|class| class.breaker.lock().report(now));
            let is_closed = |class: &ClassState| class.breaker.lock().is_closed();
            if !self.classes.iter().all(is_closed) {
                map.insert("is_healthy".into(), false.into());
            }
        }
        status
    }

    /// Waits for the calls in flight and refuses later ones.
    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            let time = self.guards.store_timeout;
            let closed = timeout(time, async {
                for class in &self.classes {
                    // Fails if it was closed before.
                    let _all = class.permits.acquire_many(self.guards.max_in_flight).await;
                    class.permits.close();
                }
                self.inner.close().await;
            });
            if closed.await.is_err() {
                tracing::warn!(
                    adapter = self.kind(),
                    "closing it takes longer than {} ms; continuing without it",
                    time.as_millis()
                );
            }
        })
    }
}
