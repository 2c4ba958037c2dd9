//! The operations of the protocol and the order guarantees each needs.

/// What a client asks for.
///
/// The names are those of the LMCache 0.5.7 wire protocol (lower snake case, compared exactly), plus
/// [`Operation::QueryPrefetchLookupHits`], which ended with 0.5.5, and kvtier's own [`Operation::Find`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
#[non_exhaustive]
pub enum Operation {
    /// A worker shows where its KV pages are (the server copies).
    RegisterKvCache,
    /// The worker's pages go away.
    UnregisterKvCache,
    /// Registration for the experimental query ring, as `register_kv_cache`.
    RegisterQCache,
    /// End of a registration for the query ring, as `unregister_kv_cache`.
    UnregisterQCache,
    /// Store for the query ring, as `store`.
    StoreQ,
    /// Copy blocks of a worker into the cache.
    Store,
    /// Copy cached chunks into blocks of a worker.
    Retrieve,
    /// How long a prefix of this prompt is cached? Pins what it finds.
    Lookup,
    /// The answer to a lookup, when it is there.
    QueryPrefetchStatus,
    /// The answer to a lookup, waiting for it a while.
    WaitPrefetchStatus,
    /// Part of what a lookup pinned will not be retrieved.
    FreeLookupLocks,
    /// A request ended.
    EndSession,
    /// Registration of a worker that copies by itself, with its geometry.
    RegisterEngineDriven,
    /// Unregisters a worker that copies by itself.
    UnregisterEngineDriven,
    /// Asks where the worker may write these chunks.
    PrepareStore,
    /// The worker wrote them, or sends them along.
    CommitStore,
    /// Asks where the worker can read these chunks.
    PrepareRetrieve,
    /// The worker read them.
    CommitRetrieve,
    /// Forget what is cached in memory.
    Clear,
    /// Tokens in a chunk. An adapter's first request.
    GetChunkSize,
    /// Is the server alive, and does it know this worker?
    Ping,
    /// Telemetry of the scheduler.
    ReportBlockAllocation,
    /// Answers `OK`.
    Noop,
    /// Blending: rotary tables of a worker.
    CbRegisterRope,
    /// Blending: the tables go away.
    CbUnregisterRope,
    /// Blending: retrieve matched segments.
    CbRetrievePreComputed,
    /// Blending: prefix and segment lookup.
    CbUnifiedLookup,
    /// Blending: order of segments.
    CbReorderPlan,
    /// Blending: version agreement.
    CbProtocolHandshake,
    /// Between servers: pin objects.
    P2pLookupAndLock,
    /// Between servers: where the pinned objects are.
    P2pQueryLookupResults,
    /// Between servers: unpin objects.
    P2pUnlockObjects,
    /// Names of the optional features that are on.
    GetExperimental,
    /// A stream of what was stored and removed.
    SubscribeKvEvents,
    /// A call into a server plug-in.
    ServerModuleCall,
    /// Call into a server plug-in, always by the same thread of the server.
    ServerModuleAffinityCall,
    /// Tokens in a chunk, a multiple of what the client asks for. A vLLM adapter's first request from 0.5.7 on, repeated
    /// when the server was away.
    NegotiateChunkSize,
    /// Hit count of a lookup before its prefetch is done (removed in 0.5.6).
    QueryPrefetchLookupHits,
    /// Which of these objects are cached? Leases what it finds. Of kvtier's own clients.
    Find,
}

/// All operations, in declaration order, each with its name on the wire.
const NAMES: [(Operation, &str); 39] = [
    (Operation::RegisterKvCache, "register_kv_cache"),
    (Operation::UnregisterKvCache, "unregister_kv_cache"),
    (Operation::RegisterQCache, "register_q_cache"),
    (Operation::UnregisterQCache, "unregister_q_cache"),
    (Operation::StoreQ, "store_q"),
    (Operation::Store, "store"),
    (Operation::Retrieve, "retrieve"),
    (Operation::Lookup, "lookup"),
    (Operation::QueryPrefetchStatus, "query_prefetch_status"),
    (Operation::WaitPrefetchStatus, "wait_prefetch_status"),
    (Operation::FreeLookupLocks, "free_lookup_locks"),
    (Operation::EndSession, "end_session"),
    (
        Operation::RegisterEngineDriven,
        "register_kv_cache_engine_driven_context",
    ),
    (
        Operation::UnregisterEngineDriven,
        "unregister_kv_cache_engine_driven_context",
    ),
    (Operation::PrepareStore, "prepare_store"),
    (Operation::CommitStore, "commit_store"),
    (Operation::PrepareRetrieve, "prepare_retrieve"),
    (Operation::CommitRetrieve, "commit_retrieve"),
    (Operation::Clear, "clear"),
    (Operation::GetChunkSize, "get_chunk_size"),
    (Operation::Ping, "ping"),
    (Operation::ReportBlockAllocation, "report_block_allocation"),
    (Operation::Noop, "noop"),
    (Operation::CbRegisterRope, "cb_register_rope"),
    (Operation::CbUnregisterRope, "cb_unregister_rope"),
    (Operation::CbRetrievePreComputed, "cb_retrieve_pre_computed"),
    (Operation::CbUnifiedLookup, "cb_unified_lookup"),
    (Operation::CbReorderPlan, "cb_reorder_plan"),
    (Operation::CbProtocolHandshake, "cb_protocol_handshake"),
    (Operation::P2pLookupAndLock, "p2p_lookup_and_lock"),
    (Operation::P2pQueryLookupResults, "p2p_query_lookup_results"),
    (Operation::P2pUnlockObjects, "p2p_unlock_objects"),
    (Operation::GetExperimental, "get_experimental"),
    (Operation::SubscribeKvEvents, "subscribe_kv_events"),
    (Operation::ServerModuleCall, "server_module_call"),
    (
        Operation::ServerModuleAffinityCall,
        "server_module_affinity_call",
    ),
    (Operation::NegotiateChunkSize, "negotiate_chunk_size"),
    (
        Operation::QueryPrefetchLookupHits,
        "query_prefetch_lookup_hits",
    ),
    (Operation::Find, "kvtier.find"),
];

/// Lane that runs an operation: the order a server owes its callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lane {
    /// Answered at once by the thread that reads the socket.
    Inline,
    /// Any order, beside everything else; never waits behind a transfer.
    Control,
    /// One at a time and in order of arrival among the transfers of one connection.
    Transfer,
}

impl Operation {
    /// Every operation.
    pub fn all() -> impl ExactSizeIterator<Item = Self> + Clone {
        NAMES.iter().map(|(operation, _)| *operation)
    }

    /// The name on the wire.
    #[must_use]
    pub fn name(self) -> &'static str {
        NAMES[self as usize].1
    }

    /// The operation with this name on the wire.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        NAMES
            .iter()
            .find(|(_, known)| *known == name)
            .map(|(operation, _)| *operation)
    }

    /// The order this operation needs.
    #[must_use]
    pub fn lane(self) -> Lane {
        match self {
            Self::GetChunkSize | Self::GetExperimental | Self::Noop | Self::Ping => Lane::Inline,
            // Registrations are ordered with the transfers of their connection: a store sent before an
            // unregistration must still find its pages.
            Self::RegisterKvCache
            | Self::UnregisterKvCache
            | Self::RegisterQCache
            | Self::UnregisterQCache
            | Self::StoreQ
            | Self::Store
            | Self::Retrieve
            | Self::RegisterEngineDriven
            | Self::UnregisterEngineDriven
            | Self::PrepareStore
            | Self::CommitStore
            | Self::PrepareRetrieve
            | Self::CommitRetrieve
            | Self::CbRegisterRope
            | Self::CbUnregisterRope
            | Self::CbRetrievePreComputed => Lane::Transfer,
            _ => Lane::Control,
        }
    }
}

impl std::fmt::Display for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stand_in_declaration_order() {
        for (index, (operation, name)) in NAMES.iter().enumerate() {
            assert_eq!(*operation as usize, index);
            assert_eq!(Operation::from_name(name), Some(*operation));
            assert_eq!(operation.name(), *name);
        }
    }
}
