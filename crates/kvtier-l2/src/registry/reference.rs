//! Documentation of all keys, generated from their definitions.

use std::fmt::Write as _;

use super::Registry;
use crate::config::{
    AESGCM_KEYS, COMMON, COMPRESS_KEYS, EARLIER_KEYS, EVICTION, FP8_KEYS, Key, Shape,
};

impl Registry {
    /// Returns Markdown with one table of keys per type, the common keys first. Headings are of the third level.
    #[must_use]
    pub fn reference_markdown(&self) -> String {
        let mut out = String::from("### Keys of every type\n\n");
        table(&mut out, COMMON);
        out.push_str("\n### Keys of `serde` of type `aesgcm`\n\n");
        table(&mut out, AESGCM_KEYS);
        out.push_str("\nEach of `earlier_keys`:\n\n");
        table(&mut out, EARLIER_KEYS);
        out.push_str("\n### Keys of `serde` of type `compress`\n\n");
        table(&mut out, COMPRESS_KEYS);
        out.push_str("\n### Keys of `serde` of type `fp8`\n\n");
        table(&mut out, FP8_KEYS);
        out.push_str("\n### Keys of `eviction`\n\n");
        table(&mut out, EVICTION);
        for kind in &self.types {
            let _ = write!(out, "\n### `{}`\n\n{}.\n\n", kind.name, kind.summary);
            table(&mut out, kind.keys());
            for key in kind.keys() {
                if let Shape::Tables(keys) = key.shape {
                    let _ = write!(out, "\nEach of `{}`:\n\n", key.name);
                    table(&mut out, keys);
                }
            }
        }
        out
    }
}

fn table<'a>(out: &mut String, keys: impl IntoIterator<Item = &'a Key>) {
    out.push_str("| key | default | allowed | meaning |\n| --- | --- | --- | --- |\n");
    for key in keys {
        let unit = match key.unit {
            "" => String::new(),
            unit => format!(" ({unit})"),
        };
        let _ = writeln!(
            out,
            "| `{}` | {} | {}{unit} | {} |",
            key.name,
            cell(&key.default_text()),
            cell(&key.allowed()),
            cell(key.help),
        );
    }
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('<', "&lt;")
}
