//! TCP connections to a backend by its name.

use std::io;
use std::time::Duration;

use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;

/// Tries the addresses of a name, each for its part of the time.
///
/// # Errors
/// The kind of the last failure; the text names each address and its failure.
pub async fn connect_any(host: &str, port: u16, limit: Duration) -> io::Result<TcpStream> {
    let addresses: Vec<_> = lookup_host((host, port)).await?.collect();
    let part = limit / u32::try_from(addresses.len().max(1)).unwrap_or(1);
    let (mut kind, mut failures) = (io::ErrorKind::AddrNotAvailable, Vec::new());
    for address in addresses {
        let connected = timeout(part, TcpStream::connect(address)).await;
        let error = match connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        kind = error.kind();
        failures.push(format!("{address}: {error}"));
    }
    Err(io::Error::new(kind, failures.join("; ")))
}

/// Reads `HOST`, `HOST:PORT`, `[IPV6]` or `[IPV6]:PORT`; `None` if it is invalid. The host is returned without brackets.
#[must_use]
pub fn host_and_port(authority: &str, default: u16) -> Option<(String, u16)> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']')?;
            host.parse::<std::net::Ipv6Addr>().ok()?;
            (
                host,
                rest.strip_prefix(':').or(rest.is_empty().then_some(""))?,
            )
        }
        None => authority.split_once(':').unwrap_or((authority, "")),
    };
    let port = match port {
        "" if !authority.ends_with(':') => default,
        port => port.parse().ok().filter(|port| *port > 0)?,
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':');
    (!host.is_empty() && host.len() < 256 && host.chars().all(plain))
        .then(|| (host.to_owned(), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn failure_names_address_that_was_tried() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let limit = Duration::from_secs(60);
        let error = connect_any("127.0.0.1", address.port(), limit)
            .await
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        assert!(
            error.to_string().starts_with(&format!("{address}: ")),
            "{error}"
        );
    }
}
