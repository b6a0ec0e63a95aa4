//! Episodes in which the run's agent acts.

use std::sync::atomic::AtomicBool;

use super::train::new_engine;
use super::{Policy, RunError};
use crate::config::{self, AgentIsolation, RunConfig};
use crate::rollout::{
    AgentCollector, AgentConfig, CollectionSeed, CollectorStats, GroupRequest, Isolation,
    RolloutGroup,
};

/// A run's agent, and the policy that it asks.
#[derive(Debug, Clone, Copy)]
pub(super) struct AgentPlay<'a> {
    pub(super) config: &'a RunConfig,
    pub(super) agent: &'a config::AgentConfig,
    pub(super) policy: &'a Policy,
    pub(super) temperature: f64,
    pub(super) stop: &'a AtomicBool,
}

impl AgentPlay<'_> {
    /// Collects episodes, on an engine of their own.
    pub(super) fn collect(
        self,
        requests: Vec<GroupRequest>,
        seed: CollectionSeed<'_>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<(Vec<RolloutGroup>, CollectorStats), RunError> {
        let agent = AgentConfig {
            command: self.agent.command.clone(),
            variables: self.agent.env.clone(),
            isolation: match self.agent.isolation {
                AgentIsolation::Bubblewrap => Isolation::Bubblewrap,
                AgentIsolation::None => Isolation::None,
            },
            mounts: self.agent.mounts.clone(),
            concurrency: self.agent.concurrency,
            timeout: self.agent.timeout,
            max_model_calls: self.agent.max_model_calls,
            temperature: self.temperature,
            max_new_tokens: self.config.rollout.max_new_tokens,
            enable_thinking: self.config.rollout.enable_thinking,
        };
        let mut engine = new_engine(self.config, self.policy)?;
        engine.set_tokenizer(self.policy.tokenizer.clone());
        let format = self.config.rollout.tool_call_format;
        let model = self.policy.served("policy", format);
        let collector = AgentCollector::new(&agent, model, self.stop);
        Ok(collector.collect(engine, requests, seed, progress)?)
    }
}
