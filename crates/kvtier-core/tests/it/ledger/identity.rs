//! Ledgers of other servers, times and versions.

use kvtier_core::ledger::{FORMAT_VERSION, Identity, Ledger, LedgerError};

use super::{ALIGN, CAPACITY, IDENTITY, Memory, SECOND, Shared, keys, record, stored};

// proves: docs/operate.md#l1-after-a-restart
#[test]
fn ledger_of_another_server_is_not_read() {
    let memory = stored();
    let open = |identity: Identity, now| {
        let opened = Ledger::open(Shared::of(&memory), &identity, now, CAPACITY, ALIGN);
        opened.map(|_| ()).map_err(|(error, _)| error.to_string())
    };
    let later = IDENTITY.origin + SECOND;
    assert_eq!(open(IDENTITY, later), Ok(()));
    let other = |change: fn(&mut Identity)| {
        let mut identity = IDENTITY;
        change(&mut identity);
        identity
    };
    // Tick 0 is the ledger's.
    assert_eq!(open(other(|it| it.origin = 1), later), Ok(()));
    for (identity, told) in [
        (other(|it| it.arena = [25, 8]), "arena"),
        (other(|it| it.arena = [24, 7]), "arena"),
        (other(|it| it.chunk_size = 16), "chunk size"),
        (other(|it| it.hash_algorithm = 2), "hash algorithm"),
        (other(|it| it.tenants = 4), "--hash-salts"),
        (other(|it| it.instance = 8), "instance"),
    ] {
        let error = open(identity, later).unwrap_err();
        assert!(error.contains(told), "{error}");
    }
    assert_eq!(
        open(IDENTITY, IDENTITY.origin - 1),
        Err("its clock is ahead".to_owned())
    );
    let mut newer = memory.clone();
    newer.write(1, FORMAT_VERSION + 1);
    let told = super::open(&newer).unwrap_err().to_string();
    let version = format!("format version {}", FORMAT_VERSION + 1);
    assert!(told.contains(&version), "{told}");
    for len in [0, 1, 511] {
        let truncated = Memory {
            len,
            ..memory.clone()
        };
        assert_eq!(super::open(&truncated).err(), Some(LedgerError::Absent));
    }
    // Records that are not there any more are objects that are not.
    let truncated = Memory {
        len: record(1).end - 1,
        ..memory.clone()
    };
    assert_eq!(keys(&truncated), [(0, 0)]);
    let zeroed = Memory {
        len: memory.len,
        ..Memory::default()
    };
    assert_eq!(super::open(&zeroed).err(), Some(LedgerError::Absent));
}
