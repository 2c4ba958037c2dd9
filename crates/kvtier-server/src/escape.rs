//! Text of others on one line of a log or a terminal.

use std::borrow::Cow;

/// Replaces what ends a line, drives a terminal or reorders what it shows by escapes as JSON has them.
pub fn escape(text: &str) -> Cow<'_, str> {
    if !text.contains(is_escaped) {
        return text.into();
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if is_escaped(c) => out.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.into()
}

/// Control characters, line separators, and what is invisible or changes the direction of writing.
fn is_escaped(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{61c}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_acts_on_a_terminal_is_escaped() {
        let plain = "org/Model-7B \"q\" \\ é 模型 🦀";
        assert!(matches!(escape(plain), Cow::Borrowed(text) if text == plain));
        assert_eq!(
            escape("a\nb\r\t\u{1b}[2J\u{7}\0\u{7f}\u{9b}31m\u{2028}\u{202e}"),
            "a\\nb\\r\\t\\u001b[2J\\u0007\\u0000\\u007f\\u009b31m\\u2028\\u202e"
        );
    }
}
