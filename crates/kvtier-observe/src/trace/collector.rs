//! A connection to a collector, and the one call on it: gRPC over HTTP/2.

use std::fmt;
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use h2::client::SendRequest;
use h2::{RecvStream, client};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, Version};
use kvtier_config::{OtlpEndpoint, TracingConfig};
use kvtier_l2::net::connect_any;
use kvtier_l2::net::tls::{ClientTls, TlsSettings};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::otlp;

/// Longest time of a call, with the connection that it may need. A collector that does not answer is not asked meanwhile.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest answer that is read, bytes; a longer one is cut off.
const MAX_ANSWER: usize = 16 << 10;

/// Longest text of a collector that is logged, bytes.
const MAX_TEXT: usize = 200;

const PATH: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";

/// A collector, connected or not.
pub struct Collector {
    endpoint: OtlpEndpoint,
    uri: Uri,
    headers: HeaderMap,
    tls: Option<TlsSettings>,
    link: Option<Link>,
}

/// An open connection.
struct Link {
    requests: SendRequest<Bytes>,
    /// Drives it; ends with it.
    _driver: JoinSet<()>,
}

/// Why spans were not taken.
#[derive(Debug)]
pub enum Failure {
    /// The connection has ended, or broke the rules of HTTP/2.
    Disconnected(String),
    /// The collector is unreachable, does not answer, or asks for a retry.
    Unavailable(String),
    /// The collector refuses these spans.
    Rejected(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Disconnected(text) | Self::Unavailable(text) | Self::Rejected(text)) = self;
        f.write_str(text)
    }
}

fn unavailable(what: &'static str) -> impl Fn(&dyn fmt::Display) -> Failure {
    move |error| Failure::Unavailable(format!("{what}: {error}"))
}

impl Collector {
    pub fn new(config: &TracingConfig) -> Self {
        let endpoint = config.endpoint.clone();
        let uri = Uri::builder()
            .scheme(if endpoint.tls { "https" } else { "http" })
            .authority(endpoint.authority())
            .path_and_query(PATH)
            .build();
        let mut headers = HeaderMap::new();
        for (name, value) in config.headers.iter() {
            let name = HeaderName::from_bytes(name.as_bytes());
            // Both were checked as flags are.
            if let (Ok(name), Ok(mut value)) = (name, HeaderValue::from_str(value)) {
                value.set_sensitive(true);
                headers.append(name, value);
            }
        }
        headers.insert("content-type", HeaderValue::from_static("application/grpc"));
        headers.insert("te", HeaderValue::from_static("trailers"));
        let agent = concat!("kvtier/", env!("CARGO_PKG_VERSION"));
        headers.insert("user-agent", HeaderValue::from_static(agent));
        Self {
            tls: endpoint.tls.then(|| TlsSettings::new(ClientTls::default())),
            // The parts were checked as flags are.
            uri: uri.unwrap_or_default(),
            endpoint,
            headers,
            link: None,
        }
    }

    /// Sends an encoded request. Returns how many of its spans were not taken all the same, and why.
    pub async fn export(&mut self, request: &[u8]) -> Result<(u64, String), Failure> {
        // One that was idle may have been closed by the other side meanwhile. Whatever else fails is tried after a pause.
        let was_open = self.link.is_some();
        match self.export_once(request).await {
            Err(Failure::Disconnected(_)) if was_open => self.export_once(request).await,
            done => done,
        }
    }

    async fn export_once(&mut self, request: &[u8]) -> Result<(u64, String), Failure> {
        // Removed while it is used: a call that fails or is cancelled leaves none behind.
        let link = self.link.take();
        let call = async {
            let link = match link {
                Some(link) => link,
                None => self.connect().await?,
            };
            let answer = self.call(&link.requests, request).await;
            Ok::<_, Failure>((link, answer))
        };
        let too_late = |_| Failure::Unavailable("no answer in time".to_owned());
        let (link, answer) = timeout(CALL_TIMEOUT, call).await.map_err(too_late)??;
        if matches!(answer, Ok(_) | Err(Failure::Rejected(_))) {
            self.link = Some(link);
        }
        answer
    }

    async fn connect(&self) -> Result<Link, Failure> {
        let OtlpEndpoint { host, port, .. } = &self.endpoint;
        let stream = connect_any(host, *port, CALL_TIMEOUT).await;
        let stream = stream.map_err(|error| unavailable("connect")(&error))?;
        // Batches are small, and each is waited for.
        let _ = stream.set_nodelay(true);
        let Some(settings) = &self.tls else {
            return open(stream).await;
        };
        let (settings, name) = settings
            .of(host)
            .await
            .map_err(|error| unavailable("TLS")(&error))?;
        let mut settings = (*settings).clone();
        settings.alpn_protocols = vec![b"h2".to_vec()];
        let connector = TlsConnector::from(std::sync::Arc::new(settings));
        let stream = connector.connect(name, stream).await;
        open(stream.map_err(|error| unavailable("TLS")(&error))?).await
    }

    async fn call(
        &self,
        requests: &SendRequest<Bytes>,
        message: &[u8],
    ) -> Result<(u64, String), Failure> {
        let failed = |error: h2::Error| {
            // A reset is of this call alone.
            if error.is_reset() {
                unavailable("HTTP/2")(&error)
            } else {
                Failure::Disconnected(format!("HTTP/2: {error}"))
            }
        };
        let mut request = Request::new(());
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.uri.clone();
        *request.version_mut() = Version::HTTP_2;
        *request.headers_mut() = self.headers.clone();
        let mut requests = requests.clone().ready().await.map_err(failed)?;
        let (answer, mut body) = requests.send_request(request, false).map_err(failed)?;
        body.send_data(frame(message), true).map_err(failed)?;
        let (head, mut body) = answer.await.map_err(failed)?.into_parts();
        if head.status != http::StatusCode::OK {
            let text = format!("HTTP status {}; OTLP/gRPC is expected", head.status);
            return Err(match head.status.as_u16() {
                429 | 502..=504 => Failure::Unavailable(text),
                _ => Failure::Rejected(text),
            });
        }
        // An answer without a body has its status in front.
        if head.headers.contains_key("grpc-status") {
            return status(&head.headers).map(|()| (0, String::new()));
        }
        let message = read(&mut body).await.map_err(failed)?;
        let trailers = body.trailers().await.map_err(failed)?;
        status(&trailers.unwrap_or_default())?;
        let (rejected, reason) = otlp::rejected(unframed(&message));
        Ok((rejected, shown(reason)))
    }
}

async fn open(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> Result<Link, Failure> {
    let mut builder = client::Builder::new();
    builder
        .enable_push(false)
        .max_header_list_size(MAX_ANSWER as u32);
    let opened = builder.handshake(stream).await;
    let (requests, connection) = opened.map_err(|error| unavailable("HTTP/2")(&error))?;
    let mut driver = JoinSet::new();
    driver.spawn(async move {
        // The calls on it fail too.
        let _ = connection.await;
    });
    Ok(Link {
        requests,
        _driver: driver,
    })
}

/// A message of gRPC, not compressed.
fn frame(message: &[u8]) -> Bytes {
    let mut frame = BytesMut::with_capacity(5 + message.len());
    frame.put_u8(0);
    // A batch has some megabytes at most.
    frame.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
    frame.put_slice(message);
    frame.freeze()
}

/// The message of a frame; an empty one if that is cut off or compressed, which was not asked for.
fn unframed(frame: &[u8]) -> &[u8] {
    match frame {
        [0, _, _, _, _, message @ ..] => message,
        _ => &[],
    }
}

/// The start of a body.
async fn read(body: &mut RecvStream) -> Result<Vec<u8>, h2::Error> {
    let mut read = Vec::new();
    while let Some(part) = body.data().await {
        let part = part?;
        body.flow_control().release_capacity(part.len())?;
        let space = MAX_ANSWER - read.len();
        read.extend_from_slice(&part[..part.len().min(space)]);
    }
    Ok(read)
}

/// Whether a call has succeeded, by its trailers.
fn status(trailers: &HeaderMap) -> Result<(), Failure> {
    let code = trailers.get("grpc-status");
    let code = code.and_then(|code| code.to_str().ok()?.parse::<u32>().ok());
    let text = trailers.get("grpc-message");
    let text = shown(&decoded(text.map_or(&[][..], HeaderValue::as_bytes)));
    match code {
        Some(0) => Ok(()),
        None => Err(Failure::Rejected(
            "an answer without grpc-status; OTLP/gRPC is expected".to_owned(),
        )),
        // Those that OTLP's specification calls retryable.
        Some(code @ (1 | 4 | 10 | 11 | 14 | 15)) => {
            Err(Failure::Unavailable(format!("gRPC status {code}: {text}")))
        }
        Some(code) => Err(Failure::Rejected(format!("gRPC status {code}: {text}"))),
    }
}

/// A text without its percent-encoding; what is malformed stays.
fn decoded(text: &[u8]) -> Vec<u8> {
    let digit = |digit: u8| char::from(digit).to_digit(16);
    let (mut decoded, mut rest) = (Vec::with_capacity(text.len()), text);
    while let [first, after @ ..] = rest {
        let byte = match rest {
            [b'%', high, low, ..] => digit(*high).zip(digit(*low)),
            _ => None,
        };
        match byte {
            Some((high, low)) => {
                decoded.push((high << 4 | low) as u8);
                rest = &rest[3..];
            }
            None => {
                decoded.push(*first);
                rest = after;
            }
        }
    }
    decoded
}

/// The start of a collector's text.
fn shown(text: &[u8]) -> String {
    String::from_utf8_lossy(&text[..text.len().min(MAX_TEXT)]).into_owned()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use h2::{Reason, server};
    use http::Response;
    use tokio::net::TcpListener;

    use super::*;
    use crate::trace::testing::config;

    /// What a collector does with a call.
    #[derive(Clone, Copy)]
    enum CollectorAnswer {
        Status(u32),
        Reset,
        Disconnect,
    }

    /// Makes a successful call, and another one on the same connection whose first answer is this. Returns the outcome of the
    /// second one and the calls that the collector got.
    async fn second_call(second: CollectorAnswer) -> (Result<(u64, String), Failure>, usize) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut collector = Collector::new(&config(listener.local_addr().unwrap()));
        let calls = Cell::new(0);
        let serve = async {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let mut connection = server::handshake(stream).await.unwrap();
                while let Some(Ok((_, mut respond))) = connection.accept().await {
                    calls.set(calls.get() + 1);
                    let answer = if calls.get() == 2 {
                        second
                    } else {
                        CollectorAnswer::Status(0)
                    };
                    match answer {
                        CollectorAnswer::Status(code) => {
                            let head = Response::builder().header("grpc-status", code);
                            respond.send_response(head.body(()).unwrap(), true).unwrap();
                        }
                        CollectorAnswer::Reset => respond.send_reset(Reason::INTERNAL_ERROR),
                        CollectorAnswer::Disconnect => break,
                    }
                }
            }
        };
        let call = async {
            collector.export(b"one").await.unwrap();
            collector.export(b"two").await
        };
        tokio::select! {
            () = serve => unreachable!(),
            outcome = call => (outcome, calls.get()),
        }
    }

    // proves: docs/metrics.md#when-the-collector-fails
    #[tokio::test]
    async fn only_a_lost_connection_is_replaced_at_once() {
        for answer in [CollectorAnswer::Status(14), CollectorAnswer::Reset] {
            let (outcome, calls) = second_call(answer).await;
            assert!(
                matches!(outcome, Err(Failure::Unavailable(_))),
                "{outcome:?}"
            );
            assert_eq!(calls, 2);
        }
        let (outcome, calls) = second_call(CollectorAnswer::Disconnect).await;
        assert!(outcome.is_ok(), "{outcome:?}");
        assert_eq!(calls, 3);
    }

    #[test]
    fn statuses_are_success_retry_or_rejection() {
        let of = |code: &str| {
            let mut trailers = HeaderMap::new();
            trailers.insert("grpc-status", HeaderValue::from_str(code).unwrap());
            trailers.insert("grpc-message", HeaderValue::from_static("why"));
            match status(&trailers) {
                Ok(()) => "taken".to_owned(),
                Err(Failure::Rejected(text)) => format!("rejected {text}"),
                Err(failure) => format!("retry {failure}"),
            }
        };
        assert_eq!(of("0"), "taken");
        assert_eq!(of("14"), "retry gRPC status 14: why");
        assert_eq!(of("16"), "rejected gRPC status 16: why");
        assert!(of("x").starts_with("rejected an answer without"));
    }

    #[test]
    fn messages_are_decoded() {
        assert_eq!(decoded(b"50%25 f%C3%BCr%0a%"), "50% f\u{fc}r\n%".as_bytes());
        assert_eq!(decoded(b"%4%zz%4z"), b"%4%zz%4z");
    }

    #[test]
    fn only_plain_frames_have_a_message() {
        assert_eq!(unframed(&frame(b"x")), b"x");
        for frame in [&b"\x01\0\0\0\x01x"[..], b"\0\0\0\0", b""] {
            assert_eq!(unframed(frame), b"");
        }
    }

    #[test]
    fn long_texts_of_a_collector_are_cut() {
        assert_eq!(shown(&[b'x'; 1000]).len(), MAX_TEXT);
    }
}
