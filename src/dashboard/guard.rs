//! Who is let in, and what a browser may do with what it is sent.

use std::sync::Arc;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderName, HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

use super::App;
use super::error::Refusal;
use crate::http::{is_cross_site, is_misled};

/// What the page may load and do: its own scripts and styles, questions to its own server, and nothing
/// written in the document. Where a browser knows trusted types, text cannot become markup at all.
const CONTENT_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
    img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; \
    frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

/// Headers of every response.
const HEADERS: [(HeaderName, &str); 7] = [
    (header::CONTENT_SECURITY_POLICY, CONTENT_POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
    (
        HeaderName::from_static("cross-origin-opener-policy"),
        "same-origin",
    ),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        "same-origin",
    ),
    (
        HeaderName::from_static("permissions-policy"),
        "camera=(), microphone=(), geolocation=()",
    ),
];

/// Lets in who has the key, and only so often.
pub(super) async fn authorize(
    State(app): State<Arc<App>>,
    request: Request,
    next: Next,
) -> Response {
    let api_key = app.config.api_key.as_ref();
    let shown = api_key.and_then(|key| key.shown(request.headers()));
    if let Some(limit) = &app.rate_limit
        && let Err(wait) = limit.admit(shown, &request)
    {
        return Refusal::TooOften { wait }.into_response();
    }
    if api_key.is_some() && shown.is_none() {
        return Refusal::Unauthorized.into_response();
    }
    next.run(request).await
}

/// Refuses pages of other sites, and names that were made to lead here, where no key keeps them out.
pub(super) async fn own_names(
    State(app): State<Arc<App>>,
    request: Request,
    next: Next,
) -> Response {
    let is_open = app.config.api_key.is_none();
    if is_open && (is_cross_site(request.headers()) || is_misled(&request)) {
        return Refusal::CrossSite.into_response();
    }
    next.run(request).await
}

/// Says what a browser may do with the response.
pub(super) async fn secure(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    for (name, value) in HEADERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
    // What was logged is of nobody's cache; the page is asked for again when the binary is another.
    headers
        .entry(header::CACHE_CONTROL)
        .or_insert(HeaderValue::from_static("no-store"));
    response
}

pub(super) async fn count(
    State(app): State<Arc<App>>,
    path: Option<MatchedPath>,
    request: Request,
    next: Next,
) -> Response {
    app.responses.counted(path, request, next).await
}
