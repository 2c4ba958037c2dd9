"""Connections of both adapters, and checks of their arguments."""

from __future__ import annotations

import logging
import time
import weakref

from ._native import Client

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT = 10.0
# A request waits for its lookup before it is computed.
DEFAULT_LOOKUP_TIMEOUT = 1.0
# A store on a GPU waits for the engine's step, which takes seconds for the longest prompts.
DEFAULT_STORE_TIMEOUT = 5.0
DEFAULT_HEARTBEAT = 5.0
DEFAULT_PREEMPTION_PATIENCE = 1.0

MAX_SECONDS = 24 * 3600.0
MAX_CHUNK_TOKENS = 65536

# Seconds between two checks whether to keep waiting.
_POLL_INTERVAL = 0.05


def check_seconds(name: str, seconds: float, *, zero: bool = False) -> None:
    """Raises ValueError unless ``seconds`` is a valid timeout; with ``zero``, 0 is one."""
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not (0 < seconds <= MAX_SECONDS or (zero and seconds == 0)):
        least = "from 0" if zero else "above 0"
        raise ValueError(f"{name}: {seconds!r}; a positive number of seconds is needed: {least}, at most {MAX_SECONDS:.0f}")


def check_count(name: str, value: int, least: int, most: int = 2**31 - 1) -> None:
    """Raises ValueError unless ``value`` is a whole number within these bounds."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name}: {value!r}; allowed are whole numbers from {least} to {most}")


def check_model_name(name: str) -> None:
    """Raises ValueError for a name that no key can have."""
    if not isinstance(name, str) or not name or "@" in name or not name.isprintable():
        raise ValueError(f"model_name: {name!r}; allowed is a printable text without @")


class _HealthLog:
    """Callback that logs the states of a client."""

    def __init__(self, client: Client) -> None:
        # Weak, since the client owns its callbacks.
        self._client, self._url = weakref.ref(client), client.url
        self._logged: str | None = None

    def __call__(self, state: str) -> None:
        client = self._client()
        obstacle = None if client is None else client.obstacle
        if state == "healthy":
            self._logged = None
            logger.info("connected to the kvtier server at %s", self._url)
        elif state == "degraded" and obstacle is not None:
            # Every heartbeat finds it again.
            if obstacle == self._logged:
                return
            self._logged = obstacle
            logger.error("the kvtier server at %s cannot be used: %s; computing without it until it can", self._url, obstacle)
        elif state == "degraded" and self._logged is None:
            logger.warning("the kvtier server at %s does not answer; computing without it until it does", self._url)


def connect(
    url: str,
    *,
    timeout: float,
    heartbeat: float,
    block_tokens: int,
    chunk_tokens: int | None,
    wait_for_server: float | None,
) -> Client:
    """Returns a client that works in chunks of ``chunk_tokens`` tokens, or of the size that the first server suggests.

    Raises:
        ConnectionError: no server answered within ``wait_for_server`` seconds.
        ValueError: the server cannot serve the chunk size, or an argument is not allowed.
    """
    check_seconds("timeout", timeout)
    check_seconds("heartbeat", heartbeat)
    check_count("block_tokens", block_tokens, 1)
    if chunk_tokens is not None:
        check_count("chunk_tokens", chunk_tokens, 1, MAX_CHUNK_TOKENS)
        if chunk_tokens % block_tokens:
            raise ValueError(f"chunk_tokens: {chunk_tokens}; allowed are multiples of the engine's block of {block_tokens} tokens")
    if wait_for_server is not None:
        check_seconds("wait_for_server", wait_for_server, zero=True)
    client = Client(url, timeout=timeout, heartbeat=heartbeat, block_tokens=block_tokens, chunk_tokens=chunk_tokens)
    client.on_health(_HealthLog(client))
    if wait_for_server is None:
        return client
    until = time.monotonic() + wait_for_server
    try:
        while not client.wait_healthy(min(_POLL_INTERVAL, max(0.0, until - time.monotonic()))):
            if client.obstacle is not None:
                raise ValueError(client.obstacle)
            if time.monotonic() >= until:
                raise ConnectionError(
                    f"no KV-cache server answers at {client.url} within {wait_for_server} s; start one with `kvtier server`, or "
                    "correct the address"
                )
    except BaseException:
        client.close()
        raise
    return client
