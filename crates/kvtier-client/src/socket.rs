//! What the sockets of [`Connection`](crate::Connection) and [`Client`](crate::Client) have in common.

use std::time::Duration;

/// A DEALER socket with the options of the LMCache 0.5.6 client.
pub(crate) fn dealer(
    context: &zmq::Context,
    reconnect: Duration,
    linger: Duration,
) -> zmq::Result<zmq::Socket> {
    let socket = context.socket(zmq::DEALER)?;
    socket.set_connect_timeout(5000)?;
    socket.set_reconnect_ivl(millis(reconnect).max(1))?;
    socket.set_reconnect_ivl_max(1000)?;
    socket.set_linger(millis(linger))?;
    Ok(socket)
}

/// A span for libzmq.
pub(crate) fn millis(span: Duration) -> i32 {
    i32::try_from(span.as_millis()).unwrap_or(i32::MAX)
}

/// An endpoint with its scheme, which is TCP where none is given.
pub(crate) fn with_scheme(endpoint: &str) -> String {
    if endpoint.contains("://") {
        endpoint.to_owned()
    } else {
        format!("tcp://{endpoint}")
    }
}
