//! Plans for people.

use std::fmt::{Display, Write};

use forebay_core::ByteSize;
use forebay_engine::{
    Bound, BudgetFrom, Consumer, Expectation, Inspection, ModelFacts, Plan, Rates, SlotChoice,
};
use forebay_model::{EmbeddingPlace, SlotCodes};

use super::Look;
use crate::console;
use crate::tune;

/// Lines of a name and a text.
struct Page(String);

impl Page {
    fn row(&mut self, name: &str, value: impl Display) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "{name:<10}{}", console::one_line(&value.to_string()));
    }

    /// A share of the level above.
    fn part(&mut self, bytes: u64, what: impl Display) {
        self.row("", format_args!("{:>10}  {what}", ByteSize(bytes).to_string()));
    }

    fn gap(&mut self) {
        self.0.push('\n');
    }
}

/// The whole page of `forebay plan`.
pub fn report(look: &Look, assumed: bool, warnings: &[String]) -> String {
    let found = &look.found;
    let mut page = Page(String::new());
    model(&mut page, found);
    machine(&mut page, found, assumed);
    match &found.plan {
        Ok(plan) => {
            page.gap();
            levels(&mut page, found, plan);
            page.gap();
            reading(&mut page, look, plan);
            outlook(&mut page, look, plan, assumed);
            page.gap();
        }
        Err(_) => page.gap(),
    }
    for (i, warning) in warnings.iter().enumerate() {
        page.row(if i == 0 { "note" } else { "" }, warning);
    }
    match &found.plan {
        Ok(plan) => {
            page.row("decision", "it runs with this");
            let (least, all) = (ByteSize(plan.minimum), ByteSize(plan.everything));
            page.row("", format_args!("it needs {least} at least; {all} hold every expert (same context)"));
        }
        Err(error) => page.row("decision", format_args!("it does not run: {error}")),
    }
    page.0
}

fn model(page: &mut Page, found: &Inspection) {
    let facts = ModelFacts::of(&found.snapshot);
    let spec = &found.snapshot.spec;
    page.row("model", found.snapshot.dir.display());
    page.row(
        "",
        format_args!("{} in {} tensors, files: {}", ByteSize(facts.file_bytes), facts.tensors, facts.files),
    );
    page.row("", format_args!("{} that every token uses, kept in memory", ByteSize(facts.dense_bytes)));
    let used = facts.experts / spec.moe.experts.max(1) * spec.moe.top_k;
    page.row(
        "",
        format_args!(
            "{} in {} experts of at most {}, of which a token uses {used}",
            ByteSize(facts.expert_bytes),
            facts.experts,
            ByteSize(facts.largest_expert)
        ),
    );
    if facts.mtp_experts > 0 {
        let all = ByteSize(facts.mtp_dense_bytes + facts.mtp_expert_bytes);
        page.row("", format_args!("{all} in an MTP layer, which drafts unless --draft off"));
    }
}

fn machine(page: &mut Page, found: &Inspection, assumed: bool) {
    let known = |bytes: Option<u64>| bytes.map_or("unknown".to_owned(), |bytes| ByteSize(bytes).to_string());
    let memory = &found.memory;
    if assumed {
        let total = known(memory.total);
        page.row("machine", format_args!("{total} of memory, assumed; nothing else runs on it"));
        return;
    }
    let limit = memory.limit.map_or(String::new(), |limit| format!(", limited to {}", ByteSize(limit)));
    page.row(
        "machine",
        format_args!("{} of memory, {} available{limit}", known(memory.total), known(memory.available)),
    );
    match memory.swap_total {
        Some(0) => page.row("", "no swap"),
        total => {
            page.row("", format_args!("{} of swap, {} of it free", known(total), known(memory.swap_free)))
        }
    }
}

/// Disk below, memory above: what is where.
fn levels(page: &mut Page, found: &Inspection, plan: &Plan) {
    page.row("on disk", "everything; experts that are not in memory are read when a token needs them");
    let experts = found.snapshot.experts.file_bytes;
    page.part(experts, "experts");
    if plan.embedding_place == EmbeddingPlace::Disk {
        let worth =
            plan.embedding_in_slots().map_or(String::new(), |slots| format!(": {slots:.1} slots per layer"));
        page.part(
            plan.embedding_bytes,
            format_args!(
                "token embeddings; a token needs one row, so memory has room for more experts{worth}"
            ),
        );
    }
    page.gap();
    let from = budget_from(plan);
    let left = found.memory.available.map(|available| available.saturating_sub(plan.budget));
    let left = left.filter(|_| plan.budget_from == BudgetFrom::Available);
    let left = left.map_or(String::new(), |left| format!("; {} stay for everything else", ByteSize(left)));
    page.row("in memory", format_args!("{}, {from}{left}", ByteSize(plan.budget)));
    for (consumer, bytes) in plan.lines() {
        // Parts that this model or this plan does not have.
        if bytes > 0 || consumer == Consumer::Slots {
            page.part(bytes, describe(consumer, plan));
        }
    }
    let left = if plan.holds_everything() {
        "left over: every expert fits"
    } else {
        "left over: too little for another expert"
    };
    page.part(plan.budget.saturating_sub(plan.total()), left);
}

/// How experts come from disk to memory.
fn reading(page: &mut Page, look: &Look, plan: &Plan) {
    if plan.demand.layers.is_empty() {
        return;
    }
    let block = ByteSize(ModelFacts::of(&look.found.snapshot).largest_expert);
    let from = if look.tuned { ", as forebay tune found best" } else { "" };
    let way = tune::way_text(look.options.way(plan));
    page.row("reading", format_args!("experts of {block}: {way}{from}"));
    let rate = |rate: Option<f64>| rate.map(|rate| format!("{}/s", ByteSize(rate as u64)));
    let Rates { disk, memory, .. } = look.options.rates;
    match (rate(disk), rate(memory)) {
        (None, None) => {}
        (disk, memory) => {
            let known = |rate: Option<String>| rate.unwrap_or("not measured".to_owned());
            page.row("", format_args!("disk {}, memory {}", known(disk), known(memory)));
        }
    }
    if let Some(choice) = &plan.codes {
        page.row("codes", codes(choice));
    }
    page.gap();
}

/// What is held of coded experts, and why.
pub fn codes(choice: &SlotChoice) -> String {
    let SlotChoice { slots, asked, tokens_per_second, other, rates, decoder, assumed } = choice;
    let held = match slots {
        SlotCodes::Coded => "experts stay coded in memory",
        SlotCodes::Decoded => "experts are decoded when they arrive in memory",
    };
    if *asked {
        return format!("{held}, as asked for");
    }
    let speed = |speed: &Option<f64>| speed.map_or("unknown".to_owned(), |speed| format!("{speed:.2} tok/s"));
    let against = match other {
        None => "the other way does not fit".to_owned(),
        Some(_) => format!("{} at most, {} the other way", speed(tokens_per_second), speed(other)),
    };
    let rate = |rate: Option<f64>| ByteSize(rate.unwrap_or(0.0) as u64).to_string();
    let doubt = if *assumed { ", assumed where not measured" } else { "" };
    format!(
        "{held}: {against} (disk {}/s, memory {}/s, decoder {}/s on each of {} cores{doubt})",
        rate(rates.disk),
        rate(rates.memory),
        rate(Some(decoder.per_core)),
        decoder.cores
    )
}

fn budget_from(plan: &Plan) -> &'static str {
    match plan.budget_from {
        BudgetFrom::Explicit => "as asked for",
        BudgetFrom::Available => "a share of what is available",
        BudgetFrom::Unknown => "a cautious figure, this system does not say what is available",
    }
}

fn describe(consumer: Consumer, plan: &Plan) -> String {
    match consumer {
        Consumer::Weights => "weights that every token uses".to_owned(),
        Consumer::Embedding => "token embeddings".to_owned(),
        Consumer::RowChecks => "checksums of the token embeddings' rows".to_owned(),
        Consumer::Norms => "norms and routers".to_owned(),
        Consumer::Mtp => "MTP layer, its experts apart".to_owned(),
        Consumer::Kv => format!("KV cache: the {} tokens it can remember (--context)", plan.context),
        Consumer::Work => {
            format!("work buffers for reading a prompt {} tokens at a time (--chunk)", plan.chunk)
        }
        Consumer::Reading => "buffers of the reading threads".to_owned(),
        Consumer::Staging => "room for experts that pass through or are read ahead".to_owned(),
        Consumer::Slots => format!("experts that stay: {}", slots(plan)),
        Consumer::Recording => "which experts a run chose, to look back at it at its end".to_owned(),
        Consumer::Process => "the program itself, tokenizer and book-keeping".to_owned(),
    }
}

/// `6 of 256 in each of 75 layers`.
fn slots(plan: &Plan) -> String {
    let quotas = &plan.slots.quotas;
    let most = plan.demand.layers.iter().map(|layer| layer.experts).max().unwrap_or(0);
    match (quotas.iter().min(), quotas.iter().max()) {
        (Some(low), Some(high)) if low == high => {
            format!("{low} of {most} in each of {} layers", quotas.len())
        }
        (Some(low), Some(high)) => format!("{low} to {high} of {most} in each of {} layers", quotas.len()),
        _ => "this model has none".to_owned(),
    }
}

fn outlook(page: &mut Page, look: &Look, plan: &Plan, assumed: bool) {
    let outlook = &plan.outlook;
    let share = 100.0 * outlook.now.hit_rate;
    page.row(
        "expected",
        format_args!("of the experts a token uses, {share:.0} % are in memory once it has run for a while"),
    );
    page.row("", format_args!("(decoding with {} tokens in the context, nothing drafted)", outlook.context));
    page.gap();
    let head = ["memory", "slots/layer", "held", "hits", "disk/token", "at most"];
    page.row("", columns(head.map(str::to_owned)));
    let half = plan.budget / 2;
    let none =
        || [ByteSize(half).to_string(), "too little".into(), "".into(), "".into(), "".into(), "".into()];
    page.row("half", columns(outlook.half.as_ref().map_or_else(none, cells)));
    page.row("this", columns(cells(&outlook.now)));
    if let Some(twice) = &outlook.twice {
        page.row("twice", columns(cells(twice)));
    }
    page.gap();
    page.row(
        "",
        "slots/layer: experts that every layer keeps; held: their share of all experts; hits: the share of",
    );
    page.row("", "those a token uses that is in memory; disk/token: what is read for the others");
    if outlook.now.tokens_per_second.is_some() {
        return;
    }
    let step = match assumed {
        true => "give them with --disk-rate and --memory-rate".to_owned(),
        false => format!("run forebay tune --model {}", look.found.snapshot.dir.display()),
    };
    page.row("", format_args!("speeds of disk and memory are not measured: {step}"));
}

fn columns(cells: [String; 6]) -> String {
    let [memory, slots, held, hits, disk, speed] = cells;
    let line = format!("{memory:>10} {slots:>12} {held:>8} {hits:>7} {disk:>11}  {speed}");
    line.trim_end().to_owned()
}

fn cells(expected: &Expectation) -> [String; 6] {
    [
        ByteSize(expected.budget).to_string(),
        format!("{:.1}", expected.slots_per_layer),
        format!("{:.1} %", 100.0 * expected.held),
        format!("{:.0} %", 100.0 * expected.hit_rate),
        ByteSize(expected.disk_bytes).to_string(),
        speed(expected),
    ]
}

fn speed(expected: &Expectation) -> String {
    let by = match expected.bound {
        Some(Bound::Disk) => "limited by the disk",
        Some(Bound::Memory) => "limited by memory",
        Some(Bound::Decoder) => "limited by decoding",
        None => "",
    };
    expected.tokens_per_second.map_or("not measured".to_owned(), |rate| format!("{rate:.2} tok/s, {by}"))
}

/// The plan in a few rows of name and value, for pages about something else.
pub fn short(plan: &Plan) -> Vec<(String, String)> {
    let row = |name: &str, value: String| (name.to_owned(), value);
    let mut rows = vec![row("budget", format!("{}, {}", ByteSize(plan.budget), budget_from(plan)))];
    let parts = plan.lines().into_iter().filter(|(_, bytes)| *bytes > 0);
    rows.extend(parts.map(|(consumer, bytes)| {
        let (name, detail) = match consumer {
            Consumer::Weights => ("  weights", String::new()),
            Consumer::Embedding => ("  embeddings", String::new()),
            Consumer::RowChecks => ("  row checksums", String::new()),
            Consumer::Norms => ("  norms, routers", String::new()),
            Consumer::Mtp => ("  MTP layer", String::new()),
            Consumer::Kv => ("  KV cache", format!(" for {} tokens", plan.context)),
            Consumer::Work => ("  work", format!(" for passes of {} tokens", plan.chunk)),
            Consumer::Reading => ("  reading", String::new()),
            Consumer::Staging => ("  passing through", String::new()),
            Consumer::Slots => ("  experts", format!(", {}", slots(plan))),
            Consumer::Recording => ("  recording", String::new()),
            Consumer::Process => ("  process", String::new()),
        };
        row(name, format!("{}{detail}", ByteSize(bytes)))
    }));
    if let Some(choice) = &plan.codes {
        rows.push(row("  codes", codes(choice)));
    }
    let now = &plan.outlook.now;
    let share = 100.0 * now.hit_rate;
    rows.push(row("  left over", ByteSize(plan.budget.saturating_sub(plan.total())).to_string()));
    rows.push(row("smallest budget", format!("{} with this context", ByteSize(plan.minimum))));
    rows.push(row("to hold everything", ByteSize(plan.everything).to_string()));
    rows.push(row(
        "per token",
        format!("{} read from disk, {share:.0} % hits expected", ByteSize(now.disk_bytes)),
    ));
    rows
}
