//! The tokens of an episode, as the model saw and sampled them.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::TraceError;

/// Log-softmax in f32 may come out this much above 0 for a token that is nearly certain.
const LOGPROB_ROUNDING: f32 = 1e-4;

/// Token ids with a log-probability and a loss mask each.
///
/// Three invariants hold, whoever builds or reads one: the three sequences have the same length;
/// the mask is 1 only for ids that the policy sampled, all but those that
/// [are learned from elsewhere](Self::make_context); and a log-probability is 0 where the mask
/// is 0. Template scaffolding, tool results and tokens that a harness adds after a cut-off are
/// observations, even when their text stands inside an assistant message.
///
/// # Examples
///
/// ```
/// use wardian::trajectory::TokenTrace;
///
/// let mut trace = TokenTrace::new();
/// trace.push_prompt(&[10, 11])?;
/// trace.push_sampled(&[12, 2], &[-0.7, -0.1])?;
/// trace.push_observation(&[13]);
/// assert_eq!(trace.loss_mask(), [0, 0, 1, 1, 0]);
/// assert_eq!(trace.sampled_spans().collect::<Vec<_>>(), [2..4]);
/// # Ok::<(), wardian::trajectory::TraceError>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Parts")]
pub struct TokenTrace {
    prompt_len: usize,
    ids: Vec<u32>,
    logprobs: Vec<f32>,
    loss_mask: Vec<u8>,
}

impl TokenTrace {
    /// Returns an empty trace.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds tokens of the prompt; they come before all others.
    ///
    /// # Errors
    ///
    /// Fails when something else than a prompt has been added already.
    pub fn push_prompt(&mut self, ids: &[u32]) -> Result<(), TraceError> {
        if self.ids.len() > self.prompt_len {
            let position = self.prompt_len;
            return Err(TraceError::Prompt {
                prompt_len: position + ids.len(),
                position,
            });
        }
        self.push_unsampled(ids);
        self.prompt_len = self.ids.len();
        Ok(())
    }

    /// Adds tokens that the policy sampled, with the log-probability each was sampled with: under
    /// the distribution after temperature, at the time of sampling.
    ///
    /// # Errors
    ///
    /// Fails, and adds nothing, when the lengths differ or a value is no log-probability.
    pub fn push_sampled(&mut self, ids: &[u32], logprobs: &[f32]) -> Result<(), TraceError> {
        if ids.len() != logprobs.len() {
            let (ids, logprobs) = (ids.len(), logprobs.len());
            return Err(TraceError::Lengths {
                ids,
                logprobs,
                mask: ids,
            });
        }
        for (position, value) in (self.ids.len()..).zip(logprobs) {
            check_logprob(position, *value)?;
        }
        self.ids.extend(ids);
        self.logprobs.extend(logprobs);
        self.loss_mask.resize(self.ids.len(), 1);
        Ok(())
    }

    /// Adds tokens that the policy was fed after the prompt: tool results and template text.
    pub fn push_observation(&mut self, ids: &[u32]) {
        self.push_unsampled(ids);
    }

    /// Makes observations of the tokens in `span`, as far as there are any: another trace learns from what was
    /// sampled of them.
    pub fn make_context(&mut self, span: Range<usize>) {
        let span = span.start.min(self.len())..span.end.min(self.len());
        if !span.is_empty() {
            self.loss_mask[span.clone()].fill(0);
            self.logprobs[span].fill(0.0);
        }
    }

    fn push_unsampled(&mut self, ids: &[u32]) {
        self.ids.extend(ids);
        self.logprobs.resize(self.ids.len(), 0.0);
        self.loss_mask.resize(self.ids.len(), 0);
    }

    /// Returns how many tokens there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Returns whether there is no token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Returns how many of the first tokens are the prompt.
    #[must_use]
    pub fn prompt_len(&self) -> usize {
        self.prompt_len
    }

    /// Returns how many tokens were sampled, which is how many the loss is over.
    #[must_use]
    pub fn sampled_len(&self) -> usize {
        self.loss_mask.iter().filter(|mask| **mask == 1).count()
    }

    /// Returns the token ids.
    #[must_use]
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Returns the log-probability each token was sampled with, in nats; 0 for the others.
    #[must_use]
    pub fn logprobs(&self) -> &[f32] {
        &self.logprobs
    }

    /// Returns 1 for each sampled token and 0 for the others.
    #[must_use]
    pub fn loss_mask(&self) -> &[u8] {
        &self.loss_mask
    }

    /// Returns the positions of each unbroken run of sampled tokens.
    pub fn sampled_spans(&self) -> impl Iterator<Item = Range<usize>> {
        let mut end = 0;
        self.loss_mask
            .chunk_by(|left, right| left == right)
            .filter_map(move |run| {
                let start = end;
                end += run.len();
                (run[0] == 1).then_some(start..end)
            })
    }
}

/// Returns an error unless `value` may be the logarithm of a probability.
fn check_logprob(position: usize, value: f32) -> Result<(), TraceError> {
    if value.is_finite() && value <= LOGPROB_ROUNDING {
        Ok(())
    } else {
        Err(TraceError::NotALogprob { position, value })
    }
}

/// A trace as it is read, before its invariants are checked.
#[derive(Deserialize)]
struct Parts {
    prompt_len: usize,
    ids: Vec<u32>,
    logprobs: Vec<f32>,
    loss_mask: Vec<u8>,
}

impl TryFrom<Parts> for TokenTrace {
    type Error = TraceError;

    fn try_from(parts: Parts) -> Result<Self, TraceError> {
        let Parts {
            prompt_len,
            ids,
            logprobs,
            loss_mask,
        } = parts;
        if ids.len() != logprobs.len() || ids.len() != loss_mask.len() {
            let (ids, logprobs, mask) = (ids.len(), logprobs.len(), loss_mask.len());
            return Err(TraceError::Lengths {
                ids,
                logprobs,
                mask,
            });
        }
        for (position, (value, mask)) in logprobs.iter().zip(&loss_mask).enumerate() {
            match mask {
                0 if *value != 0.0 => {
                    return Err(TraceError::LogprobWithoutSample {
                        position,
                        value: *value,
                    });
                }
                0 => {}
                1 => check_logprob(position, *value)?,
                value => {
                    return Err(TraceError::Mask {
                        position,
                        value: *value,
                    });
                }
            }
        }
        let first_sampled = loss_mask
            .iter()
            .position(|mask| *mask == 1)
            .unwrap_or(ids.len());
        if prompt_len > first_sampled {
            return Err(TraceError::Prompt {
                prompt_len,
                position: first_sampled,
            });
        }
        Ok(Self {
            prompt_len,
            ids,
            logprobs,
            loss_mask,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    #[test]
    fn a_refused_push_adds_nothing() {
        let mut trace = TokenTrace::new();
        trace.push_prompt(&[1]).unwrap();
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.5] {
            let error = trace.push_sampled(&[2, 3], &[-1.0, bad]).unwrap_err();
            assert!(
                matches!(error, TraceError::NotALogprob { position: 2, .. }),
                "{error}"
            );
        }
        assert_eq!(
            trace
                .push_sampled(&[2, 3], &[-1.0])
                .unwrap_err()
                .to_string(),
            "trace has 2 ids, 1 log-probabilities and 2 mask entries"
        );
        assert_eq!(trace.len(), 1);
    }

    #[test]
    fn a_prompt_comes_first() {
        let mut trace = TokenTrace::new();
        trace.push_prompt(&[1]).unwrap();
        trace.push_prompt(&[2]).unwrap();
        assert_eq!(trace.prompt_len(), 2);
        trace.push_observation(&[3]);
        assert!(matches!(
            trace.push_prompt(&[4]),
            Err(TraceError::Prompt { position: 2, .. })
        ));
    }

    #[rstest]
    #[case::lengths(
        r#"{"prompt_len":0,"ids":[1,2],"logprobs":[0.0],"loss_mask":[0,0]}"#,
        "trace has 2 ids, 1 log-probabilities and 2 mask entries"
    )]
    #[case::unsampled_logprob(
        r#"{"prompt_len":1,"ids":[1],"logprobs":[-0.5],"loss_mask":[0]}"#,
        "token 0 was not sampled but has log-probability -0.5 instead of 0"
    )]
    #[case::positive(
        r#"{"prompt_len":0,"ids":[1],"logprobs":[0.5],"loss_mask":[1]}"#,
        "token 0 has log-probability 0.5, which is not a finite number of at most 0"
    )]
    #[case::mask(
        r#"{"prompt_len":0,"ids":[1],"logprobs":[0.0],"loss_mask":[2]}"#,
        "token 0 has mask 2 instead of 0 or 1"
    )]
    #[case::prompt_over_sample(
        r#"{"prompt_len":2,"ids":[1,2],"logprobs":[0.0,-1.0],"loss_mask":[0,1]}"#,
        "the prompt ends at 2 but reaches token 1, which is not part of it"
    )]
    #[case::prompt_over_end(
        r#"{"prompt_len":3,"ids":[1],"logprobs":[0.0],"loss_mask":[0]}"#,
        "the prompt ends at 3 but reaches token 1, which is not part of it"
    )]
    fn reading_checks_the_invariants(#[case] json: &str, #[case] expected: &str) {
        let error = serde_json::from_str::<TokenTrace>(json)
            .unwrap_err()
            .to_string();
        assert!(error.starts_with(expected), "{error}");
    }

    #[derive(Debug, Clone)]
    enum Push {
        Sampled(Vec<(u32, f32)>),
        Observation(Vec<u32>),
    }

    fn pushes() -> impl Strategy<Value = Vec<Push>> {
        let logprob = prop_oneof![Just(0.0_f32), -30.0_f32..0.0, -1e-6_f32..0.0];
        let push = prop_oneof![
            proptest::collection::vec((any::<u32>(), logprob), 0..5).prop_map(Push::Sampled),
            proptest::collection::vec(any::<u32>(), 0..5).prop_map(Push::Observation),
        ];
        proptest::collection::vec(push, 0..8)
    }

    proptest! {
        #[test]
        fn what_is_pushed_is_what_is_kept(prompt in proptest::collection::vec(any::<u32>(), 0..5), pushes in pushes()) {
            let mut trace = TokenTrace::new();
            trace.push_prompt(&prompt).unwrap();
            let mut expected: Vec<(u32, f32, u8)> = prompt.iter().map(|id| (*id, 0.0, 0)).collect();
            for push in &pushes {
                match push {
                    Push::Sampled(tokens) => {
                        let (ids, logprobs): (Vec<u32>, Vec<f32>) = tokens.iter().copied().unzip();
                        trace.push_sampled(&ids, &logprobs).unwrap();
                        expected.extend(tokens.iter().map(|(id, logprob)| (*id, *logprob, 1)));
                    }
                    Push::Observation(ids) => {
                        trace.push_observation(ids);
                        expected.extend(ids.iter().map(|id| (*id, 0.0, 0)));
                    }
                }
            }
            let kept: Vec<(u32, f32, u8)> = (0..trace.len())
                .map(|at| (trace.ids()[at], trace.logprobs()[at], trace.loss_mask()[at]))
                .collect();
            prop_assert_eq!(&kept, &expected);
            let spans: usize = trace.sampled_spans().map(|span| span.len()).sum();
            prop_assert_eq!(spans, trace.sampled_len());
            prop_assert!(trace.sampled_spans().all(|span| trace.loss_mask()[span].iter().all(|mask| *mask == 1)));
            // The file keeps every bit of an f32.
            let read: TokenTrace = serde_json::from_str(&serde_json::to_string(&trace).unwrap()).unwrap();
            prop_assert_eq!(read, trace);
        }
    }
}
