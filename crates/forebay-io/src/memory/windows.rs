//! Windows: physical memory, the commit limit, and the working set of this process.

use std::mem::{size_of, zeroed};

use windows_sys::Win32::System::ProcessStatus::{GetProcessMemoryInfo, PROCESS_MEMORY_COUNTERS};
use windows_sys::Win32::System::SystemInformation::{GlobalMemoryStatusEx, MEMORYSTATUSEX};
use windows_sys::Win32::System::Threading::GetCurrentProcess;

use super::{MemoryInfo, smaller};

pub(super) fn read() -> MemoryInfo {
    let machine = machine();
    let process = process();
    let swap = |all: u64, physical: u64| all.saturating_sub(physical);
    MemoryInfo {
        total: machine.map(|m| m.ullTotalPhys),
        // Allocating also needs commit charge, which may run out first.
        available: smaller(machine.map(|m| m.ullAvailPhys), machine.map(|m| m.ullAvailPageFile)),
        limit: None,
        // The system counts physical memory and page files together.
        swap_total: machine.map(|m| swap(m.ullTotalPageFile, m.ullTotalPhys)),
        swap_free: machine.map(|m| swap(m.ullAvailPageFile, m.ullAvailPhys)),
        swapped_pages: None,
        pressure: None,
        process_rss: process.map(|p| p.WorkingSetSize as u64),
        process_swap: process.map(|p| p.PagefileUsage.saturating_sub(p.WorkingSetSize) as u64),
        process_peak_rss: process.map(|p| p.PeakWorkingSetSize as u64),
    }
}

fn machine() -> Option<MEMORYSTATUSEX> {
    // SAFETY: a struct of integers, for which zero is a value.
    let mut status: MEMORYSTATUSEX = unsafe { zeroed() };
    status.dwLength = size_of::<MEMORYSTATUSEX>() as u32;
    // SAFETY: the struct says its own length, as the call wants it.
    (unsafe { GlobalMemoryStatusEx(&raw mut status) } != 0).then_some(status)
}

fn process() -> Option<PROCESS_MEMORY_COUNTERS> {
    let size = size_of::<PROCESS_MEMORY_COUNTERS>() as u32;
    // SAFETY: a struct of integers, for which zero is a value.
    let mut counters: PROCESS_MEMORY_COUNTERS = unsafe { zeroed() };
    // SAFETY: the handle is this process's own, which needs no closing; the size is the struct's.
    (unsafe { GetProcessMemoryInfo(GetCurrentProcess(), &raw mut counters, size) } != 0).then_some(counters)
}
