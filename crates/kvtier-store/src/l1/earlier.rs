//! What a start would make of L1 that an earlier server has left, without a start.

use std::ops::Range;
use std::path::PathBuf;

use kvtier_common::error::{Error, ErrorKind, Result};
use kvtier_config::ServerConfig;
use kvtier_core::ledger::Words;
use kvtier_memory::{ArenaKind, SharedWords};

use super::kept::{check_grants, find_arena, find_ledger, named};
use super::place::{ServerInstance, kept_place, named_place};

/// What a start makes of L1 that an earlier server has left.
#[derive(Debug)]
pub enum EarlierL1 {
    /// No earlier L1.
    Absent,
    /// Kept, with this number of objects.
    Kept(usize),
    /// Replaced by a new one, for this reason.
    Replaced(Error),
    /// Removed: the file at this path.
    Removed(PathBuf),
}

/// Read-only view of a ledger's words: writes are dropped.
struct ReadOnlyWords(SharedWords);

impl Words for ReadOnlyWords {
    fn get(&self, at: u64) -> u64 {
        self.0.get(at)
    }

    fn set(&mut self, _: u64, _: u64) {}

    fn end(&self) -> u64 {
        self.0.end()
    }

    fn reach(&mut self, _: Range<u64>) -> bool {
        true
    }
}

/// Finds what a start with this configuration would make of L1 that an earlier server has left. Changes nothing.
///
/// # Errors
/// It may not be replaced, and the start cannot go on with it: another server has it ([`ErrorKind::InUse`]), there are too few
/// hugepages, or L1 is above the memory limit ([`ErrorKind::Invalid`]).
pub fn find_earlier(config: &ServerConfig, instance: ServerInstance<'_>) -> Result<EarlierL1> {
    let path = |place: Result<ArenaKind>| place.ok()?.path().filter(|path| path.exists());
    let place = match kept_place(config) {
        Ok(place) => place,
        Err(_) => {
            config.check_memory(0)?;
            return Ok(path(named_place(config)).map_or(EarlierL1::Absent, EarlierL1::Removed));
        }
    };
    match count_objects(config, &place, instance) {
        Ok(objects) => Ok(EarlierL1::Kept(objects)),
        Err(error) if matches!(error.kind(), ErrorKind::InUse | ErrorKind::Invalid) => {
            Err(named(config, error))
        }
        Err(error) => config.check_memory(0).map(|()| match path(Ok(place)) {
            Some(_) => EarlierL1::Replaced(error),
            None => EarlierL1::Absent,
        }),
    }
}

/// The objects that a start goes on with.
fn count_objects(
    config: &ServerConfig,
    place: &ArenaKind,
    instance: ServerInstance<'_>,
) -> Result<usize> {
    let (arena, bytes) = find_arena(config, place)?;
    let (_, snapshot) = find_ledger(config, &arena, bytes, instance, ReadOnlyWords)?;
    check_grants(&arena, &snapshot)?;
    config.check_memory(arena.backed_bytes())?;
    Ok(snapshot.len())
}
