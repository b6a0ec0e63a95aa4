//! Bodies of requests, read whole and within bounds.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{HeaderValue, header};
use axum::middleware::Next;
use axum::response::Response;
use futures_util::StreamExt as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::values::count_values;

/// How long a client may take to send a body.
const SEND_WITHIN: Duration = Duration::from_secs(60);
/// How long it may send nothing.
const STALL_WITHIN: Duration = Duration::from_secs(5);
/// The time in which a body must come on, again and again: who sends a byte now and then holds a share of what
/// others wait for.
const PACE_WINDOW: Duration = Duration::from_secs(5);
/// By how many bytes, at the least: 1.6 kB/s, which any network has, and twelve times as much for large bodies,
/// since few of them have room.
const PACE: usize = 8 << 10;
const PACE_OF_LARGE: usize = 96 << 10;

/// Bodies up to this do not wait behind larger ones.
const SMALL: usize = 256 << 10;
/// How much of them is read and made sense of at a time.
const ALL_SMALL: usize = 8 << 20;

/// How much of bodies that wait for room is kept at a time.
const ALL_WAITING: usize = 8 << 20;

/// Most values of one JSON text: in memory one takes a hundred bytes and more, whatever its text does.
const MAX_JSON_VALUES: usize = 1 << 18;

/// Why a body was not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BodyError {
    /// It is larger than any that is read.
    #[error("the request body is larger than {limit} bytes")]
    TooLarge {
        /// The largest body that is read.
        limit: usize,
    },
    /// It did not come in time.
    #[error("the request body did not come in time")]
    TooSlow,
    /// There was no room for it in time.
    #[error("too much is being read; try again later")]
    Busy,
    /// It holds too much for its length.
    #[error("the request body has more than {MAX_JSON_VALUES} JSON values")]
    TooManyValues,
    /// The connection broke.
    #[error("the request body could not be read")]
    Broken,
}

/// A share of what is read at a time, to be held while a body is made sense of.
pub(crate) type BodyShare = Arc<OwnedSemaphorePermit>;

/// The bodies that are read at a time: all together no more than the largest may have, so that who sends
/// many large ones waits.
#[derive(Debug, Clone)]
pub(crate) struct Bodies {
    limit: usize,
    patience: Duration,
    stall: Duration,
    window: Duration,
    small: Arc<Semaphore>,
    large: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
}

impl Bodies {
    pub(crate) fn new(limit: usize) -> Self {
        let semaphore = |bytes: usize| Arc::new(Semaphore::new(bytes.min(Semaphore::MAX_PERMITS)));
        Self {
            limit: limit.min(u32::MAX as usize),
            patience: SEND_WITHIN,
            stall: STALL_WITHIN,
            window: PACE_WINDOW,
            small: semaphore(ALL_SMALL),
            large: semaphore(limit.min(u32::MAX as usize)),
            waiting: semaphore(ALL_WAITING),
        }
    }

    /// Reads the body of a request and hands the request on with it, and with its [`BodyShare`] among its
    /// extensions.
    pub(crate) async fn read(
        &self,
        request: Request,
        next: Next,
        refuse: impl FnOnce(BodyError) -> Response,
    ) -> Response {
        match self.whole(request).await {
            Ok(request) => next.run(request).await,
            Err(error) => {
                let mut refused = refuse(error);
                if error == BodyError::TooSlow {
                    // What is still to come of it is waited for no longer.
                    let close = HeaderValue::from_static("close");
                    refused.headers_mut().insert(header::CONNECTION, close);
                }
                refused
            }
        }
    }

    async fn whole(&self, request: Request) -> Result<Request, BodyError> {
        let (mut parts, body) = request.into_parts();
        let announced = parts
            .headers
            .get(header::CONTENT_LENGTH)
            .and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
        let is_chunked = parts.headers.contains_key(header::TRANSFER_ENCODING);
        let bytes = match announced {
            None if !is_chunked => return Ok(Request::from_parts(parts, body)),
            Some(length) if length > self.limit => {
                return Err(BodyError::TooLarge { limit: self.limit });
            }
            Some(length) => length,
            None => self.limit,
        };
        let (body, share) = self.gather(body, bytes).await?;
        check_values(&body)?;
        if let Some(share) = share {
            parts.extensions.insert::<BodyShare>(Arc::new(share));
        }
        Ok(Request::from_parts(parts, Body::from(body)))
    }

    /// Reads a body of at most `bytes`. Who sends nothing has no share of what others wait for, and who has
    /// sent little none of what large bodies wait for.
    async fn gather(
        &self,
        body: Body,
        bytes: usize,
    ) -> Result<(Vec<u8>, Option<OwnedSemaphorePermit>), BodyError> {
        let mut stream = body.into_data_stream();
        let mut whole = Vec::new();
        let mut share: Option<OwnedSemaphorePermit> = None;
        let begun = Instant::now();
        let mut until = begun + self.patience;
        let mut pace = Pace::new(begun, self.window);
        let mut heard = begun;
        loop {
            if !pace.is_kept(Instant::now(), whole.len()) {
                return Err(BodyError::TooSlow);
            }
            let late = until.min(heard + self.stall);
            let piece = match tokio::time::timeout_at(late.min(pace.ends), stream.next()).await {
                Err(_) if Instant::now() < late => continue,
                Err(_) => return Err(BodyError::TooSlow),
                Ok(None) => return Ok((whole, share)),
                Ok(Some(piece)) => piece.map_err(|_| BodyError::Broken)?,
            };
            let length = whole.len() + piece.len();
            if length > bytes {
                return Err(BodyError::TooLarge { limit: self.limit });
            }
            // A larger one is waited for without the small one, or two could wait for each other.
            let is_large = length > SMALL;
            if share.is_none() || (is_large && whole.len() <= SMALL) {
                drop(share.take());
                let (room, most) = match is_large {
                    true => (&self.large, bytes),
                    false => (&self.small, bytes.min(SMALL)),
                };
                let permits = u32::try_from(most).expect("limits fit");
                let asked = Instant::now();
                // What has come is kept while it waits, and has a bound over all, too.
                let kept = u32::try_from(length.min(ALL_WAITING)).expect("the bound fits");
                let place = self.waiting.try_acquire_many(kept);
                let _place = place.map_err(|_| BodyError::Busy)?;
                let room = Arc::clone(room).acquire_many_owned(permits);
                let room = tokio::time::timeout(self.patience, room).await;
                let room = room.map_err(|_| BodyError::Busy)?;
                share = Some(room.expect("the semaphores are never closed"));
                // The client did not take this time.
                until += asked.elapsed();
                pace.ends += asked.elapsed();
            }
            whole.extend_from_slice(&piece);
            heard = Instant::now();
        }
    }
}

/// Whether a body comes on, window by window; the first is twice as long.
struct Pace {
    window: Duration,
    /// When this window ends.
    ends: Instant,
    /// What had come before it.
    before: usize,
}

impl Pace {
    fn new(now: Instant, window: Duration) -> Self {
        Self {
            window,
            ends: now + 2 * window,
            before: 0,
        }
    }

    /// Returns whether it is enough that `come` bytes have come by `now`.
    fn is_kept(&mut self, now: Instant, come: usize) -> bool {
        if now < self.ends {
            return true;
        }
        let least = match self.before > SMALL {
            true => PACE_OF_LARGE,
            false => PACE,
        };
        let is_kept = come - self.before >= least;
        (self.ends, self.before) = (now + self.window, come);
        is_kept
    }
}

/// Refuses JSON whose values would take far more memory than its text.
pub(crate) fn check_values(text: &[u8]) -> Result<(), BodyError> {
    if text.len() <= MAX_JSON_VALUES {
        return Ok(());
    }
    if count_values(text) > MAX_JSON_VALUES {
        return Err(BodyError::TooManyValues);
    }
    Ok(())
}

/// Gives memory back that a large body took, which the allocator would keep for more of the kind.
pub(crate) fn give_back(body: &Bytes) {
    if body.len() > SMALL {
        // SAFETY: `malloc_trim` has no preconditions.
        #[expect(unsafe_code, reason = "asks the allocator for what it does not use")]
        #[cfg(target_env = "gnu")]
        unsafe {
            libc::malloc_trim(0)
        };
    }
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::http::StatusCode;
    use axum::middleware;
    use axum::response::IntoResponse as _;
    use axum::routing::post;
    use tower::ServiceExt as _;

    use super::*;

    fn router(bodies: &Bodies) -> Router {
        let bodies = bodies.clone();
        Router::new()
            .route("/", post(async |body: String| body.len().to_string()))
            .layer(middleware::from_fn(move |request: Request, next: Next| {
                let bodies = bodies.clone();
                async move {
                    bodies
                        .read(request, next, |error| {
                            (StatusCode::BAD_REQUEST, error.to_string()).into_response()
                        })
                        .await
                }
            }))
    }

    fn sent(body: impl Into<Body>, length: Option<usize>) -> Request {
        let request = axum::http::Request::post("/");
        match length {
            Some(length) => request.header(header::CONTENT_LENGTH, length),
            None => request.header(header::TRANSFER_ENCODING, "chunked"),
        }
        .body(body.into())
        .unwrap()
    }

    async fn answer(router: &Router, request: Request) -> String {
        let response = router.clone().oneshot(request).await.unwrap();
        let bytes = axum::body::to_bytes(response.into_body(), 1 << 20).await;
        String::from_utf8(bytes.unwrap().to_vec()).unwrap()
    }

    #[tokio::test]
    async fn what_is_too_large_is_refused_before_it_is_read() {
        let router = router(&Bodies::new(10));
        assert_eq!(answer(&router, sent("0123456789", Some(10))).await, "10");
        assert_eq!(answer(&router, sent("0123", None)).await, "4");
        let refused = "the request body is larger than 10 bytes";
        assert_eq!(answer(&router, sent("", Some(11))).await, refused);
        assert_eq!(answer(&router, sent("0123456789a", None)).await, refused);
    }

    #[tokio::test]
    async fn a_body_that_does_not_come_is_given_up_and_its_share_is_free() {
        let bodies = Bodies {
            stall: Duration::from_millis(20),
            ..Bodies::new(1000)
        };
        let router = router(&bodies);
        let refused = answer(&router, sent(begun(""), Some(1000))).await;
        assert_eq!(refused, "the request body did not come in time");
        assert_eq!(bodies.small.available_permits(), ALL_SMALL);
        assert_eq!(answer(&router, sent("ab", Some(2))).await, "2");
    }

    /// A body that begins and then does not go on.
    fn begun(text: impl Into<Bytes>) -> Body {
        let text: Bytes = text.into();
        let first = (!text.is_empty()).then_some(Ok::<_, std::io::Error>(text));
        let first = futures_util::stream::iter(first);
        Body::from_stream(first.chain(futures_util::stream::pending()))
    }

    /// A byte now and then is no stall; it comes to its end after two seconds.
    #[tokio::test]
    async fn a_body_that_trickles_is_given_up_and_its_share_is_free() {
        let bodies = Bodies {
            window: Duration::from_millis(20),
            ..Bodies::new(1000)
        };
        let trickle = futures_util::stream::iter(0..400).then(async |_| {
            tokio::time::sleep(Duration::from_millis(5)).await;
            Ok::<_, std::io::Error>(Bytes::from_static(b" "))
        });
        let request = sent(Body::from_stream(trickle), Some(400));
        let refused = router(&bodies).oneshot(request).await.unwrap();
        assert_eq!(refused.headers()[header::CONNECTION], "close");
        let told = axum::body::to_bytes(refused.into_body(), 1 << 20).await;
        assert_eq!(told.unwrap(), "the request body did not come in time");
        assert_eq!(bodies.small.available_permits(), ALL_SMALL);
    }

    #[test]
    fn a_body_must_come_on_in_each_window() {
        let begun = Instant::now();
        let at = |seconds: u64| begun + Duration::from_secs(seconds);
        let pace = || Pace::new(begun, PACE_WINDOW);
        let judge = |pace: &mut Pace, told: &[(u64, usize)]| -> Vec<bool> {
            let judged = told.iter();
            judged
                .map(|(seconds, come)| pace.is_kept(at(*seconds), *come))
                .collect()
        };
        // Ten seconds for the beginning, five for each further part of it.
        assert_eq!(judge(&mut pace(), &[(9, 1), (10, PACE - 1)]), [true, false]);
        let steady = [(10, PACE), (14, PACE), (15, 2 * PACE), (20, 3 * PACE - 1)];
        assert_eq!(judge(&mut pace(), &steady), [true, true, true, false]);
        // What came early is no credit.
        assert_eq!(
            judge(&mut pace(), &[(10, SMALL), (15, SMALL)]),
            [true, false]
        );
        let large = SMALL + 1;
        let enough = [(10, large), (15, large + PACE_OF_LARGE)];
        assert_eq!(judge(&mut pace(), &enough), [true, true]);
        let little = [(10, large), (15, large + PACE)];
        assert_eq!(judge(&mut pace(), &little), [true, false]);
    }

    #[tokio::test]
    async fn who_sends_little_keeps_nobody_waiting() {
        let bodies = Bodies::new(4 << 20);
        let router = router(&bodies);
        // As many as there is room for, silent, with a byte, and with nearly what is little.
        let beginnings = ["".to_owned(), " ".to_owned(), " ".repeat(SMALL - 1)];
        let mut stalled: Vec<_> = (0..12)
            .map(|place| sent(begun(beginnings[place % 3].clone()), None))
            .map(|request| Box::pin(answer(&router, request)))
            .collect();
        for answer in &mut stalled {
            let early = tokio::time::timeout(Duration::from_millis(5), answer).await;
            assert!(early.is_err(), "it is waited for");
        }
        assert_eq!(bodies.large.available_permits(), 4 << 20);
        let large = " ".repeat(SMALL + 1);
        assert_eq!(
            answer(&router, sent(large, None)).await,
            (SMALL + 1).to_string()
        );
        assert_eq!(answer(&router, sent("ab", Some(2))).await, "2");
    }

    #[tokio::test]
    async fn who_finds_no_room_is_told_so() {
        let bodies = Bodies {
            patience: Duration::from_millis(20),
            ..Bodies::new(4 << 20)
        };
        let router = router(&bodies);
        let _all = Arc::clone(&bodies.small).acquire_many_owned(8 << 20).await;
        let refused = answer(&router, sent("ab", Some(2))).await;
        assert_eq!(refused, "too much is being read; try again later");
    }

    #[tokio::test]
    async fn small_bodies_do_not_wait_behind_large_ones() {
        let bodies = Bodies::new(4 << 20);
        let router = router(&bodies);
        let all = Arc::clone(&bodies.large).acquire_many_owned(4 << 20).await;
        let large = " ".repeat(SMALL + 1);
        let request = sent(large.clone(), Some(large.len()));
        let mut waiting = Box::pin(answer(&router, request));
        let early = tokio::time::timeout(Duration::from_millis(20), &mut waiting).await;
        assert!(early.is_err(), "it waits");
        assert_eq!(answer(&router, sent("ab", Some(2))).await, "2");
        drop(all);
        assert_eq!(waiting.await, (SMALL + 1).to_string());
    }

    #[tokio::test]
    async fn bodies_that_wait_are_bounded_together() {
        let bodies = Bodies::new(4 << 20);
        let router = router(&bodies);
        let all = Arc::clone(&bodies.large).acquire_many_owned(4 << 20).await;
        let large = " ".repeat(SMALL + 1);
        let room = ALL_WAITING / large.len();
        let mut waiting: Vec<_> = (0..room)
            .map(|_| sent(large.clone(), Some(large.len())))
            .map(|request| Box::pin(answer(&router, request)))
            .collect();
        for answer in &mut waiting {
            let early = tokio::time::timeout(Duration::from_millis(5), answer).await;
            assert!(early.is_err(), "it waits");
        }
        let refused = answer(&router, sent(large.clone(), Some(large.len()))).await;
        assert_eq!(refused, "too much is being read; try again later");
        drop(all);
        for answer in waiting {
            assert_eq!(answer.await, large.len().to_string());
        }
        assert_eq!(bodies.waiting.available_permits(), ALL_WAITING);
    }

    #[test]
    fn values_are_counted_outside_of_strings() {
        let many = format!("[{}0]", "{\"\":0},".repeat(MAX_JSON_VALUES / 2));
        assert_eq!(check_values(many.as_bytes()), Err(BodyError::TooManyValues));
        let text = format!("[\"{}\\\",,\"]", ",[{:".repeat(MAX_JSON_VALUES));
        assert_eq!(check_values(text.as_bytes()), Ok(()));
        // Torn text is the parser's to refuse.
        assert_eq!(
            check_values("\"\\".repeat(MAX_JSON_VALUES).as_bytes()),
            Ok(())
        );
    }
}
