use super::*;
use proptest::prelude::*;

fn of(slot: u32) -> Candidate {
    Candidate { slot, tenant: 0 }
}

/// A key per object, spread over the shards of the tables.
fn key(object: u32) -> u64 {
    u64::from(object).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn store(policy: &mut ArcPolicy, slot: u32, object: u32) {
    policy.admit(of(slot), key(object));
    policy.insert(of(slot), false);
}

fn evict(policy: &mut ArcPolicy, slot: u32, object: u32) {
    policy.remove(of(slot));
    policy.evicted(of(slot), key(object));
}

/// Objects 0 to `count`, each in the slot of its number, used once.
fn stored(count: u32) -> ArcPolicy {
    let mut policy = ArcPolicy::default();
    for object in 0..count {
        store(&mut policy, object, object);
    }
    policy
}

/// Asserts the objects of T1 and T2, the oldest first.
#[track_caller]
fn assert_lists(policy: &ArcPolicy, t1: &[u32], t2: &[u32]) {
    let lists = (policy.t1.order().unwrap(), policy.t2.order().unwrap());
    assert_eq!(lists, (t1.to_vec(), t2.to_vec()));
    policy.order().unwrap();
}

/// Asserts the keys in B1 and B2, the oldest first.
#[track_caller]
fn assert_ghosts(policy: &ArcPolicy, b1: &[u32], b2: &[u32]) {
    let keys = |objects: &[u32]| objects.iter().copied().map(key).collect::<Vec<u64>>();
    let ghosts = [&policy.b1, &policy.b2].map(|ghosts| ghosts.check(usize::MAX).unwrap());
    assert_eq!(ghosts, [keys(b1), keys(b2)]);
}

#[test]
fn new_object_is_in_t1() {
    let policy = stored(3);
    assert_lists(&policy, &[0, 1, 2], &[]);
    assert_eq!((policy.capacity, policy.target), (3, 0.0));
}

#[test]
fn touch_moves_object_to_t2() {
    let mut policy = stored(3);
    policy.touch(of(1));
    assert_lists(&policy, &[0, 2], &[1]);
    policy.touch(of(0));
    assert_lists(&policy, &[2], &[1, 0]);
    policy.touch(of(1));
    assert_lists(&policy, &[2], &[0, 1]);
}

#[test]
fn lease_with_use_moves_object_to_t2() {
    let mut policy = stored(3);
    policy.remove(of(1));
    // Leased: not in the order, so there is nothing to touch.
    policy.touch(of(1));
    assert_lists(&policy, &[0, 2], &[]);
    policy.insert(of(1), true);
    assert_lists(&policy, &[0, 2], &[1]);
    policy.touch(of(0));
    policy.remove(of(1));
    policy.insert(of(1), true);
    assert_lists(&policy, &[2], &[0, 1]);
}

#[test]
fn lease_without_use_keeps_list() {
    let mut policy = stored(3);
    policy.touch(of(2));
    for slot in [1, 2] {
        policy.remove(of(slot));
        policy.insert(of(slot), false);
    }
    assert_lists(&policy, &[0, 1], &[2]);
}

#[test]
fn evicted_keys_of_t1_and_t2_are_in_b1_and_b2() {
    let mut policy = stored(3);
    policy.touch(of(1));
    evict(&mut policy, 0, 0);
    evict(&mut policy, 1, 1);
    assert_lists(&policy, &[2], &[]);
    assert_ghosts(&policy, &[0], &[1]);
}

#[test]
fn removed_key_is_no_ghost() {
    let mut policy = stored(3);
    policy.remove(of(0));
    store(&mut policy, 0, 0);
    assert_lists(&policy, &[1, 2, 0], &[]);
    assert_ghosts(&policy, &[], &[]);
    assert_eq!(policy.target, 0.0);
}

#[test]
fn hit_in_b1_enters_t2_and_raises_target() {
    let mut policy = stored(8);
    for slot in 1..4 {
        policy.touch(of(slot));
    }
    for slot in 0..4 {
        evict(&mut policy, slot, slot);
    }
    assert_ghosts(&policy, &[0], &[1, 2, 3]);
    // B2 is three times as long as B1.
    store(&mut policy, 0, 0);
    assert_eq!(policy.target, 3.0);
    assert_lists(&policy, &[4, 5, 6, 7], &[0]);
    assert_ghosts(&policy, &[], &[1, 2, 3]);
    // By one, since B1 is not shorter than B2.
    for slot in 4..8 {
        evict(&mut policy, slot, slot);
    }
    store(&mut policy, 4, 5);
    assert_eq!(policy.target, 4.0);
    assert_lists(&policy, &[], &[0, 4]);
    assert_ghosts(&policy, &[4, 6, 7], &[1, 2, 3]);
}

#[test]
fn hit_in_b2_enters_t2_and_lowers_target() {
    let mut policy = stored(8);
    for slot in 5..8 {
        policy.touch(of(slot));
    }
    for slot in 0..8 {
        evict(&mut policy, slot, slot);
    }
    policy.target = 6.0;
    assert_ghosts(&policy, &[0, 1, 2, 3, 4], &[5, 6, 7]);
    // B1 to B2 is five to three: fractions count.
    store(&mut policy, 0, 6);
    assert_eq!(policy.target, 6.0 - 5.0 / 3.0);
    assert_lists(&policy, &[], &[0]);
    assert_ghosts(&policy, &[0, 1, 2, 3, 4], &[5, 7]);
}

#[test]
fn target_stays_within_zero_and_capacity() {
    let mut policy = stored(2);
    for expected in [1.0, 2.0, 2.0] {
        policy.b1.insert(7, 2);
        policy.admit(of(0), 7);
        assert_eq!(policy.target, expected);
    }
    for expected in [1.0, 0.0, 0.0] {
        policy.b2.insert(7, 2);
        policy.admit(of(0), 7);
        assert_eq!(policy.target, expected);
    }
}

#[test]
fn t1_is_evicted_while_not_shorter_than_target() {
    let mut policy = stored(6);
    policy.touch(of(0));
    policy.touch(of(1));
    for (target, order) in [
        // At target 0 all of T1, then T2.
        (0.0, [2, 3, 4, 5, 0, 1]),
        (1.0, [2, 3, 4, 5, 0, 1]),
        (2.0, [2, 3, 4, 0, 1, 5]),
        // A fraction does not count.
        (3.9, [2, 3, 0, 1, 4, 5]),
        (4.0, [2, 0, 1, 3, 4, 5]),
        // T1 is shorter than the target: T2 first, then T1.
        (5.0, [0, 1, 2, 3, 4, 5]),
        (6.0, [0, 1, 2, 3, 4, 5]),
    ] {
        policy.target = target;
        assert_eq!(policy.order().unwrap(), order, "target {target}");
        assert_eq!(policy.victim(), Some(order[0]), "target {target}");
    }
}

#[test]
fn other_list_is_evicted_if_one_is_empty() {
    let mut policy = stored(2);
    policy.target = 2.0;
    policy.remove(of(0));
    assert_lists(&policy, &[1], &[]);
    assert_eq!(policy.victim(), Some(1));
    policy.target = 0.0;
    policy.touch(of(1));
    assert_lists(&policy, &[], &[1]);
    assert_eq!(policy.victim(), Some(1));
}

#[test]
fn reused_slot_starts_in_t1() {
    let mut policy = stored(2);
    policy.touch(of(0));
    evict(&mut policy, 0, 0);
    store(&mut policy, 0, 70);
    assert_lists(&policy, &[1, 0], &[]);
    // Removed while leased: the policy learns of it only when the slot has another object.
    policy.touch(of(1));
    policy.remove(of(1));
    store(&mut policy, 1, 71);
    assert_lists(&policy, &[0, 1], &[]);
    assert_eq!(policy.capacity, 2);
}

#[test]
fn unknown_slots_are_ignored() {
    let mut policy = ArcPolicy::default();
    policy.remove(of(70_000));
    policy.touch(of(5));
    policy.evicted(of(5), key(5));
    assert_eq!((policy.len(), policy.victim()), (0, None));
    assert_lists(&policy, &[], &[]);
    assert_ghosts(&policy, &[], &[]);
}

#[test]
fn memory_is_bounded_by_the_capacity() {
    const CAPACITY: u32 = 10_000;
    let mut policy = stored(CAPACITY);
    let mut held: Vec<u32> = (0..CAPACITY).collect();
    let mut filled = 0;
    // Every third object is used again, so that B1 and B2 fill up.
    for object in CAPACITY..20 * CAPACITY {
        policy.target = f64::from(object % 3) * f64::from(CAPACITY) / 2.0;
        let slot = policy.victim().unwrap();
        evict(&mut policy, slot, held[slot as usize]);
        store(&mut policy, slot, object);
        held[slot as usize] = object;
        if object % 3 == 0 {
            policy.touch(of(slot));
        }
        if object == 10 * CAPACITY {
            filled = policy.bookkeeping_bytes();
        }
    }
    policy.order().unwrap();
    let ghosts = (policy.b1.len(), policy.b2.len());
    assert_eq!(ghosts, (CAPACITY as usize, CAPACITY as usize));
    assert_eq!(policy.bookkeeping_bytes(), filled);
    let each = filled / CAPACITY as usize;
    assert!(each < 17 + 2 * 40, "{each} bytes per object");
}

#[test]
fn keys_with_equal_hashes_count_as_one() {
    let mut policy = stored(3);
    store(&mut policy, 3, 0);
    policy.touch(of(1));
    for slot in [0, 3] {
        evict(&mut policy, slot, 0);
    }
    evict(&mut policy, 1, 0);
    assert_ghosts(&policy, &[0], &[0]);
    store(&mut policy, 0, 0);
    assert_ghosts(&policy, &[], &[0]);
    policy.order().unwrap();
}

/// Model of the policy: vectors, and one victim after the other.
#[derive(Debug, Default)]
struct Model {
    /// By slot: the object, whether it is in T2, and whether it is leased.
    slots: Vec<Option<(u32, bool, bool)>>,
    t1: Vec<u32>,
    t2: Vec<u32>,
    b1: Vec<u32>,
    b2: Vec<u32>,
    target: f64,
    capacity: usize,
}

fn take<T: PartialEq>(list: &mut Vec<T>, item: T) -> bool {
    let found = list.iter().position(|it| *it == item);
    found.map(|at| list.remove(at)).is_some()
}

impl Model {
    fn resident(&self) -> Vec<u32> {
        let slots = (0..).zip(&self.slots);
        slots
            .filter(|(_, it)| it.is_some())
            .map(|(n, _)| n)
            .collect()
    }

    fn order(&self) -> Vec<u32> {
        let (mut t1, mut t2) = (self.t1.clone(), self.t2.clone());
        let mut order = Vec::new();
        while t1.len() + t2.len() > 0 {
            let is_t1 = t1.len() >= self.target.floor() as usize;
            let from_t1 = (is_t1 || t2.is_empty()) && !t1.is_empty();
            order.push(if from_t1 { &mut t1 } else { &mut t2 }.remove(0));
        }
        order
    }

    fn admit(&mut self, slot: u32, object: u32) {
        let (b1, b2) = (self.b1.len() as f64, self.b2.len() as f64);
        let mut is_t2 = true;
        if take(&mut self.b1, object) {
            self.target += f64::max(1.0, b2 / b1);
        } else if take(&mut self.b2, object) {
            self.target -= f64::max(1.0, b1 / b2);
        } else {
            is_t2 = false;
        }
        self.slots[slot as usize] = Some((object, is_t2, false));
        self.capacity = self.capacity.max(self.resident().len());
        self.target = self.target.max(0.0).min(self.capacity as f64);
        if is_t2 { &mut self.t2 } else { &mut self.t1 }.push(slot);
    }

    fn remove(&mut self, slot: u32) -> bool {
        take(&mut self.t1, slot) || take(&mut self.t2, slot)
    }

    fn use_again(&mut self, slot: u32) {
        if let Some((_, is_t2, leased)) = &mut self.slots[slot as usize] {
            (*is_t2, *leased) = (true, false);
        }
        self.t2.push(slot);
    }

    fn evict(&mut self, slot: u32) -> u32 {
        self.remove(slot);
        let (object, is_t2, _) = self.slots[slot as usize].take().unwrap();
        let ghosts = if is_t2 { &mut self.b2 } else { &mut self.b1 };
        ghosts.push(object);
        if ghosts.len() > self.capacity {
            ghosts.remove(0);
        }
        object
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Store(u32),
    Evict,
    /// Index among the residents, as in all variants from here on.
    Lease(usize),
    Release(usize),
    Touch(usize),
    Remove(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let nth = 0..SLOTS;
    prop_oneof![
        6 => (0..40u32).prop_map(Step::Store),
        1 => Just(Step::Evict),
        2 => nth.clone().prop_map(Step::Lease),
        4 => nth.clone().prop_map(Step::Release),
        2 => nth.clone().prop_map(Step::Touch),
        1 => nth.prop_map(Step::Remove),
    ]
}

const SLOTS: usize = 8;

/// Runs one step on both; the model decides what is possible.
fn take_step(policy: &mut ArcPolicy, model: &mut Model, step: Step) {
    let resident = model.resident();
    let nth = |n: usize| resident.get(n % resident.len().max(1)).copied();
    let leased = |model: &Model, slot: u32| model.slots[slot as usize].is_some_and(|it| it.2);
    match step {
        Step::Store(object) => {
            let mut with = (0..).zip(&model.slots);
            let known = with.find(|(_, it)| it.is_some_and(|it| it.0 == object));
            if let Some((slot, _)) = known {
                take_step_touch(policy, model, slot);
                return;
            }
            if resident.len() == SLOTS {
                take_step(policy, model, Step::Evict);
            }
            let free = (0..).zip(&model.slots).find(|(_, it)| it.is_none());
            if let Some((slot, _)) = free {
                model.admit(slot, object);
                store(policy, slot, object);
            }
        }
        Step::Evict => {
            if let Some(slot) = model.order().first().copied() {
                let object = model.evict(slot);
                evict(policy, slot, object);
            }
        }
        Step::Lease(n) => {
            if let Some(slot) = nth(n).filter(|&slot| !leased(model, slot)) {
                model.remove(slot);
                model.slots[slot as usize].as_mut().unwrap().2 = true;
                policy.remove(of(slot));
            }
        }
        Step::Release(n) => {
            if let Some(slot) = nth(n).filter(|&slot| leased(model, slot)) {
                model.use_again(slot);
                policy.insert(of(slot), true);
            }
        }
        Step::Touch(n) => {
            if let Some(slot) = nth(n) {
                take_step_touch(policy, model, slot);
            }
        }
        Step::Remove(n) => {
            // The policy is not called for a leased one.
            if let Some(slot) = nth(n) {
                if model.remove(slot) {
                    policy.remove(of(slot));
                }
                model.slots[slot as usize] = None;
            }
        }
    }
}

fn take_step_touch(policy: &mut ArcPolicy, model: &mut Model, slot: u32) {
    if model.remove(slot) {
        model.use_again(slot);
    }
    policy.touch(of(slot));
}

proptest! {
    #[test]
    fn policy_matches_model(steps in prop::collection::vec(step(), 0..400)) {
        let mut policy = ArcPolicy::default();
        let mut model = Model { slots: vec![None; SLOTS], ..Model::default() };
        for step in steps {
            take_step(&mut policy, &mut model, step);
            prop_assert_eq!((policy.capacity, policy.target), (model.capacity, model.target));
            assert_lists(&policy, &model.t1, &model.t2);
            assert_ghosts(&policy, &model.b1, &model.b2);
            let order = model.order();
            prop_assert_eq!(policy.order().unwrap(), &order[..]);
            prop_assert_eq!(policy.victim(), order.first().copied());
            prop_assert_eq!(policy.len(), order.len());
            for limit in [0, 1, 3, 6, usize::MAX] {
                let mut upcoming = vec![99];
                policy.upcoming(None, limit, &mut upcoming);
                prop_assert_eq!(&upcoming[1..], &order[..limit.min(order.len())]);
            }
        }
    }
}
