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

/// Waits until the adapter is as it should be.
async fn until(adapter: &RespAdapter, is_healthy: bool) {
    while adapter.status()["is_healthy"] != is_healthy {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
