//! Which process lends memory, and whether it has ended.

use kvtier_device::cuda::owner::Owner;
use kvtier_device::{CudaAllocation, CudaStorage, MemorySpec};

use crate::lender::{Counters, LENT, Lender, UUID, spec, torch};

/// Memory whose users are counted in this file.
fn counted(name: &str) -> MemorySpec {
    let mut storage = torch(&[0; 64], 0, LENT);
    storage.allocation = CudaAllocation::Torch {
        handle: None,
        ref_counter: Some((name.into(), 0)),
        event: None,
    };
    spec(storage)
}

/// The same file under a name that says another process.
fn linked(counters: &Counters, pid: u32) -> Counters {
    let name = format!("/torch_{pid}_78_0");
    let at = |name: &str| format!("/dev/shm{name}");
    std::fs::hard_link(at(&counters.0), at(&name)).unwrap();
    Counters(name)
}

#[test]
fn the_end_of_a_process_is_known_by_the_files_it_has_mapped() {
    let (mut one, mut two) = (Lender::start(), Lender::start());
    let files = [one.counters(), one.counters(), two.counters()];
    let [first, second, others] = files.each_ref().map(|file| counted(&file.0));
    let owner = Owner::prove(&[first.clone(), second, first.clone()]).unwrap();
    let other = Owner::prove(std::slice::from_ref(&others)).unwrap();
    assert!(owner != other && owner == owner.clone());
    let both = [owner, other];
    assert_eq!(Owner::ended(&both), Some(vec![false, false]));
    one.kill();
    assert_eq!(Owner::ended(&both), Some(vec![true, false]));
    // The id is nobody's, or of somebody who has not mapped the file.
    assert!(Owner::prove(&[first]).is_none());
    assert!(Owner::prove(&[others]).is_some());
    assert_eq!(Owner::ended(&[]), Some(Vec::new()));
}

#[test]
fn what_is_not_certain_is_not_known() {
    let (mut one, mut two) = (Lender::start(), Lender::start());
    let (file, others) = (one.counters(), two.counters());
    let ours = counted(&file.0);
    assert!(Owner::prove(std::slice::from_ref(&ours)).is_some());
    // A living process that has not mapped the file; one that has not mapped it all.
    let lent = linked(&file, two.pid() as u32);
    assert!(Owner::prove(&[counted(&lent.0)]).is_none());
    assert!(Owner::prove(&[counted(&others.0), counted(&lent.0)]).is_none());
    // Two processes; memory that names none; a file that is not there; none at all; ourselves.
    assert!(Owner::prove(&[ours.clone(), counted(&others.0)]).is_none());
    let raw = spec(CudaStorage {
        device_uuid: UUID.into(),
        allocation: CudaAllocation::Raw { handle: [0; 64] },
        offset: 0,
        bytes: 1,
    });
    assert!(Owner::prove(&[ours.clone(), raw]).is_none());
    assert!(Owner::prove(&[ours, counted(&format!("/torch_{}_79_9", one.pid()))]).is_none());
    assert!(Owner::prove(&[]).is_none());
    let own = linked(&file, std::process::id());
    assert!(Owner::prove(&[counted(&own.0)]).is_none());
}
