//! Where a server listens.

use std::fmt;
use std::path::PathBuf;

/// Longest name of a host.
const MAX_HOST: usize = 253;

/// Address that a server listens on.
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
        let unbracketed = host.strip_prefix('[').and_then(|it| it.strip_suffix(']'));
        Self::of(unbracketed.unwrap_or(host), port.parse().ok()?)
    }

    /// `None` if that is no host or no port.
    pub(super) fn of(host: &str, port: u16) -> Option<Self> {
        let is_of_host =
            |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':' | '%');
        let is_host = (1..=MAX_HOST).contains(&host.len()) && host.chars().all(is_of_host);
        (is_host && port > 0).then(|| Self::Tcp(host.to_owned(), port))
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
            ("a\nb:1", None),
        ] {
            let found = Address::parse(text).map(|address| address.to_string());
            assert_eq!(found.as_deref(), shown, "{text}");
        }
    }
}
