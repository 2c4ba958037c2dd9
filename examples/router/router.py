#!/usr/bin/env python3
"""A reverse proxy before engines with OpenAI's API, which sends a request to the engine whose kvtier server has most of the prompt.

    router.py --port 9000 --tokenizer MODEL --engine http://a:8000=http://a:8080 --engine http://b:8000=http://b:8080

Each --engine is the engine and the HTTP API of its kvtier server. All servers are asked at the same time by POST /prefix/match;
those without an answer within the budget count as having nothing. Most tokens win, then most in L1, then fewest sessions, then
engines take turns, as they do where no server answers or the prompt has no token ids. Less than half of a prompt counts as nothing:
else all conversations with one system prompt would meet at one engine. An engine that accepts no connection, or ends it before the
first byte, is passed over. The bearer token for the servers is $KVTIER_TOKEN.

An example: without TLS, limits, health checks or kept connections. Needs the standard library, and transformers for --tokenizer.
"""

import argparse
import asyncio
import base64
import itertools
import json
import os
import struct
import sys
from collections import namedtuple
from urllib.parse import urlsplit

CONNECT_SECONDS = 2.0
# What the rank of a host is made of.
FIELDS = ("hit_tokens", "hit_tokens_l1", "chunks", "chunk_size")
BODY_LIMIT = 64 << 20
TOLD_LIMIT = 1000
PATHS = ("/v1/completions", "/v1/chat/completions")

Host = namedtuple("Host", "engine server")


def address(url):
    """(host, port) of a URL."""
    parts = urlsplit(url)
    return parts.hostname, parts.port or 80


def host(text):
    """The URLs of an engine and its server."""
    urls = text.split("=", 1)
    try:
        valid = len(urls) == 2 and all(url.startswith("http://") and all(address(url)) for url in urls)
    except ValueError:  # Its port is no number.
        valid = False
    if not valid:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; give ENGINE=SERVER, both as http://HOST:PORT")
    return Host(*urls)


async def read_head(reader):
    """The first line of a message, and its other header lines."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    return first, lines


def header(lines, name):
    """The value of a header, or None."""
    for line in lines:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return None


class Router:
    """Engines, and how a request finds its own."""

    def __init__(self, hosts, tokenizer=None, budget=0.02, model=None, patience=600.0):
        """`tokenizer` is one of transformers; `budget` and `patience` (with an engine that says nothing) in seconds, without a budget
        no server is asked; `model` is its name at the servers."""
        self.hosts, self.tokenizer, self.budget, self.model, self.patience = hosts, tokenizer, budget, model, patience
        self.turns = itertools.count()
        # The loop alone would forget a task whose client has closed its side.
        self.running = set()
        # What was said of a server, so that it is said once.
        self.told = set()

    def token_ids(self, body):
        """The token ids that the engine computes for a request, or None if they are not known."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt):
            return prompt
        if self.tokenizer is None:
            return None
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        if "messages" in body:
            return self.tokenizer.apply_chat_template(
                body["messages"], tools=body.get("tools"), add_generation_prompt=True, return_dict=True
            )["input_ids"]
        return None

    async def ask(self, server, question):
        """What a server answers to /prefix/match."""
        reader, writer = await asyncio.open_connection(*address(server))
        try:
            token = os.environ.get("KVTIER_TOKEN")
            authorization = f"Authorization: Bearer {token}\r\n" if token else ""
            head = f"POST /prefix/match HTTP/1.1\r\nHost: {urlsplit(server).netloc}\r\nConnection: close\r\n{authorization}"
            writer.write(f"{head}Content-Length: {len(question)}\r\n\r\n".encode() + question)
            status, _ = await read_head(reader)
            answer = await reader.read()
            if status.split()[1] != b"200":
                raise ValueError(answer.decode(errors="replace"))
            found = json.loads(answer)
            try:
                counts = {name: int(found[name]) for name in FIELDS}
                return {**counts, "sessions": int(found["load"]["active_sessions"]), "refused": found.get("refused")}
            except (AttributeError, KeyError, TypeError) as error:
                raise ValueError("no answer to /prefix/match") from error
        finally:
            writer.close()

    async def matches(self, body):
        """The answers of the servers within the budget, by number of the host."""
        try:
            ids = await asyncio.to_thread(self.token_ids, body) if self.budget else None
            packed = base64.b64encode(struct.pack(f">{len(ids)}I", *ids)).decode() if ids else None
        except Exception as error:  # noqa: BLE001  the engine refuses such a request, and says why
            print(f"no token ids: {error!r}", file=sys.stderr)
            packed = None
        if packed is None:
            return {}
        model = self.model or body.get("model")
        question = {"model_name": model, "token_ids": packed, "cache_salt": body.get("cache_salt") or ""}
        question = json.dumps(question).encode()
        asked = [asyncio.create_task(self.ask(host.server, question)) for host in self.hosts]
        await asyncio.wait(asked, timeout=self.budget)
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)
        answers = {}
        for number, task in enumerate(asked):
            error = asyncio.TimeoutError("no answer in time") if task.cancelled() else task.exception()
            if error is None:
                answers[number] = task.result()
                error = answers[number]["refused"]
            if error is not None:
                self.tell(f"{self.hosts[number].server}: model {model!r}: {error}")
        return answers

    def tell(self, line):
        """Reports a line once."""
        if line not in self.told and len(self.told) < TOLD_LIMIT:
            self.told.add(line)
            print(line, file=sys.stderr)

    async def ranked(self, body):
        """The hosts, the best first."""
        answers, turn, count = await self.matches(body), next(self.turns), len(self.hosts)
        # A host without an answer has nothing, and takes turns with the least busy ones: only its server may be away.
        sessions = min((answer["sessions"] for answer in answers.values()), default=0)
        none = {**dict.fromkeys(FIELDS, 0), "sessions": sessions}

        def rank(number):
            found = answers.get(number, none)
            is_much = 2 * found["hit_tokens"] >= found["chunks"] * found["chunk_size"]
            hits = (-found["hit_tokens"], -found["hit_tokens_l1"]) if is_much else (0, 0)
            return *hits, found["sessions"], (number - turn) % count

        return [self.hosts[number] for number in sorted(range(count), key=rank)]

    async def serve(self, reader, writer):
        """Answers one client: a request per connection."""
        task = asyncio.current_task()
        self.running.add(task)
        try:
            first, lines = await read_head(reader)
            length = int(header(lines, b"content-length") or 0)
            if length > BODY_LIMIT or header(lines, b"transfer-encoding"):
                writer.write(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            body = await reader.readexactly(length)
            try:
                parsed = json.loads(body) if first.split()[1].decode() in PATHS else {}
            except ValueError:
                parsed = {}
            hosts = await self.ranked(parsed if isinstance(parsed, dict) else {})
            kept = [line for line in lines if not line.lower().startswith((b"connection:", b"expect:"))]
            request = b"\r\n".join([first, *kept, b"Connection: close", b"", body])
            for host in hosts:
                if await self.forward(host.engine, request, writer):
                    return
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        except (OSError, EOFError, asyncio.LimitOverrunError, ValueError, IndexError):
            pass  # The client left, or sent no HTTP.
        finally:
            writer.close()
            self.running.discard(task)

    async def forward(self, engine, request, client):
        """Sends the request to an engine and its answer to the client; whether the engine answered."""
        answered = False
        try:
            connected = asyncio.open_connection(*address(engine))
            reader, writer = await asyncio.wait_for(connected, CONNECT_SECONDS)
        except (OSError, asyncio.TimeoutError):
            return False
        try:
            writer.write(request)
            while part := await asyncio.wait_for(reader.read(1 << 16), self.patience):
                answered = True
                client.write(part)
                await client.drain()
        except asyncio.TimeoutError:
            return True  # It may be at work: no other engine begins again.
        except OSError:
            pass  # Of an answer that began, the client sees that it is cut.
        finally:
            writer.close()
        return answered


async def main():
    """Serves until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engine", action="append", required=True, type=host, metavar="ENGINE=SERVER", help="URLs of an engine and its kvtier server"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--tokenizer", metavar="MODEL", help="folder or name; without it only prompts of token ids are looked for")
    parser.add_argument("--model", help="the model's name at the servers, before its # (default: that of the request)")
    parser.add_argument("--budget-ms", type=float, default=20, help="time for the answers of the servers; 0: engines take turns")
    parser.add_argument("--engine-timeout", type=float, default=600, metavar="SECONDS", help="longest silence of an engine")
    arguments = parser.parse_args()
    tokenizer = None
    if arguments.tokenizer:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    router = Router(arguments.engine, tokenizer, arguments.budget_ms / 1000, arguments.model, arguments.engine_timeout)
    server = await asyncio.start_server(router.serve, arguments.host, arguments.port)
    print(f"serving on http://{arguments.host}:{arguments.port}", flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
