//! Redaction of secrets in answers, errors and logs.
//!
//! A secret is the value of a field with the name of one, or what precedes the `@` of a URL. Errors of configurations and
//! adapters are redacted when they are made, settings when they are shown.

use serde_json::Value;

/// Replacement of a secret.
pub const HIDDEN: &str = "***";

/// Parts of the names of secret fields, without `_` and `-`.
const PARTS: &[&str] = &[
    "password",
    "passwd",
    "passphrase",
    "secret",
    "credential",
    "accesskey",
    "apikey",
    "accountkey",
    "privatekey",
    "encryptionkey",
    "username",
    "authorization",
    "connectionstring",
    "bearer",
];

/// Complete names of secret fields.
const NAMES: &[&str] = &[
    "user",
    "login",
    "pass",
    "pwd",
    "auth",
    "sas",
    "sig",
    "signature",
];

/// Shortest secret that is searched for by its value, in bytes. Shorter ones occur in other words.
const MIN_LITERAL: usize = 4;

/// Secrets by their values, for texts of a program that knows them. The longest comes first.
#[derive(Debug, Clone, Default)]
pub struct Literals(Vec<String>);

impl Literals {
    /// Returns the secrets of settings, at any depth.
    #[must_use]
    pub fn of(settings: &Value) -> Self {
        let mut literals = Vec::new();
        collect(settings, false, &mut literals);
        Self::sorted(literals)
    }

    /// Adds those of the process's environment, which a program inherits.
    #[must_use]
    pub fn with_environment(self) -> Self {
        let mut literals = self.0;
        for (name, value) in std::env::vars_os() {
            // The others, such as USER and PWD, are in every text.
            let is_hidden = |name: &str| name.contains('_') && is_secret(name);
            if name.to_str().is_some_and(is_hidden) {
                collect(&value.to_string_lossy().into(), true, &mut literals);
            }
        }
        Self::sorted(literals)
    }

    fn sorted(mut literals: Vec<String>) -> Self {
        literals.retain(|literal| literal.len() >= MIN_LITERAL);
        literals.sort_unstable_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
        literals.dedup();
        Self(literals)
    }

    /// Returns the text without them.
    #[must_use]
    pub fn hide(&self, shown: &str) -> String {
        let hide = |shown: String, literal: &String| shown.replace(literal.as_str(), HIDDEN);
        self.0.iter().fold(shown.to_owned(), hide)
    }
}

/// Adds the secrets in a setting; all of it if its name is that of a secret.
fn collect(setting: &Value, is_hidden: bool, literals: &mut Vec<String>) {
    match setting {
        Value::Object(fields) => {
            for (name, inner) in fields {
                collect(inner, is_hidden || is_secret(name), literals);
            }
        }
        Value::Array(list) => {
            for inner in list {
                collect(inner, is_hidden, literals);
            }
        }
        Value::String(shown) if !is_hidden => {
            scan(shown, &mut |secret| {
                let parts = secret.split(':').chain([secret]);
                literals.extend(parts.map(|part| part.trim_matches(['"', '\'', '\\']).to_owned()));
            });
        }
        // A program may show it line by line, and quoted.
        Value::String(secret) => {
            let lines = secret.lines().map(str::trim);
            let forms = lines.flat_map(|line| [line.to_owned(), line.escape_debug().to_string()]);
            literals.extend(forms);
        }
        Value::Number(secret) if is_hidden => literals.push(secret.to_string()),
        _ => {}
    }
}

/// Whether the field of this name holds a secret, such as `password`, `AWS_SECRET_ACCESS_KEY` or `session-token`.
#[must_use]
pub fn is_secret(name: &str) -> bool {
    let name: String = name
        .chars()
        .filter(|c| !['_', '-'].contains(c))
        .map(|c| c.to_ascii_lowercase())
        .collect();
    NAMES.contains(&name.as_str())
        || name.ends_with("token")
        || PARTS.iter().any(|part| name.contains(part))
}

/// Returns the value with its secrets replaced at any depth.
#[must_use]
pub fn value(shown: &Value) -> Value {
    match shown {
        Value::Object(fields) => {
            let field = |(name, inner): (&String, &Value)| {
                let is_hidden = is_secret(name) && !inner.is_null();
                let inner = if is_hidden {
                    HIDDEN.into()
                } else {
                    value(inner)
                };
                (name.clone(), inner)
            };
            Value::Object(fields.iter().map(field).collect())
        }
        Value::Array(list) => list.iter().map(value).collect(),
        Value::String(shown) => text(shown).into(),
        other => other.clone(),
    }
}

/// Returns the text without users and passwords of URLs and without the values of `name=value` and `name: value` of
/// secret names, quoted or not. The end of such a value is a guess, rather late than early.
#[must_use]
pub fn text(shown: &str) -> String {
    scan(shown, &mut |_| {})
}

/// Returns the text as [`text`] does, and passes what it hides to `hidden`.
fn scan(shown: &str, hidden: &mut dyn FnMut(&str)) -> String {
    let mut out = String::with_capacity(shown.len());
    let mut rest = shown;
    while let Some(at) = rest.find([':', '=']) {
        let (before, separator) = rest.split_at(at);
        out.push_str(before);
        if let Some(authority) = separator.strip_prefix("://") {
            out.push_str("://");
            let end = authority.find(|c: char| c.is_whitespace() || "/?#\"'`".contains(c));
            let end = end.unwrap_or(authority.len());
            rest = match authority[..end].rfind('@').filter(|at| *at > 0) {
                None => authority,
                Some(at) => {
                    out.push_str(HIDDEN);
                    hidden(&authority[..at]);
                    &authority[at..]
                }
            };
            continue;
        }
        let (separator, after) = separator.split_at(1);
        out.push_str(separator);
        rest = after;
        let name = out[..out.len() - 1].trim_end_matches(['"', '\'', '\\', ' ']);
        let name = name.rsplit(|c: char| !(c.is_ascii_alphanumeric() || "_-".contains(c)));
        if name.clone().next().is_some_and(is_secret) {
            let value = rest.trim_start_matches(' ');
            out.push_str(&rest[..rest.len() - value.len()]);
            out.push_str(HIDDEN);
            let (secret, after) = value.split_at(length(value));
            hidden(secret);
            rest = after;
        }
    }
    out.push_str(rest);
    out
}

/// Returns the length of the value that `text` starts with.
fn length(text: &str) -> usize {
    let bare = text.trim_start_matches('\\');
    let escapes = text.len() - bare.len();
    match bare.chars().next() {
        Some('{' | '[') => text.len(),
        Some(quote @ ('"' | '\'')) => {
            let mut is_escaped = false;
            let end = bare.char_indices().skip(1).find(|(_, c)| {
                // A quote escaped as the first one closes the value.
                let ends = *c == quote && is_escaped == (escapes > 0);
                is_escaped = *c == '\\' && !is_escaped;
                ends
            });
            end.map_or(text.len(), |(at, _)| escapes + at + 1)
        }
        _ => text
            .find(|c: char| c.is_whitespace() || ",;&}])\"'".contains(c))
            .unwrap_or(text.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn secret_names_are_recognised() {
        for name in [
            "password",
            "Redis_Password",
            "AWS_SECRET_ACCESS_KEY",
            "access-key-id",
            "s3_session_token",
            "username",
            "user",
            "api_key",
            "sig",
            "Authorization",
            "client_secret",
            "http-token",
        ] {
            assert!(is_secret(name), "{name}");
        }
        for name in [
            "base_path",
            "type",
            "key",
            "keys",
            "token_ids",
            "cache_salt",
            "endpoint",
            "max_capacity_gb",
            "user_agent",
            "bucket",
            "http-token-file",
        ] {
            assert!(!is_secret(name), "{name}");
        }
    }

    #[test]
    fn secrets_are_redacted_completely() {
        for shown in [
            r#"key "password": "MARK" is not allowed; give a text"#,
            r#"key "password": "a \" MARK" is not allowed"#,
            r#"key "password": "MARK..."#,
            r#""{\"type\":\"resp\",\"password\":\"MARK\",\"x\":1" is not JSON"#,
            r#""{'password': 'MARK'}" is not JSON"#,
            "{type:resp,password:MARK} is not JSON",
            r#"{"credentials": {"a": ["MARK", "MARK"]}, "b": "MARK"}"#,
            "redis://user:MARK@host:6379/0 does not answer",
            "redis://:MARK@MARK@host: refused",
            "https://MARK@host",
            "https://host/path?a=1&sig=MARK&b=2",
            "AWS_SECRET_ACCESS_KEY=MARK aws s3",
            "PASSWORD = 'MARK MARK'",
            "password:\u{20ac}MARK",
        ] {
            let redacted = text(shown);
            assert!(
                !redacted.contains("MARK") && redacted.contains(HIDDEN),
                "{redacted}"
            );
            assert!(!value(&json!({ "a": [shown] })).to_string().contains("MARK"));
        }
    }

    #[test]
    fn literals_are_the_values_of_secret_settings() {
        let settings = json!({
            "password": "hunter2", "credentials": {"a": ["first line\n  second \"line\""], "n": 123456},
            "url": "redis://svc-name:pass@word@host/1", "dsn": "host=db password='in text' port=1",
            "bucket": "public", "token": "abc", "secret": null
        });
        let literals = Literals::of(&settings);
        for shown in [
            "login of me with hunter2 failed",
            "<hunter2>",
            "at first line: no",
            "at \"second \\\"line\\\"\": no",
            "id 123456",
            "svc-name has another",
            "it is pass@word",
            "got in text",
        ] {
            let redacted = literals.hide(shown);
            assert!(redacted.contains(HIDDEN), "{shown}");
        }
        assert_eq!(literals.hide("hunter2, hunter2"), "***, ***");
        let other = "a public abc of host db, null at port 1";
        assert_eq!(literals.hide(other), other);
    }

    #[test]
    fn other_text_is_unchanged() {
        for shown in [
            "",
            "type \"fs\": key \"base_path\": 7 is not allowed; give a path",
            "https://host:80/a@b is there: a=b, c: \"d\"",
            "a::b = c://",
            "ipc://@name is no file",
            "\u{e4}: \u{20ac}=\u{20ac}",
        ] {
            assert_eq!(text(shown), shown);
        }
        assert_eq!(
            text("redis://u:p@h/1?x=2 and password=a,b=c"),
            "redis://***@h/1?x=2 and password=***,b=c"
        );
        let shown = json!({ "type": "s3", "password": null, "token": 7, "inner": { "user": "me", "n": [1, true] } });
        let redacted = json!({ "type": "s3", "password": null, "token": "***", "inner": { "user": "***", "n": [1, true] } });
        assert_eq!(value(&shown), redacted);
    }
}
