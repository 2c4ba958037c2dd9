//! Reading blocks in tensor order: the same bytes as from host memory.

use std::sync::Arc;

use kvtier_device::{CpuDevice, Device, DeviceError, EngineMemory, PlanError};
use kvtier_memory::OwnSegment;

use super::bytes::RegisteredCase;
use super::setup::{Pages, Server};
use crate::cpu::share;
use crate::exporter::Exporter;
use crate::model::{Case, random_case};

/// Opens the case's registration in shared memory.
fn in_host_memory(case: &mut Case) -> (Box<dyn EngineMemory>, Vec<OwnSegment>) {
    let segments = share(case);
    (CpuDevice.open(Arc::new(case.layout())).unwrap(), segments)
}

fn read(memory: &dyn EngineMemory, layer: usize, ids: &[i64]) -> Result<Vec<u8>, DeviceError> {
    let mut all = Vec::new();
    memory.read_blocks(layer, ids, &mut |bytes| all.extend_from_slice(bytes))?;
    Ok(all)
}

#[test]
fn blocks_of_any_format_are_read() {
    let server = Server::new();
    let mut engine = Exporter::start();
    for seed in 400..440 {
        let mut case = random_case(seed, "reading");
        let registered = RegisteredCase::new(&server, &mut engine, &mut case);
        let (host, _segments) = in_host_memory(&mut case);
        for group in &case.groups {
            for layer in &group.layers {
                let ids = &group.ids[..group.ids.len().min(5)];
                let expected = read(&*host, *layer, ids).unwrap();
                let given = read(&*registered.memory, *layer, ids).unwrap();
                assert!(
                    !given.is_empty() && given == expected,
                    "seed {seed}, layer {layer}"
                );
            }
        }
    }
    server.ends_clean();
}

#[test]
fn page_bytes_are_read_and_bad_ids_refused() {
    let server = Server::new();
    let mut engine = Exporter::start();
    let pages = Pages::register(&server, &mut engine, [64, 96, 8]);
    let ids = [63, 0, 7, 8, 7];
    assert_eq!(read(&*pages.memory, 0, &ids).unwrap(), pages.gather(&ids));
    let error = read(&*pages.memory, 0, &[0, 64]).unwrap_err();
    assert!(
        matches!(
            error,
            DeviceError::Plan(PlanError::BlockOutOfRange { position: 1, .. })
        ),
        "{error}"
    );
    let error = read(&*pages.memory, 1, &[0]).unwrap_err();
    assert!(
        matches!(error, DeviceError::Plan(PlanError::NoSuchLayer { .. })),
        "{error}"
    );
    for function in ["cuMemcpyDtoHAsync_v2", "cuStreamCreateWithPriority"] {
        server.script(&format!("fail {function}=2@1"));
        let error = read(&*pages.memory, 0, &ids).unwrap_err();
        assert!(
            error.to_string().starts_with(&format!("GPU: {function}")),
            "{error}"
        );
    }
    assert_eq!(read(&*pages.memory, 0, &ids).unwrap(), pages.gather(&ids));
    drop(pages);
    server.ends_clean();
}
