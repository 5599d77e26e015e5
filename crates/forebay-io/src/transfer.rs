//! One segment on its way from a file into a buffer, as a machine without I/O of its own: it says which read
//! comes next and is told what came of it. The worker pool and the ring both drive it, so short reads,
//! interruptions, ends of files and refusals mean the same everywhere (docs/streaming.md).

use std::io;
use std::path::Path;
use std::time::Duration;

use forebay_core::{DIRECT_ALIGN, ReadSegment};

use crate::read::ReadError;
use crate::window::Window;

/// Times in a row that a read may be interrupted or told to try again.
const MAX_STALLS: u32 = 100;
/// Bytes of one read at most; some systems cut longer ones short.
const MAX_READ: usize = 1 << 30;

/// What reading cost so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Reads issued.
    pub reads: u64,
    /// Those of them that went past the page cache.
    pub direct_reads: u64,
    /// Segments that were begun directly and ended through the page cache.
    pub fallbacks: u64,
    /// Reads issued again: after a short direct one, an interruption, "try again", or a failure.
    pub retries: u64,
}

/// A read to issue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ask {
    /// Past the page cache.
    pub direct: bool,
    /// From here in the file.
    pub offset: u64,
    /// To here in the buffer.
    pub dst: usize,
    /// This many bytes.
    pub len: usize,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Transfer {
    segment: ReadSegment,
    /// Byte of the file behind the last wanted one.
    end: u64,
    /// Byte of the file behind the last page, while reads are direct.
    direct_end: Option<u64>,
    /// Next byte of the file to read.
    at: u64,
    /// A direct read was short before.
    was_short: bool,
    stalls: u32,
    refused: bool,
}

impl Transfer {
    /// With a window, direct reads. The caller has checked that both lie within the buffer.
    pub fn new(segment: ReadSegment, window: Option<Window>, path: &Path) -> Result<Self, ReadError> {
        let Some(end) = segment.offset.checked_add(segment.len as u64) else {
            return Err(os_error(&segment, path, 0, &io::ErrorKind::InvalidInput.into()));
        };
        let direct_end = window.map(|window| window.base + window.len as u64);
        let at = window.map_or(segment.offset, |window| window.base);
        Ok(Self { segment, end, direct_end, at, was_short: false, stalls: 0, refused: false })
    }

    /// The next read, of at most `limit` bytes (in whole pages); `None` when all is there.
    pub fn next(&self, limit: usize) -> Option<Ask> {
        if self.at >= self.end {
            return None;
        }
        let left = self.direct_end.unwrap_or(self.end) - self.at;
        let len = left.min(limit.clamp(DIRECT_ALIGN, MAX_READ) as u64) as usize;
        // The window starts in front of the segment, and as far in front of its destination.
        let dst = self.segment.dst.wrapping_add(self.at.wrapping_sub(self.segment.offset) as usize);
        Some(Ask { direct: self.direct_end.is_some(), offset: self.at, dst, len })
    }

    /// Takes in what came of `ask`, the last read that [`next`](Self::next) asked for.
    pub fn digest(
        &mut self,
        ask: &Ask,
        result: io::Result<usize>,
        path: &Path,
        tally: &mut Tally,
    ) -> Result<(), ReadError> {
        tally.reads += 1;
        tally.direct_reads += u64::from(ask.direct);
        match result {
            Ok(n) => {
                self.stalls = 0;
                self.at = ask.offset + n.min(ask.len) as u64;
                if n >= ask.len || self.at >= self.end {
                    return Ok(());
                }
                if ask.direct {
                    self.short_direct(tally);
                } else if n == 0 {
                    let ReadSegment { offset, len, .. } = self.segment;
                    return Err(ReadError::EndOfFile {
                        path: path.to_owned(),
                        offset,
                        wanted: len,
                        got: self.got(),
                    });
                }
                Ok(())
            }
            Err(error) if is_stall(&error) && self.stalls < MAX_STALLS => {
                self.stalls += 1;
                tally.retries += 1;
                Ok(())
            }
            // Not what this file system calls aligned, or nothing it can do directly.
            Err(error) if ask.direct && is_refusal(&error) => {
                self.refused = true;
                self.fall_back(tally);
                Ok(())
            }
            Err(error) => Err(os_error(&self.segment, path, self.got(), &error)),
        }
    }

    /// The file system refused a direct read of this file.
    pub fn refused(&self) -> bool {
        self.refused
    }

    /// Offset and length of what went through the page cache, if anything did.
    pub fn cached(&self) -> Option<(u64, usize)> {
        self.direct_end.is_none().then_some((self.segment.offset, self.segment.len))
    }

    /// How long to wait before the next read: after many in a row that were told to try again.
    pub fn pause(&self) -> Duration {
        if self.stalls > MAX_STALLS / 10 { Duration::from_millis(1) } else { Duration::ZERO }
    }

    /// Goes on directly at the last whole page the first time, through the page cache the second time.
    fn short_direct(&mut self, tally: &mut Tally) {
        self.at -= self.at % DIRECT_ALIGN as u64;
        if self.was_short {
            self.fall_back(tally);
        } else {
            self.was_short = true;
            tally.retries += 1;
        }
    }

    fn fall_back(&mut self, tally: &mut Tally) {
        self.direct_end = None;
        self.at = self.at.max(self.segment.offset);
        tally.fallbacks += 1;
    }

    /// Wanted bytes that arrived.
    pub fn got(&self) -> usize {
        self.at.min(self.end).saturating_sub(self.segment.offset) as usize
    }
}

fn is_stall(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}

fn is_refusal(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported)
}

fn os_error(segment: &ReadSegment, path: &Path, got: usize, error: &io::Error) -> ReadError {
    ReadError::Os {
        path: path.to_owned(),
        offset: segment.offset,
        wanted: segment.len,
        got,
        kind: error.kind(),
        os_code: error.raw_os_error(),
        message: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 10,000 bytes from 5,000: pages 4,096..16,384, two bytes of slab in front of nothing.
    fn begin() -> (Transfer, Tally) {
        let segment = ReadSegment { shard: 0, offset: 5_000, len: 10_000, dst: 904 };
        let window = Window::around(5_000, 10_000);
        (Transfer::new(segment, window, Path::new("x")).unwrap(), Tally::default())
    }

    fn step(transfer: &mut Transfer, tally: &mut Tally, result: io::Result<usize>) -> Result<(), ReadError> {
        let ask = transfer.next(usize::MAX).unwrap();
        transfer.digest(&ask, result, Path::new("x"), tally)
    }

    #[test]
    fn whole_pages_at_once_or_in_pieces() {
        let (mut transfer, mut tally) = begin();
        let whole = Ask { direct: true, offset: 4096, dst: 0, len: 12_288 };
        assert_eq!(transfer.next(usize::MAX), Some(whole));
        assert_eq!(transfer.next(8192), Some(Ask { len: 8192, ..whole }));
        // The file ends behind the last wanted byte, within the last page.
        step(&mut transfer, &mut tally, Ok(15_000 - 4096)).unwrap();
        assert_eq!(transfer.next(usize::MAX), None);
        assert_eq!(tally, Tally { reads: 1, direct_reads: 1, ..Tally::default() });
    }

    #[test]
    fn a_short_direct_read_goes_on_once_then_falls_back() {
        let (mut transfer, mut tally) = begin();
        step(&mut transfer, &mut tally, Ok(5_000)).unwrap();
        // 9,096 bytes into the file: the second page starts again.
        assert_eq!(transfer.next(usize::MAX), Some(Ask { direct: true, offset: 8192, dst: 4096, len: 8192 }));
        step(&mut transfer, &mut tally, Ok(100)).unwrap();
        assert_eq!(
            transfer.next(usize::MAX),
            Some(Ask { direct: false, offset: 8192, dst: 4096, len: 6808 })
        );
        step(&mut transfer, &mut tally, Ok(808)).unwrap();
        let error = step(&mut transfer, &mut tally, Ok(0)).unwrap_err();
        assert!(
            matches!(error, ReadError::EndOfFile { offset: 5000, wanted: 10_000, got: 4000, .. }),
            "{error:?}"
        );
        assert_eq!(tally, Tally { reads: 4, direct_reads: 2, fallbacks: 1, retries: 1 });
    }

    #[test]
    fn refusals_fall_back_and_faults_do_not() {
        let (mut transfer, mut tally) = begin();
        step(&mut transfer, &mut tally, Err(io::ErrorKind::InvalidInput.into())).unwrap();
        assert!(transfer.refused());
        assert_eq!(
            transfer.next(usize::MAX),
            Some(Ask { direct: false, offset: 5000, dst: 904, len: 10_000 })
        );
        let error = step(&mut transfer, &mut tally, Err(io::ErrorKind::InvalidInput.into())).unwrap_err();
        assert!(matches!(error, ReadError::Os { got: 0, .. }), "{error:?}");

        let (mut transfer, mut tally) = begin();
        for _ in 0..MAX_STALLS {
            step(&mut transfer, &mut tally, Err(io::ErrorKind::WouldBlock.into())).unwrap();
        }
        assert!(!transfer.pause().is_zero());
        let error = step(&mut transfer, &mut tally, Err(io::ErrorKind::Interrupted.into())).unwrap_err();
        assert!(matches!(error, ReadError::Os { kind: io::ErrorKind::Interrupted, .. }), "{error:?}");
        assert_eq!(tally.retries, u64::from(MAX_STALLS));
    }
}
