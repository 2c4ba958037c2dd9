//! A bucket in memory behind a real socket, and what a test makes it answer instead.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kvtier_common::sync::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio_rustls::TlsAcceptor;

use super::super::{name, time, xml};

/// A request as it came.
#[derive(Debug, Clone)]
pub(super) struct Request {
    pub(super) method: String,
    /// As sent, without the query.
    pub(super) path: String,
    pub(super) query: BTreeMap<String, String>,
    pub(super) headers: BTreeMap<String, String>,
    pub(super) body: Vec<u8>,
    /// Number of its connection.
    pub(super) connection: usize,
}

/// What follows a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Then {
    KeepAlive,
    Close,
    /// Nothing more, and the connection stays open.
    Stall,
    /// A byte now and then, without an end.
    Drip,
}

/// The bytes of a reply.
#[derive(Debug, Clone)]
pub(super) struct Reply {
    pub(super) bytes: Vec<u8>,
    pub(super) then: Then,
    /// What is waited for before it is sent.
    pub(super) held: Option<Arc<Notify>>,
}

impl Reply {
    pub(super) fn raw(bytes: impl Into<Vec<u8>>, then: Then) -> Self {
        Self {
            bytes: bytes.into(),
            then,
            held: None,
        }
    }

    /// No byte of a reply, and the connection stays open.
    pub(super) fn none() -> Self {
        Self::raw(b"", Then::Stall)
    }

    pub(super) fn new(status: u16, headers: &[(&str, &str)], body: &[u8]) -> Self {
        let mut head = format!("HTTP/1.1 {status} Status\r\n");
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if !headers
            .iter()
            .any(|(name, _)| name.eq_ignore_ascii_case("content-length"))
        {
            head.push_str(&format!("Content-Length: {}\r\n", body.len()));
        }
        Self::raw([head.as_bytes(), b"\r\n", body].concat(), Then::KeepAlive)
    }

    pub(super) fn error(status: u16, code: &str) -> Self {
        let body = format!("<Error><Code>{code}</Code><Message>m</Message></Error>");
        Self::new(status, &[], body.as_bytes())
    }
}

#[derive(Debug, Clone, Default)]
pub(super) struct Stored {
    pub(super) bytes: Vec<u8>,
    /// Headers that come back.
    pub(super) metadata: BTreeMap<String, String>,
    pub(super) version: usize,
}

#[derive(Default)]
pub(super) struct Bucket {
    pub(super) objects: BTreeMap<String, Stored>,
    pub(super) uploads: BTreeMap<String, (Stored, BTreeMap<usize, Vec<u8>>)>,
    versions: usize,
}

type Instead = Box<dyn FnMut(&Request, &mut Bucket) -> Option<Reply> + Send>;

/// A running server. It ends with the runtime of its test.
pub(super) struct Server {
    pub(super) port: u16,
    state: Arc<FakeState>,
}

struct FakeState {
    bucket: Mutex<Bucket>,
    instead: Mutex<Option<Instead>>,
    seen: Mutex<Vec<Request>>,
    connections: AtomicUsize,
}

impl Server {
    pub(super) async fn start() -> Self {
        Self::on(TcpListener::bind("127.0.0.1:0").await.unwrap())
    }

    pub(super) fn on(listener: TcpListener) -> Self {
        Self::secured_on(listener, None)
    }

    /// With TLS, if `tls` is there.
    pub(super) fn secured_on(listener: TcpListener, tls: Option<TlsAcceptor>) -> Self {
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(FakeState {
            bucket: Mutex::default(),
            instead: Mutex::default(),
            seen: Mutex::default(),
            connections: AtomicUsize::new(0),
        });
        let of_task = Arc::clone(&state);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let number = of_task.connections.fetch_add(1, Ordering::SeqCst);
                let (state, tls) = (Arc::clone(&of_task), tls.clone());
                tokio::spawn(async move {
                    match tls {
                        None => serve(stream, state, number).await,
                        Some(tls) => {
                            if let Ok(stream) = tls.accept(stream).await {
                                serve(stream, state, number).await;
                            }
                        }
                    }
                });
            }
        });
        Self { port, state }
    }

    /// Answers by this function where it returns something.
    pub(super) fn answers(
        &self,
        instead: impl FnMut(&Request, &mut Bucket) -> Option<Reply> + Send + 'static,
    ) {
        *self.state.instead.lock() = Some(Box::new(instead));
    }

    /// Answers as a server does again.
    pub(super) fn recovers(&self) {
        *self.state.instead.lock() = None;
    }

    pub(super) fn with<T>(&self, work: impl FnOnce(&mut Bucket) -> T) -> T {
        work(&mut self.state.bucket.lock())
    }

    /// All requests until now, in their order.
    pub(super) fn requests(&self) -> Vec<Request> {
        self.state.seen.lock().clone()
    }

    pub(super) fn forget_requests(&self) {
        self.state.seen.lock().clear();
    }

    pub(super) fn connections(&self) -> usize {
        self.state.connections.load(Ordering::SeqCst)
    }
}

async fn serve(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    state: Arc<FakeState>,
    connection: usize,
) {
    let mut bytes = Vec::new();
    while let Some(mut request) = read(&mut stream, &mut bytes).await {
        request.connection = connection;
        let reply = {
            let mut bucket = state.bucket.lock();
            state.seen.lock().push(request.clone());
            let mut instead = state.instead.lock();
            let instead = instead
                .as_mut()
                .and_then(|instead| instead(&request, &mut bucket));
            instead.unwrap_or_else(|| bucket.answer(&request))
        };
        if let Some(held) = &reply.held {
            held.notified().await;
        }
        if stream.write_all(&reply.bytes).await.is_err() {
            return;
        }
        match reply.then {
            Then::KeepAlive => {}
            Then::Close => return,
            Then::Drip => {
                while stream.write_all(b"x").await.is_ok() {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                return;
            }
            Then::Stall => {
                let mut rest = [0; 1024];
                while stream.read(&mut rest).await.is_ok_and(|got| got > 0) {}
                return;
            }
        }
    }
}

async fn read(stream: &mut (impl AsyncRead + Unpin), bytes: &mut Vec<u8>) -> Option<Request> {
    let end = loop {
        if let Some(end) = bytes.windows(4).position(|part| part == b"\r\n\r\n") {
            break end;
        }
        if stream.read_buf(bytes).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
    let mut lines = head.split("\r\n");
    let mut first = lines.next().unwrap().split(' ');
    let (method, target) = (first.next().unwrap(), first.next().unwrap());
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    let query = pairs.map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (name.to_owned(), name::unquoted(value).unwrap())
    });
    let query = query.collect();
    let headers: BTreeMap<_, _> = lines
        .map(|line| {
            let (name, value) = line.split_once(':').unwrap();
            (name.to_lowercase(), value.trim().to_owned())
        })
        .collect();
    let length = headers
        .get("content-length")
        .map_or(0, |text| text.parse().unwrap());
    while bytes.len() < end + 4 + length {
        if stream.read_buf(bytes).await.ok()? == 0 {
            return None;
        }
    }
    let body = bytes[end + 4..end + 4 + length].to_vec();
    let (method, path) = (method.to_owned(), path.to_owned());
    bytes.drain(..end + 4 + length);
    Some(Request {
        method,
        path,
        query,
        headers,
        body,
        connection: 0,
    })
}

impl Request {
    /// The key after `/bucket/`.
    pub(super) fn key(&self) -> String {
        let rest = self.path.strip_prefix("/bucket/").unwrap();
        name::unquoted(&rest.replace('+', "%2B")).unwrap()
    }

    fn has(&self, name: &str) -> bool {
        self.query.contains_key(name)
    }
}

impl Bucket {
    /// What a server answers.
    pub(super) fn answer(&mut self, request: &Request) -> Reply {
        assert!(request.headers["authorization"].starts_with("AWS4-HMAC-SHA256 Credential="));
        let Request {
            method,
            query,
            headers,
            body,
            ..
        } = request;
        let key = request.key();
        match method.as_str() {
            "HEAD" if key.is_empty() => Reply::new(200, &[], b""),
            "GET" if key.is_empty() => self.list(request),
            "POST" if request.has("delete") => {
                let text = String::from_utf8(body.clone()).unwrap();
                for part in text.split("<Key>").skip(1) {
                    let key = part.split_once("</Key>").unwrap().0;
                    let key = key
                        .replace("&lt;", "<")
                        .replace("&gt;", ">")
                        .replace("&quot;", "\"");
                    let key = key.replace("&apos;", "'").replace("&amp;", "&");
                    self.objects.remove(&key);
                }
                Reply::new(200, &[], b"<DeleteResult/>")
            }
            "POST" if request.has("uploads") => {
                self.versions += 1;
                let id = format!("upload {}", self.versions);
                let stored = Stored {
                    metadata: kept(headers),
                    ..Stored::default()
                };
                self.uploads.insert(id.clone(), (stored, BTreeMap::new()));
                let body = format!(
                    "<InitiateMultipartUploadResult><UploadId>{id}</UploadId></InitiateMultipartUploadResult>"
                );
                Reply::new(200, &[], body.as_bytes())
            }
            "PUT" if request.has("uploadId") => {
                let Some((_, parts)) = self.uploads.get_mut(&query["uploadId"]) else {
                    return Reply::error(404, "NoSuchUpload");
                };
                let number = query["partNumber"].parse().unwrap();
                parts.insert(number, body.clone());
                Reply::new(200, &[("ETag", &format!("\"part {number}\""))], b"")
            }
            "POST" if request.has("uploadId") => {
                let Some((mut stored, parts)) = self.uploads.remove(&query["uploadId"]) else {
                    return Reply::error(404, "NoSuchUpload");
                };
                let text = String::from_utf8(body.clone()).unwrap();
                assert_eq!(text.matches("<Part>").count(), parts.len());
                stored.bytes = parts.into_values().flatten().collect();
                self.put(&key, stored);
                Reply::new(200, &[], b"<CompleteMultipartUploadResult/>")
            }
            "DELETE" if request.has("uploadId") => {
                self.uploads.remove(&query["uploadId"]);
                Reply::new(204, &[], b"")
            }
            "PUT" => {
                let stored = Stored {
                    bytes: body.clone(),
                    metadata: kept(headers),
                    version: 0,
                };
                self.put(&key, stored);
                Reply::new(200, &[], b"")
            }
            "DELETE" => {
                self.objects.remove(&key);
                Reply::new(204, &[], b"")
            }
            "GET" | "HEAD" => self.get(request, &key),
            _ => Reply::error(405, "MethodNotAllowed"),
        }
    }

    pub(super) fn put(&mut self, key: &str, stored: Stored) {
        self.versions += 1;
        let stored = Stored {
            version: self.versions,
            ..stored
        };
        self.objects.insert(key.to_owned(), stored);
    }

    fn get(&self, request: &Request, key: &str) -> Reply {
        let is_head = request.method == "HEAD";
        let Some(stored) = self.objects.get(key) else {
            let reply = Reply::error(404, "NoSuchKey");
            return if is_head {
                Reply::new(404, &[("Content-Length", "90")], b"")
            } else {
                reply
            };
        };
        let etag = format!("\"{}\"", stored.version);
        if request
            .headers
            .get("if-match")
            .is_some_and(|wanted| *wanted != etag)
        {
            return Reply::error(412, "PreconditionFailed");
        }
        let all = stored.bytes.len();
        let range = request.headers.get("range").map(|range| {
            let (from, to) = range
                .strip_prefix("bytes=")
                .unwrap()
                .split_once('-')
                .unwrap();
            (from.parse::<usize>().unwrap(), to.parse::<usize>().unwrap())
        });
        let (status, from, to) = match range {
            None => (200, 0, all),
            Some((from, _)) if from >= all => return Reply::error(416, "InvalidRange"),
            Some((from, to)) => (206, from, all.min(to + 1)),
        };
        let length = (to - from).to_string();
        let shown = format!("bytes {from}-{}/{all}", to.saturating_sub(1));
        let mut headers = vec![("ETag", etag.as_str()), ("Content-Length", &length)];
        if status == 206 {
            headers.push(("Content-Range", &shown));
        }
        for (name, value) in &stored.metadata {
            headers.push((name, value));
        }
        let body = if is_head {
            &[][..]
        } else {
            &stored.bytes[from..to]
        };
        Reply::new(status, &headers, body)
    }

    fn list(&self, request: &Request) -> Reply {
        let query = &request.query;
        let prefix = query.get("prefix").map_or("", String::as_str);
        let after = query.get("continuation-token");
        if after.is_some_and(|after| !after.starts_with("after ")) {
            return Reply::error(400, "InvalidArgument");
        }
        let limit = query["max-keys"].parse::<usize>().unwrap();
        let after = after.map(|after| after.trim_start_matches("after "));
        let mut found = self.objects.iter().filter(|(key, _)| {
            key.starts_with(prefix) && after.is_none_or(|after| key.as_str() > after)
        });
        let page: Vec<_> = found.by_ref().take(limit).collect();
        let mut body = "<ListBucketResult><EncodingType>url</EncodingType>".to_owned();
        for (key, stored) in &page {
            body.push_str(&format!(
                "<Contents><Key>{}</Key><Size>{}</Size><LastModified>2026-11-22T14:04:06.000Z</LastModified></Contents>",
                name::quoted_in_query(key),
                stored.bytes.len()
            ));
        }
        if found.next().is_some() {
            let last = xml::escaped(page.last().unwrap().0);
            body.push_str(&format!(
                "<IsTruncated>true</IsTruncated><NextContinuationToken>after {last}</NextContinuationToken>"
            ));
        }
        body.push_str("</ListBucketResult>");
        Reply::new(200, &[], body.as_bytes())
    }
}

/// The headers that come back, with another case of their names.
fn kept(headers: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let own = headers
        .iter()
        .filter(|(name, _)| name.starts_with("x-amz-meta-"));
    own.map(|(name, value)| (name.replace("meta-k", "Meta-K"), value.clone()))
        .collect()
}

/// The date of a header, some seconds from now.
pub(super) fn date(ahead: i64) -> String {
    let seconds = time::now().saturating_add_signed(ahead);
    let then = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
    httpdate::fmt_http_date(then)
}
