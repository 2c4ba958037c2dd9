use super::*;
use proptest::prelude::*;

fn of(slot: u32) -> Candidate {
    Candidate { slot, salt: 0 }
}

/// A key for each object, spread over the parts of the tables.
fn key(object: u32) -> u64 {
    u64::from(object).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn store(policy: &mut Adaptive, slot: u32, object: u32) {
    policy.admit(of(slot), key(object));
    policy.insert(of(slot), false);
}

fn evict(policy: &mut Adaptive, slot: u32, object: u32) {
    policy.withdraw(of(slot));
    policy.evicted(of(slot), key(object));
}

/// Objects 0 to `count`, each in the slot of its number, used once.
fn stored(count: u32) -> Adaptive {
    let mut policy = Adaptive::default();
    for object in 0..count {
        store(&mut policy, object, object);
    }
    policy
}

/// The objects used once and used again, the oldest first.
#[track_caller]
fn assert_lists(policy: &Adaptive, once: &[u32], again: &[u32]) {
    let lists = (policy.once.order().unwrap(), policy.again.order().unwrap());
    assert_eq!(lists, (once.to_vec(), again.to_vec()));
    policy.order().unwrap();
}

/// The keys remembered of those used once and used again, the oldest first.
#[track_caller]
fn assert_gone(policy: &Adaptive, once: &[u32], again: &[u32]) {
    let keys = |objects: &[u32]| objects.iter().copied().map(key).collect::<Vec<u64>>();
    let gone = [&policy.once_gone, &policy.again_gone].map(|gone| gone.check(usize::MAX).unwrap());
    assert_eq!(gone, [keys(once), keys(again)]);
}

#[test]
fn a_new_object_is_used_once() {
    let policy = stored(3);
    assert_lists(&policy, &[0, 1, 2], &[]);
    assert_eq!((policy.capacity, policy.target), (3, 0.0));
}

#[test]
fn a_touch_is_a_further_use() {
    let mut policy = stored(3);
    policy.touch(of(1));
    assert_lists(&policy, &[0, 2], &[1]);
    policy.touch(of(0));
    assert_lists(&policy, &[2], &[1, 0]);
    policy.touch(of(1));
    assert_lists(&policy, &[2], &[0, 1]);
}

#[test]
fn the_end_of_a_lease_is_a_further_use() {
    let mut policy = stored(3);
    policy.withdraw(of(1));
    // Leased: not in the order, so there is nothing to touch.
    policy.touch(of(1));
    assert_lists(&policy, &[0, 2], &[]);
    policy.insert(of(1), true);
    assert_lists(&policy, &[0, 2], &[1]);
    policy.touch(of(0));
    policy.withdraw(of(1));
    policy.insert(of(1), true);
    assert_lists(&policy, &[2], &[0, 1]);
}

#[test]
fn a_lease_that_nobody_used_changes_nothing() {
    let mut policy = stored(3);
    policy.touch(of(2));
    for slot in [1, 2] {
        policy.withdraw(of(slot));
        policy.insert(of(slot), false);
    }
    assert_lists(&policy, &[0, 1], &[2]);
}

#[test]
fn an_evicted_key_is_remembered_with_its_list() {
    let mut policy = stored(3);
    policy.touch(of(1));
    evict(&mut policy, 0, 0);
    evict(&mut policy, 1, 1);
    assert_lists(&policy, &[2], &[]);
    assert_gone(&policy, &[0], &[1]);
}

#[test]
fn a_removed_key_is_forgotten() {
    let mut policy = stored(3);
    policy.withdraw(of(0));
    store(&mut policy, 0, 0);
    assert_lists(&policy, &[1, 2, 0], &[]);
    assert_gone(&policy, &[], &[]);
    assert_eq!(policy.target, 0.0);
}

#[test]
fn a_key_gone_after_one_use_returns_as_used_again_and_makes_room_for_its_kind() {
    let mut policy = stored(8);
    for slot in 1..4 {
        policy.touch(of(slot));
    }
    for slot in 0..4 {
        evict(&mut policy, slot, slot);
    }
    assert_gone(&policy, &[0], &[1, 2, 3]);
    // Three to one.
    store(&mut policy, 0, 0);
    assert_eq!(policy.target, 3.0);
    assert_lists(&policy, &[4, 5, 6, 7], &[0]);
    assert_gone(&policy, &[], &[1, 2, 3]);
    // One, where those remembered are not fewer.
    for slot in 4..8 {
        evict(&mut policy, slot, slot);
    }
    store(&mut policy, 4, 5);
    assert_eq!(policy.target, 4.0);
    assert_lists(&policy, &[], &[0, 4]);
    assert_gone(&policy, &[4, 6, 7], &[1, 2, 3]);
}

#[test]
fn a_key_gone_after_more_uses_returns_as_used_again_and_makes_room_for_its_kind() {
    let mut policy = stored(8);
    for slot in 5..8 {
        policy.touch(of(slot));
    }
    for slot in 0..8 {
        evict(&mut policy, slot, slot);
    }
    policy.target = 6.0;
    assert_gone(&policy, &[0, 1, 2, 3, 4], &[5, 6, 7]);
    // Five to three: fractions count.
    store(&mut policy, 0, 6);
    assert_eq!(policy.target, 6.0 - 5.0 / 3.0);
    assert_lists(&policy, &[], &[0]);
    assert_gone(&policy, &[0, 1, 2, 3, 4], &[5, 7]);
}

#[test]
fn the_target_stays_between_nothing_and_the_capacity() {
    let mut policy = stored(2);
    for expected in [1.0, 2.0, 2.0] {
        policy.once_gone.remember(7, 2);
        policy.admit(of(0), 7);
        assert_eq!(policy.target, expected);
    }
    for expected in [1.0, 0.0, 0.0] {
        policy.again_gone.remember(7, 2);
        policy.admit(of(0), 7);
        assert_eq!(policy.target, expected);
    }
}

#[test]
fn those_used_once_leave_while_they_are_not_fewer_than_the_target() {
    let mut policy = stored(6);
    policy.touch(of(0));
    policy.touch(of(1));
    for (target, order) in [
        // With none wanted, all of them, and the others at last.
        (0.0, [2, 3, 4, 5, 0, 1]),
        (1.0, [2, 3, 4, 5, 0, 1]),
        (2.0, [2, 3, 4, 0, 1, 5]),
        // A fraction does not count.
        (3.9, [2, 3, 0, 1, 4, 5]),
        (4.0, [2, 0, 1, 3, 4, 5]),
        // Fewer than wanted: first the others, then they all the same.
        (5.0, [0, 1, 2, 3, 4, 5]),
        (6.0, [0, 1, 2, 3, 4, 5]),
    ] {
        policy.target = target;
        assert_eq!(policy.order().unwrap(), order, "target {target}");
        assert_eq!(policy.victim(), Some(order[0]), "target {target}");
    }
}

#[test]
fn where_one_list_is_empty_the_other_loses() {
    let mut policy = stored(2);
    policy.target = 2.0;
    policy.withdraw(of(0));
    assert_lists(&policy, &[1], &[]);
    assert_eq!(policy.victim(), Some(1));
    policy.target = 0.0;
    policy.touch(of(1));
    assert_lists(&policy, &[], &[1]);
    assert_eq!(policy.victim(), Some(1));
}

#[test]
fn a_reused_slot_starts_anew() {
    let mut policy = stored(2);
    policy.touch(of(0));
    evict(&mut policy, 0, 0);
    store(&mut policy, 0, 70);
    assert_lists(&policy, &[1, 0], &[]);
    // Removed while leased: the policy hears of it only when the slot has another object.
    policy.touch(of(1));
    policy.withdraw(of(1));
    store(&mut policy, 1, 71);
    assert_lists(&policy, &[0, 1], &[]);
    assert_eq!(policy.capacity, 2);
}

#[test]
fn unknown_slots_are_ignored() {
    let mut policy = Adaptive::default();
    policy.withdraw(of(70_000));
    policy.touch(of(5));
    policy.evicted(of(5), key(5));
    assert_eq!((policy.len(), policy.victim()), (0, None));
    assert_lists(&policy, &[], &[]);
    assert_gone(&policy, &[], &[]);
}

#[test]
fn memory_is_bounded_by_the_capacity() {
    const CAPACITY: u32 = 10_000;
    let mut policy = stored(CAPACITY);
    let mut held: Vec<u32> = (0..CAPACITY).collect();
    let mut filled = 0;
    // Each third object is used again, so that both lists of keys fill up.
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
    let gone = (policy.once_gone.len(), policy.again_gone.len());
    assert_eq!(gone, (CAPACITY as usize, CAPACITY as usize));
    assert_eq!(policy.bookkeeping_bytes(), filled);
    let each = filled / CAPACITY as usize;
    assert!(each < 17 + 2 * 40, "{each} bytes for each object");
}

#[test]
fn two_keys_with_one_hash_do_no_harm() {
    let mut policy = stored(3);
    store(&mut policy, 3, 0);
    policy.touch(of(1));
    for slot in [0, 3] {
        evict(&mut policy, slot, 0);
    }
    evict(&mut policy, 1, 0);
    assert_gone(&policy, &[0], &[0]);
    store(&mut policy, 0, 0);
    assert_gone(&policy, &[], &[0]);
    policy.order().unwrap();
}

/// The rules as they are told: vectors, and one victim after the other.
#[derive(Debug, Default)]
struct Model {
    /// By slot: the object, whether it was used again, and whether it is leased.
    slots: Vec<Option<(u32, bool, bool)>>,
    once: Vec<u32>,
    again: Vec<u32>,
    once_gone: Vec<u32>,
    again_gone: Vec<u32>,
    target: f64,
    most: usize,
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
        let (mut once, mut again) = (self.once.clone(), self.again.clone());
        let mut order = Vec::new();
        while once.len() + again.len() > 0 {
            let is_once = once.len() >= self.target.floor() as usize;
            let from_once = (is_once || again.is_empty()) && !once.is_empty();
            order.push(if from_once { &mut once } else { &mut again }.remove(0));
        }
        order
    }

    fn admit(&mut self, slot: u32, object: u32) {
        let (once, again) = (self.once_gone.len() as f64, self.again_gone.len() as f64);
        let mut is_again = true;
        if take(&mut self.once_gone, object) {
            self.target += f64::max(1.0, again / once);
        } else if take(&mut self.again_gone, object) {
            self.target -= f64::max(1.0, once / again);
        } else {
            is_again = false;
        }
        self.slots[slot as usize] = Some((object, is_again, false));
        self.most = self.most.max(self.resident().len());
        self.target = self.target.max(0.0).min(self.most as f64);
        if is_again {
            &mut self.again
        } else {
            &mut self.once
        }
        .push(slot);
    }

    fn withdraw(&mut self, slot: u32) -> bool {
        take(&mut self.once, slot) || take(&mut self.again, slot)
    }

    fn use_again(&mut self, slot: u32) {
        if let Some((_, again, leased)) = &mut self.slots[slot as usize] {
            (*again, *leased) = (true, false);
        }
        self.again.push(slot);
    }

    fn evict(&mut self, slot: u32) -> u32 {
        self.withdraw(slot);
        let (object, again, _) = self.slots[slot as usize].take().unwrap();
        let gone = if again {
            &mut self.again_gone
        } else {
            &mut self.once_gone
        };
        gone.push(object);
        if gone.len() > self.most {
            gone.remove(0);
        }
        object
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Store(u32),
    Evict,
    /// The rest name one of the residents.
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

/// One step of both; the model decides what is possible.
fn take_step(policy: &mut Adaptive, model: &mut Model, step: Step) {
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
                model.withdraw(slot);
                model.slots[slot as usize].as_mut().unwrap().2 = true;
                policy.withdraw(of(slot));
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
            // Of a leased one the policy hears nothing.
            if let Some(slot) = nth(n) {
                if model.withdraw(slot) {
                    policy.withdraw(of(slot));
                }
                model.slots[slot as usize] = None;
            }
        }
    }
}

fn take_step_touch(policy: &mut Adaptive, model: &mut Model, slot: u32) {
    if model.withdraw(slot) {
        model.use_again(slot);
    }
    policy.touch(of(slot));
}

proptest! {
    #[test]
    fn all_is_as_in_the_model(steps in prop::collection::vec(step(), 0..400)) {
        let mut policy = Adaptive::default();
        let mut model = Model { slots: vec![None; SLOTS], ..Model::default() };
        for step in steps {
            take_step(&mut policy, &mut model, step);
            prop_assert_eq!((policy.capacity, policy.target), (model.most, model.target));
            assert_lists(&policy, &model.once, &model.again);
            assert_gone(&policy, &model.once_gone, &model.again_gone);
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
