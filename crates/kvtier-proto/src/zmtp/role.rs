//! Roles: what a session is in the pattern of ROUTER and DEALER.

/// Socket type of our side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// A server.
    Router,
    /// A client.
    Dealer,
}

impl Role {
    pub(crate) fn socket_type(self) -> &'static str {
        match self {
            Self::Router => "ROUTER",
            Self::Dealer => "DEALER",
        }
    }

    /// Socket types that may be at the other end.
    pub(crate) fn peers(self) -> &'static [&'static str] {
        match self {
            Self::Router => &["DEALER", "REQ", "ROUTER"],
            Self::Dealer => &["DEALER", "REP", "ROUTER"],
        }
    }
}

/// Version that a session announces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// ZMTP 3.0: the peer sends no PING, as suits a client that does not read while it has nothing to ask.
    V3_0,
    /// ZMTP 3.1.
    V3_1,
}
