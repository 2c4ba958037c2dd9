//! Transfers that are answered with an event before they have ended.

use std::sync::mpsc::{self, Receiver};

use kvtier_device::cuda::{Executor, GpuOptions};
use kvtier_device::{DeviceError, Direction, Transfer};
use kvtier_memory::Extent;

use super::setup::{Pages, Server, wait};
use crate::exporter::{Exporter, hex};

/// A callback, in order.
#[derive(Debug)]
enum Report {
    Submitted(Vec<u8>),
    Ended(Result<u64, DeviceError>),
}

fn begin(pages: &Pages, transfer: Transfer) -> Receiver<Report> {
    let (say, hear) = mpsc::channel();
    let end = say.clone();
    pages.memory.transfer_with_event(
        transfer,
        Box::new(move |event| say.send(Report::Submitted(event.to_vec())).unwrap()),
        Box::new(move |result| end.send(Report::Ended(result)).unwrap()),
    );
    hear
}

/// Everything that can be staged is.
fn staged() -> (Server, Exporter, Pages) {
    let options = GpuOptions {
        executor: Some(Executor::Staged),
        ..GpuOptions::default()
    };
    let server = Server::with("", options, 1 << 20);
    let mut engine = Exporter::start();
    let pages = Pages::register(&server, &mut engine, [64, 4096, 4]);
    (server, engine, pages)
}

#[test]
fn event_completes_with_the_bytes_in_place() {
    let server = Server::new();
    let mut engine = Exporter::start();
    let pages = Pages::register(&server, &mut engine, [64, 4096, 4]);
    for direction in [Direction::Store, Direction::Retrieve] {
        server.script("hold d2h; hold h2d; hold kernel");
        let hear = begin(
            &pages,
            pages.transfer(&server, direction, &pages.backwards(8)),
        );
        let Report::Submitted(event) = hear.recv().unwrap() else {
            panic!("ended first")
        };
        engine.ask(&format!("open {}", hex(&event)));
        assert_eq!(engine.ask("complete"), "false");
        assert!(hear.try_recv().is_err());
        server.script("release");
        let Report::Ended(result) = hear.recv().unwrap() else {
            panic!("submitted twice")
        };
        assert_eq!(result.unwrap(), 8 * pages.object_bytes());
        assert_eq!(engine.ask("complete"), "true");
        assert!(hear.recv().is_err());
    }
    drop(pages);
    server.ends_clean();
}

/// The last step of a staged piece is on a stream of its own.
#[test]
fn event_waits_for_staged_pieces() {
    let (server, mut engine, pages) = staged();
    for isolated in [false, true] {
        let mut transfer = pages.retrieve(&server, 8);
        if isolated {
            transfer.event = engine.bytes("number");
        }
        // The first one makes what the events of isolated IPC are in.
        let first = begin(&pages, transfer.clone());
        assert!(matches!(first.iter().last(), Some(Report::Ended(Ok(_)))));
        server.script("clear; hold kernel");
        let hear = begin(&pages, transfer);
        let Report::Submitted(event) = hear.recv().unwrap() else {
            panic!("ended first")
        };
        wait(|| server.count("kernel") > 0);
        let mut is_complete = || {
            if isolated {
                engine.ask(&format!("reached {}", hex(&event)))
            } else {
                engine.ask(&format!("open {}", hex(&event)));
                engine.ask("complete")
            }
        };
        for _ in 0..200 {
            assert_eq!(is_complete(), "false");
        }
        server.script("release");
        assert!(matches!(hear.recv().unwrap(), Report::Ended(Ok(_))));
        wait(|| is_complete() == "true");
    }
    drop(pages);
    server.ends_clean();
}

/// An engine that abandons a retrieve and repeats it into the same pages finds the later bytes.
#[test]
fn retrieve_never_overtakes_the_previous_one() {
    let (server, mut engine, pages) = staged();
    pages.run(pages.store(&server, 2)).unwrap();
    let object = |number: u64| {
        let mut transfer = pages.transfer(&server, Direction::Retrieve, &[0, 2, 4, 6]);
        let bytes = pages.object_bytes();
        transfer.chunks[0].extent = Extent::new(number * bytes, bytes);
        transfer
    };
    server.script("clear; hold kernel");
    let first = pages.begin(object(0));
    wait(|| server.count("kernel") > 0);
    // The second one has no staging buffer, and uses the plain executor.
    let held = server.count("kernel");
    let copies = || server.count("cuMemcpyAsync");
    let before = copies();
    server.script("fail cuMemAlloc_v2=2");
    let second = pages.begin(object(1));
    wait(|| copies() > before);
    for _ in 0..500 {
        assert!(!second.has_ended());
        assert_eq!(server.count("kernel"), held);
    }
    server.script("release; reset");
    first.end().unwrap();
    second.end().unwrap();
    let expected = pages.gather(&pages.backwards(2)[4..]);
    for (at, block) in [0, 2, 4, 6].into_iter().enumerate() {
        let page = engine.read(pages.number, block * 4096, 4096);
        assert!(page == expected[at * 4096..][..4096], "block {block}");
    }
    drop(pages);
    server.ends_clean();
}

#[test]
fn failed_submission_is_reported_only_at_its_end() {
    let server = Server::new();
    let mut engine = Exporter::start();
    let pages = Pages::register(&server, &mut engine, [64, 4096, 4]);
    let transfer = || pages.transfer(&server, Direction::Store, &pages.backwards(2));
    // The driver takes nothing of it.
    for function in ["cuMemcpyAsync", "cuMemcpyBatchAsync", "cuLaunchKernel"] {
        server.script(&format!("fail {function}=1"));
    }
    let hear = begin(&pages, transfer());
    assert!(matches!(hear.recv(), Ok(Report::Ended(Err(_)))));
    assert!(hear.recv().is_err());
    server.script("reset");
    // There is no event to be had.
    server.script("fail cuIpcGetEventHandle=801");
    let hear = begin(&pages, transfer());
    assert!(matches!(hear.recv(), Ok(Report::Ended(Ok(_)))));
    assert!(hear.recv().is_err());
    server.script("reset");
    drop(pages);
    server.ends_clean();
}

#[test]
fn isolated_ipc_is_answered_with_timeline_events() {
    let server = Server::new();
    let mut engine = Exporter::start();
    let pages = Pages::register(&server, &mut engine, [64, 4096, 4]);
    for direction in [Direction::Store, Direction::Retrieve, Direction::Store] {
        let mut transfer = pages.transfer(&server, direction, &pages.backwards(8));
        transfer.event = engine.bytes("number");
        let hear = begin(&pages, transfer);
        let Report::Submitted(event) = hear.recv().unwrap() else {
            panic!("ended first")
        };
        assert_eq!(event.len(), 81);
        assert!(matches!(hear.recv().unwrap(), Report::Ended(Ok(_))));
        assert!(hear.recv().is_err());
        // It is the last step of the stream: the transfer has ended a moment before.
        while engine.ask(&format!("reached {}", hex(&event))) != "true" {
            std::thread::yield_now();
        }
        // The next one of that stream is not there.
        let mut later = event;
        let number = u64::from_be_bytes(later[73..].try_into().unwrap()) + 1;
        later[73..].copy_from_slice(&number.to_be_bytes());
        assert_eq!(engine.ask(&format!("reached {}", hex(&later))), "false");
    }
    drop(pages);
    server.ends_clean();
}
