//! Format of a device: a superblock twice, a table of records, and the objects' bytes. All numbers are little-endian.
//!
//! | bytes | contents |
//! | --- | --- |
//! | 0 and 4096 | superblock |
//! | from 8192 on | one record of 4096 bytes per object that there may be |
//! | from `data_offset` on | the objects, each in one piece from a multiple of 4096 on |
//!
//! A record names an object, its place and the checksum of its bytes; it is written after them. Each ends with a keyed
//! BLAKE3 hash whose key is the device's random identifier, so what another device, an earlier format or a tenant's bytes
//! have in that place is never taken for a record. What is read may be anything.

use kvtier_core::object_key::{KeyShape, ObjectKey};

use kvtier_l2::ObjectSpec;

/// Unit of everything on the device: reads and writes past the page cache need no other.
pub(super) const BLOCK: u64 = 4096;

/// Offsets of the superblocks.
pub(super) const SUPERBLOCKS: [u64; 2] = [0, BLOCK];

/// Offset of the table.
pub(super) const TABLE: u64 = 2 * BLOCK;

/// What the place of the objects is a multiple of.
const DATA_ALIGN: u64 = 1 << 20;

const MAGIC: [u8; 16] = *b"kvtier raw block";
const VERSION: u32 = 1;

const RECORD_MAGIC: [u8; 8] = *b"kvrecord";

/// Bytes of a record before the key, and of the hash at its end.
const RECORD_HEAD: usize = 90;
const HASH: usize = 32;

/// Longest key that fits a record, in bytes of its text.
pub(super) const MAX_KEY: usize = BLOCK as usize - RECORD_HEAD - HASH;

/// Geometry of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Geometry {
    /// Number of records.
    pub records: u64,
    /// Bytes for objects.
    pub data_bytes: u64,
}

impl Geometry {
    /// Returns the offset of the objects.
    pub(super) fn data_offset(self) -> u64 {
        (TABLE + self.records * BLOCK).next_multiple_of(DATA_ALIGN)
    }

    /// Bytes of the whole device that are used.
    pub(super) fn bytes(self) -> u64 {
        self.data_offset() + self.data_bytes
    }

    /// Returns the offset of a record.
    pub(super) fn record_at(self, number: u64) -> u64 {
        TABLE + number * BLOCK
    }
}

/// First block of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Superblock {
    /// Random, made when the device was formatted.
    pub id: [u8; 32],
    pub geometry: Geometry,
}

/// Contents of the place of a superblock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum First {
    Ours(Superblock),
    /// Superblock of another release.
    Version(u32),
    Other,
}

impl Superblock {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut block = Vec::with_capacity(BLOCK as usize);
        block.extend(MAGIC);
        block.extend(VERSION.to_le_bytes());
        block.extend((BLOCK as u32).to_le_bytes());
        block.extend(self.id);
        block.extend(self.geometry.records.to_le_bytes());
        block.extend(self.geometry.data_bytes.to_le_bytes());
        let hash = blake3::hash(&block);
        block.extend(hash.as_bytes());
        block.resize(BLOCK as usize, 0);
        block
    }

    pub(super) fn decode(block: &[u8]) -> First {
        let mut fields = Fields(block);
        let mut read = || -> Option<First> {
            if fields.take::<16>()? != MAGIC {
                return None;
            }
            let version = u32::from_le_bytes(fields.take()?);
            if version != VERSION {
                return Some(First::Version(version));
            }
            let unit = u32::from_le_bytes(fields.take()?);
            let id = fields.take()?;
            let records = fields.number()?;
            let data_bytes = fields.number()?;
            let before = block.len() - fields.0.len();
            let hash: [u8; HASH] = fields.take()?;
            let is_whole = blake3::hash(block.get(..before)?) == hash;
            let is_possible = u64::from(unit) == BLOCK
                && records <= u64::MAX / BLOCK / 4
                && data_bytes <= u64::MAX / 4
                && data_bytes.is_multiple_of(BLOCK);
            (is_whole && is_possible).then_some(First::Ours(Self {
                id,
                geometry: Geometry {
                    records,
                    data_bytes,
                },
            }))
        };
        read().unwrap_or(First::Other)
    }
}

/// An object of the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RawRecord {
    /// Place of the record in the table.
    pub number: u64,
    /// Grows with each record that is written: of two that contradict each other the later one is right.
    pub sequence: u64,
    pub key: ObjectKey,
    pub len: u64,
    pub layout: u64,
    /// The xxh3-128 of its bytes.
    pub sum: u128,
    /// Offset of the object's bytes, from `data_offset` on.
    pub offset: u64,
    /// When it was stored, in seconds since the Unix epoch.
    pub stored_at: u64,
}

/// Bytes of the device that an object of `len` bytes takes.
pub(super) fn span(len: u64) -> u64 {
    len.max(1).next_multiple_of(BLOCK)
}

impl RawRecord {
    /// Whether it is what is asked for.
    pub(super) fn is_of(&self, object: &ObjectSpec) -> bool {
        self.len == object.len && self.layout == object.layout
    }

    /// `None` if the key is too long.
    pub(super) fn encode(&self, id: &[u8; 32]) -> Option<Vec<u8>> {
        let key = self.key.text().name(KeyShape::Grouped);
        if key.len() > MAX_KEY {
            return None;
        }
        let mut block = Vec::with_capacity(BLOCK as usize);
        block.extend(RECORD_MAGIC);
        block.extend(self.number.to_le_bytes());
        block.extend(self.sequence.to_le_bytes());
        block.extend(self.len.to_le_bytes());
        block.extend(self.layout.to_le_bytes());
        block.extend(self.sum.to_le_bytes());
        block.extend(self.offset.to_le_bytes());
        block.extend(self.stored_at.to_le_bytes());
        block.extend([0; 16]);
        block.extend((key.len() as u16).to_le_bytes());
        debug_assert_eq!(block.len(), RECORD_HEAD);
        block.extend(key.as_bytes());
        block.resize(BLOCK as usize - HASH, 0);
        let hash = blake3::keyed_hash(id, &block);
        block.extend(hash.as_bytes());
        Some(block)
    }

    /// Reads the record with this number; `None` if there is none.
    pub(super) fn decode(
        block: &[u8],
        number: u64,
        Superblock { id, geometry }: &Superblock,
    ) -> Option<Self> {
        let (body, hash) = block.split_last_chunk::<HASH>()?;
        let mut fields = Fields(body);
        if fields.take::<8>()? != RECORD_MAGIC || blake3::keyed_hash(id, body) != *hash {
            return None;
        }
        let found = fields.number()?;
        let (sequence, len, layout) = (fields.number()?, fields.number()?, fields.number()?);
        let sum = u128::from_le_bytes(fields.take()?);
        let (offset, stored_at) = (fields.number()?, fields.number()?);
        fields.take::<16>()?;
        let key_len = u16::from_le_bytes(fields.take()?);
        let text = std::str::from_utf8(fields.0.get(..usize::from(key_len))?).ok()?;
        let key = ObjectKey::parse_name(text, Some(KeyShape::Grouped)).ok()?;
        let is_possible = found == number
            && offset.is_multiple_of(BLOCK)
            // None of these sums wraps.
            && len.max(offset) <= geometry.data_bytes
            && offset + span(len) <= geometry.data_bytes
            && key.text().name(KeyShape::Grouped) == text;
        is_possible.then_some(Self {
            number,
            sequence,
            key,
            len,
            layout,
            sum,
            offset,
            stored_at,
        })
    }
}

/// Bytes that were not read yet.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn number(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }
}

/// Signatures of other data: offset, bytes, and what they begin.
const FOREIGN: &[(usize, &[u8], &str)] = &[
    (1080, &[0x53, 0xef], "an ext2, ext3 or ext4 file system"),
    (0, b"XFSB", "an XFS file system"),
    (0x1_0040, b"_BHRfS_M", "a Btrfs file system"),
    (0x400, &[0x10, 0x20, 0xf5, 0xf2], "an F2FS file system"),
    (0, b"LUKS\xba\xbe", "a LUKS volume"),
    (0x200, b"LABELONE", "a physical volume of LVM"),
    (0x18, b"LVM2 001", "a physical volume of LVM"),
    (0x218, b"LVM2 001", "a physical volume of LVM"),
    (0, &[0xfc, 0x4e, 0x2b, 0xa9], "a member of a RAID (md)"),
    (0x1000, &[0xfc, 0x4e, 0x2b, 0xa9], "a member of a RAID (md)"),
    (4086, b"SWAPSPACE2", "a swap area"),
    (0, b"hsqs", "a SquashFS file system"),
    (3, b"NTFS    ", "an NTFS file system"),
    (3, b"EXFAT   ", "an exFAT file system"),
    (0x200, b"EFI PART", "a partition table (GPT)"),
    (0x1000, b"EFI PART", "a partition table (GPT)"),
    (
        510,
        &[0x55, 0xaa],
        "a partition table (MBR) or a FAT file system",
    ),
];

/// Bytes at the start of a device that show what is on it.
pub(super) const START: u64 = 128 << 10;

/// Returns what is on a device that begins like this, `None` if it is empty.
pub(super) fn foreign(start: &[u8]) -> Option<&'static str> {
    let is_there = |at: usize, bytes: &[u8]| start.get(at..at + bytes.len()) == Some(bytes);
    let known = FOREIGN.iter().find(|(at, bytes, _)| is_there(*at, bytes));
    match known {
        Some((_, _, what)) => Some(what),
        None if start.iter().all(|byte| *byte == 0) => None,
        None => Some("other data"),
    }
}
