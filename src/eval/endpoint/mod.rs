//! Measuring a model behind an OpenAI-compatible endpoint, with the tasks, tools, sandbox and graders of
//! training.
//!
//! Episodes run side by side, each on a thread that waits for the endpoint. What it fails, it is asked
//! again; an episode that it fails for good has no score. Episodes are kept in a file as they end
//! ([`ResultsFile`]), so that an evaluation that was interrupted goes on.

mod conversation;
mod error;
mod refusal;
mod results;

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Map, Value};

use self::conversation::{Ended, TurnSampling, backoff, play, wait_for};
use self::refusal::{is_overflow, remedy};
use crate::address::shown;
use crate::proxy::{Completion, ProxyError, Upstream, UpstreamConfig};
use crate::rollout::{CollectionSeed, Episode, GroupRequest, derive_seed, side_by_side};

pub use self::error::EndpointError;
pub use self::results::{EndpointUsage, EpisodeRecord, ResultsFile};

/// The longest pause that an endpoint is granted.
const LONGEST_PAUSE: Duration = Duration::from_mins(5);
/// How long a request to stop may go unnoticed in a pause.
const STOP_LATENCY: Duration = Duration::from_millis(100);
/// The fewest episodes that fail in a row before the endpoint counts as down.
const MIN_FAILURES: usize = 4;

/// How an endpoint is asked.
#[derive(Debug, Clone)]
pub struct EndpointConfig {
    /// Where it is; the model is named.
    pub upstream: UpstreamConfig,
    /// The temperature of the samples.
    pub temperature: f64,
    /// Tokens of a turn, where a request does not say.
    pub max_new_tokens: usize,
    /// Tokens of an episode, prompt included, before it ends as truncated.
    pub max_total_tokens: usize,
    /// Whether the tools are described to it; it must read the model's calls then.
    pub use_tools: bool,
    /// Fields of every request, in the place of ours; null leaves one out.
    pub extra: Map<String, Value>,
    /// Episodes at a time.
    pub concurrency: usize,
    /// Tries of a request that failed, beside the first.
    pub retries: u32,
}

/// Returns the name of the only model of an endpoint.
///
/// # Errors
///
/// Fails where the endpoint cannot be asked, or has none or several.
pub fn only_model(upstream: UpstreamConfig) -> Result<String, EndpointError> {
    let url = shown(&upstream.url);
    let list = Upstream::new(upstream)?
        .list_models()
        .map_err(|error| match error {
            ProxyError::Upstream { message } => EndpointError::Unlisted {
                url: url.clone(),
                reason: message,
            },
            source => EndpointError::Refused {
                url: url.clone(),
                remedy: "its models cannot be listed; check the address, which ends in `/v1`, and the key, or name \
                         the model",
                source,
            },
        })?;
    let models = list["data"].as_array().into_iter().flatten();
    let names: Vec<&str> = models.filter_map(|model| model["id"].as_str()).collect();
    match names[..] {
        [name] => Ok(name.to_owned()),
        [] => Err(EndpointError::Models {
            url,
            found: "no models".to_owned(),
        }),
        _ => Err(EndpointError::Models {
            url,
            found: format!("the models {}", names.join(", ")),
        }),
    }
}

/// Asks, and asks again.
pub(in crate::eval::endpoint) struct Asker<'a> {
    config: &'a EndpointConfig,
    upstream: Upstream,
    stop: &'a AtomicBool,
    /// An error of one episode that ends all.
    is_over: &'a AtomicBool,
}

impl fmt::Debug for Asker<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Asker")
            .field("upstream", &self.upstream)
            .finish_non_exhaustive()
    }
}

impl Asker<'_> {
    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed) || self.is_over.load(Ordering::Relaxed)
    }

    /// Asks until there is an answer or no more tries; `None` if it is stopped meanwhile.
    fn ask(
        &self,
        body: &Map<String, Value>,
        retries: &mut u64,
    ) -> Result<Option<Completion>, ProxyError> {
        let mut tried = 0;
        loop {
            if self.is_stopped() {
                return Ok(None);
            }
            let error = match self.upstream.complete(body.clone()) {
                Ok(completion) => return Ok(Some(completion)),
                Err(error) => error,
            };
            if tried == self.config.retries || !error.is_transient() {
                return Err(error);
            }
            tried += 1;
            *retries += 1;
            // Who asks for no pause, or a short one, may not know how many come back.
            let asked = error.retry_after().unwrap_or_default();
            let pause = backoff(tried).max(asked);
            tracing::info!(%error, ?pause, "the endpoint is asked again");
            self.pause(pause.min(LONGEST_PAUSE));
        }
    }

    fn pause(&self, pause: Duration) {
        let until = Instant::now() + pause;
        while !self.is_stopped() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            std::thread::sleep(left.min(STOP_LATENCY));
        }
    }
}

/// Plays the episodes that `results` does not hold, and adds them; `progress` is told how many are done.
///
/// # Errors
///
/// Fails where the endpoint cannot be asked so, or is down, where results cannot be kept, and if it is
/// stopped.
pub fn evaluate_endpoint(
    config: &EndpointConfig,
    requests: Vec<GroupRequest>,
    seed: CollectionSeed<'_>,
    results: &mut ResultsFile,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(usize),
) -> Result<(), EndpointError> {
    let mut total = 0;
    let mut queue = VecDeque::new();
    for (group, request) in (0_u64..).zip(requests) {
        let base = seed.of_task(seed.purpose, &request.task_id);
        for (sample, environment) in (request.first_sample..).zip(request.environments) {
            total += 1;
            if results.has(&request.task_id, sample) {
                continue;
            }
            // Sampled apart from each other, and alike in every evaluation.
            let base = base.wrapping_add(request.visit);
            let seed = derive_seed(base, "sample", u64::from(sample), &request.task_id);
            let sampling = TurnSampling {
                max_new_tokens: request.max_new_tokens.unwrap_or(config.max_new_tokens),
                seed,
            };
            queue.push_back((
                request.task_id.clone(),
                group,
                sample,
                environment,
                sampling,
            ));
        }
    }
    let mut done = total - queue.len();
    progress(done);
    let is_over = AtomicBool::new(false);
    let asker = Asker {
        config,
        upstream: Upstream::new(config.upstream.clone())?,
        stop,
        is_over: &is_over,
    };
    let mut keeper = Keeper {
        config,
        has_answered: results.has_answered(),
        results,
        failures: 0,
    };
    let mut outcome = Ok(());
    side_by_side(
        config.concurrency,
        queue,
        || asker.is_stopped(),
        |(task_id, group, sample, mut environment, sampling)| {
            // Nobody waits for a server that does not answer once it is to stop.
            if !wait_for(&asker, &mut *environment) {
                return Ended::Stopped(None);
            }
            let episode = Episode::start(environment, &task_id, group, sample, 0);
            play(&asker, episode, sampling)
        },
        |ended| match keeper.keep(ended) {
            Ok(true) => {
                done += 1;
                progress(done);
            }
            Ok(false) => {}
            // The others end at their next request; what they still bring is kept.
            Err(error) => {
                is_over.store(true, Ordering::Relaxed);
                if outcome.is_ok() {
                    outcome = Err(error);
                }
            }
        },
    );
    outcome?;
    if stop.load(Ordering::Relaxed) && done < total {
        return Err(EndpointError::Stopped { done, total });
    }
    Ok(())
}

/// Keeps what comes, and says when going on is of no use.
struct Keeper<'a> {
    config: &'a EndpointConfig,
    results: &'a mut ResultsFile,
    /// Episodes in a row that the endpoint failed.
    failures: usize,
    has_answered: bool,
}

impl Keeper<'_> {
    /// Keeps an episode without an end if it has cost something.
    fn keep_cost(&mut self, record: EpisodeRecord) -> Result<(), EndpointError> {
        match record.usage == EndpointUsage::default() {
            true => Ok(()),
            false => self.results.append(record),
        }
    }

    /// Returns whether an episode is done.
    fn keep(&mut self, ended: Ended) -> Result<bool, EndpointError> {
        match ended {
            Ended::Stopped(None) => Ok(false),
            Ended::Stopped(Some(record)) => {
                self.keep_cost(record)?;
                Ok(false)
            }
            Ended::Done(record) => {
                self.failures = 0;
                self.has_answered |= record.usage.requests > 0;
                self.results.append(record)?;
                Ok(true)
            }
            Ended::Failed(record, error) => {
                self.has_answered |= record.usage.requests > 0;
                self.failures += 1;
                let url = || shown(&self.config.upstream.url);
                if let Some(remedy) = remedy(&error, self.has_answered) {
                    self.keep_cost(record)?;
                    return Err(EndpointError::Refused {
                        url: url(),
                        remedy,
                        source: error,
                    });
                }
                self.results.append(record)?;
                if self.failures >= self.config.concurrency.max(MIN_FAILURES) {
                    return Err(EndpointError::Down {
                        url: url(),
                        failures: self.failures,
                        reason: match error {
                            ProxyError::Upstream { message } => message,
                            error => error.to_string(),
                        },
                    });
                }
                Ok(true)
            }
        }
    }
}
