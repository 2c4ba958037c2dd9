//! Where a server listens.

use std::fmt;
use std::path::PathBuf;

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Address {
    /// Host name or address, IPv6 without brackets.
    Tcp(String, u16),
    /// A socket in the file system.
    Unix(PathBuf),
}

impl Address {
    /// Reads `host:port`; `None` if it is something else. An IPv6 address may have brackets.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.trim().rsplit_once(':')?;
        let port = port.parse().ok().filter(|port| *port > 0)?;
        let unbracketed = host.strip_prefix('[').and_then(|it| it.strip_suffix(']'));
        let host = unbracketed.unwrap_or(host);
        let is_host = !host.is_empty() && !host.contains(['[', ']', ' ', '/', '@', ',']);
        is_host.then(|| Self::Tcp(host.to_owned(), port))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp(host, port) => write!(f, "{host}:{port}"),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_shown() {
        for (text, shown) in [
            ("a.example:6379", Some("a.example:6379")),
            (" 10.0.0.1:1 ", Some("10.0.0.1:1")),
            ("[::1]:7000", Some("[::1]:7000")),
            ("fe80::1:7000", Some("[fe80::1]:7000")),
            ("a", None),
            (":6379", None),
            ("a:0", None),
            ("a:65536", None),
            ("redis://a:1", None),
            ("user@a:1", None),
        ] {
            let found = Address::parse(text).map(|address| address.to_string());
            assert_eq!(found.as_deref(), shown, "{text}");
        }
    }
}
