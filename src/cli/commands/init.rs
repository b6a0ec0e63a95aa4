//! `wardian init`: an annotated run file for a recipe.

use std::io::Write as _;
use std::path::PathBuf;

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
    fn text(self) -> &'static str {
        match self {
            Self::MbppLora => include_str!("../../../examples/runs/mbpp-lora.toml"),
            Self::Humaneval => include_str!("../../../examples/runs/humaneval.toml"),
            Self::OwnTasks => include_str!("../../../examples/runs/own-tasks.toml"),
            Self::SweBench => include_str!("../../../examples/runs/swebench.toml"),
            Self::ExternalAgent => include_str!("../../../examples/runs/agent.toml"),
            Self::Harbor => include_str!("../../../examples/runs/harbor.toml"),
            Self::Openenv => include_str!("../../../examples/runs/openenv.toml"),
        }
    }
}

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
    let path = &args.out;
    let mut options = fs::OpenOptions::new();
    let file = options.write(true).create_new(true).open(path);
    let mut file = file.map_err(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => Failure::usage(anyhow!(
            "`{}` is there already; name another file by `--out`",
            path.display()
        )),
        _ => Failure::usage(error),
    })?;
    file.write_all(recipe.text().as_bytes())
        .map_err(Failure::internal)?;
    let path = path.display();
    printer.note(&format!(
        "Wrote {path}\nTry next    wardian doctor --config {path}\n            wardian train --config {path}"
    ));
    Ok(ExitStatus::Success)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RunConfig;

    #[test]
    fn every_recipe_is_a_whole_run_file_that_says_why() {
        for recipe in Recipe::value_variants() {
            let text = recipe.text();
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
