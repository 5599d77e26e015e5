//! A fleet of models that are numbers.

use std::sync::atomic::AtomicBool;

use tokio::task::JoinSet;

use super::*;

/// Loads and unloads, as they happened.
#[derive(Default)]
struct Story {
    /// Whether something is in memory.
    full: AtomicBool,
    /// `+1` for the load of model 1, `-1` for its end.
    events: Mutex<Vec<String>>,
}

impl Story {
    fn tell(&self, what: String) {
        self.events.lock().unwrap().push(what);
    }

    fn events(&self) -> Vec<String> {
        self.events.lock().unwrap().clone()
    }
}

/// Three models; `load` comes before one is there.
fn fleet(
    idle_unload: Option<Duration>,
    load: impl Fn(usize) -> Result<(), String> + Send + Sync + 'static,
) -> (Arc<Fleet<usize>>, Arc<Story>) {
    let story = Arc::new(Story::default());
    story.full.store(true, Ordering::SeqCst);
    let (of_load, of_unload) = (Arc::clone(&story), Arc::clone(&story));
    let fleet = Arc::new(Fleet::new(Plan {
        names: ["a", "b", "c"].map(str::to_owned).to_vec(),
        first: 0,
        took: Duration::from_millis(1),
        most_waiting: 100,
        idle_unload,
        load: Box::new(move |place, _, progress| {
            progress.set(1, 2);
            load(place)?;
            assert!(!of_load.full.swap(true, Ordering::SeqCst), "two models are in memory");
            of_load.tell(format!("+{place}"));
            Ok(place)
        }),
        unload: Box::new(move |place| {
            of_unload.tell(format!("-{place}"));
            of_unload.full.store(false, Ordering::SeqCst);
        }),
    }));
    tokio::spawn(Arc::clone(&fleet).run());
    (fleet, story)
}

async fn lease(fleet: &Arc<Fleet<usize>>, place: usize) -> Result<Lease<usize>, Refusal> {
    match fleet.ask(place, false)? {
        Turn::Now(lease) => Ok(lease),
        Turn::Later(mut wait, _) => wait.turn().await,
    }
}

fn waits(fleet: &Arc<Fleet<usize>>, place: usize) -> Wait<usize> {
    match fleet.ask(place, false) {
        Ok(Turn::Later(wait, _)) => wait,
        Ok(Turn::Now(_)) => panic!("it need not wait"),
        Err(refusal) => panic!("{refusal}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_clients_of_three_models_are_all_served() {
    let (fleet, story) = fleet(None, |_| Ok(()));
    let mut clients = JoinSet::new();
    for client in 0..24usize {
        let fleet = Arc::clone(&fleet);
        clients.spawn(async move {
            for round in 0..10 {
                let place = (client * 7 + round * 5) % 3;
                // Some lose patience.
                if (client + round) % 4 == 0 {
                    _ = tokio::time::timeout(Duration::from_micros(200), lease(&fleet, place)).await;
                    continue;
                }
                let lease = lease(&fleet, place).await.unwrap();
                for _ in 0..3 {
                    assert_eq!(*lease, place);
                    tokio::task::yield_now().await;
                }
                assert_eq!(fleet.look().standing, Standing::Resident(place));
            }
        });
    }
    while let Some(client) = clients.join_next().await {
        client.unwrap();
    }
    let look = fleet.look();
    assert_eq!(look.waiting, (0, 0));
    // Every load but the last has its end, in turns.
    let events = story.events();
    assert!(events.len() >= 4 && events[0] == "-0", "{events:?}");
    for pair in events.chunks(2) {
        assert!(
            pair[0].starts_with('-') && pair.get(1).is_none_or(|next| next.starts_with('+')),
            "{events:?}"
        );
    }
    let loads: u64 = look.loads.iter().map(|loads| loads.done).sum();
    assert_eq!(loads as usize, 1 + events.iter().filter(|event| event.starts_with('+')).count());
}

#[tokio::test]
async fn a_load_that_fails_or_panics_is_told_and_the_others_are_served() {
    let (fleet, story) = fleet(None, |place| match place {
        1 => Err("the disk is gone".to_owned()),
        2 => panic!("a fault"),
        _ => Ok(()),
    });
    let [mut one, mut two, mut zero] = [1, 2, 0].map(|place| waits(&fleet, place));
    let refusal = one.turn().await.err().unwrap();
    assert!(
        matches!(&refusal, Refusal::Failed { model, reason, .. } if model == "b" && reason == "the disk is gone")
    );
    let refusal = two.turn().await.err().unwrap().to_string();
    assert!(refusal.contains("\"c\"") && refusal.contains("report"), "{refusal}");
    assert_eq!(*zero.turn().await.ok().unwrap(), 0);
    assert!(matches!(fleet.ask(1, false), Err(Refusal::Failed { .. })), "at once, without another try");
    assert_eq!(story.events(), ["-0", "+0"]);
    assert_eq!(fleet.look().loads.iter().map(|loads| loads.failed).collect::<Vec<_>>(), [0, 1, 1]);
}

#[tokio::test]
async fn a_model_that_nobody_uses_leaves() {
    let (fleet, story) = fleet(Some(Duration::from_millis(20)), |_| Ok(()));
    for round in 1..=3 {
        fleet.standing.subscribe().wait_for(|standing| *standing == Standing::Empty).await.unwrap();
        assert_eq!(story.events().len(), 2 * round - 1);
        let held = lease(&fleet, 0).await.unwrap();
        tokio::time::sleep(Duration::from_millis(60)).await;
        assert_eq!(fleet.look().standing, Standing::Resident(0), "it is used");
        drop(held);
    }
}

#[tokio::test]
async fn the_end_waits_for_a_load_but_not_for_ever() {
    let (open, gate) = std::sync::mpsc::channel();
    let gate = Mutex::new(gate);
    let (fleet, _) = fleet(None, move |_| gate.lock().unwrap().recv().unwrap());
    let [mut one, mut two] = [1, 2].map(|place| waits(&fleet, place));
    let loading = |standing: &Standing| matches!(standing, Standing::Loading(1, _));
    fleet.standing.subscribe().wait_for(loading).await.unwrap();
    while fleet.loading(1) != Some((1, 2)) {
        tokio::task::yield_now().await;
    }
    fleet.close();
    assert_eq!(two.turn().await.err(), Some(Refusal::Ending));
    assert_eq!(fleet.settled(Duration::from_millis(10)).await, None);
    open.send(Ok(())).unwrap();
    assert_eq!(fleet.settled(Duration::from_secs(60)).await.as_deref(), Some(&1));
    assert_eq!(*one.turn().await.ok().unwrap(), 1);
    assert!(matches!(fleet.ask(1, false), Err(Refusal::Ending)));
}

#[tokio::test]
async fn who_is_abandoned_is_told() {
    let (open, gate) = std::sync::mpsc::channel();
    let gate = Mutex::new(gate);
    let (fleet, _) = fleet(None, move |_| gate.lock().unwrap().recv().unwrap());
    let mut one = waits(&fleet, 1);
    let loading = |standing: &Standing| matches!(standing, Standing::Loading(1, _));
    fleet.standing.subscribe().wait_for(loading).await.unwrap();
    fleet.close();
    fleet.abandon();
    assert_eq!(one.turn().await.err(), Some(Refusal::Ending));
    open.send(Ok(())).unwrap();
}
