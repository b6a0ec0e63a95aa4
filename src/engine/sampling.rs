//! From logits to a token and its log-probability.
//!
//! The log-probability is that of the temperature-scaled distribution over the whole vocabulary,
//! `log_softmax(logits / T)`, which a trainer can recompute. Where `top_k`, `top_p` or `min_p`
//! cut the distribution, the token was drawn from another one, and the difference is exactly the
//! log of the kept mass; [`TokenLogprob`] holds both, and [`SamplingParams::is_truncated`] lets a
//! trainer refuse such settings.
//!
//! Each sequence draws from its own stream ([`SequenceSeed`]), one number a token, so that what it
//! samples depends neither on the batch around it nor on the order of arrival.

use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::EngineError;

/// Rows times vocabulary below which the rows are sampled on one thread.
const PARALLEL_LOGITS: usize = 1 << 14;

/// How tokens are chosen, and when a turn ends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingParams {
    /// Divides the logits; 0 is greedy. Default: 1.
    pub temperature: f32,
    /// Keeps the smallest set of tokens with this mass; 1 keeps all. Default: 1.
    pub top_p: f32,
    /// Keeps this many tokens; 0 keeps all. Default: 0.
    pub top_k: usize,
    /// Keeps tokens with at least this fraction of the best one's probability. Default: 0.
    pub min_p: f32,
    /// Most tokens of one turn, the stop token included. Default: 512.
    pub max_new_tokens: usize,
    /// Tokens that end a turn; they are part of it. Default: none.
    pub stop_token_ids: Vec<u32>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            max_new_tokens: 512,
            stop_token_ids: Vec::new(),
        }
    }
}

impl SamplingParams {
    /// Checks each parameter's range.
    ///
    /// # Errors
    ///
    /// [`EngineError::InvalidSampling`] names the first one at fault.
    pub fn validate(&self) -> Result<(), EngineError> {
        let invalid = |field, reason: String| Err(EngineError::InvalidSampling { field, reason });
        // Below this, dividing by the temperature overflows; 0 asks for greedy.
        if !(self.temperature == 0.0 || (1e-3..=1e3).contains(&self.temperature)) {
            let reason = format!("{} is neither 0 nor in 0.001..=1000", self.temperature);
            return invalid("temperature", reason);
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return invalid("top_p", format!("{} is not in (0, 1]", self.top_p));
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return invalid("min_p", format!("{} is not in [0, 1]", self.min_p));
        }
        if self.max_new_tokens == 0 {
            return invalid("max_new_tokens", "0 leaves nothing to generate".to_owned());
        }
        Ok(())
    }

    /// Returns whether the best token is taken without a draw.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Returns whether tokens are drawn from a part of the vocabulary only, so that
    /// [`TokenLogprob::logprob`] is not the probability of the draw.
    pub fn is_truncated(&self) -> bool {
        !self.is_greedy() && (self.top_p < 1.0 || self.top_k > 0 || self.min_p > 0.0)
    }
}

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

/// A chosen token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: u32,
    /// Its log-probability over the whole vocabulary at the sampling temperature; at temperature 1
    /// when greedy.
    pub logprob: f32,
    /// Its log-probability among the tokens that `top_k`, `top_p` and `min_p` kept.
    pub kept_logprob: f32,
}

/// Chooses a token for each of many rows, in parallel. `rows` gives each row's logits, parameters
/// and stream; `None` marks a row with logits that are not finite.
pub(super) fn sample_rows(
    rows: Vec<(&[f32], &SamplingParams, &mut ChaCha8Rng)>,
) -> Vec<Option<TokenLogprob>> {
    let vocab_size = rows.first().map_or(1, |(logits, ..)| logits.len().max(1));
    rows.into_par_iter()
        .with_min_len(PARALLEL_LOGITS.div_ceil(vocab_size))
        .map(|(logits, params, random)| sample(logits, params, random))
        .collect()
}

/// Chooses a token from `logits`, `[vocab]`; `None` if they are empty, not numbers, or without a
/// finite maximum. A logit of minus infinity has probability zero.
pub(super) fn sample(
    logits: &[f32],
    params: &SamplingParams,
    random: &mut ChaCha8Rng,
) -> Option<TokenLogprob> {
    let best = argmax(logits)?;
    let temperature = if params.is_greedy() {
        1.0
    } else {
        params.temperature
    };
    // Probabilities relative to the best token's, so that the largest is 1.
    let max = logits[best];
    let weights: Vec<f32> = logits
        .iter()
        .map(|&logit| ((logit - max) / temperature).exp())
        .collect();
    let total: f64 = weights.iter().copied().map(f64::from).sum();
    let logprob = |token: usize, mass: f64| {
        narrow(f64::from((logits[token] - max) / temperature) - mass.ln())
    };
    let chosen = |token: usize, kept_mass: f64| TokenLogprob {
        token: u32::try_from(token).expect("vocabularies have fewer than 2^32 tokens"),
        logprob: logprob(token, total),
        kept_logprob: logprob(token, kept_mass),
    };
    if params.is_greedy() {
        return Some(chosen(best, total));
    }
    let uniform = unit_interval(random);
    if !params.is_truncated() {
        return Some(chosen(
            draw(weights.iter().copied().enumerate(), uniform * total)?,
            total,
        ));
    }
    let kept = keep(&weights, params);
    let kept_mass: f64 = kept.iter().map(|&token| f64::from(weights[token])).sum();
    let pairs = kept.iter().map(|&token| (token, weights[token]));
    Some(chosen(draw(pairs, uniform * kept_mass)?, kept_mass))
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
fn unit_interval(random: &mut ChaCha8Rng) -> f64 {
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
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    const LOGITS: [f32; 4] = [2.0, 1.0, 0.0, -1.0];

    fn random(sample: u64) -> ChaCha8Rng {
        SequenceSeed::new(7, 3, sample).generator()
    }

    fn draws(params: &SamplingParams, count: u64) -> Vec<TokenLogprob> {
        (0..count)
            .map(|i| sample(&LOGITS, params, &mut random(i)).unwrap())
            .collect()
    }

    /// torch 2.15: `torch.log_softmax(torch.tensor([2., 1., 0., -1.]) / 0.7, -1)[1]`.
    #[test]
    fn logprobs_are_those_of_the_scaled_logits() {
        let params = SamplingParams {
            temperature: 0.7,
            ..SamplingParams::default()
        };
        let chosen = draws(&params, 100);
        let second = chosen.iter().find(|chosen| chosen.token == 1).unwrap();
        assert!((second.logprob - -1.699_245_2).abs() < 1e-6, "{second:?}");
        assert_eq!(second.logprob, second.kept_logprob);
    }

    /// At temperature 0 the untempered distribution is reported: `log_softmax(logits)[0]`.
    #[test]
    fn greedy_takes_the_first_of_the_best() {
        let params = SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        };
        let chosen = sample(&LOGITS, &params, &mut random(0)).unwrap();
        assert_eq!(chosen.token, 0);
        assert!((chosen.logprob - -0.440_189_7).abs() < 1e-6, "{chosen:?}");
        assert_eq!(
            sample(&[1.0, 3.0, 3.0], &params, &mut random(0))
                .unwrap()
                .token,
            1
        );
    }

    /// torch: the nucleus of 0.8 keeps tokens 0 and 1, of mass 0.880797; `logp` of token 1 is
    /// -1.440190 over the vocabulary and -1.313262 over the nucleus.
    #[test]
    fn a_nucleus_reports_both_logprobs() {
        let params = SamplingParams {
            top_p: 0.8,
            ..SamplingParams::default()
        };
        assert!(params.is_truncated());
        let chosen = draws(&params, 200);
        assert!(chosen.iter().all(|chosen| chosen.token <= 1));
        let second = chosen.iter().find(|chosen| chosen.token == 1).unwrap();
        assert!((second.logprob - -1.440_189_7).abs() < 1e-6, "{second:?}");
        assert!(
            (second.kept_logprob - -1.313_261_7).abs() < 1e-6,
            "{second:?}"
        );
    }

    #[rstest]
    #[case(SamplingParams { top_k: 1, ..SamplingParams::default() }, 0)]
    #[case(SamplingParams { top_k: 3, ..SamplingParams::default() }, 2)]
    #[case(SamplingParams { min_p: 0.3, ..SamplingParams::default() }, 1)]
    #[case(SamplingParams { top_p: 0.96, min_p: 0.1, ..SamplingParams::default() }, 2)]
    #[case(SamplingParams { top_k: 100, ..SamplingParams::default() }, 3)]
    fn cuts_keep_the_best_tokens(#[case] params: SamplingParams, #[case] last: u32) {
        let tokens = draws(&params, 400).iter().map(|chosen| chosen.token).max();
        assert_eq!(tokens, Some(last));
    }

    #[test]
    fn frequencies_follow_the_probabilities() {
        let params = SamplingParams::default();
        let count = 20_000;
        let chosen = draws(&params, count);
        for token in 0..4_u32 {
            let seen = chosen.iter().filter(|chosen| chosen.token == token).count() as f64;
            let logits = LOGITS.map(f64::from);
            let total: f64 = logits.iter().map(|logit| logit.exp()).sum();
            let probability = logits[token as usize].exp() / total;
            let deviation = (probability * (1.0 - probability) / count as f64).sqrt();
            let difference = seen / count as f64 - probability;
            assert!(
                difference.abs() < 4.0 * deviation,
                "token {token}: {difference}"
            );
        }
    }

    #[test]
    fn streams_differ_in_every_part_of_the_seed() {
        let first = |seed: SequenceSeed| seed.generator().next_u64();
        let seeds = [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3)];
        let mut numbers: Vec<u64> = seeds
            .iter()
            .map(|&(run, task, sample)| first(SequenceSeed { run, task, sample }))
            .collect();
        assert_eq!(first(SequenceSeed::new(1, 2, 3)), numbers[0]);
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), seeds.len());
    }

    #[test]
    fn logits_that_are_not_numbers_are_noticed() {
        let params = SamplingParams::default();
        for logits in [
            &[0.0, f32::NAN][..],
            &[f32::INFINITY, 0.0],
            &[f32::NEG_INFINITY; 2],
            &[],
        ] {
            assert_eq!(sample(logits, &params, &mut random(0)), None, "{logits:?}");
        }
        let masked = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY];
        let chosen = sample(&masked, &params, &mut random(0)).unwrap();
        assert_eq!((chosen.token, chosen.logprob), (1, 0.0));
    }

    #[rstest]
    #[case(SamplingParams { temperature: -1.0, ..SamplingParams::default() }, "temperature")]
    #[case(SamplingParams { temperature: f32::NAN, ..SamplingParams::default() }, "temperature")]
    #[case(SamplingParams { top_p: 0.0, ..SamplingParams::default() }, "top_p")]
    #[case(SamplingParams { min_p: 1.5, ..SamplingParams::default() }, "min_p")]
    #[case(SamplingParams { max_new_tokens: 0, ..SamplingParams::default() }, "max_new_tokens")]
    fn parameters_out_of_range_are_named(#[case] params: SamplingParams, #[case] field: &str) {
        let error = params.validate().unwrap_err();
        assert!(
            error.to_string().starts_with(&format!("invalid `{field}`")),
            "{error}"
        );
    }

    proptest! {
        /// A row's token does not depend on the rows around it or on their order.
        #[test]
        fn rows_do_not_depend_on_the_batch(
            rows in prop::collection::vec(prop::collection::vec(-5.0..5.0_f32, 7), 1..9),
            temperature in 0.1..2.0_f32,
        ) {
            let params = SamplingParams { temperature, ..SamplingParams::default() };
            let alone: Vec<_> = (0..rows.len())
                .map(|i| sample(&rows[i], &params, &mut random(i as u64)))
                .collect();
            let mut streams: Vec<_> = (0..rows.len()).map(|i| random(i as u64)).collect();
            let mut batch: Vec<_> = rows
                .iter()
                .zip(&mut streams)
                .map(|(logits, random)| (&logits[..], &params, random))
                .collect();
            batch.reverse();
            let mut together = sample_rows(batch);
            together.reverse();
            prop_assert_eq!(alone, together);
        }
    }
}
