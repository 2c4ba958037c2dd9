"""SGLang's HiCache over a kvtier server, and its radix cache linked straight to one.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvtier", "module_path": "kvtier.sglang",
        "class_name": "KvTierStorage", "interface_v1": 1, "url": "tcp://localhost:5555"}'

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic --unified-cache-external-linker-config
        '{"linker": "KvTierLinker", "linker_module_path": "kvtier.sglang", "linker_extra_config": {"url": "tcp://localhost:5555"}}'

:mod:`kvtier.sglang.options` has the options.
"""

from .hicache import KvTierStorage
from .linker import KvTierLinker

__all__ = ["KvTierLinker", "KvTierStorage"]
