//! Transfers for which the server may touch pages.
//!
//! The engine may reuse pages only after the server has released them. The first of these proves it:
//!
//! 1. the server's answer to the transfer;
//! 2. if there is none (timeout, lost connection): its answer to an unregistration, which it sends when no copy for that
//!    instance is running or will start;
//! 3. if there is none either: the deadline sent with the request, after which the server starts no copy.
//!
//! The mutex guards these transfers; no other lock is acquired inside.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use kvtier_client::InstanceId;
use kvtier_common::sync::Mutex;

/// How long a copy that started before its deadline may take: a hundred times as long as copying a large chunk.
pub const COPY_MARGIN: Duration = Duration::from_secs(1);

struct ServerTransfer {
    instance: InstanceId,
    /// When the server has released the pages without telling.
    released_at: Instant,
    /// Why there is no answer.
    error: Option<String>,
}

/// Transfers of one worker, by the caller's numbers.
#[derive(Default)]
pub struct ServerTransfers(Mutex<HashMap<u64, ServerTransfer>>);

impl ServerTransfers {
    /// Adds a transfer that is about to be sent; the server does not start it after `deadline`.
    pub fn begin(&self, id: u64, instance: InstanceId, deadline: Instant) {
        let transfer = ServerTransfer {
            instance,
            released_at: deadline + COPY_MARGIN,
            error: None,
        };
        self.0.lock().insert(id, transfer);
    }

    /// Removes a transfer that was answered, or never sent.
    pub fn end(&self, id: u64) {
        self.0.lock().remove(&id);
    }

    /// Marks a transfer as failed without an answer; [`ServerTransfers::take_released`] returns it when its pages are
    /// released.
    pub fn unanswered(&self, id: u64, error: String) {
        if let Some(transfer) = self.0.lock().get_mut(&id) {
            transfer.error = Some(error);
        }
    }

    /// Marks the pages of an instance as released: the server has unregistered it.
    pub fn instance_released(&self, instance: InstanceId) {
        let now = Instant::now();
        for transfer in self.0.lock().values_mut() {
            if transfer.instance == instance {
                transfer.released_at = now;
            }
        }
    }

    /// Removes the unanswered transfers whose pages are released; returns them with their errors.
    pub fn take_released(&self) -> Vec<(u64, String)> {
        let now = Instant::now();
        self.0
            .lock()
            .extract_if(|_, transfer| transfer.error.is_some() && transfer.released_at <= now)
            .filter_map(|(id, transfer)| Some((id, transfer.error?)))
            .collect()
    }

    /// When pages of an unanswered transfer are released next, at the latest.
    pub fn next_release(&self) -> Option<Instant> {
        let transfers = self.0.lock();
        let unanswered = transfers
            .values()
            .filter(|transfer| transfer.error.is_some());
        unanswered.map(|transfer| transfer.released_at).min()
    }

    /// Whether the server touches no pages.
    pub fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }
}
