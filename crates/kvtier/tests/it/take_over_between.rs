//! Between both servers of a hand-over: a proxy that passes their messages on, changes them, or kills one of them.

use std::io::{IoSlice, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command};

use kvtier_memory::checksum::checksum128;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::server::{INSTANCE_NAME, KVTIER, Server};
use crate::take_over::L1;

/// Which process is killed, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kill {
    NewBeforeHello,
    NewAfterHello,
    NewAfterState,
    NewBeforeCommit,
    NewAfterCommit,
    OldAfterHello,
    OldAfterState,
    OldBeforeCommit,
    OldAfterCommit,
}

/// Which server serves afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Survivor {
    Old,
    New,
    Neither,
}

impl Kill {
    pub(crate) const ALL: [Self; 9] = [
        Self::NewBeforeHello,
        Self::NewAfterHello,
        Self::NewAfterState,
        Self::NewBeforeCommit,
        Self::NewAfterCommit,
        Self::OldAfterHello,
        Self::OldAfterState,
        Self::OldBeforeCommit,
        Self::OldAfterCommit,
    ];

    /// Whether the new server has opened what takes long by then.
    pub(crate) fn is_behind_opened(self) -> bool {
        !matches!(
            self,
            Self::NewBeforeHello | Self::NewAfterHello | Self::OldAfterHello
        )
    }

    pub(crate) fn survivor(self) -> Survivor {
        match self {
            Self::NewBeforeHello
            | Self::NewAfterHello
            | Self::NewAfterState
            | Self::NewBeforeCommit => Survivor::Old,
            // It had everything by then: no other process has it.
            Self::NewAfterCommit => Survivor::Neither,
            // Nothing was handed over yet.
            Self::OldAfterHello => Survivor::Neither,
            // It could not commit.
            Self::OldAfterState => Survivor::Neither,
            Self::OldBeforeCommit | Self::OldAfterCommit => Survivor::New,
        }
    }
}

/// Between the two servers: passes their messages on, and kills one of them at a certain moment.
pub(crate) struct Between {
    pub(crate) new: UnixStream,
    pub(crate) old: UnixStream,
}

impl Between {
    /// Takes the place of the old server's socket, and starts a new one.
    pub(crate) fn start(base: &Path) -> (Self, Server) {
        Self::start_with(base, &[])
    }

    /// The same, with these flags.
    pub(crate) fn start_with(base: &Path, more: &[&str]) -> (Self, Server) {
        Self::start_by(Command::new(KVTIER), base, more)
    }

    /// The same, by a command that takes the new server's arguments.
    pub(crate) fn start_by(command: Command, base: &Path, more: &[&str]) -> (Self, Server) {
        let path = base.join(INSTANCE_NAME.as_str()).join("take-over");
        let hidden = path.with_file_name("hidden");
        std::fs::rename(&path, &hidden).unwrap();
        let listener = UnixListener::bind(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        let flags = [&["--take-over"], more].concat();
        let server = Server::spawn_by(command, base, L1, &flags);
        let (new, _) = listener.accept().unwrap();
        let old = UnixStream::connect(&hidden).unwrap();
        std::fs::rename(&hidden, &path).unwrap();
        (Self { new, old }, server)
    }

    /// The same, up to the new server's commit, which the old one does not get.
    pub(crate) fn start_with_lost_commit(base: &Path) -> (Self, Server) {
        let (between, new) = Self::start(base);
        between.greet(|_| {});
        between.write_state(between.read_state());
        assert_eq!(Self::read(&between.new)[0], 5);
        (between, new)
    }

    /// Passes on what comes before the state, the new server's greeting with a change; returns that.
    pub(crate) fn greet(&self, change: impl FnOnce(&mut serde_json::Value)) -> Vec<u8> {
        let (hello, opened) = self.greet_until_opened_with(change);
        self.pass_opened(&opened);
        hello
    }

    /// The same without the last message, which it returns.
    pub(crate) fn greet_until_opened(&self) -> Vec<u8> {
        self.greet_until_opened_with(|_| {}).1
    }

    fn greet_until_opened_with(
        &self,
        change: impl FnOnce(&mut serde_json::Value),
    ) -> (Vec<u8>, Vec<u8>) {
        let hello = self.greet_until_accepted(change);
        let opened = Self::read(&self.new);
        assert_eq!(opened[0], 8);
        (hello, opened)
    }

    /// Passes on the new server's greeting, which it returns, with a change, and the answer to it.
    pub(crate) fn greet_until_accepted(
        &self,
        change: impl FnOnce(&mut serde_json::Value),
    ) -> Vec<u8> {
        let hello = with_body(&Self::read(&self.new), change);
        (&self.old).write_all(&hello).unwrap();
        let accepted = Self::read(&self.old);
        assert_eq!(accepted[0], 7);
        (&self.new).write_all(&accepted).unwrap();
        hello
    }

    pub(crate) fn pass_opened(&self, opened: &[u8]) {
        (&self.old).write_all(opened).unwrap();
    }

    /// Passes on the new server's commit and the answer to it.
    pub(crate) fn pass_commit(&self) {
        let commit = Self::read(&self.new);
        assert_eq!(commit[0], 5, "{}", String::from_utf8_lossy(&commit));
        (&self.old).write_all(&commit).unwrap();
        let done = Self::read(&self.old);
        (&self.new).write_all(&done).unwrap();
    }

    /// Passes on the new server's refusal; returns its reason.
    pub(crate) fn pass_refusal(&self) -> String {
        let refusal = Self::read(&self.new);
        assert_eq!(refusal[0], 2);
        (&self.old).write_all(&refusal).unwrap();
        String::from_utf8_lossy(&refusal[25..]).into_owned()
    }

    pub(crate) fn read(mut from: &UnixStream) -> Vec<u8> {
        let mut message = vec![0; 25];
        from.read_exact(&mut message).unwrap();
        let len = u64::from_le_bytes(message[1..9].try_into().unwrap());
        message.resize(25 + len as usize, 0);
        from.read_exact(&mut message[25..]).unwrap();
        message
    }

    /// The state of the old server, the bytes of connections, and all descriptors.
    pub(crate) fn read_state(&self) -> (Vec<u8>, Vec<u8>, Vec<OwnedFd>) {
        let state = Self::read(&self.old);
        assert_eq!(state[0], 3, "{}", String::from_utf8_lossy(&state));
        let bytes = Self::read(&self.old);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let mut slices = [IoSliceMut::new(&mut byte)];
        recvmsg(
            &self.old,
            &mut slices,
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        )
        .unwrap();
        let mut descriptors = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(some) = message {
                descriptors.extend(some);
            }
        }
        (state, bytes, descriptors)
    }

    pub(crate) fn write_state(
        &self,
        (state, bytes, descriptors): (Vec<u8>, Vec<u8>, Vec<OwnedFd>),
    ) {
        let mut new = &self.new;
        new.write_all(&state).unwrap();
        // One that refuses the state may not wait for the rest.
        if new.write_all(&bytes).is_err() {
            return;
        }
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        let slices = [IoSlice::new(&[0])];
        let _ = sendmsg(&self.new, &slices, &mut control, SendFlags::NOSIGNAL);
    }

    /// Passes everything on until the moment of a kill. Both ends are closed then, as by the death of either.
    pub(crate) fn run(self, kill: Kill, new: &mut Child, old: &mut Child) {
        let end = |child: &mut Child| {
            child.kill().unwrap();
            child.wait().unwrap();
        };
        let pass =
            |from: &UnixStream, mut to: &UnixStream| to.write_all(&Self::read(from)).unwrap();
        if kill == Kill::NewBeforeHello {
            return end(new);
        }
        pass(&self.new, &self.old);
        match kill {
            Kill::NewAfterHello => return end(new),
            Kill::OldAfterHello => return end(old),
            _ => {}
        }
        pass(&self.old, &self.new);
        pass(&self.new, &self.old);
        let state = self.read_state();
        match kill {
            Kill::NewAfterState => return end(new),
            Kill::OldAfterState => {
                end(old);
                // The proxy still has its socket.
                self.new.shutdown(Shutdown::Read).unwrap();
            }
            _ => {}
        }
        self.write_state(state);
        if kill == Kill::OldAfterState {
            return;
        }
        let commit = Self::read(&self.new);
        assert_eq!(commit[0], 5);
        match kill {
            Kill::NewBeforeCommit => return end(new),
            Kill::OldBeforeCommit => return end(old),
            _ => {}
        }
        (&self.old).write_all(&commit).unwrap();
        let done = Self::read(&self.old);
        assert_eq!(done[0], 6);
        match kill {
            Kill::NewAfterCommit => {
                assert!(old.wait().unwrap().success());
                end(new);
            }
            _ => end(old),
        }
    }
}

/// A message with another body.
pub(crate) fn with_body(message: &[u8], change: impl FnOnce(&mut serde_json::Value)) -> Vec<u8> {
    let mut body = serde_json::from_slice(&message[25..]).unwrap();
    change(&mut body);
    let body = serde_json::to_vec(&body).unwrap();
    let len = (body.len() as u64).to_le_bytes();
    let sum = checksum128(&body).to_le_bytes();
    [&message[..1], &len, &sum, &body].concat()
}
