//! How a key is written as a name, and a name read as a key.

use kvtier_core::hashing::ChunkHash;
use kvtier_core::object_key::{KeyShape, ObjectKey};

/// Extension of [`Naming::Nixl`].
const NIXL_EXTENSION: &str = ".bin";

/// Text for `/` in the model of a name.
const SLASH: &str = "-SEP-";
const NIXL_SLASH: &str = "--";

/// Names of the files of objects: which program finds them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Naming {
    /// `model@0x02010201@0@hash[@salt].data`: `fs` and `nixl_native` of LMCache 0.5.
    #[default]
    Grouped,
    /// `model@0x02010201@hash[@salt].data`: `fs` of LMCache 0.4. Keys of other groups than 0 are written grouped.
    Ungrouped,
    /// `model_02010201_0_hash[@salt].bin`: `nixl_store_dynamic` of LMCache.
    Nixl,
}

impl Naming {
    /// All of them.
    pub(super) const ALL: [Self; 3] = [Self::Grouped, Self::Ungrouped, Self::Nixl];

    /// Returns the naming of other releases of the same adapter, whose files are read too.
    pub(super) fn other(self) -> Option<Self> {
        match self {
            Self::Grouped => Some(Self::Ungrouped),
            Self::Ungrouped => Some(Self::Grouped),
            Self::Nixl => None,
        }
    }

    /// Whether this model's names read back as those of another model. The other fields of a key always read back.
    pub(super) fn is_ambiguous(self, model: &str) -> bool {
        let slash = match self {
            Self::Grouped | Self::Ungrouped => SLASH,
            Self::Nixl => NIXL_SLASH,
        };
        // Without a hyphen in the model, all hyphens are those of slashes.
        model.contains('-') && model.replace('/', slash).replace(slash, "/") != model
    }

    /// Writes a key as a name, which is that of other keys too if its model [is ambiguous](Self::is_ambiguous).
    pub(super) fn write(self, key: &ObjectKey) -> String {
        match self {
            Self::Grouped => key.text().file_name(KeyShape::Grouped),
            Self::Ungrouped => key.text().file_name(KeyShape::Ungrouped),
            Self::Nixl => nixl_name(key),
        }
    }

    /// Reads a name as a key, leniently: the key may be written as another name.
    pub(super) fn read(self, name: &str) -> Option<ObjectKey> {
        let shape = match self {
            Self::Grouped => KeyShape::Grouped,
            // Names of other groups than 0 are grouped.
            Self::Ungrouped => return ObjectKey::parse_file_name(name, None).ok(),
            Self::Nixl => return nixl_key(name),
        };
        ObjectKey::parse_file_name(name, Some(shape)).ok()
    }
}

/// Returns the name of a key's file in a directory of LMCache's `nixl_store_dynamic`.
fn nixl_name(key: &ObjectKey) -> String {
    let model = key.model_name().replace('/', NIXL_SLASH);
    let (rank, group) = (key.kv_rank(), key.object_group_id());
    let hash = key.chunk_hash();
    let salt = match &**key.cache_salt() {
        "" => String::new(),
        salt => format!("@{salt}"),
    };
    format!("{model}_{rank:08x}_{group:x}_{hash}{salt}{NIXL_EXTENSION}")
}

/// Reads [`nixl_name`] back. A model name may have `_` in it; the fields behind it have none, and only salts have `@`.
fn nixl_key(name: &str) -> Option<ObjectKey> {
    let name = name.strip_suffix(NIXL_EXTENSION)?;
    let (name, salt) = match name.split_once('@') {
        Some((name, salt)) => (name, salt),
        None => (name, ""),
    };
    let mut fields = name.rsplitn(4, '_');
    let hash: ChunkHash = fields.next()?.parse().ok()?;
    let group = u32::from_str_radix(fields.next()?, 16).ok()?;
    let rank = u64::from_str_radix(fields.next()?, 16).ok()?;
    let model = fields.next()?.replace(NIXL_SLASH, "/");
    ObjectKey::new(hash, model, rank, group, salt).ok()
}
