"""How both adapters reach the server."""

from __future__ import annotations

from ._native import Client, KvTierError, TimedOut

DEFAULT_TIMEOUT = 10.0
# A store on a GPU waits for the engine's step, which takes seconds for the longest prompts.
DEFAULT_STORE_TIMEOUT = 5.0
DEFAULT_HEARTBEAT = 5.0
DEFAULT_PATIENCE = 1.0


def connect(url: str, timeout: float, heartbeat: float) -> tuple[Client, int]:
    """A client and the server's chunk size in tokens; ConnectionError when nobody answers.

    Waits up to ``timeout`` seconds for the chunk size, and up to as long again for the answer to the first heartbeat.
    """
    client = Client(url, timeout=timeout, heartbeat=heartbeat)
    try:
        chunk_tokens = client.get_chunk_size().result()
        # A heartbeat later: adapters are healthy when they are there.
        if not client.wait_healthy(timeout):
            raise TimedOut("it tells its chunk size and answers no heartbeat")
    except KvTierError as error:
        client.close()
        raise ConnectionError(
            f"no KV-cache server answers at {url} within {timeout} s ({error}); start one with `kvtier server`, "
            "or correct the address"
        ) from error
    return client, chunk_tokens
