//! Parts of real servers, for the conformance suite.

use std::sync::atomic::AtomicU32;

use kvtier_core::object_key::ObjectKey;

use super::super::names::KeyedItem;
use super::super::slots::{SLOTS, slot};
use super::server::Redis;
use super::*;
use kvtier_l2::conformance::{Damage, Subject};

/// The part of a server or a cluster that has a prefix of its own.
pub(super) struct ClusterPart {
    /// One server, or primaries with equal parts of the slots.
    nodes: Arc<Vec<Redis>>,
    options: RespOptions,
}

impl ClusterPart {
    /// Makes parts of these servers.
    pub(super) fn maker(
        nodes: Vec<Redis>,
        options: impl Fn(&[Redis]) -> RespOptions,
    ) -> impl FnMut() -> Self {
        static PARTS: AtomicU32 = AtomicU32::new(0);
        let nodes = Arc::new(nodes);
        move || {
            let mut options = options(&nodes);
            options.key_prefix = format!("part*{}", PARTS.fetch_add(1, Ordering::Relaxed));
            Self {
                nodes: Arc::clone(&nodes),
                options,
            }
        }
    }
}

/// The node that has a key, of primaries with equal parts of the slots.
pub(super) fn node_of<'a>(nodes: &'a [Redis], key: &str) -> &'a Redis {
    &nodes[usize::from(slot(key.as_bytes())) * nodes.len() / usize::from(SLOTS)]
}

impl Subject for ClusterPart {
    fn open(&self) -> BoxFuture<'_, Arc<dyn Adapter>> {
        Box::pin(async {
            let adapter: Arc<dyn Adapter> = Arc::new(RespAdapter::open("resp", &self.options));
            adapter
        })
    }

    fn may_list_twice(&self) -> bool {
        true
    }

    fn damage(&self, key: &ObjectKey, how: Damage) -> bool {
        let name = KeyedItem::new(&self.options.key_prefix, key, &()).key;
        let node = node_of(&self.nodes, &name);
        let mut bytes = node.get(&name).unwrap();
        match how {
            Damage::Flip if !self.options.companion_sums => return false,
            Damage::Remove => {
                let gone = node.ask(&[b"DEL", name.as_bytes()]);
                assert_eq!(gone, Value::Integer(1));
                return true;
            }
            _ => how.apply(&mut bytes),
        }
        node.set(&name, &bytes);
        true
    }
}
