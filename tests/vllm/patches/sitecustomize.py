"""Loaded by every Python process of an engine: what of vLLM on CPUs is changed for a test, as `RIG_PATCHES` says."""

import importlib.util
import os
import sys
import time


def few_cores():
    """Workers wait for each other by yielding in a loop.

    With as few cores as workers that keeps everything else from running, for seconds at a time with some kernels; a nap
    as short as this changes nothing else.
    """
    os.sched_yield = lambda: time.sleep(0.0001)


def own_prefixes(module):
    """vLLM's own prefix cache for latent attention, which it turns off on CPUs without AMX.

    What follows a hit is computed there all the same, when the hit is a connector's. So it can be compared with this.
    """
    checked = module.CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config):
        checked(cls, vllm_config)
        vllm_config.cache_config.enable_prefix_caching = True

    module.CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def stages(module):
    """Tensors for what comes from the stage before, which vLLM makes when it warms up for GPUs, and on CPUs never."""
    runner = module.GPUModelRunner
    gathered = runner.sync_and_gather_intermediate_tensors

    def sync_and_gather_intermediate_tensors(self, *args, **options):
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return gathered(self, *args, **options)

    runner.sync_and_gather_intermediate_tensors = sync_and_gather_intermediate_tensors


class Finder:
    """Has modules changed when they have been imported, and finds nothing itself."""

    def __init__(self, patches):
        self.patches = patches

    def find_spec(self, name, path=None, target=None):
        """The module's own specification, with a patch behind its execution."""
        patch = self.patches.pop(name, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


wanted = os.environ["RIG_PATCHES"].split(",")
if "few_cores" in wanted:
    few_cores()
modules = {"own_prefixes": ("vllm.platforms.cpu", own_prefixes), "stages": ("vllm.v1.worker.gpu_model_runner", stages)}
sys.meta_path.insert(0, Finder(dict(modules[name] for name in wanted if name in modules)))
