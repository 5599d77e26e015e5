//! What each system calls reading past its page cache.

use std::fs::File;
use std::io;
use std::path::Path;

/// Opens a file for reads past the page cache, all of which must be aligned (`O_DIRECT`).
#[cfg(target_os = "linux")]
pub(crate) fn open_direct(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    File::options().read(true).custom_flags(libc::O_DIRECT).open(path)
}

/// Opens a file for reads that leave nothing in the page cache (`F_NOCACHE`); what is there already stays.
#[cfg(target_os = "macos")]
pub(crate) fn open_direct(path: &Path) -> io::Result<File> {
    use std::os::fd::AsRawFd;
    let file = File::open(path)?;
    // SAFETY: the descriptor is open, and this command takes an integer.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_NOCACHE, 1) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(file),
    }
}

/// Opens a file for reads past the page cache, all of which must be aligned (`FILE_FLAG_NO_BUFFERING`).
#[cfg(windows)]
pub(crate) fn open_direct(path: &Path) -> io::Result<File> {
    use std::os::windows::fs::OpenOptionsExt;
    const FILE_FLAG_NO_BUFFERING: u32 = 0x2000_0000;
    File::options().read(true).custom_flags(FILE_FLAG_NO_BUFFERING).open(path)
}

#[cfg(not(any(target_os = "linux", target_os = "macos", windows)))]
pub(crate) fn open_direct(_path: &Path) -> io::Result<File> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Tells the page cache that it need not keep this part of a file. Advice: what becomes of it changes no byte.
#[cfg(target_os = "linux")]
pub(crate) fn forget(file: &File, offset: u64, len: usize) {
    use std::os::fd::AsRawFd;
    let (Ok(offset), Ok(len)) = (libc::off_t::try_from(offset), libc::off_t::try_from(len)) else { return };
    // SAFETY: the descriptor is open; the call touches no memory of ours.
    unsafe {
        libc::posix_fadvise(file.as_raw_fd(), offset, len, libc::POSIX_FADV_DONTNEED);
    }
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn forget(_file: &File, _offset: u64, _len: usize) {}
