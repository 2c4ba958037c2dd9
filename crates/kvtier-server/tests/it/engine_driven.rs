//! Workers of LMCache 0.5.7 that copy by themselves: chunks in messages that are no pickles, and several groups of layers.
//! [`captures`](super::captures) has whole conversations of the real client.

use kvtier_client::Scope;
use kvtier_client::proto::descriptor::Dtype;
use kvtier_client::proto::generation::Generation;
use kvtier_client::proto::inline::InlineForm;
use kvtier_client::proto::key::CacheKey;
use kvtier_client::proto::request::{
    EngineDrivenContext, GroupLayout, InstanceId, JobRef, Request,
};
use kvtier_client::proto::response::{PrepareRetrieve, PrepareStore, Response};
use kvtier_client::proto::{pickle, wire};

use crate::http::json_of;
use crate::support::{CHUNK, Raw, Steps as _, TestServer, bytes, context, prompt, range, tokens};

const MODEL: &str = "newest/model";
const INSTANCE: InstanceId = InstanceId(1 << 40);

/// A scheduler and a worker of LMCache 0.5.7, on one connection.
pub struct Client {
    socket: Raw,
    uid: u8,
}

impl Client {
    pub fn new(server: &TestServer) -> Self {
        let mut client = Self {
            socket: server.raw(),
            uid: 0,
        };
        let negotiated = client.ask(&Request::NegotiateChunkSize { alignment: 4 });
        assert_eq!(negotiated, Response::Int(CHUNK as i64));
        client
    }

    fn ask(&mut self, request: &Request<'_, Vec<u32>>) -> Response<'static> {
        let mut rows = Generation::G6.specs().iter().rev();
        // The rows of 0.5.7 stand last.
        let row = rows
            .find(|row| row.operation == request.operation())
            .unwrap();
        self.uid += 1;
        let mut frames = vec![vec![self.uid], Vec::new()];
        match row.number {
            Some(number) => wire::write_uint(&mut frames[1], number.into()),
            None => wire::write_str(&mut frames[1], row.operation.name()),
        }
        frames.extend(request.encode(row).unwrap());
        self.socket.send(&frames);
        let answer = self.socket.receive();
        assert_eq!(answer[..2], frames[..2], "{answer:02x?}");
        let payload: Option<&'static [u8]> = answer.get(2).map(|it| &*it.clone().leak());
        Response::decode(row.response, payload).unwrap()
    }

    pub fn register(&mut self, groups: Vec<GroupLayout<'_>>) {
        let scope = Scope::new(MODEL);
        let context = EngineDrivenContext {
            groups: Some(groups),
            num_physical_slots: Some(CHUNK as i64),
            ..context(INSTANCE.0, &scope)
        };
        let Response::EngineDriven(pool) = self.ask(&Request::RegisterEngineDriven(context)) else {
            panic!("no pool")
        };
        assert_eq!(pool.null_block_id, Some(0));
    }

    fn lookup(&mut self, chunks: usize, request_id: &'static str) -> Response<'static> {
        self.ask(&Request::Lookup {
            key: key(None, chunks, request_id),
            tp_size: 1,
        });
        let job = JobRef::Request(request_id);
        self.ask(&Request::QueryPrefetchStatus { job })
    }

    fn prepare_store(
        &mut self,
        chunks: usize,
        skipped_chunks: Vec<Vec<i64>>,
    ) -> PrepareStore<'static> {
        let prepare = Request::PrepareStore {
            key: key(Some(0), chunks, "s"),
            instance: INSTANCE,
            skipped_chunks,
        };
        match self.ask(&prepare) {
            Response::PrepareStore(prepared) => prepared,
            other => panic!("{other:?}"),
        }
    }

    fn commit_store(&mut self, chunks: usize, data: &[u8]) -> bool {
        let commit = Request::CommitStore {
            key: key(Some(0), chunks, "s"),
            instance: INSTANCE,
            data,
        };
        self.ask(&commit) == Response::Bool(true)
    }

    fn retrieve(&mut self, chunks: usize, request_id: &'static str) -> PrepareRetrieve<'static> {
        let prepare = Request::PrepareRetrieve {
            key: key(Some(0), chunks, request_id),
            instance: INSTANCE,
        };
        match self.ask(&prepare) {
            Response::PrepareRetrieve(prepared) => prepared,
            other => panic!("{other:?}"),
        }
    }
}

/// The key of the first chunks of the prompt of these tests.
fn key(worker_id: Option<u32>, chunks: usize, request_id: &str) -> CacheKey<'_, Vec<u32>> {
    CacheKey {
        model_name: MODEL,
        world_size: 1,
        worker_id,
        tokens: tokens(1, chunks),
        start: 0,
        end: (chunks * CHUNK) as u64,
        chunk_tokens: None,
        request_id,
        cache_salt: "",
        request_configs: None,
        num_kv_readers: Some(1),
    }
}

/// A group of one layer: 2 x 1 x 16 tokens x 8 values x 2 bytes are a chunk.
fn group() -> GroupLayout<'static> {
    GroupLayout {
        num_layers: 1,
        hidden_dim_size: 8,
        dtype: "bfloat16",
        tokens_per_block: 4,
        window_tokens: 16,
        kv_size: 2,
        window_chunks: 0,
        recurrent: false,
    }
}

/// A tensor of an envelope.
fn tensor(out: &mut Vec<u8>, dtype: &str, shape: &[u64], data: &[u8]) {
    wire::write_map_len(out, 3);
    wire::write_str(out, "dtype");
    wire::write_str(out, dtype);
    wire::write_str(out, "shape");
    wire::write_array_len(out, shape.len());
    shape
        .iter()
        .for_each(|length| wire::write_uint(out, *length));
    wire::write_str(out, "data");
    wire::write_bin(out, data);
}

/// The start of an envelope whose field `name` has `len` items.
fn envelope(name: &str, len: usize) -> Vec<u8> {
    let mut out = vec![0x82];
    wire::write_str(&mut out, "version");
    wire::write_uint(&mut out, 1);
    wire::write_str(&mut out, name);
    wire::write_array_len(&mut out, len);
    out
}

/// Chunks of groups, each with its positions.
fn grouped(groups: &[&[u64]], data: &[u8]) -> Vec<u8> {
    grouped_as(groups, |out| tensor(out, "bfloat16", &[2, 1, 16, 8], data))
}

fn grouped_as(groups: &[&[u64]], write: impl Fn(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = envelope("groups", groups.len());
    for positions in groups {
        wire::write_map_len(&mut out, 2);
        wire::write_str(&mut out, "chunk_indices");
        wire::write_array_len(&mut out, positions.len());
        positions
            .iter()
            .for_each(|it| wire::write_uint(&mut out, *it));
        wire::write_str(&mut out, "tensors");
        wire::write_array_len(&mut out, positions.len());
        positions.iter().for_each(|_| write(&mut out));
    }
    out
}

// proves: docs/identity.md#the-fingerprint
#[test]
fn inline_chunks_are_shared_with_earlier_releases() {
    let server = TestServer::start(&["--shm-name", ""]);
    let scope = Scope::new(MODEL);
    let mut earlier = server.engine_driven(2, &scope);
    let mut client = Client::new(&server);
    client.register(Vec::new());
    let len = earlier.chunk_bytes();
    // Two chunks by 0.5.6, which pickles.
    let prompt = prompt(1, 3);
    earlier.stored(&prompt, 0..2, 7);
    assert_eq!(client.lookup(2, "a"), Response::Int(2));
    let hit = client.retrieve(2, "a");
    let groups = InlineForm::Envelope.read(&hit.data).unwrap();
    assert_eq!((groups.len(), &groups[0].positions), (1, &None));
    for (tensor, chunk) in groups[0].tensors.iter().zip(0..) {
        assert_eq!(
            (tensor.dtype, &tensor.shape[..]),
            (Dtype::BFloat16, &[2, 2, 16, 64][..])
        );
        assert_eq!(tensor.contiguous_bytes(), Some(&bytes(7, chunk, len)[..]));
    }
    assert_eq!(groups[0].tensors.len(), 2);
    // Three by 0.5.7; the first two are there.
    assert_eq!(client.prepare_store(3, Vec::new()).target, None);
    let mut data = envelope("tensors", 3);
    for chunk in 0..3 {
        tensor(
            &mut data,
            "bfloat16",
            &[2, 2, 16, 64],
            &bytes(7, chunk, len),
        );
    }
    assert!(client.commit_store(3, &data));
    assert_eq!(earlier.lookup(&prompt, "b").unwrap(), 3);
    earlier.assert_reads(&prompt, 0..3, "b", 7);
}

// proves: docs/clients.md#a-client-sends-malformed-or-hostile-messages
#[test]
fn inline_form_is_known_by_generation() {
    let server = TestServer::start(&["--shm-name", ""]);
    let scope = Scope::new(MODEL);
    let mut earlier = server.engine_driven(2, &scope);
    let len = earlier.chunk_bytes();
    let mut own = envelope("tensors", 1);
    tensor(&mut own, "bfloat16", &[2, 2, 16, 64], &bytes(7, 0, len));
    let prompt = prompt(1, 1);
    let earlier_key = scope.worker_key(0, &prompt, range(0..1), "p");
    let instance = earlier.spec().instance;
    assert!(
        !earlier
            .connection()
            .commit_store(&earlier_key, instance, &own)
            .unwrap()
    );
    let mut client = Client::new(&server);
    client.register(Vec::new());
    let form = pickle::TensorToWrite {
        dtype: Dtype::BFloat16,
        shape: &[2, 2, 16, 64],
    };
    let pickled = pickle::write_tensors::<pickle::WriteError>(&[form], |_, out| {
        out.extend(bytes(7, 0, len));
        Ok(())
    });
    assert!(!client.commit_store(1, &pickled.unwrap()));
    assert_eq!(server.readings().objects, 0);
    assert!(client.commit_store(1, &own));
    assert_eq!(server.readings().objects, 1);
}

// proves: docs/clients.md#a-client-sends-malformed-or-hostile-messages
#[test]
fn hostile_envelopes_store_nothing() {
    let server = TestServer::start(&["--shm-name", "", "--windowed-clients", "allow"]);
    let mut client = Client::new(&server);
    client.register(vec![group(), group()]);
    let data = vec![7; 512];
    let good = grouped(&[&[0, 1], &[1]], &data);
    let mut unknown = good.clone();
    unknown[0] = 0x83;
    wire::write_str(&mut unknown, "more");
    wire::write_nil(&mut unknown);
    let mut other_version = good.clone();
    other_version[9] = 2;
    let mut flat = envelope("tensors", 1);
    tensor(&mut flat, "bfloat16", &[2, 1, 16, 8], &data);
    let one = |dtype: &str, shape: &[u64], data: &[u8]| {
        grouped_as(&[&[0], &[]], |out| tensor(out, dtype, shape, data))
    };
    let mut many = envelope("groups", 2);
    many.truncate(many.len() - 1);
    many.extend([0xdd, 0xff, 0xff, 0xff, 0xff]);
    let cases: [(&str, Vec<u8>); 14] = [
        ("cut", good[..good.len() - 1].to_vec()),
        ("bytes behind it", [&good[..], &[0xc0]].concat()),
        ("unknown field", unknown),
        ("version", other_version),
        ("flat list of several groups", flat),
        ("one group too few", grouped(&[&[0]], &data)),
        ("one group too many", grouped(&[&[0], &[], &[]], &data)),
        ("position outside the range", grouped(&[&[2], &[]], &data)),
        ("position twice", grouped(&[&[0, 0], &[]], &data)),
        ("positions that fall", grouped(&[&[1, 0], &[]], &data)),
        ("dtype", one("float16", &[2, 1, 16, 8], &data)),
        ("shape", one("bfloat16", &[2, 16, 1, 8], &data)),
        ("length", one("bfloat16", &[2, 1, 16, 8], &data[1..])),
        ("count beyond the message", many),
    ];
    for (name, case) in cases {
        assert!(!client.commit_store(2, &case), "{name}");
        assert_eq!(server.readings().objects, 0, "{name}");
    }
    let nested = [vec![0x91; 1 << 20], vec![0xc0]].concat();
    assert!(!client.commit_store(2, &nested));
    assert!(client.commit_store(2, &good));
    assert_eq!(server.readings().objects, 3);
    server.assert_sound();
}

// proves: docs/identity.md#the-fingerprint
#[test]
fn slots_leave_out_chunks_that_their_group_skips() {
    let server = TestServer::start(&["--windowed-clients", "allow"]);
    let mut client = Client::new(&server);
    let window = GroupLayout {
        window_chunks: 1,
        ..group()
    };
    client.register(vec![group(), window]);
    for skipped in [
        vec![vec![0]],
        vec![vec![], vec![2]],
        vec![vec![-1], vec![]],
        vec![vec![]; 3],
    ] {
        let refused = client.prepare_store(2, skipped).target.unwrap();
        assert_eq!((refused.slots.len(), refused.group_ids), (0, Some(vec![])));
    }
    let granted = client
        .prepare_store(2, vec![vec![], vec![0]])
        .target
        .unwrap();
    assert_eq!(granted.group_ids, Some(vec![0, 0, 1]));
    assert_eq!(granted.chunk_indices, [0, 1, 1]);
    assert!(client.commit_store(2, b""));
    assert_eq!(server.readings().objects, 3);
    // A second store has nothing to write, and a shorter prompt no window.
    let again = client
        .prepare_store(2, vec![vec![], vec![0]])
        .target
        .unwrap();
    assert_eq!((again.slots.len(), again.group_ids), (0, Some(vec![])));
    assert_eq!(client.lookup(1, "short"), Response::Int(0));
    assert_eq!(client.lookup(2, "long"), Response::Int(2));
    let hit = client.retrieve(2, "long");
    let groups = hit.groups.unwrap();
    assert!(hit.success);
    assert_eq!(
        (groups.group_ids, groups.chunk_indices),
        (vec![0, 0, 1], vec![0, 1, 1])
    );
    let slots = hit.slots.unwrap();
    let slots: Vec<_> = slots.iter().map(|slot| slot.offset).collect();
    let written: Vec<_> = granted.slots.iter().map(|slot| slot.offset).collect();
    assert_eq!(slots, written);
    server.assert_sound();
}

// proves: docs/clients.md#a-model-has-sliding-windows-or-recurrent-states
#[test]
fn windowed_groups_register_without_a_cache() {
    for (window_chunks, recurrent) in [(1, false), (0, true)] {
        for flags in [&[][..], &["--shm-name", ""]] {
            let server = TestServer::start(flags);
            let mut client = Client::new(&server);
            let group = GroupLayout {
                window_chunks,
                recurrent,
                ..group()
            };
            client.register(vec![self::group(), group]);
            let (_, status) = json_of(&server, "GET", "/status", "");
            let reason = &status["unserved_instances"][INSTANCE.0.to_string()];
            assert_eq!(reason, "windowed_client");
            if let Some(target) = client.prepare_store(1, Vec::new()).target {
                assert_eq!((target.slots.len(), target.group_ids), (0, Some(vec![])));
            }
            assert!(!client.commit_store(1, &grouped(&[&[0], &[0]], &[7; 512])));
            assert_eq!(client.lookup(1, "r"), Response::Int(0));
            assert!(!client.retrieve(1, "r").success);
            assert_eq!(server.readings().objects, 0);
        }
    }
}

// proves: docs/clients.md#a-model-has-sliding-windows-or-recurrent-states
// proves: docs/compare.md#engine_driven
#[test]
fn groups_without_windows_have_a_cache() {
    let server = TestServer::start(&["--shm-name", ""]);
    let mut client = Client::new(&server);
    client.register(vec![group(), group()]);
    assert!(client.commit_store(1, &grouped(&[&[0], &[0]], &[7; 512])));
    assert_eq!(client.lookup(1, "r"), Response::Int(1));
    let hit = client.retrieve(1, "r");
    assert_eq!(hit.data, grouped(&[&[0], &[0]], &[7; 512]));
}
