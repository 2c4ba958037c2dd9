//! Files that are read again once they have changed, so that secrets are replaced without a restart.
//!
//! A task checks them once per second, and may wait for the disk. A reader of the value never waits. If the content is
//! unusable, the last good one stays, and the log says so once per bad content.
//!
//! `value` guards the content, `last` what is known of the file. Neither is held while a file is read, nor another
//! lock inside.

use std::fmt;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvtier_common::error::{Error, Result};
use kvtier_common::sync::Mutex;
use kvtier_config::secret_file_warning;

/// Most bytes of one file.
const MAX_BYTES: u64 = 1 << 20;

/// Makes the value out of the files' contents, in their order; its error names the file.
type Make<T> = Box<dyn Fn(&[Vec<u8>]) -> Result<T> + Send + Sync>;

/// Value of some files.
pub(crate) struct Watched<T> {
    /// For the log.
    what: &'static str,
    /// The last one is secret.
    paths: Vec<PathBuf>,
    make: Make<T>,
    /// Not held while a file is read, nor is `last`.
    value: Mutex<Arc<T>>,
    /// Digest of what was read last, or of why nothing was.
    last: Mutex<blake3::Hash>,
}

impl<T> Watched<T> {
    /// Reads the files that `flags` name; the last one is secret.
    ///
    /// # Errors
    /// A file that cannot be read, or the error of `make`.
    pub(crate) fn open(
        what: &'static str,
        flags: &str,
        paths: Vec<PathBuf>,
        make: impl Fn(&[Vec<u8>]) -> Result<T> + Send + Sync + 'static,
    ) -> Result<Self> {
        let contents = read(&paths);
        let last = Mutex::new(digest(&contents));
        let value = make(&contents.map_err(|error| error.context(flags))?)?;
        Ok(Self {
            what,
            make: Box::new(make),
            value: Mutex::new(Arc::new(value)),
            last,
            paths,
        })
    }

    /// Name of the value in the log.
    pub(crate) fn what(&self) -> &'static str {
        self.what
    }

    /// Value as of the last check, or of the last one that found it usable.
    pub(crate) fn get(&self) -> Arc<T> {
        Arc::clone(&self.value.lock())
    }

    /// Reads the files, and takes what has changed. Of two checks at a time the later to end counts; if it read the older
    /// files, the next check corrects that.
    pub(crate) fn check(&self) {
        let last = *self.last.lock();
        let contents = read(&self.paths);
        let now = digest(&contents);
        if now != last {
            self.take(contents);
        }
        *self.last.lock() = now;
    }

    /// Checks; returns the name of the value.
    pub(crate) fn reload(&self) -> &'static str {
        self.check();
        self.what
    }

    fn take(&self, contents: Result<Vec<Vec<u8>>>) {
        let (what, files) = (self.what, self.names());
        match contents.and_then(|contents| (self.make)(&contents)) {
            Ok(value) => {
                *self.value.lock() = Arc::new(value);
                tracing::info!(target: "audit", files, "{what} read again");
                if let Some(warning) = self.warning() {
                    tracing::warn!("{warning}");
                }
            }
            Err(error) => {
                let error = error.to_string();
                tracing::error!(target: "audit", files, error, "{what} cannot be used; the former stay");
            }
        }
    }

    fn names(&self) -> String {
        let names = self.paths.iter().map(|path| path.display().to_string());
        names.collect::<Vec<_>>().join(", ")
    }

    /// Warning of the mode of the secret file: others than its owner may read it.
    pub(crate) fn warning(&self) -> Option<String> {
        secret_file_warning(self.paths.last()?)
    }
}

impl<T> fmt::Debug for Watched<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.what, self.names())
    }
}

fn read(paths: &[PathBuf]) -> Result<Vec<Vec<u8>>> {
    paths.iter().map(|path| read_file(path)).collect()
}

fn read_file(path: &Path) -> Result<Vec<u8>> {
    let name = path.display();
    let failed = |error| Error::io(format!("{name} cannot be read"), error);
    // Opening anything else might block.
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(Error::refused(format!("{name} is no file; give one")));
    }
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    file.take(MAX_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if bytes.len() as u64 > MAX_BYTES {
        Err(Error::refused(format!(
            "{name} has more than {} MiB",
            MAX_BYTES >> 20
        )))
    } else {
        Ok(bytes)
    }
}

fn digest(contents: &Result<Vec<Vec<u8>>>) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    match contents {
        Err(error) => {
            hasher.update(error.to_string().as_bytes());
        }
        Ok(contents) => {
            for content in contents {
                hasher.update(&(content.len() as u64).to_le_bytes());
                hasher.update(content);
            }
        }
    }
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;

    fn text(path: &Path) -> Result<Watched<String>> {
        Watched::open("words", "--words", vec![path.to_owned()], |contents| {
            match String::from_utf8_lossy(&contents[0]).into_owned() {
                bad if bad.contains("bad") => Err(Error::refused("that is bad")),
                good => Ok(good),
            }
        })
    }

    #[test]
    fn a_change_is_noticed_and_a_bad_one_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("words");
        std::fs::write(&path, "one").unwrap();
        let words = text(&path).unwrap();
        let checked = || {
            words.check();
            words.get()
        };
        assert_eq!(*checked(), "one");
        // Of the same length and within the same tick.
        std::fs::write(&path, "two").unwrap();
        assert_eq!(*checked(), "two");
        std::fs::write(&path, "bad").unwrap();
        assert_eq!(*checked(), "two");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(*checked(), "two");
        std::fs::write(&path, "three").unwrap();
        assert_eq!(*checked(), "three");
    }

    #[test]
    fn a_reader_never_waits_for_a_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("words");
        std::fs::write(&path, "one").unwrap();
        let (reading, read) = std::sync::mpsc::channel::<()>();
        let (go_on, waiting) = std::sync::mpsc::channel::<()>();
        let waiting = Mutex::new(waiting);
        let words = Watched::open("words", "--words", vec![path.clone()], move |contents| {
            if contents[0] == b"two" {
                reading.send(()).unwrap();
                waiting.lock().recv().unwrap();
            }
            Ok(contents[0].clone())
        });
        let words = words.unwrap();
        std::fs::write(&path, "two").unwrap();
        assert_eq!(*words.get(), b"one");
        std::thread::scope(|scope| {
            let check = scope.spawn(|| words.check());
            read.recv().unwrap();
            // During a check that does not end.
            assert_eq!(*words.get(), b"one");
            go_on.send(()).unwrap();
            check.join().unwrap();
        });
        assert_eq!(*words.get(), b"two");
    }

    #[test]
    fn old_file_is_taken_again_only_when_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("words");
        let old = SystemTime::now() - Duration::from_secs(60);
        let put = |content: &str| {
            let next = directory.path().join("next");
            std::fs::write(&next, content).unwrap();
            std::fs::File::options()
                .append(true)
                .open(&next)
                .and_then(|file| file.set_modified(old))
                .unwrap();
            std::fs::rename(&next, &path).unwrap();
        };
        put("one");
        let words = text(&path).unwrap();
        let first = words.get();
        words.check();
        assert!(Arc::ptr_eq(&first, &words.get()));
        put("two");
        words.check();
        assert_eq!(*words.get(), "two");
    }

    #[test]
    fn what_is_no_file_or_too_large_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let told = text(directory.path()).unwrap_err().to_string();
        assert!(told.ends_with("is no file; give one"), "{told}");
        let path = directory.path().join("words");
        let told = |path| text(path).unwrap_err().to_string();
        assert!(told(&path).contains("cannot be read"));
        std::fs::write(&path, vec![b'a'; MAX_BYTES as usize + 1]).unwrap();
        assert!(told(&path).contains("more than 1 MiB"));
    }

    #[test]
    fn a_file_that_others_may_read_is_told() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("words");
        std::fs::write(&path, "one").unwrap();
        let mode = |mode| std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        mode(0o640);
        let words = text(&path).unwrap();
        let told = words.warning().unwrap();
        assert!(told.contains("mode 0640"), "{told}");
        mode(0o400);
        assert_eq!(words.warning(), None);
    }
}
