//! Connections that wait for a request, in the order in which they began to: the oldest gives way to a new connection.
//!
//! `order` guards the order, `place` a connection's place in it; `order` may be acquired inside `place`, and no other
//! in either.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvtier_common::sync::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// How long a connection waits at least before it is closed: its request may have been sent already.
const GRACE: Duration = Duration::from_millis(20);

/// All of them.
#[derive(Default)]
pub(super) struct Waiting {
    order: Mutex<Order>,
    /// Another connection waits.
    more: Notify,
}

#[derive(Default)]
struct Order {
    next: u64,
    /// With the time from which each may be closed.
    closing: BTreeMap<u64, (Instant, Arc<Notify>)>,
}

impl Waiting {
    /// Adds a connection, which waits for its first request.
    pub(super) fn add(self: &Arc<Self>) -> Arc<Seat> {
        let closing = Arc::default();
        let place = Mutex::new(self.push(&closing));
        Arc::new(Seat {
            waiting: Arc::clone(self),
            closing,
            place,
        })
    }

    /// Closes the connection that has waited longest, once there is one.
    pub(super) async fn close_oldest(&self) {
        loop {
            match self.try_close_oldest() {
                Ok(()) => return,
                Err(Some(from)) => sleep_until(from).await,
                Err(None) => self.more.notified().await,
            }
        }
    }

    /// The error is from when on it may be closed; `None` where no connection waits.
    fn try_close_oldest(&self) -> Result<(), Option<Instant>> {
        let mut order = self.order.lock();
        let oldest = order.closing.first_entry().ok_or(None)?;
        let (from, _) = oldest.get();
        if *from > Instant::now() {
            return Err(Some(*from));
        }
        let (_, closing) = oldest.remove();
        closing.notify_one();
        Ok(())
    }

    fn push(&self, closing: &Arc<Notify>) -> u64 {
        let mut order = self.order.lock();
        let place = order.next;
        order.next += 1;
        let from = Instant::now() + GRACE;
        order.closing.insert(place, (from, Arc::clone(closing)));
        drop(order);
        self.more.notify_one();
        place
    }

    fn remove(&self, place: u64) {
        self.order.lock().closing.remove(&place);
    }
}

/// A connection's place in the order.
pub(super) struct Seat {
    waiting: Arc<Waiting>,
    closing: Arc<Notify>,
    place: Mutex<u64>,
}

impl Seat {
    /// Resolves when the connection is to be closed for a new one.
    pub(super) async fn closed(&self) {
        self.closing.notified().await;
    }

    /// Takes the connection out of the order while a request is handled.
    pub(super) fn begin(self: &Arc<Self>) -> Handling {
        self.waiting.remove(*self.place.lock());
        Handling(Arc::clone(self))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.waiting.remove(*self.place.get_mut());
    }
}

/// A request that is handled. Dropping it puts its connection at the end of the order.
pub(super) struct Handling(Arc<Seat>);

impl Drop for Handling {
    fn drop(&mut self) {
        let seat = &self.0;
        *seat.place.lock() = seat.waiting.push(&seat.closing);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn is_closed(seat: &Seat) -> bool {
        tokio::select! {
            biased;
            () = seat.closed() => true,
            () = std::future::ready(()) => false,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_waiting_connection_is_closed_first() {
        let waiting = Arc::new(Waiting::default());
        let [first, second, third] = [(); 3].map(|()| waiting.add());
        // Busy, then last in the order.
        let request = first.begin();
        waiting.close_oldest().await;
        assert!(is_closed(&second).await && !is_closed(&first).await);
        drop((request, second));
        waiting.close_oldest().await;
        assert!(is_closed(&third).await && !is_closed(&first).await);
        waiting.close_oldest().await;
        assert!(is_closed(&first).await);
    }

    #[tokio::test(start_paused = true)]
    async fn connections_with_a_request_are_never_closed() {
        let waiting = Arc::new(Waiting::default());
        let seat = waiting.add();
        let request = seat.begin();
        let close = tokio::spawn({
            let waiting = Arc::clone(&waiting);
            async move { waiting.close_oldest().await }
        });
        tokio::task::yield_now().await;
        assert!(!close.is_finished());
        drop(request);
        close.await.unwrap();
        assert!(is_closed(&seat).await);
    }
}
