//! The fault guard's table is fixed: when it is full, mappings are refused, and places return.
//! A test of its own: it takes every place of the process.

use kvtier_memory::fault::MAX_MAPPINGS;
use kvtier_memory::{Arena, ArenaError, ArenaKind};

#[test]
fn a_full_table_refuses_and_recovers() {
    let create = || Arena::create(ArenaKind::Anonymous, 4096);
    let mut arenas: Vec<Arena> = (0..MAX_MAPPINGS).map(|_| create().unwrap()).collect();
    assert!(matches!(create(), Err(ArenaError::Guard(_))));
    arenas.swap_remove(MAX_MAPPINGS / 2);
    arenas.push(create().unwrap());
    assert!(matches!(create(), Err(ArenaError::Guard(_))));
}
