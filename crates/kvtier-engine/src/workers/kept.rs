//! Registrations that the next process of the server takes over: one file per worker, in memory of the system
//! ([`VolatileDir`]), as a request is handled. No disk is asked, so no request waits for one.
//!
//! | a kill comes | the next process |
//! | --- | --- |
//! | before the file is in place | does not know the worker, whose client has no answer yet |
//! | behind it | has what the client registered last |
//!
//! The file of a worker changes before its registration or unregistration is answered, and with the table of workers, so that a
//! client never goes on with other memory than the file names. What cannot be written is removed.
//!
//! The mutex guards the files; the table of workers is locked inside.

mod file;

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier_common::error::{Error, Result};
use kvtier_common::state::VolatileDir;
use kvtier_common::sync::Mutex;
use kvtier_common::sync::RateLimited;
use kvtier_proto::request::InstanceId;
use kvtier_store::l1::boot_time;

use super::super::context::Context;
use super::super::instances::{Instance, Instances};
pub use file::{KeptMemory, KeptRequest, KeptWorker, LeftOut};
use file::{SEEN_AT, content, nanos, parse, write_bytes, write_number};

/// Most bytes of one file. A registration has some hundred per tensor.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Most bytes of all files.
const MAX_BYTES: u64 = 64 << 20;

/// Most files that are looked at: twice as many as there may be workers.
const MAX_FILES: usize = 8192;

/// A ping is answered within this time. Younger ones are not recorded.
const ANSWERED_AFTER: Duration = Duration::from_secs(1);

/// What came of the registrations of an earlier process.
#[derive(Debug, Default, Clone)]
pub struct RestoredWorkers {
    pub restored: u64,
    pub left_out: BTreeMap<&'static str, u64>,
}

/// The files.
pub struct KeptRegistrations {
    files: Mutex<KeptFiles>,
}

struct KeptFiles {
    /// `None` if nothing is kept.
    dir: Option<VolatileDir>,
    /// What each file begins with.
    head: Vec<u8>,
    entries: HashMap<InstanceId, WorkerEntry>,
    bytes: u64,
    outcome: RestoredWorkers,
    /// No further registration of an earlier process is taken over.
    is_restored: bool,
}

#[derive(Default)]
struct WorkerEntry {
    bytes: u64,
    /// The ping that the file has, and whether the worker cannot map the pool.
    recorded: (Option<Duration>, bool),
}

fn file_name(id: InstanceId) -> String {
    format!("worker-{:016x}", id.0)
}

fn id_of(name: &str) -> Option<InstanceId> {
    let digits = name.strip_prefix("worker-")?;
    let id = u64::from_str_radix(digits, 16).ok()?;
    let id = InstanceId(id.cast_signed());
    (file_name(id) == name).then_some(id)
}

/// What each file begins with.
fn head_of(folder: &str, chunk_size: NonZeroUsize) -> Vec<u8> {
    let mut head = Vec::new();
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    write_bytes(&mut head, boot.unwrap_or_default().trim().as_bytes());
    write_bytes(&mut head, folder.as_bytes());
    write_number(&mut head, chunk_size.get() as u64);
    head
}

impl KeptRegistrations {
    pub fn new(context: &Context) -> Self {
        let (mut head, mut dir) = (Vec::new(), None);
        if let Ok(state) = &context.state {
            head = head_of(state.id(), context.chunk_size);
            let own = VolatileDir::of(state.id());
            let removed = own.remove_unused_others(std::time::SystemTime::now());
            if !removed.is_empty() {
                tracing::info!(
                    ?removed,
                    "removed registrations of servers that ended over an hour ago"
                );
            }
            dir = Some(own);
        }
        Self {
            files: Mutex::new(KeptFiles {
                dir,
                head,
                entries: HashMap::new(),
                bytes: 0,
                outcome: RestoredWorkers::default(),
                is_restored: false,
            }),
        }
    }

    /// Inserts a worker into the table, and its registration into the files; returns the earlier registration under its id.
    ///
    /// # Errors
    /// As [`Instances::insert`].
    pub fn insert(
        &self,
        instances: &Instances,
        instance: Instance,
        request: Option<(KeptRequest, KeptMemory)>,
    ) -> Result<Option<Arc<Instance>>> {
        let id = instance.id;
        let mut files = self.files.lock();
        let earlier = instances.insert(instance)?;
        files.replace(id, request);
        Ok(earlier)
    }

    /// Keeps a registration in place of the one under its id.
    pub fn replace(&self, id: InstanceId, request: Option<(KeptRequest, KeptMemory)>) {
        self.files.lock().replace(id, request);
    }

    /// Inserts a worker of an earlier process into the table, whose file stays. Returns `None` if it is too late, or the id
    /// has registered meanwhile.
    ///
    /// # Errors
    /// As [`Instances::insert`].
    pub fn insert_restored(
        &self,
        instances: &Instances,
        instance: Instance,
    ) -> Result<Option<Arc<Instance>>> {
        let id = instance.id;
        let mut files = self.files.lock();
        if files.is_restored || instances.get(id).is_some() {
            return Ok(None);
        }
        instances.insert(instance)?;
        files.outcome.restored += 1;
        Ok(instances.get(id))
    }

    /// Removes a worker from the files and then from the table.
    pub fn remove(&self, instances: &Instances, id: InstanceId) -> Option<Arc<Instance>> {
        let mut files = self.files.lock();
        files.remove(id);
        instances.remove(id)
    }

    /// Forgets workers that have left the table, unless their ids have registered since.
    pub fn forget(&self, instances: &Instances, left: &[Arc<Instance>]) {
        if left.is_empty() {
            return;
        }
        let mut files = self.files.lock();
        let gone = left.iter().filter(|it| instances.get(it.id).is_none());
        gone.for_each(|instance| files.remove(instance.id));
    }

    /// Records what workers have shown since they registered: their last pings, once those are answered, and that they cannot map
    /// the pool.
    pub fn record(&self, all: &[Arc<Instance>], now: Duration) {
        for instance in all {
            let answered = |last: &Duration| now.saturating_sub(*last) >= ANSWERED_AFTER;
            let pings = instance.pings();
            let last = pings.map(|(last, _)| last).filter(answered);
            let seen = (last, instance.pickles());
            let mut files = self.files.lock();
            let KeptFiles { dir, entries, .. } = &mut *files;
            let Some((entry, dir)) = entries.get_mut(&instance.id).zip(dir.as_mut()) else {
                continue;
            };
            // A restored worker that has not pinged yet keeps what is known of its earlier pings.
            if entry.recorded == seen || (last.is_none() && seen.1 == entry.recorded.1) {
                continue;
            }
            entry.recorded = seen;
            let mut words = Vec::new();
            if let Some(last) = last {
                let age = nanos(now.saturating_sub(last));
                write_number(&mut words, boot_time().saturating_sub(age));
                let gap = pings.and_then(|(_, gap)| gap);
                write_number(&mut words, gap.map_or(0, nanos));
            }
            write_number(&mut words, seen.1.into());
            let at = SEEN_AT + if last.is_some() { 0 } else { 16 };
            if let Err(error) = dir.write_at(&file_name(instance.id), at, &words) {
                unkept(&error);
                files.remove(instance.id);
            }
        }
    }

    /// The registrations of an earlier process that can be read. Files of others are removed.
    pub fn read(&self, now: Duration) -> Vec<KeptWorker> {
        let mut files = self.files.lock();
        let names = match &mut files.dir {
            Some(dir) => dir.names(MAX_FILES),
            None => return Vec::new(),
        };
        let names = names.unwrap_or_else(|error| {
            unkept(&error);
            files.dir = None;
            Vec::new()
        });
        let mut kept = Vec::new();
        for name in names {
            let left = MAX_BYTES.saturating_sub(files.bytes);
            let Some(id) = id_of(&name) else {
                files.unlink(&name);
                files.left_out(LeftOut::Damaged);
                continue;
            };
            let Some(dir) = &mut files.dir else { break };
            let content = dir.read(&name, left.min(MAX_FILE_BYTES));
            let bytes = content.as_ref().map_or(0, |content| content.len() as u64);
            files.bytes += bytes;
            let entry = WorkerEntry {
                bytes,
                ..WorkerEntry::default()
            };
            files.entries.insert(id, entry);
            let found = content
                .map_err(|error| (LeftOut::Damaged, error))
                .and_then(|content| parse(&files.head, id, &content, now));
            match found {
                Ok(found) => kept.push(found),
                Err((reason, error)) => files.leave_out(id, reason, &error),
            }
        }
        kept
    }

    /// Removes the registration of an earlier process that is not taken over, unless the id has registered meanwhile.
    pub fn leave_out(&self, instances: &Instances, id: InstanceId, reason: LeftOut, error: &Error) {
        let mut files = self.files.lock();
        if instances.get(id).is_none() {
            files.leave_out(id, reason, error);
        }
    }

    /// Takes no further registration over: `late` ones are left out.
    pub fn end_restoring(&self, instances: &Instances, late: &[InstanceId]) -> RestoredWorkers {
        let mut files = self.files.lock();
        files.is_restored = true;
        let error = Error::refused("its driver has not answered in time");
        for id in late {
            if instances.get(*id).is_none() {
                files.leave_out(*id, LeftOut::Timeout, &error);
            }
        }
        files.outcome.clone()
    }

    /// What came of the registrations of an earlier process.
    pub fn outcome(&self) -> RestoredWorkers {
        self.files.lock().outcome.clone()
    }

    /// Whether the registration of a worker is kept.
    pub fn has(&self, id: InstanceId) -> bool {
        self.files.lock().entries.contains_key(&id)
    }

    /// Changes nothing from now on: the next process may have the files.
    pub fn close(&self) {
        let mut files = self.files.lock();
        files.dir = None;
        files.is_restored = true;
    }
}

fn unkept(error: &Error) {
    static LOG_LIMIT: RateLimited = RateLimited::new(Duration::from_secs(60));
    if let Some(suppressed_lines) = LOG_LIMIT.permit(Instant::now()) {
        tracing::warn!(%error, suppressed_lines, "a registration cannot be kept; its client has to register again after a restart");
    }
}

impl KeptFiles {
    fn replace(&mut self, id: InstanceId, request: Option<(KeptRequest, KeptMemory)>) {
        self.remove(id);
        if let Some((request, memory)) = request {
            self.write(id, &request, &memory);
        }
    }

    fn write(&mut self, id: InstanceId, request: &KeptRequest, memory: &KeptMemory) {
        let Some(dir) = &mut self.dir else { return };
        let content = content(&self.head, request, memory);
        let bytes = content.len() as u64;
        let written = if bytes <= MAX_FILE_BYTES && self.bytes + bytes <= MAX_BYTES {
            dir.write(&file_name(id), &content)
        } else {
            Err(Error::refused(format!(
                "{bytes} bytes beside {}; allowed: at most {MAX_FILE_BYTES} of one, and {MAX_BYTES} of all",
                self.bytes
            )))
        };
        match written {
            Ok(()) => {
                self.bytes += bytes;
                let entry = WorkerEntry {
                    bytes,
                    ..WorkerEntry::default()
                };
                self.entries.insert(id, entry);
            }
            Err(error) => unkept(&error),
        }
    }

    fn remove(&mut self, id: InstanceId) {
        let Some(entry) = self.entries.remove(&id) else {
            return;
        };
        self.bytes = self.bytes.saturating_sub(entry.bytes);
        self.unlink(&file_name(id));
    }

    fn unlink(&mut self, name: &str) {
        let Some(dir) = &mut self.dir else { return };
        if let Err(error) = dir.remove(name) {
            tracing::error!(name, %error, "the registration of a worker that has left cannot be removed");
        }
    }

    fn left_out(&mut self, reason: LeftOut) {
        *self.outcome.left_out.entry(reason.name()).or_default() += 1;
    }

    fn leave_out(&mut self, id: InstanceId, reason: LeftOut, error: &Error) {
        if !self.entries.contains_key(&id) {
            // Left out already, while its driver did not answer.
            return;
        }
        self.left_out(reason);
        self.remove(id);
        let reason = reason.name();
        tracing::info!(instance = id.0, reason, %error, "a registration was not restored; its client registers again");
    }
}

#[cfg(test)]
mod tests {
    use kvtier_proto::operation::Operation;

    use super::super::super::Engine;
    use super::super::super::testing::{TestPages, engine};
    use super::*;

    /// An engine that keeps registrations, whose folder goes with the test.
    struct Bed {
        engine: Engine,
        _base: tempfile::TempDir,
    }

    impl Bed {
        fn new() -> Self {
            let base = tempfile::tempdir().unwrap();
            let state = base.path().to_str().unwrap();
            let engine = engine(&["--state-dir", state, "--instance-id", "a"]);
            Self {
                engine,
                _base: base,
            }
        }

        fn kept(&self) -> &KeptRegistrations {
            &self.engine.workers.kept
        }

        fn folder(&self) -> std::path::PathBuf {
            self.kept().files.lock().dir.as_ref().unwrap().path()
        }
    }

    impl Drop for Bed {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(self.folder());
        }
    }

    /// A registration with a frame of this many bytes.
    fn request(bytes: usize) -> KeptRequest {
        KeptRequest {
            operation: Operation::RegisterKvCache,
            knows_chunk_size: true,
            negotiates_chunk_size: false,
            frames: vec![vec![0; bytes]],
        }
    }

    #[test]
    fn newer_registration_is_not_forgotten_with_the_earlier() {
        let bed = Bed::new();
        let instances = &bed.engine.context.instances;
        let pages = Arc::new(TestPages::new(16));
        let register = || {
            let kept = (request(0), KeptMemory::default());
            let instance = pages.instance(7, Duration::ZERO);
            bed.kept().insert(instances, instance, Some(kept)).unwrap()
        };
        register();
        let left = instances.remove(InstanceId(7)).unwrap();
        register();
        bed.kept().forget(instances, &[Arc::clone(&left)]);
        assert!(bed.kept().has(InstanceId(7)));
        instances.remove(InstanceId(7)).unwrap();
        bed.kept().forget(instances, &[left]);
        assert!(!bed.kept().has(InstanceId(7)) && !bed.folder().exists());
    }

    #[test]
    fn files_are_read_up_to_the_bytes_that_a_server_keeps() {
        let bed = Bed::new();
        let mut files = bed.kept().files.lock();
        let memory = KeptMemory::default();
        let overhead = content(&files.head, &request(0), &memory).len();
        let content = content(
            &files.head,
            &request(MAX_FILE_BYTES as usize - overhead),
            &memory,
        );
        // Files of zeros behind their beginnings take no memory.
        let end = content.iter().rposition(|byte| *byte != 0).unwrap() + 1;
        let most = MAX_BYTES / MAX_FILE_BYTES;
        for id in 0..=most {
            let name = file_name(InstanceId(id.cast_signed()));
            let dir = files.dir.as_mut().unwrap();
            dir.write(&name, &content[..end]).unwrap();
            let path = dir.path().join(name);
            let file = std::fs::File::options().write(true).open(path);
            file.unwrap().set_len(MAX_FILE_BYTES).unwrap();
        }
        drop(files);
        assert_eq!(bed.kept().read(Duration::ZERO).len() as u64, most);
        assert_eq!(bed.kept().outcome().left_out.values().sum::<u64>(), 1);
        let left = std::fs::read_dir(bed.folder()).unwrap().count();
        assert_eq!(left as u64, most);
    }

    #[test]
    fn late_registration_is_left_out_once() {
        let bed = Bed::new();
        let instances = &bed.engine.context.instances;
        let id = InstanceId(7);
        let mut files = bed.kept().files.lock();
        files.write(id, &request(0), &KeptMemory::default());
        drop(files);
        bed.kept().end_restoring(instances, &[id]);
        let error = Error::refused("opened too late");
        bed.kept().leave_out(instances, id, LeftOut::Memory, &error);
        let left_out = BTreeMap::from([("timeout", 1)]);
        assert_eq!(bed.kept().outcome().left_out, left_out);
    }
}
