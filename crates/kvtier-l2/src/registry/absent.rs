//! LMCache's types that kvtier lacks, and their alternatives.
//!
//! Registered types are found before these.

const SAME_DEVICE: &str =
    "put a file system on the device and use \"fs\" with \"use_odirect\": true";
const OWN: &str = "write it as a program of its own and use \"process\": docs/tier-protocol.md, in Python kvtier.tier.Tier";
const OWN_OR_DISK: &str = "serve it by a program of your own and \"process\" (docs/tier-protocol.md), or keep objects on a disk by \"fs\"";
const OWN_OR_SHARED: &str = "serve it by a program of your own and \"process\" (docs/tier-protocol.md), or give all servers one \
     network file system by \"fs\" with \"shared\": true";
const SHARED: &str = "give all servers one network file system by \"fs\" with \"shared\": true";

const ABSENT: &[(&str, &str)] = &[
    ("aerospike", OWN_OR_DISK),
    ("bigtable", OWN_OR_DISK),
    ("dax", SAME_DEVICE),
    (
        "hf3fs",
        "use \"fs\" with \"base_path\" below the mount point",
    ),
    ("hfbucket", OWN_OR_DISK),
    ("mooncake_store", OWN_OR_SHARED),
    ("native_plugin", OWN),
    (
        "nixl_native",
        "use \"fs\" on the same directory with \"use_odirect\": true",
    ),
    (
        "nixl_store",
        "use \"fs\" on the same file system with \"use_odirect\": true",
    ),
    (
        "nixl_store_dynamic",
        "use \"fs\" on the same file system with \"use_odirect\": true",
    ),
    ("p2p", SHARED),
    ("plugin", OWN),
    ("raw_block", SAME_DEVICE),
    ("sagemaker-hyperpod", OWN_OR_DISK),
];

/// Returns the alternative to `name` if that is a type of LMCache.
pub(super) fn alternative_to(name: &str) -> Option<&'static str> {
    let found = ABSENT.iter().find(|(absent, _)| *absent == name)?;
    Some(found.1)
}

#[cfg(test)]
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    ABSENT.iter().map(|(name, _)| *name)
}
