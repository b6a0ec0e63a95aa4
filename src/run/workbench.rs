//! What a run works with.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::RunError;
use super::actors::Actors;
use super::load::{ActorLoad, Busy};
use super::mix::{environment_of, of_each_environment};
use super::policy::Policy;
use super::remote::RemoteSetting;
use crate::chat::{RenderOptions, ToolCallFormat, ToolSpec};
use crate::config::{EnvironmentConfig, RunConfig};
use crate::engine::{SamplingParams, ThinkingBudget};
use crate::env::actors::ActorSettings;
use crate::env::{Environment, ToolEnvironment, ToolEnvironmentConfig};
use crate::grader::{Grader, SubmissionKind};
use crate::hub::Hub;
use crate::rollout::{CollectionSeed, CollectorConfig, GroupRequest};
use crate::sandbox::{Activity, Limits, Sandbox};
use crate::task::{
    GraderChoice, Split, Task, TaskError, TaskOptions, TaskSet, TaskSource, is_harbor_folder,
};

/// Tells a model without tools in its chat template how to answer.
const CODE_BLOCK_PROMPT: &str = "You are a Python programmer. Answer with one Python code block, \
    ```python … ```, that defines what is asked for. If you are shown an error, answer with the \
    corrected code block.";

/// Where the programs of tasks run, and what grades them.
#[derive(Debug, Clone)]
pub struct Programs {
    /// Where they run.
    pub sandbox: Arc<dyn Sandbox>,
    /// What grades them.
    pub grader: Arc<dyn Grader>,
}

/// The sandbox and the grader of a run, or the environments elsewhere that need neither.
#[derive(Debug, Clone)]
pub struct Workbench {
    /// None where all environments are elsewhere.
    programs: Option<Programs>,
    /// Shared by all clones: the last one ends them.
    actors: Arc<Actors>,
    setting: Setting,
    /// Those of environments, by name.
    environments: BTreeMap<String, Setting>,
    render: RenderOptions,
    use_tools: bool,
    max_new_tokens: usize,
    max_total_tokens: usize,
    stop_token_ids: Vec<u32>,
    thinking: Option<ThinkingBudget>,
    tool_call_format: Option<ToolCallFormat>,
    deadline: Option<Duration>,
    /// Episodes of a step.
    max_episodes: usize,
}

/// How the episodes of some tasks go.
#[derive(Debug, Clone)]
struct Setting {
    code: Arc<ToolEnvironmentConfig>,
    /// For tasks that ask for a text.
    text: Arc<ToolEnvironmentConfig>,
    /// For tasks that need a shell.
    actor: Arc<ActorSettings>,
    max_new_tokens: usize,
    /// Where they go on elsewhere.
    remote: Option<RemoteSetting>,
}

impl Setting {
    fn new(config: &RunConfig, knows_tools: bool, offers_tools: bool) -> Result<Self, RunError> {
        let system_prompt = match &config.rollout.system_prompt {
            Some(prompt) => Some(prompt.clone()),
            // An agent has its own.
            None if config.rollout.agent.is_some() => None,
            None if knows_tools && offers_tools => None,
            None => Some(CODE_BLOCK_PROMPT.to_owned()),
        };
        let code = ToolEnvironmentConfig {
            system_prompt,
            offers_tools,
            max_turns: config.rollout.max_turns,
            max_output_chars: usize::try_from(config.rollout.tool_output.0).unwrap_or(usize::MAX),
            limits: tool_limits(config),
            reward: config.reward.clone(),
            grade_fuel: config.sandbox.grade_fuel,
        };
        let text = ToolEnvironmentConfig {
            system_prompt: config.rollout.system_prompt.clone(),
            ..code.clone()
        };
        Ok(Self {
            code: Arc::new(code),
            text: Arc::new(text),
            actor: Arc::new(Actors::settings(config)),
            max_new_tokens: config.rollout.max_new_tokens,
            remote: RemoteSetting::connect(config, knows_tools && offers_tools)?,
        })
    }
}

impl Busy for Workbench {
    fn sandbox(&self) -> Option<Activity> {
        self.programs.as_ref()?.sandbox.activity()
    }

    fn actors(&self) -> Option<ActorLoad> {
        self.actors.load()
    }
}

impl Workbench {
    /// Puts together what `config` asks for; `programs` may be left out where it
    /// [runs none](RunConfig::runs_programs).
    ///
    /// # Errors
    ///
    /// Fails where reasoning is limited and the model has no token that ends it, where an environment
    /// elsewhere cannot be used, or where programs have no place to run.
    pub fn new(
        config: &RunConfig,
        policy: &Policy,
        programs: Option<Programs>,
    ) -> Result<Self, RunError> {
        let thinking = config
            .rollout
            .max_thinking_tokens
            .map(|tokens| ThinkingBudget::new(&policy.tokenizer, tokens))
            .transpose()?;
        let mut workbench = Self::for_endpoint(config, policy.knows_tools(), programs)?;
        workbench.stop_token_ids.clone_from(&policy.stop_token_ids);
        workbench.thinking = thinking;
        Ok(workbench)
    }

    /// Puts together what `config` asks for, for a model elsewhere, which is given tools or not; `programs`
    /// as for [`Workbench::new`].
    ///
    /// # Errors
    ///
    /// Fails where an environment elsewhere cannot be used, or where programs have no place to run.
    pub fn for_endpoint(
        config: &RunConfig,
        use_tools: bool,
        programs: Option<Programs>,
    ) -> Result<Self, RunError> {
        if programs.is_none() && config.runs_programs() {
            return Err(RunError::NoPrograms);
        }
        let setting = |(name, environment): (&String, &EnvironmentConfig)| {
            let alone = environment.alone(config);
            let setting = Setting::new(&alone, use_tools, environment.tools);
            let setting = setting.map_err(|source| RunError::Environment {
                name: name.clone(),
                source: Box::new(source),
            })?;
            Ok((name.clone(), setting))
        };
        let environments = config.environments.iter().map(setting);
        Ok(Self {
            programs,
            actors: Arc::new(Actors::new(config)),
            setting: Setting::new(config, use_tools, true)?,
            environments: environments.collect::<Result<_, RunError>>()?,
            render: RenderOptions {
                enable_thinking: Some(config.rollout.enable_thinking),
                ..RenderOptions::default()
            },
            use_tools,
            max_new_tokens: config.rollout.max_new_tokens,
            max_total_tokens: config.rollout.max_total_tokens,
            stop_token_ids: Vec::new(),
            thinking: None,
            tool_call_format: config.rollout.tool_call_format,
            deadline: config.rollout.deadline,
            max_episodes: config.rollout.group_size * config.rollout.groups_per_step,
        })
    }

    /// Makes ready for `tasks`: opens what runs their actors, where they need some.
    ///
    /// # Errors
    ///
    /// Fails where a task cannot be run here, and where the run asks for what does not go with it.
    pub fn admit<'t>(
        &self,
        config: &RunConfig,
        tasks: impl Iterator<Item = &'t Task>,
    ) -> Result<(), RunError> {
        self.actors.admit(config, tasks)?;
        let has_own_tools = config.rollout.agent.is_some();
        match self.use_tools || has_own_tools || !self.actors.are_open() {
            true => Ok(()),
            false => Err(RunError::NoToolsForActors),
        }
    }

    /// Returns how many of `most` episodes a measurement may have at one time in each of so many processes:
    /// each of an environment elsewhere has a session there, for which a server that has room for a step's
    /// needs no more, and each in an actor waits for one.
    #[must_use]
    pub fn episodes_at_once(&self, most: usize, processes: usize) -> usize {
        let mut settings = self.environments.values().chain([&self.setting]);
        match self.actors.are_open() || settings.any(|setting| setting.remote.is_some()) {
            true => most.min((self.max_episodes / processes.max(1)).max(1)),
            false => most,
        }
    }

    /// Returns how episodes are sampled at `temperature`.
    #[must_use]
    pub fn collector(&self, temperature: f64) -> CollectorConfig {
        #[expect(clippy::cast_possible_truncation, reason = "logits are f32")]
        let temperature = temperature as f32;
        CollectorConfig {
            sampling: SamplingParams {
                temperature,
                max_new_tokens: self.max_new_tokens,
                stop_token_ids: self.stop_token_ids.clone(),
                thinking: self.thinking.clone(),
                ..SamplingParams::default()
            },
            max_context: self.max_total_tokens,
            render: RenderOptions {
                add_generation_prompt: true,
                ..self.render.clone()
            },
            use_tools: self.use_tools,
            tool_call_format: self.tool_call_format,
            deadline: self.deadline,
        }
    }

    /// Returns how conversations are rendered.
    #[must_use]
    pub fn render(&self) -> &RenderOptions {
        &self.render
    }

    /// Returns the tools that a policy is told of in what is demonstrated to it.
    #[must_use]
    pub fn demonstrated_tools(&self) -> Vec<ToolSpec> {
        match &self.setting.remote {
            _ if !self.use_tools => Vec::new(),
            Some(remote) => remote.tools().to_vec(),
            None => ToolEnvironment::tool_specs(SubmissionKind::Code),
        }
    }

    /// Returns `samples` fresh episodes of `task`, which was met `visit` times before in the collection;
    /// `seed` makes their programs' randomness.
    ///
    /// # Panics
    ///
    /// Panics where the task needs an actor and was not [admitted](Self::admit), and where it is none of an
    /// environment elsewhere and the run was given no place for programs since it has no others.
    #[must_use]
    pub fn group(
        &self,
        task: &Task,
        samples: usize,
        seed: CollectionSeed<'_>,
        visit: u64,
    ) -> GroupRequest {
        let task = Arc::new(task.clone());
        let setting = environment_of(&task.id)
            .and_then(|name| self.environments.get(name))
            .unwrap_or(&self.setting);
        if let Some(remote) = &setting.remote {
            return GroupRequest {
                task_id: task.id.clone(),
                visit,
                first_sample: 0,
                max_new_tokens: Some(setting.max_new_tokens),
                environments: remote.episodes(&task, samples, seed, visit),
            };
        }
        if let Some(environments) = self.actors.episodes(&task, samples, &setting.actor) {
            return GroupRequest {
                task_id: task.id.clone(),
                visit,
                first_sample: 0,
                max_new_tokens: Some(setting.max_new_tokens),
                environments,
            };
        }
        let config = match task.submission_kind() {
            SubmissionKind::Code => &setting.code,
            SubmissionKind::Text => &setting.text,
        };
        let programs = self.programs.as_ref();
        let programs = programs.expect("a run with an environment here was given them");
        let base = seed.of_task("tools", &task.id);
        let environments = (0..samples as u64)
            .map(|sample| {
                let seed = base.wrapping_add(sample);
                let environment = ToolEnvironment::new(
                    Arc::clone(&task),
                    Arc::clone(&programs.sandbox),
                    Arc::clone(&programs.grader),
                    Arc::clone(config),
                    seed,
                );
                Box::new(environment) as Box<dyn Environment>
            })
            .collect();
        GroupRequest {
            task_id: task.id.clone(),
            visit,
            first_sample: 0,
            max_new_tokens: Some(setting.max_new_tokens),
            environments,
        }
    }
}

/// Returns the limits of one tool call.
fn tool_limits(config: &RunConfig) -> Limits {
    Limits {
        memory: config.sandbox.memory,
        fuel: config.sandbox.fuel,
        deadline: config.sandbox.deadline,
        stdout: config.sandbox.output,
        stderr: config.sandbox.output,
    }
}

/// Opens the tasks to learn from, of a run without environments.
///
/// # Errors
///
/// Fails where they are not named or cannot be read.
pub(super) fn training_tasks(config: &RunConfig) -> Result<TaskSet, RunError> {
    let task = &config.task;
    // What the same source is measured on must not be learned from.
    let split = match (task.split, &task.eval_path) {
        (None, None) => Some(Split::Train),
        (split, _) => split,
    };
    let mut tasks = match divided(config)? {
        Some((training, _)) => training,
        None => open(&task.path, "task.path", split, config)?,
    };
    if let Some(limit) = task.limit {
        tasks.truncate(limit);
    }
    Ok(tasks)
}

/// Opens the tasks to learn from, those of all environments.
///
/// # Errors
///
/// Fails where they are not named or cannot be read.
pub fn learning_tasks(config: &RunConfig) -> Result<TaskSet, RunError> {
    let sets = of_each_environment(config, training_tasks)?;
    let all = sets
        .into_iter()
        .map(|(_, tasks)| tasks)
        .reduce(TaskSet::with);
    match all {
        Some(tasks) => Ok(tasks),
        None => training_tasks(config),
    }
}

/// Opens the tasks to measure on, those of all environments.
///
/// # Errors
///
/// As for the tasks to learn from.
pub fn evaluation_tasks(config: &RunConfig) -> Result<TaskSet, RunError> {
    let sets = of_each_environment(config, evaluation_tasks)?;
    if let Some(tasks) = sets
        .into_iter()
        .map(|(_, tasks)| tasks)
        .reduce(TaskSet::with)
    {
        return Ok(tasks);
    }
    let task = &config.task;
    let (path, key, split) = match &task.eval_path {
        // A file of its own is read whole; a folder holds splits.
        Some(path) if is_whole(Path::new(path)) => (path, "task.eval_path", task.eval_split),
        Some(path) => (
            path,
            "task.eval_path",
            task.eval_split.or(Some(Split::Test)),
        ),
        None => (
            &task.path,
            "task.path",
            task.eval_split.or(Some(Split::Test)),
        ),
    };
    let mut tasks = match divided(config)? {
        Some((_, held_out)) => held_out,
        None => open(path, key, split, config)?,
    };
    if let Some(limit) = config.eval.limit {
        tasks.truncate(limit);
    }
    Ok(tasks)
}

/// Divides the tasks of one file that names no splits, or the episodes of an environment elsewhere, or returns `None` where there are splits:
/// asked for, in a folder, or MBPP's by its ids.
fn divided(config: &RunConfig) -> Result<Option<(TaskSet, TaskSet)>, RunError> {
    let task = &config.task;
    if let Some(episodes) = config.env.as_ref().and_then(|env| env.episodes) {
        return Ok(Some(TaskSet::of_seeds(episodes).divide()));
    }
    let path = Path::new(&task.path);
    let names_splits =
        task.split.is_some() || task.eval_split.is_some() || task.eval_path.is_some();
    if names_splits || !is_whole(path) {
        return Ok(None);
    }
    let all = TaskSet::open_with(path, &task_options(config, None)?)?;
    let splits = all.tasks().iter().map(|task| Split::of_mbpp(&task.id));
    let has = |split| splits.clone().any(|found| found == Some(split));
    if has(Split::Train) && has(Split::Test) {
        return Ok(None);
    }
    let (training, held_out) = all.divide();
    if training.tasks().is_empty() {
        return Err(RunError::OneTask {
            path: task.path.clone(),
        });
    }
    Ok(Some((training, held_out)))
}

/// Whether what is there has no splits: a file, or a folder of Harbor's tasks.
fn is_whole(path: &Path) -> bool {
    path.is_file() || path.is_dir() && is_harbor_folder(path)
}

fn open(
    path: &str,
    key: &'static str,
    split: Option<Split>,
    config: &RunConfig,
) -> Result<TaskSet, RunError> {
    if path.is_empty() {
        return Err(RunError::NoTasks { key });
    }
    let source: TaskSource = path.parse()?;
    let local = source.locate(|repo, revision| {
        let repository = format!("{repo}@{revision}").parse()?;
        Hub::from_env().dataset_folder(&repository)
    })?;
    Ok(TaskSet::open_with(&local, &task_options(config, split)?)?)
}

/// Returns how the run reads its tasks.
fn task_options(config: &RunConfig, split: Option<Split>) -> Result<TaskOptions, TaskError> {
    let task = &config.task;
    Ok(TaskOptions {
        split,
        visible_tests: task.visible_tests,
        challenge_tests: task.challenge_tests,
        grader: task.grader.as_deref().map(GraderChoice::read).transpose()?,
        remote: config.env.is_some(),
    })
}
