//! Events between processes: what an engine sends with a request, and what it is answered with.
//!
//! Another process's event is only ever asked whether it is complete. It never goes on a stream of ours: a wait for a
//! process that died ends never, and takes the stream and all its memory with it.
//!
//! There are two forms. The driver's own is a handle of 64 bytes. With isolated IPC an event is a place in memory and
//! the number that will be there: 81 bytes, version 1 (u8), handle of a buffer of 4096 numbers (64 bytes), offset in it
//! (u64), number (u64), all big-endian. Such a number only grows, and 0 is reached from the start.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;

use super::allocations::{Allocations, Mapped, OpenError};
use super::driver::{
    Context, DeviceBuffer, DevicePtr, Event, EventFlags, HostBuffer, IpcHandle, Stream,
};
use super::error::CudaError;
use crate::error::LayoutError;

/// Bytes of an event of isolated IPC.
pub const TIMELINE_BYTES: usize = 81;
/// Version of those.
const VERSION: u8 = 1;
/// Bytes of a buffer of numbers.
const BUFFER_BYTES: u64 = 32 << 10;
/// Bytes of a number.
const SLOT_BYTES: u64 = 8;
/// Most buffers of others that one worker's events may be in: a process has one for each GPU.
const MAX_BUFFERS: usize = 64;
/// Exported events that are kept: LMCache 0.5.6 keeps as many, for an event must live until the other side has opened
/// it, and must not be recorded anew while it may be asked.
const EXPORTED: usize = 2048;

/// Opens the events one worker sends.
#[derive(Debug)]
pub struct ForeignEvents {
    allocations: Arc<Allocations>,
    /// Buffers of numbers stay open as long as the worker does.
    buffers: Mutex<HashMap<IpcHandle, Arc<Buffer>>>,
    /// Numbers of our own, which we cannot open.
    own: Option<Arc<Timeline>>,
}

impl ForeignEvents {
    /// For one worker. `own` is where our own events are with isolated IPC.
    pub fn new(allocations: Arc<Allocations>, own: Option<Arc<Timeline>>) -> Self {
        Self {
            allocations,
            buffers: Mutex::default(),
            own,
        }
    }

    /// Opens an event by what was sent. No bytes mean that there is nothing to wait for.
    ///
    /// # Errors
    /// Bytes of neither form, or what the driver says.
    pub fn open(&self, bytes: &[u8]) -> Result<ForeignEvent, OpenError> {
        if bytes.is_empty() {
            return Ok(ForeignEvent(State::Complete));
        }
        if let Ok(handle) = bytes.try_into() {
            let event = Event::open(self.allocations.context(), &IpcHandle(handle));
            return match event {
                Ok(event) => Ok(ForeignEvent(State::Driver(event))),
                Err(source) => Err(cuda(source)),
            };
        }
        let moment = Moment::parse(bytes)?;
        if moment.number == 0 {
            return Ok(ForeignEvent(State::Complete));
        }
        Ok(ForeignEvent(State::Number {
            buffer: self.buffer(&moment.buffer)?,
            offset: moment.offset,
            number: moment.number,
        }))
    }

    fn buffer(&self, handle: &IpcHandle) -> Result<Arc<Buffer>, OpenError> {
        let buffers = self.buffers.lock();
        if let Some(known) = buffers.get(handle) {
            return Ok(known.clone());
        }
        if buffers.len() >= MAX_BUFFERS {
            return Err(LayoutError::new(
                "event handle",
                format!("in buffer {} of this worker", MAX_BUFFERS + 1),
                format!("at most {MAX_BUFFERS} buffers"),
            )
            .into());
        }
        // Two may open the same one at once: the later one goes, when the lock is released.
        drop(buffers);
        let buffer = Arc::new(self.open_buffer(handle)?);
        let mut buffers = self.buffers.lock();
        Ok(buffers
            .entry(*handle)
            .or_insert_with(|| buffer.clone())
            .clone())
    }

    fn open_buffer(&self, handle: &IpcHandle) -> Result<Buffer, OpenError> {
        let context = self.allocations.context();
        let own = self.own.as_ref().filter(|own| own.handle == *handle);
        let (base, memory) = match own {
            Some(own) => (
                own.buffer.base(),
                Memory::Own {
                    _timeline: own.clone(),
                },
            ),
            None => {
                let mapped = self.allocations.open_ipc(handle)?;
                if mapped.bytes() < BUFFER_BYTES {
                    return Err(LayoutError::new(
                        "event handle",
                        format!("a buffer of {} bytes", mapped.bytes()),
                        format!("at least {BUFFER_BYTES} bytes"),
                    )
                    .into());
                }
                (mapped.base(), Memory::Foreign { _mapped: mapped })
            }
        };
        Ok(Buffer {
            reader: Mutex::new(Reader::new(context).map_err(cuda)?),
            base,
            _memory: memory,
        })
    }
}

fn cuda(source: CudaError) -> OpenError {
    OpenError::Cuda {
        what: "event of the request",
        source,
        hint: "needed: a living process on this machine, in the same IPC namespace",
    }
}

/// An event of another process.
#[derive(Debug)]
pub struct ForeignEvent(State);

#[derive(Debug)]
enum State {
    Complete,
    Driver(Event),
    Number {
        buffer: Arc<Buffer>,
        offset: u64,
        number: u64,
    },
}

impl ForeignEvent {
    /// Whether what it stands for is done. Waits for nothing of the other process.
    ///
    /// # Errors
    /// What the driver says.
    pub fn is_complete(&self) -> Result<bool, CudaError> {
        match &self.0 {
            State::Complete => Ok(true),
            State::Driver(event) => event.is_complete(),
            State::Number {
                buffer,
                offset,
                number,
            } => buffer.has_reached(*offset, *number),
        }
    }
}

/// An event of isolated IPC, as its bytes say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Moment {
    buffer: IpcHandle,
    offset: u64,
    number: u64,
}

impl Moment {
    fn parse(bytes: &[u8]) -> Result<Self, LayoutError> {
        let refuse =
            |value: String, allowed: &str| Err(LayoutError::new("event handle", value, allowed));
        let Ok(bytes) = <&[u8; TIMELINE_BYTES]>::try_from(bytes) else {
            let value = format!("{} bytes", bytes.len());
            return refuse(value, "64 bytes, 81 with isolated IPC, or none");
        };
        let (&[version], rest) = bytes.split_first_chunk().unwrap_or((&[0], &[]));
        if version != VERSION {
            return refuse(format!("of version {version}"), "version 1");
        }
        let mut moment = Self {
            buffer: IpcHandle([0; 64]),
            offset: 0,
            number: 0,
        };
        let (buffer, numbers) = rest.split_at(64);
        moment.buffer.0.copy_from_slice(buffer);
        if let ([offset, number], []) = numbers.as_chunks() {
            moment.offset = u64::from_be_bytes(*offset);
            moment.number = u64::from_be_bytes(*number);
        }
        if moment.offset >= BUFFER_BYTES || !moment.offset.is_multiple_of(SLOT_BYTES) {
            return refuse(
                format!("at offset {}", moment.offset),
                "a multiple of 8 below 32768",
            );
        }
        Ok(moment)
    }

    fn write(&self) -> [u8; TIMELINE_BYTES] {
        let mut bytes = [0; TIMELINE_BYTES];
        bytes[0] = VERSION;
        bytes[1..65].copy_from_slice(&self.buffer.0);
        bytes[65..73].copy_from_slice(&self.offset.to_be_bytes());
        bytes[73..].copy_from_slice(&self.number.to_be_bytes());
        bytes
    }
}

/// A buffer of numbers, and what reads them.
#[derive(Debug)]
struct Buffer {
    reader: Mutex<Reader>,
    base: DevicePtr,
    _memory: Memory,
}

/// What holds the buffer.
#[derive(Debug)]
enum Memory {
    Own { _timeline: Arc<Timeline> },
    Foreign { _mapped: Mapped },
}

impl Buffer {
    /// As [`Reader::has_reached`]; not known while somebody else asks, who is not waited for.
    fn has_reached(&self, offset: u64, number: u64) -> Result<bool, CudaError> {
        let at = DevicePtr(self.base.0 + offset);
        let Some(mut reader) = self.reader.try_lock() else {
            return Ok(false);
        };
        // SAFETY: offsets are checked when they are parsed, and the buffer is that large and open as long as its
        // reader.
        unsafe { reader.has_reached(at, number) }
    }
}

/// Reads single numbers of the GPU, on a stream that nobody else puts anything on.
#[derive(Debug)]
struct Reader {
    stream: Stream,
    number: HostBuffer,
    /// What is being read.
    reading: Option<DevicePtr>,
    /// What was read last. Numbers only grow.
    known: HashMap<DevicePtr, u64>,
}

impl Reader {
    fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        Ok(Self {
            stream: Stream::new(context, i32::MIN)?,
            number: context.allocate_host(SLOT_BYTES as usize)?,
            reading: None,
            known: HashMap::new(),
        })
    }

    /// Whether the number at an address is known to be as large. Waits for nothing: if not, it is being read from here
    /// on, unless another one still is; whoever asks next hears of it.
    ///
    /// # Safety
    /// Eight bytes of the GPU are at the address, and stay as long as this.
    unsafe fn has_reached(&mut self, at: DevicePtr, number: u64) -> Result<bool, CudaError> {
        let context = Arc::clone(self.stream.context());
        let _current = context.enter()?;
        if self.reading.is_some() && self.stream.is_idle()? {
            self.take();
        }
        if self.known.get(&at).is_some_and(|known| *known >= number) {
            return Ok(true);
        }
        if self.reading.is_none() {
            // SAFETY: promised by the caller.
            unsafe { self.start(at) }?;
        }
        Ok(false)
    }

    /// Reads a number and waits for it.
    ///
    /// # Safety
    /// As for [`Reader::has_reached`].
    unsafe fn read(&mut self, at: DevicePtr) -> Result<u64, CudaError> {
        let context = Arc::clone(self.stream.context());
        let _current = context.enter()?;
        // SAFETY: promised by the caller.
        unsafe { self.start(at) }?;
        self.stream.synchronize()?;
        self.take();
        Ok(self.known.get(&at).copied().unwrap_or(0))
    }

    /// # Safety
    /// As for [`Reader::has_reached`]; nothing is being read, and the context is current.
    unsafe fn start(&mut self, at: DevicePtr) -> Result<(), CudaError> {
        let to = self.number.base().as_ptr();
        // SAFETY: the caller promises for the source; the destination is as long, ours, and lives.
        unsafe { self.stream.copy_to_host(to, at, SLOT_BYTES as usize) }?;
        self.reading = Some(at);
        Ok(())
    }

    /// What was being read is there.
    fn take(&mut self) {
        if let Some(at) = self.reading.take() {
            // SAFETY: pinned memory begins at a page, and the copy is done.
            let number = unsafe { self.number.base().cast::<u64>().read_volatile() };
            self.known.insert(at, number);
        }
    }
}

impl Drop for Reader {
    /// A number that is being read goes into memory that is about to be freed.
    fn drop(&mut self) {
        if self.reading.is_some() {
            let _current = self.stream.context().enter();
            let _ = self.stream.synchronize();
        }
    }
}

/// Our own buffer of numbers, for isolated IPC.
#[derive(Debug)]
pub struct Timeline {
    buffer: DeviceBuffer,
    handle: IpcHandle,
    /// Number 0 is for trying things out.
    next: Mutex<u64>,
}

impl Timeline {
    /// A buffer with zeros, after trying what is needed for it.
    ///
    /// # Errors
    /// What the driver says; a GPU or driver that cannot write numbers from a stream.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>, CudaError> {
        let buffer = context.allocate(BUFFER_BYTES)?;
        let handle = buffer.ipc_handle()?;
        let mut reader = Reader::new(context)?;
        {
            let _current = context.enter()?;
            // SAFETY: the buffer is ours, and lives until the stream is idle.
            unsafe { reader.stream.fill(buffer.base(), 0, BUFFER_BYTES as usize) }?;
            reader.stream.synchronize()?;
            // SAFETY: as above; what reads it waits for it.
            unsafe { reader.stream.write_value(buffer.base(), 1) }?;
        }
        // SAFETY: it is the buffer's first number.
        let written = unsafe { reader.read(buffer.base()) }?;
        if written != 1 {
            return Err(CudaError::Call {
                function: "cuStreamWriteValue64_v2",
                code: super::error::code::NOT_SUPPORTED,
                name: format!("the number 1 was written, {written} is there"),
            });
        }
        Ok(Arc::new(Self {
            buffer,
            handle,
            next: Mutex::new(1),
        }))
    }

    /// A place for the events of one stream.
    ///
    /// # Errors
    /// All 4095 places are taken.
    pub fn lane(self: &Arc<Self>) -> Result<Lane, LayoutError> {
        let mut next = self.next.lock();
        let offset = *next * SLOT_BYTES;
        if offset >= BUFFER_BYTES {
            return Err(LayoutError::new(
                "streams with events",
                *next,
                "at most 4095",
            ));
        }
        *next += 1;
        Ok(Lane {
            timeline: self.clone(),
            offset,
            last: Mutex::new(0),
        })
    }
}

/// Where the events of one stream are: a number that grows by one with each.
#[derive(Debug)]
pub struct Lane {
    timeline: Arc<Timeline>,
    offset: u64,
    last: Mutex<u64>,
}

impl Lane {
    /// Records an event behind what is on the stream, and gives its bytes for the other side. Always the same stream,
    /// whose context must be current.
    ///
    /// # Errors
    /// What the driver says.
    pub fn record(&self, stream: &Stream) -> Result<[u8; TIMELINE_BYTES], CudaError> {
        // Held while it is put on the stream: numbers must arrive in their order.
        let mut last = self.last.lock();
        let number = *last + 1;
        let at = DevicePtr(self.timeline.buffer.base().0 + self.offset);
        // SAFETY: inside the buffer, which lives as long as the GPU is in use; nobody else has this place.
        unsafe { stream.write_value(at, number) }?;
        *last = number;
        let moment = Moment {
            buffer: self.timeline.handle,
            offset: self.offset,
            number,
        };
        Ok(moment.write())
    }
}

/// Events that others ask: each is kept until 2048 later ones were recorded.
#[derive(Debug)]
pub struct ExportedEvents {
    context: Arc<Context>,
    ring: Mutex<VecDeque<(Event, IpcHandle)>>,
    kept: usize,
}

impl ExportedEvents {
    /// None yet; they are made as they are needed, and used again when there are 2048.
    pub fn new(context: Arc<Context>) -> Self {
        Self::keeping(context, EXPORTED)
    }

    fn keeping(context: Arc<Context>, kept: usize) -> Self {
        Self {
            context,
            ring: Mutex::default(),
            kept,
        }
    }

    /// Records an event behind what is on the stream, and gives its handle for the other side. The stream's context
    /// must be current.
    ///
    /// # Errors
    /// What the driver says.
    pub fn record(&self, stream: &Stream) -> Result<[u8; 64], CudaError> {
        let mut ring = self.ring.lock();
        let oldest = (ring.len() >= self.kept)
            .then(|| ring.pop_front())
            .flatten();
        let (event, handle) = match oldest {
            Some(oldest) => oldest,
            None => {
                let event = Event::new(&self.context, EventFlags::Shared)?;
                let handle = event.ipc_handle()?;
                (event, handle)
            }
        };
        let recorded = event.record(stream);
        ring.push_back((event, handle));
        recorded.map(|()| handle.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn refused(bytes: &[u8], text: &str) {
        let error = Moment::parse(bytes).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }

    #[test]
    fn moments_are_read_and_written_as_the_protocol_has_them() {
        let mut bytes = vec![1];
        bytes.extend(0..64);
        bytes.extend([0, 0, 0, 0, 0, 0, 0, 136]);
        bytes.extend([0, 0, 0, 0, 0, 0, 0, 99]);
        let moment = Moment::parse(&bytes).unwrap();
        assert_eq!((moment.offset, moment.number), (136, 99));
        assert_eq!(moment.buffer.0, std::array::from_fn(|at| at as u8));
        assert_eq!(moment.write(), *bytes);
    }

    #[test]
    fn moments_outside_the_buffer_are_refused() {
        let with = |at: usize, byte: u8| {
            let mut bytes = [0; TIMELINE_BYTES];
            bytes[0] = 1;
            bytes[at] = byte;
            bytes
        };
        refused(&with(0, 2), "of version 2; allowed: version 1");
        refused(&with(72, 4), "at offset 4;");
        refused(&with(71, 128), "at offset 32768;");
        refused(&with(65, 128), "at offset 9223372036854775808;");
        refused(b"stub_ipc_handle", "15 bytes");
        refused(&[0; 80], "80 bytes");
        assert_eq!(Moment::parse(&with(71, 127)).unwrap().offset, 127 << 8);
    }

    proptest! {
        #[test]
        fn any_moment_is_inside_the_buffer(mut bytes in prop::collection::vec(any::<u8>(), 81)) {
            bytes[0] = 1;
            bytes[65..71].fill(0);
            if let Ok(moment) = Moment::parse(&bytes) {
                prop_assert!(moment.offset + 8 <= BUFFER_BYTES);
                prop_assert_eq!(moment.write().to_vec(), bytes);
            }
        }
    }
}
