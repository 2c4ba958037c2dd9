//! Payload frames to requests.

use super::types::{
    EngineDrivenContext, EngineType, InstanceId, JobRef, LayoutDescriptor, LayoutHints, MAX_GROUPS,
    MAX_TENSORS, ObjectKeyParts, Seconds,
};
use super::{
    BlockAllocation, Registration, Request, Retrieve, RetrieveMatched, RopeRegistration, Store,
    Subscription,
};
use crate::descriptor::TensorDescriptor;
use crate::generation::{BlockForm, ContextForm, Field, OperationSpec};
use crate::key::{CacheKey, TokenReader};
use crate::lenient;
use crate::operation::Operation;
use crate::response::ResponseKind;
use crate::wire::{self, DecodeError, InField, Reader, WireValue};

/// Most further ranges in one `free_lookup_locks`: lookups of one request that its engine has abandoned.
const MAX_EXTRA_RANGES: usize = 1024;

/// Decodes the payload frames of a request by its row, and returns the first field of a map that is not known.
pub(super) fn decode<'a, R: TokenReader>(
    spec: &OperationSpec,
    payloads: &[&'a [u8]],
    tokens: &mut R,
) -> Result<(Request<'a, R::Output>, Option<UnknownField<'a>>), DecodeError> {
    if payloads.len() != spec.payloads.len() {
        return Err(DecodeError::new(format!(
            "{} has {} payloads, {} arrived",
            spec.operation,
            spec.payloads.len(),
            payloads.len()
        )));
    }
    let mut p = Payloads {
        fields: spec.payloads,
        frames: payloads,
        tokens,
        unknown: None,
    };
    let request = match spec.operation {
        Operation::RegisterKvCache => Request::RegisterKvCache(p.registration()?),
        Operation::RegisterQCache => Request::RegisterQCache(p.registration()?),
        Operation::UnregisterKvCache => Request::UnregisterKvCache {
            instance: p.instance()?,
        },
        Operation::UnregisterQCache => Request::UnregisterQCache {
            instance: p.instance()?,
        },
        Operation::UnregisterEngineDriven => Request::UnregisterEngineDriven {
            instance: p.instance()?,
        },
        Operation::CbUnregisterRope => Request::CbUnregisterRope {
            instance: p.instance()?,
        },
        Operation::Store => Request::Store(p.store()?),
        Operation::StoreQ => Request::StoreQ(p.store()?),
        Operation::Retrieve => Request::Retrieve(Retrieve {
            key: p.key()?,
            instance: p.instance()?,
            block_ids: p.block_ids()?,
            event_handle: p.bytes(Field::EventHandle)?,
            skip_first_n_tokens: p.int(Field::SkipTokens)?,
        }),
        Operation::Lookup => {
            let (key, tp_size) = p.key_and_size()?;
            Request::Lookup { key, tp_size }
        }
        Operation::Find => Request::Find {
            key: p.key()?,
            timeout: p.value(Field::Timeout, Seconds::read)?,
        },
        Operation::FreeLookupLocks => {
            let (key, tp_size) = p.key_and_size()?;
            Request::FreeLookupLocks {
                key,
                tp_size,
                extra_ranges: p
                    .optional(Field::ExtraRanges, |reader| {
                        reader.short_array_of(MAX_EXTRA_RANGES, read_range)
                    })?
                    .unwrap_or_default(),
            }
        }
        Operation::CbUnifiedLookup => {
            let (key, tp_size) = p.key_and_size()?;
            Request::CbUnifiedLookup { key, tp_size }
        }
        Operation::QueryPrefetchStatus => Request::QueryPrefetchStatus { job: p.job()? },
        Operation::QueryPrefetchLookupHits => Request::QueryPrefetchLookupHits { job: p.job()? },
        Operation::WaitPrefetchStatus => Request::WaitPrefetchStatus {
            job: p.job()?,
            timeout: p.value(Field::Timeout, Seconds::read)?,
        },
        Operation::EndSession => Request::EndSession {
            request_id: p.text(Field::RequestId)?,
        },
        Operation::RegisterEngineDriven => Request::RegisterEngineDriven(EngineDrivenContext {
            takes_pool: spec.response != ResponseKind::Nothing,
            ..p.context()?
        }),
        Operation::PrepareStore => {
            let (key, instance) = p.key_and_instance()?;
            Request::PrepareStore {
                key,
                instance,
                skipped_chunks: p
                    .optional(Field::SkippedChunks, |reader| {
                        reader.short_array_of(MAX_GROUPS, Reader::ints)
                    })?
                    .unwrap_or_default(),
            }
        }
        Operation::PrepareRetrieve => {
            let (key, instance) = p.key_and_instance()?;
            Request::PrepareRetrieve { key, instance }
        }
        Operation::CommitRetrieve => {
            let (key, instance) = p.key_and_instance()?;
            Request::CommitRetrieve { key, instance }
        }
        Operation::CommitStore => Request::CommitStore {
            key: p.key()?,
            instance: p.instance()?,
            data: p.bytes(Field::Data)?,
        },
        Operation::Clear => Request::Clear {
            force: p.optional(Field::Force, lenient::bool)?.unwrap_or(true),
        },
        Operation::GetChunkSize => Request::GetChunkSize,
        Operation::NegotiateChunkSize => Request::NegotiateChunkSize {
            alignment: p.int(Field::ChunkAlignment)?,
        },
        Operation::GetExperimental => Request::GetExperimental,
        Operation::Noop => Request::Noop,
        Operation::Ping => Request::Ping {
            instance: p
                .optional(Field::OptionalInstanceId, Reader::optional_int)?
                .flatten()
                .map(InstanceId),
        },
        Operation::ReportBlockAllocation => Request::ReportBlockAllocation(BlockAllocation {
            instance: p.optional(Field::InstanceId, lenient::int)?.map(InstanceId),
            model_name: p.optional(Field::ModelName, Reader::str)?,
            records: p.value(Field::AllocationRecords, WireValue::read)?,
        }),
        Operation::CbRegisterRope => Request::CbRegisterRope(RopeRegistration {
            instance: p.instance()?,
            caches: p.tensors()?,
            head_size: p.int(Field::HeadSize)?,
            is_neox_style: p.value(Field::IsNeoxStyle, lenient::bool)?,
            group_to_cache: p.value(Field::GroupToCache, Reader::ints)?,
            group_rot: p.value(Field::GroupRot, |reader| {
                reader.short_array_of(MAX_GROUPS, Reader::ints)
            })?,
            group_head_size: p.value(Field::GroupHeadSize, Reader::ints)?,
            kv_quant: p.text(Field::KvQuant)?,
        }),
        Operation::CbRetrievePreComputed => Request::CbRetrievePreComputed(RetrieveMatched {
            key: p.key()?,
            matches: p.value(Field::MatchedSegments, WireValue::read)?,
            block_ids: p.block_ids()?,
            instance: p.instance()?,
            event_handle: p.bytes(Field::EventHandle)?,
        }),
        Operation::CbReorderPlan => Request::CbReorderPlan {
            key: p.key()?,
            keep_prefix: p.int(Field::KeepPrefix)?,
            budget_ms: p.int(Field::BudgetMs)?,
        },
        Operation::CbProtocolHandshake => Request::CbProtocolHandshake {
            client_version: p.int(Field::ClientVersion)?,
        },
        Operation::P2pLookupAndLock => Request::P2pLookupAndLock {
            keys: p.object_keys()?,
            layouts: p.value(Field::LayoutDescriptors, read_layouts)?,
        },
        Operation::P2pQueryLookupResults => Request::P2pQueryLookupResults {
            task_id: p.int(Field::TaskId)?,
        },
        Operation::P2pUnlockObjects => Request::P2pUnlockObjects {
            keys: p.object_keys()?,
        },
        Operation::SubscribeKvEvents => Request::SubscribeKvEvents(Subscription {
            instance: p.instance()?,
            model_name: p.text(Field::ModelName)?,
            cursor: p.int(Field::Cursor)?,
            max_events: p.int(Field::MaxEvents)?,
        }),
        Operation::ServerModuleCall => {
            let (method, payload) = p.value(Field::ModuleCall, read_module_call)?;
            Request::ServerModuleCall { method, payload }
        }
        Operation::ServerModuleAffinityCall => {
            let (method, payload) = p.value(Field::ModuleCall, read_module_call)?;
            Request::ServerModuleAffinityCall { method, payload }
        }
    };
    p.end()?;
    Ok((request, p.unknown))
}

/// A field of a map that no served release sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnknownField<'a> {
    /// Name of the payload that has it, in the map or inside it.
    pub payload: &'static str,
    /// Name of the field, cut as it is shown.
    pub name: &'a str,
}

/// The payload frames that are left, with the row's word on each.
///
/// Methods take the next frame if it is the field they are for. A field that a generation's row does not
/// have is absent; whether that is allowed is the caller's business (`optional`).
struct Payloads<'s, 'a, R> {
    fields: &'s [Field],
    frames: &'s [&'a [u8]],
    tokens: &'s mut R,
    unknown: Option<UnknownField<'a>>,
}

impl<'a, R: TokenReader> Payloads<'_, 'a, R> {
    /// The next frame and its field, if `wanted` accepts it.
    fn next_if(&mut self, wanted: impl FnOnce(Field) -> bool) -> Option<(Field, &'a [u8])> {
        let (&field, fields) = self.fields.split_first()?;
        let (&frame, frames) = self.frames.split_first()?;
        if !wanted(field) {
            return None;
        }
        self.fields = fields;
        self.frames = frames;
        Some((field, frame))
    }

    /// The whole of the next frame if it is `field`.
    fn optional<V>(
        &mut self,
        field: Field,
        read: impl FnOnce(&mut Reader<'a>) -> Result<V, DecodeError>,
    ) -> Result<Option<V>, DecodeError> {
        let next = self.next_if(|next| next == field);
        next.map(|(field, frame)| read_whole(field, frame, &mut self.unknown, read))
            .transpose()
    }

    /// The whole of the next frame, which must be `field`.
    fn value<V>(
        &mut self,
        field: Field,
        read: impl FnOnce(&mut Reader<'a>) -> Result<V, DecodeError>,
    ) -> Result<V, DecodeError> {
        self.optional(field, read)?
            .ok_or_else(|| absent(field.name()))
    }

    fn int(&mut self, field: Field) -> Result<i64, DecodeError> {
        self.value(field, lenient::int)
    }

    fn text(&mut self, field: Field) -> Result<&'a str, DecodeError> {
        self.value(field, Reader::str)
    }

    fn bytes(&mut self, field: Field) -> Result<&'a [u8], DecodeError> {
        self.value(field, Reader::bin)
    }

    fn instance(&mut self) -> Result<InstanceId, DecodeError> {
        self.int(Field::InstanceId).map(InstanceId)
    }

    fn key(&mut self) -> Result<CacheKey<'a, R::Output>, DecodeError> {
        let (field, frame) = self
            .next_if(|field| matches!(field, Field::Key(_)))
            .ok_or_else(|| absent("key"))?;
        let tokens = &mut *self.tokens;
        read_whole(field, frame, &mut self.unknown, |reader| {
            CacheKey::read(reader, tokens)
        })
    }

    fn key_and_size(&mut self) -> Result<(CacheKey<'a, R::Output>, i64), DecodeError> {
        Ok((self.key()?, self.int(Field::TpSize)?))
    }

    fn key_and_instance(&mut self) -> Result<(CacheKey<'a, R::Output>, InstanceId), DecodeError> {
        Ok((self.key()?, self.instance()?))
    }

    fn job(&mut self) -> Result<JobRef<'a>, DecodeError> {
        if let Some(job) = self.optional(Field::JobId, lenient::int)? {
            return Ok(JobRef::Job(job));
        }
        self.text(Field::RequestId).map(JobRef::Request)
    }

    /// Block ids of each group; a flat list is the list of the only group.
    fn block_ids(&mut self) -> Result<Vec<Vec<i64>>, DecodeError> {
        let (field, frame) = self
            .next_if(|field| matches!(field, Field::BlockIds(_)))
            .ok_or_else(|| absent("block_ids"))?;
        wire::whole(frame, |reader| match field {
            Field::BlockIds(BlockForm::Flat) => Ok(vec![reader.ints()?]),
            _ => reader.short_array_of(MAX_GROUPS, Reader::ints),
        })
        .in_field(field.name())
    }

    fn tensors(&mut self) -> Result<Vec<TensorDescriptor>, DecodeError> {
        let (field, frame) = self
            .next_if(|field| field == Field::Tensors)
            .ok_or_else(|| absent("kv_cache"))?;
        wire::whole(frame, |reader| {
            reader.short_array_of(MAX_TENSORS, TensorDescriptor::read)
        })
        .in_field(field.name())
    }

    fn object_keys(&mut self) -> Result<Vec<ObjectKeyParts<'a>>, DecodeError> {
        self.value(Field::ObjectKeys, WireValue::read)
    }

    fn context(&mut self) -> Result<EngineDrivenContext<'a>, DecodeError> {
        let context = self.next_if(|field| matches!(field, Field::EngineDrivenContext(_)));
        let Some((field @ Field::EngineDrivenContext(form), frame)) = context else {
            return Err(absent("payload"));
        };
        let mut context = read_whole(field, frame, &mut self.unknown, EngineDrivenContext::read)?;
        if form != ContextForm::Groups {
            context.groups = None;
        }
        Ok(context)
    }

    fn registration(&mut self) -> Result<Registration<'a>, DecodeError> {
        Ok(Registration {
            instance: self.instance()?,
            tensors: self.tensors()?,
            model_name: self.text(Field::ModelName)?,
            world_size: self.value(Field::WorldSize, lenient::int)?,
            engine: self
                .optional(Field::EngineType, EngineType::read)?
                .unwrap_or(EngineType::Vllm),
            hints: self
                .optional(Field::LayoutHints, LayoutHints::read)?
                .unwrap_or_default(),
            groups: self
                .optional(Field::GroupInfos, WireValue::read)?
                .unwrap_or_default(),
        })
    }

    fn store(&mut self) -> Result<Store<'a, R::Output>, DecodeError> {
        Ok(Store {
            key: self.key()?,
            instance: self.instance()?,
            block_ids: self.block_ids()?,
            event_handle: self.bytes(Field::EventHandle)?,
        })
    }

    /// Every frame must have found its reader: a row and the code above disagree otherwise.
    fn end(&self) -> Result<(), DecodeError> {
        match self.fields.first() {
            None => Ok(()),
            Some(field) => Err(DecodeError::at(
                field.name(),
                "this payload has no place in the operation",
            )),
        }
    }
}

/// Reads the value that is the whole frame of a field, and notes the first field in it that is not known.
fn read_whole<'a, V>(
    field: Field,
    frame: &'a [u8],
    unknown: &mut Option<UnknownField<'a>>,
    read: impl FnOnce(&mut Reader<'a>) -> Result<V, DecodeError>,
) -> Result<V, DecodeError> {
    let payload = field.name();
    let read = |reader: &mut Reader<'a>| {
        let value = read(reader)?;
        if let Some(name) = reader.unknown_field() {
            unknown.get_or_insert(UnknownField { payload, name });
        }
        Ok(value)
    };
    wire::whole(frame, read).in_field(payload)
}

/// A row lacks a field that its operation cannot do without. Tests decode every row, so this stays unseen.
fn absent(name: &str) -> DecodeError {
    DecodeError::at(name, "the operation's row has no such payload")
}

fn read_layouts<'a>(
    reader: &mut Reader<'a>,
) -> Result<Vec<(i64, LayoutDescriptor<'a>)>, DecodeError> {
    let len = reader.map_len()?;
    let mut layouts = Vec::new();
    for _ in 0..len {
        let group = reader.int().in_field("(map key)")?;
        let layout = LayoutDescriptor::read(reader).in_field(&format!("[{group}]"))?;
        layouts.push((group, layout));
    }
    Ok(layouts)
}

fn read_range(reader: &mut Reader<'_>) -> Result<(u64, u64), DecodeError> {
    match reader.ints()?[..] {
        [start, end] => Ok((start, end)),
        ref other => Err(DecodeError::new(format!(
            "{} ints, a range has 2",
            other.len()
        ))),
    }
}

fn read_module_call<'a>(reader: &mut Reader<'a>) -> Result<(&'a str, &'a [u8]), DecodeError> {
    let mut method = None;
    let mut payload = None;
    reader.map(|name, value| {
        match name {
            "method" => method = Some(value.str()?),
            "payload" => payload = Some(value.bin()?),
            _ => value.skip_unknown(name)?,
        }
        Ok(())
    })?;
    Ok((
        crate::key::required(method, "method")?,
        payload.unwrap_or_default(),
    ))
}
