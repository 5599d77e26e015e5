//! A file whose bytes go to the disk while further ones are made.
//!
//! What is written stays in the system's memory until somebody asks for it to be on the disk. Whoever asks only at the
//! end of a large file waits for nearly all of it then, and makes nothing meanwhile. Here a thread asks all the time.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::{Builder, JoinHandle};

/// Bytes that are written before the disk is to have them. Small files never get there, and have no thread.
const STRIDE: u64 = 64 << 20;
/// Bytes that are handed to the system at a time. Linux takes ten times the processor's time and more for the same bytes
/// where twenty megabytes come at once (docs/benchmarks.md).
const AT_ONCE: usize = 512 << 10;

/// A file that is being written.
#[derive(Debug)]
pub struct Behind {
    file: Arc<File>,
    /// Bytes since the disk was last asked to have everything.
    unsent: u64,
    sender: Option<Sender>,
}

/// The thread that waits for the disk.
#[derive(Debug)]
struct Sender {
    ask: SyncSender<()>,
    thread: JoinHandle<io::Result<()>>,
}

impl Behind {
    /// Writes to `file` from where it stands.
    pub fn new(file: File) -> Self {
        Self { file: Arc::new(file), unsent: 0, sender: None }
    }

    /// Waits until everything that was written is on the disk.
    ///
    /// # Errors
    /// Also what went wrong in the background and was not reported yet.
    pub fn sync(&mut self) -> io::Result<()> {
        self.end()?;
        self.file.sync_all()
    }

    /// Asks for everything to be on the disk, and waits for nothing.
    fn send(&mut self) -> io::Result<()> {
        if self.sender.is_none() {
            // Without a thread everything waits for the end, as it would in any other file.
            self.sender = Sender::start(&self.file).ok();
        }
        match self.sender.as_ref().map(|sender| sender.ask.try_send(())) {
            // If it is asked for already, it is not too late for what came since.
            None | Some(Ok(()) | Err(TrySendError::Full(()))) => Ok(()),
            // The system tells of a failed write once. The thread has ended with it.
            Some(Err(TrySendError::Disconnected(()))) => self.end(),
        }
    }

    fn end(&mut self) -> io::Result<()> {
        let Some(Sender { ask, thread }) = self.sender.take() else { return Ok(()) };
        drop(ask);
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread that waits for the disk has died")))
    }
}

impl Sender {
    fn start(file: &Arc<File>) -> io::Result<Self> {
        // One may wait while one is on its way.
        let (ask, asked) = sync_channel(1);
        let file = Arc::clone(file);
        let send = move |asked: Receiver<()>| asked.iter().try_for_each(|()| file.sync_data());
        let thread = Builder::new().name("write-behind".to_owned()).spawn(move || send(asked))?;
        Ok(Self { ask, thread })
    }
}

impl Write for Behind {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = (&*self.file).write(&bytes[..bytes.len().min(AT_ONCE)])?;
        self.unsent += written as u64;
        if self.unsent >= STRIDE {
            self.unsent = 0;
            self.send()?;
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for Behind {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        (&*self.file).seek(to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_arrives_in_its_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let mut file = Behind::new(File::create(&path).unwrap());
        let piece: Vec<u8> = (0..1 << 20).map(|n: u32| (n % 251) as u8).collect();
        // Three times asked for at least.
        let pieces = 3 * (STRIDE >> 20) + 1;
        for _ in 0..pieces {
            file.write_all(&piece).unwrap();
        }
        assert!(file.sender.is_some());
        file.seek(SeekFrom::Start(5)).unwrap();
        file.write_all(b"here").unwrap();
        file.sync().unwrap();
        let found = std::fs::read(&path).unwrap();
        assert_eq!(found.len() as u64, pieces << 20);
        assert_eq!(&found[5..9], b"here");
        assert!(found.chunks(1 << 20).skip(1).all(|found| found == piece));
    }

    /// What cannot be synchronised (a pipe) stands for a disk that fails: the error comes, and once.
    #[cfg(unix)]
    #[test]
    fn what_goes_wrong_behind_is_told() {
        let (mut reader, writer) = io::pipe().unwrap();
        let mut file = Behind::new(File::from(std::os::fd::OwnedFd::from(writer)));
        let drain = std::thread::spawn(move || io::copy(&mut reader, &mut io::sink()));
        let piece = vec![0; 1 << 20];
        let mut write_some = |count: u64| (0..count).try_for_each(|_| file.write_all(&piece));
        write_some(STRIDE >> 20).unwrap();
        // The thread ends soon; whoever writes on is told, or whoever ends the file.
        let told = (0..3).find_map(|_| write_some(STRIDE >> 20).err()).or_else(|| file.sync().err());
        let expected = rustix::io::Errno::INVAL.raw_os_error();
        assert_eq!(told.expect("it cannot be synchronised").raw_os_error(), Some(expected));
        drop(file);
        drain.join().unwrap().unwrap();
    }
}
