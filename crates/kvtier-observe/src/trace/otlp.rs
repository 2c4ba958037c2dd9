//! OTLP: the request of `TraceService.Export` as Protocol Buffers, and its response.
//!
//! Numbers of fields are those of `opentelemetry/proto/trace/v1/trace.proto` and the files that it imports (OTLP 1.x, where they
//! are stable).

use super::span::{Span, Value};

/// `SPAN_KIND_INTERNAL`.
const INTERNAL: u64 = 1;

/// `STATUS_CODE_ERROR`.
const ERROR: u64 = 2;

/// Flags of a span: it is sampled, and known is whether its parent is in another process.
const FLAGS: u32 = 0x101;

/// The parent is in another process.
const REMOTE_PARENT: u32 = 0x200;

/// Appends fields of a message.
#[derive(Default)]
struct OtlpMessage(Vec<u8>);

impl OtlpMessage {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn tag(&mut self, field: u64, wire_type: u64) {
        self.varint(field << 3 | wire_type);
    }

    fn number(&mut self, field: u64, value: u64) {
        self.tag(field, 0);
        self.varint(value);
    }

    fn fixed64(&mut self, field: u64, value: u64) {
        self.tag(field, 1);
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn fixed32(&mut self, field: u64, value: u32) {
        self.tag(field, 5);
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, value: &[u8]) {
        self.tag(field, 2);
        self.varint(value.len() as u64);
        self.0.extend_from_slice(value);
    }

    fn message(&mut self, field: u64, write: impl FnOnce(&mut Self)) {
        let mut inner = Self::default();
        write(&mut inner);
        self.bytes(field, &inner.0);
    }

    /// `KeyValue`.
    fn attribute(&mut self, field: u64, name: &str, value: &Value) {
        self.message(field, |pair| {
            pair.bytes(1, name.as_bytes());
            pair.message(2, |any| match value {
                Value::Text(text) => any.bytes(1, text.as_bytes()),
                // Two's complement.
                Value::Int(number) => any.number(3, number.cast_unsigned()),
                Value::Double(number) => any.fixed64(4, number.to_bits()),
            });
        });
    }

    /// `Span`.
    fn span(&mut self, field: u64, span: &Span) {
        self.message(field, |message| {
            message.bytes(1, &span.trace);
            message.bytes(2, &span.id);
            if let Some(parent) = &span.parent {
                message.bytes(4, parent);
            }
            message.bytes(5, span.name.as_bytes());
            message.number(6, INTERNAL);
            message.fixed64(7, span.start);
            message.fixed64(8, span.end);
            for (name, value) in &span.attributes {
                message.attribute(9, name, value);
            }
            if let Some(failure) = span.failure {
                message.message(15, |status| {
                    status.bytes(2, failure.as_bytes());
                    status.number(3, ERROR);
                });
            }
            let remote = if span.is_parent_remote {
                REMOTE_PARENT
            } else {
                0
            };
            message.fixed32(16, FLAGS | remote);
        });
    }
}

/// The attributes of a process, encoded once: `Resource`.
pub fn resource(attributes: &[(String, String)]) -> Vec<u8> {
    let mut resource = OtlpMessage::default();
    for (name, value) in attributes {
        resource.attribute(1, name, &Value::from(value.as_str()));
    }
    resource.0
}

/// `ExportTraceServiceRequest` of these spans, with a [`resource`].
pub fn request<'a>(resource: &[u8], spans: impl Iterator<Item = &'a Span>) -> Vec<u8> {
    let mut request = OtlpMessage::default();
    request.message(1, |resource_spans| {
        resource_spans.bytes(1, resource);
        resource_spans.message(2, |scope_spans| {
            scope_spans.message(1, |scope| {
                scope.bytes(1, b"kvtier");
                scope.bytes(2, env!("CARGO_PKG_VERSION").as_bytes());
            });
            spans.for_each(|span| scope_spans.span(2, span));
        });
    });
    request.0
}

/// Spans that a collector has not taken, and why, by its `ExportTraceServiceResponse`. A malformed one
/// rejects none.
pub fn rejected(response: &[u8]) -> (u64, &[u8]) {
    let (mut rejected, mut reason) = (0, &[][..]);
    for (field, value) in Fields(response) {
        let (1, Field::Bytes(partial_success)) = (field, value) else {
            continue;
        };
        for (field, value) in Fields(partial_success) {
            match (field, value) {
                // An int64, so never more than its positive half.
                (1, Field::Number(spans)) if spans <= i64::MAX as u64 => rejected = spans,
                (2, Field::Bytes(text)) => reason = text,
                _ => {}
            }
        }
    }
    (rejected, reason)
}

/// The fields of a message, up to the first malformed one.
struct Fields<'a>(&'a [u8]);

enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    Fixed,
}

impl<'a> Fields<'a> {
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn take(&mut self, len: u64) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(usize::try_from(len).ok()?)?;
        self.0 = rest;
        Some(taken)
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = (u64, Field<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        let tag = self.varint()?;
        let value = match tag & 7 {
            0 => Field::Number(self.varint()?),
            1 => self.take(8).map(|_| Field::Fixed)?,
            2 => {
                let len = self.varint()?;
                Field::Bytes(self.take(len)?)
            }
            5 => self.take(4).map(|_| Field::Fixed)?,
            _ => return None,
        };
        Some((tag >> 3, value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn span_is_encoded_as_the_field_numbers_say() {
        let span = Span {
            trace: [1; 16],
            id: [2; 8],
            parent: Some([3; 8]),
            is_parent_remote: true,
            name: "n",
            start: 4,
            end: 5,
            attributes: vec![("a", (-1_i64 as u64).into()), ("b", "x".into())],
            failure: Some("no"),
        };
        let mut message = OtlpMessage::default();
        message.span(2, &span);
        // By `protoc --encode` of the same message.
        let mut wanted = vec![0x12, 105, 0x0a, 16];
        wanted.extend([1; 16]);
        wanted.extend([0x12, 8, 2, 2, 2, 2, 2, 2, 2, 2]);
        wanted.extend([0x22, 8, 3, 3, 3, 3, 3, 3, 3, 3]);
        wanted.extend(*b"\x2a\x01n\x30\x01");
        wanted.extend(*b"\x39\x04\0\0\0\0\0\0\0\x41\x05\0\0\0\0\0\0\0");
        wanted.extend(*b"\x4a\x0f\x0a\x01a\x12\x0a\x18\xff\xff\xff\xff\xff\xff\xff\xff\x7f");
        wanted.extend(*b"\x4a\x08\x0a\x01b\x12\x03\x0a\x01x");
        wanted.extend(*b"\x7a\x06\x12\x02no\x18\x02");
        wanted.extend(*b"\x85\x01\x01\x03\0\0");
        wanted[1] = u8::try_from(wanted.len() - 2).unwrap();
        assert_eq!(message.0, wanted);
    }

    #[test]
    fn rejected_spans_of_a_response_are_counted() {
        assert_eq!(rejected(b""), (0, &b""[..]));
        assert_eq!(rejected(b"\x0a\x08\x08\x07\x12\x04full"), (7, &b"full"[..]));
        // Unknown fields are skipped.
        let more = b"\x11\0\0\0\0\0\0\0\0\x1d\0\0\0\0\x0a\x02\x08\x02";
        assert_eq!(rejected(more), (2, &b""[..]));
    }

    #[test]
    fn malformed_responses_reject_nothing() {
        for response in [
            &b"\x0a"[..],
            b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
            b"\x0a\x0b\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
            b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
            b"\x0b",
        ] {
            assert_eq!(rejected(response).0, 0, "{response:?}");
        }
    }
}
