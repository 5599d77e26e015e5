//! The planner on GLM-5.2 from its headers alone, and its laws on small models.

use std::path::Path;
use std::sync::LazyLock;

use forebay_core::ByteSize;
use forebay_engine::plan::{MOST_SEQUENCES, sequences_for};
use forebay_engine::{
    Bound, Consumer, Drafting, EngineOptions, ModelFacts, Plan, PlanError, PlanRequest, Rates, WhatIf,
    inspect, inspect_for, plan,
};
use forebay_io::MemoryInfo;
use forebay_model::{EmbeddingPlace, KvDtype, Snapshot, SnapshotOptions};
use forebay_testkit::{glm52, toy};
use tempfile::TempDir;

const GB: u64 = 1_000_000_000;
/// GLM-5.2 in row-scaled int4, by hand: one slot in every layer, with and without the MTP layer's.
const MTP_EXPERT: u64 = 37_789_696;
const EXPERT: u64 = 18_915_328;
const ROW: u64 = 75 * EXPERT;

/// The snapshot of GLM-5.2, which stays open although its files go.
static GLM: LazyLock<Snapshot> = LazyLock::new(|| {
    let dir = TempDir::new().unwrap();
    glm52::write(dir.path()).unwrap();
    Snapshot::open(dir.path(), SnapshotOptions::default()).unwrap()
});

fn request() -> PlanRequest {
    PlanRequest {
        sequences: 1,
        memory: None,
        context: Some(4096),
        block: None,
        arith: Default::default(),
        chunk: None,
        kv_dtype: KvDtype::Bf16,
        threads: 8,
        io_workers: 8,
        staging: None,
        embedding: None,
        mtp: false,
        expert_slots: None,
        decodes_fast: true,
        rates: Rates::default(),
    }
}

fn on(machine: u64, request: &PlanRequest) -> Result<Plan, PlanError> {
    plan(&GLM, request, &MemoryInfo::assumed(machine))
}

fn budget(bytes: u64, request: PlanRequest) -> Result<Plan, PlanError> {
    on(1 << 50, &PlanRequest { memory: Some(ByteSize(bytes)), ..request })
}

fn poorest(plan: &Plan) -> usize {
    *plan.slots.quotas.iter().min().unwrap()
}

#[track_caller]
fn adds_up(plan: &Plan) {
    assert_eq!(plan.total(), plan.lines().iter().map(|(_, bytes)| bytes).sum::<u64>());
    assert!(plan.total() <= plan.budget, "{} of {}", plan.total(), plan.budget);
    // What is left over is less than one more slot, unless every expert has one.
    let held: usize = plan.demand.layers.iter().map(|layer| layer.experts).sum();
    assert!(plan.resident_slots() == held || plan.budget - plan.total() < MTP_EXPERT);
}

#[test]
fn the_byte_facts_of_glm() {
    let facts = ModelFacts::of(&GLM);
    assert_eq!(facts.dense_bytes, 10_592_313_856);
    assert_eq!(facts.dense_bytes + facts.mtp_dense_bytes, 10_877_286_144);
    assert_eq!(facts.expert_bytes + facts.mtp_expert_bytes, 372_848_459_776);
    assert_eq!((facts.experts, facts.mtp_experts), (19_200, 256));
    assert_eq!(facts.largest_expert, 18_915_328);
    assert_eq!(facts.row_bytes + facts.mtp_row_bytes, 1_456_439_296);
    assert_eq!(facts.tensors, 118_478);
}

/// 24 GB, 4,096 tokens, no MTP: at least 6 slots per layer. By hand: 20.00 GB (24 less 4 for
/// the machine) - 10.592 of weights + 0.952 of embeddings left on disk - 0.37 of KV cache
/// (78 x 576 x 2 x 4,096) - 0.15 of staging (8 experts) - about 0.3 of buffers and program
/// leave 9.5 GB, which is 6.7 x 1.4186 GB.
#[test]
fn a_machine_of_24_gb_holds_six_slots_per_layer() {
    let plan = on(24 * GB, &request()).unwrap();
    adds_up(&plan);
    assert_eq!(plan.budget, 20 * GB);
    // Two blocks of 64 positions to spare, and one on its way to or from a file.
    assert_eq!(plan.kv, 78 * 576 * 2 * (4096 + 3 * 64));
    assert_eq!(plan.embedding_place, EmbeddingPlace::Disk);
    assert_eq!(plan.embedding_bytes, 154_880 * (6144 + 4));
    assert!((plan.embedding_in_slots().unwrap() - 0.671).abs() < 0.001);
    // Direct reads bring whole pages: one more for the codes of an expert and one for its scales.
    assert_eq!(plan.slot_row(), ROW + 75 * 2 * 4096);
    assert!(poorest(&plan) >= 6, "{:?}", plan.slots.quotas);
    // Norms (4,632,576 + 24,576) and routers with their biases (471,936,000).
    assert_eq!(plan.norms, 4_657_152 + 471_936_000);
    // Panels pad nothing here: rows and columns of every matrix are whole panels.
    assert_eq!(plan.weights, 10_592_313_856 - plan.embedding_bytes - plan.norms);

    // A step of a layer: two numbers of four bytes for each of 8 experts, and 160 bytes; 1,000 tokens.
    assert!(plan.lines().contains(&(Consumer::Recording, 75 * (8 * 8 + 160) * 1000)));

    let kept = PlanRequest { embedding: Some(EmbeddingPlace::Memory), ..request() };
    let kept = on(24 * GB, &kept).unwrap();
    assert_eq!(kept.embedding, plan.embedding_bytes);
    let slots = plan.resident_slots() - kept.resident_slots();
    assert!((50..=51).contains(&slots), "0.9522 GB are 50.3 experts of 18.9 MB, and rounding: {slots}");
}

/// 18 GB with MTP: at least 3. By hand: 18.00 - 10.877 + 0.952 - 0.37 - 0.45 (8 experts of each
/// kind) - about 0.3 = 6.9 GB, which is 4.7 x 1.4564 GB.
#[test]
fn a_budget_of_18_gb_with_mtp_holds_three() {
    let plan = budget(18 * GB, PlanRequest { mtp: true, ..request() }).unwrap();
    adds_up(&plan);
    assert_eq!(plan.slot_row(), 1_456_439_296 + 76 * 2 * 4096);
    // Every block may carry two hidden states.
    assert_eq!(plan.kv, 79 * 576 * 2 * (4096 + 3 * 64) + 67 * 2 * 6144 * 4);
    assert_eq!(plan.mtp, 284_972_288, "278,546,688 of matrices and 6,425,600 of norms and router");
    assert_eq!(plan.slots.quotas.len(), 76);
    assert!(poorest(&plan) >= 3, "{:?}", plan.slots.quotas);
    let without = budget(18 * GB, request()).unwrap();
    assert!(poorest(&without) >= poorest(&plan), "MTP off never lowers it");
}

#[test]
fn refusals_name_the_number_that_works() {
    let Err(PlanError::TooSmall { minimum, .. }) = budget(4 * GB, request()) else { panic!("4 GB do") };
    assert!((9 * GB..11 * GB).contains(&minimum), "{minimum}");
    assert_eq!(budget(minimum, request()).unwrap().resident_slots(), 0);
    assert!(
        matches!(budget(minimum - 1, request()), Err(PlanError::TooSmall { minimum: m, .. }) if m == minimum)
    );
    let more = PlanRequest { memory: Some(ByteSize(30 * GB)), ..request() };
    let Err(PlanError::MoreThanAvailable { available, .. }) = on(24 * GB, &more) else { panic!("30 of 24") };
    assert_eq!(available, 24 * GB);
    let fits = PlanRequest { memory: Some(ByteSize(available)), ..request() };
    assert!(on(24 * GB, &fits).is_ok());
    let long = PlanRequest { context: Some(131_073), ..request() };
    assert!(matches!(on(24 * GB, &long), Err(PlanError::Context { maximum: 131_072, .. })));
}

#[test]
fn a_context_is_planned_and_a_larger_machine_gets_a_longer_one() {
    let automatic = PlanRequest { context: None, ..request() };
    let contexts: Vec<usize> =
        [16, 24, 32, 64, 128].map(|gb| on(gb * GB, &automatic).unwrap().context).into();
    assert!(contexts.is_sorted() && contexts[0] < contexts[4], "{contexts:?}");
    assert_eq!(*contexts.last().unwrap(), 131_072);
}

#[test]
fn everything_fits_exactly_where_the_plan_says_so() {
    let some = budget(100 * GB, request()).unwrap();
    let all = budget(some.everything, request()).unwrap();
    assert_eq!((all.resident_slots(), all.embedding_place), (19_200, EmbeddingPlace::Memory));
    assert_eq!(all.outlook.now.hit_rate, 1.0);
    assert_eq!(all.outlook.now.disk_bytes, 0);
    let less = budget(some.everything - 1, request()).unwrap();
    assert_eq!(less.embedding_place, EmbeddingPlace::Disk, "experts are worth more than embeddings");
    assert_eq!(less.resident_slots(), 19_200);
}

/// By hand: X = 11.349 GB per token; 6 slots hit .192, 12 would .306.
#[test]
fn the_outlook_follows_the_published_table() {
    let rates = Rates { disk: Some(7e9), memory: Some(90e9), decode: None };
    let plan = on(24 * GB, &PlanRequest { rates, ..request() }).unwrap();
    let now = plan.outlook.now;
    assert!((0.19..0.24).contains(&now.hit_rate), "{now:?}");
    let routed = (75 * 8 * EXPERT) as f64;
    assert!((now.disk_bytes as f64 - (1.0 - now.hit_rate) * routed).abs() < 1.0);
    assert!((now.tokens_per_second.unwrap() - 7e9 / now.disk_bytes as f64).abs() < 1e-9);
    assert_eq!(now.bound, Some(Bound::Disk));
    assert!(plan.outlook.half.is_none(), "10 GB do not run it");
    let twice = plan.outlook.twice.unwrap();
    assert!(twice.slots_per_layer > 2.0 * now.slots_per_layer && twice.disk_bytes < now.disk_bytes);
    assert!(twice.tokens_per_second > now.tokens_per_second);

    let unmeasured = on(24 * GB, &request()).unwrap().outlook.now;
    assert_eq!((unmeasured.tokens_per_second, unmeasured.bound), (None, None), "never a zero");
    assert_eq!(unmeasured.disk_bytes, now.disk_bytes);
}

#[test]
fn more_memory_never_gives_less() {
    let mut before: Option<Plan> = None;
    for bytes in (10..400u64).step_by(7).map(|gb| gb * GB) {
        for mtp in [false, true] {
            let Ok(plan) = budget(bytes, PlanRequest { mtp, ..request() }) else { continue };
            adds_up(&plan);
        }
        let Ok(plan) = budget(bytes, request()) else { continue };
        if let Some(before) = before {
            assert!(plan.slots.quotas.iter().zip(&before.slots.quotas).all(|(now, then)| now >= then));
            assert!(plan.outlook.now.disk_bytes <= before.outlook.now.disk_bytes);
        }
        before = Some(plan);
    }
    assert!(before.is_some());
}

#[test]
fn the_governor_keeps_to_the_plan() {
    let machine = MemoryInfo::assumed(24 * GB);
    let plan = on(24 * GB, &request()).unwrap();
    let governed = plan.governed(&machine);
    assert_eq!((governed.slots, governed.floor), (plan.resident_slots(), 75));
    assert_eq!((governed.slot_bytes, governed.planned_bytes), (EXPERT + 2 * 4096, plan.total()));
    assert_eq!(governed.reserve_bytes, 2 * GB);
    // Nearly everything was asked for: what is left beside it is not a shortage.
    let asked = PlanRequest { memory: Some(ByteSize(23_800_000_000)), ..request() };
    let plan = on(24 * GB, &asked).unwrap();
    assert_eq!(plan.governed(&machine).reserve_bytes, (24 * GB - plan.total()) / 2);
}

/// What a server takes for further contexts costs the poorest layer a sixteenth of its slots at most, and where twice as
/// many contexts would fit too, they are taken.
#[test]
fn a_server_has_as_many_contexts_as_cost_hardly_any_slot() {
    let mut before = 0;
    let mut seen = Vec::new();
    for machine in [24, 32, 64, 96, 128, 192, 256, 512, 1024] {
        let memory = MemoryInfo::assumed(machine * GB);
        let wanted = PlanRequest { context: None, ..request() };
        let (context, sequences) = sequences_for(&GLM, &wanted, &memory);
        let with = |sequences| on(machine * GB, &PlanRequest { context, sequences, ..request() });
        let one = with(1).unwrap();
        assert_eq!(one.context, on(machine * GB, &wanted).unwrap().context, "no context is shorter for it");
        let cheap =
            |plan: &Plan| 16 * (poorest(&one) - poorest(plan)) <= poorest(&one) && plan.chunk == one.chunk;
        assert!(cheap(&with(sequences).unwrap()), "{machine} GB");
        assert!(
            sequences == MOST_SEQUENCES || !with(2 * sequences).is_ok_and(|plan| cheap(&plan)),
            "{machine} GB"
        );
        assert!(
            sequences.is_power_of_two() && sequences >= before,
            "{machine} GB: {sequences} after {before}"
        );
        before = sequences;
        seen.push(sequences);
    }
    assert_eq!((seen[0], *seen.last().unwrap()), (1, MOST_SEQUENCES), "{seen:?}");
    println!("{seen:?}");
}

/// Every further sequence is paid for: its blocks, and where they lie.
#[test]
fn sequences_are_paid_for() {
    let of = |sequences| budget(100 * GB, PlanRequest { sequences, chunk: Some(512), ..request() }).unwrap();
    let (one, four) = (of(1), of(4));
    // 4,096 positions in 64 blocks, two to spare for each, and one on its way to or from a file.
    let block = (one.kv) / (64 + 2 + 1);
    assert_eq!((one.kv, four.kv), (block * 67, block * (4 * 66 + 1)));
    let lists = 2 * 16 * (64 + 1);
    // Ids: the prompt, a list of all that may have twice the room, a copy of it, and one to tell what is known.
    let ids = 5 * 4 * 4096;
    // Over 154,880 tokens: logits; those of the sampler, their probabilities and their order, in a list with twice the room;
    // a bit for each that is allowed; and a table of those seen, of 2^18 places with 12 bytes and one.
    let vocabulary = 4 * 154_880 + 4 * 4 * 154_880 + 154_880 / 8 + (1 << 18) * 13;
    assert_eq!(four.work - one.work, 3 * (lists + ids + vocabulary));
}

fn toy_options() -> EngineOptions {
    EngineOptions { context: Some(64), threads: Some(1), ..EngineOptions::default() }
}

/// A server that is not told gets them where memory is plenty; what is said holds.
#[test]
fn a_server_is_planned_with_contexts_for_several() {
    let dir = TempDir::new().unwrap();
    toy::write(dir.path()).unwrap();
    let serving = EngineOptions { serving: true, memory: Some(ByteSize(GB)), ..toy_options() };
    let of = |options| toy_with(dir.path(), options).unwrap().kv;
    let told = |sequences| of(EngineOptions { sequences, ..serving });
    assert_eq!(told(0), told(MOST_SEQUENCES));
    assert!(told(1) < told(2) && told(2) < told(0));
    assert_eq!(told(1), of(EngineOptions { serving: false, ..serving }));
}

fn toy_with(dir: &Path, options: EngineOptions) -> Result<Plan, PlanError> {
    inspect(dir, &options).unwrap().plan
}

#[test]
fn the_mtp_layer_is_planned_only_where_there_is_one() {
    let dir = TempDir::new().unwrap();
    toy::write(dir.path()).unwrap();
    let drafting = EngineOptions { drafting: Drafting::Depth(3), ..toy_options() };
    let with = toy_with(dir.path(), drafting).unwrap();
    let without = toy_with(dir.path(), toy_options()).unwrap();
    assert!(without.lines().contains(&(Consumer::Mtp, 0)));
    assert!(with.mtp > 0 && with.slots.quotas.len() == without.slots.quotas.len() + 1);
    // Of 64 positions, of two blocks to spare, and of one on its way to or from a file; each may carry two hidden states.
    assert_eq!(with.kv - without.kv, layer_kv(4 * 64) + 4 * 2 * 64 * 4, "one layer more");

    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens/base");
    // What is available changes from one look to the next.
    let of = |options| toy_with(&golden, EngineOptions { memory: Some(ByteSize(GB)), ..options }).unwrap();
    assert_eq!(of(drafting), of(toy_options()));
}

/// Bytes of `context` cached tokens of one layer of the toy, index keys apart.
fn layer_kv(context: u64) -> u64 {
    let config = toy::config();
    let width = |name: &str| config[name].as_u64().unwrap();
    context * 2 * (width("kv_lora_rank") + width("qk_rope_head_dim"))
}

#[test]
fn a_plan_for_another_machine_says_nothing_of_this_one() {
    let dir = TempDir::new().unwrap();
    toy::write(dir.path()).unwrap();
    let what_if = WhatIf { machine: Some(ByteSize(24 * GB)) };
    let found = inspect_for(dir.path(), &toy_options(), what_if).unwrap();
    assert_eq!((found.memory.total, found.memory.footprint()), (Some(24 * GB), None));
    assert_eq!(found.plan.unwrap().budget, 20 * GB);
    assert!(inspect(dir.path(), &toy_options()).is_ok());
}
