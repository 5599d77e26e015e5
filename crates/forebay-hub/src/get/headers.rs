//! Headers of weight files, which say what is in them, without the files.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

use super::client::lock;
use super::error::GetError;
use super::listing::{Listing, RemoteFile};
use super::watch::{Stop, Watch};
use super::{Hub, Range};

/// Bytes asked for at first; most headers are shorter.
const FIRST: u64 = 256 << 10;
/// Longest header that is asked for, and the most of all together.
const LONGEST: (u64, u64) = (32 << 20, 512 << 20);
/// Headers asked for at the same time.
const AT_ONCE: usize = 8;

impl Hub {
    /// The first bytes of safetensors files, in their order: eight that give the length of the header, and the header.
    /// Like all that [`read_range`](Self::read_range) gives they are not verified.
    ///
    /// # Errors
    /// A file that cannot be a safetensors file, headers beyond 32 MiB or 512 MiB in all, and whatever
    /// [`read_range`](Self::read_range) fails with.
    pub fn headers(
        &self,
        listing: &Listing,
        files: &[&RemoteFile],
        watch: &Watch<'_>,
    ) -> Result<Vec<Vec<u8>>, GetError> {
        let (next, total) = (AtomicUsize::new(0), AtomicU64::new(0));
        let done: Mutex<Vec<Vec<u8>>> = Mutex::new(vec![Vec::new(); files.len()]);
        let failure: Mutex<Option<GetError>> = Mutex::new(None);
        thread::scope(|scope| {
            for _ in 0..AT_ONCE.min(files.len()) {
                scope.spawn(|| {
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        let Some(file) = files.get(number) else { return };
                        match self.header(listing, file, &total, watch) {
                            Ok(bytes) => lock(&done)[number] = bytes,
                            Err(error) => {
                                lock(&failure).get_or_insert(error);
                                // The others find nothing more to do.
                                next.store(files.len(), Ordering::Relaxed);
                            }
                        }
                    }
                });
            }
        });
        Stop::new(watch.cancel).check()?;
        match lock(&failure).take() {
            Some(error) => Err(error),
            None => Ok(std::mem::take(&mut *lock(&done))),
        }
    }

    fn header(
        &self,
        listing: &Listing,
        file: &RemoteFile,
        total: &AtomicU64,
        watch: &Watch<'_>,
    ) -> Result<Vec<u8>, GetError> {
        let refused = |why| GetError::Header { file: file.name.clone(), why };
        let read = |range: Range<u64>| self.read_range(listing, file, range, watch);
        let mut bytes = read(0..file.size.min(FIRST))?;
        let length = bytes.first_chunk().map(|length| u64::from_le_bytes(*length));
        let end = length.and_then(|length| length.checked_add(8)).filter(|end| *end <= file.size);
        let end = end.ok_or_else(|| refused("it is no safetensors file"))?;
        if end > LONGEST.0 {
            return Err(refused("its header is longer than 32 MiB"));
        }
        if total.fetch_add(end, Ordering::Relaxed).saturating_add(end) > LONGEST.1 {
            return Err(refused("the headers of all files are longer than 512 MiB"));
        }
        let there = bytes.len() as u64;
        if end > there {
            bytes.extend(read(there..end)?);
        }
        bytes.truncate(usize::try_from(end).unwrap_or(usize::MAX));
        Ok(bytes)
    }
}
