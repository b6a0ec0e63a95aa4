//! From logits to a token and its log-probability.
//!
//! In this order: biases and `min_new_tokens`, penalties, what a [`Guide`] admits, temperature, cuts, as in
//! vLLM 0.11.
//!
//! Two log-probabilities belong to a token ([`TokenLogprob`]). One is that of the temperature-scaled
//! distribution over the whole vocabulary, `log_softmax(logits / T)`, which a trainer can recompute.
//! The other is that of the distribution that the token was drawn from. They are the same number
//! unless the logits were adjusted ([`SamplingParams::is_adjusted`]), guided or the distribution was cut
//! ([`SamplingParams::is_truncated`]); a trainer refuses both ([`SamplingParams::check_trainable`]).
//!
//! Each sequence draws from its own stream ([`SequenceSeed`]), one number a token, so that what it
//! samples depends neither on the batch around it nor on the order of arrival.

mod adjust;
mod params;

use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::guide::Guide;
pub(super) use adjust::History;
use adjust::adjust;
pub use params::{SamplingParams, ThinkingBudget};

/// Rows times vocabulary below which the rows are sampled on one thread.
const PARALLEL_LOGITS: usize = 1 << 14;

/// Names the random stream of one sequence; equal seeds draw equal numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct SequenceSeed {
    /// Seed of the run.
    pub run: u64,
    /// Which task, and which visit to it.
    pub task: u64,
    /// Which sample of that task's group.
    pub sample: u64,
}

impl SequenceSeed {
    /// Returns the stream's name.
    pub fn new(run: u64, task: u64, sample: u64) -> Self {
        Self { run, task, sample }
    }

    /// Returns the generator at the start of its stream: the three numbers are its key.
    pub(super) fn generator(self) -> ChaCha8Rng {
        let mut key = [0; 32];
        for (bytes, number) in key
            .chunks_exact_mut(8)
            .zip([self.run, self.task, self.sample])
        {
            bytes.copy_from_slice(&number.to_le_bytes());
        }
        ChaCha8Rng::from_seed(key)
    }
}

/// A token and how likely it was.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: u32,
    /// Its log-probability over the whole vocabulary at the sampling temperature, before
    /// penalties, biases and cuts; at temperature 1 when greedy.
    pub logprob: f32,
    /// Its log-probability in the distribution that was sampled from: after penalties, biases and
    /// `min_new_tokens`, among the tokens that `top_k`, `top_p` and `min_p` kept.
    pub kept_logprob: f32,
}

/// A chosen token, and the likeliest ones where they were asked for.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Sampled {
    pub(super) chosen: TokenLogprob,
    /// The [`SamplingParams::top_logprobs`] likeliest tokens, best first.
    pub(super) top: Vec<TokenLogprob>,
}

impl Sampled {
    /// Returns a token of the model's own distribution at the temperature.
    pub(super) fn plain(token: u32, logprob: f32) -> Self {
        Self {
            chosen: TokenLogprob {
                token,
                logprob,
                kept_logprob: logprob,
            },
            top: Vec::new(),
        }
    }
}

/// The next token of one sequence, to be chosen.
#[derive(Debug)]
pub(super) struct Row<'a> {
    /// `[vocab]`
    pub(super) logits: &'a [f32],
    pub(super) params: &'a SamplingParams,
    pub(super) history: History<'a>,
    /// Which tokens may come next; all, without one.
    pub(super) guide: Option<&'a mut Guide>,
    pub(super) random: &'a mut ChaCha8Rng,
}

/// Chooses a token for each of many rows, in parallel; `None` marks a row with logits that are not
/// finite.
pub(super) fn sample_rows(rows: Vec<Row<'_>>) -> Vec<Option<Sampled>> {
    let vocab_size = rows.first().map_or(1, |row| row.logits.len().max(1));
    rows.into_par_iter()
        .with_min_len(PARALLEL_LOGITS.div_ceil(vocab_size))
        .map(sample)
        .collect()
}

/// A softmax of logits at a temperature, with a part of the vocabulary cut off.
struct Distribution<'a> {
    logits: &'a [f32],
    max: f32,
    temperature: f32,
    /// Probabilities relative to the best token's, so that the largest is 1.
    weights: Vec<f32>,
    /// Sum of the weights.
    total: f64,
}

impl<'a> Distribution<'a> {
    fn new(logits: &'a [f32], max: f32, temperature: f32) -> Self {
        let weights: Vec<f32> = logits
            .iter()
            .map(|&logit| ((logit - max) / temperature).exp())
            .collect();
        let total = weights.iter().copied().map(f64::from).sum();
        Self {
            logits,
            max,
            temperature,
            weights,
            total,
        }
    }

    /// Returns the log-probability of `token` where the whole has `mass`.
    fn logprob(&self, token: usize, mass: f64) -> f32 {
        let scaled = f64::from((self.logits[token] - self.max) / self.temperature);
        narrow(scaled - mass.ln())
    }
}

/// Chooses a token of one row; `None` if its logits are empty, not numbers, or without a finite
/// maximum. A logit of minus infinity has probability zero.
pub(super) fn sample(row: Row<'_>) -> Option<Sampled> {
    let Row {
        logits,
        params,
        history,
        guide,
        random,
    } = row;
    let best = argmax(logits)?;
    let temperature = if params.is_greedy() {
        1.0
    } else {
        params.temperature
    };
    let whole = Distribution::new(logits, logits[best], temperature);
    let mut adjusted =
        (params.is_adjusted() || guide.is_some()).then(|| adjust(logits, params, history));
    if let (Some(logits), Some(guide)) = (&mut adjusted, guide) {
        guide.mask(logits);
    }
    let adjusted = match &adjusted {
        Some(logits) => {
            let best = argmax(logits)?;
            Some((best, Distribution::new(logits, logits[best], temperature)))
        }
        None => None,
    };
    let (best, sampled) = match &adjusted {
        Some((best, adjusted)) => (*best, adjusted),
        None => (best, &whole),
    };
    let kept = params
        .is_truncated()
        .then(|| keep(&sampled.weights, params));
    let kept_mass = match &kept {
        Some(kept) => kept
            .iter()
            .map(|&token| f64::from(sampled.weights[token]))
            .sum(),
        None => sampled.total,
    };
    let token = if params.is_greedy() {
        best
    } else {
        let threshold = unit_interval(random) * kept_mass;
        let weights = &sampled.weights;
        match &kept {
            Some(kept) => draw(kept.iter().map(|&token| (token, weights[token])), threshold)?,
            None => draw(weights.iter().copied().enumerate(), threshold)?,
        }
    };
    let entry = |token: usize| TokenLogprob {
        token: u32::try_from(token).expect("vocabularies have fewer than 2^32 tokens"),
        logprob: whole.logprob(token, whole.total),
        kept_logprob: sampled.logprob(token, kept_mass),
    };
    let top = match kept {
        _ if params.top_logprobs == 0 => Vec::new(),
        Some(mut kept) => {
            kept.truncate(params.top_logprobs);
            kept
        }
        None => likeliest(sampled.logits, params.top_logprobs),
    };
    Some(Sampled {
        chosen: entry(token),
        top: top.into_iter().map(entry).collect(),
    })
}

/// Returns the `count` largest logits' indices, best first; none that is minus infinity.
fn likeliest(logits: &[f32], count: usize) -> Vec<usize> {
    let mut tokens: Vec<usize> = (0..logits.len())
        .filter(|&token| logits[token] > f32::NEG_INFINITY)
        .collect();
    let best_first = |&a: &usize, &b: &usize| logits[b].total_cmp(&logits[a]).then(a.cmp(&b));
    if count < tokens.len() {
        tokens.select_nth_unstable_by(count, best_first);
        tokens.truncate(count);
    }
    tokens.sort_unstable_by(best_first);
    tokens
}

/// Returns the index of the largest logit, the first of equals.
fn argmax(logits: &[f32]) -> Option<usize> {
    let mut best = 0;
    for (index, &logit) in logits.iter().enumerate() {
        if logit.is_nan() || logit == f32::INFINITY {
            return None;
        }
        if logit > logits[best] {
            best = index;
        }
    }
    logits
        .get(best)
        .is_some_and(|logit| logit.is_finite())
        .then_some(best)
}

/// Returns a number in [0, 1) from one 64-bit draw.
pub(super) fn unit_interval(random: &mut ChaCha8Rng) -> f64 {
    (random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
}

/// Returns the item at which the running sum of the weights passes `threshold`.
fn draw(weights: impl Iterator<Item = (usize, f32)>, threshold: f64) -> Option<usize> {
    let mut sum = 0.0;
    let mut last = None;
    for (token, weight) in weights {
        if weight > 0.0 {
            sum += f64::from(weight);
            last = Some(token);
            if sum > threshold {
                break;
            }
        }
    }
    last
}

/// Returns the tokens that `top_k`, `top_p` and `min_p` leave, best first: cut in this order, as
/// transformers does.
fn keep(weights: &[f32], params: &SamplingParams) -> Vec<usize> {
    let mut kept: Vec<usize> = (0..weights.len()).collect();
    let best_first = |&a: &usize, &b: &usize| weights[b].total_cmp(&weights[a]).then(a.cmp(&b));
    if (1..kept.len()).contains(&params.top_k) {
        kept.select_nth_unstable_by(params.top_k, best_first);
        kept.truncate(params.top_k);
    }
    // What a guide or a bias excludes is not kept where `top_k` leaves more than there is.
    kept.retain(|&token| weights[token] > 0.0);
    kept.sort_unstable_by(best_first);
    if params.top_p < 1.0 {
        let mass: f64 = kept.iter().map(|&token| f64::from(weights[token])).sum();
        let mut sum = 0.0;
        let below = kept.iter().position(|&token| {
            sum += f64::from(weights[token]);
            sum >= f64::from(params.top_p) * mass
        });
        kept.truncate(below.map_or(kept.len(), |index| index + 1));
    }
    if params.min_p > 0.0 {
        kept.retain(|&token| weights[token] >= params.min_p);
    }
    kept
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "log-probabilities are stored as f32"
)]
fn narrow(value: f64) -> f32 {
    value as f32
}

#[cfg(test)]
mod tests;
