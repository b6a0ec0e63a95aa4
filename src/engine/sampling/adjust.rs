//! Changes to the logits before the temperature: biases, a least length, penalties.
//!
//! The formulas are those of vLLM (`vllm/v1/sample`) and, for repetition, of transformers'
//! `RepetitionPenaltyLogitsProcessor` (Keskar et al. 2019, arXiv:1909.05858, section 4.1).

use super::SamplingParams;

/// The tokens before the one to be chosen.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::engine) struct History<'a> {
    /// Everything before the turn.
    pub(in crate::engine) prompt: &'a [u32],
    /// The turn so far.
    pub(in crate::engine) output: &'a [u32],
}

/// Returns the logits `[vocab]` after biases, `min_new_tokens` and penalties.
pub(super) fn adjust(logits: &[f32], params: &SamplingParams, history: History<'_>) -> Vec<f32> {
    let mut logits = logits.to_vec();
    for (&token, &bias) in &params.logit_bias {
        change(&mut logits, token, |logit| logit + bias);
    }
    if history.output.len() < params.min_new_tokens {
        for &token in &params.stop_token_ids {
            change(&mut logits, token, |_| f32::NEG_INFINITY);
        }
    }
    if params.repetition_penalty != 1.0 {
        let penalty = params.repetition_penalty;
        let mut seen = [history.prompt, history.output].concat();
        seen.sort_unstable();
        seen.dedup();
        for token in seen {
            change(&mut logits, token, |logit| {
                if logit > 0.0 {
                    logit / penalty
                } else {
                    logit * penalty
                }
            });
        }
    }
    if params.frequency_penalty != 0.0 || params.presence_penalty != 0.0 {
        let mut output = history.output.to_vec();
        output.sort_unstable();
        for same in output.chunk_by(|left, right| left == right) {
            let penalty = params.frequency_penalty * same.len() as f32 + params.presence_penalty;
            change(&mut logits, same[0], |logit| logit - penalty);
        }
    }
    logits
}

/// Changes one logit; a token beyond the vocabulary has none.
fn change(logits: &mut [f32], token: u32, to: impl FnOnce(f32) -> f32) {
    if let Some(logit) = logits.get_mut(token as usize) {
        *logit = to(*logit);
    }
}
