//! Files that a reload reads again, so that secrets are replaced without a restart.
//!
//! If the content is unusable, the previous one stays.
//!
//! The mutex guards the content; no other lock is acquired inside, and no file is read, so a reader never waits for the disk.

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
pub(crate) struct SecretFiles<T> {
    /// For the log.
    what: &'static str,
    /// The last one is secret.
    paths: Vec<PathBuf>,
    make: Make<T>,
    /// Not held while a file is read.
    value: Mutex<Arc<T>>,
}

impl<T> SecretFiles<T> {
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
        let contents = read(&paths).map_err(|error| error.context(flags))?;
        Ok(Self {
            what,
            value: Mutex::new(Arc::new(make(&contents)?)),
            make: Box::new(make),
            paths,
        })
    }

    /// Value as last read.
    pub(crate) fn get(&self) -> Arc<T> {
        Arc::clone(&self.value.lock())
    }

    /// Reads the files again; returns the name of the value.
    ///
    /// # Errors
    /// The files cannot be used; the value stays.
    pub(crate) fn reload(&self) -> Result<&'static str> {
        let (what, files) = (self.what, self.names());
        let made = read(&self.paths).and_then(|contents| (self.make)(&contents));
        let value = made.map_err(|error| {
            tracing::error!(target: "audit", files, %error, "{what}: reload failed; keeping the previous version");
            error.context(what).hint("the previous version stays in use")
        })?;
        *self.value.lock() = Arc::new(value);
        tracing::info!(target: "audit", files, "{what} read again");
        if let Some(warning) = self.warning() {
            tracing::warn!("{warning}");
        }
        Ok(what)
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

impl<T> fmt::Debug for SecretFiles<T> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn text(path: &Path) -> Result<SecretFiles<String>> {
        SecretFiles::open("words", "--words", vec![path.to_owned()], |contents| {
            match String::from_utf8_lossy(&contents[0]).into_owned() {
                bad if bad.contains("bad") => Err(Error::refused("that is bad")),
                good => Ok(good),
            }
        })
    }

    #[test]
    fn reload_takes_good_content_and_keeps_the_value_otherwise() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("words");
        std::fs::write(&path, "one").unwrap();
        let words = text(&path).unwrap();
        std::fs::write(&path, "two").unwrap();
        assert_eq!(*words.get(), "one");
        assert_eq!(words.reload(), Ok("words"));
        assert_eq!(*words.get(), "two");
        let refused = || words.reload().unwrap_err().to_string();
        std::fs::write(&path, "bad").unwrap();
        let told = refused();
        assert!(told.starts_with("words: that is bad"), "{told}");
        std::fs::remove_file(&path).unwrap();
        let told = refused();
        assert!(told.contains("cannot be read"), "{told}");
        assert_eq!(*words.get(), "two");
    }

    #[test]
    fn a_reader_never_waits_for_a_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("words");
        std::fs::write(&path, "one").unwrap();
        let (reading, read) = std::sync::mpsc::channel::<()>();
        let (go_on, waiting) = std::sync::mpsc::channel::<()>();
        let waiting = Mutex::new(waiting);
        let words = SecretFiles::open("words", "--words", vec![path.clone()], move |contents| {
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
            let reload = scope.spawn(|| words.reload());
            read.recv().unwrap();
            // During a reload that does not end.
            assert_eq!(*words.get(), b"one");
            go_on.send(()).unwrap();
            reload.join().unwrap().unwrap();
        });
        assert_eq!(*words.get(), b"two");
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
