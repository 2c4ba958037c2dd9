//! Scripts: settings of the fake driver; the grammar is in the crate's documentation.

use std::collections::HashMap;

use crate::abi::CUresult;

pub(crate) const DIRECTIONS: [&str; 3] = ["h2d", "d2h", "kernel"];

/// "the k-th", or "from the k-th on".
#[derive(Clone, Copy)]
pub(crate) struct When {
    at: u64,
    forever: bool,
    seen: u64,
}

impl When {
    fn parse(text: &str) -> Option<Self> {
        let (number, forever) = match text.strip_suffix('+') {
            Some(number) => (number, true),
            None => (text, false),
        };
        let at = number.parse().ok().filter(|&at| at > 0)?;
        Some(Self {
            at,
            forever,
            seen: 0,
        })
    }

    /// Counts one call; returns whether the rule applies to it.
    pub(crate) fn hit(&mut self) -> bool {
        self.seen += 1;
        self.seen == self.at || (self.forever && self.seen > self.at)
    }
}

#[derive(Clone, Copy)]
pub(crate) enum Act {
    Fail(CUresult),
    Die,
}

#[derive(Clone)]
pub(crate) struct DeviceText {
    pub uuid: [u8; 16],
    pub name: String,
    pub bus: String,
}

/// The settings in force. Rules count from the moment they are given.
pub(crate) struct Script {
    pub devices: Vec<DeviceText>,
    pub memory: u64,
    pub driver: i32,
    pub rules: HashMap<String, Vec<(When, Act)>>,
    /// Bytes per second by direction; 0: no limit.
    pub rates: [u64; 3],
    pub holds: [bool; 3],
    /// Functions whose calls block.
    pub held: HashMap<String, When>,
    pub event_never: Option<When>,
    pub import_never: Option<When>,
    pub batch: bool,
    pub ptx: bool,
    pub fabric: bool,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            devices: vec![device(0)],
            memory: 8 << 30,
            driver: 12080,
            rules: HashMap::new(),
            rates: [0; 3],
            holds: [false; 3],
            held: HashMap::new(),
            event_never: None,
            import_never: None,
            batch: true,
            ptx: true,
            fabric: true,
        }
    }
}

fn device(ordinal: usize) -> DeviceText {
    let mut uuid = *b"\x5c\xa1\xab\x1e\0\0\x40\0\x80\0\0\0\0\0\0\0";
    uuid[15] = ordinal as u8;
    DeviceText {
        uuid,
        name: "kvtier fake GPU".into(),
        bus: format!("cafe:{:02x}:00.0", 0x17 + ordinal),
    }
}

fn uuid(text: &str) -> Option<[u8; 16]> {
    let digits: String = text.chars().filter(|&c| c != '-').collect();
    let number = u128::from_str_radix(&digits, 16).ok()?;
    (digits.len() == 32).then(|| number.to_be_bytes())
}

impl Script {
    /// Applies statements up to the first that is wrong, which is named.
    pub(crate) fn apply(&mut self, text: &str, known: impl Fn(&str) -> bool) -> Result<(), String> {
        for line in text.split([';', '\n']) {
            let line = line.trim();
            if !line.is_empty() && !line.starts_with('#') {
                self.statement(line, &known)
                    .ok_or_else(|| format!("cannot read the statement \"{line}\""))?;
            }
        }
        Ok(())
    }

    fn statement(&mut self, line: &str, known: &impl Fn(&str) -> bool) -> Option<()> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match (word, rest.trim()) {
            ("reset", "") => {
                let kept = std::mem::take(self);
                (self.devices, self.memory, self.driver) = (kept.devices, kept.memory, kept.driver);
            }
            ("release", "") => {
                self.holds = [false; 3];
                self.held.clear();
            }
            ("hold", rest) => match DIRECTIONS.iter().position(|&d| d == rest) {
                Some(engine) => self.holds[engine] = true,
                None => {
                    let (function, when) = rest.split_once('@').unwrap_or((rest, "1+"));
                    let when = When::parse(when).filter(|_| known(function))?;
                    self.held.insert(function.into(), when);
                }
            },
            ("fail", rest) => {
                let (function, how) = rest.split_once('=')?;
                let (code, when) = how.split_once('@').unwrap_or((how, "1+"));
                self.rule(function, when, Act::Fail(code.parse().ok()?), known)?;
            }
            ("die", rest) => {
                let (function, when) = rest.split_once('@').unwrap_or((rest, "1"));
                self.rule(function, when, Act::Die, known)?;
            }
            _ => {
                let (key, value) = line.split_once('=')?;
                self.set(key.trim(), value.trim())?;
            }
        }
        Some(())
    }

    fn rule(
        &mut self,
        name: &str,
        when: &str,
        act: Act,
        known: &impl Fn(&str) -> bool,
    ) -> Option<()> {
        if !known(name) {
            return None;
        }
        let rules = self.rules.entry(name.into()).or_default();
        rules.push((When::parse(when)?, act));
        Some(())
    }

    fn set(&mut self, key: &str, value: &str) -> Option<()> {
        let yes = |yes: &str, no: &str| match value {
            v if v == yes => Some(true),
            v if v == no => Some(false),
            _ => None,
        };
        if let Some((key, ordinal)) = key.split_once('.')
            && let Ok(ordinal) = ordinal.parse::<usize>()
        {
            let device = self.devices.get_mut(ordinal)?;
            match key {
                "uuid" => device.uuid = uuid(value)?,
                "name" => device.name = value.into(),
                "bus" => device.bus = value.into(),
                _ => return None,
            }
            return Some(());
        }
        match key {
            "devices" => {
                let n = value.parse().ok().filter(|&n: &usize| n <= 16)?;
                self.devices = (0..n).map(device).collect();
            }
            "memory" => self.memory = value.parse().ok()?,
            "driver" => self.driver = value.parse().ok()?,
            "h2d" | "d2h" | "kernel" => {
                self.rates[DIRECTIONS.iter().position(|&d| d == key)?] = value.parse().ok()?;
            }
            "event.never" => self.event_never = Some(When::parse(value)?),
            "import.never" => self.import_never = Some(When::parse(value)?),
            "batch" => self.batch = yes("present", "absent")?,
            "ptx" => self.ptx = yes("accepted", "refused")?,
            "fabric" => self.fabric = yes("present", "absent")?,
            _ => return None,
        }
        Some(())
    }

    /// What the rules say of one more call of `name`.
    pub(crate) fn act(&mut self, name: &str) -> Option<Act> {
        let mut act = None;
        for (when, what) in self.rules.get_mut(name)? {
            if when.hit() {
                act = Some(*what);
            }
        }
        act
    }
}
