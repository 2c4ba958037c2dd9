//! Segments with rotated keys are placed in pages on a GPU as in host memory.

use std::sync::Arc;
use std::time::Duration;

use kvtier_device::cuda::{Executor, GpuOptions};
use kvtier_device::{Device, DeviceError, Direction, Placement, PromptBlocks, Rope, SegmentCopy};
use kvtier_memory::Extent;

use super::bytes::RegisteredCase;
use super::events::{pending, was_asked};
use super::setup::{Pages, Server, Ticket, past, storage};
use crate::exporter::Exporter;
use crate::keys::{BF16, COPIED, FORMATS, cache, case, check_placed, keys, run};
use crate::model::Random;

#[test]
fn keys_are_rotated_on_their_way() {
    for executor in [None, Some(Executor::Staged)] {
        let options = GpuOptions {
            executor,
            ..GpuOptions::default()
        };
        let server = Server::with("", options, 1 << 20);
        let mut engine = Exporter::start();
        let (segment, mut tensor) = cache(BF16, 200, 1.0);
        let mut bytes = Vec::new();
        let len = segment.as_segment().len();
        segment.as_segment().read_into(0, len, &mut bytes).unwrap();
        let (number, handle) = engine.export(len);
        engine.write(number, &bytes);
        tensor.memory = storage(0, handle, len);
        for (at, format) in FORMATS.into_iter().enumerate() {
            let mut keys = keys(format, BF16, at % 2 == 0);
            // The cache is of 16 bits.
            keys.tolerance = 0.02;
            let mut case = case(format, BF16, at as u64, "placing");
            let registered = RegisteredCase::new(&server, &mut engine, &mut case);
            let table = server.cuda.read_rope_table(&tensor).unwrap();
            let memory = &*registered.memory;
            let mut pages = || registered.read(&mut engine, &case);
            check_placed(&case, memory, &keys, table, [91, 12], &mut pages);
        }
        server.ends_clean();
    }
}

/// Five tokens of a MiB each, from position 1 on: more than a batch.
fn large(server: &Server, pages: &Pages) -> Placement {
    let groups = vec![COPIED];
    Placement {
        arena: Arc::clone(&server.arena),
        blocks: PromptBlocks::check(&pages.layout, &[pages.backwards(1)]).unwrap(),
        segments: vec![SegmentCopy {
            object_group: 0,
            extent: Extent::new(0, pages.object_bytes()),
            old_start: 100,
            start: 1,
            tokens: 5,
        }],
        rope: Arc::new(Rope::check(&pages.layout, Vec::new(), groups).unwrap()),
        deadline: None,
        event: Vec::new(),
    }
}

const LARGE: [u64; 3] = [6, 1 << 20, 6];

#[test]
fn batches_of_a_placement_follow_its_event() {
    let server = Server::with("", GpuOptions::default(), 8 << 20);
    let mut engine = Exporter::start();
    let pages = Pages::register(&server, &mut engine, LARGE);
    let object = Random::new(1).bytes(pages.object_bytes());
    let all = Extent::new(0, pages.object_bytes());
    server.arena.write(all, 0, &object).unwrap();
    let mut placement = large(&server, &pages);
    placement.event = pending(&mut engine, "event", &pages);
    let ticket = Ticket::of_placement(&*pages.memory, placement);
    was_asked(&server, "event");
    assert!(!ticket.has_ended());
    engine.ask("script release");
    assert_eq!(ticket.end().unwrap(), 5 << 20);
    let (page, blocks) = (1 << 20, pages.backwards(1));
    for (token, block) in blocks[1..].iter().enumerate() {
        let read = engine.read(pages.number, *block as u64 * page, page as usize);
        assert!(read == object[token * page as usize..][..page as usize]);
    }
    let first = engine.read(pages.number, blocks[0] as u64 * page, page as usize);
    assert!(first == vec![77; page as usize]);
    assert_eq!(server.readings().in_flight, [0, 0]);
    drop(pages);
    server.ends_clean();
}

#[test]
fn placement_that_cannot_be_ends_without_a_write() {
    let options = GpuOptions {
        event_timeout: Duration::from_millis(20),
        ..GpuOptions::default()
    };
    let server = Server::with("", options, 8 << 20);
    let mut engine = Exporter::start();
    let pages = Pages::register(&server, &mut engine, LARGE);
    let end = |change: &dyn Fn(&mut Placement)| {
        let mut placement = large(&server, &pages);
        change(&mut placement);
        run(&*pages.memory, placement).unwrap_err()
    };
    let late = end(&|placement| placement.deadline = Some(past()));
    assert!(matches!(late, DeviceError::DeadlinePassed), "{late}");
    let behind = end(&|placement| placement.segments[0].start = 2);
    assert!(matches!(behind, DeviceError::Plan(_)), "{behind}");
    let event = end(&|placement| placement.event = vec![1; 5]);
    assert!(matches!(event, DeviceError::Event(_)), "{event}");
    let never = pending(&mut engine, "event", &pages);
    let timeout = end(&|placement| placement.event.clone_from(&never));
    assert!(matches!(timeout, DeviceError::EventTimeout), "{timeout}");
    engine.ask("script release");
    let len = pages.content.len();
    assert!(engine.read(pages.number, 0, len) == vec![77; len]);
    pages.memory.stop();
    let stopped = end(&|_| ());
    assert!(matches!(stopped, DeviceError::Stopped), "{stopped}");
    // The GPU is as before.
    drop(pages);
    let pages = Pages::register(&server, &mut engine, [64, 512, 8]);
    let retrieve = pages.transfer(&server, Direction::Retrieve, &pages.backwards(8));
    pages.run(retrieve).unwrap();
    drop(pages);
    server.ends_clean();
}
