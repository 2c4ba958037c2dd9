//! Requests to payload frames, for clients and tests.

use super::types::{JobRef, Seconds};
use super::{Registration, Request, Store};
use crate::descriptor::{self, TensorDescriptor};
use crate::generation::{BlockForm, ContextForm, Field, OperationSpec};
use crate::key::TokenWriter;
use crate::wire::{self, WireValue as _};

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

/// Encodes the payload frames of a request by a row of its operation.
pub(super) fn encode<T: TokenWriter>(
    request: &Request<'_, T>,
    spec: &OperationSpec,
) -> Result<Vec<Vec<u8>>, EncodeError> {
    if spec.operation != request.operation() {
        return Err(EncodeError::new(format!(
            "a {} request cannot be sent as {}",
            request.operation(),
            spec.operation
        )));
    }
    spec.payloads
        .iter()
        .map(|&field| {
            let mut out = Vec::new();
            write_field(request, field, &mut out)?;
            Ok(out)
        })
        .collect()
}

fn write_field<T: TokenWriter>(
    request: &Request<'_, T>,
    field: Field,
    out: &mut Vec<u8>,
) -> Result<(), EncodeError> {
    match (request, field) {
        (_, Field::Key(form)) => match request.key() {
            Some(key) => key.write(form, out),
            None => return Err(lacks(request, field)),
        },
        (_, Field::InstanceId) => match request.instance() {
            Some(instance) => wire::write_int(out, instance.0),
            None => return Err(lacks(request, field)),
        },
        (Request::Ping { instance }, Field::OptionalInstanceId) => match instance {
            Some(instance) => wire::write_int(out, instance.0),
            None => wire::write_nil(out),
        },
        (Request::Store(Store { block_ids, .. }), Field::BlockIds(form))
        | (Request::StoreQ(Store { block_ids, .. }), Field::BlockIds(form)) => {
            write_block_ids(block_ids, form, out)?;
        }
        (Request::Retrieve(retrieve), Field::BlockIds(form)) => {
            write_block_ids(&retrieve.block_ids, form, out)?;
        }
        (Request::CbRetrievePreComputed(retrieve), Field::BlockIds(form)) => {
            write_block_ids(&retrieve.block_ids, form, out)?;
        }
        (Request::Store(store) | Request::StoreQ(store), Field::EventHandle) => {
            wire::write_bin(out, store.event_handle);
        }
        (Request::Retrieve(retrieve), Field::EventHandle) => {
            wire::write_bin(out, retrieve.event_handle);
        }
        (Request::CbRetrievePreComputed(retrieve), Field::EventHandle) => {
            wire::write_bin(out, retrieve.event_handle);
        }
        (Request::Retrieve(retrieve), Field::SkipTokens) => {
            wire::write_int(out, retrieve.skip_first_n_tokens);
        }
        (
            Request::Lookup { tp_size, .. }
            | Request::FreeLookupLocks { tp_size, .. }
            | Request::CbUnifiedLookup { tp_size, .. },
            Field::TpSize,
        ) => wire::write_int(out, *tp_size),
        (
            Request::QueryPrefetchStatus { job }
            | Request::QueryPrefetchLookupHits { job }
            | Request::WaitPrefetchStatus { job, .. },
            Field::RequestId | Field::JobId,
        ) => match (job, field) {
            (JobRef::Request(request_id), Field::RequestId) => wire::write_str(out, request_id),
            (JobRef::Job(job), Field::JobId) => wire::write_int(out, *job),
            _ => return Err(lacks(request, field)),
        },
        (Request::EndSession { request_id }, Field::RequestId) => wire::write_str(out, request_id),
        (Request::FreeLookupLocks { extra_ranges, .. }, Field::ExtraRanges) => {
            wire::write_array_len(out, extra_ranges.len());
            for (start, end) in extra_ranges {
                wire::write_array_len(out, 2);
                wire::write_uint(out, *start);
                wire::write_uint(out, *end);
            }
        }
        (Request::PrepareStore { skipped_chunks, .. }, Field::SkippedChunks) => {
            skipped_chunks.write(out);
        }
        (Request::NegotiateChunkSize { alignment }, Field::ChunkAlignment) => {
            wire::write_int(out, *alignment);
        }
        (
            Request::WaitPrefetchStatus { timeout, .. } | Request::Find { timeout, .. },
            Field::Timeout,
        ) => match timeout {
            Seconds::Whole(seconds) => wire::write_int(out, *seconds),
            Seconds::Fraction(seconds) => wire::write_f64(out, *seconds),
        },
        (Request::Clear { force }, Field::Force) => wire::write_bool(out, *force),
        (Request::CommitStore { data, .. }, Field::Data) => wire::write_bin(out, data),
        (Request::RegisterEngineDriven(context), Field::EngineDrivenContext(form)) => {
            let mut context = context.clone();
            match (form, &mut context.groups) {
                (ContextForm::Groups, groups) => _ = groups.get_or_insert_default(),
                (_, None) => {}
                (_, Some(_)) => return Err(lacks(request, field)),
            }
            context.write(form != ContextForm::Bare, out);
        }
        (Request::RegisterKvCache(registration) | Request::RegisterQCache(registration), _) => {
            return write_registration(registration, field, out)
                .ok_or_else(|| lacks(request, field));
        }
        _ => return write_rare_field(request, field, out),
    }
    Ok(())
}

/// Fields of telemetry, blending, servers among each other, events and plug-ins.
fn write_rare_field<T>(
    request: &Request<'_, T>,
    field: Field,
    out: &mut Vec<u8>,
) -> Result<(), EncodeError> {
    match (request, field) {
        (Request::ReportBlockAllocation(report), Field::ModelName) => {
            wire::write_str(out, report.model_name.ok_or_else(|| lacks(request, field))?);
        }
        (Request::ReportBlockAllocation(report), Field::AllocationRecords) => {
            report.records.write(out);
        }
        (Request::CbRegisterRope(rope), Field::Tensors) => write_tensors(&rope.caches, out),
        (Request::CbRegisterRope(rope), Field::HeadSize) => wire::write_int(out, rope.head_size),
        (Request::CbRegisterRope(rope), Field::IsNeoxStyle) => {
            wire::write_bool(out, rope.is_neox_style);
        }
        (Request::CbRegisterRope(rope), Field::GroupToCache) => {
            rope.group_to_cache.write(out);
        }
        (Request::CbRegisterRope(rope), Field::GroupRot) => {
            rope.group_rot.write(out);
        }
        (Request::CbRegisterRope(rope), Field::GroupHeadSize) => {
            rope.group_head_size.write(out);
        }
        (Request::CbRegisterRope(rope), Field::KvQuant) => wire::write_str(out, rope.kv_quant),
        (Request::CbRetrievePreComputed(retrieve), Field::MatchedSegments) => {
            retrieve.matches.write(out);
        }
        (Request::CbReorderPlan { keep_prefix, .. }, Field::KeepPrefix) => {
            wire::write_int(out, *keep_prefix);
        }
        (Request::CbReorderPlan { budget_ms, .. }, Field::BudgetMs) => {
            wire::write_int(out, *budget_ms);
        }
        (Request::CbProtocolHandshake { client_version }, Field::ClientVersion) => {
            wire::write_int(out, *client_version);
        }
        (
            Request::P2pLookupAndLock { keys, .. } | Request::P2pUnlockObjects { keys },
            Field::ObjectKeys,
        ) => keys.write(out),
        (Request::P2pLookupAndLock { layouts, .. }, Field::LayoutDescriptors) => {
            wire::write_map_len(out, layouts.len());
            for (group, layout) in layouts {
                wire::write_int(out, *group);
                layout.write(out);
            }
        }
        (Request::P2pQueryLookupResults { task_id }, Field::TaskId) => {
            wire::write_int(out, *task_id);
        }
        (Request::SubscribeKvEvents(subscription), Field::ModelName) => {
            wire::write_str(out, subscription.model_name);
        }
        (Request::SubscribeKvEvents(subscription), Field::Cursor) => {
            wire::write_int(out, subscription.cursor);
        }
        (Request::SubscribeKvEvents(subscription), Field::MaxEvents) => {
            wire::write_int(out, subscription.max_events);
        }
        (
            Request::ServerModuleCall { method, payload }
            | Request::ServerModuleAffinityCall { method, payload },
            Field::ModuleCall,
        ) => {
            wire::write_map_len(out, 2);
            wire::write_str(out, "method");
            wire::write_str(out, method);
            wire::write_str(out, "payload");
            wire::write_bin(out, payload);
        }
        _ => return Err(lacks(request, field)),
    }
    Ok(())
}

fn lacks<T>(request: &Request<'_, T>, field: Field) -> EncodeError {
    EncodeError::new(format!(
        "this {} request has no {} for the row's generation",
        request.operation(),
        field.name()
    ))
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
        Field::GroupInfos => registration.groups.write(out),
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
        (BlockForm::Grouped, _) => wire::write_all(out, groups),
        (BlockForm::Flat, [ids]) => ids.write(out),
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
    wire::write_array_len(out, tensors.len());
    for tensor in tensors {
        let mut body = Vec::new();
        tensor.encode(&mut body);
        wire::write_ext(out, descriptor::EXT_CODE, &body);
    }
}
