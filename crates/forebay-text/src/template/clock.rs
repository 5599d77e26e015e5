//! The date for templates that print it: `strftime` on UTC, without a time-zone database.

use std::fmt::Write;

const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Formats seconds since 1970 (UTC) with the usual directives; an unknown directive is returned as the error.
pub(super) fn strftime(seconds: u64, format: &str) -> Result<String, char> {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil_date(days);
    let weekday = DAYS[(days % 7) as usize];
    let month_name = MONTHS[(month - 1) as usize];
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        // Writing to a String cannot fail.
        let _ = match chars.next().unwrap_or('%') {
            'Y' => write!(out, "{year}"),
            'y' => write!(out, "{:02}", year % 100),
            'm' => write!(out, "{month:02}"),
            'd' => write!(out, "{day:02}"),
            'H' => write!(out, "{hour:02}"),
            'M' => write!(out, "{minute:02}"),
            'S' => write!(out, "{second:02}"),
            'B' => out.write_str(month_name),
            'b' => out.write_str(&month_name[..3]),
            'A' => out.write_str(weekday),
            'a' => out.write_str(&weekday[..3]),
            'F' => write!(out, "{year}-{month:02}-{day:02}"),
            'T' => write!(out, "{hour:02}:{minute:02}:{second:02}"),
            '%' => out.write_str("%"),
            unknown => return Err(unknown),
        };
    }
    Ok(out)
}

/// Year, month 1 to 12 and day of month of a day counted from 1970-01-01.
fn civil_date(mut days: u64) -> (u64, u64, u64) {
    // 400 years always have the same number of days, which keeps the loops short.
    const CYCLE: u64 = 146_097;
    let mut year = 1970 + days / CYCLE * 400;
    days %= CYCLE;
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let mut month = 1;
    for length in [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values from Python's `datetime.fromtimestamp(t, timezone.utc).strftime(...)`.
    #[test]
    fn equals_python() {
        for (seconds, expected) in [
            (0, "Thu Thursday 01 Jan January 1970 00:00:00"),
            (951_782_399, "Mon Monday 28 Feb February 2000 23:59:59"),
            (951_782_400, "Tue Tuesday 29 Feb February 2000 00:00:00"),
            (1_796_169_600, "Wed Wednesday 02 Dec December 2026 00:00:00"),
            (4_107_542_399, "Sun Sunday 28 Feb February 2100 23:59:59"),
            (4_107_542_400, "Mon Monday 01 Mar March 2100 00:00:00"),
            (253_402_300_799, "Fri Friday 31 Dec December 9999 23:59:59"),
        ] {
            assert_eq!(strftime(seconds, "%a %A %d %b %B %Y %H:%M:%S").unwrap(), expected);
        }
        assert_eq!(strftime(951_782_400, "%F|%T|%y|%m|100%%|%").unwrap(), "2000-02-29|00:00:00|00|02|100%|%");
        assert_eq!(strftime(0, "%Q"), Err('Q'));
    }
}
