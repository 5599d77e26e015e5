//! What is measured: the selection that the options make.

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;
use forebay_core::{Format, PanelShape};
use forebay_kernels::Team;
use forebay_model::Arith;

use crate::args::{ArithArg, BenchKernelsArgs, KernelArg};

/// The shapes of GLM-5.2: an expert's gate and down, the attention's query and output, the latent's expansion,
/// the vocabulary.
const FULL_SHAPES: [Shape; 6] = [
    Shape { rows: 2048, cols: 6144 },
    Shape { rows: 6144, cols: 2048 },
    Shape { rows: 16_384, cols: 2048 },
    Shape { rows: 6144, cols: 16_384 },
    Shape { rows: 28_672, cols: 512 },
    Shape { rows: 154_880, cols: 6144 },
];
/// The shape of most of the work: an expert's gate.
const QUICK_SHAPES: [Shape; 1] = [FULL_SHAPES[0]];
const FULL_BATCHES: [usize; 6] = [1, 2, 4, 8, 64, 512];
const QUICK_BATCHES: [usize; 5] = [1, 2, 4, 8, 64];
const FORMATS: [&str; 3] = ["int4-g64", "int4-row", "int8"];

/// Most elements of a matrix: twice the largest of GLM-5.2.
const MOST_ELEMENTS: usize = 1 << 31;

/// The shape of a weight matrix: outputs and inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Rows (outputs).
    pub rows: usize,
    /// Columns (inputs).
    pub cols: usize,
}

impl Shape {
    /// Multiply-adds of one row of activations.
    pub fn multiply_adds(self) -> u64 {
        self.rows as u64 * self.cols as u64
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.rows, self.cols)
    }
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let (rows, cols) = text.split_once('x')?;
            let (rows, cols): (usize, usize) = (rows.trim().parse().ok()?, cols.trim().parse().ok()?);
            let elements = rows.checked_mul(cols)?;
            (elements > 0 && elements <= MOST_ELEMENTS).then_some(Shape { rows, cols })
        };
        parse().ok_or_else(|| {
            format!(
                "write a shape as rows (outputs) x columns (inputs), such as 2048x6144, with up to \
                 {MOST_ELEMENTS} elements"
            )
        })
    }
}

/// How a matrix lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Layout {
    /// Sixteen rows at a time, as integer weights are kept in memory.
    Panels,
    /// Row after row, as files have it.
    Rows,
    /// Panels of int4 in fewer bytes, decoded while they are multiplied.
    Coded,
}

impl Layout {
    /// The name used in reports.
    pub fn name(self) -> &'static str {
        match self {
            Layout::Panels => "panels",
            Layout::Rows => "rows",
            Layout::Coded => "coded",
        }
    }
}

/// Everything that is to be measured.
#[derive(Clone, Debug)]
pub struct Selection {
    /// Whether weight products are measured.
    pub matmul: bool,
    /// Whether attention and its indexer are measured.
    pub attention: bool,
    /// Weight formats.
    pub formats: Vec<Format>,
    /// Shapes of weight matrices.
    pub shapes: Vec<Shape>,
    /// How weights lie in memory.
    pub layouts: Vec<Layout>,
    /// Arithmetics.
    pub ariths: Vec<Arith>,
    /// Rows of activations.
    pub batches: Vec<usize>,
    /// Numbers of threads, ascending.
    pub threads: Vec<usize>,
    /// Rounds.
    pub rounds: usize,
}

/// One product that is measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Case {
    /// Weight format.
    pub format: Format,
    /// How the weights lie in memory.
    pub layout: Layout,
    /// Arithmetic.
    pub arith: Arith,
    /// Rows of activations.
    pub batch: usize,
    /// Index in [`Selection::threads`].
    pub team: usize,
}

impl Case {
    /// Whether sums in free order are measured beside it: the format of large models as they are kept in memory,
    /// with one row, with as many as one pass of the kernel takes, and with many.
    pub fn compares_order(&self) -> bool {
        matches!(self.format, Format::Int4Group(_))
            && (self.layout, self.arith) == (Layout::Panels, Arith::Int8)
            && matches!(self.batch, 1 | 8 | 64)
    }

    /// Whether decoding alone is measured beside it: once for each coded format and number of threads.
    pub fn decodes(&self) -> bool {
        (self.layout, self.arith, self.batch) == (Layout::Coded, Arith::Int8, 1)
    }
}

impl Selection {
    /// What the options ask for; what they leave open is the quick selection, or with `--full` everything.
    pub fn new(args: &BenchKernelsArgs) -> Self {
        let either = |full: &[usize], quick: &[usize]| if args.full { full.to_vec() } else { quick.to_vec() };
        let or = |given: Vec<usize>, default: Vec<usize>| if given.is_empty() { default } else { given };
        let measures = |kernel| args.what.is_empty() || args.what.contains(&kernel);
        let mut threads = or(
            args.threads.iter().map(|n| usize::from(*n)).collect(),
            default_threads(Team::default_threads(), args.full),
        );
        threads.sort_unstable();
        threads.dedup();
        Self {
            matmul: measures(KernelArg::Matmul),
            attention: measures(KernelArg::Attention),
            formats: match args.format.as_slice() {
                [] => FORMATS.iter().filter_map(|name| name.parse().ok()).collect(),
                given => given.to_vec(),
            },
            shapes: match args.shape.as_slice() {
                [] if args.full => FULL_SHAPES.to_vec(),
                [] => QUICK_SHAPES.to_vec(),
                given => given.to_vec(),
            },
            layouts: match args.layout.as_slice() {
                [] => vec![Layout::Panels, Layout::Rows, Layout::Coded],
                given => given.to_vec(),
            },
            ariths: match args.arith.as_slice() {
                [] => vec![Arith::Int8, Arith::Exact],
                given => given.iter().map(|arith| arith.arith()).collect(),
            },
            batches: or(
                args.batch.iter().map(|n| usize::from(*n)).collect(),
                either(&FULL_BATCHES, &QUICK_BATCHES),
            ),
            threads,
            rounds: usize::from(args.rounds),
        }
    }

    /// The products of one shape. Float weights have the exact arithmetic only.
    pub fn cases(&self) -> Vec<Case> {
        let mut all = Vec::new();
        for team in 0..self.threads.len() {
            for &format in &self.formats {
                for layout in layouts(format).filter(|layout| self.layouts.contains(layout)) {
                    for &arith in &self.ariths {
                        let applies = arith == Arith::Exact || format.is_integer();
                        let batches = self.batches.iter().filter(|_| applies);
                        all.extend(batches.map(|&batch| Case { format, layout, arith, batch, team }));
                    }
                }
            }
        }
        all
    }
}

/// The layouts that a format has, whatever the shape.
fn layouts(format: Format) -> impl Iterator<Item = Layout> {
    let panels = PanelShape::new(format, 1, 1).map(|_| Layout::Panels);
    let is_int4 = matches!(format, Format::Int4Row | Format::Int4Group(_));
    let coded = is_int4.then_some(Layout::Coded);
    panels.into_iter().chain([Layout::Rows]).chain(coded)
}

/// One thread and all of them; with `full` everything between, in powers of two on large machines.
fn default_threads(most: usize, full: bool) -> Vec<usize> {
    match (full, most) {
        (false, _) => vec![1, most],
        (true, ..=8) => (1..=most).collect(),
        (true, _) => (0..usize::BITS).map(|bit| 1 << bit).take_while(|n| *n < most).chain([most]).collect(),
    }
}

impl ArithArg {
    fn arith(self) -> Arith {
        match self {
            ArithArg::Exact => Arith::Exact,
            ArithArg::Int8 => Arith::Int8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{BenchWhat, Cli, Verb};
    use clap::Parser;

    fn selection(options: &str) -> Selection {
        let words = ["forebay", "bench", "kernels"].into_iter().chain(options.split_whitespace());
        let Verb::Bench(args) = Cli::try_parse_from(words).unwrap().verb else { panic!() };
        let BenchWhat::Kernels(args) = args.what else { panic!("bench kernels") };
        Selection::new(&args)
    }

    #[test]
    fn shapes_read_as_they_are_shown() {
        for shape in FULL_SHAPES {
            assert_eq!(shape.to_string().parse(), Ok(shape));
        }
        for bad in ["", "x", "5", "0x5", "5x", "ax5", "1x2x3", "65536x65536", "99999999999999999999x1"] {
            assert!(bad.parse::<Shape>().unwrap_err().contains("2048x6144"), "{bad}");
        }
    }

    #[test]
    fn options_replace_the_usual_selection() {
        let given = selection("--format bf16,int8 --shape 32x64,5x7 --arith exact --batch 3 --threads 2,1,2");
        assert_eq!(given.formats, [Format::Bf16, Format::Int8Row]);
        assert_eq!(given.shapes, [Shape { rows: 32, cols: 64 }, Shape { rows: 5, cols: 7 }]);
        assert_eq!((&given.ariths[..], &given.batches[..]), (&[Arith::Exact][..], &[3][..]));
        assert_eq!((&given.threads[..], given.rounds), (&[1, 2][..], 5));
        assert!(given.matmul && given.attention);
        let only = selection("--what attention");
        assert!(only.attention && !only.matmul);
        assert_eq!(selection("--full").shapes, FULL_SHAPES);
    }

    #[test]
    fn float_weights_have_no_int8_arithmetic() {
        let cases = selection("--format bf16,int8 --batch 1,2 --threads 1").cases();
        let count = |format| cases.iter().filter(|case| case.format == format).count();
        assert_eq!(count(Format::Bf16), 2);
        // Two arithmetics and two layouts.
        assert_eq!(count(Format::Int8Row), 8);
        let coded =
            selection("--layout coded --batch 1,2 --threads 1,2 --format int8,int4-row,int4-g64").cases();
        assert_eq!((coded.len(), coded.iter().filter(|case| case.decodes()).count()), (16, 4));
        let rows = selection("--layout rows --format int8 --batch 1 --threads 1").cases();
        assert!(rows.iter().all(|case| case.layout == Layout::Rows) && rows.len() == 2);
    }

    #[test]
    fn threads_of_small_and_large_machines() {
        assert_eq!(default_threads(2, true), [1, 2]);
        assert_eq!(default_threads(12, true), [1, 2, 4, 8, 12]);
        assert_eq!(default_threads(16, true), [1, 2, 4, 8, 16]);
        assert_eq!(default_threads(16, false), [1, 16]);
    }
}
