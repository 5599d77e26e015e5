//! What the system asks of a running server.

use std::io;
use std::sync::Arc;

use tokio::sync::watch;

use crate::tls::Tls;

/// Says when the process is asked to end, by Ctrl-C or by the system, and ends it at once when it is asked again. A thread
/// of its own watches for as long as the process lives, whatever else is stuck then.
pub fn watch() -> io::Result<watch::Receiver<bool>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // From here on no signal ends the process by itself.
    let mut signals = runtime.block_on(async { Signals::new() })?;
    let (tell, asked) = watch::channel(false);
    let watching = async move {
        signals.next().await;
        tell.send_replace(true);
        let status = signals.next().await;
        tracing::warn!("ending at once");
        std::process::exit(status)
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || runtime.block_on(watching))?;
    Ok(asked)
}

#[cfg(unix)]
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn new() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// The next signal, as the exit status of a process that it ends.
    async fn next(&mut self) -> i32 {
        tokio::select! {
            _ = self.interrupt.recv() => 130,
            _ = self.terminate.recv() => 143,
        }
    }
}

#[cfg(windows)]
struct Signals(tokio::signal::windows::CtrlC);

#[cfg(windows)]
impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self(tokio::signal::windows::ctrl_c()?))
    }

    async fn next(&mut self) -> i32 {
        _ = self.0.recv().await;
        130
    }
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
