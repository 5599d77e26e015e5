//! How much memory there is, and how much this process may use.
//!
//! Linux: `/proc` and the control groups of the process, version 2 and 1, walking
//! up to the root (docs/planning.md). macOS: the virtual-memory statistics and
//! the memory-pressure level. Windows: physical memory and the commit limit. What a
//! system does not say is `None`, which means unknown; it never means zero.
//!
//! The macOS and Windows readers are compiled there only and have not been run by
//! their author; every figure they cannot get is `None`.

#[cfg(target_os = "macos")]
mod macos;
#[cfg(windows)]
mod windows;

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
    /// Swap space there is, the control groups' limit included.
    pub swap_total: Option<u64>,
    /// Swap space that is not in use.
    pub swap_free: Option<u64>,
    /// Pages that the machine has moved to swap and back since it started. It never
    /// falls; that it grows is the sign that memory is short.
    pub swapped_pages: Option<u64>,
    /// What the system itself says about pressure on memory.
    pub pressure: Option<Pressure>,
    /// Resident set of this process now (macOS: its physical footprint, which counts
    /// compressed pages).
    pub process_rss: Option<u64>,
    /// Memory of this process that is in swap now.
    pub process_swap: Option<u64>,
    /// Largest resident set this process ever had. It never falls: not a figure
    /// to steer by.
    pub process_peak_rss: Option<u64>,
}

/// A system's own word for how short memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pressure {
    /// Nothing to do.
    Normal,
    /// Caches should become smaller.
    Warning,
    /// Programs will be stopped soon.
    Critical,
}

impl MemoryInfo {
    /// Reads the facts of this machine.
    pub fn read() -> Self {
        #[cfg(target_os = "macos")]
        return macos::read();
        #[cfg(windows)]
        return windows::read();
        #[cfg(not(any(target_os = "macos", windows)))]
        Self::read_from(Path::new("/"))
    }

    /// A machine with `total` bytes on which nothing else runs, to plan for elsewhere.
    pub fn assumed(total: u64) -> Self {
        Self { total: Some(total), available: Some(total), ..Self::default() }
    }

    /// What this process takes now: resident or in swap. Unlike the peak it falls
    /// again, so it can be steered by.
    pub fn footprint(&self) -> Option<u64> {
        Some(self.process_rss?.saturating_add(self.process_swap.unwrap_or(0)))
    }

    /// Reads the facts from the `proc` and `sys` directories under `root`.
    pub fn read_from(root: &Path) -> Self {
        let meminfo = text(&root.join("proc/meminfo")).unwrap_or_default();
        let status = text(&root.join("proc/self/status")).unwrap_or_default();
        let group =
            text(&root.join("proc/self/cgroup")).map(|list| group_limits(root, &list)).unwrap_or_default();
        let available = kilobytes(&meminfo, "MemAvailable:");
        let vmstat = text(&root.join("proc/vmstat")).unwrap_or_default();
        let moved = |name| field(&vmstat, name);
        Self {
            total: kilobytes(&meminfo, "MemTotal:"),
            available: smaller(available, group.left),
            limit: group.limit,
            swap_total: smaller(kilobytes(&meminfo, "SwapTotal:"), group.swap_limit),
            swap_free: smaller(kilobytes(&meminfo, "SwapFree:"), group.swap_left),
            swapped_pages: moved("pswpin").zip(moved("pswpout")).map(|(i, o)| i.saturating_add(o)),
            pressure: None,
            process_rss: kilobytes(&status, "VmRSS:"),
            process_swap: kilobytes(&status, "VmSwap:"),
            process_peak_rss: kilobytes(&status, "VmHWM:"),
        }
    }

    /// Physical memory or the group's limit, whichever is smaller: what a memory
    /// budget is measured against.
    pub fn ceiling(&self) -> Option<u64> {
        smaller(self.total, self.limit)
    }
}

/// Blocks of this size are mappings of their own, which end with them.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const OWN_MAPPING: libc::c_int = 4 << 20;
/// What is free at the end of a heap, of which there may be one for each thread, at most.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const KEPT_FREE: libc::c_int = 1 << 20;

/// Lets the allocator keep little of what is freed, where it would keep more and more: for programs that load large
/// things again and again. To be called at the start. Does nothing where the system's allocator has no such call.
pub fn keep_little_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it takes no pointers, may be called at any time from any thread, and changes how what comes is allocated.
    unsafe {
        // By themselves both grow with every large block that is freed, to 32 and 64 MiB for each heap.
        libc::mallopt(libc::M_MMAP_THRESHOLD, OWN_MAPPING);
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT_FREE);
    }
}

/// Gives memory that was freed back to the system, which allocators keep for later. To be called when much was freed that
/// is not soon wanted again: it takes milliseconds. Does nothing where the system's allocator has no such call.
pub fn give_back_freed() {
    // What is free in the middle of what is in use stays otherwise.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it takes no pointers, may be called at any time from any thread, and only touches what is free.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Whether this system runs inside the Windows Subsystem for Linux, whose memory is what
/// Windows gives its virtual machine and not what the computer has.
pub fn is_wsl() -> bool {
    is_wsl_at(Path::new("/"))
}

fn is_wsl_at(root: &Path) -> bool {
    let release = text(&root.join("proc/sys/kernel/osrelease")).unwrap_or_default();
    release.to_ascii_lowercase().contains("microsoft")
}

/// The tightest figures on the way from a process's group to the root.
#[derive(Clone, Copy, Default)]
struct GroupLimits {
    limit: Option<u64>,
    left: Option<u64>,
    swap_limit: Option<u64>,
    swap_left: Option<u64>,
}

/// Where one version of control groups keeps its figures.
struct GroupFiles {
    mount: &'static str,
    limit: &'static str,
    usage: &'static str,
    /// Line of `memory.stat` with file pages that can be dropped at once.
    droppable: &'static str,
    /// Limit and use of swap alone; version 1 counts memory and swap together.
    swap: Option<[&'static str; 2]>,
}

const V2: GroupFiles = GroupFiles {
    mount: "sys/fs/cgroup",
    limit: "memory.max",
    usage: "memory.current",
    droppable: "inactive_file",
    swap: Some(["memory.swap.max", "memory.swap.current"]),
};

const V1: GroupFiles = GroupFiles {
    mount: "sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    droppable: "total_inactive_file",
    swap: None,
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
            tightest.swap_limit = smaller(tightest.swap_limit, found.swap_limit);
            tightest.swap_left = smaller(tightest.swap_left, found.swap_left);
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
    let left = |(limit, used): (u64, u64)| limit.saturating_sub(used);
    let [swap_limit, swap_used] =
        files.swap.map_or([None; 2], |names| names.map(|name| number(&dir.join(name))));
    GroupLimits {
        limit,
        left: limit.zip(used).map(left),
        swap_limit,
        swap_left: swap_limit.zip(swap_used).map(left),
    }
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

/// A small text file of a system's facts, such as those in `/proc`; `None` if it cannot be read. Bounded, because
/// the size of these files is not known beforehand.
pub fn text(path: &Path) -> Option<String> {
    let mut text = String::new();
    File::open(path).ok()?.take(1 << 20).read_to_string(&mut text).ok()?;
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:       32000 kB\nMemFree:  100 kB\nMemAvailable:   20000 kB\n\
        SwapTotal: 8000 kB\nSwapFree: 6000 kB\n";

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

    /// Blocks too small to be mappings of their own, with something in use between them.
    #[test]
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    fn what_is_freed_between_what_is_used_goes_back() {
        let now = || MemoryInfo::read().process_rss.unwrap() >> 20;
        let (blocks, kept): (Vec<Vec<u8>>, Vec<Box<u64>>) =
            (0..4096u64).map(|at| (vec![1u8; 64 << 10], Box::new(at))).unzip();
        let full = now();
        drop(blocks);
        give_back_freed();
        let after = now();
        assert!(full > 256 && after + 200 < full, "{after} MiB of {full} are left");
        assert_eq!(*kept[4095], 4095);
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
            ("proc/self/status", "Name:\tx\nVmHWM:\t  30 kB\nVmRSS:\t  20 kB\nVmSwap:\t 5 kB\n"),
            ("proc/vmstat", "nr_free_pages 9\npswpin 7\npswpout 4\n"),
        ]);
        assert_eq!(
            info,
            MemoryInfo {
                total: Some(32_000 * 1024),
                available: Some(20_000 * 1024),
                limit: None,
                swap_total: Some(8_000 * 1024),
                swap_free: Some(6_000 * 1024),
                swapped_pages: Some(11),
                pressure: None,
                process_rss: Some(20 * 1024),
                process_swap: Some(5 * 1024),
                process_peak_rss: Some(30 * 1024),
            }
        );
        assert_eq!(info.footprint(), Some(25 * 1024), "what is in swap is still ours");
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
    fn swap_is_what_the_group_may_use_of_it() {
        let info = read(&[
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "0::/a\n"),
            ("sys/fs/cgroup/a/memory.swap.max", "5000\n"),
            ("sys/fs/cgroup/a/memory.swap.current", "2000\n"),
        ]);
        assert_eq!((info.swap_total, info.swap_free), (Some(5000), Some(3000)));
        assert_eq!(info.available, Some(20_000 * 1024));
    }

    #[test]
    fn an_assumed_machine_says_nothing_of_this_process() {
        let info = MemoryInfo::assumed(24);
        assert_eq!((info.ceiling(), info.available, info.footprint()), (Some(24), Some(24), None));
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

    #[test]
    fn wsl_is_known_by_its_kernel() {
        let at = |release| is_wsl_at(machine(&[("proc/sys/kernel/osrelease", release)]).path());
        assert!(at("5.15.90.1-microsoft-standard-WSL2\n"));
        assert!(!at("6.1.0-18-amd64\n"));
        assert!(!is_wsl_at(machine(&[]).path()));
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
