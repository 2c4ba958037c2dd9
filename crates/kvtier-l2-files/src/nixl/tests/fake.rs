//! What NIXL may answer and this machine's does not, by a fake library.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_void};

use super::*;
use crate::nixl::table::{Raw, Table};

/// Answers of the fake of this thread, and what it has.
#[derive(Default)]
struct Fake {
    post: c_int,
    /// Answers of `get_xfer_status` in turn; then success, or in progress for ever.
    statuses: VecDeque<c_int>,
    is_endless: bool,
    /// Answers of `release_xfer_req` in turn; the last one for ever.
    releases: VecDeque<c_int>,
    /// Answer of `register_mem` for files.
    register_file: c_int,
    made: usize,
    live: usize,
    registered: usize,
    last_kind: c_int,
}

thread_local! {
    static FAKE: RefCell<Fake> = RefCell::default();
}

fn fake<T>(act: impl FnOnce(&mut Fake) -> T) -> T {
    FAKE.with_borrow_mut(act)
}

fn make(to: *mut Raw) -> c_int {
    let number = fake(|fake| {
        fake.live += 1;
        fake.made += 1;
        fake.made
    });
    // SAFETY: the address of a live handle.
    unsafe { *to = std::ptr::without_provenance_mut(number) };
    0
}

unsafe extern "C" fn is_stub() -> bool {
    false
}

unsafe extern "C" fn make_named(_: *const c_char, to: *mut Raw) -> c_int {
    make(to)
}

unsafe extern "C" fn make_plain(to: *mut Raw) -> c_int {
    make(to)
}

unsafe extern "C" fn make_list(kind: c_int, to: *mut Raw) -> c_int {
    fake(|fake| fake.last_kind = kind);
    make(to)
}

unsafe extern "C" fn destroy(_: Raw) -> c_int {
    fake(|fake| fake.live -= 1);
    0
}

unsafe extern "C" fn add_param(_: Raw, _: *const c_char, _: *const c_char) -> c_int {
    0
}

unsafe extern "C" fn make_backend(_: Raw, _: *const c_char, _: Raw, to: *mut Raw) -> c_int {
    make(to)
}

unsafe extern "C" fn add_backend(_: Raw, _: Raw) -> c_int {
    0
}

unsafe extern "C" fn add_registered(
    _: Raw,
    _: usize,
    _: usize,
    _: u64,
    _: *const c_void,
    _: usize,
) -> c_int {
    0
}

unsafe extern "C" fn register(_: Raw, _: Raw, _: Raw) -> c_int {
    fake(|fake| {
        let answer = match fake.last_kind {
            crate::nixl::table::FILE => fake.register_file,
            _ => 0,
        };
        fake.registered += usize::from(answer == 0);
        answer
    })
}

unsafe extern "C" fn deregister(_: Raw, _: Raw, _: Raw) -> c_int {
    fake(|fake| fake.registered -= 1);
    0
}

unsafe extern "C" fn add_transferred(_: Raw, _: usize, _: usize, _: u64) -> c_int {
    0
}

unsafe extern "C" fn make_request(
    _: Raw,
    _: c_int,
    _: Raw,
    _: Raw,
    _: *const c_char,
    to: *mut Raw,
    _: Raw,
) -> c_int {
    make(to)
}

unsafe extern "C" fn post(_: Raw, _: Raw, _: Raw) -> c_int {
    fake(|fake| fake.post)
}

unsafe extern "C" fn status(_: Raw, _: Raw) -> c_int {
    fake(|fake| {
        if fake.is_endless {
            1
        } else {
            fake.statuses.pop_front().unwrap_or_default()
        }
    })
}

unsafe extern "C" fn release(_: Raw, _: Raw) -> c_int {
    fake(|fake| match fake.releases.len() {
        0 => 0,
        1 => fake.releases[0],
        _ => fake.releases.pop_front().unwrap(),
    })
}

fn agent() -> Agent {
    let table = Table {
        is_stub,
        create_agent: make_named,
        destroy_agent: destroy,
        create_params: make_plain,
        params_add: add_param,
        destroy_params: destroy,
        create_backend: make_backend,
        destroy_backend: destroy,
        create_opt_args: make_plain,
        opt_args_add_backend: add_backend,
        destroy_opt_args: destroy,
        create_reg_dlist: make_list,
        reg_dlist_add_desc: add_registered,
        destroy_reg_dlist: destroy,
        register_mem: register,
        deregister_mem: deregister,
        create_xfer_dlist: make_list,
        xfer_dlist_add_desc: add_transferred,
        destroy_xfer_dlist: destroy,
        create_xfer_req: make_request,
        post_xfer_req: post,
        get_xfer_status: status,
        release_xfer_req: release,
        destroy_xfer_req: destroy,
    };
    let library = Arc::new(Library::of(table, "fake".into()));
    Agent::start(&library, "POSIX", &params(&[("use_uring", "true")])).unwrap()
}

/// Reads from a file of `len` bytes with this fake; the result, and how many others still hold the arena.
fn read(len: u64, with: Fake) -> (NixlOutcome<&'static str>, usize) {
    fake(|fake| *fake = with);
    let mut agent = agent();
    let arena = Arc::new(Arena::create(ArenaKind::Anonymous, LEN).unwrap());
    let file = tempfile::tempfile().unwrap();
    file.set_len(len).unwrap();
    let outcome = agent.run(transfer(&arena, 0, file, Some(LEN)));
    let holders = Arc::strong_count(&arena) - 1;
    if matches!(outcome, NixlOutcome::Lost) {
        std::mem::forget(agent);
    }
    (outcome, holders)
}

#[test]
fn every_object_is_destroyed_after_any_end() {
    for (with, expected) in [
        (Fake::default(), None),
        (
            Fake {
                post: 1,
                statuses: vec![1; 200].into(),
                ..Fake::default()
            },
            None,
        ),
        (
            Fake {
                post: 1,
                statuses: [1, -2].into(),
                releases: [-3, -3, 0].into(),
                ..Fake::default()
            },
            Some("move the bytes: error of the backend (-2)"),
        ),
        (
            Fake {
                post: -77,
                ..Fake::default()
            },
            Some("unknown error (-77)"),
        ),
        (
            Fake {
                register_file: -4,
                ..Fake::default()
            },
            Some("register bytes: exception (-4)"),
        ),
    ] {
        let (outcome, _) = read(LEN, with);
        let error = ended(outcome).err().map(|error| error.to_string());
        match (&error, expected) {
            (None, None) => {}
            (Some(error), Some(words)) => assert!(error.contains(words), "{error}"),
            other => panic!("{other:?}"),
        }
        assert_eq!(
            fake(|fake| (fake.live, fake.registered)),
            (0, 0),
            "{error:?}"
        );
    }
}

#[test]
fn success_on_a_short_file_is_an_error() {
    let (outcome, _) = read(LEN - 1, Fake::default());
    let short = LEN - 1;
    assert!(matches!(ended(outcome), Err(NixlError::Short(found)) if found == short));
}

#[test]
fn transfer_that_does_not_end_keeps_its_memory() {
    let cannot_be_released = Fake {
        post: -2,
        releases: [-3].into(),
        ..Fake::default()
    };
    // A release would succeed, and the backend may still write.
    let is_endless = Fake {
        post: 1,
        is_endless: true,
        ..Fake::default()
    };
    for with in [cannot_be_released, is_endless] {
        let (outcome, holders) = read(LEN, with);
        assert!(matches!(outcome, NixlOutcome::Lost));
        assert_eq!(holders, 1, "the transfer is leaked with its arena");
        assert_eq!(fake(|fake| fake.registered), 2);
    }
}
