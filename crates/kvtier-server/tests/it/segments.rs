//! Segments of workers: of two that share a name, one behind the other, and of those that ended.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use kvtier_client::proto::descriptor::{CpuShm, Dtype, TensorDescriptor, TensorMetadata};
use kvtier_client::proto::request::{EngineGroupInfo, EngineType, LayoutHints, Registration};
use kvtier_client::{Connection, InstanceId, Scope};
use kvtier_memory::ForeignSegment;

use crate::support::{TestServer, prompt, range};

const BLOCKS: u64 = 8;

/// Bytes of one block in one plane: 4 tokens, 2 heads, 16 values of 2 bytes.
const PIECE: u64 = 4 * 2 * 16 * 2;

const BYTES: u64 = 2 * BLOCKS * PIECE;

/// What an engine has in `/dev/shm`: one layer `[2, blocks, 4, 2, 16]`. Removed on drop.
struct Pages {
    name: String,
    /// Open as long as its engine lives, as what no process has is removed.
    held: Option<File>,
}

impl Pages {
    fn new(process: u32) -> Self {
        let name = format!("/lmcache_kv_{process}_{}", std::process::id());
        let mut pages = Self { name, held: None };
        pages.make(0);
        pages
    }

    fn path(&self) -> String {
        format!("/dev/shm{}", self.name)
    }

    /// Creates the file again, as another process does that follows this one.
    fn make(&mut self, byte: u8) {
        let _ = std::fs::remove_file(self.path());
        let file = File::create(self.path()).unwrap();
        file.write_all_at(&[byte; BYTES as usize], 0).unwrap();
        self.held = Some(file);
    }

    fn exist(&self) -> bool {
        std::fs::exists(self.path()).unwrap()
    }

    fn fill(&self, block: u64, byte: u8) {
        let file = File::options().write(true).open(self.path());
        for plane in 0..2 {
            let at = (plane * BLOCKS + block) * PIECE;
            let file = file.as_ref().unwrap();
            file.write_all_at(&[byte; PIECE as usize], at).unwrap();
        }
    }

    /// The byte that both planes of a block consist of.
    fn byte(&self, block: u64) -> u8 {
        let all = std::fs::read(self.path()).unwrap();
        let piece = |plane| {
            let at = ((plane * BLOCKS + block) * PIECE) as usize;
            &all[at..at + PIECE as usize]
        };
        let byte = piece(0)[0];
        assert!((0..2).all(|plane| piece(plane).iter().all(|other| *other == byte)));
        byte
    }

    fn register(&self, connection: &mut Connection, scope: &Scope) {
        let tensor = TensorDescriptor::CpuShm(CpuShm {
            shm_name: self.name.clone(),
            nbytes: BYTES,
            metadata: TensorMetadata {
                dtype: Dtype::BFloat16,
                shape: vec![2, BLOCKS, 4, 2, 16],
                stride: vec![BLOCKS * 128, 128, 32, 16, 1],
                storage_offset: 0,
                device_uuid: "cpu".to_owned(),
            },
        });
        let group = EngineGroupInfo {
            engine_group_id: 0,
            layer_indices: vec![0],
            tokens_per_block: 4,
            sw_size_tokens: -1,
            extra_object_group_tag: 0,
            recurrent_state: false,
        };
        connection
            .register_kv_cache(Registration {
                instance: ENGINE,
                tensors: vec![tensor],
                model_name: &scope.model_name,
                world_size: 1,
                engine: EngineType::Vllm,
                hints: LayoutHints::default(),
                groups: vec![group],
            })
            .unwrap();
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.path());
    }
}

const ENGINE: InstanceId = InstanceId(7);

const LENDER: &str = "KVTIER_TEST_LENDER";

/// Not a test of its own: a worker that has its pages mapped and lives until it is killed.
#[test]
fn child_lends_its_pages() {
    if std::env::var_os(LENDER).is_none() {
        return;
    }
    let pages = Pages::new(std::process::id());
    let mapped = ForeignSegment::open(&pages.name, BYTES).unwrap();
    eprintln!("{}", mapped.name());
    // Ends with the process that started it, if not before.
    let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
}

/// A worker as above, and its pages.
fn lender() -> (Child, Pages) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", "segments::child_lends_its_pages"])
        .env(LENDER, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut name = String::new();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    stderr.read_line(&mut name).unwrap();
    let name = name.trim_end().to_owned();
    (child, Pages { name, held: None })
}

fn end(mut process: Child) {
    process.kill().unwrap();
    process.wait().unwrap();
}

// proves: docs/troubleshoot.md#an-engine-dies
#[test]
fn restarted_worker_with_same_pid_uses_new_memory() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("segments/again");
    let mut pages = Pages::new(1);
    let mut connection = server.connect();
    pages.register(&mut connection, &scope);
    // Again the same changes nothing.
    pages.register(&mut connection, &scope);
    assert_eq!(server.readings().instances, 1);

    pages.make(0);
    pages.register(&mut connection, &scope);
    for block in 1..=4 {
        pages.fill(block, 40 + block as u8);
    }
    let prompt = prompt(1, 1);
    let key = |request| scope.worker_key(0, &prompt, range(0..1), request);
    let blocks = |ids: std::ops::Range<i64>| [ids.collect::<Vec<_>>()];
    assert!(
        connection
            .store(&key("store"), ENGINE, &blocks(1..5))
            .unwrap()
    );
    // Elsewhere, in the memory of a third process.
    pages.make(0);
    pages.register(&mut connection, &scope);
    let lookup = scope.scheduler_key(&prompt, range(0..1), "load");
    assert_eq!(connection.lookup_hits(&lookup).unwrap(), 1);
    assert!(
        connection
            .retrieve(&key("load"), ENGINE, &blocks(4..8), 0)
            .unwrap()
    );
    let read: Vec<_> = (0..BLOCKS).map(|block| pages.byte(block)).collect();
    assert_eq!(read, [0, 0, 0, 0, 41, 42, 43, 44]);
    server.assert_sound();
}

// proves: docs/troubleshoot.md#an-engine-dies
#[test]
fn memory_of_a_dead_worker_is_removed() {
    let server = TestServer::start(&["--worker-registration-grace-seconds", "3600"]);
    let (process, pages) = lender();
    pages.register(&mut server.connect(), &Scope::new("segments/dead"));
    server.pass(Duration::from_secs(2));
    assert_eq!(server.readings().instances, 1);
    assert!(pages.exist());
    // Long before it is considered dead because of its silence.
    end(process);
    server.pass(Duration::from_secs(2));
    assert_eq!(server.readings().instances, 0);
    assert!(!pages.exist());
}

// proves: docs/troubleshoot.md#an-engine-dies
#[test]
fn silent_worker_keeps_memory_while_possibly_alive() {
    let server = TestServer::start(&["--worker-registration-grace-seconds", "3600"]);
    let (silent, pages) = lender();
    pages.register(&mut server.connect(), &Scope::new("segments/silent"));
    server.pass(Duration::from_secs(3610));
    assert_eq!(server.readings().instances, 0);
    assert!(pages.exist());
    end(silent);
    server.pass(Duration::from_secs(2));
    assert!(!pages.exist());
}
