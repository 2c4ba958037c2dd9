//! Addresses of servers on the command line, and whether something listens there.
//!
//! Every command takes the address as an argument or with `--url`. Without a scheme it is the request socket for commands
//! that use it, the HTTP API for the others.

use std::net::{TcpStream, ToSocketAddrs as _};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use kvtier_common::error::{Error, Result};
use kvtier_l2::net::host_and_port;

/// The default request socket.
pub const REQUESTS: &str = "tcp://127.0.0.1:5555";

/// The default HTTP API.
const HTTP: &str = "http://127.0.0.1:8080";

/// The default port of an HTTP API.
const HTTP_PORT: &str = ":8080";

/// Arguments for the address of an HTTP API.
#[derive(Debug, Args)]
pub struct HttpArgs {
    /// The server's HTTP API: host, host:port, http://host:port or https://host:port [default: http://127.0.0.1:8080]
    #[arg(value_name = "URL", value_parser = http)]
    server: Option<String>,
    /// Address of the server, like the argument
    #[arg(long, value_parser = http, conflicts_with = "server")]
    url: Option<String>,
}

impl HttpArgs {
    /// The address.
    pub fn url(&self) -> &str {
        let given = self.server.as_ref().or(self.url.as_ref());
        given.map_or(HTTP, String::as_str)
    }
}

/// Arguments for the addresses of several HTTP APIs.
#[derive(Debug, Args)]
pub struct HttpListArgs {
    /// The servers' HTTP APIs: host, host:port, http://host:port or https://host:port [default: http://127.0.0.1:8080]
    #[arg(value_name = "URL", value_parser = http)]
    servers: Vec<String>,
    /// Address of one server, like the argument
    #[arg(long, value_parser = http, conflicts_with = "servers")]
    url: Option<String>,
}

impl HttpListArgs {
    /// The addresses, at least one, each once.
    pub fn urls(&self) -> Vec<&str> {
        let mut given: Vec<&str> = Vec::new();
        for url in self.servers.iter().chain(&self.url) {
            if !given.contains(&url.as_str()) {
                given.push(url);
            }
        }
        if given.is_empty() { vec![HTTP] } else { given }
    }
}

/// Parses the address of a request socket.
pub(crate) fn requests(text: &str) -> Result<String> {
    complete(text, &["tcp", "ipc"]).ok_or_else(|| {
        Error::refused("give host:port, tcp://host:port or ipc://path of a request socket")
    })
}

/// Parses the address of an HTTP API.
fn http(text: &str) -> Result<String> {
    let schemes = ["http", "https"];
    let with_port = || {
        complete(
            &format!("{}{HTTP_PORT}", text.trim_end_matches('/')),
            &schemes,
        )
    };
    complete(text, &schemes).or_else(with_port).ok_or_else(|| {
        Error::refused("give host, host:port, http://host:port or https://host:port of an HTTP API")
    })
}

/// Parses the address of either.
pub fn requests_or_http(text: &str) -> Result<String> {
    complete(text, &["tcp", "ipc", "http", "https"]).ok_or_else(|| {
        Error::refused("give host:port, tcp://host:port or ipc://path of a request socket, or http://host:port or https://host:port of an HTTP API")
    })
}

/// The address with its scheme, by default the first of `schemes`.
fn complete(text: &str, schemes: &[&str]) -> Option<String> {
    let (scheme, rest) = match text.split_once("://") {
        Some((scheme, rest)) => (*schemes.iter().find(|known| **known == scheme)?, rest),
        None => (*schemes.first()?, text),
    };
    let rest = rest.trim_end_matches('/');
    let good = match scheme {
        "ipc" => !rest.is_empty(),
        _ => is_host_and_port(rest),
    };
    good.then(|| format!("{scheme}://{rest}"))
}

/// Whether it is a name, an IPv4 address, or an IPv6 address in brackets, with a port.
fn is_host_and_port(text: &str) -> bool {
    // No port is 0, which is none.
    host_and_port(text, 0).is_some_and(|(_, port)| port > 0)
}

/// Why no connection is accepted at an address of the request protocol, for each address that its name has; none if one is.
/// ZMQ does not report that: it tries again and again.
pub(crate) fn no_listener(url: &str, timeout: Duration) -> anyhow::Result<Option<String>> {
    let Some(address) = url.strip_prefix("tcp://") else {
        let path = url.strip_prefix("ipc://").unwrap_or(url);
        return Ok(UnixStream::connect(path).err().map(|it| it.to_string()));
    };
    let addresses = address
        .to_socket_addrs()
        .with_context(|| format!("{address:?} is not an address"))?;
    let mut failures = Vec::new();
    for address in addresses {
        match TcpStream::connect_timeout(&address, timeout) {
            Ok(_) => return Ok(None),
            Err(error) => failures.push(format!("{address}: {error}")),
        }
    }
    Ok(Some(failures.join("; ")))
}

/// Fails at once if nothing listens.
pub fn expect_listener(url: &str, timeout: Duration) -> anyhow::Result<()> {
    match no_listener(url, timeout)? {
        None => Ok(()),
        Some(why) => anyhow::bail!("no server at {url}: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_without_scheme_gets_default_scheme() {
        for host in ["a", "127.0.0.1", "[::1]", "a-b.c"] {
            let (bare, tcp) = (format!("{host}:7"), format!("tcp://{host}:7"));
            let (web, secure) = (format!("http://{host}:7"), format!("https://{host}:7"));
            for text in [&bare, &tcp] {
                assert_eq!(requests(text).as_ref(), Ok(&tcp));
                assert_eq!(requests_or_http(text).as_ref(), Ok(&tcp));
            }
            for text in [&bare, &web, &format!("{web}/")] {
                assert_eq!(http(text).as_ref(), Ok(&web));
            }
            let default = format!("http://{host}:8080");
            for text in [host, &format!("http://{host}/")] {
                assert_eq!(http(text).as_ref(), Ok(&default));
            }
            assert_eq!(requests_or_http(&web).as_ref(), Ok(&web));
            assert_eq!(http(&secure).as_ref(), Ok(&secure));
            assert_eq!(requests_or_http(&secure).as_ref(), Ok(&secure));
            assert!(requests(&web).is_err() && requests(&secure).is_err() && http(&tcp).is_err());
        }
        assert_eq!(requests("ipc:///a b").as_deref(), Ok("ipc:///a b"));
        assert!(requests(REQUESTS).is_ok() && http(HTTP).is_ok());
    }

    #[test]
    fn invalid_address_is_refused_with_allowed_forms() {
        for text in ["a", "tcp://a", "ipc://"] {
            assert!(requests_or_http(text).is_err(), "{text}");
        }
        for text in [
            "",
            ":",
            "a:",
            ":7",
            "a:0",
            "a:65536",
            "a:b",
            "::1:7",
            "[a]:7",
            "a:7/b",
            "tcp://",
            "ftp://a:7",
            "tcp:a:7",
            "u@a:7",
        ] {
            assert!(http(text).is_err(), "{text}");
            let refusal = requests_or_http(text).unwrap_err().to_string();
            assert!(
                ["host:port", "tcp://", "ipc://", "http://"]
                    .iter()
                    .all(|part| refusal.contains(part))
            );
        }
    }
}
