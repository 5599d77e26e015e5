//! A disk that misbehaves on request, and the same way every time.
//!
//! What a read meets depends on the seed, its offset and how often that offset
//! was tried, never on which thread came first, so a failing case can be replayed.

use std::collections::{HashMap, HashSet};
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay_io::{PAGE, ReadAt};

/// The system's number for an input/output error.
pub const EIO: i32 = if cfg!(windows) { 23 } else { 5 };

/// What goes wrong. The default is a disk without faults.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Chooses which reads are hit.
    pub seed: u64,
    /// Of 100 reads, how many return fewer bytes than they could (at least one).
    pub short_reads: u8,
    /// Of 100 reads, how many are interrupted first (up to three times each).
    pub interrupts: u8,
    /// Of 100 reads, how many are told to try again first (`EAGAIN`; up to three times each).
    pub again: u8,
    /// Of 1000 reads, how many fail with [`EIO`], at random places and tries: the next try may work.
    pub errors: u16,
    /// No error comes right behind another one at the same place: what is tried once more works.
    pub passing: bool,
    /// Of 1000 reads, how many panic.
    pub panics: u16,
    /// Reads that go well first.
    pub after: u64,
    /// The disk can be read past the page cache: in whole pages only, into memory that starts at one; what is not
    /// aligned is refused, as Linux does.
    pub direct: bool,
    /// Bytes that cannot be read: a read that starts there fails with [`EIO`], one
    /// that runs into them stops before.
    pub bad: Option<Range<u64>>,
    /// Where the file ends, if before its true end.
    pub truncate_to: Option<u64>,
    /// Reads take up to this long; how long varies, so completions change order.
    pub latency: Duration,
}

/// A file of bytes in memory, or another file, behind [`Faults`].
pub struct FaultyDisk {
    inner: Arc<dyn ReadAt>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    faults: Faults,
    tries: HashMap<u64, u64>,
    /// Where the last try failed.
    failed: HashSet<u64>,
    /// Reads since the faults were set.
    since: u64,
    reads: u64,
    direct_reads: u64,
}

/// Bytes in memory as a file.
struct Bytes(Vec<u8>);

impl ReadAt for Bytes {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let start = usize::try_from(offset).map_or(self.0.len(), |at| at.min(self.0.len()));
        let n = buf.len().min(self.0.len() - start);
        buf[..n].copy_from_slice(&self.0[start..start + n]);
        Ok(n)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.0.len() as u64)
    }
}

impl FaultyDisk {
    /// A file that holds `bytes`.
    pub fn of_bytes(bytes: Vec<u8>, faults: Faults) -> Self {
        Self::over(Arc::new(Bytes(bytes)), faults)
    }

    /// Faults in front of another file.
    pub fn over(inner: Arc<dyn ReadAt>, faults: Faults) -> Self {
        Self { inner, state: Mutex::new(State { faults, ..State::default() }) }
    }

    /// Replaces the faults (`Faults::default()` repairs the disk) and forgets past tries.
    pub fn set(&self, faults: Faults) {
        let mut state = self.state();
        state.faults = faults;
        state.tries.clear();
        state.failed.clear();
        state.since = 0;
    }

    /// Reads asked of this disk so far, failed ones included.
    pub fn reads(&self) -> u64 {
        self.state().reads
    }

    /// Those of them that went past the page cache.
    pub fn direct_reads(&self) -> u64 {
        self.state().direct_reads
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FaultyDisk {
    /// Whether a try fails that is to fail, and remembers it.
    fn fails(&self, offset: u64, fails: bool, passing: bool) -> bool {
        let failed = &mut self.state().failed;
        let failed_before = failed.remove(&offset);
        let fails = fails && !(passing && failed_before);
        if fails {
            failed.insert(offset);
        }
        fails
    }

    fn read(&self, buf: &mut [u8], offset: u64, direct: bool) -> io::Result<usize> {
        let (faults, attempt) = {
            let mut state = self.state();
            state.reads += 1;
            state.direct_reads += u64::from(direct);
            let tries = state.tries.entry(offset).or_insert(0);
            *tries += 1;
            let attempt = *tries;
            state.since += 1;
            let due = state.since > state.faults.after;
            let faults = if due { state.faults.clone() } else { Faults::default() };
            (faults, attempt)
        };
        // Independent draws for one read: which faults it meets and how strongly.
        let draw = |what: u64| mix(mix(mix(faults.seed ^ what) ^ offset) ^ attempt);

        if !faults.latency.is_zero() {
            std::thread::sleep(faults.latency.mul_f64(draw(1) as f64 / u64::MAX as f64));
        }
        if !attempt.is_multiple_of(4) && draw(2) % 100 < u64::from(faults.interrupts) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        if !attempt.is_multiple_of(4) && draw(5) % 100 < u64::from(faults.again) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        assert!(draw(7) % 1000 >= u64::from(faults.panics), "a panic at offset {offset}, as was asked for");
        let fails = draw(6) % 1000 < u64::from(faults.errors);
        if faults.errors > 0 && self.fails(offset, fails, faults.passing) {
            return Err(io::Error::from_raw_os_error(EIO));
        }
        let mut end = offset.saturating_add(buf.len() as u64);
        end = end.min(faults.truncate_to.unwrap_or(u64::MAX));
        if let Some(bad) = &faults.bad {
            if bad.contains(&offset) {
                return Err(io::Error::from_raw_os_error(EIO));
            }
            if offset < bad.start {
                end = end.min(bad.start);
            }
        }
        // No longer than `buf`, which fits a usize.
        let mut len = end.saturating_sub(offset) as usize;
        if len > 1 && draw(3) % 100 < u64::from(faults.short_reads) {
            len = 1 + (draw(4) % (len as u64 - 1)) as usize;
        }
        self.inner.read_at(&mut buf[..len], offset)
    }
}

impl ReadAt for FaultyDisk {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.read(buf, offset, false)
    }

    fn is_direct(&self) -> bool {
        self.state().faults.direct
    }

    fn read_direct_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let aligned = [buf.as_ptr().addr() as u64, buf.len() as u64, offset];
        if !self.is_direct() || aligned.iter().any(|n| n % PAGE as u64 != 0) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.read(buf, offset, true)
    }

    fn size(&self) -> io::Result<u64> {
        let size = self.inner.size()?;
        Ok(size.min(self.state().faults.truncate_to.unwrap_or(u64::MAX)))
    }
}

/// One step of the SplitMix64 generator: a bijection that scatters its input.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    fn disk(faults: Faults) -> FaultyDisk {
        FaultyDisk::of_bytes((0..=255).collect(), faults)
    }

    #[test]
    fn without_faults_it_is_a_file() {
        let disk = disk(Faults::default());
        let mut buf = [0; 8];
        assert_eq!(disk.read_at(&mut buf, 4).unwrap(), 8);
        assert_eq!(buf, [4, 5, 6, 7, 8, 9, 10, 11]);
        assert_eq!(disk.read_at(&mut buf, 250).unwrap(), 6);
        assert_eq!(disk.read_at(&mut buf, 256).unwrap(), 0);
        assert_eq!(disk.read_at(&mut buf, u64::MAX).unwrap(), 0);
        assert_eq!((disk.size().unwrap(), disk.reads()), (256, 4));
    }

    #[test]
    fn bad_bytes_stop_a_read_before_them_and_fail_one_inside() {
        let disk = disk(Faults { bad: Some(100..110), truncate_to: Some(200), ..Faults::default() });
        let mut buf = [0; 64];
        assert_eq!(disk.read_at(&mut buf, 90).unwrap(), 10);
        assert_eq!(disk.read_at(&mut buf, 100).unwrap_err().raw_os_error(), Some(EIO));
        assert_eq!(disk.read_at(&mut buf, 110).unwrap(), 64);
        assert_eq!(disk.read_at(&mut buf, 190).unwrap(), 10);
        assert_eq!(disk.read_at(&mut buf, 200).unwrap(), 0);
        assert_eq!(disk.size().unwrap(), 200);
        disk.set(Faults::default());
        assert_eq!(disk.read_at(&mut buf, 100).unwrap(), 64);
    }

    #[test]
    fn direct_reads_must_be_aligned() {
        let plain = disk(Faults::default());
        let direct = FaultyDisk::of_bytes(vec![7; 5000], Faults { direct: true, ..Faults::default() });
        let mut memory = vec![0; 3 * PAGE];
        let start = memory.as_ptr().align_offset(PAGE);
        let buf = &mut memory[start..start + PAGE];
        assert!(!plain.is_direct() && plain.read_direct_at(buf, 0).is_err());
        assert_eq!(direct.read_direct_at(buf, 4096).unwrap(), 5000 - 4096);
        assert!(direct.read_direct_at(buf, 1).is_err());
        assert!(direct.read_direct_at(&mut buf[..PAGE - 1], 0).is_err());
        assert_eq!(direct.direct_reads(), 1);
    }

    #[test]
    fn random_errors_pass_and_their_share_is_about_what_was_asked() {
        let disk = disk(Faults { seed: 4, errors: 100, again: 20, ..Faults::default() });
        let mut buf = [0; 1];
        let tries: Vec<_> = (0..2000).map(|i| disk.read_at(&mut buf, i % 200)).collect();
        let count = |kind: &dyn Fn(&io::Error) -> bool| {
            tries.iter().filter(|t| t.as_ref().err().is_some_and(kind)).count()
        };
        // 10% of what is not told to try again; 20% of three tries in four.
        assert!((100..300).contains(&count(&|e| e.raw_os_error() == Some(EIO))));
        assert!((200..400).contains(&count(&|e| e.kind() == io::ErrorKind::WouldBlock)));
    }

    #[test]
    fn errors_that_pass_are_never_two_in_a_row() {
        let disk = disk(Faults { errors: 600, passing: true, ..Faults::default() });
        let tries: Vec<bool> = (0..200).map(|_| disk.read_at(&mut [0; 4], 8).is_ok()).collect();
        assert!(tries.contains(&false) && tries.windows(2).all(|two| two[0] || two[1]), "{tries:?}");
    }

    #[test]
    fn panics_come_when_they_were_asked_for() {
        let disk = disk(Faults { panics: 1000, after: 2, ..Faults::default() });
        let read = || catch_unwind(AssertUnwindSafe(|| disk.read_at(&mut [0; 1], 3).unwrap()));
        assert_eq!((read().ok(), read().ok(), read().ok()), (Some(1), Some(1), None));
        disk.set(Faults { panics: 1000, after: 1, ..Faults::default() });
        assert_eq!((read().ok(), read().ok()), (Some(1), None));
    }

    #[test]
    fn seeded_faults_repeat_and_always_let_a_read_through() {
        let outcomes = |seed| {
            let disk = disk(Faults { seed, short_reads: 50, interrupts: 50, ..Faults::default() });
            let mut buf = [0; 64];
            (0..200).map(|i| disk.read_at(&mut buf, i % 50).ok()).collect::<Vec<_>>()
        };
        assert_eq!(outcomes(1), outcomes(1));
        assert_ne!(outcomes(1), outcomes(2));
        let seen = outcomes(3);
        assert!(seen.contains(&None) && seen.contains(&Some(64)) && seen.iter().flatten().any(|&n| n < 64));
        for offset in 0..50 {
            assert!((0..4).any(|round| seen[round * 50 + offset].is_some()), "offset {offset} never read");
        }
    }
}
