//! What holds for all inputs: values survive both ways, and no bytes make anything panic.

use kvtier_proto::descriptor::Dtype;
use kvtier_proto::frames::{ClientMessage, OperationId, RequestFrames};
use kvtier_proto::generation::{Candidates, Field, Generation, OperationSpec};
use kvtier_proto::inline::{ChunksToWrite, InlineForm};
use kvtier_proto::key::{CacheKey, KeyForm, KeyHead, SkipTokens, TokenReader, VecTokens};
use kvtier_proto::operation::Operation;
use kvtier_proto::request::{
    AllocationRecord, BlockAllocation, EngineGroupInfo, EngineType, InstanceId, JobRef,
    KvLayoutName, LayoutHints, Registration, Request, Retrieve, Seconds, Store, Subscription,
};
use kvtier_proto::response::{
    ChunkSlot, EngineDriven, InlineHit, PrepareRetrieve, PrepareStore, Response, ResponseKind,
    SlotGroups, StoreTarget,
};
use kvtier_proto::tensor::TensorToWrite;
use kvtier_proto::wire::{self, Reader};
use proptest::collection::vec;
use proptest::prelude::*;

/// What a random key is made of, owned.
#[derive(Debug, Clone)]
struct Parts {
    texts: [String; 3],
    world_size: u32,
    worker_id: Option<u32>,
    tokens: Vec<u32>,
    range: (u64, u64),
    configs: Option<Vec<u8>>,
    readers: i64,
}

impl Parts {
    /// The key, without what its form cannot carry.
    fn key(&self, form: KeyForm) -> CacheKey<'_, Vec<u32>> {
        CacheKey {
            model_name: &self.texts[0],
            world_size: self.world_size,
            worker_id: self.worker_id,
            tokens: self.tokens.clone(),
            start: self.range.0,
            end: self.range.1,
            chunk_tokens: None,
            request_id: &self.texts[1],
            cache_salt: if form == KeyForm::Unsalted {
                ""
            } else {
                &self.texts[2]
            },
            request_configs: matches!(form, KeyForm::Full | KeyForm::Packed)
                .then_some(self.configs.as_deref())
                .flatten(),
            num_kv_readers: matches!(form, KeyForm::Full | KeyForm::Packed).then_some(self.readers),
        }
    }
}

/// Ids of every width, many of the common one.
fn tokens() -> impl Strategy<Value = Vec<u32>> {
    let token = prop_oneof![
        4 => 256u32..65_536,
        1 => 0u32..256,
        1 => any::<u32>(),
    ];
    vec(token, 0..200)
}

fn configs() -> impl Strategy<Value = Option<Vec<u8>>> {
    proptest::option::of(vec(("[a-z.]{0,40}", any::<i64>()), 0..4)).prop_map(|pairs| {
        pairs.map(|pairs| {
            let mut out = Vec::new();
            wire::write_map_len(&mut out, pairs.len());
            for (name, value) in pairs {
                wire::write_str(&mut out, &name);
                wire::write_int(&mut out, value);
            }
            out
        })
    })
}

fn parts() -> impl Strategy<Value = Parts> {
    (
        ("\\PC{0,40}", "\\PC{0,40}", "[a-z0-9é漢 .]{0,128}"),
        any::<u32>(),
        any::<Option<u32>>(),
        tokens(),
        any::<(u64, u64)>(),
        configs(),
        any::<i64>(),
    )
        .prop_map(
            |(texts, world_size, worker_id, tokens, range, configs, readers)| Parts {
                texts: texts.into(),
                world_size,
                worker_id,
                tokens,
                range,
                configs,
                readers,
            },
        )
}

/// A request for a row, from random material; none for operations that have nothing of their own to show.
fn request<'a>(
    spec: &OperationSpec,
    parts: &'a Parts,
    ints: &[i64],
    data: &'a [u8],
) -> Option<Request<'a, Vec<u32>>> {
    let form = spec.payloads.iter().find_map(|field| match field {
        Field::Key(form) => Some(*form),
        _ => None,
    });
    let key = || parts.key(form.unwrap());
    let has = |field| spec.payloads.contains(&field);
    let instance = InstanceId(ints[0]);
    let text = parts.texts[1].as_str();
    let flat = has(Field::BlockIds(kvtier_proto::generation::BlockForm::Flat));
    let block_ids = if flat {
        vec![ints.to_vec()]
    } else {
        vec![ints.to_vec(), vec![], ints[1..].to_vec()]
    };
    let job = if has(Field::JobId) {
        JobRef::Job(ints[1])
    } else {
        JobRef::Request(text)
    };
    Some(match spec.operation {
        Operation::RegisterKvCache => Request::RegisterKvCache(Registration {
            instance,
            tensors: vec![],
            model_name: text,
            world_size: parts.world_size,
            engine: if has(Field::EngineType) {
                EngineType::Trtllm
            } else {
                EngineType::Vllm
            },
            hints: LayoutHints {
                kv_layout: has(Field::LayoutHints).then_some(KvLayoutName::Hnd),
                head_dim: has(Field::LayoutHints).then_some(ints[1]),
                ..LayoutHints::default()
            },
            groups: if has(Field::GroupInfos) {
                vec![EngineGroupInfo {
                    engine_group_id: ints[1],
                    layer_indices: ints.to_vec(),
                    tokens_per_block: 16,
                    sw_size_tokens: -1,
                    extra_object_group_tag: 0,
                    recurrent_state: true,
                }]
            } else {
                vec![]
            },
        }),
        Operation::Store => Request::Store(Store {
            key: key(),
            instance,
            block_ids,
            event_handle: data,
        }),
        Operation::Retrieve => Request::Retrieve(Retrieve {
            key: key(),
            instance,
            block_ids,
            event_handle: data,
            skip_first_n_tokens: ints[1],
        }),
        Operation::Lookup => Request::Lookup {
            key: key(),
            tp_size: ints[1],
        },
        Operation::Find => Request::Find {
            key: key(),
            timeout: Seconds::Whole(ints[1]),
        },
        Operation::FreeLookupLocks => Request::FreeLookupLocks {
            key: key(),
            tp_size: ints[1],
            extra_ranges: if has(Field::ExtraRanges) {
                vec![(0, 256), (256, u64::MAX)]
            } else {
                Vec::new()
            },
        },
        Operation::QueryPrefetchStatus => Request::QueryPrefetchStatus { job },
        Operation::QueryPrefetchLookupHits => Request::QueryPrefetchLookupHits { job },
        Operation::WaitPrefetchStatus => Request::WaitPrefetchStatus {
            job,
            timeout: Seconds::Fraction(ints[1] as f64 / 8.0),
        },
        Operation::EndSession => Request::EndSession { request_id: text },
        Operation::PrepareStore => Request::PrepareStore {
            key: key(),
            instance,
            skipped_chunks: if has(Field::SkippedChunks) {
                vec![ints.to_vec(), Vec::new()]
            } else {
                Vec::new()
            },
        },
        Operation::CommitStore => Request::CommitStore {
            key: key(),
            instance,
            data,
        },
        Operation::PrepareRetrieve => Request::PrepareRetrieve {
            key: key(),
            instance,
        },
        Operation::CommitRetrieve => Request::CommitRetrieve {
            key: key(),
            instance,
        },
        Operation::Clear => Request::Clear {
            force: !has(Field::Force) || ints[1] % 2 == 0,
        },
        Operation::Ping => Request::Ping {
            instance: has(Field::OptionalInstanceId).then_some(instance),
        },
        Operation::ReportBlockAllocation => Request::ReportBlockAllocation(BlockAllocation {
            instance: has(Field::InstanceId).then_some(instance),
            model_name: has(Field::ModelName).then_some(text),
            records: vec![AllocationRecord {
                request_id: text,
                new_block_ids: ints.to_vec(),
                new_token_ids: vec![],
            }],
        }),
        Operation::SubscribeKvEvents => Request::SubscribeKvEvents(Subscription {
            instance,
            model_name: text,
            cursor: ints[0],
            max_events: ints[1],
        }),
        Operation::ServerModuleCall => Request::ServerModuleCall {
            method: text,
            payload: data,
        },
        Operation::ServerModuleAffinityCall => Request::ServerModuleAffinityCall {
            method: text,
            payload: data,
        },
        Operation::NegotiateChunkSize => Request::NegotiateChunkSize { alignment: ints[0] },
        Operation::CbReorderPlan => Request::CbReorderPlan {
            key: key(),
            keep_prefix: ints[0],
            budget_ms: ints[1],
        },
        _ => return None,
    })
}

fn every_row() -> impl Iterator<Item = (Generation, &'static OperationSpec)> {
    Generation::ALL.into_iter().flat_map(|generation| {
        generation
            .specs()
            .iter()
            .map(move |spec| (generation, spec))
    })
}

const KINDS: [ResponseKind; 16] = [
    ResponseKind::Nothing,
    ResponseKind::Int,
    ResponseKind::OptionalInt,
    ResponseKind::Bool,
    ResponseKind::Text,
    ResponseKind::Texts,
    ResponseKind::Ints,
    ResponseKind::Transfer,
    ResponseKind::EngineDriven,
    ResponseKind::PrepareStore,
    ResponseKind::PrepareRetrieve,
    ResponseKind::EventBatch,
    ResponseKind::UnifiedLookup,
    ResponseKind::Handshake,
    ResponseKind::Addresses,
    ResponseKind::ModuleCall,
];

/// Feeds bytes to everything that reads bytes from outside.
fn feed_all(frames: &[&[u8]]) {
    let _ = ClientMessage::parse(frames.iter().copied());
    for frame in frames {
        let _ = OperationId::decode(frame);
        let _ = Reader::new(frame).skip();
        let _ = CacheKey::decode(frame, &mut SkipTokens);
        for kind in KINDS {
            let _ = Response::decode(kind, Some(frame));
        }
    }
    for (_, spec) in every_row() {
        let count = spec.payloads.len().min(frames.len());
        let _ = Request::decode(spec, &frames[..count], &mut VecTokens);
        let op = spec.id().encode();
        let request = RequestFrames {
            uid: &[0],
            op: &op,
            payloads: frames.to_vec(),
        };
        let _ = Candidates::all().resolve(&request, &[]);
    }
}

proptest! {
    #[test]
    fn keys_survive(parts in parts()) {
        for form in [KeyForm::Unsalted, KeyForm::Salted, KeyForm::Full, KeyForm::Packed] {
            let key = parts.key(form);
            let mut bytes = Vec::new();
            key.write(form, &mut bytes);
            prop_assert_eq!(&CacheKey::decode(&bytes, &mut VecTokens).unwrap(), &key);
            let skipped = CacheKey::decode(&bytes, &mut SkipTokens).unwrap();
            prop_assert_eq!(skipped.tokens, key.tokens.len());
            let head = KeyHead {
                model_name: key.model_name,
                world_size: key.world_size,
                worker_id: key.worker_id,
                chunk_tokens: key.chunk_tokens,
                token_count: key.tokens.len(),
            };
            prop_assert_eq!(KeyHead::peek(&bytes), Some(head));
            // Any field missing at the end is an error or a default, never a panic.
            for end in 0..bytes.len() {
                prop_assert!(CacheKey::decode(&bytes[..end], &mut VecTokens).is_err());
            }
        }
    }

    #[test]
    fn requests_survive_in_every_generation(
        parts in parts(),
        ints in vec(any::<i64>(), 2..20),
        data in vec(any::<u8>(), 0..100),
    ) {
        for (generation, spec) in every_row() {
            let Some(request) = request(spec, &parts, &ints, &data) else { continue };
            let payloads = request.encode(spec).unwrap();
            let payloads: Vec<_> = payloads.iter().map(Vec::as_slice).collect();
            let decoded = Request::decode(spec, &payloads, &mut VecTokens).unwrap();
            prop_assert_eq!(&decoded, &request, "{:?} {}", generation, spec.operation);

            // A connection of that generation finds the row again.
            let op = spec.id().encode();
            let frames = RequestFrames { uid: &[5], op: &op, payloads };
            if generation == Generation::G6 || spec.number.is_some() {
                let resolved = Candidates::only(generation).resolve(&frames, &[]).unwrap();
                prop_assert_eq!(resolved.spec.operation, spec.operation);
                let mut open = Candidates::all();
                open.resolve(&frames, &[]).unwrap();
                // No adapter sends these but as request 0, nor a worker's request without its number.
                let unsent = matches!(spec.operation, Operation::GetChunkSize | Operation::Clear | Operation::Noop);
                let is_schedulers = matches!(spec.operation, Operation::Lookup | Operation::FreeLookupLocks);
                let unsent = unsent || parts.worker_id.is_some() == is_schedulers;
                prop_assert!(unsent || open.contains(generation), "{:?} {}", generation, spec.operation);
            }
        }
    }

    #[test]
    fn tokens_decode_like_their_definition(
        tokens in tokens(),
        widths in vec(0u8..8, 200),
        behind in vec(any::<u8>(), 0..20),
    ) {
        // Any width an int may have on the wire, not only the shortest.
        let mut data = Vec::new();
        for (token, width) in tokens.iter().zip(&widths) {
            match width {
                0 => { data.push(0xcf); data.extend(u64::from(*token).to_be_bytes()); }
                1 => { data.push(0xd3); data.extend(i64::from(*token).to_be_bytes()); }
                2 => { data.push(0xce); data.extend(token.to_be_bytes()); }
                _ => wire::write_uint(&mut data, u64::from(*token)),
            }
        }
        let len = data.len();
        data.extend(&behind);
        let mut out = vec![7];
        prop_assert_eq!(wire::decode_tokens(tokens.len(), &data, &mut out).unwrap(), len);
        prop_assert_eq!(&out[1..], &tokens);
        prop_assert_eq!(wire::skip_tokens(tokens.len(), &data).unwrap(), len);
        prop_assert_eq!(VecTokens.read(tokens.len(), &data).unwrap(), (tokens, len));
    }

    #[test]
    fn both_token_loops_fail_alike(data in vec(any::<u8>(), 0..400), count in 0usize..300) {
        let mut out = vec![1, 2];
        let decoded = wire::decode_tokens(count, &data, &mut out);
        prop_assert_eq!(&decoded, &wire::skip_tokens(count, &data));
        prop_assert_eq!(out.len(), if decoded.is_ok() { 2 + count } else { 2 });
    }

    #[test]
    fn responses_survive(
        ints in vec(any::<u64>(), 0..10),
        text in "\\PC{0,50}",
        data in vec(any::<u8>(), 0..300),
        flag in any::<bool>(),
    ) {
        let slots: Vec<_> = ints.iter().map(|&offset| ChunkSlot {
            offset,
            length: 1,
            shape: ints.clone().into(),
            dtype: text.as_str().into(),
        }).collect();
        let groups = SlotGroups { group_ids: ints.clone(), chunk_indices: ints.clone() };
        let groups = (ints.len() % 2 == 0).then_some(groups);
        let target = flag.then(|| StoreTarget {
            slots: slots.clone(),
            chunk_indices: ints.clone(),
            group_ids: groups.as_ref().map(|groups| groups.group_ids.clone()),
        });
        let cases = [
            (ResponseKind::Text, Response::Text(text.as_str().into())),
            (ResponseKind::Transfer, Response::transfer(&data, flag)),
            (ResponseKind::EngineDriven, Response::EngineDriven(EngineDriven {
                shm_name: text.as_str().into(),
                pool_size: ints.first().copied().unwrap_or(0),
                null_block_id: flag.then_some(-7),
            })),
            (ResponseKind::PrepareStore, Response::PrepareStore(PrepareStore { target })),
            (ResponseKind::PrepareRetrieve, Response::PrepareRetrieve(PrepareRetrieve {
                success: flag,
                data: data.as_slice().into(),
                slots: flag.then_some(slots),
                groups: groups.filter(|_| flag),
            })),
        ];
        for (kind, response) in cases {
            let bytes = response.encode().unwrap();
            prop_assert_eq!(Response::decode(kind, Some(&bytes)).unwrap(), response);
        }

        let shape = [data.len() as u64];
        let tensor = TensorToWrite { dtype: Dtype::UInt8, shape: &shape };
        let group = |positions| ChunksToWrite { tensor, positions };
        for (form, groups) in [
            (InlineForm::Pickle, vec![group(0..2)]),
            (InlineForm::Envelope, vec![group(0..2)]),
            (InlineForm::Envelope, vec![group(1..2), group(0..0), group(0..300)]),
        ] {
            let InlineHit { mut text, places } = InlineHit::new(form, &groups).unwrap().unwrap();
            for place in places.into_iter().rev() {
                text.splice(place..place, data.iter().copied());
            }
            let hit = Response::decode(ResponseKind::PrepareRetrieve, Some(&text)).unwrap();
            let Response::PrepareRetrieve(hit) = hit else { unreachable!() };
            prop_assert!(hit.success && hit.slots.is_none());
            let read = form.read(&hit.data).unwrap();
            prop_assert_eq!(read.len(), groups.len());
            for (read, group) in read.iter().zip(&groups) {
                let positions: Vec<u64> = group.positions.clone().collect();
                prop_assert_eq!(read.tensors.len(), positions.len());
                if groups.len() > 1 {
                    prop_assert_eq!(read.positions.as_ref(), Some(&positions));
                }
                for tensor in &read.tensors {
                    prop_assert_eq!(&tensor.shape, &shape);
                    prop_assert_eq!(tensor.contiguous_bytes(), Some(&data[..]));
                }
            }
        }
    }

    #[test]
    fn random_frames_never_panic(frames in vec(vec(any::<u8>(), 0..60), 0..9)) {
        let frames: Vec<_> = frames.iter().map(Vec::as_slice).collect();
        feed_all(&frames);
    }

    #[test]
    fn damaged_requests_never_panic(
        parts in parts(),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
    ) {
        for (_, spec) in every_row() {
            let Some(request) = request(spec, &parts, &[3, 4], b"data") else { continue };
            let mut payloads = request.encode(spec).unwrap();
            for frame in payloads.iter_mut().filter(|frame| !frame.is_empty()) {
                let at = at.index(frame.len());
                frame[at] = byte;
            }
            let payloads: Vec<_> = payloads.iter().map(Vec::as_slice).collect();
            let _ = Request::decode(spec, &payloads, &mut VecTokens);
        }
    }
}

#[test]
fn claimed_counts_allocate_nothing() {
    // Arrays, maps, texts and bytes that claim four billion of what is not there.
    for head in [0xdd, 0xdf, 0xdb, 0xc6, 0xc9] {
        let frame = [head, 0xff, 0xff, 0xff, 0xff, 1, 2, 3];
        feed_all(&[&frame, &frame, &frame, &frame]);
        assert!(Reader::new(&frame).skip().is_err());
    }
    let mut out = Vec::new();
    assert!(wire::decode_tokens(usize::MAX, &[1, 2, 3], &mut out).is_err());
    assert_eq!(out.capacity(), 0);
    assert!(wire::skip_tokens(usize::MAX, &[1, 2, 3]).is_err());
}

#[test]
fn deep_nesting_is_refused() {
    let nested = |depth: usize| [vec![0x91; depth], vec![0x01]].concat();
    assert!(Reader::new(&nested(wire::MAX_DEPTH - 1)).skip().is_ok());
    assert!(Reader::new(&nested(wire::MAX_DEPTH)).skip().is_err());
    assert!(Reader::new(&nested(1_000_000)).skip().is_err());
}

#[test]
fn errors_name_the_field() {
    let key = b"\x87\xaamodel_name\xa1m\xaaworld_size\x01\xa9worker_id\xc0\
        \xa9token_ids\x92\x05\xc3\xa5start\x00\xa3end\x00\xaarequest_id\xa1r";
    let error = CacheKey::decode(key, &mut VecTokens).unwrap_err();
    assert_eq!(error.field, "token_ids[1]");
    assert_eq!(
        error.to_string(),
        "token_ids[1]: expected an int, found a bool"
    );
    let spec = Generation::G6.spec(Operation::Lookup).unwrap();
    let error = Request::decode(spec, &[key, &[1]], &mut VecTokens).unwrap_err();
    assert_eq!(error.field, "key.token_ids[1]");
}
