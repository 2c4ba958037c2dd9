//! L1 of hugepages, in a hugetlbfs that outlives the server.

use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};

use crate::huge_mount::HugeMount;
use crate::kills::kill_repeatedly;
use crate::prompts::{CHUNKS, prompt, read, retrieve_pages, store_pages};
use crate::server::{INSTANCE_NAME, KVTIER, Segments, Server};

const HUGETLBFS: &str = "pagesize=2M";

/// Four pages, or 256 prompts.
const L1: &str = "0.0078125";

fn spawn(mount: &HugeMount, base: &Path, l1: &str, more: &[&str]) -> Server {
    let flags = ["--shm-name", "", "--l1-use-hugepages"];
    let command = mount.command(KVTIER);
    Server::spawn_by(command, base, l1, &[&flags, more].concat())
}

fn try_start(mount: &HugeMount, base: &Path, l1: &str, more: &[&str]) -> Result<Server, String> {
    let mut server = spawn(mount, base, l1, more);
    if server.wait_until_served() {
        Ok(server)
    } else {
        Err(std::mem::take(&mut server.log))
    }
}

fn start(mount: &HugeMount, base: &Path, l1: &str) -> Server {
    try_start(mount, base, l1, &[]).unwrap()
}

/// Removes what the last server has left in `/dev/shm`, which is all of it a server that keeps nothing.
fn end(mount: &HugeMount, base: &Path) {
    let server = try_start(mount, base, L1, &["--l1-restore", "off"]).unwrap();
    assert_eq!(server.restored(), None);
    assert!(server.log.contains("--l1-restore off"), "{}", server.log);
    assert!(mount.files().is_empty(), "{:?}", mount.files());
    server.stop();
    assert!(mount.files().is_empty());
}

/// Whether the configuration is found good, and what is said about it.
fn check(mount: &HugeMount, base: &Path, size: &str) -> (bool, String) {
    let output = mount
        .command(KVTIER)
        .args([
            "server",
            "--check-config",
            "--port",
            "0",
            "--http-port",
            "0",
        ])
        .args([
            "--instance-id",
            INSTANCE_NAME.as_str(),
            "--cuda-driver",
            "off",
        ])
        .args([
            "--l1-use-hugepages",
            "--l1-restore",
            "on",
            "--l1-size-gb",
            size,
        ])
        .arg("--state-dir")
        .arg(base)
        .output()
        .unwrap();
    let told = [output.stdout.as_slice(), &output.stderr].concat();
    (output.status.success(), String::from_utf8(told).unwrap())
}

/// The one file in the mount.
fn pool(mount: &HugeMount) -> PathBuf {
    let mut files = mount.files();
    let file = files.pop().unwrap();
    assert!(files.is_empty(), "{files:?}");
    file
}

fn ledger(mount: &HugeMount) -> PathBuf {
    let name = pool(mount).file_name().unwrap().to_owned();
    Path::new("/dev/shm").join(name).with_extension("ledger")
}

// proves: docs/operate.md#l1-after-a-restart
#[test]
fn killed_server_leaves_hugepages_to_the_next() {
    let test = "killed_server_leaves_hugepages_to_the_next";
    let Some(mount) = HugeMount::new(test, 5, HUGETLBFS) else {
        return;
    };
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    kill_repeatedly(10, 17, &|| start(&mount, base.path(), "0.008"));
    end(&mount, base.path());
    assert_eq!(HugeMount::free(), 5);
}

// proves: docs/operate.md#hugepages
#[test]
fn stopped_server_leaves_hugepages_to_other_sizes() {
    let test = "stopped_server_leaves_hugepages_to_other_sizes";
    let Some(mount) = HugeMount::new(test, 8, HUGETLBFS) else {
        return;
    };
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let server = start(&mount, base.path(), L1);
    assert!(server.log.contains("no earlier server has left one"));
    drop(server.worker_with(1, "a", 1..2));
    store_pages(&mut server.pages(3, "pages"), "pages", 2);
    server.stop();
    let check = |size| check(&mount, base.path(), size);
    for size in [L1, "0.015625", "0.00390625", L1] {
        let (is_good, told) = check(size);
        assert!(
            is_good && told.contains("L1 stays for the next server, in /mnt/"),
            "{told}"
        );
        let server = start(&mount, base.path(), size);
        assert_eq!(server.restored(), Some(8), "{}", server.log);
        assert_eq!(read(&mut server.reader("a"), "a", 1), Ok(CHUNKS));
        let mut pages = server.pages(3, "pages");
        assert_eq!(pages.lookup(&prompt(2), "r").unwrap(), CHUNKS);
        retrieve_pages(&mut pages, "pages", 2, "r");
        server.stop();
    }
    // Too few for a larger one: the start ends, and the smaller L1 is still there.
    let larger = "0.017578125";
    let (is_good, told) = check(larger);
    assert!(!is_good && told.contains("5 huge pages"), "{told}");
    assert!(told.contains("L1 of 0.02 GiB (--l1-size-gb)"), "{told}");
    assert!(told.contains("4 are free (set vm.nr_hugepages)"), "{told}");
    let refused = try_start(&mount, base.path(), larger, &[]).err().unwrap();
    for part in ["--l1-size-gb", "is kept", "5 huge pages", "4 are free"] {
        assert!(refused.contains(part), "{refused}");
    }
    let server = start(&mount, base.path(), L1);
    assert_eq!(server.restored(), Some(8), "{}", server.log);
    server.stop();
    end(&mount, base.path());
}

// proves: docs/operate.md#hugepages
#[test]
fn server_without_enough_hugepages_says_how_many() {
    let test = "server_without_enough_hugepages_says_how_many";
    let Some(mount) = HugeMount::new(test, 3, HUGETLBFS) else {
        return;
    };
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    for restore in ["on", "off"] {
        let flags = ["--l1-restore", restore];
        let refused = try_start(&mount, base.path(), L1, &flags).err().unwrap();
        for part in [
            "--l1-size-gb",
            "4 huge pages",
            "3 are free (set vm.nr_hugepages)",
        ] {
            assert!(refused.contains(part), "{refused}");
        }
        assert!(mount.files().is_empty());
    }
}

// proves: docs/operate.md#hugepages
#[test]
fn hugepages_without_a_usable_mount_end_with_the_process() {
    let test = "hugepages_without_a_usable_mount_end_with_the_process";
    for (options, told) in [
        (
            "",
            "is mounted; mount one: mount -t hugetlbfs -o pagesize=2M",
        ),
        ("ro,pagesize=2M", "is mounted (/mnt: Read-only file system"),
        ("pagesize=2M,size=4M", "or the size of the hugetlbfs mount"),
    ] {
        let Some(mount) = HugeMount::new(test, 4, options) else {
            return;
        };
        let base = tempfile::tempdir().unwrap();
        let _segments = Segments::new();
        let mut server = start(&mount, base.path(), L1);
        let lines = server.log.lines();
        let lines: Vec<_> = lines
            .filter(|line| line.contains("ends with this process"))
            .collect();
        assert!(lines.len() == 1 && lines[0].contains(told), "{lines:?}");
        assert!(lines[0].contains(" WARN "), "{lines:?}");
        assert!(mount.files().is_empty() || options.is_empty());
        drop(server.worker_with(1, "a", 1..2));
        assert_eq!(read(&mut server.reader("a"), "a", 1), Ok(CHUNKS));
        server.kill();
        if !options.contains("size=4M") {
            let (is_good, found) = check(&mount, base.path(), L1);
            let warning = "warning: L1 ends with the process: no hugetlbfs";
            assert!(is_good && found.contains(warning), "{found}");
        }
        let server = start(&mount, base.path(), L1);
        assert_eq!(server.restored(), None);
        server.stop();
    }
}

/// Damage to what a server has left.
#[derive(Clone, Copy, Debug)]
enum Damage {
    /// The file ends after its first page.
    Short,
    Empty,
    /// Another file of the same size.
    Replaced,
    None,
    Open,
    Foreign,
    /// The file has another name. (There are no symbolic links in a hugetlbfs.)
    Linked,
    NoLedger,
}

impl Damage {
    fn inflict(self, mount: &HugeMount) {
        let (pool, ledger) = (pool(mount), ledger(mount));
        let file = std::fs::File::options().write(true).open(&pool).unwrap();
        let aside = pool.with_extension("aside");
        let permit = |mode| {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(&pool, mode).unwrap();
        };
        match self {
            Self::None => {}
            Self::Short => file.set_len(2 << 20).unwrap(),
            Self::Empty => file.set_len(0).unwrap(),
            Self::Replaced => {
                let len = file.metadata().unwrap().len();
                std::fs::remove_file(&pool).unwrap();
                let new = std::fs::File::create(&pool).unwrap();
                new.set_len(len).unwrap();
                permit(0o600);
            }
            Self::Open => permit(0o660),
            Self::Foreign => chown(&pool, Some(65_534), None).unwrap(),
            Self::Linked => std::fs::hard_link(&pool, &aside).unwrap(),
            Self::NoLedger => std::fs::remove_file(ledger).unwrap(),
        }
    }
}

// proves: docs/operate.md#l1-after-a-restart
#[test]
fn damaged_hugepage_files_are_not_believed() {
    let test = "damaged_hugepage_files_are_not_believed";
    // Twice: one with another name stays.
    let Some(mount) = HugeMount::new(test, 8, HUGETLBFS) else {
        return;
    };
    const PROMPTS: u64 = 100;
    for (damage, told) in [
        (Damage::None, None),
        (Damage::Short, None),
        (Damage::Empty, None),
        (Damage::Replaced, Some("another arena")),
        (Damage::Open, Some("no earlier server has left")),
        (Damage::Foreign, Some("no earlier server has left")),
        (Damage::Linked, Some("no earlier server has left")),
        (Damage::NoLedger, Some("has no ledger")),
    ] {
        let base = tempfile::tempdir().unwrap();
        let _segments = Segments::new();
        let server = start(&mount, base.path(), L1);
        drop(server.worker_with(1, "a", 0..PROMPTS));
        server.stop();
        damage.inflict(&mount);
        let mut server = start(&mount, base.path(), L1);
        let (restored, log) = (server.restored(), std::mem::take(&mut server.log));
        server.kill();
        let all = PROMPTS * CHUNKS;
        match (damage, told) {
            (Damage::None, _) => assert_eq!(restored, Some(all), "{log}"),
            (Damage::Short, _) => assert!((1..all).contains(&restored.unwrap()), "{log}"),
            (_, None) => assert_eq!(restored, Some(0), "{damage:?}: {log}"),
            (_, Some(told)) => {
                assert_eq!(restored, None, "{damage:?}: {log}");
                assert!(log.contains(told), "{damage:?}: {log}");
            }
        }
        // The next one has no more than that, and it is right.
        let server = start(&mount, base.path(), L1);
        assert_eq!(server.restored().unwrap_or(0), restored.unwrap_or(0));
        let mut worker = server.reader("a");
        let hits = (0..PROMPTS).map(|number| read(&mut worker, "a", number).unwrap());
        assert_eq!(hits.sum::<u64>(), restored.unwrap_or(0), "{damage:?}");
        drop(server.worker_with(1, "b", 0..PROMPTS));
        let mut worker = server.reader("b");
        for number in 0..PROMPTS {
            assert_eq!(read(&mut worker, "b", number), Ok(CHUNKS), "{damage:?}");
        }
        server.stop();
        if matches!(damage, Damage::Linked) {
            let aside = mount
                .files()
                .into_iter()
                .filter(|file| file.extension().is_some());
            aside.for_each(|file| std::fs::remove_file(file).unwrap());
        }
        end(&mount, base.path());
        assert_eq!(HugeMount::free(), 8, "{damage:?}");
    }
}
