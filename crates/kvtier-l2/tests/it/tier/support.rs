//! The backend and the memory of a test.

use std::sync::Arc;

use kvtier_core::{ChunkHash, ObjectKey};
use kvtier_l2::testing::TestAdapter;
use kvtier_l2::{Buffer, Capabilities, LoadItem, ObjectSpec, StoreItem};
use kvtier_memory::{Arena, ArenaKind, Extent};

/// Bytes per object in the backend beyond those of the object, as a trailer would take.
pub const OVERHEAD: u64 = 16;

/// Returns an adapter with these capabilities beside those that all tests need.
pub fn adapter_with(capabilities: Capabilities) -> TestAdapter {
    let capabilities = Capabilities {
        delete: true,
        verifies: true,
        ..capabilities
    };
    TestAdapter::new(capabilities, OVERHEAD)
}

pub fn test_adapter() -> Arc<TestAdapter> {
    Arc::new(adapter_with(Capabilities::default()))
}

/// Returns an adapter to which other processes write too.
pub fn shared_adapter() -> Arc<TestAdapter> {
    Arc::new(adapter_with(Capabilities {
        shared: true,
        ..Capabilities::default()
    }))
}

/// Returns an adapter that can list its objects after a restart.
pub fn listing_adapter() -> TestAdapter {
    adapter_with(Capabilities {
        list: true,
        ..Capabilities::default()
    })
}

/// Memory of L1 for the objects of a test.
pub struct Bytes(Arc<Arena>);

impl Bytes {
    pub fn new() -> Self {
        Self(Arc::new(
            Arena::create(ArenaKind::Anonymous, 1 << 20).unwrap(),
        ))
    }

    pub fn buffer(&self, len: u64) -> Buffer {
        Buffer::new(Arc::clone(&self.0), Extent::new(0, len), Arc::new(()))
    }

    pub fn to_store(&self, key: &ObjectKey, len: u64) -> StoreItem {
        StoreItem {
            object: spec(key, len),
            from: self.buffer(len),
        }
    }

    pub fn to_load(&self, key: &ObjectKey, len: u64) -> LoadItem {
        LoadItem {
            object: spec(key, len),
            to: self.buffer(len),
        }
    }
}

pub fn spec(key: &ObjectKey, len: u64) -> ObjectSpec {
    ObjectSpec {
        key: key.clone(),
        len,
        layout: 1,
    }
}

pub fn key(number: u8, salt: &str) -> ObjectKey {
    ObjectKey::new(ChunkHash([number; 32]), "some/model", 0x0100_0100, 0, salt).unwrap()
}
