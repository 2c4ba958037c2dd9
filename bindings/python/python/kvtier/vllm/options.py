"""Options in ``kv_connector_extra_config``, and the identity of this process among the engine's."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..connecting import (
    DEFAULT_HEARTBEAT,
    DEFAULT_LOOKUP_TIMEOUT,
    DEFAULT_PREEMPTION_PATIENCE,
    DEFAULT_STORE_TIMEOUT,
    DEFAULT_TIMEOUT,
    MAX_CHUNK_TOKENS,
    check_count,
    check_model_name,
    check_seconds,
)
from ..plain import digest
from ..worker import TRANSFER_MODES
from .fingerprint import fingerprint, weights_path

PREFIX = "kvtier."
KEY_MODES = ("tokens", "block_hashes")
WITHOUT = "without"


@dataclass(frozen=True)
class Options:
    """Options with their defaults; each key has the prefix ``kvtier.``."""

    url: str = "tcp://localhost:5555"
    """The server's address."""

    model_name: str = ""
    """The model's name in keys. If empty, it is vLLM's name and a digest of what else KV depends on, see
    :mod:`kvtier.vllm.fingerprint`. The digest does not notice weights that are replaced in an object store."""

    timeout: float = DEFAULT_TIMEOUT
    """Seconds a store or a retrieve may take; after that the engine computes the tokens."""

    lookup_timeout: float = DEFAULT_LOOKUP_TIMEOUT
    """Seconds a lookup may take, if that is less than ``timeout``: a request waits for it before it is computed."""

    start: str = WITHOUT
    """``without``: the engine starts without a server and uses it as soon as it is there. ``wait SECONDS``, or only the number:
    the start waits that long for the server, and fails without it."""

    chunk_tokens: int = 0
    """Tokens in a chunk, a multiple of the block sizes of all groups of layers. 0: the first server's default if it is one, else
    the smallest multiple of at least 256 tokens. A server that cannot serve it is not used."""

    store_timeout: float = DEFAULT_STORE_TIMEOUT
    """Seconds a store by the server may take, if that is less than ``timeout``: a preemption waits for it."""

    heartbeat: float = DEFAULT_HEARTBEAT
    """Seconds between two heartbeats."""

    preemption_patience: float = DEFAULT_PREEMPTION_PATIENCE
    """Seconds that a preemption waits for the preempted requests' stores. Then stores by the worker that have not begun are
    abandoned. A store by the server is waited for up to a second longer than ``store_timeout``."""

    transfer_mode: str = "auto"
    """``engine_driven``, ``lmcache_driven`` or ``auto``; see :class:`kvtier.WorkerAdapter`."""

    key_mode: str = "tokens"
    """What identifies a prefix: its ``tokens`` (hashed by the server, so all engines share it), or vLLM's
    ``block_hashes`` (shared by engines with the same hash algorithm, seed and block size)."""

    save_decode: bool = False
    """Whether generated tokens are also stored once they fill chunks."""

    hand_over: bool = False
    """Whether the answer to a request with ``do_remote_decode`` names the tokens that another engine finds, for a proxy of disaggregated
    prefill. In a MultiConnector another connector may answer too, which ends the engine in older releases of vLLM."""

    hand_over_timeout: float = 1.0
    """Seconds that a lookup waits for tokens that its request says another engine is storing; 0: none."""

    recompute_failed_loads: bool = True
    """Whether vLLM computes tokens that could not be loaded. False keeps vLLM's kv_load_failure_policy, whose default fails
    the request."""

    reset_server: bool = False
    """Whether a reset of vLLM's prefix cache with its connector also clears the server's memory, for all models, engines and
    tenants. Keys change after a reset in any case."""

    @property
    def wait_for_server(self) -> float | None:
        """Seconds that the start waits for the server; None if it does not."""
        return None if self.start == WITHOUT else float(self.start)

    follow_resets: bool = True
    """Whether a reset of only vLLM's own prefix cache, as after an update of the weights, also changes keys. Set to False if
    such resets are only meant to show this cache's hits."""

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> Options:
        """Reads the options from the extra configuration.

        Raises:
            ValueError: an option is unknown, or a value is not allowed; the message has what is.
        """
        given: dict[str, Any] = {}
        known = {field.name: field for field in fields(cls)}
        for key, value in extra.items():
            name = key.removeprefix(PREFIX)
            if not key.startswith(PREFIX) or name not in known:
                raise ValueError(f"{key}: no such option; {_suggestion(key, list(known))}")
            if name == "start":
                given[name] = _start(key, value)
            else:
                given[name] = _converted(key, value, getattr(cls, name))
        options = cls(**given)
        if options.model_name:
            try:
                check_model_name(options.model_name)
            except ValueError as error:
                raise ValueError(f"{PREFIX}{error}") from None
        if "://" in options.url and not options.url.startswith(("tcp://", "ipc://")):
            raise ValueError(f"{PREFIX}url: {options.url!r}; allowed are tcp://HOST:PORT and ipc://PATH")
        for name, allowed in (("transfer_mode", TRANSFER_MODES), ("key_mode", KEY_MODES)):
            if getattr(options, name) not in allowed:
                raise ValueError(f"{PREFIX}{name}: {getattr(options, name)!r}; allowed are {', '.join(allowed)}")
        for name in ("timeout", "lookup_timeout", "store_timeout", "heartbeat", "preemption_patience", "hand_over_timeout"):
            is_wait = name in ("preemption_patience", "hand_over_timeout")
            check_seconds(PREFIX + name, getattr(options, name), zero=is_wait)
        check_count(f"{PREFIX}chunk_tokens", options.chunk_tokens, 0, MAX_CHUNK_TOKENS)
        return options


def _suggestion(key: str, known: list[str]) -> str:
    """Returns a hint for an unknown option."""
    if key.startswith("lmcache."):
        return f"it is one of LMCache's connector; the server of KvTierConnector is {PREFIX}url (tcp://HOST:PORT)"
    name = key.lower().replace("-", "_").removeprefix(PREFIX).removeprefix("kvtier_")
    close = difflib.get_close_matches(name, known, 1)
    if close:
        return f"did you mean {PREFIX}{close[0]}? allowed are {', '.join(PREFIX + each for each in known)}"
    return f"allowed are {', '.join(PREFIX + each for each in known)}"


def _start(key: str, value: Any) -> str:
    """Returns ``without``, or seconds as a text."""
    text = str(value).strip()
    if text == WITHOUT:
        return text
    try:
        seconds = float(text.removeprefix("wait"))
    except ValueError:
        raise ValueError(f"{key}: {value!r}; allowed are {WITHOUT}, and seconds to wait for the server") from None
    check_seconds(key, seconds)
    return str(seconds)


def _converted(key: str, value: Any, default: Any) -> Any:
    """Returns the value in the default's type."""
    if isinstance(default, bool):
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise ValueError(f"{key}: {value!r}; allowed are true and false")
    if isinstance(default, int):
        try:
            return int(str(value))
        except ValueError:
            raise ValueError(f"{key}: {value!r}; a whole number is needed") from None
    if isinstance(default, float):
        try:
            return float(value)
        except (TypeError, ValueError):
            raise ValueError(f"{key}: {value!r}; a number is needed") from None
    if not isinstance(value, str):
        raise ValueError(f"{key}: {value!r}; a text is needed")
    return value


@dataclass(frozen=True)
class Identity:
    """Identity of this process's KV: the model, and its piece of it."""

    model_name: str
    world_size: int
    worker_id: int
    num_kv_readers: int
    is_writer: bool

    @classmethod
    def of(
        cls, vllm_config: Any, replicas: int = 1, rank: int = 0, model_name: str = "", pages: Mapping[str, Any] | None = None
    ) -> Identity:
        """Returns the identity of one rank; a scheduler has that of rank 0.

        ``model_name`` replaces vLLM's name and the digest of what KV depends on, but not the digest of ``pages``: see
        :func:`kvtier.vllm.pages.page_format`. Each ``replicas`` neighbouring tensor-parallel ranks have the same KV
        (:func:`kvtier.vllm.replicas.tp_replicas`): it is one piece, which the first of them stores and all of them read.

        Raises:
            ValueError: the parallelism cannot be served.
        """
        parallel, model = vllm_config.parallel_config, vllm_config.model_config
        if getattr(parallel, "decode_context_parallel_size", 1) > 1:
            raise ValueError("decode_context_parallel_size: KvTierConnector serves 1 only")
        if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
            raise ValueError("prefill_context_parallel_size: KvTierConnector serves 1 only")
        tensor, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        name = model_name or f"{weights_path(model)}#{fingerprint(vllm_config)}"
        if pages:
            name += f"#{digest(pages)}"
        if stages > 1:
            # The same number of pieces, divided differently.
            name += f"#pp{stages}"
            if partition := os.environ.get("VLLM_PP_LAYER_PARTITION"):
                name += f":{partition}"
        return cls(name, tensor // replicas * stages, rank // replicas, replicas, rank % replicas == 0)
