//! Two processes: one exports, the other opens.

use std::ffi::c_int;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::driver::*;
use crate::vmm::{GRANULE, allow, create, map, reserve, unmap};

const BYTES: usize = 4096;

/// The other process: executes commands, one per line.
struct Exporter {
    child: Child,
    say: ChildStdin,
    hear: BufReader<ChildStdout>,
}

impl Exporter {
    fn start() -> Self {
        Self::start_with("")
    }

    /// With a script from the environment.
    fn start_with(script: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--ignored", "--nocapture", "processes::exporter"])
            .env("KVTIER_CUDA_FAKE", script)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (say, hear) = (
            child.stdin.take().unwrap(),
            BufReader::new(child.stdout.take().unwrap()),
        );
        let mut exporter = Self { child, say, hear };
        exporter.ask("ready");
        exporter
    }

    fn ask(&mut self, what: &str) -> String {
        writeln!(self.say, "{what}").unwrap();
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(
                0,
                self.hear.read_line(&mut line).unwrap(),
                "the exporter ended at \"{what}\""
            );
            // The harness writes lines of its own.
            if let Some((_, answer)) = line.trim_end_matches('\n').split_once("=> ") {
                return answer.to_owned();
            }
        }
    }

    fn handle(&mut self, what: &str) -> [u8; 64] {
        unhex(&self.ask(what)).try_into().unwrap()
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap())
        .collect()
}

fn memory_handle(at: u64) -> [u8; 64] {
    let mut handle = [0; 64];
    assert_eq!(
        OK,
        call!(cuIpcGetMemHandle(&mut handle => *mut [u8; 64], at => u64))
    );
    handle
}

fn event_handle(event: u64) -> [u8; 64] {
    let mut handle = [0; 64];
    assert_eq!(
        OK,
        call!(cuIpcGetEventHandle(&mut handle => *mut [u8; 64], event => u64))
    );
    handle
}

#[test]
#[ignore = "the other process of the tests here"]
fn exporter() {
    current();
    let (stream, at, host) = (stream(), device_memory(BYTES), host_memory(BYTES));
    let mut event = event(6);
    let mut physical = 0;
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
        let answer = match word {
            "ready" => String::new(),
            "memory" => hex(&memory_handle(at)),
            "try" => call!(cuIpcGetMemHandle(&mut [0; 64] => *mut [u8; 64], at => u64)).to_string(),
            "fill" => {
                host.fill(rest.parse().unwrap());
                assert_eq!(OK, to_device(at, host, stream));
                String::new()
            }
            "first" => contents(at, 1)[0].to_string(),
            "free" => call!(cuMemFree_v2(at => u64)).to_string(),
            "event" => hex(&event_handle(event)),
            "record" => {
                record(event, stream);
                String::new()
            }
            "destroy" => {
                let old = std::mem::replace(&mut event, crate::driver::event(6));
                call!(cuEventDestroy_v2(old => u64)).to_string()
            }
            "sync" => sync(stream).to_string(),
            "script" => try_script(rest).to_string(),
            "physical" => {
                physical = create(2 * GRANULE, 9).1;
                let window = reserve(2 * GRANULE);
                assert_eq!(
                    (OK, OK),
                    (
                        map(window, 2 * GRANULE, physical),
                        allow(window, 2 * GRANULE)
                    )
                );
                host.fill(77);
                assert_eq!(OK, to_device(window + GRANULE, host, stream));
                assert_eq!(OK, sync(stream));
                String::new()
            }
            "fabric" | "descriptor" => {
                let (mut to, kind) = ([0_u8; 64], if word == "fabric" { 8 } else { 1 });
                let code = call!(cuMemExportToShareableHandle(
                    &mut to => *mut [u8; 64], physical => u64, kind => u32, 0 => u64));
                assert_eq!(OK, code);
                if kind == 8 {
                    hex(&to)
                } else {
                    i32::from_le_bytes(to[..4].try_into().unwrap()).to_string()
                }
            }
            "violations" => violations().join(", "),
            _ => panic!("{line}"),
        };
        println!("=> {answer}");
    }
}

/// `CUipcMemHandle` and `CUipcEventHandle`, which go by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct HandleBytes([u8; 64]);

fn open(handle: [u8; 64]) -> (c_int, u64) {
    let mut at = 0;
    (
        call!(cuIpcOpenMemHandle_v2(&mut at => *mut u64, HandleBytes(handle) => HandleBytes, 1 => u32)),
        at,
    )
}

fn close(at: u64) -> c_int {
    call!(cuIpcCloseMemHandle(at => u64))
}

fn open_event(handle: [u8; 64]) -> (c_int, u64) {
    let mut event = 0;
    (
        call!(cuIpcOpenEventHandle(&mut event => *mut u64, HandleBytes(handle) => HandleBytes)),
        event,
    )
}

#[test]
fn memory_is_shared_by_its_handle() {
    let _alone = alone();
    let mut exporter = Exporter::start();
    let handle = exporter.handle("memory");
    let (code, at) = open(handle);
    assert_eq!(OK, code);
    exporter.ask("fill 42");
    assert_eq!("0", exporter.ask("sync"));
    assert_eq!(vec![42; BYTES], contents(at, BYTES));
    let (stream, host) = (stream(), host_memory(8));
    host.fill(43);
    assert_eq!(OK, to_device(at, host, stream));
    assert_eq!(OK, sync(stream));
    assert_eq!("43", exporter.ask("first"));
    // Opened twice is one mapping, which the second close ends.
    assert_eq!((OK, at), open(handle));
    assert_eq!(OK, close(at));
    assert_eq!(43, contents(at, 1)[0]);
    assert_eq!(OK, close(at));
    clean();
    violated(close(at), 1, "or it was closed");
    violated(to_device(at, host, stream), 1, "not in a live allocation");
    assert_eq!("", exporter.ask("violations"));
}

#[test]
fn invalid_handles_are_refused() {
    let _alone = alone();
    let (at, event, plain) = (device_memory(8), event(6), event(2));
    violated(open(memory_handle(at)).0, 201, "this very process");
    violated(open_event(event_handle(event)).0, 201, "this very process");
    violated(
        call!(cuIpcGetEventHandle(&mut [0; 64] => *mut [u8; 64], plain => u64)),
        400,
        "INTERPROCESS",
    );
    violated(open([9; 64]).0, 400, "no such handle");
    violated(open(event_handle(event)).0, 400, "no such handle");
    let mut exporter = Exporter::start();
    let handle = exporter.handle("memory");
    let mut other = handle;
    other[63] ^= 1;
    violated(open(other).0, 217, "another device");
    violated(
        call!(cuIpcOpenMemHandle_v2(&mut 0 => *mut u64, HandleBytes(handle) => HandleBytes, 0 => u32)),
        1,
        "LAZY",
    );
    let (_, at) = open(handle);
    violated(call!(cuMemFree_v2(at => u64)), 1, "no allocation starts");
    violated(
        call!(cuIpcGetMemHandle(&mut [0; 64] => *mut [u8; 64], at => u64)),
        1,
        "not memory of cuMemAlloc",
    );
    assert_eq!(OK, close(at));
    // Freed, it is there no more; that is the exporter's affair.
    assert_eq!("0", exporter.ask("free"));
    assert_eq!(400, open(handle).0);
    clean();
}

#[test]
fn opened_event_follows_its_exporter() {
    let _alone = alone();
    let mut exporter = Exporter::start();
    let handle = exporter.handle("event");
    let (code, event) = open_event(handle);
    assert_eq!((OK, OK), (code, query(event)));
    exporter.ask("script hold h2d");
    exporter.ask("fill 1");
    exporter.ask("record");
    assert_eq!(600, query(event));
    let stream = stream();
    assert_eq!(
        OK,
        call!(cuStreamWaitEvent(stream => u64, event => u64, 0 => u32))
    );
    assert_eq!(600, call!(cuStreamQuery(stream => u64)));
    exporter.ask("script release");
    assert_eq!(OK, call!(cuEventSynchronize(event => u64)));
    assert_eq!((OK, OK), (sync(stream), query(event)));
    // Recorded again, it means the later record.
    exporter.ask("script hold h2d");
    exporter.ask("fill 2");
    exporter.ask("record");
    assert_eq!(600, query(event));
    exporter.ask("script release");
    assert_eq!(OK, call!(cuEventSynchronize(event => u64)));
    violated(
        call!(cuIpcGetEventHandle(&mut [0; 64] => *mut [u8; 64], event => u64)),
        400,
        "made with INTERPROCESS here",
    );
    assert_eq!("0", exporter.ask("destroy"));
    assert_eq!(400, open_event(handle).0, "destroyed before it was opened");
    assert_eq!(OK, call!(cuEventDestroy_v2(event => u64)));
    clean();
}

#[test]
fn opened_memory_outlives_its_exporter() {
    let _alone = alone();
    let mut exporter = Exporter::start();
    let (memory, done) = (exporter.handle("memory"), exporter.handle("event"));
    exporter.ask("fill 5");
    exporter.ask("record");
    exporter.ask("sync");
    let (_, at) = open(memory);
    let (_, first) = open_event(done);
    exporter.ask("destroy");
    let pending = exporter.handle("event");
    let (_, second) = open_event(pending);
    exporter.ask("script hold h2d");
    exporter.ask("fill 6");
    exporter.ask("record");
    exporter.kill();
    assert_eq!((OK, 600), (query(first), query(second)));
    assert_eq!(vec![5; BYTES], contents(at, BYTES));
    assert_eq!(400, open_event(pending).0);
    assert_eq!(OK, close(at));
    assert_eq!(400, open(memory).0);
    clean();
}

fn import(from: usize, kind: u32) -> (c_int, u64) {
    let mut handle = 0;
    (
        call!(cuMemImportFromShareableHandle(&mut handle => *mut u64, from => usize, kind => u32)),
        handle,
    )
}

/// Maps what was imported and looks at what the exporter wrote there.
fn look(handle: u64) {
    let at = reserve(2 * GRANULE);
    assert_eq!(
        (OK, OK),
        (map(at, 2 * GRANULE, handle), allow(at, 2 * GRANULE))
    );
    assert_eq!(OK, call!(cuMemRelease(handle => u64)));
    assert_eq!(vec![77; BYTES], contents(at + GRANULE, BYTES));
    assert_eq!(OK, unmap(at, 2 * GRANULE));
    assert_eq!(OK, call!(cuMemAddressFree(at => u64, 2 * GRANULE => u64)));
}

#[test]
fn physical_memory_is_shared_by_descriptor_and_fabric() {
    let _alone = alone();
    let mut exporter = Exporter::start();
    exporter.ask("physical");
    let theirs: c_int = exporter.ask("descriptor").parse().unwrap();
    // SAFETY: plain system calls; the descriptor that comes has no other owner.
    let ours = unsafe {
        let process = libc::syscall(libc::SYS_pidfd_open, exporter.child.id(), 0) as c_int;
        assert!(process >= 0);
        let process = OwnedFd::from_raw_fd(process);
        use std::os::fd::AsRawFd as _;
        libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), theirs, 0) as c_int
    };
    assert!(ours >= 0, "{}", std::io::Error::last_os_error());
    let (code, handle) = import(ours as usize, 1);
    assert_eq!(OK, code);
    // The driver has its own by now.
    // SAFETY: ours, and not used again.
    drop(unsafe { OwnedFd::from_raw_fd(ours) });
    look(handle);
    let blob = exporter.handle("fabric");
    let (code, handle) = import(blob.as_ptr().addr(), 8);
    assert_eq!(OK, code);
    look(handle);
    clean();
    exporter.kill();
    assert_eq!(400, import(blob.as_ptr().addr(), 8).0);
    clean();
}

fn left_by(pid: u32) -> Vec<String> {
    let names = std::fs::read_dir("/dev/shm")
        .unwrap()
        .map(|entry| entry.unwrap().file_name());
    let mine = format!("kvtier-cuda-fake-{pid}-");
    names
        .filter_map(|name| name.into_string().ok())
        .filter(|name| name.starts_with(&mine))
        .collect()
}

#[test]
fn files_of_ended_processes_are_removed() {
    let mut ends = Exporter::start();
    let pid = ends.child.id();
    assert_ne!(0, left_by(pid).len());
    // The end of its input is its end.
    drop(std::mem::replace(
        &mut ends.say,
        Command::new("true")
            .stdin(Stdio::piped())
            .spawn()
            .unwrap()
            .stdin
            .unwrap(),
    ));
    assert!(ends.child.wait().unwrap().success());
    assert_eq!(Vec::<String>::new(), left_by(pid));
    let mut killed = Exporter::start();
    let pid = killed.child.id();
    killed.kill();
    drop(Exporter::start());
    assert_eq!(Vec::<String>::new(), left_by(pid));
}

#[test]
fn script_is_read_from_the_environment() {
    let mut exporter = Exporter::start_with("memory=10000; fail cuIpcGetMemHandle=801@1");
    assert_eq!("801", exporter.ask("try"));
    exporter.ask("memory");
    let wrong = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--ignored", "processes::exporter"])
        .env("KVTIER_CUDA_FAKE", "memory=much")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&wrong.stderr);
    assert!(text.contains("memory=much"), "{text}");
    assert!(!wrong.status.success());
}

#[test]
fn forked_child_removes_no_files() {
    let _alone = alone();
    let _at = device_memory(8);
    let before = left_by(std::process::id());
    // SAFETY: the child ends at once, by the way that runs what is to be run at exit.
    let child = unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::exit(0);
        }
        child
    };
    let mut status = -1;
    // SAFETY: our child, and a live number.
    assert_eq!(child, unsafe { libc::waitpid(child, &mut status, 0) });
    assert_eq!((0, before), (status, left_by(std::process::id())));
}
