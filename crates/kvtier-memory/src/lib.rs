//! L1 bytes: arenas, extents, the allocator, copies and shared-memory segments.
