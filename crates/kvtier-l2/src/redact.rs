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
            rest = &value[length(value)..];
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
