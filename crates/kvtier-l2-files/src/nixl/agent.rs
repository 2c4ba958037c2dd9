//! An agent of NIXL with one backend, and its transfers.

use std::collections::BTreeMap;
use std::ffi::{CString, c_int};
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvtier_memory::uring::Transfer;

use crate::nixl::error::{Code, NixlError};
use crate::nixl::handles::{Bytes, NixlHandle, Registered, check, listed, params};
use crate::nixl::library::Library;
use crate::nixl::table::{DRAM, FILE, READ, Raw, Table, WRITE};

/// Time after which a transfer that does not end is abandoned.
const TRANSFER_TIMEOUT: Duration = if cfg!(test) {
    Duration::from_secs(1)
} else {
    Duration::from_secs(60)
};

/// Time after which a request that cannot be released is abandoned.
const RELEASE_TIMEOUT: Duration = if cfg!(test) {
    Duration::from_millis(50)
} else {
    Duration::from_secs(10)
};

/// Queries of a transfer's state without a pause, and pauses after that.
const SPINS: u32 = 64;
const SHORTEST_PAUSE: Duration = Duration::from_micros(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// An agent with one backend, for one transfer at a time.
pub struct Agent {
    library: Arc<Library>,
    name: CString,
    // Destroyed in this order.
    options: NixlHandle,
    #[expect(dead_code, reason = "destroyed when dropped")]
    backend: NixlHandle,
    agent: NixlHandle,
}

// SAFETY: its handles are used by one thread at a time, and the library binds none of them to a thread.
unsafe impl Send for Agent {}

/// Result of a transfer.
pub enum NixlOutcome<H> {
    /// The transfer has ended: the extent was moved, or an error.
    Ended(Transfer<H>, Result<(), NixlError>),
    /// The transfer does not end, or cannot be ended, so its memory may be accessed at any time: it is leaked, with all that it
    /// holds. The agent must not be used again.
    Lost,
}

impl Agent {
    /// Starts an agent with `backend`, which has these parameters.
    ///
    /// # Errors
    /// [`NixlError::Backend`] if there is no such backend, or it does not start.
    pub fn start(
        library: &Arc<Library>,
        backend: &str,
        parameters: &BTreeMap<String, String>,
    ) -> Result<Self, NixlError> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = text(&format!("kvtier-{}-{number}", std::process::id()))?;
        let backend_name = text(backend)?;
        let parameters: Vec<_> = parameters
            .iter()
            .map(|(name, value)| Ok((text(name)?, text(value)?)))
            .collect::<Result<_, NixlError>>()?;
        let table = &library.table;
        let agent = NixlHandle::make("start an agent", table.destroy_agent, |agent| {
            // SAFETY: the name ends with a zero byte, and the library copies it; the address is that of a live handle.
            unsafe { (table.create_agent)(name.as_ptr(), agent) }
        })?;
        let pairs = parameters.iter();
        let parameters = params(table, pairs.map(|(name, value)| (&**name, &**value)))?;
        let made = NixlHandle::make("start the backend", table.destroy_backend, |made| {
            let name = backend_name.as_ptr();
            // SAFETY: agent and parameters are live, the name ends with a zero byte, and the address is that of a handle.
            unsafe { (table.create_backend)(agent.raw(), name, parameters.raw(), made) }
        });
        let made = made.map_err(|error| match error {
            NixlError::Call { code, .. } => NixlError::Backend {
                library: library.path().display().to_string(),
                backend: backend.into(),
                code,
            },
            error => error,
        })?;
        let options = NixlHandle::make("make options", table.destroy_opt_args, |options| {
            // SAFETY: the address is that of a live handle.
            unsafe { (table.create_opt_args)(options) }
        })?;
        // SAFETY: both are live.
        let added = unsafe { (table.opt_args_add_backend)(options.raw(), made.raw()) };
        check("choose the backend", added)?;
        Ok(Self {
            library: Arc::clone(library),
            name,
            options,
            backend: made,
            agent,
        })
    }

    pub(crate) fn table(&self) -> &Table {
        &self.library.table
    }

    pub(crate) fn raw(&self) -> Raw {
        self.agent.raw()
    }

    pub(crate) fn options(&self) -> Raw {
        self.options.raw()
    }

    /// Moves the extent of a transfer from or to the start of its file; the tail is left to
    /// [`Transfer::finish`]. Blocks until nothing accesses its memory any more.
    pub fn run<H>(&mut self, transfer: Transfer<H>) -> NixlOutcome<H> {
        match self.moved(&transfer) {
            Moved::Ended(moved) => NixlOutcome::Ended(transfer, moved),
            Moved::Lost => {
                std::mem::forget(transfer);
                NixlOutcome::Lost
            }
        }
    }

    fn moved<H>(&self, transfer: &Transfer<H>) -> Moved {
        let len = transfer.extent.len;
        let (Ok(size), Ok(at)) = (usize::try_from(len), usize::try_from(transfer.at)) else {
            return Moved::Ended(Err(NixlError::Short(0)));
        };
        if size == 0 {
            return Moved::Ended(Ok(()));
        }
        let address = match transfer.arena.address(transfer.extent, 0, len) {
            Ok(address) => address.as_ptr().expose_provenance(),
            Err(error) => return Moved::Ended(Err(error.into())),
        };
        let memory = Bytes {
            kind: DRAM,
            address,
            len: size,
            device: 0,
        };
        let file = Bytes {
            kind: FILE,
            address: at,
            len: size,
            // Descriptors are not negative.
            device: u64::from(transfer.file.as_raw_fd().unsigned_abs()),
        };
        let operation = match transfer.enough {
            Some(_) => READ,
            None => WRITE,
        };
        match self.transfer(operation, memory, file) {
            Moved::Ended(Ok(())) => Moved::Ended(is_whole(transfer)),
            moved => moved,
        }
    }

    /// Both must be accessible until this returns [`Moved::Ended`].
    fn transfer(&self, operation: c_int, memory: Bytes, file: Bytes) -> Moved {
        let begun = || {
            let memory_registered = Registered::new(self, memory)?;
            let file_registered = Registered::new(self, file)?;
            let request = Request::new(self, operation, memory, file)?;
            Ok((request, memory_registered, file_registered))
        };
        let (request, memory, file) = match begun() {
            Ok(begun) => begun,
            Err(error) => return Moved::Ended(Err(error)),
        };
        let Some(moved) = request.run() else {
            // A release could free what the backend accesses.
            std::mem::forget((request, memory, file));
            return Moved::Lost;
        };
        if request.release() {
            Moved::Ended(moved)
        } else {
            std::mem::forget((memory, file));
            Moved::Lost
        }
    }
}

/// [`NixlOutcome`] without its transfer.
enum Moved {
    Ended(Result<(), NixlError>),
    Lost,
}

/// Backends do not report how much they moved: a file that became shorter, or was not written, is noticed by its length.
fn is_whole<H>(transfer: &Transfer<H>) -> Result<(), NixlError> {
    let size = rustix::fs::fstat(&transfer.file)?.st_size;
    let size = u64::try_from(size).unwrap_or(0);
    if size >= transfer.extent.len {
        Ok(())
    } else {
        Err(NixlError::Short(size))
    }
}

/// A transfer in the library.
struct Request<'a> {
    agent: &'a Agent,
    request: NixlHandle,
}

impl<'a> Request<'a> {
    fn new(
        agent: &'a Agent,
        operation: c_int,
        memory: Bytes,
        file: Bytes,
    ) -> Result<Self, NixlError> {
        let table = agent.table();
        let (memory, file) = (listed(table, memory)?, listed(table, file)?);
        let request = NixlHandle::make("make a transfer", table.destroy_xfer_req, |request| {
            // SAFETY: agent, lists and options are live, the lists are copied, and the agent's own name as the remote side
            // ends with a zero byte; the address is that of a live handle. Nothing is accessed yet.
            unsafe {
                (table.create_xfer_req)(
                    agent.raw(),
                    operation,
                    memory.raw(),
                    file.raw(),
                    agent.name.as_ptr(),
                    request,
                    agent.options(),
                )
            }
        })?;
        Ok(Self { agent, request })
    }

    /// Moves the bytes, or fails. `None` if it does not end in time.
    fn run(&self) -> Option<Result<(), NixlError>> {
        let until = Instant::now() + TRANSFER_TIMEOUT;
        let (table, agent, request) = (self.agent.table(), self.agent.raw(), self.request.raw());
        // SAFETY: all are live. The memory and the file are accessible until the request is released, which the caller
        // of `Agent::transfer` promises; the library only accesses what the lists have.
        let mut status = unsafe { (table.post_xfer_req)(agent, request, self.agent.options()) };
        let (mut spins, mut pause) = (0, SHORTEST_PAUSE);
        while Code(status) == Code::IN_PROGRESS {
            spins += 1;
            if spins > SPINS {
                if Instant::now() >= until {
                    return None;
                }
                std::thread::sleep(pause);
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            // SAFETY: both are live.
            status = unsafe { (table.get_xfer_status)(agent, request) };
        }
        Some(check("move the bytes", status))
    }

    /// Ends the request; returns whether nothing accesses its bytes any more.
    fn release(self) -> bool {
        let (table, agent, request) = (self.agent.table(), self.agent.raw(), self.request.raw());
        let until = Instant::now() + RELEASE_TIMEOUT;
        loop {
            // SAFETY: both are live; the library refuses while it cannot end the transfer, and may be asked again.
            let status = unsafe { (table.release_xfer_req)(agent, request) };
            if Code(status) == Code::SUCCESS {
                return true;
            }
            if Instant::now() >= until {
                std::mem::forget(self.request);
                return false;
            }
            std::thread::sleep(LONGEST_PAUSE);
        }
    }
}

fn text(text: &str) -> Result<CString, NixlError> {
    CString::new(text).map_err(|_| NixlError::Text(text.into()))
}
