//! Pages are not accessed before their event; an event that never completes affects only its transfer.

use std::time::{Duration, Instant};

use kvtier_device::DeviceError;
use kvtier_device::cuda::GpuOptions;

use super::setup::{Pages, Server, content, past, wait};
use super::turns::batches;
use crate::exporter::Exporter;

/// An event behind work that is held, in one of both forms.
pub fn pending(engine: &mut Exporter, form: &str, pages: &Pages) -> Vec<u8> {
    // The buffer of numbers is made before anything is held.
    engine.bytes(form);
    engine.ask("script hold kernel");
    engine.ask(&format!("set {} 77", pages.number));
    engine.bytes(form)
}

/// Waits until the thread has queried an event several times, in either form.
pub fn was_asked(server: &Server, form: &str) {
    let asked = || match form {
        "event" => server.count("cuEventQuery"),
        _ => server.count("cuMemcpyDtoHAsync_v2"),
    };
    let before = asked();
    wait(|| asked() >= before + 3);
}

fn moved(server: &Server) -> u64 {
    ["d2h", "kernel"]
        .map(|work| server.count(work))
        .iter()
        .sum()
}

#[test]
fn pages_are_read_after_their_event() {
    for form in ["event", "number"] {
        // Its stream waits for nothing of our own either.
        let server = Server::with("", batches(), 1 << 20);
        let mut engine = Exporter::start();
        let pages = Pages::register(&server, &mut engine, [64, 512, 8]);
        let mut transfer = pages.store(&server, 8);
        transfer.event = pending(&mut engine, form, &pages);
        let ticket = pages.begin(transfer);
        was_asked(&server, form);
        assert!(!ticket.has_ended(), "{form}");
        if form == "event" {
            assert_eq!(moved(&server), 0);
        }
        engine.ask("script release");
        ticket.end().unwrap();
        let bytes = pages.content.len();
        assert!(
            content(&server.arena, bytes as u64) == vec![77; bytes],
            "{form}"
        );
        // Neither a stream nor the thread has waited for another process.
        for function in ["cuStreamWaitEvent", "cuEventSynchronize"] {
            assert_eq!(server.count(function), 0, "{function}");
        }
        drop(pages);
        server.ends_clean();
    }
}

/// One engine's event never completes; transfers of others, both ways, go on, and its own when its time is over.
#[test]
fn pending_event_delays_only_its_transfer() {
    for form in ["event", "number"] {
        let options = GpuOptions {
            event_timeout: Duration::MAX,
            ..GpuOptions::default()
        };
        let server = Server::with("", options, 1 << 20);
        let (mut engine, mut other) = (Exporter::start(), Exporter::start());
        let pages = Pages::register(&server, &mut engine, [64, 512, 8]);
        let others = Pages::register(&server, &mut other, [64, 512, 8]);
        let mut transfer = pages.retrieve(&server, 8);
        transfer.event = pending(&mut engine, form, &pages);
        transfer.deadline = Some(Instant::now() + Duration::from_secs(3600));
        let stuck = pages.begin(transfer.clone());
        transfer.direction = kvtier_device::Direction::Store;
        let stuck_too = pages.begin(transfer);
        was_asked(&server, form);
        for _ in 0..20 {
            others.run(others.store(&server, 8)).unwrap();
            others.run(others.retrieve(&server, 8)).unwrap();
        }
        assert!(!stuck.has_ended() && !stuck_too.has_ended(), "{form}");
        assert_eq!(server.readings().in_flight, [1, 1]);
        // It leaves; nothing waits for its process.
        engine.kill();
        pages.memory.stop();
        for ticket in [stuck, stuck_too] {
            let error = ticket.end().unwrap_err();
            assert!(matches!(error, DeviceError::Stopped), "{error}");
        }
        drop((pages, others));
        server.ends_clean();
    }
}

#[test]
fn event_timeout_fails_the_transfer() {
    let options = GpuOptions {
        event_timeout: Duration::from_millis(20),
        ..GpuOptions::default()
    };
    let server = Server::with("", options, 1 << 20);
    for form in ["event", "number"] {
        let mut engine = Exporter::start();
        let pages = Pages::register(&server, &mut engine, [64, 512, 8]);
        let timeouts = server.readings().event_timeouts;
        let mut transfer = pages.store(&server, 8);
        transfer.event = pending(&mut engine, form, &pages);
        // Two of one worker; one of them is queried at a time.
        let both = [pages.begin(transfer.clone()), pages.begin(transfer.clone())];
        for ticket in both {
            let error = ticket.end().unwrap_err();
            assert!(
                matches!(error, DeviceError::EventTimeout),
                "{form}: {error}"
            );
        }
        assert_eq!(server.readings().event_timeouts, timeouts + 2);
        assert_eq!(server.readings().moved, []);
        // The worker's own deadline comes first.
        transfer.deadline = Some(past());
        let error = pages.run(transfer.clone()).unwrap_err();
        assert!(
            matches!(error, DeviceError::DeadlinePassed),
            "{form}: {error}"
        );
        // Its process dies: what it sends is not even opened.
        engine.kill();
        transfer.deadline = None;
        let error = pages.run(transfer).unwrap_err();
        match form {
            "event" => assert!(matches!(error, DeviceError::Event(_)), "{error}"),
            // The buffer of its numbers stays open.
            _ => assert!(matches!(error, DeviceError::EventTimeout), "{error}"),
        }
        drop(pages);
    }
    server.ends_clean();
}

/// The process dies while its event is waited for.
#[test]
fn death_of_the_engine_fails_its_transfer() {
    for form in ["event", "number"] {
        let options = GpuOptions {
            event_timeout: Duration::from_millis(200),
            ..GpuOptions::default()
        };
        let server = Server::with("", options, 1 << 20);
        let mut engine = Exporter::start();
        let pages = Pages::register(&server, &mut engine, [64, 512, 8]);
        let mut transfer = pages.store(&server, 8);
        transfer.event = pending(&mut engine, form, &pages);
        let ticket = pages.begin(transfer);
        engine.kill();
        let error = ticket.end().unwrap_err();
        // It may die before its event is opened.
        let meant = matches!(error, DeviceError::EventTimeout | DeviceError::Event(_));
        assert!(meant, "{form}: {error}");
        drop(pages);
        server.ends_clean();
    }
}

#[test]
fn opened_event_without_answer_times_out() {
    let options = GpuOptions {
        event_timeout: Duration::from_millis(20),
        ..GpuOptions::default()
    };
    let server = Server::with("", options, 1 << 20);
    let mut engine = Exporter::start();
    let pages = Pages::register(&server, &mut engine, [64, 512, 8]);
    let mut transfer = pages.store(&server, 8);
    transfer.event = pending(&mut engine, "event", &pages);
    let error = pages.run(transfer.clone()).unwrap_err();
    assert!(matches!(error, DeviceError::EventTimeout), "{error}");
    engine.ask("script release");
    engine.ask("sync");
    transfer.event = engine.bytes("event");
    pages.run(transfer).unwrap();
    drop(pages);
    server.ends_clean();
}

#[test]
fn invalid_event_is_refused() {
    let server = Server::new();
    let mut engine = Exporter::start();
    let pages = Pages::register(&server, &mut engine, [64, 512, 8]);
    for event in [
        b"stub_ipc_handle".as_slice(),
        &[0; 64],
        &[1; 63],
        &[2; 81],
        &[1; 81],
        &[0; 10_000],
    ] {
        let mut transfer = pages.store(&server, 8);
        transfer.event = event.to_vec();
        let error = pages.run(transfer).unwrap_err();
        assert!(matches!(error, DeviceError::Event(_)), "{event:?}: {error}");
    }
    // The fake driver takes handles that it never gave for a mistake of ours.
    server.script("clear");
    drop(pages);
    server.ends_clean();
}

/// What is no event is answered while the event before it is waited for, which may never complete.
#[test]
fn invalid_event_is_refused_at_once() {
    let options = GpuOptions {
        event_timeout: Duration::MAX,
        ..GpuOptions::default()
    };
    let server = Server::with("", options, 1 << 20);
    let mut engine = Exporter::start();
    let pages = Pages::register(&server, &mut engine, [64, 512, 8]);
    let mut transfer = pages.store(&server, 8);
    transfer.event = pending(&mut engine, "event", &pages);
    let stuck = pages.begin(transfer.clone());
    was_asked(&server, "event");
    transfer.event = vec![1; 63];
    let error = pages.run(transfer).unwrap_err();
    assert!(matches!(error, DeviceError::Event(_)), "{error}");
    assert!(!stuck.has_ended());
    // A later transfer gets its turn.
    let behind = pages.begin(pages.store(&server, 8));
    engine.ask("script release");
    stuck.end().unwrap();
    behind.end().unwrap();
    drop(pages);
    server.ends_clean();
}

/// The value of a timeline event is read while the copy engine from the GPU is busy: no other transfer waits for that.
#[test]
fn timeline_value_is_read_in_the_background() {
    let server = Server::new();
    let (mut engine, mut other) = (Exporter::start(), Exporter::start());
    let pages = Pages::register(&server, &mut engine, [64, 512, 8]);
    let others = Pages::register(&server, &mut other, [64, 512, 8]);
    let mut transfer = pages.store(&server, 8);
    transfer.event = engine.bytes("number");
    server.script("hold d2h");
    let ticket = pages.begin(transfer);
    wait(|| server.count("d2h") == 1);
    others.run(others.retrieve(&server, 8)).unwrap();
    assert!(!ticket.has_ended());
    server.script("release");
    ticket.end().unwrap();
    drop((pages, others));
    server.ends_clean();
}

/// A driver that does not come back from opening an event has only the thread of that GPU.
// proves: docs/gpu.md#when-something-goes-wrong
#[test]
fn blocked_event_open_delays_only_its_gpu() {
    for (form, function) in [
        ("event", "cuIpcOpenEventHandle"),
        ("number", "cuIpcOpenMemHandle_v2"),
    ] {
        let server = Server::new();
        let mut engine = Exporter::start();
        let pages = Pages::register(&server, &mut engine, [64, 512, 8]);
        let others = Pages::on(1, &server, &mut engine, [64, 512, 8]).unwrap();
        server.script(&format!("clear; hold {function}@1"));
        let mut transfer = pages.store(&server, 8);
        transfer.event = engine.bytes(form);
        let stuck = pages.begin(transfer.clone());
        wait(|| server.count(function) == 1);
        let behind = pages.begin(transfer);
        others.run(others.store(&server, 8)).unwrap();
        assert!(!stuck.has_ended() && !behind.has_ended(), "{form}");
        server.script("release");
        stuck.end().unwrap();
        behind.end().unwrap();
        drop((pages, others));
        server.ends_clean();
    }
}

/// An engine keeps an event for a while only: it is opened before the transfer's turn comes.
#[test]
fn events_are_opened_on_arrival() {
    let server = Server::with("", batches(), 1 << 20);
    let mut engine = Exporter::start();
    let pages = Pages::register(&server, &mut engine, [64, 512, 8]);
    let transfers = [0, 1, 2].map(|_| {
        let mut transfer = pages.store(&server, 8);
        transfer.event = pending(&mut engine, "event", &pages);
        transfer
    });
    let tickets = transfers.map(|transfer| pages.begin(transfer));
    wait(|| server.count("cuIpcOpenEventHandle") == 3);
    engine.ask("script release");
    for ticket in tickets {
        ticket.end().unwrap();
    }
    drop(pages);
    server.ends_clean();
}
