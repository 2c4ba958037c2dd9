//! L1 of instances that tests start and end.

use std::path::Path;

use kvtier_common::error::Result;
use kvtier_config::ServerConfig;
use kvtier_memory::Arena;

use super::kept::{KeptL1, open_arena};
use super::place::ServerInstance;

/// A configuration of this test's own instance.
pub(crate) fn config(test: &str, flags: &[&str]) -> ServerConfig {
    let host = format!("ipc:///tmp/kvtier-{test}-{}", std::process::id());
    let host = [
        "--host",
        &host,
        "--l1-size-gb",
        "0.002",
        "--state-dir",
        "/nowhere",
    ];
    ServerConfig::from_flags(&[&host, flags].concat()).unwrap()
}

/// Opens L1 as a server with these additional flags does, in a state folder of this identity.
pub(crate) fn open_as(
    test: &str,
    flags: &[&str],
    folder: &str,
    record: Option<&Path>,
) -> Result<(Arena, KeptL1)> {
    let config = config(test, flags);
    let instance = ServerInstance {
        folder,
        tenants: 0,
        record,
    };
    open_arena(&config, Ok(instance))
}
