//! `wardian init`: an annotated run file for a recipe.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use clap::{Args, ValueEnum};
use fs_err as fs;

use crate::cli::ExitStatus;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;

/// Arguments of `wardian init`.
#[derive(Debug, Args)]
pub(in crate::cli) struct InitArgs {
    /// What the run is to do; without it, the recipes are listed
    #[arg(value_enum)]
    recipe: Option<Recipe>,
    /// File to write; one that is there is never overwritten
    #[arg(long, value_name = "FILE", default_value = "run.toml")]
    out: PathBuf,
}

/// A run file to start from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Recipe {
    /// A model learns MBPP with LoRA and a Python tool
    MbppLora,
    #[value(help = "A model learns from MBPP and is measured on HumanEval")]
    Humaneval,
    /// A model learns tasks of your own, graded by tests or by a grader that you write
    OwnTasks,
    /// A model learns to mend issues of repositories, each in a sandbox with a shell
    SweBench,
    /// A model learns through an agent that is a program of its own
    ExternalAgent,
    /// A model works on tasks in Harbor's format, each in a sandbox with a shell
    Harbor,
    /// A model acts in an environment of another server, over OpenEnv's protocol
    Openenv,
}

impl Recipe {
    /// Returns the example that it is, and its text.
    fn example(self) -> (&'static str, &'static str) {
        macro_rules! example {
            ($name:literal) => {
                (
                    concat!("examples/runs/", $name),
                    include_str!(concat!("../../../examples/runs/", $name)),
                )
            };
        }
        match self {
            Self::MbppLora => example!("mbpp-lora.toml"),
            Self::Humaneval => example!("humaneval.toml"),
            Self::OwnTasks => example!("own-tasks.toml"),
            Self::SweBench => example!("swebench.toml"),
            Self::ExternalAgent => example!("agent.toml"),
            Self::Harbor => example!("harbor.toml"),
            Self::Openenv => example!("openenv.toml"),
        }
    }

    /// Returns the program that its run file starts, as the example names it, and its text.
    fn program(self) -> Option<(&'static str, &'static str)> {
        let minimal = include_str!("../../../examples/agents/minimal.py");
        matches!(self, Self::ExternalAgent).then_some(("examples/agents/minimal.py", minimal))
    }
}

/// What the program of a recipe is called beside the run file.
const PROGRAM: &str = "agent.py";

pub(in crate::cli) fn run(args: &InitArgs, printer: &Printer) -> Outcome {
    let Some(recipe) = args.recipe else {
        for recipe in Recipe::value_variants() {
            let value = recipe.to_possible_value();
            let value = value.ok_or_else(|| Failure::internal(anyhow!("a recipe has no name")))?;
            let help = value
                .get_help()
                .map(ToString::to_string)
                .unwrap_or_default();
            let line = format!("{:<15} {help}", value.get_name());
            printer.data(&line).map_err(Failure::internal)?;
        }
        printer.note("\n`wardian init RECIPE` writes its run.toml");
        return Ok(ExitStatus::Success);
    };
    let (example, text) = recipe.example();
    let path = args.out.display().to_string();
    let mut text = text.replace(example, &path);
    let mut written = path.clone();
    if let Some((program, its_text)) = recipe.program() {
        let beside = args.out.with_file_name(PROGRAM);
        let beside_text = beside.display().to_string();
        text = text.replace(program, &beside_text);
        if args.out.exists() {
            return Err(taken(&args.out));
        }
        write_new(&beside, its_text)?;
        written.push_str(" and ");
        written.push_str(&beside_text);
    }
    write_new(&args.out, &text)?;
    printer.note(&format!(
        "Wrote {written}\nTry next    wardian doctor --config {path}\n            wardian train --config {path}"
    ));
    Ok(ExitStatus::Success)
}

fn write_new(path: &Path, text: &str) -> Result<(), Failure> {
    let mut options = fs::OpenOptions::new();
    let file = options.write(true).create_new(true).open(path);
    let mut file = file.map_err(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => taken(path),
        _ => Failure::usage(error),
    })?;
    file.write_all(text.as_bytes()).map_err(Failure::internal)
}

fn taken(path: &Path) -> Failure {
    Failure::usage(anyhow!(
        "`{}` is there already; name another run file by `--out`, in another folder if need be",
        path.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RunConfig;

    #[test]
    fn every_recipe_is_a_whole_run_file_that_says_why() {
        for recipe in Recipe::value_variants() {
            let (example, text) = recipe.example();
            assert!(
                text.contains(example) || !text.contains("examples/runs"),
                "{recipe:?}"
            );
            if let Some((program, _)) = recipe.program() {
                assert!(text.contains(program), "{recipe:?}");
            }
            let config = RunConfig::from_toml::<&str>(text, &[]);
            let config = config.unwrap_or_else(|error| panic!("{recipe:?}: {error}"));
            assert!(!config.model.path.is_empty(), "{recipe:?}");
            let comments = text.lines().filter(|line| line.contains('#')).count();
            assert!(
                comments >= 4,
                "{recipe:?} has {comments} lines with comments"
            );
            assert!(text.starts_with("# "), "{recipe:?} does not say what it is");
        }
    }
}
