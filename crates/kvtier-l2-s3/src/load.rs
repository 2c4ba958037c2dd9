//! Loads: one request, or several for ranges of one version of a large object.

use std::sync::Arc;

use hyper::body::Bytes;
use tokio::task::JoinSet;

use super::client::{Call, S3Answer};
use super::metadata::{self, count};
use super::{MAX_ANSWER, Open, S3Bucket};
use kvtier_l2::{ErrorKind, L2Error, LoadItem, Loaded};

/// Bytes from an offset on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Span {
    at: u64,
    len: u64,
}

/// Reads one object into its buffer.
pub(super) async fn load(
    bucket: Arc<S3Bucket>,
    item: LoadItem,
    _: Open,
) -> Result<Loaded, L2Error> {
    bucket.check(&item.object, &item.to)?;
    let key = bucket.key(&item.object)?;
    let load = Download { bucket, item, key };
    let loaded = load.run().await;
    if matches!(&loaded, Err(error) if error.kind() == ErrorKind::Corrupt) {
        load.bucket.damaged.insert(&load.item.object.key);
    }
    loaded
}

/// Load of one object.
#[derive(Clone)]
struct Download {
    bucket: Arc<S3Bucket>,
    item: LoadItem,
    key: String,
}

impl Download {
    async fn run(&self) -> Result<Loaded, L2Error> {
        let whole = self.whole();
        let first = Span {
            at: 0,
            len: whole.len.min(self.bucket.multipart_bytes),
        };
        let is_split = first.len < whole.len;
        let mut call = Call::new("GET", &self.key);
        if is_split {
            call.headers.push(("range", range(first)));
        }
        let answer = self.bucket.client.send(&call).await?;
        // A server may ignore ranges, and rclone answers them by 200.
        let is_partial = answer.response.is_partial();
        let span = match answer.response.status() {
            200 | 206 if is_split && is_partial => first,
            200 => whole,
            _ => return Err(answer.failure("load").await),
        };
        self.check_length(&answer, span)?;
        let sum = self.expected_sum(&answer)?;
        let etag = answer.response.header("etag").map(str::to_owned);
        let is_of_one_version = if span.len == whole.len {
            self.receive(answer, span).await?;
            true
        } else if let Some(etag) = etag {
            let (first, rest) =
                tokio::join!(self.receive(answer, span), self.load_rest(&etag, span.len));
            first?;
            rest?
        } else {
            drop(answer);
            false
        };
        if !is_of_one_version {
            self.load_whole(sum).await?;
        }
        self.verify(sum)
    }

    fn whole(&self) -> Span {
        Span {
            at: 0,
            len: self.item.object.len,
        }
    }

    /// Loads the object by one request, whose response is of one version. It may be another one than before, of the same sum.
    async fn load_whole(&self, sum: Option<u128>) -> Result<(), L2Error> {
        let client = &self.bucket.client;
        let answer = client.send(&Call::new("GET", &self.key)).await?;
        if answer.response.status() != 200 {
            return Err(answer.failure("load").await);
        }
        self.check_length(&answer, self.whole())?;
        if self.expected_sum(&answer)? != sum {
            let what = "load: the object was replaced meanwhile";
            return Err(client.error(ErrorKind::Unavailable, what));
        }
        self.receive(answer, self.whole()).await
    }

    /// Loads what is behind the first part. Returns false if the object is not of the version `etag` any more.
    async fn load_rest(&self, etag: &str, from: u64) -> Result<bool, L2Error> {
        let mut tasks = JoinSet::new();
        let mut at = from;
        while at < self.item.object.len {
            let len = self.bucket.multipart_bytes.min(self.item.object.len - at);
            let (load, etag, span) = (self.clone(), etag.to_owned(), Span { at, len });
            tasks.spawn(async move { load.load_part(&etag, span).await });
            at += len;
        }
        let mut outcome = Ok(true);
        while let (Ok(true), Some(ended)) = (&outcome, tasks.join_next().await) {
            outcome = ended.unwrap_or_else(|error| {
                let what = format!("load: {error}");
                Err(self.bucket.client.error(ErrorKind::Unavailable, &what))
            });
        }
        // None of them writes to the buffer after this.
        tasks.shutdown().await;
        outcome
    }

    async fn load_part(&self, etag: &str, span: Span) -> Result<bool, L2Error> {
        let mut call = Call::new("GET", &self.key);
        call.headers.push(("range", range(span)));
        call.headers.push(("if-match", etag.to_owned()));
        let answer = self.bucket.client.send(&call).await?;
        match answer.response.status() {
            200 | 206 if answer.response.is_partial() => {}
            200 => return Ok(false),
            412 => {
                answer.whole(MAX_ANSWER).await?;
                return Ok(false);
            }
            _ => return Err(answer.failure("load of a part").await),
        }
        // A server may ignore `If-Match`.
        if answer.response.header("etag") != Some(etag) {
            return Ok(false);
        }
        self.check_length(&answer, span)?;
        self.receive(answer, span).await?;
        Ok(true)
    }

    /// Counts a damaged object and returns its error.
    fn corrupt(&self, what: &str) -> L2Error {
        count(&self.bucket.counters.corrupt);
        self.bucket.client.error(ErrorKind::Corrupt, what)
    }

    /// Checks the lengths that a response announces, before a byte of it is written.
    fn check_length(&self, answer: &S3Answer<'_>, span: Span) -> Result<(), L2Error> {
        let response = &answer.response;
        let is_encoded = response
            .header("content-encoding")
            .is_some_and(|encoding| !encoding.is_empty() && encoding != "identity");
        if is_encoded {
            return Err(self.corrupt("load: the object has an encoding"));
        }
        if response.is_partial() {
            let expected = format!(
                "bytes {}-{}/{}",
                span.at,
                (span.at + span.len).saturating_sub(1),
                self.item.object.len
            );
            let found = response.header("content-range").unwrap_or_default();
            if found != expected {
                let found: String = found.chars().take(80).collect();
                let what = format!("load: range {found:?} instead of {expected:?}");
                return Err(self.corrupt(&what));
            }
        }
        match response.content_length() {
            Some(length) if length != span.len => {
                let what = format!("load: {length} bytes instead of {}", span.len);
                Err(self.corrupt(&what))
            }
            // Without a length the end of the body shows it.
            _ => Ok(()),
        }
    }

    /// Returns the checksum that the bytes of a response have to have, `None` if nothing is known and that is allowed.
    fn expected_sum(&self, answer: &S3Answer<'_>) -> Result<Option<u128>, L2Error> {
        let metadata = metadata::of(&answer.response, &self.item.object);
        let (counters, needs_layout) = (&self.bucket.counters, self.bucket.needs_layout());
        let sum = counters.expected_sum(metadata, needs_layout);
        sum.map_err(|(kind, what)| self.bucket.client.error(kind, what))
    }

    /// Writes the body of a response to `span` of the buffer.
    async fn receive(&self, mut answer: S3Answer<'_>, span: Span) -> Result<(), L2Error> {
        let mut written = 0;
        while let Some(bytes) = answer.response.frame().await? {
            let len = Bytes::len(&bytes) as u64;
            if len > span.len - written {
                return Err(self.corrupt(&format!("load: more than {} bytes", span.len)));
            }
            self.item.to.write(span.at + written, &bytes)?;
            written += len;
        }
        if written < span.len {
            let what = format!("load: {written} bytes instead of {}", span.len);
            return Err(self.corrupt(&what));
        }
        answer.response.end();
        Ok(())
    }

    fn verify(&self, sum: Option<u128>) -> Result<Loaded, L2Error> {
        let Some(sum) = sum else {
            count(&self.bucket.counters.unverified);
            return Ok(Loaded { verified: false });
        };
        if self.item.to.checksum()? != sum {
            return Err(self.corrupt("load: the object is not what was stored"));
        }
        Ok(Loaded { verified: true })
    }
}

fn range(span: Span) -> String {
    format!("bytes={}-{}", span.at, span.at + span.len - 1)
}
