//! What the system asks of a running server.

use std::io;
use std::sync::Arc;

use crate::tls::Tls;

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

/// Reads the certificate again whenever the system asks for it (SIGHUP).
#[cfg(unix)]
pub async fn renew(tls: Arc<Tls>) {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(mut asked) = signal(SignalKind::hangup()) else { return };
    while asked.recv().await.is_some() {
        let tls = Arc::clone(&tls);
        match tokio::task::spawn_blocking(move || tls.reload()).await {
            Ok(Ok(())) => tracing::info!("the certificate was read again"),
            Ok(Err(error)) => tracing::error!("the old certificate stays in use: {error}"),
            Err(_) => {}
        }
    }
}

/// There is no such signal.
#[cfg(not(unix))]
pub async fn renew(_: Arc<Tls>) {}
