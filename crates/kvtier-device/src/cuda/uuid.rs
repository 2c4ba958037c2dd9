//! The GPUs of this machine, by UUID.
//!
//! A GPU's ordinal differs between processes, its UUID does not. PyTorch writes it in lower case, `8-4-4-4-12`, in some
//! releases with the prefix `GPU-`.

use std::path::Path;
use std::sync::Arc;

use super::driver::{Driver, PhysicalDevice};
use super::error::CudaError;
use super::storages::{StorageError, cuda};
use crate::error::LayoutError;
use crate::spec::MemorySpec;

/// Description of a GPU that need not be in use.
#[derive(Debug, Clone)]
pub struct Gpu {
    /// The driver's device.
    pub device: PhysicalDevice,
    /// Product name.
    pub name: String,
    /// UUID in lower case, `8-4-4-4-12`, without a prefix.
    pub uuid: String,
    /// Domain, bus, device and function, in lower case as in `/sys`.
    pub pci_bus_id: String,
    /// NUMA node of the GPU; -1 if unknown.
    pub numa_node: i32,
    /// Bytes of GPU memory.
    pub total_bytes: u64,
}

/// All GPUs visible to this process, by ordinal.
#[derive(Debug, Clone)]
pub struct Gpus {
    all: Vec<Gpu>,
}

impl Gpus {
    /// Lists the GPUs from the driver, and their NUMA nodes from `/sys`.
    ///
    /// # Errors
    /// The driver's error.
    pub fn find(driver: &Arc<Driver>) -> Result<Self, CudaError> {
        let describe = |device: PhysicalDevice| {
            let pci_bus_id = device.pci_bus_id()?.to_ascii_lowercase();
            Ok(Gpu {
                name: device.name()?,
                uuid: uuid_text(&device.uuid()?),
                numa_node: numa_node(Path::new("/sys/bus/pci/devices"), &pci_bus_id),
                pci_bus_id,
                total_bytes: device.total_bytes()?,
                device,
            })
        };
        let all = driver.devices()?.into_iter().map(describe);
        Ok(Self {
            all: all.collect::<Result<_, CudaError>>()?,
        })
    }

    /// The GPU of all memories of a registration.
    ///
    /// # Errors
    /// No memories, memories that are not on a GPU, on one not visible to this process, or on several.
    pub fn of(&self, memories: &[MemorySpec]) -> Result<&Gpu, StorageError> {
        let mut found: Option<&Gpu> = None;
        for (index, memory) in memories.iter().enumerate() {
            let at = |source: LayoutError| StorageError {
                index,
                source: source.into(),
            };
            let gpu = cuda(memory)
                .and_then(|spec| self.by_uuid(&spec.device_uuid))
                .map_err(at)?;
            let first = *found.get_or_insert(gpu);
            if first.uuid != gpu.uuid {
                let allowed = format!("{}, as of the tensors before it", first.uuid);
                return Err(at(LayoutError::new("device_uuid", &gpu.uuid, allowed)));
            }
        }
        found.ok_or_else(|| StorageError {
            index: 0,
            source: LayoutError::new("memory", "missing", "memory of a GPU").into(),
        })
    }

    /// All GPUs, by ordinal.
    pub fn all(&self) -> &[Gpu] {
        &self.all
    }

    /// The GPU with this UUID.
    ///
    /// # Errors
    /// An invalid or unknown UUID; the error lists the visible GPUs.
    pub fn by_uuid(&self, text: &str) -> Result<&Gpu, LayoutError> {
        let wanted = parse_uuid(text).map(|uuid| uuid_text(&uuid));
        let found = self
            .all
            .iter()
            .find(|gpu| Some(&gpu.uuid) == wanted.as_ref());
        found.ok_or_else(|| {
            let known: Vec<_> = self.all.iter().map(|gpu| gpu.uuid.as_str()).collect();
            let shown: String = text.chars().take(64).collect();
            LayoutError::new(
                "device_uuid",
                format!("{shown:?}"),
                format!(
                    "one of the {} GPUs this server sees: {}",
                    known.len(),
                    known.join(", ")
                ),
            )
        })
    }
}

/// Formats a UUID in lower case, `8-4-4-4-12`.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (at, byte) in uuid.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// Parses a UUID in any case, `8-4-4-4-12`, with or without the prefix `GPU-` or `MIG-`.
pub fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits = text
        .strip_prefix("GPU-")
        .or_else(|| text.strip_prefix("MIG-"))
        .unwrap_or(text)
        .as_bytes();
    if digits.len() != 36 {
        return None;
    }
    let mut uuid = [0; 16];
    let mut at = 0;
    for (index, byte) in uuid.iter_mut().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            if digits[at] != b'-' {
                return None;
            }
            at += 1;
        }
        let digit = |digit: u8| char::from(digit).to_digit(16);
        *byte = (digit(digits[at])? * 16 + digit(digits[at + 1])?) as u8;
        at += 2;
    }
    Some(uuid)
}

/// NUMA node of a PCI device; -1 if unknown.
fn numa_node(devices: &Path, pci_bus_id: &str) -> i32 {
    std::fs::read_to_string(devices.join(pci_bus_id).join("numa_node"))
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(-1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UUID: [u8; 16] = [
        0xa1, 0xb2, 0xc3, 0xd4, 0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa,
        0xff,
    ];
    const TEXT: &str = "a1b2c3d4-0011-2233-4455-66778899aaff";

    #[test]
    fn both_spellings_are_the_same_gpu() {
        assert_eq!(uuid_text(&UUID), TEXT);
        let upper = TEXT.to_ascii_uppercase();
        for text in [
            TEXT.to_owned(),
            format!("GPU-{TEXT}"),
            format!("GPU-{upper}"),
        ] {
            assert_eq!(parse_uuid(&text), Some(UUID), "{text}");
        }
    }

    #[test]
    fn invalid_uuid_is_none() {
        let spoilt = |at: usize, with: &str| {
            let mut text = TEXT.to_owned();
            text.replace_range(at..at + 1, with);
            text
        };
        for text in [
            String::new(),
            "cpu".into(),
            "GPU-".into(),
            TEXT[1..].into(),
            format!("{TEXT}0"),
            format!("gpu-{TEXT}"),
            format!("GPU-GPU-{TEXT}"),
            spoilt(8, "0"),
            spoilt(0, "-"),
            spoilt(0, "g"),
            spoilt(1, "+"),
            spoilt(34, "\u{e9}"),
        ] {
            assert_eq!(parse_uuid(&text), None, "{text}");
        }
    }

    #[test]
    fn numa_node_is_unknown_without_a_valid_file() {
        let devices = tempfile::tempdir().unwrap();
        let node = |text: Option<&str>| {
            let id = "0000:3b:00.0";
            let slot = devices.path().join(id);
            std::fs::create_dir_all(&slot).unwrap();
            if let Some(text) = text {
                std::fs::write(slot.join("numa_node"), text).unwrap();
            }
            numa_node(devices.path(), id)
        };
        assert_eq!(node(None), -1);
        assert_eq!(node(Some("1\n")), 1);
        assert_eq!(node(Some("-1\n")), -1);
        assert_eq!(node(Some("x")), -1);
    }

    proptest! {
        #[test]
        fn formatted_uuid_parses_to_itself(uuid in any::<[u8; 16]>()) {
            prop_assert_eq!(parse_uuid(&uuid_text(&uuid)), Some(uuid));
        }

        #[test]
        fn no_text_panics(text in ".{0,40}") {
            let _ = parse_uuid(&text);
        }
    }
}
