//! Bearer tokens: which clients may use the HTTP API, and for what.
//!
//! One line per token: `ROLE NAME TOKEN`. Only their hashes are kept, so nothing can print one.

use std::fmt;

use kvtier_common::error::{Error, Result};

/// Fewest characters of a token: 16 of base64 are 96 bits, more than any client can try.
const SHORTEST: usize = 16;

/// Most characters of one.
const LONGEST: usize = 512;

/// Most characters of a name.
const NAME: usize = 64;

/// Most tokens: a presented one is compared with all of them.
const MOST: usize = 1000;

/// What a token is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Role {
    /// Reads.
    Read,
    /// Reads, and changes what there is to change.
    Admin,
}

impl Role {
    /// Name of the role, as the file has it.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Role::Read => "read",
            Role::Admin => "admin",
        }
    }
}

/// A token's owner.
#[derive(Clone, PartialEq)]
pub(crate) struct Token {
    /// Name of the client, for the log.
    pub(crate) name: String,
    pub(crate) role: Role,
    hash: blake3::Hash,
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.role.as_str())
    }
}

/// All of them.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Tokens(Vec<Token>);

impl Tokens {
    /// Reads lines; empty ones and those that begin with `#` are none.
    ///
    /// # Errors
    /// The first line that is wrong, by its number and without what it says: it may be a secret in the wrong place.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self> {
        let text = std::str::from_utf8(bytes).map_err(|_| Error::refused("it is no text"))?;
        let mut tokens = Self::default();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.trim();
            if !line.is_empty() && !line.starts_with('#') {
                let token = token(line).and_then(|token| tokens.add(token));
                token.map_err(|error| error.context(format!("line {number}")))?;
            }
        }
        if tokens.0.is_empty() {
            Err(Error::refused(
                "there is no token in it; give a line ROLE NAME TOKEN",
            ))
        } else {
            Ok(tokens)
        }
    }

    fn add(&mut self, new: Token) -> Result<()> {
        if self.0.iter().any(|token| token.name == new.name) {
            return refuse(format!("{:?} has a token already", new.name));
        }
        if let Some(token) = self.0.iter().find(|token| token.hash == new.hash) {
            return refuse(format!(
                "{:?} has the same token as {:?}",
                new.name, token.name
            ));
        }
        if self.0.len() == MOST {
            return refuse(format!("more than {MOST} tokens"));
        }
        self.0.push(new);
        Ok(())
    }

    /// Tokens of both.
    ///
    /// # Errors
    /// A name or a token that both have.
    pub(crate) fn and(mut self, more: &Self) -> Result<Self> {
        for token in &more.0 {
            self.add(token.clone())?;
        }
        Ok(self)
    }

    /// Finds a presented token. The time tells nothing about the tokens there are: all are compared, as hashes, and
    /// those compare in constant time.
    pub(crate) fn find(&self, presented: &[u8]) -> Option<&Token> {
        let hash = blake3::hash(presented);
        self.0.iter().fold(None, |found, token| {
            if token.hash == hash {
                Some(token)
            } else {
                found
            }
        })
    }
}

fn refuse<T>(what: impl fmt::Display) -> Result<T> {
    Err(Error::refused(what))
}

fn token(line: &str) -> Result<Token> {
    let words: Vec<_> = line.split_ascii_whitespace().collect();
    let [role, name, secret] = words.as_slice() else {
        return refuse(format!(
            "{} words; give three, ROLE NAME TOKEN",
            words.len()
        ));
    };
    let role = match *role {
        "read" => Role::Read,
        "admin" => Role::Admin,
        _ => return refuse("the first word is no role; give read or admin"),
    };
    let is_word = |text: &str, more: &[u8]| {
        text.bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || more.contains(&byte))
    };
    if name.len() > NAME || !is_word(name, b"_.-") {
        return refuse(format!(
            "the second word is no name; give at most {NAME} letters, digits, '_', '.' and '-'"
        ));
    }
    if !(SHORTEST..=LONGEST).contains(&secret.len()) {
        return refuse(format!(
            "the token of {name:?} has {} characters; give {SHORTEST} to {LONGEST}, as from `openssl rand -hex 32`",
            secret.len()
        ));
    }
    // What RFC 6750 lets a bearer token be made of.
    if !is_word(secret, b"-._~+/=") {
        return refuse(format!(
            "the token of {name:?} has a character that no bearer token can have; give letters, digits and -._~+/="
        ));
    }
    Ok(Token {
        name: (*name).to_owned(),
        role,
        hash: blake3::hash(secret.as_bytes()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "# allowed clients\n\nadmin ops 0123456789abcdef\r\n\tread prometheus fedcba9876543210+/=\n";

    #[test]
    fn each_token_has_its_owner_and_no_other_has_any() {
        let tokens = Tokens::parse(GOOD.as_bytes()).unwrap();
        let owner = |token: &str| {
            let found = tokens.find(token.as_bytes());
            found.map(|token| (token.name.as_str(), token.role))
        };
        assert_eq!(owner("0123456789abcdef"), Some(("ops", Role::Admin)));
        assert_eq!(
            owner("fedcba9876543210+/="),
            Some(("prometheus", Role::Read))
        );
        for wrong in [
            "",
            "0123456789abcde",
            "0123456789abcdef ",
            "0123456789ABCDEF",
            "ops",
        ] {
            assert_eq!(owner(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn what_is_wrong_is_told_by_line_and_without_the_secret() {
        let marker = "MARKER-0123456789";
        for (text, told) in [
            (format!("{marker}\n"), "line 1: 1 words; give three"),
            (format!("read a {marker} {marker}"), "line 1: 4 words"),
            (
                format!("\n{marker} a b"),
                "line 2: the first word is no role; give read or admin",
            ),
            (
                format!("read {marker}! b"),
                "line 1: the second word is no name",
            ),
            (
                format!("read a {marker}\u{e4}"),
                "line 1: the token of \"a\" has a character",
            ),
            (
                format!("read a {marker}\nread a {marker}x"),
                "line 2: \"a\" has a token already",
            ),
            (
                format!("read a {marker}\nadmin b {marker}"),
                "line 2: \"b\" has the same token as \"a\"",
            ),
            (
                "read a MARKER".into(),
                "line 1: the token of \"a\" has 6 characters; give 16 to 512",
            ),
            (format!("#{marker}"), "there is no token in it"),
        ] {
            let error = Tokens::parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.starts_with(told), "{error}");
            assert!(!error.contains("MARKER"), "{error}");
        }
        assert_eq!(
            Tokens::parse(b"\xff").unwrap_err().to_string(),
            "it is no text"
        );
        let many: String = (0..=MOST).map(|n| format!("read n{n} {n:016}\n")).collect();
        assert!(
            Tokens::parse(many.as_bytes())
                .unwrap_err()
                .to_string()
                .contains("more than 1000")
        );
    }

    #[test]
    fn nothing_prints_a_token() {
        let tokens = Tokens::parse(GOOD.as_bytes()).unwrap();
        assert_eq!(
            format!("{tokens:?}"),
            "Tokens([ops (admin), prometheus (read)])"
        );
    }

    #[test]
    fn two_sources_may_not_contradict_each_other() {
        let (one, two) = ("read a 0123456789abcdef", "read b 0123456789abcdeX");
        let parse = |text: &str| Tokens::parse(text.as_bytes()).unwrap();
        assert_eq!(parse(one).and(&parse(two)).unwrap().0.len(), 2);
        assert!(parse(one).and(&parse(one)).is_err());
    }
}
