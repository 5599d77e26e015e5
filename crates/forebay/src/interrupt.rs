//! Ctrl-C: the first one stops the work in hand, the next one the program.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_core::CancelToken;

use crate::failure::{Exit, Failure};

/// The handler's view of the program. Only one may exist in a process.
pub struct Interrupt {
    token: CancelToken,
    /// Whether something is running that looks at the token.
    stoppable: Arc<AtomicBool>,
}

impl Interrupt {
    /// Takes over Ctrl-C. Outside [`during`](Self::during) it ends the program at once.
    pub fn install() -> Result<Self, Failure> {
        let (token, stoppable) = (CancelToken::new(), Arc::new(AtomicBool::new(false)));
        let (seen, running) = (token.clone(), stoppable.clone());
        let handler = move || {
            if running.load(Ordering::SeqCst) && !seen.is_cancelled() {
                seen.cancel();
            } else {
                std::process::exit(Exit::Interrupted as i32);
            }
        };
        ctrlc::set_handler(handler).map_err(|error| {
            Failure::runtime(format!("cannot handle Ctrl-C: {error}; start forebay in an ordinary terminal"))
        })?;
        Ok(Self { token, stoppable })
    }

    /// Runs `work`, which ends early when the token that it is given is raised.
    pub fn during<T>(&self, work: impl FnOnce(&CancelToken) -> T) -> T {
        self.token.reset();
        self.stoppable.store(true, Ordering::SeqCst);
        let result = work(&self.token);
        self.stoppable.store(false, Ordering::SeqCst);
        result
    }
}
