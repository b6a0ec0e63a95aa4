//! Which values make sense, alone and together.

use std::time::Duration;

use bytesize::ByteSize;

use super::{
    ComputeDtype, ConfigError, Dtype, Issue, Response, RewardAggregation, RunConfig,
    SamplerCorrection, TrainMode,
};
use super::{actor, environment};
use crate::address::shown;
use crate::grader::RewardTerms;
use crate::sandbox::RuntimeName;

/// `CPython` itself needs about 40 MiB; wasm32 can address 4 GiB.
const MEMORY: (ByteSize, ByteSize) = (ByteSize::mib(64), ByteSize::gib(4));

/// The science runtime needs 120 MiB for itself.
const SCIENCE_MEMORY: ByteSize = ByteSize::mib(160);

/// The modules that can be trained in full beside an adapter.
const SAVED_MODULES: [&str; 3] = ["lm_head", "embed_tokens", "model.embed_tokens"];

/// Longer than any scoring, short enough that a lost call does not look like a hung run.
const MAX_DEADLINE: Duration = Duration::from_secs(600);

/// More episodes, turns or tokens than any machine has memory for; products of two still fit.
pub(super) const MAX_COUNT: usize = 1_000_000;
/// More processes than any machine has cores.
const MAX_WORKERS: usize = 1024;

/// Collects what is wrong.
pub(super) struct Issues(Vec<Issue>);

impl Issues {
    #[expect(
        clippy::needless_pass_by_value,
        reason = "checks read better without a borrow"
    )]
    pub(super) fn require(
        &mut self,
        holds: bool,
        key: impl Into<String>,
        value: impl ToString,
        remedy: &str,
    ) {
        if !holds {
            self.0.push(Issue {
                key: key.into(),
                value: value.to_string(),
                remedy: remedy.to_owned(),
            });
        }
    }

    fn require_positive(&mut self, key: &str, value: f64) {
        let holds = value > 0.0 && value.is_finite();
        self.require(holds, key, value, "make it above 0");
    }

    fn require_not_negative(&mut self, key: &str, value: f64) {
        let holds = value >= 0.0 && value.is_finite();
        self.require(holds, key, value, "make it at least 0");
    }

    pub(super) fn require_tool_output(&mut self, key: &str, output: Option<ByteSize>) {
        self.require(
            output.is_none_or(|output| output >= ByteSize::b(256)),
            key,
            output.unwrap_or_default().as_u64(),
            "make it at least 256B, or error messages lose their end",
        );
    }

    pub(super) fn require_fuel(&mut self, key: &str, fuel: Option<u64>) {
        self.require(
            fuel.is_none_or(|fuel| fuel >= 1_000_000_000 && i64::try_from(fuel).is_ok()),
            key,
            fuel.unwrap_or_default(),
            "make it at least 1000000000, or imports alone may use it up",
        );
    }

    pub(super) fn require_deadline(&mut self, key: &str, deadline: Option<Duration>) {
        let range = Duration::from_millis(10)..=MAX_DEADLINE;
        self.require(
            deadline.is_none_or(|deadline| range.contains(&deadline)),
            key,
            format!("{:?}", deadline.unwrap_or_default()),
            "make it from 10ms to 10m",
        );
    }
}

impl RunConfig {
    /// Checks that the values make sense, alone and together.
    ///
    /// # Errors
    ///
    /// Fails with all keys that are wrong, each with its value and a remedy.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let mut issues = Issues(Vec::new());
        self.validate_source(&mut issues);
        self.validate_rollout(&mut issues);
        validate_reward(&self.reward, "reward", &mut issues);
        environment::validate(self, &mut issues);
        self.validate_sandbox(&mut issues);
        actor::validate(self, &mut issues);
        self.validate_trainer(&mut issues);
        self.validate_eval(&mut issues);
        self.validate_watch(&mut issues);
        if issues.0.is_empty() {
            Ok(())
        } else {
            Err(ConfigError::Invalid { issues: issues.0 })
        }
    }

    fn validate_source(&self, issues: &mut Issues) {
        let Self { model, task, .. } = self;
        issues.require(
            i64::try_from(self.seed).is_ok(),
            "seed",
            self.seed,
            "TOML integers end at 9223372036854775807, so choose a smaller one",
        );
        issues.require(
            !model.path.is_empty(),
            "model.path",
            &model.path,
            "give a checkpoint folder, a GGUF file or a hub repository such as `Qwen/Qwen3-0.6B`; without \
             `--config`, it is the carried starter model",
        );
        issues.require(
            model.adapter.is_none() || self.trainer.mode == TrainMode::Lora,
            "model.adapter",
            model.adapter.as_deref().unwrap_or_default(),
            "an adapter can be trained on only with `trainer.mode = \"lora\"`",
        );
        issues.require(
            model.compute_dtype == ComputeDtype::F32
                || matches!(model.dtype, Dtype::Auto | Dtype::Bf16),
            "model.dtype",
            model.dtype.name(),
            "make it \"bf16\" or leave it out: with `model.compute_dtype = \"bf16\"` weights are held in \
             nothing else",
        );
        issues.require(
            task.limit != Some(0),
            "task.limit",
            0,
            "leave it out for all tasks",
        );
        issues.require(
            self.eval.limit != Some(0),
            "eval.limit",
            0,
            "leave it out for all tasks",
        );
        let url = self.log.http.as_deref().unwrap_or("http://");
        issues.require(
            url.starts_with("http://") || url.starts_with("https://"),
            "log.http",
            shown(url),
            "give a URL that starts with `http://` or `https://`",
        );
    }

    fn validate_rollout(&self, issues: &mut Issues) {
        let rollout = &self.rollout;
        let least = if self.trainer.advantage.is_token_level() {
            1
        } else {
            2
        };
        issues.require(
            (least..=MAX_COUNT).contains(&rollout.group_size),
            "rollout.group_size",
            rollout.group_size,
            "make it from 2 to 1000000: a sample is judged against its group",
        );
        for (key, value) in [
            ("rollout.groups_per_step", rollout.groups_per_step),
            ("rollout.max_turns", rollout.max_turns),
            ("rollout.max_new_tokens", rollout.max_new_tokens),
        ] {
            let fits = (1..=MAX_COUNT).contains(&value);
            issues.require(fits, key, value, "make it from 1 to 1000000");
        }
        issues.require(
            rollout.group_size.saturating_mul(rollout.groups_per_step) <= MAX_COUNT,
            "rollout.groups_per_step",
            rollout.groups_per_step,
            "make it fewer: a step would have more than 1000000 episodes",
        );
        issues.require(
            rollout.max_total_tokens > rollout.max_new_tokens,
            "rollout.max_total_tokens",
            rollout.max_total_tokens,
            &format!(
                "make it more than `rollout.max_new_tokens` ({}), to leave room for the prompt",
                rollout.max_new_tokens
            ),
        );
        issues.require(
            rollout.max_cache_tokens >= rollout.max_total_tokens,
            "rollout.max_cache_tokens",
            rollout.max_cache_tokens,
            &format!(
                "make it at least `rollout.max_total_tokens` ({}), or no episode fits",
                rollout.max_total_tokens
            ),
        );
        issues.require(
            rollout.max_step_tokens != Some(0),
            "rollout.max_step_tokens",
            0,
            "make it at least 1, or leave it out",
        );
        issues.require(
            (1..=1000).contains(&rollout.max_off_policy_steps),
            "rollout.max_off_policy_steps",
            rollout.max_off_policy_steps,
            "make it from 1 to 1000",
        );
        issues.require(
            rollout.deadline != Some(Duration::ZERO),
            "rollout.deadline",
            "0s",
            "make it longer than any episode, or leave it out",
        );
        if let Some(tokens) = rollout.max_step_tokens {
            for (holds, why) in [
                (
                    !self.trainer.dynamic_sampling,
                    "leave it out: with `trainer.dynamic_sampling` a step's groups have to be whole",
                ),
                (
                    self.trainer.max_processes == 1,
                    "leave it out: with `trainer.max_processes` above 1 no process keeps episodes",
                ),
                (
                    rollout.max_thinking_tokens.is_none(),
                    "leave it out: with `rollout.max_thinking_tokens` a turn cannot be continued",
                ),
                (
                    rollout.agent.is_none(),
                    "leave it out: a program (`rollout.agent`) cannot wait for the next step",
                ),
            ] {
                issues.require(holds, "rollout.max_step_tokens", tokens, why);
            }
        }
        issues.require(
            (0.001..=10.0).contains(&rollout.temperature),
            "rollout.temperature",
            rollout.temperature,
            "make it from 0.001 to 10: samples that are all alike teach nothing",
        );
        issues.require_tool_output("rollout.tool_output", Some(rollout.tool_output));
        if let Some(agent) = &rollout.agent {
            issues.require(
                agent
                    .command
                    .first()
                    .is_some_and(|program| !program.is_empty()),
                "rollout.agent.command",
                format!("{:?}", agent.command),
                "give the program and its arguments, such as `[\"python3\", \"agent.py\"]`",
            );
            issues.require(
                (1..=MAX_WORKERS).contains(&agent.concurrency),
                "rollout.agent.concurrency",
                agent.concurrency,
                &format!("make it 1 to {MAX_WORKERS}"),
            );
            // What it samples, and how long it takes, is the agent's own affair; its model computes on the
            // threads that a gradient does.
            for (key, is_given) in [
                ("rollout.deadline", rollout.deadline.is_some()),
                (
                    "rollout.max_thinking_tokens",
                    rollout.max_thinking_tokens.is_some(),
                ),
                ("trainer.async_level", self.trainer.async_level > 0),
            ] {
                issues.require(
                    !is_given,
                    key,
                    "a value",
                    "leave it out: a program (`rollout.agent`) has its own limits, such as \
                     `rollout.agent.timeout`, and is not run ahead",
                );
            }
            issues.require(
                !agent.timeout.is_zero(),
                "rollout.agent.timeout",
                "0s",
                "make it above 0s",
            );
        }
    }

    fn validate_sandbox(&self, issues: &mut Issues) {
        let sandbox = &self.sandbox;
        issues.require(
            (MEMORY.0..=MEMORY.1).contains(&sandbox.memory),
            "sandbox.memory",
            sandbox.memory,
            "make it from 64MiB, which the interpreter needs, to 4GiB, which wasm32 can address",
        );
        let is_science = sandbox.runtime == RuntimeName::Science;
        issues.require(
            !is_science || sandbox.memory >= SCIENCE_MEMORY,
            "sandbox.memory",
            sandbox.memory,
            "make it at least 160MiB, most of which the science runtime needs for itself",
        );
        issues.require(
            !is_science || sandbox.wheels.is_empty(),
            "sandbox.wheels",
            format!("{:?}", sandbox.wheels),
            "leave it empty: the science runtime takes no further packages",
        );
        for (key, fuel) in [
            ("sandbox.fuel", sandbox.fuel),
            ("sandbox.grade_fuel", sandbox.grade_fuel),
        ] {
            issues.require_fuel(key, Some(fuel));
        }
        for (key, deadline) in [
            ("sandbox.deadline", sandbox.deadline),
            ("sandbox.grade_deadline", sandbox.grade_deadline),
        ] {
            issues.require_deadline(key, Some(deadline));
        }
        issues.require(
            sandbox.workers <= MAX_WORKERS,
            "sandbox.workers",
            sandbox.workers,
            "make it at most 1024; one for each core is best",
        );
        issues.require(
            sandbox.output >= ByteSize::b(256) && sandbox.output <= ByteSize::mib(64),
            "sandbox.output",
            sandbox.output,
            "make it from 256B to 64MiB: it is held in memory for each instance",
        );
    }

    fn validate_trainer(&self, issues: &mut Issues) {
        let trainer = &self.trainer;
        issues.require(
            trainer.beta == 0.0 || trainer.mode == TrainMode::Lora,
            "trainer.beta",
            trainer.beta,
            "make it 0 or use `trainer.mode = \"lora\"`: the reference is the model with its adapter off",
        );
        issues.require(
            trainer.steps >= 1,
            "trainer.steps",
            trainer.steps,
            "make it at least 1",
        );
        issues.require(
            trainer.learning_rate > 0.0 && trainer.learning_rate <= 0.1,
            "trainer.learning_rate",
            trainer.learning_rate,
            "make it above 0 and at most 0.1; LoRA takes about 5e-5, full fine-tuning 1e-6",
        );
        for (key, beta) in [
            ("trainer.adam_beta1", trainer.adam_beta1),
            ("trainer.adam_beta2", trainer.adam_beta2),
        ] {
            issues.require(
                (0.0..1.0).contains(&beta),
                key,
                beta,
                "make it from 0 to below 1",
            );
        }
        for (key, value) in [
            ("trainer.adam_epsilon", trainer.adam_epsilon),
            ("trainer.max_grad_norm", trainer.max_grad_norm),
            ("trainer.lora_alpha", trainer.lora_alpha),
        ] {
            issues.require_positive(key, value);
        }
        for (key, value) in [
            ("trainer.weight_decay", trainer.weight_decay),
            ("trainer.beta", trainer.beta),
        ] {
            issues.require_not_negative(key, value);
        }
        issues.require(
            trainer.clip_low > 0.0 && trainer.clip_low < 1.0,
            "trainer.clip_low",
            trainer.clip_low,
            "make it above 0 and below 1: ratios are clipped to at least `1 - clip_low`",
        );
        issues.require(
            trainer.clip_high > 0.0 && trainer.clip_high.is_finite(),
            "trainer.clip_high",
            trainer.clip_high,
            "make it above 0: ratios are clipped to at most `1 + clip_high`",
        );
        self.validate_loss(issues);
        issues.require(
            trainer.num_iterations >= 1,
            "trainer.num_iterations",
            trainer.num_iterations,
            "make it at least 1",
        );
        issues.require(
            trainer.async_level <= 1,
            "trainer.async_level",
            trainer.async_level,
            "make it 0, or 1 for episodes that are one step old",
        );
        issues.require(
            (1..=self.rollout.groups_per_step).contains(&trainer.max_processes),
            "trainer.max_processes",
            trainer.max_processes,
            &format!(
                "make it from 1 to `rollout.groups_per_step` ({}): a process takes whole groups",
                self.rollout.groups_per_step
            ),
        );
        issues.require(
            trainer.micro_batch_tokens >= self.rollout.max_total_tokens,
            "trainer.micro_batch_tokens",
            trainer.micro_batch_tokens,
            &format!(
                "make it at least `rollout.max_total_tokens` ({}), so that an episode fits",
                self.rollout.max_total_tokens
            ),
        );
        issues.require(
            (1..=1024).contains(&trainer.lora_rank),
            "trainer.lora_rank",
            trainer.lora_rank,
            "make it from 1 to 1024, or set `trainer.mode = \"full\"`",
        );
        issues.require(
            trainer.mode == TrainMode::Full || !trainer.lora_targets.is_empty(),
            "trainer.lora_targets",
            "[]",
            "name a projection such as `q_proj`, or set `trainer.mode = \"full\"`",
        );
        issues.require(
            (0.0..1.0).contains(&trainer.lora_dropout),
            "trainer.lora_dropout",
            trainer.lora_dropout,
            "make it from 0 to below 1",
        );
        let drops = trainer.mode == TrainMode::Lora && trainer.lora_dropout > 0.0;
        issues.require(
            !drops || self.model.compute_dtype == ComputeDtype::F32,
            "trainer.lora_dropout",
            trainer.lora_dropout,
            "make it 0, or leave out `model.compute_dtype`: in bf16, what is multiplied is kept rounded",
        );
        // What is dropped would be taken for what lies between the policy that sampled and the one that learns.
        let sampler_correction = trainer.sampler_correction != SamplerCorrection::Off;
        for (key, is_given) in [
            ("trainer.sampler_correction", sampler_correction),
            (
                "trainer.off_policy_threshold",
                trainer.off_policy_threshold.is_some(),
            ),
            ("trainer.async_level", trainer.async_level > 0),
            (
                "rollout.max_step_tokens",
                self.rollout.max_step_tokens.is_some(),
            ),
        ] {
            issues.require(
                !(drops && is_given),
                "trainer.lora_dropout",
                trainer.lora_dropout,
                &format!("make it 0, or leave out `{key}`: ratios to an older policy need a pass that drops nothing"),
            );
        }
        for name in &trainer.modules_to_save {
            issues.require(
                SAVED_MODULES.contains(&name.as_str()),
                "trainer.modules_to_save",
                name,
                "name `lm_head`, `embed_tokens` or both; for other modules set `trainer.mode = \"full\"`",
            );
        }
        issues.require(
            !trainer.ensure_weight_tying || !trainer.modules_to_save.is_empty(),
            "trainer.ensure_weight_tying",
            trainer.ensure_weight_tying,
            "name `lm_head` or `embed_tokens` in `trainer.modules_to_save`, or leave it out",
        );
        issues.require(
            trainer.keep_checkpoints >= 1,
            "trainer.keep_checkpoints",
            trainer.keep_checkpoints,
            "make it at least 1",
        );
    }

    fn validate_loss(&self, issues: &mut Issues) {
        let trainer = &self.trainer;
        for (key, value) in [
            ("trainer.advantage_epsilon", trainer.advantage_epsilon),
            ("trainer.cispo_max", trainer.cispo_max),
            ("trainer.sapo_tau_positive", trainer.sapo_tau_positive),
            ("trainer.sapo_tau_negative", trainer.sapo_tau_negative),
            ("trainer.dppo_threshold", trainer.dppo_threshold),
            (
                "trainer.sampler_correction_max",
                trainer.sampler_correction_max,
            ),
            ("trainer.max_kl_sample_train", trainer.max_kl_sample_train),
            ("trainer.value_learning_rate", trainer.value_learning_rate),
            ("trainer.value_clip", trainer.value_clip),
        ] {
            issues.require_positive(key, value);
        }
        for (key, value) in [
            ("trainer.dppo_kl", trainer.dppo_kl),
            ("trainer.overlong_weight", trainer.overlong_weight),
            ("trainer.value_trunk_coef", trainer.value_trunk_coef),
        ] {
            issues.require_not_negative(key, value);
        }
        for (key, factor) in [
            ("trainer.gamma", trainer.gamma),
            ("trainer.gae_lambda", trainer.gae_lambda),
        ] {
            let holds = (0.0..=1.0).contains(&factor);
            issues.require(holds, key, factor, "make it from 0 to 1");
        }
        issues.require(
            !trainer.advantage.is_token_level()
                || trainer.reward_aggregation == RewardAggregation::Sum,
            "trainer.reward_aggregation",
            "gdpo",
            "make it `sum`: with this `trainer.advantage` rewards are not compared within groups",
        );
        issues.require(
            (0.0..=trainer.cispo_max).contains(&trainer.cispo_min),
            "trainer.cispo_min",
            trainer.cispo_min,
            "make it from 0 to `trainer.cispo_max`: both bound the ratio itself, not its distance from 1",
        );
        issues.require(
            trainer
                .dual_clip
                .is_none_or(|bound| bound > 1.0 && bound.is_finite()),
            "trainer.dual_clip",
            trainer.dual_clip.unwrap_or_default(),
            "make it above 1, usually 3, or leave it out",
        );
        issues.require(
            trainer.entropy_coef.is_finite(),
            "trainer.entropy_coef",
            trainer.entropy_coef,
            "make it a finite number",
        );
        let minimum = trainer.sampler_correction_min;
        issues.require(
            minimum.is_none_or(|min| (0.0..=trainer.sampler_correction_max).contains(&min)),
            "trainer.sampler_correction_min",
            minimum.unwrap_or_default(),
            "make it from 0 to `trainer.sampler_correction_max`, or leave it out",
        );
        issues.require(
            trainer
                .off_policy_threshold
                .is_none_or(|threshold| threshold > 0.0),
            "trainer.off_policy_threshold",
            trainer.off_policy_threshold.unwrap_or_default(),
            "make it above 0, or leave it out",
        );
        issues.require(
            !trainer.kl_in_reward || trainer.beta > 0.0,
            "trainer.kl_in_reward",
            trainer.kl_in_reward,
            "give `trainer.beta`, which it is weighed by",
        );
        issues.require(
            (1..=1000).contains(&trainer.max_draws),
            "trainer.max_draws",
            trainer.max_draws,
            "make it from 1 to 1000",
        );
        issues.require(
            trainer
                .overlong_limit
                .is_none_or(|limit| trainer.overlong_margin <= limit),
            "trainer.overlong_margin",
            trainer.overlong_margin,
            "make it at most `trainer.overlong_limit`",
        );
        let longest = self.rollout.max_total_tokens;
        issues.require(
            trainer.overlong_limit.is_none_or(|limit| limit <= longest),
            "trainer.overlong_limit",
            trainer.overlong_limit.unwrap_or_default(),
            &format!(
                "make it at most `rollout.max_total_tokens` ({longest}): no answer gets longer, so none \
                 would lose what it should"
            ),
        );
    }

    fn validate_watch(&self, issues: &mut Issues) {
        let watch = &self.watch;
        issues.require(
            watch.collapse != Response::Skip,
            "watch.collapse",
            "skip",
            "make it `warn` or `stop`: a policy that learns nothing more would never rise again",
        );
        issues.require_positive("watch.max_ratio", watch.max_ratio);
        issues.require_positive("watch.max_reward_drop", watch.max_reward_drop);
        issues.require(
            watch.flat_steps >= 1,
            "watch.flat_steps",
            watch.flat_steps,
            "make it at least 1",
        );
        for (key, share) in [
            ("watch.max_truncated", watch.max_truncated),
            ("watch.max_unscorable", watch.max_unscorable),
        ] {
            let holds = (0.0..=1.0).contains(&share);
            issues.require(holds, key, share, "make it from 0 to 1");
        }
    }

    fn validate_eval(&self, issues: &mut Issues) {
        let eval = &self.eval;
        issues.require(
            (1..=10_000).contains(&eval.samples),
            "eval.samples",
            eval.samples,
            "make it from 1 to 10000",
        );
        issues.require(
            eval.temperature == 0.0 || (0.001..=10.0).contains(&eval.temperature),
            "eval.temperature",
            eval.temperature,
            "make it 0, or from 0.001 to 10",
        );
        issues.require(
            eval.samples <= 1 || eval.temperature > 0.0,
            "eval.samples",
            eval.samples,
            "at `eval.temperature = 0` all samples are alike; make it 1 or raise the temperature",
        );
        let fits = |k: &u32| *k >= 1 && usize::try_from(*k).is_ok_and(|k| k <= eval.samples);
        issues.require(
            !eval.k.is_empty() && eval.k.iter().all(fits),
            "eval.k",
            format!("{:?}", eval.k),
            &format!("name each from 1 to `eval.samples` ({})", eval.samples),
        );
    }
}

/// Checks the reward terms of a section.
pub(super) fn validate_reward(reward: &RewardTerms, section: &str, issues: &mut Issues) {
    for (name, weight) in reward.weights() {
        issues.require(
            weight.is_finite(),
            format!("{section}.{name}"),
            weight,
            "make it a finite number",
        );
    }
    issues.require(
        (0.0..=1.0).contains(&reward.fuel_penalty),
        format!("{section}.fuel_penalty"),
        reward.fuel_penalty,
        &format!(
            "make it from 0 to 1: it is the share of `{section}.passed` that all the fuel costs"
        ),
    );
    issues.require(
        reward.length_margin <= reward.length_limit,
        format!("{section}.length_margin"),
        reward.length_margin,
        &format!("make it at most `{section}.length_limit`"),
    );
}
