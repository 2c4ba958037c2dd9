//! Files that are read again once they have changed, so that secrets are replaced without a restart.
//!
//! A task has to check them now and then, and may wait for the disk: a check costs one `stat` per file. A reader of the
//! value never waits. If the content is unusable, the last good one stays, and the log says so once per bad content.
//!
//! `value` guards the content, `last` what is known of the file. Neither is held while a file is read, nor another
//! lock inside.

use std::fmt;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kvtier_sync::Mutex;

/// Most bytes of one file.
const SIZE: u64 = 1 << 20;

/// A file this young may change again without its times telling, as they are those of the system's clock tick.
const YOUNG: Duration = Duration::from_secs(2);

/// Makes the value out of the files' contents, in their order; the error says what is wrong and in which of them.
type Make<T> = Box<dyn Fn(&[Vec<u8>]) -> Result<T, String> + Send + Sync>;

/// What some files say.
pub(crate) struct Watched<T> {
    /// For the log.
    what: &'static str,
    /// The last one is secret.
    paths: Vec<PathBuf>,
    make: Make<T>,
    /// Not held while a file is read, as that one below.
    value: Mutex<Arc<T>>,
    last: Mutex<Look>,
}

/// What one look has seen.
#[derive(Clone)]
struct Look {
    /// What the files were like when they were last read, unless they may have changed since without a trace.
    seen: Option<Vec<Stamp>>,
    /// Of what was read then.
    content: Result<blake3::Hash, String>,
}

/// Device, inode, size, and the times of the last change of content and of the file.
#[derive(Clone, PartialEq)]
struct Stamp(u64, u64, u64, (i64, i64), (i64, i64));

impl<T> Watched<T> {
    /// Reads the files; the last one is secret.
    ///
    /// # Errors
    /// A file that cannot be read, or what `make` says.
    pub(crate) fn open(
        what: &'static str,
        paths: Vec<PathBuf>,
        make: impl Fn(&[Vec<u8>]) -> Result<T, String> + Send + Sync + 'static,
    ) -> Result<Self, String> {
        let seen = stamps(&paths);
        let contents = read(&paths)?;
        let value = Arc::new(make(&contents)?);
        Ok(Self {
            what,
            make: Box::new(make),
            value: Mutex::new(value),
            last: Mutex::new(Look {
                seen,
                content: Ok(digest(&contents)),
            }),
            paths,
        })
    }

    /// What they said at the last look, or when they last could be used.
    pub(crate) fn get(&self) -> Arc<T> {
        Arc::clone(&self.value.lock())
    }

    /// Reads what has changed. Of two looks at a time the later to end counts; if it read the older files, the next look
    /// mends that.
    pub(crate) fn look(&self) {
        let last = self.last.lock().clone();
        let seen = stamps(&self.paths);
        if seen.is_some() && seen == last.seen {
            return;
        }
        let contents = read(&self.paths);
        let content = contents.as_deref().map(digest).map_err(Clone::clone);
        if content != last.content {
            self.take(contents);
        }
        *self.last.lock() = Look { seen, content };
    }

    /// Looks, and says at what.
    pub(crate) fn reload(&self) -> &'static str {
        self.look();
        self.what
    }

    fn take(&self, contents: Result<Vec<Vec<u8>>, String>) {
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
                tracing::error!(target: "audit", files, error, "{what} cannot be used; the former stay");
            }
        }
    }

    fn names(&self) -> String {
        let names = self.paths.iter().map(|path| path.display().to_string());
        names.collect::<Vec<_>>().join(", ")
    }

    /// What is wrong with the mode of the secret file: others than its owner may read it.
    pub(crate) fn warning(&self) -> Option<String> {
        let path = self.paths.last()?;
        let mode = std::fs::metadata(path).ok()?.mode() & 0o777;
        (mode & 0o077 != 0).then(|| {
            format!(
                "{} holds a secret and has mode {mode:04o}, which is not for its owner alone; 0600 is enough",
                path.display()
            )
        })
    }
}

impl<T> fmt::Debug for Watched<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.what, self.names())
    }
}

/// `None` when a file is not there, or is so young that these stamps would not tell it from what it becomes.
fn stamps(paths: &[PathBuf]) -> Option<Vec<Stamp>> {
    let stamp = |path: &PathBuf| {
        let data = std::fs::metadata(path).ok()?;
        let age = SystemTime::now().duration_since(data.modified().ok()?);
        age.is_ok_and(|age| age > YOUNG).then(|| {
            Stamp(
                data.dev(),
                data.ino(),
                data.size(),
                (data.mtime(), data.mtime_nsec()),
                (data.ctime(), data.ctime_nsec()),
            )
        })
    };
    paths.iter().map(stamp).collect()
}

fn read(paths: &[PathBuf]) -> Result<Vec<Vec<u8>>, String> {
    paths.iter().map(|path| read_file(path)).collect()
}

fn read_file(path: &Path) -> Result<Vec<u8>, String> {
    let name = path.display();
    let failed = |error: std::io::Error| format!("{name} cannot be read: {error}");
    // Opening anything else might block.
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(format!("{name} is no file; give one"));
    }
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    file.take(SIZE + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    match bytes.len() as u64 > SIZE {
        true => Err(format!("{name} has more than {} MiB", SIZE >> 20)),
        false => Ok(bytes),
    }
}

fn digest(contents: &[Vec<u8>]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for content in contents {
        hasher.update(&(content.len() as u64).to_le_bytes());
        hasher.update(content);
    }
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(path: &Path) -> Result<Watched<String>, String> {
        Watched::open(
            "words",
            vec![path.to_owned()],
            |contents| match String::from_utf8_lossy(&contents[0]).into_owned() {
                bad if bad.contains("bad") => Err("that is bad".into()),
                good => Ok(good),
            },
        )
    }

    #[test]
    fn a_change_is_noticed_and_a_bad_one_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("words");
        std::fs::write(&path, "one").unwrap();
        let words = text(&path).unwrap();
        let looked = || {
            words.look();
            words.get()
        };
        assert_eq!(*looked(), "one");
        // Of the same length and within the same tick.
        std::fs::write(&path, "two").unwrap();
        assert_eq!(*looked(), "two");
        std::fs::write(&path, "bad").unwrap();
        assert_eq!(*looked(), "two");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(*looked(), "two");
        std::fs::write(&path, "three").unwrap();
        assert_eq!(*looked(), "three");
    }

    #[test]
    fn a_reader_never_waits_for_a_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("words");
        std::fs::write(&path, "one").unwrap();
        let (reading, read) = std::sync::mpsc::channel::<()>();
        let (go_on, waiting) = std::sync::mpsc::channel::<()>();
        let waiting = Mutex::new(waiting);
        let words = Watched::open("words", vec![path.clone()], move |contents| {
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
            let look = scope.spawn(|| words.look());
            read.recv().unwrap();
            // During a check that does not end.
            assert_eq!(*words.get(), b"one");
            go_on.send(()).unwrap();
            look.join().unwrap();
        });
        assert_eq!(*words.get(), b"two");
    }

    #[test]
    fn an_old_file_is_read_again_only_when_it_was_replaced() {
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
        words.look();
        assert!(Arc::ptr_eq(&first, &words.get()));
        put("two");
        words.look();
        assert_eq!(*words.get(), "two");
    }

    #[test]
    fn what_is_no_file_or_too_large_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let told = text(directory.path()).unwrap_err();
        assert!(told.ends_with("is no file; give one"), "{told}");
        let path = directory.path().join("words");
        assert!(text(&path).unwrap_err().contains("cannot be read"));
        std::fs::write(&path, vec![b'a'; SIZE as usize + 1]).unwrap();
        assert!(text(&path).unwrap_err().contains("more than 1 MiB"));
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
