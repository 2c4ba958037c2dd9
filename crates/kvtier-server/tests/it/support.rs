//! What the tests share: a server of their own, sockets that send any frames, prompts and chunks.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvtier_client::proto::request::EngineDrivenContext;
use kvtier_client::proto::response::{ChunkSlot, PrepareStore};
use kvtier_client::{
    Connection, EngineDrivenSpec, EngineDrivenWorker, InstanceId, Key, LmcacheDrivenSpec,
    LmcacheDrivenWorker, Options, Prompt, Scope,
};
use kvtier_config::L1Restore;
use kvtier_server::metrics::Readings;
use kvtier_server::{Server, ServerConfig};

/// Tokens of one chunk on the tests' servers.
pub const CHUNK: usize = 16;

/// How long a reply may take before a test fails; never waited for in a test that passes.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A server with ports and a pool of its own. The background pass evicts nothing, so that what a test filled stays.
pub struct TestServer(Server);

impl TestServer {
    /// With 64 MiB of L1, chunks of [`CHUNK`] tokens and these further flags.
    pub fn start(flags: &[&str]) -> Self {
        Self::start_with(flags, |_| {})
    }

    /// Starts a server, with settings that no flag has.
    pub fn start_with(flags: &[&str], change: impl FnOnce(&mut ServerConfig)) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let pool = format!("kvtier_test_{}_{number}", std::process::id());
        let mut all = vec!["--port", "0", "--http-port", "0", "--l1-size-gb", "0.0625"];
        all.extend([
            "--chunk-size",
            "16",
            "--no-l1-prefault",
            "--shm-name",
            &pool,
        ]);
        all.extend(["--eviction-trigger-watermark", "1", "--eviction-ratio", "0"]);
        all.extend(flags);
        let mut config = ServerConfig::from_flags(&all).unwrap();
        // Nothing stays in /dev/shm unless the test wants it.
        if !flags.contains(&"--l1-restore") {
            config.args.l1_restore = L1Restore::Off;
        }
        change(&mut config);
        Self(Server::start(config).unwrap())
    }

    /// A connection that waits [`PATIENCE`] for each reply.
    pub fn connect(&self) -> Connection {
        let options = Options {
            timeout: PATIENCE,
            ..Options::default()
        };
        Connection::connect_with(self.0.endpoint(), options).unwrap()
    }

    /// A socket that sends any frames.
    pub fn raw(&self) -> Raw {
        Raw::connect(self.0.endpoint())
    }

    /// What the engine reads right now.
    pub fn readings(&self) -> Readings {
        self.0.engine().admin().readings()
    }

    /// Lets time pass and does what is due.
    pub fn pass(&self, time: Duration) {
        self.0.engine().clock().skip(time);
        self.0.engine().housekeep();
    }

    /// Fails unless the server is healthy and its invariants hold.
    pub fn assert_sound(&self) {
        assert_eq!(self.0.health().reason(), None);
        assert_eq!(self.readings().accounting_errors, 0);
        assert_eq!(self.0.engine().metrics().handler_panics.get(), 0);
    }

    /// A worker that copies by itself, 8 KiB per chunk.
    pub fn engine_driven(&self, instance: i64, scope: &Scope) -> EngineDrivenWorker {
        EngineDrivenWorker::register(self.connect(), engine_driven(instance, scope)).unwrap()
    }

    /// A worker whose pages the server copies, 4 KiB per chunk.
    pub fn lmcache_driven(&self, instance: i64, scope: &Scope) -> LmcacheDrivenWorker {
        let mut spec = LmcacheDrivenSpec::new(InstanceId(instance), scope.clone(), 2, 2, 16, 32);
        spec.block_tokens = 4;
        LmcacheDrivenWorker::register(self.connect(), spec).unwrap()
    }
}

/// Waits for at most [`PATIENCE`].
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < PATIENCE, "{what} did not come");
        // Leaves the processor to the server.
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A server without further flags, a scope, a worker of it with the id 1, and a prompt that is stored whole with the
/// bytes of seed 1.
pub fn given_stored(model: &str, chunks: usize) -> (TestServer, Scope, EngineDrivenWorker, Prompt) {
    given_stored_on(TestServer::start(&[]), Scope::new(model), chunks)
}

/// Stores chunks on this server.
pub fn given_stored_on(
    server: TestServer,
    scope: Scope,
    chunks: usize,
) -> (TestServer, Scope, EngineDrivenWorker, Prompt) {
    let (mut worker, prompt) = (server.engine_driven(1, &scope), prompt(1, chunks));
    worker.stored(&prompt, 0..chunks as u64, 1);
    (server, scope, worker, prompt)
}

/// Steps of a worker that copies by itself. The bytes of chunks are those of a seed.
pub trait Steps {
    /// Stores chunks of a prompt; returns those that were sent.
    fn stored(&mut self, prompt: &Prompt, chunks: Range<u64>, seed: u64) -> Vec<u64>;

    /// What a request retrieves; none for a miss.
    fn retrieved(
        &mut self,
        prompt: &Prompt,
        chunks: Range<u64>,
        request: &str,
    ) -> Option<Vec<Vec<u8>>>;

    /// Asserts that a request retrieves what was stored.
    fn assert_reads(&mut self, prompt: &Prompt, chunks: Range<u64>, request: &str, seed: u64);
}

impl Steps for EngineDrivenWorker {
    fn stored(&mut self, prompt: &Prompt, chunks: Range<u64>, seed: u64) -> Vec<u64> {
        let (first, len) = (chunks.start, self.chunk_bytes());
        let source = |chunk| bytes(seed, first + chunk, len);
        self.store(prompt, range(chunks), "s", source)
            .unwrap()
            .chunks
    }

    fn retrieved(
        &mut self,
        prompt: &Prompt,
        chunks: Range<u64>,
        request: &str,
    ) -> Option<Vec<Vec<u8>>> {
        let mut got = Vec::new();
        let take = |_, bytes: &[u8]| got.push(bytes.to_vec());
        let read = self.retrieve(prompt, range(chunks), request, take);
        read.unwrap().map(|_| got)
    }

    fn assert_reads(&mut self, prompt: &Prompt, chunks: Range<u64>, request: &str, seed: u64) {
        let len = self.chunk_bytes();
        let got = self.retrieved(prompt, chunks.clone(), request);
        let got = got.expect("a miss after a hit");
        assert_eq!(got.len() as u64, chunks.end - chunks.start, "{request}");
        for (chunk, got) in chunks.zip(got) {
            assert!(got == bytes(seed, chunk, len), "chunk {chunk} of {request}");
        }
    }
}

impl std::ops::Deref for TestServer {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.0
    }
}

/// Two layers, two planes, 64 values per token: 16 x 64 x 2 x 2 x 2 bytes per chunk.
pub fn engine_driven(instance: i64, scope: &Scope) -> EngineDrivenSpec {
    let mut spec = EngineDrivenSpec::new(InstanceId(instance), scope.clone(), 2, 64);
    spec.block_tokens = 4;
    spec
}

/// The registration of such a worker, for a connection without one.
pub fn context(instance: i64, scope: &Scope) -> EngineDrivenContext<'_> {
    EngineDrivenContext {
        instance: InstanceId(instance),
        model_name: &scope.model_name,
        world_size: 1,
        block_size: 4,
        num_layers: 2,
        hidden_dim_size: 64,
        dtype: "bfloat16",
        use_mla: false,
        chunk_tokens: None,
        num_physical_slots: None,
        groups: None,
        takes_pool: true,
    }
}

/// Slots of a prepared store, with the chunks they are for.
pub fn slots(prepared: PrepareStore<'static>) -> Vec<(u64, ChunkSlot<'static>)> {
    let target = prepared.target.expect("the server has a pool");
    target.chunk_indices.into_iter().zip(target.slots).collect()
}

/// Reserves memory for a store and returns the granted slots.
pub fn reserve(worker: &mut EngineDrivenWorker, key: &Key<'_>) -> Vec<(u64, ChunkSlot<'static>)> {
    let instance = worker.spec().instance;
    slots(worker.connection().prepare_store(key, instance).unwrap())
}

/// A DEALER socket that sends frames as they are.
pub struct Raw {
    socket: zmq::Socket,
    // Behind the socket, so that it is dropped later.
    _context: zmq::Context,
    barriers: u64,
}

/// Frames of one message.
pub type Frames = Vec<Vec<u8>>;

impl Raw {
    /// Connects; messages wait in the socket until the connection is there.
    pub fn connect(endpoint: &str) -> Self {
        let context = zmq::Context::new();
        let socket = context.socket(zmq::DEALER).unwrap();
        socket.set_linger(0).unwrap();
        socket
            .set_rcvtimeo(i32::try_from(PATIENCE.as_millis()).unwrap())
            .unwrap();
        socket
            .set_sndtimeo(i32::try_from(PATIENCE.as_millis()).unwrap())
            .unwrap();
        socket.connect(endpoint).unwrap();
        Self {
            socket,
            _context: context,
            barriers: 0,
        }
    }

    /// Sends one message.
    pub fn send<F: AsRef<[u8]>>(&self, frames: &[F]) {
        self.socket
            .send_multipart(frames.iter().map(AsRef::as_ref), 0)
            .unwrap();
    }

    /// The next message.
    pub fn receive(&self) -> Frames {
        self.socket.recv_multipart(0).expect("no reply")
    }

    /// The messages that are there already.
    pub fn take(&self) -> Vec<Frames> {
        std::iter::from_fn(|| self.socket.recv_multipart(zmq::DONTWAIT).ok()).collect()
    }

    /// Everything the server had to say to what was sent so far. A request of each of the server's lanes is sent and
    /// its answer awaited; what is older on this connection has been answered by then, or never will be.
    pub fn settle(&mut self) -> Vec<Frames> {
        self.barriers += 1;
        let uid = |lane: &str| format!("barrier {} {lane}", self.barriers).into_bytes();
        let barriers = [
            vec![uid("inline"), vec![24]],
            vec![uid("control"), vec![13], b"\xa7barrier".to_vec()],
            vec![uid("transfer"), vec![15], vec![0xd1, 0x80, 0x01]],
        ];
        for barrier in &barriers {
            self.send(barrier);
        }
        let mut left = barriers.len();
        let mut others = Vec::new();
        while left > 0 {
            let message = self.receive();
            if barriers.iter().any(|barrier| barrier[0] == message[0]) {
                left -= 1
            } else {
                others.push(message)
            }
        }
        others.extend(self.take());
        others
    }
}

/// A prompt of `chunks` that shares no chunk with that of another seed.
pub fn prompt(seed: u32, chunks: usize) -> Prompt {
    Prompt::new(&tokens(seed, chunks))
}

/// Tokens of a prompt of `chunks` chunks.
pub fn tokens(seed: u32, chunks: usize) -> Vec<u32> {
    (0..chunks * CHUNK)
        .map(|index| seed * 100_000 + u32::try_from(index).unwrap())
        .collect()
}

/// Token range of `chunks`.
pub fn range(chunks: Range<u64>) -> Range<u64> {
    chunks.start * CHUNK as u64..chunks.end * CHUNK as u64
}

/// All chunks of a prompt.
pub fn whole(prompt: &Prompt) -> Range<u64> {
    0..(prompt.len() / CHUNK) as u64
}

/// Bytes of a chunk that tell what they belong to.
pub fn bytes(seed: u64, chunk: u64, len: usize) -> Vec<u8> {
    let mut state =
        seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (chunk + 1).wrapping_mul(0xd1b5_4a32_d192_ed03);
    (0..len)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}
