//! Stores: one request, or an upload in parts for a large object. An object is there with all of its bytes and its metadata,
//! or not at all.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Bytes;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::client::{Call, Client};
use super::content::Content;
use super::metadata::{self, Metadata};
use super::{MAX_ANSWER, Open, S3Bucket, xml};
use kvtier_l2::{Buffer, ErrorKind, L2Error, ObjectSpec, StoreItem, Stored};

/// Most parts of an upload.
const MAX_PARTS: u64 = 10_000;

/// What is under a key before a store.
enum Before {
    /// An object with the same bytes, unless they were damaged since.
    Equal,
    /// Something of the same length.
    Similar,
    /// Nothing, or something of another length.
    Absent,
}

/// Time for the removal of an upload; the end of the adapter waits for it.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(10);

/// An upload in parts that was not completed: dropping it removes it from the server, in a task of its own.
struct Upload {
    bucket: Arc<S3Bucket>,
    open: Open,
    key: String,
    id: String,
    is_complete: bool,
}

impl Drop for Upload {
    fn drop(&mut self) {
        if self.is_complete {
            return;
        }
        let (bucket, call) = (Arc::clone(&self.bucket), self.call("DELETE", None));
        let open = Arc::clone(&self.open);
        let remove = async move {
            let client = &bucket.client;
            let removed = timeout(REMOVAL_TIMEOUT, remove(client, &call)).await;
            let late = || client.error(ErrorKind::Deadline, "no answer in time");
            if let Err(error) = removed.unwrap_or_else(|_| Err(late())) {
                tracing::debug!(%error, "an incomplete upload stays in the bucket");
            }
            drop(open);
        };
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(remove);
        }
    }
}

async fn remove(client: &Client, call: &Call) -> Result<(), L2Error> {
    let answer = client.send(call).await?;
    match answer.response.status() {
        200..300 | 404 => answer.whole(MAX_ANSWER).await.map(drop),
        _ => Err(answer.failure("removal of an upload").await),
    }
}

impl Upload {
    fn call(&self, method: &'static str, part: Option<usize>) -> Call {
        let mut call = Call::new(method, &self.key);
        if let Some(part) = part {
            call.query.push(("partNumber", part.to_string()));
        }
        let id = super::name::quoted_in_query(&self.id);
        call.query.push(("uploadId", id));
        call
    }

    /// Begins an upload, in a task of its own: a store that is dropped meanwhile still learns the upload's id, and removes it.
    async fn begin(
        bucket: &Arc<S3Bucket>,
        key: String,
        headers: Vec<(&'static str, String)>,
        open: Open,
    ) -> Result<Self, L2Error> {
        let call = Call {
            query: vec![("uploads", String::new())],
            headers,
            is_unique: true,
            ..Call::new("POST", &key)
        };
        let shared = Arc::clone(bucket);
        let begin = async move {
            let answer = shared.client.send(&call).await?;
            if answer.response.status() != 200 {
                return Err(answer.failure("start of an upload").await);
            }
            let id = xml::upload_id(&answer.whole(MAX_ANSWER).await?)
                .map_err(|_| shared.malformed("upload"))?;
            Ok(Self {
                bucket: shared,
                open,
                key,
                id,
                is_complete: false,
            })
        };
        let (begun, upload) = oneshot::channel();
        tokio::spawn(async move {
            let (mut begin, mut begun) = (pin!(begin), begun);
            let result = tokio::select! {
                result = &mut begin => result,
                () = begun.closed() => match timeout(REMOVAL_TIMEOUT, begin).await {
                    Ok(result) => result,
                    Err(_) => return,
                },
            };
            // Without a receiver it is dropped, and an upload with it.
            let _ = begun.send(result);
        });
        upload
            .await
            .unwrap_or_else(|_| Err(bucket.malformed("upload")))
    }

    /// Sends all parts, as many at a time as requests may be in flight; returns the `ETag` of each.
    async fn send_parts(&self, from: &Buffer) -> Result<Vec<String>, L2Error> {
        let len = from.len();
        let part_len = self.bucket.multipart_bytes.max(len.div_ceil(MAX_PARTS));
        let mut tasks = JoinSet::new();
        let mut etags = Vec::new();
        let mut at = 0;
        while at < len {
            let this = part_len.min(len - at);
            let call = Call {
                content: Content::Object(from.clone(), at, this),
                ..self.call("PUT", Some(etags.len() + 1))
            };
            let (bucket, number) = (Arc::clone(&self.bucket), etags.len());
            tasks.spawn(async move { Ok((number, send_part(&bucket.client, &call).await?)) });
            etags.push(String::new());
            at += this;
        }
        while let Some(result) = tasks.join_next().await {
            let result = result.unwrap_or_else(|error| {
                let what = format!("store: {error}");
                Err(self.bucket.client.error(ErrorKind::Unavailable, &what))
            });
            let (number, etag) = result?;
            if let Some(slot) = etags.get_mut(number) {
                *slot = etag;
            }
        }
        Ok(etags)
    }

    async fn complete(mut self, etags: &[String]) -> Result<(), L2Error> {
        let complete = Call {
            content: Content::Bytes(Bytes::from(xml::complete(etags))),
            is_unique: true,
            ..self.call("POST", None)
        };
        let client = &self.bucket.client;
        let answer = client.send(&complete).await?;
        if answer.response.status() != 200 {
            return Err(answer.failure("end of an upload").await);
        }
        // The status is sent before the parts were put together.
        let body = answer.whole(MAX_ANSWER).await?;
        if !xml::is_complete(&body).map_err(|_| self.bucket.malformed("upload"))? {
            return Err(client.failure_of((500, &body), "end of an upload", false));
        }
        self.is_complete = true;
        Ok(())
    }
}

/// Writes one object.
pub(super) async fn store(
    bucket: Arc<S3Bucket>,
    item: StoreItem,
    open: Open,
) -> Result<Stored, L2Error> {
    let StoreItem { object, from } = &item;
    bucket.check(object, from)?;
    let key = bucket.key(object)?;
    let sum = from.checksum()?;
    let before = before(&bucket.client, &key, object, sum).await?;
    // What a load has found to be damaged has the right metadata.
    if matches!(before, Before::Equal) && !bucket.damaged.contains(&object.key) {
        metadata::count(&bucket.skipped);
        return Ok(Stored::AlreadyThere(object.len));
    }
    let mut headers = bucket.object_headers.clone();
    headers.push((metadata::HEADER, metadata::encode(object, sum)));
    headers.push(("content-type", "application/octet-stream".to_owned()));
    if object.len > bucket.multipart_bytes {
        let upload = Upload::begin(&bucket, key, headers, open).await?;
        let etags = upload.send_parts(from).await?;
        upload.complete(&etags).await?;
    } else {
        let call = Call {
            headers,
            content: Content::Object(from.clone(), 0, object.len),
            ..Call::new("PUT", &key)
        };
        let answer = bucket.client.send(&call).await?;
        if !matches!(answer.response.status(), 200..300) {
            return Err(answer.failure("store").await);
        }
        answer.whole(MAX_ANSWER).await?;
    }
    bucket.damaged.remove(&object.key);
    Ok(match before {
        Before::Absent => Stored::Written(object.len),
        Before::Equal | Before::Similar => Stored::AlreadyThere(object.len),
    })
}

async fn before(
    client: &Client,
    key: &str,
    object: &ObjectSpec,
    sum: u128,
) -> Result<Before, L2Error> {
    let answer = client.send(&Call::new("HEAD", key)).await?;
    let response = &answer.response;
    let before = match response.status() {
        404 => Before::Absent,
        200 if response.content_length() != Some(object.len) => Before::Absent,
        200 if metadata::of(response, object) == Metadata::Of(sum) => Before::Equal,
        200 => Before::Similar,
        _ => return Err(answer.failure("lookup before a store").await),
    };
    answer.response.end();
    Ok(before)
}

async fn send_part(client: &Client, call: &Call) -> Result<String, L2Error> {
    let answer = client.send(call).await?;
    if !matches!(answer.response.status(), 200..300) {
        return Err(answer.failure("store of a part").await);
    }
    let etag = answer.response.header("etag").map(str::to_owned);
    answer.whole(MAX_ANSWER).await?;
    etag.ok_or_else(|| client.error(ErrorKind::Unavailable, "store of a part: no ETag"))
}
