//! KV events for Python: what the server has stored and removed since they were last taken.
//!
//! The mutex guards that; no other lock is acquired inside. The client's I/O thread acquires it for each batch, a scheduler for each call.

use std::collections::HashMap;
use std::sync::Arc;

use kvtier_client::proto::request::Subscription;
use kvtier_client::proto::response::{EventBatch, EventRecord};
use kvtier_client::{Client, ClientError, KvEventUpdate};
use kvtier_common::sync::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::prompt::{first_previous, hash_chunk};

/// Hash of a chunk -> whether it was stored last, not removed.
type Changes = HashMap<Vec<u8>, bool>;

/// Limit of chunks that wait to be taken. Beyond it their events are lost.
const MAX_CHUNKS: usize = 1 << 18;

/// The server does not hash as [`crate::prompt::Prompt`] does.
const OTHER_HASHES: &str = "the server's chunk hashes are not BLAKE3 (--hash-algorithm)";

/// What has happened since the last [`KvEvents::take`].
#[derive(Default)]
struct UntakenEvents {
    /// Changes when events are lost.
    epoch: u64,
    /// Whether the server has answered on this connection.
    is_known: bool,
    incarnation: i64,
    /// Whether the hash of a stored chunk was compared.
    is_compared: bool,
    /// Why there is no stream.
    obstacle: Option<String>,
    /// Changes of L1, and of the tiers.
    changes: [Changes; 2],
}

impl UntakenEvents {
    fn apply(&mut self, update: KvEventUpdate<'_>) {
        match update {
            KvEventUpdate::Requested => {
                self.lose();
                (self.is_known, self.is_compared, self.obstacle) = (false, false, None);
            }
            KvEventUpdate::Ended(why) => self.end(why),
            KvEventUpdate::Batch(batch) if self.obstacle.is_none() => self.apply_batch(&batch),
            KvEventUpdate::Batch(_) => {}
        }
    }

    fn apply_batch(&mut self, batch: &EventBatch<'_>) {
        if !self.is_known || batch.lost || batch.incarnation != self.incarnation {
            self.lose();
        }
        (self.is_known, self.incarnation) = (true, batch.incarnation);
        for event in &batch.events {
            let is_stored = event.kind == "stored";
            let changes = match &*event.medium {
                Subscription::CPU => 0,
                Subscription::STORAGE => 1,
                _ => continue,
            };
            if is_stored
                && changes == 0
                && !std::mem::replace(&mut self.is_compared, true)
                && !is_hash(event)
            {
                return self.end(OTHER_HASHES.to_owned());
            }
            let hashes = event.block_hashes.iter().map(|hash| hash.to_vec());
            self.changes[changes].extend(hashes.map(|hash| (hash, is_stored)));
        }
        if self.changes.iter().map(HashMap::len).sum::<usize>() > MAX_CHUNKS {
            self.lose();
        }
    }

    fn lose(&mut self) {
        self.epoch += 1;
        self.changes = Default::default();
    }

    fn end(&mut self, why: String) {
        self.lose();
        (self.is_known, self.obstacle) = (true, Some(why));
    }
}

/// Whether a stored chunk has the hash that a client computes.
fn is_hash(event: &EventRecord<'_>) -> bool {
    let first = first_previous();
    let previous = event.parent_block_hash.as_deref().unwrap_or(&first);
    let hash = hash_chunk(previous, &event.token_ids);
    event.block_hashes.iter().all(|it| **it == hash)
}

#[pyclass(frozen, module = "kvtier")]
pub struct KvEvents {
    untaken: Arc<Mutex<UntakenEvents>>,
}

impl KvEvents {
    pub fn follow(client: &Client, model_name: &str) -> Result<Self, ClientError> {
        let untaken = Arc::<Mutex<UntakenEvents>>::default();
        let events = Arc::clone(&untaken);
        client.on_kv_events(
            model_name,
            Box::new(move |update| events.lock().apply(update)),
        )?;
        Ok(Self { untaken })
    }
}

#[pymethods]
impl KvEvents {
    #[getter]
    fn obstacle(&self) -> Option<String> {
        self.untaken.lock().obstacle.clone()
    }

    fn take<'py>(&self, py: Python<'py>) -> PyResult<Option<(u64, [Bound<'py, PyDict>; 2])>> {
        let mut untaken = self.untaken.lock();
        if !untaken.is_known {
            return Ok(None);
        }
        let (epoch, changes) = (untaken.epoch, std::mem::take(&mut untaken.changes));
        drop(untaken);
        let taken = [PyDict::new(py), PyDict::new(py)];
        for (taken, changes) in taken.iter().zip(changes) {
            for (hash, is_stored) in changes {
                taken.set_item(PyBytes::new(py, &hash), is_stored)?;
            }
        }
        Ok(Some((epoch, taken)))
    }
}
