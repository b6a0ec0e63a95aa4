//! One micro-batch: forward, loss, backward.

use super::TrainerError;
use super::batch::MicroBatch;
use super::logprob::{HeadLoss, Scores, backward_through_head, score};
use super::loss::{LossConfig, LossMetrics, TokenTerm};
use super::value::ValueHead;
use crate::engine::model::{Adapters, Decoder, Gradients};

/// How a micro-batch goes through the model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PassConfig {
    /// What logits are divided by: the sampler's temperature.
    pub temperature: f64,
    /// Run each layer again in the backward pass rather than keep what it made.
    pub recompute: bool,
}

impl Default for PassConfig {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            recompute: false,
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
    let (hidden, tape) = decoder.forward(&micro.batch, pass.recompute)?;
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
        let below = micro.sampled[target] - logprob;
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
    let (hidden, tape) = decoder.forward(&micro.batch, pass.recompute)?;
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
