//! The functions of the C interface by exported name, with the signatures of NIXL 1.5.

use std::ffi::{c_char, c_int, c_void};

/// NixlHandle of one of the library's objects.
pub(crate) type Raw = *mut c_void;

/// Kind of memory.
pub(crate) const DRAM: c_int = 0;
/// Segment of a file.
pub(crate) const FILE: c_int = 4;

/// Operation of a transfer: from the remote side.
pub(crate) const READ: c_int = 0;
/// Operation of a transfer: to the remote side.
pub(crate) const WRITE: c_int = 1;

macro_rules! table {
    ($($name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// Addresses of the functions; all are there.
        pub(crate) struct Table {
            $(pub $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Table {
            /// Finds all functions; else the name of the first one that is missing.
            ///
            /// # Safety
            /// Functions of these names must have these signatures, and the library must stay loaded while the table is
            /// used.
            pub(crate) unsafe fn find(library: &libloading::Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $($name: {
                        const NAME: &str = concat!("nixl_capi_", stringify!($name));
                        // SAFETY: the caller's promise.
                        *unsafe { library.get(NAME.as_bytes()) }.map_err(|_| NAME)?
                    },)*
                })
            }
        }
    };
}

table! {
    is_stub() -> bool;
    create_agent(*const c_char, *mut Raw) -> c_int;
    destroy_agent(Raw) -> c_int;
    create_params(*mut Raw) -> c_int;
    params_add(Raw, *const c_char, *const c_char) -> c_int;
    destroy_params(Raw) -> c_int;
    create_backend(Raw, *const c_char, Raw, *mut Raw) -> c_int;
    destroy_backend(Raw) -> c_int;
    create_opt_args(*mut Raw) -> c_int;
    opt_args_add_backend(Raw, Raw) -> c_int;
    destroy_opt_args(Raw) -> c_int;
    create_reg_dlist(c_int, *mut Raw) -> c_int;
    reg_dlist_add_desc(Raw, usize, usize, u64, *const c_void, usize) -> c_int;
    destroy_reg_dlist(Raw) -> c_int;
    register_mem(Raw, Raw, Raw) -> c_int;
    deregister_mem(Raw, Raw, Raw) -> c_int;
    create_xfer_dlist(c_int, *mut Raw) -> c_int;
    xfer_dlist_add_desc(Raw, usize, usize, u64) -> c_int;
    destroy_xfer_dlist(Raw) -> c_int;
    create_xfer_req(Raw, c_int, Raw, Raw, *const c_char, *mut Raw, Raw) -> c_int;
    post_xfer_req(Raw, Raw, Raw) -> c_int;
    get_xfer_status(Raw, Raw) -> c_int;
    release_xfer_req(Raw, Raw) -> c_int;
    destroy_xfer_req(Raw) -> c_int;
}
