//! How much memory reading a pickle takes at most: a small multiple of its steps, whatever they are, and next to nothing
//! for the elements of tensors.
//!
//! Alone in its test binary, because it counts every allocation of the process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use kvtier_proto::descriptor::Dtype;
use kvtier_proto::inline::InlineForm;
use kvtier_proto::pickle::{
    PickleLimits, TensorToWrite, WriteError, read_registration, read_tensors, write_tensors,
};

struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system allocator unchanged; only numbers are kept beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's promises about the layout are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises about pointer and layout are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes allocated at once while `work` ran, beyond what was there before.
fn peak(work: impl FnOnce()) -> usize {
    let before = NOW.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    work();
    PEAK.load(Ordering::Relaxed) - before
}

/// What the test harness itself may allocate meanwhile, and the tables' first steps.
const SLACK: usize = 64 * 1024;

#[test]
fn memory_is_bounded_by_message_size() {
    let limits = PickleLimits::default();
    let repeated: [&[u8]; 10] = [
        b"N",
        b"]",
        b"}",
        b")",
        b"]\x94",
        b"NNN\x87",
        b"]Na",
        b"}NNs",
        b"NQ",
        b"ctorch\nuint8\n)R",
    ];
    for steps in repeated {
        let message = [b"\x80\x04", steps.repeat(100_000 / steps.len()).as_slice()].concat();
        let bytes = peak(|| {
            assert!(read_tensors(&message, &limits).is_err());
            assert!(read_registration(&message, &limits).is_err());
        });
        assert!(
            bytes <= 160 * message.len() + SLACK,
            "{bytes} bytes for {} of {steps:?}",
            message.len()
        );
    }

    // The budget of steps bounds it for messages of any size.
    let long = vec![b']'; 32 << 20];
    let long = [b"\x80\x04", long.as_slice()].concat();
    let bytes = peak(|| assert!(read_tensors(&long, &limits).is_err()));
    assert!(bytes <= 160 * limits.max_opcodes + SLACK, "{bytes} bytes");

    // Elements are neither copied nor counted.
    let shape = [16 << 20];
    let plan = [TensorToWrite {
        dtype: Dtype::UInt8,
        shape: &shape,
    }; 2];
    let message = write_tensors::<WriteError>(&plan, |_, out| {
        out.resize(out.len() + (16 << 20), 1);
        Ok(())
    });
    let message = message.expect("a plain list of tensors");
    let bytes = peak(|| assert!(read_tensors(&message, &limits).is_ok_and(|list| list.len() == 2)));
    assert!(bytes <= SLACK, "{bytes} bytes");

    // Chunks in MessagePack: what is claimed costs nothing, and tensors are bounded.
    let tensors = |count: u32| {
        let mut message = b"\x82\xa7version\x01\xa7tensors\xdd".to_vec();
        message.extend(count.to_be_bytes());
        message
    };
    let bytes = peak(|| assert!(InlineForm::Envelope.read(&tensors(u32::MAX)).is_err()));
    assert!(bytes <= SLACK, "{bytes} bytes");
    let tiny = b"\x83\xa5dtype\xa5uint8\xa5shape\x90\xa4data\xc4\x01\x07";
    for (count, is_read) in [(65_536, true), (65_537, false)] {
        let mut message = tensors(count);
        (0..count).for_each(|_| message.extend(tiny));
        let bytes = peak(|| assert_eq!(InlineForm::Envelope.read(&message).is_ok(), is_read));
        assert!(bytes <= 400 * 65_536 + SLACK, "{bytes} bytes");
    }
}
