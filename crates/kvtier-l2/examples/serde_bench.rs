//! Speed of the transformations of a tier (`serde`) on one thread, and of aesgcm beside ring's AES-GCM in place.
//!
//! `cargo run --release -p kvtier-l2 --example serde_bench`. The adapter keeps one object of each key in memory. Columns: GB/s
//! of ring alone, of the copy between L1 and scratch memory alone, and of the transformation with its copies from and to L1, all
//! by the processor time of their thread; the ratio of the transformation to ring, and to ring and the copy one after the other;
//! GB/s by the clock of the whole call, with the copy of the adapter in memory and the change of threads. Rounds alternate; the
//! medians are printed. The values are bfloat16 of similar sizes.

use std::sync::Arc;
use std::time::Instant;

use kvtier_core::ChunkHash;
use kvtier_core::object_key::ObjectKey;
use kvtier_core::random::SplitMix64;
use kvtier_l2::mock::{MemoryStore, Mock};
use kvtier_l2::{
    Adapter, AdapterConfig, AdapterType, Buffer, L2Error, LoadItem, ObjectSpec, Registry, StoreItem,
};
use kvtier_memory::{Arena, ArenaKind, Extent};
use ring::aead::{AES_128_GCM, AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};

type Error = Box<dyn std::error::Error>;

const ROUNDS: usize = 7;

/// Bytes copied at once, as those of a segment of the frame `bound`.
const PIECE: usize = 64 << 10;

/// Bytes per round: more than any cache.
const BYTES: u64 = 256 << 20;

fn open(_: &AdapterConfig, _: &Registry) -> Result<Arc<dyn Adapter>, L2Error> {
    let store = MemoryStore::new(4 << 30);
    Ok(Arc::new(Mock::new(Arc::new(store), 1e15)))
}

fn object(number: u64, len: u64) -> Result<ObjectSpec, Error> {
    let hash: [u8; 32] = SplitMix64::new(number)
        .bytes(32)
        .try_into()
        .unwrap_or_default();
    let key = ObjectKey::new(ChunkHash(hash), "org/model", 0x0101_0000, 0, "tenant")?;
    Ok(ObjectSpec {
        key,
        len,
        layout: 1,
    })
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Processor time of this thread in seconds.
fn cpu() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// GB/s of sealing and opening.
fn ring_alone(key: &LessSafeKey, data: &mut [u8], len: usize) -> Result<[f64; 2], Error> {
    let failed = |_| "ring failed";
    let nonce = || Nonce::assume_unique_for_key([7; 12]);
    let total = data.len() as f64 / 1e9;
    let begin = cpu();
    let mut tags = Vec::new();
    for object in data.chunks_exact_mut(len) {
        let tag = key.seal_in_place_separate_tag(nonce(), Aad::empty(), object);
        tags.push(tag.map_err(failed)?);
    }
    let sealed = total / (cpu() - begin);
    let begin = cpu();
    for (object, tag) in data.chunks_exact_mut(len).zip(tags) {
        key.open_in_place_separate_tag(nonce(), Aad::empty(), tag, object, 0..)
            .map_err(failed)?;
    }
    Ok([sealed, total / (cpu() - begin)])
}

/// GB/s of the copies alone: of each object from L1 to the same scratch memory, and back.
fn copies_alone(bench: &Bench, scratch: &mut [u8], plain: &[u8]) -> Result<[f64; 2], Error> {
    let total = BYTES as f64 / 1e9;
    let numbers = 0..BYTES / bench.len;
    let begin = cpu();
    for number in numbers.clone() {
        for (at, piece) in scratch.chunks_mut(PIECE).enumerate() {
            bench.buffer(number).read((at * PIECE) as u64, piece)?;
        }
    }
    let read = total / (cpu() - begin);
    let begin = cpu();
    for number in numbers {
        for (at, piece) in scratch.chunks(PIECE).enumerate() {
            bench.buffer(number).write((at * PIECE) as u64, piece)?;
        }
    }
    let written = total / (cpu() - begin);
    // Later rounds store the same values.
    bench.arena.write(Extent::new(0, BYTES), 0, plain)?;
    Ok([read, written])
}

struct Bench {
    adapter: Arc<dyn Adapter>,
    arena: Arc<Arena>,
    len: u64,
}

impl Bench {
    fn buffer(&self, number: u64) -> Buffer {
        let extent = Extent::new(number * self.len, self.len);
        Buffer::new(Arc::clone(&self.arena), extent, Arc::new(()))
    }

    fn cpu_seconds(&self) -> f64 {
        let status = self.adapter.status();
        status["serde"][0]["cpu_seconds"]
            .as_f64()
            .unwrap_or_default()
    }

    /// GB/s by processor time and by the clock, of stores and loads.
    async fn round(&self) -> Result<[[f64; 2]; 2], Error> {
        let total = BYTES as f64 / 1e9;
        let mut speeds = [[0.0; 2]; 2];
        let keys = 0..BYTES / self.len;
        for number in keys.clone() {
            self.adapter
                .delete(vec![object(number, self.len)?.key])
                .await;
        }
        let (begin, cpu) = (Instant::now(), self.cpu_seconds());
        for number in keys.clone() {
            let (object, from) = (object(number, self.len)?, self.buffer(number));
            for result in self.adapter.store(vec![StoreItem { object, from }]).await {
                result?;
            }
        }
        speeds[0] = [
            total / (self.cpu_seconds() - cpu),
            total / begin.elapsed().as_secs_f64(),
        ];
        let (begin, cpu) = (Instant::now(), self.cpu_seconds());
        for number in keys {
            let (object, to) = (object(number, self.len)?, self.buffer(number));
            for result in self.adapter.load(vec![LoadItem { object, to }]).await {
                result?;
            }
        }
        speeds[1] = [
            total / (self.cpu_seconds() - cpu),
            total / begin.elapsed().as_secs_f64(),
        ];
        Ok(speeds)
    }
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    let directory = std::env::temp_dir().join(format!("serde_bench-{}", std::process::id()));
    std::fs::create_dir(&directory)?;
    let path = directory.join("key");
    std::fs::write(&path, [5; 32])?;
    let mut registry = kvtier_l2::testing::registry();
    registry.add(AdapterType::new("memory", "Objects in memory", &[], open))?;
    let mut plain = SplitMix64::new(1).bytes(BYTES as usize);
    for value in plain.chunks_exact_mut(2) {
        value[1] = (value[1] & 0x83) | 0x38;
    }
    println!(
        "len_kib bits frame   op    ring_gb_s copy_gb_s transform_gb_s of_ring of_both call_gb_s"
    );
    for (len, bits) in [
        (128_u64 << 10, 128),
        (2 << 20, 128),
        (2 << 20, 256),
        (16 << 20, 128),
    ] {
        for frame in ["lmcache", "bound", "compress"] {
            let serde = match frame {
                "compress" if bits == 256 => continue,
                "compress" => serde_json::json!({"type": "compress"}),
                frame => serde_json::json!({
                    "type": "aesgcm", "master_key_path": &path, "aes_bits": bits, "frame": frame}),
            };
            let config = serde_json::json!({"type": "memory", "checksums": 0, "serde": serde});
            let arena = Arena::create(ArenaKind::Anonymous, BYTES)?;
            let all = Extent::new(0, BYTES);
            arena.write(all, 0, &plain)?;
            let bench = Bench {
                adapter: registry.open(&registry.parse(&config)?)?,
                arena: Arc::new(arena),
                len,
            };
            let algorithm = if bits == 128 {
                &AES_128_GCM
            } else {
                &AES_256_GCM
            };
            let key = UnboundKey::new(algorithm, &[7; 32][..bits / 8]).map_err(|_| "bad key")?;
            let key = LessSafeKey::new(key);
            let mut data = vec![3; BYTES as usize];
            let mut scratch = vec![3; len as usize];
            let mut speeds: [[Vec<f64>; 4]; 2] = Default::default();
            for round in 0..=ROUNDS {
                let ring = ring_alone(&key, &mut data, len as usize)?;
                let copies = copies_alone(&bench, &mut scratch, &plain)?;
                let calls = bench.round().await?;
                // The first touches the memory.
                for operation in (0..2).filter(|_| round > 0) {
                    let [cpu, clock] = calls[operation];
                    for (all, one) in speeds[operation].iter_mut().zip([
                        ring[operation],
                        copies[operation],
                        cpu,
                        clock,
                    ]) {
                        all.push(one);
                    }
                }
            }
            for (name, all) in ["store", "load"].into_iter().zip(speeds) {
                let [ring, copy, cpu, clock] = all.map(median);
                let (kib, of_ring, of_both) =
                    (len >> 10, cpu / ring, cpu * (1.0 / ring + 1.0 / copy));
                println!(
                    "{kib:7} {bits:4} {frame:7} {name:5} {ring:9.2} {copy:9.2} {cpu:14.2} {of_ring:7.2} {of_both:7.2} {clock:9.2}"
                );
            }
        }
    }
    std::fs::remove_dir_all(directory)?;
    Ok(())
}
