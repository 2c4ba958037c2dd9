//! The cases.

mod basics;
mod cancellation;
mod concurrency;
mod damage;
mod identity;
mod listing;

use super::context::TestContext;
use crate::adapter::BoxFuture;

/// One case.
pub(super) struct Case {
    pub name: &'static str,
    pub run: fn(TestContext) -> BoxFuture<'static, ()>,
}

macro_rules! cases {
    ($($file:ident: $($name:ident),*;)*) => {
        /// All cases.
        pub(super) const ALL: &[Case] = &[$($(
            Case {
                name: stringify!($name),
                run: |context| Box::pin($file::$name(context)),
            },
        )*)*];
    };
}

cases! {
    basics: round_trip, tells_what_it_is, without_a_capability_it_says_so, mixed_sizes_in_one_batch, empty_batches,
        a_bad_item_fails_alone, ten_thousand_keys;
    identity: same_key_twice_in_one_batch, other_lengths_are_never_ok, other_layouts_are_never_ok,
        tenants_and_models_are_apart, odd_keys_are_kept_or_refused;
    listing: a_listing_in_pages_is_complete, odd_cursors_are_harmless, bytes_agree_at_every_step, reopens_what_was_stored,
        recovers_what_was_stored, recovery_stops_when_requested, recovers_while_used;
    concurrency: same_key_by_many_callers, delete_while_loading, many_tasks_at_once;
    cancellation: dropped_stores_leave_all_or_nothing, dropped_loads_release_their_buffers, dropped_calls_do_no_harm,
        close_waits_for_work;
    damage: damaged_objects_are_never_ok, damage_while_closed_is_never_ok, damaged_objects_can_be_stored_again;
}
