//! The longest servable prefix against a model that tries every length.

use kvtier_core::window::{ChunkBitmap, longest_prefix, needed};
use kvtier_core::{GroupRow, Namespace};
use proptest::prelude::*;
use std::sync::Arc;

fn bitmap(present: &[bool]) -> ChunkBitmap {
    let mut bits = ChunkBitmap::with_capacity(present.len());
    for (chunk, _) in present.iter().enumerate().filter(|&(_, &present)| present) {
        bits.set(chunk);
    }
    bits
}

fn longest(rows: &[(Option<u32>, Vec<bool>)]) -> usize {
    let bitmaps: Vec<ChunkBitmap> = rows.iter().map(|(_, present)| bitmap(present)).collect();
    let namespace = Arc::new(Namespace::new("m", 1, 0, 0, "").unwrap());
    let rows: Vec<GroupRow> = rows
        .iter()
        .map(|(window, _)| GroupRow {
            namespace: Arc::clone(&namespace),
            window: *window,
            object_bytes: 1,
        })
        .collect();
    longest_prefix(&rows, &bitmaps)
}

/// Tries every length, chunk by chunk, from the longest down.
fn model(rows: &[(Option<u32>, Vec<bool>)]) -> usize {
    let serves = |length: usize| {
        rows.iter().all(|(window, present)| {
            let count = window.map_or(length, |window| length.min(window.max(1) as usize));
            (length - count..length).all(|chunk| present.get(chunk).copied().unwrap_or(false))
        })
    };
    let most = rows
        .iter()
        .map(|(_, present)| present.len())
        .max()
        .unwrap_or(0);
    (0..=most).rev().find(|&length| serves(length)).unwrap_or(0)
}

/// Mostly present chunks, so that long prefixes occur; lengths around the word size.
fn presence() -> impl Strategy<Value = Vec<bool>> {
    (
        0usize..200,
        prop_oneof![Just(0.5), Just(0.9), Just(0.99), Just(1.0)],
    )
        .prop_flat_map(|(length, share)| {
            proptest::collection::vec(proptest::bool::weighted(share), length)
        })
}

fn window() -> impl Strategy<Value = Option<u32>> {
    prop_oneof![
        Just(None),
        (0u32..5).prop_map(Some),
        (60u32..70).prop_map(Some),
        (100u32..300).prop_map(Some),
        Just(Some(u32::MAX)),
    ]
}

proptest! {
    #[test]
    fn the_longest_prefix_is_the_models(rows in proptest::collection::vec((window(), presence()), 0..5)) {
        prop_assert_eq!(longest(&rows), if rows.is_empty() { 0 } else { model(&rows) });
    }

    #[test]
    fn rows_of_one_prompt_agree_too(
        rows in (0usize..200).prop_flat_map(|length| proptest::collection::vec(
            (window(), proptest::collection::vec(proptest::bool::weighted(0.95), length)), 1..6)),
    ) {
        prop_assert_eq!(longest(&rows), model(&rows));
    }

    #[test]
    fn bits_are_kept(present in presence(), extra in 0usize..100) {
        let bits = bitmap(&present);
        for chunk in 0..present.len() + extra {
            prop_assert_eq!(bits.get(chunk), present.get(chunk).copied().unwrap_or(false));
        }
        let leading = present.iter().take_while(|&&present| present).count();
        prop_assert_eq!(bits.leading(), leading);
    }
}

#[test]
fn needed_chunks_end_at_the_hit() {
    assert_eq!(needed(None, 10), 0..10);
    assert_eq!(needed(Some(3), 10), 7..10);
    assert_eq!(needed(Some(30), 10), 0..10);
    assert_eq!(needed(Some(0), 10), 9..10);
    assert_eq!(needed(Some(3), 0), 0..0);
}

#[test]
fn window_row_serves_prefix_without_its_start() {
    let full = (None, vec![true; 100]);
    let mut lost = vec![false; 96];
    lost.extend([true; 4]);
    assert_eq!(longest(&[full.clone(), (Some(4), lost.clone())]), 100);
    assert_eq!(longest(&[full, (Some(5), lost)]), 0);
}

#[test]
fn clearing_keeps_nothing() {
    let mut bits = bitmap(&[true; 70]);
    bits.clear();
    assert_eq!(bits, ChunkBitmap::new());
    assert!(!bits.get(0));
}
