//! What this machine is: processor, cores, caches, memory, page policy.
//!
//! Linux says it in `/proc` and `/sys`; elsewhere most fields are unknown, which is never the same as zero.

use std::collections::BTreeSet;
use std::path::Path;

use forebay_core::ByteSize;
use forebay_io::MemoryInfo;
use forebay_io::memory::text;
use forebay_kernels::{Isa, Kernels, Team};
use serde_json::{Value, json};

/// Facts about the machine. `None` is "could not be read".
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Machine {
    /// The processor's name.
    pub processor: Option<String>,
    /// Numbers of the processors that this process may run on.
    pub allowed: Option<Vec<usize>>,
    /// Physical cores among them.
    pub cores: Option<usize>,
    /// Data and unified caches of the first allowed processor, innermost first.
    pub caches: Vec<Cache>,
    /// The policy for transparent large pages: always, madvise or never.
    pub large_pages: Option<String>,
    /// Memory of the machine and the process's share.
    pub memory: MemoryInfo,
}

/// One cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cache {
    /// 1 is the innermost.
    pub level: u32,
    /// Its size.
    pub bytes: u64,
    /// Processors that share it.
    pub shared_by: usize,
}

impl Machine {
    /// Reads the facts of this machine.
    pub fn read() -> Self {
        Self { memory: MemoryInfo::read(), ..Self::read_from(Path::new("/")) }
    }

    /// Reads the facts from the `proc` and `sys` directories under `root`.
    fn read_from(root: &Path) -> Self {
        let cpuinfo = text(&root.join("proc/cpuinfo")).unwrap_or_default();
        let status = text(&root.join("proc/self/status")).unwrap_or_default();
        let allowed = field(&status, "Cpus_allowed_list").and_then(list);
        let cpus = root.join("sys/devices/system/cpu");
        let siblings = |cpu: &usize| text(&cpus.join(format!("cpu{cpu}/topology/thread_siblings_list")));
        let cores: Option<BTreeSet<String>> =
            allowed.as_ref().and_then(|all| all.iter().map(siblings).collect());
        let first = allowed.as_ref().and_then(|all| all.first().copied()).unwrap_or(0);
        let policy = text(&root.join("sys/kernel/mm/transparent_hugepage/enabled")).unwrap_or_default();
        Self {
            processor: processor(&cpuinfo),
            cores: cores.map(|cores| cores.len()),
            caches: caches(&cpus.join(format!("cpu{first}/cache"))),
            large_pages: policy.split(['[', ']']).nth(1).map(str::to_owned),
            memory: MemoryInfo::read_from(root),
            allowed,
        }
    }

    /// The size of the outermost cache.
    pub fn last_cache(&self) -> Option<u64> {
        self.caches.last().map(|cache| cache.bytes)
    }

    /// The size of the second-level cache, as far as one of the processors that share it may use it.
    pub fn second_cache(&self) -> Option<u64> {
        let cache = self.caches.iter().find(|cache| cache.level == 2)?;
        Some(cache.bytes / cache.shared_by.max(1) as u64)
    }

    /// `L1 49.15 kB, L2 1.05 MB, L3 33.55 MB shared by 2`.
    pub fn caches_text(&self) -> String {
        let one = |cache: &Cache| {
            let shared = match cache.shared_by {
                0 | 1 => String::new(),
                n => format!(" shared by {n}"),
            };
            format!("L{} {}{shared}", cache.level, ByteSize(cache.bytes))
        };
        let all: Vec<String> = self.caches.iter().map(one).collect();
        if all.is_empty() { "unknown".to_owned() } else { all.join(", ") }
    }

    /// All facts for programs, with the instruction set of `kernels`.
    pub fn json(&self, kernels: Kernels) -> Value {
        let caches = self
            .caches
            .iter()
            .map(|cache| json!({"level": cache.level, "bytes": cache.bytes, "shared_by": cache.shared_by}));
        json!({
            "processor": self.processor,
            "architecture": std::env::consts::ARCH,
            "system": std::env::consts::OS,
            "cpu_features": kernels.isa().name(),
            "cpu_features_available": Isa::available().map(Isa::name).collect::<Vec<_>>(),
            "processors_allowed": self.allowed.as_ref().map(Vec::len),
            "cores_allowed": self.cores,
            "threads": Team::default_threads(),
            "caches": caches.collect::<Vec<_>>(),
            "large_pages": self.large_pages,
            "memory": crate::plan::memory_json(&self.memory),
        })
    }
}

/// x86 names the model; ARM gives numbers, which are better than nothing.
fn processor(cpuinfo: &str) -> Option<String> {
    if let Some(name) = field(cpuinfo, "model name") {
        return Some(name.to_owned());
    }
    let implementer = field(cpuinfo, "CPU implementer")?;
    Some(format!("ARM implementer {implementer}, part {}", field(cpuinfo, "CPU part")?))
}

fn caches(dir: &Path) -> Vec<Cache> {
    let one = |index: usize| {
        let dir = dir.join(format!("index{index}"));
        let read = |name: &str| text(&dir.join(name));
        let kind = read("type")?;
        let level = read("level")?.trim().parse().ok()?;
        let size = read("size")?;
        let kib: u64 = size.trim().strip_suffix('K')?.parse().ok()?;
        let shared_by = read("shared_cpu_list").as_deref().and_then(list).map_or(1, |all| all.len());
        let holds_data = kind.trim() != "Instruction";
        Some((holds_data, Cache { level, bytes: kib.checked_mul(1024)?, shared_by }))
    };
    let mut found: Vec<Cache> =
        (0..16).map_while(one).filter(|(holds_data, _)| *holds_data).map(|(_, cache)| cache).collect();
    found.sort_by_key(|cache| cache.level);
    found
}

/// The value on the first line `name : value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    lines.find_map(|(key, value)| (key.trim() == name).then(|| value.trim()))
}

/// The numbers of a list such as `0-3,8`.
fn list(text: &str) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for part in text.trim().split(',') {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        let (from, to): (usize, usize) = (from.parse().ok()?, to.parse().ok()?);
        // No machine has more; a damaged file must not fill the memory.
        if to > 1 << 16 {
            return None;
        }
        all.extend(from..=to);
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The facts of a machine with these files.
    fn read(files: &[(&str, &str)]) -> Machine {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        Machine::read_from(root.path())
    }

    #[test]
    fn nothing_there_is_unknown() {
        assert_eq!(read(&[]), Machine::default());
        assert_eq!(read(&[]).caches_text(), "unknown");
        let odd = read(&[
            ("proc/self/status", "Cpus_allowed_list:\t0-99999999999\n"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "nonsense"),
        ]);
        assert_eq!(odd, Machine::default());
    }

    #[test]
    fn two_processors_of_one_core() {
        let cpu = "sys/devices/system/cpu/cpu2";
        let sibling = "sys/devices/system/cpu/cpu3/topology/thread_siblings_list";
        let file = |name: &str| format!("{cpu}/{name}");
        let names = [
            "topology/thread_siblings_list",
            "cache/index0/type",
            "cache/index0/level",
            "cache/index0/size",
            "cache/index1/type",
            "cache/index1/level",
            "cache/index1/size",
            "cache/index2/type",
            "cache/index2/level",
            "cache/index2/size",
            "cache/index2/shared_cpu_list",
        ]
        .map(file);
        let values = [
            "2-3\n",
            "Data\n",
            "1\n",
            "48K\n",
            "Instruction\n",
            "1\n",
            "32K\n",
            "Unified\n",
            "2\n",
            "1024K\n",
            "2-3\n",
        ];
        let mut files: Vec<(&str, &str)> = names.iter().map(String::as_str).zip(values).collect();
        files.push((sibling, "2-3\n"));
        files.push(("proc/self/status", "Cpus_allowed:\tc\nCpus_allowed_list:\t2-3\n"));
        files.push(("proc/cpuinfo", "processor : 0\nmodel name\t: A Processor\n"));
        files.push(("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"));
        let machine = read(&files);
        assert_eq!(machine.processor.as_deref(), Some("A Processor"));
        assert_eq!((machine.allowed.as_deref(), machine.cores), (Some(&[2, 3][..]), Some(1)));
        assert_eq!(machine.large_pages.as_deref(), Some("madvise"));
        assert_eq!(machine.caches_text(), "L1 49.15 kB, L2 1.05 MB shared by 2");
        assert_eq!((machine.second_cache(), machine.last_cache()), (Some(512 << 10), Some(1 << 20)));
    }

    #[test]
    fn lists_of_processors() {
        assert_eq!(list("0-2,8\n"), Some(vec![0, 1, 2, 8]));
        assert_eq!(list("5"), Some(vec![5]));
        assert_eq!(list(""), None);
        assert_eq!(list("3-x"), None);
    }

    #[test]
    fn arm_has_numbers_for_a_name() {
        let name = processor("CPU implementer\t: 0x41\nCPU part\t: 0xd40\n");
        assert_eq!(name.as_deref(), Some("ARM implementer 0x41, part 0xd40"));
    }
}
