//! Mounts of hugetlbfs, whose files consist of huge pages.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;

use kvtier_common::error::{Error, ErrorKind};
use rustix::fs::Access;

use crate::mapping::HUGE_PAGE;

/// Type of such a file system, as statfs(2) has it.
const HUGETLBFS_MAGIC: u32 = 0x958458f6;

/// What the system says about huge pages of 2 MiB.
const PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// No mount can be used.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error(
    "no hugetlbfs with pages of 2 MiB that user {uid} may write is mounted{}; mount one: \
     mount -t hugetlbfs -o pagesize=2M,uid={uid},mode=0700 none DIRECTORY",
    List(.found)
)]
pub struct NoHugetlbfs {
    uid: u32,
    /// What is wrong with each mount.
    found: Vec<Error>,
}

struct List<'a>(&'a [Error]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => Ok(()),
            found => {
                let found: Vec<_> = found.iter().map(Error::to_string).collect();
                write!(f, " ({})", found.join(", "))
            }
        }
    }
}

/// The mounts with pages of 2 MiB that this process may write, the oldest first; not empty.
///
/// # Errors
/// There is none.
pub fn hugetlbfs_mounts() -> Result<Vec<PathBuf>, NoHugetlbfs> {
    let mounts = std::fs::read("/proc/self/mounts").unwrap_or_default();
    let (usable, unusable): (Vec<_>, Vec<_>) = mount_points(&mounts)
        .map(|path| check(&path).map(|()| path))
        .partition(Result::is_ok);
    let usable: Vec<_> = usable.into_iter().flatten().collect();
    if usable.is_empty() {
        Err(NoHugetlbfs {
            uid: rustix::process::geteuid().as_raw(),
            found: unusable.into_iter().filter_map(Result::err).collect(),
        })
    } else {
        Ok(usable)
    }
}

/// Whether files can be made there.
fn check(path: &PathBuf) -> Result<(), Error> {
    let system = |error| Error::new(ErrorKind::Io, error).context(path.display());
    let unusable =
        |what: &dyn fmt::Display| Error::new(ErrorKind::Unavailable, what).context(path.display());
    let stat = rustix::fs::statfs(path).map_err(system)?;
    if stat.f_type as u32 != HUGETLBFS_MAGIC {
        return Err(unusable(&"another file system is mounted over it"));
    }
    if stat.f_bsize as u64 != HUGE_PAGE as u64 {
        let kib = stat.f_bsize as u64 >> 10;
        return Err(unusable(&format_args!("pages of {kib} KiB")));
    }
    // Of the effective user, as files are made.
    let rights = Access::WRITE_OK | Access::EXEC_OK;
    let flags = rustix::fs::AtFlags::EACCESS;
    rustix::fs::accessat(rustix::fs::CWD, path, rights, flags).map_err(system)
}

/// Returns the mounts of hugetlbfs, of the lines `SOURCE PATH TYPE OPTIONS 0 0`.
fn mount_points(mounts: &[u8]) -> impl Iterator<Item = PathBuf> {
    mounts.split(|byte| *byte == b'\n').filter_map(|line| {
        let mut parts = line.split(|byte| *byte == b' ').skip(1);
        let (path, kind) = (parts.next()?, parts.next()?);
        (kind == b"hugetlbfs").then(|| PathBuf::from(OsString::from_vec(unescape(path))))
    })
}

/// Spaces, tabs, line ends and backslashes are there as three octal digits.
fn unescape(path: &[u8]) -> Vec<u8> {
    let (mut bytes, mut rest) = (Vec::new(), path);
    while let [first, after @ ..] = rest {
        let digits = after.get(..3).filter(|_| *first == b'\\');
        let escaped = digits
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        bytes.push(escaped.unwrap_or(*first));
        rest = match escaped {
            Some(_) => &after[3..],
            None => after,
        };
    }
    bytes
}

/// Huge pages of 2 MiB that are free and reserved by no mapping; 0 if the kernel does not say.
pub(crate) fn free_pages() -> u64 {
    let read = |name| -> Option<u64> {
        let text = std::fs::read_to_string(format!("{PAGES}/{name}")).ok()?;
        text.trim().parse().ok()
    };
    let reserved = read("resv_hugepages").unwrap_or_default();
    read("free_hugepages").map_or(0, |free| free.saturating_sub(reserved))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_unescaped() {
        let mounts = b"none /a tmpfs rw 0 0\nnone /huge\\040pages\\134x hugetlbfs rw 0 0\n\nhugetlbfs /b\\04 hugetlbfs\nx hugetlbfs\n";
        let found: Vec<_> = mount_points(mounts).collect();
        assert_eq!(found, ["/huge pages\\x", "/b\\04"].map(PathBuf::from));
    }

    #[test]
    fn error_names_what_was_found_and_what_to_do() {
        let error = |found: &[&str]| {
            let found = found.iter().map(Error::refused).collect();
            NoHugetlbfs { uid: 7, found }.to_string()
        };
        let none = error(&[]);
        assert!(none.contains(
            "user 7 may write is mounted; mount one: mount -t hugetlbfs -o pagesize=2M,uid=7,"
        ));
        let some = error(&["/a: Permission denied", "/b: pages of 1048576 KiB"]);
        assert!(
            some.contains(
                "is mounted (/a: Permission denied, /b: pages of 1048576 KiB); mount one"
            )
        );
    }
}
