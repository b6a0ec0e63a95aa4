//! One micro-batch: forward, loss, backward.

use super::TrainerError;
use super::batch::MicroBatch;
use super::logprob::{HeadLoss, Scores, backward_through_head, score};
use super::loss::{LossConfig, LossMetrics, TokenTerm};
use super::value::ValueHead;
use crate::engine::model::{Adapters, Decoder, Gradients};
use crate::rollout::derive_seed;

/// How a micro-batch goes through the model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PassConfig {
    /// What logits are divided by: the sampler's temperature.
    pub temperature: f64,
    /// Run each layer again in the backward pass rather than keep what it made.
    pub recompute: bool,
    /// Seed of the masks of an adapter's dropout; without one nothing is dropped.
    pub dropout_seed: Option<u64>,
}

impl PassConfig {
    /// Returns the passes of a run's step, whose masks no other step has.
    #[must_use]
    pub fn of_step(self, step: usize) -> Self {
        let of_step = |seed| derive_seed(seed, "dropout", step as u64, "");
        Self {
            dropout_seed: self.dropout_seed.map(of_step),
            ..self
        }
    }

    /// Returns whether something is dropped in training that is not in sampling.
    pub(super) fn drops(self, decoder: &Decoder) -> bool {
        let probability = decoder.lora().map_or(0.0, |lora| lora.dropout);
        self.dropout_seed.is_some() && probability > 0.0
    }
}

impl Default for PassConfig {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            recompute: false,
            dropout_seed: None,
        }
    }
}

/// Scores a micro-batch's targets without gradients: with adapters the policy, say before a second
/// epoch; without them the reference, whose log-probabilities go into [`MicroBatch::reference`].
///
/// # Errors
///
/// Fails if the model refuses.
pub fn score_micro_batch(
    decoder: &Decoder,
    micro: &MicroBatch,
    adapters: Adapters,
    temperature: f64,
) -> Result<Scores, TrainerError> {
    let hidden = decoder.hidden(&micro.batch, adapters)?;
    score(decoder, &hidden, &micro.targets, adapters, temperature)
}

/// Scores a micro-batch's targets as a pass of training does, with what that drops.
pub(super) fn score_dropping(
    decoder: &Decoder,
    micro: &MicroBatch,
    pass: PassConfig,
) -> Result<Scores, TrainerError> {
    let (hidden, _) = decoder.forward_dropping(&micro.batch, true, pass.dropout_seed)?;
    let (targets, on) = (&micro.targets, Adapters::On);
    score(decoder, &hidden, targets, on, pass.temperature)
}

/// Adds the policy loss's gradient over one micro-batch, and returns what to report.
///
/// # Errors
///
/// Fails if the micro-batch does not say when its tokens were sampled, or if the model refuses.
pub fn accumulate_policy_gradient(
    decoder: &Decoder,
    micro: &MicroBatch,
    loss: &LossConfig,
    pass: PassConfig,
    gradients: &mut Gradients,
) -> Result<LossMetrics, TrainerError> {
    accumulate_actor_critic_gradient(decoder, micro, loss, pass, gradients, None)
}

/// Does what [`accumulate_policy_gradient`] does, and adds the value loss's gradient to a value head,
/// given with the weight of each target's value, and as far as it goes to the model below.
///
/// # Errors
///
/// Fails as that does, and if the micro-batch has no returns for the head to learn.
pub fn accumulate_actor_critic_gradient(
    decoder: &Decoder,
    micro: &MicroBatch,
    loss: &LossConfig,
    pass: PassConfig,
    gradients: &mut Gradients,
    critic: Option<(&mut ValueHead, f64)>,
) -> Result<LossMetrics, TrainerError> {
    if micro.sampled.len() != micro.targets.len() {
        return Err(TrainerError::Length {
            what: "sampled log-probabilities against targets",
            found: micro.sampled.len(),
            expected: micro.targets.len(),
        });
    }
    if micro.targets.is_empty() {
        return Ok(LossMetrics::default());
    }
    let (hidden, tape) =
        decoder.forward_dropping(&micro.batch, pass.recompute, pass.dropout_seed)?;
    // Losses that look at whole sequences need one visit of the head more.
    let known = if loss.needs_sequences() {
        let (targets, on) = (&micro.targets, Adapters::On);
        let scores = score(decoder, &hidden, targets, on, pass.temperature)?;
        Some(sequence_terms(micro, loss, &scores.logprobs))
    } else {
        None
    };
    let term = |target: usize, logprob: f64| match &known {
        Some(terms) => terms[target],
        None => loss.terms(micro.tokens(target..target + 1, &[logprob]))[0],
    };
    let (scores, dhidden) = backward_through_head(
        decoder,
        &hidden,
        &micro.targets,
        pass.temperature,
        gradients,
        HeadLoss {
            coefficient: &|target, logprob| term(target, logprob).gradient * micro.weights[target],
            entropy: -micro.entropy_weight,
        },
    )?;
    if let Some((head, weight)) = critic {
        head.accumulate(&hidden, micro, weight, &dhidden)?;
    }
    decoder.backward(tape, &dhidden, gradients)?;
    let mut metrics = LossMetrics::default();
    for (target, (&logprob, &entropy)) in scores.logprobs.iter().zip(&scores.entropies).enumerate()
    {
        let undropped = micro.undropped.get(target).unwrap_or(&logprob);
        let below = micro.sampled[target] - undropped;
        metrics.add(
            &term(target, logprob),
            micro.weights[target],
            entropy,
            below,
        );
        metrics.loss -= micro.entropy_weight * entropy;
    }
    Ok(metrics)
}

/// Returns the term of each target of a micro-batch.
pub(super) fn sequence_terms(
    micro: &MicroBatch,
    loss: &LossConfig,
    logprobs: &[f64],
) -> Vec<TokenTerm> {
    micro
        .ranges()
        .flat_map(|targets| loss.terms(micro.tokens(targets.clone(), &logprobs[targets])))
        .collect()
}

/// Adds the gradient of the negative log-likelihood over one micro-batch: supervised fine-tuning.
///
/// Advantages are not read: give a token another weight by its place in the step's totals.
///
/// # Errors
///
/// Fails if the model refuses.
pub fn accumulate_nll_gradient(
    decoder: &Decoder,
    micro: &MicroBatch,
    pass: PassConfig,
    gradients: &mut Gradients,
) -> Result<LossMetrics, TrainerError> {
    let mut metrics = LossMetrics::default();
    if micro.targets.is_empty() {
        return Ok(metrics);
    }
    let (hidden, tape) =
        decoder.forward_dropping(&micro.batch, pass.recompute, pass.dropout_seed)?;
    let (scores, dhidden) = backward_through_head(
        decoder,
        &hidden,
        &micro.targets,
        pass.temperature,
        gradients,
        HeadLoss {
            coefficient: &|target, _| -micro.weights[target],
            entropy: 0.0,
        },
    )?;
    decoder.backward(tape, &dhidden, gradients)?;
    for (target, (&logprob, &entropy)) in scores.logprobs.iter().zip(&scores.entropies).enumerate()
    {
        let term = TokenTerm {
            loss: -logprob,
            gradient: -1.0,
            ratio: 1.0,
            is_clipped_low: false,
            is_clipped_high: false,
            correction: 1.0,
            kl: 0.0,
        };
        metrics.add(&term, micro.weights[target], entropy, 0.0);
    }
    Ok(metrics)
}
