//! What `train`, `sft` and `eval` begin with: a configuration and what it names.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use super::runtime::{Sandboxes, load_sandboxes};
use crate::address::shown;
use crate::cli::ExitStatus;
use crate::cli::args::{ConfigArgs, ModelArgs};
use crate::cli::failure::Failure;
use crate::cli::printer::Printer;
use crate::config::{Preset, RunConfig, sets_name_environments};
use crate::engine::model::{LoraAdapter, Trainable};
use crate::grader::{GradeLimits, GraderRegistry};
use crate::run::{Policy, Programs, RunError, STARTER, STARTER_RUN, Starter, Workbench, trainable};
use crate::sandbox::{CacheFolder, Limits};

/// A configuration, with the starter's names replaced by paths.
#[derive(Debug)]
pub(super) struct Resolved {
    /// What to run.
    pub(super) config: RunConfig,
    /// A short name for the run.
    pub(super) name: String,
    /// Keeps the starter's files where there is no cache folder.
    pub(super) scratch: Option<tempfile::TempDir>,
}

/// What a configuration names, loaded.
#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) config: RunConfig,
    pub(super) policy: Policy,
    pub(super) workbench: Workbench,
    /// Keeps the starter's files where there is no cache folder.
    pub(super) scratch: Option<tempfile::TempDir>,
}

/// Resolves the configuration: the file, or the starter's where neither a file nor a model is named;
/// then a preset that `--set` names; then the arguments; then `--set`.
pub(super) fn resolve(args: &ConfigArgs) -> Result<Resolved, Failure> {
    resolve_with(args, CacheFolder::User.path())
}

/// Does what [`resolve`] does, and leaves nothing in the cache: the starter's files end with what is returned.
pub(super) fn resolve_apart(args: &ConfigArgs) -> Result<Resolved, Failure> {
    resolve_with(args, None)
}

fn resolve_with(args: &ConfigArgs, cache: Option<PathBuf>) -> Result<Resolved, Failure> {
    let mut sets = Vec::new();
    let quoted = |text: &str| toml::Value::String(text.to_owned()).to_string();
    sets.extend(
        args.model
            .iter()
            .map(|model| format!("model.path={}", quoted(model))),
    );
    sets.extend(
        args.tasks
            .iter()
            .map(|tasks| format!("task.path={}", quoted(tasks))),
    );
    sets.extend(args.seed.iter().map(|seed| format!("seed={seed}")));
    sets.extend(args.overrides.iter().cloned());
    let has_sources = Preset::named_in(&sets).is_some_and(Preset::names_sources);
    let has_environments = sets_name_environments(&sets);
    if has_environments && args.config.is_none() && args.tasks.is_none() {
        // They stand in place of the starter's tasks.
        sets.insert(0, "task.path=".to_owned());
    }
    let config = match &args.config {
        Some(path) => RunConfig::load(Some(path), &sets),
        // The starter's settings suit its own model, and nothing else.
        None if args.model.is_none() && !has_sources => RunConfig::from_toml(STARTER_RUN, &sets),
        None => {
            if args.tasks.is_none() && !has_sources && !has_environments {
                sets.insert(0, format!("task.path={}", quoted(STARTER)));
            }
            RunConfig::load(None, &sets)
        }
    };
    let mut config = config.map_err(Failure::usage)?;
    let names: Vec<&str> = config.environments.keys().map(String::as_str).collect();
    let tasks = match &config.env {
        _ if !names.is_empty() => names.join("+"),
        Some(env) if config.task.path.is_empty() => shown(&env.url).replace(':', "-"),
        _ => config.task.path.clone(),
    };
    let name = [&config.model.path, &tasks].map(|path| {
        path.trim_end_matches('/')
            .rsplit('/')
            .next()
            .unwrap_or(path)
            .to_owned()
    });
    let name = if name[0] == name[1] {
        name[0].clone()
    } else {
        name.join("-")
    };
    let mut scratch = None;
    let is_starter = |path: &String| path == STARTER;
    let mut task_paths = std::iter::once(&config.task.path).chain(
        config
            .environments
            .values()
            .map(|environment| &environment.path),
    );
    if is_starter(&config.model.path) || task_paths.any(is_starter) {
        let folder = match cache {
            Some(folder) => folder,
            None => scratch
                .insert(tempfile::tempdir().map_err(Failure::internal)?)
                .path()
                .to_owned(),
        };
        let starter = Starter::unpack(&folder).map_err(Failure::from)?;
        let text = |path: PathBuf| path.to_string_lossy().into_owned();
        if config.model.path == STARTER {
            config.model.path = text(starter.model());
        }
        let of_environments = (config.environments.values_mut())
            .map(|environment| (&mut environment.path, &mut environment.eval_path));
        let paths = std::iter::once((&mut config.task.path, &mut config.task.eval_path));
        for (path, eval_path) in paths.chain(of_environments) {
            if path == STARTER {
                *path = text(starter.train_tasks());
                eval_path.get_or_insert_with(|| text(starter.heldout_tasks()));
            }
        }
    }
    name_from_anywhere(&mut config);
    // The folder of an adapter stands for its base model with the adapter on.
    let base = LoraAdapter::base_model_of(config.model.path.as_ref())
        .map_err(|error| Failure::from(RunError::from(error)))?;
    if let Some(base) = base {
        let folder = std::mem::replace(&mut config.model.path, base);
        config.model.adapter = Some(folder);
        config.validate().map_err(Failure::usage)?;
    }
    Ok(Resolved {
        config,
        name,
        scratch,
    })
}

/// Makes the paths of files absolute, so that a run's own run.toml means the same in any folder.
fn name_from_anywhere(config: &mut RunConfig) {
    let task = &mut config.task;
    let of_task = (&mut task.path, &mut task.eval_path, &mut task.grader);
    let of_environments = (config.environments.values_mut())
        .map(|other| (&mut other.path, &mut other.eval_path, &mut other.grader));
    let tasks = std::iter::once(of_task).chain(of_environments);
    let tasks = tasks.flat_map(|(path, eval_path, grader)| {
        // Other graders are named, not found.
        let grader = grader.as_mut().filter(|grader| grader.ends_with(".py"));
        std::iter::once(path).chain(eval_path).chain(grader)
    });
    let paths = std::iter::once(&mut config.model.path)
        .chain(&mut config.model.adapter)
        .chain(tasks);
    // An agent runs in a folder of its own. Its program is found in `PATH` unless it is a path.
    let command = config.rollout.agent.iter_mut();
    let command = command.flat_map(|agent| &mut agent.command).enumerate();
    let arguments = command
        .filter(|(place, argument)| match argument.contains('/') {
            true => true,
            // A word, such as the name of a module, is no folder that happens to be here.
            false => *place > 0 && Path::new(argument).is_file(),
        })
        .map(|(_, argument)| argument);
    for path in paths.chain(arguments).filter(|path| !path.is_empty()) {
        let absolute = std::path::absolute(&*path)
            .ok()
            .filter(|path| path.exists());
        if let Some(absolute) = absolute.as_ref().and_then(|path| path.to_str()) {
            *path = absolute.to_owned();
        }
    }
    if let Some(root) = config.actor.root.as_mut().filter(|root| *root != "host")
        && let Ok(absolute) = std::path::absolute(&*root)
    {
        *root = absolute.to_string_lossy().into_owned();
    }
    let mounts = config.rollout.agent.iter_mut();
    let mounts = mounts.flat_map(|agent| &mut agent.mounts);
    let environments = config.environments.values_mut();
    let elsewhere = environments.filter_map(|environment| environment.env.as_mut());
    let certificates = (config.env.iter_mut().chain(elsewhere))
        .filter_map(|env| env.tls.as_mut())
        .flat_map(|tls| [&mut tls.ca, &mut tls.certificate, &mut tls.key])
        .flatten();
    for path in config
        .sandbox
        .wheels
        .iter_mut()
        .chain(mounts)
        .chain(&mut config.actor.repositories)
        .chain(certificates)
    {
        if let Ok(absolute) = std::path::absolute(&*path) {
            *path = absolute;
        }
    }
}

/// Resolves a configuration for measuring: tasks named by an argument are the ones to measure on.
pub(super) fn resolve_for_eval(args: &ConfigArgs) -> Result<Resolved, Failure> {
    let mut args = args.clone();
    if let Some(tasks) = &args.tasks {
        let path = toml::Value::String(tasks.clone());
        args.overrides.insert(0, format!("task.eval_path={path}"));
    } else if args.model.is_some() && args.config.is_none() {
        // A model alone is measured on the starter's tasks: what it was trained on, as a rule.
        args.tasks = Some(STARTER.to_owned());
        let starter: toml::Table = STARTER_RUN.parse().map_err(Failure::internal)?;
        for room in ["rollout", "sandbox", "eval"] {
            let Some(toml::Value::Table(keys)) = starter.get(room) else {
                continue;
            };
            let keys = keys
                .iter()
                .map(|(key, value)| format!("{room}.{key}={value}"));
            args.overrides.splice(0..0, keys);
        }
    }
    resolve(&args)
}

/// Resolves a configuration for measuring a model elsewhere: `--model` is a name there.
pub(super) fn resolve_for_endpoint(args: &ConfigArgs) -> Result<Resolved, Failure> {
    let mut args = args.clone();
    // Some model must be named; none is loaded.
    args.model = Some(STARTER.to_owned());
    resolve_for_eval(&args)
}

/// Loads the policy, trainable or not, and puts the workbench together.
pub(super) fn load(
    resolved: Resolved,
    programs: Option<Programs>,
    is_trained: bool,
) -> Result<Loaded, Failure> {
    load_on(resolved, programs, is_trained, 0)
}

/// Does what [`load`] does, on GPU number `gpu` where that is on a GPU.
pub(super) fn load_on(
    resolved: Resolved,
    programs: Option<Programs>,
    is_trained: bool,
    gpu: usize,
) -> Result<Loaded, Failure> {
    let config = resolved.config;
    let weights = if is_trained {
        trainable(&config)
    } else {
        Trainable::Frozen
    };
    let policy = Policy::load_on(&config, &weights, gpu).map_err(Failure::from)?;
    let workbench = workbench(&config, &policy, programs)?;
    Ok(Loaded {
        config,
        policy,
        workbench,
        scratch: resolved.scratch,
    })
}

/// A model to talk to.
#[derive(Debug)]
pub(super) struct LoadedModel {
    /// Its name, as the user gave it.
    pub(super) name: String,
    pub(super) config: RunConfig,
    pub(super) policy: Policy,
    /// Keeps the starter's files where there is no cache folder.
    _scratch: Option<tempfile::TempDir>,
}

/// Loads a model without the means to train it.
pub(super) fn load_model(args: &ModelArgs) -> Result<LoadedModel, Failure> {
    let resolved = resolve(&ConfigArgs {
        config: None,
        model: args.model.clone(),
        tasks: None,
        seed: None,
        overrides: args.overrides.clone(),
    })?;
    let policy = Policy::load(&resolved.config, &Trainable::Frozen).map_err(Failure::from)?;
    Ok(LoadedModel {
        name: args.model.clone().unwrap_or_else(|| STARTER.to_owned()),
        config: resolved.config,
        policy,
        _scratch: resolved.scratch,
    })
}

/// Puts the workbench together.
pub(super) fn workbench(
    config: &RunConfig,
    policy: &Policy,
    programs: Option<Programs>,
) -> Result<Workbench, Failure> {
    Workbench::new(config, policy, programs).map_err(Failure::from)
}

/// Prepares where the programs of a run's tasks run, and what grades them, if it runs any here: a run whose
/// environments are all elsewhere does not wait for that.
pub(super) fn programs(config: &RunConfig, printer: &Printer) -> Result<Option<Programs>, Failure> {
    if !config.runs_programs() {
        return Ok(None);
    }
    let sandboxes = load_sandboxes(&config.sandbox, printer)?;
    let grader = Arc::new(graders(config, &sandboxes));
    Ok(Some(Programs {
        sandbox: sandboxes.tools,
        grader,
    }))
}

/// Returns the graders of a run.
fn graders(config: &RunConfig, sandboxes: &Sandboxes) -> GraderRegistry {
    let limits = GradeLimits::for_candidate(&Limits {
        memory: config.sandbox.memory,
        fuel: config.sandbox.grade_fuel,
        deadline: config.sandbox.grade_deadline,
        ..Limits::default()
    });
    GraderRegistry::standard(&sandboxes.grading, &limits)
}

/// Returns `runs/<time>-<name>`.
pub(super) fn default_run_folder(resolved: &Resolved) -> PathBuf {
    let time = jiff::ZonedDateTime::now()
        .strftime("%Y%m%d-%H%M%S")
        .to_string();
    PathBuf::from("runs").join(format!("{time}-{}", resolved.name))
}

impl From<RunError> for Failure {
    fn from(error: RunError) -> Self {
        if error.is_usage() {
            Self::usage(error)
        } else {
            Self::internal(error)
        }
    }
}

/// Refuses a run that says nothing to learn from.
pub(super) fn require_tasks(config: &RunConfig) -> Result<(), Failure> {
    // An environment elsewhere that names no tasks has episodes.
    if config.task.path.is_empty() && config.environments.is_empty() && config.env.is_none() {
        return Err(Failure::from(RunError::NoTasks { key: "task.path" }));
    }
    Ok(())
}

/// Returns what SIGINT (Ctrl-C) and SIGTERM set to true. A second one ends the process at once.
pub(super) fn stop_on_signals() -> std::io::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        flag::register_conditional_shutdown(signal, ExitStatus::STOPPED, Arc::clone(&stop))?;
        flag::register(signal, Arc::clone(&stop))?;
    }
    Ok(stop)
}
