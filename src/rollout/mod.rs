//! Policy against environment: multi-turn episodes, in groups of one task.
//!
//! [`Collector`] drives many [`Episode`]s at once over one engine. Sampling is one batched loop;
//! tools and graders run on threads of their own while the other episodes go on sampling. Sampled ids
//! are kept as they were sampled, also by an episode that goes on in a later step: a turn is never decoded and encoded again, only what the
//! environment says is tokenised and appended.
//!
//! [`AgentCollector`] does the same with agents that are programs of their own.

mod agent;
mod collector;
mod demonstration;
mod error;
mod external;
mod group;
mod paused;
mod restored;
mod seed;
mod side_by_side;
mod tools;

pub use self::agent::Episode;
pub use self::collector::{
    CollectionSeed, Collector, CollectorConfig, CollectorStats, GroupRequest, PauseRule,
};
pub use self::demonstration::trace_demonstration;
pub use self::error::RolloutError;
pub use self::external::{AgentCollector, AgentConfig, Isolation};
pub use self::group::RolloutGroup;
pub use self::paused::{Origin, PausedGroup, PausedRecord};
pub use self::seed::derive_seed;
pub use self::side_by_side::side_by_side;
