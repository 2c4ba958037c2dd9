//! Every decision of the cache, without input or output: keys, hashes, index, leases, eviction.
