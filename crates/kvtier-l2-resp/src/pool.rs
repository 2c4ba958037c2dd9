//! The connections to one server, and the choice of one for each call.
//!
//! `open` guards the connections, and is held while a call is queued on one; `tasks` guards their tasks, until they have ended.
//! No other lock is acquired inside either.

use std::sync::Arc;

use kvtier_common::sync::Mutex;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::command::{Commands, RespReply};
use super::connection::{Connection, ConnectionCall, ConnectionState};
use super::endpoint::Endpoint;
use super::reply::Value;
use kvtier_l2::{ErrorKind, L2Error};

/// What a call moves: values are not in the way of everything else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CommandClass {
    /// Whole objects.
    Values,
    /// Lookups, deletes, listings.
    Keys,
}

/// The connections. They end when this is dropped and their calls have ended.
struct Connections {
    values: Vec<Connection>,
    keys: Connection,
}

/// The connections to one server. The mutex guards whether they are there: calls take it to be queued.
pub(super) struct ConnectionPool {
    pub(super) endpoint: Arc<Endpoint>,
    open: Mutex<Option<Connections>>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

/// Numbers of connections.
#[derive(Debug, Default)]
pub(super) struct Health {
    pub(super) all: usize,
    pub(super) up: usize,
    /// Connections whose last attempt has failed.
    pub(super) down: usize,
    /// Why one is down.
    pub(super) error: Option<L2Error>,
}

/// The replies of a call, as they are waited for.
pub(super) type Waiting = oneshot::Receiver<Result<Vec<RespReply>, L2Error>>;

impl ConnectionPool {
    /// Starts to connect [`RespOptions::num_workers`](super::RespOptions) times for values, and once for everything else.
    pub(super) fn open(endpoint: Endpoint) -> Self {
        let endpoint = Arc::new(endpoint);
        let mut tasks = Vec::new();
        let mut connection = || {
            let (connection, task) = Connection::open(Arc::clone(&endpoint));
            tasks.push(task);
            connection
        };
        let values = endpoint.options.num_workers.max(1);
        let open = Connections {
            values: (0..values).map(|_| connection()).collect(),
            keys: connection(),
        };
        Self {
            endpoint,
            open: Mutex::new(Some(open)),
            tasks: Mutex::new(tasks),
        }
    }

    /// Sends commands on the connection that has the least to do.
    ///
    /// # Errors
    /// If there is no connection, that of the last attempt to make one.
    pub(super) fn send(&self, class: CommandClass, commands: Commands) -> Result<Waiting, L2Error> {
        let open = self.open.lock();
        let Some(connections) = &*open else {
            return Err(L2Error::new(
                ErrorKind::Unavailable,
                "the adapter is closed",
            ));
        };
        let among = match class {
            CommandClass::Values => &connections.values[..],
            CommandClass::Keys => std::slice::from_ref(&connections.keys),
        };
        let usable = among
            .iter()
            .filter(|connection| !connection.state.is_down());
        let Some(idlest) = usable.min_by_key(|connection| connection.state.load()) else {
            let states = states(among);
            drop(open);
            let error = states.iter().find_map(|state| state.error());
            return Err(error.unwrap_or_else(ended));
        };
        let (answer, waiting) = oneshot::channel();
        idlest.send(ConnectionCall { commands, answer });
        Ok(waiting)
    }

    /// The values of commands without objects, one each.
    pub(super) async fn values(&self, commands: Commands) -> Result<Vec<Value>, L2Error> {
        let count = commands.replies;
        let values = self
            .endpoint
            .values_of(replies(self.send(CommandClass::Keys, commands)).await?)?;
        if values.len() == count {
            Ok(values)
        } else {
            Err(self.endpoint.unexpected())
        }
    }

    /// What is to be shown of the connections.
    pub(super) fn health(&self) -> Health {
        let open = self.open.lock();
        let Some(Connections { values, keys }) = &*open else {
            return Health::default();
        };
        let all = states(values.iter().chain([keys]));
        drop(open);
        Health {
            all: all.len(),
            up: all.iter().filter(|state| state.is_up()).count(),
            down: all.iter().filter(|state| state.is_down()).count(),
            error: all.iter().find_map(|state| state.error()),
        }
    }

    /// Ends the connections when their calls have ended.
    pub(super) async fn close(&self) {
        drop(self.open.lock().take());
        let tasks = std::mem::take(&mut *self.tasks.lock());
        for task in tasks {
            // One that has panicked has told so.
            let _ = task.await;
        }
    }
}

/// What others see of connections, without the lock of the pool.
fn states<'a>(connections: impl IntoIterator<Item = &'a Connection>) -> Vec<Arc<ConnectionState>> {
    let states = connections.into_iter().map(|each| Arc::clone(&each.state));
    states.collect()
}

/// The replies of a call.
pub(super) async fn replies(waiting: Result<Waiting, L2Error>) -> Result<Vec<RespReply>, L2Error> {
    waiting?.await.unwrap_or_else(|_| Err(ended()))
}

pub(super) fn ended() -> L2Error {
    L2Error::new(ErrorKind::Unavailable, "the connection has ended")
}
