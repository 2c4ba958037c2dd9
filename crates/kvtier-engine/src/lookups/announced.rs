//! The file of the chunk sizes that servers of this instance have announced to clients, in the state directory.
//!
//! Its first line is the [id](StateDir::id) of the folder, so that a copy counts as no file. Each further line is a size. It
//! is appended and on disk before a client learns of it, with the line feed in front: what a crash has cut off spoils no
//! other line.

use std::fs::OpenOptions;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use kvtier_error::{Error, Result};
use kvtier_state::StateDir;

/// Name of the file.
const NAME: &str = "chunk-sizes";

/// Most bytes of the file that are read: more than there are with the most sizes that are kept.
const MAX_BYTES: u64 = 4096;

/// The file.
pub struct AnnouncedFile {
    path: PathBuf,
}

impl AnnouncedFile {
    /// The file of this instance and the sizes in it; `None` instead of the sizes if there was no file.
    ///
    /// # Errors
    /// It cannot be trusted, read or created.
    pub fn open(state: &StateDir) -> Result<(Self, Option<Vec<u64>>)> {
        let path = state.file(NAME)?;
        let failed = |error| Error::io(path.display(), error);
        let sizes = read(&path).map_err(failed)?;
        let sizes = sizes.and_then(|content| parse(state.id(), &content));
        if sizes.is_none() {
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(true).mode(0o600);
            let created = options.open(&path);
            let written = created.and_then(|mut file| file.write_all(state.id().as_bytes()));
            written.map_err(failed)?;
        }
        Ok((Self { path }, sizes))
    }

    /// Appends a size. When this returns it is on disk; if it cannot be, the file is removed: it would tell a part only.
    pub fn append(&self, size: u64) {
        let file = OpenOptions::new().append(true).open(&self.path);
        let written = file.and_then(|mut file| {
            file.write_all(format!("\n{size}").as_bytes())?;
            file.sync_data()
        });
        if let Err(error) = written {
            let error = Error::io(self.path.display(), error);
            tracing::warn!(%error, "a chunk size cannot be kept; after a restart clients have no hits until their lookups prove theirs");
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn read(path: &Path) -> io::Result<Option<String>> {
    let file = match OpenOptions::new().read(true).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut content = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut content)?;
    let is_whole = (content.len() as u64) < MAX_BYTES;
    Ok(is_whole.then(|| String::from_utf8(content).ok()).flatten())
}

/// The sizes in a file of the folder `id`.
fn parse(id: &str, content: &str) -> Option<Vec<u64>> {
    let mut lines = content.lines();
    let sizes = lines.next().filter(|found| *found == id).map(|_| lines)?;
    sizes
        .filter(|line| !line.is_empty())
        .map(|line| line.parse().ok())
        .collect()
}
