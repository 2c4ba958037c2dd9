//! Commands: READY and ERROR of the handshake, PING and PONG after it.

use crate::zmtp::Error;
use crate::zmtp::frame::write_command_header;
use crate::zmtp::role::Role;

/// Maximum context that a PONG echoes; libzmq truncates longer ones too.
const MAX_PING_CONTEXT_BYTES: usize = 16;

/// Maximum length of a peer's routing identity.
const MAX_IDENTITY_BYTES: usize = 255;

/// Splits a command into its name and data.
pub(crate) fn split(body: &[u8]) -> Result<(&[u8], &[u8]), Error> {
    let short = Error::Command("its name is longer than the command");
    let (&len, rest) = body.split_first().ok_or(short.clone())?;
    rest.split_at_checked(usize::from(len)).ok_or(short)
}

/// Appends the READY of a role, without an identity.
pub(crate) fn write_ready(out: &mut Vec<u8>, role: Role) {
    let mut ready = b"\x05READY".to_vec();
    for (name, value) in [("Socket-Type", role.socket_type()), ("Identity", "")] {
        ready.push(name.len() as u8);
        ready.extend_from_slice(name.as_bytes());
        ready.extend_from_slice(&(value.len() as u32).to_be_bytes());
        ready.extend_from_slice(value.as_bytes());
    }
    write_command_header(out, ready.len());
    out.append(&mut ready);
}

/// Appends a PING without a TTL and without a context.
pub(crate) fn write_ping(out: &mut Vec<u8>) {
    const PING: &[u8] = b"\x04PING\x00\x00";
    write_command_header(out, PING.len());
    out.extend_from_slice(PING);
}

/// Appends the PONG to a PING's `data`; returns the PING's TTL in tenths of a second, 0 for none.
pub(crate) fn answer_ping(out: &mut Vec<u8>, data: &[u8]) -> Result<u16, Error> {
    let (ttl, context) = data
        .split_first_chunk()
        .ok_or(Error::Command("PING without a TTL"))?;
    let context = &context[..context.len().min(MAX_PING_CONTEXT_BYTES)];
    const PONG: &[u8] = b"\x04PONG";
    write_command_header(out, PONG.len() + context.len());
    out.extend_from_slice(PONG);
    out.extend_from_slice(context);
    Ok(u16::from_be_bytes(*ttl))
}

/// Checks the properties of a READY sent to this role.
pub(crate) fn check_ready(mut properties: &[u8], role: Role) -> Result<(), Error> {
    while !properties.is_empty() {
        let (name, value, rest) =
            property(properties).ok_or(Error::Command("READY with a cut property"))?;
        properties = rest;
        let is_peer = || role.peers().iter().any(|peer| peer.as_bytes() == value);
        if name.eq_ignore_ascii_case(b"Socket-Type") && !is_peer() {
            return Err(Error::SocketType {
                found: shown(value),
                allowed: role.peers(),
            });
        }
        if name.eq_ignore_ascii_case(b"Identity") && value.len() > MAX_IDENTITY_BYTES {
            return Err(Error::TooLarge {
                what: "the identity",
                bytes: value.len() as u64,
                limit: MAX_IDENTITY_BYTES as u64,
            });
        }
    }
    Ok(())
}

fn property(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let (&len, rest) = bytes.split_first()?;
    let (name, rest) = rest.split_at_checked(usize::from(len))?;
    let (len, rest) = rest.split_first_chunk()?;
    let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*len) as usize)?;
    Some((name, value, rest))
}

/// The reason in an ERROR's `data`.
pub(crate) fn error_reason(data: &[u8]) -> String {
    let reason = data
        .split_first()
        .and_then(|(&len, rest)| rest.get(..usize::from(len)));
    shown(reason.unwrap_or_default())
}

/// A peer's text, truncated for an error message.
fn shown(text: &[u8]) -> String {
    String::from_utf8_lossy(&text[..text.len().min(64)]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(properties: &[(&[u8], &[u8])]) -> Vec<u8> {
        let mut body = Vec::new();
        for (name, value) in properties {
            body.push(name.len() as u8);
            body.extend_from_slice(name);
            body.extend_from_slice(&(value.len() as u32).to_be_bytes());
            body.extend_from_slice(value);
        }
        body
    }

    #[test]
    fn ready_of_the_role_s_peers_is_accepted() {
        for role in [Role::Router, Role::Dealer] {
            for kind in role.peers() {
                let identity = [0; MAX_IDENTITY_BYTES];
                let good = ready(&[
                    (b"socket-type", kind.as_bytes()),
                    (b"Identity", &identity),
                    (b"X", b""),
                ]);
                assert_eq!(check_ready(&good, role), Ok(()));
                for cut in 1..good.len() {
                    // Between two properties it is a shorter READY.
                    if check_ready(&good[..cut], role).is_ok() {
                        let rest = &good[cut..];
                        assert!(rest.starts_with(b"\x08I") || rest.starts_with(b"\x01X"));
                    }
                }
            }
            assert_eq!(check_ready(&[], role), Ok(()));
        }
    }

    #[test]
    fn ready_of_other_peers_is_refused() {
        for kind in [&b"PUB"[..], b"", b"DEALER\0", b"dealer"] {
            assert!(matches!(
                check_ready(&ready(&[(b"Socket-Type", kind)]), Role::Router),
                Err(Error::SocketType { .. })
            ));
        }
        let req = ready(&[(b"Socket-Type", b"REQ")]);
        let error = check_ready(&req, Role::Dealer).unwrap_err().to_string();
        assert_eq!(
            error,
            "the peer's socket type is \"REQ\"; allowed: DEALER, REP, ROUTER"
        );
        let identity = ready(&[(b"Identity", &[1; MAX_IDENTITY_BYTES + 1])]);
        assert!(matches!(
            check_ready(&identity, Role::Router),
            Err(Error::TooLarge { bytes: 256, .. })
        ));
    }

    #[test]
    fn own_ready_is_accepted_by_the_other_role() {
        for (role, peer) in [
            (Role::Router, Role::Dealer),
            (Role::Dealer, Role::Router),
            (Role::Dealer, Role::Dealer),
        ] {
            let mut out = Vec::new();
            write_ready(&mut out, role);
            let (name, properties) = split(&out[2..]).unwrap();
            assert_eq!(name, b"READY");
            assert_eq!(usize::from(out[1]), out.len() - 2);
            assert_eq!(check_ready(properties, peer), Ok(()));
        }
    }

    #[test]
    fn pong_echoes_a_bounded_context() {
        let mut out = Vec::new();
        assert_eq!(answer_ping(&mut out, b"\x00\x0aabc"), Ok(10));
        assert_eq!(out, b"\x04\x08\x04PONGabc");
        out.clear();
        assert_eq!(answer_ping(&mut out, &[1; 100]), Ok(0x0101));
        assert_eq!(out.len(), 2 + 5 + MAX_PING_CONTEXT_BYTES);
        assert!(answer_ping(&mut out, b"\x00").is_err());
    }

    #[test]
    fn command_name_lies_within_the_command() {
        assert_eq!(split(b"\x04PINGx"), Ok((&b"PING"[..], &b"x"[..])));
        assert!(split(b"").is_err() && split(b"\x05PING").is_err());
        assert_eq!(error_reason(b"\x02noX"), "no");
        assert_eq!(error_reason(b"\x09no"), "");
    }
}
