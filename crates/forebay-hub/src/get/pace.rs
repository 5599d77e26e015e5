//! Bodies that trickle: a server that sends a byte now and then is as good as silent.

use std::io::{self, Read};
use std::time::{Duration, Instant};

/// Bytes that have to come while a silent server would be waited for. The slowest line brings more.
pub(super) const LEAST: u64 = 1024;

/// A body that fails with [`TimedOut`](io::ErrorKind::TimedOut) if fewer than [`LEAST`] bytes come in a time. Only time
/// spent waiting for it counts.
pub(super) struct Paced<R> {
    body: R,
    window: Duration,
    waited: Duration,
    bytes: u64,
}

impl<R: Read> Paced<R> {
    pub fn new(body: R, window: Duration) -> Self {
        Self { body, window, waited: Duration::ZERO, bytes: 0 }
    }
}

impl<R: Read> Read for Paced<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let began = Instant::now();
        let read = self.body.read(buffer)?;
        self.waited += began.elapsed();
        self.bytes += read as u64;
        if self.waited >= self.window {
            if self.bytes < LEAST && read > 0 {
                return Err(io::ErrorKind::TimedOut.into());
            }
            (self.waited, self.bytes) = (Duration::ZERO, 0);
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// So many bytes at a time, each time after a while.
    struct Slow(usize);

    impl Read for Slow {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            std::thread::sleep(Duration::from_millis(5));
            Ok(self.0.min(buffer.len()))
        }
    }

    #[test]
    fn a_trickle_is_silence_and_a_slow_body_is_not() {
        let all = |bytes| {
            let body = Paced::new(Slow(bytes), Duration::from_millis(40));
            io::copy(&mut body.take(20 * bytes as u64), &mut io::sink()).map_err(|error| error.kind())
        };
        assert_eq!(all(1), Err(io::ErrorKind::TimedOut));
        assert_eq!(all(2000), Ok(40_000));
    }
}
