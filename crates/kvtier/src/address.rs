//! Where a server is.

use std::net::{TcpStream, ToSocketAddrs as _};
use std::time::Duration;

use anyhow::Context as _;

/// Whether somebody accepts connections at an address of the request protocol. ZMQ does not tell: where nobody listens,
/// it goes on trying. Addresses other than TCP always count.
pub(crate) fn listens(url: &str, patience: Duration) -> anyhow::Result<bool> {
    let address = match url.split_once("://") {
        Some(("tcp", address)) => address,
        Some(_) => return Ok(true),
        None => url,
    };
    let mut addresses = address
        .to_socket_addrs()
        .with_context(|| format!("{address:?} is no address"))?;
    Ok(addresses.any(|address| TcpStream::connect_timeout(&address, patience).is_ok()))
}

/// Fails at once where nobody listens.
pub(crate) fn expect_listener(url: &str, patience: Duration) -> anyhow::Result<()> {
    anyhow::ensure!(listens(url, patience)?, "nobody listens at {url}");
    Ok(())
}
