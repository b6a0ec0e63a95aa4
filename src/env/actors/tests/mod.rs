//! Episodes in actors that do what a test says.

mod controls;
mod images;
mod instances;
mod scripted;
mod trials;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use self::scripted::Scripted;
use super::{ActorEnvironment, ActorSettings, GroupStart, Workplace, WorkplaceConfig};
use crate::actor::image::ImageBuilder;
use crate::actor::{ActorCommand, ActorLimits, Ending, RootFs};
use crate::chat::{ParsedTurn, ToolCall};
use crate::env::{Environment as _, EpisodeStatus, StepResult};
use crate::grader::swebench::SwebenchBonus;
use crate::task::{Task, TaskOptions, TaskSet};

/// The file that verifiers leave their reward in.
const REWARD: &str = "/logs/verifier/reward.txt";

const FAILED: Ending = Ending::Exited { code: 1 };

const PLAIN: [(&str, &str); 3] = [
    ("task.toml", "[environment]\ndocker_image = \"a\"\n"),
    ("instruction.md", "Do it."),
    ("tests/test.sh", "judge"),
];
const SOLUTION: (&str, &str) = ("solution/solve.sh", "solve");

const STEPS: [(&str, &str); 5] = [
    (
        "task.toml",
        "[environment]\ndocker_image = \"a\"\n[[steps]]\nname = \"one\"\n[[steps]]\nname = \"two\"\n\
         [steps.healthcheck]\ncommand = \"healthy\"\nretries = 1\n",
    ),
    ("steps/one/instruction.md", "First."),
    ("steps/one/tests/test.sh", "judge"),
    ("steps/two/instruction.md", "Then."),
    ("steps/two/tests/test.sh", "judge"),
];

fn end(result: &StepResult) -> (bool, Option<f64>, Option<EpisodeStatus>) {
    (result.done, result.reward, result.status)
}

const FAILED_WITH_0: (bool, Option<f64>, Option<EpisodeStatus>) =
    (true, Some(0.0), Some(EpisodeStatus::Failed));
const OURS: (bool, Option<f64>, Option<EpisodeStatus>) =
    (true, None, Some(EpisodeStatus::InfraError));

fn late() -> Ending {
    Ending::TimedOut {
        limit: Duration::ZERO,
    }
}

/// Whether a command is a verifier.
fn is_verifier(command: &ActorCommand) -> bool {
    command
        .argv
        .last()
        .is_some_and(|last| last == "/tests/test.sh")
}

fn place(backend: &Arc<Scripted>) -> Arc<Workplace> {
    place_with(backend, Some(RootFs::Host), None, None)
}

fn place_with(
    backend: &Arc<Scripted>,
    root: Option<RootFs>,
    builder: Option<Arc<dyn ImageBuilder>>,
    repositories: Option<&Path>,
) -> Arc<Workplace> {
    let backend = Arc::clone(backend);
    Arc::new(Workplace::new(
        backend,
        WorkplaceConfig {
            root,
            builder,
            repositories: repositories.map(Path::to_owned),
            limits: ActorLimits::default(),
            artifacts: 100,
            max_actors: 1,
        },
    ))
}

/// Writes a task's files and reads it.
fn task(folder: &Path, files: &[(&str, &str)]) -> Task {
    for (name, text) in files {
        let path = folder.join(name);
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(path, text).unwrap();
    }
    let rows = files.iter().find(|(name, _)| name.ends_with(".jsonl"));
    let path = rows.map_or_else(|| folder.to_owned(), |(name, _)| folder.join(name));
    let tasks = TaskSet::open_with(&path, &TaskOptions::default()).unwrap();
    tasks.tasks()[0].clone()
}

fn environment(place: &Arc<Workplace>, task: &Task) -> ActorEnvironment {
    let repository = task.repository.clone().unwrap();
    let start = GroupStart::new(Arc::clone(place), repository, 1);
    let settings = ActorSettings {
        system_prompt: None,
        max_turns: 4,
        max_output_chars: 2000,
        command_timeout: Duration::from_secs(60),
        test_timeout: Duration::from_secs(60),
        bonus: SwebenchBonus::default(),
    };
    let task = Arc::new(task.clone());
    let mut environment = ActorEnvironment::new(task, Arc::new(start), Arc::new(settings));
    environment.reset().unwrap();
    environment
}

fn submit(environment: &mut ActorEnvironment) -> StepResult {
    let turn = ParsedTurn {
        tool_calls: vec![Ok(ToolCall::new("submit", json!({})))],
        ..ParsedTurn::default()
    };
    environment.step(&turn).unwrap()
}
