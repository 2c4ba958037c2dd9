//! Plans of random registrations, against the naive model.

use crate::executors::EXECUTORS;
use crate::model::random_case;
use kvtier_device::{BlockTable, ChunkRequest, Direction};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn stores_and_retrieves_match_the_model(seed in any::<u64>()) {
        let case = random_case(seed, "plan");
        let layout = case.layout();
        for (kernel, group) in layout.kernel_groups().iter().zip(&case.groups) {
            prop_assert_eq!(kernel.format, group.format);
            prop_assert_eq!(kernel.slots_per_block, group.slots);
            prop_assert_eq!(kernel.tokens_per_block, group.tokens_per_block);
        }
        let table = BlockTable::check(&layout, &case.block_ids(), case.chunks).unwrap();
        let before: Vec<Vec<u8>> = case.memories.iter().map(|(_, bytes)| bytes.clone()).collect();
        let mut memories = before.clone();
        let mut copies = Vec::new();
        for object in layout.object_groups() {
            for chunk in 0..case.chunks {
                let mut request =
                    ChunkRequest { object_group: object.index, chunk, skip_tokens: 0 };
                request.plan(&layout, &table, &mut copies).unwrap();
                let moved: u64 = copies.iter().map(|copy| copy.bytes()).sum();
                prop_assert_eq!(moved, object.object_bytes);
                let mut expected = vec![0; object.object_bytes as usize];
                case.each_byte(&object.kernel_groups, chunk, 0, |memory, engine, at| {
                    expected[at as usize] = before[memory][engine as usize];
                });
                for (name, run) in EXECUTORS {
                    let mut bytes = vec![0; object.object_bytes as usize];
                    run(&copies, &mut memories, &mut bytes, Direction::Store);
                    prop_assert!(bytes == expected, "{name} {} chunk {chunk}", object.index);
                    prop_assert!(memories == before, "{name} changed the pages in a store");
                }

                // Retrieve other bytes: everything that is not addressed must stay.
                let mut fresh: Vec<u8> = expected.iter().map(|byte| !byte).collect();
                request.skip_tokens = case.skip_tokens;
                request.plan(&layout, &table, &mut copies).unwrap();
                let mut expected = before.clone();
                case.each_byte(&object.kernel_groups, chunk, case.skip_tokens, |memory, engine, at| {
                    expected[memory][engine as usize] = fresh[at as usize];
                });
                for (name, run) in EXECUTORS {
                    run(&copies, &mut memories, &mut fresh, Direction::Retrieve);
                    prop_assert!(memories == expected, "{name} retrieve {} chunk {chunk}", object.index);
                    memories.clone_from(&before);
                }
            }
        }
    }

    #[test]
    fn repeated_blocks_are_stored_repeatedly(seed in any::<u64>(), which in any::<u16>()) {
        let mut case = random_case(seed, "plan");
        for group in &mut case.groups {
            let (from, to) = (which as usize % group.ids.len(), which as usize / 7 % group.ids.len());
            group.ids[to] = group.ids[from];
        }
        let layout = case.layout();
        let table = BlockTable::check(&layout, &case.block_ids(), case.chunks).unwrap();
        let mut memories: Vec<Vec<u8>> = case.memories.iter().map(|(_, b)| b.clone()).collect();
        let mut copies = Vec::new();
        for object in layout.object_groups() {
            let request = ChunkRequest { object_group: object.index, chunk: 0, skip_tokens: 0 };
            request.plan(&layout, &table, &mut copies).unwrap();
            for (name, run) in EXECUTORS {
                let mut bytes = vec![0; object.object_bytes as usize];
                run(&copies, &mut memories, &mut bytes, Direction::Store);
                case.each_byte(&object.kernel_groups, 0, 0, |memory, engine, at| {
                    assert_eq!(bytes[at as usize], memories[memory][engine as usize], "{name}");
                });
            }
        }
    }
}
