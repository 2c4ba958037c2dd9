"""Simulated engines whose KV cache PyTorch's CUDA build has on the fake CUDA driver, for the processes of `torch_cuda`.

Tensors, handles and events are PyTorch's, so nothing of any LMCache release is replaced.
"""

from .engine import Engine, Worker
from .torch_cuda import OnGpu


class TorchWorker(Worker):
    """An engine rank whose tensors are on a GPU; those of `Worker` are their mirror in host memory."""

    def __init__(self, *args):
        super().__init__(*args)
        self.gpu = OnGpu([tensor for tensor, _ in self.layers])

    def tensors(self):
        """The tensors on the GPU."""
        return self.gpu.tensors

    def read(self, blocks, group=None):
        """As in host memory, from the device."""
        self.gpu.pull()
        return super().read(blocks, group)

    def write(self, blocks, rows, group=None):
        """As in host memory, on the device."""
        self.gpu.pull()
        super().write(blocks, rows, group)
        self.gpu.push()

    def fill(self, blocks, value=0, group=None):
        """As in host memory, on the device."""
        self.gpu.pull()
        super().fill(blocks, value, group)
        self.gpu.push()


class TorchEngine(Engine):
    """An engine with its KV caches on GPUs."""

    def make_worker(self, rank, generator):
        """A rank on a GPU."""
        return TorchWorker(self, rank, generator)
