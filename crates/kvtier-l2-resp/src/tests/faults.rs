//! A server that says anything: no reply is ever taken for another one's.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::super::endpoint::MAX_CONNECTING;
use super::*;
use kvtier_l2::conformance::object;

/// An adapter of a server that greets, and then answers whatever it gets on each further connection with `said`, once. It
/// closes the connection if `closes`.
async fn adapter_of(said: Vec<u8>, closes: bool) -> RespAdapter {
    let port = listen(move |mut stream| {
        let said = said.clone();
        async move {
            let mut bytes = vec![0; 65536];
            let _ = stream.read(&mut bytes).await;
            let _ = stream.write_all(b"+PONG\r\n").await;
            let _ = stream.read(&mut bytes).await;
            let _ = stream.write_all(&said).await;
            while !closes && stream.read(&mut bytes).await.is_ok_and(|got| got > 0) {}
        }
    })
    .await;
    let options = RespOptions {
        num_workers: 1,
        companion_sums: false,
        request_timeout: Duration::from_millis(300),
        ..RespOptions::new(Address::Tcp("127.0.0.1".into(), port))
    };
    RespAdapter::open("resp", &options)
}

/// The kind of error of a load of 1000 bytes.
async fn error_of(said: &[u8], closes: bool) -> Option<ErrorKind> {
    let memory = Memory::new(1 << 20);
    let adapter = adapter_of(said.to_vec(), closes).await;
    let kind = kinds(load(&adapter, &memory, &[object(1, 1000)]).await)[0];
    memory.until_unused().await;
    kind
}

fn value(length: usize, bytes: usize) -> Vec<u8> {
    let head = format!("${length}\r\n");
    [head.as_bytes(), &vec![b'x'; bytes], b"\r\n"].concat()
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn whole_values_alone_are_loaded() {
    assert_eq!(error_of(&value(1000, 1000), false).await, None);
    assert_eq!(
        error_of(&value(999, 999), false).await,
        Some(ErrorKind::Corrupt)
    );
    assert_eq!(
        error_of(&value(1001, 1001), false).await,
        Some(ErrorKind::Corrupt)
    );
    assert_eq!(error_of(b"$-1\r\n", false).await, Some(ErrorKind::NotFound));
    assert_eq!(
        error_of(b"-ERR no\r\n", false).await,
        Some(ErrorKind::Refused)
    );
    assert_eq!(
        error_of(b"-LOADING wait\r\n", false).await,
        Some(ErrorKind::Unavailable)
    );
}

// proves: docs/compare.md#redis-valkey
// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn cut_and_malformed_values_cost_the_connection() {
    // It stops inside of the body, or closes there, or behind the head.
    assert_eq!(
        error_of(&value(1000, 500)[..400], false).await,
        Some(ErrorKind::Deadline)
    );
    assert_eq!(
        error_of(&value(1000, 500)[..400], true).await,
        Some(ErrorKind::Unavailable)
    );
    assert_eq!(
        error_of(b"$1000\r\n", true).await,
        Some(ErrorKind::Unavailable)
    );
    // The body is longer than its head says.
    assert_eq!(
        error_of(&value(1000, 1001), false).await,
        Some(ErrorKind::Unavailable)
    );
    for said in [
        &b"+OK\r\n"[..],
        b":1\r\n",
        b"*1\r\n$1\r\nx\r\n",
        b"HTTP/1.1 400\r\n",
    ] {
        assert_eq!(
            error_of(said, false).await,
            Some(ErrorKind::Unavailable),
            "{said:?}"
        );
    }
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn value_that_is_much_longer_is_a_miss_and_costs_the_connection() {
    let said = value(100_000, 100_000);
    assert_eq!(error_of(&said, false).await, Some(ErrorKind::Corrupt));
    assert_eq!(
        error_of(b"$99999999999\r\n", false).await,
        Some(ErrorKind::Corrupt)
    );
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn dripping_and_frozen_servers_are_left_whatever_else_is_asked() {
    let port = listen(|mut stream| async move {
        let mut bytes = vec![0; 65536];
        let _ = stream.read(&mut bytes).await;
        let _ = stream.write_all(b"+PONG\r\n").await;
        let _ = stream.read(&mut bytes).await;
        let is_load = bytes.starts_with(b"*2\r\n$3\r\nGET");
        let _ = stream
            .write_all(if is_load { b"$1000\r\n" } else { b"" })
            .await;
        loop {
            // A byte of a body now and then, and nothing else.
            tokio::time::sleep(Duration::from_millis(50)).await;
            if is_load && stream.write_all(b"x").await.is_err() {
                return;
            }
        }
    })
    .await;
    let options = RespOptions {
        num_workers: 1,
        companion_sums: false,
        request_timeout: Duration::from_millis(300),
        ..RespOptions::new(Address::Tcp("127.0.0.1".into(), port))
    };
    let adapter = RespAdapter::open("resp", &options);
    let memory = Memory::new(1 << 20);
    let loaded = load(&adapter, &memory, &[object(1, 1000)]).await;
    assert_eq!(kinds(loaded), [Some(ErrorKind::Deadline)]);
    // Lookups keep coming, and none is answered.
    let asked = || async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        adapter.lookup(vec![object(2, 10)]).await
    };
    let first = adapter.lookup(vec![object(1, 10)]);
    let others = async {
        loop {
            tokio::time::timeout(Duration::from_millis(20), asked())
                .await
                .ok();
        }
    };
    tokio::select! {
        found = first => assert!(found.is_err()),
        () = others => {}
    }
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn reply_without_a_command_costs_the_connection_and_is_no_later_ones() {
    let memory = Memory::new(1 << 20);
    let twice = [value(1000, 1000), value(1000, 1000)].concat();
    let adapter = adapter_of(twice, false).await;
    assert_eq!(
        kinds(load(&adapter, &memory, &[object(1, 1000)]).await),
        [None]
    );
    // The second value is not the answer to this.
    let loaded = load(&adapter, &memory, &[object(2, 1000)]).await;
    assert_eq!(kinds(loaded), [Some(ErrorKind::Unavailable)]);
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn error_inside_of_a_pipeline_costs_its_own_item() {
    let memory = Memory::new(1 << 20);
    let said = [&value(1000, 1000)[..], b"-ERR no\r\n", &value(1000, 1000)].concat();
    let adapter = adapter_of(said, false).await;
    let objects: Vec<_> = (0..3).map(|number| object(number, 1000)).collect();
    let loaded = kinds(load(&adapter, &memory, &objects).await);
    assert_eq!(loaded, [None, Some(ErrorKind::Refused), None]);
}

#[tokio::test]
async fn scan_whose_cursor_repeats_fails() {
    let port = listen(|mut stream| async move {
        let mut bytes = vec![0; 65536];
        let mut said = &b"+PONG\r\n"[..];
        while stream.read(&mut bytes).await.is_ok_and(|got| got > 0) {
            let _ = stream.write_all(said).await;
            said = b"*2\r\n$1\r\n7\r\n*0\r\n";
        }
    })
    .await;
    let options = RespOptions {
        num_workers: 1,
        ..RespOptions::new(Address::Tcp("127.0.0.1".into(), port))
    };
    let adapter = RespAdapter::open("resp", &options);
    let pages = AtomicU64::new(0);
    let found = |_| pages.fetch_add(1, Ordering::Relaxed) < 100;
    let error = adapter.recover(&found).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("circles"), "{error}");
    assert_eq!(pages.into_inner(), 2);
}

#[tokio::test]
async fn large_objects_are_asked_for_one_after_the_other() {
    const LEN: usize = 1 << 20;
    // Numbers of commands that were there when each reply began, and was half sent.
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    let port = listen(move |mut stream| {
        let tell = tell.clone();
        async move {
            let mut bytes = vec![0; 65536];
            let _ = stream.read(&mut bytes).await;
            let _ = stream.write_all(b"+PONG\r\n").await;
            let (mut asked, said) = (Vec::new(), value(LEN, LEN));
            for answered in 0.. {
                while count_gets(&asked) == answered {
                    match stream.read(&mut bytes).await {
                        Ok(got) if got > 0 => asked.extend_from_slice(&bytes[..got]),
                        _ => return,
                    }
                }
                let (first, second) = said.split_at(said.len() / 2);
                let _ = stream.write_all(first).await;
                // Whatever was sent by now has arrived.
                while let Ok(got) = stream.try_read(&mut bytes)
                    && got > 0
                {
                    asked.extend_from_slice(&bytes[..got]);
                }
                let _ = tell.send(count_gets(&asked) - answered);
                let _ = stream.write_all(second).await;
            }
        }
    })
    .await;
    let options = RespOptions {
        num_workers: 1,
        companion_sums: false,
        ..RespOptions::new(Address::Tcp("127.0.0.1".into(), port))
    };
    let adapter = RespAdapter::open("resp", &options);
    let memory = Memory::new(8 << 20);
    let objects: Vec<_> = (0..4).map(|number| object(number, LEN as u64)).collect();
    assert_eq!(kinds(load(&adapter, &memory, &objects).await), [None; 4]);
    for _ in 0..4 {
        assert_eq!(told.recv().await, Some(1));
    }
}

fn count_gets(bytes: &[u8]) -> usize {
    bytes.windows(5).filter(|five| five == b"\nGET\r").count()
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn errors_have_their_kinds() {
    for (error, kind) in [
        ("OOM command not allowed", ErrorKind::Full),
        ("LOADING it is", ErrorKind::Unavailable),
        ("TRYAGAIN Multiple keys", ErrorKind::Unavailable),
        ("CLUSTERDOWN Hash slot", ErrorKind::Unavailable),
        ("MASTERDOWN Link", ErrorKind::Unavailable),
        ("BUSY a script", ErrorKind::Unavailable),
        ("READONLY a replica", ErrorKind::Unavailable),
        ("ERR max number of clients reached", ErrorKind::Unavailable),
        ("NOAUTH Authentication required", ErrorKind::Refused),
        ("WRONGPASS invalid", ErrorKind::Refused),
        ("NOPERM this user", ErrorKind::Refused),
        ("MOVED 1 127.0.0.1:2", ErrorKind::Refused),
        ("WRONGTYPE Operation", ErrorKind::Corrupt),
        ("", ErrorKind::Refused),
    ] {
        let said = format!("-{error}\r\n");
        assert_eq!(
            error_of(said.as_bytes(), false).await,
            Some(kind),
            "{error}"
        );
    }
}

#[tokio::test]
async fn connections_are_made_a_few_at_once() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let options = RespOptions {
        num_workers: 200,
        connection_timeout: Duration::from_secs(60),
        ..RespOptions::new(Address::Tcp("127.0.0.1".into(), port))
    };
    let _adapter = RespAdapter::open("resp", &options);
    // The server does not answer their greetings.
    let mut greeting = Vec::new();
    for _ in 0..MAX_CONNECTING {
        greeting.push(listener.accept().await.unwrap());
    }
    let more = tokio::time::timeout(Duration::from_millis(100), listener.accept());
    assert!(more.await.is_err());
    // One that has ended makes space for another.
    drop(greeting.pop());
    listener.accept().await.unwrap();
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn server_that_is_not_there_is_unavailable_at_once_after_the_first_attempt() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let options = RespOptions::new(Address::Tcp("127.0.0.1".into(), port));
    let adapter = RespAdapter::open("resp", &options);
    for _ in 0..3 {
        let found = adapter.lookup(vec![object(1, 10)]).await;
        let error = found.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        let address = format!("127.0.0.1:{port}");
        assert_eq!(error.to_string().matches(&address).count(), 1, "{error}");
    }
    assert_eq!(adapter.status()["is_healthy"], false);
    adapter.close().await;
    let found = adapter.lookup(vec![object(1, 10)]).await;
    assert!(found.unwrap_err().to_string().contains("closed"));
}
