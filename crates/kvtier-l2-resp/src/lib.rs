//! Redis or Valkey as a second tier: `resp`, `redis` and `valkey`, which are one adapter for a single server, one that has
//! replicas, and a cluster.
//!
//! One string per object. Key and value are those of LMCache, so both can use one server at the same time. Layout and
//! checksum of each object are in a key of their own beside it (`companion_sums`), written in one transaction with it;
//! LMCache ignores it, so it has a time to live.
//!
//! [`PeersAdapter`] reads what other servers hold in L1, from their [`ReadPort`].
//!
//! The server is the only index: objects of other writers are found, and those that it has evicted are misses. An object of
//! another length is a miss, and the next store replaces it.

mod address;
mod cluster;
mod command;
mod connection;
mod endpoint;
mod errors;
mod listing;
mod load;
mod names;
mod nodes;
mod options;
mod peers;
mod pipe;
mod pool;
mod port;
mod reply;
mod slots;
mod socket;
mod store;
mod stream;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kvtier_core::object_key::ObjectKey;
use serde_json::{Value as Json, json};

use command::Commands;
use endpoint::Endpoint;
use kvtier_l2::{
    Adapter, BoxFuture, Buffer, Capabilities, ErrorKind, L2Error, ListPage, Listed, LoadItem,
    Loaded, ObjectSpec, Recovered, StoreItem, Stored,
    metadata::{Metadata, MetadataCounters},
    trailer,
};
use listing::{NodeScan, free_bytes_of};
use names::KeyedItem;
use nodes::Nodes;
use pool::CommandClass;
use reply::Value;

pub use address::Address;
pub use options::RespOptions;
pub use options::{REDIS, RESP, VALKEY};
pub use peers::{OWN_PORT, PEERS, PeersAdapter, PeersOptions};
pub use port::{ObjectSource, PortOptions, ReadPort};

/// Reads what a server sends: each reply to its end, slots and redirects among them. Panics if a part of a reply is taken for
/// a whole one.
#[cfg(feature = "fuzzing")]
pub fn read_replies(mut bytes: &[u8]) {
    let asked = Address::Tcp("host".to_owned(), 1);
    while let Ok(Some((value, length))) = reply::value(bytes) {
        assert!(length > 0 && length <= bytes.len());
        // Each cut costs as much as the reply itself. In pieces it is the same.
        let mut progress = reply::Progress::default();
        for cut in [1, length / 2, length - 1] {
            assert!(cut >= length || !matches!(reply::value(&bytes[..cut]), Ok(Some(_))));
            let part = progress.value(&bytes[..cut.min(length - 1)]);
            assert!(matches!(part, Ok(None)));
        }
        assert_eq!(progress.value(bytes), Ok(Some((value.clone(), length))));
        slots::ranges(&value, &asked);
        if let Value::Error(text) = &value {
            slots::Redirect::read(text, &asked);
            errors::code(text);
        }
        bytes = &bytes[length..];
    }
}

/// Time to live of a companion: LMCache, which may delete the object, does not know it.
const COMPANION_TTL: u64 = 7 * 24 * 3600;

/// Longest value of a server by default.
const MAX_VALUE: u64 = 512 << 20;

/// Keys that one call asks about at most: while the server answers it, the next one is written.
const KEYS_PER_CALL: usize = 128;

/// Adapter of a server or a cluster.
///
/// ```
/// use kvtier_l2::Adapter as _;
/// use kvtier_l2_resp::{Address, RespAdapter, RespOptions};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
/// let address = Address::Tcp("localhost".into(), 6379);
/// let adapter = RespAdapter::open("valkey", &RespOptions::new(address));
/// // Connections are made by the first calls.
/// assert!(adapter.capabilities().shared);
/// # });
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct RespAdapter {
    kind: &'static str,
    options: Arc<RespOptions>,
    nodes: Nodes,
    counters: MetadataCounters,
    failed_lookups: AtomicU64,
}

impl RespAdapter {
    /// Starts to connect to the server. `kind` is its type in the configuration. To be called within a tokio runtime.
    #[must_use]
    pub fn open(kind: &'static str, options: &RespOptions) -> Self {
        let options = Arc::new(options.clone());
        Self {
            kind,
            nodes: Nodes::open(&options),
            options,
            counters: MetadataCounters::default(),
            failed_lookups: AtomicU64::new(0),
        }
    }

    fn named<'a, T>(
        &self,
        items: &'a [T],
        key: impl Fn(&T) -> &ObjectKey,
    ) -> Vec<KeyedItem<'a, T>> {
        let named = |item| KeyedItem::new(&self.options.key_prefix, key(item), item);
        items.iter().map(named).collect()
    }

    fn error(&self, kind: ErrorKind, what: &str) -> L2Error {
        let name = self.options.addresses.first().map(Address::to_string);
        L2Error::new(kind, format!("{}: {what}", name.unwrap_or_default()))
    }

    /// Whether the buffer is one for the object: a connection is lost if it cannot move what it has to.
    fn check(&self, object: &ObjectSpec, buffer: &Buffer) -> Result<(), L2Error> {
        let checked = buffer.check(object.len);
        checked.map_err(|error| self.error(error.kind(), &error.to_string()))
    }

    fn companion(
        &self,
        object: &ObjectSpec,
        node: &Endpoint,
        value: &Value,
    ) -> Result<Metadata, L2Error> {
        let bytes = match value {
            Value::Bulk(None) => return Ok(Metadata::None),
            Value::Bulk(Some(bytes)) => bytes,
            Value::Error(text) if errors::code(text) == "WRONGTYPE" => return Ok(Metadata::None),
            Value::Error(text) => return Err(errors::of(node, text)),
            _ => return Err(node.unexpected()),
        };
        Ok(Metadata::of_trailer(bytes, object))
    }

    /// Time to live of a companion, in seconds; each load renews it.
    fn companion_ttl(&self) -> String {
        let own = self.options.ttl_seconds.unwrap_or(0);
        own.max(COMPANION_TTL).to_string()
    }
}

impl Adapter for RespAdapter {
    fn kind(&self) -> &'static str {
        self.kind
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            delete: !self.options.read_only,
            list: !self.options.read_only,
            shared: true,
            read_only: self.options.read_only,
            verifies: self.options.companion_sums,
            owns_space: false,
        }
    }

    fn store(&self, batch: Vec<StoreItem>) -> BoxFuture<'_, Vec<Result<Stored, L2Error>>> {
        Box::pin(async move {
            let items = self.named(&batch, |item| &item.object.key);
            let write = |named: &_, commands: &mut _| store::write(self, named, commands);
            let read = |named: &KeyedItem<'_, _>, node: &Endpoint, replies| {
                store::read(self, named, node, node.values_of(replies)?)
            };
            let ask = self.nodes.ask(CommandClass::Values, 1, &items, write, read);
            ask.await
        })
    }

    fn lookup(&self, batch: Vec<ObjectSpec>) -> BoxFuture<'_, Result<Vec<Option<u64>>, L2Error>> {
        Box::pin(async move {
            let items = self.named(&batch, |object| &object.key);
            let write = |named: &KeyedItem<'_, _>, commands: &mut Commands| {
                load::write_lookup(self, named, commands);
                Ok(())
            };
            let read = |named: &KeyedItem<'_, ObjectSpec>, node: &Endpoint, replies| {
                load::read_lookup(self, named.item, node, &node.values_of(replies)?)
            };
            let ask = self
                .nodes
                .ask(CommandClass::Keys, KEYS_PER_CALL, &items, write, read);
            let found = ask.await;
            if !found.is_empty() && found.iter().all(Result::is_err) {
                return found.into_iter().collect();
            }
            // A node that is away, or a key that cannot be there, costs no others.
            let failed = found.iter().filter(|found| found.is_err()).count() as u64;
            self.failed_lookups.fetch_add(failed, Ordering::Relaxed);
            Ok(found
                .into_iter()
                .map(|found| found.unwrap_or(None))
                .collect())
        })
    }

    fn load(&self, batch: Vec<LoadItem>) -> BoxFuture<'_, Vec<Result<Loaded, L2Error>>> {
        Box::pin(async move {
            let items = self.named(&batch, |item| &item.object.key);
            let write = |named: &_, commands: &mut _| load::write_load(self, named, commands);
            let read = |named: &KeyedItem<'_, LoadItem>, node: &Endpoint, replies| {
                load::read_load(self, named.item, node, replies)
            };
            let ask = self.nodes.ask(CommandClass::Values, 1, &items, write, read);
            ask.await
        })
    }

    fn delete(&self, keys: Vec<ObjectKey>) -> BoxFuture<'_, Vec<Result<bool, L2Error>>> {
        Box::pin(async move {
            let items = self.named(&keys, |key| key);
            let write = |named: &KeyedItem<'_, _>, commands: &mut Commands| {
                // In this order: another server's store in between leaves no object without a companion.
                commands.push(&[b"UNLINK", named.companion.as_bytes()]);
                commands.push(&[b"UNLINK", named.key.as_bytes()]);
                Ok(())
            };
            let read = |_: &KeyedItem<'_, _>, node: &Endpoint, replies| {
                let values = node.values_of(replies)?;
                for value in &values {
                    if let Value::Error(text) = value {
                        return Err(errors::of(node, text));
                    }
                }
                match values.last() {
                    Some(Value::Integer(deleted)) => Ok(*deleted > 0),
                    _ => Err(node.unexpected()),
                }
            };
            let ask = self
                .nodes
                .ask(CommandClass::Keys, KEYS_PER_CALL, &items, write, read);
            ask.await
        })
    }

    fn list(&self, from: Option<String>, limit: usize) -> BoxFuture<'_, Result<ListPage, L2Error>> {
        Box::pin(async move { Ok(listing::page(self, from.as_deref(), limit).await?.0) })
    }

    fn recover<'a>(
        &'a self,
        found: &'a (dyn Fn(Vec<Listed>) -> bool + Send + Sync),
    ) -> BoxFuture<'a, Result<Recovered, L2Error>> {
        Box::pin(async move {
            let mut recovered = Recovered::default();
            let mut failures = 0;
            let nodes = self.nodes.primaries().await?;
            let is_wanted = AtomicBool::new(true);
            let found = |objects| {
                let is_more_wanted = found(objects);
                is_wanted.store(is_more_wanted, Ordering::Relaxed);
                is_more_wanted
            };
            for node in &nodes {
                let scan = NodeScan {
                    adapter: self,
                    node,
                };
                match scan.recover(&found).await {
                    Ok(of_node) => {
                        recovered.foreign += of_node.foreign;
                        recovered.objects += of_node.objects;
                        recovered.bytes = recovered.bytes.saturating_add(of_node.bytes);
                        if !is_wanted.load(Ordering::Relaxed) {
                            break;
                        }
                    }
                    Err(error) if failures + 1 == nodes.len() => return Err(error),
                    Err(error) => {
                        tracing::warn!(tier = self.options.tier, %error, "a node of a second tier was not scanned; its objects count once they are found");
                        failures += 1;
                    }
                }
            }
            Ok(recovered)
        })
    }

    fn size_of(&self, len: u64) -> u64 {
        let companion = if self.options.companion_sums {
            trailer::LEN as u64
        } else {
            0
        };
        len.saturating_add(companion)
    }

    fn free_bytes(&self) -> BoxFuture<'_, Result<Option<u64>, L2Error>> {
        Box::pin(async move {
            let question = || {
                let mut commands = Commands::default();
                commands.push(&[b"INFO", b"memory"]);
                commands
            };
            let answers = self.nodes.values_of_all(question).await?;
            let count = answers.len() as u64;
            let (mut least, mut failed) = (None, None);
            for answer in answers {
                match answer {
                    Ok(values) => {
                        least = free_bytes_of(&self.options, &values)
                            .into_iter()
                            .chain(least)
                            .min()
                    }
                    Err(error) => failed = Some(error),
                }
            }
            match failed {
                // Of the others there is nothing to be said.
                Some(error) if count == 1 => Err(error),
                // Objects are spread evenly, so the fullest node is the bound of all.
                _ => Ok(least.map(|free| free.saturating_mul(count))),
            }
        })
    }

    fn status(&self) -> Json {
        let health = self.nodes.health();
        let mut status = json!({
            "is_healthy": health.all > 0 && health.down == 0,
            "type": self.kind,
            "addresses": self.options.addresses.iter().map(Address::to_string).collect::<Vec<_>>(),
            "tls": self.options.tls.is_some(),
            "cluster_mode": self.options.cluster_mode,
            "database_id": self.options.database,
            "key_prefix": self.options.key_prefix,
            "connections": health.all,
            "connected": health.up,
            "error": health.error.map(|error| error.to_string()),
            "companion_sums": self.options.companion_sums,
            "failed_lookups": self.failed_lookups.load(Ordering::Relaxed),
        });
        self.counters.show(&mut status);
        status
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.nodes.close())
    }
}
