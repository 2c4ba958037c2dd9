//! Lookups and loads: an object counts only with a companion that is its own, unless the options say otherwise.

use super::command::{Commands, RespReply};
use super::endpoint::Endpoint;
use super::names::Named;
use super::reply::Value;
use super::{Companion, RespAdapter, count, errors};
use kvtier_l2::{Adapter as _, ErrorKind, L2Error, LoadItem, Loaded, ObjectSpec};

impl RespAdapter {
    /// Whether bytes without a layout are none of this object's. A companion is lost more easily than a trailer of a file: its
    /// server may evict it alone. So what has none may be kvtier's own, of another layout.
    fn needs_layout(&self, object: &ObjectSpec) -> bool {
        let must_have = self.options.companion_sums || object.is_page_bound();
        must_have && !self.options.trust_missing_layout || self.is_required()
    }

    /// Whether an object needs a companion.
    fn is_required(&self) -> bool {
        self.options.companion_sums && self.options.require_checksum
    }

    pub(super) fn write_lookup(&self, named: &Named<'_, ObjectSpec>, commands: &mut Commands) {
        // An absent key has the length 0 too.
        let length: &[u8] = match named.item.len {
            0 => b"EXISTS",
            _ => b"STRLEN",
        };
        commands.push(&[length, named.key.as_bytes()]);
        if self.options.companion_sums {
            commands.push(&[b"GET", named.companion.as_bytes()]);
        }
    }

    /// Bytes of an object that can be loaded.
    pub(super) fn read_lookup(
        &self,
        object: &ObjectSpec,
        node: &Endpoint,
        values: &[Value],
    ) -> Result<Option<u64>, L2Error> {
        let wanted = i64::try_from(object.len.max(1)).unwrap_or(i64::MAX);
        match values.first() {
            Some(Value::Integer(length)) if *length == wanted => {}
            Some(Value::Integer(_)) => return Ok(None),
            Some(Value::Error(text)) if errors::code(text) == "WRONGTYPE" => return Ok(None),
            Some(Value::Error(text)) => return Err(errors::of(node, text)),
            _ => return Err(node.unexpected()),
        }
        let companion = match values.get(1) {
            Some(value) => self.companion(object, node, value)?,
            None => Companion::None,
        };
        let is_loadable = match companion {
            Companion::Of(_) => true,
            Companion::None => !self.needs_layout(object),
            Companion::Other | Companion::Damaged => false,
        };
        if !is_loadable && matches!(companion, Companion::None) {
            count(&self.counters.no_layout);
        }
        Ok(is_loadable.then(|| self.size_of(object.len)))
    }

    pub(super) fn write_load(
        &self,
        named: &Named<'_, LoadItem>,
        commands: &mut Commands,
    ) -> Result<(), L2Error> {
        let LoadItem { object, to } = named.item;
        self.check(object, to)?;
        if !self.options.companion_sums && self.needs_layout(object) {
            count(&self.counters.no_layout);
            return Err(self.error(ErrorKind::NotFound, "objects have no layout there"));
        }
        // In this order: if both are replaced in between, the bytes are not those of the companion, which is noticed.
        commands.get(named.key.as_bytes(), to.clone());
        if self.options.companion_sums {
            let companion = named.companion.as_bytes();
            let lives = self.companion_ttl();
            commands.push(&[b"GET", companion]);
            commands.push(&[b"EXPIRE", companion, lives.as_bytes()]);
        }
        Ok(())
    }

    pub(super) fn read_load(
        &self,
        item: &LoadItem,
        node: &Endpoint,
        replies: Vec<RespReply>,
    ) -> Result<Loaded, L2Error> {
        let mut replies = replies.into_iter();
        match replies.next() {
            Some(RespReply::Object(read)) => read?,
            Some(RespReply::Value(Value::Error(text))) => return Err(errors::of(node, &text)),
            _ => return Err(node.unexpected()),
        }
        let companion = match replies.next() {
            Some(RespReply::Value(value)) => self.companion(&item.object, node, &value)?,
            Some(RespReply::Object(_)) => return Err(node.unexpected()),
            None => Companion::None,
        };
        let sum = match companion {
            Companion::Of(sum) => sum,
            Companion::None if self.needs_layout(&item.object) => {
                count(&self.counters.no_layout);
                return Err(node.error(ErrorKind::NotFound, &"the object has no layout"));
            }
            Companion::None => {
                count(&self.counters.unverified);
                return Ok(Loaded { verified: false });
            }
            Companion::Other => {
                count(&self.counters.other_layout);
                return Err(node.error(ErrorKind::NotFound, &"the object is of another layout"));
            }
            Companion::Damaged => {
                count(&self.counters.corrupt);
                let what = "the checksum beside the object is damaged";
                return Err(node.error(ErrorKind::Corrupt, &what));
            }
        };
        let found = item.to.checksum();
        let found = found.map_err(|error| self.error(ErrorKind::Memory, &error.to_string()))?;
        if found != sum {
            count(&self.counters.corrupt);
            let what = "the object is not what was stored, or was replaced meanwhile";
            return Err(node.error(ErrorKind::Corrupt, &what));
        }
        Ok(Loaded { verified: true })
    }
}
