//! Signed requests to one bucket: signatures, the limit of requests in flight, and the health of the backend.
//!
//! A request is sent once. Beside [`Http`]'s attempt on a new connection there are two others, once each: with the region that
//! the backend names, and with the backend's time if the clocks differ.
//!
//! `region` guards the region that requests are signed for, `health` what the last answers of the bucket were; no other lock is
//! acquired inside.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use kvtier_common::sync::Mutex;

use super::content::Content;
use super::credentials::{Provider, Variables};
use super::errors;
use super::http::{Http, Outbound, Response, Server};
use super::limit::{Limit, Permit, S3Class};
use super::options::{BucketPlace, S3Options};
use super::{name, sign, time};
use kvtier_l2::{ErrorKind, L2Error, backoff::REFUSED_PAUSE};

/// How long the last answer of a healthy backend counts before it is probed.
const PROBED_AFTER: Duration = Duration::from_secs(10);

/// Difference of clocks from which the backend's is used; S3 takes 15 minutes.
const SKEW: i64 = 4 * 60;

/// Longest body of an error.
const MAX_ERROR: usize = 64 << 10;

/// Client of one bucket.
pub(super) struct Client {
    http: Http,
    pub(super) place: BucketPlace,
    region: Mutex<String>,
    provider: Provider,
    pub(super) limit: Limit,
    /// Seconds by which the backend's clock is ahead.
    clock_offset: AtomicI64,
    health: Mutex<Health>,
}

/// What the last answers were.
struct Health {
    /// Why the last request failed.
    error: Option<L2Error>,
    /// When something may be sent again.
    refused_until: Option<Instant>,
    answered_at: Option<Instant>,
    /// Whether the log has it as healthy.
    is_logged_healthy: bool,
}

/// A request before it is signed.
#[derive(Clone, Default)]
pub(super) struct Call {
    pub(super) method: &'static str,
    /// Key in the bucket; `None` is the bucket itself.
    pub(super) key: Option<String>,
    /// Names and quoted values.
    pub(super) query: Vec<(&'static str, String)>,
    pub(super) headers: Vec<(&'static str, String)>,
    pub(super) content: Content,
    pub(super) class: S3Class,
    /// Whether it must not be sent twice.
    pub(super) is_unique: bool,
}

impl Call {
    pub(super) fn new(method: &'static str, key: &str) -> Self {
        Self {
            method,
            key: Some(key.to_owned()),
            ..Self::default()
        }
    }

    pub(super) fn of_bucket(method: &'static str) -> Self {
        Self {
            method,
            class: S3Class::Keys,
            ..Self::default()
        }
    }
}

/// A response, and the permission for its request.
pub(super) struct S3Answer<'a> {
    pub(super) response: Response<'a>,
    client: &'a Client,
    permit: Permit<'a>,
    /// Whether it is about the bucket itself.
    is_of_bucket: bool,
}

/// Whether this is the name of a region, from a configuration or a server.
pub(super) fn is_region(text: &str) -> bool {
    (1..=64).contains(&text.len())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
}

impl Client {
    pub(super) fn new(options: &S3Options, variables: Variables) -> Self {
        let credentials = options.credentials.clone();
        let profile = options.profile.clone();
        Self {
            http: Http::new(
                options.place.server.clone(),
                options.connection_timeout,
                options.request_timeout,
            ),
            place: options.place.clone(),
            provider: Provider::new(credentials, profile, &options.region, variables),
            region: Mutex::new(options.region.clone()),
            limit: Limit::new(options.max_connections),
            clock_offset: AtomicI64::new(0),
            health: Mutex::new(Health {
                error: None,
                refused_until: None,
                answered_at: None,
                is_logged_healthy: true,
            }),
        }
    }

    /// Returns an error that names the bucket.
    pub(super) fn error(&self, kind: ErrorKind, what: &str) -> L2Error {
        let BucketPlace {
            server: Server { host, port, .. },
            bucket,
            ..
        } = &self.place;
        L2Error::new(kind, format!("s3 bucket {bucket} at {host}:{port}: {what}"))
    }

    /// Sends a request and returns its response, whatever its status.
    ///
    /// # Errors
    /// If there is no response, or nothing is sent because the backend has just refused a request.
    pub(super) async fn send(&self, call: &Call) -> Result<S3Answer<'_>, L2Error> {
        self.suspended()?;
        let permit = self.limit.acquire(call.class).await;
        // It may have been a long wait.
        self.suspended()?;
        let (mut may_move, mut may_shift) = (true, true);
        loop {
            let now = self.now();
            let region = self.region.lock().clone();
            let response = match self.signed(call, &region, now).await {
                Ok(request) => self.http.send(&request).await,
                Err(error) => Err(error),
            };
            let response = match response {
                Ok(response) => response,
                Err(error) => {
                    self.failed(&error);
                    return Err(error);
                }
            };
            match response.status() {
                // Not 301: another region's host answers so, whatever the signature is.
                307 | 400 if may_move && self.adopt_region(&response, &region) => may_move = false,
                403 if may_shift && self.adopt_clock(&response, now) => may_shift = false,
                429 | 500 | 502 | 503 | 504 => {
                    permit.overloaded();
                    return Ok(self.answer(call, response, permit));
                }
                status => {
                    permit.succeeded();
                    if !matches!(status, 300..=401 | 403 | 500..) {
                        self.answered();
                    }
                    return Ok(self.answer(call, response, permit));
                }
            }
        }
    }

    fn answer<'a>(
        &'a self,
        call: &Call,
        response: Response<'a>,
        permit: Permit<'a>,
    ) -> S3Answer<'a> {
        S3Answer {
            response,
            client: self,
            permit,
            is_of_bucket: call.key.is_none(),
        }
    }

    /// Seconds since the Unix epoch by the backend's clock.
    fn now(&self) -> u64 {
        time::now().saturating_add_signed(self.clock_offset.load(Ordering::Relaxed))
    }

    async fn signed(&self, call: &Call, region: &str, now: u64) -> Result<Outbound, L2Error> {
        let credentials = self.provider.get().await?;
        let key = call.key.as_deref().map_or_else(String::new, name::quoted);
        let path = format!("{}/{key}", self.place.base);
        let mut headers = call.headers.clone();
        headers.push(("host", self.place.authority.clone()));
        if matches!(call.method, "PUT" | "POST") {
            headers.push(("content-length", call.content.len().to_string()));
        }
        let parts = (call.method, path.as_str(), call.query.as_slice());
        sign::sign(parts, &mut headers, &credentials, region, now);
        let mut target = path;
        for (number, (name, value)) in call.query.iter().enumerate() {
            target.push(if number == 0 { '?' } else { '&' });
            target.push_str(name);
            target.push('=');
            target.push_str(value);
        }
        Ok(Outbound {
            method: call.method,
            target,
            headers,
            content: call.content.clone(),
            is_idempotent: !call.is_unique,
        })
    }

    /// Whether the response names another region than the request was signed for, which is used from now on.
    fn adopt_region(&self, response: &Response<'_>, signed: &str) -> bool {
        let named = response.header("x-amz-bucket-region");
        let Some(named) = named.filter(|named| is_region(named) && *named != signed) else {
            return false;
        };
        let mut region = self.region.lock();
        // Another answer may have said so already.
        if *region != named {
            tracing::warn!(bucket = %self.place.bucket, region = %named, "the bucket is in another region; set s3_region");
            named.clone_into(&mut region);
        }
        true
    }

    /// Whether the backend's clock differs from the one that signed, which is used from now on.
    fn adopt_clock(&self, response: &Response<'_>, signed_at: u64) -> bool {
        let Some(theirs) = response.header("date").and_then(time::parse_header) else {
            return false;
        };
        let differs = theirs.cast_signed().saturating_sub(signed_at.cast_signed());
        if differs.abs() < SKEW {
            return false;
        }
        let offset = theirs
            .cast_signed()
            .saturating_sub(time::now().cast_signed());
        self.clock_offset.store(offset, Ordering::Relaxed);
        tracing::warn!(bucket = %self.place.bucket, seconds = offset, "clocks differ; signing by the server's");
        true
    }

    fn suspended(&self) -> Result<(), L2Error> {
        let health = self.health.lock();
        match (&health.error, health.refused_until) {
            (Some(error), Some(until)) if until > Instant::now() => Err(error.clone()),
            _ => Ok(()),
        }
    }

    fn answered(&self) {
        let mut health = self.health.lock();
        health.error = None;
        health.refused_until = None;
        health.answered_at = Some(Instant::now());
    }

    fn failed(&self, error: &L2Error) {
        // L1's memory is not the backend's fault.
        if error.kind() == ErrorKind::Memory {
            return;
        }
        let mut health = self.health.lock();
        health.error = Some(error.clone());
        if error.kind() == ErrorKind::Refused {
            health.refused_until = Some(Instant::now() + REFUSED_PAUSE);
        }
    }

    /// Why the last request failed, `None` if it did not.
    pub(super) fn problem(&self) -> Option<L2Error> {
        self.health.lock().error.clone()
    }

    /// Idle connections.
    pub(super) fn idle(&self) -> usize {
        self.http.idle()
    }

    pub(super) fn close(&self) {
        self.http.close();
    }

    /// Asks for the bucket if the last request failed or is long ago, and logs a change of its health.
    pub(super) async fn check(&self) {
        self.http.prune();
        let is_due = {
            let health = self.health.lock();
            let recent = health
                .answered_at
                .is_some_and(|at| at.elapsed() < PROBED_AFTER);
            health.error.is_some() || !recent
        };
        if is_due && self.suspended().is_ok() {
            let answer = self.send(&Call::of_bucket("HEAD")).await;
            if let Ok(answer) = answer {
                match answer.response.status() {
                    404 => {
                        self.failed(&self.error(ErrorKind::Refused, "the bucket does not exist"))
                    }
                    200..300 => answer.response.end(),
                    _ => drop(answer.failure("HEAD of the bucket").await),
                }
            }
        }
        let change = {
            let mut health = self.health.lock();
            let is_healthy = health.error.is_none();
            let changed = health.is_logged_healthy != is_healthy;
            health.is_logged_healthy = is_healthy;
            changed.then(|| health.error.clone())
        };
        match change {
            None => {}
            Some(Some(error)) => {
                tracing::warn!(%error, "a bucket is unavailable; trying again in the background");
            }
            Some(None) => {
                tracing::info!(bucket = %self.place.bucket, "a bucket is available again")
            }
        }
    }
}

impl S3Answer<'_> {
    /// Reads the body and returns the error that the response is.
    pub(super) async fn failure(self, what: &str) -> L2Error {
        let Self {
            response,
            client,
            permit,
            is_of_bucket,
        } = self;
        let status = response.status();
        let body = response.whole(MAX_ERROR).await.unwrap_or_default();
        drop(permit);
        client.failure_of((status, &body), what, is_of_bucket)
    }

    /// Reads the body to its end.
    pub(super) async fn whole(self, limit: usize) -> Result<Vec<u8>, L2Error> {
        self.response.whole(limit).await
    }
}

impl Client {
    /// The error of a status and the body with it, which the health of the backend depends on.
    pub(super) fn failure_of(
        &self,
        (status, body): (u16, &[u8]),
        what: &str,
        is_of_bucket: bool,
    ) -> L2Error {
        let failure = errors::Failure::of(status, body);
        let error = self.error(failure.kind, &format!("{what}: {}", failure.text));
        if failure.is_denial && !is_of_bucket {
            // The next check asks for the bucket, and then everything stops if that is denied too.
            self.health.lock().answered_at = None;
            return error;
        }
        if failure.is_of_credentials {
            self.provider.forget();
        }
        if failure.is_of_backend {
            self.failed(&error);
        }
        error
    }
}
