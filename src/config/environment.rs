//! Environments: tasks with a weight and settings of their own, several of which may share a run.

use std::time::Duration;

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};

use super::validate::{Issues, MAX_COUNT, validate_reward};
use super::{Curriculum, RemoteConfig, RewardAggregation, RunConfig, TaskConfig, remote, units};
use crate::address::shown;
use crate::grader::RewardTerms;
use crate::task::Split;

/// The longest name of an environment: it is in the name of each of its tasks and metrics.
const MAX_NAME: usize = 64;

/// One of several environments.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EnvironmentConfig {
    /// The environment's part of the run's groups, over the sum of all weights; 1 unless given. After any
    /// number of steps it has had its part to within one group.
    pub weight: f64,
    /// The tasks to learn from, as `task.path`; has to be given, unless `env.episodes` is.
    pub path: String,
    /// The split to learn from, as `task.split`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<Split>,
    /// The tasks to measure on, as `task.eval_path`; no environment may learn from them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_path: Option<String>,
    /// The split to measure on, as `task.eval_split`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_split: Option<Split>,
    /// As `task.visible_tests`, and that unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub visible_tests: Option<usize>,
    /// As `task.challenge_tests`, and that unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub challenge_tests: Option<bool>,
    /// As `task.grader`, and that unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grader: Option<String>,
    /// As `task.limit`, and that unless given. `eval.limit` holds for each environment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// As `task.curriculum`, and that unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub curriculum: Option<Curriculum>,
    /// Whether tools are offered to a policy whose chat template knows them; true unless given.
    pub tools: bool,
    /// As `rollout.max_turns`, and that unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_turns: Option<usize>,
    /// As `rollout.max_new_tokens`, and that unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_new_tokens: Option<usize>,
    /// As `rollout.system_prompt`, and that unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_prompt: Option<String>,
    /// As `rollout.tool_output`, and that unless given.
    #[serde(
        with = "units::optional_byte_size",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<units::SizeText>")]
    pub tool_output: Option<ByteSize>,
    /// As `sandbox.fuel`, and that unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fuel: Option<u64>,
    /// As `sandbox.deadline`, and that unless given.
    #[serde(
        with = "units::optional_duration",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<units::DurationText>")]
    pub deadline: Option<Duration>,
    /// A table with the keys of `[env]`: the environment is one of another server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub env: Option<RemoteConfig>,
    /// A table with the keys of `[reward]`, in place of that whole section; that unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reward: Option<RewardTerms>,
}

impl Default for EnvironmentConfig {
    fn default() -> Self {
        Self {
            weight: 1.0,
            path: String::new(),
            split: None,
            eval_path: None,
            eval_split: None,
            visible_tests: None,
            challenge_tests: None,
            grader: None,
            limit: None,
            curriculum: None,
            tools: true,
            max_turns: None,
            max_new_tokens: None,
            system_prompt: None,
            tool_output: None,
            fuel: None,
            deadline: None,
            env: None,
            reward: None,
        }
    }
}

impl EnvironmentConfig {
    /// Returns the run that has this environment alone: its tasks as `[task]`, and its settings in place
    /// of the run's.
    #[must_use]
    pub fn alone(&self, run: &RunConfig) -> RunConfig {
        let mut config = run.clone();
        config.environments.clear();
        config.env.clone_from(&self.env);
        let common = &run.task;
        config.task = TaskConfig {
            path: self.path.clone(),
            split: self.split,
            eval_path: self.eval_path.clone(),
            eval_split: self.eval_split,
            visible_tests: self.visible_tests.unwrap_or(common.visible_tests),
            challenge_tests: self.challenge_tests.unwrap_or(common.challenge_tests),
            grader: self.grader.clone().or_else(|| common.grader.clone()),
            limit: self.limit.or(common.limit),
            curriculum: self.curriculum.unwrap_or(common.curriculum),
        };
        let rollout = &mut config.rollout;
        rollout.max_turns = self.max_turns.unwrap_or(rollout.max_turns);
        rollout.max_new_tokens = self.max_new_tokens.unwrap_or(rollout.max_new_tokens);
        if self.system_prompt.is_some() {
            rollout.system_prompt.clone_from(&self.system_prompt);
        }
        rollout.tool_output = self.tool_output.unwrap_or(rollout.tool_output);
        let sandbox = &mut config.sandbox;
        sandbox.fuel = self.fuel.unwrap_or(sandbox.fuel);
        sandbox.deadline = self.deadline.unwrap_or(sandbox.deadline);
        if let Some(reward) = &self.reward {
            config.reward = reward.clone();
        }
        config
    }
}

impl RunConfig {
    /// Returns whether programs run here: unless all that the run acts in are environments elsewhere.
    #[must_use]
    pub fn runs_programs(&self) -> bool {
        match self.environments.is_empty() {
            true => self.env.is_none(),
            false => (self.environments.values()).any(|environment| environment.env.is_none()),
        }
    }
}

/// Checks the environments of a run.
pub(super) fn validate(run: &RunConfig, issues: &mut Issues) {
    if run.environments.is_empty() {
        remote::validate(run, "", issues);
        if let Some(env) = &run.env {
            let task = &run.task;
            let splits = [("split", task.split), ("eval_split", task.eval_split)];
            let grader = [("grader", task.grader.clone())];
            remote::validate_tasks(env, "task.", splits, &grader, issues);
        }
        return;
    }
    let task = &run.task;
    let split = |split: Option<Split>| split.map_or_else(String::new, |split| split.to_string());
    for (key, value) in [
        ("task.path", task.path.clone()),
        ("task.eval_path", task.eval_path.clone().unwrap_or_default()),
        ("task.split", split(task.split)),
        ("task.eval_split", split(task.eval_split)),
    ] {
        issues.require(
            value.is_empty(),
            key,
            &value,
            "leave it out, or make it an environment of its own: `[environments]` says what is learned from",
        );
    }
    issues.require(
        run.env.is_none(),
        "env",
        run.env
            .as_ref()
            .map_or_else(String::new, |env| shown(&env.url)),
        "make it the `env` of the environments that are there: `environments.NAME.env`",
    );
    for (name, environment) in &run.environments {
        environment.validate(name, run, issues);
        let prefix = format!("environments.{name}.");
        remote::validate(&environment.alone(run), &prefix, issues);
        environment.validate_elsewhere(&prefix, issues);
    }
}

impl EnvironmentConfig {
    /// Refuses what says nothing about an environment elsewhere.
    fn validate_elsewhere(&self, prefix: &str, issues: &mut Issues) {
        let Some(env) = &self.env else { return };
        let splits = [("split", self.split), ("eval_split", self.eval_split)];
        let of_grading = [
            ("grader", self.grader.clone()),
            (
                "visible_tests",
                self.visible_tests.map(|tests| tests.to_string()),
            ),
            (
                "challenge_tests",
                self.challenge_tests.map(|are_used| are_used.to_string()),
            ),
            ("fuel", self.fuel.map(|fuel| fuel.to_string())),
            (
                "deadline",
                self.deadline.map(|deadline| format!("{deadline:?}")),
            ),
            ("reward", self.reward.as_ref().map(|_| "a table".to_owned())),
        ];
        remote::validate_tasks(env, prefix, splits, &of_grading, issues);
    }

    fn validate(&self, name: &str, run: &RunConfig, issues: &mut Issues) {
        let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_".contains(letter);
        issues.require(
            (1..=MAX_NAME).contains(&name.len()) && name.chars().all(is_plain),
            "environments",
            name,
            "name an environment with 1 to 64 letters, digits, `-` or `_`",
        );
        let key = |key: &str| format!("environments.{name}.{key}");
        issues.require(
            self.weight > 0.0 && self.weight.is_finite(),
            key("weight"),
            self.weight,
            "make it above 0, or leave the environment out",
        );
        issues.require(
            !self.path.is_empty() || self.env.is_some(),
            key("path"),
            &self.path,
            "give a task file, a folder or a hub data set",
        );
        issues.require(
            self.limit != Some(0),
            key("limit"),
            0,
            "leave it out for all tasks",
        );
        let turns = self.max_turns.unwrap_or(1);
        issues.require(
            (1..=MAX_COUNT).contains(&turns),
            key("max_turns"),
            turns,
            "make it from 1 to 1000000",
        );
        let (tokens, total) = (
            self.max_new_tokens.unwrap_or(1),
            run.rollout.max_total_tokens,
        );
        issues.require(
            tokens >= 1 && (tokens < total || self.max_new_tokens.is_none()),
            key("max_new_tokens"),
            tokens,
            &format!("make it from 1 to below `rollout.max_total_tokens` ({total})"),
        );
        issues.require_tool_output(&key("tool_output"), self.tool_output);
        issues.require_fuel(&key("fuel"), self.fuel);
        issues.require_deadline(&key("deadline"), self.deadline);
        if let Some(reward) = &self.reward {
            validate_reward(reward, &key("reward"), issues);
        }
        issues.require(
            self.reward.is_none() || run.trainer.reward_aggregation == RewardAggregation::Sum,
            key("reward"),
            "a table",
            "leave it out, or make `trainer.reward_aggregation` \"sum\": parts that are compared each by \
             itself have the same weights everywhere",
        );
    }
}
