//! What libzmq can do and its safe binding cannot: frames that say when they are let go of, and listening on a socket that
//! somebody else has made.
//!
//! libzmq bounds what waits for a slow peer by messages, not by bytes, and tells nobody how much waits. It does call back
//! when it no longer needs the bytes of a frame, which the safe binding has no way to hear of: [`send_with`] does.
//!
//! This crate must never know what a frame means.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd as _, IntoRawFd as _, OwnedFd};

use zmq_sys as sys;

/// Sends `bytes` as one frame, without copying them, and drops `with` when libzmq lets go of them: they have been
/// handed to the system, or their connection has ended (which a socket takes note of when it is next used), or the socket. Fails as [`zmq::Socket::send`] does; both are gone
/// then, too.
///
/// `with` is dropped on whatever thread lets go, usually one of libzmq's: its drop must neither block nor panic.
///
/// # Errors
/// libzmq's.
pub fn send_with<W: Send + 'static>(
    socket: &mut zmq::Socket,
    bytes: Vec<u8>,
    with: W,
    flags: i32,
) -> zmq::Result<()> {
    let mut message = sys::zmq_msg_t::default();
    let kept = Box::into_raw(Box::new(Kept { bytes, _with: with }));
    // SAFETY: `kept` was made just now and nobody else has it.
    let (data, len) = unsafe { ((*kept).bytes.as_mut_ptr(), (*kept).bytes.len()) };
    // SAFETY: `message` is uninitialised as far as libzmq is concerned, which this call expects. The bytes stay where they are
    // until `let_go` drops the box they are in, and libzmq calls that once, after its last use of them.
    let made = unsafe {
        sys::zmq_msg_init_data(
            &raw mut message,
            data.cast(),
            len,
            Some(let_go::<W>),
            kept.cast(),
        )
    };
    if made == -1 {
        let error = last_error();
        // SAFETY: libzmq had no memory for a message, so it took nothing and will not call back.
        drop(unsafe { Box::from_raw(kept) });
        return Err(error);
    }
    // SAFETY: the message is initialised; the socket is open as long as its owner has it, and `&mut` says that no other thread uses it.
    let sent = unsafe { sys::zmq_msg_send(&raw mut message, socket.as_mut_ptr(), flags) };
    if sent == -1 {
        let error = last_error();
        // SAFETY: a message that was not sent is still initialised and ours to close, which calls `let_go`.
        unsafe { sys::zmq_msg_close(&raw mut message) };
        return Err(error);
    }
    // A message that was sent is libzmq's; it left an empty one here, which needs no closing.
    Ok(())
}

/// Binds to `address`, where `listener` listens already; it is the system's socket for that from then on, and is closed
/// with the ZMQ socket. Whatever file it has is its maker's to remove.
///
/// # Errors
/// libzmq's; `listener` is closed.
pub fn bind_to(socket: &mut zmq::Socket, address: &str, listener: OwnedFd) -> zmq::Result<()> {
    let fd: c_int = listener.as_raw_fd();
    let option = c_int::try_from(sys::ZMQ_USE_FD).map_err(|_| zmq::Error::EINVAL)?;
    // SAFETY: the value is an int, as this option's is, and outlives the call; `&mut` says that no other thread uses the
    // socket.
    let set = unsafe {
        sys::zmq_setsockopt(
            socket.as_mut_ptr(),
            option,
            (&raw const fd).cast(),
            size_of::<c_int>(),
        )
    };
    if set == -1 {
        return Err(last_error());
    }
    socket.bind(address)?;
    // libzmq has taken it over and closes it; it takes over nothing when it fails.
    let _ = listener.into_raw_fd();
    Ok(())
}

struct Kept<W> {
    bytes: Vec<u8>,
    _with: W,
}

/// Called by libzmq.
///
/// # Safety
/// `kept` is the box of [`send_with`], and nobody uses it afterwards.
unsafe extern "C" fn let_go<W>(_data: *mut c_void, kept: *mut c_void) {
    // SAFETY: as the caller promises.
    drop(unsafe { Box::from_raw(kept.cast::<Kept<W>>()) });
}

fn last_error() -> zmq::Error {
    // SAFETY: takes nothing and only reads a variable of this thread.
    zmq::Error::from_raw(unsafe { sys::zmq_errno() })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};

    use super::*;

    /// Hangs up when it is dropped.
    fn guard() -> (Sender<()>, Receiver<()>) {
        channel()
    }

    #[test]
    fn the_guard_goes_with_the_bytes() {
        let context = zmq::Context::new();
        let mut sender = context.socket(zmq::PAIR).unwrap();
        sender.bind("inproc://kept").unwrap();
        let receiver = context.socket(zmq::PAIR).unwrap();
        receiver.connect("inproc://kept").unwrap();
        let (guard, gone) = guard();
        send_with(&mut sender, vec![7; 100_000], guard, 0).unwrap();
        // Within one process the receiver gets the very bytes.
        let frame = receiver.recv_msg(0).unwrap();
        assert!(*frame == [7; 100_000]);
        assert_eq!(gone.try_recv(), Err(TryRecvError::Empty));
        drop(frame);
        assert_eq!(gone.try_recv(), Err(TryRecvError::Disconnected));
    }

    #[test]
    fn the_guard_goes_when_nothing_could_be_sent() {
        let context = zmq::Context::new();
        let mut alone = context.socket(zmq::PAIR).unwrap();
        for bytes in [Vec::new(), vec![7; 100_000]] {
            let (guard, gone) = guard();
            let sent = send_with(&mut alone, bytes, guard, zmq::DONTWAIT);
            assert_eq!(sent, Err(zmq::Error::EAGAIN));
            assert_eq!(gone.try_recv(), Err(TryRecvError::Disconnected));
        }
    }

    #[test]
    fn the_guard_goes_when_the_peer_has_read_all_or_has_gone() {
        let context = zmq::Context::new();
        let mut sender = context.socket(zmq::ROUTER).unwrap();
        sender.set_router_mandatory(true).unwrap();
        sender.set_linger(0).unwrap();
        sender.bind("tcp://127.0.0.1:*").unwrap();
        let endpoint = sender.get_last_endpoint().unwrap().unwrap();
        let held = Arc::new(());
        for reads in [true, false] {
            let elsewhere = zmq::Context::new();
            let peer = elsewhere.socket(zmq::DEALER).unwrap();
            peer.set_rcvhwm(1).unwrap();
            peer.set_linger(0).unwrap();
            peer.connect(&endpoint).unwrap();
            peer.send("hello", 0).unwrap();
            let id = sender.recv_bytes(0).unwrap();
            sender.recv_bytes(0).unwrap();
            // Far more than the system's buffers and one message of the peer hold.
            for _ in 0..12 {
                sender.send(&id, zmq::SNDMORE).unwrap();
                send_with(&mut sender, vec![7; 4 << 20], Arc::clone(&held), 0).unwrap();
            }
            if reads {
                for _ in 0..12 {
                    assert_eq!(peer.recv_msg(0).unwrap().len(), 4 << 20);
                }
            } else {
                assert!(
                    Arc::strong_count(&held) > 2,
                    "all was sent to a peer that does not read"
                );
                drop(peer);
            }
            while Arc::strong_count(&held) > 1 {
                // A socket takes note of connections that have ended when it is used.
                sender.get_events().unwrap();
                std::thread::yield_now();
            }
        }
    }
}
