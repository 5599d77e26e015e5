//! A disk that is soon full.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// A disk of its own, in memory. It is gone when this is dropped.
#[derive(Debug)]
pub struct SmallDisk(TempDir);

impl SmallDisk {
    /// One of `bytes` bytes. `None`, and the reason on standard output, where this process may not mount one.
    pub fn new(bytes: u64) -> Option<Self> {
        let dir = TempDir::new().ok()?;
        let size = format!("size={bytes}");
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(dir.path()).output();
        match mounted {
            Ok(output) if output.status.success() => Some(Self(dir)),
            Ok(output) => {
                println!("skipped: no small disk: {}", String::from_utf8_lossy(&output.stderr).trim());
                None
            }
            Err(error) => {
                println!("skipped: no small disk: {error}");
                None
            }
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    fn ballast(&self) -> PathBuf {
        self.path().join("ballast")
    }

    /// Fills it up to the last byte.
    pub fn fill(&self) {
        // It is full when no more is written.
        let _ = fs::File::create(self.ballast())
            .and_then(|mut file| std::io::copy(&mut std::io::repeat(0), &mut file));
    }

    /// There is room again.
    pub fn empty(&self) {
        let _ = fs::remove_file(self.ballast());
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.path()).status();
    }
}
