// kvcopy.cu for a processor: its threads run one after the other. For tests on machines without a
// GPU; compiled by a test-only library.

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct alignas(8) uint2 {
    unsigned int x, y;
};
struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};

namespace {
struct Index {
    unsigned int x;
};
thread_local Index threadIdx, blockIdx, blockDim, gridDim;
// Bytes stored in this launch, to show that no unit is moved twice.
thread_local long long moved;

// A GPU faults on such an access; many processors do not.
template <typename T>
T* aligned(T* address) {
    if (reinterpret_cast<std::uintptr_t>(address) % sizeof(T) != 0) {
        std::fprintf(stderr, "kvcopy: %p is no multiple of %zu\n", (void*)address, sizeof(T));
        std::abort();
    }
    return address;
}
template <typename T>
T __ldcs(const T* from) {
    return *aligned(from);
}
template <typename T>
void __stcs(T* to, T value) {
    *aligned(to) = value;
    moved += sizeof(T);
}
}  // namespace

#include "kvcopy.cu"

namespace {
long long launch(void (*kernel)(const Item*, const Tile*, u32), u32 grid, u32 block,
                 const void* items, const void* tiles, u32 n_tiles) {
    moved = 0;
    gridDim.x = grid;
    blockDim.x = block;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
        for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) {
            kernel((const Item*)items, (const Tile*)tiles, n_tiles);
        }
    }
    return moved;
}
}  // namespace

// Runs kvcopy_<unit> as `grid` blocks of `block` threads and gives the bytes moved; -1 when there
// is no such kernel.
extern "C" long long kvcopy_launch_host(int unit, unsigned int grid, unsigned int block,
                                        const void* items, const void* tiles,
                                        unsigned int n_tiles) {
    switch (unit) {
        case 16: return launch(kvcopy_16, grid, block, items, tiles, n_tiles);
        case 8: return launch(kvcopy_8, grid, block, items, tiles, n_tiles);
        case 4: return launch(kvcopy_4, grid, block, items, tiles, n_tiles);
        case 2: return launch(kvcopy_2, grid, block, items, tiles, n_tiles);
        case 1: return launch(kvcopy_1, grid, block, items, tiles, n_tiles);
        default: return -1;
    }
}
