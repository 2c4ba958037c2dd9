// Copies runs of bytes between pinned host memory and a GPU's memory, in either direction: an item
// says where its bytes are on both sides, a tile which of them one warp moves. One entry point for
// each unit of 16, 8, 4, 2 and 1 bytes; every address and stride is a multiple of the unit.
//
// Threads share nothing and never wait, so the order of blocks, warps and lanes is free, and
// kvcopy_host.cpp can run this very file one thread after the other. ../kernel.rs makes the items
// and tiles; a block is whole warps, at most 512 threads.

typedef unsigned int u32;
typedef unsigned long long u64;

// The layout of `Item` and `Tile` in ../kernel.rs. A multiple of 16, so that they are read 16 bytes at a time.
struct alignas(16) Item {
    u64 src, dst;                       // addresses of the first unit
    u64 src_stride[3], dst_stride[3];   // bytes a step of each loop, outermost first
    u32 count[3];                       // steps of each loop
    u32 run_units;                      // units that adjoin on both sides
    u32 step[3];                        // LANES units, as steps of the loops
    u32 run_step;                       // and the units of a run left over
};
struct alignas(16) Tile {
    u32 item, first_unit, units;
    u32 straight;                       // not 0: all of it is in one run
};
static_assert(sizeof(Item) == 96 && sizeof(Tile) == 16, "the layout of ../kernel.rs");

// Neighbouring lanes move neighbouring units; each has this many on their way.
enum { LANES = 32, UNROLL = 4 };

// Where a lane is in an item: steps of the inner loops, units of the run, and both addresses. The
// outermost step is not counted, because a tile ends where its item does or before.
struct Place {
    u64 src, dst;
    u32 middle, inner, run;
};

template <typename Unit>
__device__ __forceinline__ Place place_of(const Item& item, u32 unit) {
    Place at;
    at.run = unit % item.run_units;
    u32 runs = unit / item.run_units;
    at.inner = runs % item.count[2];
    runs /= item.count[2];
    at.middle = runs % item.count[1];
    const u64 outer = runs / item.count[1];
    at.src = item.src + outer * item.src_stride[0] + at.middle * item.src_stride[1] +
             at.inner * item.src_stride[2] + at.run * (u64)sizeof(Unit);
    at.dst = item.dst + outer * item.dst_stride[0] + at.middle * item.dst_stride[1] +
             at.inner * item.dst_stride[2] + at.run * (u64)sizeof(Unit);
    return at;
}

// Steps by LANES units without a division: adds their digits and carries, at most one each.
// Addresses wrap around while they carry and are right in the end.
template <typename Unit>
struct Odometer {
    u32 middle_count, inner_count, run_units;
    u32 middle_step, inner_step, run_step;
    u64 src_step, src_run_carry, src_inner_carry, src_middle_carry;
    u64 dst_step, dst_run_carry, dst_inner_carry, dst_middle_carry;

    __device__ __forceinline__ explicit Odometer(const Item& item) {
        const u64 run = item.run_units * (u64)sizeof(Unit), left = item.run_step * (u64)sizeof(Unit);
        middle_count = item.count[1], inner_count = item.count[2], run_units = item.run_units;
        middle_step = item.step[1], inner_step = item.step[2], run_step = item.run_step;
        src_step = item.step[0] * item.src_stride[0] + middle_step * item.src_stride[1] +
                   inner_step * item.src_stride[2] + left;
        dst_step = item.step[0] * item.dst_stride[0] + middle_step * item.dst_stride[1] +
                   inner_step * item.dst_stride[2] + left;
        src_run_carry = item.src_stride[2] - run;
        dst_run_carry = item.dst_stride[2] - run;
        src_inner_carry = item.src_stride[1] - inner_count * item.src_stride[2];
        dst_inner_carry = item.dst_stride[1] - inner_count * item.dst_stride[2];
        src_middle_carry = item.src_stride[0] - middle_count * item.src_stride[1];
        dst_middle_carry = item.dst_stride[0] - middle_count * item.dst_stride[1];
    }

    __device__ __forceinline__ void operator()(Place& at) const {
        at.src += src_step;
        at.dst += dst_step;
        at.run += run_step;
        at.inner += inner_step;
        at.middle += middle_step;
        if (at.run >= run_units) {
            at.run -= run_units;
            at.inner += 1;
            at.src += src_run_carry;
            at.dst += dst_run_carry;
        }
        if (at.inner >= inner_count) {
            at.inner -= inner_count;
            at.middle += 1;
            at.src += src_inner_carry;
            at.dst += dst_inner_carry;
        }
        if (at.middle >= middle_count) {
            at.middle -= middle_count;
            at.src += src_middle_carry;
            at.dst += dst_middle_carry;
        }
    }
};

// The step inside one run.
template <typename Unit>
struct Straight {
    __device__ __forceinline__ void operator()(Place& at) const {
        at.src += LANES * sizeof(Unit);
        at.dst += LANES * sizeof(Unit);
    }
};

// Every LANES-th unit from `lane` to below `units`, UNROLL loads before their stores. Each byte is
// used once, so it should not push anything of the model's out of the caches.
template <typename Unit, typename Step>
__device__ __forceinline__ void move(Place at, u32 lane, u32 units, const Step& step) {
    for (u32 first = lane; first < units; first += UNROLL * LANES) {
        Unit value[UNROLL];
        u64 dst[UNROLL];
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i) {
            if (first + i * LANES < units) {
                value[i] = __ldcs((const Unit*)at.src);
            }
            dst[i] = at.dst;
            step(at);
        }
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i) {
            if (first + i * LANES < units) {
                __stcs((Unit*)dst[i], value[i]);
            }
        }
    }
}

// Items and tiles lie in pinned memory of the host. A warp reads each tile and its item once, all lanes the same
// address, 112 bytes in seven reads: as much as an upload before each launch would carry, without the launch waiting for
// it. The two waits, for the tile and then for its item, are 2 to 4 us in which other warps keep the link busy: with 256 of
// them it stays full down to tiles of about 1 KiB, which copies of so few bytes alone have.
template <typename Unit>
__device__ __forceinline__ void copy(const Item* items, const Tile* tiles, u32 n_tiles) {
    const u32 lane = threadIdx.x % LANES;
    const u32 warps = gridDim.x * (blockDim.x / LANES);
    const u32 warp = blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
    for (u32 index = warp; index < n_tiles; index += warps) {
        const Tile tile = tiles[index];
        const Item item = items[tile.item];
        if (lane >= tile.units) {
            continue;
        }
        const Place at = place_of<Unit>(item, tile.first_unit + lane);
        if (tile.straight) {
            move<Unit>(at, lane, tile.units, Straight<Unit>());
        } else {
            move<Unit>(at, lane, tile.units, Odometer<Unit>(item));
        }
    }
}

#define KVCOPY(UNIT, TYPE)                                                                  \
    extern "C" __global__ void __launch_bounds__(512, 2)                                      \
        kvcopy_##UNIT(const Item* items, const Tile* tiles, u32 n_tiles) {                  \
        copy<TYPE>(items, tiles, n_tiles);                                                  \
    }

KVCOPY(16, uint4)
KVCOPY(8, uint2)
KVCOPY(4, u32)
KVCOPY(2, unsigned short)
KVCOPY(1, unsigned char)
