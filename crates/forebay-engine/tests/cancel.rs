//! A cancelled prompt: it stops within a layer, takes its reads back, and leaves an engine that is right.

mod common;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use common::{all_logits, demo, eval, ids};
use forebay_core::{ByteSize, CancelToken};
use forebay_engine::{Engine, EngineOptions, Event, Finish, Request, Sampling, Session, inspect};
use forebay_io::{Access, ReaderConfig, Roots, Shard};
use forebay_model::Trace;
use forebay_testkit::fault::{Faults, FaultyDisk};

/// Raises the token when the layer has routed its last row, and counts what is read.
struct CancelIn {
    layer: usize,
    last: usize,
    cancel: CancelToken,
    disks: Vec<Arc<FaultyDisk>>,
    reads: Option<u64>,
    /// Layers that routed after that.
    later: usize,
}

fn reads(disks: &[Arc<FaultyDisk>]) -> u64 {
    disks.iter().map(|disk| disk.reads()).sum()
}

impl Trace for CancelIn {
    fn routed(&mut self, layer: usize, position: usize, _: &[u32], _: &[f32]) {
        self.later += usize::from(self.reads.is_some() && layer > self.layer);
        if layer == self.layer && position == self.last {
            self.cancel.cancel();
            self.reads = Some(reads(&self.disks));
        }
    }
}

#[test]
fn a_cancelled_prompt_stops_within_a_layer_and_takes_its_reads_back() {
    let mut options = EngineOptions { context: Some(128), chunk: Some(128), ..Default::default() };
    options.io.access = Some(Access::Buffered);
    let plan = inspect(&demo(), &options).unwrap().plan.unwrap();
    options.memory = Some(ByteSize(plan.minimum + 2 * plan.slot_row()));
    let mut disks = Vec::new();
    let mut engine = Engine::open_over(&demo(), options, &mut |_, _| {}, &mut |shards, _| {
        let slow = shards.iter().map(|shard| {
            let disk = Arc::new(FaultyDisk::over(Arc::clone(&shard.file), Faults::default()));
            disks.push(Arc::clone(&disk));
            Shard { path: shard.path.clone(), file: disk as _ }
        });
        Ok(Roots::from(slow.collect::<Vec<_>>()))
    })
    .unwrap();
    let heldout = eval("heldout.json");
    let prompt: Vec<u32> = ids(&heldout["segments"][0]["windows"][0]).into_iter().take(120).collect();
    let request = Request { prompt: &prompt, max_tokens: 1, sampling: Sampling::greedy(), stops: &[] };
    // What the prompt reads when nobody stops it.
    let before = reads(&disks);
    let want = all_logits(&mut engine, &prompt);
    let all = reads(&disks) - before;

    for layer in [3, 5, 7] {
        let before = reads(&disks);
        disks
            .iter()
            .for_each(|disk| disk.set(Faults { latency: Duration::from_millis(4), ..Faults::default() }));
        let cancel = CancelToken::new();
        let mut trace = CancelIn {
            layer,
            last: prompt.len() - 1,
            cancel: cancel.clone(),
            disks: disks.clone(),
            reads: None,
            later: 0,
        };
        let mut session = Session::new(&engine);
        let mut seen = 0;
        let done = session.generate(&mut engine, &request, &cancel, Some(&mut trace), &mut |event| {
            if let Event::Prefill { done, total, read, left } = event {
                assert!(done >= seen && total == prompt.len() && read.is_some() && left.is_some());
                seen = done;
            }
            ControlFlow::Continue(())
        });
        assert_eq!(done.unwrap().finish, Finish::Cancelled, "layer {layer}");
        assert_eq!(trace.later, 0, "layer {layer}: no other layer begins");
        assert!(session.tokens().is_empty() && seen < prompt.len());
        // What was on its way arrives; what was queued never starts.
        let mut now = reads(&disks);
        loop {
            thread::sleep(Duration::from_millis(60));
            let later = reads(&disks);
            if later == now {
                break;
            }
            now = later;
        }
        let after = now - trace.reads.unwrap();
        let workers = 2 * ReaderConfig::default().workers as u64;
        let begun = trace.reads.unwrap() - before;
        assert!(after <= 3 * workers, "layer {layer}: {after} reads began after the cancellation");
        assert!(begun + after < all, "layer {layer}: {begun} and {after} of {all}");

        disks.iter().for_each(|disk| disk.set(Faults::default()));
        let bits = |rows: &[Vec<f32>]| rows.iter().flatten().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert!(
            bits(&all_logits(&mut engine, &prompt)) == bits(&want),
            "layer {layer}: the next request is right"
        );
    }
}
