"""vLLM's connector to a kvtier server.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvTierConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvtier.vllm", "kv_connector_extra_config": {"kvtier.url": "tcp://localhost:5555"}}'

:mod:`kvtier.vllm.options` has the options.
"""

from .connector import KvTierConnector

__all__ = ["KvTierConnector"]
