//! Shareable handles of PyTorch (`_share_cuda_()[1]`): parsed, not opened.
//!
//! Layouts, all little-endian:
//! - 64 bytes: the driver's handle (PyTorch before versions were written).
//! - version, `c`, 64 bytes: the same; no version so far changed what follows.
//! - version, `e`, header, handles: an expandable segment, of pieces of equal size. Version 2 (PyTorch
//!   2.5 to 2.12) has a header of 24 bytes: process id i32, padding, bytes of a piece u64, number of pieces u64.
//!   Version 3 (2.13) adds the kind of the handles, an i32 (1: file descriptors of that process, 4 bytes each; 2: fabric
//!   handles, 64 bytes each), and padding. In version 2 the length of the rest determines the kind.

use super::driver::IpcHandle;
use crate::error::LayoutError;

/// Name of the field in errors.
const FIELD: &str = "handle[1]";

/// Handle of an allocation of another process.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ShareableHandle {
    /// One allocation, by IPC handle.
    Legacy(IpcHandle),
    /// Pieces that are mapped contiguously.
    Expandable {
        /// Owning process, in its own PID namespace; above 0.
        pid: i32,
        /// Bytes per piece; never 0.
        segment_size: u64,
        /// One handle per piece.
        handles: SegmentHandles,
    },
}

/// The pieces of an expandable segment; at least one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SegmentHandles {
    /// File descriptors of the owning process.
    PosixFds(Vec<i32>),
    /// Fabric handles.
    Fabric(Vec<[u8; 64]>),
}

impl SegmentHandles {
    /// Number of pieces.
    #[expect(clippy::len_without_is_empty, reason = "there is at least one")]
    pub fn len(&self) -> usize {
        match self {
            Self::PosixFds(fds) => fds.len(),
            Self::Fabric(handles) => handles.len(),
        }
    }
}

impl ShareableHandle {
    /// Parses the bytes, allocating no more memory than they take.
    ///
    /// # Errors
    /// Another length, an unknown kind or version of expandable segments, pieces whose total exceeds 63 bits, or an
    /// invalid process id or descriptor.
    pub fn parse(bytes: &[u8]) -> Result<Self, LayoutError> {
        if let Ok(handle) = bytes.try_into() {
            return Ok(Self::Legacy(IpcHandle(handle)));
        }
        match bytes {
            [_, b'c', handle @ ..] => match handle.try_into() {
                Ok(handle) => Ok(Self::Legacy(IpcHandle(handle))),
                Err(_) => Err(refuse(
                    format!("{} bytes of kind c", bytes.len()),
                    "66 bytes",
                )),
            },
            [version, b'e', rest @ ..] => expandable(*version, rest),
            [version, kind, ..] => Err(refuse(
                format!(
                    "{} bytes of version {version} and kind {kind:#04x}",
                    bytes.len()
                ),
                "64 bytes, or kind c or e behind a version",
            )),
            [] | [_] => Err(refuse(
                format!("{} bytes", bytes.len()),
                "64 bytes, or kind c or e behind a version",
            )),
        }
    }
}

fn refuse(value: impl std::fmt::Display, allowed: &str) -> LayoutError {
    LayoutError::new(FIELD, value, allowed)
}

fn expandable(version: u8, bytes: &[u8]) -> Result<ShareableHandle, LayoutError> {
    let header_bytes = match version {
        2 => 24,
        3 => 32,
        _ => {
            return Err(refuse(
                format!("an expandable segment of version {version}"),
                "version 2 or 3 (PyTorch 2.5 to 2.13)",
            ));
        }
    };
    let Some((header, rest)) = bytes.split_at_checked(header_bytes) else {
        return Err(refuse(
            format!("an expandable segment of {} bytes", bytes.len() + 2),
            "a whole header",
        ));
    };
    let pid = int(header, 0);
    let segment_size = long(header, 8);
    let count = long(header, 16);
    if pid <= 0 {
        return Err(refuse(format!("process id {pid}"), "above 0"));
    }
    let total = segment_size.checked_mul(count);
    if total.is_none_or(|total| total == 0 || total > i64::MAX as u64) {
        return Err(refuse(
            format!("{count} segments of {segment_size} bytes"),
            "at least one, and less than 2^63 bytes in all",
        ));
    }
    let holds = |each: u64| count.checked_mul(each) == Some(rest.len() as u64);
    let kind = match version {
        2 => [4, 64].into_iter().position(holds).map(|at| at as i32 + 1),
        _ => Some(int(header, 24)),
    };
    let handles = match kind {
        Some(1) if holds(4) => SegmentHandles::PosixFds(fds(rest)?),
        Some(2) if holds(64) => SegmentHandles::Fabric(rest.as_chunks().0.to_vec()),
        _ => {
            return Err(refuse(
                format!(
                    "{} bytes of handles of kind {} for {count} segments",
                    rest.len(),
                    kind.map_or_else(|| "unknown".to_owned(), |kind| kind.to_string()),
                ),
                "4 bytes each of kind 1 (file descriptor) or 64 bytes each of kind 2 (fabric)",
            ));
        }
    };
    Ok(ShareableHandle::Expandable {
        pid,
        segment_size,
        handles,
    })
}

fn fds(bytes: &[u8]) -> Result<Vec<i32>, LayoutError> {
    let numbers = bytes.as_chunks().0.iter().map(|fd| i32::from_le_bytes(*fd));
    let fds: Vec<i32> = numbers.collect();
    match fds.iter().find(|fd| **fd < 0) {
        None => Ok(fds),
        Some(fd) => Err(refuse(format!("file descriptor {fd}"), "0 or more")),
    }
}

/// Four bytes of a header that is long enough.
fn int(header: &[u8], at: usize) -> i32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&header[at..at + 4]);
    i32::from_le_bytes(bytes)
}

/// Eight bytes of a header that is long enough.
fn long(header: &[u8], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&header[at..at + 8]);
    u64::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// As PyTorch writes an expandable segment; `kind` only where the version has it.
    fn write(version: u8, pid: i32, size: u64, count: u64, kind: i32, handles: &[u8]) -> Vec<u8> {
        let mut bytes = vec![version, b'e'];
        bytes.extend(pid.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(size.to_le_bytes());
        bytes.extend(count.to_le_bytes());
        if version >= 3 {
            bytes.extend(kind.to_le_bytes());
            bytes.extend([0; 4]);
        }
        bytes.extend(handles);
        bytes
    }

    fn refused(bytes: &[u8], text: &str) {
        let error = ShareableHandle::parse(bytes).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }

    #[test]
    fn ipc_handle_is_the_same_in_every_version() {
        let handle: [u8; 64] = std::array::from_fn(|at| at as u8);
        let expected = ShareableHandle::Legacy(IpcHandle(handle));
        assert_eq!(ShareableHandle::parse(&handle).unwrap(), expected);
        for version in [1, 2, 3, 200] {
            let mut bytes = vec![version, b'c'];
            bytes.extend(handle);
            assert_eq!(ShareableHandle::parse(&bytes).unwrap(), expected);
        }
    }

    #[test]
    fn expandable_segments_of_both_versions_are_read() {
        // As genuine ones are: process 4242, 20 MiB per piece, descriptors 51 to 53.
        let fds: Vec<u8> = (51..54i32).flat_map(i32::to_le_bytes).collect();
        for version in [2, 3] {
            let bytes = write(version, 4242, 20 << 20, 3, 1, &fds);
            assert_eq!(bytes.len(), if version == 2 { 38 } else { 46 });
            assert_eq!(
                ShareableHandle::parse(&bytes).unwrap(),
                ShareableHandle::Expandable {
                    pid: 4242,
                    segment_size: 20 << 20,
                    handles: SegmentHandles::PosixFds(vec![51, 52, 53]),
                }
            );
            let fabric: Vec<u8> = [[1; 64], [2; 64]].concat();
            let bytes = write(version, 4242, 2 << 20, 2, 2, &fabric);
            let ShareableHandle::Expandable { handles, .. } =
                ShareableHandle::parse(&bytes).unwrap()
            else {
                panic!("not expandable");
            };
            assert_eq!(handles, SegmentHandles::Fabric(vec![[1; 64], [2; 64]]));
            assert_eq!(handles.len(), 2);
        }
    }

    #[test]
    fn descriptor_list_of_66_bytes_is_no_ipc_handle() {
        let fds: Vec<u8> = (0..10i32).flat_map(i32::to_le_bytes).collect();
        let bytes = write(2, 1, 4096, 10, 1, &fds);
        assert_eq!(bytes.len(), 66);
        let read = ShareableHandle::parse(&bytes).unwrap();
        assert!(matches!(read, ShareableHandle::Expandable { .. }));
    }

    #[test]
    fn inconsistent_handles_are_refused_by_field() {
        refused(&[], "0 bytes");
        refused(&[3; 63], "kind 0x03");
        refused(
            &[[3, b'c'].as_slice(), &[0; 63]].concat(),
            "allowed: 66 bytes",
        );
        refused(
            &[[3, b'c'].as_slice(), &[0; 65]].concat(),
            "67 bytes of kind c",
        );
        refused(&write(1, 1, 1, 1, 1, &[0; 4]), "version 1");
        refused(&write(4, 1, 1, 1, 1, &[0; 4]), "version 4");
        refused(&write(3, 1, 1, 1, 1, &[])[..33], "a whole header");
        refused(&write(3, 0, 1, 1, 1, &[0; 4]), "process id 0");
        refused(&write(3, -1, 1, 1, 1, &[0; 4]), "process id -1");
        refused(&write(3, 1, 0, 1, 1, &[0; 4]), "1 segments of 0 bytes");
        refused(&write(3, 1, 1, 0, 1, &[]), "0 segments of 1 bytes");
        refused(&write(3, 1, 1 << 62, 2, 1, &[0; 8]), "2^63");
        refused(&write(3, 1, u64::MAX, u64::MAX, 1, &[0; 8]), "2^63");
        refused(
            &write(3, 1, 1, 2, 1, &[0; 4]),
            "4 bytes of handles of kind 1",
        );
        refused(&write(3, 1, 1, 1, 2, &[0; 4]), "kind 2 for 1 segments");
        refused(&write(3, 1, 1, 1, 3, &[0; 4]), "kind 3");
        refused(&write(2, 1, 1, 3, 0, &[0; 13]), "kind unknown");
        // A count beyond any message allocates nothing.
        refused(&write(2, 1, 1, 1 << 60, 0, &[0; 64]), "64 bytes of handles");
        refused(&write(3, 1, 1, 1, 1, &[255; 4]), "file descriptor -1");
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_handle_or_an_error(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            kind in prop::sample::select(b"ce\0".to_vec()),
        ) {
            let mut bytes = bytes;
            if let Some(at) = bytes.get_mut(1) {
                *at = kind;
            }
            let _ = ShareableHandle::parse(&bytes);
        }

        #[test]
        fn parsed_handle_equals_the_written_one(
            version in 2u8..4,
            pid in 1..i32::MAX,
            size in 1u64..1 << 40,
            fds in prop::collection::vec(0..i32::MAX, 1..40),
            cut in any::<prop::sample::Index>(),
        ) {
            let raw: Vec<u8> = fds.iter().flat_map(|fd| fd.to_le_bytes()).collect();
            let bytes = write(version, pid, size, fds.len() as u64, 1, &raw);
            let shorter = &bytes[..cut.index(bytes.len())];
            let expected = ShareableHandle::Expandable {
                pid,
                segment_size: size,
                handles: SegmentHandles::PosixFds(fds),
            };
            prop_assert_eq!(ShareableHandle::parse(&bytes).unwrap(), expected);
            // Any 64 bytes are an IPC handle.
            prop_assert_eq!(ShareableHandle::parse(shorter).is_ok(), shorter.len() == 64);
        }
    }
}
