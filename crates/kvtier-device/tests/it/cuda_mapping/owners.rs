//! Which process exports memory, and whether it has ended.

use kvtier_device::cuda::owner::Owner;
use kvtier_device::{CudaAllocation, CudaStorage, MemorySpec};

use crate::exporter::{Counters, EXPORTED_BYTES, Exporter, UUID, spec, torch};

/// Memory whose users are counted in this file.
fn counted(name: &str) -> MemorySpec {
    let mut storage = torch(&[0; 64], 0, EXPORTED_BYTES);
    storage.allocation = CudaAllocation::Torch {
        handle: None,
        ref_counter: Some((name.into(), 0)),
        event: None,
    };
    spec(storage)
}

/// Links the file under a name with another process id.
fn linked(counters: &Counters, pid: u32) -> Counters {
    let name = format!("/torch_{pid}_78_0");
    let at = |name: &str| format!("/dev/shm{name}");
    std::fs::hard_link(at(&counters.0), at(&name)).unwrap();
    Counters(name)
}

#[test]
fn exit_of_a_proven_owner_is_noticed() {
    let (mut one, mut two) = (Exporter::start(), Exporter::start());
    let files = [one.counters(), one.counters(), two.counters()];
    let [first, second, others] = files.each_ref().map(|file| counted(&file.0));
    let owner = Owner::identify(&[first.clone(), second, first.clone()]).unwrap();
    let other = Owner::identify(std::slice::from_ref(&others)).unwrap();
    assert!(owner != other && owner == owner.clone());
    let both = [owner, other];
    assert_eq!(Owner::exited(&both), Some(vec![false, false]));
    one.kill();
    assert_eq!(Owner::exited(&both), Some(vec![true, false]));
    // The id is free, or of a process that has not mapped the file.
    assert!(Owner::identify(&[first]).is_none());
    assert!(Owner::identify(&[others]).is_some());
    assert_eq!(Owner::exited(&[]), Some(Vec::new()));
}

#[test]
fn unproven_owner_is_none() {
    let (mut one, mut two) = (Exporter::start(), Exporter::start());
    let (file, others) = (one.counters(), two.counters());
    let ours = counted(&file.0);
    assert!(Owner::identify(std::slice::from_ref(&ours)).is_some());
    // A living process that has not mapped the file; one that has not mapped it all.
    let unmapped = linked(&file, two.pid() as u32);
    assert!(Owner::identify(&[counted(&unmapped.0)]).is_none());
    assert!(Owner::identify(&[counted(&others.0), counted(&unmapped.0)]).is_none());
    // Two processes; memory that names none; a file that is not there; none at all; ourselves.
    assert!(Owner::identify(&[ours.clone(), counted(&others.0)]).is_none());
    let raw = spec(CudaStorage {
        device_uuid: UUID.into(),
        allocation: CudaAllocation::Raw { handle: [0; 64] },
        offset: 0,
        bytes: 1,
    });
    assert!(Owner::identify(&[ours.clone(), raw]).is_none());
    assert!(Owner::identify(&[ours, counted(&format!("/torch_{}_79_9", one.pid()))]).is_none());
    assert!(Owner::identify(&[]).is_none());
    let own = linked(&file, std::process::id());
    assert!(Owner::identify(&[counted(&own.0)]).is_none());
}
