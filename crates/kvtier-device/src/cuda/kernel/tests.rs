use kvtier_memory::CopyLoop;
use sha2::{Digest, Sha256};

use super::*;

const SOURCE: &str = include_str!("kvcopy.cu");

fn copy(inner_bytes: u64, loops: [(u64, u64, u64); 3]) -> DeviceCopy {
    DeviceCopy {
        engine: 1 << 40,
        host: 1 << 20,
        inner_bytes,
        loops: loops.map(|(count, segment_stride, arena_stride)| CopyLoop {
            count,
            segment_stride,
            arena_stride,
        }),
    }
}

const ONCE: (u64, u64, u64) = (1, 0, 0);

#[test]
fn ptx_matches_the_source() {
    let hash: String = Sha256::digest(SOURCE)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let recorded = PTX.lines().next();
    let expected = format!("// sha256 of kvcopy.cu: {hash}");
    assert_eq!(recorded, Some(&*expected), "run kernel/build.sh");
}

#[test]
fn ptx_has_every_kernel_for_old_drivers() {
    assert!(PTX.contains("\n.version 6.4\n"));
    assert!(PTX.contains("\n.target sm_75\n"));
    assert_eq!(PTX.matches(".entry ").count(), Unit::ALL.len());
    for unit in Unit::ALL {
        let (_, entry) = PTX
            .split_once(&format!(".visible .entry {}(", unit.kernel()))
            .unwrap_or_else(|| panic!("no {}", unit.kernel()));
        let (parameters, rest) = entry.split_once(')').expect("parameters");
        let types: Vec<&str> = parameters
            .split(',')
            .filter_map(|parameter| parameter.split_whitespace().nth(1))
            .collect();
        assert_eq!(types, [".u64", ".u64", ".u32"], "{}", unit.kernel());
        let bounds = rest.split_once('{').expect("a body").0;
        assert!(bounds.contains(&format!(".maxntid {THREADS}, 1, 1")));
    }
}

#[test]
fn unit_divides_all_addresses_and_lengths() {
    let whole = copy(4096, [(3, 8192, 4096), ONCE, ONCE]);
    assert_eq!(Unit::of(&whole), Unit::Sixteen);
    let odd = |change: fn(&mut DeviceCopy)| {
        let mut copy = whole;
        change(&mut copy);
        Unit::of(&copy).bytes()
    };
    assert_eq!(odd(|copy| copy.engine += 8), 8);
    assert_eq!(odd(|copy| copy.host += 4), 4);
    assert_eq!(odd(|copy| copy.inner_bytes += 2), 2);
    assert_eq!(odd(|copy| copy.loops[0].segment_stride += 1), 1);
    assert_eq!(odd(|copy| copy.loops[0].arena_stride += 40), 8);
    // A loop that runs once takes no step.
    assert_eq!(odd(|copy| copy.loops[1].segment_stride += 1), 16);
    for unit in Unit::ALL {
        assert_eq!(unit.kernel(), format!("kvcopy_{}", unit.bytes()));
    }
}

#[test]
fn item_steps_by_one_warp() {
    let step = |copy: &DeviceCopy| {
        let mut work = KernelWork::default();
        work.push(copy, Direction::Store, Unit::of(copy));
        let item = work.items()[0];
        let [outer, middle, inner] = item.step;
        let [_, b, c] = item.count;
        assert_eq!(
            ((outer * b + middle) * c + inner) * item.run_units + item.run_step,
            LANES
        );
        assert!(middle < b && inner < c && item.run_step < item.run_units.max(LANES + 1));
        (item.step, item.run_step)
    };
    assert_eq!(step(&copy(1 << 20, [ONCE; 3])), ([0, 0, 0], 32));
    assert_eq!(step(&copy(512, [ONCE; 3])), ([1, 0, 0], 0));
    // 8 heads of 128 bytes, 16 slots: 4 heads a step.
    let heads = (8, 2048, 128);
    let slots = (16, 128, 1024);
    assert_eq!(
        step(&copy(128, [(4, 1 << 15, 1 << 14), slots, heads])),
        ([0, 0, 4], 0)
    );
    // 3 heads of 48 bytes: 32 units are 3 slots, 1 head and 2 units.
    assert_eq!(
        step(&copy(48, [(4, 4096, 2304), (16, 48, 144), (3, 768, 48)])),
        ([0, 3, 1], 2)
    );
}

#[test]
fn tiles_cover_an_item_once() {
    // Runs of 24 KiB: of three tiles two lie in one run.
    let mut plan = KernelPlan::default();
    plan.push(
        &[copy(24 << 10, [(2, 1 << 20, 24 << 10), ONCE, ONCE])],
        Direction::Retrieve,
    );
    let launches: Vec<_> = plan.launches().collect();
    let [(Unit::Sixteen, work)] = launches[..] else {
        panic!("{launches:?}")
    };
    let tiles: Vec<_> = work
        .tiles()
        .iter()
        .map(|tile| (tile.first_unit, tile.units, tile.straight))
        .collect();
    assert_eq!(tiles, [(0, 1024, 1), (1024, 1024, 0), (2048, 1024, 1)]);
    assert_eq!(work.item_bytes().len(), 96);
    assert_eq!(work.tile_bytes().len(), 3 * 16);
    assert_eq!(work.blocks(8), 1);
    let long: Vec<_> = vec![copy(1 << 20, [ONCE; 3]); 2];
    plan.push(&long, Direction::Store);
    let (_, work) = plan.launches().next().expect("the launch");
    assert_eq!((work.tiles().len(), work.blocks(100)), (3 + 128, 9));
    assert_eq!(work.blocks(8), 8);
    plan.clear();
    assert_eq!(plan.launches().count(), 0);
}

#[test]
fn each_unit_has_its_own_launch() {
    let mut plan = KernelPlan::default();
    let short = copy(4, [(64, 4, 132), ONCE, ONCE]);
    plan.push(
        &[copy(8192, [ONCE; 3]), short, copy(0, [ONCE; 3])],
        Direction::Store,
    );
    let launches: Vec<_> = plan
        .launches()
        .map(|(unit, work)| (unit.bytes(), work.items().len()))
        .collect();
    assert_eq!(launches, [(16, 1), (4, 1)]);
}

#[test]
fn long_copies_become_several_items() {
    let every_run = |copies: &[DeviceCopy]| {
        let mut runs = Vec::new();
        for copy in copies {
            let mut list = crate::cuda::DeviceCopies::default();
            list.push(*copy);
            list.visit_runs(crate::cuda::PinnedPieces::WHOLE, |run| {
                runs.push(run);
                Ok::<(), ()>(())
            })
            .expect("no error");
        }
        runs
    };
    // 5 * 3 * 7 runs that adjoin nowhere.
    let looped = copy(48, [(5, 9000, 8000), (3, 2000, 1500), (7, 100, 200)]);
    for most in [48, 96, 144, 1008, 4096] {
        let mut parts = Vec::new();
        looped.visit_parts(most, &mut |part| parts.push(*part));
        assert!(parts.iter().all(|part| part.bytes() <= most));
        assert_eq!(every_run(&parts), every_run(&[looped]));
    }
    let mut parts = Vec::new();
    copy(10_000, [ONCE; 3]).visit_parts(4096, &mut |part| {
        parts.push((part.engine - (1 << 40), part.host - (1 << 20), part.bytes()));
    });
    assert_eq!(
        parts,
        [(0, 0, 4096), (4096, 4096, 4096), (8192, 8192, 1808)]
    );
}
