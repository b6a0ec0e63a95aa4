//! Actors in a run: opened once its tasks need some, and ended with it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::RunError;
use super::backend::{OpenedBackend, open_backend};
use super::load::ActorLoad;
use crate::actor::escalation::Needs;
use crate::actor::{ActorError, ActorLimits, RootFs};
use crate::config::{ActorConfig, ConfigError, Issue, RewardAggregation, RunConfig};
use crate::env::Environment;
use crate::env::actors::{
    ActorEnvironment, ActorSettings, GroupStart, Workplace, WorkplaceConfig, millis,
};
use crate::grader::swebench::SwebenchBonus;
use crate::task::harbor::{HarborPart, VerifierMode};
use crate::task::{RepositoryTask, Task};

/// How long episodes of a run that ends may take to let go of their actors.
const LETTING_GO: Duration = Duration::from_secs(10);
/// Time between looks at whether they have.
const POLL: Duration = Duration::from_millis(5);

/// What stands for the programs of this machine in `actor.root`.
const HOST: &str = "host";

/// The actors of a run. Dropped, it ends all that there are.
#[derive(Debug)]
pub(super) struct Actors {
    config: ActorConfig,
    /// Episodes of one task at a time.
    group: usize,
    place: OnceLock<Arc<Workplace>>,
    /// Whether it was said that some rewards are not to be believed.
    has_warned: AtomicBool,
}

impl Actors {
    /// Returns those of a run; none is started.
    pub(super) fn new(config: &RunConfig) -> Self {
        Self {
            config: config.actor.clone(),
            group: config.rollout.group_size,
            place: OnceLock::new(),
            has_warned: AtomicBool::new(false),
        }
    }

    /// Returns how the episodes of a run go.
    pub(super) fn settings(config: &RunConfig) -> ActorSettings {
        let ActorConfig {
            command_timeout,
            test_timeout,
            bonus,
            ..
        } = config.actor;
        ActorSettings {
            system_prompt: config.rollout.system_prompt.clone(),
            max_turns: config.rollout.max_turns,
            max_output_chars: usize::try_from(config.rollout.tool_output.0).unwrap_or(usize::MAX),
            command_timeout,
            test_timeout,
            bonus: SwebenchBonus {
                smaller_patch: bonus.smaller_patch,
                faster_tests: bonus.faster_tests,
            },
        }
    }

    /// Returns how many episodes have an actor and how many wait for one; none where no backend is open.
    pub(super) fn load(&self) -> Option<ActorLoad> {
        let (in_use, waiting) = self.place.get()?.load();
        Some(ActorLoad { in_use, waiting })
    }

    /// Whether a backend is open.
    pub(super) fn are_open(&self) -> bool {
        self.place.get().is_some()
    }

    /// Opens a backend if one of `tasks` needs an actor, and checks that each can be run.
    ///
    /// # Errors
    ///
    /// Fails where no backend does, where a task cannot be run, and where the run asks for what does not go with
    /// actors.
    pub(super) fn admit<'t>(
        &self,
        config: &RunConfig,
        tasks: impl Iterator<Item = &'t Task>,
    ) -> Result<(), RunError> {
        let mut has_shared = false;
        for task in tasks {
            let Some(repository) = &task.repository else {
                continue;
            };
            let place = match self.place.get() {
                Some(place) => place,
                None => {
                    check_combination(config)?;
                    let opened = self.open()?;
                    self.place.get_or_init(|| opened)
                }
            };
            place.check(repository)?;
            if let RepositoryTask::Harbor(harbor) = &**repository {
                let shared = |part: &HarborPart| part.verifier_mode == VerifierMode::Shared;
                has_shared |= harbor.parts.iter().any(shared);
                if harbor.parts.len() > 1 && config.rollout.agent.is_some() {
                    return Err(RunError::StepsForAgent {
                        task: task.id.clone(),
                    });
                }
            }
        }
        if has_shared && !self.has_warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "verifiers of some tasks run in the policy's own sandbox, where it can give itself its reward; \
                 `environment_mode = \"separate\"` gives one a sandbox of its own"
            );
        }
        Ok(())
    }

    fn open(&self) -> Result<Arc<Workplace>, ActorError> {
        let config = &self.config;
        let root = match (config.root.as_deref(), &config.image) {
            (Some(HOST), _) => Some(RootFs::Host),
            (Some(folder), _) => Some(RootFs::Folder(PathBuf::from(folder))),
            (None, Some(image)) => Some(RootFs::Image(image.clone())),
            (None, None) => None,
        };
        let needs = Needs {
            shell: true,
            image: root != Some(RootFs::Host),
            memory: config.memory.as_u64(),
            wall: config.command_timeout,
            ..Needs::default()
        };
        let OpenedBackend {
            backend,
            builder,
            why,
        } = open_backend(config, &needs, self.group)?;
        let invalid = |reason: String| Err(ActorError::InvalidSpec { reason });
        let starts_images = backend.capabilities().image;
        if starts_images && config.root.is_some() {
            return invalid(format!(
                "`{}` starts images alone; leave `actor.root` out, or give `actor.image`",
                backend.name()
            ));
        }
        if !starts_images && config.root.is_none() && builder.is_none() {
            return invalid(format!(
                "`{}` starts no images; give `actor.root`, which stands in for those of all tasks: `host`, or a \
                 folder with a root filesystem; or `actor.image_build`, by which `buildah` builds them",
                backend.name()
            ));
        }
        if let Some(RootFs::Folder(folder)) = &root
            && !folder.is_dir()
        {
            return invalid(format!(
                "`actor.root` is `{}`, which is no folder; give one with a root filesystem, or `host`",
                folder.display()
            ));
        }
        tracing::info!(backend = backend.name(), why, "tasks run in actors");
        Ok(Arc::new(Workplace::new(
            backend,
            WorkplaceConfig {
                root,
                builder,
                repositories: config.repositories.clone(),
                limits: ActorLimits {
                    memory: config.memory.as_u64(),
                    disk: config.disk.as_u64(),
                    cpu_millis: millis(config.cpus),
                    processes: config.processes,
                    ..ActorLimits::default()
                },
                artifacts: config.artifacts.as_u64(),
                max_actors: config.max_actors,
            },
        )))
    }

    /// Returns `samples` episodes of a task, which begin alike; none where it needs no actor.
    ///
    /// # Panics
    ///
    /// Panics where the task was not [admitted](Self::admit).
    pub(super) fn episodes(
        &self,
        task: &Arc<Task>,
        samples: usize,
        settings: &Arc<ActorSettings>,
    ) -> Option<Vec<Box<dyn Environment>>> {
        let repository = task.repository.as_ref()?;
        let place = self
            .place
            .get()
            .expect("tasks are admitted before they are drawn");
        let start = GroupStart::new(Arc::clone(place), Arc::clone(repository), samples);
        let start = Arc::new(start);
        let episode = |_| {
            let start = Arc::clone(&start);
            let environment = ActorEnvironment::new(Arc::clone(task), start, Arc::clone(settings));
            Box::new(environment) as Box<dyn Environment>
        };
        Some((0..samples).map(episode).collect())
    }
}

impl Drop for Actors {
    fn drop(&mut self) {
        let Some(place) = self.place.take() else {
            return;
        };
        place.close();
        // Who played episodes lets go of it at once; the last one deletes what the backend has on this machine,
        // for which a thread that ends with the process might not have the time.
        let until = Instant::now() + LETTING_GO;
        while Arc::strong_count(&place) > 1 && Instant::now() < until {
            std::thread::sleep(POLL);
        }
    }
}

/// Refuses what does not go with tasks in actors.
fn check_combination(config: &RunConfig) -> Result<(), ConfigError> {
    let rollout = &config.rollout;
    let mut issues = Vec::new();
    let mut require = |holds: bool, key: &str, value: String, remedy: &str| {
        if !holds {
            issues.push(Issue {
                key: key.to_owned(),
                value,
                remedy: remedy.to_owned(),
            });
        }
    };
    require(
        rollout.max_step_tokens.is_none(),
        "rollout.max_step_tokens",
        rollout.max_step_tokens.unwrap_or_default().to_string(),
        "leave it out: these tasks need actors, which cannot be brought back to where an episode waited",
    );
    require(
        rollout.deadline.is_none(),
        "rollout.deadline",
        format!("{:?}", rollout.deadline.unwrap_or_default()),
        "leave it out, and give `actor.command_timeout`: a policy could leave its bad episodes out by waiting",
    );
    require(
        config.trainer.reward_aggregation == RewardAggregation::Sum,
        "trainer.reward_aggregation",
        "gdpo".to_owned(),
        "make it `sum`: these tasks have a reward of their own, and `[reward]` has no part in it",
    );
    match issues.is_empty() {
        true => Ok(()),
        false => Err(ConfigError::Invalid { issues }),
    }
}
