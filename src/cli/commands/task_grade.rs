//! `wardian task grade`: patches of SWE-bench's instances, judged in the heavy tier.

use std::path::PathBuf;
use std::time::Instant;

use clap::{Args, ValueEnum};

use crate::actor::bwrap::BwrapBackend;
use crate::actor::runsc::{RunscBackend, RunscOptions};
use crate::actor::{ActorBackend, ActorSpec, RootFs};
use crate::cli::ExitStatus;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::env::actors::{Controls, InstanceGrader, TEST_TIMEOUT};
use crate::grader::VerdictStatus;
use crate::grader::swebench::SwebenchBonus;
use crate::task::swebench::SwebenchInstance;

/// Arguments of `wardian task grade`.
#[derive(Debug, Args)]
pub(super) struct GradeArgs {
    /// Rows of SWE-bench: JSON, JSON Lines or parquet
    #[arg(long, value_name = "FILE")]
    instances: PathBuf,
    /// The instances to grade; all of the file unless given
    #[arg(long, value_name = "ID")]
    instance: Vec<String>,
    /// A folder with ID/testbed, the repository at its base, and ID/deps, what it needs
    #[arg(long, value_name = "FOLDER")]
    repositories: PathBuf,
    /// A patch: `gold`, `empty` or the path of a diff; may be given several times
    #[arg(long, value_name = "PATCH", default_value = "gold")]
    patch: Vec<String>,
    /// What keeps the tests in
    #[arg(long, value_enum, default_value_t)]
    backend: Backend,
}

/// The tiers that have a shell.
#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum Backend {
    /// gVisor on this machine; needs root
    #[default]
    Runsc,
    /// Namespaces of this machine's kernel, which are weaker
    Bwrap,
}

/// A patch that is graded: what it is called, and its text where it is not the reference.
struct Patch {
    name: String,
    text: Option<String>,
}

impl Patch {
    fn read(argument: &str) -> anyhow::Result<Self> {
        let (name, text) = match argument {
            "gold" => (argument.to_owned(), None),
            "empty" => (argument.to_owned(), Some(String::new())),
            path => {
                let path = PathBuf::from(path);
                let name = path.file_stem().unwrap_or_default().to_string_lossy();
                (name.into_owned(), Some(fs_err::read_to_string(&path)?))
            }
        };
        Ok(Self { name, text })
    }
}

pub(super) fn run(args: &GradeArgs, printer: &Printer) -> Outcome {
    let instances = SwebenchInstance::read_file(&args.instances).map_err(Failure::usage)?;
    for id in &args.instance {
        if !instances.iter().any(|instance| instance.instance_id == *id) {
            let error = anyhow::anyhow!("`{}` has no instance `{id}`", args.instances.display());
            return Err(Failure::usage(error));
        }
    }
    let patches = (args.patch.iter())
        .map(|patch| Patch::read(patch))
        .collect::<anyhow::Result<Vec<_>>>()
        .map_err(Failure::usage)?;
    let folder = fs_err::canonicalize(&args.repositories).map_err(Failure::usage)?;
    let backend: Box<dyn ActorBackend> = match args.backend {
        Backend::Runsc => {
            let backend = RunscBackend::open(&RunscOptions::default());
            Box::new(backend.map_err(Failure::usage)?)
        }
        Backend::Bwrap => Box::new(BwrapBackend::open(None).map_err(Failure::usage)?),
    };
    let controls = Controls::default();
    let mut is_graded = true;
    for instance in &instances {
        let id = &instance.instance_id;
        if !args.instance.is_empty() && !args.instance.contains(id) {
            continue;
        }
        let mut spec = ActorSpec::new(RootFs::Host);
        let place = folder.join(id);
        spec.mounts.push((place.join("testbed"), "/base".into()));
        if place.join("deps").is_dir() {
            spec.mounts.push((place.join("deps"), "/deps".into()));
        }
        for patch in &patches {
            let started = Instant::now();
            let text = patch.text.clone().unwrap_or_else(|| instance.reference());
            let grader = InstanceGrader {
                backend: backend.as_ref(),
                spec: &spec,
                instance,
                bonus: SwebenchBonus::default(),
                timeout: TEST_TIMEOUT,
                controls: &controls,
            };
            let grade = grader.grade(&text).map_err(Failure::internal)?;
            is_graded &= grade.verdict.status != VerdictStatus::InfraError;
            let seconds = (started.elapsed().as_secs_f64() * 1e3).round() / 1e3;
            printer
                .json(&serde_json::json!({
                    "instance": id,
                    "patch": patch.name,
                    "reward": grade.verdict.reward,
                    "status": grade.verdict.status,
                    "dropped": grade.dropped,
                    "seconds": seconds,
                }))
                .map_err(Failure::internal)?;
            let bad = grade
                .verdict
                .tests
                .iter()
                .find(|test| !test.message.is_empty());
            if let Some(test) = bad {
                printer.note(&format!(
                    "{id}, {}: {}: {}",
                    patch.name, test.name, test.message
                ));
            }
        }
    }
    Ok(if is_graded {
        ExitStatus::Success
    } else {
        ExitStatus::Failure
    })
}
