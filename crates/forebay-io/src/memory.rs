//! How much memory there is, and how much this process may use.
//!
//! Linux: `/proc` and the control groups of the process, version 2 and 1, walking
//! up to the root (memory spec section 5). On other systems every field is
//! `None`, which means unknown; it never means zero.

use std::fs::File;
use std::io::Read;
use std::path::{Component, Path, PathBuf};

/// Memory facts in bytes. `None` is "could not be read".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Physical memory of the machine.
    pub total: Option<u64>,
    /// What can be taken without swapping: the machine's figure, or what is left
    /// in the tightest control group if that is less. Clean file pages of a group
    /// count as available, as they do for the machine.
    pub available: Option<u64>,
    /// The lowest memory limit of the process's control groups; `None` also when
    /// there is no limit.
    pub limit: Option<u64>,
    /// Resident set of this process now.
    pub process_rss: Option<u64>,
    /// Largest resident set this process ever had. It never falls: not a figure
    /// to steer by.
    pub process_peak_rss: Option<u64>,
}

impl MemoryInfo {
    /// Reads the facts of this machine.
    pub fn read() -> Self {
        Self::read_from(Path::new("/"))
    }

    /// Reads the facts from the `proc` and `sys` directories under `root`.
    pub fn read_from(root: &Path) -> Self {
        let meminfo = text(&root.join("proc/meminfo")).unwrap_or_default();
        let status = text(&root.join("proc/self/status")).unwrap_or_default();
        let group =
            text(&root.join("proc/self/cgroup")).map(|list| group_limits(root, &list)).unwrap_or_default();
        let available = kilobytes(&meminfo, "MemAvailable:");
        Self {
            total: kilobytes(&meminfo, "MemTotal:"),
            available: smaller(available, group.left),
            limit: group.limit,
            process_rss: kilobytes(&status, "VmRSS:"),
            process_peak_rss: kilobytes(&status, "VmHWM:"),
        }
    }

    /// Physical memory or the group's limit, whichever is smaller: what a memory
    /// budget is measured against.
    pub fn ceiling(&self) -> Option<u64> {
        smaller(self.total, self.limit)
    }
}

/// The tightest figures on the way from a process's group to the root.
#[derive(Clone, Copy, Default)]
struct GroupLimits {
    limit: Option<u64>,
    left: Option<u64>,
}

/// Where one version of control groups keeps its figures.
struct GroupFiles {
    mount: &'static str,
    limit: &'static str,
    usage: &'static str,
    /// Line of `memory.stat` with file pages that can be dropped at once.
    droppable: &'static str,
}

const V2: GroupFiles = GroupFiles {
    mount: "sys/fs/cgroup",
    limit: "memory.max",
    usage: "memory.current",
    droppable: "inactive_file",
};

const V1: GroupFiles = GroupFiles {
    mount: "sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    droppable: "total_inactive_file",
};

/// `list` is `/proc/self/cgroup`: lines of `id:controllers:path`, where version 2
/// has an empty controller list. Both versions may be mounted at once.
fn group_limits(root: &Path, list: &str) -> GroupLimits {
    let mut tightest = GroupLimits::default();
    for line in list.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let files = match controllers {
            "" => V2,
            _ if controllers.split(',').any(|name| name == "memory") => V1,
            _ => continue,
        };
        let mount = root.join(files.mount);
        for dir in walk_up(&mount, path) {
            let found = read_group(&dir, &files);
            tightest.limit = smaller(tightest.limit, found.limit);
            tightest.left = smaller(tightest.left, found.left);
        }
    }
    tightest
}

/// The group's directory and its ancestors up to the mount. In a container the
/// path may be the host's, of which only the mount itself can be seen; what is
/// not there reads as no limit.
fn walk_up(mount: &Path, path: &str) -> Vec<PathBuf> {
    let mut dirs = vec![mount.to_owned()];
    for part in Path::new(path).components() {
        match part {
            Component::Normal(name) => dirs.push(dirs[dirs.len() - 1].join(name)),
            // The process's group lies outside of what this namespace shows.
            Component::ParentDir => return vec![mount.to_owned()],
            _ => {}
        }
    }
    dirs
}

fn read_group(dir: &Path, files: &GroupFiles) -> GroupLimits {
    // Version 1 writes "no limit" as the largest page multiple of a signed word.
    let limit = number(&dir.join(files.limit)).filter(|&bytes| bytes < 1 << 62);
    let used = number(&dir.join(files.usage)).map(|used| {
        let stat = text(&dir.join("memory.stat")).unwrap_or_default();
        used.saturating_sub(field(&stat, files.droppable).unwrap_or(0))
    });
    let left = limit.zip(used).map(|(limit, used)| limit.saturating_sub(used));
    GroupLimits { limit, left }
}

/// The smaller of the known ones.
fn smaller(a: Option<u64>, b: Option<u64>) -> Option<u64> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (one, other) => one.or(other),
    }
}

/// A file that holds one number; `None` for anything else ("max" included).
fn number(path: &Path) -> Option<u64> {
    text(path)?.trim().parse().ok()
}

/// The number after `name` on the line that starts with it.
fn field(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().map(str::split_ascii_whitespace);
    lines.find_map(|mut words| (words.next() == Some(name)).then(|| words.next()?.parse().ok())?)
}

/// A field that the kernel reports in units of 1024 bytes.
fn kilobytes(text: &str, name: &str) -> Option<u64> {
    field(text, name)?.checked_mul(1024)
}

/// A small text file; bounded, because the size of these files is not known beforehand.
fn text(path: &Path) -> Option<String> {
    let mut text = String::new();
    File::open(path).ok()?.take(1 << 20).read_to_string(&mut text).ok()?;
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:       32000 kB\nMemFree:  100 kB\nMemAvailable:   20000 kB\n";

    /// A root directory with these files.
    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    fn read(files: &[(&str, &str)]) -> MemoryInfo {
        MemoryInfo::read_from(machine(files).path())
    }

    #[test]
    fn nothing_there_is_unknown_and_not_zero() {
        assert_eq!(read(&[]), MemoryInfo::default());
        assert_eq!(read(&[("proc/meminfo", "MemTotal: many kB\n")]).total, None);
        assert_eq!(read(&[]).ceiling(), None);
    }

    #[test]
    fn a_machine_without_groups() {
        let info = read(&[
            ("proc/meminfo", MEMINFO),
            ("proc/self/status", "Name:\tx\nVmHWM:\t  30 kB\nVmRSS:\t  20 kB\n"),
        ]);
        assert_eq!(
            info,
            MemoryInfo {
                total: Some(32_000 * 1024),
                available: Some(20_000 * 1024),
                limit: None,
                process_rss: Some(20 * 1024),
                process_peak_rss: Some(30 * 1024),
            }
        );
        assert_eq!(info.ceiling(), info.total);
    }

    #[test]
    fn version_2_takes_the_tightest_ancestor() {
        let info = read(&[
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/memory.max", "9000000\n"),
            ("sys/fs/cgroup/a/memory.current", "8000000\n"),
            ("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 500000\nfile 2\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/b/memory.current", "10\n"),
        ]);
        assert_eq!(info.limit, Some(9_000_000));
        assert_eq!(info.available, Some(1_500_000));
        assert_eq!(info.ceiling(), Some(9_000_000));
    }

    #[test]
    fn a_group_looser_than_the_machine_changes_nothing_but_the_limit() {
        let info = read(&[
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "99000000000\n"),
            ("sys/fs/cgroup/memory.current", "5\n"),
        ]);
        assert_eq!(info.available, Some(20_000 * 1024));
        assert_eq!(info.limit, Some(99_000_000_000));
        assert_eq!(info.ceiling(), Some(32_000 * 1024));
    }

    #[test]
    fn version_1_and_its_way_to_say_no_limit() {
        let info = read(&[
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/box\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "9000\n"),
            ("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "4000000\n"),
            ("sys/fs/cgroup/memory/box/memory.usage_in_bytes", "1000000\n"),
            ("sys/fs/cgroup/memory/box/memory.stat", "inactive_file 1\ntotal_inactive_file 200000\n"),
        ]);
        assert_eq!(info.limit, Some(4_000_000));
        assert_eq!(info.available, Some(3_200_000));
    }

    #[test]
    fn the_host_path_of_a_container_falls_back_to_the_mount() {
        for list in ["0::/docker/0123\n", "0::/../../x\n"] {
            let info = read(&[
                ("proc/self/cgroup", list),
                ("sys/fs/cgroup/memory.max", "7000\n"),
                ("sys/fs/memory.max", "1\n"),
                ("sys/memory.max", "1\n"),
            ]);
            assert_eq!(info.limit, Some(7000), "{list}");
            assert_eq!(info.available, None, "usage is unknown, so what is left is too");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_machine_makes_sense() {
        let info = MemoryInfo::read();
        assert!(info.available.unwrap() <= info.total.unwrap());
        assert!(info.process_rss.unwrap() <= info.process_peak_rss.unwrap());
        assert!(info.process_rss.unwrap() > 0);
    }
}
