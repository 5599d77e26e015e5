//! Names for requests, answers and calls.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

static COUNT: AtomicU64 = AtomicU64::new(0);

/// 24 random letters and digits.
pub fn random() -> String {
    let mut bytes = [0u8; 12];
    if getrandom::fill(&mut bytes).is_err() {
        // Where the system has no randomness left, names are still different.
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        bytes[..8].copy_from_slice(&count.to_le_bytes());
    }
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A seed that differs from request to request; 32 bits, so that every JSON reader keeps it exactly.
pub fn seed() -> u64 {
    getrandom::u32().map_or_else(|_| COUNT.fetch_add(1, Ordering::Relaxed), u64::from)
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
