//! The keys of objects at a server, and those of their companions.

use kvtier_core::object_key::{KeyShape, ObjectKey};

use super::slots;

/// Before the key of an object, that of its layout and checksum.
pub(super) const COMPANION: &str = "kvtier.sum@";

/// Something about an object, with its keys.
pub(super) struct KeyedItem<'a, T> {
    pub(super) item: &'a T,
    pub(super) key: String,
    pub(super) companion: String,
}

impl<'a, T> KeyedItem<'a, T> {
    /// `prefix` is put before both keys with an `@`, unless it is empty.
    pub(super) fn new(prefix: &str, of: &ObjectKey, item: &'a T) -> Self {
        let name = of.text().name(KeyShape::Grouped);
        let prefix = match prefix {
            "" => String::new(),
            prefix => format!("{prefix}@"),
        };
        let key = format!("{prefix}{name}");
        // In the slot of the key, so that one node of a cluster has both.
        let companion = match slots::tag(key.as_bytes()) {
            Some(_) => format!("{prefix}{COMPANION}{name}"),
            None => format!("{prefix}{COMPANION}{{{key}}}"),
        };
        Self {
            item,
            key,
            companion,
        }
    }

    /// Whether both keys are in one slot: not if the braces of the key are not paired.
    pub(super) fn has_one_slot(&self) -> bool {
        slots::slot(self.key.as_bytes()) == slots::slot(self.companion.as_bytes())
    }
}

/// A key without the prefix; none if it has another one.
pub(super) fn unprefixed<'a>(prefix: &str, key: &'a [u8]) -> Option<&'a [u8]> {
    match prefix.as_bytes() {
        b"" => Some(key),
        prefix => key.strip_prefix(prefix)?.strip_prefix(b"@"),
    }
}

/// The object that a key is of, and whether the key is that of its companion; none for what [`KeyedItem`] would not write.
pub(super) fn parse(key: &[u8]) -> Option<(ObjectKey, bool)> {
    let key = std::str::from_utf8(key).ok()?;
    let of_companion = key.strip_prefix(COMPANION);
    let name = of_companion.unwrap_or(key);
    let unwrapped = name.strip_prefix('{').and_then(|it| it.strip_suffix('}'));
    [unwrapped, Some(name)]
        .into_iter()
        .flatten()
        .find_map(|name| {
            let object = ObjectKey::parse_name(name, Some(KeyShape::Grouped)).ok()?;
            let written = KeyedItem::new("", &object, &());
            let is_companion = written.companion == key;
            (is_companion || written.key == key).then_some((object, is_companion))
        })
}

/// Whether a key without its prefix is that of a companion.
pub(super) fn is_companion(name: &[u8]) -> bool {
    name.starts_with(COMPANION.as_bytes())
}

#[cfg(test)]
mod tests {
    use kvtier_core::ChunkHash;

    use super::*;

    #[test]
    fn an_object_and_its_companion_have_one_slot() {
        for (prefix, model, salt, has_one_slot) in [
            ("", "org/model", "", true),
            ("fleet", "org/model", "tenant", true),
            ("{fleet}", "org/model", "tenant", true),
            ("", "org/{model}", "tenant", true),
            ("", "org/model", "{tenant}", true),
            ("", "org/{}model", "", false),
            ("", "org/model", "a}b", false),
        ] {
            let key = ObjectKey::new(ChunkHash([3; 32]), model, 0x0100_0100, 0, salt).unwrap();
            let named = KeyedItem::new(prefix, &key, &());
            assert_eq!(named.has_one_slot(), has_one_slot, "{}", named.companion);
            let name = unprefixed(prefix, named.companion.as_bytes()).unwrap();
            assert!(is_companion(name));
            if prefix.is_empty() {
                let (of_key, of_companion) = (parse(named.key.as_bytes()), parse(name));
                assert_eq!(of_key, Some((key.clone(), false)));
                assert_eq!(of_companion, Some((key, true)));
                assert_eq!(parse(named.key.replace("@0@", "@00@").as_bytes()), None);
            }
        }
    }
}
