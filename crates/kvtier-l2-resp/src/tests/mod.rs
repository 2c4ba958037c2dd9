mod cluster;
mod faults;
mod part;
mod peers;
mod port;
mod redis;
mod secured;
mod server;

use std::sync::Arc;
use std::time::Duration;

use super::*;
use kvtier_l2::conformance::{Memory, content, kinds, load, store};
use tokio::net::{TcpListener, TcpStream};

/// Waits until the adapter is as it should be.
async fn until(adapter: &RespAdapter, is_healthy: bool) {
    while adapter.status()["is_healthy"] != is_healthy {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Talks to each client of a server that listens; returns its port.
async fn listen<T>(talk: impl Fn(TcpStream) -> T + Send + 'static) -> u16
where
    T: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(talk(stream));
        }
    });
    port
}
