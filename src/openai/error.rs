//! Errors in the shape of the OpenAI API.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::causes::with_causes;
use crate::chat::ChatError;
use crate::engine::{BusyError, EngineError};
use crate::http::{BodyError, retry_after};

/// What a client is told went wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ApiError {
    /// The request asks for something that cannot be.
    #[error("{message}")]
    Invalid {
        /// What is wrong.
        message: String,
        /// The field at fault.
        param: Option<&'static str>,
        /// A short name for programs.
        code: Option<&'static str>,
    },
    /// The key is missing or wrong.
    #[error("missing or wrong API key; send it as `Authorization: Bearer KEY`")]
    Unauthorized,
    /// A page of another site asks, through somebody's browser.
    #[error(
        "pages of other sites are not answered by a server without a key; start it with `--api-key-env`"
    )]
    CrossSite,
    /// No such model.
    #[error("the model `{model}` does not exist; this server has `{known}`")]
    UnknownModel {
        /// What was asked for.
        model: String,
        /// What there is.
        known: String,
    },
    /// No such page.
    #[error("there is no `{path}` here")]
    NotFound {
        /// What was asked for.
        path: String,
    },
    /// The page is there, but not for this method.
    #[error("method not allowed")]
    MethodNotAllowed,
    /// The body is larger than any that is read.
    #[error("the request body is larger than {limit} bytes")]
    TooLarge {
        /// The largest body that is read.
        limit: usize,
    },
    /// The body did not come in time.
    #[error("the request body did not come in time")]
    TooSlow,
    /// Bodies of others take all the room that there is.
    #[error("too much is being read; try again later")]
    NoRoom,
    /// This client asks too often.
    #[error("this client asks too often; come back when `Retry-After` says")]
    TooOften {
        /// How long it should wait.
        wait: Duration,
    },
    /// Too much is under way.
    #[error("{0}; try again later")]
    Busy(BusyError),
    /// The server is at fault.
    #[error("{message}")]
    Internal {
        /// What happened.
        message: String,
    },
}

impl ApiError {
    /// Returns the error of a field whose value cannot be.
    pub(crate) fn invalid(param: &'static str, message: impl Into<String>) -> Self {
        Self::Invalid {
            message: message.into(),
            param: Some(param),
            code: None,
        }
    }

    /// Returns the error of a fault of ours.
    pub(crate) fn internal(error: &dyn std::error::Error) -> Self {
        let message = with_causes(error);
        tracing::error!(%message, "a request failed");
        Self::Internal { message }
    }

    /// Returns the status of the response.
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::Invalid { .. } => StatusCode::BAD_REQUEST,
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::CrossSite => StatusCode::FORBIDDEN,
            Self::TooSlow => StatusCode::REQUEST_TIMEOUT,
            Self::UnknownModel { .. } | Self::NotFound { .. } => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            Self::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::TooOften { .. } | Self::Busy(BusyError::Full { .. }) => {
                StatusCode::TOO_MANY_REQUESTS
            }
            Self::NoRoom | Self::Busy(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::Internal { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// Returns the body: `{"error": {"message", "type", "param", "code"}}`.
    pub(crate) fn body(&self) -> Value {
        let (kind, code, param) = match self {
            Self::Invalid { param, code, .. } => ("invalid_request_error", *code, *param),
            Self::Unauthorized => ("authentication_error", Some("invalid_api_key"), None),
            Self::UnknownModel { .. } => (
                "invalid_request_error",
                Some("model_not_found"),
                Some("model"),
            ),
            Self::NotFound { .. } | Self::MethodNotAllowed | Self::CrossSite | Self::TooSlow => {
                ("invalid_request_error", None, None)
            }
            Self::TooLarge { .. } => ("invalid_request_error", Some("request_too_large"), None),
            Self::TooOften { .. } | Self::Busy(BusyError::Full { .. }) => {
                ("rate_limit_error", Some("rate_limit_exceeded"), None)
            }
            Self::NoRoom | Self::Busy(_) | Self::Internal { .. } => ("server_error", None, None),
        };
        json!({"error": {
            "message": self.to_string(), "type": kind, "param": param, "code": code,
        }})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status(), Json(self.body())).into_response();
        let headers = response.headers_mut();
        match self {
            Self::NoRoom | Self::Busy(_) => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            }
            Self::TooOften { wait } => {
                headers.insert(header::RETRY_AFTER, retry_after(wait));
            }
            Self::Unauthorized => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            _ => {}
        }
        response
    }
}

impl From<BodyError> for ApiError {
    fn from(error: BodyError) -> Self {
        match error {
            BodyError::TooLarge { limit } => Self::TooLarge { limit },
            BodyError::TooSlow => Self::TooSlow,
            BodyError::Busy => Self::NoRoom,
            BodyError::TooManyValues | BodyError::Broken => Self::Invalid {
                message: error.to_string(),
                param: None,
                code: None,
            },
        }
    }
}

impl From<BusyError> for ApiError {
    fn from(error: BusyError) -> Self {
        Self::Busy(error)
    }
}

/// What a client can ask for has been checked before the engine is asked; see `Keys::refuse`.
impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        Self::internal(&error)
    }
}

impl From<ChatError> for ApiError {
    fn from(error: ChatError) -> Self {
        match error {
            ChatError::Refused { .. } | ChatError::Render { .. } | ChatError::OutOfFuel { .. } => {
                Self::invalid("messages", error.to_string())
            }
            error => Self::internal(&error),
        }
    }
}
