//! What commands print.

use std::fmt::Display;
use std::io::{ErrorKind, Result, Stdout, Write};

use kvtier_server::escape::escape;
use serde_json::{Map, Value};

/// Stdout for results. Whoever reads them may stop whenever he has seen enough, as `head` does: the rest goes nowhere, and
/// the command ends as it would have.
pub(crate) fn stdout() -> Out {
    Out(std::io::stdout())
}

/// See [`stdout`].
pub(crate) struct Out(Stdout);

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

/// What is wrong, on stderr, in the form that all commands have. Only what others write, such as the last words of a server,
/// has more than a line.
pub(crate) fn complain(command: &str, text: impl Display) {
    eprintln!("kvtier {command}: {}", escape_lines(&text.to_string()));
}

fn escape_lines(text: &str) -> String {
    let lines: Vec<_> = text.lines().map(escape).collect();
    lines.join("\n")
}

/// What a server says, for tables and sentences: names in it were chosen by others, and may hold what a terminal obeys.
pub(crate) fn shown(value: &Value) -> Value {
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

/// The same as JSON, which has escapes of its own: the value is what the server said.
pub(crate) fn json(value: &Value) -> String {
    escape_lines(&format!("{value:#}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_of_clients_drive_no_terminal() {
        let name = "m\n\u{1b}[2J\u{2028}\u{9b}2J";
        let told = json!({ "workers": { name: [{ "model_name": name }] } });
        assert!(!shown(&told).to_string().contains(char::is_control));
        assert_eq!(
            shown(&told)["workers"]["m\\n\\u001b[2J\\u2028\\u009b2J"][0]["model_name"],
            "m\\n\\u001b[2J\\u2028\\u009b2J"
        );
        let text = json(&told);
        assert!(!text.contains(|c: char| c != '\n' && c.is_control()));
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), told);
    }
}
