#!/usr/bin/env python3
"""Follows docs/start.md to the letter: the commands of its code blocks, in their order, by a new user.

  start_page.py --model DIR --packages DIR [--logs DIR]

Only these differ: the wheel in --packages is taken as built, the model is --model, and the environment that the page asks for
("an environment with vLLM") is a new one over the packages of the Python that runs this. All of it is in namespaces of its own, with the
page's ports, home directory and /dev/shm, which end with it. Needs unshare (util-linux) and curl.
Exit status: 0 when every check passed.
"""

import argparse
import fcntl
import json
import os
import re
import shutil
import signal
import site
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path.insert(0, str(HERE.parent / "harness"))

from kvrig.report import Report

PAGE = REPOSITORY / "docs" / "start.md"
BUILD = "deploy/release/build --native --profile release &&\n"
INSIDE = "KVTIER_START_PAGE_INSIDE"

# Of ioctl: an interface's flags are set.
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def blocks():
    """The code blocks of the page, by the number of their section."""
    found = {}
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        number = re.match(r"(\d)\. ", section)
        if number:
            found[int(number[1])] = re.findall(r"^```\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return found


def isolated(arguments):
    """Runs this again in namespaces of its own; returns its exit status."""
    unshare = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--net", "--mount", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode != 0:
        print("SKIP docs/start.md: the system allows no namespaces of network, mounts and processes (unshare)")
        return 0
    inside = 'mount -t tmpfs -o size=50% none /dev/shm && mount -t proc none /proc && exec "$@"'
    command = [*unshare, "sh", "-c", inside, "sh", sys.executable, __file__, *arguments]
    return subprocess.run(command, env={**os.environ, INSIDE: "1"}, check=False).returncode


def loopback_up():
    """The interface of a new network namespace is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))


class User:
    """A shell in a new environment and home directory."""

    def __init__(self, folder, logs, packages):
        self.logs, self.running = logs, []
        environment = folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        [own] = environment.glob("lib/python*/site-packages")
        (own / "vllm.pth").write_text("\n".join(site.getsitepackages()))
        home = folder / "home"
        (home / "target").mkdir(parents=True)
        (home / "target" / "packages").symlink_to(packages)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVTIER_", "PYTHON", "LMCACHE_"))}
        self.home = home
        self.environment = {
            **kept, "HOME": str(home), "PATH": f"{environment}/bin:{kept['PATH']}", "XDG_STATE_HOME": str(home / "state"),
            "KVTIER_STATE_DIR": str(home / "state"), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder),
        }  # fmt: skip

    def run(self, command, timeout):
        """Its output; an assertion if it fails."""
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.home, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        print(f"$ {command.rstrip()}\n{done.stdout}{done.stderr}", flush=True)
        assert done.returncode == 0, f"exit status {done.returncode}"
        return done.stdout

    def start(self, name, command, ready, timeout):
        """Starts what stays; seconds until its log has `ready`."""
        print(f"$ {command.rstrip()} &", flush=True)
        log, began = self.logs / f"{name}.log", time.monotonic()
        with log.open("w") as file:
            process = subprocess.Popen(["bash", "-c", f"exec env {command}"], cwd=self.home, env=self.environment, stdout=file, stderr=file)
        self.running.append(process)
        while ready not in log.read_text():
            assert process.poll() is None, f"{name} ended: {log.read_text()[-2000:]}"
            assert time.monotonic() - began < timeout, f"no {ready!r} after {timeout} s: {log.read_text()[-2000:]}"
            time.sleep(0.2)
        return time.monotonic() - began

    def stop(self):
        """Ends what runs, the last first."""
        for process in reversed(self.running):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


# proves: docs/start.md#get-started
def follow(user, report, model):
    """The page, step by step."""
    page = blocks()
    assert sorted(page) == [1, 2, 3, 4, 5], f"sections of {PAGE}: {sorted(page)}"
    [install], [serve], [doctor], [_on_gpu, attach], [ask] = (page[number] for number in sorted(page))
    assert install.startswith(BUILD), install
    began = time.monotonic()
    user.run(install.removeprefix(BUILD), 300)
    report.check("1 install", True, "the wheel in an environment with vLLM")
    seconds = user.start("server", serve, "serving", 60)
    report.check("2 server", True, f"serves after {seconds:.1f} s")
    user.run(doctor, 120)
    report.check("3 doctor", True, "no problem")
    seconds = user.start("vllm", attach.replace("MODEL", str(model)), "Application startup complete", 600)
    report.check("4 vLLM", True, f"is ready after {seconds:.0f} s")
    out = user.run(ask.replace("MODEL", str(model)), 300)
    answers, rest = [], out
    while rest.startswith("{"):
        answer, end = json.JSONDecoder().raw_decode(rest)
        answers += [choice["text"] for choice in answer.get("choices", [])]
        rest = rest[end:].lstrip()
    report.check("5 answers", len(answers) == 2 and answers[0] == answers[1], f"{len(answers)} answers: {answers}")
    counter = re.match(r"vllm:kvtier_retrieved_tokens_total.* ([0-9.e+]+)$", rest, re.MULTILINE)
    report.check("5 a hit", counter and float(counter[1]) > 0, f"{counter and counter[1]} tokens came from kvtier")
    status = user.run("kvtier status", 60)
    report.check("5 status", re.search(r"workers? +1\b|1 worker", status), "shows the worker")
    print(f"{time.monotonic() - began:.0f} s for all", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--logs", type=Path, default=Path("start-page"))
    args = parser.parse_args()
    if not shutil.which("curl") or not shutil.which("unshare"):
        print("SKIP docs/start.md: curl or unshare (util-linux) is not installed")
        return 0
    if INSIDE not in os.environ:
        return isolated(sys.argv[1:])
    loopback_up()
    args.logs.mkdir(parents=True, exist_ok=True)
    report = Report()
    with tempfile.TemporaryDirectory(dir=args.logs.resolve()) as folder:
        user = User(Path(folder), args.logs.resolve(), args.packages.resolve())
        try:
            follow(user, report, args.model.resolve())
        except (AssertionError, subprocess.SubprocessError) as error:
            report.check("the page", False, error)
        finally:
            user.stop()
    return 1 if report.failed() else 0


if __name__ == "__main__":
    sys.exit(main())
