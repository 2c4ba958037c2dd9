//! What is in the way of a start, and what is not but should be known: one list for the start and for `--check-config`.

use std::net::{TcpListener, ToSocketAddrs as _};

use super::{ServerConfig, in_gib};
use crate::engine;
use crate::front::RequestSocket;
use crate::quota;

impl ServerConfig {
    /// Why a server could not start here and now, told without leaving or changing anything. What others may take
    /// meanwhile, such as a port, is not looked at.
    pub fn obstacle(&self) -> Option<String> {
        self.equal_ports()
            .or_else(|| self.tenants.salt_key().err())
            .or_else(|| RequestSocket::obstacle(self))
            .or_else(|| self.http_host_obstacle())
            .or_else(|| self.l2.as_ref()?.obstacle())
            .or_else(|| quota::obstacle(self))
    }

    /// Finds the memory and the GPUs that a start would ask for. A server that runs may have what the next one needs.
    ///
    /// # Errors
    /// The line with which the start would end.
    pub fn rehearse(&self) -> Result<engine::Rehearsal, String> {
        engine::rehearse(self)
    }

    /// Binds the ports that a start would, and releases them.
    ///
    /// # Errors
    /// The line with which the start would end.
    pub fn rehearse_ports(&self) -> Result<(), String> {
        // A path is taken over from a server that has ended, so binding it would change something.
        let requests = self.ipc_path().is_none();
        let _requests = requests.then(|| RequestSocket::bind(self)).transpose()?;
        let host = self.access.host();
        let http = [
            ("http-port", Some(self.http_port)),
            ("prometheus-port", self.prometheus_port),
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

    fn equal_ports(&self) -> Option<String> {
        let requests = self.ipc_path().is_none().then_some(self.port);
        let ports = [
            ("--port", requests),
            ("--http-port", Some(self.http_port)),
            ("--prometheus-port", self.prometheus_port),
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

    fn http_host_obstacle(&self) -> Option<String> {
        let host = self.access.host();
        let bound = (host, 0).to_socket_addrs().and_then(|mut addresses| {
            // As the start does: the first that can be had.
            let listener = addresses.find_map(|address| TcpListener::bind(address).ok());
            match listener {
                Some(listener) => listener.local_addr(),
                None => Err(std::io::ErrorKind::AddrNotAvailable.into()),
            }
        });
        match bound {
            Ok(address) => self.access.obstacle(address),
            Err(error) => Some(format!(
                "--http-host: {host:?} cannot be bound: {error}; give an address or a name of this machine"
            )),
        }
    }

    /// What it means that a tier is to leave more room than its file system has.
    pub(super) fn room_warnings(&self) -> impl Iterator<Item = String> {
        let l2 = self.l2.iter();
        l2.flat_map(|l2| {
            l2.file_systems().filter_map(|(name, size)| {
                (l2.min_free_bytes >= size).then(|| {
                    format!(
                        "--l2-min-free-gb: {:.2} GiB are to stay free where tier {name} is, and the file system has {:.2} \
                         GiB in all; nothing will be stored there",
                        in_gib(l2.min_free_bytes),
                        in_gib(size)
                    )
                })
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn obstacle(flags: &[&str]) -> String {
        let free = ["--port", "0", "--http-port", "0", "--shm-name", ""];
        // Later ones win.
        let config = ServerConfig::from_flags(&[&free[..], flags].concat()).unwrap();
        config.obstacle().unwrap_or_default()
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
            let found = obstacle(flags);
            assert!(
                found.starts_with(told) && found.is_empty() == told.is_empty(),
                "{flags:?}: {found}"
            );
        }
    }

    #[test]
    fn more_room_to_be_left_than_there_is_is_warned_of() {
        let directory = tempfile::tempdir().unwrap();
        let adapter = format!(
            r#"{{"type":"fs","base_path":{:?}}}"#,
            directory.path().join("a/b")
        );
        let warnings = |gib: &str| {
            let flags = ["--l2-adapter", &adapter, "--l2-min-free-gb", gib];
            let config = ServerConfig::from_flags(&flags).unwrap();
            config.warnings().collect::<String>()
        };
        assert!(
            warnings("1048576")
                .contains("--l2-min-free-gb: 1048576.00 GiB are to stay free where tier fs-0 is")
        );
        assert!(!warnings("0").contains("--l2-min-free-gb"));
    }
}
