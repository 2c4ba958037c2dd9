mod crash;
mod places;
mod suite;

use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;

use kvtier_core::object_key::ObjectKey;
use tempfile::TempDir;

use super::format::{BLOCK, First, RawRecord, Superblock};
use super::*;
use kvtier_l2::conformance::{self, Memory, content, object};

/// Capacity of the files of tests: sparse, so they cost nothing.
const CAPACITY: u64 = 64 << 20;

/// A file in a directory of its own.
pub(super) struct Device {
    _dir: TempDir,
    options: RawOptions,
}

impl Device {
    fn new(change: impl FnOnce(&mut RawOptions)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut options = RawOptions::new(dir.path().join("device"), CAPACITY);
        options.slot_bytes = 4096;
        change(&mut options);
        Self { _dir: dir, options }
    }

    fn path(&self) -> PathBuf {
        self.options.device_path.clone()
    }

    fn open(&self) -> RawBlockAdapter {
        RawBlockAdapter::open(&self.options).unwrap()
    }

    /// Why it cannot be opened.
    fn refusal(&self) -> String {
        let error = RawBlockAdapter::open(&self.options)
            .err()
            .expect("it was opened");
        assert_eq!(error.kind(), ErrorKind::Refused);
        error.to_string()
    }

    fn file(&self) -> std::fs::File {
        let mut options = std::fs::OpenOptions::new();
        options.read(true).write(true).open(self.path()).unwrap()
    }

    fn block(&self, at: u64) -> Vec<u8> {
        let mut block = vec![0; BLOCK as usize];
        self.file().read_exact_at(&mut block, at).unwrap();
        block
    }

    fn superblock(&self) -> Superblock {
        match Superblock::decode(&self.block(0)) {
            First::Ours(superblock) => superblock,
            other => panic!("{other:?}"),
        }
    }

    /// All records on the device.
    fn records(&self) -> Vec<RawRecord> {
        let superblock = self.superblock();
        let numbers = 0..superblock.geometry.records;
        let record = |number| {
            let block = self.block(superblock.geometry.record_at(number));
            RawRecord::decode(&block, number, &superblock)
        };
        numbers.filter_map(record).collect()
    }

    /// The record of a key, and where its bytes are in the file.
    fn place(&self, key: &ObjectKey) -> (RawRecord, u64) {
        let records = self.records().into_iter();
        let record = records.filter(|record| record.key == *key);
        let record = record.max_by_key(|record| record.sequence).unwrap();
        let at = self.superblock().geometry.data_offset() + record.offset;
        (record, at)
    }
}

async fn store(
    adapter: &RawBlockAdapter,
    memory: &Memory,
    object: &ObjectSpec,
) -> Result<Stored, L2Error> {
    let stored = conformance::store(adapter, memory, std::slice::from_ref(object)).await;
    stored.into_iter().next().unwrap()
}

/// Loads an object; its bytes have to be right if it is there.
async fn load(
    adapter: &RawBlockAdapter,
    memory: &Memory,
    object: &ObjectSpec,
) -> Result<(), ErrorKind> {
    let to = memory.buffer(object.len);
    let item = LoadItem {
        object: object.clone(),
        to: to.clone(),
    };
    match adapter.load(vec![item]).await.pop().unwrap() {
        Ok(loaded) => {
            let mut bytes = Vec::new();
            to.read_into(0, object.len, &mut bytes).unwrap();
            assert!(bytes == content(object) && loaded.verified);
            Ok(())
        }
        Err(error) => Err(error.kind()),
    }
}

async fn is_there(adapter: &RawBlockAdapter, object: &ObjectSpec) -> bool {
    adapter.lookup(vec![object.clone()]).await.unwrap() == [Some(format::span(object.len))]
}
