//! Readiness of sockets: epoll, level-triggered.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;

/// Sockets reported by one call, so that replies get their turn.
const MAX_EVENTS: usize = 64;

/// What is reported of a socket, besides that both sides have ended it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interest {
    /// Bytes, connections, or the other side's end.
    pub read: bool,
    /// More can be written.
    pub write: bool,
}

impl Interest {
    /// Interest of a new socket.
    pub const READ: Self = Self {
        read: true,
        write: false,
    };

    fn flags(self) -> EventFlags {
        let mut flags = EventFlags::empty();
        flags.set(EventFlags::IN, self.read);
        flags.set(EventFlags::OUT, self.write);
        flags
    }
}

/// A socket that is ready.
#[derive(Debug, Clone, Copy)]
pub struct ReadySocket {
    /// Token given to [`Poller::add`].
    pub token: u64,
    /// Reading gives bytes, or tells why there are none any more.
    pub readable: bool,
    /// More can be written.
    pub writable: bool,
}

/// A set of sockets, each under a token.
pub struct Poller {
    epoll: OwnedFd,
}

impl Poller {
    /// An empty set.
    ///
    /// # Errors
    /// The system's.
    pub fn new() -> rustix::io::Result<Self> {
        Ok(Self {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
        })
    }

    /// Adds a socket; closing it removes it.
    ///
    /// # Errors
    /// The system's.
    pub fn add(&self, socket: impl AsFd, token: u64) -> rustix::io::Result<()> {
        let flags = Interest::READ.flags();
        epoll::add(&self.epoll, socket, EventData::new_u64(token), flags)
    }

    /// Changes what is reported of a socket.
    ///
    /// # Errors
    /// The system's.
    pub fn modify(
        &self,
        socket: impl AsFd,
        token: u64,
        interest: Interest,
    ) -> rustix::io::Result<()> {
        let data = EventData::new_u64(token);
        epoll::modify(&self.epoll, socket, data, interest.flags())
    }

    /// Removes a socket that stays open.
    ///
    /// # Errors
    /// The system's.
    pub fn remove(&self, socket: impl AsFd) -> rustix::io::Result<()> {
        epoll::delete(&self.epoll, socket)
    }

    /// Waits until a socket is ready or `timeout` is over, and appends what is to `ready`.
    ///
    /// # Errors
    /// The system's.
    pub fn wait(&self, timeout: Duration, ready: &mut Vec<ReadySocket>) -> rustix::io::Result<()> {
        let mut events = [MaybeUninit::<Event>::uninit(); MAX_EVENTS];
        let timeout = rustix::time::Timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        let events = match epoll::wait(&self.epoll, &mut events, Some(&timeout)) {
            Ok((events, _)) => events,
            Err(Errno::INTR) => return Ok(()),
            Err(error) => return Err(error),
        };
        ready.extend(events.iter().map(|event| {
            let (flags, data) = (event.flags, event.data);
            ReadySocket {
                token: data.u64(),
                readable: flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR),
                writable: flags.contains(EventFlags::OUT),
            }
        }));
        Ok(())
    }
}
