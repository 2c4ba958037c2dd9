//! Sockets that a service manager, which is this test, has bound before the server starts.

use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::{KVTIER, complaint, kvtier, lines};

/// The manager's last step, for its two sockets at stdin and stdout: it becomes the server. The server obeys the modes of
/// directories, also if root runs the tests.
const MANAGER: &str = "exec 3<&0 4<&1 </dev/null >/dev/null; [ $(id -u) != 0 ] || as='setpriv --bounding-set=-dac_override'
    LISTEN_PID=$$ LISTEN_FDS=2 exec $as \"$0\" \"$@\"";

fn passed(descriptor: BorrowedFd<'_>) -> Stdio {
    descriptor.try_clone_to_owned().unwrap().into()
}

/// The command of a server that inherits these descriptors.
fn server(sockets: [BorrowedFd<'_>; 2], flags: &[&str]) -> Command {
    let mut command = Command::new("sh");
    command
        .args(["-c", MANAGER, KVTIER, "server", "--l1-size-gb", "0.05"])
        .args(["--shm-name", ""])
        .args(flags)
        .stdin(passed(sockets[0]))
        .stdout(passed(sockets[1]));
    command
}

fn listener() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port.to_string())
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// Ends with the test, whatever its outcome.
struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The server answers at both addresses, and SIGTERM ends it.
fn serves_until_stopped(mut command: Command, [requests, http]: [&str; 2]) {
    let mut server = Started(command.stderr(Stdio::null()).spawn().unwrap());
    let ping = |address| kvtier(&["ping", "--count", "1", "--timeout", "60", address]);
    // No retry: the connection waits in the socket until the server serves it.
    let answer = ping(requests);
    assert!(answer.status.success(), "{answer:?}");
    // The health is good a moment later.
    while !ping(http).status.success() {
        assert!(server.0.try_wait().unwrap().is_none(), "it ended");
        std::thread::yield_now();
    }
    let pid = server.0.id().to_string();
    assert!(Command::new("kill").arg(pid).status().unwrap().success());
    assert_eq!(server.0.wait().unwrap().code(), Some(0));
}

fn refusal(command: &mut Command) -> (Option<i32>, String) {
    let output = command.output().unwrap();
    (output.status.code(), lines(&output.stderr).join("\n"))
}

// proves: docs/operate.md#systemd
#[test]
fn inherited_ports_are_served_and_outlive_a_server() {
    let ((requests, port), (http, http_port)) = (listener(), listener());
    let flags = ["--port", &port, "--http-port", &http_port];
    let addresses = [
        format!("tcp://127.0.0.1:{port}"),
        format!("http://127.0.0.1:{http_port}"),
    ];
    // In any order.
    for sockets in [[&requests, &http], [&http, &requests]] {
        let command = server(sockets.map(|socket| socket.as_fd()), &flags);
        serves_until_stopped(command, [&addresses[0], &addresses[1]]);
        // No connection is refused between two servers.
        TcpStream::connect(requests.local_addr().unwrap()).unwrap();
    }
}

// proves: docs/operate.md#systemd
#[test]
fn inherited_path_is_served_and_stays() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("requests");
    let (requests, (web, http_port)) = (UnixListener::bind(&path).unwrap(), listener());
    let host = format!("ipc://{}", path.display());
    let flags = ["--host", &host, "--http-port", &http_port];
    let http = format!("http://127.0.0.1:{http_port}");
    let command = || server([requests.as_fd(), web.as_fd()], &flags);
    set_mode(&path, 0o600);
    // The server's user need not be able to bind there.
    set_mode(directory.path(), 0o500);
    serves_until_stopped(command(), [&host, &http]);
    set_mode(directory.path(), 0o700);
    assert!(path.exists());

    set_mode(&path, 0o620);
    let (code, line) = refusal(&mut command());
    let expected = format!("--host: {host}: the service manager's socket has mode 0620, ");
    assert!(
        code == Some(2) && line.contains(&expected) && line.contains("SocketMode=0600"),
        "{code:?} {line}"
    );
    std::fs::remove_file(&path).unwrap();
    let (code, line) = refusal(&mut command());
    assert!(
        code == Some(2) && line.contains("RuntimeDirectoryPreserve=yes"),
        "{code:?} {line}"
    );
}

// proves: docs/operate.md#systemd
#[test]
fn command_of_tier_does_not_inherit_sockets() {
    for mode in [&[][..], &["--check-config"]] {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name).display().to_string();
        let ((requests, port), (http, http_port)) = (listener(), listener());
        let (part, whole) = (at("part"), at("descriptors"));
        let script = format!("ls -l /proc/$$/fd >{part}; mv {part} {whole}");
        let tier = serde_json::json!({
            "type": "process",
            "socket_path": at("tier"),
            "command": ["sh", "-c", script],
        });
        let tier = tier.to_string();
        let flags = [
            "--port",
            &port,
            "--http-port",
            &http_port,
            "--l2-adapter",
            &tier,
        ];
        let mut command = server([requests.as_fd(), http.as_fd()], &flags);
        let command = command.args(mode).stderr(Stdio::null());
        let mut started = Started(command.spawn().unwrap());
        // The check ends only after the command, as a failure: it is no tier.
        while !Path::new(&whole).exists() {
            assert!(started.0.try_wait().unwrap().is_none() || Path::new(&whole).exists());
            std::thread::yield_now();
        }
        let seen = std::fs::read_to_string(whole).unwrap();
        assert!(seen.contains("pipe:["), "{seen}");
        for socket in [requests.as_fd(), http.as_fd()] {
            let inode = rustix::fs::fstat(socket).unwrap().st_ino;
            assert!(
                !seen.contains(&format!("socket:[{inode}]")),
                "{mode:?}: {seen}"
            );
        }
    }
}

// proves: docs/operate.md#systemd
#[test]
fn check_names_holders_of_a_taken_port() {
    let (_held, port) = listener();
    for flags in [
        ["--port", &port, "--http-port", "0"],
        ["--port", "0", "--http-port", &port],
    ] {
        let check = [
            "server",
            "--l1-size-gb",
            "0.05",
            "--shm-name",
            "",
            "--check-config",
        ];
        let line = complaint(&kvtier(&[&check[..], &flags].concat()), 1);
        assert!(
            line.contains("cannot be bound") && line.contains("kvtier.socket"),
            "{line}"
        );
    }
}

// proves: docs/operate.md#systemd
#[test]
fn inherited_socket_at_another_address_is_refused() {
    let ((requests, port), (other, other_port)) = (listener(), listener());
    let flags = ["--port", &port, "--http-port", "0"];
    let (code, line) = refusal(&mut server([requests.as_fd(), other.as_fd()], &flags));
    let named =
        format!("LISTEN_FDS: the service manager listens at tcp://127.0.0.1:{other_port}, ");
    assert!(code == Some(1) && line.contains(&named), "{code:?} {line}");
}

#[test]
fn inherited_descriptor_that_does_not_listen_is_refused() {
    let (requests, port) = listener();
    let null = std::fs::File::open("/dev/null").unwrap();
    let flags = ["--port", &port, "--http-port", "0"];
    let (code, line) = refusal(&mut server([requests.as_fd(), null.as_fd()], &flags));
    assert!(
        code == Some(2) && line.contains("LISTEN_FDS: a descriptor is no listening stream socket"),
        "{code:?} {line}"
    );
}
