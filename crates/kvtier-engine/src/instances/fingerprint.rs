//! The layout fingerprint: everything a registration says that changes the bytes of an object or their order.
//!
//! It is part of every key in memory and of the trailer of every file, so objects of different fingerprints are
//! different objects. It is the first eight bytes, little-endian, of the BLAKE3 hash of the encoding below; in keys and
//! trailers its highest five bits are those of [`ModelLayout::for_tiers`](super::ModelLayout::for_tiers).
//! `docs/identity.md` has each field, and `docs/claims.md` the tests.
//!
//! # Encoding, version 2
//! A number is a little-endian `u64`, a signed one in two's complement. A text is its length in bytes as a number, then
//! its UTF-8. A list is its length as a number, then its items. An option is an empty list or a list of one.
//!
//! | part | items |
//! | --- | --- |
//! | head | text `kvtier layout`, number [`VERSION`], text `pages` or `engine driven`, tokens of a chunk |
//! | `pages` | text engine type; for pages in CPU memory an option of the text [`Processor`]; list of arrays, in the order of the object groups and of their kernel groups |
//! | array | object group, its tag, recurrent state (0, 1), option of the window in tokens, text content, planes, layers, slots, heads, elements of a head, text dtype, option of the list of the layers' positions where these are not `0..layers`, option of the page |
//! | page, where [`KvLayout::is_page_bound`] | format, slots of a block, tokens of a block, list of the planes, each a list of parts: offset in the block, bytes of a run, and count and stride of both loops |
//! | `engine driven` | text [`Processor`], planes, layers, slots, hidden size, text dtype, tokens of a block |
//! | `engine driven groups` | text [`Processor`], tokens of a block, list of groups in the order of the registration |
//! | group | planes, layers, slots, hidden size, text dtype, tokens of a block, option of the window in chunks, recurrent state (0, 1) |
//!
//! If `--byte-pages` names the kind of untyped bytes, the fingerprint is that of a second encoding: head with the text `bytes` and
//! no chunk (0), the first fingerprint as a number, and the kind as a text.
//!
//! Version 1 (0.1.0) was the standard library's hasher, whose algorithm is unspecified, and had none of: version, chunk,
//! engine type, processor, tag, recurrent state, window, content, head split, page.

use std::sync::LazyLock;

use kvtier_device::{KernelGroup, KvLayout, Plane, TokenContent};

use super::layout::{EngineDrivenGroup, EngineDrivenLayout};

/// Version of the encoding. Any change of it changes every fingerprint: what tiers hold becomes misses.
const VERSION: u64 = 2;

/// The processor's architecture and those of its instruction sets that attention kernels choose the packing of a page
/// by, such as `x86_64 avx512f amx_tile`. Pages that are mapped here are those of a process on the same processor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Processor(String);

impl Processor {
    /// Processor of this host.
    pub fn of_host() -> &'static Self {
        static HOST: LazyLock<Processor> = LazyLock::new(|| {
            let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
            Processor::from_cpuinfo(std::env::consts::ARCH, &cpuinfo)
        });
        &HOST
    }

    /// Processor that the text of `/proc/cpuinfo` describes.
    fn from_cpuinfo(architecture: &str, cpuinfo: &str) -> Self {
        let flags = cpuinfo.lines().find(|line| line.starts_with("flags"));
        let mut name = architecture.to_owned();
        for set in ["avx512f", "amx_tile"] {
            if flags.is_some_and(|flags| flags.split_whitespace().any(|flag| flag == set)) {
                name.push(' ');
                name.push_str(set);
            }
        }
        Self(name)
    }
}

/// Fingerprint of the objects of a worker whose pages the server copies.
pub fn of_pages(layout: &KvLayout, processor: &Processor) -> u64 {
    let mut out = Encoder::new("pages", layout.chunk_tokens());
    out.text(layout.engine().name());
    let groups = layout.object_groups();
    let kernels = groups.iter().flat_map(|object| {
        let kernels = object.kernel_groups.iter();
        kernels.map(move |index| (object, &layout.kernel_groups()[*index]))
    });
    let in_cpu = layout
        .kernel_groups()
        .iter()
        .any(|group| layout.is_in_cpu_memory(group));
    out.option(in_cpu.then_some(processor), |out, processor| {
        out.text(&processor.0)
    });
    out.number(kernels.clone().count() as u64);
    for (object, group) in kernels {
        out.number(object.index as u64);
        out.number(object.extra_tag.cast_unsigned());
        out.number(u64::from(group.recurrent_state));
        out.option(group.window_tokens, |out, tokens| out.number(tokens));
        out.text(content_name(group.format.token_content()));
        let [planes, layers, slots, _] = group.object_shape();
        for number in [planes, layers, slots, group.heads, group.head_size] {
            out.number(number);
        }
        out.text(&group.dtype_name);
        let positions = &group.layer_indices;
        let in_order = positions.iter().copied().eq(0..positions.len());
        out.option((!in_order).then_some(positions), |out, positions| {
            out.list(positions, |out, position| out.number(*position as u64));
        });
        out.option(layout.is_page_bound(group).then_some(group), Encoder::page);
    }
    out.finish()
}

/// Fingerprint of the objects of a worker that copies by itself. It does not say where its pages are, so they are
/// taken for pages in the memory of this host's processor. A worker of one group has the fingerprint that it had before
/// registrations named groups.
pub fn of_engine_driven(layout: &EngineDrivenLayout, processor: &Processor) -> u64 {
    if let [group] = &layout.groups[..] {
        let mut out = Encoder::new("engine driven", layout.chunk_tokens);
        out.text(&processor.0);
        out.engine_driven_group(group);
        return out.finish();
    }
    let mut out = Encoder::new("engine driven groups", layout.chunk_tokens);
    out.text(&processor.0);
    out.number(layout.block_size.cast_unsigned());
    out.list(&layout.groups, |out, group| {
        out.engine_driven_group(group);
        out.option(group.window, |out, chunks| out.number(chunks.into()));
        out.number(u64::from(group.is_recurrent));
    });
    out.finish()
}

/// Fingerprint of the objects of a layout whose untyped bytes are of this kind.
pub fn of_bytes(layout: u64, kind: &str) -> u64 {
    let mut out = Encoder::new("bytes", 0);
    out.number(layout);
    out.text(kind);
    out.finish()
}

fn content_name(content: TokenContent) -> &'static str {
    match content {
        TokenContent::KeyAndValue => "key and value",
        TokenContent::Latent => "latent",
        TokenContent::PackedHeads => "packed heads",
        TokenContent::OneComponent => "one component",
        TokenContent::ScaledIndex => "scaled index",
    }
}

/// Writes the encoding into the hash.
struct Encoder(blake3::Hasher);

impl Encoder {
    fn new(kind: &str, chunk_tokens: u64) -> Self {
        let mut new = Self(blake3::Hasher::new());
        new.text("kvtier layout");
        new.number(VERSION);
        new.text(kind);
        new.number(chunk_tokens);
        new
    }

    fn number(&mut self, number: u64) {
        self.0.update(&number.to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.0.update(text.as_bytes());
    }

    fn list<T>(&mut self, items: &[T], mut each: impl FnMut(&mut Self, &T)) {
        self.number(items.len() as u64);
        for item in items {
            each(self, item);
        }
    }

    fn option<T>(&mut self, item: Option<T>, some: impl FnOnce(&mut Self, T)) {
        self.number(u64::from(item.is_some()));
        if let Some(item) = item {
            some(self, item);
        }
    }

    fn engine_driven_group(&mut self, group: &EngineDrivenGroup) {
        let planes = if group.shape.len() == 3 { 1 } else { 2 };
        self.number(planes);
        let lengths = group.shape.iter().rev().take(3).rev();
        lengths.for_each(|length| self.number(*length));
        self.text(group.dtype.name());
        self.number(group.tokens_per_block.cast_unsigned());
    }

    fn page(&mut self, group: &KernelGroup) {
        self.number(u64::from(group.format.number()));
        self.number(group.slots_per_block);
        self.number(group.tokens_per_block);
        self.list(&group.planes, |out, plane: &Plane| {
            out.list(&plane.parts, |out, part| {
                out.number(part.engine_offset);
                out.number(part.bytes);
                for step in &part.loops {
                    out.number(step.count);
                    out.number(step.segment_stride);
                }
            });
        });
    }

    fn finish(self) -> u64 {
        let hash = self.0.finalize();
        let first = hash.as_bytes().first_chunk();
        u64::from_le_bytes(*first.expect("a BLAKE3 hash has 32 bytes"))
    }
}

#[cfg(test)]
mod tests;
