//! A server takes over from another one that has workers on GPUs, each over a fake driver of its own.

use std::path::Path;
use std::process::Command;

use kvtier_client::InstanceId;

use crate::exporter::UUID;
use crate::gpu_worker::{GpuWorker, gpu_flags};
use crate::prompts::CHUNKS;
use crate::server::{KVTIER, Segments, Server, wait_until};
use crate::take_over::{L1, take_over};
use crate::take_over_between::{Between, Kill, Survivor};
use crate::take_over_steps::threads;

/// Calls of a driver against its rules go to the log.
fn started(base: &Path, more: &[&str]) -> Server {
    let mut command = Command::new(KVTIER);
    command.env("KVTIER_CUDA_FAKE_LOUD", "1");
    let mut server = Server::spawn_by(command, base, L1, &with_gpu(more));
    assert!(server.wait_until_served(), "{}", server.log);
    server
}

fn with_gpu<'a>(more: &[&'a str]) -> Vec<&'a str> {
    use std::sync::OnceLock;
    static FLAGS: OnceLock<[String; 2]> = OnceLock::new();
    let flags = FLAGS.get_or_init(gpu_flags).iter().map(String::as_str);
    flags.chain(more.iter().copied()).collect()
}

/// Tries to take over, with a script for the new server's driver; returns the log of the new server, which ends.
fn refused(base: &Path, script: &str, more: &[&str]) -> String {
    let mut command = Command::new(KVTIER);
    command.env("KVTIER_CUDA_FAKE", script);
    let flags = with_gpu(&[&["--take-over"], more].concat());
    let mut new = Server::spawn_by(command, base, L1, &flags);
    assert!(!new.wait_until_served(), "{}", new.log);
    assert!(
        new.log.contains("the running server goes on"),
        "{}",
        new.log
    );
    std::mem::take(&mut new.log)
}

/// Allocations of engines that are open on the GPU; `None` if it is not in use.
fn open_allocations(server: &Server) -> Option<u64> {
    let status = server.http("/status", None);
    status["devices"]["cuda"]["gpus"][0]["state"]["open_allocations"].as_u64()
}

fn assert_sound(log: &str) {
    assert!(!log.contains("cuda fake driver"), "{log}");
    assert!(!log.contains("ERROR"), "{log}");
}

#[test]
fn gpu_worker_notices_nothing_of_a_take_over() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = started(base.path(), &[]);
    let mut worker = GpuWorker::register(&server, 1);
    // The same pages, opened once for both.
    worker.registers_as(2);
    for round in 0..3 {
        worker.store(round);
        assert_eq!(worker.lookup(round, "held"), CHUNKS);
        let mut new = started(base.path(), &["--take-over"]);
        std::mem::swap(&mut server, &mut new);
        assert!(new.child.wait().unwrap().success());
        assert_sound(&new.rest_of_log());
        // Looked up before, and everything that was stored.
        worker.retrieve(round, "held");
        (0..=round).for_each(|number| worker.read(number));
        assert_eq!((open_allocations(&server), worker.count()), (Some(1), 1));
        // L1 is pinned, and the driver used by nothing else.
        let cuda = &server.http("/status", None)["devices"]["cuda"];
        assert_eq!(
            cuda["pinning"]["pinned_bytes"],
            cuda["pinning"]["total_bytes"]
        );
        assert_sound(&server.log);
    }
    worker.unregister();
    worker.id = InstanceId(2);
    worker.unregister();
    assert_eq!((open_allocations(&server), worker.count()), (Some(0), 0));
    server.terminate();
    assert!(server.child.wait().unwrap().success());
    assert_sound(&server.rest_of_log());
}

/// The old server answers it, and copies nothing behind its state.
#[test]
fn store_in_flight_ends_before_the_state() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = started(base.path(), &["--gpu-event-timeout-seconds", "600"]);
    let more = with_gpu(&["--gpu-event-timeout-seconds", "600"]);
    let mut worker = GpuWorker::register(&server, 1);
    worker.store(1);
    let hold = |worker: &mut GpuWorker, number| {
        worker.engine.ask("script hold kernel");
        worker.engine.ask("fill 1");
        let event = worker.engine.bytes("event");
        worker.send_store(number, &event)
    };
    // One that does not end in time.
    let stored = hold(&mut worker, 2);
    let log = refused(base.path(), "", &["--gpu-event-timeout-seconds", "600"]);
    assert!(log.contains("in time"), "{log}");
    worker.engine.ask("script release");
    assert!(worker.is_done(stored));

    let stored = hold(&mut worker, 3);
    let (between, mut new) = Between::start_with(base.path(), &more);
    between.greet(|_| {});
    worker.engine.ask("script release");
    let state = between.read_state();
    assert!(worker.is_done(stored));
    between.write_state(state);
    between.pass_commit();
    assert!(new.wait_until_served(), "{}", new.log);
    assert!(server.child.wait().unwrap().success());
    (1..=3).for_each(|number| worker.read(number));
    new.stop();
}

#[test]
fn gpu_that_cannot_be_opened_refuses() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = started(base.path(), &[]);
    let mut worker = GpuWorker::register(&server, 7);
    worker.store(1);
    let whose = format!("worker 7 on GPU {UUID}");
    for (script, cause) in [
        (
            "fail cuIpcOpenMemHandle_v2=201",
            "CUDA_ERROR_INVALID_CONTEXT",
        ),
        (
            "fail cuDevicePrimaryCtxRetain=2",
            "CUDA_ERROR_OUT_OF_MEMORY",
        ),
        ("uuid.0=5ca1ab1e-0000-4000-8000-0000000000ff", "device_uuid"),
        ("fail cuMemcpyDtoHAsync_v2=719", "CUDA_ERROR_LAUNCH_FAILED"),
    ] {
        let log = refused(base.path(), script, &[]);
        assert!(
            log.contains(&whose) && log.contains(cause),
            "{script}: {log}"
        );
        // Nothing of it is counted as freed.
        assert_eq!((open_allocations(&server), worker.count()), (Some(1), 1));
        worker.read(1);
    }
    // No GPU at all.
    let log = refused(base.path(), "devices=0", &[]);
    assert!(log.contains("CUDA_ERROR_NO_DEVICE"), "{log}");
    let mut other = GpuWorker::in_segment(&server, 8);
    other.registers().unwrap();
    let log = refused(base.path(), "", &[]);
    let told = format!("worker 8: its memory on GPU {UUID} cannot be opened by another process");
    assert!(log.contains(&told), "{log}");
    other.unregister();
    worker.read(1);
    take_over(&mut server, base.path(), &with_gpu(&[])).unwrap();
    worker.read(1);
    server.stop();
}

/// A client that has one may still wait for it.
#[test]
fn events_of_answers_are_not_handed_over() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let event = ["--gpu-reply", "event"];
    let mut server = started(base.path(), &event);
    let mut worker = GpuWorker::register(&server, 7);
    worker.store(1);
    let log = refused(base.path(), "", &event);
    let told = format!("worker 7: with --gpu-reply event it may wait for events on GPU {UUID}");
    assert!(log.contains(&told), "{log}");
    worker.read(1);
    worker.unregister();
    take_over(&mut server, base.path(), &with_gpu(&event)).unwrap();
    worker.registers().unwrap();
    worker.read(1);
    server.stop();
}

/// Between what the new server has opened and the state.
#[test]
fn gpu_workers_come_and_go_while_the_new_server_opens_them() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = started(base.path(), &[]);
    let [mut one, mut two] = [1, 2].map(|id| GpuWorker::register(&server, id));
    one.store(1);
    // One comes. Clients do not wait until the new server has unpinned L1, which it never does here.
    let mut three = GpuWorker::new(&server, 3);
    let mut command = Command::new(KVTIER);
    command.env("KVTIER_CUDA_FAKE", "hold cuMemHostUnregister@2+");
    let (between, mut new) = Between::start_by(command, base.path(), &with_gpu(&[]));
    let opened = between.greet_until_opened();
    // Its first connection has sent nothing, and may have been closed since.
    three.reconnect(&server);
    three.registers().unwrap();
    between.pass_opened(&opened);
    between.write_state(between.read_state());
    between.pass_refusal();
    new.kill();
    for worker in [&mut one, &mut two, &mut three] {
        worker.read(1);
        assert_eq!(worker.count(), 1);
    }
    // One goes.
    let (between, mut new) = Between::start_with(base.path(), &with_gpu(&[]));
    let opened = between.greet_until_opened();
    two.unregister();
    assert_eq!(two.count(), 0);
    between.pass_opened(&opened);
    between.write_state(between.read_state());
    between.pass_commit();
    assert!(new.wait_until_served(), "{}", new.log);
    assert!(server.child.wait().unwrap().success());
    let log = server.rest_of_log();
    let told = "worker 3: it has registered on a GPU while";
    assert!(log.contains(told), "{log}");
    for worker in [&mut one, &mut three] {
        worker.read(1);
        assert_eq!(worker.count(), 1);
    }
    wait_until("the end of what was opened in vain", || {
        open_allocations(&new) == Some(2)
    });
    new.stop();
}

/// While it waits for a driver that does not answer.
#[test]
fn new_server_that_is_stopped_waits_for_no_driver() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = started(base.path(), &[]);
    let mut worker = GpuWorker::register(&server, 1);
    worker.store(1);
    for (script, thread) in [
        ("hold cuIpcOpenMemHandle_v2", "kvtier-register"),
        ("hold cuMemHostRegister_v2@2+", "kvtier-pin-0"),
    ] {
        let mut command = Command::new(KVTIER);
        command.env("KVTIER_CUDA_FAKE", script);
        let (between, mut new) = Between::start_by(command, base.path(), &with_gpu(&[]));
        between.greet_until_accepted(|_| {});
        wait_until("a thread for the driver", || {
            threads(&new.child).iter().any(|name| name == thread)
        });
        new.terminate();
        assert_eq!(between.pass_refusal(), "it was stopped", "{script}");
        assert_eq!(new.child.wait().unwrap().code(), Some(1), "{script}");
        worker.read(1);
    }
    take_over(&mut server, base.path(), &with_gpu(&[])).unwrap();
    worker.read(1);
    server.stop();
}

#[test]
fn kill_at_each_step_leaves_gpu_workers_with_one_server_or_none() {
    for kill in Kill::ALL.into_iter().filter(|kill| kill.is_behind_opened()) {
        let base = tempfile::tempdir().unwrap();
        let _segments = Segments::new();
        let mut server = started(base.path(), &[]);
        let mut worker = GpuWorker::register(&server, 1);
        worker.store(1);
        assert_eq!(worker.lookup(1, "held"), CHUNKS);
        let (between, mut new) = Between::start_with(base.path(), &with_gpu(&[]));
        between.run(kill, &mut new.child, &mut server.child);
        let is_served = new.wait_until_served();
        assert_eq!(is_served, kill.survivor() == Survivor::New, "{kill:?}");
        let server = match kill.survivor() {
            Survivor::Old => server,
            Survivor::New => new,
            Survivor::Neither => {
                // As after any kill: the registration is found, and what was stored.
                let server = started(base.path(), &[]);
                worker.reconnect(&server);
                assert_eq!(worker.lookup(1, "held"), CHUNKS, "{kill:?}");
                server
            }
        };
        worker.retrieve(1, "held");
        worker.store(2);
        worker.read(2);
        assert_eq!((open_allocations(&server), worker.count()), (Some(1), 1));
        worker.unregister();
        assert_eq!((open_allocations(&server), worker.count()), (Some(0), 0));
        server.stop();
    }
}
