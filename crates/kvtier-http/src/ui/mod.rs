//! The dashboard: its files, the hour of history that it shows, and one stream of events per viewer.
//!
//! [`Dashboard::run`] reads the counters every [`INTERVAL`], for [`History`]. While there are viewers it also reads the
//! state, once for all of them. A viewer that reads slowly skips ticks: only the latest one is kept.
//!
//! The mutex guards that history; no other lock is acquired inside.

mod assets;
mod events;
mod history;
mod sampler;
mod traffic;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::State as Extracted;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::{Extension, Router};
use kvtier_common::sync::Mutex;
use kvtier_observe::api::{DashboardHistory, DashboardTick, LogLine};
use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::MissedTickBehavior;

use super::access::Caller;
use super::{Api, ApiError, DetailBody, detail, run_blocking};
pub(crate) use assets::is_asset;
use events::Viewer;
use history::History;
use sampler::Sampler;

/// Time between two points of the history, and between two events.
pub(crate) const INTERVAL: Duration = Duration::from_secs(2);

/// Streams at once.
const VIEWERS: usize = 64;

/// The latest lines of the log, the latest first.
type Warnings = dyn Fn() -> Vec<LogLine> + Send + Sync;

/// What all viewers share.
pub struct Dashboard {
    warnings: Box<Warnings>,
    history: Mutex<History>,
    latest: watch::Sender<Latest>,
    places: Arc<Semaphore>,
    /// A new viewer waits for its first tick.
    woken: Notify,
}

/// What viewers wait for.
#[derive(Clone, Debug)]
enum Latest {
    Nothing,
    /// The bytes of an event.
    Tick(Bytes),
    /// The server stops.
    End,
}

impl Dashboard {
    /// With a source of the log's latest warnings.
    pub fn new(warnings: impl Fn() -> Vec<LogLine> + Send + Sync + 'static) -> Self {
        Self {
            warnings: Box::new(warnings),
            history: Mutex::default(),
            latest: watch::Sender::new(Latest::Nothing),
            places: Arc::new(Semaphore::new(VIEWERS)),
            woken: Notify::new(),
        }
    }

    /// Adds points to the history and publishes ticks, for as long as it is polled.
    pub(crate) async fn run(self: &Arc<Self>, api: &Arc<Api>) {
        let mut interval = tokio::time::interval(INTERVAL);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut sampler = Sampler::default();
        loop {
            let is_due = tokio::select! {
                biased;
                _ = interval.tick() => true,
                () = self.woken.notified() => false,
            };
            let (dashboard, api) = (Arc::clone(self), Arc::clone(api));
            // The counters of many tenants take milliseconds.
            let step = tokio::task::spawn_blocking(move || {
                dashboard.step(&api, &mut sampler, is_due);
                sampler
            });
            sampler = step.await.unwrap_or_else(|error| {
                tracing::error!(%error, "the dashboard's sampler failed; its rates begin again");
                Sampler::default()
            });
        }
    }

    fn step(&self, api: &Arc<Api>, sampler: &mut Sampler, is_due: bool) {
        let engine = api.engine.get();
        if let Some(engine) = engine.filter(|_| is_due) {
            let point = sampler.read(engine);
            self.history.lock().push(point);
        }
        if self.latest.receiver_count() == 0 {
            return;
        }
        let (sequence, point) = {
            let history = self.history.lock();
            (history.sequence(), history.latest())
        };
        let state = sampler::state(api);
        let tick = DashboardTick {
            sequence,
            point,
            traffic: sampler.traffic.clone(),
            warnings: (self.warnings)(),
            ..state
        };
        self.publish(event("tick", &tick));
    }

    fn publish(&self, tick: Bytes) {
        self.latest.send_if_modified(|latest| {
            let is_running = !matches!(latest, Latest::End);
            if is_running {
                *latest = Latest::Tick(tick);
            }
            is_running
        });
    }

    /// Ends the streams, and refuses further ones.
    pub(crate) fn end(&self) {
        self.latest.send_replace(Latest::End);
    }

    /// A stream for this caller.
    ///
    /// # Errors
    /// There are too many, or the server stops.
    fn view(self: &Arc<Self>, api: &Api, caller: &Caller) -> Result<Viewer, ApiError> {
        let refused = |text: String| detail(StatusCode::SERVICE_UNAVAILABLE, text);
        let place = Arc::clone(&self.places)
            .try_acquire_owned()
            .map_err(|_| refused(format!("{VIEWERS} dashboards are open; close one")))?;
        let ticks = self.latest.subscribe();
        if matches!(*ticks.borrow(), Latest::End) {
            return Err(refused("shutting down".into()));
        }
        let tokens = api.access.tokens();
        // A copy, so that the sampler does not wait for its text.
        let history = self.history.lock().clone();
        let history = DashboardHistory {
            caller: tokens.as_ref().map(|_| caller.name.clone()),
            role: caller.role.as_str().to_owned(),
            ..history.all()
        };
        Ok(Viewer {
            dashboard: Arc::clone(self),
            access: Arc::clone(&api.access),
            tokens,
            ticks,
            history: Some(event("history", &history)),
            _place: place,
        })
    }
}

impl Default for Dashboard {
    fn default() -> Self {
        Self::new(Vec::new)
    }
}

impl fmt::Debug for Dashboard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dashboard").finish_non_exhaustive()
    }
}

/// A server-sent event. JSON has no line ends.
fn event<T: serde::Serialize>(name: &str, data: &T) -> Bytes {
    // No event has keys that JSON lacks.
    let data = serde_json::to_string(data).unwrap_or_default();
    format!("event: {name}\ndata: {data}\n\n").into()
}

/// Events of the dashboard at `/ui`, for as long as the client reads them.
///
/// The first event is `history`, with the last hour; each `tick` after that is the state of a moment. A client that reads
/// slowly misses ticks.
#[utoipa::path(get, path = "/ui/events", responses(
    (status = 200, description = "Events, the first one at once", body = DashboardTick, content_type = "text/event-stream"),
    (status = 503, description = "Too many dashboards are open, or the server stops", body = DetailBody),
))]
pub(super) async fn events(
    Extracted(api): Extracted<Arc<Api>>,
    Extension(caller): Extension<Caller>,
) -> Result<Response, ApiError> {
    // The text of an hour takes milliseconds.
    let viewer = run_blocking(move || api.dashboard.view(&api, &caller)).await??;
    let head = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    Ok((head, viewer.into_body()).into_response())
}

/// The routes of the files.
pub(super) fn files() -> Router<Arc<Api>> {
    assets::routes()
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::pin::Pin;
    use std::sync::OnceLock;
    use std::task::{Context, Poll, Waker};

    use axum::body::Body;
    use hyper::body::Body as _;
    use kvtier_config::ServerConfig;

    use super::*;
    use crate::access::{Access, Role};
    use crate::health::Health;

    const TOKEN: &str = "read watcher 0123456789abcdef";

    fn api(tokens: Option<&str>) -> Arc<Api> {
        let mut config = ServerConfig::from_flags(&["--l1-size-gb", "0.01"]).unwrap();
        config.http.tokens = tokens.map(OsString::from);
        Arc::new(Api {
            engine: OnceLock::new(),
            reload: OnceLock::new(),
            health: Arc::new(Health::default()),
            access: Arc::new(Access::open(&config.http).unwrap()),
            bodies: Arc::default(),
            dashboard: Arc::default(),
        })
    }

    fn caller() -> Caller {
        Caller {
            name: "watcher".into(),
            role: Role::Read,
            peer: "-".into(),
        }
    }

    fn open(api: &Arc<Api>) -> Body {
        api.dashboard.view(api, &caller()).unwrap().into_body()
    }

    /// The next event, if there is one; none at the end.
    fn poll(body: &mut Body) -> Poll<Option<String>> {
        let mut context = Context::from_waker(Waker::noop());
        Pin::new(body).poll_frame(&mut context).map(|frame| {
            let bytes = frame?.unwrap().into_data().unwrap();
            Some(String::from_utf8(bytes.to_vec()).unwrap())
        })
    }

    fn text(number: u32) -> String {
        format!("event: tick\ndata: {number}\n\n")
    }

    // proves: docs/operate.md#dashboard
    #[test]
    fn slow_viewer_misses_ticks_and_reads_the_latest() {
        let api = api(None);
        let mut body = open(&api);
        let Poll::Ready(Some(first)) = poll(&mut body) else {
            panic!("the first event is there at once");
        };
        assert!(
            first.starts_with("event: history\ndata: {\"caller\":null,\"role\":\"read\","),
            "{first}"
        );
        assert_eq!(poll(&mut body), Poll::Pending);
        for number in 1..=1000 {
            api.dashboard.publish(event("tick", &number));
        }
        assert_eq!(poll(&mut body), Poll::Ready(Some(text(1000))));
        assert_eq!(poll(&mut body), Poll::Pending);
        api.dashboard.publish(event("tick", &7));
        assert_eq!(poll(&mut body), Poll::Ready(Some(text(7))));
    }

    // proves: docs/operate.md#dashboard
    #[test]
    fn stop_ends_streams_and_refuses_others() {
        let api = api(None);
        let mut bodies = [open(&api), open(&api)];
        assert!(poll(&mut bodies[0]).is_ready());
        api.dashboard.end();
        // One that was about to be published does not undo it.
        api.dashboard.publish(event("tick", &1));
        assert_eq!(poll(&mut bodies[0]), Poll::Ready(None));
        assert!(matches!(poll(&mut bodies[1]), Poll::Ready(Some(_))));
        assert_eq!(poll(&mut bodies[1]), Poll::Ready(None));
        let refused = api.dashboard.view(&api, &caller()).err().unwrap();
        assert!(
            matches!(&refused, ApiError::Detail(status, text)
                if *status == StatusCode::SERVICE_UNAVAILABLE && text == "shutting down"),
            "{refused:?}"
        );
    }

    // proves: docs/operate.md#dashboard
    #[test]
    fn viewers_are_bounded_and_a_closed_one_makes_place() {
        let api = api(None);
        let mut bodies: Vec<_> = (0..VIEWERS).map(|_| open(&api)).collect();
        let refused = api.dashboard.view(&api, &caller()).err().unwrap();
        assert!(
            matches!(&refused, ApiError::Detail(status, text)
                if *status == StatusCode::SERVICE_UNAVAILABLE && text.starts_with("64 dashboards")),
            "{refused:?}"
        );
        bodies.pop();
        let mut body = open(&api);
        assert!(poll(&mut body).is_ready());
        assert_eq!(api.dashboard.latest.receiver_count(), VIEWERS);
    }

    // proves: docs/operate.md#dashboard
    #[tokio::test]
    async fn history_is_written_on_another_thread() {
        let api = api(None);
        let held = api.dashboard.history.lock();
        let opened = events(Extracted(Arc::clone(&api)), Extension(caller()));
        let mut opened = std::pin::pin!(opened);
        // It waits, and the thread that serves every request does not.
        let mut context = Context::from_waker(Waker::noop());
        assert!(opened.as_mut().poll(&mut context).is_pending());
        drop(held);
        assert_eq!(opened.await.unwrap().status(), StatusCode::OK);
    }

    // proves: docs/operate.md#dashboard
    #[test]
    fn other_tokens_end_a_stream() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("tokens");
        std::fs::write(&file, TOKEN).unwrap();
        let mut config = ServerConfig::from_flags(&["--l1-size-gb", "0.01"]).unwrap();
        config.http.token_file = Some(file.clone());
        let mut api = api(Some(TOKEN));
        Arc::get_mut(&mut api).unwrap().access = Arc::new(Access::open(&config.http).unwrap());
        let mut body = open(&api);
        let Poll::Ready(Some(first)) = poll(&mut body) else {
            panic!("the first event is there at once");
        };
        assert!(first.contains("\"caller\":\"watcher\""), "{first}");
        api.dashboard.publish(event("tick", &1));
        assert_eq!(poll(&mut body), Poll::Ready(Some(text(1))));
        std::fs::write(&file, "admin other 0123456789abcdeX\n").unwrap();
        api.access.reload().unwrap();
        api.dashboard.publish(event("tick", &2));
        assert_eq!(poll(&mut body), Poll::Ready(None));
    }

    #[test]
    fn without_viewers_nothing_is_published() {
        let api = api(None);
        let mut sampler = Sampler::default();
        api.dashboard.step(&api, &mut sampler, true);
        assert!(matches!(*api.dashboard.latest.borrow(), Latest::Nothing));
        let mut body = open(&api);
        assert!(poll(&mut body).is_ready());
        api.dashboard.step(&api, &mut sampler, false);
        let Poll::Ready(Some(tick)) = poll(&mut body) else {
            panic!("no tick");
        };
        assert!(
            tick.contains("\"reason\":\"engine not initialized\"")
                && tick.contains("\"status\":null")
        );
    }

    // proves: docs/operate.md#dashboard
    #[tokio::test]
    async fn serving_ends_although_a_dashboard_is_open() {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let serving = crate::serve(listener, api(None), async { drop(stopped.await) });
        let serving = tokio::spawn(serving);
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        stream
            .write_all(b"GET /ui/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
            .await
            .unwrap();
        let (mut text, mut part) = (String::new(), [0; 1024]);
        while !text.contains("event: tick") {
            let length = stream.read(&mut part).await.unwrap();
            text += std::str::from_utf8(&part[..length]).unwrap();
        }
        stop.send(()).unwrap();
        // Requests in flight are finished, and this is one.
        serving.await.unwrap();
        stream.read_to_string(&mut text).await.unwrap();
        assert!(text.ends_with("0\r\n\r\n"), "{text}");
    }
}
