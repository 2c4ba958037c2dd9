//! The file of the chunk sizes that servers of this instance have announced to clients, in the state directory.
//!
//! Its first line is the [id](StateDir::id) of the folder, so that a copy is known as one. Each further line is a size. It
//! is appended and on disk before a client learns of it, with the line feed in front: what a crash has cut off spoils no
//! other line. A file that is damaged, or a copy, is begun again with [`FOREIGN`]: it would tell a part only.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;

use kvtier_common::error::{Error, Result};
use kvtier_common::state::StateDir;

/// Name of the file.
const NAME: &str = "chunk-sizes";

/// Most bytes of the file that are read: more than there are with the most sizes that are kept.
const MAX_BYTES: u64 = 4096;

/// Stands among the announced sizes for those that are not known: every size is possible.
pub const FOREIGN: u64 = 0;

/// The file.
pub struct AnnouncedFile {
    path: PathBuf,
    file: File,
}

impl AnnouncedFile {
    /// The file of this instance and the sizes in it; `None` instead of the sizes if there was no file.
    ///
    /// # Errors
    /// It cannot be trusted, read or created.
    pub fn open(state: &StateDir) -> Result<(Self, Option<Vec<u64>>)> {
        let path = state.file(NAME)?;
        let was_there = path.exists();
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(true).mode(0o600);
        let read = options.open(&path).and_then(|mut file| {
            let mut content = Vec::new();
            (&file).take(MAX_BYTES).read_to_end(&mut content)?;
            let sizes = parse(state.id(), &content);
            if sizes.is_none() {
                file.set_len(0)?;
                file.write_all(state.id().as_bytes())?;
            }
            Ok((file, sizes))
        });
        let (file, sizes) = read.map_err(|error| Error::io(path.display(), error))?;
        let kept = Self { path, file };
        if was_there && sizes.is_none() {
            kept.append(FOREIGN);
        }
        Ok((kept, sizes))
    }

    /// Appends a size. When this returns it is on disk; if it cannot be, the file is emptied, which counts as damage.
    pub fn append(&self, size: u64) {
        let written = (&self.file).write_all(format!("\n{size}").as_bytes());
        if let Err(error) = written.and_then(|()| self.file.sync_data()) {
            let error = Error::io(self.path.display(), error);
            tracing::warn!(%error, "a chunk size cannot be kept; after a restart clients have no hits until their lookups prove theirs");
            let _ = self.file.set_len(0);
        }
    }
}

/// The sizes in a file of the folder `id`.
fn parse(id: &str, content: &[u8]) -> Option<Vec<u64>> {
    let is_whole = (content.len() as u64) < MAX_BYTES;
    let content = std::str::from_utf8(content).ok().filter(|_| is_whole)?;
    let mut lines = content.lines();
    let sizes = lines.next().filter(|found| *found == id).map(|_| lines)?;
    sizes
        .filter(|line| !line.is_empty())
        .map(|line| line.parse().ok())
        .collect()
}
