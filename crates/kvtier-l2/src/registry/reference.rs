//! Documentation of all keys, generated from their definitions.

use std::fmt::Write as _;

use super::{AdapterType, Registry};
use crate::config::{
    AESGCM_KEYS, COMMON, COMPRESS_KEYS, EVICTION, FP8_KEYS, Key, Shape, WITHOUT_EFFECT,
};

const TITLE: &str = "# Tier keys

<!-- Generated from the definitions by `KVTIER_WRITE_DOCS=1 cargo test -p kvtier-config --test it`. -->

Keys of `--l2-adapter` and of `[[l2-adapter]]` in the file; [Second tiers](l2.md) is the guide. A range without a word is of \
whole numbers. A text is not empty unless it is by \
default. Paths begin neither with `~` nor with `$`, which nothing expands.
";

/// Returns the page of [`Registry::reference_markdown`].
pub(super) fn markdown(registry: &Registry) -> String {
    let mut out = format!("{TITLE}\n## Every type\n\n");
    table(&mut out, COMMON);
    out.push_str("\n## `eviction`\n\n");
    table(&mut out, EVICTION);
    transformations(&mut out);
    for kind in &registry.types {
        let _ = write!(out, "\n## `{}`\n\n", kind.name);
        match kind.base.and_then(|base| registry.find(base)) {
            Some(base) => differences(&mut out, kind, base),
            None => {
                let _ = write!(out, "{}.\n\n", kind.summary);
                table(&mut out, kind.keys());
            }
        }
    }
    out
}

/// Writes the keys of the types of `serde`, those that all have first.
fn transformations(out: &mut String) {
    let types = [
        ("aesgcm", AESGCM_KEYS),
        ("compress", COMPRESS_KEYS),
        ("fp8", FP8_KEYS),
    ];
    let is_shared = |key: &Key| types.iter().all(|(_, keys)| keys.contains(key));
    out.push_str("\n## `serde`\n\n");
    table(out, AESGCM_KEYS.iter().filter(|key| is_shared(key)));
    for (name, keys) in types {
        let _ = write!(out, "\n### `{name}`\n\n");
        table(out, keys.iter().filter(|key| !is_shared(key)));
    }
}

/// Writes a type that is another one under its own name: the keys that it lacks, and those that it adds or changes.
fn differences(out: &mut String, kind: &AdapterType, base: &AdapterType) {
    let (of_base, own): (Vec<_>, Vec<_>) = (base.keys().collect(), kind.keys().collect());
    let link = format!("[`{0}`](#{0})", base.name);
    if of_base == own {
        let _ = writeln!(out, "As {link}.");
        return;
    }
    let is_known = |key: &&Key| of_base.contains(key);
    let is_missing = |key: &&Key| own.iter().all(|own| own.name != key.name);
    let missing = names(of_base.iter().copied().filter(is_missing));
    let _ = write!(
        out,
        "{}. As {link}, but without {missing}, and with:\n\n",
        kind.summary
    );
    table(out, own.iter().copied().filter(|key| !is_known(key)));
}

/// Writes a table of keys, those of their lists of objects, and the names of those without effect.
fn table<'a>(out: &mut String, keys: impl IntoIterator<Item = &'a Key>) {
    let keys = keys.into_iter();
    let (idle, keys): (Vec<&Key>, Vec<_>) = keys.partition(|key| key.help == WITHOUT_EFFECT);
    out.push_str("| key | default | allowed | meaning |\n| --- | --- | --- | --- |\n");
    for key in &keys {
        let unit = match key.unit {
            "" => String::new(),
            unit => format!(" ({unit})"),
        };
        let _ = writeln!(
            out,
            "| `{}` | {} | {}{unit} | {} |",
            key.name,
            cell(&key.default_text()),
            cell(&allowed(key)),
            cell(key.help),
        );
    }
    if !idle.is_empty() {
        let _ = write!(
            out,
            "\nLMCache's keys that change nothing: {}.\n",
            names(idle)
        );
    }
    for key in keys {
        if let Shape::Tables(keys) = key.shape {
            let _ = write!(out, "\nEach of `{}`:\n\n", key.name);
            table(out, keys);
        }
    }
}

/// Returns the allowed values of a key, shorter than a refusal has them.
fn allowed(key: &Key) -> String {
    match key.shape {
        Shape::Path => "a path".into(),
        Shape::Text | Shape::AnyText => "a text".into(),
        Shape::Integer { min: i64::MIN, .. } => "64 bits".into(),
        Shape::Integer { min, max: i64::MAX } => format!("from {min}"),
        Shape::Integer { min, max } => format!("{min} to {max}"),
        _ => key.allowed(),
    }
}

/// Returns the names of keys, with commas between them.
fn names<'a>(keys: impl IntoIterator<Item = &'a Key>) -> String {
    let names = keys.into_iter().map(|key| format!("`{}`", key.name));
    names.collect::<Vec<_>>().join(", ")
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::{Translated, Translation};

    const KEYS: &[Key] = &[
        Key::path("place", "Directory"),
        Key::integer("speed", 1, 9, "Speed"),
        Key::switch("old", WITHOUT_EFFECT),
    ];
    const OTHER: &[Key] = &[Key::text("where", "Directory")];
    const BASE: AdapterType =
        AdapterType::new("base", "Keeps objects", KEYS, |_, _| unreachable!());

    #[test]
    fn other_names_have_only_what_differs() {
        let same = BASE.named("same", "Not shown");
        let other = BASE.named("other", "Other keys").translating(Translation {
            keys: OTHER,
            hidden: &["place"],
            translate: |_| Ok(Translated::default()),
        });
        let page = Registry::of(&[BASE, same, other.named("third", "Third")]).reference_markdown();
        let (_, page) = page.split_once("\n## `base`\n\n").unwrap();
        let head = "| key | default | allowed | meaning |\n| --- | --- | --- | --- |\n";
        let expected = format!(
            "Keeps objects.\n\n{head}| `place` | unset | a path | Directory |\n| `speed` | unset | 1 to 9 | Speed |\n\n\
             LMCache's keys that change nothing: `old`.\n\
             \n## `same`\n\nAs [`base`](#base).\n\
             \n## `third`\n\nThird. As [`base`](#base), but without `place`, and with:\n\n\
             {head}| `where` | unset | a text | Directory |\n"
        );
        assert_eq!(page, expected);
    }
}
