//! The servers behind an adapter: a single one, or those of a cluster. Commands about keys go to the node of each key.

use std::future::{Future as _, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Sleep, sleep};

use super::RespOptions;
use super::cluster::Cluster;
use super::command::{Commands, RespReply};
use super::endpoint::{Endpoint, MAX_CONNECTING};
use super::errors;
use super::names::KeyedItem;
use super::pool::{CommandClass, ConnectionPool, Health, Waiting, ended};
use super::reply::Value;
use super::slots::Redirect;
use kvtier_l2::{ErrorKind, L2Error};

/// How often the commands about one key are sent on to another node.
const MAX_REDIRECTS: usize = 5;

/// How long the other nodes of a cluster have to answer a lookup once one of them has.
const GRACE: Duration = Duration::from_millis(250);

/// The servers behind an adapter.
pub(super) enum Nodes {
    One(Arc<ConnectionPool>),
    Cluster(Cluster),
}

/// Commands about some keys, for one node.
struct NodeCall {
    node: Arc<ConnectionPool>,
    commands: Commands,
    /// The positions of the items, and the numbers of their replies.
    items: Vec<(usize, usize)>,
}

/// The answer to a call.
enum NodeAnswer {
    Waiting(Waiting),
    Got(Result<Vec<RespReply>, L2Error>),
}

/// What is left to be asked about an item.
struct UnansweredItem {
    at: usize,
    redirect: Option<Redirect>,
    /// The replies of the node before, if it has a part of the keys.
    known: Vec<RespReply>,
}

/// What the replies of a node say about where the keys are.
enum Found {
    /// There.
    Here(Vec<RespReply>),
    /// At another node, or on their way to it; replies of the keys that are still here are kept.
    Elsewhere(Redirect, Vec<RespReply>),
    /// On their way, one before the other.
    Divided,
}

impl Nodes {
    /// Starts to connect. To be called within a tokio runtime.
    pub(super) fn open(options: &Arc<RespOptions>) -> Self {
        let options = Arc::clone(options);
        if options.cluster_mode {
            Self::Cluster(Cluster::open(options))
        } else {
            let connecting = Arc::new(Semaphore::new(MAX_CONNECTING));
            let endpoint = Endpoint::new(options.addresses.clone(), options, connecting);
            Self::One(Arc::new(ConnectionPool::open(endpoint)))
        }
    }

    /// Sends the commands about each item, those of up to `per_call` items at once, and returns what was read from the
    /// replies to each.
    ///
    /// `write` appends the commands about an item, or nothing and returns an error; it is called again if the item's key was
    /// moved to another node. `read` is called as soon as the replies about an item are there, as many as it has commands.
    pub(super) async fn ask<'a, I, T>(
        &self,
        class: CommandClass,
        per_call: usize,
        items: &[KeyedItem<'a, I>],
        write: impl Fn(&KeyedItem<'a, I>, &mut Commands) -> Result<(), L2Error>,
        read: impl Fn(&KeyedItem<'a, I>, &Endpoint, Vec<RespReply>) -> Result<T, L2Error>,
    ) -> Vec<Result<T, L2Error>> {
        let mut results: Vec<Option<Result<T, L2Error>>> = items.iter().map(|_| None).collect();
        let new = |at| UnansweredItem {
            at,
            redirect: None,
            known: Vec::new(),
        };
        let mut left: Vec<UnansweredItem> = (0..items.len()).map(new).collect();
        for _ in 0..=MAX_REDIRECTS {
            let mut known: Vec<Vec<RespReply>> = items.iter().map(|_| Vec::new()).collect();
            let mut unsent: Vec<NodeCall> = Vec::new();
            let mut sent: Vec<(NodeCall, NodeAnswer)> = Vec::new();
            for UnansweredItem {
                at,
                redirect,
                known: replies,
            } in left.drain(..)
            {
                known[at] = replies;
                let (node, asking) = match self.node_of(&items[at], redirect.as_ref()).await {
                    Ok(node) => node,
                    Err(error) => {
                        results[at] = Some(Err(error));
                        continue;
                    }
                };
                let is_same = |call: &NodeCall| {
                    Arc::ptr_eq(&call.node, &node) && call.commands.asking == asking
                };
                let of_node = unsent.iter().position(is_same).unwrap_or_else(|| {
                    unsent.push(NodeCall::new(&node, asking));
                    unsent.len() - 1
                });
                let call = &mut unsent[of_node];
                let before = call.commands.replies;
                if let Err(error) = write(&items[at], &mut call.commands) {
                    results[at] = Some(Err(error));
                    continue;
                }
                call.items.push((at, call.commands.replies - before));
                if call.items.len() == per_call {
                    sent.push(unsent.swap_remove(of_node).send(class));
                    // A checksum takes as long as a copy; and the connection sends these while the next are written.
                    tokio::task::yield_now().await;
                }
            }
            unsent.retain(|call| !call.items.is_empty());
            sent.extend(unsent.into_iter().map(|call| call.send(class)));
            if class == CommandClass::Keys && matches!(self, Self::Cluster(_)) {
                settle(&mut sent).await;
            }
            for (call, answer) in sent {
                let mut replies = match answer.get().await {
                    Ok(replies) => replies.into_iter(),
                    Err(error) => {
                        let error = self.lost(&call.node, error);
                        for (at, _) in call.items {
                            results[at] = Some(Err(error.clone()));
                        }
                        continue;
                    }
                };
                for (at, count) in call.items {
                    let own: Vec<_> = replies.by_ref().take(count).collect();
                    let own = merged(std::mem::take(&mut known[at]), own);
                    let endpoint = &call.node.endpoint;
                    match self.found(own, endpoint) {
                        Found::Elsewhere(redirect, known) => left.push(UnansweredItem {
                            at,
                            redirect: Some(redirect),
                            known,
                        }),
                        Found::Here(own) => results[at] = Some(read(&items[at], endpoint, own)),
                        Found::Divided => {
                            let what =
                                &"an object and its companion are on their way to another node";
                            results[at] = Some(Err(endpoint.error(ErrorKind::Unavailable, what)));
                        }
                    }
                    if class == CommandClass::Values {
                        tokio::task::yield_now().await;
                    }
                }
            }
            if left.is_empty() {
                break;
            }
        }
        let unanswered = |result: Option<_>| {
            result.unwrap_or_else(|| {
                let what = "the nodes of the cluster send a key to each other";
                Err(L2Error::new(ErrorKind::Unavailable, what))
            })
        };
        results.into_iter().map(unanswered).collect()
    }

    /// The node of a key, and whether commands need ASKING there, as the slot is on its way to it.
    async fn node_of<I>(
        &self,
        named: &KeyedItem<'_, I>,
        redirect: Option<&Redirect>,
    ) -> Result<(Arc<ConnectionPool>, bool), L2Error> {
        match (self, redirect) {
            (Self::One(pool), _) => Ok((Arc::clone(pool), false)),
            (Self::Cluster(cluster), Some(redirect)) => {
                Ok((cluster.redirected(redirect)?, !redirect.is_for_good))
            }
            (Self::Cluster(cluster), None) => {
                if !named.has_one_slot() {
                    let what = "braces in model or salt that are no pair; a cluster may keep key and checksum on two nodes";
                    return Err(L2Error::new(ErrorKind::Refused, what));
                }
                Ok((cluster.primary_of(named.key.as_bytes()).await?, false))
            }
        }
    }

    /// Returns the place of the keys, by the replies of a node.
    fn found(&self, replies: Vec<RespReply>, node: &Endpoint) -> Found {
        let (Self::Cluster(cluster), Some(asked)) = (self, node.addresses.first()) else {
            return Found::Here(replies);
        };
        let error = |reply: &RespReply| match reply {
            RespReply::Value(Value::Error(text)) => Some(text.clone()),
            _ => None,
        };
        let mut redirect = None;
        for text in replies.iter().filter_map(error) {
            redirect = redirect.or_else(|| Redirect::read(&text, asked));
            if matches!(errors::code(&text), "CLUSTERDOWN" | "MOVED") {
                cluster.refresh();
            }
        }
        let is_queued = |reply: &RespReply| matches!(reply, RespReply::Value(Value::Simple(text)) if text == "QUEUED");
        match redirect {
            None => Found::Here(replies),
            Some(redirect) if redirect.is_for_good => Found::Elsewhere(redirect, Vec::new()),
            Some(redirect) if !replies.iter().any(is_queued) => Found::Elsewhere(redirect, replies),
            // A transaction is executed by one node. Valkey queues commands about keys that it lacks, and sends all of them to
            // the other node at EXEC; what it queued has not run. If it has a part of the keys, it answers TRYAGAIN instead.
            Some(redirect) if replies.last().is_some_and(is_ask) => {
                Found::Elsewhere(redirect, Vec::new())
            }
            Some(_) => Found::Divided,
        }
    }

    /// The error of a call without an answer. In a cluster whose other nodes answer, it is no reason to stop asking them.
    fn lost(&self, node: &ConnectionPool, error: L2Error) -> L2Error {
        let Self::Cluster(cluster) = self else {
            return error;
        };
        cluster.refresh();
        let is_other = |other: &&Arc<ConnectionPool>| !std::ptr::eq(&***other, node);
        let others = cluster.primaries();
        let answers = others
            .iter()
            .filter(is_other)
            .any(|other| other.health().up > 0);
        match error.kind() {
            ErrorKind::Unavailable if answers => L2Error::new(ErrorKind::Busy, error.to_string()),
            _ => error,
        }
    }

    /// All nodes that have objects, by address.
    ///
    /// # Errors
    /// If none is known.
    pub(super) async fn primaries(&self) -> Result<Vec<Arc<ConnectionPool>>, L2Error> {
        if let Self::Cluster(cluster) = self {
            cluster.until_asked().await;
        }
        let known = self.known();
        match (self, known.is_empty()) {
            (Self::Cluster(cluster), true) => Err(cluster.unknown()),
            _ => Ok(known),
        }
    }

    fn known(&self) -> Vec<Arc<ConnectionPool>> {
        match self {
            Self::One(pool) => vec![Arc::clone(pool)],
            Self::Cluster(cluster) => cluster.primaries(),
        }
    }

    /// The replies of all nodes to the same commands.
    pub(super) async fn values_of_all(
        &self,
        commands: impl Fn() -> Commands,
    ) -> Result<Vec<Result<Vec<Value>, L2Error>>, L2Error> {
        let nodes = self.primaries().await?;
        let send = |node: &Arc<ConnectionPool>| {
            NodeCall {
                commands: commands(),
                ..NodeCall::new(node, false)
            }
            .send(CommandClass::Keys)
        };
        let mut sent: Vec<_> = nodes.iter().map(send).collect();
        settle(&mut sent).await;
        let mut values = Vec::with_capacity(sent.len());
        for (call, answer) in sent {
            let replies = answer.get().await;
            values.push(replies.and_then(|replies| call.node.endpoint.values_of(replies)));
        }
        Ok(values)
    }

    /// What is to be shown of the connections, of all nodes together.
    pub(super) fn health(&self) -> Health {
        let mut all = Health::default();
        for node in self.known() {
            let health = node.health();
            all.all += health.all;
            all.up += health.up;
            all.down += health.down;
            all.error = all.error.or(health.error);
        }
        if let Self::Cluster(cluster) = self {
            // The first connection, which asks for the slots.
            all.all += usize::from(cluster.is_new());
            if let Some(error) = cluster.error() {
                all.down += 1;
                all.error = Some(error);
            }
        }
        all
    }

    /// Ends the connections when their calls have ended.
    pub(super) async fn close(&self) {
        match self {
            Self::One(pool) => pool.close().await,
            Self::Cluster(cluster) => cluster.close().await,
        }
    }
}

impl NodeCall {
    fn new(node: &Arc<ConnectionPool>, asking: bool) -> Self {
        Self {
            node: Arc::clone(node),
            commands: Commands {
                asking,
                ..Commands::default()
            },
            items: Vec::new(),
        }
    }

    fn send(mut self, class: CommandClass) -> (Self, NodeAnswer) {
        let sent = self.node.send(class, std::mem::take(&mut self.commands));
        let answer = sent.map_or_else(|error| NodeAnswer::Got(Err(error)), NodeAnswer::Waiting);
        (self, answer)
    }
}

/// The replies of a node to which a slot is on its way, but for the keys that the node before still has.
fn merged(known: Vec<RespReply>, asked: Vec<RespReply>) -> Vec<RespReply> {
    if known.len() != asked.len() {
        return asked;
    }
    let both = known.into_iter().zip(asked);
    both.map(|(known, asked)| if is_ask(&known) { asked } else { known })
        .collect()
}

/// Whether a reply sends its command to another node for this time.
fn is_ask(reply: &RespReply) -> bool {
    matches!(reply, RespReply::Value(Value::Error(text)) if errors::code(text) == "ASK")
}

impl NodeAnswer {
    async fn get(self) -> Result<Vec<RespReply>, L2Error> {
        match self {
            Self::Waiting(waiting) => waiting.await.unwrap_or_else(|_| Err(ended())),
            Self::Got(answer) => answer,
        }
    }
}

/// Waits for all answers: once one node has answered all of its calls the others have [`GRACE`], then their calls fail.
async fn settle(sent: &mut [(NodeCall, NodeAnswer)]) {
    let mut grace: Option<Pin<Box<Sleep>>> = None;
    poll_fn(|context| {
        let mut waiting_nodes = Vec::new();
        for (call, answer) in sent.iter_mut() {
            if let NodeAnswer::Waiting(waiting) = answer
                && let Poll::Ready(got) = Pin::new(waiting).poll(context)
            {
                *answer = NodeAnswer::Got(got.unwrap_or_else(|_| Err(ended())));
            }
            if matches!(answer, NodeAnswer::Waiting(_)) {
                waiting_nodes.push(Arc::as_ptr(&call.node));
            }
        }
        if waiting_nodes.is_empty() {
            return Poll::Ready(());
        }
        let has_answered = |(call, answer): &(NodeCall, NodeAnswer)| {
            matches!(answer, NodeAnswer::Got(Ok(_)))
                && !waiting_nodes.contains(&Arc::as_ptr(&call.node))
        };
        if !sent.iter().any(has_answered) {
            return Poll::Pending;
        }
        let grace = grace.get_or_insert_with(|| Box::pin(sleep(GRACE)));
        if grace.as_mut().poll(context).is_pending() {
            return Poll::Pending;
        }
        for (call, answer) in sent.iter_mut() {
            if matches!(answer, NodeAnswer::Waiting(_)) {
                let what = &"no answer, while other nodes of the cluster answer";
                *answer = NodeAnswer::Got(Err(call.node.endpoint.error(ErrorKind::Deadline, what)));
            }
        }
        Poll::Ready(())
    })
    .await;
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::super::address::Address;
    use super::*;

    /// A node without a server.
    fn node(port: u16) -> Arc<ConnectionPool> {
        let options = RespOptions::new(Address::Tcp("127.0.0.1".into(), port));
        let addresses = options.addresses.clone();
        let connecting = Arc::new(Semaphore::new(1));
        Arc::new(ConnectionPool::open(Endpoint::new(
            addresses,
            Arc::new(options),
            connecting,
        )))
    }

    #[tokio::test(start_paused = true)]
    async fn grace_begins_when_another_node_has_answered_all_of_its_calls() {
        let (slow, fast) = (node(1), node(2));
        let call = |node: &Arc<ConnectionPool>| {
            let (answer, waiting) = oneshot::channel();
            (
                answer,
                (NodeCall::new(node, false), NodeAnswer::Waiting(waiting)),
            )
        };
        let is_waiting =
            |(_, answer): &(NodeCall, NodeAnswer)| matches!(answer, NodeAnswer::Waiting(_));
        // A part of its own answers is no reason for a node to be timed out.
        let ((first, first_call), (second, second_call)) = (call(&slow), call(&slow));
        let mut sent = vec![first_call, second_call];
        first.send(Ok(Vec::new())).unwrap();
        let settled = tokio::time::timeout(100 * GRACE, settle(&mut sent)).await;
        assert!(settled.is_err());
        assert!(is_waiting(&sent[1]));
        // Nor is a part of another one's.
        let ((third, third_call), (fourth, fourth_call)) = (call(&fast), call(&fast));
        sent.extend([third_call, fourth_call]);
        third.send(Ok(Vec::new())).unwrap();
        let settled = tokio::time::timeout(100 * GRACE, settle(&mut sent)).await;
        assert!(settled.is_err());
        fourth.send(Ok(Vec::new())).unwrap();
        settle(&mut sent).await;
        let failed = |(_, answer): &(NodeCall, NodeAnswer)| match answer {
            NodeAnswer::Got(Err(error)) => Some(error.kind()),
            _ => None,
        };
        let kinds: Vec<_> = sent.iter().map(failed).collect();
        assert_eq!(kinds, [None, Some(ErrorKind::Deadline), None, None]);
        drop(second);
    }
}
