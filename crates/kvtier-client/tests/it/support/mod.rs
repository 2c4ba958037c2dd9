//! A scripted server: a ROUTER socket on its own thread.

pub mod proxy;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use kvtier_client::proto::frames::{OperationId, RequestFrames};
use kvtier_client::proto::generation::Generation;
use kvtier_client::proto::key::VecTokens;
use kvtier_client::proto::request::Request;
use kvtier_client::proto::response::Response;

/// Any free port.
pub const ANYWHERE: &str = "tcp://127.0.0.1:*";

/// Frames of a message, without the routing frame.
pub type Frames = Vec<Vec<u8>>;

/// A running server; dropping it ends it.
pub struct Server {
    endpoint: String,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Answers each message with the messages that `answer` returns, at [`ANYWHERE`] or an earlier server's address.
    pub fn raw_at(
        address: &str,
        mut answer: impl FnMut(Frames) -> Vec<Frames> + Send + 'static,
    ) -> Self {
        let context = zmq::Context::new();
        let socket = context.socket(zmq::ROUTER).unwrap();
        // libzmq's default waits forever to send a reply to a client that has ended.
        socket.set_linger(0).unwrap();
        // The address of a server that has just ended may be taken for a moment more.
        while let Err(error) = socket.bind(address) {
            assert_eq!(error, zmq::Error::EADDRINUSE, "{address}");
            std::thread::yield_now();
        }
        let endpoint = socket.get_last_endpoint().unwrap().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !flag.load(Ordering::Relaxed) {
                if socket.poll(zmq::POLLIN, 10).unwrap() == 0 {
                    continue;
                }
                let mut message = socket.recv_multipart(0).unwrap();
                let client = message.remove(0);
                for reply in answer(message) {
                    let frames = std::iter::once(client.clone()).chain(reply);
                    socket.send_multipart(frames, 0).unwrap();
                }
            }
        });
        Self {
            endpoint,
            stop,
            thread: Some(thread),
        }
    }

    /// Answers each request; none means no reply.
    pub fn typed(
        answer: impl FnMut(&Request<'_, Vec<u32>>) -> Option<Response<'static>> + Send + 'static,
    ) -> Self {
        Self::typed_at(ANYWHERE, answer)
    }

    /// Starts a typed server at an address.
    pub fn typed_at(
        address: &str,
        mut answer: impl FnMut(&Request<'_, Vec<u32>>) -> Option<Response<'static>> + Send + 'static,
    ) -> Self {
        Self::raw_at(address, move |frames| {
            let request = RequestFrames {
                uid: &frames[0],
                op: &frames[1],
                payloads: frames[2..].iter().map(Vec::as_slice).collect(),
            };
            let id = OperationId::decode(request.op).unwrap();
            let spec = Generation::G6.rows(id).next().unwrap();
            let decoded = Request::decode(spec, &request.payloads, &mut VecTokens).unwrap();
            answer(&decoded)
                .map(|response| reply(&frames, response.encode()))
                .into_iter()
                .collect()
        })
    }

    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && let Err(panic) = thread.join()
            && !std::thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}

/// The reply to a request: its uid and op, and the response if there is one.
pub fn reply(request: &Frames, response: Option<Vec<u8>>) -> Frames {
    let mut frames = vec![request[0].clone(), request[1].clone()];
    frames.extend(response);
    frames
}
