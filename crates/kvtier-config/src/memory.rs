//! How much memory the server may use: the machine's, or what its cgroup leaves it.

use std::path::{Component, Path, PathBuf};

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

impl std::fmt::Display for HostMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.limit {
            None => f.write_str("the machine's memory"),
            Some(file) => write!(f, "the memory limit in {}", file.display()),
        }
    }
}

/// Where the size of L1 comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum L1Origin {
    /// It was asked for.
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
