//! Threads that make things, and one that takes them in order.

use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

/// Calls `take` with what `make` makes of 0, 1, ... `count - 1`, in this order, while `threads` threads make them.
/// Each thread holds at most `ahead` finished things beside the one it is making. Ends early with the first error
/// of `take`.
pub fn in_order<T: Send, E>(
    count: usize,
    threads: usize,
    ahead: usize,
    make: impl Fn(usize) -> T + Sync,
    mut take: impl FnMut(usize, T) -> Result<(), E>,
) -> Result<(), E> {
    let threads = threads.clamp(1, count.max(1));
    let make = &make;
    thread::scope(|scope| {
        // Thread t makes everything whose number is t modulo the number of threads. It ends when that does, or when
        // nobody takes it any more.
        let makers: Vec<Receiver<T>> = (0..threads)
            .map(|first| {
                let (give, receiver) = sync_channel(ahead);
                scope.spawn(move || {
                    for number in (first..count).step_by(threads) {
                        if give.send(make(number)).is_err() {
                            return;
                        }
                    }
                });
                receiver
            })
            .collect();
        for number in 0..count {
            // Only a thread that died gives nothing; the scope then passes its panic on.
            let Ok(made) = makers[number % threads].recv() else { break };
            take(number, made)?;
        }
        Ok(())
    })
}
