//! Pickles without Python: a reader that calls nothing and a writer for one shape of pickle.
//!
//! Two places of the protocol carry pickles. Engines without shared memory send and expect a pickled list of tensors
//! (`commit_store`, `prepare_retrieve`), and clients up to 0.5.5 register pickled wrappers. A pickle is a program for a
//! stack machine that may call any function of the receiver; ours builds plain values, knows a handful of global
//! names, and *recognises* calls instead of making them. Everything else is refused by name.
//!
//! Hostile input costs at most a small multiple of its own size: values are copied by reference, so sharing through
//! the memo repeats no bytes, there is no recursion, and [`Limits`] bound the steps and the results.
//!
//! Formats: pickle protocols 2 to 5 of Python, and the stream that `torch.save` wrote before its zip format, which is
//! still what a pickled CPU tensor contains (PyTorch 1.x to 2.13).

mod globals;
mod input;
mod machine;
mod registration;
mod storage;
mod tensors;
mod writer;

pub use crate::tensor::TensorToWrite;
pub use registration::read_registration;
pub use tensors::read_tensors;
pub use writer::{WriteError, write_around_elements, write_tensors};

/// What a reader accepts at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PickleLimits {
    /// Steps of the machine for one message. A tensor takes about 35, and 40 more inside its storage.
    /// A step keeps at most 160 bytes alive.
    pub max_opcodes: usize,
    /// Tensors in the list.
    pub max_tensors: usize,
}

impl Default for PickleLimits {
    /// Limits for 4096 tensors: a prompt of a million tokens in chunks of 256.
    fn default() -> Self {
        PickleLimits {
            max_opcodes: 512 * 1024,
            max_tensors: 4096,
        }
    }
}
