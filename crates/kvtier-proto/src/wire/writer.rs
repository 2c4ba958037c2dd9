//! Writer functions: each appends one value, or header, in its shortest form.

/// Appends nil.
pub fn write_nil(out: &mut Vec<u8>) {
    out.push(0xc0);
}

/// Appends a bool.
pub fn write_bool(out: &mut Vec<u8>, value: bool) {
    out.push(if value { 0xc3 } else { 0xc2 });
}

/// Appends an unsigned integer.
#[inline]
pub fn write_uint(out: &mut Vec<u8>, value: u64) {
    if value < 0x80 {
        out.push(value as u8);
    } else if let Ok(value) = u8::try_from(value) {
        out.extend_from_slice(&[0xcc, value]);
    } else if let Ok(value) = u16::try_from(value) {
        out.push(0xcd);
        out.extend_from_slice(&value.to_be_bytes());
    } else if let Ok(value) = u32::try_from(value) {
        out.push(0xce);
        out.extend_from_slice(&value.to_be_bytes());
    } else {
        out.push(0xcf);
        out.extend_from_slice(&value.to_be_bytes());
    }
}

/// Appends a signed integer.
pub fn write_int(out: &mut Vec<u8>, value: i64) {
    if let Ok(value) = u64::try_from(value) {
        write_uint(out, value);
    } else if value >= -32 {
        out.push(value as u8);
    } else if let Ok(value) = i8::try_from(value) {
        out.extend_from_slice(&[0xd0, value as u8]);
    } else if let Ok(value) = i16::try_from(value) {
        out.push(0xd1);
        out.extend_from_slice(&value.to_be_bytes());
    } else if let Ok(value) = i32::try_from(value) {
        out.push(0xd2);
        out.extend_from_slice(&value.to_be_bytes());
    } else {
        out.push(0xd3);
        out.extend_from_slice(&value.to_be_bytes());
    }
}

/// Appends a float, always 8 bytes wide.
pub fn write_f64(out: &mut Vec<u8>, value: f64) {
    out.push(0xcb);
    out.extend_from_slice(&value.to_be_bytes());
}

/// Appends a text.
pub fn write_str(out: &mut Vec<u8>, text: &str) {
    let len = text.len();
    if len < 32 {
        out.push(0xa0 | len as u8);
    } else {
        write_len(out, len, [Some(0xd9), Some(0xda), Some(0xdb)]);
    }
    out.extend_from_slice(text.as_bytes());
}

/// Appends bytes.
pub fn write_bin(out: &mut Vec<u8>, bytes: &[u8]) {
    write_bin_len(out, bytes.len());
    out.extend_from_slice(bytes);
}

/// Appends the header of bytes; `len` of them must follow.
pub fn write_bin_len(out: &mut Vec<u8>, len: usize) {
    write_len(out, len, [Some(0xc4), Some(0xc5), Some(0xc6)]);
}

/// Appends an array's header; `len` values must follow.
pub fn write_array_len(out: &mut Vec<u8>, len: usize) {
    if len < 16 {
        out.push(0x90 | len as u8);
    } else {
        write_len(out, len, [None, Some(0xdc), Some(0xdd)]);
    }
}

/// Appends a map's header; `len` pairs must follow.
pub fn write_map_len(out: &mut Vec<u8>, len: usize) {
    if len < 16 {
        out.push(0x80 | len as u8);
    } else {
        write_len(out, len, [None, Some(0xde), Some(0xdf)]);
    }
}

/// Appends an extension value.
pub fn write_ext(out: &mut Vec<u8>, code: i8, body: &[u8]) {
    match body.len() {
        1 => out.push(0xd4),
        2 => out.push(0xd5),
        4 => out.push(0xd6),
        8 => out.push(0xd7),
        16 => out.push(0xd8),
        len => write_len(out, len, [Some(0xc7), Some(0xc8), Some(0xc9)]),
    }
    out.push(code as u8);
    out.extend_from_slice(body);
}

/// Appends an array of token ids.
pub fn write_tokens(out: &mut Vec<u8>, tokens: &[u32]) {
    out.reserve(tokens.len() * 3 + 5);
    write_array_len(out, tokens.len());
    for &token in tokens {
        write_uint(out, u64::from(token));
    }
}

/// Appends a marker and a length; `markers` are those for 1, 2 and 4 bytes of length.
///
/// Panics for 4 GiB and more, which no frame of the protocol holds.
fn write_len(out: &mut Vec<u8>, len: usize, markers: [Option<u8>; 3]) {
    match (markers, u8::try_from(len), u16::try_from(len)) {
        ([Some(marker), _, _], Ok(len), _) => out.extend_from_slice(&[marker, len]),
        ([_, Some(marker), _], _, Ok(len)) => {
            out.push(marker);
            out.extend_from_slice(&len.to_be_bytes());
        }
        ([_, _, marker], _, _) => {
            let len = u32::try_from(len).expect("a value of the protocol is shorter than 4 GiB");
            out.push(marker.unwrap_or(0xc1));
            out.extend_from_slice(&len.to_be_bytes());
        }
    }
}
