//! The stream of KV events, from a server that follows a script.

use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use kvtier_client::proto::frames::{ClientMessage, OperationId, RequestFrames, StreamControl};
use kvtier_client::proto::generation::Generation;
use kvtier_client::proto::key::VecTokens;
use kvtier_client::proto::request::Request;
use kvtier_client::proto::response::{EventBatch, Response};
use kvtier_client::{Client, KvEventUpdate, Settings};

use super::{connect, settings};
use crate::support::{ANYWHERE, Frames, Server, reply};

/// Answers a subscription and each acknowledgement with the next of these, and other requests as usual.
fn server_at(address: &str, answers: Vec<Option<Response<'static>>>) -> Server {
    let (mut answers, mut subscription) = (answers.into_iter(), Frames::new());
    Server::raw_at(address, move |frames| {
        let message = ClientMessage::parse(frames.iter().map(Vec::as_slice)).unwrap();
        match message {
            ClientMessage::Stream { uid, control } => {
                assert_eq!((uid, control), (&*subscription[0], StreamControl::Ack));
            }
            ClientMessage::Request(RequestFrames { op, payloads, .. }) => {
                let id = OperationId::decode(op).unwrap();
                let spec = Generation::G6.rows(id).next().unwrap();
                let request = Request::decode(spec, &payloads, &mut VecTokens).unwrap();
                let Request::SubscribeKvEvents(asked) = &request else {
                    let answer = super::default_answers(&request);
                    return answer
                        .map(|it| reply(&frames, it.encode()))
                        .into_iter()
                        .collect();
                };
                assert_eq!((asked.model_name, asked.cursor), ("model", i64::MAX - 1));
                subscription.clone_from(&frames);
            }
        }
        let next = answers.next().flatten();
        next.map(|it| reply(&subscription, it.encode()))
            .into_iter()
            .collect()
    })
}

fn batch(cursor: i64, enabled: bool) -> Option<Response<'static>> {
    Some(Response::EventBatch(EventBatch {
        enabled,
        incarnation: 1,
        next_cursor: cursor,
        lost: false,
        events: Vec::new(),
    }))
}

fn updates(client: &Client) -> Receiver<String> {
    let (sender, updates) = mpsc::channel();
    let callback = move |update: KvEventUpdate<'_>| {
        let _ = sender.send(match update {
            KvEventUpdate::Requested => "requested".to_owned(),
            KvEventUpdate::Batch(batch) => batch.next_cursor.to_string(),
            KvEventUpdate::Ended(why) => why,
        });
    };
    client.on_kv_events("model", Box::new(callback)).unwrap();
    updates
}

#[test]
fn batches_are_acknowledged_and_requested_again_on_a_new_connection() {
    let batches = || vec![batch(1, true), batch(2, true), batch(3, true)];
    let server = server_at(ANYWHERE, batches());
    let address = server.endpoint().to_owned();
    let client = connect(&server, settings());
    let updates = updates(&client);
    let next = || updates.iter().take(4).collect::<Vec<_>>();
    assert_eq!(next(), ["requested", "1", "2", "3"]);
    drop(server);
    let _server = server_at(&address, batches());
    assert_eq!(next(), ["requested", "1", "2", "3"]);
}

#[test]
fn stream_is_requested_again_unless_there_is_no_log() {
    let ended = "the server has ended the stream of KV events";
    let unanswered = "the server does not answer a subscription to KV events";
    let off = "the server keeps no KV events (--kv-event-log-size 0)";
    let again = |answers: Vec<_>, timeout, count| {
        let more = std::iter::repeat_n(batch(7, true), 100);
        let server = server_at(ANYWHERE, answers.into_iter().chain(more).collect());
        let brief = Settings {
            timeout,
            ..settings()
        };
        let client = connect(&server, brief);
        let updates = updates(&client);
        let waited = Duration::from_secs(3);
        std::iter::from_fn(|| updates.recv_timeout(waited).ok())
            .take(count)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        again(vec![None], Duration::from_millis(50), 4),
        ["requested", unanswered, "requested", "7"]
    );
    let ends = vec![batch(0, true), Some(Response::Nothing)];
    assert_eq!(
        again(ends, settings().timeout, 5),
        ["requested", "0", ended, "requested", "7"]
    );
    let refuses = vec![batch(0, false)];
    assert_eq!(again(refuses, settings().timeout, 3), ["requested", off]);
}

#[test]
fn stream_that_is_refused_or_ended_has_a_reason() {
    let brief = Settings {
        timeout: Duration::from_millis(50),
        ..settings()
    };
    for (answers, ended) in [
        (
            vec![batch(0, false)],
            "the server keeps no KV events (--kv-event-log-size 0)",
        ),
        (
            vec![batch(0, true), Some(Response::Nothing)],
            "the server has ended the stream of KV events",
        ),
        (
            vec![None],
            "the server does not answer a subscription to KV events",
        ),
    ] {
        let server = server_at(ANYWHERE, answers);
        let client = connect(&server, brief);
        let updates = updates(&client);
        assert_eq!(updates.recv().unwrap(), "requested");
        let last = updates.iter().find(|it| it != "0");
        assert_eq!(last.as_deref(), Some(ended));
    }
}
