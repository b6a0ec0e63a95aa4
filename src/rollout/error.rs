//! Faults of rollout collection.

use std::time::Duration;

use crate::chat::ChatError;
use crate::engine::EngineError;
use crate::env::EnvError;

/// A fault of ours, or a model that cannot be used for rollouts; never what a policy did.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RolloutError {
    /// Sampling failed.
    #[error("sampling failed")]
    Engine(#[from] EngineError),
    /// The proxy in front of the engine, which agents ask, cannot be started.
    #[error("the proxy that agents ask cannot be started")]
    Proxy(#[from] std::io::Error),
    /// The engine ended under the agents that ask it.
    #[error("the engine failed while agents asked it; its own error was logged")]
    EngineEnded,
    /// The program of the agents is not there.
    #[error("there is no program `{program}` to run agents (`rollout.agent`); {remedy}")]
    AgentNotFound {
        /// The program.
        program: String,
        /// What helps.
        remedy: &'static str,
    },
    /// The collection was asked to stop.
    #[error("stopped")]
    Stopped,
    /// The conversation could not be rendered.
    #[error("the model's chat template cannot render task `{task}`")]
    Chat {
        /// The task's id.
        task: String,
        /// What the template said.
        #[source]
        source: ChatError,
    },
    /// An episode took too long, by the clock.
    #[error(
        "an episode of task `{task}` took longer than `rollout.deadline`, {limit:?}: the machine is \
         overloaded; raise it, or lower `rollout.groups_per_step`"
    )]
    Late {
        /// The task's id.
        task: String,
        /// What it may take.
        limit: Duration,
    },
    /// A saved episode's environment is not what it was.
    #[error(
        "the environment of task `{task}` does not answer as it did before the run was resumed"
    )]
    Replay {
        /// The task's id.
        task: String,
    },
    /// A saved episode's environment failed before it was where it had been.
    #[error(
        "the environment of task `{task}` could not be brought back to where it was before the run was \
         resumed"
    )]
    Restore {
        /// The task's id.
        task: String,
        /// What failed.
        #[source]
        source: EnvError,
    },
    /// A demonstration is not a conversation that a policy could have.
    #[error("demonstration {name}: {reason}")]
    Demonstration {
        /// Where it stands.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The opening prompt leaves no room to answer.
    #[error(
        "the prompt of task `{task}` has {tokens} tokens, which leaves no room in \
         `rollout.max_total_tokens` = {limit}; raise it"
    )]
    PromptTooLong {
        /// The task's id.
        task: String,
        /// Tokens of the prompt.
        tokens: usize,
        /// The context's size.
        limit: usize,
    },
}
