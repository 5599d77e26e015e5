//! How many threads are worth having: the cores that this process may use.
//!
//! Two hardware threads of one core share its multipliers and its caches, which one thread of
//! ours keeps busy alone, so a core counts once. What the process may use is its affinity mask
//! and its control group's quota.

/// One thread per usable core, within the quota; at least one.
pub(super) fn usable() -> usize {
    // The hardware threads in the affinity mask, or the quota (of this control group and those
    // above it) where that is less.
    let allowed = std::thread::available_parallelism().map_or(1, usize::from);
    cores_in_mask().map_or(allowed, |cores| cores.clamp(1, allowed))
}

/// Cores with at least one hardware thread in the affinity mask of the calling thread.
#[cfg(target_os = "linux")]
fn cores_in_mask() -> Option<usize> {
    use std::fs::read_to_string;
    let siblings = |cpu: usize| {
        let folder = format!("/sys/devices/system/cpu/cpu{cpu}/topology");
        read_to_string(format!("{folder}/thread_siblings_list"))
            .or_else(|_| read_to_string(format!("{folder}/core_cpus_list")))
            .ok()
    };
    Some(count_cores(&affinity_mask()?, siblings))
}

/// Not asked elsewhere: what the system calls available is what we take.
#[cfg(not(target_os = "linux"))]
fn cores_in_mask() -> Option<usize> {
    None
}

/// The processors that the calling thread may run on, in ascending order.
#[cfg(target_os = "linux")]
fn affinity_mask() -> Option<Vec<usize>> {
    /// Words for 8192 processors, the most that Linux can be built for.
    const WORDS: usize = 8192 / libc::c_ulong::BITS as usize;
    let mut words: [libc::c_ulong; WORDS] = [0; WORDS];
    // SAFETY: the kernel writes at most the given number of bytes, which is what the array has; 0
    // is the calling thread.
    let failed = unsafe { libc::sched_getaffinity(0, size_of_val(&words), words.as_mut_ptr().cast()) };
    let bits = libc::c_ulong::BITS as usize;
    let allowed = |cpu: &usize| words[cpu / bits] >> (cpu % bits) & 1 == 1;
    (failed == 0).then(|| (0..WORDS * bits).filter(allowed).collect())
}

/// How many cores `cpus` (ascending) belong to. `siblings` gives the hardware threads of a
/// processor's core in the kernel's list format, the lowest first ("0,8" or "0-1"), each of which
/// gives the same list; one whose list is not known counts as a core.
#[cfg(any(target_os = "linux", test))]
fn count_cores(cpus: &[usize], siblings: impl Fn(usize) -> Option<String>) -> usize {
    let core = |cpu: usize| {
        let list = siblings(cpu)?;
        let first = list.trim().split([',', '-']).next()?;
        first.parse::<usize>().ok()
    };
    cpus.iter().map(|&cpu| core(cpu).unwrap_or(cpu)).collect::<std::collections::BTreeSet<_>>().len()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn listed(lists: &'static [&'static str]) -> impl Fn(usize) -> Option<String> {
        |cpu| lists.get(cpu).filter(|list| !list.is_empty()).map(|list| format!("{list}\n"))
    }

    #[test]
    fn hardware_threads_of_a_core_count_once() {
        // Four cores, the second threads numbered after all the first ones, and side by side.
        let far = ["0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"];
        let near = ["0-1", "0-1", "2-3", "2-3", "4-5", "4-5", "6-7", "6-7"];
        for lists in [far, near] {
            let lists: &'static [&'static str; 8] = Box::leak(Box::new(lists));
            assert_eq!(count_cores(&[0, 1, 2, 3, 4, 5, 6, 7], listed(lists)), 4);
        }
    }

    #[test]
    fn only_what_the_mask_allows_counts() {
        const LISTS: &[&str] = &["0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"];
        assert_eq!(count_cores(&[1, 5], listed(LISTS)), 1);
        // The second thread of a core whose first one is not ours.
        assert_eq!(count_cores(&[4, 5, 6], listed(LISTS)), 3);
        assert_eq!(count_cores(&[], listed(LISTS)), 0);
    }

    #[test]
    fn processors_of_unknown_topology_count_one_by_one() {
        assert_eq!(count_cores(&[0, 1, 2], |_| None), 3);
        assert_eq!(count_cores(&[0, 1, 2], |_| Some("what".into())), 3);
        // Cores of one thread, and a mixed machine: two cores of two threads, two of one.
        assert_eq!(count_cores(&[0, 1], listed(&["0", "1"])), 2);
        assert_eq!(count_cores(&[0, 1, 2, 3, 4, 5], listed(&["0-1", "0-1", "2-3", "2-3", "4", "5"])), 4);
    }

    #[test]
    fn this_machine_has_a_core() {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        assert!((1..=threads).contains(&usable()));
    }
}
