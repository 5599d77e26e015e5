//! Connections: taken in, watched over, and let go.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, Sleep};
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt;

use crate::app::App;

/// Most bytes of the head of a request.
pub const MAX_HEAD: usize = 64 << 10;
/// Most headers of a request.
const MAX_HEADERS: usize = 100;
/// Before another try where the system has no room for a connection.
const NO_ROOM: Duration = Duration::from_millis(100);

/// Serves connections until the end begins, and then until they are done: how long that may take is up to the caller.
pub async fn serve(app: Arc<App>, router: Router, listener: TcpListener, mut ending: watch::Receiver<bool>) {
    let room = Arc::new(Semaphore::new(app.settings.max_connections));
    let all = app.settings.max_connections as u32;
    loop {
        // Those that find no room wait in the system's queue.
        let next = async {
            let permit = Arc::clone(&room).acquire_owned().await.map_err(io::Error::other)?;
            Ok((permit, listener.accept().await?.0))
        };
        let next: io::Result<_> = tokio::select! {
            next = next => next,
            () = begins(&mut ending) => break,
        };
        let (permit, stream) = match next {
            Ok(next) => next,
            Err(error) => {
                tracing::warn!(%error, "a connection was not taken in");
                tokio::time::sleep(NO_ROOM).await;
                continue;
            }
        };
        let (app, router, ending) = (Arc::clone(&app), router.clone(), ending.clone());
        tokio::spawn(async move {
            app.metrics.connections.add(1);
            connection(&app, router, stream, ending).await;
            app.metrics.connections.take(1);
            drop(permit);
        });
    }
    app.ending.store(true, Ordering::Relaxed);
    drop(listener);
    // When all permits are back, nobody is connected.
    _ = room.acquire_many(all).await;
}

/// Waits for the end to begin.
async fn begins(ending: &mut watch::Receiver<bool>) {
    _ = ending.wait_for(|ending| *ending).await;
}

async fn connection(app: &App, router: Router, stream: TcpStream, mut ending: watch::Receiver<bool>) {
    // Tokens are small and each is wanted at once.
    _ = stream.set_nodelay(true);
    let patience = app.settings.patience;
    let stream = Patient { inner: stream, patience, waits: None };
    let Some(tls) = &app.settings.tls else { return requests(stream, router, patience, ending).await };
    let agreed = tokio::select! {
        agreed = tokio::time::timeout(patience, TlsAcceptor::from(tls.config()).accept(stream)) => agreed,
        () = begins(&mut ending) => return,
    };
    match agreed {
        Ok(Ok(stream)) => requests(stream, router, patience, ending).await,
        Ok(Err(error)) => tracing::debug!(%error, "no encryption was agreed on"),
        Err(_) => tracing::debug!("a client takes too long to agree on encryption"),
    }
}

/// Answers the requests of a connection.
async fn requests(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    router: Router,
    patience: Duration,
    mut ending: watch::Receiver<bool>,
) {
    let io = TokioIo::new(stream);
    let service = hyper::service::service_fn(move |request: hyper::Request<Incoming>| {
        router.clone().oneshot(request.map(Body::new))
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(patience)
        .max_buf_size(MAX_HEAD)
        .max_headers(MAX_HEADERS)
        .keep_alive(true);
    let served = http.serve_connection(io, service);
    tokio::pin!(served);
    let early = tokio::select! {
        ended = served.as_mut() => Some(ended),
        () = begins(&mut ending) => None,
    };
    let ended = match early {
        Some(ended) => ended,
        None => {
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended early");
    }
}

/// A socket whose other side has to take what is sent within some time.
struct Patient {
    inner: TcpStream,
    patience: Duration,
    /// Since when a write waits.
    waits: Option<Pin<Box<Sleep>>>,
}

impl Patient {
    /// The outcome of a write that may wait, but not for ever.
    fn within<T>(&mut self, context: &mut Context<'_>, done: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if done.is_ready() {
            self.waits = None;
            return done;
        }
        let patience = self.patience;
        let waits =
            self.waits.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + patience)));
        ready!(waits.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read")))
    }
}

impl AsyncRead for Patient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}

impl AsyncWrite for Patient {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let done = Pin::new(&mut self.inner).poll_write(context, bytes);
        self.within(context, done)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let done = Pin::new(&mut self.inner).poll_flush(context);
        self.within(context, done)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let done = Pin::new(&mut self.inner).poll_shutdown(context);
        self.within(context, done)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let done = Pin::new(&mut self.inner).poll_write_vectored(context, slices);
        self.within(context, done)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}
