mod config;
mod fake;
mod faults;
mod python;

use std::path::Path;

use super::*;
use kvtier_l2::conformance::{Memory, content, kinds, load, store};

fn options(socket_path: &Path) -> ProcessOptions {
    ProcessOptions {
        tier: "process".into(),
        socket_path: socket_path.into(),
        command: Vec::new(),
        options: serde_json::Map::new(),
        secrets: Default::default(),
        shared_memory_bytes: 16 << 20,
        trust_missing_layout: false,
        require_checksum: false,
        request_timeout: Duration::from_secs(60),
    }
}

/// Waits until the tier is connected.
async fn until_connected(adapter: &ProcessAdapter) {
    while adapter.connected().await.is_err() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
