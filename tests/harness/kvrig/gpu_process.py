"""The GPU of a simulated engine: a process with device memory and events, and nothing else.

    python gpu_process.py LIBRARY

LIBRARY is a CUDA driver library, here the fake driver. It is a process of its own because a process cannot open its own
handles, because it can be killed, and because then no test meets the memory of another. It reads calls of `Gpu` from
stdin and writes their results to stdout, pickled. Needs the standard library only.
"""

import ctypes
import mmap
import pickle
import sys

# Of cuEventCreate, as PyTorch makes events for other processes.
DISABLE_TIMING, INTERPROCESS = 2, 4

NOT_READY = 600


class Handle(ctypes.Structure):
    """A handle as it is passed by value."""

    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


class Gpu:
    """One GPU as an engine uses it: one context, one stream. Addresses, streams and events are plain numbers."""

    def __init__(self, library):
        self.driver = ctypes.CDLL(library)
        self.driver.fake_driver_count.restype = ctypes.c_uint64
        self.driver.fake_driver_violations.restype = ctypes.c_uint64
        self.call("cuInit", 0)
        self.call("cuCtxSetCurrent", ctypes.c_uint64(self.made("cuDevicePrimaryCtxRetain", 0)))
        self.stream = ctypes.c_uint64(self.made("cuStreamCreate", 1))
        self.allocations, self.events = set(), set()
        self.mapped = []

    def call(self, name, *args):
        """Call a driver function; anything but success is an error."""
        code = getattr(self.driver, name)(*args)
        if code != 0:
            raise RuntimeError(f"{name} answered {code}: {self.violations()}")

    def made(self, name, *args):
        """Call a driver function that makes something."""
        out = ctypes.c_uint64()
        self.call(name, ctypes.byref(out), *args)
        return out.value

    def bytes_of(self, name, count, *args):
        """Call a driver function that fills `count` bytes."""
        out = (ctypes.c_ubyte * count)()
        self.call(name, out, *args)
        return bytes(out)

    def map_file(self, path):
        """Map a file for as long as the process lives, as PyTorch does its reference counters."""
        with open(path, "r+b") as file:
            self.mapped.append(mmap.mmap(file.fileno(), 0))

    def uuid(self):
        """The device's UUID as PyTorch writes it."""
        digits = self.bytes_of("cuDeviceGetUuid_v2", 16, 0).hex()
        return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

    # -- memory ------------------------------------------------------------------------------

    def allocate(self, count):
        """Address of `count` new bytes, all zero."""
        at = self.made("cuMemAlloc_v2", ctypes.c_size_t(count))
        self.allocations.add(at)
        return at

    def write(self, at, data):
        """Copy bytes to the device."""
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(at), data, ctypes.c_size_t(len(data)))

    def read(self, at, count):
        """Copy bytes from the device."""
        out = ctypes.create_string_buffer(count)
        self.call("cuMemcpyDtoH_v2", out, ctypes.c_uint64(at), ctypes.c_size_t(count))
        return out.raw

    def memory_handle(self, at):
        """The 64 bytes by which others open the allocation at `at`."""
        return self.bytes_of("cuIpcGetMemHandle", 64, ctypes.c_uint64(at))

    # -- work on the stream ------------------------------------------------------------------

    def fill(self, at, value, count):
        """Have the stream set bytes, as a kernel of the model would."""
        self.call("cuMemsetD8Async", ctypes.c_uint64(at), ctypes.c_ubyte(value), ctypes.c_size_t(count), self.stream)

    def create_event(self):
        """An event for other processes."""
        event = self.made("cuEventCreate", DISABLE_TIMING | INTERPROCESS)
        self.events.add(event)
        return event

    def record_event(self, event):
        """Record an event behind what is on the stream."""
        self.call("cuEventRecord", ctypes.c_uint64(event), self.stream)

    def event_handle(self, event):
        """The 64 bytes by which others open an event."""
        return self.bytes_of("cuIpcGetEventHandle", 64, ctypes.c_uint64(event))

    def open_event(self, handle):
        """Another process's event by its 64 bytes."""
        event = self.made("cuIpcOpenEventHandle", Handle.from_buffer_copy(handle))
        self.events.add(event)
        return event

    def is_complete(self, event):
        """Whether what an event was recorded behind is done."""
        code = self.driver.cuEventQuery(ctypes.c_uint64(event))
        if code not in (0, NOT_READY):
            raise RuntimeError(f"cuEventQuery answered {code}: {self.violations()}")
        return code == 0

    def signal(self, at, value):
        """Have the stream write a 64-bit number, behind what is on it."""
        self.call("cuStreamWriteValue64_v2", self.stream, ctypes.c_uint64(at), ctypes.c_uint64(value), ctypes.c_uint(1))

    # -- the fake driver ------------------------------------------------------------------------

    def count(self, name):
        """What the fake driver counted in this process, as its documentation says."""
        return self.driver.fake_driver_count(name.encode())

    def script(self, text):
        """Tell the fake driver what to pretend in this process."""
        assert self.driver.fake_driver_script(text.encode()) == 0, text

    def violations(self):
        """What no correct caller does and this process did, one a line."""
        out = ctypes.create_string_buffer(1 << 16)
        self.driver.fake_driver_violations(out, ctypes.c_size_t(len(out)))
        return out.value.decode()

    def finish(self):
        """Release everything, as an engine that ends does. Returns the violations."""
        self.call("cuStreamSynchronize", self.stream)
        for event in self.events:
            self.call("cuEventDestroy_v2", ctypes.c_uint64(event))
        for at in self.allocations:
            self.call("cuMemFree_v2", ctypes.c_uint64(at))
        self.call("cuStreamDestroy_v2", self.stream)
        self.call("cuDevicePrimaryCtxRelease_v2", 0)
        return self.violations()


def main():
    """Serve calls until stdin ends."""
    gpu = None
    while True:
        try:
            name, args = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            if name == "open":
                gpu = Gpu(*args)
                answer = (True, None)
            else:
                answer = (True, getattr(gpu, name)(*args))
        except Exception as error:  # noqa: BLE001  it is raised where the call came from
            answer = (False, f"{name}: {error!r}")
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
