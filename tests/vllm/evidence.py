"""What an engine with our connector leaves behind besides its answers: what its pages held, and its KV events."""

import itertools
import json

import msgspec
import zmq

from kvrig.waiting import wait_until


# The fields of events that are sent without their names.
FIELDS = {
    "BlockStored": ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"],
    "BlockRemoved": ["block_hashes", "medium"],
}


# proves: docs/compare.md#hits
def pages_as_stored(directory):
    """(how many blocks were loaded, what is wrong with them): from the files of `witness/`."""
    stored, loaded = {}, []
    for path in directory.iterdir():
        for line in path.read_text().splitlines():
            kind, key, content = line.split()
            if kind == "S":
                stored.setdefault(key, set()).add(content)
            else:
                loaded.append((key, content))
    # A prompt that is computed twice may be rounded differently; the first or the last result is kept.
    wrong = [key for key, content in loaded if content not in stored.get(key, ())]
    if sum(map(len, stored.values())) != len(set().union(*stored.values())):
        wrong.append("blocks of different prefixes are alike: they are not what the model computed")
    return len(loaded), wrong


def named(event):
    """An event with names of its fields; earlier releases of vLLM send their values in order."""
    if isinstance(event, dict):
        return event
    kind, *values = event
    return {"type": kind, **dict(zip(FIELDS.get(kind, ()), values, strict=False))}


class Events:
    """A subscriber to an engine's KV events, from before its start."""

    def __init__(self):
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.subscribe(b"")
        # vLLM connects to what names no wildcard, and so listens nowhere.
        self.endpoint = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.seen, self.sequence, self.payloads = [], [], []

    def flags(self):
        """For the engine's command line."""
        config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.endpoint}
        return ["--kv-events-config", json.dumps(config)]

    def take(self):
        """All events so far, as vLLM's names and fields."""
        while self.socket.poll(0):
            _topic, number, batch = self.socket.recv_multipart()
            self.sequence.append(int.from_bytes(number, "big"))
            self.payloads.append(batch)
            self.seen += map(named, msgspec.msgpack.decode(batch)[1])
        return self.seen

    def connected(self, ask):
        """Wait until something arrives; `ask(number)` is another prompt each time."""
        attempts = itertools.count()
        wait_until(lambda: ask(next(attempts)) and self.take(), 30, "KV events of the engine", interval=0.05)

    def stored(self, medium):
        """`BlockStored` in this medium, in order."""
        return [each for each in self.take() if each["type"] == "BlockStored" and each["medium"] == medium]

    def stretches(self, medium):
        """`BlockStored` in this medium, in a list per stretch between two resets of vLLM's cache, which clear all media."""
        found = [[]]
        for each in self.take():
            if each["type"] == "AllBlocksCleared":
                found.append([])
            elif each["type"] == "BlockStored" and each["medium"] == medium:
                found[-1].append(each)
        return found

    def hashes(self, prompt, size):
        """What vLLM calls the prompt's blocks of `size` tokens, by its own events."""
        known = {}
        for event in self.stored("GPU"):
            parent = event["parent_block_hash"]
            for number, each in enumerate(event["block_hashes"]):
                known[parent, tuple(event["token_ids"][number * size : (number + 1) * size])] = each
                parent = each
        chain, parent = [], None
        while parent := known.get((parent, tuple(prompt[len(chain) * size : (len(chain) + 1) * size]))):
            chain.append(parent)
        return chain

    def published(self, prompt, chunk, size):
        """For each whole chunk of the prompt, how often the connector has published that it is stored, as vLLM would: at most, between two resets."""
        hashes, counts, step = self.hashes(prompt, size), [], chunk // size
        for start in range(0, len(prompt) // chunk * chunk, chunk):
            first = start // size
            expected = {
                "block_hashes": hashes[first : first + step],
                "parent_block_hash": hashes[first - 1] if first else None,
                "token_ids": prompt[start : start + chunk],
                "block_size": size,
            }
            counts.append(max(sum(expected.items() <= event.items() for event in stretch) for stretch in self.stretches("CPU")))
        return counts

    def close(self):
        """Listen no more."""
        self.socket.close()
