//! LMCache's types that kvtier lacks, and their alternatives.
//!
//! Registered types are found before these.

const ON_DISK: &str = "keep objects on a disk by \"fs\"";
const SAME_DEVICE: &str =
    "put a file system on the device and use \"fs\" with \"use_odirect\": true";
const IN_RUST: &str = "write the adapter in Rust and register it (kvtier_l2::Registry::add)";
const SHARED: &str = "give all servers one network file system by \"fs\" with \"shared\": true";

const ABSENT: &[(&str, &str)] = &[
    ("aerospike", ON_DISK),
    ("bigtable", ON_DISK),
    ("dax", SAME_DEVICE),
    (
        "hf3fs",
        "use \"fs\" with \"base_path\" below the mount point",
    ),
    ("hfbucket", ON_DISK),
    ("mooncake_store", SHARED),
    ("native_plugin", IN_RUST),
    ("p2p", SHARED),
    ("plugin", IN_RUST),
    ("sagemaker-hyperpod", ON_DISK),
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
