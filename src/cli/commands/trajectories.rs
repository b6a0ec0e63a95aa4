//! `wardian trajectories`: a run's episodes in the Agent Trajectory Interchange Format.

use std::path::{Path, PathBuf};

use anyhow::anyhow;
use clap::{Args, ValueEnum};
use fs_err as fs;

use crate::cli::ExitStatus;
use crate::cli::args::require_empty_folder;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::config::RunConfig;
use crate::trajectory::{AtifOrigin, AtifTrajectory, read_step, step_path, steps};

/// Arguments of `wardian trajectories`.
#[derive(Debug, Args)]
pub(in crate::cli) struct TrajectoriesArgs {
    /// Run folder, of a run that is done, stopped or still going
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Folder of the episodes, `step-N-row-N.json` each
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Steps whose episodes are written; all unless given
    #[arg(long, value_name = "N")]
    step: Vec<u64>,
    /// What they are written in
    #[arg(long, value_enum, default_value_t)]
    format: TrajectoryFormat,
}

/// A format of episodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum TrajectoryFormat {
    /// Agent Trajectory Interchange Format 1.8, as Harbor's tools read it
    #[default]
    Atif,
}

pub(in crate::cli) fn run(args: &TrajectoriesArgs, printer: &Printer) -> Outcome {
    let TrajectoryFormat::Atif = args.format;
    require_empty_folder(&args.out)?;
    let found = steps(&args.run).map_err(Failure::internal)?;
    if found.is_empty() {
        return Err(Failure::usage(anyhow!(
            "`{}` holds no episodes: it has no `rollouts/step-N.jsonl`; give the folder that `--out` of \
             `wardian train` named",
            args.run.display()
        )));
    }
    if let Some(missing) = args.step.iter().find(|step| !found.contains(step)) {
        let (first, last) = (found[0], found[found.len() - 1]);
        return Err(Failure::usage(anyhow!(
            "`{}` holds no episodes of step {missing}; there are those of {} from {first} to {last}",
            args.run.display(),
            found.len()
        )));
    }
    let chosen = (found.iter()).filter(|step| args.step.is_empty() || args.step.contains(step));
    let origin = origin(&args.run);
    fs::create_dir_all(&args.out).map_err(Failure::internal)?;
    let mut written = 0_u64;
    for step in chosen {
        let rows = read_step(&step_path(&args.run, *step)).map_err(Failure::internal)?;
        for (row, trajectory) in (1..).zip(rows) {
            let trajectory = trajectory.map_err(Failure::internal)?;
            let id = format!("step-{step}-row-{row}");
            let path = args.out.join(format!("{id}.json"));
            let document = AtifTrajectory::new(id, &trajectory, &origin);
            let text = serde_json::to_string(&document).map_err(Failure::internal)?;
            fs::write(path, text).map_err(Failure::internal)?;
            written += 1;
        }
    }
    printer.note(&format!("{written} episodes in {}", args.out.display()));
    Ok(ExitStatus::Success)
}

/// Returns the run's name, and its model's where its configuration can be read.
fn origin(run: &Path) -> AtifOrigin {
    let config = fs::read_to_string(run.join("run.toml")).ok();
    let config = config.and_then(|text| toml::from_str::<RunConfig>(&text).ok());
    AtifOrigin {
        session: (run.canonicalize().ok())
            .and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned())),
        model: config.map(|config| config.model.path),
    }
}
