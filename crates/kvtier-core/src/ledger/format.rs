//! Words of a ledger.
//!
//! | words | what |
//! | --- | --- |
//! | 0 to 511 | header: mark, version, id, identity, checksum; number of names; whether a grant could not be recorded |
//! | 256 for each of [`MAX_NAMES`] namespaces | checksum, lengths, rank, group, layout, model, salt |
//! | 10 for each slot | checksum, hash (4), offset, length, namespace, sequence, life |
//!
//! A name is a whole page half, so a namespace costs 2 KiB; most ledgers have a few. Memory that was never written takes no space.

use super::{ObjectState, Words};
use crate::hashing::ChunkHash;
use crate::object_key::Namespace;
use kvtier_common::extent::Extent;

/// Version of the format. A ledger of another one is not read.
pub const FORMAT_VERSION: u64 = 3;

/// "kvledger", little-endian. Written last of a header.
const MARK: u64 = u64::from_le_bytes(*b"kvledger");

/// Words of the header that are in use.
pub(super) const HEADER: u64 = 16;
/// Place of the number of names.
const NAMES_LEN: u64 = HEADER;
/// Place of the word that is not 0 once a grant could not be recorded.
const UNRECORDED_GRANT: u64 = HEADER + 1;
/// Place of the first name.
pub(super) const NAMES: u64 = 512;
/// Words per name.
pub(super) const NAME: u64 = 256;
/// Most namespaces that are recorded: a million tenants.
const MAX_NAMES: u64 = 1 << 20;
/// Place of the first record.
const RECORDS: u64 = NAMES + MAX_NAMES * NAME;
/// Words per record.
pub(super) const RECORD: u64 = 10;
/// Bytes per record.
pub const RECORD_BYTES: u64 = RECORD * 8;

/// Words in front of the texts of a name.
const NAME_HEAD: u64 = 6;
/// Most bytes of the texts.
const NAME_BYTES: usize = ((NAME - NAME_HEAD) * 8) as usize;

/// Place of the life in a record.
const LIFE: u64 = RECORD - 1;

/// Words of a ledger for at most `slots` objects.
pub fn max_words(slots: u64) -> u64 {
    RECORDS + slots.min(1 << 31) * RECORD
}

/// What must be the same for a ledger to describe this server's objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The arena: device and number of its file.
    pub arena: [u64; 2],
    /// Tokens per chunk.
    pub chunk_size: u64,
    /// Number that stands for the hash algorithm and its seed.
    pub hash_algorithm: u64,
    /// Number that stands for the names of tenants: the key that hashes them, or none.
    pub tenants: u64,
    /// Number that stands for the instance.
    pub instance: u64,
    /// Moment of tick 0 of the cache's clock, in nanoseconds of a clock that runs on from process to process.
    pub origin: u64,
}

impl Identity {
    fn words(&self) -> [u64; 7] {
        let Self {
            arena: [device, file],
            chunk_size,
            hash_algorithm,
            tenants,
            instance,
            origin,
        } = *self;
        [
            device,
            file,
            chunk_size,
            hash_algorithm,
            tenants,
            instance,
            origin,
        ]
    }
}

/// Two words to one that depends on all their bits, unless one of them is 0.
#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

/// Checksum of words at a place; never 0, which stands for none. `id` has random bits.
#[inline]
fn checksum(id: u64, place: u64, words: &[u64]) -> u64 {
    let mut sum = id ^ place.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let (pairs, rest) = words.as_chunks::<2>();
    for [a, b] in pairs {
        sum = fold(sum ^ a, sum.rotate_left(32) ^ b);
    }
    for word in rest {
        sum = fold(sum ^ word, sum.rotate_left(32));
    }
    sum.max(1)
}

/// A number below 2^40 with its own checksum.
fn checked(id: u64, place: u64, number: u64) -> u64 {
    number << 24 | checksum(id, place, &[number]) >> 40
}

pub(super) fn write_header(words: &mut impl Words, id: u64, identity: &Identity) {
    // Nothing is believed until the mark is there again.
    words.set(0, 0);
    let content = header(id, identity);
    words.set_all(1, &content);
    write_names_len(words, id, 0);
    set_unrecorded_grant(words, false);
    words.set(0, MARK);
}

/// Notes whether memory may have been granted that no record names. No flipped bit makes a yes a no.
pub(super) fn set_unrecorded_grant(words: &mut impl Words, is_unrecorded: bool) {
    words.set(UNRECORDED_GRANT, if is_unrecorded { u64::MAX } else { 0 });
}

pub(super) fn has_unrecorded_grant(words: &impl Words) -> bool {
    words.get(UNRECORDED_GRANT) != 0
}

/// All but the mark: version, id, identity, checksum.
fn header(id: u64, identity: &Identity) -> [u64; 10] {
    let [a, b, c, d, e, f, g] = identity.words();
    let content = [FORMAT_VERSION, id, a, b, c, d, e, f, g];
    let mut words = [checksum(id, 0, &content); 10];
    words[..9].copy_from_slice(&content);
    words
}

/// A header that is there.
pub(super) struct Header {
    pub(super) version: u64,
    pub(super) id: u64,
    pub(super) identity: Identity,
    pub(super) names: u64,
}

/// The header; `None` without a mark, `Err` if it is damaged. Of another version only that is known.
pub(super) fn read_header(words: &impl Words) -> Option<Result<Header, ()>> {
    if words.end() < NAMES || words.get(0) != MARK {
        return None;
    }
    let content: [u64; 10] = std::array::from_fn(|at| words.get(1 + at as u64));
    let [
        version,
        id,
        device,
        file,
        chunk_size,
        hash_algorithm,
        tenants,
        instance,
        origin,
        sum,
    ] = content;
    let identity = Identity {
        arena: [device, file],
        chunk_size,
        hash_algorithm,
        tenants,
        instance,
        origin,
    };
    let number = words.get(NAMES_LEN);
    let names = number >> 24;
    let found = Header {
        version,
        id,
        identity,
        names,
    };
    if version != FORMAT_VERSION {
        return Some(Ok(found));
    }
    let is_sound = header(id, &identity)[9] == sum
        && checked(id, NAMES_LEN, names) == number
        && names <= MAX_NAMES;
    Some(if is_sound { Ok(found) } else { Err(()) })
}

pub(super) fn write_names_len(words: &mut impl Words, id: u64, names: u64) {
    words.set(NAMES_LEN, checked(id, NAMES_LEN, names));
}

/// Place of a name; `None` for one that has none.
pub(super) fn name_at(number: u32) -> Option<u64> {
    let number = u64::from(number);
    (number < MAX_NAMES).then(|| NAMES + number * NAME)
}

/// Place of a record.
#[inline]
pub(super) fn record_at(slot: u32) -> u64 {
    RECORDS + u64::from(slot) * RECORD
}

/// Slots whose records the words have.
pub(super) fn slots(words: &impl Words) -> u32 {
    let slots = words.end().saturating_sub(RECORDS) / RECORD;
    u32::try_from(slots).unwrap_or(u32::MAX).min(1 << 31)
}

/// Writes a name; returns the reference to it, or `None` if it is too long.
pub(super) fn write_name(
    words: &mut impl Words,
    at: u64,
    id: u64,
    number: u32,
    namespace: &Namespace,
) -> Option<u32> {
    let (model, salt) = (namespace.model_name(), namespace.cache_salt());
    let mut text = [model.as_bytes(), salt.as_bytes()].concat();
    if text.len() > NAME_BYTES {
        return None;
    }
    let lens = (model.len() as u64) << 32 | salt.len() as u64;
    text.resize(text.len().next_multiple_of(8), 0);
    let (chunks, _) = text.as_chunks::<8>();
    let head = [
        lens,
        namespace.kv_rank(),
        u64::from(namespace.object_group_id()),
        namespace.layout(),
    ];
    let mut content = head.to_vec();
    content.extend(chunks.iter().map(|bytes| u64::from_le_bytes(*bytes)));
    // The low half is the reference, so it must not be 0 either.
    let sum = checksum(id, u64::from(number) | 1 << 63, &content) | 1;
    words.set(at, 0);
    words.set_all(at + 1, &content);
    words.set(at, sum);
    Some(sum as u32)
}

pub(super) fn remove_name(words: &mut impl Words, at: u64) {
    words.set(at, 0);
}

/// The namespace of a number and the reference to it; `None` for none, `Err` if it is damaged.
pub(super) fn read_name(
    words: &impl Words,
    id: u64,
    number: u32,
) -> Option<Result<(Namespace, u32), ()>> {
    let at = name_at(number).filter(|at| at + NAME <= words.end())?;
    let sum = words.get(at);
    if sum == 0 {
        return None;
    }
    Some(read_content(words, at, id, number, sum).ok_or(()))
}

fn read_content(
    words: &impl Words,
    at: u64,
    id: u64,
    number: u32,
    sum: u64,
) -> Option<(Namespace, u32)> {
    let lens = words.get(at + 1);
    let (model, salt) = ((lens >> 32) as usize, (lens as u32) as usize);
    if model.saturating_add(salt) > NAME_BYTES {
        return None;
    }
    let content: Vec<_> = (at + 1..)
        .take(4 + (model + salt).div_ceil(8))
        .map(|place| words.get(place))
        .collect();
    if checksum(id, u64::from(number) | 1 << 63, &content) | 1 != sum {
        return None;
    }
    let text: Vec<_> = content[4..]
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .collect();
    let model_name = std::str::from_utf8(&text[..model]).ok()?;
    let cache_salt = std::str::from_utf8(&text[model..model + salt]).ok()?;
    let group = u32::try_from(content[2]).ok()?;
    let namespace = Namespace::new(model_name, content[1], group, content[3], cache_salt).ok()?;
    Some((namespace, sum as u32))
}

/// What of a record does not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ObjectRecord {
    pub(super) hash: ChunkHash,
    pub(super) extent: Extent,
    pub(super) namespace: u32,
    pub(super) reference: u32,
    pub(super) sequence: u64,
}

impl ObjectRecord {
    /// The words of the record, with a 0 in place of checksum and life.
    #[inline]
    fn words(&self) -> [u64; RECORD as usize] {
        let (hash, _) = self.hash.0.as_chunks::<8>();
        let hash = |at: usize| u64::from_le_bytes(hash[at]);
        [
            0,
            hash(0),
            hash(1),
            hash(2),
            hash(3),
            self.extent.offset,
            self.extent.len,
            u64::from(self.namespace) << 32 | u64::from(self.reference),
            self.sequence,
            0,
        ]
    }
}

/// What of a record changes, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Life {
    pub(super) state: ObjectState,
    /// Tick of the last use; of withheld memory, that of its grant.
    pub(super) used_at: u32,
}

impl Life {
    /// Bound to the record by its checksum, so that the life of an earlier object in the slot is none of a later one.
    #[inline]
    fn word(self, sum: u64) -> u64 {
        let content = u64::from(self.used_at) << 8 | self.state as u64;
        content << 24 | fold(sum, content) >> 40
    }
}

#[inline]
pub(super) fn write_record(
    words: &mut impl Words,
    at: u64,
    id: u64,
    slot: u32,
    record: &ObjectRecord,
    life: Life,
) {
    // A slot whose last object was not removed must never show its life with another's words.
    words.set(at + LIFE, 0);
    let mut content = record.words();
    let sum = checksum(id, u64::from(slot), &content[1..LIFE as usize]);
    content[0] = sum;
    content[LIFE as usize] = life.word(sum);
    words.set_all(at, &content);
}

/// Updates the life of a record; returns whether there is one.
#[inline]
pub(super) fn write_life(words: &mut impl Words, at: u64, life: Life) -> bool {
    let sum = words.get(at);
    let is_recorded = sum != 0 && words.get(at + LIFE) != 0;
    if is_recorded {
        words.set(at + LIFE, life.word(sum));
    }
    is_recorded
}

#[inline]
pub(super) fn remove_record(words: &mut impl Words, at: u64) {
    words.set(at + LIFE, 0);
}

/// Invalidates the record of a slot whose object is not recorded.
pub(super) fn invalidate(words: &mut impl Words, at: u64) {
    words.set(at + LIFE, 0);
    words.set(at, 0);
}

/// The record of a slot; `None` for none, `Err` if it is damaged.
#[inline]
pub(super) fn read_record(
    words: &impl Words,
    id: u64,
    slot: u32,
) -> Option<Result<(ObjectRecord, Life), ()>> {
    let at = record_at(slot);
    let life = words.get(at + LIFE);
    if life == 0 {
        return None;
    }
    let content: [u64; 8] = std::array::from_fn(|place| words.get(at + 1 + place as u64));
    let sum = words.get(at);
    let state = match life >> 24 & 0xff {
        1 => ObjectState::Resident,
        2 => ObjectState::Read,
        3 => ObjectState::Withheld,
        _ => return Some(Err(())),
    };
    let found = Life {
        state,
        used_at: (life >> 32) as u32,
    };
    if sum != checksum(id, u64::from(slot), &content) || life != found.word(sum) {
        return Some(Err(()));
    }
    let mut hash = [0; 32];
    for (to, word) in hash.as_chunks_mut::<8>().0.iter_mut().zip(content) {
        *to = word.to_le_bytes();
    }
    let record = ObjectRecord {
        hash: ChunkHash(hash),
        extent: Extent::new(content[4], content[5]),
        namespace: (content[6] >> 32) as u32,
        reference: content[6] as u32,
        sequence: content[7],
    };
    Some(Ok((record, found)))
}
