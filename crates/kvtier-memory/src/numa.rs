//! Which NUMA nodes the memory of an arena comes from.

use std::io;

use crate::mapping::Mapping;
use kvtier_common::extent::Extent;

/// `MPOL_PREFERRED`: from this node while it has memory, else from the nearest.
const PREFERRED: libc::c_ulong = 1;
/// `MPOL_INTERLEAVE`: from these nodes by turns, page by page.
const INTERLEAVE: libc::c_ulong = 3;
/// Nodes a mask can name: more than any machine has (the kernel's bound is 1024).
const MAX_NODES: usize = 1024;
const WORD_BITS: usize = libc::c_ulong::BITS as usize;

/// Why the nodes of an arena could not be chosen. Its memory then comes from wherever it is first touched.
#[derive(Debug, thiserror::Error)]
pub enum NumaError {
    /// No such node.
    #[error("NUMA node {0}; allowed: 0 to {max}", max = MAX_NODES - 1)]
    Node(u32),
    /// The system refused: a node that is not there, or a container that may not choose.
    #[error("the system does not let memory come from NUMA nodes {nodes:?}: {source}")]
    System {
        /// The nodes.
        nodes: Vec<u32>,
        /// What it said.
        source: io::Error,
    },
}

/// Has pages of `extent` that are touched from now on come from these nodes.
pub(crate) fn bind(mapping: &Mapping, extent: Extent, nodes: &[u32]) -> Result<(), NumaError> {
    if nodes.is_empty() {
        return Ok(());
    }
    let mut mask = [0 as libc::c_ulong; MAX_NODES / WORD_BITS];
    for node in nodes {
        let word = mask.get_mut(*node as usize / WORD_BITS);
        *word.ok_or(NumaError::Node(*node))? |= 1 << (*node as usize % WORD_BITS);
    }
    let mode = match nodes {
        [_] => PREFERRED,
        _ => INTERLEAVE,
    };
    // SAFETY: the range is of this mapping, and only its policy changes; the mask lives and has the number of bits
    // that is passed (the kernel reads one less).
    let result = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            mapping.base().as_ptr().wrapping_add(extent.offset as usize),
            extent.len as libc::c_ulong,
            mode,
            mask.as_ptr(),
            (MAX_NODES + 1) as libc::c_ulong,
            0,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(NumaError::System {
            nodes: nodes.to_vec(),
            source: io::Error::last_os_error(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::{Arena, ArenaKind};

    /// Policy and nodes of the first page, from `get_mempolicy`.
    fn policy(arena: &Arena) -> (i32, libc::c_ulong) {
        policy_at(arena, 0)
    }

    /// Policy and nodes of the page at an offset.
    fn policy_at(arena: &Arena, offset: usize) -> (i32, libc::c_ulong) {
        let (mut mode, mut mask) = (0i32, [0 as libc::c_ulong; MAX_NODES / WORD_BITS]);
        // SAFETY: both addresses are live, and the mask has as many bits as is said.
        let result = unsafe {
            libc::syscall(
                libc::SYS_get_mempolicy,
                &raw mut mode,
                mask.as_mut_ptr(),
                (MAX_NODES + 1) as libc::c_ulong,
                arena.base().as_ptr().wrapping_add(offset),
                // MPOL_F_ADDR
                2,
            )
        };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        (mode, mask[0])
    }

    #[test]
    fn an_arena_takes_its_pages_from_the_nodes_it_is_told() {
        let arena = Arena::create(ArenaKind::Anonymous, 1 << 20).unwrap();
        assert_eq!(policy(&arena), (0, 0));
        arena.prefer_nodes(&[]).unwrap();
        assert_eq!(policy(&arena), (0, 0));
        arena.prefer_nodes(&[0]).unwrap();
        assert_eq!(policy(&arena), (PREFERRED as i32, 1));
        arena.prefer_nodes(&[0, 0]).unwrap();
        assert_eq!(policy(&arena), (INTERLEAVE as i32, 1));
    }

    #[test]
    fn a_part_of_an_arena_has_a_node_of_its_own() {
        let arena = Arena::create(ArenaKind::Anonymous, 1 << 20).unwrap();
        arena.prefer_node_in(1 << 19, 1 << 18, 0).unwrap();
        let preferred = (PREFERRED as i32, 1);
        for (offset, expected) in [
            (0, (0, 0)),
            ((1 << 19) - 4096, (0, 0)),
            (1 << 19, preferred),
            ((3 << 18) - 4096, preferred),
            (3 << 18, (0, 0)),
        ] {
            assert_eq!(policy_at(&arena, offset), expected, "at {offset}");
        }
        assert!(arena.prefer_node_in(0, 1 << 18, 1023).is_err());
    }

    #[test]
    fn nodes_that_are_not_there_are_refused() {
        let arena = Arena::create(ArenaKind::Anonymous, 1 << 20).unwrap();
        let error = arena.prefer_nodes(&[1023]).unwrap_err().to_string();
        assert!(error.contains("[1023]"), "{error}");
        let error = arena.prefer_nodes(&[0, 1023]).unwrap_err().to_string();
        assert!(error.contains("[1023]"), "{error}");
        let error = arena.prefer_nodes(&[0, 1024]).unwrap_err().to_string();
        assert!(error.contains("NUMA node 1024"), "{error}");
        assert_eq!(policy(&arena), (0, 0));
    }
}
