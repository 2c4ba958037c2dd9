//! How an engine that blends rotates the keys of its worker's pages, as it registers it.

use std::sync::Arc;

use kvtier_common::error::{Error, Result};
use kvtier_device::{GroupRope, KernelGroup, KvQuant, MemorySpec, Rope, RopeTable, TensorSpec};
use kvtier_proto::request::{InstanceId, RopeRegistration};

use super::super::context::Context;
use super::super::instances::Instance;
use super::tensors::tensor_spec;

/// Tables of one worker, at most: a model has one for each kind of attention.
const MAX_TABLES: usize = 8;

/// A registration, read and not yet checked against the pages.
pub(super) struct NewRope {
    pub(super) id: InstanceId,
    tensors: Vec<TensorSpec>,
    head_size: u64,
    neox: bool,
    quant: KvQuant,
    /// By engine group, as the next two; empty if all groups have the first table.
    tables: Vec<i64>,
    windows: Vec<Vec<i64>>,
    head_sizes: Vec<i64>,
}

impl NewRope {
    /// Reads a registration.
    ///
    /// # Errors
    /// One line: the field, its value, and what is allowed.
    pub(super) fn read(registration: &RopeRegistration<'_>) -> Result<Self> {
        if registration.caches.len() > MAX_TABLES {
            return Err(Error::refused(format!(
                "cos_sin_caches has {} entries; allowed: at most {MAX_TABLES}",
                registration.caches.len()
            )));
        }
        let tensors = registration.caches.iter().map(tensor_spec);
        let quant = KvQuant::from_name(registration.kv_quant).ok_or_else(|| {
            Error::refused(format!(
                "kv_quant is {:?}; allowed: \"\", fp8_e4m3 and fp8_e5m2",
                registration.kv_quant
            ))
        })?;
        Ok(Self {
            id: registration.instance,
            tensors: tensors.collect::<Result<_>>()?,
            head_size: count("head_size", registration.head_size)?,
            neox: registration.is_neox_style,
            quant,
            tables: registration.group_to_cache.clone(),
            windows: registration.group_rot.clone(),
            head_sizes: registration.group_head_size.clone(),
        })
    }

    /// Whether a GPU's driver is needed to read it.
    pub(super) fn is_on_gpu(&self) -> bool {
        let is_cuda = |tensor: &TensorSpec| matches!(tensor.memory, MemorySpec::Cuda(_));
        self.tensors.iter().any(is_cuda)
    }

    /// Copies the tables and checks all of it against the pages of the worker.
    ///
    /// # Errors
    /// The worker is not registered, or has no pages; or what does not fit them.
    pub(super) fn open(&self, context: &Context) -> Result<(Arc<Instance>, Rope)> {
        let instance = context.instances.get(self.id).ok_or_else(|| {
            Error::refused(format!(
                "instance {} is not registered; allowed: one whose register_kv_cache was answered",
                self.id
            ))
        })?;
        let pages = instance.pages().ok_or_else(|| {
            Error::refused(format!(
                "instance {} copies by itself; allowed: one that registered with register_kv_cache",
                self.id
            ))
        })?;
        let tables = self
            .tensors
            .iter()
            .map(|tensor| context.devices.read_table(tensor));
        let tables = tables.collect::<Result<Vec<_>>>()?;
        let layout = pages.layout();
        let groups = layout.kernel_groups().iter();
        let groups = groups.map(|group| self.group_rope(group, &tables));
        let groups = groups.collect::<Result<_>>()?;
        let rope = Rope::check(layout, tables, groups).map_err(Error::refused)?;
        Ok((instance, rope))
    }

    fn group_rope(&self, group: &KernelGroup, tables: &[RopeTable]) -> Result<GroupRope> {
        let engine_group = group.engine_group_id;
        let head_size = find_engine_group("group_head_size", &self.head_sizes, engine_group)?;
        let head_size =
            head_size.map_or(Ok(self.head_size), |size| count("group_head_size", *size));
        let mut rope = GroupRope {
            table: None,
            window: [0, 0],
            head_size: head_size?,
            neox: self.neox,
            quant: self.quant,
        };
        let table = find_engine_group("group_to_cache", &self.tables, engine_group)?;
        let table = table.copied().unwrap_or(0);
        // A model without RoPE has no tables, a group without it the number -1.
        if self.tensors.is_empty() || table == -1 {
            return Ok(rope);
        }
        let table = usize::try_from(table)
            .ok()
            .filter(|table| *table < tables.len());
        let Some(table) = table else {
            return Err(Error::refused(format!(
                "group_to_cache[{engine_group}] is not the number of one of {} tables; allowed: those, and -1 for none",
                tables.len()
            )));
        };
        (rope.table, rope.window) = match find_engine_group(
            "group_rot",
            &self.windows,
            engine_group,
        )? {
            None => (Some(table), [0, tables[table].width()]),
            Some(window) => match window[..] {
                [] => (None, [0, 0]),
                [offset, width] => {
                    let window = [
                        count("group_rot offset", offset)?,
                        count("group_rot width", width)?,
                    ];
                    (Some(table), window)
                }
                _ => {
                    return Err(Error::refused(format!(
                        "group_rot[{engine_group}] has {} entries; allowed: an offset and a width, or none",
                        window.len()
                    )));
                }
            },
        };
        Ok(rope)
    }
}

/// The value of an engine group; nothing in a list that is empty, which all groups may leave out.
fn find_engine_group<'a, T>(
    field: &str,
    values: &'a [T],
    engine_group: i64,
) -> Result<Option<&'a T>> {
    if values.is_empty() {
        return Ok(None);
    }
    let value = usize::try_from(engine_group)
        .ok()
        .and_then(|group| values.get(group));
    value.map(Some).ok_or_else(|| {
        Error::refused(format!(
            "{field} has {} entries; allowed: none, or one for each engine group up to {engine_group}",
            values.len()
        ))
    })
}

fn count(field: &str, value: i64) -> Result<u64> {
    u64::try_from(value)
        .map_err(|_| Error::refused(format!("{field} is {value}; allowed: at least 0")))
}
