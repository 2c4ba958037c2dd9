//! Preflight checks: whether a server could start with a configuration here and now. The start and `--check-config` make
//! the same ones.

use std::net::{TcpListener, ToSocketAddrs as _};

use kvtier_common::error::{Error, ErrorKind, Result};
use kvtier_config::ServerConfig;
pub use kvtier_engine::{EarlierL1, Preflight};

use crate::front::RequestSocket;
use crate::inherited::Inherited;
use crate::peers::{self, PeerListener};
use kvtier_http::{Access, cannot_bind};

/// Checks that a server could start; leaves and changes nothing. What others may take meanwhile, such as a port, is not
/// checked.
///
/// # Errors
/// The line with which the start would end; [`ErrorKind::InUse`](kvtier_common::error::ErrorKind::InUse) if a server that runs is
/// in the way.
pub fn check(config: &ServerConfig, inherited: &Inherited) -> Result<()> {
    let access = Access::open(&config.http)?;
    check_ports(config)?;
    config.tenants.salt_key()?;
    RequestSocket::preflight(config, inherited)?;
    check_http_host(&access)?;
    PeerListener::bind(config, Some(0))?;
    config.l2.as_ref().map_or(Ok(()), |l2| l2.preflight())?;
    kvtier_store::tenants::preflight(config)
}

/// What an operator should know about a configuration with which a server starts, except for the tiers' warnings.
pub fn warnings(config: &ServerConfig) -> Vec<String> {
    let access = Access::open(&config.http).map(|access| access.warnings());
    let access = access.unwrap_or_default();
    let peers = peers::warning(config);
    config.warnings().chain(access).chain(peers).collect()
}

/// Reserves the ports that are not inherited, the memory and the GPUs that a start would, and releases them. A server that
/// runs may have what the next one needs.
///
/// # Errors
/// The line with which the start would end.
pub fn reserve(config: &ServerConfig, inherited: Inherited) -> Result<Preflight> {
    bind_ports(config, inherited).map_err(|error| match error.kind() {
        ErrorKind::InUse => error.hint(
            "a server that runs has it, or systemd for one (kvtier.socket): stop both for this check, or give it another port",
        ),
        _ => error,
    })?;
    kvtier_engine::preflight(config)
}

fn bind_ports(config: &ServerConfig, mut inherited: Inherited) -> Result<()> {
    // A path is taken over from a server that has ended, so binding it would change something.
    let requests = config.ipc_path().is_none();
    let _requests = requests
        .then(|| RequestSocket::bind(config, &mut inherited))
        .transpose()?;
    let _peers = PeerListener::bind(config, config.peer_port)?;
    let host = config.http.host.as_str();
    let http = [
        ("http-port", Some(config.http_port)),
        ("prometheus-port", config.prometheus_port),
    ];
    let bind = |(flag, port): (&str, Option<u16>)| {
        let port = port?;
        let addresses = (host, port).to_socket_addrs();
        let taken = inherited.take_first(addresses.into_iter().flatten());
        let bound = taken.map_or_else(|| TcpListener::bind((host, port)), Ok);
        Some(bound.map_err(|error| cannot_bind(host, flag, port, error)))
    };
    let _http: Vec<_> = http
        .into_iter()
        .filter_map(bind)
        .collect::<Result<_, _>>()?;
    Ok(())
}

fn check_ports(config: &ServerConfig) -> Result<()> {
    let requests = config.ipc_path().is_none().then_some(config.port);
    let ports = [
        ("--port", requests),
        ("--http-port", Some(config.http_port)),
        ("--prometheus-port", config.prometheus_port),
        ("--peer-port", config.peer_port),
    ];
    let ports = ports
        .into_iter()
        .filter_map(|(flag, port)| Some((flag, port.filter(|port| *port != 0)?)));
    let ports: Vec<_> = ports.collect();
    for (at, (flag, port)) in ports.iter().enumerate() {
        if let Some((other, _)) = ports[..at].iter().find(|(_, other)| other == port) {
            let what = format!("{other} and {flag} are both {port}; give each its own");
            return Err(Error::refused(what));
        }
    }
    Ok(())
}

fn check_http_host(access: &Access) -> Result<()> {
    let host = access.host();
    let bound = (host, 0).to_socket_addrs().and_then(|mut addresses| {
        // As the start does: the first that can be bound.
        let listener = addresses.find_map(|address| TcpListener::bind(address).ok());
        match listener {
            Some(listener) => listener.local_addr(),
            None => Err(std::io::ErrorKind::AddrNotAvailable.into()),
        }
    });
    let bound = bound.map_err(|error| {
        Error::io(format!("--http-host: {host:?} cannot be bound"), error)
            .hint("give an address or a name of this machine")
    })?;
    access.check_bound(bound)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(flags: &[&str]) -> String {
        let free = ["--port", "0", "--http-port", "0", "--shm-name", ""];
        // Later ones win.
        let config = ServerConfig::from_flags(&[&free[..], flags].concat()).unwrap();
        check(&config, &Inherited::default())
            .map_or_else(|error| error.to_string(), |()| String::new())
    }

    #[test]
    fn what_would_end_the_start_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let short = directory.path().join("short");
        std::fs::write(&short, "abc").unwrap();
        let missing = format!("ipc://{}/no/socket", directory.path().display());
        let proc = r#"{"type":"fs","base_path":"/proc/kvtier-tier"}"#;
        for (flags, told) in [
            (&[][..], ""),
            (
                &["--port", "7001", "--http-port", "7001"],
                "--port and --http-port are both 7001",
            ),
            (
                &["--http-port", "7001", "--prometheus-port", "7001"],
                "--http-port and --prometheus-port are both 7001",
            ),
            (&["--hash-salts", short.to_str().unwrap()], "--hash-salts: "),
            (
                &[
                    "--hash-salts",
                    short.to_str().unwrap(),
                    "--tenant-prefix",
                    "a:",
                ],
                "--tenant-prefix: not with --hash-salts",
            ),
            (
                &["--host", "nosuchhost.invalid"],
                "--host: \"nosuchhost.invalid\" is not found",
            ),
            (&["--host", &missing], "--host: "),
            (
                &["--http-host", "nosuchhost.invalid"],
                "--http-host: \"nosuchhost.invalid\" cannot be bound",
            ),
            (
                &["--peer-port", "0", "--peer-host", "0.0.0.0"],
                "--peer-host: 0.0.0.0 is reachable from other hosts",
            ),
            (
                &["--peer-port", "0", "--peer-host", "nosuchhost.invalid"],
                "--peer-host, --peer-port: nosuchhost.invalid:0 cannot be bound",
            ),
            (
                &["--peer-port", "7001", "--http-port", "7001"],
                "--http-port and --peer-port are both 7001",
            ),
            (
                &["--peer-port", "0", "--peer-tls-key", "/nowhere"],
                "--peer-tls-cert, --peer-tls-key, --peer-tls-ca: ",
            ),
            (
                &[
                    "--peer-port",
                    "0",
                    "--peer-tls-key",
                    "/nowhere",
                    "--peer-tls-cert",
                    "/nowhere",
                ],
                "--peer-tls-cert: /nowhere: ",
            ),
            (
                &[
                    "--peer-port",
                    "0",
                    "--peer-host",
                    "0.0.0.0",
                    "--peer-password",
                    "secret",
                ],
                "",
            ),
            (
                &["--l2-adapter", proc],
                "--l2-adapter: type \"fs\": base_path /proc/kvtier-tier",
            ),
        ] {
            let found = found(flags);
            assert!(
                found.starts_with(told) && found.is_empty() == told.is_empty(),
                "{flags:?}: {found}"
            );
        }
    }
}
