//! The conformance suite.

use super::*;
use crate::fs::IoEngine;
use kvtier_l2::conformance::{Damage, Subject, run};

impl Subject for Device {
    fn open(&self) -> BoxFuture<'_, Arc<dyn Adapter>> {
        Box::pin(async {
            let adapter: Arc<dyn Adapter> = Arc::new(Device::open(self));
            adapter
        })
    }

    fn damage(&self, key: &ObjectKey, how: Damage) -> bool {
        let (record, at) = self.place(key);
        let file = self.file();
        match how {
            Damage::Flip => {
                let mut byte = [0];
                file.read_exact_at(&mut byte, at + record.len / 3).unwrap();
                file.write_all_at(&[byte[0] ^ 0x10], at + record.len / 3)
                    .unwrap();
            }
            Damage::Empty => file
                .write_all_at(&vec![0; record.len as usize], at)
                .unwrap(),
            // An object has the length of its record.
            Damage::Truncate | Damage::Extend | Damage::Remove => return false,
        }
        true
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_past_the_page_cache_passes() {
    run(|| Device::new(|_| {})).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_with_one_thread_of_posix_calls_passes() {
    let make = || {
        Device::new(|options| {
            options.use_odirect = false;
            options.io_engine = IoEngine::Posix;
            options.num_workers = 1;
            options.fsync = true;
        })
    };
    run(make).await;
}
