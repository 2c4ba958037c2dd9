//! What a process has mapped, and the end of this one.

use std::fs::File;
use std::io::{BufRead, BufReader};

use crate::shm_file::FileId;

/// Ends this process whatever its threads do, and runs nothing that was registered for its end.
pub fn exit_at_once(code: i32) -> ! {
    // SAFETY: it takes no address and does not return.
    unsafe { libc::_exit(code) }
}

/// Whether the process that `/proc` has under this number is seen to have all of these files mapped.
pub fn has_mapped(number: u32, mut files: Vec<FileId>) -> bool {
    let Ok(maps) = File::open(format!("/proc/{number}/maps")) else {
        return false;
    };
    // Split, not lines: paths are any bytes.
    let mut lines = BufReader::new(maps).split(b'\n').map_while(Result::ok);
    lines.any(|line| {
        let mapped = mapped_file(&String::from_utf8_lossy(&line));
        files.retain(|file| mapped != Some(*file));
        files.is_empty()
    })
}

/// The file in a line of `/proc/<pid>/maps`: addresses, permissions, offset, device, inode and path.
fn mapped_file(line: &str) -> Option<FileId> {
    let mut fields = line.split_ascii_whitespace().skip(3);
    let (major, minor) = fields.next()?.split_once(':')?;
    let number = |text| u32::from_str_radix(text, 16).ok();
    let device = rustix::fs::makedev(number(major)?, number(minor)?);
    Some(FileId::new(device, fields.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_files_are_found_in_front_of_any_path() {
        let file = |device, inode| Some(FileId::new(device, inode));
        for (line, found) in [
            (
                "7f00-7f01 rw-s 00000000 00:1b 54295 /dev/shm/a b (deleted)",
                file(0x1b, 54295),
            ),
            (
                "7f00-7f01 r--p 0001f000 fe:100 7 /x",
                file(rustix::fs::makedev(0xfe, 0x100), 7),
            ),
            ("7f00-7f01 rw-p 00000000 00:00 0", file(0, 0)),
            ("7f00-7f01 rw-p 00000000 00:1b", None),
            ("7f00-7f01 rw-p 00000000 001b 7", None),
            ("7f00-7f01 rw-p 00000000 x:y 7", None),
            ("", None),
        ] {
            assert_eq!(mapped_file(line), found, "{line}");
        }
    }
}
