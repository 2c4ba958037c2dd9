"""vLLM's connector to a kvtier server.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvTierConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvtier.vllm", "kv_connector_extra_config": {"kvtier.url": "tcp://localhost:5555"}}'

:mod:`kvtier.vllm.options` has the options.
"""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from .connector import KvTierConnector

# vLLM's MultiConnector finds the connectors of its statistics by these names.
if KvTierConnector.__name__ not in getattr(KVConnectorFactory, "_registry", (KvTierConnector.__name__,)):
    KVConnectorFactory.register_connector(KvTierConnector.__name__, __name__, KvTierConnector.__name__)

__all__ = ["KvTierConnector"]
