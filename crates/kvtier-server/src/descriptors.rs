//! File descriptors: how many the process may have, and how many of them the request port leaves to others.
//!
//! | for | of the limit |
//! | --- | --- |
//! | files of tiers, HTTP, peers, and what the process itself needs | a quarter, from 512 to 4096, at most half |
//! | connections to the port for peers | half of these, at most [`MAX_PEER_CONNECTIONS`] |
//! | connections to the request port | the rest, at most [`MAX_CONNECTIONS`] |

use kvtier_common::error::{Error, ErrorKind, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Fewer are too few to start with.
const MIN_LIMIT: u64 = 64;

/// Connections to the request port, whatever the limit. An engine has one for its scheduler and one for each worker.
const MAX_CONNECTIONS: u64 = 65_536;

/// Connections to the port for peers, whatever the limit.
const MAX_PEER_CONNECTIONS: u64 = 1024;

/// How many descriptors there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptors {
    /// The process may have this many.
    pub limit: u64,
    /// Descriptors that the request port may have for its connections.
    pub connections: u64,
    /// Descriptors that the port for peers may have for its connections.
    pub peer_connections: u64,
}

impl Descriptors {
    /// Raises the limit of this process as far as it may.
    ///
    /// # Errors
    /// One line, if there are too few to start with.
    pub fn raise() -> Result<Self> {
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        let wanted = Rlimit {
            current: maximum,
            maximum,
        };
        let limit = match setrlimit(Resource::Nofile, wanted) {
            Ok(()) => maximum,
            // A kernel may allow less than it says; the former limit stays.
            Err(_) => current,
        };
        Self::share(limit.unwrap_or(u64::MAX))
    }

    fn share(limit: u64) -> Result<Self> {
        if limit < MIN_LIMIT {
            return Err(Error::new(
                ErrorKind::Unavailable,
                format!(
                    "this process may open {limit} files (ulimit -n); a server needs at least {MIN_LIMIT}"
                ),
            ));
        }
        let others = (limit / 4).clamp(512, 4096).min(limit / 2);
        Ok(Self {
            limit,
            connections: (limit - others).min(MAX_CONNECTIONS),
            peer_connections: (others / 2).min(MAX_PEER_CONNECTIONS),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_leave_a_share_to_others() {
        for (limit, connections, peer_connections) in [
            (64, 32, 16),
            (1024, 512, 256),
            (4096, 3072, 512),
            (20_000, 15_904, 1024),
            (1 << 20, MAX_CONNECTIONS, 1024),
            (u64::MAX, MAX_CONNECTIONS, 1024),
        ] {
            assert_eq!(
                Descriptors::share(limit),
                Ok(Descriptors {
                    limit,
                    connections,
                    peer_connections
                })
            );
        }
        let error = Descriptors::share(63).unwrap_err().to_string();
        assert!(error.contains("open 63 files"));
    }
}
