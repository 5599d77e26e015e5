//! Numbers to multiply, exact products to compare with, and the machine underneath.

use crate::contender::Shape;
use std::io;

/// Different rows of a weight matrix; they repeat, so that quantising them does not take longer
/// than measuring. No kernel notices.
pub const ROWS: usize = 256;
/// Activation rows whose results are compared with exact ones.
const BATCH: usize = 4;

/// `len` independent numbers, roughly normal with deviation 1, always the same for one seed.
pub fn normal(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    // Four uniform 16-bit numbers: their sum has variance 4 / 12 in units of 2^16.
    let scale = 3f32.sqrt() / 65536.0;
    (0..len)
        .map(|_| {
            let bits = next();
            let sum: u64 = (0..4).map(|i| (bits >> (16 * i)) & 0xffff).sum();
            (sum as f32 - 131_070.0) * scale
        })
        .collect()
}

/// Products of the unquantised numbers, for the first rows of the batch.
#[derive(Debug)]
pub struct Exact {
    rows: usize,
    /// `[min(batch, BATCH), ROWS]`
    values: Vec<f64>,
}

impl Exact {
    /// `weights` is `[ROWS, cols]`, repeated in the matrix; `x` is `[batch, cols]`.
    pub fn new(shape: Shape, weights: &[f32], x: &[f32]) -> Self {
        let mut values = Vec::new();
        for x in x.chunks_exact(shape.cols).take(BATCH) {
            for w in weights.chunks_exact(shape.cols) {
                values.push(w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum());
            }
        }
        Self { rows: shape.rows, values }
    }

    /// Length of the difference of `results`, `[batch, rows]`, over length of the exact ones.
    pub fn error(&self, results: &[f32]) -> f64 {
        let (mut difference, mut length) = (0.0, 0.0);
        for (exact, found) in self.values.chunks_exact(ROWS).zip(results.chunks_exact(self.rows)) {
            for (exact, found) in exact.iter().cycle().zip(found) {
                difference += (exact - f64::from(*found)).powi(2);
                length += exact.powi(2);
            }
        }
        (difference / length).sqrt()
    }
}

/// Starts this program again with a C library that asks for large pages, if it can. All memory of
/// both engines comes from that library, so both get large pages or neither does.
#[cfg(target_os = "linux")]
pub fn choose_pages(large: bool) -> io::Result<()> {
    use std::os::unix::process::CommandExt;

    const NAME: &str = "GLIBC_TUNABLES";
    let value = format!("glibc.malloc.hugetlb={}", u8::from(large));
    if std::env::var(NAME).is_ok_and(|found| found == value) {
        return Ok(());
    }
    let mut again = std::process::Command::new(std::env::current_exe()?);
    Err(again.args(std::env::args_os().skip(1)).env(NAME, value).exec())
}

/// Elsewhere the system decides, for both engines alike.
#[cfg(not(target_os = "linux"))]
pub fn choose_pages(_large: bool) -> io::Result<()> {
    Ok(())
}

/// Share of this process's memory that lies in large pages, if the system tells.
pub fn large_pages() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").ok()?;
    let kilobytes = |name: &str| -> Option<f64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse().ok()
    };
    Some(kilobytes("AnonHugePages:")? / kilobytes("Rss:")?)
}

/// Processor time so far, in clock ticks: of everybody and of this process.
#[derive(Clone, Copy, Debug)]
pub struct Ticks {
    all: f64,
    busy: f64,
    own: f64,
}

impl Ticks {
    /// The counts now, if the system tells.
    pub fn now() -> Option<Self> {
        let numbers = |text: &str| -> Vec<f64> { text.split_whitespace().flat_map(str::parse).collect() };
        let system = std::fs::read_to_string("/proc/stat").ok()?;
        // user, nice, system, idle, iowait, irq, softirq, steal; guests are in the first two.
        let system = numbers(system.lines().next()?.strip_prefix("cpu")?);
        let system = system.get(..8)?;
        let idle = system[3] + system[4];
        // After the name, which may hold spaces: utime and stime are the fields 14 and 15.
        let process = std::fs::read_to_string("/proc/self/stat").ok()?;
        let fields: Vec<&str> = process.rsplit_once(')')?.1.split_whitespace().collect();
        let own = fields.get(11)?.parse::<f64>().ok()? + fields.get(12)?.parse::<f64>().ok()?;
        let all: f64 = system.iter().sum();
        Some(Self { all, busy: all - idle, own })
    }

    /// Share of the machine's processor time since `before` that others had.
    pub fn others_since(self, before: Self) -> f64 {
        let others = (self.busy - before.busy) - (self.own - before.own);
        (others / (self.all - before.all).max(1.0)).max(0.0)
    }
}

/// The processor's name, if the system tells.
pub fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let name = field("model name").unwrap_or_else(|| "unknown processor".to_owned());
    match (field("cpu family"), field("model\t")) {
        (Some(family), Some(model)) => format!("{name} (family {family}, model {model})"),
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_mean_0_and_deviation_1() {
        let values = normal(100_000, 3);
        let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / 1e5;
        let variance = values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / 1e5;
        assert!(mean.abs() < 0.02, "{mean}");
        assert!((variance - 1.0).abs() < 0.02, "{variance}");
    }

    #[test]
    fn errors_are_relative() {
        let shape = Shape { rows: 512, cols: 256 };
        let (weights, x) = (normal(ROWS * 256, 1), normal(5 * 256, 2));
        let exact = Exact::new(shape, &weights, &x);
        let mut y = Vec::new();
        for x in x.chunks_exact(256) {
            let rows = weights.chunks_exact(256).cycle().take(512);
            y.extend(rows.map(|w| w.iter().zip(x).map(|(w, x)| w * x).sum::<f32>()));
        }
        assert!(exact.error(&y) < 1e-5);
        for value in &mut y {
            *value *= 1.25;
        }
        assert!((exact.error(&y) - 0.25).abs() < 1e-5);
    }
}
