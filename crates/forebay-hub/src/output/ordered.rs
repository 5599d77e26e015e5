//! Threads make pieces, and the caller's thread takes them in order: what comes out does not depend on how many
//! threads there are, and none is more than a few pieces ahead.

use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

/// Pieces that a thread may be ahead of the taker where pieces are small. At any time it holds these, one that waits
/// to be handed over or is being made, and one may be in the taker's hand.
pub const AHEAD: usize = 2;

/// Makes every piece with up to `threads` threads, each at most `ahead` pieces ahead, and hands each to `take`, in
/// order. Ends at the first error.
pub fn in_order<P: Sync, T: Send, E>(
    pieces: &[P],
    threads: usize,
    ahead: usize,
    make: impl Fn(&P) -> T + Sync,
    mut take: impl FnMut(&P, T) -> Result<(), E>,
) -> Result<(), E> {
    let threads = threads.clamp(1, pieces.len().max(1));
    let make = &make;
    thread::scope(|scope| {
        // Thread t makes every piece whose number is t modulo the number of threads. It ends when its pieces do, or
        // when nobody takes them any more.
        let makers: Vec<Receiver<T>> = (0..threads)
            .map(|first| {
                let (give, taken) = sync_channel(ahead);
                let mut mine = pieces.iter().skip(first).step_by(threads);
                scope.spawn(move || mine.try_for_each(|piece| give.send(make(piece))).is_ok());
                taken
            })
            .collect();
        for (number, piece) in pieces.iter().enumerate() {
            // Only a thread that died gives nothing; the scope then passes its panic on.
            let Ok(made) = makers[number % threads].recv() else { break };
            take(piece, made)?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn pieces_come_in_order_and_an_error_ends_it() {
        let pieces: Vec<usize> = (0..100).collect();
        for threads in [0, 1, 3, 200] {
            let mut seen = Vec::new();
            let take = |_: &usize, made| {
                seen.push(made);
                Ok::<_, ()>(())
            };
            in_order(&pieces, threads, AHEAD, |n| n * 2, take).unwrap();
            assert!(seen.iter().enumerate().all(|(n, made)| *made == 2 * n) && seen.len() == 100);
        }
        let made = AtomicUsize::new(0);
        let count = |n: &usize| {
            made.fetch_add(1, Ordering::Relaxed);
            *n
        };
        let stop = |_: &usize, n| if n < 5 { Ok(()) } else { Err(n) };
        assert_eq!(in_order(&pieces, 2, AHEAD, count, stop), Err(5));
        assert!(made.load(Ordering::Relaxed) <= 6 + 2 * (AHEAD + 1));
        in_order(&[] as &[usize], 4, AHEAD, |n| *n, |_, _| Err(())).unwrap();
    }
}
