//! Transfers whose pages the server may touch.
//!
//! The engine may give pages to others only when the server has let go of them. Its answer says so. Where none comes,
//! since its time is over or the connection is lost, the server may still be at it: on the connection that is lost, too.
//! Then its word for an unregistration says so, which it gives when no copy for that instance runs or will begin; and
//! when there is no such word either, the deadline that it has been told, behind which it begins nothing.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use kvtier_client::InstanceId;
use parking_lot::Mutex;

/// How long what began before a deadline may go on behind it: a hundred times what copying a large chunk takes.
pub const MARGIN: Duration = Duration::from_secs(1);

struct Hand {
    /// Whom the server copies for.
    instance: InstanceId,
    /// When the server has let go of the pages by itself.
    until: Instant,
    /// Why there will be no answer.
    error: Option<String>,
}

/// Those of a worker, by the caller's numbers.
#[derive(Default)]
pub struct Handed(Mutex<HashMap<u64, Hand>>);

impl Handed {
    /// The server is asked for a transfer that it does not begin behind `deadline`.
    pub fn begin(&self, id: u64, instance: InstanceId, deadline: Instant) {
        let hand = Hand {
            instance,
            until: deadline + MARGIN,
            error: None,
        };
        self.0.lock().insert(id, hand);
    }

    /// It has answered, or was never asked.
    pub fn end(&self, id: u64) {
        self.0.lock().remove(&id);
    }

    /// There will be no answer; [`Handed::take_free`] gives the transfer when its pages are free.
    pub fn unanswered(&self, id: u64, error: String) {
        if let Some(hand) = self.0.lock().get_mut(&id) {
            hand.error = Some(error);
        }
    }

    /// The server copies nothing any more for this instance.
    pub fn has_left(&self, instance: InstanceId) {
        let now = Instant::now();
        for hand in self.0.lock().values_mut() {
            if hand.instance == instance {
                hand.until = now;
            }
        }
    }

    /// Transfers that were not answered and whose pages are free, and why there was no answer.
    pub fn take_free(&self) -> Vec<(u64, String)> {
        let now = Instant::now();
        self.0
            .lock()
            .extract_if(|_, hand| hand.error.is_some() && hand.until <= now)
            .filter_map(|(id, hand)| Some((id, hand.error?)))
            .collect()
    }

    /// When the next of them will be, if nothing else happens.
    pub fn next_free(&self) -> Option<Instant> {
        let hands = self.0.lock();
        let unanswered = hands.values().filter(|hand| hand.error.is_some());
        unanswered.map(|hand| hand.until).min()
    }

    /// Whether the server may touch pages.
    pub fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }
}
