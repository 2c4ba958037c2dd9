//! Output of commands.

use std::fmt::Display;
use std::io::{ErrorKind, Result, Stdout, Write};

use kvtier_server::escape::escape;
use serde_json::{Map, Value};

/// Stdout for results. If the reader closes it, as `head` does, the rest is dropped, and the command ends as it would have.
pub fn stdout() -> Out {
    Out(std::io::stdout())
}

/// Stdout that ignores a closed pipe.
pub struct Out(Stdout);

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        unless_closed(self.0.write(bytes), bytes.len())
    }

    fn flush(&mut self) -> Result<()> {
        unless_closed(self.0.flush(), ())
    }
}

fn unless_closed<T>(outcome: Result<T>, otherwise: T) -> Result<T> {
    match outcome {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(otherwise),
        outcome => outcome,
    }
}

/// Prints an error to stderr, in the form of all commands. It has one line, unless it quotes the output of another program.
pub fn complain(command: &str, text: impl Display) {
    eprintln!("kvtier {command}: {}", escape_lines(&text.to_string()));
}

fn escape_lines(text: &str) -> String {
    let lines: Vec<_> = text.lines().map(escape).collect();
    lines.join("\n")
}

/// A server's answer for tables and sentences. Names in it were chosen by its clients, and may contain terminal escapes.
pub fn shown(value: &Value) -> Value {
    match value {
        Value::String(text) => escape(text).into(),
        Value::Array(list) => list.iter().map(shown).collect(),
        Value::Object(object) => {
            let entries = object.iter();
            let entries = entries.map(|(key, value)| (escape(key).into_owned(), shown(value)));
            Value::Object(Map::from_iter(entries))
        }
        other => other.clone(),
    }
}

/// A server's answer as JSON, which has its own escapes: the value stays the same.
pub fn json(value: &Value) -> String {
    escape_lines(&format!("{value:#}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn terminal_escapes_in_names_are_escaped() {
        let name = "m\n\u{1b}[2J\u{2028}\u{9b}2J";
        let status = json!({ "workers": { name: [{ "model_name": name }] } });
        assert!(!shown(&status).to_string().contains(char::is_control));
        assert_eq!(
            shown(&status)["workers"]["m\\n\\u001b[2J\\u2028\\u009b2J"][0]["model_name"],
            "m\\n\\u001b[2J\\u2028\\u009b2J"
        );
        let text = json(&status);
        assert!(!text.contains(|c: char| c != '\n' && c.is_control()));
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), status);
    }
}
