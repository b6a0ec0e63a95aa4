//! Tasks that need a shell, in the heavy tier.
//!
//! An [`ActorEnvironment`] is one episode of a task of Harbor or SWE-bench: the policy has an actor with tools
//! for it, and what it leaves there is judged. [`Workplace`] is what the episodes of a run share: where actors
//! come from and how many there may be. A [`GroupStart`] prepares an actor once for all episodes of a group.
//!
//! What is judged is judged apart from where the policy was: a patch of SWE-bench by [`InstanceGrader`] in an
//! actor of its own, a Harbor trial by [`judge_trial`]. Where a judgement breaks down, a *control* decides whose
//! doing that was: the same tests on what no policy has touched, see [`Controls`].

mod control;
mod edit;
mod environment;
mod harbor;
mod health;
mod images;
mod instance;
mod patch;
mod precedence;
mod reference;
mod sandbox;
mod slots;
mod start;
mod tools;
mod trial;
mod users;
mod workplace;

#[cfg(test)]
mod tests;

pub use control::Controls;
pub use environment::{ActorEnvironment, ActorSettings};
pub use harbor::{HarborJudgement, KeptArtifact, judge_trial};
pub use instance::{InstanceGrader, TEST_TIMEOUT};
pub use sandbox::ActorSandbox;
pub use start::GroupStart;
pub use tools::{BASH, EDIT, SUBMIT, actor_tools};
pub use workplace::{Workplace, WorkplaceConfig, millis};
