//! Settings of the fake driver and faults of its functions; the statements are in the crate's documentation.

use crate::abi::CUresult;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Act {
    Fail(CUresult),
    Hold,
}

/// What happens to calls of a function: the `first` from when the rule is given, to the `last`.
struct Rule {
    name: String,
    act: Act,
    first: u64,
    last: u64,
    seen: u64,
}

/// The settings in force.
pub(crate) struct Script {
    pub devices: usize,
    pub memory: u64,
    pub driver: i32,
    rules: Vec<Rule>,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            devices: 1,
            memory: 8 << 30,
            driver: 12080,
            rules: Vec::new(),
        }
    }
}

impl Script {
    /// Applies statements up to the first that is wrong, which is named.
    pub(crate) fn apply(&mut self, text: &str, known: impl Fn(&str) -> bool) -> Result<(), String> {
        let lines = text.split(';').map(str::trim);
        for line in lines.filter(|line| !line.is_empty()) {
            self.statement(line, &known)
                .ok_or_else(|| format!("cannot read the statement \"{line}\""))?;
        }
        Ok(())
    }

    fn statement(&mut self, line: &str, known: &impl Fn(&str) -> bool) -> Option<()> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match (word, line.split_once('=')) {
            ("reset", None) => self.rules.clear(),
            ("release", None) => self.rules.retain(|rule| rule.act != Act::Hold),
            ("hold" | "fail", _) => {
                let (what, when) = rest.split_once('@').unwrap_or((rest, "1+"));
                let (name, act) = match what.split_once('=') {
                    Some((name, code)) if word == "fail" => (name, Act::Fail(code.parse().ok()?)),
                    None if word == "hold" => (what, Act::Hold),
                    _ => return None,
                };
                let first = when.trim_end_matches('+').parse().ok()?;
                let last = if when.ends_with('+') { u64::MAX } else { first };
                let name = Some(name).filter(|name| first > 0 && known(name))?.into();
                self.rules.push(Rule {
                    name,
                    act,
                    first,
                    last,
                    seen: 0,
                });
            }
            (_, Some(("devices", n))) => self.devices = n.parse().ok().filter(|&n| n <= 16)?,
            (_, Some(("memory", bytes))) => self.memory = bytes.parse().ok()?,
            (_, Some(("driver", version))) => self.driver = version.parse().ok()?,
            _ => return None,
        }
        Some(())
    }

    /// Counts one call of `name`; returns whether it is held, and the code with which it fails.
    pub(crate) fn act(&mut self, name: &str) -> (bool, Option<CUresult>) {
        let (mut held, mut fails) = (false, None);
        for rule in self.rules.iter_mut().filter(|rule| rule.name == name) {
            rule.seen += 1;
            match rule.act {
                _ if !(rule.first..=rule.last).contains(&rule.seen) => {}
                Act::Hold => held = true,
                Act::Fail(code) => fails = Some(code),
            }
        }
        (held, fails)
    }

    pub(crate) fn holds(&self, name: &str) -> bool {
        let mut rules = self.rules.iter();
        rules.any(|rule| rule.name == name && rule.act == Act::Hold)
    }
}
