//! Events between processes: the engine's with a request, and ours with an answer.
//!
//! Another process's event is only queried. No stream of ours waits for it: a wait for a process that died never ends,
//! and blocks the stream and its memory.
//!
//! | form | bytes |
//! | --- | --- |
//! | driver event | 64: the driver's IPC handle |
//! | timeline event (isolated IPC) | 81, big-endian: version 1 (u8), handle of a buffer of 4096 values (64 bytes), offset in it (u64), value (u64) |
//!
//! A timeline event is complete when the value at its offset has reached its own. Values only grow, from 0.
//!
//! Each lock guards one table or number, and no other is acquired inside: `buffers` the open timelines of a worker,
//! `reader` its staging memory, `next` the free slots of our timeline, `last` the value of a slot, `ring` the events
//! of a stream.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use kvtier_common::sync::Mutex;

use super::allocations::{Allocations, Mapped, OpenError};
use super::driver::{
    Context, DeviceBuffer, DevicePtr, Event, EventFlags, HostBuffer, IpcHandle, Stream,
};
use super::error::CudaError;
use crate::error::LayoutError;

/// Bytes of a timeline event.
pub const TIMELINE_BYTES: usize = 81;
/// Version of the timeline events' encoding.
const TIMELINE_VERSION: u8 = 1;
/// Bytes of a timeline buffer.
const BUFFER_BYTES: u64 = 32 << 10;
/// Bytes of a value.
const SLOT_BYTES: u64 = 8;
/// Maximum number of foreign timeline buffers per worker; a process has one per GPU.
const MAX_BUFFERS: usize = 64;
/// Exported events that are kept, as many as by LMCache 0.5.6: an event must live until the other process has opened it,
/// and must not be recorded again while it may be queried.
const MAX_EXPORTED: usize = 2048;

/// Opens the events of one worker.
#[derive(Debug)]
pub struct ForeignEvents {
    allocations: Arc<Allocations>,
    /// Timeline buffers, open as long as the worker is registered.
    buffers: Mutex<HashMap<IpcHandle, Arc<Buffer>>>,
    /// Our own timeline, which this process cannot open by its handle.
    own: Option<Arc<Timeline>>,
}

impl ForeignEvents {
    /// For one worker. `own` is this process's timeline.
    pub fn new(allocations: Arc<Allocations>, own: Option<Arc<Timeline>>) -> Self {
        Self {
            allocations,
            buffers: Mutex::default(),
            own,
        }
    }

    /// Opens an event by its bytes; empty bytes are a completed event.
    ///
    /// # Errors
    /// Bytes of neither form, or the driver's error.
    pub fn open(&self, bytes: &[u8]) -> Result<ForeignEvent, OpenError> {
        if bytes.is_empty() {
            return Ok(ForeignEvent(EventState::Complete));
        }
        if let Ok(handle) = bytes.try_into() {
            let event = Event::open(self.allocations.context(), &IpcHandle(handle));
            return match event {
                Ok(event) => Ok(ForeignEvent(EventState::Driver(event))),
                Err(source) => Err(cuda(source)),
            };
        }
        let event = TimelineEvent::parse(bytes)?;
        if event.number == 0 {
            return Ok(ForeignEvent(EventState::Complete));
        }
        Ok(ForeignEvent(EventState::Value {
            buffer: self.buffer(&event.buffer)?,
            offset: event.offset,
            number: event.number,
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
        // Two threads may open the same buffer; the second mapping is dropped after the lock is released.
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
                BufferMemory::Own {
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
                (mapped.base(), BufferMemory::Foreign { _mapped: mapped })
            }
        };
        Ok(Buffer {
            reader: Mutex::new(ValueReader::new(context).map_err(cuda)?),
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
pub struct ForeignEvent(EventState);

#[derive(Debug)]
enum EventState {
    Complete,
    Driver(Event),
    Value {
        buffer: Arc<Buffer>,
        offset: u64,
        number: u64,
    },
}

impl ForeignEvent {
    /// Whether the work before the event is done. Does not wait for the other process.
    ///
    /// # Errors
    /// The driver's error.
    pub fn is_complete(&self) -> Result<bool, CudaError> {
        match &self.0 {
            EventState::Complete => Ok(true),
            EventState::Driver(event) => event.is_complete(),
            EventState::Value {
                buffer,
                offset,
                number,
            } => buffer.has_reached(*offset, *number),
        }
    }
}

/// The fields of a timeline event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TimelineEvent {
    buffer: IpcHandle,
    offset: u64,
    number: u64,
}

impl TimelineEvent {
    fn parse(bytes: &[u8]) -> Result<Self, LayoutError> {
        let refuse =
            |value: String, allowed: &str| Err(LayoutError::new("event handle", value, allowed));
        let Ok(bytes) = <&[u8; TIMELINE_BYTES]>::try_from(bytes) else {
            let value = format!("{} bytes", bytes.len());
            return refuse(value, "64 bytes, 81 with isolated IPC, or none");
        };
        let (&[version], rest) = bytes.split_first_chunk().unwrap_or((&[0], &[]));
        if version != TIMELINE_VERSION {
            return refuse(format!("of version {version}"), "version 1");
        }
        let mut event = Self {
            buffer: IpcHandle([0; 64]),
            offset: 0,
            number: 0,
        };
        let (buffer, numbers) = rest.split_at(64);
        event.buffer.0.copy_from_slice(buffer);
        if let ([offset, number], []) = numbers.as_chunks() {
            event.offset = u64::from_be_bytes(*offset);
            event.number = u64::from_be_bytes(*number);
        }
        if event.offset >= BUFFER_BYTES || !event.offset.is_multiple_of(SLOT_BYTES) {
            return refuse(
                format!("at offset {}", event.offset),
                "a multiple of 8 below 32768",
            );
        }
        Ok(event)
    }

    fn write(&self) -> [u8; TIMELINE_BYTES] {
        let mut bytes = [0; TIMELINE_BYTES];
        bytes[0] = TIMELINE_VERSION;
        bytes[1..65].copy_from_slice(&self.buffer.0);
        bytes[65..73].copy_from_slice(&self.offset.to_be_bytes());
        bytes[73..].copy_from_slice(&self.number.to_be_bytes());
        bytes
    }
}

/// An open timeline buffer and its reader.
#[derive(Debug)]
struct Buffer {
    reader: Mutex<ValueReader>,
    base: DevicePtr,
    _memory: BufferMemory,
}

/// Owner of the buffer's memory.
#[derive(Debug)]
enum BufferMemory {
    Own { _timeline: Arc<Timeline> },
    Foreign { _mapped: Mapped },
}

impl Buffer {
    /// See [`ValueReader::has_reached`]. `false` while another thread uses the reader.
    fn has_reached(&self, offset: u64, number: u64) -> Result<bool, CudaError> {
        let at = DevicePtr(self.base.0 + offset);
        let Some(mut reader) = self.reader.try_lock() else {
            return Ok(false);
        };
        // SAFETY: parsing checked the offset against the buffer's size, and the buffer is open as long as its reader.
        unsafe { reader.has_reached(at, number) }
    }
}

/// Reads single values of GPU memory on its own stream.
#[derive(Debug)]
struct ValueReader {
    stream: Stream,
    number: HostBuffer,
    /// Address of the read in flight.
    reading: Option<DevicePtr>,
    /// Last value read per address. Values only grow.
    known: HashMap<DevicePtr, u64>,
}

impl ValueReader {
    fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        Ok(Self {
            stream: Stream::new(context, i32::MIN)?,
            number: HostBuffer::new(context, SLOT_BYTES as usize)?,
            reading: None,
            known: HashMap::new(),
        })
    }

    /// Whether the value at an address is known to have reached `number`. Does not wait: if it is not known, a read is
    /// started, unless one is in flight, and a later call sees the result.
    ///
    /// # Safety
    /// The address has eight bytes of GPU memory that live as long as this.
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

    /// Reads a value and waits for it.
    ///
    /// # Safety
    /// As for [`ValueReader::has_reached`].
    unsafe fn read(&mut self, at: DevicePtr) -> Result<u64, CudaError> {
        let context = Arc::clone(self.stream.context());
        let _current = context.enter()?;
        // SAFETY: promised by the caller.
        unsafe { self.start(at) }?;
        self.stream.synchronize()?;
        self.take();
        Ok(self.known.get(&at).copied().unwrap_or(0))
    }

    /// Starts to read a value.
    ///
    /// # Safety
    /// As for [`ValueReader::has_reached`]; no read is in flight, and the context is current.
    unsafe fn start(&mut self, at: DevicePtr) -> Result<(), CudaError> {
        let to = self.number.base().as_ptr();
        // SAFETY: the caller promises for the source; the destination is as long, ours, and lives.
        unsafe { self.stream.copy_to_host(to, at, SLOT_BYTES as usize) }?;
        self.reading = Some(at);
        Ok(())
    }

    /// Stores the result of the completed read.
    fn take(&mut self) {
        if let Some(at) = self.reading.take() {
            // SAFETY: pinned memory begins at a page, and the copy is done.
            let number = unsafe { self.number.base().cast::<u64>().read_volatile() };
            self.known.insert(at, number);
        }
    }
}

impl Drop for ValueReader {
    /// Waits for a read in flight, which writes memory that is about to be freed.
    fn drop(&mut self) {
        if self.reading.is_some() {
            let _current = self.stream.context().enter();
            let _ = self.stream.synchronize();
        }
    }
}

/// Our own timeline buffer, for isolated IPC.
#[derive(Debug)]
pub struct Timeline {
    buffer: DeviceBuffer,
    handle: IpcHandle,
    /// Next free slot; slot 0 is for the trial.
    next: Mutex<u64>,
}

impl Timeline {
    /// Allocates a zeroed buffer, after a trial that a stream can write values.
    ///
    /// # Errors
    /// The driver's error; a GPU or driver that cannot write values from a stream.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>, CudaError> {
        let buffer = DeviceBuffer::new(context, BUFFER_BYTES)?;
        let handle = buffer.ipc_handle()?;
        let mut reader = ValueReader::new(context)?;
        {
            let _current = context.enter()?;
            // SAFETY: the buffer is ours, and lives until the stream is idle.
            unsafe { reader.stream.fill(buffer.base(), 0, BUFFER_BYTES as usize) }?;
            reader.stream.synchronize()?;
            // SAFETY: as above; the read below waits for it.
            unsafe { reader.stream.write_value(buffer.base(), 1) }?;
        }
        // SAFETY: it is the buffer's first value.
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

    /// Returns a free slot for the events of one stream.
    ///
    /// # Errors
    /// All 4095 slots are taken.
    pub fn slot(self: &Arc<Self>) -> Result<TimelineSlot, LayoutError> {
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
        Ok(TimelineSlot {
            timeline: self.clone(),
            offset,
            last: Mutex::new(0),
        })
    }
}

/// The timeline slot of one stream: its value grows by one per event.
#[derive(Debug)]
pub struct TimelineSlot {
    timeline: Arc<Timeline>,
    offset: u64,
    last: Mutex<u64>,
}

impl TimelineSlot {
    /// Records an event after the work on the stream and returns its bytes for the other process. Always the same stream,
    /// whose context must be current.
    ///
    /// # Errors
    /// The driver's error.
    pub fn record(&self, stream: &Stream) -> Result<[u8; TIMELINE_BYTES], CudaError> {
        // Held until the write is submitted, so that values are written in order.
        let mut last = self.last.lock();
        let number = *last + 1;
        let at = DevicePtr(self.timeline.buffer.base().0 + self.offset);
        // SAFETY: inside the buffer, which lives as long as the GPU is in use; the slot has no other user.
        unsafe { stream.write_value(at, number) }?;
        *last = number;
        let event = TimelineEvent {
            buffer: self.timeline.handle,
            offset: self.offset,
            number,
        };
        Ok(event.write())
    }
}

/// Driver events that other processes query: each is kept until 2048 later ones were recorded.
#[derive(Debug)]
pub struct ExportedEvents {
    context: Arc<Context>,
    ring: Mutex<VecDeque<(Event, IpcHandle)>>,
    kept: usize,
}

impl ExportedEvents {
    /// Creates an empty ring. Events are created on demand, and reused once there are 2048.
    pub fn new(context: Arc<Context>) -> Self {
        Self::keeping(context, MAX_EXPORTED)
    }

    fn keeping(context: Arc<Context>, kept: usize) -> Self {
        Self {
            context,
            ring: Mutex::default(),
            kept,
        }
    }

    /// Records an event after the work on the stream and returns its handle for the other process. The stream's context
    /// must be current.
    ///
    /// # Errors
    /// The driver's error.
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
        let error = TimelineEvent::parse(bytes).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }

    #[test]
    fn timeline_events_are_encoded_as_in_the_protocol() {
        let mut bytes = vec![1];
        bytes.extend(0..64);
        bytes.extend([0, 0, 0, 0, 0, 0, 0, 136]);
        bytes.extend([0, 0, 0, 0, 0, 0, 0, 99]);
        let event = TimelineEvent::parse(&bytes).unwrap();
        assert_eq!((event.offset, event.number), (136, 99));
        assert_eq!(event.buffer.0, std::array::from_fn(|at| at as u8));
        assert_eq!(event.write(), *bytes);
    }

    #[test]
    fn timeline_events_outside_the_buffer_are_refused() {
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
        assert_eq!(
            TimelineEvent::parse(&with(71, 127)).unwrap().offset,
            127 << 8
        );
    }

    proptest! {
        #[test]
        fn any_timeline_event_is_inside_the_buffer(mut bytes in prop::collection::vec(any::<u8>(), 81)) {
            bytes[0] = 1;
            bytes[65..71].fill(0);
            if let Ok(event) = TimelineEvent::parse(&bytes) {
                prop_assert!(event.offset + 8 <= BUFFER_BYTES);
                prop_assert_eq!(event.write().to_vec(), bytes);
            }
        }
    }
}
