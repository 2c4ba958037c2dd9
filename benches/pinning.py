#!/usr/bin/env python3
"""What pinning host memory costs other calls of the driver in the same process.

    benches/pinning.py [--gib 8] [--out FILE]

One thread, or several, touch or pin fresh memory piece by piece, as the server does with L1, while another thread calls what a
registration and a transfer call: opening another process's memory and its event, asking the event, copying 1 MiB and waiting
for it. Prints, for each way of pinning, its rate and the median and the longest duration of each call. Needs an NVIDIA GPU and
its driver, nothing else.
"""

import argparse
import ctypes
import json
import mmap
import subprocess
import sys
import threading
import time
from pathlib import Path

PORTABLE_AND_MAPPED = 3
MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_POPULATE_WRITE = 14, 15, 23
MIB = 1 << 20
# What is done with the memory: touched before, way (threads, MiB of a piece, pause in ms), huge pages; pinned or only touched.
WAYS = {
    "nothing": None,
    "touch, 1 thread": dict(pin=False, threads=1, piece=0.5),
    "pin touched, 4 x 256 MiB": dict(touched=True, threads=4, piece=256),
    "pin touched, 1 x 256 MiB": dict(touched=True, threads=1, piece=256),
    "pin touched, 1 x 256 MiB, pause 2 ms": dict(touched=True, threads=1, piece=256, pause=0.002),
    # As the server does.
    "touch and pin, 1 x 256 MiB, rest": dict(touch=True, threads=1, piece=256, pause=None),
    "pin touched, 1 x 32 MiB": dict(touched=True, threads=1, piece=32),
    "pin touched, 1 x 32 MiB, pause 2 ms": dict(touched=True, threads=1, piece=32, pause=0.002),
    "pin touched, 4 x 32 MiB, pause 2 ms": dict(touched=True, threads=4, piece=32, pause=0.002),
    "pin untouched, 4 x 256 MiB": dict(threads=4, piece=256),
    "pin untouched, 1 x 256 MiB, pause 2 ms": dict(threads=1, piece=256, pause=0.002),
    "touch, 4 threads": dict(pin=False, threads=4, piece=0.5),
    "touch, 1 thread, huge pages": dict(pin=False, threads=1, piece=2, huge=True),
    "pin touched, 4 x 256 MiB, huge pages": dict(touched=True, threads=4, piece=256, huge=True),
    "pin touched, 1 x 256 MiB, pause 2 ms, huge pages": dict(touched=True, threads=1, piece=256, pause=0.002, huge=True),
}


class Driver:
    """The driver's calls, with this process's context."""

    def __init__(self):
        self.lib = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)
        self.context, device = ctypes.c_void_p(), ctypes.c_int()
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        self.enter()

    def __call__(self, function, *arguments):
        if code := getattr(self.lib, function)(*arguments):
            raise RuntimeError(f"{function} answered {code}")

    def enter(self):
        """Makes the context that of this thread."""
        self("cuCtxSetCurrent", self.context)


class Handle(ctypes.Structure):
    """Of memory or of an event."""

    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


def other_process():
    """Exports memory and an event until its input ends."""
    driver, memory, event = Driver(), ctypes.c_uint64(), ctypes.c_void_p()
    handles = Handle(), Handle()
    driver("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(64 * MIB))
    # Without timing, for other processes.
    driver("cuEventCreate", ctypes.byref(event), 6)
    driver("cuEventRecord", event, None)
    driver("cuIpcGetMemHandle", ctypes.byref(handles[0]), memory)
    driver("cuIpcGetEventHandle", ctypes.byref(handles[1]), event)
    print(" ".join(bytes(handle.bytes).hex() for handle in handles), flush=True)
    sys.stdin.read()


class Calls:
    """What a registration and a transfer call, and how long each takes."""

    def __init__(self, driver, handles):
        self.driver, self.handles = driver, [Handle((ctypes.c_ubyte * 64)(*bytes.fromhex(h))) for h in handles]
        driver.enter()
        self.stream, self.host, self.device = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
        driver("cuStreamCreate", ctypes.byref(self.stream), 1)
        driver("cuMemHostAlloc", ctypes.byref(self.host), ctypes.c_size_t(MIB), PORTABLE_AND_MAPPED)
        driver("cuMemAlloc_v2", ctypes.byref(self.device), ctypes.c_size_t(MIB))

    def memory(self):
        """Opens memory and closes it."""
        memory = ctypes.c_uint64()
        self.driver("cuIpcOpenMemHandle_v2", ctypes.byref(memory), self.handles[0], 1)
        self.driver("cuIpcCloseMemHandle", memory)

    def event(self):
        """Opens an event, asks it and closes it."""
        event = ctypes.c_void_p()
        self.driver("cuIpcOpenEventHandle", ctypes.byref(event), self.handles[1])
        # Complete or not.
        self.driver.lib.cuEventQuery(event)
        self.driver("cuEventDestroy_v2", event)

    def copy(self):
        """Copies and waits."""
        self.driver("cuMemcpyHtoDAsync_v2", self.device, self.host, ctypes.c_size_t(MIB), self.stream)
        self.driver("cuStreamSynchronize", self.stream)

    def until(self, done):
        """Calls in turn until `done` is set; returns durations in ms by name."""
        durations = {"memory": [], "event": [], "copy": []}
        while not all(durations.values()) or not done.is_set():
            for name, values in durations.items():
                began = time.monotonic()
                getattr(self, name)()
                values.append(1000 * (time.monotonic() - began))
                time.sleep(0.0005)
        return {name: [len(v), round(sorted(v)[len(v) // 2], 3), round(max(v), 1)] for name, v in durations.items()}


def run(driver, calls, size, pin=True, touched=False, touch=False, threads=1, piece=256.0, pause=0.0, huge=False):
    """One way; returns (GB/s, durations). Without a `pause` the thread rests as long as the piece took to pin."""
    libc = ctypes.CDLL(None, use_errno=True)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    step, lock, numbers, done = int(piece * MIB), threading.Lock(), iter(range(1 << 30)), threading.Event()

    def advise(address, length, advice):
        if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice):
            raise OSError(ctypes.get_errno(), f"madvise {advice}")

    def each(work, size_of_piece):
        def take():
            while True:
                with lock:
                    at = next(numbers) * size_of_piece
                if at >= size:
                    return
                length = min(size_of_piece, size - at)
                if touch:
                    populate(start + at, length)
                began = time.monotonic()
                work(start + at, length)
                time.sleep(time.monotonic() - began if pause is None else pause)

        return take

    def registered(address, length):
        driver.enter()
        driver("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(length), PORTABLE_AND_MAPPED)

    def populate(address, length):
        advise(address, length, MADV_POPULATE_WRITE)

    advise(start, size, MADV_HUGEPAGE if huge else MADV_NOHUGEPAGE)
    if touched:
        workers = [threading.Thread(target=populate, args=(start + n * size // 8, size // 8)) for n in range(8)]
        [worker.start() for worker in workers]
        [worker.join() for worker in workers]
    result = []
    sampler = threading.Thread(target=lambda: (driver.enter(), result.append(calls.until(done))))
    sampler.start()
    work = each(registered if pin else populate, step)
    workers = [threading.Thread(target=work) for _ in range(threads)]
    began = time.monotonic()
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    seconds = time.monotonic() - began
    done.set()
    sampler.join()
    if pin:
        for at in range(0, size, step):
            driver("cuMemHostUnregister", ctypes.c_void_p(start + at))
    del start
    return round(size / seconds / 1e9, 2), result[0]


def main():
    """Runs the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--out", metavar="FILE", help="where results go, as JSON")
    parser.add_argument("--other", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.other:
        return other_process()
    size = int(arguments.gib * 1024) * MIB
    driver = Driver()
    other = subprocess.Popen([sys.executable, __file__, "--other"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        calls = Calls(driver, other.stdout.readline().split())
        results = {}
        print(f"{'way':<50} {'GB/s':>6}   calls, median and longest ms: memory, event, copy", flush=True)
        for name, way in WAYS.items():
            if way is None:
                done = threading.Event()
                threading.Timer(1.0, done.set).start()
                results[name] = (0, calls.until(done))
            else:
                results[name] = run(driver, calls, size, **way)
            rate, durations = results[name]
            print(f"{name:<50} {rate:>6}   " + ", ".join(str(value) for value in durations.values()), flush=True)
    finally:
        other.stdin.close()
        other.wait()
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
