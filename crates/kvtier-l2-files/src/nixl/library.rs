//! Finding and loading the library.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvtier_common::error::{Error, ErrorKind};

use crate::nixl::error::NixlError;
use crate::nixl::table::Table;

/// File name of the library.
pub const LIBRARY: &str = "libnixl_capi.so";

/// Directories of installations from source, for when the dynamic linker does not find the library.
const DIRECTORIES: &[&str] = &[
    "/opt/nvidia/nvda_nixl/lib64",
    "/opt/nvidia/nvda_nixl/lib/x86_64-linux-gnu",
    "/opt/nvidia/nvda_nixl/lib/aarch64-linux-gnu",
    "/usr/local/nixl/lib/x86_64-linux-gnu",
    "/usr/local/nixl/lib/aarch64-linux-gnu",
];

/// The loaded library.
pub struct Library {
    pub(crate) table: Table,
    path: PathBuf,
}

impl Library {
    /// Loads the library: `given`, or from the directory `given`, which may be a site-packages directory with one of
    /// NIXL's wheels; with `None` [`LIBRARY`] from where the dynamic linker or an installation has it.
    ///
    /// It stays loaded until the process ends, because it starts threads of its own.
    ///
    /// # Errors
    /// [`NixlError::Library`] with all paths that were tried.
    pub fn load(given: Option<&Path>) -> Result<Arc<Self>, NixlError> {
        let mut tried = String::new();
        for path in candidates(given) {
            match Self::open(&path) {
                Ok(table) => return Ok(Arc::new(Self { table, path })),
                Err(why) => {
                    let separator = if tried.is_empty() { "" } else { "; " };
                    // Writing to a text cannot fail.
                    let _ = write!(tried, "{separator}{} ({why})", path.display());
                }
            }
        }
        let library = given.unwrap_or(Path::new(LIBRARY)).display().to_string();
        Err(NixlError::Library { library, tried })
    }

    /// A library with these functions.
    #[cfg(test)]
    pub(crate) fn of(table: Table, path: PathBuf) -> Self {
        Self { table, path }
    }

    fn open(path: &Path) -> Result<Table, Error> {
        let unavailable = |why: &str| Error::new(ErrorKind::Unavailable, why);
        // SAFETY: the path is the operator's or NIXL's own name; initialisers of shared libraries have no conditions.
        let library = unsafe { libloading::Library::new(path) }.map_err(|error| {
            // The dynamic linker's message is the source of this error.
            let source = std::error::Error::source(&error).map(ToString::to_string);
            unavailable(&source.unwrap_or_else(|| error.to_string()))
        })?;
        // SAFETY: functions of these names are NIXL's, and the library is never unloaded if they are used.
        let table = unsafe { Table::find(&library) }
            .map_err(|name| format!("it has no function {name}, so it is not NIXL 1.5 or later"))
            .map_err(|why| unavailable(&why))?;
        // SAFETY: takes nothing.
        if unsafe { (table.is_stub)() } {
            return Err(unavailable("it is a stub, without NIXL behind it"));
        }
        std::mem::forget(library);
        Ok(table)
    }

    /// Returns the path that the library was loaded from.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Library({})", self.path.display())
    }
}

fn candidates(given: Option<&Path>) -> Vec<PathBuf> {
    match given {
        None => {
            let installed = DIRECTORIES.iter().map(|dir| Path::new(dir).join(LIBRARY));
            std::iter::once(LIBRARY.into())
                .chain(installed.filter(|path| path.exists()))
                .collect()
        }
        Some(dir) if dir.is_dir() => {
            let inside = wheels(dir).into_iter().map(|wheel| wheel.join(LIBRARY));
            std::iter::once(dir.join(LIBRARY))
                .filter(|path| path.exists())
                .chain(inside)
                // So that the error names it.
                .chain(std::iter::once(dir.join(LIBRARY)))
                .collect()
        }
        // Without a directory in it, a name would be searched for by the dynamic linker.
        Some(file) if file.parent() == Some(Path::new("")) => vec![Path::new(".").join(file)],
        Some(file) => vec![file.to_owned()],
    }
}

/// Directories of libraries of NIXL's wheels in a site-packages directory: `.nixl_cu12.mesonpy.libs` and the like.
fn wheels(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with(".nixl") && name.ends_with(".mesonpy.libs")
        })
        .collect();
    found.sort();
    found
}
