//! Commands: READY and ERROR of the handshake, PING and PONG after it.

use crate::Error;
use crate::frame::write_command_header;

/// Maximum context that a PONG echoes; libzmq truncates longer ones too.
const MAX_PING_CONTEXT_BYTES: usize = 16;

/// Maximum length of a peer's routing identity.
const MAX_IDENTITY_BYTES: usize = 255;

/// Socket types that may connect to a ROUTER.
const PEERS: [&[u8]; 3] = [b"DEALER", b"REQ", b"ROUTER"];

/// Splits a command into its name and data.
pub(crate) fn split(body: &[u8]) -> Result<(&[u8], &[u8]), Error> {
    let short = Error::Command("its name is longer than the command");
    let (&len, rest) = body.split_first().ok_or(short.clone())?;
    rest.split_at_checked(usize::from(len)).ok_or(short)
}

/// Appends our READY.
pub(crate) fn write_ready(out: &mut Vec<u8>) {
    const READY: &[u8] =
        b"\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER\x08Identity\x00\x00\x00\x00";
    write_command_header(out, READY.len());
    out.extend_from_slice(READY);
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

/// Checks the properties of a READY.
pub(crate) fn check_ready(mut properties: &[u8]) -> Result<(), Error> {
    while !properties.is_empty() {
        let (name, value, rest) =
            property(properties).ok_or(Error::Command("READY with a cut property"))?;
        properties = rest;
        if name.eq_ignore_ascii_case(b"Socket-Type") && !PEERS.contains(&value) {
            return Err(Error::SocketType(shown(value)));
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
    fn ready_of_peers_of_a_router_is_accepted() {
        for kind in PEERS {
            let identity = [0; MAX_IDENTITY_BYTES];
            let good = ready(&[
                (b"socket-type", kind),
                (b"Identity", &identity),
                (b"X", b""),
            ]);
            assert_eq!(check_ready(&good), Ok(()));
            for cut in 1..good.len() {
                // Between two properties it is a shorter READY.
                if check_ready(&good[..cut]).is_ok() {
                    assert!(good[cut..].starts_with(b"\x08I") || good[cut..].starts_with(b"\x01X"));
                }
            }
        }
        assert_eq!(check_ready(&[]), Ok(()));
    }

    #[test]
    fn ready_of_other_peers_is_refused() {
        for kind in [&b"PUB"[..], b"", b"DEALER\0", b"dealer"] {
            assert!(matches!(
                check_ready(&ready(&[(b"Socket-Type", kind)])),
                Err(Error::SocketType(_))
            ));
        }
        assert!(matches!(
            check_ready(&ready(&[(b"Identity", &[1; MAX_IDENTITY_BYTES + 1])])),
            Err(Error::TooLarge { bytes: 256, .. })
        ));
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
