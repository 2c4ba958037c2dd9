"""`examples/router/router.py` before simulated engines, which store prompts in real kvtier servers."""

import asyncio
import http.client
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import CHUNK
from kvrig.server import REPOSITORY, free_port, listening
from kvrig.waiting import wait_until
from rig import BLOCK, tokens
from transformers import AutoTokenizer

ROUTER = REPOSITORY / "examples" / "router" / "router.py"
TOKENIZER = Path(os.environ.get("KVTIER_E2E_HOME") or Path.home() / ".cache" / "kvtier-e2e") / "model"
MODEL = "test/model"
# More than a test takes: a server that is asked has answered, also on a loaded machine.
LONG = 30_000


class SimulatedEngine:
    """An engine with OpenAI's API: looks its prompt up, stores what was missing, and streams two events."""

    def __init__(self, engine):
        self.engine, self.requests, self.hit_tokens = engine, [], 0
        self.released = threading.Event()
        self.released.set()
        simulated = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                simulated.requests.append((self.path, body))
                prompt = body.get("prompt")
                if isinstance(prompt, list):
                    simulated.compute(prompt, body.get("cache_salt", ""))
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for event in (b"data: one\n\n", b"data: [DONE]\n\n", b""):
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
                    self.wfile.flush()
                    assert simulated.released.wait(60)

            do_GET = do_POST

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def compute(self, prompt, salt=""):
        """What an engine does with the KV of a prompt."""
        whole = len(prompt) // CHUNK * CHUNK
        hit = self.engine.lookup("r", prompt, salt)
        self.engine.scheduler.end_session("r")
        self.hit_tokens += hit
        if hit < whole:
            assert self.engine.store("r", prompt, hit, whole, list(range((whole - hit) // BLOCK)), salt)

    def close(self):
        """Ends it, as a killed engine: nothing listens."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@contextmanager
def router(hosts, *flags):
    """The URL of a router before pairs of an engine's URL and a server's."""
    port = free_port()
    engines = [part for engine, server in hosts for part in ("--engine", f"{engine}={server}")]
    process = subprocess.Popen([sys.executable, str(ROUTER), "--port", str(port), *engines, *map(str, flags)])
    try:
        wait_until(lambda: listening(port), 60, "the router")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.fixture
def hosts(place):
    """Three engines and their servers, with an L1 of some 107 chunks each."""
    servers = [place.server(l1_gb=2 / 1024) for _ in range(3)]
    found = [(SimulatedEngine(place.engine(server, layers=19)), server) for server in servers]
    yield found
    for engine, _ in found:
        if engine.thread.is_alive():
            engine.close()


def urls(hosts):
    """What the router is given."""
    return [(engine.url, server.http) for engine, server in hosts]


def send(url, prompt, path="/v1/completions", **more):
    """A completion's text."""
    body = json.dumps({"model": MODEL, "prompt": prompt, "stream": True, **more}).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, body), timeout=60) as answer:
        return answer.read()


def counts(hosts):
    """Requests of each engine."""
    return [len(engine.requests) for engine, _ in hosts]


# proves: docs/hosts.md#route-to-where-the-prefix-is
def test_requests_go_where_the_prefix_is(hosts):
    """Most tokens win, under the request's salt only; the answer is the engine's, and streamed as it comes."""
    prompt = tokens(8 * CHUNK, 1)
    hosts[1][0].compute(prompt[: 2 * CHUNK])
    hosts[2][0].compute(prompt)
    hosts[0][0].compute(prompt, "tenant")
    with router(urls(hosts), "--budget-ms", LONG) as url:
        for _ in range(3):
            assert send(url, prompt) == b"data: one\n\ndata: [DONE]\n\n"
        assert counts(hosts) == [0, 0, 3]
        send(url, prompt[: 2 * CHUNK] + tokens(2 * CHUNK, 2))
        assert sum(counts(hosts)[1:]) == 4
        # A third of it is no reason.
        spread = sum(send(url, prompt[:CHUNK] + tokens(2 * CHUNK, 50 + each)) and 1 for each in range(6))
        assert spread == 6 and counts(hosts)[0] == 2
        before = counts(hosts)
        send(url, prompt, cache_salt="tenant")
        assert counts(hosts) == [before[0] + 1, *before[1:]]
        # The first event is there before the engine has the second.
        engine = hosts[2][0]
        engine.released.clear()
        body = json.dumps({"model": MODEL, "prompt": prompt}).encode()
        with urllib.request.urlopen(urllib.request.Request(url + "/v1/completions", body), timeout=60) as answer:
            assert answer.readline() == b"data: one\n"
            engine.released.set()
            assert answer.read() == b"\ndata: [DONE]\n\n"


def test_engines_take_turns_without_prefix(hosts):
    """Prompts that no server has, texts without a tokenizer, and other paths are spread; the body is not changed."""
    with router(urls(hosts), "--budget-ms", LONG) as url:
        for seed in range(6):
            send(url, tokens(2 * CHUNK, 100 + seed))
        assert counts(hosts) == [2, 2, 2]
        for _ in range(3):
            send(url, "a text")
            send(url, "other", path="/v1/embeddings")
        assert counts(hosts) == [4, 4, 4]
        assert hosts[0][0].requests[-1][1]["stream"] is True


def test_texts_and_chats_are_tokenized(hosts):
    """A text has the tokenizer's ids, and a chat those of its template."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    text = "Where is the prefix of this prompt? " * 16
    chat = [{"role": "user", "content": text}]
    hosts[1][0].compute(tokenizer(text)["input_ids"][: 6 * CHUNK])
    hosts[2][0].compute(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"][: 6 * CHUNK])
    with router(urls(hosts), "--budget-ms", LONG, "--tokenizer", TOKENIZER, "--model", MODEL) as url:
        for _ in range(2):
            send(url, text, model="served under another name")
            send(url, None, path="/v1/chat/completions", messages=chat)
    assert counts(hosts) == [0, 2, 2]


# proves: docs/hosts.md#route-to-where-the-prefix-is
def test_dead_and_frozen_servers_cost_their_hits_only(hosts):
    """A request waits for no server longer than the budget, and goes on to where the prefix is."""
    prompt = tokens(4 * CHUNK, 3)
    hosts[0][0].compute(prompt)
    with hosts[1][1].frozen(), router(urls(hosts), "--budget-ms", 1000) as url:
        # It would wait for ever without the budget.
        wait_until(lambda: send(url, prompt) and len(hosts[0][0].requests) >= 3, 60, "requests where the prefix is")
    before = counts(hosts)
    with router([(engine, f"http://127.0.0.1:{free_port()}") for engine, _ in urls(hosts)], "--budget-ms", LONG) as url:
        for _ in range(6):
            send(url, prompt)
        assert [after - first for first, after in zip(before, counts(hosts), strict=True)] == [2, 2, 2]
    # The engine of a dead server takes turns with the others.
    before = counts(hosts)
    known = urls(hosts)
    with router([(known[0][0], f"http://127.0.0.1:{free_port()}"), *known[1:]], "--budget-ms", LONG) as url:
        for seed in range(6):
            send(url, tokens(2 * CHUNK, 300 + seed))
        assert [after - first for first, after in zip(before, counts(hosts), strict=True)] == [2, 2, 2]


class Listing(BaseHTTPRequestHandler):
    """Answers everything with an empty list."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"[]")


def test_servers_that_answer_otherwise_have_nothing(hosts):
    """A request is not lost by a server of another kind."""
    other = ThreadingHTTPServer(("127.0.0.1", 0), Listing)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    try:
        with router([(engine, f"http://127.0.0.1:{other.server_port}") for engine, _ in urls(hosts)], "--budget-ms", LONG) as url:
            for seed in range(3):
                send(url, tokens(2 * CHUNK, seed))
    finally:
        other.shutdown()
        other.server_close()
    assert counts(hosts) == [1, 1, 1]


def test_refusal_names_the_model(place, capsys):
    """The one that the server was asked for."""
    module = runpy.run_path(str(ROUTER))
    asked = module["Router"]([SimpleNamespace(server=place.server().http)], budget=30).matches({"model": "other", "prompt": [1]})
    asyncio.run(asked)
    assert ": model 'other': " in capsys.readouterr().err


@pytest.mark.parametrize("pair", ["http://a:1", "a:1=b:2", "http://a:1=https://b:2", "http://a:x=http://b:2", "http://=http://b:2"])
def test_engine_that_is_no_pair_of_urls_is_refused(pair):
    """By the flag, the value and what is allowed."""
    done = subprocess.run([sys.executable, ROUTER, "--engine", pair], capture_output=True, text=True, timeout=60, check=False)
    line = f"error: argument --engine: {pair!r} is not allowed; give ENGINE=SERVER, both as http://HOST:PORT"
    assert done.returncode == 2 and line in done.stderr, done.stderr


# proves: docs/hosts.md#route-to-where-the-prefix-is
def test_engine_that_says_nothing_ends_its_request(hosts):
    """The answer is cut, and no other engine gets the request."""
    for engine, _ in hosts:
        engine.released.clear()
    with router(urls(hosts), "--engine-timeout", 1) as url, pytest.raises(http.client.IncompleteRead):
        send(url, tokens(2 * CHUNK, 9))
    for engine, _ in hosts:
        engine.released.set()
    assert sum(counts(hosts)) == 1


def test_dead_engine_is_passed_over(hosts):
    """The next engine gets the request of one that has ended. Without any engine the answer is 502."""
    prompt = tokens(4 * CHUNK, 4)
    hosts[2][0].compute(prompt)
    hosts[2][0].close()
    with router(urls(hosts), "--budget-ms", LONG) as url:
        send(url, prompt)
        assert sum(counts(hosts)) == 1
        for engine, _ in hosts[:2]:
            engine.close()
        with pytest.raises(urllib.error.HTTPError, match="502"):
            send(url, prompt)


def replay(hosts, budget):
    """Hit tokens and prompt tokens of 24 open conversations whose turns come in random order."""
    source = random.Random(7)
    system = tokens(CHUNK, 5)
    histories = [system + tokens(3 * CHUNK, 1000 + each) for each in range(24)]
    turns = [number for number in range(len(histories)) for _ in range(6)]
    source.shuffle(turns)
    asked = 0
    with router(urls(hosts), "--budget-ms", budget) as url:
        for turn, number in enumerate(turns):
            asked += len(histories[number])
            send(url, histories[number])
            # An answer and the next question.
            histories[number] = histories[number] + tokens(2 * CHUNK, 5000 + turn)
    hits = sum(engine.hit_tokens for engine, _ in hosts)
    for engine, server in hosts:
        engine.hit_tokens = 0
        assert server.post("/cache/clear", {"force": True})[0] == 200
    return hits, asked


# proves: docs/hosts.md#route-to-where-the-prefix-is
def test_replay_hits_twice_as_much_as_taking_turns(hosts):
    """The conversations, 313 chunks, fit into the three L1 together (321) once. `pytest -s` prints the figures."""
    turns, _ = replay(hosts, 0)
    routed, asked = replay(hosts, LONG)
    requests = [len(engine.requests) for engine, _ in hosts]
    print(
        f"\n24 conversations of 6 turns over 3 hosts, {asked} prompt tokens; hit tokens: routed {routed}, taking turns {turns}: "
        f"{routed / turns:.2f} times; requests per engine in both: {requests}"
    )
    assert routed >= 2 * turns
