//! Concurrent transfers: in both directions, of several workers, on several GPUs.

use std::sync::{Arc, Mutex};

use kvtier_device::Direction;
use kvtier_device::cuda::{Executor, GpuOptions};

use super::setup::{Pages, Server, Ticket, content, wait};
use crate::exporter::Exporter;

/// Every piece is one call of the driver and one work of an engine.
pub fn batches() -> GpuOptions {
    GpuOptions {
        executor: Some(Executor::Batch),
        ..GpuOptions::default()
    }
}

#[test]
fn retrieves_do_not_wait_for_stores() {
    let server = Server::with("", batches(), 1 << 20);
    let mut engine = Exporter::start();
    let pages = Pages::pieces(&server, &mut engine, 12);
    server.script("hold d2h");
    let stores = pages.begin(pages.store(&server, 12));
    wait(|| server.count("d2h") > 0);
    // All of a long store is before it, and the engine that copies from the GPU is busy.
    let bytes = pages.content.len() as u64;
    assert_eq!(pages.run(pages.retrieve(&server, 12)).unwrap(), bytes);
    assert!(!stores.has_ended());
    server.script("release");
    assert_eq!(stores.end().unwrap(), bytes);
    // Two streams in all; one goes first.
    let readings = server.readings();
    assert_eq!(readings.in_flight, [0, 0]);
    for direction in [Direction::Store, Direction::Retrieve] {
        assert_eq!(readings.runs[direction as usize][0], 12 * 4096);
        let moved = readings
            .moved
            .iter()
            .find(|moved| moved.0 == direction)
            .unwrap()
            .2;
        assert_eq!((moved.pieces, moved.bytes), (12, bytes));
    }
    drop(pages);
    server.ends_clean();
}

/// The kernel for one staged piece runs beside the copy of another one.
#[test]
fn steps_of_staged_pieces_overlap() {
    let options = GpuOptions {
        executor: Some(Executor::Staged),
        ..GpuOptions::default()
    };
    let server = Server::with("", options, 1 << 20);
    let mut engine = Exporter::start();
    let pages = Pages::pieces(&server, &mut engine, 4);
    let bytes = pages.content.len() as u64;
    // Each direction's second step is held up, and the first step of all four pieces goes on.
    for (transfer, first, second) in [
        (pages.store(&server, 4), "kernel", "d2h"),
        (pages.retrieve(&server, 4), "h2d", "kernel"),
    ] {
        server.script(&format!("clear; hold {second}"));
        let ticket = pages.begin(transfer);
        wait(|| server.count(first) == 4);
        assert!(!ticket.has_ended());
        server.script("release");
        assert_eq!(ticket.end().unwrap(), bytes);
    }
    assert!(content(&server.arena, bytes) == pages.gather(&pages.backwards(4)));
    assert!(engine.read(pages.number, 0, bytes as usize) == pages.content);
    drop(pages);
    server.ends_clean();
}

/// At most four pieces of a direction are with the GPU, and the rest comes when they are done.
#[test]
fn pieces_are_submitted_as_others_end() {
    let server = Server::with("", batches(), 1 << 20);
    let mut engine = Exporter::start();
    let pages = Pages::pieces(&server, &mut engine, 12);
    server.script("hold d2h");
    let store = pages.begin(pages.store(&server, 12));
    wait(|| server.count("cuEventRecord") == 4);
    let asked = server.count("cuEventQuery");
    wait(|| server.count("cuEventQuery") > asked + 10);
    assert_eq!(server.count("cuMemcpyBatchAsync"), 4);
    server.script("release");
    let bytes = pages.content.len() as u64;
    assert_eq!(store.end().unwrap(), bytes);
    assert_eq!(server.count("cuMemcpyBatchAsync"), 12);
    assert!(content(&server.arena, bytes) == pages.gather(&pages.backwards(12)));
    drop(pages);
    server.ends_clean();
}

#[test]
fn workers_take_turns() {
    let server = Server::with("", batches(), 4 << 20);
    let mut engine = Exporter::start();
    let long = Pages::pieces(&server, &mut engine, 24);
    let short = Pages::pieces(&server, &mut engine, 1);
    let order = Arc::new(Mutex::new(Vec::new()));
    let begin = |pages: &Pages, chunks, name: &'static str| {
        let order = Arc::clone(&order);
        let done = move |result: Result<_, _>| {
            result.unwrap();
            order.lock().unwrap().push(name);
        };
        pages
            .memory
            .transfer(pages.store(&server, chunks), Box::new(done));
    };
    server.script("hold d2h");
    begin(&long, 24, "long");
    begin(&long, 1, "behind it");
    wait(|| server.count("cuEventRecord") == 4);
    begin(&short, 1, "short");
    server.script("release");
    wait(|| order.lock().unwrap().len() == 3);
    // Transfers of one worker come one after the other.
    assert_eq!(*order.lock().unwrap(), ["short", "long", "behind it"]);
    drop((long, short));
    server.ends_clean();
}

#[test]
fn many_workers_share_two_gpus() {
    let server = Server::new();
    let mut engines = [Exporter::start(), Exporter::start(), Exporter::start()];
    let mut workers = Vec::new();
    for round in 0..4 {
        for engine in &mut engines {
            let gpu = round % 2;
            workers.push(Pages::on(gpu, &server, engine, [64, 256, 8]).unwrap());
        }
    }
    // Stores to places of their own, and retrieves of what another one stored.
    let place = |worker: usize| worker as u64 * 64 * 256;
    let moved = |transfer: &mut kvtier_device::Transfer, by: u64| {
        for chunk in &mut transfer.chunks {
            chunk.extent.offset += by;
        }
    };
    for direction in [Direction::Store, Direction::Retrieve] {
        let tickets: Vec<Ticket> = workers
            .iter()
            .enumerate()
            .map(|(at, pages)| {
                let of = match direction {
                    Direction::Store => at,
                    Direction::Retrieve => (at + 1) % workers.len(),
                };
                let mut transfer = pages.transfer(&server, direction, &pages.backwards(8));
                moved(&mut transfer, place(of));
                pages.begin(transfer)
            })
            .collect();
        for ticket in tickets {
            assert_eq!(ticket.end().unwrap(), 64 * 256);
        }
    }
    for (at, pages) in workers.iter().enumerate() {
        let from = &workers[(at + 1) % workers.len()];
        let read = engines[at % 3].read(pages.number, 0, 64 * 256);
        assert!(read == from.content, "worker {at}");
    }
    let status = server.cuda.status();
    assert_eq!(status.len(), 2);
    for gpu in &status {
        let readings = gpu.readings.as_ref().unwrap();
        assert_eq!(readings.open_allocations, 6);
        let moved: u64 = readings.moved.iter().map(|(.., moved)| moved.bytes).sum();
        assert_eq!(moved, 2 * 6 * 64 * 256);
    }
    // Once for both, and the memory of a trial for each.
    assert_eq!(server.count("cuMemHostRegister_v2"), 1 + 2);
    drop(workers);
    server.ends_clean();
}
