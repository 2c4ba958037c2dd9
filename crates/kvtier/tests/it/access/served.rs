//! A server to send requests to, byte by byte, with or without TLS.

use std::io::{BufRead as _, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

pub const KVTIER: &str = env!("CARGO_BIN_EXE_kvtier");

/// How long anything may take before a test fails; never waited for in a test that passes.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// The tokens of the token file.
pub const ADMIN: &str = "admin-0123456789abcdef";
pub const READER: &str = "reader-0123456789abcdef";

/// How a server is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setup {
    Open,
    Tokens,
    Tls,
}

impl Setup {
    pub fn named(name: &str) -> Self {
        match name {
            "open" => Setup::Open,
            "tokens" => Setup::Tokens,
            "tls" => Setup::Tls,
            _ => panic!("there is no setup {name:?}; give open, tokens or tls"),
        }
    }
}

/// Tokens, certificate and key in a directory of their own, for their owner alone.
pub struct Files(pub TempDir);

impl Files {
    pub fn new() -> Self {
        let files = Self(tempfile::tempdir().unwrap());
        files.put(
            "tokens",
            &format!("admin ops {ADMIN}\nread watcher {READER}\n"),
        );
        files.certify();
        files
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Replaces a file as a whole.
    pub fn put(&self, name: &str, content: &str) {
        use std::os::unix::fs::PermissionsExt;
        let next = self.path("next");
        std::fs::write(&next, content).unwrap();
        std::fs::set_permissions(&next, PermissionsExt::from_mode(0o600)).unwrap();
        std::fs::rename(next, self.path(name)).unwrap();
    }

    /// Makes a certificate for loopback, which is its own authority, and its key.
    pub fn certify(&self) {
        let names = ["localhost".to_owned(), "127.0.0.1".to_owned()];
        let made = rcgen::generate_simple_self_signed(names).unwrap();
        self.put("key.pem", &made.signing_key.serialize_pem());
        self.put("cert.pem", &made.cert.pem());
    }
}

/// A server, stopped on drop.
pub struct Served {
    child: Child,
    pub http: String,
    pub endpoint: String,
    log: Arc<Mutex<Vec<String>>>,
    lines: Receiver<()>,
    pub files: Files,
    setup: Setup,
}

impl Served {
    pub fn start(setup: Setup, flags: &[&str]) -> Self {
        Self::start_in(Files::new(), setup, flags, &[])
    }

    pub fn start_in(
        files: Files,
        setup: Setup,
        flags: &[&str],
        variables: &[(&str, &str)],
    ) -> Self {
        let mut command = Command::new(KVTIER);
        command
            .args([
                "server",
                "--l1-size-gb",
                "0.05",
                "--shm-name",
                "",
                "--port",
                "0",
            ])
            .args(["--http-port", "0", "--log-format", "json"])
            .args(flags)
            .current_dir(files.0.path())
            .env_remove("KVTIER_HTTP_TOKENS")
            .envs(variables.iter().copied())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        if setup != Setup::Open {
            command.args(["--http-token-file", "tokens"]);
        }
        if setup == Setup::Tls {
            command.args(["--http-tls-cert", "cert.pem", "--http-tls-key", "key.pem"]);
        }
        let mut child = command.spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let log = Arc::new(Mutex::new(Vec::new()));
        let (sender, lines) = channel();
        let written = Arc::clone(&log);
        std::thread::spawn(move || {
            for line in stderr.lines() {
                written.lock().unwrap().push(line.unwrap());
                let _ = sender.send(());
            }
        });
        let mut served = Self {
            child,
            http: String::new(),
            endpoint: String::new(),
            log,
            lines,
            files,
            setup,
        };
        let serving = served.wait_for_line("\"serving\"");
        let serving: Value = serde_json::from_str(&serving).unwrap();
        let field = |name: &str| serving["fields"][name].as_str().unwrap().to_owned();
        (served.http, served.endpoint) = (field("http"), field("endpoint"));
        served
    }

    /// All of the log so far.
    pub fn log(&self) -> String {
        self.log.lock().unwrap().join("\n")
    }

    /// The first line with this text, as soon as there is one.
    pub fn wait_for_line(&self, text: &str) -> String {
        loop {
            let found = self
                .log
                .lock()
                .unwrap()
                .iter()
                .find(|line| line.contains(text))
                .cloned();
            if let Some(line) = found {
                return line;
            }
            let more = self.lines.recv_timeout(TIMEOUT);
            assert!(more.is_ok(), "no line with {text:?} in {}", self.log());
        }
    }

    pub fn has_tokens(&self) -> bool {
        self.setup != Setup::Open
    }

    fn address(&self) -> &str {
        self.http.split_once("://").unwrap().1
    }

    /// Sends these bytes on a connection of their own and reads the answer.
    pub fn send(&self, request: &[u8]) -> Answer {
        let stream = TcpStream::connect(self.address()).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        if self.http.starts_with("https") {
            let settings = Arc::new(trust(&self.files.path("cert.pem")));
            let name = ServerName::try_from("localhost").unwrap();
            let connection = ClientConnection::new(settings, name).unwrap();
            talk(StreamOwned::new(connection, stream), request)
        } else {
            talk(stream, request)
        }
    }

    /// One request; `headers` may also replace the usual ones.
    pub fn ask(&self, request: &str, headers: &[(String, String)], body: &str) -> Answer {
        let mut text = format!("{request} HTTP/1.1\r\n");
        let length = body.len().to_string();
        let usual = [
            ("host", "localhost"),
            ("connection", "close"),
            ("content-length", &length),
        ];
        let is_replaced = |name: &str| headers.iter().any(|(other, _)| other == name);
        for (name, value) in usual.iter().filter(|(name, _)| !is_replaced(name)) {
            text += &format!("{name}: {value}\r\n");
        }
        // An empty one takes a usual one away.
        for (name, value) in headers.iter().filter(|(_, value)| !value.is_empty()) {
            text += &format!("{name}: {value}\r\n");
        }
        self.send(format!("{text}\r\n{body}").as_bytes())
    }

    /// One request with a token.
    pub fn ask_as(&self, token: &str, request: &str, body: &str) -> Answer {
        self.ask(request, &[bearer(token)], body)
    }

    pub fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let status = Command::new("kill").args(["-s", name, &pid]).status();
        assert!(status.unwrap().success());
    }

    /// Stops it as its user would.
    pub fn stop(&mut self) -> ExitStatus {
        self.signal("TERM");
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(began.elapsed() < TIMEOUT);
            std::thread::yield_now();
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn bearer(token: &str) -> (String, String) {
    ("authorization".to_owned(), format!("Bearer {token}"))
}

fn trust(certificate: &Path) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_file(certificate).unwrap())
        .unwrap();
    let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
    ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth()
}

/// What came back.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    /// Lines, in lower case.
    pub head: String,
    pub body: String,
}

impl Answer {
    /// A header of it.
    pub fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines
            .filter(|(key, _)| *key == name)
            .map(|(_, value)| value)
            .next()
    }
}

fn talk(mut stream: impl Read + Write, request: &[u8]) -> Answer {
    stream.write_all(request).unwrap();
    let mut bytes = Vec::new();
    // The dashboard's events have no end: as far as the first tick.
    let is_complete = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes);
        text.contains("event: tick\ndata: ") && text.ends_with("\n\n\r\n")
    };
    let mut part = [0; 16 << 10];
    while !is_complete(&bytes) {
        match stream.read(&mut part).unwrap() {
            0 => break,
            length => bytes.extend_from_slice(&part[..length]),
        }
    }
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text
        .split_once("\r\n\r\n")
        .unwrap_or_else(|| panic!("no HTTP: {text:?}"));
    Answer {
        status: head.split(' ').nth(1).unwrap().parse().unwrap(),
        head: head.to_lowercase(),
        body: body.to_owned(),
    }
}
