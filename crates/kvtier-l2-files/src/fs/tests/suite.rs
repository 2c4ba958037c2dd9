//! The conformance suite.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

use super::*;
use kvtier_l2::{
    BoxFuture,
    conformance::{Damage, Subject, check_some, run},
};

struct Directory {
    _dir: TempDir,
    options: FsOptions,
}

impl Directory {
    fn new(change: impl FnOnce(&mut FsOptions)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut options = FsOptions::new(dir.path());
        engines::set(&mut options);
        change(&mut options);
        Self { _dir: dir, options }
    }
}

impl Subject for Directory {
    fn open(&self) -> BoxFuture<'_, Arc<dyn Adapter>> {
        Box::pin(async {
            let adapter: Arc<dyn Adapter> = Arc::new(FsAdapter::open("fs", &self.options).unwrap());
            adapter
        })
    }

    fn damage(&self, key: &ObjectKey, how: Damage) -> bool {
        let place = FilePlace::of(key, self.options.names, self.options.layout);
        let path = self.options.base_path.join(place.path);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        let len = file.metadata().unwrap().len();
        match how {
            Damage::Flip => {
                let mut byte = [0];
                file.read_at(&mut byte, len / 3).unwrap();
                file.write_at(&[byte[0] ^ 0x10], len / 3).unwrap();
            }
            Damage::Truncate => file.set_len(len - 1).unwrap(),
            Damage::Extend => file.set_len(len + 1).unwrap(),
            Damage::Empty => file.set_len(0).unwrap(),
            Damage::Remove => std::fs::remove_file(&path).unwrap(),
        }
        true
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flat_directory_passes() {
    run(|| Directory::new(|_| {})).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sharded_direct_files_with_old_names_pass() {
    let make = || {
        Directory::new(|options| {
            options.layout = Layout::Sharded;
            options.names = Naming::Ungrouped;
            options.use_odirect = true;
            options.relative_tmp_dir = "tmp".into();
            options.num_workers = 1;
        })
    };
    // The case of ten thousand keys would only make ten thousand directories.
    let report = check_some(make, |case| case != "ten_thousand_keys").await;
    assert!(report.failed().next().is_none(), "\n{report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn directories_of_nixl_pass() {
    for direct in [false, true] {
        let make = || {
            Directory::new(|options| {
                options.names = Naming::Nixl;
                options.align_bytes = 1 << 16;
                options.layout = Layout::Sharded;
                options.use_odirect = direct;
            })
        };
        let report = check_some(make, |case| case != "ten_thousand_keys").await;
        assert!(report.failed().next().is_none(), "\n{report}");
    }
}
