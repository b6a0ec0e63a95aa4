//! `wardian doctor`: what is fine here, what is wrong, and what mends it.
//!
//! Each check is a file of this folder and gives [`Finding`]s. All run at the same time, each with a bound on
//! its time, behind which it counts as wrong: a file system that hangs must not hang who asks why.
//! A run that is named narrows the checks to what it needs, and makes what it needs and does not find wrong
//! rather than a note.

mod actors;
mod clock;
mod cluster;
mod cpu;
mod disk;
mod finding;
mod gpu;
mod hub;
mod limits;
mod memory;
mod ports;
mod run_file;
mod runtime;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;

use self::finding::{Finding, State};
use super::setup;
use crate::cli::ExitStatus;
use crate::cli::args::{ConfigArgs, Format};
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::config::RunConfig;
use crate::engine::model::ModelConfig;

/// How long a look at this machine may take.
const LOCAL: Duration = Duration::from_secs(20);
/// How long reading the tasks may take, and starting an actor.
const SLOW: Duration = Duration::from_secs(60);
/// How long a server may take, with what is asked of it in turn.
const REMOTE: Duration = Duration::from_secs(20);

/// Arguments of `wardian doctor`.
#[derive(Debug, Args)]
pub(in crate::cli) struct DoctorArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Run folder that would be written, or the folder of run folders
    #[arg(long, value_name = "DIR", default_value = "runs")]
    out: PathBuf,
    /// Address that something is to listen at, such as 127.0.0.1:8000; may be repeated
    #[arg(long, value_name = "ADDRESS")]
    listen: Vec<String>,
    /// How to print what is found
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

impl DoctorArgs {
    /// Whether a run is named, to which the checks are narrowed.
    fn names_a_run(&self) -> bool {
        let ConfigArgs {
            config,
            model,
            tasks,
            seed: _,
            overrides,
        } = &self.config;
        config.is_some() || model.is_some() || tasks.is_some() || !overrides.is_empty()
    }

    /// The options that name the run, for a command that is to be typed.
    fn run_options(&self) -> String {
        let ConfigArgs {
            config,
            model,
            tasks,
            seed,
            overrides,
        } = &self.config;
        let one = [
            (
                "config",
                config.as_ref().map(|path| path.display().to_string()),
            ),
            ("model", model.clone()),
            ("tasks", tasks.clone()),
            ("seed", seed.map(|seed| seed.to_string())),
        ];
        let one = one
            .into_iter()
            .filter_map(|(name, value)| Some((name, value?)));
        let sets = overrides.iter().map(|set| ("set", set.clone()));
        one.chain(sets)
            .map(|(name, value)| format!(" --{name} {}", typed(&value)))
            .collect()
    }
}

/// Returns a word as it is typed in a shell.
fn typed(word: &str) -> String {
    let is_plain =
        |character: char| character.is_ascii_alphanumeric() || "-_./:=,+@%".contains(character);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// What the checks look at.
#[derive(Debug)]
struct Scope {
    /// The run, or the defaults where none is named or it cannot be read.
    config: RunConfig,
    /// Whether a run is named and can be read.
    has_run: bool,
    /// The run's options as they would be typed, each with a space before.
    options: String,
    out: PathBuf,
    listen: Vec<String>,
    /// Of a model that is here.
    model: Option<ModelConfig>,
    /// Whether tasks of the run need a shell or a repository.
    needs_actors: bool,
    /// The starter's files, which are there as long as this, where the run names them.
    _starter: Option<tempfile::TempDir>,
}

/// A check that runs on a thread of its own.
struct Check {
    name: &'static str,
    limit: Duration,
    /// What to do if it does not end in time.
    remedy: &'static str,
    run: fn(&Scope) -> Vec<Finding>,
}

const CHECKS: [Check; 11] = [
    Check {
        name: "cpu",
        limit: LOCAL,
        remedy: "try again on a machine with less to do",
        run: cpu::check,
    },
    Check {
        name: "memory",
        limit: LOCAL,
        remedy: "try again on a machine with less to do",
        run: memory::check,
    },
    Check {
        name: "disk",
        limit: LOCAL,
        remedy: "a file system does not answer: see `dmesg`, or name folders on another with `WARDIAN_CACHE`, \
                 `HF_HOME`, `TMPDIR` and `--out`",
        run: disk::check,
    },
    Check {
        name: "limits",
        limit: LOCAL,
        remedy: "try again on a machine with less to do",
        run: limits::check,
    },
    Check {
        name: "gpu",
        limit: SLOW,
        remedy: "the driver does not answer: see `nvidia-smi` and `dmesg`, and restart the machine",
        run: gpu::check,
    },
    Check {
        name: "runtime",
        limit: SLOW,
        remedy: "wardian runtime build",
        run: runtime::check,
    },
    Check {
        name: "hub",
        limit: REMOTE,
        remedy: "export HF_HUB_OFFLINE=1, where all files are in the cache",
        run: hub::check,
    },
    Check {
        name: "actors",
        limit: SLOW,
        remedy: "apt-get install --reinstall runsc bubblewrap",
        run: actors::check,
    },
    Check {
        name: "cluster",
        limit: REMOTE,
        remedy: "kubectl version",
        run: cluster::check,
    },
    Check {
        name: "ports",
        limit: REMOTE,
        remedy: "ss -ltnp",
        run: ports::check,
    },
    Check {
        name: "clock",
        limit: LOCAL,
        remedy: "timedatectl set-ntp true",
        run: clock::check,
    },
];

/// What is printed as JSON.
#[derive(Debug, Serialize)]
struct Report<'a> {
    version: &'static str,
    /// How many findings are wrong.
    wrong: usize,
    findings: &'a [Finding],
}

pub(in crate::cli) fn run(args: &DoctorArgs, printer: &Printer) -> Outcome {
    let (scope, mut findings) = scope(args);
    findings.extend(run_all(&CHECKS, &Arc::new(scope), printer));
    let wrong = (findings.iter())
        .filter(|finding| finding.state == State::Wrong)
        .count();
    if args.format == Format::Json {
        let report = Report {
            version: env!("CARGO_PKG_VERSION"),
            wrong,
            findings: &findings,
        };
        printer.json(&report).map_err(Failure::internal)?;
    } else {
        for finding in &findings {
            printer.data(&finding.text()).map_err(Failure::internal)?;
        }
        printer.note(&match wrong {
            0 => "\nNothing is wrong".to_owned(),
            1 => "\n1 thing is wrong".to_owned(),
            count => format!("\n{count} things are wrong"),
        });
    }
    Ok(match wrong {
        0 => ExitStatus::Success,
        _ => ExitStatus::Failure,
    })
}

/// Reads the run that is named, and what it names that is here.
fn scope(args: &DoctorArgs) -> (Scope, Vec<Finding>) {
    let mut scope = Scope {
        config: RunConfig::default(),
        has_run: false,
        options: args.run_options(),
        out: args.out.clone(),
        listen: args.listen.clone(),
        model: None,
        needs_actors: false,
        _starter: None,
    };
    if !args.names_a_run() {
        return (scope, Vec::new());
    }
    let slow = |scope, what: &str| {
        let about = format!("reading {what} took more than {SLOW:?}");
        let fix = "a file system does not answer: see `dmesg`, or take files from another";
        (scope, vec![Finding::wrong("run", about, fix)])
    };
    let config = args.config.clone();
    match within(SLOW, move || setup::resolve_apart(&config)) {
        None => slow(scope, "the run file"),
        Some(Ok(resolved)) => {
            scope.config = resolved.config;
            scope.has_run = true;
            scope._starter = resolved.scratch;
            let config = scope.config.clone();
            let read = within(SLOW, move || run_file::check(&config));
            let Some(read) = read else {
                return slow(scope, "the model and the tasks");
            };
            scope.model = read.model;
            scope.needs_actors = read.needs_actors;
            (scope, read.findings)
        }
        Some(Err(failure)) => {
            let fix = match &args.config.config {
                Some(file) => format!("edit `{}`: docs/run-file.md has all keys", file.display()),
                None => "give other options: docs/run-file.md has all keys of `--set`".to_owned(),
            };
            (scope, vec![Finding::wrong("run", failure.reason(), fix)])
        }
    }
}

/// Runs checks side by side, and returns their findings in order.
fn run_all(checks: &'static [Check], scope: &Arc<Scope>, printer: &Printer) -> Vec<Finding> {
    let started: Vec<_> = (checks.iter())
        .map(|check| {
            let scope = Arc::clone(scope);
            (check, Instant::now(), start(move || (check.run)(&scope)))
        })
        .collect();
    let mut findings = Vec::new();
    for (check, began, found) in started {
        printer.redraw(&format!("checking {}", check.name));
        let left = check.limit.saturating_sub(began.elapsed());
        match found.recv_timeout(left) {
            Ok(found) => findings.extend(found),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                let about = format!("did not end within {:?}", check.limit);
                findings.push(Finding::wrong(check.name, about, check.remedy));
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                let about = "the check itself failed, which is a fault of this program";
                let fix = "report it with the output of `wardian doctor -vv`";
                findings.push(Finding::wrong(check.name, about, fix));
            }
        }
    }
    printer.redraw("");
    findings
}

/// Starts work on a thread of its own, which nobody waits for in the end.
fn start<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> mpsc::Receiver<T> {
    let (sender, receiver) = mpsc::sync_channel(1);
    std::thread::spawn(move || {
        // Nobody listens once its time is over.
        let _ = sender.send(work());
    });
    receiver
}

/// Returns what work comes to, if it does within `limit`.
fn within<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    start(work).recv_timeout(limit).ok()
}

/// A scope for the tests of single checks: no run, and nothing that is here.
#[cfg(test)]
fn bare_scope() -> Scope {
    Scope {
        config: RunConfig::default(),
        has_run: false,
        options: String::new(),
        out: PathBuf::from("runs"),
        listen: Vec::new(),
        model: None,
        needs_actors: false,
        _starter: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_to_type_has_all_options_of_the_run() {
        #[derive(Debug, clap::Parser)]
        struct Typed {
            #[command(flatten)]
            args: DoctorArgs,
        }
        let words = [
            "doctor",
            "--config",
            "my runs/it's.toml",
            "--seed",
            "3",
            "--set",
            "trainer.steps=4",
            "--set",
            "rollout.agent.command=[\"python3\", \"a b.py\"]",
        ];
        let Typed { args } = clap::Parser::parse_from(words);
        let options = args.run_options();
        // A shell takes it apart into the words that were given.
        let shown = std::process::Command::new("sh")
            .args(["-c", &format!("printf '%s\\n'{options}")])
            .output()
            .expect("there is a shell");
        let shown = String::from_utf8(shown.stdout).unwrap();
        assert_eq!(shown.lines().collect::<Vec<_>>(), words[1..]);
    }

    const HANGING: [Check; 3] = [
        Check {
            name: "hangs",
            limit: Duration::from_millis(50),
            remedy: "wake it",
            run: |_| loop {
                std::thread::park();
            },
        },
        Check {
            name: "fails",
            limit: LOCAL,
            remedy: "none",
            run: |_| panic!("on purpose"),
        },
        Check {
            name: "ends",
            limit: LOCAL,
            remedy: "none",
            run: |_| vec![Finding::fine("ends", "in time")],
        },
    ];

    #[test]
    fn a_check_that_hangs_or_fails_is_wrong_and_holds_up_no_other() {
        let found = run_all(&HANGING, &Arc::new(bare_scope()), &Printer::new(true));
        let [hangs, fails, ends] = &found[..] else {
            panic!("{found:?}");
        };
        assert_eq!(
            (hangs.state, hangs.fix.as_deref()),
            (State::Wrong, Some("wake it"))
        );
        assert!(hangs.about.contains("within 50ms"), "{hangs:?}");
        assert_eq!(fails.state, State::Wrong);
        assert_eq!(ends.state, State::Fine);
    }
}
