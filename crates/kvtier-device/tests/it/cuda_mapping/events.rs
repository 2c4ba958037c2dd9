//! Events of requests, both ways and in both forms.

use kvtier_device::cuda::driver::{DeviceBuffer, Stream};
use kvtier_device::cuda::events::{ExportedEvents, ForeignEvent, ForeignEvents, Timeline};

use super::setup::Bench;
use crate::exporter::{Exporter, hex};

/// Polls until the event is complete.
fn completes(event: &ForeignEvent) {
    while !event.is_complete().unwrap() {
        std::thread::yield_now();
    }
}

/// Polls until the event is known to be pending: a value is read in the background, and again if it was too small.
fn is_pending(bench: &Bench, form: &str, event: &ForeignEvent) {
    let reads = || bench.count("cuMemcpyDtoHAsync_v2");
    let (before, needed) = (reads(), if form == "number" { 3 } else { 0 });
    loop {
        assert!(!event.is_complete().unwrap(), "{form}");
        if reads() - before >= needed {
            return;
        }
        std::thread::yield_now();
    }
}

fn foreign(bench: &Bench) -> ForeignEvents {
    ForeignEvents::new(bench.allocations.clone(), None)
}

/// In either form, an event completes with the other process's work before it.
#[test]
fn events_complete_after_the_work_before_them() {
    for form in ["event", "number"] {
        let bench = Bench::new();
        let mut exporter = Exporter::start();
        let events = foreign(&bench);
        let past = events.open(&exporter.bytes(form)).unwrap();
        exporter.ask("sync");
        exporter.ask("script hold kernel");
        exporter.ask("fill 1");
        let pending = events.open(&exporter.bytes(form)).unwrap();
        let behind = events.open(&exporter.bytes(form)).unwrap();
        completes(&past);
        is_pending(&bench, form, &pending);
        is_pending(&bench, form, &behind);
        exporter.ask("script release");
        exporter.ask("sync");
        [&past, &pending, &behind].into_iter().for_each(completes);
        for function in ["cuStreamWaitEvent", "cuEventSynchronize"] {
            assert_eq!(bench.count(function), 0, "{function}");
        }
        // The values are in one buffer, which stays open for later events.
        let opened = u64::from(form == "number");
        assert_eq!(bench.count("cuIpcOpenMemHandle_v2"), opened, "{form}");
        drop((past, pending, behind));
        assert_eq!(bench.allocations.open_count() as u64, opened);
        drop(events);
        bench.is_clean();
    }
}

#[test]
fn event_of_a_dead_process_stays_pending_and_closes() {
    for form in ["event", "number"] {
        let bench = Bench::new();
        let mut exporter = Exporter::start();
        let events = foreign(&bench);
        exporter.ask("script hold kernel");
        // The buffer of numbers is made before anything is held.
        if form == "number" {
            exporter.ask("script release");
            exporter.bytes(form);
            exporter.ask("sync");
            exporter.ask("script hold kernel");
        }
        exporter.ask("fill 1");
        let bytes = exporter.bytes(form);
        let pending = events.open(&bytes).unwrap();
        exporter.kill();
        is_pending(&bench, form, &pending);
        drop((pending, events));
        bench.is_clean();
        let error = foreign(&bench).open(&bytes).unwrap_err().to_string();
        assert!(error.contains("a living process"), "{error}");
        bench.is_clean();
    }
}

#[test]
fn empty_event_is_complete_and_garbage_refused() {
    let bench = Bench::new();
    let events = foreign(&bench);
    assert!(events.open(b"").unwrap().is_complete().unwrap());
    // Number 0 is reached from the start, wherever it is.
    let mut start = [0; 81];
    start[0] = 1;
    assert!(events.open(&start).unwrap().is_complete().unwrap());
    for bytes in [b"stub_ipc_handle".as_slice(), &[1; 63], &[1; 80], &[2; 81]] {
        let error = events.open(bytes).unwrap_err().to_string();
        assert!(error.starts_with("event handle is"), "{error}");
    }
    assert_eq!(bench.count("cuIpcOpenEventHandle"), 0);
    assert_eq!(bench.count("cuIpcOpenMemHandle_v2"), 0);
    drop(events);
    bench.is_clean();
}

/// A timeline buffer has a minimum size.
#[test]
fn too_small_timeline_buffer_is_refused() {
    let bench = Bench::new();
    let mut exporter = Exporter::start();
    let mut bytes = exporter.bytes("number");
    let small = exporter.bytes("small");
    bytes[1..65].copy_from_slice(&small);
    let events = foreign(&bench);
    let error = events.open(&bytes).unwrap_err().to_string();
    assert!(
        error.contains("a buffer of 4096 bytes; allowed: at least 32768"),
        "{error}"
    );
    drop(events);
    bench.is_clean();
}

#[test]
fn own_timeline_is_read_without_opening() {
    let bench = Bench::new();
    let context = bench.context();
    let timeline = Timeline::new(context).unwrap();
    let events = ForeignEvents::new(bench.allocations.clone(), Some(timeline.clone()));
    let stream = Stream::new(context, 0).unwrap();
    let _current = context.enter().unwrap();
    let lane = timeline.slot().unwrap();
    let other = timeline.slot().unwrap();
    let first = lane.record(&stream).unwrap();
    let second = lane.record(&stream).unwrap();
    let third = other.record(&stream).unwrap();
    stream.synchronize().unwrap();
    // Slot 0 is for trying things out; places and numbers are big-endian at 65 and 73.
    let place = |event: &[u8; 81]| (event[72], event[80]);
    assert_eq!(
        [first, second, third].map(|event| place(&event)),
        [(8, 1), (8, 2), (16, 1)]
    );
    for event in [first, second, third] {
        completes(&events.open(&event).unwrap());
    }
    let mut next = second;
    next[80] = 3;
    is_pending(&bench, "number", &events.open(&next).unwrap());
    assert_eq!(bench.count("cuIpcOpenMemHandle_v2"), 0);
    drop((events, lane, other, timeline, stream));
    bench.is_clean();
}

#[test]
fn timeline_needs_stream_memory_writes() {
    let bench = Bench::new();
    bench.script("fail cuStreamWriteValue64_v2=801");
    let error = Timeline::new(bench.context()).unwrap_err();
    assert_eq!(error.code(), Some(801));
    bench.script("reset");
    bench.is_clean();
}

#[test]
fn exported_events_are_opened_and_reused_late() {
    let bench = Bench::new();
    let mut exporter = Exporter::start();
    let context = bench.context();
    let _current = context.enter().unwrap();
    let exported = ExportedEvents::new(context.clone());
    let stream = Stream::new(context, 0).unwrap();
    let memory = DeviceBuffer::new(context, 64).unwrap();
    bench.script("hold kernel");
    // SAFETY: the memory is ours, and lives until the stream has ended below.
    unsafe { stream.fill(memory.base(), 1, 64) }.unwrap();
    let first = exported.record(&stream).unwrap();
    exporter.ask(&format!("open {}", hex(&first)));
    assert_eq!(exporter.ask("complete"), "false");
    bench.script("release");
    stream.synchronize().unwrap();
    assert_eq!(exporter.ask("complete"), "true");
    // 2047 more are others; only then is the oldest used again.
    for _ in 1..2048 {
        assert_ne!(exported.record(&stream).unwrap(), first);
    }
    assert_eq!(exported.record(&stream).unwrap(), first);
    assert_eq!(bench.count("cuEventCreate"), 2048);
    stream.synchronize().unwrap();
    drop((exported, stream, memory));
    bench.is_clean();
}
