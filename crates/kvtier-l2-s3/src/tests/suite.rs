//! The conformance suite, over whole objects and over objects in parts.

use super::server::Server;
use super::*;
use kvtier_l2::conformance::{Damage, Subject, check_some, run};

/// A bucket of its own.
struct Own {
    server: Arc<Server>,
    options: S3Options,
}

impl Subject for Own {
    fn open(&self) -> BoxFuture<'_, Arc<dyn Adapter>> {
        Box::pin(async {
            let adapter: Arc<dyn Adapter> = Arc::new(S3Adapter::open(&self.options));
            adapter
        })
    }

    fn damage(&self, key: &ObjectKey, how: Damage) -> bool {
        let name = name::of(&self.options.key_prefix, key);
        self.server.with(|bucket| {
            if how == Damage::Remove {
                bucket.objects.remove(&name);
            } else {
                how.apply(&mut bucket.objects.get_mut(&name).unwrap().bytes);
            }
        });
        true
    }
}

/// Makes buckets.
fn maker(change: fn(&mut S3Options)) -> impl FnMut() -> Own {
    move || {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        let server = Arc::new(Server::on(listener));
        let mut options = options(server.port);
        change(&mut options);
        Own { server, options }
    }
}

// proves: docs/compare.md#s3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bucket_passes() {
    run(maker(|_| {})).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bucket_of_small_parts_and_few_connections_passes() {
    let make = maker(|options| {
        options.multipart_bytes = 50_000;
        options.max_connections = 3;
        options.key_prefix = "part/a b".into();
    });
    // Small objects are the same in both.
    let report = check_some(make, |case| case != "ten_thousand_keys").await;
    assert!(report.failed().next().is_none(), "\n{report}");
}
