//! Steps of a hand-over, with a proxy between both servers: kills, delays, and messages that do not fit.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener};
use std::os::unix::net::UnixStream;
use std::process::Child;

use kvtier_client::InstanceId;

use crate::prompts::{CHUNKS, prompt, read, scope, whole};
use crate::server::{INSTANCE_NAME, Segments, Server, wait_until};
use crate::take_over::{L1, Raw, held_is_right, lose_pages, take_over};
use crate::take_over_between::{Between, Kill, Survivor, with_body};

#[test]
fn second_new_server_learns_of_the_first() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = Server::start(base.path(), L1, &[]);
    let (between, mut new) = Between::start(base.path());
    let hello = between.greet(|_| {});
    let second =
        UnixStream::connect(base.path().join(INSTANCE_NAME.as_str()).join("take-over")).unwrap();
    (&second).write_all(&hello).unwrap();
    between.write_state(between.read_state());
    between.pass_commit();
    let refusal = Between::read(&second);
    assert_eq!(refusal[0], 2);
    let told = String::from_utf8_lossy(&refusal[25..]).into_owned();
    let first = format!("process {} has just taken over", new.child.id());
    assert!(told.contains(&first), "{told}");
    assert!(new.wait_until_served(), "{}", new.log);
    assert!(server.child.wait().unwrap().success());
    new.stop();
}

#[test]
fn kill_at_each_step_leaves_one_server_or_none() {
    for kill in Kill::ALL {
        let base = tempfile::tempdir().unwrap();
        let _segments = Segments::new();
        let mut server = Server::start(base.path(), L1, &[]);
        let mut worker = server.worker_with(1, "a", 0..3);
        assert_eq!(worker.lookup(&prompt(1), "held").unwrap(), CHUNKS);
        let mut raw = Raw::connect(&server);
        let (request, answer) = Raw::exchange(0);
        raw.send(&request[..7]);
        let (between, mut new) = Between::start(base.path());
        between.run(kill, &mut new.child, &mut server.child);
        let mut check = |server: &Server| {
            raw.send(&request[7..]);
            assert_eq!(
                raw.receive(answer.len()),
                answer,
                "{kill:?}: {}",
                server.log
            );
            assert!(held_is_right(&mut worker, 1), "{kill:?}");
            for number in 0..3 {
                assert_eq!(read(&mut worker, "a", number), Ok(CHUNKS), "{kill:?}");
            }
        };
        let is_served = new.wait_until_served();
        match kill.survivor() {
            Survivor::Old => {
                assert!(!is_served, "{kill:?}: {}", new.log);
                check(&server);
                // And the next one can take over.
                take_over(&mut server, base.path(), &[]).unwrap();
                assert_eq!(read(&mut worker, "a", 2), Ok(CHUNKS), "{kill:?}");
                server.stop();
            }
            Survivor::New => {
                assert!(is_served, "{kill:?}: {}", new.log);
                check(&new);
                take_over(&mut new, base.path(), &[]).unwrap();
                new.stop();
            }
            Survivor::Neither => {
                assert!(!is_served, "{kill:?}: {}", new.log);
                // As after any kill: what was stored is there.
                let server = Server::start(base.path(), L1, &[]);
                let mut worker = server.worker(2, "a");
                for number in 0..3 {
                    assert_eq!(read(&mut worker, "a", number), Ok(CHUNKS), "{kill:?}");
                }
                server.stop();
            }
        }
    }
}

#[test]
fn state_that_is_not_understood_is_not_taken() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = Server::start(base.path(), L1, &[]);
    let mut worker = server.worker_with(1, "a", 0..1);
    assert_eq!(worker.lookup(&prompt(0), "held").unwrap(), CHUNKS);
    let scope = scope("a");
    let unfinished = prompt(1);
    let key = scope.worker_key(0, &unfinished, whole(), "s");
    worker
        .connection()
        .prepare_store(&key, InstanceId(1))
        .unwrap();
    let read_key = scope.worker_key(0, &unfinished, whole(), "s");
    let attempt = |hello: fn(&mut serde_json::Value), state: Option<fn(&mut serde_json::Value)>| {
        let (between, mut new) = Between::start(base.path());
        let answer = match state {
            Some(change) => {
                between.greet(hello);
                let (state, bytes, descriptors) = between.read_state();
                between.write_state((with_body(&state, change), bytes, descriptors));
                let refusal = Between::read(&between.new);
                (&between.old).write_all(&refusal).unwrap();
                refusal
            }
            None => {
                let greeting = with_body(&Between::read(&between.new), hello);
                (&between.old).write_all(&greeting).unwrap();
                let refusal = Between::read(&between.old);
                (&between.new).write_all(&refusal).unwrap();
                refusal
            }
        };
        drop(between);
        assert!(!new.wait_until_served(), "{}", new.log);
        assert_eq!(answer[0], 2);
        let told = String::from_utf8(answer[25..].to_vec()).unwrap();
        assert!(new.log.contains(told.trim()), "{} {told}", new.log);
        told
    };
    for (hello, told) in [
        (
            (|hello| hello["formats"] = [3, 4].into()) as fn(&mut serde_json::Value),
            "formats [3, 4]; this one writes 2",
        ),
        (
            |hello| hello["formats"] = serde_json::Value::Null,
            "cannot be read",
        ),
        (
            |hello| hello["flags"]["--chunk-size"]["sum"] = "7".into(),
            "--chunk-size is 16 in the running server and another 16",
        ),
    ] {
        let refused = attempt(hello, None);
        assert!(refused.contains(told), "{refused}");
    }
    // The next release may read more.
    let newer: fn(&mut serde_json::Value) = |hello| hello["formats"] = [2, 3].into();
    for (state, told) in [
        (
            (|state| state["format"] = 3.into()) as fn(&mut serde_json::Value),
            "format 3; this server reads 2",
        ),
        (|state| state["later"] = 1.into(), "unknown field `later`"),
        (
            |state| state["http_sockets"] = 0.into(),
            "too many descriptors",
        ),
        (
            |state| state["engine"]["workers"][0]["id"] = 9.into(),
            "worker 9: its registration is not kept",
        ),
        (
            |state| state["engine"]["lookups"]["lookups"][0]["rows"][0]["layout"] = 9.into(),
            "an object that is not in L1",
        ),
        (
            |state| state["engine"]["lookups"]["lookups"][0]["hashes"][0] = "x".into(),
            "no chunk hash",
        ),
        (
            |state| state["engine"]["lookups"]["lookups"][0]["freed"] = [true, true].into(),
            "was read or freed",
        ),
        (
            |state| state["engine"]["transfers"][0]["memory"]["store"][0][0] = 99_999.into(),
            "has not recorded its memory",
        ),
        (
            |state| state["front"]["connections"][0]["client"]["generations"] = 128.into(),
            "generation that is unknown",
        ),
        (
            |state| state["front"]["connections"][0]["input"] = 9.into(),
            "bytes of a connection are missing",
        ),
    ] {
        let refused = attempt(newer, Some(state));
        assert!(refused.contains(told), "{refused}");
    }
    // All of it is still as it was.
    let granted = worker
        .connection()
        .commit_store(&read_key, InstanceId(1), b"");
    assert!(granted.unwrap());
    assert!(held_is_right(&mut worker, 0));
    take_over(&mut server, base.path(), &[]).unwrap();
    assert_eq!(read(&mut worker, "a", 0), Ok(CHUNKS));
    server.stop();
}

/// Names of the threads of a process, once all have theirs: until then a thread has the main one's.
pub(crate) fn threads(child: &Child) -> Vec<String> {
    let mut names = Vec::new();
    wait_until("a name for each thread", || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap();
        let found = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")));
        // A thread may end meanwhile.
        let found = found.filter_map(Result::ok);
        names = found.map(|name| name.trim().to_owned()).collect();
        names.iter().filter(|name| *name == "kvtier").count() == 1
    });
    names
}

/// An end of file behind a commit is no proof that the old server has ended.
#[test]
fn new_server_does_not_serve_beside_running_one() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = Server::start(base.path(), L1, &[]);
    let mut worker = server.worker_with(1, "a", 0..1);
    let (between, mut new) = Between::start_with_lost_commit(base.path());
    // Nothing that the system may refuse is left to be started by then.
    let names = threads(&new.child);
    for name in ["kvtier-front", "kvtier-housekee"] {
        assert!(names.iter().any(|found| found == name), "{names:?}");
    }
    drop(between);
    assert!(!new.wait_until_served(), "{}", new.log);
    assert!(new.log.contains("L1"), "{}", new.log);
    assert_eq!(read(&mut worker, "a", 0), Ok(CHUNKS));
    take_over(&mut server, base.path(), &[]).unwrap();
    assert_eq!(read(&mut worker, "a", 0), Ok(CHUNKS));
    server.stop();
}

/// The other server could still commit while the old one ends.
#[test]
fn stop_during_hand_over_refuses_it() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = Server::start(base.path(), L1, &[]);
    let (between, mut new) = Between::start_with_lost_commit(base.path());
    server.terminate();
    // It is closed before the time of a hand-over ends, which a refusal would tell.
    let mut rest = Vec::new();
    (&between.old).read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty());
    // The commit would come too late.
    assert!((&between.old).write_all(&[5; 25]).is_err());
    assert!(server.child.wait().unwrap().success());
    new.child.kill().unwrap();
    drop(between);
    assert!(!new.wait_until_served(), "{}", new.log);
    let server = Server::start(base.path(), L1, &[]);
    assert!(server.log.contains("objects"), "{}", server.log);
    server.stop();
}

/// A stop is meant for the new server alone. Each is a wait of its own.
#[test]
fn new_server_that_is_stopped_leaves_all_to_the_old_one() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = Server::start(base.path(), L1, &[]);
    let mut worker = server.worker_with(1, "a", 0..1);
    for is_opened in [false, true] {
        let (between, mut new) = Between::start(base.path());
        match is_opened {
            false => drop(Between::read(&between.new)),
            true => drop(between.greet(|_| {})),
        }
        new.terminate();
        assert_eq!(between.pass_refusal(), "it was stopped");
        drop(between);
        assert!(!new.wait_until_served(), "{}", new.log);
        let told = "the running server goes on: it was stopped";
        assert!(new.log.contains(told), "{}", new.log);
        assert_eq!(new.child.wait().unwrap().code(), Some(1));
        assert_eq!(read(&mut worker, "a", 0), Ok(CHUNKS));
    }
    take_over(&mut server, base.path(), &[]).unwrap();
    assert_eq!(read(&mut worker, "a", 0), Ok(CHUNKS));
    server.stop();
}

/// It was healthy when it was asked.
#[test]
fn server_that_became_unhealthy_is_not_taken_over() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let server = Server::start(base.path(), L1, &[]);
    let (between, mut new) = Between::start(base.path());
    let opened = between.greet_until_opened();
    lose_pages(&server);
    between.pass_opened(&opened);
    let refusal = Between::read(&between.old);
    assert_eq!(refusal[0], 2);
    (&between.new).write_all(&refusal).unwrap();
    assert!(!new.wait_until_served(), "{}", new.log);
    let told = "the running server is unhealthy, and has to be restarted: L1";
    assert!(new.log.contains(told), "{}", new.log);
    server.connect().noop().unwrap();
}

/// A tier that answers nothing holds the hand-over, until its connections end.
#[test]
fn stopping_server_begins_no_step_of_hand_over() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let frozen = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = frozen.local_addr().unwrap().port();
    let adapter =
        format!(r#"{{"type":"redis","host":"127.0.0.1","port":{port},"connection_timeout":600}}"#);
    let flags = ["--l2-adapter", &adapter, "--l2-drain-timeout-seconds", "0"];
    let mut server = Server::start(base.path(), L1, &flags);
    let _worker = server.worker_with(1, "a", 0..1);
    let (between, mut new) = Between::start_with(base.path(), &flags);
    between.greet(|_| {});
    server.terminate();
    let mut rest = Vec::new();
    (&between.old).read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty(), "{}", String::from_utf8_lossy(&rest));
    drop(frozen);
    assert!(server.child.wait().unwrap().success());
    let log = server.rest_of_log();
    assert!(log.contains("the running server stops"), "{log}");
    new.child.kill().unwrap();
}

/// Whether it is a stop or the end of the other server that keeps *done* from it, the old one does not know.
#[test]
fn done_that_cannot_be_sent_is_a_warning() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = Server::start(base.path(), L1, &[]);
    let mut worker = server.worker_with(1, "a", 0..1);
    let (between, mut new) = Between::start(base.path());
    between.greet(|_| {});
    between.write_state(between.read_state());
    between.old.shutdown(Shutdown::Read).unwrap();
    (&between.old)
        .write_all(&Between::read(&between.new))
        .unwrap();
    assert!(server.child.wait().unwrap().success());
    let log = server.rest_of_log();
    assert!(
        log.contains("done was not sent") && !log.contains("ERROR"),
        "{log}"
    );
    drop(between);
    assert!(new.wait_until_served(), "{}", new.log);
    assert_eq!(read(&mut worker, "a", 0), Ok(CHUNKS));
    new.stop();
}

/// The old server waits 10 s for all steps together, then goes on; the new one must not serve beside it.
#[test]
fn new_server_that_comes_too_late_ends() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = Server::start(base.path(), L1, &[]);
    let mut worker = server.worker_with(1, "a", 0..1);
    assert_eq!(worker.lookup(&prompt(0), "held").unwrap(), CHUNKS);
    let (between, mut new) = Between::start_with_lost_commit(base.path());
    // It arrives too late.
    let refusal = Between::read(&between.old);
    assert_eq!(refusal[0], 2);
    (&between.new).write_all(&refusal).unwrap();
    assert!(!new.wait_until_served());
    assert!(new.log.contains("did not answer in time"), "{}", new.log);
    assert!(held_is_right(&mut worker, 0));
    take_over(&mut server, base.path(), &[]).unwrap();
    server.stop();
}
