//! What the system asks of a running server.

use std::io;

/// Waits until the server is asked to end: by Ctrl-C, or by the system.
#[cfg(unix)]
pub async fn asked_to_end() -> io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    Ok(())
}

/// Waits until the server is asked to end: by Ctrl-C.
#[cfg(not(unix))]
pub async fn asked_to_end() -> io::Result<()> {
    tokio::signal::ctrl_c().await
}
