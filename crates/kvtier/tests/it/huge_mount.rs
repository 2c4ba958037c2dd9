//! Hugepages for one test at a time, and a hugetlbfs in a mount namespace of its own: both end with the test, however that ends.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

const PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// Mount point of the file system in its namespace, which has no other one of its kind.
const FOLDER: &str = "/mnt";

/// Script of a shell in the namespace: prints "ready" or why not, and frees all when its input ends. Arguments: the number of
/// pages, the options of the mount (none for ""), the folders above, and a file to lock.
const HOLD: &str = r#"
    trap "" PIPE
    exec 9>"$5"
    flock 9
    pool="$3/nr_hugepages"
    before=$(cat "$pool" 2>/dev/null) || { echo "the kernel has no pages of 2 MiB"; exit; }
    echo $((before + $1)) 2>/dev/null >"$pool" || { echo "no right to reserve pages"; exit; }
    free=$(($(cat "$3/free_hugepages") - $(cat "$3/resv_hugepages")))
    for old in $(awk '$3 == "hugetlbfs" { print $2 }' /proc/self/mounts); do umount "$old"; done
    if [ $free != $1 ]; then echo "$1 pages were asked for and $free are free"
    elif [ -n "$2" ] && ! mount -t hugetlbfs -o "$2" none "$4"; then echo "no hugetlbfs can be mounted"
    else echo ready; cat
    fi
    [ -z "$2" ] || umount -l "$4"
    echo $before >"$pool"
"#;

pub(crate) struct HugeMount(Child);

fn count(name: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("{PAGES}/{name}")).ok()?;
    text.trim().parse().ok()
}

impl HugeMount {
    /// `pages` free pages and a file system with these options, or none for "". `None` where the system does not allow it; then
    /// the test is named as skipped.
    pub(crate) fn new(test: &str, pages: u64, options: &str) -> Option<Self> {
        let lock = std::env::temp_dir().join("kvtier-hugepages.lock");
        let mut holder = Command::new("unshare")
            .args(["--mount", "sh", "-c", HOLD, "sh"])
            .args([&pages.to_string(), options, PAGES, FOLDER])
            .arg(lock)
            // Not killed with the test.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut told = BufReader::new(holder.stdout.take().unwrap());
        let mount = Self(holder);
        let mut line = String::new();
        told.read_line(&mut line).unwrap();
        match line.trim() {
            "ready" => return Some(mount),
            "" => eprintln!("SKIP {test}: no mount namespace"),
            reason => eprintln!("SKIP {test}: {reason}"),
        }
        None
    }

    /// Runs a program where the file system is.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        let namespace = format!("--mount=/proc/{}/ns/mnt", self.0.id());
        command.args([&namespace, "--", program]);
        command
    }

    /// The file system, from here.
    pub(crate) fn folder(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{FOLDER}", self.0.id()))
    }

    /// What is in it.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        let all = fs::read_dir(self.folder()).unwrap();
        all.map(|entry| entry.unwrap().path()).collect()
    }

    /// Pages that are free, and reserved for no mapping.
    pub(crate) fn free() -> u64 {
        let reserved = count("resv_hugepages").unwrap_or(0);
        count("free_hugepages").unwrap_or(0) - reserved
    }
}

impl Drop for HugeMount {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}
