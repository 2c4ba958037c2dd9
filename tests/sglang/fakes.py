"""SGLang 0.5.23 from its unpacked wheel, on a machine without its kernels: absent packages are fakes that do nothing."""

import importlib.abc
import importlib.machinery
import os
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

import pytest

RELEASE = "0.5.23"
HOME = Path(os.environ.get("KVTIER_E2E_HOME") or Path.home() / ".cache/kvtier-e2e")
SOURCE = Path(os.environ.get("SGLANG_SOURCE") or HOME / f"clients/sglang-{RELEASE}")

_ABSENT = {
    *("IPython", "cutlass", "datasets", "decord", "deep_ep", "deep_gemm", "easydict", "flash_attn", "flashinfer", "gguf", "humming"),
    *("kernels", "modelscope", "orjson", "outlines", "pynvml", "quack", "setproctitle", "sgl_deep_gemm", "sgl_kernel"),
    *("smg_grpc_servicer", "soundfile", "tilelang", "timm", "tml_renderers", "torch_memory_saver", "torchao", "torchcodec"),
    *("triton_kernels", "uvloop", "xgrammar"),
}


class _Kind(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{cls.__name__}.{name}")
        setattr(cls, name, value)
        return value


class _Module(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        value = _Kind(name, (), {}) if name[:1].isupper() else MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in _ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


class _Bag:
    """Published configuration: what the pools and the tree read of it."""

    def __getattr__(self, name):
        return {"disaggregation_mode": "null", "mamba": self, "mamba_max_states_per_path": -1, **MEMORY}.get(name)


# What a test sets of SGLang's options.
MEMORY = {}


def load():
    """Makes SGLang importable, and publishes a configuration. Without its wheel, or what its hash of pages is compiled with, the module
    that calls this is skipped."""
    if not SOURCE.is_dir():
        pytest.skip(f"SGLang {RELEASE} is not at {SOURCE} (tests/setup.sh)", allow_module_level=True)
    if str(SOURCE) in sys.path:
        return
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # SGLang compiles its hash of pages at the first use: ninja is beside the interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # Before the fakes: it looks for some of the absent packages.
    from transformers import AutoModel, AutoProcessor, AutoTokenizer, PreTrainedModel  # noqa: F401

    sys.meta_path.append(_Finder())
    sys.path.insert(0, str(SOURCE))
    from sglang.srt import runtime_context

    names = ("disagg", "memory", "exec", "spec", "parallel", "sched", "model", "device", "observability", "serving")
    runtime_context._CONTEXT._config_bags = {name: _Bag() for name in names}
    from sglang.srt.mem_cache.cpp_utils.native_hash import get_native_hash

    try:
        get_native_hash([1], None)
    except RuntimeError as error:
        pytest.skip(f"{error}: SGLang compiles it with g++ and OpenSSL's headers", allow_module_level=True)
