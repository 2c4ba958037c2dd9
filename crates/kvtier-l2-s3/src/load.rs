//! Loads: one request, or several for ranges of one version of a large object.

use std::sync::Arc;

use hyper::body::Bytes;
use tokio::task::JoinSet;

use super::client::{Answer, Call};
use super::metadata::{self, Metadata};
use super::{MAX_ANSWER, Shared, count};
use kvtier_l2::{Buffer, ErrorKind, L2Error, LoadItem, Loaded, ObjectSpec};

/// Bytes from an offset on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Span {
    at: u64,
    len: u64,
}

impl Shared {
    /// Reads one object into its buffer.
    pub(super) async fn load(self: &Arc<Self>, item: &LoadItem) -> Result<Loaded, L2Error> {
        let LoadItem { object, to } = item;
        self.check(object, to)?;
        let key = self.key(object)?;
        let first = Span {
            at: 0,
            len: object.len.min(self.multipart_bytes),
        };
        let is_split = first.len < object.len;
        let mut call = Call::new("GET", &key);
        if is_split {
            call.headers.push(("range", range(first)));
        }
        let answer = self.client.send(&call).await?;
        let status = answer.response.status();
        // A server may ignore ranges, and rclone answers them by 200.
        let is_partial = answer.response.is_partial();
        let span = match status {
            200 | 206 if is_split && is_partial => first,
            200 => Span {
                at: 0,
                len: object.len,
            },
            _ => {
                let error = answer.failure("load").await;
                return Err(error);
            }
        };
        self.check_length(&answer, object, span)?;
        let sum = self.expected_sum(&answer, object)?;
        let etag = answer.response.header("etag").map(str::to_owned);
        let is_of_one_version = if span.len == object.len {
            self.receive(answer, to, span).await?;
            true
        } else if let Some(etag) = etag {
            let (first, rest) = tokio::join!(
                self.receive(answer, to, span),
                self.load_rest(&key, &etag, object, to, span.len)
            );
            first?;
            rest?
        } else {
            drop(answer);
            false
        };
        if !is_of_one_version {
            self.load_whole(&key, object, to, sum).await?;
        }
        self.verify(to, sum)
    }

    /// Loads an object by one request, whose response is of one version. It may be another one than before, of the same sum.
    async fn load_whole(
        &self,
        key: &str,
        object: &ObjectSpec,
        to: &Buffer,
        sum: Option<u128>,
    ) -> Result<(), L2Error> {
        let whole = Span {
            at: 0,
            len: object.len,
        };
        let answer = self.client.send(&Call::new("GET", key)).await?;
        if answer.response.status() != 200 {
            return Err(answer.failure("load").await);
        }
        self.check_length(&answer, object, whole)?;
        if self.expected_sum(&answer, object)? != sum {
            let what = "load: the object was replaced meanwhile";
            return Err(self.client.error(ErrorKind::Unavailable, what));
        }
        self.receive(answer, to, whole).await
    }

    /// Loads what is behind the first part. Returns false if the object is not of the version `etag` any more.
    async fn load_rest(
        self: &Arc<Self>,
        key: &str,
        etag: &str,
        object: &ObjectSpec,
        to: &Buffer,
        from: u64,
    ) -> Result<bool, L2Error> {
        let mut tasks = JoinSet::new();
        let mut at = from;
        while at < object.len {
            let span = Span {
                at,
                len: self.multipart_bytes.min(object.len - at),
            };
            at += span.len;
            let mut call = Call::new("GET", key);
            call.headers.push(("range", range(span)));
            call.headers.push(("if-match", etag.to_owned()));
            let (shared, object, to) = (Arc::clone(self), object.clone(), to.clone());
            let etag = etag.to_owned();
            tasks.spawn(async move {
                let answer = shared.client.send(&call).await?;
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
                if answer.response.header("etag") != Some(&*etag) {
                    return Ok(false);
                }
                shared.check_length(&answer, &object, span)?;
                shared.receive(answer, &to, span).await?;
                Ok(true)
            });
        }
        let mut outcome = Ok(true);
        while let (Ok(true), Some(ended)) = (&outcome, tasks.join_next().await) {
            outcome = ended.unwrap_or_else(|error| {
                let what = format!("load: {error}");
                Err(self.client.error(ErrorKind::Unavailable, &what))
            });
        }
        // None of them writes to the buffer after this.
        tasks.shutdown().await;
        outcome
    }

    /// Checks the lengths that a response announces, before a byte of it is written.
    fn check_length(
        &self,
        answer: &Answer<'_>,
        object: &ObjectSpec,
        span: Span,
    ) -> Result<(), L2Error> {
        let response = &answer.response;
        let corrupt = |what: String| {
            count(&self.counters.corrupt);
            Err(self.client.error(ErrorKind::Corrupt, &what))
        };
        let is_encoded = response
            .header("content-encoding")
            .is_some_and(|encoding| !encoding.is_empty() && encoding != "identity");
        if is_encoded {
            return corrupt("load: the object has an encoding".to_owned());
        }
        if response.is_partial() {
            let expected = format!(
                "bytes {}-{}/{}",
                span.at,
                (span.at + span.len).saturating_sub(1),
                object.len
            );
            let found = response.header("content-range").unwrap_or_default();
            if found != expected {
                let found: String = found.chars().take(80).collect();
                return corrupt(format!("load: range {found:?} instead of {expected:?}"));
            }
        }
        match response.content_length() {
            Some(length) if length != span.len => {
                corrupt(format!("load: {length} bytes instead of {}", span.len))
            }
            // Without a length the end of the body shows it.
            _ => Ok(()),
        }
    }

    /// Returns the checksum that the bytes of a response have to have, `None` if nothing is known and that is allowed.
    fn expected_sum(
        &self,
        answer: &Answer<'_>,
        object: &ObjectSpec,
    ) -> Result<Option<u128>, L2Error> {
        let (counter, kind, what) = match metadata::of(&answer.response, object) {
            Metadata::Of(sum) => return Ok(Some(sum)),
            Metadata::None if !self.needs_layout() => return Ok(None),
            Metadata::None => (
                &self.counters.no_layout,
                ErrorKind::NotFound,
                "load: the object has no layout",
            ),
            Metadata::Other => (
                &self.counters.other_layout,
                ErrorKind::NotFound,
                "load: the object is of another layout",
            ),
            Metadata::Damaged => (
                &self.counters.corrupt,
                ErrorKind::Corrupt,
                "load: the metadata of the object is damaged",
            ),
        };
        count(counter);
        Err(self.client.error(kind, what))
    }

    /// Writes the body of a response to `span` of a buffer.
    async fn receive(&self, answer: Answer<'_>, to: &Buffer, span: Span) -> Result<(), L2Error> {
        let mut answer = answer;
        let mut written = 0;
        while let Some(bytes) = answer.response.frame().await? {
            let len = Bytes::len(&bytes) as u64;
            if len > span.len - written {
                count(&self.counters.corrupt);
                let what = format!("load: more than {} bytes", span.len);
                return Err(self.client.error(ErrorKind::Corrupt, &what));
            }
            to.write(span.at + written, &bytes)?;
            written += len;
        }
        if written < span.len {
            count(&self.counters.corrupt);
            let what = format!("load: {written} bytes instead of {}", span.len);
            return Err(self.client.error(ErrorKind::Corrupt, &what));
        }
        answer.response.end();
        Ok(())
    }

    fn verify(&self, to: &Buffer, sum: Option<u128>) -> Result<Loaded, L2Error> {
        let Some(sum) = sum else {
            count(&self.counters.unverified);
            return Ok(Loaded { verified: false });
        };
        if to.checksum()? != sum {
            count(&self.counters.corrupt);
            let what = "load: the object is not what was stored";
            return Err(self.client.error(ErrorKind::Corrupt, what));
        }
        Ok(Loaded { verified: true })
    }
}

fn range(span: Span) -> String {
    format!("bytes={}-{}", span.at, span.at + span.len - 1)
}
