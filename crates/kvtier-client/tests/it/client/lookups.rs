//! Lookups until their result is known, and the ends of their sessions.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use kvtier_client::proto::operation::Operation;
use kvtier_client::proto::request::Request;
use kvtier_client::proto::response::Response;
use kvtier_client::{Client, ClientError, Prompt, Scope, Settings};

use super::{connect, connect_healthy, default_answers, settings, settings_with};
use crate::support::Server;

/// Answers also ends of sessions, and passes on whose.
fn with_ends(
    ended: mpsc::Sender<String>,
) -> impl FnMut(&Request<'_, Vec<u32>>) -> Option<Response<'static>> + Send + 'static {
    move |request| match request {
        Request::EndSession { request_id } => {
            ended.send((*request_id).to_owned()).unwrap();
            Some(Response::Nothing)
        }
        request => default_answers(request),
    }
}

#[test]
fn lookup_is_polled_until_result_is_known() {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let server = Server::typed(move |request| match request {
        Request::Lookup { .. } => Some(Response::Nothing),
        Request::WaitPrefetchStatus { .. } => match count.fetch_add(1, Ordering::Relaxed) {
            0 | 1 => Some(Response::Nothing),
            _ => Some(Response::Int(3)),
        },
        request => default_answers(request),
    });
    let client = connect(&server, settings());
    let (scope, prompt) = (Scope::new("model"), Prompt::new(&[1; 48]));
    let key = scope.scheduler_key(&prompt, 0..48, "request");
    assert_eq!(client.lookup_hits(&key).join().unwrap(), 3);
    assert_eq!(asked.load(Ordering::Relaxed), 3);
}

#[test]
fn timed_out_lookup_ends_its_session() {
    let (sender, ended) = mpsc::channel();
    let server = Server::typed(with_ends(sender));
    let brief = Settings {
        timeout: Duration::from_millis(50),
        ..settings()
    };
    let client = connect(&server, brief);
    let (scope, prompt) = (Scope::new("model"), Prompt::new(&[1; 48]));
    let key = scope.scheduler_key(&prompt, 0..48, "request");
    let error = client.lookup_hits(&key).join().unwrap_err();
    assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
    assert_eq!(ended.recv().unwrap(), "request");
}

#[test]
fn lookup_without_result_in_time_is_pending_for_whole_timeout() {
    let server = Server::typed(|request| match request {
        Request::Lookup { .. } | Request::WaitPrefetchStatus { .. } => Some(Response::Nothing),
        request => default_answers(request),
    });
    let client = connect(&server, settings());
    let (scope, prompt) = (Scope::new("model"), Prompt::new(&[1; 48]));
    let key = scope.scheduler_key(&prompt, 0..48, "request");
    let timeout = Duration::from_millis(50);
    let error = client.lookup_hits_within(&key, timeout).join().unwrap_err();
    let text = error.to_string();
    assert!(
        matches!(error, ClientError::Pending { waited, .. } if waited == timeout),
        "{text}"
    );
    assert!(
        text.contains("lookup: ") && text.contains("within 50ms") && text.contains("second tier"),
        "{text}"
    );
}

#[test]
fn lookup_whose_question_is_not_answered_names_whole_timeout() {
    let server = Server::typed(|request| match request {
        Request::Lookup { .. } => Some(Response::Nothing),
        Request::WaitPrefetchStatus { .. } => None,
        request => default_answers(request),
    });
    let client = connect(&server, settings());
    let (scope, prompt) = (Scope::new("model"), Prompt::new(&[1; 48]));
    let key = scope.scheduler_key(&prompt, 0..48, "request");
    let timeout = Duration::from_millis(50);
    let error = client.lookup_hits_within(&key, timeout).join().unwrap_err();
    assert!(
        matches!(error, ClientError::Timeout { operation: Operation::Lookup, waited, .. } if waited == timeout),
        "{error}"
    );
}

#[test]
fn lookup_with_too_many_hits_fails_and_ends_session() {
    let (sender, ended) = mpsc::channel();
    let mut answer = with_ends(sender);
    let server = Server::typed(move |request| match request {
        Request::Lookup { .. } => Some(Response::Nothing),
        Request::WaitPrefetchStatus { .. } => Some(Response::Int(4)),
        request => answer(request),
    });
    let client = connect(&server, settings_with(16, Some(16)));
    let (scope, prompt) = (Scope::new("model"), Prompt::new(&[1; 48]));
    let key = scope.scheduler_key(&prompt, 0..48, "request");
    let error = client.lookup_hits(&key).join().unwrap_err();
    assert!(
        error.to_string().contains("4 chunks, 3 were asked"),
        "{error}"
    );
    assert_eq!(ended.recv().unwrap(), "request");
}

#[test]
fn lookup_counts_chunks_of_the_size_that_its_key_names() {
    let server = Server::typed(|request| match request {
        Request::GetChunkSize => Some(Response::Int(48)),
        Request::Lookup { .. } => Some(Response::Nothing),
        Request::WaitPrefetchStatus { .. } => Some(Response::Int(3)),
        request => default_answers(request),
    });
    let client = connect_healthy(&server, settings_with(16, None));
    let (mut scope, prompt) = (Scope::new("model"), Prompt::new(&[1; 48]));
    let key = scope.scheduler_key(&prompt, 0..48, "default");
    let error = client.lookup_hits(&key).join().unwrap_err();
    assert!(error.to_string().contains("1 were asked"), "{error}");
    scope.chunk_tokens = Some(16);
    let key = scope.scheduler_key(&prompt, 0..48, "named");
    assert_eq!(client.lookup_hits(&key).join().unwrap(), 3);
}

#[test]
fn session_end_is_sent_however_late_server_starts() {
    let no_server = Server::typed(|_| None).endpoint().to_owned();
    let brief = Settings {
        timeout: Duration::from_millis(20),
        ..settings()
    };
    let client = Client::connect_with(&no_server, brief).unwrap();
    let late = client.end_session("request").join().unwrap_err();
    assert!(matches!(late, ClientError::Timeout { .. }), "{late}");
    let (sender, ended) = mpsc::channel();
    let _server = Server::typed_at(&no_server, with_ends(sender));
    assert_eq!(ended.recv().unwrap(), "request");
}
