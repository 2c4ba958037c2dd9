//! Replies on their way from the pools to the thread that owns the socket.
//!
//! A channel carries them; an eventfd wakes the socket's thread, once for any number of replies that wait.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_channel::{Receiver, Sender, unbounded};
use rustix::event::{EventfdFlags, eventfd};

use crate::budget::Charge;

/// One message to a client.
pub struct Reply {
    /// Number of the client's connection.
    pub connection: u64,
    /// The request's uid frame.
    pub uid: Vec<u8>,
    /// The request's operation frame, or an error text in its place.
    pub op: Vec<u8>,
    /// The response; nothing is no third frame.
    pub payload: Option<Vec<u8>>,
    /// Its bytes in the budget of the connection, if it is large.
    pub charge: Option<Charge>,
}

struct Wake {
    fd: OwnedFd,
    /// Set by whoever wrote the eventfd, cleared by the reader before it drains the channel.
    signalled: AtomicBool,
}

/// Where the pools put replies. The channel is bounded in number by the requests under way, which the lanes bound, and in
/// bytes by what is charged for them.
#[derive(Clone)]
pub struct Outbox {
    replies: Sender<Reply>,
    wake: Arc<Wake>,
}

/// Where the socket's thread takes them.
pub struct Inbox {
    replies: Receiver<Reply>,
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
        signalled: AtomicBool::new(false),
    });
    let (sender, receiver) = unbounded();
    Ok((
        Outbox {
            replies: sender,
            wake: Arc::clone(&wake),
        },
        Inbox {
            replies: receiver,
            wake,
        },
    ))
}

impl Outbox {
    /// Hands a reply over.
    pub fn send(&self, reply: Reply) {
        // Fails only when the socket's thread is gone, and then there is nobody to answer to.
        let _ = self.replies.send(reply);
        self.wake();
    }

    /// Wakes the socket's thread.
    pub fn wake(&self) {
        if !self.wake.signalled.swap(true, Ordering::AcqRel) {
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

    /// Takes the replies that wait. Costs next to nothing when there are none.
    pub fn drain(&self) -> impl Iterator<Item = Reply> + '_ {
        if self.wake.signalled.load(Ordering::Acquire) {
            self.clear();
        }
        self.replies.try_iter()
    }

    /// Takes the signal back. To be called when the descriptor is readable: a signal may come after its reply was drained.
    pub fn clear(&self) {
        // The read comes first: after the flag it could swallow the signal of a reply still to come.
        let mut counter = [0; 8];
        let _ = rustix::io::read(&self.wake.fd, &mut counter);
        // The flag is swapped, not stored. Whoever finds it set writes no eventfd and relies on the drain that follows here
        // to see its reply. A swap takes the value that the last of them left, so what they sent before is visible
        // from here on; whoever comes later finds the flag clear and writes. A plain store takes nothing from them, and may
        // even become visible after the drain has looked: that reply would wait until something else wakes the thread.
        self.wake.signalled.swap(false, Ordering::AcqRel);
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
    fn a_signal_that_was_taken_back_wakes_nobody_again() {
        let (outbox, inbox) = outbox().unwrap();
        for take_back in [Inbox::clear, |inbox: &Inbox| {
            assert_eq!(inbox.drain().count(), 0)
        }] {
            assert!(!is_readable(&inbox));
            outbox.wake();
            outbox.wake();
            assert!(is_readable(&inbox));
            take_back(&inbox);
            assert!(!is_readable(&inbox));
        }
    }
}
