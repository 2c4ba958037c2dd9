//! A proxy of bytes that resets connections after a number of them.

use rustix::net::sockopt::set_socket_linger;
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    ToServer,
    ToClient,
}

pub struct Proxy {
    pub endpoint: String,
    pub resets: Arc<AtomicUsize>,
    /// Bytes that the last connection forwarded to the server and to the client.
    pub forwarded: [Arc<AtomicUsize>; 2],
    next: Arc<Mutex<VecDeque<(Direction, usize)>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Forwards one connection at a time to `server` (`tcp://...`).
    pub fn new(server: &str) -> Self {
        let target = server.strip_prefix("tcp://").unwrap().to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut proxy = Self {
            endpoint: format!("tcp://{}", listener.local_addr().unwrap()),
            resets: Arc::default(),
            forwarded: Default::default(),
            next: Arc::default(),
            stop: Arc::default(),
            thread: None,
        };
        let (next, stop) = (Arc::clone(&proxy.next), Arc::clone(&proxy.stop));
        let (resets, forwarded) = (Arc::clone(&proxy.resets), proxy.forwarded.clone());
        proxy.thread = Some(std::thread::spawn(move || {
            while let Ok((client, _)) = listener.accept() {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let limit = next.lock().unwrap().pop_front();
                let server = TcpStream::connect(&target).unwrap();
                if forward(&client, &server, limit, &forwarded) {
                    // Dropped with this, both are reset.
                    set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
                    set_socket_linger(&server, Some(Duration::ZERO)).unwrap();
                    drop((client, server));
                    resets.fetch_add(1, Ordering::Relaxed);
                }
            }
        }));
        proxy
    }

    /// Resets the next connection after this number of bytes in the direction.
    pub fn reset_next(&self, direction: Direction, bytes: usize) {
        self.next.lock().unwrap().push_back((direction, bytes));
    }

    /// Waits until it has reset this number of connections.
    pub fn wait_for_resets(&self, number: usize) {
        let began = Instant::now();
        while self.resets.load(Ordering::Relaxed) < number {
            assert!(began.elapsed() < Duration::from_secs(60), "no reset");
            std::thread::yield_now();
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.endpoint.strip_prefix("tcp://").unwrap());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Forwards until one side ends, or the limit is reached; returns whether that was so.
fn forward(
    client: &TcpStream,
    server: &TcpStream,
    limit: Option<(Direction, usize)>,
    forwarded: &[Arc<AtomicUsize>; 2],
) -> bool {
    let of = |direction| match limit {
        Some((limited, bytes)) if limited == direction => bytes,
        _ => usize::MAX,
    };
    let pump = |mut from: &TcpStream, mut to: &TcpStream, limit: usize, count: &AtomicUsize| {
        let mut buffer = [0; 4096];
        let mut left = limit;
        count.store(0, Ordering::Relaxed);
        while left > 0 {
            let most = buffer.len().min(left);
            let bytes = match from.read(&mut buffer[..most]) {
                Ok(0) | Err(_) => break,
                Ok(bytes) => bytes,
            };
            left -= bytes;
            count.fetch_add(bytes, Ordering::Relaxed);
            if to.write_all(&buffer[..bytes]).is_err() {
                break;
            }
        }
        // The other direction ends with this one.
        let _ = from.shutdown(Shutdown::Read);
        let _ = to.shutdown(Shutdown::Read);
        if left > 0 {
            let _ = to.shutdown(Shutdown::Write);
        }
        left == 0
    };
    std::thread::scope(|scope| {
        let up = scope.spawn(|| pump(client, server, of(Direction::ToServer), &forwarded[0]));
        let down = pump(server, client, of(Direction::ToClient), &forwarded[1]);
        up.join().unwrap() | down
    })
}
