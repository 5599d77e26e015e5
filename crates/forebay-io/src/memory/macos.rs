//! macOS: 64-bit virtual-memory statistics, swap and the pressure level.

use std::ffi::CStr;
use std::mem::{size_of, zeroed};

use super::{MemoryInfo, Pressure};

pub(super) fn read() -> MemoryInfo {
    let swap: Option<libc::xsw_usage> = sysctl(c"vm.swapusage");
    let statistics = statistics();
    let footprint = footprint();
    MemoryInfo {
        total: sysctl::<u64>(c"hw.memsize"),
        // Free pages include the speculative ones; file-backed pages can be dropped, inactive
        // anonymous ones would have to be compressed and do not count.
        available: statistics.and_then(|vm| {
            let pages =
                u64::from(vm.free_count) + u64::from(vm.purgeable_count) + u64::from(vm.external_page_count);
            pages.checked_mul(page_size()?)
        }),
        limit: None,
        swap_total: swap.map(|swap| swap.xsu_total),
        swap_free: swap.map(|swap| swap.xsu_avail),
        swapped_pages: statistics.map(|vm| vm.swapins.saturating_add(vm.swapouts)),
        pressure: sysctl::<i32>(c"kern.memorystatus_vm_pressure_level").and_then(|level| match level {
            1 => Some(Pressure::Normal),
            2 => Some(Pressure::Warning),
            4 => Some(Pressure::Critical),
            _ => None,
        }),
        process_rss: footprint.map(|usage| usage.ri_phys_footprint),
        process_swap: None,
        process_peak_rss: footprint.map(|usage| usage.ri_lifetime_max_phys_footprint),
    }
}

/// Types for which every pattern of bytes is a value.
trait Plain: Copy {}
impl Plain for u64 {}
impl Plain for i32 {}
impl Plain for libc::xsw_usage {}

/// A value of the kernel's, if it has one of that name and size.
fn sysctl<T: Plain>(name: &CStr) -> Option<T> {
    let mut size = size_of::<T>();
    // SAFETY: `Plain` types are integers or structs of integers, for which zero is a value.
    let mut value: T = unsafe { zeroed() };
    // SAFETY: the kernel writes at most `size` bytes, which is what `value` has; nothing is set.
    let done = unsafe {
        libc::sysctlbyname(name.as_ptr(), (&raw mut value).cast(), &raw mut size, std::ptr::null_mut(), 0)
    };
    (done == 0 && size == size_of::<T>()).then_some(value)
}

fn page_size() -> Option<u64> {
    // SAFETY: asks for a number, touches no memory of ours.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok()
}

fn statistics() -> Option<libc::vm_statistics64> {
    // SAFETY: a struct of integers, for which zero is a value.
    let mut found: libc::vm_statistics64 = unsafe { zeroed() };
    let mut count = libc::HOST_VM_INFO64_COUNT;
    // SAFETY: `count` says how many words the kernel may write, which is the size of the struct.
    #[allow(deprecated, reason = "libc points to a crate that this is too little for")]
    let done = unsafe {
        libc::host_statistics64(
            libc::mach_host_self(),
            libc::HOST_VM_INFO64,
            (&raw mut found).cast(),
            &raw mut count,
        )
    };
    (done == libc::KERN_SUCCESS).then_some(found)
}

fn footprint() -> Option<libc::rusage_info_v4> {
    let pid = i32::try_from(std::process::id()).ok()?;
    // SAFETY: a struct of integers, for which zero is a value.
    let mut usage: libc::rusage_info_v4 = unsafe { zeroed() };
    // SAFETY: this flavour writes a `rusage_info_v4`, which is what is pointed to.
    let done = unsafe { libc::proc_pid_rusage(pid, libc::RUSAGE_INFO_V4, (&raw mut usage).cast()) };
    (done == 0).then_some(usage)
}
