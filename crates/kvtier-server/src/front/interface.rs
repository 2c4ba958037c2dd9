//! Addresses of network interfaces, from the kernel's routing socket (rtnetlink(7)).

use std::net::Ipv4Addr;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with,
};

const GET_ADDRESSES: u16 = 22;
const NEW_ADDRESS: u16 = 20;
const REQUEST_DUMP: u16 = 0x301;
const INET: u8 = 2;

/// Attributes of an address.
const LOCAL: u16 = 2;
const LABEL: u16 = 3;

/// Bytes before a message's attributes: the header of every message, and the one of an address.
const HEADER_BYTES: usize = 16;
const ADDRESS_BYTES: usize = 8;

/// The first IPv4 address of the interface `name`; none if there is no such interface, or no address.
///
/// # Errors
/// The system's.
pub fn ipv4_address(name: &str) -> std::io::Result<Option<Ipv4Addr>> {
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        // Protocol 0 is the one for routing.
        None,
    )?;
    let mut request = Vec::new();
    let len = u32::try_from(HEADER_BYTES + ADDRESS_BYTES).unwrap_or(u32::MAX);
    request.extend_from_slice(&len.to_ne_bytes());
    request.extend_from_slice(&GET_ADDRESSES.to_ne_bytes());
    request.extend_from_slice(&REQUEST_DUMP.to_ne_bytes());
    // Sequence number and sender, which nothing here looks at.
    request.extend_from_slice(&[0; 8]);
    request.extend_from_slice(&[INET, 0, 0, 0, 0, 0, 0, 0]);
    send(&socket, &request, SendFlags::empty())?;
    let mut buffer = vec![0; 64 << 10];
    loop {
        let (len, _) = recv(&socket, &mut buffer[..], RecvFlags::empty())?;
        let mut messages = &buffer[..len];
        if messages.is_empty() {
            return Ok(None);
        }
        while let Some((kind, body, rest)) = message(messages) {
            messages = rest;
            if kind != NEW_ADDRESS {
                // The end, or an error.
                return Ok(None);
            }
            if let Some(found) = address_of(name, body) {
                return Ok(Some(found));
            }
        }
    }
}

/// Type and body of the first message, and the messages after it.
fn message(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let len = u32::from_ne_bytes(*bytes.first_chunk()?) as usize;
    let kind = u16::from_ne_bytes(*bytes.get(4..)?.first_chunk()?);
    let body = bytes.get(HEADER_BYTES..len)?;
    Some((
        kind,
        body,
        bytes.get(len.next_multiple_of(4)..).unwrap_or_default(),
    ))
}

/// The address in a message's body, if it is one of the interface `name`.
fn address_of(name: &str, body: &[u8]) -> Option<Ipv4Addr> {
    let mut attributes = body.get(ADDRESS_BYTES..)?;
    let (mut address, mut is_named) = (None, false);
    while let Some(len) = attributes.first_chunk() {
        let len = usize::from(u16::from_ne_bytes(*len));
        let kind = u16::from_ne_bytes(*attributes.get(2..)?.first_chunk()?);
        let value = attributes.get(4..len)?;
        match kind {
            LOCAL => address = value.first_chunk().copied().map(Ipv4Addr::from),
            LABEL => is_named = value.strip_suffix(&[0]) == Some(name.as_bytes()),
            _ => {}
        }
        attributes = attributes
            .get(len.next_multiple_of(4)..)
            .unwrap_or_default();
    }
    address.filter(|_| is_named)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_has_its_address_and_unknown_interfaces_have_none() {
        assert_eq!(ipv4_address("lo").unwrap(), Some(Ipv4Addr::LOCALHOST));
        assert_eq!(ipv4_address("nosuchinterface").unwrap(), None);
        assert_eq!(ipv4_address("").unwrap(), None);
    }
}
