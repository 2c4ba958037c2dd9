//! File of one registration.
//!
//! A number is a little-endian `u64`, a text its length as a number and its bytes, a list its length and its items.
//!
//! | at | what |
//! | --- | --- |
//! | 0 | [`MAGIC`] |
//! | 8 | when the last ping came that is known to be answered, or the registration, nanoseconds since boot |
//! | 16 | the shortest time between two pings, nanoseconds; 0 if there is none |
//! | 24 | 1 if the worker cannot map the pool that it learned of, else 0 |
//! | 32 | checksum of the rest, 16 bytes |
//! | 48 | texts boot and state folder; number chunk size; [`KeptRequest`]: numbers operation and chunk size (1 known, 2 negotiated), list of frames; lists pool and memory |

use std::time::Duration;

use kvtier_common::error::{Error, Result};
use kvtier_memory::checksum::checksum128;
use kvtier_proto::generation::{Generation, OperationSpec, Release};
use kvtier_proto::key::SkipTokens;
use kvtier_proto::operation::Operation;
use kvtier_proto::request::{EngineDrivenContext, InstanceId, Registration, Request};
use kvtier_store::l1::boot_time;

use super::super::super::Caller;

/// The format and its version.
const MAGIC: &[u8; 8] = b"kvtreg01";

/// Offset of what changes while a worker is registered.
pub(super) const SEEN_AT: u64 = 8;

const CHECKSUM_AT: usize = 32;

const BODY_AT: usize = 48;

/// Releases of the clients whose registrations are kept.
const RELEASES: &str = "0.5.5 to 0.5.7";

/// A registration as its client has sent it, in the form of the newest release.
pub struct KeptRequest {
    pub(super) operation: Operation,
    pub(super) knows_chunk_size: bool,
    pub(super) negotiates_chunk_size: bool,
    pub(super) frames: Vec<Vec<u8>>,
}

impl KeptRequest {
    /// The registration of pages, if its worker can be known again: by an id of its own, and memory that can be opened again.
    pub fn of_pages(caller: Caller, registration: &Registration<'_>) -> Option<Self> {
        Self::encode(caller, Request::RegisterKvCache(registration.clone()))
    }

    /// The registration of a worker that copies by itself.
    pub fn of_engine_driven(caller: Caller, context: &EngineDrivenContext<'_>) -> Option<Self> {
        Self::encode(caller, Request::RegisterEngineDriven(context.clone()))
    }

    fn encode(caller: Caller, request: Request<'_, Vec<u32>>) -> Option<Self> {
        if !caller.names_workers || caller.release != Release::Since0_5_5 {
            return None;
        }
        let operation = request.operation();
        Some(Self {
            operation,
            knows_chunk_size: caller.knows_chunk_size,
            negotiates_chunk_size: caller.negotiates_chunk_size,
            frames: rows(operation).find_map(|row| request.encode(row).ok())?,
        })
    }

    /// The request again.
    ///
    /// # Errors
    /// One line, if it is no registration.
    pub fn decode(&self) -> Result<Request<'_, usize>> {
        let frames: Vec<_> = self.frames.iter().map(Vec::as_slice).collect();
        let is_form = |row: &&OperationSpec| {
            let mut fields = row.payloads.iter().zip(&frames);
            fields.all(|(field, frame)| field.looks_like(frame))
        };
        let spec = rows(self.operation).find(is_form);
        let spec = spec.ok_or_else(|| Error::refused("no such operation"))?;
        Request::decode(spec, &frames, &mut SkipTokens).map_err(Error::refused)
    }

    /// Client as it was when it registered.
    pub fn caller(&self) -> Caller {
        Caller {
            connection: 0,
            release: Release::Since0_5_5,
            releases: RELEASES,
            knows_chunk_size: self.knows_chunk_size,
            negotiates_chunk_size: self.negotiates_chunk_size,
            registers_again: Some(true),
            names_workers: true,
        }
    }
}

/// The forms of an operation, the newest first.
fn rows(operation: Operation) -> impl Iterator<Item = &'static OperationSpec> {
    let rows = Generation::G6.specs().iter();
    rows.filter(move |row| row.operation == operation)
}

/// What the memory of a registration was.
#[derive(Default, PartialEq, Eq, Debug)]
pub struct KeptMemory {
    /// Device, inode and bytes of the pool that the worker learned of; empty if of none.
    pub pool: Vec<u64>,
    /// [`EngineMemory::identity`](kvtier_device::EngineMemory::identity) of its pages; empty if it copies by itself.
    pub pages: Vec<u64>,
}

/// A registration of an earlier process.
pub struct KeptWorker {
    pub id: InstanceId,
    pub request: KeptRequest,
    pub memory: KeptMemory,
    /// Whether the worker cannot map the pool that it learned of.
    pub pickles: bool,
    /// Time since its last ping, or its registration.
    pub silent_for: Duration,
    /// Until when its client has certainly abandoned no transfer, by the engine's clock; `None` if its pings do not tell.
    pub patient_until: Option<Duration>,
}

/// Why a registration of an earlier process is not taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LeftOut {
    /// The file is truncated, changed, or of another version.
    Damaged,
    /// Another boot, folder, or chunk size.
    Foreign,
    /// Memory that is other memory by now, that cannot be opened, or whose process has ended.
    Memory,
    /// Pool other than the one of this process.
    Pool,
    /// Client that may have abandoned transfers that it sent, and cannot be known not to have.
    Silent,
    /// Refused by this configuration.
    Refused,
    /// A driver did not answer in time.
    Timeout,
}

impl LeftOut {
    /// Name for `/status` and the log.
    pub fn name(self) -> &'static str {
        match self {
            Self::Damaged => "damaged",
            Self::Foreign => "foreign",
            Self::Memory => "memory",
            Self::Pool => "pool",
            Self::Silent => "silent",
            Self::Refused => "refused",
            Self::Timeout => "timeout",
        }
    }
}

/// Content of the file of a registration, as if it were seen now.
pub(super) fn content(head: &[u8], request: &KeptRequest, memory: &KeptMemory) -> Vec<u8> {
    let mut content = vec![0; BODY_AT];
    content[..MAGIC.len()].copy_from_slice(MAGIC);
    content[SEEN_AT as usize..][..8].copy_from_slice(&boot_time().to_le_bytes());
    content.extend(head);
    let operation = u64::from(request.operation == Operation::RegisterEngineDriven);
    write_number(&mut content, operation);
    let negotiates = u64::from(request.negotiates_chunk_size);
    write_number(
        &mut content,
        u64::from(request.knows_chunk_size) | negotiates << 1,
    );
    write_number(&mut content, request.frames.len() as u64);
    for frame in &request.frames {
        write_bytes(&mut content, frame);
    }
    for numbers in [&memory.pool, &memory.pages] {
        write_number(&mut content, numbers.len() as u64);
        for number in numbers {
            write_number(&mut content, *number);
        }
    }
    let checksum = checksum128(&content[BODY_AT..]).to_le_bytes();
    content[CHECKSUM_AT..BODY_AT].copy_from_slice(&checksum);
    content
}

/// Parses the file of this worker, whose body begins with `head` if this process may use it.
///
/// # Errors
/// Why it is left out.
pub(super) fn parse(
    head: &[u8],
    id: InstanceId,
    content: &[u8],
    now: Duration,
) -> Result<KeptWorker, (LeftOut, Error)> {
    let damaged = |why: &str| (LeftOut::Damaged, Error::refused(why));
    let body = content.get(BODY_AT..);
    let body = body.ok_or_else(|| damaged("it is truncated"))?;
    if !content.starts_with(MAGIC) {
        return Err(damaged("it is of another version, or no registration"));
    }
    if content[CHECKSUM_AT..BODY_AT] != checksum128(body).to_le_bytes() {
        return Err(damaged("its checksum is wrong"));
    }
    let Some(body) = body.strip_prefix(head) else {
        let why = "it is of another boot, folder or chunk size";
        return Err((LeftOut::Foreign, Error::refused(why)));
    };
    let mut reader = KeptReader(body);
    let mut read = || {
        let operation = match reader.number()? {
            0 => Operation::RegisterKvCache,
            1 => Operation::RegisterEngineDriven,
            _ => return None,
        };
        let chunk_size = reader.number()?;
        let frames = reader.list(|reader| reader.bytes().map(<[u8]>::to_vec))?;
        let memory = KeptMemory {
            pool: reader.list(KeptReader::number)?,
            pages: reader.list(KeptReader::number)?,
        };
        let request = KeptRequest {
            operation,
            knows_chunk_size: chunk_size & 1 != 0,
            negotiates_chunk_size: chunk_size & 2 != 0,
            frames,
        };
        reader.0.is_empty().then_some((request, memory))
    };
    let (request, memory) = read().ok_or_else(|| damaged("it ends early, or late"))?;
    let mut seen = KeptReader(&content[SEEN_AT as usize..CHECKSUM_AT]);
    let [last, gap, pickles] = [(); 3].map(|()| seen.number().unwrap_or(0));
    let boot = boot_time();
    // One in the future is none that a server has written.
    let silent_for = boot.checked_sub(last).unwrap_or(u64::MAX);
    Ok(KeptWorker {
        id,
        request,
        memory,
        pickles: pickles != 0,
        silent_for: Duration::from_nanos(silent_for),
        patient_until: patient_until(last, gap, boot, now),
    })
}

/// Until when a client of LMCache has certainly abandoned no transfer, by the engine's clock.
///
/// Its next ping leaves an interval after the answer to the last one, and it waits as long for the answer to that, before it
/// abandons anything. The shortest time between two pings is that interval, up to delays; a quarter of the two is left for those.
fn patient_until(last: u64, gap: u64, boot: u64, now: Duration) -> Option<Duration> {
    // Bounded, as whatever is read from a file.
    let gap = gap.min(nanos(Duration::from_secs(600)));
    let age = boot.checked_sub(last)?;
    let left = (gap + gap / 2).checked_sub(age).filter(|left| *left > 0)?;
    Some(now + Duration::from_nanos(left))
}

pub(super) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

pub(super) fn write_number(out: &mut Vec<u8>, number: u64) {
    out.extend(number.to_le_bytes());
}

pub(super) fn write_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    write_number(out, bytes.len() as u64);
    out.extend(bytes);
}

/// Reads what is left; `None` at its end.
struct KeptReader<'a>(&'a [u8]);

impl<'a> KeptReader<'a> {
    fn number(&mut self) -> Option<u64> {
        let (number, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*number))
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = usize::try_from(self.number()?).ok()?;
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }

    fn list<T>(&mut self, mut item: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let len = self.number()?;
        let mut items = Vec::new();
        for _ in 0..len {
            items.push(item(self)?);
        }
        Some(items)
    }
}

#[cfg(test)]
mod tests {
    use kvtier_proto::request::GroupLayout;

    use super::*;

    #[test]
    fn engine_driven_registration_is_kept_in_its_form() {
        let group = GroupLayout {
            num_layers: 1,
            hidden_dim_size: 2,
            dtype: "bfloat16",
            tokens_per_block: 4,
            window_tokens: 5,
            kv_size: 1,
            window_chunks: 6,
            recurrent: true,
        };
        for groups in [None, Some(Vec::new()), Some(vec![group])] {
            let context = EngineDrivenContext {
                instance: InstanceId(1),
                model_name: "model",
                world_size: 1,
                block_size: 4,
                num_layers: 1,
                hidden_dim_size: 2,
                dtype: "bfloat16",
                use_mla: false,
                num_physical_slots: Some(16),
                chunk_tokens: None,
                groups,
                takes_pool: true,
            };
            let caller = KeptRequest {
                operation: Operation::RegisterEngineDriven,
                knows_chunk_size: true,
                negotiates_chunk_size: true,
                frames: Vec::new(),
            };
            let kept = KeptRequest::of_engine_driven(caller.caller(), &context).unwrap();
            assert_eq!(
                kept.decode().unwrap(),
                Request::RegisterEngineDriven(context)
            );
        }
    }

    #[test]
    fn client_is_patient_for_one_and_a_half_heartbeats() {
        const SECOND: u64 = 1_000_000_000;
        let now = Duration::from_secs(5);
        // The last ping at 100 s, by a client that pings every 10 s.
        let until = |boot| patient_until(100 * SECOND, 10 * SECOND, boot * SECOND, now);
        assert_eq!(until(100), Some(now + Duration::from_secs(15)));
        assert_eq!(until(114), Some(now + Duration::from_secs(1)));
        for boot in [99, 115, 1000] {
            assert_eq!(until(boot), None, "{boot}");
        }
        // No ping, or one alone; and numbers that no server has written.
        for (last, gap) in [(0, 0), (100 * SECOND, 0)] {
            assert_eq!(patient_until(last, gap, 101 * SECOND, now), None);
        }
        let longest = patient_until(7, u64::MAX, 7, now);
        assert_eq!(longest, Some(now + Duration::from_secs(900)));
        assert_eq!(patient_until(u64::MAX, u64::MAX, 7, now), None);
    }
}
