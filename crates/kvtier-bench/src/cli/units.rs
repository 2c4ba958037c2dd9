//! Numbers with units on the command line.

use std::time::Duration;

use kvtier_common::error::{Error, Result};

/// Parses a span of time: seconds, or a number with the unit ms, s or m.
pub fn duration(text: &str) -> Result<Duration> {
    let (number, scale) = split_unit(text, &[("ms", 0.001), ("s", 1.0), ("m", 60.0), ("", 1.0)])
        .ok_or_else(|| Error::refused("give a time in seconds, or such as 500ms, 30s or 2m"))?;
    if !(number * scale).is_finite() || number * scale < 0.001 || number * scale > 86_400.0 {
        return Err(Error::refused("give a time from 1ms to 24 hours"));
    }
    Ok(Duration::from_secs_f64(number * scale))
}

/// The number before the first unit that matches, and the unit's value.
pub(crate) fn split_unit(text: &str, units: &[(&str, f64)]) -> Option<(f64, f64)> {
    units.iter().find_map(|&(unit, scale)| {
        let number = text.strip_suffix(unit)?.trim().parse::<f64>().ok()?;
        Some((number, scale))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("30s"), Ok(Duration::from_secs(30)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(duration("1.5"), Ok(Duration::from_millis(1500)));
        for bad in ["", "-1s", "nans", "1e99s", "0", "5h", "ms"] {
            let error = duration(bad).unwrap_err().to_string();
            assert!(error.starts_with("give a time"), "{bad}");
        }
    }
}
