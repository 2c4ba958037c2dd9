"""The connector for disaggregated prefill with Dynamo.

    --kv-transfer-config '{"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvtier.vllm.dynamo", "kv_connector_extra_config": {"kvtier.url": "tcp://localhost:5555"}}'

Dynamo decides by the name of ``kv_connector`` alone what its prefill and decode workers send each other. A name that is not in its table
``KV_CONNECTOR_PROTOCOLS`` ends every prefill with a ``ValueError``, and ``KvTierConnector`` is not in it (``dynamo/vllm/kv_connector_protocols.py``
of ai-dynamo 1.6.1). The table's entry for engines that share a cache has the name ``LMCacheMPConnector``. vLLM takes the class of that name
from the module that is configured, so LMCache is neither used nor needed.
"""

from __future__ import annotations

from typing import Any

from . import KvTierConnector
from .parameters import STORED_TOKENS


class LMCacheMPConnector(KvTierConnector):
    """KvTierConnector under the name of Dynamo's entry for a shared cache."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns the cached tokens beyond vLLM's own; None while the lookup is in flight, or the prefill's stores are.

        For this entry Dynamo sets empty parameters in both requests of a pair, and none in others. The prefill generates one token
        (``_prefill_kv_protocol`` and ``_update_kv_transfer_params`` in ``dynamo/vllm/handlers.py``).
        """
        if request.kv_transfer_params == {} and request.max_tokens > 1:
            request.kv_transfer_params = {STORED_TOKENS: request.num_prompt_tokens}
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


# vLLM's MultiConnector finds the statistics of a child by its class's name, and finds LMCache's by this one.
LMCacheMPConnector.__name__ = KvTierConnector.__name__
