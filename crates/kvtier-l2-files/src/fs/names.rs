//! Names of files and the keys of their objects.
//!
//! Names are those of an adapter of LMCache: see [`Naming`]. If a name would be too long for a file system, or
//! does not read back as its key, the file is named by [`HASHED`] and the hash of its key, and the key is stored in the
//! file. So no two keys share a name.

use kvtier_core::object_key::{KeyShape, ObjectKey};

use super::naming::Naming;
use kvtier_l2::ObjectSpec;

/// First character of a name that is a hash.
const HASHED: char = '#';

/// Prefix of temporary files.
pub(super) const TEMPORARY: &str = ".kvtier-tmp-";

/// Directory of damaged files.
pub(super) const QUARANTINE: &str = ".quarantine";

const EXTENSION: &str = ".data";

/// Longest name in Linux file systems, in bytes.
const NAME_MAX: usize = 255;

/// Layout of the directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Layout {
    /// All in one directory, where LMCache looks for them.
    #[default]
    Flat,
    /// In 65536 directories, by the first bytes of the chunk's hash: `ab/cd/`.
    Sharded,
}

/// Place of an object's file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FilePlace {
    /// Path relative to the base directory.
    pub path: String,
    /// Text of the key if the name is a hash.
    pub text: Option<String>,
    pub naming: Naming,
    pub layout: Layout,
}

impl FilePlace {
    pub(super) fn text_len(&self) -> usize {
        self.text.as_ref().map_or(0, String::len)
    }

    /// Returns the digest in the trailer of an object there.
    pub(super) fn digest(&self, object: &ObjectSpec) -> u128 {
        match &self.text {
            Some(text) => kvtier_memory::checksum::checksum128(text.as_bytes()),
            None => kvtier_l2::key_digest(&object.key),
        }
    }

    pub(super) fn of(key: &ObjectKey, naming: Naming, layout: Layout) -> Self {
        let (name, text) = name(key, naming);
        let path = match layout {
            Layout::Flat => name,
            Layout::Sharded => format!("{}/{name}", shard_path(shard(key))),
        };
        Self {
            path,
            text,
            naming,
            layout,
        }
    }
}

/// Returns the text of a key in digests and files.
pub(super) fn key_text(key: &ObjectKey) -> String {
    key.text().name(KeyShape::Grouped)
}

/// Returns the name of a key's file, and the key's text if the name is a hash.
fn name(key: &ObjectKey, naming: Naming) -> (String, Option<String>) {
    let name = naming.write(key);
    // A zero byte ends a name.
    let is_odd = name.len() > NAME_MAX
        || naming.is_ambiguous(key.model_name())
        || name.contains('\0')
        || name.starts_with(TEMPORARY);
    if !is_odd {
        return (name, None);
    }
    let text = key_text(key);
    (hashed_name(&text), Some(text))
}

pub(super) fn hashed_name(text: &str) -> String {
    let hash = blake3::hash(text.as_bytes());
    format!("{HASHED}{}{EXTENSION}", hash.to_hex())
}

impl Layout {
    /// Returns the other layout.
    pub(super) fn other(self) -> Self {
        match self {
            Self::Flat => Self::Sharded,
            Self::Sharded => Self::Flat,
        }
    }

    /// Returns the layout's name in a configuration.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Flat => "flat",
            Self::Sharded => "sharded",
        }
    }
}

/// Returns the number of the directory of a key's file.
pub(super) fn shard(key: &ObjectKey) -> u16 {
    let hash = key.chunk_hash();
    u16::from_be_bytes([hash.0[0], hash.0[1]])
}

/// Returns the path of the directory with this number.
pub(super) fn shard_path(shard: u16) -> String {
    format!("{:02x}/{:02x}", shard >> 8, shard & 0xff)
}

/// Whether it is the first part of a [`shard_path`].
pub(super) fn is_shard_dir(name: &str) -> bool {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    name.len() == 2 && name.bytes().all(is_digit)
}

/// Kind of a directory entry by its name.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NamedFile {
    /// An object; only names that kvtier would write are accepted.
    Object(Box<ObjectKey>, Naming),
    /// An object whose key is in its file.
    Hashed,
    /// A temporary file or a leftover.
    Temporary,
    /// Not kvtier's.
    Foreign,
}

pub(super) fn parse(file_name: &str) -> NamedFile {
    if file_name.starts_with(TEMPORARY) {
        return NamedFile::Temporary;
    }
    if let Some(hash) = file_name.strip_prefix(HASHED) {
        let is_hash = |hash: &str| hash.len() == 64 && hash.bytes().all(|b| b.is_ascii_hexdigit());
        if hash.strip_suffix(EXTENSION).is_some_and(is_hash) {
            return NamedFile::Hashed;
        }
    }
    for naming in Naming::ALL {
        if let Some(key) = naming.read(file_name)
            && name(&key, naming).0 == file_name
        {
            return NamedFile::Object(Box::new(key), naming);
        }
    }
    NamedFile::Foreign
}

#[cfg(test)]
mod tests {
    use kvtier_core::hashing::ChunkHash;

    use super::*;

    fn key(model: &str, group: u32, salt: &str) -> ObjectKey {
        ObjectKey::new(ChunkHash([0xab; 32]), model, 0x0102_0102, group, salt).unwrap()
    }

    #[test]
    fn names_read_back_in_both_shapes() {
        let hash = "ab".repeat(32);
        for (shape, group, salt, expected) in [
            (
                Naming::Grouped,
                0,
                "",
                format!("m-SEP-x@0x01020102@0@{hash}.data"),
            ),
            (
                Naming::Grouped,
                18,
                "s",
                format!("m-SEP-x@0x01020102@12@{hash}@s.data"),
            ),
            (
                Naming::Ungrouped,
                0,
                "s",
                format!("m-SEP-x@0x01020102@{hash}@s.data"),
            ),
        ] {
            let key = key("m/x", group, salt);
            let place = FilePlace::of(&key, shape, Layout::Flat);
            assert_eq!(
                (place.path.as_str(), &place.text),
                (expected.as_str(), &None)
            );
            assert_eq!(
                parse(&expected),
                NamedFile::Object(Box::new(key.clone()), shape)
            );
            let sharded = FilePlace::of(&key, shape, Layout::Sharded);
            assert_eq!(sharded.path, format!("ab/ab/{expected}"));
        }
    }

    #[test]
    fn nixl_names_are_lmcaches() {
        let hash = "ab".repeat(32);
        let (naming, org) = (Naming::Nixl, "org/tiny_Model-1_0");
        for (group, salt, expected) in [
            (0, "", format!("org--tiny_Model-1_0_01020102_0_{hash}.bin")),
            (
                18,
                "a_b.bin",
                format!("org--tiny_Model-1_0_01020102_12_{hash}@a_b.bin.bin"),
            ),
        ] {
            let key = key(org, group, salt);
            let place = FilePlace::of(&key, naming, Layout::Sharded);
            assert_eq!(
                (place.path, place.text),
                (format!("ab/ab/{expected}"), None)
            );
            assert_eq!(parse(&expected), NamedFile::Object(Box::new(key), naming));
        }
    }

    proptest::proptest! {
        #[test]
        fn keys_never_share_a_name(
            models in proptest::array::uniform2("[-/_S@EP0a.]{0,9}|-SEP-|/SEP-x|-SEP/x|a-/b|a/-b|m_01020102_0"),
            salts in proptest::array::uniform2("[-_.a0bin]{0,5}|\\.bin|0x1"),
            groups in proptest::array::uniform2(0..3_u32),
            ranks in proptest::array::uniform2(proptest::prop_oneof![0..3_u64, proptest::num::u64::ANY]),
        ) {
            let keys = [0, 1].map(|at| {
                let model = models[at].replace('@', "");
                let hash = ChunkHash([groups[1 - at] as u8; 32]);
                ObjectKey::new(hash, model, ranks[at], groups[at], salts[at].as_str()).unwrap()
            });
            for naming in Naming::ALL {
                let [one, other] = [0, 1].map(|at| FilePlace::of(&keys[at], naming, Layout::Flat));
                proptest::prop_assert_eq!(one.path == other.path, keys[0] == keys[1]);
                let found = match parse(&one.path) {
                    NamedFile::Object(key, _) => *key,
                    // Its key is in the file.
                    NamedFile::Hashed => ObjectKey::parse_name(&one.text.unwrap(), Some(KeyShape::Grouped)).unwrap(),
                    other => panic!("{}: {other:?}", one.path),
                };
                proptest::prop_assert_eq!(&found, &keys[0]);
            }
        }
    }

    #[test]
    fn overlong_or_ambiguous_names_are_hashed() {
        let salt = "s".repeat(128);
        let long = "m".repeat(44);
        for odd in [
            key(&long, 0, &salt),
            key("a-SEP-b", 0, ""),
            // The name of this one would be that of "/SEP-x".
            key("-SEP/x", 0, ""),
            key("a\0b", 0, ""),
            key(".kvtier-tmp-1", 0, ""),
            key("x", 0, &"é".repeat(128)),
        ] {
            let place = FilePlace::of(&odd, Naming::Grouped, Layout::Flat);
            assert_eq!(place.text.as_deref(), Some(key_text(&odd).as_str()));
            assert!(place.path.starts_with('#') && place.path.len() <= NAME_MAX);
            assert_eq!(parse(&place.path), NamedFile::Hashed);
        }
        let fits = key(&"m".repeat(40), 0, &salt);
        let place = FilePlace::of(&fits, Naming::Grouped, Layout::Flat);
        assert_eq!((place.path.len() <= NAME_MAX, place.text), (true, None));
    }

    #[test]
    fn longest_salt_of_longest_model_has_a_name() {
        use kvtier_core::object_key::MAX_SALT_BYTES;

        let salt = "😀".repeat(MAX_SALT_BYTES / 4);
        // Longer than any that the server takes.
        let key = key(&"m".repeat(4096), u32::MAX, &salt);
        for layout in [Layout::Flat, Layout::Sharded] {
            let place = FilePlace::of(&key, Naming::Grouped, layout);
            assert!(place.path.rsplit('/').all(|part| part.len() <= NAME_MAX));
            // It has to fit a number of 16 bits in the trailer.
            assert!(u16::try_from(place.text_len()).is_ok());
        }
    }

    #[test]
    fn other_names_are_foreign() {
        let hash = "ab".repeat(32);
        for foreign in [
            "",
            "x",
            "#abc.data",
            "notes.txt",
            "m@0x01020102@0@abcd.data",
            &format!("m@0x01020102@0@{hash}"),
            &format!("m@0x01020102@0@{hash}.tmp"),
            &format!("m_01020102_0_{hash}"),
            &format!("m_01020102_0_{hash}.bin.tmp.0af3"),
            &format!("m_1020102_0_{hash}.bin"),
            &format!("m_+1020102_0_{hash}.bin"),
            &format!("m_01020102_00_{hash}.bin"),
            &format!("m_01020102_0_{hash}@.bin"),
            &format!("01020102_0_{hash}.bin"),
            // They mean an object, but it is not looked up under these names.
            &format!("m@01020102@0@{hash}.data"),
            &format!("m@0x01020102@00@{hash}.data"),
            &format!("m@0x01020102@0@{}.data", hash.to_uppercase()),
            &format!("#{}", hash),
        ] {
            assert_eq!(parse(foreign), NamedFile::Foreign, "{foreign}");
        }
        assert_eq!(parse(".kvtier-tmp-1"), NamedFile::Temporary);
        assert!(
            is_shard_dir("0f") && !is_shard_dir("0F") && !is_shard_dir("0") && !is_shard_dir("..")
        );
    }
}
