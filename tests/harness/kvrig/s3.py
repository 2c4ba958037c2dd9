"""S3 servers for tests: rclone and SeaweedFS of PyPI, on loopback, which end with the test."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from . import logs
from .server import free_port
from .waiting import wait_started

KEYS = {"aws_access_key_id": "kvkey", "aws_secret_access_key": "kvsecret"}
BUCKET = "kvtier-test"

# What `*.localhost` is, for a process of its own mount namespace.
WITH_HOSTS = 'mount --bind "$0" /etc/hosts && exec "$@"'


def program(name):
    """A program of the Python environment that runs the tests."""
    return str(Path(sys.prefix) / "bin" / name)


def can_mount():
    """Whether a process may have an `/etc/hosts` of its own."""
    try:
        return subprocess.run(["unshare", "--mount", "true"], capture_output=True, timeout=10).returncode == 0
    except OSError:
        return False


class Process:
    """One server process."""

    def __init__(self, directory):
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.port, self.process = directory, free_port(), None
        self.log = directory.parent / f"{directory.name}.log"

    def run(self, command):
        """Starts it and waits until it answers requests, if only by a refusal."""
        logs.opened(self.log)
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_started(self, self.is_up, "an answer to a request")

    def is_up(self):
        """Whether it answers."""
        try:
            return request(self.port, "GET", "/")[0] < 500
        except (OSError, http.client.HTTPException):
            return False

    def stop(self):
        """Kills it."""
        if self.process:
            self.process.kill()
            self.process.wait()
            logs.closed(self.log)

    def freeze(self):
        """Stops the process until `thaw`."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self):
        """Ends that."""
        self.process.send_signal(signal.SIGCONT)

    def keys(self, **more):
        """The keys of a configuration for the bucket."""
        return {
            "s3_endpoint": f"127.0.0.1:{self.port}",
            "s3_bucket": BUCKET,
            "s3_region": "us-east-1",
            "disable_tls": True,
            **KEYS,
            **more,
        }


class Rclone(Process):
    """`rclone serve s3`: objects are files, so tests can change them. It keeps metadata in memory."""

    def __init__(self, directory, dir_cache="0"):
        """`dir_cache` is how long it may not notice other changes of its directories; without, it hangs in deep ones."""
        super().__init__(directory)
        self.dir_cache = dir_cache
        (directory / BUCKET).mkdir()
        self.start()

    def start(self):
        """Starts it with what is in its directory."""
        flags = ["--addr", f"127.0.0.1:{self.port}", "--auth-key", "kvkey,kvsecret", "--vfs-cache-mode", "off"]
        config = ["--config", str(self.directory.parent / "no-rclone.conf"), "--dir-cache-time", self.dir_cache]
        self.run([program("rclone"), "serve", "s3", *flags, *config, str(self.directory)])

    def objects(self):
        """The keys of objects and their sizes."""
        base, found = self.directory / BUCKET, {}
        for path in sorted(base.rglob("*")):
            try:
                if path.is_file():
                    found[str(path.relative_to(base))] = path.stat().st_size
            except FileNotFoundError:
                pass
        return found

    def file(self, key):
        """The file of an object."""
        return self.directory / BUCKET / key


class Drip(bytes):
    """A body that is sent a byte at a time."""

    # Bytes per second.
    RATE = 10


class Proxy:
    """Passes requests on to another server. While it is spoiled, `change(method, status, headers, body)` returns what it answers; a body that
    is shorter than its `Content-Length` is cut off, and a `Drip` is until it is mended. Methods in `change.refused` do not reach the server."""

    def __init__(self, server, change):
        self.server, self.change, self.is_spoiled, self.mended = server, change, False, threading.Event()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            do_DELETE = do_GET = do_HEAD = do_POST = do_PUT = lambda handler: self.forward(handler)

            def log_message(self, *_):
                """Nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", free_port()), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, daemon=True)
        self.thread.start()

    def spoil(self):
        """Lets it change answers."""
        self.mended.clear()
        self.is_spoiled = True

    def mend(self):
        """Ends that."""
        self.is_spoiled = False
        self.mended.set()

    def keys(self, **more):
        """The keys of a configuration for the bucket."""
        return self.server.keys(s3_endpoint=f"127.0.0.1:{self.http.server_port}", **more)

    def ask(self, handler, method, content):
        """The server's answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        try:
            connection.putrequest(method, handler.path, skip_host=True, skip_accept_encoding=True)
            for name, value in handler.headers.items():
                connection.putheader(name, value)
            connection.endheaders(content)
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        headers = {name: value for name, value in answer.headers.items() if name != "Transfer-Encoding"}
        if method != "HEAD":
            headers["Content-Length"] = str(len(body))
        return answer.status, headers, body

    def forward(self, handler):
        """Answers one request."""
        method, content = handler.command, handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        if self.is_spoiled and method in getattr(self.change, "refused", ()):
            status, headers, body = self.change(method, None, {}, b"")
        else:
            status, headers, body = self.ask(handler, method, content)
            if self.is_spoiled:
                status, headers, body = self.change(method, status, headers, body)
        handler.send_response_only(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        if isinstance(body, Drip):
            body = self.drip(handler, body)
        else:
            handler.wfile.write(body)
        handler.close_connection |= method != "HEAD" and len(body) < int(headers["Content-Length"])

    def drip(self, handler, body):
        """Sends bytes one by one until it is mended or its client has left; those sent."""
        for sent in range(len(body)):
            if self.mended.wait(1 / Drip.RATE):
                return body[:sent]
            try:
                handler.wfile.write(body[sent : sent + 1])
            except OSError:
                return body[:sent]
        return body

    def stop(self):
        """Ends it."""
        self.mend()
        self.http.shutdown()
        self.http.server_close()


class Seaweed(Process):
    """A whole SeaweedFS, whose buckets are also names of hosts below `s3.localhost`."""

    def __init__(self, directory):
        super().__init__(directory)
        self.filer = free_port()
        identity = {
            "name": "kv",
            "credentials": [{"accessKey": "kvkey", "secretKey": "kvsecret"}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        config = directory / "identities.json"
        config.write_text(json.dumps({"identities": [identity]}))
        ports = {"s3": self.port, "filer": self.filer, "master": free_port(), "volume": free_port()}
        flags = [f"-{part}.port={port}" for part, port in ports.items()]
        grpc = {part: free_port() for part in ports}
        flags += [f"-{part}.port.grpc={port}" for part, port in grpc.items()]
        # Services that nothing here asks, on ports that two of it would share.
        flags += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
        self.sockets = [Path(f"/tmp/seaweedfs-{part}-{port}.sock") for part, port in ports.items()]
        self.sockets += [Path(f"/tmp/seaweedfs-{part}-grpc-{port}.sock") for part, port in grpc.items()]
        flags += [f"-s3.config={config}", "-s3.domainName=s3.localhost", "-volume.max=20"]
        # By default no volume is written to if less than 1 % of the disk is free, and usage is reported to its makers.
        flags += ["-volume.minFreeSpace=64MiB", "-master.telemetry=false"]
        flags += ["-master.volumeSizeLimitMB=128", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={directory}"]
        self.run([program("weed"), "server", "-filer", "-s3", *flags])
        wait_started(self, self.make_bucket, "a bucket")
        # The bucket is only an entry of the filer: objects need a volume, whose server joins the master later.
        self.trials = []
        try:
            wait_started(self, self.keeps_an_object, "an object that is stored and read back through S3")
        except AssertionError as error:
            raise AssertionError(f"{error}\nthe last trial: {self.trials[-1:]}") from None

    def stop(self):
        """Kills it, and removes the sockets that it leaves behind."""
        super().stop()
        for socket in self.sockets:
            socket.unlink(missing_ok=True)

    def make_bucket(self):
        """Makes the bucket, which is a directory of the filer; whether it is there."""
        try:
            return request(self.filer, "POST", f"/buckets/{BUCKET}/")[0] < 300
        except (OSError, http.client.HTTPException):
            return False

    def keeps_an_object(self):
        """Whether another client of S3 stores, reads and deletes an object."""
        names = {"TYPE": "s3", "PROVIDER": "SeaweedFS", "ENDPOINT": f"http://127.0.0.1:{self.port}", "REGION": "us-east-1"}
        names |= {"ACCESS_KEY_ID": KEYS["aws_access_key_id"], "SECRET_ACCESS_KEY": KEYS["aws_secret_access_key"]}
        env = {**os.environ, **{f"RCLONE_CONFIG_TRIAL_{name}": value for name, value in names.items()}}
        for verb, given, wanted in (("rcat", b"trial", b""), ("cat", b"", b"trial"), ("deletefile", b"", b"")):
            flags = ["--config", str(self.directory / "no-rclone.conf"), "--retries", "1", "--low-level-retries", "1"]
            command = [program("rclone"), verb, f"trial:{BUCKET}/trial", *flags]
            done = subprocess.run(command, env=env, input=given, capture_output=True, timeout=60, check=False)
            if (done.returncode, done.stdout) != (0, wanted):
                self.trials.append((verb, done.returncode, done.stdout[-200:], done.stderr[-500:]))
                return False
        return True

    def objects(self, path=None):
        """The keys of objects and their sizes."""
        path = path or f"/buckets/{BUCKET}"
        status, body = request(self.filer, "GET", urllib.parse.quote(path) + "/?limit=10000", {"Accept": "application/json"})
        assert status == 200, (status, body[:200], logs.tail(self.log))
        found = {}
        for entry in json.loads(body)["Entries"] or []:
            # The filer marks directories in the mode of a file.
            if entry["Mode"] & 1 << 31:
                found |= self.objects(entry["FullPath"])
            else:
                found[entry["FullPath"].removeprefix(f"/buckets/{BUCKET}/")] = entry["FileSize"]
        return found

    def peer_keys(self):
        """The keys of LMCache's configuration, which knows buckets in names of hosts only."""
        return {
            "s3_endpoint": f"{BUCKET}.s3.localhost:{self.port}",
            "s3_region": "us-east-1",
            "disable_tls": True,
            "s3_prefer_http2": False,
            "s3_num_io_threads": 2,
            **KEYS,
        }

    def with_host(self, command):
        """The command, for a process that finds the bucket's host."""
        hosts = self.directory / "hosts"
        hosts.write_text(f"127.0.0.1 localhost s3.localhost {BUCKET}.s3.localhost\n")
        return ["unshare", "--mount", "sh", "-c", WITH_HOSTS, str(hosts), *command]


def request(port, method, path, headers=None):
    """Status and body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
