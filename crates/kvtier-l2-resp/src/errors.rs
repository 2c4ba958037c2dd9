//! What errors of a server mean.

use super::endpoint::Endpoint;
use kvtier_l2::{ErrorKind, L2Error};

/// An error after which the connection is of no use.
pub(super) struct Fatal {
    pub(super) error: L2Error,
    /// Whether the other connections are of no use either.
    pub(super) is_demotion: bool,
}

impl Fatal {
    /// Whether `text` is such an error: one of the credentials, or of a server that has become a replica.
    pub(super) fn of(endpoint: &Endpoint, text: &str) -> Option<Self> {
        let is_fatal = matches!(
            code(text),
            "NOAUTH" | "WRONGPASS" | "READONLY" | "MASTERDOWN"
        );
        is_fatal.then(|| Self {
            error: of(endpoint, text),
            is_demotion: code(text) == "READONLY",
        })
    }
}

const TOO_MANY_CLIENTS: &str = "max number of clients";

/// What may be shown of an error in reply to AUTH, which may repeat the password.
pub(super) fn of_credentials(text: &str) -> &str {
    [TOO_MANY_CLIENTS, "without any password configured"]
        .into_iter()
        .find(|known| text.contains(known))
        .unwrap_or_else(|| code(text))
}

/// The error of a command.
pub(super) fn of(endpoint: &Endpoint, text: &str) -> L2Error {
    let (kind, advice) = match code(text) {
        "OOM" => (ErrorKind::Full, ""),
        "READONLY" => (ErrorKind::Unavailable, ": the server is a replica"),
        "LOADING" | "TRYAGAIN" | "CLUSTERDOWN" | "MASTERDOWN" | "BUSY" | "NOREPLICAS" => {
            (ErrorKind::Unavailable, "")
        }
        "WRONGTYPE" => (ErrorKind::Corrupt, ": the key is not kvtier's"),
        // In a cluster these were followed.
        "MOVED" | "ASK" => (ErrorKind::Refused, ": a cluster needs cluster_mode"),
        "CROSSSLOT" => (
            ErrorKind::Refused,
            ": the braces in its model, salt or key_prefix put its keys into several slots",
        ),
        "NOAUTH" => (ErrorKind::Refused, ": it needs a password"),
        "WRONGPASS" => (ErrorKind::Refused, ": it has another password or user"),
        _ if text.contains(TOO_MANY_CLIENTS) => (ErrorKind::Unavailable, ""),
        _ => (ErrorKind::Refused, ""),
    };
    // Hostile bytes, in a log line.
    let text: String = text.chars().take(200).filter(|c| !c.is_control()).collect();
    endpoint.error(kind, &format_args!("{text}{advice}"))
}

/// The first word.
pub(super) fn code(text: &str) -> &str {
    text.split(' ').next().unwrap_or_default()
}
