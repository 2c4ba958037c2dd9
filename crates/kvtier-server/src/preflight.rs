//! Preflight checks: whether a server could start with a configuration here and now. The start and `--check-config` make
//! the same ones.

use std::net::{TcpListener, ToSocketAddrs as _};

use kvtier_config::ServerConfig;
use kvtier_l2::redact;

use crate::access::Access;
use crate::front::RequestSocket;

/// Why a server could not start, found without leaving or changing anything. What others may take meanwhile, such as a
/// port, is not checked.
pub fn obstacle(config: &ServerConfig) -> Option<String> {
    let access = match Access::open(&config.http) {
        // What was refused may have been, or held, a secret.
        Err(error) => return Some(redact::text(&error)),
        Ok(access) => access,
    };
    equal_ports(config)
        .or_else(|| config.tenants.salt_key().err())
        .or_else(|| RequestSocket::obstacle(config))
        .or_else(|| http_host_obstacle(&access))
        .or_else(|| config.l2.as_ref()?.obstacle())
        .or_else(|| kvtier_tenants::obstacle(config))
}

/// What an operator should know about a configuration with which a server starts, except for the tiers' warnings.
pub fn warnings(config: &ServerConfig) -> Vec<String> {
    let access = Access::open(&config.http).map(|access| access.warnings());
    let access = access.unwrap_or_default();
    config.warnings().chain(access).collect()
}

/// Binds the ports that a start would, and releases them.
///
/// # Errors
/// The line with which the start would end.
pub fn rehearse_ports(config: &ServerConfig) -> Result<(), String> {
    // A path is taken over from a server that has ended, so binding it would change something.
    let requests = config.ipc_path().is_none();
    let _requests = requests.then(|| RequestSocket::bind(config)).transpose()?;
    let host = config.http.host.as_str();
    let http = [
        ("http-port", Some(config.http_port)),
        ("prometheus-port", config.prometheus_port),
    ];
    let bind = |(flag, port): (&str, Option<u16>)| {
        let port = port?;
        let failed =
            |error| format!("--http-host, --{flag}: {host}:{port} cannot be bound: {error}");
        Some(TcpListener::bind((host, port)).map_err(failed))
    };
    let _http: Vec<_> = http
        .into_iter()
        .filter_map(bind)
        .collect::<Result<_, _>>()?;
    Ok(())
}

fn equal_ports(config: &ServerConfig) -> Option<String> {
    let requests = config.ipc_path().is_none().then_some(config.port);
    let ports = [
        ("--port", requests),
        ("--http-port", Some(config.http_port)),
        ("--prometheus-port", config.prometheus_port),
    ];
    let ports = ports
        .into_iter()
        .filter_map(|(flag, port)| Some((flag, port.filter(|port| *port != 0)?)));
    let ports: Vec<_> = ports.collect();
    ports.iter().enumerate().find_map(|(at, (flag, port))| {
        let (other, _) = ports[..at].iter().find(|(_, other)| other == port)?;
        Some(format!(
            "{other} and {flag} are both {port}; give each its own"
        ))
    })
}

fn http_host_obstacle(access: &Access) -> Option<String> {
    let host = access.host();
    let bound = (host, 0).to_socket_addrs().and_then(|mut addresses| {
        // As the start does: the first that can be bound.
        let listener = addresses.find_map(|address| TcpListener::bind(address).ok());
        match listener {
            Some(listener) => listener.local_addr(),
            None => Err(std::io::ErrorKind::AddrNotAvailable.into()),
        }
    });
    match bound {
        Ok(address) => access.obstacle(address),
        Err(error) => Some(format!(
            "--http-host: {host:?} cannot be bound: {error}; give an address or a name of this machine"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(flags: &[&str]) -> String {
        let free = ["--port", "0", "--http-port", "0", "--shm-name", ""];
        // Later ones win.
        let config = ServerConfig::from_flags(&[&free[..], flags].concat()).unwrap();
        obstacle(&config).unwrap_or_default()
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
                &["--host", "nosuchhost.invalid"],
                "--host: \"nosuchhost.invalid\" is not found",
            ),
            (&["--host", &missing], "--host: "),
            (
                &["--http-host", "nosuchhost.invalid"],
                "--http-host: \"nosuchhost.invalid\" cannot be bound",
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
