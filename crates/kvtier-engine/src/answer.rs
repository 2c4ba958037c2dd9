//! Answers: a response, or the failure answer an operation has in place of an error.
//!
//! The protocol has no error response. A request that cannot be served still gets an answer its client understands: the
//! form in which that operation says "no". Where it has none, and the client waits for it with a handler around, the
//! error travels as text in place of the operation's frame.

use super::payload::Payload;
use kvtier_proto::operation::Operation;
use kvtier_proto::response::{
    EngineDriven, PrepareRetrieve, PrepareStore, Response, ResponseKind, StoreTarget,
};

/// Version of the blending protocol of LMCache 0.5.6.
pub const BLEND_VERSION: i64 = 1;

/// What goes back to a client.
#[derive(Debug, PartialEq)]
pub struct EngineAnswer {
    /// The third frame; nothing is no third frame.
    pub payload: Option<Payload>,
    /// Text for the operation's frame. Only clients that take one get it; others get the payload alone.
    pub error: Option<String>,
    /// Why this is a failure answer, for the metrics.
    pub refused: Option<&'static str>,
}

impl From<Response<'_>> for EngineAnswer {
    fn from(response: Response<'_>) -> Self {
        Self {
            payload: response.encode().map(Payload::from),
            error: None,
            refused: None,
        }
    }
}

impl EngineAnswer {
    /// No third frame.
    pub fn nothing() -> Self {
        Self {
            payload: None,
            error: None,
            refused: None,
        }
    }

    /// Marks this as a failure answer.
    pub fn because(self, reason: &'static str) -> Self {
        Self {
            refused: Some(reason),
            ..self
        }
    }

    /// The failure answer of an operation, without a text.
    pub fn refusal(operation: Operation, kind: ResponseKind, reason: &'static str) -> Self {
        Self::from(refusal(operation, kind)).because(reason)
    }

    /// The failure answer of an operation, with a text where the client can take one.
    pub fn refusal_with(
        operation: Operation,
        kind: ResponseKind,
        reason: &'static str,
        error: &dyn std::fmt::Display,
    ) -> Self {
        let refusal = Self::refusal(operation, kind, reason);
        if waits_with_handler(operation) {
            Self {
                error: Some(format!("error: {error}")),
                ..refusal
            }
        } else {
            refusal
        }
    }

    /// A registration or another call whose client waits for it with a handler around: the text reaches its operator.
    pub fn error(text: impl Into<String>, reason: &'static str) -> Self {
        Self {
            error: Some(format!("error: {}", text.into())),
            ..Self::nothing().because(reason)
        }
    }

    /// The answer to an operation that is not served here.
    pub fn unserved(operation: Operation) -> Self {
        let reason = "unserved";
        match operation {
            // Read inside the engine without a handler around: a plain "no".
            Operation::StoreQ | Operation::CbRetrievePreComputed => {
                Self::from(Response::transfer(&[][..], false)).because(reason)
            }
            // A client that blends goes on without it.
            Operation::CbProtocolHandshake => Self::from(Response::Handshake {
                version: BLEND_VERSION,
                compatible: false,
            })
            .because(reason),
            Operation::CbRegisterRope | Operation::CbUnregisterRope => {
                Self::nothing().because(reason)
            }
            Operation::CbReorderPlan => Self::from(Response::Ints(Vec::new())).because(reason),
            operation => Self::error(
                format!("{} is not served by kvtier", operation.name()),
                reason,
            ),
        }
    }
}

/// Operations whose client waits for the answer with an exception handler around, so that a text reaches its operator.
/// A text in answer to any other would be raised in the middle of the engine's step.
fn waits_with_handler(operation: Operation) -> bool {
    matches!(
        operation,
        Operation::RegisterKvCache
            | Operation::RegisterEngineDriven
            | Operation::RegisterQCache
            | Operation::GetChunkSize
            | Operation::NegotiateChunkSize
            | Operation::CbRegisterRope
            | Operation::CbProtocolHandshake
            | Operation::ServerModuleCall
            | Operation::ServerModuleAffinityCall
            | Operation::Find
    )
}

/// How an operation says "no".
fn refusal(operation: Operation, kind: ResponseKind) -> Response<'static> {
    match kind {
        ResponseKind::Nothing => Response::Nothing,
        ResponseKind::Int | ResponseKind::OptionalInt => Response::Int(0),
        // A ping that cannot be read still proves that the server is there, and a commit of a retrieve is answered as by
        // LMCache's server, whose clients ignore it; a commit of a store has failed.
        ResponseKind::Bool => Response::Bool(matches!(
            operation,
            Operation::Ping | Operation::CommitRetrieve
        )),
        ResponseKind::Text => Response::Text("OK".into()),
        ResponseKind::Texts => Response::Texts(Vec::new()),
        ResponseKind::Ints => Response::Ints(Vec::new()),
        ResponseKind::Bits => Response::Bits((&[][..]).into()),
        ResponseKind::Transfer => Response::transfer(&[][..], false),
        ResponseKind::PrepareStore => Response::PrepareStore(PrepareStore {
            target: Some(StoreTarget::default()),
        }),
        ResponseKind::PrepareRetrieve => Response::PrepareRetrieve(PrepareRetrieve::miss()),
        ResponseKind::Addresses => Response::Addresses(Vec::new()),
        // No pool: whatever it prepares next is refused in turn.
        ResponseKind::EngineDriven => Response::EngineDriven(EngineDriven {
            shm_name: "".into(),
            pool_size: 0,
            null_block_id: None,
        }),
        ResponseKind::EventBatch
        | ResponseKind::UnifiedLookup
        | ResponseKind::Handshake
        | ResponseKind::ModuleCall => Response::Nothing,
    }
}
