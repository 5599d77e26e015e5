//! What is to be read, what is being read and what is done, in one place and under one lock.
//!
//! The rules of priority are here: nothing starts while something more urgent is queued, and what is not demanded
//! neither starts nor goes on while a demand is outstanding; what is to warm up, while anything else is read.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Done, Job};

/// How urgent a job is; the most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// Compute waits for it.
    Demand,
    /// Compute is expected to want it soon.
    Predicted,
    /// It may be wanted some time.
    WarmUp,
}

impl Priority {
    /// The most urgent first.
    pub const ALL: [Priority; 3] = [Priority::Demand, Priority::Predicted, Priority::WarmUp];
}

/// How well demands were served, in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gauge {
    /// At least one demand was queued or being read.
    pub outstanding: Duration,
    /// A demand was queued and none was being read: the disk was idle for no reason but the time a worker
    /// takes to wake up.
    pub idle: Duration,
    /// Demands being read, times for how long: the mean queue depth, times `outstanding`.
    pub reading: Duration,
}

impl Gauge {
    /// Demands being read at a time, on average, while one was outstanding.
    pub fn mean_depth(&self) -> f64 {
        self.reading.as_secs_f64() / self.outstanding.as_secs_f64().max(1e-9)
    }
}

/// Which jobs somebody can take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// All.
    Any,
    /// With a transform.
    Transformed,
    /// Without one.
    #[cfg(target_os = "linux")]
    Plain,
}

impl Kind {
    fn has(self, job: &Job) -> bool {
        match self {
            Kind::Any => true,
            Kind::Transformed => job.transform.is_some(),
            #[cfg(target_os = "linux")]
            Kind::Plain => job.transform.is_none(),
        }
    }
}

/// Which of the two sorts of worker asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// Reads what compute waits for.
    Demand,
    /// Reads the rest, in the meantime.
    Ahead,
}

/// A job that was taken.
pub(super) struct Taken {
    pub job: Job,
    /// Names it towards the queue; tags are the caller's affair.
    pub serial: u64,
}

/// Whether a job that is being read may go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    Go,
    Wait,
    GiveUp,
}

#[derive(Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    /// Signalled when a demand is queued or the queue closes.
    demand: Condvar,
    /// Signalled when jobs of lower priority may start, go on or have to give up.
    ahead: Condvar,
    /// Signalled when a job is done or taken back.
    done: Condvar,
    #[cfg(target_os = "linux")]
    wake: std::sync::OnceLock<super::uring::Wake>,
}

#[derive(Default)]
struct State {
    /// Jobs to warm up that may be read at a time: never all that may be read besides demands, or a
    /// predicted one would wait for the end of one of them.
    warm_ups: usize,
    queued: [VecDeque<Job>; 3],
    running: Vec<Running>,
    done: VecDeque<Done>,
    closed: bool,
    serial: u64,
    gauge: Gauge,
    /// When the gauge was brought up to date.
    since: Option<Instant>,
}

struct Running {
    serial: u64,
    tag: u64,
    priority: Priority,
    give_up: bool,
}

impl State {
    fn in_flight(&self) -> usize {
        self.queued.iter().map(VecDeque::len).sum::<usize>() + self.running.len() + self.done.len()
    }

    fn demands_running(&self) -> usize {
        self.reading(Priority::Demand)
    }

    fn reading(&self, priority: Priority) -> usize {
        self.running.iter().filter(|running| running.priority == priority).count()
    }

    fn demand_outstanding(&self) -> bool {
        !self.queued[0].is_empty() || self.demands_running() > 0
    }

    /// Accounts for the time since the last change; to be called before every change.
    fn tick(&mut self) {
        let now = Instant::now();
        let past = self.since.replace(now).map_or(Duration::ZERO, |since| now.duration_since(since));
        let running = self.demands_running();
        if running > 0 || !self.queued[0].is_empty() {
            self.gauge.outstanding += past;
            self.gauge.reading += past * u32::try_from(running).unwrap_or(u32::MAX);
        }
        if running == 0 && !self.queued[0].is_empty() {
            self.gauge.idle += past;
        }
    }

    /// The next job for that side, if it may start now.
    fn take(&mut self, side: Side, kind: Kind) -> Option<Taken> {
        let most_urgent = Priority::ALL.into_iter().find(|p| !self.queued[*p as usize].is_empty())?;
        let allowed = match side {
            Side::Demand => most_urgent == Priority::Demand,
            Side::Ahead if most_urgent == Priority::WarmUp => {
                let guess = self.reading(Priority::Predicted) > 0;
                !guess && !self.demand_outstanding() && self.reading(Priority::WarmUp) < self.warm_ups
            }
            Side::Ahead => !self.demand_outstanding(),
        };
        let queue = &self.queued[most_urgent as usize];
        let at = queue.iter().position(|job| kind.has(job)).filter(|_| allowed)?;
        self.tick();
        let job = self.queued[most_urgent as usize].remove(at)?;
        self.serial += 1;
        let (serial, tag) = (self.serial, job.tag);
        self.running.push(Running { serial, tag, priority: most_urgent, give_up: false });
        Some(Taken { job, serial })
    }

    fn pass(&self, serial: u64) -> Pass {
        match self.running.iter().find(|running| running.serial == serial) {
            Some(running) if running.priority == Priority::Demand => Pass::Go,
            Some(running) if !running.give_up && !self.closed => {
                let guess = running.priority == Priority::WarmUp && self.reading(Priority::Predicted) > 0;
                match guess || self.demand_outstanding() {
                    true => Pass::Wait,
                    false => Pass::Go,
                }
            }
            _ => Pass::GiveUp,
        }
    }
}

impl Queue {
    /// A queue whose jobs besides demands are read `ahead` at a time.
    pub fn new(ahead: usize) -> Self {
        let warm_ups = ahead.saturating_sub(1).max(1);
        Self { state: Mutex::new(State { warm_ups, ..State::default() }), ..Self::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change of the state is complete when the lock is let go.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a ring hear of changes too.
    #[cfg(target_os = "linux")]
    pub fn also_wake(&self, wake: super::uring::Wake) {
        let _ = self.wake.set(wake);
    }

    fn wake_ring(&self) {
        #[cfg(target_os = "linux")]
        if let Some(wake) = self.wake.get() {
            wake.up();
        }
    }

    pub fn submit(&self, priority: Priority, job: Job) {
        let mut state = self.lock();
        state.tick();
        state.queued[priority as usize].push_back(job);
        drop(state);
        match priority {
            Priority::Demand => self.demand.notify_one(),
            _ => self.ahead.notify_all(),
        }
        self.wake_ring();
    }

    pub fn recv(&self) -> Option<Done> {
        let mut state = self.lock();
        loop {
            if let Some(done) = state.done.pop_front() {
                return Some(done);
            }
            if state.in_flight() == 0 {
                return None;
            }
            state = self.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub fn recv_timeout(&self, most: Duration) -> Option<Done> {
        let waits = |state: &mut State| state.done.is_empty() && state.in_flight() > 0;
        let waited = self.done.wait_timeout_while(self.lock(), most, waits);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.done.pop_front()
    }

    pub fn try_recv(&self) -> Option<Done> {
        self.lock().done.pop_front()
    }

    pub fn in_flight(&self) -> usize {
        self.lock().in_flight()
    }

    pub fn is_busy(&self) -> bool {
        let state = self.lock();
        state.in_flight() > state.done.len()
    }

    pub fn gauge(&self) -> Gauge {
        let mut state = self.lock();
        state.tick();
        state.gauge
    }

    pub fn withdraw(&self, least_urgent: Priority) -> Vec<Job> {
        let mut state = self.lock();
        state.tick();
        let jobs = state.queued[least_urgent as usize..].iter_mut().flat_map(std::mem::take).collect();
        drop(state);
        self.queue_shrank();
        jobs
    }

    pub fn cancel(&self, tag: u64) -> Option<Job> {
        let mut state = self.lock();
        state.tick();
        let job = state.queued.iter_mut().find_map(|queue| take_tag(queue, tag));
        drop(state);
        self.queue_shrank();
        job
    }

    /// Whoever waits may have been waiting for one of these, and what is less urgent may start.
    fn queue_shrank(&self) {
        self.done.notify_all();
        self.ahead.notify_all();
        self.wake_ring();
    }

    pub fn promote(&self, tag: u64) -> bool {
        let mut state = self.lock();
        state.tick();
        let queued = state.queued[1..].iter_mut().find_map(|queue| take_tag(queue, tag));
        let found = match queued {
            Some(job) => {
                state.queued[0].push_back(job);
                true
            }
            None => {
                let running = state.running.iter_mut().find(|running| running.tag == tag && !running.give_up);
                running.map(|running| running.priority = Priority::Demand).is_some()
            }
        };
        drop(state);
        self.demand.notify_one();
        self.ahead.notify_all();
        self.wake_ring();
        found
    }

    pub fn abort(&self, tag: u64) -> bool {
        let mut state = self.lock();
        let mut running = state.running.iter_mut();
        let found = running.find(|running| running.tag == tag && running.priority != Priority::Demand);
        let found = found.map(|running| running.give_up = true).is_some();
        drop(state);
        self.ahead.notify_all();
        self.wake_ring();
        found
    }

    /// Blocks until there is a job; `None` when the queue closes.
    pub fn next(&self, side: Side, kind: Kind) -> Option<Taken> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            if let Some(taken) = state.take(side, kind) {
                return Some(taken);
            }
            let signal = match side {
                Side::Demand => &self.demand,
                Side::Ahead => &self.ahead,
            };
            state = signal.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A job, if one may start now.
    #[cfg(target_os = "linux")]
    pub fn try_next(&self, side: Side, kind: Kind) -> Option<Taken> {
        let mut state = self.lock();
        if state.closed { None } else { state.take(side, kind) }
    }

    #[cfg(target_os = "linux")]
    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Whether the job may go on now.
    pub fn pass(&self, serial: u64) -> Pass {
        self.lock().pass(serial)
    }

    /// Blocks until the job may go on (`true`) or has to give up.
    pub fn wait_to_pass(&self, serial: u64) -> bool {
        let mut state = self.lock();
        loop {
            match state.pass(serial) {
                Pass::Go => return true,
                Pass::GiveUp => return false,
                Pass::Wait => state = self.ahead.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    pub fn finish(&self, serial: u64, done: Done) {
        let mut state = self.lock();
        state.tick();
        state.running.retain(|running| running.serial != serial);
        state.done.push_back(done);
        drop(state);
        self.done.notify_all();
        self.ahead.notify_all();
        self.wake_ring();
    }

    /// Ends everything; returns what had not started, so that slabs go home outside the lock.
    pub fn close(&self) -> Vec<Job> {
        let mut state = self.lock();
        state.closed = true;
        let jobs = state.queued.iter_mut().flat_map(std::mem::take).collect();
        drop(state);
        self.demand.notify_all();
        self.ahead.notify_all();
        self.wake_ring();
        jobs
    }
}

fn take_tag(queue: &mut VecDeque<Job>, tag: u64) -> Option<Job> {
    let at = queue.iter().position(|job| job.tag == tag)?;
    queue.remove(at)
}
