//! Objects of other writers, of other layouts, damaged, large, and those that are deleted.

use tokio::sync::Notify;

use super::server::{Reply, Request, Stored};
use super::*;
use crate::metadata::{HEADER, encode};
use kvtier_l2::{
    PAGE_BOUND,
    conformance::{evicted_by_the_backend_leaves_the_index, object, poll_once},
};

#[tokio::test]
async fn objects_without_metadata_are_misses_unless_trusted() {
    let bed = bed(|_| {}).await;
    let mut one = object(1, 1000);
    let stored = Stored {
        bytes: vec![5; 1000],
        ..Stored::default()
    };
    let name = name::of("", &one.key);
    bed.server.with(|bucket| bucket.put(&name, stored));
    for layout in [one.layout, one.layout | PAGE_BOUND] {
        one.layout = layout;
        for (trust, require, is_hit) in [
            (false, false, false),
            (true, false, true),
            (true, true, false),
        ] {
            let mut options = options(bed.server.port);
            options.trust_missing_layout = trust;
            options.require_checksum = require;
            let adapter = S3Adapter::open(&options);
            let found = adapter.lookup(vec![one.clone()]).await;
            assert_eq!(found, Ok(vec![is_hit.then_some(1000)]));
            let loaded = load(&adapter, &bed.memory, std::slice::from_ref(&one)).await;
            if is_hit {
                assert_eq!(loaded, [Ok(vec![5; 1000])])
            } else {
                assert_eq!(kinds(loaded), [Some(ErrorKind::NotFound)])
            }
            let status = adapter.status();
            assert_eq!(status["unverified_loads"], u64::from(is_hit));
            assert_eq!(status["missing_layout_lookups"], if is_hit { 0 } else { 2 });
        }
    }
}

#[tokio::test]
async fn other_layouts_and_swapped_objects_are_no_hits() {
    let bed = bed(|_| {}).await;
    let ours = object(1, 1000);
    let mut other = ours.clone();
    other.layout ^= 1;
    let third = object(3, 1000);
    let one = std::slice::from_ref(&ours);
    store(&bed.adapter, &bed.memory, std::slice::from_ref(&other)).await;
    assert_eq!(bed.adapter.lookup(one.to_vec()).await, Ok(vec![None]));
    let kind = kinds(load(&bed.adapter, &bed.memory, one).await)[0];
    assert_eq!(kind, Some(ErrorKind::NotFound));
    assert_eq!(bed.adapter.status()["other_layout_loads"], 1);
    // A store replaces it.
    store(&bed.adapter, &bed.memory, one).await;
    assert_eq!(
        load(&bed.adapter, &bed.memory, one).await,
        [Ok(content(&ours))]
    );
    // Another object under the key, with its metadata, and with that of the right one.
    store(&bed.adapter, &bed.memory, std::slice::from_ref(&third)).await;
    let (name, of_third) = (name::of("", &ours.key), name::of("", &third.key));
    bed.server.with(|bucket| {
        let wrong = bucket.objects[&of_third].clone();
        bucket.put(&name, wrong);
    });
    assert_eq!(bed.adapter.lookup(one.to_vec()).await, Ok(vec![None]));
    let kind = kinds(load(&bed.adapter, &bed.memory, one).await)[0];
    assert_eq!(kind, Some(ErrorKind::NotFound));
    store(&bed.adapter, &bed.memory, one).await;
    bed.server.with(|bucket| {
        let bytes = bucket.objects[&of_third].bytes.clone();
        bucket.objects.get_mut(&name).unwrap().bytes = bytes;
    });
    let kind = kinds(load(&bed.adapter, &bed.memory, one).await)[0];
    assert_eq!(kind, Some(ErrorKind::Corrupt));
    // Damaged metadata.
    for value in ["", "xyz", "00"] {
        bed.server.with(|bucket| {
            let stored = bucket.objects.get_mut(&name).unwrap();
            for old in stored.metadata.values_mut() {
                *old = value.to_owned();
            }
        });
        assert_eq!(bed.adapter.lookup(one.to_vec()).await, Ok(vec![None]));
        let kind = kinds(load(&bed.adapter, &bed.memory, one).await)[0];
        assert_eq!(kind, Some(ErrorKind::Corrupt), "{value}");
    }
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn equal_objects_are_stored_once_and_damaged_ones_again() {
    let bed = bed(|_| {}).await;
    let one = [object(1, 1000)];
    let puts = || {
        let requests = bed.server.requests();
        requests
            .iter()
            .filter(|request| request.method == "PUT")
            .count()
    };
    assert_eq!(
        store(&bed.adapter, &bed.memory, &one).await,
        [Ok(kvtier_l2::Stored::Written(1000))]
    );
    assert_eq!(
        store(&bed.adapter, &bed.memory, &one).await,
        [Ok(kvtier_l2::Stored::AlreadyThere(1000))]
    );
    assert_eq!(
        (puts(), bed.adapter.status()["skipped_stores"].clone()),
        (1, 1.into())
    );
    bed.server
        .with(|bucket| bucket.objects.values_mut().next().unwrap().bytes[5] ^= 1);
    assert_eq!(
        kinds(load(&bed.adapter, &bed.memory, &one).await),
        [Some(ErrorKind::Corrupt)]
    );
    store(&bed.adapter, &bed.memory, &one).await;
    assert_eq!(puts(), 2);
    assert_eq!(
        load(&bed.adapter, &bed.memory, &one).await,
        [Ok(content(&one[0]))]
    );
}

#[tokio::test]
async fn large_objects_are_of_one_version() {
    let bed = bed(|options| options.multipart_bytes = 300).await;
    let one = [object(1, 1000)];
    store(&bed.adapter, &bed.memory, &one).await;
    // It is replaced behind the first part: by the same bytes, by others with their metadata, or deleted.
    for (how, expected) in [
        (0, None),
        (1, Some(ErrorKind::Unavailable)),
        (2, Some(ErrorKind::NotFound)),
    ] {
        let mut is_done = false;
        let wanted = one[0].clone();
        bed.server.answers(move |request, bucket| {
            if request.method != "GET" {
                return None;
            }
            let answer = bucket.answer(request);
            if !std::mem::replace(&mut is_done, true) {
                let (key, mut stored) = bucket.objects.pop_first().unwrap();
                if how == 1 {
                    stored.bytes = vec![1; 1000];
                    let sum = kvtier_memory::checksum::checksum128(&stored.bytes);
                    stored.metadata = [(HEADER.to_owned(), encode(&wanted, sum))].into();
                }
                if how < 2 {
                    bucket.put(&key, stored);
                }
            }
            Some(answer)
        });
        let loaded = load(&bed.adapter, &bed.memory, &one).await;
        if let Ok(bytes) = &loaded[0] {
            assert_eq!(*bytes, content(&one[0]));
        }
        assert_eq!(kinds(loaded), [expected], "{how}");
        bed.server.recovers();
        store(&bed.adapter, &bed.memory, &one).await;
    }
    // A server without ranges sends all of it, and one with wrong ranges nothing.
    bed.server.answers(|request, bucket| {
        let mut request = request.clone();
        request.headers.remove("range");
        Some(bucket.answer(&request))
    });
    assert_eq!(
        load(&bed.adapter, &bed.memory, &one).await,
        [Ok(content(&one[0]))]
    );
    // rclone answers ranges by 200.
    bed.server.answers(|request, bucket| {
        let mut answer = bucket.answer(request);
        if answer.bytes.starts_with(b"HTTP/1.1 206") {
            answer.bytes[9..12].copy_from_slice(b"200");
        }
        Some(answer)
    });
    assert_eq!(
        load(&bed.adapter, &bed.memory, &one).await,
        [Ok(content(&one[0]))]
    );
    bed.server.answers(|request, bucket| {
        let mut request = request.clone();
        request.headers.insert("range".into(), "bytes=1-300".into());
        (request.method == "GET").then(|| bucket.answer(&request))
    });
    assert_eq!(
        kinds(load(&bed.adapter, &bed.memory, &one).await),
        [Some(ErrorKind::Corrupt)]
    );
}

#[tokio::test]
async fn ranges_of_two_versions_are_not_mixed_where_nothing_verifies_them() {
    let bed = bed(|options| {
        options.multipart_bytes = 300;
        options.trust_missing_layout = true;
    })
    .await;
    let one = [object(1, 1000)];
    let name = name::of("", &one[0].key);
    let version = |byte| Stored {
        bytes: vec![byte; 1000],
        ..Stored::default()
    };
    bed.server.with(|bucket| bucket.put(&name, version(1)));
    let mut is_done = false;
    bed.server.answers(move |request, bucket| {
        let mut request = request.clone();
        request.headers.remove("if-match");
        let answer = bucket.answer(&request);
        if !std::mem::replace(&mut is_done, true) {
            bucket.put(&name, version(2));
        }
        Some(answer)
    });
    let loaded = load(&bed.adapter, &bed.memory, &one).await;
    assert_eq!(loaded, [Ok(vec![2; 1000])]);
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn object_deleted_in_the_bucket_leaves_the_index() {
    let bed = bed(|_| {}).await;
    evicted_by_the_backend_leaves_the_index(Arc::new(bed.adapter), &bed.memory, |_| {
        bed.server.with(|bucket| bucket.objects.clear());
    })
    .await;
}

/// Drops a store once its upload has come as far as `is_begun` says, calls `then`, and closes the adapter.
async fn upload_is_removed(bed: Bed, is_begun: impl Fn(&Request) -> bool, then: impl FnOnce()) {
    let one = object(1, 1000);
    let item = StoreItem {
        from: bed.memory.filled(&content(&one)),
        object: one,
    };
    let mut storing = bed.adapter.store(vec![item]);
    while !bed.server.requests().iter().any(&is_begun) {
        assert!(poll_once(&mut storing).await.is_none());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(bed.server.with(|bucket| bucket.uploads.len()), 1);
    drop(storing);
    then();
    bed.adapter.close().await;
    assert_eq!(bed.server.with(|bucket| bucket.uploads.len()), 0);
}

fn in_parts(options: &mut S3Options) {
    options.multipart_bytes = 300;
    options.request_timeout = Duration::from_secs(60);
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn closing_removes_uploads_in_flight() {
    let bed = bed(in_parts).await;
    let is_part = |request: &Request| request.query.contains_key("partNumber");
    bed.server
        .answers(move |request, _| is_part(request).then(Reply::none));
    upload_is_removed(bed, is_part, || ()).await;
}

#[tokio::test]
async fn closing_removes_an_upload_whose_id_was_on_its_way() {
    let bed = bed(in_parts).await;
    let begins = |request: &Request| request.query.contains_key("uploads");
    let sent = Arc::new(Notify::new());
    let held = Arc::clone(&sent);
    bed.server.answers(move |request, bucket| {
        begins(request).then(|| Reply {
            held: Some(Arc::clone(&held)),
            ..bucket.answer(request)
        })
    });
    upload_is_removed(bed, begins, || sent.notify_one()).await;
}

#[tokio::test]
async fn closed_adapter_sends_nothing() {
    let bed = bed(|_| {}).await;
    bed.adapter.close().await;
    bed.server.forget_requests();
    bed.adapter.check().await;
    for error in [
        bed.adapter.list(None, 10).await.map(drop),
        bed.adapter.recover(&|_| true).await.map(drop),
        bed.adapter.lookup(vec![object(1, 10)]).await.map(drop),
    ] {
        let error = error.unwrap_err().to_string();
        assert!(error.contains("closed"), "{error}");
    }
    assert!(bed.server.requests().is_empty());
}

#[tokio::test]
async fn closing_waits_for_one_page_of_a_listing() {
    let bed = bed(|_| {}).await;
    let objects: Vec<_> = (0..3).map(|number| object(number, 100)).collect();
    store(&bed.adapter, &bed.memory, &objects).await;
    // Pages without an end.
    bed.server.answers(|request, _| {
        let number = request.query.get("continuation-token");
        let next = number.map_or(1, |number| number.parse::<u64>().unwrap() + 1);
        let body = format!(
            "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>{next}</NextContinuationToken></ListBucketResult>"
        );
        (request.method == "GET").then(|| Reply::new(200, &[], body.as_bytes()))
    });
    let recovering = bed.adapter.recover(&|_| true);
    let (recovered, ()) = tokio::join!(recovering, async {
        while bed.server.requests().len() < 10 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        bed.adapter.close().await;
    });
    let error = recovered.unwrap_err().to_string();
    assert!(error.contains("closed"), "{error}");
}

#[tokio::test]
async fn objects_whole_and_in_parts_are_stored_in_the_class_and_encryption_that_are_configured() {
    let keys = serde_json::json!({
        "storage_class": "ONEZONE_IA", "server_side_encryption": "aws:kms", "kms_key_id": "key-7",
    });
    let configured = S3Options::of(&config::parse(keys).unwrap()).unwrap();
    let bed = bed(|options| {
        options.object_headers = configured.object_headers;
        options.multipart_bytes = 300;
    })
    .await;
    for (objects, method) in [([object(1, 200)], "PUT"), ([object(2, 1000)], "POST")] {
        bed.server.forget_requests();
        let stored = store(&bed.adapter, &bed.memory, &objects).await;
        assert_eq!(kinds(stored), [None]);
        let requests = bed.server.requests();
        // The one that makes the object, or begins its upload.
        let makes = requests.iter().find(|request| request.method == method);
        let makes = &makes.unwrap().headers;
        for (name, value) in [
            ("x-amz-storage-class", "ONEZONE_IA"),
            ("x-amz-server-side-encryption", "aws:kms"),
            ("x-amz-server-side-encryption-aws-kms-key-id", "key-7"),
        ] {
            assert_eq!(makes[name], value, "{method}");
            assert!(makes["authorization"].contains(name), "{name} is signed");
        }
    }
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn failed_uploads_are_removed() {
    let bed = bed(|options| options.multipart_bytes = 300).await;
    let one = [object(1, 1000)];
    let fails = |of: fn(&Request) -> bool, reply: Reply| {
        bed.server
            .answers(move |request, _| of(request).then(|| reply.clone()));
    };
    let is_part = |request: &Request| {
        request
            .query
            .get("partNumber")
            .is_some_and(|part| part == "3")
    };
    let is_end =
        |request: &Request| request.method == "POST" && request.query.contains_key("uploadId");
    let late = b"<Error><Code>InternalError</Code></Error>";
    for (of, reply, kind) in [
        (
            is_part as fn(&Request) -> bool,
            Reply::error(503, "SlowDown"),
            ErrorKind::Unavailable,
        ),
        (is_part, Reply::error(507, ""), ErrorKind::Full),
        (is_part, Reply::new(200, &[], b""), ErrorKind::Unavailable),
        (
            is_end,
            Reply::error(500, "InternalError"),
            ErrorKind::Unavailable,
        ),
        (is_end, Reply::new(200, &[], late), ErrorKind::Unavailable),
        (is_end, Reply::new(200, &[], b"x"), ErrorKind::Unavailable),
    ] {
        fails(of, reply);
        let stored = store(&bed.adapter, &bed.memory, &one).await;
        assert_eq!(kinds(stored), [Some(kind)]);
        bed.memory.until_unused().await;
        while bed.server.with(|bucket| !bucket.uploads.is_empty()) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(bed.server.with(|bucket| bucket.objects.is_empty()));
    }
    bed.server.recovers();
    assert_eq!(kinds(store(&bed.adapter, &bed.memory, &one).await), [None]);
    let stored = bed
        .server
        .with(|bucket| bucket.objects.values().next().unwrap().clone());
    assert_eq!(stored.bytes, content(&one[0]));
    assert_eq!(
        load(&bed.adapter, &bed.memory, &one).await,
        [Ok(content(&one[0]))]
    );
}

#[tokio::test]
async fn deletes_are_batched_where_the_server_can() {
    let bed = bed(|_| {}).await;
    let mut objects: Vec<_> = (0..20).map(|number| object(number, 100)).collect();
    objects.push(kvtier_l2::conformance::object_with(
        1,
        100,
        "line\nend",
        "<&>",
    ));
    let keys = |objects: &[ObjectSpec]| {
        objects
            .iter()
            .map(|object| object.key.clone())
            .collect::<Vec<_>>()
    };
    store(&bed.adapter, &bed.memory, &objects).await;
    bed.server.forget_requests();
    let deleted = bed.adapter.delete(keys(&objects)).await;
    assert!(
        deleted.iter().all(|deleted| *deleted == Ok(true)),
        "{deleted:?}"
    );
    let of = |method: &str| {
        let requests = bed.server.requests();
        requests
            .into_iter()
            .filter(|request| request.method == method)
            .collect::<Vec<_>>()
    };
    // XML has no ends of lines.
    assert_eq!((of("POST").len(), of("DELETE").len()), (1, 1));
    assert!(of("POST")[0].headers.contains_key("content-md5"));
    // One of them is not deleted.
    store(&bed.adapter, &bed.memory, &objects).await;
    let kept = name::of("", &objects[3].key);
    bed.server.answers(move |request, bucket| {
        if request.method != "POST" {
            return None;
        }
        let stored = bucket.objects[&kept].clone();
        bucket.answer(request);
        bucket.put(&kept, stored);
        let body = format!(
            "<DeleteResult><Error><Key>{}</Key><Code>AccessDenied</Code></Error></DeleteResult>",
            xml::escaped(&kept)
        );
        Some(Reply::new(200, &[], body.as_bytes()))
    });
    let deleted = kinds(bed.adapter.delete(keys(&objects)).await);
    assert_eq!(deleted[3], Some(ErrorKind::Refused));
    assert_eq!(deleted.iter().flatten().count(), 1);
    // A server without such requests.
    store(&bed.adapter, &bed.memory, &objects).await;
    bed.server.answers(|request, _| {
        (request.method == "POST").then(|| Reply::error(501, "NotImplemented"))
    });
    for _ in 0..2 {
        let deleted = bed.adapter.delete(keys(&objects)).await;
        assert!(deleted.iter().all(Result::is_ok), "{deleted:?}");
        assert!(bed.server.with(|bucket| bucket.objects.is_empty()));
    }
}

#[tokio::test]
async fn hostile_listings_are_errors() {
    let bed = bed(|_| {}).await;
    let long = "x".repeat(9 << 20);
    let next = |token: &str| {
        format!(
            "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken></ListBucketResult>"
        )
    };
    for body in ["", "<html>", &long, &next("same")] {
        let reply = Reply::new(200, &[], body.as_bytes());
        bed.server.answers(move |_, _| Some(reply.clone()));
        let recovered = bed.adapter.recover(&|_| true).await;
        assert_eq!(
            recovered.unwrap_err().kind(),
            ErrorKind::Unavailable,
            "{body:.50}"
        );
    }
    // Pages in a circle.
    let mut page = 0;
    bed.server.answers(move |_, _| {
        page += 1;
        Some(Reply::new(
            200,
            &[],
            next(&(page % 3).to_string()).as_bytes(),
        ))
    });
    assert!(bed.adapter.recover(&|_| true).await.is_err());
    bed.server.recovers();
    bed.server.with(|bucket| {
        bucket.put(
            "a/file",
            Stored {
                bytes: vec![1],
                ..Stored::default()
            },
        );
    });
    let recovered = bed.adapter.recover(&|_| true).await.unwrap();
    assert_eq!((recovered.objects, recovered.foreign), (0, 1));
}
