//! The `--host` of the request socket where it is a path.

use kvtier_common::error::Result;
use kvtier_l2::config::{ALLOWED_PATH, is_path};

use super::checks::refuse;

/// Begins a `--host` that is the path of a socket.
pub(super) const IPC: &str = "ipc://";

/// Most bytes of such a path, which the system bounds.
const LONGEST: usize = 107;

/// Checks the path of a `--host` that is one.
pub(super) fn check_host(host: &str) -> Result<()> {
    let Some(path) = host.strip_prefix(IPC) else {
        return Ok(());
    };
    // Clients take the first two for what has no file, and so no permissions.
    if !is_path(path) || path.starts_with(['@', '*']) || path.len() > LONGEST {
        Err(refuse(
            "host",
            format!("{host:?}"),
            &format!(
                "give ipc:// and {ALLOWED_PATH}, at most {LONGEST} bytes, not beginning with '@' or '*'"
            ),
        ))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::ServerConfig;
    use super::super::values::parse_mode;
    use super::*;

    fn config(host: &str) -> Result<ServerConfig> {
        ServerConfig::from_flags(&["--host", host])
    }

    // proves: docs/compare.md#http
    #[test]
    fn a_request_port_beyond_loopback_is_warned_of() {
        for host in [
            "localhost",
            "127.0.0.1",
            "127.1.2.3",
            "::1",
            "[::1]",
            "lo",
            "ipc:///run/k",
        ] {
            assert_eq!(config(host).unwrap().exposure_warning(), None, "{host}");
        }
        for host in ["0.0.0.0", "::", "[::]", "*", "eth0", "10.0.0.1"] {
            let told = config(host).unwrap().exposure_warning().unwrap();
            assert!(told.starts_with(&format!("--host {host}: ")) && told.contains("every tenant"));
        }
    }

    #[test]
    fn the_path_of_a_socket_is_taken_as_it_is() {
        let config = config("ipc:///run/kvtier/a b:5555").unwrap();
        assert_eq!(config.bind_address(), "ipc:///run/kvtier/a b:5555");
        assert_eq!(config.ipc_path(), Some(Path::new("/run/kvtier/a b:5555")));
        assert_eq!(config.ipc_mode, 0o600);
    }

    #[test]
    fn paths_without_a_file_and_bad_modes_are_refused() {
        let long = format!("ipc://{}", "a".repeat(LONGEST + 1));
        for host in ["ipc://", "ipc://@name", "ipc://*", long.as_str()] {
            let told = config(host).unwrap_err().to_string();
            assert!(
                told.starts_with("--host: ") && told.contains("give ipc://"),
                "{told}"
            );
        }
        for (text, mode) in [
            ("0600", Some(0o600)),
            ("660", Some(0o660)),
            ("0o777", Some(0o777)),
        ]
        .into_iter()
        .chain(["", "8", "0400", "01777", "-1", "rw"].map(|text| (text, None)))
        {
            assert_eq!(parse_mode(text).ok(), mode, "{text:?}");
        }
        let told = ServerConfig::from_flags(&["--ipc-mode", "0400"])
            .unwrap_err()
            .to_string();
        assert!(
            told.contains("--ipc-mode") && told.contains("octal"),
            "{told}"
        );
    }
}
