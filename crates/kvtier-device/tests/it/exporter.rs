//! The fake driver in this process, and a second process that shares memory and events as engines do.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvtier_cuda_fake::fake_driver_path;
use kvtier_device::cuda::allocations::Allocations;
use kvtier_device::cuda::driver::{
    Allocation, Context, DeviceBuffer, DevicePtr, Driver, Event, HandleKind, HostBuffer, IpcHandle,
    Reservation, Stream,
};
use kvtier_device::cuda::events::{ExportedEvents, ForeignEvents, Timeline};
use kvtier_device::{CudaAllocation, CudaStorage, MemorySpec};
use libloading::Library;

/// What the fake driver's first GPU is called.
pub const UUID: &str = "5ca1ab1e-0000-4000-8000-000000000000";
/// Bytes of the allocation that the other process exports.
pub const EXPORTED_BYTES: u64 = 1 << 16;
/// Granularity of the fake driver's physical allocations.
pub const GRANULE: u64 = 2 << 20;

/// The fake driver's own functions.
pub struct FakeDriver(Library);

impl FakeDriver {
    /// Only one test has it at a time.
    pub fn alone() -> (Self, MutexGuard<'static, ()>) {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        (Self::load(), alone)
    }

    pub fn load() -> Self {
        // SAFETY: the fake driver has no conditions.
        Self(unsafe { Library::new(fake_driver_path().unwrap()) }.unwrap())
    }

    pub fn script(&self, text: &str) {
        let text = CString::new(text).unwrap();
        // SAFETY: that is its signature, and the text ends with a zero byte.
        let result = unsafe {
            let run = self
                .0
                .get::<unsafe extern "C" fn(*const c_char) -> c_int>("fake_driver_script");
            run.unwrap()(text.as_ptr())
        };
        assert_eq!(result, 0, "{text:?}");
    }

    /// Calls of a function since the last `clear`, or what else it counts.
    pub fn count(&self, what: &str) -> u64 {
        let what = CString::new(what).unwrap();
        // SAFETY: that is its signature, and the text ends with a zero byte.
        unsafe {
            let count = self
                .0
                .get::<unsafe extern "C" fn(*const c_char) -> u64>("fake_driver_count");
            count.unwrap()(what.as_ptr())
        }
    }

    pub fn violations(&self) -> String {
        type Violations = unsafe extern "C" fn(*mut c_char, usize) -> u64;
        let mut text = vec![0u8; 4096];
        // SAFETY: that is its signature, and the buffer has this size.
        unsafe {
            let violations = self.0.get::<Violations>("fake_driver_violations").unwrap();
            violations(text.as_mut_ptr().cast(), text.len());
        }
        CStr::from_bytes_until_nul(&text)
            .unwrap()
            .to_string_lossy()
            .into_owned()
    }
}

/// Creates a physical allocation of one granule, writes its handle to `handle`, and leaves it allocated. A server only
/// imports, so these two functions are called here by name.
fn export(device: c_int, kind: HandleKind, handle: *mut c_void) {
    /// `CUmemAllocationProp`: pinned memory of a device.
    #[repr(C)]
    struct Properties {
        kind: c_uint,
        handle_kinds: c_uint,
        location_kind: c_uint,
        device: c_int,
        win32: *mut c_void,
        flags: [u8; 8],
    }
    type Create = unsafe extern "C" fn(*mut u64, usize, *const Properties, u64) -> c_int;
    type Export = unsafe extern "C" fn(*mut c_void, u64, c_uint, u64) -> c_int;
    let properties = Properties {
        kind: 1,
        handle_kinds: kind as c_uint,
        location_kind: 1,
        device,
        win32: std::ptr::null_mut(),
        flags: [0; 8],
    };
    let FakeDriver(library) = FakeDriver::load();
    let mut allocation = 0;
    // SAFETY: these are the functions' signatures, and the caller's handle is as large as its kind.
    unsafe {
        let create = library.get::<Create>("cuMemCreate").unwrap();
        assert_eq!(create(&mut allocation, GRANULE as usize, &properties, 0), 0);
        let export = library
            .get::<Export>("cuMemExportToShareableHandle")
            .unwrap();
        assert_eq!(export(handle, allocation, kind as c_uint, 0), 0);
    }
}

/// The other process, which runs one command per line.
pub struct Exporter {
    child: Child,
    say: ChildStdin,
    hear: BufReader<ChildStdout>,
}

impl Exporter {
    pub fn start() -> Self {
        Self::with_script("")
    }

    /// With a script for its own fake driver.
    pub fn with_script(script: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "--ignored",
                "--nocapture",
                "exporter::other_process",
            ])
            .env("KVTIER_CUDA_FAKE", format!("devices=2; {script}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let say = child.stdin.take().unwrap();
        let hear = BufReader::new(child.stdout.take().unwrap());
        Self { child, say, hear }
    }

    pub fn ask(&mut self, what: &str) -> String {
        writeln!(self.say, "{what}").unwrap();
        let mut line = String::new();
        loop {
            line.clear();
            let heard = self.hear.read_line(&mut line).unwrap();
            assert_ne!(heard, 0, "the exporter ended at {what:?}");
            // The test harness writes lines of its own.
            if let Some((_, answer)) = line.trim_end_matches('\n').split_once("=> ") {
                return answer.to_owned();
            }
        }
    }

    pub fn bytes(&mut self, what: &str) -> Vec<u8> {
        unhex(&self.ask(what))
    }

    pub fn handle(&mut self) -> [u8; 64] {
        self.bytes("memory").try_into().unwrap()
    }

    /// The file of its PyTorch's counters, which it has mapped until it ends; the first of them is 1.
    pub fn counters(&mut self) -> Counters {
        Counters(self.ask("counters"))
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A file of counters, by its name; removed at the end.
pub struct Counters(pub String);

impl Drop for Counters {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(format!("/dev/shm{}", self.0));
    }
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn unhex(text: &str) -> Vec<u8> {
    let pair = |at| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(pair).collect()
}

/// A storage of the exporter's allocation, as PyTorch 2.13 exports it.
pub fn torch(handle: &[u8], offset: u64, bytes: u64) -> CudaStorage {
    CudaStorage {
        device_uuid: UUID.into(),
        allocation: CudaAllocation::Torch {
            handle: Some(if handle.len() == 64 {
                [b"\x03c", handle].concat()
            } else {
                handle.to_vec()
            }),
            ref_counter: None,
            event: None,
        },
        offset,
        bytes,
    }
}

pub fn spec(storage: CudaStorage) -> MemorySpec {
    MemorySpec::Cuda(Box::new(storage))
}

/// What the exporter keeps for other processes.
struct Exports {
    context: Arc<Context>,
    stream: Stream,
    buffer: DeviceBuffer,
    exported: ExportedEvents,
    lane: Option<kvtier_device::cuda::events::TimelineSlot>,
    opened: Option<Event>,
    segments: Vec<OwnedFd>,
    range: Option<Reservation>,
    /// More allocations, by number.
    more: Vec<DeviceBuffer>,
    /// Files of counters that were made.
    files: usize,
}

/// Makes such a file and maps it, as long as the process lives.
fn map_counters(path: &str) {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    use std::os::unix::fs::FileExt;
    let mut options = std::fs::File::options();
    let file = options
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)
        .unwrap();
    file.set_len(80_064).unwrap();
    file.write_all_at(&1i64.to_ne_bytes(), 64).unwrap();
    // SAFETY: a mapping at an address of the system's choice, which is not accessed.
    unsafe {
        let null = std::ptr::null_mut();
        mmap(null, 80_064, ProtFlags::READ, MapFlags::SHARED, &file, 0).unwrap();
    }
}

impl Exports {
    fn new(driver: &Arc<Driver>) -> Self {
        let context = Context::retain(&driver.devices().unwrap()[0]).unwrap();
        context.make_current().unwrap();
        Self {
            stream: Stream::new(&context, 0).unwrap(),
            buffer: DeviceBuffer::new(&context, EXPORTED_BYTES).unwrap(),
            exported: ExportedEvents::new(context.clone()),
            lane: None,
            opened: None,
            segments: Vec::new(),
            range: None,
            more: Vec::new(),
            files: 0,
            context,
        }
    }

    /// Sets bytes, once the stream gets there.
    fn fill(&self, at: DevicePtr, value: u8, bytes: u64) {
        // SAFETY: the memory is ours and lives as long as the process.
        unsafe { self.stream.fill(at, value, bytes as usize) }.unwrap();
    }

    /// Fills each piece of a range with its number, from 1 on, and keeps the range for others.
    fn lend_range(&mut self, range: Reservation) {
        range.allow_access().unwrap();
        for at in 0..range.bytes() / GRANULE {
            let start = DevicePtr(range.base().0 + at * GRANULE);
            self.fill(start, at as u8 + 1, GRANULE);
        }
        self.stream.synchronize().unwrap();
        self.range = Some(range);
    }

    /// Expandable memory: each piece is filled with its number, from 1 on.
    fn segments(&mut self, count: u64) {
        let mut range = Reservation::new(&self.context, GRANULE * count).unwrap();
        for _ in 0..count {
            let mut fd: i32 = -1;
            let device = self.context.device().ordinal();
            export(device, HandleKind::PosixFd, (&raw mut fd).cast());
            // SAFETY: the driver just opened it for this process.
            let fd = unsafe { OwnedFd::from_raw_fd(fd) };
            let allocation = Allocation::import_fd(&self.context, fd.as_fd()).unwrap();
            range.map(&allocation, GRANULE).unwrap();
            self.segments.push(fd);
        }
        self.lend_range(range);
    }

    /// Fabric handles of pieces, filled likewise.
    fn fabric(&mut self, count: u64) -> Vec<u8> {
        let mut range = Reservation::new(&self.context, GRANULE * count).unwrap();
        let mut handles = Vec::new();
        for _ in 0..count {
            let mut handle = [0u8; 64];
            let device = self.context.device().ordinal();
            export(device, HandleKind::Fabric, (&raw mut handle).cast());
            let allocation = Allocation::import_fabric(&self.context, &handle).unwrap();
            range.map(&allocation, GRANULE).unwrap();
            handles.extend(handle);
        }
        self.lend_range(range);
        handles
    }

    /// Copies bytes to or from an allocation on a stream of its own, and waits for it.
    fn copy(&self, number: &str, offset: u64, bytes: &mut [u8], to_device: bool) {
        let buffer = &self.more[number.parse::<usize>().unwrap()];
        let at = DevicePtr(buffer.base().0 + offset);
        let _current = buffer.context().enter().unwrap();
        let stream = Stream::new(buffer.context(), 0).unwrap();
        let host = HostBuffer::new(buffer.context(), bytes.len()).unwrap();
        let start = host.base().as_ptr();
        // SAFETY: the buffer has this size and no other user; the fake driver refuses what is not in an
        // allocation, and the copy ends here.
        unsafe {
            if to_device {
                start.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
                stream.copy_to_device(at, start, bytes.len()).unwrap();
            } else {
                stream.copy_to_host(start, at, bytes.len()).unwrap();
            }
            stream.synchronize().unwrap();
            bytes.copy_from_slice(std::slice::from_raw_parts(start, bytes.len()));
        }
    }

    fn answer(&mut self, line: &str) -> String {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "memory" => hex(&self.buffer.ipc_handle().unwrap().0),
            "small" => {
                let small = DeviceBuffer::new(&self.context, 4096).unwrap();
                let handle = small.ipc_handle().unwrap();
                // Exported as long as the process lives.
                std::mem::forget(small);
                hex(&handle.0)
            }
            "fill" => {
                self.fill(self.buffer.base(), rest.parse().unwrap(), EXPORTED_BYTES);
                String::new()
            }
            "sync" => {
                self.stream.synchronize().unwrap();
                String::new()
            }
            "script" => {
                FakeDriver::load().script(rest);
                String::new()
            }
            "event" => hex(&self.exported.record(&self.stream).unwrap()),
            "number" => {
                let context = self.context.clone();
                let lane = self
                    .lane
                    .get_or_insert_with(|| Timeline::new(&context).unwrap().slot().unwrap());
                hex(&lane.record(&self.stream).unwrap())
            }
            "open" => {
                let handle = IpcHandle(unhex(rest).try_into().unwrap());
                self.opened = Some(Event::open(&self.context, &handle).unwrap());
                String::new()
            }
            "complete" => self
                .opened
                .as_ref()
                .unwrap()
                .is_complete()
                .unwrap()
                .to_string(),
            "reached" => {
                let allocations = Allocations::new(self.context.clone()).unwrap();
                let events = ForeignEvents::new(allocations, None);
                let event = events.open(&unhex(rest)).unwrap();
                // The first query starts a read, the second one knows its result.
                let _ = event.is_complete().unwrap();
                self.context.synchronize().unwrap();
                event.is_complete().unwrap().to_string()
            }
            "segments" => {
                self.segments(rest.parse().unwrap());
                let fds = self.segments.iter().map(|fd| fd.as_raw_fd().to_string());
                format!("{GRANULE} {}", fds.collect::<Vec<_>>().join(" "))
            }
            "fabric" => hex(&self.fabric(rest.parse().unwrap())),
            "alloc" => {
                let (bytes, gpu) = rest.split_once(' ').unwrap();
                let devices = self.context.driver().devices().unwrap();
                let context = Context::retain(&devices[gpu.parse::<usize>().unwrap()]).unwrap();
                let buffer = DeviceBuffer::new(&context, bytes.parse().unwrap()).unwrap();
                let handle = buffer.ipc_handle().unwrap();
                self.more.push(buffer);
                format!("{} {}", self.more.len() - 1, hex(&handle.0))
            }
            "set" => {
                let (number, value) = rest.split_once(' ').unwrap();
                let buffer = &self.more[number.parse::<usize>().unwrap()];
                self.fill(buffer.base(), value.parse().unwrap(), buffer.bytes());
                String::new()
            }
            "write" => {
                let (number, bytes) = rest.split_once(' ').unwrap();
                self.copy(number, 0, &mut unhex(bytes), true);
                String::new()
            }
            "read" => {
                let [number, offset, len] = *rest.split(' ').collect::<Vec<_>>() else {
                    panic!("{rest}")
                };
                let mut bytes = vec![0; len.parse().unwrap()];
                self.copy(number, offset.parse().unwrap(), &mut bytes, false);
                hex(&bytes)
            }
            "counters" => {
                let file = format!("/torch_{}_77_{}", std::process::id(), self.files);
                self.files += 1;
                map_counters(&format!("/dev/shm{file}"));
                file
            }
            "batches" => self.context.driver().has_batch_copy().to_string(),
            other => panic!("{other}"),
        }
    }
}

#[test]
#[ignore = "the other process of the tests here"]
fn other_process() {
    let driver = Driver::load(Some(&fake_driver_path().unwrap())).unwrap();
    let mut exports = Exports::new(&driver);
    for line in std::io::stdin().lines() {
        println!("=> {}", exports.answer(&line.unwrap()));
    }
}
