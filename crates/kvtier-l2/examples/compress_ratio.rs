//! Whether lossless compression of KV pays: ratio and speed on one thread, per plane of bytes and together.
//!
//! `cargo run --release -p kvtier-l2 --example compress_ratio`. The values are **synthetic**: normally distributed, each channel
//! with a scale of its own (log-normal), every 64th an outlier, keys with a mean per channel. Real KV has more structure (so
//! these ratios are rather a lower bound for it), but no repeated bytes either.
//!
//! Plane `exp` of bf16 and fp16 has the bits of the exponent, `man` the eight lowest of sign and mantissa, `upper` the upper byte of
//! each value; of fp8, int8 and raw bytes there is one plane. int8 has a scale per channel, as KV that is quantized to it has.

use std::sync::Arc;
use std::time::Instant;

use kvtier_core::ChunkHash;
use kvtier_core::object_key::ObjectKey;
use kvtier_core::random::SplitMix64;
use kvtier_l2::{Buffer, LoadItem, ObjectSpec, StoreItem};
use kvtier_memory::{Arena, ArenaKind, Extent};

type Error = Box<dyn std::error::Error>;

/// Elements of an object: 256 tokens of 8 heads of 128, keys and values.
const TOKENS: usize = 256;
const CHANNELS: usize = 1024;

struct Normal(SplitMix64);

impl Normal {
    fn uniform(&mut self) -> f64 {
        (self.0.next() >> 11) as f64 / (1_u64 << 53) as f64 + 1e-18
    }

    fn next(&mut self) -> f64 {
        let (u, v) = (self.uniform(), self.uniform());
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    }
}

fn values() -> Vec<f32> {
    let mut random = Normal(SplitMix64::new(42));
    let mut all = Vec::new();
    for part in 0..2 {
        let channel = |at: usize, random: &mut Normal| {
            let outlier = if at.is_multiple_of(64) { 8.0 } else { 1.0 };
            let scale = (0.7 * random.next()).exp() * outlier;
            let mean = if part == 0 {
                random.next() * scale
            } else {
                0.0
            };
            (mean, scale)
        };
        let channels: Vec<_> = (0..CHANNELS).map(|at| channel(at, &mut random)).collect();
        for _ in 0..TOKENS {
            all.extend(
                channels
                    .iter()
                    .map(|(mean, scale)| (mean + scale * random.next()) as f32),
            );
        }
    }
    all
}

fn bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// Half precision, rounded to nearest; values below the smallest normal one are 0.
fn fp16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16) & 0x8000;
    // A carry of the mantissa goes into the exponent.
    let rounded = (bits & 0x7fff_ffff) + 0xfff + ((bits >> 13) & 1);
    let code = match (rounded >> 13).checked_sub(112 << 10) {
        Some(code) if code >= 1 << 10 => code.min(0x7bff),
        _ => 0,
    };
    (sign | code) as u16
}

/// Returns int8 codes, scaled per channel so that its largest value becomes 127 or -127.
fn int8(values: &[f32]) -> Vec<u8> {
    let mut largest = vec![0.0_f32; 2 * CHANNELS];
    let channel = |at: usize| at / (TOKENS * CHANNELS) * CHANNELS + at % CHANNELS;
    for (at, value) in values.iter().enumerate() {
        let most = &mut largest[channel(at)];
        *most = most.max(value.abs());
    }
    let code =
        |(at, value): (usize, &f32)| (value / largest[channel(at)] * 127.0).round() as i8 as u8;
    values.iter().enumerate().map(code).collect()
}

/// e4m3fn, rounded to nearest, saturated; `scale` brings the largest value to 448.
fn e4m3(value: f32, scale: f32) -> u8 {
    let sign = if value < 0.0 { 0x80 } else { 0 };
    let scaled = (value.abs() * scale).min(448.0);
    let exponent = scaled.log2().floor().clamp(-6.0, 8.0);
    let steps = (scaled / (exponent - 3.0).exp2()).round() as u8;
    // A subnormal has exponent bits of 0; a carry goes into the exponent.
    let code = (exponent as i32 + 6) * 8 + i32::from(steps);
    sign | (code.clamp(0, 0x7e) as u8)
}

struct Codec {
    name: &'static str,
    pack: fn(&[u8]) -> Result<Vec<u8>, Error>,
    unpack: fn(&[u8], usize) -> Result<Vec<u8>, Error>,
}

fn zstd_at<const LEVEL: i32>(plain: &[u8]) -> Result<Vec<u8>, Error> {
    Ok(zstd::bulk::compress(plain, LEVEL)?)
}

fn unzstd(packed: &[u8], len: usize) -> Result<Vec<u8>, Error> {
    Ok(zstd::bulk::decompress(packed, len)?)
}

const CODECS: &[Codec] = &[
    Codec {
        name: "zstd-1",
        pack: zstd_at::<1>,
        unpack: unzstd,
    },
    Codec {
        name: "zstd-3",
        pack: zstd_at::<3>,
        unpack: unzstd,
    },
    Codec {
        name: "zstd--1",
        pack: zstd_at::<-1>,
        unpack: unzstd,
    },
    Codec {
        name: "lz4",
        pack: |plain| Ok(lz4_flex::block::compress(plain)),
        unpack: |packed, len| Ok(lz4_flex::block::decompress(packed, len)?),
    },
];

/// Ratio, and GB/s of plain bytes packed and unpacked, medians of rounds.
fn measure(codec: &Codec, plain: &[u8]) -> Result<(f64, f64, f64), Error> {
    const ROUNDS: usize = 9;
    let (mut pack, mut unpack) = (Vec::new(), Vec::new());
    let mut len = 0;
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        let packed = (codec.pack)(plain)?;
        pack.push(begin.elapsed().as_secs_f64());
        let begin = Instant::now();
        let back = (codec.unpack)(&packed, plain.len())?;
        unpack.push(begin.elapsed().as_secs_f64());
        if back != plain {
            return Err("other bytes come back".into());
        }
        len = packed.len();
    }
    let speed = |mut all: Vec<f64>| {
        all.sort_by(f64::total_cmp);
        plain.len() as f64 / 1e9 / all[ROUNDS / 2]
    };
    Ok((plain.len() as f64 / len as f64, speed(pack), speed(unpack)))
}

/// Stores and loads `plain` through a tier with `"serde": {"type": "compress"}`: ratio, and GB/s of processor time of both.
async fn of_kvtier(plain: &[u8]) -> Result<(f64, f64), Error> {
    const ROUNDS: u64 = 50;
    let registry = kvtier_l2::testing::registry();
    let config = serde_json::json!({
        "type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 1000, "serde": {"type": "compress"}});
    let adapter = registry.open(&registry.parse(&config)?)?;
    let arena = Arc::new(Arena::create(ArenaKind::Anonymous, plain.len() as u64)?);
    let buffer = Buffer::new(arena, Extent::new(0, plain.len() as u64), Arc::new(()));
    buffer.write(0, plain)?;
    for number in 0..ROUNDS {
        let hash: [u8; 32] = SplitMix64::new(number)
            .bytes(32)
            .try_into()
            .unwrap_or_default();
        let key = ObjectKey::new(ChunkHash(hash), "org/model", 0x0101_0000, 0, "")?;
        let object = ObjectSpec {
            key,
            len: plain.len() as u64,
            layout: 1,
        };
        let (from, to) = (buffer.clone(), buffer.clone());
        let item = StoreItem {
            object: object.clone(),
            from,
        };
        for result in adapter.store(vec![item]).await {
            result?;
        }
        for result in adapter.load(vec![LoadItem { object, to }]).await {
            result?;
        }
    }
    let part = &adapter.status()["serde"][0];
    let number = |name: &str| part[name].as_f64().unwrap_or_default();
    let speed = 2.0 * (ROUNDS as f64) * plain.len() as f64 / 1e9 / number("cpu_seconds");
    Ok((1.0 / number("ratio"), speed))
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    let values = values();
    let raw: Vec<u16> = values.iter().map(|value| bf16(*value)).collect();
    let bytes: Vec<u8> = raw.iter().flat_map(|value| value.to_le_bytes()).collect();
    // The exponent is in the upper byte once the sign has gone round to the lowest bit.
    let turned: Vec<u16> = raw.iter().map(|value| value.rotate_left(1)).collect();
    let exponents: Vec<u8> = turned.iter().map(|value| (value >> 8) as u8).collect();
    let mantissas: Vec<u8> = turned.iter().map(|value| *value as u8).collect();
    let split: Vec<u8> = raw.iter().map(|value| (value >> 8) as u8).collect();
    let largest = values
        .iter()
        .fold(0.0_f32, |most, value| most.max(value.abs()));
    let fp8: Vec<u8> = values
        .iter()
        .map(|value| e4m3(*value, 448.0 / largest))
        .collect();
    let half: Vec<u16> = values.iter().map(|value| fp16(*value)).collect();
    let half_bytes: Vec<u8> = half.iter().flat_map(|value| value.to_le_bytes()).collect();
    let half_exponents: Vec<u8> = half
        .iter()
        .map(|value| ((value >> 10) & 31) as u8)
        .collect();
    let half_upper: Vec<u8> = half.iter().map(|value| (value >> 8) as u8).collect();
    let half_mantissas: Vec<u8> = half.iter().map(|value| *value as u8).collect();
    let integers = int8(&values);
    println!(
        "synthetic KV, {} elements; GB/s of plain bytes on one thread",
        values.len()
    );
    println!("data         codec    ratio pack_gb_s unpack_gb_s");
    for (name, data) in [
        ("bf16 raw", &bytes),
        ("bf16 exp", &exponents),
        ("bf16 man", &mantissas),
        ("bf16 upper", &split),
        ("fp16 raw", &half_bytes),
        ("fp16 exp", &half_exponents),
        ("fp16 upper", &half_upper),
        ("fp16 man", &half_mantissas),
        ("fp8 e4m3", &fp8),
        ("int8", &integers),
    ] {
        for codec in CODECS {
            let (ratio, pack, unpack) = measure(codec, data)?;
            println!(
                "{name:12} {:8} {ratio:5.3} {pack:9.2} {unpack:11.2}",
                codec.name
            );
        }
    }
    for (name, kept, part) in [
        ("bf16", "mantissas", &exponents),
        ("fp16", "lower bytes", &half_upper),
    ] {
        for codec in CODECS {
            let (ratio, pack, unpack) = measure(codec, part)?;
            let whole = 2.0 / (1.0 + 1.0 / ratio);
            println!(
                "{name} whole, {kept} as they are, {:8}: ratio {whole:.3}, at most {:.2} and {:.2} GB/s without splitting",
                codec.name,
                2.0 * pack,
                2.0 * unpack
            );
        }
    }
    let (ratio, speed) = of_kvtier(&bytes).await?;
    println!(
        "bf16 whole, serde compress: ratio {ratio:.3}, stores and loads {speed:.2} GB/s with copies and checksums"
    );
    let (ratio, speed) = of_kvtier(&vec![0; bytes.len()]).await?;
    println!("zeroes, serde compress: ratio {ratio:.3}, stores and loads {speed:.2} GB/s");
    Ok(())
}
