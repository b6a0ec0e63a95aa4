//! Why a request is refused, as the client is told.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::http::retry_after;

/// A request that is not answered.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    /// The key is missing or wrong.
    #[error("missing or wrong key; send it as `Authorization: Bearer KEY`")]
    Unauthorized,
    /// A page of another site asks, or a browser was led here by a foreign name.
    #[error(
        "pages of other sites are not answered; open the dashboard by its address or as `localhost`"
    )]
    CrossSite,
    /// The client asks more often than it may.
    #[error("this client asks too often; come back when `Retry-After` says")]
    TooOften {
        /// When it may ask again.
        wait: Duration,
    },
    /// There is nothing of that name.
    #[error("there is no {what} here")]
    NotFound {
        /// What was asked for.
        what: String,
    },
    /// Only reading is possible.
    #[error("the dashboard only reads: ask with GET")]
    ReadOnly,
    /// A file of a run cannot be made sense of.
    #[error("`{file}`: {reason}")]
    Unreadable {
        /// The file, from the runs' folder on.
        file: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Something of ours failed.
    #[error("the dashboard failed: {reason}")]
    Internal {
        /// What.
        reason: String,
    },
}

impl Refusal {
    /// A folder or file that may be there or not.
    pub(super) fn of_file(error: &std::io::Error, file: &str) -> Self {
        match error.kind() {
            std::io::ErrorKind::NotFound => Self::NotFound {
                what: format!("`{file}`"),
            },
            _ => Self::Unreadable {
                file: file.to_owned(),
                reason: error.to_string(),
            },
        }
    }

    fn status(&self) -> StatusCode {
        match self {
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::CrossSite => StatusCode::FORBIDDEN,
            Self::TooOften { .. } => StatusCode::TOO_MANY_REQUESTS,
            Self::NotFound { .. } => StatusCode::NOT_FOUND,
            Self::ReadOnly => StatusCode::METHOD_NOT_ALLOWED,
            Self::Unreadable { .. } => StatusCode::UNPROCESSABLE_ENTITY,
            Self::Internal { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let body = json!({"error": {"message": self.to_string()}});
        let mut response = (self.status(), Json(body)).into_response();
        let headers = response.headers_mut();
        match self {
            Self::Unauthorized => {
                let scheme = HeaderValue::from_static("Bearer");
                headers.insert(header::WWW_AUTHENTICATE, scheme);
            }
            Self::TooOften { wait } => {
                headers.insert(header::RETRY_AFTER, retry_after(wait));
            }
            Self::ReadOnly => {
                headers.insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
            }
            _ => {}
        }
        response
    }
}
