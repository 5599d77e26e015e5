//! Pauses before something is tried again: longer every time, never all at once, and as long as the server asks.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::client::{Again, Client, Trouble, Wait};
use super::config::Retry;
use super::error::GetError;
use super::watch::{Event, Stop, Watch};

/// Attempts at something that a user waits for before anything else happens.
const SOON: u32 = 4;

/// Counts failures in a row of one piece of work.
pub(super) struct Patience {
    failures: u32,
    tries: u32,
}

impl Patience {
    pub fn new(tries: u32) -> Self {
        Self { failures: 0, tries }
    }

    /// Something arrived: the failures before it do not count any more.
    pub fn renew(&mut self) {
        self.failures = 0;
    }

    /// Waits before the next attempt, or says why there is none.
    pub fn wait(
        &mut self,
        again: Again,
        what: &str,
        client: &Client,
        stop: &Stop<'_>,
        watch: &Watch<'_>,
    ) -> Result<(), GetError> {
        // What a stop broke off is no failure.
        stop.check()?;
        self.failures += 1;
        let retry = &client.retry;
        if let Some(Wait { status, pause: wait }) = again.wait.filter(|wait| wait.pause > retry.longest_asked)
        {
            return Err(GetError::Limited { host: again.host, status, wait });
        }
        if self.failures >= self.tries {
            return Err(GetError::Unreachable { url: again.url, tries: self.failures, why: again.why });
        }
        let pause =
            pause(retry, self.failures, random()).max(again.wait.map_or(Duration::ZERO, |wait| wait.pause));
        if again.wait.is_some() {
            client.hold(pause);
        }
        (watch.seen)(Event::Waiting { what: what.to_owned(), why: again.why, pause });
        stop.sleep(pause)
    }
}

/// Does `work` until it is done or fails for good.
pub(super) fn persist<T>(
    what: &str,
    client: &Client,
    stop: &Stop<'_>,
    watch: &Watch<'_>,
    mut work: impl FnMut() -> Result<T, Trouble>,
) -> Result<T, GetError> {
    let mut patience = Patience::new(client.retry.tries.min(SOON));
    loop {
        match work() {
            Ok(done) => return Ok(done),
            Err(Trouble::Final(error)) => return Err(error),
            Err(Trouble::Again(again)) => patience.wait(again, what, client, stop, watch)?,
        }
    }
}

/// The pause after so many failures in a row: doubled every time, then somewhere between half and all of that.
fn pause(retry: &Retry, failures: u32, random: f64) -> Duration {
    let doubled = retry.first.saturating_mul(1 << failures.saturating_sub(1).min(20));
    doubled.min(retry.longest).mul_f64(0.5 + 0.5 * random)
}

/// A number in 0..1 that differs between threads and processes.
fn random() -> f64 {
    // The standard library seeds its hash maps from the system's random numbers.
    (RandomState::new().build_hasher().finish() >> 11) as f64 / (1u64 << 53) as f64
}

/// The pause that a `Retry-After` header asks for: seconds, or a date.
pub(super) fn retry_after(text: &str) -> Option<Duration> {
    let text = text.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    Some(Duration::from_secs(date(text)?).saturating_sub(now))
}

/// Seconds since 1970 of a date such as `Sun, 06 Nov 1994 08:49:37 GMT` (RFC 9110 section 5.6.7).
fn date(text: &str) -> Option<u64> {
    let (_, text) = text.split_once(", ")?;
    let parts: Vec<&str> = text.split(' ').collect();
    let [day, month, year, time, "GMT"] = parts[..] else { return None };
    let months = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let month = months.iter().position(|name| *name == month)? as u64;
    let number = |text: &str, below: u64| text.parse::<u64>().ok().filter(|n| *n < below);
    let (day, year) = (number(day, 32)?.checked_sub(1)?, number(year, 10_000)?.checked_sub(1970)?);
    let clock: Vec<&str> = time.split(':').collect();
    let [hour, minute, second] = clock[..] else { return None };
    let seconds = number(hour, 24)? * 3600 + number(minute, 60)? * 60 + number(second, 61)?;
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let whole_years: u64 = (1970..1970 + year).map(|year| if leap(year) { 366 } else { 365 }).sum();
    let lengths = [31, if leap(1970 + year) { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let whole_months: u64 = lengths[..month as usize].iter().sum();
    Some((whole_years + whole_months + day) * 86_400 + seconds)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn pauses_double_up_to_a_limit_and_vary_by_half() {
        let retry =
            Retry { first: Duration::from_millis(100), longest: Duration::from_secs(1), ..Retry::default() };
        let milliseconds = |failures, random| pause(&retry, failures, random).as_millis();
        assert_eq!([1, 2, 3, 4, 5, 99].map(|n| milliseconds(n, 1.0)), [100, 200, 400, 800, 1000, 1000]);
        assert_eq!([1, 4, 99].map(|n| milliseconds(n, 0.0)), [50, 400, 500]);
        assert!((0.0..1.0).contains(&random()));
        assert_ne!(random(), random());
    }

    #[test]
    fn servers_ask_in_seconds_or_with_a_date() {
        assert_eq!(retry_after(" 7 "), Some(Duration::from_secs(7)));
        assert_eq!(retry_after("Thu, 01 Jan 1970 00:00:00 GMT"), Some(Duration::ZERO));
        // The example of RFC 9110, and a day after a leap day.
        assert_eq!(date("Sun, 06 Nov 1994 08:49:37 GMT"), Some(784_111_777));
        assert_eq!(date("Fri, 01 Mar 2024 00:00:00 GMT"), Some(1_709_251_200));
        for bad in ["", "-1", "soon", "Sun, 00 Nov 1994 08:49:37 GMT", "Sun, 06 Nov 1994 08:49 GMT", "x, y"] {
            assert_eq!(retry_after(bad), None, "{bad}");
        }
    }

    proptest! {
        #[test]
        fn no_header_is_a_panic(text in ".{0,40}", day in 0u64..99, year in 0u64..99_999) {
            retry_after(&text);
            retry_after(&format!("x, {day} Feb {year} 1:2:3 GMT"));
        }
    }
}
