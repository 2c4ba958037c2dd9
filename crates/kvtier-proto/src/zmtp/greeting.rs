//! The greeting: signature, version, mechanism.

use crate::zmtp::Error;
use crate::zmtp::role::Version;

/// Bytes of a greeting.
pub(crate) const GREETING_BYTES: usize = 64;

/// Our greeting: version 3.1, mechanism NULL.
pub(crate) const GREETING: [u8; GREETING_BYTES] = {
    let mut greeting = [0; GREETING_BYTES];
    greeting[0] = SIGNATURE_FIRST;
    // The last byte of the length field of older versions.
    greeting[8] = 1;
    greeting[SIGNATURE_END] = SIGNATURE_LAST;
    greeting[MAJOR] = 3;
    greeting[MAJOR + 1] = 1;
    let mut at = 0;
    while at < NULL.len() {
        greeting[MECHANISM + at] = NULL[at];
        at += 1;
    }
    greeting
};

const SIGNATURE_FIRST: u8 = 0xff;
const SIGNATURE_LAST: u8 = 0x7f;
const SIGNATURE_END: usize = 9;
const MAJOR: usize = 10;
const MECHANISM: usize = 12;
const MECHANISM_END: usize = 32;
const NULL: [u8; 4] = *b"NULL";

/// Refuses a partial greeting as soon as it is invalid, without waiting for the rest.
pub(crate) fn check(greeting: &[u8]) -> Result<(), Error> {
    let is_wrong = |at: usize, wanted| greeting.get(at).is_some_and(|byte| *byte != wanted);
    if is_wrong(0, SIGNATURE_FIRST) || is_wrong(SIGNATURE_END, SIGNATURE_LAST) {
        return Err(Error::Signature);
    }
    if let Some(&major) = greeting.get(MAJOR)
        && major < 3
    {
        return Err(Error::Version(major));
    }
    let Some(mechanism) = greeting.get(MECHANISM..MECHANISM_END) else {
        return Ok(());
    };
    let name = mechanism
        .strip_suffix(&[0; MECHANISM_END - MECHANISM - NULL.len()])
        .unwrap_or(mechanism);
    if name == NULL {
        Ok(())
    } else {
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        Err(Error::Mechanism(String::from_utf8_lossy(name).into_owned()))
    }
}

/// Our greeting for this version.
pub(crate) fn own(version: Version) -> [u8; GREETING_BYTES] {
    let mut greeting = GREETING;
    greeting[MAJOR + 1] = match version {
        Version::V3_0 => 0,
        Version::V3_1 => 1,
    };
    greeting
}

/// Whether the peer of this greeting supports PING, which version 3.1 introduced.
pub(crate) fn knows_ping(greeting: &[u8; GREETING_BYTES]) -> bool {
    (greeting[MAJOR], greeting[MAJOR + 1]) >= (3, 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_greeting_is_accepted_at_every_length() {
        for len in 0..=GREETING_BYTES {
            assert_eq!(check(&GREETING[..len]), Ok(()));
        }
        assert!(knows_ping(&GREETING));
    }

    #[test]
    fn wrong_greeting_is_refused_at_its_first_wrong_byte() {
        let with = |at: usize, byte| {
            let mut greeting = GREETING;
            greeting[at] = byte;
            greeting
        };
        for (at, byte, error) in [
            (0, b'G', Error::Signature),
            (SIGNATURE_END, 0, Error::Signature),
            (MAJOR, 1, Error::Version(1)),
            (MAJOR, 2, Error::Version(2)),
        ] {
            let greeting = with(at, byte);
            assert_eq!(check(&greeting[..at]), Ok(()));
            assert_eq!(check(&greeting[..=at]), Err(error));
        }
        assert_eq!(check(&with(MAJOR, 4)), Ok(()));
        let mut curve = GREETING;
        curve[MECHANISM..MECHANISM + 5].copy_from_slice(b"CURVE");
        assert_eq!(check(&curve), Err(Error::Mechanism("CURVE".into())));
        assert_eq!(
            check(&with(MECHANISM_END - 1, 1)),
            Err(Error::Mechanism("NULL".into()))
        );
        let mut old = GREETING;
        old[MAJOR + 1] = 0;
        assert!(!knows_ping(&old) && knows_ping(&with(MAJOR, 4)));
    }
}
