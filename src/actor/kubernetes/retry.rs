//! Which faults of an API server pass, and how long to wait for that.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use crate::actor::ActorError;

/// The first pause.
const FIRST: Duration = Duration::from_millis(100);
/// The longest pause.
const LONGEST: Duration = Duration::from_secs(5);
/// How long one try may take before it is given up: a server may accept a connection and say nothing.
const TRY: Duration = Duration::from_secs(15);

/// Pauses that grow.
#[derive(Debug)]
pub(super) struct Backoff {
    next: Duration,
}

impl Backoff {
    pub(super) fn new() -> Self {
        Self { next: FIRST }
    }

    /// Returns how long to wait, at least as long as the server asked for.
    pub(super) fn pause(&mut self, error: Option<&kube::Error>) -> Duration {
        let pause = self.next;
        self.next = (self.next * 2).min(LONGEST);
        let asked = match error {
            Some(kube::Error::Api(status)) => status
                .details
                .as_ref()
                .map_or(0, |details| details.retry_after_seconds),
            _ => 0,
        };
        pause.max(Duration::from_secs(asked.into()).min(2 * LONGEST))
    }
}

/// Whether the same request may succeed later.
pub(super) fn is_passing(error: &kube::Error) -> bool {
    match error {
        // A server-side apply with a wrong type is answered with 500, and stays wrong.
        kube::Error::Api(status) if status.code == 500 => !status
            .message
            .contains("failed to create typed patch object"),
        kube::Error::Api(status) => matches!(status.code, 408 | 410 | 429 | 502 | 503 | 504),
        kube::Error::HyperError(_) | kube::Error::Service(_) | kube::Error::ReadEvents(_) => true,
        _ => false,
    }
}

/// Whether the API server has answered that there is no such object.
pub(super) fn is_missing(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404)
}

/// Asks until there is an answer, for `limit` at most.
///
/// # Errors
///
/// Fails with what does not pass, and with what has not passed in time.
pub(super) async fn patiently<T, F>(
    activity: &str,
    limit: Duration,
    ask: impl FnMut() -> F,
) -> Result<T, ActorError>
where
    F: Future<Output = kube::Result<T>>,
{
    repeat(activity, limit, TRY.min(limit), ask).await
}

/// As [`patiently`], without giving a try up: what is asked bounds itself, and is asked again only if it
/// failed with what passes.
pub(super) async fn patiently_once<T, F>(
    activity: &str,
    limit: Duration,
    ask: impl FnMut() -> F,
) -> Result<T, ActorError>
where
    F: Future<Output = kube::Result<T>>,
{
    repeat(activity, limit, Duration::MAX, ask).await
}

async fn repeat<T, F>(
    activity: &str,
    limit: Duration,
    one_try: Duration,
    mut ask: impl FnMut() -> F,
) -> Result<T, ActorError>
where
    F: Future<Output = kube::Result<T>>,
{
    let until = Instant::now() + limit;
    let mut backoff = Backoff::new();
    loop {
        let error = match timeout(one_try, ask()).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) if !is_passing(&error) => return Err(failed(activity, &error)),
            Ok(Err(error)) => Some(error),
            Err(_) => None,
        };
        let pause = backoff.pause(error.as_ref());
        if Instant::now() + pause >= until {
            return Err(match error {
                Some(error) => failed(activity, &error),
                None => ActorError::Hung {
                    activity: activity.to_owned(),
                    limit,
                },
            });
        }
        sleep(pause).await;
    }
}

/// Returns what the API server said as a fault of the backend.
pub(super) fn failed(activity: &str, error: &kube::Error) -> ActorError {
    let message = match error {
        kube::Error::Api(status) => match status.reason.as_str() {
            "" => format!("{} ({})", status.message, status.code),
            reason => format!("{} ({}, {reason})", status.message, status.code),
        },
        other => causes(other),
    };
    ActorError::Backend {
        activity: activity.to_owned(),
        message,
    }
}

/// Returns an error with what is below it, where it does not say that itself.
pub(super) fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let said = cause.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn api(code: u16, message: &str, retry_after: u32) -> kube::Error {
        let status = serde_json::json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
            "code": code, "details": { "retryAfterSeconds": retry_after },
        });
        kube::Error::Api(serde_json::from_value(status).unwrap())
    }

    #[test]
    fn faults_that_pass_are_told_from_those_that_stay() {
        for code in [408, 410, 429, 500, 502, 503, 504] {
            assert!(is_passing(&api(code, "", 0)), "{code}");
        }
        for code in [400, 401, 403, 404, 409, 422] {
            assert!(!is_passing(&api(code, "", 0)), "{code}");
        }
        let typed = "failed to create typed patch object (default/s1; v1alpha1): .spec.replicas: expected \
                     numeric (int or float), got string";
        assert!(!is_passing(&api(500, typed, 0)));
    }

    #[test]
    fn pauses_grow_to_a_bound_and_are_as_long_as_the_server_asks() {
        let mut backoff = Backoff::new();
        let pauses: Vec<_> = (0..20).map(|_| backoff.pause(None)).collect();
        assert_eq!(pauses[0], FIRST);
        assert!(pauses.windows(2).all(|pair| pair[0] <= pair[1]));
        assert_eq!(pauses[19], LONGEST);
        let mut backoff = Backoff::new();
        assert_eq!(
            backoff.pause(Some(&api(429, "", 1))),
            Duration::from_secs(1)
        );
        let most = backoff.pause(Some(&api(429, "", 1_000_000)));
        assert_eq!(most, 2 * LONGEST, "nobody is waited for that long");
    }
}
