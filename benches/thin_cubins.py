#!/usr/bin/env python3
"""Overwrites code for other GPUs in CUDA libraries with zeros, so that they compress well.

    benches/thin_cubins.py CAPABILITY LIBRARY...        CAPABILITY: 90 for Hopper

For machines without a network, to which vLLM is carried: its libraries have machine code for seven generations of GPUs. Libraries
are changed in place and stay loadable. PTX is kept where there is no machine code for the GPU. The format of NVIDIA's fat binaries
is not documented; this was found by looking at those of vLLM 0.24: a header of 16 bytes (magic, version, its length, length of what
follows), then entries with kind (1: PTX, 2: machine code), length of header and payload, and at 28 the capability.
"""

import mmap
import struct
import sys

MAGIC = struct.pack("<I", 0xBA55ED50)
PTX, MACHINE_CODE = 1, 2


def entries(library, start, end):
    """Yields (kind, capability, offset of the payload, its length) of each entry."""
    while start < end:
        kind, _, header, length = struct.unpack_from("<HHIQ", library, start)
        (capability,) = struct.unpack_from("<I", library, start + 28)
        yield kind, capability, start + header, length
        start += header + length


def thin(path, wanted):
    """Thins one library; returns (bytes kept, bytes overwritten)."""
    kept = overwritten = at = 0
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as library:
        while (at := library.find(MAGIC, at)) >= 0:
            _, version, header, length = struct.unpack_from("<IHHQ", library, at)
            end = at + header + length
            if (version, header) != (1, 16) or end > len(library):
                at += len(MAGIC)
                continue
            found = list(entries(library, at + header, end))
            has_code = any((kind, capability) == (MACHINE_CODE, wanted) for kind, capability, _, _ in found)
            for kind, capability, offset, size in found:
                if (kind == MACHINE_CODE and capability != wanted) or (kind == PTX and has_code):
                    library[offset : offset + size] = bytes(size)
                    overwritten += size
                else:
                    kept += size
            at = end
    return kept, overwritten


def main():
    """Runs the command line."""
    if len(sys.argv) < 3 or not sys.argv[1].isdigit():
        sys.exit(__doc__)
    for path in sys.argv[2:]:
        kept, overwritten = thin(path, int(sys.argv[1]))
        print(f"{path}: {kept >> 20} MiB kept, {overwritten >> 20} MiB overwritten")


if __name__ == "__main__":
    main()
