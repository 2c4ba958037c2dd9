//! A Redis or Valkey server as a second tier: `resp` and `redis`, which are one adapter.
//!
//! One string per object. Key and value are those of LMCache, so both can use one server at the same time. Layout and
//! checksum of each object are in a key of their own beside it (`companion_sums`), written in one transaction with it;
//! LMCache ignores it, so it has a time to live.
//!
//! The server is the only index: objects of other writers are found, and those that it has evicted are misses. An object of
//! another length is a miss, and the next store replaces it.

mod command;
mod connection;
mod endpoint;
mod errors;
mod listing;
mod options;
mod pipe;
mod pool;
mod reply;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvtier_core::object_key::{KeyShape, ObjectKey};
use serde_json::{Value as Json, json};

use crate::adapter::{
    Adapter, BoxFuture, Capabilities, ListPage, Listed, Loaded, Recovered, Stored,
};
use crate::error::{ErrorKind, L2Error};
use crate::fs::trailer::{self, Trailer};
use crate::object::{Buffer, LoadItem, ObjectSpec, StoreItem, key_digest};
use command::{Commands, Reply};
use endpoint::Endpoint;
use pool::{Lane, Pool, Waiting, replies};
use reply::Value;

pub use endpoint::Address;
pub use options::RespOptions;
pub(crate) use options::{REDIS, RESP};

/// Before the key of an object, that of its layout and checksum.
const COMPANION: &str = "kvtier.sum@";

/// Time to live of those: LMCache, which may delete the object, does not know them.
const COMPANION_TTL: u64 = 7 * 24 * 3600;

/// Longest value of a server by default.
const MAX_VALUE: u64 = 512 << 20;

/// Keys that one call asks about at most.
const KEYS_PER_CALL: usize = 512;

/// Adapter of a server.
pub struct RespAdapter {
    kind: &'static str,
    options: RespOptions,
    endpoint: Arc<Endpoint>,
    pool: Pool,
    counters: Counters,
}

#[derive(Default)]
struct Counters {
    unverified: AtomicU64,
    corrupt: AtomicU64,
    other_layout: AtomicU64,
    no_layout: AtomicU64,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// What is known of a stored object beside its bytes.
enum Companion {
    /// Nothing.
    None,
    /// The checksum of its bytes.
    Of(u128),
    /// It belongs to another layout.
    Other,
    /// It is damaged.
    Damaged,
}

impl RespAdapter {
    /// Starts to connect to the server. `kind` is its type in the configuration. To be called within a tokio runtime.
    #[must_use]
    pub fn open(kind: &'static str, options: &RespOptions) -> Self {
        let endpoint = Arc::new(Endpoint {
            address: options.address.clone(),
            username: options.username.clone(),
            password: options.password.clone(),
            database: options.database,
            connection_timeout: options.connection_timeout,
            request_timeout: options.request_timeout,
        });
        Self {
            kind,
            options: options.clone(),
            pool: Pool::open(&endpoint, options.num_workers),
            endpoint,
            counters: Counters::default(),
        }
    }

    /// The keys of an object and of its companion.
    fn keys(&self, key: &ObjectKey) -> (String, String) {
        let name = key.text().name(KeyShape::Grouped);
        let prefix = match &*self.options.key_prefix {
            "" => String::new(),
            prefix => format!("{prefix}@"),
        };
        (
            format!("{prefix}{name}"),
            format!("{prefix}{COMPANION}{name}"),
        )
    }

    fn error(&self, kind: ErrorKind, what: &str) -> L2Error {
        L2Error::new(kind, format!("{}: {what}", self.endpoint.name()))
    }

    fn unexpected(&self) -> L2Error {
        self.error(ErrorKind::Unavailable, "an unexpected reply")
    }

    /// Whether the buffer is one for the object: a connection is lost if it cannot move what it has to.
    fn check(&self, object: &ObjectSpec, buffer: &Buffer) -> Result<(), L2Error> {
        if buffer.len() != object.len {
            let what = format!("a buffer of {} bytes for {}", buffer.len(), object.len);
            return Err(self.error(ErrorKind::Refused, &what));
        }
        match buffer.arena().address(buffer.extent(), 0, buffer.len()) {
            Ok(_) => Ok(()),
            Err(error) => Err(self.error(ErrorKind::Memory, &error.to_string())),
        }
    }

    /// Whether bytes without a layout are none of this object's. A companion is lost more easily than a trailer of a file: its
    /// server may evict it alone. So what has none may be kvtier's own, of another layout.
    fn needs_layout(&self, object: &ObjectSpec) -> bool {
        let must_have = self.options.companion_sums || object.is_page_bound();
        must_have && !self.options.trust_missing_layout || self.is_required()
    }

    fn companion(&self, object: &ObjectSpec, value: &Value) -> Result<Companion, L2Error> {
        let bytes = match value {
            Value::Bulk(None) => return Ok(Companion::None),
            Value::Bulk(Some(bytes)) => bytes,
            Value::Error(text) if errors::code(text) == "WRONGTYPE" => return Ok(Companion::None),
            Value::Error(text) => return Err(errors::of(&self.endpoint, text)),
            _ => return Err(self.unexpected()),
        };
        if bytes.len() != trailer::LEN {
            return Ok(Companion::Damaged);
        }
        Ok(match Trailer::decode(bytes) {
            None => Companion::Damaged,
            Some(found) if found.is_of(object, key_digest(&object.key)) => {
                Companion::Of(found.data)
            }
            Some(_) => Companion::Other,
        })
    }

    /// Time to live of a companion, in seconds; each load renews it.
    fn companion_ttl(&self) -> String {
        let own = self.options.ttl_seconds.unwrap_or(0);
        own.max(COMPANION_TTL).to_string()
    }

    fn send_store(&self, item: &StoreItem) -> Result<Waiting, L2Error> {
        let StoreItem { object, from } = item;
        self.check(object, from)?;
        if object.len > MAX_VALUE {
            let what = "values have at most 512 MiB; store smaller chunks";
            return Err(self.error(ErrorKind::Refused, what));
        }
        let (key, companion) = self.keys(&object.key);
        let mut commands = Commands::default();
        let ttl = self.options.ttl_seconds;
        if self.options.companion_sums {
            let sum = from.checksum();
            let sum = sum.map_err(|error| self.error(ErrorKind::Memory, &error.to_string()))?;
            let trailer = Trailer {
                version: trailer::VERSION,
                text_len: 0,
                len: object.len,
                layout: object.layout,
                key: key_digest(&object.key),
                data: sum,
            };
            let lives = self.companion_ttl();
            commands.push(&[b"MULTI"]);
            commands.push(&[b"STRLEN", key.as_bytes()]);
            commands.push(&[b"GET", companion.as_bytes()]);
            commands.push(&[
                b"SET",
                companion.as_bytes(),
                &trailer.encode(),
                b"EX",
                lives.as_bytes(),
            ]);
            commands.set(key.as_bytes(), from.clone(), ttl);
            commands.push(&[b"EXEC"]);
        } else {
            commands.push(&[b"STRLEN", key.as_bytes()]);
            commands.set(key.as_bytes(), from.clone(), ttl);
        }
        self.pool.send(Lane::Values, commands)
    }

    /// The result of a store: all of its commands were executed, or none. An object is always replaced, so that a damaged
    /// one is not kept.
    async fn stored(
        &self,
        object: &ObjectSpec,
        waiting: Result<Waiting, L2Error>,
    ) -> Result<Stored, L2Error> {
        let mut values = self.all_values(replies(waiting).await?)?;
        if self.options.companion_sums {
            values = match values.pop() {
                Some(Value::Array(executed)) => executed,
                _ => return Err(self.unexpected()),
            };
        }
        // Each command of a transaction has a result of its own.
        self.refuse_errors(&values)?;
        let is_ok = |value: &Value| matches!(value, Value::Simple(text) if text == "OK");
        let (length, companion) = match &values[..] {
            [length, companion, first, second] if is_ok(first) && is_ok(second) => {
                (length, Some(companion))
            }
            [length, set] if is_ok(set) => (length, None),
            _ => return Err(self.unexpected()),
        };
        let was_there = matches!(length, Value::Integer(before) if u64::try_from(*before) == Ok(object.len))
            && match companion {
                Some(companion) => matches!(
                    self.companion(object, companion)?,
                    Companion::Of(_) | Companion::None
                ),
                None => true,
            };
        let bytes = self.size_of(object.len);
        Ok(match was_there {
            true => Stored::AlreadyThere(bytes),
            false => Stored::Written(bytes),
        })
    }

    /// The values of replies without objects and errors.
    fn all_values(&self, replies: Vec<Reply>) -> Result<Vec<Value>, L2Error> {
        let values = self.values_of(replies)?;
        self.refuse_errors(&values)?;
        Ok(values)
    }

    /// The values of replies without objects.
    fn values_of(&self, replies: Vec<Reply>) -> Result<Vec<Value>, L2Error> {
        let value = |reply| match reply {
            Reply::Value(value) => Ok(value),
            Reply::Object(_) => Err(self.unexpected()),
        };
        replies.into_iter().map(value).collect()
    }

    /// Of several errors the first is the reason for the others. A key of another type is none: it is replaced.
    fn refuse_errors(&self, values: &[Value]) -> Result<(), L2Error> {
        for value in values {
            if let Value::Error(text) = value
                && errors::code(text) != "WRONGTYPE"
            {
                return Err(errors::of(&self.endpoint, text));
            }
        }
        Ok(())
    }

    fn send_lookup(&self, objects: &[ObjectSpec]) -> Result<Waiting, L2Error> {
        let mut commands = Commands::default();
        for object in objects {
            let (key, companion) = self.keys(&object.key);
            // An absent key has the length 0 too.
            let length: &[u8] = if object.len == 0 {
                b"EXISTS"
            } else {
                b"STRLEN"
            };
            commands.push(&[length, key.as_bytes()]);
            if self.options.companion_sums {
                commands.push(&[b"GET", companion.as_bytes()]);
            }
        }
        self.pool.send(Lane::Keys, commands)
    }

    /// Bytes of an object that can be loaded.
    fn found(
        &self,
        object: &ObjectSpec,
        length: &Value,
        companion: Option<&Value>,
    ) -> Result<Option<u64>, L2Error> {
        let wanted = i64::try_from(object.len.max(1)).unwrap_or(i64::MAX);
        match length {
            Value::Integer(length) if *length == wanted => {}
            Value::Integer(_) => return Ok(None),
            Value::Error(text) if errors::code(text) == "WRONGTYPE" => return Ok(None),
            Value::Error(text) => return Err(errors::of(&self.endpoint, text)),
            _ => return Err(self.unexpected()),
        }
        let companion = match companion {
            Some(value) => self.companion(object, value)?,
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

    /// Whether an object needs a companion.
    fn is_required(&self) -> bool {
        self.options.companion_sums && self.options.require_checksum
    }

    fn send_load(&self, item: &LoadItem) -> Result<Waiting, L2Error> {
        let LoadItem { object, to } = item;
        self.check(object, to)?;
        if !self.options.companion_sums && self.needs_layout(object) {
            count(&self.counters.no_layout);
            return Err(self.error(ErrorKind::NotFound, "objects have no layout there"));
        }
        let (key, companion) = self.keys(&object.key);
        let mut commands = Commands::default();
        // In this order: if both are replaced in between, the bytes are not those of the companion, which is noticed.
        commands.get(key.as_bytes(), to.clone());
        if self.options.companion_sums {
            let lives = self.companion_ttl();
            commands.push(&[b"GET", companion.as_bytes()]);
            commands.push(&[b"EXPIRE", companion.as_bytes(), lives.as_bytes()]);
        }
        self.pool.send(Lane::Values, commands)
    }

    async fn loaded(
        &self,
        item: LoadItem,
        waiting: Result<Waiting, L2Error>,
    ) -> Result<Loaded, L2Error> {
        let mut replies = replies(waiting).await?.into_iter();
        let Some(Reply::Object(read)) = replies.next() else {
            return Err(self.unexpected());
        };
        read?;
        let companion = match replies.next() {
            Some(Reply::Value(value)) => self.companion(&item.object, &value)?,
            Some(Reply::Object(_)) => return Err(self.unexpected()),
            None => Companion::None,
        };
        let sum = match companion {
            Companion::Of(sum) => sum,
            Companion::None if self.needs_layout(&item.object) => {
                count(&self.counters.no_layout);
                return Err(self.error(ErrorKind::NotFound, "the object has no layout"));
            }
            Companion::None => {
                count(&self.counters.unverified);
                return Ok(Loaded { verified: false });
            }
            Companion::Other => {
                count(&self.counters.other_layout);
                return Err(self.error(ErrorKind::NotFound, "the object is of another layout"));
            }
            Companion::Damaged => {
                count(&self.counters.corrupt);
                return Err(self.error(
                    ErrorKind::Corrupt,
                    "the checksum beside the object is damaged",
                ));
            }
        };
        let found = item.to.checksum();
        let found = found.map_err(|error| self.error(ErrorKind::Memory, &error.to_string()))?;
        if found != sum {
            count(&self.counters.corrupt);
            let what = "the object is not what was stored, or was replaced meanwhile";
            return Err(self.error(ErrorKind::Corrupt, what));
        }
        Ok(Loaded { verified: true })
    }

    /// One reply per command, none of them of an object.
    async fn values(&self, commands: Commands) -> Result<Vec<Value>, L2Error> {
        let count = commands.expected.len();
        let values = self.values_of(replies(self.pool.send(Lane::Keys, commands)).await?)?;
        match values.len() == count {
            true => Ok(values),
            false => Err(self.unexpected()),
        }
    }
}

impl Adapter for RespAdapter {
    fn kind(&self) -> &'static str {
        self.kind
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            delete: true,
            list: true,
            shared: true,
            read_only: false,
            verifies: self.options.companion_sums,
        }
    }

    fn store(&self, batch: Vec<StoreItem>) -> BoxFuture<'_, Vec<Result<Stored, L2Error>>> {
        Box::pin(async move {
            let mut waiting = Vec::with_capacity(batch.len());
            for item in &batch {
                waiting.push(self.send_store(item));
                // A checksum takes as long as a copy.
                tokio::task::yield_now().await;
            }
            let mut results = Vec::with_capacity(waiting.len());
            for (item, waiting) in batch.iter().zip(waiting) {
                results.push(self.stored(&item.object, waiting).await);
            }
            results
        })
    }

    fn lookup(&self, batch: Vec<ObjectSpec>) -> BoxFuture<'_, Result<Vec<Option<u64>>, L2Error>> {
        Box::pin(async move {
            let parts = batch.chunks(KEYS_PER_CALL);
            let waiting: Vec<_> = parts.clone().map(|part| self.send_lookup(part)).collect();
            let mut found = Vec::with_capacity(batch.len());
            let replies_each = 1 + usize::from(self.options.companion_sums);
            for (part, waiting) in parts.zip(waiting) {
                let replies = replies(waiting).await?;
                if replies.len() != part.len() * replies_each {
                    return Err(self.unexpected());
                }
                for (object, replies) in part.iter().zip(replies.chunks_exact(replies_each)) {
                    let value = |at: usize| match replies.get(at) {
                        Some(Reply::Value(value)) => Some(value),
                        _ => None,
                    };
                    let length = value(0).ok_or_else(|| self.unexpected())?;
                    found.push(self.found(object, length, value(1))?);
                }
            }
            Ok(found)
        })
    }

    fn load(&self, batch: Vec<LoadItem>) -> BoxFuture<'_, Vec<Result<Loaded, L2Error>>> {
        Box::pin(async move {
            let waiting: Vec<_> = batch.iter().map(|item| self.send_load(item)).collect();
            let mut results = Vec::with_capacity(batch.len());
            for (item, waiting) in batch.into_iter().zip(waiting) {
                results.push(self.loaded(item, waiting).await);
                tokio::task::yield_now().await;
            }
            results
        })
    }

    fn delete(&self, keys: Vec<ObjectKey>) -> BoxFuture<'_, Vec<Result<bool, L2Error>>> {
        Box::pin(async move {
            let mut results = Vec::with_capacity(keys.len());
            for part in keys.chunks(KEYS_PER_CALL) {
                let mut commands = Commands::default();
                for key in part {
                    let (key, companion) = self.keys(key);
                    // In this order: another server's store in between leaves no object without a companion.
                    commands.push(&[b"UNLINK", companion.as_bytes()]);
                    commands.push(&[b"UNLINK", key.as_bytes()]);
                }
                match self.values(commands).await {
                    Err(error) => results.extend(part.iter().map(|_| Err(error.clone()))),
                    Ok(values) => results.extend(values.chunks_exact(2).map(|values| {
                        for value in values {
                            if let Value::Error(text) = value {
                                return Err(errors::of(&self.endpoint, text));
                            }
                        }
                        match values[1] {
                            Value::Integer(deleted) => Ok(deleted > 0),
                            _ => Err(self.unexpected()),
                        }
                    })),
                }
            }
            results
        })
    }

    fn list(&self, from: Option<String>, limit: usize) -> BoxFuture<'_, Result<ListPage, L2Error>> {
        Box::pin(async move {
            let cursor = from.as_deref().unwrap_or("0");
            if cursor.is_empty() || !cursor.bytes().all(|byte| byte.is_ascii_digit()) {
                let what =
                    format!("{cursor:?} is no position of a listing; give one that it returned");
                return Err(self.error(ErrorKind::Refused, &what));
            }
            Ok(self.page(cursor, limit).await?.0)
        })
    }

    fn recover<'a>(
        &'a self,
        found: &'a (dyn Fn(Vec<Listed>) -> bool + Send + Sync),
    ) -> BoxFuture<'a, Result<Recovered, L2Error>> {
        Box::pin(async move {
            let mut recovered = Recovered::default();
            let mut next = Some("0".to_owned());
            // A scan may come by a key again while the server makes its table larger.
            let mut seen = HashSet::new();
            while let Some(cursor) = next {
                let (mut page, foreign) = self.page(&cursor, 1000).await?;
                page.objects
                    .retain(|object| seen.insert(key_digest(&object.key)));
                recovered.foreign += foreign;
                recovered.objects += page.objects.len() as u64;
                recovered.bytes += page.objects.iter().map(|object| object.bytes).sum::<u64>();
                next = page.next;
                if !found(page.objects) {
                    break;
                }
            }
            Ok(recovered)
        })
    }

    fn size_of(&self, len: u64) -> u64 {
        let companion = match self.options.companion_sums {
            true => trailer::LEN as u64,
            false => 0,
        };
        len.saturating_add(companion)
    }

    fn free_bytes(&self) -> BoxFuture<'_, Result<Option<u64>, L2Error>> {
        Box::pin(async move {
            let mut commands = Commands::default();
            commands.push(&[b"INFO", b"memory"]);
            let values = self.values(commands).await?;
            let Some(Value::Bulk(Some(text))) = values.first() else {
                // It may not be allowed.
                return Ok(None);
            };
            let text = String::from_utf8_lossy(text);
            let field = |name: &str| {
                let mut lines = text.lines();
                lines.find_map(|line| {
                    line.strip_prefix(name)?
                        .strip_prefix(':')?
                        .trim()
                        .parse::<u64>()
                        .ok()
                })
            };
            // A server that evicts makes space by itself, when something is stored.
            let policy = text
                .lines()
                .find_map(|line| line.strip_prefix("maxmemory_policy:"));
            let evicts = match policy.map(str::trim) {
                None | Some("noeviction") => false,
                Some(policy) => policy.starts_with("allkeys") || self.options.ttl_seconds.is_some(),
            };
            Ok(match (field("maxmemory"), field("used_memory")) {
                (Some(most @ 1..), Some(used)) if !evicts => Some(most.saturating_sub(used)),
                _ => None,
            })
        })
    }

    fn status(&self) -> Json {
        let health = self.pool.health();
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        json!({
            "is_healthy": health.all > 0 && health.down == 0,
            "type": self.kind,
            "address": self.endpoint.name(),
            "db": self.options.database,
            "key_prefix": self.options.key_prefix,
            "connections": health.all,
            "connected": health.up,
            "error": health.error.map(|error| error.to_string()),
            "companion_sums": self.options.companion_sums,
            "unverified_loads": count(&counters.unverified),
            "corrupt_objects": count(&counters.corrupt),
            "other_layout_loads": count(&counters.other_layout),
            "missing_layout_lookups": count(&counters.no_layout),
        })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.pool.close())
    }
}
