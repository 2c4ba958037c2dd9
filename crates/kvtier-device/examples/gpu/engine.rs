//! The other process: an engine that shares pages on the GPU.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use kvtier_core::random::SplitMix64;
use kvtier_device::cuda::driver::{Context, DeviceBuffer, Driver, HostBuffer, Stream};
use kvtier_device::cuda::uuid::Gpus;
use kvtier_device::{CudaAllocation, CudaStorage};

use crate::Result;

/// Marks a process of this program as the engine; value: bytes of the pages, a space, the driver library or nothing.
pub const VARIABLE: &str = "KVTIER_GPU_EXAMPLE_ENGINE";

/// The word of the pages at a place, counted in words of 8 bytes.
pub fn word(at: u64) -> u64 {
    SplitMix64::nth(0, at)
}

/// The engine, as the measuring process has it.
pub struct Engine {
    child: Child,
    say: ChildStdin,
    hear: BufReader<ChildStdout>,
    uuid: String,
    handle: [u8; 64],
}

impl Engine {
    /// Starts an engine with `bytes` of pages, filled with [`word`].
    pub fn start(bytes: u64, driver: Option<&Path>) -> Result<Self> {
        let driver = driver.map_or(String::new(), |path| path.display().to_string());
        let mut command = Command::new(std::env::current_exe()?);
        if cfg!(test) {
            command.args(["--exact", "--ignored", "--nocapture", "tests::engine"]);
        }
        let mut child = command
            .env(VARIABLE, format!("{bytes} {driver}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (say, hear) = pipes.ok_or("the engine has no pipes")?;
        let mut engine = Self {
            child,
            say,
            hear: BufReader::new(hear),
            uuid: String::new(),
            handle: [0; 64],
        };
        let answer = engine.answer()?;
        let (uuid, handle) = answer.split_once(' ').ok_or("the engine exports nothing")?;
        engine.uuid = uuid.to_owned();
        for (byte, at) in engine.handle.iter_mut().zip((0..).step_by(2)) {
            let digits = handle.get(at..at + 2).ok_or("a handle too short")?;
            *byte = u8::from_str_radix(digits, 16)?;
        }
        Ok(engine)
    }

    /// Fills the pages with [`word`] again.
    pub fn fill(&mut self) -> Result<()> {
        writeln!(self.say, "fill")?;
        self.answer().map(drop)
    }

    /// A piece of the pages, as PyTorch 2.13 exports one.
    pub fn storage(&self, offset: u64, bytes: u64) -> CudaStorage {
        CudaStorage {
            device_uuid: self.uuid.clone(),
            allocation: CudaAllocation::Torch {
                handle: Some([b"\x03c".as_slice(), &self.handle].concat()),
                ref_counter: None,
                event: None,
            },
            offset,
            bytes,
        }
    }

    fn answer(&mut self) -> Result<String> {
        let mut line = String::new();
        loop {
            line.clear();
            if self.hear.read_line(&mut line)? == 0 {
                return Err("the engine ended; what it said is above".into());
            }
            // A test harness writes lines of its own.
            if let Some((_, answer)) = line.trim_end().split_once("=> ") {
                return Ok(answer.to_owned());
            }
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Main function of the other process: shares pages and fills them on command, until its input ends.
pub fn run(settings: &str) -> Result<()> {
    let (bytes, driver) = settings.split_once(' ').ok_or("no bytes and driver")?;
    let bytes: u64 = bytes.parse()?;
    let driver = Driver::load((!driver.is_empty()).then_some(Path::new(driver)))?;
    let gpus = Gpus::find(&driver)?;
    let gpu = gpus.all().first().ok_or("there is no GPU")?;
    let context = Context::retain(&gpu.device)?;
    context.make_current()?;
    let stream = Stream::new(&context, 0)?;
    let pages = DeviceBuffer::new(&context, bytes)?;
    let source = HostBuffer::new(&context, usize::try_from(bytes)?)?;
    // SAFETY: the buffer is ours, aligned to pages, and as long.
    let words = unsafe {
        std::slice::from_raw_parts_mut(source.base().cast::<u64>().as_ptr(), bytes as usize / 8)
    };
    words
        .iter_mut()
        .zip(0..)
        .for_each(|(to, at)| *to = word(at));
    let fill = || {
        // SAFETY: both buffers have these bytes and live as long as this process.
        unsafe { stream.copy_to_device(pages.base(), source.base().as_ptr(), bytes as usize)? };
        stream.synchronize()
    };
    fill()?;
    let handle = pages.ipc_handle()?.0;
    let handle: String = handle.iter().map(|byte| format!("{byte:02x}")).collect();
    println!("=> {} {handle}", gpu.uuid);
    for line in std::io::stdin().lines() {
        line?;
        fill()?;
        println!("=> filled");
    }
    Ok(())
}
