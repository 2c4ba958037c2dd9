//! The link's own limit: plain copies between pinned memory and the GPU.

use std::path::Path;
use std::time::Instant;

use kvtier_device::cuda::driver::{
    Context, DeviceBuffer, Driver, Event, EventFlags, HostBuffer, Stream,
};
use serde_json::{Value, json};

use crate::{Result, Settings, median};

/// Bytes of the copy whose own time is taken off the latency of as small a transfer.
pub const SMALL: u64 = 64 << 10;

/// Measurements of the link; rates in bytes per second.
pub struct Link {
    /// GPU to host.
    pub store: f64,
    /// Host to GPU.
    pub retrieve: f64,
    /// Both ways at the same time, added up.
    pub both: f64,
    /// Seconds of a copy of [`SMALL`] bytes by the GPU's clock: GPU to host, host to GPU.
    pub small: [f64; 2],
}

impl Link {
    /// Medians of the settings' repeats, on the first GPU.
    pub fn measure(settings: &Settings) -> Result<Self> {
        let driver = Driver::load(settings.driver.as_deref().map(Path::new))?;
        let devices = driver.devices()?;
        let context = Context::retain(devices.first().ok_or("there is no GPU")?)?;
        context.make_current()?;
        let bytes = settings.link_bytes;
        let streams = [Stream::new(&context, 0)?, Stream::new(&context, 0)?];
        let pages = [
            DeviceBuffer::new(&context, bytes)?,
            DeviceBuffer::new(&context, bytes)?,
        ];
        let host = [
            HostBuffer::new(&context, bytes as usize)?,
            HostBuffer::new(&context, bytes as usize)?,
        ];
        let copy = |way: usize, bytes: u64| {
            let (host, pages) = (host[way].base().as_ptr(), pages[way].base());
            // SAFETY: each way has buffers of its own, of at least these bytes, which live until all copies have ended.
            unsafe {
                match way {
                    0 => streams[way].copy_to_host(host, pages, bytes as usize),
                    _ => streams[way].copy_to_device(pages, host, bytes as usize),
                }
            }
        };
        let rate = |ways: &[usize]| -> Result<f64> {
            let mut seconds = Vec::new();
            // The first ones wake the GPU up.
            for round in 0..settings.repeats + 2 {
                let began = Instant::now();
                for way in ways {
                    copy(*way, bytes)?;
                }
                for way in ways {
                    streams[*way].synchronize()?;
                }
                if round >= 2 {
                    seconds.push(began.elapsed().as_secs_f64());
                }
            }
            Ok((bytes * ways.len() as u64) as f64 / median(&seconds))
        };
        let small = |way: usize| -> Result<f64> {
            let [start, end] = [
                Event::new(&context, EventFlags::Timed)?,
                Event::new(&context, EventFlags::Timed)?,
            ];
            let mut seconds = Vec::new();
            for _ in 0..settings.repeats {
                start.record(&streams[way])?;
                copy(way, SMALL)?;
                end.record(&streams[way])?;
                streams[way].synchronize()?;
                seconds.push(f64::from(end.milliseconds_since(&start)?) / 1e3);
            }
            Ok(median(&seconds))
        };
        Ok(Self {
            store: rate(&[0])?,
            retrieve: rate(&[1])?,
            both: rate(&[0, 1])?,
            small: [small(0)?, small(1)?],
        })
    }

    /// For programs.
    pub fn json(&self) -> Value {
        json!({
            "store_bytes_per_second": self.store,
            "retrieve_bytes_per_second": self.retrieve,
            "both_bytes_per_second": self.both,
            "small_copy_bytes": SMALL,
            "small_copy_seconds": self.small,
        })
    }
}
