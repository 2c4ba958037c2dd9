//! Hugepages for one test at a time, and a hugetlbfs in a mount namespace of its own: both end with the test.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

const PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// Where the file system is in its namespace, which has no other one of its kind.
const FOLDER: &str = "/mnt";

/// Of the namespace: ends when the test does, which has the other end of its input.
const HOLD: &str = "for old in $(awk '$3 == \"hugetlbfs\" { print $2 }' /proc/self/mounts); do umount \"$old\"; done; \
    [ -n \"$1\" ] && mount -t hugetlbfs -o \"$1\" none \"$2\"; echo ready; exec cat";

pub(crate) struct HugeMount {
    holder: Child,
    /// Dropped behind the file system.
    _pages: Pages,
}

/// More hugepages than before, until this is dropped.
struct Pages {
    before: u64,
    /// Others wait for it.
    _turn: File,
}

fn count(name: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("{PAGES}/{name}")).ok()?;
    text.trim().parse().ok()
}

impl Pages {
    fn reserve(pages: u64) -> Result<Self, String> {
        let lock = std::env::temp_dir().join("kvtier-hugepages.lock");
        let turn = File::create(lock).map_err(|error| error.to_string())?;
        turn.lock().map_err(|error| error.to_string())?;
        let before = count("nr_hugepages").ok_or("the kernel has no pages of 2 MiB")?;
        let own = Self {
            before,
            _turn: turn,
        };
        own.set(pages)
            .map_err(|error| format!("pages cannot be reserved: {error}"))?;
        match HugeMount::free() {
            free if free == pages => Ok(own),
            free => Err(format!("{pages} pages were asked for and {free} are free")),
        }
    }

    /// Reserves so many more than there were.
    fn set(&self, pages: u64) -> std::io::Result<()> {
        fs::write(
            format!("{PAGES}/nr_hugepages"),
            (self.before + pages).to_string(),
        )
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let _ = self.set(0);
    }
}

impl HugeMount {
    /// So many free pages and a file system with these options, or none for "". `None` where the system does not allow it; then
    /// the test is named as skipped.
    pub(crate) fn new(test: &str, pages: u64, options: &str) -> Option<Self> {
        let made = Pages::reserve(pages).and_then(|pages| Self::mount(pages, options));
        made.inspect_err(|reason| eprintln!("SKIP {test}: {reason}"))
            .ok()
    }

    fn mount(pages: Pages, options: &str) -> Result<Self, String> {
        let holder = Command::new("unshare")
            .args(["--mount", "sh", "-ec", HOLD, "sh", options, FOLDER])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let holder = holder.map_err(|error| format!("unshare: {error}"))?;
        let mut mount = Self {
            holder,
            _pages: pages,
        };
        let mut line = String::new();
        let told = mount.holder.stdout.take().map(BufReader::new);
        let _ = told.map(|mut told| told.read_line(&mut line));
        match line.trim() {
            "ready" => Ok(mount),
            _ => Err("no mount namespace, or no hugetlbfs in it".to_owned()),
        }
    }

    /// Runs a program where the file system is.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        let namespace = format!("--mount=/proc/{}/ns/mnt", self.holder.id());
        command.args([&namespace, "--", program]);
        command
    }

    /// The file system, from here.
    pub(crate) fn folder(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{FOLDER}", self.holder.id()))
    }

    /// What is in it.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        let all = fs::read_dir(self.folder()).unwrap();
        all.map(|entry| entry.unwrap().path()).collect()
    }

    /// Pages that are free and reserved by nobody.
    pub(crate) fn free() -> u64 {
        let reserved = count("resv_hugepages").unwrap_or(0);
        count("free_hugepages").unwrap_or(0) - reserved
    }
}

impl Drop for HugeMount {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}
