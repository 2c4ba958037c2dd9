//! Messages to clients, on their way to the thread that owns the socket.
//!
//! A channel carries them. The eventfd is written only if that thread sleeps, and once per sleep:
//!
//! | [`Wake::state`] | set by | meaning |
//! | --- | --- | --- |
//! | `ASLEEP` | the socket's thread, before it waits | the sender writes the eventfd |
//! | `AWAKE` | the socket's thread, after it waited and when it drains | it drains the channel before its next sleep |
//! | `WOKEN` | the sender | the same; and there is something, so the thread does not sleep |
//!
//! Every change is a swap with acquire and release: it takes over what the previous one published, so a message sent
//! before the state became `WOKEN` is seen by the drain that follows the next swap of the socket's thread.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use kvtier_common::sync::atomic::{AtomicU8, Ordering};
use kvtier_common::sync::channel::{Receiver, Sender, unbounded};
use rustix::event::{EventfdFlags, eventfd};

use kvtier_common::sync::budget::Charge;
use kvtier_engine::Payload;

/// One message to a client.
pub struct Outgoing {
    /// Number of the client's connection.
    pub connection: u64,
    /// The request's uid frame.
    pub uid: Vec<u8>,
    /// The request's operation frame, or an error text in its place.
    pub op: Vec<u8>,
    /// The response; nothing is no third frame.
    pub payload: Option<Payload>,
    /// Bytes of the message in the budget of the connection, if it is large or has chunks.
    pub charge: Option<Charge>,
}

const ASLEEP: u8 = 0;
const AWAKE: u8 = 1;
const WOKEN: u8 = 2;

struct Wake {
    fd: OwnedFd,
    state: AtomicU8,
}

/// Sender of messages, from any thread. The lanes bound the requests in flight, and so the number of messages in the
/// channel; the charges of the messages bound their bytes.
#[derive(Clone)]
pub struct Outbox {
    messages: Sender<Outgoing>,
    wake: Arc<Wake>,
}

/// Receiver of messages, on the socket's thread.
pub struct Inbox {
    messages: Receiver<Outgoing>,
    wake: Arc<Wake>,
}

/// Makes both ends.
///
/// # Errors
/// The system's, when it gives no eventfd.
pub fn outbox() -> std::io::Result<(Outbox, Inbox)> {
    let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let wake = Arc::new(Wake {
        fd,
        state: AtomicU8::new(AWAKE),
    });
    let (sender, receiver) = unbounded();
    Ok((
        Outbox {
            messages: sender,
            wake: Arc::clone(&wake),
        },
        Inbox {
            messages: receiver,
            wake,
        },
    ))
}

impl Outbox {
    /// Hands a message over.
    pub fn send(&self, message: Outgoing) {
        // Fails only if the socket's thread has ended, and then there is no client to answer.
        let _ = self.messages.send(message);
        self.wake();
    }

    /// Wakes the socket's thread.
    pub fn wake(&self) {
        if self.wake.state.swap(WOKEN, Ordering::AcqRel) == ASLEEP {
            // An eventfd refuses a write only when its counter would overflow, and then it is readable anyway.
            let _ = rustix::io::write(&self.wake.fd, &1_u64.to_ne_bytes());
        }
    }
}

impl Inbox {
    /// The descriptor that becomes readable when replies wait.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.wake.fd.as_fd()
    }

    /// Takes the messages that wait, and with them what they said of it: a later message wakes again.
    pub fn drain(&self) -> impl Iterator<Item = Outgoing> + '_ {
        self.wake.state.swap(AWAKE, Ordering::AcqRel);
        self.messages.try_iter()
    }

    /// Begins a sleep. Returns false if there is something to drain, or a wake-up: then the thread must not sleep.
    pub fn begin_sleep(&self) -> bool {
        self.wake.state.swap(ASLEEP, Ordering::AcqRel) != WOKEN
    }

    /// Ends a sleep. The channel must be drained before the next one.
    pub fn end_sleep(&self) {
        self.wake.state.swap(AWAKE, Ordering::AcqRel);
    }

    /// Resets the eventfd, which is readable.
    pub fn clear(&self) {
        let mut counter = [0; 8];
        let _ = rustix::io::read(&self.wake.fd, &mut counter);
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn is_readable(inbox: &Inbox) -> bool {
        let mut fds = [PollFd::new(&inbox.wake.fd, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
    }

    #[test]
    fn only_a_sleeping_thread_is_woken_and_only_once() {
        let (outbox, inbox) = outbox().unwrap();
        outbox.wake();
        assert!(!is_readable(&inbox), "it is awake");
        assert!(!inbox.begin_sleep(), "there was a wake-up");
        inbox.end_sleep();
        assert!(inbox.begin_sleep());
        outbox.wake();
        outbox.wake();
        assert!(is_readable(&inbox));
        inbox.clear();
        inbox.end_sleep();
        assert!(!is_readable(&inbox));
        assert!(inbox.begin_sleep());
    }

    fn message(connection: u64) -> Outgoing {
        Outgoing {
            connection,
            uid: Vec::new(),
            op: Vec::new(),
            payload: None,
            charge: None,
        }
    }

    /// Two senders and a thread that sleeps in between, in many orders.
    #[cfg(shuttle)]
    #[test]
    fn interleavings_leave_no_message_to_a_sleeping_thread() {
        use kvtier_common::sync::atomic::AtomicUsize;
        use kvtier_common::sync::shuttle::{self, thread};

        fn deliver() {
            let (outbox, inbox) = outbox().unwrap();
            let senders = Arc::new(AtomicUsize::new(2));
            for _ in 0..2 {
                let (outbox, senders) = (outbox.clone(), Arc::clone(&senders));
                thread::spawn(move || {
                    (0..2).for_each(|number| outbox.send(message(number)));
                    senders.fetch_sub(1, Ordering::SeqCst);
                });
            }
            let mut received = 0;
            while received < 4 {
                received += inbox.drain().count();
                if received < 4 && inbox.begin_sleep() {
                    while !is_readable(&inbox) {
                        let have_ended = senders.load(Ordering::SeqCst) == 0;
                        assert!(!have_ended || is_readable(&inbox), "a lost wake-up");
                        thread::yield_now();
                    }
                    inbox.clear();
                }
                inbox.end_sleep();
            }
        }
        shuttle::check_pct(deliver, 2000, 3);
        shuttle::check_random(deliver, 2000);
    }

    #[test]
    fn message_is_never_left_to_a_sleeping_thread() {
        const MESSAGES: u64 = 20_000;
        let (outbox, inbox) = outbox().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let outbox = outbox.clone();
                scope.spawn(move || (0..MESSAGES).for_each(|it| outbox.send(message(it))));
            }
            let mut received = 0;
            while received < 2 * MESSAGES as usize {
                received += inbox.drain().count();
                if received < 2 * MESSAGES as usize && inbox.begin_sleep() {
                    // Hangs if a message was sent without a signal.
                    let mut fds = [PollFd::new(&inbox.wake.fd, PollFlags::IN)];
                    poll(&mut fds, None).unwrap();
                    inbox.clear();
                }
                inbox.end_sleep();
            }
        });
    }
}
