//! LMCache's types that kvtier lacks, and their alternatives.
//!
//! Registered types are found before these.

const SAME_DEVICE: &str = "use \"raw_block\" on the device";
const OWN: &str = "write it as a program of its own and use \"process\": docs/tier-protocol.md, in Python kvtier.tier.Tier";
const OWN_OR_DISK: &str = "serve it by a program of your own and \"process\" (docs/tier-protocol.md), or keep objects on a disk by \"fs\"";
const MOONCAKE: &str = "run kvtier.tier.mooncake of the Python package and use \"process\" with its socket (docs/l2.md)";
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
    ("mooncake_store", MOONCAKE),
    ("native_plugin", OWN),
    ("p2p", SHARED),
    ("plugin", OWN),
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
