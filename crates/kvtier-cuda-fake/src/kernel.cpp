// The copy kernel on the processor, and what a GPU would find wrong before it runs: addresses that are not there or do
// not fit their unit.

#include "kvcopy_host.cpp"

#include <vector>

extern "C" unsigned long long standin_item_bytes() { return sizeof(Item); }
extern "C" unsigned long long standin_tile_bytes() { return sizeof(Tile); }

extern "C" unsigned long long standin_items(const void* tiles, unsigned int n_tiles) {
    unsigned long long n = 0;
    for (unsigned int i = 0; i < n_tiles; ++i) {
        const unsigned long long item = ((const Tile*)tiles)[i].item;
        n = item + 1 > n ? item + 1 : n;
    }
    return n;
}

namespace {
typedef unsigned long long (*Resolve)(void* to, unsigned long long address, unsigned long long bytes);
typedef unsigned __int128 wide;
const int ILLEGAL_ADDRESS = 700, MISALIGNED_ADDRESS = 716;

int side(u64& address, const u64* stride, const Item& item, u32 unit, Resolve resolve, void* to) {
    wide bytes = (wide)item.run_units * unit;
    u64 all = address;
    for (int i = 0; i < 3; ++i) {
        bytes += (wide)(item.count[i] - 1) * stride[i];
        // The stride of a loop of one step is never used.
        all |= item.count[i] > 1 ? stride[i] : 0;
    }
    if (all % unit != 0) {
        return MISALIGNED_ADDRESS;
    }
    if (bytes >> 63) {
        return ILLEGAL_ADDRESS;
    }
    address = resolve(to, address, (u64)bytes);
    return address == 0 ? ILLEGAL_ADDRESS : 0;
}
}  // namespace

extern "C" int standin_translate(void* items, const void* tiles, unsigned int n_tiles, unsigned int unit,
                                 Resolve resolve, void* to) {
    std::vector<bool> done(standin_items(tiles, n_tiles));
    for (unsigned int i = 0; i < n_tiles; ++i) {
        const Tile& tile = ((const Tile*)tiles)[i];
        Item& item = ((Item*)items)[tile.item];
        const wide units = (wide)item.count[0] * item.count[1] * item.count[2] * item.run_units;
        if (units == 0 || (wide)tile.first_unit + tile.units > units) {
            return ILLEGAL_ADDRESS;
        }
        if (done[tile.item]) {
            continue;
        }
        done[tile.item] = true;
        if (int code = side(item.src, item.src_stride, item, unit, resolve, to)) {
            return code;
        }
        if (int code = side(item.dst, item.dst_stride, item, unit, resolve, to)) {
            return code;
        }
    }
    return 0;
}
