//! Several models by name, one of them in memory.
//!
//! A request takes a [`Lease`] of its model, at once or when its [`Turn`] comes; while there are leases the model stays.
//! A state machine decides who is next; [`Fleet::run`] does what it says, loading and unloading on threads that may block.
//! What is in memory is the business of whoever makes a fleet: here it is any `S`, in the server a
//! [`Resident`](crate::resident::Resident).

mod line;

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, oneshot, watch};
use tokio::task::JoinHandle;

use line::{Asked, Line, Step};
pub use line::{Loads, Refusal, Standing, TRY_AGAIN};

/// Loads a model by its number. Gets what was in memory before, and tells how far it is.
pub type Load<S> = dyn Fn(usize, &S, &LoadProgress) -> Result<S, String> + Send + Sync;
/// Takes a model out of memory: when it returns, there has to be room for another one.
pub type Unload<S> = dyn Fn(&S) + Send + Sync;

/// How far a load is, in bytes.
#[derive(Debug, Default)]
pub struct LoadProgress {
    done: AtomicU64,
    total: AtomicU64,
}

impl LoadProgress {
    /// So much is done of all.
    pub fn set(&self, done: u64, total: u64) {
        self.done.store(done, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
    }

    /// Bytes done, and all; 0 of 0 where nobody knows yet.
    pub fn get(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed))
    }
}

/// What a fleet is made of.
pub struct Plan<S> {
    /// The names of the models.
    pub names: Vec<String>,
    /// The first of them, which is in memory.
    pub first: S,
    /// What loading it took.
    pub took: Duration,
    /// Most requests that wait for a model, batch work apart.
    pub most_waiting: usize,
    /// After so long without requests the model in memory leaves it.
    pub idle_unload: Option<Duration>,
    /// How models are loaded.
    pub load: Box<Load<S>>,
    /// How they are taken out of memory.
    pub unload: Box<Unload<S>>,
}

/// Models, and the one that is in memory.
pub struct Fleet<S> {
    inner: Mutex<Inner<S>>,
    /// Somebody came, or left.
    changed: Notify,
    standing: watch::Sender<Standing>,
    progress: LoadProgress,
    load: Box<Load<S>>,
    unload: Box<Unload<S>>,
}

/// Where somebody who waits hears of the end of that.
type Told<S> = oneshot::Sender<Result<Lease<S>, Refusal>>;

struct Inner<S> {
    line: Line,
    /// What is in memory, or was there last.
    last: Arc<S>,
    /// By their numbers: whether they are batch work, and where they are told.
    waits: HashMap<u64, (bool, Told<S>)>,
}

/// How everything stands.
pub struct Look<S> {
    /// What is in memory, or was there last.
    pub last: Arc<S>,
    /// What is in memory.
    pub standing: Standing,
    /// Requests that wait for a model: those that somebody waits for, and batch work.
    pub waiting: (usize, usize),
    /// What was counted, by model.
    pub loads: Vec<Loads>,
    /// Whether the end has begun.
    pub closed: bool,
}

/// What becomes of a request at once.
pub enum Turn<S> {
    /// It may begin.
    Now(Lease<S>),
    /// It waits, behind so many.
    Later(Wait<S>, usize),
}

/// Work that lies on a thread that may block.
enum Done<S> {
    Loaded(Result<S, String>),
    Unloaded,
}

impl<S> Fleet<S> {
    fn lock(&self) -> MutexGuard<'_, Inner<S>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: Send + Sync + 'static> Fleet<S> {
    /// A fleet of these models. Nothing is loaded or unloaded unless it [runs](Self::run).
    pub fn new(plan: Plan<S>) -> Self {
        let Plan { names, first, took, most_waiting, idle_unload, load, unload } = plan;
        let line = Line::new(names, most_waiting, idle_unload, took, Instant::now());
        let standing = watch::Sender::new(line.standing());
        let inner = Mutex::new(Inner { line, last: Arc::new(first), waits: HashMap::new() });
        Self { inner, changed: Notify::new(), standing, progress: LoadProgress::default(), load, unload }
    }

    /// A request for a model. `batch` says that nobody waits for it.
    ///
    /// # Errors
    /// If there is no use in waiting.
    pub fn ask(self: &Arc<Self>, place: usize, batch: bool) -> Result<Turn<S>, Refusal> {
        let mut inner = self.lock();
        match inner.line.ask(place, batch, Instant::now())? {
            Asked::Now => Ok(Turn::Now(self.lease(&inner, batch))),
            Asked::Waits { ticket, ahead } => {
                let (send, granted) = oneshot::channel();
                inner.waits.insert(ticket, (batch, send));
                drop(inner);
                self.changed.notify_one();
                let wait = Wait { fleet: Arc::clone(self), ticket, granted };
                Ok(Turn::Later(wait, ahead))
            }
        }
    }

    fn lease(self: &Arc<Self>, inner: &Inner<S>, batch: bool) -> Lease<S> {
        Lease { fleet: Arc::clone(self), what: Arc::clone(&inner.last), batch }
    }

    /// How everything stands.
    pub fn look(&self) -> Look<S> {
        let inner = self.lock();
        Look {
            last: Arc::clone(&inner.last),
            standing: inner.line.standing(),
            waiting: inner.line.waiting(),
            loads: inner.line.loads().to_vec(),
            closed: inner.line.is_closed(),
        }
    }

    /// How far the load of this model is, if it is being loaded.
    pub fn loading(&self, place: usize) -> Option<(u64, u64)> {
        let standing = self.lock().line.standing();
        matches!(standing, Standing::Loading(loading, _) if loading == place).then(|| self.progress.get())
    }

    /// Time until this model is in memory, where that is known.
    pub fn until_loaded(&self, place: usize) -> Option<Duration> {
        self.lock().line.until_loaded(place, Instant::now())
    }

    /// The end begins: nothing new is taken, and no model is loaded that is not being loaded now. Whoever waits for
    /// another one is told.
    pub fn close(&self) {
        self.lock().line.close();
        self.changed.notify_one();
    }

    /// What is in memory, once nothing is being loaded or unloaded any more, for at most as long as `patience`. To be
    /// called after [`close`](Self::close), so that it stays so.
    pub async fn settled(&self, patience: Duration) -> Option<Arc<S>> {
        let mut standing = self.standing.subscribe();
        let rests = |standing: &Standing| matches!(standing, Standing::Empty | Standing::Resident(_));
        let found = tokio::time::timeout(patience, standing.wait_for(rests)).await.ok()?.ok()?;
        let resident = matches!(*found, Standing::Resident(_));
        drop(found);
        resident.then(|| Arc::clone(&self.lock().last))
    }

    /// Tells all who wait that their turn does not come.
    pub fn abandon(&self) {
        let waits = std::mem::take(&mut self.lock().waits);
        // Not while the lock is held: who waits may have been given a model already.
        drop(waits);
    }

    /// Does what is to be done, for ever.
    pub async fn run(self: Arc<Self>) {
        let mut work: Option<JoinHandle<Done<S>>> = None;
        loop {
            let until = self.act(&mut work);
            let sleeps = async {
                match until {
                    Some(until) => tokio::time::sleep_until(until.into()).await,
                    None => std::future::pending().await,
                }
            };
            let working = async {
                match work.as_mut() {
                    Some(work) => work.await,
                    None => std::future::pending().await,
                }
            };
            let done = tokio::select! {
                () = self.changed.notified() => continue,
                () = sleeps => continue,
                done = working => done,
            };
            work = None;
            self.done(done);
        }
    }

    /// Does all that is to be done now, and says until when nothing is unless something happens.
    fn act(self: &Arc<Self>, work: &mut Option<JoinHandle<Done<S>>>) -> Option<Instant> {
        loop {
            let mut inner = self.lock();
            let step = inner.line.step(Instant::now());
            self.standing.send_replace(inner.line.standing());
            match step {
                Step::Grant(ticket) => {
                    let wait = inner.waits.remove(&ticket);
                    let granted = wait.map(|(batch, wait)| (self.lease(&inner, batch), wait));
                    drop(inner);
                    // What nobody takes gives itself back.
                    _ = granted.map(|(lease, wait)| wait.send(Ok(lease)));
                }
                Step::Refuse(ticket, refusal) => {
                    let wait = inner.waits.remove(&ticket);
                    drop(inner);
                    _ = wait.map(|(_, wait)| wait.send(Err(refusal)));
                }
                Step::Load(place) => *work = Some(self.load(place, Arc::clone(&inner.last))),
                Step::Unload => {
                    let (fleet, last) = (Arc::clone(self), Arc::clone(&inner.last));
                    *work = Some(tokio::task::spawn_blocking(move || {
                        (fleet.unload)(&last);
                        Done::Unloaded
                    }));
                }
                Step::Rest(until) => return until,
            }
        }
    }

    fn load(self: &Arc<Self>, place: usize, last: Arc<S>) -> JoinHandle<Done<S>> {
        let fleet = Arc::clone(self);
        fleet.progress.set(0, 0);
        tokio::task::spawn_blocking(move || Done::Loaded((fleet.load)(place, &last, &fleet.progress)))
    }

    fn done(&self, done: Result<Done<S>, tokio::task::JoinError>) {
        let mut inner = self.lock();
        let loads = matches!(inner.line.standing(), Standing::Loading(..));
        match done {
            Ok(Done::Loaded(Ok(what))) => {
                inner.last = Arc::new(what);
                inner.line.loaded(Ok(()), Instant::now());
            }
            Ok(Done::Loaded(Err(reason))) => inner.line.loaded(Err(reason), Instant::now()),
            Err(fault) if loads => {
                let reason = format!("a fault of the program ({fault}); please report this");
                inner.line.loaded(Err(reason), Instant::now());
            }
            Ok(Done::Unloaded) => inner.line.unloaded(),
            Err(fault) => {
                tracing::error!(%fault, "a model was not put away properly; please report this");
                inner.line.unloaded();
            }
        }
    }
}

/// A model in memory, which stays there as long as this does.
pub struct Lease<S> {
    fleet: Arc<Fleet<S>>,
    what: Arc<S>,
    batch: bool,
}

impl<S> Deref for Lease<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.what
    }
}

impl<S> Drop for Lease<S> {
    fn drop(&mut self) {
        self.fleet.lock().line.release(self.batch, Instant::now());
        self.fleet.changed.notify_one();
    }
}

/// A request whose turn has not come. Dropping it leaves the line.
pub struct Wait<S> {
    fleet: Arc<Fleet<S>>,
    ticket: u64,
    granted: oneshot::Receiver<Result<Lease<S>, Refusal>>,
}

impl<S> Wait<S> {
    /// Waits for the turn. May be given up and called again, until it has returned.
    ///
    /// # Errors
    /// If it never comes.
    pub async fn turn(&mut self) -> Result<Lease<S>, Refusal> {
        (&mut self.granted).await.unwrap_or(Err(Refusal::Ending))
    }
}

impl<S> Drop for Wait<S> {
    fn drop(&mut self) {
        let mut inner = self.fleet.lock();
        inner.line.leave(self.ticket);
        let sender = inner.waits.remove(&self.ticket);
        drop(inner);
        drop(sender);
        self.fleet.changed.notify_one();
    }
}

#[cfg(test)]
mod tests;
