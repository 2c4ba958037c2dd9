//! Processes that are told from later ones with their number.

use rustix::process::{Pid, test_kill_process};

/// A process as it was seen once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SeenProcess {
    pid: Pid,
    /// Clock ticks between boot and its start, where `/proc` tells.
    started: Option<u64>,
}

impl SeenProcess {
    /// The process with this number, if our PID namespace has one.
    pub(crate) fn find(number: u32) -> Option<Self> {
        let pid = Pid::from_raw(i32::try_from(number).ok()?)?;
        let seen = Self {
            pid,
            started: start_time(pid),
        };
        exists(pid).then_some(seen)
    }

    /// Whether it is known to have ended.
    pub(crate) fn is_gone(&self) -> bool {
        let is_other = || {
            let now = start_time(self.pid);
            self.started.is_some() && now.is_some() && now != self.started
        };
        !exists(self.pid) || is_other()
    }
}

/// Every other error is about a process that exists and may not be signalled.
fn exists(pid: Pid) -> bool {
    test_kill_process(pid) != Err(rustix::io::Errno::SRCH)
}

fn start_time(pid: Pid) -> Option<u64> {
    let stat = std::fs::read(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    start_in(&String::from_utf8_lossy(&stat))
}

/// The 22nd field (proc_pid_stat(5)). The second is the program's name in parentheses, in which
/// anything may stand.
fn start_in(stat: &str) -> Option<u64> {
    let (_, from_third) = stat.rsplit_once(')')?;
    from_third.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_is_found_behind_any_name() {
        let rest = "S 1 7 7 0 -1 4194560 95 0 0 0 1 2 3 4 20 0 1 0 987654 4096 0";
        for name in ["sh", "a b", ") 1 2 3 (", ""] {
            assert_eq!(start_in(&format!("7 ({name}) {rest}")), Some(987_654));
        }
        for bad in ["", "7 (sh", "7 (sh) S 1", "7 (sh) S x x x"] {
            assert_eq!(start_in(bad), None);
        }
    }

    #[test]
    fn a_later_process_with_the_same_number_is_another() {
        let own = SeenProcess::find(std::process::id()).unwrap();
        assert!(own.started.is_some() && !own.is_gone());
        let earlier = SeenProcess {
            started: own.started.map(|ticks| ticks - 1),
            ..own
        };
        assert!(earlier.is_gone());
        // Without a start there is only the number to go by.
        let started = None;
        assert!(!SeenProcess { started, ..own }.is_gone());
        assert_eq!(SeenProcess::find(0), None);
        assert_eq!(SeenProcess::find(u32::MAX), None);
    }
}
