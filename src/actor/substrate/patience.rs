//! Trying again what may do later.

use std::time::{Duration, Instant};

use super::api::{ApiError, ApiErrorKind};

/// Time between looks at something that changes by itself.
pub(super) const POLL: Duration = Duration::from_millis(200);
/// The longest pause between two tries.
const LONGEST: Duration = Duration::from_secs(2);

/// Tries until it does, or `until`; only what can be asked twice.
///
/// # Errors
///
/// Returns the last error.
pub(super) fn patiently<T>(
    until: Instant,
    mut attempt: impl FnMut() -> Result<T, ApiError>,
) -> Result<T, ApiError> {
    let mut pause = POLL / 2;
    loop {
        match attempt() {
            Err(error)
                if error.kind == ApiErrorKind::Unavailable && Instant::now() + pause < until =>
            {
                tracing::debug!(%error, "asking again");
            }
            done => return done,
        }
        // Those who wait for the same are not to come back together.
        std::thread::sleep(pause.mul_f64(0.5 + rand::random::<f64>()));
        pause = (pause * 2).min(LONGEST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(kind: ApiErrorKind) -> ApiError {
        ApiError {
            call: "call",
            kind,
            message: String::new(),
        }
    }

    #[test]
    fn only_what_may_pass_is_tried_again() {
        let until = Instant::now() + Duration::from_secs(60);
        let mut tries = 0;
        let done = patiently(until, || {
            tries += 1;
            match tries {
                3 => Ok(tries),
                _ => Err(error(ApiErrorKind::Unavailable)),
            }
        });
        assert_eq!(done.unwrap(), 3);
        let mut tries = 0;
        let done: Result<(), _> = patiently(until, || {
            tries += 1;
            Err(error(ApiErrorKind::Denied))
        });
        assert_eq!(done.unwrap_err().kind, ApiErrorKind::Denied);
        assert_eq!(tries, 1);
        let done: Result<(), _> =
            patiently(Instant::now(), || Err(error(ApiErrorKind::Unavailable)));
        done.unwrap_err();
    }
}
