//! The operations of the protocol and the order guarantees each needs.

/// Passes each operation with its name to the macro `$declare`.
macro_rules! operations {
    ($declare:ident) => {
        $declare! {
            /// A worker shows where its KV pages are (the server copies).
            RegisterKvCache = "register_kv_cache",
            /// The worker's pages go away.
            UnregisterKvCache = "unregister_kv_cache",
            /// Registration for the experimental query ring, as `register_kv_cache`.
            RegisterQCache = "register_q_cache",
            /// End of a registration for the query ring, as `unregister_kv_cache`.
            UnregisterQCache = "unregister_q_cache",
            /// Store for the query ring, as `store`.
            StoreQ = "store_q",
            /// Copy blocks of a worker into the cache.
            Store = "store",
            /// Copy cached chunks into blocks of a worker.
            Retrieve = "retrieve",
            /// How long a prefix of this prompt is cached? Pins what it finds.
            Lookup = "lookup",
            /// The answer to a lookup, when it is there.
            QueryPrefetchStatus = "query_prefetch_status",
            /// The answer to a lookup, waiting for it a while.
            WaitPrefetchStatus = "wait_prefetch_status",
            /// Part of what a lookup pinned will not be retrieved.
            FreeLookupLocks = "free_lookup_locks",
            /// A request ended.
            EndSession = "end_session",
            /// Registration of a worker that copies by itself, with its geometry.
            RegisterEngineDriven = "register_kv_cache_engine_driven_context",
            /// Unregisters a worker that copies by itself.
            UnregisterEngineDriven = "unregister_kv_cache_engine_driven_context",
            /// Asks where the worker may write these chunks.
            PrepareStore = "prepare_store",
            /// The worker wrote them, or sends them along.
            CommitStore = "commit_store",
            /// Asks where the worker can read these chunks.
            PrepareRetrieve = "prepare_retrieve",
            /// The worker read them.
            CommitRetrieve = "commit_retrieve",
            /// Forget what is cached in memory.
            Clear = "clear",
            /// Tokens in a chunk. An adapter's first request.
            GetChunkSize = "get_chunk_size",
            /// Is the server alive, and does it know this worker?
            Ping = "ping",
            /// Telemetry of the scheduler.
            ReportBlockAllocation = "report_block_allocation",
            /// Answers `OK`.
            Noop = "noop",
            /// Blending: rotary tables of a worker.
            CbRegisterRope = "cb_register_rope",
            /// Blending: the tables go away.
            CbUnregisterRope = "cb_unregister_rope",
            /// Blending: retrieve matched segments.
            CbRetrievePreComputed = "cb_retrieve_pre_computed",
            /// Blending: prefix and segment lookup.
            CbUnifiedLookup = "cb_unified_lookup",
            /// Blending: order of segments.
            CbReorderPlan = "cb_reorder_plan",
            /// Blending: version agreement.
            CbProtocolHandshake = "cb_protocol_handshake",
            /// Between servers: pin objects.
            P2pLookupAndLock = "p2p_lookup_and_lock",
            /// Between servers: where the pinned objects are.
            P2pQueryLookupResults = "p2p_query_lookup_results",
            /// Between servers: unpin objects.
            P2pUnlockObjects = "p2p_unlock_objects",
            /// Names of the optional features that are on.
            GetExperimental = "get_experimental",
            /// A stream of what was stored and removed.
            SubscribeKvEvents = "subscribe_kv_events",
            /// A call into a server plug-in.
            ServerModuleCall = "server_module_call",
            /// Call into a server plug-in, always by the same thread of the server.
            ServerModuleAffinityCall = "server_module_affinity_call",
            /// Tokens in a chunk, a multiple of what the client asks for. A vLLM adapter's first request from 0.5.7 on, repeated
            /// when the server was away.
            NegotiateChunkSize = "negotiate_chunk_size",
            /// Hit count of a lookup before its prefetch is done (removed in 0.5.6).
            QueryPrefetchLookupHits = "query_prefetch_lookup_hits",
            /// Which of these objects are cached? Leases what it finds; sent by kvtier's own clients.
            Find = "kvtier.find",
        }
    };
}

macro_rules! declare {
    ($($(#[$doc:meta])* $operation:ident = $name:literal,)*) => {
        /// What a client asks for.
        ///
        /// The names are those of the LMCache 0.5.7 wire protocol (lower snake case, compared exactly), plus
        /// [`Operation::QueryPrefetchLookupHits`], which ended with 0.5.5, and kvtier's own [`Operation::Find`].
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        #[non_exhaustive]
        pub enum Operation {
            $($(#[$doc])* $operation,)*
        }

        const NAMES: &[(Operation, &str)] = &[$((Operation::$operation, $name)),*];
    };
}

operations!(declare);
pub(crate) use operations;

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
