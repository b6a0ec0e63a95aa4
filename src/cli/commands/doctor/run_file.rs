//! What a run names that is to be here: its model, its adapter and its tasks.

use std::path::Path;

use super::finding::Finding;
use crate::causes::with_causes;
use crate::config::RunConfig;
use crate::engine::model::ModelConfig;
use crate::hub::HubRepo;
use crate::run::{evaluation_tasks, learning_tasks};
use crate::task::{TaskSet, TaskSource};

/// What was read.
#[derive(Debug, Default)]
pub(super) struct Read {
    pub(super) findings: Vec<Finding>,
    /// The model's, where it is a folder here.
    pub(super) model: Option<ModelConfig>,
    /// Whether tasks need a shell or a repository.
    pub(super) needs_actors: bool,
}

pub(super) fn check(config: &RunConfig) -> Read {
    let mut read = Read::default();
    read.findings.extend(model(config, &mut read.model));
    if let Some(adapter) = &config.model.adapter {
        let file = Path::new(adapter).join("adapter_config.json");
        if !file.is_file() {
            let about = format!("the adapter `{adapter}` has no `adapter_config.json`");
            let fix = "name a folder in PEFT's layout, such as a run's `final`, by `model.adapter`";
            read.findings.push(Finding::wrong("model", about, fix));
        }
    }
    tasks(config, &mut read);
    read
}

/// Looks for the model; one of the hub is the hub's to tell of.
fn model(config: &RunConfig, found: &mut Option<ModelConfig>) -> Option<Finding> {
    let name = &config.model.path;
    let path = Path::new(name);
    let wrong = |about: String, fix: &str| Some(Finding::wrong("model", about, fix));
    if name.is_empty() {
        let fix = "name one: `--model PATH_OR_HUB_ID`, or `model.path` in the run file";
        return wrong("the run names no model".to_owned(), fix);
    }
    if path.is_file() {
        return Some(Finding::fine(
            "model",
            format!("the file `{name}` is there"),
        ));
    }
    if !path.is_dir() {
        if name.parse::<HubRepo>().is_ok() && !name.ends_with(".gguf") {
            return None;
        }
        let about = format!("there is no folder or file `{name}`, and it is no name of the hub's");
        return wrong(
            about,
            "correct `model.path`, or: hf download OWNER/NAME --local-dir DIR",
        );
    }
    let missing: Vec<&str> = ["config.json", "tokenizer.json"]
        .into_iter()
        .filter(|file| !path.join(file).is_file())
        .collect();
    let has_weights = fs_err::read_dir(path).is_ok_and(|entries| {
        let mut entries = entries.flatten();
        entries.any(|entry| {
            entry
                .path()
                .extension()
                .is_some_and(|end| end == "safetensors")
        })
    });
    let weights = (!has_weights).then_some("*.safetensors");
    let missing: Vec<&str> = missing.into_iter().chain(weights).collect();
    if !missing.is_empty() {
        let about = format!("the model's folder `{name}` lacks {}", missing.join(", "));
        return wrong(
            about,
            "hf download OWNER/NAME --local-dir DIR, and name that folder",
        );
    }
    match ModelConfig::from_file(&path.join("config.json")) {
        Ok(config) => {
            *found = Some(config);
            Some(Finding::fine("model", format!("`{name}` is there")))
        }
        Err(error) => wrong(
            with_causes(&error),
            "take a model of the architectures that README.md names, or download it anew",
        ),
    }
}

/// Reads the tasks that are here.
fn tasks(config: &RunConfig, read: &mut Read) {
    if !config.environments.is_empty() || !config.task.path.is_empty() {
        let paths = config.environments.values().map(|other| &other.path);
        let mut paths = paths
            .chain([&config.task.path])
            .filter(|path| !path.is_empty());
        // The hub's are the hub's to tell of.
        if paths.any(|path| matches!(path.parse(), Ok(TaskSource::Hub { .. }))) {
            return;
        }
    } else if config.env.is_none() {
        let fix = "name some: `--tasks PATH_OR_HUB_ID`, or `task.path` in the run file";
        read.findings
            .push(Finding::wrong("tasks", "the run names no tasks", fix));
        return;
    }
    let both = learning_tasks(config).and_then(|learned| Ok((learned, evaluation_tasks(config)?)));
    match both {
        Ok((learned, measured)) => {
            let needs = |set: &TaskSet| set.tasks().iter().any(|task| task.repository.is_some());
            read.needs_actors = needs(&learned) || needs(&measured);
            let about = format!("{} to learn from, {} to measure on", learned.len(), measured.len());
            read.findings.push(match learned.len() {
                0 => Finding::wrong("tasks", about, "correct `task.split` and `task.path`"),
                _ => Finding::fine("tasks", about),
            });
        }
        Err(error) => read.findings.push(Finding::wrong(
            "tasks",
            with_causes(&error),
            "correct `task.path`; `wardian task validate --tasks PATH` says what is wrong with single tasks",
        )),
    }
}
