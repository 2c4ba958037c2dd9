//! Messages between a server and the one that takes over from it, on a stream socket.
//!
//! | at | what |
//! | --- | --- |
//! | 0 | [`Kind`] |
//! | 1 | bytes of the body, a little-endian `u64` |
//! | 9 | checksum of the body, 16 bytes, little-endian |
//! | 25 | the body |
//!
//! Descriptors follow the message that says how many there are, in batches, each with one byte.

use std::io::{IoSlice, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use kvtier_config::LastingValues;
use kvtier_engine::{EngineState, IndexHandOver, IndexState};
use kvtier_error::{Error, ErrorKind, Result};
use kvtier_memory::checksum::checksum128;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};

use crate::front::FrontState;

/// Version of the format of [`State`]. It changes with every change of what is in it.
pub const FORMAT: u32 = 2;

/// Most descriptors of a batch, as the system allows.
const BATCH: usize = 253;

const HEAD: usize = 25;

/// Most bytes of a message without connections' bytes.
const MAX_TEXT: u64 = 256 << 20;

/// What a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// [`Hello`], of the new server.
    Hello = 1,
    /// Why nothing is handed over, a text. Of either.
    Refused = 2,
    /// [`State`], of the old server. [`Kind::Bytes`] and the descriptors follow.
    State = 3,
    /// Input and output of the connections.
    Bytes = 4,
    /// The new server has checked everything and takes it.
    Commit = 5,
    /// The old server has released everything. For each tier, [`Kind::Index`] and [`Kind::Objects`] follow.
    Done = 6,
    /// [`Accepted`]: the old server has checked [`Hello`], and serves on.
    Accepted = 7,
    /// The new server has opened what takes long: the old one pauses.
    Opened = 8,
    /// Objects of the index of a tier.
    Objects = 9,
    /// What that index is of.
    Index = 10,
}

/// What the new server is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Formats of [`State`] that it reads.
    pub formats: Vec<u32>,
    /// Its process, for people.
    pub process: u32,
    /// Its release.
    pub release: String,
    /// What has to be the same.
    pub flags: LastingValues,
    /// Most connections that it can have.
    pub connections: u64,
}

/// What the new server opens while the old one serves on. Registrations of workers are where a restart finds them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accepted {
    /// Bytes of L1, which may be a default.
    pub l1_bytes: u64,
}

/// All that is handed over, but for descriptors and bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    pub format: u32,
    /// For people.
    pub process: u32,
    pub release: String,
    /// Whether the path of the request socket is the server's to remove.
    pub owns_path: bool,
    /// Bytes of the next message.
    pub bytes: u64,
    /// How long clients have waited so far.
    pub paused_micros: u64,
    /// Listening sockets behind the lock of the state directory and the request socket: HTTP, and metrics if there is a port
    /// for them.
    pub http_sockets: usize,
    pub front: FrontState,
    pub engine: EngineState,
}

impl State {
    /// Number of descriptors: the lock, the request socket, HTTP's, the connections, the tiers'.
    pub fn descriptors(&self) -> usize {
        2 + self.http_sockets + self.front.count() + self.engine.descriptors()
    }
}

fn broken(what: &str) -> Error {
    Error::new(ErrorKind::Io, format!("the other server {what}"))
}

/// The connection to the other server, with one deadline for all that is sent and received.
pub struct Link<'a> {
    pub stream: &'a UnixStream,
    /// `None` for no limit.
    pub until: Option<Instant>,
}

impl Link<'_> {
    /// Lets the next call last no longer than the deadline.
    fn limit(&self) -> std::io::Result<()> {
        let left = self
            .until
            .map(|until| until.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) {
            return Err(std::io::ErrorKind::WouldBlock.into());
        }
        self.stream.set_read_timeout(left)?;
        self.stream.set_write_timeout(left)
    }
}

impl std::io::Read for &Link<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.limit()?;
        let mut stream = self.stream;
        stream.read(bytes)
    }
}

impl std::io::Write for &Link<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.limit()?;
        let mut stream = self.stream;
        stream.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Sends a message.
///
/// # Errors
/// The system's.
pub fn send(mut link: &Link<'_>, kind: Kind, body: &[u8]) -> Result<()> {
    let mut head = [0; HEAD];
    head[0] = kind as u8;
    head[1..9].copy_from_slice(&(body.len() as u64).to_le_bytes());
    head[9..].copy_from_slice(&checksum128(body).to_le_bytes());
    let sent = link.write_all(&head).and_then(|()| link.write_all(body));
    sent.map_err(|error| Error::io("the other server cannot be reached", error))
}

/// Sends a message in JSON.
///
/// # Errors
/// The system's.
pub fn send_json(link: &Link<'_>, kind: Kind, body: &impl Serialize) -> Result<()> {
    let body = serde_json::to_vec(body);
    let body = body.map_err(|error| Error::refused(error.to_string()))?;
    send(link, kind, &body)
}

/// Receives a message of one of these kinds; `None` if the other server has ended before.
///
/// # Errors
/// What it sent instead; [`ErrorKind::Invalid`] for a refusal, with its reason.
pub fn receive(mut link: &Link<'_>, kind: Kind, max_bytes: u64) -> Result<Option<Vec<u8>>> {
    let failed = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::WouldBlock => broken("did not answer in time"),
        std::io::ErrorKind::UnexpectedEof => broken("has ended in the middle of a message"),
        _ => Error::io("the other server", error),
    };
    let mut head = [0; HEAD];
    // An end before the first byte is a plain end.
    let mut read = 0;
    while read < HEAD {
        match link.read(&mut head[read..]) {
            Ok(0) if read == 0 => return Ok(None),
            Ok(0) => return Err(broken("has ended in the middle of a message")),
            Ok(bytes) => read += bytes,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset && read == 0 => {
                return Ok(None);
            }
            Err(error) => return Err(failed(error)),
        }
    }
    let len = head[1..9].try_into().map_or(u64::MAX, u64::from_le_bytes);
    let is_refusal = head[0] == Kind::Refused as u8;
    if len > if is_refusal { MAX_TEXT } else { max_bytes } {
        return Err(broken("has sent a message that is too long"));
    }
    // Grows with what arrives, not with what was said.
    let mut body = Vec::new();
    let got = link.take(len).read_to_end(&mut body).map_err(failed)?;
    if (got as u64) < len {
        return Err(broken("has ended in the middle of a message"));
    }
    let sum = checksum128(&body).to_le_bytes();
    if sum != head[9..] {
        return Err(broken("has sent a message whose checksum is wrong"));
    }
    match head[0] {
        found if found == kind as u8 => Ok(Some(body)),
        found if found == Kind::Refused as u8 => {
            Err(Error::refused(String::from_utf8_lossy(&body).into_owned()))
        }
        found => Err(broken(&format!(
            "has sent a message of kind {found}; expected: {}",
            kind as u8
        ))),
    }
}

/// Receives a message in JSON.
///
/// # Errors
/// As [`receive`]; it is not of this shape.
pub fn receive_json<T: for<'a> Deserialize<'a>>(link: &Link<'_>, kind: Kind) -> Result<T> {
    let body = receive(link, kind, MAX_TEXT)?.ok_or_else(|| broken("has ended"))?;
    serde_json::from_slice(&body)
        .map_err(|error| broken(&format!("has sent a message that cannot be read: {error}")))
}

/// Sends the index of a tier.
///
/// # Errors
/// The system's.
pub fn send_index(link: &Link<'_>, index: &IndexHandOver) -> Result<()> {
    send_json(link, Kind::Index, &index.state)?;
    send(link, Kind::Objects, &index.objects)
}

/// Receives the index of a tier.
///
/// # Errors
/// What was sent instead, or that the other server has ended.
pub fn receive_index(link: &Link<'_>) -> Result<IndexHandOver> {
    let state: IndexState = receive_json(link, Kind::Index)?;
    let objects = receive(link, Kind::Objects, state.object_bytes())?;
    Ok(IndexHandOver {
        state,
        objects: objects.ok_or_else(|| broken("has ended"))?,
    })
}

/// Sends descriptors.
///
/// # Errors
/// The system's.
pub fn send_descriptors(link: &Link<'_>, all: &[impl AsFd]) -> Result<()> {
    for batch in all.chunks(BATCH) {
        let batch: Vec<_> = batch.iter().map(AsFd::as_fd).collect();
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(&batch)) {
            return Err(broken("cannot be sent that many descriptors"));
        }
        let sent = loop {
            let byte = [IoSlice::new(&[0])];
            link.limit()
                .map_err(|error| Error::io("descriptors", error))?;
            match sendmsg(link.stream, &byte, &mut control, SendFlags::NOSIGNAL) {
                Err(Errno::INTR) => {}
                sent => break sent,
            }
        };
        sent.map_err(|error| Error::io("descriptors", error))?;
    }
    Ok(())
}

/// Receives this many descriptors, which programs that this process starts do not have.
///
/// # Errors
/// There are fewer, or the system's.
pub fn receive_descriptors(link: &Link<'_>, count: usize) -> Result<Vec<OwnedFd>> {
    let mut all = Vec::new();
    while all.len() < count {
        let mut byte = [0];
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [IoSliceMut::new(&mut byte)];
        link.limit()
            .map_err(|error| Error::io("descriptors", error))?;
        let received = match recvmsg(
            link.stream,
            &mut bytes,
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        ) {
            Err(Errno::INTR) => continue,
            received => received.map_err(|error| Error::io("descriptors", error))?,
        };
        let before = all.len();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                all.extend(descriptors);
            }
        }
        if received.bytes == 0 || all.len() == before {
            return Err(broken(
                "has not sent all descriptors, or this process may not open as many files (ulimit -n)",
            ));
        }
    }
    match all.len() == count {
        true => Ok(all),
        false => Err(broken("has sent too many descriptors")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the first release that hands over has written it, with every variant. A release that reads the format must read it
    /// whole, and one that writes the format must write it so.
    const RECORDED: &str = include_str!("../../tests/vectors/take_over_2.json");

    #[test]
    fn page_names_the_format() {
        let page = include_str!("../../../../docs/operate.md");
        assert!(page.contains(&format!("This is format {FORMAT}.")));
    }

    #[test]
    fn recorded_state_is_read_and_written_alike() {
        let recorded: serde_json::Value = serde_json::from_str(RECORDED).unwrap();
        let state: State = serde_json::from_str(RECORDED).unwrap();
        assert_eq!(state.format, FORMAT);
        assert_eq!(state.descriptors(), 2 + 1 + 3 + 1);
        assert_eq!(serde_json::to_value(&state).unwrap(), recorded);
    }

    /// What is not known would be lost.
    #[test]
    fn unknown_and_missing_fields_are_refused() {
        let recorded: serde_json::Value = serde_json::from_str(RECORDED).unwrap();
        let paths = [
            "",
            "/front",
            "/front/connections/0",
            "/front/connections/0/client",
            "/engine",
            "/engine/workers/0",
            "/engine/lookups",
            "/engine/lookups/lookups/0",
            "/engine/lookups/lookups/0/rows/0",
            "/engine/chunk_sizes/0",
            "/engine/tiers",
            "/engine/tiers/tiers/0",
            "/engine/tiers/stores/0",
            "/engine/transfers/0",
            "/engine/transfers/0/charges/0",
            "/engine/transfers/0/phase/pending",
        ];
        let is_read =
            |value: &serde_json::Value| serde_json::from_value::<State>(value.clone()).is_ok();
        assert!(is_read(&recorded));
        for path in paths {
            let mut more = recorded.clone();
            let object = more.pointer_mut(path).unwrap().as_object_mut().unwrap();
            let fields: Vec<_> = object.keys().cloned().collect();
            object.insert("later".into(), 1.into());
            assert!(!is_read(&more), "{path}: an unknown field");
            for field in &fields {
                let mut less = recorded.clone();
                let object = less.pointer_mut(path).unwrap().as_object_mut().unwrap();
                let removed = object.remove(field);
                // One that may be null may be absent.
                if removed != Some(serde_json::Value::Null) {
                    let is_optional = is_read(&less);
                    assert!(
                        !is_optional || OPTIONAL.contains(&field.as_str()),
                        "{path}/{field}"
                    );
                }
            }
        }
    }

    const OPTIONAL: &[&str] = &[
        "client",
        "last_hash",
        "last_ping",
        "last_query",
        "ping_interval",
        "provisional_for",
        "tenant",
        "ttl",
        "window",
        "worker",
        "worker_id",
    ];

    fn pair() -> (UnixStream, UnixStream) {
        UnixStream::pair().unwrap()
    }

    fn link(stream: &UnixStream) -> Link<'_> {
        Link {
            stream,
            until: None,
        }
    }

    /// Each call would be in time by itself.
    #[test]
    fn trickle_does_not_outlast_deadline() {
        let (one, mut two) = pair();
        let trickle = std::thread::spawn(move || {
            let mut head = [0; HEAD];
            // 16 MiB.
            (head[0], head[4]) = (Kind::Bytes as u8, 1);
            two.write_all(&head).unwrap();
            while two.write_all(&[0]).is_ok() {}
        });
        let link = Link {
            stream: &one,
            until: Some(Instant::now() + Duration::from_millis(50)),
        };
        let error = receive(&link, Kind::Bytes, u64::MAX).unwrap_err();
        assert!(error.to_string().contains("in time"), "{error}");
        drop(one);
        trickle.join().unwrap();
    }

    #[test]
    fn damaged_and_unexpected_messages_are_refused() {
        let good = |kind| {
            let (one, two) = pair();
            send(&link(&one), kind, b"body").unwrap();
            drop(one);
            let mut bytes = Vec::new();
            (&two).read_to_end(&mut bytes).unwrap();
            bytes
        };
        let received = |bytes: &[u8], kind| {
            let (mut one, two) = pair();
            one.write_all(bytes).unwrap();
            drop(one);
            receive(&link(&two), kind, 4).map_err(|error| error.to_string())
        };
        let bytes = good(Kind::Bytes);
        assert_eq!(received(&bytes, Kind::Bytes), Ok(Some(b"body".to_vec())));
        assert_eq!(received(&[], Kind::Bytes), Ok(None));
        for cut in 1..bytes.len() {
            assert!(received(&bytes[..cut], Kind::Bytes).is_err(), "{cut}");
        }
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x40;
            assert!(received(&damaged, Kind::Bytes).is_err(), "{at}");
        }
        let error = received(&bytes, Kind::Commit).unwrap_err();
        assert!(error.contains("kind 4; expected: 5"), "{error}");
        assert_eq!(
            received(&good(Kind::Refused), Kind::State),
            Err("body".into())
        );
        let (mut one, two) = pair();
        one.write_all(&[4, 5, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        one.write_all(&[0; 16]).unwrap();
        let error = receive(&link(&two), Kind::Bytes, 4)
            .unwrap_err()
            .to_string();
        assert!(error.contains("too long"), "{error}");
    }

    #[test]
    fn descriptors_of_several_batches_arrive_in_order() {
        use std::os::unix::fs::MetadataExt as _;
        let (one, two) = pair();
        let files: Vec<_> = (0..600)
            .map(|_| rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::empty()).unwrap())
            .collect();
        send_descriptors(&link(&one), &files).unwrap();
        let inode = |file: OwnedFd| std::fs::File::from(file).metadata().unwrap().ino();
        let received = receive_descriptors(&link(&two), 600).unwrap();
        let received: Vec<_> = received.into_iter().map(inode).collect();
        let sent: Vec<_> = files.into_iter().map(inode).collect();
        assert_eq!(received, sent);
        drop(one);
        assert!(receive_descriptors(&link(&two), 1).is_err());
        assert_eq!(receive_descriptors(&link(&two), 0).unwrap().len(), 0);
    }
}
