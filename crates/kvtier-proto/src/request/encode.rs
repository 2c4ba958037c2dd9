//! Requests to payload frames, for clients and tests.

use super::types::{EngineGroupInfo, InstanceId, JobRef, Seconds, write_ints};
use super::{Registration, Request, Store};
use crate::descriptor::{self, TensorDescriptor};
use crate::generation::{BlockForm, ContextForm, Field, OperationSpec};
use crate::key::{CacheKey, TokenWriter};
use crate::wire;

/// A request that the row's generation cannot express.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct EncodeError {
    /// What does not fit.
    pub message: String,
}

impl EncodeError {
    fn new(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
        }
    }
}

impl<T: TokenWriter> Request<'_, T> {
    /// Encodes the payload frames of this request by a row of its operation.
    ///
    /// A value for which the row has no field is dropped if it only adds detail (layout hints, the worker
    /// behind a ping), and an error if the request would mean something else without it. The row must be
    /// one of this request's operation.
    pub fn encode(&self, spec: &OperationSpec) -> Result<Vec<Vec<u8>>, EncodeError> {
        if spec.operation != self.operation() {
            return Err(EncodeError::new(format!(
                "a {} request cannot be sent as {}",
                self.operation(),
                spec.operation
            )));
        }
        spec.payloads
            .iter()
            .map(|&field| {
                let mut out = Vec::new();
                self.write_field(field, &mut out)?;
                Ok(out)
            })
            .collect()
    }

    fn write_field(&self, field: Field, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        match (self, field) {
            (_, Field::Key(form)) => match self.key() {
                Some(key) => key.write(form, out),
                None => return Err(self.lacks(field)),
            },
            (_, Field::InstanceId) => match self.instance() {
                Some(instance) => wire::write_int(out, instance.0),
                None => return Err(self.lacks(field)),
            },
            (Self::Ping { instance }, Field::OptionalInstanceId) => match instance {
                Some(instance) => wire::write_int(out, instance.0),
                None => wire::write_nil(out),
            },
            (Self::Store(Store { block_ids, .. }), Field::BlockIds(form))
            | (Self::StoreQ(Store { block_ids, .. }), Field::BlockIds(form)) => {
                write_block_ids(block_ids, form, out)?;
            }
            (Self::Retrieve(retrieve), Field::BlockIds(form)) => {
                write_block_ids(&retrieve.block_ids, form, out)?;
            }
            (Self::CbRetrievePreComputed(retrieve), Field::BlockIds(form)) => {
                write_block_ids(&retrieve.block_ids, form, out)?;
            }
            (Self::Store(store) | Self::StoreQ(store), Field::EventHandle) => {
                wire::write_bin(out, store.event_handle);
            }
            (Self::Retrieve(retrieve), Field::EventHandle) => {
                wire::write_bin(out, retrieve.event_handle);
            }
            (Self::CbRetrievePreComputed(retrieve), Field::EventHandle) => {
                wire::write_bin(out, retrieve.event_handle);
            }
            (Self::Retrieve(retrieve), Field::SkipTokens) => {
                wire::write_int(out, retrieve.skip_first_n_tokens);
            }
            (
                Self::Lookup { tp_size, .. }
                | Self::FreeLookupLocks { tp_size, .. }
                | Self::CbUnifiedLookup { tp_size, .. },
                Field::TpSize,
            ) => wire::write_int(out, *tp_size),
            (
                Self::QueryPrefetchStatus { job }
                | Self::QueryPrefetchLookupHits { job }
                | Self::WaitPrefetchStatus { job, .. },
                Field::RequestId | Field::JobId,
            ) => match (job, field) {
                (JobRef::Request(request_id), Field::RequestId) => wire::write_str(out, request_id),
                (JobRef::Job(job), Field::JobId) => wire::write_int(out, *job),
                _ => return Err(self.lacks(field)),
            },
            (Self::EndSession { request_id }, Field::RequestId) => wire::write_str(out, request_id),
            (Self::FreeLookupLocks { extra_ranges, .. }, Field::ExtraRanges) => {
                write_all(out, extra_ranges, |(start, end), out| {
                    wire::write_array_len(out, 2);
                    wire::write_uint(out, *start);
                    wire::write_uint(out, *end);
                });
            }
            (Self::PrepareStore { skipped_chunks, .. }, Field::SkippedChunks) => {
                write_all(out, skipped_chunks, |chunks, out| write_ints(out, chunks));
            }
            (Self::NegotiateChunkSize { alignment }, Field::ChunkAlignment) => {
                wire::write_int(out, *alignment);
            }
            (Self::WaitPrefetchStatus { timeout, .. }, Field::Timeout) => match timeout {
                Seconds::Whole(seconds) => wire::write_int(out, *seconds),
                Seconds::Fraction(seconds) => wire::write_f64(out, *seconds),
            },
            (Self::Clear { force }, Field::Force) => wire::write_bool(out, *force),
            (Self::CommitStore { data, .. }, Field::Data) => wire::write_bin(out, data),
            (Self::RegisterEngineDriven(context), Field::EngineDrivenContext(form)) => {
                let mut context = context.clone();
                match (form, &mut context.groups) {
                    (ContextForm::Groups, groups) => _ = groups.get_or_insert_default(),
                    (_, None) => {}
                    (_, Some(_)) => return Err(self.lacks(field)),
                }
                context.write(form != ContextForm::Bare, out);
            }
            (Self::RegisterKvCache(registration) | Self::RegisterQCache(registration), _) => {
                return write_registration(registration, field, out)
                    .ok_or_else(|| self.lacks(field));
            }
            _ => return self.write_rare_field(field, out),
        }
        Ok(())
    }

    /// Fields of telemetry, blending, servers among each other, events and plug-ins.
    fn write_rare_field(&self, field: Field, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        match (self, field) {
            (Self::ReportBlockAllocation(report), Field::ModelName) => {
                wire::write_str(out, report.model_name.ok_or_else(|| self.lacks(field))?);
            }
            (Self::ReportBlockAllocation(report), Field::AllocationRecords) => {
                write_all(out, &report.records, |record, out| record.write(out));
            }
            (Self::CbRegisterRope(rope), Field::Tensors) => write_tensors(&rope.caches, out),
            (Self::CbRegisterRope(rope), Field::HeadSize) => wire::write_int(out, rope.head_size),
            (Self::CbRegisterRope(rope), Field::IsNeoxStyle) => {
                wire::write_bool(out, rope.is_neox_style);
            }
            (Self::CbRegisterRope(rope), Field::GroupToCache) => {
                write_ints(out, &rope.group_to_cache);
            }
            (Self::CbRegisterRope(rope), Field::GroupRot) => {
                write_all(out, &rope.group_rot, |range, out| write_ints(out, range));
            }
            (Self::CbRegisterRope(rope), Field::GroupHeadSize) => {
                write_ints(out, &rope.group_head_size);
            }
            (Self::CbRegisterRope(rope), Field::KvQuant) => wire::write_str(out, rope.kv_quant),
            (Self::CbRetrievePreComputed(retrieve), Field::MatchedSegments) => {
                write_all(out, &retrieve.matches, |segment, out| segment.write(out));
            }
            (Self::CbReorderPlan { keep_prefix, .. }, Field::KeepPrefix) => {
                wire::write_int(out, *keep_prefix);
            }
            (Self::CbReorderPlan { budget_ms, .. }, Field::BudgetMs) => {
                wire::write_int(out, *budget_ms);
            }
            (Self::CbProtocolHandshake { client_version }, Field::ClientVersion) => {
                wire::write_int(out, *client_version);
            }
            (
                Self::P2pLookupAndLock { keys, .. } | Self::P2pUnlockObjects { keys },
                Field::ObjectKeys,
            ) => write_all(out, keys, |key, out| key.write(out)),
            (Self::P2pLookupAndLock { layouts, .. }, Field::LayoutDescriptors) => {
                wire::write_map_len(out, layouts.len());
                for (group, layout) in layouts {
                    wire::write_int(out, *group);
                    layout.write(out);
                }
            }
            (Self::P2pQueryLookupResults { task_id }, Field::TaskId) => {
                wire::write_int(out, *task_id);
            }
            (Self::SubscribeKvEvents(subscription), Field::ModelName) => {
                wire::write_str(out, subscription.model_name);
            }
            (Self::SubscribeKvEvents(subscription), Field::Cursor) => {
                wire::write_int(out, subscription.cursor);
            }
            (Self::SubscribeKvEvents(subscription), Field::MaxEvents) => {
                wire::write_int(out, subscription.max_events);
            }
            (
                Self::ServerModuleCall { method, payload }
                | Self::ServerModuleAffinityCall { method, payload },
                Field::ModuleCall,
            ) => {
                wire::write_map_len(out, 2);
                wire::write_str(out, "method");
                wire::write_str(out, method);
                wire::write_str(out, "payload");
                wire::write_bin(out, payload);
            }
            _ => return Err(self.lacks(field)),
        }
        Ok(())
    }

    fn lacks(&self, field: Field) -> EncodeError {
        EncodeError::new(format!(
            "this {} request has no {} for the row's generation",
            self.operation(),
            field.name()
        ))
    }
}

impl<'a, T> Request<'a, T> {
    /// The key, if requests of this operation have one.
    #[must_use]
    pub fn key(&self) -> Option<&CacheKey<'a, T>> {
        match self {
            Self::Store(store) | Self::StoreQ(store) => Some(&store.key),
            Self::Retrieve(retrieve) => Some(&retrieve.key),
            Self::CbRetrievePreComputed(retrieve) => Some(&retrieve.key),
            Self::Lookup { key, .. }
            | Self::FreeLookupLocks { key, .. }
            | Self::PrepareStore { key, .. }
            | Self::CommitStore { key, .. }
            | Self::PrepareRetrieve { key, .. }
            | Self::CommitRetrieve { key, .. }
            | Self::CbUnifiedLookup { key, .. }
            | Self::CbReorderPlan { key, .. } => Some(key),
            _ => None,
        }
    }

    /// The worker that the request names as its sender.
    #[must_use]
    pub fn instance(&self) -> Option<InstanceId> {
        match self {
            Self::Store(store) | Self::StoreQ(store) => Some(store.instance),
            Self::Retrieve(retrieve) => Some(retrieve.instance),
            Self::CbRetrievePreComputed(retrieve) => Some(retrieve.instance),
            Self::RegisterKvCache(registration) | Self::RegisterQCache(registration) => {
                Some(registration.instance)
            }
            Self::RegisterEngineDriven(context) => Some(context.instance),
            Self::CbRegisterRope(rope) => Some(rope.instance),
            Self::SubscribeKvEvents(subscription) => Some(subscription.instance),
            Self::ReportBlockAllocation(report) => report.instance,
            Self::Ping { instance } => *instance,
            Self::UnregisterKvCache { instance }
            | Self::UnregisterQCache { instance }
            | Self::UnregisterEngineDriven { instance }
            | Self::CbUnregisterRope { instance }
            | Self::PrepareStore { instance, .. }
            | Self::CommitStore { instance, .. }
            | Self::PrepareRetrieve { instance, .. }
            | Self::CommitRetrieve { instance, .. } => Some(*instance),
            _ => None,
        }
    }
}

fn write_registration(
    registration: &Registration<'_>,
    field: Field,
    out: &mut Vec<u8>,
) -> Option<()> {
    match field {
        Field::Tensors => write_tensors(&registration.tensors, out),
        Field::ModelName => wire::write_str(out, registration.model_name),
        Field::WorldSize => wire::write_uint(out, u64::from(registration.world_size)),
        Field::EngineType => wire::write_str(out, registration.engine.name()),
        Field::LayoutHints => registration.hints.write(out),
        Field::GroupInfos => write_all(out, &registration.groups, EngineGroupInfo::write),
        _ => return None,
    }
    Some(())
}

fn write_block_ids(
    groups: &[Vec<i64>],
    form: BlockForm,
    out: &mut Vec<u8>,
) -> Result<(), EncodeError> {
    match (form, groups) {
        (BlockForm::Grouped, _) => write_all(out, groups, |ids, out| write_ints(out, ids)),
        (BlockForm::Flat, [ids]) => write_ints(out, ids),
        (BlockForm::Flat, _) => {
            return Err(EncodeError::new(format!(
                "block_ids: a flat list holds exactly one group, there are {}",
                groups.len()
            )));
        }
    }
    Ok(())
}

fn write_tensors(tensors: &[TensorDescriptor], out: &mut Vec<u8>) {
    write_all(out, tensors, |tensor, out| {
        let mut body = Vec::new();
        tensor.encode(&mut body);
        wire::write_ext(out, descriptor::EXT_CODE, &body);
    });
}

fn write_all<V>(out: &mut Vec<u8>, values: &[V], write: impl Fn(&V, &mut Vec<u8>)) {
    wire::write_array_len(out, values.len());
    for value in values {
        write(value, out);
    }
}
