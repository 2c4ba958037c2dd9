//! The files of the dashboard, which are in the binary. They hold nothing of the server, so they need no token: the page asks
//! for one and sends it with its requests.

use std::sync::{Arc, LazyLock};

use axum::Router;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Redirect, Response};
use axum::routing::get;

use crate::Api;

/// A file.
struct Asset {
    path: &'static str,
    kind: &'static str,
    bytes: &'static [u8],
}

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const IMAGE: &str = "image/svg+xml";

macro_rules! assets {
    ($($path:literal $file:literal $kind:ident)*) => {
        [$(Asset {
            path: $path,
            kind: $kind,
            bytes: include_bytes!(concat!("../../assets/ui/", $file)),
        }),*]
    };
}

static ASSETS: [Asset; 11] = assets! {
    "/ui" "index.html" HTML
    "/ui/style.css" "style.css" CSS
    "/ui/icon.svg" "icon.svg" IMAGE
    "/ui/app.js" "app.js" SCRIPT
    "/ui/chart.js" "chart.js" SCRIPT
    "/ui/dom.js" "dom.js" SCRIPT
    "/ui/explain.js" "explain.js" SCRIPT
    "/ui/format.js" "format.js" SCRIPT
    "/ui/panels.js" "panels.js" SCRIPT
    "/ui/server.js" "server.js" SCRIPT
    "/ui/tenants.js" "tenants.js" SCRIPT
};

/// Scripts, styles, pictures and requests of this server alone; nothing inline, no frames.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const HEADERS: [(HeaderName, &str); 5] = [
    (header::CONTENT_SECURITY_POLICY, POLICY),
    (header::REFERRER_POLICY, "no-referrer"),
    // Asked for each time, and sent only if it has changed.
    (header::CACHE_CONTROL, "no-cache"),
    (
        HeaderName::from_static("cross-origin-opener-policy"),
        "same-origin",
    ),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        "same-origin",
    ),
];

/// Each file's tag.
static TAGS: LazyLock<Vec<HeaderValue>> = LazyLock::new(|| {
    let tag = |asset: &Asset| {
        let hash = blake3::hash(asset.bytes).to_hex();
        HeaderValue::from_str(&format!("\"{}\"", &hash[..16]))
            .unwrap_or(HeaderValue::from_static("\"\""))
    };
    ASSETS.iter().map(tag).collect()
});

/// Whether a path is one of the files, or leads to one.
pub(crate) fn is_asset(path: &str) -> bool {
    path == "/ui/" || ASSETS.iter().any(|asset| asset.path == path)
}

pub(super) fn routes() -> Router<Arc<Api>> {
    let router = Router::new().route("/ui/", get(async || Redirect::temporary("../ui")));
    (0..ASSETS.len()).fold(router, |router, at| {
        router.route(
            ASSETS[at].path,
            get(async move |headers: HeaderMap| answer(at, &headers)),
        )
    })
}

fn answer(at: usize, headers: &HeaderMap) -> Response {
    let (asset, tag) = (&ASSETS[at], &TAGS[at]);
    let known = headers.get_all(header::IF_NONE_MATCH).iter();
    let mut known = known.flat_map(|tags| tags.as_bytes().split(|byte| *byte == b','));
    let is_known = known.any(|known| {
        let known = known.trim_ascii();
        known.strip_prefix(b"W/").unwrap_or(known) == tag.as_bytes()
    });
    let mut answer = if is_known {
        StatusCode::NOT_MODIFIED.into_response()
    } else {
        ([(header::CONTENT_TYPE, asset.kind)], asset.bytes).into_response()
    };
    let all = answer.headers_mut();
    for (name, value) in HEADERS {
        all.insert(name, HeaderValue::from_static(value));
    }
    all.insert(header::ETAG, tag.clone());
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    // proves: docs/operate.md#dashboard
    #[test]
    fn files_are_small_and_ask_no_other_server() {
        let bytes: usize = ASSETS.iter().map(|asset| asset.bytes.len()).sum();
        assert!(bytes < 300 << 10, "{bytes} bytes");
        for asset in &ASSETS {
            let text = std::str::from_utf8(asset.bytes).unwrap();
            let text = text.replace("http://www.w3.org/2000/svg", "");
            for part in [
                "http:",
                "https:",
                "innerHTML",
                "insertAdjacentHTML",
                "eval(",
                "style=",
            ] {
                assert!(!text.contains(part), "{} has {part}", asset.path);
            }
        }
        let page = std::str::from_utf8(ASSETS[0].bytes).unwrap();
        for tag in page.split("<script").skip(1) {
            let (attributes, rest) = tag.split_once('>').unwrap();
            assert!(attributes.contains("src=") && rest.starts_with("</script>"));
        }
    }

    // proves: docs/operate.md#dashboard
    #[test]
    fn a_file_is_sent_again_only_if_it_has_changed() {
        let first = answer(0, &HeaderMap::new());
        assert_eq!(first.status(), StatusCode::OK);
        let tag = first.headers()[header::ETAG].clone();
        for (given, status) in [
            (tag.to_str().unwrap().to_owned(), StatusCode::NOT_MODIFIED),
            (
                format!("\"other\", W/{}", tag.to_str().unwrap()),
                StatusCode::NOT_MODIFIED,
            ),
            ("\"other\"".into(), StatusCode::OK),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::IF_NONE_MATCH, given.parse().unwrap());
            let answer = answer(0, &headers);
            assert_eq!(answer.status(), status, "{given}");
            assert_eq!(answer.headers()[header::ETAG], tag);
            assert_eq!(answer.headers()[header::CONTENT_SECURITY_POLICY], POLICY);
        }
        assert_ne!(TAGS[0], TAGS[1]);
    }
}
