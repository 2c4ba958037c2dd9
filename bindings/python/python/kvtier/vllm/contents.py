"""Identities of pictures and adapters by their content. If the scheduler cannot know it, the request is not cached."""

from __future__ import annotations

import logging
import os
import re
import time
from typing import Any

from ..files import Digests, Files, newest_change
from ..plain import fields

logger = logging.getLogger(__name__)

# vLLM's hashes of pictures: BLAKE3 or SHA-256, or SHA-512, in hexadecimal digits.
_HASH = re.compile(r"[0-9a-f]{64}(?:[0-9a-f]{64})?")
# vLLM's numbers for pictures whose hash nothing needs.
_COUNTER = re.compile(r"renderer-?\d+-mm-\d+-")

# Options that change the use of an adapter's weights.
_LORA = (
    "lora_dtype",
    "target_modules",
    "enable_tower_connector_lora",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)

# Nanoseconds before the engine's start in which a change counts as later: file clocks are coarse.
_CLOCK_GRANULARITY_NS = 100_000_000


class Contents:
    """Contents of requests beside tokens."""

    def __init__(self, vllm_config: Any) -> None:
        pictures = getattr(vllm_config.model_config, "multimodal_config", None)
        cache = getattr(vllm_config, "cache_config", None)
        unhashed = ""
        if not (getattr(pictures, "mm_processor_cache_gb", 0) or getattr(cache, "enable_prefix_caching", False)):
            unhashed = "without prefix caching and with --mm-processor-cache-gb 0 vLLM only numbers pictures; enable either"
        elif getattr(pictures, "enable_mm_embeds", False) and getattr(vllm_config, "ec_transfer_config", None) is not None:
            unhashed = (
                "with --enable-mm-embeds and an EC connector a request may omit its embeddings, and has the hash of the "
                "rest"
            )
        self._has_hashes = pictures is not None and not unhashed
        if pictures is not None and unhashed:
            logger.warning("requests with pictures are not cached: %s", unhashed)
        self._lora = fields(getattr(vllm_config, "lora_config", None), _LORA)
        self._started = time.time_ns() - _CLOCK_GRANULARITY_NS
        self._warned: set[str] = set()
        self._digests = Digests()
        # vLLM's number of an adapter -> its path and files at its first request, and why they are not certain to be what vLLM
        # computes with. Never forgotten: vLLM may keep what it read.
        self._first: dict[Any, tuple[str, Any]] = {}
        self._uncertain: dict[Any, str] = {}

    def are_known(self, request: Any) -> bool:
        """Whether the request's contents have keys that no other contents have."""
        salt = request.cache_salt or ""
        if not all(self._is_known_picture(feature, salt) for feature in request.mm_features or ()):
            return False
        return request.lora_request is None or self.adapter(request.lora_request) is not None

    def _is_known_picture(self, feature: Any, salt: str) -> bool:
        """Whether a picture has a hash, or a name that the client chose, which is trusted only within its salt."""
        name = getattr(feature, "mm_hash", None) or feature.identifier
        if not self._has_hashes:
            return False
        if _HASH.fullmatch(name):
            return True
        if salt and not _COUNTER.match(name):
            return True
        self._warn_once(
            "picture",
            "a picture's identifier %r is no hash of its content: such requests are cached only if the client gives a "
            "cache_salt",
            name,
        )
        return False

    def note(self, lora: Any) -> tuple[Files | None, str]:
        """Notes that a request makes vLLM read an adapter, whether that request is cached or not; returns the adapter's files, and why
        they are not certain to be what vLLM computes with, empty if they are.

        vLLM reads a number's files once, whatever path a later request has, and does not say when: when it is added, at its first use,
        again after it was evicted, and if loaded in place at every step. So what it computes with is certain only if all requests have
        one path, and the files there are the same ones at every request, unchanged since the engine's start.
        """
        path, found = getattr(lora, "lora_path", ""), None
        number = getattr(lora, "lora_int_id", path)
        why = "it is loaded in place" if getattr(lora, "load_inplace", False) else ""
        try:
            directory = _directory(path)
            found = Files.at(directory)
            if not found.names:
                why = why or f"{path} has no files"
            elif newest_change(directory) >= self._started:
                why = why or f"{path} has changed since this engine started"
        except OSError as error:
            why = why or str(error)
        first_path, first_found = self._first.setdefault(number, (path, found))
        if first_path != path:
            why = why or f"its number {number} is that of another path too"
        elif first_found != found:
            why = why or f"{path} is not what it was at its first request"
        if why:
            self._uncertain.setdefault(number, why)
        return found, self._uncertain.get(number, "")

    def adapter(self, lora: Any) -> bytes | None:
        """Returns the adapter's identity by its content, the same on all hosts; None if that is unknown, or not known yet."""
        found, why = self.note(lora)
        if why or found is None:
            return self._unknown(lora.lora_name, why)
        try:
            digest = self._digests.of(found)
        except OSError as error:
            return self._unknown(lora.lora_name, str(error))
        if digest is None:
            return None
        is_3d = getattr(lora, "is_3d_lora_weight", False)
        return repr(("lora", digest, sorted(self._lora.items()), is_3d)).encode()

    def _unknown(self, name: str, why: str) -> None:
        self._warn_once(name, "requests of the LoRA adapter %s are not cached: their weights are unknown (%s)", name, why)

    def _warn_once(self, about: str, text: str, *values: Any) -> None:
        """Logs once per subject, for the first hundred subjects."""
        if about not in self._warned and len(self._warned) < 100:
            self._warned.add(about)
            logger.warning(text, *values)


def _directory(path: str) -> str:
    """Returns the directory of an adapter's files: its path, or one in the cache of the Hugging Face hub."""
    local = os.path.expanduser(path)
    if os.path.exists(local):
        return local
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError

    try:
        found = try_to_load_from_cache(path, "adapter_config.json")
    except HFValidationError:
        found = None
    if not isinstance(found, str):
        raise FileNotFoundError(f"{path}: not found")
    return os.path.dirname(found)
