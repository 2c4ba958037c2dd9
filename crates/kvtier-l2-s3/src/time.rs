//! Times as S3 and the services of its credentials write them, all in UTC.

use std::time::{Duration, SystemTime};

const DAY: u64 = 24 * 3600;

/// Returns the form of a signature, `20261122T140406Z`.
pub(super) fn compact(seconds: u64) -> String {
    let (year, month, day) = date(seconds / DAY);
    let of_day = seconds % DAY;
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}{month:02}{day:02}T{hour:02}{minute:02}{second:02}Z")
}

/// Reads `2026-11-22T14:04:06.000Z` or the same without its fraction, as seconds since the Unix epoch.
pub(super) fn parse(text: &str) -> Option<u64> {
    let text = text
        .strip_suffix('Z')
        .or_else(|| text.strip_suffix("+00:00"))?;
    let (day, time) = text.split_once('T')?;
    let mut day = day.splitn(3, '-').map(|part| part.parse::<u64>().ok());
    let (year, month, day) = (day.next()??, day.next()??, day.next()??);
    let time = time.split('.').next()?;
    let mut time = time.splitn(3, ':').map(|part| part.parse::<u64>().ok());
    let (hour, minute, second) = (time.next()??, time.next()??, time.next()??);
    let is_valid = (1970..=9999).contains(&year)
        && (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24
        && minute < 60
        && second <= 60;
    is_valid.then(|| days(year, month, day) * DAY + hour * 3600 + minute * 60 + second)
}

/// Reads the date of a header.
pub(super) fn parse_header(text: &str) -> Option<u64> {
    let time = httpdate::parse_http_date(text).ok()?;
    Some(time.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_secs())
}

/// Seconds since the Unix epoch.
pub(super) fn now() -> u64 {
    let elapsed = SystemTime::UNIX_EPOCH.elapsed();
    elapsed.unwrap_or(Duration::ZERO).as_secs()
}

/// Days from the Unix epoch to a date of the Gregorian calendar, whose years begin in March here.
fn days(year: u64, month: u64, day: u64) -> u64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (year / 400, year % 400);
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

/// The inverse of [`days`].
fn date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_read_back() {
        assert_eq!(compact(0), "19700101T000000Z");
        assert_eq!(parse("2026-11-22T14:04:06.000Z"), Some(1_795_356_246));
        assert_eq!(compact(1_795_356_246), "20261122T140406Z");
        assert_eq!(
            parse_header("Sun, 22 Nov 2026 14:04:06 GMT"),
            Some(1_795_356_246)
        );
        for day in 0..80_000 {
            let (year, month, of_month) = date(day);
            assert_eq!(days(year, month, of_month), day);
        }
        for bad in [
            "",
            "2026",
            "2026-13-01T00:00:00Z",
            "0-1-1T0:0:0Z",
            "x",
            "2026-01-01T00:00Z",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
