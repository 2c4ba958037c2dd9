//! Sockets that a service manager has opened before it started this process (`LISTEN_FDS` of systemd).

use std::ffi::OsString;
use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use kvtier_common::error::{Error, Result};

/// The first descriptor that a service manager passes.
const FIRST: RawFd = 3;

/// Most sockets; a server has three ports.
const LIMIT: RawFd = 8;

/// Takes the descriptors that are meant for this process; none without `LISTEN_FDS`.
///
/// Called once, before this process opens anything: later calls find none.
///
/// # Errors
/// The variable has no number of open descriptors.
pub(crate) fn sockets() -> Result<Vec<OwnedFd>> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Ok(Vec::new());
    }
    let variable = |name| std::env::var_os(name);
    let descriptors = passed(variable("LISTEN_FDS"), variable("LISTEN_PID"))?;
    if let Some(missing) = descriptors.clone().find(|fd| !is_open(*fd)) {
        return Err(Error::refused(format!(
            "LISTEN_FDS: descriptor {missing} is not open; give the number of sockets passed from descriptor {FIRST} on"
        )));
    }
    // SAFETY: each is open, and nothing in this process owns it: the service manager has passed it for this process alone,
    // which has opened nothing, and it is taken once.
    Ok(descriptors
        .map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
        .collect())
}

/// The descriptors that these values of `LISTEN_FDS` and `LISTEN_PID` name.
fn passed(count: Option<OsString>, pid: Option<OsString>) -> Result<std::ops::Range<RawFd>> {
    let own = std::process::id().to_string();
    let Some(count) = count.filter(|_| pid.is_some_and(|pid| pid == *own)) else {
        return Ok(FIRST..FIRST);
    };
    let parsed = count.to_str().and_then(|count| count.parse().ok());
    match parsed.filter(|count| (0..=LIMIT).contains(count)) {
        Some(count) => Ok(FIRST..FIRST + count),
        None => Err(Error::refused(format!(
            "LISTEN_FDS is {count:?}; give a number from 0 to {LIMIT}"
        ))),
    }
}

fn is_open(descriptor: RawFd) -> bool {
    Path::new("/proc/self/fd")
        .join(descriptor.to_string())
        .symlink_metadata()
        .is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_for_the_named_process() {
        let own = std::process::id().to_string();
        let passed = |count: &str, pid: Option<&str>| {
            passed(Some(count.into()), pid.map(OsString::from)).map_err(|error| error.to_string())
        };
        assert_eq!(passed("2", Some(&own)), Ok(3..5));
        assert_eq!(passed("0", Some(&own)), Ok(3..3));
        for pid in [None, Some("1"), Some("")] {
            assert_eq!(passed("x", pid), Ok(3..3), "{pid:?}");
        }
        for count in ["", "-1", "9", "1x", "99999999999"] {
            let error = passed(count, Some(&own)).unwrap_err();
            assert!(
                error.contains(&format!(
                    "LISTEN_FDS is {count:?}; give a number from 0 to 8"
                )),
                "{error}"
            );
        }
    }
}
