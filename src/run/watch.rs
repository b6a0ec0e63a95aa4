//! Steps that look wrong: what is wrong with them, why that happens and what helps.

use serde::{Deserialize, Serialize};

use crate::config::{Response, WatchConfig};
use crate::trainer::{StepMetrics, TrainerError};

/// What can look wrong in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Kind {
    NotFinite,
    Drift,
    Ratio,
    Flat,
    Truncated,
    Unscorable,
    Collapse,
}

impl Kind {
    /// Returns likely causes, and what helps against each.
    fn advice(self) -> &'static str {
        match self {
            Self::NotFinite => {
                "the step size is too high (lower `trainer.learning_rate`, add `trainer.warmup_steps`), \
                 or `trainer.kl_estimator = \"k3\"` met a token that the reference excludes (take `k2`)"
            }
            Self::Drift => {
                "the weights changed since the episodes were sampled (with `trainer.async_level = 1` by a \
                 step that is too large: lower `trainer.learning_rate`; with `rollout.max_step_tokens` by \
                 several steps: lower `rollout.max_off_policy_steps`, too), or the model rounds differently \
                 when it samples (`model.dtype = \"f32\"` tells; `trainer.sampler_correction` helps)"
            }
            Self::Ratio => {
                "too many passes over the same episodes (lower `trainer.num_iterations`) at too high a \
                 step size (lower `trainer.learning_rate` or `trainer.max_grad_norm`)"
            }
            Self::Flat => {
                "the tasks are too hard or too easy for the policy (choose others, or set \
                 `trainer.dynamic_sampling`), groups are too small (`rollout.group_size`), or samples too \
                 alike (`rollout.temperature`); partial rewards such as `reward.test_fraction` tell \
                 failures apart"
            }
            Self::Truncated => {
                "answers do not end (raise `rollout.max_new_tokens`, `rollout.max_total_tokens` or \
                 `rollout.max_turns`, or set `trainer.overlong_limit`), or the model's end-of-turn token \
                 is not the one its `generation_config.json` names"
            }
            Self::Unscorable => {
                "the sandbox, the grader or the server of `[env]` fails: the episodes in `rollouts/` say \
                 why; deadlines are missed where the machine is overloaded (raise `sandbox.deadline`, \
                 `sandbox.grade_deadline` and `rollout.deadline`, lower `rollout.groups_per_step`)"
            }
            Self::Collapse => {
                "the policy left what it could do (go on from an earlier checkpoint with a lower \
                 `trainer.learning_rate`, or hold it with `trainer.beta`), or it found what the reward \
                 does not mean (read the episodes in `rollouts/`)"
            }
        }
    }

    /// Returns what a refused update looks like.
    pub(super) fn of_refusal(error: &TrainerError) -> Option<Self> {
        match error {
            TrainerError::GradientNotFinite { .. } => Some(Self::NotFinite),
            TrainerError::SamplerDrift { .. } => Some(Self::Drift),
            TrainerError::RatioTooLarge { .. } => Some(Self::Ratio),
            _ => None,
        }
    }

    fn response(self, config: &WatchConfig) -> Response {
        match self {
            Self::NotFinite => config.not_finite,
            Self::Drift => config.drift,
            Self::Ratio => config.ratio,
            Self::Flat => config.flat,
            Self::Truncated => config.truncated,
            Self::Unscorable => config.unscorable,
            Self::Collapse => config.collapse,
        }
    }
}

/// Something that looks wrong.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Anomaly {
    pub(super) kind: Kind,
    pub(super) response: Response,
    /// What was found, with its limit, likely causes and remedies.
    pub(super) message: String,
    /// Whether the step before it did not look so.
    pub(super) is_new: bool,
}

/// What is known of a step before its update.
#[derive(Debug, Clone, Copy)]
pub(super) struct Observed {
    /// Share of episodes that a limit cut off.
    pub(super) truncated: f64,
    /// Share of episodes without a score.
    pub(super) unscorable: f64,
    /// Whether no group of the step teaches anything.
    pub(super) is_flat: bool,
    /// Mean reward.
    pub(super) reward: Option<f64>,
}

/// What is remembered from step to step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct WatchState {
    /// Steps in a row that taught nothing.
    flat_steps: u64,
    /// Moving mean of the reward, and the highest that it was.
    reward: Option<(f64, f64)>,
    /// What looked wrong in the last step, and in this one as far as it was looked at.
    active: Vec<Kind>,
    /// What looked wrong in the step before this one.
    #[serde(skip)]
    before: Vec<Kind>,
}

/// Weight of a step's reward in the moving mean: about the last ten steps count.
const REWARD_WEIGHT: f64 = 0.2;

impl WatchState {
    /// Looks at a step before its update: its first look.
    pub(super) fn before_update(
        &mut self,
        config: &WatchConfig,
        observed: Observed,
    ) -> Vec<Anomaly> {
        self.before = std::mem::take(&mut self.active);
        let mut found = Vec::new();
        self.flat_steps = if observed.is_flat {
            self.flat_steps + 1
        } else {
            0
        };
        if self.flat_steps >= config.flat_steps {
            let (steps, limit) = (self.flat_steps, config.flat_steps);
            let what =
                format!("all rewards of each group were alike for {steps} steps, at least {limit}");
            found.push((Kind::Flat, what));
        }
        for (kind, name, share, limit) in [
            (
                Kind::Truncated,
                "were cut off",
                observed.truncated,
                config.max_truncated,
            ),
            (
                Kind::Unscorable,
                "could not be scored",
                observed.unscorable,
                config.max_unscorable,
            ),
        ] {
            if share > limit {
                let (share, limit) = (share * 100.0, limit * 100.0);
                found.push((
                    kind,
                    format!("{share:.0} % of the episodes {name}, more than {limit:.0} %"),
                ));
            }
        }
        if let Some(reward) = observed.reward {
            let (mean, best) = self.reward.unwrap_or((reward, reward));
            let mean = mean + REWARD_WEIGHT * (reward - mean);
            let best = best.max(mean);
            self.reward = Some((mean, best));
            let (drop, limit) = (best - mean, config.max_reward_drop);
            if drop > limit {
                let what =
                    format!("the reward fell by {drop:.3} from {best:.3}, more than {limit}");
                found.push((Kind::Collapse, what));
            }
        }
        (found.into_iter())
            .map(|(kind, what)| self.anomaly(config, kind, &what))
            .collect()
    }

    /// Looks at a step behind its update.
    pub(super) fn after_update(
        &mut self,
        config: &WatchConfig,
        max_drift: f64,
        metrics: &StepMetrics,
    ) -> Vec<Anomaly> {
        let mut found = Vec::new();
        let drift = metrics.kl_sample_train.abs();
        if drift > max_drift {
            let what = format!(
                "the trainer's log-probabilities lie {drift:.4} nats a token from those sampled with, \
                 more than {max_drift}"
            );
            found.push(self.anomaly(config, Kind::Drift, &what));
        }
        let (ratio, limit) = (metrics.ratio_max, config.max_ratio);
        if ratio > limit {
            let what = format!("a token became {ratio:.3e} times as likely, more than {limit}");
            found.push(self.anomaly(config, Kind::Ratio, &what));
        }
        found
    }

    /// Returns what is to be done about a step whose update was refused; none where that is not for a
    /// run to decide.
    pub(super) fn of_refusal(
        &mut self,
        config: &WatchConfig,
        error: &TrainerError,
    ) -> Option<Anomaly> {
        let kind = Kind::of_refusal(error)?;
        Some(self.anomaly(config, kind, &format!("the update was left out: {error}")))
    }

    /// Returns what was found, and remembers it for the next step.
    fn anomaly(&mut self, config: &WatchConfig, kind: Kind, what: &str) -> Anomaly {
        self.active.push(kind);
        Anomaly {
            kind,
            response: kind.response(config),
            message: format!("{what}; likely: {}", kind.advice()),
            is_new: !self.before.contains(&kind),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOUND: Observed = Observed {
        truncated: 0.1,
        unscorable: 0.0,
        is_flat: false,
        reward: Some(0.9),
    };

    fn kinds(found: &[Anomaly]) -> Vec<Kind> {
        found.iter().map(|anomaly| anomaly.kind).collect()
    }

    #[test]
    fn what_looks_wrong_is_named_once_and_until_it_ends() {
        let config = WatchConfig::default();
        let mut state = WatchState::default();
        assert_eq!(state.before_update(&config, SOUND), []);
        let cut = Observed {
            truncated: 0.8,
            unscorable: 0.5,
            ..SOUND
        };
        let found = state.before_update(&config, cut);
        assert_eq!(kinds(&found), [Kind::Truncated, Kind::Unscorable]);
        assert!(found.iter().all(|anomaly| anomaly.is_new));
        assert!(
            found[0]
                .message
                .starts_with("80 % of the episodes were cut off, more than 50 %")
        );
        assert!(found[0].message.contains("rollout.max_new_tokens"));
        let found = state.before_update(&config, cut);
        assert!(found.iter().all(|anomaly| !anomaly.is_new));
        assert_eq!(state.before_update(&config, SOUND), []);
        assert!(state.before_update(&config, cut)[0].is_new);
    }

    #[test]
    fn what_an_update_shows_is_new_once_too() {
        let config = WatchConfig {
            not_finite: Response::Skip,
            truncated: Response::Warn,
            ..WatchConfig::default()
        };
        let metrics = StepMetrics {
            kl_sample_train: 0.2,
            ratio_max: 1e4,
            ..StepMetrics::default()
        };
        let sound = StepMetrics::default();
        let refusal = TrainerError::GradientNotFinite { norm: f64::NAN };
        let cut = Observed {
            truncated: 0.8,
            ..SOUND
        };
        let new = |found: &[Anomaly]| found.iter().map(|found| found.is_new).collect::<Vec<_>>();
        // A step's findings are those of all looks at it, and a saved run remembers them.
        let step = |state: &mut WatchState, metrics: &StepMetrics, is_refused: bool| {
            let mut found = state.before_update(&config, cut);
            if is_refused {
                found.extend(state.of_refusal(&config, &refusal));
            }
            found.extend(state.after_update(&config, 0.05, metrics));
            let saved = serde_json::to_string(state).unwrap();
            *state = serde_json::from_str(&saved).unwrap();
            found
        };
        let mut state = WatchState::default();
        let first = step(&mut state, &metrics, true);
        let all = [Kind::Truncated, Kind::NotFinite, Kind::Drift, Kind::Ratio];
        assert_eq!(kinds(&first), all);
        assert_eq!(new(&first), [true; 4]);
        assert_eq!(new(&step(&mut state, &metrics, true)), [false; 4]);
        // What ended and comes again is new; what stayed is not.
        assert_eq!(kinds(&step(&mut state, &sound, false)), [Kind::Truncated]);
        assert_eq!(
            new(&step(&mut state, &metrics, true)),
            [false, true, true, true]
        );
    }

    #[test]
    fn flat_steps_count_in_a_row() {
        let config = WatchConfig {
            flat_steps: 3,
            ..WatchConfig::default()
        };
        let mut state = WatchState::default();
        let flat = Observed {
            is_flat: true,
            ..SOUND
        };
        let mut see = |observed| kinds(&state.before_update(&config, observed));
        assert_eq!([see(flat), see(flat), see(SOUND)], [[], [], []]);
        assert_eq!([see(flat), see(flat)], [[], []]);
        assert_eq!(see(flat), [Kind::Flat]);
    }

    #[test]
    fn a_fall_of_the_reward_is_found_and_noise_is_not() {
        let config = WatchConfig::default();
        let mut state = WatchState::default();
        let at = |reward| Observed {
            reward: Some(reward),
            ..SOUND
        };
        for step in 0..20 {
            let noisy = 0.8 + 0.15 * f64::from(step).sin();
            assert_eq!(state.before_update(&config, at(noisy)), []);
        }
        let saved = serde_json::to_string(&state).unwrap();
        let mut resumed: WatchState = serde_json::from_str(&saved).unwrap();
        let fall = |state: &mut WatchState| -> Vec<Vec<Kind>> {
            (0..10)
                .map(|_| kinds(&state.before_update(&config, at(0.0))))
                .collect()
        };
        let found = fall(&mut state);
        assert_eq!((found[0].len(), &found[9][..]), (0, &[Kind::Collapse][..]));
        assert_eq!(found, fall(&mut resumed), "it is remembered");
    }

    #[test]
    fn an_update_is_judged_by_its_drift_and_its_ratios() {
        let mut state = WatchState::default();
        let mut config = WatchConfig::default();
        let metrics = StepMetrics {
            kl_sample_train: -0.2,
            ratio_max: 1e4,
            ..StepMetrics::default()
        };
        let found = state.after_update(&config, 0.05, &metrics);
        assert_eq!(kinds(&found), [Kind::Drift, Kind::Ratio]);
        assert_eq!(
            state.after_update(&config, 0.05, &StepMetrics::default()),
            []
        );
        let error = TrainerError::GradientNotFinite { norm: f64::NAN };
        let found = state.of_refusal(&config, &error).unwrap();
        assert_eq!(
            (found.kind, found.response),
            (Kind::NotFinite, Response::Stop)
        );
        assert!(found.message.contains("likely: the step size is too high"));
        config.not_finite = Response::Skip;
        let found = state.of_refusal(&config, &error).unwrap();
        assert!(
            found.message.contains("gradient norm is NaN"),
            "{}",
            found.message
        );
        let other = TrainerError::FirstTokenInLoss { sequence: 0 };
        assert_eq!(state.of_refusal(&config, &other), None);
    }
}
