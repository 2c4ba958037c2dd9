//! Transfers under way: who is answered, and when.

use std::sync::Arc;

use kvtier_device::{DeviceError, EngineMemory, Transfer};
use kvtier_proto::response::Response;
use parking_lot::Mutex;

use super::{Answer, Engine, Handled, Responder};

/// When a transfer of a worker on a GPU is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuReply {
    /// When its bytes are in place.
    Done,
    /// When it is with the GPU, with an event that is complete when they are.
    Event,
}

/// Why a transfer was refused, for the metrics: a worker with as many under way as it may have is not one whose copy
/// failed.
pub(super) fn reason(error: &DeviceError, failed: &'static str) -> &'static str {
    match error {
        DeviceError::Busy { .. } => "lane_full",
        _ => failed,
    }
}

impl Engine {
    /// A transfer that begins when its request is out of the way. `end` is called when it has ended, and gives its answer.
    pub(super) fn begin_later(
        self: &Arc<Self>,
        pages: Arc<dyn EngineMemory>,
        transfer: Transfer,
        end: impl FnOnce(&Self, Result<u64, DeviceError>) -> Answer + Send + 'static,
    ) -> Handled {
        let engine = Arc::clone(self);
        Handled::Later(Box::new(move |responder| {
            let ends = Arc::clone(&engine);
            engine.begin(&*pages, transfer, responder, move |moved| end(&ends, moved));
        }))
    }

    fn begin(
        &self,
        pages: &dyn EngineMemory,
        transfer: Transfer,
        responder: Responder,
        end: impl FnOnce(Result<u64, DeviceError>) -> Answer + Send + 'static,
    ) {
        // Who says when it gives up wants to know the end: behind that, an answer would be no promise.
        if self.config.gpu_reply == GpuReply::Done || transfer.deadline.is_some() {
            let done = Box::new(move |moved| responder.answer(end(moved)));
            return pages.transfer(transfer, done);
        }
        // Whoever comes first takes it.
        let responder = Arc::new(Mutex::new(Some(responder)));
        let early = Arc::clone(&responder);
        let begun = Box::new(move |event: &[u8]| {
            let responder = early.lock().take();
            if let Some(responder) = responder {
                responder.answer(Answer::from(Response::transfer(event, true)));
            }
        });
        let done = Box::new(move |moved| {
            let answer = end(moved);
            let responder = responder.lock().take();
            match responder {
                Some(responder) => responder.answer(answer),
                // Its end has been logged. A store that failed is not readable; the pages of a retrieve are wrong, and
                // all that the worker has is the event.
                None if answer.refused.is_some() => {
                    tracing::error!("a transfer failed after it was answered (--gpu-reply event)");
                }
                None => {}
            }
        });
        pages.transfer_in_steps(transfer, begun, done);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Instant;

    use kvtier_device::{Begun, BlockTable, Direction, Done, KvLayout};
    use kvtier_memory::SegmentError;

    use kvtier_core::ChunkHash;
    use kvtier_core::prompt::Prompt;
    use kvtier_proto::key::CacheKey;
    use kvtier_proto::request::{InstanceId, Store};

    use super::super::instances::{Instance, Mode};
    use super::super::layout::ModelLayout;
    use super::*;
    use crate::config::ServerConfig;
    use crate::metrics::Metrics;

    /// A device whose transfers move a byte, or fail, at once; it can tell of an event before.
    struct AtOnce {
        fails: bool,
        layout: Arc<KvLayout>,
        numa_node: Option<u32>,
        /// Where the chunks of its transfers were in the arena.
        places: Mutex<Vec<u64>>,
    }

    impl EngineMemory for AtOnce {
        fn layout(&self) -> &Arc<KvLayout> {
            &self.layout
        }

        fn is_current(&self) -> bool {
            true
        }

        fn remove_orphans(&self) -> Vec<Result<String, SegmentError>> {
            Vec::new()
        }

        fn device(&self) -> &'static str {
            "test"
        }

        fn numa_node(&self) -> Option<u32> {
            self.numa_node
        }

        fn transfer(&self, transfer: Transfer, done: Done) {
            let places = transfer.chunks.iter().map(|chunk| chunk.extent.offset);
            self.places.lock().extend(places);
            done(match self.fails {
                true => Err(DeviceError::Stopped),
                false => Ok(1),
            });
        }

        fn transfer_in_steps(&self, transfer: Transfer, begun: Begun, done: Done) {
            begun(b"event");
            self.transfer(transfer, done);
        }

        fn answer_event<'a>(&self, _: &'a [u8]) -> &'a [u8] {
            &[]
        }

        fn read_blocks(
            &self,
            _: usize,
            _: &[i64],
            _: &mut dyn FnMut(&[u8]),
        ) -> Result<(), DeviceError> {
            Ok(())
        }
    }

    fn layout() -> Arc<KvLayout> {
        let tensor = kvtier_device::TensorSpec {
            memory: kvtier_device::MemorySpec::CpuShm {
                name: "/none".into(),
                nbytes: 64,
            },
            dtype_size: 1,
            dtype_name: "uint8".into(),
            shape: vec![4, 1, 16],
            stride: vec![16, 16, 1],
            storage_offset: 0,
        };
        let engine = kvtier_device::Engine::Vllm;
        let hints = kvtier_device::LayoutHints::default();
        Arc::new(KvLayout::detect(&[tensor], engine, &hints, &[], 1, true).unwrap())
    }

    /// The answers to a transfer, in order, of which there is to be one.
    fn answers(reply: &str, fails: bool, deadline: Option<Instant>) -> Vec<Option<Answer>> {
        let flags = [
            "--shm-name",
            "",
            "--l1-size-gb",
            "0.01",
            "--gpu-reply",
            reply,
        ];
        let config = Arc::new(ServerConfig::from_flags(&flags).unwrap());
        let engine = Engine::new(config, Arc::new(Metrics::new())).unwrap();
        let pages = AtOnce {
            fails,
            layout: layout(),
            numa_node: None,
            places: Mutex::default(),
        };
        let transfer = Transfer {
            arena: Arc::clone(&engine.l1.arena),
            blocks: BlockTable::check(&pages.layout, &[[0i64; 0]], 0).unwrap(),
            chunks: Vec::new(),
            direction: Direction::Store,
            deadline,
            event: Vec::new(),
        };
        let (say, hear) = mpsc::channel();
        let responder = Responder::new(move |answer| say.send(answer).unwrap());
        engine.begin(&pages, transfer, responder, |moved| match moved {
            Ok(_) => Answer::from(Response::transfer(&[][..], true)),
            Err(_) => Answer::from(Response::transfer(&[][..], false)).because("store_failed"),
        });
        hear.iter().collect()
    }

    #[test]
    fn what_a_worker_stores_goes_to_the_part_beside_its_device() {
        let flags = [
            "--shm-name",
            "",
            "--l1-size-gb",
            "0.01",
            "--chunk-size",
            "1",
        ];
        let config = Arc::new(ServerConfig::from_flags(&flags).unwrap());
        let mut engine = Engine::new(config, Arc::new(Metrics::new())).unwrap();
        engine.l1 = engine.l1.in_parts(&[3, 5]);
        let (engine, half) = (Arc::new(engine), 5 << 20);
        for (number, numa_node) in [(0, Some(3)), (1, Some(5))] {
            let memory = Arc::new(AtOnce {
                fails: false,
                layout: layout(),
                numa_node,
                places: Mutex::default(),
            });
            let (mode, id) = (
                Mode::LmcacheDriven {
                    memory: Arc::clone(&memory) as _,
                    tensors: Vec::new(),
                    hints: Default::default(),
                    groups: Vec::new(),
                },
                InstanceId(number.into()),
            );
            let model = ModelLayout::of_pages(&memory.layout);
            let instance = Instance::new(id, "model", 1, mode, model, engine.now());
            assert!(engine.instances.insert(instance).unwrap().is_none());
            let store = Store {
                key: CacheKey {
                    model_name: "model",
                    world_size: 1,
                    worker_id: Some(0),
                    tokens: Prompt {
                        token_count: 2,
                        hashes: [1, 2]
                            .map(|hash| ChunkHash([10 * number + hash; 32]))
                            .into(),
                    },
                    start: 0,
                    end: 2,
                    request_id: "request",
                    cache_salt: "",
                    request_configs: None,
                    num_kv_readers: None,
                },
                instance: id,
                block_ids: vec![vec![1, 2]],
                event_handle: b"",
            };
            let Handled::Later(begin) = engine.store(&store) else {
                panic!("refused")
            };
            begin(Responder::new(|answer| {
                assert_eq!(answer.unwrap().refused, None)
            }));
            let places = memory.places.lock();
            assert_eq!(places.len(), 2);
            let second = |place: &u64| *place >= half;
            assert_eq!(
                places.iter().all(second),
                numa_node == Some(5),
                "{places:?}"
            );
            assert_eq!(
                places.iter().any(second),
                numa_node == Some(5),
                "{places:?}"
            );
        }
    }

    #[test]
    fn too_many_under_way_is_no_failed_copy() {
        let busy = DeviceError::Busy { under_way: 4096 };
        assert_eq!(reason(&busy, "store_failed"), "lane_full");
        assert_eq!(
            reason(&DeviceError::Stopped, "store_failed"),
            "store_failed"
        );
    }

    #[test]
    fn a_transfer_has_one_answer_whenever_it_is_given() {
        let ok = |event: &[u8]| Answer::from(Response::transfer(event, true));
        let failed = Answer::from(Response::transfer(&[][..], false)).because("store_failed");
        assert_eq!(answers("done", false, None), [Some(ok(b""))]);
        assert_eq!(answers("done", true, None), [Some(failed.clone())]);
        assert_eq!(answers("event", false, None), [Some(ok(b"event"))]);
        assert_eq!(
            answers("event", true, Some(Instant::now())),
            [Some(failed.clone())]
        );
        // Too late to be told.
        assert_eq!(answers("event", true, None), [Some(ok(b"event"))]);
    }
}
