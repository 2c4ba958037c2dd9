//! The span of another process that a request belongs to (W3C Trace Context, `traceparent`).

use super::span::{SpanId, TraceId};

/// A span of another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceParent {
    pub(crate) trace: TraceId,
    pub(crate) span: SpanId,
    pub(crate) is_sampled: bool,
}

impl TraceParent {
    /// Reads the value of `traceparent`, such as `00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01`; `None` if it is
    /// invalid. Later versions may have more fields, which are skipped.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut fields = text.split('-');
        let [version] = hex(fields.next()?)?;
        let (trace, span) = (hex(fields.next()?)?, hex(fields.next()?)?);
        let [flags] = hex(fields.next()?)?;
        let is_valid = match version {
            0 => fields.next().is_none(),
            version => version != 0xff,
        };
        (is_valid && trace != [0; 16] && span != [0; 8]).then_some(Self {
            trace,
            span,
            is_sampled: flags & 1 == 1,
        })
    }
}

/// Lower case only.
fn hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    let is_lower = !text.bytes().any(|digit| digit.is_ascii_uppercase());
    (is_lower && hex::decode_to_slice(text, &mut bytes).is_ok()).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

    #[test]
    fn valid_parents_are_read() {
        let parse = |text: &str| TraceParent::parse(&text.replace("TRACE", TRACE));
        let parent = parse("00-TRACE-00f067aa0ba902b7-01").unwrap();
        assert_eq!((parent.trace[0], parent.trace[15]), (0x4b, 0x36));
        assert_eq!(parent.span, [0, 0xf0, 0x67, 0xaa, 0x0b, 0xa9, 0x02, 0xb7]);
        assert!(parent.is_sampled);
        assert!(!parse("00-TRACE-00f067aa0ba902b7-00").unwrap().is_sampled);
        assert!(parse("01-TRACE-00f067aa0ba902b7-03-later").is_some());
    }

    #[test]
    fn invalid_parents_are_none() {
        for text in [
            "",
            "00",
            "00-TRACE-00f067aa0ba902b7",
            "00-TRACE-00f067aa0ba902b7-01-more",
            "ff-TRACE-00f067aa0ba902b7-01",
            "00-TRACE-0000000000000000-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-TRACE-00F067AA0BA902B7-01",
            "00-TRACE-00f067aa0ba902b7-1",
            "00-TRACE-00f067aa0ba902\u{e4}-01",
            " 00-TRACE-00f067aa0ba902b7-01",
        ] {
            let text = text.replace("TRACE", TRACE);
            assert_eq!(TraceParent::parse(&text), None, "{text}");
        }
    }
}
