//! The process that lends the memory of a registration, as far as it can be proven which one that is: who holds it learns
//! at once when it ends, and need not guess from silence.
//!
//! PyTorch names the process in the names of its counter files. That is a guess and no more: process ids mean something in
//! one PID namespace only, they are used again, and a name is what somebody wrote. So the process is first held by a
//! descriptor, which never comes to mean another one; then it must have these very files mapped, as the one whose
//! PyTorch counts in them has; and then it must still live, so that it was this one that was looked at. Where any of that
//! fails there is no owner, and nothing is known.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use kvtier_memory::has_mapped;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::ref_counter::{file_of, process_of};
use crate::spec::{CudaAllocation, MemorySpec};

/// A process that lives, or has ended, and is no other.
#[derive(Debug, Clone)]
pub struct Owner(Arc<OwnedFd>);

impl Owner {
    /// The one process that lends all of these memories; `None` when that cannot be proven.
    pub fn prove(memories: &[MemorySpec]) -> Option<Self> {
        let names: Option<BTreeSet<_>> = memories.iter().map(counter_file).collect();
        let names = names?;
        let mut processes = names.iter().map(|name| process_of(name));
        let named = processes.next()??;
        if !processes.all(|other| other == Some(named)) || named == std::process::id() as i32 {
            return None;
        }
        let process = pidfd_open(Pid::from_raw(named)?, PidfdFlags::empty()).ok()?;
        let files: Option<Vec<_>> = names.iter().map(|name| file_of(name)).collect();
        let has_mapped = has_mapped(number_in_proc(&process)?, files?);
        let owner = Self(Arc::new(process));
        let lives = Self::ended(std::slice::from_ref(&owner)) == Some(vec![false]);
        (has_mapped && lives).then_some(owner)
    }

    /// Which of them have ended, by one call of the system; nothing when it does not say.
    pub fn ended(owners: &[Self]) -> Option<Vec<bool>> {
        let fds = owners.iter().map(|owner| PollFd::new(owner, PollFlags::IN));
        let mut fds: Vec<_> = fds.collect();
        let at_once = Timespec::default();
        poll(&mut fds, Some(&at_once)).ok()?;
        let readable = |fd: &PollFd<'_>| fd.revents().contains(PollFlags::IN);
        Some(fds.iter().map(readable).collect())
    }
}

impl PartialEq for Owner {
    /// Whether both are the same proof: another one may be of the same process.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Becomes readable when the process has ended.
impl AsFd for Owner {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The name of the file that counts who uses a memory.
fn counter_file(memory: &MemorySpec) -> Option<&[u8]> {
    match memory {
        MemorySpec::Cuda(storage) => match &storage.allocation {
            CudaAllocation::Torch { ref_counter, .. } => {
                ref_counter.as_ref().map(|(name, _)| name.as_slice())
            }
            CudaAllocation::Raw { .. } | CudaAllocation::Vmm { .. } => None,
        },
        MemorySpec::CpuShm { .. } | MemorySpec::Unsupported { .. } => None,
    }
}

/// What the process is called in `/proc` as it is mounted here, which may be that of another namespace than ours.
fn number_in_proc(process: &OwnedFd) -> Option<u32> {
    let info = format!("/proc/self/fdinfo/{}", process.as_raw_fd());
    let info = std::fs::read_to_string(info).ok()?;
    let number = info.lines().find_map(|line| line.strip_prefix("Pid:"))?;
    // 0 and -1 are none.
    number.trim().parse().ok().filter(|number| *number > 0)
}
