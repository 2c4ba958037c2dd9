//! How much memory the server may use: the machine's, or what its cgroup leaves it.

use std::path::{Component, Path, PathBuf};

use kvtier_common::error::{Error, Result};

use super::in_gib;

/// Memory of this process, and what limits it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostMemory {
    /// Bytes.
    pub bytes: u64,
    /// The file of the cgroup limit, where that is less than the machine has.
    pub limit: Option<PathBuf>,
}

impl HostMemory {
    /// What this process has.
    pub fn of_this_process() -> Self {
        let info = rustix::system::sysinfo();
        let machine = (info.totalram as u64).saturating_mul(u64::from(info.mem_unit));
        Self::new(machine, Path::new("/"))
    }

    /// The memory of a process on a machine with `machine` bytes whose file system is under `root`.
    fn new(machine: u64, root: &Path) -> Self {
        match smallest_limit(root) {
            Some((bytes, file)) if bytes < machine => Self {
                bytes,
                limit: Some(file),
            },
            _ => Self {
                bytes: machine,
                limit: None,
            },
        }
    }
}

/// Bytes of a cgroup's limit that the server needs beside L1, unless that is more than a quarter of the limit.
const BESIDE_L1: u64 = 64 << 20;

impl HostMemory {
    /// Refuses memory of this size for L1 if the system would kill the server as it fills: it is more than the cgroup's limit
    /// leaves. `kept` bytes are there already, and count only as far as they are charged to that cgroup: pages of `/dev/shm`
    /// are charged to the cgroup of the process that touched them first.
    ///
    /// # Errors
    /// Both numbers, and what is allowed.
    pub fn check_l1(&self, l1_bytes: u64, kept: u64) -> Result<()> {
        let Some(limit) = &self.limit else {
            return Ok(());
        };
        let elsewhere = kept.saturating_sub(shared_memory_of(limit));
        let allowed = self.bytes - BESIDE_L1.min(self.bytes / 4) + elsewhere;
        if l1_bytes <= allowed {
            Ok(())
        } else {
            Err(Error::refused(format!(
                "--l1-size-gb: L1 of {:.2} GiB does not fit in {self}, {:.2} GiB, and the system would kill the server as it \
                 fills; allowed: at most {:.2} GiB",
                in_gib(l1_bytes),
                in_gib(self.bytes),
                in_gib(allowed)
            )))
        }
    }
}

/// Bytes of shared memory that are charged to the cgroup with this limit, or to one below it.
fn shared_memory_of(limit: &Path) -> u64 {
    let stat = std::fs::read_to_string(limit.with_file_name("memory.stat"));
    let stat = stat.unwrap_or_default();
    // The sum over the hierarchy has a name of its own in version 1.
    let value = |name: &str| {
        let mut lines = stat.lines();
        lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
    };
    value("total_shmem").or_else(|| value("shmem")).unwrap_or(0)
}

impl std::fmt::Display for HostMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.limit {
            None => f.write_str("the machine's memory"),
            Some(file) => write!(f, "the memory limit in {}", file.display()),
        }
    }
}

/// Origin of L1's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum L1Origin {
    /// The size was asked for.
    Given,
    /// A quarter of [`HostMemory`].
    Memory,
    /// 45 % of /dev/shm, which is less.
    Shm,
}

/// Bytes of L1 if no size is configured, and where they come from.
///
/// A pool is no larger than 45 % of `shm`, the bytes of its file system: after a restart it stands beside the one before,
/// whose pages stay until the last worker has registered again. Where not even one quarter of the memory fits, there is
/// no pool, and nothing to limit.
pub(super) fn default_l1(memory: &HostMemory, shm: Option<u64>) -> (u64, L1Origin) {
    let quarter = memory.bytes / 4;
    match shm {
        Some(size) if size >= quarter && size / 100 * 45 < quarter => {
            (size / 100 * 45, L1Origin::Shm)
        }
        _ => (quarter, L1Origin::Memory),
    }
}

/// The smallest limit on the way from the process' own cgroups up to the roots of their hierarchies (cgroups(7)).
///
/// In a container the paths in `/proc/self/cgroup` may be the host's, and only their upper end is visible, or nothing
/// of them: a missing file limits nothing, and the root is always read.
fn smallest_limit(root: &Path) -> Option<(u64, PathBuf)> {
    let own = std::fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let mut smallest: Option<(u64, PathBuf)> = None;
    for line in own.lines() {
        let Some((mount, file, path)) = hierarchy(line) else {
            continue;
        };
        for group in path.ancestors() {
            let file = Path::new(mount).join(group).join(file);
            let limit = std::fs::read_to_string(root.join(&file)).ok();
            if let Some(bytes) = limit.as_deref().and_then(limit_in)
                && smallest.as_ref().is_none_or(|(least, _)| bytes < *least)
            {
                smallest = Some((bytes, Path::new("/").join(file)));
            }
        }
    }
    smallest
}

/// Mount point, name of the limit's file and path of one line `<number>:<controllers>:<path>`; the paths are relative.
/// None for hierarchies that do not limit memory.
fn hierarchy(line: &str) -> Option<(&'static str, &'static str, PathBuf)> {
    let mut parts = line.splitn(3, ':');
    let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    let (mount, file) = if number == "0" && controllers.is_empty() {
        ("sys/fs/cgroup", "memory.max")
    } else if controllers.split(',').any(|name| name == "memory") {
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
    } else {
        return None;
    };
    let names = Path::new(path).components().filter_map(|part| match part {
        Component::Normal(name) => Some(Ok(name)),
        // Above the root of our cgroup namespace, hence out of sight.
        Component::ParentDir => Some(Err(())),
        _ => None,
    });
    Some((
        mount,
        file,
        names.collect::<Result<_, ()>>().unwrap_or_default(),
    ))
}

/// Bytes; None for "max" (v2). The number that means "none" in v1 is larger than any machine.
fn limit_in(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: u64 = 64 << 30;

    /// A machine with these files and contents.
    fn memory(files: &[(&str, &str)]) -> (u64, Option<String>) {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let memory = HostMemory::new(MACHINE, root.path());
        let limit = memory.limit.map(|file| file.display().to_string());
        (memory.bytes, limit)
    }

    fn limited(bytes: u64, file: &str) -> (u64, Option<String>) {
        (bytes, Some(file.to_owned()))
    }

    #[test]
    fn without_cgroups_the_machine_decides() {
        assert_eq!(memory(&[]), (MACHINE, None));
        assert_eq!(memory(&[("proc/self/cgroup", "0::/a\n")]), (MACHINE, None));
        for text in ["", "x", "0", "0::", ":::::", "1:memory:", "0::/\n1:cpu:/a"] {
            assert_eq!(memory(&[("proc/self/cgroup", text)]), (MACHINE, None));
        }
    }

    #[test]
    fn l1_above_a_cgroup_limit_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let limit = root.path().join("memory.max");
        let memory = |limit| HostMemory {
            bytes: 16 << 30,
            limit,
        };
        let check = |l1: u64, kept: u64| memory(Some(limit.clone())).check_l1(l1 << 20, kept << 20);
        let most = (16 << 10) - 64;
        assert!(check(most, 0).is_ok());
        let error = check(most + 2, 0).unwrap_err().to_string();
        for part in [
            "L1 of 15.94 GiB",
            "memory.max, 16.00 GiB",
            "at most 15.94 GiB",
        ] {
            assert!(error.contains(part), "{error}");
        }
        // Pages of an earlier server are another cgroup's, as far as they are not this one's.
        assert!(check(20 << 10, 5 << 10).is_ok());
        for (stat, is_enough) in [
            ("anon 1\nshmem 1073741824\nshmem_thp 1\n", true),
            ("anon 1\nshmem 2147483648\n", false),
            ("shmem 1\ntotal_shmem 5368709120\n", false),
        ] {
            std::fs::write(root.path().join("memory.stat"), stat).unwrap();
            assert_eq!(check(20 << 10, 6 << 10).is_ok(), is_enough, "{stat}");
        }
        // A small container has its quarter by default.
        let small = HostMemory {
            bytes: 64 << 20,
            limit: Some(limit.clone()),
        };
        assert!(small.check_l1(48 << 20, 0).is_ok() && small.check_l1(50 << 20, 0).is_err());
        assert!(memory(None).check_l1(1 << 40, 0).is_ok());
    }

    #[test]
    fn default_pool_leaves_space_for_the_previous_one() {
        let memory = HostMemory {
            bytes: 4000,
            limit: None,
        };
        for (shm, l1) in [
            (None, (1000, L1Origin::Memory)),
            (Some(4000), (1000, L1Origin::Memory)),
            // The default of a machine: half of its memory.
            (Some(2000), (900, L1Origin::Shm)),
            (Some(1000), (450, L1Origin::Shm)),
            // A container's, in which no pool fits.
            (Some(999), (1000, L1Origin::Memory)),
            (Some(0), (1000, L1Origin::Memory)),
        ] {
            assert_eq!(default_l1(&memory, shm), l1, "{shm:?}");
        }
    }

    #[test]
    fn version_2_gives_the_smallest_limit_up_to_the_root() {
        let own = ("proc/self/cgroup", "0::/a.slice/b.service\n");
        let upper = ("sys/fs/cgroup/a.slice/memory.max", "4096000\n");
        let lower = "sys/fs/cgroup/a.slice/b.service/memory.max";
        let of_upper = limited(4_096_000, "/sys/fs/cgroup/a.slice/memory.max");
        assert_eq!(memory(&[own, upper, (lower, "max\n")]), of_upper);
        assert_eq!(memory(&[own, upper, (lower, "8192000\n")]), of_upper);
        assert_eq!(memory(&[own, upper]), of_upper);
        let of_lower = limited(2_048_000, &format!("/{lower}"));
        assert_eq!(memory(&[own, upper, (lower, "2048000\n")]), of_lower);
        let more = (MACHINE + 1).to_string();
        assert_eq!(memory(&[own, (lower, &more)]), (MACHINE, None));
        // Another's limit is none of ours.
        let other = ("sys/fs/cgroup/c.slice/memory.max", "1\n");
        assert_eq!(memory(&[own, other]), (MACHINE, None));
    }

    // proves: docs/compare.md#flags-of-lmcache
    #[test]
    fn a_container_has_its_limit_at_the_root() {
        let root = ("sys/fs/cgroup/memory.max", "1048576\n");
        for own in [
            "0::/\n",
            "0::/../../elsewhere\n",
            "0::/docker/of/the/host\n",
        ] {
            let own = ("proc/self/cgroup", own);
            let found = memory(&[own, root]);
            assert_eq!(found, limited(1_048_576, "/sys/fs/cgroup/memory.max"));
        }
        // `..` leads to the cgroup of another process.
        let own = ("proc/self/cgroup", "0::/../x\n");
        let outside = ("sys/fs/x/memory.max", "1\n");
        assert_eq!(memory(&[own, outside]), (MACHINE, None));
    }

    #[test]
    fn version_1_has_a_hierarchy_of_its_own_for_memory() {
        let own = "12:pids:/a\n5:hugetlb,memory:/docker/1\n1:name=systemd:/a\n0::/a\n";
        let own = ("proc/self/cgroup", own);
        let none = (
            "sys/fs/cgroup/memory/docker/memory.limit_in_bytes",
            "9223372036854771712\n",
        );
        let limit = "sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes";
        assert_eq!(memory(&[own, none]), (MACHINE, None));
        let found = memory(&[own, none, (limit, "1073741824\n")]);
        assert_eq!(found, limited(1 << 30, &format!("/{limit}")));
    }
}
