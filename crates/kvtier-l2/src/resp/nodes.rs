//! The servers behind an adapter: a single one, or those of a cluster. Commands about keys go to the node of each key.

use std::sync::Arc;

use super::RespOptions;
use super::cluster::Cluster;
use super::command::{Commands, Reply};
use super::endpoint::Endpoint;
use super::pool::{Health, Lane, Pool, Waiting, replies};
use super::reply::Value;
use super::slots::Redirect;
use crate::error::{ErrorKind, L2Error};

/// How often the commands about one key are sent on to another node.
const MAX_REDIRECTS: usize = 5;

/// The servers behind an adapter.
pub(super) enum Nodes {
    One(Arc<Pool>),
    Cluster(Cluster),
}

/// Commands about some keys, for one node.
struct Call<'a, I> {
    node: Arc<Pool>,
    commands: Commands,
    /// The items, and the numbers of their replies.
    items: Vec<(usize, &'a I, usize)>,
}

impl Nodes {
    /// Starts to connect. To be called within a tokio runtime.
    pub(super) fn open(options: &Arc<RespOptions>) -> Self {
        let options = Arc::clone(options);
        match options.cluster_mode {
            true => Self::Cluster(Cluster::open(options)),
            false => Self::One(Arc::new(Pool::open(Endpoint {
                addresses: options.addresses.clone(),
                options,
            }))),
        }
    }

    /// Sends the commands about each item, those of up to `per_call` items at once, and returns what was read from the
    /// replies to each.
    ///
    /// `write` appends the commands about an item, or nothing and returns an error; it is called again if the item's key was
    /// moved to another node. `read` is called as soon as the replies about an item are there, as many as it has commands.
    pub(super) async fn ask<I, T>(
        &self,
        lane: Lane,
        per_call: usize,
        items: &[I],
        key: impl Fn(&I) -> &str,
        write: impl Fn(&I, &mut Commands) -> Result<(), L2Error>,
        read: impl Fn(&I, &Endpoint, Vec<Reply>) -> Result<T, L2Error>,
    ) -> Vec<Result<T, L2Error>> {
        let mut results: Vec<Option<Result<T, L2Error>>> = items.iter().map(|_| None).collect();
        let mut left: Vec<(usize, Option<Redirect>)> =
            (0..items.len()).map(|at| (at, None)).collect();
        for _ in 0..=MAX_REDIRECTS {
            let mut unsent: Vec<Call<'_, I>> = Vec::new();
            let mut sent: Vec<(Call<'_, I>, Result<Waiting, L2Error>)> = Vec::new();
            for (at, redirect) in left.drain(..) {
                let item = &items[at];
                let (node, asking) = match self.node_of(key(item), redirect.as_ref()).await {
                    Ok(node) => node,
                    Err(error) => {
                        results[at] = Some(Err(error));
                        continue;
                    }
                };
                let is_same = |call: &Call<'_, I>| {
                    Arc::ptr_eq(&call.node, &node) && call.commands.asking == asking
                };
                let of_node = unsent.iter().position(is_same).unwrap_or_else(|| {
                    unsent.push(Call {
                        node: Arc::clone(&node),
                        commands: Commands {
                            asking,
                            ..Commands::default()
                        },
                        items: Vec::new(),
                    });
                    unsent.len() - 1
                });
                let call = &mut unsent[of_node];
                let before = call.commands.replies;
                if let Err(error) = write(item, &mut call.commands) {
                    results[at] = Some(Err(error));
                    continue;
                }
                call.items.push((at, item, call.commands.replies - before));
                if call.items.len() == per_call {
                    sent.push(unsent.swap_remove(of_node).send(lane));
                    // A checksum takes as long as a copy.
                    tokio::task::yield_now().await;
                }
            }
            unsent.retain(|call| !call.items.is_empty());
            sent.extend(unsent.into_iter().map(|call| call.send(lane)));
            for (call, waiting) in sent {
                let mut replies = match replies(waiting).await {
                    Ok(replies) => replies.into_iter(),
                    Err(error) => {
                        self.refresh();
                        for (at, ..) in call.items {
                            results[at] = Some(Err(error.clone()));
                        }
                        continue;
                    }
                };
                for (at, item, count) in call.items {
                    let own: Vec<_> = replies.by_ref().take(count).collect();
                    if let Some(redirect) = self.redirect(&own, &call.node) {
                        left.push((at, Some(redirect)));
                    } else {
                        results[at] = Some(read(item, &call.node.endpoint, own));
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
    async fn node_of(
        &self,
        key: &str,
        redirect: Option<&Redirect>,
    ) -> Result<(Arc<Pool>, bool), L2Error> {
        match (self, redirect) {
            (Self::One(pool), _) => Ok((Arc::clone(pool), false)),
            (Self::Cluster(cluster), Some(redirect)) => {
                Ok((cluster.redirected(redirect), !redirect.is_for_good))
            }
            (Self::Cluster(cluster), None) => {
                Ok((cluster.primary_of(key.as_bytes()).await?, false))
            }
        }
    }

    /// Where the node sent the commands; none if it executed them.
    fn redirect(&self, replies: &[Reply], node: &Pool) -> Option<Redirect> {
        if matches!(self, Self::One(_)) {
            return None;
        }
        let asked = node.endpoint.addresses.first()?;
        replies.iter().find_map(|reply| match reply {
            Reply::Value(Value::Error(error)) => Redirect::read(error, asked),
            _ => None,
        })
    }

    fn refresh(&self) {
        if let Self::Cluster(cluster) = self {
            cluster.refresh();
        }
    }

    /// All nodes that have objects, by address.
    pub(super) async fn primaries(&self) -> Vec<Arc<Pool>> {
        if let Self::Cluster(cluster) = self {
            cluster.until_asked().await;
        }
        self.known()
    }

    fn known(&self) -> Vec<Arc<Pool>> {
        match self {
            Self::One(pool) => vec![Arc::clone(pool)],
            Self::Cluster(cluster) => cluster.primaries(),
        }
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

impl<'a, I> Call<'a, I> {
    fn send(mut self, lane: Lane) -> (Self, Result<Waiting, L2Error>) {
        let waiting = self.node.send(lane, std::mem::take(&mut self.commands));
        (self, waiting)
    }
}
