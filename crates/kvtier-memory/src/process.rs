//! Processes, distinguished from later ones with the same number, and the end of this one.

use std::fs::File;
use std::io::{BufRead, BufReader};

use rustix::process::{Pid, test_kill_process};

use crate::shm_file::FileId;

/// Ends this process whatever its threads do, and runs nothing that was registered for its end.
pub fn exit_at_once(code: i32) -> ! {
    // SAFETY: it takes no address and does not return.
    unsafe { libc::_exit(code) }
}

/// A process as it was seen once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SeenProcess {
    pid: Pid,
    /// Clock ticks between boot and its start, if `/proc` has it.
    started: Option<u64>,
}

impl SeenProcess {
    /// The process with this number, if our PID namespace has one.
    pub(crate) fn find(number: u32) -> Option<Self> {
        let pid = Pid::from_raw(i32::try_from(number).ok()?)?;
        let seen = Self {
            pid,
            started: Status::of(pid).map(|status| status.started),
        };
        exists(pid).then_some(seen)
    }

    /// The process with this number, if it is seen to have `file` mapped. In another PID namespace the number is that of
    /// another process, or of none.
    pub(crate) fn find_mapper(number: u32, file: FileId) -> Option<Self> {
        let seen = Self::find(number)?;
        has_mapped(number, vec![file]).then_some(seen)
    }

    /// Returns the process's number, and its start in clock ticks since boot, 0 if that is not known.
    pub(crate) fn numbers(&self) -> [u64; 2] {
        let number = self.pid.as_raw_nonzero().get().unsigned_abs();
        [number.into(), self.started.unwrap_or(0)]
    }

    /// Whether it is known to have ended, as a zombie has.
    pub(crate) fn has_ended(&self) -> bool {
        let is_other = |now: &Status| self.started.is_some_and(|ticks| ticks != now.started);
        !exists(self.pid) || Status::of(self.pid).is_some_and(|now| now.has_ended || is_other(&now))
    }
}

/// Every other error is about a process that exists and may not be signalled.
fn exists(pid: Pid) -> bool {
    test_kill_process(pid) != Err(rustix::io::Errno::SRCH)
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

/// Status of a process in `/proc`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Status {
    started: u64,
    has_ended: bool,
}

impl Status {
    fn of(pid: Pid) -> Option<Self> {
        let stat = std::fs::read(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
        Self::parse(&String::from_utf8_lossy(&stat))
    }

    /// The fields 3 (state), 20 (threads) and 22 (start) of proc_pid_stat(5). The second is the program's name in
    /// parentheses, in which anything may stand.
    fn parse(stat: &str) -> Option<Self> {
        let (_, from_third) = stat.rsplit_once(')')?;
        let mut fields = from_third.split_ascii_whitespace();
        let state = fields.next()?;
        let threads: u64 = fields.nth(16)?.parse().ok()?;
        let started = fields.nth(1)?.parse().ok()?;
        Some(Self {
            started,
            // The first thread may end and leave others behind, and with them the memory.
            has_ended: matches!(state, "Z" | "X") && threads <= 1,
        })
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::{WaitId, WaitIdOptions, waitid};

    use super::*;

    #[test]
    fn start_and_end_are_found_behind_any_name() {
        for (state, threads, has_ended) in [
            ("S", 1, false),
            ("R", 3, false),
            ("Z", 1, true),
            ("Z", 2, false),
            ("X", 0, true),
        ] {
            let rest = format!(
                "{state} 1 7 7 0 -1 4194560 95 0 0 0 1 2 3 4 20 0 {threads} 0 987654 4096 0"
            );
            for name in ["sh", "a b", ") Z 2 3 (", ""] {
                let status = Status::parse(&format!("7 ({name}) {rest}")).unwrap();
                assert_eq!((status.started, status.has_ended), (987_654, has_ended));
            }
        }
        for bad in ["", "7 (sh", "7 (sh) S 1", "7 (sh) S x x x"] {
            assert_eq!(Status::parse(bad), None);
        }
    }

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

    // proves: docs/troubleshoot.md#an-engine-dies
    #[test]
    fn zombie_process_has_ended() {
        let mut child = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let seen = SeenProcess::find(child.id()).unwrap();
        assert!(!seen.has_ended());
        child.kill().unwrap();
        // Waits for the end, and leaves it to be waited for.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(seen.pid), options).unwrap();
        assert!(exists(seen.pid) && seen.has_ended());
        child.wait().unwrap();
        assert!(seen.has_ended());
    }

    #[test]
    fn a_later_process_with_the_same_number_is_another() {
        let own = SeenProcess::find(std::process::id()).unwrap();
        assert!(own.started.is_some() && !own.has_ended());
        let earlier = SeenProcess {
            started: own.started.map(|ticks| ticks - 1),
            ..own
        };
        assert!(earlier.has_ended());
        // Without a start there is only the number to go by.
        let started = None;
        assert!(!SeenProcess { started, ..own }.has_ended());
        assert_eq!(SeenProcess::find(0), None);
        assert_eq!(SeenProcess::find(u32::MAX), None);
    }
}
