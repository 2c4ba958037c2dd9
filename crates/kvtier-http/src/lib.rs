//! The HTTP API: health, status, metrics and administration, with its access rules.
//!
//! Paths and answers are those of LMCache 0.5.6's HTTP server where it has the route; error texts are kvtier's own. What it
//! lacks is added beside them. The socket opens before the engine does, so that a probe is answered from the start.
//!
//! This crate must never know the request port, nor how an operation works: it asks the engine.
#![forbid(unsafe_code)]

mod access;
mod audit;
mod body;
mod cache;
mod config;
mod explain;
mod gate;
mod health;
mod info;
mod listen;
mod objects;
mod origin;
mod payload;
mod prefetches;
mod query;
mod quota;
mod quota_body;
mod sessions;
mod tenants;
mod ui;
mod waiting;

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde::Serialize;
use tower_http::timeout::TimeoutLayer;
use utoipa::{OpenApi, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use kvtier_common::error::{Error, ErrorKind, Result};
use kvtier_engine::Engine;
use kvtier_observe::api::Reloaded;

pub use access::Access;
pub use health::Health;
pub use payload::Bodies;
pub use ui::Dashboard;

/// Largest request body, bytes, where a route has no other limit. The largest real one is a list of block ids.
const BODY_LIMIT: usize = 8 << 20;

/// Longest time one request may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Reads again what may change while the server runs.
pub type Reload = Arc<dyn Fn() -> Result<Reloaded> + Send + Sync>;

/// What the routes read.
///
/// ```
/// # use std::sync::{Arc, OnceLock};
/// use kvtier_http::{Access, Api, Bodies, Dashboard, Health};
///
/// let config = kvtier_config::ServerConfig::from_flags(&[])?;
/// let api = Api {
///     engine: OnceLock::new(),
///     reload: OnceLock::new(),
///     health: Arc::new(Health::default()),
///     access: Arc::new(Access::open(&config.http)?),
///     bodies: Arc::new(Bodies::default()),
///     dashboard: Arc::new(Dashboard::new(Vec::new)),
/// };
/// assert_eq!(api.health.reason().as_deref(), Some("engine not initialized"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Api {
    /// The engine, once it is there.
    pub engine: OnceLock<Arc<Engine>>,
    /// Reload, from then on too.
    pub reload: OnceLock<Reload>,
    /// Readiness and poisoned components.
    pub health: Arc<Health>,
    /// Access of clients.
    pub access: Arc<Access>,
    /// What request bodies may hold.
    pub bodies: Arc<Bodies>,
    /// What viewers of the dashboard share.
    pub dashboard: Arc<Dashboard>,
}

type ApiState = axum::extract::State<Arc<Api>>;

/// An error in one of the shapes the API knows.
#[derive(Debug)]
enum ApiError {
    /// `{"detail": "<text>"}`, as `/cache/*` answers.
    Detail(StatusCode, String),
    /// `{"error": "<text>"}`, as `/status` answers.
    Error(StatusCode, String),
}

/// An error in the shape of most routes.
fn detail(status: StatusCode, text: impl Into<String>) -> ApiError {
    ApiError::Detail(status, text.into())
}

/// An error in the shape of `/status` and `/quota`.
fn error(status: StatusCode, text: impl Into<String>) -> ApiError {
    ApiError::Error(status, text.into())
}

/// Status of a failure of this kind: the request's, of something that is in its way, or the server's.
fn status_of(kind: ErrorKind) -> StatusCode {
    match kind {
        ErrorKind::Invalid => StatusCode::BAD_REQUEST,
        ErrorKind::InUse => StatusCode::CONFLICT,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// What is missing until the engine is there.
const NO_ENGINE: &str = "engine not initialized";

/// The engine, once it is there.
fn engine(api: &ApiState) -> Result<&Arc<Engine>, ApiError> {
    let none = || detail(StatusCode::SERVICE_UNAVAILABLE, NO_ENGINE);
    api.engine.get().ok_or_else(none)
}

/// Runs `work` on a thread of its own, so that a health probe does not wait for it. It runs to its end, also after the client has
/// disconnected.
async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    ended(tokio::task::spawn_blocking(work)).await
}

/// Runs `work`, which changes something, in a task of its own: to its end, as [`run_blocking`] does.
async fn run_change<T: Send + 'static>(
    work: impl Future<Output = T> + Send + 'static,
) -> Result<T, ApiError> {
    ended(tokio::spawn(work)).await
}

/// Waits for the work of a request.
async fn ended<T>(task: tokio::task::JoinHandle<T>) -> Result<T, ApiError> {
    let failed = |_| {
        detail(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the request's task failed",
        )
    };
    task.await.map_err(failed)
}

/// An error of most routes.
#[derive(Serialize, ToSchema)]
struct DetailBody {
    /// The error.
    detail: String,
}

/// An error of `/status` and `/quota`.
#[derive(Serialize, ToSchema)]
struct ErrorBody {
    /// The error.
    error: String,
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        match self {
            Self::Detail(status, detail) => {
                (status, JsonAnswer(DetailBody { detail })).into_response()
            }
            Self::Error(status, error) => (status, JsonAnswer(ErrorBody { error })).into_response(),
        }
    }
}

/// A JSON answer. The fields of its objects are sorted by name.
struct JsonAnswer<T>(T);

impl<T: Serialize> IntoResponse for JsonAnswer<T> {
    fn into_response(self) -> Response {
        // No answer has keys that JSON lacks.
        axum::Json(serde_json::to_value(self.0).unwrap_or_default()).into_response()
    }
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "kvtier HTTP API",
        description = "Health, status, metrics and administration of a kvtier server."
    ),
    components(schemas(kvtier_observe::api::DashboardHistory))
)]
struct Description;

fn api() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(info::root))
        .routes(routes!(info::healthcheck))
        .routes(routes!(info::status))
        .routes(routes!(config::config))
        .routes(routes!(config::reload))
        .routes(routes!(info::version))
        .routes(routes!(info::release))
        .routes(routes!(info::metrics))
        .routes(routes!(cache::clear))
        .routes(routes!(cache::checksums))
        .routes(routes!(explain::explain))
        .routes(routes!(explain::match_prefix))
        .routes(routes!(objects::adapters))
        .routes(routes!(objects::list, objects::delete))
        .routes(routes!(prefetches::result))
        .routes(routes!(prefetches::submit))
        .routes(routes!(sessions::act))
        .routes(routes!(tenants::tenants))
        .routes(routes!(ui::events))
        .merge(quota::quota_routes())
}

/// The OpenAPI description of the routes, as served at `/openapi.json`.
pub fn openapi() -> utoipa::openapi::OpenApi {
    api().into_openapi()
}

/// Ends requests that take too long, their bodies included.
fn deadline() -> TimeoutLayer {
    TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, REQUEST_TIMEOUT)
}

fn router(api_state: Arc<Api>) -> Router {
    let (router, description) = api().split_for_parts();
    let router = router
        .route("/openapi.json", get(async move || axum::Json(description)))
        .merge(ui::files())
        .fallback(async || detail(StatusCode::NOT_FOUND, "Not Found"))
        .method_not_allowed_fallback(async || {
            detail(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed")
        })
        .layer(deadline());
    gated(router, api_state)
}

/// With the gate around all of it.
fn gated(router: Router<Arc<Api>>, api: Arc<Api>) -> Router {
    let gate = gate::Gate::new(Arc::clone(&api.access));
    router
        .layer(from_fn_with_state(gate, gate::gate))
        .with_state(api)
}

/// Serves the API on `listener` until `stop` resolves.
pub async fn serve(
    listener: tokio::net::TcpListener,
    api: Arc<Api>,
    stop: impl Future<Output = ()> + Send + 'static,
) {
    let (access, dashboard) = (Arc::clone(&api.access), Arc::clone(&api.dashboard));
    let stop = async {
        stop.await;
        // Its streams would not end by themselves.
        dashboard.end();
    };
    let router = router(Arc::clone(&api));
    tokio::select! {
        () = listen::serve(listener, access, router, listen::CONNECTIONS, stop) => {}
        () = api.dashboard.run(&api) => {}
    }
}

/// Serves only `/metrics`, for `--prometheus-port`.
pub async fn serve_metrics(
    listener: tokio::net::TcpListener,
    api: Arc<Api>,
    stop: impl Future<Output = ()> + Send + 'static,
) {
    let access = Arc::clone(&api.access);
    let router = Router::new().route("/metrics", get(info::metrics));
    let router = gated(router, api);
    listen::serve(listener, access, router, listen::CONNECTIONS, stop).await;
}

/// Returns the error of a port of HTTP.
pub fn cannot_bind(host: &str, flag: &str, port: u16, error: std::io::Error) -> Error {
    Error::io(
        format!("--http-host, --{flag}: {host}:{port} cannot be bound"),
        error,
    )
}

/// Binds the host and `port`, or takes the listener `bound`, which is bound to them.
///
/// # Errors
/// One line that names the flags: the system's error, or that other hosts could reach it without a token.
pub async fn bind(
    access: &Access,
    flag: &str,
    port: u16,
    bound: Option<std::net::TcpListener>,
) -> Result<(tokio::net::TcpListener, SocketAddr)> {
    let host = access.host();
    let failed = |error| cannot_bind(host, flag, port, error);
    let listener = match bound {
        Some(bound) => tokio::net::TcpListener::from_std(bound),
        None => tokio::net::TcpListener::bind((host, port)).await,
    };
    let listener = listener.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    access.check_bound(address)?;
    Ok((listener, address))
}
