//! Answers of a server that fails in every way: no wrong byte, nothing that hangs, and each error of its own kind.

use std::collections::BTreeSet;

use super::server::{Bucket, Reply, Request, Server, Then, date};
use super::*;
use crate::metadata::{HEADER, encode};
use kvtier_l2::conformance::object;

impl Bed {
    /// Kinds of the errors of loads of stored objects while the server answers loads by `reply`.
    async fn load_error(
        &self,
        reply: impl Fn(Reply) -> Reply + Send + 'static,
    ) -> Option<ErrorKind> {
        let one = [object(1, 1000)];
        self.server.recovers();
        assert_eq!(
            kinds(store(&self.adapter, &self.memory, &one).await),
            [None]
        );
        self.server.answers(move |request, bucket| {
            (request.method == "GET").then(|| reply(bucket.answer(request)))
        });
        let kind = kinds(load(&self.adapter, &self.memory, &one).await)[0];
        self.memory.until_unused().await;
        kind
    }
}

fn of_status(status: u16, code: &str) -> impl Fn(Reply) -> Reply + Send + 'static {
    let reply = Reply::error(status, code);
    move |_| reply.clone()
}

// proves: docs/compare.md#s3
// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn only_whole_objects_are_loaded() {
    let bed = bed(|_| {}).await;
    assert_eq!(bed.load_error(|reply| reply).await, None);
    let cut = |bytes: usize, then| {
        move |reply: Reply| {
            let left = reply.bytes.len() - bytes;
            Reply::raw(reply.bytes[..left].to_vec(), then)
        }
    };
    let unavailable = Some(ErrorKind::Unavailable);
    assert_eq!(bed.load_error(cut(1, Then::Close)).await, unavailable);
    assert_eq!(bed.load_error(cut(1000, Then::Close)).await, unavailable);
    assert_eq!(bed.load_error(cut(1100, Then::Close)).await, unavailable);
    let deadline = Some(ErrorKind::Deadline);
    assert_eq!(bed.load_error(cut(500, Then::Stall)).await, deadline);
    // Never silent, and never done within any time.
    assert_eq!(bed.load_error(cut(900, Then::Drip)).await, deadline);
    assert_eq!(bed.load_error(cut(1100, Then::Stall)).await, deadline);
    for garbage in [
        "",
        "HTTP/1.1",
        "x\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    ] {
        let said = move |_| Reply::raw(garbage, Then::Close);
        assert_eq!(bed.load_error(said).await, unavailable, "{garbage}");
    }
    let endless = |_| {
        Reply::raw(
            [b"HTTP/1.1 200 OK\r\n".to_vec(), b"a: b\r\n".repeat(100_000)].concat(),
            Then::Close,
        )
    };
    assert_eq!(bed.load_error(endless).await, unavailable);
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn other_lengths_are_corrupt_before_a_byte_is_written() {
    let bed = bed(|_| {}).await;
    let one = [object(1, 1000)];
    for length in [0, 1, 999, 1001, 2000] {
        store(&bed.adapter, &bed.memory, &one).await;
        bed.server.with(|bucket| {
            let stored = bucket.objects.values_mut().next().unwrap();
            stored.bytes.resize(length, 7);
        });
        assert_eq!(bed.adapter.lookup(one.to_vec()).await, Ok(vec![None]));
        let to = bed.memory.filled(&[3; 1000]);
        let item = LoadItem {
            object: one[0].clone(),
            to: to.clone(),
        };
        let loaded = bed.adapter.load(vec![item]).await;
        assert_eq!(kinds(loaded), [Some(ErrorKind::Corrupt)], "{length}");
        let mut bytes = Vec::new();
        to.read_into(0, 1000, &mut bytes).unwrap();
        assert_eq!(bytes, [3; 1000], "{length}");
        // The next store heals it.
        drop(to);
        store(&bed.adapter, &bed.memory, &one).await;
        assert_eq!(
            load(&bed.adapter, &bed.memory, &one).await,
            [Ok(content(&one[0]))]
        );
    }
    // Without a length the end of the body shows it.
    for (length, expected) in [
        (999, Some(ErrorKind::Corrupt)),
        (1000, None),
        (1001, Some(ErrorKind::Corrupt)),
    ] {
        let wanted = one[0].clone();
        let chunked = move |request: &Request, _: &mut super::server::Bucket| {
            let mut bytes = content(&wanted);
            let sum = kvtier_memory::checksum::checksum128(&bytes);
            bytes.resize(length, 7);
            let head = format!(
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n{HEADER}: {}\r\n\r\n{length:x}\r\n",
                encode(&wanted, sum)
            );
            (request.method == "GET").then(|| {
                Reply::raw(
                    [head.as_bytes(), &bytes, b"\r\n0\r\n\r\n"].concat(),
                    Then::KeepAlive,
                )
            })
        };
        bed.server.answers(chunked);
        assert_eq!(
            kinds(load(&bed.adapter, &bed.memory, &one).await),
            [expected],
            "{length}"
        );
    }
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn statuses_have_their_kinds() {
    for (status, code, kind) in [
        (404, "NoSuchKey", ErrorKind::NotFound),
        (404, "NoSuchBucket", ErrorKind::Refused),
        (403, "AccessDenied", ErrorKind::Refused),
        (401, "", ErrorKind::Refused),
        (429, "", ErrorKind::Unavailable),
        (500, "InternalError", ErrorKind::Unavailable),
        (502, "", ErrorKind::Unavailable),
        (503, "SlowDown", ErrorKind::Unavailable),
        (504, "", ErrorKind::Unavailable),
        (507, "", ErrorKind::Full),
        (403, "QuotaExceeded", ErrorKind::Full),
        (416, "InvalidRange", ErrorKind::Corrupt),
        (301, "PermanentRedirect", ErrorKind::Refused),
        (400, "InvalidArgument", ErrorKind::Refused),
        (400, "RequestTimeout", ErrorKind::Unavailable),
        (400, "ExpiredToken", ErrorKind::Unavailable),
        (400, "", ErrorKind::Unavailable),
        (403, "InvalidObjectState", ErrorKind::Unreadable),
    ] {
        let bed = bed(|_| {}).await;
        assert_eq!(
            bed.load_error(of_status(status, code)).await,
            Some(kind),
            "{status} {code}"
        );
    }
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn denied_object_is_no_reason_to_stop_unless_the_bucket_is_denied_too() {
    let bed = bed(|_| {}).await;
    let objects = [object(1, 1000), object(2, 1000)];
    assert_eq!(
        kinds(store(&bed.adapter, &bed.memory, &objects).await),
        [None, None]
    );
    let first = name::of("", &objects[0].key);
    let denies = |denied: Option<String>| {
        move |request: &Request, _: &mut Bucket| {
            let is_denied = denied.as_ref().is_none_or(|key| request.key() == *key);
            is_denied.then(|| Reply::new(403, &[], b""))
        }
    };
    bed.server.answers(denies(Some(first)));
    let found = bed.adapter.lookup(objects.to_vec()).await;
    assert_eq!(found, Ok(vec![None, Some(1000)]));
    let loaded = load(&bed.adapter, &bed.memory, &objects).await;
    assert_eq!(kinds(loaded), [Some(ErrorKind::Refused), None]);
    bed.adapter.check().await;
    assert_eq!(bed.adapter.status()["is_healthy"], true);
    let loaded = load(&bed.adapter, &bed.memory, &objects[1..]).await;
    assert_eq!(kinds(loaded), [None]);
    // In an archive: only a load finds out.
    bed.server.answers(|request, _| {
        (request.method == "GET").then(|| Reply::error(403, "InvalidObjectState"))
    });
    let loaded = load(&bed.adapter, &bed.memory, &objects[..1]).await;
    assert_eq!(kinds(loaded), [Some(ErrorKind::Unreadable)]);
    let found = bed.adapter.lookup(objects.to_vec()).await;
    assert_eq!(found, Ok(vec![Some(1000), Some(1000)]));
    // All of it.
    bed.server.answers(denies(None));
    let loaded = load(&bed.adapter, &bed.memory, &objects).await;
    assert_eq!(kinds(loaded), [Some(ErrorKind::Refused); 2]);
    bed.adapter.check().await;
    assert_eq!(bed.adapter.status()["is_healthy"], false);
    bed.server.forget_requests();
    assert!(bed.adapter.lookup(objects.to_vec()).await.is_err());
    assert!(bed.server.requests().is_empty());
}

#[tokio::test]
async fn bad_request_without_a_code_makes_the_tier_unhealthy_until_it_is_over() {
    // As AWS answers HEAD with an expired token.
    let bed = bed(|_| {}).await;
    bed.server.answers(|_, _| Some(Reply::new(400, &[], b"")));
    let one = [object(1, 1000)];
    let found = bed.adapter.lookup(one.to_vec()).await;
    assert_eq!(found.unwrap_err().kind(), ErrorKind::Unavailable);
    bed.adapter.check().await;
    assert_eq!(bed.adapter.status()["is_healthy"], false);
    bed.server.recovers();
    bed.adapter.check().await;
    assert_eq!(bed.adapter.status()["is_healthy"], true);
    assert_eq!(bed.adapter.lookup(one.to_vec()).await, Ok(vec![None]));
}

#[tokio::test]
async fn response_that_announces_too_much_is_not_waited_for() {
    let bed = bed(|_| {}).await;
    bed.server.answers(|_, _| {
        Some(Reply::raw(
            b"HTTP/1.1 500 Status\r\ncontent-length: 1152921504606846976\r\n\r\n".to_vec(),
            Then::Drip,
        ))
    });
    let one = [object(1, 1000)];
    let loaded = tokio::time::timeout(
        std::time::Duration::from_secs(5),
        load(&bed.adapter, &bed.memory, &one),
    );
    let loaded = loaded.await.expect("an answer");
    assert_eq!(kinds(loaded), [Some(ErrorKind::Unavailable)]);
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn refusals_suspend_requests_and_are_shown() {
    for (status, code) in [(403, "InvalidAccessKeyId"), (404, "NoSuchBucket")] {
        let bed = bed(|_| {}).await;
        assert_eq!(
            bed.load_error(of_status(status, code)).await,
            Some(ErrorKind::Refused)
        );
        bed.server.recovers();
        bed.server.forget_requests();
        let found = bed.adapter.lookup(vec![object(1, 1000)]).await;
        assert_eq!(found.unwrap_err().kind(), ErrorKind::Refused);
        bed.adapter.check().await;
        assert!(bed.server.requests().is_empty());
        let shown = bed.adapter.status();
        assert_eq!(shown["is_healthy"], false);
        assert!(shown["error"].as_str().unwrap().contains(code), "{shown}");
        assert!(!shown.to_string().contains("kvsecret"));
    }
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn missing_bucket_is_named_by_the_probe() {
    let bed = bed(|_| {}).await;
    bed.server.answers(|_, _| Some(Reply::new(404, &[], b"")));
    bed.adapter.check().await;
    let shown = bed.adapter.status();
    assert_eq!(shown["is_healthy"], false);
    let error = shown["error"].as_str().unwrap();
    assert!(
        error.contains("bucket bucket") && error.contains("does not exist"),
        "{error}"
    );
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn overload_halves_the_limit_and_successes_raise_it() {
    let bed = bed(|options| options.max_connections = 8).await;
    let one = object(1, 1000);
    bed.server
        .answers(|_, _| Some(Reply::error(503, "SlowDown")));
    let limit = || bed.adapter.status()["requests_limit"].as_u64().unwrap();
    for expected in [4, 2, 1, 1] {
        let found = bed.adapter.lookup(vec![one.clone()]).await;
        assert_eq!(found.unwrap_err().kind(), ErrorKind::Unavailable);
        assert_eq!(limit(), expected);
    }
    bed.server.recovers();
    for expected in [2, 3, 4, 5, 6, 7, 8, 8] {
        assert_eq!(bed.adapter.lookup(vec![one.clone()]).await, Ok(vec![None]));
        assert_eq!(limit(), expected);
    }
    assert_eq!(bed.adapter.status()["is_healthy"], true);
}

#[tokio::test]
async fn connections_are_kept_and_bounded() {
    let bed = bed(|options| options.max_connections = 3).await;
    let objects: Vec<_> = (0..50).map(|number| object(number, 1000)).collect();
    assert_eq!(
        kinds(store(&bed.adapter, &bed.memory, &objects).await),
        [None; 50]
    );
    for _ in 0..3 {
        assert_eq!(
            kinds(load(&bed.adapter, &bed.memory, &objects).await),
            [None; 50]
        );
    }
    assert!(
        bed.server.connections() <= 3,
        "{}",
        bed.server.connections()
    );
}

#[tokio::test]
async fn kept_connections_that_the_server_closed_are_replaced() {
    let bed = bed(|_| {}).await;
    let one = [object(1, 1000)];
    store(&bed.adapter, &bed.memory, &one).await;
    // It closes each connection when the second request comes, without an answer.
    let mut used = BTreeSet::new();
    bed.server.answers(move |request, bucket| {
        let is_first = used.insert(request.connection) && request.connection > 0;
        let answer = bucket.answer(request);
        Some(if is_first {
            answer
        } else {
            Reply::raw(Vec::new(), Then::Close)
        })
    });
    for _ in 0..4 {
        assert_eq!(kinds(load(&bed.adapter, &bed.memory, &one).await), [None]);
    }
    // One that does so on a new connection too has no third try.
    bed.server.forget_requests();
    bed.server
        .answers(|_, _| Some(Reply::raw(Vec::new(), Then::Close)));
    let loaded = load(&bed.adapter, &bed.memory, &one).await;
    assert_eq!(kinds(loaded), [Some(ErrorKind::Unavailable)]);
    assert!(bed.server.requests().len() <= 2);
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn unread_responses_are_none_of_later_requests() {
    let bed = bed(|_| {}).await;
    let objects = [object(1, 1000), object(2, 1000)];
    store(&bed.adapter, &bed.memory, &objects).await;
    // The body is longer than its head, and looks like another response.
    bed.server.answers(|request, bucket| {
        let mut answer = bucket.answer(request);
        let more = Reply::new(200, &[], &[9; 1000]);
        answer.bytes.extend_from_slice(&more.bytes);
        (request.method == "GET").then_some(answer)
    });
    for _ in 0..5 {
        for (object, loaded) in objects
            .iter()
            .zip(load(&bed.adapter, &bed.memory, &objects).await)
        {
            if let Ok(bytes) = loaded {
                assert_eq!(bytes, content(object));
            }
        }
    }
    // A call that is dropped leaves no response behind either.
    bed.server.recovers();
    for polls in 0..200 {
        let buffer = bed.memory.buffer(1000);
        let item = LoadItem {
            object: objects[polls % 2].clone(),
            to: buffer,
        };
        let call = bed.adapter.load(vec![item]);
        let _ = tokio::time::timeout(Duration::from_micros(polls as u64 * 5), call).await;
        let loaded = load(&bed.adapter, &bed.memory, &objects).await;
        assert_eq!(loaded, [Ok(content(&objects[0])), Ok(content(&objects[1]))]);
    }
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn clock_of_the_server_is_used_once_it_is_known() {
    let bed = bed(|_| {}).await;
    let ahead = 7200;
    bed.server.answers(move |request, bucket| {
        let at = &request.headers["x-amz-date"];
        let at = format!(
            "{}-{}-{}T{}:{}:{}Z",
            &at[..4],
            &at[4..6],
            &at[6..8],
            &at[9..11],
            &at[11..13],
            &at[13..15]
        );
        let at = time::parse(&at).unwrap();
        if at.abs_diff(time::now() + ahead) < 900 {
            return Some(bucket.answer(request));
        }
        let date = date(ahead.cast_signed());
        Some(Reply::new(
            403,
            &[("Date", &date)],
            b"<Error><Code>RequestTimeTooSkewed</Code></Error>",
        ))
    });
    let one = [object(1, 1000)];
    assert_eq!(kinds(store(&bed.adapter, &bed.memory, &one).await), [None]);
    bed.server.forget_requests();
    assert_eq!(
        load(&bed.adapter, &bed.memory, &one).await,
        [Ok(content(&one[0]))]
    );
    assert_eq!(bed.server.requests().len(), 1);
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn region_of_the_bucket_is_used_once_it_is_known() {
    for status in [307, 400] {
        let bed = bed(|_| {}).await;
        bed.server.answers(move |request, bucket| {
            let is_right = request.headers["authorization"].contains("/eu-west-3/s3/");
            let moved = || Reply::new(status, &[("x-amz-bucket-region", "eu-west-3")], b"");
            Some(if is_right {
                bucket.answer(request)
            } else {
                moved()
            })
        });
        let one = [object(1, 1000)];
        assert_eq!(kinds(store(&bed.adapter, &bed.memory, &one).await), [None]);
        bed.server.forget_requests();
        assert_eq!(
            load(&bed.adapter, &bed.memory, &one).await,
            [Ok(content(&one[0]))]
        );
        assert_eq!(bed.server.requests().len(), 1);
    }
    // One that sends it elsewhere each time is followed once.
    let bed = bed(|_| {}).await;
    let mut number = 0;
    bed.server.answers(move |_, _| {
        number += 1;
        Some(Reply::new(
            307,
            &[("x-amz-bucket-region", &format!("region-{number}"))],
            b"",
        ))
    });
    let found = bed.adapter.lookup(vec![object(1, 1000)]).await;
    assert_eq!(found.unwrap_err().kind(), ErrorKind::Refused);
    assert_eq!(bed.server.requests().len(), 2);
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn server_that_is_away_is_unavailable_and_comes_back() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let adapter = S3Adapter::open(&options(port));
    assert_eq!(adapter.status()["is_healthy"], true);
    let one = [object(1, 1000)];
    let found = adapter.lookup(one.to_vec()).await;
    assert_eq!(found.unwrap_err().kind(), ErrorKind::Unavailable);
    adapter.check().await;
    assert_eq!(adapter.status()["is_healthy"], false);
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port))
        .await
        .unwrap();
    let _server = Server::on(listener);
    adapter.check().await;
    assert_eq!(adapter.status()["is_healthy"], true);
    assert_eq!(adapter.lookup(one.to_vec()).await, Ok(vec![None]));
}
