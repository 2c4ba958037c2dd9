//! Vector files, and registrations of theirs that get a segment of this process.

use kvtier_client::proto::descriptor::TensorDescriptor;
use kvtier_client::proto::frames::OperationId;
use kvtier_client::proto::generation::Generation;
use kvtier_client::proto::key::VecTokens;
use kvtier_client::proto::operation::Operation;
use kvtier_client::proto::request::Request;
use kvtier_memory::OwnSegment;
use serde_json::Value;

use crate::support::Frames;

/// Folder of what a real client and server exchanged, which the tests of the protocol read too.
pub const EXCHANGES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../kvtier-proto/tests/vectors");

/// A vector file of the exchanges.
pub fn load(name: &str) -> Value {
    let text = std::fs::read_to_string(format!("{EXCHANGES}/{name}")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Frames, written as a list of hex texts. Long ones were cut when they were captured; they lose all of their bytes here.
pub fn frames(value: &Value) -> Frames {
    let frame = |text: &str| {
        if text.contains("...") {
            Vec::new()
        } else {
            hex::decode(text).unwrap()
        }
    };
    let list = value.as_array().unwrap().iter();
    list.map(|text| frame(text.as_str().unwrap())).collect()
}

/// What the request's op frame asks for.
pub fn operation(frames: &[Vec<u8>]) -> Option<Operation> {
    let id = OperationId::decode(frames.get(1)?).ok()?;
    Some(Generation::G6.rows(id).next()?.operation)
}

/// Segments of a client that is no more, made again under names of ours.
#[derive(Default)]
pub struct Segments {
    made: Vec<(String, OwnSegment)>,
}

impl Segments {
    /// The request with every tensor in a segment of ours; names that say they do not exist stay as they are.
    pub fn patch(&mut self, request: Frames) -> Frames {
        if operation(&request) != Some(Operation::RegisterKvCache) {
            return request;
        }
        let spec = Generation::G6.spec(Operation::RegisterKvCache).unwrap();
        let payloads: Vec<&[u8]> = request[2..].iter().map(Vec::as_slice).collect();
        let Ok(Request::RegisterKvCache(mut registration)) =
            Request::decode(spec, &payloads, &mut VecTokens)
        else {
            panic!("a registration that cannot be read");
        };
        for tensor in &mut registration.tensors {
            let TensorDescriptor::CpuShm(shm) = tensor else {
                panic!("a tensor that is not in shared memory")
            };
            if !shm.shm_name.contains("does_not_exist") {
                shm.shm_name = self.name(&shm.shm_name, shm.nbytes);
            }
        }
        let encoded = Request::<Vec<u32>>::RegisterKvCache(registration)
            .encode(spec)
            .unwrap();
        request[..2].iter().cloned().chain(encoded).collect()
    }

    fn name(&mut self, captured: &str, bytes: u64) -> String {
        if let Some((_, segment)) = self.made.iter().find(|(name, _)| name == captured) {
            return segment.name().to_string();
        }
        let segment = OwnSegment::create(bytes).unwrap();
        let name = segment.name().to_string();
        self.made.push((captured.to_string(), segment));
        name
    }

    /// All of them, in the order of their first use.
    pub fn iter(&self) -> impl Iterator<Item = &OwnSegment> {
        self.made.iter().map(|(_, segment)| segment)
    }
}
